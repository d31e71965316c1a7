"""Every single bit of a `.metadata` of torch, flipped: an error, the same target, or a new warning.

    pytest -m exhaustive tests/safety/test_flips_metadata.py

torch writes no checksum, so only contradictions between the parts show a flip. What `convert`
writes is compared byte by byte, unless `.metadata` says the same as before.
"""

from __future__ import annotations

import random
import shutil
import signal
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import zckpt
from zckpt import errors
from zckpt.files.dcpfile import read_table

from ..conftest import ROOT, texts

DATA = ROOT / "tests" / "data" / "fsdp2-2.13.0-tiny"
SAMPLE = 250
SECONDS = 20  # for one flip, on a busy machine

Flip = tuple[int, int]
"""A byte of the file, and a bit of it."""


@contextmanager
def limited() -> Iterator[None]:
    """Raises TimeoutError in what takes too long."""

    def stop(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def said(run: Path) -> str:
    """Everything in `.metadata` that reading uses, as one text."""
    table = read_table(str(run))
    stated = {key: value for key, value in table.others.items() if key != "storage_meta"}
    return repr((table.items, table.locations, table.paths, stated))


def converted(run: Path, target: Path) -> tuple[dict[str, bytes], set[str]]:
    """The files of the universal checkpoint, and what the report warns of or leaves out."""
    report: dict[str, Any] = zckpt.convert(run, target)
    files = {str(path.relative_to(target)): path for path in target.rglob("*") if path.is_file()}
    remarks = {*texts(report["warnings"]), *texts(report["left_out"])}
    data = {name: path.read_bytes() for name, path in files.items()}
    shutil.rmtree(target)
    return data, remarks


def outcomes(run: Path, target: Path, flips: Iterable[Flip]) -> tuple[Counter[str], list[Flip]]:
    """How many flips ended in which way, and those that gave another target without a word."""
    path = run / ".metadata"
    original = path.read_bytes()
    text, (files, remarks) = said(run), converted(run, target)
    counts: Counter[str] = Counter()
    silent = []
    for place, bit in flips:
        flipped = bytearray(original)
        flipped[place] ^= 1 << bit
        path.write_bytes(flipped)
        try:
            with limited():
                if said(run) == text:
                    counts["identical"] += 1
                    continue
                others, words = converted(run, target)
        except errors.ZckptError:
            counts["error"] += 1
            assert not target.exists()
            continue
        if others == files:
            counts["identical"] += 1
        elif words - remarks:
            counts["warning"] += 1
        else:
            counts["silent"] += 1
            silent.append((place, bit))
    path.write_bytes(original)
    return counts, silent


def every_flip(path: Path) -> list[Flip]:
    return [(place, bit) for place in range(path.stat().st_size) for bit in range(8)]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("os.fsync", lambda _: None)
    return Path(shutil.copytree(DATA, tmp_path / "run"))


def test_no_flip_is_silent(run: Path, tmp_path: Path) -> None:
    flips = random.Random(14).sample(every_flip(run / ".metadata"), SAMPLE)
    counts, silent = outcomes(run, tmp_path / "target", flips)
    assert counts["error"] > SAMPLE * 0.9
    assert not silent


@pytest.mark.exhaustive
@pytest.mark.parametrize("part", range(8))
def test_no_flip_of_all_is_silent(part: int, run: Path, tmp_path: Path) -> None:
    flips = every_flip(run / ".metadata")[part::8]  # one bit of every byte
    counts, silent = outcomes(run, tmp_path / "target", flips)
    print(f"{len(flips)} flips: {dict(counts)}")
    assert not silent


@pytest.mark.exhaustive
def test_a_key_that_one_process_states_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit: the key of a value at the top is the same text in all parts of the pickle.

    If one process saves, the pickle has it once, so nothing contradicts a changed letter in it. The
    value comes along under the changed name.
    """
    monkeypatch.setattr("os.fsync", lambda _: None)
    run = tmp_path / "run"
    state = {"model": {"w": torch.arange(6.0).view(2, 3)}, "epoch": 3}
    dcp.save(state, checkpoint_id=run, no_dist=True)
    text = (run / ".metadata").read_bytes()
    assert text.count(b"epoch") == 1
    start = text.index(b"epoch")
    _, silent = outcomes(run, tmp_path / "target", every_flip(run / ".metadata"))
    assert {place for place, _ in silent} == set(range(start, start + len("epoch")))
