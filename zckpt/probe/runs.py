"""The files of a recorded run: zckpt's own, and the dumps of ONNX Runtime's StatisticsSubscriber.

    RUN/rank_00000/records.jsonl                            zckpt
    RUN/step_0/order.txt, <name>_forward, <name>_backward   ONNX Runtime 1.15 to 1.19

A run that died is read as far as it was written: a last line that was cut off is left out. Of ONNX
Runtime's dumps the standard deviation is left out, which is wrong since 1.16 (it takes the sum of a
bucket for its mean), and a step is a forward of the root, counted from 0.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..core.dtypes import TORCH_NAMES
from ..errors import (
    CorruptCheckpoint,
    InconsistentCheckpoint,
    NotACheckpoint,
    UnsupportedCheckpoint,
)

VERSION = 1
RECORDS = "records.jsonl"
KINDS = ("parameter", "forward", "backward")


def rank_folder(rank: int) -> str:
    return f"rank_{rank:05d}"


@dataclass(frozen=True, slots=True)
class Record:
    """One tensor of one event. `numbers` as the file has them: min, max, mean, std, norm, nan, inf,
    negative, zero, positive, crc32, samples; not all are always there."""

    step: int
    batch: str
    kind: str
    key: str
    dtype: str
    shape: tuple[int, ...]
    numbers: Mapping[str, Any]

    @property
    def place(self) -> tuple[int, str, str, str]:
        """What the same event of another run has too."""
        return self.step, self.batch, self.kind, self.key

    @property
    def module(self) -> str:
        """The path of the module, or of the one that owns the parameter."""
        if self.kind == "parameter":
            return self.key.rpartition(".")[0] or "(model)"
        return self.key.partition("#")[0]


@dataclass(frozen=True, slots=True)
class Run:
    """What was recorded, by rank, in the order of events; `notes` say what a reader should know."""

    path: str
    world: int
    ranks: dict[int, list[Record]]
    notes: list[str] = field(default_factory=list)

    @property
    def steps(self) -> list[int]:
        return sorted({record.step for records in self.ranks.values() for record in records})


def read(path: str | os.PathLike[str]) -> Run:
    """Raises NotACheckpoint for what is no recorded run, CorruptCheckpoint for one that is cut in
    its middle, InconsistentCheckpoint where ranks of different runs lie side by side."""
    where = os.fspath(path)
    names = sorted(os.listdir(where)) if os.path.isdir(where) else []
    folders = [name for name in names if re.fullmatch(r"rank_\d{5,}", name)]
    if folders:
        return _read_ranks(where, folders)
    if any(os.path.isfile(os.path.join(where, name, "order.txt")) for name in names):
        return _read_onnxruntime(where, names)
    raise NotACheckpoint(
        f"{where} is no recorded run",
        hint="a run has folders rank_00000, ... (zckpt.probe.record) or step_0, ... (ONNX Runtime)",
    )


def _read_ranks(where: str, folders: list[str]) -> Run:
    ranks: dict[int, list[Record]] = {}
    worlds: set[int] = set()
    notes = []
    for folder in folders:
        file = os.path.join(where, folder, RECORDS)
        lines = _lines(file)
        header = next(lines, None)
        if header is None:
            raise CorruptCheckpoint(f"{file} has no header", hint="record the run again")
        if header.get("zckpt_probe") != VERSION:
            raise UnsupportedCheckpoint(
                f"{file} is of version {header.get('zckpt_probe')} of recorded runs, not {VERSION}"
            )
        world, rank = header.get("world"), int(folder.removeprefix("rank_"))
        if header.get("rank") != rank or not isinstance(world, int):
            raise InconsistentCheckpoint(
                f"{file} is of rank {header.get('rank')} of {world}",
                hint="each rank's file lies in a folder of that rank",
            )
        worlds.add(world)
        records, closed = [], False
        for number, line in enumerate(lines, 2):
            closed = "closed" in line
            if not closed:
                try:
                    records.append(_record(line))
                except (KeyError, TypeError, ValueError, OverflowError) as error:
                    raise _no_record(file, number) from error
        if not closed:
            notes.append(f"{file} was not closed: the run died, or goes on")
        ranks[rank] = records
    if len(worlds) > 1 or max(ranks) >= max(worlds):
        raise InconsistentCheckpoint(
            f"{where} holds ranks of runs of {', '.join(map(str, sorted(worlds)))} processes",
            hint="record each run into a directory of its own",
        )
    return Run(where, worlds.pop(), ranks, notes)


def _lines(file: str) -> Iterator[dict[str, Any]]:
    with open(file, "rb") as held:
        for number, line in enumerate(held, 1):
            try:
                made = json.loads(line)
            except (ValueError, RecursionError) as error:
                if not line.endswith(b"\n"):  # cut off while it was written
                    return
                raise _no_record(file, number) from error
            if not isinstance(made, dict):
                raise _no_record(file, number)
            yield made


def _no_record(file: str, number: int) -> CorruptCheckpoint:
    return CorruptCheckpoint(f"{file}, line {number}, is no record", hint="record the run again")


_ABOUT = {"step": int, "batch": str, "kind": str, "key": str, "dtype": str, "shape": list}


def _record(line: dict[str, Any]) -> Record:
    """Raises KeyError, TypeError, ValueError or OverflowError for what is none."""
    about = {key: line[key] for key in _ABOUT}
    if any(not isinstance(about[key], kind) for key, kind in _ABOUT.items()):
        raise TypeError
    if about["kind"] not in KINDS:
        raise ValueError
    numbers = {key: value for key, value in line.items() if key not in about and key != "order"}
    for key in ("min", "max", "mean", "std", "norm", "nan", "inf"):
        float(numbers.get(key) or 0)
    for value in numbers.get("samples", ()):
        float(value)
    shape = tuple(int(size) for size in about.pop("shape"))
    return Record(**about, shape=shape, numbers=numbers)


# -- ONNX Runtime


_HEAD = re.compile(
    r">*(?P<name>.+?) (?P<kind>forward|backward) run\s+shape: torch\.Size\(\[(?P<shape>[\d, ]*)\]\)"
    r"\s+dtype: torch\.(?P<dtype>\w+)"
)
_NUMBER = r"([-+]?(?:inf|nan|[\d.]+(?:e[-+]?\d+)?))"
_NUMBERS = {
    "min": rf"min: {_NUMBER}",
    "max": rf"max: {_NUMBER}",
    "mean": rf"mean: {_NUMBER}",
    "nan": rf"nan: {_NUMBER}",
    "inf": rf"inf: {_NUMBER}",
    "negative": rf"neg: {_NUMBER}",
    "positive": rf"pos: {_NUMBER}",
    "zero": rf"zero: {_NUMBER}",
}
_COUNTS = frozenset({"nan", "inf", "negative", "positive", "zero"})
_SAMPLES = re.compile(r"samples\(top 128\): tensor\((.*?)\)\s*\n(?:neg|=)", re.DOTALL)


def _read_onnxruntime(where: str, names: list[str]) -> Run:
    records: list[Record] = []
    notes = ["ONNX Runtime counts forwards, not steps, and has no checksums; its std is left out"]
    steps = sorted(
        (int(found[1]), name)
        for name in names
        if (found := re.fullmatch(r"step_(\d+)", name))
        and os.path.isfile(os.path.join(where, name, "order.txt"))
    )
    for step, name in steps:
        folder = os.path.join(where, name)
        with open(os.path.join(folder, "order.txt"), encoding="utf-8", errors="replace") as file:
            order = dict.fromkeys(line.strip() for line in file if line.strip())
        dumps = {name for name in os.listdir(folder) if name.endswith(("_forward", "_backward"))}
        beside = sorted(dumps - set(order))
        if beside:  # ONNX Runtime's own merge leaves them out in silence
            notes.append(f"{folder}: {len(beside)} files are not in order.txt, as {beside[0]}")
        for held in (*order, *beside):
            file_name = os.path.join(folder, held)
            if held in dumps and os.path.isfile(file_name):
                records.append(_read_dump(file_name, step))
            else:
                notes.append(f"{folder}: {held} is in order.txt, and is not there")
    return Run(where, 1, {0: records}, notes)


def _read_dump(path: str, step: int) -> Record:
    with open(path, encoding="utf-8", errors="replace") as file:
        text = file.read()
    try:
        return _parsed(text, step)
    except ValueError as error:
        raise CorruptCheckpoint(
            f"{path} is no dump of ONNX Runtime", hint="dump the run again"
        ) from error


def _parsed(text: str, step: int) -> Record:
    """Raises ValueError for what is no dump."""
    head = _HEAD.match(text)
    if head is None:
        raise ValueError
    numbers: dict[str, Any] = {}
    for key, pattern in _NUMBERS.items():
        if found := re.search(pattern, text):
            value = float(found[1])
            numbers[key] = int(value) if key in _COUNTS else value
    if samples := _SAMPLES.search(text):
        numbers["samples"] = _numbers(samples[1])
    dtypes = {kind: name for name, kind in TORCH_NAMES.items()}
    shape = tuple(int(size) for size in head["shape"].split(",") if size.strip())
    key = head["name"]
    return Record(
        step, "0", head["kind"], key, dtypes.get(head["dtype"], head["dtype"]), shape, numbers
    )


def _numbers(printed: str) -> list[float]:
    """The numbers of a tensor as torch prints it; its dtype may follow the list."""
    inside = printed[printed.find("[") + 1 : printed.rfind("]")]
    found = []
    for word in inside.replace("\n", " ").split(","):
        word = word.strip()
        if not word or word == "...":
            continue
        known = {"True": 1.0, "False": 0.0}
        found.append(known[word] if word in known else float(word))
    return found
