"""Directories of GPT-NeoX and of BLOOM's training, laid out by hand: no program of them runs here.

Every fact was read in the sources: GPT-NeoX (gpt2_model.py, checkpointing.py, transformer.py; tied
or not, as a pipeline or, with pipe-parallel-size 0, as one `sequential`), bigscience's Megatron-
DeepSpeed (gpt_model.py, checkpointing.py), DeepSpeed 0.9.3 (stage_1_and_2.py) and 0.6.5
(bf16_optimizer.py, whose ds_config says stage 0). `param_slice_mappings` are left out.

    NeoX     0 embedding | 1 function | 2.. layers | function | norm | output layer or tied
    BLOOM    0 function | 1 embedding, tied | 2 function | 3.. layers | function | norm | tied

The numbers come from a generator. A file gets a slice of them by plain torch, and nothing of zckpt.
"""

from __future__ import annotations

import argparse
import contextlib
import enum
import random
import sys
import types
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

WIDTH, HEADS, VOCABULARY, DIVISOR = 8, 4, 37, 4
STEP = 5  # of the optimizer; the engine has taken one more, which overflowed in fp16
SLOTS = ("master", "exp_avg", "exp_avg_sq")
EMBED = "tied_modules.embed."


@dataclass(frozen=True)
class Run:
    """One save. `bounds` are those of its pipeline's stages; without them it is one `sequential`.

    With `drift` the tensor ranks have different copies of what is not cut: of BLOOM's norms, and of
    NeoX's biases behind row-parallel layers, whose sum counts if it has gpt_j_residual.
    """

    family: str
    tp: int = 2
    dp: int = 2
    bounds: tuple[int, ...] = ()
    layers: int = 4
    tied: bool = False
    drift: bool = False

    @property
    def pp(self) -> int:
        return max(len(self.bounds) - 1, 1)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float16 if self.family == "neox" else torch.bfloat16

    @property
    def rows(self) -> int:
        """Of the vocabulary, as Megatron pads it."""
        multiple = DIVISOR * self.tp
        return -(-VOCABULARY // multiple) * multiple


@dataclass(frozen=True)
class Weight:
    """A parameter: the position of its layer, its name in there, its whole shape, its cut."""

    layer: int
    inner: str
    shape: tuple[int, ...]
    axis: int | None

    @property
    def decays(self) -> bool:
        return len(self.shape) > 1


NEOX = Run("neox", bounds=(0, 4, 9))
NEOX_TIED = Run("neox", bounds=(0, 5, 9), tied=True)
SEQUENTIAL = Run("neox", layers=2)
BLOOM = Run("bloom", bounds=(0, 5, 11), tied=True)


def weights(run: Run) -> dict[str, Weight]:
    """All parameters by name, in the order of the layers."""
    is_neox = run.family == "neox"
    start = 2 if is_neox else 3
    attention = "attention" if is_neox else "self_attention"
    block = {
        "input_layernorm.weight": ((WIDTH,), None),
        "input_layernorm.bias": ((WIDTH,), None),
        f"{attention}.query_key_value.weight": ((3 * WIDTH, WIDTH), 0),
        f"{attention}.query_key_value.bias": ((3 * WIDTH,), 0),
        f"{attention}.dense.weight": ((WIDTH, WIDTH), 1),
        f"{attention}.dense.bias": ((WIDTH,), None),
        "post_attention_layernorm.weight": ((WIDTH,), None),
        "post_attention_layernorm.bias": ((WIDTH,), None),
        "mlp.dense_h_to_4h.weight": ((4 * WIDTH, WIDTH), 0),
        "mlp.dense_h_to_4h.bias": ((4 * WIDTH,), 0),
        "mlp.dense_4h_to_h.weight": ((WIDTH, 4 * WIDTH), 1),
        "mlp.dense_4h_to_h.bias": ((WIDTH,), None),
    }
    first = {"word_embeddings.weight": ((run.rows, WIDTH), 0)}
    if not is_neox:
        first |= {f"word_embeddings.norm.{kind}": ((WIDTH,), None) for kind in ("weight", "bias")}
    norm = "norm." if is_neox else ""
    last: dict[str, Any] = {f"{norm}{kind}": ((WIDTH,), None) for kind in ("weight", "bias")}
    by_layer = [(0 if is_neox else 1, first)]
    by_layer += [(start + number, block) for number in range(run.layers)]
    by_layer.append((start + run.layers + 1, last))
    if not run.tied:
        by_layer.append((start + run.layers + 2, {"final_linear.weight": ((run.rows, WIDTH), 0)}))
    return {
        name_of(run, layer, inner): Weight(layer, inner, shape, axis)
        for layer, inside in by_layer
        for inner, (shape, axis) in inside.items()
    }


def name_of(run: Run, layer: int, inner: str) -> str:
    if run.tied and "word_embeddings" in inner:
        return EMBED + inner
    return f"{'' if run.bounds else 'sequential.'}{layer}.{inner}"


def of_stage(run: Run, stage: int) -> dict[str, Weight]:
    """The parameters of one stage: tied layers first, a copy of them where they are used again."""
    every = weights(run)
    if not run.bounds:
        return every
    start, stop = run.bounds[stage : stage + 2]
    again = run.bounds[-1] - (1 if run.family == "neox" else 2)  # the tied output layer
    own = {n: w for n, w in every.items() if start <= w.layer < stop}
    tied = {n: w for n, w in every.items() if n.startswith(EMBED)} if run.tied else {}
    if tied and not (start <= next(iter(tied.values())).layer < stop or start <= again < stop):
        tied = {}
    return tied | own


@dataclass(frozen=True)
class Numbers:
    """The whole tensors of a run by `name/slot`, and each tensor rank's copy of what is not cut."""

    whole: Mapping[str, Tensor]
    copies: Mapping[str, list[Tensor]]
    buffers: Mapping[str, Tensor]

    @classmethod
    def of(cls, run: Run) -> Numbers:
        """Masters and moments; weights are the rounded masters."""
        generator = torch.Generator().manual_seed(run.layers + 10 * run.tp)
        whole: dict[str, Tensor] = {}
        copies: dict[str, list[Tensor]] = {}
        for name, weight in weights(run).items():
            for slot in SLOTS:
                tensor = torch.randn(weight.shape, generator=generator)
                if slot == "exp_avg_sq":
                    tensor.square_()
                whole[f"{name}/{slot}"] = tensor
                if weight.axis is None:
                    own = [tensor.clone() for _ in range(run.tp)]
                    if run.drift and drifts(run, name):
                        for rank in range(1, run.tp):
                            own[rank] += 0.01 * torch.rand(weight.shape, generator=generator)
                    copies[f"{name}/{slot}"] = own
            whole[f"{name}/param"] = whole[f"{name}/master"].to(run.dtype)
            if weight.axis is None:
                masters = copies[f"{name}/master"]
                copies[f"{name}/param"] = [each.to(run.dtype) for each in masters]
        buffers = {}
        if run.family == "neox":
            frequencies = 1.0 / 10000 ** (torch.arange(0, 2) / 2)
            for number in range(run.layers):
                name = name_of(run, 2 + number, "attention.rotary_emb.inv_freq")
                buffers[name] = frequencies.to(run.dtype)
        return cls(whole, copies, buffers)

    def slice(self, name: str, weight: Weight, slot: str, tp: int, ranks: int) -> Tensor:
        """What one tensor rank has of a parameter."""
        key = f"{name}/{slot}"
        if weight.axis is None:
            return self.copies[key][tp]
        return (
            self.whole[key]
            .chunk(ranks, weight.axis)[tp]
            .clone(memory_format=torch.contiguous_format)
        )


def drifts(run: Run, name: str) -> bool:
    if run.family == "neox":
        return name.endswith(("attention.dense.bias", "dense_4h_to_h.bias"))
    return "layernorm" in name


def write(run: Run, root: Path) -> Numbers:
    """Lays out the run in `root`; what it has."""
    numbers = Numbers.of(run)
    folder = root / f"global_step{STEP + 1}"
    folder.mkdir(parents=True)
    (root / "latest").write_text(folder.name)
    for model_rank in range(run.pp * run.tp):
        stage, tp = divmod(model_rank, run.tp)
        own = of_stage(run, stage)
        slices = {
            name: {slot: numbers.slice(name, each, slot, tp, run.tp) for slot in (*SLOTS, "param")}
            for name, each in own.items()
        }
        if run.drift and run.family == "bloom" and stage:  # has no gradient here, and decays
            for name in own:
                if name.startswith(f"{EMBED}word_embeddings.norm"):
                    slices[name] = {slot: tensor * 0.5 for slot, tensor in slices[name].items()}
        groups = [[n for n in own if own[n].decays is decays] for decays in (True, False)]
        model = model_states(run, slices, groups, model_rank)
        if not run.bounds:
            model["module"] = {n: item["param"] for n, item in slices.items()} | numbers.buffers
            model["buffer_names"] = [*numbers.buffers]
        save(model, folder / f"mp_rank_{model_rank:02d}_model_states.pt")
        for dp in range(run.dp):
            prefix = "" if run.family == "neox" else "bf16_"
            name = f"{prefix}zero_pp_rank_{dp}_mp_rank_{model_rank:02d}_optim_states.pt"
            state = {
                "optimizer_state_dict": optimizer_state(run, slices, groups, dp),
                "ds_config": config(run),
                "ds_version": version(run),
            }
            save(state, folder / name)
        if not run.bounds:
            continue
        for layer in sorted({each.layer for each in own.values()}):
            if run.bounds[stage] <= layer < run.bounds[stage + 1]:
                tensors = {w.inner: slices[n]["param"] for n, w in own.items() if w.layer == layer}
                tensors |= {
                    name.removeprefix(f"{layer}."): buffer
                    for name, buffer in numbers.buffers.items()
                    if name.startswith(f"{layer}.")
                }
                save(tensors, folder / f"layer_{layer:02d}-model_{tp:02d}-model_states.pt")
    return numbers


# -- what the files have


def version(run: Run) -> str:
    return "0.9.3" if run.family == "neox" else "0.6.5"


def config(run: Run) -> dict[str, Any]:
    if run.family == "neox":
        return {
            "train_batch_size": 8,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "Adam", "params": {"lr": 0.0006, "betas": [0.9, 0.95]}},
            "fp16": {"enabled": True, "loss_scale": 0},
            "zero_optimization": {"stage": 1},
        }
    return {
        "train_batch_size": 8,
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 0},
        "bf16": {"enabled": True},
    }


def hyper_parameters(run: Run) -> list[dict[str, Any]]:
    """Of both groups; FusedAdam counts its steps in them."""
    common = {"lr": 0.0006, "bias_correction": True, "betas": (0.9, 0.95), "eps": 1e-08}
    return [{**common, "weight_decay": 0.1}, {**common, "weight_decay": 0.0}]


def model_states(
    run: Run, slices: Mapping[str, Mapping[str, Tensor]], groups: list[list[str]], model_rank: int
) -> dict[str, Any]:
    states: dict[str, Any] = {
        "module": None,
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": [
            OrderedDict((name, slices[name]["master"].shape) for name in names) for names in groups
        ],
        "lr_scheduler": {"start_lr": 0.0006, "num_iters": STEP, "min_lr": 6e-05},
        "sparse_tensor_module_names": set(),
        "skipped_steps": 1 if run.family == "neox" else 0,
        "global_steps": STEP + 1,
        "global_samples": 8 * (STEP + 1),
        "dp_world_size": run.dp,
        "mp_world_size": run.pp * run.tp,
        "ds_config": config(run),
        "ds_version": version(run),
    }
    if run.family == "neox":
        states |= {"frozen_param_shapes": None, "frozen_param_fragments": None, "shared_params": {}}
    return states | client_state(run, model_rank)


def client_state(run: Run, model_rank: int) -> dict[str, Any]:
    """What the training programs keep themselves; random states are those of one model rank."""
    randoms = random.Random(model_rank)
    generator = torch.Generator().manual_seed(model_rank)
    state = {
        "iteration": STEP + 1,
        "random_rng_state": randoms.getstate(),
        "np_rng_state": numpy.random.RandomState(model_rank).get_state(),
        "torch_rng_state": generator.get_state(),
        "rng_tracker_states": {"model-parallel-rng": generator.get_state()},
    }
    sizes = {
        "num_layers": run.layers,
        "hidden_size": WIDTH,
        "num_attention_heads": HEADS,
        "make_vocab_size_divisible_by": DIVISOR,
        "padded_vocab_size": run.rows,
    }
    if run.family == "neox":
        own = {"tokenizer_type": "HFTokenizer", "model_parallel_size": run.tp}
        return {**state, "args": {**sizes, "max_position_embeddings": 16, **own}}
    args = argparse.Namespace(
        **sizes,
        tensor_model_parallel_size=run.tp,
        pipeline_model_parallel_size=run.pp,
        position_embedding_type=PositionEmbeddingType.alibi,
    )
    return {**state, "args": args, "checkpoint_version": 3.0, "tokens": 4096}


def optimizer_state(
    run: Run, slices: Mapping[str, Mapping[str, Tensor]], groups: list[list[str]], dp: int
) -> dict[str, Any]:
    """One data rank's partition of each group, and what the optimizer's class adds to it."""
    is_bf16 = run.family == "bloom"
    states, masters, paddings = {}, [], []
    for number, names in enumerate(groups):
        flat = {
            slot: torch.cat([slices[name][slot].reshape(-1) for name in names]) for slot in SLOTS
        }
        total = len(flat["master"])
        size = -(-total // (2 * run.dp)) * 2
        padding = size * run.dp - total if dp == run.dp - 1 else 0
        own = {
            slot: torch.cat([tensor, tensor.new_zeros(size * run.dp - total)])
            .chunk(run.dp)[dp]
            .clone()
            for slot, tensor in flat.items()
        }
        masters.append(own["master"] if is_bf16 else own["master"][: size - padding])
        states[number] = {slot: own[slot] for slot in SLOTS[1:]}
        paddings.append(padding)
    base = {
        "state": states,
        "param_groups": [
            {**group, "step": STEP, "params": [number]}
            for number, group in enumerate(hyper_parameters(run))
        ],
    }
    common = {
        "clip_grad": 1.0,
        "base_optimizer_state": base,
        "single_partition_of_fp32_groups": masters,
        "partition_count": [run.dp] * len(groups),
        "ds_version": version(run),
    }
    if is_bf16:
        return {**common, "groups_padding": paddings}
    return {
        **common,
        "loss_scaler": DynamicLossScaler(),
        "dynamic_loss_scale": True,
        "overflow": False,
        "zero_stage": ZeroStageEnum.optimizer_states,
        "group_paddings": paddings,
    }


# -- classes that the pickles name


class DynamicLossScaler:
    def __init__(self) -> None:
        self.cur_scale = 2048.0
        self.cur_iter = STEP + 1
        self.last_overflow_iter = 2
        self.scale_factor = 2.0
        self.scale_window = 1000
        self.min_scale = 1
        self.delayed_shift = 2
        self.cur_hysteresis = 1
        self.consecutive_hysteresis = False
        self.raise_error_at_min_scale = True
        self.dynamic = True


class ZeroStageEnum(int, enum.Enum):
    disabled = 0
    optimizer_states = 1


class PositionEmbeddingType(enum.Enum):
    rotary = 1
    absolute = 2
    alibi = 3


MODULES = {
    DynamicLossScaler: "deepspeed.runtime.fp16.loss_scaler",
    ZeroStageEnum: "deepspeed.runtime.zero.config",
    PositionEmbeddingType: "megatron.enums",
}


def save(value: Any, path: Path) -> None:
    with under_engine_names():
        torch.save(value, path)


@contextlib.contextmanager
def under_engine_names() -> Iterator[None]:
    """Lets pickle find our classes in the modules of the programs."""
    names = {
        ".".join(module.split(".")[: depth + 1])
        for module in MODULES.values()
        for depth in range(module.count(".") + 1)
    }
    before = {name: sys.modules.get(name) for name in names}
    for name in names:
        sys.modules[name] = types.ModuleType(name)
    for own, module in MODULES.items():
        own.__module__ = module
        setattr(sys.modules[module], own.__name__, own)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module
