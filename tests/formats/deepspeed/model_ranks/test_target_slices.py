"""How a made-up model is cut over the tensor ranks of a target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from zckpt.core.checkpoint.facts import UNCUT, FlatBufferEngine, TensorParallel, Vocabulary
from zckpt.core.checkpoint.manifest import Manifest, Parameter, Run, Sibling
from zckpt.core.checkpoint.origin import Origin
from zckpt.core.checkpoint.placement import Boxes, Cut, PaddedRows, Placement, Replicated
from zckpt.core.ranks.merge import merge
from zckpt.errors import MissingData, UnsupportedCheckpoint, WrongOption
from zckpt.formats.deepspeed.model_ranks.target_slices import auto_of, rows_of, sized, slices_of
from zckpt.formats.options import options_of

SHAPES = {"embed": (8, 3), "fused": (6, 4), "down": (4, 6), "norm": (4,)}
PLACEMENTS: dict[str, Placement] = {
    "embed": PaddedRows(5),
    "fused": Cut(0, (4, 2)),
    "down": Cut(1),
    "norm": Replicated(),
}


def model(config: dict[str, Any] | None = None, **others: Placement) -> Manifest:
    args = {"tensor_model_parallel_size": 1, "padded_vocab_size": 8, "lr": 0.1}
    return Manifest(
        root="run",
        format="deepspeed",
        entries={},
        parameters={name: Parameter(shape, group=0, step=3) for name, shape in SHAPES.items()},
        groups=({"lr": 0.1},),
        state={
            "module": [*SHAPES],
            "client_state": {"args": args},
        },
        run=Run(
            origin=Origin(tp=1, pp=1, dp=2),
            engine=FlatBufferEngine("deepspeed", "0.19.8", None, "BF16", False, None, config or {}),
            tensor_parallel=TensorParallel({**PLACEMENTS, **others}, {"embed": Vocabulary(8, 5)}),
        ),
    )


def test_slices_are_the_whole_again() -> None:
    source = model()
    table, ranks, doubts = slices_of(source, 2)
    shapes = [{name: own.shape for name, own in rank.parameters.items()} for rank in ranks]
    assert shapes == [{"embed": (4, 3), "fused": (3, 4), "down": (4, 3), "norm": (4,)}] * 2
    assert doubts == []
    assert merge(ranks, table).parameters == source.parameters


def test_one_rank_needs_no_rule() -> None:
    table, (rank,), _ = slices_of(model(fused=Boxes("view")), 1)
    assert (rank.parameters, table.cuts) == (model().parameters, {})


def test_what_cannot_be_cut_evenly() -> None:
    with pytest.raises(UnsupportedCheckpoint, match=r"fused \[6, 4\] \(0:4,2\), down \[4, 6\]"):
        slices_of(model(), 4)


def test_names_without_a_rule() -> None:
    placements = {name: own for name, own in PLACEMENTS.items() if name != "down"}
    source = model().replace(tensor_parallel=TensorParallel(placements, {}))
    with pytest.raises(MissingData, match="nothing says how"):
        slices_of(source, 2)


def test_what_a_rank_states() -> None:
    rank = sized(model({"tensor_parallel": {"autotp_size": 1, "other": 2}}), 2)
    assert rank.run.origin == Origin(dp=2)
    args = {"tensor_model_parallel_size": 2, "padded_vocab_size": 8, "lr": 0.1}
    assert rank.state == {"module": [*SHAPES], "client_state": {"args": args}}
    assert rank.run.engine.config == {"tensor_parallel": {"autotp_size": 2, "other": 2}}  # type: ignore[union-attr]


@pytest.mark.parametrize(("tp", "rows"), [(1, 8), (2, 8), (3, 6), (4, 8)])
def test_rows_of_a_vocabulary(tp: int, rows: int) -> None:
    """More rows than the ranks need stay, if the ranks can share them."""
    assert rows_of(model(), tp, options_of({})) == {"embed": rows}


def test_rows_that_the_user_gives() -> None:
    assert rows_of(model(), 2, options_of({"vocab_size": 9})) == {"embed": 10}
    with pytest.raises(WrongOption, match="is less than the 5 rows"):
        rows_of(model(), 2, options_of({"vocab_size": 4}))
    assert rows_of(model({"tensor_parallel": {}}), 3, options_of({})) == {}  # AutoTP pads nothing


# -- what the source's info states

INFO = "universal_checkpoint_info"
AUTO: dict[str, Any] = {"tensor_parallel": {}}


def rows_by_map(*counts: int, width: int = 4) -> dict[str, Any]:
    """An affine_map of one parameter whose rows are dealt so."""
    ranks = {
        rank: {
            "shard_shape": [count, width],
            "pieces": [
                {
                    "shape": [count, width],
                    "source": [sum(counts[:rank]) * width, [width, 1]],
                    "dest": [0, [width, 1]],
                }
            ],
        }
        for rank, count in enumerate(counts)
    }
    return {"version": 1, "params": {"fused": {"logical_shape": [6, width], "ranks": ranks}}}


def with_vocabularies(source: Manifest, **vocabularies: Vocabulary) -> Manifest:
    return source.replace(tensor_parallel=TensorParallel(PLACEMENTS, vocabularies))


def with_info(info: dict[str, Any], source: Manifest) -> Manifest:
    source.state["client_state"][INFO] = info
    return source


def test_what_a_rank_states_of_other_ranks() -> None:
    """The map of pieces may be all that said what is whole; the rows are the most of any."""
    source = with_info({"affine_map": rows_by_map(4, 2), "padded_vocab_size": 6}, model())
    source.state["client_state"]["args"]["padded_vocab_size"] = 6
    source = with_vocabularies(source, embed=Vocabulary(8, 5), fused=Vocabulary(6, 5))
    client = sized(source, 3).state["client_state"]
    assert client[INFO] == {"tp_replicated_parameter_patterns": ["^norm$"], "padded_vocab_size": 8}
    assert client["args"]["padded_vocab_size"] == 8
    with_info({"affine_map": rows_by_map(4, 2), "other": 1}, source)
    assert sized(source, 2).state["client_state"][INFO] == source.state["client_state"][INFO]


def test_what_a_rank_states_without_rules() -> None:
    source = with_info({"padded_vocab_size": 6}, model())
    for facts in (UNCUT, None):
        own = source.replace(tensor_parallel=facts)
        client = sized(own, 2).state["client_state"]
        assert client[INFO] == {"padded_vocab_size": 6}
        assert client["args"]["padded_vocab_size"] == 8
        assert rows_of(own, 2, options_of({})) == {}
        with pytest.raises(MissingData, match="nothing says how"):
            slices_of(own, 2)


def test_a_map_deals_the_same_ranks_unevenly() -> None:
    """For others it says nothing, and then no rule does."""
    source = with_info({"affine_map": rows_by_map(4, 2)}, model(fused=Boxes("affine_map")))
    table, ranks, doubts = slices_of(source, 2)
    assert [rank.parameters["fused"].shape for rank in ranks] == [(4, 4), (2, 4)]
    assert merge(ranks, table).parameters == source.parameters
    assert doubts == []
    with pytest.raises(UnsupportedCheckpoint, match=r"1 parameter .*: fused \[6, 4\] \(view\)"):
        slices_of(model(fused=Boxes("view")), 2)


# -- rows of a vocabulary


@pytest.mark.parametrize(
    ("unit", "tp", "rows"),
    [
        (4, 3, 12),
        (2, 1, 6),  # it is stated, so that further rows go
        (1, 2, 6),
        (0, 2, 8),  # as if nothing were stated
        (-2, 2, 8),
        ("2", 2, 8),
    ],
)
def test_rows_by_the_stated_divisor(unit: Any, tp: int, rows: int) -> None:
    source = model()
    source.state["client_state"]["args"]["make_vocab_size_divisible_by"] = unit
    assert rows_of(source, tp, options_of({})) == {"embed": rows}


@pytest.mark.parametrize(("ranks", "tp", "rows"), [(2, 1, 5), (2, 4, 8), (1, 1, 6), (None, 1, 6)])
def test_rows_that_the_ranks_of_the_source_needed(ranks: int | None, tp: int, rows: int) -> None:
    """Six of five are what two ranks need, and what a program with one has chosen."""
    source = with_vocabularies(model().replace(origin=Origin(tp=ranks)), embed=Vocabulary(6, 5))
    assert rows_of(source, tp, options_of({})) == {"embed": rows}


def test_rows_of_a_model_without_a_vocabulary() -> None:
    source = with_vocabularies(model(), renamed=Vocabulary(8, 5))
    assert rows_of(source, 2, options_of({})) == {}
    with pytest.raises(WrongOption, match="no rule says which weights have the rows"):
        rows_of(source, 2, options_of({"vocab_size": 9}))


def test_rows_that_the_user_gives_to_autotp() -> None:
    assert rows_of(model(AUTO), 3, options_of({"vocab_size": 10})) == {"embed": 12}
    source = model()
    assert isinstance(source.run.engine, FlatBufferEngine)
    without_config = source.replace(engine=replace(source.run.engine, config=None))
    assert rows_of(without_config, 3, options_of({})) == {"embed": 6}


# -- AutoTP


def with_heads(root: Path, count: int, source: Manifest) -> Manifest:
    path = root / "config.json"
    path.write_text(f'{{"num_key_value_heads": {count}}}', encoding="utf-8")
    sibling = Sibling("config.json", str(path), path.stat().st_size)
    return source.replace(siblings=(sibling,))


def test_autotp_deals_rows_of_some_layers_nearly_evenly() -> None:
    """A tied embedding has the shares of the output layer; without AutoTP they cannot be cut."""
    parameters = {
        "mlp.up": Parameter((8, 3), group=0),
        "embed": Parameter((8, 3), group=0, aliases=("lm_head.weight",)),
    }
    facts = TensorParallel(dict.fromkeys(parameters, Cut(0)), {})
    own, other = (
        model(config).replace(parameters=parameters, tensor_parallel=facts) for config in (AUTO, {})
    )
    _, ranks, _ = slices_of(own, 3)
    shapes = [[parameter.shape[0] for parameter in rank.parameters.values()] for rank in ranks]
    assert shapes == [[3, 3], [3, 3], [2, 2]]
    with pytest.raises(UnsupportedCheckpoint, match=r"2 parameters cannot be cut evenly over 3"):
        slices_of(other, 3)


def test_autotp_deals_whole_heads(tmp_path: Path) -> None:
    """config.json states their number, else uneven shares show it."""
    shown = with_info({"affine_map": rows_by_map(4, 2)}, model(AUTO))
    assert auto_of(shown).heads == 3
    assert auto_of(with_heads(tmp_path, 6, shown)).heads == 6
    assert auto_of(model(AUTO)).heads is None
    assert auto_of(replace(model(AUTO), state={})).heads is None
    source = with_heads(tmp_path, 3, replace(model(AUTO), parameters={"q": Parameter((6, 4))}))
    source = source.replace(tensor_parallel=TensorParallel({"q": Cut(0)}, {}))
    _, ranks, doubts = slices_of(source, 2)
    assert [rank.parameters["q"].shape for rank in ranks] == [(4, 4), (2, 4)]
    assert doubts == []


def test_autotp_without_a_number_of_heads_is_doubtful() -> None:
    (doubt,) = slices_of(model(AUTO), 2)[2]
    assert "--tp must divide num_key_value_heads" in doubt.message
    assert slices_of(with_info({"other": 1}, model(AUTO)), 2)[2] == [doubt]
    mapped = with_info({"affine_map": rows_by_map(3, 3)}, model(AUTO))  # it has each rank's shares
    assert slices_of(mapped, 2)[2] == []
