"""How a made-up model is cut over the tensor ranks of a target."""

from __future__ import annotations

from typing import Any

import pytest

from zckpt.core.facts import FlatBufferEngine
from zckpt.core.manifest import Manifest, Parameter
from zckpt.core.merge import merge
from zckpt.errors import MissingData, UnsupportedCheckpoint, WrongOption
from zckpt.formats.deepspeed.model_ranks.target_slices import rows_of, sized, slices_of
from zckpt.formats.options import options_of

SHAPES = {"embed": (8, 3), "fused": (6, 4), "down": (4, 6), "norm": (4,)}
RULES = {"embed": "vocab:5", "fused": "0:4,2", "down": "1", "norm": "replicated"}


def model(config: dict[str, Any] | None = None, **rules: str) -> Manifest:
    texts = {**RULES, **rules}
    args = {"tensor_model_parallel_size": 1, "padded_vocab_size": 8, "lr": 0.1}
    return Manifest(
        root="run",
        format="deepspeed",
        source={"tp": 1, "pp": 1, "dp": 2},
        entries={},
        parameters={name: Parameter(shape, group=0, step=3) for name, shape in SHAPES.items()},
        groups=({"lr": 0.1},),
        engine=FlatBufferEngine("deepspeed", "0.19.8", None, "BF16", False, None, config or {}),
        state={
            "module": [*SHAPES],
            "client_state": {"args": args},
            "tensor_parallel": {
                "rules": texts,
                "vocabulary": {"embed": {"rows": 8, "used": 5}},
            },
        },
    )


def test_slices_are_the_whole_again() -> None:
    source = model()
    table, ranks, doubts = slices_of(source, 2)
    shapes = [{name: own.shape for name, own in rank.parameters.items()} for rank in ranks]
    assert shapes == [{"embed": (4, 3), "fused": (3, 4), "down": (4, 3), "norm": (4,)}] * 2
    assert doubts == []
    assert merge(ranks, table).parameters == source.parameters


def test_one_rank_needs_no_rule() -> None:
    table, (rank,), _ = slices_of(model(fused="view"), 1)
    assert (rank.parameters, table.cuts) == (model().parameters, {})


def test_what_cannot_be_cut_evenly() -> None:
    with pytest.raises(UnsupportedCheckpoint, match=r"fused \[6, 4\] \(0:4,2\), down \[4, 6\]"):
        slices_of(model(), 4)


def test_names_without_a_rule() -> None:
    source = model()
    source.state["tensor_parallel"]["rules"].pop("down")
    with pytest.raises(MissingData, match="nothing says how"):
        slices_of(source, 2)


def test_what_a_rank_states() -> None:
    rank = sized(model({"tensor_parallel": {"autotp_size": 1, "other": 2}}), 2)
    assert rank.source == {"dp": 2}
    args = {"tensor_model_parallel_size": 2, "padded_vocab_size": 8, "lr": 0.1}
    assert rank.state == {"module": [*SHAPES], "client_state": {"args": args}}
    assert rank.engine.config == {"tensor_parallel": {"autotp_size": 2, "other": 2}}  # type: ignore[union-attr]


@pytest.mark.parametrize(("tp", "rows"), [(1, 8), (2, 8), (3, 6), (4, 8)])
def test_rows_of_a_vocabulary(tp: int, rows: int) -> None:
    """More rows than the ranks need stay, if the ranks can share them."""
    assert rows_of(model(), tp, options_of({})) == {"embed": rows}


def test_rows_that_the_user_gives() -> None:
    assert rows_of(model(), 2, options_of({"vocab_size": 9})) == {"embed": 10}
    with pytest.raises(WrongOption, match="is less than the 5 rows"):
        rows_of(model(), 2, options_of({"vocab_size": 4}))
    assert rows_of(model({"tensor_parallel": {}}), 3, options_of({})) == {}  # AutoTP pads nothing
