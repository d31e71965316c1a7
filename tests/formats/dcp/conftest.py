"""A checkpoint that real FSDP2 saved."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from .torch_dcp import DATA


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DATA, tmp_path / "run"))
