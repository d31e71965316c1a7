"""Parts of a run know nothing of each other: any order, any restart, one target in the end."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

import pytest

import zckpt as package
from zckpt.copying.journals import PartJournal
from zckpt.copying.sharing import Part
from zckpt.core.passes.resources import Copying
from zckpt.errors import TargetExists, WrongOption

from ..conftest import Result
from ..test_resume import files
from .conftest import Start, slow_reads, stop_at_second_portion
from .test_conversion import COPYING, ONE_THREAD, SMALL, TARGETS
from .test_failures import wait_for_journals

Command = Callable[..., Result]


@pytest.mark.parametrize("target", ["universal", "zero-3", "dcp", "gathered"])
@pytest.mark.parametrize("order", list(permutations([1, 2, 3]))[::2])
def test_any_order(
    order: tuple[int, ...], target: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    source, out = sources["zero-1"], tmp_path / "out"
    options = TARGETS[target][1]
    package.convert(source, tmp_path / "single", copying=COPYING, **options)
    for number in order:
        assert not out.exists()
        report = package.convert(source, out, sharing=Part(number, 3), copying=COPYING, **options)
        assert report["part"] == f"{number}/3"
        assert report.get("waits_for_parts", False) == (number != order[-1])
    assert files(out) == files(tmp_path / "single")
    assert not (tmp_path / "out.partial").exists()


def test_a_part_that_is_written_twice(
    sources: dict[str, Path], tmp_path: Path, zckpt: Command
) -> None:
    words = ("convert", sources["dcp"], tmp_path / "out", *SMALL, "--part")
    assert "part 1/2 is written" in zckpt(*words, "1/2").out
    again = zckpt(*words, "1/2", "--json").document
    assert again["waits_for_parts"]
    assert "an earlier run had written" in zckpt(*words, "2/2").out
    assert "complete already" in zckpt(*words, "1/2").out
    assert not (tmp_path / "out.partial").exists()


def test_parts_that_end_at_the_same_time(
    sources: dict[str, Path], tmp_path: Path, start: Start
) -> None:
    """However they meet, one of them completes the target, and none fails."""
    package.convert(sources["dcp"], tmp_path / "single", copying=COPYING)
    for turn in range(8):
        out = tmp_path / f"out{turn}"
        words = ("convert", sources["dcp"], out, *SMALL, "--json", "--part")
        parts = [start(*words, f"{number}/4", environment={}) for number in range(1, 5)]
        reports = [part.wait() for part in parts]
        assert [report.code for report in reports] == [0] * 4, [r.err + r.out for r in reports]
        assert files(out) == files(tmp_path / "single")
        assert sum("tensors" in report.document for report in reports) == 1


def test_killed_parts(sources: dict[str, Path], tmp_path: Path, start: Start) -> None:
    """A part that is killed again and again, while others run."""
    package.convert(sources["zero-3"], tmp_path / "single", copying=COPYING)
    chosen = random.Random(3)
    words = ("convert", sources["zero-3"], tmp_path / "out", *SMALL, "--part")
    for _ in range(10):
        parts = [
            start(*words, f"{number}/3", environment={}, prepare=lambda: slow_reads(0.02))
            for number in (1, 2, 3)
        ]
        time.sleep(chosen.uniform(0.05, 0.4))
        for part in parts:
            if not part.has_ended():
                part.send(signal.SIGKILL)
                part.wait()
    parts = [start(*words, f"{number}/3", environment={}) for number in (1, 2, 3)]
    assert [part.wait().code for part in parts] == [0, 0, 0]
    assert files(tmp_path / "out") == files(tmp_path / "single")


def test_another_number_of_parts_goes_on(sources: dict[str, Path], tmp_path: Path) -> None:
    """What is written is written, whoever did it; more memory does not cut other regions."""
    source, out = sources["dcp"], tmp_path / "out"
    package.convert(source, out, sharing=Part(2, 3), copying=COPYING)
    for number in (1, 2):
        package.convert(source, out, sharing=Part(number, 2), copying=Copying(1, 10 << 20))
    package.convert(source, tmp_path / "single", copying=COPYING)
    assert files(out) == files(tmp_path / "single")


def test_resume_without_parts_completes_the_rest(
    sources: dict[str, Path], tmp_path: Path, zckpt: Command
) -> None:
    words = ("convert", sources["dcp"], tmp_path / "out", *SMALL)
    zckpt(*words, "--part", "2/3")
    assert zckpt(*words).code == 1
    assert "an earlier run had written" in zckpt(*words, "--resume").out


def test_a_single_run_is_continued_in_parts(
    sources: dict[str, Path], tmp_path: Path, start: Start, zckpt: Command
) -> None:
    words = ("convert", sources["zero-3"], tmp_path / "out", *SMALL)
    wait = partial(stop_at_second_portion, tmp_path / "go")
    first = start(*words, *ONE_THREAD, environment={}, prepare=wait)
    wait_for_journals(tmp_path / "out.partial")
    first.send(signal.SIGKILL)
    first.wait()
    zckpt(*words, "--part", "1/2")
    assert "an earlier run had written" in zckpt(*words, "--part", "2/2").out


def test_a_single_run_waits_for_no_part(
    sources: dict[str, Path], tmp_path: Path, start: Start, zckpt: Command
) -> None:
    """A part holds the lock, so that nobody else completes or removes what it writes."""
    words = ("convert", sources["zero-3"], tmp_path / "out", *SMALL)
    wait = partial(stop_at_second_portion, tmp_path / "go")
    part = start(*words, *ONE_THREAD, "--part", "1/2", environment={}, prepare=wait)
    wait_for_journals(tmp_path / "out.partial")
    assert "writing there now" in zckpt(*words, "--resume").err
    twice = zckpt(*words, "--part", "1/2")
    assert "another process is writing this part" in twice.err
    (tmp_path / "go").touch()
    assert part.wait().code == 0


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"dtype": "bf16"}, "other options"),
        ({"to": "gathered"}, "other options"),
    ],
)
def test_other_options_are_refused(
    change: dict[str, str], reason: str, sources: dict[str, Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    package.convert(sources["dcp"], out, sharing=Part(1, 2), copying=COPYING)
    before = files(tmp_path)
    with pytest.raises(TargetExists, match=reason):
        package.convert(sources["dcp"], out, sharing=Part(2, 2), copying=COPYING, **change)
    after = files(tmp_path)
    assert {name: data for name, data in after.items() if "journal-2" not in name} == before


def test_another_source_is_refused(sources: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    package.convert(sources["dcp"], out, sharing=Part(1, 2), copying=COPYING)
    with pytest.raises(TargetExists, match="another source"):
        package.convert(sources["zero-1"], out, sharing=Part(2, 2), copying=COPYING)


@pytest.mark.parametrize(
    ("options", "other"),
    [
        (["--to", "dcp"], ["--to", "dcp", "--weights-only"]),
        ([], ["--weights-only"]),
        (["--to", "deepspeed", "--dp", 2], ["--to", "deepspeed", "--dp", 3]),
    ],
    ids=["dcp", "universal", "deepspeed"],
)
def test_parts_of_two_runs_that_begin_at_the_same_time(
    options: list[object],
    other: list[object],
    sources: dict[str, Path],
    tmp_path: Path,
    start: Start,
) -> None:
    """One of them stops; the other run goes on, and its target is that of a single run."""

    def slow() -> None:
        append = PartJournal._append

        def late(self: PartJournal, *about: Any) -> None:
            time.sleep(0.5)
            append(self, *about)

        PartJournal._append = late  # type: ignore[method-assign]

    words = ("convert", sources["universal"], tmp_path / "out", *SMALL)
    runs = [
        start(*words, *more, "--part", f"{number}/2", environment={}, prepare=slow)
        for number, more in ((1, options), (2, other))
    ]
    results = [run.wait() for run in runs]
    assert sorted(result.code for result in results) == [0, 1], results
    (refused,) = [result.err for result in results if result.code]
    assert "cannot be continued: it was begun with other options" in refused
    number, more = (2, options) if results[1].code else (1, other)
    assert start(*words, *more, "--part", f"{number}/2", environment={}).wait().code == 0
    single = start(*words[:2], tmp_path / "single", *SMALL, *more, environment={})
    assert single.wait().code == 0
    assert files(tmp_path / "out") == files(tmp_path / "single")


def test_a_failed_part_removes_nothing(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from zckpt.core.storage import fileio

    out = tmp_path / "out"
    package.convert(sources["dcp"], out, sharing=Part(1, 2), copying=COPYING)
    with monkeypatch.context() as patch:

        def refuse(*_: object) -> None:
            raise OSError(5, "broken")

        patch.setattr(fileio.Writer, "write", refuse)
        with pytest.raises(OSError, match="broken"):
            package.convert(sources["dcp"], out, sharing=Part(2, 2), copying=COPYING)
    package.convert(sources["dcp"], out, sharing=Part(2, 2), copying=COPYING)
    package.convert(sources["dcp"], tmp_path / "single", copying=COPYING)
    assert files(out) == files(tmp_path / "single")


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_says_what_stays(
    code: int,
    sources: dict[str, Path],
    tmp_path: Path,
    zckpt: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from zckpt.core.storage import fileio

    words = ("convert", sources["dcp"], tmp_path / "out", *SMALL)
    partial = tmp_path / "out.partial"

    def full(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(fileio.Writer, "write", full)
        alone = zckpt(*words)
        assert "is full" in alone.err
        assert "partial" not in alone.err
        assert not partial.exists()
        part = zckpt(*words, "--part", "1/2")
        assert part.code == 1
        assert f"{partial} is still there: add --resume, or remove it: rm -r {partial}" in part.err
        assert partial.exists()
    assert "nothing was" not in alone.err + part.err
    assert zckpt(*words, "--resume").code == 0
    assert not partial.exists()


def test_damage_that_a_part_finds_does_not_deny_what_stays(
    sources: dict[str, Path], tmp_path: Path, zckpt: Command
) -> None:
    source = shutil.copytree(sources["zero-3"], tmp_path / "run")
    for path in source.rglob("*optim_states.pt"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    words = ("convert", source, tmp_path / "out", *SMALL, "--part")
    results = [zckpt(*words, f"{number}/2") for number in (1, 2)]
    said = "".join(ended.err for ended in results if ended.code == 1)
    assert "is damaged" in said
    assert "nothing was" not in said
    assert (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("text", ["0/3", "4/3", "1", "a/b", "1/0", "-1/3"])
def test_parts_that_do_not_exist(text: str, example: Path, tmp_path: Path, zckpt: Command) -> None:
    ended = zckpt("convert", example, tmp_path / "out", "--part", text)
    assert ended.code == 2
    assert "--part" in ended.err
    with pytest.raises(WrongOption):
        Part(0, 3)


def test_checkpoints_of_a_run_are_not_shared(example: Path, tmp_path: Path, zckpt: Command) -> None:
    words = ("reshard", example, tmp_path / "out", "--dp", 2, "--checkpoints", "all")
    ended = zckpt(*words, "--part", "1/2")
    assert ended.code == 2
    assert "cannot share --checkpoints" in ended.err
    assert not os.path.lexists(tmp_path / "out.partial")
