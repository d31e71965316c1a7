"""Calls to a store that end, although the store's own wait for ever if its host hangs.

`Calls` has all keys of a store. `Keys` has those that begin with a prefix.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as TookTooLong
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from .tcpstore import TcpStore


class Calls:
    """The methods of a store that are needed; each raises after `timeout` seconds.

    `lost` makes the error, from the reason. After it no call is tried again. One thread calls
    the store; it does not keep the process alive.
    """

    def __init__(
        self, store: Store | TcpStore, timeout: float, lost: Callable[[str], Exception]
    ) -> None:
        self._store: Any = store
        self._timeout = timeout
        self._calls = queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]()
        self._lost = lost
        self._error: Exception | None = None
        threading.Thread(target=self._work, name="zckpt-store", daemon=True).start()

    def add(self, key: str, count: int) -> int:
        """Adds to a counter, which begins with 0, and gives its value."""
        return int(self._call(lambda: self._store.add(key, count)))

    def set(self, key: str, value: str | bytes) -> None:
        """Sets the value of a key."""
        self._call(lambda: self._store.set(key, value))

    def check(self, keys: list[str]) -> bool:
        """Whether all of these keys have been set."""
        return bool(self._call(lambda: self._store.check(keys)))

    def get(self, key: str) -> bytes:
        """The value of a key that has been set."""
        return bytes(self._call(lambda: self._store.get(key)))

    def close(self) -> None:
        """Ends the thread, unless the store does not answer."""
        self._calls.put(None)

    def _call(self, call: Callable[[], Any]) -> Any:
        if self._error is not None:
            raise self._error
        answer: Future[Any] = Future()
        self._calls.put((answer, call))
        try:
            return answer.result(self._timeout)
        except (TookTooLong, RuntimeError) as error:  # torch's errors have stacks in their texts
            reason = str(error).partition("\n")[0].partition(". ")[0]
            self._error = self._lost(reason or f"no answer for {self._timeout:.0f} s")
            raise self._error from error

    def within(self, prefix: str) -> Keys:
        """The keys that begin with `prefix`."""
        return Keys(self, prefix)

    def _work(self) -> None:
        while (task := self._calls.get()) is not None:
            answer, call = task
            try:
                answer.set_result(call())
            except Exception as error:
                answer.set_exception(error)


class Keys:
    """Some keys of a store: `prefix` is put before each key. The methods are those of `Calls`."""

    def __init__(self, calls: Calls, prefix: str) -> None:
        self._calls = calls
        self._prefix = prefix

    def add(self, key: str, count: int) -> int:
        return self._calls.add(self._prefix + key, count)

    def set(self, key: str, value: str | bytes) -> None:
        self._calls.set(self._prefix + key, value)

    def check(self, keys: list[str]) -> bool:
        return self._calls.check([self._prefix + key for key in keys])

    def get(self, key: str) -> bytes:
        return self._calls.get(self._prefix + key)
