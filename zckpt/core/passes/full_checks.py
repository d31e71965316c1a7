"""The interface of a check that compares complete tensors while a conversion copies.

    begin       before the first byte is written: compares the first elements of each tensor, so
                that what is plainly wrong fails immediately
    refuse      after each region of the target: raises an error if a difference is not allowed
    conclude    after all processes have compared all elements: returns warnings

The package `comparison` has the checks: masters with their weights, and replicas of ranks. The
package `copying` divides the elements among processes. It passes the differences to the check,
which judges them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from ...errors import Notice
from .plan import Match


class Differing(Struct, frozen=True):
    """By how much compared elements of two tensors differ.

    `first` is the number of the first element that differs, `count` the number of differing
    elements. `max_abs` is the largest distance, or None if the elements are not numbers. `nans`
    counts the NaNs on both sides.
    """

    first: int
    count: int = 1
    max_abs: float | None = None
    nans: int = 0

    def with_more(self, other: Differing | None) -> Differing:
        """Adds the differences of further elements of the same two tensors."""
        if other is None:
            return self
        distances = [one for one in (self.max_abs, other.max_abs) if one is not None]
        return Differing(
            min(self.first, other.first),
            self.count + other.count,
            max(distances, default=None),
            self.nans + other.nans,
        )


class FullCheck(Protocol):
    """A check that compares pairs of tensors while a conversion copies.

    All processes must list the pairs (`matches`) in the same order.
    """

    name: str
    """The check's name in the journal; several checks of a conversion may have the same."""
    about: str
    """A description of the work, for the user."""
    measures: bool
    """Whether all elements that differ are measured; else only the first one is needed."""
    matches: Sequence[Match]

    def compare_all(self) -> list[Notice]:
        """Compares all elements in this process alone, and returns warnings.

        Raises an error if a difference is not allowed.
        """
        ...

    def begin(self) -> None:
        """Compares the first elements of both tensors of each match, before anything is written.

        Raises an error for a difference that neither the engine nor the user allows.
        """
        ...

    def refuse(self, differing: Mapping[int, Differing]) -> None:
        """Raises an error if one of these differences is not allowed.

        `differing` maps the index of a match (two compared tensors) to the difference of their
        elements in one region of a target file (256 MiB).
        """
        ...

    def conclude(self, differing: Mapping[int, Differing]) -> list[Notice]:
        """Returns warnings about all differences; raises an error if one is not allowed.

        `differing` maps the index of a match (two compared tensors) to its difference.
        """
        ...


def length_of(checks: Sequence[FullCheck]) -> int:
    """The number of bytes that all checks together must read and compare."""
    matches = (match for check in checks for match in check.matches)
    return sum(entry.length for match in matches for entry in (match.a, match.b) if entry)
