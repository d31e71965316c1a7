"""More layouts of Megatron-Core, and an older release, run by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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
