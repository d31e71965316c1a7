"""How parameters are cut: `universal_checkpoint_info` against DeepSpeed's own merge."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from zckpt.core.checkpoint.placement import Sliced
from zckpt.core.checkpoint.slicing import joined
from zckpt.core.storage.fragments import Extent, solid
from zckpt.formats.deepspeed.gather.tensor import Cut, stated_rules
from zckpt.naming.tensor_rules import decide
from zckpt.naming.universal_info import UniversalInfo

from ...naming.test_universal_info import NAME, Info, sub, widths

INFOS: dict[str, tuple[Info, list[tuple[int, ...]]]] = {
    "default": ({}, [(4, 3), (4, 3)]),
    "default of a vector": ({}, [(4,), (4,), (4,)]),
    "uneven rows": ({}, [(4, 3), (3, 3)]),
    "columns": ({"parameter_with_row_parallelism_patterns": [NAME]}, [(4, 3), (4, 3)]),
    "uneven columns": ({"parameter_with_row_parallelism_patterns": [NAME]}, [(4, 3), (4, 2)]),
    "replicated": ({"tp_replicated_parameter_patterns": [r".*\.weight"]}, [(4, 3), (4, 3)]),
    "two halves": ({"parameter_with_2_sub_params_cat_dim_0": [NAME]}, [(6, 3), (6, 3)]),
    "vocabulary": (
        {"vocabulary_parameter_patterns": [NAME], "original_vocab_size": 7},
        [(4, 3), (4, 3)],
    ),
    "widths of rows": (sub(((8, 2, 4), -1), 0), [(7, 3), (7, 3)]),
    "widths of columns": (sub((-1, (4, 2)), 1), [(5, 3), (5, 3)]),
    "a number of equal parts": (sub((3, -1), 0), [(6, 5), (6, 5)]),
    "a number in another view": (sub((3, -1, 4), 0), [(6, 4), (6, 4)]),
    "a view of more axes": (sub(((2, 4), 3, 5), 0), [(9, 5), (9, 5)]),
    "an axis inside of a dimension": (sub((3, (2, 4), 5), 1), [(9, 5), (9, 5)]),
    "an axis of one element on each rank": (sub((2, 3, (2,)), 2), [(2, 3, 1), (2, 3, 1)]),
    "an axis before one of one element": (sub((3, (2, 2), 1), 1), [(3, 2, 1), (3, 2, 1)]),
    "uneven widths": (sub(((5, 3), -1), 0, **widths([3, 2], [1, 2])), [(4, 3), (4, 3)]),
    "a rank without a part": (sub(((2, 3), -1), 0, **widths([2, 0], [1, 2])), [(3, 3), (2, 3)]),
    "precedence of replicated": (
        {
            "tp_replicated_parameter_patterns": [NAME],
            "parameter_with_row_parallelism_patterns": [NAME],
        },
        [(4, 3), (4, 3)],
    ),
    "precedence of two halves": (
        {
            "parameter_with_2_sub_params_cat_dim_0": [NAME],
            **sub(((4, 4), -1), 0),
            "parameter_with_row_parallelism_patterns": [NAME],
        },
        [(4, 3), (4, 3)],
    ),
    "precedence of sub-parameters": (
        {**sub(((4, 4), -1), 0), "parameter_with_row_parallelism_patterns": [NAME]},
        [(4, 3), (4, 3)],
    ),
}


def tensors(shapes: list[tuple[int, ...]], same: bool) -> list[torch.Tensor]:
    """Slices in which every element has its own number."""
    numbers = itertools.count(1)
    slices = [
        torch.tensor([next(numbers) for _ in range(prod(shape))], dtype=torch.float32).view(shape)
        for shape in shapes
    ]
    return [slices[0].clone() for _ in slices] if same else slices


def whole_of(sliced: Sliced, slices: list[torch.Tensor], copy: int = 0) -> torch.Tensor:
    """The whole tensor that the pieces make of the slices."""
    fragments = [solid(x.numel(), Extent(str(n), 0, x.numel() * 4)) for n, x in enumerate(slices)]
    whole = torch.full((sliced.slicing.numel,), torch.nan)
    for fragment in joined(sliced.slicing, fragments, 4, copy):
        for run in fragment.runs(0, sliced.slicing.numel):
            first = run.extent.offset // 4
            values = slices[int(run.extent.file)].reshape(-1)[first : first + run.stop - run.start]
            whole[run.start : run.stop] = values
    return whole.view(sliced.shape)


def gathered_of(cut: Cut, slices: list[torch.Tensor], copy: int = 0) -> torch.Tensor:
    """The same of the rule by which `verify --gather` joins, each element once."""
    whole, times = torch.zeros(cut.shape), torch.zeros(cut.shape)
    for each in cut.copies[copy]:
        last = each.first + prod(each.sizes)
        box = tuple(slice(a, a + n) for a, n in zip(each.offsets, each.sizes, strict=True))
        whole[box] = slices[each.rank].reshape(-1)[each.first : last].view(each.sizes)
        times[box] += 1
    assert (times == 1).all()
    return whole


def merged_by_the_engine(
    info: Info, slices: list[torch.Tensor], shapes: list[tuple[int, ...]], root: Path
) -> torch.Tensor:
    """What DeepSpeed's ds_to_universal makes of the slices."""
    from deepspeed.checkpoint.ds_to_universal import merge_tp_slices

    for rank, tensor in enumerate(slices):
        folder = root / "slices" / NAME / str(rank)
        folder.mkdir(parents=True)
        for state in ("fp32", "exp_avg", "exp_avg_sq"):
            torch.save(tensor.reshape(-1), folder / f"{state}.00")
    merge_tp_slices(info, str(root / "out"), str(root / "slices"), len(slices), (NAME, shapes))
    merged: torch.Tensor = torch.load(root / "out" / NAME / "fp32.pt", weights_only=False)["param"]
    return merged


@pytest.mark.engines
@pytest.mark.first
@pytest.mark.parametrize("what", INFOS)
def test_info_means_what_the_engine_makes_of_it(what: str, tmp_path: Path) -> None:
    info, shapes = INFOS[what]
    slices = tensors(shapes, same="replicated" in what)
    expected = merged_by_the_engine(info, slices, shapes, tmp_path)
    sliced = UniversalInfo(info).sliced(NAME, shapes)
    assert sliced is not None
    found = decide("run", {NAME: shapes}, [UniversalInfo(info)], len(shapes))[NAME]
    assert found.shape == sliced.shape
    whole = whole_of(found, slices)
    if found.vocabulary is not None:  # the engine strips the padding, which zckpt keeps
        assert (found.shape[0], found.vocabulary) == (8, 7)
        whole = whole[:7]
    assert torch.equal(whole.reshape(expected.shape), expected)
    cut = stated_rules(info).explicit(NAME, shapes) or Cut.along(shapes, 0)
    assert cut.shape == found.shape
    for copy in range(len(cut.copies)):
        gathered = gathered_of(cut, slices, copy).reshape(-1)[: expected.numel()]
        assert torch.equal(gathered.view(expected.shape), expected)


def maps() -> Iterator[Any]:
    """Affine maps of the engine's own making, and slices by its own hand."""
    from deepspeed.checkpoint import affine

    full = torch.arange(1.0, 12 * 10 + 1).view(12, 10)
    yield "replicated", full, affine.replicated_map((12, 10), 2)
    for dim, parts in ((0, [7, 5]), (1, [4, 6])):
        yield f"split {dim}", full, affine.contiguous_split_map((12, 10), parts, dim)
    for dim, held in ((0, [[3, 1], [2, 2], [3, 1]]), (1, [[4, 2], [1, 3]])):
        yield f"parts {dim}", full, affine.sub_param_map((12, 10), [*map(sum, held)], held, dim)


@pytest.mark.engines
@pytest.mark.first
def test_affine_maps_of_the_engine() -> None:
    for what, full, made in maps():
        shards = [made.extract(full, rank) for rank in range(2)]
        info = {"affine_map": {"version": 1, "params": {r"^layers\.0": made.to_dict()}}}
        shapes = [tuple(shard.shape) for shard in shards]
        found = decide("run", {NAME: shapes}, [UniversalInfo(info)], 2)[NAME]
        assert found.placement.is_replicated == (what == "replicated"), what
        assert found.shape == (12, 10)
        for copy in range(found.slicing.copies):
            assert torch.equal(whole_of(found, shards, copy), full), what
        cut = stated_rules(info).explicit(NAME, shapes)
        assert cut is not None
        assert len(cut.copies) == found.slicing.copies
        for copy in range(len(cut.copies)):
            assert torch.equal(gathered_of(cut, shards, copy), full), what
