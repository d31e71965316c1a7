"""Read, convert, write and prove sharded ZeRO checkpoints, without the engine that wrote them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import probe
    from .api import Copying, convert, diff, export, inspect, read, reshard, stats, verify
    from .errors import ZckptError
    from .manifest import Manifest
    from .options import Options

__version__ = "0.1.0"

_PUBLIC = {
    "read": "api",
    "inspect": "api",
    "convert": "api",
    "export": "api",
    "reshard": "api",
    "verify": "api",
    "diff": "api",
    "stats": "api",
    "Copying": "api",
    "Manifest": "manifest",
    "Options": "options",
    "ZckptError": "errors",
}
__all__ = [
    "Copying",
    "Manifest",
    "Options",
    "ZckptError",
    "convert",
    "diff",
    "export",
    "inspect",
    "probe",
    "read",
    "reshard",
    "stats",
    "verify",
]


def __getattr__(name: str) -> Any:
    # on use: `zckpt --help` needs none of them
    if name in ("dcp", "probe"):
        return import_module(f".{name}", __name__)
    if name in _PUBLIC:
        return getattr(import_module(f".{_PUBLIC[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
