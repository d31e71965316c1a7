"""Turns the slices of tensor ranks into full tensors, and compares the ranks' replicas.

Each tensor rank has been read as a separate model. Rules define how its parameters are cut. The
user's rules (naming/tensor_rules.py) are tried first, then those that the checkpoint states
(naming/universal_info.py). The rule for a parameter gives each slice its offsets in the full
tensor; no byte is read. A replicated tensor is taken from the first rank, and the other ranks'
replicas must be equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain

from ....core.checkpoint.agreement import KEEP
from ....core.checkpoint.facts import TensorParallel, Vocabulary, layers_of
from ....core.checkpoint.inert import to_json
from ....core.checkpoint.manifest import Manifest
from ....core.checkpoint.placement import EP_RANK, TENSOR_RANK, Shapes, Sliced, Table
from ....core.checkpoint.states import as_unsupported
from ....core.comparison.replicas import (
    OWN,
    RANK0,
    Replicas,
    check_joined,
    compare_apart,
    replicas_of,
)
from ....core.ranks.merge import in_order, merge
from ....errors import (
    InconsistentCheckpoint,
    MissingData,
    Notice,
    UnsupportedCheckpoint,
    WrongOption,
    listed,
    warning,
)
from ....naming.patterns import INFO
from ....naming.tensor_rules import RuleFile, TensorRules, decide, rules_of
from ....naming.universal_info import UniversalInfo, of_json

SLICES_ALONE = (
    "zckpt joins states of tensor ranks only if they are numbers or have the shape of the slice"
)


def joined_slices(
    ranks: Sequence[Manifest], tp_rules: str | None, step_policy: str | None
) -> Manifest:
    """Joins the models of all tensor ranks into one.

    `tp_rules` (a model family or a rule file) comes before the checkpoint's own rules.
    `step_policy` chooses a step if ranks differ: "max", "min" or a number such as "7". Raises
    MissingData for parameters without a rule, InconsistentCheckpoint or WrongOption for rules that
    do not fit.
    """
    models, given = tuple(ranks), [] if tp_rules is None else [rules_of(tp_rules, of_json)]
    if len(ranks) > 1:
        ranks = [as_unsupported(rank, SLICES_ALONE) for rank in ranks]
    shapes = _on_ranks({name: own.shape for name, own in rank.parameters.items()} for rank in ranks)
    cut = decide(ranks[0].root, shapes, [*given, *_stated(ranks)], len(ranks))
    table = Table(TENSOR_RANK, {**cut, **_buffers(ranks, given)})
    whole = merge(ranks, table, step_policy)
    return in_order(
        whole.replace(
            warnings=(*whole.notices.warnings, *_doubts(given, cut)),
            tensor_parallel=_recorded(cut),
            models=models,
        )
    )


def _on_ranks(ranks: Iterable[Mapping[str, tuple[int, ...]]]) -> dict[str, Shapes]:
    """Each parameter's shapes on all ranks, by name.

    A shape is None where AutoTP gives a rank no part of the parameter.
    """
    every = [*ranks]
    return {name: [own.get(name) for own in every] for name in dict.fromkeys(chain(*every))}


def _stated(ranks: Sequence[Manifest]) -> Iterator[TensorRules]:
    """Yields the rules in the checkpoint's `universal_checkpoint_info`; nothing if there is none.

    Raises InconsistentCheckpoint if tensor ranks state different rules.
    """
    infos = [(rank.state.get("client_state") or {}).get(INFO) for rank in ranks]
    if any(to_json(info) != to_json(infos[0]) for info in infos[1:]):
        raise InconsistentCheckpoint(
            "ranks-disagree",
            f"{ranks[0].root}: tensor ranks state different values of {INFO}",
            file=ranks[0].root,
        )
    if isinstance(infos[0], Mapping):
        yield UniversalInfo(infos[0])


def _buffers(ranks: Sequence[Manifest], given: Sequence[TensorRules]) -> dict[str, Sliced]:
    """How each buffer is cut over tensor ranks; buffers that are not cut are left out.

    The user's rules apply to all buffers. The checkpoint's rules apply only to buffers whose shapes
    differ between ranks.
    """
    shapes = _on_ranks(
        {n: e.shape for n in rank.buffers if (e := rank.entries.get((n, "param"))) is not None}
        for rank in ranks
    )
    decided = {
        name: sliced
        for rules in given
        if isinstance(rules, RuleFile)
        for name, shapes_on_ranks in shapes.items()
        if (sliced := rules.sliced(name, shapes_on_ranks)) is not None
    }
    unlike = {n: each for n, each in shapes.items() if n not in decided and len({*each}) > 1}
    return decided | decide(ranks[0].root, unlike, given, len(ranks))


def _doubts(given: Sequence[TensorRules], cut: Mapping[str, Sliced]) -> Iterator[Notice]:
    """Warnings about tensors that are a sum over ranks, and about rules that no file confirms.

    Of such a sum, the joined model has only tensor rank 0's summand.
    """
    if sums := [name for name, sliced in cut.items() if sliced.placement.is_sum]:
        message = (
            f"{listed(sums, 4)}: the value is the sum over all tensor ranks, but only the summand "
            "of tensor rank 0 is shown"
        )
        yield warning("rank-zero-taken", message, subject=sums[0])
    for rules in given:
        if isinstance(rules, RuleFile):
            yield from rules.doubts(cut)


def _recorded(cut: Mapping[str, Sliced]) -> TensorParallel:
    return TensorParallel(
        {name: sliced.placement for name, sliced in cut.items()},
        {
            name: Vocabulary(sliced.shape[0], sliced.vocabulary)
            for name, sliced in cut.items()
            if sliced.vocabulary is not None
        },
    )


# -- copies


IF_COPIES_DIFFER = {
    TENSOR_RANK: "if these replicas drifted in training, use those of tensor rank 0 with "
    "--replicas rank0, or their mean with --replicas mean; if they are slices, or parts of a sum, "
    "correct the rule (--tp-rules)",
    EP_RANK: "if these replicas drifted in training, use those of ep rank 0 with --replicas rank0; "
    "if not, files of different saves may be mixed: copy all files again",
}
"""Hints for replicas that differ, by the axis whose ranks hold them."""


def check(manifest: Manifest) -> list[Notice]:
    """Compares the first bytes of the ranks' copies and slices; returns warnings.

    Model ranks that are kept separate: a warning if copies of a master differ. Joined model ranks:
    raises InconsistentCheckpoint if a rule cuts a parameter that all ranks have in full, and
    UnsupportedCheckpoint if a parameter is the sum of the ranks' parts.
    """
    if manifest.ranks:
        return compare_apart(manifest)
    if manifest.run.origin.tp and not _has_whole_experts(manifest):
        check_joined(manifest)
    return []


def copies(manifest: Manifest, replicas: str | None) -> list[Replicas]:
    """Which copies of tensors on several tensor ranks must be compared.

    Joined model ranks: copies that differ are an error, unless `replicas` says which copy to use
    ("rank0" or "mean"). Model ranks that are kept separate: only a warning, and nothing is compared
    if the rules for cutting tensors are unknown.
    """
    if manifest.ranks:
        if len(manifest.models) == 1:  # there are no copies on other tensor ranks
            return []
        try:
            model = joined_slices(manifest.models, manifest.run.origin.tp_rules, KEEP)
        except (InconsistentCheckpoint, MissingData, UnsupportedCheckpoint, WrongOption):
            return []
        return [replicas_of(model, OWN, IF_COPIES_DIFFER)]
    if _has_whole_experts(manifest):
        chosen = RANK0 if replicas == RANK0 else None
        return [replicas_of(manifest, chosen, IF_COPIES_DIFFER)]
    has_tensor_ranks = bool(manifest.run.origin.tp)
    return [replicas_of(manifest, replicas, IF_COPIES_DIFFER)] if has_tensor_ranks else []


def _has_whole_experts(manifest: Manifest) -> bool:
    """Whether the run had experts and no ZeRO: then every ep rank has all dense parameters."""
    return manifest.run.origin.zero_stage == 0 and bool(layers_of(manifest.run.engine))
