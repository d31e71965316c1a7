"""The step ledger: every place that says how many updates an optimizer has done, and which is true.

    optimizer                                     in the state       in the group
    torch Adam, AdamW, NAdam, Adagrad, RMSprop    0-d float32        -
      (before torch 1.12)                         int                -
    DeepSpeed CPUAdam, CPUAdagrad, CPULion        int                -
    DeepSpeed FusedAdam >= 0.6.5                  int, true          0, stale
    Apex / TransformerEngine FusedAdam,           -                  true
      DeepSpeed FusedAdam < 0.6.5
    ONNX Runtime Adam / Lamb                      int64 [1] per weight / for all,
                                                  completed + 1      -
    SGD, most Lions                               -                  -

So: a step in the state is true; without one, the group's is; engine counters and schedulers never
are (skipped fp16 steps; DeepSpeed before 0.13.2 made one update too many).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from typing import Any

from ..core.inert import Scalar
from ..core.manifest import Manifest
from ..errors import InconsistentCheckpoint, WrongOption

Step = float | int

KEEP = "keep"
"""The policy that leaves every parameter its own step, where a format keeps them apart."""

STALLS = {"BF16": 256, "F16": 2048}
"""Where adding one no longer changes a step that is kept in low precision."""


def step_of(value: Any) -> Step | None:
    """A step by value: from a 0-d tensor or a number; whole numbers become int."""
    number = value.value if isinstance(value, Scalar) else value
    if isinstance(number, bool) or not isinstance(number, (int, float)):
        return None
    if not isfinite(number):
        return None
    return int(number) if number == int(number) else number


def kind_of(value: Any) -> str:
    """The type a step was kept in: a dtype (0-d tensor), `int` or `float`."""
    return value.dtype if isinstance(value, Scalar) else type(value).__name__


def agree(places: Sequence[tuple[str, Step]], policy: str | None = None) -> Step | None:
    """The one step that all places say, or what `policy` (max, min or a number) makes of them.

    `keep` decides between parameters, not between places of one. Raises InconsistentCheckpoint when
    they disagree and no policy decides.
    """
    values = {step for _, step in places}
    if len(values) <= 1:
        return values.pop() if values else None
    if policy in (None, KEEP):
        told = [f"{step} ({_some(where for where, s in places if s == step)})" for step in values]
        raise InconsistentCheckpoint(
            f"the optimizer's step differs: {', '.join(sorted(told))}",
            hint="files of different saves may be mixed; if not, choose: --step-policy max|min|N",
        )
    if policy in ("max", "min"):
        return max(values) if policy == "max" else min(values)
    return int(str(policy))


def check_policy(policy: str | None) -> None:
    """Raises WrongOption for a policy that is none of max, min, keep or a number."""
    if policy not in (None, "max", "min", KEEP) and not (policy and policy.isdecimal()):
        raise WrongOption(f"--step-policy {policy!r} is none of max, min, keep or a number")


def _some(places: Iterable[str]) -> str:
    listed = list(places)
    return ", ".join(listed[:3]) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "")


def infer_optimizer(keys: Iterable[str], group: Mapping[str, Any] | None) -> str | None:
    """The optimizer's usual name from the keys of its state and of a group; None when unsure."""
    have, hyper = set(keys) - {"step"}, group or {}
    if "mu_product" in have:
        return "NAdam"
    if {"exp_avg", "exp_avg_sq"} <= have:
        # RAdam keeps the same, and is told by what Adam has and it has not
        if {"decoupled_weight_decay", "maximize"} <= hyper.keys() and "amsgrad" not in hyper:
            return "RAdam"
        return "AdamW" if hyper.get("decoupled_weight_decay") else "Adam"
    if "square_avg" in have:
        return "Adadelta" if "acc_delta" in have else "RMSprop"
    if have == {"sum"}:
        return "Adagrad"
    if have == {"momentum_buffer"}:
        return "Muon" if {"use_muon", "ns_steps"} & hyper.keys() else "SGD"
    if have == {"exp_avg"}:
        return "Lion"
    return "SGD" if not have and "dampening" in hyper else None


def stalled(step: Step, kind: str, where: str) -> str | None:
    """A warning about a step that low precision has stopped."""
    if STALLS.get(kind) == step:
        return (
            f"the step of {where} is {step} in {kind}, where adding 1 changes nothing: "
            "the true number of updates is at least that"
        )
    return None


def never_stepped(manifest: Manifest, digests: Mapping[str, int]) -> str | None:
    """A warning where step is 1 and every moment is zero: an update that was none.

    DeepSpeed before 0.13.2 made one with zero gradients when it started. `digests` are those of a
    copy's target, by entry name.
    """
    from ..core.checksum import crc_of_zeros

    moments = [
        entry
        for slot, entries in manifest.slots.items()
        if slot not in ("param", "master", "state")
        for entry in entries
    ]
    zero = all(digests.get(entry.name) == crc_of_zeros(entry.length) for entry in moments)
    if manifest.step != 1 or not moments or not zero:
        return None
    return (
        "step 1 with all moments zero: the optimizer has not been stepped "
        "(DeepSpeed before 0.13.2 counts its own start as one)"
    )
