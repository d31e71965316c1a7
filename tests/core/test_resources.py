"""What a command may use: memory for its threads, processors, and its rank below torchrun."""

from __future__ import annotations

import os
from importlib.util import module_from_spec

import pytest

from zckpt.core.passes import resources
from zckpt.core.passes.resources import Copying, describe, own_rank, processors
from zckpt.errors import WrongOption


class Shown(list[str]):
    """A progress function that keeps what it is told to show."""

    def __call__(self, count: int) -> None:
        """Bytes are not shown."""

    def describe(self, text: str) -> None:
        self.append(text)


def test_what_is_done_is_shown_where_it_can_be() -> None:
    shown = Shown()
    describe(shown, "writing a")
    describe(print, "writing b")
    describe(None, "writing c")
    assert shown == ["writing a"]


def test_every_thread_needs_two_mebibytes() -> None:
    assert Copying(jobs=3, memory=6 << 20).memory == 6 << 20
    with pytest.raises(WrongOption, match="3 jobs need 6 MiB of memory") as error:
        Copying(jobs=3, memory=(6 << 20) - 1)
    assert error.value.hint == "raise --memory, or lower --jobs"


def test_processors_are_those_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    sets = {0: {2, 5, 7}}
    monkeypatch.setattr(os, "sched_getaffinity", sets.__getitem__, raising=False)
    assert processors() == 3


@pytest.mark.parametrize(("known", "number"), [(6, 6), (None, 1)])
def test_processors_where_no_system_tells_the_own_ones(
    known: int | None, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: known)
    assert processors() == number


@pytest.mark.parametrize(("processors", "jobs"), [(1, 2), (3, 3), (4, 4), (500, 4)])
def test_a_few_threads_read_however_many_processors_there_are(
    processors: int, jobs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that the usual memory is enough for them on a machine of any size."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {*range(processors)}, raising=False)
    spec = resources.__spec__
    assert spec is not None
    assert spec.loader is not None
    fresh = module_from_spec(spec)
    spec.loader.exec_module(fresh)
    assert jobs == fresh.READING_JOBS
    assert fresh.Copying(jobs=fresh.READING_JOBS).jobs == jobs


@pytest.mark.parametrize(
    ("rank", "size", "own"),
    [("3", "7", 3), ("3", None, 0), ("3", "", 0), ("3", "x", 0), ("x", "7", 0), ("3", "1", 0)],
)
def test_a_rank_counts_among_others_alone(
    rank: str, size: str | None, own: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", rank)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if size is not None:
        monkeypatch.setenv("WORLD_SIZE", size)
    assert own_rank() == own
