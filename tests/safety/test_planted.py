"""Others put links and files where a target comes about: nothing that they lead to is touched."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import zckpt as package
from zckpt.copying import staging
from zckpt.core.storage.folder import JOURNAL as NAME
from zckpt.errors import TargetExists

from ..conftest import EXAMPLE, Result, given_away, texts

Command = Callable[..., Result]
RESHARD = ("reshard", EXAMPLE, "out", "--dp", 2)
CONTINUED = {"resume": ("--resume",), "part": ("--part", "2/2")}
FORMATS: dict[str, dict[str, Any]] = {
    "universal": {},
    "deepspeed": {"dp": 2},
    "deepspeed-universal": {},
    "dcp": {"dp": 3},
    "gathered": {},
}


def seen(folder: Path) -> dict[str, tuple[Any, ...]]:
    """Everything below a folder: where links lead, what files hold, when something was changed."""
    result = {}
    for path in (folder, *folder.rglob("*")):
        now = path.lstat()
        is_file = stat.S_ISREG(now.st_mode)
        what = os.readlink(path) if path.is_symlink() else is_file and path.read_bytes()
        time = now.st_mtime_ns if is_file else 0  # zckpt creates a file for a moment
        result[str(path.relative_to(folder))] = now.st_ino, now.st_nlink, time, what
    return result


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of the user, beside which zckpt works."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


@pytest.fixture
def partial(home: Path, zckpt: Command) -> Path:
    """The `.partial` of a target whose first part is written."""
    assert zckpt(*RESHARD, "--part", "1/2").code == 0
    return home.parent / "out.partial"


def link(path: Path, home: Path) -> None:
    """The thing is in the user's folder, and a link leads to it."""
    path.rename(home / path.name)
    path.symlink_to(home / path.name)


def hard_link(path: Path, home: Path) -> None:
    (home / path.name).hardlink_to(path)


PLACES = {
    "itself": "",
    "files": "out",
    "folder": "out/global_step7",
    "pointer": "out/latest",
    "file": "out/global_step7/mp_rank_00_model_states.pt",
    "journal": NAME,
    "journal of a part": f"{NAME}-1-of-2",
}
FILES = {"pointer", "file", "journal", "journal of a part"}
PLANTED = [(place, link, "is a link") for place in PLACES]
PLANTED += [(place, hard_link, "has a second name") for place in PLACES if place in FILES]


@pytest.mark.parametrize("command", CONTINUED)
@pytest.mark.parametrize(("place", "plant", "reason"), PLANTED)
def test_what_is_planted_is_refused(
    place: str,
    plant: Callable[[Path, Path], None],
    reason: str,
    command: str,
    partial: Path,
    home: Path,
    zckpt: Command,
) -> None:
    path = partial / PLACES[place]
    plant(path, home)
    before = seen(home), seen(partial)
    ended = zckpt(*RESHARD, *CONTINUED[command])
    assert (ended.code, ended.out) == (1, "")
    assert f"{path} {reason}" in ended.err
    assert f"rm -r {partial}" in ended.err
    assert (seen(home), seen(partial)) == before
    if plant is link:
        path.unlink()
        (home / path.name).rename(path)
    else:
        (home / path.name).unlink()
    assert zckpt(*RESHARD, *CONTINUED[command]).code == 0


@pytest.mark.parametrize("command", CONTINUED)
@pytest.mark.parametrize("place", PLACES)
def test_what_another_user_owns_is_refused(
    place: str, command: str, partial: Path, zckpt: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = partial / PLACES[place]
    before = seen(partial)
    with monkeypatch.context() as patch:
        given_away(patch, path)
        ended = zckpt(*RESHARD, *CONTINUED[command])
    assert ended.code == 1
    assert f"{path} belongs to user {path.stat().st_uid + 1}" in ended.err
    assert seen(partial) == before


COMPLETE = {
    "itself": "",
    "folder": "global_step7",
    "pointer": "latest",
    "file": "global_step7/mp_rank_00_model_states.pt",
}


@pytest.mark.parametrize("command", CONTINUED)
@pytest.mark.parametrize("place", COMPLETE)
def test_a_complete_target_that_another_user_has_prepared(
    place: str, command: str, home: Path, zckpt: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has all files and the mark of this run, but other bytes may be in them."""
    target = home.parent / "out"
    assert zckpt(*RESHARD).code == 0
    with monkeypatch.context() as patch:
        given_away(patch, path := target / COMPLETE[place])
        ended = zckpt(*RESHARD, *CONTINUED[command])
    assert (ended.code, ended.out) == (1, "")
    owner = path.stat().st_uid
    other = f"belongs to user {owner + 1}, your new files to user {owner}"
    assert f"{target} exists, but {COMPLETE[place] or 'it'} {other}" in ended.err
    ended = zckpt(*RESHARD, *CONTINUED[command])
    assert (ended.code, "is complete already" in ended.out) == (0, True)


def test_a_complete_target_on_a_filesystem_that_gives_files_away(
    home: Path, zckpt: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert zckpt(*RESHARD).code == 0
    monkeypatch.setattr(os, "geteuid", lambda: home.stat().st_uid + 1)
    assert "is complete already" in zckpt(*RESHARD, "--resume").out


@pytest.mark.parametrize("command", CONTINUED)
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_partial_that_another_user_has_prepared(
    kind: str, command: str, home: Path, zckpt: Command
) -> None:
    """An empty journal, and the target's directory is a link to the user's files."""
    good = home.parent / "good"
    package.reshard(EXAMPLE, home / "out", dp=2)
    shutil.copytree(home / "out", good)
    (home.parent / "out.partial").mkdir()
    (home.parent / "out.partial" / NAME).touch()
    planted = home.parent / "out.partial" / "out"
    if kind == "link":
        planted.symlink_to(home / "out")
    else:
        os.mkfifo(planted)
    before = seen(home)
    ended = zckpt("reshard", EXAMPLE, "out", "--dp", 4, *CONTINUED[command])
    assert ended.code == 1
    assert f"{planted} is a {kind}" in ended.err
    assert seen(home) == before


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("command", CONTINUED)
def test_a_partial_of_a_real_other_user(command: str, partial: Path, zckpt: Command) -> None:
    for path in (partial, *partial.rglob("*")):
        os.chown(path, 12345, -1)
    before = seen(partial)
    ended = zckpt(*RESHARD, *CONTINUED[command])
    assert f"{partial} belongs to user 12345" in ended.err
    assert seen(partial) == before


@pytest.mark.parametrize("to", FORMATS)
def test_partial_is_replaced_while_it_is_written(to: str, home: Path) -> None:
    """What the run has begun is completed, and nothing is written where the path leads now."""
    partial, moved = home.parent / "out.partial", home.parent / "moved"
    package.convert(EXAMPLE, home.parent / "good", to=to, **FORMATS[to])
    before = {}

    def begin(_: int) -> Callable[[int], None]:
        shutil.copytree(partial, home / "out.partial")
        partial.rename(moved)
        partial.symlink_to(home / "out.partial")
        before.update(seen(home))
        return lambda _: None

    report = package.convert(EXAMPLE, "out", to=to, begin=begin, **FORMATS[to])
    assert any("out.partial could not be removed" in line for line in texts(report["warnings"]))
    assert seen(home) == before
    assert {name: row[-1] for name, row in seen(home.parent / "out").items()} == {
        name: row[-1] for name, row in seen(home.parent / "good").items()
    }


def test_partial_is_replaced_before_its_files_are_read_back(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    partial = home.parent / "out.partial"
    lay = staging.Staging.lay

    def replaced(self: staging.Staging, *rest: Any) -> None:
        lay(self, *rest)
        shutil.copytree(partial, home / "out.partial")
        partial.rename(home.parent / "moved")
        partial.symlink_to(home / "out.partial")

    monkeypatch.setattr(staging.Staging, "lay", replaced)
    with pytest.raises(TargetExists, match="was replaced by another program"):
        package.convert(EXAMPLE, "out")
    assert not (home.parent / "out").exists()


@pytest.mark.parametrize("name", ["global_step7", "global_step7/mp_rank_00_model_states.pt"])
def test_a_link_is_planted_while_files_are_written(name: str, home: Path) -> None:
    before = {}

    def begin(_: int) -> Callable[[int], None]:
        link(home.parent / "out.partial" / "out" / name, home)
        before.update(seen(home))
        return lambda _: None

    with pytest.raises(TargetExists, match=f"{name} is a link"):
        package.reshard(EXAMPLE, "out", dp=2, begin=begin)
    assert seen(home) == before
    assert sorted(path.name for path in home.parent.iterdir()) == ["home"]


def test_a_link_in_one_of_several_checkpoints(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = home.parent / "run"
    for number in (1, 2):
        package.reshard(EXAMPLE, run / f"checkpoint-{number}", dp=2)
        (run / f"checkpoint-{number}" / "trainer_state.json").write_text("{}")
    monkeypatch.setattr(staging, "WORTH_KEEPING", 0.0)

    def progress(_: int) -> None:
        raise KeyboardInterrupt

    options: dict[str, Any] = {"dp": 4, "checkpoints": "all"}
    with pytest.raises(KeyboardInterrupt):
        package.reshard(run, "out", begin=lambda _: progress, **options)
    (inner,) = Path("out.partial/out").glob("*.partial")
    link(inner.absolute(), home)
    before = seen(home)
    with pytest.raises(TargetExists, match=f"{inner} is a link"):
        package.reshard(run, "out", resume=True, **options)
    assert seen(home) == before


def test_others_cannot_look_into_partial(partial: Path, zckpt: Command) -> None:
    """But the target in it has the usual permissions."""
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(partial.stat().st_mode) == 0o700 & ~umask
    assert zckpt(*RESHARD, "--part", "2/2").code == 0
    assert stat.S_IMODE((partial.parent / "out").stat().st_mode) == 0o777 & ~umask
