"""Tasks shared by a few threads, which spend their time in system calls that release the lock."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

Task = TypeVar("Task")
Worker = Callable[[], AbstractContextManager[Callable[[Task], None]]]
"""Opens what one thread needs, and gives the function that carries out a task."""


def share(tasks: Iterator[Task], jobs: int, worker: Worker[Task]) -> None:
    """Carries out all tasks on `jobs` threads; the first error ends them and is raised."""
    lock = threading.Lock()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            with worker() as carry_out:
                while True:
                    with lock:
                        task = None if errors else next(tasks, None)
                    if task is None:
                        return
                    carry_out(task)
        except BaseException as error:
            with lock:
                errors.append(error)

    threads = [threading.Thread(target=work, name=f"zckpt-{place}") for place in range(jobs)]
    try:
        for thread in threads:
            try:
                thread.start()
            except RuntimeError:  # a limit of memory or processes: go on with fewer
                if threads[0].ident is None:
                    raise
                break
        _join(threads)
    except BaseException as error:  # Ctrl-C: let the threads end their tasks
        errors.insert(0, error)
        _join(threads)
    if errors:
        raise errors[0]


def _join(threads: Sequence[threading.Thread]) -> None:
    for thread in threads:
        if thread.ident is not None:  # it was started
            thread.join()
