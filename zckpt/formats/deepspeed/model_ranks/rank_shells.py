"""The files of the model ranks of a target, as shells."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ....core.layout import Shell
from ...deepspeed_states.model_files import model_files
from ...deepspeed_states.target import DeepSpeedTarget
from .. import elastic
from ..moe.expert_shells import expert_files
from ..optimizer_files import optimizer_files
from ..stage_0 import whole_files


def run_shells(tag: str, targets: Iterable[DeepSpeedTarget]) -> Iterator[Shell]:
    """The file that names the tag, and the files of all model ranks."""
    pointer = tag.encode()
    yield Shell("latest", len(pointer), ((0, pointer),))
    for target in targets:
        if target.engine.whole:
            yield from whole_files.model_shells(target)
        else:
            yield from optimizer_files(target, elastic.is_elastic(target))
            yield from model_files(target, derives=True)
        yield from expert_files(target)
