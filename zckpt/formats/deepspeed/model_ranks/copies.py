"""Are the copies that model ranks hold of one tensor equal, and are slices really slices?

Asked before a conversion writes anything, as it reads tensors. Two kinds of copies may differ:

    tied layers      Each stage of a pipeline has its own. Only `tied_weight_attr` is summed over
                     stages (DeepSpeed 0.19.8), so others drift: a warning, the first stage's count.
    tensor ranks     Those of BLOOM's norms drifted (bigscience PR 271). One has to be chosen.

Slices of a cut parameter never have equal moments. If they do, the rule that cuts it is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from ....core import compare, masters
from ....core.agreement import KEEP
from ....core.compare import Result
from ....core.dtypes import FLOATS
from ....core.facts import layers_of
from ....core.manifest import Entry, Manifest
from ....core.placement import SUM
from ....core.plan import Match
from ....core.weights import is_optimizers
from ....errors import (
    InconsistentCheckpoint,
    MissingData,
    UnsupportedCheckpoint,
    WrongOption,
    counted,
    listed,
)
from .pipeline import STAGE, head
from .tensor_ranks import joined_slices

SAMPLE = 1 << 14  # elements of each slice
EP_RANK = "ep rank"
OWN = "own"  # of what may be taken of several copies: nothing is joined, and all stay


def check(manifest: Manifest, replicas: str | None) -> list[str]:
    """Compares the copies that model ranks hold of a tensor; gives warnings.

    Raises InconsistentCheckpoint if copies of tensor ranks differ and `replicas` (rank0, mean) does
    not say what is taken, or if all ranks hold the same of a parameter that a rule cuts;
    UnsupportedCheckpoint for parts of a sum.
    """
    if manifest.ranks:
        return _own_copies(manifest)
    if manifest.source.get("zero_stage") == 0 and layers_of(manifest.engine):
        return compare_copies(manifest, replicas if replicas == "rank0" else None)
    if not manifest.source.get("tp"):
        return []
    _refuse_sums(manifest)
    check_slices(manifest)
    return compare_copies(manifest, replicas)


def _own_copies(manifest: Manifest) -> list[str]:
    """Warnings of copies that differ, if anything says which tensors are copies.

    Each model rank keeps its own: nothing else has to be known of slices.
    """
    stages = _compare_stages(manifest)
    if len(manifest.models) == 1:
        return stages
    try:
        model = joined_slices(manifest.models, manifest.source.get("tp_rules"), KEEP)
    except (InconsistentCheckpoint, MissingData, UnsupportedCheckpoint, WrongOption):
        return stages
    return [*stages, *compare_copies(model, OWN)]


def compare_copies(manifest: Manifest, replicas: str | None) -> list[str]:
    """Compares every copy with the tensor that is taken; gives warnings.

    Raises InconsistentCheckpoint if copies of tensor ranks or ep ranks differ, unless `replicas`
    says what is taken: `rank0`, `mean` or `OWN`, if nothing is joined. Then copies of stages, which
    may be large, are not compared.
    """
    matches = [
        Match(copy, manifest.entries[copy.name])
        for copy in manifest.replicas
        if copy.slot != "state"
        and copy.name in manifest.entries
        and not (replicas == OWN and copy.axis == STAGE)
    ]
    results = compare.compare(matches, manifest, manifest).results
    tied: dict[str, list[str]] = {}
    drifted: dict[str, list[str]] = {}
    of_ep = any(result.differs and result.match.a.axis == EP_RANK for result in results)
    ranks = "ep ranks" if of_ep else "tensor ranks"
    for result in results:
        if result.differs:
            kind = tied if result.match.a.axis == STAGE else drifted
            kind.setdefault(result.match.a.parameter, []).append(_line(result))
    warnings = [
        f"the stages' copies of {name} differ; the first stage's is taken: {listed(lines, 3)}"
        for name, lines in tied.items()
    ]
    if drifted and replicas in (None, OWN):
        name, lines = next(iter(drifted.items()))
        count, example = counted(len(drifted), "parameter"), f"{name}: {listed(lines, 3)}"
        differ = f"{ranks} hold different copies of {count} ({listed(list(drifted), 4)})"
        if replicas == OWN:
            return [f"{differ}, and each rank keeps its own: {example}"]
        raise InconsistentCheckpoint(
            f"{manifest.root}: {differ}: {example}",
            hint="if these copies drifted in training, take those of ep rank 0 with --replicas "
            "rank0; if not, files of different saves may be mixed: copy all files again"
            if of_ep
            else "if these copies drifted in training, take those of tensor rank 0 with --replicas "
            "rank0, or their mean with --replicas mean; if they are slices, or parts of a sum, "
            "correct the rule (--tp-rules)",
        )
    chosen = "their mean" if replicas == "mean" else "rank 0's"
    warnings += [
        f"the {ranks}' copies of {name} differ; {chosen} is taken: {listed(lines, 3)}"
        for name, lines in drifted.items()
    ]
    return warnings


def _compare_stages(ranks: Manifest) -> list[str]:
    """A warning about tied layers whose masters stages begin differently; `ranks` are apart.

    A stage that uses such a layer by a function saves no weight, which would prove its masters.
    """
    matches = [
        masters.beginning(Match(model.entries[copy.name], copy))
        for model in ranks.models
        for copy in model.replicas
        if copy.slot == "master" and copy.axis == STAGE
    ]
    names = [r.match.a.parameter for r in masters.results_of(ranks, matches) if r.differs]
    if not names:
        return []
    return [
        f"the stages' copies of {listed(list(dict.fromkeys(names)), 4)} differ, and each stage "
        "keeps its own"
    ]


def averaged(manifest: Manifest) -> Manifest:
    """Each tensor of a parameter is the mean of the tensor ranks' copies, for --replicas mean.

    A weight is the rounded mean of the masters, since the mean of rounded weights is another
    number. Buffers are those of rank 0, and tied layers those of the first stage.
    """
    if int(manifest.source.get("tp") or 0) < 2 or manifest.ranks:  # each keeps its own copy
        return manifest
    copies: dict[str, list[Entry]] = {}
    for copy in manifest.replicas:
        entry = manifest.entries.get(copy.name)
        if entry is None or copy.parameter not in manifest.parameters or copy.slot == "state":
            continue
        if copy.dtype in FLOATS and copy.axis != STAGE:
            copies.setdefault(copy.name, [entry]).append(copy)
    entries = {}
    for name, entry in manifest.entries.items():
        own = copies.get(name, [])
        masters = copies.get(f"{entry.parameter}/master", own)
        entries[name] = replace(entry, mean=tuple(masters if entry.slot == "param" else own))
    return replace(manifest, entries=entries)


def _line(result: Result) -> str:
    difference = result.difference
    assert difference is not None
    most = "" if difference.max_abs is None else f" by at most {difference.max_abs:.3g}"
    return f"{result.match.a.slot} in {difference.count} of {result.match.a.numel} elements{most}"


def check_slices(manifest: Manifest) -> None:
    """Raises InconsistentCheckpoint if all tensor ranks hold the same of what a rule cuts.

    Second moments tell, unless they are all zero: a weight that was never trained proves nothing.
    """
    if len(manifest.models) < 2:
        return
    moments, rules = _moments(manifest.models), _rules(manifest)
    wrong = [
        name
        for name, rule in rules.items()
        if rule not in ("replicated", SUM) and any(map(_are_equal, moments.get(name, ())))
    ]
    if wrong:
        raise InconsistentCheckpoint(
            f"{manifest.root}: the rule `{rules[wrong[0]]}` cuts {listed(wrong)} over tensor "
            "ranks, but all ranks hold the same values",
            hint="give the rule `replicated` for such a parameter with --tp-rules FILE",
        )


def _refuse_sums(manifest: Manifest) -> None:
    """Raises UnsupportedCheckpoint if the whole of a parameter is a sum of the ranks' parts."""
    if sums := [name for name, rule in _rules(manifest).items() if rule == SUM]:
        raise UnsupportedCheckpoint(
            f"{manifest.root}: each tensor rank has a part of {listed(sums, 4)}, and the whole is "
            "the sum of the parts; zckpt does not add tensors",
            hint="`reshard --dp` and `--pp` keep the parts. With the rule `replicated` "
            "(--tp-rules) and --replicas rank0 you get the part of tensor rank 0",
        )


def _rules(manifest: Manifest) -> Mapping[str, str]:
    """The rule by which each parameter was cut; none if slices were not joined."""
    rules: Mapping[str, str] = (manifest.state.get("tensor_parallel") or {}).get("rules") or {}
    return rules


def _moments(ranks: Sequence[Manifest]) -> dict[str, list[list[Entry]]]:
    """By parameter, all ranks' tensors of each state of the optimizer, where shapes are equal."""
    moments: dict[str, list[list[Entry]]] = {}
    for key, entry in ranks[0].entries.items():
        each = [rank.entries.get(key) for rank in ranks] if is_optimizers(entry.slot) else []
        known = [item for item in each if item is not None]
        if len(known) == len(ranks) and len({item.shape for item in known}) == 1:
            moments.setdefault(entry.parameter, []).append(known)
    return moments


def _are_equal(slices: Sequence[Entry]) -> bool:
    """Whether all slices begin with the same numbers, and these are not all zero."""
    count = min(SAMPLE, slices[0].numel)
    first, *others = (head(entry, count) for entry in slices)
    return any(first) and all(first == other for other in others)
