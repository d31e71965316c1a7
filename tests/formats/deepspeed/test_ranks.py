"""Whether the contents of model ranks show the grid that the names of their files show."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from zckpt.core.checkpoint.grid import Grid
from zckpt.errors import IncompleteCheckpoint, InconsistentCheckpoint, ZckptError
from zckpt.formats.deepspeed.files import GridFiles
from zckpt.formats.deepspeed.ranks import check_grid
from zckpt.formats.deepspeed_states.directories import TagDirectory
from zckpt.formats.deepspeed_states.states import EngineStates, ModuleOverrides

DIRECTORY = TagDirectory("/run/tag", "tag", "/run")


def rank(number: int, names: str, **stated: Any) -> EngineStates:
    file: Any = SimpleNamespace(path=f"/run/tag/mp_rank_{number:02d}_model_states.pt")
    shapes = [dict.fromkeys(names.split(), (2,))]
    model = {"param_shapes": shapes, "mp_world_size": 4, **stated}
    return EngineStates(DIRECTORY, [file], [], model, [], [], "0.19.8", 1, False)


FIRST, LAST = "tied_modules.embed.weight 0.weight 1.weight", "tied_modules.embed.weight 2.weight"


def checked(*names: str, grid: Grid | None = None, **stated: Any) -> None:
    """Checks model ranks with these parameters; `stated` is of the last one."""
    grid = grid or Grid(2, 2, staged=True)
    last = len(names) - 1
    ranks = [rank(n, own, **(stated if n == last else {})) for n, own in enumerate(names)]
    check_grid(DIRECTORY, GridFiles([], {(0, 0): "layer"} if grid.staged else {}, grid), ranks)


STATED = {
    "module": {"a": 1, "b": 2},
    "buffer_names": ["b"],
    "shared_params": {"c": "a"},
    "frozen_param_shapes": {"d": (3,)},
}


def test_the_module_is_what_the_file_says() -> None:
    own = rank(0, "a", **STATED)
    assert own.module is STATED["module"]
    assert (own.buffer_names, own.second_names) == (["b"], {"c": "a"})
    assert (own.frozen_shapes, own.listed_shapes) == ({"d": (3,)}, [{"a": (2,)}])
    bare = rank(0, "a", buffer_names=None, shared_params=None)
    assert (bare.module, [*bare.buffer_names], bare.second_names) == ({}, [], {})
    assert bare.frozen_shapes is None


def test_what_was_found_counts_also_if_it_is_nothing() -> None:
    """Each by itself; the model file's own words stay as they are."""
    stated = rank(0, "a", **STATED)
    own = replace(stated, overrides=ModuleOverrides(module={}, buffer_names=(), second_names={}))
    assert (own.module, own.buffer_names, own.second_names) == ({}, (), {})
    assert own.param_shapes() == [{"a": (2,)}]
    shapes = [{"e": (4,)}, {"f": (5, 6)}]
    own = replace(stated, overrides=ModuleOverrides(frozen_shapes={}, shapes=shapes))
    assert (own.frozen_shapes, own.param_shapes()) == ({}, shapes)
    assert own.module is STATED["module"]
    assert own.model == stated.model


def test_a_grid() -> None:
    checked(FIRST, FIRST, LAST, LAST)
    sizes = {"pp_degree": 2, "tp_degree": 2}
    checked(FIRST, FIRST, LAST, LAST, checkpoint_parallel_dimensions=sizes)
    checked("a b", "b a", "a b", "b a", grid=Grid(1, 4))


@pytest.mark.parametrize(
    ("names", "stated", "error", "said"),
    [
        ((FIRST, LAST, LAST, LAST), {}, InconsistentCheckpoint,
         "model rank 1 must have the parameters of model rank 0, .* 0.weight, 1.weight, 2.weight"),
        ((LAST, LAST, FIRST, FIRST), {}, InconsistentCheckpoint,
         "model rank 2 has layer 0, but the earlier stage of model rank 0 has layer 2"),
        ((FIRST, FIRST, FIRST, FIRST), {}, InconsistentCheckpoint, "model rank 2 has layer 0"),
        ((FIRST, FIRST, LAST, LAST), {"mp_world_size": 5}, IncompleteCheckpoint,
         r"lacks mp_rank_04_model_states\.pt \(it has 4 of 5 model ranks\)"),
        ((FIRST, FIRST, LAST, LAST), {"mp_world_size": 2}, InconsistentCheckpoint,
         "holds files of 4 model ranks, but its model files say there were 2"),
        ((FIRST, FIRST, LAST, LAST),
         {"checkpoint_parallel_dimensions": {"pp_degree": 4, "tp_degree": 1}},
         InconsistentCheckpoint, "pp 2 x tp 2, but .*mp_rank_03.* says pp 4 x tp 1"),
        ((FIRST, FIRST, LAST, LAST), {"module": {"weight": 1}}, InconsistentCheckpoint,
         "the weights of a run without a pipeline"),
    ],
)  # fmt: skip
def test_contents_that_show_another_one(
    names: tuple[str, ...], stated: dict[str, Any], error: type[ZckptError], said: str
) -> None:
    with pytest.raises(error, match=said) as raised:
        checked(*names, **stated)
    assert raised.value.hint


def test_lost_ranks_are_named() -> None:
    with pytest.raises(IncompleteCheckpoint) as raised:
        checked(FIRST, FIRST, LAST, LAST, mp_world_size=6)
    assert [*raised.value.paths] == [f"/run/tag/mp_rank_0{n}_model_states.pt" for n in (4, 5)]
    with pytest.raises(IncompleteCheckpoint, match="4 of 1000"):  # huge by damage, it costs nothing
        checked(FIRST, FIRST, LAST, LAST, mp_world_size=10**20)
