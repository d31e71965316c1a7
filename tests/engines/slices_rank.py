"""What ranks of torch save of a small model: sound states, and one rank's slices in each container.

A function for each engine trains two steps and writes its variants below a folder. Nothing is
loaded: zckpt is to read the sound ones, and to refuse the others.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from . import device
from .torch_rank import join

prepare = device.prepare
VERSION = {"pytorch-lightning_version": "2.6.0"}


class Model(nn.Module):
    """37 rows, which four ranks cannot share evenly; statistics, and a buffer of each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.emb = nn.Embedding(37, 8)
        self.bn = nn.BatchNorm1d(8)
        self.fc = nn.Linear(8, 6)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, rows: Tensor) -> Tensor:
        self.seen += rows[:3]
        return self.fc(self.bn(self.emb(rows))).square().sum()  # type: ignore[no-any-return]


def train(model: nn.Module, optimizer: Any, rank: int) -> None:
    for step in range(2):
        model(torch.arange(5) * (rank + 1) + step).backward()
        optimizer.step()
        optimizer.zero_grad()


def local(tree: Any) -> Any:
    """The tree with each rank's plain slices."""
    return tree_map(lambda x: x.to_local().clone() if isinstance(x, DTensor) else x, tree)


def files(folder: Path, rank: int, value: Any, stem: str = "ckpt", **options: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(value, folder / f"{stem}_rank_{rank}.pt", **options)


def fsdp2(rank: int, store: Path, ranks: int, root: Path) -> None:
    join(rank, ranks, store)
    torch.manual_seed(0)
    model = Model()
    fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, rank)
    weights = model.state_dict()
    states = optimizer.state_dict()
    both = {"model": weights, "optimizer": states}
    averages = {name: w.detach() * 0.5 for name, w in model.named_parameters()}
    whole = {name: w.full_tensor() for name, w in averages.items()}
    if rank == 0:
        torch.save(whole, root / "averages.pt")
    files(root / "sound", rank, both)
    files(root / "plain", rank, local(both))
    files(root / "plain_weights", rank, local(weights), "model")
    files(root / "plain_named", rank, local(weights))
    files(root / "plain_listed", rank, {"model": local(weights), "optimizers": [local(states)]})
    (root / "numbered").mkdir(exist_ok=True)
    torch.save(local(weights), root / "numbered" / f"model_{rank}.pt")
    files(root / "plain_states", rank, {"model": weights, "optimizer": local(states)})
    files(root / "ema", rank, {**both, "ema": local(averages)})
    wrapped = {f"module.{name}": w for name, w in local(averages).items()}
    ema = {"decay": 0.5, "shadow": {"n_averaged": torch.tensor(2), **wrapped}}
    files(root / "ema_wrapped", rank, {**both, "ema": ema})
    files(root / "ema_whole", rank, {**both, "ema": whole})
    every = {k: w.full_tensor() if isinstance(w, DTensor) else w for k, w in weights.items()}
    every = {key: weight for key, weight in every.items() if key.partition(".")[0] in ("emb", "fc")}
    files(root / "whole_ema", rank, {"model": every, "ema": {"shadow": local(averages)}})
    cut = {**every, "emb.weight": weights["emb.weight"].to_local().clone()}
    head = {
        "state": {},
        "param_groups": [{"lr": 0.1, "params": [0, 1], "param_names": ["fc.weight", "fc.bias"]}],
    }
    files(root / "frozen_parts", rank, {"model": cut, "optimizer": head})
    files(root / "ema_list", rank, {**both, "ema": {"shadow_params": [*local(averages).values()]}})
    other = {name.upper(): w for name, w in local(averages).items()}
    files(root / "ema_renamed", rank, {**both, "ema": {"weights": other}})
    for stem, value in {"model": weights, "optim": states, "ema": local(averages)}.items():
        files(root / "ema_files", rank, value, stem)
    kept = {
        number: {**state, "worker_error": torch.full((4,), float(number + rank))}
        for number, state in states["state"].items()
    }
    feedback = {**both, "optimizer": {**states, "state": kept}}
    files(root / "feedback", rank, feedback)
    legacy = local(both)
    files(root / "legacy", rank, legacy, _use_new_zipfile_serialization=False)
    old = {"_use_new_zipfile_serialization": False}  # without checksums
    files(root / "even_legacy", rank, {"w": torch.arange(6.0) + rank}, "model", **old)
    files(root / "equal_legacy", rank, {"w": torch.arange(6.0)}, "model", **old)
    dcp.save(dict(both), checkpoint_id=root / "dcp_sound")
    dcp.save({**both, "ema": local(averages)}, checkpoint_id=root / "dcp_ema")
    listed = {"shadow_params": [*local(averages).values()]}
    dcp.save({**both, "ema": listed}, checkpoint_id=root / "dcp_ema_list")
    apart = {"model": local(weights), "optimizer": local(states)}
    dcp.save(apart, checkpoint_id=root / "dcp_apart", use_collectives=False)
    dcp.save(feedback, checkpoint_id=root / "dcp_apart_sound", use_collectives=False)
    dcp.save({"model": weights, "optimizer": local(states)}, checkpoint_id=root / "dcp_states")
    dcp.save({"model": local(weights), "optimizer": states}, checkpoint_id=root / "dcp_weights")


def ddp(rank: int, store: Path, ranks: int, root: Path) -> None:
    join(rank, ranks, store)
    torch.manual_seed(0)
    module = Model()
    model = DistributedDataParallel(module, broadcast_buffers=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, rank)
    weights = module.state_dict()
    files(root / "both", rank, {"model": weights, "optimizer": optimizer.state_dict()})
    files(root / "weights_and_seen", rank, weights, "model")
    without = {name: w for name, w in weights.items() if name != "seen"}
    files(root / "weights", rank, without, "model")
    head = torch.optim.AdamW(module.fc.parameters(), lr=1e-2)
    module.fc(torch.ones(2, 8)).sum().backward()
    head.step()
    files(root / "frozen", rank, {"model": module.state_dict(), "optimizer": head.state_dict()})
    if rank == 0:
        trained = {"model": module.state_dict(), "optimizer": head.state_dict()}
        torch.save(trained, root / "head.pt")


def zero(rank: int, store: Path, ranks: int, root: Path) -> None:
    join(rank, ranks, store)
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 4), nn.Linear(4, 5))
    model = DistributedDataParallel(module)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    share = optimizer.optim.state_dict()
    both = {"model": module.state_dict(), "optimizer": share}
    files(root / "ranks", rank, both)
    optimizer.consolidate_state_dict(to=0)
    if rank == 0:
        torch.save(both, root / "share.pt")
        whole = optimizer.state_dict()
        torch.save({**both, "optimizer": whole}, root / "whole.pt")
        numbers = [1, 4]  # as a program saves them that numbers all parameters by itself
        gaps = {
            "state": dict(zip(numbers, (whole["state"][n] for n in numbers), strict=True)),
            "param_groups": [{**whole["param_groups"][0], "params": numbers}],
        }
        torch.save({**both, "optimizer": gaps}, root / "gaps.pt")


def fsdp1(rank: int, store: Path, ranks: int, root: Path) -> None:
    join(rank, ranks, store)
    warnings.simplefilter("ignore")  # FSDP1 is deprecated
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 10), nn.Linear(10, 3))
    model = FullyShardedDataParallel(module, use_orig_params=True, device_id=torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.ones(2, 6) + rank).square().sum().backward()
    optimizer.step()
    weights: dict[StateDictType, Any] = {}
    for kind in (StateDictType.LOCAL_STATE_DICT, StateDictType.SHARDED_STATE_DICT):
        with FullyShardedDataParallel.state_dict_type(model, kind):
            weights[kind] = model.state_dict()
    flat, sharded = weights.values()
    states = FullyShardedDataParallel.optim_state_dict(model, optimizer)
    for name, model_state, optimizer_state in (
        ("flat_weights", flat, states),
        ("flat_states", sharded, optimizer.state_dict()),
        ("sound", sharded, None),
    ):
        for container, save in CONTAINERS.items():
            save(root / name / container, rank, model_state, optimizer_state)
    for container, save_weights in OF_WEIGHTS.items():
        plain = {key: _plain(value) for key, value in flat.items()}
        save_weights(root / "flat_weights" / container, rank, plain)


def _plain(value: Any) -> Tensor:
    tensor: Tensor = value.local_tensor() if hasattr(value, "local_tensor") else value
    return tensor.detach().clone()


# -- containers of a model's and an optimizer's state


def ranks_files(folder: Path, rank: int, model: Any, optimizer: Any) -> None:
    states = {} if optimizer is None else {"optimizer": optimizer}
    files(folder, rank, {"model": model, **states})


def files_of_kinds(folder: Path, rank: int, model: Any, optimizer: Any) -> None:
    files(folder, rank, model, "model")
    if optimizer is not None:
        files(folder, rank, optimizer, "optim")


def items(folder: Path, rank: int, model: Any, optimizer: Any) -> None:
    states = {} if optimizer is None else {"optim": optimizer}
    dcp.save({"model": model, **states}, checkpoint_id=folder)


def accelerate(folder: Path, rank: int, model: Any, optimizer: Any) -> None:
    dcp.save({"model": model}, checkpoint_id=folder / "pytorch_model_fsdp_0")
    if optimizer is not None:
        dcp.save({"optimizer": optimizer}, checkpoint_id=folder / "optimizer_0")


def lightning(folder: Path, rank: int, model: Any, optimizer: Any) -> None:
    states = {} if optimizer is None else {"optimizer_0": optimizer}
    dcp.save({"state_dict": model, **states}, checkpoint_id=folder)
    if rank == 0:
        torch.save({**VERSION, "epoch": 0, "global_step": 1}, folder / "meta.pt")


def with_storage(folder: Path, rank: int, model: Any, optimizer: Any) -> None:
    """Hugging Face's storage for the weights, beside items of the optimizer."""
    from torch.distributed.checkpoint import HuggingFaceStorageWriter

    writer = HuggingFaceStorageWriter(str(folder / "model"), save_distributed=True)
    weights = {key: w.detach().clone() if type(w) is Tensor else w for key, w in model.items()}
    dcp.save(weights, storage_writer=writer)  # whose tensors may not share memory
    if optimizer is not None:
        dcp.save(optimizer, checkpoint_id=folder / "optim")


CONTAINERS: Mapping[str, Callable[[Path, int, Any, Any], None]] = {
    "ranks": ranks_files,
    "kinds": files_of_kinds,
    "dcp": items,
    "accelerate": accelerate,
    "lightning": lightning,
    "hf": with_storage,
}


# -- containers of plain weights, which rank 0 alone writes


def safetensors(folder: Path, rank: int, weights: dict[str, Tensor]) -> None:
    from safetensors.torch import save_file

    if rank == 0:
        folder.mkdir(parents=True)
        save_file(weights, folder / "model.safetensors")


def lightning_file(folder: Path, rank: int, weights: dict[str, Tensor]) -> None:
    if rank == 0:
        folder.mkdir(parents=True)
        torch.save({"state_dict": weights, "epoch": 0, **VERSION}, folder / "last.ckpt")


def whole_file(folder: Path, rank: int, weights: dict[str, Tensor]) -> None:
    if rank == 0:
        folder.mkdir(parents=True)
        torch.save(weights, folder / "pytorch_model.bin")


OF_WEIGHTS: Mapping[str, Callable[[Path, int, dict[str, Tensor]], None]] = {
    "safetensors": safetensors,
    "lightning_file": lightning_file,
    "whole_file": whole_file,
}
