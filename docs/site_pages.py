"""Which pages of the site are not in docs/? MkDocs runs this file as a hook.

Some pages stand where GitHub looks for them, and ledgers beside the tests that they are about. A
link to any other file of the repository becomes plain text: the site has no code. Two pages are
made here: the start page, of the README's first screen, and the list of all pages.
"""

from __future__ import annotations

import posixpath
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parent.parent
START = "README.md"
ELSEWHERE = {
    START: "index.md",
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
ALL_PAGES = "all-pages.md"
SECTIONS = ("I want to ...", "How fast", "How safe")
"""Parts of the README that the start page has below its first screen."""
FENCE = re.compile(r"(^ *```.*?^ *```$)", re.MULTILINE | re.DOTALL)
ROW = re.compile(r"^\|.*", re.MULTILINE)
LINK = re.compile(r"(?<!\w)\[([^][]*)\]\((?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?\)")


def on_config(config: Any) -> Any:
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    config.site_url, config.repo_url = urls["Documentation"], urls["Repository"]
    config.repo_name = "Code"
    return config


def on_files(files: Files, config: Any) -> Files:
    for file, name in ELSEWHERE.items():
        if file != START:
            files.append(File.generated(config, name, abs_src_path=str(ROOT / file)))
    files.append(File.generated(config, ELSEWHERE[START], content=start_page()))
    titles = {page.src_uri: _title(page) for page in files.documentation_pages()}
    files.append(File.generated(config, ALL_PAGES, content=list_of(titles)))
    return files


def start_page() -> str:
    """The README's first screen and the sections that lead on, without its signs for GitHub.

    The error that people know is a block here, because a quote looks like a remark.
    """
    text = (ROOT / START).read_text()
    first, *rest = re.split(r"^## ", text, flags=re.MULTILINE)
    first = re.sub(r"^> (.*)", r"```text\n\1\n```", re.sub(r"<!--.*?-->\n", "", first), flags=re.M)
    chosen = [part for part in rest if part.partition("\n")[0] in SECTIONS]
    return first + "".join(f"## {part}" for part in chosen)


def list_of(titles: dict[str, str]) -> str:
    """Every page, by title."""
    ordered = sorted(titles.items(), key=lambda item: item[1].casefold())
    return "# All pages\n\n" + "".join(f"* [{title}]({name})\n" for name, title in ordered)


def _title(page: Any) -> str:
    return re.sub(r"^# +", "", page.content_string.lstrip().partition("\n")[0])


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links between files of the repository become links between pages of the site."""
    name = page.file.src_uri
    if name == ALL_PAGES:
        return markdown
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
