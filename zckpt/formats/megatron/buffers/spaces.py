"""States that are `fully_sharded_model_space`, the default of Megatron-Core up to 0.13.

    decoder.layers.mlp.linear_fc2.weight                           (L, h, ffn), tp cuts ffn
    optimizer.state.fp32_param.decoder.layers.mlp.linear_fc2...    (L, 1, tp, h * ffn / tp)

The axes of layers and experts are the same. Then comes the number of fragments along each axis of
the parameter, and at last the elements of one fragment, flat. A data-parallel rank has a range of
these elements (megatron-core 0.13.1).
"""

from __future__ import annotations

from itertools import product
from math import prod

from ....core.dtypes import SIZES
from ....core.fragments import Fragment, Fragments, Record, Runs
from ....core.slicing import Piece, Slicing, joined
from ....errors import InconsistentCheckpoint
from ....files.dcpfile import ItemTable, TensorItem
from ....files.dcpitems import ItemFiles
from ....files.torchfile import Tensor

Place = tuple[int, ...]


class FlatFragments:
    """The pieces of one item, by the place of its fragment."""

    def __init__(self, table: ItemTable, files: ItemFiles, key: str, item: TensorItem) -> None:
        self.key, self.item, self.folder = key, item, table.folder
        self.parts: dict[Place, list[Fragment]] = {}
        self.records: list[Record] = []
        for box, file in files.boxes(table, key):
            tensor: Tensor = file.value
            if prod(box.sizes[:-1]) != 1 or not tensor.contiguous:
                raise InconsistentCheckpoint(f"{file.path}: a piece of {key} is no range")
            self.records += file.records.values()
            start = box.offsets[-1]
            part = Fragment(start, start + box.sizes[-1], file.extent(tensor))
            self.parts.setdefault(box.offsets[:-1], []).append(part)

    def whole(self, before: Place, shape: tuple[int, ...]) -> Fragments:
        """The tensor of a parameter of this shape; `before` are its layer and its expert.

        Raises InconsistentCheckpoint if its fragments do not give the shape or are not complete.
        """
        grid = self.item.shape[len(before) : -1]
        local: tuple[int, ...] = ()
        if len(grid) == len(shape) and all(grid):
            local = tuple(size // count for size, count in zip(shape, grid, strict=True))
        each = self.item.shape[-1]
        if len(local) != len(shape) or prod(local) != each or each * prod(grid) != prod(shape):
            raise InconsistentCheckpoint(
                f"{self.folder}: {self.key} of shape {list(self.item.shape)} is no state of a "
                f"parameter of shape {list(shape)}"
            )
        slices: list[Fragments | None] = []
        pieces = []
        for number, place in enumerate(product(*map(range, grid))):
            slices.append(self._fragment((*before, *place)))
            offsets = tuple(a * b for a, b in zip(place, local, strict=True))
            pieces.append(Piece(number, (0,) * len(local), offsets, local))
        slicing = Slicing(shape, (local,) * len(pieces), tuple(pieces))
        return joined(slicing, slices, SIZES[self.item.dtype])

    def _fragment(self, place: Place) -> Runs:
        parts = sorted(self.parts.get(place, []), key=lambda part: part.start)
        ends = [0, *(part.stop for part in parts)]
        if [*(part.start for part in parts), self.item.shape[-1]] != ends:
            raise InconsistentCheckpoint(
                f"{self.folder}: pieces of {self.key} at {list(place)} overlap or leave gaps"
            )
        return Runs(parts)
