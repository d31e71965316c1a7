"""Which pages are too long, have too many short sentences, or links that lead nowhere?

    python -m docs.check       a line for each page, and the links; 1 if a limit is not kept

Sentences are those of paragraphs and lists: code, tables and headings have none. An editor has
been over the pages in DONE, which keep the limits below; a new page comes with a line of its own.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from tests import pages
from tests.conftest import ROOT

UNCOUNTED = {
    *("docs/cli.md", "docs/codes.md", "docs/faults.md", "docs/resume-files.md"),  # generated
    "docs/format-v1.md",  # a specification
}
SHORT = 9  # words: a sentence with fewer is short
MOST_SHORT = 1 / 3  # of the sentences of a page
MOST_BYTES = 183_400  # of all pages together; what is more must replace something
DONE: dict[str, int] = {
    "README.md": 7_700,
    "SECURITY.md": 9_000,
    "CONTRIBUTING.md": 5_600,
    "docs/add-a-format.md": 6_700,
    "docs/auto-resume.md": 10_200,
    "docs/deepspeed-grids.md": 7_300,
    "docs/deepspeed.md": 9_400,
    "docs/export.md": 3_800,
    "docs/faq.md": 9_900,
    "docs/fsdp.md": 8_500,
    "docs/house.md": 10_900,
    "docs/limits.md": 4_800,
    "docs/load-directly.md": 5_200,
    "docs/many-nodes.md": 5_200,
    "docs/megatron.md": 9_000,
    "docs/mend.md": 8_150,
    "docs/onnxruntime.md": 4_500,
    "docs/performance.md": 3_700,
    "docs/probe.md": 8_300,
    "docs/prove.md": 9_600,
    "docs/python.md": 5_600,
    "docs/report.md": 2_300,
    "docs/scripts.md": 9_050,
    "docs/stores.md": 6_000,
    "docs/support.md": 4_600,
    "docs/trainer.md": 9_500,
    "docs/words.md": 4_400,
}
"""Bytes that a page may have."""


def counted_pages() -> list[Path]:
    """The pages that people read from beginning to end."""
    listed = [*pages.documents(), ROOT / "SECURITY.md", ROOT / "CONTRIBUTING.md"]
    return [page for page in listed if named(page) not in UNCOUNTED]


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def sentences(page: Path) -> list[str]:
    """What ends with a full stop or a question mark, in paragraphs and lists."""
    listed: list[str] = []
    for part in re.split(r"\n\s*\n|\n(?=\s*(?:[*>-]|\d+\.|\|) )", pages.prose(page)):
        text = re.sub(r"`[^`]*`", "code", part.strip())
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)
        if text and not text.startswith(("#", "|", "<", "!")):
            ended = re.split(r"(?<=[.?!])\s+", re.sub(r"^(?:[*>-]|\d+\.) +", "", text))
            listed += [each for each in ended if re.search(r"\w", each)]
    return listed


def share_of_short(page: Path) -> float:
    listed = sentences(page)
    return sum(len(each.split()) < SHORT for each in listed) / max(1, len(listed))


def broken_links(page: Path) -> Iterator[str]:
    for link in pages.links(page):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or not target.is_relative_to(ROOT):
            yield f"{named(page)}: {link} leads nowhere"
        elif anchor and anchor not in pages.anchors(target):
            yield f"{named(page)}: {link}; {path} has {sorted(pages.anchors(target))}"


def faults(page: Path) -> Iterator[str]:
    """What is wrong with a page that is done."""
    size, share = len(page.read_bytes()), share_of_short(page)
    if size > DONE[named(page)]:
        yield f"{named(page)} has {size:,} bytes, and may have {DONE[named(page)]:,}"
    if share > MOST_SHORT:
        yield f"{named(page)}: {share:.0%} of its sentences have fewer than {SHORT} words"


def main() -> int:
    listed = counted_pages()
    wrong: list[str] = []
    for page in listed:
        size, share = len(page.read_bytes()), share_of_short(page)
        print(f"{size:7,} bytes  {share:4.0%} short  {named(page)}")
        wrong += broken_links(page)
        wrong += faults(page) if named(page) in DONE else ()
    total = sum(len(page.read_bytes()) for page in listed)
    print(f"{total:7,} bytes of {len(listed)} pages")
    if total > MOST_BYTES:
        wrong.append(f"all pages together may have {MOST_BYTES:,} bytes")
    print("\n".join(wrong) if wrong else "no link is broken")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
