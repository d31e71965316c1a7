"""Plain command lines do without click what click would have done."""

from __future__ import annotations

from inspect import signature
from typing import Any

import pytest

from zckpt import api, proving, reading, writing
from zckpt.cli import plain as plain_lines
from zckpt.cli import run
from zckpt.cli.plain import plain
from zckpt.core.resources import READING_JOBS
from zckpt.formats import FORMATS
from zckpt.formats.options import options_of

from ..conftest import EXAMPLE
from ..test_cli import Zckpt

OUTPUT = ["-q", "--json"]
COMMANDS = ((reading, "read"), (api, "convert"), (api, "reshard"), (api, "verify"))
# they import `reading.read`, and must do so before a test puts another function in its place
READ_TOO = (proving, writing)


class Called(Exception):
    """What the command line called, and with which arguments."""


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The arguments of the function that a command line calls, without those that are defaults."""

    def of(words: list[str], is_plain: bool) -> Any:
        calls: list[Any] = []
        for module, name in COMMANDS:
            function = getattr(module, name)

            def record(*paths: Any, _function: Any = function, **given: Any) -> None:
                calls.append((_function.__name__, _normal(_function, paths, given)))
                raise Called

            monkeypatch.setattr(module, name, record)
        if not is_plain:
            monkeypatch.setattr(run, "plain", lambda words: None)
        monkeypatch.setenv("ZCKPT_TRACEBACK", "0")
        with pytest.raises(SystemExit):
            run.run(words)
        monkeypatch.undo()
        (call,) = calls
        return call

    return of


def _normal(function: Any, paths: tuple[Any, ...], given: dict[str, Any]) -> dict[str, Any]:
    parameters = signature(function).parameters
    bound = signature(function).bind(*paths, **given).arguments
    options = bound.pop("options", {})
    result = {
        name: value
        for name, value in bound.items()
        if name not in ("begin", "tell", "before_rename") and value != parameters[name].default
    }
    if "copying" in parameters:
        result["options"] = {option.name: value for option, value in options_of(options).given}
        result["copying"] = bound["copying"]
    if "jobs" in parameters:
        assert bound["jobs"] == READING_JOBS
    return result


@pytest.mark.parametrize("output", [[], ["-q"], ["--quiet", "--json"]])
@pytest.mark.parametrize(
    "words",
    [
        ["inspect", "run"],
        ["convert", "run", "out"],
        ["convert", "--to", "dcp", "run", "--dp", "8", "out"],
        ["convert", "run", "out", "--weights-only", "--dtype", "bf16", "--resume"],
        ["reshard", "run", "out", "--dp", "16"],
        ["reshard", "run", "out", "--dp", "4", "--stage", "3"],
        ["verify", "run"],
        ["verify", "run", "--against", "other"],
    ],
)
def test_click_gives_the_same_arguments(words: list[str], output: list[str], called: Any) -> None:
    words = [*words, *output]
    assert plain(words) is not None
    assert called(words, is_plain=True) == called(words, is_plain=False)


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["inspect"],
        ["inspect", "-h"],
        ["inspect", "--", "run"],
        ["inspect", ""],
        ["inspect", "run", "run"],
        ["inspect", "run", "--json=1"],
        ["inspect", "run", "--steps"],
        ["--json", "inspect", "run"],
        ["convert", "run"],
        ["convert", "run", "out", "more"],
        ["convert", "run", "out", "--to"],
        ["convert", "run", "out", "--to", "nothing"],
        ["convert", "run", "out", "--to", "dcp", "--to", "universal"],
        ["convert", "run", "out", "--dp", "-1"],
        ["convert", "run", "out", "--dp", "\u0663"],
        ["convert", "run", "out", "--dp=3"],
        ["convert", "run", "out", "--dtype", "fp8"],
        ["convert", "run", "out", "--stage", "3"],
        ["reshard", "run", "out", "--to", "dcp"],
        ["verify", "run", "--against"],
        ["verify", "run", "--against", "-q"],
        ["verify", "run", "--gather"],
        ["export", "run", "out"],
        ["formats"],
    ],
)
def test_other_command_lines_are_for_click(words: list[str]) -> None:
    assert plain(words) is None


def test_the_formats_are_some_that_convert_writes() -> None:
    """Those that are not listed, such as a new one, are for click."""
    assert set(plain_lines.FORMATS) <= {item.name for item in FORMATS if item.writes}
    assert plain(["convert", "SRC", "DST", "--to", "hf"]) is None


@pytest.mark.parametrize("output", [[], ["-q"], ["--json"]])
def test_both_ways_print_the_same(output: list[str], zckpt: Zckpt) -> None:
    line = zckpt("inspect", *output, EXAMPLE)
    other = zckpt("inspect", *output, "--from", "deepspeed", EXAMPLE)
    assert (line.code, line.out, line.err) == (other.code, other.out, other.err)
    assert line.code == 0


def test_a_path_that_is_not_there(zckpt: Zckpt) -> None:
    line = zckpt("inspect", "nothing", "--json")
    other = zckpt("inspect", "nothing", "--json", "--from", "deepspeed")
    assert (line.code, line.document) == (other.code, other.document)
    assert line.code == 1
