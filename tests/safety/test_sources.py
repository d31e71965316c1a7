"""Whole commands whose source changes, cannot be read, or has more in it than a checkpoint."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import zckpt
from zckpt.errors import SourceChanged

FORMATS = ["deepspeed", "deepspeed-universal", "dcp", "gathered", "onnxruntime", "universal"]


def source_of(example: Path, to: str) -> Path:
    """The example in another format."""
    if to == "deepspeed":
        return example
    source = example.parent / to
    zckpt.convert(example, source, to=to)
    return source


def main_file(source: Path) -> Path:
    """The largest file of a checkpoint."""
    files = [path for path in source.rglob("*") if path.is_file()]
    return max(files, key=lambda path: (path.stat().st_size, path.name))


def replaced(path: Path) -> None:
    """Another file with one other bit in its last third, where no header is."""
    data = bytearray(path.read_bytes())
    data[-len(data) // 3] ^= 1
    other = path.with_name("other")
    other.write_bytes(data)
    other.rename(path)


def touched(path: Path) -> None:
    before = path.stat()
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))


# -- a source that changes


@pytest.mark.parametrize("change", [replaced, touched])
@pytest.mark.parametrize("to", FORMATS)
def test_a_change_in_the_middle_ends_the_conversion(
    example: Path, to: str, change: Callable[[Path], None]
) -> None:
    source, target = source_of(example, to), example.parent / "target"
    wanted = "gathered" if to == "universal" else "universal"
    file = main_file(source)

    def begin(_: int) -> Callable[[int], None]:
        change(file)
        return lambda _: None

    with pytest.raises(SourceChanged, match=f"{file.name} changed while it was read"):
        zckpt.convert(source, target, to=wanted, begin=begin)
    assert not list(example.parent.glob("target*"))


@pytest.mark.parametrize("to", ["deepspeed", "onnxruntime"])
def test_a_change_in_the_middle_ends_verify_diff_and_stats(example: Path, to: str) -> None:
    source = source_of(example, to)
    other = Path(shutil.copytree(source, example.parent / "copy"))

    def begin(_: int) -> Callable[[int], None]:
        touched(main_file(source))
        return lambda _: None

    calls: list[Callable[[], Any]] = [
        lambda: zckpt.verify(source, begin=begin),
        lambda: zckpt.verify(source, other, begin=begin),
        lambda: zckpt.verify(other, source, begin=begin),
        lambda: zckpt.diff(source, other, begin=begin),
        lambda: zckpt.diff(other, source, begin=begin),
        lambda: zckpt.stats(source, begin=begin),
    ]
    for call in calls:
        with pytest.raises(SourceChanged):
            call()


def test_a_sibling_that_grows_ends_the_conversion(example: Path) -> None:
    (example / "trainer_state.json").write_text("{}")
    (example / "log.txt").write_text("one line")

    def begin(_: int) -> Callable[[int], None]:
        (example / "log.txt").write_text("one line, and one more")
        return lambda _: None

    with pytest.raises(SourceChanged, match=r"log\.txt"):
        zckpt.convert(example, example.parent / "target", begin=begin)


def test_training_may_go_on_beside_the_tag(example: Path) -> None:
    """A new tag, another `latest` and a log are no part of the checkpoint that is read."""

    def begin(_: int) -> Callable[[int], None]:
        (example / "latest").write_text("global_step50")
        (example / "log.txt").write_text("one line")
        shutil.copytree(example / "global_step7", example / "global_step50")
        return lambda _: None

    (example / "log.txt").write_text("")
    zckpt.convert(example, example.parent / "target", begin=begin)
