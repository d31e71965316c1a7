"""Reorders the row blocks of gated layers that a run with torch's FSDP2 saved.

A gated `linear_fc1` has the rows [gate; up]. With --use-torch-fsdp2 each data rank has a range of
these rows: of 2 data ranks, the first has the gate, and the second has up. Megatron-Core 0.16.1
saves the first half of each rank's rows as a part of the gate, and the second half as a part of up.
So the files of 2 ranks have the halves in the order [gate 0, up 0, gate 1, up 1].

Tested with runs that had the same weights: 1 data rank, 2 data ranks, 2 tensor ranks with 2 data
ranks each.
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
    """Whether a run with these arguments saves rows of gated layers in the wrong order."""
    gated = args.get("swiglu") or args.get("quick_geglu")
    return bool(args.get("use_torch_fsdp2") and gated)


def data_ranks(args: Mapping[str, Any]) -> int:
    """The number of ranks among which FSDP2 divides the rows of a parameter."""
    return int(args.get(SIZES_OF_RUN[DP]) or 1) * int(args.get(CONTEXT) or 1)


def put_in_order(args: Mapping[str, Any]) -> list[Notice]:
    """Returns a warning if the files store gated layers' rows in another order than the module.

    The list is empty if the order is the same. The warning says that zckpt reads the rows in the
    module's order; `in_order` does this. `args` are the run's arguments.
    """
    if not is_interleaved(args) or data_ranks(args) == 1:
        return []
    message = f"rows of gated layers are read in the module's order: {INTERLEAVED.message}"
    return [warning("engine-fault", message)]


def refuse_target(source: str, args: Mapping[str, Any]) -> None:
    """Raises UnsupportedCheckpoint if a run with torch's FSDP2 would load the target.

    `args` are the arguments of that run; `source` is named in the message.
    """
    if is_interleaved(args):
        raise UnsupportedCheckpoint(
            "engine-fault",
            f"zckpt cannot write {source} as Megatron-Core files for a run with torch's FSDP2: "
            f"{INTERLEAVED.message}",
            hint=INTERLEAVED.hint,
        )


def in_order(
    folder: str, name: str, pieces: list[TensorPiece], args: Mapping[str, Any]
) -> list[TensorPiece]:
    """Moves the shards of a gated layer to the rows that they have in the module.

    Other parameters stay unchanged. Raises UnsupportedCheckpoint unless the shards have equal
    numbers of rows, two from each rank.
    """
    tp, dp = int(args.get(SIZES_OF_RUN[TP]) or 1), data_ranks(args)
    if dp == 1 or not GATED.fullmatch(name) or not is_interleaved(args):
        return pieces
    rows = {piece.sizes[0] for piece in pieces}
    if ".experts." in name or len(rows) > 1 or len(pieces) != 2 * tp * dp:
        raise UnsupportedCheckpoint(
            "engine-fault",
            f"{folder} has {name} in {len(pieces)} shards: {INTERLEAVED.message}",
            hint=INTERLEAVED.hint,
            file=folder,
            subject=name,
        )
    ordered = sorted(pieces, key=lambda piece: piece.offsets)
    (height,) = rows
    return [
        replace(piece, offsets=(height * _position_in_module(number, tp, dp), *piece.offsets[1:]))
        for number, piece in enumerate(ordered)
    ]


def _position_in_module(number: int, tp: int, dp: int) -> int:
    """Converts the position of a gated layer's shard in the file to its position in the module.

    Positions count shards from 0; all shards have the same number of rows. The file has the first
    halves of all ranks' rows, then the second halves.
    """
    half, rank = divmod(number, tp * dp)
    tensor_rank, data_rank = divmod(rank, dp)
    is_up, place = divmod(2 * data_rank + half, dp)  # within [gate; up] of the tensor rank
    return (is_up * tp + tensor_rank) * dp + place
