"""Slices of made-up tensor ranks become one model, by the rules that come first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from zckpt.core.checkpoint.entries import Entry
from zckpt.core.checkpoint.facts import ExpertLayer, FlatBufferEngine, TensorParallel, Vocabulary
from zckpt.core.checkpoint.manifest import Manifest, Parameter, Run
from zckpt.core.checkpoint.optimizer_states import StateRow, States
from zckpt.core.checkpoint.origin import Origin
from zckpt.core.checkpoint.placement import Cut, Replicated
from zckpt.core.storage.fragments import Extent, solid
from zckpt.errors import (
    InconsistentCheckpoint,
    MissingData,
    Notice,
    UnsupportedCheckpoint,
    WrongOption,
)
from zckpt.formats.deepspeed.model_ranks import tensor_ranks
from zckpt.formats.deepspeed.model_ranks.tensor_ranks import joined_slices

from ....conftest import texts

INFO: dict[str, Any] = {
    "tp_replicated_parameter_patterns": ["norm"],
    "vocabulary_parameter_patterns": ["embed"],
    "original_vocab_size": 3,
}
VALUES = {"embed": [1.0, 2], "norm": [5.0]}


def rank(root: Path, number: int, info: Any = INFO, **values: list[float]) -> Manifest:
    """A tensor rank with these values; one that is called buffer is no parameter."""
    entries = []
    for name, own in values.items():
        slot = "param" if name == "buffer" else "exp_avg_sq"
        path = root / f"{number}.{name}"
        path.write_bytes(np.array(own, "<f4").tobytes())
        fragments = solid(len(own), Extent(str(path), 0, 4 * len(own)))
        entries.append(Entry(name, slot, "F32", (len(own),), fragments))
    return Manifest(
        root="run",
        format="deepspeed",
        entries={own.key: own for own in entries},
        parameters={e.parameter: Parameter(e.shape, group=0) for e in entries if e.slot != "param"},
        buffers=("buffer",) if "buffer" in values else (),
        groups=({"lr": 0.1},),
        state={"module": [], "client_state": {"universal_checkpoint_info": info} if info else {}},
        run=Run(origin=Origin(tp=2)),
    )


def ranks(root: Path, info: Any = INFO, **second: list[float]) -> list[Manifest]:
    """Two ranks, the second with these values of its own."""
    other = {**VALUES, "embed": [3.0, 4], **second}
    return [rank(root, 0, info, **VALUES), rank(root, 1, info, **other)]


def check(manifest: Manifest, replicas: str | None) -> list[Notice]:
    """What one process says that runs all checks alone."""
    lines = tensor_ranks.check(manifest)
    for each in tensor_ranks.copies(manifest, replicas):
        lines += each.compare_all()
    return lines


def rules_in(root: Path, text: str) -> str:
    path = root / "rules"
    path.write_text(text)
    return str(path)


def test_the_checkpoint_says_how_it_was_cut(tmp_path: Path) -> None:
    slices = ranks(tmp_path)
    whole = joined_slices(slices, None, None)
    assert {name: own.shape for name, own in whole.parameters.items()} == {
        "embed": (4,), "norm": (1,),
    }  # fmt: skip
    assert whole.run.tensor_parallel == TensorParallel(
        {"embed": Cut(0), "norm": Replicated()}, {"embed": Vocabulary(rows=4, used=3)}
    )
    assert [(copy.name, copy.axis) for copy in whole.replicas] == [
        ("norm/exp_avg_sq", "tensor rank")
    ]
    assert whole.models == tuple(slices)


def test_the_users_rules_come_first(tmp_path: Path) -> None:
    whole = joined_slices(ranks(tmp_path), rules_in(tmp_path, "norm = 0"), None)
    assert whole.parameters["norm"].shape == (2,)
    assert whole.run.tensor_parallel == TensorParallel(
        {"embed": Cut(0), "norm": Cut(0)}, {"embed": Vocabulary(rows=4, used=3)}
    )


def test_infos_of_ranks_that_differ(tmp_path: Path) -> None:
    first, second = ranks(tmp_path)
    other = {"universal_checkpoint_info": {**INFO, "original_vocab_size": 4}}
    second = replace(second, state={**second.state, "client_state": other})
    with pytest.raises(
        InconsistentCheckpoint, match="tensor ranks state different values of universal_checkpoint"
    ):
        joined_slices([first, second], None, None)


def test_nothing_is_guessed(tmp_path: Path) -> None:
    said = "2 tensor-parallel ranks, and nothing says how 2 parameters"
    with pytest.raises(MissingData, match=said):
        joined_slices(ranks(tmp_path, None), None, None)
    whole = joined_slices(ranks(tmp_path, None), rules_in(tmp_path, "embed = 0\nnorm = 0"), None)
    assert whole.parameters["norm"].shape == (2,)


def test_a_rank_without_a_parameter(tmp_path: Path) -> None:
    """AutoTP may leave a rank nothing, which only a map of pieces can say."""
    first, second = ranks(tmp_path)
    lacking = replace(second, parameters={"embed": second.parameters["embed"]})
    for number, pair in ((1, [first, lacking]), (0, [lacking, first])):
        with pytest.raises(InconsistentCheckpoint, match=f"tensor rank {number} does not have"):
            joined_slices(pair, None, None)


def test_buffers_are_whole_unless_the_user_says_otherwise(tmp_path: Path) -> None:
    """Those of other shapes on each rank need a rule."""
    both = [rank(tmp_path, n, **VALUES, buffer=[1.0, 2]) for n in (0, 1)]
    assert joined_slices(both, None, None).entries["buffer", "param"].shape == (2,)
    rules = rules_in(tmp_path, "buffer = 0")
    assert joined_slices(both, rules, None).entries["buffer", "param"].shape == (4,)
    unlike = [both[0], rank(tmp_path, 1, **VALUES, buffer=[1.0, 2, 3])]
    with pytest.raises(MissingData, match="nothing says how 1 parameter"):
        joined_slices(unlike, None, None)
    assert joined_slices(unlike, rules, None).entries["buffer", "param"].shape == (5,)


def test_parts_of_a_sum_are_said(tmp_path: Path) -> None:
    whole = joined_slices(ranks(tmp_path), rules_in(tmp_path, "norm = sum"), None)
    assert [line.partition(", but")[0] for line in texts(whole.notices.warnings)] == [
        "norm: the value is the sum over all tensor ranks"
    ]
    with pytest.raises(UnsupportedCheckpoint, match="zckpt does not add tensors"):
        check(whole, "rank0")


def test_rules_that_do_not_fit(tmp_path: Path) -> None:
    with pytest.raises(WrongOption, match=r"rules: the rule `embed = 1` does not fit embed"):
        joined_slices(ranks(tmp_path), rules_in(tmp_path, "embed = 1"), None)


# -- copies


def test_copies_of_a_joined_model(tmp_path: Path) -> None:
    assert check(joined_slices(ranks(tmp_path), None, None), None) == []
    drifted = joined_slices(ranks(tmp_path, norm=[6.0]), None, None)
    with pytest.raises(InconsistentCheckpoint, match=r"different replicas of 1 parameter \(norm\)"):
        check(drifted, None)
    assert "rank 0's is used" in check(drifted, "rank0")[0].message
    alike = joined_slices(ranks(tmp_path, embed=[1.0, 2]), None, None)
    with pytest.raises(InconsistentCheckpoint, match="cuts embed over the tensor ranks, but all"):
        check(alike, None)
    assert check(alike.replace(origin=Origin()), None) == []  # of one tensor rank


def test_copies_of_ranks_that_are_apart(tmp_path: Path) -> None:
    """Each keeps its own, so that they are warnings, as far as rules tell what is a copy."""
    for info, count in ((INFO, 1), (None, 0)):
        models = tuple(ranks(tmp_path, info, norm=[6.0]))
        apart = Manifest("run", "deepspeed", Run(Origin(tp=2)), {}, {}, ranks=models, models=models)
        warnings = check(apart, None)
        assert ["each rank keeps its replica: norm" in line for line in texts(warnings)] == [
            True
        ] * count
        assert check(replace(apart, models=models[:1]), None) == []


def test_copies_of_ep_ranks_have_no_mean(tmp_path: Path) -> None:
    """Without ZeRO each ep rank has the dense parameters."""
    one, other = rank(tmp_path, 0, norm=[1.0]), rank(tmp_path, 1, norm=[2.0])
    experts = (ExpertLayer("moe", 4, 2),)
    engine = FlatBufferEngine("deepspeed", "0.19.8", None, "BF16", False, None, {}, experts=experts)
    copy = replace(other.entries["norm", "exp_avg_sq"], axis="ep rank")
    whole = one.replace(origin=Origin(zero_stage=0), engine=engine, replicas=(copy,))
    for chosen in (None, "mean"):
        with pytest.raises(InconsistentCheckpoint, match="ep ranks hold different replicas"):
            check(whole, chosen)
    assert "rank 0's is used" in check(whole, "rank0")[0].message


# -- one rank, three ranks, rules of other forms


def test_one_tensor_rank_is_the_whole(tmp_path: Path) -> None:
    """It keeps its states of other shapes, which several ranks could not join."""
    states = States((StateRow("factors", "other", ("norm",), [1, 2]),))
    first, second = (replace(each, states=states) for each in ranks(tmp_path))
    rules = rules_in(tmp_path, "norm = replicated\nembed = 0")
    whole = joined_slices([first], rules, None)
    assert {name: own.shape for name, own in whole.parameters.items()} == {
        "embed": (2,), "norm": (1,),
    }  # fmt: skip
    assert whole.states == states
    both = joined_slices([first, second], rules, None)
    assert {(row.key, row.form) for row in both.states} == {("factors", "unsupported")}


def test_each_rank_states_how_it_was_cut(tmp_path: Path) -> None:
    """One of three that differs is enough."""
    first, second = ranks(tmp_path)
    third = rank(tmp_path, 2, {**INFO, "original_vocab_size": 4}, **VALUES)
    with pytest.raises(
        InconsistentCheckpoint, match="run: tensor ranks state different values of universal_check"
    ):
        joined_slices([first, second, third], None, None)


def test_ranks_without_a_client_state(tmp_path: Path) -> None:
    bare = [replace(each, state={"module": [], "client_state": None}) for each in ranks(tmp_path)]
    rules = rules_in(tmp_path, "embed = 0\nnorm = replicated")
    assert joined_slices(bare, rules, None).parameters["embed"].shape == (4,)
    with pytest.raises(MissingData, match="nothing says how 2 parameters"):
        joined_slices(bare, None, None)


def test_rules_in_json_are_of_parameters_alone(tmp_path: Path) -> None:
    """They say `rows` of all that they do not name, which would cut whole buffers."""
    both = [rank(tmp_path, n, None, **VALUES, buffer=[1.0, 2]) for n in (0, 1)]
    whole = joined_slices(both, rules_in(tmp_path, json.dumps(INFO)), None)
    assert whole.entries["buffer", "param"].shape == (2,)
    assert whole.parameters["embed"].shape == (4,)
    assert whole.notices.warnings == ()


def test_doubts_of_a_family(tmp_path: Path) -> None:
    name = "layers.0.attention.dense.bias"
    both = [rank(tmp_path, number, None, **{name: [1.0]}) for number in (0, 1)]
    (warning,) = joined_slices(both, "neox", None).notices.warnings
    assert f"--tp-rules neox takes {name} as whole on each rank" in warning.message


# -- which copies are compared


def test_stage_0_without_experts_has_tensor_ranks(tmp_path: Path) -> None:
    """Only ep ranks of stage 0 are compared otherwise: all else may be averaged, and is checked."""
    alike = joined_slices(ranks(tmp_path, embed=[1.0, 2]), None, None)
    experts = (ExpertLayer("moe", 4, 2),)
    engine = FlatBufferEngine("deepspeed", "0.19.8", None, "BF16", False, None, {}, experts=experts)
    for whole in (
        alike.replace(origin=Origin(tp=2, zero_stage=0)),
        alike.replace(origin=Origin(tp=2, zero_stage=1), engine=engine),
    ):
        with pytest.raises(InconsistentCheckpoint, match="cuts embed over the tensor ranks"):
            check(whole, None)


def test_ranks_apart_that_cannot_be_joined(tmp_path: Path) -> None:
    """Nothing says then what is a copy, and a conversion needs no copies: no check, no error."""
    first, second = ranks(tmp_path, norm=[6.0])
    other = {"universal_checkpoint_info": {**INFO, "original_vocab_size": 4}}
    unlike = replace(second, state={**second.state, "client_state": other})
    twice = [{"lr": 0.1}, {"lr": 0.1}]
    for models, rules in (
        ((first, unlike), None),
        ((first, second), rules_in(tmp_path, "embed = 1")),
        ((replace(first, groups=tuple(twice)), second), None),
    ):
        origin = Origin(tp=2, tp_rules=rules)
        apart = Manifest("run", "deepspeed", Run(origin), {}, {}, ranks=models, models=models)
        assert check(apart, None) == []


def test_one_model_of_stages_that_are_apart(tmp_path: Path) -> None:
    """Copies of stages that differ are said once."""
    first, second = (rank(tmp_path, number, norm=[1.0 + number]) for number in (0, 1))
    masters = [
        replace(each.entries["norm", "exp_avg_sq"], slot="master") for each in (first, second)
    ]
    model = replace(
        first,
        entries={("norm", "master"): masters[0]},
        replicas=(replace(masters[1], axis="stage"),),
    )
    apart = Manifest("run", "deepspeed", Run(), {}, {}, ranks=(first, second), models=(model,))
    (warning,) = check(apart, None)
    assert warning.message.startswith("the stages' replicas of norm differ")


def test_what_is_said_of_stages_and_of_tensor_ranks(tmp_path: Path) -> None:
    """Ranks that are apart may have drifted along both axes: each is said."""
    first, second = (
        replace(each, entries={**each.entries, ("norm", "master"): master_of(each)})
        for each in ranks(tmp_path, norm=[6.0])
    )
    of_stage = replace(second.entries["norm", "master"], axis="stage")
    apart = Manifest("run", "deepspeed", Run(Origin(tp=2)), {}, {}, ranks=(first, second))
    of_stages, of_ranks = check(
        replace(apart, models=(replace(first, replicas=(of_stage,)), second)), None
    )
    assert of_stages.message.startswith("the stages' replicas of norm differ")
    assert of_ranks.message.startswith("tensor ranks hold different replicas of 1 parameter (norm)")


def master_of(rank: Manifest) -> Entry:
    return replace(rank.entries["norm", "exp_avg_sq"], slot="master")
