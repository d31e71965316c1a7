"""Handles Ctrl-C, SIGTERM and SIGHUP.

A signal ends the command, which removes what it wrote, or keeps it for --resume. Just before the
target is renamed to its final name, the command begins to ignore signals: the work is done, and a
message that it was interrupted would be wrong.
"""

from __future__ import annotations

import signal
import sys
import threading
from typing import NoReturn

SIGINT = signal.SIGINT
SIGNALS = (SIGINT, signal.SIGTERM, signal.SIGHUP)
MOMENT = 0.001  # seconds


def handle() -> None:
    """Installs the handlers, except for signals that are ignored already (nohup)."""
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, stop)
    sys.unraisablehook = _after_finalizer


_timer_is_set = False


def stop(number: int, _frame: object) -> NoReturn:
    """The signal handler: raises KeyboardInterrupt; from then on, further signals are ignored."""
    _ignore()
    raise KeyboardInterrupt(number)


def _after_finalizer(ignored: sys.UnraisableHookArgs) -> None:
    """Raises KeyboardInterrupt again, 1 ms after a finalizer has swallowed it.

    If a finalizer or a weak reference's callback raises, Python prints the error and goes on. h5py
    has such callbacks for every object that it opens.
    """
    error = ignored.exc_value
    if not isinstance(error, KeyboardInterrupt) or not error.args:
        sys.__unraisablehook__(ignored)
        return
    global _timer_is_set
    _timer_is_set = True
    number: int = error.args[0]
    signal.signal(signal.SIGALRM, lambda _, frame: stop(number, frame))
    signal.setitimer(signal.ITIMER_REAL, MOMENT)


def ignore() -> None:
    """Ignores signals from now on, if zckpt handles them and this is the main thread."""
    if threading.current_thread() is threading.main_thread():
        _ignore()


def _ignore() -> None:
    for number in SIGNALS:
        if signal.getsignal(number) in (stop, signal.default_int_handler):
            signal.signal(number, signal.SIG_IGN)
    if _timer_is_set:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        signal.setitimer(signal.ITIMER_REAL, 0)
