"""Planted faults are found and named, and nothing is found where there is none."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt
from zckpt import read
from zckpt.core.checkpoint.entries import key_of
from zckpt.core.passes.description import said
from zckpt.errors import InconsistentCheckpoint

from .. import faults
from ..conftest import EXAMPLE, ROOT, Result, texts
from ..engines.cases import CASES
from ..manifests import changed

Zckpt = Callable[..., Result]
Trained = Callable[[Any], Path]


class Faults:
    """One fault each; a subclass gives `original`, a checkpoint that none may touch.

    `tells_weights` where the files hold every weight twice: in 16 bits and as its master.
    """

    tells_weights: bool
    weight = "fc1.weight"

    @pytest.fixture
    def original(self) -> Path:
        raise NotImplementedError

    @pytest.fixture
    def copy(self, original: Path, tmp_path: Path) -> Path:
        return Path(shutil.copytree(original, tmp_path / "copy"))

    def check(
        self, copy: Path, original: Path, *names: str, alone: bool, against: bool = True
    ) -> tuple[Any, Any]:
        """Whether the fault is found by `verify` alone and against the original; both reports."""
        reports = zckpt.verify(copy), zckpt.verify(copy, original)
        assert (not reports[0]["equal"], not reports[1]["equal"]) == (alone, against)
        backwards = zckpt.verify(original, copy)
        assert backwards["equal"] != against
        assert (not zckpt.diff(copy, original)["equal"]) == against
        gathered = zckpt.verify(copy, original, gather=True, device="cpu")
        if names:
            differing = [line["tensor"] for line in reports[1]["differences"]]
            assert differing == list(names)
            assert [line["tensor"] for line in gathered["differences"]] == list(names)
            for line, other in zip(reports[1]["differences"], gathered["differences"], strict=True):
                assert line == other
        return reports

    def test_none(self, copy: Path, original: Path) -> None:
        alone, against = self.check(copy, original, alone=False, against=False)
        assert alone["notes"] == against["notes"] == []
        assert against["only_a"] == against["only_b"] == []

    @pytest.mark.parametrize("mended", [False, True])
    def test_a_flipped_bit_in_a_moment(self, mended: bool, copy: Path, original: Path) -> None:
        name = f"{self.weight}/exp_avg"
        faults.change(copy, name, faults.flip(17, 4, 22), mended)
        alone, against = self.check(copy, original, name, alone=not mended)
        (line,) = against["differences"]
        assert (line["count"], line["first"]) == (1, 17)
        assert line["max_ulp"] == 1 << 22
        assert line["max_abs"] == abs(line["a"] - line["b"]) > 0
        if not mended:
            (problem,) = alone["problems"]
            assert (problem["tensors"], problem["element"]) == ([name], 17)
            assert "element 17" in problem["message"]

    @pytest.mark.parametrize("mended", [False, True])
    def test_a_flipped_bit_in_a_master(self, mended: bool, copy: Path, original: Path) -> None:
        name = f"{self.weight}/master"
        faults.change(copy, name, faults.flip(3, 4, 30), mended)
        alone, against = self.check(
            copy, original, *self.also_rounded(name), alone=not mended or self.tells_weights
        )
        assert against["differences"][0]["first"] == 3
        if self.tells_weights:
            assert alone["differences"][0]["tensor"] == f"{self.weight}/param"
            assert alone["differences"][0]["rounded"] == name

    def also_rounded(self, name: str) -> list[str]:
        """What a wrong master makes differ from the original."""
        return [name]

    @pytest.mark.parametrize("mended", [False, True])
    def test_a_flipped_bit_in_padding_is_harmless(
        self, mended: bool, copy: Path, original: Path
    ) -> None:
        faults.flip_padding(copy, mended)
        alone, against = self.check(copy, original, alone=False, against=False)
        for report in (alone, against) if self.tells_weights or not mended else (against,):
            (note,) = report["notes"]
            assert note["code"] == "padding-differs"
            assert "harmless" in note["message"]

    def test_swapped_ranks(self, copy: Path, original: Path) -> None:
        faults.swap_ranks(copy)
        self.check(copy, original, alone=self.tells_weights)

    def test_ranks_whose_files_have_each_others_names(self, copy: Path, original: Path) -> None:
        """Their zips have folders of the names under which they were saved."""
        faults.swap_ranks(copy, renamed=False)
        report = zckpt.verify(copy)
        assert not report["equal"]
        assert "was saved as" in report["problems"][0]["message"]
        with pytest.raises(InconsistentCheckpoint, match="files of two ranks are swapped"):
            zckpt.convert(copy, copy.parent / "converted")

    def test_swapped_ranks_are_seen_before_a_copy(self, copy: Path, tmp_path: Path) -> None:
        assert not zckpt.convert(copy, tmp_path / "first")["warnings"]
        faults.swap_ranks(copy)
        if self.tells_weights:
            with pytest.raises(InconsistentCheckpoint, match="not the rounded masters"):
                zckpt.convert(copy, tmp_path / "second")
            assert not (tmp_path / "second").exists()
        warnings = zckpt.convert(copy, tmp_path / "third", accept_weights=True)["warnings"]
        assert any("not the rounded masters" in w for w in texts(warnings)) == self.tells_weights

    def test_permuted_parameters(self, copy: Path, original: Path) -> None:
        faults.permute(copy)
        _, against = self.check(copy, original, alone=self.tells_weights)
        first, second = list(zckpt.read(original).parameters)[:2]
        differing = [line["tensor"] for line in against["differences"]]
        assert differing == [
            f"{name}/{slot}"
            for name in (first, second)
            for slot in ("master", "exp_avg", "exp_avg_sq")
        ]

    def test_a_stale_master(self, copy: Path, original: Path) -> None:
        """As after loading weights without resetting the optimizer."""
        name = f"{self.weight}/master"
        faults.change(copy, name, lambda data: bytes(len(data)))
        self.check(copy, original, *self.also_rounded(name), alone=self.tells_weights)

    def test_a_transposed_tensor(self, copy: Path, original: Path) -> None:
        name = f"{self.weight}/exp_avg_sq"
        rows, columns = zckpt.read(copy).entries[key_of(name)].shape
        faults.change(copy, name, faults.transposed((rows, columns)))
        _, against = self.check(copy, original, name, alone=False)
        assert against["differences"][0]["count"] > rows

    def test_a_step_of_one_rank(self, copy: Path, original: Path, zckpt: Zckpt) -> None:
        faults.raise_step(copy, ranks=1)
        for words in ([copy], [copy, "--against", original], [original, "--against", copy]):
            ended = zckpt("verify", *words, "--json")
            assert ended.code == 3
            (problem,) = ended.document["problems"]
            assert problem["error"] == "InconsistentCheckpoint"
            assert "step" in problem["message"]

    def test_a_step_of_all_ranks(self, copy: Path, original: Path) -> None:
        faults.raise_step(copy, ranks=100)
        _, against = self.check(copy, original, alone=False)
        step = zckpt.read(original).step
        assert step is not None
        (line,) = against["steps"]
        assert (line["a"], line["b"]) == (step + 1, step)
        trainable = [
            parameter
            for parameter in zckpt.read(original).parameters.values()
            if parameter.trainable
        ]
        assert line["parameters"] == len(trainable)
        assert against["differences"] == []

    def test_a_short_file(self, copy: Path, original: Path, zckpt: Zckpt) -> None:
        path = faults.optimizer_files(copy)[1]
        path.write_bytes(path.read_bytes()[:-100])
        ended = zckpt("verify", copy)
        assert ended.code == 3
        assert path.name in ended.out
        assert ended.err == ""


class TestStage2(Faults):
    tells_weights = True

    @pytest.fixture
    def original(self) -> Path:
        return EXAMPLE

    def test_a_flipped_bit_in_a_weight(self, copy: Path, original: Path) -> None:
        name = f"{self.weight}/param"
        faults.change(copy, name, faults.flip(5, 2, 9))
        alone, _ = self.check(copy, original, name, alone=True)
        (line,) = alone["differences"]
        assert (line["tensor"], line["count"], line["first"]) == (name, 1, 5)

    def test_damage_of_many_bits_names_the_tensors(self, copy: Path, original: Path) -> None:
        name = f"{self.weight}/exp_avg"
        faults.change(copy, name, lambda data: data[:-8] + b"\xff" * 8, mended=False)
        alone, _ = self.check(copy, original, name, alone=True)
        assert name in alone["problems"][0]["tensors"]
        assert "CRC-32" in alone["problems"][0]["message"]

    def test_a_frozen_weight(self, copy: Path, original: Path) -> None:
        manifest = zckpt.read(copy)
        frozen = next(
            name for name, parameter in manifest.parameters.items() if not parameter.trainable
        )
        faults.change(copy, f"{frozen}/param", faults.flip(0, 2, 14))
        self.check(copy, original, f"{frozen}/param", alone=False)


@pytest.mark.engines
@pytest.mark.first
class TestStage3(Faults):
    tells_weights = False
    weight = "readout.weight"

    @pytest.fixture
    def original(self, trained: Trained) -> Path:
        return trained(CASES["z3_dp2_bf16"]) / "run"

    @pytest.mark.parametrize("rank", [0, 1])
    def test_a_buffer_that_ranks_hold_differently_is_told(
        self, rank: int, copy: Path, original: Path, tmp_path: Path
    ) -> None:
        """Unsynchronised statistics are no fault; what the same rank has otherwise elsewhere is."""
        manifest = zckpt.read(copy)
        buffer = f"{manifest.buffers[0]}/param"
        copies = [
            manifest.entries[key_of(buffer)],
            *(e for e in manifest.replicas if e.name == buffer),
        ]
        other = copies[rank]
        (fragment,) = other.fragments
        with open(fragment.extent.file, "r+b") as file:
            file.seek(fragment.extent.offset)
            file.write(b"\x01\x02")
        faults.mend(fragment.extent.file)
        alone = zckpt.verify(copy)
        assert alone["equal"]
        assert alone["notes"][0]["code"] == "rank-zero-taken"
        (line,) = zckpt.verify(copy, original)["differences"]
        assert line["tensor"] == buffer
        resharded = tmp_path / "resharded"
        zckpt.reshard(original, resharded, dp=3)
        assert zckpt.verify(copy, resharded)["equal"] == bool(rank)


class TestUniversal:
    @pytest.fixture
    def universal(self, tmp_path: Path) -> Path:
        zckpt.convert(EXAMPLE, tmp_path / "universal")
        return tmp_path / "universal"

    def test_is_the_example(self, universal: Path) -> None:
        assert zckpt.verify(universal)["equal"]
        for pair in ((EXAMPLE, universal), (universal, EXAMPLE)):
            report = zckpt.verify(*pair)
            assert report["equal"]
            assert report["only_a"] == report["only_b"] == report["notes"] == []
            assert zckpt.diff(*pair)["equal"]

    def test_a_flipped_bit(self, universal: Path) -> None:
        faults.change(universal, "fc1.weight/exp_avg", faults.flip(9, 4, 3), mended=False)
        (problem,) = zckpt.verify(universal)["problems"]
        assert (problem["tensor"], problem["element"]) == ("fc1.weight/exp_avg", 9)
        report = zckpt.verify(EXAMPLE, universal)
        assert report["differences"][0]["tensor"] == "fc1.weight/exp_avg"

    def test_a_flipped_bit_beside_the_tensors(self, universal: Path) -> None:
        path = universal / "master.safetensors"
        data = bytearray(path.read_bytes())
        data[4000] ^= 1  # of the spaces that fill up the header
        assert data[4000] == ord("!")
        data[4000] = 9  # a tab is as good to JSON
        path.write_bytes(data)
        (problem,) = zckpt.verify(universal)["problems"]
        assert path.name in problem["message"]
        assert not problem["harmless"]

    def test_a_changed_sibling(self, tmp_path: Path) -> None:
        run = shutil.copytree(EXAMPLE, tmp_path / "run")
        (run / "global_step7" / "notes.txt").write_text("kept")
        (run / "trainer_state.json").write_text("{}")
        zckpt.convert(run, tmp_path / "universal")
        for path in (tmp_path / "universal" / "siblings").rglob("*"):
            if path.is_file():
                path.write_bytes(path.read_bytes().replace(b"{", b"[").replace(b"k", b"K"))
        report = zckpt.verify(tmp_path / "universal")
        if (tmp_path / "universal" / "siblings").exists():
            assert not report["equal"]

    def test_a_changed_hyper_parameter(self, universal: Path) -> None:
        with changed(universal) as manifest:
            lr = manifest["groups"][1]["lr"]
            manifest["groups"][1]["lr"] = 2 * lr
        report = zckpt.verify(EXAMPLE, universal)
        assert report["groups"] == [{"group": 1, "key": "lr", "a": lr, "b": 2 * lr}]
        assert not report["equal"]

    def test_weights_alone_in_another_type(self, tmp_path: Path) -> None:
        """They are what the masters round to."""
        for dtype in ("fp32", "bf16", "fp16"):
            target = tmp_path / dtype
            zckpt.convert(EXAMPLE, target, weights_only=True, dtype=dtype)
            report = zckpt.verify(EXAMPLE, target)
            assert not report["equal"]
            assert report["differences"] == report["problems"] == report["only_b"] == []
            states = {line["state"] for line in report["lacking"] if line["only"] == "a"}
            assert states == {"exp_avg", "exp_avg_sq", "step"}
            assert {name.rpartition("/")[2] for name in report["only_a"]} >= {"exp_avg"}
            report = zckpt.verify(EXAMPLE, target, weights_only=True)
            assert report["equal"], report
            faults.change(target, "fc1.weight/param", faults.flip(2, 2, 3), mended=False)
            report = zckpt.verify(EXAMPLE, target, weights_only=True)
            slot = "master" if dtype == "fp32" else "param"
            assert report["differences"][0]["tensor"] == f"fc1.weight/{slot}"

    def test_a_lost_tensor(self, universal: Path) -> None:
        with changed(universal) as manifest:
            del manifest["entries"]["fc1.weight/exp_avg"]
        report = zckpt.verify(EXAMPLE, universal)
        assert not report["equal"]
        assert report["only_a"] == ["fc1.weight/exp_avg"]
        assert "fc1.weight/exp_avg" in report["problems"][0]["message"]

    def test_another_shape(self, universal: Path) -> None:
        with changed(universal) as manifest:
            for slot in ("master", "exp_avg", "exp_avg_sq", "param"):
                if f"fc1.weight/{slot}" in manifest["entries"]:
                    shape = manifest["entries"][f"fc1.weight/{slot}"]["shape"]
                    manifest["entries"][f"fc1.weight/{slot}"]["shape"] = shape[::-1]
            manifest["parameters"]["fc1.weight"]["shape"] = shape[::-1]
        for file in universal.glob("*.safetensors"):
            old = f'"shape":{json.dumps(shape, separators=(",", ":"))}'
            data = file.read_bytes()
            at = data.index(b'"fc1.weight"')
            turned = data[at:].replace(
                old.encode(),
                old.encode().replace(
                    json.dumps(shape, separators=(",", ":")).encode(),
                    json.dumps(shape[::-1], separators=(",", ":")).encode(),
                ),
                1,
            )
            file.write_bytes(data[:at] + turned)
        for gather in (False, True):
            report = zckpt.verify(EXAMPLE, universal, gather=gather)
            line = report["differences"][0]
            assert (line["a_shape"], line["b_shape"]) == (shape, shape[::-1])
        assert not zckpt.diff(EXAMPLE, universal)["equal"]

    def test_what_a_manifest_lost(self, universal: Path) -> None:
        """Of steps, numbers, groups: what it says of others and not of one."""
        with changed(universal) as manifest:
            manifest["parameters"]["fc1.weight"]["step"] = None
            del manifest["groups"][1]["weight_decay"]
            manifest["parameters"]["frozen.weight"] |= {"trainable": True, "group": 1}
        report = zckpt.verify(EXAMPLE, universal)
        assert [(line["parameter"], line["b"]) for line in report["steps"]] == [
            ("fc1.weight", None)
        ]
        assert {line["key"] for line in report["groups"]} == {
            "weight_decay",
            "trainable of frozen.weight",
            "group of frozen.weight",
        }

    def test_a_lost_weight_that_the_other_keeps_as_a_master(self, tmp_path: Path) -> None:
        target = tmp_path / "weights"
        zckpt.reshard(EXAMPLE, tmp_path / "z3", stage=3, dp=2)
        zckpt.convert(EXAMPLE, target, weights_only=True, dtype="fp32")
        with changed(target) as manifest:
            del manifest["entries"]["fc1.weight/param"]
            del manifest["parameters"]["fc1.weight"]
        for gather in (False, True):
            report = zckpt.verify(tmp_path / "z3", target, gather=gather)
            assert not report["equal"]
            assert "fc1.weight/master" in report["problems"][0]["message"]

    def test_a_tied_weight_that_one_side_holds_twice(self, universal: Path) -> None:
        with changed(universal) as manifest:
            ((owner, parameter),) = [
                (n, p) for n, p in manifest["parameters"].items() if p["aliases"]
            ]
            (alias,) = parameter["aliases"]
            parameter["aliases"] = []
            manifest["parameters"][alias] = {
                **parameter,
                "group": None,
                "trainable": False,
                "step": None,
            }
            source = manifest["entries"][f"{owner}/param"]
            stored = zckpt.read(universal).entries[owner, "param"].fragments[0]
            manifest["entries"][f"{alias}/param"] = {
                **source,
                "fragments": [
                    {
                        "file": os.path.basename(stored.extent.file),
                        "offset": stored.extent.offset,
                        "length": stored.extent.length,
                        "start": stored.start,
                        "stop": stored.stop,
                    }
                ],
            }
        report = zckpt.verify(EXAMPLE, universal)
        assert report["only_b"] == []
        assert report["differences"] == report["problems"] == []

    def test_nothing_in_common_is_an_error(self, universal: Path, zckpt: Zckpt) -> None:
        with changed(universal) as manifest:
            manifest |= {"parameters": {}, "entries": {}, "buffers": [], "step": None}
        ended = zckpt("verify", EXAMPLE, "--against", universal, "--json")
        assert ended.code == 1
        assert ended.document["error"] == "MissingData"


class TestRounding:
    """A copy whose weights were rounded equals its source, but it cannot replace it."""

    @pytest.fixture
    def rounded(self, tmp_path: Path, zckpt: Zckpt) -> Path:
        words = ("--to", "dcp", "--dtype", "bf16")
        ended = zckpt("convert", EXAMPLE, tmp_path / "rounded", *words)
        assert "left out: the exact values of 5 weights: --dtype bf16 rounds them" in ended.out
        return tmp_path / "rounded"

    @pytest.mark.parametrize("gather", [False, True])
    @pytest.mark.parametrize("is_first", [False, True])
    def test_is_named(self, is_first: bool, gather: bool, rounded: Path, zckpt: Zckpt) -> None:
        a, b = (rounded, EXAMPLE) if is_first else (EXAMPLE, rounded)
        words = ["--gather", "--device", "cpu"] if gather else []
        ended = zckpt("verify", a, "--against", b, *words)
        assert ended.code == 0
        assert f"{a} equals {b} up to rounding: " in ended.out
        assert f"note: {rounded} has the rounded values of 5 weights of {EXAMPLE}" in ended.out
        report = zckpt("verify", a, "--against", b, "--json", *words).document
        assert [len(report["rounded"][side]) for side in "ab"] == ([5, 0] if is_first else [0, 5])

    def test_is_a_difference(self, rounded: Path, zckpt: Zckpt) -> None:
        ended = zckpt("diff", rounded, EXAMPLE)
        assert ended.code == 3
        assert ended.out.splitlines()[0].startswith("0 of 23 tensors differ, but the two are not")
        assert f"note: {rounded} has the rounded values of 5 weights of {EXAMPLE}" in ended.out
        assert zckpt("diff", rounded, EXAMPLE, "--tensors", "*").code == 3

    def test_no_checksum_tells(self, rounded: Path, tmp_path: Path, zckpt: Zckpt) -> None:
        proof = tmp_path / "proof.json"
        assert zckpt("verify", rounded, "--save-proof", proof).code == 0
        assert zckpt("verify", rounded, "--against", proof).code == 0
        masters = tmp_path / "z3"
        zckpt("reshard", EXAMPLE, masters, "--stage", 3)
        ended = zckpt("verify", masters, "--against", proof)
        assert ended.code == 1
        assert f"{proof} has embedding.weight" in ended.err
        assert "narrower type" in ended.err
        zckpt("verify", masters, "--save-proof", tmp_path / "exact.json")
        ended = zckpt("verify", rounded, "--against", tmp_path / "exact.json")
        assert ended.code == 1
        assert f"{rounded} has embedding.weight" in ended.err
        moments = ("--tensors", "*exp_avg")
        assert zckpt("verify", masters, "--against", proof, *moments).code == 0

    def test_weights_that_differ_are_not_called_rounded(self, tmp_path: Path, zckpt: Zckpt) -> None:
        rounded = tmp_path / "whole"
        zckpt("convert", EXAMPLE, rounded, "--to", "gathered", "--dtype", "bf16")
        weights = torch.load(rounded / "model.pt")
        weights["fc1.weight"] += 5
        torch.save(weights, rounded / "model.pt")
        report = zckpt("verify", rounded, "--against", EXAMPLE, "--json").document
        assert not report["equal"]
        assert "fc1.weight" not in report["rounded"]["a"]
        assert len(report["rounded"]["a"]) == 4

    def test_a_proof_has_both_values_of_a_weight(self, tmp_path: Path, zckpt: Zckpt) -> None:
        proof = tmp_path / "proof.json"
        zckpt("verify", EXAMPLE, "--save-proof", proof)
        digests = json.loads(proof.read_text())["digests"]
        assert {"fc1.weight/master", "fc1.weight/param"} <= digests.keys()
        assert all("a" in line for line in digests.values())

    @pytest.mark.parametrize("dtype", ["float16", "float64"])
    def test_buffers_and_other_widths(self, dtype: str, tmp_path: Path, zckpt: Zckpt) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
        a, b = tmp_path / "a.pt", tmp_path / "b.pt"
        torch.save({"model": model.state_dict()}, a)
        torch.save({"model": model.to(getattr(torch, dtype)).state_dict()}, b)
        for words in ((a, b), (b, a)):
            assert zckpt("diff", *words).code == 3
            assert "up to rounding" in zckpt("verify", words[0], "--against", words[1]).out

    def test_nothing_is_rounded_where_both_have_masters(self, tmp_path: Path, zckpt: Zckpt) -> None:
        zckpt("reshard", EXAMPLE, tmp_path / "dp3", "--dp", 3)
        report = zckpt("verify", tmp_path / "dp3", "--against", EXAMPLE, "--json").document
        assert report["rounded"] == {"a": [], "b": []}
        assert report["notes"] == []


class TestProofFile:
    def test_stands_for_the_original(self, tmp_path: Path, example: Path, zckpt: Zckpt) -> None:
        zckpt("reshard", EXAMPLE, tmp_path / "dp3", "--dp", 3)
        file = tmp_path / "proof.json"
        ended = zckpt("verify", EXAMPLE, "--against", tmp_path / "dp3", "--save-proof", file)
        assert ended.code == 0
        proof = json.loads(file.read_text())
        assert proof["equal"]
        assert proof["versions"]["a"]["version"] == "0.19.8"
        assert proof["versions"]["zckpt"]
        for sides in proof["digests"].values():
            assert sides["a"] == sides["b"]
        assert (proof["device"], proof["world"], proof["step"]) == ("cpu", 1, 7)
        assert zckpt("verify", tmp_path / "dp3", "--against", file).code == 0
        faults.change(tmp_path / "dp3", "fc1.weight/exp_avg", faults.flip(9, 4, 3))
        ended = zckpt("verify", tmp_path / "dp3", "--against", file, "--json")
        assert ended.code == 3
        assert [line["tensor"] for line in ended.document["differences"]] == ["fc1.weight/exp_avg"]
        faults.raise_step(example, ranks=4)
        ended = zckpt("verify", example, "--against", file)
        assert ended.code == 3
        assert "step 8 against 7" in ended.out

    @pytest.mark.parametrize("gather", [False, True])
    def test_of_what_was_rounded(self, gather: bool, tmp_path: Path, zckpt: Zckpt) -> None:
        """A proof of a bf16 export stands for the checkpoint that it was made of."""
        words = ["--weights-only", "--dtype", "bf16"]
        zckpt("reshard", EXAMPLE, tmp_path / "z3", "--stage", 3)
        zckpt("convert", EXAMPLE, tmp_path / "half", *words)
        file = tmp_path / "proof.json"
        alone = ["--weights-only"]
        options = [*alone, "--gather", "--device", "cpu"] if gather else alone
        save = ["--save-proof", file]
        ended = zckpt("verify", tmp_path / "z3", "--against", tmp_path / "half", *options, *save)
        assert ended.code == 0
        assert zckpt("verify", tmp_path / "z3", "--against", file, *alone).code == 0
        faults.change(tmp_path / "z3", "fc1.weight/master", faults.flip(9, 4, 3))
        assert zckpt("verify", tmp_path / "z3", "--against", file, *alone).code == 3

    def test_notices_what_is_lost(self, tmp_path: Path, zckpt: Zckpt) -> None:
        file, universal = tmp_path / "proof.json", tmp_path / "universal"
        zckpt("convert", EXAMPLE, universal)
        zckpt("verify", EXAMPLE, "--save-proof", file)
        assert zckpt("verify", universal, "--against", file).code == 0
        with changed(universal) as manifest:
            del manifest["entries"]["fc1.weight/exp_avg"]
            manifest["groups"][0]["lr"] = 99
            manifest["parameters"]["fc2.bias"]["step"] = 77
            manifest["step"] = None  # that all parameters share
        report = zckpt("verify", universal, "--against", file, "--json").document
        assert "fc1.weight/exp_avg" in report["problems"][0]["message"]
        assert report["groups"][0]["key"] == "lr"
        assert report["steps"][0]["a"] == 77

    def test_of_a_difference_is_none(self, tmp_path: Path, example: Path, zckpt: Zckpt) -> None:
        file = tmp_path / "proof.json"
        faults.raise_step(example, ranks=4)
        assert zckpt("verify", example, "--against", EXAMPLE, "--save-proof", file).code == 3
        assert json.loads(file.read_text())["equal"] is False
        ended = zckpt("verify", example, "--against", file)
        assert ended.code == 3
        assert "proves a difference" in ended.out
        assert zckpt("verify", example, "--against", file, "--gather").code == 2

    def test_cannot_be_written(self, tmp_path: Path, zckpt: Zckpt) -> None:
        for file in (tmp_path, tmp_path / "nowhere" / "proof.json"):
            ended = zckpt("verify", EXAMPLE, "--save-proof", file)
            assert ended.code == 2
            assert "cannot be written" in ended.err
        assert list(tmp_path.iterdir()) == []


class TestDiff:
    def test_first_and_worst(self, example: Path, zckpt: Zckpt) -> None:
        faults.change(example, "fc1.weight/exp_avg", faults.flip(9, 4, 3))
        faults.change(example, "fc2.weight/master", faults.flip(1, 4, 29))
        ended = zckpt("diff", example, EXAMPLE, "--json")
        assert ended.code == 3
        report = ended.document
        assert report["first"] == "fc1.weight/exp_avg"
        assert report["worst"] == "fc2.weight/master"
        for line in report["differences"]:
            assert line["count"] == 1
            assert -1 <= line["cosine"] <= 1
        said = zckpt("diff", example, EXAMPLE).out
        assert "first: fc1.weight/exp_avg" in said
        assert "worst: fc2.weight/master" in said

    def test_cosine_is_that_of_the_whole_tensors(self, example: Path) -> None:
        name = "fc1.weight/master"
        faults.change(example, name, faults.flip(9, 4, 23))
        (line,) = zckpt.diff(example, EXAMPLE)["differences"]
        a, b = (
            torch.frombuffer(
                bytearray(faults.read_element_bytes(zckpt.read(run).entries[key_of(name)])),
                dtype=torch.float32,
            ).double()
            for run in (example, EXAMPLE)
        )
        expected = torch.nn.functional.cosine_similarity(a, b, dim=0).item()
        assert line["cosine"] == pytest.approx(expected, rel=1e-12)
        assert line["max_abs"] == (a - b).abs().max().item()

    def test_chosen_tensors_are_listed_even_if_equal(self, example: Path, zckpt: Zckpt) -> None:
        faults.change(example, "fc1.weight/exp_avg", faults.flip(9, 4, 3))
        ended = zckpt("diff", example, EXAMPLE, "--tensors", "fc1.*", "--json")
        assert ended.code == 3
        counts = {line["tensor"]: line["count"] for line in ended.document["results"]}
        assert counts["fc1.weight/exp_avg"] == 1
        assert counts["fc1.weight/master"] == 0
        assert all(name.startswith("fc1.") for name in counts)
        assert zckpt("diff", example, EXAMPLE, "--tensors", "fc2.*").code == 0
        assert zckpt("diff", example, EXAMPLE, "--tensors", "nothing").code == 2

    def test_states_and_steps(self, example: Path) -> None:
        faults.raise_step(example, ranks=4)
        report = zckpt.diff(example, EXAMPLE)
        assert report["steps"][0]["a"] == report["steps"][0]["b"] + 1
        assert not report["equal"]


class TestOptions:
    def test_a_rank_of_no_launcher_is_none(
        self, monkeypatch: pytest.MonkeyPatch, example: Path, zckpt: Zckpt
    ) -> None:
        """Shells in a cluster's containers have one."""
        monkeypatch.setenv("RANK", "3")
        assert "is consistent" in zckpt("verify", EXAMPLE).out
        faults.swap_ranks(example)
        assert zckpt("verify", example).code == 3
        assert zckpt("verify", example / "nothing", "--json").document["error"] == "NotACheckpoint"

    def test_gather_needs_another_checkpoint(self, zckpt: Zckpt) -> None:
        ended = zckpt("verify", EXAMPLE, "--gather")
        assert ended.code == 2
        assert "--against" in ended.err
        assert zckpt("verify", EXAMPLE, "--device", "cpu").code == 2

    def test_what_the_reader_warns_of(self, tmp_path: Path, zckpt: Zckpt) -> None:
        """`verify` says what `convert` says of a source, and finds nothing because of it."""
        data = ROOT / "tests" / "data" / "megatron-0.16.1-tp2" / "iter_0000003"
        run = shutil.copytree(data, tmp_path / "iter_0000004")
        (warning,) = texts(read(run).notices.warnings)
        ended = zckpt("verify", run)
        assert (ended.code, ended.err) == (0, f"Warning: {warning} [mixed-saves]\n")
        assert zckpt("verify", run, "-q").err == ""
        assert zckpt("verify", run, "--json").document["warnings"] == said(
            read(run).notices.warnings
        )
        assert warning in zckpt("convert", run, tmp_path / "out").err

    def test_no_checkpoint(self, tmp_path: Path, zckpt: Zckpt) -> None:
        assert zckpt("verify", tmp_path).code == 1
        assert zckpt("verify", EXAMPLE, "--against", tmp_path).code == 1
        assert zckpt("diff", EXAMPLE, tmp_path).code == 1

    def test_needs_neither_torch_nor_safetensors(
        self, zckpt_without: Callable[..., Result], tmp_path: Path
    ) -> None:
        hidden = ("torch", "deepspeed", "safetensors")
        assert zckpt_without(hidden, "verify", EXAMPLE).code == 0
        assert zckpt_without(hidden, "diff", EXAMPLE, EXAMPLE).code == 0

    def test_gather_without_torch_says_what_to_install(self, tmp_path: Path) -> None:
        (tmp_path / "torch.py").write_text("raise ImportError('not installed')")
        words = ["verify", str(EXAMPLE), "--against", str(EXAMPLE), "--gather"]
        environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
        ended = subprocess.run(
            [sys.executable, "-m", "zckpt", *words], env=environment, capture_output=True, text=True
        )
        assert ended.returncode == 1
        assert ended.stderr == (
            "Error: --gather needs torch, which is not installed [extra-missing]\n"
            "Hint: pip install torch safetensors\n"
        )


@pytest.mark.parametrize("command", ["verify", "diff"])
@pytest.mark.parametrize("sides", [("wide", "narrow"), ("narrow", "wide")])
def test_floats_of_8_bits_differ_from_wider_ones(
    tmp_path: Path, zckpt: Zckpt, command: str, sides: tuple[str, str]
) -> None:
    """Nothing says by which number they were scaled."""
    weights = {"a.weight": torch.ones(4, 4), "b.weight": torch.ones(3)}
    torch.save(weights, tmp_path / "wide")
    torch.save(
        weights | {"a.weight": torch.ones(4, 4).to(torch.float8_e4m3fn)}, tmp_path / "narrow"
    )
    a, b = (tmp_path / side for side in sides)
    ended = zckpt(command, a, b) if command == "diff" else zckpt(command, a, "--against", b)
    assert ended.code == 3
    types = ["F32", "F8_E4M3"][:: 1 if sides[0] == "wide" else -1]
    assert f"a.weight/param: type {' against '.join(types)}\n" in ended.out
    assert "b.weight" not in ended.out


def test_weights_without_elements(tmp_path: Path, zckpt: Zckpt) -> None:
    """They are equal if neither side has others; whole tensors without a part are gathered."""
    torch.save({"weight": torch.zeros(3, 0)}, tmp_path / "a.pt")
    for to in ("universal", "dcp"):
        target = tmp_path / to
        assert zckpt("convert", tmp_path / "a.pt", target, "--to", to).code == 0
        for options in ((), ("--gather",)):
            ended = zckpt("verify", target, "--against", tmp_path / "a.pt", *options)
            assert ended.code == 0, ended.err
            assert "equals" in ended.out
    torch.save({"weight": torch.zeros(3, 0), "a": torch.ones(2)}, tmp_path / "b.pt")
    torch.save({"weight": torch.zeros(3, 0), "b": torch.ones(2)}, tmp_path / "c.pt")
    ended = zckpt("verify", tmp_path / "b.pt", "--against", tmp_path / "c.pt")
    assert "share no weights" in ended.err


def test_a_type_that_is_not_cast_is_named(tmp_path: Path, zckpt: Zckpt) -> None:
    """With what keeps it as the next step."""
    torch.save({"a.weight": torch.ones(4).to(torch.float8_e4m3fn)}, tmp_path / "x.pt")
    words = ("convert", tmp_path / "x.pt", tmp_path / "out")
    ended = zckpt(*words, "--weights-only", "--dtype", "bf16")
    assert ended.code == 1
    assert "a.weight/param is of type F8_E4M3, which zckpt does not convert to BF16" in ended.err
    assert "leave out --dtype" in ended.err
    assert zckpt(*words, "--to", "dcp").code == 0
