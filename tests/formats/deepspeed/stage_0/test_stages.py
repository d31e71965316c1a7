"""Pipelines without ZeRO, made by hand: which names the optimizers of two stages have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt
from zckpt.errors import MissingData, UnsupportedCheckpoint, WrongOption

from ...equality import same_bits
from .. import made

Stages = Sequence[Sequence[str]]
TORCH, WHOLE, FLAT = None, "fp32_groups", "fp32_groups_flat"
SHAPES: dict[str, tuple[int, ...]] = {"0.w": (2, 3), "0.b": (3,), "1.w": (3, 2), "1.b": (2,)}
STAGES = [["0.w", "0.b"], ["1.w", "1.b"]]
TIED = "tied_modules.embed.w"


def tensors_of(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Tensor]:
    """Weights and states by the names of entries; layer 2 is layer 0 again."""
    tensors = made.whole([{name: shape for name, shape in shapes.items() if name[0] != "2"}])
    again = {name.replace("0.", "2.", 1): own for name, own in tensors.items() if name[0] == "0"}
    return tensors | {name: own.clone() for name, own in again.items()}


def saved(
    run: Path,
    stages: Stages = STAGES,
    masters: str | None = WHOLE,
    tensors: Mapping[str, torch.Tensor] | None = None,
) -> Path:
    """A run whose stages have parameters of these names, all in one group; see made.stage_0."""
    names = sorted({name for own in stages for name in own})
    tensors = tensors_of(SHAPES) if tensors is None else tensors
    folder = run / made.TAG
    folder.mkdir(parents=True)
    (run / "latest").write_text(made.TAG)
    for layer in sorted({name[0] for name in names}):
        weight = "param" if masters else "master"
        own = {n[2:]: tensors[f"{n}/{weight}"] for n in names if n[0] == layer}
        torch.save(own, folder / f"layer_0{layer}-model_states.pt")
    for number, own_names in enumerate(stages):
        parts = [{slot: tensors[f"{name}/{slot}"] for slot in made.SLOTS} for name in own_names]
        if masters == FLAT:
            parts = [{s: torch.cat([p[s].flatten() for p in parts]) for s in made.SLOTS}]
        states = {
            n: {slot: part[slot].clone() for slot in made.SLOTS if slot != "master"} | {"step": 3}
            for n, part in enumerate(parts)
        }
        base = {"state": states, "param_groups": [{"lr": 0.1, "params": [*states]}]}
        stored = [part["master"].clone() for part in parts]
        of_groups = stored if masters == FLAT else [stored]
        optimizer = {"optimizer_state_dict": base, masters: of_groups} if masters else base
        model: dict[str, Any] = {
            "module": None,
            "buffer_names": [],
            "optimizer": optimizer,
            "param_shapes": None,
            "global_steps": 3,
            "dp_world_size": 1,
            "mp_world_size": 2,
            "ds_config": {"zero_optimization": {"stage": 0}},
            "ds_version": "0.19.8",
        }
        torch.save(model, folder / f"mp_rank_0{number}_model_states.pt")
    return run


@pytest.mark.parametrize("masters", [WHOLE, FLAT])
@pytest.mark.parametrize("stages", [STAGES, [["0.b", "0.w"], ["1.b", "1.w"]]])
def test_masters_show_names(stages: Stages, masters: str, tmp_path: Path) -> None:
    """In any order, as no two weights have the same bytes."""
    run = saved(tmp_path / "run", stages, masters)
    manifest, expected = zckpt.read(run), made.whole([SHAPES])
    assert (sorted(manifest.parameters), manifest.notices.inferred) == (sorted(SHAPES), ())
    for name, tensor in expected.items():
        assert same_bits(zckpt.load(run, name), tensor), name


def test_the_order_of_layers_shows_names(tmp_path: Path) -> None:
    """Torch's own optimizer has shapes alone: the stages follow one another as the layers do."""
    shapes: dict[str, tuple[int, ...]] = {"0.w": (2,), "0.b": (2,), "1.w": (2,), "1.b": (2,)}
    tensors = tensors_of(shapes)
    names = [f"{n}.{inner}" for n in (0, 1) for inner in ("b", "w")]  # as the file has them
    run = saved(tmp_path / "run", [names[:2], names[2:]], TORCH, tensors)
    assert sorted(zckpt.read(run).notices.inferred) == sorted(shapes)
    for name in shapes:
        loaded = zckpt.load(run, f"{name}/exp_avg")
        assert torch.equal(loaded, tensors[f"{name}/exp_avg"]), name


def test_a_frozen_weight_of_the_optimizer(tmp_path: Path) -> None:
    """It has no state, and may be any weight of layer 1: that does not matter for the others."""
    shapes: dict[str, tuple[int, ...]] = {"0.w": (2,), "0.b": (3,), "3.w": (2,), "3.b": (3,)}
    names = [[f"{n}.{inner}" for inner in ("b", "w")] for n in (0, 3)]  # as the files have them
    run = saved(tmp_path / "run", names, TORCH, tensors := tensors_of(shapes))
    (path,) = run.glob("*/mp_rank_00_*")
    model = torch.load(path, weights_only=False)
    model["optimizer"]["param_groups"][0]["params"].append(2)
    torch.save(model, path)
    frozen = {"w": torch.ones(5), "b": torch.ones(7)}
    torch.save(frozen, path.with_name("layer_01-model_states.pt"))
    manifest = zckpt.read(run)
    assert {name for name, own in manifest.parameters.items() if own.trainable} == shapes.keys()
    for name in shapes:
        loaded = zckpt.load(run, f"{name}/exp_avg")
        assert torch.equal(loaded, tensors[f"{name}/exp_avg"]), name


def test_layers_of_equal_bytes_show_no_order(tmp_path: Path) -> None:
    """They may be one tied layer, whose key no file states."""
    shapes: dict[str, tuple[int, ...]] = {"0.w": (2,), "1.w": (2,)}
    tensors = tensors_of(shapes)
    tensors["1.w/master"] = tensors["0.w/master"].clone()
    run = saved(tmp_path / "run", [["0.w"], ["1.w"]], TORCH, tensors)
    with pytest.raises(MissingData, match="have equal shape") as caught:
        zckpt.read(run)
    assert "join the files in the order of the stages" in str(caught.value.hint)
    names = zckpt.read(run, param_names=["0.w", "1.w"]).parameters
    assert [*names] == ["0.w", "1.w"]


# -- tied layers

ENDS = [["0.w"], ["1.b", "2.w"]]  # layer 2 is layer 0 again, in a file of its own


@pytest.mark.parametrize("masters", [WHOLE, FLAT])
@pytest.mark.parametrize(
    ("again", "said"),
    [
        (
            "0.w",
            "stages have masters of 0.w: these belong to a tied layer, and no file states its key",
        ),
        ("2.w", "0.w, 2.w have equal bytes"),
    ],
)
def test_a_tied_layer_has_a_key_that_the_user_names(
    again: str, said: str, masters: str, tmp_path: Path
) -> None:
    run = saved(tmp_path / "run", [["0.w"], ["1.b", again]], masters)
    with pytest.raises(MissingData, match=said) as caught:
        zckpt.read(run)
    assert "p.requires_grad" in str(caught.value.hint)
    names = [TIED, "1.b", TIED]
    assert sorted(zckpt.read(run, param_names=names).parameters) == sorted({*names})
    zckpt.convert(run, tmp_path / "universal", param_names=names)
    tensors = tensors_of(SHAPES)
    for slot in made.SLOTS:
        loaded = zckpt.load(tmp_path / "universal", f"{TIED}/{slot}")
        assert same_bits(loaded, tensors[f"0.w/{slot}"]), slot


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ([TIED, "1.b"], r"names 2 parameters, .* have 1 \+ 2"),
        ([TIED, "1.b", TIED, "3.b"], r"names 4 parameters, .* have 1 \+ 2"),
        (["1.b", TIED, TIED], "of shape"),
        ([TIED, "5.b", TIED], "lists 5.b, which the model's state dict does not have"),
    ],
)
def test_names_that_do_not_fit(names: list[str], said: str, tmp_path: Path) -> None:
    run = saved(tmp_path / "run", ENDS)
    with pytest.raises(WrongOption, match=said) as caught:
        zckpt.read(run, param_names=names)
    assert "join the files in the order of the stages" in str(caught.value.hint)


def test_two_layers_may_be_the_tied_one(tmp_path: Path) -> None:
    """Without masters only shapes tell which layer has a key: here both layers fit."""
    shapes: dict[str, tuple[int, ...]] = {"0.w": (2, 3), "1.w": (2, 3), "3.b": (3,)}
    run = saved(tmp_path / "run", [["0.w", "1.w"], ["3.b"]], TORCH, tensors_of(shapes))
    assert [*zckpt.read(run, param_names=[TIED, "1.w", "3.b"]).parameters] == [TIED, "1.w", "3.b"]
    names = [TIED, TIED.replace("embed", "other"), "3.b"]
    with pytest.raises(
        UnsupportedCheckpoint, match="each of the layers 0, 1 may be the tied layer"
    ):
        zckpt.read(run, param_names=names)


def test_a_tied_layer_of_other_bytes(tmp_path: Path) -> None:
    """Its masters round to no weight that the user names."""
    tensors = tensors_of(SHAPES)
    for name in ("0.w", "2.w"):
        tensors[f"{name}/param"] = tensors[f"{name}/param"] + 1
    run = saved(tmp_path / "run", ENDS, FLAT, tensors)
    with pytest.raises(WrongOption, match="rounds to the weight of no parameter"):
        zckpt.read(run, param_names=[TIED, "1.b", TIED])


def test_a_target_states_names_and_keys(tmp_path: Path) -> None:
    """Nothing has to be given or compared to read what zckpt wrote of a pipeline in fp32."""
    tensors, names = tensors_of(SHAPES), [TIED, "1.b", TIED]
    run = saved(tmp_path / "run", ENDS, TORCH, tensors)
    zckpt.reshard(run, tmp_path / "other", dp=2, param_names=names)
    manifest = zckpt.read(tmp_path / "other")
    assert (sorted(manifest.parameters), manifest.notices.inferred) == (sorted({*names}), ())
    for slot in ("exp_avg", "exp_avg_sq"):
        loaded = zckpt.load(tmp_path / "other", f"{TIED}/{slot}")
        assert same_bits(loaded, tensors[f"0.w/{slot}"])
