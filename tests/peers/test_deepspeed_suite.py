"""DeepSpeed's own tests with zckpt in its place; only where a source tree of DeepSpeed is given."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from .deepspeed_suite import CHOSEN, JUSTIFIED, Suite

TREE = os.environ.get("DEEPSPEED_SOURCE_TREE")
PYTEST = os.environ.get("DEEPSPEED_PYTEST")  # a folder with the pytest that the tree asks for


@pytest.mark.skipif(TREE is None, reason="DEEPSPEED_SOURCE_TREE names no source tree of DeepSpeed")
def test_what_passes_without_zckpt_passes_with_it() -> None:
    suite = Suite(Path(str(TREE)).resolve(), Path(PYTEST) if PYTEST else None)
    comparison = suite.compare(CHOSEN)
    told = "\n".join(comparison.lines())
    assert comparison.that("passed", "passed"), told
    assert [name for name in comparison.lost if name not in JUSTIFIED] == [], told
    assert comparison.wrong == [], told
