"""What ranks have of a whole: shapes, order, empty slices; and `merge` makes the whole of them."""

from __future__ import annotations

from hypothesis import given
from msgspec.structs import replace

from zckpt.core.checkpoint.entries import Entry, name_of
from zckpt.core.checkpoint.facts import NamedWeightsEngine
from zckpt.core.checkpoint.manifest import Manifest, Parameter
from zckpt.core.checkpoint.placement import Row
from zckpt.core.checkpoint.weights import WEIGHTS
from zckpt.core.ranks.merge import in_order, merge
from zckpt.core.ranks.split import names_in, part

from .grids import Grid, cut_up, grid, grids, numbers


@given(grids())
def test_merge_is_the_inverse(made: Grid) -> None:
    """A sum of parts has the first one's numbers; every other holder has a copy."""
    whole, files = in_order(made.whole), made.files
    merged = in_order(merge(made.ranks, made.table))
    assert merged.parameters == whole.parameters
    assert merged.groups == whole.groups
    assert {**merged.state, "module": 0} == {**whole.state, "module": 0}
    orders = [
        [*m.parameters, *m.buffers, *map(name_of, m.entries), *m.state["module"]]
        for m in (merged, whole)
    ]
    if all(len(names_in(rank)) == len(names_in(whole)) for rank in made.ranks):
        assert orders[0] == orders[1]
    assert sorted(orders[0]) == sorted(orders[1])
    for name, entry in merged.entries.items():
        expected, sliced = whole.entries[name], made.table.cuts.get(entry.parameter)
        copies = [copy for copy in merged.replicas if copy.key == name]
        is_alone = sliced is not None and sliced.placement.is_sum and entry.slot in WEIGHTS
        holders = sum(name in rank.entries for rank in made.ranks)
        is_cut = sliced is not None and sliced.placement.is_cut
        assert len(copies) == (0 if is_cut or is_alone else holders - 1)
        for each in (entry, *copies):
            assert (each.dtype, each.shape) == (expected.dtype, expected.shape)
            assert numbers(files, each) == numbers(files, expected)


def whole() -> Manifest:
    placements = [cut_up(name, (4,), 0, [[4]]) for name in ("a", "b", "buffer")]
    return grid(placements, ("param", "master")).whole


def test_an_empty_slice_is_a_frozen_parameter_of_the_modules_type() -> None:
    """The module has it, and no optimizer owns it."""
    engine = NamedWeightsEngine("x", None, None, "BF16", None)
    own = part(whole().replace(engine=engine), Row(["a", "b"], {"a": (0,), "b": (2,)}))
    assert own.parameters["a"] == Parameter((0,), trainable=False)
    assert own.parameters["b"].trainable
    assert [(each.name, each.dtype, each.shape) for each in own.entries.values()] == [
        ("a/param", "BF16", (0,)),
        ("b/param", "I32", (2,)),
        ("b/master", "I32", (2,)),
    ]


def test_rows_name_parameters_buffers_and_what_the_module_has_else() -> None:
    made = grid([cut_up(name, (2,), 0, [[2]]) for name in ("a", "buffer")]).whole
    assert names_in(made) == ["a", "buffer"]
    assert names_in(replace(made, state={"module": ["frozen", "a"]})) == ["a", "buffer", "frozen"]
    assert names_in(replace(made, state={})) == ["a", "buffer"]


def test_every_rank_has_the_states() -> None:
    """Also one whose name is that of a slice."""
    source = whole()
    state = Entry("a", "state", "I32", (4,), source.entries["a", "param"].fragments)
    own = part(replace(source, entries={state.key: state}), Row(["a"], {"a": (2,)}))
    assert own.entries == {state.key: state}
    assert part(replace(source, entries={state.key: state}), Row(["b"])).entries == own.entries
    empty = part(replace(source, entries={state.key: state}), Row(["a"], {"a": (0,)}))
    assert empty.entries == own.entries


def test_a_slice_has_no_bytes() -> None:
    source = whole()
    full = replace(source.entries["a", "param"], digest=7, mean=(source.entries["b", "param"],))
    source = replace(source, entries={full.name: full}, replicas=(full,))
    own = part(source, Row(["a"], {"a": (2,)}))
    (entry,) = own.entries.values()
    assert ([*entry.fragments], entry.digest, entry.mean, own.replicas) == ([], None, (), ())


def test_a_rank_has_its_parameters_in_its_order() -> None:
    source = whole()
    own = part(source, Row(["b", "a"]))
    assert [*own.parameters] == ["b", "a"]
    assert own.buffers == ()
    assert own.state["module"] == ["a", "b"]
    assert own.entries["a", "param"] == source.entries["a", "param"]  # whole, with its bytes


def test_weights_that_lie_beside_ranks() -> None:
    """A row without weights has those alone that no master stands for."""
    source, row = whole(), Row(["a"], has_weights=False)
    assert [*part(source, row).entries] == [("a", "master")]
    weights = {name: entry for name, entry in source.entries.items() if entry.slot == "param"}
    assert [*part(replace(source, entries=weights), row).entries] == [("a", "param")]


def test_what_is_empty_in_the_whole_is_no_empty_slice() -> None:
    """An optimizer may own it, whatever its other axes are."""
    placements = [cut_up("none", (0, 2), 0, [[0, 0]]), cut_up("one", (4, 1), 0, [[0, 4]])]
    first = grid(placements, ("param", "master")).ranks[0]
    assert [own.trainable for own in first.parameters.values()] == [True, False]
    assert [*first.entries] == [("none", "param"), ("none", "master"), ("one", "param")]


def test_a_whole_that_lists_no_module() -> None:
    assert part(replace(whole(), state={"x": 1}), Row(["a"])).state == {"x": 1, "module": []}
