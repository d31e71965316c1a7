"""What the first difference says: the module, its inputs and weights, and what else differs."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from zckpt import probe
from zckpt.probe import runs

from ..conftest import Result

Zckpt = Callable[..., Result]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.drop = nn.Linear(6, 16), nn.Dropout(0.5)
        self.norm, self.head = nn.BatchNorm1d(16), nn.Linear(16, 1)
        self.scale = 1.0
        self.hidden_rate = 0.0

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(self.first(x)) * self.scale
        hidden = functional.dropout(hidden, self.hidden_rate)
        return self.head(self.norm(hidden)).square().mean()


def record(
    path: Path, change: Callable[[Model], Any] = lambda model: None, seed: int = 0, data: int = 1
) -> Path:
    torch.manual_seed(0)
    model = Model()
    change(model)
    generator = torch.Generator().manual_seed(data)
    torch.manual_seed(seed)
    with probe.record(model, path, step=7, parameters=True) as recorder:
        model(torch.randn(8, 6, generator=generator)).backward()
        recorder.metric("accuracy", 0.5)
    return path


def quiet(model: Model) -> None:
    """Drops nothing, so that only another change differs."""
    model.drop.p = 0.0


def weight(model: Model) -> None:
    quiet(model)
    with torch.no_grad():
        model.head.weight += 0.5


def buffer(model: Model) -> None:
    quiet(model)
    model.norm.eps = 0.5


def between(model: Model) -> None:
    quiet(model)
    model.scale = 1.5


@pytest.mark.parametrize(
    ("change", "other", "seed", "key", "meaning"),
    [
        (None, None, 1, "drop#0/out", "drop (Dropout) drops elements: the random states of the"),
        (quiet, weight, 0, "head.weight", "this weight differs before the first update"),
        (quiet, buffer, 0, "norm#0/out", "the inputs and weights of norm (BatchNorm1d) are equal"),
        (quiet, between, 0, "norm#0/out", "the inputs of norm (BatchNorm1d) differ, and all"),
    ],
    ids=["dropout", "weight", "module", "between"],
)
def test_the_cause_at_the_first_step(
    change: Any, other: Any, seed: int, key: str, meaning: str, tmp_path: Path
) -> None:
    nothing: Callable[[Model], Any] = lambda model: None  # noqa: E731
    a = record(tmp_path / "a", change or nothing)
    b = record(tmp_path / "b", other or nothing, seed)
    big = probe.compare(a, b)["big"]
    assert big["key"] == key
    assert big["meaning"].startswith(meaning)


def test_other_data(tmp_path: Path) -> None:
    big = probe.compare(record(tmp_path / "a"), record(tmp_path / "b", data=2))["big"]
    assert (big["kind"], big["key"]) == ("input", "(model)#0/in[0]")
    assert big["meaning"] == "the inputs of the model differ: the runs got different data"


def test_what_else_differs_is_said_first(tmp_path: Path, zckpt: Zckpt) -> None:
    a = record(tmp_path / "a")
    b = record(tmp_path / "b", lambda model: setattr(model.drop, "p", 0.25), seed=5)
    path = b / "rank_00000" / "records.jsonl"
    header, *rest = path.read_text().splitlines()
    changed = json.loads(header)
    changed["versions"]["torch"], changed["device"] = "1.0", "cuda"
    changed["flags"]["deterministic_algorithms"] = True
    path.write_text("\n".join([json.dumps(changed), *rest]) + "\n")
    said = probe.compare(a, b)["circumstances"]
    assert said == [
        "seed of cpu 0 against 5",
        f"torch {torch.__version__} against 1.0",
        "flag deterministic_algorithms false against true",
        "device cpu against cuda",
        "dropout of drop: 0.5 against 0.25",
    ]
    assert zckpt("probe-diff", a, b).out.startswith("the runs differ in: seed of cpu 0 against 5; ")


def test_the_random_state_at_the_beginning(tmp_path: Path) -> None:
    """Equal seeds, but one run has drawn a number before; it matters only if something drops."""
    a = record(tmp_path / "a")
    b = record(tmp_path / "b")
    assert probe.compare(a, b)["circumstances"] == []
    torch.manual_seed(0)
    for name, draws in (("c", 0), ("d", 1)):
        torch.manual_seed(3)
        torch.randn(draws)
        with probe.record(nn.Sequential(nn.Dropout(0.5)), tmp_path / name, step=0):
            pass
    c, d = (runs.read(tmp_path / name) for name in "cd")
    from zckpt.probe.explaining import circumstances

    assert [*circumstances(c.header, d.header)] == [
        "the random state at the beginning, which 1 module with dropout, such as 0, use"
    ]


def test_recording_draws_no_random_number(tmp_path: Path) -> None:
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    with probe.record(nn.Sequential(nn.Dropout(0.5)), tmp_path / "run", step=0):
        pass
    assert torch.equal(torch.rand(3), expected)


# -- metrics


def train(path: Path, rate: float = 0.1) -> Path:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Flatten(0), nn.Linear(12, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    data = torch.randn(4, 3)
    with probe.record(model, path, step=0, optimizer=optimizer) as recorder:
        for _ in range(5):
            loss = model(data).sum().square()
            recorder.metric("loss", loss)
            loss.backward()
            recorder.metric("norm", nn.utils.clip_grad_norm_(model.parameters(), 1.0))
            optimizer.step()
            optimizer.zero_grad()
    return path


def test_metrics_are_compared_and_drawn(tmp_path: Path, zckpt: Zckpt) -> None:
    a, b = train(tmp_path / "a"), train(tmp_path / "b", 0.2)
    report = probe.compare(a, b)
    assert (report["big"]["kind"], report["big"]["key"]) == ("metric", "lr")
    assert report["big"]["meaning"].startswith("the learning rates differ")
    assert set(report["metrics"]) == {"loss", "norm", "lr"}
    assert report["metrics"]["lr"] == {"steps": [0, 1, 2, 3, 4], "a": [0.1] * 5, "b": [0.2] * 5}
    losses = report["metrics"]["loss"]
    assert losses["a"][0] == losses["b"][0]
    assert losses["a"][4] != losses["b"][4]
    ended = zckpt("probe-diff", a, b, "--svg", tmp_path / "map.svg")
    lines = [line for line in ended.out.splitlines() if "▁" in line or "█" in line]
    assert [line.split()[0] for line in lines] == ["loss", "b", "norm", "b", "lr", "b"]
    drawn = ElementTree.parse(tmp_path / "map.svg").getroot()
    assert len(drawn.findall("{http://www.w3.org/2000/svg}polyline")) == 6


def test_the_loss_that_a_model_returns_is_a_metric(tmp_path: Path) -> None:
    records = runs.read(record(tmp_path / "run")).ranks[0]
    metrics = {each.key: each.numbers["samples"][0] for each in records if each.kind == "metric"}
    (loss,) = (each for each in records if each.key == "(model)#0/out" and each.kind == "forward")
    assert metrics == {"loss": loss.numbers["samples"][0], "accuracy": 0.5}


def test_a_metric_that_is_not_finite(tmp_path: Path, zckpt: Zckpt) -> None:
    for name, value in (("a", 1.0), ("b", float("nan"))):
        model = nn.Linear(1, 1)
        with probe.record(model, tmp_path / name, step=0) as recorder:
            for _ in range(2):
                model(torch.ones(1, 1))
                recorder.metric("loss", value)
                recorder.next_step()
    ended = zckpt("probe-diff", tmp_path / "a", tmp_path / "b", "--json")
    assert json.loads(ended.out)["metrics"]["loss"]["b"] == ["nan", "nan"]
    assert "!!" in zckpt("probe-diff", tmp_path / "a", tmp_path / "b").out


def test_metrics_of_a_trainer_and_an_engine() -> None:
    """Only numbers, and none of times."""
    from zckpt.probe.metrics import logged, rates

    found: dict[str, Any] = {}
    logs = {"loss": 1.5, "grad_norm": torch.tensor(2.0), "epoch": 0.1, "train_runtime": 3.0}
    logged({**logs, "text": "a", "flag": True}, found.__setitem__)
    rates([0.1], found.__setitem__)
    rates([0.1, 0.1], found.__setitem__)
    rates(None, found.__setitem__)
    assert found == {
        "trainer.loss": 1.5,
        "trainer.grad_norm": torch.tensor(2.0),
        "lr": 0.1,
        "lr.0": 0.1,
        "lr.1": 0.1,
    }
