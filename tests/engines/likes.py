"""One Llama in several engines, one after another: see likes_rank.py for what each job does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .families import USUAL as LLAMA
from .megatron import start

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
    start("likes_rank", root, {"text": TEXT, "config": CONFIG, "cases": cases}, 300)


def losses(root: Path, name: str) -> list[float]:
    values: list[float] = json.loads((root / name / "losses.json").read_text())
    return values
