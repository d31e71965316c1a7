"""The proof's rule for one model rank, against flat buffers that were cut by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from zckpt.core.checkpoint.entries import name_of
from zckpt.core.ranks.partition import Nameless, Partition, Partitioned, Whole
from zckpt.core.storage.fragments import Extent
from zckpt.errors import MissingData
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
            tensors[name_of(each.key)] = numbers(each.extent).reshape(each.shape)
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
            tensors[name_of(member.key)] = flat.reshape(member.shape)
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
    found = {each.key: each for each in partitions(str(run / made.TAG)) if isinstance(each, Whole)}
    assert {key: each.shape for key, each in found.items()} == {
        (name, "param"): shape for group in GROUPS for name, shape in group.items()
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


def test_a_number_beside_a_partition_of_one_element(tmp_path: Path) -> None:
    """That it is one shows in another group."""
    groups = ({"weight": (6,)}, {"one": (1,)})
    model, ranks = made.stage_2(groups, 1, saves_padding=False)
    for state in ranks[0]["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
        state["d"] = torch.tensor([0.5])
    run = made.saved(tmp_path / "run", (model, ranks))
    assert "one/d" not in gathered(partitions(str(run / made.TAG)))
    assert_gathers(run, groups)


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


@pytest.mark.parametrize("cut", [made.stage_2, made.stage_3])
def test_a_save_that_lists_no_parameters(
    cut: Callable[[made.Groups, int], made.States], tmp_path: Path
) -> None:
    model, ranks = cut(GROUPS, 2)
    run = made.saved(tmp_path / "run", ({**model, "param_shapes": None}, ranks))
    with pytest.raises(MissingData, match="the other model files list no parameters"):
        partitions(str(run / made.TAG))


def test_parameters_that_optimizer_files_list(tmp_path: Path) -> None:
    """Before 0.6.0; and before 0.5.4 all groups in one dictionary."""
    model, ranks = made.stage_2(GROUPS[:1], 2)
    (shapes,) = model.pop("param_shapes")
    for rank in ranks:
        rank["optimizer_state_dict"]["param_shapes"] = shapes
    assert_gathers(made.saved(tmp_path / "run", (model, ranks)), GROUPS[:1])


def test_paddings_between_parameters(tmp_path: Path) -> None:
    """`parameter_alignment`: zeros follow a parameter."""
    groups = ({"a": (3,), "b": (4,)},)
    model, ranks = made.stage_2(({"a": (3,), "gap": (1,), "b": (4,)},), 2)
    model["param_shapes"] = [{name: torch.Size(shape) for name, shape in groups[0].items()}]
    for rank in ranks:
        rank["optimizer_state_dict"]["param_alignment_paddings"] = [[1, 0]]
    found = gathered(partitions(str(made.saved(tmp_path / "run", (model, ranks)) / made.TAG)))
    assert [found["a/master"].tolist(), found["b/master"].tolist()] == [[1, 2, 3], [5, 6, 7, 8]]


EXPERTS = "moe.deepspeed_moe.experts.deepspeed_experts.{}.w"


@pytest.mark.parametrize("data_first", [False, True])
def test_experts_are_cut_over_the_ranks_that_have_them(data_first: bool, tmp_path: Path) -> None:
    """Ranks list groups of several sizes in any order; a name tells which is which."""
    model, ranks = made.stage_2(({"dense": (8,)}, {EXPERTS.format(0): (4,)}), 4)
    model["ds_config"] = {"use_data_before_expert_parallelism": data_first}
    for rank, optimizer in enumerate(ranks):
        own = optimizer["optimizer_state_dict"]
        ep, part = (rank // 2, rank % 2) if data_first else (rank % 2, rank // 2)
        dense = {"params": [0], "name": "dense"}
        experts = {"params": [1], "name": "ep_size_2", "moe": True}
        own["single_partition_of_fp32_groups"][1] = torch.tensor(
            [100.0 * ep + 2 * part + n for n in (0, 1)]
        )
        own["base_optimizer_state"] = {"state": {}, "param_groups": [dense, experts]}
        if rank % 2:  # these list their groups in the other order
            own["single_partition_of_fp32_groups"].reverse()
            own["base_optimizer_state"]["param_groups"].reverse()
    found = gathered(partitions(str(made.saved(tmp_path / "run", (model, ranks)) / made.TAG)))
    assert found["dense/master"].tolist() == [*range(1, 9)]
    for ep in (0, 1):
        expected = [100.0 * ep + n for n in range(4)]
        assert found[f"{EXPERTS.format(ep)}/master"].tolist() == expected


# -- stage 0


def of_stage_0(
    tag: Path,
    optimizer: Mapping[str, Any],
    shapes: Any = None,
    module: Mapping[str, torch.Tensor] | None = None,
    of_ep: Iterable[Mapping[str, Any]] = (),
) -> Path:
    """A tag's directory with this optimizer in its model file, or with those of ep ranks."""
    tag.mkdir()
    model = {"module": dict(module or {}), "param_shapes": shapes, "optimizer": optimizer}
    torch.save(model, tag / "mp_rank_00_model_states.pt")
    for rank, own in enumerate(of_ep):
        torch.save({"optimizer": own}, tag / f"expp_rank_{rank}_mp_rank_00_optim_states.pt")
    return tag


def named(tag: Path) -> dict[str, list[float]]:
    """The elements of tensors that have a name."""
    found = [each for each in partitions(str(tag)) if isinstance(each, Whole)]
    return {
        name_of(each.key): numbers(each.extent).tolist() for each in found if each.dtype == "F32"
    }


def nameless(tag: Path) -> list[tuple[str, list[float]]]:
    """Slot and elements of the others."""
    found = [each for each in partitions(str(tag)) if isinstance(each, Nameless)]
    assert all(isinstance(each.tensor, Whole) for each in found)
    return [(each.slot, numbers(each.tensor.extent).tolist()) for each in found]  # type: ignore[union-attr]


def state(first: float) -> dict[str, torch.Tensor]:
    return {"step": torch.tensor(3.0), "exp_avg": torch.tensor([first, first + 1])}


def of_torch(*groups: list[int], **more: Any) -> dict[str, Any]:
    """The optimizer of torch's own form, with two elements of each number."""
    states = {number: state(10.0 * number) for own in groups for number in own}
    return {"state": states, "param_groups": [{"params": own} for own in groups], **more}


def test_an_optimizer_by_number(tmp_path: Path) -> None:
    """Nothing names its tensors, and a step is none; masters stand in the order of the numbers."""
    masters = [[torch.tensor([1.0, 2.0])], [torch.tensor([3.0, 4.0])]]
    optimizer = {"optimizer_state_dict": of_torch([1], [0]), "fp32_groups": masters}
    assert nameless(of_stage_0(tmp_path / "tag", optimizer)) == [
        ("exp_avg", [10, 11]),
        ("master", [1, 2]),
        ("exp_avg", [0, 1]),
        ("master", [3, 4]),
    ]


def test_an_optimizer_whose_names_are_listed(tmp_path: Path) -> None:
    """In zckpt's files, which number frozen parameters too; a number has no parameter's name."""
    optimizer = of_torch([0, 1], [2], zckpt_frozen=[0])
    optimizer["state"][2]["weight_norm"] = torch.tensor([0.5])
    tag = of_stage_0(tmp_path / "tag", optimizer, [{"a": (2,)}, {"b": (2,)}])
    assert named(tag) == {"a/exp_avg": [10, 11], "b/exp_avg": [20, 21]}
    assert nameless(tag) == [("weight_norm", [0.5])]


def test_states_of_another_shape_have_no_name(tmp_path: Path) -> None:
    """Adafactor's rows and columns: the reader keeps them beside the slots of the parameter."""
    optimizer = of_torch([0], zckpt_frozen=[])
    optimizer["state"][0] |= {"row_var": torch.tensor([5.0, 6.0]), "full": torch.ones(2, 3)}
    tag = of_stage_0(tmp_path / "tag", optimizer, [{"a": (2, 3)}])
    assert named(tag) == {"a/full": [1, 1, 1, 1, 1, 1]}
    assert nameless(tag) == [("exp_avg", [0, 1]), ("row_var", [5, 6])]


def flat(*groups: torch.Tensor) -> dict[str, Any]:
    """FP16_Optimizer: a flat master of each group, and the states of as many elements."""
    states = {place: {"exp_avg": own + 50, "n": torch.ones(1)} for place, own in enumerate(groups)}
    own = {"state": states, "param_groups": [{"params": [place]} for place in states]}
    return {"fp32_groups_flat": [*groups], "optimizer_state_dict": own}


def views(buffer: torch.Tensor, **lengths: int) -> dict[str, torch.Tensor]:
    """Weights that lie behind each other in the 16-bit buffer of a group."""
    return dict(zip(lengths, buffer.half().split([*lengths.values()]), strict=True))


def test_flat_tensors_are_named_by_the_buffer_with_their_bytes(tmp_path: Path) -> None:
    """Groups of the same size, which the module has in another order; a tied weight comes once."""
    one, two = torch.arange(1.0, 6), torch.arange(11.0, 16)
    second, first = views(two, c=4, d=1), views(one, a=2, b=3)
    module = {**second, "tied": second["c"], **first}
    found = gathered(partitions(str(of_stage_0(tmp_path / "tag", flat(one, two), None, module))))
    assert {name: own.tolist() for name, own in found.items()} == {
        "a/master": [1, 2],
        "b/master": [3, 4, 5],
        "a/exp_avg": [51, 52],
        "b/exp_avg": [53, 54, 55],
        "c/master": [11, 12, 13, 14],
        "d/master": [15],
        "c/exp_avg": [61, 62, 63, 64],
        "d/exp_avg": [65],
    }


def test_weights_that_left_their_buffer(tmp_path: Path) -> None:
    one = torch.arange(1.0, 6)
    module = {name: own.clone() for name, own in views(one, a=2, b=3).items()}
    with pytest.raises(MissingData, match="no longer views of the flat buffers"):
        partitions(str(of_stage_0(tmp_path / "tag", flat(one), None, module)))


def test_optimizers_of_ep_ranks(tmp_path: Path) -> None:
    """Dense parameters come from the first one; an expert has its number in the whole layer."""
    optimizers = []
    for rank in (0, 1):
        own = of_torch([0], [1])
        own["param_groups"][1] |= {"moe": True, "name": "ep_size_2"}
        own["state"][1]["exp_avg"] += rank
        own["state"][0]["exp_avg"] += 100 * rank
        optimizers.append(own)
    shapes = [{"dense": (2,)}, {EXPERTS.format(0): (2,)}]
    tag = of_stage_0(tmp_path / "tag", {}, shapes, of_ep=optimizers)
    assert named(tag) == {
        "dense/exp_avg": [0, 1],
        f"{EXPERTS.format(0)}/exp_avg": [10, 11],
        f"{EXPERTS.format(1)}/exp_avg": [11, 12],
    }
