"""The recipes for other ways to install zckpt say what pyproject.toml says, and the action runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml  # type: ignore[import-untyped]

from zckpt import __version__

from .conftest import EXAMPLE, ROOT

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

RECIPE = ROOT / ".ci" / "conda" / "meta.yaml"
ACTION = ROOT / ".github" / "actions" / "check" / "action.yml"


def test_the_conda_recipe_needs_what_the_package_needs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    text = RECIPE.read_text()
    assert f'{{% set version = "{__version__}" %}}' in text
    recipe = yaml.safe_load(re.sub(r"\{%.*?%\}|\{\{(.*?)\}\}", r"\1", text))
    needed = [f"python{project['project']['requires-python']}", *project["project"]["dependencies"]]
    assert [line.replace(" ", "") for line in recipe["requirements"]["run"]] == needed
    (backend,) = project["build-system"]["requires"]
    assert backend in [line.replace(" ", "") for line in recipe["requirements"]["host"]]


def test_links_to_the_project_are_those_of_pyproject() -> None:
    """They are placeholders: who gives the project a home changes them by one `sed`."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    (host,) = {re.split(r"[/@]+", url)[1] for url in urls.values()}
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout
    used: dict[str, set[str]] = {}
    for name in listed.splitlines():
        path = ROOT / name
        if path.suffix not in (".md", ".py", ".yml", ".yaml", ".cff", ".toml", ".svg"):
            continue
        for url in re.findall(rf"[a-z]+:[^\s\"')>]*{re.escape(host)}[^\s\"')>]*", path.read_text()):
            used.setdefault(url, set()).add(name)
    assert {*used} == {*urls.values()}, used
    assert {"README.md", "CONTRIBUTING.md", "SECURITY.md", "docs/faults.md"} <= used[urls["Issues"]]
    assert {"README.md", "CITATION.cff", ".ci/conda/meta.yaml"} <= used[urls["Documentation"]]
    assert {"CITATION.cff", ".ci/conda/meta.yaml"} <= used[urls["Repository"]]
    assert "SECURITY.md" in used[urls["Security"]]


@pytest.mark.parametrize(("is_damaged", "code"), [(False, 0), (True, 3)])
def test_the_action_shows_what_verify_says(is_damaged: bool, code: int, tmp_path: Path) -> None:
    """Its step for the check; the one before it installs zckpt."""
    run = tmp_path / "run"
    subprocess.run(["cp", "-r", EXAMPLE, run], check=True)
    if is_damaged:
        (file,) = run.glob("*/bf16_zero_pp_rank_0*_optim_states.pt")
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    programs = tmp_path / "zckpt" / "bin"
    programs.mkdir(parents=True)
    (programs / "zckpt").write_text(f'#!/bin/sh\nexec {sys.executable} -m zckpt "$@"\n')
    (programs / "zckpt").chmod(0o755)
    step = yaml.safe_load(ACTION.read_text())["runs"]["steps"][-1]
    given = {"path": str(run), "against": str(EXAMPLE), "options": "--jobs 2"}
    words = {
        name: re.sub(r"\$\{\{ inputs\.(\w+) \}\}", lambda found: given[found[1]], value)
        for name, value in step["env"].items()
    }
    summary = tmp_path / "summary"
    here = {"RUNNER_TEMP": str(tmp_path), "GITHUB_STEP_SUMMARY": str(summary)}
    environment = {**os.environ, **words, **here, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", step["run"]], env=environment, capture_output=True
    )
    assert ended.returncode == code, ended.stderr.decode()
    assert ("is damaged" in summary.read_text()) == is_damaged
    assert summary.read_text() == ended.stdout.decode()
