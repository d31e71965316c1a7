"""A signal while Python runs a finalizer, whose errors it prints and ignores."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ..conftest import ROOT

PROGRAM = """
import os, signal, sys, time, weakref
from zckpt.cli import signals

class Closed:
    pass

def ends(_):
    os.kill(os.getpid(), {number})
    for _ in range(1000):  # the handler runs here
        pass

def wait():  # a function: an `except` of Python 3.13.0 does not guard the jumps of its own loops
    end = time.monotonic() + 20
    while time.monotonic() < end:
        pass

signal.signal({number}, signal.default_int_handler)  # nohup and commands before it may ignore it
signals.handle()
signals.MOMENT = 0.2  # so that what follows comes first, on a busy machine too
value = Closed()
watched = weakref.ref(value, ends)
try:
    del value
    {then}
    wait()
except KeyboardInterrupt as error:
    print("stopped by", error.args[0])
    sys.exit()
print("goes on")
"""


def said(number: int, then: str = "") -> str:
    program = PROGRAM.format(number=number, then=then)
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert ended.stderr == ""
    return ended.stdout.strip()


@pytest.mark.parametrize("number", [2, 15, 1])
def test_a_signal_that_a_finalizer_swallows_stops_the_command(number: int) -> None:
    assert said(number) == f"stopped by {number}"


def test_it_does_not_once_signals_are_ignored() -> None:
    """From then on a target appears, and nothing is left to stop."""
    assert said(2, "signals.ignore(); time.sleep(0.5); print('goes on'); sys.exit()") == "goes on"


def test_other_errors_of_finalizers_are_printed() -> None:
    program = (
        "from zckpt.cli import signals\n"
        "signals.handle()\n"
        "class Closed:\n"
        "    def __del__(self): raise ValueError('in a finalizer')\n"
        "Closed()\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 0
    assert "ValueError: in a finalizer" in ended.stderr
