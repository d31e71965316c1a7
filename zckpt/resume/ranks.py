"""How do all ranks do what rank 0 decides, or fail with its error?"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .. import errors
from ..errors import ZckptError, again
from ..processes.sharing import Processes


class Told(Exception):
    """An error with which rank 0 ends the work of all; each rank makes it again."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class Ranks:
    """The processes that share the work, or this one alone."""

    def __init__(self, processes: Processes | None = None) -> None:
        self.rank = processes.rank if processes else 0
        self.words: dict[str, Any] = {"sharing": processes} if processes else {}
        self._share: Callable[[Any], Any] = processes.share if processes else lambda value: value

    def told(self, decide: Callable[[], Any]) -> Any:
        """What rank 0 decides, in all ranks; raises Told in all if it fails."""
        value, kind = None, ""
        parts: Any = ()
        error: Exception | None = None
        if self.rank == 0:
            try:
                value = decide()
            except OSError as problem:
                error, kind = problem, OSError.__name__
                parts = (problem.errno, problem.strerror, problem.filename)
            except ZckptError as problem:
                error, kind, parts = problem, type(problem).__name__, problem.__dict__
        value, kind, parts = self._share([value, kind, parts])
        if not kind:
            return value
        if kind == OSError.__name__:
            raise Told(error or OSError(*parts))
        raise Told(error or again(getattr(errors, kind), parts))
