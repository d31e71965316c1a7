"""Joins a checkpoint's tensors by its engine's own rule, and compares them with another checkpoint.

Every process reads some ranks' parts (shards) of the flat buffers, and torch.distributed gathers
them. The parameters are then cut out of the buffers by the engine's rule (`formats/*/gather.py`,
with the classes of `core/ranks/partition.py`). zckpt's manifest (its table of where the bytes of
each tensor are) is not used for this checkpoint, so a wrong manifest is detected: only the parser
of the files is the same as for a conversion. The other checkpoint is read through its manifest.

A bucket is what one all-gather moves: a matrix with a row per rank, whose columns hold elements of
as many buffers as fit into memory. Tensors are compared as views of the bucket's memory. There are
two buckets at a time: while one is gathered and compared, threads read the next into pinned memory.
Each process compares a part of the gathered bucket. A tensor that is complete in one file is not
gathered: each process reads and compares a part of it.

    world.py       which processes take part        readers.py     threads that read both sides
    parts.py       the ranks' shards, by name       buffers.py     the memory of a bucket
    gathering.py   reads, gathers and compares      elements.py    comparison of two blocks
    buckets.py     which blocks of tensors one all-gather returns
"""

from collections.abc import Collection, Sequence

from msgspec import Struct, msgpack
from msgspec.structs import replace

from ...core.checkpoint.dtypes import SIZES
from ...core.checkpoint.entries import Key
from ...core.checkpoint.manifest import Manifest
from ...core.checkpoint.states import Selection
from ...core.comparison.compare import ComparisonOutcome, Result
from ...core.comparison.difference import Difference
from ...core.passes.description import Report, line_of, said
from ...core.passes.plan import match, of_copies
from ...core.passes.resources import Begin
from ...core.ranks.partition import Nameless, Partition
from ...core.storage.checksum import Cover
from ...errors import MissingExtra, listed, note, problem
from .. import unsupported as of_unread
from ..file_digest import same_files
from ..pairs import selected
from ..report import findings, versions
from ..verify import inferences, needs_weights, nothing_found, roundings, with_values

try:
    import torch
except ImportError as error:
    raise MissingExtra(
        "extra-missing",
        "--gather needs torch, which is not installed",
        hint="pip install torch safetensors",
    ) from error
from .gathering import Gathering
from .parts import alone, by_kind, by_name, cut_over, first_extent, keys_of, strided, with_names
from .world import World, exchanged, join_world


def verify_gathered(
    manifest: Manifest,
    parts: Sequence[Partition] | None,
    other: Manifest,
    selection: Selection,
    device: str | None,
    jobs: int,
    memory: int,
    begin: Begin | None,
) -> Report:
    """Reports whether tensors that are joined as the engine joins them equal those of `other`.

    parts        the ranks' shards by the engine's rule; None if no engine all-gathers this format
    selection    the tensors to compare
    device       "cpu" or "cuda"; None: a GPU if there is one
    begin        shows progress

    Every process returns the same report, except for its own rank under `rank`. Raises WrongOption
    if processes cannot connect or there is no such device, and MissingData if the two checkpoints
    share no weights.
    """
    world = join_world(device)
    try:
        if parts is None:
            parts = [alone(entry) for entry in manifest.entries.values() if entry.slot != "state"]
        return _verify(world, manifest, parts, other, selection, jobs, memory, begin)
    finally:
        world.close()


def _verify(
    world: World,
    manifest: Manifest,
    parts: Sequence[Partition],
    other: Manifest,
    selection: Selection,
    jobs: int,
    memory: int,
    begin: Begin | None,
) -> Report:
    parts, of_reader, unsupported = with_names(parts, manifest)
    parts, entries, copies = by_name(parts, manifest)
    keys = [key for key in manifest.entries if key in entries]  # in the order of the model
    entries = {key: entries[key] for key in (*keys, *entries)}
    ours = replace(manifest, entries=entries, replicas=())
    whole = manifest, other
    (ours, other), pattern = selection.of(ours, other), selection.tensors
    shared, only_a, only_b = match(ours, other)
    matches = [(item.a.key, item) for item in shared if item.a.slot != "state"]
    matches += [
        (key, of_copies(entry, item.b))
        for key, entry in copies.items()
        for item in shared
        if item.a.key == entry.key and item.how == "bits" and item.b and not item.copy
    ]
    by_pattern = {id(item) for item in selected([item for _, item in matches], pattern)}
    matches = [(key, item) for key, item in matches if id(item) in by_pattern]
    if pattern is None:
        needs_weights([item for _, item in matches], manifest, other)
    total = sum(2 * item.b.length for _, item in matches if item.b) // world.size
    progress = begin(total) if begin and not world.rank else None
    gathering = Gathering(world, matches, jobs, progress)
    try:
        compared = [part for part in parts if gathering.places.keys() & keys_of(part)]
        cuts = [cut for part in compared for cut in cut_over(part, world.size)]
        gathering.run(by_kind(cuts), memory)
        boxes = [box for part in compared for box in strided(part)]
        for box in boxes[world.rank :: world.size]:
            gathering.compare_strided(box)
    finally:
        gathering.readers.close()
    outcome = _of_all_processes(world, gathering)
    report = findings(outcome, manifest, other)
    report |= inferences([item for _, item in matches], manifest, other, lambda: same_files(*whole))
    report |= roundings(report, outcome.results, ours, other)
    report["problems"] += _uncovered(outcome)
    report["records"] = None  # gathering reads parts of records, so it checks no CRC of a record
    compared_names = {item.a.name for _, item in matches}
    report["names_of_reader"] = [name for name in of_reader if name in compared_names]
    if pattern is None:
        report["problems"] += _not_gathered(manifest, entries) + _unsupported(unsupported)
        one_sided = [[key for key in keys if key[1] != "state"] for keys in (only_a, only_b)]
        report = with_values(report, ours, other, *one_sided)
        kept = [entry for entry in manifest.entries.values() if entry.slot == "state"]
        kept += [item.a for item in of_unread.pairs(ours, other)]
        if names := [entry.name for entry in kept]:
            message = f"{listed(names, 4)}: --gather reads only tensors of parameters"
            report["not_compared"] += said([note("not-compared", message, subject=names[0])])
    return {
        **report,
        "equal": nothing_found(report),
        "device": str(world.device.type),
        "world": world.size,
        "rank": world.rank,
        "versions": {**versions(manifest, other), "torch": torch.__version__},
    }


def _uncovered(outcome: ComparisonOutcome) -> list[Report]:
    """Report lines about tensors some of whose elements are in no rank's shard."""
    return [
        line_of(
            problem(
                "elements-missing",
                f"{result.match.name}: the ranks' shards do not cover its "
                f"{result.match.a.numel} elements",
                subject=result.match.name,
            ),
            tensor=result.match.name,
        )
        for result in outcome.results
        if result.match.is_read and result.digests[1] is None
    ]


def _not_gathered(manifest: Manifest, gathered: Collection[Key]) -> list[Report]:
    """Report lines about tensors in the manifest that the engine would not load from the shards."""
    return [
        line_of(
            problem("tensor-differs", f"the engine would not gather {name}", subject=name),
            tensor=name,
        )
        for key, entry in manifest.entries.items()
        if key not in gathered and entry.slot != "state"
        for name in [entry.name]
    ]


def _unsupported(unsupported: Sequence[Nameless]) -> list[Report]:
    """Report lines about tensors that the engine would load, but that zckpt does not read."""
    return [
        line_of(
            problem(
                "tensor-missing",
                f"{begin.file} has {part.tensor.dtype} {list(part.tensor.shape)} of slot "
                f"{part.slot} at byte {begin.offset}, which zckpt does not read",
                file=begin.file,
            )
        )
        for part in unsupported
        if (begin := first_extent(part.tensor))
    ]


class _Findings(Struct, frozen=True):
    """What one process has found, sent to all other processes.

    differences    by the index of the pair of tensors (one of each checkpoint)
    crcs           index of the pair, side, and ranges of elements as (start, stop, CRC-32)

    Side 0 is the checkpoint whose shards are all-gathered, side 1 is the other checkpoint.
    """

    differences: dict[int, Difference]
    crcs: list[tuple[int, int, list[tuple[int, int, int]]]]
    bytes: int


def _of_all_processes(world: World, gathering: Gathering) -> ComparisonOutcome:
    crcs = [(*key, ranges) for key, ranges in gathering.crcs.items()]
    mine = msgpack.encode(_Findings(gathering.differences, crcs, gathering.bytes))
    everyone = [msgpack.decode(each, type=_Findings) for each in exchanged(world, mine)]
    differences: dict[int, Difference] = {}
    covers: dict[tuple[int, int], Cover] = {}
    for its in everyone:
        for place, difference in its.differences.items():
            differences.setdefault(place, Difference()).add(difference)
        for place, side, ranges in its.crcs:
            item = gathering.matches[place]
            entry = item.b if side else item.a
            assert entry is not None
            cover = covers.setdefault((place, side), Cover(entry.length))
            for start, stop, crc in ranges:
                cover.add(start * SIZES[entry.dtype], stop * SIZES[entry.dtype], crc)
    results = []
    for place, item in enumerate(gathering.matches):
        sides = [covers.get((place, side)) for side in (0, 1)]
        digests = [0 if not item.a.numel else cover.crc if cover else None for cover in sides]
        results.append(Result(item, (digests[0], digests[1]), differences.get(place)))
    return ComparisonOutcome(results, bytes=sum(its.bytes for its in everyone))
