"""Files beside two checkpoints: which of them must be equal, and how it is said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zckpt.core.checkpoint.manifest import Files, Manifest, Run, Sibling
from zckpt.core.storage import sources
from zckpt.proof.sibling_files import siblings

from ..conftest import texts


def side(
    root: Path, files: dict[str, bytes], has_run: bool = True, omitted_files: tuple[str, ...] = ()
) -> Manifest:
    root.mkdir()
    items = {}
    for name, data in files.items():
        (root / name).write_bytes(data)
        items[name] = Sibling(name, str(root / name), len(data))
    return Manifest(
        str(root),
        "x",
        Run(),
        {},
        {},
        groups=() if has_run else None,
        files=Files(
            siblings=tuple(item for name, item in items.items() if name not in omitted_files),
            omitted_files=tuple(items[name] for name in omitted_files),
        ),
    )


def test_what_one_side_lacks(tmp_path: Path) -> None:
    """A file from which the other side's program goes on is lost; others are only named."""
    one = {"scheduler.pt": b"1", "x.json": b"1", "scheduler_1.bin": b"2", "both": b"3"}
    a = side(tmp_path / "a", one)
    b = side(tmp_path / "b", {"trainer_state.json": b"{}", "both": b"3"})
    lines, notes = siblings(a, b)
    assert (lines, texts(notes)) == (
        [
            {"key": "scheduler.pt", "only": "a"},
            {"key": "scheduler_1.bin", "only": "a"},
            {"key": "trainer_state.json", "only": "b"},
        ],
        [f"x.json: only beside {a.root}"],
    )


def test_what_a_run_of_another_program_has(tmp_path: Path) -> None:
    a = side(tmp_path / "a", {"scheduler.pt": b"1", "x.json": b"1"})
    b = side(tmp_path / "b", {"other": b"2"})
    lines, notes = siblings(a, b)
    assert (lines, texts(notes)) == (
        [],
        [f"scheduler.pt, x.json: only beside {a.root}", f"other: only beside {b.root}"],
    )


def test_files_that_a_target_does_not_get_are_compared(tmp_path: Path) -> None:
    a = side(tmp_path / "a", {"x": b"12", "y": b"3"}, omitted_files=("x",))
    b = side(tmp_path / "b", {"x": b"1", "y": b"3"})
    assert siblings(a, b) == ([{"key": "x", "a": "2 bytes", "b": "1 bytes"}], [])


@pytest.mark.parametrize("runs", [(True, True), (True, False), (False, True), (False, False)])
def test_of_weights_alone_only_files_with_tensors_are_compared(
    runs: tuple[bool, bool], tmp_path: Path
) -> None:
    files = (
        {"config.json": b"1", "model.safetensors": b"1"},
        {
            "config.json": b"2",
            "model.safetensors": b"2",
        },
    )
    pair = [
        side(tmp_path / name, own, run) for name, own, run in zip("ab", files, runs, strict=True)
    ]
    names = [line["key"] for line in siblings(*pair)[0]]
    assert names == (["config.json", "model.safetensors"] if any(runs) else ["model.safetensors"])


@pytest.mark.parametrize(
    ("data", "equal"),
    [
        ([b"abcdefgh", b"abcdefgh"], True),
        ([b"abcdefgh", b"abcdefgX"], False),
        ([b"Xbcdefgh", b"abcdefgh"], False),
        ([b"abcd", b"abcdefgh"], False),
        ([b"", b""], True),
    ],
)
def test_every_byte_counts(
    data: list[bytes], equal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "BLOCK", 4)
    a, b = (side(tmp_path / name, {"x": own}) for name, own in zip("ab", data, strict=True))
    assert (siblings(a, b) == ([], [])) is equal


def test_a_file_is_equal_to_itself_and_not_read(tmp_path: Path) -> None:
    a = side(tmp_path / "a", {"x": b"1"})
    (tmp_path / "a" / "x").unlink()
    assert siblings(a, a) == ([], [])


NAME, KEY = "trainer_state.json", "best_model_checkpoint"
DEEP = b"[" * 100_000


@pytest.mark.parametrize(
    ("name", "a", "b", "equal"),
    [
        (NAME, {KEY: "/x", "epoch": 1}, {KEY: "/other", "epoch": 1}, True),
        (NAME, {"epoch": 1}, {KEY: "/other", "epoch": 1}, True),
        (NAME, {KEY: "/x", "epoch": 1}, {KEY: "/x", "epoch": 2}, False),
        (NAME, [KEY], [KEY], True),
        (NAME, [KEY], ["other"], False),
        (NAME, b"no JSON", b"no JSON", True),
        (NAME, b"no JSON", b"no JSOM", False),
        (NAME, b"\xff", b"\xff", True),
        (NAME, DEEP, DEEP, True),
        ("config.json", {KEY: "/x"}, {KEY: "/y"}, False),
        ("config.json", b'{"a": 1}', b'{"a":1}', False),
    ],
)
def test_a_path_of_the_run_does_not_count(
    name: str, a: Any, b: Any, equal: bool, tmp_path: Path
) -> None:
    """That of the best checkpoint so far, in the state of transformers' Trainer."""
    pair = [
        side(
            tmp_path / root,
            {name: own if isinstance(own, bytes) else json.dumps(own).encode()},
        )
        for root, own in (("a", a), ("b", b))
    ]
    assert (siblings(*pair) == ([], [])) is equal


@pytest.mark.parametrize(("most", "equal"), [(31, True), (30, False)])
def test_a_state_that_is_too_large_is_compared_as_bytes(
    most: int, equal: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [json.dumps({KEY: value}).encode() for value in ("x", "xy")]
    assert max(map(len, texts)) == 31
    monkeypatch.setattr("zckpt.proof.sibling_files.MAX_JSON", most)
    pair = [side(tmp_path / name, {NAME: text}) for name, text in zip("ab", texts, strict=True)]
    assert (siblings(*pair) == ([], [])) is equal


@pytest.mark.parametrize(
    ("ending", "has_tensors"),
    [
        (".safetensors", True),
        (".pt", True),
        (".pth", True),
        (".bin", True),
        (".ckpt", True),
        (".pkl", True),
        (".distcp", True),
        (".json", False),
        (".txt", False),
    ],
)
def test_endings_of_files_that_may_have_tensors(
    ending: str, has_tensors: bool, tmp_path: Path
) -> None:
    """Beside weights alone these must be equal; a configuration is of no matter there."""
    a, b = (side(tmp_path / name, {f"x{ending}": name.encode()}, False) for name in "ab")
    assert [line["key"] for line in siblings(a, b)[0]] == ([f"x{ending}"] if has_tensors else [])
