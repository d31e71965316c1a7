"""Measures how fast processes gather the weights of a layer: flat, as a list, and one by one.

    python -m benchmarks.gather --layer 9834560 --dtype fp16
    torchrun --nproc-per-node 4 -m benchmarks.gather --layer 9834560 --dtype fp16

The layer is a transformer's block of that many elements. ZeRO-3 pads each parameter and cuts it
into one slice per process. The slices of a process are adjacent in its flat part.

* flat, zckpt: one all-gather into one buffer, as `verify --gather` does it. With gloo this is one
  broadcast per process, with NCCL it is the same as the next way.
* flat, torch: `all_gather_into_tensor` of the same parts into the same buffer.
* list: `dist.all_gather` of the same parts into a list of tensors, and `torch.cat` of the list.
* each parameter: `dist.all_gather` of a parameter's slices into a list and `torch.cat`, for one
  parameter after the other.

The first three end with the same buffer, a row for each process. The last ends with parameters.
Engines changed from the last two ways to the second (DeepSpeed's `_all_gather_base`, FairScale).

A step is a forward and a backward of a model with some of these layers. The weights of a layer are
gathered before its forward, dropped, and gathered again before its backward, which computes the
layer's forward once more (activation checkpointing). All ways cut the parameters out of what they
gathered, and the time for that is included. Gradients are computed, but neither reduced nor
applied.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isqrt, prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from zckpt.proof.allgather.buffers import ALL_GATHER, all_gather
from zckpt.proof.allgather.world import World

from .measure import spread
from .processes import head, together

HEAD = 64
LAYERS = 2
TOKENS = 4
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
Shapes = dict[str, tuple[int, ...]]
Weights = dict[str, Tensor]


def shapes_of(elements: int) -> Shapes:
    """The shapes of a transformer block's parameters, which have `elements` elements together.

    Its width is a multiple of HEAD, and the feed-forward is about four times as wide. The remaining
    elements are one more vector. Raises ValueError for fewer elements than a block has.
    """
    width = isqrt(elements // 12) // HEAD * HEAD
    inner = (elements - 4 * width**2 - 9 * width) // (2 * width + 1)
    if not width or inner < 1:
        raise ValueError(f"a block has at least {12 * HEAD**2 + 13 * HEAD} elements")
    shapes: Shapes = {
        "norm_1.weight": (width,),
        "norm_1.bias": (width,),
        "attention.weight": (3 * width, width),
        "attention.bias": (3 * width,),
        "projection.weight": (width, width),
        "projection.bias": (width,),
        "norm_2.weight": (width,),
        "norm_2.bias": (width,),
        "expand.weight": (inner, width),
        "expand.bias": (inner,),
        "contract.weight": (width, inner),
        "contract.bias": (width,),
    }
    rest = elements - sum(map(prod, shapes.values()))
    return shapes | ({"rest": (rest,)} if rest else {})


class Layer:
    """One process's slices of a layer's parameters, and the buffer into which all are gathered."""

    def __init__(self, shapes: Shapes, dtype: torch.dtype, world: World, seed: int) -> None:
        self.world = world
        self.shapes = shapes
        self.widths = [-(-prod(shape) // world.size) for shape in shapes.values()]
        each = sum(self.widths)
        self.whole = torch.empty(world.size * each, dtype=dtype, device=world.device)
        self.own = self.whole[world.rank * each : (world.rank + 1) * each]
        random = torch.Generator().manual_seed(seed * world.size + world.rank)
        self.part = (torch.randn(each, generator=random) * 0.02).to(world.device, dtype)
        self.slices = self.part.split(self.widths)

    def flat(self) -> Tensor:
        self.own.copy_(self.part)
        all_gather(self.world, self.whole, self.own)
        return self.whole

    def flat_of_torch(self) -> Tensor:
        ALL_GATHER(self.whole, self.part)
        return self.whole

    def listed(self) -> Tensor:
        return gathered(self.part, self.world.size)

    def each_parameter(self) -> list[Tensor]:
        return [gathered(part, self.world.size) for part in self.slices]

    def weights(self, gather: Callable[[Layer], Tensor | list[Tensor]]) -> Weights:
        """Gathers the layer by the function `gather`, and returns each parameter by its name."""
        result = gather(self)
        if isinstance(result, Tensor):
            rows = result.view(self.world.size, -1).split(self.widths, 1)
            result = [columns.reshape(-1) for columns in rows]
        return {
            name: flat[: prod(shape)].view(shape)
            for flat, (name, shape) in zip(result, self.shapes.items(), strict=True)
        }


def gathered(part: Tensor, processes: int) -> Tensor:
    """Gathers the parts of all processes, and concatenates them."""
    listed = [torch.empty_like(part) for _ in range(processes)]
    dist.all_gather(listed, part)
    return torch.cat(listed)


WAYS: dict[str, Callable[[Layer], Tensor | list[Tensor]]] = {
    "flat, zckpt": Layer.flat,
    "flat, torch": Layer.flat_of_torch,
    "list": Layer.listed,
    "each parameter": Layer.each_parameter,
}


def forward(hidden: Tensor, weights: Weights) -> Tensor:
    """Computes a transformer's block; `hidden` is (tokens, width)."""

    def linear(name: str, values: Tensor) -> Tensor:
        return functional.linear(values, weights[f"{name}.weight"], weights[f"{name}.bias"])

    def norm(name: str, values: Tensor) -> Tensor:
        weight, bias = weights[f"{name}.weight"], weights[f"{name}.bias"]
        return functional.layer_norm(values, values.shape[-1:], weight, bias)

    tokens, width = hidden.shape
    parts = linear("attention", norm("norm_1", hidden)).view(tokens, 3, width // HEAD, HEAD)
    query, key, value = parts.permute(1, 2, 0, 3)
    mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    hidden = hidden + linear("projection", mixed.transpose(0, 1).reshape(tokens, width))
    return hidden + linear("contract", functional.gelu(linear("expand", norm("norm_2", hidden))))


def step(layers: Sequence[Layer], gather: Callable[[Layer], Tensor | list[Tensor]]) -> Tensor:
    """Runs forward and backward of all layers, and returns the gradient of the input."""
    first = layers[0]
    width = first.shapes["norm_1.weight"][0]
    hidden = torch.ones(TOKENS, width, dtype=first.part.dtype, device=first.part.device)
    inputs = []
    with torch.no_grad():
        for layer in layers:
            inputs.append(hidden)
            hidden = forward(hidden, layer.weights(gather))
    gradient = torch.ones_like(hidden)
    for layer, entered in zip(reversed(layers), reversed(inputs), strict=True):
        weights = {name: one.requires_grad_() for name, one in layer.weights(gather).items()}
        output = forward(entered.requires_grad_(), weights)
        used = [weight for name, weight in weights.items() if name != "rest"]
        gradient, *_ = torch.autograd.grad(output, [entered, *used], gradient)
    return gradient


@dataclass(frozen=True)
class Timings:
    """The milliseconds of each way in each round: of gathering a layer, and of a step."""

    layer: dict[str, list[float]]
    step: dict[str, list[float]]


def measured(
    elements: int,
    dtype: torch.dtype,
    world: World,
    rounds: int,
) -> Timings:
    """Measures all ways, one after the other in each round; the first round is not counted.

    Raises RuntimeError if two ways return different weights.
    """
    shapes = shapes_of(elements)
    layers = [Layer(shapes, dtype, world, seed) for seed in range(LAYERS)]
    expected = {name: one.clone() for name, one in layers[0].weights(WAYS["list"]).items()}
    for way, gather in WAYS.items():
        for name, weight in layers[0].weights(gather).items():
            if not torch.equal(weight, expected[name]):
                raise RuntimeError(f"{way}: {name} is not what a list brings")
    timings = Timings({way: [] for way in WAYS}, {way: [] for way in WAYS})
    for number in range(rounds + 1):
        for kept, work in (
            (timings.layer, lambda gather: gather(layers[0])),
            (timings.step, lambda gather: step(layers, gather)),
        ):
            for way, gather in WAYS.items():
                together(world)
                started = time.perf_counter()
                work(gather)
                together(world)
                if number:
                    kept[way].append((time.perf_counter() - started) * 1e3)
    return timings


def measure(elements: int, dtype: str, rounds: int, world: World) -> None:
    """Prints the milliseconds of each way, and their ratio to zckpt's in the same round."""
    if world.size == 1:  # a group of its own, so that the same functions are called
        backend = "nccl" if world.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    timings = measured(elements, DTYPES[dtype], world, rounds)
    if world.size == 1:
        dist.destroy_process_group()
    if world.rank:
        return
    head(world, torch.get_num_threads(), rounds)
    print(f"a layer of {elements} elements, {dtype}; a step of {LAYERS} layers, {TOKENS} tokens")
    for what, listed in (("layer", timings.layer), ("step", timings.step)):
        for way, times in listed.items():
            pairs = zip(times, listed["flat, zckpt"], strict=True)
            ratio = spread([one / flat for one, flat in pairs])
            print(f"{what:8}{way:16}{spread(times):>29} ms   of flat, zckpt: {ratio}")
