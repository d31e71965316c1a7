"""A line a minute about a pass over bytes."""

from __future__ import annotations

import threading
import time

import pytest

from zckpt.core.passes import pace
from zckpt.core.passes.pace import Line, Pace, lasting, telling

GB = 10**9


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What time it is, in seconds."""
    now = [0.0]
    monkeypatch.setattr(pace.time, "monotonic", lambda: now[0])
    return now


def test_a_line(clock: list[float]) -> None:
    counting = Pace("verify out").begin(98 * GB)
    clock[0] = 60.0
    counting(12 * GB)
    assert str(counting.line()) == "12 of 98 GB, 200 MB/s, 7 min left"
    counting.describe("checking fc1.weight/master")
    clock[0] = 120.0
    assert str(counting.line()) == (
        "12 of 98 GB, 0 B/s, 14 min left; checking fc1.weight/master"  # it stands still
    )


def test_a_second_pass_begins_anew(clock: list[float]) -> None:
    counting = Pace("reshard out to resumed")
    assert str(counting.line()) == "0 s so far; no tensor was read yet"
    counting.begin(GB)(GB)
    clock[0] = 10.0
    counting.begin(2 * GB)
    clock[0] = 20.0
    counting(500_000_000)
    line = counting.line()
    assert (line.done, line.total, line.bytes_per_second) == (500_000_000, 2 * GB, 50_000_000)
    assert (line.seconds, line.seconds_left) == (20.0, 30.0)
    assert str(line) == "500 MB of 2 GB, 50 MB/s, 30 s left"


def test_nothing_moves_yet(clock: list[float]) -> None:
    counting = Pace("verify out").begin(GB)
    clock[0] = 60.0
    assert str(counting.line()) == "0 B of 1 GB, 0 B/s"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (89, "89 s"), (91, "2 min"), (420, "7 min"), (7500, "2 h 5 min")],
)
def test_times(seconds: float, text: str) -> None:
    assert lasting(seconds) == text


def lines_of(at_once: bool, seconds: float) -> list[Line]:
    lines: list[Line] = []
    with telling("verify out", lines.append, at_once=at_once) as counting:
        counting.begin(10)(5)
        time.sleep(seconds)
    return lines


def test_the_first_line_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pace, "FIRST", 0.05)
    monkeypatch.setattr(pace, "EVERY", 0.05)
    first, second, *_ = lines_of(at_once=False, seconds=0.5)
    assert str(first) == f"verify out, on {first.host}, process {first.process}"
    assert str(second).startswith("5 of 10 B, ")


def test_a_short_command_says_nothing() -> None:
    assert lines_of(at_once=False, seconds=0.01) == []
    assert [line.event for line in lines_of(at_once=True, seconds=0.01)] == ["begin"]


def test_the_thread_ends_with_the_command() -> None:
    lines_of(at_once=True, seconds=0.0)
    assert not [each for each in threading.enumerate() if each.name == "zckpt-pace"]


def test_without_a_thread_the_command_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert len(lines_of(at_once=True, seconds=0.0)) == 1
