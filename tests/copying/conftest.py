"""Open directories of tests: one for each path, closed when the test ends."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from zckpt.core.storage.folder import Folder

OPENED: dict[Path, Folder] = {}


def folder_at(path: Path) -> Folder:
    """A directory that is opened once in a test, however often it is asked for."""
    if path not in OPENED:
        OPENED[path] = Folder.at(str(path))
    return OPENED[path]


@pytest.fixture(autouse=True)
def closed_folders() -> Iterator[None]:
    yield
    while OPENED:
        OPENED.popitem()[1].close()
