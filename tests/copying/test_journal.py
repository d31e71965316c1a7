"""The journal of an unfinished target."""

from __future__ import annotations

import errno
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from zckpt.copying import journal
from zckpt.copying.journal import (
    Identity,
    Journal,
    Region,
    difference,
    is_locked,
    mark_of,
    set_mark,
)
from zckpt.errors import TargetExists

from ..conftest import given_away
from .conftest import folder_at

RUN = Identity("1", {"a.pt": [10, 5], "records": "00"}, {"--dp": 4}, {"x": 100})
REGIONS = [
    Region("x", 0, 10, [(("file", 0, 0), 0, 10, 77), (("checked", 3, 0), 5, 9, 1)]),
    Region("x", 10, 20, [(("file", 0, 0), 10, 20, 78)]),
    Region("y", 0, 4, []),
]


def opened(folder: Path, run: Identity = RUN, chunk: int = 7) -> Journal:
    return Journal(folder_at(folder), run, chunk)


@pytest.fixture
def written(tmp_path: Path) -> Iterator[Path]:
    first = opened(tmp_path)
    assert first.is_new
    for region in REGIONS:
        first.add(region)
    first.close()
    return tmp_path


def test_regions_come_back(written: Path) -> None:
    again = opened(written, chunk=9)
    assert (again.is_new, again.chunk) == (False, 7)
    assert again.regions == {"x": REGIONS[:2], "y": REGIONS[2:]}
    again.close()


def test_a_damaged_line_ends_the_journal(written: Path) -> None:
    """Every cut and every flipped bit: what is read is a beginning of what was written."""
    path = written / journal.JOURNAL
    whole = path.read_bytes()
    variants = [whole[:size] for size in range(len(whole))]
    for place in range(8 * len(whole)):
        data = bytearray(whole)
        data[place // 8] ^= 1 << place % 8
        variants.append(bytes(data))
    seen = set()
    for data in variants:
        path.write_bytes(data)
        again = opened(written)
        regions = [region for listed in again.regions.values() for region in listed]
        assert regions == REGIONS[: len(regions)]
        seen.add((again.is_new, len(regions)))
        again.close()
    assert seen == {(True, 0), (False, 0), (False, 1), (False, 2)}


def test_lines_follow_the_intact_ones(written: Path) -> None:
    path = written / journal.JOURNAL
    path.write_bytes(path.read_bytes()[:-3])
    again = opened(written)
    again.add(REGIONS[2])
    again.close()
    last = opened(written)
    assert last.regions == {"x": REGIONS[:2], "y": REGIONS[2:]}
    last.close()


def test_regions_of_a_lost_file_are_forgotten(
    written: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That is on the disk before the file is made again."""
    path, synced = written / journal.JOURNAL, []
    monkeypatch.setattr(journal, "sync_data", lambda _: synced.append(path.read_bytes()))
    again = opened(written)
    again.begin_again("x")
    assert synced == [path.read_bytes()]
    assert again.regions == {"y": REGIONS[2:]}
    again.add(REGIONS[1])
    again.close()
    last = opened(written)
    assert last.regions == {"x": REGIONS[1:2], "y": REGIONS[2:]}
    last.close()
    assert journal.regions_in([b"", b'00000000 ["z"]\n']) == []  # whose regions another one has


def test_a_journal_is_synced_once_a_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now, synced = [100.0], []
    monkeypatch.setattr("zckpt.copying.journal.time.monotonic", lambda: now[0])
    monkeypatch.setattr(journal, "sync_data", lambda _: synced.append(now[0]))
    begun = opened(tmp_path)
    for now[0] in (100.5, 101.0, 101.1, 101.9, 102.0, 102.2):
        begun.add(REGIONS[0])
    assert synced == [101.1, 102.2]
    data = (tmp_path / journal.JOURNAL).read_bytes()
    assert begun.synced() == (len(data), zlib.crc32(data))
    assert len(synced) == 3
    begun.close()


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "version": ({"version": "2"}, "another version of zckpt"),
    "source": ({"source": {"a.pt": [10, 6], "records": "00"}}, "the source has changed: a.pt"),
    "options": ({"options": {"--dp": 5}}, "other options: --dp 4, now --dp 5"),
    "no option": ({"options": {}}, "other options: --dp 4, now without --dp"),
    "files": ({"files": {"x": 101}}, "other files: x"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_run_is_refused_with_the_reason(written: Path, change: str) -> None:
    fields, reason = CHANGES[change]
    parts = {"version": "1", "source": RUN.source, "options": RUN.options, "files": RUN.files}
    other = Identity(**{**parts, **fields})
    before = (written / journal.JOURNAL).read_bytes()
    with pytest.raises(TargetExists, match=reason):
        opened(written, other)
    assert (written / journal.JOURNAL).read_bytes() == before
    assert difference(RUN.mark(), other.mark()) == reason.partition(":")[0].replace(
        "the source has", "another source, or the source has"
    )


@pytest.mark.parametrize(
    ("before", "now", "words"),
    [
        ({}, {}, None),
        ({"files": {"x": 1, "y": 2}}, {"files": {"y": 2, "x": 1}}, None),
        (
            {"source": {"a": 1, "g": 1, "f": 1, "e": 1, "d": 2, "c": 3}},
            {"source": {"a": 1, "c": 4, "b": 5}},
            "another source, or the source has changed: b, c, d and 3 more",
        ),
        ({"files": {"x": 1}}, {"files": {"x": 2}}, "other files: x"),
        (
            {"options": {"--dp": 4, "--weights-only": True}},
            {"options": {"--dp": 4}},
            "other options: --weights-only, now without --weights-only",
        ),
        ({"options": {}}, {"options": {"--dp": 4}}, "other options: without --dp, now --dp 4"),
        ({}, {"files": {"x": 1}}, "other files"),
        ({"files": {"x": 1}}, {}, "other files"),
        ({"source": "00"}, {"source": "01"}, "another source, or the source has changed"),
    ],
)
def test_how_two_runs_differ(
    before: dict[str, Any], now: dict[str, Any], words: str | None
) -> None:
    assert difference(before, now) == words


def test_a_mark_does_not_depend_on_the_order_of_files() -> None:
    first, second = ({"a": 1, "b": [2]}, {"b": [2], "a": 1})
    assert Identity("1", first).mark() == Identity("1", second).mark()
    assert Identity("1", first).mark() != Identity("1", {"a": 1, "b": [3]}).mark()


def test_a_journal_is_its_users_own(tmp_path: Path) -> None:
    umask = os.umask(0)
    opened(tmp_path).close()
    os.umask(umask)
    assert (tmp_path / journal.JOURNAL).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("is_begun", [False, True])
def test_a_journal_whose_run_has_just_ended(
    is_begun: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That run has removed the file before this one gets its lock; a third one may have begun."""
    right = journal.lock

    def late(file: int) -> bool:
        (tmp_path / journal.JOURNAL).unlink()
        if is_begun:
            (tmp_path / journal.JOURNAL).touch()
        return right(file)

    monkeypatch.setattr(journal, "lock", late)
    with pytest.raises(TargetExists, match="writing there now"):
        opened(tmp_path)


def test_two_runs_do_not_share_a_folder(tmp_path: Path) -> None:
    first, folder = opened(tmp_path), folder_at(tmp_path)
    assert is_locked(folder)
    with pytest.raises(TargetExists, match="another run, which is writing there now"):
        opened(tmp_path)
    first.close()
    assert not is_locked(folder)
    opened(tmp_path).close()


def test_a_link_in_the_place_of_the_journal_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "other").write_text("kept")
    (tmp_path / journal.JOURNAL).symlink_to(tmp_path / "other")
    with pytest.raises(TargetExists, match=f"{journal.JOURNAL} is a link"):
        opened(tmp_path)
    assert (tmp_path / "other").read_text() == "kept"


@pytest.mark.parametrize("attributes", [True, False])
def test_a_complete_target_says_of_which_run_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, attributes: bool
) -> None:
    target = tmp_path / "out"
    target.mkdir()
    assert mark_of(str(target)) == {}
    if not attributes:
        without_attributes(monkeypatch)
    mark(target)
    assert mark_of(str(target)) == RUN.mark()
    assert list(target.iterdir()) == []


def without_attributes(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no attributes here")

    monkeypatch.setattr(os, "setxattr", refuse)
    monkeypatch.setattr(os, "getxattr", refuse)


def mark(target: Path) -> None:
    with folder_at(target.parent) as above, above.inner(str(target)) as inner:
        set_mark(inner, above, str(target), RUN)


@pytest.mark.parametrize("text", ["", "7", "[1]", "{"])
def test_a_mark_is_a_document(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_attributes(monkeypatch)
    (tmp_path / "out").mkdir()
    (tmp_path / ".out.zckpt").write_text(text)
    assert mark_of(str(tmp_path / "out")) == {}


@pytest.mark.parametrize("kind", ["owner", "link", "pipe", "folder"])
def test_a_mark_that_another_user_has_planted_says_nothing(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_attributes(monkeypatch)
    target, file, other = (tmp_path / name for name in ("out", ".out.zckpt", "other"))
    target.mkdir()
    mark(target)
    file.rename(other)
    if kind == "owner":
        other.rename(file)
        given_away(monkeypatch, file)
    elif kind == "link":
        file.symlink_to(other)
    elif kind == "pipe":
        os.mkfifo(file)
    else:
        file.mkdir()
    assert mark_of(str(target)) == {}


def test_a_file_that_is_no_mark_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's own, at the path of a mark: the target has none then."""
    without_attributes(monkeypatch)
    target, file = tmp_path / "out", tmp_path / ".out.zckpt"
    target.mkdir()
    file.write_text("notes of a user")
    mark(target)
    assert (file.read_text(), mark_of(str(target))) == ("notes of a user", {})


@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "protected", "again"])
def test_what_is_planted_at_the_path_of_a_mark(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is replaced, or the target has no mark; nothing that it leads to is changed."""
    without_attributes(monkeypatch)
    target, file, other = (tmp_path / name for name in ("out", ".out.zckpt", "other"))
    target.mkdir()
    other.write_text("kept")
    if kind == "link":
        file.symlink_to(other)
    elif kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        (file / "inner").mkdir(parents=True)
    elif kind == "again":  # as soon as it is removed
        file.touch()
        monkeypatch.setattr(os, "unlink", lambda *_, **__: None)
    else:  # as in a directory with the sticky bit
        file.touch()

        def refuse(*_: object, **__: object) -> None:
            raise PermissionError(errno.EPERM, "no", str(file))

        monkeypatch.setattr(os, "unlink", refuse)
    mark(target)
    assert other.read_text() == "kept"
    assert mark_of(str(target)) == (RUN.mark() if kind in ("link", "pipe") else {})
    assert kind != "folder" or (file / "inner").is_dir()
