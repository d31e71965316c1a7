"""Builds the manifest of a checkpoint: zckpt's table of its tensors, parameters and groups.

The input are state dicts in which every parameter already has a name. In these checkpoints the
optimizer updates the module's own weights; there are no fp32 masters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from msgspec.structs import replace

from ...core.checkpoint import agreement
from ...core.checkpoint.entries import Entry, Key
from ...core.checkpoint.facts import StateDictEngine, StepPlace
from ...core.checkpoint.inert import Scalar, TensorName, inside, is_number, map_values
from ...core.checkpoint.manifest import (
    Files,
    Manifest,
    Notices,
    Parameter,
    Run,
    Sighting,
    slot_name,
)
from ...core.checkpoint.optimizer_states import OF_OTHERS, StateRow, States, of_parameters
from ...core.grouping import by_key
from ...errors import InconsistentCheckpoint, listed, warning
from ...naming import ties
from ...training import steps
from ...training.lightning import place_of
from ...training.optimizers import name_of_groups
from ...training.trainers import config_of
from ..extra_states import ExtraState, sorted_out
from ..reading import Reading
from ..schedulers import KEYS, LISTED
from .equal_tensors import second_names
from .own_facts import joined
from .roots import Root
from .state_dict_search import (
    NamedModel,
    is_buffer,
    is_extra,
    matches_any,
    merged,
    value_at,
    without,
)
from .tree import InPieces, Leaf, SavedTree, StepStatement, TreePath, dotted, missing_number


class ManifestBuilder:
    """Builds the manifest of a checkpoint from named state dicts of models and optimizers.

    `build` adds weights, optimizer states, steps, and all other values.
    """

    def __init__(
        self,
        saved: SavedTree,
        roots: Sequence[Root],
        models: Sequence[NamedModel],
        reading: Reading,
    ) -> None:
        self.saved = saved
        self.roots = roots
        self.models = models
        values = {name: value for model in models for name, value in model.weights.items()}
        self.model = {name: leaf for name, leaf in values.items() if isinstance(leaf, Leaf)}
        for name, value in values.items():
            if isinstance(value, InPieces):
                raise value.refused(name)
        facts = {model.prefix: model.facts for model in models}
        self.facts = joined(facts) if len(facts) > 1 else models[0].facts
        self.optimizers = {
            path: each for model in models for path, each in model.optimizers.items()
        }
        self.optimizer = merged(list(self.optimizers.values()))
        optimizer_paths = [path for root in roots for path in root.optimizers]
        self.ignored = optimizer_paths if reading.weights_only else []
        self.step_policy = reading.step_policy
        self.globs = reading.buffers
        self.entries: dict[Key, Entry] = {}
        self.replicas: list[Entry] = []
        self.parameters: dict[str, Parameter] = {}
        self.numbers: list[StateRow] = []
        self.buffers: list[str] = []
        self.other: dict[str, dict[str, Any]] = {}
        self.in_pieces: dict[tuple[str, str], dict[str, InPieces]] = {}
        self.sightings: list[Sighting] = []
        self.step_place: StepPlace | None = None
        self.aliases: dict[str, str] = {}
        self.buffers_named = False
        self.warnings = [*saved.warnings, *(line for model in models for line in model.warnings)]

    def build(self) -> Manifest:
        optimizer, saved = self.optimizer, self.saved
        trained = [name for members in optimizer.members for name in members]
        self.aliases = self._all_aliases(trained)
        self._add_trained()
        self._add_others(trained)
        self._add_aliases()
        groups = self._groups() if self.optimizers and saved.layout.keeps_groups else None
        in_pieces = (
            ExtraState(
                key,
                [*pieces.values()],
                f"sharded tensors of the class {kind}",
                tuple(pieces),
            )
            for (key, kind), pieces in self.in_pieces.items()
        )
        of_optimizers = (each for model in self.models for each in model.extra_states)
        extra_states = sorted_out([*of_optimizers, *in_pieces], self._without_tensors)
        state, engine = self._state()
        other_rows = of_parameters("other", self._without_tensors(self.other, OF_OTHERS))
        return Manifest(
            root=saved.root,
            format=str(saved.origin.format),
            entries=self.entries,
            parameters=self.parameters,
            buffers=tuple(self.buffers),
            groups=groups,
            optimizer=self._optimizer(groups),
            state=state,
            states=States((*self.numbers, *other_rows, *extra_states)),
            replicas=tuple(self.replicas),
            roots={root.name: tuple(map(dotted, root.optimizers)) for root in self.roots}
            if self._are_several()
            else {},
            run=Run(
                origin=saved.origin,
                engine=engine,
                step_place=self.step_place,
                steps=tuple(self.sightings),
            ),
            files=Files(
                records=saved.files.records,
                paths=tuple(saved.files.paths),
                siblings=tuple(saved.files.siblings),
                omitted_files=tuple(saved.files.omitted_files),
                of_ranks=saved.ranks.of_ranks,
                unused=tuple(saved.files.unused),
                laid=saved.files.laid,
            ),
            notices=Notices(
                likely=tuple(key for root in self.roots for key in root.likely),
                omitted=tuple(saved.omitted),
                warnings=tuple(self.warnings),
                inferred=tuple(name for model in self.models for name in model.inferred),
                buffers_named=self.buffers_named,
                uncompared=saved.ranks.uncompared,
            ),
        )

    def _are_several(self) -> bool:
        """Whether the checkpoint has several models or several optimizers.

        Of all formats that zckpt writes, only the universal format can store these.
        """
        return len(self.roots) > 1 or len(self.roots[0].optimizers) > 1

    # -- weights

    def _all_aliases(self, trained: Sequence[str]) -> dict[str, str]:
        """Maps second names of tied weights to first names: `{"lm_head.weight": "embed.weight"}`.

        zckpt writes the ties into its own files; in other files, equal tensors are tied. Ties
        from config.json are added for names that the files lack.
        """
        facts = self.facts
        aliases = self._aliases_by_content(trained) if facts is None else dict(facts["aliases"])
        config = config_of(self.saved.files.siblings, ties.CONFIG)
        return aliases | ties.stated_ties(config, [*self.model, *aliases])

    def _aliases_by_content(self, trained: Sequence[str]) -> dict[str, str]:
        """Maps each second name of a tied weight to its first name, found by equal contents.

        An equal tensor may also be a frozen copy of a weight. If this cannot be excluded, a warning
        is added.
        """
        aliases: dict[str, str] = {}
        doubtful: list[str] = []
        of_model, of_trained = self._by_root(self.model), self._by_root(trained)
        for root in self.roots:  # equal models are no aliases of each other
            model = {name: self.model[name] for name in of_model.get(root.prefix, ())}
            trained_names = [name for name in of_trained.get(root.prefix, ()) if name in model]
            names, unproven = second_names(model, trained_names, self.optimizer.state)
            aliases |= names
            doubtful += unproven
        if doubtful:
            message = (
                f"{listed(doubtful, 4)} equals a trained weight that was never updated: zckpt "
                "reads it as a second name of that tied weight, but it may be a frozen copy"
            )
            self.warnings.append(warning("tie-inferred", message, subject=doubtful[0]))
        return aliases

    def _by_root(self, names: Iterable[str]) -> dict[str, list[str]]:
        """Maps each model's prefix, such as "generator.", to the names that begin with it."""
        prefixes = {root.prefix for root in self.roots}
        lengths = {len(prefix) for prefix in prefixes}  # there are few lengths
        pairs = ((name[:length], name) for name in names for length in lengths)
        return by_key((prefix, name) for prefix, name in pairs if prefix in prefixes)

    def _add_trained(self) -> None:
        stepped = self._steps()
        scalars = self._scalar_keys()
        for group, members in enumerate(self.optimizer.members):
            own_group = group if self.saved.layout.keeps_groups else None
            for name in members:
                shape = self.model[name].shape
                self._add_weight(name, Parameter(shape, group=own_group, step=stepped.get(name)))
                self._add_states(name, scalars)

    def _add_others(self, trained: Sequence[str]) -> None:
        """Adds the tensors that no optimizer lists: weights first, then buffers.

        The weights are frozen if the model has an optimizer, or as zckpt's own facts state.
        """
        facts, owned = self.facts, set(trained)
        untrained_names = [
            name for name in self.model if name not in owned and name not in self.aliases
        ]
        if facts is None:
            sharded = any(self.model[name].sharded for name in trained)
            self.buffers = [
                name for name in untrained_names if is_buffer(name, self.model[name], sharded)
            ]
        else:
            of_module = {*facts["buffers"]}
            self.buffers = [name for name in untrained_names if name in of_module]
        if said := {name for name in untrained_names if matches_any(name, self.globs)}:
            buffers = {*self.buffers, *said}
            self.buffers = [name for name in untrained_names if name in buffers]
            self.buffers_named = True
        # without an optimizer nothing shows which weights are frozen
        shown = {root.prefix for root in self.roots if {*root.optimizers} & {*self.optimizers}}
        of_model = self._by_root(untrained_names)
        untrained = {name for prefix in shown for name in of_model.get(prefix, ())}
        buffers, stated_frozen = {*self.buffers}, {*(facts or {}).get("frozen", ())}
        for name in untrained_names:
            if name not in buffers:
                frozen = name in (untrained if facts is None else stated_frozen)
                self._add_weight(name, Parameter(self.model[name].shape, trainable=not frozen))
        for name in self.buffers:
            self._add_entry(name, "param", self.model[name])

    def _add_aliases(self) -> None:
        for owner, names in by_key((owner, alias) for alias, owner in self.aliases.items()).items():
            if parameter := self.parameters.get(owner):
                aliases = (*parameter.aliases, *names)
                self.parameters[owner] = replace(parameter, aliases=aliases)
        for alias, owner in self.aliases.items():
            if owner not in self.parameters:  # an alias of a buffer: both names keep it
                self.buffers.append(alias)
                self._add_entry(alias, "param", self.model[alias])
                continue
            if alias not in self.model:
                continue
            self._need_alike(alias, owner)
            memory = self.model[alias].memory
            if memory is None or memory != self.model[owner].memory:
                copy = self.model[alias].fragments
                self.replicas.append(replace(self.entries[owner, "param"], fragments=copy))

    def _need_alike(self, alias: str, owner: str) -> None:
        """Raises InconsistentCheckpoint if a weight's two names have different shapes or types."""
        second, first = self.model[alias], self.model[owner]
        if (second.dtype, second.shape) != (first.dtype, first.shape):
            raise InconsistentCheckpoint(
                "mixed-saves",
                f"{self.saved.root}: {alias} should be a second name of the tied weight {owner}, "
                f"but {alias} is {second.dtype} {list(second.shape)}, and {owner} is "
                f"{first.dtype} {list(first.shape)}",
                hint="the model was changed after it was saved: take another copy of its files",
                file=self.saved.root,
                subject=alias,
            )

    def _add_entry(self, name: str, slot: str, leaf: Leaf) -> None:
        self.entries[name, slot] = leaf.entry(name, slot)

    def _add_weight(self, name: str, parameter: Parameter) -> None:
        self.parameters[name] = parameter
        self._add_entry(name, "param", self.model[name])

    # -- states of the optimizer

    def _scalar_keys(self) -> set[str]:
        """Finds optimizer states that are one number per parameter, such as NAdam's `mu_product`.

        The number may be stored as a Python number or as a tensor of one element. One parameter
        with such a number is enough: then the key means a number for all parameters.
        """
        return {
            key
            for name, state in self.optimizer.state.items()
            for key, value in state.items()
            if is_number(value, Leaf)
            and not (isinstance(value, Leaf) and value.shape == self.model[name].shape)
        }

    def _add_states(self, name: str, scalars: set[str]) -> None:
        parameter = self.parameters[name]
        for key, value in self.optimizer.state.get(name, {}).items():
            if key == "step" and _is_step(value):
                continue
            is_named = isinstance(key, str)  # zckpt names a tensor whose key was no string
            is_slot = isinstance(value, Leaf) and value.shape == parameter.shape and not value.name
            if _is_missing(value) and not is_slot:
                continue
            if is_named and key in scalars and is_number(value, Leaf):
                self.numbers.append(StateRow(key, "number", (name,), _number(value)))
            elif is_named and is_slot:
                self._add_entry(name, slot_name(key), value)
            elif isinstance(value, InPieces):
                self.in_pieces.setdefault((key, value.name), {})[name] = value
            else:
                self.other.setdefault(name, {})[key] = value

    # -- steps

    def _steps(self) -> dict[str, agreement.Step]:
        """Maps each parameter's name to its step, the number of completed optimizer updates.

        Also lists every place in the files that states a step (in `sightings`), and adds warnings.
        """
        if not self.optimizers:
            return {}
        in_states, in_groups = steps.StatedSteps("state"), steps.StatedSteps("group")
        for name, state in self.optimizer.state.items():
            in_states.add(name, *_step(state.get("step")))
        for group, members in zip(self.optimizer.groups, self.optimizer.members, strict=True):
            for name in members:
                in_groups.add(name, *_step(group.get("step")))
        believed = steps.believed(in_states, in_groups)
        named = (self.facts or {}).get("optimizer")
        self.step_place = steps.place_of(believed, in_groups, named)
        self._need_one_save(believed.where)
        for statement in (in_states, in_groups):
            for sighting, stalled in steps.sightings_of(statement, believed):
                self.sightings.append(sighting)
                self.warnings += [stalled] if stalled else []
        return believed.settled(self.step_policy)

    def _need_one_save(self, where: str) -> None:
        """Raises InconsistentCheckpoint if ranks' files state different steps: they mix saves.

        `where` tells which steps are compared: those in optimizer states ("state") or those in
        parameter groups ("group").
        """
        begin = {"state": "state.", "group": "param_groups."}[where]
        for optimizer in self.optimizers:
            by_path: dict[TreePath, list[tuple[StepStatement, agreement.Step]]] = {}
            for item in self.saved.ranks.steps:
                front, rest = item.path[: len(optimizer)], item.path[len(optimizer) :]
                step = steps.step_of(_step(item.value)[0])
                if front == optimizer and dotted(rest).startswith(begin) and step is not None:
                    by_path.setdefault(item.path, []).append((item, step))
            for path, items in by_path.items():
                copies = [(f"{item.files[0]}: {dotted(path)}", step) for item, step in items]
                agreement.agree(copies, self.step_policy)
            items_with_steps = chain.from_iterable(by_path.values())
            by_file = ((file, step) for item, step in items_with_steps for file in item.files)
            agreement.need_one_save(by_file, self.step_policy)

    # -- what is not a tensor

    def _groups(self) -> tuple[dict[str, Any], ...]:
        return tuple(
            {
                key: self._hyper(value, f"param_groups.{place}.{key}")
                for key, value in group.items()
                if key != "param_names" and not (key == "step" and _is_step(value))
            }
            for place, group in enumerate(self.optimizer.groups)
        )

    def _hyper(self, value: Any, path: str) -> Any:
        """Converts a hyper-parameter of a group, such as `lr`, for the manifest.

        A tensor of one element (Prodigy has one) becomes a number. `path` is the value's dotted
        path, such as "param_groups.0.lr". Returns None if the tensor's file is lost.
        """
        if _is_missing(value):
            return None
        by_value = isinstance(value, Leaf) and is_number(value, Leaf)
        return _number(value) if by_value else self._without_tensors(value, path)

    def _optimizer(self, groups: Sequence[dict[str, Any]] | None) -> str | None:
        """Infers the class names of the optimizers from the keys of their states and groups.

        Returns None if the files have no parameter groups.
        """
        states = self.optimizer.state
        keys = [
            {key for name in members for key in states.get(name, ())}
            for members in self.optimizer.members
        ]
        return None if groups is None else name_of_groups(keys, groups)

    def _state(self) -> tuple[dict[str, Any], StateDictEngine]:
        """Collects everything but the tensors of model and optimizer, such as the LR scheduler.

        Also returns the keys and file names that the program uses, so that zckpt can write them
        again.
        """
        models = {root.model for root in self.roots}
        rest = without(self.saved.tree, models | {*self.optimizers, *self.ignored})
        extra = {
            root.prefix + key: self._without_tensors(
                value, inside("module_extra", root.prefix + key)
            )
            for root in self.roots
            for key, value in value_at(self.saved.tree, root.model).items()
            if not isinstance(value, Leaf) and (root.model or is_extra(key))
        }
        if () in models:
            rest = {key: value for key, value in rest.items() if not is_extra(key)}
        scheduler = next((key for key in KEYS if isinstance(rest.get(key), dict)), None)
        dtypes = Counter(self.entries[name, "param"].dtype for name in self.parameters)
        folders = None if self._are_several() else self.saved.layout.folders
        optimizers = list(self.optimizers) or self.ignored
        engine = StateDictEngine(
            "torch",
            max(dtypes, key=dtypes.__getitem__, default="F32"),
            place_of(self.saved.tree, self.roots[0].model) if len(self.roots) == 1 else (),
            optimizers[0] if len(optimizers) == 1 else None,
            self.optimizer.layout or None,
            scheduler,
            None if folders is None else tuple(folders),
            self.facts is None,
            self.models[-1].has_adapter,
            storage=None if self._are_several() else self.saved.layout.storage,
            bare=any(model.bare for model in self.models),
            file=None if self._are_several() else self.saved.layout.file,
        )
        state: dict[str, Any] = {
            "module": list(dict.fromkeys((*self.model, *self.aliases, *extra))),
            "module_extra": extra,
        }
        if scheduler is not None:
            state["lr_scheduler"] = self._without_tensors(rest.pop(scheduler), "lr_scheduler")
            self._sight_scheduler("lr_scheduler", state["lr_scheduler"])
        if rest:
            state["client_state"] = self._without_tensors(rest, "client_state")
            schedulers = state["client_state"].get(LISTED)
            for place, scheduler_state in enumerate(
                schedulers if isinstance(schedulers, list) else ()
            ):
                self._sight_scheduler(f"{LISTED}.{place}", scheduler_state)
        return state, engine

    def _sight_scheduler(self, where: str, scheduler: Any) -> None:
        if isinstance(scheduler, dict):
            counters = steps.SCHEDULER_COUNTERS
            self.sightings += steps.counter_sightings(where, scheduler, counters)

    def _without_tensors(
        self, value: Any, path: str, entries: dict[Key, Entry] | None = None
    ) -> Any:
        """Replaces each tensor in a value by its name, and adds the tensor to `entries`.

        A 0-d tensor becomes a number, unless it is complex. `path` is the value's dotted path,
        which becomes the name unless zckpt has stated one. Without `entries`, tensors go to the
        manifest's own, and UnsupportedCheckpoint is raised for sharded tensors of an unknown class.
        """
        entries = self.entries if entries is None else entries
        if isinstance(value, Leaf):
            if not value.shape and value.dtype != "C64":
                return value.number()
            name = value.name or path
            entries[name, "state"] = value.entry(name, "state")
            return TensorName(name)
        if isinstance(value, InPieces) and entries is self.entries:
            raise value.refused(path)
        if isinstance(value, InPieces):  # a state that is only compared
            value = list(value.pieces)
        return map_values(
            value, lambda item, key: self._without_tensors(item, inside(path, key), entries)
        )


def _is_missing(value: Any) -> bool:
    """Whether a value is a number that cannot be read because its file is lost."""
    return isinstance(value, Leaf) and value.number is missing_number and is_number(value, Leaf)


def _number(value: Any) -> Scalar:
    if isinstance(value, Leaf):
        return replace(value.number(), shape=value.shape)
    return Scalar(value, type(value).__name__)


def _is_step(value: Any) -> bool:
    """Whether the value under an optimizer state's key `step` is a number of updates.

    Some optimizers store something else there, which is then read as any other state.
    """
    return steps.step_of(_step(value)[0]) is not None


def _step(state: Any) -> tuple[Any, tuple[int, ...]]:
    """The number in a stored step, and its shape.

    The number is None for a tensor of several elements. The shape is () for a plain number.
    """
    if isinstance(state, Leaf):
        return (state.number() if state.numel == 1 else None), state.shape
    return state, ()
