"""Hyper-parameters that each rank's optimizer has estimated from its own gradients.

Prodigy and D-Adaptation keep their estimate of the learning rate in the group (`d`). Under ZeRO a
rank has a partition of the gradients, so the ranks' estimates differ by nature. For another number
of ranks the partitions differ, and the estimates do not apply.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...core.checkpoint.inert import Scalar
from ...core.checkpoint.manifest import Manifest
from ...core.checkpoint.optimizer_states import BY_RANK
from ...errors import CorruptCheckpoint, Notice, UnsupportedCheckpoint, brief, listed, warning
from ...files.torchshell import Storages, thawed
from .states import EngineStates

KEYS = {
    *("d", "d_max", "d_hat", "d_prev", "d_numerator", "d_denom", "d_de_nom"),
    *("numerator_weighted", "gsq_weighted", "sk_sq_weighted"),
}
"""Keys of hyper-parameters that an optimizer estimates itself, such as the learning rate `d`.

They are from prodigyopt 1.1, dadaptation 3.2 and pytorch_optimizer 4.1.
"""

Estimates = Sequence[Mapping[str, Sequence[Any]]]
"""For each group, the values of all ranks by hyper-parameter name."""


def estimates_of(ranks: EngineStates) -> Estimates:
    """Each group's hyper-parameters that ranks have estimated differently: {"d": [rank 0's, ...]}.

    Prodigy and D-Adaptation estimate such hyper-parameters on each rank. Empty if no estimate
    differs.
    """
    by_rank = [base.get("param_groups") or () for base in ranks.bases]
    result: list[dict[str, list[Any]]] = []
    for groups in zip(*by_rank, strict=True):
        result.append({})
        for key in (each for each in groups[0] if each in KEYS):
            pairs = zip(groups, ranks.optimizers, strict=True)
            values = [file.number(group.get(key)) for group, file in pairs]
            if any(repr(value) != repr(values[0]) for value in values):  # a NaN equals itself
                result[-1][key] = values
    return result if any(result) else []


def warnings(estimates: Estimates) -> list[Notice]:
    """A warning if each rank's optimizer has estimated its own hyper-parameters (Prodigy).

    The warning names the hyper-parameters, and shows the first one's values on up to three ranks.
    """
    keys = sorted({key for group in estimates for key in group})
    if not keys:
        return []
    values = next(group[keys[0]] for group in estimates if keys[0] in group)
    shown = ", ".join(brief(v.value if isinstance(v, Scalar) else v) for v in values[:3])
    message = (
        f"{listed(keys)}: each of the {len(values)} ranks has its own estimate ({keys[0]}: {shown}"
        f"{', ...' if len(values) > 3 else ''}), so the number of ranks cannot be changed"
    )
    return [warning("state-unsupported", message, subject=keys[0])]


def stated_estimates(source: Manifest) -> Estimates:
    """Reads from a manifest the hyper-parameters that each rank's optimizer has estimated itself.

    Returns the same as `estimates_of`. Raises CorruptCheckpoint if values are malformed.
    """
    rows = source.states.of_form("estimate")
    if not all(_is_of_ranks(row.value, source.dp) for row in rows):
        raise CorruptCheckpoint(
            "file-damaged",
            f"{source.root}: optimizer.{BY_RANK} does not have a number for each rank",
            file=source.root,
        )
    return source.states.by_rank(len(source.groups or ()))


def _is_of_ranks(values: Any, dp: int) -> bool:
    return (
        isinstance(values, list)
        and len(values) == dp
        and all(isinstance(value, (int, float, Scalar)) for value in values)
    )


def need_same_ranks(source: Manifest, dp: int = 0, stage: int | None = None) -> None:
    """Raises UnsupportedCheckpoint if the target cannot keep each rank's estimates (Prodigy's `d`).

    `dp` and `stage`, the target's number of ranks and ZeRO stage, must be the source's; stages 1
    and 2 count as equal. The defaults are for a target of a format that keeps no estimates.
    """
    stage_of_source, flat = source.run.origin.zero_stage, (1, 2)
    estimates = stated_estimates(source)
    alike = stage == stage_of_source or (stage in flat and stage_of_source in flat)
    if not estimates or (dp == source.dp and alike and len(estimates) == len(source.groups or ())):
        return
    keys = sorted({str(key) for group in estimates for key in group})
    raise UnsupportedCheckpoint(
        "state-unsupported",
        f"{source.root}: the optimizer's {listed(keys)} differ between ranks, because each rank "
        "has its own estimate; another engine, number of ranks or stage cannot store them",
        hint=f"write it with --to deepspeed --dp {source.dp} --stage {stage_of_source}, or add "
        "--weights-only",
        file=source.root,
    )


def of_rank(source: Manifest, group: int, rank: int, storages: Storages) -> dict[str, Any]:
    """One rank's own estimates of a group's hyper-parameters, such as {"d": 0.0013}.

    Empty if the source has no estimates. `storages` collects the storages of the tensors in the new
    file.
    """
    estimates = stated_estimates(source)
    values = {key: own[rank] for key, own in estimates[group].items()} if estimates else {}
    own_values: dict[str, Any] = thawed(values, source.entries, storages)
    return own_values
