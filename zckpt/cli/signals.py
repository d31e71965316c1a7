"""What happens at Ctrl-C, SIGTERM and SIGHUP?

A signal ends the command, which removes what it wrote, or keeps it to be continued. From the last
check before a target appears, signals are ignored until the process ends: nothing is left to stop,
and a message that the run was interrupted would be wrong.
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
    """Lets signals end the command, except those that the shell ignores (nohup)."""
    for number in SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, stop)
    sys.unraisablehook = _after_finalizer


_timer_is_set = False


def stop(number: int, _frame: object) -> NoReturn:
    """Ends the command; ignores further signals while it cleans up."""
    _ignore()
    raise KeyboardInterrupt(number)


def _after_finalizer(ignored: sys.UnraisableHookArgs) -> None:
    """Raises an interrupt again, a moment after a finalizer has swallowed it.

    Python prints what a finalizer or a callback of a weak reference raises, and goes on. h5py has
    such callbacks for everything that it opens.
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
    """Ignores signals from now on, if they are this command's."""
    if threading.current_thread() is threading.main_thread():
        _ignore()


def _ignore() -> None:
    """As `ignore`, in the main thread, where Python calls handlers: it may be importing now."""
    for number in SIGNALS:
        if signal.getsignal(number) in (stop, signal.default_int_handler):
            signal.signal(number, signal.SIG_IGN)
    if _timer_is_set:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        signal.setitimer(signal.ITIMER_REAL, 0)
