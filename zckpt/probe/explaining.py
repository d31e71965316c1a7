"""Explains the likely cause of the first big difference of two runs.

The recordings' headers tell which settings differ. The first record that differs tells the module,
whether its inputs and weights were equal, and whether it is before or after the first update.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct

from ..core.checkpoint.dtypes import FLOATS
from ..errors import counted, listed
from .runs import OF_WEIGHTS, TensorRecord

RESTORE = "`zckpt diff` of the two checkpoints names them"
METRICS = {
    "lr": "the learning rates differ: another schedule, or hyper-parameters were not restored",
    "loss_scale": "the loss scales differ: the state of the loss scaler was not restored",
}


def circumstances(a: Mapping[str, Any], b: Mapping[str, Any]) -> Iterator[str]:
    """Yields phrases on how two recordings differ in settings, such as versions and seeds.

    `a` and `b` are the headers of the recordings.
    """
    for key, word in (("seeds", "seed of "), ("versions", ""), ("flags", "flag ")):
        ours, theirs = a.get(key), b.get(key)
        if ours and theirs:
            for name in sorted({*ours, *theirs}):
                one, other = (_stated(each.get(name)) for each in (ours, theirs))
                if one != other:
                    yield f"{word}{name} {one} against {other}"
    drops = {**(a.get("dropout") or {}), **(b.get("dropout") or {})}
    same_seeds = a.get("seeds") == b.get("seeds")
    if drops and same_seeds and a.get("random_state") != b.get("random_state"):
        modules = f"{counted(len(drops), 'module')} with dropout, such as {next(iter(drops))},"
        yield f"the random state at the beginning, which {modules} use"
    for key in ("device", "threads"):
        if key in a and key in b and a[key] != b[key]:
            yield f"{key} {_stated(a[key])} against {_stated(b[key])}"
    for key, word in (("dropout", "dropout of"), ("modules", "class of")):
        ours, theirs = a.get(key), b.get(key)
        if ours is not None and theirs is not None:
            names = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
            if names:
                one, other = (_stated(each.get(names[0])) for each in (ours, theirs))
                yield f"{word} {listed(names, 3)}: {one} against {other}"
    if "compiled" in a and "compiled" in b and a["compiled"] != b["compiled"]:
        names = sorted(set(a["compiled"]) ^ set(b["compiled"]))
        yield f"only one run compiled {listed(names, 3)}"


def _stated(value: Any) -> str:
    return "none" if value is None else str(value).lower() if value in (True, False) else str(value)


class Surroundings(Struct, frozen=True):
    """Facts about two recorded runs, from which the cause of their first difference is inferred.

    `weights` maps (rank, step, name) of each recorded weight to whether it is equal in both runs.
    """

    steps: Sequence[int]
    header: Mapping[str, Any]
    other_header: Mapping[str, Any]
    weights: Mapping[tuple[int, int, str], bool]

    def class_of(self, module: str) -> str:
        """The class of a module; "" if the recording does not state it."""
        return str((self.header.get("modules") or {}).get(module, ""))

    def drops(self, module: str) -> bool:
        """Whether a module, or one inside it, applied dropout in one of the runs."""
        below = "" if module == "(model)" else f"{module}."
        return any(
            name == module or (below and name.startswith(below))
            for header in (self.header, self.other_header)
            for name in header.get("dropout") or {}
        )

    def equal_weights(self, rank: int, step: int, module: str) -> bool | None:
        """Whether all weights in a module were equal in both runs; None if not recorded."""
        below = "" if module == "(model)" else f"{module}."
        are_equal = [
            equal
            for (of_rank, at, name), equal in self.weights.items()
            if (of_rank, at) == (rank, step) and name.startswith(below)
        ]
        if not are_equal:
            has_weights = self.header.get("parameters") is not True
            return None if has_weights else True  # all weights are recorded, and none is of it
        return all(are_equal)


def equal_inputs(a: TensorRecord, b: TensorRecord) -> bool | None:
    """Whether the module got the same inputs in both runs; None if inputs were not recorded."""
    ours, theirs = a.numbers.get("inputs"), b.numbers.get("inputs")
    if not ours or not theirs or len(ours) != len(theirs):
        return None
    pairs = list(zip(ours, theirs, strict=True))
    if any(one != other for one, other in pairs if one is not None and other is not None):
        return False
    return None if any(None in pair for pair in pairs) else True


def meaning(
    a: TensorRecord, b: TensorRecord, what: str, rank: int, about: Surroundings, is_merged: bool
) -> str:
    """A sentence about the likely cause of the first difference between two runs.

    `a` and `b` are the records that differ. `what` says how they differ (from `distances.apart`),
    such as "shape [2] against [3]". `is_merged` tells that the records of all ranks were merged
    into one.
    """
    if what.startswith(("shape", "type")):
        of_batch = len(a.shape) == len(b.shape) > 0 and a.shape[1:] == b.shape[1:]
        if what.startswith("shape") and of_batch and a.kind not in OF_WEIGHTS:
            return "the batch sizes per rank differ: only parameters can be compared"
        return "the models or their precisions differ"
    if a.kind == "metric":
        return METRICS.get(a.key.partition(".")[0], "this number differs, but no tensor before it")
    if a.kind == "input":
        return "the inputs of the model differ: the runs got different data"
    if a.kind == "forward" and a.dtype not in FLOATS:
        return "integer values differ: the runs got different data"
    if a.kind == "forward" and (reason := _of_module(a, b, rank, about, is_merged)):
        return reason
    factor = _factor(a, b) if a.kind in ("backward", "gradient") else None
    if factor is not None:
        return (
            f"the gradients of one run are {factor:.6g} times those of the other: the loss scale, "
            "the accumulation steps, or a sum where the other run has a mean"
        )
    return _of_position(a, about.steps)


def _of_module(
    a: TensorRecord, b: TensorRecord, rank: int, about: Surroundings, is_merged: bool
) -> str | None:
    """The likely cause of different outputs of a module, from its class, inputs and weights.

    None if these do not show a cause.
    """
    inputs = True if is_merged else equal_inputs(a, b)
    weights = about.equal_weights(rank, a.step, a.module)
    kind = about.class_of(a.module)
    name = f"{a.module} ({kind})" if kind else a.module
    if inputs is False:
        return (
            f"the inputs of {name} differ, and all outputs of modules before it are equal: the "
            "data, or code between modules, such as masks, positions or functional dropout"
        )
    if about.drops(a.module) and weights is not False:
        return f"{name} drops elements: the random states of the two runs differ"
    if inputs and weights:
        return (
            f"the inputs and weights of {name} are equal, its output is not: precision, buffers, "
            "kernels or libraries differ, or it draws random numbers"
        )
    return None


def _factor(a: TensorRecord, b: TensorRecord) -> float | None:
    """The factor between two gradients, if all samples have the same factor; else None."""
    samples = (map(float, each.numbers.get("samples", ())) for each in (a, b))
    pairs = list(zip(*samples, strict=False))
    ratios = [one / other for one, other in pairs if one and other]
    if len(ratios) < min(2, len(pairs)) or not ratios or not all(map(math.isfinite, ratios)):
        return None
    low, high = min(ratios), max(ratios)
    if low <= 0 or high / low > 1.01 or abs(low - 1) < 0.1:
        return None
    middle = math.sqrt(low * high)
    return max(middle, 1 / middle)


def _of_position(record: TensorRecord, steps: Sequence[int]) -> str:
    """The likely cause of a difference, from the record's step, batch and kind (such as "forward").

    `steps` are all compared steps, sorted.
    """
    position = steps.index(record.step)
    later_batch = record.batch not in ("0", "eval 0", "all", "eval all")
    if position == 0 and not later_batch:
        if record.kind == "parameter":
            return "this weight differs before the first update: it was not restored"
        if record.kind == "forward":
            return (
                f"the first forward: weights, buffers or the first batch of data differ; {RESTORE}"
            )
        return (
            "the first forward pass is equal, its backward pass is not: the loss scale, masks or "
            "dropout differ"
        )
    if position == 0:
        return (
            "the first batch is equal, a later one of the same step is not: the order of the data "
            "or the random state differs"
        )
    if position == 1 and steps[1] - steps[0] == 1 and not later_batch:
        if record.kind in ("backward", "gradient"):
            return (
                "the second forward pass is equal, its backward pass is not: the loss scale or the "
                "random state differs"
            )
        return (
            "equal until the first update: moments, masters, step count or learning rate of the "
            f"weights in this module differ; {RESTORE}"
        )
    return (
        "equal beyond the first update: the order of the data, the random state, a schedule or the "
        "order of sums differs"
    )
