"""`examples/triage.py` reads `--json` alone: does it tell what to do with a checkpoint?"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from .conftest import ROOT

RUN, TAG = ROOT / "examples" / "run", "global_step7"
MODEL = "mp_rank_00_model_states.pt"
OPTIM = "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"
DATA = ROOT / "tests" / "data"


def _flip(path: Path, place: float = 0.5) -> None:
    data = bytearray(path.read_bytes())
    data[int(len(data) * place)] ^= 4
    path.write_bytes(data)


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _swap(run: Path) -> None:
    one, other = (run / TAG / OPTIM.format(rank) for rank in (0, 1))
    one.rename(run / "kept")
    other.rename(one)
    (run / "kept").rename(other)


AGAIN, MISSING = "copy the file again", "copy the missing file"
ONE_SAVE, EARLIER = "keep the files of one save", "use an earlier checkpoint"
SOUND = "nothing to do"


def _optim(rank: int) -> str:
    return f"{TAG}/{OPTIM.format(rank)}"


def _old_step(run: Path) -> None:
    """Rank 2's file is of a later save."""
    import torch

    path = run / _optim(2)
    state = torch.load(path, weights_only=False)
    for each in state["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
        each["step"] = each["step"] + 3
    torch.save(state, path)


DAMAGED: Mapping[str, tuple[Callable[[Path], object], str]] = {
    "a flipped bit in a tensor": (lambda run: _flip(run / _optim(1)), AGAIN),
    "a flipped bit in the model's file": (lambda run: _flip(run / TAG / MODEL), AGAIN),
    "a flipped bit in a pickle": (lambda run: _flip(run / _optim(0), 0.05), AGAIN),
    "an optimizer file that was cut": (lambda run: _cut(run / _optim(3)), AGAIN),
    "a model file that was cut": (lambda run: _cut(run / TAG / MODEL), AGAIN),
    "an empty file": (lambda run: (run / _optim(3)).write_bytes(b""), EARLIER),
    "a file of zeros": (lambda run: (run / _optim(2)).write_bytes(bytes(9000)), AGAIN),
    "a rank's file that is missing": (lambda run: (run / _optim(2)).unlink(), MISSING),
    "the last rank's file that is missing": (lambda run: (run / _optim(3)).unlink(), MISSING),
    "the model's file that is missing": (lambda run: (run / TAG / MODEL).unlink(), MISSING),
    "two ranks' files that were swapped": (_swap, ONE_SAVE),
    "one file that was copied over another": (
        lambda run: shutil.copy(run / _optim(0), run / _optim(1)),
        ONE_SAVE,
    ),
    "a rank too many": (lambda run: shutil.copy(run / _optim(3), run / _optim(4)), ONE_SAVE),
    "a file of another step": (_old_step, ONE_SAVE),
    "a text in place of a file": (lambda run: (run / _optim(1)).write_text("gone"), AGAIN),
    "two tags and no `latest`": (
        lambda run: (shutil.copytree(run / TAG, run / "global_step9"), (run / "latest").unlink()),
        "choose one",
    ),
    "a `latest` that names nothing": (
        lambda run: (run / "latest").write_text("global_step8"),
        "choose one",
    ),
    "an empty directory": (
        lambda run: (shutil.rmtree(run), run.mkdir()),
        "give the directory that the training saved",
    ),
    "a path that is misspelled": (
        lambda run: shutil.rmtree(run),
        "give the directory that the training saved",
    ),
    "a pointer of Git LFS": (
        lambda run: (run / _optim(1)).write_text("version https://git-lfs.github.com/spec/v1\n"),
        "lfs-pointer",
    ),
}
SOUND_ONES = (
    RUN,
    ROOT / "examples" / "trainer" / "checkpoint-4",
    DATA / "deepspeed-0.8.2-z1_dp2_bf16" / "run",
    DATA / "zckpt-0.1-z3_dp3",
    *(DATA / name for name in ("fsdp2-2.13.0-w2", "automodel-0.7.0-w2", "megatron-0.16.1-tp2")),
    DATA / "onnxruntime" / "legacy-post5478__fp32__adam__dp2",
    DATA / "universal" / "06-0.1.0" / "run",
    DATA / "torch_checkpointing-0.1.1-w2" / "items",
)


def _said(paths: list[Path], shell: Mapping[str, str]) -> list[str]:
    """What the script says of each path."""
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "triage.py", *paths],
        env=shell,
        capture_output=True,
        text=True,
        check=True,
    )
    lines = zip(done.stdout.splitlines(), paths, strict=True)
    return [line.removeprefix(f"{path}: ") for line, path in lines]


def test_damaged_checkpoints_are_told_apart(tmp_path: Path, shell: Mapping[str, str]) -> None:
    paths = []
    for number, (damage, _) in enumerate(DAMAGED.values()):
        paths.append(tmp_path / str(number))
        shutil.copytree(RUN, paths[-1])
        damage(paths[-1])
    assert len(paths) == 20
    said = dict(zip(DAMAGED, _said(paths, shell), strict=True))
    assert said == {name: action for name, (_, action) in DAMAGED.items()}


def test_sound_checkpoints_need_nothing(shell: Mapping[str, str]) -> None:
    assert len(SOUND_ONES) == 10
    said = dict(zip(map(str, SOUND_ONES), _said([*SOUND_ONES], shell), strict=True))
    assert said == dict.fromkeys(map(str, SOUND_ONES), SOUND)
