"""Folders with a framework that asks for another torch, and runs with that of the tests."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from ..conftest import ROOT


def site(name: str, packages: Sequence[str]) -> Path:
    """`.venv-NAME/site`, with these packages alone; they are installed there if it is missing."""
    folder = ROOT / f".venv-{name}" / "site"
    if not folder.is_dir():
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        subprocess.run([*install, "--target", str(folder), *packages], check=True)
    return folder
