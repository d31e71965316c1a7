"""What was in a lost file is said to the element, and what of it is left elsewhere."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import zckpt as package
from zckpt.core.checkpoint.dtypes import SIZES
from zckpt.core.checkpoint.manifest import Manifest

from ..conftest import ROOT, Result

DATA = ROOT / "tests" / "data"
Z2, Z3 = "examples/run", "tests/data/zckpt-0.1-z3_dp3"
OPTIMIZER = "zero_pp_rank_1_mp_rank_00_optim_states.pt"
FIRST = OPTIMIZER.replace("rank_1", "rank_0", 1)
"""Of two ranks; the file that stands in for it has padding, and is shorter."""
MODEL = "zero_pp_rank_1_mp_rank_00_model_states.pt"


def held(manifest: Manifest, files: set[str]) -> dict[str, int]:
    """How many elements of each tensor files have, as the reader of all files says."""
    counts: Counter[str] = Counter()
    for entry in manifest.entries.values():
        for run in entry.fragments.runs(0, entry.numel, SIZES[entry.dtype]):
            if Path(run.extent.file).name in files:
                counts[entry.name] += run.stop - run.start
    return dict(counts)


def remove(run: Path, *files: str) -> None:
    for file in files:
        (path,) = run.rglob(file)
        path.unlink()


def told(report: dict[str, Any]) -> dict[str, str]:
    """The state of each tensor that has lost elements."""
    return {each["tensor"]: line["state"] for line in report["lost"] for each in line["tensors"]}


@pytest.mark.parametrize(
    ("source", "files"),
    [
        (Z2, {f"bf16_{OPTIMIZER}"}),
        (Z2, {f"bf16_{OPTIMIZER}", "bf16_zero_pp_rank_3_mp_rank_00_optim_states.pt"}),
        ("tests/data/deepspeed-0.8.2-z1_dp2_bf16/run", {f"bf16_{OPTIMIZER}"}),
        ("tests/data/deepspeed-0.8.2-z1_dp2_bf16/run", {f"bf16_{FIRST}"}),
        ("tests/data/deepspeed-0.9.3-z2_dp3_fused_adam/run", {f"bf16_{OPTIMIZER}"}),
        ("tests/data/deepspeed-0.11.0-z3_dp2_sub_groups/run", {f"bf16_{OPTIMIZER}"}),
        (Z3, {OPTIMIZER}),
        (Z3, {OPTIMIZER, MODEL}),
    ],
)
def test_elements(source: str, files: set[str], tmp_path: Path) -> None:
    """Exactly those that the whole checkpoint has in these files."""
    run = shutil.copytree(ROOT / source, tmp_path / "run")
    whole = package.read(run, nameless=True, opens_items=True)
    expected = held(whole, files)
    assert expected
    paths = [path for path in sorted(run.rglob("*")) if path.name in files]
    for path in paths:
        path.unlink()
    report = package.mend(run, tmp_path / "mended", dry_run=True)
    lines = [each for line in report["lost"] for each in line["tensors"]]
    assert {each["tensor"]: each["elements"] for each in lines} == expected
    assert {Path(line["file"]).name for line in report["problems"]} == files
    assert {line["file"] for line in report["lost"]} <= {None, *map(str, paths)}
    assert {each["tensor"]: each["of"] for each in lines} == {
        entry.name: entry.numel for entry in whole.entries.values() if entry.name in expected
    }
    assert not (tmp_path / "mended").exists()


@pytest.mark.parametrize("left", [None, 0, 3000])
def test_of_stages_1_and_2(
    left: int | None, example: Path, tmp_path: Path, zckpt: Callable[..., Result]
) -> None:
    """The weights are left: masters and moments could be made up, and nothing is lost for good."""
    path = example / "global_step7" / f"bf16_{OPTIMIZER}"
    if left is None:
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:left])
    report = package.mend(example, tmp_path / "mended", dry_run=True)
    assert set(told(report).values()) == {"made-up"}
    assert {name.rpartition("/")[2] for name in told(report)} == {"master", "exp_avg", "exp_avg_sq"}
    shown = zckpt("mend", example, tmp_path / "mended", "--dry-run")
    assert shown.code == 3
    assert (
        "was in lost files, and would have to be made up: other values would take its "
        "place:\n  masters of embed" in shown.out
    )
    assert "names and shapes of all 23 tensors: the files that are left state them" in shown.out
    assert "484 of 1,359 elements, in bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt" in shown.out
    assert "was in lost files alone" not in shown.out
    refused = zckpt("mend", example, tmp_path / "mended")
    assert refused.code == 1
    assert "`--rebuild masters --rebuild moments=zero` writes made-up values" in refused.err
    assert "lost for good" not in refused.err
    assert not (tmp_path / "mended").exists()


def test_of_stage_3(tmp_path: Path, zckpt: Callable[..., Result]) -> None:
    """A rank's masters are the weights: they are lost for good. Frozen ones are in an older one."""
    run = shutil.copytree(ROOT / Z3, tmp_path / "run")
    remove(run, OPTIMIZER, MODEL)
    states = told(package.mend(run, tmp_path / "mended", dry_run=True))
    assert set(states.values()) == {"gone"}
    assert states["bottleneck.weight/param"] == "gone"
    with_older = package.mend(run, tmp_path / "mended", older=ROOT / Z3, dry_run=True)
    assert told(with_older) == states | {
        "bottleneck.weight/param": "elsewhere",
        "bottleneck.bias/param": "elsewhere",
    }
    refused = zckpt("mend", run, tmp_path / "mended")
    assert refused.code == 1
    assert (
        "was in lost files alone, and is lost for good:\n  masters of readout.weight" in refused.out
    )
    assert "is lost for good" in refused.err
    assert not (tmp_path / "mended").exists()


def test_the_newest_whole_one_is_named(
    example: Path, tmp_path: Path, zckpt: Callable[..., Result]
) -> None:
    shutil.copytree(example / "global_step7", example / "global_step3")
    remove(example / "global_step7", f"bf16_{OPTIMIZER}")
    shown = zckpt("mend", example, tmp_path / "mended", "--dry-run")
    whole = f"resume from {example / 'global_step3'}, which is complete according to its metadata"
    assert f"next: {whole}\n" in shown.out
    refused = zckpt("mend", example, tmp_path / "mended")
    assert refused.code == 1
    assert whole in refused.err
    report = zckpt("mend", example, tmp_path / "mended", "--dry-run", "--json").document
    assert report["instead"] == str(example / "global_step3")


def test_a_file_of_items(tmp_path: Path) -> None:
    """The weights are named to the element. No other rank has them."""
    run = shutil.copytree(DATA / "fsdp2-2.13.0-w2", tmp_path / "run")
    whole = package.read(run, nameless=True, opens_items=True)
    expected = {
        name: count for name, count in held(whole, {"__1_0.distcp"}).items() if "/param" in name
    }
    expected["head.weight/param"] = expected["embedding.weight/param"]  # tied
    remove(run, "__1_0.distcp")
    report = package.mend(run, tmp_path / "mended", dry_run=True)
    (line,) = [each for each in report["lost"] if each["message"].startswith("weights of ")]
    assert {each["tensor"]: each["elements"] for each in line["tensors"]} == expected
    assert line["state"] == "gone"


def test_a_weight_whose_master_is_left(tmp_path: Path) -> None:
    """The layer's file of a pipeline is lost: its weights are the rounded masters."""
    run = shutil.copytree(DATA / "zckpt-0.1-pp2_tp2" / "run", tmp_path / "run")
    remove(run, "layer_06-model_00-model_states.pt")
    report = package.mend(run, tmp_path / "mended", dry_run=True)
    assert set(told(report).values()) == {"elsewhere"}
