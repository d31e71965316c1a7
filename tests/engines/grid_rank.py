"""What one rank of a training with several model ranks does: build, train, save, record.

The record is joined from live memory by the model's own rules (`parameter.cut`), with no code of
the checkpoint and none of zckpt.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import Tensor, distributed

from . import grid_models as models
from . import oracle
from .grids import GridCase
from .optimizers import deepspeed_fused_adam
from .rank import ENABLE, compile_extension, join, merge, prepare

__all__ = ["compile_extension", "prepare", "resume", "train"]

LLAMA_ROWS = re.compile(
    r".*\.(q_proj|k_proj|v_proj|gate_proj|up_proj)\.(weight|bias)|lm_head\.weight"
)
LLAMA_COLUMNS = re.compile(r".*\.(o_proj|down_proj)\.weight")


class Axes:
    """The groups of a grid: global rank = (pp * DP + dp) * TP + tp, as DeepSpeed numbers them.

    It is an `mpu` as Megatron's: DeepSpeed asks it for groups, ranks and sizes.
    """

    def __init__(self, case: GridCase) -> None:
        rest, self.tp = divmod(distributed.get_rank(), case.tp)
        self.pp, self.dp = divmod(rest, case.dp)
        for pp in range(case.pp):
            for dp in range(case.dp):
                ranks = [(pp * case.dp + dp) * case.tp + tp for tp in range(case.tp)]
                group = distributed.new_group(ranks)
                if (pp, dp) == (self.pp, self.dp):
                    self.tensor = group
            for tp in range(case.tp):
                ranks = [(pp * case.dp + dp) * case.tp + tp for dp in range(case.dp)]
                group = distributed.new_group(ranks)
                if (pp, tp) == (self.pp, self.tp):
                    self.data = group

    def get_model_parallel_rank(self) -> int:
        return self.tp

    def get_model_parallel_world_size(self) -> int:
        return distributed.get_world_size(self.tensor)

    # the universal loader asks by these names
    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_tensor_model_parallel_world_size = get_model_parallel_world_size

    def get_model_parallel_group(self) -> Any:
        return self.tensor

    def get_data_parallel_rank(self) -> int:
        return self.dp

    def get_data_parallel_world_size(self) -> int:
        return distributed.get_world_size(self.data)

    def get_data_parallel_group(self) -> Any:
        return self.data


def train(rank: int, store: Path, case: GridCase, root: Path) -> None:
    """Trains, saves `root`/run, writes `root`/oracle.pt."""
    join(rank, case.pp * case.tp * case.dp, store)
    axes = Axes(case)
    engine = build_engine(case, axes, case.seed)
    for step in range(case.steps):
        train_step(engine, case, axes, step)
    client_state: dict[str, Any] = {"iteration": case.steps}
    if case.info and case.model != "llama":
        client_state["universal_checkpoint_info"] = info(case)
    engine.save_checkpoint(str(root / "run"), client_state=client_state)
    finish(engine, case, axes, root / "oracle.pt")


def resume(
    rank: int,
    store: Path,
    case: GridCase,
    directory: Path,
    output: Path,
    universal: Path | None,
) -> None:
    """Loads `directory` into an engine with other first weights, writes what it then holds."""
    join(rank, case.pp * case.tp * case.dp, store)
    axes = Axes(case)
    engine = build_engine(case, axes, case.seed + 1000)
    loaded, _ = engine.load_checkpoint(str(directory))
    if loaded is None:
        raise FileNotFoundError(f"the engine found no checkpoint in {directory}")
    if universal is not None:
        set_the_rest(engine.module, torch.load(universal, weights_only=False))
    finish(engine, case, axes, output)


def set_the_rest(module: torch.nn.Module, expected: dict[str, Any]) -> None:
    """Gives a module the frozen weights and buffers of a record, which no rank cuts."""
    for name, buffer in module.named_buffers():
        if name in expected["buffers"]:
            buffer.copy_(expected["buffers"][name])
    for name, parameter in module.named_parameters():
        if name in expected["frozen"]:
            with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
                parameter.data.copy_(expected["tensors"][f"{name}/param"])


def finish(engine: Any, case: GridCase, axes: Axes, output: Path) -> None:
    """Writes what all ranks hold now, with the losses of the steps that follow."""
    held = record(engine, case, axes)
    losses = [train_step(engine, case, axes, case.steps + more) for more in range(case.more)]
    if held is not None:
        torch.save({**held, "losses": losses}, output)


def info(case: GridCase) -> dict[str, Any]:
    """The patterns of this model; a pipeline's names begin with the layer's number."""
    if case.model == "tensor":
        return models.INFO
    return {
        **models.INFO,
        "vocabulary_parameter_patterns": [r"tied_modules\.embed\.weight"],
        "tp_replicated_parameter_patterns": [
            r".*\.norm\.(weight|bias)",
            r"7\.(weight|bias)",
            r"3\..*",
            r"5\.gain",
            r".*\.(dense|down)\.bias",
        ],
        "pipeline_replicated_parameter_patterns": [r"tied_modules\.embed\.weight"],
    }


def build_engine(case: GridCase, axes: Axes, seed: int) -> Any:
    torch.manual_seed(seed)
    axis = models.Axis(axes.tensor)
    more: dict[str, Any] = {}
    if case.model == "pipe":
        from deepspeed.runtime.pipe.topology import (
            PipeDataParallelTopology,
            PipeModelDataParallelTopology,
        )

        topology = (
            PipeModelDataParallelTopology(num_pp=case.pp, num_mp=case.tp, num_dp=case.dp)
            if case.tp > 1
            else PipeDataParallelTopology(num_pp=case.pp, num_dp=case.dp)
        )
        model: Any = deepspeed.pipe.PipelineModule(
            models.pipeline_layers(axis, case.ties),
            topology=topology,
            loss_fn=models.loss,
            partition_method=case.method,
            base_seed=seed,
            # with numpy numbers of layers, as the other methods give them, seeding fails (0.19.8)
            seed_layers=case.method == "uniform",
        )
    elif case.model == "tensor":
        model = models.Whole(axis)
        more["mpu"] = axes
    else:
        model = models.build_llama(seed)
        more["mpu"] = None
    config = {
        "train_micro_batch_size_per_gpu": models.ROWS // case.dp,
        "gradient_accumulation_steps": 1,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": case.stage},
        **({"tensor_parallel": {"autotp_size": case.tp}} if case.model == "llama" else {}),
        **ENABLE[case.dtype],
    }
    if case.model == "llama":  # AutoTP cuts the module: the optimizer must be made afterwards
        config["optimizer"] = {
            "type": "AdamW",
            "params": {"lr": 0.01, "weight_decay": 0.1, "torch_adam": True},
        }
        engine, *_ = deepspeed.initialize(
            model=model, model_parameters=model.parameters(), config=merge(config, case.config)
        )
        return engine
    optimizer = deepspeed_fused_adam if case.fused else torch.optim.AdamW
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer(parameter_groups(model, case.groups, case.lists_frozen)),
        config=merge(config, case.config),
        **more,
    )
    return engine


def parameter_groups(
    model: torch.nn.Module, count: int, lists_frozen: bool
) -> list[dict[str, Any]]:
    """With decay, without decay, and some biases.

    Every stage has a parameter of each group: the engine (0.19.8) hangs in the norm of gradients if
    stages have different numbers of groups.
    """
    every = model.named_parameters()
    named = {name: each for name, each in every if lists_frozen or each.requires_grad}
    biases = [name for name in named if count > 2 and name.endswith("dense.bias")]
    members = [
        [name for name in named if named[name].ndim > 1],
        [name for name in named if named[name].ndim < 2 and name not in biases],
        biases,
    ]
    settings = [
        {"weight_decay": 0.1, "lr": 0.01},
        {"weight_decay": 0.0, "lr": 0.0025},
        {"weight_decay": 0.0, "lr": 0.02},
    ]
    return [
        {"params": [named[name] for name in names], **group}
        for names, group in zip(members[:count], settings, strict=False)
        if any(named[name].requires_grad for name in names)
    ]


def train_step(engine: Any, case: GridCase, axes: Axes, step: int) -> float:
    """Trains on the batch of this step; the mean loss of the global batch."""
    tokens, targets = models.batch(step, axes.dp, case.dp, case.learns)
    if case.model == "pipe":
        return float(engine.train_batch(data_iter=iter([(tokens, targets)])))
    if case.model == "llama":
        loss = engine(input_ids=tokens, labels=tokens).loss
    else:
        loss = models.loss(engine(tokens), targets)
    engine.backward(loss)
    engine.step()
    mean = loss.detach().double()
    distributed.all_reduce(mean, group=axes.data)
    return float(mean) / case.dp


def cut_of(case: GridCase, name: str, parameter: Tensor) -> Any:
    """How a parameter was cut: what the model says; for Llama, what AutoTP is documented to do."""
    if case.model != "llama":
        return getattr(parameter, "cut", None)
    if LLAMA_ROWS.fullmatch(name):
        return 0, ()
    return (1, ()) if LLAMA_COLUMNS.fullmatch(name) else None


def record(engine: Any, case: GridCase, axes: Axes) -> dict[str, Any] | None:
    """The whole model's state on rank 0, None on the others."""
    module, optimizer = engine.module, engine.optimizer
    weights = oracle.gather_weights(module)
    # a pipeline in bf16 has BF16_Optimizer in stage 0 too (0.19.8)
    is_cut = case.stage > 0 or hasattr(optimizer, "fp32_groups_flat_partition")
    saved = {name for name, _ in module.named_buffers() if not name.endswith("inv_freq")}
    mine = {
        "pp": axes.pp,
        "dp": axes.dp,
        "tp": axes.tp,
        **(partitioned_states if is_cut else states_without_zero)(module, optimizer),
        "weights": weights,
        "cuts": {n: cut_of(case, n, p) for n, p in module.named_parameters()},
        "settings": [
            {key: value for key, value in group.items() if key != "params"}
            for group in getattr(optimizer, "optimizer", optimizer).param_groups
        ],
        "trainable": [name for name, p in module.named_parameters() if p.requires_grad],
        "buffers": {n: b.clone() for n, b in module.named_buffers() if n in saved},
    }
    ranks: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(ranks, mine)
    if distributed.get_rank() != 0:
        return None
    return joined(ranks, case, engine)


def partitioned_states(module: torch.nn.Module, optimizer: Any) -> dict[str, Any]:
    """What this rank's partitions hold, and where parameters lie in them."""
    layout = oracle.read_layout(module, optimizer)
    return {
        "states": oracle.local_states(optimizer, layout),
        "places": layout.places,
        "groups": layout.groups,
        "cut_each": layout.cut_each_parameter,
    }


def states_without_zero(module: torch.nn.Module, optimizer: Any) -> dict[str, Any]:
    """What every data rank of a model rank holds whole."""
    tensors, steps, _, groups = oracle.whole_states(module, optimizer)
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    listed = [
        names[id(each)]
        for group in getattr(optimizer, "fp16_groups", None) or [
            group["params"] for group in optimizer.param_groups
        ]
        for each in group
    ]  # fmt: skip
    return {"whole": tensors, "whole_steps": steps, "groups": groups, "listed": listed}


def joined(ranks: list[dict[str, Any]], case: GridCase, engine: Any) -> dict[str, Any]:
    by_place = {(rank["pp"], rank["dp"], rank["tp"]): rank for rank in ranks}
    tensors: dict[str, Tensor] = {}
    steps: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    held: dict[str, Any] = {
        "trainable": [], "frozen": [], "buffers": {}, "scalars": {}, "aliases": {},
        "lr_scheduler": None, "tied_equal": True,
        "counters": {
            key: getattr(engine, key) for key in ("global_steps", "skipped_steps", "global_samples")
        },
    }  # fmt: skip
    for pp in range(case.pp):
        stage = by_place[pp, 0, 0]
        for name in stage["weights"]:
            slices: dict[str, list[Tensor]] = {}
            for tp in range(case.tp):
                for slot, tensor in of_model_rank(name, by_place, pp, tp, case).items():
                    slices.setdefault(slot, []).append(tensor)
            for slot, parts in slices.items():
                full = whole(parts, stage["cuts"][name], f"{name}/{slot}")
                first = tensors.setdefault(f"{name}/{slot}", full)
                assert torch.equal(first, full), f"copies of the stages differ: {name}/{slot}"
            trained = name in stage["trainable"]
            if name not in held["trainable"] + held["frozen"]:
                held["trainable" if trained else "frozen"].append(name)
        for names, settings in zip(stage["groups"], stage["settings"], strict=True):
            place = next((g for g in groups if same_settings(g, settings)), None)
            if place is None:
                groups.append({**settings, "params": list(names)})
            else:
                place["params"] += [name for name in names if name not in place["params"]]
            for name in names:
                steps[name] = (
                    stage["whole_steps"][name]
                    if "whole_steps" in stage
                    else stage["states"][stage["places"][name].flat]["scalars"].get("step")
                )
                held["scalars"].setdefault(name, {})
        held["buffers"] |= stage["buffers"]
    order = {0.1: 0, 0.0: 1}
    groups.sort(key=lambda group: (order[group["weight_decay"]], group["lr"]))
    listed = by_place[0, 0, 0].get("listed")  # what --param-names asks for, in stage 0
    return {**held, "tensors": tensors, "steps": steps, "groups": groups, "listed": listed}


def same_settings(group: dict[str, Any], settings: dict[str, Any]) -> bool:
    return all(group[key] == settings[key] for key in ("lr", "weight_decay"))


def of_model_rank(
    name: str, ranks: dict[Any, dict[str, Any]], pp: int, tp: int, case: GridCase
) -> dict[str, Tensor]:
    """What the data ranks of one model rank hold of a parameter, joined."""
    column = [ranks[pp, dp, tp] for dp in range(case.dp)]
    weight = column[0]["weights"][name]
    found = {"param": weight}
    if "whole" in column[0]:
        for full, tensor in column[0]["whole"].items():
            owner, _, slot = full.rpartition("/")
            if owner == name:
                assert all(torch.equal(tensor, rank["whole"][full]) for rank in column), full
                found[slot] = tensor
        return found
    place = column[0]["places"].get(name)
    if place is not None:
        layout = oracle.Layout([], {}, [], column[0]["cut_each"], {})
        for slot in column[0]["states"][place.flat]["tensors"]:
            parts = [rank["states"][place.flat]["tensors"][slot] for rank in column]
            found[slot] = oracle.assemble(parts, place, weight.shape, layout)
        oracle.check_rounding(name, found["master"], weight)
    return found


def whole(slices: list[Tensor], cut: Any, name: str) -> Tensor:
    """The slices of the tensor axis joined as the model cut them; copies must be equal."""
    if cut is None or len(slices) == 1:
        assert all(torch.equal(slices[0], other) for other in slices), f"ranks differ: {name}"
        return slices[0]
    dim, parts = cut
    if len(parts) < 2:  # AutoTP's slices may have different widths
        return torch.cat(slices, dim).contiguous()
    widths = [width // len(slices) for width in parts]
    pieces = [one.split(widths, dim) for one in slices]
    return torch.cat([piece[n] for n in range(len(parts)) for piece in pieces], dim).contiguous()
