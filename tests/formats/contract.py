"""What every format's reader promises; a format's test class inherits these tests."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import zckpt
from zckpt.core.checkpoint.dtypes import SIZES
from zckpt.core.checkpoint.inert import Foreign, from_json, to_json
from zckpt.core.checkpoint.manifest import Manifest


def assert_same(value: Any, expected: Any, where: str) -> None:
    """Two states are equal in values, types and order; NaN equals NaN, and -0.0 is not 0.0."""
    assert type(value) is type(expected), where
    if isinstance(expected, Foreign):
        for name in Foreign.__match_args__:
            assert_same(getattr(value, name), getattr(expected, name), f"{where}.{name}")
    elif isinstance(expected, dict):
        assert_same([*value.items()], [*expected.items()], where)
    elif isinstance(expected, (list, tuple)):
        assert len(value) == len(expected), where
        for place, (item, expected_item) in enumerate(zip(value, expected, strict=True)):
            assert_same(item, expected_item, f"{where}[{place}]")
    elif isinstance(expected, float):
        assert repr(value) == repr(expected), where
    else:
        assert value == expected, where


class FormatContract:
    """Subclasses give the fixture `checkpoint`, a path, and the name of its `format`."""

    format: str

    @pytest.fixture
    def checkpoint(self, tmp_path: Path) -> Path:
        raise NotImplementedError

    @pytest.fixture
    def manifest(self, checkpoint: Path) -> Manifest:
        return zckpt.read(checkpoint)

    def test_is_recognized_by_content(self, manifest: Manifest) -> None:
        assert manifest.format == self.format

    def test_every_element_is_covered_once(self, manifest: Manifest) -> None:
        assert manifest.entries
        for entry in manifest.entries.values():
            seen = bytearray(entry.numel)
            for fragment in entry.fragments:
                length = fragment.stop - fragment.start
                assert fragment.extent.length == length * fragment.count * SIZES[entry.dtype]
                for run in range(fragment.count):
                    start = fragment.start + run * fragment.stride
                    for place in range(start, start + length):
                        seen[place] += 1
            assert set(seen) <= {1}, entry.name

    def test_extents_lie_inside_files_of_the_checkpoint(self, manifest: Manifest) -> None:
        sizes = {file: os.path.getsize(file) for file in manifest.files.paths}
        for entry in manifest.entries.values():
            for fragment in entry.fragments:
                extent = fragment.extent
                assert 0 <= extent.offset <= extent.offset + extent.length <= sizes[extent.file]

    def test_parameters_and_entries_agree(self, manifest: Manifest) -> None:
        for name, parameter in manifest.parameters.items():
            slots = [e.slot for e in manifest.entries.values() if e.parameter == name]
            assert slots, name
            for slot in slots:
                assert manifest.entries[name, slot].shape == parameter.shape
            in_group = parameter.group is not None
            assert in_group == (parameter.trainable and manifest.groups is not None)

    def test_state_survives_json(self, manifest: Manifest) -> None:
        text = json.dumps(to_json(manifest.state), allow_nan=False)
        assert_same(from_json(json.loads(text)), manifest.state, "state")

    def test_reading_twice_gives_the_same(self, checkpoint: Path, manifest: Manifest) -> None:
        again = zckpt.read(checkpoint)
        assert list(again.entries) == list(manifest.entries)
        for name, entry in manifest.entries.items():
            assert list(again.entries[name].fragments) == list(entry.fragments)

    def test_inspect_needs_neither_torch_nor_numpy(
        self, checkpoint: Path, zckpt_without: Callable[..., Any]
    ) -> None:
        hidden = ("torch", "deepspeed", "numpy", "safetensors")
        ended = zckpt_without(hidden, "inspect", checkpoint)
        assert (ended.code, said_beside_frozen(ended.err)) == (0, [])
        assert self.format in ended.out

    def test_convert_needs_no_torch(
        self, checkpoint: Path, tmp_path: Path, zckpt_without: Callable[..., Any]
    ) -> None:
        hidden = ("torch", "deepspeed", "safetensors")
        ended = zckpt_without(hidden, "convert", checkpoint, tmp_path / "converted")
        assert (ended.code, said_beside_frozen(ended.err)) == (0, [])


def said_beside_frozen(err: str) -> list[str]:
    """The lines of stderr, without the one that names weights which no optimizer lists."""
    return [line for line in err.splitlines() if "Warning: the optimizer lists " not in line]
