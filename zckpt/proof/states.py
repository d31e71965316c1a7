"""Compares what two checkpoints store besides tensors: schedulers, counters, a user's values.

Values that both have must be equal. A value that only one has is a difference too, with two
exceptions. The other's file format cannot store it; or the value describes how ranks divide
tensors, and the two have different numbers of ranks. A notice lists such values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ..core.checkpoint.facts import (
    FlatBufferEngine,
    NamedWeightsEngine,
    StateDictEngine,
    with_facts,
)
from ..core.checkpoint.inert import Foreign, alike, from_json, inside, nested, to_json
from ..core.checkpoint.manifest import Manifest
from ..core.checkpoint.origin import Origin
from ..core.checkpoint.weights import WEIGHTS, is_optimizers
from ..core.passes.description import Report
from ..errors import Notice, listed, note

MODULE = "module"  # the list depends on the kind of files, so `_names` compares it
"""The key of `Manifest.state` for the list of the names in the module."""
OF_PROGRAM = ("lr_scheduler", "client_state", "module_extra")
"""Keys of `Manifest.state` that are the user's program's, whatever the engine is."""
OF_SIZES = ("tensor_parallel", "pipeline", "universal")
"""Keys of `Manifest.whole_state` about how ranks cut tensors.

They are compared only if both checkpoints have the same format, engine and ranks (`twins`).
"""
OF_SAVING = frozenset(
    (
        *("world_size", "zero_stage", "data_parallel_size", "horizontal_parallel_size"),
        *("model_parallel_size", "tensor_model_parallel_size", "pipeline_model_parallel_size"),
        *("expert_model_parallel_size", "padded_vocab_size", "make_vocab_size_divisible_by"),
        *("ckpt_format", "use_distributed_optimizer", "no_save_optim", "no_save_rng"),
        *("bf16", "fp16", "params_dtype"),
        *("param_state_sharding_type", "distrib_optim_sharding_type"),
    )
)
"""Names of arguments in which two saves of one run may differ, such as numbers of ranks."""
ARGUMENTS = ("megatron.", "client_state.args.", "trainer_options.")
"""Where programs keep their arguments."""
OF_VERSIONS = (
    *("megatron.common.args.", "client_state.args.", "client_state.universal_checkpoint_info"),
    *("trainer_options", "train_step_info"),
)
"""Beginnings of paths of values that one side may lack, because versions of programs differ."""
WITH_OTHER_RANKS = ("_parallel_size", "no_save_rng")
OF_SINGLE_RANKS = "megatron.objects."
OF_PARAMETERS = frozenset(("members", "other", "partitions"))
LOSS_SCALER = "loss_scaler"
SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "scale_factor", "scale_window")
# DeepSpeed's optimizer wrappers store the loss scale, which fp16 needs, in different forms
SCALING = tuple(f"optimizer.{key}" for key in (LOSS_SCALER, "dynamic_loss_scale", *SCALE))
"""Paths in `Manifest.whole_state` of values about the loss scale."""
CLIPPING = "optimizer.clip_grad"
# with them, only DeepSpeed's configuration has the limit
UNCLIPPED = (None, "DeepSpeedZeroOptimizer_Stage3", "FP16_UnfusedOptimizer")
"""DeepSpeed's optimizer wrappers that do not save the gradient clipping limit; None: no wrapper."""
OF_NO_PARAMETER = ("optimizer.beside", "optimizer.among")
"""Where `Manifest.whole_state` has the optimizer's numbers that belong to no parameter."""
MERGED = "deepspeed-universal"
"""A format from which the loader reads nothing but the states and groups of the optimizer."""
SCHEDULER = "lr_scheduler"
COUNTER = "last_batch_iteration"
"""The one key in the state of DeepSpeed's own schedulers; torch's have `last_epoch` and more."""
OF_TRAINER = ("scheduler.pt", "scheduler.bin")
"""Files in which a trainer keeps its scheduler."""
OF_NAMES = ("guessed", "ordered", "file")
"""Keys of the engine's facts that are not compared: they depend on options or a file's name."""
_NOTHING: tuple[Any, ...] = (None, {}, [])


def states(a: Manifest, b: Manifest) -> tuple[list[Report], list[Notice]]:
    """Compares the values of two checkpoints that are not tensors.

    Returns report lines about values that differ, and notices about values that were not compared.
    """
    comparison = _Comparison(a, b)
    comparison.run()
    return comparison.lines, [note("not-compared", text) for text in comparison.not_compared()]


class _Comparison:
    """Compares the values of two checkpoints; collects differences, and values not compared."""

    def __init__(self, a: Manifest, b: Manifest) -> None:
        self.sides = {"a": a, "b": b}
        self.same_engine = engine_name(a) == engine_name(b)
        self.same_stage = a.run.origin.zero_stage == b.run.origin.zero_stage
        self.same_files = twins(a, b)
        self.other_wrapper = self.same_engine and _wrapper(a) != _wrapper(b)
        self.lines: list[Report] = []
        self.of_saving: list[str] = []
        self.of_program: list[str] = []
        self.without_place: dict[str, list[str]] = {"a": [], "b": []}

    def run(self) -> None:
        ours, theirs = (  # the place of the optimizer's step is compared separately
            {key: value for key, value in manifest.whole_state.items() if key != MODULE}
            for manifest in self.sides.values()
        )
        for key in dict.fromkeys((*ours, *theirs)):
            if key in OF_SIZES and not self.same_files:
                continue
            one, other = ours.get(key), theirs.get(key)
            if key == SCHEDULER and self._are_other_schedulers(one, other):
                self.of_program.append(key)
                continue
            if key == "optimizer":
                one, other = _comparable_scales(*self._without_states(one or {}, other or {}))
            self._compare(key, to_json(one), to_json(other))
        if any(path.endswith(WITH_OTHER_RANKS) for path in self.of_saving):
            self._leave_single_ranks()
        if self.same_files:
            self._compare("names", *self._names())
            self._compare_ranks()
            self._compare_layouts()
            self.of_saving += _differing("", *map(_facts, self.sides.values()))
        else:
            self._compare_second_names()

    def _are_other_schedulers(self, a: Any, b: Any) -> bool:
        """Whether the LR schedulers of the two checkpoints cannot be compared.

        `a` and `b` are the schedulers' states; None or empty if a checkpoint has no such state.
        """
        if isinstance(a, Mapping) and isinstance(b, Mapping):  # whether just one is DeepSpeed's own
            return (COUNTER in a) != (COUNTER in b)
        state, other = (a, "b") if isinstance(a, Mapping) else (b, "a")
        if (a in _NOTHING) == (b in _NOTHING) or not isinstance(state, Mapping):
            return False
        if COUNTER in state:  # DeepSpeed's own; the other engine or configuration may have another
            named = [_scheduler_of(manifest) for manifest in self.sides.values()]
            return not self.same_engine or named[0] != named[1]
        # torch's; the other side may have one in a trainer's file, or this one in its client state
        files = self.sides[other].files.siblings
        client_state = self.sides[other].state.get("client_state")
        return any(item.name in OF_TRAINER for item in files) or _has_within(client_state, state)

    def _without_states(self, a: Report, b: Report) -> tuple[Report, Report]:
        """Removes optimizer states that are reported elsewhere, by `values.missing_states`.

        These are all keys in `OF_PARAMETERS` if the engines differ, or else those of only one side.
        """
        kept = OF_PARAMETERS.intersection(a, b) if self.same_engine else set()
        left = OF_PARAMETERS - kept
        one, other = (
            {key: item for key, item in side.items() if key not in left} for side in (a, b)
        )
        for place in OF_NO_PARAMETER:  # {} on the side without numbers makes a line for each
            key = place.partition(".")[2]
            if one.keys() ^ other.keys() >= {key}:
                one, other = ({key: {}, **side} for side in (one, other))
        return one, other

    def _names(self) -> list[dict[str, str]]:
        """Maps, for each side, every name in the module to its kind, such as "a buffer".

        Names that only one side has as a tensor are left out: the comparison of tensors reports
        them.
        """
        one, other = (_weights(manifest) for manifest in self.sides.values())
        alone = one ^ other
        return [
            {name: what for name, what in _names(manifest).items() if name not in alone}
            for manifest in self.sides.values()
        ]

    def _compare_second_names(self) -> None:
        """Reports second names of tied weights that only one side has, if both have the weight."""
        for side, other in (("a", "b"), ("b", "a")):
            known_names = {*_names(self.sides[other]), *self.sides[other].parameters}
            lost = [
                inside("names", alias)
                for owner, parameter in self.sides[side].parameters.items()
                if not known_names.isdisjoint((owner, *parameter.aliases))
                for alias in parameter.aliases
                if alias not in known_names
            ]
            if _has_second_names(self.sides[other]):
                self.lines += [{"key": path, "only": side} for path in lost]
            else:
                self.without_place[other] += lost

    def _leave_single_ranks(self) -> None:
        """Removes report lines about random states of single ranks that only one side has.

        Runs with other numbers of ranks have other random states, and some runs have none.
        """
        for line in [*self.lines]:
            if line["key"].startswith(OF_SINGLE_RANKS) and "only" in line:
                self.without_place["b" if line["only"] == "a" else "a"].append(line["key"])
                self.lines.remove(line)

    def _compare_ranks(self) -> None:
        """Compares values of which each rank has its own, for all ranks but the first.

        For the other ranks, a manifest lists only values that differ from the first rank's (in
        `of_ranks`). A value that is not listed is taken from the first rank.
        """
        a, b = self.sides.values()
        for name in dict.fromkeys((*a.files.of_ranks, *b.files.of_ranks)):
            ours, theirs = a.files.of_ranks.get(name, {}), b.files.of_ranks.get(name, {})
            for key in dict.fromkeys((*ours, *theirs)):
                one, other = (
                    values[key] if key in values else _as_of_first(manifest, key)
                    for values, manifest in ((ours, a), (theirs, b))
                )
                self._compare(f"{name}: {key}", one, other)

    def _compare_layouts(self) -> None:
        """Compares what files of the same name state about the run's sizes and its partitions.

        Keys that only one side has are not compared: some versions of an engine do not write them.
        """
        a, b = (manifest.files.layout for manifest in self.sides.values())
        for name in dict.fromkeys((*a, *b)):
            ours, theirs = a.get(name, {}), b.get(name, {})
            if ours and theirs:
                self.of_saving += [
                    f"{name}: layout.{key}" for key in sorted(ours.keys() ^ theirs.keys())
                ]
                shared = ours.keys() & theirs.keys()
                ours, theirs = (
                    {key: own[key] for key in own if key in shared} for own in (ours, theirs)
                )
            self._compare(f"{name}: layout", ours, theirs)

    def _compare(self, path: str, a: Any, b: Any) -> None:
        """Compares two JSON values at the key `path`, and adds a line for each difference.

        NaN equals NaN.
        """
        if a == b:  # first, since both may be very large
            return
        a, b = (self._opened(value) for value in (a, b))
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            for key in dict.fromkeys((*a, *b)):
                if key in a and key in b:
                    self._compare(inside(path, key), a[key], b[key])
                else:
                    self._one_sided(inside(path, key), a.get(key), b.get(key))
        elif "." not in path and (a in _NOTHING or b in _NOTHING):
            self._one_sided(path, a, b)
        elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
            for place, (one, other) in enumerate(zip(a, b, strict=True)):
                self._compare(inside(path, place), one, other)
        elif self._is_of_saving(path):
            self.of_saving.append(path)
        else:
            self.lines.append({"key": path, "a": a, "b": b})

    def _one_sided(self, path: str, a: Any, b: Any) -> None:
        """Reports a value that only one checkpoint has, as a difference or as not compared.

        It is not compared if it depends on how the checkpoint was saved, or if the file format of
        the other checkpoint cannot store it. An empty dictionary counts as no value.
        """
        side, other = ("a", "b") if b in _NOTHING else ("b", "a")
        if a in _NOTHING and b in _NOTHING:
            return
        if self._is_of_saving(path):
            self.of_saving.append(path)
        elif self._has_place(self.sides[other], path):
            self.lines.append({"key": path, "only": side})
        else:
            self.without_place[other].append(path)

    def _has_place(self, manifest: Manifest, path: str) -> bool:
        """Whether the file format of a checkpoint can store a value at the key `path`."""
        part, engine = path.partition(".")[0], manifest.run.engine
        if _is_weights(manifest) or path.startswith(OF_VERSIONS):
            return False
        if path == CLIPPING and self.other_wrapper and _wrapper(manifest)[0] in UNCLIPPED:
            return False
        if path.startswith(OF_NO_PARAMETER):
            has_dict = isinstance(engine, (FlatBufferEngine, StateDictEngine))
            return has_dict and manifest.format != MERGED
        if part in OF_PROGRAM:
            if isinstance(engine, StateDictEngine):
                return engine.folders is None or part == "module_extra"
            return isinstance(engine, FlatBufferEngine)
        return self.same_engine and (part != "optimizer" or self.same_stage)

    def _is_of_saving(self, path: str) -> bool:
        if path.startswith(ARGUMENTS) and path.rpartition(".")[2] in OF_SAVING:
            return True
        return self.other_wrapper and path.startswith(SCALING)

    def _opened(self, value: Any) -> Any:
        """Replaces a tagged JSON value: a tuple becomes a list, an object a dictionary.

        Values inside it are not changed, except the state of an object.
        """
        if not isinstance(value, dict) or len(value) != 1:
            return value
        ((tag, inner),) = value.items()
        if tag in ("$tuple", "$size"):
            return inner
        if tag in ("$dict", "$ordered"):
            return by_keys(inner)
        if tag == "$object":
            rest = {key: item for key, item in inner.items() if key != "state"}
            state = self._opened(inner.get("state"))
            return {**rest, **(state if isinstance(state, dict) else {"state": state})}
        return value

    def not_compared(self) -> Iterator[str]:
        """Yields sentences that say which values were not compared, and why."""
        if self.of_saving:
            yield f"{listed(self.of_saving, 4)}: the two differ in how they were saved"
        if self.of_program:
            yield f"{SCHEDULER}: the two schedulers are different, or stored in different places"
        a, b = self.sides.values()
        for manifest, its_twin in ((a, b), (b, a)):
            if manifest.files.of_ranks and not self.same_files:
                keys = dict.fromkeys(key for own in manifest.files.of_ranks.values() for key in own)
                yield (
                    f"{listed(list(keys), 4)} of the ranks after the first in {manifest.root}: "
                    f"{its_twin.root} has other numbers of ranks, or another kind of files"
                )
        for side, other in (("b", "a"), ("a", "b")):
            paths, root = self.without_place[side], self.sides[side].root
            if paths and _is_weights(self.sides[side]):
                yield f"schedulers, counters and the like: {root} has only weights"
            elif paths:
                them = "it" if len(paths) == 1 else "them"
                yield (
                    f"{listed(paths, 4)}: only {self.sides[other].root} has {them}, and the format "
                    f"of {root} cannot store {them}"
                )


def _scheduler_of(manifest: Manifest) -> Any:
    engine = manifest.run.engine
    config = engine.config if isinstance(engine, FlatBufferEngine) else {}
    return nested(config, "scheduler", "type")


def _has_within(value: Any, wanted: Mapping[str, Any]) -> bool:
    if not isinstance(value, Mapping):
        return False
    return alike(value, wanted) or any(_has_within(item, wanted) for item in value.values())


def by_keys(pairs: Iterable[Any]) -> dict[Any, Any]:
    """Converts a list of pairs to a dictionary: the manifest's JSON stores some dictionaries so."""
    return {
        key if isinstance(key, (str, int, float)) else str(from_json(key)): item
        for key, item in pairs
    }


def _differing(path: str, a: Any, b: Any) -> Iterator[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        for key in dict.fromkeys((*a, *b)):
            yield from _differing(inside(path, key) if path else key, a.get(key), b.get(key))
    elif not alike(a, b):
        yield path


def twins(a: Manifest, b: Manifest) -> bool:
    """Whether two checkpoints have the same format, engine, ZeRO stage, ranks and module type.

    Then their files have the same names and sizes.
    """
    same_engine = a.format == b.format and engine_name(a) == engine_name(b)
    return same_engine and _sizes(a) == _sizes(b) and _wrapper(a)[1] == _wrapper(b)[1]


def _weights(manifest: Manifest) -> set[str]:
    return {entry.parameter for entry in manifest.entries.values() if entry.slot in WEIGHTS}


def _names(manifest: Manifest) -> dict[str, str]:
    """Maps every name in the module to a phrase for the report.

    The phrase is "a second name of fc1.weight" for an alias, "a buffer", or a phrase for other
    names.
    """
    names = dict.fromkeys(map(str, manifest.state.get("module") or ()), "a name of the module")
    names |= dict.fromkeys(manifest.buffers, "a buffer")
    for owner, parameter in manifest.parameters.items():
        names |= dict.fromkeys(parameter.aliases, f"a second name of {owner}")
    return names


def _has_second_names(manifest: Manifest) -> bool:
    """Whether files of this kind list the second names (aliases) of tied weights.

    For example, safetensors files do not, because they store each weight once.
    """
    engine = manifest.run.engine
    if isinstance(engine, StateDictEngine):
        return not (engine.dialect or engine.storage or _is_weights(manifest))
    return isinstance(engine, FlatBufferEngine)


def _facts(manifest: Manifest) -> Report:
    """Properties in which two saves of one run may differ, such as the engine, as JSON."""
    place = manifest.run.step_place
    facts = with_facts({}, manifest.run.engine, None).get("engine") or {}
    facts = {key: value for key, value in facts.items() if key not in OF_NAMES}
    return {
        "engine": to_json(facts),
        "optimizer": manifest.optimizer,
        "step": None if place is None else {**place.to_state(), "stale": to_json(place.stale)},
        "source": plain_facts(manifest.run.origin),
    }


def plain_facts(origin: Origin) -> Report:
    """How a checkpoint was saved, such as the format, as JSON.

    Facts that are lists or dictionaries are left out.
    """
    facts = origin.to_json()
    return {key: item for key, item in facts.items() if isinstance(item, (str, int, type(None)))}


def _as_of_first(manifest: Manifest, path: str) -> Any:
    part, _, key = path.partition(".")
    value = manifest.state.get(part)
    return to_json(value.get(key) if key and isinstance(value, Mapping) else value)


def engine_name(manifest: Manifest) -> tuple[str | None, ...]:
    """A tuple that is equal for two checkpoints whose values can be compared.

    It has the engine's name. For ONNX Runtime (NamedWeightsEngine) it also has the kind of files,
    because the values depend on this kind.
    """
    engine = manifest.run.engine
    if isinstance(engine, NamedWeightsEngine):
        return engine.name, engine.dialect
    return (None if engine is None else engine.name,)


def _wrapper(manifest: Manifest) -> tuple[str | None, str | None]:
    """DeepSpeed's optimizer wrapper and the module's type, on which loss scaling depends."""
    engine = manifest.run.engine
    if isinstance(engine, FlatBufferEngine):
        return engine.optimizer_class, engine.dtype
    return None, None


def _sizes(manifest: Manifest) -> tuple[Any, ...]:
    return manifest.run.origin.zero_stage or None, manifest.run.origin.sizes


def _is_weights(manifest: Manifest) -> bool:
    return manifest.groups is None and not any(map(is_optimizers, manifest.slots))


def _comparable_scales(a: Report, b: Report) -> tuple[Report, Report]:
    """Makes the loss scalers of two checkpoints comparable if they are stored differently.

    `a` and `b` are the optimizers' values that are not tensors.
    """
    # None means the same as a scaler that does not scale the loss
    if any(LOSS_SCALER in side and side[LOSS_SCALER] is None for side in (a, b)):
        a, b = ({k: v for k, v in side.items() if not _is_unscaled(k, v)} for side in (a, b))
    # one side may have an object, and the other only the object's numbers
    if {LOSS_SCALER, "cur_scale"} <= a.keys() ^ b.keys():
        return _with_numbers(a), _with_numbers(b)
    return a, b


def _is_unscaled(key: str, value: Any) -> bool:
    """Whether a value is a loss scaler that does not change the loss: None, or a constant 1."""
    state = value.state if isinstance(value, Foreign) else None
    if key != LOSS_SCALER or not isinstance(state, dict):
        return key == LOSS_SCALER and value is None
    return state.get("cur_scale") == 1 and not state.get("dynamic", "min_scale" in state)


def _with_numbers(optimizer: Report) -> Report:
    scaler = optimizer.get(LOSS_SCALER)
    state = scaler.state if isinstance(scaler, Foreign) and isinstance(scaler.state, dict) else {}
    rest = {key: item for key, item in optimizer.items() if key not in (LOSS_SCALER, "overflow")}
    # if a scale does not change, only one number matters
    kept = SCALE if rest.get("dynamic_loss_scale") else SCALE[:1]
    numbers = {key: value for key, value in {**state, **rest}.items() if key in kept}
    return {**{key: item for key, item in rest.items() if key not in SCALE}, **numbers}
