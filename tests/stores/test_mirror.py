"""Does nobody open an empty file of a mirror, and does nothing of it stay?"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from ..conftest import ROOT
from .conftest import Bucket
from .sources import local

WATCHED = """
import os, sys, traceback
import zckpt
from zckpt.remote import mirror

ALLOWED = ("zckpt/core/storage/sources.py", "zckpt/remote/mirror.py")
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
for number, url in enumerate(sys.argv[2:]):
    target = f"{sys.argv[1]}/{number}"
    zckpt.convert(url, target)
    manifest = zckpt.read(url)
    zckpt.inspect(manifest)
    zckpt.load(url, next(iter(manifest.entries.values())).name)
    zckpt.stats(url)
    zckpt.verify(url)
    zckpt.diff(url, target)
    zckpt.report(url)
    assert seen > 10 * number and not wrong, (url, wrong)
"""
NAMES = ("run", "trainer", "dcp", "deepspeed-universal", "megatron", "hdf5", "adapter", "items")


def test_the_bytes_of_a_mirror_come_by_way_of_sources(bucket: Bucket, tmp_path: Path) -> None:
    urls = [bucket.upload(local(name, tmp_path / name), f"runs/{name}") for name in NAMES]
    command = [sys.executable, "-c", WATCHED, str(tmp_path), *urls]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert not os.listdir(os.environ["TMPDIR"]), "the process leaves nothing"
