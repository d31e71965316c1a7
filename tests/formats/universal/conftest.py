"""A universal checkpoint for the tests of its format, and its manifest.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import zckpt

from ...conftest import EXAMPLE


@pytest.fixture
def universal(tmp_path: Path) -> Path:
    zckpt.convert(EXAMPLE, tmp_path / "universal")
    return tmp_path / "universal"


def manifest_of(path: Path) -> Any:
    return json.loads((path / "manifest.json").read_text())
