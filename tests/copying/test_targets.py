"""Where a target may be written."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from zckpt.copying import targets
from zckpt.copying.targets import allocated, free_space, need_space, refuse_existing, refuse_inside
from zckpt.errors import NotEnoughSpace, TargetExists, WrongOption

from .conftest import folder_at


def test_a_target_within_its_source_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to("run")
    with pytest.raises(WrongOption, match="is inside of"):
        refuse_inside(str(tmp_path / "run"), str(tmp_path / "link" / "x"))
    refuse_inside(str(tmp_path / "run"), str(tmp_path / "run2"))


def test_a_target_with_a_slash_behind_is_the_same(tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    with pytest.raises(TargetExists, match=r"out\.partial exists"):
        refuse_existing(f"{tmp_path}/out/")


def test_space_is_that_of_the_nearest_folder(tmp_path: Path) -> None:
    status = os.statvfs(tmp_path)
    free = free_space(str(tmp_path / "none/of/these"))
    assert abs(free - status.f_bavail * status.f_frsize) < 1 << 33


def test_too_little_space_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "free_space", lambda _: 1000)
    need_space("out", 1000, resume=False)
    with pytest.raises(NotEnoughSpace, match="out needs"):
        need_space("out", 1001, resume=False)


def test_what_an_earlier_run_allocated_is_free_for_the_one_that_continues_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out.partial" / "out").mkdir(parents=True)
    (tmp_path / "out.partial" / "out" / "a").write_bytes(bytes(1 << 20))
    os.sync()
    assert allocated(str(tmp_path / "out.partial")) >= 1 << 20
    monkeypatch.setattr(targets, "free_space", lambda _: 1000)
    need_space(str(tmp_path / "out"), 1 << 20, resume=True)
    with pytest.raises(NotEnoughSpace):
        need_space(str(tmp_path / "out"), 1 << 20, resume=False)


def test_a_folder_without_a_journal_is_not_ours(tmp_path: Path) -> None:
    (tmp_path / "out.partial").mkdir()
    with pytest.raises(TargetExists, match="a run was stopped there") as caught:
        refuse_existing(str(tmp_path / "out"))
    assert "--resume" in caught.value.hint
    (tmp_path / "out.partial" / "notes.txt").touch()
    with pytest.raises(TargetExists, match="no journal") as caught:
        refuse_existing(str(tmp_path / "out"))
    assert "--resume" not in caught.value.hint


def test_what_another_user_has_begun_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else may look into `.partial`."""
    real = os.open

    def refuse(path: str, flags: int, *rest: Any, **more: Any) -> int:
        if path == "out.partial":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return real(path, flags, *rest, **more)

    def closed(path: str) -> Any:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)

    (tmp_path / "out.partial").mkdir()
    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(os, "scandir", closed)
    assert not allocated(str(tmp_path / "out.partial"))
    with pytest.raises(TargetExists, match=r"out\.partial exists: another user"):
        refuse_existing(str(tmp_path / "out"))
    with pytest.raises(TargetExists, match=r"out\.partial belongs to user .* may not write there"):
        folder_at(tmp_path).own(str(tmp_path / "out.partial"))
