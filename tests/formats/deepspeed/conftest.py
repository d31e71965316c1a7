"""Runs of several model ranks or with experts, which are trained once per session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ...engines import experts, grids

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


@pytest.fixture(scope="session")
def trained_experts(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Trains a case of experts.py, once per session: a folder with run/ and oracle.pt."""
    roots: dict[str, Path] = {}
    cases = {**experts.CASES, **experts.WITHOUT_ZERO}

    def trained(name: str) -> Path:
        if name not in roots:
            root = tmp_path_factory.mktemp("experts") / name
            experts.train(cases[name], root)
            roots[name] = root
        return roots[name]

    return trained
