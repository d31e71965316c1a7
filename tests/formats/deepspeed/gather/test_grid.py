"""The proof's rule for grids: files of layers, and what tensor ranks hold together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch

from zckpt.core.checkpoint.dtypes import TORCH_NAMES
from zckpt.core.checkpoint.entries import name_of
from zckpt.core.grouping import by_key
from zckpt.core.ranks.partition import FlatMember, Joined, Partitioned, Whole
from zckpt.core.storage.fragments import Extent
from zckpt.errors import MissingData, UnsupportedCheckpoint
from zckpt.formats.deepspeed.gather import partitions
from zckpt.formats.deepspeed.gather.grid import slices

from .. import made

Info = Mapping[str, Sequence[str]]
ROWS, COLUMNS = {"w": (2, 3), "norm": (2,)}, {"w": (1, 3), "norm": (2,)}
"""What two tensor ranks have, of which the second one has less."""
REPLICATED: Info = {"tp_replicated_parameter_patterns": ["norm"]}
TIED = "tied_modules.embed.weight"
FIRST, LAST = {TIED: (3, 2), "2.weight": (2,)}, {TIED: (3, 2), "10.weight": (4,)}
"""The parameters of two stages of a pipeline."""


def saved(
    tag: Path, ranks: Sequence[made.States], layers: Mapping[str, Mapping[str, Any]] | None = None
) -> Path:
    """A tag's directory with the files of these model ranks, and those of layers by name."""
    tag.mkdir()
    for number, (model, optimizers) in enumerate(ranks):
        torch.save(model, tag / f"mp_rank_{number:02d}_model_states.pt")
        for rank, optimizer in enumerate(optimizers):
            name = f"bf16_zero_pp_rank_{rank}_mp_rank_{number:02d}_optim_states.pt"
            torch.save(optimizer, tag / name)
    for name, tensors in (layers or {}).items():
        torch.save(tensors, tag / f"{name}-model_states.pt")
    return tag


def tensor_ranks(*shapes: Mapping[str, tuple[int, ...]], info: Info | None = None) -> Any:
    """A model rank with each of these parameters, over two data ranks."""
    ranks = [made.stage_2([own], 2) for own in shapes]
    for model, _ in ranks:
        model["universal_checkpoint_info"] = info
    return ranks


def stages(*shapes: Mapping[str, tuple[int, ...]]) -> Any:
    """Stages of a pipeline with these parameters, whose weights are in files of layers."""
    return [({**model, "module": None}, own) for model, own in tensor_ranks(*shapes)]


def layers() -> dict[str, dict[str, Any]]:
    """The files of the layers of FIRST and LAST; both stages use the tied layer."""
    first, last = made.whole([FIRST]), made.whole([LAST])
    return {
        "layer_01": {"weight": first[f"{TIED}/param"], "_extra_state": torch.zeros(1)},
        "layer_02": {"weight": first["2.weight/param"]},
        "layer_10": {"weight": last["10.weight/param"]},
        "layer_11": {"weight": last[f"{TIED}/param"]},
    }


def elements(extent: Extent, dtype: str) -> torch.Tensor:
    data = Path(extent.file).read_bytes()[extent.offset : extent.offset + extent.length]
    return torch.frombuffer(bytearray(data), dtype=getattr(torch, TORCH_NAMES[dtype]))


def joined(part: Joined | Whole) -> torch.Tensor:
    """A tensor as the engine joins it; elements that no rank has are -1."""
    if isinstance(part, Whole):
        own = elements(part.extent, part.dtype)
        return own.as_strided(part.shape, part.strides or torch.empty(part.shape).stride())
    whole = torch.full(part.shape, -1, dtype=getattr(torch, TORCH_NAMES[part.dtype]))
    for box in part.parts:
        own = elements(box.extent, part.dtype)
        inside = whole[tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))]
        if box.strides:
            inside.copy_(own.as_strided(box.sizes, box.strides))
            continue
        flat = inside.flatten()
        flat[box.first : box.first + len(own)] = own
        inside.copy_(flat.view(box.sizes))
    return whole


def gathered(tag: Path) -> dict[str, list[torch.Tensor]]:
    """All tensors of a grid by name, each with all its copies."""
    pairs = []
    for part in partitions(str(tag)):
        assert isinstance(part, Joined | Whole)
        pairs.append((name_of(part.key), joined(part)))
    return by_key(pairs)


def assert_has(copies: Sequence[torch.Tensor], *expected: torch.Tensor) -> None:
    assert len(copies) == len(expected)
    for one, other in zip(copies, expected, strict=True):
        assert torch.equal(one, other)


# -- one model rank, tensor by tensor


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dp", [1, 2, 3, 5])
def test_a_tensor_in_the_parts_of_ranks(dp: int, interleaved: bool, tmp_path: Path) -> None:
    """A rank may have none of a tensor, and a part ends with padding."""
    tensors = [torch.arange(1.0, 8), torch.tensor([9.0]), torch.arange(10.0, 14).view(2, 2)]
    blocks = [tensor.flatten() for tensor in tensors] if interleaved else [
        torch.cat([tensor.flatten() for tensor in tensors])
    ]  # fmt: skip
    cut = [torch.cat([block, torch.zeros(-len(block) % dp)]).chunk(dp) for block in blocks]
    extents = []
    for rank in range(dp):
        own = torch.cat([parts[rank] for parts in cut])
        (tmp_path / str(rank)).write_bytes(own.numpy().tobytes())
        extents.append(Extent(str(tmp_path / str(rank)), 0, 4 * len(own)))
    widths = [-(-tensor.numel() // (dp if interleaved else 1)) for tensor in tensors]
    members = [
        FlatMember((str(place), "param"), tuple(tensor.shape), sum(widths[:place]))
        for place, tensor in enumerate(tensors)
    ]
    found = slices(Partitioned("F32", tuple(extents), members, interleaved))
    for own_slice, expected in zip(found, tensors, strict=True):
        assert [run.start for run in own_slice.runs][1:] == [run.stop for run in own_slice.runs][
            :-1
        ]
        flat = torch.cat([elements(run.extent, "F32") for run in own_slice.runs])
        assert torch.equal(flat.view(own_slice.shape), expected)


# -- tensor ranks


def test_slices_of_tensor_ranks(tmp_path: Path) -> None:
    """Without a rule they are rows, of any sizes; each copy of a replicated one comes by itself."""
    found = gathered(saved(tmp_path / "tag", tensor_ranks(ROWS, COLUMNS, info=REPLICATED)))
    first, second = made.whole([ROWS]), made.whole([COLUMNS])
    for slot in ("master", "exp_avg", "exp_avg_sq", "param"):
        assert_has(found[f"w/{slot}"], torch.cat([first[f"w/{slot}"], second[f"w/{slot}"]]))
        assert_has(found[f"norm/{slot}"], first[f"norm/{slot}"], second[f"norm/{slot}"])


def test_columns_that_data_ranks_have_cut_again(tmp_path: Path) -> None:
    info = {"parameter_with_row_parallelism_patterns": ["w"]}
    shapes = {"w": (3, 2)}, {"w": (3, 1)}
    found = gathered(saved(tmp_path / "tag", tensor_ranks(*shapes, info=info)))
    first, second = (made.whole([own]) for own in shapes)
    for slot in ("master", "exp_avg", "param"):
        assert_has(found[f"w/{slot}"], torch.cat([first[f"w/{slot}"], second[f"w/{slot}"]], 1))


def test_halves_that_are_cut_one_by_one(tmp_path: Path) -> None:
    """A tensor rank has a part of each half, and its data ranks cut both at once."""
    info = {"parameter_with_2_sub_params_cat_dim_0": ["w"]}
    shapes = {"w": (2, 5)}, {"w": (4, 5)}
    found = gathered(saved(tmp_path / "tag", tensor_ranks(*shapes, info=info)))
    halves = [made.whole([own])["w/master"].chunk(2) for own in shapes]
    expected = torch.cat([half[place] for place in (0, 1) for half in halves])
    assert_has(found["w/master"], expected)


def test_a_parameter_that_a_tensor_rank_does_not_have(tmp_path: Path) -> None:
    """Key-value heads that are fewer than the ranks."""
    shapes = {"w": (2, 3)}, {"w": (2, 3), "kv": (2, 2)}
    found = gathered(saved(tmp_path / "tag", tensor_ranks(*shapes)))
    assert_has(found["kv/master"], made.whole([shapes[1]])["kv/master"])


@pytest.mark.parametrize(
    ("first", "second", "is_whole"),
    [
        (torch.tensor([1, 2]), torch.tensor([3, 4]), True),  # no type of a weight
        (torch.tensor([1, 2]), torch.tensor([3, 4, 5]), False),
        (torch.ones(2).bfloat16(), torch.ones(2).bfloat16(), True),
        (torch.ones(2).bfloat16(), torch.zeros(2).bfloat16(), False),
        (torch.ones(2).bfloat16(), torch.ones(3).bfloat16(), False),
    ],
)
def test_what_is_not_trained(
    first: torch.Tensor, second: torch.Tensor, is_whole: bool, tmp_path: Path
) -> None:
    """A buffer is whole on each rank, and a frozen weight is cut unless all ranks have the same."""
    ranks = tensor_ranks(ROWS, ROWS)
    for (model, _), tensor in zip(ranks, (first, second), strict=True):
        model["module"]["more"] = tensor
    found = gathered(saved(tmp_path / "tag", ranks))["more/param"]
    assert_has(found, *([first, second] if is_whole else [torch.cat([first, second])]))


def test_a_weight_that_is_not_row_major(tmp_path: Path) -> None:
    """It is taken as it lies, unless it is in parts of which each has a place of its own."""
    ranks, weight = tensor_ranks({"w": (2, 3)}, {"w": (2, 3)}), torch.arange(6.0).bfloat16()
    for model, _ in ranks:
        model["module"]["w"] = weight.view(3, 2).T
    expected = torch.cat([weight.view(3, 2).T] * 2)
    assert_has(gathered(saved(tmp_path / "tag", ranks))["w/param"], expected)
    for model, _ in ranks:
        model["universal_checkpoint_info"] = {"parameter_with_2_sub_params_cat_dim_0": ["w"]}
    with pytest.raises(UnsupportedCheckpoint, match="cannot cut w/param, which is not row-major"):
        gathered(saved(tmp_path / "cut", ranks))


def test_stages_with_experts_are_no_tensor_ranks(tmp_path: Path) -> None:
    """Without files of layers the parameters tell, or what newer files state."""
    ranks = tensor_ranks({TIED: (2, 3), "a": (2,)}, {TIED: (1, 3), "b": (2,)})
    for model, _ in ranks:
        model["num_experts"] = [1]
    tag = saved(tmp_path / "tag", ranks)
    torch.save({"expert": torch.zeros(1)}, tag / "layer_0_expert_0_mp_rank_00_model_states.pt")
    assert len(gathered(tag)[f"{TIED}/master"]) == 2
    for number, (model, _) in enumerate(ranks):
        model["checkpoint_parallel_dimensions"] = {"pp_degree": 1, "tp_degree": 2}
        torch.save(model, tag / f"mp_rank_{number:02d}_model_states.pt")
    assert [own.shape for own in gathered(tag)[f"{TIED}/master"]] == [(3, 3)]


def test_stage_0_of_several_model_ranks(tmp_path: Path) -> None:
    ranks = [(model, []) for model, _ in tensor_ranks(ROWS, ROWS)]
    with pytest.raises(MissingData, match="no name shows which slices belong to one tensor"):
        gathered(saved(tmp_path / "tag", ranks))


# -- the files of layers


def test_layers_of_a_pipeline(tmp_path: Path) -> None:
    found = gathered(saved(tmp_path / "tag", stages(FIRST, LAST), layers()))
    first, last = made.whole([FIRST]), made.whole([LAST])
    tied = TIED + "/{}"
    for slot in ("master", "exp_avg", "param"):
        assert_has(found[f"2.weight/{slot}"], first[f"2.weight/{slot}"])
        assert_has(found[f"10.weight/{slot}"], last[f"10.weight/{slot}"])
        assert_has(found[tied.format(slot)], first[tied.format(slot)], last[tied.format(slot)])
    assert {name.partition("/")[0] for name in found} == {*FIRST, *LAST}


def test_layers_of_each_tensor_rank(tmp_path: Path) -> None:
    """`layer_NN-model_TT`: stages are the outer ranks, tensor ranks the inner ones."""
    shapes = [{"0.weight": (2, 2)}, {"0.weight": (1, 2)}, {"1.weight": (3,)}, {"1.weight": (1,)}]
    wholes = [made.whole([own]) for own in shapes]
    files = {
        f"layer_{layer:02d}-model_{tp:02d}": {
            "weight": wholes[2 * layer + tp][f"{layer}.weight/param"]
        }
        for layer in range(2)
        for tp in range(2)
    }
    found = gathered(saved(tmp_path / "tag", stages(*shapes), files))
    for layer in range(2):
        for slot in ("master", "param"):
            name = f"{layer}.weight/{slot}"
            own = [each[name] for each in wholes[2 * layer : 2 * layer + 2]]
            assert_has(found[name], torch.cat(own))


@pytest.mark.parametrize(
    "weight", [torch.full((3, 2), 0.5).bfloat16(), torch.arange(1.0, 7).bfloat16().view(2, 3)]
)
def test_a_layer_to_which_no_master_rounds(weight: torch.Tensor, tmp_path: Path) -> None:
    """It is a frozen layer, and has its own number."""
    files = {**layers(), "layer_05": {"weight": weight}}
    found = gathered(saved(tmp_path / "tag", stages(FIRST, LAST), files))
    assert_has(found["5.weight/param"], weight)
    assert len(found[f"{TIED}/param"]) == 2
    assert prod(found[f"{TIED}/master"][0].shape) == 6
