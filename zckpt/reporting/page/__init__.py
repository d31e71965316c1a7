"""How is a document shown? Stands here until the page itself is merged: it shows the JSON alone."""

from __future__ import annotations

import html
import json
from collections.abc import Mapping
from typing import Any


def render(document: Mapping[str, Any]) -> str:
    return f"<!doctype html><pre>{html.escape(json.dumps(document, allow_nan=False))}</pre>\n"


def render_markdown(document: Mapping[str, Any]) -> tuple[str, str]:
    return f"step {document['line']['step']}\n", "<svg/>\n"
