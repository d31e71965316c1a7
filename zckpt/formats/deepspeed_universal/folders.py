"""The tensors of a universal directory: a folder per parameter, a file per state."""

from __future__ import annotations

import os
from collections.abc import Sequence
from math import prod
from typing import Any

from ...core.inert import Scalar
from ...core.manifest import Sighting, slot_name
from ...errors import (
    CorruptCheckpoint,
    IncompleteCheckpoint,
    InconsistentCheckpoint,
)
from ...files.torchfile import Tensor, TorchFile
from ...training import steps
from ..deepspeed_states.directories import (
    listed,
)
from ..deepspeed_states.flats import Flat, Slot
from ..deepspeed_states.states import open_files
from .files import MASTER, VIEW, ZERO, SliceInfo, is_name
from .merged import Merged


class Folders:
    """The tensors below zero/: a folder per parameter, a file per state."""

    def __init__(self, merged: Merged) -> None:
        self.merged = merged
        self.root = os.path.join(merged.place.directory, ZERO)
        self.shapes = merged.shapes()
        self.about: dict[str, SliceInfo] = {}
        self.left_out: list[str] = []
        names = [name for held in self.shapes for name in held]
        self.paths = {name: self._listed(name) for name in names}
        paths = [path for held in self.paths.values() for path in held]
        self.files = open_files([*paths, *self._copies(set(names))], {})
        self.by_path = {file.path: file for file in self.files}

    def _listed(self, name: str) -> list[str]:
        """A parameter's files, its master first."""
        if not is_name(name):
            raise CorruptCheckpoint(
                f"{self.merged.models[0].path} names a parameter {name!r}, which is no folder name"
            )
        folder = os.path.join(self.root, name)
        found = [
            os.path.join(folder, held)
            for held in (sorted(os.listdir(folder)) if os.path.isdir(folder) else ())
            if held.endswith(".pt")
        ]
        master = os.path.join(folder, f"{MASTER}.pt")
        if master not in found:
            raise IncompleteCheckpoint(
                f"{self.root} lacks {os.path.join(name, MASTER)}.pt",
                hint="the conversion did not finish, or model files of another save were copied",
            )
        return [master, *(path for path in found if path != master)]

    def _copies(self, known: set[str]) -> list[str]:
        """What the converter puts here of frozen weights and buffers; nothing else may be here."""
        found = []
        for name in sorted(set(os.listdir(self.root)) - known):
            folder = os.path.join(self.root, name)
            held = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
            states = [file for file in held if file.endswith(".pt") and file != f"{MASTER}.pt"]
            if states:
                raise InconsistentCheckpoint(
                    f"{folder} holds {listed(states)} of a parameter that the model states do not "
                    "list"
                )
            found += [os.path.join(folder, file) for file in held if file == f"{MASTER}.pt"]
        return found

    def flats(self, step_policy: str | None) -> list[Flat]:
        """One per parameter, in the user's order; what they share stands at the first."""
        found = []
        for place, held in enumerate(self.shapes):
            group = self.merged.group_of(place)
            told, sightings, kept = self._steps(place, group, list(held), step_policy)
            for name, shape in held.items():
                slots, scalars, whole = self._slots(name, shape)
                warnings: list[str] = []
                if kept and sightings:
                    stalled = [
                        steps.stalled(line.step, kept["type"], line.where) for line in sightings
                    ]
                    warnings = [warning for warning in stalled if warning]
                found.append(
                    Flat(
                        group,
                        {name: whole},
                        slots,
                        told.get(name),
                        kept,
                        scalars,
                        sightings,
                        (),
                        warnings,
                    )
                )
                sightings = []
        return found

    # -- tensors

    def _slots(
        self, name: str, shape: tuple[int, ...]
    ) -> tuple[list[Slot], dict[str, Scalar], tuple[int, ...]]:
        """A parameter's slots, the numbers kept for it, and its shape."""
        slots: list[Slot] = []
        scalars: dict[str, Scalar] = {}
        for path in self.paths[name]:
            file, key = self.by_path[path], os.path.basename(path).removesuffix(".pt")
            if key == "step":
                continue
            tensor, about = self._tensor(file)
            if key == MASTER:
                shape = self._shape(name, shape, file, tensor, about)
            if not isinstance(tensor, Tensor):
                scalars[key] = Scalar(tensor, type(tensor).__name__)
                continue
            if shape and not tensor.shape:
                scalars[key] = file.scalar(tensor)
                continue
            if about is None:
                tensor = self._unpadded(tensor, shape)
            if tensor.numel != prod(shape) or not (
                tensor.shape == shape or about is None or VIEW in about
            ):
                raise InconsistentCheckpoint(
                    f"{file.path} has shape {list(tensor.shape)}, the parameter {list(shape)}"
                )
            slot = "master" if key == MASTER else slot_name(key)
            slots.append(Slot(slot, tensor.dtype, {name: file.fragments(tensor)}))
        return slots, scalars, shape

    def _unpadded(self, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
        """A flat tensor without the tail that converters before 0.19 leave at small parameters."""
        numel, dp = prod(shape), self.merged.dp
        longer = tensor.contiguous and numel < tensor.numel <= dp * -(-numel // dp)
        return tensor.part(0, numel) if longer else tensor

    def _tensor(self, file: TorchFile) -> tuple[Any, SliceInfo | None]:
        """The tensor (or number) in a file, and what stands beside it; None where it is alone."""
        value = file.value
        about = None
        if isinstance(value, dict):
            about = {
                str(key): held
                for key, held in value.items()
                if key != "param" and not isinstance(held, Tensor)
            }
            value = value.get("param")
        if not isinstance(value, (Tensor, bool, int, float)):
            raise CorruptCheckpoint(f"{file.path} holds no tensor")
        return value, about

    def _shape(
        self,
        name: str,
        stated: tuple[int, ...],
        file: TorchFile,
        tensor: Any,
        about: SliceInfo | None,
    ) -> tuple[int, ...]:
        """The whole parameter's shape; raises InconsistentCheckpoint where files contradict."""
        if not isinstance(tensor, Tensor):
            raise CorruptCheckpoint(f"{file.path} holds no tensor")
        if about is None:
            return stated  # a flat tensor does not know
        if about != {"cat_dim": 0} or self.merged.partitioned:
            self.about[name] = about
        if VIEW in about and tensor.numel == prod(stated):
            return stated
        if self.merged.whole and tensor.shape != stated:
            if not about.get("vocab_tensor"):
                raise InconsistentCheckpoint(
                    f"{file.path} has shape {list(tensor.shape)}, the model states say "
                    f"{list(stated)}"
                )
            self.merged.model["module"].pop(name, None)  # still has the rows
            self.left_out.append(f"rows of {name} that fill up the vocabulary")
        return (tensor.numel,) if VIEW in about and len(stated) == 1 else tensor.shape

    # -- steps

    def _steps(
        self, place: int, group: int, names: Sequence[str], policy: str | None
    ) -> tuple[dict[str, steps.Step], list[Sighting], dict[str, Any] | None]:
        """Steps by name, every place that tells one, and where and in what type the truth stood."""
        merged = self.merged
        common = merged.flat_states(place)[0].get("step")
        in_group = merged.groups(group)[0].get("step")
        told: dict[str, steps.Step] = {}
        kept: dict[str, Any] | None = None
        for name in names:
            file = self.by_path.get(os.path.join(self.root, name, "step.pt"))
            held = self._tensor(file)[0] if file else common
            value = _number(file or merged.optimizers[0], held)
            if (step := steps.step_of(value)) is not None:
                told[name] = step
                kept = kept or _kept("state", held, value)
        if policy and (step := steps.agree(list(told.items()), policy)) is not None:
            told = dict.fromkeys(told, step)
        sightings = []
        for step in dict.fromkeys(told.values()):
            with_it = [name for name in names if told.get(name) == step]
            whose = f"group {group}" if len(with_it) == len(names) else listed(with_it)
            sightings.append(Sighting(f"step of {whose}", step, True))
        value = _number(merged.optimizers[0], in_group)
        if (step := steps.step_of(value)) is not None:
            sightings.append(Sighting(f"param_groups[{group}]", step, not told))
            if not told:
                return dict.fromkeys(names, step), sightings, _kept("group", in_group, value)
        return told, sightings, kept


def _number(file: TorchFile, held: Any) -> Any:
    """`held`, a tensor of one element by value."""
    return file.scalar(held) if isinstance(held, Tensor) and held.numel == 1 else held


def _kept(where: str, held: Any, value: Any) -> dict[str, Any]:
    """Where a step stood, and in what type (flats.py)."""
    kept: dict[str, Any] = {"in": where, "type": steps.kind_of(value)}
    if isinstance(held, Tensor) and held.shape:
        kept["shape"] = list(held.shape)
    return kept
