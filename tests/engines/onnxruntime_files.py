"""Write ONNX Runtime's ZeRO-1 checkpoints as its sources define them, from a whole state.

No public build of ONNX Runtime can run its own ZeRO (it needs NCCL), so files of several ranks are
written here, by the documented rule, element by element, without any of zckpt's code. The real
ORTTrainer and ORT's own aggregators judge such files in onnxruntime_real.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch
from torch import Tensor

SHAPES = {
    "layer.2.weight": (8, 12),
    "layer.2.bias": (12,),
    "Emb.weight": (33, 8),
    "conv.weight": (2, 1, 3),
    "layer.10.weight": (12, 12),
    "layer.10.bias": (12,),
    "scale": (1,),
    "head.weight": (12, 3),
}
FROZEN = {"frozen.weight": (5, 7), "Zero.frozen": (3,)}
HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass
class State:
    """What all ranks together hold; `steps` are completed updates by weight."""

    precision: str  # fp32, fp16 or bf16
    optimizer: str  # Adam, Lamb
    weights: dict[str, Tensor]
    moments: dict[str, dict[str, Tensor]]  # Moment_1, Moment_2, by weight
    steps: dict[str, int]
    frozen: dict[str, Tensor] = field(default_factory=dict)
    kept: frozenset[str] = frozenset()  # weights that a mixed run keeps in fp32
    initial: dict[str, Tensor] = field(default_factory=dict)  # what stale copies hold

    @property
    def mixed(self) -> bool:
        return self.precision != "fp32"

    def is_apart(self, name: str) -> bool:
        """Whether only its owners hold its fp32 values."""
        return self.mixed and name not in self.kept

    def half(self, name: str) -> Tensor:
        return self.weights[name].to(HALVES[self.precision])

    def expected(self, halves: bool = True, moments: bool = True) -> dict[str, Tensor]:
        """Tensors by `parameter/slot`, as zckpt names them."""
        tensors = {f"{name}/param": tensor for name, tensor in self.frozen.items()}
        for name, weight in self.weights.items():
            tensors[f"{name}/{'master' if self.is_apart(name) else 'param'}"] = weight
            if self.is_apart(name) and halves:
                tensors[f"{name}/param"] = self.half(name)
            if moments:
                tensors[f"{name}/exp_avg"] = self.moments["Moment_1"][name]
                tensors[f"{name}/exp_avg_sq"] = self.moments["Moment_2"][name]
        return tensors


def make(
    precision: str = "fp32",
    optimizer: str = "Adam",
    *,
    shapes: Mapping[str, tuple[int, ...]] = SHAPES,
    frozen: Mapping[str, tuple[int, ...]] | None = None,
    kept: Iterable[str] = (),
    moments: torch.dtype = torch.float32,
    step: int = 5,
    seed: int = 3,
) -> State:
    """A state of random numbers."""
    draw = torch.Generator().manual_seed(seed)

    def tensor(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=draw)

    return State(
        precision,
        optimizer,
        {name: tensor(shape) for name, shape in shapes.items()},
        {
            "Moment_1": {name: tensor(shape).to(moments) for name, shape in shapes.items()},
            "Moment_2": {name: tensor(shape).abs().to(moments) for name, shape in shapes.items()},
        },
        dict.fromkeys(shapes, step),
        {name: tensor(shape) for name, shape in (frozen or {}).items()},
        frozenset(kept),
        {name: tensor(shape) for name, shape in shapes.items()},
    )


def owned(weights: Mapping[str, Tensor], dp: int) -> list[dict[str, tuple[int, int]]]:
    """For every rank the elements [start, stop) of each weight that it owns."""
    total = sum(weight.numel() for weight in weights.values())
    padded = total + 1
    while padded % (32 * dp):
        padded += 1
    rank_of = np.arange(padded) // (padded // dp) if dp > 1 else np.zeros(padded, int)
    owned_by_rank: list[dict[str, tuple[int, int]]] = [{} for _ in range(dp)]
    begin = 0
    for name in sorted(weights, key=lambda name: name.encode()):
        ranks = rank_of[begin : begin + weights[name].numel()]
        for rank in range(dp):
            mine = np.flatnonzero(ranks == rank)
            if len(mine):
                owned_by_rank[rank][name] = int(mine[0]), int(mine[-1]) + 1
        begin += weights[name].numel()
    return owned_by_rank


def view(name: str, start: int, stop: int, numel: int) -> str:
    """`_view_K`, where K counts the pieces before, mine and after that are not empty."""
    return "" if (start, stop) == (0, numel) else f"_view_{int(start > 0)}"


def part(tensor: Tensor, start: int, stop: int) -> Tensor:
    if (start, stop) == (0, tensor.numel()):
        return tensor.clone()
    return tensor.reshape(-1)[start:stop].clone()


# -- torch.save


def legacy_dictionary(
    state: State,
    dp: int,
    rank: int,
    dialect: str,
    *,
    old_front_end: bool = False,
    without: str = "",
) -> dict[str, Tensor]:
    """The dictionary `model` of one rank.

    `without` is "" for all, "optimizer" for a set whose optimizer keys were left out, "torch names"
    for what `include_optimizer_state=False` leaves of a torch model.
    """
    model: dict[str, Tensor] = {}
    shares = owned(state.weights, dp)[rank]
    for name, weight in state.weights.items():
        start, stop = shares.get(name, (0, 0))
        whole = (start, stop) == (0, weight.numel())
        suffix = view(name, start, stop, weight.numel())
        if not state.is_apart(name):
            model[name] = weight.clone()
        else:
            model[f"{name}_{state.precision}"] = state.half(name)
            if whole:
                model[name] = weight.clone()
            elif name in shares and dialect == "l1":
                stale = state.initial[name].clone()
                stale.reshape(-1)[start:stop] = weight.reshape(-1)[start:stop]
                model[name] = stale
            elif name in shares:
                model[name + suffix] = part(weight, start, stop)
        if name in shares:
            for moment, tensors in state.moments.items():
                model[f"{moment}_{name}{suffix}"] = part(tensors[name], start, stop)
            if state.optimizer == "Adam":
                model[f"Update_Count_{name}{suffix}"] = torch.tensor([state.steps[name] + 1])
    if state.optimizer == "Lamb":
        model["Step"] = torch.tensor([max(state.steps.values()) + 1])
    model |= {name: tensor.clone() for name, tensor in state.frozen.items()}
    if old_front_end:  # everything that the session lacks, as it was at first
        model = {**{name: stale.clone() for name, stale in state.initial.items()}, **model}
    if without:
        moment = ("Moment_1_", "Moment_2_", "Update_Count_")
        model = {k: t for k, t in model.items() if not k.startswith(moment) and k != "Step"}
    if without == "torch names":
        model = {k: t for k, t in model.items() if k in state.weights or k in state.frozen}
    return model


def write_legacy(
    state: State,
    folder: Path,
    dp: int,
    dialect: str = "l2",
    *,
    prefix: str = "ORT_checkpoint",
    user: Mapping[str, Any] | None = None,
    zipped: bool = True,
    bare: bool = False,
    **options: Any,
) -> Path:
    """A set of rank files, or one file; `zipped=False` is torch's container before 1.6."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(dp):
        model = legacy_dictionary(state, dp, rank, dialect, **options)
        name = f"{prefix}.ZeRO.{rank}.{dp - 1}.ort.pt" if dp > 1 else f"{prefix}.ort.pt"
        value = model if bare else {"model": model, **(user or {})}
        torch.save(value, folder / name, _use_new_zipfile_serialization=zipped)
    return folder


# -- HDF5


def hdf5_tree(
    state: State,
    dp: int,
    rank: int,
    *,
    december: bool = False,
    optimizer: bool = True,
    user: str | None = None,
    info: bool = True,
) -> dict[str, Any]:
    """One rank's file as nested dictionaries; `december` is the variant of December 2020."""
    shares = owned(state.weights, dp)[rank]
    model: dict[str, Any] = {name: t.numpy() for name, t in state.frozen.items()}
    states: dict[str, Any] = {}
    split: dict[str, Any] = {}
    for name, weight in state.weights.items():
        start, stop = shares.get(name, (0, 0))
        if not state.is_apart(name):
            model[name] = weight.numpy()
        elif name in shares:
            model[name] = part(weight, start, stop).numpy()
        if name not in shares:
            if december:
                states[name] = {}
            continue
        if (start, stop) != (0, weight.numel()):
            split[name] = {"original_dim": list(weight.shape)}
            if not december:
                split[name]["megatron_row_partition"] = [-1]
        states[name] = {
            moment: part(tensors[name], start, stop).numpy()
            for moment, tensors in state.moments.items()
        }
        if state.optimizer == "Adam":
            states[name]["Update_Count"] = np.array([state.steps[name] + 1])
    if state.optimizer == "Lamb":
        last = np.array([max(state.steps.values()) + 1])
        states["shared_optimizer_state"] = {"step" if december else "Step": last}
    options: dict[str, Any] = {
        "mixed_precision": state.mixed,
        "zero_stage": int(dp > 1),
        "world_rank": rank,
        "world_size": dp,
        "optimizer_name": f"{state.optimizer}Optimizer",
    }
    if not december:
        options |= {"data_parallel_size": dp, "horizontal_parallel_size": 1}
    tree: dict[str, Any] = {"model": {"full_precision": model}, "trainer_options": options}
    if optimizer:
        tree["optimizer"] = states
    if dp > 1:
        tree["partition_info"] = split
    if info and not december:
        last_step = max(state.steps.values())
        tree["train_step_info"] = {"optimization_step": last_step, "step": last_step}
    if user is not None:
        tree["user_dict"] = user
    return tree


def save_tree(group: Any, tree: Mapping[str, Any]) -> None:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            save_tree(group.create_group(key), value)
        else:
            group[key] = value


def write_hdf5(
    state: State, folder: Path, dp: int, *, name: str = "checkpoint.rank{}.ortcp", **options: Any
) -> Path:
    """A set of rank files, or one file."""
    folder.mkdir(parents=True, exist_ok=True)
    for rank in range(dp):
        path = folder / (name.format(rank) if dp > 1 else "checkpoint.ortcp")
        with h5py.File(path, "w-") as file:
            save_tree(file, hdf5_tree(state, dp, rank, **options))
    return folder


def write(state: State, folder: Path, dp: int, dialect: str, **options: Any) -> Path:
    """A set of any dialect: l1, l2, hdf5, december."""
    if dialect in ("l1", "l2"):
        return write_legacy(state, folder, dp, dialect, **options)
    return write_hdf5(state, folder, dp, december=dialect == "december", **options)


# -- what a folder holds, to be compared


def contents(folder: Path) -> dict[str, Any]:
    """Every tensor and value by file and key, with torch and h5py alone."""
    values: dict[str, Any] = {}
    for path in sorted(folder.iterdir()):
        if path.name.endswith(".ort.pt"):
            saved = torch.load(path, weights_only=True)
            values.update((f"{path.name}: {key}", value) for key, value in saved["model"].items())
            continue
        with h5py.File(path) as file:

            def visit(name: str, item: Any, path: Path = path) -> None:
                if isinstance(item, h5py.Dataset):
                    value = item[()]
                    values[f"{path.name}: {name}"] = (
                        value if isinstance(value, bytes) else np.asarray(value)
                    )
                else:
                    values[f"{path.name}: {name}/"] = len(item)

            file.visititems(visit)
    return values


def differences(one: Path, other: Path) -> list[str]:
    """Keys by which two folders differ, in type, shape or bytes."""
    a, b = contents(one), contents(other)
    wrong = sorted(a.keys() ^ b.keys())
    for key in a.keys() & b.keys():
        x, y = a[key], b[key]
        if isinstance(x, Tensor):
            same = x.dtype == y.dtype and x.shape == y.shape
            same = same and x.reshape(-1).view(torch.uint8).equal(y.reshape(-1).view(torch.uint8))
        elif isinstance(x, np.ndarray):
            same = x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()
        else:
            same = x == y
        if not same:
            wrong.append(key)
    return wrong
