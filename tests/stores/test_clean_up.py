"""Does clean-up remove what a dead run has left, at once, and nothing else?"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import zckpt
from zckpt.errors import StoreError
from zckpt.remote.mirror import UNFINISHED

from ..conftest import EXAMPLE, ROOT, Result
from . import proxy as faults
from .conftest import Bucket
from .proxy import Fault

Run = Callable[..., Result]


@pytest.fixture
def stopped(bucket: Bucket, fault: Callable[..., Fault], impatient: None) -> str:
    """A target whose run failed at its third file, beside one that is complete."""
    zckpt.convert(EXAMPLE, bucket.url("to/run2"))
    fault("PUT", "/to/run/[^z]", faults.refusal(403, "AccessDenied"), times=1000, after=2)
    with pytest.raises(StoreError):
        zckpt.convert(EXAMPLE, bucket.url("to/run"))
    return bucket.url("to/run")


def started(bucket: Bucket, key: str) -> None:
    """An upload in parts that nobody completes."""
    client: Any = bucket.client
    upload = client.create_multipart_upload(Bucket=bucket.name, Key=key)["UploadId"]
    client.upload_part(
        Bucket=bucket.name, Key=key, UploadId=upload, PartNumber=1, Body=b"x" * (5 << 20)
    )


def test_remains_are_listed_and_removed(stopped: str, bucket: Bucket, zckpt: Run) -> None:
    there = [name for name in bucket.files("to/run") if name != UNFINISHED]
    assert len(there) == 2
    started(bucket, "to/run/master.safetensors")
    started(bucket, "to/run2/elsewhere")
    started(bucket, "to/run-3/elsewhere")
    bucket.put("to/run/of-others.txt", b"mine")
    complete = bucket.files("to/run2")
    started(bucket, "to/run/of-others.bin")
    listed = zckpt("clean-up", stopped, "--dry-run", "--json").document
    assert listed["files"] == [*there, UNFINISHED]
    assert listed["uploads"] == ["to/run/master.safetensors"]
    assert [each["key"] for each in listed["other_uploads"]] == ["to/run/of-others.bin"]
    assert {*there} < {*bucket.files("to/run")}, "a dry run removes nothing"
    assert len(bucket.uploads()) == 4
    removed = zckpt("clean-up", stopped, "--json").document
    assert {**removed, "dry_run": True} == listed
    assert bucket.keys("to/run/") == ["to/run/of-others.txt"]
    assert bucket.files("to/run2") == complete
    assert sorted(bucket.uploads()) == [
        "to/run-3/elsewhere",
        "to/run/of-others.bin",
        "to/run2/elsewhere",
    ]


def test_a_complete_target_is_never_touched(bucket: Bucket, zckpt: Run) -> None:
    target = bucket.url("to/run")
    zckpt("convert", EXAMPLE, target)
    before = bucket.files("to/run")
    result = zckpt("clean-up", target)
    assert result.code
    assert "is complete: nothing was removed" in result.err
    # its run was killed before it removed the note
    bucket.put(f"to/run/{UNFINISHED}", b'{"files": {"manifest.json": 1}, "last": "manifest.json"}')
    assert zckpt("clean-up", target, "--json").document["files"] == [UNFINISHED]
    assert bucket.files("to/run") == before


def test_where_nothing_was_begun_nothing_is_removed(bucket: Bucket, zckpt: Run) -> None:
    bucket.put("to/run/notes.txt", b"mine")
    for url in (bucket.url("to/run"), bucket.url("to/nothing"), bucket.url("to")):
        result = zckpt("clean-up", url)
        assert result.code
        assert "Hint: " in result.err
    assert bucket.keys() == ["to/run/notes.txt"]


@pytest.mark.parametrize("name", ["", "/checkpoint-6"])
def test_uploads_of_other_programs_are_listed_and_stay(
    name: str, bucket: Bucket, zckpt: Run
) -> None:
    """A trainer sends its next checkpoint; zckpt has begun nothing there."""
    bucket.put("to/run/checkpoint-5/model.pt", b"complete")
    started(bucket, "to/run/checkpoint-6/model.pt")
    for words in (["--dry-run"], []):
        result = zckpt("clean-up", bucket.url(f"to/run{name}"), *words)
        assert "to/run/checkpoint-6/model.pt (of another program; to end it: " in result.out
        assert result.out.splitlines()[-1].startswith("nothing was removed: zckpt has begun noth")
        assert result.code == 0
        assert f"aws s3api abort-multipart-upload --bucket {bucket.name} --key " in result.out
    assert bucket.uploads() == ["to/run/checkpoint-6/model.pt"]
    assert bucket.keys() == ["to/run/checkpoint-5/model.pt"]


@pytest.mark.parametrize("note", [b"{", b'{"zckpt": "99.0.0", "files": {"a": 1}, "last": "a"}'])
def test_with_a_note_that_cannot_be_read_nothing_is_removed(
    note: bytes, stopped: str, bucket: Bucket, zckpt: Run
) -> None:
    started(bucket, "to/run/master.safetensors")
    bucket.put(f"to/run/{UNFINISHED}", note)
    before = bucket.files("to/run")
    result = zckpt("clean-up", stopped)
    assert result.code == 1
    assert "this zckpt cannot parse " in result.err
    assert ": nothing was changed" in result.err
    assert (bucket.files("to/run"), len(bucket.uploads())) == (before, 1)


def test_a_run_may_begin_where_remains_were(stopped: str, bucket: Bucket, zckpt: Run) -> None:
    again = zckpt("convert", EXAMPLE, stopped)
    assert again.code
    assert f"zckpt clean-up {stopped}" in again.err
    assert zckpt("clean-up", stopped).code == 0
    assert not bucket.keys("to/run/")


KILLED = """
import sys, zckpt
from zckpt.remote import stores
stores.PART = 5 << 20
zckpt.convert(sys.argv[1], sys.argv[2], weights_only=True)
"""


def test_remains_of_a_killed_run_are_removed_at_once(
    bucket: Bucket, proxy: Any, fault: Callable[..., Fault], tmp_path: Path, zckpt: Run
) -> None:
    import torch

    torch.save({"w": torch.arange(3 << 20, dtype=torch.float32)}, tmp_path / "ckpt.pt")
    fault("PUT", "partNumber=3", faults.hang)
    command = [sys.executable, "-c", KILLED, tmp_path / "ckpt.pt", bucket.url("to/run")]
    with subprocess.Popen(command, cwd=ROOT) as process:
        while not proxy.seen.of("PUT", "partNumber=3") and process.poll() is None:
            time.sleep(0.02)
        time.sleep(0.3)
        process.kill()
    assert bucket.uploads() == ["to/run/model.safetensors"]
    assert zckpt("clean-up", bucket.url("to/run")).code == 0
    assert not bucket.uploads()
    assert not bucket.keys()
