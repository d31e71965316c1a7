"""Optimizer states that are no tensor of their parameter's shape: numbers, flags, one element."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import zckpt
from zckpt.errors import UnsupportedState

from ..conftest import Result, texts
from ..engines import deepspeed
from ..engines.cases import CASES, Case
from .deepspeed.test_reshard import assert_same_state
from .equality import assert_is_what_the_engine_held, assert_proven

Zckpt = Callable[..., Result]
Trained = Callable[[Case], Path]

ODD: dict[str, Any] = {
    "count": 5,
    "flag": True,
    "rate": 0.75,
    "gain": torch.tensor(1.5, dtype=torch.float64),
    "width": torch.tensor([2.5]),
    "narrow": torch.tensor([[0.5]], dtype=torch.bfloat16),
    "seen": torch.tensor([7], dtype=torch.int64),
}
"""What a flat buffer of DeepSpeed can keep, where all its parameters have the same."""


def same(a: Any, b: Any) -> bool:
    """Equal kind, type, shape and value."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    return type(a) is type(b) and bool(a == b)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(5, 7)
        self.head = nn.Linear(7, 3)


def state_dicts(odd: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    """What a program of one process would save: two groups, every parameter with `odd` states."""
    torch.manual_seed(3)
    model = Net()
    names = [name for name, _ in model.named_parameters()]
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.01)
    model.head(model.trunk(torch.randn(4, 5))).square().mean().backward()
    optimizer.step()
    of = {id(parameter): name for name, parameter in model.named_parameters()}
    state = {
        of[id(parameter)]: {**held, **odd(of[id(parameter)])}
        for parameter, held in optimizer.state.items()
    }
    assert sorted(state) == sorted(names)
    listed = [
        {**group, "params": [of[id(each)] for each in group["params"]]}
        for group in optimizer.param_groups
    ]
    optim = {"state": state, "param_groups": listed}
    return {"model": model.state_dict(), "optim": optim}


def save(folder: Path, form: str, odd: Callable[[str], dict[str, Any]]) -> Path:
    """As a directory of torch.distributed.checkpoint, or as files of torch.save."""
    made = state_dicts(odd)
    if form == "dcp":
        dcp.save(made, checkpoint_id=folder)
        return folder
    folder.mkdir()
    torch.save(made["model"], folder / "model.pt")
    torch.save(made["optim"], folder / "optim.pt")
    return folder


def flat_states(run: Path, stage: int) -> list[dict[str, Any]]:
    """The base optimizer's states of rank 0."""
    import deepspeed  # noqa: F401  (its classes are in the pickle)

    (file,) = run.rglob("*zero_pp_rank_0_mp_rank_00_optim_states.pt")
    held = torch.load(file, weights_only=False)["optimizer_state_dict"]
    base = held["optimizer_state_dict" if stage == 3 else "base_optimizer_state"]
    return list(base["state"].values())


@pytest.mark.parametrize("form", ["dcp", "gathered"])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("through", [False, True])
def test_what_a_flat_buffer_can_keep(form: str, stage: int, through: bool, tmp_path: Path) -> None:
    source = save(tmp_path / "source", form, lambda _: ODD)
    if through:
        zckpt.convert(source, tmp_path / "universal")
        source = tmp_path / "universal"
    report = zckpt.convert(source, tmp_path / "run", to="deepspeed", dp=3, stage=stage)
    assert not any("state" in line for line in texts(report["left_out"]))
    states = flat_states(tmp_path / "run", stage)
    assert len(states) == 2
    for state in states:
        for key, value in ODD.items():
            assert same(state[key], value), (key, state.get(key))
    assert zckpt.verify(source, tmp_path / "run")["equal"]


@pytest.mark.parametrize("form", ["dcp", "gathered"])
def test_what_it_cannot_keep_is_named(form: str, tmp_path: Path) -> None:
    def odd(name: str) -> dict[str, Any]:
        return {
            "rows": torch.ones(3),  # of Adafactor's kind
            "note": "text",
            "own": len(name),  # trunk.weight, head.weight: one flat buffer, two values
            "rare": 1,
        } if name != "head.bias" else {"own": 1}  # fmt: skip

    source = save(tmp_path / "source", form, odd)
    with pytest.raises(UnsupportedState) as refused:
        zckpt.convert(source, tmp_path / "run", to="deepspeed", dp=2)
    sentence = refused.value.message
    assert "rows and note of trunk.weight, head.weight, trunk.bias" in sentence
    assert "own of trunk.weight, head.weight, trunk.bias, head.bias" in sentence
    assert "rare of trunk.bias;" in sentence  # trunk.weight and head.weight share one
    assert os.listdir(tmp_path) == ["source"]
    keys = ["rows", "note", "own"]
    with pytest.raises(UnsupportedState, match=r"the optimizer's rare of trunk.bias \("):
        zckpt.convert(source, tmp_path / "run", to="deepspeed", dp=2, drop_state=keys)
    keys.append("rare")
    report = zckpt.convert(source, tmp_path / "run", to="deepspeed", dp=2, drop_state=keys)
    assert [line["state"] for line in report["dropped"]] == keys
    states = flat_states(tmp_path / "run", 2)
    assert [sorted(state) for state in states] == [["exp_avg", "exp_avg_sq", "step"]] * 2


def test_onnx_runtime_keeps_none(tmp_path: Path) -> None:
    source = save(tmp_path / "source", "gathered", lambda _: ODD)
    with pytest.raises(UnsupportedState) as refused:
        zckpt.convert(source, tmp_path / "run", to="onnxruntime", dp=2)
    assert ", ".join(list(ODD)[:-1]) in refused.value.message
    assert f"and {list(ODD)[-1]} of trunk.weight" in refused.value.message
    zckpt.convert(source, tmp_path / "run", to="onnxruntime", dp=2, drop_state=list(ODD))
    report = zckpt.verify(source, tmp_path / "run", drop_state=list(ODD))
    assert report["lacking"] == [], report


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("through", [False, True])
def test_reshard_keeps_kind_type_and_shape(stage: int, through: bool, tmp_path: Path) -> None:
    source = save(tmp_path / "source", "gathered", lambda _: ODD)
    zckpt.convert(source, tmp_path / "run", to="deepspeed", dp=2, stage=stage)
    run = tmp_path / "run"
    if through:
        zckpt.convert(run, tmp_path / "universal")
        run = tmp_path / "universal"
    zckpt.reshard(run, tmp_path / "again", dp=3)
    for state in flat_states(tmp_path / "again", stage):
        for key, value in ODD.items():
            assert same(state[key], value), (key, state.get(key))


def test_the_universal_manifest_tells_shapes(tmp_path: Path) -> None:
    source = save(tmp_path / "source", "gathered", lambda _: ODD)
    zckpt.convert(source, tmp_path / "universal")
    manifest = json.loads((tmp_path / "universal" / "manifest.json").read_text())
    scalars = manifest["parameters"]["trunk.weight"]["scalars"]
    assert scalars["width"] == {"value": 2.5, "dtype": "F32", "shape": [1]}
    assert scalars["narrow"] == {"value": 0.5, "dtype": "BF16", "shape": [1, 1]}
    assert scalars["gain"] == {"value": 1.5, "dtype": "F64"}
    assert scalars["count"] == {"value": 5, "dtype": "int"}
    assert scalars["flag"] == {"value": True, "dtype": "bool"}


@pytest.mark.parametrize("to", ["dcp", "gathered"])
@pytest.mark.parametrize("through", [False, True])
def test_numbers_of_deepspeed_go_to_torch(to: str, through: bool, tmp_path: Path) -> None:
    """As the optimizer of the source keeps them: Python's numbers stay Python's."""
    source = save(tmp_path / "source", "gathered", lambda _: ODD)
    zckpt.convert(source, tmp_path / "run", to="deepspeed", dp=2)
    run = tmp_path / "run"
    if through:
        zckpt.convert(run, tmp_path / "universal")
        run = tmp_path / "universal"
    zckpt.convert(run, tmp_path / "torch", to=to, dp=2 if to == "dcp" else None)
    for name, state in torch_states(tmp_path / "torch", to).items():
        for key, value in ODD.items():
            assert same(state[key], value), (name, key, state.get(key))
    assert zckpt.verify(run, tmp_path / "torch")["equal"]
    assert zckpt.verify(source, tmp_path / "torch")["equal"]


def torch_states(folder: Path, form: str) -> dict[Any, dict[str, Any]]:
    """Every parameter's state, as torch reads it; a DCP template of the expected kinds."""
    if form == "gathered":
        found: dict[Any, dict[str, Any]] = torch.load(folder / "optim.pt")["state"]
        return found
    template = state_dicts(lambda _: {key: _blank(value) for key, value in ODD.items()})
    dcp.load(template, checkpoint_id=folder)
    loaded: dict[Any, dict[str, Any]] = template["optim"]["state"]
    return loaded


def _blank(value: Any) -> Any:
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else type(value)()


# -- verify and diff


@pytest.mark.parametrize(
    ("key", "other"),
    [
        ("width", torch.tensor(2.5)),  # of shape [1] against a 0-d one
        ("gain", torch.tensor(1.5)),  # F64 against F32
        ("count", 5.0),  # an int against a float
        ("flag", 1),
        ("seen", 7),
        ("rate", 0.5),
    ],
)
def test_a_difference_of_kind_is_found(key: str, other: Any, tmp_path: Path, zckpt: Zckpt) -> None:
    a = save(tmp_path / "a", "gathered", lambda _: ODD)
    b = save(tmp_path / "b", "gathered", lambda _: {**ODD, key: other})
    for command in (["verify", a, "--against", b], ["diff", a, b]):
        report = zckpt(*command, "--json").document
        assert not report["equal"]
        assert {line["scalar"] for line in report["scalars"]} == {key}
        ended = zckpt(*command)
        assert ended.code == 3
        assert f"trunk.weight, {key}: " in ended.out
        (line,) = [text for text in ended.out.splitlines() if f"trunk.weight, {key}: " in text]
        one, _, two = line.partition(": ")[2].partition(" against ")
        assert one != two, line


# -- the engine


@pytest.mark.engines
class TestEngine:
    """An optimizer with odd states, which scale its updates: losing one changes the losses."""

    @pytest.mark.parametrize(
        ("case", "dp", "stage"),
        [
            pytest.param("z2_dp2_odd", 3, None, marks=pytest.mark.first),
            pytest.param("z3_dp2_odd", 3, None, marks=pytest.mark.first),
            ("z1_dp2_odd", 1, None),
            ("z2_dp2_odd", 2, None),
            ("z3_dp2_odd", 2, 1),
            ("z2_dp2_odd", 3, 3),
            ("z2_dp4_odd_padding", 1, None),  # one group has one element, as the odd states have
            ("z3_dp4_odd_padding", 8, None),
            ("z2_dp4_odd_padding", 2, 3),
        ],
    )
    @pytest.mark.parametrize("through", [False, True])
    def test_resumes(
        self, case: str, dp: int, stage: int | None, through: bool, trained: Trained, tmp_path: Path
    ) -> None:
        root = trained(CASES[case])
        source = root / "run"
        oracle = torch.load(root / "oracle.pt", weights_only=False)
        zckpt.convert(source, tmp_path / "universal")
        assert_is_what_the_engine_held(tmp_path / "universal", oracle)
        if through:
            source = tmp_path / "universal"
        report = zckpt.reshard(source, tmp_path / "run", dp=dp, stage=stage)
        assert not any("state" in line for line in texts(report["left_out"]))
        assert_proven(root / "run", tmp_path / "run")
        after = deepspeed.resume(CASES[case], tmp_path / "run", tmp_path, dp=dp, stage=stage)
        assert_same_state(oracle, after, weights=True)
        assert after["losses"][0] == pytest.approx(oracle["losses"][0], abs=1e-6)
        if dp == 2 and stage is None:
            assert after["losses"] == oracle["losses"]
