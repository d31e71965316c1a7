"""Every code is in the table, every code of the table is used, and the page is made of it."""

from __future__ import annotations

import ast
import pickle
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from zckpt import errors
from zckpt.errors import IncompleteCheckpoint, Notice, ZckptError, notice_of
from zckpt.notices import CODES, FAULT, OPTION, REFUSAL, TOPICS

from .codes_page import page
from .conftest import ROOT

KEBAB = re.compile(r"[a-z]+(-[a-z]+)*")
MAKERS = {"warning", "note", "problem", "Notice"} | {
    name
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, ZckptError)
}


def sources() -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted((ROOT / "zckpt").rglob("*.py")):
        if path.name != "notices.py":
            yield path, ast.parse(path.read_text())


def stated(tree: ast.Module) -> Iterator[tuple[str, int, str]]:
    """Calls of errors and notices that name a code: what is called, the line, the code."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "id", getattr(node.func, "attr", ""))
        told = getattr(getattr(node.func, "value", None), "id", "")
        if name not in MAKERS or told == "LOG":  # a line of a program's log has no code
            continue
        first = [*node.args[:1], *(word.value for word in node.keywords if word.arg == "code")]
        for value in first:
            choices = [value.body, value.orelse] if isinstance(value, ast.IfExp) else [value]
            for part in choices:
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield name, node.lineno, part.value


def test_every_code_is_in_the_table() -> None:
    for path, tree in sources():
        for _, line, code in stated(tree):
            assert code in CODES, f"{path}:{line}: {code!r} is not in zckpt/notices.py"


def test_every_code_of_the_table_is_used() -> None:
    used = {
        node.value
        for _, tree in sources()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    assert CODES.keys() - used == set()


def test_the_table() -> None:
    assert sum(map(len, TOPICS.values())) == len(CODES)
    assert 60 <= len(CODES) <= 165
    for code, row in CODES.items():
        assert KEBAB.fullmatch(code), code
        assert {*row.exits} <= {OPTION, FAULT, REFUSAL}
        for text in (row.meaning, row.origin, row.action):
            assert text[0].isupper(), code
            assert text.endswith("."), code


FAULTS = (errors.CorruptCheckpoint, errors.IncompleteCheckpoint, errors.InconsistentCheckpoint)


def test_exit_codes_are_those_of_the_errors() -> None:
    """Of every code that an error in the code names: its class decides how a command ends."""
    found: dict[str, set[tuple[int, int]]] = {}
    for _, tree in sources():
        for name, _, code in stated(tree):
            kind = getattr(errors, name, None)
            if name == "problem" or (isinstance(kind, type) and issubclass(kind, FAULTS)):
                found.setdefault(code, set()).add(FAULT)
            elif kind is errors.WrongOption:
                found.setdefault(code, set()).add(OPTION)
            elif isinstance(kind, type) and issubclass(kind, ZckptError):
                found.setdefault(code, set()).add(REFUSAL)
    assert {code: {*CODES[code].exits} for code in found} == found


def test_the_page_is_made_of_the_table() -> None:
    text = (ROOT / "docs" / "codes.md").read_text()
    assert text == page(), "python -m tests.codes_page > docs/codes.md"


def test_an_error_is_a_record() -> None:
    error = IncompleteCheckpoint("missing-file", "a.pt is missing", paths=["a.pt", "b.pt"])
    assert [notice.file for notice in error.notices] == ["a.pt", "b.pt"]
    assert error.notice == Notice(
        code="missing-file",
        severity="error",
        message="a.pt is missing",
        hint=IncompleteCheckpoint.usual_hint,
    )


def test_an_error_keeps_its_fields() -> None:
    error = IncompleteCheckpoint("missing-file", "gone", "look", ["a.pt"], subject="w", file="a.pt")
    twin = pickle.loads(pickle.dumps(error))
    assert twin.__dict__ == error.__dict__
    other = error.again(message="b: gone", file="b")
    assert (type(other), str(other), other.file) == (IncompleteCheckpoint, "b: gone", "b")
    assert (other.code, other.hint, other.paths) == ("missing-file", "look", ("a.pt",))


@pytest.mark.parametrize("number", errors.OF_SYSTEM)
def test_errors_of_the_system_have_codes(number: int) -> None:
    found = notice_of(OSError(number, "no", "file.pt"))
    assert found.code in CODES
    assert (found.severity, found.file, found.message) == ("error", "file.pt", "file.pt: no")
    assert notice_of(OSError("unknown")).code == "system-error"
