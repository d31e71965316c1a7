"""Read, convert, write and prove sharded ZeRO checkpoints, without the engine that wrote them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .api import Copying, convert, inspect, read
    from .errors import ZckptError
    from .manifest import Manifest

__version__ = "0.1.0"

_PUBLIC = {
    "read": "api",
    "inspect": "api",
    "convert": "api",
    "Copying": "api",
    "Manifest": "manifest",
    "ZckptError": "errors",
}
__all__ = ["Copying", "Manifest", "ZckptError", "convert", "inspect", "read"]


def __getattr__(name: str) -> Any:
    # on use: `zckpt --help` needs none of them
    if name in _PUBLIC:
        return getattr(import_module(f".{_PUBLIC[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
