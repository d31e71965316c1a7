"""The run for other sizes, in `.zckpt`: written once, found again, made anew, and removed."""

from __future__ import annotations

import copy
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import zckpt
from zckpt import api
from zckpt.core import version
from zckpt.core.storage.checksum import crc32
from zckpt.errors import NotEnoughSpace, TargetExists, UnsupportedCheckpoint, WrongOption
from zckpt.resume import cache, resuming

from ..conftest import ROOT, Result, given_away, texts
from ..copying.test_journal import without_attributes
from ..processes.conftest import Start, launch, start, until  # noqa: F401
from ..test_resume import files
from .conftest import BESIDE, DAMAGE, OPTIMIZER, TAGS, flip, original, snapshot

pytestmark = pytest.mark.filterwarnings("ignore:the run had 4 data-parallel ranks")
SCRIPT = (
    "import sys, zckpt; path = zckpt.auto_resume(sys.argv[1], dp=int(sys.argv[2])); print(path)"
)


@pytest.fixture(autouse=True)
def let_go() -> Iterator[None]:
    """What this process got in a test does not keep others from it in the next one."""
    yield
    for path in [*cache._held]:
        cache.let_go(path)


def resumed(run: Path, **words: Any) -> Path:
    """The path, after which this process has nothing."""
    path = zckpt.auto_resume(run, **words)
    assert path is not None
    cache.let_go(path)
    return Path(path)


def names(run: Path) -> list[str]:
    return sorted(each.name for each in (run / BESIDE).iterdir() if each.name != cache.LOCK)


@contextmanager
def holder(run: Path, dp: int) -> Iterator[Path]:
    """Another process that got a path, and lives until the end of the block."""
    script = f"{SCRIPT}; sys.stdout.flush(); input()"
    command = [sys.executable, "-W", "ignore", "-c", script, str(run), str(dp)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, env=environment, **pipes) as process:
        assert process.stdout is not None
        yield Path(process.stdout.readline().strip())
        process.communicate("\n")


def test_it_is_what_reshard_writes(run: Path, tmp_path: Path) -> None:
    before = original(run)
    path = zckpt.auto_resume(run, dp=3)
    assert path == str(run / BESIDE / f"{TAGS[-1]}-dp3")
    assert (path.step, path.tag, path.report["written"]) == (7, TAGS[-1], True)
    zckpt.reshard(run, tmp_path / "by-hand", dp=3)
    assert files(Path(path)) == files(tmp_path / "by-hand")
    assert original(run) == before


@pytest.mark.parametrize("verify", ["records", "files"])
def test_a_second_start_writes_nothing(verify: str, run: Path) -> None:
    path = resumed(run, dp=3)
    before = snapshot(run)
    again = zckpt.auto_resume(run, dp=3, verify=verify)  # type: ignore[arg-type]
    assert again is not None
    assert (Path(again), again.report["written"]) == (path, False)
    assert snapshot(run) == before


def unnamed(tag: Path) -> None:
    (tag.parent / "latest").write_text("x")


@pytest.mark.parametrize(
    ("verify", "damage"),
    [
        ("records", DAMAGE["flipped"]),
        ("files", DAMAGE["cut"]),
        ("records", unnamed),
        ("files", unnamed),
    ],
)
def test_a_damaged_one_is_made_anew(verify: str, damage: Callable[[Path], None], run: Path) -> None:
    path = resumed(run, dp=3)
    whole = files(path)
    damage(path / TAGS[-1])
    again = zckpt.auto_resume(run, dp=3, verify=verify)  # type: ignore[arg-type]
    assert again is not None
    assert again.report["written"]
    assert files(Path(again)) == whole


def test_a_damaged_one_that_another_process_has_stays(run: Path) -> None:
    with holder(run, 3) as path:
        flip(path / TAGS[-1] / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt")
        again = zckpt.auto_resume(run, dp=3)
        assert again == f"{path}-2"
        assert path.exists()


def test_one_of_another_source_is_made_anew(run: Path) -> None:
    """A save of the same name, by a run that was set back."""
    path = resumed(run, dp=3)
    before = snapshot(path)
    for file in (run / TAGS[-1]).iterdir():
        os.utime(file)
    assert resumed(run, dp=3) == path
    after = snapshot(path)
    assert {name: data for name, (data, _) in after.items()} == {
        name: data for name, (data, _) in before.items()
    }
    assert after != before


def test_one_of_an_older_zckpt_is_made_anew(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from zckpt.writing import conversion

    with monkeypatch.context() as older:
        older.setattr(conversion, "__version__", "0.0.1")
        path = resumed(run, dp=3)
        before = snapshot(path)
    assert version.__version__ != "0.0.1"
    assert resumed(run, dp=3) == path
    assert snapshot(path) != before


def test_other_options_have_another_name(run: Path) -> None:
    for stage in (1, 0):
        assert resumed(run, dp=3, stage=stage).name == f"{TAGS[-1]}-dp3-zero{stage}"
    assert names(run) == [f"{TAGS[-1]}-dp3-zero0", f"{TAGS[-1]}-dp3-zero1"]
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
    path = zckpt.auto_resume(run, dp=3, ds_config=config)
    assert path is not None
    assert (path.report["sizes"], path[-5:]) == ({"dp": 3, "stage": 3}, "zero3")


def test_the_newest_other_one_stays(run: Path) -> None:
    for dp in (5, 3, 2):
        path = resumed(run, dp=dp)
        time.sleep(0.01)
    assert names(run) == [f"{TAGS[-1]}-dp2", f"{TAGS[-1]}-dp3"]
    report = zckpt.auto_resume(run, dp=6, keep=0).report  # type: ignore[union-attr]
    assert names(run) == [f"{TAGS[-1]}-dp6"]
    assert len(report["removed"]) == 2
    assert not path.exists()


def test_what_a_living_process_has_stays(run: Path) -> None:
    with holder(run, 3) as path:
        for dp in (2, 5, 6):
            resumed(run, dp=dp, keep=0)
        assert path.exists()
        assert names(run) == [f"{TAGS[-1]}-dp3", f"{TAGS[-1]}-dp6"]
    resumed(run, dp=2, keep=0)
    assert names(run) == [f"{TAGS[-1]}-dp2"]


def test_a_scratch_folder_has_one_for_each_run(run: Path, tmp_path: Path) -> None:
    scratch = tmp_path / "scratch"
    path = resumed(run, dp=3, scratch=scratch)
    assert path.parent.parent == scratch
    assert path.parent.name.startswith("out-")
    assert not (run / BESIDE).exists()


def test_a_scratch_folder_for_a_run_with_two_names(run: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(run)
    first = resumed(run, dp=3, scratch=tmp_path / "scratch")
    again = zckpt.auto_resume(tmp_path / "link", dp=3, scratch=tmp_path / "scratch")
    assert again is not None
    assert (Path(again), again.report["written"]) == (first, False)


@pytest.mark.parametrize("inside", [".", "sub", TAGS[0]])
def test_a_scratch_folder_inside_of_the_run(inside: str, run: Path) -> None:
    before = sorted(run.rglob("*"))
    with pytest.raises(WrongOption, match="is inside of"):
        zckpt.auto_resume(run, dp=3, scratch=run / inside)
    assert sorted(run.rglob("*")) == before


# -- what is removed


OTHERS = (
    "precious/a",
    "precious.partial/a",
    "model-dp8/a",
    "model-dp8-2/a",
    "llama-dp64.partial/a",
    "llama-dp64.partial/llama-dp64/a",
    "notes-dp2.partial/journal",
    "mixed-dp2.partial/journal-of-mine",
    "old-dp2.gone.partial/a",
    "file-dp2",
    "file-dp2.partial",
    ".file-dp2.zckpt",
)
"""Files of others in `.zckpt`; their directories have the names that zckpt gives its own."""


def put(folder: Path, elsewhere: Path) -> None:
    """What others have put there, older than all that zckpt writes; links lead `elsewhere`."""
    for name in OTHERS:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"precious {name}")
        if (folder / name).parent != folder:
            os.utime((folder / name).parent, (1, 1))
    (folder / "journal-dp2.partial").mkdir()
    (folder / "journal-dp2.partial" / "journal").symlink_to(elsewhere / "linked-dp4" / "journal")
    for name in ("linked-dp4", "linked-dp4.partial", "linked-dp4.gone.partial"):
        (elsewhere / name).mkdir(parents=True)
        (elsewhere / name / "journal").touch()
        (folder / name).symlink_to(elsewhere / name)


@pytest.mark.parametrize("kind", ["directory", "link", "scratch"])
def test_what_others_have_put_there_stays(kind: str, run: Path, tmp_path: Path) -> None:
    """Neither a name makes it zckpt's, nor a link that leads to it."""
    words: dict[str, Any] = {"scratch": tmp_path / "scratch"} if kind == "scratch" else {}
    if kind == "link":
        (tmp_path / "scratch").mkdir()
        (run / BESIDE).symlink_to(tmp_path / "scratch")
    path = resumed(run, dp=5, **words)
    folder = path.parent
    put(folder, tmp_path / "elsewhere")
    others = {name: data for name, data in files(folder).items() if path.name not in name}
    again = resumed(run, dp=3, keep=0, **words)
    assert not path.exists()
    assert {n: data for n, data in files(folder).items() if again.name not in n} == others
    assert len([*(tmp_path / "elsewhere").rglob("journal")]) == 3


def test_what_lies_at_the_own_name_stays(run: Path) -> None:
    """A directory that zckpt has not written; it writes beside it."""
    (run / BESIDE / f"{TAGS[-1]}-dp3").mkdir(parents=True)
    (run / BESIDE / f"{TAGS[-1]}-dp3" / "a").touch()
    (run / BESIDE / f"{TAGS[-1]}-dp3-2.partial").mkdir()
    (run / BESIDE / f"{TAGS[-1]}-dp3-2.partial" / "a").touch()
    assert resumed(run, dp=3).name == f"{TAGS[-1]}-dp3-3"
    assert len([*(run / BESIDE).rglob("a")]) == 2


def test_what_belongs_to_another_user_stays(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = resumed(run, dp=5)
    (begun := other.with_name("begun-dp5.partial")).mkdir()
    given_away(monkeypatch, other, begun)
    path = resumed(run, dp=3, keep=0)
    assert names(run) == sorted([begun.name, path.name, other.name])


def test_an_unmarked_one_takes_no_place_of_those_that_stay(run: Path) -> None:
    path = resumed(run, dp=5)
    (path.parent / "newer-dp5").mkdir()
    assert resumed(run, dp=3, keep=1).name
    assert path.exists()


@pytest.mark.parametrize("kind", ["link", "pipe", "hard link", "directory"])
def test_a_lock_is_a_file_of_its_own(kind: str, run: Path, tmp_path: Path) -> None:
    (run / BESIDE).mkdir()
    place, other = run / BESIDE / cache.LOCK, tmp_path / "other"
    if kind == "link":
        place.symlink_to(other)
    elif kind == "pipe":
        os.mkfifo(place)
    elif kind == "directory":
        place.mkdir()
    else:
        other.write_text("kept")
        place.hardlink_to(other)
    with pytest.raises((TargetExists, IsADirectoryError), match=cache.LOCK):
        zckpt.auto_resume(run, dp=3)
    assert other.exists() == (kind == "hard link")
    assert names(run) == []


@pytest.mark.parametrize("whose", ["link", "directory"])
def test_a_link_of_another_user_is_refused(
    whose: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (target := tmp_path / "scratch").mkdir()
    (run / BESIDE).symlink_to(target)
    look = os.lstat

    def of_another(path: Any, **words: Any) -> os.stat_result:
        fields = list(look(path, **words))
        fields[4] += str(path) == str(run / BESIDE)
        return os.stat_result(fields)

    if whose == "link":
        monkeypatch.setattr(os, "lstat", of_another)
    else:
        given_away(monkeypatch, target)
    with pytest.raises(
        TargetExists, match="is a link of another user, or leads to another user's directory"
    ):
        zckpt.auto_resume(run, dp=3)
    assert [*target.iterdir()] == []


def test_removals_are_named(run: Path, zckpt: Callable[..., Result]) -> None:
    """Whatever was removed, and why, and also with -q: on stderr, and in the report."""
    path = resumed(run, dp=5)
    shutil.copytree(path, gone := path.with_name("gone-dp5.gone.partial"))
    (begun := path.with_name("begun-dp5.partial")).mkdir()
    ended = zckpt("auto-resume", run, "--dp", 3, "--keep", 0, "--json", "-q")
    assert ended.document["removed"] == [str(begun), str(gone), str(path)]
    for each in (begun, gone, path):
        assert f"removed {each}\n" in ended.err
    cache.let_go(ended.document["path"])
    flip(Path(ended.document["path"]) / TAGS[-1] / OPTIMIZER)
    ended = zckpt("auto-resume", run, "--dp", 3, "--json", "-q")
    assert ended.document["removed"] == [ended.document["path"]]
    assert f"removed {ended.document['path']}\n" in ended.err


class Killed(BaseException):
    """The end of a process at a system call."""


@contextmanager
def killed_at(call: int) -> Iterator[None]:
    """Ends the block at a call that removes or renames, if it comes so far."""
    left = call

    def counted(real: Any) -> Any:
        def called(*words: Any, **more: Any) -> Any:
            nonlocal left
            left -= 1
            if left < 0:
                raise Killed
            return real(*words, **more)

        return called

    with pytest.MonkeyPatch.context() as patch, suppress(Killed):
        for name in ("unlink", "rmdir", "rename"):
            patch.setattr(os, name, counted(getattr(os, name)))
        yield


@pytest.fixture(params=[True, False], ids=["attributes", "mark files"])
def complete(request: pytest.FixtureRequest, run: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A complete directory, on a filesystem with attributes and on one without."""
    if not request.param:
        without_attributes(monkeypatch)
    path = resumed(run, dp=5)
    assert request.param or (path.parent / f".{path.name}.zckpt").is_file()
    return path


@pytest.mark.parametrize("is_written_again", [False, True])
def test_a_kill_while_one_is_removed(
    is_written_again: bool, complete: Path, tmp_path: Path
) -> None:
    """At each call; the next start removes the rest, and not what is complete there by then."""
    folder = complete.parent
    shutil.copytree(folder, tmp_path / "saved")
    whole = files(folder)
    for call in range(100):
        with killed_at(call):
            cache.remove(str(complete))
            break
        if is_written_again:
            shutil.copytree(tmp_path / "saved", folder, dirs_exist_ok=True)
        is_there = complete.exists()
        cache.sweep(str(folder), "")
        assert files(folder) == (whole if is_there else {cache.LOCK: b""})
        shutil.copytree(tmp_path / "saved", folder, dirs_exist_ok=True)
    assert call > 4
    assert [path.name for path in folder.iterdir()] == [cache.LOCK]


def test_a_kill_while_a_begun_one_is_removed(run: Path) -> None:
    """Its journal is removed last, so that it is known until then."""
    (folder := run / BESIDE).mkdir()
    begun = folder / f"{TAGS[-1]}-dp7.partial"
    header = b'{"chunk": 1, "run": {}}'
    for call in range(100):
        (begun / f"{TAGS[-1]}-dp7").mkdir(parents=True)
        for name in (f"{TAGS[-1]}-dp7/a", f"{TAGS[-1]}-dp7/b", "journal-0001", "owner-0011aaff"):
            (begun / name).write_text("x")
        (begun / "journal").write_bytes(b"%08x %s\n" % (crc32(header), header))
        with killed_at(call):
            cache.remove(str(begun))
            break
        assert cache.sweep(str(folder), "") == [str(begun)]
    assert call > 4
    assert [*folder.iterdir()] == []


# -- before anything is read


def refuse(*_: object, **__: object) -> Any:
    raise AssertionError("it reads tensors")


def test_a_read_only_run(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says so before it reads; a folder for scratch is the way out."""
    monkeypatch.setattr(resuming.cache.os, "access", lambda path, mode: str(run) not in path)
    with monkeypatch.context() as before:
        before.setattr(api, "verify", refuse)
        with pytest.raises(UnsupportedCheckpoint, match="cannot write in"):
            zckpt.auto_resume(run, dp=3)
    assert zckpt.auto_resume(run, dp=4) == str(run)
    assert resumed(run, dp=3, scratch=tmp_path / "scratch").exists()


def test_a_run_that_became_read_only(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is there needs not be written."""
    path = resumed(run, dp=3)
    monkeypatch.setattr(resuming.cache.os, "access", lambda *_: False)
    assert resumed(run, dp=3) == path


def test_the_space_is_known_first(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "verify", refuse)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=9000))
    with pytest.raises(NotEnoughSpace, match=r"needs .* kB, but only 9 kB are free"):
        zckpt.auto_resume(run, dp=3)
    assert names(run) == []


def test_sizes_that_the_model_cannot_have(run: Path) -> None:
    with pytest.raises(WrongOption, match="1 process cannot be divided by tp"):
        zckpt.auto_resume(run, pp=2)
    with pytest.raises(WrongOption, match="--dp cannot be 0"):
        zckpt.auto_resume(run, dp=0)
    for words in ({"dp": "4"}, {"dp": 2.0}, {"dp": True}, {"tp": "2"}):
        with pytest.raises(WrongOption, match="cannot be"):
            zckpt.auto_resume(run, **words)  # type: ignore[arg-type]
    for keep in ("1", -1, True):
        with pytest.raises(WrongOption, match="must be a number of directories"):
            zckpt.auto_resume(run, keep=keep)  # type: ignore[arg-type]
    for words in ({"dtype": "bf16"}, {"tag": TAGS[0]}, {"dry_run": True}):
        with pytest.raises(TypeError, match="takes no argument"):
            zckpt.auto_resume(run, dp=3, **words)  # type: ignore[arg-type]


# -- jobs that end, and jobs at once


@pytest.fixture
def in_background(run: Path, start: Start) -> Callable[..., Any]:  # noqa: F811
    """Starts the command for a size; its second portion waits for the file `go`."""
    from zckpt.copying import filling

    from ..processes.conftest import stop_at_second_portion

    def begin(dp: int, go: Path | None = None, *words: object) -> Any:
        def prepare() -> None:
            filling.REGION = 1 << 12
            if go:
                stop_at_second_portion(go)

        return start("auto-resume", run, "--dp", dp, "-q", *words, environment={}, prepare=prepare)

    return begin


def test_a_killed_job_is_continued(
    run: Path, tmp_path: Path, in_background: Callable[..., Any]
) -> None:
    begun = run / BESIDE / f"{TAGS[-1]}-dp3.partial"
    process = in_background(3, tmp_path / "go")
    until(lambda: (begun / "journal").exists() and (begun / "journal").stat().st_size)
    process.send(signal.SIGKILL)
    process.wait()
    inode = begun.stat().st_ino
    seen = []
    reshard = api.reshard

    def noted(*words: Any, **more: Any) -> Any:
        if not more.get("dry_run"):
            seen.append(begun.stat().st_ino)
        return reshard(*words, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(api, "reshard", noted)
        path = resumed(run, dp=3)
    assert seen == [inode]
    zckpt.reshard(run, tmp_path / "by-hand", dp=3)
    assert files(path) == files(tmp_path / "by-hand")
    assert names(run) == [path.name]


def test_what_a_killed_job_began_is_removed_at_another_size(
    run: Path, tmp_path: Path, in_background: Callable[..., Any]
) -> None:
    process = in_background(3, tmp_path / "go")
    until((run / BESIDE / f"{TAGS[-1]}-dp3.partial").exists)
    process.send(signal.SIGKILL)
    process.wait()
    path = resumed(run, dp=2)
    assert names(run) == [path.name]


@pytest.mark.parametrize("other", [3, 2])
def test_a_second_job_waits(
    other: int, run: Path, tmp_path: Path, in_background: Callable[..., Any]
) -> None:
    """At the same size it finds what the first one has written; at another one it writes then."""
    first = in_background(3, tmp_path / "go")
    until((run / BESIDE / f"{TAGS[-1]}-dp3.partial").exists)
    second = in_background(other)
    time.sleep(1.0)
    assert not second.has_ended()
    (tmp_path / "go").touch()
    results: list[Result] = [first.wait(), second.wait()]
    assert [each.code for each in results] == [0, 0], results
    for dp, each in zip((3, other), results, strict=True):
        assert each.out == f"{run / BESIDE / f'{TAGS[-1]}-dp{dp}'}\n"
        assert zckpt.verify(each.out.strip(), run)["equal"]
    assert names(run) == sorted({f"{TAGS[-1]}-dp{dp}" for dp in (3, other)})


def test_a_job_that_finds_it_does_not_wait(
    run: Path, tmp_path: Path, in_background: Callable[..., Any]
) -> None:
    resumed(run, dp=2)
    first = in_background(3, tmp_path / "go")
    until((run / BESIDE / f"{TAGS[-1]}-dp3.partial").exists)
    assert in_background(2).wait().code == 0
    assert not first.has_ended()
    (tmp_path / "go").touch()
    assert first.wait().code == 0


def test_a_filesystem_without_locks(run: Path, no_locks: None) -> None:
    for dp in (3, 2, 3):
        assert resumed(run, dp=dp, keep=0).exists()
    assert names(run) == [f"{TAGS[-1]}-dp2", f"{TAGS[-1]}-dp3"]  # others may have them


def test_jobs_without_locks_do_not_touch_each_other(
    run: Path, tmp_path: Path, in_background: Callable[..., Any], no_locks: None
) -> None:
    """All write at the same time; each size appears once, and nobody writes there after that."""
    jobs = [(dp, in_background(dp, tmp_path / "go")) for dp in (3, 3, 3, 3, 2, 2, 2, 5, 5)]
    until(lambda: len([*(run / BESIDE).glob("*.partial/journal")]) == len(jobs))
    (tmp_path / "go").touch()
    for dp, job in jobs:
        result = job.wait()
        assert (result.code, result.out) == (0, f"{run / BESIDE / f'{TAGS[-1]}-dp{dp}'}\n"), result
    assert names(run) == [f"{TAGS[-1]}-dp{dp}" for dp in (2, 3, 5)]
    for name in names(run):
        zckpt.reshard(run, tmp_path / name, dp=int(name[-1]))
        assert files(run / BESIDE / name) == files(tmp_path / name)


def test_a_job_without_locks_takes_what_another_one_has_written(
    run: Path, tmp_path: Path, in_background: Callable[..., Any], no_locks: None
) -> None:
    slow = in_background(3, tmp_path / "go", "--json")
    until(lambda: [*(run / BESIDE).glob("*.partial/journal")])
    path = resumed(run, dp=3)
    before = snapshot(path)
    (tmp_path / "go").touch()
    report = slow.wait().document
    assert (report["path"], report["written"], report["bytes"]) == (str(path), False, 0)
    assert (snapshot(path), names(run)) == (before, [path.name])


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_job_without_locks_gives_way_to_other_options(
    ranks: int,
    run: Path,
    tmp_path: Path,
    launch: Callable[..., Any],  # noqa: F811
    no_locks: None,
) -> None:
    """What another job has completed meanwhile stays, and this one writes under another name."""
    from zckpt.copying import filling

    from ..processes.conftest import stop_at_second_portion

    def prepare() -> None:
        filling.REGION = 1 << 12
        stop_at_second_portion(tmp_path / "go")

    words = ("auto-resume", run, "--dp", 3, "-q", "--json")
    slow = launch(ranks, *words, preparing=dict.fromkeys(range(ranks), prepare))
    until(lambda: [*(run / BESIDE).glob("*.partial/global_step7-dp3/*")])
    path = resumed(run, dp=3, accept_weights=True)
    before = snapshot(path)
    (tmp_path / "go").touch()
    results = [job.wait() for job in slow]
    assert [result.code for result in results] == [0] * ranks, results
    assert {result.document["path"] for result in results} == {f"{path}-2"}
    assert results[0].document["written"]
    assert snapshot(path) == before
    assert names(run) == [path.name, f"{path.name}-2"]


def test_a_job_without_locks_gives_way_before_it_begins(
    run: Path, no_locks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    reshard = api.reshard

    def late(*about: Any, **words: Any) -> Any:
        if not words.get("dry_run"):
            monkeypatch.setattr(api, "reshard", reshard)
            resumed(run, dp=3, accept_weights=True)
        return reshard(*about, **words)

    monkeypatch.setattr(api, "reshard", late)
    assert resumed(run, dp=3).name == f"{TAGS[-1]}-dp3-2"
    assert names(run) == [f"{TAGS[-1]}-dp3", f"{TAGS[-1]}-dp3-2"]


def test_what_a_killed_job_left_without_locks(
    run: Path, tmp_path: Path, in_background: Callable[..., Any], no_locks: None
) -> None:
    """It is removed on this machine, since its process is gone, and continued by nobody."""
    killed = in_background(3, tmp_path / "go")
    until(lambda: [*(run / BESIDE).glob("*.partial/global_step7-dp3/*")])
    killed.send(signal.SIGKILL)
    killed.wait()
    (begun,) = (run / BESIDE).glob("*.partial")
    report = zckpt.auto_resume(run, dp=2).report  # type: ignore[union-attr]
    assert any(f"{begun} was removed" in line for line in texts(report["warnings"]))
    assert names(run) == [f"{TAGS[-1]}-dp2"]


# -- the command


def test_the_command_prints_the_path_and_nothing_else(
    run: Path, zckpt: Callable[..., Result]
) -> None:
    ended = zckpt("auto-resume", run, "--dp", 3)
    assert (ended.code, ended.out) == (0, f"{run / BESIDE / f'{TAGS[-1]}-dp3'}\n")
    assert "set train_micro_batch_size_per_gpu=8 to keep a global batch of 24" in ended.err
    report = zckpt("auto-resume", run, "--dp", 3, "--json").document
    assert (report["written"], report["step"], report["tag"]) == (False, 7, TAGS[-1])


def test_stage_0_of_the_command(run: Path, zckpt: Callable[..., Result]) -> None:
    assert zckpt("auto-resume", run, "--stage", 0).out.strip().endswith("-dp4-zero0")
    assert zckpt("check", run, "--stage", 0, "--json").document["sizes"] == {"dp": 4, "stage": 0}


def test_the_command_alone_keeps_the_size(run: Path, zckpt: Callable[..., Result]) -> None:
    """It knows of no job; the function in a process alone is the job."""
    assert zckpt("auto-resume", run).out == f"{run}\n"
    assert resumed(run).name == f"{TAGS[-1]}-dp1"


def test_every_rank_of_the_command_prints_the_path(run: Path) -> None:
    """A shell of each rank or node gives its own program the path."""
    from ..processes.conftest import free_port

    place = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    own = {**os.environ, **place, "SLURM_STEP_NUM_TASKS": "2", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "zckpt", "auto-resume", str(run), "-q", "--dp", "2"]
    ranks = [
        subprocess.Popen(
            command, env={**own, "SLURM_PROCID": str(rank)}, stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    printed = [rank.communicate()[0] for rank in ranks]
    assert printed == [f"{run / BESIDE / f'{TAGS[-1]}-dp2'}\n"] * 2


def test_the_command_without_a_checkpoint(tmp_path: Path, zckpt: Callable[..., Result]) -> None:
    for name in ("empty", "nothing"):
        if name == "empty":
            (tmp_path / name).mkdir()
        ended = zckpt("auto-resume", tmp_path / name, "--dp", 3)
        assert (ended.code, ended.out) == (0, "")
    (tmp_path / "file").touch()
    assert zckpt("auto-resume", tmp_path / "file").code == 1


def test_a_path_is_saved_and_sent_as_a_text(run: Path) -> None:
    path = zckpt.auto_resume(run, dp=4)
    sent = pickle.loads(pickle.dumps(path))
    assert (type(sent), sent) == (str, str(run))
    assert copy.copy(path) == str(run)
