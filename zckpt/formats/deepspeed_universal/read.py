"""DeepSpeed's own universal checkpoints, which its converter makes and `load_universal` loads.

    <run>/latest_universal                       the tag, as text
    <run>/<tag>/mp_rank_MM_model_states.pt       the run's model files as they were; MM counts
                                                 tensor- and pipeline-parallel ranks
    <run>/<tag>/zero_pp_rank_R_mp_rank_MM_...    in stage 3 also one per data-parallel rank
    <run>/<tag>/zero/optimizer_state.pt          all groups' hyper-parameters, the loss scale
    <run>/<tag>/zero/<parameter>/fp32.pt         its master; exp_avg.pt ... its states
    <run>/<tag>/zero/<parameter>/step.pt         stage 1 and 2; stage 3: in optimizer_state.pt

A tensor's file is a dictionary {param, cat_dim, ...} in stage 1 and 2, in stage 3 the flat tensor
alone. `cat_dim` and its like tell the engine how to cut the whole tensor for tensor parallelism.

Read like a run's files (`_Merged` stands in for the ranks), written with the target of writing.py:
the model files are the same. Turned down: the copies of frozen weights and buffers that DeepSpeed
puts below zero/ as fp32.pt; nothing reads them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from ...core.inert import Foreign, Global, Scalar
from ...core.manifest import Manifest, Sighting, slot_key, slot_name
from ...core.staging import Layout, Shell
from ...errors import (
    AmbiguousCheckpoint,
    CorruptCheckpoint,
    IncompleteCheckpoint,
    InconsistentCheckpoint,
    NotACheckpoint,
    UnsupportedCheckpoint,
    not_understood,
)
from ...files.torchfile import Parsed, Tensor, TorchFile
from ...files.torchshell import Storages, shell
from ...training import steps
from ...training.options import Options
from .. import zero
from ..deepspeed.files import (
    MODEL,
    MODEL_3,
    Place,
    holds_universal,
    listed,
    locate,
    pointed,
    refuse,
    universal_tags,
)
from ..deepspeed.flats import Flat, Slot
from ..deepspeed.ranks import Ranks, dictionary, item, nested, open_files, version_of
from ..deepspeed.read import manifest
from ..deepspeed.write import VERSION, Target, seal

__all__ = ["detect", "lay_out", "read", "seal"]

POINTER = "latest_universal"
ZERO = "zero"
COMMON = "optimizer_state.pt"
MARK = "zckpt"  # in optimizer_state.pt: these files are not the converter's
MASTER = "fp32"
VIEW = "sub_param_shape"  # beside a tensor: a view of several parts, maybe of more dimensions
ADAM = {"exp_avg", "exp_avg_sq"}  # all that the loader of stage 3 looks for

Shapes = dict[str, tuple[int, ...]]
About = dict[str, Any]
"""What a tensor's file says of it beside the tensor: how it is cut for tensor parallelism."""


# -- where


def detect(path: str) -> list[str]:
    """Tags of the universal checkpoints at `path`; a tag directory's own is its name."""
    if not os.path.isdir(path):
        return []
    if holds_universal(path):
        return [os.path.basename(os.path.abspath(path))]
    latest = pointed(path, POINTER)
    return universal_tags(path) if latest is None else [latest]


def _locate(path: str, tag: str | None) -> Place:
    """The tag that is meant; raises NotACheckpoint and AmbiguousCheckpoint."""
    if tag is not None:
        return locate(path, tag)
    found = detect(path)
    if not found:
        raise NotACheckpoint(f"{path} holds no universal checkpoint of DeepSpeed")
    if len(found) > 1:
        raise AmbiguousCheckpoint(
            f"{path} holds {len(found)} tags and no file `{POINTER}`: {listed(found)}",
            hint=f"choose one with --tag {found[-1]}",
        )
    if holds_universal(path):
        return Place(path, found[0], None)
    directory = os.path.join(path, found[0])
    if not _is_name(found[0]) or not os.path.isdir(directory):
        raise NotACheckpoint(
            f"{os.path.join(path, POINTER)} names {found[0]!r}, which is no folder of {path}",
            hint="choose a tag with --tag",
        )
    return Place(directory, found[0], path)


def _is_name(name: str) -> bool:
    """Whether a file or folder can be called so."""
    try:
        length = len(name.encode())
    except UnicodeEncodeError:
        return False
    return 0 < length <= 255 and name not in (".", "..") and not re.search(r"[/\0]", name)


def _model_files(place: Place) -> list[list[str]]:
    """Model files in rank order, by model-parallel rank: of stage 1 and 2 there is one each.

    Raises IncompleteCheckpoint and InconsistentCheckpoint.
    """
    found: dict[int, dict[int, str]] = {}
    kinds = set()
    for name in os.listdir(place.directory):
        full = os.path.join(place.directory, name)
        if told := MODEL.fullmatch(name):
            found.setdefault(int(told[1]), {})[0] = full
            kinds.add(MODEL)
        elif told := MODEL_3.fullmatch(name):
            found.setdefault(int(told[2]), {})[int(told[1])] = full
            kinds.add(MODEL_3)
    if len(kinds) > 1:
        raise InconsistentCheckpoint(
            f"{place.directory} holds model files of stage 3 and of stage 1 or 2",
            hint="keep only the files of one save",
        )
    if not found:
        raise IncompleteCheckpoint(
            f"{place.directory} holds no model states",
            hint="the converter copies them: mp_rank_00_model_states.pt and the like",
        )
    for ranked in [set(found), *map(set, found.values())]:
        if missing := sorted(set(range(max(ranked) + 1)) - ranked):
            raise IncompleteCheckpoint(
                f"{place.directory} lacks the model file of rank {listed(missing)}",
                hint="the converter copies the files of all ranks",
            )
    return [[held[rank] for rank in sorted(held)] for _, held in sorted(found.items())]


# -- reading


def read(path: str, tag: str | None = None, step_policy: str | None = None) -> Manifest:
    """The manifest of a universal directory, or of the run directory whose latest it is.

    Parameters whose steps differ keep them, unless `step_policy` makes one of them. Raises
    NotACheckpoint, IncompleteCheckpoint (no zero/, no fp32.pt of a parameter),
    InconsistentCheckpoint (shapes that differ), CorruptCheckpoint, UnsupportedCheckpoint (MoE).
    """
    place = _locate(path, tag)
    try:
        return _manifest(place, step_policy)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise not_understood(place.directory, error) from error


def _manifest(place: Place, step_policy: str | None) -> Manifest:
    merged = _Merged(place)
    folders = _Folders(merged)
    found = manifest(merged, folders.flats(step_policy), "deepspeed-universal")
    state = found.state
    if folders.about or not merged.whole:
        cut = {"model_parallel": len(merged.tops), "files": folders.about}
        state = {**state, "universal": cut}
    files = [*merged.others, *folders.files]
    return replace(
        found,
        state=state,
        files=(*found.files, *(file.path for file in files)),
        records=(*found.records, *(held for file in files for held in file.records.values())),
        left_out=(*found.left_out, *merged.left_out, *folders.left_out),
        warnings=(*found.warnings, *merged.warnings(), *_lost_steps(found)),
    )


def _lost_steps(found: Manifest) -> list[str]:
    """Converters before 0.14.1 wrote the step only of optimizers that keep it in the group."""
    moved = {entry.parameter for entry in found.slots.get("exp_avg_sq", ())}
    if not any(not found.parameters[name].step for name in moved):
        return []
    return [
        "there are moments without a step: the converter did not write it (DeepSpeed before "
        "0.14.1); take it from the run's own directory"
    ]


class _Merged(Ranks):
    """What a universal directory says beside its tensors, in the place of the ranks' files.

    `first` is optimizer_state.pt; what it does not hold any more was merged. With tensor or
    pipeline parallelism the modules in the model files are shards, and none is looked at.
    """

    def __init__(self, place: Place) -> None:
        common = os.path.join(place.directory, ZERO, COMMON)
        if not os.path.isfile(common):
            raise IncompleteCheckpoint(
                f"{place.directory} lacks {os.path.join(ZERO, COMMON)}",
                hint="the conversion did not finish, or the folder zero/ was not copied",
            )
        found = _model_files(place)
        parsed: Parsed = {}
        self.place = place
        self.of_stage_3 = MODEL_3.fullmatch(os.path.basename(found[0][0])) is not None
        self.models, *others = [open_files(paths, parsed) for paths in found]
        self.others = [file for held in others for file in held]
        # one per model-parallel rank
        self.firsts = [held[0] for held in (self.models, *others)]
        self.tops = [dictionary(file, file.value) for file in self.firsts]
        self.optimizers = [TorchFile(common)]
        self.first = dictionary(self.optimizers[0], self.optimizers[0].value)
        self.states = [self.first]
        self.version = version_of(self.tops[0], self.first)
        stated = self.tops[0].get("ds_config")
        self.config_path = stated if isinstance(stated, str) else None
        self.config = stated if isinstance(stated, dict) else {}
        self.whole = len(self.tops) == 1 and isinstance(self.tops[0].get("module"), dict)
        self.model = self.tops[0] if self.whole else self._without_module()
        self.dp = self._dp()
        for top in self.tops:
            experts = top.get("num_experts")
            if isinstance(experts, list) and any(experts):
                refuse(place, "mixture-of-experts layers")

    def _without_module(self) -> dict[str, Any]:
        aliases = [top.get("shared_params") or {} for top in self.tops]
        return {
            **self.tops[0],
            "module": {},
            "shared_params": {alias: owner for held in aliases for alias, owner in held.items()},
            "frozen_param_shapes": {},
        }

    def _dp(self) -> int:
        """That of the run; frozen weights of stage 3 are cut over as many files."""
        stated = self.model.get("dp_world_size")
        dp = stated if isinstance(stated, int) and stated > 0 else len(self.models)
        if self.partitioned and self.model.get("frozen_param_shapes") and dp != len(self.models):
            raise IncompleteCheckpoint(
                f"{self.place.directory} holds frozen weights in {len(self.models)} of {dp} model "
                "files",
                hint="copy zero_pp_rank_R_mp_rank_00_model_states.pt of all ranks",
            )
        return dp

    @property
    def partitioned(self) -> bool:
        return self.of_stage_3

    @property
    def round_robin(self) -> bool:
        return False  # `shapes` are in the user's order

    @property
    def dtype(self) -> str:
        if self.whole:
            return super().dtype
        for key, dtype in (("bf16", "BF16"), ("bfloat16", "BF16"), ("fp16", "F16")):
            if nested(self.config, key, "enabled") is True:
                return dtype
        return "F32"

    @property
    def left_out(self) -> list[str]:
        if self.whole or not any(top.get("module") for top in self.tops):
            return []
        return [
            "the weights, frozen weights and buffers in the modules of "
            f"{len(self.tops)} model-parallel ranks: masters are whole, these are not"
        ]

    def base_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        held = state.get("optimizer_state_dict")
        return {
            "state": held.get("state") if isinstance(held, dict) else {},
            "param_groups": state.get("param_groups"),
        }

    # -- the parameters

    def _listed(self) -> Iterator[list[Shapes]]:
        """Every model-parallel rank's parameters as they lay in its flat buffers."""
        for top, file in zip(self.tops, self.firsts, strict=True):
            shapes = top.get("param_shapes")
            shapes = [shapes] if isinstance(shapes, dict) else shapes
            if not isinstance(shapes, list):
                raise CorruptCheckpoint(f"{file.path} states no param_shapes")
            yield [{name: tuple(shape) for name, shape in held.items()} for held in shapes]

    def shapes(self) -> list[Shapes]:
        """Parameters of every group (stage 3: sub-group) in the user's order, of all ranks.

        Shapes are those of shards where the model was cut for tensor parallelism.
        """
        merged: list[Shapes] = []
        for groups in self._listed():
            for place, held in enumerate(groups):
                if place == len(merged):
                    merged.append({})
                names = list(held)
                if super().round_robin:
                    names = [names[at] for at in zero.undo_round_robin(len(names), self.dp)]
                merged[place].update({name: held[name] for name in names})
        return merged

    def group_of(self, place: int) -> int:
        """The group of a sub-group; in stage 1 and 2 they are the same."""
        if self.partitioned:
            groups = self.base_state(self.first)["param_groups"]
            for group in range(len(groups) if isinstance(groups, list) else 0):
                if place in (item(groups, group).get("params") or ()):
                    return group
        return place

    def warnings(self) -> list[str]:
        """The converter takes round-robin files for plain ones (0.19.8), and nothing shows it.

        Only a group that has alignment padding is mapped as it lies.
        """
        if MARK in self.first or not super().round_robin:
            return []
        aligned = self.first.get("param_alignment_paddings") or []
        permuted = [
            place
            for place, held in enumerate(next(self._listed()))
            if zero.round_robin(len(held), self.dp) != list(range(len(held)))
            and not (place < len(aligned) and any(aligned[place]))
        ]
        if not permuted:
            return []
        return [
            "saved with round_robin_gradients and converted by DeepSpeed, which mixes up the "
            f"parameters then (0.19.8): masters and states of group {listed(permuted)} are those "
            "of other parameters; convert the run's own directory instead"
        ]


class _Folders:
    """The tensors below zero/: a folder per parameter, a file per state."""

    def __init__(self, merged: _Merged) -> None:
        self.merged = merged
        self.root = os.path.join(merged.place.directory, ZERO)
        self.shapes = merged.shapes()
        self.about: dict[str, About] = {}
        self.left_out: list[str] = []
        names = [name for held in self.shapes for name in held]
        self.paths = {name: self._listed(name) for name in names}
        paths = [path for held in self.paths.values() for path in held]
        self.files = open_files([*paths, *self._copies(set(names))], {})
        self.by_path = {file.path: file for file in self.files}

    def _listed(self, name: str) -> list[str]:
        """A parameter's files, its master first."""
        if not _is_name(name):
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
                        steps.stalled(line.step, kept.kind, line.where) for line in sightings
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

    def _tensor(self, file: TorchFile) -> tuple[Any, About | None]:
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
        about: About | None,
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
    ) -> tuple[dict[str, steps.Step], list[Sighting], steps.StepPlace | None]:
        """Steps by name, every place that tells one, and where and in what type the truth stood."""
        merged = self.merged
        common = merged.flat_states(place)[0].get("step")
        in_group = merged.groups(group)[0].get("step")
        told: dict[str, steps.Step] = {}
        kept: steps.StepPlace | None = None
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


def _kept(where: str, held: Any, value: Any) -> steps.StepPlace:
    """Where a step stood, and in what type (flats.py)."""
    shape = held.shape if isinstance(held, Tensor) else ()
    return steps.StepPlace(where, steps.kind_of(value), shape)


# -- writing


def lay_out(source: Manifest, options: Options) -> Layout:
    """The files of a directory that the engine loads at any data-parallel size.

    The form is that of the target's stage. Raises before anything is written, as writing.py does,
    and UnsupportedCheckpoint for what the engine's loader cannot take: numbers that an optimizer
    keeps per parameter (NAdam), in stage 3 any optimizer but Adam; names that are no folder names.
    """
    target = _Universal(source, options)
    siblings = [(found.name, found) for found in source.siblings if not target.drops(found)]
    about = f"a universal checkpoint of DeepSpeed's own, ZeRO stage {target.engine.stage}"
    return Layout(target.shells, siblings, target.left_out, target.warnings, about=about)


class _Universal(Target):
    """What is decided before the first byte is written."""

    derives = False  # the modules' weights are not loaded: only what the source holds is written
    may_be_elastic = False  # its loader takes hyper-parameters from the files

    def __init__(self, source: Manifest, options: Options) -> None:
        super().__init__(source, options)
        self._check_names()
        self.about = {name: self._about(name) for name in self.trainable}
        if not options.weights_only:
            self._check_loader()
        self._warn()

    # -- checks and reports

    def _check_names(self) -> None:
        keys = {slot_key(slot) for flat in self.flats for slot in flat.slots}
        for what, names, reserved in (
            ("tag", [self.tag], (POINTER,)),
            ("parameter", list(self.trainable), (COMMON,)),
            ("optimizer state", sorted(keys), (MASTER, "step")),
        ):
            for name in names:
                if not _is_name(name) or name in reserved:
                    raise UnsupportedCheckpoint(
                        f"the {what} {name!r} cannot be the name of a folder or file here",
                        hint="write another format: --to deepspeed, --to universal",
                    )

    def _check_loader(self) -> None:
        """Raises UnsupportedCheckpoint for what `load_universal` stumbles over (0.19.8)."""
        numbers = sorted({key for flat in self.flats for key in flat.scalars})
        if numbers:
            raise UnsupportedCheckpoint(
                f"the optimizer keeps {listed(numbers)} per parameter, a number, which DeepSpeed's "
                "universal loader cannot take",
                hint="write --to deepspeed, which keeps it",
            )
        if not self.engine.partitioned and any(map(self.keeps_whole, self.flats)):
            raise UnsupportedCheckpoint(
                "Muon keeps whole momenta (no offload), which DeepSpeed's universal loader cuts",
                hint="write --to deepspeed; with offload_optimizer in the ds_config it fits",
            )
        if not self.engine.partitioned:
            return
        for flat in self.flats:
            if set(flat.slots) != ADAM or flat.step is None:
                held = listed(sorted(flat.slots)) or "none"
                raise UnsupportedCheckpoint(
                    "DeepSpeed's universal loader of stage 3 takes exp_avg, exp_avg_sq and a step, "
                    f"the source holds {held}" + ("" if flat.step is not None else " and no step"),
                    hint="write --stage 2, or --to deepspeed",
                )
        told = sorted({flat.step for flat in self.flats if flat.step is not None})
        if len(told) > 1:
            raise InconsistentCheckpoint(
                f"DeepSpeed's universal loader of stage 3 takes one step for all parameters, the "
                f"source has {listed(told)}",
                hint="write --stage 2, or --to deepspeed",
            )

    def _warn(self) -> None:
        frozen = [name for name in self.frozen if f"{name}/param" in self.source.entries]
        for what, names in (("frozen weights", frozen), ("buffers", self.source.buffers)):
            if names:
                self.warnings.append(
                    f"DeepSpeed's universal loader does not load {what}: {listed(names)} stay as "
                    "the model initializes them (--to deepspeed has no such loss)"
                )
        if self.engine.partitioned and any(group != self.groups[0] for group in self.groups):
            self.warnings.append(
                "DeepSpeed's universal loader of stage 3 gives all groups the hyper-parameters of "
                "group 0: set those of the others after loading"
            )
        if self.engine.partitioned:
            # engine.py _load_checkpoint reads an ordinary checkpoint there, and does not use it
            self.warnings.append(
                "at stage 3 load_checkpoint(DIR, load_optimizer_states=False) stops for want of a "
                "file `latest` (DeepSpeed 0.19.8): for weights alone call load_checkpoint(DIR, "
                "load_module_only=True), or write --to deepspeed, where it works"
            )
        if self.engine.round_robin and not self.engine.aligned:
            self.warnings.append(
                "an engine with round_robin_gradients loads universal checkpoints to wrong places "
                "(0.19.8): switch it off in the ds_config that you run with"
            )
        padded = [name for name in self.trainable if self._keeps_padding(name)]
        if padded:
            self.warnings.append(
                f"{listed(padded)} has more rows than original_vocab_size: an engine whose padded "
                "vocabulary is smaller than these refuses it (DeepSpeed's converter strips them)"
            )
        for place, flat in enumerate(self.flats):
            total = flat.starts[-1]
            held = (self.dp - 1) * zero.partition_size(total, self.dp)
            if total <= held and not self.engine.partitioned:
                self.warnings.append(
                    f"group {place} has {total} elements, so that some of {self.dp} ranks hold "
                    "none: there DeepSpeed's universal loader fails (IndexError, 0.19.8)"
                )

    def _keeps_padding(self, name: str) -> bool:
        rows, stated = self.trainable[name].shape[:1], self._info.get("original_vocab_size")
        vocabulary = (self.about[name] or {}).get("vocab_tensor")
        return bool(vocabulary and rows and isinstance(stated, int) and rows[0] > stated)

    # -- files

    def shells(self) -> Iterator[Shell]:
        yield Shell(POINTER, len(self.tag.encode()), ((0, self.tag.encode()),))
        yield from self.model_files()
        yield self._common_file(f"{self.tag}/{ZERO}/{COMMON}")
        for flat in self.flats:
            for name in flat.names:
                yield from self._parameter_files(f"{self.tag}/{ZERO}/{name}", name, flat.slots)

    def _common_file(self, name: str) -> Shell:
        storages = Storages()
        value: dict[str, Any] = {MARK: 1, **self._inferred()}
        value["ds_version"] = self.engine.before.get("version", VERSION)
        if not self.engine.wraps_bf16:
            value |= {"zero_stage": self._stage_enum(), **self._scaling(storages)}
        numbers = {}
        if self.engine.partitioned:
            value["partition_count"] = self.dp
            numbers = {place: self._loaded(flat, storages) for place, flat in enumerate(self.flats)}
        else:
            value |= self._clipping()
        base = self._base(numbers, storages)
        value["param_groups"] = base["param_groups"]
        if self.engine.partitioned:
            value["optimizer_state_dict"] = base
        return shell(name, value, storages)

    def _loaded(self, flat: Any, storages: Storages) -> dict[str, Any]:
        """A sub-group's step, where stage 3 looks for it whatever the optimizer does."""
        if flat.step is None:
            return {}
        return {"step": self._typed_step(flat.step, storages)}

    def _parameter_files(self, folder: str, name: str, slots: Mapping[str, str]) -> Iterator[Shell]:
        about = self.about[name]
        tensors = {MASTER: self._master(name)}
        tensors |= {slot_key(slot): dtype for slot, dtype in slots.items()}
        for key, dtype in tensors.items():
            storages = Storages()
            shape = self.trainable[name].shape
            value: Any = storages.tensor(dtype, (prod(shape),) if about is None else shape)
            if about is not None:
                value = {**self._thawed(about, storages), "param": value}
            yield shell(f"{folder}/{key}.pt", value, storages)
        where = self._step_place().where
        step = self.trainable[name].step
        if self.engine.partitioned or self.options.weights_only or where != "state":
            return
        if step is None:
            return
        storages = Storages()
        yield shell(f"{folder}/step.pt", self._typed_step(step, storages), storages)

    def _about(self, name: str) -> About | None:
        """What the file says beside the tensor: what it said, or what DeepSpeed makes of its info.

        None for the flat tensor alone, as stage 3 has it where nothing is cut.
        """
        kept = self.source.state.get("universal")
        if isinstance(kept, dict):
            alone = self.engine.partitioned and kept.get("model_parallel") == 1
            default = None if alone else {"cat_dim": 0}
            about: About | None = (kept.get("files") or {}).get(name, default)
            return about
        if self.engine.partitioned:
            return None
        try:
            return _described(self._info, name, self.trainable[name].shape)
        except (ArithmeticError, AttributeError, LookupError, TypeError, re.error) as error:
            raise InconsistentCheckpoint(
                f"universal_checkpoint_info in the client state does not fit {name}: {error!r}",
                hint="it says how parameters are cut for tensor parallelism; correct it",
            ) from error

    @property
    def _info(self) -> Mapping[str, Any]:
        """What the user's program told DeepSpeed's converter."""
        told = (self.source.state.get("client_state") or {}).get("universal_checkpoint_info")
        return told if isinstance(told, dict) else {}


def _described(info: Mapping[str, Any], name: str, shape: tuple[int, ...]) -> About:
    """How a parameter is cut for tensor parallelism, by the patterns in the user's client state."""

    def matches(patterns: Any) -> bool:
        return any(re.match(pattern, name) for pattern in patterns or ())

    about: About = {"cat_dim": 0}
    cut = next(
        (held for held in info.get("parameter_with_sub_params") or () if matches(held["patterns"])),
        None,
    )
    if matches(info.get("tp_replicated_parameter_patterns")) or matches(
        info.get("parameter_to_average_patterns")
    ):
        about = {}
    elif matches(info.get("parameter_with_2_sub_params_cat_dim_0")):
        about["param_n_sub_params"] = 2
    elif cut is not None:
        about = {VIEW: _sub_params(info, cut, shape)}
    elif matches(info.get("parameter_with_row_parallelism_patterns")):
        about["cat_dim"] = 1
    if matches(info.get("vocabulary_parameter_patterns")):
        about["vocab_tensor"] = True
    return about


def _sub_params(info: Mapping[str, Any], cut: Mapping[str, Any], shape: tuple[int, ...]) -> Foreign:
    """A SubparamShape; before version 0.4 a plain number was how many equal parts there are."""
    sizes, axis = list(cut["shape"]), cut["partition_dim"]
    if isinstance(sizes[axis], int) and (info.get("universal_checkpoint_version") or 0.0) < 0.4:
        sizes[axis] = (shape[axis] // sizes[axis],) * sizes[axis]
    state = {"patterns": cut["patterns"], "shape": tuple(sizes), "partition_dim": axis}
    named = Global("deepspeed.checkpoint.universal_checkpoint.SubparamShape")
    return Foreign(named, (), state, "new")
