"""Files of several saves in one directory: refused, named, right, or of a kind that pages list.

Every file is exchanged with that of another step, run and rank, copied over each sibling, and
dropped; whole ranks are swapped. README.md has the counts, and what no file shows.
"""

from __future__ import annotations

import re
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from .mixing import INVISIBLE, NAMED, REFUSED, RIGHT, Judge, Outcome, mixes
from .saves import KINDS, Kind

VERDICTS = (REFUSED, NAMED, RIGHT, INVISIBLE)
README = Path(__file__).parent / "README.md"


class Unseen(NamedTuple):
    """Mixes that nothing shows: `reason` is a sentence of README.md.

    The others are regular expressions: of rows in README.md, of kinds of files, of what is done
    to them, of the names of samples, and of what is wrong then.
    """

    reason: str
    rows: str
    kinds: str
    operations: str
    samples: str = ".*"
    wrong: str = ".*"


OTHER_RUN = "A file of another run, of the same rank and step"
OTHER_STEP = "A file of another step that does not state its step"
LATER_MODEL = "All model files of a later step, in DeepSpeed's stage 3 and pipelines"
SWAPPED = "Two files that are swapped, of the same layout"
TIED = "The second file of a tied weight"
ONE_VALUE = "A file of one value"
LOST = "A file that is missing"
BESIDE = "Files beside the checkpoint"

RANKS = "DeepSpeed, (several model ranks|stage 0)"
STAGE_3 = "DeepSpeed, stage 3|deepspeed-universal"
STAGE_3_FILES = "(?!.*(z2|tp2)$).*"  # names of samples
OF_ONE = r"groups|optimizer|model filter\.bias|exp_avg(_sq)? temperature"
UNSEEN = (
    Unseen(OTHER_RUN, "DeepSpeed.*", r".*(model|optim)_states\.pt", "(all )?run"),
    Unseen(LATER_MODEL, STAGE_3, r".*mp_rank_N_model_states\.pt", "(all )?step", STAGE_3_FILES),
    Unseen(LATER_MODEL, RANKS, r".*mp_rank_N_model_states\.pt", "all step", "pipe_.*|.*_z3"),
    Unseen(OTHER_STEP, RANKS, r".*layer_N-model_states\.pt", "step", "pipe_.*"),
    Unseen(OTHER_STEP, "DeepSpeed, stage 3", r".*optim_states\.pt", "(all )?step", ".*_sgd"),
    Unseen(LOST, "DeepSpeed.*", r".*layer_N-(model_N-)?model_states\.pt", "drop"),
    Unseen(OTHER_RUN, "deepspeed-universal", r".*zero/P/\w+\.pt", "(all )?run"),
    Unseen(OTHER_RUN, "deepspeed-universal", r".*model_states\.pt", "(all )?run", STAGE_3_FILES),
    Unseen(OTHER_STEP, "deepspeed-universal", r".*zero/P/(fp32|exp_\w+)\.pt", "(all )?step"),
    Unseen(SWAPPED, "deepspeed-universal", r".*zero/P/\w+\.pt", "swap"),
    Unseen(TIED, "deepspeed-universal", r".*zero/P/fp32\.pt", "copy", "z2"),
    Unseen(OTHER_RUN, "dcp|gathered|megatron", r".*\.(distcp|pt|safetensors)", "(all )?run"),
    Unseen(OTHER_STEP, "dcp|gathered|megatron", r".*\.(distcp|pt|safetensors)", "(all )?step"),
    Unseen(SWAPPED, "dcp", r".*__N_N\.distcp", "(rank )?swap", "fsdp2_many_files_.*|full_fsdp"),
    Unseen(ONE_VALUE, "dcp", r"__N_N\.distcp", "copy", "fsdp2_many_files_.*", OF_ONE),
    Unseen(SWAPPED, "megatron", r".*__N_N\.distcp", "(rank )?swap"),
    Unseen(SWAPPED, "megatron", r".*mp_rank_N.*\.pt", "rank swap", ".*legacy.*"),
    Unseen(LOST, "gathered", r"optim\.pt", "drop"),
    Unseen(
        BESIDE,
        ".*",
        r"(checkpoint-/)?(README\.md|adapter_.*|rng_state_N\.pth|scheduler\.pt|meta\.pt"
        r"|trainer_state\.json|training_args\.bin|extra_state.*)",
        "drop|copy|swap|(all )?(step|run)",
    ),
)


def row_of(outcome: Outcome, row: str, sample: str) -> Unseen | None:
    """The kind that explains why nothing is said."""
    return next(
        (
            each
            for each in UNSEEN
            if re.fullmatch(each.rows, row)
            and re.fullmatch(each.kinds, outcome.mix.kind)
            and re.fullmatch(each.operations, outcome.mix.operation)
            and re.fullmatch(each.samples, sample)
            and all(re.fullmatch(each.wrong, key) for key in outcome.wrong)
        ),
        None,
    )


def is_fault(outcome: Outcome, row: str, sample: str) -> bool:
    unlisted = outcome.verdict == INVISIBLE and row_of(outcome, row, sample) is None
    return outcome.verdict not in VERDICTS or unlisted


def judged(kind: Kind, folder: Path, once: bool = False) -> Iterator[Outcome]:
    """What became of each mix; `once` takes one for each operation and kind of files."""
    judge = Judge(kind(folder / "saves"), folder)
    seen: set[tuple[str, str]] = set()
    for mix in mixes(judge.saves):
        if not once or (mix.operation, mix.kind) not in seen:
            seen.add((mix.operation, mix.kind))
            yield judge.judge(mix)


DEFAULT = {"DeepSpeed, stage 3", "dcp"}
"""The rows that the default run takes."""


def test_what_is_unseen_is_on_the_page() -> None:
    page = README.read_text()
    assert [each.reason for each in UNSEEN if f"**{each.reason}" not in page] == []


@pytest.mark.parametrize(
    "row", [pytest.param(row, marks=() if row in DEFAULT else pytest.mark.engines) for row in KINDS]
)
def test_some_mixes(row: str, tmp_path: Path) -> None:
    """Of the first kind in a row of the table."""
    name, kind = next(iter(KINDS[row].items()))
    outcomes = list(judged(kind, tmp_path, once=True))
    faults = [str(outcome) for outcome in outcomes if is_fault(outcome, row, name)]
    assert faults == [], "\n".join(faults)
    assert {REFUSED} <= {outcome.verdict for outcome in outcomes}


@pytest.mark.exhaustive
@pytest.mark.parametrize("row", KINDS)
def test_every_mix(row: str, tmp_path: Path) -> None:
    """With the counts that README.md states, and with no kind in UNSEEN that is seen now."""
    counts: Counter[str] = Counter()
    faults: list[str] = []
    unseen: set[Unseen | None] = set()
    for name, kind in KINDS[row].items():
        for outcome in judged(kind, tmp_path / name):
            counts[outcome.verdict] += 1
            if is_fault(outcome, row, name):
                faults.append(f"{name}: {outcome}")
            elif outcome.verdict == INVISIBLE:
                unseen.add(row_of(outcome, row, name))
        shutil.rmtree(tmp_path / name)
    assert faults == [], "\n".join(faults)
    line = f"| {row} | " + " | ".join(f"{counts[each]:,}" for each in VERDICTS) + " |"
    print(line)
    assert line in README.read_text()
    expected = [each for each in UNSEEN if re.fullmatch(each.rows, row) and each.rows == row]
    assert [each for each in expected if each not in unseen] == []
