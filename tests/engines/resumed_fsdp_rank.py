"""The programs of `resumed_rank.py` that have no DeepSpeed, which other packages notice."""

from .resumed_rank import prepare_torch as prepare
from .resumed_rank import train

__all__ = ["prepare", "train"]
