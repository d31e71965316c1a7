"""Regular expressions that are compiled when they are first used.

`zckpt inspect` imports modules of every format, and uses hardly any of their expressions. To import
`re` and to compile them all takes an eighth of its time.
"""

from __future__ import annotations

from .annotations import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from re import compile as Regex

__all__ = ["Regex"]


class _Regex:
    """What `re.compile` gives, with its methods."""

    def __init__(self, pattern: str) -> None:
        self._pattern = pattern

    def __getattr__(self, name: str) -> Any:
        import re

        value = getattr(re.compile(self._pattern), name)
        setattr(self, name, value)
        return value


if not TYPE_CHECKING:
    Regex = _Regex
