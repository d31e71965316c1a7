"""Lists the elements that were in missing or unreadable files, and where else their values are.

elsewhere    other files have them: another rank's copy, the master, or an older checkpoint
made-up      no file has them, but training could continue with other values, such as masters
             widened from the weights
gone         no file has them, and no other values can replace them

In place of a lost file, another rank's file is read (judging/damaged_source.py). It shows the lost
file's names, shapes and elements; its values are not used. If the run's only model file is lost, an
older checkpoint's is read instead. Then values that are no tensors, such as counters, are lost too;
the format tells some of them (`Functions.continued`).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from .. import formats
from ..core.checkpoint.entries import Entry, Key
from ..core.checkpoint.manifest import Manifest
from ..core.checkpoint.mended import CODE, MadeValue, Mended
from ..core.checkpoint.weights import WEIGHTS, agreement, is_widened
from ..core.comparison import masters
from ..core.grouping import by_key
from ..core.passes.description import Report, line_of, said
from ..core.storage.inventory import parse_name
from ..errors import MissingData, Notice, ZckptError, counted, listed, note, problem
from ..formats.reading import Reading
from ..judging.damaged_source import Found, kept, what_is_there
from ..judging.inventory import ALL_ROLES, files_below
from ..reading import read
from .alike import Alike
from .rounding import copies_of_stages, is_whole, masters_round, may_drift

State = Literal["elsewhere", "made-up", "gone"]
MOST = 4  # names in a sentence
DIFFERING = "replicas on other ranks differ, or fewer than two ranks have one"
OF_BUFFER = "another rank has a copy, but its values may differ"
OF_COPY = "a copy on another rank has these elements"
OF_STAGE = "another stage has a copy, but its values may differ"
OF_UNLIKE = (
    "other files have the masters, but weights that still exist differ from the rounded masters, "
    "so the lost weights may differ too"
)
OF_ORDER = (
    "other files have the masters, which round to these weights if the parameters have the same "
    "order as in the older file"
)
WORDS = {"param": "weights", "master": "masters"}
"""The words of messages for slots; any other slot is called by its name, such as `exp_avg`."""


class Loss(Struct, frozen=True):
    """The elements of one tensor that were in lost files.

    files    the lost files
    count    the number of these elements
    state    "elsewhere", "made-up" or "gone"; the module explains these
    why      the reason, for the report
    other    a tensor that can replace the elements, or None
    """

    entry: Entry
    files: tuple[str, ...]
    count: int
    state: State
    why: str
    other: Entry | None = None  # if the state is "made-up", its values may differ


class Losses(Struct, frozen=True):
    """What a checkpoint has lost with its missing or unreadable files.

    faults      report lines that say which files are lost
    lines       report lines about their contents, each with a `state`: that of a `Loss`,
                "restored" or "rebuilt"
    lost        one `Loss` for each tensor with lost elements
    manifest    what could be read, with other files in place of lost ones; None if nothing
    remade      the restored contents, for zckpt-mended.json; empty unless all can be restored
    """

    manifest: Manifest | None = None
    faults: Sequence[Report] = ()
    lines: Sequence[Report] = ()
    lost: Sequence[Loss] = ()
    remade: Sequence[Mended] = ()
    differing: Sequence[str] = ()
    """Lost tensors whose values are unknown: replicas on other ranks differ, or are too few."""
    values: Sequence[MadeValue] = ()
    """What a lost model file had besides tensors, as far as an older one and other files tell."""
    borrowed: Sequence[str] = ()
    """Paths (in the manifest) of lost files that are replaced by files of an older checkpoint.

    Empty if no model file is among them.
    """
    copies: Mapping[Key, tuple[Entry, str]] = {}
    """Maps the key of a tensor with a lost replica to (a tensor of equal values, the reason)."""
    lacks_older: bool = False
    """Whether the only model file is lost, and the user gave no older checkpoint to replace it."""
    lacks_layer: bool = False
    """Whether files of pipeline layers are lost, and the user gave no older checkpoint for them."""
    unfit: ZckptError | None = None
    """Why the older checkpoint does not show what was in the lost model file."""

    @property
    def can_be_made_up(self) -> bool:
        """Whether values are lost, and all can be restored from other tensors or made up."""
        if self.borrowed and not self.values:  # the optimizer's files are not whole
            return False
        return bool(self.lost) and all(
            each.state == "made-up" or each.other is not None for each in self.lost
        )

    @property
    def slots(self) -> set[str]:
        """The slots (weights, masters, moments) of the tensors with elements that must be made up.

        "param" is among them if a model file is lost, even if all of its weights are known. Such a
        file has other values too, such as counters, and these must be made up.
        """
        slots = {each.entry.slot for each in self.lost if each.state == "made-up"}
        return slots | ({"param"} if self.borrowed or self.values else set())

    @property
    def others(self) -> dict[Key, tuple[Entry, str]]:
        """Maps the key of each lost tensor to (a tensor with the same elements, the reason)."""
        lost = {each.entry.key: (each.other, each.why) for each in self.lost if each.other}
        return {**self.copies, **lost}

    @property
    def made_up_keys(self) -> set[Key]:
        """The keys of the tensors with elements that must be made up."""
        return {each.entry.key for each in self.lost if each.state == "made-up"}

    def made_up(self, remade: Sequence[Mended]) -> Losses:
        """Returns a copy for a checkpoint whose lost files were all written again.

        `remade` describes their contents. Report lines with the state "made-up" get "rebuilt".
        """
        states = {"made-up": "rebuilt"}
        lines = [{**line, "state": states.get(s := line["state"], s)} for line in self.lines]
        return replace(self, lines=lines, remade=remade)

    def named(self, error: ZckptError, lacking: Sequence[str]) -> ZckptError:
        """Adds a hint to `error`: what is lost, or which option would restore it.

        `lacking` are values that `--rebuild` still needs. If the given older checkpoint does not
        fit, returns the error that says so instead.
        """
        if self.unfit is not None:
            return self.unfit
        if self.lacks_older:
            return error.with_way(NEEDS_OLDER)
        if self.lacks_layer:
            return error.with_way(NEEDS_LAYER)
        if self.can_be_made_up and self.differing:
            names = listed(self.differing, MOST)
            return error.with_way(
                f"the values of {names} in the lost file are unknown: {DIFFERING}"
            )
        if self.can_be_made_up and lacking:
            typed = " ".join(f"--rebuild {each}" for each in lacking)
            return error.with_way(
                f"`{typed}` writes made-up values in place of the lost ones; --dry-run lists the "
                "losses"
            )
        for state, what in (("gone", "is lost for good"), ("made-up", "would have to be made up")):
            tensors = dict.fromkeys(
                line["subject"] for line in self.lines if line["state"] == state
            )
            if tensors:
                return error.with_way(
                    f"a part of {listed([*tensors], MOST)} {what}; --dry-run lists all losses"
                )
        return error


NEEDS_OLDER = (
    "an older checkpoint of the run (--older PATH) shows the names and shapes of this model; "
    "with it, `--rebuild model` rounds the masters to weights, and makes up all else (--dry-run "
    "lists what)"
)
NEEDS_LAYER = (
    "an older checkpoint of the run (--older PATH) shows the names and shapes of this layer; with "
    "it, `mend` rounds the masters to weights"
)


def whatever_is_there(
    path: str, reading: Reading, older: Manifest | None = None
) -> AbstractContextManager[Found]:
    """Reads what still exists of a checkpoint that has lost files.

    If no other file can replace a lost file of the model or of a pipeline's layer, the same file of
    the checkpoint `older` is read, for formats that allow it (`continues`).
    """
    paths = older.files.paths if older is not None and continues(older.format) else ()
    models = {os.path.basename(path): path for path in paths}

    def of_older(lost: str) -> str | None:
        return models.get(os.path.basename(lost)) if is_model(lost) or is_layer(lost) else None

    def read_again(where: str, **words: object) -> Manifest:
        return read(where, replace(reading, **words))

    return what_is_there(path, {"tag": reading.tag}, read_again, of_older)


def continues(format: str) -> bool:
    """Whether the lost model file of this format can be computed from an older checkpoint's."""
    return formats.named(format).functions.continued is not None


def is_model(path: str) -> bool:
    """Whether a file has the model of all data-parallel ranks, by its name."""
    file = parse_name(ALL_ROLES, path)
    return file is not None and file.role.name == "model" and "dp" not in file.axes


def is_of_optimizer(path: str) -> bool:
    """Whether a file has a rank's part of the optimizer, by its name."""
    file = parse_name(ALL_ROLES, path)
    return file is not None and file.role.name == "optimizer"


def is_layer(path: str) -> bool:
    """Whether a file has the weights of one layer of a pipeline, by its name."""
    file = parse_name(ALL_ROLES, path)
    return file is not None and file.role.name == "layer"


def lacks_model(found: Found) -> bool:
    """Whether nothing could be read because the only model file is lost.

    A file of the optimizer must still exist; otherwise the result is False.
    """
    if found.manifest is not None:
        return False
    with suppress(ZckptError, OSError):
        if not continues(formats.recognize(found.path, tag=found.tag).name):
            return False
    lost = {line["file"] for line in found.faults if line["fault"] and line["file"] is not None}
    left = [path for path in files_below(found.path) if path not in lost]
    is_only_one = any(map(is_model, lost)) and not any(map(is_model, left))
    return is_only_one and any(map(is_of_optimizer, left))


def losses_of(found: Found, older: Manifest | None, copyable: Mapping[str, Alike]) -> Losses:
    """Finds out what a checkpoint has lost with its files.

    `older` is an earlier checkpoint of the same run. Files in `copyable` can be copied from other
    ranks, so they are reported as restored, not as lost.
    """
    faults = _each_once(found)
    if found.manifest is None and lacks_model(found):
        unfit = None if older is None else _unfit(found, older)
        faults += said(unfit.notices if unfit is not None else ())
        return Losses(None, faults, lacks_older=older is None, unfit=unfit)
    if found.manifest is None or not found.lost:
        files = [line["file"] for line in faults]
        is_layers = bool(files) and all(file is not None and is_layer(file) for file in files)
        if is_layers and older is not None and (found.borrowed or not found.lost):
            return Losses(None, faults, unfit=_unfit_layer(older))
        return Losses(found.manifest, faults, lacks_layer=is_layers and not found.lost)
    lines = [_restored(path, copied, found) for path, copied in copyable.items()]
    if copyable.keys() == found.lost.keys():
        return Losses(
            found.manifest, faults, lines, remade=[copied.mended for copied in copyable.values()]
        )
    lost = [each for each in _losses(found, older) if not copyable.keys() >= {*each.files}]
    losses = Losses(found.manifest, faults, [*lines, *_lines(found, lost)], lost)
    losses = replace(losses, copies=dict(_copies(found, older)))
    if older is not None and any(map(is_model, found.borrowed)):
        return _continued(losses, found, older)
    values = [*_of_other_ranks(found, found.lost.keys() - copyable.keys() - found.borrowed.keys())]
    lines = [*losses.lines, *(_line_of(value, file) for file, value in values)]
    return replace(losses, lines=lines, values=[value for _, value in values])


def _copies(found: Found, older: Manifest | None) -> Iterator[tuple[Key, tuple[Entry, str]]]:
    """Yields tensors whose lost replicas cannot have differed: the key, (an equal tensor, why)."""
    for manifest in found.known.rank_manifests:
        source_of = _sources(manifest, found.lost, older)
        lost = [copy for copy in manifest.replicas if not is_whole(copy, found.lost)]
        made_up = {copy.key for copy in lost if may_drift(copy)}
        for key in dict.fromkeys(copy.key for copy in lost):
            # a buffer's replicas may differ, as running means do
            is_known = key[0] not in manifest.buffers and key not in made_up
            if is_known and (source := source_of(key)) is not None:
                of_own = source[0] is manifest.entries[key]
                yield key, (source[0], OF_COPY if of_own else source[1])


def _of_other_ranks(found: Found, lost: Iterable[str]) -> Iterator[tuple[str, MadeValue]]:
    """Yields each lost model file's path, and a description of its values other than tensors.

    They come from another tensor-parallel rank's file; the lost random states may have differed.
    """
    for path in filter(is_model, lost):
        how = f"as in {os.path.basename(os.path.realpath(path))}, the file of another rank"
        yield found.real(path), MadeValue("all values other than tensors", None, how)


NO_FILE = "has no model file of this name; runs of ZeRO stage 1 and 2 have one"
OTHER_WEIGHTS = (
    "has other weights than its masters, so the masters that are left do not show the lost weights"
)
UNREAD = "not-compared"
"""The code of the warning that the file read in place of a lost one does not fit the others."""


def _unfit(found: Found, older: Manifest) -> ZckptError | None:
    """The error that the model file of `older` cannot replace the lost one; None if it can."""
    if not found.borrowed:
        return _error(older, NO_FILE)
    if found.manifest is None or any(line["code"] == UNREAD for line in found.faults):
        return _error(older, "is of another model, or of another number of ranks")
    return None


ANOTHER_OLDER = "give another older checkpoint of the same run, one that no tool has converted"


def _error(older: Manifest, why: str) -> ZckptError:
    return MissingData(
        "state-missing", f"the older checkpoint {older.where} {why}", hint=ANOTHER_OLDER
    )


def _unfit_layer(older: Manifest) -> ZckptError:
    return MissingData(
        "state-missing",
        f"the older checkpoint {older.where} has no file of the lost layer, or the file of another "
        "model",
        hint=ANOTHER_OLDER,
        file=older.where,
    )


def _continued(losses: Losses, found: Found, older: Manifest) -> Losses:
    """Adds to `losses` the lost values other than tensors, such as counters in the model file.

    They are computed from the model file of the checkpoint `older`.
    """
    function = formats.named(found.known.format).functions.continued
    losses = replace(losses, borrowed=[*found.borrowed])
    if (unfit := _unfit(found, older)) is not None:
        return _without(losses, unfit)
    if function is None:  # the two have other formats
        return _without(losses, _error(older, NO_FILE))
    if found.lost.keys() != found.borrowed.keys():
        return losses
    try:
        manifest, values, is_ordered = function(found.known, older)
    except ZckptError as error:
        return _without(losses, error)
    if masters.unlike(older, masters.BEGINNINGS):  # such as an EMA's
        return _without(losses, _error(older, OTHER_WEIGHTS))
    file = found.real(losses.borrowed[0])
    if not is_ordered:
        lost = [_of_order(each) for each in losses.lost]
        restored = [line for line in losses.lines if line["state"] == "restored"]
        losses = replace(losses, lost=lost, lines=[*restored, *_lines(found, lost)])
    lines = [_line_of(value, file) for value in values]
    return replace(losses, manifest=manifest, values=values, lines=[*losses.lines, *lines])


def _of_order(loss: Loss) -> Loss:
    """Marks a weight as "made-up" if it is restored from its master.

    For runs in which only the older file's parameter order tells which master is whose.
    """
    if loss.other is None or loss.other.slot != "master":
        return loss
    return replace(loss, state="made-up", why=OF_ORDER)


def _without(losses: Losses, unfit: ZckptError) -> Losses:
    return Losses(None, [*losses.faults, *said(unfit.notices)], unfit=unfit)


def _line_of(value: MadeValue, file: str) -> Report:
    now = "" if value.value is None else f" {value.value}"
    message = f"{value.name}{now}, in {os.path.basename(file)}: {value.how}"
    notice = problem("elements-missing", message, subject=value.name, file=file)
    return line_of(notice, state="made-up", tensors=[])


def _restored(path: str, copied: Alike, found: Found) -> Report:
    message = f"{copied.name}: {copied.witness} has the same bytes"
    return line_of(note(CODE, message, file=found.real(path)), state="restored", tensors=[])


def _each_once(found: Found) -> list[Report]:
    """Report lines for the faults of lost files; only the first for each code and file."""
    by_file = by_key(((line["code"], line["file"]), line) for line in found.faults if line["fault"])
    fields = Notice.__struct_fields__
    return [{key: first[key] for key in fields} for first, *_ in by_file.values()]


def _lines(found: Found, lost: Sequence[Loss]) -> Iterator[Report]:
    count = sum(len(manifest.entries) for manifest in found.known.rank_manifests)
    where = "the older checkpoint" if found.borrowed else "the files that are left"
    states = "states" if found.borrowed else "state"
    message = f"names and shapes of all {counted(count, 'tensor')}: {where} {states} them"
    yield line_of(note("elements-missing", message), state="elsewhere", tensors=[])
    groups = by_key(((each.state, each.entry.slot, each.why, each.files), each) for each in lost)
    order = {state: place for place, state in enumerate(("elsewhere", "made-up", "gone"))}
    for (state, slot, why, files), losses in sorted(
        groups.items(), key=lambda item: order[item[0][0]]
    ):
        names = [*dict.fromkeys(loss.entry.parameter for loss in losses)]
        count, total = sum(loss.count for loss in losses), sum(loss.entry.numel for loss in losses)
        paths = [found.real(file) for file in files]
        what, where = WORDS.get(slot, slot), listed([*map(os.path.basename, paths)], MOST)
        message = (
            f"{what} of {listed(names, MOST)}: {count:,} of {counted(total, 'element')}, in "
            f"{where}: {why}"
        )
        tensors = [
            {"tensor": loss.entry.name, "elements": loss.count, "of": loss.entry.numel}
            for loss in losses
        ]
        notice = problem("elements-missing", message, subject=losses[0].entry.name, file=paths[0])
        yield line_of(notice, state=state, tensors=tensors)


def _losses(found: Found, older: Manifest | None) -> Iterator[Loss]:
    """Yields what each tensor has lost, in the manifest's order; lost replicas do not count."""
    is_of_layer = any(map(is_layer, found.borrowed))
    for manifest in found.known.rank_manifests:
        source_of = _sources(manifest, found.lost, older)
        rounds = masters_round(manifest, found.lost, older if is_of_layer else None)
        of_stages = copies_of_stages(manifest, found.lost)
        for entry in manifest.entries.values():
            rest, _ = kept(entry, found.lost)
            if rest is not entry:
                files = {fragment.extent.file for fragment in entry.fragments} & found.lost.keys()
                left = _left(manifest, entry, source_of, rounds)
                if left[2] is None and (other := of_stages.get(entry.key)):
                    left = "made-up", OF_STAGE, other
                loss = Loss(entry, (*sorted(files),), entry.numel - rest.numel, *left)
                if loss.state == "gone" and found.borrowed.keys() >= files:
                    loss = _of_older(loss, manifest, older)
                elif loss.state == "gone" and entry.parameter in manifest.buffers:
                    loss = _of_other_rank(loss, manifest, found)
                yield loss
        yield from _of_buffers(manifest, found)
        yield from _of_drifting(manifest, found, source_of)


def _of_buffers(manifest: Manifest, found: Found) -> Iterator[Loss]:
    """Yields a `Loss` for each lost replica of a buffer of which only one complete copy is left.

    The replica was in a tensor-parallel rank's model file, and may have had other values.
    """
    whole = Counter(
        entry.key
        for entry in (*manifest.entries.values(), *manifest.replicas)
        if is_whole(entry, found.lost)
    )
    for copy in manifest.replicas:
        files = {fragment.extent.file for fragment in copy.fragments} & found.lost.keys()
        entry = manifest.entries[copy.key]
        if (
            files
            and copy.parameter in manifest.buffers
            and all(map(is_model, files))
            and whole[copy.key] == 1
            and is_whole(entry, found.lost)
        ):
            yield Loss(copy, tuple(sorted(files)), copy.numel, "made-up", OF_BUFFER, entry)


def _of_drifting(manifest: Manifest, found: Found, source_of: SourceOf) -> Iterator[Loss]:
    """Yields losses for replicas of masters and optimizer states that may have had other values.

    The engine lets these replicas drift, so no other rank's replica shows the lost values.
    """
    of_stages = copies_of_stages(manifest, found.lost)
    for copy in filter(may_drift, manifest.replicas):
        if count := copy.numel - kept(copy, found.lost)[0].numel:
            files = {fragment.extent.file for fragment in copy.fragments} & found.lost.keys()
            left = _left_alone(manifest, copy, source_of, False)
            if other := of_stages.get(copy.key):
                left = "made-up", OF_STAGE, other
            yield Loss(copy, (*sorted(files),), count, *left)


def _of_other_rank(loss: Loss, manifest: Manifest, found: Found) -> Loss:
    """Marks a lost buffer as "made-up" if another tensor-parallel rank has a replica of it.

    The replica may have other values than the lost one.
    """
    copies = (copy for copy in manifest.replicas if copy.key == loss.entry.key)
    other = next((copy for copy in copies if is_whole(copy, found.lost)), None)
    if other is None or not all(map(is_model, loss.files)):
        return loss
    return replace(loss, state="made-up", why=OF_BUFFER, other=other)


def _of_older(loss: Loss, manifest: Manifest, older: Manifest | None) -> Loss:
    """Marks a loss as "made-up" if the older checkpoint has the tensor, perhaps with other values.

    Only for a buffer, or a tensor of the program's own state: a run can continue with older values.
    """
    entry = loss.entry
    other = older.entries.get(entry.key) if older is not None else None
    is_state = entry.slot == "state" or entry.parameter in manifest.buffers
    if other is None or not is_state or (other.dtype, other.shape) != (entry.dtype, entry.shape):
        return loss
    why = "no other file has these elements, but the older checkpoint has earlier values"
    return replace(loss, state="made-up", why=why, other=other)


SourceOf = Callable[[Key], tuple[Entry, str] | None]
"""Finds a tensor by its key: (a complete tensor, where it is), or None if elements are lost."""


def _sources(manifest: Manifest, lost: dict[str, str], older: Manifest | None) -> SourceOf:
    copies = by_key((copy.key, copy) for copy in manifest.replicas)

    def source_of(key: Key) -> tuple[Entry, str] | None:
        entry = manifest.entries.get(key)
        if entry is None:
            return None
        if is_whole(entry, lost):
            return entry, "its own files"
        if entry.parameter not in manifest.buffers:
            for copy in copies.get(key, ()):
                if is_whole(copy, lost) and not may_drift(copy):
                    return copy, OF_COPY
        parameter = manifest.parameters.get(entry.parameter)
        is_frozen = parameter is not None and not parameter.trainable and entry.slot == "param"
        other = older.entries.get(key) if older is not None and is_frozen else None
        if other is None or (other.dtype, other.shape) != (entry.dtype, entry.shape):
            return None
        return other, "the weights are frozen, and the older checkpoint has them"

    return source_of


def _left(
    manifest: Manifest, entry: Entry, source_of: SourceOf, rounds: bool
) -> tuple[State, str, Entry | None]:
    """Finds `state`, `why` and `other` for the `Loss` of a tensor.

    `rounds` says that the run's weights are its rounded masters, so a master shows a lost weight.
    """
    if (source := source_of(entry.key)) is not None:
        return "elsewhere", source[1], source[0]
    return _left_alone(manifest, entry, source_of, rounds)


def _left_alone(
    manifest: Manifest, entry: Entry, source_of: SourceOf, rounds: bool
) -> tuple[State, str, Entry | None]:
    """Like `_left`, for a tensor without a copy: the weight and the master decide the result."""
    weight, master = ((entry.parameter, slot) for slot in ("param", "master"))
    param, wide = manifest.entries.get(weight), manifest.entries.get(master)
    if entry.slot == "param":
        how = agreement(wide, entry) if wide is not None else None
        source = source_of(master) if how and not manifest.run.weights_differ else None
        if source is not None and not rounds:
            return "gone", OF_UNLIKE, None
        if source is not None:
            verb = "round to" if how == "rounded" else "equal"
            return (
                "elsewhere",
                f"other files have the masters, which {verb} these weights",
                source[0],
            )
        parameter = manifest.parameters.get(entry.parameter)
        if parameter is not None and not parameter.trainable:
            frozen = (
                "the weights are frozen: an older checkpoint of the run has them (--older PATH)"
            )
            return "gone", frozen, None
        return "gone", "no other file has these elements", None
    if entry.slot == "master":
        if param is not None and source_of(weight) and is_widened(param.dtype, entry.dtype):
            why = f"other files have the {param.dtype} weights, but masters have more bits"
            return "made-up", why, None
        return "gone", "no other file has these elements", None
    is_moment = entry.slot not in WEIGHTS and entry.slot != "state"
    if is_moment and (source_of(weight) or source_of(master)):
        return (
            "made-up",
            "no other file has these optimizer states, but the weights are in other files",
            None,
        )
    return "gone", "no other file has these elements", None
