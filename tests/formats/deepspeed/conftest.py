"""Runs of several model ranks, which are trained once per session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ...engines import grids

Trained = Callable[[str], Path]


@pytest.fixture(scope="session")
def grid_trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Trains a case of grids.py, once per session: a folder with run/ and oracle.pt."""
    made: dict[str, Path] = {}

    def train(name: str) -> Path:
        if name not in made:
            root = tmp_path_factory.mktemp("grid") / name
            grids.train(grids.CASES[name], root)
            made[name] = root
        return made[name]

    return train
