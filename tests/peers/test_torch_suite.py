"""torch's own tests, where a source tree of torch is at hand.

    ZCKPT_TORCH_TREE=/path/of/pytorch pytest tests/peers

They take half an hour on two cores; see torch_suite.py.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from . import torch_suite

TREE = os.environ.get("ZCKPT_TORCH_TREE")


@pytest.mark.skipif(TREE is None, reason="ZCKPT_TORCH_TREE names no source tree of torch")
@pytest.mark.parametrize("without_gpus", [False, True])
def test_every_test_that_torch_passes_is_passed(without_gpus: bool) -> None:
    comparison = torch_suite.compare(Path(str(TREE)), without_gpus=without_gpus)
    report = "\n".join(comparison.lines())
    print(report)
    assert not comparison.unjustified, report
    assert comparison.zckpt.loads, "no test has loaded with zckpt's reader"


SUITE = """
import torch, unittest
import torch.distributed.checkpoint as dcp
class Test(unittest.TestCase):
    def setUp(self):
        dcp.save({"a": torch.ones(2)}, checkpoint_id="run", no_dist=True)
    def test_loads(self):
        state = {"a": torch.zeros(2)}
        dcp.load(state, checkpoint_id="run", no_dist=True)
        assert state["a"].all()
    def test_of_torch_s_class(self):
        assert "FileSystemReader" in repr(dcp.FileSystemReader("run"))
    def test_fails(self):
        raise AssertionError
    @unittest.skip("")
    def test_is_skipped(self):
        pass
"""


@pytest.mark.engines
def test_a_test_that_only_torch_passes_is_listed(tmp_path: Path) -> None:
    folder = tmp_path / torch_suite.FOLDER
    folder.mkdir(parents=True)
    (folder / "test_some.py").write_text(SUITE)
    comparison = torch_suite.compare(tmp_path)
    assert comparison.of("passed", "passed") == ["test_some.py::Test.test_loads"]
    assert comparison.lost == ["test_some.py::Test.test_of_torch_s_class"]
    assert comparison.of("failed", "failed") == ["test_some.py::Test.test_fails"]
    assert comparison.of("skipped", "skipped") == ["test_some.py::Test.test_is_skipped"]
    assert comparison.zckpt.loads == 1
    assert comparison.torch.loads == 0
