"""What is said of a file that a checkpoint should have, and that is missing?"""

from __future__ import annotations

import os
from collections.abc import Sequence

from ..errors import IncompleteCheckpoint, listed


def missing_file(path: str, stated_by: str = "", hint: str = "") -> IncompleteCheckpoint:
    """The error of a file that is not there; `stated_by` is the file that names it."""
    return IncompleteCheckpoint(
        "missing-file",
        f"{path} is missing" + (f", which {stated_by} names" if stated_by else ""),
        hint,
        [path],
        file=path,
    )


def expecting(name: str) -> str:
    """The hint for a file that is lost; `name` is its name."""
    return f"expected {name}: copy it again, or take an earlier checkpoint (of a run: --tag)"


def missing_ranks(
    where: str,
    ranks: Sequence[int],
    what: str = "",
    reason: str = "",
    hint: str = "",
    expected: str = "",
) -> IncompleteCheckpoint:
    """The error of ranks that have no file; `reason` says from what their number is known.

    `expected` is the name of the first one's file in the folder `where`, if that is known.
    """
    return IncompleteCheckpoint(
        "missing-rank-file",
        f"{where}: the {what + ' ' if what else ''}file of rank {listed(ranks)} is missing"
        + (f" ({reason})" if reason else ""),
        hint or (expecting(expected) if expected else ""),
        [os.path.join(where, expected)] if expected else (),
    )
