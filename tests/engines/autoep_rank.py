"""What one rank of a training with AutoEP does: build, train, save or load, record.

The record is made from live memory: every rank says which of a layer's experts it has, and which
ranks share each of its flat buffers.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.module_inject.auto_ep_layer import AutoEPMoELayer
from torch import Tensor, distributed, nn

from . import oracle
from .autoep import AutoEPCase
from .rank import ENABLE, join, merge
from .rank import prepare as prepare_rank

__all__ = ["prepare", "resume", "train"]

ROWS, WORDS, VOCABULARY = 8, 6, 37
LOSSES = 3


def prepare() -> None:
    """DeepSpeed 0.19.8 asks the registry of an older transformers for hooks that nobody needs."""
    prepare_rank()
    base = importlib.import_module("deepspeed.module_inject.auto_ep_presets.base")
    vars(base)["_install_instance_transformers_output_recorders"] = lambda *_: True


def build_model(case: AutoEPCase, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        # AutoTP gives whole heads: of one head, the second rank has none, which stage 3 cannot take
        "num_key_value_heads": case.tp if case.stage == 3 else 1,
        "max_position_embeddings": 32,
        "attn_implementation": "eager",
    }
    if case.family == "mixtral":
        from transformers import MixtralConfig, MixtralForCausalLM

        return MixtralForCausalLM(
            MixtralConfig(
                **sizes, intermediate_size=20, num_local_experts=case.experts, num_experts_per_tok=2
            )
        )
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **sizes,
            intermediate_size=24,
            moe_intermediate_size=12,
            num_experts=case.experts,
            num_experts_per_tok=2,
            mlp_only_layers=[0],
            head_dim=8,
            tie_word_embeddings=True,
        )
    )


def build_engine(case: AutoEPCase, seed: int) -> Any:
    model = build_model(case, seed)
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": ROWS * case.tp // case.dp,
        "gradient_accumulation_steps": 1,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": case.stage},
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 0.01, "betas": [0.8, 0.95], "weight_decay": 0.1, "torch_adam": True},
        },
        "expert_parallel": {
            "enabled": True,
            "autoep_size": case.ep,
            "preset_model": case.family,
            "use_grouped_mm": False,
        },
        **ENABLE[case.dtype],
    }
    if case.tp > 1:
        config["tensor_parallel"] = {"autotp_size": case.tp, "preset_model": case.family}
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=list(model.parameters()), config=merge(config, case.config)
    )
    return engine


def train(rank: int, store: Path, case: AutoEPCase, root: Path) -> None:
    """Trains, saves `root`/run, writes `root`/oracle.pt."""
    join(rank, case.dp, store)
    engine = build_engine(case, case.seed)
    for _ in range(case.steps):
        train_step(engine, case.tp)
    engine.save_checkpoint(str(root / "run"))
    finish(engine, case, root / "oracle.pt")


def resume(rank: int, store: Path, case: AutoEPCase, directory: Path, output: Path) -> None:
    """Loads `directory` into a freshly initialized engine, writes what it then holds."""
    join(rank, case.dp, store)
    engine = build_engine(case, case.seed + 1000)
    loaded, _ = engine.load_checkpoint(str(directory))
    if loaded is None:
        raise FileNotFoundError(f"the engine found no checkpoint in {directory}")
    finish(engine, case, output)


def finish(engine: Any, case: AutoEPCase, output: Path) -> None:
    state = {} if case.stage in (0, 3) or case.tp > 1 else record(engine)
    losses = [train_step(engine, case.tp) for _ in range(LOSSES)]
    if distributed.get_rank() == 0:
        torch.save({**state, "losses": losses}, output)


def train_step(engine: Any, tp: int) -> float:
    """Trains on the batch of this step; the mean loss of the global batch."""
    rank, ranks = distributed.get_rank() // tp, distributed.get_world_size() // tp
    generator = torch.Generator().manual_seed(1000 + engine.global_steps)
    tokens = torch.randint(VOCABULARY, (ROWS, WORDS), generator=generator)
    rows = slice(rank * ROWS // ranks, (rank + 1) * ROWS // ranks)
    logits = engine(input_ids=tokens[rows]).logits.float()
    loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[rows][:, 1:].flatten())
    engine.backward(loss)
    engine.step()
    mean = loss.detach().double()
    distributed.all_reduce(mean)
    return float(mean) / distributed.get_world_size()


def record(engine: Any) -> dict[str, Any]:
    """Everything that all ranks hold, merged: experts are stacked, copies must be equal."""
    module, optimizer = engine.module, engine.optimizer
    layout = oracle.read_layout(module, optimizer)
    layers = {n: m for n, m in module.named_modules() if isinstance(m, AutoEPMoELayer)}
    stacked = {f"{name}.experts.{w}" for name in layers for w in ("w1", "w2", "w3")}
    own = {
        "weights": {key: tensor.clone() for key, tensor in module.state_dict().items()},
        "ep_ranks": {name: layer.ep_rank for name, layer in layers.items()},
        "states": oracle.local_states(optimizer, layout),
        "sharing": [
            distributed.get_process_group_ranks(group) for group in optimizer.real_dp_process_group
        ],
    }
    ranks: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(ranks, own)
    parts: dict[str, dict[int, Tensor]] = {}
    steps: dict[str, Any] = {}

    def add(name: str, slot: str, rank: dict[str, Any], tensor: Tensor) -> None:
        layer = name.rpartition(".experts.")[0]
        place = rank["ep_ranks"][layer] if name in stacked else 0
        first = parts.setdefault(f"{name}/{slot}", {}).setdefault(place, tensor)
        assert torch.equal(first, tensor), f"ranks differ: {name}/{slot}"

    for rank in ranks:
        for name, weight in rank["weights"].items():
            add(name, "param", rank, weight)
        for name, place in layout.places.items():
            states = [ranks[other]["states"][place.flat] for other in rank["sharing"][place.flat]]
            shape = rank["weights"][name].shape
            for slot in states[0]["tensors"]:
                pieces = [state["tensors"][slot] for state in states]
                whole = oracle.assemble(pieces, place, shape, layout)
                add(name, slot, rank, whole)
                if slot == "master":
                    oracle.check_rounding(name, whole, rank["weights"][name])
            (steps[name],) = {state["scalars"]["step"] for state in states}
    tensors = {
        name: torch.cat([own[place] for place in sorted(own)]) if len(own) > 1 else own[0]
        for name, own in parts.items()
    }
    owners = {id(parameter): name for name, parameter in module.named_parameters()}
    return {
        "tensors": tensors,
        "steps": steps,
        "trainable": {name for name, each in module.named_parameters() if each.requires_grad},
        "aliases": {
            name: owners[id(parameter)]
            for name, parameter in module.named_parameters(remove_duplicate=False)
            if owners[id(parameter)] != name
        },
        "order": layout.groups,
        "counters": {"global_steps": engine.global_steps, "skipped_steps": engine.skipped_steps},
    }
