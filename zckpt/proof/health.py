"""Statistics of all tensors of a checkpoint, and warnings about suspicious tensors.

Suspicious are values that are impossible, and tensors that seem to be dead. Every tensor is read
once in parts, and each part is measured in its buffer, so memory does not grow with the checkpoint.
The CRC-32s in the files are checked in the same pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from threading import Lock
from typing import Any, TypeVar

from msgspec import Struct, field

from ..core.checkpoint.dtypes import NUMBERS
from ..core.checkpoint.entries import Entry
from ..core.checkpoint.manifest import Manifest
from ..core.checkpoint.weights import WEIGHTS
from ..core.comparison.statistics import Statistics, exponents, magnitudes, measure
from ..core.passes.description import Report, line_of, matching
from ..core.passes.pieces import ElementReader, ReadRequest
from ..core.passes.resources import Begin, Copying, Progress, describe
from ..core.passes.streaming import batches, chunk_size, finish, stream
from ..core.storage.fileio import Buffer
from ..core.storage.records import RecordChecker
from ..errors import Notice, warning
from . import damage

SECOND_MOMENTS = frozenset({"exp_avg_sq", "square_avg", "sum", "max_exp_avg_sq"})
"""Sums of squares: never negative, and not zero after a step with a gradient."""


class Total(Struct, eq=False):
    """Adds up the statistics of a tensor from those of its parts.

    Threads measure parts in any order. But the parts are added in the order of elements, so that
    sums are reproducible to the last digit. Only histograms are added in any order. At the end,
    `counts` gets the histogram as counts by exponent.
    """

    numel: int
    statistics: Statistics = field(default_factory=Statistics)
    counts: Counter[int] = field(default_factory=Counter)
    reached: int = 0
    waiting: dict[int, tuple[int, Statistics]] = field(default_factory=dict)
    _histogram: Any = None
    _counted: int = 0

    def add(self, start: int, stop: int, part: Statistics) -> None:
        self.waiting[start] = stop, part
        while self.reached in self.waiting:
            self.reached, part = self.waiting.pop(self.reached)
            self.statistics.add(part)

    def count(self, part: Statistics) -> None:
        """Adds the histogram of a part to that of the tensor, and removes it from the part."""
        if part.histogram is not None:
            own_histogram = self._histogram
            self._histogram = (
                part.histogram if own_histogram is None else own_histogram + part.histogram
            )
            part.histogram = None
        self._counted += part.elements
        if self._counted == self.numel and self._histogram is not None:
            self.counts.update(exponents(self._histogram))  # only the used part is kept
            self._histogram = None


class Measuring(Struct, eq=False, dict=True):
    """Reads groups of tensors once, on several threads, and computes their statistics.

    The tensors of a group have equally many elements. They are read together, so that a subclass
    can compare them (`beside`).
    """

    manifest: Manifest
    groups: Sequence[Sequence[Entry]]
    chunk: int
    jobs: int
    progress: Progress | None
    histograms: bool = True

    def __post_init__(self) -> None:
        self.entries = [entry for group in self.groups for entry in group]
        self.totals = {entry.name: Total(entry.numel) for entry in self.entries}
        self.records, fingerprints = self.manifest.files.records, self.manifest.files.fingerprints
        self.checker = RecordChecker(self.records, collect=True, fingerprints=fingerprints)
        self.lock = Lock()

    def run(self) -> None:
        """Measures all tensors."""
        tasks = batches(self.groups, self.chunk)
        stream(tasks, self.jobs, [self.checker], self.chunk, self.start)

    def start(self, readers: Sequence[ElementReader]) -> Callable[[list[list[ReadRequest]]], None]:
        (element_reader,) = readers
        view = Buffer(self.chunk).view

        def carry_out(batch: list[list[ReadRequest]]) -> None:
            describe(self.progress, f"measuring {batch[0][0].entry.name}")
            element_reader.read([item for slot in batch for item in slot], view)
            for item in (item for slot in batch for item in slot):
                if item.entry.dtype in NUMBERS:  # others, such as complex numbers, are only read
                    self.add(item.entry.name, item, view[item.at : item.end], item.entry.dtype)
            for together in zip(*batch, strict=True):
                self.beside(together, view)
            if self.progress:
                self.progress(_bytes_of(batch))

        return carry_out

    def add(self, name: str, item: ReadRequest, elements: memoryview, dtype: str) -> None:
        """Adds the statistics of a range of elements to the statistics of the tensor `name`.

        `item` is the read request, which tells the range. `elements` are the elements that were
        read, or elements that a subclass has computed from them.
        """
        part = measure(elements, dtype, histogram=self.histograms)
        with self.lock:
            total = self.totals[name]
            total.count(part)
            total.add(item.start, item.stop, part)

    def beside(self, together: Sequence[ReadRequest], view: memoryview) -> None:
        """Compares the tensors of a group in one range of elements; here it does nothing.

        Subclasses override this method. `together` has a read request for each tensor of the group,
        all for the same range. `view` is the buffer into which all these elements were read.
        """


def _bytes_of(batch: Sequence[Sequence[ReadRequest]]) -> int:
    return sum(item.end - item.at for slot in batch for item in slot)


def measure_all(
    manifest: Manifest,
    pattern: str | None,
    copying: Copying,
    begin: Begin | None,
) -> Report:
    """Measures every tensor whose name matches the glob `pattern`; reports statistics and problems.

    Without a glob, all tensors are measured except those of slot `state`, such as random states.
    Complex and 8-bit float tensors are listed in `not_computed`. Raises WrongOption if no name
    matches.
    """
    if pattern is None:
        entries = [entry for entry in manifest.entries.values() if entry.slot != "state"]
    else:
        entries = matching(manifest.entries.values(), pattern)
    measured = [entry for entry in entries if entry.dtype in NUMBERS]
    running = passed(Measuring, manifest, [[entry] for entry in measured], copying, begin)
    totals, checker = running.totals, running.checker
    records = finish([checker])
    statistics = {name: total.statistics for name, total in totals.items()}
    return {
        "step": manifest.step,
        "tensors": [_line(entry, totals[entry.name]) for entry in measured],
        "not_computed": [
            {"tensor": entry.name, "dtype": entry.dtype}
            for entry in entries
            if entry.dtype not in NUMBERS
        ],
        "problems": [
            *damaged(manifest, checker),
            *(line_of(item, tensor=None, kind="warning") for item in manifest.notices.warnings),
            *problems(manifest, measured, statistics),
        ],
        "bytes": sum(entry.length for entry in measured),
        "records": records.report(),
    }


Running = TypeVar("Running", bound=Measuring)


def passed(
    make: type[Running],
    manifest: Manifest,
    groups: Sequence[Sequence[Entry]],
    copying: Copying,
    begin: Begin | None,
) -> Running:
    """Measures groups of tensors in one pass, and returns the object that has the results.

    The object is new, and of the class `make`: `Measuring` or a subclass.
    """
    # each thread has a buffer of this size, and as much working memory
    chunk = chunk_size(manifest.dp, copying.jobs, copying.memory)
    progress = begin(sum(entry.length for group in groups for entry in group)) if begin else None
    running = make(manifest, groups, chunk, copying.jobs, progress)
    running.run()
    return running


def _line(entry: Entry, total: Total) -> Report:
    return {
        "tensor": entry.name,
        "dtype": entry.dtype,
        "shape": list(entry.shape),
        "elements": entry.numel,
        **total.statistics.report(),
        "histogram": magnitudes(total.counts),
    }


# problems


CODES = {
    "NaN": "not-finite",
    "infinite": "not-finite",
    "impossible": "moment-impossible",
    "dead": "values-constant",
    "constant": "values-constant",
}
"""The code of each kind of problem with numbers."""


def damaged(manifest: Manifest, checker: RecordChecker) -> Iterator[Report]:
    """Yields a line for each byte range whose CRC-32 is not the one that its file states."""
    contents = damage.contents_of(manifest, checker.damage)
    for extent, item in checker.damage.items():
        line = damage.meaning(manifest, item, contents[extent])
        if not line["harmless"]:
            place = {key: line[key] for key in (*Notice.__struct_fields__, "offset", "length")}
            yield {"tensor": next(iter(line["tensors"]), None), "kind": "checksum", **place}


def problems(
    manifest: Manifest, entries: Sequence[Entry], statistics: Mapping[str, Statistics]
) -> Iterator[Report]:
    """Yields lines about tensors with impossible values, and about tensors that seem to be dead.

    Impossible are, for example, negative second moments; dead are moments that are all zero after
    several steps.
    """
    for entry in entries:
        if entry.slot != "state":
            for kind, message in _problems_of(manifest, entry, statistics):
                notice = warning(CODES[kind], f"{entry.name} {message}", subject=entry.name)
                yield line_of(notice, tensor=entry.name, kind=kind)


def _problems_of(
    manifest: Manifest, entry: Entry, statistics: Mapping[str, Statistics]
) -> Iterator[tuple[str, str]]:
    numbers = statistics[entry.name]
    if numbers.nan:
        yield "NaN", f"has {numbers.nan:,} NaN of {entry.numel:,} elements"
    if numbers.inf:
        yield "infinite", f"has {numbers.inf:,} infinities of {entry.numel:,} elements"
    if not numbers.finite:
        return
    dead = numbers.zero == numbers.elements
    if entry.slot in SECOND_MOMENTS:
        parameter = manifest.parameters.get(entry.parameter)
        step = parameter.step if parameter and parameter.step is not None else manifest.step
        if numbers.negative or numbers.negative_inf:
            count = numbers.negative + numbers.negative_inf
            message = f"has {count:,} negative elements, which sums of squares never have"
            yield "impossible", message
        if dead and step:
            message = f"is all zero after step {step}: no gradient has reached {entry.parameter}"
            yield "dead", message
    if entry.slot == "max_exp_avg_sq" and (
        other := statistics.get(f"{entry.parameter}/exp_avg_sq")
    ):
        clean = not (numbers.nan or numbers.inf or other.nan or other.inf)
        if clean and _is_below(numbers, other):
            yield "impossible", "is below exp_avg_sq, but should be its maximum over time"
    if entry.slot in WEIGHTS and sum(count > 1 for count in entry.shape) > 1:
        if dead:
            yield "dead", "is all zero"
        elif numbers.min == numbers.max and numbers.finite == numbers.elements:
            yield "constant", f"is {numbers.min:g} everywhere"


def _is_below(maximum: Statistics, now: Statistics) -> bool:
    """Whether statistics show that `max_exp_avg_sq` is below `exp_avg_sq` in some element.

    A correct maximum over time never has a smaller min, max, mean or norm than the value `now`.
    """
    return (
        maximum.min < now.min
        or maximum.max < now.max
        or maximum.mean < now.mean * (1 - 1e-9)
        or maximum.norm < now.norm * (1 - 1e-9)
    )
