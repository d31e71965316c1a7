"""A run: the newest checkpoint's page, and all of them over time."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import zckpt
from zckpt.errors import WrongOption
from zckpt.reporting.page import render
from zckpt.reporting.page.curves import curves

from ..conftest import ROOT, Result
from ..faults import change, flip, optimizer_files
from . import documents
from .conftest import Document

Make = Callable[..., Document]
CHECKPOINT = ROOT / "examples" / "trainer" / "checkpoint-4"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (2, 4, 10):
        shutil.copytree(CHECKPOINT, tmp_path / "out" / f"checkpoint-{step}")
    return tmp_path / "out"


def test_one_checkpoint_is_its_page(document: Make) -> None:
    made = document(CHECKPOINT.parent)
    assert "run" not in made
    assert made["path"].endswith("checkpoint-4/global_step4")


def test_several_checkpoints(run: Path, document: Make) -> None:
    optimizer_files(run / "checkpoint-4")[1].unlink()
    made = document(run)
    strip = made["run"]
    assert [each["name"] for each in strip["checkpoints"]] == [
        "checkpoint-2",
        "checkpoint-4",
        "checkpoint-10",
    ]
    assert strip["shown"] == 2
    assert [each["whole"] for each in strip["checkpoints"]] == [True, False, True]
    line = strip["checkpoints"][1]
    assert " lacks " in line["why"]
    (fault,) = (each for each in made["faults"] if each["fault"])
    assert fault["message"] == f"checkpoint-4: {line['why']}"
    assert line["reason"]["code"] == fault["code"] == "missing-rank-file"
    assert (line["reason"]["severity"], line["faults"]) == ("error", 1)
    assert fault["file"] == f"checkpoint-4/{line['reason']['file']}"
    assert line["reason"]["file"].endswith("_optim_states.pt")
    assert [each["reason"] for each in strip["checkpoints"][::2]] == [None, None]
    newest = strip["checkpoints"][2]
    weights = [
        zckpt.load(run / "checkpoint-10", f"{name}/param").double().square().sum()
        for name in zckpt.read(run / "checkpoint-10").parameters
        if ".layers.1." in name
    ]
    assert newest["norms"]["1"] == pytest.approx(math.sqrt(sum(weights)))
    assert newest["updates"].keys() == {"embed_tokens", "0", "1", "norm"}
    assert (newest["step"], newest["dp"], newest["bytes"]) == (4, 2, 84207)
    assert set(strip["rows"]) >= newest["norms"].keys()
    assert made["path"] == str(run)


def test_a_tag_is_one_checkpoint(example: Path, document: Make) -> None:
    shutil.copytree(example / "global_step7", example / "global_step9")
    assert len(document(example)["run"]["checkpoints"]) == 2
    made = document(example, tag="global_step9")
    assert "run" not in made
    assert made["line"]["name"] == "global_step9"


@pytest.fixture
def tags(example: Path) -> Path:
    """Three checkpoints, the last of which is 9."""
    for step in (8, 9):
        shutil.copytree(example / "global_step7", example / f"global_step{step}")
    (example / "latest").write_text("global_step9")
    return example


@pytest.mark.parametrize("named", ["global_step99", "global_ste"])
@pytest.mark.parametrize("others", [1, 3])
def test_a_run_names_one_that_is_not_there(
    named: str, others: int, tags: Path, document: Make
) -> None:
    for step in (8, 9)[: 3 - others]:
        shutil.rmtree(tags / f"global_step{step}")
    (tags / "latest").write_text(named)
    made = document(tags)
    assert made["line"]["name"] == ("global_step7" if others == 1 else "global_step9")
    assert made["line"]["step"] == 7
    assert len(made.get("run", {}).get("checkpoints", [1])) == others
    (fault,) = (each for each in made["faults"] if each["fault"])
    assert (fault["kind"], fault["fault"]) == ("missing", True)
    assert named in fault["message"]


def test_the_newest_one_cannot_be_read(tags: Path, document: Make) -> None:
    for path in (tags / "global_step9").iterdir():
        path.write_bytes(b"")
    made = document(tags)
    assert made["line"]["name"] == "global_step9"
    (fault,) = (each for each in made["faults"] if each["fault"])
    assert fault["file"] == "mp_rank_00_model_states.pt"
    states = {file["name"]: file["state"] for file in made["map"]["files"]}
    assert len(states) == 5
    assert states["mp_rank_00_model_states.pt"] == "damaged"


def test_faults_of_an_earlier_one_have_their_kind(tags: Path, document: Make) -> None:
    change(tags / "global_step7", "fc1.weight/exp_avg", flip(3, 4, 1), mended=False)
    change(tags / "global_step7", "fc1.weight/param", flip(3, 2, 14), mended=False)
    optimizer_files(tags / "global_step9")[0].unlink()
    made = document(tags)
    lines = [(line["kind"], line["message"]) for line in made["faults"]]
    assert [kind for kind, _ in lines] == ["missing", "checksum"], "worst first"
    assert lines[1][1].startswith("global_step7: ")
    assert "more fault" in lines[1][1]
    (first, *_) = made["run"]["checkpoints"]
    assert first["reason"]["message"] in lines[1][1]
    assert "more fault" not in first["reason"]["message"]
    assert (
        made["faults"][1].items()
        >= {
            "code": first["reason"]["code"],
            "subject": first["reason"]["subject"],
            "hint": first["reason"]["hint"],
        }.items()
    )


def test_faults_stand_at_the_checkpoint_that_has_them(tags: Path, document: Make) -> None:
    change(tags / "global_step7", "fc1.weight/exp_avg", flip(3, 4, 1), mended=False)
    made = document(tags)
    assert [fault["checkpoint"] for fault in made["faults"] if fault["fault"]] == ["global_step7"]
    page = render(made)
    strip, _, below = page.partition("<h1>")
    assert 'class="verdict good"' in below, "the checkpoint that is shown has none"
    assert '1 has faults: <a href="#checkpoint-0"><bdi>global_step7</bdi></a>' in strip
    assert '<tr id="checkpoint-0" class="bad"><th scope="row"><bdi>global_step7</bdi>' in strip
    assert page.count("is damaged, as if bit") == 1, "each sentence once"
    optimizer_files(tags / "global_step9")[0].unlink()
    page = render(document(tags))
    assert re.search('class="verdict bad">.*1 fault<', page)
    assert '<a href="#faults">✕ 1 fault, below</a>' in page
    assert "What is wrong with <bdi>global_step9</bdi>" in page


def test_a_checkpoint_that_the_run_names_is_no_fault_of_another(tags: Path, document: Make) -> None:
    (tags / "latest").write_text("global_step99")
    made = document(tags)
    (fault,) = (each for each in made["faults"] if each["fault"])
    assert fault["checkpoint"] == "global_step99"
    page = render(made)
    assert 'class="verdict good"' in page
    assert "global_step99" in page.partition("<h1>")[0]


def test_faults_lead_to_what_they_are_about() -> None:
    page = render(documents.faulty())
    links = re.findall('<a href="#([a-z]+)" data-fault="([0-9]+)">', page)
    kinds = [documents.faulty()["faults"][int(place)]["kind"] for _, place in links]
    assert {*zip(kinds, (to for to, _ in links), strict=True)} >= {
        *(("missing", "map"), ("checksum", "map"), ("NaN", "numbers")),
        *(("stale", "masters"), ("step", "steps")),
    }
    for section, _ in links:
        assert f'id="{section}"' in page


def test_checkpoints_of_one_step_are_labelled_by_name(run: Path, document: Make) -> None:
    made = document(run)  # three copies of step 4
    names = ["checkpoint-2", "checkpoint-4", "checkpoint-10"]
    for curve in curves(made["run"]):
        assert [label for _, label in curve.labels] == names
    for point in made["run"]["checkpoints"]:
        point |= {"loss": None, "totals": {}}
    made["run"]["losses"] = []
    page = render(made)
    assert "Size of each checkpoint" in page, "without numbers there are bars"
    for name in names:
        assert re.search(f'<text x="[0-9.]+" y="[0-9.]+">{name}</text>', page), name


def logged(path: Path, losses: dict[int, float]) -> None:
    """Gives a checkpoint's trainer_state.json another log."""
    state = json.loads(path.read_text())
    log = [{"step": step, "loss": loss, "learning_rate": 1e-3} for step, loss in losses.items()]
    path.write_text(json.dumps({**state, "log_history": log}))


def test_the_loss_beside_norms(run: Path, document: Make) -> None:
    for name, losses in {"2": {1: 3.0, 2: 2.5}, "4": {1: 3.0, 2: 2.5, 4: 2.0}}.items():
        logged(run / f"checkpoint-{name}" / "trainer_state.json", losses)
    (run / "checkpoint-10" / "trainer_state.json").write_bytes(b"{")
    strip = document(run)["run"]
    assert [point["loss"] for point in strip["checkpoints"]] == [2.5, 2.0, None]
    assert strip["losses"] == [[1, 3.0], [2, 2.5], [4, 2.0]], "the last log that can be read"
    newest = strip["checkpoints"][2]
    squares = sum(norm**2 for norm in newest["norms"].values())
    assert newest["totals"]["norms"] == pytest.approx(math.sqrt(squares))
    moments = [
        zckpt.load(run / "checkpoint-10", f"{name}/exp_avg").double().flatten()
        for name in zckpt.read(run / "checkpoint-10").parameters
    ]
    elements = sum(each.numel() for each in moments)
    rms = math.sqrt(sum(float(each.square().sum()) for each in moments) / elements)
    assert newest["totals"]["moments"] == pytest.approx(rms)
    assert newest["moments"].keys() == newest["norms"].keys()
    titles = [curve.title for curve in curves(strip)]
    assert titles[:3] == ["Loss", "Norm of weights", "RMS of Adam's update"]


def test_curves_share_the_axis_of_steps_and_show_what_is_not_finite() -> None:
    made = documents.run()["run"]
    del made["checkpoints"][2]  # whose step is not known
    for place, point in enumerate(made["checkpoints"]):
        loss = "nan" if place == 6 else 3.0 / (place + 1)
        point |= {"totals": {"norms": 1.0 + place}, "loss": loss}
    made["losses"] = [[50, 4.0], [400, 2.0], [650, 1.5], [700, None], [750, 1.0], [800, 0.5]]
    loss, norms = curves(made)
    assert [label for _, label in norms.labels] == ["100", "200", "400", "500", "600", "700", "800"]
    assert loss.labels == norms.labels
    assert len(loss.lines) == 2, "the line ends where the loss is not finite"
    assert [says for _, says in loss.lost] == ["no finite value at 700"]
    assert len(loss.dots) == 6
    assert [dot.sign for dot in norms.dots].count(True) == len(norms.marks) == 1
    for dot in (*loss.dots, *norms.dots):
        assert 0 <= dot.x <= loss.width
        assert 0 <= dot.y <= loss.height


@pytest.mark.parametrize("value", [0.0, -1.0, 5e-324, 1e300])
def test_curves_of_any_size(value: float) -> None:
    made = documents.run()["run"]
    for place, point in enumerate(made["checkpoints"]):
        point |= {"totals": {"norms": value * (1 + place % 2)}, "loss": value}
    for curve in curves(made):
        assert all(math.isfinite(dot.y) and 0 <= dot.y <= curve.height for dot in curve.dots)


def test_since_a_step(run: Path, document: Make) -> None:
    for step in (2, 4, 10):
        path = run / f"checkpoint-{step}" / "trainer_state.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "global_step": step}))
    strip = document(run, since=4)["run"]
    assert [line["name"] for line in strip["checkpoints"]] == ["checkpoint-4", "checkpoint-10"]
    assert [step for step, _ in strip["losses"]] == [4], "the log has steps before it"
    made = document(run, since=5)
    assert "run" not in made
    assert made["about"]["name"] == "checkpoint-10"
    with pytest.raises(WrongOption, match="no checkpoint of step 11 or later") as raised:
        document(run, since=11)
    assert "step 10" in raised.value.hint


def test_since_of_the_command(tags: Path, zckpt: Callable[..., Result], tmp_path: Path) -> None:
    page = tmp_path / "x.html"
    assert zckpt("report", tags, "--since", "7", "--output", page).code == 0
    assert "3 checkpoints of <bdi>run</bdi>" in page.read_text()
    ended = zckpt("report", tags, "--since", "99", "--output", page)
    assert (ended.code, "no checkpoint of step 99 or later" in ended.err) == (2, True)
