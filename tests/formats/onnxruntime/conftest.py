"""Fixtures of the tests of ONNX Runtime's files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def refused(zckpt: Callable[..., Any], tmp_path: Path) -> Callable[..., None]:
    """Checks that a conversion is refused with exit code 1, an error and words in it."""

    def check(kind: str, *words: str, path: Path | None = None) -> None:
        source = path or tmp_path / "source"
        ended = zckpt("convert", source, tmp_path / "target", "--json")
        assert ended.code == 1
        assert ended.document["error"] == kind, ended.document
        for word in words:
            assert word in ended.document["message"] + ended.document["hint"]
        assert not (tmp_path / "target").exists()
        assert not (tmp_path / "target.partial").exists()

    return check
