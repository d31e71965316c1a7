"""A load that fails ends in all ranks, names the file, and leaves nothing behind."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt
from zckpt.core.passes.layout import Shell
from zckpt.loading import support, temporary

from ..conftest import fork
from ..engines import client, deepspeed
from ..engines.cases import CASES, Case

Trained = Callable[[Case], Path]
MODEL, OPTIMIZER = "mp_rank_00_model_states.pt", "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"


def failures(
    name: str, source: Path, folder: Path, *, ranks: int = 3, version: str = "", **load: Any
) -> list[dict[str, Any]]:
    """What each rank says, and what is left, of an engine of the case at another size."""
    (folder / "tmp").mkdir(parents=True)
    case = dataclasses.replace(CASES[name], dp=ranks)
    arguments = case, source.resolve(), folder.resolve(), load, version
    deepspeed.submit("rank", "refused", ranks, arguments, folder)
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(ranks)]
    for each in found:
        assert each["has_its_own"]
        assert each.pop("left") == []
    assert len({each["message"] for each in found}) == 1
    return found


def damaged(run: Path, name: str, folder: Path) -> tuple[Path, Path]:
    """A copy of a run in which a byte of the largest tensor in a file is flipped; and the file."""
    shutil.copytree(run, folder)
    (file,) = folder.rglob(name)
    extents = [record.extent for record in zckpt.read(folder).files.records]
    own = [extent for extent in extents if extent.file == str(file)]
    largest = max(own, key=lambda extent: extent.length)
    data = bytearray(file.read_bytes())
    data[largest.offset + largest.length // 2] ^= 1
    file.write_bytes(data)
    return folder, file


@pytest.mark.engines
@pytest.mark.first
class TestAnEngine:
    def test_damage_of_the_model_leaves_it_untouched(
        self, trained: Trained, tmp_path: Path
    ) -> None:
        run, file = damaged(trained(CASES["z2_dp2_bf16"]) / "run", MODEL, tmp_path / "run")
        for each in failures("z2_dp2_bf16", run, tmp_path / "out"):
            assert each["code"] == "record-damaged"
            assert each["file"] == str(file)
            assert each["is_untouched"]
            assert "train with it" not in each["hint"]

    @pytest.mark.parametrize("stage", [2, 3])
    def test_damage_of_the_optimizer_says_that_it_was_touched(
        self, stage: int, trained: Trained, tmp_path: Path
    ) -> None:
        """No rank of three reads a whole record of two: they find it together."""
        name = f"z{stage}_dp2_bf16"
        run, file = damaged(trained(CASES[name]) / "run", OPTIMIZER, tmp_path / "run")
        for each in failures(name, run, tmp_path / "out"):
            assert each["code"] == "record-damaged"
            assert each["file"] == str(file)
            assert "do not train with it" in each["hint"]
            assert stage == 3 or not each["is_untouched"]

    def test_what_is_not_loaded_is_not_read(self, trained: Trained, tmp_path: Path) -> None:
        case = CASES["z2_dp2_bf16"]
        run, _ = damaged(trained(case) / "run", OPTIMIZER, tmp_path / "run")
        load = {"without_copy": True, "load_module_only": True}
        assert deepspeed.resume(case, run, tmp_path / "out", dp=3, load=load, losses=0)

    def test_checksums_may_be_left_out(self, trained: Trained, tmp_path: Path) -> None:
        case = CASES["z2_dp2_bf16"]
        run, _ = damaged(trained(case) / "run", OPTIMIZER, tmp_path / "run")
        load = {"without_copy": True, "verify": "files"}
        assert deepspeed.resume(case, run, tmp_path / "out", dp=1, load=load, losses=0)

    def test_what_reshard_refuses_is_refused_in_all_ranks(
        self, trained: Trained, tmp_path: Path
    ) -> None:
        run = tmp_path / "run"
        shutil.copytree(trained(CASES["z2_dp2_bf16"]) / "run", run)
        (missing,) = run.rglob(OPTIMIZER)
        missing.unlink()
        with pytest.raises(zckpt.ZckptError) as refusal:
            zckpt.reshard(run, tmp_path / "resharded", dp=3)
        for each in failures("z2_dp2_bf16", run, tmp_path / "out"):
            assert each["kind"] == "IncompleteCheckpoint"
            assert each["message"] == refusal.value.message
            assert each["is_untouched"]

    def test_masters_of_another_save_are_refused_before_the_engine_is_touched(
        self, trained: Trained, tmp_path: Path
    ) -> None:
        import_module("deepspeed")  # its loss scaler is in the pickle

        run = tmp_path / "run"
        shutil.copytree(trained(CASES["z2_dp2_bf16"]) / "run", run)
        (file,) = run.rglob(OPTIMIZER)
        value = torch.load(file, weights_only=False)
        value["optimizer_state_dict"]["single_partition_of_fp32_groups"][0].data += 1
        torch.save(value, file)
        for each in failures("z2_dp2_bf16", run, tmp_path / "out"):
            assert each["code"] == "master-differs"
            assert OPTIMIZER in each["message"]
            assert each["is_untouched"]

    def test_an_error_of_the_engine_is_raised_as_it_is(
        self, trained: Trained, tmp_path: Path
    ) -> None:
        run = trained(CASES["z2_dp2_bf16"]) / "run"
        words = {"custom_load_fn": client.fail_to_load}
        for each in failures("z2_dp2_bf16", run, tmp_path / "out", **words):
            assert each["kind"] == "RuntimeError"
            assert each["message"] == "the program's own fault"

    def test_another_version_is_refused(self, trained: Trained, tmp_path: Path) -> None:
        run = trained(CASES["z2_dp2_bf16"]) / "run"
        for each in failures("z2_dp2_bf16", run, tmp_path / "out", ranks=2, version="0.20.0"):
            assert each["code"] == "load-unsupported"
            assert "0.20.0" in each["message"]
            assert "zckpt.auto_resume" in each["hint"]
            assert each["is_untouched"]

    def test_another_size_than_the_engine_is_refused(
        self, trained: Trained, tmp_path: Path
    ) -> None:
        run = trained(CASES["z2_dp2_bf16"]) / "run"
        for each in failures("z2_dp2_bf16", run, tmp_path / "out", ranks=2, dp=3):
            assert each["code"] == "options-conflict"
            assert each["is_untouched"]

    def test_stage_3_without_an_optimizer_is_refused(
        self, trained: Trained, tmp_path: Path
    ) -> None:
        """DeepSpeed then reads the files by itself, past its checkpoint engine."""
        run = trained(CASES["z3_dp2_bf16"]) / "run"
        words = {"load_optimizer_states": False}
        for each in failures("z3_dp2_bf16", run, tmp_path / "out", ranks=1, **words):
            assert each["code"] == "load-unsupported"


@pytest.mark.engines
@pytest.mark.parametrize("name", [pytest.param(MODEL, marks=pytest.mark.first), "_optim_states.pt"])
def test_a_kill_leaves_the_temporary_directory_alone(
    name: str, trained: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case, ranks, above = CASES["z2_dp2_bf16"], 3, tmp_path / "tmp"
    run = trained(case) / "run"
    before = {path: path.stat().st_mtime_ns for path in run.parent.rglob("*")}
    above.mkdir()
    arguments = dataclasses.replace(case, dp=ranks), run.resolve(), above.resolve(), name
    with pytest.raises(deepspeed.EngineError):
        deepspeed.submit("rank", "killed", ranks, arguments, tmp_path)
    left = [*above.iterdir()]
    assert left
    assert all(path.name.startswith(temporary.PREFIX) for path in left)
    assert {path: path.stat().st_mtime_ns for path in run.parent.rglob("*")} == before
    monkeypatch.setattr(tempfile, "tempdir", str(above))
    with temporary.directory() as folder:  # of the next start
        assert [str(path) for path in above.iterdir()] == [folder]


@pytest.mark.parametrize(
    "name",
    [
        "mp_rank_01_model_states.pt",
        "layer_00-model_00-model_states.pt",
        "layer_0_expert_1_mp_rank_00_model_states.pt",
        "expp_rank_0_mp_rank_00_optim_states.pt",
    ],
)
def test_files_of_other_engines_are_refused(name: str) -> None:
    plain = ["latest", "mp_rank_00_model_states.pt", f"t/{OPTIMIZER}"]
    support.refuse_files("SRC", [*plain, "zero_pp_rank_11_mp_rank_00_model_states.pt"])
    with pytest.raises(zckpt.ZckptError, match=name):
        support.refuse_files("SRC", [*plain, f"tag/{name}"])


class TestTheTemporaryDirectory:
    @pytest.fixture(autouse=True)
    def above(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        return tmp_path

    def test_it_is_removed_after_an_error(self, above: Path) -> None:
        shells = [Shell("tag/file", 1 << 40, ((1, b"x"),)), Shell("../file", 1, ())]
        with pytest.raises(zckpt.ZckptError), temporary.directory() as folder:
            temporary.lay(folder, shells)
        assert [*above.iterdir()] == []

    def test_the_next_start_removes_that_of_a_killed_process(self, above: Path) -> None:
        child = fork()
        if not child:
            with temporary.directory() as folder:
                temporary.lay(folder, [Shell.of("latest", b"tag")])
                os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(child, 0)
        (left,) = above.iterdir()
        assert (left / "latest").is_file()
        with temporary.directory() as folder:
            assert [str(path) for path in above.iterdir()] == [folder]
            with temporary.directory():  # that of a living process stays
                assert os.path.isdir(folder)
