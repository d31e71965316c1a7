"""Universal checkpoints: what every reader promises, and damaged or hostile manifests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import asdict

import zckpt
from zckpt import errors
from zckpt.core.checkpoint.manifest import Manifest

from ...conftest import ROOT, texts
from ...manifests import changed
from ..contract import FormatContract


class TestContract(FormatContract):
    format = "universal"

    @pytest.fixture
    def checkpoint(self, universal: Path) -> Path:
        return universal


class TestRefusals:
    def change(self, universal: Path, **changes: Any) -> None:
        with changed(universal) as manifest:
            manifest |= changes

    def test_an_unknown_version(self, universal: Path) -> None:
        self.change(universal, zckpt=2)
        with pytest.raises(errors.UnsupportedCheckpoint, match="version 2"):
            zckpt.read(universal)

    def test_unknown_keys_are_ignored(self, universal: Path) -> None:
        self.change(universal, comment={"by": "someone"})
        assert zckpt.read(universal).step == 7

    def test_unknown_keys_of_the_source_are_kept(self, universal: Path) -> None:
        with changed(universal) as manifest:
            manifest["source"]["cluster"] = ["own"]
        found = zckpt.inspect(zckpt.read(universal))
        assert (found["cluster"], found["dp"]) == (["own"], manifest["source"]["dp"])

    def test_a_flipped_bit(self, universal: Path, tmp_path: Path) -> None:
        path = universal / "exp_avg.safetensors"
        data = bytearray(path.read_bytes())
        data[5000] ^= 1
        path.write_bytes(data)
        with pytest.raises(errors.CorruptCheckpoint, match=r"embedding.weight/exp_avg is damaged"):
            zckpt.convert(universal, tmp_path / "again")
        assert not (tmp_path / "again").exists()
        assert not (tmp_path / "again.partial").exists()

    def test_a_flipped_bit_of_a_sibling(self, example: Path, tmp_path: Path) -> None:
        (example / "trainer_state.json").write_text('{"global_step": 7}')
        zckpt.convert(example, tmp_path / "universal")
        sibling = tmp_path / "universal/siblings/trainer_state.json"
        sibling.write_text('{"global_step": 6}')
        with pytest.raises(errors.CorruptCheckpoint, match=r"trainer_state\.json is damaged"):
            zckpt.convert(tmp_path / "universal", tmp_path / "again", to="dcp")
        assert not (tmp_path / "again").exists()

    def test_a_missing_file(self, universal: Path) -> None:
        (universal / "exp_avg.safetensors").unlink()
        with pytest.raises(errors.CorruptCheckpoint, match="exp_avg"):
            zckpt.read(universal)

    def test_a_short_file(self, universal: Path) -> None:
        path = universal / "exp_avg.safetensors"
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(errors.CorruptCheckpoint, match="bytes"):
            zckpt.read(universal)

    @pytest.mark.parametrize("name", ["/etc/passwd", "../run/latest", "a/../../b"])
    def test_files_outside(self, name: str, universal: Path) -> None:
        self.change(universal, files={name: {"size": 1, "crc32": "00000000"}})
        with pytest.raises(errors.CorruptCheckpoint, match="outside"):
            zckpt.read(universal)

    @pytest.mark.parametrize(
        "text",
        ['{"zckpt": ', "{", '{"zckpt": 1}', "[" * 100_000, '{"zckpt": 1, "entries": 3}', "\xff"],
    )
    def test_a_malformed_manifest(
        self, text: str, universal: Path, zckpt: Callable[..., Any]
    ) -> None:
        (universal / "manifest.json").write_text(text)
        ended = zckpt("inspect", "--from", "universal", universal)
        assert ended.code == 1
        assert ended.err.startswith("Error: ")
        assert len(ended.err.splitlines()) <= 2

    @pytest.mark.parametrize(
        "source",
        [
            None,
            {"format": "deepspeed", "dp": "x"},
            {"format": "deepspeed", "dp": -3},
            {"format": "deepspeed", "zero_stage": "two"},
            {"format": "deepspeed", "tag": "../../elsewhere"},
            {"format": "deepspeed", "tag": ".."},
            {"format": 3},
            {"format": "deepspeed", "tp": "two"},
            {"format": "gathered", "mesh": 1},
        ],
    )
    def test_a_source_that_none_can_be(
        self, source: Any, universal: Path, zckpt: Callable[..., Any]
    ) -> None:
        self.change(universal, source=source)
        for command in (["inspect", universal], ["reshard", universal, universal.parent / "run"]):
            assert zckpt(*command).code == 1
        assert sorted(path.name for path in universal.parent.iterdir()) == ["universal"]

    @pytest.mark.parametrize("key", ["client_state", "counters", "megatron"])
    def test_a_state_that_is_no_object(self, key: str, universal: Path) -> None:
        with changed(universal) as manifest:
            manifest["state"][key] = [1]
        with pytest.raises(errors.CorruptCheckpoint, match=rf"`state\.{key}` is no object"):
            zckpt.read(universal)

    def test_a_tensor_of_the_state_that_is_not_listed(self, universal: Path) -> None:
        with changed(universal) as manifest:
            manifest["state"]["client_state"] = {"own": {"$tensor": "nope"}}
        with pytest.raises(errors.CorruptCheckpoint, match="nope"):
            zckpt.read(universal)

    @pytest.mark.parametrize(
        "state",
        [
            {"pipeline": "stages"},
            {"pipeline": {"parameters": [["w"]], "buffers": [[]], "layers": ["0"]}},
            {"pipeline": {"parameters": [[]], "buffers": [[]], "layers": [0], "tied": [[0, 1]]}},
            {"tensor_parallel": [1]},
            {"tensor_parallel": {"rules": {"fc1.weight": 0}, "vocabulary": {}}},
            {"tensor_parallel": {"rules": {}, "vocabulary": {"fc1.weight": {"rows": 8}}}},
        ],
    )
    def test_cuts_of_other_types(
        self, state: dict[str, Any], universal: Path, zckpt: Callable[..., Any]
    ) -> None:
        with changed(universal) as manifest:
            manifest["state"] |= state
        ended = zckpt("inspect", universal)
        assert ended.code == 1
        assert "manifest.json is malformed: " in ended.err
        assert len(ended.err.splitlines()) <= 2

    @pytest.mark.parametrize("keep", [slice(1), slice(1, None), slice(0)])
    def test_fragments_that_do_not_cover(self, keep: slice, universal: Path) -> None:
        extent = zckpt.read(universal).entries["fc1.bias", "master"].fragments[0].extent
        listed = [
            {
                "file": "master.safetensors",
                "offset": extent.offset + start * 4,
                "length": (stop - start) * 4,
                "start": start,
                "stop": stop,
            }
            for start, stop in ((0, 10), (10, 29))
        ]
        with changed(universal) as manifest:
            manifest["entries"]["fc1.bias/master"]["fragments"] = listed[keep]
        with pytest.raises(errors.CorruptCheckpoint, match=r"fc1.bias/master"):
            zckpt.read(universal)

    def test_files_beside_it_do_not_disturb(self, universal: Path) -> None:
        (universal / "notes.safetensors").write_text("junk")
        (universal / "master-old.safetensors").write_text("junk")
        assert zckpt.read(universal).step == 7

    def test_fragments_may_be_listed(self, universal: Path) -> None:
        entry = zckpt.read(universal).entries["fc1.bias", "master"]
        extent = entry.fragments[0].extent
        with changed(universal) as manifest:
            manifest["entries"]["fc1.bias/master"]["fragments"] = [
                {
                    "file": "master.safetensors",
                    "offset": extent.offset + start * 4,
                    "length": (stop - start) * 4,
                    "start": start,
                    "stop": stop,
                }
                for start, stop in ((0, 10), (10, 29))
            ]
        assert len(zckpt.read(universal).entries["fc1.bias", "master"].fragments) == 2


STATED = {"code": "loss-scale-low", "severity": "warning", "subject": "scaler", "hint": "wait"}


class TestNotices:
    """Texts have codes if the manifest states them, one for each."""

    def change(self, universal: Path, notices: Any) -> Manifest:
        with changed(universal) as manifest:
            manifest |= {"warnings": ["one", "two"], "left_out": ["three"], "notices": notices}
        return zckpt.read(universal)

    def test_codes_are_those_of_the_writer(self, universal: Path, tmp_path: Path) -> None:
        other = {"code": "of-a-newer-zckpt", "severity": "note", "subject": None, "file": "run"}
        self.change(universal, {"warnings": [STATED, other], "left_out": [other]})
        zckpt.convert(universal, tmp_path / "again")
        for manifest in (zckpt.read(universal), zckpt.read(tmp_path / "again")):
            first, second = manifest.notices.warnings
            message = {"message": "one", "file": None}
            assert asdict(first) == STATED | message
            assert (second.code, second.severity, second.message) == (
                "of-a-newer-zckpt",
                "note",
                "two",
            )
            assert texts(manifest.notices.omitted) == ["three"]

    @pytest.mark.parametrize(
        "notices",
        [
            None,
            [STATED, STATED],
            {},
            {"warnings": [STATED]},
            {"warnings": [STATED, None]},
            {"warnings": [STATED, {**STATED, "code": "\x1b[31mred"}]},
            {"warnings": [STATED, {**STATED, "code": "a" * 41}]},
            {"warnings": [STATED, {**STATED, "severity": "error"}]},
            {"warnings": [STATED, {**STATED, "subject": ["scaler"]}]},
            {"warnings": [STATED, {"code": "loss-scale-low"}]},
        ],
    )
    def test_others_are_of_the_source(self, notices: Any, universal: Path) -> None:
        manifest = self.change(universal, notices)
        assert [notice.code for notice in manifest.notices.warnings] == ["said-by-source"] * 2
        assert [notice.severity for notice in manifest.notices.warnings] == ["warning"] * 2
        assert texts(manifest.notices.warnings) == ["one", "two"]
        (omitted,) = manifest.notices.omitted
        assert (omitted.code, omitted.severity) == ("said-by-source", "note")

    def test_an_older_manifest_states_none(self) -> None:
        older = ROOT / "tests" / "data" / "universal" / "06-0.1.0" / "megatron"
        (notice,) = zckpt.read(older).notices.omitted
        assert notice.code == "said-by-source"
        assert notice.message == "random states (rng_state), which every data-parallel rank has"
