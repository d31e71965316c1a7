"""Which pictures do the pages show? Run this file to make them: `python docs/screenshots.py`.

It writes a page for each small example, and takes its pictures with headless Chromium (Debian's
package `chromium`; `pip install -e '.[html,browser]'`). `python docs/screenshots.py PAGE.html`
takes one picture of any page, in light and in dark, beside it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from playwright.sync_api import sync_playwright

ROOT = Path(__file__).parent.parent
CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
PICTURES = Path(__file__).parent / "pictures"
FRAME = 16  # pixels around a section


class Shot(NamedTuple):
    """One picture: of a whole page, or of the section with this id."""

    picture: str
    words: tuple[str, ...]  # of the command that writes the page
    section: str = ""
    scheme: str = "light"
    width: int = 1180
    keys: tuple[str, ...] = ()  # pressed in the section's figure


SHOTS = (
    Shot("report-light.png", ("report", "examples/trainer/checkpoint-4")),
    Shot("report-dark.png", ("report", "examples/trainer/checkpoint-4"), scheme="dark"),
    Shot(
        "numbers.png",
        ("report", "examples/trainer/checkpoint-4"),
        "numbers",
        keys=("ArrowDown", "ArrowRight"),
    ),
    Shot(
        "map.png",
        ("report", "examples/trainer/checkpoint-4"),
        "map",
        keys=("ArrowDown", "ArrowRight"),
    ),
)


def shoot(browser: Any, page: Path, picture: Path, shot: Shot) -> None:
    """Takes one picture of a page; of a section at twice its size, for sharp screens."""
    opened = browser.new_page(
        viewport={"width": shot.width, "height": 800},
        color_scheme=shot.scheme,
        device_scale_factor=2 if shot.section else 1,
    )
    opened.goto(page.resolve().as_uri())
    opened.wait_for_selector("html[data-ready]", state="attached")
    if shot.keys:
        opened.locator(f"section:has(#{shot.section}) .stage canvas").focus()
    for key in shot.keys:
        opened.keyboard.press(key)
    where: dict[str, Any] = {"full_page": True}
    if shot.section:
        box = opened.locator(f"section:has(#{shot.section})").bounding_box()
        where["clip"] = {
            "x": box["x"] - FRAME,
            "y": box["y"] + opened.evaluate("scrollY") - FRAME,
            "width": box["width"] + 2 * FRAME,
            "height": box["height"] + 2 * FRAME,
        }
    opened.screenshot(path=picture, **where)
    opened.close()


def main(pages: Sequence[str]) -> None:
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for name in pages:
            page = Path(name)
            for scheme in ("light", "dark"):
                shot = Shot("", (), scheme=scheme)
                shoot(browser, page, page.with_name(f"{page.stem}-{scheme}.png"), shot)
        if not pages:
            PICTURES.mkdir(exist_ok=True)
        for shot in () if pages else SHOTS:
            page = Path(folder, "page.html")
            words = (sys.executable, "-m", "zckpt", *shot.words, "--output", str(page))
            written = subprocess.run(words, cwd=ROOT)
            if written.returncode not in (0, 3):  # 3: the page shows a fault
                raise SystemExit(f"{' '.join(words)} failed")
            shoot(browser, page, PICTURES / shot.picture, shot)
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1:])
