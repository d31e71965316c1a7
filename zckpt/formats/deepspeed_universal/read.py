"""Reads DeepSpeed's own universal checkpoints: their manifest and tensors.

A parameter has a folder below zero/ with a file for each of its states.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

from ...core.checkpoint import agreement
from ...core.checkpoint.facts import StepPlace
from ...core.checkpoint.inert import Scalar, to_json
from ...core.checkpoint.manifest import Manifest, Sighting, slot_name
from ...core.grouping import by_key
from ...core.storage import sources
from ...core.storage.inventory import ANY, missing_file, refuse_others, saved_names
from ...errors import (
    MALFORMED,
    CorruptCheckpoint,
    InconsistentCheckpoint,
    Notice,
    ZckptError,
    listed,
    not_understood,
    note,
    warning,
)
from ...files.torchfile import Parsed, Tensor, TorchFile
from ...training import steps
from ...training.faults import LOST_STEPS
from ..deepspeed_states.directories import TagDirectory
from ..deepspeed_states.manifest import manifest_of, with_files
from ..deepspeed_states.states import BufferSlot, FlatBuffer, open_files
from ..reading import USUAL, Reading
from ..weights_alone import is_of_files, weights_or_raise
from .files import CUTS, KIND, MASTER, VIEW, ZERO, SliceInfo, is_name
from .merged import MergedStates
from .slicing import cuts_of


def read(path: str, reading: Reading = USUAL) -> Manifest:
    """Reads a universal directory, or the latest one in a run's directory.

    If steps differ within a group, the user must give a step policy. Raises NotACheckpoint,
    AmbiguousCheckpoint, IncompleteCheckpoint, InconsistentCheckpoint (shapes or steps differ),
    CorruptCheckpoint and UnsupportedCheckpoint (MoE).
    """
    directory = KIND.locate(path, reading.tag)
    try:
        try:
            return _manifest(directory, reading.step_policy)
        except ZckptError as error:
            if not is_of_files(error, is_of_optimizer):
                raise
            rest = partial(_manifest, directory, reading.step_policy, weights_alone=True)
            return weights_or_raise(error, lambda _: rest(), path, reading)
    except MALFORMED as error:
        raise not_understood(directory.path, error) from error


def is_of_optimizer(file: str) -> bool:
    """Whether a file below zero/ has an optimizer state; only fp32.pt has none."""
    folder, name = os.path.split(file)
    return os.path.basename(os.path.dirname(folder)) == ZERO and name != f"{MASTER}.pt"


def _manifest(
    directory: TagDirectory, step_policy: str | None, weights_alone: bool = False
) -> Manifest:
    merged = MergedStates(directory)
    folders = ParameterFolders(merged, weights_alone)
    manifest = manifest_of(
        merged.states,
        folders.buffers(step_policy),
        "deepspeed-universal",
        merged.states.effective_config(round_robin=False),
        merged.module_dtype,
    )
    state = manifest.state
    if folders.infos or not merged.is_whole:
        slicing = {"model_parallel": len(merged.tops), "files": folders.infos}
        state = {**state, "universal": slicing}
    shapes = {name: parameter.shape for name, parameter in manifest.parameters.items()}
    if not merged.is_whole:
        state = {**state, "module": []}  # these are names of a rank's shard
    told = manifest.notices
    return with_files(manifest, [*merged.other_models, *folders.files]).replace(
        tensor_parallel=cuts_of(merged.states.first.get(CUTS), merged.patterns, shapes),
        state=state,
        layout={**manifest.files.layout, **folders.layout},
        omitted=(*told.omitted, *merged.omitted, *folders.omitted),
        warnings=(
            *told.warnings, *merged.warnings(), *merged.unclear, *_missing_steps(manifest)
        ),
        notes=tuple(merged.notes),
    )  # fmt: skip


def _missing_steps(manifest: Manifest) -> list[Notice]:
    """A warning if Adam's states have no step.

    Before 0.14.1, DeepSpeed's converter kept the step only if the optimizer stores it in the param
    groups.
    """
    names = {entry.parameter for entry in manifest.slots.get("exp_avg_sq", ())}
    if not any(not manifest.parameters[name].step for name in names):
        return []
    return [warning("step-missing", f"{LOST_STEPS.message}; {LOST_STEPS.hint}")]


# -- the tensors


class ParameterFolders:
    """Reads the tensors below zero/, where each parameter has a folder with a file per state."""

    def __init__(self, merged: MergedStates, weights_alone: bool) -> None:
        self.merged, self.weights_alone = merged, weights_alone
        self.root = os.path.join(merged.states.directory.path, ZERO)
        self.shapes = merged.shapes()
        self.infos: dict[str, SliceInfo] = {}
        self.layout: dict[str, dict[str, Any]] = {}
        self.omitted: list[Notice] = []
        names = [name for shapes in self.shapes for name in shapes]
        self.paths = {name: self._listed(name) for name in names}
        paths = [path for files in self.paths.values() for path in files]
        self.files = open_files([*paths, *self._copies(set(names))], Parsed())
        self.by_path = {file.path: file for file in self.files}
        for paths_of_name in self.paths.values():
            self._refuse_swapped(paths_of_name)

    def _listed(self, name: str) -> list[str]:
        if not is_name(name):
            raise CorruptCheckpoint(
                "unsafe-name",
                f"{self.merged.states.models[0].path} names a parameter {name!r}, which "
                "cannot be a folder's name",
                file=self.merged.states.models[0].path,
                subject=name,
            )
        folder = os.path.join(self.root, name)
        paths = [
            os.path.join(folder, file)
            for file in (sorted(os.listdir(folder)) if sources.is_folder(folder) else ())
            if file.endswith(".pt")
        ]
        master = os.path.join(folder, f"{MASTER}.pt")
        if master not in paths:
            raise missing_file(
                master,
                hint="the conversion did not finish, or model files of another save were copied",
            )
        return [master, *(path for path in paths if path != master and not self.weights_alone)]

    def _refuse_swapped(self, paths: Sequence[str]) -> None:
        folders = {path: self.by_path[path].saved_as for path in paths}
        refuse_others(saved_names((ANY,), folders), "states")

    def _copies(self, names: set[str]) -> list[str]:
        """The fp32.pt files in folders of other tensors than `names`: frozen weights and buffers.

        `names` are the parameters that the model files list. Raises InconsistentCheckpoint if such
        a folder has optimizer states.
        """
        paths = []
        for name in sorted(set(os.listdir(self.root)) - names):
            folder = os.path.join(self.root, name)
            files = sorted(os.listdir(folder)) if sources.is_folder(folder) else []
            states = [file for file in files if file.endswith(".pt") and file != f"{MASTER}.pt"]
            if states:
                raise InconsistentCheckpoint(
                    "mixed-saves",
                    f"{folder} holds {listed(states)} of a parameter that the model files do not "
                    "list",
                    file=folder,
                )
            paths += [os.path.join(folder, file) for file in files if file == f"{MASTER}.pt"]
        return paths

    def buffers(self, step_policy: str | None) -> list[FlatBuffer]:
        """One `FlatBuffer` per parameter, in the order of the user's optimizer.

        DeepSpeed counts updates per group (in stage 3: per sub-group). The first buffer of a group
        lists all places where files state the group's step, and warnings about the step. The
        group's other buffers list none.
        """
        buffers = []
        for place, shapes in enumerate(self.shapes):
            group = self.merged.group_of(place)
            steps_by_name, sightings, step_place = self._steps(
                place, group, list(shapes), step_policy
            )
            kind = step_place.kind if step_place else ""
            stalled = [steps.stalled(line.step, kind, line.where) for line in sightings]
            of_first = sightings, list(filter(None, stalled))
            for name, shape in shapes.items():
                slots, scalars, whole = self._slots(name, shape)
                fields_of_buffer = (
                    {name: whole},
                    slots,
                    steps_by_name.get(name),
                    step_place,
                    scalars,
                )
                buffers.append(FlatBuffer(group, *fields_of_buffer, *of_first))
                of_first = [], []
        return buffers

    # -- tensors

    def _slots(
        self, name: str, shape: tuple[int, ...]
    ) -> tuple[list[BufferSlot], dict[str, Scalar], tuple[int, ...]]:
        """Reads a parameter's files: its master and states, states of one number, its full shape.

        `shape` is the shape in the model files, maybe a slice's. Raises InconsistentCheckpoint if a
        tensor does not fit the full shape.
        """
        slots: list[BufferSlot] = []
        scalars: dict[str, Scalar] = {}
        for path in self.paths[name]:
            file, key = self.by_path[path], os.path.basename(path).removesuffix(".pt")
            if key == "step":
                continue
            tensor, info = self._tensor(file)
            if info not in (None, {}, {"cat_dim": 0}):
                self.layout[f"{ZERO}/{name}/{os.path.basename(path)}"] = to_json(info)
            if key == MASTER:
                shape = self._shape(name, shape, file, tensor, info)
            if not isinstance(tensor, Tensor):
                scalars[key] = Scalar(tensor, type(tensor).__name__)
                continue
            if shape and not tensor.shape and key != MASTER:
                scalars[key] = file.scalar(tensor)
                continue
            if info is None:
                tensor = self._unpadded(tensor, shape)
            if tensor.numel != prod(shape) or not (
                tensor.shape == shape or info is None or VIEW in info
            ):
                raise InconsistentCheckpoint(
                    "ranks-disagree",
                    f"{file.path} has shape {list(tensor.shape)}, but the parameter has "
                    f"{list(shape)}",
                    file=file.path,
                )
            slot = "master" if key == MASTER else slot_name(key)
            slots.append(BufferSlot(slot, tensor.dtype, {name: file.fragments(tensor)}))
        return slots, scalars, shape

    def _unpadded(self, tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Removes the padding that DeepSpeed's converter before 0.19 leaves after small tensors."""
        numel, dp = prod(shape), self.merged.states.dp
        longer = tensor.contiguous and numel < tensor.numel <= dp * -(-numel // dp)
        return tensor.part(0, numel) if longer else tensor

    def _tensor(self, file: TorchFile) -> tuple[Any, SliceInfo | None]:
        """The tensor (or number) in a file, and the other items of the file's dictionary.

        The second value is None if the file has no dictionary, but only the tensor.
        """
        value = file.value
        info = None
        if isinstance(value, dict):
            info = {
                str(key): entry
                for key, entry in value.items()
                if key != "param" and not isinstance(entry, Tensor)
            }
            value = value.get("param")
        if not isinstance(value, (Tensor, bool, int, float)):
            raise CorruptCheckpoint("file-damaged", f"{file.path} holds no tensor", file=file.path)
        return value, info

    def _shape(
        self,
        name: str,
        stated_shape: tuple[int, ...],
        file: TorchFile,
        tensor: Any,
        info: SliceInfo | None,
    ) -> tuple[int, ...]:
        """The shape of the full parameter; `stated_shape` is the shape that the model files state.

        Raises InconsistentCheckpoint if the parameter's file contradicts the model files.
        """
        if not isinstance(tensor, Tensor):
            raise CorruptCheckpoint("file-damaged", f"{file.path} holds no tensor", file=file.path)
        if info is None:
            return stated_shape  # a flat tensor does not show its shape
        if info != {"cat_dim": 0} or self.merged.states.partitioned:
            self.infos[name] = info
        if VIEW in info and tensor.numel == prod(stated_shape):
            return stated_shape
        if self.merged.is_whole and tensor.shape != stated_shape:
            if not info.get("vocab_tensor"):
                raise InconsistentCheckpoint(
                    "ranks-disagree",
                    f"{file.path} has shape {list(tensor.shape)}, but the model files say "
                    f"{list(stated_shape)}",
                    file=file.path,
                )
            self.merged.states.module.pop(name, None)  # the module's tensor still has these rows
            message = f"rows of {name} that only pad the vocabulary"
            self.omitted.append(note("state-omitted", message, subject=name))
        return (tensor.numel,) if VIEW in info and len(stated_shape) == 1 else tensor.shape

    # -- steps

    def _steps(
        self, place: int, group: int, names: Sequence[str], policy: str | None
    ) -> tuple[dict[str, agreement.Step], list[Sighting], StepPlace | None]:
        """The step of each parameter, all statements of a step, and the place of the valid step.

        The place is None without a step. `place` is the number of the group, or in stage 3 of a
        sub-group of `group`.
        """
        states = self.merged.states
        common = states.flat_states(place)[0].get("step")
        of_group = _number(states.optimizers[0], states.groups(group)[0].get("step"))
        in_states, in_group = steps.StatedSteps("state"), steps.StatedSteps("group")
        for name in names:
            file = self.by_path.get(os.path.join(self.root, name, "step.pt"))
            stored = self._tensor(file)[0] if file else common
            number, of_tensor = _number(file or states.optimizers[0], stored)
            if file and isinstance(number, Tensor):
                raise CorruptCheckpoint(
                    "file-damaged",
                    f"{file.path} has a tensor of shape {list(number.shape)} instead of a step",
                    file=file.path,
                )
            in_states.add(name, number, of_tensor)
            in_group.add(name, *of_group)
        if policy is None:
            self._refuse_differing(in_states.steps)
        truth = steps.believed(in_states, in_group)
        by_name = truth.settled(policy)
        sightings = []
        for step in dict.fromkeys(in_states.settled(policy).values()):
            with_it = [name for name in names if by_name.get(name) == step]
            whose = f"group {group}" if len(with_it) == len(names) else listed(with_it)
            sightings.append(Sighting(f"step of {whose}", step, True))
        if in_group.steps:
            step = in_group.steps[names[0]]
            sightings.append(Sighting(f"param_groups[{group}]", step, truth is in_group))
        return by_name, sightings, truth.place()

    def _refuse_differing(self, by_name: Mapping[str, agreement.Step]) -> None:
        """Raises InconsistentCheckpoint unless the parameters of a group have one step.

        DeepSpeed counts updates per group. Its loader also fails if the steps in a group differ
        (0.19.8).
        """
        names = by_key((step, name) for name, step in by_name.items())
        if len(names) > 1:
            files = (f"{step} (step.pt of {listed(names[step], 3)})" for step in sorted(names))
            raise InconsistentCheckpoint(
                "steps-disagree",
                f"{self.root}: steps differ within a group: {', '.join(files)}",
                hint="files of different saves seem to be mixed: copy all files again; or choose: "
                "--step-policy max|min|keep|N",
                file=self.root,
            )


def _number(file: TorchFile, value: Any) -> tuple[Any, tuple[int, ...]]:
    """(number, shape) of a stored step; a tensor of one element becomes a number."""
    number = file.number(value)
    return number, number.shape if isinstance(number, Scalar) else ()
