"""The rules in a `universal_checkpoint_info`: how tensor-parallel ranks slice a model.

Megatron-DeepSpeed has put this dictionary into its client state since 10/2023, and AutoTP into
every model file since DeepSpeed 0.19. Patterns are regular expressions that match the beginning of
a name. Their precedence and meaning are those of DeepSpeed 0.19.8, ds_to_universal.py
`merge_tp_slices`:

    affine_map                                 rectangular slices of the full tensor, per rank
    tp_replicated_parameter_patterns           all ranks have the full tensor
    parameter_to_average_patterns              all ranks have it, with small differences
    parameter_with_2_sub_params_cat_dim_0      rows of each of two fused halves
    parameter_with_sub_params                  slices of each sub-parameter, in a view of the tensor
    parameter_with_row_parallelism_patterns    columns
    any other                                  rows
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Any

from msgspec.structs import replace

from ..core.checkpoint import slicing
from ..core.checkpoint.placement import (
    Boxes,
    Cut,
    PaddedRows,
    Placement,
    Replicated,
    Shapes,
    Sliced,
)
from ..core.checkpoint.slicing import Piece, Slicing
from ..core.storage.fragments import row_major
from ..errors import InconsistentCheckpoint, UnsupportedCheckpoint, brief, listed
from .patterns import PARTS, WIDTHS, check_patterns, fields_of
from .tensor_rules import TensorRule

NEWEST_MAP = 1
MOST_AXES = 8
WHOLE = "tp_replicated_parameter_patterns"
PLACEMENTS: Mapping[str, Placement | None] = {
    WHOLE: Replicated(),
    "parameter_to_average_patterns": Replicated(),
    "parameter_with_2_sub_params_cat_dim_0": Cut(0, equal=2),
    PARTS: None,
    "parameter_with_row_parallelism_patterns": Cut(1),
}
"""Maps each list of patterns to how ranks hold the parameters that match; the first match counts.

None stands for a list of patterns with shapes, which `_sliced_in_view` reads.
"""


class UniversalInfo:
    """The slicing rules for tensor-parallel ranks in a `universal_checkpoint_info` of DeepSpeed.

    Raises UnsupportedCheckpoint or InconsistentCheckpoint for a structure that is not known.
    """

    def __init__(self, info: Mapping[str, Any]) -> None:
        self.info = info
        check_patterns(info)
        affine = info.get("affine_map") or {}
        if affine and affine.get("version", NEWEST_MAP) > NEWEST_MAP:
            raise UnsupportedCheckpoint(
                "version-unsupported",
                "the checkpoint's list of the ranks' slices, affine_map, has version "
                f"{brief(affine['version'])}",
                hint="zckpt reads version 1 (DeepSpeed 0.19.8); give slicing rules with --tp-rules "
                "FILE",
            )
        self.maps: Mapping[str, Any] = affine.get("params") or {}
        vocabulary = info.get("original_vocab_size")
        self.vocabulary = vocabulary if isinstance(vocabulary, int) else None

    def sliced(self, name: str, shapes: Shapes) -> Sliced | None:
        """How tensor-parallel ranks slice a parameter: the first pattern that matches counts.

        None if AutoTP has listed the parameter as unsupported.
        """
        if any(self._matching("autotp_unsupported_parameter_patterns", name)):
            return None
        is_vocabulary = any(self._matching("vocabulary_parameter_patterns", name))
        rows = self.vocabulary if is_vocabulary else None
        if (mapped := self._map_of(name)) is not None:
            return _by_map(name, mapped, shapes, rows)
        for key, placement in PLACEMENTS.items():
            if placement is None:
                for view in map(fields_of, self.info.get(key) or ()):
                    for pattern in _fitting(view["patterns"], name):
                        return self._sliced_in_view(name, pattern, view, shapes)
                continue
            for pattern in self._matching(key, name):
                return TensorRule(pattern, placement).sliced(name, shapes)
        return _by_rows(name, shapes, rows)

    def stated_shapes(self, name: str) -> Shapes | None:
        """The shape of each rank's slice of a parameter, as the info's `affine_map` states it.

        None if the info has no `affine_map`, or if the map does not list the parameter.
        """
        ranks = {int(n): each for n, each in (self._map_of(name) or {"ranks": {}})["ranks"].items()}
        shapes = [tuple(ranks[n]["shard_shape"]) for n in range(len(ranks)) if n in ranks]
        return shapes or None

    def _map_of(self, name: str) -> Mapping[str, Any] | None:
        return next((self.maps[pattern] for pattern in _fitting(self.maps, name)), None)

    def _matching(self, key: str, name: str) -> Iterator[str]:
        return _fitting(self.info.get(key) or (), name)

    def _sliced_in_view(
        self, name: str, pattern: str, view_facts: Mapping[str, Any], shapes: Shapes
    ) -> Sliced:
        """How ranks slice a fused parameter, such as QKV, if each rank has a piece of Q, K and V.

        `view_facts` has the `shape` of a view and its axis of sub-parameters (`partition_dim`). For
        axis 0, [[64, 32, 32], -1] states their sizes, [3, -1] only their number; -1 is any size.
        """
        known_shapes, ranks = [shape for shape in shapes if shape is not None], len(shapes)
        axis, view = int(view_facts["partition_dim"]), list(view_facts["shape"])
        says = f"`{PARTS}` of the checkpoint does not fit {name}"
        if len(known_shapes) < ranks:
            raise InconsistentCheckpoint(
                "tp-rule-wrong", f"{says}: tensor rank {shapes.index(None)} has no slice of it"
            )
        if not 0 <= axis < len(view):
            raise InconsistentCheckpoint(
                "tp-rule-wrong", f"{says}: the shape {view} has no axis {axis} that can be sliced"
            )
        widths = self._widths_on_ranks(pattern, view[axis], known_shapes, axis, says)
        sizes = [sum(size) if isinstance(size, (tuple, list)) else size for size in view]
        sizes[axis] = sum(map(sum, widths))
        total = sum(map(prod, known_shapes))
        rest = prod(size for size in sizes if size >= 0)
        sizes = [size if size >= 0 else total // max(rest, 1) for size in sizes]
        outer, inner = prod(sizes[:axis]), prod(sizes[axis + 1 :])
        pieces = slicing.cut(outer, inner, widths)
        elements = [prod(shape) for shape in pieces.slices]
        if pieces.numel != total or elements != [prod(shape) for shape in known_shapes]:
            raise InconsistentCheckpoint(
                "tp-rule-wrong",
                f"{says}: the ranks must have slices of {listed(elements)} elements, but have the "
                f"shapes {listed([list(shape) for shape in known_shapes])}",
            )
        whole = _whole_shape(known_shapes, axis, outer, inner, says)
        is_row = (outer, inner) == (prod(whole[:axis]), prod(whole[axis + 1 :]))
        placement = Cut(axis, tuple(map(sum, widths))) if is_row else Boxes("view")
        return Sliced(whole, pieces, placement)

    def _widths_on_ranks(
        self,
        pattern: str,
        parts_in_view: Any,
        shapes: Sequence[tuple[int, ...]],
        axis: int,
        says: str,
    ) -> Sequence[Sequence[int]]:
        """For each sub-parameter of a fused parameter: its size along `axis` on each rank.

        Since version 0.4 of the info, files state these sizes. In older versions, each
        sub-parameter is divided evenly among the ranks.
        """
        ranks, version = len(shapes), self.info.get("universal_checkpoint_version")
        parts = tuple(parts_in_view) if isinstance(parts_in_view, (tuple, list)) else None
        if isinstance(version, (int, float)) and version >= 0.4:  # heads may be dealt unevenly
            by_rank = (self.info.get(WIDTHS) or {}).get(pattern) or ()
            widths = [tuple(part) for part in by_rank]
            fits = parts in (None, tuple(map(sum, widths)))
            if not widths or not fits or any(len(part) != ranks for part in widths):
                sums = "" if parts is None else f", with the sums {list(parts)}"
                raise InconsistentCheckpoint(
                    "tp-rule-wrong",
                    f"{says}: `{WIDTHS}` must list {ranks} sizes for each sub-parameter{sums}, "
                    f"but lists {[list(part) for part in widths]}",
                )
            return widths
        if parts is None:
            width = sum(shape[axis] for shape in shapes)
            if width % parts_in_view:
                raise InconsistentCheckpoint(
                    "tp-rule-wrong",
                    f"{says}: the ranks' sizes along axis {axis} add up to {width}, which cannot "
                    f"be cut into {parts_in_view} equal sub-parameters",
                )
            parts = (width // parts_in_view,) * parts_in_view
        split = slicing.even_parts(parts, ranks)
        if split is None:
            raise InconsistentCheckpoint(
                "tp-rule-wrong",
                f"{says}: {ranks} ranks cannot share sub-parameters of sizes {list(parts)}",
            )
        return split


def _by_rows(name: str, shapes: Shapes, used: int | None) -> Sliced | None:
    """Slices a parameter by rows, as the weight of a column-parallel layer or of an embedding.

    `used` is the number of vocabulary rows, and None for other parameters. Rows after `used` must
    be padding: this is checked.
    """
    rule = TensorRule(".*", Cut(0))
    if used is None:
        return rule.sliced(name, shapes)
    return replace(PaddedRows(used).sliced(shapes, rule.misfit(name)), placement=rule.placement)


def _fitting(patterns: Iterable[str], name: str) -> Iterator[str]:
    return (pattern for pattern in patterns if re.match(pattern, name))


def of_json(text: str) -> UniversalInfo:
    """Parses a --tp-rules file that contains a `universal_checkpoint_info` as JSON."""
    return UniversalInfo(json.loads(text))


def info_for(info: Mapping[str, Any], ranks: int, whole: Iterable[str]) -> dict[str, Any]:
    """Changes a `universal_checkpoint_info` for a run with `ranks` tensor-parallel ranks.

    `whole` are the parameters of which each rank has the full tensor. An `affine_map` (the list of
    the ranks' slices) for another number of ranks is left out.
    """
    maps = ((info.get("affine_map") or {}).get("params") or {}).values()
    if maps and all(len(each.get("ranks") or ()) == ranks for each in maps):
        return dict(info)
    # DeepSpeed makes a new map
    changed = {key: value for key, value in info.items() if key != "affine_map"}
    if "affine_map" in info:  # perhaps nothing else says which parameters are whole
        patterns = list(info.get(WHOLE) or ())
        names = (name for name in whole if not any(re.match(p, name) for p in patterns))
        changed[WHOLE] = [*patterns, *(f"^{re.escape(name)}$" for name in names)]
    if WIDTHS in info:  # sizes are divided evenly among the ranks, or else left out
        even = {
            pattern: slicing.even_parts([*map(sum, parts)], ranks)
            for pattern, parts in info[WIDTHS].items()
        }
        changed[WIDTHS] = {pattern: own for pattern, own in even.items() if own is not None}
    return changed


def _whole_shape(
    shapes: Sequence[tuple[int, ...]], axis: int, outer: int, inner: int, says: str
) -> tuple[int, ...]:
    """The full tensor's shape, if ranks cut it along one axis of a view of the tensor.

    `shapes` are those of the ranks' slices. `outer` and `inner` are the numbers of elements before
    and behind the axis. Raises InconsistentCheckpoint if no dimension fits.
    """
    first, total = shapes[0], sum(map(prod, shapes))
    sides = [(prod(first[:dim]), prod(first[dim + 1 :])) for dim in range(len(first))]
    fitting = [
        dim
        for dim, (before, behind) in enumerate(sides)
        if before and behind and not outer % before and not inner % behind
        if len({(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}) == 1
    ]
    if not fitting:
        raise InconsistentCheckpoint(
            "tp-rule-wrong", f"{says}: no dimension of {list(first)} can be the sliced one"
        )
    # several fit if they have size 1, as for one head
    dim = max(fitting, key=lambda dim: (sides[dim] == (outer, inner), dim == axis))
    before, behind = sides[dim]
    return (*first[:dim], total // (before * behind), *first[dim + 1 :])


# -- the affine map


def _by_map(name: str, piece_map: Mapping[str, Any], shapes: Shapes, rows: int | None) -> Sliced:
    """How a parameter is sliced according to DeepSpeed's affine map of it.

    The map states offsets and strides of each piece on each rank (DeepSpeed's
    checkpoint/affine.py).
    """
    whole = tuple(piece_map["logical_shape"])
    by_rank = {int(rank): value for rank, value in piece_map["ranks"].items()}
    says = f"the affine_map of {name} (the checkpoint's list of the ranks' slices)"
    if len(whole) > MOST_AXES:
        raise UnsupportedCheckpoint(
            "tp-rule-wrong", f"{says} is for a tensor of {len(whole)} dimensions"
        )
    if set(by_rank) - set(range(len(shapes))):
        raise InconsistentCheckpoint(
            "tp-rule-wrong", f"{says} is for {len(by_rank)} ranks, not {len(shapes)}"
        )
    slices, pieces = [], []
    for rank, shape in enumerate(shapes):
        map_of_rank = by_rank.get(rank) or {"shard_shape": [0] * len(whole), "pieces": []}
        stated_shape = tuple(map_of_rank["shard_shape"])
        if prod(stated_shape) != (0 if shape is None else prod(shape)):
            raise InconsistentCheckpoint(
                "tp-rule-wrong",
                f"{says} states the shape {list(stated_shape)} on tensor rank {rank}, but this "
                f"rank's file has {'no slice' if shape is None else f'the shape {list(shape)}'}",
            )
        slices.append(stated_shape)
        for piece in map_of_rank["pieces"]:
            if float(piece.get("scale", 1.0)) != 1.0:
                raise UnsupportedCheckpoint(
                    "grid-unsupported",
                    f"{says}: the full tensor is a sum over the ranks (scale {piece['scale']:g})",
                    hint="zckpt does not divide or add tensors; DeepSpeed refuses it too",
                )
            sizes = tuple(piece["shape"])
            if not prod(sizes):  # the rank holds nothing
                continue
            source, dest = piece["source"], piece["dest"]
            pieces.append(
                Piece(
                    rank,
                    _corner(stated_shape, sizes, dest, says),
                    _corner(whole, sizes, source, says),
                    sizes,
                )
            )
    cut = Slicing(whole, tuple(slices), tuple(pieces))
    everywhere = all(shape == whole for shape in slices) and cut.copies == len(slices)
    return Sliced(whole, cut, Replicated() if everywhere else Boxes("affine_map"), rows)


def _corner(shape: Sequence[int], sizes: Sequence[int], view: Any, says: str) -> tuple[int, ...]:
    """The position of a slice's first element in a tensor: its index on each axis.

    `view` is (offset, strides). Raises UnsupportedCheckpoint if the slice is not rectangular.
    """
    offset, strides = int(view[0]), list(view[1])
    steps = row_major(shape)
    is_box = len(sizes) == len(shape) and all(
        size <= 1 or stride == step
        for size, stride, step in zip(sizes, strides, steps, strict=True)
    )
    if not is_box:
        raise UnsupportedCheckpoint(
            "grid-unsupported",
            f"{says} has a piece that is not a box: strides {strides} in a tensor of {list(shape)}",
            hint="give a slicing rule for this parameter with --tp-rules FILE",
        )
    corner = tuple(
        offset // step % max(length, 1) for step, length in zip(steps, shape, strict=True) if step
    )
    return corner if len(corner) == len(shape) else (0,) * len(shape)
