"""Wrong input: one sentence, one hint, exit code 1, and nothing left behind."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from .conftest import EXAMPLE, ROOT, Result
from .faults import copy_file

Zckpt = Callable[..., Result]
TAG = "global_step7"


def optimizer_file(run: Path, rank: int) -> Path:
    return run / TAG / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def refused(zckpt: Zckpt, run: Path, *says: str) -> None:
    """Both commands refuse; the message and the hint hold `says`; there is no target."""
    target = run.parent / "target"
    before = sorted(path.name for path in run.parent.iterdir())
    for command in (["inspect", run], ["convert", run, target]):
        ended = zckpt(*command)
        assert ended.code == 1
        assert ended.out == ""
        lines = ended.err.splitlines()
        assert len(lines) == 2, ended.err
        assert lines[0].startswith("Error: ")
        assert lines[1].startswith("Hint: ")
        for word in says:
            assert word in ended.err
    assert sorted(path.name for path in run.parent.iterdir()) == before


class TestRanks:
    @pytest.mark.parametrize("rank", [0, 1, 3])
    def test_missing(self, rank: int, example: Path, zckpt: Zckpt) -> None:
        optimizer_file(example, rank).unlink()
        refused(zckpt, example, optimizer_file(example, rank).name)

    def test_extra(self, example: Path, zckpt: Zckpt) -> None:
        copy_file(optimizer_file(example, 0), optimizer_file(example, 4))
        refused(zckpt, example, "5 data ranks", "there were 4")

    def test_no_model_states(self, example: Path, zckpt: Zckpt) -> None:
        (example / TAG / "mp_rank_00_model_states.pt").unlink()
        refused(zckpt, example, "no model states")

    def test_no_optimizer_states(self, example: Path, zckpt: Zckpt) -> None:
        for rank in range(4):
            optimizer_file(example, rank).unlink()
        ended = zckpt("inspect", example)
        assert (ended.code, "the masters are lost" in ended.err) == (0, True)
        target = example.parent / "target"
        ended = zckpt("convert", example, target)
        assert (ended.code, target.exists()) == (1, False)
        assert "no optimizer files" in ended.err
        assert "--weights-only" in ended.err


class TestDamage:
    @pytest.mark.parametrize("keep", [0, 1, 100, 5000, -1, -30])
    def test_a_short_file(self, keep: int, example: Path, zckpt: Zckpt) -> None:
        path = optimizer_file(example, 1)
        path.write_bytes(path.read_bytes()[:keep])
        refused(zckpt, example, path.name)

    def test_a_flipped_bit_in_the_pickle(self, example: Path, zckpt: Zckpt) -> None:
        path = optimizer_file(example, 1)
        flip(path, path.read_bytes().index(b"base_optimizer_state"))
        refused(zckpt, example, path.name, "data.pkl is damaged")

    def test_a_flipped_bit_in_any_tensor(self, example: Path, zckpt: Zckpt) -> None:
        path, count = optimizer_file(example, 2), 0
        for member in zipfile.ZipFile(path).infolist():
            if "/data/" not in member.filename or member.file_size <= 4:
                continue
            flip(path, data_offset(path, member) + member.file_size // 2)
            ended = zckpt("convert", example, example.parent / "target")
            assert ended.code == 1
            assert path.name in ended.err
            assert "damaged" in ended.err
            flip(path, data_offset(path, member) + member.file_size // 2)
            count += 1
        assert count == 6
        assert zckpt("convert", example, example.parent / "target").code == 0

    def test_a_file_of_something_else(self, example: Path, zckpt: Zckpt) -> None:
        path = optimizer_file(example, 1)
        path.write_text("version https://git-lfs.github.com/spec/v1\n")
        refused(zckpt, example, path.name)


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 4
    path.write_bytes(data)


def data_offset(path: Path, member: zipfile.ZipInfo) -> int:
    head = path.read_bytes()[member.header_offset + 26 : member.header_offset + 30]
    return member.header_offset + 30 + sum(head[::2]) + 256 * sum(head[1::2])


@pytest.mark.engines
@pytest.mark.first
class TestMixedSaves:
    """Files of two saves of one run under one tag."""

    def mixed(self, trained: Any, name: str, later: dict[str, Any], tmp_path: Path) -> Path:
        import dataclasses

        from .engines.cases import CASES

        case = CASES[name]
        other = dataclasses.replace(case, name=f"{name}_later", steps=5, **later)
        run = Path(shutil.copytree(trained(case) / "run", tmp_path / "run"))
        newer = next((trained(other) / "run").glob("global_step5/*rank_1_*optim_states.pt"))
        shutil.copy(newer, run / "global_step3" / newer.name)
        return run

    @pytest.mark.parametrize("name", ["z2_dp2_bf16", "z3_dp2_bf16"])
    def test_steps_differ(self, name: str, trained: Any, tmp_path: Path, zckpt: Zckpt) -> None:
        run = self.mixed(trained, name, {}, tmp_path)
        file = "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
        refused(zckpt, run, "step", "3", "5", f"rank 1, {file}", "--step-policy")

    @pytest.mark.parametrize(("policy", "step"), [("max", 5), ("min", 3), ("4", 4)])
    def test_a_policy_decides(
        self, policy: str, step: int, trained: Any, tmp_path: Path, zckpt: Zckpt
    ) -> None:
        """Of the steps; that files are of two saves shows in their bytes too."""
        run = self.mixed(trained, "z2_dp2_bf16", {}, tmp_path)
        words = ("convert", run, tmp_path / "u", "--step-policy", policy, "--json")
        ended = zckpt(*words)
        assert (ended.code, ended.document["error"]) == (1, "InconsistentCheckpoint")
        assert "not the rounded masters" in ended.document["message"]
        ended = zckpt(*words, "--accept-weights")
        assert (ended.code, ended.document["step"]) == (0, step)

    def test_hyper_parameters_differ(self, trained: Any, tmp_path: Path, zckpt: Zckpt) -> None:
        run = self.mixed(trained, "z2_dp2_lambda", {}, tmp_path)
        refused(zckpt, run, "param_groups", "different saves")


class TestNames:
    def test_latest_names_no_folder(self, example: Path, zckpt: Zckpt) -> None:
        (example / "latest").write_text("global_step9")
        refused(zckpt, example, "global_step9", TAG)

    @pytest.mark.parametrize(
        "tag", ["../run/global_step7", "/etc", "a\0b", "..", ".", "", "a\x1b[2J"]
    )
    def test_latest_is_hostile(self, tag: str, example: Path, zckpt: Zckpt) -> None:
        (example / "latest").write_text(tag)
        refused(zckpt, example, "latest")
        assert "\x1b" not in zckpt("inspect", example).err

    def test_tag_option_is_hostile(self, example: Path, zckpt: Zckpt) -> None:
        assert zckpt("inspect", example, "--tag", "../run/global_step7").code == 1

    def test_several_tags_without_latest(self, example: Path, zckpt: Zckpt) -> None:
        shutil.copytree(example / TAG, example / "global_step8")
        (example / "latest").unlink()
        refused(zckpt, example, TAG, "global_step8", "--tag")
        assert zckpt("inspect", example, "--tag", TAG).code == 0

    def test_several_checkpoints_of_a_trainer(self, example: Path, zckpt: Zckpt) -> None:
        out = example.parent / "out"
        for step in (9, 10):
            shutil.copytree(example, out / f"checkpoint-{step}")
        refused(zckpt, out, "checkpoint-9, checkpoint-10")


class TestNoCheckpoint:
    def test_nothing_there(self, example: Path, zckpt: Zckpt) -> None:
        ended = zckpt("inspect", example.parent / "rum")
        assert ended.code == 1
        assert "does not exist" in ended.err
        assert "holds run" in ended.err

    def test_empty(self, tmp_path: Path, zckpt: Zckpt) -> None:
        (tmp_path / "empty").mkdir()
        refused(zckpt, tmp_path / "empty", "it is empty")

    def test_weights_alone(self, tmp_path: Path, zckpt: Zckpt) -> None:
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "model.safetensors").write_bytes(b"")
        refused(zckpt, tmp_path / "model", "model.safetensors ends early")

    def test_a_file(self, example: Path, zckpt: Zckpt) -> None:
        refused(zckpt, example / "latest", "a file of 12 bytes", str(example))

    def test_one_level_too_high(self, example: Path, zckpt: Zckpt) -> None:
        above = example.parent / "above"
        above.mkdir()
        shutil.move(example, above / "run")
        refused(zckpt, above, f"the checkpoint in it: {above / 'run'}")


class TestTargets:
    def test_existing(self, example: Path, zckpt: Zckpt) -> None:
        def full(path: Path) -> None:
            path.mkdir()
            (path / "kept").touch()

        target = example.parent / "target"
        for make in (full, Path.touch, lambda path: path.symlink_to("nowhere")):
            make(target)
            ended = zckpt("convert", example, target)
            assert (ended.code, "exists" in ended.err) == (1, True)
            shutil.rmtree(target) if target.is_dir() else target.unlink()

    def test_an_empty_directory(self, example: Path, zckpt: Zckpt) -> None:
        target = example.parent / "target"
        target.mkdir()
        assert zckpt("convert", example, target).code == 0
        assert (target / "manifest.json").is_file()

    def test_a_killed_run_is_in_the_way(self, example: Path, zckpt: Zckpt) -> None:
        (example.parent / "target.partial").mkdir()
        ended = zckpt("convert", example, example.parent / "target")
        assert ended.code == 1
        assert "target.partial exists" in ended.err
        assert (example.parent / "target.partial").is_dir()

    def test_full_disk(self, example: Path, zckpt: Zckpt, monkeypatch: Any) -> None:
        def full(*_: object) -> int:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "pwrite", full)
        refused_to_write(zckpt, example, "is full")

    def test_too_little_space(self, example: Path, zckpt: Zckpt, monkeypatch: Any) -> None:
        monkeypatch.setattr("zckpt.copying.targets.free_space", lambda _: 1000)
        refused_to_write(zckpt, example, "needs", "are free")

    def test_unwritable(self, example: Path, zckpt: Zckpt) -> None:
        ended = zckpt("convert", example, "/proc/zckpt/target")
        assert ended.code == 1
        assert ended.err.startswith("Error: ")

    @pytest.fixture
    def tiny_disk(self, tmp_path: Path) -> Iterator[Path]:
        """A filesystem of 64 kB."""
        disk = tmp_path / "disk"
        disk.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
        if subprocess.run(mount, capture_output=True).returncode:
            pytest.skip("needs the right to mount")
        yield disk
        subprocess.run(["umount", str(disk)], check=True)

    def test_a_really_full_disk(self, tiny_disk: Path, zckpt: Zckpt, monkeypatch: Any) -> None:
        (tiny_disk / "filler").write_bytes(bytes(40_000))
        refused_to_write(zckpt, EXAMPLE, "needs", target=tiny_disk / "target")
        monkeypatch.setattr("zckpt.copying.targets.free_space", lambda _: 1 << 40)
        refused_to_write(zckpt, EXAMPLE, "is full", target=tiny_disk / "target")
        assert [path.name for path in tiny_disk.iterdir()] == ["filler"]


def refused_to_write(zckpt: Zckpt, run: Path, *says: str, target: Path | None = None) -> None:
    target = target or run.parent / "target"
    ended = zckpt("convert", run, target)
    assert ended.code == 1, ended
    assert len(ended.err.splitlines()) == 2
    for word in says:
        assert word in ended.err
    assert not target.exists()
    assert not Path(f"{target}.partial").exists()


class Bomb:
    def __reduce__(self) -> Any:
        return os.system, ("touch " + Bomb.proof,)

    proof = ""


class TestPickles:
    def test_os_system_does_nothing(self, example: Path, zckpt: Zckpt) -> None:
        """A real file whose pickle also calls os.system: the rest of it is read."""
        Bomb.proof = str(example.parent / "proof")
        script = (
            "import sys, torch; sys.path.insert(0, sys.argv[2])\n"
            "from tests.test_bad_input import Bomb; Bomb.proof = sys.argv[3]\n"
            "import collections; state = torch.load(sys.argv[1], weights_only=False)\n"
            "state['bomb'] = Bomb(); torch.save(state, sys.argv[1])\n"
        )
        path = example / TAG / "mp_rank_00_model_states.pt"
        subprocess.run([sys.executable, "-c", script, path, ROOT, Bomb.proof], check=True)
        assert zckpt("inspect", example).code == 0
        ended = zckpt("inspect", example, "--state")
        assert "posix.system" in ended.out
        assert not Path(Bomb.proof).exists()

    def test_a_parameter_whose_name_is_a_number(self, example: Path, zckpt: Zckpt) -> None:
        path = example / TAG / "mp_rank_00_model_states.pt"
        state = torch.load(path, weights_only=False)
        shapes = state["param_shapes"][0]
        state["param_shapes"][0] = {255: shapes.pop("embedding.weight"), **shapes}
        state["shared_params"] = {}
        torch.save(state, path)
        refused(zckpt, example, "has the name 255")

    def test_a_pickle_instead_of_a_file(self, example: Path, zckpt: Zckpt) -> None:
        Bomb.proof = str(example.parent / "proof")
        optimizer_file(example, 0).write_bytes(pickle.dumps({"a": Bomb()}, protocol=2))
        refused(zckpt, example)
        assert not Path(Bomb.proof).exists()

    def test_a_zip_of_something_else(self, example: Path, zckpt: Zckpt) -> None:
        archive = io.BytesIO()
        with zipfile.ZipFile(archive, "w") as file:
            file.writestr("readme.txt", "hello")
        optimizer_file(example, 0).write_bytes(archive.getvalue())
        refused(zckpt, example, optimizer_file(example, 0).name)
