"""Where the engines of the tests train: on processors, or on one GPU that the ranks share."""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch
from torch.utils import _pytree

DIED = "a rank died without a word"
DEVICE = os.environ.get("ENGINE_DEVICE", "cpu")


def prepare() -> None:
    torch.set_num_threads(1)
    importlib.import_module("torch._dynamo")  # the first optimizer would: 4 s in every rank
    if DEVICE == "cuda":  # a resumed run repeats its losses bit for bit, as on processors
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.backends.cudnn.allow_tf32 = False


def backend(ranks: int) -> str:
    """NCCL refuses ranks that share a GPU."""
    return "nccl" if DEVICE == "cuda" and ranks == 1 else "gloo"


def local(rank: int) -> int:
    """The number of the rank's GPU, which is its own number where there is none."""
    return rank if DEVICE == "cpu" else 0


def on_cpu(value: Any) -> Any:
    """Tensors where a process without a GPU can load them."""
    if DEVICE == "cpu":
        return value
    return _pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, value)
