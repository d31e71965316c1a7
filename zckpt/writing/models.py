"""Writes several models of one program as one target, each with its optimizer.

Accelerate numbers the files of further models, and loads them by number. Each model is read and
laid out as if it were the only one. For the copy, they are combined into one manifest, in which
each name is prefixed with the model's key.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

from msgspec.structs import replace

from ..core.checkpoint.manifest import Manifest
from ..core.passes.layout import Layout
from ..core.storage.filenames import number_of, numbered
from ..errors import MissingData, Notice, WrongOption
from ..formats.format import Format
from ..formats.reading import Reading
from ..naming import ties
from ..naming.names import names_in
from ..reading import read, refuse_several
from ..training.options import (
    DIALECT,
    FAMILY,
    GROUPS_FROM,
    PARAM_NAMES,
    RENAME,
    SET_GROUP,
    TIE,
    Option,
    Options,
)

OF_ONE: tuple[Option[Any], ...] = (RENAME, FAMILY, GROUPS_FROM, SET_GROUP)
"""Options that change names or groups, and so apply to one model only."""


def are_numbered(manifest: Manifest) -> bool:
    """Whether the files have several models, numbered as `model`, `model_1` and so on.

    A model may have one optimizer with the same number.
    """
    roots = list(manifest.roots.items())
    return len(roots) > 1 and all(
        name == numbered("model", number)
        and {*map(number_of, optimizers)} <= {number}
        and len(optimizers) < 2
        for number, (name, optimizers) in enumerate(roots)
    )


def _has_place(format: Format, manifest: Manifest, options: Options) -> bool:
    has_models = format.functions.has_models
    return has_models is not None and has_models(manifest, options)


def parts_of(
    format: Format, manifest: Manifest, reading: Reading, options: Options
) -> list[Manifest]:
    """Splits a manifest of several models into one manifest for each model.

    The list is empty if there is only one model, or if the target cannot store all of them. Raises
    WrongOption for an option that applies to only one model, and MissingData if the files do not
    name an optimizer's parameters.
    """
    if not are_numbered(manifest) or not _has_place(format, manifest, options):
        return []
    if given := [option.flag for option in OF_ONE if options[option]]:
        raise WrongOption(
            "several-models",
            f"{given[0]} is for one model, and {manifest.root} has {', '.join(manifest.roots)}",
            hint=f"choose one with --root {next(iter(manifest.roots))}",
        )
    parts: list[Manifest] = []
    for name in manifest.roots:
        reading_of_part = replace(
            reading,
            format=manifest.format,
            tag=None,
            root=name,
            param_names=names_in(options[PARAM_NAMES], f"{name}."),
            weights_only=options.weights_only,
        )
        try:
            part = read(manifest.root, reading_of_part)
        except MissingData as error:
            raise MissingData(
                "names-needed",
                f"{name}: {error.message}",
                hint="list the names of all models with --param-names FILE, each prefixed with its "
                + "model's key: "
                + " and ".join(f"{root}.NAME" for root in list(manifest.roots)[:2])
                + f"; or choose one model with --root {name} --param-names FILE",
            ) from error
        part = ties.with_ties(part, ties.of_root(options[TIE], name))
        state = part.state
        if parts:  # the first model has the program's own state
            state = {k: v for k, v in state.items() if k not in ("lr_scheduler", "client_state")}
        parts.append(part.replace(siblings=manifest.files.siblings, state=state))
    return parts


def need_one(format: Format, manifest: Manifest, options: Options) -> None:
    """Raises AmbiguousCheckpoint if the files have several models and the target only one.

    With --weights-only, the weights of all models may be written, except by `export`.
    """
    if not options.weights_only:
        ways = f"{_way_to_all(format, manifest, options)}; or write the weights of all models with "
        refuse_several(manifest, f"{ways}--weights-only")
    elif len(manifest.roots) > 1 and not format.is_resumed:
        refuse_several(manifest)


def _way_to_all(format: Format, manifest: Manifest, options: Options) -> str:
    """A hint on how to write a target with all models; empty if no target can have them."""
    choices = next((own.choices for own in format.options or () if own.name == DIALECT.name), ())
    if not are_numbered(manifest) or options[DIALECT] is not None:
        return ""
    fitting = [
        f"--dialect {choice}"
        for choice in choices
        if _has_place(format, manifest, Options((*options.given, (DIALECT, choice))))
    ]
    return f"; or write all models with {' or '.join(fitting)}" if fitting else ""


def lay_out(
    format: Format,
    whole: Manifest,
    parts: Sequence[Manifest],
    options: Options,
) -> Layout:
    """Lays out the files of all models as one target."""
    lay_out = format.functions.lay_out_model
    assert lay_out is not None
    layouts = [lay_out(part, options, number) for number, part in enumerate(parts)]
    names = [name for name, _ in layouts[0].siblings]
    kept = {name for name in names if all(name in dict(each.siblings) for each in layouts)}
    return replace(
        layouts[0],
        shells=lambda: chain.from_iterable(each.shells() for each in layouts),
        siblings=[(name, item) for name, item in layouts[0].siblings if name in kept],
        omitted=_joined(
            whole, parts, [each.omitted for each in layouts], lambda m: m.notices.omitted
        ),
        warnings=_joined(
            whole, parts, [each.warnings for each in layouts], lambda m: m.notices.warnings
        ),
        about=f"{layouts[0].about} ({', '.join(whole.roots)})",
    )


def _joined(
    whole: Manifest,
    parts: Sequence[Manifest],
    lines: Sequence[Sequence[Notice]],
    of_source: Callable[[Manifest], Sequence[Notice]],
) -> list[Notice]:
    """Lists the reader's notices about `whole`, then the writers' notices about its models.

    `lines` has the notices about each model in `parts`; `of_source` returns the reader's alone. A
    writer's notice gets the model's name as a prefix.
    """
    lines_of_writer = [
        replace(line, message=f"{name}: {line.message}")
        for name, part, said in zip(whole.roots, parts, lines, strict=True)
        for line in said
        if line not in of_source(part)
    ]
    return list(dict.fromkeys((*of_source(whole), *lines_of_writer)))
