"""Checkpoints of however many tiny tensors, in every format that zckpt reads.

zckpt's own writers make most of them, from a file of torch.save or from a manifest with more layers
than a real directory has.
"""

from __future__ import annotations

import argparse
import json
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from torch.distributed import checkpoint as dcp

import zckpt
from zckpt.core.checkpoint.manifest import Manifest
from zckpt.formats.reading import Reading
from zckpt.training.options import Options
from zckpt.writing import conversion
from zckpt.writing.run_options import Running

from ..conftest import ROOT

GroupOf = Callable[[int], int]
MEGATRON = ROOT / "tests" / "data" / "megatron-0.16.1-tp2"
LAYER = "decoder.layers.0."
TENSORS_OF_A_LAYER = 8

WRITTEN: dict[str, dict[str, Any]] = {
    "universal": {"to": "universal"},
    "safetensors": {"to": "gathered", "dialect": "safetensors"},
    "torch files": {"to": "gathered"},
    "DCP": {"to": "dcp"},
    "DeepSpeed, stage 0": {"to": "deepspeed", "dp": 2, "stage": 0},
    "DeepSpeed, stage 1": {"to": "deepspeed", "dp": 2, "stage": 1},
    "DeepSpeed, stage 3": {"to": "deepspeed", "dp": 2, "stage": 3},
    "DeepSpeed universal": {"to": "deepspeed-universal"},
    "ONNX Runtime, HDF5": {"to": "onnxruntime", "dp": 2},
    "ONNX Runtime, torch files": {"to": "onnxruntime", "dp": 2, "dialect": "l2"},
}
"""What zckpt writes from any model and its optimizer: the words of `zckpt.convert`."""


# -- a file of torch.save


def weights(count: int) -> dict[str, torch.Tensor]:
    return {f"layers.{n}.weight": torch.tensor([n + 1.0, 2.0]) for n in range(count)}


def tied(count: int) -> dict[str, torch.Tensor]:
    return dict.fromkeys(weights(count), torch.ones(2))


def one_group(number: int) -> int:
    """All parameters are in group 0."""
    return 0


def own_group(number: int) -> int:
    """Each parameter has a group of its own."""
    return number


def trained(count: int, group_of: GroupOf = one_group, key: str = "exp_avg") -> dict[str, Any]:
    """A model and its optimizer, in groups, with a state whose key may have the number."""
    model = weights(count)
    groups: dict[int, list[str]] = {}
    for number, name in enumerate(model):
        groups.setdefault(group_of(number), []).append(name)
    states = {
        name: {key.format(number): 2 * weight, "exp_avg_sq": 3 * weight, "step": 3}
        for number, (name, weight) in enumerate(model.items())
    }
    param_groups = [{"lr": 1e-3, "params": names} for names in groups.values()]
    return {"model": model, "optimizer": {"state": states, "param_groups": param_groups}}


TORCH: dict[str, Callable[[int], dict[str, Any]]] = {
    "weights": weights,
    "second names": tied,
    "buffers": lambda n: {f"bn.{i}.num_batches_tracked": torch.tensor(i) for i in range(n)},
    "one group": trained,
    "many groups": lambda n: trained(n, own_group),
    "a key of its own for each parameter": lambda n: trained(n, one_group, "state_{}"),
    "models": lambda n: {f"model_{i}": {"w": torch.tensor([i + 1.0, 2])} for i in range(n)},
    "of the program": lambda n: {"model": weights(1), "own": weights(n)},
}


def torch_file(path: Path, count: int, kind: str = "one group") -> None:
    torch.save(TORCH[kind](count), path)


# -- files of weights alone


def safetensors(path: Path, count: int) -> None:
    """Weights of one element, in two types."""
    header, offset = {}, 0
    for number in range(count):
        size, dtype = ((4, "F32"), (2, "BF16"))[number % 2]
        header[f"layers.{number}.w"] = {
            "dtype": dtype,
            "shape": [1],
            "data_offsets": [offset, offset + size],
        }
        offset += size
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(offset))


# -- a directory of each format


def written(path: Path, count: int, words: dict[str, Any], group_of: GroupOf = one_group) -> None:
    """A model and its optimizer, as `words` say."""
    source = path.with_name(f"{path.name}.pt")
    torch.save(trained(count, group_of), source)
    zckpt.convert(source, path, **words)


def megatron(path: Path, count: int) -> None:
    """Megatron-Core's `torch_dist`: the layer of a real directory, as often as `count` asks for."""
    manifest = with_layers(zckpt.read(MEGATRON), count // TENSORS_OF_A_LAYER)
    given = "convert", manifest, str(path), "megatron", Reading(), Options(()), Running()
    conversion.write(*given)


def with_layers(manifest: Manifest, count: int) -> Manifest:
    """The manifest with `count` layers, which all have the bytes of the first one."""

    def names(name: str) -> list[str]:
        if name.startswith(LAYER):
            rest = name.removeprefix(LAYER)
            return [f"decoder.layers.{number}.{rest}" for number in range(count)]
        return [] if name.startswith("decoder.layers.") else [name]

    kept = manifest.state["megatron"]
    objects = {key: item for key, item in kept["objects"].items() if "_extra_state" not in key}
    return replace(
        manifest,
        entries={
            (name, slot): replace(entry, parameter=name)
            for (before, slot), entry in manifest.entries.items()
            for name in names(before)
        },
        parameters={
            name: parameter
            for before, parameter in manifest.parameters.items()
            for name in names(before)
        },
        state={**manifest.state, "megatron": {**kept, "objects": objects}},
    )


def megatron_fsdp(path: Path, count: int) -> None:
    """Megatron-FSDP's `fsdp_dtensor`, in which each weight states the group that it is in."""
    names = [f"module.decoder.layers.{n}.mlp.linear_fc2.weight" for n in range(count)]
    states = {f"module.{name}": {"exp_avg": torch.ones(2, 2)} for name in names}
    groups = {f"module.{name}": {"lr": 0.1 + n, "step": 3} for n, name in enumerate(names)}
    state = {
        "args": argparse.Namespace(pipeline_model_parallel_size=1),
        "model": {name: torch.ones(2, 2) for name in names},
        "optimizer": {"state": states, "param_to_group_meta": groups},
        "rng_state": {"(0, 1)": [{"torch_rng_state": torch.ones(3)}]},
    }
    dcp.save(state, checkpoint_id=path, no_dist=True)


DIRECTORIES: dict[str, Callable[[Path, int], None]] = {
    **{name: partial(written, words=words) for name, words in WRITTEN.items()},
    "Megatron-Core": megatron,
}
