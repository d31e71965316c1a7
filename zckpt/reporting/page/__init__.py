"""Shows the JSON document of `zckpt report` as one HTML page, or as Markdown with a picture.

    html.py      the page: the parts that need no script, and the data for the script
    charts.py    bar charts
    curves.py    line charts of a run
    markdown.py  twenty lines of Markdown, and the heat map as SVG
    words.py     numbers and names of a document, written for a reader
    page.html    the template of the page; sections/ has one template per section
    page.css     the style of the page: light, dark, printed
    figures.js   draws heat maps, and moves through them by keys
    tables.js    fills a table when it is opened
    owners.js    shows which rank stores what, from the complete model to a parameter
    page.js      the other figures, and the start of the script

A section that a document lacks is omitted. Names in a document are not trusted: everything is
escaped, and the page's Content-Security-Policy allows only the one script and the one style whose
hashes it contains.
"""

from .html import render
from .markdown import render_markdown

__all__ = ["render", "render_markdown"]
