"""DeepSpeed's own tests of checkpoints, with its code and with zckpt's in its place.

    pip install --target PYTEST 'pytest<8.4'
    python -m tests.peers.deepspeed_suite TREE --pytest PYTEST [--all] [--only TEXT] [--json FILE]

TREE is a source tree of DeepSpeed; none of it is part of this repository. Its tests run on the CPU,
with the engine of that tree, once as they are and once with zckpt (deepspeed_in_place.py): every
checkpoint that they save is compared with what the engine holds, and every directory that they load
is one that zckpt wrote again. Whatever passes without zckpt has to pass with it, but for JUSTIFIED.

Its fixtures need the pytest that it asks for, below 8.4. What fails is tried once more by itself:
on a busy CPU some tests of stage 3 fail at random, with and without zckpt.

By default those tests run that save or load ZeRO checkpoints in each of their ways; --all is the
whole folder tests/unit/checkpoint. The first run compiles DeepSpeed's CPU optimizers.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from .comparison import Results, ended, lost

ROOT = Path(__file__).parent.parent.parent
HOOKS = Path(__file__).parent / "deepspeed_hooks"
FOLDER = "unit/checkpoint"
HANGS = "300"  # seconds after which DeepSpeed's tests give up on their ranks
UNIVERSAL = "test_universal_checkpoint.py::TestZeROUniversalCheckpointDP::test_dp_world_size"
CHOSEN = (
    "test_zero_optimizer.py",
    "test_latest_checkpoint.py",
    "test_other_optimizer.py",
    "test_shared_weights.py",
    "test_tag_validation.py",
    "test_convert_checkpoint.py",
    "test_moe_checkpoint.py::TestMoECheckpoint::test_checkpoint_moe_and_zero[2-True]",
    # sub_group_size, load_optim, use_torch_adam, stage, dtype (0: bf16, 2: fp32)
    f"{UNIVERSAL}_2to4[-1-True-True-1-dtype0]",
    f"{UNIVERSAL}_2to4[100-True-True-3-dtype2]",
    f"{UNIVERSAL}_4to2[-1-True-False-3-dtype0]",
    f"{UNIVERSAL}_2to2[-1-False-False-1-dtype2]",
    f"{UNIVERSAL}_2to2[-1-False-True-3-dtype0]",
)
JUSTIFIED: dict[str, str] = {}
"""Tests that pass with DeepSpeed's code alone, and why they are not to pass with zckpt's."""


@dataclass
class Run(Results):
    """The results of one run, and what zckpt was used for."""

    events: list[dict[str, str]] = field(default_factory=list)
    retried: list[str] = field(default_factory=list)  # passed only the second time


@dataclass
class Comparison:
    """The same tests without zckpt and with it."""

    own: Run
    ours: Run

    def that(self, own: str, ours: str) -> list[str]:
        """Tests that ended so without zckpt and with it."""
        return ended(self.own, self.ours, own, ours)

    @property
    def lost(self) -> list[str]:
        """What passes only without zckpt."""
        return lost(self.own, self.ours)

    @property
    def wrong(self) -> list[dict[str, str]]:
        """Checkpoints that zckpt read otherwise than the engine holds them, and its failures."""
        return [each for each in self.ours.events if each["outcome"] in ("differs", "failed")]

    @property
    def is_fine(self) -> bool:
        return not self.wrong and all(name in JUSTIFIED for name in self.lost)

    def lines(self) -> Iterator[str]:
        yield f"{len(self.that('passed', 'passed')):4} passed with both"
        yield f"{len(self.lost):4} passed only without zckpt"
        yield f"{len(self.that('failed', 'failed')):4} failed with both"
        yield f"{len(self.that('failed', 'passed')):4} passed only with zckpt"
        yield f"{len(self.that('skipped', 'skipped')):4} skipped by DeepSpeed"
        for run, words in ((self.own, "without zckpt"), (self.ours, "with zckpt")):
            yield f"{len(run.retried):4} passed at the second try {words}"
        for name in self.lost:
            yield f"  only without zckpt: {name}: {JUSTIFIED.get(name, 'NOT JUSTIFIED')}"
            yield f"    {self.ours.reasons.get(name, '')}"
        for name in self.that("failed", "failed"):
            yield f"  failed with both: {name}: {self.own.reasons.get(name, '')}"
        yield "what zckpt was used for:"
        counts = Counter((each["event"], each["outcome"]) for each in self.ours.events)
        for (event, outcome), count in sorted(counts.items()):
            yield f"{count:4} {MEANINGS.get((event, outcome), f'{event}: {outcome}')}"
        yield from self._listed("refused", "refused by name")
        yield from self._listed("unheld", "not compared with the engine")
        yield from self._listed("unmerged", "not compared with zero_to_fp32")
        for each in self.wrong:
            yield f"  WRONG: {each['event']} in {each['where']}: {each['why']}"

    def _listed(self, outcome: str, words: str) -> Iterator[str]:
        """The reasons of an outcome, with how often each was given."""
        reasons = Counter(
            each["why"].replace(each["where"], "DIR")
            for each in self.ours.events
            if each["outcome"] == outcome
        )
        for reason, count in reasons.most_common():
            yield f"  {words}, {count} times: {reason}"


MEANINGS = {
    ("save", "equal"): "saves read as the engine holds them: tensors, steps, groups, bit for bit",
    ("save", "differs"): "saves read otherwise than the engine holds them",
    ("save", "refused"): "saves refused by name",
    ("save", "unheld"): "saves read, of which the engine's state could not be gathered",
    ("save", "failed"): "saves that zckpt failed to read",
    ("merge", "equal"): "saves with the weights that zero_to_fp32 merges",
    ("merge", "differs"): "saves with other weights than zero_to_fp32's",
    ("merge", "unmerged"): "saves that zero_to_fp32 cannot merge",
    ("load", "done"): "directories written again by zckpt and loaded by the engine",
    ("load", "refused"): "directories loaded as they were, since zckpt refuses them by name",
    ("load", "failed"): "directories that zckpt failed to write again",
    ("universal", "done"): "universal directories that zckpt wrote in ds_to_universal's place",
    ("universal", "refused"): "universal directories refused by name",
    ("zero_to_fp32", "done"): "merged weights that zckpt gave in zero_to_fp32's place",
    ("zero_to_fp32", "refused"): "merged weights refused by name",
}


@dataclass(frozen=True)
class Suite:
    """DeepSpeed's tests in a source tree, run by the pytest in the folder `pytest`."""

    tree: Path
    pytest: Path | None = None

    def compare(self, selected: Sequence[str], only: str | None = None) -> Comparison:
        """Both runs; raises FileNotFoundError where there are no such tests."""
        if not (self.tree / "tests" / FOLDER).is_dir():
            raise FileNotFoundError(f"{self.tree} holds no folder tests/{FOLDER}")
        words = [f"{FOLDER}/{each}" for each in selected] or [FOLDER]
        words += ["-k", only] if only else []
        return Comparison(*(self.run_twice(words, in_place) for in_place in (False, True)))

    def run_twice(self, words: Sequence[str], in_place: bool) -> Run:
        """The chosen tests, and once more those that failed."""
        found = self.run(words, in_place)
        failed = [name for name, end in found.tests.items() if end == "failed"]
        if failed:
            again = self.run([node(name) for name in failed], in_place)
            found.events += again.events
            found.retried = [name for name in failed if again.tests.get(name) == "passed"]
            found.tests.update(dict.fromkeys(found.retried, "passed"))
        return found

    def run(self, words: Sequence[str], in_place: bool) -> Run:
        """Tests with DeepSpeed's code, or with zckpt in its place."""
        with tempfile.TemporaryDirectory(prefix="deepspeed-suite-") as folder:
            report, events = Path(folder) / "report.xml", Path(folder) / "events"
            events.mkdir()
            fixed = ["-p", "no:cacheprovider", f"--junitxml={report}"]
            subprocess.run(
                [sys.executable, "-m", "pytest", *words, *fixed, f"--basetemp={folder}/tests"],
                cwd=self.tree / "tests",
                env=self.environment(events, in_place),
                stdout=sys.stderr,
                check=False,
            )
            if not report.is_file():
                raise RuntimeError("DeepSpeed's tests ended without a report; see their output")
            tests, reasons = results(report)
            lines = [json.loads(path.read_text()) for path in sorted(events.iterdir())]
            return Run(tests, reasons, lines)

    def environment(self, events: Path, in_place: bool) -> dict[str, str]:
        """The CPU with room for 8 ranks, and our hooks at Python's start in every process."""
        cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
        own = cache / "zckpt-deepspeed-suite" / self.tree.resolve().name
        folders = [HOOKS, ROOT] if self.pytest is None else [HOOKS, ROOT, self.pytest.resolve()]
        return {
            **os.environ,
            "DS_ACCELERATOR": "cpu",
            "CUDA_VISIBLE_DEVICES": "",
            "LOCAL_SIZE": "8",  # by which DeepSpeed counts the CPU's devices
            "OMP_NUM_THREADS": "1",
            "DS_UNITTEST_TIMEOUT": HANGS,
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
            "PYTHONDONTWRITEBYTECODE": "1",  # nothing is left in the tree
            "TORCH_EXTENSIONS_DIR": str(own),  # compiled of this tree's sources
            "PYTHONPATH": os.pathsep.join(map(str, folders)),
            "DEEPSPEED_VERSION": (self.tree / "version.txt").read_text().strip(),
            "ZCKPT_EVENTS": str(events),
            "ZCKPT_IN_PLACE": "1" if in_place else "0",
        }


def results(report: Path) -> tuple[dict[str, str], dict[str, str]]:
    """How every test of a JUnit report ended, and the first line of each failure."""
    tests: dict[str, str] = {}
    reasons: dict[str, str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        module = case.get("classname", "").rpartition("unit.checkpoint.")[2]
        name = f"{module}.{case.get('name')}"
        ends = {child.tag: child for child in case}
        failure = ends.get("failure", ends.get("error"))
        tests[name] = "skipped" if "skipped" in ends else "passed"
        if failure is not None:
            tests[name] = "failed"
            lines = (failure.get("message") or failure.text or "").strip().splitlines()
            reasons[name] = lines[0][:200] if lines else ""
    return tests, reasons


def node(name: str) -> str:
    """How pytest calls a test on its command line: test_a.TestB.test_c[d.e] is test_a.py::..."""
    plain, bracket, parameters = name.partition("[")
    file, *rest = plain.split(".")
    return f"{FOLDER}/{'::'.join([f'{file}.py', *rest])}{bracket}{parameters}"


def document(comparison: Comparison) -> dict[str, Any]:
    """Everything, as JSON."""

    def told(run: Run) -> Mapping[str, Any]:
        return {
            "tests": run.tests,
            "reasons": run.reasons,
            "retried": run.retried,
            "events": run.events,
        }

    return {
        "fine": comparison.is_fine,
        "without_zckpt": told(comparison.own),
        "with_zckpt": told(comparison.ours),
        "lost": comparison.lost,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("tree", type=Path, metavar="TREE")
    parser.add_argument("--pytest", type=Path, metavar="PYTEST", help="a folder with pytest<8.4")
    parser.add_argument("--all", action="store_true", help="the whole folder of tests")
    parser.add_argument("--only", metavar="TEXT", help="tests that pytest -k chooses")
    parser.add_argument("--json", type=Path, metavar="FILE", help="every test and use, as JSON")
    arguments = parser.parse_args()
    selected = () if arguments.all else CHOSEN
    suite = Suite(arguments.tree.resolve(), arguments.pytest)
    comparison = suite.compare(selected, arguments.only)
    print("\n".join(comparison.lines()))
    if arguments.json:
        arguments.json.write_text(json.dumps(document(comparison), indent=1))
    sys.exit(0 if comparison.is_fine else 1)


if __name__ == "__main__":
    main()
