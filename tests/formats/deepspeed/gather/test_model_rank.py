"""The proof's rule for ranks' flat buffers, against buffers that were cut by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import prod
from pathlib import Path

import numpy as np
import pytest
import torch

from zckpt.core.fragments import Extent
from zckpt.core.partition import Partition, Partitioned, Whole
from zckpt.formats.deepspeed.gather import partitions

from .. import made

GROUPS: made.Groups = (
    {"fc.weight": (3, 5), "one": (1,), "none": (0, 4), "fc.bias": (3,)},
    {"norm": (7,)},
)


def numbers(extent: Extent) -> np.ndarray:
    return np.fromfile(extent.file, np.float32, extent.length // 4, offset=extent.offset)


def gathered(found: Iterable[Partition]) -> dict[str, np.ndarray]:
    """The fp32 tensors, as the engine joins what its ranks have."""
    tensors = {}
    for each in found:
        if isinstance(each, Whole) and each.dtype == "F32":
            tensors[each.name] = numbers(each.extent).reshape(each.shape)
        if not isinstance(each, Partitioned):
            continue
        parts = [numbers(extent) for extent in each.ranks]
        for member in each.members:
            numel, first = prod(member.shape), member.first
            if each.interleaved:
                length = -(-numel // len(parts))
                flat = np.concatenate([part[first : first + length] for part in parts])[:numel]
            else:
                flat = np.concatenate(parts)[first : first + numel]
            tensors[member.name] = flat.reshape(member.shape)
    return tensors


def assert_gathers(run: Path, groups: made.Groups = GROUPS) -> None:
    found = gathered(partitions(str(run / made.TAG)))
    for name, tensor in made.whole(groups).items():
        if not name.endswith("/param"):
            assert np.array_equal(found[name], tensor.numpy()), name


@pytest.mark.parametrize("dp", [1, 2, 3, 8])
@pytest.mark.parametrize("cut", [made.stage_2, made.stage_3])
def test_flat_buffers(
    cut: Callable[[made.Groups, int], made.States], dp: int, tmp_path: Path
) -> None:
    assert_gathers(made.saved(tmp_path / "run", cut(GROUPS, dp)))


@pytest.mark.parametrize("dp", [1, 2, 3])
def test_masters_that_were_saved_without_padding(dp: int, tmp_path: Path) -> None:
    assert_gathers(made.saved(tmp_path / "run", made.stage_2(GROUPS, dp, saves_padding=False)))


def test_weights_of_stage_2_are_whole(tmp_path: Path) -> None:
    run = made.saved(tmp_path / "run", made.stage_2(GROUPS, 2))
    found = {each.name: each for each in partitions(str(run / made.TAG)) if isinstance(each, Whole)}
    assert {name: each.shape for name, each in found.items()} == {
        f"{name}/param": shape for group in GROUPS for name, shape in group.items()
    }


def test_numbers_are_not_gathered(tmp_path: Path) -> None:
    """A state of one element beside longer ones: Prodigy's estimate."""
    model, ranks = made.stage_2(GROUPS, 2)
    for rank in ranks:
        for state in rank["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
            state["d"] = torch.tensor([0.5])
    run = made.saved(tmp_path / "run", (model, ranks))
    assert not any(name.endswith("/d") for name in gathered(partitions(str(run / made.TAG))))
    assert_gathers(run)


@pytest.mark.parametrize(
    ("b", "owned"),
    [((2, 2), ("ab", "bc")), ((1, 2), ("ab", "c"))],  # 8 elements a rank
)
def test_a_momentum_that_a_rank_has_whole(
    b: tuple[int, int], owned: tuple[str, str], tmp_path: Path
) -> None:
    """Muon: each rank has all of every parameter that its part of the buffer reaches into."""
    groups = ({"a": (3, 2), "b": b, "c": (2, 3)},)
    model, ranks = made.stage_2(groups, 2)
    tensors = made.whole(groups)
    for rank, names in zip(ranks, owned, strict=True):
        (state,) = rank["optimizer_state_dict"]["base_optimizer_state"]["state"].values()
        state["exp_avg"] = torch.cat([tensors[f"{name}/exp_avg"].flatten() for name in names])
    assert_gathers(made.saved(tmp_path / "run", (model, ranks)), groups)


def test_frozen_weights_of_stage_3(tmp_path: Path) -> None:
    model, ranks = made.stage_3(GROUPS, 2)
    frozen = torch.arange(5.0)
    padded = torch.cat([frozen, torch.zeros(1)])
    model["frozen_param_shapes"] = {"frozen": torch.Size([5])}
    run = made.saved(tmp_path / "run", (model, ranks))
    for rank, part in enumerate(padded.chunk(2)):
        file = run / made.TAG / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
        torch.save(model | {"frozen_param_fragments": {"frozen": part.clone()}}, file)
    found = gathered(partitions(str(run / made.TAG)))
    assert found["frozen/param"].tolist() == frozen.tolist()
