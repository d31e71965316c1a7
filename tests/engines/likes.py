"""One Llama in several engines, one after another: see likes_rank.py for what each job does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from .families import USUAL as LLAMA
from .megatron import ROOT, site

TEXT = [[5, 17, 2, 60, 31, 8, 0, 44], [1, 1, 33, 7, 59, 20, 20, 3], [9, 40, 22, 13, 2, 51, 6, 38]]
CONFIG = {**LLAMA, "model_type": "llama", "vocab_size": 64, "rms_norm_eps": 1e-6}
USUAL: dict[str, Any] = {
    "engine": "megatron",
    "world": 2,
    "tp": 1,
    "pp": 1,
    "rows": 64,
    "salt": 0,
    "lr": 0.01,
    "load": None,
    "steps": 0,
    "save": None,
    "gated": True,
}


def case(name: str, **values: Any) -> dict[str, Any]:
    return {**USUAL, "name": name, **values}


def train(root: Path, *cases: dict[str, Any]) -> None:
    """Runs every case into a folder of `root`; cases of one call have their imports in common."""
    known = root / "cases.json"
    before = json.loads(known.read_text()) if known.exists() else []
    known.write_text(json.dumps([*before, *cases]))
    listed, log = root / "given.json", root / "log"
    listed.write_text(json.dumps({"text": TEXT, "config": CONFIG, "cases": cases}))
    paths = os.pathsep.join([str(ROOT), str(site())])
    code = "from tests.engines.likes_rank import main; main()"
    with log.open("w") as output:
        ended = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code, str(listed), str(root)],
            env={**os.environ, "PYTHONPATH": paths, "TORCHINDUCTOR_COMPILE_THREADS": "1"},
            stdout=output,
            stderr=output,
            timeout=300,
            check=False,
        )
    assert ended.returncode == 0, log.read_text()[-3000:]


def losses(root: Path, name: str) -> list[float]:
    values: list[float] = json.loads((root / name / "losses.json").read_text())
    return values
