"""Does nobody open an empty file of a mirror, and does nothing of it stay?"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ..conftest import ROOT
from .conftest import Bucket
from .sources import local

WATCHED = """
import os, sys, traceback
import zckpt
from zckpt.remote import mirror

ALLOWED = ("zckpt/core/sources.py", "zckpt/remote/mirror.py")
wrong, seen = [], 0

def watch(event, words):
    global seen
    if event != "open" or not isinstance(words[0], (str, bytes)) or not mirror._top:
        return
    path = os.fsdecode(words[0])
    if not path.startswith(mirror._top[0]) or os.path.isdir(path):
        return
    seen += 1
    frames = traceback.extract_stack()[:-1]
    # contextlib and os stand between
    own = [each.filename for each in frames if "/zckpt/" in each.filename]
    if not own[-1].endswith(ALLOWED):
        wrong.append((path, own[-1]))

sys.addaudithook(watch)
url, target = sys.argv[1:]
zckpt.convert(url, target + "/convert")
manifest = zckpt.read(url)
zckpt.inspect(manifest)
zckpt.load(url, next(iter(manifest.entries)))
zckpt.stats(url)
zckpt.verify(url)
zckpt.verify(target + "/convert", url)
zckpt.diff(url, url)
zckpt.report(url)
print(seen, wrong)
assert seen and not wrong
"""
NAMES = ("run", "trainer", "dcp", "deepspeed-universal", "megatron", "hdf5", "adapter", "items")


@pytest.mark.parametrize("name", NAMES)
def test_the_bytes_of_a_mirror_come_by_way_of_sources(
    name: str, bucket: Bucket, tmp_path: Path
) -> None:
    path = local(name, tmp_path)
    url = bucket.upload(path, f"runs/{path.name}")
    command = [sys.executable, "-c", WATCHED, url, str(tmp_path)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert not os.listdir(os.environ["TMPDIR"]), "the process leaves nothing"
