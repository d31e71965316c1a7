"""Lets functions whose arguments are local paths also accept URLs.

    @takes_urls("path", "against")
    def verify(path, against=None, ...): ...

A URL is replaced by the path of its mirror, a local folder of empty files from which zckpt can read
the objects. In the results and errors of the function, the path is replaced by the URL again.
"""

from __future__ import annotations

import functools
import inspect
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from shlex import quote
from typing import Any, ParamSpec, TypeVar, cast

from ..core.passes.description import said
from ..core.passes.resources import DEFAULT_COPYING, Copying
from ..errors import ZckptError
from . import mirror, sending, upload
from .mirror import spelled
from .urls import Url, is_url, parse

FETCHING = {"s3": "aws s3 sync {} DIR", "gs": "gcloud storage rsync -r {} DIR"}
"""The commands that download a target of a store to the machine whose engine loads it."""
JOBS = 16  # threads
Words = ParamSpec("Words")
Result = TypeVar("Result")


def takes_urls(
    *sources: str, target: str | None = None, keep: bool = False
) -> Callable[[Callable[Words, Result]], Callable[Words, Result]]:
    """Decorates a function so that its arguments may be URLs.

    The parameters `sources` are read, and `target` is written. With `keep`, the local folders that
    stand for sources exist until the process ends, because the function's result reads from them.
    """

    def decorate(function: Callable[Words, Result]) -> Callable[Words, Result]:
        signature = inspect.signature(function)
        kinds = {each.kind: each.name for each in signature.parameters.values()}
        packed = kinds.get(inspect.Parameter.VAR_KEYWORD, "")

        @functools.wraps(function)
        def called(*args: Words.args, **kwargs: Words.kwargs) -> Result:
            if not any(map(is_url, (*args, *kwargs.values()))):
                return function(*args, **kwargs)
            words: dict[str, Any] = signature.bind(*args, **kwargs).arguments
            words |= words.pop(packed, {})
            with ExitStack() as stack, telling():
                url = parse(words[target]) if target and is_url(words.get(target)) else None
                for name in sources:
                    if is_url(words.get(name)):
                        if url is not None:
                            upload.refuse_inside(parse(words[name]), url)
                        path = words[name]
                        words[name] = kept(path) if keep else stack.enter_context(local(path))
                        _more_jobs(signature.parameters, words, path)
                if tell := words.get("tell"):
                    words["tell"] = lambda lines: tell(translated(lines))
                if url is None or target is None:
                    return cast(Result, translated(function(**words)))  # type: ignore[call-arg]
                run = upload.mark_of(function.__name__, words, sources)
                return cast(Result, _sent(partial(function, **words), words, target, url, run))

        return called

    return decorate


def _sent(
    function: Callable[..., Any], words: dict[str, Any], target: str, url: Url, run: str
) -> Any:
    """Calls a function that writes a local target, and sends the target to the store.

    `words` are the function's arguments, and `run` is a text that is stored with the objects.
    Returns the function's report.
    """
    started = time.monotonic()
    with upload.outgoing(url, words, run) as (path, is_done):
        # the check before the rename belongs to the store's commit
        more: dict[str, Any] = {target: path, "before_rename": None}
        if is_done:
            more["dry_run"] = True
        report: dict[str, Any] = translated(function(**more))
        if words.get("dry_run"):
            pass
        elif is_done:
            report["already_complete"] = True
        else:
            report |= sending.send(path, url, run, words)
            is_loaded = bool(report["next"]) and not report["next"].startswith("zckpt ")
            if url.scheme in FETCHING and is_loaded:
                report["next"] = FETCHING[url.scheme].format(quote(str(url)))
            report["warnings"] = [*report["warnings"], *said(report.pop("store_notes"))]
        return report | {"seconds": round(time.monotonic() - started, 3)}


def jobs_for(memory: int, *paths: Any) -> int:
    """The number of threads with which a command reads; more if one of the paths is a URL.

    With a URL, threads mostly wait for requests. Each uses two buffers of at least 1 MiB, which
    must fit into `memory` bytes.
    """
    is_remote = any(map(is_url, paths))
    return max(1, min(JOBS, memory >> 21)) if is_remote else DEFAULT_COPYING.jobs


def _more_jobs(names: Mapping[str, inspect.Parameter], words: dict[str, Any], url: Any) -> None:
    """Increases the number of threads in `words` if `url` is a URL and the caller set none."""
    if "jobs" in names:
        memory = words.get("memory", names["memory"].default)
        words.setdefault("jobs", jobs_for(memory, url))
    elif "words" in names:
        words.setdefault("copying", Copying(JOBS))


@contextmanager
def local(path: Any) -> Iterator[str]:
    """Inside the block, a URL can be read at the local path that is yielded.

    At this path there are empty files: reads of these files fetch the bytes from the store. If
    `path` is not a URL, it is yielded unchanged.
    """
    if not is_url(path):
        yield path
        return
    folder = mirror.mirrored(parse(path))
    try:
        yield folder.path
    finally:
        folder.remove()


def kept(path: Any) -> str:
    """Returns a local path at which a URL can be read until the process ends.

    At this path there are empty files: reads of these files fetch the bytes from the store. If
    `path` is not a URL, it is returned, converted by `os.fspath`.
    """
    return mirror.mirrored(parse(path)).path if is_url(path) else os.fspath(path)


@contextmanager
def telling() -> Iterator[None]:
    """Inside the block, errors name URLs instead of the local paths that stand for them."""
    try:
        yield
    except ZckptError as error:
        vars(error).update(translated(vars(error)))
        error.args = (error.message,)
        raise
    except OSError as error:
        if isinstance(error.filename, str):
            error.filename = spelled(error.filename)
        raise


def translated(value: Any) -> Any:
    """Replaces local paths that stand for URLs by the URLs, in a report."""
    if isinstance(value, str):
        return spelled(value)
    if isinstance(value, dict):
        return {translated(key): translated(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)([translated(item) for item in value])
    return value
