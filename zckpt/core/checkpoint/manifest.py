"""The manifest of a checkpoint: its tensors, parameters and groups, and where they lie.

Manifest     one checkpoint: entries, parameters, groups, states, and everything else
Parameter    the facts about one parameter
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any

from msgspec import Meta, Struct, convert, field
from msgspec.structs import replace

from ...errors import Notice, brief
from ..grouping import by_key
from ..storage.byte_sources import Fingerprint
from ..storage.fragments import Extent, Record
from .dtypes import NUMBERS
from .entries import Entry, Key
from .facts import Engine, Pipeline, StepPlace, TensorParallel, with_cuts
from .grid import GridPlace
from .inert import PYTHON_NUMBERS, Scalar, from_json, to_json
from .mended import Mended
from .optimizer_states import KEYS, StateRow, States, states_in, with_states
from .origin import Origin

RESERVED_SLOTS = frozenset({"model", "param", "master", "state", "manifest"})
MAX_STEP = 1 << 63
Sizes = tuple[Annotated[int, Meta(ge=0)], ...]
Hex = Annotated[str, Meta(pattern=r"\A[0-9a-f]{8}\Z")]


class Parameter(Struct, frozen=True):
    """Facts about one parameter; its tensors are in the manifest's `entries`.

    step         the number of completed updates; None if the optimizer keeps no step
    group        the index of its param group; None if it is frozen, or without groups
    aliases      further names of a tied parameter
    updated      False if it is trainable and has no state, while others have a step
    """

    shape: tuple[int, ...]
    trainable: bool = True
    group: int | None = None
    step: float | int | None = None
    aliases: tuple[str, ...] = ()
    updated: bool = True


def parameters_to_json(parameters: Mapping[str, Parameter], states: States) -> dict[str, Any]:
    """Converts parameters, with their steps and one-number optimizer states, to JSON.

    Universal manifests and saved proofs (`--save-proof`) contain this JSON.
    """
    scalars = states.scalars
    return {
        name: {
            "shape": list(item.shape),
            "trainable": item.trainable,
            "group": item.group,
            "step": item.step,
            "scalars": {
                key: _scalar_to_json(scalar) for key, scalar in scalars.get(name, {}).items()
            },
            "aliases": list(item.aliases),
        }
        for name, item in parameters.items()
    }


class _ParameterJson(Struct):
    shape: Sizes
    trainable: bool
    group: int | None
    step: Any
    scalars: dict[str, dict[str, Any]] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()


def parameters_from_json(
    document: Mapping[str, Any],
) -> tuple[dict[str, Parameter], list[StateRow]]:
    """Parses the JSON of `parameters_to_json`: returns the parameters and their one-number states.

    Malformed JSON raises one of the exceptions in `errors.MALFORMED`, such as ValueError.
    """
    parameters, numbers = {}, list[StateRow]()
    for name, item in document.items():
        item_record = convert(item, _ParameterJson)
        for key, scalar in item_record.scalars.items():
            numbers.append(StateRow(key, "number", (name,), _scalar_from_json(scalar)))
        step = step_from_json(item_record.step)
        parameters[name] = Parameter(
            item_record.shape, item_record.trainable, item_record.group, step, item_record.aliases
        )
    return parameters, numbers


class _Field(Struct):
    """The JSON types of a shape and a CRC-32, as fields so that msgspec decodes them fast.

    msgspec analyzes a Struct only once.
    """

    sizes: Sizes = ()
    crc: Hex = ""


def sizes_from_json(value: Any) -> tuple[int, ...]:
    """Converts a JSON list of sizes to a shape; raises ValueError for other values."""
    return convert({"sizes": value}, _Field).sizes


def texts_from_json(value: Any) -> tuple[str, ...]:
    """Converts a JSON list of strings to a tuple; raises ValueError for other values."""
    return convert(value, tuple[str, ...])


def step_from_json(value: Any) -> float | int | None:
    """Checks that a JSON value is a step: a finite number, or None; raises TypeError for others."""
    if value is not None and not is_step(value):
        raise TypeError(f"steps are not numbers: {brief(value)}")
    step: float | int | None = value
    return step


def is_step(value: Any) -> bool:
    """Whether a value can be an optimizer's step: an int or float, and smaller than 2**63."""
    return type(value) in (int, float) and abs(value) < MAX_STEP


def crc_from_json(value: Any) -> int:
    """Converts eight hex digits to a CRC-32; raises ValueError for other values."""
    return int(convert({"crc": value}, _Field).crc, 16)


def _scalar_to_json(scalar: Scalar) -> dict[str, Any]:
    """Converts a scalar to JSON; `shape` is left out if it is empty, as older versions did."""
    shape = {"shape": list(scalar.shape)} if scalar.shape else {}
    return {"value": to_json(scalar.value), "dtype": scalar.dtype, **shape}


def _scalar_from_json(document: Mapping[str, Any]) -> Scalar:
    scalar = convert({**document, "value": from_json(document["value"])}, Scalar)
    if scalar.dtype not in PYTHON_NUMBERS and scalar.dtype not in NUMBERS:
        raise ValueError(f"a number has the unknown type {brief(scalar.dtype)}")
    if any(size != 1 for size in scalar.shape):
        raise ValueError(f"a number has the shape {list(scalar.shape)} instead of one element")
    return scalar


class Sighting(Struct, frozen=True):
    """A step that zckpt found in the files, and where.

    `truth` is True if the optimizer reads its step from this place. `counter` is the name of the
    training program's counter if the step was found there, else "".
    """

    where: str
    step: float | int
    truth: bool
    counter: str = ""


def steps_to_json(steps: Iterable[Sighting]) -> list[dict[str, Any]]:
    """Converts the steps found in the files to JSON, for reports and universal manifests."""
    return [{"where": each.where, "step": each.step, "truth": each.truth} for each in steps]


class Sibling(Struct, frozen=True):
    """A file in a trainer's directory that a conversion copies, but that is no checkpoint file.

    If `content` is set, the target gets a file with this value instead of a copy.
    """

    name: str
    path: str
    size: int
    content: Any = None


class Run(Struct, frozen=True):
    """The run that saved a checkpoint: its engine, its step, and how its ranks sliced tensors."""

    origin: Origin = field(default_factory=Origin)
    """The format, the version and the grid of the engine that trained."""
    engine: Engine | None = None
    """The facts of the engine that trained."""
    step_place: StepPlace | None = None
    """Where the optimizer keeps the step; None if no file states that."""
    steps: tuple[Sighting, ...] = ()
    """All places in the files that state a step, each with that step."""
    pipeline: Pipeline | None = None
    """The stages and layers of the pipeline; None if there was no pipeline."""
    tensor_parallel: TensorParallel | None = None
    """How tensor ranks cut parameters; None if that was not read, or there were no tensor ranks."""
    weights_differ: bool = False
    """Whether the engine changes weights but not masters: then weights are not rounded masters."""
    zero_padding: bool = False
    """Whether the engine fills gaps between tensors with zeros."""


class Files(Struct, frozen=True):
    """The files of a checkpoint, and what they contain besides tensors."""

    paths: tuple[str, ...] = ()
    """The checkpoint's own files, in the order of ranks."""
    siblings: tuple[Sibling, ...] = ()
    omitted_files: tuple[Sibling, ...] = ()
    """Files that no target gets. `verify` compares them with those of another checkpoint."""
    around: tuple[Sibling, ...] = ()
    """Files beside the checkpoint in its numbered folder, with their paths in that folder."""
    numbered: str = ""
    """The path of the numbered folder that contains the checkpoint; empty if there is none."""
    sibling_weights: tuple[Entry, ...] = ()
    """Weights in sibling files, which a target gets unchanged.

    Masters are compared with these weights.
    """
    records: Sequence[Record] = ()
    """Extents whose checksum a file states."""
    beside: tuple[Record, ...] = ()
    """Byte ranges with a checksum that no reader needs, such as the version in a torch zip.

    `verify` checks them too. They are read only with the option `Reading.nameless`.
    """
    unused: tuple[Extent, ...] = ()
    """Extents of the checkpoint's own files that nothing in the files describes."""
    fingerprints: Mapping[str, Fingerprint] = field(default_factory=dict)
    """Maps each file's path to its fingerprint: device, inode, size and time.

    This shows whether the file changes after it was first opened or listed. `reading.read` fills
    this field; a format's reader leaves it empty.
    """
    objects: frozenset[str] = frozenset()
    """The classes and functions that the pickles name, even for dropped values.

    Only `reading.read` fills this.
    """
    stated_in: str = ""
    """The one file that states everything but tensors, for messages; empty if there is none."""
    of_ranks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Values of `state` in which another rank's file differs from the first rank's, as JSON.

    Listed by file name, then by path in `state`. A tensor is a text with its type, shape and
    CRC-32. The values are only compared: a target gets those of the first rank.
    """
    rank_keys: tuple[str, ...] = ()
    """Keys of `state` that differ from rank to rank in this format, but not in every format.

    A target gets the values of the first rank.
    """
    layout: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """What each file states about the run's sizes and its partitions: JSON by file, then by key.

    It is only compared with another checkpoint's files of the same names.
    """
    laid: Mapping[str, Any] = field(default_factory=dict)
    """Maps a folder of a new target of torch.distributed.checkpoint to its `.metadata` table.

    It is read before the copy. After the copy, the format's function `seal` writes checksums with
    its help. Empty for a source, and for other formats.
    """


class Notices(Struct, frozen=True):
    """What a reader reports: warnings, and whether the files leave names or states uncertain."""

    warnings: tuple[Notice, ...] = ()
    """Warnings for the user."""
    notes: tuple[Notice, ...] = ()
    """Notes that `verify` reports if it checks one checkpoint alone.

    Most say what zckpt cannot see, such as whether files without names were swapped.
    """
    links: tuple[Notice, ...] = ()
    """A warning that lists the files which are reached by links out of the directory."""
    omitted: tuple[Notice, ...] = ()
    """Contents of the source that no target gets, since they mean nothing outside of it."""
    inferred: tuple[str, ...] = ()
    """The parameters whose names no file states. Each got its name by its position."""
    lost: tuple[Notice, ...] = ()
    """Why a run's optimizer could not be read; then the manifest has only the weights.

    Empty in all other cases.
    """
    likely: tuple[str, ...] = ()
    """Keys of optimizers that may train the chosen model: they fit, but no file shows it."""
    states_inferred: bool = True
    """Whether files of this format can state that the name of a parameter was inferred."""
    share: str = ""
    """The evidence that the optimizer's states are only one rank's share; "" without any."""
    is_numbered: bool = False
    """Whether an optimizer in the files identifies its parameters by number instead of by name."""
    buffers_named: bool = False
    """Whether `--buffers` matched tensors when the checkpoint was read."""
    mended: tuple[Mended, ...] = ()
    """The values that `zckpt mend` has restored, in this checkpoint or in its source."""
    uncompared: int = 0
    """The number of tensors whose replicas were not compared: no file states their checksums."""


class Manifest(Struct, frozen=True):
    """One checkpoint without its bytes: its tensors, parameters, param groups and states.

    Parameters are in the order of the optimizer, then the frozen ones. The method `replace` also
    changes fields of `run`, `files` and `notices`; msgspec's function `replace` cannot.
    """

    root: str
    """The path of its directory, or of its one file."""
    format: str
    """The format of the checkpoint's files."""
    run: Run
    entries: dict[Key, Entry]
    """The tensors by parameter and slot (what a tensor is for its parameter: param, exp_avg)."""
    parameters: dict[str, Parameter]
    buffers: tuple[str, ...] = ()
    groups: tuple[dict[str, Any], ...] | None = None
    """The hyper-parameters of each group; None if the files have none."""
    optimizer: str | None = None
    """The optimizer's class, as the engine names it, or as its states show it."""
    states: States = States()
    """The optimizer states that are no tensors of a parameter's shape."""
    state: dict[str, Any] = field(default_factory=dict)
    """All other saved values, under the keys of docs/format-v1.md.

    Objects of an engine's or user's class are plain records (inert.py). A tensor is in `entries`;
    here, a `TensorName` stands for it.
    """
    replicas: tuple[Entry, ...] = ()
    """Further copies of tensors in the files: on other ranks, or under names of tied weights.

    The target of a conversion may have such copies too. They are filled like other tensors.
    """
    place: GridPlace | None = None
    """The model rank that this manifest describes; None if it describes the complete checkpoint."""
    ranks: "tuple[Manifest, ...]" = ()
    """A manifest for each pair of pipeline stage and tensor rank, if zckpt keeps them separate.

    Then only these manifests have tensors and parameters, and several may use the same names. This
    manifest has the files, and the facts about the complete run.
    """
    models: "tuple[Manifest, ...]" = ()
    """The manifests of the tensor ranks, each with its slices from all pipeline stages.

    Filled only if zckpt has joined the slices of tensor ranks, or keeps ranks separate in `ranks`.
    """
    roots: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Maps the key of each model in the files to the keys of its optimizers.

    Empty if there is only one model with at most one optimizer.
    """
    files: Files = field(default_factory=Files)
    notices: Notices = field(default_factory=Notices)

    def replace(self, **changes: Any) -> "Manifest":
        """Copies the manifest with other values of fields, including those of its three parts.

        The parts are `run`, `files` and `notices`; no two of their fields have the same name.
        """
        own_fields = {name: changes.pop(name) for name in self.__struct_fields__ if name in changes}
        for name in ("run", "files", "notices"):
            part = own_fields.get(name, getattr(self, name))
            of_part = {key: changes.pop(key) for key in part.__struct_fields__ if key in changes}
            if of_part:
                own_fields[name] = replace(part, **of_part)
        return replace(self, **own_fields, **changes)

    @property
    def where(self) -> str:
        """The path that a user gives for the checkpoint, for messages and reports.

        If the checkpoint lies in a numbered folder (`global_step_3`), this is that folder's path,
        else `root`.
        """
        return self.files.numbered or self.root

    @property
    def rank_manifests(self) -> "tuple[Manifest, ...]":
        """The manifests that have the tensors: one per model rank, or this one if ranks are merged.

        A model rank is a combination of a pipeline stage and a tensor-parallel rank.
        """
        return self.ranks or (self,)

    @property
    def with_models(self) -> "tuple[Manifest, ...]":
        """All manifests in `ranks` and `models`; only this manifest if model ranks are merged.

        `models` has one manifest for each tensor rank: the model that its pipeline stages form.
        Tensors in layer files are in no rank's manifest, only in `models`.
        """
        return (*self.ranks, *self.models) if self.ranks else (self,)

    def map_ranks(self, change: "Callable[[Manifest], Manifest]") -> "Manifest":
        """Applies `change` to every manifest in `ranks` and `models`; returns the new manifest.

        If `ranks` is empty, nothing is changed.
        """
        if not self.ranks:
            return self
        ranks, models = (tuple(map(change, own)) for own in (self.ranks, self.models))
        return replace(self, ranks=ranks, models=models)

    @property
    def whole_state(self) -> dict[str, Any]:
        """All that is not a tensor: `state`, optimizer states, pipeline, tensor-parallel cuts.

        A checkpoint of another engine may be unable to keep some of these values.
        """
        return with_cuts(self.state_with_states, self.run.pipeline, self.run.tensor_parallel)

    @property
    def state_with_states(self) -> dict[str, Any]:
        """The program's saved values (`state`) with the optimizer's states, as in manifest.json."""
        return with_states(self.state, self.states, len(self.groups or ()))

    def with_state(self, state: Mapping[str, Any]) -> "Manifest":
        """Replaces the saved values and the optimizer's states by the contents of `state`.

        `state` has the form of `state_with_states`.
        """
        optimizer = state.get("optimizer") or {}
        rest = {key: value for key, value in state.items() if key != "optimizer"}
        if "optimizer" in self.state:
            kept = {key: value for key, value in optimizer.items() if key not in KEYS}
            rest = {**state, "optimizer": kept}
        states = States(
            (
                *self.states.of_form("number"),
                *states_in(optimizer),
                *self.states.of_form("unsupported"),
            )
        )
        return replace(self, state=rest, states=states)

    def titled(self, name: str) -> str:
        """The name of a tensor for messages; a manifest of one rank adds the rank to it."""
        return name if self.place is None else self.place.titled(name)

    @property
    def source(self) -> dict[str, Any]:
        """The format and the parallel sizes of the original checkpoint, as JSON (key `source`)."""
        return self.run.origin.to_json()

    @property
    def dp(self) -> int:
        """The data-parallel size of the run that saved the checkpoint; 1 if it had no ranks."""
        return self.run.origin.dp or 1

    @property
    def step(self) -> float | int | None:
        """The number of completed updates; None if parameters differ in it, or none is known."""
        parameters = (item for own in self.rank_manifests for item in own.parameters.values())
        steps = {item.step for item in parameters if item.step is not None}
        return steps.pop() if len(steps) == 1 else None

    @property
    def owners(self) -> dict[str, str]:
        """Maps each further name of a tied weight to the name under which its tensor is stored."""
        every = (item for own in self.rank_manifests for item in own.parameters.items())
        return {alias: name for name, item in every for alias in item.aliases}

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The shape of a parameter or buffer; KeyError if the checkpoint has neither."""
        parameter = self.parameters.get(name)
        return self.entries[name, "param"].shape if parameter is None else parameter.shape

    @property
    def slots(self) -> dict[str, list[Entry]]:
        """Maps each slot (`param`, `exp_avg` and so on) to its tensors, in the manifest's order."""
        return by_key((entry.slot, entry) for entry in self.entries.values())


def fitting_roots(
    roots: Iterable[str], parameters: Mapping[str, Parameter], model: Mapping[str, Parameter]
) -> list[str]:
    """Selects the name prefixes `roots` under which `parameters` contains a complete `model`.

    Under the prefix `a`, the parameter `w` of `model` must be in `parameters` as `a.w`, with the
    same shape.
    """
    return [
        root
        for root in roots
        if all(
            f"{root}.{name}" in parameters and parameters[f"{root}.{name}"].shape == item.shape
            for name, item in model.items()
        )
    ]


_OF_SLOTS = frozenset("abcdefghijklmnopqrstuvwxyz0123456789_")


def slot_name(key: str) -> str:
    """Escapes the key of an optimizer state for file names: `Exp-Avg` is `esc__45xp_2d_41vg`.

    A key of lowercase letters, digits and `_` stays as it is, unless it begins with `esc_` or is in
    RESERVED_SLOTS, such as `param`.
    """
    plain = key and _OF_SLOTS.issuperset(key) and not key.startswith("esc_")
    if plain and key not in RESERVED_SLOTS:
        return key
    encoded = key.encode("utf-8", "surrogatepass")
    escaped = re.sub(rb"[^a-z0-9]", lambda match: b"_%02x" % match[0][0], encoded)
    return "esc_" + escaped.decode("ascii")


def slot_key(slot: str) -> str:
    """Undoes the escape of `slot_name`: returns the key in the optimizer's state."""
    if not slot.startswith("esc_"):
        return slot
    escaped = slot.removeprefix("esc_").encode("ascii")
    encoded = re.sub(rb"_([0-9a-f]{2})", lambda match: bytes([int(match[1], 16)]), escaped)
    return encoded.decode("utf-8", "surrogatepass")
