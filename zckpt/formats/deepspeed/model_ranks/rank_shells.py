"""The files of the model ranks of a target, as shells."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ....core.layout import Shell
from ...deepspeed_states.model_files import model_files
from ...deepspeed_states.target import DeepSpeedTarget
from ..moe.expert_shells import expert_files
from ..optimizer_files import optimizer_files
from ..stage_0 import whole_files


def run_shells(tag: str, targets: Iterable[DeepSpeedTarget]) -> Iterator[Shell]:
    """The file that names the tag, and the files of all model ranks."""
    pointer = tag.encode()
    yield Shell("latest", len(pointer), ((0, pointer),))
    for number, target in enumerate(targets):
        yield from _rank_shells(target, number)


def _rank_shells(target: DeepSpeedTarget, number: int) -> Iterator[Shell]:
    """Model and optimizer files under the names of model rank `number`."""
    if target.engine.whole:
        shells = [*whole_files.model_shells(target)]
    else:
        shells = [
            *optimizer_files(target, False),
            *model_files(target, derives=True),
            *expert_files(target),
        ]
    for shell in shells:
        yield Shell(
            shell.name.replace("mp_rank_00", f"mp_rank_{number:02d}"), shell.size, shell.parts
        )
