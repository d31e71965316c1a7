"""Runs `mend`: builds its report, then writes the corrected copy.

The copy has the same files as the source, with the original bytes of damaged records. It is written
like the target of a conversion (copying/), whose source is read as if it had been corrected. So
each record's checksum is compared again. A file of the copy lists what was restored; in some
formats this file is the manifest.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from shlex import quote

from msgspec.structs import asdict, replace

from .. import formats
from ..copying import convert, staging, targets
from ..copying.journal import Identity
from ..core.checkpoint import mended
from ..core.checkpoint.manifest import Manifest, Run, Sibling
from ..core.checkpoint.mended import MENDED, Mended
from ..core.checkpoint.siblings import SiblingList, following, relative
from ..core.passes.description import VERSION, Report, line_of, said
from ..core.passes.layout import Layout, Shell
from ..core.passes.resources import Begin, Copying, Tell
from ..core.storage import sources
from ..core.storage.corrections import corrected
from ..core.storage.records import mark_of
from ..core.storage.sources import files_seen
from ..core.version import __version__
from ..errors import (
    CorruptCheckpoint,
    IncompleteCheckpoint,
    MissingData,
    Notice,
    WrongOption,
    ZckptError,
    again,
    counted,
    warning,
)
from ..formats.reading import Reading
from ..judging import about
from ..reading import read
from .alike import alike, has_links, remade
from .diagnosis import Diagnosis, corrections_of, diagnose
from .explaining import CHANCE, LOST, Place
from .losses import Losses, losses_of, whatever_is_there
from .rebuilding import Rebuilding, differing_copies
from .rebuilding import rebuild as rebuilt

UNUSED = "option-without-effect"


def mend(
    source: str,
    target: str | None,
    older: str | None,
    accept_chance: bool,
    rebuild: Sequence[str],
    reading: Reading,
    copying: Copying,
    *,
    dry_run: bool = False,
    resume: bool = False,
    begin: Begin | None = None,
    tell: Tell | None = None,
    before_rename: Callable[[], None] | None = None,
) -> Report:
    """Writes a mended copy of `source` to `target`; returns the report. See `zckpt.mend`."""
    started = time.monotonic()
    if target is not None:
        targets.refuse_inside(source, target)
    elif not dry_run:
        raise WrongOption(
            "option-needed",
            "mend writes a mended copy, but its path DST is missing",
            hint=f"name a new directory: zckpt mend {quote(source)} DST; or only see what "
            "can be restored, with --dry-run",
        )
    if target is not None and not (dry_run or resume):
        targets.refuse_existing(target)
    other = None if older is None else read(older, Reading(nameless=True, opens_items=True))
    rebuilding = Rebuilding.of(rebuild, other)
    diagnosis = diagnose(source, reading, other, copying, begin)
    with ExitStack() as stack:
        losses, seen, lacking, is_hidden = Losses(), source, list[str](), False
        real: Callable[[str], str] = str
        if diagnosis.error is not None:
            restored = corrections_of(each for each in diagnosis.places if each.by)
            with corrected(restored):
                found = stack.enter_context(whatever_is_there(source, reading, other))
            is_hidden = not reading.follow_links and has_links(found)
            copyable = {} if is_hidden else alike(found)
            losses = losses_of(found, other, copyable)
            if losses.lacks_older:
                rebuilding.need_older()
            lacking = rebuilding.lacking(losses.slots)
            is_all = bool(copyable) and copyable.keys() == found.lost.keys()
            made = None
            if losses.can_be_made_up and not lacking and not is_hidden:
                losses = replace(losses, differing=differing_copies(found, losses))
                made = rebuilt(found, losses, found.lost.keys() - copyable.keys(), rebuilding)
            if made is not None:
                losses = losses.made_up([*(copied.mended for copied in copyable.values()), *made])
                is_all = True
            if is_all:
                seen, real = remade(found, copyable), found.real
                reading = replace(reading, follow_links=True)  # it is a folder of links
                diagnosis = diagnose(seen, reading, other, copying, begin)
        base = os.path.abspath(seen if os.path.isdir(seen) else os.path.dirname(seen))
        report = _found(source, target, diagnosis, losses, accept_chance, base)
        manifest = diagnosis.manifest
        if manifest is not None and target is not None:
            report["next"] = about.resuming(manifest, *_paths_in_copy(manifest, base, target)) or ""
        if rebuild and not losses.lost:
            message = "--rebuild is not used: there are no lost values to make up"
            report["warnings"] += said([warning(UNUSED, message, subject="--rebuild")])
        report = _with_paths(report, real)
        if tell:
            tell([*report["places"], *report["lost"]])
        if dry_run:
            free = {} if target is None else {"free": targets.free_for(target, resume)}
            return report | {"dry_run": True, **free, "seconds": _since(started)}
        try:
            _refuse(source, diagnosis, losses, lacking, accept_chance)
        except ZckptError as error:
            of_source = error.again(file=error.file and real(error.file))
            if is_hidden:
                of_source = of_source.with_way(
                    "files beside the lost ones are links: add --follow-links to write the lost "
                    "files"
                )
            raise of_source from error
        assert manifest is not None
        assert target is not None
        written = [place for place in diagnosis.places if place.is_written(accept_chance)]
        stack.enter_context(corrected(corrections_of(written)))
        places = (place.mended(base) for place in diagnosis.places)
        mended_now = [*losses.remade, *filter(None, places)]
        layout, manifest = _laid_out(manifest, mended_now, seen, base, reading.follow_links)
        files = convert.files_of(layout)
        size = sum(files.values())
        report |= {"files": list(files), "bytes": size, "left_out": said(layout.omitted)}
        report["warnings"] += said(layout.warnings)
        run = _identity(manifest, reading, older, accept_chance, rebuild, files)
        if resume and targets.is_complete(target, run):
            return report | {"already_complete": True, "seconds": _since(started)}
        targets.need_space(target, size, resume)
        chunk = convert.chunk_size_of(manifest, copying)
        stage = staging.Staging(target, run, chunk, resume, before_rename)
        outcome = convert.convert(
            manifest, stage, layout, size, _empty, lambda *_: None, copying, begin
        )
        report["warnings"] += said(stage.warnings)
        assert outcome is not None  # nobody shares it
        more = {"resumed": stage.resumed} if resume else {}
        records = outcome.counts.report()
        report |= {"written": True, "records": records, "seconds": _since(started), **more}
        return _with_paths(report, real)


def _with_paths(report: Report, real: Callable[[str], str]) -> Report:
    """Replaces the temporary folder of links by the source's folder, in all texts of a report.

    `real` does so in one text; it is `str` if there is no such folder. If there is one, warnings
    about links are dropped.
    """
    if real is str:
        return report

    def named(value: object) -> object:
        if isinstance(value, str):
            return real(value)
        if isinstance(value, dict):
            return {key: named(item) for key, item in value.items()}
        return [*map(named, value)] if isinstance(value, list) else value

    warnings = [line for line in report["warnings"] if not _is_of_links(line)]
    return {key: named(value) for key, value in {**report, "warnings": warnings}.items()}


def _is_of_links(line: Report) -> bool:
    return bool(line["code"] == "links-out" or line["subject"] == "--follow-links")


def _found(
    source: str,
    target: str | None,
    diagnosis: Diagnosis,
    losses: Losses,
    accept_chance: bool,
    base: str,
) -> Report:
    """Makes the part of the report that is known before the first byte is written."""
    manifest, judged, error = diagnosis.manifest, diagnosis.judged, diagnosis.error
    problems = said((*(error.notices if error else ()), *(judged.whole if judged else ())))
    problems = [*losses.faults] if error and losses.faults else problems
    manifest = manifest or losses.manifest
    warnings = [*manifest.notices.warnings] if manifest else []
    warnings += judged.remarks if judged else []
    return {
        "zckpt": VERSION,
        "command": "mend",
        "source": {**(manifest.source if manifest else {}), "path": source},
        "format": manifest.format if manifest else None,
        "target": target,
        "step": manifest.step if manifest else None,
        "places": [_line(place, base, accept_chance) for place in diagnosis.places],
        "lost": [*losses.lines],
        "problems": problems,
        "warnings": said(warnings),
        "dry_run": False,
        "written": False,
        "files": [],
        "bytes": 0,
        "left_out": [],
        "next": "",
    }


def _line(place: Place, base: str, accept_chance: bool) -> Report:
    """A report line about one damaged byte range: its notice, its correction, and its tensors."""
    restored, extent = place.mended(base), place.extent
    fields = mended.to_json([restored])[0] if restored else {}
    for key in ("file", "value"):
        fields.pop(key, None)
    state = "lost" if restored is None else "restored"
    if restored is not None and restored.by == "chance":
        state = "accepted" if accept_chance else "needs-consent"
    names = list(dict.fromkeys(entry.name for entry, _ in place.contents))
    record = {"offset": extent.offset, "length": extent.length}
    return line_of(
        place.notice(base),
        **{"chance": place.chance, **fields, "state": state, "tensors": names, "record": record},
    )


def _refuse(
    source: str,
    diagnosis: Diagnosis,
    losses: Losses,
    lacking: Sequence[str],
    accept_chance: bool,
) -> None:
    """Raises an error if the checkpoint cannot be mended, or if nothing is damaged.

    CorruptCheckpoint       bytes are lost or need `accept_chance`, or lost files would be made
                            from damaged ones
    the reader's error      the checkpoint cannot be read, for example if files are lost
    IncompleteCheckpoint    other problems prevent loading
    MissingData             nothing is damaged
    """
    places, judged = diagnosis.places, diagnosis.judged
    needed = [place for place in places if diagnosis.is_needed(place)]
    lost = [place for place in needed if place.by is None]
    if lost:
        raise _listed("not-mendable", f"{source} cannot be mended", lost, LOST)
    if places and (losses.others or any(each.by == "made-up" for each in losses.remade)):
        raise CorruptCheckpoint(  # weights may be damaged that masters were made of
            "not-mendable",
            f"{source} cannot be mended: lost files are written again only if all other files are "
            f"undamaged, and {os.path.basename(places[0].extent.file)} is damaged",
            hint=LOST,
            file=places[0].extent.file,
        )
    if diagnosis.error is not None:
        raise losses.named(diagnosis.error, lacking)
    if judged is not None and judged.whole:
        raise again(IncompleteCheckpoint, {**asdict(judged.whole[0]), "paths": ()})
    written = any(place.is_written(accept_chance) for place in places)
    if not (written or needed or losses.remade):
        raise MissingData(
            "nothing-to-mend",
            f"nothing is damaged in {source}, so there is nothing to mend",
            hint="copy the checkpoint with `cp -r`, or convert it",
            file=source,
        )
    doubtful = [place for place in needed if not place.is_written(accept_chance)]
    if doubtful:
        raise _listed("consent-needed", f"{source} was not mended", doubtful, CHANCE)


def _listed(code: str, what: str, places: Sequence[Place], hint: str) -> ZckptError:
    """Makes an error that names the first of these damaged places, and counts the others."""
    first = places[0]
    names = [*dict.fromkeys(entry.name for entry, _ in first.contents)]
    where = f"{counted(first.extent.length, 'byte')} at {first.extent.offset} of "
    where += os.path.basename(first.extent.file)
    whose = f" ({names[0]})" if len(names) == 1 else ""
    more = f"; and {counted(len(places) - 1, 'other place')}" if places[1:] else ""
    return CorruptCheckpoint(
        code,
        f"{what}: {where}{whose}: {first.why}{more}",
        hint=hint,
        file=first.extent.file,
        subject=names[0] if len(names) == 1 else None,
    )


def _laid_out(
    manifest: Manifest, records: Sequence[Mended], source: str, base: str, follow_links: bool
) -> tuple[Layout, Manifest]:
    """Lays out the files of the copy; also returns the manifest with the files' fingerprints.

    The copy lists what was restored: what the source already lists, and the `records` restored now.
    """
    listed = (*manifest.notices.mended, *records)
    with sources.watching() as watch, following(follow_links):
        found = _files(manifest, source, base)
        files = _as_read(manifest, found.files)
        fingerprints = watch.of([item.path for item in files])
    shells = [*_marks(manifest, base, listed)]
    names = {shell.name for shell in shells}
    siblings = [(item.name, item) for item in files if item.name not in names]
    layout = Layout(
        lambda: iter(shells), siblings, found.omitted, _pointing_elsewhere(manifest, base)
    )
    every = {**manifest.files.fingerprints, **fingerprints}
    return layout, manifest.replace(fingerprints=every)


def _files(manifest: Manifest, source: str, base: str) -> SiblingList:
    """Lists the files to copy: those of the checkpoint, and those beside it.

    Files of other checkpoints of the run are left out. The engine's own files are read even if they
    are symbolic links.
    """
    engine_files = {os.path.abspath(path): path for path in manifest.files.paths}
    found = SiblingList(base)
    for path in engine_files:
        found.files.append(Sibling(relative(path, base), path, sources.size(path)))

    def is_own(_: str, entry: os.DirEntry[str]) -> bool:
        return entry.path in engine_files

    root = os.path.abspath(manifest.root)
    if os.path.isdir(source):
        if os.path.isdir(root):
            found.add_below(root, is_own, root=base)
        folder = root
        while folder != base and folder.startswith(base + os.sep):
            folder = os.path.dirname(folder)
            with os.scandir(folder) as entries:
                paths = [entry.path for entry in entries if not entry.is_dir()]
            for path in sorted({*paths} - engine_files.keys()):
                found.add(relative(path, base), path)
    there = {item.path for item in found.files}
    files = manifest.files
    for item in (*files.siblings, *files.omitted_files, *files.around):
        if (path := os.path.abspath(item.path)) not in there:
            found.add(relative(path, base), path)
    return found


def _as_read(manifest: Manifest, siblings: Sequence[Sibling]) -> list[Sibling]:
    """Replaces absolute paths of files by the paths under which the reader opened them.

    The reader's paths may be relative, as the user typed them. The paths of files that the reader
    did not open stay absolute.
    """
    read = {record.extent.file for record in manifest.files.records}
    paths = {os.path.abspath(path): path for path in (*read, *manifest.files.paths)}
    return [replace(item, path=paths.get(item.path, item.path)) for item in siblings]


def _marks(manifest: Manifest, base: str, listed: Sequence[Mended]) -> Sequence[Shell]:
    """Makes the copy's file that lists what was restored, zckpt-mended.json.

    A format may list it in another file (`with_mended`): a universal checkpoint in its manifest.
    """
    root = os.path.abspath(manifest.root)
    functions = formats.named(manifest.format).functions
    if functions.with_mended is not None:
        name, text = functions.with_mended(root, listed)
    else:
        root = root if os.path.isdir(root) else os.path.dirname(root)
        name, text = MENDED, mended.text_of(listed)
    return [Shell.of(os.path.normpath(os.path.join(relative(root, base), name)), text)]


def _pointing_elsewhere(manifest: Manifest, base: str) -> list[Notice]:
    """Warns if a file such as `latest` names another checkpoint than the one that is copied."""
    format, tag = formats.named(manifest.format), manifest.run.origin.tag
    named = format.pointer(base) if format.pointer and os.path.isdir(base) else None
    if named is None or tag is None or named == tag or base == os.path.abspath(manifest.root):
        return []
    message = (
        f"the copy has only {tag}, but the run's pointer file names {named}: load the copy by its "
        f"tag, {tag}"
    )
    return [warning("pointer-dangling", message, file=base)]


def _paths_in_copy(manifest: Manifest, base: str, target: str) -> tuple[str, str]:
    inside = relative(os.path.abspath(manifest.root), base)
    return os.path.normpath(os.path.join(target, inside)), target


def _empty(path: str) -> Manifest:
    return Manifest(root=path, format="", run=Run(), entries={}, parameters={})


def _identity(
    manifest: Manifest,
    reading: Reading,
    older: str | None,
    accept_chance: bool,
    rebuild: Sequence[str],
    files: dict[str, int],
) -> Identity:
    """Identifies this copy: `--resume` continues only an unfinished copy with the same identity."""
    mark = f"{mark_of(manifest.files.records):08x}"
    source = {"records": mark, **files_seen(manifest.root, manifest.files.fingerprints)}
    flags = {
        "--from": reading.format,
        "--tag": reading.tag,
        "--older": older,
        "--accept-chance": accept_chance or None,
        "--rebuild": sorted(rebuild) or None,
    }
    options = {flag: value for flag, value in flags.items() if value is not None}
    return Identity(__version__, source, options, files)


def _since(started: float) -> float:
    return round(time.monotonic() - started, 3)
