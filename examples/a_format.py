"""A format of our own, read and written: every weight in two halves, one per rank, and an index.

A folder of `zckpt/formats/` has these functions in modules: see docs/add-a-format.md.
"""

from __future__ import annotations

import array
import json
import os
from collections.abc import Iterator
from math import prod
from pathlib import Path

from zckpt.core.checkpoint.entries import Entry
from zckpt.core.checkpoint.manifest import Files, Manifest, Parameter, Run
from zckpt.core.checkpoint.origin import Origin
from zckpt.core.checkpoint.weights import weight_of
from zckpt.core.passes.layout import CopyOutcome, Layout, Shell
from zckpt.core.storage import sources
from zckpt.core.storage.folder import Folder
from zckpt.core.storage.fragments import Extent, Fragment, Runs
from zckpt.errors import IncompleteCheckpoint, WrongOption
from zckpt.formats.reading import USUAL, Reading
from zckpt.training.options import Options

INDEX, RANKS = "index.json", (0, 1)


def save(path: str) -> None:
    """What the engine does: a weight of 4 x 2 after 3 updates, of which each rank has 2 x 2."""
    root = Path(path)
    root.mkdir()
    (root / INDEX).write_text(json.dumps({"step": 3, "shapes": {"fc.weight": [4, 2]}}))
    (root / "rank0.bin").write_bytes(array.array("f", [0, 1, 2, 3]).tobytes())
    (root / "rank1.bin").write_bytes(array.array("f", [4, 5, 6, 7]).tobytes())


# -- files.py: which files make a checkpoint


def detect(path: str) -> list[str]:
    """The tags of the checkpoints at `path`; an empty tag, since this engine has none."""
    return [""] if sources.is_file(os.path.join(path, INDEX)) else []


# -- read.py: in which bytes of them every element lies


def read(path: str, reading: Reading = USUAL) -> Manifest:
    with sources.opened(os.path.join(path, INDEX)) as file:
        index = json.load(file)
    files = [os.path.join(path, f"rank{rank}.bin") for rank in RANKS]
    for rank, name in enumerate(files):
        if not sources.is_file(name):
            raise IncompleteCheckpoint(
                "missing-file",
                f"{path}: the file of rank {rank} is missing",
                hint=f"copy {name} again",
            )
    entries, parameters, offset = {}, {}, 0
    for name, shape in index["shapes"].items():
        half = prod(shape) // 2  # elements of one rank
        fragments = [
            Fragment(rank * half, (rank + 1) * half, Extent(file, offset, 4 * half))
            for rank, file in enumerate(files)
        ]
        offset += 4 * half  # bytes
        entry = Entry(name, "param", "F32", tuple(shape), Runs(fragments))
        entries[entry.key] = entry
        parameters[name] = Parameter(tuple(shape), step=index["step"])
    return Manifest(
        root=path,
        format="halves",
        run=Run(Origin("halves", dp=2)),
        entries=entries,
        parameters=parameters,
        files=Files((os.path.join(path, INDEX), *files)),
    )


# -- write.py: the files of a target, with holes where the tensors go


def lay_out(source: Manifest, options: Options) -> Layout:
    shapes = {name: weight_of(source.entries, name).stored.shape for name in source.parameters}
    if odd := [name for name, shape in shapes.items() if prod(shape) % 2]:
        raise WrongOption(
            "sizes-do-not-fit",
            f"two ranks cannot share the elements of {odd[0]}: their number is odd",
        )
    index = json.dumps({"step": source.step, "shapes": shapes}).encode()
    size = sum(4 * prod(shape) // 2 for shape in shapes.values())  # bytes of one rank

    def shells() -> Iterator[Shell]:
        yield Shell.of(INDEX, index)
        for rank in RANKS:
            yield Shell(f"rank{rank}.bin", size, ())

    return Layout(
        shells,
        siblings=[],
        omitted=source.notices.omitted,
        warnings=source.notices.warnings,
        about="halves of 2 ranks",
    )


def seal(root: Folder, manifest: Manifest, outcome: CopyOutcome) -> None:
    """These files have no checksums, which are written here."""
