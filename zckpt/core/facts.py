"""What does a checkpoint state about its run: which engine wrote it, and where its step stands?

FlatBufferEngine     an engine whose ranks share flat buffers, and that keeps its configuration
StateDictEngine      a program that saves state dicts under keys of its own
NamedWeightsEngine   an engine with optimizers of its own, whose files know weights by name alone
StepPlace            where an optimizer keeps its step, and in which type

`with_facts` and `facts_of` write these records into a manifest's JSON state, and read them again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from msgspec import Struct

from .dtypes import SIZES
from .experts import ExpertLayer, layers_from_json, layers_to_json
from .inert import Scalar

T = TypeVar("T")

MAX_DP = 1 << 16
"""The most data-parallel ranks of a run; a file that states more is damaged."""


class FlatBufferEngine(Struct, frozen=True):
    """An engine that cuts flat buffers over its ranks, and keeps its configuration.

    A writer of this kind of engine takes over `config`, `version` and the groups as they are. So an
    engine with a configuration of another form gets a record of its own.
    """

    name: str
    version: str | None
    optimizer_class: str | None
    """Its wrapper around the optimizer."""
    dtype: str | None
    """The type in which its module computes."""
    elastic: bool
    """Whether the files have no hyper-parameters: those of the manifest are inferred from the
    configuration and the scheduler."""
    excludes_frozen: bool | None
    """Whether the save left frozen weights out; None if no file shows that."""
    config: Mapping[str, Any]
    ordered: bool | None = None
    """Whether the user stated the order of the parameters."""
    given: bool = False
    """Whether the user stated the hyper-parameters of an elastic save."""
    experts: tuple[ExpertLayer, ...] = ()
    """The layers of experts, in the engine's order."""

    def to_state(self) -> dict[str, Any]:
        """The value of `state.engine` in a manifest."""
        return {
            "name": self.name,
            "version": self.version,
            "class": self.optimizer_class,
            "dtype": self.dtype,
            "elastic": self.elastic,
            "excludes_frozen": self.excludes_frozen,
            "config": self.config,
            **_ordered(self),
            **({"hyper_parameters": "given"} if self.given else {}),
            **({"experts": layers_to_json(self.experts)} if self.experts else {}),
        }

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> FlatBufferEngine:
        """The inverse of `to_state`."""
        return cls(
            _text(state, "name") or "",
            _text(state, "version"),
            _text(state, "class"),
            _dtype(state),
            _flag(state, "elastic") or False,
            _flag(state, "excludes_frozen"),
            _dictionary(state, "config"),
            _flag(state, "ordered"),
            state.get("hyper_parameters") == "given",
            layers_from_json(state.get("experts", [])),
        )


class StateDictEngine(Struct, frozen=True):
    """A program that saves a model's and an optimizer's state dict."""

    name: str
    dtype: str | None
    """The type of most weights."""
    model: tuple[Any, ...]
    """The keys that lead to the model's state dict."""
    optimizer: tuple[Any, ...] | None
    """The keys that lead to the optimizer's; None if there is none."""
    layout: str | None
    """The form of the optimizer's keys."""
    scheduler: str | None
    """The key of the scheduler's state; None if there is none."""
    folders: tuple[str, ...] | None
    """The folders of model and optimizer, if each has one."""
    guessed: bool
    """Whether no file separates buffers and frozen weights."""
    adapter: bool
    """Whether the model's state is an adapter alone."""
    whole: bool = False
    """Whether files are whole, and have a `dialect`; sharded storage has none."""
    dialect: str | None = None
    ordered: bool | None = None
    """Whether the user stated the order of the parameters."""
    experts: tuple[ExpertLayer, ...] = ()
    """The layers of experts that a writer found in the names; no file states them."""
    storage: str | None = None
    """Weights that are no items: `ranks` for safetensors of every rank, `adapter` for PEFT's."""
    bare: bool = False
    """Whether the optimizer's names lack what PEFT adds to a module's."""
    file: str | None = None
    """The one file that has everything; beside sharded storage, what is no state dict."""

    def to_state(self, group_step: str | None) -> dict[str, Any]:
        """The value of `state.engine` in a manifest.

        `group_step` is the type of a step that only groups keep; None if states keep it.
        """
        return {
            "name": self.name,
            "dtype": self.dtype,
            "model": list(self.model),
            "optimizer": None if self.optimizer is None else list(self.optimizer),
            "layout": self.layout,
            "scheduler": self.scheduler,
            "folders": None if self.folders is None else list(self.folders),
            "guessed": self.guessed,
            "adapter": self.adapter,
            "group_step": group_step,
            **({"dialect": self.dialect} if self.whole else {}),
            **{key: value for key in ("storage", "bare", "file") if (value := getattr(self, key))},
            **_ordered(self),
        }

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> StateDictEngine:
        """The inverse of `to_state`."""
        return cls(
            _text(state, "name") or "",
            _dtype(state),
            _path(state, "model") or (),
            _path(state, "optimizer"),
            _text(state, "layout"),
            _text(state, "scheduler"),
            _path(state, "folders"),
            _flag(state, "guessed") or False,
            _flag(state, "adapter") or False,
            "dialect" in state,
            _text(state, "dialect"),
            _flag(state, "ordered"),
            storage=_text(state, "storage"),
            bare=_flag(state, "bare") or False,
            file=_file_name(state, "file"),
        )


class NamedWeightsEngine(Struct, frozen=True):
    """An engine with optimizers of its own, whose files know weights by name alone.

    One that trains an exported graph is such an engine, and one whose layers share keys. `dialect`
    is the kind of its files, or how they shard the optimizer's state. `dtype` is the type of the
    16-bit copies of weights, else F32; `moments` is that of optimizer states. No file states the
    order of the module's parameters: `ordered` is true only if the user did.
    """

    name: str
    version: str | None
    dialect: str | None
    dtype: str | None
    moments: str | None
    ordered: bool | None = False

    def to_state(self) -> dict[str, Any]:
        """The value of `state.engine` in a manifest."""
        return {
            "name": self.name,
            "version": self.version,
            "dialect": self.dialect,
            "dtype": self.dtype,
            "moments": self.moments,
            **_ordered(self),
        }

    @classmethod
    def of_state(cls, state: Mapping[str, Any]) -> NamedWeightsEngine:
        """The inverse of `to_state`."""
        return cls(
            _text(state, "name") or "",
            _text(state, "version"),
            _text(state, "dialect"),
            _dtype(state),
            _text(state, "moments"),
            _flag(state, "ordered"),
        )


Engine = FlatBufferEngine | StateDictEngine | NamedWeightsEngine


class StepPlace(Struct, frozen=True):
    """Where an optimizer keeps its step, and in which type.

    `where` is `state` or `group`. `kind` is a dtype (a tensor of `shape`), `int` or `float`.
    `stale` is the wrong step that groups hold beside a true one; None for nothing. `first` is the
    number that stands there before any update. With `last_only`, the state of a group's last
    parameter counts for the group, and the other states hold `first`. `times` says how often one
    update is counted. `optimizer` is what a configuration or the user named, if this place is where
    that one looks.
    """

    where: str
    kind: str
    shape: tuple[int, ...] = ()
    stale: Any = None
    first: int = 0
    last_only: bool = False
    times: int = 1
    optimizer: str | None = None

    def number(self, step: float | int) -> Scalar:
        """Completed updates in the type and shape of this place."""
        return Scalar(step + self.first, self.kind, self.shape)

    def completed(self, number: int) -> int:
        """The completed updates that a number of this place stands for."""
        return number - self.first

    def to_state(self) -> dict[str, Any]:
        """The value of `state.optimizer.step` in a manifest (`stale` is `group_step` beside it)."""
        return {
            "in": self.where,
            "type": self.kind,
            **({"shape": list(self.shape)} if self.shape else {}),
            **({"first": self.first} if self.first else {}),
            **({"last_only": True} if self.last_only else {}),
            **({"times": self.times} if self.times != 1 else {}),
            **({"optimizer": self.optimizer} if self.optimizer else {}),
        }

    @classmethod
    def of_state(cls, optimizer: Mapping[str, Any]) -> StepPlace | None:
        """The place that `state.optimizer` of a manifest states; None if it states none."""
        stated = _dictionary(optimizer, "step")
        if not stated:
            return None
        return cls(
            _text(stated, "in") or "state",
            _text(stated, "type") or "F32",
            _sizes(stated, "shape"),
            optimizer.get("group_step"),
            _of_type(stated, "first", int) or 0,
            _flag(stated, "last_only") or False,
            _of_type(stated, "times", int) or 1,
            _text(stated, "optimizer"),
        )


def with_facts(
    state: Mapping[str, Any], engine: Engine | None, place: StepPlace | None
) -> dict[str, Any]:
    """The `state` of a manifest's JSON: what the program saved, and the facts of its engine.

    A number in the groups of a state dict is written by its type alone.
    """
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


def facts_of(
    state: Mapping[str, Any],
) -> tuple[dict[str, Any], Engine | None, StepPlace | None]:
    """The inverse of `with_facts`; raises TypeError for values of other types.

    The keys tell the kinds of engines apart: `config` or `elastic` is a FlatBufferEngine's, `model`
    a StateDictEngine's.
    """
    rest = dict(state)
    stated = _dictionary(rest, "engine")
    rest.pop("engine", None)
    engine: Engine | None = None
    if "model" in stated:
        engine = StateDictEngine.of_state(stated)
    elif stated.keys() & {"config", "elastic"}:
        engine = FlatBufferEngine.of_state(stated)
    elif stated:
        engine = NamedWeightsEngine.of_state(stated)
    optimizer = _dictionary(rest, "optimizer")
    place = StepPlace.of_state(optimizer)
    kind = _text(stated, "group_step")
    if place is None and isinstance(engine, StateDictEngine) and kind is not None:
        place = StepPlace("group", kind)
    if optimizer.keys() & {"step", "group_step"}:
        kept = {key: item for key, item in optimizer.items() if key not in ("step", "group_step")}
        if kept or not isinstance(engine, StateDictEngine):
            rest["optimizer"] = kept
        else:
            del rest["optimizer"]
    return rest, engine, place


def _ordered(engine: Engine) -> dict[str, Any]:
    """The key `ordered` of an engine that states it."""
    return {} if engine.ordered is None else {"ordered": engine.ordered}


def _text(state: Mapping[str, Any], key: str) -> str | None:
    return _of_type(state, key, str)


def _file_name(state: Mapping[str, Any], key: str) -> str | None:
    """The name of a file in the checkpoint's own directory."""
    name = _text(state, key)
    if name is not None and (name in ("", ".", "..") or not {*name}.isdisjoint("/\\\0")):
        raise TypeError(f"{key} is {name!r}, which is not a file's name")
    return name


def _path(state: Mapping[str, Any], key: str) -> tuple[Any, ...] | None:
    """Keys that lead to a value; a number is a place in a list."""
    keys = _list(state, key)
    for each in keys or ():
        if type(each) is not str and (type(each) is not int or not 0 <= each < MAX_DP):
            raise TypeError(f"{key} is {keys!r}, which is not a path of keys")
    return None if keys is None else tuple(keys)


def _dtype(state: Mapping[str, Any]) -> str | None:
    dtype = _text(state, "dtype")
    if dtype is not None and dtype not in SIZES:
        raise TypeError(f"dtype is {dtype!r}, which is not a type of elements")
    return dtype


def _sizes(state: Mapping[str, Any], key: str) -> tuple[int, ...]:
    sizes = _list(state, key) or []
    if not all(type(size) is int for size in sizes):
        raise TypeError(f"{key} is {sizes!r}, which is not a list of sizes")
    return tuple(sizes)


def _flag(state: Mapping[str, Any], key: str) -> bool | None:
    return _of_type(state, key, bool)


def _list(state: Mapping[str, Any], key: str) -> list[Any] | None:
    return _of_type(state, key, list)


def _dictionary(state: Mapping[str, Any], key: str) -> dict[str, Any]:
    return _of_type(state, key, dict) or {}


def _of_type(state: Mapping[str, Any], key: str, kind: type[T]) -> T | None:
    """The value of a key; None if it is absent. Raises TypeError for a value of another type."""
    value = state.get(key)
    if value is not None and not isinstance(value, kind):
        raise TypeError(f"{key} is {value!r}, which is not a {kind.__name__}")
    return value
