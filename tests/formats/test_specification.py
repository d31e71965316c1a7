"""docs/format-v1.md lists every key that a universal manifest has, and every tag of its JSON."""

from __future__ import annotations

import json
import re
from pathlib import Path

import zckpt
from zckpt.core.checkpoint import inert
from zckpt.core.checkpoint.mended import Mended

from ..conftest import EXAMPLE, ROOT

PAGE = (ROOT / "docs" / "format-v1.md").read_text(encoding="utf-8")
OF_SOME_RUNS = {"dialect", "ep", "inside", "root", "sp", "tp", "pp"}
"""Keys that the example, one engine's run of one model rank, does not have."""
OF_MENDED = {"mended"}
"""Keys of a checkpoint in which `zckpt mend` has restored something."""
OF_SOME_TENSORS = {"fragments"}
"""Keys that readers understand and zckpt does not write."""


def keys(heading: str) -> set[str]:
    """The names in the first column of the tables below a heading."""
    section = PAGE.split(f"# {heading}\n")[1].split("\n#")[0]
    cells = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def test_every_key_is_specified(tmp_path: Path) -> None:
    zckpt.convert(EXAMPLE, tmp_path / "universal")
    manifest = json.loads((tmp_path / "universal" / "manifest.json").read_text())
    assert keys("manifest.json") - OF_MENDED == manifest.keys()
    assert keys("source") - OF_SOME_RUNS == manifest["source"].keys()
    for parameter in manifest["parameters"].values():
        assert keys("parameters") == parameter.keys()
    offsets = {"file", "offset", "length", "start", "stop"}
    for entry in manifest["entries"].values():
        assert keys("entries") - OF_SOME_TENSORS - offsets == entry.keys()


def test_every_key_of_a_mended_record_is_specified() -> None:
    (row,) = (line for line in PAGE.splitlines() if line.startswith("| `mended`"))
    assert {*re.findall(r"`(\w+)`", row)} == {"mended", *Mended.__struct_fields__}


def test_every_key_of_a_notice_is_specified(tmp_path: Path) -> None:
    ranks = ROOT / "tests" / "data" / "megatron-0.16.1-legacy-ep2"
    zckpt.convert(ranks, tmp_path / "universal")
    manifest = json.loads((tmp_path / "universal" / "manifest.json").read_text())
    (notice,) = manifest["notices"]["left_out"]
    assert keys("notices") == notice.keys()


def test_every_tag_is_specified() -> None:
    assert keys("Tagged JSON") == {*inert._MAKERS, "$object"}
