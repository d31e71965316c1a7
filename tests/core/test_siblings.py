"""Files beside a checkpoint: which are copied, and how the others are named."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import pytest

from zckpt.core.checkpoint.siblings import MAX_DEPTH, SiblingList, leads_out
from zckpt.core.storage import sources
from zckpt.core.storage.byte_sources import Fingerprint

from ..conftest import texts


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A directory with a file of every kind, and files outside that links lead to."""
    source = tmp_path / "source"
    for name in ("file", "folder/file", ".env", ".git/config", "folder/.hidden"):
        path = source / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "secrets").mkdir()
    links = {"in": "file", "folder/up": "../file", "nothing": "absent", "circle": "circle"}
    links |= {"out": "../secret", "absolute": tmp_path / "secret", "folders": "folder"}
    links |= {"out_folder": "../secrets", "folder/out": "../../secret", "device": "/dev/zero"}
    for name, target in links.items():
        (source / name).symlink_to(target)
    os.mkfifo(source / "pipe")
    with socket.socket(socket.AF_UNIX) as bound:
        before = Path.cwd()
        os.chdir(source)  # names of sockets are short
        bound.bind("socket")
        os.chdir(before)
    return source


LEFT_OUT = {
    ".env, .git/, folder/.hidden: hidden",
    "circle, nothing: a link to nothing",
    "absolute, device, out, out_folder, folder/out: a link out of the directory",
    "folders: a link to a folder",
    "pipe, socket: a pipe, a socket or a device",
}


@pytest.mark.parametrize("is_link", [False, True])
def test_every_file_is_copied_or_named(source: Path, is_link: bool) -> None:
    if is_link:
        (source.parent / "link").symlink_to(source)
        source = source.parent / "link"
    siblings = SiblingList(str(source))
    siblings.add_below(str(source))
    assert [item.name for item in siblings.files] == ["file", "in", "folder/file", "folder/up"]
    assert set(texts(siblings.omitted)) == LEFT_OUT
    assert {line.code for line in siblings.omitted} == {"file-omitted"}


def test_others_are_not_mentioned(source: Path) -> None:
    siblings = SiblingList(str(source))
    siblings.add_below(str(source), lambda name, entry: name != "file")
    assert ([item.name for item in siblings.files], siblings.omitted) == (["file"], [])


def test_a_link_that_turns_has_changed(source: Path) -> None:
    """Its fingerprint is that of the file it led to when it was listed."""
    siblings = SiblingList(str(source))
    with sources.watching() as watch:
        siblings.add("in", str(source / "in"))
    link = source / "in"
    link.unlink()
    link.symlink_to(source.parent / "secret")
    assert watch.first[str(link)] != Fingerprint.of(link.stat())


def test_a_snapshot_of_a_hub_has_its_files_in_blobs(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a--b" / "snapshots" / "c0ffee"
    blobs = tmp_path / "models--a--b" / "blobs"
    for folder in (snapshot, blobs, tmp_path / "blobs"):
        folder.mkdir(parents=True)
    (blobs / "1234").write_text("{}")
    (tmp_path / "blobs" / "1234").write_text("{}")
    (snapshot / "config.json").symlink_to("../../blobs/1234")
    (snapshot / "other").symlink_to(tmp_path / "blobs" / "1234")
    assert not leads_out(str(snapshot / "config.json"), str(snapshot))
    assert leads_out(str(snapshot / "other"), str(snapshot))
    assert leads_out(str(blobs / "1234"), str(blobs.parent / "elsewhere"))


def test_blobs_belong_to_snapshots_alone(tmp_path: Path) -> None:
    source = tmp_path / "runs" / "c0ffee"
    for folder in (source, tmp_path / "blobs"):
        folder.mkdir(parents=True)
    (tmp_path / "blobs" / "1234").write_text("{}")
    (source / "config.json").symlink_to(tmp_path / "blobs" / "1234")
    assert leads_out(str(source / "config.json"), str(source))


def test_a_deep_tree_ends(tmp_path: Path) -> None:
    folder = tmp_path
    for _ in range(MAX_DEPTH + 1):
        folder = folder / "d"
        folder.mkdir()
        (folder / "file").write_text("")
    siblings = SiblingList(str(tmp_path))
    siblings.add_below(str(tmp_path))
    assert len(siblings.files) == MAX_DEPTH
    assert texts(siblings.omitted) == ["d/" * (MAX_DEPTH + 1) + ": a folder too deep below others"]


def entry(path: Path) -> os.DirEntry[str]:
    (found,) = [item for item in os.scandir(path.parent) if item.name == path.name]
    return found


def test_a_link_that_cannot_be_followed_is_an_error(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.path.realpath

    def failing(path: str, strict: bool = False) -> str:
        if strict:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return real(path)

    monkeypatch.setattr(os.path, "realpath", failing)
    with pytest.raises(PermissionError, match="folder/up"):
        leads_out(str(source / "folder" / "up"), str(source))


def test_what_a_link_leads_to_outside_is_not_looked_at(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "status", pytest.fail)
    siblings = SiblingList(str(source))
    siblings.add("out", str(source / "out"))
    assert texts(siblings.omitted) == ["out: a link out of the directory"]


def test_hidden_is_the_reason_for_a_hidden_link(source: Path) -> None:
    (source / ".secret").symlink_to("../secret")
    siblings = SiblingList(str(source))
    siblings.add(".secret", str(source / ".secret"))
    assert texts(siblings.omitted) == [".secret: hidden"]


def test_a_folder_for_other_numbers_of_ranks_is_not_mentioned(tmp_path: Path) -> None:
    """A file of its name is one that somebody else has made."""
    siblings = SiblingList(str(tmp_path))
    (tmp_path / ".zckpt").mkdir()
    siblings.add_below(str(tmp_path))
    assert (siblings.files, siblings.omitted) == ([], [])
    (tmp_path / ".zckpt").rmdir()
    (tmp_path / ".zckpt").write_text("")
    siblings.add_below(str(tmp_path))
    assert (siblings.files, texts(siblings.omitted)) == ([], [".zckpt: hidden"])


def test_names_may_look_like_reasons() -> None:
    siblings = SiblingList("/run")
    siblings.refuse([".a: b", ".c"], "hidden")
    assert texts(siblings.omitted) == [".a: b, .c: hidden"]


def test_names_begin_at_the_root(source: Path) -> None:
    siblings = SiblingList(str(source))
    siblings.add_below(str(source / "folder"), root=str(source))
    assert [item.name for item in siblings.files] == ["folder/file", "folder/up"]


def test_nobody_looks_into_a_folder_of_another(source: Path) -> None:
    asked = []
    siblings = SiblingList(str(source))
    siblings.add_below(str(source), lambda name, _: bool(asked.append(name)) or name == "folder")
    assert "folder" in asked
    assert not [name for name in asked if name.startswith("folder/")]


@pytest.mark.parametrize(
    ("name", "is_folder"),
    [("folder", True), ("folders", True), ("file", False), ("in", False), ("out_folder", False)],
)
def test_folders_and_links_to_them_inside(source: Path, name: str, is_folder: bool) -> None:
    assert SiblingList(str(source)).is_folder(entry(source / name)) == is_folder


def test_a_folder_that_is_no_link_is_one_anywhere(source: Path) -> None:
    assert SiblingList(str(source)).is_folder(entry(source.parent / "secrets"))


@pytest.mark.parametrize(
    ("name", "is_denied", "is_closed"),
    [
        ("lost+found", True, True),
        ("lost+found", False, False),
        ("folder", True, False),
        (".git", False, True),
        (".listed", False, False),
        (".listed", True, False),
    ],
)
def test_hidden_folders_and_those_of_a_filesystem_are_closed(
    name: str, is_denied: bool, is_closed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "is_denied", lambda path: is_denied)
    (tmp_path / name).mkdir()
    siblings = SiblingList(str(tmp_path), frozenset({".listed"}))
    assert siblings.is_closed(entry(tmp_path / name)) == is_closed


def test_the_folder_of_a_filesystem_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "is_denied", lambda path: True)
    (tmp_path / "lost+found").mkdir()
    siblings = SiblingList(str(tmp_path))
    siblings.add_below(str(tmp_path))
    assert texts(siblings.omitted) == ["lost+found/: a folder that may not be listed"]
