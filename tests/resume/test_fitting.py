"""Whether an engine loads a checkpoint at a size, and `zckpt check`, which says it."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import zckpt
from zckpt import api
from zckpt.core.checkpoint.entries import Entry
from zckpt.core.checkpoint.manifest import Manifest, Parameter, Run
from zckpt.core.checkpoint.origin import Origin
from zckpt.errors import WrongOption
from zckpt.judging.loads import obstacles, unlike
from zckpt.resume.fitting import Asked

from ..conftest import EXAMPLE, ROOT, Result, texts
from ..formats.gathered.plain_torch import names_by_group, save, trained_pair
from .conftest import DAMAGE, TAGS

DATA = ROOT / "tests" / "data"
ZERO = EXAMPLE
GRID = DATA / "zckpt-0.1-pp2_tp2" / "run"  # pp 2, tp 2, dp 1
MEGATRON = DATA / "megatron-0.16.1-tp2"
BUFFERS = DATA / "megatron-0.16.1-buffers-tp2"
LEGACY = DATA / "megatron-0.16.1-legacy-tp2"
FSDP2 = DATA / "fsdp2-2.13.0-w2"
RANKS = DATA / "torch_checkpointing-0.1.1-w2" / "items"
ORT = DATA / "onnxruntime" / "hdf5__fp16__adam__dp3"
BF16 = {"bf16": {"enabled": True}}


@pytest.mark.parametrize(
    ("source", "size", "words", "expected"),
    [
        (ZERO, 4, {}, []),
        (ZERO, 3, {}, ["saved by 4 data-parallel ranks; 3 are asked for"]),
        (ZERO, 4, {"stage": 3}, ["saved with ZeRO stage 2; 3 is asked for"]),
        (ZERO, 4, {"config": BF16 | {"zero_optimization": {"stage": 2}}}, []),
        (
            ZERO,
            4,
            {"config": {"zero_optimization": {"stage": 2}}},
            ["saved with type BF16; F32 is asked for"],
        ),
        (GRID, 4, {}, []),
        (GRID, 8, {}, ["saved by 1 data-parallel rank; 2 are asked for"]),
        (
            GRID,
            4,
            {"pp": 1},
            [
                "saved by 2 pipeline ranks; 1 is asked for",
                "saved by 1 data-parallel rank; 2 are asked for",
            ],
        ),
        (GRID, 2, {"tp": 1}, ["saved by 2 tensor-parallel ranks; 1 is asked for"]),
        (MEGATRON, 7, {"tp": 1}, []),
        (BUFFERS, 8, {"tp": 2}, []),
        (
            BUFFERS,
            8,
            {"tp": 4},
            ["saved by 2 tensor-parallel ranks in dp_zero_gather_scatter; 4 are asked for"],
        ),
        (LEGACY, 8, {}, []),
        (LEGACY, 8, {"pp": 2}, ["saved by 1 pipeline rank in mp_rank_* folders; 2 are asked for"]),
        (FSDP2, 5, {}, []),
        (RANKS, 2, {}, []),
        (RANKS, 5, {}, ["saved by 2 data-parallel ranks; 5 are asked for"]),
        (ORT, 3, {}, []),
        (ORT, 2, {}, ["saved by 3 data-parallel ranks; 2 are asked for"]),
    ],
    ids=lambda value: value.name if isinstance(value, Path) else None,
)
def test_what_must_be_equal(
    source: Path, size: int, words: dict[str, Any], expected: list[str]
) -> None:
    manifest = zckpt.read(source, nameless=True)
    asked = Asked(size, words)
    assert texts(obstacles(manifest, asked.of(manifest))) == expected


def test_a_universal_checkpoint_is_for_no_engine(tmp_path: Path) -> None:
    zckpt.convert(EXAMPLE, tmp_path / "universal")
    manifest = zckpt.read(tmp_path / "universal")
    (reason,) = obstacles(manifest, {"dp": 4})
    assert "no engine can load" in reason.message


def test_a_size_that_cannot_be_divided() -> None:
    with pytest.raises(WrongOption, match=r"6 processes cannot be divided by tp \* pp = 4"):
        Asked(6, {}).of(zckpt.read(GRID))


# -- the command


def test_check(run: Path, zckpt: Callable[..., Result], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "verify", None)
    ended = zckpt("check", run, "--dp", 4)
    assert (ended.code, ended.out) == (
        0,
        f"{run / TAGS[-1]} loads as it is (deepspeed, dp 4); no tensor was read\n",
    )
    ended = zckpt("check", run, "--dp", 3, "--json")
    assert ended.code == 3
    assert texts(ended.document["obstacles"]) == ["saved by 4 data-parallel ranks; 3 are asked for"]
    assert not (run / ".zckpt").exists()


@pytest.mark.parametrize(
    "words",
    [
        ("--dp", 3),
        ("--dp", 2, "--stage", 3),
        ("--dp", 2, "--for", "dcp"),
        ("--dp", 3, "--ds-config", "ds.json"),
    ],
)
def test_the_command_that_makes_it_fit(
    words: tuple[object, ...], run: Path, tmp_path: Path, zckpt: Callable[..., Result]
) -> None:
    config = tmp_path / "ds.json"
    config.write_text(json.dumps(BF16 | {"zero_optimization": {"stage": 3}}))
    own = [config if word == "ds.json" else word for word in words]
    ended = zckpt("check", run, *own, "--json")
    assert ended.code == 3
    fix = shlex.split(ended.document["fix"].replace("DST", str(tmp_path / "dst")))
    assert zckpt(*fix[1:]).code == 0
    assert zckpt("check", tmp_path / "dst", *own).code == 0


def test_a_ds_config_without_a_stage(
    run: Path, tmp_path: Path, zckpt: Callable[..., Result]
) -> None:
    """DeepSpeed runs without ZeRO then."""
    config = tmp_path / "ds.json"
    stages: list[dict[str, object]] = [{}, {"overlap_comm": True}]
    for stated in ({}, *({"zero_optimization": stage} for stage in stages)):
        config.write_text(json.dumps(BF16 | stated))
        ended = zckpt("check", run, "--dp", 4, "--ds-config", config, "--json")
        assert ended.code == 3
        assert "saved with ZeRO stage 2; 0 is asked for" in texts(ended.document["obstacles"])
        assert "--stage 0" in ended.document["fix"]
    assert zckpt("check", run, "--dp", 4, "--ds-config", config, "--stage", 2).code == 0


def test_the_command_names_the_file_of_names(tmp_path: Path, zckpt: Callable[..., Result]) -> None:
    pair = trained_pair()
    folder = save(tmp_path / "run", pair, "model.pt", "optim.pt")
    names = tmp_path / "names.txt"
    names.write_text("\n".join(names_by_group(pair)))
    words = ("--dp", 2, "--for", "deepspeed", "--param-names", names)
    ended = zckpt("check", folder, *words, "--json")
    assert ended.code == 3
    fix = shlex.split(ended.document["fix"].replace("DST", str(tmp_path / "dst")))
    assert fix[fix.index("--param-names") + 1] == str(names)
    assert zckpt(*fix[1:]).code == 0


def test_it_cannot_be_read(run: Path, zckpt: Callable[..., Result]) -> None:
    DAMAGE["lost"](run / TAGS[-1])
    ended = zckpt("check", run, "--dp", 4)
    assert ended.code == 3
    assert f"{run / TAGS[-1]} does not load as it is: 1 reason" in ended.out
    assert "lacks bf16_zero_pp_rank_1_" in ended.out
    goes_on = f"auto-resume resumes from {run / TAGS[-2]}, which loads as it is"
    assert goes_on in ended.out
    report = zckpt("check", run, "--dp", 4, "--json").document
    assert (report["loads"], report["format"]) == (False, None)
    assert report["goes_on_from"]["loads"]
    assert zckpt("auto-resume", run, "--dp", 4).out == f"{report['goes_on_from']['path']}\n"
    for tag in TAGS[:-1]:
        DAMAGE["lost"](run / tag)
    ended = zckpt("check", run, "--dp", 4)
    assert ended.code == 3  # it was looked at, as by `verify`
    assert "lacks bf16_zero_pp_rank_1_" in ended.out
    assert "copy it again, or take an earlier checkpoint" in ended.out
    lost = zckpt("check", run, "--dp", 4, "--json").document
    assert (lost["loads"], lost["goes_on_from"]) == (False, None)
    assert [each["code"] for each in lost["obstacles"]] == ["missing-rank-file"]
    assert zckpt("check", run / "nothing").code == 1


def test_names_and_shapes(tmp_path: Path, zckpt: Callable[..., Result]) -> None:
    assert zckpt("check", EXAMPLE, "--dp", 4, "--like", EXAMPLE).code == 0
    ended = zckpt("check", EXAMPLE, "--dp", 4, "--like", FSDP2, "--json")
    assert ended.code == 3
    assert any(line.startswith("parameters that") for line in texts(ended.document["obstacles"]))


def small(
    groups: list[list[str]], frozen: tuple[str, ...] = (), aliases: Mapping[str, str] = {}
) -> Manifest:
    """A manifest of parameters of one shape in these groups; `aliases` are by their owner."""
    placed = {name: number for number, names in enumerate(groups) for name in names}
    parameters = {
        name: Parameter((3,), True, number, aliases=(aliases[name],) if name in aliases else ())
        for name, number in placed.items()
    }
    parameters |= {name: Parameter((3,), False) for name in frozen}
    origin = Origin("deepspeed")
    return Manifest(
        "run", "deepspeed", Run(origin), {}, parameters, groups=tuple({} for _ in groups)
    )


@pytest.mark.parametrize(
    ("own", "wanted", "expected"),
    [
        (small([["a", "b"], ["c"]]), small([["a", "b"], ["c"]]), []),
        (small([["a", "b"], [], ["c"]]), small([["a", "b"], ["c"]]), []),
        (small([["a"]], aliases={"a": "b"}), small([["b"]], aliases={"b": "a"}), []),
        (small([["a"]], aliases={"a": "b"}), small([["a"]]), []),
        (
            small([["a", "b"], ["c", "d"]]),
            small([["a"], ["b", "c", "d"]]),
            ["b is in group 0, but in the program in group 1"],
        ),
        (
            small([["a", "b"], ["c"]]),
            small([["c"], ["a", "b"]]),
            ["a is in group 0, but in the program in group 1 (2 more parameters like it)"],
        ),
        (
            small([["a", "b", "c"]]),
            small([["a", "c", "b"]]),
            ["parameter 1 of group 0 is b, in the program c"],
        ),
        (
            small([["a", "b"]]),
            small([["a"]], frozen=("b",)),
            ["the checkpoint trains b, and the program does not"],
        ),
        (
            small([["a"]], frozen=("b",)),
            small([["a", "b"]]),
            ["the program trains b, and the checkpoint does not"],
        ),
    ],
)
def test_groups(own: Manifest, wanted: Manifest, expected: list[str]) -> None:
    found = unlike(own, wanted, by_place=True)
    assert texts(found) == expected
    assert {each.severity for each in found} <= {"error"}
    by_name = unlike(own, wanted, by_place=False)
    assert [each.severity for each in by_name] == ["warning"] * bool(expected)


def test_buffers_are_names_too() -> None:
    entry = Entry("norm.mean", "param", "F32", (3,), ())
    with_buffer = replace(small([["a"]]), buffers=("norm.mean",), entries={entry.key: entry})
    (line,) = texts(unlike(with_buffer, small([["a"]]), by_place=True))
    assert line == "parameters that the model lacks: norm.mean"


def test_groups_that_are_not_known() -> None:
    (line,) = unlike(small([["a"]]), replace(small([["a"]]), groups=None), by_place=True)
    assert (line.code, line.severity) == ("not-compared", "warning")


def test_a_scheduler_that_the_files_lack(run: Path, tmp_path: Path) -> None:
    """auto_resume warns: the checkpoint loads once the program makes its own."""
    stage = {"zero_optimization": {"stage": 2}, **BF16}
    config = {**stage, "scheduler": {"type": "ExponentialLR", "params": {}}}
    told: list[Any] = []
    for size in (4, 2):
        path = zckpt.auto_resume(run, dp=size, ds_config=config, tell=told.extend)
        assert path is not None
        lines = [each for each in path.report["warnings"] if each["subject"] == "ExponentialLR"]
        assert texts(lines) == [
            "the checkpoint has no last_epoch in the state of its scheduler, but the ds_config's "
            "ExponentialLR needs it"
        ]
        assert path.report["written"] == (size == 2)


def test_ranks_that_are_alike_are_parsed_once(
    tmp_path: Path, parses: list[str], zckpt: Callable[..., Result]
) -> None:
    """So that the answer for 1,000 ranks takes less than a second."""
    assert zckpt("reshard", EXAMPLE, tmp_path / "wide", "--dp", 200).code == 0
    parses.clear()
    assert zckpt("check", tmp_path / "wide", "--dp", 200).code == 0
    assert len(parses) < 20


def test_a_relative_run(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run.parent)
    path = zckpt.auto_resume(run.name, dp=3, tell=lambda lines: None)
    assert path == str(run / ".zckpt" / f"{TAGS[-1]}-dp3")
    assert zckpt.auto_resume(run.name, dp=4) == run.name
    shutil.rmtree(run / ".zckpt")
    assert os.listdir(run)
