"""Which files belong to a model rank, by their names alone."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from zckpt.core.checkpoint.grid import Grid
from zckpt.errors import IncompleteCheckpoint, InconsistentCheckpoint, ZckptError
from zckpt.files.torchfile import Parsed
from zckpt.formats.deepspeed.files import (
    GridFiles,
    RankFiles,
    files_in,
    grid_files,
    rank_files,
)
from zckpt.formats.deepspeed_states.directories import TagDirectory


def optimizer(rank: int, model_rank: int = 0, begin: str = "") -> str:
    return f"{begin}zero_pp_rank_{rank}_mp_rank_{model_rank:02d}_optim_states.pt"


def model(model_rank: int = 0) -> str:
    return f"mp_rank_{model_rank:02d}_model_states.pt"


def model_of_stage_3(rank: int) -> str:
    return f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"


DIRECTORY = TagDirectory("/run/tag", "tag", "/run")


def found(names: list[str], model_rank: int = 0) -> RankFiles:
    shuffled = random.Random(0).sample(names, len(names))
    return rank_files(DIRECTORY, files_in(DIRECTORY, shuffled), Parsed())[model_rank]


def names_of(paths: object) -> list[str]:
    assert isinstance(paths, list)
    return [Path(path).name for path in paths]


def test_ranks_are_in_the_order_of_their_numbers() -> None:
    ranks = range(12)
    files = found([model(), *map(optimizer, ranks)])
    assert names_of(files.optimizers) == [*map(optimizer, ranks)]
    assert names_of(files.models) == [model()]


def test_stage_3_has_a_model_file_for_each_rank() -> None:
    files = found([*map(model_of_stage_3, range(3)), *map(optimizer, range(3))])
    assert names_of(files.models) == [*map(model_of_stage_3, range(3))]


def test_each_model_rank_has_its_own() -> None:
    names = [name for rank in (0, 1) for name in (model(rank), optimizer(0, rank))]
    assert names_of(found(names, 1).paths) == [model(1), optimizer(0, 1)]
    assert found(names, 1).number == 1


@pytest.mark.parametrize(
    ("names", "error", "said"),
    [
        ([model(), optimizer(0), optimizer(2)], IncompleteCheckpoint, f"lacks {optimizer(1)}"),
        ([optimizer(0)], IncompleteCheckpoint, "holds no model states"),
        (
            [*map(model_of_stage_3, (0, 2)), *map(optimizer, range(3))],
            IncompleteCheckpoint,
            f"lacks {model_of_stage_3(1)}",
        ),
        (
            [*map(model_of_stage_3, range(3)), *map(optimizer, range(2))],
            IncompleteCheckpoint,
            f"lacks {optimizer(2)}",
        ),
        (
            [model(0), model(2), optimizer(0), optimizer(0, 2)],
            IncompleteCheckpoint,
            f"lacks {model(1)}",
        ),
        (
            [model(0), model(1), optimizer(0), optimizer(1), optimizer(0, 1)],
            IncompleteCheckpoint,
            f"lacks {optimizer(1, 1)}",
        ),
        (
            [model(), "expp_rank_1_mp_rank_00_optim_states.pt"],
            IncompleteCheckpoint,
            "lacks expp_rank_0_mp_rank_00_optim_states.pt",
        ),
        (
            [model(), optimizer(0), optimizer(1, begin="bf16_")],
            InconsistentCheckpoint,
            "one of bf16, one of another type",
        ),
        (
            [model(), model_of_stage_3(0), optimizer(0)],
            InconsistentCheckpoint,
            "one of stage 3, one of stage 1 or 2",
        ),
        ([model(), optimizer(0), optimizer(0, begin="bf16_")], InconsistentCheckpoint, "bf16"),
        (
            [model(), "zero_pp_rank_0_mp_rank_000_optim_states.pt", optimizer(0)],
            InconsistentCheckpoint,
            "has the same numbers in its name as",
        ),
    ],
)
def test_files_that_are_not_one_save(names: list[str], error: type[ZckptError], said: str) -> None:
    with pytest.raises(error, match=said):
        found(names)


def test_all_that_is_missing_is_listed() -> None:
    """As names that DeepSpeed gives; a number that is huge by damage costs nothing."""
    with pytest.raises(IncompleteCheckpoint) as caught:
        found([model(), model(11), *(optimizer(rank, begin="bf16_") for rank in (0, 12))])
    assert [Path(path).name for path in caught.value.paths] == [*map(model, range(1, 11))]
    with pytest.raises(IncompleteCheckpoint) as caught:
        found([model(), optimizer(0, begin="bf16_"), optimizer(10**20, begin="bf16_")])
    first, *_, last = caught.value.paths
    assert Path(first).name == optimizer(1, begin="bf16_")
    assert Path(last).name == optimizer(64, begin="bf16_")


def grid(tmp_path: Path, *names: str) -> GridFiles:
    for name in names:
        (tmp_path / name).touch()
    return grid_files(TagDirectory(str(tmp_path), "tag", None))


def test_names_show_the_grid(tmp_path: Path) -> None:
    models = [model(number) for number in range(4)]
    layers = [
        f"layer_{layer:02d}-model_{tp:02d}-model_states.pt" for layer in (0, 3) for tp in (1, 0)
    ]
    assert grid(tmp_path, *models).grid == Grid(1, 4)
    files = grid(tmp_path, *layers)
    assert (files.grid, [rank.number for rank in files.ranks]) == (
        Grid(2, 2, staged=True),
        [0, 1, 2, 3],
    )
    assert not files.is_plain
    assert sorted(files.layers) == [(0, 0), (0, 1), (3, 0), (3, 1)]
    assert grid_files(TagDirectory(str(tmp_path), "tag", None), Grid(4, 1)).layers == {}


@pytest.mark.parametrize(
    ("layers", "said"),
    [
        (
            ("layer_00-model_00-", "layer_00-model_01-", "layer_03-model_01-"),
            "lacks layer_03-model_00-",
        ),
        (("layer_00-model_00-", f"layer_00-model_{10**20}-"), "lacks layer_00-model_01-"),
        (
            [f"layer_00-model_0{tp}-" for tp in range(3)],
            "layer files of 3 tensor ranks, but files of 4",
        ),
    ],
)
def test_layers_that_are_not_of_the_grid(layers: list[str], said: str, tmp_path: Path) -> None:
    with pytest.raises(IncompleteCheckpoint, match=said):
        grid(tmp_path, *map(model, range(4)), *(f"{layer}model_states.pt" for layer in layers))
