"""Directories of real trainers around DeepSpeed: Hugging Face Trainer, Accelerate, Lightning."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt
from zckpt.training.trainers_steps import disagreements

from ...conftest import Once, texts
from ...engines import trainers
from ..equality import assert_proven, load, same_bits

pytestmark = [pytest.mark.engines]
Saved = Callable[[str, int], Path]
SIBLINGS = {
    "hf_trainer": {"trainer_state.json", "scheduler.pt", "rng_state_0.pth", "config.json"},
    "accelerate": {"random_states_0.pkl", "scheduler.bin"},
    "lightning": set(),
}
COUNTED = {
    "hf_trainer": {
        "name of the folder checkpoint-3": 3,
        "scheduler.pt, last_epoch": 3,
        "trainer_state.json, global_step": 3,
    },
    "accelerate": {"random_states_0.pkl, step": 0, "scheduler.bin, last_epoch": 3},
    "lightning": {"Lightning, global_step": 3},
}
PER_RANK = {"hf_trainer": "rng_state_1.pth", "accelerate": "random_states_1.pkl", "lightning": None}


@pytest.fixture(scope="session")
def saved(once: Once) -> Saved:
    """What a trainer saved at dp 2."""

    def save(trainer: str, stage: int) -> Path:
        return once(trainer, stage, lambda root: trainers.train(trainer, root, stage, 2))

    return save


def oracle_of(directory: Path) -> dict[str, Any]:
    root = next(p for p in directory.parents if (p / "oracle.pt").exists())
    oracle: dict[str, Any] = torch.load(root / "oracle.pt", weights_only=False)
    return oracle


TRAINERS = ("hf_trainer", "accelerate", "lightning")


class TestTrainer:
    @pytest.mark.parametrize("stage", [2, 3])
    @pytest.mark.parametrize("trainer", TRAINERS)
    def test_is_read(self, trainer: str, stage: int, saved: Saved, tmp_path: Path) -> None:
        directory = saved(trainer, stage)
        zckpt.convert(directory, tmp_path / "universal")
        assert_proven(directory, tmp_path / "universal")
        tensors, oracle = load(tmp_path / "universal"), oracle_of(directory)
        for name, tensor in oracle["tensors"].items():
            if not (stage == 3 and name.endswith("/param")):
                assert same_bits(tensors[name], tensor), name
        siblings = tmp_path / "universal" / "siblings"
        names = {path.name for path in siblings.rglob("*")} if siblings.exists() else set()
        assert names >= SIBLINGS[trainer]
        assert not {"latest", "zero_to_fp32.py"} & names
        manifest = zckpt.read(directory)
        counted = {each.where: each.step for each in manifest.run.steps if each.counter}
        assert counted == COUNTED[trainer]
        assert disagreements(manifest) == []

    @pytest.mark.parametrize(
        ("trainer", "stage", "dp", "through"),
        [
            pytest.param("hf_trainer", 2, 3, True, marks=pytest.mark.first),
            *(
                (trainer, stage, dp, through)
                for trainer in TRAINERS
                for stage in (2, 3)
                for dp, through in [(2, False), (3, True), (1, False)]
                if (trainer, stage, dp) != ("hf_trainer", 2, 3)
            ),
        ],
    )
    def test_its_own_resume_takes_what_zckpt_wrote(
        self, trainer: str, stage: int, dp: int, through: bool, saved: Saved, tmp_path: Path
    ) -> None:
        directory = saved(trainer, stage)
        source = directory
        if through:
            zckpt.convert(directory, tmp_path / "universal")
            source = tmp_path / "universal"
        target = tmp_path / directory.name
        report = zckpt.reshard(source, target, dp=dp)
        own = PER_RANK[trainer]
        assert (target / str(own)).exists() == (own is not None and dp == 2)
        named = any(str(own) in line for line in texts(report["left_out"]))
        assert named == (own is not None and dp != 2)
        before = oracle_of(directory)
        after = trainers.resume(trainer, target, tmp_path / "resumed", stage, dp)
        for name, tensor in before["tensors"].items():
            assert same_bits(after["tensors"][name], tensor), name
        assert after["steps"] == before["steps"]
        if dp == 2:
            assert after["losses"] == before["losses"]


class TestFromDeepSpeedToFsdp:
    """What a trainer saved around DeepSpeed goes on in the same trainer around FSDP."""

    @pytest.mark.parametrize("world", [2, 3])
    def test_accelerate(self, world: int, saved: Saved, tmp_path: Path) -> None:
        directory = saved("accelerate", 2)
        oracle, target = oracle_of(directory), tmp_path / "state"
        zckpt.convert(directory, target, to="dcp", dialect="accelerate", dp=world)
        resumed = trainers.resume("accelerate_fsdp", target, tmp_path, 0, world)
        assert resumed["steps"] == oracle["steps"]
        for name, tensor in resumed["tensors"].items():
            master = name.replace("/param", "/master")
            expected = oracle["tensors"].get(master, oracle["tensors"].get(name))
            assert same_bits(tensor, expected.to(tensor.dtype)), name  # frozen ones were bf16
        assert abs(resumed["losses"][0] - oracle["losses"][0]) < 5e-3  # bf16 then, fp32 now
