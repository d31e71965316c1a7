"""The names, the order and the files that a target gets from its source."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import chain

from msgspec.structs import replace

from .. import formats
from ..core.checkpoint.facts import layers_of
from ..core.checkpoint.manifest import Manifest
from ..core.passes.layout import Layout, Shell
from ..errors import MissingData, NotACheckpoint
from ..formats.format import Format
from ..formats.hf.options import MODEL_CONFIG
from ..formats.reading import USUAL
from ..formats.schedulers import changed_files
from ..naming import ties
from ..naming.families import translated
from ..naming.names import (
    called_as,
    canonical,
    names_of,
    plain,
    plain_names,
    renamed,
    respelled,
    unwrapped,
    without_front,
)
from ..naming.order import in_order_of
from ..reading import read
from ..training import best, objects
from ..training.options import (
    ALLOW_OBJECT,
    FAMILY,
    GROUPS_FROM,
    LIKE,
    PARAM_NAMES,
    RENAME,
    TIE,
    Options,
)
from . import models
from .beginnings import begun
from .numbered import in_its_folder


def named_for(format: Format, manifest: Manifest, options: Options) -> Manifest:
    """Renames the source's parameters for the target, and applies the order of --param-names."""
    family_of_origin = formats.family_of(str(manifest.run.origin.format))
    is_plain = has_plain_names(format, manifest, options)
    if options[RENAME]:
        manifest = renamed(manifest, options[RENAME])
        manifest = unwrapped(manifest) if is_plain else manifest
    elif is_plain:
        manifest = canonical(manifest)
    elif not format.is_neutral and format.family != family_of_origin:
        manifest = without_front(manifest)
    family, names = options[FAMILY], options[PARAM_NAMES]
    # the writer of separate ranks refuses a family, and ties
    if family is not None and not manifest.ranks:
        manifest = translated(manifest, family, options[MODEL_CONFIG])
    if names is not None and not _is_in_order(manifest):
        shorter = plain_names(names) if is_plain and not options[RENAME] else {}
        given = [shorter.get(name, name) for name in names]
        known_names = names_of(manifest)
        # if all names are spelled differently, they are those that the user wants
        as_saved = {} if set(given).isdisjoint(known_names) else respelled(given, known_names)
        names = [as_saved.get(name, name) for name in given]
        # files of layers keep the names in them
        named = manifest if manifest.ranks else called_as(manifest, names)
        manifest = in_order_of(named, names)
    is_tied = options[TIE] and not manifest.ranks
    return ties.with_ties(manifest, options[TIE]) if is_tied else manifest


def has_plain_names(format: Format, manifest: Manifest, options: Options) -> bool:
    """Whether prefixes of wrappers, such as `_orig_mod`, are removed from the target's names.

    They are removed for weights alone, and for formats that programs load into a plain model. They
    stay if the source has the target's format, or if --rename adds such prefixes.
    """
    # a program of the same format loads the names that it saved
    is_same = format.name == manifest.format and not format.is_neutral
    adds_words = any(plain(f"{new}.") != f"{new}." for _, new in options[RENAME])
    return (options.weights_only or format.is_plain) and not (is_same or adds_words)


def _is_in_order(manifest: Manifest) -> bool:
    """Whether the reader has already applied --param-names.

    That is so in ZeRO stage 0 if model ranks are not merged, or if there are layers with experts.
    Then the option lists the names of one rank, not those of the complete model.
    """
    is_apart = bool(manifest.ranks) or bool(layers_of(manifest.run.engine))
    return is_apart and manifest.run.origin.zero_stage == 0


def laid_out(
    format: Format,
    manifest: Manifest,
    named: Manifest,
    parts: Sequence[Manifest],
    target: str,
    options: Options,
    best_in: str | None,
) -> tuple[Manifest, Layout]:
    """Decides which files the target gets, without writing any.

    manifest    what was read
    named       `manifest` with the target's names and param groups
    parts       the models, if there are several
    best_in     the directory that will contain the Trainer's best checkpoint, or None

    Returns the manifest whose tensors fill the files, and the layout of the files. Raises a
    ZckptError if the target cannot be written.
    """

    def allowed(manifest: Manifest) -> Manifest:
        if format.objects is None:
            return manifest
        return objects.without_others(manifest, formats.engine_objects(), options[ALLOW_OBJECT])

    admitted, functions = allowed(named), format.functions
    if parts:
        source, layout = admitted, models.lay_out(format, admitted, [*map(allowed, parts)], options)
    else:
        assert functions.lay_out is not None
        source = functions.groups(admitted, options) if functions.groups else admitted
        run = None if (path := options[LIKE]) is None else allowed(_checkpoint_like(path, format))
        if options[GROUPS_FROM] is not None:
            source = begun(source, run or source, format, options)
        if run is not None:
            assert functions.lay_out_like is not None
            layout = functions.lay_out_like(source, run, options)
        else:
            layout = functions.lay_out(source, options)
    layout = _with_files(layout, changed_files(layout.siblings))
    if format.is_resumed and not format.is_neutral:
        layout = _pointing_to_the_best(layout, source, format.name, target, best_in)
    layout = in_its_folder(layout, source, format, target, options)
    known_lines = (*manifest.notices.omitted, *layout.omitted)
    new_lines = [line for line in admitted.notices.omitted if line not in known_lines]
    # a folder for inference lacks many other files of a run, which are not listed
    weights = [line for line in manifest.notices.omitted if line.code == "weights-omitted"]
    layout = replace(
        layout,
        omitted=[*dict.fromkeys((*layout.omitted, *weights, *new_lines))],
        from_masters=layout.from_masters or options.module_dtype is not None,
    )
    return source, layout


def _checkpoint_like(path: str, format: Format) -> Manifest:
    """Reads the checkpoint of --like; raises NotACheckpoint if its engine is not the target's."""
    try:
        run = read(path, USUAL)
    except MissingData as error:
        raise MissingData(
            "like-does-not-fit",
            f"--like {path}: {error}",
            hint="convert this checkpoint to a universal checkpoint with the missing options, and "
            "give the universal checkpoint to --like",
            file=path,
        ) from error
    if run.run.origin.format != format.name:
        raise NotACheckpoint(
            "like-does-not-fit",
            f"--like {path} is no {format.name} checkpoint",
            hint="give a checkpoint that the next run's program has saved, or a universal one made "
            "from it",
            file=path,
        )
    return run


def _with_files(layout: Layout, files: Sequence[Shell]) -> Layout:
    """Adds files to a layout; they replace copied files of the same names."""
    if not files:
        return layout
    unchanged, names = layout.shells, {file.name for file in files}
    return replace(
        layout,
        shells=lambda: chain(unchanged(), files),
        siblings=[pair for pair in layout.siblings if pair[0] not in names],
    )


def _pointing_to_the_best(
    layout: Layout, manifest: Manifest, to: str, target: str, best_in: str | None
) -> Layout:
    """Sets the path of the Trainer's best checkpoint in trainer_state.json to its new place.

    That is in the folder `best_in`, or at `target` if the source is the best checkpoint. If neither
    applies, the path stays and the layout gets a warning.
    """
    path = best.best_of(manifest.files.siblings)
    if path is None:
        return layout
    if best_in:
        path_of_best = os.path.join(os.path.abspath(best_in), os.path.basename(path))
    elif best.is_best(manifest.files.siblings):
        path_of_best = os.path.abspath(target)
    else:
        keeps_format = manifest.run.origin.format == to
        line = best.not_written(path, manifest.files.siblings, keeps_format)
        return replace(layout, warnings=[*layout.warnings, line])
    return _with_files(layout, [best.pointing_to(manifest.files.siblings, path_of_best)])
