"""Lists the elements that were in missing or unreadable files, and where else they are.

elsewhere    in other files: a copy on another rank, the weight's master, or an older checkpoint
made-up      nowhere, but training could go on with other values: weights widened to masters
gone         nowhere, and nothing can take their place

Another rank's file stands in for a lost one (judging/damaged_source.py), so the names, shapes and
elements that it had are known. The values of the stand-in are not used.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from ..core.checkpoint.entries import Entry, Key
from ..core.checkpoint.manifest import Manifest
from ..core.checkpoint.mended import CODE, Mended
from ..core.checkpoint.weights import WEIGHTS, agreement, is_widened
from ..core.grouping import by_key
from ..core.passes.description import Report, line_of
from ..errors import Notice, ZckptError, counted, listed, note, problem
from ..formats.reading import Reading
from ..judging.damaged_source import Found, kept, what_is_there
from ..reading import read
from .alike import Alike

State = Literal["elsewhere", "made-up", "gone"]
MOST = 4  # names in a sentence
WORDS = {"param": "weights", "master": "masters"}
"""What a sentence calls the tensors of a slot; those of other slots by the slot's name."""


class Loss(Struct, frozen=True):
    """The elements of one tensor that were in lost files.

    `count` is how many of its elements were in these `files`, `state` what is left of them, and
    `why` the reason as the report words it.
    """

    entry: Entry
    files: tuple[str, ...]
    count: int
    state: State
    why: str
    other: Entry | None = None  # that has the same elements


class Losses(Struct, frozen=True):
    """What a checkpoint lost with its files.

    `faults` and `lines` are for the report. `faults` has a line for each lost file. `lines` are
    about the tensors in them: each has the keys of a notice, a `state`, and for each tensor the
    number of elements that it lost, and of all its elements. `lost` has these losses as records.
    `manifest` describes the files that are left; it is None if they cannot be read alone. If all
    lost files could be written again, `remade` are their entries in the list of mended bytes.
    """

    manifest: Manifest | None = None
    faults: Sequence[Report] = ()
    lines: Sequence[Report] = ()
    lost: Sequence[Loss] = ()
    remade: Sequence[Mended] = ()
    differing: Sequence[str] = ()
    """Tensors of which a lost file had a copy that the copies on other ranks do not agree on."""

    @property
    def can_be_made_up(self) -> bool:
        """Whether anything is lost, and all of it could be made up or is left in another tensor."""
        return bool(self.lost) and all(
            each.state == "made-up" or each.other is not None for each in self.lost
        )

    @property
    def slots(self) -> set[str]:
        """The slots of the tensors of which elements would have to be made up."""
        return {each.entry.slot for each in self.lost if each.state == "made-up"}

    @property
    def others(self) -> dict[Key, tuple[Entry, str]]:
        """For each lost tensor: the entry that has the same elements, and why it has them."""
        return {each.entry.key: (each.other, each.why) for each in self.lost if each.other}

    def made_up(self, remade: Sequence[Mended]) -> Losses:
        """Returns these losses with state "rebuilt" instead of "made-up", and with `remade`."""
        lines = [
            {**line, "state": "rebuilt"} if line["state"] == "made-up" else line
            for line in self.lines
        ]
        return replace(self, lines=lines, remade=remade)

    def named(self, error: ZckptError, lacking: Sequence[str]) -> ZckptError:
        """Returns the error with a hint about what is lost.

        If all could be made up, the hint says which `--rebuild` options the user would have to type
        (`lacking`), or in which tensors the ranks differ. Otherwise it names the tensors that are
        gone, or else those that would have to be made up.
        """
        if self.can_be_made_up and self.differing:
            names = listed(self.differing, MOST)
            return error.with_way(f"nothing says what this rank had of {names}: ranks differ in it")
        if self.can_be_made_up and lacking:
            typed = " ".join(f"--rebuild {each}" for each in lacking)
            return error.with_way(f"`{typed}` makes up what is lost, see --dry-run")
        for state, what in (("gone", "is lost for good"), ("made-up", "would have to be made up")):
            tensors = dict.fromkeys(
                line["subject"] for line in self.lines if line["state"] == state
            )
            if tensors:
                return error.with_way(f"a part of {listed([*tensors], MOST)} {what}, see --dry-run")
        return error


def whatever_is_there(path: str, reading: Reading) -> AbstractContextManager[Found]:
    """Opens what can be read of the checkpoint at `path`, some of whose files are lost."""

    def read_again(where: str, **words: object) -> Manifest:
        return read(where, replace(reading, **words))

    return what_is_there(path, {"tag": reading.tag}, read_again)


def losses_of(found: Found, older: Manifest | None, known: Mapping[str, Alike]) -> Losses:
    """Returns what a checkpoint lost with its files.

    `older` is an earlier checkpoint of the same run. Files in `known` can be copied from other
    ranks, so they are reported as restored, not as lost.
    """
    faults = _each_once(found)
    if found.manifest is None or not found.lost:
        return Losses(found.manifest, faults)
    lines = [_restored(path, copied, found) for path, copied in known.items()]
    if known.keys() == found.lost.keys():
        return Losses(
            found.manifest, faults, lines, remade=[copied.mended for copied in known.values()]
        )
    lost = [each for each in _losses(found, older) if not known.keys() >= {*each.files}]
    return Losses(found.manifest, faults, [*lines, *_lines(found, lost)], lost)


def _restored(path: str, copied: Alike, found: Found) -> Report:
    message = f"{copied.name}: {copied.witness} has the same bytes"
    return line_of(note(CODE, message, file=found.real(path)), state="restored", tensors=[])


def _each_once(found: Found) -> list[Report]:
    """Returns the faults of lost files as lines of the report, without duplicates.

    Of several faults with the same code and file, the first is kept, with the keys of a notice.
    """
    by_file = by_key(((line["code"], line["file"]), line) for line in found.faults if line["fault"])
    fields = Notice.__struct_fields__
    return [{key: first[key] for key in fields} for first, *_ in by_file.values()]


def _lines(found: Found, lost: Sequence[Loss]) -> Iterator[Report]:
    count = sum(len(manifest.entries) for manifest in found.known.each)
    message = (
        f"names and shapes of all {counted(count, 'tensor')}: the files that are left state them"
    )
    yield line_of(note("elements-missing", message), state="elsewhere", tensors=[])
    groups = by_key(((each.state, each.entry.slot, each.why, each.files), each) for each in lost)
    order = {state: place for place, state in enumerate(("elsewhere", "made-up", "gone"))}
    for (state, slot, why, files), own in sorted(
        groups.items(), key=lambda item: order[item[0][0]]
    ):
        names = [*dict.fromkeys(each.entry.parameter for each in own)]
        count, total = sum(each.count for each in own), sum(each.entry.numel for each in own)
        paths = [found.real(file) for file in files]
        what, where = WORDS.get(slot, slot), listed([*map(os.path.basename, paths)], MOST)
        message = (
            f"{what} of {listed(names, MOST)}: {count:,} of {counted(total, 'element')}, in "
            f"{where}: {why}"
        )
        tensors = [
            {"tensor": each.entry.name, "elements": each.count, "of": each.entry.numel}
            for each in own
        ]
        notice = problem("elements-missing", message, subject=own[0].entry.name, file=paths[0])
        yield line_of(notice, state=state, tensors=tensors)


def _losses(found: Found, older: Manifest | None) -> Iterator[Loss]:
    """Yields what each tensor lost, in the manifest's order; copies on other ranks do not count."""
    for manifest in found.known.each:
        is_left = _whole(manifest, found.lost, older)
        for entry in manifest.entries.values():
            rest, _ = kept(entry, found.lost)
            if rest is not entry:
                files = {fragment.extent.file for fragment in entry.fragments}
                lost = tuple(sorted(files & found.lost.keys()))
                state, why = _left(manifest, entry, is_left)
                other = _same(manifest, entry, found.lost, older) if state == "elsewhere" else None
                yield Loss(entry, lost, entry.numel - rest.numel, state, why, other)


Left = Callable[[Key], str | None]
"""A function that says where all elements of a tensor can be had, or None if some are lost."""


def _whole(manifest: Manifest, lost: dict[str, str], older: Manifest | None) -> Left:
    copies = by_key((copy.key, copy) for copy in manifest.replicas)

    def is_left(key: Key) -> str | None:
        entry = manifest.entries.get(key)
        if entry is None:
            return None
        if _is_whole(entry, lost):
            return "its own files"
        if entry.parameter not in manifest.buffers and any(
            _is_whole(copy, lost) for copy in copies.get(key, ())
        ):
            return "a copy on another rank has them"
        parameter = manifest.parameters.get(entry.parameter)
        is_frozen = parameter is not None and not parameter.trainable and entry.slot == "param"
        other = older.entries.get(key) if older is not None and is_frozen else None
        if other is None or (other.dtype, other.shape) != (entry.dtype, entry.shape):
            return None
        return "they are frozen, and the older checkpoint has them"

    return is_left


def _same(
    manifest: Manifest, entry: Entry, lost: dict[str, str], older: Manifest | None
) -> Entry | None:
    """The entry from which the elements of a lost tensor can be copied.

    It is a copy on another rank, or for a frozen parameter the tensor of an older checkpoint. None
    if there is neither, as for a weight whose values only its master still has.
    """
    copies = [copy for copy in manifest.replicas if copy.key == entry.key]
    replica = next((copy for copy in copies if _is_whole(copy, lost)), None)
    if replica is not None:
        return replica
    parameter = manifest.parameters.get(entry.parameter)
    is_frozen = parameter is not None and not parameter.trainable
    return older.entries.get(entry.key) if older is not None and is_frozen else None


def _is_whole(entry: Entry, lost: dict[str, str]) -> bool:
    return not any(fragment.extent.file in lost for fragment in entry.fragments)


def _left(manifest: Manifest, entry: Entry, is_left: Left) -> tuple[State, str]:
    """Whether values for the lost elements of `entry` are left, and the report's words for why.

    The first result is `elsewhere`, `made-up` or `gone`: see the module. `is_left`, given the key
    of a tensor, returns where its elements are still found, or None.
    """
    if (where := is_left(entry.key)) is not None:
        return "elsewhere", where
    weight, master = ((entry.parameter, slot) for slot in ("param", "master"))
    param, wide = manifest.entries.get(weight), manifest.entries.get(master)
    if entry.slot == "param":
        is_rounded = wide is not None and agreement(wide, entry) == "rounded"
        if is_rounded and not manifest.run.weights_differ and is_left(master):
            return "elsewhere", "their masters are left, and round to them"
        parameter = manifest.parameters.get(entry.parameter)
        if parameter is not None and not parameter.trainable:
            return "gone", "they are frozen: an older checkpoint of the run has the same (--older)"
        return "gone", "no other file has them"
    if entry.slot == "master":
        if param is not None and is_left(weight) and is_widened(param.dtype, entry.dtype):
            return "made-up", f"their {param.dtype} weights are left, but masters have more bits"
        return "gone", "no other file has them"
    if entry.slot not in WEIGHTS and entry.slot != "state" and (is_left(weight) or is_left(master)):
        return "made-up", "no other file has them, but their weights are left"
    return "gone", "no other file has them"
