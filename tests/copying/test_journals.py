"""Journals of several processes that write one target."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from zckpt.copying import filling, journals
from zckpt.copying.filling import TargetFile
from zckpt.copying.journal import Identity, Journal, Region
from zckpt.copying.journals import PartJournal, ProcessJournal, regions_of
from zckpt.core.storage.fileio import sync_data
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


def test_a_part_goes_on_with_what_a_single_run_has_written(tmp_path: Path) -> None:
    leader = Journal(folder_at(tmp_path), RUN, 1 << 20)
    leader.add(REGIONS[0])
    leader.close()
    only = part(tmp_path, "1-of-1")
    assert only.regions == {"x": REGIONS[:1]}
    only.add(REGIONS[1])
    assert only.of_all_parts() == REGIONS
    only.close()


def test_a_part_that_a_power_loss_has_ended_begins_again(tmp_path: Path) -> None:
    """What it notes now does not stand behind the damaged line, which would hide it."""
    first = part(tmp_path, "1-of-1")
    first.add(REGIONS[0])
    first.close()
    with open(tmp_path / "journal-1-of-1", "ab") as file:
        file.write(b"00000000 half a li")
    again = part(tmp_path, "1-of-1")
    again.add(REGIONS[1])
    assert again.of_all_parts() == REGIONS
    again.close()


def test_a_part_syncs_what_it_has_noted_before_another_one_completes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    first, second = part(tmp_path, "1-of-2"), part(tmp_path, "2-of-2")
    first.add(REGIONS[0])
    monkeypatch.setattr(journals, "sync_data", lambda file: synced.append(file) or sync_data(file))
    assert first.of_all_parts() is None
    assert synced == [first._file]
    for journal in (first, second):
        journal.close()


def test_a_part_that_ends_after_the_target_is_complete(tmp_path: Path) -> None:
    first, second = part(tmp_path, "1-of-2"), part(tmp_path, "2-of-2")
    assert first.of_all_parts() is None
    assert second.of_all_parts() == []
    (tmp_path / "journal").unlink()
    second.close()
    assert first.of_all_parts() is None
    first.close()


def test_a_part_waits_for_one_that_completes_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    completing = part(tmp_path, "1-of-2")
    assert completing.of_all_parts() == []
    monkeypatch.setattr("zckpt.copying.journals.time.sleep", lambda _: completing.close())
    part(tmp_path, "2-of-2").close()


def test_a_part_does_not_begin_in_a_journal_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another part completes the target between the opening of the journal and the lock."""
    monkeypatch.setattr("zckpt.copying.journals.time.sleep", lambda _: None)
    path, lock = tmp_path / "journal", journals.lock

    def late(file: int, kind: int = fcntl.LOCK_EX) -> bool:
        if path.exists():
            monkeypatch.setattr(journals, "lock", lock)
            path.unlink()
        return lock(file, kind)

    monkeypatch.setattr(journals, "lock", late)
    begun = part(tmp_path, "1-of-2")
    assert path.exists()
    begun.close()


@pytest.mark.parametrize(("chunk", "power"), [(1, 1), (3, 2), (12, 8), (1 << 10, 256)])
def test_all_parts_cut_the_same_regions(
    chunk: int, power: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts that begin at once do not know each other's chunks, here in MiB."""
    monkeypatch.setattr(filling, "REGION", 256 << 20)
    folder = folder_at(tmp_path)
    journal = PartJournal(folder, Identity(), chunk << 20, "1-of-2")
    assert journal.chunk == power << 20
    file = TargetFile(0, folder, "a", 1 << 30, (), journal.chunk)
    assert [region.start for region in file.regions] == list(range(0, 1 << 30, 256 << 20))
    journal.close()


def test_a_part_without_chunks(tmp_path: Path) -> None:
    journal = PartJournal(folder_at(tmp_path), RUN, 0, "1-of-1")
    assert journal.chunk == 0
    journal.close()


def test_what_another_node_has_written_may_be_seen_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network filesystem shows the length first, and the bytes after that."""
    leader = Journal(folder_at(tmp_path), RUN, 1 << 20)
    leader.add(REGIONS[0])
    begun, path = leader.synced(), tmp_path / "journal"
    leader.close()
    text = path.read_bytes()
    path.unlink()
    states = [text[:-1], bytes(len(text)), text]
    monkeypatch.setattr(
        "zckpt.copying.journals.time.sleep", lambda _: path.write_bytes(states.pop(0))
    )
    member = ProcessJournal(folder_at(tmp_path), RUN, "0001", begun)
    assert member.regions == {"x": REGIONS[:1]}
    member.close()


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
        with pytest.raises(ProcessLost, match="does not contain what another process wrote"):
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
