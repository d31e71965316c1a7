"""The values of options as a command line writes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

from zckpt.cli.parameters import KINDS, config, names, size
from zckpt.formats import FORMATS


def parsed(kind: str, *values: str) -> Any:
    """What a command gets for these values of an option of that kind."""
    words = [word for value in values for word in ("--option", value)]
    command = click.command()(click.option("--option", **KINDS[kind])(lambda option: option))
    return command.main(words, standalone_mode=False)


@pytest.mark.parametrize(
    ("kind", "values", "result"),
    [
        ("size", ["1.5KiB"], 1536),
        ("size", ["500MB"], 500 * 10**6),
        ("pairs", ["lr=1,b=[0,0.5]", "c=null"], {"lr": 1, "b": (0, 0.5), "c": None}),
        ("pairs", ["1:lr=2,eps=1", "lr=1", "1:lr=3"], {"lr": 1, 1: {"lr": 3, "eps": 1}}),
        ("pairs", [], {}),
        ("rules", ["a=b=c", "^=m."], (("a=b", "c"), ("^", "m."))),
        ("ties", ["a=b"], (("a", "b"),)),
    ],
)
def test_values(kind: str, values: list[str], result: Any) -> None:
    assert parsed(kind, *values) == result


def test_files(tmp_path: Path) -> None:
    (tmp_path / "config").write_text('{"a": 1}')
    (tmp_path / "lines").write_text("a\n b \n\n")
    (tmp_path / "list").write_text('\n["a", "b"]')
    assert parsed("json", f"{tmp_path}/config") == {"a": 1}
    assert parsed("names", f"{tmp_path}/lines") == parsed("names", f"{tmp_path}/list") == ("a", "b")


@pytest.mark.parametrize("value_of", [config, names])
def test_files_that_cannot_be_read(value_of: Callable[[str], Any], tmp_path: Path) -> None:
    (tmp_path / "broken").write_text("[")
    for name, why in (
        ("nothing", "nothing does not exist"),
        ("broken", "broken is no JSON: Expecting value, line 1"),
        (".", "cannot be read: .*directory"),
    ):
        with pytest.raises(click.BadParameter, match=why):
            value_of(str(tmp_path / name))


@pytest.mark.parametrize(
    ("value_of", "text", "message"),
    [
        (config, "[1]", "is not a JSON object"),
        (names, "[1]", "is not a list of names"),
        (names, "", "is not a list of names"),
    ],
)
def test_files_of_something_else(
    value_of: Callable[[str], Any], text: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text(text)
    with pytest.raises(click.BadParameter, match=message):
        value_of(str(tmp_path / "file"))


@pytest.mark.parametrize("value", ["much", "1.2.3", "5XB"])
def test_wrong_sizes(value: str) -> None:
    with pytest.raises(click.BadParameter, match="is not a size"):
        size(value)


def test_every_kind_that_a_format_declares_is_known() -> None:
    kinds = {option.kind for format in FORMATS for option in format.options or ()}
    assert kinds <= KINDS.keys()
