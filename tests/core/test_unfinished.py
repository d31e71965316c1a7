"""A target is complete if no journal is in it, and all that its note names."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import zckpt
from zckpt.core.storage.unfinished import UNFINISHED, refuse_unfinished, understood
from zckpt.core.version import __version__
from zckpt.errors import IncompleteCheckpoint

GOOD = b'{"files": {"a": 1, "b/c": 2}, "last": "a", "sent": {"a": 7}, "new key": null}'


def test_a_note_is_understood() -> None:
    note = understood(GOOD)
    assert note is not None
    assert (note.names, note.sent) == (["b/c", "a"], {"a": 7})
    assert understood(b'{"zckpt": "%s", ' % __version__.encode() + GOOD[1:])


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"\xff",
        b"[" * 100_000,
        b"null",
        b'{"files": {"a": -1}, "last": "a"}',
        b'{"files": {"a": true}, "last": "a"}',
        b'{"files": {"a": 1}}',
        b'{"files": ["a"], "last": "a"}',
        b'{"files": {}, "last": "a"}',
        b'{"files": {"": 1}, "last": "a"}',
        b'{"files": {"a/../../b": 1}, "last": "a"}',
        b'{"files": {"a//b": 1}, "last": "a"}',
        b'{"files": {"a/": 1}, "last": "a"}',
        b'{"files": {"/a": 1}, "last": "a"}',
        b'{"files": {"a\\u0000": 1}, "last": "a"}',
        b'{"files": {"a": 1}, "last": ""}',
        b'{"files": {"zckpt-unfinished.json": 1}, "last": "a"}',
        b'{"zckpt": "99.0", "files": {"a": 1}, "last": "a"}',
    ],
)
def test_a_note_that_is_not_understood(text: bytes) -> None:
    assert understood(text) is None


def test_what_is_missing() -> None:
    note = understood(GOOD)
    assert note is not None
    assert note.missing({"a": 1, "b/c": 2}.get) == []
    assert note.missing({"a": 1, "b/c": 3}.get) == ["b/c"]
    assert note.missing({"b/c": 2}.get) == ["a"]
    lost = understood(GOOD[:-1] + b', "lost": ["a"]}')
    assert lost is not None
    assert lost.missing({"a": 1, "b/c": 2}.get) == ["a"]


def is_refused(path: Path) -> bool:
    try:
        refuse_unfinished([str(path)])
    except IncompleteCheckpoint:
        return True
    return False


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy in which every file of the note is there, and a file of somebody else."""
    (tmp_path / "copy" / "b").mkdir(parents=True)
    for name, data in {UNFINISHED: GOOD, "a": b"1", "b/c": b"22", "other": b""}.items():
        (tmp_path / "copy" / name).write_bytes(data)
    return tmp_path / "copy"


def test_a_copy_is_refused_until_all_is_there(copy: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(copy / "b")
    paths = (copy, copy / "a", copy / "b", copy / "b" / "c", tmp_path / "link")
    assert [is_refused(path) for path in paths] == [False] * 5
    (copy / "a").unlink()
    assert [is_refused(path) for path in paths] == [True] * 5
    assert not is_refused(copy / "other")
    (copy / UNFINISHED).write_text("{")
    assert is_refused(copy / "other")
    assert not is_refused(tmp_path)


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_a_note_is_a_file(kind: str, copy: Path) -> None:
    (copy / UNFINISHED).unlink()
    (copy / "a").unlink()
    if kind == "link":
        (copy / UNFINISHED).symlink_to("nothing")
    elif kind == "pipe":
        os.mkfifo(copy / UNFINISHED)
    else:
        (copy / UNFINISHED).mkdir()
    assert not is_refused(copy)


def test_a_target_that_is_being_written(tmp_path: Path) -> None:
    """It has a journal, and lies above; of a folder with another name, or without one, nothing."""
    folder = tmp_path / "new.partial" / "tag" / "inside"
    folder.mkdir(parents=True)
    (tmp_path / "link").symlink_to(folder)
    assert not is_refused(folder)
    (tmp_path / "new.partial" / "journal").touch()
    (tmp_path / "journal").touch()
    for path in (folder, tmp_path / "new.partial", tmp_path / "link"):
        with pytest.raises(IncompleteCheckpoint, match="not complete") as raised:
            refuse_unfinished([str(path)])
        assert str(raised.value).startswith(f"{path} belongs")
    assert not is_refused(tmp_path)


def test_a_run_whose_files_are_in_one_that_is_being_written(example: Path, tmp_path: Path) -> None:
    """Its tag is a link, which only the reader follows."""
    begun = tmp_path / "new.partial"
    begun.mkdir()
    (begun / "journal").touch()
    (example / "global_step7").rename(begun / "global_step7")
    (example / "global_step7").symlink_to(begun / "global_step7")
    with pytest.raises(IncompleteCheckpoint, match="belongs to a target that is not complete"):
        zckpt.read(example)
