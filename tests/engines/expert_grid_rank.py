"""What one rank of a training with experts on several model ranks does.

The record is made from live memory, as in `expert_rank`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import Tensor, distributed, nn
from torch.nn import functional

from . import expert_rank, grid_models, oracle
from .expert_grids import ExpertGridCase
from .expert_rank import ROWS, VOCABULARY, WIDTH, WORDS, layer
from .grid_models import HIDDEN, Axis, Column, Row
from .grid_models import WIDTH as TENSOR_WIDTH
from .grid_rank import Axes, whole
from .rank import ENABLE, join, merge
from .rank import prepare as prepare_rank

__all__ = ["prepare", "resume", "train"]

STEPS = 3  # whose losses are compared


def prepare() -> None:
    """Gloo gathers into a flat tensor only flat ones; the engine gives others (0.19.8)."""
    prepare_rank()
    gather = deepspeed.comm.all_gather_into_tensor

    def gather_flat(output: Tensor, tensor: Tensor, *more: Any, **options: Any) -> Any:
        return gather(output.view(-1), tensor.reshape(-1), *more, **options)

    deepspeed.comm.all_gather_into_tensor = gather_flat


# -- a pipeline


class Block(nn.Module):
    """A layer of experts beside a dense one, with a buffer."""

    def __init__(self, case: ExpertGridCase, number: int) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.moe = layer(case, number, residual=number == 1)
        self.register_buffer("shift", torch.randn(WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + torch.tanh(self.dense(hidden)) + self.shift.to(hidden.dtype)
        routed: Tensor = self.moe(hidden)[0]
        return hidden + routed


class Embedding(nn.Embedding):
    def __init__(self) -> None:
        super().__init__(VOCABULARY, WIDTH)


class Frozen(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.requires_grad_(False)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + super().forward(hidden).tanh()


def shifted(hidden: Tensor) -> Tensor:
    """A layer that is a plain function."""
    return hidden + 0.125


def logits(embedding: nn.Module, hidden: Tensor) -> Tensor:
    return functional.linear(hidden, embedding.weight)


def loss_of(output: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(output.float().flatten(0, 1), targets.flatten())


def build_pipeline(case: ExpertGridCase, seed: int) -> Any:
    from deepspeed.pipe import LayerSpec, TiedLayerSpec
    from deepspeed.runtime.pipe.topology import PipeDataParallelTopology

    first, last = (
        (TiedLayerSpec("embed", Embedding), TiedLayerSpec("embed", Embedding, forward_fn=logits))
        if case.tied
        else (LayerSpec(Embedding), LayerSpec(nn.Linear, WIDTH, VOCABULARY, bias=False))
    )
    return deepspeed.pipe.PipelineModule(
        [
            first,
            LayerSpec(Block, case, 0),
            shifted,
            LayerSpec(Frozen),
            LayerSpec(Block, case, 1),
            LayerSpec(nn.LayerNorm, WIDTH),
            last,
        ],
        topology=PipeDataParallelTopology(num_pp=case.pp, num_dp=case.dp),
        loss_fn=loss_of,
        partition_method="uniform",
        base_seed=seed,
        seed_layers=True,
    )


# -- tensor ranks


class SlicedExpert(nn.Module):
    """Both of its layers are cut over tensor ranks."""

    def __init__(self, axis: Axis) -> None:
        super().__init__()
        self.into = Column(axis, TENSOR_WIDTH, HIDDEN)
        self.out = Row(axis, HIDDEN, TENSOR_WIDTH)
        self.register_buffer("table", torch.randn(3))

    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = self.out(torch.tanh(self.into(hidden)))
        return result + self.table.sum().to(hidden.dtype)


class WholeExpert(nn.Module):
    """Each tensor rank has experts of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Linear(TENSOR_WIDTH, HIDDEN)
        self.out = nn.Linear(HIDDEN, TENSOR_WIDTH)
        self.register_buffer("table", torch.randn(3))

    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = self.out(torch.tanh(self.into(hidden)))
        return result + self.table.sum().to(hidden.dtype)


class TensorModel(nn.Module):
    """Two layers of experts between layers that tensor ranks cut."""

    def __init__(self, case: ExpertGridCase, axis: Axis) -> None:
        super().__init__()
        self.embedding = grid_models.Embedding(axis)
        self.attention = grid_models.Attention(axis)
        self.sparse = self.experts(case, axis, 0)
        self.norm = nn.LayerNorm(TENSOR_WIDTH)
        self.block = nn.ModuleDict({"moe": self.experts(case, axis, 1)})
        self.head = grid_models.Head(axis)

    def experts(self, case: ExpertGridCase, axis: Axis, number: int) -> nn.Module:
        return expert_rank.MoE(
            TENSOR_WIDTH,
            SlicedExpert(axis) if case.sliced else WholeExpert(),
            num_experts=case.experts[number],
            ep_size=case.ep[number],
            k=1,
            capacity_factor=float(case.experts[number]),  # room for all tokens of a rank
            use_rts=False,
            enable_expert_tensor_parallelism=case.sliced,
        )

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.attention(self.embedding(tokens))
        hidden = hidden + self.sparse(hidden)[0]
        hidden = self.norm(hidden)
        hidden = hidden + self.block["moe"](hidden)[0]
        return grid_models.loss(self.head(hidden), targets)


# -- the engine


def build_engine(case: ExpertGridCase, seed: int, axes: Axes | None) -> Any:
    torch.manual_seed(seed)
    model = build_pipeline(case, seed) if axes is None else TensorModel(case, Axis(axes.tensor))
    number_experts(case, model, seed)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": ROWS // case.dp,
        "gradient_accumulation_steps": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": case.stage},
        **ENABLE[case.dtype],
    }
    own = expert_rank.own_groups(case, model) if case.groups == "own" else None
    if own is None:
        adam = {"lr": 0.01, "betas": [0.8, 0.95], "weight_decay": 0.1, "torch_adam": True}
        config["optimizer"] = {"type": "AdamW", "params": adam}
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=None if own else list(model.parameters()),
        optimizer=torch.optim.AdamW(own, betas=(0.8, 0.95)) if own else None,
        config=merge(config, case.config),
        **({} if axes is None else {"mpu": axes}),
    )
    return engine


def number_experts(case: ExpertGridCase, model: nn.Module, seed: int) -> None:
    """Initializes every expert by its layer and its number in it, whatever the ep."""
    for path, module in model.named_modules():
        if not isinstance(module, expert_rank.MoE):
            continue
        place = distributed.get_rank() % (case.world // case.pp)
        ranks = case.world // case.pp
        if case.sliced:
            place, ranks = place // case.tp, case.dp
        ep = module.ep_size
        mark_cuts(module)
        data_first = case.config.get("use_data_before_expert_parallelism")
        ep_rank = place // (ranks // ep) if data_first else place % ep
        for local, expert in enumerate(module.deepspeed_moe.experts.deepspeed_experts):
            number = ep_rank * module.num_local_experts + local
            generator = torch.Generator().manual_seed(seed + 100 * len(path) + number)
            for tensor in expert.state_dict(keep_vars=True).values():
                full = whole_shape(tensor, case.tp)
                values = torch.randn(full, generator=generator) / 3
                if (cut := getattr(tensor, "cut", None)) is not None:
                    values = grid_models.sliced(
                        values, *cut, distributed.get_rank() % case.tp, case.tp
                    )
                tensor.data.copy_(values)


def mark_cuts(experts: nn.Module) -> None:
    """Experts are copies of one, and copies of parameters have no attributes."""
    for module in experts.modules():
        if isinstance(module, Column):
            module.weight.cut = (0, (HIDDEN,))  # type: ignore[attr-defined]
            assert module.bias is not None
            module.bias.cut = (0, (HIDDEN,))  # type: ignore[attr-defined]
        elif isinstance(module, Row):
            module.weight.cut = (1, (HIDDEN,))  # type: ignore[attr-defined]


def whole_shape(tensor: Tensor, tp: int) -> list[int]:
    """The shape of a parameter that tensor ranks may have cut."""
    shape, cut = list(tensor.shape), getattr(tensor, "cut", None)
    if cut is not None:
        shape[cut[0]] *= tp
    return shape


def train(rank: int, store: Path, case: ExpertGridCase, root: Path) -> None:
    """Trains, saves `root`/run, writes `root`/oracle.pt."""
    join(rank, case.world, store)
    axes = Axes(case) if case.model == "tensor" else None
    engine = build_engine(case, case.seed, axes)
    for step in range(case.steps):
        train_step(engine, case, step)
    engine.save_checkpoint(str(root / "run"))
    finish(engine, case, root / "oracle.pt")


def resume(rank: int, store: Path, case: ExpertGridCase, directory: Path, output: Path) -> None:
    """Loads `directory` into a freshly initialized engine, writes what it then holds."""
    join(rank, case.world, store)
    axes = Axes(case) if case.model == "tensor" else None
    engine = build_engine(case, case.seed + 1000, axes)
    loaded, _ = engine.load_checkpoint(str(directory))
    if loaded is None:
        raise FileNotFoundError(f"the engine found no checkpoint in {directory}")
    finish(engine, case, output)


def finish(engine: Any, case: ExpertGridCase, output: Path) -> None:
    state = record(engine, case)
    losses = [train_step(engine, case, case.steps + more) for more in range(STEPS)]
    if distributed.get_rank() == 0:
        torch.save({**state, "losses": losses}, output)


def train_step(engine: Any, case: ExpertGridCase, step: int) -> float:
    """Trains on the batch of this step; the mean loss of the global batch."""
    if case.model == "tensor":
        return train_step_of_tensor_ranks(engine, case, step)
    rank = distributed.get_rank() % case.dp
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(VOCABULARY, (2, ROWS, WORDS), generator=generator)
    rows = slice(rank * ROWS // case.dp, (rank + 1) * ROWS // case.dp)
    return float(engine.train_batch(data_iter=iter([(tokens[0][rows], tokens[1][rows])])))


def train_step_of_tensor_ranks(engine: Any, case: ExpertGridCase, step: int) -> float:
    loss = engine(*grid_models.batch(step, distributed.get_rank() // case.tp, case.dp))
    engine.backward(loss)
    engine.step()
    mean = loss.detach().double()
    distributed.all_reduce(mean)
    return float(mean) / case.world


# -- what the ranks hold


def record(engine: Any, case: ExpertGridCase) -> dict[str, Any]:
    """Everything that all ranks hold, merged; copies on several ranks must be equal."""
    module, optimizer = engine.module, engine.optimizer
    names, layout = expert_rank.global_names(module), oracle.read_layout(module, optimizer)
    groups = [
        {key: value for key, value in group.items() if key not in ("params", "name")}
        for group in optimizer.optimizer.param_groups
    ]
    processes = getattr(optimizer, "real_dp_process_group", None)
    own = {
        "cuts": {names[n]: getattr(p, "cut", None) for n, p in module.named_parameters()},
        "weights": {names[key]: tensor.clone() for key, tensor in module.state_dict().items()},
        "trainable": {names[n] for n, p in module.named_parameters() if p.requires_grad},
        "frozen": {names[n] for n, p in module.named_parameters() if not p.requires_grad},
        "states": oracle.local_states(optimizer, layout),
        "sharing": [distributed.get_process_group_ranks(group) for group in processes],
        "places": {names[name]: place for name, place in layout.places.items()},
        "settings": {
            names[name]: settings
            for members, settings in zip(layout.groups, groups, strict=True)
            for name in members
        },
    }
    ranks: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(ranks, own)
    by_tensor_rank: list[dict[str, Tensor]] = [{} for _ in range(case.tp)]
    steps: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    for number, rank in enumerate(ranks):
        tensors = by_tensor_rank[number % case.tp]
        for name, weight in rank["weights"].items():
            expert_rank.same(tensors, f"{name}/param", weight)
        for name, place in rank["places"].items():
            states = [ranks[other]["states"][place.flat] for other in rank["sharing"][place.flat]]
            shape = rank["weights"][name].shape
            for slot in states[0]["tensors"]:
                parts = [state["tensors"][slot] for state in states]
                whole = oracle.assemble(parts, place, shape, layout)
                expert_rank.same(tensors, f"{name}/{slot}", whole)
            (step,) = {state["scalars"]["step"] for state in states}
            assert steps.setdefault(name, step) == step
            oracle.check_rounding(name, tensors[f"{name}/master"], rank["weights"][name])
        for name, group in rank["settings"].items():
            assert settings.setdefault(name, group) == group
    cuts = {name: cut for rank in ranks for name, cut in rank["cuts"].items()}
    return {
        "tensors": joined(by_tensor_rank, cuts),
        "steps": steps,
        "settings": settings,
        "trainable": set().union(*(rank["trainable"] for rank in ranks)),
        "frozen": set().union(*(rank["frozen"] for rank in ranks)),
        "counters": {"global_steps": engine.global_steps, "skipped_steps": engine.skipped_steps},
    }


def joined(ranks: list[dict[str, Tensor]], cuts: dict[str, Any]) -> dict[str, Tensor]:
    """The slices of tensor ranks as whole tensors; copies must be equal."""
    tensors = {}
    for name in dict.fromkeys(name for rank in ranks for name in rank):
        slices = [rank[name] for rank in ranks if name in rank]
        tensors[name] = whole(slices, cuts.get(name.rpartition("/")[0]), name)
    return tensors
