"""Which elements of which weight each rank of ONNX Runtime's ZeRO-1 owns. No I/O.

    sorted by name   [ a a a a a a | b b | c c c c c . . . ]      dots are padding
    rank                   0     |      1      |     2

Trainable weights alone, sorted by name as bytes, one behind the other without gaps; the padding at
the end is never stored. A weight that a rank owns whole keeps its shape; of one that ranks share,
each holds a flat piece. ONNX Runtime 1.3 to 1.16, zero_optimizer_graph_builder.cc.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

ALIGNMENT = 32  # elements per rank


@dataclass(frozen=True, slots=True)
class Share:
    """Elements [start, stop) of a weight, which `rank` owns.

    `view` is the K of its name `_view_K`: 0 for the first piece of a weight, 1 for every later one,
    whatever their number; None where the weight is whole.
    """

    rank: int
    start: int
    stop: int
    view: int | None = None


def by_name(names: Iterable[str]) -> list[str]:
    """As ONNX Runtime sorts: as bytes, so that `Emb` < `head` and `layer.10` < `layer.2`."""
    return sorted(names, key=lambda name: name.encode("utf-8", "surrogatepass"))


def per_rank(total: int, dp: int) -> int:
    """Elements of each rank's partition; a whole block more where `total` fills its blocks."""
    block = ALIGNMENT * dp
    return (total + block - total % block) // dp


def shares(numels: Mapping[str, int], dp: int) -> dict[str, list[Share]]:
    """Who owns what of the trainable weights, of which `numels` tells the elements."""
    width = per_rank(sum(numels.values()), dp) if dp > 1 else sum(numels.values()) + 1
    found: dict[str, list[Share]] = {}
    here = 0
    for name in by_name(numels):
        numel = numels[name]
        end = here + numel
        first, last = here // width, max(here, end - 1) // width
        if first == last:
            found[name] = [Share(first, 0, numel)]
        else:
            found[name] = [
                Share(
                    rank,
                    max(0, rank * width - here),
                    min(numel, (rank + 1) * width - here),
                    int(rank > first),
                )
                for rank in range(first, last + 1)
            ]
        here = end
    return found


def place_of(owned: Iterable[Share], rank: int) -> Share | None:
    """What `rank` owns of a weight with these shares."""
    return next((share for share in owned if share.rank == rank), None)
