"""Measures all tensors in one pass: statistics, checksums, masters, and Adam's next update.

The tensors of a parameter are read together, range by range. So no element is read twice.
Elements in lost files are skipped.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from msgspec import Struct, field

from ..core.checkpoint.cast import array, cast
from ..core.checkpoint.dtypes import NUMBERS, SIZES
from ..core.checkpoint.entries import Entry, name_of
from ..core.checkpoint.inert import plain_group
from ..core.checkpoint.manifest import Manifest
from ..core.checkpoint.weights import agreement
from ..core.comparison.difference import Difference, measure_difference, same
from ..core.grouping import by_key
from ..core.passes.description import Report
from ..core.passes.pieces import ReadRequest
from ..core.passes.resources import Begin, Copying
from ..core.passes.streaming import finish
from ..core.storage.checksum import Cover, crc32
from ..core.storage.records import RecordCounts
from ..judging.damaged_source import Found, kept
from ..proof import health

FIRST, SECOND, LARGEST = "exp_avg", "exp_avg_sq", "max_exp_avg_sq"
OTHERS = re.compile("nadam|radam|lion|lamb", re.IGNORECASE)
"""Optimizers that have Adam's moments but another update rule."""
UPDATE = "UPDATE"
"""The slot under which updates are summed. No real slot has capital letters."""


class Rule(Struct, frozen=True):
    """What is needed to compute Adam's next update of one parameter.

    `first` and `second` are the bias corrections 1 - beta**step. `slot` is the key of the second
    moment, such as `exp_avg_sq`.
    """

    eps: float
    first: float
    second: float
    slot: str


class Pass(health.Measuring):
    """One pass over all tensors, which computes all that a report says about their elements.

    covers       CRC-32s, by the tensor's name
    distances    how far weights are from their fp32 masters
    rules        the numbers for Adam's next update, by parameter
    totals       statistics by the tensor's name; those of the update have the slot `UPDATE`
    """

    histograms: bool = False
    covers: dict[str, Cover] = field(default_factory=dict)
    distances: dict[str, Difference] = field(default_factory=dict)  # by the master's name
    rules: dict[str, Rule] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.covers = {entry.name: Cover(entry.length) for entry in self.entries}
        for group in self.groups:
            slots = {entry.slot: entry for entry in group}
            rule = rule_of(self.manifest, group[0].parameter, slots)
            if rule is not None:
                self.rules[group[0].parameter] = rule
                self.totals[name_of((group[0].parameter, UPDATE))] = health.Total(group[0].numel)

    def beside(self, together: Sequence[ReadRequest], view: memoryview) -> None:
        for item in together:
            size = SIZES[item.entry.dtype]
            crc = crc32(view[item.at : item.end])
            with self.lock:
                self.covers[item.entry.name].add(item.start * size, item.stop * size, crc)
        slots = {item.entry.slot: item for item in together}
        if "master" in slots and "param" in slots:
            self._compare(slots["master"], slots["param"], view)
        rule = self.rules.get(together[0].entry.parameter)
        if rule is not None and {FIRST, rule.slot} <= slots.keys():
            self._update(rule, slots[FIRST], slots[rule.slot], view)

    def _compare(self, master: ReadRequest, weight: ReadRequest, view: memoryview) -> None:
        """Measures how far a part of a weight is from its fp32 master, and adds it to the total.

        The master is first rounded to the weight's type. `view` has the bytes of both.
        """
        how = agreement(master.entry, weight.entry)
        if how is None:
            return
        wide, narrow = view[master.at : master.end], view[weight.at : weight.end]
        dtype = weight.entry.dtype
        if how == "rounded":
            rounded = memoryview(bytearray(len(narrow)))
            cast(wide, master.entry.dtype, rounded, dtype)
            wide = rounded
        difference = Difference()
        if not same(wide, narrow):
            difference = measure_difference(
                wide, dtype, narrow, dtype, weight.start, how == "rounded"
            )
        with self.lock:
            self.distances.setdefault(master.entry.name, Difference()).add(difference)

    def _update(
        self, rule: Rule, first: ReadRequest, second: ReadRequest, view: memoryview
    ) -> None:
        import numpy as np

        update, root = (
            array(view[item.at : item.end], item.entry.dtype).astype(np.float32)
            for item in (first, second)
        )
        with np.errstate(all="ignore"):
            root /= np.float32(rule.second)
            np.sqrt(root, out=root)
            root += np.float32(rule.eps)
            update /= np.float32(rule.first)
            update /= root
        self.add(name_of((first.entry.parameter, UPDATE)), first, update.data.cast("B"), "F32")


def rule_of(manifest: Manifest, parameter: str, slots: dict[str, Entry]) -> Rule | None:
    """Finds the numbers for Adam's next update of a parameter, whose states are `slots`.

    None if one of the numbers is unknown, or if the optimizer's update is not Adam's.
    """
    parameter_facts, groups = manifest.parameters.get(parameter), manifest.groups
    if (
        parameter_facts is None
        or groups is None
        or not parameter_facts.step
        or OTHERS.search(manifest.optimizer or "")
    ):
        return None
    group = plain_group(groups[parameter_facts.group]) if parameter_facts.group is not None else {}
    numbers = group.get("betas"), group.get("eps")
    match numbers:
        case [int() | float() as one, int() | float() as two], int() | float() as eps:
            pass
        case _:
            return None
    if not all(slot in slots and slots[slot].dtype in NUMBERS for slot in (FIRST, SECOND)):
        return None
    slot = LARGEST if group.get("amsgrad") and LARGEST in slots else SECOND
    if group.get("bias_correction") in (False, 0):
        return Rule(eps, 1.0, 1.0, slot)
    first, second = 1 - one**parameter_facts.step, 1 - two**parameter_facts.step
    return Rule(eps, first, second, slot) if first > 0 and second > 0 else None


# -- what is read


Distance = tuple[int, Difference]
"""The number of compared elements, and their difference."""


class Measured(Struct, frozen=True):
    """The results of a pass over all tensors.

    `updates` has the root mean square of Adam's next update, by parameter. `ranges` has the element
    ranges that were read, for tensors that could not be read completely because files are lost.
    """

    lines: dict[str, Report]
    updates: dict[str, float]
    distances: dict[str, Distance]
    ranges: dict[str, tuple[tuple[int, int], ...]]
    problems: list[Report]
    records: RecordCounts
    digest: str | None


def measured(checkpoint: Found, copying: Copying, begin: Begin | None) -> Measured:
    """Measures all tensors of a checkpoint, and compares all bytes with the stated checksums.

    Every byte is read once.
    """
    manifest, lost = checkpoint.known, checkpoint.lost
    entries, ranges = checkpoint.entries, {}
    if lost:
        manifest = manifest.replace(
            records=tuple(r for r in manifest.files.records if r.extent.file not in lost)
        )
        pairs = [kept(entry, lost) for entry in entries]
        whole = {id(entry) for entry in entries}
        ranges = {entry.name: own for entry, own in pairs if id(entry) not in whole}
        entries = [entry for entry, _ in pairs]
    # tensors of a parameter with the same shape and the same ranges are read together
    together = [
        alike
        for ranges_of_entry in by_key((entry.parameter, entry) for entry in entries).values()
        for alike in by_key(
            ((each.shape, each.slot == "state", ranges.get(each.name)), each)
            for each in ranges_of_entry
        ).values()
    ]
    numel_by_name = {entry.name: entry.numel for entry in entries}
    done = health.passed(Pass, manifest, together, copying, begin)
    records = finish([done.checker], everything=True)
    far = done.distances  # in the order in which threads ended
    numbers = [entry for entry in checkpoint.entries if entry.dtype in NUMBERS]
    statistics = {entry.name: done.totals[entry.name].statistics for entry in numbers}
    updates = {name: done.totals[name_of((name, UPDATE))].statistics for name in done.rules}
    return Measured(
        lines={entry.name: statistics[entry.name].report() for entry in numbers},
        updates={name: own.rms for name, own in updates.items() if own.rms is not None},
        distances={name: (numel_by_name[name], far[name]) for name in numel_by_name if name in far},
        ranges=ranges,
        problems=[
            *health.damaged(manifest, done.checker),
            *health.problems(manifest, numbers, statistics),
        ],
        records=records,
        digest=None if lost else digest_of(entries, done.covers),
    )


def digest_of(entries: Sequence[Entry], covers: dict[str, Cover]) -> str:
    """One CRC-32 that covers the names, types, shapes and contents of all tensors.

    `covers` has the CRC-32 of each tensor's bytes, by its name. The result is a text such as
    "crc32:0a1b2c3d".
    """
    lines = (
        f"{entry.name} {entry.dtype} {list(entry.shape)} {covers[entry.name].crc:08x}\n"
        for entry in sorted(entries, key=lambda entry: entry.name)
    )
    return f"crc32:{crc32(''.join(lines).encode()):08x}"


def place_of(entry: Entry, element: int) -> tuple[str, int] | None:
    """Where an element of a tensor is stored: the path of the file, and the byte offset.

    None if no file has the element.
    """
    run = next(entry.fragments.runs(element, element + 1, SIZES[entry.dtype]), None)
    return None if run is None else (run.extent.file, run.extent.offset)


def original(element: int, ranges: Sequence[tuple[int, int]] | None) -> int:
    """Converts an index among the elements that were read to an index in the tensor.

    `ranges` are the ranges [start, stop) that were read; None if all elements were.
    """
    for start, stop in ranges or ():
        if element < stop - start:
            return start + element
        element -= stop - start
    return element
