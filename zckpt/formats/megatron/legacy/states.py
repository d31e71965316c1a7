"""States of the optimizer in the older kind of Megatron's directories."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ....core.dtypes import SIZES
from ....core.fragments import Fragment, Runs
from ....core.manifest import slot_name
from ....errors import InconsistentCheckpoint, UnsupportedCheckpoint
from ....files.torchfile import Tensor, TorchFile
from ..buffers.placing import SAMPLE, Flat, Local
from ..buffers.stages import Place
from ..common import WEIGHTS_ONLY
from ..groups import members


def local_part(name: str, tensor: Tensor, file: TorchFile) -> Local:
    """A rank's weight with its first elements."""
    count = min(tensor.numel, SAMPLE) if tensor.contiguous else 1
    first = file.whole(tensor).part(tensor.offset * SIZES[tensor.dtype], 0)
    return Local(name, tensor.numel, tensor.dtype, first.part(0, count * SIZES[tensor.dtype]))


def whole_states(
    file: TorchFile,
    order: Sequence[str],
    weights: Mapping[str, Tensor],
    optimizer: dict[Any, Any],
    groups: list[Any],
    args: Mapping[str, Any],
) -> Iterator[tuple[str, Place]]:
    """The states of an optimizer that is not distributed, each as a buffer of its own.

    It knows parameters by number: group by group, each in the `order` of the model.
    """
    member = members(groups, {name: weights[name].shape for name in order}, args)
    masters = optimizer.get("fp32_from_fp16_params", [])
    known = optimizer.get("optimizer", optimizer).get("state")
    if member is None or not isinstance(known, dict) or not isinstance(masters, list):
        raise UnsupportedCheckpoint(
            f"{file.path}: Megatron-Core's usual rule does not give the members of the groups",
            hint=WEIGHTS_ONLY,
        )
    for number, group in enumerate(groups):
        names = [name for name in order if member[name] == number]
        halves = iter(masters[number] if number < len(masters) else ())
        numbers = group.get("params")
        if not isinstance(numbers, list) or len(numbers) != len(names):
            raise InconsistentCheckpoint(
                f"{file.path}: group {number} has not the {len(names)} parameters of the model",
                hint=WEIGHTS_ONLY,
            )
        for name, key in zip(names, numbers, strict=True):
            weight = weights[name]
            state = {**known.get(key, {})}
            if weight.dtype != "F32":
                state["param"] = next(halves, None)
            tensors = {}
            for slot, tensor in state.items():
                if slot == "step":
                    continue
                if (
                    not isinstance(tensor, Tensor)
                    or tensor.shape != weight.shape
                    or tensor.dtype != "F32"
                    or not tensor.contiguous
                ):
                    raise InconsistentCheckpoint(
                        f"{file.path}: state {slot} of number {key} does not fit {name}",
                        hint=WEIGHTS_ONLY,
                    )
                runs = Runs([Fragment(0, tensor.numel, file.extent(tensor))])
                tensors["master" if slot == "param" else slot_name(slot)] = [runs]
            yield name, (Flat(name, weight.dtype, (weight.numel,), tensors), (0, 0))


def without_members(file: TorchFile, group: dict[str, Any], inner: dict[Any, Any]) -> Any:
    """A group without the numbers of its parameters, with the step that its states have."""
    numbers = group.get("params", ())
    result = {key: value for key, value in group.items() if key != "params"}
    known = inner.get("state", {})
    steps = [known[key].get("step") for key in numbers if key in known]
    if steps and "step" not in result and steps[0] is not None:
        values = [file.scalar(step) if isinstance(step, Tensor) else step for step in steps]
        if any(value != values[0] for value in values):
            raise InconsistentCheckpoint(f"{file.path}: the steps of parameters differ")
        result["step"] = values[0]
    return result
