"""Tells what `mend` would restore of a checkpoint that cannot be opened or has lost files.

`verify`, `report` and errors recommend the command `mend` only if it would restore something. This
module calls the functions that `mend` itself calls. It reads all bytes only if a flipped bit kept a
file from being opened: in this case `verify` has read no tensor, and other tensors may be damaged.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from shlex import quote

from msgspec import Struct

from ..core.checkpoint.manifest import Manifest
from ..core.grouping import by_key
from ..core.passes.resources import DEFAULT_COPYING
from ..errors import MALFORMED, MissingData, ZckptError, counted, joined, listed
from ..files.dcptable import METADATA
from ..formats.reading import Reading
from ..formats.universal.files import MANIFEST
from ..judging.damaged_source import Found
from ..reading import read
from .alike import alike, has_links
from .diagnosis import Diagnosis, diagnose, structure_of, what_opens
from .explaining import Place
from .losses import Losses, losses_of, whatever_is_there
from .rebuilding import MODEL, OLDER, ZERO, Rebuilding, differing_copies

GIVES = {
    "masters": "masters made from the 16-bit weights",
    ZERO: "zeros as moments",
    OLDER: "the moments of {}",
    MODEL: "weights made from the masters, and the rest of the model file from {}",
}
"""Phrases for the values that `--rebuild` makes up; `{}` stands for the source of the values."""
ELSEWHERE = "with values that other files still have"
AN_OLDER_ONE, ANOTHER_RANK = "an older checkpoint", "another rank"
MOST = 3  # names in a sentence
WHOLE = (MANIFEST, METADATA, ".safetensors")  # files with one checksum for all bytes
QUICK = 1 << 20  # bytes of such a file that is read only for the hint of an error
TRIES = QUICK << 4  # bytes that are then parsed, all tries of flipped bits together


class Prospect(Struct, frozen=True):
    """What `mend` would restore, in words, and the options that it needs for this.

    `makes_up` is True if some restored values would differ from the lost ones.
    """

    what: str
    options: tuple[str, ...] = ()
    makes_up: bool = False

    def command(self, path: str, tag: str | None) -> str:
        """The `zckpt mend` command for the checkpoint at `path`; its target is the word DST."""
        words = [f"--tag {quote(tag)}"] if tag else []
        return " ".join(["zckpt mend", quote(path), "DST", *words, *self.options])


def prospect(path: str, reading: Reading, older: str | None = None) -> Prospect | None:
    """Finds out what `mend` would restore of the checkpoint at `path`; None if nothing.

    Also None if all files can be opened. `older` is an earlier checkpoint of the same run that
    could be given as `--older`.
    """
    with ExitStack() as stack:
        opened = what_opens(path, reading, stack)
        if _is_lost(opened):
            return None
        if opened.error is not None:
            given = _of_losses(path, reading, opened, None)
            if older is not None and (given is None or given.makes_up):
                given = _of_losses(path, reading, opened, older) or given
            return given
    if not opened.places:
        return None
    diagnosis = diagnose(path, reading, None, DEFAULT_COPYING, None)
    is_whole = diagnosis.judged is not None and not diagnosis.judged.whole
    return _of_places(diagnosis) if is_whole and not _is_lost(diagnosis) else None


def _is_lost(diagnosis: Diagnosis) -> bool:
    return any(place.by is None and diagnosis.is_needed(place) for place in diagnosis.places)


def restorable(path: str) -> str | None:
    """Says in a phrase what `mend` would restore in the headers of a file; None if nothing.

    Also None for a large file with one checksum for all of its bytes, since reading it takes long:
    zckpt calls this function for each error that names a file.
    """
    places = list[Place]()
    with suppress(ZckptError, OSError, *MALFORMED):
        if os.path.getsize(path) <= QUICK or not path.endswith(WHOLE):
            places = structure_of(path, TRIES)
    if not places or any(place.by in (None, "chance") for place in places):
        return None
    return joined([*_phrases(places)])


def _of_places(opened: Diagnosis) -> Prospect:
    options = ("--accept-chance",) if any(each.by == "chance" for each in opened.places) else ()
    return Prospect(joined([*_phrases(opened.places)]), options)


def _phrases(places: Sequence[Place]) -> Iterator[str]:
    """Yields a phrase for each file that says what is restored in it."""
    mended = (place.mended(os.path.dirname(place.extent.file)) for place in places)
    by_file = by_key((restored.file, restored) for restored in mended if restored is not None)
    for file, corrections in by_file.items():
        if len(corrections) == 1 and corrections[0].bit is not None:
            yield f"restore bit {corrections[0].bit} of byte {corrections[0].offset} of {file}"
        else:
            yield f"restore {counted(len(corrections), 'place')} of {file}"


def _of_losses(
    path: str, reading: Reading, opened: Diagnosis, older: str | None
) -> Prospect | None:
    """Says what `mend` would restore of lost files; None if one of them cannot be written again."""
    other = None if older is None else read(older, Reading(nameless=True, opens_items=True))
    with whatever_is_there(path, reading, other) as found:
        copyable = alike(found)
        losses = losses_of(found, other, copyable)
        if losses.lacks_older and not opened.places:
            what, options = _made_up([MODEL], AN_OLDER_ONE), ("--older PATH", f"--rebuild {MODEL}")
            return Prospect(what, options, makes_up=True)
        if losses.lacks_layer and not opened.places:
            names = [os.path.basename(line["file"]) for line in losses.faults]
            return Prospect(f"write {listed(names, MOST)} again, {ELSEWHERE}", ("--older PATH",))
        if not found.lost or found.manifest is None:
            return None
        is_hidden = has_links(found) and not reading.follow_links
        links = ("--follow-links",) if is_hidden else ()
        names = [os.path.basename(found.real(lost)) for lost in found.lost]
        phrases = joined([*_phrases(opened.places), f"write {listed(names, MOST)} again"])
        if copyable.keys() == found.lost.keys():
            return Prospect(f"{phrases}, as all other ranks have the same bytes", links)
        is_left = losses.can_be_made_up and not differing_copies(found, losses)
        if opened.places or not is_left:
            return None
        lacking = Rebuilding().lacking(losses.slots)
        of_older = () if older is None else (f"--older {quote(older)}",)
        if not lacking:
            return Prospect(f"{phrases}, {ELSEWHERE}", (*of_older, *links))
        if other is not None and ZERO in lacking and _has_all(other, losses, found):
            lacking = [OLDER if each == ZERO else each for each in lacking]
        elif not found.borrowed:
            of_older = ()
        flags = tuple(f"--rebuild {each}" for each in lacking)
        where = (AN_OLDER_ONE if found.borrowed else ANOTHER_RANK) if MODEL in lacking else older
        return Prospect(_made_up(lacking, where), (*of_older, *flags, *links), makes_up=True)


def _made_up(options: Sequence[str], source: str | None) -> str:
    given = joined([GIVES[each].format(source) for each in options])
    return f"make up what is lost, with other values in its place ({given})"


def _has_all(older: Manifest, losses: Losses, found: Found) -> bool:
    """Whether the older checkpoint has all tensors with elements that must be made up."""
    rebuilding = Rebuilding(True, OLDER, older)
    try:
        for each in losses.lost:
            if each.state == "made-up":
                rebuilding.source(each.entry, found.known)
    except MissingData:
        return False
    return True
