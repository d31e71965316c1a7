"""Is a target in a store there whole or not at all, whatever happens on the way?"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import zckpt
from zckpt.errors import CorruptCheckpoint, StoreError, TargetExists, ZckptError
from zckpt.remote import stores
from zckpt.remote.mirror import UNFINISHED

from ..conftest import EXAMPLE, ROOT
from ..test_resume import files
from . import proxy as faults
from .conftest import Bucket
from .proxy import Fault, Play, Proxy

AddFault = Callable[..., Fault]
TARGETS: dict[str, Mapping[str, Any]] = {
    "universal": {},
    "universal in parts": {"max_file_size": 8000},
    "dcp": {"to": "dcp", "dp": 3},
    "gathered": {"to": "gathered"},
    "zero-1": {"to": "deepspeed", "dp": 2, "stage": 1},
    "zero-3": {"to": "deepspeed", "dp": 3, "stage": 3},
    "deepspeed-universal": {"to": "deepspeed-universal"},
    "onnxruntime": {"to": "onnxruntime", "dp": 2, "dialect": "l2"},
}
PUT_KEY = r"/to/run/(?!zckpt-unfinished)"
PASSING: dict[str, Play] = {
    "500": faults.refusal(500, "InternalError"),
    "503": faults.refusal(503, "SlowDown", {"Retry-After": "1"}),
    "reset": faults.reset,
    "answer lost": faults.unanswered,
    "slow": faults.slow,
}
NOT_PUT_TWICE = [
    (UNFINISHED, "reset"),
    (UNFINISHED, "answer lost"),
    ("manifest.json", "reset"),
]
PART = 5 << 20  # bytes: S3 takes no smaller part


@pytest.fixture
def target(bucket: Bucket) -> str:
    return bucket.url("to/run")


@pytest.fixture
def expected(tmp_path: Path) -> dict[str, bytes]:
    zckpt.convert(EXAMPLE, tmp_path / "expected")
    return files(tmp_path / "expected")


def refuse_to_read(url: str) -> None:
    """No reader takes the URL for a checkpoint."""
    with pytest.raises(ZckptError):
        zckpt.read(url)
    with pytest.raises(ZckptError):
        zckpt.verify(url)


@pytest.mark.parametrize("name", TARGETS)
def test_a_run_that_fails_at_any_file_leaves_no_checkpoint_and_goes_on(
    name: str,
    target: str,
    bucket: Bucket,
    proxy: Proxy,
    fault: AddFault,
    tmp_path: Path,
    impatient: None,
) -> None:
    words = TARGETS[name]
    zckpt.convert(EXAMPLE, tmp_path / "expected", **words)
    expected = files(tmp_path / "expected")
    count = len(expected)
    for number in sorted({0, count // 2, count - 1}):
        key = f"{number}/run"
        url, path = bucket.url(key), f"/{key}/(?!zckpt-unfinished)"
        fault("PUT", path, faults.refusal(403, "AccessDenied"), times=1000, after=number)
        with pytest.raises(StoreError, match="no permission to write"):
            zckpt.convert(EXAMPLE, url, **words)
        assert len(bucket.files(key)) == number + 1
        refuse_to_read(url)
        proxy.faults.clear()
        proxy.seen.requests.clear()
        zckpt.convert(EXAMPLE, url, **words, resume=True)
        assert bucket.files(key) == expected, number
        assert len(proxy.seen.of("PUT", path)) == len(expected) - number, "sent again"


@pytest.mark.parametrize("name", PASSING)
@pytest.mark.parametrize("which", ["exp_avg.safetensors", "manifest.json", UNFINISHED])
def test_a_fault_that_passes_is_retried(
    name: str,
    which: str,
    target: str,
    bucket: Bucket,
    expected: dict[str, bytes],
    fault: AddFault,
    impatient: None,
) -> None:
    played = fault("PUT", f"/to/run/{which}", PASSING[name])
    try:
        zckpt.convert(EXAMPLE, target)
    except StoreError:  # what is put on condition is not put twice
        assert (which, name) in NOT_PUT_TWICE
        zckpt.convert(EXAMPLE, target, resume=True)
    assert played.played == 1
    assert bucket.files("to/run") == expected


@pytest.mark.parametrize(("method", "path"), [("HEAD", "to/run"), ("POST", "delete")])
def test_other_requests_that_fail_once_are_retried(
    method: str,
    path: str,
    target: str,
    bucket: Bucket,
    expected: dict[str, bytes],
    fault: AddFault,
    impatient: None,
) -> None:
    played = fault(method, path, faults.refusal(503, "SlowDown"))
    zckpt.convert(EXAMPLE, target)
    assert bucket.files("to/run") == expected
    assert played.played == 1


@pytest.mark.parametrize("which", ["exp_avg.safetensors", "manifest.json"])
def test_what_the_store_has_lost_is_noticed(
    which: str,
    target: str,
    bucket: Bucket,
    expected: dict[str, bytes],
    fault: AddFault,
    impatient: None,
) -> None:
    fault("PUT", f"/to/run/{which}", faults.then(lambda: bucket.delete(f"to/run/{which}")))
    with pytest.raises(
        CorruptCheckpoint, match=f"{which} did not arrive intact: the store has nothing"
    ):
        zckpt.convert(EXAMPLE, target)
    refuse_to_read(target)
    zckpt.convert(EXAMPLE, target, resume=True)
    assert bucket.files("to/run") == expected


def changed(data: bytes) -> bytes:
    return data[:20] + bytes([data[20] ^ 1]) + data[21:]


@pytest.mark.parametrize("which", ["exp_avg.safetensors", "manifest.json"])
def test_what_the_store_has_as_other_bytes_is_noticed(
    which: str,
    target: str,
    bucket: Bucket,
    expected: dict[str, bytes],
    fault: AddFault,
    impatient: None,
) -> None:
    key = f"to/run/{which}"
    fault("PUT", key, faults.then(lambda: bucket.put(key, changed(expected[which]))))
    with pytest.raises(
        CorruptCheckpoint, match=f"{which} did not arrive intact: the store has other"
    ):
        zckpt.convert(EXAMPLE, target)
    if which != "manifest.json":  # it is as if another program had written it
        refuse_to_read(target)
        zckpt.convert(EXAMPLE, target, resume=True)
        assert bucket.files("to/run") == expected


@pytest.mark.parametrize("which", ["exp_avg.safetensors", "manifest.json"])
def test_a_bit_that_flips_on_the_way_up_is_noticed(
    which: str,
    target: str,
    bucket: Bucket,
    expected: dict[str, bytes],
    fault: AddFault,
    impatient: None,
) -> None:
    fault("PUT", f"/to/run/{which}", faults.flipped_up)
    with pytest.raises(
        CorruptCheckpoint, match=f"{which} did not arrive intact: the store has other"
    ):
        zckpt.convert(EXAMPLE, target)
    refuse_to_read(target)
    zckpt.convert(EXAMPLE, target, resume=True)
    assert bucket.files("to/run") == expected


def test_a_store_whose_etag_is_no_md5_is_read_again(
    target: str, expected: dict[str, bytes], fault: AddFault, impatient: None
) -> None:
    fault("PUT", PUT_KEY, faults.other_etag, times=1000)
    fault("HEAD", PUT_KEY, faults.other_etag, times=1000)
    fault("GET", PUT_KEY, faults.other_etag, times=1000)
    report = zckpt.convert(EXAMPLE, target)
    assert report["read_back"] == len(expected)


def test_another_program_that_commits_first_is_not_overwritten(
    target: str, bucket: Bucket, fault: AddFault, impatient: None
) -> None:
    key = "to/run/manifest.json"
    fault("PUT", key, faults.first(lambda: bucket.put(key, b"of another program")))
    with pytest.raises(TargetExists, match="was written by another program meanwhile"):
        zckpt.convert(EXAMPLE, target)
    assert bucket.get(key) == b"of another program"


@pytest.mark.parametrize("name", ["universal", "zero-1"])
def test_a_run_that_could_not_remove_its_note_is_complete(
    name: str, target: str, bucket: Bucket, proxy: Proxy, fault: AddFault, impatient: None
) -> None:
    fault("POST", "delete", faults.refusal(403, "AccessDenied"), times=1000)
    with pytest.raises(StoreError, match="no permission to write"):
        zckpt.convert(EXAMPLE, target, **TARGETS[name])
    assert zckpt.read(target).entries, "its last file is there"
    proxy.faults.clear()
    proxy.seen.requests.clear()
    zckpt.convert(EXAMPLE, target, **TARGETS[name], resume=True)
    assert not proxy.seen.of("PUT", "/to/run/")
    assert UNFINISHED not in bucket.files("to/run")


def test_what_is_there_is_not_overwritten(target: str, bucket: Bucket) -> None:
    bucket.put("to/run/notes.txt", b"mine")
    with pytest.raises(TargetExists, match="exists"):
        zckpt.convert(EXAMPLE, target)
    with pytest.raises(TargetExists, match="exists"):
        zckpt.convert(EXAMPLE, target, resume=True)
    assert bucket.files("to/run") == {"notes.txt": b"mine"}


def test_a_target_that_is_complete_is_not_written_again(target: str, bucket: Bucket) -> None:
    zckpt.convert(EXAMPLE, target)
    before = bucket.files("to/run")
    with pytest.raises(TargetExists):
        zckpt.convert(EXAMPLE, target)
    with pytest.raises(TargetExists):
        zckpt.convert(EXAMPLE, target, dtype="bf16", resume=True)
    assert bucket.files("to/run") == before


def test_a_dry_run_sends_nothing(target: str, proxy: Proxy) -> None:
    zckpt.convert(EXAMPLE, target, dry_run=True)
    assert not proxy.seen.of("PUT")
    assert not proxy.seen.of("POST")


# -- large files


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of one tensor of 12 MiB."""
    import torch

    path = tmp_path_factory.mktemp("large") / "run" / "ckpt.pt"
    path.parent.mkdir()
    generator = torch.Generator().manual_seed(0)
    torch.save({"w": torch.randn((3 << 20,), generator=generator)}, path)
    return path.parent


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores, "PART", PART)


@pytest.mark.parametrize("name", PASSING)
@pytest.mark.parametrize("method", ["PUT", "POST"])
def test_a_fault_of_an_upload_in_parts_is_retried(
    name: str,
    method: str,
    large: Path,
    target: str,
    bucket: Bucket,
    proxy: Proxy,
    fault: AddFault,
    tmp_path: Path,
    impatient: None,
    small_parts: None,
) -> None:
    zckpt.convert(large, tmp_path / "expected", weights_only=True)
    played = fault(method, "uploadId=", PASSING[name])
    report = zckpt.convert(large, target, weights_only=True)
    assert bucket.files("to/run") == files(tmp_path / "expected")
    assert len(proxy.seen.of("PUT", "partNumber=")) >= 3
    assert played.played == 1
    assert report["read_back"] == 0, "the ETag of parts is known"
    assert not bucket.uploads()


@pytest.mark.parametrize("after", [0, 1, 2])
def test_an_upload_in_parts_that_fails_leaves_no_parts(
    after: int,
    large: Path,
    target: str,
    bucket: Bucket,
    proxy: Proxy,
    fault: AddFault,
    tmp_path: Path,
    impatient: None,
    small_parts: None,
) -> None:
    zckpt.convert(large, tmp_path / "expected", weights_only=True)
    fault("PUT", "partNumber=", faults.refusal(403, "AccessDenied"), times=1000, after=after)
    with pytest.raises(StoreError, match="no permission to write"):
        zckpt.convert(large, target, weights_only=True)
    refuse_to_read(target)
    assert not bucket.uploads()
    proxy.faults.clear()
    zckpt.convert(large, target, weights_only=True, resume=True)
    assert bucket.files("to/run") == files(tmp_path / "expected")


def test_a_flipped_part_is_noticed(
    large: Path,
    target: str,
    fault: AddFault,
    impatient: None,
    small_parts: None,
) -> None:
    fault("PUT", "partNumber=2", faults.flipped_up)
    with pytest.raises(CorruptCheckpoint, match="did not arrive intact: the store has other bytes"):
        zckpt.convert(large, target, weights_only=True)
    refuse_to_read(target)


# -- killed

KILLED = """
import sys, zckpt
from zckpt.remote import stores
stores.PART = 5 << 20
zckpt.convert(sys.argv[1], sys.argv[2], weights_only=True)
"""


def test_a_killed_run_leaves_no_checkpoint_and_goes_on(
    large: Path,
    target: str,
    bucket: Bucket,
    proxy: Proxy,
    fault: AddFault,
    tmp_path: Path,
    small_parts: None,
) -> None:
    zckpt.convert(large, tmp_path / "expected", weights_only=True)
    fault("PUT", "partNumber=3", faults.hang)
    with subprocess.Popen([sys.executable, "-c", KILLED, large, target], cwd=ROOT) as process:
        limit = time.monotonic() + 60
        while (
            not proxy.seen.of("PUT", "partNumber=3")
            and process.poll() is None
            and time.monotonic() < limit
        ):
            time.sleep(0.02)
        time.sleep(0.3)
        os.kill(process.pid, signal.SIGKILL)
    assert proxy.seen.of("PUT", "partNumber=3")
    assert bucket.uploads() == ["to/run/model.safetensors"]
    refuse_to_read(target)
    with pytest.raises(TargetExists, match="a run was stopped there"):
        zckpt.convert(large, target, weights_only=True)
    zckpt.convert(large, target, weights_only=True, resume=True)
    assert bucket.files("to/run") == files(tmp_path / "expected")
