"""A page is whole in itself: its policy, its escaping, its size, and what it lacks.

What a browser makes of it is in test_browser.py.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
import sys
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from zckpt.errors import MissingExtra
from zckpt.reporting.page import render, render_markdown
from zckpt.reporting.page.html import MOST_LINES, packed

from . import documents
from .documents import HOSTILE, Document, fault

ALL = [documents.good, documents.faulty, documents.hostile, documents.run]
TITLES = {
    "run": "Over time",
    "numbers": "Numbers",
    "map": "Who has what",
    "masters": "Masters against 16-bit weights",
    "steps": "Steps and groups",
    "against": "Against another",
}


class Parsed(HTMLParser):
    """The tags, the attributes and the text of a page."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.within: dict[str, list[str]] = {"script": [], "style": [], "h2": [], "li": []}
        self._open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        self._open = [tag, *self._open]
        if tag in self.within:
            self.within[tag].append("")

    def handle_endtag(self, tag: str) -> None:
        if tag in self._open:
            self._open = self._open[self._open.index(tag) + 1 :]

    def handle_data(self, text: str) -> None:
        for tag in {*self._open} & {*self.within}:
            self.within[tag][-1] += text


def hashed(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


@pytest.mark.parametrize("make", ALL)
def test_the_policy_allows_one_script_and_one_style(make: type[Document]) -> None:
    parsed = Parsed(render(make()))
    (policy,) = [a["content"] for t, a in parsed.tags if "http-equiv" in a]
    (style,) = parsed.within["style"]
    _data, script = parsed.within["script"]
    assert policy == (
        f"default-src 'none'; style-src {hashed(style)}; script-src {hashed(script)}; "
        "base-uri 'none'; form-action 'none'"
    )
    for tag, attributes in parsed.tags:  # the policy forbids these, and a console would say so
        assert not [key for key in attributes if key == "style" or key.startswith("on")], tag


@pytest.mark.parametrize("make", ALL)
def test_nothing_is_fetched(make: type[Document]) -> None:
    parsed = Parsed(render(make()))
    for tag, attributes in parsed.tags:
        assert tag not in ("img", "link", "iframe", "object", "base"), tag
        assert {"src", "srcset", "action", "data", "poster"}.isdisjoint(attributes), tag
        assert (attributes.get("href") or "#").startswith("#")
    script, style = parsed.within["script"][1], parsed.within["style"][0]
    assert not re.search(r"//\w|@import|url\(|fetch\(|XMLHttp|WebSocket|import\(", style + script)
    assert "innerHTML" not in script


def test_no_name_is_declared_twice_in_the_script() -> None:
    """Its files are one script: a second declaration would keep all of it from running."""
    script = Parsed(render(documents.good())).within["script"][1]
    declared = re.findall(r"(?m)^(?:async )?(?:const|let|function|class) (\w+)", script)
    assert len(declared) > 50
    assert [name for name in declared if declared.count(name) > 1] == []


def test_the_document_is_in_the_page() -> None:
    document = documents.faulty()
    data = Parsed(render(document)).within["script"][0]
    assert json.loads(gzip.decompress(base64.b64decode(data))) == document
    assert render(document) == render(document)


def test_hostile_names_are_text() -> None:
    page = render(documents.hostile())
    page.encode()  # no half surrogate
    parsed = Parsed(page)
    assert [tag for tag, _ in parsed.tags].count("script") == 2
    assert "{{ 7 * 7 }}{% raw %} is dead" in page
    lines = parsed.within["li"]
    assert f"{HOSTILE[0]} is dead" in lines[0]
    assert "\\u202egnp.\\u202d\\u200b is dead" in lines[4]
    assert "line\\u000abreak\\u0000\\u001b[31m\\ud800 is dead" in lines[6]
    assert "…" in lines[8]
    assert lines[8].strip().endswith("is dead")
    assert not re.search("[\u202a-\u202e\u2066-\u2069\x00\x1b\ud800-\udfff]", page)


def test_every_fault_is_a_line() -> None:
    document = documents.faulty()
    lines = Parsed(render(document)).within["li"]
    for line, found in zip(lines, document["faults"], strict=True):
        assert found["kind"] in line
        assert found["message"] in line
    assert "byte 476,736, 4,096 bytes" in lines[1]


def test_places_of_steps_agree_or_differ_or_are_other_counters() -> None:
    page = render(documents.faulty())
    assert "4 of 5 places agree" in page
    assert page.count("✕ differs") == 2  # also among all places
    assert page.count("another counter") == 1
    assert ">None<" not in page.partition("Groups of parameters")[0]


def test_nothing_that_changed_is_a_sentence() -> None:
    document = documents.compared()
    for row in document["against"]["layers"]:
        row |= {"relative": 0.0, "rms": 0.0}
    document["against"] |= {"histogram": None, "histograms": [None] * 14}
    page = render(document)
    assert "No layer's weights differ." in page
    assert "Size of changes" not in page


def test_very_many_faults() -> None:
    document = documents.good()
    document["faults"] = [fault("dead", f"t{n} is dead", tensor=f"t{n}") for n in range(5000)]
    page = render(document)
    assert len(Parsed(page).within["li"]) == MOST_LINES
    assert f"There are {5000 - MOST_LINES:,} more" in page


def test_sections_that_are_absent() -> None:
    document = documents.probed()
    page = render(document)
    heads = Parsed(page).within["h2"]
    assert heads == ["What is wrong", TITLES["against"]]
    assert "zckpt probe-diff" in page


@pytest.mark.parametrize("section", ["line", "tensors", "faults", *TITLES])
def test_a_section_that_is_null_is_absent(section: str) -> None:
    document = documents.run() | {section: None}
    heads = Parsed(render(document)).within["h2"]
    assert (TITLES.get(section) in heads) is False
    assert len(heads) >= 6 - (section in TITLES)
    render_markdown(document)


def test_sections_of_which_nothing_was_read_are_absent() -> None:
    document = documents.good()
    document["numbers"] = {"rows": [], "columns": [], "measures": []}
    document["map"]["files"] = []
    document["masters"] |= {"rows": [], "elements": 0}
    document["line"] |= {"bytes": None, "files": None}
    assert Parsed(render(document)).within["h2"] == ["Steps and groups"]
    render_markdown(document)


def test_a_document_with_nothing() -> None:
    document = {"command": "report", "path": "/runs/x", "version": "1", "faults": []}
    page = render(document)
    assert "/runs/x" in page
    assert Parsed(page).within["h2"] == []
    markdown, picture = render_markdown(document)
    assert "/runs/x" in markdown
    ElementTree.fromstring(picture)


def test_fifty_thousand_tensors_are_under_ten_megabytes() -> None:
    document = documents.big()
    assert len(document["tensors"]["name"]) >= 50_000
    assert len(render(document)) < 10_000_000
    assert len(packed(document)) < 9_000_000
    assert len(render_markdown(document)[1]) < 1_000_000


@pytest.mark.parametrize("make", ALL)
def test_markdown_states_the_step_and_shows_the_picture(make: type[Document]) -> None:
    document = make()
    markdown, picture = render_markdown(document, "the report.svg")
    assert len(markdown.splitlines()) <= 20
    assert f"| step | {document['line']['steps']} |" in markdown
    assert "](the%20report.svg)" in markdown
    root = ElementTree.fromstring(picture)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert {child.tag.rpartition("}")[2] for child in root.iter()} <= {
        *("svg", "title", "style", "rect", "text", "g")
    }


def test_markdown_shows_faults_and_hostile_names_as_text() -> None:
    markdown, picture = render_markdown(documents.faulty())
    assert "✕ 5 faults" in markdown
    assert "and 5 more lines" in markdown
    signs = [
        text.text for text in ElementTree.fromstring(picture).iter() if text.get("class") == "sign"
    ]
    assert signs == ["✕", "0"]  # the measure that has most of them: exp_avg
    markdown, picture = render_markdown(documents.hostile())
    assert not re.search(r"(?<!\\)<", markdown)
    assert "<script" not in picture


def test_a_page_needs_jinja2_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    with pytest.raises(MissingExtra) as raised:
        render(documents.good())
    assert "zckpt[html]" in raised.value.hint
    render_markdown(documents.good())  # needs no package
