"""Runs of several model ranks or with experts, which are trained once per session."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from ...conftest import Once
from ...engines import experts, grids

Trained = Callable[[str], Path]


@pytest.fixture(scope="session")
def grid_trained(once: Once) -> Trained:
    """Trains a case of grids.py: a folder with run/ and oracle.pt."""
    return lambda name: once("grid", name, partial(grids.train, grids.CASES[name])).parent


@pytest.fixture(scope="session")
def trained_experts(once: Once) -> Trained:
    """Trains a case of experts.py: a folder with run/ and oracle.pt."""
    cases = {**experts.CASES, **experts.WITHOUT_ZERO}
    return lambda name: once("experts", name, partial(experts.train, cases[name])).parent
