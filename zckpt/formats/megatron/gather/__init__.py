"""Joins the ranks' tensors by Megatron-Core's own rule: `verify --gather` compares the result.

    rule.py     where a flat buffer has each parameter, and how tensor ranks cut it
    items.py    torch_dist: shards of stacked tensors, or flat buckets
    folders.py  mp_rank_*: state dicts and flat buffers of model-parallel ranks

These modules share only the parsers of files with the reader, so a proof does not repeat a mistake
of the reader. The reader runs first and refuses unknown or damaged files. megatron-core 0.16.1.
"""

from .items import partitions

__all__ = ["partitions"]
