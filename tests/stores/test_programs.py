"""Do programs of torch, and runs that go on by themselves, take URLs?"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import zckpt
import zckpt as package

from ..conftest import EXAMPLE, Result, needs
from ..engines import deepspeed
from ..engines.cases import CASES
from ..formats.deepspeed.test_reshard import assert_same_state
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
            name: torch.zeros(entry.shape)
            for (name, slot), entry in reader.manifest.entries.items()
            if slot == "param"
        }
        dcp.load(state, storage_reader=reader, no_dist=True)
        loaded.append(state)
    here, there = loaded
    assert here.keys() == there.keys()
    assert all(torch.equal(here[name], there[name]) for name in here)
    assert any(tensor.any() for tensor in there.values())


def test_a_run_in_a_store_is_listed(
    bucket: Bucket, tmp_path: Path, zckpt: Callable[..., Result]
) -> None:
    run = tmp_path / "out"
    for step in (5, 6):
        shutil.copytree(TRAINER, run / f"checkpoint-{step}")
    (run / "checkpoint-6" / "scheduler.pt").write_bytes(b"")
    (run / "checkpoint-7").mkdir()
    (run / "checkpoint-7" / "notes.txt").write_text("no checkpoint")
    url = bucket.upload(run, "runs/out")
    for more in ((), ("--intact", "--dp", 2)):
        here = zckpt("list", run, *more, "--json")
        there = zckpt("list", url, *more, "--json")
        assert (here.code, there.code) == (3, 3)
        assert there.document["run"] == url
        own = {"path", "saved", "being_written", "problems", "warnings"}
        for one, other in zip(
            here.document["checkpoints"], there.document["checkpoints"], strict=True
        ):
            assert {k: v for k, v in one.items() if k not in own} == {
                k: v for k, v in other.items() if k not in own
            }
            assert other["path"] == f"{url}/{other['name']}"
            assert other["being_written"] is True  # it was uploaded just now
            for key in ("problems", "warnings"):
                assert [line["code"] for line in other[key]] == [line["code"] for line in one[key]]
    assert "/tmp/" not in there.out
    assert "checkpoint-6 is damaged: " in zckpt("list", url).out


def test_several_urls(bucket: Bucket, zckpt: Callable[..., Result]) -> None:
    url = bucket.upload(EXAMPLE, "runs/run")
    for command in ("verify", "inspect", "check"):
        ended = zckpt(command, url, f"{url}/nothing", EXAMPLE)
        assert ended.code == 1
        assert [line.partition(" ")[0].rstrip(":") for line in ended.out.splitlines()] == [
            line.partition(" ")[0].rstrip(":")
            for path in (url, EXAMPLE)
            for line in zckpt(command, path, path).out.splitlines()[:1]
        ]
        reports = zckpt(command, url, f"{url}/nothing", "--json").document["reports"]
        assert reports[0]["path"].startswith(url)
        assert reports[1]["path"] == f"{url}/nothing"


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


def test_a_run_goes_on_from_a_store(
    bucket: Bucket, tmp_path: Path, zckpt: Callable[..., Result]
) -> None:
    """The newest whole checkpoint is written for the job's size into a folder, once."""
    for name in ("checkpoint-4", "checkpoint-8"):
        shutil.copytree(TRAINER, tmp_path / "run" / name)
    broken = next((tmp_path / "run/checkpoint-8").rglob("*optim_states.pt"))
    broken.write_bytes(broken.read_bytes()[:5000])
    url, scratch = bucket.upload(tmp_path / "run", "runs/run"), tmp_path / "scratch"
    refused = zckpt("auto-resume", url, "--dp", 3)
    assert (refused.code, "scratch=, or --scratch DIR" in refused.err) == (2, True)
    first = zckpt("auto-resume", url, "--dp", 3, "--scratch", scratch)
    assert f"{url}/checkpoint-8 is skipped" in first.err
    assert Path(first.out.strip()).name == "checkpoint-4-dp3"
    package.reshard(TRAINER, tmp_path / "here", dp=3)
    assert files(Path(first.out.strip())) == files(tmp_path / "here")
    again = zckpt("auto-resume", url, "--dp", 3, "--scratch", scratch, "--json").document
    assert (again["path"], again["written"]) == (first.out.strip(), False)
    same = zckpt("auto-resume", url, "--scratch", scratch, "--json").document
    assert (same["sizes"], same["written"]) == ({"dp": 2}, True), "an engine loads no URL"


def test_a_run_that_is_complete_is_found_again(
    bucket: Bucket, tmp_path: Path, zckpt: Callable[..., Result]
) -> None:
    source, target = bucket.upload(EXAMPLE, "runs/run"), bucket.url("to/run")
    for said in ("checksums ok", "is complete already"):
        ended = zckpt("convert", source, target, "--resume")
        assert (ended.code, said in ended.out) == (0, True), ended.err
    other = zckpt("convert", source, target, "--resume", "--dtype", "bf16")
    assert (other.code, f"{target} exists" in other.err) == (1, True)


def test_files_of_options_may_be_urls(
    bucket: Bucket, tmp_path: Path, zckpt: Callable[..., Result]
) -> None:
    bucket.put("ds.json", b'{"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}}')
    words = ("--dp", 2, "--ds-config", bucket.url("ds.json"))
    assert zckpt("reshard", EXAMPLE, tmp_path / "run", *words).code == 0
    assert package.read(tmp_path / "run").source["zero_stage"] == 3
    missing = zckpt("reshard", EXAMPLE, tmp_path / "x", "--ds-config", bucket.url("no.json"))
    assert (missing.code, bucket.url("no.json") in missing.err) == (2, True), missing.err


@pytest.mark.parametrize(
    "load",
    [
        pytest.param({"without_copy": True}, id="called"),
        pytest.param({"by_itself": {"copy": False}}, id="resumed"),
    ],
)
def test_an_engine_of_another_size_loads_a_url(
    load: dict[str, Any], bucket: Bucket, tmp_path: Path
) -> None:
    """The directory of names that a run resumes from is in its scratch folder, without a tensor."""
    needs("deepspeed")
    case = CASES["z3_dp2_bf16"]
    run = deepspeed.train(case, tmp_path / "trained")
    url = bucket.upload(run, "runs/run")
    environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    scratch = tmp_path / "scratch"
    load = {**load, "url": url, "environment": environment}
    if "by_itself" in load:
        load["by_itself"] = {**load["by_itself"], "scratch": scratch}
    zckpt.reshard(run, tmp_path / "out", dp=3)
    copied = deepspeed.resume(case, tmp_path / "out", tmp_path / "copied", dp=3)
    loaded = deepspeed.resume(case, run, tmp_path / "loaded", dp=3, load=load)
    copied["client_state"].pop("ds_config"), loaded["client_state"].pop("ds_config")
    assert_same_state(copied, loaded, weights=True)
    assert copied["losses"] == loaded["losses"]
    written = list(scratch.rglob("*_states.pt"))
    assert bool(written) == ("by_itself" in load)
    assert not any(path.stat().st_size for path in written)
