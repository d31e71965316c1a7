"""How a run is saved and loaded: each layout by the stock functions of torch that users call."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_model
from torch import distributed
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType
from torch.distributed.optim import ZeroRedundancyOptimizer

FULL = StateDictOptions(full_state_dict=True)
COMPILED = "_orig_mod."  # torch.compile is switched off here, it would take minutes
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Loading(NamedTuple):
    """Where and how `load` reads."""

    path: Path
    model: str = "model"  # the root key of the model's state dict; "" is none
    optim: str = "optim"
    reader: Callable[[str], dcp.StorageReader] | None = None  # by default torch's own
    partial: bool = False  # leave alone what the checkpoint does not have


class Layout(NamedTuple):
    """`save(run, path, writer)`, and `load(run, loading)` on a fresh one."""

    save: Callable[[Any, Path, Mapping[str, Any]], None]
    load: Callable[[Any, Loading], None]


def write(state: dict[str, Any], path: Path, options: Mapping[str, Any]) -> None:
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path, **options))


def read(state: dict[str, Any], loading: Loading) -> None:
    path = str(loading.path)
    # The default planner drops ShardedTensors without a local shard, takes the checkpoint for
    # one of torch 2.3, and misses `optim.param_groups.` (torch 2.13).
    dcp.load(
        state,
        storage_reader=loading.reader(path) if loading.reader else dcp.FileSystemReader(path),
        planner=dcp.DefaultLoadPlanner(
            flatten_sharded_tensors=False, allow_partial_load=loading.partial
        ),
    )


def state_dicts(run: Any, options: StateDictOptions | None = None) -> dict[str, Any]:
    model, optim = get_state_dict(run.model, run.optimizer, options=options)
    return {"model": model, "optim": optim}


def set_state_dicts(
    run: Any, model: Any, optim: Any, options: StateDictOptions | None = None
) -> None:
    set_state_dict(
        run.model, run.optimizer, model_state_dict=model, optim_state_dict=optim, options=options
    )


def rooted(states: dict[str, Any], loading: Loading) -> dict[str, Any]:
    """The two state dicts under the keys that were asked for."""
    model = {loading.model: states["model"]} if loading.model else states["model"]
    return {**model, loading.optim: states["optim"]}


def save_nested(run: Any, path: Path, writer: Mapping[str, Any]) -> None:
    write(state_dicts(run), path, writer)


def load_nested(run: Any, loading: Loading) -> None:
    states = state_dicts(run)
    read(rooted(states, loading), loading)
    set_state_dicts(run, **states)


def save_flat(run: Any, path: Path, writer: Mapping[str, Any]) -> None:
    write(state_dicts(run, FLAT), path, writer)


def load_flat(run: Any, loading: Loading) -> None:
    states = state_dicts(run, FLAT)
    state = rooted(states, loading)
    read(state, loading)
    # dcp.load puts new values into the dictionaries that it was given.
    set_state_dicts(run, **states, options=FLAT)


def save_raw(run: Any, path: Path, writer: Mapping[str, Any]) -> None:
    state = {"model": run.model.state_dict(), "optim": run.optimizer.state_dict()}
    write(state, path, writer)


def load_raw(run: Any, loading: Loading) -> None:
    state_dicts(run)  # one step without effect, so that there is a state to load into
    states = {"model": run.model.state_dict(), "optim": run.optimizer.state_dict()}
    read(rooted(states, loading), loading)
    run.model.load_state_dict(states["model"])
    run.optimizer.load_state_dict(states["optim"])


def save_full(run: Any, path: Path, writer: Mapping[str, Any]) -> None:
    states = state_dicts(run, FULL)
    if distributed.get_rank() == 0:
        path.mkdir(parents=True)
        for name, state in states.items():
            torch.save(state, path / f"{name}.pt")


def load_full(run: Any, loading: Loading) -> None:
    set_state_dicts(run, *load_files(loading.path), options=FULL)


def load_files(path: Path) -> list[Any]:
    return [torch.load(path / f"{name}.pt", weights_only=True) for name in ("model", "optim")]


def load_weights(run: Any, loading: Loading) -> None:
    """The model without the optimizer."""
    model = get_model_state_dict(run.model)
    read({loading.model: model} if loading.model else model, loading)
    set_model_state_dict(run.model, model)


def save_async(run: Any, path: Path, writer: Mapping[str, Any]) -> None:
    dcp.async_save(state_dicts(run), storage_writer=dcp.FileSystemWriter(path, **writer)).result()


class App(Stateful):
    """As in PyTorch's tutorial of distributed checkpoints."""

    def __init__(self, run: Any) -> None:
        self.run = run

    def state_dict(self) -> dict[str, Any]:
        return state_dicts(self.run)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dicts(self.run, **state)


def save_app(run: Any, path: Path, writer: Mapping[str, Any]) -> None:
    write({"app": App(run)}, path, writer)


def load_app(run: Any, loading: Loading) -> None:
    read({"app": App(run)}, loading)


def save_titan(run: Any, path: Path, writer: Mapping[str, Any]) -> None:
    """What torchtitan's CheckpointManager saves: names of weights without a root key."""
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    loader = {f"dp_rank_{rank}": pickle.dumps({"position": run.step}), "world_size": ranks}
    write({**titan_states(run), "dataloader": loader}, path / f"step-{run.step}", writer)


def load_titan(run: Any, loading: Loading) -> None:
    found = sorted(loading.path.glob("step-*"))
    states = titan_states(run)
    read(states, loading._replace(path=found[-1]) if found else loading)
    optim, scheduler, train = (states.pop(key) for key in TITAN_KEYS)
    set_state_dicts(run, states, optim, FLAT)
    run.scheduler.load_state_dict(scheduler)
    run.step = int(train["step"])


def save_lightning(run: Any, path: Path, writer: Mapping[str, Any]) -> None:
    """What Lightning's FSDPStrategy saves, which itself needs a GPU (2.6)."""
    states = state_dicts(run)
    write({"model": states["model"], "optimizer_0": states["optim"]}, path, writer)
    if distributed.get_rank() == 0:
        rest = {
            "epoch": 0,
            "global_step": run.step,
            "pytorch-lightning_version": "2.6.6",
            "lr_schedulers": [run.scheduler.state_dict()] if run.scheduler else [],
        }
        torch.save(rest, path / "meta.pt")


def load_lightning(run: Any, loading: Loading) -> None:
    load_nested(run, loading._replace(optim="optimizer_0"))


TITAN_KEYS = ("optimizer", "lr_scheduler", "train_state")


def titan_states(run: Any) -> dict[str, Any]:
    states = state_dicts(run, FLAT)
    train = {
        "step": torch.tensor(run.step, dtype=torch.int32),
        "ntokens_seen": torch.tensor(120 * run.step, dtype=torch.int64),
    }
    values = (states["optim"], run.scheduler.state_dict(), train)
    return {**states["model"], **dict(zip(TITAN_KEYS, values, strict=True))}


def save_items(run: Any, path: Path, writer: Mapping[str, Any]) -> None:
    """A file of each item per rank, as torch_checkpointing names them, and its `metadata.pkl`."""
    manager = item_manager("model", "optimizer")
    manager.save(str(path), items_of(run, writer))
    manager.close()


def save_bare_items(run: Any, path: Path, writer: Mapping[str, Any]) -> None:
    """Its safetensors files, which have the local parts of DTensors and nothing about them."""
    from torch_checkpointing.checkpoint_layout import LayoutInfo, SafetensorsSerialization

    form = SafetensorsSerialization()
    manager = item_manager("model", layout=LayoutInfo("model_{rank}.safetensors", form))
    manager.save(str(path), {"model": get_model_state_dict(run.model)})
    manager.close()


def items_of(run: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    states = state_dicts(run, FLAT if options.get("flat") else None)
    items = {"model": states["model"], "optimizer": states["optim"]}
    if run.scheduler is not None:
        items["lr_scheduler"] = run.scheduler.state_dict()
    loader = {"rank": distributed.get_rank(), "position": run.step}
    return {**items, "train_state": {"step": run.step}, "dataloader": loader, "epoch": 1}


def item_manager(*names: str, **spec: Any) -> Any:
    """torch_checkpointing's, saving at once; 0.1.1 copies asynchronously by way of a GPU.

    So do its ranks when they tell each other what they have. Here they do it without.
    """
    from torch_checkpointing import CheckpointManager, ItemSpec
    from torch_checkpointing.config import SyncCheckpointSaverConfig
    from torch_checkpointing.default_resharder import DefaultResharder
    from torch_checkpointing.metadata_manager import DefaultMetadataManager
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    def gathered(_: Any, data: Any, process_group: Any = None) -> dict[int, Any]:
        parts = [None] * distributed.get_world_size(process_group)
        distributed.all_gather_object(parts, data, process_group)
        return dict(enumerate(parts))

    DefaultMetadataManager._all_gather_pickled_data = gathered
    return CheckpointManager.Config(
        items={name: ItemSpec(resharder=DefaultResharder(), **spec) for name in names},
        save=SyncCheckpointSaverConfig(),
        storage_config=LocalFileSystemStorageConfig(use_direct_io=False),
    ).build()


def hf_writer(consolidated: bool) -> Callable[[Any, Path, Mapping[str, Any]], None]:
    def save(run: Any, path: Path, writer: Mapping[str, Any]) -> None:
        model = get_model_state_dict(run.model)
        numbers = {name: 2 if name.startswith("trunk.") else 1 for name in model}
        storage = dcp.HuggingFaceStorageWriter(
            str(path), numbers, save_distributed=True, enable_consolidation=consolidated
        )
        dcp.save(model, storage_writer=storage)

    return save


def save_folders(run: Any, path: Path, writer: Mapping[str, Any]) -> None:
    """A folder for each state dict, as many a program does it."""
    states = state_dicts(run)
    write(states["model"], path / "model", writer)
    write(states["optim"], path / "optimizer", writer)


def load_folders(run: Any, loading: Loading) -> None:
    states = state_dicts(run)
    read(states["model"], loading._replace(path=loading.path / "model"))
    read(states["optim"], loading._replace(path=loading.path / "optimizer"))
    set_state_dicts(run, **states)


def automodel_states(run: Any) -> dict[str, Any]:
    states = state_dicts(run, FLAT)
    return {"optim": states["optim"], "sched": run.scheduler.state_dict()}


def save_automodel(run: Any, path: Path, writer: Mapping[str, Any]) -> None:
    """What NeMo AutoModel 0.7's Checkpointer saves; its backported writer is torch's own."""
    hf_writer(False)(run, path / "model", writer)
    write(automodel_states(run), path / "optim", writer)


def load_automodel(run: Any, loading: Loading) -> None:
    load_hf(run, loading._replace(path=loading.path / "model"))
    states = automodel_states(run)
    read(states, loading._replace(path=loading.path / "optim"))
    set_optimizer_state_dict(run.model, run.optimizer, states["optim"], options=FLAT)
    run.scheduler.load_state_dict(states["sched"])
    run.step = states["sched"]["last_epoch"]


def load_hf(run: Any, loading: Loading) -> None:
    load_weights(run, loading._replace(model="", reader=dcp.HuggingFaceStorageReader))


def save_ranks(run: Any, path: Path, writer: Mapping[str, Any]) -> None:
    """A file of each kind per rank, named as verl names them, with what the objects say."""
    save_per_rank(run, path, run.model.state_dict(), run.optimizer.state_dict())


def load_ranks(run: Any, loading: Loading) -> None:
    model, optim = load_per_rank(loading.path)
    run.model.load_state_dict(model)
    run.optimizer.load_state_dict(optim)


def save_sharded_ranks(run: Any, path: Path, writer: Mapping[str, Any]) -> None:
    """FSDP1's ShardedTensors."""
    states = state_dicts(run)
    save_per_rank(run, path, states["model"], states["optim"])


def load_sharded_ranks(run: Any, loading: Loading) -> None:
    set_state_dicts(run, *load_per_rank(loading.path))


def save_local_ranks(run: Any, path: Path, writer: Mapping[str, Any]) -> None:
    """FSDP1's flat parameters."""
    with FullyShardedDataParallel.state_dict_type(run.model, StateDictType.LOCAL_STATE_DICT):
        save_ranks(run, path, writer)


def load_local_ranks(run: Any, loading: Loading) -> None:
    with FullyShardedDataParallel.state_dict_type(run.model, StateDictType.LOCAL_STATE_DICT):
        load_ranks(run, loading)


def save_per_rank(run: Any, path: Path, model: Any, optim: Any) -> None:
    path.mkdir(parents=True, exist_ok=True)
    scheduler = run.scheduler.state_dict() if run.scheduler else None
    extra = {"lr_scheduler": scheduler, "rng": {"cpu": torch.get_rng_state()}}
    for kind, state in {"model": model, "optim": optim, "extra_state": extra}.items():
        torch.save(state, path / rank_file(kind))


def load_per_rank(path: Path) -> list[Any]:
    return [torch.load(path / rank_file(kind), weights_only=False) for kind in ("model", "optim")]


def rank_file(kind: str) -> str:
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    return f"{kind}_world_size_{ranks}_rank_{rank}.pt"


def save_files(run: Any, path: Path, writer: Mapping[str, Any]) -> None:
    """Two files, the optimizer's with its numbers; and the scheduler's."""
    if isinstance(run.optimizer, ZeroRedundancyOptimizer):
        run.optimizer.consolidate_state_dict(to=0)
    if distributed.get_rank() == 0:
        path.mkdir(parents=True)
        torch.save(run.module.state_dict(), path / "model.pt")
        torch.save(run.optimizer.state_dict(), path / "optim.pt")
        if run.scheduler is not None:
            torch.save(run.scheduler.state_dict(), path / "scheduler.pt")


def load_two_files(run: Any, loading: Loading) -> None:
    """Or the one file of a program that saves all in one."""
    if (loading.path / "checkpoint.pt").exists():
        load_one_file(run, loading)
        return
    model = loading.path / "model.safetensors"
    if model.exists():
        load_model(run.module, model)
    else:
        run.module.load_state_dict(torch.load(loading.path / "model.pt", weights_only=True))
    run.optimizer.load_state_dict(torch.load(loading.path / "optim.pt", weights_only=True))


def save_zro_ranks(run: Any, path: Path, writer: Mapping[str, Any]) -> None:
    """What each rank's own optimizer holds, under its own numbers."""
    rank = distributed.get_rank()
    path.mkdir(parents=True, exist_ok=True)
    torch.save(run.optimizer.optim.state_dict(), path / f"optim_rank_{rank}.pt")
    if rank == 0:
        torch.save(run.module.state_dict(), path / "model.pt")


def load_zro_ranks(run: Any, loading: Loading) -> None:
    rank = distributed.get_rank()
    run.module.load_state_dict(torch.load(loading.path / "model.pt", weights_only=True))
    optim = torch.load(loading.path / f"optim_rank_{rank}.pt", weights_only=True)
    run.optimizer.optim.load_state_dict(optim)


def save_one_file(run: Any, path: Path, writer: Mapping[str, Any]) -> None:
    save_together(run, path, run.module.state_dict())


def save_prefixed_file(run: Any, path: Path, writer: Mapping[str, Any]) -> None:
    """With `module.` before each name, as DistributedDataParallel says them."""
    save_together(run, path, run.model.state_dict())


def save_compiled_file(run: Any, path: Path, writer: Mapping[str, Any]) -> None:
    """With `_orig_mod.` before each name, as a model of torch.compile says them."""
    state = {f"{COMPILED}{name}": each for name, each in run.module.state_dict().items()}
    save_together(run, path, state)


def save_together(run: Any, path: Path, model: dict[str, Any]) -> None:
    states = {"model": model, "optimizer": run.optimizer.state_dict(), "epoch": 1}
    if distributed.get_rank() == 0:
        path.mkdir(parents=True)
        torch.save(states, path / "checkpoint.pt")


def load_one_file(run: Any, loading: Loading) -> None:
    states = torch.load(loading.path / "checkpoint.pt", weights_only=True)
    state = {name.removeprefix(COMPILED): each for name, each in states["model"].items()}
    prefixed = any(name.startswith("module.") for name in state)
    (run.model if prefixed else run.module).load_state_dict(state)
    run.optimizer.load_state_dict(states["optimizer"])


LAYOUTS = {
    "nested": Layout(save_nested, load_nested),
    "flat": Layout(save_flat, load_flat),
    "raw": Layout(save_raw, load_raw),
    "app": Layout(save_app, load_app),
    "titan": Layout(save_titan, load_titan),
    "lightning": Layout(save_lightning, load_lightning),
    "async": Layout(save_async, load_nested),
    "weights": Layout(save_nested, load_weights),
    "hf sharded": Layout(hf_writer(False), load_hf),
    "hf consolidated": Layout(hf_writer(True), load_hf),
    "folders": Layout(save_folders, load_folders),
    "automodel": Layout(save_automodel, load_automodel),
    "items": Layout(save_items, load_nested),
    "bare items": Layout(save_bare_items, load_nested),
    "ranks": Layout(save_ranks, load_ranks),
    "sharded ranks": Layout(save_sharded_ranks, load_sharded_ranks),
    "local ranks": Layout(save_local_ranks, load_local_ranks),
    "full": Layout(save_full, load_full),
    "files": Layout(save_files, load_two_files),
    "zro ranks": Layout(save_zro_ranks, load_zro_ranks),
    "one file": Layout(save_one_file, load_one_file),
    "prefixed file": Layout(save_prefixed_file, load_one_file),
    "compiled file": Layout(save_compiled_file, load_one_file),
}
