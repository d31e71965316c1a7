"""Makes the state dicts that a torch program would save, from a manifest: the reverse of read.py.

Tensors are blank (type and shape only); their bytes are copied later. Groups from another format
get all keys that their optimizer has in torch 2.13, because loading requires these keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from msgspec import Struct

from ...core.checkpoint.facts import FlatBufferEngine
from ...core.checkpoint.inert import Scalar, TensorName
from ...core.checkpoint.manifest import Manifest, slot_key
from ...core.checkpoint.optimizer_states import AMONG, BESIDE, OTHER
from ...core.checkpoint.weights import WIDE, is_optimizers, weight_of
from ...errors import Notice, WrongOption, brief, counted, listed, note
from ...naming import peft
from ...training.hyperparameters import given_groups, torch_groups
from ...training.optimizers import check_moments
from ...training.options import DTYPE, Options
from ...training.options import OPTIMIZER as ADAM_CLASS
from ...training.steps import WRITTEN, steps_of_groups, torch_place
from ...training.trainers import number, program_of
from ..private import own_names
from .keys import OPTIMIZER, is_optimizers_key, keys_of
from .tree import TreePath, dotted

OF_TORCH = (
    "module", "module_extra", "module_metadata", "lr_scheduler", "client_state", "optimizer",
)  # fmt: skip


class BlankTensor(Struct, frozen=True):
    """A tensor of a target as its type and shape; its elements are copied later."""

    dtype: str
    shape: tuple[int, ...]


class StateDicts:
    """The state dicts that a torch program would save: values and blank tensors by path.

    `format` is the target's format. The groups of a source in the same format are kept. `layout` is
    the kind of keys in the optimizer's state dict: "nested", "flat" or "raw". None means the
    source's layout, or "nested" if the source has none or has complete files.
    """

    def __init__(
        self, source: Manifest, options: Options, format: str | None, layout: str | None = None
    ) -> None:
        self.source = source
        self.options = options
        self._too_large: frozenset[Any] = frozenset()  # keys of the program's own state
        self.keys = keys_of(source.run.engine)
        self.model: TreePath = self.keys.model
        place = self.keys.optimizer  # () if the optimizer's keys are beside the model's
        self.optimizer: TreePath = OPTIMIZER if place is None else place
        self.scheduler = self.keys.scheduler or "lr_scheduler"
        # numbers are usual in complete files: they do not determine the names that items should
        # have
        self.layout = layout or (None if self.keys.whole else self.keys.layout) or "nested"
        self.warnings = list(source.notices.warnings)
        self.omitted = list(source.notices.omitted)
        self.aliases = source.owners
        self.groups: list[dict[str, Any]] = []
        self.adapter = False
        states = set(filter(is_optimizers, source.slots))
        self.optimizes = not options.weights_only and bool(source.groups is not None or states)
        self.named = options[ADAM_CLASS] if self.optimizes else None
        check_moments(self.named, states)
        if self.optimizes:
            if source.run.origin.format == format and self.named is None:
                self.groups = given_groups(source, options)
            else:
                self.groups, assumed = torch_groups(source, options, self.named)
                self.warnings += assumed
        self.names = {*source.parameters, *self.aliases, *source.buffers}
        self.step_place = torch_place(source, self.named)
        self._put_steps_in_groups()
        members = [name for place in range(len(self.groups)) for name in self.members(place)]
        self.numbers = {name: number for number, name in enumerate(members)}

    def _put_steps_in_groups(self) -> None:
        """Writes the step into each parameter group, if the target's optimizer keeps it there.

        No group gets a step if the parameters of any group have different steps.
        """
        steps = steps_of_groups(self.source, len(self.groups))
        in_group = self.step_place.where == "group"
        # without a step in its group, Apex's FusedAdam counts from 1 again
        self.step_in_group = in_group and all(len(values) < 2 for values in steps)
        if self.step_in_group:
            number = self.step_place.number
            self.groups = [
                group | ({"step": number(values.pop()).unwrapped()} if values else {})
                for group, values in zip(self.groups, steps, strict=True)
            ]
        # some optimizers keep an unused `step` in their groups
        elif not in_group and self.step_place.stale is not None:
            self.groups = [group | {"step": self.step_place.stale} for group in self.groups]

    def items(self) -> Iterator[tuple[TreePath, Any]]:
        """Yields every value with its path, in the order in which a torch program would save it."""
        for name, value in self.weights_as_saved():
            yield from flattened((*self.model, name), value)  # an extra state may be a dictionary
        if self.options.weights_only:
            return
        if self.optimizes:
            yield from self._optimizer_items()
        state = self.source.state
        if state.get("lr_scheduler") is not None:
            yield from flattened((self.scheduler,), state["lr_scheduler"])
        yield from self.program_items()

    def program_items(self) -> Iterator[tuple[TreePath, Any]]:
        """Yields the values of the program's own state that are saved, with their paths."""
        for path, value in self._client_items():
            if not self._is_taken(path):
                yield path, value

    def _client_items(self) -> Iterator[tuple[TreePath, Any]]:
        if self.options.weights_only:
            return
        for key, value in (self.source.state.get("client_state") or {}).items():
            if key not in self._too_large:
                yield from flattened((str(key),), value)

    def omit_larger(self, most: int) -> list[tuple[Any, int]]:
        """Leaves out values of the program that consist of more than `most` single values.

        Returns the keys of what was left out, each with its number of values.
        """
        if self.options.weights_only:
            return []
        state = self.source.state.get("client_state") or {}
        counts = [(key, sum(1 for _ in flattened((key,), value))) for key, value in state.items()]
        large = [(key, count) for key, count in counts if count > most]
        self._too_large = frozenset(key for key, _ in large)
        return large

    def _is_taken(self, path: TreePath) -> bool:
        """Whether a value of `client_state`, the program's own state, must be left out.

        True if a state dict of the target lies at the value's `path`, above it or below it.
        """
        # DeepSpeed has other keys of its own: its client_state may have keys such as `model`
        if not self.model and path[0] in self.names:
            return True
        taken = [self.model] if self.model else []
        if self.optimizes and not self.optimizer and is_optimizers_key(path[0]):
            return True
        taken += [self.optimizer] if self.optimizes and self.optimizer else []
        taken += [(self.scheduler,)] if self.source.state.get("lr_scheduler") is not None else []
        return any(path[: len(own)] == own[: len(path)] for own in taken)

    def collisions(self) -> list[Notice]:
        """A note on values that are left out because the target's state dicts use the same keys."""
        lost = [dotted(path) for path, _ in self._client_items() if self._is_taken(path)]
        if not lost:
            return []
        message = f"client_state {listed(lost)}: a state dict of the target needs this key"
        return [note("state-omitted", message, subject=lost[0])]

    # -- the model

    def weights_as_saved(self) -> Iterator[tuple[str, Any]]:
        """Yields the model's weights by the names that are saved.

        If only a PEFT adapter is saved, yields only its weights, by PEFT's names.
        """
        for name, value in self._weights():
            if self.is_saved(name):
                yield peft.saved_name(name) if self.adapter else name, value

    def is_saved(self, name: str) -> bool:
        """Whether a weight is written to the target.

        If only a PEFT adapter is written, this is true for the adapter's weights, and for other
        trained weights such as biases.
        """
        parameter = self.source.parameters.get(name)
        trained = parameter is not None and parameter.trainable
        return not self.adapter or trained or peft.is_adapters(name)

    def unsaid(self) -> dict[str, Any]:
        """The facts that zckpt writes beside the state dicts, because no state dict states them.

        The facts are the names of aliases, buffers and frozen weights, the names that were
        inferred, and the class given with `--optimizer`. Where an optimizer keeps its step depends
        on its class.
        """
        source = self.source
        frozen = [name for name, parameter in source.parameters.items() if not parameter.trainable]
        return {
            "aliases": {
                alias: name for alias, name in self.aliases.items() if self.is_saved(alias)
            },
            "buffers": list(filter(self.is_saved, source.buffers)),
            "frozen": list(filter(self.is_saved, frozen)),
            "inferred": list(source.notices.inferred),
            **({"optimizer": self.named} if self.named else {}),
        }

    def save_adapter_alone(self) -> None:
        """Restricts the model's state dict to what PEFT saves, and notes the omitted weights."""
        self.adapter = True
        base_weights = [name for name, _ in self._weights() if not self.is_saved(name)]
        if base_weights:
            message = f"{listed(base_weights, 4)}: weights of the base model, not the adapter"
            self.omitted.append(note("weights-omitted", message, subject=base_weights[0]))

    def _weights(self) -> Iterator[tuple[str, Any]]:
        source = self.source
        extra = source.state.get("module_extra") or {}
        names = source.state.get("module") or [
            *source.parameters, *source.buffers, *self.aliases
        ]  # fmt: skip
        for name in names:
            owner = self.aliases.get(name, name)
            if name in extra:
                yield name, extra[name]
            elif owner in source.parameters:
                yield name, BlankTensor(self._dtype(owner), source.parameters[owner].shape)
            elif (owner, "param") in source.entries:
                entry = source.entries[owner, "param"]
                yield name, BlankTensor(entry.dtype, entry.shape)

    def _dtype(self, name: str) -> str:
        """The type of a weight in the target: from `--dtype`, or of its fp32 master, or its own."""
        weight = weight_of(self.source.entries, name).trained
        return self.options.module_dtype or weight.dtype

    # -- the optimizer

    def _optimizer_items(self) -> Iterator[tuple[TreePath, Any]]:
        for name, state in self._states():
            for key, value in state.items():
                yield from flattened(self._state_path(name, key), value)
        if self.layout != "flat":  # torch looks there for keys with a parameter's name in front
            for key, value in self.source.states.numbers("among").items():
                if key not in self.names:
                    yield (*self.optimizer, "state", key), value
        for place, group in enumerate(self.groups):
            members = self.members(place)
            if self.layout == "flat":
                _refuse_tensors(group)
                for name in members:
                    own_name = self.own_name(name)
                    for key, value in group.items():
                        path = (*self.optimizer, f"param_groups.{own_name}.{key}")
                        yield from flattened(path, value)
                continue
            for key, value in group.items():
                path = (*self.optimizer, "param_groups", place, _kept_key(key))
                yield from flattened(path, value)
            params = [
                self.numbers[name] if self.layout == "raw" else self.own_name(name)
                for name in members
            ]
            yield (*self.optimizer, "param_groups", place, "params"), params
        if self.optimizer:  # without a path its keys are among the program's own
            for key, value in self.source.states.numbers("beside").items():
                if not is_optimizers_key(key):
                    yield (*self.optimizer, key), value

    def own_name(self, name: str) -> str:
        """The name that the program's optimizer uses for a parameter.

        If the names in the source's optimizer lack PEFT's prefix and the adapter's name, this name
        lacks them too. Otherwise it is `name`, the module's name.
        """
        return peft.bare_name(name) if self.keys.bare else name

    def members(self, group: int) -> list[str]:
        """The names of a group's parameters, in the optimizer's order."""
        return [
            name
            for name, parameter in self.source.parameters.items()
            if parameter.trainable and (parameter.group or 0) == group
        ]

    def _state_path(self, name: str, key: Any) -> TreePath:
        key = _kept_key(key)
        if self.layout == "flat":
            return (*self.optimizer, f"state.{self.own_name(name)}.{key}")
        member = str(self.numbers[name]) if self.layout == "raw" else self.own_name(name)
        return (*self.optimizer, "state", member, key)

    def _states(self) -> Iterator[tuple[str, dict[str, Any]]]:
        source = self.source
        slots = list(filter(is_optimizers, source.slots))
        place = self.step_place if self.step_place.where == "state" else WRITTEN["torch"]
        other_values = source.states.other_values
        for name, parameter in source.parameters.items():
            state: dict[str, Any] = {}
            if parameter.step is not None and not self.step_in_group:
                state["step"] = place.number(parameter.step).unwrapped()
            numbers = source.states.scalars.get(name, {})
            state |= {key: scalar.unwrapped() for key, scalar in numbers.items()}
            for slot in slots:
                entry = source.entries.get((name, slot))
                if entry is not None:
                    state[slot_key(slot)] = BlankTensor(entry.dtype, entry.shape)
            state |= other_values.get(name, {})
            if state:
                yield name, state


def _kept_key(key: Any) -> Any:
    """Converts a key to a string unless it is a string or an integer.

    torch.distributed.checkpoint allows no other keys.
    """
    return key if isinstance(key, (str, int)) else str(key)


def _refuse_tensors(group: dict[str, Any]) -> None:
    """Raises WrongOption if a hyper-parameter is a tensor: the layout `flat` cannot store it."""
    for key, value in group.items():
        if any(isinstance(item, TensorName) for _, item in flattened((), value)):
            raise WrongOption(
                "option-not-applicable",
                f"the hyper-parameter {key} is a tensor, which --dcp-layout flat cannot store",
                hint="use the other layout: --dcp-layout nested",
            )


def flattened(path: TreePath, value: Any) -> Iterator[tuple[TreePath, Any]]:
    """Turns nested dictionaries and lists into pairs (path, value).

    This follows torch.distributed.checkpoint: lists are taken apart only if they contain a
    dictionary or a tensor (torch 2.4 to 2.13).
    """
    if isinstance(value, dict):
        for key, item in value.items():
            yield from flattened((*path, str(key)), item)
    elif isinstance(value, list) and any(map(_is_entered, value)):
        for place, item in enumerate(value):
            yield from flattened((*path, place), item)
    else:
        yield path, value


def _is_entered(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_is_entered, value))
    return isinstance(value, (dict, BlankTensor, Scalar, TensorName))


def omitted(source: Manifest, options: Options) -> list[Notice]:
    """Notes on values of the source that torch programs cannot store."""
    if options.weights_only:
        return []
    everything = source.whole_state
    kept = everything.get("optimizer") or {}
    clipping = _clipping(source, kept.get("clip_grad"))
    written = {OTHER, BESIDE, AMONG, *(["clip_grad"] if clipping else [])}
    lost = [
        f"optimizer.{key}"
        for key, value in kept.items()
        if key not in written and value is not None
    ]
    other_values = {
        key: value for key, value in everything.items() if value and key not in OF_TORCH
    }
    lost += [name for key, value in other_values.items() for name in own_names(key, value)]
    engine = source.run.engine.name if source.run.engine else None
    message = f"only {engine} can load these: {', '.join(lost)}"
    lines = [note("state-omitted", message, subject=lost[0])] if lost else []
    return [*lines, *clipping, *_rounded_off(source, options)]


def _clipping(source: Manifest, stated_norm: Any) -> list[Notice]:
    """A note that the program must set DeepSpeed's gradient clipping itself.

    There is none for programs of a trainer, which clips by its own argument, and for sources that
    state no clipping.
    """
    if (
        not isinstance(source.run.engine, FlatBufferEngine)
        or program_of(source.files.siblings) is not None
    ):
        return []
    norm = number(
        source.run.engine.config.get("gradient_clipping") if stated_norm is None else stated_norm
    )
    if type(norm) not in (int, float) or not 0 < norm < math.inf:
        return []
    message = f"optimizer.clip_grad = {brief(norm)}: clip gradients to this norm in your program"
    return [note("program-must-set", message, subject="optimizer.clip_grad")]


def _rounded_off(source: Manifest, options: Options) -> list[Notice]:
    """A note that `--dtype` rounds fp32 weights whose exact values are stored nowhere else."""
    dtype = options.module_dtype
    if dtype is None or dtype in WIDE:
        return []
    weights = (weight_of(source.entries, name) for name in source.parameters)
    exact = [weight.name for weight in weights if weight.trained.dtype in WIDE]
    values = f"the exact values of {counted(len(exact), 'weight')}"
    message = f"{values}: --dtype {options[DTYPE]} rounds them"
    return [note("state-omitted", message, subject=exact[0])] if exact else []
