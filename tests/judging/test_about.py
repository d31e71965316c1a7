"""What other programs say beside a checkpoint is shown if it can be believed; it breaks nothing."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

import zckpt
from zckpt.judging.about import MOST_POINTS, about, about_folder, of_log, thinned
from zckpt.reporting.page import render, render_markdown
from zckpt.training.trainers import MAX_JSON

from ..conftest import ROOT

TRAINER = ROOT / "examples" / "trainer" / "checkpoint-4"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return shutil.copytree(TRAINER, tmp_path / "run5" / "checkpoint-4")


def change(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def test_of_a_trainer() -> None:
    found = about(zckpt.read(TRAINER))
    assert (found.model, found.model_class) == (None, "LlamaForCausalLM")
    assert (found.loss, found.loss_step) == (pytest.approx(3.118, abs=1e-3), 4)
    assert (found.learning_rate, found.planned) == (0.001875, 8)
    assert found.epoch == pytest.approx(4 / 15)
    assert [step for step, _ in found.losses] == [1, 2, 3, 4]
    counters = zckpt.read(TRAINER).state["counters"]
    assert found.global_batch == counters["global_samples"] / counters["global_steps"] == 8


def test_of_a_folder_that_cannot_be_read(checkpoint: Path) -> None:
    found = about_folder(str(checkpoint))
    assert (found.model_class, found.loss_step) == ("LlamaForCausalLM", 4)
    assert about_folder(str(checkpoint / "nothing")).loss is None


def test_of_an_engine_alone() -> None:
    found = about(zckpt.read(ROOT / "examples" / "run"))
    assert (found.model_class, found.loss, found.losses) == (None, None, ())
    assert (found.learning_rate, found.global_batch) == (0.003, 24)


def test_an_adapter_is_called_by_its_model(checkpoint: Path) -> None:
    text = '{"base_model_name_or_path": "org/Llama", "peft_type": "LORA"}'
    (checkpoint / "adapter_config.json").write_text(text)
    found = about_folder(str(checkpoint))
    assert (found.model, found.model_class) == ("adapter of org/Llama", "LORA")


@pytest.mark.parametrize("name", ["trainer_state.json", "config.json"])
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 64,
        b"\xff\xfe{}",
        b"[1]",
        b'{"log_history": 3, "architectures": 3, "epoch": "x", "max_steps": -1}',
        b'{"log_history": [null, [], {"loss": "x", "step": 1}, {"loss": 1, "step": null}]}',
        b'{"log_history": [{"loss": true, "step": 1}], "architectures": [[]], "epoch": 1e999}',
        b"[" * 100_000,
        b'{"log_history": [{"loss": 1, "step": ' + b"9" * 5000 + b"}]}",
        b'{"epoch": ' + b"9" * 4000 + b', "architectures": {"a": 1}, "_name_or_path": 7}',
        b" " * (MAX_JSON + 1),
    ],
)
def test_a_damaged_file_states_nothing_and_breaks_no_page(
    name: str, content: bytes, checkpoint: Path
) -> None:
    (checkpoint / name).write_bytes(content)
    document = json.loads(json.dumps(zckpt.report(checkpoint), allow_nan=False))
    stated = document["about"]
    if name == "config.json":
        assert (stated["model"], stated["model_class"]) == (None, None)
    else:
        assert (stated["loss"], stated["epoch"], stated["losses"]) == (None, None, [])
        assert stated["learning_rate"] == pytest.approx(0.0015), "that of the optimizer's group"
    assert ">checkpoint-4<" in render(document)
    render_markdown(document)


def test_a_loss_that_is_not_finite_is_told(checkpoint: Path) -> None:
    log = [{"loss": 1.5, "step": 1}, {"loss": math.nan, "step": 2}]
    change(checkpoint / "trainer_state.json", log_history=log)
    document = json.loads(json.dumps(zckpt.report(checkpoint), allow_nan=False))
    assert document["about"]["loss"] == "nan"
    assert document["about"]["losses"] == [[1, 1.5], [2, None]]
    assert "nan at step 2" in render(document)


def test_names_are_short_and_escaped(checkpoint: Path) -> None:
    hostile = "<script>alert(1)</script>" + "x" * 1_000_000
    change(checkpoint / "config.json", architectures=[hostile], _name_or_path="a\u202eb<img>")
    document = zckpt.report(checkpoint)
    assert len(document["about"]["model_class"]) == 200
    page = render(document)
    assert "<script>alert" not in page
    assert "<img>" not in page
    assert "a\\u202eb&lt;img&gt;" in page


def test_of_very_many_losses_the_peaks_stay() -> None:
    points = [(step, 2.0 + (step == 7777) * 5 - (step == 8888)) for step in range(100_000)]
    kept = thinned(points)
    assert len(kept) <= MOST_POINTS + 2
    assert {points[0], points[-1], points[7777], points[8888]} <= {*kept}
    assert list(kept) == sorted(kept)


def test_the_last_evaluation_is_stated() -> None:
    log = [{"loss": 3.0, "step": 1}, {"eval_loss": 2.5, "step": 1}, {"train_loss": 9.0, "step": 2}]
    found = of_log({"log_history": log})
    assert (found["loss"], found["loss_step"], found["evaluation_loss"]) == (3.0, 1, 2.5)
