"""A DeepSpeed directory for any data-parallel size and stage, from any manifest, as shells."""

from __future__ import annotations

from typing import Any

from ...core.manifest import Manifest
from ...core.staging import Layout
from ...files.torchshell import seal_records
from ...training.options import Options
from ...training.order import need_order
from ..deepspeed_states.target import UNDERSTOOD, Target
from .files import recovery_scripts


def lay_out(source: Manifest, options: Options) -> Layout:
    """The files of the target, and what it cannot take along.

    Raises before anything is written: WrongOption (options or a ds_config that contradict each
    other or the source), MissingData (states that the target needs), InconsistentCheckpoint
    (parameters of one flat buffer whose steps differ). MissingData too where the order of the
    parameters in the flat buffers is not known.
    """
    options.only("deepspeed", UNDERSTOOD)
    need_order(source)
    target = Target(source, options)
    siblings = [(item.name, item) for item in source.siblings if not target.drops(item)]
    if source.format == "deepspeed":
        target.left_out += recovery_scripts(source.root)
    return Layout(
        target.shells, siblings, target.left_out, target.warnings, about=target.description
    )


def seal(root: str, manifest: Manifest, outcome: Any) -> None:
    """Writes the CRC-32 of every record into the files' zip directories."""
    seal_records(manifest, outcome)
