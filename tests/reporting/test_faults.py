"""Every planted fault is in the document, with its tensor or file, its word and exit code 3."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest

from ..conftest import Result
from ..faults import change, flip, optimizer_files, raise_step, swap_ranks
from .conftest import Document, faults_of

Zckpt = Callable[..., Result]
Make = Callable[..., Document]
NAN, DENORMAL = struct.pack("<f", float("nan")), struct.pack("<f", 1e-40)


def replaced(element: int, number: bytes) -> Callable[[bytes], bytes]:
    return lambda data: data[: 4 * element] + number + data[4 * element + 4 :]


def constant(data: bytes) -> bytes:
    return data[:2] * (len(data) // 2)


PLANTED = [
    (
        "checksum",
        "fc1.weight/exp_avg",
        True,
        lambda run: change(run, "fc1.weight/exp_avg", flip(3, 4, 1), mended=False),
    ),
    (
        "NaN",
        "fc1.weight/exp_avg",
        True,
        lambda run: change(run, "fc1.weight/exp_avg", replaced(5, NAN)),
    ),
    (
        "stale",
        "fc1.weight/master",
        True,
        lambda run: change(run, "fc1.weight/param", flip(33, 2, 1)),
    ),
    (
        "impossible",
        "fc1.weight/exp_avg_sq",
        True,
        lambda run: change(run, "fc1.weight/exp_avg_sq", flip(2, 4, 31)),
    ),
    (
        "dead",
        "fc1.weight/exp_avg_sq",
        False,
        lambda run: change(run, "fc1.weight/exp_avg_sq", lambda data: bytes(len(data))),
    ),
    (
        "denormal",
        "fc1.weight/exp_avg",
        False,
        lambda run: change(run, "fc1.weight/exp_avg", replaced(5, DENORMAL)),
    ),
    ("constant", "frozen.weight/param", False, None),
]


def plant_constant(run: Path) -> None:
    change(run, "frozen.weight/param", constant)


@pytest.mark.parametrize(("kind", "tensor", "is_fault", "plant"), PLANTED, ids=lambda v: str(v)[:9])
def test_planted(
    kind: str,
    tensor: str,
    is_fault: bool,
    plant: Callable[[Path], None] | None,
    example: Path,
    document: Make,
    zckpt: Zckpt,
) -> None:
    assert not document(example)["faults"]
    (plant or plant_constant)(example)
    made = document(example)
    (line,) = faults_of(made, kind)
    assert line["tensor"] == tensor
    assert line["fault"] is is_fault
    assert kind.lower() in line["message"].lower()
    assert tensor in line["message"]
    output = example / "page.html"
    ended = zckpt("report", example, "--output", output, "--quiet")
    assert ended.code == (3 if is_fault else 0)
    sentence = line["message"].removeprefix(f"{line['kind']}: ")  # as other commands print it
    assert (sentence in ended.out) is is_fault
    assert output.exists()


def test_damage_has_its_bytes(example: Path, document: Make) -> None:
    change(example, "fc1.weight/exp_avg", flip(3, 4, 1), mended=False)
    made = document(example)
    (line,) = faults_of(made, "checksum")
    (place,) = made["map"]["damaged"]
    file = made["map"]["files"][place["file"]]
    assert file["name"] == line["file"]
    assert file["state"] == "damaged"
    assert (place["offset"], place["length"]) == (line["offset"], line["length"])
    assert made["tensors"]["name"][place["tensor"]] == "fc1.weight/exp_avg"
    assert made["line"]["checked"] == "1 checksum is wrong"
    assert made["numbers"]["measures"]


def test_a_stale_master_is_named_with_its_byte(example: Path, document: Make) -> None:
    change(example, "fc1.weight/param", flip(33, 2, 1))
    made = document(example)
    (line,) = faults_of(made, "stale")
    assert "1 of 551 elements" in line["message"]
    assert "2 ULP" in line["message"]
    pieces = made["map"]["pieces"]
    tensor = made["tensors"]["name"].index("fc1.weight/master")
    (number,) = [
        n
        for n, each in enumerate(pieces["tensor"])
        if each == tensor and pieces["start"][n] <= 33 < pieces["stop"][n]
    ]
    assert made["map"]["files"][pieces["file"][number]]["name"] == line["file"]
    assert line["offset"] == pieces["offset"][number] + 4 * (33 - pieces["start"][number])


def test_a_step_that_differs(example: Path, document: Make, zckpt: Zckpt) -> None:
    raise_step(example, 1)
    made = document(example)
    (line,) = faults_of(made, "step")
    first = optimizer_files(example)[0].name
    assert line["file"] == first
    assert first in line["message"]
    assert f"8 (rank 0, {first}" in line["message"]
    assert made["line"]["step"] == made["steps"]["true"] == 7
    states = [(place["file"], place["step"], place["agrees"]) for place in made["steps"]["places"]]
    assert states[0] == (first, 8, False)
    assert [agrees for _, step, agrees in states if step == 7][:3] == [True] * 3
    assert zckpt("report", example, "--json").code == 3


def test_files_that_contradict_each_other_are_shown(
    example: Path, document: Make, zckpt: Zckpt
) -> None:
    swap_ranks(example, renamed=False)
    made = document(example)
    (line,) = faults_of(made, "unreadable")
    assert "swapped" in line["message"]
    assert optimizer_files(example)[0].name in line["message"]
    assert {file["name"] for file in made["map"]["files"]} >= {
        path.name for path in optimizer_files(example)
    }
    assert zckpt("report", example, "--json").code == 3


def test_nothing_to_show(tmp_path: Path, zckpt: Zckpt) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "x.txt").write_text("no checkpoint")
    ended = zckpt("report", tmp_path / "notes", "--output", tmp_path / "x.html")
    assert ended.code == 1
    assert "is not a checkpoint" in ended.err
    assert not (tmp_path / "x.html").exists()
    assert zckpt("report", tmp_path, "--from", "nothing").code == 2
