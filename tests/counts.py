"""How many tests are there of each kind? `proven_page.py` says what they show.

    python -m tests.counts                 all folders of tests
    python -m tests.counts tests/core ...  these

A test that several parameters call is counted once for each. `default` is what `pytest` runs.
"""

from __future__ import annotations

import io
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import redirect_stdout

import pytest

from .conftest import ROOT

KINDS = ("engines", "matrix", "exhaustive", "gpu", "stores", "slurm", "browser")


class Collected:
    """A plugin of pytest that counts what is collected, by file and kind."""

    def __init__(self) -> None:
        self.counts: dict[str, Counter[str]] = {}

    @pytest.hookimpl(trylast=True)  # the markers of conftest.py are there
    def pytest_collection_modifyitems(self, items: Iterable[pytest.Item]) -> None:
        for item in items:
            file = item.path.relative_to(ROOT).as_posix()
            self.counts.setdefault(file, Counter()).update(kinds_of(item))


def kinds_of(item: pytest.Item) -> Iterable[str]:
    """The markers of a test that decide when it runs; none, or `first`, is the default run."""
    marked = [kind for kind in KINDS if item.get_closest_marker(kind)]
    if not marked or (item.get_closest_marker("first") and not {*KINDS[2:]}.intersection(marked)):
        marked.append("default")
    return marked


def by_file(places: Iterable[str] = (str(ROOT / "tests"),)) -> dict[str, Counter[str]]:
    """File -> kind -> number of tests. Raises RuntimeError if a file cannot be collected."""
    collected = Collected()
    words = ["--collect-only", "-q", "-n", "0", "-m", "", "-p", "no:cacheprovider", *places]
    with redirect_stdout(io.StringIO()) as printed:
        code = pytest.main(words, plugins=[collected])
    if code != pytest.ExitCode.OK:
        raise RuntimeError(printed.getvalue())
    return collected.counts


def by_folder(files: Mapping[str, Counter[str]]) -> dict[str, Counter[str]]:
    folders: dict[str, Counter[str]] = {}
    for file, counter in files.items():
        folders.setdefault(file.rpartition("/")[0], Counter()).update(counter)
    return folders


def table(files: Mapping[str, Counter[str]]) -> str:
    counted = by_folder(files)
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
    print(table(by_file(sys.argv[1:] or [str(ROOT / "tests")])))
