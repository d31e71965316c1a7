"""Sorts the checkpoints of a run in the order in which they were saved.

1. By the program's own counter, which one small file of a checkpoint states.
2. Without a counter, by the number in the checkpoint's name. The name must have exactly one number,
   after letters or as the full name: step-15, iter_0000015, checkpoint_3, 005000. If there are
   several numbers, one may be a metric such as a loss, so the name does not count.
3. Otherwise by the updates of the checkpoint's optimizer, which start at 0 again with a new
   optimizer.
4. Otherwise by the times of files: the checkpoint is placed directly after the newest other one
   whose last file is older than its own last file.

Checkpoints with the same number are in the order of their names, then of their times. This module
opens no file: `zckpt.formats.oldest_first` defines how counters and updates are read.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache

from msgspec import Struct

from ..core.storage import sources
from ..core.storage.filenames import counting

Number = Callable[[str], float | None]
ONE_NUMBER = re.compile(r"[^0-9]*[A-Za-z][^A-Za-z0-9]*([0-9]+)[^0-9]*|([0-9]+)")


class Standing(Struct, frozen=True):
    """A checkpoint's path in a list that is sorted by age.

    `is_timed` is true if the checkpoint's position is known only from the times of its files.
    """

    path: str
    is_timed: bool = False


def oldest_first(paths: Iterable[str], counted: Number, updates: Number) -> list[Standing]:
    """Sorts checkpoints by age, the oldest first.

    The first known number counts: `counted(path)` (the program's counter), the number in the name,
    `updates(path)` (the optimizer's updates). Both functions return None for an unknown number. A
    checkpoint without any number is placed by the times of its files.
    """
    numbers: dict[str, float] = {}
    timed: list[str] = []
    for path in dict.fromkeys(paths):
        for number in (counted, in_name, updates):
            if (value := number(path)) is not None:
                numbers[path] = value
                break
        else:
            timed.append(path)
    last = cache(last_time)
    names = Counter((number, os.path.basename(path)) for path, number in numbers.items())

    def place(path: str) -> tuple[float, tuple[list[str | int], str], int]:
        number, name = numbers[path], os.path.basename(path)
        return number, counting(name), last(path) if names[number, name] > 1 else 0

    order = [Standing(path) for path in sorted(numbers, key=place)]
    for path in sorted(timed, key=lambda path: (last(path), counting(os.path.basename(path)))):
        above = len(order)
        while above and last(order[above - 1].path) >= last(path):
            above -= 1
        order.insert(above, Standing(path, is_timed=True))
    return order


def in_name(path: str) -> float | None:
    """The number in the name of a file or folder: `step-15`, `iter_0000015`, `005000`.

    None unless there is exactly one number, which is the full name or comes after letters.
    """
    match = ONE_NUMBER.fullmatch(os.path.basename(path))
    return float(match[1] or match[2]) if match else None


def last_time(path: str) -> int:
    """The time at which the last file of a checkpoint was written, in nanoseconds.

    0 if the checkpoint does not exist any more.
    """
    if sources.is_folder(path):
        files = (entry for entry in sources.walk(path) if not entry.is_dir(follow_symlinks=False))
        return max((entry.stat(follow_symlinks=False).st_mtime_ns for entry in files), default=0)
    now = sources.status(path)
    return 0 if now is None else now.st_mtime_ns
