"""Reads the files of a recorded run: zckpt's, and dumps of ONNX Runtime's StatisticsSubscriber.

    RUN/rank_00000/records.jsonl                            zckpt
    RUN/step_0/order.txt, <name>_forward, <name>_backward   ONNX Runtime 1.15 to 1.19

If a run died, everything up to the last complete line is read. In ONNX Runtime's dumps, a step is a
forward of the root module, counted from 0. The standard deviation in dumps is ignored: it is wrong
since 1.16, which uses the sum of a bucket as its mean.
"""

import json
import os
import re
from collections.abc import Iterator, Mapping
from typing import Any

from msgspec import Struct, convert, field

from ..core.checkpoint.dtypes import FROM_TORCH
from ..errors import (
    CorruptCheckpoint,
    InconsistentCheckpoint,
    NotACheckpoint,
    Notice,
    UnsupportedCheckpoint,
    listed,
    note,
)

VERSION = 1
RECORDS = "records.jsonl"
KINDS = ("input", "parameter", "forward", "backward", "gradient", "metric")
OF_WEIGHTS = ("parameter", "gradient")
"""Kinds of records (`TensorRecord`) whose `key` is the name of a parameter."""


def rank_folder(rank: int) -> str:
    return f"rank_{rank:05d}"


class TensorRecord(Struct, frozen=True):
    """One recorded tensor.

    `numbers` are its statistics, as far as the file has them: min, max, mean, std, norm, nan, inf,
    negative, zero, positive, crc32, samples, inputs. A metric, such as the loss, is stored as a
    record of one F64 number.
    """

    step: int
    batch: str
    kind: str
    key: str
    dtype: str
    shape: tuple[int, ...]
    numbers: Mapping[str, Any]

    @property
    def place(self) -> tuple[int, str, str, str]:
        """Step, batch, kind and key of a record.

        A record of another run is compared if it has the same.
        """
        return self.step, self.batch, self.kind, self.key

    @property
    def module(self) -> str:
        """The path of the module that returned or got the tensor, or that has the parameter."""
        if self.kind in OF_WEIGHTS:
            return self.key.rpartition(".")[0] or "(model)"
        return self.key.partition("#")[0]


class Run(Struct, frozen=True):
    """A recorded run: the records of each rank, in the order in which they were written.

    `notes` are messages for the user. `headers` are the first lines of the ranks' files: the
    settings of the run (`environment.py`), and how many samples of a tensor were kept.
    """

    path: str
    world: int
    ranks: dict[int, list[TensorRecord]]
    notes: list[Notice] = field(default_factory=list)
    headers: dict[int, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def header(self) -> Mapping[str, Any]:
        """The header of the first rank that recorded."""
        return self.headers[min(self.headers)] if self.headers else {}

    @property
    def samples(self) -> int:
        """The most elements (samples) that are recorded of a tensor; 0 if no limit is stated."""
        return int(self.header.get("samples", 0))

    @property
    def steps(self) -> list[int]:
        return sorted({record.step for records in self.ranks.values() for record in records})


def read(path: str | os.PathLike[str]) -> Run:
    """Reads a recorded run.

    Raises NotACheckpoint if the path is not a recorded run, CorruptCheckpoint if a line other than
    the last one is damaged, and InconsistentCheckpoint if ranks of different runs are mixed.
    """
    root = os.fspath(path)
    names = sorted(os.listdir(root)) if os.path.isdir(root) else []
    folders = [name for name in names if re.fullmatch(r"rank_\d{5,}", name)]
    if folders:
        return _read_ranks(root, folders)
    if any(os.path.isfile(os.path.join(root, name, "order.txt")) for name in names):
        return _read_onnxruntime(root, names)
    raise NotACheckpoint(
        "not-a-checkpoint",
        f"{root} is not a recorded run",
        hint="a run has folders rank_00000, ... (zckpt.probe.record) or step_0, ... (ONNX Runtime)",
        file=root,
    )


def _read_ranks(root: str, folders: list[str]) -> Run:
    ranks: dict[int, list[TensorRecord]] = {}
    worlds: set[int] = set()
    headers: dict[int, Mapping[str, Any]] = {}
    notes: list[Notice] = []
    for folder in folders:
        file = os.path.join(root, folder, RECORDS)
        lines = _lines(file)
        header = next(lines, None)
        if header is None:
            raise CorruptCheckpoint(
                "file-damaged", f"{file} has no header", hint="record the run again", file=file
            )
        if header.get("zckpt_probe") != VERSION:
            raise UnsupportedCheckpoint(
                "version-unsupported",
                f"{file} has version {header.get('zckpt_probe')} of recorded runs, not {VERSION}",
                file=file,
            )
        world, rank = header.get("world"), int(folder.removeprefix("rank_"))
        if header.get("rank") != rank or not isinstance(world, int):
            raise InconsistentCheckpoint(
                "swapped-files",
                f"{file} is of rank {header.get('rank')} of {world}",
                hint="put each rank's file into the folder of that rank",
                file=file,
            )
        worlds.add(world)
        records, closed = [], False
        for number, line in enumerate(lines, 2):
            closed = "closed" in line
            if names := line.get("only_outside"):
                message = (
                    f"{root}: modules inside of {listed([str(name) for name in names])} were not "
                    "recorded: torch.compile compiled them before the recording, or as one graph "
                    "(fullgraph=True)"
                )
                notes.append(note("not-compared", message, subject=str(names[0]), file=root))
            if not closed:
                try:
                    records.append(_record(line))
                except (KeyError, TypeError, ValueError, OverflowError) as error:
                    raise _no_record(file, number) from error
        if not closed:
            message = f"{file} was not closed: the run died, or is still running"
            notes.append(note("unfinished-save", message, file=file))
        ranks[rank], headers[rank] = records, header
    if len(worlds) > 1 or max(ranks) >= max(worlds):
        raise InconsistentCheckpoint(
            "mixed-saves",
            f"{root} holds ranks of runs of {', '.join(map(str, sorted(worlds)))} processes",
            hint="record each run into a separate directory",
            file=root,
        )
    return Run(root, worlds.pop(), ranks, notes, headers)


def _lines(file: str) -> Iterator[dict[str, Any]]:
    with open(file, "rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                if not line.endswith(b"\n"):  # cut off while it was written
                    return
                raise _no_record(file, number) from error
            if not isinstance(record, dict):
                raise _no_record(file, number)
            yield record


def _no_record(file: str, number: int) -> CorruptCheckpoint:
    return CorruptCheckpoint(
        "file-damaged",
        f"{file}, line {number}, is not a record",
        hint="record the run again",
        file=file,
    )


def _record(line: dict[str, Any]) -> TensorRecord:
    """Parses a line of a recording.

    Raises KeyError, TypeError, ValueError or OverflowError if the line is not a record.
    """
    if line["kind"] == "metric":
        line = {**line, "dtype": "F64", "shape": [], "samples": [float(line["value"])]}
    if line["kind"] not in KINDS:
        raise ValueError
    about = {*TensorRecord.__struct_fields__, "order"}
    numbers = {key: value for key, value in line.items() if key not in about}
    for key in ("min", "max", "mean", "std", "norm", "nan", "inf"):
        float(numbers.get(key) or 0)
    for value in numbers.get("samples", ()):
        float(value)
    return convert({**line, "numbers": numbers}, TensorRecord)


# -- ONNX Runtime


_HEAD = re.compile(
    r">*(?P<name>.+?) (?P<kind>forward|backward) run\s+shape: torch\.Size\(\[(?P<shape>[\d, ]*)\]\)"
    r"\s+dtype: torch\.(?P<dtype>\w+)"
)
_NUMBER = r"([-+]?(?:inf|nan|[\d.]+(?:e[-+]?\d+)?))"
_COUNTS = {"nan": "nan", "inf": "inf", "negative": "neg", "positive": "pos", "zero": "zero"}
_WORDS = {"min": "min", "max": "max", "mean": "mean", **_COUNTS}
"""Maps the name of a number in a record to the word before this number in ONNX Runtime's dumps."""
_SAMPLES = re.compile(r"samples\(top 128\): tensor\((.*?)\)\s*\n(?:neg|=)", re.DOTALL)


def _read_onnxruntime(root: str, names: list[str]) -> Run:
    records: list[TensorRecord] = []
    message = "ONNX Runtime counts forwards, not steps, and has no checksums; std is left out"
    notes = [note("not-compared", message)]
    steps = sorted(
        (int(match[1]), name)
        for name in names
        if (match := re.fullmatch(r"step_(\d+)", name))
        and os.path.isfile(os.path.join(root, name, "order.txt"))
    )
    for step, name in steps:
        folder = os.path.join(root, name)
        with open(os.path.join(folder, "order.txt"), encoding="utf-8", errors="replace") as file:
            order = dict.fromkeys(line.strip() for line in file if line.strip())
        dumps = {name for name in os.listdir(folder) if name.endswith(("_forward", "_backward"))}
        beside = sorted(dumps - set(order))
        if beside:  # ONNX Runtime's own merge leaves them out without a message
            message = f"{folder}: {len(beside)} files are not in order.txt, such as {beside[0]}"
            notes.append(note("not-compared", message, file=folder))
        for dump in (*order, *beside):
            path = os.path.join(folder, dump)
            if dump in dumps and os.path.isfile(path):
                records.append(_read_dump(path, step))
            else:
                message = f"{folder}: {dump} is in order.txt, but its file is missing"
                notes.append(note("missing-file", message, file=path))
    return Run(root, 1, {0: records}, notes)


def _read_dump(path: str, step: int) -> TensorRecord:
    with open(path, encoding="utf-8", errors="replace") as file:
        text = file.read()
    try:
        return _parsed(text, step)
    except ValueError as error:
        raise CorruptCheckpoint(
            "file-damaged",
            f"{path} is not a dump of ONNX Runtime",
            hint="dump the run again",
            file=path,
        ) from error


def _parsed(text: str, step: int) -> TensorRecord:
    """Parses the text of a tensor dumped by ONNX Runtime; raises ValueError for other texts."""
    head = _HEAD.match(text)
    if head is None:
        raise ValueError
    numbers: dict[str, Any] = {}
    for key, word in _WORDS.items():
        if match := re.search(f"{word}: {_NUMBER}", text):
            value = float(match[1])
            numbers[key] = int(value) if key in _COUNTS else value
    if samples := _SAMPLES.search(text):
        numbers["samples"] = _numbers(samples[1])
    shape = tuple(int(size) for size in head["shape"].split(",") if size.strip())
    key = head["name"]
    return TensorRecord(
        step, "0", head["kind"], key, FROM_TORCH.get(head["dtype"], head["dtype"]), shape, numbers
    )


def _numbers(printed: str) -> list[float]:
    """Parses the numbers of a printed torch tensor; its dtype may follow the list."""
    inside = printed[printed.find("[") + 1 : printed.rfind("]")]
    words = map(str.strip, inside.split(","))
    words_for_numbers = {"True": 1.0, "False": 0.0}
    return [float(words_for_numbers.get(word, word)) for word in words if word not in ("", "...")]
