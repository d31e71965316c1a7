"""Options: the values that every format refuses, and the refusal of what a target does not know."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from zckpt.core.checkpoint.facts import MAX_DP
from zckpt.errors import WrongOption
from zckpt.training.options import (
    DIALECT,
    DP,
    DTYPE,
    FILE_SIZE,
    GROUP_DEFAULTS,
    MAX_FILE_SIZE,
    PARAM_NAMES,
    RENAME,
    TIE,
    WEIGHTS_ONLY,
    Option,
    Options,
    refuse,
)

CORES: Option[int | None] = Option(
    "cores", None, "Cores of the engine", kind="integer", reason="it is of one engine"
)
UNDERSTOOD = (WEIGHTS_ONLY, DTYPE, replace(DIALECT, choices=("plain", "hdf5")))


def refused_by_whole(*given: tuple[Option[Any], Any]) -> None:
    refuse(Options(given), "--to whole", UNDERSTOOD, {"dp": "its files have no ranks"})


def test_understood_options_pass() -> None:
    refused_by_whole()
    refused_by_whole((DTYPE, "bf16"), (DIALECT, "hdf5"), (WEIGHTS_ONLY, True))


def test_every_target_takes_other_names() -> None:
    refused_by_whole((PARAM_NAMES, ("a",)), (TIE, (("a", "b"),)), (RENAME, (("a", "b"),)))


@pytest.mark.parametrize(
    ("option", "value", "message", "hint"),
    [
        (DP, 2, "--dp does not apply to --to whole", "leave it out: its files have no ranks"),
        (CORES, 1, "--cores does not apply", "leave it out: it is of one engine"),
        (GROUP_DEFAULTS, {"lr": 1.0}, "--group-defaults does not apply", "leave it out"),
        (
            DIALECT,
            "l2",
            "--dialect l2 does not apply to --to whole",
            "its dialects are plain, hdf5",
        ),
    ],
)
def test_other_options_are_refused(
    option: Option[Any], value: Any, message: str, hint: str
) -> None:
    with pytest.raises(WrongOption) as caught:
        refused_by_whole((option, value))
    assert caught.value.message.startswith(message)
    assert caught.value.hint == hint


def test_an_option_has_its_value_or_its_default() -> None:
    options = Options(((DP, 3), (DTYPE, "bf16")))
    assert (options[DP], options[DTYPE], options[TIE]) == (3, "bf16", ())
    assert options[replace(DP, help="of another format")] == 3
    assert (options.module_dtype, options.weights_only) == ("BF16", False)
    assert options.file_size == FILE_SIZE
    assert Options(((MAX_FILE_SIZE, 5),)).file_size == 5


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        (DP, 0, "--dp cannot be 0"),
        (DP, MAX_DP + 1, f"--dp cannot be {MAX_DP + 1}"),
        (DTYPE, "int8", "dtype 'int8' is none of fp32, bf16, fp16"),
        (GROUP_DEFAULTS, {0: 1.0}, "group_defaults has the key 0"),
    ],
)
def test_values_that_no_format_accepts(option: Option[Any], value: Any, message: str) -> None:
    with pytest.raises(WrongOption) as caught:
        Options(((option, value),))
    assert caught.value.message == message
