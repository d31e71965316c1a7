"""A universal manifest that was damaged, changed or lost is an error, and never weights alone."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import zckpt
from zckpt.errors import CorruptCheckpoint, IncompleteCheckpoint, UnsupportedCheckpoint

from ...conftest import texts
from ...manifests import changed

Document = dict[str, Any]
NAME = "fc1.weight"


@pytest.fixture
def universal(example: Path, tmp_path: Path) -> Path:
    zckpt.convert(example, tmp_path / "universal")
    return tmp_path / "universal"


def read(universal: Path) -> Document:
    document: Document = json.loads((universal / "manifest.json").read_text())
    return document


def test_the_checksum_is_that_of_the_specification(universal: Path) -> None:
    document = read(universal)
    stated = document.pop("crc32")
    text = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    assert stated == f"{zlib.crc32(text.encode('utf-8')):08x}"


def test_every_flipped_bit_of_a_manifest_is_an_error(universal: Path) -> None:
    """Every 101st, which meets each of the eight bits of bytes."""
    assert not zckpt.read(universal).notices.warnings
    path = universal / "manifest.json"
    text = path.read_bytes()
    before = read(universal)
    silent = []
    for bit in range(0, len(text) * 8, 101):
        flipped = bytearray(text)
        flipped[bit // 8] ^= 1 << bit % 8
        path.write_bytes(flipped)
        try:
            manifest = zckpt.read(universal)
        except (CorruptCheckpoint, UnsupportedCheckpoint):  # the latter for another version
            continue
        if manifest.notices.warnings:  # the key `crc32` has another name
            continue
        if json.loads(flipped.decode("utf-8", "surrogatepass")) != before:  # spaces mean nothing
            silent.append(bit)
    assert silent == []


def test_a_flipped_key_is_not_weights_alone(universal: Path) -> None:
    path = universal / "manifest.json"
    path.write_text(path.read_text().replace('"zckpt"', '"zckpu"', 1))
    with pytest.raises(CorruptCheckpoint, match="malformed"):
        zckpt.read(universal)


def test_a_lost_manifest_is_not_weights_alone(universal: Path) -> None:
    (universal / "manifest.json").unlink()
    with pytest.raises(IncompleteCheckpoint, match=r"lacks manifest\.json"):
        zckpt.read(universal)


def test_a_changed_learning_rate_is_found_by_verify(universal: Path) -> None:
    path = universal / "manifest.json"
    changed = path.read_text().replace('"lr": 0.003', '"lr": 0.007')
    assert changed != path.read_text()
    path.write_text(changed)
    report = zckpt.verify(universal)
    assert not report["equal"]
    assert "CRC-32" in report["problems"][0]["message"]


def test_a_manifest_without_a_checksum_is_read_with_a_warning(universal: Path) -> None:
    document = read(universal)
    del document["crc32"]
    (universal / "manifest.json").write_text(json.dumps(document))
    manifest = zckpt.read(universal)
    assert any("no checksum" in warning for warning in texts(manifest.notices.warnings))
    assert zckpt.verify(universal)["equal"]


def lost_parameter(document: Document) -> None:
    del document["parameters"][NAME]


def other_shape(document: Document) -> None:
    document["parameters"][NAME]["shape"] = [1]


def lost_weights(document: Document) -> None:
    for slot in ("param", "master"):
        document["entries"].pop(f"{NAME}/{slot}", None)


def parameter_and_buffer(document: Document) -> None:
    document["buffers"].append(NAME)


def alias_of_two(document: Document) -> None:
    document["parameters"][NAME]["aliases"] = ["fc2.weight"]


def frozen_with_states(document: Document) -> None:
    document["parameters"][NAME] |= {"trainable": False, "group": None}


def step_is_text(document: Document) -> None:
    document["parameters"][NAME]["step"] = "7"


def other_step(document: Document) -> None:
    document["step"] = 9


def no_step(document: Document) -> None:
    document["step"] = None


def other_step_of_a_parameter(document: Document) -> None:
    document["parameters"][NAME]["step"] = 9


def no_group(document: Document) -> None:
    document["parameters"][NAME]["group"] = None


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lost_parameter, "no parameter or buffer: fc1.weight"),
        (other_shape, "a different shape than their parameters: fc1.weight"),
        (lost_weights, "it lacks the weights of: fc1.weight"),
        (parameter_and_buffer, "a parameter and a buffer have the same name: fc1.weight"),
        (alias_of_two, "belong to several weights: fc2.weight"),
        (frozen_with_states, "frozen parameters have optimizer states: fc1.weight"),
        (step_is_text, "steps are not numbers"),
        (other_step, "its step is 9, but the steps of its parameters are 7"),
        (no_step, "its step is None, but the steps of its parameters are 7"),
        (other_step_of_a_parameter, "its step is 7, but the steps of its parameters are 7, 9"),
        (no_group, "in no group: fc1.weight"),
    ],
)
def test_parts_that_contradict_each_other(
    universal: Path, change: Callable[[Document], None], sentence: str
) -> None:
    with changed(universal):
        pass
    zckpt.read(universal)  # the checksum alone changes nothing
    with changed(universal) as document:
        change(document)
    with pytest.raises(CorruptCheckpoint, match=sentence):
        zckpt.read(universal)
