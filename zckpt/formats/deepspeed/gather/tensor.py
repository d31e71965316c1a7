"""Places the slices of tensor ranks in the full tensor, by DeepSpeed's own rules.

`merge_tp_slices` of DeepSpeed 0.19.8 (checkpoint/ds_to_universal.py) tries the kinds of rules in
this order: affine map, replicated, averaged, two halves, sub-parameters, rows or columns.
`stated_rules` returns a checkpoint's rules in that order. A file of --tp-rules has rules of the
same kinds. Padding rows of a vocabulary are kept. The reader shares none of this code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, product, zip_longest
from math import prod
from operator import add, mul
from typing import Any

from msgspec import Struct

from ....core.storage import sources
from ....errors import UnsupportedCheckpoint
from ....naming.tensor_families import FAMILIES

Shapes = Sequence[tuple[int, ...] | None]
"""A tensor's shape on every tensor rank; None for a rank without the tensor."""
Widths = Sequence[Sequence[int]]
"""For each sub-parameter, its width on every rank."""


class Piece(Struct, frozen=True):
    """A block of the full tensor (offsets and sizes) that one tensor rank has.

    In the rank's slice, the block's elements are contiguous and row-major, and begin at element
    `first`.
    """

    rank: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    first: int


class Cut(Struct, frozen=True):
    """How tensor ranks cut a tensor: the full shape, and the pieces on the ranks.

    `copies` has one list of pieces per complete copy of the tensor: a single list if the ranks
    share the tensor, one list per rank if every rank has all of it.
    """

    shape: tuple[int, ...]
    copies: Sequence[Sequence[Piece]]

    @classmethod
    def replicated(cls, shapes: Shapes) -> Cut:
        """The cut of a tensor that every rank has in full."""
        present = [(rank, shape) for rank, shape in enumerate(shapes) if shape is not None]
        copies = [[Piece(rank, (0,) * len(shape), shape, 0)] for rank, shape in present]
        return cls(present[0][1], copies)

    @classmethod
    def along(
        cls, shapes: Shapes, axis: int, widths: Widths = (), folds: int = 1, unit: int = 1
    ) -> Cut:
        """The cut of a tensor along `axis`, with the ranks' parts in rank order.

        A fused tensor has several sub-parameters, such as q, k and v; each is cut over all ranks.

            shapes    the shape of every rank's slice
            widths    for each sub-parameter, every rank's length along the axis; empty if not fused
            unit      the number of elements that a length of 1 in `widths` stands for
            folds     how often the sub-parameters are repeated along the axis: 2 for q, k, q, k
        """
        widths = widths or [[0 if shape is None else shape[axis] for shape in shapes]]
        first = next(shape for shape in shapes if shape is not None)
        before, behind = first[:axis], first[axis + 1 :]
        lengths = [folds * unit * sum(of_rank) for of_rank in zip(*widths, strict=True)]
        pieces: list[Piece] = []
        start, starts = 0, [0] * len(shapes)  # along the axis, in the full tensor and in each slice
        for part in [*widths] * folds:
            for rank, width in enumerate(part):
                sizes = (*before, width * unit, *behind)
                offsets = tuple(start * (each == axis) for each in range(len(sizes)))
                strides = _strides((*before, lengths[rank], *behind))
                pieces += _row_major(rank, offsets, sizes, starts[rank] * prod(behind), strides)
                start, starts[rank] = start + width * unit, starts[rank] + width * unit
        return cls((*before, start, *behind), [pieces])


class Rules(Struct, frozen=True):
    """The rules for cutting tensors, in order of precedence.

    Each rule has two functions: a test of a parameter's name, and one that returns the `Cut` of a
    parameter from its name and its shapes on all ranks.
    """

    lines: Sequence[tuple[Callable[[str], object], Callable[[str, Shapes], Cut]]]

    def explicit(self, name: str, shapes: Shapes) -> Cut | None:
        """The cut by the first rule that matches a parameter's name; None if no rule matches."""
        return next((cut(name, shapes) for fits, cut in self.lines if fits(name)), None)


FIRST = {
    "tp_replicated_parameter_patterns": "replicated",
    "parameter_to_average_patterns": "replicated",
    "parameter_with_2_sub_params_cat_dim_0": "0:2x",
}
LAST = {"parameter_with_row_parallelism_patterns": "1", "vocabulary_parameter_patterns": "0"}
"""Keys of `universal_checkpoint_info`, each with the --tp-rules line of the same meaning.

If a name matches several keys, FIRST decides before `parameter_with_sub_params` (the key of fused
tensors), and LAST after it.
"""


def stated_rules(info: Mapping[str, Any]) -> Rules:
    """The rules in a checkpoint's `universal_checkpoint_info` (`info`)."""
    maps = (info.get("affine_map") or {}).get("params") or {}
    views = [getattr(each, "state", each) for each in info.get("parameter_with_sub_params") or ()]
    first, last = (
        [(p, partial(_by_line, line)) for key, line in keys.items() for p in info.get(key) or ()]
        for keys in (FIRST, LAST)
    )
    lines = [
        *((pattern, partial(_by_map, about)) for pattern, about in maps.items()),
        *first,
        *((p, partial(_by_view, info, p, view)) for view in views for p in view["patterns"]),
        *last,
    ]
    return Rules([(re.compile(pattern).match, cut) for pattern, cut in lines])


def _by_view(
    info: Mapping[str, Any], pattern: str, about: Mapping[str, Any], name: str, shapes: Shapes
) -> Cut:
    """The cut of a fused tensor, as a sub-parameter rule of `universal_checkpoint_info` states it.

    `about` is the rule: a view of the tensor ("shape"), and the axis of the view with the
    sub-parameters ("partition_dim"). `pattern` is the rule's key in `info`.
    """
    view, axis = about["shape"], about["partition_dim"]
    spec, ranks = view[axis], len(shapes)
    present = [shape for shape in shapes if shape is not None]
    if float(info.get("universal_checkpoint_version") or 0) >= 0.4:
        widths: Widths = info["sub_param_shard_widths"][pattern]
    else:  # only full lengths, or the number of equal sub-parameters
        if isinstance(spec, int):
            spec = [sum(shape[axis] for shape in present) // spec] * spec
        widths = [[size // ranks] * ranks for size in spec]
    sizes = [sum(size) if isinstance(size, (tuple, list)) else size for size in view]
    sizes[axis] = sum(map(sum, widths))
    total, stated_size = sum(map(prod, present)), prod(size for size in sizes if size >= 0)
    sizes = [size if size >= 0 else total // stated_size for size in sizes]
    outer, inner = prod(sizes[:axis]), prod(sizes[axis + 1 :])
    dims = range(len(present[0]))
    # the axis itself first: along other axes a slice may have one element
    for dim in [axis, *dims] if len(view) == len(present[0]) else dims:
        before, behind = prod(present[0][:dim]), prod(present[0][dim + 1 :])
        if before and behind and not outer % before and not inner % behind:
            return Cut.along(shapes, dim, widths, outer // before, inner // behind)
    raise UnsupportedCheckpoint(
        "proof-unsupported",
        f"--gather cannot join {name}: its slices have the shape {list(present[0])}, which does "
        f"not fit the view {sizes} that universal_checkpoint_info states for the full tensor",
        hint="verify without --gather",
        subject=name,
    )


def _by_map(about: Mapping[str, Any], name: str, shapes: Shapes) -> Cut:
    """The cut that an affine map states (affine.py): where each rank's pieces are in the tensor."""
    shape = tuple(about["logical_shape"])
    steps = _strides(shape)
    boxes: dict[Any, list[list[Piece]]] = {}
    for rank, rank_map in sorted((int(rank), own) for rank, own in about["ranks"].items()):
        for piece in rank_map["pieces"]:
            sizes = tuple(piece["shape"])
            (begin, strides), dest = piece["source"], piece["dest"]
            if not prod(sizes):
                continue
            axes = zip(sizes, strides, steps, strict=True)
            if any(size > 1 and stride != step for size, stride, step in axes):
                raise UnsupportedCheckpoint(
                    "proof-unsupported",
                    f"--gather cannot join {name}: a piece of its affine_map is not a rectangular "
                    "block",
                    hint="verify without --gather",
                    subject=name,
                )
            offsets = tuple(begin // step % n for n, step in zip(shape, steps, strict=True))
            copies = boxes.setdefault((offsets, sizes), [])
            copies.append([*_row_major(rank, offsets, sizes, *dest)])
    cuts = zip_longest(*boxes.values(), fillvalue=[])
    return Cut(shape, [[*chain.from_iterable(pieces)] for pieces in cuts] or [[]])


def _strides(shape: Sequence[int]) -> list[int]:
    """The strides of a row-major tensor, in elements."""
    # written again here: `--gather` checks the reader, and must not share its arithmetic
    return [prod(shape[axis + 1 :]) for axis in range(len(shape))]


def _row_major(
    rank: int, offsets: tuple[int, ...], sizes: tuple[int, ...], first: int, strides: Sequence[int]
) -> Iterator[Piece]:
    """Splits a block of a rank's slice into pieces whose elements are contiguous."""
    axes = zip(sizes, strides, _strides(sizes), strict=True)
    gaps = [axis for axis, (size, stride, step) in enumerate(axes) if size > 1 and stride != step]
    outer = gaps[-1] + 1 if gaps else 0
    for place in product(*map(range, sizes[:outer])) if prod(sizes) else ():
        corner = (*map(add, offsets, place), *offsets[outer:])
        start = first + sum(map(mul, place, strides))
        yield Piece(rank, corner, (*(1 for _ in place), *sizes[outer:]), start)


def _by_line(rule: str, name: str, shapes: Shapes) -> Cut:
    """The cut that a line of --tp-rules states: an axis, and the sub-parameters along it."""
    dim, _, about = rule.partition(":")
    if rule in ("replicated", "sum"):
        cut = Cut.replicated(shapes)
        return cut if rule == "replicated" else Cut(cut.shape, cut.copies[:1])
    if dim == "vocab" or not about:
        return Cut.along(shapes, 0 if dim == "vocab" else int(dim))
    axis, ranks = int(dim), len(shapes)
    if about.endswith("x"):
        count = int(about[:-1])
        equal = [0 if shape is None else shape[axis] // count for shape in shapes]
        return Cut.along(shapes, axis, [equal] * count)
    return Cut.along(shapes, axis, [[int(part) // ranks] * ranks for part in about.split(",")])


def rules_of(given: str | None, info: Mapping[str, Any] | None) -> Rules:
    """The rules for --gather: the user's (`given`), then the rules that the checkpoint states.

    `given` is a model family or the path of a rule file; None means no user's rules. `info` is the
    checkpoint's `universal_checkpoint_info`. If `given` is a JSON file, its content is used in
    place of `info`.
    """
    checkpoint_rules = stated_rules(info or {})
    if given is None:
        return checkpoint_rules
    text = FAMILIES.get(given)
    if text is None:
        with sources.opened(given) as file:
            text = file.read().decode()
    if text.lstrip().startswith("{"):
        return stated_rules(json.loads(text))
    lines = [(re.compile(p).fullmatch, partial(_by_line, rule)) for p, rule in _lines(text)]
    return Rules([*lines, *checkpoint_rules.lines])


def _lines(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        line = "" if line.lstrip().startswith("#") else line.partition(" #")[0].strip()
        if line.startswith("include "):
            yield from _lines(FAMILIES[line.removeprefix("include ").strip()])
        elif line:
            pattern, _, rule = line.rpartition("=")
            yield pattern.strip(), rule.replace(" ", "")
