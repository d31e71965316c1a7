"""Calls to a store that hangs, or is gone, end."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from zckpt.errors import ProcessLost
from zckpt.nodes.calls import Calls

from .conftest import until


class Hanging:
    def __init__(self) -> None:
        self.end = threading.Event()

    def add(self, key: str, count: int) -> int:
        self.end.wait()
        return 0


class Gone:
    end = threading.Event()

    def add(self, key: str, count: int) -> int:
        raise RuntimeError("Broken pipe. Exception raised from recv\nframe #0: ...")


def lost(reason: str) -> ProcessLost:
    return ProcessLost(f"rank 0 is lost: {reason}")


@pytest.mark.parametrize(
    ("store", "message"),
    [(Hanging(), "is lost: no answer for 0 s"), (Gone(), "is lost: Broken pipe$")],
)
def test_a_call_ends(store: Any, message: str) -> None:
    calls = Calls(store, 0.2, lost)
    for _ in range(2):
        with pytest.raises(ProcessLost, match=message):
            calls.add("x", 1)
    started = time.monotonic()
    with pytest.raises(ProcessLost):
        calls.check(["x"])
    assert time.monotonic() - started < 0.1
    calls.close()
    store.end.set()
    until(lambda: "zckpt-store" not in [thread.name for thread in threading.enumerate()])
