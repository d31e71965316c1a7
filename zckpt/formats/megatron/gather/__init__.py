"""What Megatron-Core's ranks all-gather, by the engine's own rule, for `verify --gather`.

rule.py     where flat buffers have parameters
items.py    torch_dist: boxes of stacked tensors, or flat buckets
folders.py  mp_rank_*: state dicts and flat buffers of model-parallel ranks

These modules share only the parsers of files with the reader, so that a proof does not repeat a
mistake of it. The reader runs first and refuses unknown or damaged files. megatron-core 0.16.1.
"""

from .items import partitions

__all__ = ["partitions"]
