"""The sentences about what is missing."""

from __future__ import annotations

import os

from zckpt.core.missing_ranks import missing_file, missing_ranks
from zckpt.errors import IncompleteCheckpoint, listed


def test_a_missing_file() -> None:
    error = missing_file("/run/a.pt", "index.json", "copy it")
    assert isinstance(error, IncompleteCheckpoint)
    assert error.message == "/run/a.pt is missing, which index.json names"
    assert error.hint == "copy it"
    assert missing_file("/run/a.pt").message == "/run/a.pt is missing"


def test_missing_ranks() -> None:
    error = missing_ranks("/run", [1, 3], "model", "it has 2 of 4", expected="a_1.pt")
    assert isinstance(error, IncompleteCheckpoint)
    assert error.message == "/run: the model file of rank 1, 3 is missing (it has 2 of 4)"
    assert error.hint.startswith("expected a_1.pt: copy it again, or take an earlier checkpoint")
    assert missing_ranks("/run", [1]).message == "/run: the file of rank 1 is missing"


def test_a_file_of_a_rank_that_is_expected() -> None:
    """Its path is known; a hint of the caller's own says more than its name."""
    known = missing_ranks("/run", [1], expected="a_1.pt", hint="take another tag")
    assert (known.hint, known.paths) == ("take another tag", (os.path.join("/run", "a_1.pt"),))
    unknown = missing_ranks("/run", [1])
    assert (unknown.hint, unknown.paths) == (IncompleteCheckpoint.usual_hint, ())


def test_long_lists_are_cut() -> None:
    assert listed(range(3)) == "0, 1, 2"
    assert listed(range(10)) == "0, 1, 2, 3, 4, 5, 6, 7 and 2 more"
    assert listed(["a", "b", "c"], 2) == "a, b and 1 more"


def test_a_name_is_no_line_of_its_own() -> None:
    assert listed(["a\nHint: b"]) == r"a\nHint: b"
