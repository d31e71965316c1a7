"""A directory is zckpt's if it has a mark or a journal, and not because of its name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from zckpt.core.storage.checksum import crc32
from zckpt.core.storage.folder import Folder
from zckpt.core.storage.marks import MARK, has_mark, is_begun, remove_mark_file

from ..conftest import given_away

HEADER = b"%08x %s\n" % (crc32(b'{"run": {}}'), b'{"run": {}}')


@pytest.mark.parametrize(
    ("contents", "expected"),
    [
        ({}, True),
        ({"owner-0011aaff": b""}, True),
        ({"journal": HEADER}, True),
        ({"journal": b"", "out/a": b""}, True),
        ({"journal": HEADER[:20], "out/a": b""}, True),
        ({"journal": bytes(4096), "out/a": b""}, True),
        ({"journal": bytes(len(HEADER)) + HEADER, "out/a": b""}, True),
        ({"journal": HEADER, "journal-1-of-2": b"", "journal-0001": b"", "out/a": b""}, True),
        ({"a": b""}, False),
        ({"out/a": b""}, False),
        ({"journal": b"Dear diary", "out/a": b""}, False),
        ({"journal": b"Dear diary"}, False),
        ({"journal/a": b""}, False),
        ({"journal": HEADER, "journal-of-mine": b""}, False),
        ({"journal": HEADER, "owner-me": b""}, False),
        ({"journal": HEADER, "notes.txt": b""}, False),
    ],
)
def test_what_a_run_has_begun(contents: dict[str, bytes], expected: bool, tmp_path: Path) -> None:
    for name, data in contents.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(data)
    with Folder.at(str(tmp_path.parent)) as above, above.inner(str(tmp_path)) as folder:
        assert is_begun(folder, "out") == expected


def is_marked(path: Path) -> bool:
    with Folder.at(str(path.parent)) as above, above.inner(str(path)) as folder:
        return has_mark(above, str(path), folder.file)


def test_a_mark_is_an_attribute_or_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path := tmp_path / "out").mkdir()
    file, other = tmp_path / ".out.zckpt", tmp_path / "other"
    assert not is_marked(path)
    file.write_text("notes")
    assert not is_marked(path)
    file.write_text('{"source": "00000000"}')
    assert is_marked(path)
    file.rename(other)
    file.symlink_to(other)
    assert not is_marked(path)
    file.unlink()
    file.hardlink_to(other)
    assert not is_marked(path)
    other.unlink()
    assert is_marked(path)
    with monkeypatch.context() as patch:
        given_away(patch, file)
        assert not is_marked(path)
    file.unlink()
    try:
        os.setxattr(path, MARK, b'{"source": "00000000"}')
    except (AttributeError, OSError):
        return
    assert is_marked(path)


@pytest.mark.parametrize(("text", "stays"), [("{}", True), ("notes", True), ('{"a": 1}', False)])
def test_a_mark_file_is_removed_and_no_other(text: str, stays: bool, tmp_path: Path) -> None:
    (file := tmp_path / ".out.zckpt").write_text(text)
    with Folder.at(str(tmp_path)) as above:
        remove_mark_file(above, str(tmp_path / "out"))
        remove_mark_file(above, str(tmp_path / "nothing"))
    assert file.exists() == stays
