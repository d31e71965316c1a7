"""The programs of `needs_rank.py` that train with DeepSpeed, which other packages notice."""

from . import needs_rank, resumed_rank
from .needs_rank import train

__all__ = ["prepare", "train"]


def prepare() -> None:
    resumed_rank.prepare()
    needs_rank.prepare()
