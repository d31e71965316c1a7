"""What one rank of a training with experts does: build, train, save or load, record.

The record is made from live memory: every rank says which numbers its experts have in the whole
model, and which ranks share each of its flat buffers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.utils import groups as process_groups
from torch import Tensor, distributed, nn
from torch.nn import functional

from . import optimizers, oracle
from .experts import ExpertCase
from .rank import ENABLE, compile_extension, join, merge, prepare

__all__ = ["compile_extension", "prepare", "resume", "train"]

ROWS, WORDS = 24, 5
VOCABULARY, WIDTH, HIDDEN = 31, 10, 7


class Expert(nn.Module):
    """Odd sizes, a tied weight, a buffer, and a frozen weight if asked for."""

    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.into = nn.Linear(WIDTH, HIDDEN)
        self.out = nn.Linear(HIDDEN, WIDTH)
        self.gain = nn.Parameter(torch.ones(1))
        self.register_buffer("table", torch.randn(3))
        if frozen:
            self.kept = nn.Parameter(torch.randn(WIDTH), requires_grad=False)

    def forward(self, hidden: Tensor) -> Tensor:
        between = torch.tanh(self.into(hidden)) * self.gain
        result: Tensor = self.out(between) + self.table.sum().to(hidden.dtype)
        return result + self.kept if hasattr(self, "kept") else result


class Model(nn.Module):
    """Two layers of experts, the second one residual, between dense layers."""

    def __init__(self, case: ExpertCase) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.register_buffer("shift", torch.randn(WIDTH))
        self.first = nn.Linear(WIDTH, WIDTH)
        self.sparse = layer(case, 0, residual=False)
        self.pinned = nn.Linear(WIDTH, WIDTH)
        self.pinned.requires_grad_(False)
        self.block = nn.ModuleDict({"residual": layer(case, 1, residual=True)})
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        hidden = self.embedding(tokens) + self.shift.to(self.first.weight.dtype)
        hidden = hidden + torch.tanh(self.first(hidden))
        routed, _, _ = self.sparse(hidden)  # the loss of balance depends on the dp
        hidden = self.pinned(hidden + routed)
        routed, _, _ = self.block["residual"](hidden)
        logits = self.head(self.norm(hidden + routed)).float()
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def layer(case: ExpertCase, number: int, residual: bool) -> MoE:
    """A layer whose routing depends on its inputs alone, and drops no token."""
    return MoE(
        WIDTH,
        Expert(case.frozen_experts),
        num_experts=case.experts[number],
        ep_size=case.ep[number],
        k=1 + number,
        use_residual=residual,
        drop_tokens=False,
        use_rts=False,
        top2_2nd_expert_sampling=False,
    )


def build_model(case: ExpertCase, seed: int) -> Model:
    """Every expert is initialized by its number in the whole model, whatever the ep."""
    torch.manual_seed(seed)
    model = Model(case)
    for number, moe in enumerate((model.sparse, model.block["residual"])):
        dp, ep = distributed.get_world_size(), case.ep[number]
        rank = distributed.get_rank()
        data_first = case.config.get("use_data_before_expert_parallelism")
        ep_rank = rank // (dp // ep) if data_first else rank % ep
        for local, expert in enumerate(moe.deepspeed_moe.experts.deepspeed_experts):
            number_of_expert = ep_rank * moe.num_local_experts + local
            generator = torch.Generator().manual_seed(seed + 100 * number + number_of_expert)
            for tensor in expert.state_dict().values():
                tensor.copy_(torch.randn(tensor.shape, generator=generator) / 3)
    return model


def build_engine(case: ExpertCase, seed: int) -> Any:
    model = build_model(case, seed)
    adam = {"lr": 0.01, "betas": [0.8, 0.95], "weight_decay": 0.1, "torch_adam": True}
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": ROWS // case.dp,
        "gradient_accumulation_steps": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": case.stage},
        **ENABLE[case.dtype],
    }
    if case.groups == "config":
        config["optimizer"] = {"type": "AdamW", "params": adam}
    own = own_groups(case, model) if case.groups == "own" else None
    engine, *_ = deepspeed.initialize(
        model=model,
        model_parameters=list(model.parameters()) if own is None else None,
        optimizer=optimizers.FACTORIES[case.optimizer](own) if own else None,
        config=merge(config, case.config),
    )
    return engine


def own_groups(case: ExpertCase, model: Model) -> list[dict[str, Any]]:
    """The user's two groups, with decay and without, which DeepSpeed splits."""
    named = list(model.named_parameters())
    groups = [
        {"params": [p for _, p in named if p.ndim > 1], "weight_decay": 0.1, "lr": 0.01},
        {"params": [p for _, p in named if p.ndim < 2], "weight_decay": 0.0, "lr": 0.005},
    ]
    groups[0]["name"], groups[1]["name"] = "decayed", "others"
    size = {} if case.max_group_size is None else {"max_group_size": case.max_group_size}
    split = split_params_into_different_moe_groups_for_optimizer(groups, **size)
    split = [group for group in split if group["params"]]
    # DeepSpeed goes through a set of the sizes: their order is another one in every process
    downwards = case.mixed_order and distributed.get_rank() % 2 == 1
    experts = [group for group in split if group.get("moe")]
    if len(set(case.ep)) > 1:
        experts.sort(key=lambda group: group["name"], reverse=downwards)
    return [*(group for group in split if not group.get("moe")), *experts]


def train(rank: int, store: Path, case: ExpertCase, root: Path, losses: int) -> None:
    """Trains, saves `root`/run, writes `root`/oracle.pt."""
    join(rank, case.dp, store)
    engine = build_engine(case, case.seed)
    for _ in range(case.steps):
        train_step(engine)
    engine.save_checkpoint(str(root / "run"))
    finish(engine, root / "oracle.pt", losses)


def resume(
    rank: int, store: Path, case: ExpertCase, directory: Path, output: Path, losses: int
) -> None:
    """Loads `directory` into a freshly initialized engine, writes what it then holds."""
    join(rank, case.dp, store)
    engine = build_engine(case, case.seed + 1000)
    loaded, _ = engine.load_checkpoint(str(directory))
    if loaded is None:
        raise FileNotFoundError(f"the engine found no checkpoint in {directory}")
    finish(engine, output, losses)


def finish(engine: Any, output: Path, losses: int) -> None:
    state = record(engine)
    following = [train_step(engine) for _ in range(losses)]
    if distributed.get_rank() == 0:
        torch.save({**state, "losses": following}, output)


def train_step(engine: Any) -> float:
    """Trains on the batch of this step; the mean loss of the global batch."""
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    generator = torch.Generator().manual_seed(1000 + engine.global_steps)
    tokens = torch.randint(VOCABULARY, (2, ROWS, WORDS), generator=generator)
    rows = slice(rank * ROWS // ranks, (rank + 1) * ROWS // ranks)
    loss = engine(tokens[0][rows], tokens[1][rows])
    engine.backward(loss)
    engine.step()
    mean = loss.detach().double()
    distributed.all_reduce(mean)
    return float(mean) / ranks


# -- what the ranks hold


def global_names(module: nn.Module) -> dict[str, str]:
    """The names of this rank's state_dict, with the numbers that experts have in the model."""
    names = {name: name for name in module.state_dict()}
    for path, moe in module.named_modules():
        if isinstance(moe, MoE):
            ep_rank = process_groups._get_expert_parallel_rank(moe.expert_group_name)
            prefix = f"{path}.deepspeed_moe.experts.deepspeed_experts."
            for name in names:
                if name.startswith(prefix):
                    local, _, inner = name.removeprefix(prefix).partition(".")
                    number = ep_rank * moe.num_local_experts + int(local)
                    names[name] = f"{prefix}{number}.{inner}"
    return names


def record(engine: Any) -> dict[str, Any]:
    """Everything that all ranks hold, merged; copies on several ranks must be equal."""
    if engine.zero_optimization_stage() == 0:
        return record_without_zero(engine)
    module, optimizer = engine.module, engine.optimizer
    names, layout = global_names(module), oracle.read_layout(module, optimizer)
    own = {
        "weights": {names[key]: tensor.clone() for key, tensor in module.state_dict().items()},
        "trainable": {names[n] for n, p in module.named_parameters() if p.requires_grad},
        "frozen": {names[n] for n, p in module.named_parameters() if not p.requires_grad},
        "states": oracle.local_states(optimizer, layout),
        "sharing": [
            distributed.get_process_group_ranks(group) for group in optimizer.real_dp_process_group
        ],
        "places": {names[name]: place for name, place in layout.places.items()},
        "members": [[names[name] for name in group] for group in layout.groups],
        "kinds": [
            (group.get("name"), group["weight_decay"]) for group in optimizer.optimizer.param_groups
        ],
    }
    ranks: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(ranks, own)
    tensors: dict[str, Tensor] = {}
    steps: dict[str, Any] = {}
    for rank in ranks:
        for name, weight in rank["weights"].items():
            same(tensors, f"{name}/param", weight)
        for name, place in rank["places"].items():
            states = [ranks[other]["states"][place.flat] for other in rank["sharing"][place.flat]]
            shape = rank["weights"][name].shape
            for slot in states[0]["tensors"]:
                parts = [state["tensors"][slot] for state in states]
                same(tensors, f"{name}/{slot}", oracle.assemble(parts, place, shape, layout))
            step = {state["scalars"]["step"] for state in states}
            assert len(step) == 1
            steps[name] = step.pop()
            oracle.check_rounding(name, tensors[f"{name}/master"], rank["weights"][name])
    return described(engine, ranks, tensors, steps)


def record_without_zero(engine: Any) -> dict[str, Any]:
    """The same of stage 0, where every rank has the whole state of what it has."""
    module, optimizer = engine.module, engine.optimizer
    names = global_names(module)
    tensors, steps, _, members = oracle.whole_states(module, optimizer)
    base = getattr(optimizer, "optimizer", optimizer)
    own = {
        "weights": {names[key]: tensor.clone() for key, tensor in module.state_dict().items()},
        "trainable": {names[n] for n, p in module.named_parameters() if p.requires_grad},
        "frozen": {names[n] for n, p in module.named_parameters() if not p.requires_grad},
        "tensors": {renamed(name, names): tensor for name, tensor in tensors.items()},
        "steps": {names[name]: step for name, step in steps.items()},
        "members": [[names[name] for name in group] for group in members],
        "kinds": [(group.get("name"), group["weight_decay"]) for group in base.param_groups],
    }
    ranks: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(ranks, own)
    everywhere: dict[str, Tensor] = {}
    for rank in ranks:
        for name, weight in rank["weights"].items():
            same(everywhere, f"{name}/param", weight)
        for name, tensor in rank["tensors"].items():
            same(everywhere, name, tensor)
    return described(
        engine, ranks, everywhere, {n: step for rank in ranks for n, step in rank["steps"].items()}
    )


def renamed(name: str, names: dict[str, str]) -> str:
    """`parameter/slot` with the parameter's name in the whole model."""
    parameter, _, slot = name.rpartition("/")
    return f"{names[parameter]}/{slot}"


def described(
    engine: Any, ranks: list[Any], tensors: dict[str, Tensor], steps: dict[str, Any]
) -> dict[str, Any]:
    """The record: what all ranks say, and the rest of the engine."""
    module, optimizer = engine.module, engine.optimizer
    groups = getattr(optimizer, "optimizer", optimizer).param_groups
    owners = {id(parameter): name for name, parameter in module.named_parameters()}
    return {
        "tensors": tensors,
        "steps": steps,
        "trainable": set().union(*(rank["trainable"] for rank in ranks)),
        "frozen": set().union(*(rank["frozen"] for rank in ranks)),
        "aliases": {
            name: owners[id(parameter)]
            for name, parameter in module.named_parameters(remove_duplicate=False)
            if owners[id(parameter)] != name
        },
        "groups": [
            {key: value for key, value in group.items() if key != "params"} for group in groups
        ],
        "members": [
            set().union(*(rank["members"][group_on(rank, ranks[0], number)] for rank in ranks))
            for number in range(len(groups))
        ],
        "order": ranks[0]["members"],
        "counters": {"global_steps": engine.global_steps, "skipped_steps": engine.skipped_steps},
    }


def group_on(rank: dict[str, Any], first: dict[str, Any], number: int) -> int:
    """Where a rank has a group of rank 0: ranks may have their groups in another order."""
    if rank["kinds"] == first["kinds"]:
        return number
    found: int = rank["kinds"].index(first["kinds"][number])
    return found


def same(tensors: dict[str, Tensor], name: str, tensor: Tensor) -> None:
    first = tensors.setdefault(name, tensor)
    assert first.dtype == tensor.dtype, name
    assert torch.equal(first, tensor), f"ranks differ: {name}"
