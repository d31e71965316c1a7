"""Options: what a format declares to accept, and the refusal of all others."""

from __future__ import annotations

from typing import Any

import pytest

from zckpt.errors import WrongOption
from zckpt.training.options import Accepted, Options

WHOLE = Accepted("whole", ("dtype",), ("plain", "hdf5"), {"dp": "its files have no ranks"})


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": "bf16"},
        {"dialect": "hdf5"},
        {
            "weights_only": True,
            "rename": (("a", "b"),),
            "tie": (("a", "b"),),
            "param_names": ("a",),
        },
    ],
)
def test_accepted_options_pass(options: dict[str, Any]) -> None:
    WHOLE.check(Options(**options))


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        ({"dp": 2}, "--dp does not apply to --to whole", "leave it out: its files have no ranks"),
        ({"stage": 1}, "--stage does not", "leave it out: ZeRO stages are DeepSpeed's"),
        ({"config": {}}, "--ds-config does not apply", "leave it out"),
        ({"group_defaults": {"lr": 1.0}}, "--group-defaults does not apply", "leave it out"),
        ({"dialect": "l2"}, "--dialect l2 does not apply", "its dialects are plain, hdf5"),
    ],
)
def test_other_options_are_refused(options: dict[str, Any], message: str, hint: str) -> None:
    with pytest.raises(WrongOption) as caught:
        WHOLE.check(Options(**options))
    assert caught.value.message.startswith(message)
    assert caught.value.hint == hint


def test_without_dialects_the_option_itself_is_refused() -> None:
    with pytest.raises(WrongOption, match="--dialect does not apply to --to other"):
        Accepted("other").check(Options(dialect="hdf5"))


def test_given_options_differ_from_their_defaults() -> None:
    assert Options().given() == []
    assert Options(group_defaults={}, dtype="fp32").given() == ["dtype"]
