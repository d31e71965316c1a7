"""Real PyTorch trainings on this machine's processor: FSDP2, FSDP1, plain, over gloo.

python -m tests.engines.torch_engine --list
python -m tests.engines.torch_engine CASE WORLD DIR   trains one case into DIR
python -m tests.engines.torch_engine --all DIR        trains each case into DIR/<case>_w<world>

The global batch is the same at every world size, so are the losses, but for rounding.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .deepspeed import EngineError, submit
from .torch_cases import CASES, Case


def train(case: Case, world: int, root: Path, *, losses: int = 5) -> Path:
    """Trains `case`, saves it in `root`/run and what it held in `root`/oracle.pt."""
    root.mkdir(parents=True, exist_ok=True)
    submit("torch_rank", "train", world, (case, world, root.resolve(), losses), root)
    return root / "run"


def resume(
    engine: str,
    checkpoint: Path,
    world: int,
    root: Path,
    *,
    case: Case = CASES["fsdp2_dcp"],
    layout: str | None = None,
    storage_reader: str | None = None,
    reader_options: Mapping[str, Any] | None = None,
    losses: int = 5,
    **loading: Any,
) -> dict[str, Any]:
    """What a new run of `engine` holds after loading `checkpoint`, and its next losses.

    The run is that of `case` (model, optimizer, groups, scheduler, steps already done) with other
    random weights. `layout` says how it is loaded, by default as the case was saved;
    `storage_reader` is a dotted name, `package.module.Class`, called with the path and
    `reader_options` in each rank; `loading` are fields of `torch_layouts.Loading`: the root keys
    `model` and `optim`. Raises EngineError with torch's message.
    """
    root.mkdir(parents=True, exist_ok=True)
    resumed = dataclasses.replace(case, engine=engine, layout=layout or case.layout)
    output = root.resolve() / "resumed.pt"
    reader = (storage_reader, dict(reader_options or {})) if storage_reader else None
    arguments = (resumed, world, checkpoint.resolve(), loading, reader, output, losses)
    submit("torch_rank", "resume", world, arguments, root)
    recorded: dict[str, Any] = torch.load(output, weights_only=False)
    return recorded


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("case", nargs="?", choices=CASES, metavar="CASE")
    parser.add_argument("world", nargs="?", type=int, metavar="WORLD")
    parser.add_argument("directory", nargs="?", type=Path, metavar="DIR")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--all", type=Path, metavar="DIR")
    arguments = parser.parse_args()
    if arguments.list:
        for case in CASES.values():
            print(f"{case.name:24} {case.engine:12} {case.layout:12} worlds {case.worlds}")
    elif arguments.all:
        for case in CASES.values():
            for world in case.worlds:
                print_training(case, world, arguments.all / f"{case.name}_w{world}")
    elif arguments.directory:
        print_training(CASES[arguments.case], arguments.world, arguments.directory)
    else:
        parser.print_help()


def print_training(case: Case, world: int, root: Path) -> None:
    started = time.monotonic()
    try:
        train(case, world, root)
        outcome = "ok"
    except EngineError as error:
        outcome = str(error)
    print(f"{case.name:24} {world} {time.monotonic() - started:6.1f} s  {outcome}", flush=True)


if __name__ == "__main__":
    main()
