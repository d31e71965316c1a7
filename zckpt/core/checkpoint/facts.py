"""Facts about the run that saved a checkpoint: its engine, its step, and how it cut the model.

FlatBufferEngine     an engine whose ranks share flat buffers, and that keeps its configuration
StateDictEngine      a program that saves state dicts under keys of its choice
NamedWeightsEngine   an engine with its own optimizers, whose files identify weights by name
StepPlace            where an optimizer keeps its step, and in which type
ExpertLayer          a layer whose experts are spread over ranks
Pipeline             the stages and layers of the run's pipeline
TensorParallel       how the run's tensor ranks cut parameters

`with_facts` and `facts_of` write these records into a manifest's JSON state, and read them again.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple, TypeVar

from msgspec import Meta, Struct, convert, field, to_builtins
from msgspec.structs import fields, replace

from .dtypes import Dtype
from .inert import Scalar
from .optimizer_states import KEYS, NO_STATES, States, states_in, with_states
from .placement import Placement, from_text

MAX_DP = 1 << 16
"""The most data-parallel ranks of a run; a file that states more is damaged."""

T = TypeVar("T", bound=Struct)
FileName = Annotated[str, Meta(pattern=r"\A(?!\.{0,2}\Z)[^/\\\0]*\Z")]
"""The name of a file in the checkpoint's own directory."""
Key = str | Annotated[int, Meta(ge=0, lt=MAX_DP)]
"""A key on the path to a value; a number is a position in a list."""


class ExpertLayer(Struct, frozen=True):
    """A mixture-of-experts layer; `name` is the path of its module.

    Its `experts` are spread evenly over `ep` ranks.
    """

    name: str = field(name="layer")
    experts: int
    ep: int

    @property
    def local(self) -> int:
        """The number of experts of this layer that each expert-parallel rank holds."""
        return self.experts // self.ep


def layers_of(engine: Any) -> tuple[ExpertLayer, ...]:
    """The mixture-of-experts layers that the record `engine` lists; empty if it lists none."""
    layers: tuple[ExpertLayer, ...] = getattr(engine, "experts", ())
    return layers


class FlatBufferEngine(Struct, frozen=True):
    """An engine whose ranks each hold a part of flat buffers, such as DeepSpeed's ZeRO.

    A writer for the same engine copies `config`, `version` and the param groups unchanged. An
    engine whose configuration has another structure needs another record class.
    """

    name: str
    version: str | None
    optimizer_class: str | None = field(name="class")
    """The class of the engine's wrapper around the optimizer."""
    dtype: Dtype | None
    """The type in which the module computes."""
    elastic: bool
    """Whether the files lack hyper-parameters, as DeepSpeed's elastic checkpoints do.

    Those of the manifest are then inferred from the configuration and the scheduler.
    """
    excludes_frozen: bool | None
    """Whether the save left out frozen weights; None if no file shows that."""
    config: Mapping[Any, Any]
    ordered: bool | None = None
    """Whether the user stated the order of the parameters."""
    given: bool = field(default=False, name="hyper_parameters")
    """Whether the user stated the hyper-parameters, which elastic checkpoints lack (`elastic`)."""
    experts: tuple[ExpertLayer, ...] = ()
    """The layers with experts, in the engine's order."""

    def to_state(self) -> dict[str, Any]:
        """Converts this record to JSON: the value of the key `state.engine` in a manifest."""
        return _document(self) | ({"hyper_parameters": "given"} if self.given else {})

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> "FlatBufferEngine":
        """Parses the value of `state.engine` in a manifest: the inverse of `to_state`."""
        engine = _record(
            cls, {**state, "hyper_parameters": state.get("hyper_parameters") == "given"}
        )
        for layer in engine.experts:
            if not 0 < layer.ep <= layer.experts or layer.experts % layer.ep:
                raise ValueError(
                    f"the experts of a layer cannot be spread evenly over its ranks: {layer}"
                )
        return engine


class StateDictEngine(Struct, frozen=True):
    """A program that saves the state dicts of a model and its optimizer, as a torch loop does."""

    name: str
    dtype: Dtype | None
    """The type of most weights."""
    model: tuple[Key, ...]
    """The keys that lead to the model's state dict."""
    optimizer: tuple[Key, ...] | None
    """The keys that lead to the optimizer's state dict; None if there is none."""
    layout: str | None
    """The kind of keys in the optimizer's state dict, such as `flat`."""
    scheduler: str | None
    """The key of the scheduler's state; None if there is none."""
    folders: tuple[str, ...] | None
    """The folders of model and optimizer, if they have separate folders."""
    guessed: bool
    """Whether zckpt guessed which tensors are buffers or frozen weights: no file states it."""
    adapter: bool
    """Whether the model's state holds only an adapter."""
    whole: bool = False
    """Whether each file has state dicts of its own, and is not a part of sharded storage."""
    dialect: str | None = None  # the kind of files; None unless `whole`
    ordered: bool | None = None
    """Whether the user stated the order of the parameters."""
    experts: tuple[ExpertLayer, ...] = ()
    """The layers with experts that a writer found in the names; no file states them."""
    storage: str | None = None
    """Files with weights beside those of torch.distributed.checkpoint; None if there are none.

    `ranks`: a safetensors file of each rank. `adapter`: the files of PEFT's adapter.
    """
    bare: bool = False
    """Whether names in the optimizer lack prefixes that PEFT puts before a module's names."""
    file: FileName | None = None
    """The file with everything, if there is only one file.

    In sharded storage: the file with everything that is outside of the shards.
    """

    def to_state(self, group_step: str | None) -> dict[str, Any]:
        """Converts this record to JSON: the value of the key `state.engine` in a manifest.

        `group_step` is the dtype of the step if the optimizer keeps it in its param groups only. It
        is None if the states of parameters contain the step.
        """
        required, optional = self.__struct_fields__[:9], ("storage", "bare", "file", "ordered")
        return {
            **_document(self, required),
            "group_step": group_step,
            **({"dialect": self.dialect} if self.whole else {}),
            **_document(self, optional),
        }

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> "StateDictEngine":
        """Parses the value of `state.engine` in a manifest: the inverse of `to_state`."""
        return _record(cls, {**state, "whole": "dialect" in state, "experts": ()})


class NamedWeightsEngine(Struct, frozen=True):
    """An engine with its own optimizers, whose files identify weights by name.

    Megatron and ONNX Runtime are such engines.

        dialect    the kind of files (`hdf5`) or of sharding (`dp_reshardable`)
        dtype      the type of the 16-bit copies of the weights; F32 if there are no copies
        moments    the type of the optimizer states
        ordered    True if the user stated the order of the parameters; no file states it
    """

    name: str
    version: str | None
    dialect: str | None
    dtype: Dtype | None
    moments: str | None
    ordered: bool | None = field(default_factory=bool)  # so that it is written

    def to_state(self) -> dict[str, Any]:
        """Converts this record to JSON: the value of the key `state.engine` in a manifest."""
        return _document(self)

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> "NamedWeightsEngine":
        """Parses the value of `state.engine` in a manifest: the inverse of `to_state`."""
        return _record(cls, state)


Engine = FlatBufferEngine | StateDictEngine | NamedWeightsEngine


class StepPlace(Struct, frozen=True):
    """Where an optimizer keeps its step, and in which type.

    where        `state` (one step per parameter) or `group` (one per param group)
    kind         `int`, `float`, or the dtype of a tensor of `shape`
    stale        a wrong step that the param groups contain too
    first        the counter before the first update
    times        how much each update adds to the counter
    last_only    True if a group's last parameter counts updates, and all others stay at `first`
    optimizer    the class that keeps its step here, if a configuration or the user named it
    """

    where: str = field(name="in")
    kind: str = field(name="type")
    shape: tuple[int, ...] = ()
    stale: Any = None
    first: int = 0
    last_only: bool = False
    times: int = 1
    optimizer: str | None = None

    def number(self, step: float | int) -> Scalar:
        """The value that the optimizer stores after `step` updates, in the type of its step."""
        return Scalar(step + self.first, self.kind, self.shape)

    def completed(self, number: int) -> int:
        """Converts a stored step to the number of completed updates: the inverse of `number`."""
        return number - self.first

    def to_state(self) -> dict[str, Any]:
        """Converts this record to JSON: the value of the key `state.optimizer.step` in a manifest.

        The field `stale` is left out: it has a key of its own, `state.optimizer.group_step`.
        """
        return _document(self, [name for name in self.__struct_fields__ if name != "stale"])

    @classmethod
    def of_state(cls, optimizer: Mapping[str, Any]) -> "StepPlace | None":
        """Parses `state.optimizer` of a manifest; None if it does not say where the step is."""
        if not (value := _dictionary(optimizer, "step")):
            return None
        place = _record(cls, {"in": "state", "type": "F32", **value})
        return replace(place, stale=optimizer.get("group_step"))


class Pipeline(Struct, frozen=True):
    """The pipeline stages of the run, and the layers in their files.

    parameters, buffers    the names in each stage
    layers                 the numbers of the layers that have files; if no layer has a file, the
                           numbers in the names of parameters and buffers
    tied                   maps the number of a tied layer's file to the layer's key in DeepSpeed's
                           TiedLayerSpec
    """

    parameters: Sequence[Sequence[str]]
    buffers: Sequence[Sequence[str]]
    layers: Sequence[int]
    tied: Mapping[int, str] = field(default_factory=dict)

    def renamed(self, names: Mapping[str, str]) -> "Pipeline":
        """Renames parameters and buffers; names that are not in `names` stay."""
        parameters, buffers = (
            [[names.get(name, name) for name in stage] for stage in stages]
            for stages in (self.parameters, self.buffers)
        )
        return replace(self, parameters=parameters, buffers=buffers)

    def to_state(self) -> dict[str, Any]:
        """Converts this record to the JSON value of `state.pipeline`; `tied` becomes pairs."""
        return {
            "parameters": [list(names) for names in self.parameters],
            "buffers": [list(names) for names in self.buffers],
            "layers": list(self.layers),
            "tied": [[number, key] for number, key in self.tied.items()],
        }

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> "Pipeline":
        """Parses the value of `state.pipeline`; raises ValueError if it is malformed."""
        pairs = convert(state.get("tied") or (), tuple[tuple[int, str], ...])
        return _record(cls, {**state, "tied": dict(pairs)})


class Vocabulary(Struct, frozen=True):
    """The size of a vocabulary: its embedding has `rows` rows, and only `used` are not padding."""

    rows: int
    used: int


class TensorParallel(Struct, frozen=True):
    """How the tensor-parallel ranks cut each parameter, and the sizes of the run's vocabularies."""

    placements: Mapping[str, Placement]
    vocabularies: Mapping[str, Vocabulary]

    def renamed(self, names: Mapping[str, str]) -> "TensorParallel":
        """Renames parameters; names that are not in `names` stay."""
        placements = {names.get(name, name): own for name, own in self.placements.items()}
        rows = {names.get(name, name): own for name, own in self.vocabularies.items()}
        return TensorParallel(placements, rows)

    def to_state(self) -> dict[str, Any]:
        """Converts this record to JSON, the value of `state.tensor_parallel`.

        Each parameter's cut becomes a string. `0:2x` says that ranks cut dimension 0, which has two
        equal parts, and that each part is cut.
        """
        rules = {name: own.text for name, own in self.placements.items()}
        return dict(to_builtins(_Rules(rules, self.vocabularies)))

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> "TensorParallel":
        """Parses the value of `state.tensor_parallel`; raises ValueError if it is malformed."""
        rules = _record(_Rules, state)
        placements = {name: from_text(text) for name, text in rules.rules.items()}
        return cls(placements, rules.vocabulary)


class _Rules(Struct, frozen=True):
    """The JSON form of a `TensorParallel`; `rules` maps parameters to strings such as `0:2x`."""

    rules: Mapping[str, str]
    vocabulary: Mapping[str, Vocabulary]


UNCUT = TensorParallel({}, {})
"""The value that callers use if nothing states how tensor ranks cut the parameters."""


def with_cuts(
    state: Mapping[str, Any], pipeline: Pipeline | None, tensor_parallel: TensorParallel | None
) -> dict[str, Any]:
    """Adds the keys `pipeline` and `tensor_parallel` to a manifest's state; None adds no key."""
    cuts = {"pipeline": pipeline, "tensor_parallel": tensor_parallel}
    return {**state, **{key: own.to_state() for key, own in cuts.items() if own is not None}}


def with_facts(
    state: Mapping[str, Any],
    engine: Engine | None,
    place: StepPlace | None,
    pipeline: Pipeline | None = None,
    tensor_parallel: TensorParallel | None = None,
    states: States = NO_STATES,
    groups: int = 0,
) -> dict[str, Any]:
    """Builds the key `state` of a manifest's JSON: what the program saved, and facts about its run.

    `groups` is the number of the optimizer's param groups. If a StateDictEngine keeps the step in
    its param groups, only the dtype of the step is written (as `group_step`).
    """
    state = with_cuts(with_states(state, states, groups), pipeline, tensor_parallel)
    if isinstance(engine, StateDictEngine):
        in_group = place is not None and place.where == "group"
        facts = engine.to_state(place.kind if place is not None and in_group else None)
        result = {"engine": facts, **state}
        if place is not None and (not in_group or place.shape or place.optimizer):
            result["optimizer"] = {**(state.get("optimizer") or {}), "step": place.to_state()}
            if place.stale is not None:
                result["optimizer"]["group_step"] = place.stale
        return result
    result = {**({} if engine is None else {"engine": engine.to_state()}), **state}
    of_flats = isinstance(engine, FlatBufferEngine) and "optimizer" in state
    if of_flats or place is not None:
        result["optimizer"] = {
            **(state.get("optimizer") or {}),
            "step": None if place is None else place.to_state(),
            "group_step": None if place is None else place.stale,
        }
    return result


class Facts(NamedTuple):
    """The parsed key `state` of a manifest's JSON.

    The field `state` is what the training program saved. The other fields are facts about its run,
    which zckpt has added.
    """

    state: dict[str, Any]
    engine: Engine | None
    step_place: StepPlace | None
    pipeline: Pipeline | None
    tensor_parallel: TensorParallel | None
    states: States


def facts_of(state: Mapping[str, Any]) -> Facts:
    """Splits the key `state` of a manifest's JSON into saved values and facts about the run.

    It parses what `with_facts` builds. Raises ValueError if a value has a wrong type.
    """
    rest = dict(state)
    keys = ("engine", "pipeline", "tensor_parallel")
    engine_state, stages, slices = (_dictionary(rest, key) for key in keys)
    for key in keys:
        rest.pop(key, None)
    engine: Engine | None = None
    # the keys tell the class of the engine's record
    if "model" in engine_state:
        engine = StateDictEngine.of_state(engine_state)
    elif engine_state.keys() & {"config", "elastic"}:
        engine = FlatBufferEngine.of_state(engine_state)
    elif engine_state:
        engine = NamedWeightsEngine.of_state(engine_state)
    optimizer = _dictionary(rest, "optimizer")
    place = StepPlace.of_state(optimizer)
    kind = engine_state.get("group_step")
    if place is None and isinstance(engine, StateDictEngine) and kind is not None:
        place = _record(StepPlace, {"in": "group", "type": kind})
    apart = {"step", "group_step", *KEYS}
    if optimizer.keys() & apart:
        kept = {key: item for key, item in optimizer.items() if key not in apart}
        if kept or not isinstance(engine, StateDictEngine):
            rest["optimizer"] = kept
        else:
            del rest["optimizer"]
    pipeline = Pipeline.of_state(stages) if stages else None
    tensor_parallel = TensorParallel.of_state(slices) if slices else None
    return Facts(rest, engine, place, pipeline, tensor_parallel, states_in(optimizer))


def _document(record: Struct, names: Iterable[str] | None = None) -> dict[str, Any]:
    """Converts a record to JSON: the fields `names`, or all fields.

    A field is left out if it has its default value, or if it is optional and None.
    """
    document = {}
    for item in fields(record):
        value = getattr(record, item.name)
        is_usual = value == item.default or (value is None and not item.required)
        if not is_usual and (names is None or item.name in names):
            as_list = isinstance(value, tuple)
            document[item.encode_name] = to_builtins(list(value)) if as_list else value
    return document


BLANK = {
    "name": "",
    "elastic": False,
    "config": {},
    "model": (),
    "guessed": False,
    "adapter": False,
    "rules": {},
    "vocabulary": {},
}


def _record(kind: type[T], document: Mapping[str, Any]) -> T:
    """Parses JSON to a record of class `kind`: the inverse of `_document`.

    A missing or null field gets its default, or an empty value if it has no default.
    """
    nothing = dict.fromkeys(each.encode_name for each in fields(kind) if each.required)
    given = {key: value for key, value in document.items() if value is not None}
    return convert({**nothing, **BLANK, "ordered": None, **given}, kind)


def _dictionary(state: Mapping[str, Any], key: str) -> dict[Any, Any]:
    value = state.get(key)
    return {} if value is None else convert(value, dict[Any, Any])
