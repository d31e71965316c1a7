"""The options of all formats together; a new one touches the folder of its format alone."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

import zckpt
from zckpt import formats
from zckpt.errors import WrongOption
from zckpt.formats.options import Keywords, declared, options_of
from zckpt.training.options import DIALECT, DP, DTYPE, EVERYWHERE, WEIGHTS_ONLY, Option

from ..conftest import EXAMPLE, ROOT, Result, texts

SHAPE: Option[str | None] = Option("shape", None, "The shape", usual="round")
ALWAYS = [option.name for option in EVERYWHERE]


def targets(**options: tuple[Option[object], ...]) -> list[formats.Format]:
    return [
        formats.Format(name, "about it", "universal", options=stated)
        for name, stated in options.items()
    ]


def test_the_order_of_every_format_is_kept() -> None:
    listed = declared(targets(a=(DP, WEIGHTS_ONLY, DTYPE), b=(DP, SHAPE, DTYPE), c=(DIALECT, DP)))
    names = [option.name for option in listed]
    assert names == ["dialect", "dp", "weights_only", "shape", "dtype", *ALWAYS]


def test_orders_that_contradict_each_other_lose_no_option() -> None:
    names = [option.name for option in declared(targets(a=(DP, DTYPE), b=(DTYPE, DP)))]
    assert sorted(names) == sorted(["dp", "dtype", *ALWAYS])


def test_help_names_the_targets_of_an_option() -> None:
    some = targets(a=(DP, DTYPE, SHAPE), b=(DP, DTYPE), c=(DTYPE,))
    texts = {option.name: option.help for option in declared(some)}
    assert texts["shape"] == "For a: the shape"
    assert texts["dp"] == f"{DP.help}. Not for c"
    assert texts["dtype"] == DTYPE.help


def test_help_does_not_grow_with_the_formats() -> None:
    some = targets(**dict.fromkeys("abcde", (DP,)), **dict.fromkeys("fghi", ()))
    texts = {option.name: option.help for option in declared(some)}
    assert texts["dp"] == f"{DP.help}. Not for every format"


def test_values_that_differ_are_listed_by_target() -> None:
    some = targets(
        a=(replace(DIALECT, choices=("x", "y"), usual="x"),),
        b=(replace(DIALECT, choices=("y", "z")),),
    )
    option = declared(some)[0]
    assert option.choices == ("x", "y", "z")
    assert option.help == f"{DIALECT.help}: a has x (default) or y, b has y or z"
    assert option.usual == ""


def test_type_checkers_know_every_option() -> None:
    names = [option.name for option in declared(formats.FORMATS)]
    assert sorted(Keywords.__annotations__) == sorted(names)
    for function in (zckpt.convert, zckpt.reshard):
        assert "Unpack[Conversion]" in str(inspect.signature(function))
        if sys.version_info >= (3, 11):  # `typing` has Unpack since then
            inspect.signature(function, eval_str=True)  # documentation tools ask for the types


def test_unknown_names_and_values_are_refused() -> None:
    with pytest.raises(TypeError, match="there is no option 'nothing'"):
        options_of({"nothing": 1})
    with pytest.raises(TypeError, match="there is no option 'nothing'"):
        zckpt.convert(EXAMPLE, "nowhere", nothing=1)
    with pytest.raises(WrongOption, match="dialect 'l3' is none of deepspeed"):
        options_of({"dialect": "l3"})


def test_only_options_that_differ_from_their_defaults_count() -> None:
    assert options_of({"group_defaults": {}, "dp": None, "tie": ()}).given == ()
    assert [option.name for option, _ in options_of({"dtype": "fp32", "dp": None}).given] == [
        "dtype"
    ]


# -- a format that zckpt does not know

FORMAT = """
from zckpt.formats.format import Format
from .options import OPTIONS

FORMAT = Format("toy", "a toy", "toy", options=OPTIONS if {writes} else None)
"""
DECLARES = """
from zckpt.training.options import Option

SHAPE = Option("shape", None, "The shape", choices=("round", "flat"), usual="round")
OPTIONS = (SHAPE,)
"""
LAYS_OUT = """
from zckpt.errors import MissingData
from zckpt.formats.format import Functions
from .options import SHAPE

def lay_out(source, options):
    raise MissingData("option-needed", f"no toy is {options[SHAPE]}")

FUNCTIONS = Functions(read=None, lay_out=lay_out)
"""
ADD = """
import sys
from zckpt import formats
formats.__path__.append(sys.argv.pop(1))
from zckpt.formats import toy
formats.FORMATS = (*formats.FORMATS, toy.FORMAT)
"""
COMMAND = f"{ADD}\nfrom zckpt.cli import main\nmain()"
FUNCTION = f"{ADD}\nimport zckpt\nzckpt.convert(sys.argv[1], 'nowhere', to='toy', shape='flat')"


def with_toy(folder: Path, program: str, *words: object, writes: bool = True) -> Result:
    """What a program does where a format `toy` with an option of its own is installed."""
    (folder / "toy").mkdir(exist_ok=True)
    (folder / "toy" / "__init__.py").write_text(FORMAT.format(writes=writes))
    (folder / "toy" / "options.py").write_text(DECLARES)
    (folder / "toy" / "functions.py").write_text(LAYS_OUT)
    command = [sys.executable, "-c", program, str(folder), *map(str, words)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    return Result(ended.returncode, ended.stdout, ended.stderr)


class TestNewOption:
    @pytest.mark.parametrize("command", ["convert", "reshard"])
    def test_is_in_the_help(self, tmp_path: Path, command: str) -> None:
        out = " ".join(with_toy(tmp_path, COMMAND, command, "--help").out.split())
        assert "--shape [round|flat] For toy: the shape. [default: round]" in out

    def test_reaches_the_writer(self, tmp_path: Path) -> None:
        words = ("convert", EXAMPLE, tmp_path / "out", "--to", "toy")
        ended = with_toy(tmp_path, COMMAND, *words, "--shape", "flat")
        assert (ended.code, ended.err.splitlines()[0]) == (
            1,
            "Error: no toy is flat [option-needed]",
        )
        assert with_toy(tmp_path, COMMAND, *words).err.startswith("Error: no toy is None")

    def test_is_a_keyword_in_python(self, tmp_path: Path) -> None:
        ended = with_toy(tmp_path, FUNCTION, EXAMPLE)
        assert ended.err.splitlines()[-1] == "zckpt.errors.MissingData: no toy is flat"

    @pytest.mark.parametrize("to", ["deepspeed", "hf"])
    def test_does_not_apply_to_other_targets(self, tmp_path: Path, to: str) -> None:
        words = ("convert", EXAMPLE, tmp_path / "out", "--to", to, "--shape", "flat")
        ended = with_toy(tmp_path, COMMAND, *words)
        assert ended.code == 2
        assert ended.err.startswith(
            f"Error: --shape does not apply to --to {to} [option-not-applicable]\n"
        )

    def test_has_only_the_declared_values(self, tmp_path: Path) -> None:
        words = ("convert", EXAMPLE, tmp_path / "out", "--to", "toy", "--shape", "square")
        ended = with_toy(tmp_path, COMMAND, *words)
        assert ended.code == 2
        assert "'square' is not one of 'round', 'flat'" in ended.err


def test_a_format_that_is_only_read_is_no_target(tmp_path: Path) -> None:
    words = ("convert", EXAMPLE, tmp_path / "out", "--to", "toy")
    ended = with_toy(tmp_path, COMMAND, *words, writes=False)
    assert ended.code == 2
    assert ended.err.startswith(
        "Error: zckpt can read toy, but not write it yet [target-unsupported]\n"
    )


def test_defaults_and_steps_that_decide_nothing_are_named(tmp_path: Path) -> None:
    """What a source stores takes precedence; a learning rate that was given is named."""
    given = {"lr": 0.5, "weight_decay": 0.1, 1: {"weight_decay": 0.0}, "alpha": 1}
    report = zckpt.convert(
        EXAMPLE, tmp_path / "a", to="dcp", group_defaults=given, step_policy="99"
    )
    (step, lr) = texts(report["warnings"][-2:])
    assert lr.startswith("--group-defaults lr is not used: the source stores lr=0.003.")
    assert step == "--step-policy 99 is not used: all stored steps are 7"
    report = zckpt.convert(EXAMPLE, tmp_path / "b", to="dcp", step_policy="max")
    assert report["warnings"] == []
