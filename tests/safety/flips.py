"""What does a conversion say to one flipped bit? Every bit of a checkpoint's files is asked.

Conversions run in forked processes, so that a crash or a hang is the answer for one bit. They write
the universal format, which has all that zckpt reads. Nothing is synced.
"""

from __future__ import annotations

import gc
import io
import json
import os
import resource
import select
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from msgspec.structs import replace

import zckpt
from zckpt.core.storage.fragments import Extent

from ..conftest import fork, texts

MEMORY = 4 << 30  # bytes of address space that conversions may take beside what the process has
LIMIT = 60.0  # seconds, after which a conversion hangs
JOBS = zckpt.Copying(jobs=1)
BATCH = 4000  # flips for one forked process
THOROUGH = 20

# where a bit lies
STRUCTURE, BARE = "structure", "structure without CRC"
CHECKED, UNCHECKED, SIBLING = "data with CRC", "data without", "sibling"
# formats that have no checksum of their headers, and the share of such flips that may pass unseen:
# names that no other place states, addresses that lead to unused bytes
APART = (BARE, UNCHECKED, SIBLING)
MOST_UNSEEN = 0.02
# what became of it
ERROR, IDENTICAL, WARNED, SILENT = "error", "identical", "warned", "SILENT"
INTERNAL, HANG, CRASH = "INTERNAL ERROR", "HANG", "CRASH"
FAULTS = {SILENT, INTERNAL, HANG, CRASH}


@dataclass(frozen=True)
class Flip:
    """One bit of one file, and in which kind of bytes it lies."""

    file: Path
    byte: int
    bit: int
    where: str


def flips(checkpoint: Path, is_wanted: Callable[[Path], bool] = lambda _: True) -> Iterator[Flip]:
    """Every bit of every file of a checkpoint."""
    kinds = where(checkpoint)
    for path in sorted(path for path in checkpoint.rglob("*") if path.is_file()):
        if is_wanted(path):
            for byte, kind in enumerate(kinds[path]):
                for bit in range(8):
                    yield Flip(path, byte, bit, kind)


def where(checkpoint: Path) -> dict[Path, list[str]]:
    """The kind of every byte of a checkpoint's files."""
    manifest = zckpt.read(checkpoint)
    siblings = {os.path.realpath(sibling.path) for sibling in manifest.files.siblings}
    foreign = manifest.format != "universal"

    def kind(path: Path) -> str:
        if os.path.realpath(path) in siblings:
            return SIBLING
        has_crc = path.suffix != ".ortcp" and not (foreign and path.suffix == ".safetensors")
        return STRUCTURE if has_crc else BARE

    kinds = {
        path: [kind(path)] * path.stat().st_size for path in checkpoint.rglob("*") if path.is_file()
    }

    def mark(extent: Extent, kind: str) -> None:
        file = kinds[checkpoint / os.path.relpath(extent.file, checkpoint)]
        file[extent.offset : extent.offset + extent.length] = [kind] * extent.length

    for entry in (*manifest.entries.values(), *manifest.replicas):
        for fragment in entry.fragments:
            mark(fragment.extent, UNCHECKED if entry.digest is None else CHECKED)
    for record in manifest.files.records:
        if record.crc is not None:
            mark(record.extent, CHECKED)
    return kinds


def convert(source: Path, target: Path) -> tuple[dict[str, bytes], set[str]]:
    """The files of the target, which is removed again, and what the report says beside them."""
    report = zckpt.convert(source, target, to="universal", copying=JOBS)
    contents = {
        str(path.relative_to(target)): path.read_bytes()
        for path in target.rglob("*")
        if path.is_file()
    }
    shutil.rmtree(target)
    return contents, {*texts(report["warnings"]), *texts(report["left_out"])}


@dataclass(frozen=True)
class Good:
    """What the undamaged checkpoint gives: files, what the report says beside them, the plan."""

    contents: dict[str, bytes]
    remarks: set[str]
    plan: str


def good_of(source: Path, target: Path) -> Good:
    contents, remarks = convert(source, target)
    assert convert(source, target) == (contents, remarks)
    return Good(contents, remarks, plan(source))


def plan(source: Path) -> str:
    """All that is read of a checkpoint before its tensors, and where these are, as one text."""
    manifest = zckpt.read(source)
    fragments = [
        (entry.name, list(entry.fragments))
        for entry in (*manifest.entries.values(), *manifest.replicas)
    ]
    entries = [replace(entry, fragments=()) for entry in manifest.entries.values()]
    replicas = [replace(entry, fragments=()) for entry in manifest.replicas]
    rest = manifest.replace(entries={}, replicas=(), fingerprints={})
    return repr((rest, entries, replicas, fragments))


def verdict(flip: Flip, source: Path, target: Path, good: Good, *, converts: bool = True) -> str:
    """What becomes of one flip; the file is restored.

    Unless it `converts` in any case, a flip outside of tensors and siblings is identical if the
    plan is the same, since nothing else is read then.
    """
    file = os.open(flip.file, os.O_RDWR)
    (value,) = os.pread(file, 1, flip.byte)
    os.pwrite(file, bytes([value ^ 1 << flip.bit]), flip.byte)
    try:
        if not converts and flip.where in (STRUCTURE, BARE) and plan(source) == good.plan:
            return IDENTICAL
        contents, remarks = convert(source, target)
    except (zckpt.ZckptError, OSError):
        return WRONG_TARGET if target.exists() else ERROR
    except BaseException as error:
        return f"{INTERNAL}: {type(error).__name__}"
    finally:
        os.pwrite(file, bytes([value]), flip.byte)
        os.close(file)
    if remarks - good.remarks:
        return WARNED
    return IDENTICAL if contents == good.contents else SILENT


WRONG_TARGET = "ERROR WITH A TARGET"


def survey(source: Path, target: Path, wanted: Iterable[Flip]) -> Iterator[tuple[Flip, str]]:
    """The verdict for each flip; one of THOROUGH is converted in any case."""
    todo = list(wanted)
    good = good_of(source, target)
    done = 0
    while done < len(todo):
        batch = todo[done : done + BATCH]
        for number, answer in enumerate(_forked(batch, source, target, good)):
            yield batch[number], answer
            done += 1


def _forked(batch: Sequence[Flip], source: Path, target: Path, good: Good) -> Iterator[str]:
    """Verdicts of one process; if it ends before its time, the last one says how."""
    reading, writing = os.pipe()
    child = fork()
    if not child:
        try:
            os.close(reading)
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
            os.fsync = lambda _file: None
            gc.freeze()
            for number, flip in enumerate(batch):
                converts = number % THOROUGH == 0
                answer = verdict(flip, source, target, good, converts=converts)
                os.write(writing, answer.encode() + b"\n")
        finally:
            os._exit(0)
    os.close(writing)
    answered = 0
    with io.FileIO(reading) as answers:
        buffer = b""
        while answered < len(batch):
            if not select.select([answers], [], [], LIMIT)[0]:
                os.kill(child, signal.SIGKILL)
                yield HANG
                break
            received = answers.read(1 << 16)
            if not received:
                yield CRASH
                break
            *lines, buffer = (buffer + received).split(b"\n")
            for line in lines:
                yield line.decode()
                answered += 1
    os.waitpid(child, 0)
    if answered < len(batch):
        _restore(batch[answered], target)


def _restore(flip: Flip, target: Path) -> None:
    """After a killed process: the bit as it was, no target."""
    data = bytearray(flip.file.read_bytes())
    data[flip.byte] ^= 1 << flip.bit
    flip.file.write_bytes(data)
    for left in (target, target.with_name(f"{target.name}.partial")):
        shutil.rmtree(left, ignore_errors=True)


def counted(verdicts: Iterable[tuple[Flip, str]]) -> tuple[Counter[tuple[str, str]], list[str]]:
    """How often each verdict was given, by kind of bytes; and the flips that are faults."""
    counts: Counter[tuple[str, str]] = Counter()
    faults = []
    for flip, answer in verdicts:
        counts[flip.where, answer] += 1
        is_apart = answer == SILENT and flip.where in APART
        if answer not in (ERROR, IDENTICAL, WARNED) and not is_apart:
            faults.append(f"{answer}: {flip.file.name} byte {flip.byte} bit {flip.bit}")
    bare = sum(number for (where, _), number in counts.items() if where == BARE)
    if counts[BARE, SILENT] > MOST_UNSEEN * bare:
        faults.append(f"{counts[BARE, SILENT]} of {bare} flips in headers without CRC are unseen")
    return counts, faults


def table(name: str, counts: Counter[tuple[str, str]]) -> str:
    return json.dumps(
        {name: {f"{where}: {answer}": number for (where, answer), number in sorted(counts.items())}}
    )
