"""The partition rule: which elements of which weight each rank of ONNX Runtime's ZeRO-1 owns.

    sorted by name   [ a a a a a a | b b | c c c c c . . . ]      dots are padding
    rank                   0     |      1      |     2

The trainable weights are sorted by name, as bytes, and follow each other without gaps. Frozen
weights take no part. The padding at the end is never stored. A weight with one owner keeps its
shape; of a weight with several owners, each holds a flat piece. ONNX Runtime 1.3 to 1.16,
zero_optimizer_graph_builder.cc. Nothing here opens a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct

ALIGNMENT = 32  # elements per rank


class Share(Struct, frozen=True):
    """Elements [start, stop) of a weight, which `rank` owns.

    `view` is the K in the name `_view_K` of a piece: 0 for a weight's first piece, 1 for each later
    one, however many there are. None if the weight has one owner.
    """

    rank: int
    start: int
    stop: int
    view: int | None = None


def by_name(names: Iterable[str]) -> list[str]:
    """Names in ONNX Runtime's order, as bytes: `Emb` < `head` and `layer.10` < `layer.2`."""
    return sorted(names, key=lambda name: name.encode("utf-8", "surrogatepass"))


def per_rank(total: int, dp: int) -> int:
    """Elements of each rank's partition; one block more if `total` fills its blocks exactly."""
    block = ALIGNMENT * dp
    return (total + block - total % block) // dp


def shares(numels: Mapping[str, int], dp: int) -> dict[str, list[Share]]:
    """The owners of every trainable weight; `numels` are the elements of each."""
    width = per_rank(sum(numels.values()), dp) if dp > 1 else sum(numels.values()) + 1
    owned: dict[str, list[Share]] = {}
    begin = 0
    for name in by_name(numels):
        numel = numels[name]
        end = begin + numel
        first, last = begin // width, max(begin, end - 1) // width
        if first == last:
            owned[name] = [Share(first, 0, numel)]
        else:
            owned[name] = [
                Share(
                    rank,
                    max(0, rank * width - begin),
                    min(numel, (rank + 1) * width - begin),
                    int(rank > first),
                )
                for rank in range(first, last + 1)
            ]
        begin = end
    return owned


def share_of(owned: Iterable[Share], rank: int) -> Share | None:
    """The share of `rank` among the shares of one weight; None if it owns nothing of it."""
    return next((share for share in owned if share.rank == rank), None)
