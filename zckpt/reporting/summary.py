"""The sections `line` (the checkpoint in one line) and `about` (what the trainer's files state)."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable
from math import prod

from msgspec import to_builtins

from ..core.checkpoint.manifest import Manifest
from ..core.passes.description import Report
from ..core.storage.records import RecordCounts
from ..errors import counted
from ..judging.about import about as about_manifest
from ..judging.about import about_folder
from ..judging.damaged_source import Found
from ..judging.inventory import files_below
from ..resume.listing import on_disk
from ..resume.runs import Candidate, folder_of
from .steps import agreeing

ENGINES = {
    "deepspeed": "DeepSpeed",
    "deepspeed-universal": "DeepSpeed's universal format",
    "dcp": "torch.distributed.checkpoint",
    "onnxruntime": "ONNX Runtime Training",
    "megatron": "Megatron-Core",
    "hf": "Hugging Face",
    "universal": "zckpt's universal format",
}


EMPTY: Report = {
    **dict.fromkeys(("engine", "format", "name", "step", "parameters", "trainable", "optimizer")),
    **dict.fromkeys(("dtype", "digest")),
    "sizes": {},
    "versions": {},
    "steps": "not known",
    "checked": "not read",
    "bytes": 0,
    "files": 0,
}
"""The line of a checkpoint of which nothing is known."""


def section(checkpoint: Found) -> Report:
    """Makes the section `line`: format, sizes, step and other facts, from metadata only."""
    files = [*_files(checkpoint)]
    report = EMPTY | {
        "name": os.path.basename(os.path.abspath(checkpoint.root)),
        "bytes": sum(map(os.path.getsize, files)),
        "files": len(files),
    }
    return (
        report if checkpoint.manifest is None else report | _known(checkpoint.manifest, checkpoint)
    )


def about(checkpoint: Found, candidate: Candidate) -> Report:
    """Makes the section `about`: name and date of the trainer's folder, facts about the run."""
    folder = folder_of(candidate)
    facts = (
        about_folder(folder) if checkpoint.manifest is None else about_manifest(checkpoint.manifest)
    )
    return {
        "name": os.path.basename(os.path.abspath(folder)),
        "saved": on_disk(folder)["saved"],
        **to_builtins(facts),
    }


def _files(checkpoint: Found) -> Iterable[str]:
    if checkpoint.manifest is None:
        return files_below(checkpoint.root)
    return (
        path for path in checkpoint.manifest.files.paths if checkpoint.lost.get(path) != "missing"
    )


def _known(manifest: Manifest, checkpoint: Found) -> Report:
    origin = manifest.run.origin
    program, version, stage = origin.format or manifest.format, origin.version, origin.zero_stage
    engine = f"{ENGINES.get(program, program)}{f' {version}' if version else ''}"
    types = Counter(
        entry.dtype for entry in manifest.entries.values() if entry.slot == "param" and entry.numel
    )
    parameters = manifest.parameters.values()
    return {
        "engine": engine + (f", ZeRO-{stage}" if stage is not None else ""),
        "format": manifest.format,
        "sizes": origin.sizes,
        "step": manifest.step,
        "steps": agreeing(manifest, checkpoint.stated),
        "parameters": sum(prod(item.shape) for item in parameters),
        "trainable": sum(prod(item.shape) for item in parameters if item.trainable),
        "optimizer": manifest.optimizer,
        "dtype": types.most_common(1)[0][0] if types else None,
        "versions": {program: version} if version else {},
    }


def checked(records: RecordCounts, damaged: int, lacks: bool) -> str:
    """A phrase about the result of comparing checksums, such as "2 checksums are wrong".

    With `lacks`, some files could not be read.
    """
    if damaged:
        return f"{counted(damaged, 'checksum')} {'is' if damaged == 1 else 'are'} wrong"
    every = records.checked + records.unchecked
    if not records.checked:
        return "no checksum is stored"
    if records.bare:
        parts = f"{records.bare:,} of {counted(every, 'part')} of files"
        return f"{parts} have no checksum, the others are ok"
    return "checksums ok in what can be read" if lacks else "checksums ok"
