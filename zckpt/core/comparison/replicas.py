"""Compares the replicas that ranks hold of one tensor, and checks that slices are not replicas.

Before a conversion writes anything, it compares the first elements of replicas; the processes that
copy compare all other elements (`Replicas`). What may be done if replicas differ depends on the
axis whose ranks hold them (`AXES`). On some axes the engine lets replicas drift. On the others, the
user has to choose one replica, or the mean of all; a format's hints say how.

Slices of a parameter that is cut over ranks never have equal moments. If they do, the rule that
cuts the parameter is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from ...errors import (
    InconsistentCheckpoint,
    Notice,
    UnsupportedCheckpoint,
    counted,
    listed,
    warning,
)
from ..checkpoint.dtypes import FLOATS
from ..checkpoint.entries import Entry, Key
from ..checkpoint.facts import UNCUT
from ..checkpoint.manifest import Manifest
from ..checkpoint.placement import EP_RANK, STAGE, TENSOR_RANK, Placement
from ..checkpoint.weights import is_optimizers
from ..grouping import by_key
from ..passes.full_checks import Differing
from ..passes.loading import head
from ..passes.plan import Match
from . import masters
from .compare import Result, compare
from .difference import Difference

SAMPLE = 1 << 14  # elements that are compared of each slice
RANK0, MEAN = "rank0", "mean"
"""The values of --replicas: which value is used if replicas differ."""
OWN = "own"
"""A choice beside RANK0 and MEAN: each rank keeps its own replica, since ranks are not merged."""


class Ranks(Struct, frozen=True):
    """What may be done if replicas differ along one parallel axis, such as the tensor ranks.

    `words` is what messages call the ranks, and `taken` the rank whose replica is used. `drift` is
    True if the engine lets replicas differ along this axis. Differences are then reported as a
    warning.
    """

    words: str
    taken: str
    drift: bool = False


AXES: Mapping[str, Ranks] = {
    # DeepSpeed 0.19.8 sums gradients of a tied layer's `tied_weight_attr` over stages, of no other
    # weight
    STAGE: Ranks("stages", "the first stage's", drift=True),
    # replicas of BLOOM's norms drifted (bigscience PR 271): a fault of the training
    TENSOR_RANK: Ranks("tensor ranks", "rank 0's"),
    EP_RANK: Ranks("ep ranks", "rank 0's"),
}
"""Maps an axis (`Entry.axis`) to what may be done if replicas on its ranks differ.

A replica without an axis belongs to a tensor rank.
"""

Hints = Mapping[str, str]
"""Maps an axis to what the user may do if the replicas on its ranks differ."""


Judge = Callable[[Sequence[Result]], list[Notice]]
"""Returns warnings about replicas that differ, or raises InconsistentCheckpoint."""


class Replicas:
    """Compares replicas with the tensors that are used instead, while a conversion copies.

    matches    pairs of a replica and the tensor that is used instead
    judge      gets the results of the pairs that differ, in the order of `matches`; returns
               warnings, or raises InconsistentCheckpoint if a difference is not allowed
    """

    name, about = "copies", "comparing the replicas of ranks"
    measures = True

    def __init__(self, manifest: Manifest, matches: Sequence[Match], judge: Judge) -> None:
        self.matches = matches
        self._manifest, self._judge = manifest, judge

    def compare_all(self) -> list[Notice]:
        """Compares all elements in this process, and returns warnings.

        Raises InconsistentCheckpoint if a replica differs, and differences are not allowed.
        """
        results = compare(self.matches, self._manifest, self._manifest).results
        return self._judge([result for result in results if result.differs])

    def begin(self) -> None:
        """Compares the first elements of each fragment (byte range in a file) of the replicas.

        Raises InconsistentCheckpoint if a replica differs, and differences are not allowed.
        """
        results = masters.results_of(self._manifest, [*map(masters.beginning, self.matches)])
        self._refuse({n: result for n, result in enumerate(results) if result.differs})

    def refuse(self, differing: Mapping[int, Differing]) -> None:
        """Raises InconsistentCheckpoint if a replica differs, and differences are not allowed.

        `differing` maps the index of a pair in `matches` to the difference of its elements.
        """
        self._refuse(self._results(differing))

    def conclude(self, differing: Mapping[int, Differing]) -> list[Notice]:
        """Returns warnings about all replicas that differ.

        `differing` maps the index of a pair in `matches` to the difference of its elements. Raises
        InconsistentCheckpoint if differences are not allowed.
        """
        return self._judge([*self._results(differing).values()])

    def _refuse(self, results: Mapping[int, Result]) -> None:
        """Raises InconsistentCheckpoint if a replica differs, and differences are not allowed.

        `results` may cover only a part of the elements. So all elements of the parameter that the
        error names are compared first.
        """
        try:
            self._judge([*results.values()])
        except InconsistentCheckpoint as error:
            named = [match for match in self.matches if match.a.parameter == error.subject]
            bare = self._manifest.replace(records=())  # no record is read to its end
            measured = iter(compare(named, bare, bare).results)
            is_named = [match.a.parameter == error.subject for match in self.matches]
            complete = {n: next(measured) for n, own in enumerate(is_named) if own}
            all_results = sorted((dict(results) | complete).items())
            self._judge([result for _, result in all_results if result.differs])
            raise

    def _results(self, differing: Mapping[int, Differing]) -> dict[int, Result]:
        return {
            number: Result(
                self.matches[number],
                (None, None),
                Difference(
                    difference.count,
                    difference.first,
                    max_abs=difference.max_abs,
                    nans=(difference.nans, 0),
                ),
            )
            for number, difference in sorted(differing.items())
        }


def replicas_of(manifest: Manifest, chosen: str | None, hints: Hints) -> Replicas:
    """Pairs every replica with the tensor that is used instead of it, to compare them later.

        chosen    what to do if replicas differ: use RANK0 or the MEAN for all ranks, let each rank
                  keep its OWN, or (None) raise an error
        hints     the hint of this error for each axis

    Where the engine lets replicas drift (`AXES`), a difference is no error.
    """
    # with OWN, replicas that may drift are not compared: they may be large
    axes = {axis: ranks for axis, ranks in AXES.items() if chosen != OWN or not ranks.drift}
    matches = [match for match in copies_of(manifest) if _axis(match.a) in axes]

    def judge(differing: Sequence[Result]) -> list[Notice]:
        return _judged(manifest, differing, axes, chosen, hints)

    return Replicas(manifest, matches, judge)


def _judged(
    manifest: Manifest,
    differing: Sequence[Result],
    axes: Mapping[str, Ranks],
    chosen: str | None,
    hints: Hints,
) -> list[Notice]:
    warnings: list[Notice] = []
    for axis, ranks in axes.items():
        own_axis = (each for each in differing if _axis(each.match.a) == axis)
        lines = by_key((each.match.a.parameter, _line(each)) for each in own_axis)
        if not lines:
            continue
        if ranks.drift or chosen in (RANK0, MEAN):
            taken = "their mean" if not ranks.drift and chosen == MEAN else ranks.taken
            warnings += [
                warning(
                    "copies-differ",
                    f"the {ranks.words}' replicas of {name} differ; {taken} is used: "
                    f"{listed(lines_of_copies, 3)}",
                    subject=name,
                )
                for name, lines_of_copies in lines.items()
            ]
            continue
        name, lines_of_copies = next(iter(lines.items()))
        differ = (
            f"{ranks.words} hold different replicas of {counted(len(lines), 'parameter')} "
            f"({listed(list(lines), 4)})"
        )
        example = f"{name}: {listed(lines_of_copies, 3)}"
        if chosen is None:
            message = f"{manifest.root}: {differ}: {example}"
            raise InconsistentCheckpoint("copies-differ", message, hint=hints[axis], subject=name)
        message = f"{differ}, and each rank keeps its replica: {example}"
        warnings.append(warning("copies-differ", message, subject=name))
    return warnings


def not_compared(manifest: Manifest) -> list[Notice]:
    """A list of one warning: replicas were not compared, because the command reads no tensor."""
    if not manifest.notices.uncompared:
        return []
    tensors = counted(manifest.notices.uncompared, "tensor")
    message = (
        f"not checked: whether the ranks' replicas of {tensors} are equal. Their files state no "
        "checksums, and no tensor was read; `zckpt verify` compares the bytes"
    )
    return [warning("not-compared", message)]


def check_joined(manifest: Manifest) -> None:
    """Checks the rules by which the slices of tensor-parallel ranks were joined.

    Raises InconsistentCheckpoint if all slices of an optimizer state are equal, but not zero: then
    the parameter's rule is wrong. Raises UnsupportedCheckpoint if a parameter is the sum of the
    ranks' tensors.
    """
    _refuse_sums(manifest)
    check_slices(manifest)


def copies_of(manifest: Manifest) -> Iterator[Match]:
    """Pairs every replica with the tensor of the same name that a conversion uses.

    Tensors of the program's state, such as random states, are left out.
    """
    for copy in manifest.replicas:
        if copy.slot != "state" and copy.key in manifest.entries:
            yield Match(copy, manifest.entries[copy.key])


def compare_apart(manifest: Manifest) -> list[Notice]:
    """Warns if replicas of an fp32 master have drifted, in a checkpoint whose ranks stay separate.

    Only axes on which the engine allows drift are compared, and only the first elements of each
    fragment (byte range in a file).
    """
    # not with their weights: a pipeline stage that uses a tied layer through a function
    # (`forward_fn` of DeepSpeed's TiedLayerSpec) saves no weight of it
    matches = [
        match
        for model in manifest.models
        for match in copies_of(model)
        if match.a.slot == "master" and AXES[_axis(match.a)].drift
    ]
    results = masters.results_of(manifest, [*map(masters.beginning, matches)])
    pairs = zip(matches, results, strict=True)
    names = by_key((_axis(own.a), own.a.parameter) for own, result in pairs if result.differs)
    return [
        warning(
            "copies-differ",
            f"the {AXES[axis].words}' replicas of {listed(list(dict.fromkeys(names_on_axis)), 4)} "
            f"differ, and each {axis} keeps its replica",
            subject=names_on_axis[0],
        )
        for axis, names_on_axis in names.items()
    ]


def averaged(manifest: Manifest) -> Manifest:
    """Replaces tensors by the mean of the tensor-parallel ranks' replicas (--replicas mean).

    A weight becomes the rounded mean of its masters, since the mean of rounded weights is another
    number. Buffers are those of rank 0. Replicas that engines let drift are not averaged.
    """
    if (manifest.run.origin.tp or 1) < 2 or manifest.ranks:  # each rank keeps its copy
        return manifest
    copies: dict[Key, list[Entry]] = {}
    for match in copies_of(manifest):
        copy, taken = match.a, match.b
        is_averaged = copy.parameter in manifest.parameters and copy.dtype in FLOATS
        if taken is not None and is_averaged and not AXES[_axis(copy)].drift:
            copies.setdefault(copy.key, [taken]).append(copy)
    entries = {}
    for key, entry in manifest.entries.items():
        of_key = copies.get(key, [])
        of_masters = copies.get((entry.parameter, "master"), of_key)
        entries[key] = replace(entry, mean=tuple(of_masters if entry.slot == "param" else of_key))
    return replace(manifest, entries=entries)


def _axis(copy: Entry) -> str:
    return copy.axis if copy.axis in AXES else TENSOR_RANK


def _line(result: Result) -> str:
    difference = result.difference
    assert difference is not None
    most = "" if difference.max_abs is None else f" by at most {difference.max_abs:.3g}"
    if lost := sum(difference.nans):
        most = f", {lost} of which {'is' if lost == 1 else 'are'} NaN in one replica"
    return f"{result.match.a.slot} in {difference.count} of {result.match.a.numel} elements{most}"


# -- slices


def check_slices(manifest: Manifest) -> None:
    """Raises InconsistentCheckpoint if all slices of a cut parameter are equal.

    Then the ranks hold replicas, and the rule that cuts the parameter is wrong. The first
    elements of its optimizer states are compared. If they are all zero, the weight was never
    trained, and they prove nothing.
    """
    if len(manifest.models) < 2:
        return
    moments, placements = _moments(manifest.models), _placements(manifest)
    wrong = [
        name
        for name, placement in placements.items()
        if placement.is_cut and any(map(_are_equal, moments.get(name, ())))
    ]
    if wrong:
        raise InconsistentCheckpoint(
            "tp-rule-wrong",
            f"{manifest.root}: the rule `{placements[wrong[0]].text}` cuts {listed(wrong)} over "
            "the tensor ranks, but all ranks hold the same values",
            hint="give the rule `replicated` for such a parameter with --tp-rules FILE",
            file=manifest.root,
        )


def _refuse_sums(manifest: Manifest) -> None:
    if sums := [name for name, own in _placements(manifest).items() if own.is_sum]:
        raise UnsupportedCheckpoint(
            "grid-unsupported",
            f"{manifest.root}: {listed(sums, 4)} is the sum of the tensor ranks' values (rule "
            "`sum`), and zckpt does not add tensors",
            hint="`reshard --dp` and `--pp` keep each rank's values. With the rule `replicated` "
            "(--tp-rules) and --replicas rank0 you get the values of tensor rank 0",
            file=manifest.root,
        )


def _placements(manifest: Manifest) -> Mapping[str, Placement]:
    return (manifest.run.tensor_parallel or UNCUT).placements


def _moments(ranks: Sequence[Manifest]) -> dict[str, list[list[Entry]]]:
    """Maps each parameter to its optimizer states; a state is the list of all ranks' tensors.

    Only states that every rank has in the same shape are included.
    """
    moments: dict[str, list[list[Entry]]] = {}
    for key, entry in ranks[0].entries.items():
        entries = [rank.entries.get(key) for rank in ranks] if is_optimizers(entry.slot) else []
        present = [item for item in entries if item is not None]
        if len(present) == len(ranks) and len({item.shape for item in present}) == 1:
            moments.setdefault(entry.parameter, []).append(present)
    return moments


def _are_equal(slices: Sequence[Entry]) -> bool:
    first, *rest = (head(entry, SAMPLE) for entry in slices)
    return any(first) and all(first == other for other in rest)
