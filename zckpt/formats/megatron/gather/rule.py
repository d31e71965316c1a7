"""Where a flat buffer of Megatron-Core has each parameter, and how tensor ranks cut parameters.

A buffer has the parameters of one rank in the reverse order of `named_parameters()`. Each parameter
begins at a multiple of 64 elements of its bucket (`_ParamAndGradBuffer`). Directories of the type
`dp_reshardable` store each bucket as a tensor, without the padding at its end. Other directories
store all buckets of a buffer as one tensor. Tensor ranks cut parameters as `ColumnParallelLinear`
and `RowParallelLinear` do. megatron-core 0.16.1.

The reader (buffers/) finds parameters by comparing masters with weights. Here arithmetic alone
determines where they are. This module and the reader share only the parsers of files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

from msgspec import Struct

from ....core.checkpoint.dtypes import SIZES
from ....core.checkpoint.inert import Foreign
from ....core.ranks.partition import BoxPart, Joined
from ....core.storage.fragments import Runs, solid
from ....errors import UnsupportedCheckpoint
from ....files.torchfile import Tensor, TorchFile
from ....files.torchtensors import TORCH_DTYPES

ALIGNMENT = 64
SIZE = SIZES["F32"]  # bytes of an element of masters and moments
SLOTS = {"param": "master", "fp32_param": "master"}
EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"
ROWS = re.compile(
    r".*(word_embeddings|output_layer|linear_(qkv|q_proj|q_up_proj|kv_up_proj|fc1))\.(weight|bias)"
)
BY_SPEC = re.compile(r".*linear_(q|kv)_down_proj\.weight")  # cut by rows, or replicated
GATED = re.compile(r".*\.linear_fc1\.(weight|bias)")
COLUMNS = re.compile(r".*(linear_proj|linear_fc2)\.weight")
LAYER = re.compile(r"decoder\.layers\.(\d+)(?=\.)")
NOT_TRAINED = re.compile(r".*(\.expert_bias|\.local_tokens_per_expert|\._extra_state)")
LOCAL_SPEC = (
    "input_layernorm",
    "self_attention.linear_proj",
    "self_attention.linear_qkv",
    "self_attention.linear_q_proj",  # multi-latent attention
    "self_attention.linear_q_down_proj",
    "self_attention.linear_q_up_proj",
    "self_attention.linear_kv_down_proj",
    "self_attention.linear_kv_up_proj",
    "self_attention.q_layernorm",
    "self_attention.k_layernorm",
    "self_attention.kv_layernorm",
    "pre_mlp_layernorm",
    "mlp.router",
    "mlp.experts",
    "mlp.shared_experts",  # it has the weight of a gate
    "mlp.shared_experts.linear_fc1",
    "mlp.shared_experts.linear_fc2",
    "mlp.linear_fc1",
    "mlp.linear_fc2",
)
"""The modules of a layer in the order of get_gpt_layer_local_spec."""

FUSED = (("input_layernorm", "self_attention.linear_qkv"), ("pre_mlp_layernorm", "mlp.linear_fc1"))
FIRST = ("embedding.word_embeddings", "embedding.position_embeddings")
LAST = ("decoder.final_layernorm", "output_layer")
INSIDE = 1
"""Begins the sort key of parameters within layers; 0 and 2 are for those before and behind."""
WHOLE = -1
"""Used as bucket number for a complete buffer, which has no padding between its buckets."""

Shape = tuple[int, ...]
Box = tuple[Shape, Shape]
"""Offsets and sizes along every axis."""


Slots = Mapping[str, Mapping[int, Runs]]
"""The file ranges of a flat buffer, by optimizer state and bucket: {"exp_avg": {0: Runs}}.

The names of the states are those in the files: `param` is the master.
"""


def refusal(path: str, what: str) -> UnsupportedCheckpoint:
    return UnsupportedCheckpoint(
        "proof-unsupported",
        f"{path} has {what}, for which --gather has no rule",
        hint="verify without --gather",
        file=path,
    )


def coalesced(
    file: TorchFile, optimizer: int = 0
) -> Iterator[tuple[int, str, dict[str, dict[int, Runs]]]]:
    """Yields the flat buffers in a file that stores complete buffers, not buckets.

    Each is a triple: the buffer's number, the type of its weights, and its file ranges by state.
    `optimizer` is the optimizer's number, if the file has several.
    """
    value = file.value[optimizer] if isinstance(file.value, list) else file.value
    for number, kinds in value.items():
        for types, tensors in kinds.items() if type(number) is int else ():
            slots = {
                key: {WHOLE: solid(tensor.numel, file.extent(tensor))}
                for key, tensor in tensors.items()
                if isinstance(tensor, Tensor)
            }
            yield number, TORCH_DTYPES[types[0].name], slots


class Filled(Struct, frozen=True):
    """A flat buffer of tensor rank `rank` (of `of` tensor ranks), divided among its parameters.

    `parameters` maps each parameter's name to the file ranges of its optimizer states.
    """

    rank: int
    of: int
    parameters: dict[str, dict[str, Runs]]


def layout(
    path: str, sizes: Sequence[tuple[str, int]], slots: Slots, bucket_size: int | None
) -> dict[str, dict[str, Runs]]:
    """Divides a buffer among its parameters: file ranges by name and optimizer state.

    `sizes` has names and element counts in the order of the module. If the file has complete
    buffers, a bucket ends when it has `bucket_size` elements (None: no limit). Raises
    UnsupportedCheckpoint if the parameters do not fill the buffer exactly.
    """
    numels = {
        number: max((run.stop for run in runs), default=0)
        for number, runs in slots["param"].items()
    }
    buckets = sorted(numels)
    is_cut = buckets != [WHOLE]
    current, begin, at = buckets.pop(0), 0, 0
    result: dict[str, dict[str, Runs]] = {}
    for number, (name, numel) in enumerate(reversed(sizes)):
        start = begin + -(-(at - begin) // ALIGNMENT) * ALIGNMENT
        if is_cut and start + numel > numels[current]:
            if at != numels[current] or not buckets:
                raise refusal(path, "an optimizer bucket that its parameters do not fill exactly")
            current, start = buckets.pop(0), 0
        at = start + numel
        result[name] = {
            SLOTS.get(slot, slot): by_bucket[current].part(start, at, SIZE)
            for slot, by_bucket in slots.items()
        }
        # the copy of a tied embedding has a separate bucket
        shared = name == EMBEDDING and number == 0 and len(sizes) > 1
        if not is_cut and (shared or (bucket_size is not None and at - begin >= bucket_size)):
            begin = at
    if buckets or at != numels[current]:
        raise refusal(path, "an optimizer buffer that its parameters do not fill exactly")
    return result


def joined(ranks: Sequence[Filled], whole: Mapping[str, Shape], gated: bool) -> Iterator[Joined]:
    """Joins the tensor ranks' shards; yields full masters and moments.

    `whole` has the full shapes. `gated` is true if linear_fc1 has the rows of gate and up. If ranks
    have replicas of a shard, the first one is used.
    """
    parts: dict[tuple[str, str], dict[int, list[BoxPart]]] = {}
    for filled in ranks:
        for name, slots in filled.parameters.items():
            boxes = boxes_of(name, whole[name], filled.of, filled.rank, gated)
            if filled.rank and boxes == boxes_of(name, whole[name], filled.of, 0, gated):
                continue
            for slot, runs in slots.items():
                of_ranks = parts.setdefault((name, slot), {})
                of_ranks.setdefault(filled.rank, list(in_boxes(runs, SIZE, boxes)))
    for (name, slot), of_ranks in parts.items():
        listed = tuple(part for _, own in sorted(of_ranks.items()) for part in own)
        yield Joined((name, slot), "F32", whole[name], listed)


def in_boxes(runs: Runs, size: int, boxes: Sequence[Box]) -> Iterator[BoxPart]:
    """Yields the file ranges of a rank's shard, box after box.

    `boxes` are the rectangular parts of the tensor that make up the shard. `runs` are the ranges of
    the first box's elements, then of the second's, and so on. `size` is bytes per element.
    """
    begin = 0
    for offsets, sizes in boxes:
        end = begin + prod(sizes)
        for run in runs.runs(begin, end, size):
            yield BoxPart(offsets, sizes, run.extent, first=run.start - begin)
        begin = end


def bucket_size_of(args: Mapping[str, Any], stage: int) -> int | None:
    """The number of elements after which a bucket is full; None if a buffer is a single bucket.

    `stage` is 0 for the first model chunk of the first pipeline stage: only its buffer may have
    several buckets.
    """
    # as in Megatron-LM's arguments.py
    if stage or not args.get("overlap_grad_reduce"):
        return None
    usual = max(40_000_000, 1_000_000 * int(args.get("data_parallel_size") or 1))
    return int(args.get("ddp_bucket_size") or usual)


# -- the model


def layers_of_chunks(
    path: str, args: Mapping[str, Any], layers: int, stages: int, chunks: int
) -> list[range]:
    """The layers of each model chunk, as ranges of layer numbers.

    The first chunks of all pipeline stages come first, then the second chunks, and so on. Raises
    UnsupportedCheckpoint for --pipeline-model-parallel-layout, and if the stages' numbers of layers
    do not add up to `layers`.
    """
    if args.get("pipeline_model_parallel_layout") is not None:
        raise refusal(path, "pipeline stages defined by --pipeline-model-parallel-layout")
    # as in Megatron-Core's get_num_layers_to_build
    ends = [_stated(args, "first"), _stated(args, "last")]
    apart = [args.get(f"account_for_{what}_in_pipeline_split") for what in ("embedding", "loss")]
    middle = stages - sum(end is not None for end in ends)
    rest = layers + sum(map(bool, apart)) - sum(filter(None, ends))
    even = rest // middle if middle else 0
    counts = [even] * stages
    for stage, end in ((0, ends[0]), (-1, ends[1])):
        counts[stage] = end if end is not None else counts[stage]
    sizes = [count // chunks for _ in range(chunks) for count in counts]
    sizes[0] -= bool(apart[0])
    sizes[-1] -= bool(apart[1])
    if sum(sizes) != layers or min(sizes) < 0:
        raise refusal(path, "arguments that do not state the layers of each pipeline stage")
    starts = [sum(sizes[:number]) for number in range(len(sizes))]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]


def _stated(args: Mapping[str, Any], end: str) -> int | None:
    """The number of layers in the pipeline stage `end`: `first` or `last`; None if not stated.

    Megatron-LM and Megatron-Bridge have different names for this argument.
    """
    for name in (f"decoder_{end}_pipeline_num_layers", f"num_layers_in_{end}_pipeline_stage"):
        if type(args.get(name)) is int:
            return int(args[name])
    return None


def with_norms(name: str) -> str:
    name = name.replace("self_attention.linear_qkv.layer_norm_", "input_layernorm.")
    return name.replace("mlp.linear_fc1.layer_norm_", "pre_mlp_layernorm.")


def order_of(
    name: str, names: Mapping[str, Any], fused: bool, grouped: bool = False
) -> tuple[Any, ...] | None:
    """The sort key of a parameter in the order of a GPTModel; None for an unknown module.

    `fused`: a linear module includes the norm before it (Transformer Engine's spec). `grouped`: one
    module has all experts of a layer (TEGroupedMLP). `names` has all parameters' names as keys.
    """
    module, _, kind = name.rpartition(".")
    last = kind == "bias"
    if module in FIRST:
        return INSIDE - 1, FIRST.index(module), last
    if module in LAST:
        return INSIDE + 1, LAST.index(module), last
    match = re.fullmatch(r"decoder\.layers\.(\d+)\.(.+?)(?:\.local_experts\.(\d+)\.(\w+))?", module)
    if match is None or match[2] not in LOCAL_SPEC:
        return None
    inner, norm = match[2], 0
    for before, linear in FUSED if fused else ():
        if inner == before and f"decoder.layers.{match[1]}.{linear}.weight" in names:
            inner, norm = linear, -1
    expert: tuple[Any, ...] = int(match[3] or 0), match[4] or "", last
    if grouped:
        expert = match[4] or "", last, int(match[3] or 0)
    return INSIDE, int(match[1]), LOCAL_SPEC.index(inner), norm, *expert


def require_known(path: str, name: str, names: Mapping[str, Any], tp: int) -> None:
    """Raises UnsupportedCheckpoint if it is unknown how tensor ranks cut the parameter `name`.

    `names` has the names of all parameters as keys; `tp` is the number of tensor ranks.
    """
    if tp > 1 and (BY_SPEC.fullmatch(name) or order_of(name, names, False) is None):
        raise refusal(path, f"the module of {name}")


def boxes_of(name: str, whole: Shape, tp: int, rank: int, gated: bool) -> list[Box]:
    """The offsets and sizes of a tensor rank's shard within the full parameter, as boxes.

    A gated layer has two boxes: the rank's rows of gate and its rows of up.
    """
    axis = 0 if ROWS.fullmatch(name) else 1 if COLUMNS.fullmatch(name) else None
    if axis is None or tp == 1:
        return [((0,) * len(whole), whole)]
    halves = 2 if gated and ".linear_fc1." in name else 1
    size = whole[axis] // tp // halves
    sizes = (*whole[:axis], size, *whole[axis + 1 :])
    starts = (half * (whole[axis] // halves) + rank * size for half in range(halves))
    zeros = (0,) * len(whole)
    return [((*zeros[:axis], start, *zeros[axis + 1 :]), sizes) for start in starts]


def is_gated(shapes: Mapping[str, Shape]) -> bool:
    """Whether the MLP is gated: linear_fc1 has twice as many rows as linear_fc2 has columns."""
    for name, shape in shapes.items():
        if name.endswith("linear_fc1.weight"):
            return shape[0] == 2 * shapes[name.replace("linear_fc1", "linear_fc2")][1]
    return False


def whole_shape(name: str, local: Shape, tp: int) -> Shape:
    """The full shape of a parameter; `local` is the shape of a tensor rank's shard."""
    if ROWS.fullmatch(name):
        return (local[0] * tp, *local[1:])
    return (local[0], local[1] * tp) if COLUMNS.fullmatch(name) else local


def arguments_of(common: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that Megatron-LM saves in the common state; empty for other programs."""
    args = common.get("args")
    return dict(args.state) if isinstance(args, Foreign) and isinstance(args.state, dict) else {}


def expert_of(name: str) -> int | None:
    """The number of the expert that contains a parameter; None if it is not in an expert."""
    match = re.search(r"\.local_experts\.(\d+)\.", name)
    return int(match[1]) if match else None
