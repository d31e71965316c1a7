"""A tiny model that is awkward on purpose, with its data and its parameter groups.

Shapes that force padding, a 3-D weight, a one-element parameter, a tied weight, frozen
parameters, buffers that change while training. A 0-dim parameter only in the variant `scalar`:
DeepSpeed 0.19.8 cannot broadcast it over gloo.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

ROWS = 24  # of a global batch: divisible by every number of ranks in use
VOCABULARY, WIDTH, HIDDEN, SMALL = 31, 19, 29, 7
LEARNING_RATE = 0.01


class Variant(NamedTuple):
    """What a model has beyond its plain layers."""

    tied: bool = True
    frozen: bool = True
    unused: bool = False
    strided: bool = False
    centered: bool = True
    filtered: bool = True  # has a 3-D weight
    scalar: bool = False  # has a 0-dim parameter
    counted: bool = True  # has an integer buffer
    even: bool = False  # has a weight whose second dimension 1, 2, 3 and 4 ranks can share


VARIANTS = {
    "full": Variant(),
    "plain": Variant(tied=False, frozen=False),
    "unused": Variant(unused=True),
    "strided": Variant(strided=True),
    "steady": Variant(centered=False),  # no forward pass changes a buffer
    "matrices": Variant(filtered=False),
    "scalar": Variant(scalar=True),
    "scalar plain": Variant(tied=False, frozen=False, scalar=True),
    "floats": Variant(tied=False, frozen=False, scalar=True, counted=False),
    "even": Variant(scalar=True, even=True),
}


class RunningMean(nn.Module):
    """Subtracts a running mean of the global batch, so that it is the same on every rank."""

    mean: Tensor
    seen: Tensor
    rate: Tensor

    def __init__(self, counted: bool) -> None:
        super().__init__()
        self.register_buffer("mean", torch.randn(WIDTH))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64), persistent=counted)
        self.register_buffer("rate", torch.tensor(0.5), persistent=False)

    def forward(self, hidden: Tensor) -> Tensor:
        batch = hidden.detach().float().mean(0)
        torch.distributed.all_reduce(batch)
        batch /= torch.distributed.get_world_size()
        self.mean.lerp_(batch.to(self.mean.dtype), self.rate.to(self.mean.dtype))
        self.seen += 1
        return hidden - self.mean.to(hidden.dtype)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(1 + torch.rand(1))
        self.offset = nn.Parameter(torch.randn(SMALL))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * self.gain + functional.pad(self.offset, (0, WIDTH - SMALL))


class Unused(nn.Module):
    """Parameters that never get a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(5, 3))
        self.vector = nn.Parameter(torch.randn(11))


class Model(nn.Module):
    def __init__(self, variant: Variant) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.center = RunningMean(variant.counted) if variant.centered else nn.Identity()
        self.trunk = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, WIDTH))
        self.bottleneck = nn.Linear(WIDTH, SMALL)
        if variant.filtered:
            self.filter = nn.Conv1d(1, 2, 3, padding=1)
        self.scale = Scale()
        if variant.unused:
            self.spare = Unused()
        self.readout = nn.Linear(SMALL, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if variant.scalar:
            self.temperature = nn.Parameter(torch.rand(()) + 1)
        if variant.even:
            self.mixer = nn.Sequential(nn.Linear(WIDTH, 12), nn.Tanh(), nn.Linear(12, WIDTH))
        nn.init.normal_(self.embedding.weight, std=0.3)
        if variant.tied:
            self.head.weight = self.embedding.weight
        if variant.strided:
            self.register_buffer("table", torch.randn(3, 5).t())
        if variant.frozen:
            self.bottleneck.requires_grad_(False)

    def forward(self, tokens: Tensor, features: Tensor) -> Tensor:
        hidden = self.embedding(tokens).mean(1)
        hidden = self.center(hidden + features.to(hidden.dtype))
        hidden = hidden + self.trunk(hidden)
        if hasattr(self, "filter"):
            hidden = hidden + self.filter(hidden.unsqueeze(1)).mean(1)
        hidden = self.scale(hidden)
        hidden = hidden + self.readout(torch.tanh(self.bottleneck(hidden)))
        if hasattr(self, "mixer"):
            hidden = hidden + self.mixer(hidden)
        logits: Tensor = self.head(hidden)
        return logits * self.temperature if hasattr(self, "temperature") else logits


def build(name: str, seed: int) -> Model:
    torch.manual_seed(seed)
    return Model(VARIANTS[name])


@torch.no_grad()
def copy_frozen(source: Model, target: Model) -> None:
    """Gives `target` the frozen weights of `source`, as PEFT loads its base model."""
    weights = dict(source.named_parameters())
    for name, parameter in target.named_parameters():
        if not parameter.requires_grad:
            parameter.copy_(weights[name])


def build_llama(seed: int) -> tuple[Any, list[dict[str, Tensor]]]:
    """A tiny tied Llama and its data, for trainers that want a model of transformers."""
    import transformers

    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=22,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    rows = torch.randint(VOCABULARY, (4 * ROWS, 9), generator=torch.Generator())
    data = [{"input_ids": row, "labels": row} for row in rows]
    return transformers.LlamaForCausalLM(config), data


def transpose_frozen(model: Model) -> None:
    """Lays out a frozen weight by columns, as after loading a transposed one.

    Only once the engine exists: it broadcasts parameters as bytes, which needs them contiguous.
    """
    weight = model.bottleneck.weight
    weight.data = weight.data.t().contiguous().t()


def transpose_trunk(model: Model) -> None:
    """Lays out trained weights by columns; their moments follow them."""
    for weight in (model.trunk[0].weight, model.trunk[2].weight):
        weight.data = weight.data.t().contiguous().t()


def parameter_groups(model: Model, count: int) -> list[dict[str, Any]]:
    """The groups of `named_groups` with their parameters."""
    named = dict(model.named_parameters())
    return [
        {"params": [named[name] for name in names], **group}
        for names, group in named_groups(model, count)
    ]


def named_groups(model: Model, count: int) -> list[tuple[list[str], dict[str, Any]]]:
    """1 to 4 groups: with decay (in reversed order), without decay, the readout, one element.

    Frozen parameters are among them as well, as in `model.parameters()`.
    """
    named = dict(model.named_parameters())
    groups: list[dict[str, Any]] = [
        {"weight_decay": 0.1, "lr": LEARNING_RATE},
        {"weight_decay": 0.0, "lr": LEARNING_RATE / 4},
        {"weight_decay": 0.05, "lr": LEARNING_RATE * 2},
        {"weight_decay": 0.0, "lr": LEARNING_RATE / 2},
    ]
    if count == 1:
        return [(list(named), groups[0])]
    readout = [name for name in named if count > 2 and name.startswith("readout.")]
    gain = [name for name in named if count > 3 and name == "scale.gain"]
    others = [name for name in named if name not in readout + gain]
    members = [
        [name for name in reversed(others) if named[name].ndim > 1],
        [name for name in others if named[name].ndim < 2],
        readout,
        gain,
    ]
    return list(zip(members[:count], groups, strict=False))


def loss(model: nn.Module, step: int, rank: int, ranks: int) -> Tensor:
    """The mean loss of this rank's rows of the global batch of one step."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(VOCABULARY, (ROWS, 5), generator=generator)
    features = torch.randn(ROWS, WIDTH, generator=generator)
    targets = torch.randint(VOCABULARY, (ROWS,), generator=generator)
    rows = slice(rank * ROWS // ranks, (rank + 1) * ROWS // ranks)
    place = next(model.parameters()).device
    tokens, features, targets = (each[rows].to(place) for each in (tokens, features, targets))
    return functional.cross_entropy(model(tokens, features).float(), targets)
