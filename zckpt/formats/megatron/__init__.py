"""Megatron-Core's checkpoints of the kind `torch_dist`, 0.14 and later. They are only read.

    files.py     which directory is meant; the kinds that are refused
    common.py    what the ranks share: arguments, hyper-parameters, the step
    names.py     names of parameters, from keys under which layers are stacked
    groups.py    which group each parameter is in, and its step
    read.py      the manifest, and the check of masters against weights

Facts in this package are of megatron-core 0.16.1 unless said otherwise.
"""

from ..format import Format

FORMAT = Format(
    name="megatron",
    folder="megatron",
    about="Megatron-Core torch_dist: fully_reshardable, not distributed",
    family="megatron",
    options=(),
    writes=False,
    numbers=True,
    checks=True,
    objects=frozenset(),
)
