"""A directory in which others have put what is not ours."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from zckpt.core.storage.folder import NO_LOCKS, Folder, has_locks, lock
from zckpt.errors import CorruptCheckpoint, TargetExists

from ..conftest import given_away


@pytest.fixture
def own(tmp_path: Path) -> Folder:
    """The own folder `tmp_path/own`, beside a file `victim` and a folder `home` with a file."""
    for name in ("own", "home"):
        (tmp_path / name).mkdir()
    for name in ("victim", "home/victim"):
        (tmp_path / name).write_text("kept")
    return Folder.at(str(tmp_path)).own_folder(str(tmp_path / "own"))


def plant_link(path: Path) -> None:
    path.symlink_to(path.parent.parent / "victim")


def plant_hard_link(path: Path) -> None:
    path.hardlink_to(path.parent.parent / "victim")


def plant_socket(path: Path) -> None:
    os.chdir(path.parent)
    socket.socket(socket.AF_UNIX).bind(path.name)


PLANTED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "link": (plant_link, "is a link"),
    "dangling link": (lambda path: path.symlink_to("nowhere"), "is a link"),
    "link in a circle": (lambda path: path.symlink_to(path), "is a link"),
    "hard link": (plant_hard_link, "has a second name"),
    "pipe": (os.mkfifo, "is a pipe, a socket or a device"),
    "socket": (plant_socket, "is a pipe, a socket or a device"),
}
CALLS: dict[str, Callable[[Folder, str], Any]] = {
    "read": lambda folder, path: folder.open(path),
    "written": lambda folder, path: folder.open(path, os.O_WRONLY),
    "created": lambda folder, path: folder.open(path, os.O_RDWR | os.O_CREAT),
    "synced": lambda folder, path: folder.sync(path),
    "any": lambda folder, _: folder.refuse_foreign(),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", PLANTED)
def test_what_is_not_ours_is_not_opened(
    kind: str, call: str, own: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # `plant_socket` changes it: a socket's path must be short
    plant, reason = PLANTED[kind]
    plant(tmp_path / "own" / "a")
    with pytest.raises(TargetExists, match=reason) as caught:
        CALLS[call](own, str(tmp_path / "own" / "a"))
    assert str(tmp_path / "own" / "a") in caught.value.message
    assert f"rm -r {tmp_path / 'own'}" in caught.value.hint
    assert (tmp_path / "victim").read_text() == "kept"


@pytest.mark.parametrize("code", [errno.ELOOP, errno.EMLINK])
def test_a_link_is_named_whatever_the_system_says_of_it(
    code: int, own: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FreeBSD says that it has too many links. Other errors stay what they are."""
    real, path = os.open, tmp_path / "own" / "a"
    path.symlink_to("nowhere")

    def fail(name: str, flags: int, *rest: Any, **more: Any) -> int:
        if name == "a":
            raise OSError(code, os.strerror(code), name)
        return real(name, flags, *rest, **more)

    monkeypatch.setattr(os, "open", fail)
    with pytest.raises(TargetExists, match="own/a is a link"):
        own.open(str(path))
    code = errno.EIO
    with pytest.raises(OSError, match=f"Input/output error: '{path}'"):
        own.open(str(path))


@pytest.mark.parametrize("call", CALLS)
def test_a_link_on_the_way_is_not_followed(call: str, own: Folder, tmp_path: Path) -> None:
    (tmp_path / "own" / "a").symlink_to(tmp_path / "home")
    with pytest.raises(TargetExists, match="own/a is a link"):
        CALLS[call](own, str(tmp_path / "own" / "a" / "victim"))
    assert (tmp_path / "home" / "victim").read_text() == "kept"


@pytest.mark.parametrize("name", ["a", "a/b"])
def test_another_users_file_is_refused(
    name: str, own: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own" / "a").mkdir()
    (tmp_path / "own" / "a" / "b").touch()
    given_away(monkeypatch, tmp_path / "own" / name)
    with pytest.raises(TargetExists, match=f"own/{name} belongs to user"):
        own.open(str(tmp_path / "own" / "a" / "b"))
    with pytest.raises(TargetExists, match=f"own/{name} belongs to user"):
        own.refuse_foreign()


def test_another_users_folder_is_no_own_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own").mkdir()
    given_away(monkeypatch, tmp_path / "own")
    with Folder.at(str(tmp_path)) as above:
        before = descriptors()
        with pytest.raises(TargetExists, match="own belongs to user"):
            above.own_folder(str(tmp_path / "own"))
        assert descriptors() == before
    assert not list((tmp_path / "own").iterdir())


def test_a_folder_in_which_we_may_not_write_is_no_own_one(
    own: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refuse(path: str, flags: int, *rest: Any, **more: Any) -> int:
        if flags & os.O_CREAT:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return real(path, flags, *rest, **more)

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(TargetExists, match=r"own belongs to user .*, and you may not write there"):
        Folder.at(str(tmp_path)).own_folder(str(tmp_path / "own"))


def test_users_may_be_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a network filesystem that squashes root, nothing belongs to the user of the process."""
    real = os.fstat

    def squashed(file: int) -> os.stat_result:
        fields = list(real(file))
        fields[stat.ST_UID] = 65534
        return os.stat_result(fields)

    monkeypatch.setattr(os, "fstat", squashed)
    (tmp_path / "own").mkdir()
    with Folder.at(str(tmp_path)) as above, above.own_folder(str(tmp_path / "own")) as own:
        os.close(own.open(str(tmp_path / "own/a/b"), os.O_RDWR | os.O_CREAT))
    assert (tmp_path / "own/a/b").is_file()
    assert sorted(path.name for path in (tmp_path / "own").iterdir()) == ["a"]


def test_it_is_the_same_folder_wherever_its_path_leads(own: Folder, tmp_path: Path) -> None:
    own.refuse_another()
    (tmp_path / "own").rename(tmp_path / "moved")
    (tmp_path / "own").symlink_to("home")
    with own.opened(str(tmp_path / "own" / "victim"), os.O_RDWR | os.O_CREAT) as file:
        os.write(file, b"ours")
    assert (tmp_path / "moved" / "victim").read_text() == "ours"
    assert (tmp_path / "home" / "victim").read_text() == "kept"
    with pytest.raises(TargetExists, match="own was replaced by another program"):
        own.refuse_another()


@pytest.mark.parametrize("name", ["../victim", "a/../../victim", "/etc/passwd", "a\0b"])
def test_paths_outside_are_refused(name: str, own: Folder, tmp_path: Path) -> None:
    path = os.path.join(own.path, name)
    for call in CALLS.values():
        if call is not CALLS["any"]:
            with pytest.raises(CorruptCheckpoint, match="is not below"):
                call(own, path)
    with pytest.raises(CorruptCheckpoint):
        own.name_of(path)


def test_a_tree_is_removed_without_what_its_links_lead_to(own: Folder, tmp_path: Path) -> None:
    top = tmp_path / "own" / "a"
    (top / "b").mkdir(parents=True)
    (top / "b" / "file").touch()
    (top / "b" / "link").symlink_to(tmp_path / "home")
    (top / "pipe").touch()
    own.remove(str(top))
    own.remove(str(top))  # there is nothing any more
    assert not list((tmp_path / "own").iterdir())
    assert (tmp_path / "home" / "victim").read_text() == "kept"


def test_what_can_be_removed_is(
    own: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.unlink

    def refuse(path: str, **more: Any) -> None:
        if path == "a":
            raise OSError(errno.EIO, os.strerror(errno.EIO), path)
        real(path, **more)

    for name in ("a", "b"):
        (tmp_path / "own" / name).touch()
    monkeypatch.setattr(os, "unlink", refuse)
    with pytest.raises(OSError, match=f"Input/output error: '{tmp_path}/own/a'"):
        Folder.at(str(tmp_path)).remove(str(tmp_path / "own"))
    assert [path.name for path in (tmp_path / "own").iterdir()] == ["a"]


def test_what_became_a_link_is_refused_and_the_rest_removed(
    own: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at a folder and the opening of it."""
    (tmp_path / "own" / "a").symlink_to(tmp_path / "home")
    (tmp_path / "own" / "b").touch()
    real = Folder.status

    def before(self: Folder, path: str) -> os.stat_result | None:
        return real(self, str(tmp_path / "home") if path.endswith("own/a") else path)

    with Folder.at(str(tmp_path)) as above:
        monkeypatch.setattr(Folder, "status", lambda _, path: before(above, path))
        with pytest.raises(TargetExists, match="own/a is a link"):
            above.remove(str(tmp_path / "own"))
    assert [path.name for path in (tmp_path / "own").iterdir()] == ["a"]
    assert (tmp_path / "home" / "victim").read_text() == "kept"


def test_errors_name_whole_paths(own: Folder, tmp_path: Path) -> None:
    (tmp_path / "own" / "file").touch()
    for call in (own.open, own.size, own.sync, own.unlink, own.rmdir, own.inner):
        with pytest.raises(FileNotFoundError) as caught:
            call(str(tmp_path / "own" / "missing"))
        assert caught.value.filename == str(tmp_path / "own" / "missing")
    with pytest.raises(NotADirectoryError) as not_a_folder:
        own.open(str(tmp_path / "own" / "file" / "a"))
    assert not_a_folder.value.filename == str(tmp_path / "own" / "file")
    missing, new = str(tmp_path / "own" / "missing"), str(tmp_path / "own" / "new")
    with pytest.raises(FileNotFoundError) as caught:
        own.move(missing, own, new)
    assert (caught.value.filename, caught.value.filename2) == (missing, new)


def test_everything_below_in_order(own: Folder, tmp_path: Path) -> None:
    for name in ("b/d", "a", "b/c", "e"):
        os.close(own.open(str(tmp_path / "own" / name), os.O_CREAT | os.O_RDWR))
    names = [os.path.relpath(path, own.path) for path, _ in own.walk()]
    assert names == ["a", "b", "e", "b/c", "b/d"]


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_nothing_stays_open(own: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A target may have thousands of files, each below folders."""
    path = str(tmp_path / "own" / "a" / "b" / "c")
    before = descriptors()
    for _ in range(3):
        with own.opened(path, os.O_RDWR | os.O_CREAT), own.inner(os.path.dirname(path)) as inner:
            assert descriptors() == before + 2
            assert inner.names() == ["c"]
        assert own.size(path) == 0
        assert len([*own.walk()]) == 3
        own.sync(path)
        own.refuse_foreign()
        own.refuse_another()
        with pytest.raises(FileNotFoundError):
            own.open(f"{tmp_path}/own/a/none/c")
        with Folder.at(str(tmp_path)) as above:
            above.own_folder(str(tmp_path / "own")).close()
    given_away(monkeypatch, tmp_path / "own" / "a", tmp_path / "own" / "a" / "b" / "c")
    with pytest.raises(TargetExists, match="belongs to user"):
        own.open(path)
    with pytest.raises(TargetExists, match="belongs to user"):
        own.own_folder(str(tmp_path / "own" / "a"))
    assert descriptors() == before
    own.close()
    own.close()
    assert descriptors() == before - 1


def test_only_a_new_file_makes_folders(own: Folder, tmp_path: Path) -> None:
    path = str(tmp_path / "own" / "a" / "b")
    with pytest.raises(FileNotFoundError) as caught:
        own.open(path)
    assert caught.value.filename == str(tmp_path / "own" / "a")
    assert own.status(path) is None
    with pytest.raises(FileNotFoundError):
        own.make(path)
    assert own.names() == []
    os.close(own.open(path, os.O_RDWR | os.O_CREAT))
    os.close(own.open(f"{path}2", os.O_RDWR | os.O_CREAT))
    assert [os.path.relpath(found, tmp_path) for found, _ in own.walk()] == [
        "own/a",
        "own/a/b",
        "own/a/b2",
    ]


def test_a_folder_that_is_gone_is_another_one(own: Folder, tmp_path: Path) -> None:
    own.refuse_another()
    os.rename(tmp_path / "own", tmp_path / "moved")
    with pytest.raises(TargetExists, match="was replaced by another program"):
        own.refuse_another()
    (tmp_path / "own").mkdir()
    with pytest.raises(TargetExists, match="was replaced by another program"):
        own.refuse_another()


def test_what_is_to_be_removed_is_the_whole_target(own: Folder, tmp_path: Path) -> None:
    (tmp_path / "own" / "inner").mkdir()
    (tmp_path / "own" / "inner" / "link").symlink_to("nowhere")
    inner = own.own_folder(str(tmp_path / "own" / "inner"))
    with pytest.raises(TargetExists) as caught:
        inner.open(str(tmp_path / "own" / "inner" / "link"))
    assert (caught.value.hint or "").endswith(f"remove it: rm -r {tmp_path}/own")
    inner.close()


def test_names_are_in_order(own: Folder, tmp_path: Path) -> None:
    for name in ("b", "c", "a", "_", "d"):
        (tmp_path / "own" / name).touch()
    assert own.names() == ["_", "a", "b", "c", "d"]


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        Folder.at(str(tmp_path / "file"))


def test_a_file_that_cannot_be_looked_at_is_named(
    own: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And an error without a number keeps its text."""

    def fails(with_number: bool) -> Callable[..., os.stat_result]:
        def fail(*_: Any, **__: Any) -> os.stat_result:
            raise OSError(errno.EIO, os.strerror(errno.EIO)) if with_number else OSError("broken")

        return fail

    path = str(tmp_path / "own" / "a")
    Path(path).touch()
    for call, function in ((own.open, "fstat"), (own.status, "stat")):
        with monkeypatch.context() as patch:
            patch.setattr(os, function, fails(with_number=True))
            with pytest.raises(OSError, match=f"Input/output error: '{path}'"):
                call(path)
            patch.setattr(os, function, fails(with_number=False))
            with pytest.raises(OSError, match=r"^broken$"):
                call(path)


def test_names_in_a_folder(own: Folder) -> None:
    assert own.name_of(own.path) == ""
    assert own.name_of(f"{own.path}/a/../b/c") == "b/c"


def test_a_folder_is_made_once(own: Folder) -> None:
    path = os.path.join(own.path, "a")
    assert own.make(path, 0o700)
    assert not own.make(path)
    assert os.stat(path).st_mode & 0o777 == 0o700


def test_new_files_and_folders_have_the_mode_of_the_umask(own: Folder) -> None:
    before = os.umask(0o026)
    try:
        assert own.make(f"{own.path}/folder")
        os.close(own.open(f"{own.path}/file", os.O_WRONLY | os.O_CREAT))
        with own.opened(f"{own.path}/other", os.O_WRONLY | os.O_CREAT):
            pass
    finally:
        os.umask(before)
    modes = {path.name: oct(path.stat().st_mode & 0o7777) for path in Path(own.path).iterdir()}
    assert modes == {"folder": "0o751", "file": "0o640", "other": "0o640"}


def test_a_file_is_synced(own: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    Path(own.path, "a").touch()
    synced: list[str] = []
    monkeypatch.setattr(
        os, "fsync", lambda file: synced.append(os.readlink(f"/proc/self/fd/{file}"))
    )
    own.sync(f"{own.path}/a")
    own.sync(own.path)
    assert synced == [f"{own.path}/a", own.path]


def test_a_lock_is_that_of_one_opening(own: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    path = os.path.join(own.path, "a")
    Path(path).touch()
    with own.opened(path) as one, own.opened(path) as other:
        assert lock(one)
        assert not lock(other)
        assert not lock(other, where_there_are_none=False)
        assert lock(one, fcntl.LOCK_SH)
        assert lock(other, fcntl.LOCK_SH)


@pytest.mark.parametrize("code", NO_LOCKS, ids=lambda code: errno.errorcode[code])
def test_a_filesystem_without_locks(
    code: int, own: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def has_none(*_: int) -> None:
        raise OSError(code, os.strerror(code))

    path = os.path.join(own.path, "a")
    Path(path).touch()
    assert has_locks(own)
    monkeypatch.setattr(fcntl, "flock", has_none)
    assert not has_locks(own)
    with own.opened(path) as one:
        assert [lock(one, where_there_are_none=known) for known in (True, False)] == [True, False]
        assert lock(one)
    assert os.listdir(own.path) == ["a"]


def test_a_lock_of_which_nobody_can_tell(own: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """CIFS says of a lock that another one has it what others say of permissions."""
    says = [errno.EACCES, errno.EIO]

    def flock(*_: int) -> None:
        raise OSError(says[0], os.strerror(says.pop(0)))

    path = os.path.join(own.path, "a")
    Path(path).touch()
    monkeypatch.setattr(fcntl, "flock", flock)
    with own.opened(path) as one:
        assert not lock(one)
        with pytest.raises(OSError, match="Input/output"):
            lock(one)
