"""Batch sizes and random states of a target for another number of ranks, which states neither."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import zckpt as package
from zckpt.judging.loads import batch_changes
from zckpt.training import batches

from ..conftest import EXAMPLE, ROOT, Result

TRAINER = ROOT / "examples" / "trainer" / "checkpoint-4"  # of 2 ranks, with a global batch of 8
TRAIN_MICRO = "train_micro_batch_size_per_gpu"
SET = "set the product of per_device_train_batch_size and gradient_accumulation_steps to {} to keep"
STATES = {"rng_state_0.pth", "rng_state_1.pth"}


def changes(report: dict[str, Any]) -> list[str]:
    return [line["message"] for line in report["warnings"] if line["code"] == batches.CHANGES]


@pytest.mark.parametrize(
    ("ranks", "said"),
    [(None, []), (2, []), (4, [SET.format(2)]), (3, ["cannot be divided among 3"])],
)
def test_from_deepspeed_to_fsdp(
    ranks: int | None, said: list[str], tmp_path: Path, zckpt: Callable[..., Result]
) -> None:
    """As DeepSpeed's targets: their advice, and no random state of another number of ranks."""
    sizes = () if ranks is None else ("--dp", ranks)
    words = ("--to", "dcp", "--dialect", "accelerate", *sizes, "--json")
    report = zckpt("convert", TRAINER, tmp_path / "target", *words).document
    messages = changes(report)
    assert len(messages) == len(said)
    assert all(part in message for part, message in zip(said, messages, strict=True))
    arrived = {path.name for path in (tmp_path / "target").iterdir()}
    assert arrived & STATES == (STATES if ranks in (None, 2) else set())
    omitted = [line["code"] for line in report["left_out"] if "rng_state" in line["message"]]
    assert omitted == ["rank-state-omitted"] * (2 - len(arrived & STATES))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"dp": 4}, []),
        ({"dp": 3}, [f"set {TRAIN_MICRO}=8 to keep a global batch of 24"]),
        (
            {"dp": 8, "config": {"gradient_accumulation_steps": 2}},
            [
                f"set the product of {TRAIN_MICRO} and gradient_accumulation_steps to 3 to keep a "
                "global batch of 24"
            ],
        ),
        (
            {"dp": 2, "config": {"gradient_accumulation_steps": 5, TRAIN_MICRO: 6}},
            [f"set {TRAIN_MICRO}=6 and gradient_accumulation_steps=2 to keep a global batch of 24"],
        ),
        (
            {"dp": 5},
            [
                "a global batch of 24 cannot be divided among 5 ranks: choose another with "
                f"{TRAIN_MICRO} and gradient_accumulation_steps"
            ],
        ),
    ],
)
def test_the_next_run_of_deepspeed(words: dict[str, Any], said: list[str]) -> None:
    """The example states 6 samples for each of 4 ranks, and no global batch."""
    assert [line.message for line in batch_changes(package.read(EXAMPLE), words, ())] == said
    assert batch_changes(package.read(EXAMPLE), words, [{"code": "batch-size-changes"}]) == []


@pytest.mark.engines
@pytest.mark.first
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize(
    "sizes", [(24, None, None), (24, 6, None), (24, None, 2), (24, 6, 1), (None, 6, None)]
)
def test_deepspeed_computes_the_rest(
    sizes: tuple[int | None, ...],
    ranks: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is said if the engine keeps the batch itself, else what makes it do so."""
    from deepspeed.runtime import config as engine

    monkeypatch.setattr(engine.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(engine.dist, "get_world_size", lambda: ranks)

    def samples(config: dict[str, Any]) -> int:
        loaded = engine.DeepSpeedConfig(config)
        return ranks * loaded.train_micro_batch_size_per_gpu * loaded.gradient_accumulation_steps

    config = {name: size for name, size in zip(batches.SETTINGS, sizes, strict=True) if size}
    report = package.reshard(EXAMPLE, tmp_path / "target", dp=ranks, config=config, dry_run=True)
    told = changes(report)
    resumed = batch_changes(package.read(EXAMPLE), {"dp": ranks, "config": config}, ())
    assert [line.message for line in resumed] == told
    try:
        is_kept = samples(config) == 24
    except AssertionError:  # its sizes contradict each other
        is_kept = False
    assert (told == []) == is_kept
    advice = dict(re.findall(r"(\w+)=(\d+)", told[0])) if told else {}
    assert samples(config | {name: int(size) for name, size in advice.items()}) == 24


@pytest.mark.parametrize(("ranks", "times"), [(4, None), (8, "1/2 of"), (2, "2 times")])
def test_a_global_batch_that_is_unknown(ranks: int, times: str | None) -> None:
    unknown = batches.Batch(None, batches.OF_ANY)
    messages = [line.message for line in batches.changes(unknown, package.read(EXAMPLE), ranks)]
    word = "the product of the batch size of each rank and accumulated steps"
    said = f"set {word} to {times} its old value "
    assert messages == ([] if times is None else [f"{said}to keep the global batch"])


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_neither_the_batch_nor_the_ranks_are_known(ranks: int, tmp_path: Path) -> None:
    """A file of complete state dicts does not state how many ranks trained: it may be any."""
    package.convert(EXAMPLE, tmp_path / "complete.pt", to="gathered")
    assert package.read(tmp_path / "complete.pt").run.origin.dp is None
    report = package.convert(tmp_path / "complete.pt", tmp_path / "target", to="dcp", dp=ranks)
    assert changes(report) == []


@pytest.mark.parametrize(("ranks", "batch"), [(2, None), (4, 6), (8, 3)])
def test_ranks_with_fsdp_share_no_sequence(ranks: int, batch: int | None, tmp_path: Path) -> None:
    """In the source, 4 ranks had 2 sequences' batches of 12 samples."""
    source = ROOT / "tests" / "data" / "deepspeed-0.18.2-z1_dp4_sp2" / "run"
    report = package.convert(source, tmp_path / "target", to="dcp", dp=ranks)
    word = "the product of the batch size of each rank and accumulated steps"
    said = f"set {word} to {batch} to keep a global batch of 24"
    assert changes(report) == ([] if batch is None else [said])


@pytest.mark.parametrize(
    ("ranks", "micro", "accumulation", "fitting"), [(4, 2, 1, 2), (1, 4, 2, 4), (4, 4, 1, 2)]
)
def test_the_trainers_next_config(ranks: int, micro: int, accumulation: int, fitting: int) -> None:
    """Its sizes are for other ranks than the source's: the global batch stays that of the source.

    The source has 2 ranks with 4 samples each.
    """
    config = {TRAIN_MICRO: micro, "gradient_accumulation_steps": accumulation}
    lines = batch_changes(package.read(TRAINER), {"dp": ranks, "config": config}, ())
    also = batches.OF_TRAINER.also
    said = f"set per_device_train_batch_size={fitting}{also} to keep a global batch of 8"
    assert [line.message for line in lines] == ([] if fitting == micro else [said])


FACTOR = f"set the product of {TRAIN_MICRO} and gradient_accumulation_steps to {{}} its old value"
SP = ROOT / "tests" / "data" / "deepspeed-0.18.2-z1_dp4_sp2" / "run"  # 24 samples per update


def of_check(zckpt: Callable[..., Result], *words: object) -> list[str]:
    return changes(zckpt("check", *words, "--json").document)


def test_a_copy_has_the_configuration_of_other_ranks(
    tmp_path: Path, zckpt: Callable[..., Result]
) -> None:
    """It states 6 samples for each of now 2 ranks, and counts 24 for each update."""
    package.reshard(EXAMPLE, tmp_path / "two", dp=2)
    assert batches.global_batch(package.read(tmp_path / "two")) is None
    report = package.reshard(tmp_path / "two", tmp_path / "four", dp=4, dry_run=True)
    assert changes(report) == [FACTOR.format("1/2 of") + " to keep the global batch"]
    assert of_check(zckpt, tmp_path / "two", "--dp", 4) == changes(report)


def test_the_batch_is_that_of_the_source_not_of_like(
    tmp_path: Path, zckpt: Callable[..., Result]
) -> None:
    config = {TRAIN_MICRO: 2, "bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}
    run = tmp_path / "run"
    package.reshard(EXAMPLE, run, dp=4, config=config)
    for ranks, micro in ((4, 6), (8, 3)):
        report = package.reshard(EXAMPLE, tmp_path / "out", dp=ranks, like=run, dry_run=True)
        assert changes(report) == [f"set {TRAIN_MICRO}={micro} to keep a global batch of 24"]
        assert of_check(zckpt, EXAMPLE, "--dp", ranks, "--like", run) == changes(report)


def test_a_universal_checkpoint_of_deepspeed_does_not_state_sequence_ranks(
    tmp_path: Path, zckpt: Callable[..., Result]
) -> None:
    report = package.convert(SP, tmp_path / "universal", to="deepspeed-universal")
    assert changes(report) == []  # zckpt knows it of the source
    report = package.reshard(tmp_path / "universal", tmp_path / "out", dp=8, dry_run=True)
    assert changes(report) == [FACTOR.format("1/2 of") + " to keep the global batch"]
    assert of_check(zckpt, tmp_path / "universal", "--dp", 8) == changes(report)


@pytest.mark.parametrize("to", ["dcp", "deepspeed"])
def test_weights_alone_have_no_batch(to: str, tmp_path: Path) -> None:
    report = package.convert(EXAMPLE, tmp_path / "out", to=to, dp=2, weights_only=True)
    assert changes(report) == []


@pytest.mark.parametrize("micro", ["auto", 6.0, -1])
def test_deepspeed_computes_nothing_from_what_is_no_count(micro: Any, tmp_path: Path) -> None:
    config = {"train_batch_size": 24, TRAIN_MICRO: micro}
    report = package.reshard(EXAMPLE, tmp_path / "out", dp=8, config=config, dry_run=True)
    (said,) = changes(report)
    assert f"{TRAIN_MICRO} and gradient_accumulation_steps to 3" in said


def test_sizes_that_contradict_the_batch_are_of_other_ranks(
    tmp_path: Path, zckpt: Callable[..., Result]
) -> None:
    """The configuration states 24, and 6 for each of 4 ranks; the copy is for 2 ranks."""
    config = dict(zip(batches.SETTINGS, (24, 6, 1), strict=True))
    package.reshard(EXAMPLE, tmp_path / "four", dp=4, config=config)
    package.reshard(tmp_path / "four", tmp_path / "two", dp=2)
    assert of_check(zckpt, tmp_path / "two", "--dp", 2) == []
    report = package.reshard(tmp_path / "two", tmp_path / "again", dp=4, dry_run=True)
    product = f"the product of {TRAIN_MICRO} and gradient_accumulation_steps"
    assert changes(report) == [f"set {product} to 6 to keep a global batch of 24"]
    assert of_check(zckpt, tmp_path / "two", "--dp", 4) == changes(report)


def test_onnx_runtime_states_the_ranks_alone(tmp_path: Path, zckpt: Callable[..., Result]) -> None:
    source = ROOT / "tests" / "data" / "onnxruntime" / "hdf5__fp16__adam__dp3"
    report = package.reshard(source, tmp_path / "out", dp=2, dry_run=True)
    (said,) = changes(report)
    assert "accumulated steps to 3/2 of its old value" in said
    assert of_check(zckpt, source, "--dp", 2) == changes(report)
