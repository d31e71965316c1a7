"""The pictures of the pages show what zckpt does today."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from .conftest import ROOT

FOLDER = ROOT / "docs" / "pictures"


@pytest.fixture(scope="module")
def pictures() -> Any:
    """The script that draws them."""
    spec = importlib.util.spec_from_file_location("pictures", ROOT / "docs" / "pictures.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_pictures_are_drawn_from_today_s_code(pictures: Any) -> None:
    assert sorted(pictures.PICTURES) == sorted(path.stem for path in FOLDER.glob("*.svg"))
    for name, draw in pictures.PICTURES.items():
        drawn, kept = draw(), (FOLDER / f"{name}.svg").read_text()
        assert drawn == kept, f"{name}.svg is of another version: python docs/pictures.py"


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.svg")), ids=lambda path: path.stem)
def test_a_picture_needs_nothing_else(path: Path) -> None:
    root = ElementTree.fromstring(path.read_text())
    assert root.tag.endswith("svg")
    assert {*re.findall(r"https?://[^\"')\s]*", path.read_text())} <= {
        "http://www.w3.org/2000/svg",
        "https://www.textualize.io",  # in the comment of the library that wrote it
    }
