"""Writes checkpoints that are large enough to measure, with real DeepSpeed over gloo.

    python -m benchmarks.checkpoints DIR --stage 3 --dp 4 --size 124M
    python -m benchmarks.checkpoints WIDE --widen DIR --dp 1024

`--widen` makes a stage-3 checkpoint of many ranks from an existing one: every rank gets rank 0's
files, with the number of ranks and the shapes changed to fit. The copies are hard links.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.engines.deepspeed import ENVIRONMENT

os.environ.update(ENVIRONMENT)  # the engine looks at it when it is imported

import deepspeed
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.engines import rank, zygote

VOCABULARY = 50257
TOKENS = 8  # per rank and step: enough for a gradient in every parameter
STEPS = 1
TIMEOUT = 900.0  # seconds


class Block(nn.Module):
    """A transformer layer like GPT-2's."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 64
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.projection = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.expand, self.contract = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        rows, tokens, width = hidden.shape
        parts = self.attention(self.norm_1(hidden)).view(rows, tokens, 3, self.heads, 64)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.projection(mixed.transpose(1, 2).reshape(rows, tokens, width))
        expanded = functional.gelu(self.expand(self.norm_2(hidden)))
        output: Tensor = hidden + self.contract(expanded)
        return output


class Transformer(nn.Module):
    """GPT-2 with a tied head; `forward` returns the loss of a batch of tokens."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(1024, width)
        self.layers = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1])
        hidden = self.layers(self.embedding(tokens) + self.position(places))
        logits = self.head(self.norm(hidden))
        return functional.cross_entropy(logits.flatten(0, 1).float(), tokens.flatten())


class Many(nn.Module):
    """A model of 2,000 small tensors, to measure work per tensor, not per byte."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 48)
        self.embedding.requires_grad_(False)
        self.layers = nn.Sequential(*(nn.Linear(48, 48) for _ in range(1000)))

    def forward(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.layers(self.embedding(tokens)).float().square().mean()
        return loss


SIZES = {
    "12M": lambda: Transformer(192, 6),
    "124M": lambda: Transformer(768, 12),
    "355M": lambda: Transformer(1024, 24),
    "1B": lambda: Transformer(1536, 33),
    "many": Many,
}

BUFFERS = {  # elements; the engine's own values take 4 GB for each rank of a large model
    "reduce_bucket_size": 20_000_000,
    "stage3_prefetch_bucket_size": 20_000_000,
    "stage3_max_live_parameters": 100_000_000,
    "stage3_max_reuse_distance": 100_000_000,
}

LARGE = frozenset({"1B"})  # with Adam's moments, a training would not fit into 24 GiB


@dataclass(frozen=True)
class Training:
    """A training that makes a checkpoint: directory, model size, ZeRO stage and number of ranks."""

    directory: Path
    size: str
    stage: int
    dp: int


def make(training: Training) -> None:
    """Trains one step and saves a checkpoint; raises RuntimeError with the engine's message."""
    rank.prepare()
    training.directory.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as meeting:
        arguments = (Path(meeting) / "store", training)
        log = training.directory.with_name(f"{training.directory.name}.log")
        failure = zygote.run(train, training.dp, arguments, log, TIMEOUT)
    if failure is not None:
        raise RuntimeError(f"{failure}; see {log}")


def engine_of(size: str, stage: int, **config: Any) -> Any:
    """Returns DeepSpeed's engine in a rank of an initialized process group.

    A model in LARGE is partitioned while it is built, and trained by SGD without moments; the
    optimizer of others is AdamW. `config` is added to the ds_config.
    """
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage, **BUFFERS},
        "bf16": {"enabled": True},
        **config,
    }
    is_large = size in LARGE
    with deepspeed.zero.Init(config_dict_or_path=config, enabled=is_large and stage == 3):
        model = SIZES[size]()
    words = {"lr": 1e-4} if is_large else {"lr": 1e-4, "betas": (0.9, 0.95)}
    optimizer: Any = torch.optim.SGD if is_large else torch.optim.AdamW
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer(groups(model), **words), config=config
    )
    return engine


def train(number: int, store: Path, training: Training) -> None:
    """Trains and saves in one rank; `number` is the rank."""
    rank.join(number, training.dp, store)
    torch.manual_seed(0)  # the ranks begin with the same weights
    engine = engine_of(training.size, training.stage)
    generator = torch.Generator().manual_seed(number)
    for _ in range(STEPS):
        engine.backward(engine(torch.randint(VOCABULARY, (1, TOKENS), generator=generator)))
        engine.step()
    engine.save_checkpoint(str(training.directory))


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two optimizer groups, without frozen weights: matrices with weight decay, vectors without."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    axes = {id(weight): len(getattr(weight, "ds_shape", weight.shape)) for weight in trained}
    return [
        {"params": [weight for weight in trained if axes[id(weight)] > 1], "weight_decay": 0.1},
        {
            "params": [weight for weight in trained if axes[id(weight)] == 1],
            "weight_decay": 0.0,
        },
    ]


def widen(source: Path, target: Path, dp: int) -> None:
    """Writes a stage-3 checkpoint of `dp` ranks, each with the files of rank 0 of `source`.

    A rank's slices keep their lengths. So every parameter is flat, and grows by the ratio of `dp`
    to the number of ranks in `source`.
    """
    tag = (source / "latest").read_text().strip()
    (target / tag).mkdir(parents=True)
    (target / "latest").write_text(tag)
    model_name = "zero_pp_rank_{}_mp_rank_00_model_states.pt"
    optimizer_name = "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"

    model = load(source / tag / model_name.format(0))
    before = model["dp_world_size"]
    model["param_shapes"] = [
        {name: torch.Size([-(-shape.numel() // before) * dp]) for name, shape in group.items()}
        for group in model["param_shapes"]
    ]
    model["dp_world_size"] = dp
    model["frozen_param_shapes"] = {
        name: torch.Size([-(-shape.numel() // before) * dp])
        for name, shape in (model["frozen_param_shapes"] or {}).items()
    }
    optimizer = load(source / tag / optimizer_name.format(0))
    optimizer["optimizer_state_dict"]["partition_count"] = dp

    for name, value in ((model_name, model), (optimizer_name, optimizer)):
        first = target / tag / name.format(0)
        torch.save(value, first)
        for number in range(1, dp):
            os.link(first, target / tag / name.format(number))


def load(path: Path) -> dict[str, Any]:
    value: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=False)
    return value


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="a new directory")
    parser.add_argument("--stage", type=int, choices=(1, 2, 3), default=3)
    parser.add_argument("--dp", type=int, default=4)
    parser.add_argument("--size", choices=SIZES, default="124M")
    parser.add_argument("--widen", type=Path, metavar="SOURCE")
    arguments = parser.parse_args()
    if arguments.widen:
        widen(arguments.widen, arguments.directory, arguments.dp)
    else:
        make(Training(arguments.directory, arguments.size, arguments.stage, arguments.dp))


if __name__ == "__main__":
    main()
