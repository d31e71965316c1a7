"""Two stages and two tensor ranks: the bytes of every rank are checked, and none are exchanged."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import zckpt
from zckpt.core.passes import plan
from zckpt.core.passes.plan import Pair
from zckpt.core.storage.records import Record
from zckpt.errors import ZckptError

from ...conftest import ROOT, Once
from ...engines import megatron_layouts

NEOX = megatron_layouts.SEQUENTIAL

RUN = ROOT / "tests/data/zckpt-0.1-pp2_tp2/run"
WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "ranks": {"dp": 3},
    "stages": {"dp": 2, "pp": 1},
    "slices": {"dp": 1, "tp": 1},
    "renamed": {"dp": 2, "tp": 2, "rename": [("norm", "normed")]},
    "weights": {"dp": 3},  # no pipeline: the files of model ranks have weights
}


@pytest.fixture
def run(way: str, once: Once) -> Path:
    """The run that is written in a way; no test may change it."""
    if way != "weights":
        return RUN
    layouts = once("layouts", NEOX, lambda root: (root, megatron_layouts.write(NEOX, root)))
    return Path(layouts[0])


def records(run: Path) -> Iterator[Record]:
    rules = None if run is RUN else "neox"
    return (
        record for record in zckpt.read(run, tp_rules=rules).files.records if record.extent.length
    )


def write(run: Path, target: Path, way: str) -> None:
    options = WAYS[way]
    if options:
        zckpt.reshard(run, target, **options)
    else:
        zckpt.convert(run, target)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "every", [False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["some", "every"]
)
def test_a_flipped_byte_of_any_rank_is_found(
    every: bool, way: str, run: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "run"))
    write(copy, tmp_path / "sound", way)
    lasts = {record.extent.file: record for record in records(run)}
    unseen = []
    for record in records(run) if every else lasts.values():
        path = copy / Path(record.extent.file).relative_to(run)
        place = record.extent.offset + record.extent.length - 1
        sound = path.read_bytes()
        path.write_bytes(sound[:place] + bytes([sound[place] ^ 1]) + sound[place + 1 :])
        try:
            with pytest.raises(ZckptError):
                write(copy, tmp_path / "target", way)
        except pytest.fail.Exception:
            unseen.append((path.name, place))
            shutil.rmtree(tmp_path / "target")
        path.write_bytes(sound)
    assert unseen == []


def exchanged(pairs: list[Pair]) -> list[Pair]:
    """The pairs of a copy, where one second moment of two ranks is exchanged."""
    first: dict[tuple[int, ...], int] = {}
    for number, pair in enumerate(pairs):
        other = first.setdefault(pair.source.shape, number) if is_moment(pair) else number
        if other != number and of_rank(pair) != of_rank(pairs[other]):
            mine, theirs = pair.source, pairs[other].source
            pairs[number] = Pair(theirs, pair.target)
            pairs[other] = Pair(mine, pairs[other].target)
            return pairs
    raise AssertionError("no moments of two ranks have one shape")


def is_moment(pair: Pair) -> bool:
    return pair.target.slot == "exp_avg_sq"


def of_rank(pair: Pair) -> set[str]:
    return {fragment.extent.file for fragment in pair.source.fragments}


@pytest.mark.parametrize("way", WAYS)
def test_exchanged_fragments_of_two_ranks_are_found(
    way: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    join, words = plan.join, {"rename": WAYS[way].get("rename", ())}
    if run is not RUN:
        words["tp_rules"] = "neox"
    write(run, tmp_path / "sound", way)
    assert zckpt.verify(run, tmp_path / "sound", **words)["equal"]
    monkeypatch.setattr(plan, "join", lambda *arguments: exchanged(join(*arguments)))
    write(run, tmp_path / "target", way)
    monkeypatch.undo()
    assert not zckpt.verify(run, tmp_path / "target", **words)["equal"]
