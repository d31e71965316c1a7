"""A storage reader for torch.distributed.checkpoint that loads any checkpoint without converting.

    reader = zckpt.dcp.StorageReader("deepspeed_run")
    torch.distributed.checkpoint.load({"model": ..., "optim": ...}, storage_reader=reader)

    reader.py     StorageReader, which torch's loading calls
    source.py     the keys that a checkpoint lists, and the meaning of a program's key
    keys.py       splits a key into a prefix and the name of a weight, state or group
    table.py      the metadata that torch's planners see
    target.py     fills the state dict: values and tensors
    lacking.py    reports all keys that cannot be filled in one error
    groups.py     finds hyper-parameters for a program's groups, by parameter
    regions.py    reads shards of tensors from files into tensors
    values.py     makes objects of known classes; no pickle of a checkpoint is run

It replaces torch's FileSystemReader and loads the same values, except for objects of classes that a
program defines.
"""

from __future__ import annotations

from ..errors import MissingExtra

try:
    from .reader import StorageReader
except ImportError as error:
    raise MissingExtra(
        "extra-missing",
        "zckpt.dcp needs torch, which is not installed",
        hint="pip install torch safetensors",
    ) from error

__all__ = ["StorageReader"]
