"""What makes a report unequal: `verify` and `diff` of synthetic checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from zckpt.core.checkpoint.entries import Entry, key_of
from zckpt.core.checkpoint.facts import FlatBufferEngine, StepPlace
from zckpt.core.checkpoint.inert import Scalar
from zckpt.core.checkpoint.manifest import Manifest, Parameter, Run, Sibling
from zckpt.core.checkpoint.optimizer_states import StateRow, States
from zckpt.core.checkpoint.states import EVERYTHING, Selection
from zckpt.core.comparison.compare import Result
from zckpt.core.comparison.difference import Difference
from zckpt.core.passes.description import Report, said
from zckpt.core.passes.plan import Match
from zckpt.core.passes.resources import DEFAULT_COPYING, Begin, Copying
from zckpt.core.storage.fragments import Extent, solid
from zckpt.errors import MissingData, note
from zckpt.formats.statedict.keys import keys_of
from zckpt.proof import verify as proof
from zckpt.proof.verify import inferences, needs_weights, roundings

from ..conftest import texts

OF_READER = note("value-assumed", "of the reader")
KINDS = {"F32": "<f4", "F64": "<f8", "F16": "<f2"}


def verify_alone(own: Manifest, begin: Begin | None = None) -> Report:
    return proof.verify_alone(own, None, DEFAULT_COPYING, begin)


def verify_against(
    a: Manifest, b: Manifest, chosen: Selection = EVERYTHING, begin: Begin | None = None
) -> Report:
    return proof.verify_against(a, b, chosen, DEFAULT_COPYING, begin)


def diff(
    a: Manifest,
    b: Manifest,
    chosen: Selection = EVERYTHING,
    copying: Copying = DEFAULT_COPYING,
    begin: Begin | None = None,
) -> Report:
    return proof.diff(a, b, chosen, copying, begin)


def checkpoint(root: Path, tensors: dict[str, tuple[str, list[float]]], **more: Any) -> Manifest:
    """A checkpoint whose tensors have a type and numbers each, in one file."""
    root.mkdir(exist_ok=True)
    entries, data = {}, b""
    for name, (dtype, values) in tensors.items():
        own = np.array(values, KINDS[dtype]).tobytes()
        extent = Extent(str(root / "f"), len(data), len(own))
        entries[key_of(name)] = Entry(
            *key_of(name), dtype, (len(values),), solid(len(values), extent)
        )
        data += own
    (root / "f").write_bytes(data)
    names = {entry.parameter: (len(tensors[entry.name][1]),) for entry in entries.values()}
    fields = {"parameters": {name: Parameter(shape) for name, shape in names.items()}, **more}
    return Manifest(str(root), "x", Run(), entries, {}).replace(**fields)


def test_tensors_that_overlap_are_a_problem(tmp_path: Path) -> None:
    whole = checkpoint(tmp_path, {"w/exp_avg": ("F32", [1, 2]), "v/exp_avg": ("F32", [3, 4])})
    assert verify_alone(whole)["problems"] == []
    entry = whole.entries["v", "exp_avg"]
    moved = replace(entry, fragments=solid(2, Extent(str(tmp_path / "f"), 4, 8)))
    report = verify_alone(replace(whole, entries={**whole.entries, ("v", "exp_avg"): moved}))
    assert not report["equal"]
    assert "overlap in" in report["problems"][0]["message"]


def test_notes_on_copies_of_ranks_are_kept(tmp_path: Path) -> None:
    own = checkpoint(tmp_path, {"b/param": ("F32", [1]), "w/param": ("F32", [2])}, buffers=("b",))
    other = replace(own.entries["w", "param"], parameter="b")
    report = verify_alone(own.replace(replicas=(other,), notes=(OF_READER,)))
    assert report["equal"]
    assert texts(report["notes"]) == [
        "the buffer b differs between ranks, as statistics that are not synchronised do: "
        "rank 0's values are used",
        "of the reader",
    ]


def test_the_bytes_to_come_are_told(tmp_path: Path) -> None:
    """Those of both sides, if there are two."""
    own = checkpoint(tmp_path, {"w/param": ("F32", [1, 2]), "w/exp_avg": ("F32", [3, 4])})
    for reads, numel in (
        (verify_alone, 4),
        (partial(verify_against, own), 8),
        (partial(diff, own), 8),
    ):
        seen: list[int] = []

        def begin(total: int, seen: list[int] = seen) -> Callable[[int], None]:
            seen.append(-total)
            return seen.append

        reads(own, begin=begin)
        assert (seen[0], sum(seen)) == (-4 * numel, 0)


def test_figures_are_of_whole_tensors(tmp_path: Path) -> None:
    """Also of the parts that do not differ; here the last element alone does."""
    numel = (1 << 18) + 1  # of which all but one fill the buffer
    a, b = (
        checkpoint(tmp_path / name, {"w/param": ("F32", [1.0] * (numel - 1) + [last])})
        for name, last in (("a", 512.0), ("b", 0.0))
    )
    (line,) = diff(a, b, copying=Copying(jobs=1, memory=2 << 20))["differences"]
    assert (line["count"], line["first"]) == (1, numel - 1)
    assert line["cosine"] == pytest.approx(2**-0.5, rel=1e-12)
    assert line["relative"] == pytest.approx(2**-0.5, rel=1e-12)


def test_what_one_engine_has_in_another_way_is_named(tmp_path: Path) -> None:
    """Groups without parameters, and where an optimizer that is named has its step."""
    tensors = {"w/param": ("F32", [1.0])}
    a = checkpoint(
        tmp_path / "a",
        tensors,
        parameters={"w": Parameter((1,), group=0, step=3)},
        groups=({"lr": 1.0}, {"lr": 9.0}),
        engine=keys_of(None),
        step_place=StepPlace("group", "int", optimizer="AdamW"),
    )
    flats = FlatBufferEngine("flats", None, None, None, False, None, {})
    b = checkpoint(tmp_path / "b", tensors, parameters=a.parameters, groups=a.groups[:1]).replace(
        engine=flats, step_place=StepPlace("state", "F32")
    )
    report = verify_against(a, b)
    assert report["equal"]
    assert texts(report["notes"]) == [
        f"place of the optimizer's step: group, int in {a.root}; state, F32 in {b.root}: one of "
        "them is where AdamW looks for it"
    ]
    assert texts(report["not_compared"]) == [
        "hyper-parameters of the optimizer's group 1, which has no parameters: only in " + a.root
    ]


def test_notes_of_the_reader_are_kept(tmp_path: Path) -> None:
    own = checkpoint(tmp_path, {"w/param": ("F32", [1])}, notes=(OF_READER,))
    assert verify_alone(own)["notes"] == said([OF_READER])


def test_what_one_checkpoint_lacks_or_has_too_much(tmp_path: Path) -> None:
    """A lost moment and bytes of no item are problems; what may be so is a note."""
    both = {f"{name}/{slot}": ("F32", [1.0]) for name in "wv" for slot in ("exp_avg", "max_sq")}
    tensors = {"u/exp_avg": ("F32", [1.0]), "n/param": ("F32", [1.0])}
    own = checkpoint(
        tmp_path,
        {**both, **tensors},
        unused=(Extent(str(tmp_path / "f"), 24, 8),),
        states=States((StateRow("shards", "unsupported", ("w",), "", "no kind that is known"),)),
    )
    report = verify_alone(own)
    assert not report["equal"]
    assert [line["message"] for line in report["problems"]] == [
        "f: no item covers the 8 bytes at 24",
        "u: the optimizer's max_sq is missing, which other parameters of the same group have",
    ]
    assert texts(report["notes"]) == [
        "n: the optimizer has no state, although other parameters of the same group have "
        "one: never updated, or the state is lost",
        "not read: shards of w: no kind that is known",
    ]


def test_chosen_tensors_are_compared_alone(tmp_path: Path) -> None:
    """Without weights if these are not chosen, and without anything that is no tensor."""
    tensors = {"w/exp_avg": ("F32", [1.0])}
    a, b = (checkpoint(tmp_path / str(lr), tensors, groups=({"lr": lr},)) for lr in (1.0, 2.0))
    chosen = Selection(tensors="*/exp_avg")
    for report in (verify_against(a, b, chosen), diff(a, b, chosen)):
        assert (report["equal"], report["tensors"], "groups" in report) == (True, 1, False)
    with pytest.raises(MissingData, match="share no weights"):
        verify_against(a, b)


def test_only_what_differs_has_figures(tmp_path: Path) -> None:
    """And only each tensor itself, not its copies of further ranks, which `verify` compares."""
    a, b = (
        checkpoint(
            tmp_path / name,
            {"w/param": ("F32", [1.0]), "v/param": ("F32", [2.0]), "x/param": ("F32", [last])},
        )
        for name, last in (("a", 3.0), ("b", 4.0))
    )
    copy = replace(a.entries["w", "param"], parameter="v")
    report = diff(replace(a, replicas=(copy,)), b, Selection(tensors="*"))
    first, second, third = report["results"]
    assert first == {"tensor": "w/param", "count": 0}
    assert second == {"tensor": "v/param", "count": 0}
    assert (third["tensor"], third["count"], third["rms"]) == ("x/param", 1, 1.0)
    report = verify_against(replace(a, replicas=(copy,)), b)
    assert [line["tensor"] for line in report["differences"]] == ["x/param", "v/param"]


@pytest.mark.parametrize("swapped", [False, True])
def test_a_tensor_of_one_side_that_was_not_lost(swapped: bool, tmp_path: Path) -> None:
    """A frozen weight, where the other side keeps none but masters; `diff` says it."""
    own = {"w/master": ("F32", [1.0])}
    known = {"w": Parameter((1,)), "v": Parameter((1,), trainable=False)}
    a = checkpoint(tmp_path / "a", {**own, "v/param": ("F32", [2.0])}, parameters=known)
    b = checkpoint(tmp_path / "b", own, parameters=known)
    pair = (b, a) if swapped else (a, b)
    assert verify_against(*pair)["equal"]
    report = diff(*pair)
    assert not report["equal"]
    assert (report["differences"], report["problems"]) == ([], [])
    assert report["only_b" if swapped else "only_a"] == ["v/param"]


def test_what_is_no_difference_is_said(tmp_path: Path) -> None:
    """As notes what is equal all the same; and what one side alone has in a way of its own."""
    (tmp_path / "config.json").write_text("{}")
    tensors, unsupported = (
        {"w/param": ("F32", [1.0])},
        StateRow("shards", "unsupported", ("w",), "content", "why"),
    )
    group = {"scale_parameter": True}
    a = checkpoint(
        tmp_path / "a",
        tensors,
        parameters={"w": Parameter((1,), group=0)},
        groups=({**group, "fused": None},),
        states=States((StateRow("RMS", "number", ("w",), Scalar(1.0, "F32")), unsupported)),
        siblings=(Sibling("config.json", str(tmp_path / "config.json"), 2),),
    )
    b = checkpoint(
        tmp_path / "b",
        tensors,
        parameters={"w": Parameter((1,), group=0)},
        groups=(group,),
        states=States((unsupported,)),
    )
    report = verify_against(a, b)
    assert report["equal"]
    assert texts(report["notes"]) == [
        "shards of w: zckpt does not support this state; only its bytes were compared",
        f"RMS of 1 parameter: only in {a.root}; the optimizer computes it afresh",
    ]
    assert texts(report["not_compared"]) == [
        f"fused of the optimizer's groups: only in {a.root}",
        f"config.json: only beside {a.root}",
    ]


def test_equal_values_of_another_type_are_no_difference_of_verify(tmp_path: Path) -> None:
    """`diff` lists them; both say so."""
    a = checkpoint(tmp_path / "a", {"w/param": ("F32", [1, 2]), "w/exp_avg": ("F32", [1, 2])})
    b = checkpoint(tmp_path / "b", {"w/param": ("F32", [1, 2]), "w/exp_avg": ("F64", [1, 2])})
    report = verify_against(a, b)
    assert report["equal"]
    assert texts(report["notes"]) == ["stored in different types, but equal by value: w/exp_avg"]
    report = diff(a, b)
    assert [(line["tensor"], line["count"]) for line in report["differences"]] == [("w/exp_avg", 0)]


def test_a_state_that_differs_is_a_finding_by_itself(tmp_path: Path) -> None:
    a, b = (
        checkpoint(tmp_path / name, {"w/param": ("F32", [1.0])}, groups=(), state=state)
        for name, state in (("a", {"user": {"epoch": 1}}), ("b", {"user": {"epoch": 2}}))
    )
    for report in (verify_against(a, b), diff(a, b)):
        assert not report["equal"]
        assert report["states"] == [{"key": "user.epoch", "a": 1, "b": 2}]


def test_names_that_nothing_proves_are_a_finding_by_themselves(tmp_path: Path) -> None:
    """Unless one is a copy of the other."""
    tensors = {"w/param": ("F32", [1.0]), "w/exp_avg": ("F32", [1.0])}
    for padding, is_equal in ((b"", True), (b"x", False)):
        a, b = (checkpoint(tmp_path / name, tensors, inferred=("w",)) for name in "ab")
        (tmp_path / "b" / "f").write_bytes((tmp_path / "a" / "f").read_bytes() + padding)
        a, b = (side.replace(paths=(f"{side.root}/f",)) for side in (a, b))
        for report in (verify_against(a, b), diff(a, b)):
            assert (report["equal"], report["unproven"] == []) == (is_equal, is_equal)


@pytest.mark.parametrize("last", [1.0, 2.0])
def test_each_name_of_a_tied_weight_is_compared(last: float, tmp_path: Path) -> None:
    """Also where one side stores it under two names, and does not say that they are one."""
    once = checkpoint(
        tmp_path / "a",
        {"w/param": ("F32", [1.0])},
        parameters={"w": Parameter((1,), aliases=("head", "out"))},
    )
    twice = checkpoint(tmp_path / "b", {"head/param": ("F32", [last]), "out/param": ("F32", [1.0])})
    for pair in ((once, twice), (twice, once)):
        report = verify_against(*pair)
        assert (report["equal"], len(report["differences"])) == (last == 1.0, last != 1.0)
        assert report["problems"] == []


@pytest.mark.parametrize("has_master", [True, False])
@pytest.mark.parametrize("trains", [True, False])
def test_rounded_weights_are_a_loss_where_an_optimizer_updates_them(
    has_master: bool, trains: bool, tmp_path: Path
) -> None:
    tensors = {"w/param": ("F16", [1.0, 2.0])}
    known = {"w": Parameter((2,), trainable=trains)}
    masters = {"w/master": ("F32", [1.0, 2.0001])} if has_master else {}
    a = checkpoint(tmp_path / "a", {**tensors, **masters}, parameters=known)
    b = checkpoint(tmp_path / "b", tensors, parameters=known)
    for pair in ((a, b), (b, a)):
        report = diff(*pair)
        assert report["equal"] is not (has_master and trains), report


@pytest.mark.parametrize("is_first", [True, False])
def test_rounded_weights_under_another_name_are_a_loss(is_first: bool, tmp_path: Path) -> None:
    """A tied weight of which one side has the rounded values under its second name."""
    wide = checkpoint(
        tmp_path / "a",
        {"w/param": ("F32", [1.0, 2.0001])},
        parameters={"w": Parameter((2,), aliases=("head",))},
    )
    narrow = checkpoint(tmp_path / "b", {"head/param": ("F16", [1.0, 2.0])})
    report = diff(wide, narrow) if is_first else diff(narrow, wide)
    assert not report["equal"]
    assert report["rounded"] == {"a": [], "b": []} | {"b" if is_first else "a": ["head"]}
    assert (report["differences"], report["only_a"], report["only_b"]) == ([], [], [])


def test_only_weights_that_are_equal_are_rounded(tmp_path: Path) -> None:
    a = checkpoint(tmp_path / "a", {"w/param": ("F32", [1.0, 2.0001])})
    b = checkpoint(tmp_path / "b", {"w/param": ("F16", [1.0, 2.0])})
    match = Match(a.entries["w", "param"], b.entries["w", "param"], "rounded")
    notes = said([OF_READER])
    equal = roundings({"notes": notes}, [Result(match, (1, 2), Difference())], a, b)
    assert equal["rounded"] == {"a": [], "b": ["w"]}
    first, second = equal["notes"]
    assert first == notes[0]
    assert second["message"].startswith(f"{b.root} has the rounded values of 1 weight of {a.root}")
    differs = roundings({"notes": notes}, [Result(match, (1, 2), Difference(1))], a, b)
    assert differs == {"rounded": {"a": [], "b": []}, "notes": notes}


def test_something_must_be_shared(tmp_path: Path) -> None:
    def need(a: Manifest, b: Manifest, *names: str) -> None:
        needs_weights([Match(a.entries[key], b.entries[key]) for key in map(key_of, names)], a, b)

    some = checkpoint(tmp_path / "a", {"w/param": ("F32", [1]), "e/param": ("F32", [])})
    moments = checkpoint(tmp_path / "b", {"w/exp_avg": ("F32", [1]), "e/param": ("F32", [])})
    need(some, some, "w/param")
    need(moments, moments, "e/param")
    for a, b, name in (
        (some, some, "e/param"),
        (some, moments, "e/param"),
        (moments, some, "e/param"),
        (moments, moments, "w/exp_avg"),
    ):
        with pytest.raises(MissingData, match="share no weights"):
            need(a, b, name)


@pytest.mark.parametrize("are_copies", [True, False])
def test_names_that_both_have_inferred_prove_nothing(are_copies: bool, tmp_path: Path) -> None:
    """Of parameters whose states were compared: a wrong name is then wrong in both."""
    tensors = {f"{name}/{slot}": ("F32", [1.0]) for name in "wvu" for slot in ("param", "exp_avg")}
    own = checkpoint(tmp_path / "a", tensors, inferred=("w", "v", "u"))
    states = [
        Match(own.entries[key], own.entries[key]) for key in (("w", "exp_avg"), ("v", "exp_avg"))
    ]
    asked: list[bool] = []

    def copies() -> bool:
        asked.append(True)
        return are_copies

    def unproven(other: Manifest, matches: list[Match]) -> list[str]:
        found = inferences(matches, own, other, copies)
        assert found["inferred"] == {"a": ["w", "v", "u"], "b": list(other.notices.inferred)}
        return [name for line in found["unproven"] for name in line["parameters"]]

    shared = [] if are_copies else ["w"]
    assert unproven(own.replace(inferred=("w", "u")), states) == shared
    everything = [] if are_copies else ["w", "v"]
    silent = own.replace(inferred=(), states_inferred=False)
    assert unproven(silent, states) == everything
    assert len(asked) == 2
    weights = [Match(own.entries["w", "param"], own.entries["w", "param"])]
    assert unproven(own, weights) == unproven(own.replace(inferred=()), states) == []
    assert len(asked) == 2  # nothing is read for it
