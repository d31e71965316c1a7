"""Read, convert and write sharded ZeRO checkpoints, without the engine that wrote them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import Copying, convert, inspect, read, reshard
    from .errors import ZckptError
    from .manifest import Manifest
    from .options import Options

__version__ = "0.1.0"

_PUBLIC = {
    "read": "api",
    "inspect": "api",
    "convert": "api",
    "reshard": "api",
    "Copying": "api",
    "Manifest": "manifest",
    "Options": "options",
    "ZckptError": "errors",
}
__all__ = ["Copying", "Manifest", "Options", "ZckptError", "convert", "inspect", "read", "reshard"]


def __getattr__(name: str) -> Any:
    # on use: `zckpt --help` needs none of them
    if name in _PUBLIC:
        return getattr(import_module(f".{_PUBLIC[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
