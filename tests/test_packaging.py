"""A wheel and an sdist are built, and each is installed alone and runs the main job."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import pytest

from zckpt.core.version import __version__

from .conftest import EXAMPLE, ROOT
from .test_readme import PROJECT, requirements, with_their_own

pytestmark = pytest.mark.engines
NAME = f"zckpt-{__version__}"
WHEEL = f"{NAME}-py3-none-any.whl"


def run(*words: object, folder: Path, env: Mapping[str, str] | None = None) -> str:
    """What a program prints; without `env` it has no variables, so that it sees no repository."""
    command = [str(word) for word in words]
    ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=env or {})
    assert ended.returncode == 0, f"{command}\n{ended.stdout}\n{ended.stderr}"
    return ended.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was built from it."""
    folder = tmp_path_factory.mktemp("built")
    # no isolation: what builds is installed with the extra `test`, so that no network is needed
    words = ("-m", "build", "--no-isolation", "--outdir", folder, ROOT)
    run(sys.executable, *words, folder=folder, env=os.environ)
    return folder


@pytest.fixture
def empty(tmp_path: Path) -> Path:
    """An environment with what the core needs, and nothing else."""
    folder = tmp_path / "environment"
    venv.create(folder, with_pip=False)
    packages = next((folder / "lib").glob("python*")) / "site-packages"
    for name in with_their_own(requirements(PROJECT, None)):
        try:
            files = metadata.files(name) or ()
        except metadata.PackageNotFoundError:  # not needed on this platform
            continue
        for file in files:
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not (packages / top).is_symlink():
                (packages / top).symlink_to(Path(str(file.locate())).parents[len(file.parts) - 2])
    return folder


def test_what_is_built(built: Path) -> None:
    assert {path.name for path in built.iterdir()} == {WHEEL, f"{NAME}.tar.gz"}
    source = {
        str(path.relative_to(ROOT)): path.read_bytes()
        for path in (ROOT / "zckpt").rglob("*")
        if path.is_file() and path.suffix != ".pyc"
    }
    with zipfile.ZipFile(built / WHEEL) as wheel:
        names = set(wheel.namelist())
        assert {name: wheel.read(name) for name in names if name.startswith("zckpt/")} == source
        about = wheel.read(f"{NAME}.dist-info/METADATA").decode()
        assert f"{NAME}.dist-info/licenses/LICENSE" in names
    assert "zckpt/py.typed" in names
    for line in ("License-Expression: Apache-2.0", "Classifier: Typing :: Typed"):
        assert f"\n{line}\n" in about
    with tarfile.open(built / f"{NAME}.tar.gz") as sdist:
        unpacked = {name.partition("/")[2] for name in sdist.getnames()}
    assert {*source, "README.md", "LICENSE", "pyproject.toml"} <= unpacked


@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_the_main_job_in_an_empty_environment(
    kind: str, built: Path, empty: Path, tmp_path: Path
) -> None:
    package = built / WHEEL
    if kind == "sdist":
        words = ("--no-build-isolation", "--no-deps", "--no-index", "-w", tmp_path)
        archive = built / f"{NAME}.tar.gz"
        run(sys.executable, "-m", "pip", "wheel", *words, archive, folder=tmp_path, env=os.environ)
        package = tmp_path / WHEEL
    python, zckpt = empty / "bin" / "python", empty / "bin" / "zckpt"
    pip = (sys.executable, "-m", "pip", "--python", python)
    run(
        *pip, "install", "--no-index", package, folder=tmp_path
    )  # fails if a requirement is missing
    code = "import zckpt, importlib.util as u; print(zckpt.__file__, u.find_spec('torch'))"
    place, torch = run(python, "-c", code, folder=tmp_path).split()
    assert Path(place).is_relative_to(empty)
    assert torch == "None"

    assert run(zckpt, "--version", folder=tmp_path) == f"zckpt, version {__version__}\n"
    assert json.loads(run(zckpt, "inspect", EXAMPLE, "--json", folder=tmp_path))["step"] == 7
    run(zckpt, "convert", EXAMPLE, "universal", folder=tmp_path)
    run(zckpt, "verify", EXAMPLE, "--against", "universal", folder=tmp_path)
    run(python, "-m", "zckpt", "reshard", "universal", "run3", "--dp", 3, folder=tmp_path)
