"""What another program removes while a checkpoint beside it is looked for does not disturb."""

from __future__ import annotations

import itertools
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import zckpt
from zckpt import formats
from zckpt.errors import ZckptError
from zckpt.resume import runs

from ..conftest import EXAMPLE, ROOT

CALLS = ("stat", "listdir", "scandir", "open")
DATA = ROOT / "tests" / "data"


def copied(path: Path) -> Callable[[Path], object]:
    return lambda target: shutil.copytree(path, target)


def converted(to: str, inside: str = "") -> Callable[[Path], object]:
    def place(target: Path) -> None:
        zckpt.convert(EXAMPLE, target, to=to)
        if inside:
            os.rename(target / inside, target.with_suffix(".inside"))
            shutil.rmtree(target)
            os.rename(target.with_suffix(".inside"), target)

    return place


PLACES = {
    "a run of DeepSpeed": copied(EXAMPLE),
    "a tag of DeepSpeed": copied(EXAMPLE / "global_step7"),
    "a run of DeepSpeed universal": converted("deepspeed-universal"),
    "a tag of DeepSpeed universal": converted("deepspeed-universal", "global_step7"),
    "zckpt universal": converted("universal"),
    "DCP": converted("dcp"),
    "gathered": converted("gathered"),
    "ONNX Runtime": lambda target: zckpt.convert(EXAMPLE, target, to="onnxruntime", dp=2),
    "a checkpoint of a Trainer": copied(ROOT / "examples" / "trainer" / "checkpoint-4"),
    "a run of a Trainer": copied(ROOT / "examples" / "trainer"),
    "an iteration of Megatron-LM": copied(DATA / "megatron-0.16.1-tp2" / "iter_0000003"),
    "a run of Megatron-LM": copied(DATA / "megatron-0.16.1-tp2"),
}


class Removed:
    """Removes a folder just before the n-th call that looks at it or at what is in it."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.aside = str(folder), str(folder.parent.parent / "removed")
        self.left = self.total = 0
        for name in CALLS:
            patch.setattr(os, name, self._before(getattr(os, name)))

    def _before(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def look(path: Any, *args: Any, **options: Any) -> Any:
            if isinstance(path, (str, os.PathLike)):
                full = os.path.abspath(path)
                if full == self.folder or full.startswith(self.folder + os.sep):
                    self.left -= 1
                    if self.left == 0:
                        os.rename(self.folder, self.aside)
            return call(path, *args, **options)

        return look

    def is_before(self, number: int, look: Callable[[], object]) -> bool:
        """Whether the call of that number came; `look` is what calls."""
        self.left = number
        try:
            look()
        finally:
            came = self.left <= 0
            self.left = 0
            if came:
                os.rename(self.aside, self.folder)
        return came


@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_what_is_removed_meanwhile_is_not_there(
    place: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place(tmp_path / "run" / "step_1")
    shutil.copytree(tmp_path / "run" / "step_1", tmp_path / "run" / "step_2")
    run, own = str(tmp_path / "run"), str(tmp_path / "run" / "step_1")
    removed = Removed(tmp_path / "run" / "step_2", monkeypatch)

    def look() -> None:
        for path in (run, own):
            with suppress(ZckptError):
                formats.recognize(path)
        with suppress(ZckptError):
            runs.candidates(run)

    for number in itertools.count(1):
        if not removed.is_before(number, look):
            break
    assert number > 9
