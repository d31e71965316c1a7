"""The proof's rule for slices of tensor ranks, against slices that torch has cut."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from zckpt.errors import UnsupportedCheckpoint
from zckpt.formats.deepspeed.gather.tensor import Cut, rules_of, stated_rules


def whole_of(cut: Cut, slices: Sequence[torch.Tensor], copy: int = 0) -> torch.Tensor:
    """The whole tensor, put together of a copy's pieces; elements without one are -1."""
    whole = torch.full(cut.shape, -1.0)
    for piece in cut.copies[copy]:
        flat = slices[piece.rank].flatten()
        count = torch.Size(piece.sizes).numel()
        box = tuple(slice(a, a + n) for a, n in zip(piece.offsets, piece.sizes, strict=True))
        whole[box] = flat[piece.first : piece.first + count].view(piece.sizes)
    return whole


def numbers(*shape: int) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=torch.float32).view(shape)


def shapes(slices: Sequence[torch.Tensor]) -> list[tuple[int, ...] | None]:
    return [tuple(each.shape) for each in slices]


@pytest.mark.parametrize("axis", [0, 1, 2])
@pytest.mark.parametrize("widths", [(2, 2), (1, 3), (2, 1, 1)])
def test_slices_behind_each_other(axis: int, widths: tuple[int, ...]) -> None:
    whole = numbers(*(sum(widths) if each == axis else 3 for each in range(3)))
    slices = whole.split(widths, axis)
    assert torch.equal(whole_of(Cut.along(shapes(slices), axis), slices), whole)


def test_a_rank_without_any() -> None:
    whole = numbers(4, 3)
    cut = Cut.along([(4, 3), None], 0)
    assert torch.equal(whole_of(cut, [whole, torch.empty(0)]), whole)


@pytest.mark.parametrize("axis", [0, 1])
def test_sub_parameters_are_cut_one_by_one(axis: int) -> None:
    """q, k and v lie in one weight: each rank has a part of each."""
    q, k, v = (part + 100 * number for number, part in enumerate(numbers(3, 4, 4)))
    whole = torch.cat([q, k, v], axis)
    halves = [part.chunk(2, axis) for part in (q, k, v)]
    slices = [torch.cat([part[rank] for part in halves], axis) for rank in (0, 1)]
    cut = Cut.along(shapes(slices), axis, [[2, 2]] * 3)
    assert torch.equal(whole_of(cut, slices), whole)


def test_replicas_are_copies() -> None:
    slices = [numbers(2, 3), numbers(2, 3) + 10]
    cut = Cut.replicated(shapes(slices))
    for rank, own in enumerate(slices):
        assert torch.equal(whole_of(cut, slices, rank), own)


@pytest.mark.parametrize(
    ("info", "expected"),
    [
        ({"tp_replicated_parameter_patterns": ["w"]}, "copy"),
        ({"parameter_to_average_patterns": ["w"]}, "copy"),
        ({"parameter_with_row_parallelism_patterns": ["w"]}, "columns"),
        ({"vocabulary_parameter_patterns": ["w"]}, "rows"),
        ({"parameter_with_2_sub_params_cat_dim_0": ["w"]}, "halves"),
        (
            {"vocabulary_parameter_patterns": ["w"], "tp_replicated_parameter_patterns": [""]},
            "copy",
        ),
    ],
)
def test_what_a_checkpoint_states(info: dict[str, list[str]], expected: str) -> None:
    """In the engine's order: of two patterns that fit, replicated counts."""
    slices = numbers(8, 4).chunk(2, 0)
    cut = stated_rules(info).explicit("w", shapes(slices))
    assert cut is not None
    wholes = {
        "copy": slices[0],
        "columns": torch.cat(slices, 1),
        "rows": torch.cat(slices, 0),
        "halves": torch.cat([slices[0][:2], slices[1][:2], slices[0][2:], slices[1][2:]]),
    }
    assert torch.equal(whole_of(cut, slices), wholes[expected])


def test_a_name_that_no_pattern_fits() -> None:
    assert (
        stated_rules({"vocabulary_parameter_patterns": ["embed"]}).explicit("w", [(2, 2)]) is None
    )


def test_a_view_that_is_no_axis() -> None:
    view = {"patterns": ["w"], "shape": (5, 3), "partition_dim": 0}
    info = stated_rules({"parameter_with_sub_params": [view]})
    with pytest.raises(UnsupportedCheckpoint, match=r"cannot join .* does not fit the view"):
        info.explicit("w", [(4, 4), (4, 4)])


def test_a_user_s_rules_come_first(tmp_path: Path) -> None:
    file = tmp_path / "rules.txt"
    file.write_text("# of my model\n.*fused = 0:2x  # two halves\n.*out = 1\n.* = replicated\n")
    rules = rules_of(str(file), {"vocabulary_parameter_patterns": ["out"]})
    slices = numbers(8, 4).chunk(2, 0)
    found = {name: rules.explicit(name, shapes(slices)) for name in ("a.fused", "a.out", "a.norm")}
    cuts = {name: whole_of(cut, slices) for name, cut in found.items() if cut is not None}
    assert torch.equal(cuts["a.out"], torch.cat(slices, 1))
    assert torch.equal(cuts["a.norm"], slices[0])
    assert cuts["a.fused"].shape == (8, 4)
    assert cuts["a.fused"][2].tolist() == slices[1][0].tolist()
