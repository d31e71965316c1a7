"""How many tests are there of each kind? The counts beside PROVEN.md, which says what they show.

    python -m tests.counts                 all folders of tests
    python -m tests.counts tests/core ...  these

A test that several parameters call is counted once for each. `default` is what `pytest` runs.
"""

from __future__ import annotations

import io
import sys
from collections import Counter
from collections.abc import Iterable
from contextlib import redirect_stdout

import pytest

from .conftest import ROOT

KINDS = ("engines", "matrix", "exhaustive", "gpu", "slurm")


class Collected:
    """A plugin of pytest that counts what is collected, by folder and kind."""

    def __init__(self) -> None:
        self.counts: dict[str, Counter[str]] = {}

    def pytest_collection_modifyitems(self, items: Iterable[pytest.Item]) -> None:
        for item in items:
            folder = item.path.parent.relative_to(ROOT).as_posix()
            self.counts.setdefault(folder, Counter()).update(kinds_of(item))


def kinds_of(item: pytest.Item) -> Iterable[str]:
    """The markers of a test that decide when it runs; none, or `first`, is the default run."""
    marked = [kind for kind in KINDS if item.get_closest_marker(kind)]
    if not marked or (item.get_closest_marker("first") and not {*KINDS[2:]}.intersection(marked)):
        marked.append("default")
    return marked


def counts(folders: Iterable[str]) -> dict[str, Counter[str]]:
    """Folder -> kind -> number of tests. Raises RuntimeError if a file cannot be collected."""
    collected = Collected()
    words = ["--collect-only", "-q", "-n", "0", "-m", "", "-p", "no:cacheprovider", *folders]
    with redirect_stdout(io.StringIO()) as printed:
        code = pytest.main(words, plugins=[collected])
    if code != pytest.ExitCode.OK:
        raise RuntimeError(printed.getvalue())
    return collected.counts


def table(counted: dict[str, Counter[str]]) -> str:
    columns = ("default", *KINDS)
    rows = [("", *columns)]
    for folder in sorted(counted):
        rows.append((folder, *(f"{counted[folder][kind]:,}" for kind in columns)))
    total = sum(counted.values(), Counter[str]())
    rows.append(("all", *(f"{total[kind]:,}" for kind in columns)))
    width = max(len(row[0]) for row in rows)
    return "\n".join(
        row[0].ljust(width) + "".join(each.rjust(11) for each in row[1:]) for row in rows
    )


if __name__ == "__main__":
    print(table(counts(sys.argv[1:] or [str(ROOT / "tests")])))
