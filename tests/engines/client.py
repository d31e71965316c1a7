"""Values that people put into a checkpoint beside their weights."""

from __future__ import annotations

import argparse
import enum
from collections import OrderedDict
from pathlib import PurePosixPath
from typing import Any

import numpy
import torch


class Flavour(enum.Enum):
    """A class that only the training program knows."""

    SOUR = "sour"


CLASSES = ("pathlib.PurePosixPath", f"{__name__}.Flavour")
"""Classes that are written into a pickle only if the user admits them."""


def odd_state() -> dict[str, Any]:
    return {
        "iteration": 3,
        "args": argparse.Namespace(lr=0.1, layers=[1, 2], dtype=torch.bfloat16),
        "tuple": (1, "two", (3.0,)),
        "set": {1, 2, 3},
        "bytes": b"\x00\xff",
        "by number": {1: "one", 2: {"nested": None}},
        "not a number": float("nan"),
        "numpy scalar": numpy.float64(0.25),
        "numpy array": numpy.arange(6, dtype=numpy.int32).reshape(2, 3),
        "torch rng": torch.Generator().manual_seed(5).get_state(),
        "numpy rng": numpy.random.RandomState(5).get_state(),
        "dtype": torch.bfloat16,
        "shape": torch.Size([2, 3]),
        "flavour": Flavour.SOUR,
        "path": PurePosixPath("some/where"),
        "ordered": OrderedDict(b=1, a=2),
        "weights": {"average": torch.arange(10, dtype=torch.float64).reshape(2, 5).t()},
        "huge": 1 << 100,
    }


def fail_to_load(src: Any, dst: Any) -> None:
    """A `custom_load_fn` of a program with a fault of its own."""
    raise RuntimeError("the program's own fault")
