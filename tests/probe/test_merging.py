"""Ranks of two runs are joined: rows in any order, uneven parts, batches, and what does not fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from zckpt import probe
from zckpt.probe import recording, runs

from ..conftest import Result, texts

Zckpt = Callable[..., Result]
Rows = Callable[[int, int], Any]
ROWS = 12
CONTIGUOUS: Rows = lambda rank, world: slice(rank * ROWS // world, (rank + 1) * ROWS // world)  # noqa: E731
IN_TURNS: Rows = lambda rank, world: slice(rank, None, world)  # noqa: E731


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(19, 8), nn.Embedding(5, 8)
        self.inner, self.head = nn.Linear(8, 8), nn.Linear(8, 19)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1])
        hidden = self.embedding(tokens) + self.positions(places)
        logits = self.head(torch.tanh(self.inner(hidden)).transpose(0, 1)).transpose(0, 1)
        return functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Records one step of a model, as so many ranks would without an update."""

    def record(
        name: str,
        world: int,
        rows: Rows = CONTIGUOUS,
        batches: int = 1,
        change: Callable[[nn.Module], Any] = lambda model: None,
        ranks: Sequence[int] | None = None,
        tokens: Tensor | None = None,
    ) -> Path:
        torch.manual_seed(0)
        model = Model()
        if tokens is None:
            tokens = torch.randint(19, (ROWS, 5))
        change(model)
        for rank in range(world):
            monkeypatch.setattr(recording, "_rank_and_world", lambda rank=rank: (rank, world))
            own = tokens[rows(rank, world)]
            options: Any = {"step": 3, "parameters": True, "ranks": ranks}
            with probe.record(model, tmp_path / name, **options):
                for part in own.chunk(batches):
                    (model(part) / batches).backward()
        return tmp_path / name

    return record


@pytest.mark.parametrize(("one", "other"), [(1, 2), (2, 3), (4, 3), (6, 1)])
@pytest.mark.parametrize("rows", [CONTIGUOUS, IN_TURNS])
def test_runs_of_the_same_rows_agree(
    one: int, other: int, rows: Rows, recorded: Callable[..., Path]
) -> None:
    report = probe.compare(recorded("a", one, rows), recorded("b", other, rows))
    assert report["big"] is None
    assert (report["only_a"], report["only_b"], report["unmerged"]) == ([], [], [])
    kinds = {record.kind for record in runs.read(report["a"]).ranks[0]}
    assert kinds == {"input", "forward", "backward", "parameter", "gradient", "metric"}
    assert report["records"] == len(runs.read(report["a"]).ranks[0])


def test_rows_in_another_order(recorded: Callable[..., Path]) -> None:
    """One run takes them in turns, the other does not: what has no order agrees."""
    report = probe.compare(recorded("a", 2, IN_TURNS), recorded("b", 3, CONTIGUOUS))
    assert report["big"] is None
    assert any("order of rows is not compared" in note for note in texts(report["notes"]))


def test_equal_rows_are_equal_bit_for_bit(recorded: Callable[..., Path]) -> None:
    """The CRC-32s of rows join: nothing but sums has another order."""
    report = probe.compare(recorded("a", 2), recorded("b", 4))
    first = report["first"]
    assert first is None or first["kind"] != "input"
    inputs = [line for line in texts(report["notes"]) if "rank 0 first" in line]
    assert inputs


@pytest.mark.parametrize("batches", [2, 3])
def test_gradient_accumulation(batches: int, recorded: Callable[..., Path]) -> None:
    """Two ranks with one batch, one rank with several: all batches of the step are joined."""
    report = probe.compare(recorded("a", 2), recorded("b", 1, batches=batches))
    assert report["big"] is None
    assert report["unmerged"] == []


@pytest.mark.parametrize(
    ("parameter", "key"),
    [("inner.weight", "inner.weight"), ("positions.weight", "positions.weight")],
)
def test_a_changed_weight_is_found(parameter: str, key: str, recorded: Callable[..., Path]) -> None:
    def change(model: nn.Module) -> None:
        with torch.no_grad():
            model.get_parameter(parameter)[2, 3] += 0.5

    big = probe.compare(recorded("a", 2), recorded("b", 3, change=change))["big"]
    assert (big["kind"], big["key"]) == ("parameter", key)
    assert big["meaning"].startswith("this weight differs before the first update")


def test_other_data_are_found(recorded: Callable[..., Path]) -> None:
    torch.manual_seed(5)
    tokens = torch.randint(19, (ROWS, 5))
    big = probe.compare(recorded("a", 2), recorded("b", 3, tokens=tokens))["big"]
    assert (big["kind"], big["meaning"]) == (
        "input",
        "the inputs of the model differ: the runs got different data",
    )


def test_a_sum_in_place_of_a_mean(recorded: Callable[..., Path], tmp_path: Path) -> None:
    """The loss of one run is twice that of the other, in the backward alone."""

    def double(model: nn.Module) -> None:
        model.register_full_backward_pre_hook(lambda module, gradients: (gradients[0] * 2,))

    big = probe.compare(recorded("a", 2), recorded("b", 4, change=double))["big"]
    assert big["kind"] in ("backward", "gradient")
    assert "2 times those of the other" in big["meaning"]


def test_ranks_with_the_same_rows(recorded: Callable[..., Path]) -> None:
    """What is the same on all ranks is compared once."""
    every: Rows = lambda rank, world: slice(None)  # noqa: E731
    report = probe.compare(recorded("a", 2, every), recorded("b", 3, every))
    assert (report["big"], report["unmerged"]) == (None, [])


def test_a_larger_global_batch_is_listed(recorded: Callable[..., Path], zckpt: Zckpt) -> None:
    torch.manual_seed(1)
    more = torch.randint(19, (2 * ROWS, 5))
    double: Rows = lambda rank, world: slice(rank * ROWS, (rank + 1) * ROWS)  # noqa: E731
    a, b = recorded("a", 1), recorded("b", 2, double, tokens=more)
    report = probe.compare(a, b)
    of_input = report["unmerged"][0]
    assert of_input["subject"] == "input (model)#0/in[0]"
    assert "12 rows of all ranks against 24" in of_input["message"]
    assert all("global batches differ" in why for why in texts(report["unmerged"]))
    assert report["big"] is None or report["big"]["kind"] in ("gradient", "metric")
    printed = zckpt("probe-diff", a, b).out
    assert "that cannot be joined, such as input (model)#0/in[0]" in printed
    assert all(f"note: {text}" in printed for text in texts(report["notes"]))


def test_a_rank_that_did_not_record(recorded: Callable[..., Path]) -> None:
    report = probe.compare(recorded("a", 2), recorded("b", 4, ranks=[0, 1, 3]))
    assert any("has no record of rank 2" in why for why in texts(report["unmerged"]))
    assert report["big"] is None  # the weights are compared


def test_the_report_for_a_person(recorded: Callable[..., Path], zckpt: Zckpt) -> None:
    ended = zckpt("probe-diff", recorded("a", 2), recorded("b", 3))
    assert ended.code == 0
    assert "joined from 2 and 3 ranks" in ended.out
    assert "2 processes against 3" in ended.out


def test_noise_of_the_first_run(recorded: Callable[..., Path], zckpt: Zckpt) -> None:
    a, again, b = recorded("a", 2), recorded("again", 2), recorded("b", 3)
    report = probe.compare(a, b, again)
    assert (report["big"], report["noise_floor"]) == (None, 0.0)
    ended = zckpt("probe-diff", a, b, "--noise", b)
    assert ended.code == 2
    assert "is a run of 3 ranks" in ended.err
