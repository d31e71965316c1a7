"""Optimizers of every name: their groups are copied as they are, and steps stay in their place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import zckpt
from zckpt import errors
from zckpt.dcp import StorageReader

from ...conftest import texts
from ..dcp.torch_dcp import alike, whole


@pytest.fixture
def cli(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """The fixture `zckpt`, which would hide the package here."""
    run: Callable[..., Any] = request.getfixturevalue("zckpt")
    return run


ADAMW = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-8, "weight_decay": 0.1}
TYPED = {"amsgrad": False, "foreach": None, "maximize": False, "capturable": False}
APEX = {**ADAMW, "bias_correction": True}
FOREIGN = {**ADAMW, "correct_bias": True}  # transformers' own AdamW, before version 5
ADEMAMIX = {**ADAMW, "betas": (0.8, 0.95, 0.99), "alpha": 5.0, "weight_decouple": True}
MOMENTS = ("exp_avg", "exp_avg_sq")
STEP = torch.tensor(7.0)


def saved(folder: Path, *groups: tuple[dict[str, Any], tuple[str, ...], Any]) -> Path:
    """One weight for each group; what a group gives are hyper-parameters, states, and a step."""
    names = "abc"[: len(groups)]
    weights = {name: torch.randn(6, 4) for name in names}
    state = {
        name: {key: torch.rand(6, 4) for key in states} | ({} if step is None else {"step": step})
        for name, (_, states, step) in zip(names, groups, strict=True)
    }
    listed = [
        {**group, "params": [name]} for name, (group, _, _) in zip(names, groups, strict=True)
    ]
    optim = {"state": state, "param_groups": listed}
    dcp.save({"model": weights, "optim": optim}, checkpoint_id=folder)
    return folder


@pytest.fixture
def muon_with_adamw(tmp_path: Path) -> Path:
    """The states of torch's own two, in one state dict."""
    matrix, vector = torch.nn.Parameter(torch.randn(6, 4)), torch.nn.Parameter(torch.randn(4))
    muon, adamw = torch.optim.Muon([matrix]), torch.optim.AdamW([vector])
    matrix.grad, vector.grad = torch.randn(6, 4), torch.randn(4)
    muon.step()
    adamw.step()
    states = [optimizer.state_dict() for optimizer in (muon, adamw)]
    named = {name: own["state"][0] for name, own in zip("mv", states, strict=True)}
    groups = [
        {**own["param_groups"][0], "params": [name]} for name, own in zip("mv", states, strict=True)
    ]
    model = {"m": matrix.detach(), "v": vector.detach()}
    optim = {"state": named, "param_groups": groups}
    dcp.save({"model": model, "optim": optim}, checkpoint_id=tmp_path / "run")
    return tmp_path / "run"


def test_muon_with_adamw(muon_with_adamw: Path, tmp_path: Path) -> None:
    """Adam's defaults were added to Muon's group, and `verify` said that the two differ."""
    assert zckpt.read(muon_with_adamw).optimizer == "Muon, AdamW"
    zckpt.reshard(muon_with_adamw, tmp_path / "again", dp=2)
    assert alike(whole(tmp_path / "again"), whole(muon_with_adamw))
    zckpt.convert(muon_with_adamw, tmp_path / "whole", to="gathered")
    for target in ("again", "whole"):
        assert zckpt.verify(muon_with_adamw, tmp_path / target)["equal"]


@pytest.mark.parametrize("options", [{}, {"config": {"optimizer": {"type": "AdamW"}}}])
def test_muon_with_adamw_is_refused_as_muon_is(
    options: dict[str, Any], muon_with_adamw: Path, tmp_path: Path
) -> None:
    with pytest.raises(errors.MissingData, match="which groups Muon updates and which Adam"):
        zckpt.convert(muon_with_adamw, tmp_path / "zero", to="deepspeed", dp=2, **options)
    with pytest.raises(errors.WrongOption, match="the source's is Muon, AdamW"):
        zckpt.convert(
            muon_with_adamw,
            tmp_path / "zero",
            to="deepspeed",
            dp=2,
            group_defaults=[{"use_muon": True}, {"use_muon": False}],
            config={"optimizer": {"type": "AdamW"}},
        )
    assert not (tmp_path / "zero").exists()


@pytest.mark.parametrize(
    ("group", "states", "name"),
    [
        ({**ADAMW, **TYPED}, MOMENTS, "Adam"),
        ({**ADAMW, **TYPED, "decoupled_weight_decay": True, "initial_lr": 0.1}, MOMENTS, "AdamW"),
        (APEX, MOMENTS, "Adam"),
        ({**APEX, "name": "decayed", "max_lr": 0.1}, MOMENTS, "Adam"),
        (FOREIGN, MOMENTS, None),
        (ADEMAMIX, (*MOMENTS, "exp_avg_slow"), None),
        (ADAMW, (*MOMENTS, "exp_avg_slow"), None),
        ({"lr": 0.1, "betas": (0.9, 0.99), "weight_decay": 0.0}, ("exp_avg",), "Lion"),
        ({"lr": 0.1, "betas": (0.9, 0.99), "cautious": True}, ("exp_avg",), None),
        ({"lr": 0.1, "betas": (0.9, 0.99), "weight_decay": 0.0}, MOMENTS, "Lion"),  # DeepSpeed's
    ],
)
def test_a_class_is_named_by_exact_states_and_known_keys(
    group: dict[str, Any], states: tuple[str, ...], name: str | None, tmp_path: Path
) -> None:
    assert zckpt.read(saved(tmp_path / "run", (group, states, STEP))).optimizer == name


def test_inspect_says_what_is_not_named(tmp_path: Path, cli: Callable[..., Any]) -> None:
    run = saved(tmp_path / "run", (FOREIGN, MOMENTS, STEP))
    assert "Adam-like (not named)" in cli("inspect", run).out
    assert zckpt.inspect(zckpt.read(run))["optimizer"] is None


def groups_of(folder: Path, to: str) -> list[dict[str, Any]]:
    """The groups in a target's files, without their members."""
    if to == "dcp":
        groups = whole(folder)["optim"]["param_groups"]
    elif to == "gathered":
        groups = torch.load(folder / "optim.pt", weights_only=False)["param_groups"]
    else:
        (file,) = folder.glob("*/*zero_pp_rank_0_*optim_states.pt")
        state = torch.load(file, weights_only=False)["optimizer_state_dict"]
        groups = state["base_optimizer_state"]["param_groups"]
    return [
        {key: value for key, value in group.items() if key not in ("params", "param_names")}
        for group in groups
    ]


@pytest.mark.parametrize("to", ["dcp", "gathered", "deepspeed"])
@pytest.mark.parametrize(("group", "states"), [(FOREIGN, MOMENTS), (ADEMAMIX, (*MOMENTS, "slow"))])
def test_nothing_is_added_to_what_is_not_named(
    group: dict[str, Any], states: tuple[str, ...], to: str, tmp_path: Path
) -> None:
    run = saved(tmp_path / "run", (group, states, STEP), ({**group, "lr": 0.5}, states, STEP))
    report = zckpt.convert(run, tmp_path / "target", to=to)
    assert groups_of(tmp_path / "target", to) == [group, {**group, "lr": 0.5}]
    assert not any(
        "the source lacks hyper-parameters" in warning for warning in texts(report["warnings"])
    )
    assert zckpt.verify(run, tmp_path / "target")["equal"]


@pytest.mark.parametrize("group", [APEX, ADAMW])
def test_one_format_to_itself_adds_nothing(group: dict[str, Any], tmp_path: Path) -> None:
    run = saved(tmp_path / "run", (group, MOMENTS, STEP))
    zckpt.convert(run, tmp_path / "universal")
    zckpt.convert(tmp_path / "universal", tmp_path / "again", to="dcp")
    assert alike(whole(tmp_path / "again"), whole(run))
    zckpt.convert(run, tmp_path / "whole", to="gathered")  # another one, for torch of today
    assert "foreach" in groups_of(tmp_path / "whole", "gathered")[0]


# -- the place of the step

IN_GROUPS = [(ADEMAMIX, (*MOMENTS, "exp_avg_slow")), (APEX, MOMENTS)]


@pytest.mark.parametrize("through", [None, "universal", "gathered"])
@pytest.mark.parametrize(("group", "states"), IN_GROUPS)
def test_a_step_in_groups_stays_there(
    group: dict[str, Any], states: tuple[str, ...], through: str | None, tmp_path: Path
) -> None:
    """Groups of other names than Apex's lost it: exit 0, and DeepSpeed began at 1."""
    run = saved(tmp_path / "run", ({**group, "step": 7}, states, None))
    source = tmp_path / "between" if through else run
    if through:
        zckpt.convert(run, source, to=through)
    zckpt.convert(source, tmp_path / "zero", to="deepspeed", dp=2, stage=2)
    assert groups_of(tmp_path / "zero", "deepspeed")[0]["step"] == 7
    zckpt.convert(tmp_path / "zero", tmp_path / "again", to="dcp")
    optim = whole(tmp_path / "again")["optim"]
    assert optim["param_groups"][0]["step"] == 7
    assert "step" not in optim["state"]["a"]
    for target in ("zero", "again"):
        report = zckpt.verify(run, tmp_path / target)
        assert report["equal"]
        assert not any("place of the optimizer's step" in note for note in texts(report["notes"]))


@pytest.mark.parametrize(
    "options",
    [
        {"optimizer": "torch"},
        {"optimizer": "deepspeed-fused-adam"},
        {"optimizer": "deepspeed-cpu-adam"},
        {"config": {"optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 2}}},
    ],
)
def test_a_named_optimizer_looks_elsewhere(options: dict[str, Any], tmp_path: Path) -> None:
    run = saved(tmp_path / "run", ({**APEX, "step": 7}, MOMENTS, None))
    zckpt.convert(run, tmp_path / "zero", to="deepspeed", dp=2, **options)
    manifest = zckpt.read(tmp_path / "zero")
    assert manifest.run.step_place is not None
    assert manifest.run.step_place.where == "state"
    report = zckpt.verify(run, tmp_path / "zero")
    assert report["equal"]
    (note,) = [note for note in texts(report["notes"]) if "place of the optimizer's step" in note]
    assert note.endswith(" looks for it")


@pytest.mark.parametrize("through", [None, "universal", "gathered"])
def test_a_named_optimizer_of_torch_looks_elsewhere(through: str | None, tmp_path: Path) -> None:
    run = saved(tmp_path / "run", ({**APEX, "step": 7}, MOMENTS, None))
    zckpt.convert(run, tmp_path / "zero", to="deepspeed", dp=2)
    source = tmp_path / "zero"
    if through:
        zckpt.convert(source, tmp_path / "between", to=through)
        source = tmp_path / "between"
    zckpt.convert(source, tmp_path / "target", to="dcp", optimizer="torch")
    optim = whole(tmp_path / "target")["optim"]
    assert alike(optim["state"]["a"]["step"], STEP)
    assert "step" not in optim["param_groups"][0]
    report = zckpt.verify(source, tmp_path / "target")
    assert report["equal"]
    (note,) = [note for note in texts(report["notes"]) if "place of the optimizer's step" in note]
    assert note.endswith("torch looks for it")
    zckpt.convert(tmp_path / "target", tmp_path / "back", to="dcp", optimizer="apex-fused-adam")
    optim = whole(tmp_path / "back")["optim"]
    assert alike(optim["state"], whole(run)["optim"]["state"])
    assert optim["param_groups"][0]["step"] == 7


@pytest.mark.parametrize("to", ["dcp", "gathered"])
def test_what_is_not_named_can_be_named(to: str, tmp_path: Path) -> None:
    """A label of the program's own hides the class; the user may know it."""
    run = saved(tmp_path / "run", ({**APEX, "label": "decayed", "step": 7}, MOMENTS, None))
    assert zckpt.read(run).optimizer is None
    zckpt.convert(run, tmp_path / "target", to=to, optimizer="torch")
    (group,) = groups_of(tmp_path / "target", to)
    assert {"foreach", "amsgrad", "decoupled_weight_decay"} <= group.keys()
    assert "step" not in group
    assert zckpt.verify(run, tmp_path / "target")["equal"]


def test_a_named_adam_needs_its_moments(tmp_path: Path) -> None:
    run = saved(tmp_path / "run", ({"lr": 0.1}, ("exp_avg",), 7))
    with pytest.raises(errors.WrongOption, match="is an Adam, which needs exp_avg and exp_avg_sq"):
        zckpt.convert(run, tmp_path / "target", to="dcp", optimizer="torch")
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("step", [7, torch.tensor(7.0)])
def test_a_step_in_states_keeps_its_type(step: Any, tmp_path: Path) -> None:
    """What is not named may be of any class, which takes the type that it has written."""
    run = saved(tmp_path / "run", (FOREIGN, MOMENTS, step))
    zckpt.convert(run, tmp_path / "zero", to="deepspeed", dp=2)
    zckpt.convert(tmp_path / "zero", tmp_path / "again", to="dcp")
    again = whole(tmp_path / "again")["optim"]["state"]["a"]["step"]
    assert (again, type(again)) == (step, type(step))


def test_a_step_in_both_places_stays_in_both(tmp_path: Path) -> None:
    run = saved(tmp_path / "run", ({**FOREIGN, "step": 7}, MOMENTS, 7))
    zckpt.convert(run, tmp_path / "universal")
    zckpt.convert(tmp_path / "universal", tmp_path / "zero", to="deepspeed", dp=2)
    zckpt.convert(tmp_path / "zero", tmp_path / "again", to="dcp")
    assert alike(whole(tmp_path / "again"), whole(run))


def test_verify_finds_a_step_in_another_place(tmp_path: Path, cli: Callable[..., Any]) -> None:
    """The same step, where this optimizer does not look for it."""
    run = saved(tmp_path / "run", ({**ADEMAMIX, "step": 7}, MOMENTS, None))
    state = whole(run)
    del state["optim"]["param_groups"][0]["step"]
    state["optim"]["state"]["a"]["step"] = 7
    dcp.save(state, checkpoint_id=tmp_path / "moved")
    ended = cli("verify", run, "--against", tmp_path / "moved")
    assert ended.code == 3
    assert "place of the step: group, int against state, int" in ended.out
    assert not zckpt.diff(run, tmp_path / "moved")["equal"]
    cli("verify", run, "--save-proof", tmp_path / "proof.json")
    assert cli("verify", run, "--against", tmp_path / "proof.json").code == 0
    assert cli("verify", tmp_path / "moved", "--against", tmp_path / "proof.json").code == 3


@pytest.mark.parametrize("number", [0, 1])  # of the group in the program, whose names decide
def test_a_storage_reader_gives_the_step_to_a_group(number: int, tmp_path: Path) -> None:
    groups = [({**ADEMAMIX, "step": 7 + n}, (*MOMENTS, "exp_avg_slow"), None) for n in range(2)]
    run = saved(tmp_path / "run", *groups)
    zckpt.convert(run, tmp_path / "zero", to="deepspeed", dp=2)
    name = "ab"[number]
    state: dict[str, Any] = {
        "optim": {
            "state": {name: {"exp_avg_slow": torch.zeros(6, 4)}},
            "param_groups": [{"alpha": 1.0, "step": 1, "params": [name]}],
        }
    }
    dcp.load(state, storage_reader=StorageReader(str(tmp_path / "zero")))
    (group,) = state["optim"]["param_groups"]
    assert group == {"alpha": 5.0, "step": 7 + number, "params": [name]}


# -- what DeepSpeed's engine cannot take

ADAGRAD = {**torch.optim.Adagrad([torch.zeros(1)]).defaults, "lr": 0.1}


def test_zero_takes_one_group_of_adagrad(tmp_path: Path) -> None:
    """The engine makes torch's class anew with one group, and dies when it loads two."""
    run = saved(tmp_path / "run", (ADAGRAD, ("sum",), STEP), (ADAGRAD, ("sum",), STEP))
    for stage in (1, 2, 3):
        with pytest.raises(
            errors.UnsupportedCheckpoint,
            match="with torch's Adagrad, DeepSpeed's ZeRO supports only one",
        ):
            zckpt.convert(run, tmp_path / "zero", to="deepspeed", dp=2, stage=stage)
    assert not (tmp_path / "zero").exists()
    offload = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    for name, options in (
        ("weights", {"weights_only": True}),
        ("whole", {"stage": 0, "dtype": "fp32"}),
        ("offloading", {"config": {**offload, "optimizer": {"type": "Adagrad"}}}),
    ):
        zckpt.convert(run, tmp_path / name, to="deepspeed", dp=2, **options)
    one = saved(tmp_path / "one", (ADAGRAD, ("sum",), STEP))
    zckpt.convert(one, tmp_path / "zero", to="deepspeed", dp=2)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_hyper_parameters_that_are_tensors_of_one_element(stage: int, tmp_path: Path) -> None:
    """As Prodigy's: the target was called damaged, because its reader compares them."""
    group = {**FOREIGN, "d": 1e-6, "d_numerator": torch.tensor([0.5])}
    run = saved(tmp_path / "run", (group, MOMENTS, STEP))
    zckpt.convert(run, tmp_path / "zero", to="deepspeed", dp=2, stage=stage, dtype="fp32")
    zckpt.convert(tmp_path / "zero", tmp_path / "again", to="dcp")
    (again,) = whole(tmp_path / "again")["optim"]["param_groups"]
    assert alike(again["d_numerator"], torch.tensor([0.5]))
    assert zckpt.verify(run, tmp_path / "zero")["equal"]


@pytest.mark.parametrize("stage", [2, 3])
def test_every_rank_has_hyper_parameters_that_are_tensors(stage: int, tmp_path: Path) -> None:
    """The files of ranks after the first had zeros, and nothing showed it."""
    rates = torch.tensor([0.5, 0.25])
    run = saved(tmp_path / "run", ({**FOREIGN, "rates": rates}, MOMENTS, STEP))
    zckpt.convert(run, tmp_path / "zero", to="deepspeed", dp=2, stage=stage)
    zckpt.reshard(tmp_path / "zero", tmp_path / "again", dp=3)
    for target, ranks in (("zero", 2), ("again", 3)):
        files = [*(tmp_path / target).glob("*/*zero_pp_rank_*optim_states.pt")]
        assert len(files) == ranks
        for file in files:
            state = torch.load(file, weights_only=False)["optimizer_state_dict"]
            base = state.get("base_optimizer_state") or state["optimizer_state_dict"]
            assert torch.equal(base["param_groups"][0]["rates"], rates)


def test_a_text_among_the_numbers_of_parameters(tmp_path: Path) -> None:
    """torch's optimizers keep such a key; it is not read, and the file is not damaged."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.named_parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    state["state"]["global"] = {"count": 3}
    torch.save({"model": model.state_dict(), "optimizer": state}, tmp_path / "run.pt")
    (unsupported,) = zckpt.read(tmp_path / "run.pt").states.of_form("unsupported")
    assert unsupported.key == "global"
    with pytest.raises(errors.UnsupportedState, match="optimizer's global of no parameter"):
        zckpt.convert(tmp_path / "run.pt", tmp_path / "universal")
