"""The first big difference of two runs, its meaning, and its display."""

from __future__ import annotations

import json
import shutil
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from zckpt import probe
from zckpt.display import picture
from zckpt.errors import (
    CorruptCheckpoint,
    InconsistentCheckpoint,
    MissingData,
    NotACheckpoint,
    UnsupportedCheckpoint,
)
from zckpt.probe import runs

from ..conftest import ROOT, Result, texts

Zckpt = Callable[..., Result]
DUMPS = ROOT / "tests" / "data" / "onnxruntime-activations"
MODULES = ("embedding", "layers.0", "head")
Change = Callable[[dict[str, Any]], None]


def line(step: int, kind: str, key: str, batch: str = "0", value: float = 1.0) -> dict[str, Any]:
    return {
        "step": step, "batch": batch, "order": 0, "kind": kind, "key": key, "dtype": "F32",
        "shape": [4], "elements": 4, "min": -value, "max": value, "mean": 0.25, "std": 0.5,
        "norm": 2.0, "nan": 0, "inf": 0, "negative_inf": 0, "negative": 1, "zero": 0,
        "positive": 3, "crc32": f"{abs(hash(value)) & 0xFFFFFFFF:08x}", "samples": [value, 0.5],
    }  # fmt: skip


def events(steps: Iterable[int] = (7, 8, 9)) -> list[dict[str, Any]]:
    records = []
    for step in steps:
        records += [line(step, "parameter", f"{name}.weight") for name in MODULES]
        for batch in ("0", "1"):
            records += [line(step, "forward", f"{name}#0/out", batch) for name in MODULES]
            records += [
                line(step, "backward", f"{name}#0/out", batch) for name in reversed(MODULES)
            ]
    return records


def write(
    path: Path, lines: list[dict[str, Any]], rank: int = 0, world: int = 1, version: int = 1
) -> Path:
    folder = path / runs.rank_folder(rank)
    folder.mkdir(parents=True)
    header = {"zckpt_probe": version, "world": world, "rank": rank}
    text = [json.dumps(each) for each in (header, *lines, {"closed": len(lines)})]
    (folder / runs.RECORDS).write_text("\n".join(text) + "\n")
    return path


@pytest.fixture
def run_a(tmp_path: Path) -> Path:
    return write(tmp_path / "a", events())


def changed(path: Path, step: int, kind: str, key: str, batch: str = "0", **numbers: Any) -> Path:
    """A run that differs in this record and in all later ones."""
    lines = events()
    about = {"step": step, "kind": kind, "key": key, "batch": batch}
    first = next(n for n, each in enumerate(lines) if about.items() <= each.items())
    for each in lines[first:]:
        each |= {"crc32": "00000000", **numbers}
    return write(path, lines)


def test_no_difference(run_a: Path, tmp_path: Path, zckpt: Zckpt) -> None:
    ended = zckpt("probe-diff", run_a, write(tmp_path / "b", events()))
    assert (ended.code, ended.err) == (0, "")
    assert ended.out == "no difference in 45 records of steps 7 to 9\n"


@pytest.mark.parametrize(
    ("step", "kind", "key", "batch", "meaning"),
    [
        (7, "parameter", "layers.0.weight", "0", "this weight differs before the first update"),
        (7, "forward", "layers.0#0/out", "0", "the first forward: weights, buffers or"),
        (
            7,
            "backward",
            "layers.0#0/out",
            "0",
            "the first forward pass is equal, its backward pass is not: the loss scale",
        ),
        (7, "forward", "layers.0#0/out", "1", "the first batch is equal, a later one"),
        (8, "forward", "layers.0#0/out", "0", "equal until the first update: moments, masters"),
        (8, "parameter", "layers.0.weight", "0", "equal until the first update: moments, masters"),
        (
            8,
            "backward",
            "layers.0#0/out",
            "0",
            "the second forward pass is equal, its backward pass is not: the loss scale",
        ),
        (
            8,
            "forward",
            "layers.0#0/out",
            "1",
            "equal beyond the first update: the order of the data, the random state",
        ),
        (
            9,
            "forward",
            "layers.0#0/out",
            "0",
            "equal beyond the first update: the order of the data, the random state",
        ),
    ],
)
def test_the_first_big_difference_and_what_its_place_means(
    step: int, kind: str, key: str, batch: str, meaning: str, run_a: Path, tmp_path: Path
) -> None:
    run_b = changed(tmp_path / "b", step, kind, key, batch, samples=[1.5, 0.5])
    report = probe.compare(run_a, run_b)
    place = [report["big"][name] for name in ("step", "kind", "key", "batch")]
    assert place == [step, kind, key, batch]
    assert report["big"]["what"] == "sample 0 1 against 1.5"
    assert report["big"]["distance"] == 0.5  # of the root mean square, 1
    assert report["big"]["meaning"].startswith(meaning)
    assert report["first"] == report["big"]
    assert not report["equal"]


def test_small_differences_are_told_and_tolerated(
    run_a: Path, tmp_path: Path, zckpt: Zckpt
) -> None:
    run_b = changed(tmp_path / "b", 8, "forward", "head#0/out", mean=0.25 + 1e-6)
    ended = zckpt("probe-diff", run_a, run_b)
    assert ended.code == 0
    assert ended.out.startswith("no big difference in 45 records")
    assert "first difference: step 8, batch 0, forward of head#0/out: mean" in ended.out


@pytest.mark.parametrize(("dtype", "distance"), [("F64", 1e-9), ("F32", 1e-4), ("BF16", 0.1)])
def test_tolerances_are_those_of_the_type(dtype: str, distance: float, tmp_path: Path) -> None:
    for name, size in (("a", 0.0), ("small", distance / 100), ("big", distance)):
        lines = events()
        for each in lines:
            each |= {"dtype": dtype, "mean": 0.25 + size, "crc32": str(size)}
        write(tmp_path / name, lines)
    assert probe.compare(tmp_path / "a", tmp_path / "small")["big"] is None
    assert probe.compare(tmp_path / "a", tmp_path / "big")["big"]


def test_an_extreme_is_rounded_as_the_large_number_that_it_is(run_a: Path, tmp_path: Path) -> None:
    lines = events()
    for each in lines:
        each |= {"dtype": "BF16", "max": 16.0}
    a = write(tmp_path / "far", lines)
    lines[-1] |= {"max": 16.125, "crc32": "other"}  # the next number in bfloat16
    assert probe.compare(a, write(tmp_path / "next", lines))["big"] is None
    lines[-1] |= {"max": 17.0}
    assert probe.compare(a, write(tmp_path / "off", lines))["big"]["distance"] == 1 / 16


def test_numbers_of_which_float64_has_no_norm(tmp_path: Path) -> None:
    lines = events()
    for each in lines:
        each |= {"dtype": "F64", "norm": "inf", "max": 1.7e308, "samples": [1.7e308, 0.5]}
    a = write(tmp_path / "a", lines)
    lines[-1] |= {"max": 1.5e308, "crc32": "other"}
    assert probe.compare(a, write(tmp_path / "b", lines))["big"]["distance"] > 0.1


def test_while_the_original_repeats_itself_any_difference_is_big(
    run_a: Path, tmp_path: Path
) -> None:
    again = write(tmp_path / "again", events())
    run_b = changed(tmp_path / "b", 8, "forward", "head#0/out", mean=0.25 + 1e-9)
    report = probe.compare(run_a, run_b, again)
    assert report["big"]["key"] == "head#0/out"
    assert report["noise_floor"] == 0
    unseen = changed(tmp_path / "unseen", 8, "forward", "head#0/out")  # in its CRC-32 alone
    what = probe.compare(run_a, unseen, again)["big"]["what"]
    assert what == "checksums differ, recorded numbers do not"
    assert probe.compare(run_a, unseen)["big"] is None


def test_what_the_original_does_to_itself_is_tolerated(run_a: Path, tmp_path: Path) -> None:
    noisy = changed(tmp_path / "noisy", 7, "backward", "head#0/out", mean=0.26)
    three = changed(tmp_path / "three", 7, "backward", "head#0/out", mean=0.28)
    five = changed(tmp_path / "five", 7, "backward", "head#0/out", mean=0.30)
    assert probe.compare(run_a, three, noisy)["big"] is None
    report = probe.compare(run_a, five, noisy)
    assert report["big"]["kind"] == "backward"
    assert report["noise_floor"] == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("numbers", "what"),
    [
        ({"nan": 2}, "nan 0 against 2"),
        ({"negative_inf": 1}, "negative_inf 0 against 1"),
        ({"shape": [2, 2]}, "shape [4] against [2, 2]"),
        ({"dtype": "BF16"}, "type F32 against BF16"),
        ({"samples": ["inf", 0.5]}, "sample 0 1 against inf"),
    ],
)
def test_what_has_no_distance_is_infinitely_apart(
    numbers: dict[str, Any], what: str, run_a: Path, tmp_path: Path, zckpt: Zckpt
) -> None:
    run_b = changed(tmp_path / "b", 8, "forward", "head#0/out", **numbers)
    result = zckpt("probe-diff", run_a, run_b, "--json")
    assert result.code == 3
    assert result.document["big"]["what"] == what
    assert result.document["big"]["distance"] == "inf"


def test_what_was_compared_by_its_shape_alone_is_said(run_a: Path, tmp_path: Path) -> None:
    lines = events()
    for key in ("min", "max", "mean", "std", "norm", "nan", "inf", "crc32", "samples"):
        del lines[-1][key]
    for name in ("b", "c"):
        write(tmp_path / name, lines)
    (note,) = texts(probe.compare(tmp_path / "b", tmp_path / "c")["notes"])
    assert note.startswith("1 record without statistics, such as step 9, batch 1, backward")


def test_the_earliest_of_all_ranks(tmp_path: Path) -> None:
    for name in ("a", "b"):
        for rank in range(3):
            lines = events()
            for each in lines:
                if name == "b" and each["step"] >= (9, 8, 9)[rank]:
                    each |= {"mean": 0.5, "crc32": "0"}
            write(tmp_path / name, lines, rank, world=3)
    report = probe.compare(tmp_path / "a", tmp_path / "b")
    assert (report["big"]["rank"], report["big"]["step"]) == (1, 8)
    assert report["ranks"] == [0, 1, 2]


def test_records_of_one_run_alone_are_listed_and_hide_nothing(tmp_path: Path) -> None:
    lines = events()
    a = write(tmp_path / "a", [each for each in lines if "layers" not in each["key"]])
    b = write(tmp_path / "b", [each for each in lines if each["step"] < 9])
    report = probe.compare(a, b)
    assert (report["only_a"], len(report["only_b"])) == ([], 10)
    assert report["only_b"][0] == "step 7, batch 0, parameter layers.0.weight"
    assert report["steps"] == [7, 8]
    assert not report["equal"]
    assert report["first"] is None


def test_runs_that_share_nothing(run_a: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "b", events(range(20, 22)))
    with pytest.raises(MissingData) as raised:
        probe.compare(run_a, other)
    assert "steps 7 to 9 and 20 to 21" in raised.value.hint


def test_other_numbers_of_processes_are_said(run_a: Path, tmp_path: Path) -> None:
    b = write(tmp_path / "b", events(), world=2)
    (note,) = texts(probe.compare(run_a, b)["notes"])
    assert note.startswith("1 process against 2")


def test_files_that_are_no_run(run_a: Path, tmp_path: Path, zckpt: Zckpt) -> None:
    with pytest.raises(NotACheckpoint):
        runs.read(tmp_path / "nothing")
    assert zckpt("probe-diff", run_a, ROOT).code == 1
    newer = write(tmp_path / "newer", events(), version=2)
    with pytest.raises(UnsupportedCheckpoint):
        runs.read(newer)
    write(tmp_path / "mixed", events(), world=2)
    write(tmp_path / "mixed", events(), rank=1, world=3)
    with pytest.raises(InconsistentCheckpoint):
        runs.read(tmp_path / "mixed")
    path = run_a / "rank_00000" / "records.jsonl"
    path.write_text(path.read_text().replace('"step": 8', '"step": }', 1))
    with pytest.raises(CorruptCheckpoint, match=r"line \d+"):
        runs.read(run_a)
    path.write_text("")
    with pytest.raises(CorruptCheckpoint):
        runs.read(run_a)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"dtype"', '"other"'),
        ('"step": 8', '"step": "8"'),
        ('"shape": [4]', '"shape": 4'),
        ('"kind": "forward"', '"kind": "sideward"'),
        ('"min": -1.0', '"min": "least"'),
        ('"min": -1.0', '"min": 1' + 400 * "0"),
        ('"head#0', '"h\udcff#0'),
        ('{"closed"', '3\n{"closed"'),
        ('{"closed"', 100_000 * "[" + '\n{"closed"'),
    ],
)
def test_lines_that_are_no_record(old: str, new: str, run_a: Path) -> None:
    path = run_a / "rank_00000" / "records.jsonl"
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1), errors="surrogateescape")
    with pytest.raises(CorruptCheckpoint, match=r"line \d+, is not a record"):
        runs.read(run_a)


def test_headers_of_other_ranks(run_a: Path) -> None:
    shutil.copytree(run_a / "rank_00000", run_a / "rank_00001")
    with pytest.raises(InconsistentCheckpoint, match="rank_00001"):
        runs.read(run_a)


def test_names_that_no_file_holds_as_they_are(tmp_path: Path, zckpt: Zckpt) -> None:
    lines = events()
    for each in lines:
        each["key"] = each["key"].replace("head", "h<&\"'\x1b\0\ud800")
    a = write(tmp_path / "a", lines)
    lines[-1] |= {"max": 9.0, "crc32": "other"}
    b = write(tmp_path / "b", lines)
    result = zckpt("probe-diff", a, b, "--svg", tmp_path / "map.svg", "--summary", tmp_path / "s")
    assert result.code == 3
    assert "\x1b" not in result.out
    ElementTree.parse(tmp_path / "map.svg")


def test_texts_to_compare_by_eye(run_a: Path, tmp_path: Path, zckpt: Zckpt) -> None:
    run_b = changed(tmp_path / "b", 8, "forward", "head#0/out", samples=[9.0, 0.5])
    summary = tmp_path / "summary"
    assert zckpt("probe-diff", run_a, run_b, "--summary", summary, "-q").code == 3
    texts = {path.relative_to(summary).as_posix() for path in summary.rglob("*.txt")}
    assert texts == {f"{side}/step_{step:08d}.txt" for side in "ab" for step in (7, 8, 9)}
    same = [(summary / side / "step_00000007.txt").read_text() for side in "ab"]
    assert same[0] == same[1]
    a, b = ((summary / side / "step_00000008.txt").read_text().splitlines() for side in "ab")
    assert len(a) == len(b)
    first = next(n for n, (one, other) in enumerate(zip(a, b, strict=True)) if one != other)
    assert "forward head#0/out" in "".join(a[first - 5 : first])
    assert zckpt("probe-diff", run_a, run_b, "--summary", summary).code == 1


def test_a_picture_for_browsers(run_a: Path, tmp_path: Path, zckpt: Zckpt) -> None:
    run_b = changed(tmp_path / "b<&>", 8, "forward", "layers.0#0/out", samples=[9.0, 0.5])
    zckpt("probe-diff", run_a, run_b, "--svg", tmp_path / "map.svg")
    root = ElementTree.parse(tmp_path / "map.svg").getroot()
    cells = [each for each in root if each.tag.endswith("rect")]
    assert len(cells) == 9
    assert len([each for each in cells if each.get("stroke")]) == 1
    assert zckpt("probe-diff", run_a, run_b, "--svg", tmp_path / "no" / "map.svg").code == 2


def test_a_picture_for_the_terminal(run_a: Path, tmp_path: Path, zckpt: Zckpt) -> None:
    run_b = changed(tmp_path / "b", 8, "forward", "layers.0#0/out", samples=[9.0, 0.5])
    ended = zckpt("probe-diff", run_a, run_b)
    assert ended.code == 3
    assert ended.out.splitlines()[-4:-1] == [
        "embedding | @@|",
        "layers.0  | @@|",
        "head      | @@|",
    ]


def test_large_pictures_keep_the_worst() -> None:
    steps, names = list(range(1000)), [f"layers.{n}" for n in range(300)]
    distances: list[list[float | None]] = [[0.0] * 1000 for _ in names]
    distances[137][777] = 1.0
    drawn = list(
        picture.drawn({"steps": steps, "modules": names, "distances": distances}, columns=None)
    )
    assert len(drawn) <= picture.ROWS + 1
    assert max(map(len, drawn[:-1])) < 100
    assert sum(each.count("@") for each in drawn[:-1]) == 1


def test_a_narrow_terminal() -> None:
    names = [f"model.{'deep.' * 20}layers.{n}" for n in range(3)]
    heat = {"steps": [1, 2], "modules": names, "distances": [[0.0, 0.0]] * 3}
    drawn = list(picture.drawn(heat, columns=40))
    assert {len(each) for each in drawn[:-1]} == {40}
    assert drawn[2].endswith(".layers.2 |  |")


def test_neither_torch_nor_numpy_is_needed(
    run_a: Path, tmp_path: Path, zckpt_without: Callable[..., Result]
) -> None:
    run_b = changed(tmp_path / "b", 8, "forward", "head#0/out", samples=[9.0, 0.5])
    ended = zckpt_without(("torch", "numpy"), "probe-diff", run_a, run_b)
    assert (ended.code, ended.err) == (3, "")


# -- ONNX Runtime's dumps


def test_dumps_of_onnxruntime_are_read() -> None:
    run = runs.read(DUMPS)
    assert run.steps == [0, 1]
    records = {(record.kind, record.key): record for record in run.ranks[0] if not record.step}
    assert len(records) == 17
    record = records["forward", "after_act"]
    assert (record.dtype, record.shape) == ("F32", (4, 6))
    assert record.numbers["max"] == 1.270255208015442
    assert (record.numbers["negative"], record.numbers["zero"]) == (0, 8)
    assert record.numbers["positive"] == 16
    assert record.numbers["samples"][:3] == [0.097204, 0.0, 0.785443]
    assert len(record.numbers["samples"]) == 24
    assert "std" not in record.numbers  # it is wrong there
    assert records["forward", "Blk_1_2th_output"].dtype == "I64"
    assert records["backward", "Net_0_1th_output"].shape == ()


def test_dumps_of_onnxruntime_are_compared(tmp_path: Path, zckpt: Zckpt) -> None:
    copy = Path(shutil.copytree(DUMPS, tmp_path / "copy"))
    assert zckpt("probe-diff", DUMPS, copy).code == 0
    path = copy / "step_1" / "ReLU_3_0th_output_forward"
    text = path.read_text()
    path.write_text(text.replace("std: ", "std: 9"))
    assert zckpt("probe-diff", DUMPS, copy).code == 0
    number = text.split("tensor([")[1].split(",")[0].strip()
    path.write_text(text.replace(f"tensor([{number}", "tensor([7.123456", 1))
    ended = zckpt("probe-diff", DUMPS, copy, "--json")
    assert ended.code == 3
    big = ended.document["big"]
    assert (big["step"], big["kind"], big["key"]) == (1, "forward", "ReLU_3_0th_output")


def test_dumps_that_begin_late_and_lack_files(tmp_path: Path) -> None:
    copy = Path(shutil.copytree(DUMPS, tmp_path / "copy"))
    shutil.rmtree(copy / "step_0")
    (copy / "step_1" / "after_act_forward").unlink()
    shutil.copy(copy / "step_1" / "Net_0_0th_output_forward", copy / "step_1" / "more_forward")
    (copy / "step_1" / ".notes").write_bytes(b"\xff of someone")
    report = probe.compare(DUMPS, copy)
    assert report["steps"] == [1]
    assert report["only_a"] == ["step 1, batch 0, forward after_act"]
    assert len(set(texts(report["notes"]))) == len(report["notes"])
    assert any(
        "after_act_forward is in order.txt, but its file is missing" in n
        for n in texts(report["notes"])
    )
    assert any("not in order.txt, such as more_forward" in note for note in texts(report["notes"]))
    dump = copy / "step_1" / "more_forward"
    dump.write_text(
        dump.read_text().replace("samples(top 128): tensor([", "samples(top 128): tensor([x, ")
    )
    with pytest.raises(CorruptCheckpoint, match="more_forward is not a dump"):
        runs.read(copy)
