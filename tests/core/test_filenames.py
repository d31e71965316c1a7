"""Which numbers has a name, in which order are names, and which one leads out of a folder?"""

from __future__ import annotations

import os
from typing import Any

import pytest

from zckpt.core.storage.filenames import by_counting, counted, number_of, numbered, path_inside
from zckpt.core.storage.inventory import parse_name
from zckpt.errors import CorruptCheckpoint
from zckpt.formats.deepspeed_states.directories import ROLES


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        ("layer_03-model_11-model_states.pt", (3, 11)),
        ("layer_3-model_states.pt", (3, 0)),
        ("layer_3-model_-model_states.pt", None),
        ("layer_3-model_states.pt.bak", None),
        ("layer_\u0663-model_states.pt", None),
    ],
)
def test_numbers_of_a_name(name: str, numbers: tuple[int, ...] | None) -> None:
    own = parse_name(ROLES, name)
    assert (own and own.numbers) == numbers


@pytest.mark.parametrize(
    "names",
    [
        ["global_step9", "global_step11"],
        ["iter_9999999", "iter_10000000"],
        ["best", "global_step9", "global_step11"],
        ["epoch=1-step=9.ckpt", "epoch=1-step=9-v1.ckpt", "epoch=1-step=10.ckpt"],
        ["epoch_1_batch_500", "epoch_2_batch_90", "epoch_2_batch_100"],
        ["01", "1", "a", "a1", "aa"],
    ],
)
def test_numbers_in_names_are_counted(names: list[str]) -> None:
    assert by_counting(reversed(names)) == by_counting(sorted(names)) == names


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("model_0.pt", ("model", 0)),
        ("ema_model_17.pt", ("ema_model", 17)),
        ("model_1_2.pt", ("model_1", 2)),
        ("model_00.pt", None),
        ("model_07.pt", None),
        ("model_.pt", None),
        ("model_x1.pt", None),
        ("model1.pt", None),
        ("_1.pt", None),
        ("model_1", None),
        ("model_1.pth", None),
        ("model_²1.pt", None),
    ],
)
def test_what_is_counted(name: str, place: tuple[str, int] | None) -> None:
    assert counted(name, ".pt") == place


@pytest.mark.parametrize("name", ["optimizer.bin", "model", "model.safetensors.index.json"])
def test_a_number_that_was_added_is_found(name: str) -> None:
    for number in (0, 1, 2, 10, 123):
        assert number_of(numbered(name, number)) == number
    assert numbered("optimizer.bin", 0) == "optimizer.bin"
    assert numbered("optimizer.bin", 1) == "optimizer_1.bin"
    assert number_of("pytorch_model_fsdp") == number_of("model_x") == 0


@pytest.mark.parametrize("name", ["a.pt", "a/b.pt", "..a", "a..", "a/...b"])
def test_names_inside(name: str) -> None:
    assert path_inside("/run", name, ".metadata") == os.path.join("/run", name)


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "..", "../a", "a/../../b", "a/..", "", ".", "a\0b"]
)
def test_names_outside(name: str) -> None:
    with pytest.raises(
        CorruptCheckpoint, match=r"/run: \.metadata names a file outside of this directory"
    ):
        path_inside("/run", name, ".metadata")


@pytest.mark.parametrize("name", [7, None, ["a.pt"]])
def test_a_name_that_is_no_text(name: Any) -> None:
    with pytest.raises(CorruptCheckpoint) as refused:
        path_inside("/run", name, ".metadata")
    assert refused.value.message == f"/run: a file name in .metadata is not a text: {name!r}"
