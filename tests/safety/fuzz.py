"""Does any input make a parser hang, fill the memory, or raise another error than a ZckptError?

    python -m tests.safety.fuzz --target NAME --runs N --seed S [--log FILE]

Inputs that reach new lines are kept and changed further. Every input whose error was raised along a
new path counts as such; beside that, one input of TRACED is traced line by line. Both cost little:
a target takes thousands of inputs per second, more than with every line traced (atheris). A find is
written to `--finds` as a file, with its traceback beside it.

A child does the work, since a library in C may crash; then the parent begins another child.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import median
from types import FrameType
from typing import Any

import zckpt
from zckpt import ZckptError

from . import targets

SECONDS = 2.0  # of CPU, for one input
MEMORY = 512 << 20  # bytes beyond what the process has at the beginning
TRACED = 100
MAX_CORPUS = 3000
PACKAGE = str(Path(zckpt.__file__).parent)


class TookTooLong(BaseException):
    """No parser may catch it."""


@dataclass
class Finds:
    """Inputs that no parser should choke on, by error and place; each kind is kept once."""

    folder: Path | None = None
    kinds: dict[str, tuple[bytes, str]] = field(default_factory=dict)

    def add(self, kind: str, data: bytes, text: str) -> None:
        if kind in self.kinds:
            return
        self.kinds[kind] = data, text
        if self.folder is not None:
            self.folder.mkdir(parents=True, exist_ok=True)
            stem = hashlib.sha256(kind.encode()).hexdigest()[:10]
            (self.folder / f"{stem}.bin").write_bytes(data)
            (self.folder / f"{stem}.txt").write_text(f"{kind}\n\n{text}")


def fuzz(name: str, runs: int, seed: int, root: Path, finds: Finds,
         report: Callable[[int], None] = lambda _: None) -> int:  # fmt: skip
    """Gives `runs` inputs to a target; returns how many were kept since they did something new."""
    target, random = targets.target(name, root), Random(f"{name} {seed}")
    corpus = list(target.samples)
    target.run(corpus[0])  # the others may need files that are not there
    longest = 2 * int(median(map(len, corpus)))  # long inputs cost time, and show little
    places: set[Any] = set()
    signal.signal(signal.SIGPROF, _stop)
    current = root / "current"
    for number in range(runs):
        data = random.choice(corpus)
        for _ in range(random.choice((1, 1, 1, 2, 3, 5))):
            data = random.choice(target.mutators)(random, data, corpus)
        if name == "hdf5":
            current.write_bytes(data)  # a crash leaves no other trace
        new = _once(target.run, data, finds, places, number % TRACED == 0)
        if new and len(data) <= longest:
            if len(corpus) < MAX_CORPUS:
                corpus.append(data)
            else:
                corpus[random.randrange(len(target.samples), MAX_CORPUS)] = data
        if number % 500 == 499:
            report(500)
    report(runs % 500)
    return len(corpus) - len(target.samples)


def _once(
    run: Callable[[bytes], None], data: bytes, finds: Finds, places: set[Any], traced: bool
) -> bool:
    """Runs one input; whether it reached a place that no input had reached."""
    known = len(places)
    begin = time.process_time()
    signal.setitimer(signal.ITIMER_PROF, SECONDS * (10 if traced else 1))
    try:
        if traced:
            sys.settrace(_tracer(places))
        run(data)
    except (Exception, TookTooLong) as error:
        sys.settrace(None)
        signal.setitimer(signal.ITIMER_PROF, 0)
        path = []
        step = error.__traceback__
        while step is not None:
            path.append((step.tb_frame.f_code.co_name, step.tb_lineno))
            step = step.tb_next
        places.add((type(error).__name__, *path))
        if not isinstance(error, ZckptError):
            finds.add(_kind(error), data, traceback.format_exc(limit=-12))
        elif not error.message or not error.hint or len(error.message) > 3000:
            kind = "a poor message: " + re.sub(r"\d+", "N", error.message)[:40]
            finds.add(kind, data, f"{error.message[:2000]}\n{error.hint}")
    finally:
        sys.settrace(None)
        signal.setitimer(signal.ITIMER_PROF, 0)
    if time.process_time() - begin > SECONDS and not traced:
        finds.add("too slow", data, f"{time.process_time() - begin:.1f} s of CPU")
    return len(places) > known


def _kind(error: BaseException) -> str:
    """The type of an error, and the last line of the package that led to it."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__)
              if frame.filename.startswith(PACKAGE)]  # fmt: skip
    if isinstance(error, (TookTooLong, RecursionError, MemoryError)) and frames:
        frames = frames[:4]  # wherever it happened to stop
    place = f"{Path(frames[-1].filename).name}:{frames[-1].name}" if frames else "?"
    line = "" if isinstance(error, TookTooLong) or not frames else f":{frames[-1].lineno}"
    return f"{type(error).__name__} in {place}{line}"


def _stop(_number: int, _frame: FrameType | None) -> None:
    raise TookTooLong


def _tracer(places: set[Any]) -> Callable[[FrameType, str, Any], Any]:
    def local(frame: FrameType, event: str, _: Any) -> Any:
        if event == "line":
            places.add((frame.f_code, frame.f_lineno))
        return local

    def begin(frame: FrameType, _event: str, _argument: Any) -> Any:
        return local if frame.f_code.co_filename.startswith(PACKAGE) else None

    return begin


# -- by hand


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", choices=[*targets.BUILDERS], required=True)
    parser.add_argument("--runs", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--log", type=Path)
    parser.add_argument("--finds", type=Path, default=Path(tempfile.gettempdir()) / "zckpt-finds")
    words = parser.parse_args()
    folder = words.finds / words.target
    root = Path(tempfile.mkdtemp(prefix="zckpt-fuzz-", dir="/dev/shm"))
    done, seed, crashes, begin = 0, words.seed, 0, time.monotonic()
    counter = root / "count"

    def say(text: str) -> None:
        line = f"{words.target} seed {words.seed}: {text}"
        print(line, flush=True)
        if words.log:
            words.log.parent.mkdir(parents=True, exist_ok=True)
            with words.log.open("a") as file:
                file.write(line + "\n")

    try:
        while done < words.runs:
            counter.write_text("0")
            rest = min(words.runs - done, 200_000)
            child = os.fork()
            if not child:
                _work(words.target, rest, seed, root, folder, counter)
            _, status = os.waitpid(child, 0)
            done, seed = done + int(counter.read_text()), seed + 1
            if os.WIFSIGNALED(status):
                crashes += 1
                done += 1
                folder.mkdir(parents=True, exist_ok=True)
                crash = folder / f"crash-{seed}-signal-{os.WTERMSIG(status)}.bin"
                if (root / "current").exists():
                    shutil.copy(root / "current", crash)
            elif status:
                say(f"the child failed with {status}")
                break
            finds = len(list(folder.glob("*.txt"))) if folder.exists() else 0
            each = done / (time.monotonic() - begin)
            say(f"{done} executions, {each:.0f} per second, {finds} finds, {crashes} crashes")
    finally:
        shutil.rmtree(root)


def _work(name: str, runs: int, seed: int, root: Path, folder: Path, counter: Path) -> None:
    code, done = 1, 0

    def report(count: int) -> None:
        nonlocal done
        done += count
        counter.write_text(str(done))

    try:
        inner = root / str(seed)
        inner.mkdir()
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
        fuzz(name, runs, seed, inner, Finds(folder), report)
        if (inner / "current").exists():
            (inner / "current").unlink()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


if __name__ == "__main__":
    main()
