"""Models with what others here do not have.

Learned positions, queries, keys and values apart, tensors of three dimensions that are cut along
each of these, numbers of layers above 9 and 99, a tied layer with a bias that is used three times,
layers without tensors, convolutions, weights without gradient, a parameter without dimensions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .grid_models import Axis, _Copy, _Join, _Sum

ROWS, LENGTH, WORDS, WIDTH, HIDDEN, HEADS = 24, 5, 29, 12, 18, 6


def batch(step: int, rank: int, ranks: int) -> tuple[Tensor, Tensor]:
    """This data rank's rows of the global batch of one step."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(WORDS, (ROWS, LENGTH), generator=generator)
    targets = torch.randint(WORDS, (ROWS,), generator=generator)
    rows = slice(rank * ROWS // ranks, (rank + 1) * ROWS // ranks)
    return tokens[rows], targets[rows]


def loss(output: Tensor, targets: Tensor) -> Tensor:
    return functional.cross_entropy(output.float(), targets)


# -- tensor ranks


class Columns(nn.Module):
    def __init__(self, axis: Axis, rows: int, bias: bool, *parts: int) -> None:
        super().__init__()
        self.axis, parts = axis, parts or (rows,)
        self.weight = axis.parameter(torch.randn(rows, WIDTH) / WIDTH**0.5, 0, parts)
        self.bias = axis.parameter(torch.randn(rows) / 9, 0, parts) if bias else None

    def forward(self, value: Tensor) -> Tensor:
        return functional.linear(_Copy.apply(value, self.axis.group), self.weight, self.bias)


class Rows(nn.Module):
    def __init__(self, axis: Axis, width: int, bias: bool) -> None:
        super().__init__()
        self.axis = axis
        self.weight = axis.parameter(torch.randn(WIDTH, width) / width**0.5, 1, (width,))
        self.bias = nn.Parameter(torch.randn(WIDTH) / 9) if bias else None

    def forward(self, value: Tensor) -> Tensor:
        total: Tensor = _Sum.apply(functional.linear(value, self.weight), self.axis.group)
        return total if self.bias is None else total + self.bias


class Vocabulary(nn.Module):
    """Its rows are rounded up to a multiple of the ranks."""

    def __init__(self, axis: Axis) -> None:
        super().__init__()
        self.axis, rows = axis, -(-WORDS // axis.ranks) * axis.ranks
        self.weight = axis.parameter(torch.randn(rows, WIDTH) * 0.3, 0, (rows,))

    def forward(self, tokens: Tensor) -> Tensor:
        own = tokens - self.axis.rank * len(self.weight)
        inside = ((own >= 0) & (own < len(self.weight))).unsqueeze(-1)
        found = functional.embedding(own.clamp(0, len(self.weight) - 1), self.weight) * inside
        whole: Tensor = _Sum.apply(found, self.axis.group)
        return whole


def logits(layer: nn.Module, hidden: Tensor) -> Tensor:
    """Without the columns of padded rows."""
    value = functional.linear(_Copy.apply(hidden, layer.axis.group), layer.weight)
    return _Join.apply(value, layer.axis.group)[..., :WORDS]


class Kernels(nn.Module):
    """Three dimensions: heads are the first one, the second one, the last one."""

    def __init__(self, axis: Axis) -> None:
        super().__init__()
        self.axis = axis
        self.w_in = axis.parameter(torch.randn(HEADS, 2, WIDTH) / 3, 0, (HEADS,))
        self.w_out = axis.parameter(torch.randn(WIDTH, HEADS, 2) / 3, 1, (HEADS,))
        self.w_gate = axis.parameter(torch.randn(2, WIDTH, HEADS) / 3, 2, (HEADS,))

    def forward(self, value: Tensor) -> Tensor:
        copy = _Copy.apply(value, self.axis.group)
        inner = torch.einsum("blw,hdw->blhd", copy, self.w_in)
        gate = torch.einsum("blw,dwh->blhd", copy, self.w_gate).sigmoid()
        out = torch.einsum("blhd,whd->blw", inner * gate, self.w_out)
        total: Tensor = _Sum.apply(out, self.axis.group)
        return value + total


class Block(nn.Module):
    def __init__(self, axis: Axis, bias: bool) -> None:
        super().__init__()
        self.axis = axis
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH, bias=bias)
        self.q_proj = Columns(axis, WIDTH, bias)
        self.k_proj, self.v_proj = Columns(axis, HEADS, bias), Columns(axis, HEADS, bias)
        self.o_proj = Rows(axis, WIDTH, bias)
        self.up = Columns(axis, 2 * HIDDEN, bias, HIDDEN, HIDDEN)
        self.down = Rows(axis, HIDDEN, bias)

    def forward(self, hidden: Tensor) -> Tensor:
        value = self.ln_1(hidden)
        weight = 1 + self.mean(self.k_proj(value)) + self.mean(self.v_proj(value))
        hidden = hidden + self.o_proj(self.q_proj(value) * weight)
        gate, up = self.up(self.ln_2(hidden)).chunk(2, -1)
        result: Tensor = self.down(functional.silu(gate) * up)
        return hidden + result

    def mean(self, part: Tensor) -> Tensor:
        total = _Sum.apply(part.tanh().sum(-1, keepdim=True), self.axis.group)
        mean: Tensor = _Copy.apply(total, self.axis.group) / HEADS
        return mean


class Frozen(nn.Module):
    """Half of its weights are trained."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.trained = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = self.trained(self.kept(hidden).tanh())
        return hidden + result


class Decoder(nn.Module):
    """Stage 3 cannot gather parameters without dimensions over gloo."""

    def __init__(self, axis: Axis, stage: int) -> None:
        super().__init__()
        self.wte, self.wpe = Vocabulary(axis), nn.Embedding(LENGTH, WIDTH)
        self.stem = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=2)
        self.h = nn.ModuleDict({"2": Block(axis, True), "10": Block(axis, False)})
        self.h["100"] = Block(axis, True)
        self.kernels, self.frozen = Kernels(axis), Frozen()
        self.extra = nn.ParameterDict({"v1_2": torch.randn(7), "3": torch.randn(2, 3, 5)})
        value = torch.tensor(1.25)
        self.temperature = nn.Parameter(value if stage < 3 else value.view(1))
        self.ln_f, self.lm_head = nn.LayerNorm(WIDTH), Vocabulary(axis)
        self.lm_head.weight = self.wte.weight
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: Tensor) -> Tensor:
        self.seen += 1
        hidden = self.wte(tokens) + self.wpe.weight
        hidden = hidden + self.stem(hidden.transpose(1, 2)).transpose(1, 2)
        for block in self.h.values():
            hidden = block(hidden)
        hidden = self.frozen(self.kernels(hidden)) + self.extra["v1_2"].sum()
        hidden = self.ln_f(hidden + self.extra["3"].mean()).mean(1)
        return logits(self.lm_head, hidden * self.temperature)


INFO: dict[str, Any] = {
    "universal_checkpoint_version": 0.2,
    "original_vocab_size": WORDS,
    "padded_vocab_size": 30,
    "vocabulary_parameter_patterns": [r"wte\.weight", r"tied_modules\.embed\.weight"],
    "tp_replicated_parameter_patterns": [
        r"wpe|stem|extra|temperature|(4|frozen)\.(kept|trained)",
        r".*ln_[12f]\.|1\.(gain|never)|7\.",
        r".*\.(o_proj|down)\.bias",
    ],
    "pipeline_replicated_parameter_patterns": [r"tied_modules\.embed\.weight"],
    "parameter_with_row_parallelism_patterns": [
        r".*\.(o_proj|down)\.weight",
        r"(kernels|3)\.w_out",
    ],
    "parameter_with_2_sub_params_cat_dim_0": [r".*\.up\.(weight|bias)"],
    "parameter_with_sub_params": [
        {"patterns": [r"(kernels|3)\.w_gate"], "shape": (2, WIDTH, (HEADS,)), "partition_dim": 2}
    ],
}
RULES = r"""
wte\.weight = vocab:29
wpe\..*|stem\..*|extra\..*|temperature|frozen\..* = replicated
.*ln_[12f]\..*|.*\.(o_proj|down)\.bias = replicated
.*\.(o_proj|down)\.weight = 1
kernels\.w_in = 0
kernels\.w_out = 1
kernels\.w_gate = 2
.*\.up\.(weight|bias) = 0:2x
.*\.(q_proj|k_proj|v_proj)\.(weight|bias) = 0
"""
"""What INFO says of the decoder, as a file for --tp-rules."""


# -- pipelines


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WORDS, WIDTH) * 0.3)
        self.bias = nn.Parameter(torch.randn(WORDS) / 9)

    def forward(self, tokens: Tensor) -> Tensor:
        return functional.embedding(tokens, self.weight) + self.bias.mean()


class Middle(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + super().forward(hidden).tanh()


class Gain(nn.Module):
    """A weight without gradient, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))
        self.never = nn.Parameter(torch.randn(3, 5))
        self.register_buffer("count", torch.zeros(2, dtype=torch.int32))

    def forward(self, hidden: Tensor) -> Tensor:
        self.count += 1
        return hidden * self.gain


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c1 = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.deep = nn.ModuleDict(
            {"0": nn.Linear(WIDTH, 7, bias=False), "1x1": nn.Linear(7, WIDTH)}
        )

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.c1(hidden.transpose(1, 2)).transpose(1, 2)
        result: Tensor = self.deep["1x1"](self.deep["0"](hidden))
        return hidden + result


class Output(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = self.linear(self.norm(hidden).mean(1))
        return result


class Mean(nn.LayerNorm):
    def __init__(self) -> None:
        super().__init__(WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden).mean(1)


def same(hidden: Tensor) -> Tensor:
    """A layer that is a function."""
    return hidden


def read_out(embedding: nn.Module, hidden: Tensor) -> Tensor:
    return functional.linear(hidden.mean(1), embedding.weight, embedding.bias)


def _ties(axis: Axis) -> list[Any]:
    from deepspeed.pipe import LayerSpec, TiedLayerSpec

    def tied(key: str, layer: type, **more: Any) -> Any:
        return TiedLayerSpec(key, layer, tied_weight_attr=["weight", "bias"], **more)

    return [
        tied("words", Embedding),
        LayerSpec(Gain),
        tied("middle_2", Middle),
        LayerSpec(Convolution),
        same,
        tied("middle_2", Middle),
        LayerSpec(Frozen),
        LayerSpec(nn.GELU),
        tied("middle_2", Middle),
        LayerSpec(nn.LayerNorm, WIDTH),
        LayerSpec(Convolution),
        tied("words", Embedding, forward_fn=read_out),
    ]


def _far(axis: Axis) -> list[Any]:
    """Layers up to number 102, most of which are functions."""
    from deepspeed.pipe import LayerSpec

    middles = [LayerSpec(Middle) for _ in range(2)]
    return [
        LayerSpec(Embedding), LayerSpec(Convolution), *[same] * 7, *middles, *[same] * 88, *middles,
        LayerSpec(Gain), LayerSpec(Output), same,
    ]  # fmt: skip


def _plain(axis: Axis) -> list[Any]:
    """Modules instead of specifications; one of them is frozen in half."""
    torch.manual_seed(11)
    return [Embedding(), nn.Identity(), Convolution(), Middle(), Frozen(), same, Middle(), Output()]


def _blocks(axis: Axis) -> list[Any]:
    from deepspeed.pipe import LayerSpec, TiedLayerSpec

    return [
        TiedLayerSpec("embed", Vocabulary, axis),
        LayerSpec(Gain),
        LayerSpec(Block, axis, True),
        LayerSpec(Kernels, axis),
        LayerSpec(Frozen),
        same,
        LayerSpec(Block, axis, False),
        LayerSpec(Mean),
        TiedLayerSpec("embed", Vocabulary, axis, forward_fn=logits),
    ]


PIPELINES: dict[str, Callable[[Axis], list[Any]]] = {
    "ties": _ties,
    "far": _far,
    "plain": _plain,
    "blocks": _blocks,
}


# -- others


def build_qwen(seed: int) -> Any:
    """Tied embeddings of an odd vocabulary, and three key-value heads."""
    import transformers

    torch.manual_seed(seed)
    config = transformers.Qwen2Config(
        vocab_size=WORDS,
        hidden_size=24,
        intermediate_size=21,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        tie_word_embeddings=True,
    )
    return transformers.Qwen2ForCausalLM(config)


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2 = nn.Linear(WIDTH, 7, bias=False), nn.Linear(7, WIDTH, bias=False)
        self.kernel = nn.Parameter(torch.randn(2, 7, 3) / 3)

    def forward(self, hidden: Tensor) -> Tensor:
        result: Tensor = self.w2(self.w1(hidden).tanh() + self.kernel.mean())
        return result


class Experts(nn.Module):
    """The path of its layers has `expert` in it; the second one is residual."""

    def __init__(self, ep: int) -> None:
        from deepspeed.moe.layer import MoE

        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.my_experts = nn.ModuleList(
            MoE(
                WIDTH,
                Expert(),
                num_experts=4,
                ep_size=ep,
                k=1,
                use_residual=bool(number),
                drop_tokens=False,
                use_rts=False,
            )
            for number in range(2)
        )
        self.output = Output()

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.words(tokens)
        for layer in self.my_experts:
            hidden = hidden + layer(hidden)[0]
        result: Tensor = self.output(hidden)
        return result
