"""Runs without ZeRO (stage 0): what real DeepSpeed held, read from its model file."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt
from zckpt import errors
from zckpt.files.torchshell import Storages
from zckpt.formats.deepspeed.stage_0.numbers import shape_of

from ...engines import models
from ...engines.cases import STAGE_0, Case
from ..contract import FormatContract
from ..equality import assert_is_what_the_engine_held, assert_proven, load, same_bits

Trained = Callable[[Case], Path]
NAMELESS = ("z0_dp2_plain_fp32", "z0_dp2_sgd_fp32")
"""Nothing shows the names: equal shapes in a reversed group; no state at all."""


def every_case() -> list[Any]:
    return [
        pytest.param(
            case,
            id=name,
            marks=[pytest.mark.engines, *([pytest.mark.first] if name == "z0_dp2_bf16" else [])],
        )
        for name, case in STAGE_0.items()
    ]


def names_of_optimizer(case: Case) -> list[str]:
    """What the program gave to its optimizer, in order, frozen weights too."""
    groups = models.named_groups(models.build(case.model, 0), case.groups)
    return [name for names, _ in groups for name in names]


@pytest.mark.parametrize("case", every_case())
def test_universal_is_what_the_engine_held(case: Case, trained: Trained, tmp_path: Path) -> None:
    root = trained(case)
    oracle = torch.load(root / "oracle.pt", weights_only=False)
    if case.name == "z0_dp2_sgd_fp32":  # nothing shows which of the optimizer's are frozen
        oracle |= {"trainable": oracle["trainable"] + oracle["frozen"], "frozen": []}
        members = [names for names, _ in models.named_groups(models.build("full", 0), 2)]
        pairs = zip(oracle["groups"], members, strict=True)
        oracle["groups"] = [{**group, "params": names} for group, names in pairs]
    if case.optimizer == "adafactor":  # its states are rows and columns, no numbers
        oracle["scalars"] = {}
    names = names_of_optimizer(case) if case.dtype == "fp32" else None
    if case.name in NAMELESS:
        with pytest.raises(errors.MissingData, match=r"no names|without state"):
            zckpt.read(root / "run")
    elif names is not None:  # the order of the module shows the names, but does not prove them
        report = zckpt.convert(root / "run", tmp_path / "inferred")
        assert report["inferred"]
        assert_is_what_the_engine_held(tmp_path / "inferred", oracle)
        report = zckpt.verify(root / "run", tmp_path / "inferred")
        assert not report["equal"]
        assert report["unproven"]
    report = zckpt.convert(root / "run", tmp_path / "universal", param_names=names)
    assert report["source"]["zero_stage"] == 0
    assert report["records"]["unchecked"] == 0
    assert report["left_out"] == report["inferred"] == []
    assert_is_what_the_engine_held(tmp_path / "universal", oracle)
    if names is None:
        assert_proven(root / "run", tmp_path / "universal")


Edit = Callable[[dict[str, Any]], None]


@pytest.fixture
def edited(trained: Trained, tmp_path: Path) -> Callable[[str, Edit], Path]:
    """A copy of a case's directory with its model file changed by a function."""

    def edit(name: str, change: Edit) -> Path:
        run = Path(shutil.copytree(trained(STAGE_0[name]) / "run", tmp_path / "edited"))
        (path,) = run.glob("*/mp_rank_00_model_states.pt")
        model = torch.load(path, weights_only=False)
        change(model)
        torch.save(model, path)
        return run

    return edit


def moments(run: Path, tmp_path: Path, **options: Any) -> dict[str, torch.Tensor]:
    zckpt.convert(run, tmp_path / "universal", **options)
    return load(tmp_path / "universal")


@pytest.mark.engines
class TestNames:
    """Masters are told apart by bytes, then by the module's order, or not at all."""

    PAIR = ("trunk.2.bias", "readout.bias")  # of one shape, in one group

    def fill(self, model: dict[str, Any], names: tuple[str, ...], value: float) -> None:
        """Gives weights and their masters the same bytes, as weights have that never changed."""
        masters = {
            id(master): master for group in model["optimizer"]["fp32_groups"] for master in group
        }.values()
        for name in names:
            weight = model["module"][name]
            (master,) = (
                each
                for each in masters
                if each.shape == weight.shape and torch.equal(each.to(weight.dtype), weight)
            )
            master.data.fill_(value)
            weight.fill_(value)

    @pytest.mark.parametrize("value", [0.0, 1.0, float("nan"), 1e30])
    def test_equal_bytes_are_told_apart_by_order(
        self, value: float, edited: Callable[..., Path], trained: Trained, tmp_path: Path
    ) -> None:
        run = edited("z0_dp2_bf16", lambda model: self.fill(model, self.PAIR, value))
        assert zckpt.read(run).notices.inferred == self.PAIR
        oracle = torch.load(trained(STAGE_0["z0_dp2_bf16"]) / "oracle.pt", weights_only=False)
        tensors = moments(run, tmp_path)
        for name in oracle["trainable"]:
            key = f"{name}/exp_avg"
            assert same_bits(tensors[key], oracle["tensors"][key]), key

    def test_a_reversed_group_shows_no_order(self, edited: Callable[..., Path]) -> None:
        pair = ("embedding.weight", "head.weight")  # a group in the reversed order of the module
        run = edited("z0_dp2_plain_bf16", lambda model: self.fill(model, pair, 0.0))
        with pytest.raises(
            errors.MissingData, match=r"embedding.weight, head.weight.* equal bytes"
        ):
            zckpt.read(run)

    def test_a_difference_far_from_the_sample(
        self, edited: Callable[..., Path], trained: Trained, tmp_path: Path
    ) -> None:
        """Large weights that differ in one element, in a group whose order shows nothing."""
        names = ("embedding.weight", "head.weight")

        def change(model: dict[str, Any]) -> None:
            masters = [m for m in model["optimizer"]["fp32_groups"][0] if m.shape == (31, 19)]
            for number, (master, name) in enumerate(zip(masters, reversed(names), strict=True)):
                assert torch.equal(master.to(torch.bfloat16), model["module"][name])
                for tensor in (master.data, model["module"][name]):
                    tensor.fill_(1.0)
                    tensor.view(-1)[5] = 2.0 + number

        run = edited("z0_dp2_plain_bf16", change)
        assert zckpt.read(run).notices.inferred == ()
        oracle = torch.load(trained(STAGE_0["z0_dp2_plain_bf16"]) / "oracle.pt", weights_only=False)
        tensors = moments(run, tmp_path)
        for name in names:
            assert same_bits(tensors[f"{name}/exp_avg"], oracle["tensors"][f"{name}/exp_avg"])

    def test_a_weight_that_no_master_rounds_to(self, edited: Callable[..., Path]) -> None:
        run = edited("z0_dp2_bf16", lambda model: model["module"]["readout.bias"].add_(1))
        with pytest.raises(errors.MissingData, match=r"shape \[19\], rounds to no weight"):
            zckpt.read(run)

    def test_the_user_names_them(self, edited: Callable[..., Path], tmp_path: Path) -> None:
        run = edited("z0_dp2_bf16", lambda model: model["module"]["readout.bias"].add_(1))
        names = names_of_optimizer(STAGE_0["z0_dp2_bf16"])
        trained = [name for name in names if not name.startswith("bottleneck")]
        manifest = zckpt.read(run, param_names=trained)
        assert [n for n, p in manifest.parameters.items() if p.trainable] == trained
        report = zckpt.verify(run, param_names=trained)
        assert [line["tensor"] for line in report["differences"]] == ["readout.bias/param"]

    def test_weights_of_another_program(self, edited: Callable[..., Path]) -> None:
        """FP16_Optimizer's weights are views of its buffers; a program may save copies of them."""

        def change(model: dict[str, Any]) -> None:
            model["module"] = {name: value.clone() for name, value in model["module"].items()}

        run = edited("z0_dp2_fused_bf16", change)
        with pytest.raises(errors.MissingData, match="no longer views of"):
            zckpt.read(run)
        names = names_of_optimizer(STAGE_0["z0_dp2_fused_bf16"])
        trained = [name for name in names if not name.startswith("bottleneck")]
        assert zckpt.verify(run, param_names=trained)["equal"]
        universal = run.with_name("universal")
        zckpt.convert(run, universal, param_names=trained)
        with pytest.raises(errors.MissingData, match="no longer views of"):
            zckpt.verify(run, universal, param_names=trained, gather=True, device="cpu")
        with pytest.raises(errors.WrongOption, match="do not fill"):
            zckpt.read(run, param_names=names)

    def test_a_weight_as_long_as_a_group(self, edited: Callable[..., Path]) -> None:
        """It is not taken for the group's buffer where its bytes are others."""

        def change(model: dict[str, Any]) -> None:
            model["module"] = {name: value.clone() for name, value in model["module"].items()}
            length = model["optimizer"]["fp32_groups_flat"][1].numel()
            model["module"]["frozen"] = torch.randn(length).bfloat16()

        with pytest.raises(errors.MissingData, match="no longer views of"):
            zckpt.read(edited("z0_dp2_fused_bf16", change))

    def test_groups_of_equal_size(self, edited: Callable[..., Path]) -> None:
        """Two flat groups of one length: their bytes tell which one is which."""

        def change(model: dict[str, Any]) -> None:
            optimizer = model["optimizer"]
            flats = [torch.randn(6) for _ in range(2)]
            optimizer["fp32_groups_flat"] = flats
            base = optimizer["optimizer_state_dict"]
            for number, flat in enumerate(flats):
                base["state"][number] |= {"exp_avg": flat * 0.5, "exp_avg_sq": flat * flat}
            buffers = [flat.bfloat16() for flat in flats]
            model["module"] = {
                "second.bias": buffers[1][4:],
                "first.weight": buffers[0][:4].view(2, 2),
                "second.weight": buffers[1][:4].view(2, 2),
                "first.bias": buffers[0][4:],
            }
            model["buffer_names"] = []

        run = edited("z0_dp2_fused_bf16", change)
        groups = {name: item.group for name, item in zckpt.read(run).parameters.items()}
        assert groups == {
            "first.weight": 0, "first.bias": 0, "second.weight": 1, "second.bias": 1
        }  # fmt: skip
        assert zckpt.verify(run)["equal"]


@pytest.mark.engines
def test_without_any_optimizer(edited: Callable[..., Path]) -> None:
    def change(model: dict[str, Any]) -> None:
        model["optimizer"] = None

    with pytest.raises(errors.IncompleteCheckpoint, match="no optimizer files"):
        zckpt.read(edited("z0_dp2_bf16", change))


@pytest.mark.engines
class TestWeightsAlone:
    def test_need_no_names_in_fp32(self, trained: Trained, tmp_path: Path) -> None:
        root = trained(STAGE_0["z0_dp2_plain_fp32"])
        oracle = torch.load(root / "oracle.pt", weights_only=False)
        tensors = moments(root / "run", tmp_path, weights_only=True)
        for name in oracle["trainable"]:
            assert same_bits(tensors[f"{name}/param"], oracle["tensors"][f"{name}/param"])

    def test_are_masters_in_16_bits(self, trained: Trained, tmp_path: Path) -> None:
        root = trained(STAGE_0["z0_dp2_fused_bf16"])
        oracle = torch.load(root / "oracle.pt", weights_only=False)
        tensors = moments(root / "run", tmp_path, weights_only=True, dtype="fp32")
        for name in oracle["trainable"]:
            assert same_bits(tensors[f"{name}/param"], oracle["tensors"][f"{name}/master"])


def saved_by_fused_adam(run: Path, steps: Sequence[int]) -> Path:
    """What DeepSpeed saves of its FusedAdam in fp32 without ZeRO."""
    group = {"lr": 0.01, "bias_correction": True, "betas": (0.8, 0.95), "eps": 1e-8}
    moments = ("exp_avg", "exp_avg_sq")
    return saved(run, {**group, "weight_decay": 0.1, "step": 0}, moments, steps)


def saved(
    run: Path, group: dict[str, Any], states: Sequence[str], steps: Sequence[int | None]
) -> Path:
    """What DeepSpeed saves in fp32 without ZeRO: one group of weights w0, w1..."""
    weights = {f"w{number}": torch.randn(3 + number, 2) for number in range(len(steps))}
    group = {**group, "params": list(range(len(steps)))}
    state = {
        number: {key: torch.rand_like(weight) for key in states}
        | ({} if step is None else {"step": step})
        for number, (step, weight) in enumerate(zip(steps, weights.values(), strict=True))
    }
    model = {
        "module": weights,
        "buffer_names": [],
        "optimizer": {"state": state, "param_groups": [group]},
        "param_shapes": None,
        "frozen_param_shapes": None,
        "shared_params": {},
        "frozen_param_fragments": None,
        "lr_scheduler": None,
        "global_steps": 5,
        "global_samples": 0,
        "skipped_steps": 0,
        "dp_world_size": 1,
        "mp_world_size": 1,
        "ds_config": {"zero_optimization": {"stage": 0}},
        "ds_version": "0.19.8",
    }
    (run / "global_step5").mkdir(parents=True)
    torch.save(model, run / "global_step5" / "mp_rank_00_model_states.pt")
    (run / "latest").write_text("global_step5")
    return run


def test_fused_adam_counts_in_the_last_parameter(tmp_path: Path) -> None:
    run = saved_by_fused_adam(tmp_path / "run", (0, 0, 0, 5))
    manifest = zckpt.read(run)
    assert manifest.step == 5
    assert [(line.step, line.truth) for line in manifest.run.steps[:3]] == [
        (0, False), (5, True), (0, False)
    ]  # fmt: skip
    zckpt.convert(run, tmp_path / "universal")
    zckpt.convert(tmp_path / "universal", tmp_path / "torch", to="gathered")
    states = torch.load(tmp_path / "torch" / "optim.pt", weights_only=True)["state"]
    assert [float(state["step"]) for state in states.values()] == [5.0] * 4


@pytest.mark.parametrize("steps", [(0, 0, 0, 5), (5, 5, 5, 5)])
def test_steps_of_fused_adam_stay_where_they_are(steps: tuple[int, ...], tmp_path: Path) -> None:
    run = saved_by_fused_adam(tmp_path / "run", steps)
    zckpt.convert(run, tmp_path / "universal")
    zckpt.convert(tmp_path / "universal", tmp_path / "again", to="deepspeed", dp=2)
    for path in (run, tmp_path / "again"):
        (file,) = path.glob("*/mp_rank_00_model_states.pt")
        optimizer = torch.load(file, weights_only=False)["optimizer"]
        assert tuple(state["step"] for state in optimizer["state"].values()) == steps
        assert [group["step"] for group in optimizer["param_groups"]] == [0]


def test_muon_of_the_program_is_copied(tmp_path: Path) -> None:
    """Without ZeRO each weight is whole, so the program's own Muon goes on at another size."""
    group = {"lr": 0.01, "weight_decay": 0.1, "momentum": 0.95, "nesterov": True, "ns_steps": 5}
    run = saved(tmp_path / "run", group, ["momentum_buffer"], [None, None])
    assert zckpt.read(run).optimizer == "Muon"
    zckpt.reshard(run, tmp_path / "again", dp=2)
    assert zckpt.verify(run, tmp_path / "again")["equal"]
    (file,) = (tmp_path / "again").glob("*/mp_rank_00_model_states.pt")
    (again,) = torch.load(file, weights_only=False)["optimizer"]["param_groups"]
    assert again == {**group, "params": [0, 1]}
    with pytest.raises(errors.MissingData, match="which groups Muon updates"):
        zckpt.reshard(run, tmp_path / "zero", dp=2, stage=2)


def test_numbers_show_no_shape() -> None:
    """torch's ASGD keeps two numbers as tensors beside its average of the weight."""
    shapes: dict[str, tuple[int, ...]] = {"eta": (), "mu": (), "ax": (3, 4), "step": ()}
    state = {key: Storages().tensor("F32", shape) for key, shape in shapes.items()}
    assert shape_of(state) == (3, 4)
    del state["ax"]
    assert shape_of(state) == ()
    state["row"], state["column"] = (Storages().tensor("F32", (size,)) for size in (3, 4))
    assert shape_of(state) is None


class TestContract(FormatContract):
    format = "deepspeed"

    @pytest.fixture
    def checkpoint(self, trained: Trained) -> Path:
        return trained(STAGE_0["z0_dp2_bf16"]) / "run"


@pytest.mark.engines
class TestContractOfFlatGroups(FormatContract):
    format = "deepspeed"

    @pytest.fixture
    def checkpoint(self, trained: Trained) -> Path:
        return trained(STAGE_0["z0_dp2_fused_bf16"]) / "run"


@pytest.mark.engines
def test_inspect_of_fp32(trained: Trained, zckpt_without: Callable[..., Any]) -> None:
    run = trained(STAGE_0["z0_dp2_fp32"]) / "run"
    ended = zckpt_without(("torch", "deepspeed", "numpy"), "inspect", run)
    assert ended.code == 0
    assert "are inferred from the order" in ended.err
