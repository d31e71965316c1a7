"""Reads a path as a manifest: finds the checkpoint, reads it, and renames its parameters."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import chain

from msgspec.structs import replace

from . import formats
from .core.checkpoint import agreement, covering, mended
from .core.checkpoint.dtypes import FLOATS
from .core.checkpoint.entries import name_of
from .core.checkpoint.facts import StateDictEngine
from .core.checkpoint.manifest import Manifest, fitting_roots
from .core.checkpoint.missing_states import missing_states
from .core.checkpoint.siblings import following, links_out
from .core.checkpoint.states import entries_in, with_updates
from .core.checkpoint.unlisted import unlisted
from .core.comparison.masters import ALL, BEGINNINGS
from .core.passes.resources import uncollected
from .core.storage import sources
from .core.storage.inventory import parse_name
from .core.storage.names_alone import refuse_names
from .core.storage.times import odd_times
from .core.storage.unfinished import refuse_unfinished
from .errors import (
    AmbiguousCheckpoint,
    CorruptCheckpoint,
    IncompleteCheckpoint,
    MissingData,
    NotACheckpoint,
    Notice,
    UnsupportedCheckpoint,
    WrongOption,
    listed,
    note,
    warning,
)
from .formats import nearby
from .formats.format import Format
from .formats.numbered import with_files_around
from .formats.reading import Reading
from .naming import families
from .naming.names import (
    about_other_words,
    called_as,
    canonical,
    names_of,
    renamed,
    with_plain_modules,
)
from .naming.order import is_known
from .naming.saving import spelled_as
from .training import steps


def read(path: str | os.PathLike[str], reading: Reading, alone: bool = True) -> Manifest:
    """Reads the manifest of the checkpoint at `path`, and renames its parameters.

    Tensors are read only to compare them, such as replicas without checksums. `alone` is False if a
    second checkpoint is read too: then --root may name a model of the second one. Raises
    SourceChanged if a file changes meanwhile, or another ZckptError.
    """
    try:
        opens = reading.opens_items or (reading.for_target and not reading.by_checksums)
        with uncollected():
            return (_read_opened if opens else _read)(path, reading, alone)
    except (NotACheckpoint, IncompleteCheckpoint, CorruptCheckpoint) as error:
        # a folder nearby may have the missing file
        if (hint := nearby.hint_of(error, os.fspath(path))) is None:
            raise
        raise error.again(hint=hint) from error


def _read_opened(path: str | os.PathLike[str], reading: Reading, alone: bool) -> Manifest:
    """Reads a manifest for a caller that reads all bytes, and opens all items of `.distcp` files.

    An item is a torch file inside a `.distcp` file.
    """
    # to save memory, the byte layout of most items is inferred from similar items; but not with
    # --masters-from-weights, which reads masters before all items are opened here
    planned = replace(reading, opens_items=reading.masters_from_weights)
    manifest = _read(path, planned, alone)
    try:
        with sources.watching(reading.nameless) as watch:
            # opens each item and compares its layout, in all processes that share a conversion
            for record in manifest.files.records:
                _ = record.crc
    except UnsupportedCheckpoint:  # an item has another layout
        return _read(path, replace(reading, opens_items=True), alone)
    return manifest.replace(beside=(*manifest.files.beside, *(watch.beside or ())))


def _read(path: str | os.PathLike[str], reading: Reading, alone: bool) -> Manifest:
    """Reads a manifest like `read`; errors about missing files do not mention other folders."""
    steps.check_policy(reading.step_policy)
    path = os.fspath(path)
    refuse_unfinished([path])
    refuse_names(path)
    recognized = formats.find(path, reading.format, reading.tag, reading.root)
    format = recognized.format
    if recognized.inside and (reading.root or "").partition("=")[0] == recognized.inside:
        reading = replace(reading, root=None)
    with sources.watching(reading.nameless) as watch, following(reading.follow_links):
        manifest = format.functions.read(recognized.path, reading)
        if recognized.inside:
            manifest = with_files_around(manifest, path, recognized.inside, recognized.left_out)
        siblings = [item.path for item in (*manifest.files.siblings, *manifest.files.around)]
        fingerprints = watch.of((*manifest.files.paths, *siblings))
    refuse_unfinished({os.path.dirname(file) for file in manifest.files.paths})
    covering.refuse_holes(manifest, format.name)
    _check_names(manifest)
    if alone:
        _need_root(reading, manifest)
    _need_tag(path, reading, manifest)
    if reading.masters_from_weights:
        manifest = _rebuilt(manifest.replace(fingerprints=fingerprints), format, reading.is_shared)
    if reading.replicas == "mean" and (averaged := format.functions.averaged):
        manifest = averaged(manifest)
    manifest = manifest.replace(
        fingerprints=fingerprints,
        objects=frozenset(watch.objects),
        beside=tuple(watch.beside or ()),
        links=tuple(links_out(watch.first, manifest.notices.omitted, path)),
    )
    manifest = renamed(with_updates(manifest), reading.rename)
    if reading.family is not None:
        manifest = families.translated(manifest, reading.family)
    if not format.is_neutral:  # a neutral format's manifest lists it
        manifest = manifest.replace(mended=mended.beside(manifest.root))
    lost, stateless = missing_states(manifest)
    lines = [
        *manifest.notices.warnings,
        *mended.warnings(manifest.notices.mended, manifest.where),
        *([] if format.is_neutral else unlisted(manifest)),  # it keeps the source's warning
        *lost,
        *stateless,
        *_unused(manifest, reading, format),
    ]
    omitted = [*manifest.notices.omitted, *(_own_tensors(manifest) if reading.weights_only else ())]
    lines += [*_oddly_timed(manifest), *_in_other_order(manifest, reading)]
    lines += steps.unused_policy(manifest, reading.step_policy)
    if reading.follow_links and not any(map(os.path.islink, siblings)):
        message = f"--follow-links is not used: no file beside {manifest.where} is a link"
        lines.append(warning("option-without-effect", message, subject="--follow-links"))
    lines = [*dict.fromkeys(lines)]  # universal checkpoints keep warnings
    seen = (*manifest.run.steps, *formats.trainers_counters(manifest))
    return manifest.replace(warnings=tuple(lines), omitted=tuple(omitted), steps=seen)


def _own_tensors(manifest: Manifest) -> list[Notice]:
    """Notices that a target with weights only will lack the program's own tensors.

    For example, these may be the averages of an EMA.
    """
    entries = manifest.rank_manifests[0].entries.items()  # the state is the first rank's
    values = {
        key
        for key, entry in entries
        if entry.slot == "state" and entry.dtype in FLOATS and entry.shape
    }
    prefixes = tuple(f"{notice.subject}." for notice in manifest.notices.omitted if notice.subject)
    return [
        note("weights-omitted", f"{key}: tensors of the program's own state", subject=key)
        for key, value in (manifest.state.get("client_state") or {}).items()
        if any(tensor in values for tensor in entries_in(value))
        and not any(subject.startswith(f"{key}.") for subject in prefixes)
    ]


def _rebuilt(manifest: Manifest, format: Format, is_shared: bool) -> Manifest:
    """Replaces fp32 masters by values made from the weights.

    If several processes share the conversion (`is_shared`), only the beginnings of masters are
    compared here. Raises WrongOption for a format without a function for it (`Functions.rebuilt`).
    """
    rebuilt = format.functions.rebuilt
    if rebuilt is None:
        raise WrongOption(
            "option-not-applicable",
            f"--masters-from-weights does not apply to {format.name}",
            hint="leave out this option: it is for Megatron-Core files with wrong fp32 masters",
        )
    return rebuilt(manifest, BEGINNINGS if is_shared else ALL)


def _oddly_timed(manifest: Manifest) -> list[Notice]:
    """Warns about ranks' files that were written long before or after those of other ranks."""
    format = formats.named(manifest.format)
    times: dict[str, dict[str, int]] = {}  # by the folder whose last file is known
    roles = {
        path: file_role.role
        for path in manifest.files.paths
        if (file_role := parse_name(format.roles, path))
    }
    lasts = {os.path.dirname(path): path for path, role in roles.items() if role.is_last}
    for path in (path for path, role in roles.items() if role.axes):
        folder = os.path.dirname(path)
        together = times.setdefault(folder if folder in lasts else "", {})
        together[path] = manifest.files.fingerprints[path].mtime
    lines = []
    for folder, together in times.items():
        last = lasts.get(folder)
        odd = odd_times(together, None if last is None else manifest.files.fingerprints[last].mtime)
        lines += _odd(odd.early, "before the other files")
        lines += _odd(odd.late, f"after {os.path.basename(last or '')}, which is written last")
    return lines


def _odd(paths: Sequence[str], when: str) -> list[Notice]:
    """The warning that `paths` were written long before or after other files.

    `when` ends the sentence "written more than ten minutes ...".
    """
    if not paths:
        return []
    them = "it" if len(paths) == 1 else "they"
    message = (
        f"{listed(paths)}: written more than ten minutes {when}; {them} may be of another save"
    )
    return [warning("files-of-other-time", message, file=paths[0])]


def _unused(manifest: Manifest, reading: Reading, format: Format) -> list[Notice]:
    """Warns about --buffers, --tp-rules and --replicas if they change nothing."""
    buffers = [] if reading.for_target or manifest.notices.buffers_named else reading.buffers
    lines = [
        warning(
            "option-without-effect",
            f"--buffers {glob} is not used: the files of {manifest.root} show what is a buffer, or "
            "no tensor has such a name",
            subject="--buffers",
        )
        for glob in buffers
    ]
    if manifest.run.origin.tp not in (None, 1) or manifest.run.tensor_parallel is not None:
        return lines
    tp_rules = None if format.reports_unused_rules else reading.tp_rules
    return lines + [
        warning(
            "option-without-effect",
            f"{flag} {value} is not used: {manifest.root} has no tensor-parallel ranks",
            subject=flag,
        )
        for flag, value in (("--tp-rules", tp_rules), ("--replicas", reading.replicas))
        if value is not None
    ]


def _in_other_order(manifest: Manifest, reading: Reading) -> list[Notice]:
    """Warns if the files name the parameters in another order than --param-names.

    Then the order of the option has no effect.
    """
    if manifest.run.origin.pp not in (None, 1):  # each pipeline stage has its own order
        return []
    parameters = manifest.rank_manifests[0].parameters  # equal on all tensor ranks
    trained = [name for name, parameter in parameters.items() if parameter.trainable]
    given = [name for name in reading.param_names or () if name in trained]
    if given == trained or {*given} != {*trained} or not is_known(manifest):
        return []
    message = (
        f"{manifest.root} names its parameters itself, in another order than --param-names has"
    )
    return [warning("option-without-effect", message, subject="--param-names")]


def _need_root(reading: Reading, *manifests: Manifest) -> None:
    """Raises WrongOption if `--root` is given, but no manifest has a model of that name."""
    name = reading.root and reading.root.partition("=")[0]
    if name and not any(manifest.run.origin.root == name for manifest in manifests):
        raise WrongOption(
            "option-names-nothing",
            f"no model of {' and '.join(m.root for m in manifests)} is called {name}",
            hint="leave out --root",
        )


def _need_tag(path: str, reading: Reading, manifest: Manifest) -> None:
    """Raises WrongOption if `--tag` is given, but the checkpoint has no tag of that name."""
    tag = reading.tag
    if tag is None or tag == manifest.run.origin.tag or os.path.lexists(os.path.join(path, tag)):
        return
    raise WrongOption(
        "option-names-nothing",
        f"{manifest.root} is one checkpoint, which is not called {tag}",
        hint="leave out --tag",
    )


def _check_names(manifest: Manifest) -> None:
    """Raises CorruptCheckpoint for a name that is no valid text: a number, or invalid Unicode."""
    names = (
        (*map(name_of, own.entries), *own.parameters, *own.buffers)
        for own in manifest.rank_manifests
    )
    for name in chain.from_iterable(names):
        try:
            str.encode(name)
        except (TypeError, UnicodeEncodeError) as error:
            raise CorruptCheckpoint(
                "file-damaged",
                f"{manifest.root} has the name {name!a}, which is not valid text",
                hint="a bit of the name may be flipped: take another copy of the file",
                file=manifest.root,
            ) from error


def read_both(
    path: str | os.PathLike[str], other: str | os.PathLike[str], reading: Reading
) -> tuple[Manifest, Manifest, list[Notice]]:
    """Reads two checkpoints to compare them; the second gets the parameter names of the first.

    Prefixes of wrappers (`_orig_mod`) that only one checkpoint has in its names are removed from
    both. Returns both manifests, and notices about the removed prefixes.
    """

    def pair(reading: Reading) -> tuple[Manifest, Manifest, list[Notice]]:
        first = read(path, reading, alone=False)
        first, second, lines = alike(first, _read_second(other, first, reading))
        _need_shared(first, second)
        return first, second, lines

    try:
        return pair(reading)
    except MissingData:
        if reading.param_names is not None:
            raise
        # both optimizers may only number their parameters: compares their states without names
        first, second, lines = pair(replace(reading, nameless=True))
        if first.groups is None and second.groups is None:
            return first, second, lines
        raise


def read_other(
    path: str | os.PathLike[str], first: Manifest, reading: Reading
) -> tuple[Manifest, Manifest, list[Notice]]:
    """Reads a second checkpoint to compare it with `first`, and gives it the names of `first`.

    Returns both manifests, and notices about wrappers' prefixes (such as `_orig_mod`) that only one
    of them has in its names. The names of weights in `first` do not change.
    """
    other = _read_second(path, first, reading)
    same = called_as(other, names_of(first))
    _need_shared(first, same)
    return with_plain_modules(first), with_plain_modules(same), about_other_words(first, other)


def alike(first: Manifest, other: Manifest) -> tuple[Manifest, Manifest, list[Notice]]:
    """Gives the manifest `other` the parameter names of `first`, so that both can be compared.

    If only one of them has wrappers' prefixes in its names, such as `_orig_mod`, the prefixes are
    removed from both. Returns both manifests, and notices about this.
    """
    lines = about_other_words(first, other)
    other = called_as(other, names_of(first))
    if not lines:
        return with_plain_modules(first), with_plain_modules(other), []
    ours, theirs = names_of(first), names_of(other)
    return canonical(first, theirs), canonical(other, ours), lines


def _read_second(path: str | os.PathLike[str], first: Manifest, reading: Reading) -> Manifest:
    """Reads the checkpoint at `path`, to compare it with `first`.

    Options about the files of `first` only, such as `--tag`, do not apply.
    """
    # `--from gathered`: the file is a complete model, even if its name is that of a shard
    is_whole = reading.format == "gathered" and os.fspath(path).endswith(".safetensors")
    options = Reading(
        reading.format if is_whole else None,
        step_policy=agreement.KEEP if reading.step_policy == agreement.KEEP else None,
        param_names=reading.param_names,
        weights_only=reading.weights_only,
        nameless=reading.nameless,
        root=reading.root,
        tp_rules=reading.tp_rules,
        buffers=reading.buffers,
        opens_items=reading.opens_items,
    )
    other = read(path, options, alone=False)
    _need_root(reading, first, other)
    return spelled_as(other, first) if first.files.siblings or other.files.siblings else other


def _need_shared(first: Manifest, other: Manifest) -> None:
    """Raises AmbiguousCheckpoint if two checkpoints share no parameter name.

    It is raised only if one of them has several models, from which the user can choose.
    """
    if set(names_of(first)).isdisjoint(names_of(other)):
        for manifest, twin in ((first, other), (other, first)):
            refuse_several(manifest, like=twin)


def _roots_like(manifest: Manifest, other: Manifest) -> list[str]:
    """The models of `manifest` that have the parameter names and shapes of `other`.

    If `other` states the name of its model, and that model matches, only that one is returned.
    """
    fitting = fitting_roots(manifest.roots, manifest.parameters, other.parameters)
    keys = other.run.engine.model if isinstance(other.run.engine, StateDictEngine) else ()
    stated_root = other.run.origin.root or ".".join(map(str, keys))
    return [stated_root] if stated_root in fitting else fitting


def refuse_several(manifest: Manifest, way_out: str = "", like: Manifest | None = None) -> None:
    """Raises AmbiguousCheckpoint if the checkpoint has several models or optimizers.

    The hint tells to choose one with `--root`; `way_out` is added to it. If the checkpoint is to be
    compared with another one, `like`, the hint names the models that match.
    """
    if roots := manifest.roots:
        name, optimizers = next(iter(roots.items()))
        fitting = (like and _roots_like(manifest, like)) or [name]
        what, choice = f"models: {listed([*roots])}", " or --root ".join(fitting)
        if len(roots) == 1:
            what, choice = f"optimizers: {listed(optimizers)}", f"{name}={optimizers[0]}"
        raise AmbiguousCheckpoint(
            "several-models",
            f"{manifest.root} has several {what}",
            hint=f"choose one with --root {choice}{way_out}",
            file=manifest.root,
        )
