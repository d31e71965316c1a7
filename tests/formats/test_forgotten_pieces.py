"""A reader that forgets one rank's piece: no door hands out the hole, and no target has it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from pathlib import Path

import pytest
from msgspec.structs import replace

import zckpt
import zckpt.dcp
from zckpt import errors, formats
from zckpt.core.checkpoint.manifest import Manifest
from zckpt.core.storage.fragments import Boxes, Fragments, Runs, boxes_of
from zckpt.formats.reading import USUAL, Reading

from ..conftest import EXAMPLE, ROOT

DATA = ROOT / "tests" / "data"
SOURCES = {
    "deepspeed": EXAMPLE,
    "dcp": DATA / "fsdp2-2.13.0-tiny",
    "megatron": DATA / "megatron-0.16.1-tp2",
    "universal": DATA / "universal" / "06-0.1.0" / "run",
}
OTHERS = {"megatron", "universal"}  # needs a run of it; its shells are read by another function
TARGETS = [item.name for item in formats.FORMATS if item.writes and item.name not in OTHERS]


def without_a_piece(fragments: Fragments) -> Fragments:
    boxes = boxes_of(fragments)
    return Boxes(boxes[:-1]) if boxes else Runs([*fragments][:-1])


def forgetful(manifest: Manifest) -> Manifest:
    """The manifest without the last piece of its largest tensor that is no state."""
    entries = (entry for entry in manifest.entries.values() if entry.slot != "state")
    largest = max(entries, key=lambda entry: entry.numel)
    hole = replace(largest, fragments=without_a_piece(largest.fragments))
    return replace(manifest, entries={**manifest.entries, hole.key: hole})


def forget_in(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """From here on, the reader of a format forgets a piece."""
    module = import_module(f"zckpt.formats.{name.replace('-', '_')}.functions")
    functions = module.FUNCTIONS

    def read(path: str, reading: Reading = USUAL) -> Manifest:
        return forgetful(functions.read(path, reading))

    monkeypatch.setattr(module, "FUNCTIONS", replace(functions, read=read))


@pytest.fixture
def source_of(tmp_path: Path) -> Callable[[str], Path]:
    """A checkpoint of a format: one of the repository, or one that is converted."""

    def source(name: str) -> Path:
        if name in SOURCES:
            return SOURCES[name]
        zckpt.convert(EXAMPLE, tmp_path / "source", to=name, **options_for(name))
        return tmp_path / "source"

    return source


def options_for(name: str) -> dict[str, int]:
    return {"dp": 2} if name in ("deepspeed", "onnxruntime") else {}


@pytest.mark.parametrize("name", [item.name for item in formats.FORMATS if item.reads])
def test_no_door_takes_it(
    name: str,
    source_of: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, target = source_of(name), tmp_path / "target"
    tensor = next(iter(zckpt.read(source).entries))
    forget_in(monkeypatch, name)

    def load_in_torch() -> None:
        reader = zckpt.dcp.StorageReader(source)
        reader.prepare_global_plan([])

    doors: list[Callable[[], object]] = [
        lambda: zckpt.read(source),
        lambda: zckpt.convert(source, target),
        lambda: zckpt.verify(source),
        lambda: zckpt.verify(EXAMPLE, source),
        lambda: zckpt.load(source, tensor),
        lambda: zckpt.stats(source),
    ]
    if name != "dcp":  # whose items torch's planner asks for, and no manifest
        doors.append(load_in_torch)
    for door in doors:
        with pytest.raises(errors.UnsupportedCheckpoint, match=f"{name} reader finds elements"):
            door()
    assert not [*tmp_path.glob("target*")]


@pytest.mark.parametrize("name", TARGETS)
def test_no_target_has_it(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The target's reader says where the tensors go: what it forgets would stay empty."""
    source = SOURCES["universal"]
    forget_in(monkeypatch, name)
    target = tmp_path / "target"
    command: Callable[..., object] = partial(zckpt.convert, to=name, **options_for(name))
    if name == "hf":
        (tmp_path / "config.json").write_text('{"model_type": "a model"}')
        command = partial(zckpt.export, config=tmp_path / "config.json")
    with pytest.raises(errors.UnsupportedCheckpoint, match=f"{name} reader finds elements"):
        command(source, target)
    assert not [*tmp_path.glob("target*")]
