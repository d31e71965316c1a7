"""The set-up commands of the README install what they need; test_docs.py runs the others."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from .conftest import ROOT, is_quick

if sys.version_info >= (3, 11):
    import tomllib as toml
else:
    import tomli as toml  # which pytest needs there

OURS = {"zckpt", "tests", "examples", "benchmarks", "docs"}
TEXT = (ROOT / "README.md").read_text()
PROJECT = toml.loads((ROOT / "pyproject.toml").read_text())["project"]


def block(part: str) -> str:
    """The shell block that a part of .ci/run takes: the one behind its marker."""
    pattern = rf"^<!-- \.ci/run {part} -->\n+```sh\n(.*?)^```$"
    (found,) = re.findall(pattern, TEXT, re.MULTILINE | re.DOTALL)
    return str(found)


@pytest.mark.parametrize("part", ["main", "tests"])
def test_ci_runs_the_marked_block(part: str) -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert f'bash -euo pipefail -c "$(block {part})"' in script
    (function,) = re.findall(r"^block\(\) \{.*?^\}$", script, re.MULTILINE | re.DOTALL)
    words = ["bash", "-euo", "pipefail", "-c", f"{function}\nblock {part}"]
    assert subprocess.run(words, cwd=ROOT, capture_output=True, text=True).stdout == block(part)


def requirements(project: Mapping[str, Any], extra: str | None) -> set[str]:
    """Names of the distributions that pyproject.toml has pip install, without theirs."""
    listed = project["dependencies"]
    if extra is not None:
        listed = [*listed, *project["optional-dependencies"][extra]]
    names: set[str] = set()
    for line in listed:
        name, extras = re.match(r"([\w-]+)(?:\[([\w,]+)\])?", line).groups()  # type: ignore[union-attr]
        if name != "zckpt":
            names.add(name)
        for other in (extras or "").split(",") if name == "zckpt" else ():
            names |= requirements(project, other)
    return names


def with_their_own(names: Iterable[str]) -> set[str]:
    """These distributions and those that they need themselves."""
    complete: set[str] = set()
    queue = list(names)
    while queue:
        name = re.sub("[-_.]+", "-", queue.pop()).lower()
        if name in complete:
            continue
        complete.add(name)
        with suppress(metadata.PackageNotFoundError):  # not needed on this platform
            lines = metadata.requires(name) or ()
            queue += [re.split(r"[^\w.-]", line)[0] for line in lines if "extra ==" not in line]
    return complete


def test_set_up_command_of_the_main_job_installs_what_it_needs(tmp_path: Path) -> None:
    """`pip install .` brings all that the commands after it import."""
    venv, install, *commands = block("main").strip().split(" && ")
    assert (venv, install) == ("python3 -m venv .venv", ".venv/bin/pip install .")
    assert commands
    installed = tmp_path / "installed"
    installed.mkdir()
    for name in with_their_own(requirements(PROJECT, None)):
        for file in metadata.files(name) or ():
            top = file.parts[0]
            if top != ".." and not (installed / top).is_symlink():
                (installed / top).symlink_to(Path(str(file.locate())).parents[len(file.parts) - 2])
    (installed / "zckpt").symlink_to(ROOT / "zckpt")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for command in commands:
        program, *words = shlex.split(command)
        assert program == ".venv/bin/zckpt"
        ended = subprocess.run(
            [sys.executable, "-S", "-m", "zckpt", *words],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            env={"PYTHONPATH": str(installed)},
        )
        assert (ended.returncode, ended.stderr) == (0, ""), command
    assert (tmp_path / "universal" / "manifest.json").is_file()


@pytest.mark.skipif(
    sys.version_info < (3, 11), reason="packages_distributions() needs top_level.txt before 3.11"
)
def test_set_up_command_of_the_tests_installs_what_they_import() -> None:
    venv, torch, install, command = block("tests").strip().split(" && ")
    assert venv == "python3 -m venv .venv"
    assert torch.startswith(".venv/bin/pip install torch==")
    assert install == ".venv/bin/pip install -e '.[test]'"
    assert command == ".venv/bin/pytest"
    provided = with_their_own(requirements(PROJECT, "test"))
    known = metadata.packages_distributions()
    for file in (ROOT / "tests").rglob("test_*.py"):
        for statement in ast.parse(file.read_text()).body:  # not what a test imports if it can
            if isinstance(statement, ast.Import):
                modules = [alias.name for alias in statement.names]
            elif isinstance(statement, ast.ImportFrom) and not statement.level:
                modules = [str(statement.module)]
            else:
                continue
            for module in {name.partition(".")[0] for name in modules} - OURS:
                if module not in sys.stdlib_module_names:
                    names = {re.sub("[-_.]+", "-", name).lower() for name in known.get(module, ())}
                    assert names & provided, f"{file} imports {module}"


QUICK_NEEDS = {"pytest", "hypothesis", "torch", "safetensors"}
"""What `pytest -m quick` needs beside the core."""


def test_quick_tests_import_no_engine() -> None:
    """Neither they nor what they import of tests/, at the top of a file."""
    queue = [path for path in (ROOT / "tests").rglob("*.py") if is_quick(path)]
    queue.append(ROOT / "tests" / "conftest.py")
    core = {name.replace("-", "_") for name in requirements(PROJECT, None)}
    allowed = {*sys.stdlib_module_names, *OURS, *core, *QUICK_NEEDS}
    looked_at: set[Path] = set()
    while queue:
        path = queue.pop()
        if path in looked_at or not path.is_file():
            continue
        looked_at.add(path)
        for statement in ast.parse(path.read_text()).body:
            if isinstance(statement, ast.Import):
                tops = {alias.name.partition(".")[0] for alias in statement.names}
                assert tops <= allowed, f"{path} imports {tops - allowed}"
            elif isinstance(statement, ast.ImportFrom) and not statement.level:
                top = str(statement.module).partition(".")[0]
                assert top in allowed, f"{path} imports {top}"
            elif isinstance(statement, ast.ImportFrom):
                folder = path.parents[statement.level - 1]
                module = folder.joinpath(*(statement.module or "").split("."))
                queue += [module.with_suffix(".py"), module / "__init__.py"]
                queue += [module / f"{alias.name}.py" for alias in statement.names]


def test_it_is_one_screen_and_a_bit() -> None:
    assert len(TEXT.encode()) < 9000
    assert len(TEXT.splitlines()) < 125
