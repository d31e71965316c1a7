"""Runs where there are no locks: each has a directory of its own, and the first rename wins."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from zckpt.copying import staging, targets, without_locks
from zckpt.copying.journal import Identity, mark_of
from zckpt.copying.sharing import Part
from zckpt.copying.staging import Staging
from zckpt.copying.targets import is_complete
from zckpt.copying.without_locks import Process, this_process
from zckpt.core.passes.layout import Shell
from zckpt.errors import TargetExists, WrongOption

from ..conftest import texts
from .test_staging import RUN, names


@pytest.fixture(autouse=True)
def locks(no_locks: None) -> None:
    """There are none in all tests of this module."""


def begin(target: Path, **options: Any) -> Staging:
    return Staging(str(target), RUN, 4, **options)


def test_two_runs_have_a_directory_each(tmp_path: Path) -> None:
    """The first rename wins; the other run removes its own, and nothing of the first one."""

    def run() -> None:
        with begin(tmp_path / "out") as slow:
            slow.lay([Shell("a", 10, ((0, b"slow"),))])
            with begin(tmp_path / "out") as fast:
                fast.lay([Shell("a", 10, ((0, b"fast"),))])
                assert fast.partial != slow.partial
                assert not fast.warnings

    with pytest.raises(TargetExists, match="out exists"):
        run()
    assert (tmp_path / "out" / "a").read_bytes()[:4] == b"fast"
    assert names(tmp_path) == ["out", "out/a"]


def test_two_that_rename_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both have looked whether the target is there."""
    rename = os.rename

    def late(*names: str, **folders: int) -> None:
        monkeypatch.setattr(os, "rename", rename)
        with begin(tmp_path / "out") as fast:
            fast.lay([Shell("a", 10, ((0, b"fast"),))])
        rename(*names, **folders)

    def run() -> None:
        with begin(tmp_path / "out") as slow:
            slow.lay([Shell("a", 10, ())])
            monkeypatch.setattr(os, "rename", late)

    with pytest.raises(TargetExists, match="out exists"):
        run()
    assert (tmp_path / "out" / "a").read_bytes()[:4] == b"fast"
    assert names(tmp_path) == ["out", "out/a"]


def test_the_name_says_who_writes(tmp_path: Path) -> None:
    with begin(tmp_path / "out") as staged:
        host, number, word = Path(staged.partial).name.split(".")[1].split("-")
        assert (bool(host), number, len(word)) == (True, str(os.getpid()), 8)
        assert Path(staged.path).name == "out"
        header = (Path(staged.partial) / "journal").read_text().splitlines()[0][9:]
        assert Process(**json.loads(header)["process"]) == this_process()


def test_parts_and_runs_that_go_on_are_refused(tmp_path: Path) -> None:
    for words, option in (
        ({"resume": True}, "--resume"),
        ({"resume": True, "sharing": Part(1, 2)}, "--part"),
        ({"resume": True, "sharing": Part(1, 2), "begins_anew": True}, "--part"),
    ):
        with (
            pytest.raises(WrongOption, match=f"{option} needs locks, and the filesystem of .*out"),
            begin(tmp_path / "out", **words),
        ):
            pytest.fail("entered")
    assert names(tmp_path) == []


def test_a_run_begins_anew(tmp_path: Path) -> None:
    """It continues nobody's work, also if it is that of the same run."""
    (tmp_path / "out.partial" / "out").mkdir(parents=True)
    (tmp_path / "out.partial" / "journal").touch()
    with begin(tmp_path / "out", resume=True, begins_anew=True) as staged:
        assert staged.resumed == 0
        staged.lay([Shell("a", 10, ())])
    assert names(tmp_path / "out") == ["a"]
    assert names(tmp_path / "out.partial") == ["journal", "out"]
    (line,) = texts(staged.warnings)
    assert f"rm -r {tmp_path / 'out.partial'}" in line


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_run_that_ends_leaves_nothing(
    error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody could continue it, however much it has done."""
    monkeypatch.setattr(staging, "WORTH_KEEPING", 0.0)

    def fail() -> None:
        with begin(tmp_path / "out") as staged:
            staged.lay([Shell("a", 10, ())])
            staged.share()
            raise error

    with pytest.raises(error) as raised:
        fail()
    assert type(raised.value) is error
    assert names(tmp_path) == []


def left(tmp_path: Path, process: Process | None, name: str = "out.gone-1-00000000") -> Path:
    """What a killed run has left."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(without_locks, "new_writer", lambda: name.partition(".")[2])
        patch.setattr(staging, "new_writer", lambda: name.partition(".")[2])
        if process:
            patch.setattr(without_locks, "this_process", lambda: process)
        run = begin(tmp_path / name.partition(".")[0])
        run.__enter__()
        run.lay([Shell("a", 10, ())])
        run._stack.close()
    if process is None:
        (Path(run.partial) / "journal").unlink()
    return Path(run.partial)


def a_dead_process() -> Process:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        pass
    here = this_process()
    return Process(here.boot, here.namespace, child.pid, "1")


def changed(process: Process, **fields: Any) -> Process:
    return Process(
        **{name: fields.get(name, getattr(process, name)) for name in Process.__struct_fields__}
    )


def completed(target: Path) -> list[str]:
    with begin(target) as staged:
        pass
    return texts(staged.warnings)


@pytest.mark.parametrize("name", ["out.gone-1-00000000", "other.gone-1-00000000"])
@pytest.mark.parametrize("is_reused", [False, True])
def test_what_a_dead_process_has_left_is_removed(
    is_reused: bool, name: str, tmp_path: Path
) -> None:
    """Also if another process has its number by now, and if it wrote another target."""
    gone = changed(this_process(), started="1") if is_reused else a_dead_process()
    path = left(tmp_path, gone, name)
    (line,) = completed(tmp_path / "out")
    assert f"{path} was removed" in line
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize(
    "fields", [{"boot": "another"}, {"boot": ""}, {"namespace": "pid:[1]"}], ids=str
)
def test_what_may_be_at_work_elsewhere_stays(fields: dict[str, str], tmp_path: Path) -> None:
    path = left(tmp_path, changed(a_dead_process(), **fields))
    (line,) = completed(tmp_path / "out")
    assert f"rm -r {path}" in line
    assert (path / "out" / "a").exists()


def test_a_living_process_whose_start_was_not_known_is_not_gone(tmp_path: Path) -> None:
    path = left(tmp_path, changed(this_process(), started=""))
    assert completed(tmp_path / "out") == []
    assert (path / "out" / "a").exists()


def test_where_proc_shows_another_namespace_nobody_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, look = left(tmp_path, a_dead_process()), os.readlink

    def of_another(link: Any, **words: Any) -> str:
        return "1" if link == "/proc/self" else look(link, **words)

    monkeypatch.setattr(os, "readlink", of_another)
    (line,) = completed(tmp_path / "out")
    assert f"rm -r {path}" in line
    assert path.exists()


def test_what_has_no_journal_stays(tmp_path: Path) -> None:
    path = left(tmp_path, None)
    (line,) = completed(tmp_path / "out")
    assert f"rm -r {path}" in line
    assert path.exists()


def test_what_a_living_process_writes_is_not_mentioned(tmp_path: Path) -> None:
    with begin(tmp_path / "out") as staged:
        assert completed(tmp_path / "other") == []
        assert Path(staged.path).exists()


def test_what_others_have_made_is_not_mentioned(tmp_path: Path) -> None:
    for name in ("notes.partial", "out.node1-5-short.partial", "other.partial"):
        (tmp_path / name).mkdir()
    (tmp_path / "out.node1-5-0123abcd.partial").symlink_to(tmp_path / "notes.partial")
    (line,) = completed(tmp_path / "out")
    assert line.endswith(f"rm -r {tmp_path / 'out.node1-5-0123abcd.partial'}")
    assert {path.name for path in tmp_path.iterdir()} == {
        *("out", "notes.partial", "out.node1-5-short.partial", "other.partial"),
        "out.node1-5-0123abcd.partial",
    }


class TestMarkFiles:
    """A filesystem without extended attributes, too: the mark is a file beside the target."""

    @pytest.fixture(autouse=True)
    def no_attributes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def unknown(*_: Any, **__: Any) -> None:
            raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

        for name in ("setxattr", "getxattr"):
            monkeypatch.setattr(os, name, unknown)

    def test_a_run_that_is_late_marks_nothing(self, tmp_path: Path) -> None:
        other = Identity("1", {}, {"--dp": 5}, {"a": 10})

        def run() -> None:
            with Staging(str(tmp_path / "out"), other, 4) as slow:
                slow.lay([Shell("a", 10, ())])
                with begin(tmp_path / "out") as fast:
                    fast.lay([Shell("a", 10, ())])

        with pytest.raises(TargetExists):
            run()
        assert mark_of(str(tmp_path / "out")) == RUN.mark()
        assert is_complete(str(tmp_path / "out"), RUN)

    def test_the_mark_of_a_run_that_has_just_renamed(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        target = tmp_path / "out"
        with begin(target) as staged:
            staged.lay([Shell("a", 10, ())])
        mark = tmp_path / ".out.zckpt"
        text = mark.read_bytes()
        mark.unlink()
        monkeypatch.setattr(targets.time, "sleep", lambda _: mark.write_bytes(text))
        assert is_complete(str(target), RUN)

    def test_a_target_that_never_gets_its_mark(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(targets, "MARKING", 0.1)
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "a").touch()
        with pytest.raises(TargetExists, match="does not state which run"):
            is_complete(str(tmp_path / "out"), RUN)
