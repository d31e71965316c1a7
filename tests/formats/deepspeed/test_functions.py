"""Why a run does not load files as they are: what of it differs."""

from __future__ import annotations

from typing import Any

import pytest

import zckpt
from zckpt.formats.deepspeed.functions import obstacles
from zckpt.formats.options import options_of

from ...conftest import EXAMPLE, texts


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, []),
        ({"dp": 4}, []),
        ({"dp": 3}, ["dp 4, and not 3"]),
        ({"tp": 2, "pp": 4}, ["tp 1, and not 2", "pp 1, and not 4"]),
        ({"dtype": "fp32"}, ["type BF16, and not F32"]),
        ({"stage": 3}, ["ZeRO stage 2, and not 3"]),
    ],
)
def test_what_differs(options: dict[str, Any], expected: list[str]) -> None:
    found = obstacles(zckpt.read(EXAMPLE), options_of(options))
    assert texts(found) == expected
    assert all(problem.code == "size-differs" for problem in found)
