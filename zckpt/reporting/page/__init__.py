"""How is a document shown? As one HTML page, or as Markdown with a picture.

    html.py      the page: what is there without a script, and the document for the script
    charts.py    where the bars of a chart stand
    curves.py    where the lines of a run's charts stand
    markdown.py  twenty lines of Markdown, and the heat map as SVG
    words.py     numbers and names of a document as a reader can see them
    page.html    the frame of the page; sections/ has one template per section
    page.css     its style: light, dark, printed
    figures.js   how a heat map is drawn and walked through
    tables.js    how a table is filled when it is opened
    owners.js    who has what: from the whole model to a parameter
    page.js      what the other figures show, and the start

A section that a document lacks is not shown. Names are hostile: everything is escaped, and the
page's policy runs nothing but the one script and the one style that are hashed in it.
"""

from .html import render
from .markdown import render_markdown

__all__ = ["render", "render_markdown"]
