"""How does a function that takes paths of this machine take URLs?

    @anywhere("path", "against")
    def verify(path, against=None, ...): ...

A URL becomes the path of its mirror, and in what the function returns or raises the path becomes
the URL again.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, ParamSpec, TypeVar, cast

from ..core.resources import Copying
from ..errors import ZckptError
from . import mirror, sending
from .mirror import spelled
from .urls import Url, is_url, parse

JOBS = 16  # threads: each waits for a request
Words = ParamSpec("Words")
Result = TypeVar("Result")


def anywhere(
    *sources: str, target: str | None = None, keep: bool = False
) -> Callable[[Callable[Words, Result]], Callable[Words, Result]]:
    """A decorator of a function: its parameters `sources` are read, and `target` is written.

    With `keep` the mirrors stay until the process ends, because what the function returns reads
    from them.
    """

    def decorate(function: Callable[Words, Result]) -> Callable[Words, Result]:
        names = [*inspect.signature(function).parameters]

        @functools.wraps(function)
        def called(*args: Words.args, **kwargs: Words.kwargs) -> Result:
            words: dict[str, Any] = {**dict(zip(names, args, strict=False)), **kwargs}
            read_back = words.pop("read_back", True) if target else True
            if not any(map(is_url, words.values())):
                return function(**words)  # type: ignore[call-arg]
            with ExitStack() as stack, telling():
                for name in sources:
                    if is_url(words.get(name)):
                        words[name] = stack.enter_context(local(words[name], keep))
                        _more_jobs(function, words)
                url = parse(words[target]) if target and is_url(words.get(target)) else None
                if tell := words.get("tell"):
                    words["tell"] = lambda lines: tell([*map(spelled, lines)])
                if url is None:
                    return cast(Result, translated(function(**words)))  # type: ignore[call-arg]
                assert target is not None
                return cast(Result, _sent(function, words, target, url, read_back))

        return called

    return decorate


def _sent(
    function: Callable[..., Any], words: dict[str, Any], target: str, url: Url, read_back: bool
) -> Any:
    """The report of a function whose target is sent to a store."""
    before = words.pop("before_rename", None)  # the last moment is that of the store
    with sending.outgoing(url, words) as path:
        report = function(**{**words, target: path})
        report = translated(report)
        if not words.get("dry_run"):
            report |= sending.send(path, url, read_back, words.get("begin"), before)
            report["warnings"] = [*report["warnings"], *report.pop("store_notes")]
        return report


def _more_jobs(function: Callable[..., Any], words: dict[str, Any]) -> None:
    """Threads wait for requests, so more of them read, unless the caller says how many."""
    names = inspect.signature(function).parameters
    if "jobs" in names:
        words.setdefault("jobs", JOBS)
    elif "words" in names or "copying" in names:
        words.setdefault("copying", Copying(JOBS))


@contextmanager
def local(path: Any, keep: bool = False) -> Iterator[str]:
    """The path on this machine at which a URL can be read; a path of this machine as it is."""
    if not is_url(path):
        yield path
        return
    folder = mirror.mirrored(parse(path))
    try:
        yield folder.path
    finally:
        if not keep:
            folder.remove()


@contextmanager
def telling() -> Iterator[None]:
    """Errors in the block name URLs, and not the paths of mirrors."""
    try:
        yield
    except ZckptError as error:
        error.message, error.hint = spelled(error.message), spelled(error.hint)
        error.args = (error.message,)
        raise
    except OSError as error:
        if isinstance(error.filename, str):
            error.filename = spelled(error.filename)
        raise


def translated(value: Any) -> Any:
    """A report with URLs instead of the paths that stand for them."""
    if isinstance(value, str):
        return spelled(value)
    if isinstance(value, dict):
        return {translated(key): translated(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([translated(item) for item in value])
    return value
