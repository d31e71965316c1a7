"""Weights that no optimizer lists: frozen ones, and those whose states another rank had."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

import zckpt as package
from zckpt.errors import IncompleteCheckpoint, ZckptError

from ..conftest import Once, Result, texts
from ..engines import slices

Program = Callable[..., Result]
SAID = "the optimizer lists 2 of 6 weights: the other 4 are taken for frozen"
LOST = "call `consolidate_state_dict()` before saving"


@pytest.fixture(scope="module")
def zero(once: Once) -> Path:
    return once("slices", "zero", partial(slices.saved, "zero", 2))


@pytest.fixture(scope="module")
def ddp(once: Once) -> Path:
    return once("slices", "ddp", partial(slices.saved, "ddp", 2))


@pytest.mark.parametrize("to", ["universal", "dcp", "gathered", "deepspeed", "deepspeed-universal"])
def test_a_share_is_named_for_every_target(to: str, zero: Path, tmp_path: Path) -> None:
    report = package.convert(zero / "share.pt", tmp_path / "new", to=to)
    (line,) = [line for line in texts(report["warnings"]) if line.startswith(SAID)]
    assert line.endswith(LOST)
    again = [
        line
        for line in texts(package.read(tmp_path / "new").notices.warnings)
        if "2 of 6 weights" in line
    ]
    assert again == ([line] if to == "universal" else [])  # others state what is frozen


def test_what_is_complete_says_nothing(zero: Path) -> None:
    assert not any(
        "optimizer lists" in line
        for line in texts(package.read(zero / "whole.pt").notices.warnings)
    )


def test_a_trained_head_stops_nobody(ddp: Path, tmp_path: Path) -> None:
    """Its sizes descend, as a share's do."""
    report = package.convert(ddp / "head.pt", tmp_path / "new", to="deepspeed")
    assert any(line.startswith(SAID) for line in texts(report["warnings"]))
    (line,) = [
        line
        for line in texts(package.read(ddp / "frozen").notices.warnings)
        if line.startswith(SAID)
    ]
    assert "Zero" not in line


class TestGaps:
    """Numbers that the groups lack show a share: a target that trains is refused."""

    @pytest.mark.parametrize("to", ["universal", "dcp", "deepspeed"])
    def test_of_a_target(self, to: str, zero: Path, tmp_path: Path) -> None:
        with pytest.raises(IncompleteCheckpoint, match=r"ZeroRedundancyOptimizer: .* 0, 2, 3"):
            package.convert(zero / "gaps.pt", tmp_path / "new", to=to)
        package.convert(zero / "gaps.pt", tmp_path / "new", weights_only=True)

    def test_a_user_says_that_the_others_are_frozen(self, zero: Path, tmp_path: Path) -> None:
        """FSDP1's rekeyed states have such numbers too (torch 2.13); no shape tells them apart."""
        saved = torch.load(zero / "gaps.pt")
        names = [[*saved["model"]][n] for n in saved["optimizer"]["param_groups"][0]["params"]]
        with pytest.raises(IncompleteCheckpoint) as raised:
            package.convert(zero / "gaps.pt", tmp_path / "new")
        assert "--param-names FILE" in raised.value.hint
        report = package.convert(zero / "gaps.pt", tmp_path / "new", param_names=names)
        assert any(line.startswith(SAID) for line in texts(report["warnings"]))
        listed = package.read(tmp_path / "new").parameters.items()
        assert [name for name, parameter in listed if parameter.trainable] == names
        with pytest.raises(ZckptError, match="lists 6 parameters") as stated:
            package.convert(zero / "gaps.pt", tmp_path / "x", param_names=[*saved["model"]])
        assert LOST in stated.value.hint  # as the program's own ZeroRedundancyOptimizer names them

    def test_of_a_run(self, zero: Path, zckpt: Program) -> None:
        ended = zckpt("check", zero / "gaps.pt")
        assert ended.code == 3
        assert "one rank's share of ZeroRedundancyOptimizer" in ended.out
        assert zckpt("verify", zero / "gaps.pt").code == 3
        with pytest.raises(ZckptError, match="one rank's share of ZeroRedundancyOptimizer"):
            package.auto_resume(zero / "gaps.pt", single=True)


def test_ranks_that_number_their_own_parameters(zero: Path, tmp_path: Path) -> None:
    with pytest.raises(ZckptError, match="list different parameters") as raised:
        package.convert(zero / "ranks", tmp_path / "new")
    assert LOST.replace("`", "") in raised.value.hint
    package.convert(zero / "ranks", tmp_path / "new", weights_only=True)


def test_hints_do_not_go_in_a_circle(tmp_path: Path) -> None:
    """The optimizer of a share in a file with several weights of a shape; and all names of it."""
    weights = {name: torch.randn(3, 3) for name in "badc"}
    state = {n: {"step": torch.tensor(1.0), "exp_avg": torch.ones(3, 3)} for n in range(2)}
    groups = [{"lr": 1.0, "params": [0, 1]}]
    torch.save(
        {"model": weights, "optimizer": {"state": state, "param_groups": groups}}, tmp_path / "x.pt"
    )
    with pytest.raises(ZckptError) as raised:
        package.convert(tmp_path / "x.pt", tmp_path / "new")
    assert LOST in raised.value.hint
    with pytest.raises(ZckptError, match="lists 4 parameters") as raised:
        package.convert(tmp_path / "x.pt", tmp_path / "new", param_names=[*weights])
    assert LOST in raised.value.hint
