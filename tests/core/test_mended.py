"""The list of what was restored is read as it was written, or refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from zckpt.core.checkpoint import mended
from zckpt.core.checkpoint.mended import MENDED, Mended
from zckpt.errors import CorruptCheckpoint

EXACT = Mended("a.pt", 100, 1, "checksum", 1e-6, bit=3, tensor="w/master", element=7, before=1.5)
CHANCE = Mended("b.pt", 5, 1, "chance", 0.01, bit=0)
MADE_UP = Mended("c.pt", 64, 800, "made-up", 1.0, tensor="w/exp_avg", witness="zeros")


def test_the_file(tmp_path: Path) -> None:
    assert mended.beside(str(tmp_path)) == ()
    (tmp_path / MENDED).write_bytes(mended.text_of([EXACT, CHANCE]))
    assert mended.beside(str(tmp_path)) == (EXACT, CHANCE)
    (tmp_path / "model.pt").touch()
    assert mended.beside(str(tmp_path / "model.pt")) == (EXACT, CHANCE)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"mended": 3}', '{"mended": [{"file": "a"}]}', "{" * 99_999]
)
def test_another_file(text: str, tmp_path: Path) -> None:
    (tmp_path / MENDED).write_text(text)
    with pytest.raises(CorruptCheckpoint, match="is damaged"):
        mended.beside(str(tmp_path))


def test_warnings() -> None:
    first, second, third = mended.warnings([EXACT, MADE_UP, CHANCE], "run")
    assert first.message == "zckpt mend has restored 1 record of run exactly: w/master"
    assert first.subject == "w/master"
    assert "--accept-chance" in second.message
    words = "zckpt mend has made up 1 record of run in place of lost values (--rebuild): w/exp_avg"
    assert third.message == words
    assert mended.warnings([], "run") == []
