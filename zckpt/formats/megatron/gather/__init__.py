"""Megatron-Core's own all-gather rule for what its ranks hold, for `verify --gather`.

    rule.py     the places of parameters in flat buffers
    items.py    torch_dist: boxes of stacked tensors, or flat buckets
    folders.py  mp_rank_*: state dicts and flat buffers of model-parallel ranks

With the reader, these modules share only the parsers of files, so a proof does not repeat a mistake
of the reader. The reader runs first and refuses unknown or damaged files. megatron-core 0.16.1.
"""

from .items import partitions

__all__ = ["partitions"]
