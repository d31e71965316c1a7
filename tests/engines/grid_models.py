"""Tiny models that are cut along more than the data axis, awkward on purpose.

Column- and row-parallel layers as Megatron has them, a fused projection of three unequal parts, a
fused gate and up, a padded vocabulary, replicated norms; and the same layers as a pipeline, with a
tied embedding, a frozen layer, a buffer and a function without a layer file.

Every parameter says by itself how it was cut, as `parameter.cut`: the dimension and the full widths
of its sub-parameters; None if each rank of the tensor axis has all of it. The judge joins by that.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional

ROWS, LENGTH = 24, 5
VOCABULARY, PADDED = 31, 36  # rows with a meaning, and with Megatron's padding
WIDTH, HIDDEN = 14, 20
PARTS = (16, 4, 8)  # of the fused projection, as grouped queries have them

INFO: dict[str, Any] = {
    "universal_checkpoint_version": 0.2,
    "original_vocab_size": VOCABULARY,
    "padded_vocab_size": PADDED,
    "vocabulary_parameter_patterns": [r"embedding\.weight", r"head\.weight"],
    "tp_replicated_parameter_patterns": [
        r".*norm\.(weight|bias)",
        r"position",
        r"normed\.gain",
        r".*\.(dense|down)\.bias",
        r"frozen\..*",
    ],
    "parameter_with_row_parallelism_patterns": [r".*\.(dense|down)\.weight"],
    "parameter_with_2_sub_params_cat_dim_0": [r".*\.gate_up\.(weight|bias)"],
    "parameter_with_sub_params": [
        {"patterns": [r".*\.fused\.weight"], "shape": (PARTS, -1), "partition_dim": 0},
        {"patterns": [r".*\.fused\.bias"], "shape": (PARTS,), "partition_dim": 0},
    ],
}
"""What a program of this model saves in its client state (keys of DeepSpeed 0.19.8)."""


class _Copy(torch.autograd.Function):
    """Forward as it is, backward summed over the tensor axis."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        gradient = gradient.contiguous()
        distributed.all_reduce(gradient, group=ctx.group)
        return gradient, None


class _Sum(torch.autograd.Function):
    """Forward summed over the tensor axis, backward as it is."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any) -> Tensor:
        value = value.clone()
        distributed.all_reduce(value, group=group)
        return value

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class _Join(torch.autograd.Function):
    """Forward all columns, backward this rank's own."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Any) -> Tensor:
        ctx.rank, ctx.width = distributed.get_rank(group), value.shape[-1]
        parts = [torch.empty_like(value) for _ in range(distributed.get_world_size(group))]
        distributed.all_gather(parts, value.contiguous(), group=group)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        start = ctx.rank * ctx.width
        return gradient[..., start : start + ctx.width].contiguous(), None


def sliced(full: Tensor, dim: int, parts: tuple[int, ...], rank: int, ranks: int) -> Tensor:
    """A rank's slice: an equal share of each sub-parameter along one dimension."""
    pieces = [part.chunk(ranks, dim)[rank] for part in full.split(parts, dim)]
    return torch.cat(pieces, dim).contiguous()


class Axis:
    """The tensor axis: its group, and this rank in it."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.rank, self.ranks = distributed.get_rank(group), distributed.get_world_size(group)

    def __deepcopy__(self, memo: Any) -> Axis:
        """Experts are copies of one, and process groups cannot be copied."""
        return self

    def parameter(self, full: Tensor, dim: int, parts: tuple[int, ...]) -> nn.Parameter:
        made = nn.Parameter(sliced(full, dim, parts, self.rank, self.ranks))
        made.cut = (dim, parts)  # type: ignore[attr-defined]
        made.model_parallel = True  # type: ignore[attr-defined]
        return made


class Column(nn.Module):
    """Rows of the weight are cut; each of `parts` by itself."""

    def __init__(self, axis: Axis, width: int, *parts: int, bias: bool = True) -> None:
        super().__init__()
        self.axis, rows = axis, sum(parts)
        self.weight = axis.parameter(torch.randn(rows, width) / width**0.5, 0, parts)
        self.bias = axis.parameter(torch.randn(rows) / 9, 0, parts) if bias else None

    def forward(self, value: Tensor) -> Tensor:
        value = _Copy.apply(value, self.axis.group)
        return functional.linear(value, self.weight, self.bias)


class Row(nn.Module):
    """Columns of the weight are cut; every rank has the whole bias."""

    def __init__(self, axis: Axis, width: int, rows: int) -> None:
        super().__init__()
        self.axis = axis
        self.weight = axis.parameter(torch.randn(rows, width) / width**0.5, 1, (width,))
        self.bias = nn.Parameter(torch.randn(rows) / 9)

    def forward(self, value: Tensor) -> Tensor:
        value = functional.linear(value, self.weight)
        return _Sum.apply(value, self.axis.group) + self.bias


class Embedding(nn.Module):
    """Rows of a padded vocabulary are cut."""

    def __init__(self, axis: Axis) -> None:
        super().__init__()
        self.axis = axis
        self.weight = axis.parameter(torch.randn(PADDED, WIDTH) * 0.3, 0, (PADDED,))

    def forward(self, tokens: Tensor) -> Tensor:
        here = len(self.weight)
        own = tokens - self.axis.rank * here
        inside = (own >= 0) & (own < here)
        found = functional.embedding(own.clamp(0, here - 1), self.weight) * inside.unsqueeze(-1)
        hidden: Tensor = _Sum.apply(found, self.axis.group)
        return hidden.mean(1)


def logits(layer: nn.Module, hidden: Tensor) -> Tensor:
    """All columns of the output layer; also of a tied embedding."""
    value = _Copy.apply(hidden, layer.axis.group)
    return _Join.apply(functional.linear(value, layer.weight), layer.axis.group)


class Attention(nn.Module):
    def __init__(self, axis: Axis) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.fused = Column(axis, WIDTH, *PARTS)
        self.dense = Row(axis, PARTS[0], WIDTH)
        self.axis, self.ranks = axis, axis.ranks

    def forward(self, hidden: Tensor) -> Tensor:
        parts = [width // self.ranks for width in PARTS]
        query, key, value = self.fused(self.norm(hidden)).split(parts, -1)
        mixed = query * (1 + self.mean(key.tanh(), PARTS[1]) + self.mean(value.tanh(), PARTS[2]))
        return hidden + self.dense(mixed)

    def mean(self, part: Tensor, width: int) -> Tensor:
        """Over all ranks, so that the model computes the same however it is cut."""
        total = _Sum.apply(part.sum(-1, keepdim=True), self.axis.group)
        mean: Tensor = _Copy.apply(total, self.axis.group) / width
        return mean


class Gated(nn.Module):
    def __init__(self, axis: Axis) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate_up = Column(axis, WIDTH, HIDDEN, HIDDEN)
        self.down = Row(axis, HIDDEN, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        gate, up = self.gate_up(self.norm(hidden)).chunk(2, -1)
        return hidden + self.down(functional.silu(gate) * up)


class Frozen(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        self.requires_grad_(False)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + super().forward(hidden).tanh()


class Normed(nn.Module):
    """Has buffers that change while training, the same on every rank."""

    running_mean: Tensor
    num_batches_tracked: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(1 + torch.rand(1))
        self.register_buffer("running_mean", torch.randn(WIDTH))
        self.register_buffer("num_batches_tracked", torch.zeros((), dtype=torch.int64))

    def forward(self, hidden: Tensor) -> Tensor:
        self.running_mean.mul_(0.5).add_(0.25)
        self.num_batches_tracked += 1
        return (hidden - self.running_mean.to(hidden.dtype)) * self.gain


class Head(Column):
    """An output layer of its own."""

    def __init__(self, axis: Axis) -> None:
        super().__init__(axis, WIDTH, PADDED, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return logits(self, hidden)


class Whole(nn.Module):
    """All layers in one module: tensor parallelism alone."""

    def __init__(self, axis: Axis) -> None:
        super().__init__()
        self.embedding = Embedding(axis)
        self.position = nn.Parameter(torch.randn(3, WIDTH))
        self.attention = Attention(axis)
        self.frozen = Frozen()
        self.mlp = Gated(axis)
        self.normed = Normed()
        self.final_norm = nn.LayerNorm(WIDTH)
        self.head = Column(axis, WIDTH, PADDED, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens) + self.position.mean(0)
        hidden = self.mlp(self.frozen(self.attention(hidden)))
        return logits(self.head, self.final_norm(self.normed(hidden)))


def shifted(hidden: Tensor) -> Tensor:
    """A layer that is a plain function: it has a number, and no file."""
    return hidden + 0.125


def loss(output: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(output.float(), targets)


def pipeline_layers(axis: Axis, ties: int = 1) -> list[Any]:
    """The layers; with two ties, stages use the tied ones in different orders; or without ties."""
    from deepspeed.pipe import LayerSpec, TiedLayerSpec

    if ties == 2:
        names = [name for name, _ in Gated(axis).named_parameters()]
        gated = TiedLayerSpec("a", Gated, axis, tied_weight_attr=names)
        return [
            TiedLayerSpec("embed", Embedding, axis),
            LayerSpec(Attention, axis),
            gated,
            LayerSpec(Frozen),
            LayerSpec(Normed),
            gated,
            LayerSpec(Attention, axis),
            LayerSpec(nn.LayerNorm, WIDTH),
            TiedLayerSpec("embed", Embedding, axis, forward_fn=logits),
        ]
    first = TiedLayerSpec("embed", Embedding, axis)
    last = TiedLayerSpec("embed", Embedding, axis, forward_fn=logits)
    if not ties:
        first, last = LayerSpec(Embedding, axis), LayerSpec(Head, axis)
    return [
        first,
        LayerSpec(Attention, axis),
        shifted,
        LayerSpec(Frozen),
        LayerSpec(Gated, axis),
        LayerSpec(Normed),
        LayerSpec(Attention, axis),
        LayerSpec(nn.LayerNorm, WIDTH),
        last,
    ]


def build_llama(seed: int) -> Any:
    """A tiny untied Llama with grouped queries."""
    import transformers

    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=22,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attention_bias=True,
        tie_word_embeddings=False,
    )
    return transformers.LlamaForCausalLM(config)


def batch(step: int, rank: int, ranks: int, learns: bool = False) -> tuple[Tensor, Tensor]:
    """This data rank's rows of the global batch of one step: tokens and targets.

    Targets are random. If the model `learns`, they are the largest token of each row.
    """
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(VOCABULARY, (ROWS, LENGTH), generator=generator)
    targets = torch.randint(VOCABULARY, (ROWS,), generator=generator)
    rows = slice(rank * ROWS // ranks, (rank + 1) * ROWS // ranks)
    return tokens[rows], (tokens.amax(1) if learns else targets)[rows]
