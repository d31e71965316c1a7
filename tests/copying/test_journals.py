"""Journals of several processes that write one target."""

from __future__ import annotations

from pathlib import Path

import pytest

from zckpt.copying import journals
from zckpt.copying.journal import Identity, Journal, Region
from zckpt.copying.journals import PartJournal, ProcessJournal, regions_of
from zckpt.errors import ProcessLost, TargetExists

from .conftest import folder_at

RUN = Identity("1", {}, {"--dp": 4}, {"x": 100})
REGIONS = [
    Region("x", start, start + 10, [(("file", 0, 0), start, start + 10, 7)]) for start in (0, 10)
]


def part(folder: Path, name: str, run: Identity = RUN) -> PartJournal:
    return PartJournal(folder_at(folder), run, 1 << 20, name)


def test_only_the_last_part_completes(tmp_path: Path) -> None:
    """The first one that asks gives up its lock, so that of two that end now one gets it."""
    first, second = part(tmp_path, "1-of-2"), part(tmp_path, "2-of-2")
    first.add(REGIONS[0])
    second.add(REGIONS[1])
    assert first.of_all_parts() is None
    assert sorted(second.of_all_parts() or (), key=lambda region: region.start) == REGIONS
    assert first.of_all_parts() is None  # while the other one completes the target
    for journal in (first, second):
        journal.close()


def test_a_part_knows_what_others_have_written(tmp_path: Path) -> None:
    first = part(tmp_path, "1-of-2")
    first.add(REGIONS[0])
    second = part(tmp_path, "2-of-2")
    assert second.regions == {"x": REGIONS[:1]}
    with pytest.raises(TargetExists, match="another process is writing this part"):
        part(tmp_path, "1-of-2")
    with pytest.raises(TargetExists, match="other options"):
        part(tmp_path, "3-of-3", Identity("1", {}, {"--dp": 5}, {"x": 100}))
    with pytest.raises(TargetExists, match="writing there now"):
        Journal(folder_at(tmp_path), RUN, 1 << 20)
    for journal in (first, second):
        journal.close()


def test_a_run_takes_over_what_processes_have_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journals, "VISIBLE", 0.0)
    about = folder_at(tmp_path), RUN, 1 << 20
    leader = Journal(*about)
    begun = leader.synced()
    members = [ProcessJournal(*about[:2], f"000{rank}", begun) for rank in (1, 2)]
    for member, region in zip(members, REGIONS, strict=True):
        assert member.chunk == 1 << 20
        member.add(region)
    length, crc = members[0].synced()
    assert regions_of(about[0], "0001", length, crc) == REGIONS[:1]
    for name, size in (("0001", length - 1), ("0001", length + 1), ("0003", length)):
        with pytest.raises(ProcessLost, match="has not what another process wrote"):
            regions_of(about[0], name, size, crc)
    for journal in (leader, *members):
        journal.close()
    again = Journal(*about)
    assert again.regions == {"x": REGIONS}
    again.close()
    assert [path.name for path in tmp_path.iterdir()] == ["journal"]
    last = Journal(*about)
    assert last.regions == {"x": REGIONS}
    last.close()


def test_what_is_taken_over_is_synced_before_it_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    about = folder_at(tmp_path), RUN, 1 << 20
    leader = Journal(*about)
    member = ProcessJournal(*about[:2], "0001", leader.synced())
    member.add(REGIONS[0])
    for journal in (leader, member):
        journal.close()
    path, seen = tmp_path / "journal-0001", []
    monkeypatch.setattr("zckpt.copying.journal.sync_data", lambda _: seen.append(path.exists()))
    again = Journal(*about)
    again.close()
    assert (seen, path.exists()) == ([True], False)


def test_what_is_forgotten_is_not_continued(tmp_path: Path) -> None:
    about = folder_at(tmp_path), RUN, 1 << 20
    leader = Journal(*about)
    leader.add(REGIONS[0])
    member = ProcessJournal(*about[:2], "0001", leader.synced())
    member.add(REGIONS[1])
    leader.forget()
    assert [(path.name, path.stat().st_size) for path in tmp_path.iterdir()] == [("journal", 0)]
    for journal in (leader, member):
        journal.close()


def test_a_process_that_is_still_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zckpt.copying.journal.ENDING", 0.1)
    about = folder_at(tmp_path), RUN, 1 << 20
    leader = Journal(*about)
    member = ProcessJournal(*about[:2], "0001", leader.synced())
    leader.close()
    with pytest.raises(TargetExists, match="writing there now"):
        Journal(*about)
    member.close()
    Journal(*about).close()


def test_a_process_that_is_just_ending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    about = folder_at(tmp_path), RUN, 1 << 20
    leader = Journal(*about)
    member = ProcessJournal(*about[:2], "0001", leader.synced())
    leader.close()
    monkeypatch.setattr("zckpt.copying.journal.time.sleep", lambda _: member.close())
    Journal(*about).close()


def test_a_process_joins_what_an_earlier_run_has_left(tmp_path: Path) -> None:
    """It takes the regions that the journal had when rank 0 began, and none that came later."""
    about = folder_at(tmp_path), RUN, 1 << 20
    leader = Journal(*about)
    leader.add(REGIONS[0])
    begun = leader.synced()
    leader.add(REGIONS[1])
    member = ProcessJournal(*about[:2], "0001", begun)
    assert member.regions == {"x": REGIONS[:1]}
    other = Identity("1", {}, {"--dp": 5}, {"x": 100})
    with pytest.raises(TargetExists, match="other options"):
        ProcessJournal(about[0], other, "0002", begun)
    for journal in (leader, member):
        journal.close()
