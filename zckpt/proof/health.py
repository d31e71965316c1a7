"""What the numbers in a checkpoint look like, and which of them are dead or impossible.

Every tensor is streamed once, as `compare` streams, and measured where it passes: memory does not
grow with the checkpoint. The CRC-32 of records is checked on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from threading import Lock
from typing import Any

from ..core.dtypes import FLOATS, NUMBERS
from ..core.fileio import Buffer
from ..core.manifest import Entry, Manifest
from ..core.pieces import ElementReader, ReadRequest, RecordChecker
from ..core.streaming import batches, chunk_size, finish, stream
from ..errors import WrongOption
from . import damage
from .stats import Statistics, measure

Progress = Callable[[int], None]
Report = dict[str, Any]

SECOND_MOMENTS = frozenset({"exp_avg_sq", "square_avg", "sum", "max_exp_avg_sq"})
"""Sums of squares: none is negative, and after a step none is zero where a gradient was."""
WEIGHTS = frozenset({"param", "master"})


@dataclass(slots=True)
class _Total:
    """One tensor's statistics so far. Parts are added in their order, whichever thread was first,
    so that the last digits are the same every time. The histogram is kept short in the end."""

    numel: int
    statistics: Statistics = field(default_factory=Statistics)
    magnitudes: dict[str, Any] | None = None
    reached: int = 0
    waiting: dict[int, tuple[int, Statistics]] = field(default_factory=dict)

    def add(self, start: int, stop: int, part: Statistics) -> None:
        self.waiting[start] = stop, part
        while self.reached in self.waiting:
            self.reached, part = self.waiting.pop(self.reached)
            self.statistics.add(part)
        if self.reached == self.numel:
            self.magnitudes = self.statistics.magnitudes()
            self.statistics.histogram = None


def measure_all(
    manifest: Manifest,
    pattern: str | None = None,
    *,
    jobs: int = 4,
    memory: int = 256 << 20,
    begin: Callable[[int], Progress] | None = None,
) -> Report:
    """Statistics of every tensor whose name matches the glob, and what is wrong with them.

    Without a glob of all but slot `state`, which holds random states and the like.
    Complex and 8-bit float numbers are named in `not_computed`. Raises WrongOption where no name
    matches.
    """
    entries = [
        entry
        for entry in manifest.entries.values()
        if (pattern is None and entry.slot != "state") or fnmatchcase(entry.name, pattern or "")
    ]
    if not entries and pattern is not None:
        raise WrongOption(
            f"no tensor matches {pattern!r}", hint="names are parameter/slot, as '*/exp_avg'"
        )
    measured = [entry for entry in entries if entry.dtype in NUMBERS]
    totals = {entry.name: _Total(entry.numel) for entry in measured}
    ledger = RecordChecker(manifest.records, collect=True)
    chunk = chunk_size(manifest.dp, jobs, memory)  # a buffer a thread, and as much to gather with
    lock = Lock()
    size = sum(entry.length for entry in measured)
    progress = begin(size) if begin else None

    def start(readers: Sequence[ElementReader]) -> Callable[[list[ReadRequest]], None]:
        (element_reader,) = readers
        view = Buffer(chunk).view

        def carry_out(batch: list[ReadRequest]) -> None:
            element_reader.read(batch, view)
            for item in batch:
                part = measure(view[item.at : item.end], item.entry.dtype, histogram=True)
                with lock:
                    totals[item.entry.name].add(item.start, item.stop, part)
            if progress:
                progress(sum(item.end - item.at for item in batch))

        return carry_out

    stream(batches(measured, chunk), jobs, [ledger], chunk, start)
    checked, unchecked = finish([ledger])
    found = {name: total.statistics for name, total in totals.items()}
    return {
        "step": manifest.step,
        "tensors": [_line(entry, totals[entry.name]) for entry in measured],
        "not_computed": [
            {"tensor": entry.name, "dtype": entry.dtype}
            for entry in entries
            if entry.dtype not in NUMBERS
        ],
        "problems": [
            *_damage(manifest, ledger),
            *({"tensor": None, "message": line} for line in manifest.warnings),
            *_problems(manifest, measured, found),
        ],
        "bytes": size,
        "records": {"checked": checked, "unchecked": unchecked},
    }


def _line(entry: Entry, found: _Total) -> Report:
    return {
        "tensor": entry.name,
        "dtype": entry.dtype,
        "shape": list(entry.shape),
        "elements": entry.numel,
        **found.statistics.report(),
        "histogram": found.magnitudes,
    }


# -- what is wrong


def _damage(manifest: Manifest, ledger: RecordChecker) -> Iterator[Report]:
    """Records that are not what their files state."""
    held = damage.holders(manifest, ledger.damage)
    for extent, wrong in ledger.damage.items():
        about = damage.meaning(manifest, wrong, held[extent])
        if not about["harmless"]:
            yield {"tensor": next(iter(about["tensors"]), None), "message": about["message"]}


def _problems(
    manifest: Manifest, entries: Sequence[Entry], found: dict[str, Statistics]
) -> Iterator[Report]:
    """In the order of the manifest: what cannot be, or does nothing."""
    for entry in entries:
        if entry.slot != "state":
            for message in _told(manifest, entry, found):
                yield {"tensor": entry.name, "message": f"{entry.name} {message}"}


def _told(manifest: Manifest, entry: Entry, found: dict[str, Statistics]) -> Iterator[str]:
    numbers = found[entry.name]
    if entry.dtype in FLOATS and numbers.nan:
        yield f"has {numbers.nan:,} NaN of {entry.numel:,} elements"
    if entry.dtype in FLOATS and numbers.inf:
        yield f"has {numbers.inf:,} infinities of {entry.numel:,} elements"
    if not numbers.finite:
        return
    dead = numbers.zero == numbers.elements
    if entry.slot in SECOND_MOMENTS:
        parameter = manifest.parameters.get(entry.parameter)
        step = parameter.step if parameter and parameter.step is not None else manifest.step
        if numbers.negative or numbers.negative_inf:
            count = numbers.negative + numbers.negative_inf
            yield f"has {count:,} negative elements, which sums of squares never have"
        if dead and step:
            yield f"is all zero after step {step}: no gradient has reached {entry.parameter}"
    if entry.slot == "max_exp_avg_sq" and (other := found.get(f"{entry.parameter}/exp_avg_sq")):
        clean = not (numbers.nan or numbers.inf or other.nan or other.inf)
        if clean and _is_below(numbers, other):
            yield "is below exp_avg_sq, of which it is the maximum over time"
    if entry.slot in WEIGHTS and sum(count > 1 for count in entry.shape) > 1:
        if dead:
            yield "is all zero"
        elif numbers.min == numbers.max and numbers.finite == numbers.elements:
            yield f"is {numbers.min:g} everywhere"


def _is_below(maximum: Statistics, now: Statistics) -> bool:
    """Whether some element must be: an elementwise maximum has no smaller extreme, sum or norm."""
    return (
        maximum.min < now.min
        or maximum.max < now.max
        or maximum.mean < now.mean * (1 - 1e-9)
        or maximum.norm < now.norm * (1 - 1e-9)
    )
