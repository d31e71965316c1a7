"""Orders the pieces of gated layers that a run with torch's FSDP2 saved.

With --use-torch-fsdp2 a rank has rows of a gated `linear_fc1`, [gate; up], as FSDP2 cuts them: of 2
data ranks, one has the gate and the other has up. Megatron-Core 0.16.1 treats the first half of
these rows as a part of the gate, and the second half as a part of up. So the files of 2 ranks have
the halves [gate 0, up 0, gate 1, up 1]. Runs of 1 and of 2 ranks held the same; so did 2 tensor
ranks with 2 data ranks each.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from ...errors import Notice, UnsupportedCheckpoint, warning
from ...training.faults import INTERLEAVED
from ...training.options import DP, TP
from ..statedict.tree import TensorPiece
from .common_state import SIZES_OF_RUN

GATED = re.compile(r".*\.linear_fc1\.(?:weight|bias)")
CONTEXT = "context_parallel_size"


def is_interleaved(args: Mapping[str, Any]) -> bool:
    """Whether a run with these arguments stores gated layers as this module's description says."""
    gated = args.get("swiglu") or args.get("quick_geglu")
    return bool(args.get("use_torch_fsdp2") and gated)


def data_ranks(args: Mapping[str, Any]) -> int:
    """The number of ranks over which FSDP2 cuts parameters."""
    return int(args.get(SIZES_OF_RUN[DP]) or 1) * int(args.get(CONTEXT) or 1)


def put_in_order(args: Mapping[str, Any]) -> list[Notice]:
    """A warning that the files have rows of gated layers in another order than the module.

    Empty for runs whose files do not; zckpt reads the rows in the module's order.
    """
    if not is_interleaved(args) or data_ranks(args) == 1:
        return []
    message = f"rows of gated layers are read in the module's order: {INTERLEAVED.message}"
    return [warning("engine-fault", message)]


def refuse_target(source: str, args: Mapping[str, Any]) -> None:
    """Raises UnsupportedCheckpoint for a target that a run with torch's FSDP2 would load.

    `args` are the arguments of that run.
    """
    if is_interleaved(args):
        raise UnsupportedCheckpoint(
            "engine-fault",
            f"zckpt writes no files of Megatron-Core from {source} for a run with torch's FSDP2: "
            f"{INTERLEAVED.message}",
            hint=INTERLEAVED.hint,
        )


def in_order(
    folder: str, name: str, pieces: list[TensorPiece], args: Mapping[str, Any]
) -> list[TensorPiece]:
    """Moves the pieces of a gated layer to the rows that they have in the module.

    Other parameters stay unchanged. Raises UnsupportedCheckpoint unless all ranks have equal parts.
    """
    tp, dp = int(args.get(SIZES_OF_RUN[TP]) or 1), data_ranks(args)
    if dp == 1 or not GATED.fullmatch(name) or not is_interleaved(args):
        return pieces
    rows = {piece.sizes[0] for piece in pieces}
    if ".experts." in name or len(rows) > 1 or len(pieces) != 2 * tp * dp:
        raise UnsupportedCheckpoint(
            "engine-fault",
            f"{folder} has {name} in {len(pieces)} pieces: {INTERLEAVED.message}",
            hint=INTERLEAVED.hint,
            file=folder,
            subject=name,
        )
    ordered = sorted(pieces, key=lambda piece: piece.offsets)
    (height,) = rows
    return [
        replace(piece, offsets=(height * _row(number, tp, dp), *piece.offsets[1:]))
        for number, piece in enumerate(ordered)
    ]


def _row(number: int, tp: int, dp: int) -> int:
    """The position of a file's piece among the module's rows, in units of pieces.

    The file has the first halves of all ranks' rows, then the second halves.
    """
    half, rank = divmod(number, tp * dp)
    tensor_rank, data_rank = divmod(rank, dp)
    is_up, place = divmod(2 * data_rank + half, dp)  # within [gate; up] of the tensor rank
    return (is_up * tp + tensor_rank) * dp + place
