"""Is each fault of a store that is read retried or refused, and no wrong byte taken?"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import zckpt
from zckpt.errors import CorruptCheckpoint, SourceChanged, StoreError, ZckptError

from ..conftest import EXAMPLE, Result
from ..test_resume import files
from . import proxy as faults
from .conftest import Bucket
from .proxy import Fault, Play, Proxy

pytestmark = pytest.mark.usefixtures("impatient")
AddFault = Callable[..., Fault]
RANK = "rank_1_mp_rank_00_optim_states"
PASSING: dict[str, Play] = {
    "500": faults.refusal(500, "InternalError"),
    "503": faults.refusal(503, "SlowDown", {"Retry-After": "1"}),
    "429": faults.refusal(429, "TooManyRequests"),
    "reset": faults.reset,
    "answer lost": faults.unanswered,
    "cut": faults.cut,
    "short": faults.short,
    "slow": faults.slow,
}
LASTING = ("500", "503", "reset", "cut", "short")


@pytest.fixture
def source(bucket: Bucket) -> str:
    return bucket.upload(EXAMPLE, "runs/run")


@pytest.fixture
def expected(tmp_path: Path) -> dict[str, bytes]:
    zckpt.convert(EXAMPLE, tmp_path / "expected")
    return files(tmp_path / "expected")


@pytest.mark.parametrize(
    ("name", "path"),
    [(name, RANK) for name in PASSING]
    # half of a list's XML is no list
    + [(name, "list-type=2") for name in PASSING if name != "short"],
)
def test_a_fault_that_passes_is_retried(
    name: str, path: str, source: str, expected: dict[str, bytes], fault: AddFault, tmp_path: Path
) -> None:
    played = fault("GET", path, PASSING[name])
    zckpt.convert(source, tmp_path / "target")
    assert files(tmp_path / "target") == expected
    assert played.played == 1


@pytest.mark.parametrize("name", LASTING)
@pytest.mark.parametrize("after", [0, 1])
def test_a_fault_that_lasts_is_one_sentence(
    name: str,
    after: int,
    source: str,
    expected: dict[str, bytes],
    proxy: Proxy,
    fault: AddFault,
    tmp_path: Path,
) -> None:
    lasting = fault("GET", RANK, PASSING[name], times=1000, after=after)
    with pytest.raises(ZckptError) as raised:
        zckpt.convert(source, tmp_path / "target")
    assert lasting.played
    assert isinstance(raised.value, StoreError | CorruptCheckpoint)
    assert source in raised.value.message
    assert raised.value.hint
    assert "\n" not in raised.value.message
    assert not (tmp_path / "target").exists()
    proxy.faults.clear()
    zckpt.convert(source, tmp_path / "target", resume=True)
    assert files(tmp_path / "target") == expected


def test_a_server_that_is_away_is_named(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch, zckpt: Callable[..., Result]
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    result = zckpt("inspect", bucket.url("runs/run"))
    assert result.code == 1
    assert "does not answer" in result.err
    assert "AWS_ENDPOINT_URL" in result.err


@pytest.mark.parametrize("made", ["run", "universal", "dcp"])
def test_a_flipped_bit_in_any_answer_is_noticed(
    made: str, bucket: Bucket, proxy: Proxy, fault: AddFault, tmp_path: Path
) -> None:
    """Or it is where nothing of the target comes from."""
    path = EXAMPLE
    if made != "run":
        path = tmp_path / "source"
        zckpt.convert(EXAMPLE, path, to=made)
    url = bucket.upload(path, "source")
    zckpt.convert(path, tmp_path / "expected")
    expected = files(tmp_path / "expected")
    zckpt.convert(url, tmp_path / "whole")
    reads = proxy.seen.of("GET", "/source/")
    refused = flips = 0
    assert len(reads) >= len(files(path))
    for number in range(len(reads)):
        played = fault("GET", "/source/", faults.flipped, after=number)
        target = tmp_path / f"flipped{number}"
        try:
            zckpt.convert(url, target)
        except ZckptError:
            refused += 1
            assert not target.exists()
        else:
            assert files(target) == expected, number
        proxy.faults.clear()
        flips += played.played  # requests that meet may become one, so there may be fewer
    assert flips > len(reads) / 2
    assert refused, "no flip was in bytes that are needed"


@pytest.mark.parametrize("after", [0, 1])
def test_an_object_that_changes_while_it_is_read_ends_the_run(
    after: int, source: str, bucket: Bucket, fault: AddFault, tmp_path: Path
) -> None:
    key = f"runs/run/global_step7/bf16_zero_pp_{RANK}.pt"
    data = bytearray(bucket.get(key))
    data[len(data) // 2] ^= 1

    def change() -> None:
        bucket.put(key, bytes(data))

    played = fault("GET", RANK, faults.first(change), after=after)
    with pytest.raises(SourceChanged, match="changed while it was read"):
        zckpt.convert(source, tmp_path / "target")
    assert played.played == 1
    assert not (tmp_path / "target").exists()


def test_an_object_that_is_removed_while_it_is_read_ends_the_run(
    source: str, bucket: Bucket, fault: AddFault, tmp_path: Path
) -> None:
    key = f"runs/run/global_step7/bf16_zero_pp_{RANK}.pt"
    fault("GET", RANK, faults.first(lambda: bucket.delete(key)))
    with pytest.raises(SourceChanged, match="was removed while it was read"):
        zckpt.convert(source, tmp_path / "target")
    assert not (tmp_path / "target").exists()


@pytest.mark.parametrize("name", ["500", "reset", "cut"])
def test_an_hdf5_file_is_not_called_damaged_when_the_network_is(
    name: str, bucket: Bucket, fault: AddFault, tmp_path: Path
) -> None:
    from .sources import SOURCES

    path = SOURCES["hdf5"].path
    assert path is not None
    url = bucket.upload(path, "ort")
    played = fault("GET", "checkpoint.rank", PASSING[name], times=1000, after=2)
    with pytest.raises(StoreError, match="the store"):
        zckpt.convert(url, tmp_path / "target")
    assert played.played
