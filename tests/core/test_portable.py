"""What macOS lacks is not needed: inspect, convert and verify run with those names hidden."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ..conftest import EXAMPLE, ROOT

HIDDEN = """
import builtins, ctypes, os, sys

for name in (
    "O_DIRECT", "O_TMPFILE", "O_NOATIME", "O_PATH", "copy_file_range", "eventfd", "fdatasync",
    "getxattr", "listxattr", "memfd_create", "posix_fadvise", "posix_fallocate", "removexattr",
    "sched_getaffinity", "sched_setaffinity", "setxattr", "splice",
):
    if hasattr(os, name):
        delattr(os, name)

class Library(ctypes.CDLL):
    def __getattr__(self, name):
        if "fallocate" in name or name in ("sync_file_range", "syncfs"):
            raise AttributeError(name)
        return super().__getattr__(name)

ctypes.CDLL = Library
real = {"open": builtins.open, "os.open": os.open}

def guarded(name):
    def open_(path, *about, **options):
        if str(path).startswith(("/proc", "/sys/")):
            raise FileNotFoundError(2, "hidden", path)
        return real[name](path, *about, **options)
    return open_

builtins.open, os.open = guarded("open"), guarded("os.open")
"""


def as_on_macos(*words: object) -> subprocess.CompletedProcess[str]:
    """Runs a command in a process whose `os`, C library and files lack what macOS lacks."""
    arguments = [str(word) for word in words]
    code = f"{HIDDEN}\nfrom zckpt.cli import main\nmain({arguments!r})"
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(ROOT)},
        timeout=120,
    )


@pytest.fixture(scope="module")
def universal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("portable") / "universal"
    ended = as_on_macos("convert", EXAMPLE, target)
    assert (ended.returncode, ended.stderr) == (0, "")
    return target


def test_inspect() -> None:
    ended = as_on_macos("inspect", EXAMPLE, "--json")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert json.loads(ended.stdout)["step"] == 7


def test_convert_then_verify(universal: Path) -> None:
    for words in (("verify", universal), ("verify", EXAMPLE, "--against", universal)):
        ended = as_on_macos(*words)
        assert (ended.returncode, ended.stderr) == (0, "")


def test_the_target_is_known_without_extended_attributes(universal: Path) -> None:
    """The mark is a hidden file beside the target, so `--resume` of a complete run does nothing."""
    ended = as_on_macos("convert", EXAMPLE, universal, "--resume")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert (universal.parent / ".universal.zckpt").is_file()


def test_reshard(tmp_path: Path) -> None:
    ended = as_on_macos("reshard", EXAMPLE, tmp_path / "three", "--dp", 3, "--stage", 3)
    said = "set train_micro_batch_size_per_gpu=8 to keep a global batch of 24 [batch-size-changes]"
    assert (ended.returncode, ended.stderr) == (0, f"Warning: {said}\n")
    assert as_on_macos("verify", EXAMPLE, "--against", tmp_path / "three").returncode == 0


def test_direct_writes_are_refused_in_one_sentence(tmp_path: Path) -> None:
    ended = as_on_macos("convert", EXAMPLE, tmp_path / "direct", "--io", "direct")
    assert ended.returncode == 1
    assert "this system has no direct writes" in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "direct").exists()
