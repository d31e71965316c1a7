"""How ranks hold a parameter: the kinds, and the texts that users write and files keep."""

from __future__ import annotations

import numpy as np
import pytest

from zckpt.core.checkpoint import placement
from zckpt.core.checkpoint.facts import TensorParallel
from zckpt.core.checkpoint.placement import (
    KINDS,
    Boxes,
    Cut,
    PaddedRows,
    Placement,
    Replicated,
    Sum,
    from_text,
    of_rule,
)
from zckpt.core.ranks.merge import merge
from zckpt.errors import InconsistentCheckpoint

from .grids import Placed, grid

TEXTS: dict[str, Placement] = {
    "replicated": Replicated(),
    "sum": Sum(),
    "0": Cut(0),
    "1": Cut(1),
    "0:1x": Cut(0, equal=1),
    "0:2x": Cut(0, equal=2),
    "0:64,16,16": Cut(0, (64, 16, 16)),
    "vocab:50257": PaddedRows(50257),
    "view": Boxes("view"),
    "affine_map": Boxes("affine_map"),
    "saved so": Boxes("saved so"),
    "0:0x": Boxes("0:0x"),
    "-1": Boxes("-1"),
}


@pytest.mark.parametrize("text", TEXTS)
def test_texts_of_files_come_back(text: str) -> None:
    placement = from_text(text)
    assert (placement, placement.text) == (TEXTS[text], text)
    is_rule = not isinstance(placement, Boxes)
    assert of_rule(text) == (placement if is_rule else None)
    assert placement.is_cut == (text not in ("replicated", "sum"))
    assert (placement.is_replicated, placement.is_sum) == (text == "replicated", text == "sum")


def test_spaces_between_widths() -> None:
    assert from_text("0: 64, 16, 16") == from_text("0:64,16,16")


@pytest.mark.parametrize(
    ("placement", "shapes", "whole"),
    [
        (Replicated(), [(2, 3)] * 2, (2, 3)),
        (Sum(), [(2, 3)] * 2, (2, 3)),
        (Cut(0), [(2, 3), (1, 3)], (3, 3)),
        (Cut(1), [(2, 3)] * 2, (2, 6)),
        (Cut(0, (4, 2)), [(3, 3)] * 2, (6, 3)),
        (PaddedRows(3), [(2, 3)] * 2, (4, 3)),
    ],
)
def test_the_whole_of_slices(
    placement: Placement, shapes: list[tuple[int, ...]], whole: tuple[int, ...]
) -> None:
    sliced = placement.sliced(shapes, "it does not fit")
    assert sliced is not None
    assert (sliced.shape, sliced.placement, sliced.slicing.covers()) == (whole, placement, True)
    assert sliced.vocabulary == (3 if isinstance(placement, PaddedRows) else None)


@pytest.mark.parametrize(
    ("placement", "shapes", "why"),
    [
        (Cut(0), [(2,), None], ": tensor rank 1 does not have this parameter"),
        (Replicated(), [(2,), (3,)], ", whose shapes differ"),
        (Cut(1), [(2,)] * 2, r", which has the shape \[2\]"),
        (Cut(1), [(2, 2), (3, 2)], ", whose shapes differ"),
        (
            Cut(0, (3, 1)),
            [(2,)] * 2,
            ": 2 ranks hold 2, 2 elements along dimension 0, but each must hold an equal share",
        ),
        (Cut(0, (2, 2)), [(3,), (1,)], ": the ranks hold 3, 1 along dimension 0"),
        (Cut(0, equal=2), [(3,), (1,)], ": the ranks' widths 3, 1 cannot be cut into 2 equal"),
        (PaddedRows(5), [(2,)] * 2, ": the ranks hold 4 rows in all"),
    ],
)
def test_shapes_that_do_not_fit(
    placement: Placement, shapes: list[tuple[int, ...] | None], why: str
) -> None:
    with pytest.raises(InconsistentCheckpoint, match=f"^`w = 0` does not fit{why}"):
        placement.sliced(shapes, "`w = 0` does not fit")


class SequenceParallel(Placement, frozen=True):
    """A norm on parts of a sequence: each rank has its own gradient, and so its own moments."""

    word = "sequence"

    def agree(self, are_weights: bool) -> bool:
        return are_weights


def test_a_new_kind_is_one_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """Users can say it, files keep it, and its ranks need equal weights alone."""
    monkeypatch.setattr(placement, "KINDS", (*KINDS, SequenceParallel))
    own = of_rule("sequence")
    assert own == SequenceParallel()
    facts = TensorParallel({"norm": own}, {})
    assert facts.to_state()["rules"] == {"norm": "sequence"}
    assert TensorParallel.of_state(facts.to_state()) == facts
    assert (own.is_cut, own.is_replicated, own.is_sum) == (False, True, False)

    sliced = own.sliced([(4,)] * 3, "")
    made = grid([Placed("norm", (4,), sliced, [np.arange(4)] * 3)], ("param", "exp_avg"))
    whole = merge(made.ranks, made.table)
    assert whole.parameters == made.whole.parameters
    assert [copy.name for copy in whole.replicas] == ["norm/param"] * 2
