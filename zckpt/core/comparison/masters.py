"""Checks that the fp32 masters of a checkpoint round to its weights.

A trained 16-bit weight is stored twice: as the module holds it, and as the fp32 master that it was
rounded from. If the two do not agree, files of two saves or of two ranks are mixed, or the program
saved other weights than it trained. Before a conversion writes anything, it compares

    beginnings   the first elements of all fragments. So every file with a part of a master is
                 checked, even if no weight begins in it.
    all          all elements. This is for engines that misplace some masters (Megatron-Core), or
                 whose copies of weights may be stale (ONNX Runtime).

To compare all elements reads the complete weights and masters once more. So a conversion compares
the beginnings first, and leaves the rest to the processes that copy (`Rounding`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct

from ...errors import InconsistentCheckpoint, Notice, counted, listed, warning
from ..checkpoint.cast import are_rounded
from ..checkpoint.dtypes import SIZES
from ..checkpoint.entries import Entry, Key
from ..checkpoint.manifest import Manifest
from ..checkpoint.weights import agreement
from ..grouping import by_key
from ..passes.full_checks import Differing
from ..passes.loading import head
from ..passes.plan import Match
from ..passes.resources import Copying
from ..passes.streaming import finish
from ..storage.fragments import Extent, Fragment, Fragments, Runs, boxes_of
from ..storage.records import RecordChecker
from .compare import Result, compare
from .difference import Difference

BEGINNINGS, ALL = "beginnings", "all"
FEW = 1 << 7  # elements that are compared at the beginning of a fragment
READING = Copying(memory=64 << 20)
USUAL_HINT = (
    "files of two saves or of two ranks are mixed, or one is damaged: copy all files of one save "
    "again. If the program saved other weights than it trained, such as those of an EMA, add "
    "--accept-weights"
)


def with_masters(entries: Mapping[Key, Entry]) -> Iterator[Match]:
    """Pairs every fp32 master with its weight, if their dtypes and shapes can belong together."""
    for entry in entries.values():
        weight = entries.get((entry.parameter, "param"))
        if entry.slot == "master" and weight is not None:
            yield from _matches(entry, [weight])


def check(manifest: Manifest, elements: str, hint: str, accepted: bool) -> list[Notice]:
    """Checks that fp32 masters round to their weights; returns warnings.

    `elements` is BEGINNINGS (the first elements of each fragment) or ALL. Raises CorruptCheckpoint
    if a file is damaged at the first difference. Otherwise raises InconsistentCheckpoint with the
    `hint` for a difference, unless the user has `accepted` differences.
    """
    return _report_differing(manifest, unlike(manifest, elements), hint, accepted)


def _report_differing(
    manifest: Manifest, wrong: Sequence[tuple[Manifest, Result]], hint: str, accepted: bool
) -> list[Notice]:
    """Raises InconsistentCheckpoint for masters in `wrong`, or warns if differences are `accepted`.

    Returns the warning in a list, which is empty if `wrong` is empty. Raises CorruptCheckpoint if
    the bytes at the first difference are damaged.
    """
    if not wrong:
        return []
    places = [first_difference(result) for _, result in wrong]
    refuse_damage(manifest, places[0])
    names = list(dict.fromkeys(own.titled(result.match.a.parameter) for own, result in wrong))
    verb = "is not its rounded master" if len(names) == 1 else "are not the rounded masters"
    masters, weights = (_files(manifest.root, extents) for extents in zip(*places, strict=True))
    message = (
        f"{counted(len(names), 'weight')} of {manifest.root} {verb}: {listed(names, 4)}. The "
        f"masters are in {masters}, the weights in {weights}"
    )
    if not accepted:
        raise InconsistentCheckpoint("master-differs", message, hint=hint, subject=names[0])
    message += ". Because of --accept-weights, masters and weights are used as they are"
    return [warning("master-differs", message, subject=names[0])]


def unlike(manifest: Manifest, elements: str) -> list[tuple[Manifest, Result]]:
    """Finds masters that do not round to their weights, each with the first differing element.

    Each result comes with the manifest that holds the master. It is the manifest of a model rank if
    model ranks are not merged.
    """
    compared = [*_compared(manifest, elements)]
    results = results_of(manifest, [each.match for each in compared])
    return [
        (item.rank, result)
        for item, result in zip(compared, results, strict=True)
        if result.differs and item.has_no_other(manifest)
    ]


class _Compared(Struct, frozen=True):
    """An fp32 master and its weights; the master must round to at least one of them.

    rank             the manifest that holds the master: of the checkpoint, or of one model rank
    match            the master with the first weight
    other_matches    the master with each further weight
    whole            whether all elements are compared, not only the first ones of each fragment
    """

    rank: Manifest
    match: Match
    other_matches: Sequence[Match]
    whole: bool

    def has_no_other(self, manifest: Manifest) -> bool:
        return all(other.differs for other in results_of(manifest, self.other_matches))


def _compared(manifest: Manifest, elements: str) -> Iterator[_Compared]:
    for rank in manifest.rank_manifests:
        for master, weights in _masters(rank):
            matches = _matches(master, weights)
            # other checks compare whole copies
            whole = elements == ALL and rank.entries.get(master.key) is master
            if matches:
                first, *other_matches = matches if whole else map(beginning, matches)
                yield _Compared(rank, first, other_matches, whole)


class Rounding:
    """Checks, while a conversion copies, that all elements of masters round to their weights.

    `matches` pairs each master with a weight.
    """

    name, about = "masters", "comparing masters with their weights"
    measures = False

    def __init__(self, manifest: Manifest, hint: str, accepted: bool) -> None:
        self._about = hint, accepted
        self._manifest = manifest
        self._compared = [*_compared(manifest, ALL)]
        self._wholes = [each for each in self._compared if each.whole]
        self.matches: Sequence[Match] = [each.match for each in self._wholes]

    def compare_all(self) -> list[Notice]:
        """Compares all elements in this process and returns warnings.

        Raises InconsistentCheckpoint if a difference is not accepted, and CorruptCheckpoint if
        damage is the cause.
        """
        return check(self._manifest, ALL, *self._about)

    def begin(self) -> None:
        """Compares the first elements of masters with their weights, before a byte is written.

        Does nothing if the user has accepted differences. Raises InconsistentCheckpoint for a
        difference, and CorruptCheckpoint if damage is the cause.
        """
        hint, accepted = self._about
        if not accepted:
            check(self._manifest, BEGINNINGS, hint, accepted)

    def refuse(self, differing: Mapping[int, Differing]) -> None:
        """Raises InconsistentCheckpoint if masters do not round to their weights.

        `differing` maps the index of a pair in `matches` to the difference of its elements. Does
        nothing if the user has accepted differences. Raises CorruptCheckpoint if damage is the
        cause.
        """
        hint, accepted = self._about
        if differing and not accepted:
            _report_differing(self._manifest, self._wrong(differing), hint, accepted)

    def conclude(self, differing: Mapping[int, Differing]) -> list[Notice]:
        """Returns warnings about all masters that differ from their weights.

        `differing` maps the index of a pair in `matches` to the difference of its elements. Raises
        InconsistentCheckpoint if differences are not accepted, and CorruptCheckpoint if damage is
        the cause.
        """
        return _report_differing(self._manifest, self._wrong(differing, copies=True), *self._about)

    def _wrong(
        self, differing: Mapping[int, Differing], copies: bool = False
    ) -> list[tuple[Manifest, Result]]:
        results_by_id = {
            id(self._wholes[number]): Result(
                self.matches[number], (None, None), Difference(difference.count, difference.first)
            )
            for number, difference in differing.items()
        }
        rest = [each for each in self._compared if copies and not each.whole]
        results = results_of(self._manifest, [each.match for each in rest])
        results_by_id |= {
            id(own): each for own, each in zip(rest, results, strict=True) if each.differs
        }
        return [
            (item.rank, results_by_id[id(item)])
            for item in self._compared
            if id(item) in results_by_id and item.has_no_other(self._manifest)
        ]


def _masters(manifest: Manifest) -> Iterator[tuple[Entry, list[Entry]]]:
    """Pairs every master with its weights; the master must round to at least one of them.

    Replicas of a master, such as those of other tensor ranks or of a tied layer, are left out if
    there are fewer weights than masters: then some ranks have saved no weight.
    """
    tensors = (*manifest.entries.values(), *manifest.replicas)
    weights = _of_slot("param", (*tensors, *manifest.files.sibling_weights))
    for name, (first, *further) in _of_slot("master", tensors).items():
        copies = weights.get(name, [])
        yield first, copies[:1] if (name, "param") in manifest.entries else copies
        # each rank rounds its own replica, so that may agree with any copy of the weight
        if len(copies) > len(further):
            yield from ((other, copies) for other in further)


def _of_slot(slot: str, tensors: Iterable[Entry]) -> dict[str, list[Entry]]:
    return by_key((entry.parameter, entry) for entry in tensors if entry.slot == slot)


def _matches(master: Entry, weights: Iterable[Entry]) -> list[Match]:
    pairs = ((weight, agreement(master, weight)) for weight in weights)
    return [Match(master, weight, how) for weight, how in pairs if how is not None]


def begins_as(weight: Entry, master: Entry, count: int) -> bool:
    """Whether the first `count` elements of an fp32 master round to those of the weight.

    Also True if zckpt does not round between the two dtypes.
    """
    narrow, wide = head(weight, count), head(master, count)
    return are_rounded(wide, master.dtype, narrow, weight.dtype) is not False


def results_of(manifest: Manifest, matches: Sequence[Match]) -> list[Result]:
    """Compares pairs of tensors; returns the results in the same order. Ignores checksums."""
    if not matches:
        return []
    bare = manifest.replace(records=())
    return compare(matches, bare, bare, READING, measure="first").results


# -- the beginnings of fragments


def beginning(match: Match) -> Match:
    """Shortens a pair of tensors to the first elements of each fragment of both tensors."""
    assert match.b is not None
    ranges = sorted({*_heads(match.a.fragments), *_heads(match.b.fragments)})
    return Match(part_of(match.a, ranges), part_of(match.b, ranges), match.how, match.copy)


def _heads(fragments: Fragments) -> Iterator[tuple[int, int]]:
    """Yields the first FEW elements of each fragment, as element ranges [start, stop)."""
    parts = boxes_of(fragments)
    if not parts:
        for fragment in fragments:
            yield fragment.start, min(fragment.stop, fragment.start + FEW)
    for box in parts:
        left = FEW
        for run in box.runs(box.start, box.stop, box.size):
            if not left:
                break
            stop = min(run.stop, run.start + left)
            yield run.start, stop
            left -= stop - run.start


def part_of(entry: Entry, ranges: Iterable[tuple[int, int]]) -> Entry:
    """Returns a tensor that consists of some element ranges of another one, in their order."""
    fragments, size = entry.fragments, SIZES[entry.dtype]
    parts: list[Fragment] = []
    first = 0
    for start, stop in ranges:
        runs = fragments.part(start, stop, size)
        parts += [Fragment(first + run.start, first + run.stop, run.extent) for run in runs]
        first += stop - start
    return Entry(*entry.key, entry.dtype, (first,), Runs(parts), axis=entry.axis)


# -- where a difference is


def first_difference(result: Result) -> list[Extent]:
    """The bytes of the first differing element, in the files of both tensors of a pair."""
    first = (result.difference and result.difference.first) or 0
    entries = (entry for entry in (result.match.a, result.match.b) if entry is not None)
    runs = (entry.fragments.runs(first, first + 1, SIZES[entry.dtype]) for entry in entries)
    return [next(iter(fragments)).extent for fragments in runs]


def _files(root: str, extents: Iterable[Extent]) -> str:
    paths = dict.fromkeys(extent.file.removeprefix(f"{root}/") for extent in extents)
    return listed(list(paths), 3)


def refuse_damage(manifest: Manifest, places: Sequence[Extent]) -> None:
    """Raises CorruptCheckpoint if one of these byte ranges begins in a damaged part of a file.

    A part is damaged if its bytes do not have the CRC-32 that the file states, as for a zip member.
    """
    around = [
        record
        for record in manifest.files.records
        for place in places
        if record.extent.file == place.file
        and record.extent.offset <= place.offset < record.extent.offset + record.extent.length
    ]
    finish([RecordChecker(around, fingerprints=manifest.files.fingerprints)], everything=True)
