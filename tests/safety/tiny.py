"""The smallest checkpoint of each format: two groups, a tied weight, a buffer, a schedule.

Everything is converted from files of torch.save, which a few steps of torch itself give.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

NAMES = ("embed.weight", "layer.weight", "layer.bias")

# the options that make each of them; the source of "safetensors" is the weights alone
TARGETS = {
    "universal": ("--to", "universal"),
    "deepspeed-1": ("--to", "deepspeed", "--stage", "1", "--dp", "2"),
    "deepspeed-2": ("--to", "deepspeed", "--stage", "2", "--dp", "2"),
    "deepspeed-3": ("--to", "deepspeed", "--stage", "3", "--dp", "2"),
    "deepspeed-universal": ("--to", "deepspeed-universal"),
    "onnxruntime": ("--to", "onnxruntime", "--dp", "2"),
    "onnxruntime-l2": ("--to", "onnxruntime", "--dp", "2", "--dialect", "l2"),
    "dcp": ("--to", "dcp", "--dp", "1"),
    "gathered": ("--to", "gathered"),
    "safetensors": ("--to", "gathered", "--dialect", "safetensors"),
}
# with fewer items, and one file instead of two: every bit of the others would take hours
SMALLER = {
    "dcp-sgd": ("--to", "dcp", "--dp", "1"),
    "onnxruntime-dp1": ("--to", "onnxruntime", "--dp", "1"),
}
# what tests of all pairs read and write
SOURCES = ("deepspeed-3", "deepspeed-universal", "onnxruntime", "dcp", "gathered", "universal")
WRITTEN = ("deepspeed-2", *SOURCES[1:], "hf")


def gathered(root: Path, name: str = "run") -> Path:
    """`checkpoint.pt` beside a trainer's files, saved after two steps of torch.

    The run "sgd" has one group.
    """
    import torch

    torch.manual_seed(0)
    embed, layer = torch.nn.Embedding(3, 2), torch.nn.Linear(2, 3)
    head = torch.nn.Linear(2, 3, bias=False)
    head.weight = embed.weight
    model = torch.nn.ModuleDict({"embed": embed, "layer": layer, "head": head})
    model.register_buffer("mean", torch.tensor([0.25, 4.0]))
    groups = [
        {"params": [embed.weight, layer.weight], "weight_decay": 0.1},
        {"params": [layer.bias], "weight_decay": 0.0},
    ]
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(groups, lr=0.003)
    if name == "sgd":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.003, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for _ in range(2):
        (head(embed(torch.tensor([0, 1]))).square().sum() + layer(embed.weight).sum()).backward()
        optimizer.step()
        schedule.step()
    folder = root / name
    folder.mkdir(parents=True)
    torch.save(
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": schedule.state_dict(),
            "epoch": 2,
            "run": {"name": "tiny", "losses": [1.5, 0.75]},
        },
        folder / "checkpoint.pt",
    )
    (folder / "config.json").write_text(json.dumps({"hidden": 2}))
    return folder


def names_file(root: Path) -> Path:
    """The order of the parameters, for sources that do not state it."""
    path = root / "names.txt"
    path.write_text("".join(f"{name}\n" for name in NAMES))
    return path


def create(root: Path, kind: str, convert: Callable[..., object]) -> Path:
    """The checkpoint of one kind, by `convert(source, target, *options)`."""
    name = "sgd" if kind == "dcp-sgd" else "run"
    if not (root / name).exists():
        gathered(root, name)
    target = root / kind
    convert(root / name, target, *(TARGETS | SMALLER)[kind])
    return target
