"""Files beside a checkpoint: which are copied, and how the others are named."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from zckpt.core import sources
from zckpt.core.elsewhere import Fingerprint
from zckpt.core.siblings import MAX_DEPTH, SiblingList, leads_out


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
    assert set(siblings.left_out) == LEFT_OUT


def test_others_are_not_mentioned(source: Path) -> None:
    siblings = SiblingList(str(source))
    siblings.add_below(str(source), lambda name, entry: name != "file")
    assert ([item.name for item in siblings.files], siblings.left_out) == (["file"], [])


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


def test_a_deep_tree_ends(tmp_path: Path) -> None:
    folder = tmp_path
    for _ in range(MAX_DEPTH + 1):
        folder = folder / "d"
        folder.mkdir()
        (folder / "file").write_text("")
    siblings = SiblingList(str(tmp_path))
    siblings.add_below(str(tmp_path))
    assert len(siblings.files) == MAX_DEPTH
    assert siblings.left_out == ["d/" * (MAX_DEPTH + 1) + ": a folder too deep below others"]
