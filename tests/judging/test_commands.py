"""One fault in one file of a checkpoint, and what every command says of it.

Each command is asked about the same damaged checkpoint, the only one of its run:

    no      verify and report end with 3, check with 1 or 3, auto-resume with 1, list with 3
    notice  verify and report end with 3 and say that resuming does not read the file; the others
            go on with 0
    yes     all end with 0
    tag     as no, but auto-resume gives the tag, without which the file is needed, and goes on
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from ..conftest import ROOT, Result

DATA = ROOT / "tests" / "data"
Run = Callable[..., Result]
SAMPLES = {
    "trainer": ROOT / "examples" / "trainer" / "checkpoint-4",
    "deepspeed": ROOT / "examples" / "run",
    "stage-3": DATA / "zckpt-0.1-z3_dp3",
    "pipeline": DATA / "zckpt-0.1-pp2_tp2" / "run",
    "fsdp2": DATA / "fsdp2-2.13.0-w2",
    "automodel": DATA / "automodel-0.7.0-w2",
    "megatron": DATA / "megatron-0.16.1-tp2",
    "megatron-legacy": DATA / "megatron-0.16.1-legacy-tp2",
    "megatron-fsdp": DATA / "megatron-0.16.1-fsdp",
    "onnxruntime": DATA / "onnxruntime" / "hdf5__fp32__adam__dp2",
    "onnxruntime-legacy": DATA / "onnxruntime" / "legacy-post5478__fp32__adam__dp2",
    "items": DATA / "torch_checkpointing-0.1.1-w2" / "items",
}
RUNS = {"deepspeed", "stage-3", "pipeline", "megatron", "megatron-legacy", "megatron-fsdp"}
"""Samples whose checkpoints are tags of a run."""
OF_TESTS = ("case.json", "expected.safetensors", "oracle.pt", "proof.json")
BESIDE = ("yes", "notice")
NEEDED = ("no", "no")
POINTER = {"latest": ("yes", "tag")}

ROWS: dict[str, dict[str, tuple[str, str]]] = {
    "trainer": {
        "*config.json": BESIDE,
        "model.safetensors": BESIDE,
        "tokenizer.json": BESIDE,
        "training_args.bin": BESIDE,
        "rng_state_*.pth": ("yes", "no"),
    },
    "deepspeed": POINTER,
    "stage-3": POINTER,
    "pipeline": POINTER,
    "automodel": {
        "config.yaml": ("yes", "yes"),  # of any form
        "model/.hf_metadata/*": BESIDE,
        "model/consolidated/*": BESIDE,
        "losses.json": BESIDE,
        "rng/rng_global_rank_*.pt": ("yes", "no"),
    },
    "items": {
        "metadata.pkl": ("yes", "yes"),
        **dict.fromkeys(
            ("dataloader_*", "epoch_*", "lr_scheduler_*", "train_state_*"), ("yes", "no")
        ),
    },
}
"""What is right if a file is missing, and if it is damaged; all others are needed."""
FIRST = {
    ("trainer", "scheduler.pt", "missing"),
    ("trainer", "latest", "missing"),
    ("trainer", "trainer_state.json", "cut"),
    ("trainer", "rng_state_1.pth", "zeros"),
    ("trainer", "training_args.bin", "empty"),
    ("trainer", "tokenizer.json", "missing"),
    ("trainer", "another step", ""),
    ("trainer", "another run", ""),
    ("deepspeed", "latest", "cut"),
    ("deepspeed", "global_step7/mp_rank_00_model_states.pt", "zeros"),
    ("fsdp2", "__1_0.distcp", "cut"),
    ("automodel", "step_scheduler.pt", "empty"),
    ("megatron", "iter_0000003/metadata.json", "zeros"),
    ("onnxruntime", "checkpoint.rank1.ortcp", "missing"),
}


def damaged(path: Path, damage: str) -> None:
    data = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        kinds = {"empty": b"", "cut": data[: len(data) // 2], "zeros": bytes(len(data))}
        path.write_bytes(kinds[damage])


def of_another_step(checkpoint: Path) -> None:
    """The Trainer's state of a save before."""
    state = checkpoint / "trainer_state.json"
    state.write_text(json.dumps({**json.loads(state.read_text()), "global_step": 2}))


def of_another_run(checkpoint: Path) -> None:
    """The model's file of a run with other sizes."""
    tag = checkpoint / "global_step4"
    shutil.copy(SAMPLES["deepspeed"] / "global_step7" / "mp_rank_00_model_states.pt", tag)


OTHERS = {"another step": of_another_step, "another run": of_another_run}


def names(sample: Path) -> list[str]:
    paths = (path for path in sorted(sample.rglob("*")) if path.is_file())
    return [str(path.relative_to(sample)) for path in paths if path.name not in OF_TESTS]


def cases() -> Iterator[object]:
    every = [
        (sample, name, damage)
        for sample, path in SAMPLES.items()
        for name in names(path)
        for damage in ("missing", "empty", "cut", "zeros")
    ]
    for case in (*every, *(("trainer", other, "") for other in OTHERS)):
        marks = [] if case in FIRST else [pytest.mark.exhaustive]
        yield pytest.param(*case, marks=marks)


def right(sample: str, name: str, damage: str) -> str:
    rows = ROWS.get(sample, {}).items()
    missing, other = next((row for pattern, row in rows if fnmatchcase(name, pattern)), NEEDED)
    return missing if damage == "missing" else other


@pytest.fixture
def made(tmp_path: Path) -> Callable[[str], tuple[Path, Path]]:
    """A run with a copy of a sample, and that copy."""

    def make(sample: str) -> tuple[Path, Path]:
        run = tmp_path / "run"
        checkpoint = run if sample in RUNS else run / "checkpoint-4"
        shutil.copytree(SAMPLES[sample], checkpoint, ignore=shutil.ignore_patterns(*OF_TESTS))
        if sample.startswith("megatron"):
            (run / "latest_checkpointed_iteration.txt").write_text("3")
        return run, checkpoint

    return make


def answers(run: Path, checkpoint: Path, zckpt: Run) -> dict[str, Result]:
    page = run.parent / "page.md"
    return {
        "verify": zckpt("verify", checkpoint),
        "report": zckpt("report", checkpoint, "--md", "--output", page),
        "check": zckpt("check", checkpoint),
        "check of the run": zckpt("check", run),
        "auto-resume": zckpt("auto-resume", run, "--single"),
        "list": zckpt("list", run),
    }


CODES = {
    "yes": [{0}] * 6,
    "notice": [{3}, {3}, {0}, {0}, {0}, {0}],
    "no": [{3}, {3}, {3}, {3}, {1}, {3}],
    "tag": [{3}, {3}, {3}, {3}, {0}, {3}],
}


@pytest.mark.parametrize("sample", SAMPLES)
def test_all_say_that_a_whole_one_is(
    sample: str, made: Callable[[str], tuple[Path, Path]], zckpt: Run
) -> None:
    ended = answers(*made(sample), zckpt)
    assert {command: result.code for command, result in ended.items()} == dict.fromkeys(ended, 0)


@pytest.mark.parametrize(("sample", "name", "damage"), [*cases()])
def test_all_give_one_answer(
    sample: str,
    name: str,
    damage: str,
    made: Callable[[str], tuple[Path, Path]],
    zckpt: Run,
) -> None:
    run, checkpoint = made(sample)
    if damage:
        damaged(checkpoint / name, damage)
    else:
        OTHERS[name](checkpoint)
    if sample.startswith("megatron"):  # the run is not what `verify` is asked about
        checkpoint /= "iter_0000003"
    answer = right(sample, name, damage)
    ended = answers(run, checkpoint, zckpt)
    codes = {command: result.code for command, result in ended.items()}
    wanted = dict(zip(codes, CODES[answer], strict=True))
    assert {command for command, code in codes.items() if code not in wanted[command]} == set(), (
        answer,
        codes,
        ended["verify"].out + ended["verify"].err,
    )
    if answer == "notice":
        said = "the program resumes without reading this file"
        for command in ("verify", "check", "auto-resume"):
            assert said in ended[command].out + ended[command].err


def test_the_cases_are_many() -> None:
    assert len([*cases()]) > 400
