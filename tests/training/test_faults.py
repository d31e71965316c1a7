"""The table of known faults: the page is made from it, and code asks for every row."""

from __future__ import annotations

import ast
from itertools import groupby
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import HuggingFaceStorageWriter

import zckpt
from zckpt.training import faults
from zckpt.training.faults import FAULTS, Fault

from .. import fault_page
from ..conftest import ROOT, texts

BY_CONSTANT = {name: item for name, item in vars(faults).items() if isinstance(item, Fault)}


def test_the_page_is_the_table() -> None:
    assert (ROOT / "docs" / "faults.md").read_text() == fault_page.page(), (
        "run `python -m tests.fault_page > docs/faults.md`"
    )


def test_every_fault_is_listed_once() -> None:
    assert sorted(item.name for item in BY_CONSTANT.values()) == sorted(f.name for f in FAULTS)
    programs = [program for program, _ in groupby(FAULTS, key=lambda fault: fault.program)]
    assert len(programs) == len(set(programs)), "faults of one program stand together"


def test_code_that_sees_the_sign_asks_for_the_fault() -> None:
    texts = [path.read_text() for path in (ROOT / "zckpt").rglob("*.py") if path.stem != "faults"]
    nodes = (
        node for text in texts if "faults import" in text for node in ast.walk(ast.parse(text))
    )
    asked = {
        node.value.id
        for node in nodes
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.attr == "message"
    }
    assert BY_CONSTANT.keys() <= asked


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_row_says_everything(fault: Fault) -> None:
    for text in (fault.versions, fault.wrong, fault.sign, fault.source, fault.action):
        assert text.strip()
    assert fault.wrong.endswith(".")
    assert fault.action.endswith(".")


def test_scalars_that_torch_has_consolidated(tmp_path: Path) -> None:
    """torch 2.13 loses them; a program that saves such a weight itself gets no warning."""
    folder = tmp_path / "run"
    state = {"a.weight": torch.ones(2, 3), "temperature": torch.tensor(2.5)}
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True, enable_consolidation=True)
    dcp.save(state, storage_writer=writer, no_dist=True)
    (line,) = texts(zckpt.read(folder).notices.warnings)
    assert line.startswith("temperature is 0: torch 2.13")
    save_file(state, tmp_path / "other.safetensors")
    assert zckpt.read(tmp_path / "other.safetensors").notices.warnings == ()
