"""An expression that is compiled on first use does what `re.compile` gives."""

from __future__ import annotations

import re

import pytest


def test_methods_are_those_of_re() -> None:
    pattern, same = re.compile(r"(?P<a>\d+)-(\d+)"), re.compile(r"(?P<a>\d+)-(\d+)")
    for text in ("12-3", "x12-3", "12-3x", ""):
        for method in ("match", "fullmatch", "search"):
            found, expected = getattr(pattern, method)(text), getattr(same, method)(text)
            assert (found and found.groups()) == (expected and expected.groups())
    assert pattern.sub("", "a1-2b") == "ab"
    assert pattern.pattern == same.pattern


def test_a_wrong_one_is_told_when_it_is_used() -> None:
    pattern = re.compile("(")
    with pytest.raises(re.error):
        pattern.match("")
