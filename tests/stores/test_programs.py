"""Do programs of torch, and runs that go on by themselves, take URLs?"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import zckpt

from ..conftest import EXAMPLE, Result
from ..test_resume import files
from .conftest import Bucket
from .sources import TRAINER


@pytest.mark.parametrize("made", ["deepspeed", "dcp", "universal"])
def test_a_storage_reader_loads_the_same(made: str, bucket: Bucket, tmp_path: Path) -> None:
    import torch
    import torch.distributed.checkpoint as dcp

    from zckpt.dcp import StorageReader

    path = EXAMPLE
    if made != "deepspeed":
        path = tmp_path / "source"
        zckpt.convert(EXAMPLE, path, to=made)
    url = bucket.upload(path, "runs/source")
    loaded = []
    for place in (str(path), url):
        reader = StorageReader(place)
        state = {
            name.removesuffix("/param"): torch.zeros(entry.shape)
            for name, entry in reader.manifest.entries.items()
            if name.endswith("/param")
        }
        dcp.load(state, storage_reader=reader, no_dist=True)
        loaded.append(state)
    here, there = loaded
    assert here.keys() == there.keys()
    assert all(torch.equal(here[name], there[name]) for name in here)
    assert any(tensor.any() for tensor in there.values())


def test_report_of_a_run_in_a_store(
    bucket: Bucket, tmp_path: Path, zckpt: Callable[..., Result]
) -> None:
    url = bucket.upload(EXAMPLE, "runs/run")
    here = zckpt("report", EXAMPLE, "--json").document
    there = zckpt("report", url, "--json").document
    assert there.keys() == here.keys()
    page = tmp_path / "page.html"
    assert zckpt("report", url, "--output", page, "-q").code == 0
    assert url in page.read_text()
    assert "/tmp/" not in page.read_text()


def test_check_of_a_run_in_a_store(bucket: Bucket, zckpt: Callable[..., Result]) -> None:
    url = bucket.upload(EXAMPLE, "runs/run")
    here, there = zckpt("check", EXAMPLE), zckpt("check", url)
    assert there.code == here.code, there.err
    assert there.out.replace(url, "RUN") == here.out.replace(str(EXAMPLE), "RUN")


def test_the_checkpoints_of_a_trainers_run_are_resharded(bucket: Bucket, tmp_path: Path) -> None:
    shutil.copytree(TRAINER, tmp_path / "run" / "checkpoint-4")
    url = bucket.upload(tmp_path / "run", "runs/run")
    zckpt.reshard(tmp_path / "run", tmp_path / "here", dp=3, checkpoints="all")
    zckpt.reshard(url, bucket.url("to/run"), dp=3, checkpoints="all")
    assert bucket.files("to/run") == files(tmp_path / "here")
