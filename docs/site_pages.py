"""Which pages of the site are not in docs/? MkDocs runs this file as a hook.

Some pages stand where GitHub looks for them, and ledgers beside the tests that they are about. A
link to any other file of the repository becomes plain text: the site has no code.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
ELSEWHERE = {
    "README.md": "index.md",
    "SECURITY.md": "SECURITY.md",
    "CONTRIBUTING.md": "CONTRIBUTING.md",
    "CHANGELOG.md": "CHANGELOG.md",
    "tests/ENGINES.md": "rare-cases.md",
    "tests/PROVEN.md": "proven.md",
    "tests/log/2026-11.md": "log-of-tests.md",
    "tests/safety/README.md": "tests-of-safety.md",
    "benchmarks/README.md": "benchmarks.md",
    "benchmarks/log/2026-11.md": "log-of-benchmarks.md",
}
"""Files of the repository, and their names as pages of the site."""
SOURCES = {page: file for file, page in ELSEWHERE.items()}
FENCE = re.compile(r"(^ *```.*?^ *```$)", re.MULTILINE | re.DOTALL)
ROW = re.compile(r"^\|.*", re.MULTILINE)
LINK = re.compile(r"(?<!\w)\[([^][]*)\]\((?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_files(files: Files, config: Any) -> Files:
    for file, name in ELSEWHERE.items():
        files.append(File.generated(config, name, abs_src_path=str(ROOT / file)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links between files of the repository become links between pages of the site."""
    name = page.file.src_uri
    folder = posixpath.dirname(SOURCES.get(name, f"docs/{name}"))

    def linked(link: re.Match[str]) -> str:
        text, anchor = link[1], link[3] or ""
        path = posixpath.normpath(posixpath.join(folder, link[2]))
        if path in ELSEWHERE:
            return f"[{text}]({ELSEWHERE[path]}{anchor})"
        if path.startswith("docs/"):
            return f"[{text}]({path.removeprefix('docs/')}{anchor})"
        return text

    parts = FENCE.split(markdown)
    return "".join(
        part if number % 2 else ROW.sub(_bare, LINK.sub(linked, part))
        for number, part in enumerate(parts)
    )


def _bare(row: re.Match[str]) -> str:
    """A row of a table: GitHub needs `\\|` within code, and MkDocs would show the backslash."""
    return re.sub(r"`[^`]*`", lambda code: code[0].replace("\\|", "|"), row[0])
