"""torch's own tests of torch.distributed.checkpoint, with its reader and with zckpt's in its place.

    python -m tests.peers.torch_suite TREE [--only GLOB] [--json FILE] [--without-gpus]

TREE is a source tree of torch, or its folder test/distributed/checkpoint; none of it is part of
this repository. The tests need `expecttest`. Each file runs twice in processes of its own, and
every test that passes with torch's reader is to pass with zckpt's, but for those in JUSTIFIED.

Most of torch's tests ask for GPUs. `--without-gpus` runs a copy of them for which the CPU is
enough: it reads `cpu` and `gloo` where they have `cuda` and `nccl`, and skips nothing. What cannot
do without a GPU fails with both readers.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from xml.etree import ElementTree

from .comparison import Results, ended, lost

ROOT = Path(__file__).parent.parent.parent
REPLACED = Path(__file__).parent / "replaced"
FOLDER = "test/distributed/checkpoint"
TIMEOUT = 1200.0  # seconds for one file

EXTENSION = (
    "an extension that the program gives as _extension_registry changes the items' bytes; zckpt "
    "refuses compressed and encrypted items by name"
)
JUSTIFIED = {
    f"test_file_system_checkpoint_cpu.py::TestDistributedStateDictSaveLoadRot13.{name}": EXTENSION
    for name in (
        "test_read_write_tensor_and_blob_thread_count_1",
        "test_read_write_tensor_and_blob_thread_count_2",
    )
}
"""Tests that pass with torch's reader alone, and why zckpt's is not to pass them."""


@dataclass
class Outcome(Results):
    """The results of one run; `loads` counts the loads by zckpt's reader."""

    loads: int = 0


@dataclass
class Comparison:
    """Both runs of all files."""

    torch: Outcome
    zckpt: Outcome

    def of(self, torch: str, zckpt: str) -> list[str]:
        """Tests that ended so with torch's reader and with zckpt's."""
        return ended(self.torch, self.zckpt, torch, zckpt)

    @property
    def lost(self) -> list[str]:
        """What only torch's reader passes."""
        return lost(self.torch, self.zckpt)

    @property
    def unjustified(self) -> list[str]:
        return [name for name in self.lost if name not in JUSTIFIED]

    def lines(self) -> Iterator[str]:
        yield f"{len(self.of('passed', 'passed'))} passed with both readers"
        yield f"{len(self.lost)} passed with torch's alone"
        yield f"{len(self.of('failed', 'passed'))} passed with zckpt's alone"
        yield f"{len(self.of('failed', 'failed'))} failed with both"
        yield f"{len(self.of('skipped', 'skipped'))} skipped"
        yield f"zckpt's reader was asked to load {self.zckpt.loads} times, in all processes"
        for name in self.lost:
            reason = JUSTIFIED.get(name) or self.zckpt.reasons.get(name, "no result")
            yield f"torch's alone: {name}: {reason}"


def files(tree: Path) -> dict[str, Path]:
    """The files of tests, by their path in the folder of tests."""
    folder = tree / FOLDER if (tree / FOLDER).is_dir() else tree
    found = sorted(folder.rglob("test_*.py"))
    if not found:
        raise SystemExit(f"{folder} holds no tests of torch.distributed.checkpoint")
    return {str(file.relative_to(folder)): file for file in found}


CPU = (
    (
        r"^\s*@(?:skip_if_lt_x_gpu|skip_unless_torch_gpu|requires_\w+|with_comms\(.*\"nccl\".*).*$",
        "",
    ),
    (r"cpu:gloo,cuda:nccl", "gloo"),
    (r"\.cuda\([^()]*\)", ".cpu()"),
    (r"\bcuda:\{[^}]*\}", "cpu"),
    (r"\bcuda\b", "cpu"),
    (r"\bnccl\b", "gloo"),
    (r"device_id=[^,)]*", 'device_id=torch.device("cpu")'),
)
"""What a test's text has where there are GPUs, and what it has where there are none."""

BEFORE = """
import functools
import torch
import torch.distributed.fsdp
import torch.testing._internal.distributed._shard.sharded_tensor as _sharded
_plain = torch.distributed.fsdp.FullyShardedDataParallel.__init__
def _on_cpu(self, *arguments, **options):
    _plain(self, *arguments, **{"device_id": torch.device("cpu"), **options})
torch.distributed.fsdp.FullyShardedDataParallel.__init__ = functools.wraps(_plain)(_on_cpu)
torch.accelerator.device_count = torch.cpu.device_count = lambda: 4
_sharded.with_comms = functools.partial(_sharded.with_comms, backend="gloo")
"""
"""What the copies begin with: FSDP1 wants a device, and helpers of torch skip by themselves."""


def copied(tree: Path, target: Path) -> Path:
    """A copy of the tests for which the CPU is enough."""
    for name, file in files(tree).items():
        text = file.read_text()
        for pattern, replacement in CPU:
            text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
        copy = target / FOLDER / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(BEFORE + text)
    return target


def run(file: Path, replaced: bool, outcome: Outcome) -> None:
    """Runs one file, and adds what its tests ended with."""
    with tempfile.TemporaryDirectory() as work:
        report, loads = Path(work) / "report.xml", Path(work) / "loads"
        loads.touch()
        above = [str(folder) for folder in file.parents if folder.name == "test"]
        paths = [str(REPLACED)] * replaced
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([*paths, str(ROOT), *above[:1], *sys.path]),
            "ZCKPT_PEER_LOADS": str(loads),
            "OMP_NUM_THREADS": "1",
        }
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "--tb=line",
            "--noconftest",
        ]
        command += ["-c", os.devnull, f"--rootdir={file.parent}", f"--junitxml={report}", str(file)]
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(command, cwd=work, env=environment, capture_output=True, timeout=TIMEOUT)
        outcome.loads += len(loads.read_text().splitlines())
        if not report.exists():
            outcome.tests[f"{file.name}::"] = "failed"
            outcome.reasons[f"{file.name}::"] = "no result"
            return
        for case in ElementTree.parse(report).iter("testcase"):
            group = (case.get("classname") or "").rpartition(".")[2]
            name = f"{file.name}::{group}.{case.get('name')}"
            bad = [each for each in case if each.tag in ("failure", "error")]
            skipped = any(each.tag == "skipped" for each in case)
            outcome.tests[name] = "failed" if bad else "skipped" if skipped else "passed"
            for each in bad:
                outcome.reasons[name] = " ".join((each.get("message") or "").split())[-300:]


def compare(tree: Path, only: str = "*", without_gpus: bool = False) -> Comparison:
    comparison = Comparison(Outcome(), Outcome())
    with tempfile.TemporaryDirectory() as copy:
        for name, file in files(copied(tree, Path(copy)) if without_gpus else tree).items():
            if fnmatch(name, only):
                run(file, False, comparison.torch)
                run(file, True, comparison.zckpt)
                so_far = f"{len(comparison.torch.tests)} tests so far, {len(comparison.lost)} lost"
                print(f"{name}: {so_far}", file=sys.stderr)
    return comparison


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("tree", type=Path, metavar="TREE")
    parser.add_argument("--only", default="*", help="names of files, as a glob")
    parser.add_argument("--json", type=Path, help="where to write every test's end")
    parser.add_argument("--without-gpus", action="store_true", help="run what asks for GPUs too")
    asked = parser.parse_args(words)
    comparison = compare(asked.tree, asked.only, asked.without_gpus)
    print("\n".join(comparison.lines()))
    if asked.json:
        ends = {"torch": comparison.torch.tests, "zckpt": comparison.zckpt.tests}
        reasons = {"torch": comparison.torch.reasons, "zckpt": comparison.zckpt.reasons}
        asked.json.write_text(json.dumps({"ends": ends, "reasons": reasons}, indent=1))
    return bool(comparison.unjustified)


if __name__ == "__main__":
    sys.exit(main())
