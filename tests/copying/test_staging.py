"""Directories that appear whole or not at all."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zckpt.copying import staging
from zckpt.copying.journal import Identity, Journal, Region, mark_of
from zckpt.copying.journals import PartJournal
from zckpt.copying.sharing import Part, Sharing
from zckpt.copying.staging import Staging, joined
from zckpt.core.checkpoint.manifest import Sibling
from zckpt.core.passes.layout import Shell
from zckpt.core.storage.fileio import save, write_all
from zckpt.core.storage.folder import Folder
from zckpt.errors import Interrupted, TargetExists

from ..conftest import given_away, texts
from .conftest import folder_at


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


def test_neighbors_are_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writes = []

    def noted(file: int, data: memoryview, offset: int) -> None:
        writes.append((offset, bytes(data)))
        write_all(file, data, offset)

    monkeypatch.setattr(staging, "write_all", noted)
    monkeypatch.setattr(staging, "NEAR", 4)
    parts = ((2, b"ab"), (4, b"c"), (8, b"d"), (13, b"ef"))
    with Staging(str(tmp_path / "out")) as staged:
        staged.lay([Shell("file", 16, parts)])
    assert [each for each in writes if each[1]] == [(2, b"abc\0\0\0d"), (13, b"ef")]
    assert (tmp_path / "out/file").read_bytes() == b"\0\0abc\0\0\0d\0\0\0\0ef\0"


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
    assert all("is complete" in warning for warning in texts(staged.warnings))


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
        staged.lay([Shell("plain", 1, ())])
        source = str(tmp_path / "source")
        staged.lay_beside([("sibling", Sibling("sibling", source, 1))])
        staged.put("sibling", source)
        staged.root.rmdir(str(tmp_path / "out.partial" / "out" / ".zckpt"))
    modes = {path.name: oct(path.stat().st_mode & 0o7777) for path in (tmp_path / "out").iterdir()}
    assert modes == {
        "private": "0o600",
        "group": "0o640",
        "plain": "0o644",
        "sibling": "0o640",
    }


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


RUN = Identity("1", {}, {"--dp": 4}, {"a": 10})
REGIONS = [
    Region("a", start, start + 4, [(("file", 0, 0), start, start + 4, 7)]) for start in (0, 4)
]


def begin(target: Path, **options: Any) -> Staging:
    return Staging(str(target), RUN, 4, **options)


def stop(run: Staging, work: Callable[[Staging], None] = lambda _: None) -> None:
    """Ctrl-C, after this work."""
    with run as staged:
        work(staged)
        raise KeyboardInterrupt


@pytest.fixture
def stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A target of which two regions were written, and then Ctrl-C came."""
    monkeypatch.setattr(staging, "WORTH_KEEPING", 0.0)

    def work(staged: Staging) -> None:
        staged.lay([Shell("a", 10, ((0, b"abcd"),))])
        assert staged.journal.is_new
        for region in REGIONS:
            staged.journal.add(region)

    with pytest.raises(Interrupted):
        stop(begin(tmp_path / "out"), work)
    assert names(tmp_path) == [
        "out.partial",
        "out.partial/journal",
        "out.partial/out",
        "out.partial/out/a",
    ]
    return tmp_path / "out"


def test_what_others_must_not_touch_is_our_own(tmp_path: Path) -> None:
    with begin(tmp_path / "out") as staged:
        assert Path(staged.partial).stat().st_mode & 0o777 == 0o700
        assert staged.resumed == 0


def test_a_run_goes_on(stopped: Path) -> None:
    with begin(stopped, resume=True) as staged:
        assert staged.journal.regions == {"a": REGIONS}
        assert (staged.journal.is_new, staged.resumed) == (False, 8)
        staged.lay([Shell("a", 10, ((8, b"z"),))])
    assert (stopped / "a").read_bytes() == b"abcd\0\0\0\0z\0"
    assert names(stopped.parent) == ["out", "out/a"]


@pytest.mark.parametrize("work", [0.0, 10.0])
def test_a_run_that_goes_on_is_kept_at_once(
    work: float, stopped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "WORTH_KEEPING", work)
    before = names(stopped.parent)
    with pytest.raises(Interrupted):
        stop(begin(stopped, resume=True))
    assert names(stopped.parent) == before


def test_without_resume_it_is_refused_and_left_alone(stopped: Path) -> None:
    before = names(stopped.parent)
    with pytest.raises(TargetExists, match=r"out\.partial exists"), begin(stopped):
        pytest.fail("entered")
    other = Identity("1", {}, {"--dp": 5}, {"a": 10})
    with (
        pytest.raises(TargetExists, match="other options"),
        Staging(str(stopped), other, 4, resume=True),
    ):
        pytest.fail("entered")
    assert names(stopped.parent) == before


@pytest.mark.parametrize("size", [None, 3, 7, 8])
def test_regions_of_a_file_that_was_lost_are_written_again(size: int | None, stopped: Path) -> None:
    """Of one that is too short too: a power loss may leave it so."""
    path = stopped.parent / "out.partial" / "out" / "a"
    path.unlink()
    if size is not None:
        path.write_bytes(bytes(size))
    left = []
    with pytest.raises(Interrupted):
        stop(begin(stopped, resume=True), lambda staged: left.append(staged.resumed))
    with begin(stopped, resume=True) as staged:
        left.append(staged.resumed)
    assert left == [8 if size == 8 else 0] * 2


def test_files_that_the_journal_has_forgotten_are_removed(stopped: Path) -> None:
    os.truncate(stopped.parent / "out.partial" / "journal", 0)
    with begin(stopped, resume=True) as staged:
        assert (staged.journal.is_new, names(Path(staged.path))) == (True, [])


@pytest.mark.parametrize("name", ["journal", "journal-of-mine"])
def test_a_file_with_the_name_of_a_journal_is_no_journal(name: str, tmp_path: Path) -> None:
    """It is neither emptied nor removed, and neither is what lies beside it."""
    partial = tmp_path / "out.partial"
    (partial / "out").mkdir(parents=True)
    for path in (partial / name, partial / "out" / "a"):
        path.write_text("notes of a user")
    with (
        pytest.raises(TargetExists, match="it has no journal of zckpt"),
        begin(tmp_path / "out", resume=True),
    ):
        pytest.fail("entered")
    assert (partial / name).read_text() == (partial / "out" / "a").read_text() == "notes of a user"


def test_a_run_that_fails_removes_what_an_earlier_one_wrote(stopped: Path) -> None:
    with pytest.raises(ValueError, match="fault"), begin(stopped, resume=True):
        raise ValueError("fault")
    assert names(stopped.parent) == []


@pytest.mark.parametrize(("work", "kept"), [(0.0, True), (10.0, False)])
def test_an_interrupt_at_the_end(
    work: float, kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(staging, "WORTH_KEEPING", work)
    with (
        pytest.raises(KeyboardInterrupt) as raised,
        begin(tmp_path / "out", before_rename=interrupt) as staged,
    ):
        staged.lay([Shell("a", 10, ())])
    assert isinstance(raised.value, Interrupted) is kept
    assert names(tmp_path)[:1] == (["out.partial"] if kept else [])


def test_a_run_without_an_identity_cannot_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "WORTH_KEEPING", 0.0)
    with pytest.raises(KeyboardInterrupt) as raised:
        stop(Staging(str(tmp_path / "out")))
    assert not isinstance(raised.value, Interrupted)
    assert names(tmp_path) == []


def test_the_journal_forgets_before_files_are_removed(
    stopped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill may end the removal."""
    sizes: list[int] = []

    def remove(folder: Folder, _: str) -> None:
        sizes.append(os.path.getsize(os.path.join(folder.path, "journal")))

    monkeypatch.setattr(Folder, "remove", remove)
    with pytest.raises(ValueError, match="fault"), begin(stopped, resume=True):
        raise ValueError("fault")
    assert sizes == [0]


def test_a_file_beside_the_checkpoint_takes_the_place_of_an_earlier_one(
    stopped: Path, tmp_path: Path
) -> None:
    (tmp_path / "source").write_bytes(b"new")
    sibling = Sibling("a", str(tmp_path / "source"), 3)
    with begin(stopped, resume=True) as staged:
        staged.lay_beside([("a", sibling)])
        assert (tmp_path / "out.partial" / "out" / "a").stat().st_size == 10
        (tmp_path / "out.partial" / "out" / ".zckpt" / "a").write_bytes(b"new")
        assert staged.put("a", sibling.path) == str(tmp_path / "out.partial" / "out" / "a")
        staged.root.rmdir(str(tmp_path / "out.partial" / "out" / ".zckpt"))
    assert (stopped / "a").read_bytes() == b"new"


def test_a_rename_that_another_directory_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def rename(*_: object, **__: object) -> None:
        (tmp_path / "out").mkdir()
        raise OSError(errno.ENOTEMPTY, "other")

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(OSError, match="other"), begin(tmp_path / "out") as staged:
        staged.lay([Shell("a", 1, ())])
    assert names(tmp_path) == ["out"]


def test_a_rename_whose_answer_was_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network filesystem has renamed, and reports an error."""
    right = os.rename

    def rename(source: str, target: str, **folders: int) -> None:
        right(source, target, **folders)
        raise OSError(errno.ENOENT, "lost")

    monkeypatch.setattr(os, "rename", rename)
    with begin(tmp_path / "out") as staged:
        staged.lay([Shell("a", 1, ())])
    assert names(tmp_path) == ["out", "out/a"]
    assert mark_of(str(tmp_path / "out")) == RUN.mark()


@pytest.mark.parametrize("is_new", [True, False])
def test_a_failure_at_the_beginning_removes_no_earlier_work(
    is_new: bool, stopped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = names(stopped.parent)

    def fail(*_: object) -> None:
        raise OSError("broken")

    monkeypatch.setattr(Folder, "sync", fail)
    target = stopped.parent / "new" if is_new else stopped
    with pytest.raises(OSError, match="broken"), begin(target, resume=True):
        pytest.fail("entered")
    assert names(stopped.parent) == before


def test_what_is_not_ours_is_left_alone(stopped: Path) -> None:
    (stopped.parent / "out.partial" / "notes").touch()
    before = names(stopped.parent)
    with pytest.raises(TargetExists), begin(stopped, resume=True):
        pytest.fail("entered")
    assert names(stopped.parent) == before


def test_files_of_another_user_are_left_alone(
    stopped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_away(monkeypatch, stopped.parent / "out.partial" / "out" / "a")
    before = names(stopped.parent)
    with pytest.raises(TargetExists), begin(stopped, resume=True):
        pytest.fail("entered")
    assert names(stopped.parent) == before


@pytest.mark.parametrize("was_there", [False, True])
def test_a_folder_without_a_journal_is_removed(
    was_there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no files, whichever run of this user made it."""
    if was_there:
        (tmp_path / "out.partial").mkdir()

    def fail(*_: object) -> None:
        raise OSError("broken")

    if was_there:
        monkeypatch.setattr(staging, "Journal", fail)
    else:  # it gets a journal, which cannot be written
        monkeypatch.setattr(Journal, "_append", fail)
    with pytest.raises(OSError, match="broken"), begin(tmp_path / "out", resume=True):
        pytest.fail("entered")
    assert names(tmp_path) == []


def test_an_empty_folder_of_another_user_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out.partial").mkdir()
    given_away(monkeypatch, tmp_path / "out.partial")
    with pytest.raises(TargetExists, match="belongs to"), begin(tmp_path / "out", resume=True):
        pytest.fail("entered")
    assert names(tmp_path) == ["out.partial"]


def test_the_journal_of_a_run_that_has_just_begun_is_left_alone(tmp_path: Path) -> None:
    """It has no files yet."""
    partial = tmp_path / "out.partial"
    partial.mkdir(0o700)
    other = Journal(folder_at(partial), RUN, 4)
    with pytest.raises(TargetExists, match="another run"), begin(tmp_path / "out", resume=True):
        pytest.fail("entered")
    assert names(tmp_path) == ["out.partial", "out.partial/journal"]
    other.close()


def test_what_is_shared_is_not_removed(tmp_path: Path) -> None:
    class Shared(Sharing):
        is_alone = False

        def begin(self, journal: Journal) -> None:
            begun.append(journal)

    begun: list[Journal] = []

    def fail(is_shared: bool) -> None:
        with begin(tmp_path / "out", sharing=Shared()) as staged:
            staged.lay([Shell("a", 10, ())])
            if is_shared:
                staged.share()
                assert begun == [staged.journal]
            raise ValueError("fault")

    with pytest.raises(ValueError, match="fault"):
        fail(False)
    assert names(tmp_path) == []
    with pytest.raises(ValueError, match="fault"):
        fail(True)
    assert names(tmp_path / "out.partial") == ["journal", "out", "out/a"]


def test_a_target_within_an_unfinished_one(tmp_path: Path) -> None:
    with begin(tmp_path / "out") as outer:
        outer.lay([Shell("inner/a", 1, ())])
        (Path(outer.path) / "b").mkdir()
        with begin(Path(outer.path) / "b", above=outer.root) as staged:
            assert staged.above is outer.root
            staged.lay([Shell("c", 1, ())])
        assert names(Path(outer.path)) == ["b", "b/c", "inner", "inner/a"]
    assert names(tmp_path / "out") == ["b", "b/c", "inner", "inner/a"]


class TestParts:
    """Two parts of a run, which know nothing of each other."""

    def part(self, target: Path, number: int) -> Staging:
        return begin(target, resume=True, sharing=Part(number, 2))

    @pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
    def test_a_part_that_fails_removes_nothing(
        self, error: type[BaseException], tmp_path: Path
    ) -> None:
        def fail() -> None:
            with self.part(tmp_path / "out", 1) as staged:
                staged.lay([Shell("a", 10, ())])
                staged.journal.add(REGIONS[0])
                raise error

        with pytest.raises(Interrupted if error is KeyboardInterrupt else error):
            fail()
        assert names(tmp_path / "out.partial") == ["journal", "journal-1-of-2", "out", "out/a"]
        with self.part(tmp_path / "out", 2) as staged:
            assert staged.resumed == 4
            staged.postpone()

    def test_the_last_part_completes(self, tmp_path: Path) -> None:
        with self.part(tmp_path / "out", 1) as staged:
            staged.lay([Shell("a", 10, ((0, b"abcd"),))])
            staged.postpone()
        assert not (tmp_path / "out").exists()
        with self.part(tmp_path / "out", 2) as staged:
            staged.lay([Shell("a", 10, ())])
        assert names(tmp_path) == ["out", "out/a"]
        assert (tmp_path / "out/a").read_bytes()[:4] == b"abcd"
        with pytest.raises(TargetExists, match="out exists"), self.part(tmp_path / "out", 1):
            pytest.fail("entered")
        assert names(tmp_path) == ["out", "out/a"]

    def test_another_part_has_completed_meanwhile(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def late(*about: Any) -> PartJournal:
            (tmp_path / "out").mkdir()
            (tmp_path / "out" / "a").touch()
            return PartJournal(*about)

        monkeypatch.setattr(staging, "PartJournal", late)
        with pytest.raises(TargetExists, match="out exists"), self.part(tmp_path / "out", 1):
            pytest.fail("entered")
        assert names(tmp_path) == ["out", "out/a"]

    def test_a_part_that_cannot_begin_leaves_the_journals_of_others(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("zckpt.copying.journals.COMPLETING", -1.0)
        partial = tmp_path / "out.partial"
        partial.mkdir(0o700)
        other = Journal(folder_at(partial), RUN, 4)
        with pytest.raises(TargetExists, match="another run"), self.part(tmp_path / "out", 1):
            pytest.fail("entered")
        assert names(tmp_path) == ["out.partial", "out.partial/journal"]
        other.close()

    def test_files_that_another_part_has_laid_stay(self, stopped: Path) -> None:
        os.truncate(stopped.parent / "out.partial" / "journal", 0)
        with self.part(stopped, 2) as staged:
            assert names(Path(staged.path)) == ["a"]
            staged.postpone()

    def test_folders_are_synced_before_others_look(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        synced: list[str] = []
        right = os.fsync

        def fsync(file: int) -> None:
            synced.append(os.path.relpath(os.readlink(f"/proc/self/fd/{file}"), tmp_path))
            right(file)

        with self.part(tmp_path / "out", 1) as staged:
            monkeypatch.setattr(os, "fsync", fsync)
            staged.lay([Shell("x/a", 10, ())])
            assert synced == ["out.partial/out/x", "out.partial/out"]
            staged.postpone()

    def test_another_process_joins(self, tmp_path: Path) -> None:
        with begin(tmp_path / "out") as staged:
            staged.lay([Shell("a", 10, ())])
            with joined(str(tmp_path / "out")) as (folder, root):
                assert [folder.path, root.path] == [staged.partial, staged.path]
                assert root.size(os.path.join(root.path, "a")) == 10
