"""Whether a target's files are elastic: optimizer states alone, for an engine with its own groups.

Elastic files hold no hyper-parameters, so that the engine keeps those that it was built with;
other files would need a guess.
"""

from __future__ import annotations

from ...core.inert import PYTHON_NUMBERS
from ...errors import listed
from ...training.hyperparameters import are_given, are_inferred
from ...training.options import GROUP_DEFAULTS
from .. import zero
from ..deepspeed_states.target import DeepSpeedTarget


def is_elastic(target: DeepSpeedTarget) -> bool:
    """Whether to write elastic files: hyper-parameters are unknown, and the engine resumes exactly.

    DeepSpeed 0.19.8, stage_1_and_2.py `_restore_base_optimizer_state`, resumes exactly if:

    * The stage is 1 or 2, and not BF16_Optimizer. All groups have the same states: the loader goes
      by the keys of the first. No Muon, which keeps whole momenta: the loader gives every rank
      those of rank 0. Moments are in fp32: the loader makes all of them so.
    * Numbers are Python's. One that is a tensor, such as the step of torch's Adam, is filled up
      with the partition's padding, unless there is none or the engine is elastic itself.
    """
    engine, buffers = target.engine, target.buffers
    if not are_inferred(target.source) or target.options[GROUP_DEFAULTS]:
        return False
    if are_given(target.source) or target.options.weights_only:
        return False
    if not engine.cuts_groups:
        return False
    keys = {(*sorted(buffer.slots), *sorted(buffer.scalars)) for buffer in buffers}
    types = {dtype for buffer in buffers for dtype in buffer.slots.values()}
    if len(keys) > 1 or types - {"F32"} or any(map(target.keeps_whole_momenta, buffers)):
        return False
    if target.step_place.where == "group" and len({buffer.step for buffer in buffers}) > 1:
        return False
    paddings = any(-buffer.starts[-1] % (2 * target.dp) for buffer in buffers)
    return engine.elastic or not (paddings and _keeps_numbers_as_tensors(target))


def _keeps_numbers_as_tensors(target: DeepSpeedTarget) -> bool:
    """Whether any number beside the moments, such as the step, is a tensor."""
    buffers, place = target.buffers, target.step_place
    types = {number.dtype for buffer in buffers for number in buffer.scalars.values()}
    if place.where == "state" and any(buffer.step is not None for buffer in buffers):
        types.add(place.kind)
    return bool(types - PYTHON_NUMBERS.keys())


def warnings(target: DeepSpeedTarget) -> list[str]:
    """What a user must know before resuming from elastic files."""
    lines = [
        "the source holds no hyper-parameters, and neither does the target: the engine "
        "keeps those that it is built with (--group-defaults lr=... writes others)"
    ]
    if target.source.state.get("lr_scheduler") is not None:
        lines.append(
            "the engine's first update uses the learning rate that it is built with: "
            "elastic files hold none, and its scheduler sets one after that update"
        )
    return [*lines, *_of_the_next_save(target)]


def _of_the_next_save(target: DeepSpeedTarget) -> list[str]:
    """The engine's own elastic save takes the padding of a partition off its step as well.

    This happens if the loader has turned the step into a tensor of one element (0.19.8). All ranks
    load rank 0's.
    """
    lengths = [buffer.starts[-1] for buffer in target.buffers]
    padded = [
        number
        for number, length in enumerate(lengths)
        if length < zero.partition_size(length, target.dp)
    ]
    if not padded or not _keeps_numbers_as_tensors(target):
        return []
    return [
        "DeepSpeed (0.19.8) resumes from this, but will not from its own next save: its "
        f"elastic save cuts the step of group {listed([*map(str, padded)])} off with the "
        "padding of rank 0; zckpt reads that save"
    ]
