"""Lays out a target with empty files in place of the engine's, for programs that need only names.

A run that resumes without a copy on disk gets such a target. zckpt gives the data to the engine's
loader in memory (`resume/names.py`). A note (a JSON file) names the checkpoint that has the data.
The files beside the engine's files are complete. Only files with weights are left out, because no
program of such an engine loads weights from there (`training/needs.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from ..core.checkpoint.manifest import Files, Manifest
from ..core.passes.layout import Layout, Shell
from ..core.storage.inventory import parse_name
from ..core.storage.names_alone import NAMES
from ..errors import note
from ..formats.format import Format
from ..training.needs import ROLES, WEIGHTS


def names_only(layout: Layout, format: Format, source: Manifest, document: bytes) -> Layout:
    """Makes the files of ranks in a layout empty, for a run that needs only their names.

    Adds a note (a JSON file) with the contents `document`, which names the checkpoint that has the
    data. Leaves out other files with weights, and adds a notice about each of these files.
    """
    omitted = [name for name, _ in layout.siblings if _has_weights(name)]

    def shells() -> Iterator[Shell]:
        yield Shell.of(NAMES, document)
        for shell in layout.shells():
            is_of_rank = parse_name(format.roles, shell.name) is not None
            yield Shell(shell.name, 0, ()) if is_of_rank else shell

    def read_back(folder: str) -> Manifest:
        return Manifest(folder, source.format, source.run, {}, {}, files=Files())

    return replace(
        layout,
        shells=shells,
        siblings=[pair for pair in layout.siblings if pair[0] not in omitted],
        omitted=[
            *layout.omitted,
            *(note("file-omitted", f"{name}: weights", subject=name) for name in omitted),
        ],
        read_back=read_back,
        has_digests=False,
        checks=(),
    )


def _has_weights(name: str) -> bool:
    named = parse_name(ROLES, name)
    return named is not None and named.role is WEIGHTS and not name.endswith(".json")
