"""Directories that appear whole or not at all."""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from zckpt.core import staging
from zckpt.core.staging import (
    Shell,
    Staging,
    free_space,
    need_space,
    refuse_existing,
    refuse_inside,
    remembered,
)
from zckpt.errors import NotEnoughSpace, TargetExists, WrongOption


def names(root: Path) -> list[str]:
    return sorted(os.path.relpath(path, root) for path in root.rglob("*"))


def test_the_target_appears_at_the_end(tmp_path: Path) -> None:
    target = tmp_path / "a" / "b" / "out"
    with Staging(str(target)) as staged:
        staged.lay([Shell("x/y/file", 10, ((2, b"ab"), (8, b"c")))])
        assert not target.exists()
        assert Path(staged.path) == tmp_path / "a" / "b" / "out.partial"
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
    def fail(*_: object) -> None:
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

    def rename(source: str, target: str) -> None:
        seen.append("rename")
        real_rename(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    with Staging(str(tmp_path / "out")) as staged:
        staged.lay([Shell("x/a", 10, ()), Shell("b", 10, ())])
    before = {"out.partial", "out.partial/b", "out.partial/x", "out.partial/x/a"}
    assert set(seen[:4]) == before
    assert seen[4:] == ["rename", "."]


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


def test_a_target_within_its_source_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to("run")
    with pytest.raises(WrongOption, match="is inside of"):
        refuse_inside(str(tmp_path / "run"), str(tmp_path / "link" / "x"))
    refuse_inside(str(tmp_path / "run"), str(tmp_path / "run2"))


def test_a_name_that_is_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileExistsError), Staging(str(tmp_path / "out")) as staged:
        staged.lay([Shell("a", 1, ()), Shell("a", 1, ())])
    assert names(tmp_path) == []


def test_a_target_with_a_slash_behind_is_the_same(tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    with pytest.raises(TargetExists, match=r"out\.partial exists"):
        refuse_existing(f"{tmp_path}/out/")


@pytest.mark.parametrize("size", [0, 1, (1 << 20) + 5])
def test_files_are_copied_with_their_sum(tmp_path: Path, size: int) -> None:
    data = os.urandom(size)
    (tmp_path / "source").write_bytes(data)
    with Staging(str(tmp_path / "out")) as staged:
        assert staged.copy(str(tmp_path / "source"), "x/y") == (size, zlib.crc32(data))
    assert (tmp_path / "out/x/y").read_bytes() == data


def test_space_is_that_of_the_nearest_folder(tmp_path: Path) -> None:
    status = os.statvfs(tmp_path)
    free = free_space(str(tmp_path / "none/of/these"))
    assert abs(free - status.f_bavail * status.f_frsize) < 1 << 33


def test_too_little_space_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "free_space", lambda _: 1000)
    need_space("out", 1000)
    with pytest.raises(NotEnoughSpace, match="out needs"):
        need_space("out", 1001)


@pytest.mark.parametrize(("limit", "passes"), [(20, 1), (19, 2)])
def test_shells_are_made_once_if_they_fit(limit: int, passes: int) -> None:
    calls = []

    def shells() -> Iterator[Shell]:
        calls.append(0)
        parts = ((0, b"0123456789"),)
        yield Shell("first", 30, parts)
        yield Shell("alike", 30, parts)
        yield Shell("other", 40, ((5, b"abcdefghij"),))

    laid_out = remembered(shells, limit)
    first = list(laid_out())
    assert [shell.name for shell in first] == ["first", "alike", "other"]
    assert list(laid_out()) == first
    assert len(calls) == passes
