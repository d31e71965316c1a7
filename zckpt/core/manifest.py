"""Where every element of every tensor of a checkpoint lives.

Manifest    one checkpoint: entries, parameters, groups, and everything that is not a tensor
Entry       one whole tensor, `parameter/slot`, wherever its pieces are
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from .dtypes import NUMBERS, SIZES
from .fragments import Fragments, Record
from .inert import PYTHON_NUMBERS, Scalar, from_json, to_json

RESERVED_SLOTS = frozenset({"model", "param", "master", "state", "manifest"})


@dataclass(frozen=True, slots=True)
class Entry:
    """One whole tensor; `digest` is the CRC-32 of its row-major little-endian bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    fragments: Fragments
    digest: int | None = None

    @property
    def parameter(self) -> str:
        return self.name.rpartition("/")[0]

    @property
    def slot(self) -> str:
        return self.name.rpartition("/")[2]

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def length(self) -> int:
        """Bytes."""
        return self.numel * SIZES[self.dtype]


@dataclass(frozen=True, slots=True)
class Parameter:
    """What is known of a parameter beside its tensors.

    `step` is completed updates, None where the optimizer keeps none; `scalars` are its states of
    one number other than the step, Python's or tensors of another shape than the parameter;
    `group` is its place in the manifest's groups, None where frozen.
    """

    shape: tuple[int, ...]
    trainable: bool = True
    group: int | None = None
    step: float | int | None = None
    scalars: dict[str, Scalar] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()


def parameters_to_json(parameters: Mapping[str, Parameter]) -> dict[str, Any]:
    """As a universal manifest and a proof hold them."""
    return {
        name: {
            "shape": list(held.shape),
            "trainable": held.trainable,
            "group": held.group,
            "step": held.step,
            "scalars": {key: _scalar_to_json(scalar) for key, scalar in held.scalars.items()},
            "aliases": list(held.aliases),
        }
        for name, held in parameters.items()
    }


def parameters_from_json(made: Mapping[str, Any]) -> dict[str, Parameter]:
    """What `parameters_to_json` was given; raises KeyError, TypeError or the like for others."""
    return {
        name: Parameter(
            tuple(item["shape"]),
            item["trainable"],
            item["group"],
            item["step"],
            {key: _scalar_from_json(scalar) for key, scalar in item.get("scalars", {}).items()},
            tuple(item.get("aliases", ())),
        )
        for name, item in made.items()
    }


def _scalar_to_json(scalar: Scalar) -> dict[str, Any]:
    """Without a `shape` where it has none, as all were before zckpt kept shapes."""
    shape = {"shape": list(scalar.shape)} if scalar.shape else {}
    return {"value": to_json(scalar.value), "dtype": scalar.dtype, **shape}


def _scalar_from_json(made: Mapping[str, Any]) -> Scalar:
    scalar = Scalar(from_json(made["value"]), made["dtype"], tuple(made.get("shape", ())))
    if scalar.dtype not in PYTHON_NUMBERS and scalar.dtype not in NUMBERS:
        raise ValueError(f"a number of type {scalar.dtype!r}")
    if any(size != 1 for size in scalar.shape):
        raise ValueError(f"a number of shape {list(scalar.shape)}")
    return scalar


@dataclass(frozen=True, slots=True)
class Sighting:
    """One place that holds a step; `truth` where this optimizer reads it from."""

    where: str
    step: float | int
    truth: bool


@dataclass(frozen=True, slots=True)
class Sibling:
    """A file of a trainer's directory that is no part of the checkpoint itself."""

    name: str
    path: str
    size: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """One checkpoint. Parameters stand in optimizer order, then frozen ones; buffers follow.

    `source` says which engine wrote it: format, version, zero_stage, dp, tag. `state` is everything
    that is no tensor (inert values; tensors in it are `TensorName`s of entries with slot `state`).
    `replicas` are further copies of entries in the same files, which writers fill too.
    `left_out` names what has no meaning outside the source, `warnings` what a user should know.
    `inferred` are parameters whose names no file states: a number got one by its place.
    """

    root: str
    format: str
    source: dict[str, Any]
    entries: dict[str, Entry]
    parameters: dict[str, Parameter]
    buffers: tuple[str, ...] = ()
    groups: tuple[dict[str, Any], ...] | None = None
    optimizer: str | None = None
    state: dict[str, Any] = field(default_factory=dict)
    steps: tuple[Sighting, ...] = ()
    records: tuple[Record, ...] = ()
    replicas: tuple[Entry, ...] = ()
    files: tuple[str, ...] = ()
    siblings: tuple[Sibling, ...] = ()
    left_out: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    inferred: tuple[str, ...] = ()

    @property
    def dp(self) -> int:
        """Data-parallel size of the source; 1 where ranks have no meaning."""
        return int(self.source.get("dp") or 1)

    @property
    def step(self) -> float | int | None:
        """Completed updates, where all parameters that have a step share one."""
        steps = {item.step for item in self.parameters.values() if item.step is not None}
        return steps.pop() if len(steps) == 1 else None

    @property
    def slots(self) -> dict[str, list[Entry]]:
        """The entries of every slot, in manifest order."""
        found: dict[str, list[Entry]] = {}
        for entry in self.entries.values():
            found.setdefault(entry.slot, []).append(entry)
        return found


def slot_name(key: str) -> str:
    """An optimizer's state key as a slot: itself, or escaped (`Exp-Avg` -> `esc__45xp_2d_41vg`)."""
    plain = re.fullmatch(r"[a-z0-9_]+", key) and not key.startswith("esc_")
    if plain and key not in RESERVED_SLOTS:
        return key
    return "esc_" + re.sub(
        rb"[^a-z0-9]", lambda found: b"_%02x" % found[0][0], key.encode("utf-8", "surrogatepass")
    ).decode("ascii")


def slot_key(slot: str) -> str:
    """The state key that `slot_name` was given."""
    if not slot.startswith("esc_"):
        return slot
    escaped = slot.removeprefix("esc_").encode("ascii")
    return re.sub(rb"_([0-9a-f]{2})", lambda found: bytes([int(found[1], 16)]), escaped).decode(
        "utf-8", "surrogatepass"
    )
