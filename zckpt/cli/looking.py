"""`inspect`: what it prints, and the way to it without click.

A plain `zckpt inspect PATH` needs no parser of options. click takes half of the time of such a run.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

PLAIN = {"--json": "as_json", "-q": "quiet", "--quiet": "quiet"}
"""The flags that a plain command line may have."""


def plain(words: Sequence[str]) -> dict[str, Any] | None:
    """The arguments of `inspect` on a plain command line; None for any other."""
    if not words or words[0] != "inspect" or "_ZCKPT_COMPLETE" in os.environ:
        return None
    paths = [word for word in words[1:] if word not in PLAIN]
    if len(paths) != 1 or paths[0].startswith("-"):
        return None
    return {"path": paths[0], **{PLAIN[word]: True for word in words[1:] if word in PLAIN}}


def inspect(
    path: str,
    tensors: str | None = None,
    steps: bool = False,
    layout: bool = False,
    state: bool = False,
    as_json: bool = False,
    quiet: bool = False,
    **reading: Any,
) -> None:
    """Prints what a checkpoint contains."""
    from .. import api, display

    manifest = api.read(path, **reading)
    if as_json:
        report = api.inspect(manifest)
        if tensors or layout:
            report["tensors"] = api.tensors(manifest, tensors or "*", fragments=layout)
        if state:
            report["state"] = api.state(manifest)
        display.document(report)
    elif state:
        display.document(api.state(manifest))
    elif steps:
        display.steps(manifest)
    elif layout:
        display.layout(manifest, tensors or "*")
    elif tensors:
        display.tensors(api.tensors(manifest, tensors))
    else:
        display.summary(api.inspect(manifest), quiet)
