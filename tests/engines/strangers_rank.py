"""What one rank of a stranger's training does: build, train, save or load, record.

The record is joined from live memory: each parameter says how it was cut (`parameter.cut`). Of
AutoTP, the slices of the first weights show it, since the whole ones are known too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import Tensor, distributed, nn

from . import expert_rank, oracle, strangers_models
from .grid_models import Axis
from .grid_rank import Axes, partitioned_states, states_without_zero, whole
from .rank import ENABLE, join, merge
from .rank import prepare as prepare_rank
from .strangers import Stranger
from .strangers_models import PIPELINES, ROWS

__all__ = ["prepare", "resume", "train"]

ADAM = {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.1, "torch_adam": True}}
STEPS, LOSSES = 3, 2


def prepare() -> None:
    """Gloo cannot broadcast parameters without dimensions; all ranks have them from one seed."""
    prepare_rank()
    deepspeed.runtime.engine.DeepSpeedEngine._broadcast_model = lambda self: None


class Grid(Axes):
    """The axes of a case, under the names that `Axes` asks for."""

    def __init__(self, case: Stranger) -> None:
        self.sizes = case.sizes
        pp, dp, tp = case.sizes
        super().__init__(_Sizes(pp, dp, tp))  # type: ignore[arg-type]


class _Sizes:
    def __init__(self, pp: int, dp: int, tp: int) -> None:
        self.pp, self.dp, self.tp = pp, dp, tp


def train(rank: int, store: Path, case: Stranger, root: Path) -> None:
    """Trains, saves `root`/run, writes `root`/oracle.pt."""
    join(rank, case.world, store)
    axes = Grid(case)
    engine = build_engine(case, axes)
    for step in range(STEPS):
        train_step(engine, case, axes, step)
    info = {"universal_checkpoint_info": strangers_models.INFO} if case.info else {}
    engine.save_checkpoint(str(root / "run"), client_state={"steps": STEPS, **info})
    finish(engine, case, axes, root / "oracle.pt")


def resume(rank: int, store: Path, case: Stranger, directory: Path, output: Path) -> None:
    """Loads `directory` into an engine with other first weights, writes what it then holds."""
    join(rank, case.world, store)
    axes = Grid(case)
    engine = build_engine(case, axes, 1007)
    loaded, _ = engine.load_checkpoint(str(directory))
    if loaded is None:
        raise FileNotFoundError(f"the engine found no checkpoint in {directory}")
    finish(engine, case, axes, output)


def finish(engine: Any, case: Stranger, axes: Grid, output: Path) -> None:
    held = record(engine, case, axes)
    losses = [train_step(engine, case, axes, STEPS + more) for more in range(LOSSES)]
    if distributed.get_rank() == 0:
        torch.save({**held, "losses": losses}, output)


# -- the engine


def build_engine(case: Stranger, axes: Grid, seed: int = 7) -> Any:
    torch.manual_seed(seed)
    axis, (_, dp, tp) = Axis(axes.tensor), case.sizes
    more: dict[str, Any] = {}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": ROWS // dp,
        "gradient_accumulation_steps": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": case.stage},
        **ENABLE[case.dtype],
    }
    if case.model in PIPELINES:
        model: Any = build_pipeline(case, axis, seed)
    elif case.model == "decoder":
        model, more = strangers_models.Decoder(axis, case.stage), {"mpu": axes}
    elif case.model == "experts":
        model = strangers_models.Experts(case.ep)
        number_experts(model, axes.dp % case.ep, seed)
        config["optimizer"] = ADAM
    else:
        model = strangers_models.build_qwen(seed)
        config |= {"optimizer": ADAM, "tensor_parallel": {"autotp_size": tp}}
    config = merge(config, case.config)
    config["train_micro_batch_size_per_gpu"] //= config["gradient_accumulation_steps"]
    own = "optimizer" not in config
    first = {name: each.detach().clone() for name, each in model.named_parameters()}
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=None if own else list(model.parameters()),
        optimizer=torch.optim.AdamW(groups_of(model, case.groups)) if own else None,
        config=config,
        **more,
    )
    if case.model == "qwen":
        find_cuts(engine.module, first, axes)
    return engine


def build_pipeline(case: Stranger, axis: Axis, seed: int) -> Any:
    from deepspeed.runtime.pipe.topology import (
        PipeDataParallelTopology,
        PipeModelDataParallelTopology,
    )

    pp, dp, tp = case.sizes
    topology = (
        PipeModelDataParallelTopology(num_pp=pp, num_mp=tp, num_dp=dp)
        if case.model == "blocks"  # an axis `model`, even of one rank, as Megatron-DeepSpeed has it
        else PipeDataParallelTopology(num_pp=pp, num_dp=dp)
    )
    return deepspeed.pipe.PipelineModule(
        PIPELINES[case.model](axis),
        topology=topology,
        loss_fn=strangers_models.loss,
        partition_method=case.method,
        base_seed=seed,
    )


def groups_of(model: nn.Module, kind: str) -> list[dict[str, Any]]:
    """All parameters, frozen ones too: as one group, or with decay and without."""
    every = list(model.parameters())
    if kind == "one":
        return [{"params": every, "lr": 0.01, "weight_decay": 0.1}]
    groups = [
        {"params": [p for p in every if p.ndim > 1], "lr": 0.01, "weight_decay": 0.1},
        {"params": [p for p in every if p.ndim < 2], "lr": 0.0025, "weight_decay": 0.0},
    ]
    return [group for group in groups if any(p.requires_grad for p in group["params"])]


def number_experts(model: nn.Module, ep_rank: int, seed: int) -> None:
    """Initializes every expert by its number, whatever the ep."""
    for place, module in enumerate(model.modules()):
        if isinstance(module, expert_rank.MoE):
            for local, expert in enumerate(module.deepspeed_moe.experts.deepspeed_experts):
                number = ep_rank * module.num_local_experts + local
                generator = torch.Generator().manual_seed(seed + 100 * place + number)
                for tensor in expert.state_dict().values():
                    tensor.copy_(torch.randn(tensor.shape, generator=generator) / 3)


def find_cuts(module: nn.Module, first: dict[str, Tensor], axes: Grid) -> None:
    """Says of AutoTP's parameters along which dimension the whole ones were cut."""
    own = {name: each.detach().float() for name, each in module.named_parameters()}
    ranks: list[Any] = [None] * axes.sizes[2]
    distributed.all_gather_object(ranks, own, group=axes.tensor)
    for name, parameter in module.named_parameters():
        slices, full = [each[name] for each in ranks], first[name].to(parameter.dtype).float()
        if all(each.shape == full.shape and torch.equal(each, full) for each in slices):
            continue
        (dim,) = (
            dim
            for dim in range(full.ndim)
            if sum(each.shape[dim] for each in slices) == full.shape[dim]
            and torch.equal(torch.cat(slices, dim), full)
        )
        parameter.cut = (dim, ())  # type: ignore[attr-defined]


def train_step(engine: Any, case: Stranger, axes: Grid, step: int) -> float:
    """Trains on the batch of this step; the mean loss of the global batch."""
    dp, count = case.sizes[1], engine.gradient_accumulation_steps()
    tokens, targets = strangers_models.batch(step, axes.dp, dp)
    parts = list(zip(tokens.chunk(count), targets.chunk(count), strict=True))
    if case.model in PIPELINES:
        return float(engine.train_batch(data_iter=iter(parts)))
    total = torch.zeros((), dtype=torch.float64)
    for words, wanted in parts:
        if case.model == "qwen":
            loss = engine(input_ids=words, labels=words).loss
        else:
            loss = strangers_models.loss(engine(words), wanted)
        engine.backward(loss)
        engine.step()
        total += loss.detach().double() / count
    distributed.all_reduce(total, group=axes.data)
    return float(total) / dp


# -- what the ranks hold


def record(engine: Any, case: Stranger, axes: Grid) -> dict[str, Any]:
    """What all ranks hold, joined on rank 0; copies on several ranks must be equal."""
    module, optimizer = engine.module, engine.optimizer
    names = expert_rank.global_names(module)
    names |= {name: names.get(name, name) for name, _ in module.named_parameters()}
    is_cut = case.stage > 0
    saved = {*module.state_dict()}
    own = {
        "place": (axes.pp, axes.tp),
        "names": names,
        "weights": oracle.gather_weights(module),
        "cuts": {name: getattr(each, "cut", None) for name, each in module.named_parameters()},
        "buffers": {n: b.clone() for n, b in module.named_buffers() if n in saved},
        "trainable": {names[n] for n, p in module.named_parameters() if p.requires_grad},
        **(partitioned_states if is_cut else states_without_zero)(module, optimizer),
    }
    if is_cut:
        groups = getattr(optimizer, "real_dp_process_group", None)
        groups = groups if isinstance(groups, list) else [axes.data] * len(own["states"])
        own["sharing"] = [distributed.get_process_group_ranks(group) for group in groups]
    ranks: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(ranks, own)
    tensors: dict[str, Tensor] = {}
    places: dict[tuple[int, int], dict[str, Tensor]] = {}
    cuts: dict[str, Any] = {}
    steps: dict[str, Any] = {}
    for rank in ranks:
        mine = places.setdefault(rank["place"], {})
        cuts |= {rank["names"][name]: cut for name, cut in rank["cuts"].items()}
        for key, tensor in held_of(rank, ranks).items():
            expert_rank.same(mine, key, tensor)
        for name, step in steps_of(rank).items():
            assert steps.setdefault(name, step) == step, name
    pp, _, tp = case.sizes
    for stage in range(pp):
        for key in dict.fromkeys(key for t in range(tp) for key in places[stage, t]):
            slices = [places[stage, t][key] for t in range(tp) if key in places[stage, t]]
            expert_rank.same(tensors, key, whole(slices, cuts.get(key.rpartition("/")[0]), key))
    return {
        "tensors": tensors,
        "steps": steps,
        "trainable": set().union(*(rank["trainable"] for rank in ranks)),
        "counters": {"global_steps": engine.global_steps, "skipped_steps": engine.skipped_steps},
    }


def held_of(rank: dict[str, Any], ranks: list[dict[str, Any]]) -> dict[str, Tensor]:
    """The tensors of one rank's model, as it shares them with others."""
    names, weights = rank["names"], rank["weights"]
    held = {f"{names[name]}/param": weight for name, weight in weights.items()}
    held |= {f"{names.get(name, name)}/param": each for name, each in rank["buffers"].items()}
    for key, tensor in rank.get("whole", {}).items():
        name, _, slot = key.rpartition("/")
        held[f"{names[name]}/{slot}"] = tensor
    for name, place in rank.get("places", {}).items():
        states = [ranks[other]["states"][place.flat] for other in rank["sharing"][place.flat]]
        layout = oracle.Layout([], {}, [], rank["cut_each"], {})
        for slot in states[0]["tensors"]:
            parts = [state["tensors"][slot] for state in states]
            full = oracle.assemble(parts, place, weights[name].shape, layout)
            held[f"{names[name]}/{slot}"] = full
        oracle.check_rounding(name, held[f"{names[name]}/master"], weights[name])
    return held


def steps_of(rank: dict[str, Any]) -> dict[str, Any]:
    names = rank["names"]
    if "whole_steps" in rank:
        return {names[name]: step for name, step in rank["whole_steps"].items()}
    return {
        names[name]: rank["states"][place.flat]["scalars"].get("step")
        for name, place in rank["places"].items()
    }
