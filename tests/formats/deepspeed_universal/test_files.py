"""Which files make a universal directory, and where it may lie."""

from __future__ import annotations

import shutil
from pathlib import Path

import zckpt

from .directories import (
    FORMAT,
    TAG,
    Zckpt,
    convert,
)


class TestDirectories:
    def test_tag_directory(self, example: Path, tmp_path: Path) -> None:
        merged = convert(example, tmp_path / "merged")
        assert zckpt.read(merged / TAG).source == zckpt.read(merged).source
        assert zckpt.read(merged, tag=TAG).source == zckpt.read(merged).source

    def test_without_the_pointer(self, example: Path, tmp_path: Path) -> None:
        merged = convert(example, tmp_path / "merged")
        (merged / "latest_universal").unlink()
        assert zckpt.read(merged).format == FORMAT

    def both(self, example: Path, tmp_path: Path) -> Path:
        """A run directory as DeepSpeed's converter leaves it."""
        merged = convert(example, tmp_path / "merged")
        shutil.move(merged / TAG, example / "universal_step7")
        (example / "latest_universal").write_text("universal_step7")
        return example

    def test_beside_the_ordinary_one(self, example: Path, tmp_path: Path, zckpt: Zckpt) -> None:
        run = self.both(example, tmp_path)
        ended = zckpt("inspect", run)
        assert ended.code == 1
        assert "deepspeed, deepspeed-universal" in ended.err
        for name in ("deepspeed", FORMAT):
            ended = zckpt("inspect", run, "--from", name, "--json")
            assert ended.document["format"] == name

    def test_is_no_tag_of_the_ordinary_format(self, example: Path, tmp_path: Path) -> None:
        run = self.both(example, tmp_path)
        (run / "latest").unlink()
        assert zckpt.read(run, format="deepspeed").source["tag"] == TAG
        assert zckpt.read(run / "universal_step7").format == FORMAT

    def test_is_no_sibling(self, example: Path, tmp_path: Path) -> None:
        run = self.both(example, tmp_path)
        (run / "trainer_state.json").write_text("{}")
        for name in ("deepspeed", FORMAT):
            siblings = zckpt.read(run, format=name).files.siblings
            assert [sibling.name for sibling in siblings] == ["trainer_state.json"]
