"""The box "next": the line that resumes, or what is lost, what is left and what to do."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from zckpt.reporting.page import render, render_markdown
from zckpt.reporting.page.words import advice, title

from ..conftest import ROOT, Result
from ..faults import change, flip, optimizer_files
from .conftest import Document

Make = Callable[..., Document]
TRAINER = ROOT / "examples" / "trainer" / "checkpoint-4"
DATA = ROOT / "tests" / "data"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two checkpoints; the counters of the second one say 4 too."""
    for step in (4, 6):
        shutil.copytree(TRAINER, tmp_path / "run5" / f"checkpoint-{step}")
    return tmp_path / "run5"


def test_a_trainer_resumes(document: Make) -> None:
    found = document(TRAINER)["next"]
    assert found["resumes"] is True
    assert found["resume"] == f'trainer.train(resume_from_checkpoint="{TRAINER}")'
    assert found["other_size"] == f"zckpt reshard {TRAINER} NEW --dp N"
    assert (found["lost"], found["left"], found["do"]) == ([], None, [])


def test_the_engines_folder_is_the_trainers_checkpoint(document: Make) -> None:
    made = document(TRAINER / "global_step4")
    assert title(made) == ("checkpoint-4", "trainer")
    assert made["next"]["resume"].endswith('trainer/checkpoint-4", tag="global_step4")')


def test_a_tag_resumes(example: Path, document: Make) -> None:
    made = document(example)
    line = f'model_engine.load_checkpoint("{example}", tag="global_step7")'
    assert made["next"]["resume"] == line
    assert title(made) == ("global_step7", "run")


def test_what_any_number_of_ranks_loads_needs_no_command(document: Make) -> None:
    found = document(DATA / "fsdp2-2.13.0-tiny")["next"]
    assert (found["resumes"], found["other_size"]) == (True, None)


def test_masters_of_other_weights(
    example: Path, tmp_path: Path, document: Make, zckpt: Callable[..., Result]
) -> None:
    """The command that the page gives writes the weights: they are accepted as they are."""
    change(example, "fc1.weight/param", lambda data: bytes(len(data)))
    (step,) = document(example)["next"]["do"]
    words = shlex.split(step["command"].replace(" DST ", f" {tmp_path / 'dst'} "))
    assert step["what"] == "export the weights"
    assert zckpt(*words[1:]).code == 0


def test_a_lost_rank(
    example: Path, tmp_path: Path, document: Make, zckpt: Callable[..., Result]
) -> None:
    older = shutil.copytree(example / "global_step7", example / "global_step6")
    path = optimizer_files(example / "global_step7")[3]
    path.unlink()
    made = document(example, tag="global_step7")
    found = made["next"]
    assert found["resumes"] is False
    assert found["lost"] == ["masters and optimizer state of fc2 lost (83.7% of their elements)"]
    assert (found["left"], found["older"]) == ("weights complete", str(older))
    assert [step["what"] for step in found["do"]] == [
        "go on from global_step6",
        "export the weights",
        f"copy {path.name} back, if you have another copy",
        f"make up what is lost, with other values in its place ("
        f"masters made from the 16-bit weights and the moments of {older})",
    ]
    said = advice(found)
    assert said.startswith("Masters and optimizer state of fc2 lost (")
    assert said.endswith("; weights complete; go on from global_step6, or export the weights.")
    assert said in render(made)
    markdown, _ = render_markdown(made)
    assert "; weights complete; go on from global_step6" in markdown
    assert len(markdown.splitlines()) <= 20
    # what the box says is true: the command that it shows writes the weights
    command = shlex.split(found["do"][1]["command"].replace("DST", str(tmp_path / "weights")))
    assert command.pop(0) == "zckpt"
    assert zckpt(*command).code == 0
    assert (tmp_path / "weights" / "model.safetensors").is_file()


@pytest.mark.parametrize("alone", [False, True])
def test_the_older_one_of_a_trainers_run(alone: bool, run: Path, document: Make) -> None:
    optimizer_files(run / "checkpoint-6")[0].unlink()
    found = document(run / "checkpoint-6" if alone else run)["next"]
    assert (found["older"], found["left"]) == (str(run / "checkpoint-4"), "weights complete")
    line = f'trainer.train(resume_from_checkpoint="{run / "checkpoint-4"}")'
    assert found["do"][0] == {"what": "go on from checkpoint-4", "command": line}
    optimizer_files(run / "checkpoint-4")[0].unlink()
    assert document(run / "checkpoint-6" if alone else run)["next"]["older"] is None


def test_all_of_the_optimizer(example: Path, document: Make) -> None:
    for path in optimizer_files(example):
        path.unlink()
    found = document(example)["next"]
    assert found["lost"] == ["all optimizer state lost"]
    assert found["left"] == "weights complete"


def test_weights_alone(tmp_path: Path, document: Make, zckpt: Callable[..., Result]) -> None:
    target = tmp_path / "weights"
    assert zckpt("export", TRAINER, target).code == 0
    made = document(target)
    assert made["next"]["resumes"] is False
    assert advice(made["next"]).startswith("Weights without an optimizer: no run resumes from them")
    assert 'class="next odd"' in render(made)


def test_a_lost_file_with_weights(tmp_path: Path, document: Make) -> None:
    run = shutil.copytree(DATA / "deepspeed-0.11.0-z3_dp2_sub_groups" / "run", tmp_path / "run")
    for path in run.rglob("*zero_pp_rank_1_*optim*"):
        path.unlink()
    found = document(run)["next"]
    assert "% of the weights left" in found["left"]
    assert any(line.startswith("weights and optimizer state of ") for line in found["lost"])
    assert "export the weights" not in [step["what"] for step in found["do"]]


def test_damaged_values(example: Path, document: Make) -> None:
    change(example, "fc1.weight/exp_avg", flip(3, 4, 1), mended=False)
    found = document(example)["next"]
    assert found["lost"] == ["optimizer state of fc1 damaged"]
    assert found["left"] == "weights complete"
    change(example, "fc2.weight/param", flip(3, 2, 14), mended=False)
    found = document(example)["next"]
    assert "weights of fc2 damaged" in found["lost"]
    assert found["left"] is None


def test_nothing_could_be_read(example: Path, document: Make) -> None:
    for path in (example / "global_step7").iterdir():
        path.write_bytes(b"")
    made = document(example)
    assert made["next"]["lost"] == ["nothing could be read but the names of files"]
    assert "Nothing could be read" in render(made)


def test_layers_have_their_names(document: Make) -> None:
    made = document(TRAINER)
    assert made["layers"] == {"0": "layers.0", "1": "layers.1"}
    assert made["numbers"]["rows"] == ["embed_tokens", "0", "1", "norm"], "as before"
    assert "<bdi>layers.1</bdi>" in render(made)


def test_pages_of_two_runs_have_names_of_their_own(
    run: Path, zckpt: Callable[..., Result], monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(run / "checkpoint-4", run.parent / "run6" / "checkpoint-4")
    monkeypatch.chdir(run.parent)
    for path in ("run5/checkpoint-4", "run6/checkpoint-4"):
        assert "in the place of" not in zckpt("report", path).out
    monkeypatch.chdir(run)
    assert "written: run5-checkpoint-4.html" in zckpt("report", "checkpoint-4").out
    pages = {path.name for path in run.parent.glob("*.html")}
    assert pages == {"run5-checkpoint-4.html", "run6-checkpoint-4.html"}
    page = (run.parent / "run6-checkpoint-4.html").read_text()
    assert "<title>checkpoint-4 of run6 · zckpt report</title>" in page


def test_markdown_has_what_people_ask_first_in_twenty_lines(document: Make) -> None:
    markdown, _ = render_markdown(document(TRAINER))
    assert markdown.startswith("# checkpoint-4 of trainer\n")
    assert "| model | LlamaForCausalLM |" in markdown
    row = (
        "| training | loss 3.118, learning rate 0.001875 in the trainer's log, "
        "0.0015 in the optimizer, epoch 0.2667, global batch 8 |"
    )
    assert row in markdown
    assert len(markdown.splitlines()) <= 20
