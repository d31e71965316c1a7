"""Steps that trainers state beside a checkpoint: where they are seen, and which must be equal."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

import zckpt as package
from zckpt.core.checkpoint.manifest import Files, Manifest, Run, Sibling, Sighting
from zckpt.training import trainers_steps
from zckpt.training.trainers_steps import FOLDER, TRAINER, disagreements

from ..conftest import ROOT, Result

Program = Callable[..., Result]
RUN = ROOT / "examples" / "trainer" / "checkpoint-4"
OF_TRAINER = {
    ("name of the folder checkpoint-4", 4),
    ("scheduler.pt, last_epoch", 4),
    ("trainer_state.json, global_step", 4),
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return Path(shutil.copytree(RUN, tmp_path / "run" / "checkpoint-4"))


def seen(path: Path, **reading: Any) -> list[tuple[str, float]]:
    """What trainers have counted, in the order in which it is listed."""
    steps = package.read(path, **reading).run.steps
    assert not any(each.truth for each in steps if each.counter)
    assert len({each.where for each in steps}) == len(steps), "listed twice"
    return [(each.where, each.step) for each in steps if each.counter]


def state_counter(run: Path, step: int) -> None:
    path = run / "trainer_state.json"
    path.write_text(re.sub(r'"global_step": \d+', f'"global_step": {step}', path.read_text()))


def trained(folder: Path) -> dict[str, Any]:
    """Files of torch.save after one update; gives the state dicts."""
    folder.mkdir()
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW([*model.named_parameters()])
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


class TestSightings:
    def test_of_the_trainer(self, zckpt: Program) -> None:
        assert {*seen(RUN)} == OF_TRAINER
        out = zckpt("inspect", RUN, "--steps").out
        assert re.search(r"4 +not used +trainer_state\.json, global_step", out)
        listed = zckpt("inspect", RUN, "--json").document["steps"]
        assert {(each["where"], each["step"]) for each in listed} > OF_TRAINER
        assert {key for each in listed for key in each} == {"where", "step", "truth"}

    @pytest.mark.parametrize(
        "words",
        [
            {"to": "dcp", "dialect": "accelerate", "dp": 2},
            {"to": "gathered", "dialect": "accelerate"},
            {"to": "gathered", "dialect": "safetensors"},
            {"to": "universal"},
        ],
        ids=lambda words: "-".join(map(str, words.values())),
    )
    def test_of_every_format(self, words: dict[str, Any], tmp_path: Path) -> None:
        """A universal checkpoint has the trainer's files in a folder of its own."""
        target = tmp_path / "checkpoint-4"
        package.convert(RUN, target, **words)
        found = {*seen(target)}
        assert found == {
            each for each in OF_TRAINER if words["to"] != "universal" or "." in each[0]
        }
        if words["to"] == "universal":
            listed = json.loads((target / "manifest.json").read_text())["steps"]
            assert not {each["where"] for each in listed} & {where for where, _ in OF_TRAINER}

    def test_of_accelerate(self, tmp_path: Path) -> None:
        """Its files as accelerate 1.15 saves them; several models have a scheduler each."""
        folder = tmp_path / "checkpoint_0"
        states = trained(folder)
        torch.save(states["model"], folder / "pytorch_model.bin")
        torch.save(states["optimizer"], folder / "optimizer.bin")
        for name, epoch in (("scheduler.bin", 2), ("scheduler_1.bin", 3)):
            torch.save({"base_lrs": [0.1], "last_epoch": epoch}, folder / name)
        states = {
            "step": 7,
            "random_state": random.getstate(),
            "numpy_random_seed": np.random.get_state(),
            "torch_manual_seed": torch.get_rng_state(),
        }
        for rank in range(2):
            torch.save(states, folder / f"random_states_{rank}.pkl")
        assert seen(folder) == [
            ("random_states_0.pkl, step", 7),
            ("scheduler.bin, last_epoch", 2),
            ("scheduler_1.bin, last_epoch", 3),
        ]

    @pytest.mark.parametrize("sharded", [False, True])
    def test_of_lightning(self, sharded: bool, tmp_path: Path) -> None:
        states = trained(tmp_path / "run")
        model, rest = states["model"], {"pytorch-lightning_version": "2.6", "global_step": 5}
        path = tmp_path / "run" / "epoch=0-step=5.ckpt"
        if sharded:
            dcp.save({"state_dict": model}, checkpoint_id=path)
            torch.save(rest, path / "meta.pt")
        else:
            optimizer = [states["optimizer"]]
            torch.save({**rest, "state_dict": model, "optimizer_states": optimizer}, path)
        assert seen(path) == [("Lightning, global_step", 5)]
        package.convert(path, tmp_path / "universal")
        assert seen(tmp_path / "universal") == [("Lightning, global_step", 5)]

    @pytest.mark.parametrize("content", [b"", b"\0" * 99, b"PK\3\4", b"{}", b"\x80\4N."])
    @pytest.mark.parametrize("name", ["trainer_state.json", "scheduler.pt"])
    def test_a_damaged_file_states_none(self, name: str, content: bytes, run: Path) -> None:
        (run / name).write_bytes(content)
        assert {*seen(run)} == {each for each in OF_TRAINER if not each[0].startswith(name)}

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
    def test_a_file_that_may_not_be_read_states_none(self, run: Path) -> None:
        (run / "scheduler.pt").chmod(0)
        assert {*seen(run)} == {each for each in OF_TRAINER if "scheduler" not in each[0]}

    @pytest.mark.parametrize("step", ["null", '"4"', "true", "4.5", "9" * 30])
    def test_only_numbers_are_steps(self, step: str, run: Path) -> None:
        (run / "trainer_state.json").write_text(f'{{"global_step": {step}}}')
        assert "trainer_state.json, global_step" not in dict(seen(run))

    def test_other_folders_have_no_number(self, run: Path) -> None:
        """Nor has a folder in which no trainer has saved."""
        for name in ("checkpoint-4-dp16", "checkpoint_4", "checkpoint-last"):
            run = run.rename(run.with_name(name))
            assert len(seen(run)) == 2
        states = trained(run.with_name("checkpoint-9"))
        torch.save(states, run.with_name("checkpoint-9") / "model.pt")
        assert seen(run.with_name("checkpoint-9")) == []

    def test_a_scheduler_alone(self, tmp_path: Path) -> None:
        """A program of plain torch has saved it: the number of its folder may be an epoch's."""
        folder = tmp_path / "checkpoint-1"
        states = trained(folder)
        torch.save(states["model"], folder / "model.pt")
        torch.save(states["optimizer"], folder / "optimizer.pt")
        torch.save({"last_epoch": 3}, folder / "scheduler.pt")
        assert seen(folder) == [("scheduler.pt, last_epoch", 3)]

    def test_the_folder_in_which_the_user_is(
        self, run: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(run)
        assert {*seen(Path())} == OF_TRAINER


class TestDisagreements:
    @pytest.mark.parametrize("path", [RUN, ROOT / "examples" / "run"])
    def test_none(self, path: Path) -> None:
        assert disagreements(package.read(path)) == []

    @pytest.mark.parametrize("through", [False, True])
    def test_the_engine_has_counted_others(self, through: bool, run: Path, tmp_path: Path) -> None:
        state_counter(run, 6)
        run = run.rename(run.with_name("checkpoint-6"))
        path, state = run, run / "trainer_state.json"
        if through:
            path = tmp_path / "universal"
            package.convert(run, path)
            state = path / "siblings" / state.name
        (notice,) = disagreements(package.read(path))
        assert (notice.code, notice.severity) == ("steps-disagree", "error")
        assert (notice.subject, notice.file) == ("global_step", str(state))
        model = run / "global_step4" / "mp_rank_00_model_states.pt"
        where = "the engine" if through else str(model)
        assert notice.message == f"{state} has global_step 6, but {where} has global_steps 4"

    @pytest.mark.parametrize(
        ("stated", "epoch", "engine", "severity"),
        [
            (1, 1.0, 3, "error"),
            (4, 1.0, 3, "warning"),
            (0, 1.5, 3, "warning"),  # no file says how many are accumulated
            (4, 0.9, 3, "error"),
            (4, 1.0, 2, "error"),
            (4, 9.0, 5, "error"),
        ],
    )
    def test_accumulated_gradients(
        self, stated: int, epoch: float, engine: int, severity: str, run: Path
    ) -> None:
        """Accelerate before 1.8 let the engine skip the last update of each epoch."""
        state = run / "trainer_state.json"
        state.write_text(json.dumps({**json.loads(state.read_text()), "epoch": epoch}))
        model = run / "global_step4" / "mp_rank_00_model_states.pt"
        content = torch.load(model, weights_only=False)
        del content["ds_config"]["gradient_accumulation_steps"]
        content["ds_config"] |= {"gradient_accumulation_steps": stated} if stated else {}
        torch.save({**content, "global_steps": engine}, model)
        (notice,) = disagreements(package.read(run))
        assert (notice.code, notice.severity) == ("steps-disagree", severity)
        assert ("1.8" in notice.hint) == (severity == "warning")

    def test_the_folders_number(self, run: Path) -> None:
        run = run.rename(run.with_name("checkpoint-9"))
        (notice,) = disagreements(package.read(run))
        assert (notice.code, notice.severity) == ("steps-disagree", "warning")
        assert notice.file == str(run)
        assert "number 9" in notice.message
        assert "global_step 4" in notice.message
        assert "checkpoint-4" in notice.hint
        run = run.rename(run.with_name("checkpoint-4-dp16"))
        assert disagreements(package.read(run)) == []

    def test_schedulers_are_never_compared(self, run: Path) -> None:
        """Accelerate steps them once for each process."""
        torch.save({"last_epoch": 8}, run / "scheduler.pt")
        assert ("scheduler.pt, last_epoch", 8) in seen(run)
        assert disagreements(package.read(run)) == []

    def test_texts_decide_nothing(self) -> None:
        """The kind of a counter does, and the engine's own record."""
        steps = (Sighting("a", 6, False, TRAINER), Sighting("b", 5, False, FOLDER))
        state = {"counters": {"global_steps": 7}}
        siblings = (Sibling("trainer_state.json", "/x/trainer_state.json", 1),)
        files = Files(siblings=siblings)
        manifest = Manifest("/", "x", Run(steps=steps), {}, {}, state=state, files=files)
        assert [notice.severity for notice in disagreements(manifest)] == ["error", "warning"]
        assert trainers_steps.global_step(manifest) == 6
