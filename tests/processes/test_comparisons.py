"""Processes share the comparison of complete tensors: replicas of ranks, masters with weights."""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Callable
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt
from zckpt.copying import filling
from zckpt.copying.comparing import Row
from zckpt.copying.sharing import Part
from zckpt.core.comparison import masters
from zckpt.core.passes.full_checks import FullCheck
from zckpt.errors import InconsistentCheckpoint, ZckptError
from zckpt.judging.contents import full_checks
from zckpt.processes.sharing import Processes

from .. import faults
from ..conftest import ROOT, texts
from ..formats.megatron.test_read import ITERATION, copied
from ..formats.megatron.test_read import run as run
from ..test_resume import files
from .conftest import Process, until
from .test_conversion import COPYING, ONE_THREAD, done, ended

Launch = Callable[..., list[Process]]
GRID = ROOT / "tests" / "data" / "zckpt-0.1-pp2_tp2" / "run"
REGION = 256  # bytes
WEIGHT = "decoder.layers.{}.mlp.linear_fc2.weight"
MASTER = "optimizer.state.param.decoder.layers.mlp.linear_fc2.weight"


@pytest.fixture(autouse=True)
def small(small_regions: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Regions of some elements; of each fragment two are compared before the first byte."""
    monkeypatch.setattr(filling, "REGION", REGION)
    monkeypatch.setattr(masters, "FEW", 2)


def check_of(path: Path, replicas: str | None = None) -> FullCheck:
    """The comparison of replicas that a conversion of this checkpoint makes."""
    (check,) = full_checks(zckpt.read(path), replicas, accept_weights=False)
    return check


def noting(log: Path, logs: list[Path]) -> Callable[[], None]:
    """A function that makes a process write down the parts that it compares.

    It waits until every process has compared one.
    """
    log.touch()

    def prepare() -> None:
        compare = Row.compare

        def noted(self: Row, part: Any, *rest: Any) -> Any:
            with log.open("a") as file:
                file.write(f"{self.name} {part.number} {part.start} {part.stop}\n")
            until(lambda: all(each.stat().st_size for each in logs))
            return compare(self, part, *rest)

        Row.compare = noted  # type: ignore[method-assign]

    return prepare


def compared(logs: list[Path]) -> dict[tuple[str, int], list[tuple[int, int]]]:
    """The ranges of elements that all processes have compared, by row and match."""
    ranges: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for line in chain.from_iterable(log.read_text().splitlines() for log in logs):
        row, *numbers = line.split()
        number, start, stop = map(int, numbers)
        ranges.setdefault((row, number), []).append((start, stop))
    return {key: sorted(parts) for key, parts in ranges.items()}


def each_once(logs: list[Path], name: str, check: FullCheck) -> bool:
    """Whether all elements of a check were compared, each in one process."""
    ranges = compared(logs)
    assert {row for row, _ in ranges} == {name}
    for number, match in enumerate(check.matches):
        own = ranges[name, number]
        assert (own[0][0], own[-1][1]) == (0, match.a.numel)
        assert all(one[1] == other[0] for one, other in pairwise(own))
    return len(ranges) == len(check.matches)


def test_replicas_are_compared_once_by_all(tmp_path: Path, launch: Launch) -> None:
    check = check_of(GRID)
    zckpt.convert(GRID, tmp_path / "single", copying=COPYING)
    logs = [tmp_path / f"log-{rank}" for rank in range(3)]
    preparing = {rank: noting(log, logs) for rank, log in enumerate(logs)}
    done(launch(3, "convert", GRID, tmp_path / "shared", *ONE_THREAD, preparing=preparing))
    assert files(tmp_path / "shared") == files(tmp_path / "single")
    assert all(log.stat().st_size for log in logs)
    assert each_once(logs, "copies/", check)


def test_comparisons_of_a_target_are_shared_too(tmp_path: Path, launch: Launch) -> None:
    """A target of one stage gets one of two stages' copies, for each of two tensor ranks."""
    zckpt.reshard(GRID, tmp_path / "single", pp=1, copying=COPYING)
    logs = [tmp_path / f"log-{rank}" for rank in range(2)]
    preparing = {rank: noting(log, logs) for rank, log in enumerate(logs)}
    words = ("reshard", GRID, tmp_path / "shared", "--pp", 1, *ONE_THREAD)
    done(launch(2, *words, preparing=preparing))
    assert files(tmp_path / "shared") == files(tmp_path / "single")
    ranges = compared(logs)
    assert {row for row, _ in ranges} == {"copies/", "copies/1/", "copies/2/"}
    for own in ranges.values():
        assert own[0][0] == 0
        assert all(one[1] == other[0] for one, other in pairwise(own))


def test_parts_share_the_replicas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = check_of(GRID)
    zckpt.convert(GRID, tmp_path / "single", copying=COPYING)
    log, compare = tmp_path / "log", Row.compare

    def noted(self: Row, part: Any, *rest: Any) -> Any:
        with log.open("a") as file:
            file.write(f"{self.name} {part.number} {part.start} {part.stop}\n")
        return compare(self, part, *rest)

    monkeypatch.setattr(Row, "compare", noted)
    counts = []
    for number in (2, 3, 1):
        zckpt.convert(GRID, tmp_path / "out", sharing=Part(number, 3), copying=COPYING)
        counts.append(len(log.read_text().splitlines()))
    assert 0 < counts[0] < counts[1] < counts[2]
    assert each_once([log], "copies/", check)
    assert files(tmp_path / "out") == files(tmp_path / "single")


# -- differences


def drifted(folder: Path) -> tuple[Path, str]:
    """A run in which the last element of one replica differs; the tensor's parameter."""
    run = Path(shutil.copytree(GRID, folder))
    copies = zckpt.read(run).replicas
    copy = [own for own in copies if own.slot == "exp_avg" and own.numel > 4][-1]
    extent = list(copy.fragments)[-1].extent
    with open(extent.file, "r+b") as file:
        file.seek(extent.offset + extent.length - 4)
        file.write(struct.pack("<f", 9.5))
    faults.mend(extent.file)
    return run, copy.parameter


def found_by_rank_1(go: Path) -> dict[int, Callable[[], None]]:
    """Rank 0 has no portion before rank 1 has found a difference, and touched the file `go`."""

    def waits() -> None:
        mine = Processes.mine

        def late(self: Processes, *rest: Any) -> Any:
            until(go.exists)
            yield from mine(self, *rest)

        Processes.mine = late  # type: ignore[method-assign]

    def finds() -> None:
        compare = Row.compare

        def found(self: Row, *rest: Any) -> Any:
            if (difference := compare(self, *rest)) is not None:
                go.touch()
            return difference

        Row.compare = found  # type: ignore[method-assign]

    return {0: waits, 1: finds}


def test_a_difference_that_another_process_finds(tmp_path: Path, launch: Launch) -> None:
    """No target is left, and the sentence is that of one process which compares everything."""
    source, parameter = drifted(tmp_path / "run")
    check = check_of(source)
    check.begin()  # it finds nothing yet
    with pytest.raises(InconsistentCheckpoint) as raised:
        check.compare_all()
    assert f"different replicas of 1 parameter ({parameter}): {parameter}: exp_avg in 1 of" in str(
        raised.value
    )
    preparing = found_by_rank_1(tmp_path / "go")
    words = ("convert", source, tmp_path / "out", *ONE_THREAD, "--json")
    results = ended(launch(2, *words, preparing=preparing))
    assert [item.code for item in results] == [1, 1]
    assert (tmp_path / "go").exists()
    assert not (tmp_path / "out").exists()
    (said,) = (item.document for item in results if item.out)
    assert (said["code"], said["message"]) == ("copies-differ", str(raised.value))
    assert said["hint"].startswith(raised.value.hint)


def test_a_difference_that_is_accepted(tmp_path: Path, launch: Launch) -> None:
    """Rank 0 reports what another process has found, as if it had compared everything."""
    source, _ = drifted(tmp_path / "run")
    (expected,) = texts(check_of(source, "rank0").compare_all())
    preparing = found_by_rank_1(tmp_path / "go")
    words = ("convert", source, tmp_path / "out", *ONE_THREAD, "--json", "--replicas", "rank0")
    report = done(launch(2, *words, preparing=preparing)).document
    assert [line for line in texts(report["warnings"]) if "replicas of" in line] == [expected]
    assert "exp_avg in 1 of" in expected


def refused_parts(source: Path, target: Path, **words: Any) -> set[str]:
    """Codes of the errors of one part, which has the difference; the other parts end well."""
    refused, codes = set(), set()
    for number in (1, 2, 3, 1):
        try:
            report = zckpt.convert(
                source, target, sharing=Part(number, 3), copying=COPYING, **words
            )
        except InconsistentCheckpoint as error:
            refused.add(number)
            codes.add(error.code)
        else:
            assert report["waits_for_parts"]
    assert len(refused) == 1
    assert not target.exists()
    return codes


def test_no_part_completes_replicas_that_differ(tmp_path: Path) -> None:
    source, _ = drifted(tmp_path / "run")
    assert refused_parts(source, tmp_path / "out") == {"copies-differ"}


def test_what_begins_wrong_is_refused_before_the_first_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if it differs in other elements: the sentence counts all."""
    source, _ = drifted(tmp_path / "run")
    check = check_of(source)
    monkeypatch.setattr(masters, "FEW", 1 << 7)
    with pytest.raises(InconsistentCheckpoint, match="exp_avg in 1 of") as early:
        check.begin()
    with pytest.raises(InconsistentCheckpoint) as late:
        check.compare_all()
    assert str(early.value) == str(late.value)
    with pytest.raises(InconsistentCheckpoint):
        zckpt.convert(source, tmp_path / "out", sharing=Part(1, 3), copying=COPYING)
    assert not (tmp_path / "out.partial").exists()


# -- masters that are made from weights


def with_masters(source: Path, target: Path, change: Callable[[torch.Tensor], object]) -> Path:
    """The checkpoint of Megatron-Core with other masters of one stacked weight."""
    parts = [zckpt.load(source, f"{WEIGHT.format(layer)}/master") for layer in (0, 1)]
    tensor = torch.stack(parts)
    change(tensor)
    copied(source / ITERATION, target, **{MASTER: tensor})
    return target


@pytest.mark.filterwarnings("ignore")
def test_wrong_masters_are_found_by_their_beginnings(
    run: Path, tmp_path: Path, launch: Launch
) -> None:
    """The rest is compared once, by all processes; the target is that of one process."""
    source = with_masters(run, tmp_path / "new", torch.Tensor.zero_)
    zckpt.convert(source, tmp_path / "single", masters_from_weights=True, copying=COPYING)
    option, logs = "--masters-from-weights", [tmp_path / f"log-{rank}" for rank in range(2)]
    words = ("convert", source, tmp_path / "shared", option, *ONE_THREAD, "--json")
    preparing = {rank: noting(log, logs) for rank, log in enumerate(logs)}
    report = done(launch(2, *words, preparing=preparing)).document
    assert "the masters of 2 do not round" in texts(report["warnings"])[0]
    assert files(tmp_path / "shared") == files(tmp_path / "single")
    names = [parts for (row, _), parts in compared(logs).items() if row == "masters/"]
    assert all(log.stat().st_size for log in logs)
    assert names
    assert all(one[1] == other[0] for parts in names for one, other in pairwise(parts))


@pytest.mark.filterwarnings("ignore")
def test_a_wrong_master_that_begins_right(run: Path, tmp_path: Path, launch: Launch) -> None:
    """Processes that share the comparison find it too late to drop it; one process drops it."""

    def change(tensor: torch.Tensor) -> None:
        tensor[1, -1, -1] += 1

    source = with_masters(run, tmp_path / "new", change)
    option = "--masters-from-weights"
    words = ("convert", source, tmp_path / "shared", option, *ONE_THREAD, "--json")
    results = ended(launch(2, *words))
    assert [item.code for item in results] == [1, 1]
    (said,) = (item.document for item in results if item.out)
    assert said["code"] == "master-differs"
    assert f"1 weight of {source} is not its rounded master: {WEIGHT.format(1)}" in said["message"]
    assert "--single" in said["hint"]
    assert "masters that may be wrong" not in said["hint"]
    assert not (tmp_path / "shared").exists()
    words = {"masters_from_weights": True}
    assert refused_parts(source, tmp_path / "parts", **words) == {"master-differs"}
    for to in ("universal", "megatron"):  # one process drops other masters: it does not go on
        parts = tmp_path / f"to-{to}"
        assert refused_parts(source, parts, to=to, **words) == {"master-differs"}
        with pytest.raises(ZckptError) as raised:
            zckpt.convert(source, parts, to=to, resume=True, **words)
        assert raised.value.code == "target-not-resumable"
        assert "in several processes" in raised.value.message
        assert not parts.exists()
    report = zckpt.convert(source, tmp_path / "single", masters_from_weights=True)
    assert "the masters of 1 do not round" in texts(report["warnings"])[0]
    assert os.path.exists(tmp_path / "single")
