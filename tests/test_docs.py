"""Every command on a page runs and prints what is shown, and every link leads somewhere.

A page's `console` and `python` blocks run in its order, in a fresh folder that has `examples` and
`tests`. Blocks of `text` and `py` need what only a reader has: they are parsed. Those of `sh` are
parsed too, and test_shell_blocks.py runs them.
"""

from __future__ import annotations

import ast
import difflib
import io
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import click
import pytest

from docs import check as doc_check
from zckpt import __version__
from zckpt.cli import cli, parameters
from zckpt.notices import CODES

from . import cli_reference, counts, pages, proven_page
from .conftest import ROOT, Result, needs

Zckpt = Callable[..., Result]

DOCUMENTS = pages.documents()
LINKING = [
    *DOCUMENTS,
    *sorted(ROOT.glob("[CS]*.md")),  # CHANGELOG, CONTRIBUTING, SECURITY
]
LEDGERS = [
    ROOT / "benchmarks" / "README.md",
    ROOT / "tests" / "safety" / "README.md",
    *sorted((ROOT / "tests").glob("*.md")),
    *sorted(ROOT.glob("*/log/*.md")),
]
OF_OTHER_PROGRAMS = {
    *("--nproc-per-node", "--nproc_per_node", "--nnodes", "--max-restarts"),
    "--kill-on-bad-exit",
}


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the commands of a page run."""
    folder = tmp_path / "page"
    folder.mkdir()
    for name in ("examples", "tests"):
        (folder / name).symlink_to(ROOT / name)
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize("page", DOCUMENTS, ids=named)
def test_code_of_a_page_runs(
    page: Path, folder: Path, shell: Mapping[str, str], zckpt: Zckpt
) -> None:
    variables: dict[str, Any] = {"__name__": "__main__"}
    code = 0
    for block in pages.blocks(page):
        if block.kind == "python":
            with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()):
                exec(compile(block.text, f"{page}:{block.line}", "exec"), variables)
        for command in pages.commands(block) if block.kind == "console" else ():
            ended = run(command.text, zckpt, shell, code)
            check(command, ended, f"{named(page)}:{block.line}: {command.text}")
            code = ended.code


def run(command: str, zckpt: Zckpt, shell: Mapping[str, str], code: int) -> Result:
    """Runs a command line; `code` is what `$?` stands for in it."""
    if not pages.needs_a_shell(command):
        return zckpt(*shlex.split(command)[1:])
    words = ["bash", "-c", f"(exit {code}); {command}"]
    ended = subprocess.run(words, env=shell, capture_output=True, text=True, timeout=600)
    return Result(ended.returncode, ended.stdout, ended.stderr)


def check(command: pages.Command, ended: Result, where: str) -> None:
    """A command may fail if its page shows how. A page shows what a terminal shows."""
    if not command.output:
        assert ended.code == 0, f"{where}\n{ended.err}"
        return
    parts = (ended.out, ended.err) if ended.code in (1, 2) else (ended.err, ended.out)
    printed = "".join(parts)  # warnings come before the report, an error at the end
    if not pages.matches(command.output, printed):
        lines = difflib.unified_diff(
            command.output, printed.splitlines(), "on the page", "printed", lineterm=""
        )
        pytest.fail("\n".join([where, *lines, "", "stderr:", ended.err]), pytrace=False)


def parsed(words: list[str]) -> None:
    """Raises click.UsageError if `zckpt` does not understand a command line."""
    above = click.Context(cli, info_name="zckpt", **cli.context_settings)
    command = cli.get_command(above, words[0]) if words else None
    if command is None:
        raise click.UsageError(f"there is no command {words[:1]}")
    with command.make_context(words[0], words[1:], parent=above):
        pass


@pytest.mark.parametrize("page", DOCUMENTS, ids=named)
def test_no_merge_is_unfinished(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if re.match(r"<{7} |={7}$|>{7} ", line)] == []


@pytest.fixture
def no_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that a command line names need not be there to parse it."""

    def in_file(path: str, parse: Callable[[str], Any]) -> Any:
        return {} if parse is json.loads else ["name"]

    monkeypatch.setattr(parameters, "in_file", in_file)
    monkeypatch.setenv("SLURM_PROCID", "0")  # for `--part auto`
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")


@pytest.mark.usefixtures("no_files")
@pytest.mark.parametrize("page", DOCUMENTS, ids=named)
def test_commands_that_are_not_run_are_understood(page: Path) -> None:
    for block in pages.blocks(page):
        if block.kind == "py":
            ast.parse(block.text)
        for words in pages.zckpt_commands(block.text) if block.kind in ("sh", "text") else ():
            if {"-h", "--help", "--version"}.isdisjoint(words):
                try:
                    parsed(words)
                except click.UsageError as error:
                    pytest.fail(
                        f"{named(page)}:{block.line}: zckpt {' '.join(words)}\n"
                        f"{error.format_message()}",
                        pytrace=False,
                    )


@pytest.mark.parametrize("page", DOCUMENTS, ids=named)
def test_options_in_sentences_exist(page: Path) -> None:
    everywhere = {"-h", "--help"} | options_of(cli)
    for code in pages.inline_code(page):
        words = code.split() or [""]
        of_command = everywhere
        if words[0] == "zckpt" and len(words) > 1 and words[1][0].islower():
            begun = [name for name in cli.commands if name.startswith(words[1])]
            assert begun, f"{named(page)}: there is no command of `{code}`"
            of_command = everywhere.union(*(options_of(cli.commands[name]) for name in begun))
        elif words[0].startswith("--"):
            of_command = everywhere.union(*map(options_of, cli.commands.values()))
        elif words[0] != "zckpt":
            continue
        for word in words:
            option = re.match(r"--[a-z][a-z_-]*", word)
            assert not option or option[0] in of_command | OF_OTHER_PROGRAMS, (
                f"{named(page)}: there is no {word} in `{code}`"
            )


def options_of(command: click.Command) -> set[str]:
    return {name for parameter in command.params for name in parameter.opts}


@pytest.mark.parametrize("page", [*LINKING, *LEDGERS], ids=named)
def test_links_lead_somewhere(page: Path) -> None:
    assert list(doc_check.broken_links(page)) == []


def test_limits_have_codes() -> None:
    """What is refused stands on one page, with codes that there are."""
    rows = re.findall(r"^\|.*\|$", (ROOT / "docs" / "limits.md").read_text(), re.MULTILINE)
    codes = {code for row in rows for code in re.findall(r"`([a-z]+(?:-[a-z]+)+)`", row)}
    assert {"writer-unsupported", "target-unsupported", "rank-slices"} <= codes <= {*CODES}
    for page in DOCUMENTS:
        assert "## What is refused" not in page.read_text(), named(page)


def test_a_broken_link_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doc_check, "ROOT", tmp_path)
    (tmp_path / "other.md").write_text('# One thing\n\n<a id="old"></a>\n')
    page = tmp_path / "page.md"
    page.write_text("[a](other.md#one-thing) [b](other.md#old) [c](other.md#no) [d](../x.md)")
    assert [line.split()[1] for line in doc_check.broken_links(page)] == ["other.md#no;", "../x.md"]


@pytest.mark.parametrize("name", sorted(doc_check.DONE))
def test_a_page_that_is_done_stays_short(name: str) -> None:
    assert list(doc_check.faults(ROOT / name)) == []


def test_short_sentences_are_counted(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A short heading\n\nThis is short. This one has nine words, so that `it is long` now.\n\n"
        "```sh\nnot a sentence. nor this\n```\n\n| no. | sentence. |\n\n* Is a list counted? Yes.\n"
    )
    assert [each.split()[0] for each in doc_check.sentences(page)] == ["This", "This", "Is", "Yes."]
    assert doc_check.share_of_short(page) == 3 / 4


def test_all_pages_together_are_short(capsys: pytest.CaptureFixture[str]) -> None:
    """The script says so too, with a line for each page."""
    code = doc_check.main()
    printed = capsys.readouterr().out
    assert code == 0, printed
    assert all(named(page) in printed for page in doc_check.counted_pages())


def test_tests_are_counted() -> None:
    """In a process of its own: pytest does not like to be called by its tests."""
    files = ("tests/proof/test_leaves.py", "tests/resume/test_slurm.py")
    words = [sys.executable, "-m", "tests.counts", *files]
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    header, *rows = (line.split() for line in ended.stdout.splitlines())
    assert header == ["default", *counts.KINDS]
    proof, resume, total = (tuple(map(int, row[1:])) for row in rows)
    assert [row[0] for row in rows] == ["tests/proof", "tests/resume", "all"]
    assert resume == tuple(int(kind == "slurm") for kind in header)
    assert total == tuple(map(sum, zip(proof, resume, strict=True)))
    assert proof[0] > proof[3] > 0


def test_reference_of_commands_is_fresh() -> None:
    assert (ROOT / "docs" / "cli.md").read_text() == cli_reference.page(), (
        "run `python -m tests.cli_reference > docs/cli.md`"
    )


def test_page_of_what_is_proven_has_today_s_tables() -> None:
    """All but the counts, for which pytest collects every test."""
    assert (ROOT / "tests" / "PROVEN.md").read_text().endswith(proven_page.rest()), (
        "run `python -m tests.proven_page > tests/PROVEN.md`"
    )
    for row in proven_page.SUBJECTS:
        for place in row.places:
            assert (ROOT / place).exists(), place


@pytest.mark.engines
def test_page_of_what_is_proven_has_today_s_counts() -> None:
    words = [sys.executable, "-m", "tests.proven_page"]
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert (ROOT / "tests" / "PROVEN.md").read_text() == ended.stdout, (
        "run `python -m tests.proven_page > tests/PROVEN.md`"
    )


@pytest.mark.parametrize("name", sorted(cli.commands))
def test_reference_has_every_option(name: str) -> None:
    section = (ROOT / "docs" / "cli.md").read_text().split(f"\n## {name}\n")[1].split("\n## ")[0]
    for parameter in cli.commands[name].params:
        if getattr(parameter, "hidden", False):
            continue
        words = (
            parameter.opts
            if isinstance(parameter, click.Option)
            else [parameter.human_readable_name]
        )
        for word in words:
            assert re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", section), word


def test_version_is_the_same_everywhere() -> None:
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## {__version__}\n" in (ROOT / "CHANGELOG.md").read_text()


def test_words_are_sorted() -> None:
    for section in (ROOT / "docs" / "words.md").read_text().split("\n## ")[1:]:
        words = re.findall(r"^\| `?([^`|]+?)`? \|", section, re.MULTILINE)[1:]
        assert len(words) > 10
        assert words == sorted(set(words), key=str.casefold)


def test_site_lists_every_page() -> None:
    """In the side bar, which is short, or below "All pages"."""
    text = (ROOT / "mkdocs.yml").read_text()
    listed = re.findall(r"^ +- .*?([\w-]+\.md)$", text, re.MULTILINE)
    others = re.findall(r"^  /([\w-]+\.md)$", text, re.MULTILINE)
    assert len([*listed, *others]) == len({*listed, *others})
    assert {page.name for page in LINKING} - {"README.md"} <= {*listed, *others}
    assert {"index.md", "all-pages.md"} <= {*listed}
    assert len(listed) <= 20


@pytest.mark.engines
def test_site_builds(tmp_path: Path) -> None:
    needs("mkdocs")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    start = (tmp_path / "index.html").read_text()
    assert "DP world size of 64" in start
    assert "<blockquote>" not in start
    everything = (tmp_path / "all-pages" / "index.html").read_text()
    for page in LINKING:
        place = "../" if page.name == "README.md" else f"../{page.stem}/"
        assert f'href="{place}"' in everything, page
    assert "pictures/logo.svg" in start


@pytest.mark.parametrize(
    ("shown", "printed", "equal"),
    [
        (["a", "b"], "a\nb\n", True),
        (["a"], "a\nb\n", False),
        (["a", "..."], "a\nb\nc\n", True),
        (["...", "c"], "a\nb\nc\n", True),
        (["...", "b"], "a\nb\nc\n", False),
        (["wrote ... in ... s"], "wrote 3 files in 0.1 s\n", True),
        (["wrote ... in ... s"], "wrote 3 files\nin 0.1 s\n", False),
        (["x  1  y"], "x    1 y\n", True),
        (["x 1"], "x 2\n", False),
    ],
)
def test_output_is_compared(shown: list[str], printed: str, equal: bool) -> None:
    assert pages.matches(tuple(shown), printed) is equal
