"""Places a target's files as in the source, if the source is in a numbered folder such as `step3`.

    source    step3/model_and_optim/.metadata    step3/train/rank0.pt
    target    DST/model_and_optim/.metadata      DST/train/rank0.pt

A target of the same engine gets the same subfolders, even if it was converted through a universal
checkpoint. A target of another engine has all files directly in its directory, and so has the
target of a format with tags, which are folders already. If only weights are written, files around
the engine's folder (train) are left out.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

from msgspec.structs import replace

from ..core.checkpoint.manifest import Manifest
from ..core.passes.layout import Layout, Shell
from ..core.storage.filenames import path_inside
from ..errors import note, warning
from ..formats.format import Format
from ..formats.numbered import is_numbered, name_of
from ..training.options import DIALECT, Options


def as_run(manifest: Manifest) -> Manifest:
    """Places the checkpoint in a numbered folder inside the target, named like the source's folder.

    A source that is not in a numbered folder is returned unchanged.
    """
    name, origin = name_of(manifest), manifest.run.origin
    if not name or origin.inside is None:
        return manifest
    return manifest.replace(
        origin=replace(origin, inside=os.path.join(name, origin.inside)),
        around=tuple(
            replace(item, name=os.path.join(name, item.name)) for item in manifest.files.around
        ),
    )


def in_its_folder(
    layout: Layout, source: Manifest, format: Format, target: str, options: Options
) -> Layout:
    """Places a target's files as in the source, if the source is in a numbered folder (`step3`).

    In such a folder, the engine's files are in a subfolder, and the trainer's files around it.

        same format       the engine's files in the same subfolder, the trainer's files around it;
                          a warning if the target's name does not end with a number
        another format    all files directly in the target
        only weights      the trainer's files are left out

    --dialect, and formats with tags (folders such as global_step500), count as another format. If
    the source is in no numbered folder, or the target is universal, `layout` is unchanged.
    """
    inside, around = source.run.origin.inside, source.files.around
    if format.is_neutral or not inside:
        return layout
    if options.weights_only or not format.is_resumed:
        names = ", ".join(item.name for item in around)
        message = f"{names}: not needed to load the weights"
        lost = [note("file-omitted", message, file=around[0].path)] if around else []
        return replace(layout, omitted=[*layout.omitted, *lost])
    files = [(item.name, item) for item in around]
    is_same = format.name == source.run.origin.format and options[DIALECT] is None
    if not is_same or format.pointer is not None:
        own_names = {name for name, _ in layout.siblings} | {
            shell.name for shell in layout.shells()
        }
        kept = [pair for pair in files if pair[0] not in own_names]
        taken = [item for name, item in files if name in own_names]
        lost = [
            note("file-omitted", f"{item.name}: the target has its own", file=item.path)
            for item in taken
        ]
        return replace(layout, siblings=[*layout.siblings, *kept], omitted=[*layout.omitted, *lost])
    path_inside("", inside, "the source")

    def below(name: str) -> str:
        return os.path.join(inside, name)

    def shells() -> Iterator[Shell]:
        return (replace(shell, name=below(shell.name)) for shell in unchanged())

    unnamed = []
    if not is_numbered(target):
        name = name_of(source) or "step3"
        message = (
            f"{os.path.basename(target)} has no number at the end of its name, but programs look "
            f"for {inside}/ only in numbered folders: give it a name such as {name}"
        )
        unnamed = [warning("program-must-set", message, file=target)]

    unchanged: Callable[[], Iterator[Shell]] = layout.shells
    reader_of_shells, loading = layout.read_back or format.read_shells, layout.loading
    return replace(
        layout,
        shells=shells,
        siblings=[*((below(name), item) for name, item in layout.siblings), *files],
        loading=lambda path: loading(os.path.join(path, inside)),
        warnings=[*layout.warnings, *unnamed],
        read_back=lambda path: reader_of_shells(os.path.join(path, inside)),
        inside=inside,
    )
