"""More layouts of Megatron-Core, an older and a newer release, run by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt as package

from ...engines import megatron
from .test_engines import Resumed, assert_resumed, compare, resume

pytestmark = pytest.mark.matrix


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("megatron")
    megatron.train(megatron.MATRIX, root)
    return root


@pytest.mark.parametrize("name", [case["name"] for case in megatron.MATRIX])
def test_state_is_the_optimizers(
    runs: Path, tmp_path: Path, zckpt: Callable[..., Any], name: str
) -> None:
    compare(runs, tmp_path, zckpt, name)


@pytest.fixture(scope="module")
def loaded(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return resume(megatron.LEGACY_RESUMED, runs, tmp_path_factory.mktemp("resumed"))


@pytest.mark.parametrize("resumed", megatron.LEGACY_RESUMED, ids=megatron.name_of)
def test_runs_resume_from_folders_of_ranks(runs: Path, loaded: Path, resumed: Resumed) -> None:
    assert_resumed(runs / resumed[0], loaded, resumed)


@pytest.fixture(scope="module")
def old_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("megatron-old")
    megatron.train(megatron.OLD, root, megatron.OLD_VERSION)
    return root


@pytest.mark.parametrize("name", [case["name"] for case in megatron.OLD])
def test_state_of_0_13_is_the_optimizers(
    old_runs: Path, tmp_path: Path, zckpt: Callable[..., Any], name: str
) -> None:
    compare(old_runs, tmp_path, zckpt, name)


@pytest.fixture(scope="module")
def new_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("megatron-new")
    megatron.train(megatron.NEW, root, megatron.NEW_VERSION)
    return root


@pytest.mark.parametrize("name", [case["name"] for case in megatron.NEW])
def test_state_of_0_19_is_the_optimizers(
    new_runs: Path, tmp_path: Path, zckpt: Callable[..., Any], name: str
) -> None:
    compare(new_runs, tmp_path, zckpt, name)


@pytest.fixture(scope="module")
def every_run(
    runs: Path, old_runs: Path, new_runs: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A folder with the runs of all releases."""
    root, cases = tmp_path_factory.mktemp("megatron-all"), []
    for folder in (runs, old_runs, new_runs):
        listed = json.loads((folder / "cases.json").read_text())
        for case in listed:
            (root / case["name"]).symlink_to(folder / case["name"])
        cases += listed
    (root / "cases.json").write_text(json.dumps(cases))
    return root


@pytest.fixture(scope="module")
def between(every_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return resume(megatron.BETWEEN_RELEASES, every_run, tmp_path_factory.mktemp("resumed"))


@pytest.mark.parametrize("resumed", megatron.BETWEEN_RELEASES, ids=megatron.name_of)
def test_runs_of_other_releases_resume(every_run: Path, between: Path, resumed: Resumed) -> None:
    """Also those of 0.13.1, whose own directories this release does not load."""
    assert_resumed(every_run / resumed[0], between, resumed)


@pytest.fixture(scope="module")
def by_new(every_run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("resumed")
    return resume(megatron.LOADED_BY_NEW, every_run, root, megatron.NEW_VERSION)


def test_groups_of_another_rate(every_run: Path, tmp_path: Path) -> None:
    """0.19 finds groups by their rates too: it needs those of the run."""
    run = {"world": 1, "optimizer": {"lr": 0.02, "min_lr": 0.001}}
    resumed: Resumed = ("new_dp3", {}, run)
    for name, given in (("plain", {}), ("given", {"max_lr": 0.02, "min_lr": 0.001})):
        target = tmp_path / name
        package.reshard(every_run / "new_dp3", target, group_defaults=given)
        (tmp_path / f"{name}-loaded").mkdir()
        case = {**megatron.loading(resumed, target), "name": name}
        if not given:
            with pytest.raises(AssertionError, match="KeyError"):
                megatron.train([case], tmp_path / f"{name}-loaded", megatron.NEW_VERSION)
            continue
        megatron.train([case], tmp_path / f"{name}-loaded", megatron.NEW_VERSION)
        before, _ = megatron.expected(every_run / "new_dp3")
        after, _ = megatron.expected(tmp_path / f"{name}-loaded" / name)
        assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("resumed", megatron.LOADED_BY_NEW, ids=megatron.name_of)
def test_runs_resume_in_0_19(every_run: Path, by_new: Path, resumed: Resumed) -> None:
    assert_resumed(every_run / resumed[0], by_new, resumed)
