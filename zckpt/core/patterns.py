"""Which tensors a glob such as '*/exp_avg' selects."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from ..errors import WrongOption

if TYPE_CHECKING:
    from typing import Protocol, TypeVar

    class Named(Protocol):
        """Anything with a tensor's name, `parameter/slot`."""

        @property
        def name(self) -> str: ...

    T = TypeVar("T", bound=Named)


def matching(tensors: Iterable[T], pattern: str) -> list[T]:
    """The tensors whose name matches the glob; raises WrongOption if there is none."""
    selected = [tensor for tensor in tensors if fnmatchcase(tensor.name, pattern)]
    if not selected:
        raise WrongOption(
            f"no tensor matches {pattern!r}", hint="names are parameter/slot, as '*/exp_avg'"
        )
    return selected
