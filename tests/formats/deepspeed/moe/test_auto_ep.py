"""AutoEP's stacked parameters, made by hand: their slices, second gates, and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from zckpt.errors import InconsistentCheckpoint, UnsupportedCheckpoint
from zckpt.files.torchfile import TorchFile
from zckpt.formats.deepspeed.moe.auto_ep import with_slices
from zckpt.formats.deepspeed_states.directories import TagDirectory
from zckpt.formats.deepspeed_states.experts import layers_in
from zckpt.formats.deepspeed_states.states import EngineStates

LAYER = "model.mlp"
GATE = f"{LAYER}.router.gate.weight"
Edit = Callable[[dict[str, Any]], object]


def stated_layer() -> dict[str, Any]:
    """What DeepSpeed 0.19.8 writes of a layer of four experts on two ranks."""
    ranks = [{"rank": rank, "experts": [2 * rank, 2 * rank + 1]} for rank in range(2)]
    return {
        "module_path": LAYER,
        "expert_key_prefix": f"{LAYER}.experts",
        "num_experts": 4,
        "ep_size": 2,
        "expert_placement": {"ranks": ranks},
    }


def ranks_with(tmp_path: Path, edit: Edit = lambda model: None, **changes: Any) -> EngineStates:
    """What two ranks say, with a model file that an `edit` has changed."""
    model: dict[str, Any] = {
        "module": {"first": torch.ones(2), GATE: torch.arange(8.0).view(4, 2)},
        "param_shapes": [
            {"first": torch.Size((2,)), GATE: torch.Size((4, 2))},
            {f"{LAYER}.experts.w1": torch.Size((2, 3, 5)), f"{LAYER}.experts.w2": (2, 5, 3)},
        ],
        "buffer_names": [],
        "ds_autoep_layers": [stated_layer()],
        "ds_config": {"zero_optimization": {"stage": 2}},
        "ds_version": "0.19.8",
    }
    edit(model)
    torch.save(model, tmp_path / "model.pt")
    file = TorchFile(str(tmp_path / "model.pt"))
    state = {"zero_stage": 2, **changes.pop("state", {})}
    options = {"partitioned": False, **changes}
    directory = TagDirectory(str(tmp_path), None, None)
    return EngineStates(
        directory, [file], [file], file.value, [state], [{}], "0.19.8", 2, **options
    )


def test_a_stacked_parameter_is_as_many_as_a_rank_has_experts(tmp_path: Path) -> None:
    """Expert after expert, in the place of the parameter."""
    ranks = with_slices(ranks_with(tmp_path))
    assert [[*group.items()] for group in ranks.param_shapes()] == [
        [("first", (2,)), (GATE, (4, 2))],
        [
            (f"{LAYER}.experts.w1.0", (3, 5)),
            (f"{LAYER}.experts.w1.1", (3, 5)),
            (f"{LAYER}.experts.w2.0", (5, 3)),
            (f"{LAYER}.experts.w2.1", (5, 3)),
        ],
    ]
    assert ranks.first["param_alignment_paddings"] == [[0, 0], [0] * 4]


def test_frozen_experts_are_sliced_too(tmp_path: Path) -> None:
    def edit(model: dict[str, Any]) -> None:
        model["frozen_param_shapes"] = {f"{LAYER}.experts.w3": torch.Size((2, 7)), "other": (2, 7)}

    frozen = with_slices(ranks_with(tmp_path, edit)).frozen_shapes
    w3 = f"{LAYER}.experts.w3"
    assert frozen == {f"{w3}.0": (7,), f"{w3}.1": (7,), "other": (2, 7)}


def test_other_models_stay_as_they_are(tmp_path: Path) -> None:
    ranks = ranks_with(tmp_path, lambda model: model.pop("ds_autoep_layers"))
    assert with_slices(ranks) is ranks


@pytest.mark.parametrize("key", ["ds_autoep_layers", "autoep_layers"])
def test_both_keys_of_layers(key: str) -> None:
    assert layers_in({key: [stated_layer(), "damaged"]}) == [stated_layer()]
    assert layers_in({key: {"no": "list"}}) == []


@pytest.mark.parametrize("others", [{}, {"tensor_parallel": 1}])
def test_what_universal_checkpoints_need_is_left_out(
    others: dict[str, Any], tmp_path: Path
) -> None:
    """It is left out, as slices have other names; a program's own information stays."""
    info = {"universal_checkpoint_version": 0.2, "ds_autoep_layers": [], **others}
    ranks = ranks_with(tmp_path, lambda model: model.update(universal_checkpoint_info=info))
    assert with_slices(ranks).model.get("universal_checkpoint_info", {}) == others


# -- second names of the routers' weights


def second_gate(name: str, numbers: torch.Tensor) -> Edit:
    return lambda model: model["module"].update({name: numbers})


def test_a_second_gate_has_the_bytes_of_the_first(tmp_path: Path) -> None:
    equal = torch.arange(8.0).view(4, 2)
    ranks = ranks_with(tmp_path, second_gate(f"{LAYER}.gate.weight", equal))
    assert with_slices(ranks).second_names == {f"{LAYER}.gate.weight": GATE}


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        (f"{LAYER}.gate.weight", torch.arange(8.0).view(4, 2) + 1),
        (f"{LAYER}.gate.weight", torch.arange(8.0)),
        ("model.other.weight", torch.arange(8.0).view(4, 2)),
    ],
    ids=["other bytes", "another shape", "another layer"],
)
def test_what_is_no_second_gate(name: str, numbers: torch.Tensor, tmp_path: Path) -> None:
    assert with_slices(ranks_with(tmp_path, second_gate(name, numbers))).second_names == {}


@pytest.mark.parametrize("place", ["buffer_names", "param_shapes"])
def test_a_name_that_is_listed_is_no_second_name(place: str, tmp_path: Path) -> None:
    name = f"{LAYER}.gate.weight"

    def edit(model: dict[str, Any]) -> None:
        model["module"][name] = torch.arange(8.0).view(4, 2)
        if place == "buffer_names":
            model["buffer_names"] = [name]
        else:
            model["param_shapes"][0][name] = torch.Size((4, 2))

    assert with_slices(ranks_with(tmp_path, edit)).second_names == {}


# -- what is refused


def of_layer(**values: Any) -> Edit:
    return lambda model: model["ds_autoep_layers"][0].update(values)


@pytest.mark.parametrize(
    ("edit", "changes", "said"),
    [
        (of_layer(), {"partitioned": True}, "AutoEP in ZeRO stage 3"),
        (of_layer(checkpoint_format="stacked"), {}, "AutoEP in ZeRO stage 3"),
        (
            of_layer(),
            {"state": {"param_alignment_paddings": [[0, 0], [0, 4]]}},
            "round_robin_gradients or parameter_alignment",
        ),
        (
            lambda m: m["ds_config"]["zero_optimization"].update(round_robin_gradients=True),
            {},
            "round_robin_gradients or parameter_alignment",
        ),
        (lambda m: m.update(mp_world_size=2), {}, "AutoEP beside tensor ranks"),
        (lambda m: m.update(folding={"tp": 2}), {}, "AutoEP beside tensor ranks"),
        (
            of_layer(expert_placement={"ranks": [{"rank": 0, "experts": [0, 2]}]}),
            {},
            f"AutoEP experts of {LAYER} that are not assigned in order",
        ),
        (
            of_layer(expert_placement={"ranks": [{"rank": 1, "experts": [0, 1]}]}),
            {},
            f"AutoEP experts of {LAYER} that are not assigned in order",
        ),
    ],
)
def test_layouts_that_are_not_read(
    edit: Edit, changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedCheckpoint, match=said):
        with_slices(ranks_with(tmp_path, edit, **changes))


@pytest.mark.parametrize("stated", [{"ep_size": 3}, {"ep_size": 0}, {"num_experts": None}])
def test_ranks_that_cannot_share_the_experts(stated: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(InconsistentCheckpoint, match=f"cannot share the .* experts of {LAYER}"):
        with_slices(ranks_with(tmp_path, of_layer(**stated)))
