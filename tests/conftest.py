"""What all tests share: the small real checkpoint, runs of the engine, and the command line."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import stat
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import hypothesis
import msgspec
import pytest

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # as store.py does before it imports torch


from zckpt import cli
from zckpt.cli import documents
from zckpt.errors import Notice
from zckpt.files import torchfile

hypothesis.settings.register_profile("busy machine", deadline=None)
hypothesis.settings.load_profile("busy machine")

ROOT = Path(__file__).parent.parent
PROCESS = os.getpid()
Made = TypeVar("Made")
EXAMPLE = ROOT / "examples" / "run"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport() -> None:
    """A fork that leaves its test ends here, or it would run all the following tests."""
    if os.getpid() != PROCESS:
        os._exit(70)


QUICK = tuple(
    f"tests/{room}"
    for room in ("core", "files", "copying", "naming", "training", "proof", "remote")
)
SLOW = {"engines", "matrix", "exhaustive", "gpu", "first"}
OF_WHOLE_RUNS = {"test_allgather.py", "test_leaves.py"}


def is_quick(path: Path) -> bool:
    """`pytest -m quick`: tests of the rooms that know no engine. They train nothing."""
    place = path.relative_to(ROOT).as_posix()
    return place.startswith(QUICK) and path.name not in OF_WHOLE_RUNS


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Other test files import engines, which takes longer than the quick tests."""
    if config.option.markexpr != "quick" or collection_path.suffix != ".py":
        return None
    return None if is_quick(collection_path) else True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if is_quick(item.path) and SLOW.isdisjoint(mark.name for mark in item.iter_markers()):
            item.add_marker("quick")


def needs(*packages: str) -> None:
    """Skips a test without these packages; in CI it goes on, and fails where it imports them."""
    missing = [package for package in packages if find_spec(package) is None]
    if missing and not os.environ.get("CI"):
        hint = f"needs {', '.join(missing)}: `pip install -e '.[dev,optimizers]'`"
        pytest.skip(hint, allow_module_level=True)


def imported(package: str) -> Any:
    """A module that a whole file of tests needs, which is skipped without it, but not in CI."""
    needs(package)
    return import_module(package)


def fork() -> int:
    """As os.fork, which warns since Python 3.12 where a process has threads.

    Those of pytest-xdist and BLAS hold no lock that a child takes: it runs zckpt, which starts
    threads of its own, and ends there.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
        return os.fork()


def texts(notices: Iterable[Notice | Mapping[str, Any]]) -> list[str]:
    """The sentences of notices, or of lines of a report."""
    return [
        notice.message if isinstance(notice, Notice) else notice["message"] for notice in notices
    ]


def check_document(value: Any) -> None:
    """Raises for a document of --json that `zckpt schema` does not describe."""
    if value is None:  # auto-resume without a checkpoint
        return
    kind = documents.Error if "error" in value else documents.DOCUMENTS[value["command"]]
    if "reports" in value:
        assert value["command"] in documents.OF_SEVERAL
        kind = documents.Reports
        for report in value["reports"]:
            assert report["command"] == value["command"]
            check_document(report)
    msgspec.convert(value, kind)
    assert set(value) <= set(kind.__struct_fields__), set(value) - set(kind.__struct_fields__)


@dataclass(frozen=True)
class Result:
    """What a command printed, and its exit code."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """The document of --json, which must have the keys and types of its schema."""
        value = json.loads(self.out)
        check_document(value)
        return value


@pytest.fixture
def example(tmp_path: Path) -> Path:
    """A copy of examples/run: ZeRO-2, dp 4, bf16, two groups, tied, a frozen layer, a buffer."""
    return Path(shutil.copytree(EXAMPLE, tmp_path / "run"))


@pytest.fixture
def zckpt(capsys: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Runs a command in this process."""

    def run(*words: object) -> Result:
        with pytest.raises(SystemExit) as ended:
            cli.main([str(word) for word in words])
        printed = capsys.readouterr()
        return Result(int(ended.value.code or 0), printed.out, printed.err)

    return run


@pytest.fixture
def shell(tmp_path: Path) -> Mapping[str, str]:
    """The environment in which a shell finds our `zckpt` and `python`."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, words in (("zckpt", " -m zckpt"), ("python", "")):
        (programs / name).write_text(f'#!/bin/sh\nexec {sys.executable}{words} "$@"\n')
        (programs / name).chmod(0o755)
    path = os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}


@pytest.fixture
def zckpt_without(tmp_path: Path) -> Callable[..., Result]:
    """Runs a command in a new process in which some modules cannot be imported."""

    def run(modules: tuple[str, ...], *words: object) -> Result:
        hidden = tmp_path / "hidden"
        hidden.mkdir(exist_ok=True)
        for module in modules:
            (hidden / f"{module}.py").write_text(f"raise SystemExit('{module} was imported')")
        environment = {**os.environ, "PYTHONPATH": f"{hidden}{os.pathsep}{ROOT}"}
        command = [sys.executable, "-m", "zckpt", *map(str, words)]
        ended = subprocess.run(command, env=environment, capture_output=True, text=True)
        return Result(ended.returncode, ended.stdout, ended.stderr)

    return run


def given_away(monkeypatch: pytest.MonkeyPatch, *paths: Path) -> None:
    """Lets these files and directories belong to another user."""
    others = [path.stat() for path in paths]

    def changed(real: Callable[..., os.stat_result]) -> Callable[..., os.stat_result]:
        def look(*args: Any, **options: Any) -> os.stat_result:
            now = real(*args, **options)
            if not any(os.path.samestat(now, other) for other in others):
                return now
            fields = list(now)
            fields[stat.ST_UID] += 1
            return os.stat_result(fields)

        return look

    for name in ("stat", "fstat", "lstat"):
        monkeypatch.setattr(os, name, changed(getattr(os, name)))


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on Lustre without `flock`; processes that this one forks have none either."""

    def has_none(*_: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", has_none)


class Once:
    """What is trained once per session, for all tests that read it."""

    def __init__(self, factory: pytest.TempPathFactory) -> None:
        self._factory = factory
        self._made: dict[tuple[str, Any], Any] = {}

    def __call__(self, kind: str, key: Any, train: Callable[[Path], Made]) -> Made:
        """What `train` gives for a new folder, which a key that is a text gives its name.

        Of thousands of trainings one ends in a fault of gloo's own threads: it is begun anew.
        """
        from .engines.deepspeed import RankDied

        if (kind, key) not in self._made:
            try:
                self._made[kind, key] = train(self._folder(kind, key))
            except RankDied:
                self._made[kind, key] = train(self._folder(kind, key))
        made: Made = self._made[kind, key]
        return made

    def _folder(self, kind: str, key: Any) -> Path:
        root = self._factory.mktemp(kind) / (key if isinstance(key, str) else kind)
        root.mkdir()
        return root


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Once:
    return Once(tmp_path_factory)


@pytest.fixture(scope="session")
def trained(once: Once) -> Callable[[Any], Path]:
    """Trains a case with real DeepSpeed: a folder with run/ and oracle.pt."""

    def train(case: Any) -> Path:
        from .engines import deepspeed

        return once("engine", case.name, partial(deepspeed.train, case)).parent

    return train


@pytest.fixture(scope="session")
def torch_trained(once: Once) -> Callable[[str, int], Path]:
    """Trains a case with PyTorch's own means at a world size: run/, oracle.pt."""

    def trained(name: str, world: int) -> Path:
        from .engines import torch_engine
        from .engines.torch_cases import CASES

        if package := CASES[name].package:
            needs(package)
        train = partial(torch_engine.train, CASES[name], world)
        return once("torch", f"{name}_w{world}", train).parent

    return trained


@pytest.fixture
def parses(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The path of every pickle that this process parses."""
    paths: list[str] = []
    load = torchfile._Parser.load

    def counted(parser: torchfile._Parser) -> Any:
        paths.append(parser.path)
        return load(parser)

    monkeypatch.setattr(torchfile._Parser, "load", counted)
    monkeypatch.setattr(torchfile, "_peeked", {})  # of an earlier test
    return paths
