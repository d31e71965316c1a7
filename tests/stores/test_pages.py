"""The commands on the pages that have a URL run, on a bucket of this machine."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

from .. import pages
from ..conftest import EXAMPLE, ROOT, Result
from ..test_shell_blocks import TRAINER, URL, shell_blocks, single_commands
from .conftest import Bucket

BLOCKS = [block.text for block in shell_blocks(ROOT / "docs" / "stores.md")]
SINGLE = [command for command in single_commands() if URL in command]


@pytest.mark.parametrize("text", [*BLOCKS, *SINGLE])
def test_commands_run(
    text: str,
    bucket: Bucket,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    zckpt: Callable[..., Result],
) -> None:
    """`run` and its newest checkpoint are there, and what a stopped run has left of `resumed`."""
    monkeypatch.chdir(tmp_path)
    is_trainers = "checkpoint-500" in text
    bucket.upload(
        TRAINER if is_trainers else EXAMPLE, "run/checkpoint-500" if is_trainers else "run"
    )
    if "/out" in text:
        bucket.upload(TRAINER, "out/checkpoint-500")
    if "clean-up" in text:
        bucket.client.create_multipart_upload(Bucket=bucket.name, Key="resumed/latest")
    for line in pages.whole_lines(text):
        result = zckpt(*shlex.split(line.replace(URL, bucket.url()))[1:])
        assert result.code == 0, f"{line}\n{result.err}"
