"""Megatron-Core goes on at other sizes, from its own directory or from the one beside it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import zckpt

from ..engines import megatron
from ..formats.megatron.test_engines import assert_resumed
from .conftest import BESIDE, original

pytestmark = pytest.mark.engines
# a run, its next sizes, and whether it has to be written for them
RESUMED = [
    ("dp3", {"world": 2, "tp": 2}, False),
    ("tp2_pp2", {"world": 2}, False),
    ("buckets_dp3", {"world": 2, "bucket": 700}, False),
    ("buckets_tp2_pp2", {"world": 2}, True),
    ("legacy_dp3", {"world": 2, "bucket": 700}, False),
    ("legacy_tp2_pp2", {"world": 2, "pp": 2}, True),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("megatron")
    names = {name for name, *_ in RESUMED}
    megatron.train([case for case in megatron.TRAINED if case["name"] in names], root)
    return root


def test_it_goes_on(runs: Path, tmp_path: Path) -> None:
    loading = []
    for number, (name, sizes, is_written) in enumerate(RESUMED):
        run = Path(shutil.copytree(runs / name, tmp_path / str(number)))
        before = original(run)
        tp, pp = sizes.get("tp", 1), sizes.get("pp", 1)
        path = zckpt.auto_resume(run, dp=sizes["world"] // (tp * pp), tp=tp, pp=pp)
        assert path is not None
        assert (path.step, path.report["written"]) == (3, is_written), name
        assert (run / BESIDE).exists() == is_written
        assert is_written == (path != str(run))
        assert original(run) == before
        loading.append(megatron.loading((name, {}, sizes), Path(path)))
    (tmp_path / "loaded").mkdir()
    megatron.train(loading, tmp_path / "loaded")
    for name, sizes, _ in RESUMED:
        assert_resumed(runs / name, tmp_path / "loaded", (name, {}, sizes))
