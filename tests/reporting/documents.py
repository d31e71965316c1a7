"""Documents as `zckpt report --json` gives them, made up: any size, and with planted faults.

The model is a small Llama under ZeRO-1: each data rank has an equal slice of the flat buffers of
masters and Adam's moments, and one file has all 16-bit weights.
"""

from __future__ import annotations

import math
import random
from typing import Any

from zckpt.core.passes.description import line_of
from zckpt.errors import note

Document = dict[str, Any]
SLOTS = {"param": 2, "master": 4, "exp_avg": 4, "exp_avg_sq": 4}
"""Bytes of an element."""
DTYPES = {"param": "BF16", "master": "F32", "exp_avg": "F32", "exp_avg_sq": "F32"}
WIDTH = 64
KINDS = {
    "self_attn.q_proj.weight": [WIDTH, WIDTH],
    "self_attn.k_proj.weight": [WIDTH // 2, WIDTH],
    "self_attn.v_proj.weight": [WIDTH // 2, WIDTH],
    "self_attn.o_proj.weight": [WIDTH, WIDTH],
    "mlp.gate_proj.weight": [3 * WIDTH, WIDTH],
    "mlp.up_proj.weight": [3 * WIDTH, WIDTH],
    "mlp.down_proj.weight": [WIDTH, 3 * WIDTH],
    "input_layernorm.weight": [WIDTH],
    "post_attention_layernorm.weight": [WIDTH],
}
BINS = ["0", "1", "2", "3-4", "5-8", "9-16", "17-32", "33-64", "65-128", "129-256", ">256"]
TITLES = {
    "param": "RMS of weights",
    "exp_avg": "RMS of exp_avg",
    "exp_avg_sq": "root of the mean of exp_avg_sq",
    "update": "RMS of Adam's update",
}
Parameter = tuple[str, str, str, list[int]]
"""Name, layer, kind and shape."""


def model(layers: int, experts: int = 0) -> list[Parameter]:
    """The parameters of a model in its order."""
    found: list[Parameter] = [
        ("model.embed_tokens.weight", "embed_tokens", "weight", [512, WIDTH]),
    ]
    for layer in range(layers):
        kinds = dict(KINDS)
        for expert in range(experts):
            for kind in ("gate", "up", "down"):
                kinds[f"mlp.experts.{expert}.{kind}_proj.weight"] = [WIDTH, WIDTH]
        found += [
            (f"model.layers.{layer}.{kind}", str(layer), kind, shape)
            for kind, shape in kinds.items()
        ]
    found.append(("model.norm.weight", "norm", "weight", [WIDTH]))
    return found


def report(parameters: list[Parameter], ranks: int = 4) -> Document:
    """A whole document without a fault, and without sections 6 and 7."""
    draw = random.Random(7)
    layers = list(dict.fromkeys(layer for _, layer, _, _ in parameters))
    kinds = list(dict.fromkeys(kind for _, _, kind, _ in parameters))
    row = {name: index for index, name in enumerate(layers)}
    column = {name: index for index, name in enumerate(kinds)}
    tensors: Document = {
        key: [] for key in ("name", "parameter", "slot", "dtype", "shape", "bytes")
    } | {key: [] for key in ("rms", "min", "max", "mean", "std", "nan", "inf", "zero", "denormal")}
    cells: dict[str, list[list[Any]]] = {key: [] for key in TITLES}
    groups: list[int] = []
    for name, layer, kind, shape in parameters:
        elements, depth = math.prod(shape), row[layer]
        base = 1.0 if "norm" in name else 0.02 * (1 + 0.03 * depth)
        for slot, size in SLOTS.items():
            scale = {"exp_avg": 2e-4, "exp_avg_sq": 3e-7}.get(slot, base)
            scale *= math.exp(draw.gauss(0, 0.25) + 0.02 * depth)
            index = len(tensors["name"])
            for key, value in {
                "name": f"{name}/{slot}",
                "parameter": name,
                "slot": slot,
                "dtype": DTYPES[slot],
                "shape": shape,
                "bytes": size * elements,
                "rms": scale,
                "min": 0.0 if slot == "exp_avg_sq" else -4.2 * scale,
                "max": 4.3 * scale,
                "mean": scale * 0.01,
                "std": scale,
                **dict.fromkeys(("nan", "inf", "zero", "denormal"), 0),
            }.items():
                tensors[key].append(value)
            groups.append(depth)
            if slot in cells:
                value = math.sqrt(scale) if slot == "exp_avg_sq" else scale
                cells[slot].append([depth, column[kind], value, index])
            if slot == "exp_avg":
                cells["update"].append([depth, column[kind], 0.1 + draw.random() * 0.2, index])
    total = sum(math.prod(shape) for *_, shape in parameters)
    number = len(parameters)
    folder = "global_step7"
    files = [
        {
            "name": f"{folder}/mp_rank_00_model_states.pt",
            "bytes": 2 * total + 4096,
            "rank": None,
            "state": "ok",
        }
    ] + [
        {
            "name": f"{folder}/bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
            "bytes": 12 * -(-total // ranks) + 4096,
            "rank": {"dp": rank, "tp": 0, "pp": 0},
            "state": "ok",
        }
        for rank in range(ranks)
    ]
    return {
        "zckpt": 1,
        "command": "report",
        "path": "/runs/llama-small/global_step7",
        "version": "0.1.0",
        "line": {
            "engine": "DeepSpeed 0.19.8, ZeRO-1",
            "format": "deepspeed",
            "name": folder,
            "sizes": {"dp": ranks, "tp": 1, "pp": 1},
            "step": 7,
            "steps": f"7 in all {ranks + 1} places",
            "bytes": sum(file["bytes"] for file in files),
            "files": len(files),
            "parameters": total,
            "trainable": total,
            "optimizer": "AdamW",
            "dtype": "BF16",
            "versions": {"deepspeed": "0.19.8", "torch": "2.13.0"},
            "checked": "checksums ok",
            "digest": "crc32:89ab01cd",
        },
        "faults": [],
        "tensors": tensors,
        "numbers": {
            "rows": layers,
            "columns": kinds,
            "measures": [
                {"key": key, "title": title, "unit": "", "cells": cells[key]}
                for key, title in TITLES.items()
            ],
        },
        "map": {
            "files": files,
            "groups": layers,
            "of_tensor": groups,
            "pieces": pieces(parameters, ranks, row),
            "damaged": [],
        },
        "masters": {
            "bins": BINS,
            "rows": [
                {
                    "layer": layer,
                    "counts": [
                        sum(math.prod(s) for _, own, _, s in parameters if own == layer),
                        *[0] * (len(BINS) - 1),
                    ],
                    "worst": 0,
                    "tensor": 4 * next(i for i, p in enumerate(parameters) if p[1] == layer),
                }
                for layer in layers
            ],
            "elements": total,
            "differ": 0,
        },
        "steps": {
            "true": 7,
            "places": [
                {
                    "file": files[0]["name"],
                    "where": "global_steps",
                    "step": 7,
                    "agrees": True,
                    "parameters": number,
                },
                {
                    "file": None,
                    "where": "lr_scheduler, last_batch_iteration",
                    "step": 8,
                    "agrees": None,
                    "parameters": None,
                },
                *(
                    {
                        "file": file["name"],
                        "where": "optimizer_state_dict.base_optimizer_state.state.0.step",
                        "step": 7,
                        "agrees": True,
                        "parameters": number,
                    }
                    for file in files[1:]
                ),
            ],
            "groups": [
                {
                    "number": index,
                    "parameters": number // 2,
                    "values": {
                        "lr": 0.0003,
                        "betas": [0.9, 0.95],
                        "eps": 1e-8,
                        "weight_decay": decay,
                        "bias_correction": True,
                    },
                }
                for index, decay in enumerate((0.1, 0.0))
            ],
            "differing": ["weight_decay"],
        },
    }


def pieces(parameters: list[Parameter], ranks: int, row: dict[str, int]) -> Document:
    """Who has what: an equal slice of the flat buffer per rank, and all weights in file 0."""
    found: Document = {
        key: [] for key in ("file", "tensor", "group", "slot", "start", "stop", "offset", "length")
    }
    total = sum(math.prod(shape) for *_, shape in parameters)
    share = -(-total // ranks)
    place = 0
    for number, (_, layer, _, shape) in enumerate(parameters):
        elements = math.prod(shape)
        for slot_number, (slot, size) in enumerate(SLOTS.items()):
            owners = range(ranks) if slot != "param" else (-1,)
            for rank in owners:
                low, high = (0, total) if rank < 0 else (rank * share, (rank + 1) * share)
                start, stop = max(low - place, 0), min(high - place, elements)
                if start >= stop:
                    continue
                buffer = max(slot_number - 1, 0) * 4 * share
                for key, value in {
                    "file": rank + 1,
                    "tensor": len(SLOTS) * number + slot_number,
                    "group": row[layer],
                    "slot": slot,
                    "start": start,
                    "stop": stop,
                    "offset": 1024 + buffer + size * (place + start - low),
                    "length": size * (stop - start),
                }.items():
                    found[key].append(value)
        place += elements
    return found


def good(layers: int = 4, ranks: int = 4) -> Document:
    """A checkpoint without a fault."""
    return report(model(layers), ranks)


def fault(kind: str, message: str, **place: Any) -> Document:
    nothing = {"tensor": None, "file": None, "offset": None, "length": None}
    odd = kind in ("dead", "constant", "denormal", "warning")
    return nothing | {"kind": kind, "fault": not odd, "message": message} | place


def faulty(layers: int = 6, known: bool = False) -> Document:
    """Every fault once: flipped bit, lost rank, NaN, stale master, another step, dead layer.

    `known`: the other files tell which elements the lost rank had.
    """
    document = good(layers)
    tensors, numbers, drawn = document["tensors"], document["numbers"], document["map"]
    flipped = "model.layers.1.mlp.down_proj.weight/exp_avg"
    broken = "model.layers.2.self_attn.q_proj.weight/param"
    dead = "model.layers.3.mlp.gate_proj.weight/exp_avg"
    stale = "model.layers.4.self_attn.o_proj.weight/master"
    tiny = "model.layers.0.mlp.up_proj.weight/exp_avg_sq"
    index = {name: place for place, name in enumerate(tensors["name"])}

    lost = drawn["files"][3]
    lost["state"] = "missing"
    lost["bytes"] = None
    keep = [place for place, file in enumerate(drawn["pieces"]["file"]) if known or file != 3]
    drawn["pieces"] = {key: [some[i] for i in keep] for key, some in drawn["pieces"].items()}
    where = next(
        i for i, tensor in enumerate(drawn["pieces"]["tensor"]) if tensor == index[flipped]
    )
    damaged = drawn["pieces"]["file"][where]
    offset = drawn["pieces"]["offset"][where] + 64
    drawn["files"][damaged]["state"] = "damaged"
    drawn["damaged"] = [
        {"file": damaged, "offset": offset, "length": 4096, "tensor": index[flipped]}
    ]
    for name, values in {
        broken: {"rms": None, "nan": 17},
        dead: {"rms": 0.0, "min": 0.0, "max": 0.0, "zero": 3 * WIDTH * WIDTH},
        tiny: {"denormal": 812},
    }.items():
        for key, value in values.items():
            tensors[key][index[name]] = value
    for measure in numbers["measures"]:
        for cell in measure["cells"]:
            name = tensors["name"][cell[3]]
            if name == broken:
                cell[2] = None
            elif name == dead:
                cell[2] = 0.0
            elif measure["key"] == "update" and cell[0] == 5:
                cell[2] *= 2.3
    document["masters"]["rows"][5] |= {"worst": 412, "tensor": index[stale]}
    counts = document["masters"]["rows"][5]["counts"]
    moved = [0, 40, 92, 210, 420, 701, 900, 811, 540, 260, 122]
    document["masters"]["rows"][5]["counts"] = [
        counts[0] - sum(moved),
        *moved[1:],
    ]
    document["masters"]["differ"] = sum(moved)
    document["steps"]["places"][3] |= {"step": 6, "agrees": False}
    document["line"] |= {
        "steps": "7 in 4 places, 6 in one",
        "checked": "1 of 248 checksums is wrong",
        "digest": None,
    }
    file = drawn["files"][damaged]["name"]
    document["faults"] = [
        fault(
            "missing",
            f"{lost['name']} is missing: rank dp 2, a quarter of masters, exp_avg and exp_avg_sq",
            file=lost["name"],
        ),
        fault(
            "checksum",
            f"{flipped} does not have the bytes of its checksum",
            tensor=flipped,
            file=file,
            offset=offset,
            length=4096,
        ),
        fault(
            "NaN",
            f"{broken} has 17 NaN among 4,096 elements",
            tensor=broken,
            file=drawn["files"][0]["name"],
            offset=24_576,
            length=8192,
        ),
        fault(
            "stale",
            f"{stale} is stale: rounded, it is up to 412 ULP from the BF16 weight",
            tensor=stale,
            file=drawn["files"][4]["name"],
            offset=8192,
            length=16_384,
        ),
        fault(
            "step",
            f"{drawn['files'][2]['name']} states step 6, and the other places state 7",
            file=drawn["files"][2]["name"],
        ),
        fault("dead", f"{dead} is dead: every element is zero", tensor=dead, file=file),
        fault("denormal", f"{tiny} has 812 denormal elements", tensor=tiny, file=file),
    ]
    return document


def big(tensors: int = 50_000) -> Document:
    """A mixture of experts with at least so many tensors; pieces are summed, as beyond 20,000."""
    layers = 32
    experts = -(-(tensors // len(SLOTS) // layers - len(KINDS)) // 3) + 1
    document = report(model(layers, experts), ranks=8)
    found = document["map"]["pieces"]
    sums: dict[tuple[int, int, str], list[int]] = {}
    for file, group, slot, start, stop, length in zip(
        *(found[key] for key in ("file", "group", "slot", "start", "stop", "length")), strict=True
    ):
        entry = sums.setdefault((file, group, slot), [0, 0])
        entry[0] += stop - start
        entry[1] += length
    keys = list(sums)
    document["map"]["pieces"] = {
        "file": [key[0] for key in keys],
        "tensor": None,
        "group": [key[1] for key in keys],
        "slot": [key[2] for key in keys],
        "start": [0] * len(keys),
        "stop": [sums[key][0] for key in keys],
        "offset": [0] * len(keys),
        "length": [sums[key][1] for key in keys],
    }
    return document


HOSTILE = [
    "<script>document.title='ran'</script>",
    "\"><img src=x onerror=document.title='ran'>",
    "</script><script>document.title='ran'</script>",
    "{{ 7 * 7 }}{% raw %}",
    "\u202egnp.\u202d\u200b",
    "אבגד.weight",
    "line\nbreak\x00\x1b[31m\ud800",
    "|`]]>--><!--&amp;",
    "x" * 10_000,
]


def hostile() -> Document:
    """Names that try to be HTML, templates, or unreadable, at every place of the document."""
    parameters = [
        (f"model.layers.{layer}.{name}", f"{layer}{name}", name, [WIDTH, WIDTH])
        for layer in range(2)
        for name in HOSTILE
    ]
    document = report(parameters, ranks=2)
    for place, file in enumerate(document["map"]["files"]):
        file["name"] = HOSTILE[place] + HOSTILE[4]
    document["path"] = HOSTILE[0]
    document["line"] |= {
        "name": HOSTILE[0],
        "engine": HOSTILE[1],
        "versions": {HOSTILE[0]: HOSTILE[5]},
        "sizes": {HOSTILE[0]: 2},
    }
    document["faults"] = [fault("dead", f"{name} is dead", tensor=name) for name in HOSTILE]
    document["faults"][0] |= {"file": HOSTILE[2], "offset": 3}
    for place in document["steps"]["places"]:
        place |= {"file": HOSTILE[0], "where": HOSTILE[1]}
    document["steps"]["groups"][0]["values"][HOSTILE[0]] = HOSTILE[2]
    return document


def against() -> Document:
    """Section 6, of two checkpoints that differ."""
    draw = random.Random(11)
    layers = ["embed_tokens", *map(str, range(12)), "norm"]
    return {
        "path": "/runs/llama-small/global_step5",
        "step": 5,
        "layers": [
            {
                "layer": layer,
                "rms": 1e-4 * math.exp(draw.gauss(0, 0.6)) * (40 if layer == "9" else 1),
                "relative": 4e-3 * math.exp(draw.gauss(0, 0.6)) * (40 if layer == "9" else 1),
                "largest": 2e-3 * math.exp(draw.gauss(0, 0.6)),
                "tensor": 4 * place,
                "elements": 55_424,
                "changed": 55_000 - place,
            }
            for place, layer in enumerate(layers)
        ],
        "histogram": {
            "first": -30,
            "counts": [int(9e5 * math.exp(-(((k - 13) / 4) ** 2))) for k in range(24)],
        },
        "histograms": [
            None if layer == "norm" else {"first": -30 + place, "counts": [1, 40 + place, 900, 7]}
            for place, layer in enumerate(layers)
        ],
        "first": {
            "tensor": None,
            "name": "only.here/param",
            "element": 3,
            "a": 0.0125,
            "b": 0.0127,
        },
        "worst": {"tensor": 41, "element": 1033, "a": -0.5, "b": 1.25},
        "proof": [
            {"what": "152 tensors", "by": "bits", "result": "differ"},
            {"what": "hyper-parameters of 2 groups", "by": "values", "result": "1 differs"},
        ],
        "not_compared": [
            line_of(note("not-compared", message))
            for message in (
                "The states of the data loader have no counterpart in the other one.",
                *(f"only there: extra.{number}/param" for number in range(30)),
            )
        ],
        "differences": [{"what": "lr of group 0", "a": 0.0003, "b": 0.00029}],
    }


def run(checkpoints: int = 8) -> Document:
    """A run with several checkpoints, one of which was not saved whole; with section 6."""
    document = good(12)
    draw = random.Random(3)
    rows = document["numbers"]["rows"]
    document["run"] = {
        "checkpoints": [
            {
                "name": f"global_step{100 * (number + 1)}",
                "step": 100 * (number + 1),
                "bytes": document["line"]["bytes"] // (2 if number == 5 else 1),
                "dp": 4 if number < 4 else 8,
                "whole": number != 5,
                "why": "2 of 4 ranks' files are missing" if number == 5 else None,
                "norms": {
                    row: 3 * math.exp(0.04 * number + draw.gauss(0, 0.05)) * (1 + 0.1 * place)
                    for place, row in enumerate(rows)
                },
                "updates": {
                    row: 0.2 * math.exp(draw.gauss(0, 0.1)) * (2.4 if number == 7 else 1)
                    for row in rows
                },
            }
            for number in range(checkpoints)
        ],
        "rows": rows,
        "shown": checkpoints - 1,
    }
    unread = document["run"]["checkpoints"][2]
    unread |= dict.fromkeys(("step", "bytes", "dp")) | {"whole": False, "norms": {}, "updates": {}}
    document["against"] = against()
    document["path"] = "/runs/llama-small"
    document["line"] |= {"name": f"global_step{100 * checkpoints}", "step": 100 * checkpoints}
    return document


def compared() -> Document:
    """The document of a checkpoint beside another one."""
    return faulty() | {"against": against()}


def probed() -> Document:
    """The document of `probe-diff --html`: it has one section only."""
    keep = {"zckpt", "path", "version", "line", "faults", "against"}
    return {key: value for key, value in compared().items() if key in keep} | {
        "command": "probe-diff"
    }
