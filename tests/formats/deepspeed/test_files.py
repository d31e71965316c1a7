"""Which files belong to a model rank, by their names alone."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from zckpt.errors import IncompleteCheckpoint, InconsistentCheckpoint, ZckptError
from zckpt.files.torchfile import Parsed
from zckpt.formats.deepspeed.files import RankFiles, add_file, model_rank_of, rank_files
from zckpt.formats.deepspeed_states.directories import TagDirectory


def optimizer(rank: int, model_rank: int = 0, begin: str = "") -> str:
    return f"{begin}zero_pp_rank_{rank}_mp_rank_{model_rank:02d}_optim_states.pt"


def model(model_rank: int = 0) -> str:
    return f"mp_rank_{model_rank:02d}_model_states.pt"


def model_of_stage_3(rank: int) -> str:
    return f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"


def found(names: list[str], model_rank: int = 0) -> RankFiles:
    shuffled = random.Random(0).sample(names, len(names))
    return rank_files(TagDirectory("/run/tag", "tag", "/run"), shuffled, Parsed(), model_rank)


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


def test_other_model_ranks_are_left_to_themselves() -> None:
    names = [name for rank in (0, 1) for name in (model(rank), optimizer(0, rank))]
    assert names_of(found(names, 1).paths) == [model(1), optimizer(0, 1)]


@pytest.mark.parametrize(
    ("names", "error", "said"),
    [
        ([model(), optimizer(0), optimizer(2)], IncompleteCheckpoint, "rank 1"),
        ([optimizer(0)], IncompleteCheckpoint, "holds no model states"),
        (
            [*map(model_of_stage_3, (0, 2)), *map(optimizer, range(3))],
            IncompleteCheckpoint,
            "rank 1",
        ),
        (
            [*map(model_of_stage_3, range(3)), *map(optimizer, range(2))],
            IncompleteCheckpoint,
            "3 model files, but 2 optimizer files",
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
            "has the same number as",
        ),
    ],
)
def test_files_that_are_not_one_save(names: list[str], error: type[ZckptError], said: str) -> None:
    with pytest.raises(error, match=said):
        found(names)


def test_a_second_file_of_a_place() -> None:
    files = {(0,): "/run/mp_rank_00"}
    add_file(files, (0,), "/run/mp_rank_0", is_second=False)
    with pytest.raises(InconsistentCheckpoint, match="mp_rank_000 has the same number as"):
        add_file(files, (0,), "/run/mp_rank_000")


def test_the_model_rank_of_a_name() -> None:
    assert model_rank_of(model(13)) == 13
    assert model_rank_of(optimizer(7, 2)) == 2
    assert model_rank_of("layer_03-model_states.pt") is None
