"""Makes all ranks do what rank 0 decides, or fail with its error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import errors
from ..errors import ZckptError, again
from .sharing import Processes


class Told(Exception):
    """Raised in all ranks when one of them has failed: it contains the error."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class Ranks:
    """The processes that share a piece of work, or this process alone."""

    def __init__(self, processes: Processes | None = None) -> None:
        self.rank = processes.rank if processes else 0
        self.words: dict[str, Any] = {"sharing": processes} if processes else {}
        self._processes = processes
        self._share: Callable[[Any], Any] = processes.share if processes else lambda value: value

    def told(self, decide: Callable[[], Any]) -> Any:
        """Runs `decide` in rank 0 only, and returns its result in all ranks.

        If `decide` fails, raises Told with its error in all ranks.
        """
        value: Any = None
        error: Exception | None = None
        if self.rank == 0:
            try:
                value = decide()
            except (OSError, ZckptError) as problem:
                error = problem
        value, failure = self._share([value, sent(error)])
        if failure is None:
            return value
        raise Told(error or received(failure))

    def gathered(self, value: Any) -> list[Any]:
        """Collects `value` from all ranks: a list by rank in rank 0, an empty one elsewhere."""
        if self._processes is None:
            return [value]
        other_values = [each for _, each in self._processes.gather(value)]
        return [] if self.rank else [value, *other_values]


def sent(error: Exception | None) -> Any:
    """Converts an error to JSON, which `received` converts back; None if there is no error."""
    if error is None:
        return None
    if isinstance(error, OSError):
        return [OSError.__name__, [error.errno, error.strerror, error.filename]]
    return [type(error).__name__, error.__dict__]


def received(failure: Any) -> Exception:
    """Restores an error from `failure`, the JSON that `sent` returned for the error."""
    kind, parts = failure
    return OSError(*parts) if kind == OSError.__name__ else again(getattr(errors, kind), parts)
