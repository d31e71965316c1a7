"""A run: the newest checkpoint's page, and all of them over time."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import zckpt

from ..conftest import ROOT
from ..faults import change, flip, optimizer_files
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
