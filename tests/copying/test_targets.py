"""Where a target may be written."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from zckpt.copying import targets
from zckpt.copying.journal import Identity, Journal, set_mark
from zckpt.copying.targets import (
    allocated,
    free_space,
    is_complete,
    is_taken,
    need_space,
    refuse_existing,
    refuse_inside,
    refuse_other_begun,
    remove_empty,
)
from zckpt.errors import NotEnoughSpace, TargetExists, WrongOption

from ..conftest import given_away
from .conftest import folder_at

RUN = Identity("1", {}, {"--dp": 4}, {"a": 1, "x/y/b": 2})
OTHER = Identity("1", {}, {"--dp": 5}, {"a": 1, "x/y/b": 2})


def test_a_target_within_its_source_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to("run")
    with pytest.raises(WrongOption, match="is inside of"):
        refuse_inside(str(tmp_path / "run"), str(tmp_path / "link" / "x"))
    refuse_inside(str(tmp_path / "run"), str(tmp_path / "run2"))
    refuse_inside(str(tmp_path / "run"), str(tmp_path / "run" / ".zckpt" / "dp2"))
    (tmp_path / "file").touch()
    refuse_inside(str(tmp_path / "file"), str(tmp_path / "file" / "x"))  # it cannot be made


def test_a_target_that_is_its_source_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "link").symlink_to("run")
    for target in ("run", "link"):
        with pytest.raises(WrongOption, match="is the source itself"):
            refuse_inside(str(tmp_path / "run"), str(tmp_path / target))
    refuse_inside(str(tmp_path / "none"), str(tmp_path / "none"))  # the reader says that


def test_anything_but_an_empty_directory_is_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("empty")
    (tmp_path / "dangling").symlink_to("none")
    taken = [
        name
        for name in ("none", "empty", "file", "link", "dangling")
        if is_taken(str(tmp_path / name))
    ]
    assert taken == ["file", "link", "dangling"]
    (tmp_path / "empty" / "x").touch()
    assert is_taken(str(tmp_path / "empty"))


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
    paths = [tmp_path / "out.partial" / "out", tmp_path / "out.partial" / "out" / "a"]
    blocks = sum(os.stat(path).st_blocks for path in paths)
    (tmp_path / "out.partial" / "link").symlink_to("out/a")
    assert allocated(str(tmp_path / "out.partial")) == blocks * 512 >= 1 << 20
    (tmp_path / "link").symlink_to("out.partial")
    assert allocated(str(tmp_path / "link")) == allocated(str(tmp_path / "none")) == 0
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


def test_a_target_without_a_journal_beside_it_is_not_ours(tmp_path: Path) -> None:
    """A run makes its journal before its target."""
    (tmp_path / "out.partial" / "out").mkdir(parents=True)
    with pytest.raises(TargetExists, match="no journal"):
        refuse_existing(str(tmp_path / "out"))


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
        folder_at(tmp_path).own_folder(str(tmp_path / "out.partial"))


# -- what an earlier run has begun


def begun(tmp_path: Path, identity: Identity = RUN) -> Journal:
    (tmp_path / "out.partial").mkdir()
    return Journal(folder_at(tmp_path / "out.partial"), identity, 1 << 20)


def test_a_run_that_can_go_on_is_not_refused(tmp_path: Path) -> None:
    target = str(tmp_path / "out")
    refuse_other_begun(target, RUN)
    journal = begun(tmp_path)
    with pytest.raises(TargetExists, match="writing there now"):
        refuse_other_begun(target, RUN)
    journal.close()
    refuse_other_begun(target, RUN)
    with pytest.raises(TargetExists, match="begun with other options: --dp 4, now --dp 5"):
        refuse_other_begun(target, OTHER)
    with pytest.raises(TargetExists, match=r"out\.partial exists: a run was stopped there"):
        refuse_existing(target)
    (tmp_path / "out.partial" / "journal").write_bytes(b"half a li")
    refuse_other_begun(target, OTHER)


def test_a_run_that_was_stopped_at_once_is_not_refused(tmp_path: Path) -> None:
    target = str(tmp_path / "out")
    (tmp_path / "out.partial").mkdir()
    refuse_other_begun(target, RUN)
    (tmp_path / "out.partial" / "notes.txt").touch()
    with pytest.raises(TargetExists, match="no journal"):
        refuse_other_begun(target, RUN)


def test_a_journal_is_ours_whatever_else_is_there(tmp_path: Path) -> None:
    begun(tmp_path).close()
    (tmp_path / "out.partial" / "notes.txt").touch()
    with pytest.raises(TargetExists, match="a run was stopped there"):
        refuse_existing(str(tmp_path / "out"))


# -- what an earlier run has completed


def completed(tmp_path: Path) -> str:
    (tmp_path / "out" / "x" / "y").mkdir(parents=True)
    for name in RUN.files:
        (tmp_path / "out" / name).touch()
    set_mark(folder_at(tmp_path / "out"), folder_at(tmp_path), str(tmp_path / "out"), RUN)
    return str(tmp_path / "out")


def test_a_complete_target_is_known(tmp_path: Path) -> None:
    assert not is_complete(str(tmp_path / "out"), RUN)
    target = completed(tmp_path)
    assert is_complete(target, RUN)
    with pytest.raises(TargetExists, match="was written with other options"):
        is_complete(target, OTHER)
    (tmp_path / "out" / "x" / "y" / "b").unlink()
    with pytest.raises(TargetExists, match="but it lacks x/y/b"):
        is_complete(target, RUN)


def test_a_target_without_a_mark_is_of_another_run(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "a").touch()
    with pytest.raises(TargetExists, match="does not state which run wrote it"):
        is_complete(str(tmp_path / "out"), RUN)


@pytest.mark.parametrize(
    ("path", "what"), [("x", "x"), ("x/y", "x/y"), ("x/y/b", "x/y/b"), ("a", "a")]
)
def test_a_complete_target_with_files_of_others_is_refused(
    path: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They could have changed them."""
    target = completed(tmp_path)
    own = os.geteuid()
    given_away(monkeypatch, tmp_path / "out" / path)
    with pytest.raises(TargetExists, match=f"but {what} belongs to user {own + 1}"):
        is_complete(target, RUN)


def test_a_filesystem_that_gives_all_files_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network filesystem may: then new files have that owner too."""
    target = completed(tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: os.stat(target).st_uid + 1)
    assert is_complete(target, RUN)


def test_what_a_run_left_that_was_stopped_after_the_rename_is_removed(tmp_path: Path) -> None:
    """Only journals, and never those of a run that is there."""
    target = completed(tmp_path)
    journal, partial = begun(tmp_path), tmp_path / "out.partial"
    assert is_complete(target, RUN)
    assert partial.exists()
    journal.close()
    (partial / "notes.txt").touch()
    assert is_complete(target, RUN)
    assert (partial / "journal").exists()
    (partial / "notes.txt").unlink()
    (partial / "journal-1-of-2").touch()
    assert is_complete(target, RUN)
    assert not partial.exists()


def test_only_journals_are_removed(tmp_path: Path) -> None:
    begun(tmp_path).close()
    path = tmp_path / "out.partial"
    (path / "notes.txt").touch()
    with pytest.raises(OSError, match=r"out\.partial/notes\.txt") as caught:
        remove_empty(folder_at(path), folder_at(tmp_path))
    assert caught.value.errno == errno.ENOTEMPTY
    assert sorted(item.name for item in path.iterdir()) == ["journal", "notes.txt"]
