"""The runner with its shim, and the smallest checkpoint of each format, once per session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from . import tiny
from .runner import Runner, compile_shim


@pytest.fixture(scope="session")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    runner = Runner(compile_shim(tmp_path_factory.mktemp("shim")))
    yield runner
    runner.close()


@pytest.fixture(scope="session")
def smallest(tmp_path_factory: pytest.TempPathFactory, runner: Runner) -> Callable[[str], Path]:
    """The checkpoint of a kind that `tiny.TARGETS` names, or "run"; tests do not change it."""
    root = tmp_path_factory.mktemp("tiny")

    def convert(source: Path, target: Path, *options: str) -> None:
        ended = runner.run("convert", source, target, *options)
        assert ended.code == 0, ended.err

    def create(kind: str) -> Path:
        path = root / kind
        if kind == "run" and not path.exists():
            return tiny.gathered(root)
        return path if path.exists() else tiny.create(root, kind, convert)

    return create
