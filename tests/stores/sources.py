"""Which checkpoints do the tests of stores take? Those of the repository, and small ones of zckpt.

A row names a source, where it comes from, and what is written from it.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct, field

import zckpt

from ..conftest import EXAMPLE, ROOT

DATA = ROOT / "tests" / "data"
TRAINER = ROOT / "examples" / "trainer" / "checkpoint-4"
Words = Mapping[str, Any]
OWN = Path(__file__).parent / "own-config"  # of a class that is not of transformers
RESHARD = {"dp": 3, "stage": 3}


class Source(Struct, frozen=True):
    """A checkpoint: its path, or how zckpt writes it from examples/run; and what is made of it.

    `reshard` and `export` are the options of these functions; None leaves them out.
    """

    path: Path | None = None
    made: Words = field(default_factory=dict)
    convert: Words = field(default_factory=dict)
    reshard: Words | None = None
    export: Words | None = None
    within: str = ""  # the checkpoint's file or folder in what was uploaded


SOURCES: dict[str, Source] = {
    "run": Source(EXAMPLE, reshard=RESHARD, export={"config": OWN}),
    "tag": Source(EXAMPLE, within="global_step7", convert={"to": "dcp", "dp": 3}),
    "universal": Source(made={"to": "universal"}, reshard=RESHARD, export={"config": OWN}),
    "deepspeed-universal": Source(made={"to": "deepspeed-universal"}, reshard=RESHARD),
    "dcp": Source(made={"to": "dcp", "dp": 2}, reshard={"dp": 3}, export={"config": OWN}),
    "gathered": Source(made={"to": "gathered"}, convert={"to": "deepspeed", "dp": 2, "stage": 1}),
    "onnxruntime": Source(
        made={"to": "onnxruntime", "dp": 2, "dialect": "l2"},
        convert={"to": "gathered"},
    ),
    "trainer": Source(TRAINER, export={"dtype": "bf16"}, reshard=RESHARD),
    "hf file": Source(TRAINER, within="model.safetensors"),
    "zero-3": Source(DATA / "zckpt-0.1-z3_dp3", reshard={"dp": 2, "stage": 1}),
    "pipeline": Source(DATA / "zckpt-0.1-pp2_tp2" / "run", reshard={"pp": 1, "tp": 1}),
    "old deepspeed": Source(DATA / "deepspeed-0.8.2-z1_dp2_bf16" / "run"),
    "sub groups": Source(DATA / "deepspeed-0.11.0-z3_dp2_sub_groups" / "run"),
    "fsdp2": Source(DATA / "fsdp2-2.13.0-w2", convert={"to": "dcp", "dp": 3}),
    "automodel": Source(DATA / "automodel-0.7.0-w2"),
    "adapter": Source(DATA / "automodel-0.7.0-lora-w2"),
    "megatron": Source(DATA / "megatron-0.16.1-tp2"),
    "megatron fsdp": Source(DATA / "megatron-0.16.1-fsdp"),
    "megatron legacy": Source(DATA / "megatron-0.16.1-legacy-tp2"),
    "experts": Source(DATA / "megatron-0.16.1-legacy-ep2"),
    "hdf5": Source(DATA / "onnxruntime" / "hdf5__fp16__adam__dp3", convert={"to": "gathered"}),
    "ort.pt": Source(DATA / "onnxruntime" / "legacy-post5478__fp32__adam__dp2"),
    "real ort": Source(
        DATA / "onnxruntime" / "real-ort-1.16.3__fp32__adam__dp1", within="checkpoint.ortcp"
    ),
    "items": Source(DATA / "torch_checkpointing-0.1.1-w2" / "items"),
    "pt file": Source(DATA / "torchao-0.18.0" / "adamw8bit.pt"),
    "safetensors file": Source(DATA / "megatron-0.16.1-tp2" / "expected.safetensors"),
}


def local(name: str, folder: Path) -> Path:
    """The source on this machine; a single file is in a folder by itself."""
    source = SOURCES[name]
    if source.path is None:
        zckpt.convert(EXAMPLE, folder / "source", **source.made)
        return folder / "source"
    if source.path.is_file():
        (folder / "source").mkdir(parents=True)
        return Path(shutil.copy(source.path, folder / "source"))
    return source.path
