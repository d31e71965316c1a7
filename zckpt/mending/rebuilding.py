"""Writes lost files again, with the replacements for lost values that `--rebuild` allows.

frozen      weights of an older checkpoint, or buffers of all other ranks: equal to the lost values
weights     the rounded masters: equal to the lost values
masters     the 16-bit weights, widened: they differ from the lost values by less than a rounding
moments     zeros, or those of an older checkpoint
model       buffers, counters and the program's state of an older checkpoint, some of them advanced

The other content of a lost file is as the engine would have written it: the format's writer lays
the file out, and the step is that of the other ranks.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from tempfile import TemporaryDirectory

from msgspec import Struct
from msgspec.structs import replace

from .. import formats
from ..core.checkpoint.cast import cast
from ..core.checkpoint.dtypes import SIZES
from ..core.checkpoint.entries import Entry, Key
from ..core.checkpoint.manifest import Manifest
from ..core.checkpoint.mended import Mended
from ..core.checkpoint.weights import WEIGHTS, is_optimizers
from ..core.grouping import by_key
from ..core.passes.layout import Shell
from ..core.passes.pieces import ElementReader, ReadRequest
from ..core.passes.streaming import reading
from ..core.storage.fileio import Reader, crc_of, write_all
from ..core.storage.fragments import Extent, Fragment
from ..core.storage.records import RecordChecker
from ..errors import MissingData, WrongOption, ZckptError, listed
from ..files.torchshell import state_checksums
from ..judging.damaged_source import Found, kept
from .alike import FEWEST
from .losses import Losses, is_model, is_of_optimizer
from .rounding import may_drift

MASTERS, ZERO, OLDER, MODEL = "masters", "moments=zero", "moments=older", "model"
CHOICES = (MASTERS, ZERO, OLDER, MODEL)
"""The values that `--rebuild` takes."""
AS_OLDER = "the values of the older checkpoint"
CHUNK = 1 << 20  # elements
SCRATCH = 8 << 20  # bytes of working memory for small pieces of many ranks


class Rebuilding(Struct, frozen=True):
    """The choices of `--rebuild`: which lost values may be replaced by made-up ones.

    masters    masters may be made from the weights
    moments    "moments=zero", "moments=older" (those of the checkpoint `older`), or None
    model      the values in a lost model file may be made up
    others     maps the key of a lost tensor to (a tensor that supplies its elements, the reason)
    made_up    keys of lost tensors whose values are unknown, even if `others` supplies values
    """

    masters: bool = False
    moments: str | None = None
    older: Manifest | None = None
    model: bool = False
    others: Mapping[Key, tuple[Entry, str]] = {}
    made_up: Collection[Key] = ()

    @classmethod
    def of(cls, typed: Sequence[str], older: Manifest | None) -> Rebuilding:
        """Parses the values of `--rebuild`; raises WrongOption for unknown values."""
        moments = [each for each in dict.fromkeys(typed) if each in (ZERO, OLDER)]
        if wrong := [each for each in typed if each not in CHOICES]:
            raise WrongOption(
                "option-invalid",
                f"the value of --rebuild cannot be {wrong[0]!r}",
                hint=f"give {listed(CHOICES)}",
            )
        if len(moments) > 1:
            raise WrongOption(
                "options-conflict",
                f"--rebuild {ZERO} contradicts {OLDER}",
                hint="give one of the two",
            )
        if moments == [OLDER] and older is None:
            raise WrongOption(
                "options-conflict",
                f"--rebuild {OLDER} needs an older checkpoint",
                hint="give the older checkpoint: --older PATH",
            )
        return cls(MASTERS in typed, moments[0] if moments else None, older, MODEL in typed)

    def need_older(self) -> None:
        """Raises WrongOption if `--rebuild model` was typed without an older checkpoint."""
        if self.model and self.older is None:
            raise WrongOption(
                "options-conflict",
                f"--rebuild {MODEL} needs an older checkpoint",
                hint="give the older checkpoint: --older PATH",
            )

    def lacking(self, slots: Iterable[str]) -> list[str]:
        """The values of `--rebuild` that the user must add to make up tensors of these slots.

        A slot is what a tensor is for its parameter: "param", "master" or "exp_avg", for example.
        """
        slots = {*slots}
        lacks = [MODEL] if "param" in slots and not self.model else []
        lacks += [MASTERS] if "master" in slots and not self.masters else []
        return lacks + ([ZERO] if any(map(is_optimizers, slots)) and self.moments is None else [])

    def source(self, entry: Entry, source: Manifest) -> Entry | None:
        """The tensor that supplies the elements of the lost `entry`; None if these become zeros.

        `source` is the manifest of the damaged checkpoint. Raises MissingData if moments are to
        come from the older checkpoint, and it has no such tensor of the same type and shape.
        """
        if entry.key in self.others:
            return self.others[entry.key][0]
        if entry.slot == "param":
            return source.entries[entry.key]
        if entry.slot == "master":
            return source.entries[entry.parameter, "param"]
        if self.moments != OLDER or self.older is None:
            return None
        other = self.older.entries.get(entry.key)
        if other is None or (other.dtype, other.shape) != (entry.dtype, entry.shape):
            raise MissingData(
                "state-missing",
                f"the older checkpoint {self.older.where} has no {entry.name} of the same type and "
                "shape",
                hint=f"give another older checkpoint, or --rebuild {ZERO}",
                file=self.older.where,
                subject=entry.name,
            )
        return other

    def how(self, entry: Entry, source: Manifest) -> str:
        """Where the elements of the lost `entry` come from: "zeros", for example.

        zckpt-mended.json quotes this text. `source` is the manifest of the damaged checkpoint.
        """
        if entry.key in self.others:
            same, why = self.others[entry.key]
            is_older = self.older is not None and self.older.entries.get(entry.key) is same
            return AS_OLDER if is_older and entry.key in self.made_up else why
        if entry.slot == "param":
            return "the copies of all other ranks"
        other = self.source(entry, source)
        if other is None:
            return "zeros"
        if entry.slot == "master":
            return f"widened from the weights of {other.dtype}"
        return AS_OLDER


def rebuild(
    found: Found, losses: Losses, paths: Collection[str], rebuilding: Rebuilding
) -> list[Mended] | None:
    """Writes lost files again, at `paths` in a temporary folder; the checkpoint is not changed.

    Returns what zckpt-mended.json will say about the files. None if a file cannot be laid out as it
    was, or if values are unknown and cannot be made up, for example because replicas differ.

    Raises MissingData as `Rebuilding.source` does, and CorruptCheckpoint if elements would be taken
    from a damaged part of the older checkpoint.
    """
    source, format = losses.manifest or found.known, formats.named(found.known.format)
    if source.states.of_form("partition", "estimate"):
        return None  # each rank has an optimizer state of its own
    alone = [path for path in paths if path not in found.borrowed]
    has_extra = any(each.state.get("module_extra") for each in (source, *source.with_models))
    if has_extra and not all(map(is_of_optimizer, alone)):
        return None  # modules may have kept other values there than on the rank that stands in
    rebuilding = replace(rebuilding, others=losses.others, made_up=losses.made_up_keys)
    names = {os.path.basename(path): path for path in paths}
    weights = [source.entries.get((each, "param")) for each in source.parameters]
    lost = [each for each in weights if each and kept(each, found.lost)[0] is not each]
    if any(each.key not in rebuilding.others for each in lost) or losses.differing:
        return None  # no other file has a lost weight, or replicas differ
    records, older = list[Mended](), rebuilding.older
    of_older = {*map(id, older.entries.values())} if older is not None else set[int]()
    with TemporaryDirectory(prefix="zckpt-") as folder:
        try:
            if (layout := format.lay_out_again(source)) is None:
                return None
            _lay(layout.shells(), folder)
            shells = format.read_shells(folder)
        except ZckptError:
            return None
        made = {os.path.basename(each): each for each in shells.files.paths}
        if len(made) != len(shells.files.paths) or not names.keys() <= made.keys():
            return None
        for name, path in names.items():
            parts = [*_parts(shells, made[name])]
            if _places(parts) != _places(_parts(source, path)):
                return None  # the writer would put other elements there than the lost file had
            if older is not None:
                taken = [rebuilding.source(entry, source) for entry, _ in parts]
                _refuse_damaged(older, [each for each in taken if each and id(each) in of_older])
            _fill(made[name], shells, source, parts, rebuilding)
            below = os.path.relpath(found.real(path), found.path)
            records += (_mended(below, *part, source, rebuilding) for part in parts)
            if is_model(path):
                records += (
                    Mended(below, 0, 0, "made-up", 1.0, after=v.value, witness=v.how, value=v.name)
                    for v in losses.values
                )
            now = os.stat(path)
            os.unlink(path)  # the link to what stands in
            shutil.move(made[name], path)
            if path not in found.borrowed:
                os.utime(path, ns=(now.st_atime_ns, now.st_mtime_ns))
    return records


def _mended(
    file: str, entry: Entry, run: Fragment, source: Manifest, rebuilding: Rebuilding
) -> Mended:
    """Describes elements in a file that was written again, for zckpt-mended.json in the copy."""
    is_same = entry.slot == "param" or entry.key in rebuilding.others
    is_same = is_same and entry.key not in rebuilding.made_up
    return Mended(
        file,
        run.extent.offset,
        run.extent.length,
        "witness" if is_same else "made-up",
        0.0 if is_same else 1.0,
        tensor=entry.name,
        witness=rebuilding.how(entry, source),
    )


def differing_copies(found: Found, losses: Losses) -> list[str]:
    """Lists tensors that cannot be restored: replicas on other ranks differ, or are too few.

    A lost file had a replica of the tensor. At least two equal replicas must be left. Fewer are
    enough if another tensor supplies the values (`Losses.others`), or if `--rebuild` makes up
    values because the engine lets the replicas differ.
    """
    names, supplied = [], losses.others
    made_up = losses.made_up_keys - supplied.keys()
    for manifest in found.known.rank_manifests:
        by_name = by_key((copy.key, copy) for copy in manifest.replicas)
        groups = {key: [manifest.entries[key], *own] for key, own in by_name.items()}
        left = {
            key: [each for each in copies if _is_left(each, found)]
            for key, copies in groups.items()
        }
        lost = [key for key, copies in groups.items() if len(left[key]) < len(copies)]
        # slots with unequal replicas, such as `exp_avg`; buffers may differ, as running means do
        drifted = {
            key[1]
            for key, copies in (groups.items() if supplied.keys() & {*lost} else ())
            if key[0] not in manifest.buffers and not _agree(copies, found)
        }
        for key in lost:
            # with `is_copied`, remaining replicas and those of the whole slot must be equal; with
            # `is_made`, they may drift; both need equal replicas of the weight and the master
            is_copied = key in supplied
            is_made = key in made_up and all(map(may_drift, by_name[key]))
            remaining = [] if is_made else left[key]
            of_weights = [left.get((key[0], slot), []) for slot in WEIGHTS]
            of_weights = of_weights if is_copied or is_made else []
            is_alone = not is_copied and not is_made and len(remaining) < FEWEST
            is_unlike = is_copied and key[1] in drifted
            if is_alone or is_unlike or not all(map(_are_equal, (remaining, *of_weights))):
                names.append(groups[key][0].name)
    return names


def _agree(copies: Sequence[Entry], found: Found) -> bool:
    """Whether replicas have equal elements, on ranks that the engine does not let drift.

    Only elements that are in no lost file are compared.
    """
    copies = [copy for copy in copies if not may_drift(copy)]
    whole = next((copy for copy in copies if _is_left(copy, found)), None)
    if whole is None:
        return True
    ranges = {id(copy): kept(copy, found.lost)[1] for copy in copies}
    return all(
        _crc(copy, ranges[id(copy)]) == _crc(whole, ranges[id(copy)])
        for copy in copies
        if copy is not whole
    )


def _is_left(entry: Entry, found: Found) -> bool:
    return kept(entry, found.lost)[0] is entry


def _are_equal(copies: Iterable[Entry]) -> bool:
    return len(set(map(_crc, copies))) < 2


def _crc(entry: Entry, ranges: Iterable[tuple[int, int]] | None = None) -> int:
    size = SIZES[entry.dtype]
    return crc_of(
        run.extent
        for start, stop in (((0, entry.numel),) if ranges is None else ranges)
        for run in sorted(entry.fragments.runs(start, stop, size), key=lambda run: run.start)
    )


def _refuse_damaged(older: Manifest, entries: Iterable[Entry]) -> None:
    checker = RecordChecker(older.files.records)
    for entry in entries:
        for fragment in entry.fragments:
            checker.require(fragment.extent)
    with closing(Reader()) as reader:
        checker.finish(reader)


Part = tuple[Entry, Fragment]


def _lay(shells: Iterable[Shell], folder: str) -> None:
    """Creates files with their headers, and holes where tensors go."""
    for shell in shells:
        path = os.path.join(folder, shell.name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "xb") as file:
            file.truncate(shell.size)
            for offset, data in shell.parts:
                write_all(file.fileno(), memoryview(data), offset)


def _parts(manifest: Manifest, file: str) -> Iterator[Part]:
    """Yields the tensors in `file`, each with a range of its elements that is contiguous there."""
    for entry in (*manifest.entries.values(), *manifest.replicas):
        for run in entry.fragments.runs(0, entry.numel, SIZES[entry.dtype]):
            if run.extent.file == file:
                yield entry, run


def _places(parts: Iterable[Part]) -> set[tuple[str, str, int, int]]:
    return {(entry.name, entry.dtype, run.start, run.stop) for entry, run in parts}


def _fill(
    made: str, shells: Manifest, source: Manifest, parts: Iterable[Part], rebuilding: Rebuilding
) -> None:
    """Copies elements into the file `made`, which has only headers, and adds its zip checksums."""
    with open(made, "r+b") as file, reading([RecordChecker(())], SCRATCH) as (reader,):
        number = file.fileno()
        for entry, run in parts:
            if (other := rebuilding.source(entry, source)) is not None:
                _copy(reader, other, entry, run, number)
        crcs = {
            record.extent.offset: crc_of([record.extent])
            for record in shells.files.records
            if record.extent.file == made
        }
        state_checksums(number, Extent(made, 0, os.fstat(number).st_size), crcs)


def _copy(reader: ElementReader, source: Entry, entry: Entry, run: Fragment, file: int) -> None:
    size, source_size = SIZES[entry.dtype], SIZES[source.dtype]
    for start in range(run.start, run.stop, CHUNK):
        stop = min(run.stop, start + CHUNK)
        data = memoryview(bytearray((stop - start) * source_size))
        reader.read([ReadRequest(source, start, stop, 0)], data)
        out = memoryview(bytearray((stop - start) * size))
        if source.dtype == entry.dtype:
            out = data
        else:
            cast(data, source.dtype, out, entry.dtype)
        write_all(file, out, run.extent.offset + (start - run.start) * size)
