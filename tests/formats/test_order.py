"""In which order checkpoints of a run stand: counters, numbers in names, optimizers, times."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from zckpt import formats
from zckpt.formats import order
from zckpt.resume.runs import candidates

from ..conftest import EXAMPLE, ROOT, Result
from ..speed import slowness

TRAINER = ROOT / "examples" / "trainer" / "checkpoint-4"
FSDP2 = ROOT / "tests" / "data" / "fsdp2-2.13.0-tiny"
MEGATRON = ROOT / "tests" / "data" / "megatron-0.16.1-tp2" / "iter_0000003"


def weights(path: Path, **more: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    torch.save({"model": {"w": torch.ones(3)}, **more}, path)


def trained(path: Path, updates: int, **more: Any) -> None:
    """A file of a model and an optimizer that has made so many updates."""
    parameter = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter])
    for _ in range(updates):
        parameter.grad = torch.ones(3)
        optimizer.step()
    path.parent.mkdir(parents=True, exist_ok=True)
    state = {"state_dict": {"w": parameter.data}, "optimizer_states": [optimizer.state_dict()]}
    torch.save({**more, **state}, path)


def lightning(path: Path, step: int, updates: int = 1) -> None:
    trained(path, updates, epoch=0, global_step=step, **{"pytorch-lightning_version": "2.6"})


def of_trainer(path: Path, step: int) -> None:
    shutil.copytree(TRAINER, path)
    state = json.loads((path / "trainer_state.json").read_text())
    (path / "trainer_state.json").write_text(
        json.dumps({**state, "global_step": step}, indent=2, sort_keys=True)
    )


def written_at(path: Path, second: int) -> None:
    for file in (path, *path.rglob("*")) if path.is_dir() else (path,):
        os.utime(file, (second, second))


def newest(run: Path) -> list[str]:
    return [candidate.name for candidate in candidates(str(run))]


@pytest.mark.parametrize(
    "names",
    [
        ("epoch=10-val_loss=0.05.ckpt", "epoch=02-val_loss=0.32.ckpt"),
        ("last.ckpt", "epoch=02-val_loss=0.99.ckpt"),
        ("epoch=1-step=900-v1.ckpt", "last.ckpt", "epoch=1-step=900.ckpt"),
        ("best-0.125.ckpt", "best-7.5.ckpt"),
        ("model-v2.ckpt", "model-v9.ckpt"),
    ],
)
def test_the_counter_decides_and_not_a_metric(names: tuple[str, ...], tmp_path: Path) -> None:
    """An optimizer that began anew, and equal times, change nothing."""
    for number, name in enumerate(names):
        lightning(tmp_path / name, 300 - 100 * number, updates=number + 1)
        written_at(tmp_path / name, 1_700_000_000)
    assert newest(tmp_path) == [*names]


def test_counters_of_folders(tmp_path: Path) -> None:
    """The names say something else: each folder was renamed."""
    of_trainer(tmp_path / "checkpoint-9", 500)
    lightning(tmp_path / "x-1.ckpt", 400)
    shutil.copytree(MEGATRON, tmp_path / "m-99")  # iteration 3
    shutil.copytree(EXAMPLE / "global_step7", tmp_path / "d-88" / "global_step7")  # 7 updates
    (tmp_path / "d-88" / "latest").write_text("global_step7")
    lightning(tmp_path / "file", 6)
    shutil.copytree(FSDP2, tmp_path / "f-77.ckpt")
    torch.save({"epoch": 1, "global_step": 5, "loops": {}}, tmp_path / "f-77.ckpt" / "meta.pt")
    names = ["m-99", "f-77.ckpt", "file", "d-88", "x-1.ckpt", "checkpoint-9"]
    assert formats.oldest_first(str(tmp_path), sorted(names)) == names


def test_a_folder_of_lightning_with_deepspeed(tmp_path: Path) -> None:
    for name, steps in (("epoch=1-val=0.9.ckpt", 7), ("epoch=2-val=0.1.ckpt", 12)):
        tag = tmp_path / name / "checkpoint"
        shutil.copytree(EXAMPLE / "global_step7", tag)
        (tmp_path / name / "latest").write_text("checkpoint")
        for file in tag.glob("*model_states.pt"):
            value = torch.load(file, weights_only=False)
            assert value["global_steps"] == 7
            torch.save({**value, "global_steps": steps}, file)
    names = ["epoch=1-val=0.9.ckpt", "epoch=2-val=0.1.ckpt"]
    assert formats.oldest_first(str(tmp_path), names[::-1]) == names


def test_one_number_after_letters(tmp_path: Path) -> None:
    """An optimizer that began anew has fewer updates."""
    for name, updates in (("step-15.pt", 9), ("step-20.pt", 2), ("step-3.pt", 3)):
        trained(tmp_path / name, updates)
    assert formats.oldest_first(str(tmp_path), os.listdir(tmp_path)) == [
        *("step-3.pt", "step-15.pt", "step-20.pt")
    ]


def test_several_numbers_without_a_counter(tmp_path: Path) -> None:
    names = ["loss0.9-a.pt", "0007.pt", "loss0.1-b.pt", "epoch_2_batch_1.pt"]
    for updates, name in enumerate(names):
        trained(tmp_path / name, updates + 1)
        written_at(tmp_path / name, 1_700_000_000 - updates)
    assert formats.oldest_first(str(tmp_path), sorted(names)) == names


def test_an_optimizer_that_knows_its_parameters_by_number(tmp_path: Path) -> None:
    """Of two with the same shape nothing says which is which, and all have the same step."""
    for second, updates in enumerate((3, 1, 2)):
        parameters = [torch.nn.Parameter(torch.ones(2)) for _ in range(2)]
        optimizer = torch.optim.AdamW(parameters)
        for _ in range(updates):
            for parameter in parameters:
                parameter.grad = torch.ones(2)
            optimizer.step()
        path = tmp_path / f"1-{updates * 37 % 9}.pt"
        model = {"a": parameters[0].data, "b": parameters[1].data}
        torch.save({"model": model, "optimizer": optimizer.state_dict()}, path)
        written_at(path, second)
    standings = formats.by_age(map(str, tmp_path.iterdir()))
    assert [os.path.basename(s.path) for s in standings] == ["1-1.pt", "1-2.pt", "1-3.pt"]
    assert not any(standing.is_timed for standing in standings)


def test_without_any_number_times_decide(tmp_path: Path) -> None:
    """It stands above the newest one that is older, which need not be the one before it in time."""
    for name, second in (
        ("step-1.pt", 10),
        ("step-2.pt", 30),
        ("step-3.pt", 20),
        ("step-4.pt", 40),
    ):
        weights(tmp_path / name)
        written_at(tmp_path / name, second)
    for name, second in (("best.pt", 35), ("first.pt", 5), ("same.pt", 40)):
        weights(tmp_path / name)
        written_at(tmp_path / name, second)
    standings = formats.by_age(map(str, sorted(tmp_path.iterdir())))
    assert [os.path.basename(standing.path) for standing in standings] == [
        *("first.pt", "step-1.pt", "step-2.pt", "step-3.pt", "best.pt", "same.pt", "step-4.pt")
    ]
    assert [standing.is_timed for standing in standings] == [True, *[False] * 3, True, True, False]


def test_copies_of_one_time_stand_below(tmp_path: Path) -> None:
    for name in ("step-1.pt", "best.pt", "step-2.pt", "also.pt"):
        weights(tmp_path / name)
        written_at(tmp_path / name, 7)
    names = ["also.pt", "best.pt", "step-1.pt", "step-2.pt"]
    assert sorted(formats.oldest_first(str(tmp_path), names)[:2]) == names[:2]
    assert formats.oldest_first(str(tmp_path), names)[2:] == names[2:]


def test_equal_numbers_stand_by_name_then_by_time() -> None:
    paths = ["b/step-2", "a/step-2", "a/step-10", "a/step-2x"]
    standings = order.oldest_first(paths, lambda path: 5, lambda path: None)
    assert [standing.path for standing in standings] == [
        "b/step-2",
        "a/step-2",
        "a/step-2x",
        "a/step-10",
    ]


def test_equal_names_stand_by_time(tmp_path: Path) -> None:
    for folder, second in (("version_0", 20), ("version_1", 10)):
        lightning(tmp_path / folder / "checkpoints" / "last.ckpt", 5)
        written_at(tmp_path / folder / "checkpoints" / "last.ckpt", second)
    folders = [os.path.relpath(one.path, tmp_path) for one in candidates(str(tmp_path))]
    assert folders == [f"version_{number}/checkpoints/last.ckpt" for number in (0, 1)]


def test_what_cannot_be_read_is_the_newest_if_its_time_says_so(tmp_path: Path) -> None:
    """A save that has just begun is tried first, and left aside by who reads it."""
    for step in (1, 2):
        lightning(tmp_path / f"epoch={step}-val=0.{step}.ckpt", step)
        written_at(tmp_path / f"epoch={step}-val=0.{step}.ckpt", step)
    (tmp_path / "epoch=3-val=0.0.ckpt").write_bytes(b"PK\3\4")
    assert newest(tmp_path)[0] == "epoch=3-val=0.0.ckpt"


Make = Callable[[Path, int], None]


def deepspeed_tag(path: Path, step: int) -> None:
    shutil.copytree(EXAMPLE / "global_step7", path)


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (of_trainer, ("checkpoint-5", "checkpoint-7")),
        (deepspeed_tag, ("global_step5", "global_step7")),
        (lambda path, step: shutil.copytree(FSDP2, path), ("step-5", "step-7")),
    ],
    ids=["trainer", "deepspeed", "torchtitan"],
)
@pytest.mark.parametrize("is_absolute", [False, True])
def test_what_a_link_names_comes_first(
    make: Make, names: tuple[str, ...], is_absolute: bool, tmp_path: Path
) -> None:
    """And it is no checkpoint of its own."""
    for step, name in enumerate(names):
        make(tmp_path / "run" / name, step)
    run = tmp_path / "run"
    (run / "latest").symlink_to(run / names[0] if is_absolute else names[0])
    first, second = candidates(str(run))
    assert (first.name, second.name) == names
    assert first.loaded == str(run / names[0])
    assert f"names {names[0]} as its last checkpoint" in first.notes[0].message
    (run / "latest").unlink()
    assert newest(run) == [*names[::-1]]
    (run / "latest").symlink_to(tmp_path)  # out of the run: it names nothing
    assert newest(run)[0] == names[1]


def test_check_and_report_say_why_one_is_the_newest(
    tmp_path: Path, zckpt: Callable[..., Result]
) -> None:
    """As auto-resume does: its place is by the times of files, or named by the run."""
    for name, second in (("step=5.ckpt", 5), ("best.ckpt", 7)):
        weights(tmp_path / "timed" / name)
        written_at(tmp_path / "timed" / name, second)
    for step in (5, 7):
        shutil.copytree(FSDP2, tmp_path / "linked" / f"step-{step}")
    (tmp_path / "linked" / "latest").symlink_to("step-5")
    for run, word in (
        ("timed", "by the times of its files it is placed directly above"),
        ("linked", "names step-5 as its last checkpoint, which is used"),
    ):
        document = zckpt("check", tmp_path / run, "--dp", 2, "--json").document
        assert any(word in line["message"] for line in document["warnings"])
        faults = zckpt("report", tmp_path / run, "--json").document["faults"]
        assert [line["fault"] for line in faults if word in line["message"]] == [False]


def test_a_second_name_of_a_file(tmp_path: Path) -> None:
    """As Lightning makes it with save_last="link"."""
    lightning(tmp_path / "epoch=1-val=0.3.ckpt", 7)
    lightning(tmp_path / "epoch=2-val=0.2.ckpt", 9)
    (tmp_path / "last.ckpt").symlink_to("epoch=2-val=0.2.ckpt")
    assert newest(tmp_path) == ["epoch=2-val=0.2.ckpt", "epoch=1-val=0.3.ckpt"]


WEIGHTS = {f"layers.{number}.weight": torch.ones(1) for number in range(300)}
STEP = 20000
LIGHTNING = {"epoch": 1, "global_step": STEP, "pytorch-lightning_version": "2.6"}
DEEPSPEED = {"module": WEIGHTS, "skipped_steps": 0, "global_steps": STEP, "global_samples": 0}


def saved(value: Any, path: Path) -> bytes:
    torch.save(value, path)
    data = path.read_bytes()
    path.unlink()
    return data


def put(path: Path, data: bytes, step: int) -> None:
    """A file with another step; its checksum is not asked here."""
    path.parent.mkdir(exist_ok=True)
    old, new = (number.to_bytes(2, "little") for number in (STEP, 1000 + step))
    assert data.count(b"M" + old) == 1
    path.write_bytes(data.replace(b"M" + old, b"M" + new))


@pytest.mark.parametrize("kind", ["lightning", "trainer", "deepspeed", "optimizer"])
def test_hundreds_of_checkpoints_take_less_than_a_second(kind: str, tmp_path: Path) -> None:
    """Of 300 weights each, or with a long history; the names are in another order."""
    if kind == "lightning":
        data = saved({**LIGHTNING, "state_dict": WEIGHTS}, tmp_path / "x")
        names = [f"epoch={step}-val_loss={step * 37 % 100 / 100}.ckpt" for step in range(300)]
        for step, name in enumerate(names):
            put(tmp_path / name, data, step)
    elif kind == "optimizer":  # names with two numbers, and no counter in the files
        model = {f"w{number}": torch.ones(3) for number in range(10)}
        state = torch.optim.AdamW([*model.values()]).state_dict()
        names = [f"epoch={step}-loss={step * 37 % 100 / 100}.ckpt" for step in range(300)]
        for step, name in enumerate(names):
            slots = dict.fromkeys(("exp_avg", "exp_avg_sq"), torch.ones(3))
            own = {number: {"step": torch.tensor(float(step)), **slots} for number in range(10)}
            torch.save({"model": model, "optimizer": {**state, "state": own}}, tmp_path / name)
    elif kind == "deepspeed":
        data = saved({**DEEPSPEED, "ds_config": {}}, tmp_path / "x")
        names = [f"epoch{step * 37 % 300}" for step in range(300)]
        for step, name in enumerate(names):
            put(tmp_path / name / "mp_rank_00_model_states.pt", data, step)
    else:
        names = [f"checkpoint-{step * 37 % 300}" for step in range(300)]
        history = [{"loss": 1.0, "step": step} for step in range(3000)]
        state = json.dumps({"global_step": STEP, "log_history": history}, indent=2, sort_keys=True)
        for step, name in enumerate(names):
            (tmp_path / name).mkdir()
            (tmp_path / name / "trainer_state.json").write_text(state.replace(f"{STEP}", f"{step}"))
        shutil.copytree(TRAINER / "global_step4", tmp_path / names[0] / "global_step4")
    start = time.process_time()
    found = newest(tmp_path)
    assert (time.process_time() - start) / slowness() < 1
    assert found == names[::-1]


@pytest.mark.engines
@pytest.mark.parametrize("save_last", [True, "link"])
def test_files_that_lightning_names(save_last: bool | str, tmp_path: Path) -> None:
    """The loss falls, so that the newest file has the smallest number at the end of its name."""
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            loss = self.layer(batch).square().mean()
            self.log("val_loss", loss, on_epoch=True)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), 0.1)

    save = pl.callbacks.ModelCheckpoint(
        tmp_path / "run",
        "{epoch:02d}-{val_loss:.2f}",
        monitor="val_loss",
        save_top_k=-1,
        save_last=save_last,  # type: ignore[arg-type]  # the text is one of its words
    )
    torch.manual_seed(0)
    trainer = pl.Trainer(
        max_epochs=11,
        accelerator="cpu",
        logger=False,
        callbacks=[save],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.randn(4, 4), batch_size=2))  # type: ignore[arg-type]
    found = newest(tmp_path / "run")
    by_epoch = [name for name in found if name.startswith("epoch=")]
    assert [name[:8] for name in by_epoch] == [f"epoch={epoch:02}" for epoch in range(10, -1, -1)]
    assert by_epoch != sorted(by_epoch, key=lambda name: name.rpartition("=")[2], reverse=True)
    assert found[: 1 + (save_last is True)].count("last.ckpt") == (save_last is True)
