"""Elastic checkpoints of DeepSpeed, which hold no hyper-parameters: `elastic_checkpoint: true`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt
from zckpt.errors import WrongOption
from zckpt.formats.options import options_of

from ...conftest import EXAMPLE, Result, texts
from ...engines import deepspeed
from ...engines.cases import BF16_OPTIMIZER, CASES, NARROW_STATES, Case, elastic, zero
from ...engines.oracle import plain
from ...manifests import changed
from ..equality import assert_proven, same_bits

Trained = Callable[[Case], Path]
Zckpt = Callable[..., Result]

HYPER = ("lr", "betas", "eps", "weight_decay", "momentum")
KEPT = "neither does the target"  # the report's words for the elastic form
ELASTIC = zero(elastic_checkpoint=True)
TRAINERS = [{"lr": 0.01, "weight_decay": 0.1}, {"lr": 0.0025, "weight_decay": 0.0}]
"""What models.named_groups gives the two groups, and no ds_config tells."""


def config_of(case: Case, **more: Any) -> dict[str, Any]:
    """The whole ds_config of a case's engine, as a user would have it in a file."""
    config = {**case.config, **more}
    stage = {**config.get("zero_optimization", {}), "stage": case.stage}
    return {**config, "zero_optimization": stage, "bf16": {"enabled": True}}


def without_elastic(case: Case) -> dict[str, Any]:
    """The case's config for an engine that writes ordinary checkpoints."""
    stage = dict(case.config["zero_optimization"])
    del stage["elastic_checkpoint"]
    return {**case.config, "zero_optimization": stage}


def rewritten(source: Path, target: Path, **options: Any) -> bool:
    """Reshards; whether the target is elastic, which the files have to show as well."""
    import deepspeed  # noqa: F401  (its classes are in the pickle)

    report = zckpt.reshard(source, target, **options)
    warned = any(KEPT in warning for warning in texts(report["warnings"]))
    for file in target.rglob("*_optim_states.pt"):
        state = torch.load(file, weights_only=False)["optimizer_state_dict"]
        listed = isinstance(state.get("base_optimizer_state"), list)
        assert listed == warned == ("base_optimizer_state_step" in state)
    return warned


def hyper(group: Mapping[str, Any]) -> dict[str, Any]:
    values = {key: plain(group[key]) for key in HYPER if key in group}
    return {
        key: tuple(value) if isinstance(value, list) else value for key, value in values.items()
    }


def assert_resumed(
    before: Mapping[str, Any], after: Mapping[str, Any], exact: bool, groups: bool = True
) -> None:
    """State bit for bit, the trainer's hyper-parameters, the losses of the next steps."""
    assert sorted(before["tensors"]) == sorted(after["tensors"])
    for name, tensor in before["tensors"].items():
        assert same_bits(tensor, after["tensors"][name]), name
    one, other = (
        {name: flat(step) for name, step in state["steps"].items()} for state in (before, after)
    )
    assert one == other
    if groups:
        assert list(map(hyper, after["groups"])) == list(map(hyper, before["groups"]))
        limit = 0.0 if exact else 0.01  # of the order of additions in bf16
        pairs = zip(after["losses"], before["losses"], strict=True)
        assert max(abs(a - b) for a, b in pairs) <= limit
    assert after["losses"][0] == pytest.approx(before["losses"][0], abs=1e-6)


def flat(number: Any) -> Any:
    """The engine's elastic loader makes a tensor of shape [1] of a 0-d one (0.19.8)."""
    return number[0] if isinstance(number, list) else number


# -- the engine that reads and writes elastic files


MADE = [
    (name, dp)
    for name in (
        "elastic_adam",
        "elastic_torch_adam",
        "elastic_cpu_adam",
        "elastic_adamw",
        "elastic",
    )
    for dp in (3, 2, 1)
]
FIRST = [
    ("elastic_torch_adam", 3),
    ("elastic", 3),
]  # the others compile an optimizer of DeepSpeed's


@pytest.mark.engines
class TestElasticEngine:
    """It keeps its own hyper-parameters: the trainer's, which the files do not hold."""

    @pytest.mark.parametrize("stage", [2, 1])
    @pytest.mark.parametrize(
        ("name", "dp"),
        [pytest.param(*row, marks=[pytest.mark.first] if row in FIRST else []) for row in MADE],
    )
    def test_resumes(
        self, name: str, dp: int, stage: int, trained: Trained, tmp_path: Path
    ) -> None:
        case = CASES[f"z{stage}_dp2_{name}"]
        root = trained(case)
        before = torch.load(root / "oracle.pt", weights_only=False)
        assert rewritten(root / "run", tmp_path / "run", dp=dp)
        assert_proven(root / "run", tmp_path / "run")
        after = deepspeed.resume(case, tmp_path / "run", tmp_path, dp=dp)
        assert_resumed(before, after, exact=dp == 2)

    def test_by_way_of_universal(self, trained: Trained, tmp_path: Path) -> None:
        case = CASES["z2_dp2_elastic_adam"]
        root = trained(case)
        zckpt.convert(root / "run", tmp_path / "universal")
        assert rewritten(tmp_path / "universal", tmp_path / "run", dp=3)
        before = torch.load(root / "oracle.pt", weights_only=False)
        after = deepspeed.resume(case, tmp_path / "run", tmp_path, dp=3)
        assert_resumed(before, after, exact=False)

    @pytest.mark.parametrize(
        "change",
        [
            pytest.param({"optimizer": "lion"}, marks=pytest.mark.first),
            {"optimizer": "momentum"},
            {"optimizer": "sgd"},
            {"optimizer": "nadam"},
            {"optimizer": "rmsprop"},
            {"optimizer": "amsgrad"},
            {"optimizer": "adagrad", "groups": 1},
            pytest.param({"optimizer": "odd"}, marks=pytest.mark.first),
            {"dtype": "fp32"},
            {"groups": 4, "dp": 4},
            {"groups": 3, "config": zero(elastic_checkpoint=True, round_robin_gradients=True)},
            {"groups": 3, "config": zero(elastic_checkpoint=True, parameter_alignment=True)},
        ],
        ids=lambda change: "-".join(map(str, list(change.values())[:2])),
    )
    def test_other_optimizers_and_layouts(self, change: dict[str, Any], tmp_path: Path) -> None:
        case = dataclasses.replace(CASES["z2_dp2_elastic"], **change)
        deepspeed.train(case, tmp_path / "made")
        before = torch.load(tmp_path / "made" / "oracle.pt", weights_only=False)
        for dp in (case.dp, 3):
            assert rewritten(tmp_path / "made" / "run", tmp_path / f"run{dp}", dp=dp)
            after = deepspeed.resume(case, tmp_path / f"run{dp}", tmp_path / f"log{dp}", dp=dp)
            for scalars in after["scalars"].values():  # loaded as tensors of shape [1]
                scalars.update({key: flat(value) for key, value in scalars.items()})
            for scalars in before["scalars"].values():
                scalars.update({key: flat(value) for key, value in scalars.items()})
            assert after["scalars"] == before["scalars"]
            assert_resumed(before, after, exact=dp == case.dp)

    @pytest.mark.parametrize("dp", [3, 1])
    def test_the_engines_next_save(self, dp: int, trained: Trained, tmp_path: Path) -> None:
        """Of torch's Adam it lacks the step on ranks with padding, which zckpt finds all the same.

        Where rank 0 has padding, the engine does not load its own save; which is told before.
        """
        case = dataclasses.replace(CASES["z2_dp2_elastic_torch_adam"], dp=dp)
        run = trained(CASES["z2_dp2_elastic_torch_adam"]) / "run"
        report = zckpt.reshard(run, tmp_path / "run", dp=dp)
        warned = any(
            "the elastic checkpoint that it saves next" in warning
            for warning in texts(report["warnings"])
        )
        assert warned == (dp == 1)
        deepspeed.save_again(case, tmp_path / "run", tmp_path / "next")
        cut = [state["step"].shape for state in list_of_states(tmp_path / "next", dp - 1)]
        assert (0,) in cut
        assert zckpt.read(tmp_path / "next").step == 4
        assert rewritten(tmp_path / "next", tmp_path / "again", dp=2)
        after = deepspeed.resume(case, tmp_path / "again", tmp_path, dp=2, losses=4)
        assert {flat(step) for step in after["steps"].values()} == {4}
        before = torch.load(
            trained(CASES["z2_dp2_elastic_torch_adam"]) / "oracle.pt", weights_only=False
        )
        pairs = zip(after["losses"], before["losses"][1:], strict=True)
        assert max(abs(a - b) for a, b in pairs) < 0.01
        if warned:
            with pytest.raises(deepspeed.EngineError):
                deepspeed.resume(case, tmp_path / "next", tmp_path, dp=dp)

    def test_a_step_that_is_nowhere(self, trained: Trained, tmp_path: Path) -> None:
        """Of a file whose tensors were cloned there is no storage to look into."""
        case = dataclasses.replace(CASES["z2_dp2_elastic_torch_adam"], dp=1)
        run = trained(CASES["z2_dp2_elastic_torch_adam"]) / "run"
        zckpt.reshard(run, tmp_path / "run", dp=1)
        deepspeed.save_again(case, tmp_path / "run", tmp_path / "next")
        (file,) = (tmp_path / "next").rglob("*_optim_states.pt")
        value = torch.load(file, weights_only=False)
        for state in value["optimizer_state_dict"]["base_optimizer_state"]:
            state["step"] = state["step"].clone()
        torch.save(value, file)
        with pytest.raises(zckpt.ZckptError, match="the step of flat group 1 is lost"):
            zckpt.read(tmp_path / "next")


def list_of_states(run: Path, rank: int) -> list[dict[str, Any]]:
    """A rank's optimizer states in elastic files."""
    (file,) = run.rglob(f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    state = torch.load(file, weights_only=False)["optimizer_state_dict"]
    states: list[dict[str, Any]] = state["base_optimizer_state"]
    return states


# -- engines that read no elastic files: hyper-parameters have to be written


@pytest.mark.engines
class TestOrdinaryEngine:
    @pytest.mark.parametrize(
        "name",
        [
            "elastic_adam",
            "elastic_cpu_adam",
            "elastic_adamw",
        ],
    )
    def test_without_tensors_of_one_element_it_reads_them(
        self, name: str, trained: Trained, tmp_path: Path
    ) -> None:
        case = CASES[f"z2_dp2_{name}"]
        root = trained(case)
        config = without_elastic(case)
        whole = config_of(dataclasses.replace(case, config=config))
        assert rewritten(root / "run", tmp_path / "run", dp=3, config=whole)
        before = torch.load(root / "oracle.pt", weights_only=False)
        after = deepspeed.resume(case, tmp_path / "run", tmp_path, dp=3, config=config)
        assert_resumed(before, after, exact=False)

    @pytest.mark.parametrize(
        ("name", "stage"),
        [
            ("elastic_adam", 3),
            pytest.param("elastic_torch_adam", 2, marks=pytest.mark.first),
            ("elastic_torch_adam", 3),
            ("elastic_cpu_adam", 3),
            ("elastic_adamw", 3),
            ("elastic", 2),
            ("elastic", 3),
        ],
    )
    @pytest.mark.parametrize("given", [True, False])
    def test_the_first_step_works(
        self, name: str, stage: int, given: bool, trained: Trained, tmp_path: Path
    ) -> None:
        case = CASES[f"z2_dp2_{name}"]
        root = trained(case)
        before = torch.load(root / "oracle.pt", weights_only=False)
        config = without_elastic(case)
        whole = config_of(dataclasses.replace(case, config=config, stage=stage))
        own = name == "elastic"  # the program's optimizer: betas stand in no config
        defaults = [{**group, **({"betas": (0.8, 0.95)} if own else {})} for group in TRAINERS]
        assert not rewritten(
            root / "run",
            tmp_path / "run",
            dp=3,
            config=whole,
            group_defaults=defaults if given else {},
        )
        after = deepspeed.resume(case, tmp_path / "run", tmp_path, dp=3, stage=stage, config=config)
        assert_resumed(before, after, exact=False, groups=given)
        if not given and not own:
            assert [hyper(group) for group in after["groups"]] == 2 * [
                {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-8, "weight_decay": 0.1}
            ]

    def test_what_is_given_is_written(self, trained: Trained, tmp_path: Path) -> None:
        """To an elastic engine too: its ordinary files hold what the elastic ones cannot."""
        case = CASES["z2_dp2_elastic_adam"]
        root = trained(case)
        for source in (root / "run", tmp_path / "universal"):
            through = source != root / "run"
            if through:
                zckpt.convert(root / "run", source, group_defaults={1: {"lr": 0.5}})
            target = tmp_path / ("through" if through else "run")
            given = {} if through else {"group_defaults": {1: {"lr": 0.5}}}
            assert not rewritten(source, target, dp=3, **given)
            after = deepspeed.resume(case, target, tmp_path, dp=3)
            assert [group["lr"] for group in after["groups"]] == [0.01, 0.5]

    @pytest.mark.parametrize(
        "change",
        [
            {"config": {**NARROW_STATES, **ELASTIC}},
            {"config": {**BF16_OPTIMIZER, **ELASTIC}, "stage": 1},
        ],
    )
    def test_types_that_the_elastic_loader_widens(
        self, change: dict[str, Any], tmp_path: Path
    ) -> None:
        """bf16 moments; BF16_Optimizer, which saves ordinary files whatever the config says."""
        case = dataclasses.replace(CASES["z2_dp2_elastic"], **change)
        deepspeed.train(case, tmp_path / "made")
        before = torch.load(tmp_path / "made" / "oracle.pt", weights_only=False)
        assert not rewritten(tmp_path / "made" / "run", tmp_path / "run", dp=3)
        after = deepspeed.resume(case, tmp_path / "run", tmp_path, dp=3)
        assert_resumed(before, after, exact=False, groups="stage" in change)

    def test_muon_s_groups_are_not_known(self, tmp_path: Path) -> None:
        from ...engines.cases import MUON

        case = dataclasses.replace(
            CASES["z2_dp2_muon"], config={**MUON, **ELASTIC}, name="elastic muon"
        )
        deepspeed.train(case, tmp_path / "made")
        with pytest.raises(zckpt.ZckptError, match="which groups Muon updates") as refused:
            zckpt.reshard(tmp_path / "made" / "run", tmp_path / "run", dp=3)
        assert "0:use_muon=true" in str(refused.value.hint)
        assert not (tmp_path / "run").exists()

    def test_a_schedulers_learning_rate(self, tmp_path: Path) -> None:
        """It is what the scheduler says, and not what the config begins with."""
        base = CASES["z2_dp2_elastic_adam"]
        case = dataclasses.replace(base, scheduler=True)
        deepspeed.train(case, tmp_path / "made")
        before = torch.load(tmp_path / "made" / "oracle.pt", weights_only=False)
        report = zckpt.reshard(tmp_path / "made" / "run", tmp_path / "kept", dp=3)
        assert any(
            "the scheduler first sets it after that update" in line
            for line in texts(report["warnings"])
        )
        decays = [{"weight_decay": 0.1}, {"weight_decay": 0.0}]
        assert not rewritten(
            tmp_path / "made" / "run", tmp_path / "run", dp=3, group_defaults=decays
        )
        after = deepspeed.resume(case, tmp_path / "run", tmp_path, dp=3)
        assert_resumed(before, after, exact=False)


# -- hyper-parameters of single groups


def test_defaults_of_groups() -> None:
    mixed = options_of({"group_defaults": {"lr": 1.0, "eps": 2.0, 1: {"lr": 3.0}}})
    assert mixed.defaults_of(0, 2) == {"lr": 1.0, "eps": 2.0}
    assert mixed.defaults_of(1, 2) == {"lr": 3.0, "eps": 2.0}
    listed = options_of({"group_defaults": [{"lr": 1.0}, {"lr": 2.0}]})
    assert [listed.defaults_of(place, 2) for place in (0, 1)] == [{"lr": 1.0}, {"lr": 2.0}]
    assert options_of({}).defaults_of(0, 1) == {}
    with pytest.raises(WrongOption, match=r"group 1, but the source has 1 group$"):
        mixed.defaults_of(0, 1)
    for wrong in ({-1: {"lr": 1.0}}, {0: 1.0}, {None: {}}):
        with pytest.raises(WrongOption, match="group_defaults has the key"):
            options_of({"group_defaults": wrong})


def without_hyper_parameters(target: Path) -> Path:
    """A universal checkpoint of the example, of an engine that stores no hyper-parameters."""
    zckpt.convert(EXAMPLE, target)
    with changed(target) as manifest:
        manifest["groups"] = None
        manifest["source"]["format"] = "onnxruntime"
        manifest["state"]["engine"] = {"name": "onnxruntime", "dtype": "BF16"}
        for parameter in manifest["parameters"].values():
            parameter["group"] = None
    return target


@pytest.mark.parametrize("to", ["universal", "deepspeed", "dcp", "gathered"])
def test_the_command_line(to: str, tmp_path: Path, zckpt: Zckpt) -> None:
    source = without_hyper_parameters(tmp_path / "source")
    words = ["--group-defaults", "lr=3e-4,betas=[0.8,0.9]", "--group-defaults", "0:eps=1e-3"]
    words += ["--group-defaults", "0:weight_decay=0.5,lr=1.0"]
    ended = zckpt("convert", source, tmp_path / "made", "--to", to, *words, "-q")
    assert ended.code == 0, ended.err
    (group,) = zckpt("inspect", tmp_path / "made", "--json").document["groups"]
    expected = {"lr": 1.0, "betas": [0.8, 0.9], "eps": 1e-3, "weight_decay": 0.5}
    assert {key: group[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("word", "code", "says"),
    [
        ("1:lr=1.0", 2, "group 1, but the source has 1 group"),
        ("x:lr=1.0", 2, "not a list such as"),
        ("0:lr", 2, "not a list such as"),
        ("lr=1.0=2", 2, "not a list such as"),
    ],
)
def test_wrong_groups(word: str, code: int, says: str, tmp_path: Path, zckpt: Zckpt) -> None:
    source = without_hyper_parameters(tmp_path / "source")
    target = tmp_path / "made"
    ended = zckpt("convert", source, target, "--to", "deepspeed", "--group-defaults", word)
    assert (ended.code, says in ended.err) == (code, True), ended.err
    assert not target.exists()


def test_the_class_that_the_config_makes(tmp_path: Path) -> None:
    """Of an engine that stores no hyper-parameters, for each class of Adam."""
    import deepspeed  # noqa: F401  (its classes are in the pickle)

    source = without_hyper_parameters(tmp_path / "source")
    for place, (config, step, key) in enumerate(
        (
            (elastic("Adam"), int, "bias_correction"),
            (elastic("AdamW", offloads=True), int, "bias_correction"),
            (elastic("Adam", torch_adam=True), torch.Tensor, "amsgrad"),
            ({}, torch.Tensor, "bias_correction"),  # the program's own: all keys
            ({}, torch.Tensor, "amsgrad"),
        )
    ):
        target = tmp_path / str(place)
        whole = {**config, "bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}
        zckpt.convert(source, target, to="deepspeed", dp=1, config=whole)
        (file,) = target.rglob("*_optim_states.pt")
        base = torch.load(file, weights_only=False)["optimizer_state_dict"]["base_optimizer_state"]
        assert key in base["param_groups"][0]
        assert isinstance(base["state"][0]["step"], step)
        if config:
            assert base["param_groups"][0]["weight_decay"] == 0.1
