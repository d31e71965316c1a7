"""More layouts of Megatron-Core, and an older release, run by hand."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ...engines import megatron
from .test_engines import compare

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
def old_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("megatron-old")
    megatron.train(megatron.OLD, root, megatron.OLD_VERSION)
    return root


@pytest.mark.parametrize("name", [case["name"] for case in megatron.OLD])
def test_state_of_0_13_is_the_optimizers(
    old_runs: Path, tmp_path: Path, zckpt: Callable[..., Any], name: str
) -> None:
    compare(old_runs, tmp_path, zckpt, name)
