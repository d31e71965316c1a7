"""Chromium opens the pages: what is seen, what the keyboard reaches, and what axe-core finds.

`pytest -m browser`, by hand: it needs Debian's package chromium, playwright (`zckpt[browser]`) and
axe-core, whose axe.min.js is at AXE_CORE, or is installed with npm.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from zckpt.reporting.page import render
from zckpt.reporting.page.words import cut, shown

from . import documents
from .documents import Document

pytestmark = pytest.mark.browser
CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
READY = "html[data-ready]"
QUICK = 200  # milliseconds
Open = Callable[..., Any]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def said() -> list[str]:
    """Whatever a page says to the console, and what it asks of the network."""
    return []


@pytest.fixture
def opened(chromium: Any, said: list[str], tmp_path: Path) -> Iterator[Open]:
    """Opens a document's page from disk; at the end of a test, nothing may have been said."""
    contexts = []

    def open_page(
        document: Document, *, width: int = 1280, script: bool = True, **more: Any
    ) -> Any:
        path = tmp_path / "page.html"
        path.write_text(render(document), encoding="utf-8")
        context = chromium.new_context(
            viewport={"width": width, "height": 900}, java_script_enabled=script, **more
        )
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: said.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: said.append(f"error: {error}"))
        page.on("dialog", lambda dialog: said.append(f"dialog: {dialog.message}"))
        page.on(
            "request",
            lambda request: (
                None
                if request.url == path.as_uri()
                else said.append(f"request: {request.url[:200]}")
            ),
        )
        page.goto(path.as_uri())
        if script:
            page.wait_for_selector(READY, state="attached")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert said == []


def figure(page: Any, key: str) -> Any:
    return page.locator(f'[data-figure="{key}"]')


def walk(page: Any, key: str, down: int, right: int) -> str:
    """What a figure says of a cell to which the arrow keys have moved from the first one."""
    page.locator(f'[data-figure="{key}"] .stage canvas').focus()
    page.keyboard.press("Home")
    for arrow, times in (("ArrowUp", 15), ("ArrowDown", down), ("ArrowRight", right)):
        for _ in range(times):
            page.keyboard.press(arrow)
    says: str = figure(page, key).locator(".says").text_content()
    assert figure(page, key).locator(".tip").is_visible()
    for line in figure(page, key).locator(".tip > *").all_text_contents():
        assert line in says
    return says


FAULT_PIXELS = """([key, row, column]) => {
  const grid = grids[key], ratio = grid.canvas.width / parseFloat(grid.canvas.style.width);
  const part = (start, size) => [Math.ceil(start * ratio), Math.floor(size * ratio)];
  const [x, wide] = part(grid.left + grid.wide * column, grid.wide);
  const [y, tall] = part(grid.top + grid.tall * row, grid.tall);
  const probe = document.createElement("canvas").getContext("2d");
  probe.fillStyle = css("fault");
  probe.fillRect(0, 0, 1, 1);
  const [red, green, blue] = probe.getImageData(0, 0, 1, 1).data;
  const copy = document.createElement("canvas"); // else Chromium says how to read faster
  Object.assign(copy, {width: wide, height: tall});
  const pen = copy.getContext("2d", {willReadFrequently: true});
  pen.drawImage(grid.canvas, -x, -y);
  const data = pen.getImageData(0, 0, wide, tall).data;
  let seen = 0;
  for (let i = 0; i < data.length; i += 4) {
    seen += Math.hypot(data[i] - red, data[i + 1] - green, data[i + 2] - blue) < 30;
  }
  return seen;
}"""


def marked(page: Any, key: str, row: int, column: int) -> bool:
    """Whether a cell is drawn with the color of faults."""
    return bool(page.evaluate(FAULT_PIXELS, [key, row, column]) > 10)


@pytest.mark.parametrize("width", [1280, 420])
@pytest.mark.parametrize(
    "make",
    [
        documents.good,
        documents.faulty,
        documents.run,
        documents.hostile,
        documents.big,
        documents.compared,
        documents.probed,
    ],
)
def test_a_page_opens_in_silence_and_fits(
    make: Callable[[], Document], width: int, opened: Open
) -> None:
    page = opened(make(), width=width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for named in page.locator("[role=application], [role=img], [role=group]").all():
        assert named.get_attribute("aria-label")
    for drawn in page.locator("[data-figure] .stage canvas").all():
        assert drawn.bounding_box()["height"] > 40


@pytest.mark.parametrize("script", [True, False])
def test_every_fault_is_text_when_the_page_opens(script: bool, opened: Open) -> None:
    document = documents.faulty()
    page = opened(document, script=script)
    text = page.locator("body").inner_text()
    for found in document["faults"]:
        assert found["message"] in text
        assert found["kind"] in text
    assert "5 faults" in text
    assert "7 in 4 places, 6 in one" in text
    assert ("Figures need JavaScript" in text) is not script


def test_planted_faults_are_seen_at_their_places(opened: Open) -> None:
    page = opened(documents.faulty())
    assert "NaN: model.layers.2.self_attn.q_proj.weight/param has 17 NaN" in walk(
        page, "numbers", 3, 1
    )
    assert marked(page, "numbers", 3, 1)
    assert not marked(page, "numbers", 3, 2)
    page.get_by_role("radio", name="RMS of exp_avg", exact=True).focus()
    page.keyboard.press("Space")
    assert "every element is zero" in walk(page, "numbers", 4, 5)
    assert marked(page, "numbers", 4, 5)
    assert "does not have the bytes of its checksum" in walk(page, "numbers", 2, 7)
    assert marked(page, "numbers", 2, 7)

    assert "this file is missing" in walk(page, "map", 3, 4)
    assert marked(page, "map", 3, 4)
    says = walk(page, "map", 2, 2)
    assert "✕ damaged: 4,096 bytes at byte 476,736" in says
    assert "exp_avg: " in says
    assert marked(page, "map", 2, 2)
    assert not marked(page, "map", 1, 1)

    assert "farthest: 412 ULP in model.layers.4.self_attn.o_proj.weight/master" in walk(
        page, "masters", 5, 10
    )
    text = page.locator("section", has=page.locator("#steps")).inner_text()
    assert "The true step is 7: 4 of 5 places agree." in text
    row = page.locator("tr.bad", has_text="✕ differs")
    assert row.count() == 2  # above, and among all places
    assert "6" in row.first.inner_text().split()
    assert row.first.is_visible()


def test_a_fault_leads_to_what_it_is_about(opened: Open) -> None:
    page = opened(documents.faulty())
    kinds = [fault["kind"] for fault in documents.faulty()["faults"]]
    page.locator(f'a[data-fault="{kinds.index("NaN")}"]').click()
    assert page.url.endswith("#numbers")
    assert "self_attn.q_proj.weight/param" in page.locator(".detail").text_content()
    page.locator(f'a[data-fault="{kinds.index("dead")}"]').click()
    assert page.locator('input[name="numbers"]:checked').get_attribute("value") == "exp_avg"
    page.locator(f'a[data-fault="{kinds.index("missing")}"]').click()
    assert page.url.endswith("#map")
    assert "this file is missing" in figure(page, "map").locator(".says").text_content()


def test_a_lost_rank_is_a_hole_where_its_elements_were(opened: Open) -> None:
    page = opened(documents.faulty(known=True))
    says = walk(page, "map", 3, 5)
    assert "this file is missing; it had" in says
    assert "master: " in says
    assert marked(page, "map", 3, 5)
    assert not marked(page, "map", 3, 0)  # it had nothing of the embedding


def test_changes_and_what_was_not_compared(opened: Open) -> None:
    page = opened(documents.compared())
    assert "950 elements" not in walk(page, "changes", 3, 5)
    assert "900 elements changed by 2⁻²⁵ or more" in walk(page, "changes", 3, 5)
    text = page.locator("main").inner_text()
    assert "only.here/param, element 3: 0.0125 here" in text
    assert "19 others that were not compared" in text
    page.get_by_text("19 others that were not compared").click()
    assert page.get_by_text("only there: extra.29/param").is_visible()


def rows(table: Any, count: int) -> None:
    """Waits until a table that is filled when it is opened has so many rows."""
    from playwright.sync_api import expect

    expect(table.locator("tbody tr")).to_have_count(count)


def test_switching_and_expanding_by_keyboard(opened: Open) -> None:
    page = opened(documents.faulty())
    numbers = figure(page, "numbers")
    first = numbers.get_by_role("radio").first
    while not first.evaluate("one => one === document.activeElement"):
        page.keyboard.press("Tab")
    page.keyboard.press("ArrowRight")
    assert numbers.locator(".legend .title").inner_text() == "RMS of exp_avg"
    page.keyboard.press("Tab")  # the check box
    page.keyboard.press("Space")
    assert "times from the column's median" in numbers.locator(".legend .title").inner_text()
    page.keyboard.press("Tab")  # the figure
    for key in ("ArrowDown", "ArrowRight", "Enter"):
        page.keyboard.press(key)
    detail = page.locator(".detail")
    assert "model.layers.0.self_attn.q_proj.weight/exp_avg" in detail.inner_text()
    assert "64 \N{MULTIPLICATION SIGN} 64" in detail.inner_text()
    page.keyboard.press("Escape")
    assert numbers.locator(".tip").is_hidden()

    page.keyboard.press("Tab")  # its table
    page.keyboard.press("Enter")
    table = page.locator('[data-table="numbers"] table')
    rows(table, 56)
    page.keyboard.press("Tab")
    page.keyboard.type("layers.3.mlp.gate")
    rows(table, 1)
    assert "bad" in table.locator("tbody tr").get_attribute("class")
    for _ in range(3):  # over the box that scrolls to the heads
        page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert table.locator("th[aria-sort]").count() == 1


def test_from_the_model_to_a_tensor_and_back_by_keyboard(opened: Open) -> None:
    page = opened(documents.faulty())
    crumbs = figure(page, "map").locator(".crumbs")
    walk(page, "map", 2, 2)
    page.keyboard.press("Enter")
    assert crumbs.inner_text().split() == ["whole", "model", "1"]
    assert "self_attn.q_proj.weight" in walk(page, "map", 0, 0)
    says = walk(page, "map", 2, 6)
    assert "exp_avg: elements" in says
    assert "✕ damaged" in says
    page.keyboard.press("Enter")
    assert "model.layers.1.mlp.down_proj.weight" in crumbs.inner_text()
    page.keyboard.press("Escape")
    page.keyboard.press("Escape")
    assert crumbs.inner_text() == "whole model"
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Enter")
    crumbs.get_by_role("button").first.focus()
    page.keyboard.press("Enter")
    assert crumbs.inner_text() == "whole model"
    assert page.evaluate("document.activeElement.tagName") == "CANVAS"


def test_hovering_says_file_bytes_and_elements(opened: Open) -> None:
    page = opened(documents.good())
    canvas = figure(page, "map").locator(".stage canvas")
    box = page.evaluate("(({left, top, wide, tall}) => [left, top, wide, tall])(grids.map)")
    canvas.hover(position={"x": box[0] + box[2] * 1.5, "y": box[1] + box[3] * 1.5})
    tip = figure(page, "map").locator(".tip").inner_text()
    assert "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt" in tip
    assert "master: " in tip
    assert "elements" in tip
    assert "kB" in tip
    page.mouse.move(2, 2)
    assert figure(page, "map").locator(".tip").is_hidden()


CLICK = """async ([selector, x, y, done]) => {
  const target = document.querySelector(selector), box = target.getBoundingClientRect();
  const start = performance.now();
  if (x === null) target.click();
  else {
    const place = {clientX: box.x + x, clientY: box.y + y, bubbles: true};
    target.dispatchEvent(new MouseEvent("click", place));
  }
  do await new Promise((go) => requestAnimationFrame(() => setTimeout(go)));
  while (done && !document.querySelector(done));
  return performance.now() - start;
}"""


def test_fifty_thousand_tensors_answer_a_click(opened: Open, tmp_path: Path) -> None:
    page = opened(documents.big())
    assert (tmp_path / "page.html").stat().st_size < 10_000_000
    radios = '[data-figure="numbers"] input[value="{}"]'
    table = '[data-table="numbers"] '

    def taken(selector: str, done: str = "", x: float | None = None, y: float = 0) -> float:
        milliseconds: float = page.evaluate(CLICK, [selector, x, y, done])
        return milliseconds

    def again(*selectors: str) -> float:
        """The fastest of several clicks: other programs run on this machine too."""
        return min(taken(selector) for selector in selectors)

    def opening() -> float:
        if page.locator(f"{table} .filled").count():
            page.locator(f"{table} summary").click()
        return taken(f"{table} summary", f"{table} tbody tr")

    switches = [radios.format(key) for key in ("exp_avg", "update", "exp_avg_sq", "param")]
    cell = '[data-figure="numbers"] .stage canvas'
    clicks = {
        "switch": lambda: again(*switches),
        "median": lambda: again(*[".apart input"] * 4),
        "cell": lambda: min(taken(cell, ".detail dl", 300, y) for y in (300, 330, 360)),
        "table": lambda: min(opening() for _ in range(4)),
        "sort": lambda: again(*[f"{table} th:nth-child(3) button"] * 4),
        "next": lambda: again(*[f"{table} .tools button:last-child"] * 4),
        "with the table": lambda: again(*switches),
    }
    times = {name: click() for name, click in clicks.items()}
    print({name: round(time) for name, time in times.items()}, "ms")
    assert {name: time for name, time in times.items() if time >= QUICK} == {}
    assert page.locator(f"{table} tbody tr").count() == 100


def test_a_map_of_ten_thousand_pieces_answers_a_click(opened: Open) -> None:
    document = documents.good(layers=300, ranks=8)
    assert 10_000 < len(document["map"]["pieces"]["file"]) < 20_000
    page = opened(document)
    where = ['[data-figure="map"] .stage canvas', 600, 200, ".crumbs button"]
    times = []
    for _ in range(3):
        times.append(page.evaluate(CLICK, where))
        page.locator(".crumbs button").first.click()
    print([round(time) for time in times], "ms")
    assert min(times) < QUICK


def test_hostile_names_run_nothing(opened: Open) -> None:
    document = documents.hostile()
    page = opened(document)
    for details in page.locator("details").all():
        details.locator("summary").click()
    for key in ("numbers", "map"):
        walk(page, key, 1, 1)
        page.keyboard.press("Enter")
    text = page.locator("body").inner_text()
    for found in document["faults"]:
        assert cut(shown(found["message"]), 1000) in text
    assert page.title().startswith("<script>")
    assert page.evaluate("document.querySelectorAll('script').length") == 2
    assert page.evaluate("document.querySelectorAll('img, b script, iframe').length") == 0
    whole = page.locator('[data-table="numbers"] tbody').inner_text()
    assert shown(documents.HOSTILE[4]) in whole
    assert documents.HOSTILE[8] in whole


@pytest.mark.parametrize("section", ["tensors", "numbers", "map", "masters", "steps", "line"])
def test_what_is_lacking_breaks_no_figure(section: str, opened: Open) -> None:
    page = opened(documents.run() | {section: None})
    for key in page.evaluate("Object.keys(grids)"):
        walk(page, key, 1, 0)


@pytest.fixture(scope="module")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = os.environ.get("AXE_CORE")
    if path is None:
        folder = tmp_path_factory.mktemp("axe")
        words = ("npm", "install", "--prefix", str(folder), "axe-core@4")
        subprocess.run(words, check=True, capture_output=True)
        path = str(folder / "node_modules" / "axe-core" / "axe.min.js")
    return Path(path).read_text()


@pytest.mark.parametrize("width", [1280, 420])
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("make", [documents.faulty, documents.run, documents.hostile])
def test_axe_finds_nothing(
    make: Callable[[], Document], scheme: str, width: int, axe: str, opened: Open
) -> None:
    page = opened(make(), color_scheme=scheme, width=width)

    def violations() -> list[str]:
        found = page.evaluate("axe.run()")
        return [
            f"{rule['id']}: {node['html'][:200]} {node['failureSummary']}"
            for rule in found["violations"]
            for node in rule["nodes"]
        ]

    page.evaluate(axe)
    assert violations() == []
    for details in page.locator("details").all():
        details.locator("summary").click()
    walk(page, "numbers", 3, 1)
    page.keyboard.press("Enter")
    walk(page, "map", 2, 2)
    page.keyboard.press("Enter")
    walk(page, "map", 1, 1)
    assert violations() == []


def test_print_opens_tables_and_leaves_nothing_to_press(opened: Open, tmp_path: Path) -> None:
    page = opened(documents.faulty(), color_scheme="dark")
    page.evaluate("addEventListener('beforeprint', () => { window.printed = true; })")
    page.pdf(path=tmp_path / "page.pdf")
    assert page.evaluate("window.printed") is True
    assert (tmp_path / "page.pdf").stat().st_size > 20_000
    assert page.locator("details[open]").count() == 0

    page.emulate_media(media="print")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("details:not([open])").count() == 0
    assert page.locator('[data-table="numbers"] tbody tr').count() == 56
    for gone in ("nav", "fieldset", ".keys", ".tools", ".crumbs"):
        for element in page.locator(gone).all():
            assert element.is_hidden(), gone
    ground = page.evaluate("getComputedStyle(document.documentElement).backgroundColor")
    assert ground == "rgb(255, 255, 255)"
    assert page.evaluate("css('dark')") == ""  # figures are drawn as on a light page
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.evaluate("css('dark')") == "yes"
    assert page.locator("details[open]").count() == 0
