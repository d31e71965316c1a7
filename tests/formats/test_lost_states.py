"""States of an optimizer that a target cannot have, and states that only one of two sides has."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt
from zckpt.errors import UnsupportedState, WrongOption

from ..conftest import Result
from ..engines import deepspeed, optimizers
from ..engines.cases import UNCLIPPED, Case
from .test_odd_states import save

Zckpt = Callable[..., Result]
Trained = Callable[[Case], Path]


def matrices(name: str) -> dict[str, Any]:
    """As SOAP's: a list of matrices, a nested list without any, and a vector of another length."""
    return {
        "GG": [torch.full((2, 2), len(name) * 1.0), torch.ones(3, 3)],
        "Q": [[]] if "bias" in name else [torch.eye(2)],
        "scales": torch.arange(4.0),
    }


@pytest.fixture
def soap(tmp_path: Path) -> Path:
    return save(tmp_path / "soap", "gathered", matrices)


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    return save(tmp_path / "plain", "gathered", lambda _: {})


# -- what a target cannot have


@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize("stage", [1, 3])
def test_it_is_refused_by_name(soap: Path, tmp_path: Path, stage: int, dry_run: bool) -> None:
    with pytest.raises(UnsupportedState) as refused:
        zckpt.convert(soap, tmp_path / "run", to="deepspeed", dp=2, stage=stage, dry_run=dry_run)
    assert "GG, Q and scales of trunk.weight" in refused.value.message
    assert "--drop-state GG --drop-state Q --drop-state scales" in str(refused.value.hint)
    assert os.listdir(tmp_path) == ["soap"]


@pytest.mark.parametrize("stage", [2, 3])
def test_a_state_of_the_parameters_shape_by_chance(tmp_path: Path, stage: int) -> None:
    """The preconditioner of a square matrix, as Shampoo's, is none of the matrix's elements."""
    sizes = {"trunk.weight": (7, 5), "head.weight": (3, 3)}
    source = save(
        tmp_path / "source", "gathered", lambda name: {"pre": torch.ones(sizes.get(name, (2, 2)))}
    )
    with pytest.raises(UnsupportedState) as refused:
        zckpt.convert(source, tmp_path / "run", to="deepspeed", dp=2, stage=stage)
    assert "pre of trunk.weight, " in refused.value.message
    assert refused.value.hint == "to go on without it: --drop-state pre (or --weights-only)"
    zckpt.convert(source, tmp_path / "run", to="deepspeed", dp=2, stage=stage, drop_state=["pre"])


@pytest.mark.parametrize("key", ["pre_cond_0", "inv_precond_1", "Q", "GG"])
@pytest.mark.parametrize("to", ["deepspeed", "deepspeed-universal"])
def test_all_weights_are_square(tmp_path: Path, key: str, to: str) -> None:
    """Then the name of a preconditioner shows what it is, and other states are elements."""
    source = tmp_path / "source"
    source.mkdir()
    weights = {name: torch.ones(size, size) for name, size in (("a.weight", 3), ("b.weight", 4))}
    state = {name: {"ema": each, key: each + 1} for name, each in weights.items()}
    groups = [{"params": [*weights], "lr": 0.1}]
    torch.save(weights, source / "model.pt")
    torch.save({"state": state, "param_groups": groups}, source / "optim.pt")
    options: dict[str, Any] = {"to": to, "dp": 2, "stage": 2}
    with pytest.raises(UnsupportedState, match=f"the optimizer's {key} of a.weight, b.weight"):
        zckpt.convert(source, tmp_path / "run", **options)
    zckpt.convert(source, tmp_path / "run", **options, drop_state=[key])
    assert {*zckpt.read(tmp_path / "run").slots} == {"param", "master", "ema"}
    zckpt.convert(source, tmp_path / "whole", to="dcp")
    assert zckpt.verify(source, tmp_path / "whole")["equal"]


def test_the_report_begins_with_what_was_dropped(soap: Path, tmp_path: Path, zckpt: Zckpt) -> None:
    to = ("--to", "deepspeed", "--dp", 2, "--stage", 2)
    ended = zckpt("convert", soap, tmp_path / "run", *to)
    assert ended.code == 1
    assert "Error: the target cannot store the optimizer's GG, Q and scales of" in ended.err
    drop = [word for key in ("GG", "Q", "scales") for word in ("--drop-state", key)]
    ended = zckpt("convert", soap, tmp_path / "run", *to, *drop)
    assert ended.code == 0
    assert ended.out.startswith("dropped: GG, Q and scales of 4 parameters (--drop-state)\n")
    against = zckpt("verify", tmp_path / "run", "--against", soap)
    assert against.code == 3
    assert "equals" not in against.out
    without = zckpt("verify", tmp_path / "run", "--against", soap, *drop)
    assert without.code == 0
    assert "(--drop-state GG --drop-state Q --drop-state scales)" in without.out
    ended = zckpt("convert", soap, tmp_path / "weights", *to, "--weights-only")
    assert "dropped: exp_avg, exp_avg_sq, GG, Q and scales of 4 " in ended.out.splitlines()[0]


@pytest.mark.parametrize("to", ["universal", "dcp", "gathered", "deepspeed"])
@pytest.mark.parametrize("through", [False, True])
def test_it_is_written_where_it_has_a_place(
    soap: Path, tmp_path: Path, to: str, through: bool
) -> None:
    """DeepSpeed's stage 0 keeps the state of each parameter by itself."""
    source = soap
    if through:
        zckpt.convert(soap, tmp_path / "universal")
        source = tmp_path / "universal"
    options: dict[str, Any] = {"dp": 2, "stage": 0, "dtype": "fp32"} if to == "deepspeed" else {}
    report = zckpt.convert(source, tmp_path / "run", to=to, **options)
    assert report["dropped"] == report["computed_afresh"] == []
    zckpt.convert(tmp_path / "run", tmp_path / "back", to="gathered")
    before, after = (torch.load(p / "optim.pt")["state"] for p in (soap, tmp_path / "back"))
    numbers = list(after)
    for number, state in zip(numbers, before.values(), strict=True):
        assert alike(after[number], state)
    assert zckpt.verify(soap, tmp_path / "run")["lacking"] == []


def alike(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(alike(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(alike, a, b))
    return bool(a == b)


def test_renaming_takes_it_along(soap: Path, tmp_path: Path) -> None:
    zckpt.convert(soap, tmp_path / "renamed", rename=[("^trunk", "body")])
    entries = zckpt.read(tmp_path / "renamed").entries
    assert ("optimizer.other.'body.weight'.GG.0", "state") in entries
    assert not [name for name in entries if "trunk" in name]
    report = zckpt.verify(soap, tmp_path / "renamed", rename=[("^trunk", "body")])
    assert report["equal"]


def test_an_unknown_name_is_refused(soap: Path, tmp_path: Path) -> None:
    with pytest.raises(WrongOption) as refused:
        zckpt.convert(soap, tmp_path / "run", drop_state=["qq"])
    assert refused.value.message == "--drop-state qq: the optimizer has no state of this name"
    assert refused.value.hint == "its states are exp_avg, exp_avg_sq, GG, Q, scales"
    with pytest.raises(WrongOption):
        zckpt.convert(soap, tmp_path / "run", drop_state=["Q"], weights_only=True)
    with pytest.raises(WrongOption):
        zckpt.verify(soap, soap, drop_state=["qq"])
    with pytest.raises(WrongOption):
        zckpt.verify(soap, drop_state=["Q"])


def test_any_slot_may_be_dropped(plain: Path, tmp_path: Path) -> None:
    report = zckpt.convert(plain, tmp_path / "run", drop_state=["exp_avg_sq"])
    assert report["dropped"] == [{"state": "exp_avg_sq", "parameters": 4, "reason": "--drop-state"}]
    assert {*zckpt.read(tmp_path / "run").slots} == {"param", "exp_avg"}


# -- objects of classes


@pytest.fixture
def grafted(tmp_path: Path) -> Path:
    return save(
        tmp_path / "grafted", "gathered", lambda _: {"graft": optimizers.Graft(torch.ones(2))}
    )


GRAFT = f"{optimizers.Graft.__module__}.Graft"


@pytest.mark.parametrize("to", ["dcp", "gathered", "deepspeed"])
def test_an_object_is_a_state_like_any_other(grafted: Path, tmp_path: Path, to: str) -> None:
    options: dict[str, Any] = {"dp": 2, "stage": 0, "dtype": "fp32"} if to == "deepspeed" else {}
    with pytest.raises(UnsupportedState) as refused:
        zckpt.convert(grafted, tmp_path / "run", to=to, **options)
    assert "the optimizer's graft of trunk.weight" in refused.value.message
    assert f"--allow-object {GRAFT}" in str(refused.value.hint)
    zckpt.convert(grafted, tmp_path / "run", to=to, allow_object=[GRAFT], **options)
    assert zckpt.verify(grafted, tmp_path / "run")["lacking"] == []
    zckpt.convert(grafted, tmp_path / "without", to=to, drop_state=["graft"], **options)
    (line,) = zckpt.verify(grafted, tmp_path / "without")["lacking"]
    assert (line["state"], line["only"], line["parameters"]) == ("graft", "a", 4)


def test_the_universal_format_keeps_an_object(grafted: Path, tmp_path: Path) -> None:
    zckpt.convert(grafted, tmp_path / "universal")
    assert zckpt.verify(grafted, tmp_path / "universal")["equal"]
    zckpt.convert(tmp_path / "universal", tmp_path / "back", to="gathered", allow_object=[GRAFT])
    state = torch.load(tmp_path / "back" / "optim.pt", weights_only=False)["state"]
    for own in state.values():
        assert torch.equal(own["graft"].momentum, torch.zeros(2))


# -- what an optimizer computes afresh


def adafactor(folder: Path, hyper: str = "scale_parameter") -> Path:
    """A state of one number that differs between the parameters of a group."""
    save(folder, "gathered", lambda name: {"RMS": float(len(name))})
    optim = torch.load(folder / "optim.pt")
    for group in optim["param_groups"]:
        group[hyper] = True
    torch.save(optim, folder / "optim.pt")
    return folder


def test_what_is_computed_afresh_is_named(tmp_path: Path, zckpt: Zckpt) -> None:
    source = adafactor(tmp_path / "source")
    ended = zckpt("convert", source, tmp_path / "run", "--to", "deepspeed", "--dp", 2)
    assert ended.code == 0
    assert ended.out.startswith(
        "not written: RMS of 4 parameters (the optimizer computes it afresh)\n"
    )
    ended = zckpt("verify", tmp_path / "run", "--against", source)
    assert ended.code == 0
    assert "note: RMS of 4 parameters: only in " in ended.out
    assert "the optimizer computes it afresh" in ended.out


def test_another_optimizers_rms_is_a_state(tmp_path: Path) -> None:
    source = adafactor(tmp_path / "source", hyper="own")
    with pytest.raises(UnsupportedState):
        zckpt.convert(source, tmp_path / "run", to="deepspeed", dp=2)


@pytest.mark.parametrize("hyper", ["scale_parameter", "own"])
def test_moments_of_vectors_are_none_of_matrices(tmp_path: Path, hyper: str) -> None:
    """In flat buffers Adafactor keeps whole second moments, elsewhere rows and columns."""
    source = adafactor(tmp_path / "source", hyper)
    zckpt.convert(source, tmp_path / "run", to="deepspeed", dp=2, drop_state=["RMS"])
    zckpt.convert(tmp_path / "run", tmp_path / "universal")
    zckpt.reshard(tmp_path / "universal", tmp_path / "dp3", dp=3)
    for origin in ("run", "universal"):
        for options in ({"to": "dcp"}, {"to": "deepspeed", "stage": 0, "dtype": "fp32"}):
            target = tmp_path / f"{origin}-{options['to']}"
            if hyper == "own":
                zckpt.convert(tmp_path / origin, target, **options)  # type: ignore[arg-type]
                continue
            with pytest.raises(UnsupportedState) as refused:
                zckpt.convert(tmp_path / origin, target, **options)  # type: ignore[arg-type]
            assert "exp_avg_sq of trunk.weight, head.weight (" in refused.value.message
            assert "rows and columns" in refused.value.message


# -- what only one of two sides has


def test_a_state_that_one_side_lacks(soap: Path, plain: Path, zckpt: Zckpt) -> None:
    for a, b in ((soap, plain), (plain, soap)):
        ended = zckpt("verify", a, "--against", b)
        assert ended.code == 3
        first, *lines = ended.out.splitlines()
        assert "the 12 tensors that both have are equal; 14 are in " in first
        assert f"in {soap} alone" in first
        assert f"GG, Q and scales of 4 parameters: only in {soap}" in lines
        report = zckpt("verify", a, "--against", b, "--json").document
        assert report["equal"] is False
        assert {line["only"] for line in report["lacking"]} == {"a" if a == soap else "b"}
        assert zckpt("diff", a, b).code == 3


def test_the_user_says_what_is_not_compared(soap: Path, plain: Path, zckpt: Zckpt) -> None:
    drop = ["--drop-state", "GG", "--drop-state", "Q", "--drop-state", "scales"]
    for words in (["--weights-only"], drop, ["--tensors", "*.weight/*"]):
        ended = zckpt("verify", soap, "--against", plain, *words)
        assert ended.code == 0, ended.out
        flags = " ".join(words).replace("*.weight/*", "'*.weight/*'")
        assert f"equals {plain} ({flags}): " in ended.out.splitlines()[0]
        if words[0] != "--tensors":
            ended = zckpt("diff", soap, plain, *words)
            assert ended.code == 0
            assert f"({flags})" in ended.out
    ended = zckpt("verify", soap, "--against", plain, *drop[2:])
    assert ended.code == 3
    assert "GG of 4 parameters: only in" in ended.out


def test_a_step_is_one(plain: Path, tmp_path: Path) -> None:
    optim = torch.load(plain / "optim.pt")
    for state in optim["state"].values():
        del state["step"]
    other = save(tmp_path / "other", "gathered", lambda _: {})
    torch.save(optim, other / "optim.pt")
    (line,) = zckpt.verify(plain, other)["lacking"]
    assert (line["state"], line["only"], line["tensors"]) == ("step", "a", 0)
    assert zckpt.verify(plain, other, weights_only=True)["equal"]


def test_gathering_finds_it_too(soap: Path, plain: Path, zckpt: Zckpt) -> None:
    gather = ["--gather", "--device", "cpu", "--single"]
    assert zckpt("verify", soap, "--against", plain, *gather).code == 3
    assert zckpt("verify", plain, "--against", soap, *gather).code == 3
    assert zckpt("verify", soap, "--against", soap, *gather).code == 0
    ended = zckpt("verify", soap, "--against", plain, *gather, "--weights-only")
    assert ended.code == 0, ended.out


def test_a_proof_lists_states(soap: Path, plain: Path, tmp_path: Path, zckpt: Zckpt) -> None:
    file = tmp_path / "proof.json"
    zckpt("verify", soap, "--save-proof", file)
    assert zckpt("verify", soap, "--against", file).code == 0
    ended = zckpt("verify", plain, "--against", file)
    assert ended.code == 3
    assert f"GG, Q and scales of 4 parameters: only in {file}" in ended.out
    report = json.loads(file.read_text())
    del report["held"]["states"]  # as older versions wrote it
    file.write_text(json.dumps(report))
    assert zckpt("verify", soap, "--against", file).code == 0


def test_inspect_names_them(soap: Path, zckpt: Zckpt) -> None:
    report = zckpt("inspect", soap, "--json").document
    assert [line["state"] for line in report["states"]] == ["GG", "Q", "scales"]
    assert "states GG, Q and scales of 4 parameters: of other shapes" in zckpt("inspect", soap).out


# -- the engine


def case_of(optimizer: str, stage: int) -> Case:
    name = f"z{stage}_dp2_{optimizer}"
    # its own list has no frozen parameters, and states are of fp32 in every stage
    return Case(name, optimizer, stage, 2, "fp32", f"{optimizer} of trained", config=UNCLIPPED)


@pytest.mark.engines
class TestEngine:
    """Its next losses show whether a state is lost: each scales the updates."""

    @pytest.mark.parametrize(
        "stage",
        [pytest.param(2, marks=pytest.mark.first), 1, pytest.param(3, marks=pytest.mark.first)],
    )
    @pytest.mark.parametrize("through", [False, True])
    def test_partitions_at_the_same_size(
        self, stage: int, through: bool, trained: Trained, tmp_path: Path
    ) -> None:
        case = case_of("matrices", stage)
        root = trained(case)
        oracle = torch.load(root / "oracle.pt", weights_only=False)
        source = root / "run"
        if through:
            zckpt.convert(source, tmp_path / "universal")
            assert zckpt.verify(source, tmp_path / "universal")["equal"]
            source = tmp_path / "universal"
        zckpt.reshard(source, tmp_path / "run", dp=2)
        assert zckpt.verify(root / "run", tmp_path / "run")["equal"]
        after = deepspeed.resume(case, tmp_path / "run", tmp_path)
        assert after["losses"] == oracle["losses"]

    @pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.first), 3])
    def test_partitions_at_another_size(self, stage: int, trained: Trained, tmp_path: Path) -> None:
        root = trained(case_of("matrices", stage))
        others: list[dict[str, Any]] = [{"dp": 3}, {"dp": 2, "stage": 5 - stage}]
        for options in others:
            with pytest.raises(UnsupportedState) as refused:
                zckpt.reshard(root / "run", tmp_path / "run", **options)
            assert "GG and scales of" in refused.value.message
            assert "and number of ranks can load it" in refused.value.message
        with pytest.raises(UnsupportedState):
            zckpt.convert(root / "run", tmp_path / "run", to="dcp")
        keys = ["GG", "scales"]
        zckpt.reshard(root / "run", tmp_path / "run", dp=3, drop_state=keys)
        report = zckpt.verify(root / "run", tmp_path / "run")
        assert not report["equal"]
        assert {line["state"] for line in report["lacking"]} == {*keys}
        assert zckpt.verify(root / "run", tmp_path / "run", drop_state=keys)["equal"]

    @pytest.mark.first
    def test_without_zero(self, trained: Trained, tmp_path: Path) -> None:
        case = case_of("matrices", 0)
        root = trained(case)
        oracle = torch.load(root / "oracle.pt", weights_only=False)
        zckpt.convert(root / "run", tmp_path / "universal")
        for dp in (2, 3):
            zckpt.reshard(tmp_path / "universal", tmp_path / f"dp{dp}", dp=dp)
            after = deepspeed.resume(case, tmp_path / f"dp{dp}", tmp_path / "resumed", dp=dp)
            if dp == 2:
                assert after["losses"] == oracle["losses"]
            assert after["losses"] == pytest.approx(oracle["losses"], abs=1e-5)
        with pytest.raises(UnsupportedState):
            zckpt.reshard(root / "run", tmp_path / "zero", dp=2, stage=2)

    def test_objects_of_partitions(self, trained: Trained, tmp_path: Path) -> None:
        case = case_of("grafted", 2)
        root = trained(case)
        oracle = torch.load(root / "oracle.pt", weights_only=False)
        with pytest.raises(UnsupportedState) as refused:
            zckpt.reshard(root / "run", tmp_path / "run", dp=2)
        assert f"--allow-object {GRAFT}" in str(refused.value.hint)
        with pytest.raises(UnsupportedState, match="and number of ranks can load it"):
            zckpt.reshard(root / "run", tmp_path / "run", dp=3, allow_object=[GRAFT])
        zckpt.reshard(root / "run", tmp_path / "run", dp=2, allow_object=[GRAFT])
        after = deepspeed.resume(case, tmp_path / "run", tmp_path / "resumed")
        assert after["losses"] == oracle["losses"]

    def test_objects_without_zero(self, trained: Trained, tmp_path: Path) -> None:
        case = case_of("grafted", 0)
        root = trained(case)
        oracle = torch.load(root / "oracle.pt", weights_only=False)
        with pytest.raises(UnsupportedState):
            zckpt.reshard(root / "run", tmp_path / "run", dp=2)
        zckpt.reshard(root / "run", tmp_path / "run", dp=2, allow_object=[GRAFT])
        after = deepspeed.resume(case, tmp_path / "run", tmp_path / "resumed")
        assert after["losses"] == oracle["losses"]
