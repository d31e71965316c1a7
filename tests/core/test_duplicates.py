"""A file that was copied over another one, where nothing in it says whose it is."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import zckpt
from zckpt.core.checkpoint.entries import Entry, key_of
from zckpt.core.checkpoint.manifest import Files, Manifest, Run
from zckpt.core.comparison.duplicates import check_duplicates
from zckpt.core.storage.checksum import crc32
from zckpt.core.storage.fragments import Extent, Record, solid
from zckpt.errors import InconsistentCheckpoint

from ..conftest import ROOT, texts

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")

LEGACY = ROOT / "tests" / "data" / "megatron-0.16.1-legacy-tp2"


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """All files of one model-parallel rank lie over those of another one."""
    root = tmp_path / "run"
    shutil.copytree(LEGACY, root)
    folder = root / "iter_0000003"
    shutil.copytree(folder / "mp_rank_00", folder / "mp_rank_01", dirs_exist_ok=True)
    return root


def test_a_copied_rank_is_refused(copied: Path, tmp_path: Path) -> None:
    said = r"mp_rank_01/.* holds the same bytes as .*mp_rank_00/"
    with pytest.raises(InconsistentCheckpoint, match=said) as refused:
        zckpt.convert(copied, tmp_path / "target")
    (problem,) = zckpt.verify(copied)["problems"]
    assert problem["message"] == refused.value.message


def test_weights_alone_may_be_equal(copied: Path, tmp_path: Path) -> None:
    report = zckpt.convert(copied, tmp_path / "target", weights_only=True)
    (warning,) = [line for line in texts(report["warnings"]) if "holds the same weights as" in line]
    assert "mp_rank_01/model_optim_rng.pt" in warning


@pytest.mark.parametrize("files", [("a", "b"), ("b", "a")])
def test_states_in_either_file(files: tuple[str, str], tmp_path: Path) -> None:
    """One file has two weights, the other one the moments of two, and their bytes are the same."""
    data = bytes(range(64))
    entries, records = {}, []
    for file in files:
        (tmp_path / file).write_bytes(data)
        for place, name in enumerate("wv"):
            extent = Extent(str(tmp_path / file), place * 32, 32)
            key = f"{name}/{'param' if file == 'a' else 'exp_avg'}"
            entries[key_of(key)] = Entry(*key_of(key), "F32", (8,), solid(8, extent))
            records.append(Record(extent, crc32(data[place * 32 :][:32])))
    own = Manifest(str(tmp_path), "x", Run(), entries, {}, files=Files(records=tuple(records)))
    with pytest.raises(InconsistentCheckpoint, match="holds the same bytes as"):
        check_duplicates(own)


def equal_moments(name: str) -> torch.Tensor:
    torch.manual_seed(0 if name == "exp_avg" else 1)
    return torch.randn(4, 3)


NAMES = ("first.weight", "second.weight")


def random() -> torch.Tensor:
    return torch.randn(4, 3)


def saved(
    run: Path,
    moment: Callable[[str], torch.Tensor],
    weight: Callable[[], torch.Tensor] = random,
) -> Path:
    """Two weights and their moments, with a file for each tensor."""
    weights = {name: weight() for name in NAMES}
    states = {
        name: {key: moment(key) for key in ("exp_avg", "exp_avg_sq")} | {"step": torch.tensor(3.0)}
        for name in NAMES
    }
    groups = [{"params": list(NAMES), "lr": 0.1, "betas": (0.9, 0.999)}]
    tree = {"model": weights, "optim": {"state": states, "param_groups": groups}}
    dcp.save(tree, storage_writer=dcp.FileSystemWriter(run, single_file_per_rank=False))
    return run


@pytest.mark.parametrize("moment", [equal_moments, lambda _: torch.zeros(4, 3)])
def test_what_is_equal_by_nature(moment: Callable[[str], torch.Tensor], tmp_path: Path) -> None:
    """A file for each tensor: the moments of two weights with the same gradients, or before the
    first update."""
    run = saved(tmp_path / "run", moment)
    manifest = zckpt.read(run)
    files = {manifest.entries[name, "exp_avg"].fragments[0].extent.file for name in NAMES}
    assert len(files) == 2
    assert len({Path(file).read_bytes() for file in files}) == 1
    for report in (zckpt.convert(run, tmp_path / "target"), zckpt.verify(run)):
        assert report["warnings"] == []
    assert zckpt.verify(run)["equal"]


@pytest.mark.parametrize("state", ["exp_avg", "exp_avg_sq"])
def test_a_state_of_another_parameter(state: str, tmp_path: Path) -> None:
    source, run = saved(tmp_path / "source", lambda _: torch.randn(4, 3)), tmp_path / "run"
    zckpt.convert(source, run, to="deepspeed-universal")
    assert zckpt.verify(run)["warnings"] == []
    first, second = (next(run.glob(f"*/zero/{name}/{state}.pt")) for name in NAMES)
    shutil.copy(first, second)
    for report in (zckpt.convert(run, tmp_path / "target"), zckpt.verify(run)):
        (warning,) = texts(report["warnings"])
        assert warning.startswith(f"{second} holds the same bytes as {first}")


COPIES = {
    "first.weight/param over second.weight/param": "states of .* and .* in other files differ",
    "first.weight/param over first.weight/exp_avg": "of a trained model always differ",
    "second.weight/exp_avg over first.weight/exp_avg_sq": "of a trained model always differ",
}


@pytest.mark.parametrize("copy", COPIES)
def test_a_file_of_one_tensor_over_another_one(copy: str, tmp_path: Path) -> None:
    run = saved(tmp_path / "run", lambda _: torch.randn(4, 3))
    entries = zckpt.read(run).entries
    assert zckpt.verify(run)["warnings"] == []
    first, second = (
        entries[key_of(name)].fragments[0].extent.file for name in copy.split(" over ")
    )
    shutil.copy(first, second)
    for report in (zckpt.convert(run, tmp_path / "target"), zckpt.verify(run)):
        (warning,) = texts(report["warnings"])
        assert {first, second} <= set(re.split(r"[ ,]", warning))
        assert re.search(COPIES[copy], warning)


def test_rounded_weights_may_be_equal(tmp_path: Path) -> None:
    """Two layers that were copies of one; their moments differ since then."""
    weight = torch.randn(4, 3, dtype=torch.bfloat16)
    run = saved(tmp_path / "run", lambda _: torch.randn(4, 3), lambda: weight)
    assert zckpt.verify(run)["warnings"] == []
