"""Model ranks that are not joined: tensors of one name on several ranks, and none is forgotten."""

from __future__ import annotations

import shutil
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from zckpt import formats
from zckpt.core.checkpoint import states
from zckpt.core.checkpoint.entries import Entry, key_of
from zckpt.core.checkpoint.facts import FlatBufferEngine, Pipeline, TensorParallel, Vocabulary
from zckpt.core.checkpoint.grid import Grid, GridPlace
from zckpt.core.checkpoint.inert import Global
from zckpt.core.checkpoint.manifest import Manifest, Parameter, Run
from zckpt.core.checkpoint.missing_states import missing_states
from zckpt.core.checkpoint.optimizer_states import StateRow, States
from zckpt.core.checkpoint.origin import Origin
from zckpt.core.checkpoint.placement import Cut
from zckpt.core.comparison import duplicates, masters
from zckpt.core.passes import plan
from zckpt.core.passes.description import Report
from zckpt.core.passes.layout import Layout
from zckpt.core.storage.checksum import crc_of_zeros
from zckpt.core.storage.fragments import Extent, Record, solid
from zckpt.errors import (
    CorruptCheckpoint,
    InconsistentCheckpoint,
    MissingData,
    UnsupportedState,
    WrongOption,
)
from zckpt.naming.names import renamed
from zckpt.naming.order import in_order_of
from zckpt.reading import _check_names
from zckpt.training import objects, steps
from zckpt.training.options import DROP_STATE, Options
from zckpt.writing.state_loss import Keeping, unable_to_step

from .conftest import texts

MOMENTS = ("exp_avg", "exp_avg_sq")
STAGES = Grid(pp=2, tp=2)
SHAPE = (4,)


class Files:
    """Tensors in files of ranks, each with its checksum."""

    def __init__(self, root: Path) -> None:
        self.root, self.records = root, list[Record]()

    def entry(self, name: str, rank: int, value: torch.Tensor) -> Entry:
        data = bytes(value.contiguous().view(torch.uint8).numpy())
        path = self.root / f"rank{rank}-{name.replace('/', '-')}"
        path.write_bytes(data)
        extent = Extent(str(path), 0, len(data))
        self.records.append(Record(extent, zlib.crc32(data)))
        dtype = {torch.float32: "F32", torch.bfloat16: "BF16"}[value.dtype]
        return Entry(*key_of(name), dtype, tuple(value.shape), solid(value.numel(), extent))


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


def grid(files: Files, grid: Grid = STAGES, **fields: Any) -> Manifest:
    """Ranks with the same names, of which each has other numbers."""
    ranks = []
    for number in range(grid.pp * grid.tp):
        own = {}
        generator = torch.Generator().manual_seed(number)
        for name in ("a", "b"):
            wide, *moments = torch.rand((3, *SHAPE), generator=generator)
            own |= {f"{name}/master": wide, f"{name}/param": wide.bfloat16()}
            own |= {f"{name}/{slot}": each for slot, each in zip(MOMENTS, moments, strict=True)}
        entries = {key_of(name): files.entry(name, number, value) for name, value in own.items()}
        parameters = {name: Parameter(SHAPE, group=0, step=3) for name in ("a", "b")}
        rank = Manifest(str(files.root), "x", Run(), entries, parameters, groups=({"lr": 1.0},))
        ranks.append(replace(rank, place=GridPlace(number, grid)))
    own_files = tuple(record.extent.file for record in files.records)
    whole = Manifest(str(files.root), "x", Run(), {}, {}, ranks=tuple(ranks), groups=({"lr": 1.0},))
    return whole.replace(records=tuple(files.records), paths=own_files, **fields)


def changed(manifest: Manifest, number: int, **fields: Any) -> Manifest:
    """With other fields of one rank."""
    ranks = [*manifest.ranks]
    ranks[number] = ranks[number].replace(**fields)
    return replace(manifest, ranks=tuple(ranks))


def without(manifest: Manifest, number: int, name: str) -> Manifest:
    """One rank lacks a tensor."""
    entries = manifest.ranks[number].entries
    return changed(
        manifest, number, entries={n: e for n, e in entries.items() if n != key_of(name)}
    )


def test_sentences_say_which_rank_is_meant() -> None:
    assert GridPlace(3, STAGES).titled("a") == "pipeline stage 1, tensor rank 1: a"
    assert GridPlace(1, Grid(pp=2)).titled("a") == "pipeline stage 1: a"
    assert GridPlace(1, Grid(tp=2)).titled("a") == "tensor rank 1: a"
    assert GridPlace(0, Grid(staged=True)).titled("a") == "a"


def test_each_rank_is_filled_from_the_same_one(files: Files) -> None:
    source = grid(files)
    target = grid(Files(files.root))
    pairs = plan.join(source, target, from_masters=False)
    assert len(pairs) == len(source.ranks) * 8
    for pair in pairs:
        assert pair.source is source.ranks[pair.rank].entries[pair.target.key]
        assert pair.target is target.ranks[pair.rank].entries[pair.target.key]
    with pytest.raises(ValueError, match="shorter"):
        plan.join(source, replace(target, ranks=target.ranks[:3]), from_masters=False)
    lost = without(source, 2, "b/exp_avg")
    with pytest.raises(MissingData, match="no exp_avg of pipeline stage 1, tensor rank 0: b"):
        plan.join(lost, target, from_masters=False)


@pytest.mark.parametrize("number", range(4))
def test_the_masters_of_each_rank_are_compared_with_its_weights(files: Files, number: int) -> None:
    manifest = grid(files)
    assert masters.check(manifest, masters.BEGINNINGS, "hint", accepted=False) == []
    other = files.entry("a/param", 9, torch.ones(SHAPE).bfloat16())
    entries = {**manifest.ranks[number].entries, ("a", "param"): other}
    words = f"pipeline stage {number // 2}, tensor rank {number % 2}: a"
    with pytest.raises(InconsistentCheckpoint, match=f"1 weight .* rounded master: {words}"):
        masters.check(
            changed(manifest, number, entries=entries), masters.ALL, "hint", accepted=False
        )
    siblings = (other,)
    entries = {n: e for n, e in manifest.ranks[number].entries.items() if n != ("a", "param")}
    beside = changed(manifest, number, entries=entries, sibling_weights=siblings)
    with pytest.raises(InconsistentCheckpoint, match=words):
        masters.check(beside, masters.ALL, "hint", accepted=False)


def test_all_elements_of_each_rank_are_compared(files: Files) -> None:
    wide = torch.rand(300)
    narrow = wide.bfloat16()
    narrow[200] += 1
    values = {"a/master": wide, "a/param": narrow}
    entries = {key_of(name): files.entry(name, 9, value) for name, value in values.items()}
    manifest = changed(grid(files), 3, entries=entries)
    assert masters.unlike(manifest, masters.BEGINNINGS) == []
    ((rank, result),) = masters.unlike(manifest, masters.ALL)
    assert rank is manifest.ranks[3]
    assert result.difference is not None
    assert result.difference.first == 200


@pytest.mark.parametrize("number", range(4))
def test_a_lost_state_of_one_rank(files: Files, number: int) -> None:
    source = grid(files)
    assert states.missing_in(source, source) == []
    target = without(source, number, "b/exp_avg")
    (lost,) = states.missing_in(source, target)
    assert (lost.key, lost.tensors) == ("exp_avg", {"b": (("b", "exp_avg"),)})
    (line,), _ = missing_states(target)
    words = f"pipeline stage {number // 2}, tensor rank {number % 2}: b"
    assert line.message.startswith(f"{words}: the optimizer's exp_avg is missing")


def test_a_state_that_only_later_ranks_have(files: Files) -> None:
    manifest = grid(files)
    for number in range(1, 4):
        own = [files.entry(f"{name}/sum", number, torch.ones(SHAPE)) for name in "ab"]
        entries = {**manifest.ranks[number].entries, **{entry.key: entry for entry in own}}
        manifest = changed(manifest, number, entries=entries)
    (line,), _ = missing_states(without(manifest, 3, "b/sum"))
    lost = "tensor rank 0: a", "tensor rank 0: b", "pipeline stage 1, tensor rank 1: b"
    assert [each for each in lost if each not in line.message] == []
    assert "the optimizer's sum is missing" in line.message


def test_states_are_counted_by_name(files: Files) -> None:
    source = grid(files)
    assert {state.key: state.count for state in states.states_of(source).values()} == dict.fromkeys(
        MOMENTS, 2
    )
    own = without(source, 3, "b/exp_avg")
    bare = changed(own, 3, states=States((StateRow("exp_avg", "unsupported", ("b",), "", "why"),)))
    assert states.states_of(bare)["exp_avg"].form == "unsupported"
    dropped = states.without(replace(source, models=source.ranks[:1]), ["exp_avg"])
    for rank in (*dropped.ranks, *dropped.models):
        assert "exp_avg" not in states.states_of(rank)
        assert len(rank.entries) == 6


def test_other_stages_lack_what_no_stage_has(files: Files) -> None:
    """The ranks of the target have other parameters: names decide."""
    source = grid(files)
    target = changed(source, 1, parameters={"a": source.ranks[1].parameters["a"]})
    assert states.missing_in(source, target) == []
    gone = target.map_ranks(lambda rank: states.without(rank, ["exp_avg"]))
    assert [state.key for state in states.missing_in(source, gone)] == ["exp_avg"]
    for number in range(4):  # b is of the last stage alone
        first = {"a": source.ranks[number].parameters["a"]}
        target = changed(
            target, number, parameters=first if number < 2 else target.ranks[3].parameters
        )
        target = without(target, number, "b/exp_avg")
    (lost,) = states.missing_in(source, target)
    assert (lost.key, [*lost.tensors]) == ("exp_avg", ["b"])


def test_files_of_two_ranks_with_the_same_bytes_are_found(files: Files) -> None:
    """One file of two tensors each; their names are equal, as those of tensor ranks are."""
    entries = []
    for number in range(2):
        data = bytes(range(1, 33))
        path = files.root / f"all{number}"
        path.write_bytes(data)
        extents = [Extent(str(path), start, 16) for start in (0, 16)]
        files.records += [
            Record(extent, zlib.crc32(data[extent.offset :][:16])) for extent in extents
        ]
        names = ("a/exp_avg", "b/exp_avg")
        pairs = zip(names, extents, strict=True)
        entries.append(
            {
                key_of(name): Entry(*key_of(name), "F32", SHAPE, solid(4, extent))
                for name, extent in pairs
            }
        )
    manifest = grid(files, Grid(tp=2))
    assert duplicates.check_duplicates(manifest) == []
    for number in range(2):
        manifest = changed(manifest, number, entries=entries[number])
    with pytest.raises(InconsistentCheckpoint, match="the same bytes as"):
        duplicates.check_duplicates(manifest)


def test_one_state_of_any_rank_that_is_a_copy_is_said(files: Files) -> None:
    manifest = grid(files)
    for number, rank in enumerate(manifest.ranks):
        (a, b) = (next(iter(rank.entries[name, "exp_avg"].fragments)) for name in "ab")
        shutil.copyfile(a.extent.file, b.extent.file)
        crcs = {record.extent: record.crc for record in manifest.files.records}
        records = [
            replace(each, stated_crc=crcs[a.extent]) if each.extent == b.extent else each
            for each in manifest.files.records
        ]
        (line,) = duplicates.check_duplicates(manifest.replace(records=tuple(records)))
        assert f"{b.extent.file} holds the same bytes as {a.extent.file}" in line.message, number


def test_an_optimizer_is_never_stepped_if_all_ranks_say_so(files: Files) -> None:
    once = grid(files).map_ranks(
        lambda rank: replace(
            rank, parameters={n: replace(p, step=1) for n, p in rank.parameters.items()}
        )
    )
    assert once.step == 1
    last = {name: replace(item, step=2) for name, item in once.ranks[3].parameters.items()}
    assert changed(once, 3, parameters=last).step is None
    zero = crc_of_zeros(16)
    digests = {n: {(name, slot): zero for name in "ab" for slot in MOMENTS} for n in range(4)}
    assert steps.never_stepped(once, digests)
    for n, own in digests.items():
        for key in own:
            assert steps.never_stepped(once, {**digests, n: {**own, key: 1}}) is None


def test_names_that_are_no_text(files: Files) -> None:
    manifest = grid(files)
    _check_names(manifest)
    with pytest.raises(CorruptCheckpoint, match="not valid text"):
        _check_names(changed(manifest, 3, buffers=("\ud800",)))


def test_second_names_of_any_rank_are_known(files: Files) -> None:
    tied = {"a": Parameter(SHAPE, group=0, aliases=("head",))}
    manifest = changed(grid(files), 3, parameters=tied)
    assert manifest.owners == {"head": "a"}
    found = renamed(manifest, [("^head", "out")])
    assert found.owners == {"out": "a"}


def test_names_change_on_all_ranks(files: Files) -> None:
    manifest = grid(files)
    weight = (files.entry("a/param", 9, torch.ones(SHAPE)),)
    manifest = changed(manifest, 1, sibling_weights=weight)
    manifest = replace(manifest, models=(changed(manifest, 0, buffers=("a.frozen",)).ranks[0],))
    found = renamed(manifest, [("^a", "c")])
    for rank in (*found.ranks, *found.models):
        assert [*rank.parameters] == ["c", "b"]
        assert {name for name, _ in rank.entries} == {"c", "b"}
    assert found.models[0].buffers == ("c.frozen",)
    assert found.ranks[1].files.sibling_weights[0].name == "c/param"
    with pytest.raises(WrongOption, match="b, a would become one name"):
        renamed(changed(manifest, 0, parameters={"b": Parameter(SHAPE)}), [("^[ab]$", "c")])


def test_what_the_state_says_of_parameters_has_their_names(files: Files) -> None:
    def facts(name: str) -> dict[str, Any]:
        stages, buffers = [[name], []], [[], [f"{name}.b"]]
        return {
            "pipeline": Pipeline(stages, buffers, [0], {0: "a"}),
            "tensor_parallel": TensorParallel({name: Cut(0)}, {name: Vocabulary(3, 2)}),
            "state": {"universal": {"files": {name: {"cat_dim": 0}}, "model_parallel": 2}},
        }

    manifest = grid(files).replace(**facts("a"))
    found = renamed(changed(manifest, 1, **facts("a"), buffers=("a.b",)), [("^a", "c")])
    for own in (found, found.ranks[1]):
        assert own == own.replace(**facts("c"))


def test_an_order_is_that_of_all_ranks(files: Files) -> None:
    """A tied parameter may be named once per stage; each tensor rank has the names of its stage."""
    manifest = grid(files)
    for names in (["b", "a"], ["b", "a", "b", "a"]):
        found = in_order_of(manifest, names)
        assert [[*rank.parameters] for rank in found.ranks] == [["b", "a"]] * 4
    for wrong, says in ((["b"], "does not name a"), (["b", "a", "c"], "names c, which")):
        with pytest.raises(WrongOption, match=says):
            in_order_of(manifest, wrong)
    with pytest.raises(WrongOption, match="names b twice"):
        in_order_of(grid(Files(files.root), Grid(tp=2)), ["b", "a", "b"])


def test_objects_of_any_rank_stay_behind(files: Files) -> None:
    own = {"client_state": {"own": Global("os.system"), "step": 3}}
    manifest = changed(grid(files), 3, state=own, groups=({"lr": 1.0, "f": Global("os.system")},))
    found = objects.without_others(manifest, (), ())
    assert found.ranks[3].state == {"client_state": {"step": 3}}
    assert found.ranks[3].groups == ({"lr": 1.0},)
    assert [line.partition(":")[0] for line in texts(found.ranks[3].notices.omitted)] == [
        "client_state.own",
        "param_groups.0.f",
    ]


def keeping(named: Manifest, **options: Any) -> tuple[Keeping, Report]:
    """What looks at the target of a grid, whose pickles have no object of a class."""
    report: Report = {"left_out": [], "warnings": []}
    admitted = objects.without_others(named, (), ())
    chosen = Options(tuple(options.items()))
    format = formats.named("deepspeed")
    return Keeping(named, named, named, admitted, format, chosen, report), report


def read_back(keeping: Keeping, shells: Manifest) -> None:
    keeping.read_back(Layout(lambda: iter(()), [], [], [], read_back=lambda _: shells))("")


@pytest.mark.parametrize("number", range(4))
def test_objects_of_a_groups_or_a_state_of_any_rank_end_the_run(files: Files, number: int) -> None:
    whole, value = grid(files), Global("own.Schedule")
    for fields, says in (
        ({"groups": ({"lr": 1.0, "plan": value},)}, "cannot store plan of the optimizer's groups"),
        ({"states": States((StateRow("plan", "other", ("b",), value),))}, "optimizer's plan of b"),
    ):
        named = changed(whole, number, **fields)
        looks, _ = keeping(named)
        with pytest.raises(UnsupportedState, match=says) as ended:
            read_back(looks, looks.admitted)
        assert "--allow-object own.Schedule" in str(ended.value.hint)
        read_back(looks, replace(named, groups=None) if "groups" in fields else named)


@pytest.mark.parametrize("number", range(4))
def test_numbers_of_any_rank_that_a_target_lacks(files: Files, number: int) -> None:
    whole = grid(files)
    named = changed(whole, number, states=States((StateRow("rho", "beside", value=3),)))
    looks, report = keeping(named)
    read_back(looks, named)
    assert report["left_out"] == []
    read_back(looks, whole)
    assert texts(report["left_out"]) == [
        "rho: numbers of the optimizer that belong to no parameter"
    ]


def test_an_optimizer_without_its_states_cannot_take_a_step(files: Files) -> None:
    options = Options(((DROP_STATE, MOMENTS),))
    bare = replace(states.without(grid(files), MOMENTS), optimizer="Adam")
    (line,) = unable_to_step(bare, options)
    assert line.message.startswith("Adam cannot take a step without exp_avg and exp_avg_sq")


@pytest.mark.parametrize("number", range(4))
def test_states_of_matrices_of_any_rank(files: Files, number: int) -> None:
    """An optimizer of flat buffers has kept them as if of vectors."""
    engine = FlatBufferEngine("deepspeed", None, None, "BF16", False, None, {})
    groups = ({"clip_threshold": 1.0},)
    manifest = grid(files).replace(engine=engine, origin=Origin(zero_stage=1))
    vector = {"a": Parameter(SHAPE, group=0)}
    manifest = manifest.map_ranks(lambda rank: replace(rank, groups=groups, parameters=vector))
    assert states.of_vectors(manifest, grid(Files(files.root))) == []
    matrix = {"b": Parameter((2, 2), group=0)}
    own = changed(manifest, number, parameters=matrix)
    (state,) = states.of_vectors(own, grid(Files(files.root)))
    assert (state.key, state.parameters) == ("exp_avg_sq", ["b"])
