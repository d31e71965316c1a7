"""Directories that appear whole or not at all."""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from zckpt.copying.staging import Staging
from zckpt.core.fileio import save
from zckpt.core.layout import Shell
from zckpt.errors import TargetExists


def names(root: Path) -> list[str]:
    return sorted(os.path.relpath(path, root) for path in root.rglob("*"))


def test_the_target_appears_at_the_end(tmp_path: Path) -> None:
    target = tmp_path / "a" / "b" / "out"
    with Staging(str(target)) as staged:
        staged.lay([Shell("x/y/file", 10, ((2, b"ab"), (8, b"c")))])
        assert not target.exists()
        assert Path(staged.path) == tmp_path / "a" / "b" / "out.partial" / "out"
    assert names(tmp_path) == [
        "a",
        "a/b",
        "a/b/out",
        "a/b/out/x",
        "a/b/out/x/y",
        "a/b/out/x/y/file",
    ]
    assert (target / "x/y/file").read_bytes() == b"\0\0ab\0\0\0\0c\0"


def test_shells_are_holes(tmp_path: Path) -> None:
    with Staging(str(tmp_path / "out")) as staged:
        staged.lay([Shell("a", 1 << 40, ((0, b"head"),)), Shell("empty", 0, ())])
    status = os.stat(tmp_path / "out" / "a")
    assert status.st_size == 1 << 40
    assert status.st_blocks * 512 < 1 << 20
    assert os.path.getsize(tmp_path / "out" / "empty") == 0


def test_a_relative_target_stays_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    with Staging("out/") as staged:
        staged.lay([Shell("a", 1, ())])
        os.chdir("elsewhere")
    assert names(tmp_path) == ["elsewhere", "out", "out/a"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
def test_a_failure_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:

    def fail() -> None:
        with Staging(str(tmp_path / "out")) as staged:
            staged.lay([Shell("x/a", 10, ())])
            raise error

    with pytest.raises(error):
        fail()
    assert names(tmp_path) == []


@pytest.mark.parametrize("broken", ["fsync", "rename"])
def test_a_failure_at_the_end_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("broken")

    monkeypatch.setattr(os, broken, fail)
    with pytest.raises(OSError, match="broken"), Staging(str(tmp_path / "out")) as staged:
        staged.lay([Shell("x/a", 10, ())])
    assert names(tmp_path) == []


def test_every_file_and_folder_is_synced_before_the_rename(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    real_sync, real_rename = os.fsync, os.rename

    def fsync(file: int) -> None:
        seen.append(os.path.relpath(os.readlink(f"/proc/self/fd/{file}"), tmp_path))
        real_sync(file)

    def rename(source: str, target: str, **folders: int) -> None:
        seen.append("rename")
        real_rename(source, target, **folders)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    with Staging(str(tmp_path / "out")) as staged:
        staged.lay([Shell("x/a", 10, ()), Shell("b", 10, ())])
    folder = "out.partial/out"
    assert seen[0] == "out.partial"  # with the journal
    assert set(seen[1:5]) == {folder, f"{folder}/b", f"{folder}/x", f"{folder}/x/a"}
    assert seen[4:] == [folder, "rename", "."]


OBSTACLES: dict[str, Callable[[Path], None]] = {
    "directory": lambda path: (path / "inside").mkdir(parents=True),
    "file": Path.touch,
    "dangling link": lambda path: path.symlink_to("nowhere"),
    "link": lambda path: path.symlink_to("/tmp"),
}


@pytest.mark.parametrize("suffix", ["", ".partial"])
@pytest.mark.parametrize("kind", OBSTACLES)
def test_what_is_there_is_left_alone(tmp_path: Path, kind: str, suffix: str) -> None:
    OBSTACLES[kind](tmp_path / f"out{suffix}")
    with (
        pytest.raises(TargetExists, match=f"out{suffix} exists") as caught,
        Staging(str(tmp_path / "out")),
    ):
        pytest.fail("entered")
    assert caught.value.hint
    assert {path.name for path in tmp_path.iterdir()} == {f"out{suffix}"}


@pytest.mark.parametrize("kind", OBSTACLES)
def test_what_appears_meanwhile_is_left_alone(tmp_path: Path, kind: str) -> None:
    with pytest.raises(TargetExists), Staging(str(tmp_path / "out")):
        OBSTACLES[kind](tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"out"}


def test_an_empty_directory_is_taken(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with Staging(str(tmp_path / "out")) as staged:
        staged.lay([Shell("a", 1, ())])
    assert names(tmp_path) == ["out", "out/a"]


def test_a_name_that_is_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileExistsError), Staging(str(tmp_path / "out")) as staged:
        staged.lay([Shell("a", 1, ()), Shell("a", 1, ())])
    assert names(tmp_path) == []


@pytest.mark.parametrize("size", [0, 1, (1 << 20) + 5])
def test_files_are_copied_with_their_sum(tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    (tmp_path / "source").write_bytes(data)
    with Staging(str(tmp_path / "out")) as staged:
        assert staged.copy(str(tmp_path / "source"), "x/y") == (size, zlib.crc32(data))
    assert (tmp_path / "out/x/y").read_bytes() == data


def test_new_folders_above_the_target_are_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    real = os.fsync

    def fsync(file: int) -> None:
        synced.append(os.path.relpath(os.readlink(f"/proc/self/fd/{file}"), tmp_path))
        real(file)

    monkeypatch.setattr(os, "fsync", fsync)
    with Staging(str(tmp_path / "a" / "b" / "out")):
        assert synced == [".", "a", "a/b/out.partial"]
    assert synced[-1] == "a/b"


def test_a_target_that_exists_is_never_denied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What fails after the rename is a warning."""
    real_rename, real_sync, real_unlink = os.rename, os.fsync, os.unlink

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def rename(source: str, target: str, **folders: int) -> None:
        real_rename(source, target, **folders)
        monkeypatch.setattr(os, "fsync", fail)
        monkeypatch.setattr(os, "unlink", fail)

    monkeypatch.setattr(os, "rename", rename)
    staged = Staging(str(tmp_path / "out"))
    with staged:
        staged.lay([Shell("a", 1, ())])
    monkeypatch.setattr(os, "fsync", real_sync)
    monkeypatch.setattr(os, "unlink", real_unlink)
    assert (tmp_path / "out" / "a").is_file()
    assert len(staged.warnings) == 2
    assert all("is complete" in warning for warning in staged.warnings)


def test_the_last_check_comes_after_the_notice(tmp_path: Path) -> None:
    """From `before_rename` on, nothing is left to interrupt."""
    seen: list[bool] = []
    target = tmp_path / "out"

    def notice() -> None:
        seen.append(target.exists())
        target.mkdir()
        (target / "appeared").touch()

    with pytest.raises(TargetExists), Staging(str(target), before_rename=notice):
        pass
    assert seen == [False]
    assert names(tmp_path) == ["out", "out/appeared"]


def test_files_have_the_mode_that_is_given(tmp_path: Path) -> None:
    os.umask(0o022)
    (tmp_path / "source").write_bytes(b"x")
    (tmp_path / "source").chmod(0o4640)
    with Staging(str(tmp_path / "out")) as staged:
        staged.lay([Shell("private", 1, ())], 0o600)
        staged.lay([Shell("group", 1, ())], 0o660)
        staged.copy(str(tmp_path / "source"), "sibling")
    modes = {path.name: oct(path.stat().st_mode & 0o7777) for path in (tmp_path / "out").iterdir()}
    assert modes == {"private": "0o600", "group": "0o640", "sibling": "0o640"}


@pytest.mark.parametrize("place", ["target", "partial"])
def test_a_saved_file_follows_no_link(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim, path = tmp_path / "victim", tmp_path / "proof.json"
    victim.write_text("kept")
    if place == "target":
        path.symlink_to(victim)
        save(str(path), b"new")
        assert not path.is_symlink()
    else:
        monkeypatch.setattr(os, "urandom", bytes)
        (tmp_path / "proof.json.00000000.partial").symlink_to(victim)
        with pytest.raises(FileExistsError):
            save(str(path), b"new")
    assert victim.read_text() == "kept"


def test_a_file_that_cannot_be_saved_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match=r"proof\.json"):
        save(str(tmp_path / "proof.json"), b"new")
    assert list(tmp_path.iterdir()) == []
