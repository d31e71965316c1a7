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
        ({"dp": 3}, ["saved by 4 data-parallel ranks; 3 are asked for"]),
        (
            {"tp": 2, "pp": 4},
            [
                "saved by 1 tensor-parallel rank; 2 are asked for",
                "saved by 1 pipeline rank; 4 are asked for",
            ],
        ),
        ({"dtype": "fp32"}, ["saved with type BF16; F32 is asked for"]),
        ({"stage": 3}, ["saved with ZeRO stage 2; 3 is asked for"]),
    ],
)
def test_what_differs(options: dict[str, Any], expected: list[str]) -> None:
    found = obstacles(zckpt.read(EXAMPLE), options_of(options))
    assert texts(found) == expected
    assert all(problem.code == "size-differs" for problem in found)
