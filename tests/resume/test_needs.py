"""What real programs do when they resume from a checkpoint that lost a file, or has a damaged one.

    ends    they raise an error before they train
    silent  they train on with other losses or learning rates than a run that nothing interrupted,
            because something began anew
    sound   they read the file, and train on as that run without it, or although it is damaged
    unread  they do not read the file, and train on as that run

Damaged is cut, empty, or of zeros alone. The programs resume by their own means, without zckpt.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

import pytest

from zckpt.resume.runs import Candidate, judged

from ..conftest import Once, needs
from ..engines.needs import (
    DAMAGE,
    SAVED_AT,
    STEPS,
    Program,
    Steps,
    Trained,
    lose_elements,
    start,
)

PROGRAMS = {
    program.name: program
    for program in (
        Program("deepspeed-0", "deepspeed", 2, 0),
        Program("deepspeed-2", "deepspeed", 2, 2),
        Program("deepspeed-3", "deepspeed", 2, 3),
        Program("trainer", "trainer"),
        Program("trainer-lora", "trainer", has=("lora",)),
        Program("trainer-2", "trainer", 2, 2),
        Program("trainer-2-scheduler", "trainer", 2, 2, ("scheduler",)),
        Program("trainer-2-optimizer", "trainer", 2, 2, ("optimizer",)),
        Program("trainer-2-lora", "trainer", 2, 2, ("lora",)),
        Program("trainer-3", "trainer", 2, 3),
        Program("trainer-fsdp", "trainer", 2),
        Program("trainer-fsdp-full", "trainer", 2, has=("full",)),
        Program("accelerate", "accelerate"),
        Program("accelerate-2", "accelerate", 2, 2),
        Program("accelerate-2-scheduler", "accelerate", 2, 2, ("scheduler",)),
        Program("accelerate-fsdp", "accelerate", 2),
        Program("accelerate-fsdp-full", "accelerate", 2, has=("full",)),
        Program("lightning", "lightning"),
        Program("lightning-2", "lightning", 2, 2),
        Program("lightning-fsdp", "lightning", 2),
    )
}
Outcomes = tuple[str, str]
"""What a program does without a file, and with a damaged one."""
NEEDED: Outcomes = ("ends", "ends")
UNREAD: Outcomes = ("unread", "unread")

ZERO = {
    "global_step4": NEEDED,
    "global_step4/*model_states.pt": NEEDED,
    "global_step4/*optim_states.pt": NEEDED,
    "zero_to_fp32.py": UNREAD,
    "zero_to_torch.py": UNREAD,
}
DEEPSPEED = {**ZERO, "latest": ("silent", "ends")}
TRAINER = {
    "trainer_state.json": NEEDED,
    "rng_state*.pth": ("sound", "ends"),
    "training_args.bin": UNREAD,
    "tokenizer.json": UNREAD,
    "tokenizer_config.json": UNREAD,
}
MODEL = {"model.safetensors": NEEDED, "config.json": ("sound", "ends")}
MODEL_BESIDE = {"model.safetensors": UNREAD, "config.json": UNREAD}
ADAPTER = {"adapter_config.json": UNREAD, "README.md": UNREAD}
GENERATION = {"generation_config.json": UNREAD}
# the Trainer takes both or none
OPTIMIZER = {"optimizer.pt": ("silent", "ends"), "scheduler.pt": ("silent", "ends")}
TRAINER_ZERO = {**TRAINER, **ZERO, "latest": NEEDED}
TRAINER_2 = {**TRAINER_ZERO, **MODEL_BESIDE, **GENERATION}
ACCELERATE = {"random_states_*.pkl": ("sound", "sound"), "custom_checkpoint_0.pkl": NEEDED}
ACCELERATE_2 = {
    **ACCELERATE,
    "latest": UNREAD,
    **{name.replace("global_step4", "pytorch_model"): outcomes for name, outcomes in ZERO.items()},
}
FSDP = {
    f"{folder}_0{file}": NEEDED
    for folder in ("pytorch_model_fsdp", "optimizer")
    for file in ("", "/.metadata", "/__*_0.distcp")
}
FSDP_FULL = {"pytorch_model_fsdp.bin": NEEDED, "optimizer.bin": NEEDED}

ROWS: dict[str, dict[str, Outcomes]] = {
    "deepspeed-0": {"latest": ("silent", "ends"), "global_step4/*": NEEDED},
    "deepspeed-2": DEEPSPEED,
    "deepspeed-3": DEEPSPEED,
    "trainer": {**TRAINER, **MODEL, **GENERATION, **OPTIMIZER},
    "trainer-lora": {**TRAINER, **ADAPTER, **OPTIMIZER, "adapter_model.safetensors": NEEDED},
    "trainer-2": {**TRAINER_2, "scheduler.pt": NEEDED},
    "trainer-2-scheduler": TRAINER_2,  # the engine's files have it
    "trainer-2-optimizer": TRAINER_2,  # DeepSpeed is given the Trainer's scheduler
    "trainer-2-lora": {
        **TRAINER_ZERO,
        **ADAPTER,
        "scheduler.pt": NEEDED,
        "adapter_model.safetensors": UNREAD,
    },
    "trainer-3": {**TRAINER_ZERO, **GENERATION, "config.json": UNREAD, "scheduler.pt": NEEDED},
    "trainer-fsdp": {
        **FSDP,
        "optimizer_0": ("silent", "ends"),
        "scheduler.pt": ("silent", "ends"),
        "trainer_state.json": NEEDED,
        "rng_state*.pth": ("sound", "ends"),
    },
    "trainer-fsdp-full": {
        **TRAINER,
        **MODEL,
        **GENERATION,
        "model.safetensors": UNREAD,
        "pytorch_model_fsdp.bin": NEEDED,
        "optimizer.bin": ("silent", "ends"),
        "scheduler.pt": ("silent", "ends"),
    },
    "accelerate": {
        **ACCELERATE,
        "model.safetensors": NEEDED,
        "optimizer.bin": NEEDED,
        "scheduler.bin": NEEDED,
    },
    "accelerate-2": {**ACCELERATE_2, "scheduler.bin": NEEDED},
    "accelerate-2-scheduler": ACCELERATE_2,
    "accelerate-fsdp": {**ACCELERATE, **FSDP, "scheduler.bin": NEEDED},
    "accelerate-fsdp-full": {**ACCELERATE, **FSDP_FULL, "scheduler.bin": NEEDED},
    "lightning": {"": NEEDED},
    "lightning-2": {
        "latest": NEEDED,
        **{name.replace("global_step4", "checkpoint"): each for name, each in ZERO.items()},
    },
    "lightning-fsdp": {"meta.pt": NEEDED, ".metadata": NEEDED, "__*_0.distcp": NEEDED},
}
"""The files and folders of each program's checkpoint; of folders, what happens without them."""
FOLDERS = {"global_step4", "pytorch_model", "checkpoint", "pytorch_model_fsdp_0", "optimizer_0"}
FIRST = {
    ("trainer", "scheduler.pt", "missing"),
    ("trainer", "rng_state*.pth", "missing"),
    ("trainer", "trainer_state.json", "cut"),
    ("trainer", "training_args.bin", "zeros"),
}


@dataclass(frozen=True)
class Saved:
    """A program's checkpoint, and how it trained on after it; and again, when it resumed."""

    checkpoint: Path
    steps: Steps
    again: Trained

    def outcome(self, trained: Trained, file: str) -> str:
        """What a start from the checkpoint did, which was damaged in this file, or was not."""
        if trained.error:
            assert "TimeoutError" not in trained.error
            assert trained.steps == {}
            return "ends"
        assert max(trained.steps) == STEPS - 1
        if not is_same(trained.steps, self.steps):
            return "silent"
        is_read = file in self.again.opened or file in trained.opened
        return "sound" if is_read else "unread"


def is_same(steps: Steps, others: Steps) -> bool:
    return steps.keys() == others.keys() and all(
        steps[step] == pytest.approx(others[step], rel=1e-5) for step in steps
    )


def needs_of(program: Program) -> None:
    packages = {"trainer": ("transformers", "accelerate", "peft"), "accelerate": ("accelerate",)}
    needs("deepspeed", *packages.get(program.kind, (program.kind,)))


@pytest.fixture
def saved(once: Once) -> Callable[[Program], Saved]:
    """Trains a program once, and resumes from what it saved."""

    def train(root: Path, program: Program) -> Saved:
        whole = start(program, root)
        assert whole.error == ""
        (checkpoint,) = (root / "run").iterdir()
        after = {step: values for step, values in whole.steps.items() if step >= SAVED_AT}
        assert [*after] == [*range(SAVED_AT, STEPS)]
        return Saved(checkpoint, after, start(program, root, checkpoint))

    def find(program: Program) -> Saved:
        needs_of(program)
        return once("needs", program.name, partial(train, program=program))

    return find


def cases() -> Iterator[object]:
    """The default run has one of each outcome, `-m engines` one or two of each file."""
    kinds = [kind for kind in DAMAGE if kind != "missing"]
    for name, files in ROWS.items():
        for number, (file, (missing, damaged)) in enumerate(files.items()):
            usual = ["missing"] if PROGRAMS[name].has else ["missing", kinds[number % 3]]
            for kind in DAMAGE if file not in FOLDERS else ["missing"]:
                is_first = (name, file, kind) in FIRST
                marks = [pytest.mark.first] if is_first else []
                is_usual = is_first or kind in usual
                marks.append(pytest.mark.engines if is_usual else pytest.mark.exhaustive)
                outcome = missing if kind == "missing" else damaged
                yield pytest.param(name, file, kind, outcome, marks=marks)


@pytest.mark.parametrize(("name", "file", "damage", "outcome"), [*cases()])
def test_what_a_program_does(
    name: str,
    file: str,
    damage: str,
    outcome: str,
    saved: Callable[[Program], Saved],
    tmp_path: Path,
) -> None:
    assert found(saved(PROGRAMS[name]), PROGRAMS[name], file, DAMAGE[damage], tmp_path) == outcome
    (checkpoint,) = (tmp_path / "run").iterdir() if file else [tmp_path / "run"]
    is_whole = not reasons(checkpoint)
    assert is_whole == (outcome in ("sound", "unread") or may_lack(name, file, damage))


def reasons(checkpoint: Path) -> list[str]:
    """Why zckpt says that no program resumes from a checkpoint."""
    candidate = Candidate(str(checkpoint), checkpoint.name, str(checkpoint))
    return [notice.message for notice in judged(candidate, {}).obstacles]


def may_lack(name: str, file: str, damage: str) -> bool:
    """Whether some programs save no such file, so that it is necessary for nobody.

    Nor is the file that names the tag where a program may give the tag itself, as `auto_resume`
    says it.
    """
    optional = {
        "accelerate": ("scheduler.bin", "custom_checkpoint_0.pkl"),
        "deepspeed": ("latest",),
    }
    return damage == "missing" and file in optional.get(PROGRAMS[name].kind, ())


def found(
    made: Saved, program: Program, pattern: str, damage: Callable[[Path], None], root: Path
) -> str:
    """What the program does with a copy of its checkpoint, of which a file is damaged."""
    checkpoint = root / "run" / made.checkpoint.name
    copy(made.checkpoint, checkpoint)
    file = last(checkpoint, pattern)
    damage(file)
    return made.outcome(start(program, root, checkpoint), str(file.relative_to(root / "run")))


def copy(source: Path, target: Path) -> None:
    target.parent.mkdir()
    if source.is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copy(source, target)


def last(checkpoint: Path, pattern: str) -> Path:
    """The file of the last rank, where each rank has one; the checkpoint if it is one file."""
    return sorted(checkpoint.glob(pattern))[-1] if pattern else checkpoint


@pytest.mark.engines
@pytest.mark.parametrize("name", PROGRAMS)
def test_every_file_has_a_row(name: str, saved: Callable[[Program], Saved]) -> None:
    made = saved(PROGRAMS[name])
    assert made.again.error == ""
    assert is_same(made.again.steps, made.steps)
    root = made.checkpoint
    files = [path for path in root.rglob("*") if path.is_file()] if root.is_dir() else []
    names = [str(path.relative_to(root)) for path in files]
    assert [each for each in names if not any(fnmatchcase(each, row) for row in ROWS[name])] == []


@pytest.mark.engines
@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("deepspeed-3", "global_step4/*optim_states.pt"),
        ("trainer", "model.safetensors"),
        ("trainer", "optimizer.pt"),
        ("trainer-2", "global_step4/*optim_states.pt"),
        ("accelerate", "model.safetensors"),
        ("accelerate", "optimizer.bin"),
        ("lightning", ""),
    ],
)
def test_lost_elements_go_unseen(
    name: str, file: str, saved: Callable[[Program], Saved], tmp_path: Path
) -> None:
    """A file whose tensors lost their bytes, while all that describes them is there."""
    program = PROGRAMS[name]
    assert found(saved(program), program, file, lose_elements, tmp_path) == "silent"


@pytest.mark.engines
def test_a_trainer_state_of_another_step(saved: Callable[[Program], Saved], tmp_path: Path) -> None:
    def go_back(path: Path) -> None:
        state = json.loads(path.read_text())
        path.write_text(json.dumps({**state, "global_step": SAVED_AT - 2}))

    program = PROGRAMS["trainer-2"]
    assert found(saved(program), program, "trainer_state.json", go_back, tmp_path) == "silent"


@pytest.mark.engines
def test_a_scaler_that_the_program_does_not_have(
    saved: Callable[[Program], Saved], tmp_path: Path
) -> None:
    def add(path: Path) -> None:
        shutil.copy(path, path.with_name("scaler.pt"))

    program = PROGRAMS["trainer"]
    assert found(saved(program), program, "scheduler.pt", add, tmp_path) == "ends"


MODEL_ALONE = {
    Program("trainer-alone", "trainer", has=("only_model",)): "silent",
    Program("trainer-fsdp-full-alone", "trainer", 2, has=("only_model", "full")): "ends",
    Program("trainer-2-alone", "trainer", 2, 2, ("only_model",)): "ends",
    # it has DeepSpeed's files, but no scheduler.pt
    Program("trainer-3-alone", "trainer", 2, 3, ("only_model",)): "ends",
    Program("trainer-3-scheduler-alone", "trainer", 2, 3, ("only_model", "scheduler")): "sound",
    Program("lightning-alone", "lightning", has=("only_model",)): "ends",
}
"""Programs that save the model alone, as `save_only_model=True` and `save_weights_only=True` do."""


@pytest.mark.engines
@pytest.mark.parametrize("program", MODEL_ALONE, ids=lambda program: program.name)
def test_a_model_alone(program: Program, saved: Callable[[Program], Saved]) -> None:
    made = saved(program)
    read = f"{made.checkpoint.name}/trainer_state.json"
    outcome = made.outcome(made.again, read)
    assert outcome == MODEL_ALONE[program]
    assert bool(reasons(made.checkpoint)) == (outcome != "sound")
