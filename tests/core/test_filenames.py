"""Names with numbers are found as a regular expression finds them."""

from __future__ import annotations

import re

import pytest

from zckpt.core.filenames import Names, counted, number_of, numbered, oldest_first

FORMS = (
    "mp_rank_#_model_states.pt",
    "layer_#-model_states.pt",
    "layer_#-model_#-model_states.pt",
    "step-#",
    "scheduler.bin",
)
NAMES = (
    *("mp_rank_00_model_states.pt", "mp_rank_12_model_states.pt", "mp_rank__model_states.pt"),
    *("mp_rank_0_model_states.pt.bak", "xmp_rank_0_model_states.pt", "mp_rank_0x_model_states.pt"),
    *("layer_3-model_states.pt", "layer_03-model_11-model_states.pt", "layer_3-model_-model"),
    *("step-1", "step-", "step-1x", "step--1", "scheduler.bin", "scheduler.bin1", "", "1"),
)


@pytest.mark.parametrize("form", FORMS)
def test_numbers_are_those_of_a_regular_expression(form: str) -> None:
    pattern = re.compile(re.escape(form).replace(r"\#", r"(\d+)"))
    names = Names(form)
    for name in NAMES:
        match = pattern.fullmatch(name)
        assert names.numbers(name) == (match and tuple(map(int, match.groups())))
        assert names.has(name) == (match is not None)


def test_several_forms() -> None:
    names = Names(*FORMS)
    assert names.numbers("layer_03-model_11-model_states.pt") == (3, 11)
    assert names.numbers("layer_03-model_states.pt") == (3,)
    assert names.numbers("scheduler.bin") == ()
    assert names.numbers("other") is None


def test_other_digits_are_no_numbers() -> None:
    assert not Names("step-#").has("step-\u0663")


@pytest.mark.parametrize(
    "names",
    [
        ["global_step9", "global_step11"],
        ["iter_9999999", "iter_10000000"],
        ["best", "global_step9", "global_step11"],  # nothing says how new the first one is
        ["epoch=1-step=900.ckpt", "epoch=0-step=1000.ckpt"],
        ["m--val_loss=2.31-step=19", "m--val_loss=1.75-step=99-last", "m--val_loss=1.9-step=100"],
        ["epoch_1_batch_500", "epoch_2_batch_90", "epoch_2_batch_100"],
    ],
)
def test_the_newest_is_the_last(names: list[str]) -> None:
    assert oldest_first(reversed(names)) == oldest_first(sorted(names)) == names


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
    assert numbered("optimizer.bin", 1) == "optimizer_1.bin"
    assert number_of("pytorch_model_fsdp") == number_of("model_x") == 0
