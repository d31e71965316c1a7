"""`--help` of every command, and what shells complete."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from zckpt.cli import cli
from zckpt.cli.help import GROUPS, ExplainedCommand, GroupedOption

from ..conftest import ROOT, Result

Zckpt = Callable[..., Result]
NAMES = list(cli.commands)


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")


@pytest.mark.parametrize("columns", [80, 100])
@pytest.mark.parametrize("name", NAMES)
def test_help_fits_on_one_screen(
    name: str, columns: int, zckpt: Zckpt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = zckpt(name, "--help").out.splitlines()
    assert len(lines) <= 60
    assert all(len(line) <= columns for line in lines if "  zckpt " not in line)  # to be copied


def test_zckpt_alone_is_its_help(zckpt: Zckpt) -> None:
    alone = zckpt()
    assert (alone.code, alone.out) == (0, zckpt("--help").out)


@pytest.mark.parametrize("name", NAMES)
def test_every_option_is_in_one_group(name: str) -> None:
    for option in cli.commands[name].params:
        if isinstance(option, click.Option):
            assert isinstance(option, GroupedOption), option.name
            assert option.group in GROUPS


@pytest.mark.parametrize("name", NAMES)
def test_help_all_shows_every_option(name: str, zckpt: Zckpt) -> None:
    options = [item for item in cli.commands[name].params if isinstance(item, GroupedOption)]
    shown = [option for option in options if not option.hidden]
    rare = [option for option in shown if option.rare]
    short = zckpt(name, "--help").out
    if rare:
        assert f"--help-all shows {len(rare)} more." in short
    whole = zckpt(name, "--help-all").out if rare else short
    for option in shown:
        assert re.search(rf"^  (-., )?{option.opts[-1]}\b", whole, re.MULTILINE), option.name
        if not option.rare:
            assert re.search(rf"^  (-., )?{option.opts[-1]}\b", short, re.MULTILINE), option.name
    assert "--help-all shows" not in whole


@pytest.mark.parametrize("name", NAMES)
def test_help_is_whole_sentences(name: str) -> None:
    for option in cli.commands[name].params:
        if isinstance(option, GroupedOption):
            text = (option.help or "").partition("  [default: ")[0]
            assert text.endswith("."), option.help
            assert text[0].isupper(), option.help


@pytest.mark.parametrize("name", NAMES)
def test_help_lists_the_values_of_a_choice(name: str) -> None:
    for option in cli.commands[name].params:
        if isinstance(option, GroupedOption) and isinstance(option.type, click.Choice):
            text = f"{option.make_metavar(click.Context(cli))} {option.help}"
            for value in option.type.choices:
                assert str(value) in text, option.name


@pytest.mark.parametrize("name", NAMES)
def test_examples_are_understood(name: str) -> None:
    command = cli.commands[name]
    assert isinstance(command, ExplainedCommand)
    assert 2 <= len(command.examples) <= 3
    for example in command.examples:
        words = shlex.split(example.partition(" > ")[0])
        words = words[words.index("zckpt") + 1 :]
        assert words[0] == name
        command.make_context(name, words[1:])


def test_summaries_are_not_cut(zckpt: Zckpt) -> None:
    text = zckpt("--help").out.partition("Commands:")[2]
    assert "..." not in text
    listed = re.findall(r"^  ([\w-]+)  +[A-Z].*[^.]\.$", text, re.MULTILINE)
    assert listed == NAMES


def test_export_does_not_show_what_it_refuses(zckpt: Zckpt) -> None:
    assert "--param-names" not in zckpt("export", "--help").out


def completed(words: list[str], incomplete: str, shell: str = "bash") -> list[str]:
    """What click offers for the last word."""
    line = ["zckpt", *words, incomplete]
    if shell == "fish":
        variables = {"COMP_WORDS": shlex.join(line[:-1]), "COMP_CWORD": incomplete}
    else:
        variables = {"COMP_WORDS": shlex.join(line), "COMP_CWORD": str(len(line) - 1)}
    ended = subprocess.run(
        [sys.executable, "-m", "zckpt"],
        env={**os.environ, **variables, "_ZCKPT_COMPLETE": f"{shell}_complete"},
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    assert ended.stderr == ""
    return ended.stdout.split("\n")[:-1] if ended.stdout.strip() else []


@pytest.mark.parametrize(
    ("words", "incomplete", "expected"),
    [
        ([], "re", ["plain,reshard", "plain,report"]),
        (["convert", "a", "b"], "--to", ["plain,--to"]),
        (["convert", "a", "b", "--to"], "deep", ["plain,deepspeed", "plain,deepspeed-universal"]),
        (["convert", "a", "b", "--stage"], "", ["plain,0", "plain,1", "plain,2", "plain,3"]),
        (["inspect", "a", "--from"], "hf", []),  # it is written only
        (["inspect"], "examples/r", ["file,examples/r"]),
        (["reshard", "a", "b", "--ds-config"], "c", ["file,c"]),
    ],
)
def test_shells_complete(words: list[str], incomplete: str, expected: list[str]) -> None:
    assert completed(words, incomplete) == expected


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_are_offered_the_same(shell: str) -> None:
    assert any("reshard" in line for line in completed([], "re", shell))
    assert any("deepspeed" in line for line in completed(["convert", "a", "--to"], "deep", shell))


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_a_shell(shell: str, tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "zckpt"],
        env={**os.environ, "_ZCKPT_COMPLETE": f"{shell}_source"},
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    assert f"_ZCKPT_COMPLETE={shell}_complete" in ended.stdout
    if not shutil.which(shell):
        pytest.skip(f"{shell} is not here, and has not parsed its script")
    script = tmp_path / "script"
    script.write_text(ended.stdout)
    subprocess.run([shell, "-n", str(script)], check=True)


@pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")
def test_bash_completes(tmp_path: Path) -> None:
    """The script's own function, as bash calls it."""
    program = tmp_path / "zckpt"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m zckpt "$@"\n')
    program.chmod(0o755)
    lines = (
        'eval "$(_ZCKPT_COMPLETE=bash_source zckpt)"',
        "COMP_WORDS=(zckpt convert a b --to d); COMP_CWORD=5",
        "_zckpt_completion zckpt",
        'echo "${COMPREPLY[@]}"',
    )
    ended = subprocess.run(
        ["bash", "-c", "\n".join(lines)],
        env={**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    assert ended.stdout.split() == ["deepspeed", "deepspeed-universal", "dcp"]
