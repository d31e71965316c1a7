"""Documents of small checkpoints."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import zckpt

Document = dict[str, Any]


@pytest.fixture
def document() -> Callable[..., Document]:
    """The document of a path, which must be strict JSON."""

    def made(path: Path, **words: Any) -> Document:
        return dict(json.loads(json.dumps(zckpt.report(path, **words), allow_nan=False)))

    return made


def faults_of(document: Document, kind: str) -> list[Document]:
    return [line for line in document["faults"] if line["kind"] == kind]
