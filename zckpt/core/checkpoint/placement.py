"""How the ranks of one parallel axis hold parts of complete tensors.

A `Placement` says how the ranks hold one parameter. Its kinds, and their names in
torch.distributed.tensor:

    rule            kind                    torch
    replicated      Replicated()            Replicate()
    sum             Sum()                   Partial("sum")
    1               Cut(1)                  Shard(1)
    0:64,16,16      Cut(0, (64, 16, 16))    none: a Shard(0) of each sub-parameter
    0:2x            Cut(0, equal=2)         the same, of two sub-parameters of equal width
    vocab:50257     PaddedRows(50257)       Shard(0), of a tensor with more rows than the model has
    (any other)     Boxes("view")           none

    Sliced    how one parameter is cut over ranks
    Row       the parameters of one rank, with their order and shapes
    Table     one axis: `merge` uses its cuts to join ranks, `split` uses its rows to make ranks

A rule is the text of a placement: users write it, and files keep it. `from_text` reads the texts of
all versions. To add a kind, write a class of it and list the class in `KINDS`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import prod
from typing import ClassVar

from msgspec import Struct, field

from ...errors import InconsistentCheckpoint, listed
from . import slicing
from .slicing import Slicing

Shapes = Sequence[tuple[int, ...] | None]
"""A parameter's shape on each tensor rank, in order; None for a rank without the parameter."""

STAGE, TENSOR_RANK, EP_RANK = "stage", "tensor rank", "ep rank"
"""The axes over which ranks share a model, as `Table.word` and `Entry.axis` name them."""


class Placement(Struct, frozen=True):
    """How the ranks of one parallel axis hold one parameter; by default each has a replica.

    Each other kind of placement is a subclass that overrides some of these properties.
    """

    word: ClassVar[str] = ""
    """The rule of a kind that has only one rule, such as `replicated`; empty for other kinds."""
    forms: ClassVar[str] = ""
    """The rules of this kind of placement, as a hint lists them for the user."""

    is_cut: ClassVar[bool] = False
    """Whether each rank has different elements of the parameter.

    Equal optimizer states on all ranks then show that the placement is wrong.
    """

    @property
    def text(self) -> str:
        """The placement as users and files write it, such as `0:2x`."""
        return self.word

    @classmethod
    def of_rule(cls, text: str) -> Placement | None:
        """Parses a placement of this kind that a user has written; None for any other text.

        `0:2x` says that ranks cut dimension 0, and that it consists of 2 equal sub-parameters, each
        of which is cut.
        """
        return cls() if text == cls.word else None

    @property
    def plain(self) -> Placement:
        """This placement; `PaddedRows` becomes `Cut(0)`, which treats padding as normal rows."""
        return self

    @property
    def row_parts(self) -> object:
        """How the rows are divided into sub-parameters, as a value to compare by `==`.

        None if ranks do not cut rows, or if the placement is `PaddedRows` or `Boxes`. If neither is
        None, the results of a layer's weight and of its bias must be equal.
        """
        return None

    @property
    def fused(self) -> int:
        """The number of equal parts of the rows, if ranks cut each part: 2 for `0:2x`, 1 for `0`.

        0 for `0:1x`, stated widths, a vocabulary, `Boxes`, and rows that are not cut. Then the
        caller must not compare the number with the model.
        """
        return 0

    @property
    def is_by_outputs(self) -> bool:
        """Whether the rows of a weight are the outputs of its layer, as in `nn.Linear`.

        False for the rule `1:1x`, by which the user states that rows are inputs, and for blocks
        that only the files describe (`Boxes`).
        """
        return True

    def agree(self, are_weights: bool) -> bool:
        """Whether ranks that hold the same elements must have equal bytes for them.

        `are_weights` is False if the elements are optimizer states.
        """
        return True

    @property
    def is_replicated(self) -> bool:
        """Whether each rank has a replica of the complete weight."""
        return not self.is_cut and self.agree(are_weights=True)

    @property
    def is_sum(self) -> bool:
        """Whether the weight is the sum of the ranks' tensors, which have its full shape."""
        return not self.is_cut and not self.agree(are_weights=True)

    def sliced(self, shapes: Shapes, says: str) -> Sliced | None:
        """Computes the shape of the complete tensor, and its slices, from the ranks' shapes.

        None for `Boxes`, whose offsets only the files state. `says` is the beginning of the error
        message. Raises InconsistentCheckpoint if the shapes do not fit together.
        """
        all_shapes = _known(shapes, says)
        if len(set(all_shapes)) > 1:
            raise _misfit(f"{says}, whose shapes differ: {_on_ranks(all_shapes)}")
        return Sliced(all_shapes[0], slicing.replicated(all_shapes[0], len(all_shapes)), self)


class Replicated(Placement, frozen=True):
    """Each rank has a replica: torch's Replicate."""

    word = "replicated"
    forms = "`replicated`"


class Sum(Placement, frozen=True):
    """Each rank has a different summand, and the weight is their sum: torch's Partial.

    The summands of all ranks have the same gradient, and so the same moments.
    """

    word = "sum"
    forms = "`sum`"

    def agree(self, are_weights: bool) -> bool:
        return not are_weights


class Cut(Placement, frozen=True):
    """Each rank has a slice along `axis`, as with torch's Shard, or a slice of each sub-parameter.

    A fused tensor has sub-parameters, such as q, k and v.

    parts    the sub-parameters' widths in the complete tensor: 64, 16, 16 for `0:64,16,16`
    equal    the number of sub-parameters of equal width: 2 for `0:2x`

    Without `parts` and `equal`, the tensor has no sub-parameters.
    """

    axis: int
    parts: tuple[int, ...] = ()
    equal: int = 0

    forms = (
        "`0` or `1` (the dimension that is cut), `0:64,16,16` (parts of these widths, each cut), "
        "`0:2x` (2 equal parts, each cut)"
    )
    is_cut = True

    @property
    def text(self) -> str:
        widths = ",".join(map(str, self.parts)) or (f"{self.equal}x" if self.equal else "")
        return f"{self.axis}:{widths}" if widths else str(self.axis)

    @classmethod
    def of_rule(cls, text: str) -> Placement | None:
        form = r"(\d)(?::(?:(\d{1,18})x|(\d{1,18}(?:,\d{1,18})*)))?"
        match = re.fullmatch(form, text.replace(" ", ""), re.ASCII)
        if match is None or (match[2] and not int(match[2])):
            return None
        parts = tuple(map(int, match[3].split(","))) if match[3] else ()
        return cls(int(match[1]), parts, int(match[2] or 0))

    @property
    def row_parts(self) -> object:
        return (self.parts, self.equal or 1) if self.axis == 0 else None

    @property
    def fused(self) -> int:
        # by the rule `0:1x` the user states that nothing is fused
        return 0 if self.axis or self.parts or self.equal == 1 else self.equal or 1

    @property
    def is_by_outputs(self) -> bool:
        return (self.axis, self.equal) != (1, 1)

    def sliced(self, shapes: Shapes, says: str) -> Sliced:
        all_shapes, axis = _known(shapes, says), self.axis
        first = all_shapes[0]
        if axis >= len(first):
            raise _misfit(f"{says}, which has the shape {list(first)}")
        other_axes = {(shape[:axis], shape[axis + 1 :]) for shape in all_shapes}
        if len(other_axes) > 1 or len({len(shape) for shape in all_shapes}) > 1:
            raise _misfit(f"{says}, whose shapes differ: {_on_ranks(all_shapes)}")
        lengths = [shape[axis] for shape in all_shapes]
        before, behind, widths = first[:axis], first[axis + 1 :], self._widths(lengths, says)
        pieces = slicing.cut(prod(before), prod(behind), widths)
        return Sliced((*before, sum(lengths), *behind), pieces, self)

    def _widths(self, lengths: Sequence[int], says: str) -> Sequence[Sequence[int]]:
        """The widths of the slices along the axis: `[j][r]` is sub-parameter j on rank r."""
        if self.parts:
            widths = slicing.even_parts(self.parts, len(lengths))
            if widths is None or sum(self.parts) != sum(lengths):
                raise _misfit(
                    f"{says}: {len(lengths)} ranks hold {listed(lengths)} elements along dimension "
                    f"{self.axis}, but each must hold an equal share of every part; the parts have "
                    f"the widths {listed(self.parts)}"
                )
            if [sum(of_rank) for of_rank in zip(*widths, strict=True)] != lengths:
                along = f"along dimension {self.axis}"
                raise _misfit(f"{says}: the ranks hold {listed(lengths)} {along}")
            return widths
        count = self.equal or 1
        if any(length % count for length in lengths):
            cut = f"the ranks' widths {listed(lengths)}"
            raise _misfit(f"{says}: {cut} cannot be cut into {count} equal parts")
        return [[length // count for length in lengths]] * count


class PaddedRows(Placement, frozen=True):
    """Each rank has a slice of a vocabulary's rows; rows from number `used` on are padding."""

    used: int

    forms = "`vocab:N`"
    is_cut = True

    @property
    def text(self) -> str:
        return f"vocab:{self.used}"

    @classmethod
    def of_rule(cls, text: str) -> Placement | None:
        match = re.fullmatch(r"vocab:(\d{1,18})", text, re.ASCII)
        return cls(int(match[1])) if match else None

    @property
    def plain(self) -> Placement:
        return Cut(0)

    def sliced(self, shapes: Shapes, says: str) -> Sliced:
        rows = Cut(0).sliced(shapes, says)
        if self.used > rows.shape[0]:
            raise _misfit(f"{says}: the ranks hold {rows.shape[0]} rows in all")
        return Sliced(rows.shape, rows.slicing, self, self.used)


class Boxes(Placement, frozen=True):
    """Each rank has blocks of the complete tensor; the files state their offsets and sizes.

    `text` is the name for this way of cutting, in messages and files.
    """

    text: str

    is_cut = True

    @property
    def is_by_outputs(self) -> bool:
        return False

    def sliced(self, shapes: Shapes, says: str) -> None:
        return None


KINDS: Sequence[type[Placement]] = (Replicated, Sum, Cut, PaddedRows)
"""The kinds that a rule can express."""


def of_rule(text: str) -> Placement | None:
    """Parses a placement that a user has written, such as `0:2x`; None for any other text."""
    return next((own for kind in KINDS if (own := kind.of_rule(text)) is not None), None)


def from_text(text: str) -> Placement:
    """Parses a placement that a file states: `0:2x` cuts each of 2 equal parts of dimension 0.

    An unknown text becomes `Boxes`: only the files then state which blocks a rank has.
    """
    return of_rule(text) or Boxes(text)


def _known(shapes: Shapes, says: str) -> list[tuple[int, ...]]:
    all_shapes = [shape for shape in shapes if shape is not None]
    if len(all_shapes) < len(shapes):
        lacking = [*shapes].index(None)
        raise _misfit(f"{says}: tensor rank {lacking} does not have this parameter")
    return all_shapes


def _misfit(message: str) -> InconsistentCheckpoint:
    return InconsistentCheckpoint("tp-rule-wrong", message)


def _on_ranks(shapes: Sequence[tuple[int, ...]]) -> str:
    return listed([list(shape) for shape in shapes], 4)


class Sliced(Struct, frozen=True):
    """How ranks cut one parameter: its full shape, its slices, and the `placement` they follow.

    `vocabulary` is the number of rows without padding; None if the parameter is no vocabulary.
    """

    shape: tuple[int, ...]
    slicing: Slicing
    placement: Placement
    vocabulary: int | None = None


class Row(Struct, frozen=True):
    """The names of one rank's parameters and buffers, in order, and the shapes of its slices.

    `shapes` has only tensors of which the rank holds a part.
    """

    names: Sequence[str]
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    has_weights: bool = True
    """Whether the rank's files have weights besides the masters of the same parameters."""


class Table(Struct, frozen=True):
    """How the ranks of one parallel axis share a model.

    cuts    maps a parameter to its slices; other parameters are replicated
    word    what messages call a rank of this axis
    rows    the parameters of each rank; only `split` needs them
    """

    word: str
    cuts: Mapping[str, Sliced] = field(default_factory=dict)
    rows: Sequence[Row] = ()
