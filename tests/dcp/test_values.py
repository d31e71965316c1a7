"""Values of a pickle as objects: only of known classes, whatever the pickle says."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch

from zckpt.core.checkpoint.inert import Foreign, Global, Scalar, Size
from zckpt.dcp.values import NotLoaded, rebuilt

ARRAY = Global("numpy.core.multiarray._reconstruct")
NDARRAY = Global("numpy.ndarray")
FLOATS = Foreign(Global("numpy.dtype"), ("f8", False, True), (3, "<", None, None, None, -1, -1, 0))


def array(shape: Any, dtype: Any, data: Any, cls: Global = NDARRAY) -> Foreign:
    return Foreign(ARRAY, (cls, (0,), b"b"), (1, shape, dtype, False, data))


def no_tensor(_: Any) -> torch.Tensor:
    raise AssertionError


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


HOSTILE = {
    "too few bytes": (array((10**12,), FLOATS, b"\0" * 8), "malformed"),
    "a negative size": (array((-1,), FLOATS, b""), "malformed"),
    "objects": (
        array((1,), Foreign(Global("numpy.dtype"), ("O8", False, True)), [1]),
        "type object",
    ),
    "another class": (array((1,), FLOATS, b"\0" * 8, Global("os.system")), "os.system"),
    "a type that is code": (array((1,), Global("os.system"), b""), "without a dtype"),
    "a call of a call": (Foreign(Foreign(Global("torch.device"), ("cpu",)), ()), "torch.device"),
    "a function": (Global("os.system"), "os.system"),
    "no dtype of torch": (Global("torch.save"), "torch.save"),
    "no class of builtins": (Global("builtins.eval"), "builtins.eval"),
    "an unhashable member": (Foreign(Global("collections.Counter"), ([[1]],)), "malformed"),
    "a bad date": (Foreign(Global("datetime.datetime"), (b"\xff" * 10,)), "malformed"),
    "names that are numbers": (
        Foreign(Global("argparse.Namespace"), (), {1: 2}, "new"),
        "malformed",
    ),
    "no device": (Foreign(Global("torch.device"), ("nowhere",)), "malformed"),
    "depth": (nested(100_000), "nested too deeply"),
    "another type": (object(), "object"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_not_made(name: str) -> None:
    value, reason = HOSTILE[name]
    with pytest.raises(NotLoaded, match=reason):
        rebuilt({"a": [value]}, no_tensor)


def test_one_object_stays_one() -> None:
    shared = [1]
    whole = rebuilt({"a": shared, "b": (shared, OrderedDict(c=shared))}, no_tensor)
    assert whole["a"] is whole["b"][0] is whole["b"][1]["c"]
    assert whole["a"] is not shared
    itself: list[Any] = [0]
    itself.append(itself)
    result = rebuilt(itself, no_tensor)
    assert result[1] is result


def test_doubling_takes_no_time() -> None:
    value: list[Any] = [0]
    for _ in range(80):  # 2**80 values, were they not shared
        value = [value, value]
    result = rebuilt(value, no_tensor)
    assert result[0] is result[1]


def test_scalars_and_sizes_are_torch_s() -> None:
    value = rebuilt((Scalar(2.5, "BF16"), Size((2, 3)), Global("torch.int8")), no_tensor)
    assert torch.equal(value[0], torch.tensor(2.5, dtype=torch.bfloat16))
    assert value[0].dtype == torch.bfloat16
    assert value[1:] == (torch.Size((2, 3)), torch.int8)
    assert type(value[1]) is torch.Size
