"""Runs that are stopped anywhere and continued give the target of a run that was not stopped."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt
from zckpt.copying import copy, filling, journal, staging
from zckpt.core.passes.resources import Copying
from zckpt.errors import Interrupted, TargetExists

from .conftest import Result, fork

MIB = 1 << 20
TARGETS: dict[str, dict[str, Any]] = {
    "universal": {"to": "universal", "max_file_size": 3 * MIB},
    "universal bf16": {"to": "universal", "dtype": "bf16"},
    "dcp": {"to": "dcp", "dp": 3},
    "gathered": {"to": "gathered"},
    "zero-1": {"to": "deepspeed", "dp": 2, "stage": 1},
    "zero-3": {"to": "deepspeed", "dp": 3, "stage": 3},
    "deepspeed-universal": {"to": "deepspeed-universal"},
    "onnxruntime": {"to": "onnxruntime", "dp": 2, "dialect": "l2"},
}
SHAPES = {"embed.weight": (700, 512), "fc.weight": (301, 999), "fc.bias": (301,), "out": (17, 3)}


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 8 MiB in one file, with Adam's states."""
    torch.manual_seed(0)
    model = {name: torch.nn.Parameter(torch.randn(shape)) for name, shape in SHAPES.items()}
    optimizer = torch.optim.AdamW(list(model.values()), lr=0.01)
    sum(parameter.sin().sum() for parameter in model.values()).backward()
    optimizer.step()
    path = tmp_path_factory.mktemp("whole") / "run"
    path.mkdir()
    states = optimizer.state_dict()
    weights = {name: parameter.data for name, parameter in model.items()}
    torch.save({"model": weights, "optimizer": states}, path / "ckpt.pt")
    return path


@pytest.fixture(scope="session")
def sources(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The same checkpoint as files of one kind each."""
    folder = tmp_path_factory.mktemp("sources")
    zckpt.convert(whole, folder / "universal", param_names=list(SHAPES))
    for name in ("zero-1", "zero-3", "dcp"):
        zckpt.convert(folder / "universal", folder / name, **TARGETS[name])
    return {path.name: path for path in folder.iterdir()}


@pytest.fixture(autouse=True)
def small_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(filling, "REGION", MIB)
    monkeypatch.setattr(copy, "UNSYNCED", 2)


def options_of(target: str, jobs: int = 1) -> dict[str, Any]:
    return {**TARGETS[target], "copying": Copying(jobs, memory=2 * jobs * MIB)}


def files(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def killed(source: Path, target: Path, writes: int, options: dict[str, Any]) -> bool:
    """Runs a conversion in a child that dies at a chunk; False if it ended before."""
    child = fork()
    if not child:
        try:
            left, write = writes, filling.Writer.write

            def dying(self: filling.Writer, *rest: Any) -> None:
                nonlocal left
                if not left:
                    os._exit(9)
                left -= 1
                write(self, *rest)

            filling.Writer.write = dying  # type: ignore[method-assign]
            zckpt.convert(source, target, resume=True, **options)
            os._exit(0)
        finally:
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert code in (0, 9)
    return code == 9


def pairs() -> Iterator[Any]:
    """Sources, targets and threads; every target once in the default run."""
    for place, target in enumerate(TARGETS):
        for number, (source, jobs) in enumerate(product(["universal", "zero-3"], [1, 3])):
            marks = () if number == place % 4 else pytest.mark.exhaustive
            yield pytest.param(source, target, jobs, marks=marks)


@pytest.mark.parametrize(("source", "target", "jobs"), list(pairs()))
def test_a_killed_run_is_continued(
    source: str, target: str, jobs: int, sources: dict[str, Path], tmp_path: Path
) -> None:
    """Several kills, then a run to the end: at most a region or two small files are repeated."""
    options = options_of(target, jobs)
    zckpt.convert(sources[source], tmp_path / "good", **options)
    passed: list[int] = []
    while killed(sources[source], tmp_path / "out", 4, options):
        assert not (tmp_path / "out").exists()
        assert len(passed) < 20
        passed.append(0)
    assert passed
    assert files(tmp_path / "out") == files(tmp_path / "good")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["good", "out"]
    assert killed(sources[source], tmp_path / "again", 5, options)
    report = zckpt.convert(sources[source], tmp_path / "again", resume=True, **options)
    assert report["resumed"] >= (5 - jobs - 1) * MIB
    assert zckpt.verify(tmp_path / "again")["equal"]
    assert files(tmp_path / "again") == files(tmp_path / "good")


def interrupted(after: int) -> Callable[[int], Callable[[int], None]]:
    """A `begin` whose progress is interrupted after so many chunks."""

    def progress(_: int) -> None:
        nonlocal after
        after -= 1
        if not after:
            raise KeyboardInterrupt(signal.SIGTERM)

    return lambda _: progress


def test_little_work_is_removed_when_interrupted(sources: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt) as caught:
        zckpt.convert(sources["zero-3"], tmp_path / "out", begin=interrupted(3))
    assert not isinstance(caught.value, Interrupted)
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def partial(sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A target that an interrupt left unfinished, with two regions."""
    monkeypatch.setattr(staging, "WORTH_KEEPING", 0.0)
    target = tmp_path / "out"
    with pytest.raises(Interrupted):
        zckpt.convert(sources["zero-3"], target, begin=interrupted(4), **options_of("universal"))
    assert not target.exists()
    assert (tmp_path / "out.partial" / journal.JOURNAL).is_file()
    return target


def test_interrupted_work_is_kept(partial: Path, sources: dict[str, Path]) -> None:
    options = options_of("universal")
    report = zckpt.convert(sources["zero-3"], partial, resume=True, **options)
    assert report["resumed"] >= 2 * MIB
    zckpt.convert(sources["zero-3"], partial.parent / "good", **options)
    assert files(partial) == files(partial.parent / "good")


def test_without_resume_it_is_refused(partial: Path, sources: dict[str, Path]) -> None:
    with pytest.raises(TargetExists, match="a run was stopped there") as caught:
        zckpt.convert(sources["zero-3"], partial, **options_of("universal"))
    assert "--resume" in caught.value.hint


def test_other_options_are_refused(partial: Path, sources: dict[str, Path]) -> None:
    before = files(partial.parent)
    options = options_of("universal") | {"max_file_size": None}
    with pytest.raises(TargetExists, match="other options: --max-file-size 3145728, now without"):
        zckpt.convert(sources["zero-3"], partial, resume=True, **options)
    options = options_of("universal") | {"to": "dcp"}
    with pytest.raises(TargetExists, match="--to universal, now --to dcp"):
        zckpt.convert(sources["zero-3"], partial, resume=True, **options)
    assert files(partial.parent) == before


def test_a_changed_source_is_refused(partial: Path, sources: dict[str, Path]) -> None:
    file = next(sources["zero-3"].rglob("*optim_states.pt"))
    status = file.stat()
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    try:
        with pytest.raises(TargetExists, match=f"the source has changed: .*{file.name}"):
            zckpt.convert(sources["zero-3"], partial, resume=True, **options_of("universal"))
    finally:
        os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))


def test_fewer_threads_and_less_memory_can_continue(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    options = options_of("universal") | {"copying": Copying(3, memory=24 * MIB)}
    assert killed(sources["zero-3"], tmp_path / "out", 2, options)
    options["copying"] = Copying(1, memory=2 * MIB)
    zckpt.convert(sources["zero-3"], tmp_path / "out", resume=True, **options)
    zckpt.convert(sources["zero-3"], tmp_path / "good", **options)
    assert files(tmp_path / "out") == files(tmp_path / "good")


@pytest.mark.parametrize("kills", [0, 1])
def test_a_region_of_a_lost_file_is_written_again(
    kills: int, partial: Path, sources: dict[str, Path]
) -> None:
    """A power loss may undo the creation of a file whose bytes were synced.

    If the next run is killed before it fills the file again, the file is there with holes.
    """
    folder = Path(f"{partial}.partial") / partial.name
    listed = [path for path in folder.iterdir() if path.stat().st_size > MIB]
    listed[0].unlink()
    os.truncate(listed[1], 100)
    options = options_of("universal")
    for _ in range(kills):
        assert killed(sources["zero-3"], partial, 0, options)
        assert listed[0].stat().st_size > MIB
    zckpt.convert(sources["zero-3"], partial, resume=True, **options)
    zckpt.convert(sources["zero-3"], partial.parent / "good", **options)
    assert files(partial) == files(partial.parent / "good")


@pytest.mark.parametrize("content", [b"", b"00000000 {}\n", b"\0" * 100])
def test_without_a_usable_journal_it_starts_again(
    content: bytes, partial: Path, sources: dict[str, Path]
) -> None:
    folder = Path(f"{partial}.partial")
    (folder / journal.JOURNAL).write_bytes(content)
    (folder / partial.name / "strange").touch()
    report = zckpt.convert(sources["zero-3"], partial, resume=True, **options_of("universal"))
    assert report["resumed"] == 0
    assert not (partial / "strange").exists()


def test_resume_without_anything_to_continue_starts(
    sources: dict[str, Path], tmp_path: Path
) -> None:
    report = zckpt.convert(sources["zero-3"], tmp_path / "out", resume=True)
    assert report["resumed"] == 0
    (tmp_path / "empty").mkdir()
    zckpt.convert(sources["zero-3"], tmp_path / "empty", resume=True)
    assert files(tmp_path / "out") == files(tmp_path / "empty")


def test_a_complete_target_is_left_as_it_is(sources: dict[str, Path], tmp_path: Path) -> None:
    zckpt.convert(sources["zero-3"], tmp_path / "out")

    def seen() -> dict[Path, tuple[int, ...]]:
        """Not the time of the last access: reading changes it."""
        stats = {path: path.stat() for path in tmp_path.rglob("*")}
        return {path: (each.st_ino, each.st_size, each.st_mtime_ns) for path, each in stats.items()}

    before = seen()
    report = zckpt.convert(sources["zero-3"], tmp_path / "out", resume=True)
    assert report["already_complete"]
    assert seen() == before
    with pytest.raises(TargetExists, match="written with other options"):
        zckpt.convert(sources["zero-3"], tmp_path / "out", resume=True, weights_only=True)
    with pytest.raises(TargetExists, match="written with another source"):
        zckpt.convert(sources["dcp"], tmp_path / "out", resume=True)
    (tmp_path / "out" / "master.safetensors").unlink()
    with pytest.raises(TargetExists, match=r"it lacks master\.safetensors"):
        zckpt.convert(sources["zero-3"], tmp_path / "out", resume=True)


def test_a_target_of_nobody_is_refused(sources: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").touch()
    with pytest.raises(TargetExists, match="does not state which run wrote it"):
        zckpt.convert(sources["zero-3"], tmp_path / "out", resume=True)


SCRIPT = """
import signal, sys, time
from zckpt.copying import copy, filling, staging
filling.REGION = 1 << 20
staging.WORTH_KEEPING = {worth}
real = copy._Copy._written
def written(self, *rest):
    region = real(self, *rest)
    print("chunk", file=sys.stderr, flush=True)
    time.sleep(0.2)
    return region
copy._Copy._written = written
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background of a shell
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored below nohup
from zckpt.cli import main
main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_prints_the_command_that_continues(
    number: int, sources: dict[str, Path], tmp_path: Path, zckpt: Callable[..., Result]
) -> None:
    words = ["convert", str(sources["zero-3"]), str(tmp_path / "an out"), "--memory", "2MiB", "-j1"]
    running = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(worth=0.0), *words],
        stderr=subprocess.PIPE,
        text=True,
    )
    assert running.stderr is not None
    for _ in range(4):
        running.stderr.readline()
    running.send_signal(number)
    _, err = running.communicate(timeout=60)
    assert running.returncode == 128 + number
    last = err.splitlines()[-1]
    assert last.startswith("Hint: continue with: zckpt convert ")
    assert last.endswith(f"'{tmp_path}/an out' --memory 2MiB -j1 --resume")
    ended = zckpt(*words, "--resume")
    assert ended.code == 0
    assert "an earlier run had written" in ended.out


def test_a_second_run_is_refused_while_the_first_one_writes(
    sources: dict[str, Path], tmp_path: Path, zckpt: Callable[..., Result]
) -> None:
    words = ["convert", str(sources["zero-3"]), str(tmp_path / "out"), "--memory", "2MiB", "-j1"]
    running = subprocess.Popen(
        [sys.executable, "-c", SCRIPT.format(worth=10.0), *words], stderr=subprocess.PIPE, text=True
    )
    assert running.stderr is not None
    assert any(line == "chunk\n" for line in running.stderr)  # behind the warnings
    for more in ([], ["--resume"]):
        ended = zckpt(*words, *more)
        assert ended.code == 1
        assert "another run" in ended.err
        assert "writing there now" in ended.err
    running.communicate(timeout=60)
    assert running.returncode == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_several_checkpoints_of_a_run_are_continued(
    sources: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    for number in (1, 2):
        zckpt.reshard(sources["zero-3"], run / f"checkpoint-{number}", dp=2)
        (run / f"checkpoint-{number}" / "trainer_state.json").write_text("{}")
    options: dict[str, Any] = {"dp": 3, "checkpoints": "all", "copying": Copying(1, 2 * MIB)}
    zckpt.reshard(run, tmp_path / "good", **options)
    monkeypatch.setattr(staging, "WORTH_KEEPING", 0.0)
    calls = 0

    def progress(_: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 13:
            raise KeyboardInterrupt(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        zckpt.reshard(run, tmp_path / "out", begin=lambda _: progress, **options)
    assert not (tmp_path / "out").exists()
    assert (tmp_path / "out.partial").exists()
    times = {p: p.stat().st_mtime_ns for p in (tmp_path / "out.partial/out").rglob("*.pt")}
    time.sleep(0.01)
    zckpt.reshard(run, tmp_path / "out", resume=True, **options)
    assert files(tmp_path / "out") == files(tmp_path / "good")
    first = tmp_path / "out" / "checkpoint-1"
    kept = {p.relative_to(tmp_path / "out.partial/out"): t for p, t in times.items()}
    assert any(
        kept.get(p.relative_to(tmp_path / "out")) == p.stat().st_mtime_ns
        for p in first.rglob("*.pt")
    )
    report = zckpt.reshard(run, tmp_path / "out", resume=True, **options)
    assert report["already_complete"]
    with pytest.raises(TargetExists):
        zckpt.reshard(run, tmp_path / "out", resume=True, **{**options, "dp": 4})
    (tmp_path / "empty").mkdir()
    zckpt.reshard(run, tmp_path / "empty", resume=True, **options)
    assert files(tmp_path / "empty") == files(tmp_path / "good")
    shutil.rmtree(tmp_path / "out" / "checkpoint-2")
    with pytest.raises(TargetExists, match="but it lacks checkpoint-2") as caught:
        zckpt.reshard(run, tmp_path / "out", resume=True, **options)
    assert caught.value.hint
