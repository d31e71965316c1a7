"""How a run is saved and loaded: each layout by the stock functions of torch that users call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch import distributed
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful

FULL = StateDictOptions(full_state_dict=True)
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Loading(NamedTuple):
    """Where and how `load` reads."""

    path: Path
    model: str = "model"  # the root key of the model's state dict; "" is none
    optim: str = "optim"
    reader: Callable[[str], dcp.StorageReader] | None = None  # by default torch's own


class Layout(NamedTuple):
    """`save(run, path, writer)`, and `load(run, loading)` on a fresh one."""

    save: Callable[[Any, Path, Mapping[str, Any]], None]
    load: Callable[[Any, Loading], None]


def write(state: dict[str, Any], path: Path, options: Mapping[str, Any]) -> None:
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path, **options))


def read(state: dict[str, Any], loading: Loading) -> None:
    path = str(loading.path)
    # The default planner drops ShardedTensors without a local shard, takes the checkpoint for
    # one of torch 2.3, and misses `optim.param_groups.` (torch 2.13).
    dcp.load(
        state,
        storage_reader=loading.reader(path) if loading.reader else dcp.FileSystemReader(path),
        planner=dcp.DefaultLoadPlanner(flatten_sharded_tensors=False),
    )


def state_dicts(run: Any, options: StateDictOptions | None = None) -> dict[str, Any]:
    model, optim = get_state_dict(run.model, run.optimizer, options=options)
    return {"model": model, "optim": optim}


def set_state_dicts(
    run: Any, model: Any, optim: Any, options: StateDictOptions | None = None
) -> None:
    set_state_dict(
        run.model, run.optimizer, model_state_dict=model, optim_state_dict=optim, options=options
    )


def rooted(states: dict[str, Any], loading: Loading) -> dict[str, Any]:
    """The two state dicts under the keys that were asked for."""
    model = {loading.model: states["model"]} if loading.model else states["model"]
    return {**model, loading.optim: states["optim"]}


def save_nested(run: Any, path: Path, writer: Mapping[str, Any]) -> None:
    write(state_dicts(run), path, writer)


def load_nested(run: Any, loading: Loading) -> None:
    states = state_dicts(run)
    read(rooted(states, loading), loading)
    set_state_dicts(run, **states)


def save_flat(run: Any, path: Path, writer: Mapping[str, Any]) -> None:
    write(state_dicts(run, FLAT), path, writer)


def load_flat(run: Any, loading: Loading) -> None:
    states = state_dicts(run, FLAT)
    state = rooted(states, loading)
    read(state, loading)
    # dcp.load puts new values into the dictionaries that it was given.
    set_state_dicts(run, **states, options=FLAT)


def save_raw(run: Any, path: Path, writer: Mapping[str, Any]) -> None:
    state = {"model": run.model.state_dict(), "optim": run.optimizer.state_dict()}
    write(state, path, writer)


def load_raw(run: Any, loading: Loading) -> None:
    state_dicts(run)  # one step without effect, so that there is a state to load into
    states = {"model": run.model.state_dict(), "optim": run.optimizer.state_dict()}
    read(rooted(states, loading), loading)
    run.model.load_state_dict(states["model"])
    run.optimizer.load_state_dict(states["optim"])


def save_full(run: Any, path: Path, writer: Mapping[str, Any]) -> None:
    states = state_dicts(run, FULL)
    if distributed.get_rank() == 0:
        path.mkdir(parents=True)
        for name, state in states.items():
            torch.save(state, path / f"{name}.pt")


def load_full(run: Any, loading: Loading) -> None:
    set_state_dicts(run, *load_files(loading.path), options=FULL)


def load_files(path: Path) -> list[Any]:
    return [torch.load(path / f"{name}.pt", weights_only=True) for name in ("model", "optim")]


def save_one_file(run: Any, path: Path, writer: Mapping[str, Any]) -> None:
    if distributed.get_rank() == 0:
        path.mkdir(parents=True)
        states = {
            "model": run.module.state_dict(),
            "optimizer": run.optimizer.state_dict(),
            "epoch": 1,
        }
        torch.save(states, path / "checkpoint.pt")


def load_one_file(run: Any, loading: Loading) -> None:
    states = torch.load(loading.path / "checkpoint.pt", weights_only=True)
    run.module.load_state_dict(states["model"])
    run.optimizer.load_state_dict(states["optimizer"])


LAYOUTS = {
    "nested": Layout(save_nested, load_nested),
    "flat": Layout(save_flat, load_flat),
    "raw": Layout(save_raw, load_raw),
    "full": Layout(save_full, load_full),
    "one file": Layout(save_one_file, load_one_file),
}
