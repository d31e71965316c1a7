"""Where each optimizer stores its step (completed updates), and in which type.

    optimizer                                   in the state of a parameter         in the group
    torch Adam, AdamW, NAdam, Adagrad, RMSprop  0-d float32                         -
      (before torch 1.12)                       int                                 -
    DeepSpeed CPUAdam, CPUAdagrad, CPULion      int                                 -
    DeepSpeed >= 0.6.5 FusedAdam, FusedLion     int, correct                        always 0
      (without ZeRO, in fp32)                   int, correct only for the group's   always 0
                                                  last parameter with a gradient
    DeepSpeed < 0.6.5 FusedAdam                 -                                   int, correct
    Apex FusedAdam                              -                                   int, correct
    TransformerEngine FusedAdam                 -                                   int, correct
    ONNX Runtime Adam                           int64 [1]: the step + 1             -
    ONNX Runtime Lamb                           int64 [1] of all weights: step + 1  -
    SGD, most Lions                             -                                   -

Reading: zckpt uses the step in the optimizer's state. If the state has none, it uses the group's
step (`believed`). It never uses counters of engines and schedulers, since fp16 training skips
updates, and DeepSpeed before 0.13.2 made one update too many (`counter_sightings`). Writing: a step
is written where the source had it (`kept_place`), unless an option names an optimizer that stores
it elsewhere. `WRITTEN` and `COUNTED` have the place and type for such optimizers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from ..core.checkpoint.agreement import KEEP, Step, agree, need_whole
from ..core.checkpoint.entries import Key
from ..core.checkpoint.facts import NamedWeightsEngine, StateDictEngine, StepPlace
from ..core.checkpoint.inert import Scalar
from ..core.checkpoint.manifest import Manifest, Sighting, is_step
from ..core.checkpoint.weights import is_optimizers
from ..core.grouping import by_key
from ..core.storage.checksum import crc_of_zeros
from ..errors import Notice, WrongOption, listed, warning
from .faults import COUNTED_START
from .optimizers import plain_name

STATED = "--step-policy"
"""How `Sighting.where` begins if the user states the step with this option.

A `Sighting` is a step that zckpt found, and `where` names the place.
"""

STALLS = {"BF16": 256, "F16": 2048}
"""By type: the step to which adding one changes nothing, because the type is too narrow."""


WRITTEN = {
    "torch": StepPlace("state", "F32"),
    "deepspeed-fused-adam": StepPlace("state", "int", stale=0),
    "deepspeed-cpu-adam": StepPlace("state", "int"),
    "apex-fused-adam": StepPlace("group", "int"),
}
"""Where and how each class of `--optimizer` stores its step.

Without the option, a target that does not keep the source's place has the place of `torch`.
"""

COUNTED = StepPlace("state", "I64", (1,), first=1)
"""How ONNX Runtime stores its counters: Adam has one per weight, Lamb one for all weights."""

OF_TORCH = frozenset(("adam", "adamw", "nadam", "radam", "rmsprop", "adagrad", "adadelta"))
"""The `plain_name` of each optimizer of torch that stores its step in a 0-d tensor."""

SCHEDULER_COUNTERS = ("last_epoch", "_step_count")
"""Counters in the state of torch's schedulers."""


def kept_place(source: Manifest) -> StepPlace:
    """Where a target stores the optimizer's step: in the source's place, or as torch's Adam does.

    It is the place of torch's Adam if the source's files show no place, or if the source's engine
    has its own optimizers (Megatron, ONNX Runtime).
    """
    if source.run.step_place is None or isinstance(source.run.engine, NamedWeightsEngine):
        return WRITTEN["torch"]
    # a program usually keeps its optimizer class, even under another engine
    return source.run.step_place


def torch_place(source: Manifest, named: str | None = None) -> StepPlace:
    """Where a target for a torch program stores the optimizer's step.

    If `named` (a class of `--optimizer`) is given, it is the place of this class. Otherwise it is
    the source's place, or the place of torch's Adam if the program would not look there.
    """
    if named is not None:
        return WRITTEN[named]
    place = kept_place(source)
    if isinstance(source.run.engine, StateDictEngine):
        return place
    # a ds_config names an optimizer of DeepSpeed, which a torch program does not have
    of_engine = place.optimizer is not None and place.optimizer not in WRITTEN
    # the source may store a number, but torch's optimizers need a tensor
    of_torch = place.where == "state" and plain_name(source.optimizer or "") in OF_TORCH
    return WRITTEN["torch"] if of_engine or of_torch else place


def steps_of_groups(manifest: Manifest, count: int) -> list[set[Step]]:
    """For each of `count` parameter groups, the different steps of its trained parameters."""
    groups: list[set[Step]] = [set() for _ in range(count)]
    for parameter in manifest.parameters.values():
        number = parameter.group or 0
        if parameter.trainable and parameter.step is not None and number < count:
            groups[number].add(parameter.step)
    return groups


def counter_sightings(
    where: str, counters: Mapping[str, Any], keys: Iterable[str]
) -> list[Sighting]:
    """Lists counters of an engine or a scheduler as places that store a step.

    They are only reported: none is the optimizer's step. `keys` are the counters' keys in
    `counters`.
    """
    numbers = [(key, step_of(counters.get(key))) for key in keys]
    return [Sighting(f"{where}, {key}", step, False) for key, step in numbers if step is not None]


def step_of(value: Any) -> Step | None:
    """Reads a step from a 0-d tensor or a number; an integral float becomes an int.

    None for others.
    """
    number = value.value if isinstance(value, Scalar) else value
    if not is_step(number):
        return None
    return int(number) if number == int(number) else number


def kind_of(value: Any) -> str:
    """The type of a stored step: the dtype of a 0-d tensor, or "int" or "float" for a number."""
    return value.dtype if isinstance(value, Scalar) else type(value).__name__


class StatedSteps(Struct):
    """The steps that files store in one kind of place: in optimizer states, or in groups.

    where   "state" or "group"
    steps   the step of each rank or parameter
    kinds   the types of the steps
    shapes  the shapes of those steps that are tensors
    """

    where: str
    steps: dict[str, Step] = field(default_factory=dict)
    kinds: dict[str, str] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)

    def add(self, owner: str, value: Any, shape: tuple[int, ...] = ()) -> None:
        """Adds the step of a rank or a parameter (`owner`); ignores a value that cannot be a step.

        `value` is a `Scalar` or a number.
        """
        if (step := step_of(value)) is not None:
            self.steps[owner] = step
            self.kinds[owner] = kind_of(value)
            self.shapes[owner] = shape

    def place(self) -> StepPlace | None:
        """Where and in which type the first stated step is stored; None if no step is stated."""
        owner = next(iter(self.steps), None)
        if owner is None:
            return None
        return StepPlace(self.where, self.kinds[owner], self.shapes[owner])

    def settled(self, policy: str | None) -> dict[str, Step]:
        """The step of each rank or parameter, after `--step-policy` is applied.

        If `policy` is max, min or a number, all get one step. Raises InconsistentCheckpoint if a
        step is not an integer and no policy is given.
        """
        if policy is None:
            need_whole((f"{self.where} of {owner}", step) for owner, step in self.steps.items())
        if policy in (None, KEEP):
            return self.steps
        step = agree(list(self.steps.items()), policy)
        return {} if step is None else dict.fromkeys(self.steps, step)


def believed(in_states: StatedSteps, *in_groups: StatedSteps) -> StatedSteps:
    """Chooses which of the stored steps zckpt uses.

    They are the steps in the optimizer states, if any state has one; otherwise the steps in the
    first of `in_groups` that has one. If no step is stored, the result is empty.
    """
    return next((stated for stated in (in_states, *in_groups) if stated.steps), in_states)


def place_of(believed: StatedSteps, in_groups: StatedSteps, named: str | None) -> StepPlace | None:
    """Where and in which type an optimizer stores its step; None if as torch's Adam, or unknown.

    believed     the steps that zckpt uses
    in_groups    the steps in param groups
    named        the class that `--optimizer` named when the files were written, or None

    The place is unknown if no step is stored, or steps of several types. If `named` is given, the
    place of torch's Adam is returned instead of None.
    """
    place = believed.place()
    types = {(kind, believed.shapes[name]) for name, kind in believed.kinds.items()}
    # Only Apex's and TransformerEngine's FusedAdam store a step per group and none in states. With
    # `capturable`, Apex's is a tensor of shape [1], incremented in place (commit 6424da3).
    of_group = None if believed is in_groups else in_groups.place()
    if place is not None and of_group is not None and len({*in_groups.steps.values()}) == 1:
        (step,) = {*in_groups.steps.values()}
        place = replace(place, stale=of_group.number(step).unwrapped())
    if place is not None and len(types) == 1 and place != WRITTEN["torch"]:
        return replace(place, optimizer=named)
    return replace(WRITTEN["torch"], optimizer=named) if named else None


def sightings_of(
    statements: StatedSteps, believed: StatedSteps
) -> Iterator[tuple[Sighting, Notice | None]]:
    """Yields each different step in `statements`, with the place that stores it.

    A warning comes with it if the step has reached the limit of its type, else None. Ranks or
    parameters with the same step share one place. `believed` are the steps that zckpt uses.
    """
    is_true = statements.where == believed.where
    owners = by_key(
        ((step, statements.kinds[owner], is_true and believed.steps[owner] == step), owner)
        for owner, step in statements.steps.items()
    )
    for (step, kind, truth), names in owners.items():
        where = f"{statements.where} of {listed(names, 1)}"
        yield Sighting(where, step, truth), stalled(step, kind, where) if truth else None


def counted_by_last(
    in_states: StatedSteps, in_groups: StatedSteps, groups: Iterable[Sequence[str]]
) -> StatedSteps:
    """Gives all parameters of a group the step of its last one, if the optimizer counts only there.

    `groups` lists the parameters of each group, in order. Groups of other optimizers are unchanged.
    """
    # DeepSpeed's FusedAdam and FusedLion (0.19.8, ops/adam/fused_adam.py) increment the step only
    # in the state of the group's last parameter with a gradient; the group and other states have 0
    counted = dict(in_states.steps)
    for owners in groups:
        stepped = [owner for owner in owners if in_states.steps.get(owner)]
        of_group = {(in_groups.kinds.get(owner), in_groups.steps.get(owner)) for owner in owners}
        if stepped and of_group == {("int", 0)}:
            last = in_states.steps[stepped[-1]]
            counted |= dict.fromkeys(filter(counted.__contains__, owners), last)
    return StatedSteps(in_states.where, counted, in_states.kinds, in_states.shapes)


def counts_by_last(place: StepPlace) -> bool:
    """Whether the optimizer may count updates only in the state of each group's last parameter.

    DeepSpeed's FusedAdam and FusedLion may do so (see `counted_by_last`). `place` shows it: these
    optimizers store an int in the state, and 0 in the group.
    """
    return (place.where, place.kind, place.stale) == ("state", "int", 0)


def unused_policy(manifest: Manifest, policy: str | None) -> list[Notice]:
    """Warns that the number in `--step-policy N` was not used.

    This happens if no step is read, or if all stored steps are equal, but are not N.
    """
    step = manifest.step
    if policy is None or not policy.isdecimal() or step == int(policy):
        return []
    if any(sighting.where.startswith(STATED) for sighting in manifest.run.steps):
        return []
    why = "no step is read" if step is None else f"all stored steps are {step:g}"
    message = f"--step-policy {policy} is not used: {why}"
    return [warning("option-without-effect", message, subject="--step-policy")]


def check_policy(policy: str | None) -> None:
    """Raises WrongOption if the value of `--step-policy` is not max, min, keep or a number."""
    if policy not in (None, "max", "min", KEEP) and not (policy and policy.isdecimal()):
        raise WrongOption(
            "option-invalid", f"--step-policy {policy!r} is none of max, min, keep or a number"
        )


def stalled(step: Step, kind: str, where: str) -> Notice | None:
    """Warns if a step is so large that adding 1 no longer changes it in its type, such as bf16."""
    if STALLS.get(kind) == step:
        return warning(
            "step-doubtful",
            f"the step of {where} is {step} in {kind}, where adding 1 changes nothing: "
            "the true number of updates is at least that",
            subject=where,
        )
    return None


def may_be_unstepped(manifest: Manifest) -> bool:
    """Whether the optimizer may have made no real update: this is possible if the step is 1.

    DeepSpeed before 0.13.2 counts its start as an update. If the step is 1, `never_stepped` uses
    checksums of the moments to see whether all moments are still zero.
    """
    return manifest.step == 1


def never_stepped(manifest: Manifest, digests: Mapping[int, Mapping[Key, int]]) -> Notice | None:
    """A warning if the step is 1 and every moment is zero: the one update changed nothing.

    DeepSpeed before 0.13.2 makes such an update with zero gradients when it starts. `digests` has
    the checksums of the copied tensors, by model rank and by the tensors' keys.
    """
    if not may_be_unstepped(manifest):
        return None
    moments = [
        (digests.get(rank, {}).get(entry.key), entry.length)
        for rank, rank_manifest in enumerate(manifest.rank_manifests)
        for entry in rank_manifest.entries.values()
        if is_optimizers(entry.slot)
    ]
    if not moments or not all(crc == crc_of_zeros(length) for crc, length in moments):
        return None
    return warning(
        "step-doubtful",
        "step 1 with all moments zero: the optimizer has not been stepped "
        f"({COUNTED_START.message})",
    )
