"""A target is laid out from the manifest: no file of the source is opened for that.

Files beside the checkpoint's own, such as a trainer's state or a model's config.json, may be.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import zckpt
from zckpt import formats
from zckpt.training.options import Options
from zckpt.writing import conversion

DATA = Path(__file__).parents[1] / "data"
PP2_TP2 = "zckpt-0.1-pp2_tp2/run"
CASES: list[tuple[str, dict[str, Any]]] = [
    *(("fsdp2-2.13.0-w2", {"to": to}) for to in ("universal", "gathered", "deepspeed-universal")),
    *(("fsdp2-2.13.0-w2", {"to": "deepspeed", "dp": 3, "stage": stage}) for stage in range(4)),
    ("deepspeed-0.9.3-z2_dp3_fused_adam/run", {"to": "dcp", "dp": 2}),
    ("deepspeed-0.9.3-z2_dp3_fused_adam/run", {"to": "deepspeed", "dp": 2}),
    ("megatron-0.16.1-tp2", {"to": "megatron", "dp": 2}),
    ("megatron-0.16.1-legacy-tp2", {"to": "universal"}),
    (PP2_TP2, {"to": "universal"}),
    (PP2_TP2, {"dp": 2, "tp": 1}),
    (PP2_TP2, {"dp": 2, "tp": 4}),
    (PP2_TP2, {"dp": 2}),
    (PP2_TP2, {"dp": 2, "pp": 1}),
]
opened: list[str] | None = None


def note(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "open" and opened is not None and isinstance(arguments[0], (str, bytes)):
        opened.append(os.fsdecode(arguments[0]))


@pytest.fixture(scope="session", autouse=True)
def _hook() -> None:
    sys.addaudithook(note)


@pytest.fixture
def while_laid_out(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The paths that are opened until the last shell of a target is known."""
    global opened
    paths: list[str] = []
    laid_out = conversion.laid_out

    def watched(*arguments: Any) -> Any:
        global opened
        opened = paths
        try:
            source, layout = laid_out(*arguments)
            assert sum(1 for _ in layout.shells())
        finally:
            opened = None
        return source, layout

    monkeypatch.setattr(conversion, "laid_out", watched)
    yield paths
    opened = None


@pytest.mark.parametrize(("name", "to"), CASES, ids=str)
def test_no_file_of_the_source_is_opened(
    name: str, to: dict[str, Any], tmp_path: Path, while_laid_out: list[str]
) -> None:
    source = DATA / name
    write = zckpt.convert if "to" in to else zckpt.reshard
    write(source, tmp_path / "new", **to)
    own = {os.path.basename(file) for file in zckpt.read(source).files.paths}
    assert not own & {os.path.basename(path) for path in while_laid_out}


@pytest.mark.parametrize("name", ["deepspeed-0.9.3-z2_dp3_fused_adam/run", "megatron-0.16.1-tp2"])
def test_no_file_of_the_run_of_like_is_opened(name: str, tmp_path: Path) -> None:
    """The writer gets its manifest."""
    global opened
    zckpt.convert(DATA / name, tmp_path / "whole", to="gathered")
    source, run = zckpt.read(tmp_path / "whole"), zckpt.read(DATA / name)
    lay_out_like = formats.named(run.format).functions.lay_out_like
    assert lay_out_like is not None
    opened = []
    try:
        assert sum(1 for _ in lay_out_like(source, run, Options()).shells())
        assert not {*opened} & {*source.files.paths, *run.files.paths}
    finally:
        opened = None


def test_every_target_that_states_checksums_is_sealed() -> None:
    """A folder for from_pretrained alone states none: safetensors has no place for them."""
    written = [item for item in formats.FORMATS if item.functions.lay_out is not None]
    assert len(written) > 5
    assert [item.name for item in written if item.functions.seal is None] == ["hf"]
