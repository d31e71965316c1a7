"""Opening, listing and watching source files: changes, pipes, errors that must not be hidden."""

from __future__ import annotations

import errno
import io
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from zckpt.core.storage import sources
from zckpt.core.storage.byte_sources import Fingerprint
from zckpt.core.storage.fileio import Reader
from zckpt.core.storage.fragments import Extent
from zckpt.errors import CorruptCheckpoint, InconsistentCheckpoint, SourceChanged, notice_of


def fingerprint(path: Path) -> Fingerprint:
    return Fingerprint.of(os.stat(path))


def rewritten(path: Path) -> None:
    """Other bytes of the same length, in the same file."""
    before = path.stat()
    path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))


def longer(path: Path) -> None:
    before = path.stat()
    with path.open("ab") as file:
        file.write(b"more")
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def replaced(path: Path) -> None:
    """Another file of the same size and time."""
    before, other = path.stat(), path.with_name("other")
    other.write_bytes(path.read_bytes())
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.rename(path)


CHANGES = [rewritten, longer, replaced]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "file"
    path.write_bytes(b"0123456789")
    return path


# -- watching


@pytest.mark.parametrize("change", CHANGES)
def test_a_reader_refuses_a_file_that_changed(path: Path, change: Callable[[Path], None]) -> None:
    reader = Reader(fingerprints={str(path): fingerprint(path)})
    reader.read(Extent(str(path), 0, 4), memoryview(bytearray(4)))
    reader.close()
    change(path)
    with pytest.raises(SourceChanged, match=f"{path} changed while it was read"):
        reader.read(Extent(str(path), 0, 4), memoryview(bytearray(4)))


@pytest.mark.parametrize("change", [*CHANGES, os.unlink])
def test_what_changes_is_noticed_in_the_end(path: Path, change: Callable[[Path], None]) -> None:
    read = {str(path): fingerprint(path)}
    with sources.unchanged(read):
        pass
    what = "removed" if change is os.unlink else "changed"
    message = f"{path} .*{what} while it was read"
    with pytest.raises(SourceChanged, match=message), sources.unchanged(read):
        change(path)
    with pytest.raises(SourceChanged), sources.unchanged(read):
        raise CorruptCheckpoint("file-damaged", "these bytes do not fit")


def test_an_error_without_a_change_stays_itself(path: Path) -> None:
    read = {str(path): fingerprint(path)}
    with pytest.raises(CorruptCheckpoint), sources.unchanged(read):
        raise CorruptCheckpoint("file-damaged", "these bytes do not fit")
    with (
        pytest.raises(InconsistentCheckpoint),
        sources.watching(),
        sources.opened(str(path)),
    ):
        raise InconsistentCheckpoint("mixed-saves", "these files do not fit")


@pytest.mark.parametrize("change", CHANGES)
def test_a_watch_compares_every_opening(path: Path, change: Callable[[Path], None]) -> None:
    log = path.with_name("log")
    log.write_bytes(b"a line")
    with sources.watching() as watch:
        for _ in range(2):
            with sources.opened(str(path)), sources.opened(str(log)):
                pass
            longer(log)  # it is no part of the checkpoint
        assert watch.of([str(path)]) == {str(path): fingerprint(path)}
        other = path.with_name("never opened")
        other.touch()
        assert watch.of([str(other)]) == {str(other): fingerprint(other)}
        change(path)
        assert sources.size(str(path))
        with pytest.raises(SourceChanged):
            watch.of([str(path)])


def test_outside_of_a_watch_nothing_is_noted(path: Path) -> None:
    with sources.watching() as watch:
        pass
    with sources.opened(str(path)):
        assert not watch.first


def test_files_are_known_by_name_size_and_time(path: Path) -> None:
    """On all nodes, whose devices and inodes differ."""
    os.utime(path, ns=(0, 1234567890_000000007))
    seen = sources.files_seen(str(path.parent.parent), {str(path): fingerprint(path)})
    assert seen == {f"{path.parent.name}/file": [10, 1234567890_000000007]}


# -- opening and reading


def test_a_file_without_a_fingerprint_is_opened(path: Path) -> None:
    os.close(sources.open_file(str(path), {"another": fingerprint(path)}))


def test_nothing_waits_for_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(CorruptCheckpoint, match=f"{pipe} is not a regular file"):
        sources.open_file(str(pipe))
    assert not sources.is_denied(str(pipe))
    with pytest.raises(CorruptCheckpoint), sources.opened("/dev/zero"):
        pass
    with pytest.raises(CorruptCheckpoint, match="is a directory"), sources.opened(str(tmp_path)):
        pass


def test_a_refused_file_is_closed(tmp_path: Path) -> None:
    count = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CorruptCheckpoint):
        sources.open_file("/dev/zero")
    with pytest.raises(CorruptCheckpoint):
        sources.open_file(str(tmp_path))
    assert len(os.listdir("/proc/self/fd")) == count


def test_a_short_read_goes_on(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pread
    monkeypatch.setattr(os, "pread", lambda file, length, at: real(file, min(length, 3), at))
    with sources.opened(str(path)) as file:
        assert sources.pread(file.fileno(), 8, 1) == b"12345678"
        assert sources.pread(file.fileno(), 8, 6) == b"6789"
        assert sources.pread(file.fileno(), 8, 60) == b""


def test_errors_inside_the_block_name_the_file(path: Path) -> None:
    with pytest.raises(OSError, match=f"{path}") as caught, sources.opened(str(path)):
        raise OSError(errno.EIO, "Input/output error")
    assert caught.value.filename == str(path)
    with pytest.raises(OSError, match="another") as caught, sources.opened(str(path)):
        raise OSError(errno.EIO, "Input/output error", "another")
    assert caught.value.filename == "another"
    with pytest.raises(OSError, match=r"^no number$"), sources.opened(str(path)):
        raise OSError("no number")


def test_a_position_that_cannot_be_asked_for(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python says "not seekable" without a number or a name, whatever the reason was."""

    def fdopen(*_: Any) -> Any:
        raise io.UnsupportedOperation("File or stream is not seekable.")

    monkeypatch.setattr(os, "fdopen", fdopen)
    with pytest.raises(OSError, match="Input/output error") as caught, sources.opened(str(path)):
        pass
    assert caught.value.filename == str(path)


def test_a_reader_names_its_file(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> int:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(OSError, match="Input/output error") as caught:
        Reader().read(Extent(str(path), 0, 4), memoryview(bytearray(4)))
    assert caught.value.filename == str(path)


def test_every_error_of_a_disk_has_its_hint() -> None:
    numbers = (errno.EIO, errno.ENOMEM, errno.EACCES, errno.ESTALE, errno.EMFILE, errno.ENOSPC)
    hints = {notice_of(OSError(number, os.strerror(number))).hint for number in numbers}
    assert len(hints) == len(numbers)
    assert notice_of(OSError("no number")).hint
    assert "ulimit -n" in notice_of(OSError(errno.EMFILE, "")).hint


# -- looking and listing


def test_not_there_is_no_error(path: Path) -> None:
    loop = path.with_name("loop")
    loop.symlink_to(loop)
    for nothing in (path / "below", path.with_name("none"), loop, Path("a" * 300)):
        assert sources.status(str(nothing)) is None
        assert not sources.is_file(str(nothing))
        assert not sources.is_folder(str(nothing))
    assert sources.status("a\0b") is None
    for each, is_file in ((path, True), (path.parent, False)):
        assert sources.is_file(str(each)) == is_file
        assert sources.is_folder(str(each)) != is_file


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE])
def test_what_cannot_be_looked_at_is_an_error(
    path: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str) -> Iterator[os.DirEntry[str]]:
        raise OSError(number, os.strerror(number), name)

    for function in ("stat", "scandir", "listdir"):
        monkeypatch.setattr(os, function, fail)
    calls: list[Callable[[], object]] = [
        lambda: sources.is_file(str(path)),
        lambda: sources.is_folder(str(path)),
        lambda: sources.status(str(path)),
        lambda: sources.size(str(path)),
        lambda: list(sources.walk(str(path))),
    ]
    for call in calls:
        with pytest.raises(OSError, match=os.strerror(number)) as caught:
            call()
        assert (caught.value.errno, caught.value.filename) == (number, str(path))
    if number == errno.EACCES:
        assert sources.is_denied(str(path))
    else:
        with pytest.raises(OSError, match=os.strerror(number)):
            sources.is_denied(str(path))


def test_a_search_passes_by_what_is_gone(tmp_path: Path) -> None:
    """Between the listing of a folder and the look at what is in it."""
    assert sources.is_denied(str(tmp_path / "gone"))


def test_a_search_passes_by_a_folder_that_may_not_be_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(name: str) -> Iterator[os.DirEntry[str]]:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), name)

    assert not sources.is_denied(str(tmp_path))
    monkeypatch.setattr(os, "scandir", refuse)
    assert sources.is_denied(str(tmp_path))


def test_a_walk_is_in_order_and_follows_no_link(tmp_path: Path) -> None:
    for name in ("b/x", "a/c/z", "a/b", "left/out"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    walked = sources.walk(str(tmp_path), lambda path: not path.endswith("left"))
    assert [os.path.relpath(entry.path, tmp_path) for entry in walked] == [
        *("a", "b", "left", "link", "a/b", "a/c", "a/c/z", "b/x")
    ]


def test_each_thread_has_a_watch_of_its_own(path: Path) -> None:
    def other() -> None:
        with sources.opened(str(path)):
            pass

    with sources.watching() as watch:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert not watch.first


@pytest.mark.parametrize("change", CHANGES)
def test_files_that_contradict_each_other_because_one_changed(
    path: Path, change: Callable[[Path], None]
) -> None:
    def read() -> None:
        with sources.watching(), sources.opened(str(path)):
            change(path)
            raise InconsistentCheckpoint("mixed-saves", "they differ")

    with pytest.raises(SourceChanged, match=str(path)) as caught:
        read()
    assert isinstance(caught.value.__cause__, InconsistentCheckpoint)


def test_names_in_pickles_are_noted() -> None:
    sources.note_objects(["of nobody"])
    with sources.watching() as watch:
        sources.note_objects(["a.B"])
        sources.note_objects(["a.B", "a.C"])
    assert watch.objects == {"a.B", "a.C"}


def test_files_stand_in_for_others_inside_the_block_alone() -> None:
    with sources.standing_in(["/a", "/b"]):
        assert sources.is_stand_in("/a")
        assert not sources.is_stand_in("/c")
        with sources.standing_in(["/c"]):
            assert sources.is_stand_in("/c")
        assert sources.is_stand_in("/b")
    assert not sources.is_stand_in("/a")


@pytest.mark.parametrize(("make", "what"), [(os.mkdir, "a directory"), (os.mkfifo, "a pipe")])
def test_what_is_no_file_is_said(make: Callable[[str], None], what: str, tmp_path: Path) -> None:
    make(str(tmp_path / "x"))
    with pytest.raises(CorruptCheckpoint, match=f"not a regular file: it is {what}"):
        sources.open_file(str(tmp_path / "x"))


def test_a_file_that_cannot_be_looked_at_is_named(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: int) -> os.stat_result:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fstat", broken)
        with pytest.raises(OSError, match="error") as caught:
            sources.open_file(str(path))
    assert caught.value.filename == str(path)


def test_a_search_lists_a_folder_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every format asks for its names, and it may have 50,000 files."""
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    listed, real = list[str](), os.scandir

    def scan(path: str) -> Any:
        listed.append(path)
        return real(path)

    monkeypatch.setattr(os, "scandir", scan)

    @sources.looks_again
    def look() -> None:
        assert sorted(sources.names(str(tmp_path))) == ["file", "folder"]
        assert sources.names_but_of_files(str(tmp_path)) == ["folder"]
        assert len(listed) == 1

    look()
    (tmp_path / "later").mkdir()
    listed.clear()
    assert sorted(sources.names_but_of_files(str(tmp_path))) == ["folder", "later"]

    @sources.looks_again
    def fails_once() -> list[str]:
        names = sources.names(str(tmp_path))
        if "late" not in names:
            (tmp_path / "late").mkdir()
            raise FileNotFoundError
        return names

    assert "late" in fails_once()  # what it knew of the folder is forgotten
