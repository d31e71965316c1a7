"""Which stage has which parameters of a made-up pipeline, if it is cut at other layers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from zckpt.core.checkpoint.entries import Entry
from zckpt.core.checkpoint.facts import ExpertLayer, FlatBufferEngine, Pipeline
from zckpt.core.checkpoint.grid import Grid
from zckpt.core.checkpoint.manifest import Manifest, Parameter, Run
from zckpt.core.checkpoint.origin import Origin
from zckpt.core.storage.fragments import Runs
from zckpt.errors import Notice, UnsupportedCheckpoint, WrongOption
from zckpt.formats.deepspeed.model_ranks.target_stages import cut_again, layers_of_names, recut
from zckpt.formats.options import options_of

EMBED = "tied_modules.embed.weight"
BOTH = ("master", "param")


@pytest.mark.parametrize(
    ("stages", "layers", "files", "bounds", "having", "inferred"),
    [
        # with experts no layer has a file: the first free layer and the last one of those that
        # have the tied layer, and the last one of each between them
        (([EMBED, "1"], ["3"], [EMBED, "5"]), (1, 3, 5), (), (0, 2, 4, 7, 9), "1001", 1),
        ((["1"], [EMBED, "3"], ["5"], [EMBED, "7"]), (1, 3, 5, 7), (), (0, 2, 4, 6, 9), "0101", 1),
        (
            ([EMBED, "1"], [EMBED, "3", "5"], [EMBED, "7"]),
            (1, 3, 5, 7),
            (),
            (0, 2, 4, 6, 8, 9),
            "10011",
            1,
        ),
        # one stage alone has it, and uses it twice
        ((["1"], [EMBED, "3"], ["5"]), (1, 3, 5), (), (0, 2, 3, 5, 6), "0110", 1),
        # a file shows one use; a stage of the source without a file for its copy shows the other
        (([EMBED, "1"], ["3"], [EMBED, "5"]), (0, 1, 3, 5), (0,), (0, 2, 4, 7), "101", 0),
        # two files show both
        (([EMBED, "1"], [EMBED, "3"]), (0, 1, 2, 3), (0, 2), (0, 1, 2, 4), "101", 0),
        # one stage does not show the other use: the last layer without a file is taken
        (([EMBED, "1", "3"],), (0, 1, 3), (0,), (0, 1, 2, 5), "101", 1),
        ((["1"], [EMBED, "3"], ["5"]), (1, 2, 3, 5), (2,), (0, 2, 4, 6), "011", 1),
        # files show both uses, and a layer without a file is something else
        (([EMBED, "1"],), (0, 1, 2), (0, 2), (0, 1, 2, 4), "101", 0),
        # a file shows one use, and no layer is left for another
        (([EMBED, "1", "2"],), (0, 1, 2), (0,), (0, 1, 3), "10", 0),
    ],
)
def test_which_stages_have_a_tied_layer(
    stages: tuple[list[str], ...],
    layers: tuple[int, ...],
    files: tuple[int, ...],
    bounds: tuple[int, ...],
    having: str,
    inferred: int,
) -> None:
    """`layers` have files, those of `files` are of the tied layer; `having` are the new stages."""
    new, lines = cut(stages, layers, files, pp_bounds=bounds)
    assert "".join(str(int(EMBED in names)) for names in new.parameters) == having
    assert len(lines) == inferred


def cut(
    stages: Sequence[Sequence[str]], layers: Sequence[int], files: Sequence[int], **options: Any
) -> tuple[Pipeline, list[Notice]]:
    """The new stages of a pipeline with a tied layer, and what had to be inferred."""
    named = [[name if name == EMBED else f"{name}.weight" for name in stage] for stage in stages]
    parameters = {name: Parameter((2,), group=0) for stage in named for name in stage}
    model = Manifest("run", "deepspeed", Run(), {}, parameters)
    pipeline = Pipeline(named, (), layers, dict.fromkeys(files, "embed"))
    return cut_again(model, pipeline, True, options_of(options))


def test_what_is_said_of_a_use_that_no_file_shows() -> None:
    _, (line,) = cut([[EMBED, "1", "3"]], (0, 1, 3), (0,), pp_bounds=(0, 1, 2, 5))
    assert "again at layer 4, which has no file, so stage 2 gets a copy of it" in line.message
    names = [EMBED, *map(str, (0, 2, 3, 4, 5, 6, 7))]
    _, (line,) = cut([names], (0, *range(2, 8)), (), pp_bounds=(0, 4, 9))
    assert (
        "zckpt assumes that the tied layer embed is used at the layers 1 and 8, which"
        in line.message
    )
    assert (line.code, line.subject) == ("place-inferred", "embed")


def test_a_tied_layer_beside_the_only_layer() -> None:
    whole, _ = cut([[EMBED, "0"]], (0,), (), pp=1)
    assert whole.parameters == [[EMBED, "0.weight"]]


def test_tied_layers_stand_as_they_are_first_used() -> None:
    """In a stage that has all, too, whatever order the whole model has."""
    head = "tied_modules.head.weight"
    names = [head, "3.weight", EMBED, "1.weight"]
    model = Manifest("run", "deepspeed", Run(), {}, {n: Parameter((2,), group=0) for n in names})
    stages = [[EMBED, "1.weight"], [head, "3.weight"]]
    before = Pipeline(stages, (), range(4), {0: "embed", 2: "head"})
    after, _ = cut_again(model, before, True, options_of({"pp": 1}))
    assert after.parameters == [[EMBED, head, "1.weight", "3.weight"]]


def test_a_tied_layer_without_a_place() -> None:
    """All layers of its stages have names: only one stage, which has everything, needs none."""
    stages = [EMBED, "0", "1"], ["2"], [EMBED, "3"]
    with pytest.raises(WrongOption, match=r"unknown layer\. By the .* has parameter names"):
        cut(stages, range(4), (), pp_bounds=(0, 2, 4))
    whole, inferred = cut(stages, range(4), (), pp=1)
    assert (whole.parameters[0][0], inferred) == (EMBED, [])


def pipeline(*stages: str, **fields: Any) -> tuple[Manifest, Pipeline]:
    """A model of one stage after the other, whose tensors are called `1.a`; each file is there."""
    named = [stage.split() for stage in stages]
    names = [name for stage in named for name in stage]
    numbers = sorted({int(name.partition(".")[0]) for name in names})
    parameters = {name: Parameter((2,), group=0) for name in names}
    args = {"pipeline_model_parallel_size": len(stages), "lr": 0.1}
    state = {"module": names, "client_state": {"args": args}}
    engine = FlatBufferEngine("deepspeed", "0.19.8", None, "BF16", False, None, {})
    made = Manifest(
        "run", "deepspeed", Run(Origin(dp=1), engine=engine), {}, parameters, state=state
    )
    buffers = [[] for _ in stages[1:]]
    return made.replace(**fields), Pipeline(named, [["2.count"], *buffers], numbers)


def test_parameters_stand_by_group_and_then_as_their_layers_do() -> None:
    """Frozen ones are in files of layers, and the optimizer's shapes do not list them."""
    model, before = pipeline("1.a 1.b", "2.a 3.a")
    groups = {"1.a": 1, "1.b": 0, "2.a": 0, "3.a": 1}
    parameters = {name: Parameter((2,), group=group) for name, group in groups.items()}
    model = replace(model, parameters={**parameters, "2.frozen": Parameter((2,), False)})
    for has_files, frozen in ((True, []), (False, ["2.frozen"])):
        after, _ = cut_again(model, before, has_files, options_of({"pp": 1}))
        assert sorted(after.parameters[0]) == sorted([*groups, *frozen])
    after, _ = cut_again(model, before, True, options_of({"pp": 1}))
    assert after.parameters == [["1.b", "2.a", "1.a", "3.a"]]


def test_buffers_go_with_their_layers() -> None:
    model, before = pipeline("1.a 2.a", "3.a")
    after, _ = cut_again(model, before, True, options_of({"pp_bounds": (0, 2, 3, 4)}))
    assert (after.parameters, after.buffers) == ([["1.a"], ["2.a"], ["3.a"]], [[], ["2.count"], []])


def test_an_order_that_is_not_the_layers() -> None:
    with pytest.raises(UnsupportedCheckpoint, match="not in the order of the layers"):
        cut_again(*pipeline("2.a 1.a", "3.a"), True, options_of({"pp": 1}))


def test_frozen_parameters_may_stand_anywhere() -> None:
    """No flat buffer has them."""
    model, before = pipeline("2.a 1.a", "3.a")
    model = replace(model, parameters={**model.parameters, "2.a": Parameter((2,), False)})
    after, _ = cut_again(model, before, False, options_of({"pp": 1}))
    assert [sorted(names) for names in after.parameters] == [["1.a", "2.a", "3.a"]]


def test_parameters_without_groups() -> None:
    """Files of an elastic save may have none."""
    model, before = pipeline("1.a 2.a", "3.a")
    model = replace(model, parameters=dict.fromkeys(model.parameters, Parameter((2,))))
    after, _ = cut_again(model, before, True, options_of({"pp": 1}))
    assert after.parameters == [["1.a", "2.a", "3.a"]]


def test_a_stage_without_a_trained_parameter() -> None:
    with pytest.raises(WrongOption, match="the layers 2 to 2 of run have no trained parameter"):
        cut_again(*pipeline("1.a", "3.a"), True, options_of({"pp_bounds": (0, 2, 3, 4)}))


def test_ranks_of_a_grid_stand_stage_by_stage() -> None:
    """Each stage has a rank of every tensor rank, and states how many stages there are."""
    model, before = pipeline("1.a", "2.a")
    models = [model, replace(model, root="second")]
    options = options_of({"pp_bounds": (0, 2, 3)})
    grid, ranks, _ = recut(model, models, before, Grid(2, 2, staged=True), options)
    assert grid == Grid(2, 2, staged=True)
    assert [(rank.root, [*rank.parameters]) for rank in ranks] == [
        ("run", ["1.a"]), ("second", ["1.a"]), ("run", ["2.a"]), ("second", ["2.a"]),
    ]  # fmt: skip
    assert [rank.place and rank.place.number for rank in ranks] == [0, 1, 2, 3]
    grid, (one, _), _ = recut(model, models, before, grid, options_of({"pp": 1}))
    args = {"pipeline_model_parallel_size": 1, "lr": 0.1}
    assert (grid.pp, one.state["client_state"]["args"]) == (1, args)


def test_a_stage_has_the_experts_of_its_layers() -> None:
    model, before = pipeline("1.moe.a 2.a", "3.moe.a")
    layers = ExpertLayer("1.moe", 4, 2), ExpertLayer("3.moe", 4, 4)
    assert model.run.engine is not None
    extra = {"1.moe.a": "state", "3.moe.a": "other"}
    model = model.replace(
        origin=Origin(dp=4, ep=4),
        engine=replace(model.run.engine, experts=layers),
        state={**model.state, "module_extra": extra},
    )
    _, ranks, _ = recut(model, [model], before, Grid(2), options_of({}))
    assert [rank.run.engine.experts for rank in ranks] == [layers[:1], layers[1:]]  # type: ignore[union-attr]
    assert [rank.run.origin.ep for rank in ranks] == [2, 4]
    assert [[*rank.state["module_extra"]] for rank in ranks] == [["1.moe.a"], ["3.moe.a"]]


def test_layers_of_names() -> None:
    model, _ = pipeline("1.a 8.a")
    tied = replace(model, parameters={**model.parameters, EMBED: Parameter((2,))})
    assert layers_of_names(tied, options_of({"pp": 2})) == [1, 8]
    for names in (["a"], ["1.a", "norm"], [EMBED]):
        other = replace(model, parameters=dict.fromkeys(names, Parameter((2,))))
        with pytest.raises(WrongOption, match="--pp does not apply to run, which is not a pipe"):
            layers_of_names(other, options_of({"pp": 2}))


def test_weights_of_stages_are_in_their_model_files_unless_layers_have_files() -> None:
    model, before = pipeline("1.a 2.a", "3.a")
    slots = [Entry(n, slot, "F32", (2,), Runs([])) for n in ["1.a", "2.a", "3.a"] for slot in BOTH]
    model = replace(model, entries={entry.key: entry for entry in slots})
    for staged, kept in ((True, ["master"]), (False, list(BOTH))):
        _, ranks, _ = recut(model, [model], before, Grid(2, 1, staged), options_of({}))
        assert [sorted({e.slot for e in rank.entries.values()}) for rank in ranks] == [kept, kept]
        assert [list(rank.parameters) for rank in ranks] == [["1.a", "2.a"], ["3.a"]]


def test_a_stage_has_the_largest_size_of_its_own_experts() -> None:
    model, before = pipeline("1.e.a 2.e.a", "3.a")
    layers = (ExpertLayer("1.e", 4, 2), ExpertLayer("2.e", 4, 4))
    assert model.run.engine is not None
    engine = replace(model.run.engine, experts=layers)  # type: ignore[type-var]
    model = model.replace(engine=engine, origin=Origin(dp=4, ep=8))
    _, ranks, _ = recut(model, [model], before, Grid(2, 1), options_of({}))
    assert [rank.source.get("ep") for rank in ranks] == [4, None]
