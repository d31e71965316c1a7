"""Formats the numbers and names of a report's document as text for people."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from ...errors import sized

UNSEEN = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ud800-\udfff]"
)
"""Control characters, zero-width characters, marks of text direction, and lone surrogates."""
NONE = "\N{EN DASH}"


def shown(value: Any) -> Any:
    """Replaces invisible characters in a text by their code points.

    Values that are not texts, and HTML that is already escaped, are returned unchanged.
    """
    if isinstance(value, str) and not hasattr(value, "__html__"):
        return UNSEEN.sub(lambda found: f"\\u{ord(found[0]):04x}", value)
    return value


def cut(name: str, most: int) -> str:
    """Shortens a name to at most `most` characters, by a cut in its middle."""
    if len(name) <= most:
        return name
    tail = (most - 1) // 2
    return f"{name[: most - 1 - tail]}…{name[len(name) - tail :]}"


def short(value: Any) -> str:
    """Formats a number with four digits; a dash for None; other values as text."""
    if value is None:
        return NONE
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}" if abs(value) >= 10_000 else str(value)
    return f"{value:.4g}"


def number(value: int | None) -> str:
    """Formats an integer with separators: 2,345; a dash for None."""
    return f"{value:,}" if isinstance(value, int) else NONE


def size(value: int | None) -> str:
    """Formats a number of bytes: 1.49 GB; a dash for None."""
    return sized(value) if isinstance(value, int) else NONE


def rounded(value: int) -> str:
    """Formats a count for a headline: 6.74 billion; all digits below a million."""
    for size, word in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if value >= size:
            return f"{value / size:.3g} {word}"
    return f"{value:,}"


def sizes(line: Mapping[str, Any]) -> str:
    """Formats the parallel sizes of a checkpoint: "dp 2, tp 4".

    Sizes of 1 are omitted, unless all are 1.
    """
    all_sizes = line.get("sizes") or {}
    larger = {key: value for key, value in all_sizes.items() if value != 1} or all_sizes
    return ", ".join(f"{key} {value}" for key, value in larger.items())


def title(document: Mapping[str, Any]) -> tuple[str, str]:
    """The names of a checkpoint's folder and of its run, as users know them; "" if unknown.

    They are `checkpoint-500` and `run5` even if the path is `run5/checkpoint-500/global_step500`.
    """
    path, line = str(document["path"]), document.get("line") or {}
    name = (document.get("about") or {}).get("name")
    if not name:
        return line.get("name") or path, ""
    parts = (path if "://" in path else os.path.abspath(path)).split("/")
    places = [place for place, part in enumerate(parts) if part == name]
    return name, parts[places[-1] - 1 if places else -1]


def layer(document: Mapping[str, Any], row: str) -> str:
    """The name of a layer that is a row of the heat maps: `h.0` for the row "0"."""
    return str((document.get("layers") or {}).get(row, row))


def alone(message: str, kind: str) -> str:
    """Removes the kind of a fault ("KIND: ") from the beginning of its message.

    The page prints the kind in another place.
    """
    return message.removeprefix(f"{kind}: ")


def is_by_step(run: Mapping[str, Any]) -> bool:
    """Whether all checkpoints of a run have known and different steps."""
    steps = [point["step"] for point in run["checkpoints"]]
    return None not in steps and len({*steps}) == len(steps)


def run_labels(run: Mapping[str, Any]) -> list[str]:
    """Short names of checkpoints: their steps, or full names if steps are equal or unknown."""
    points = run["checkpoints"]
    return [short(point["step"]) if is_by_step(run) else point["name"] for point in points]


def of_this(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The faults of the checkpoint that is shown, not those of older checkpoints of its run."""
    faults = document.get("faults") or []
    return [line for line in faults if not (document.get("run") and line.get("checkpoint"))]


def of_run(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The faults and warnings about older checkpoints that the table of the run does not show.

    For example, the fault that a checkpoint is missing: this checkpoint has no row in the table.
    """
    run = document.get("run")
    names = {point["name"] for point in run["checkpoints"] if point.get("faults")} if run else {}
    return [
        line
        for line in document.get("faults") or []
        if run and line.get("checkpoint") and not (line["fault"] and line["checkpoint"] in names)
    ]


def facts(document: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Facts about a checkpoint for the page's first section, as (name, value) pairs.

    Unknown facts are left out.
    """
    line, about = document.get("line") or {}, document.get("about") or {}
    engine = line.get("engine") or line.get("format")
    versions = ", ".join(
        f"{key} {value}"
        for key, value in (line.get("versions") or {}).items()
        if str(value) not in str(engine)
    )
    parameters, trainable = line.get("parameters"), line.get("trainable")
    of_them = "" if trainable in (None, parameters) else f", {rounded(trainable)} trained"
    files = line.get("files")
    step, planned = line.get("steps") or line.get("step"), about.get("planned")
    if planned is not None and step is not None:
        step = f"{step}, {planned:,} planned"
    model = [about.get("model"), about.get("model_class")]
    rows = [
        ("model", ", ".join(filter(None, model))),
        ("step", step),
        ("loss", loss(about, line.get("step"))),
        ("learning rate", learning_rate(document)),
        ("epoch", _known(about.get("epoch"))),
        ("saved", time(about.get("saved"))),
        ("global batch", about.get("global_batch") and f"{about['global_batch']:,}"),
        ("written by", engine),
        ("ranks", sizes(line)),
        ("parameters", None if parameters is None else f"{rounded(parameters)}{of_them}"),
        ("weights", line.get("dtype")),
        ("optimizer", line.get("optimizer")),
        ("size", line.get("bytes") and size(line["bytes"]) + f" in {files} files" * bool(files)),
        ("checksums", line.get("checked")),
        ("digest", line.get("digest")),
        ("versions", versions),
    ]
    return [(name, str(value)) for name, value in rows if value not in (None, "")]


def learning_rate(document: Mapping[str, Any]) -> str | None:
    """Formats the learning rate: that of the trainer's log, and the optimizer's if it differs.

    The two may differ: the Trainer logs the rate of the last step (transformers 5.24), but the
    groups of the optimizer have the rate of the next step.
    """
    logged = (document.get("about") or {}).get("learning_rate")
    groups = (document.get("steps") or {}).get("groups") or ()
    stated_rates = [group["values"].get("lr") for group in groups]
    rates = {rate for rate in stated_rates if isinstance(rate, (int, float))} - {logged}
    if logged is None or not rates:
        return _known(logged)
    rates_of_optimizer = " and ".join(map(short, sorted(rates)))
    return f"{short(logged)} in the trainer's log, {rates_of_optimizer} in the optimizer"


def loss(about: Mapping[str, Any], step: Any) -> str:
    """Formats the last logged loss with its step, and the loss of the last evaluation."""
    if about.get("loss") is None:
        return ""
    at = about.get("loss_step")
    where = "" if at in (None, step) else f" at step {short(at)}"
    other = about.get("evaluation_loss")
    return f"{short(about['loss'])}{where}" + ("" if other is None else f", eval {short(other)}")


def _known(value: Any) -> str | None:
    return None if value is None else short(value)


def time(saved: Any) -> str:
    """Formats a time in UTC to the minute: 2026-11-29 10:32 UTC."""
    return f"{saved[:10]} {saved[11:16]} UTC" if isinstance(saved, str) else ""


def advice(following: Mapping[str, Any]) -> str:
    """Puts the section `next` into one sentence: what is lost, what is left and what to do.

    Commands that fill in other values for lost ones are left out.
    """
    parts = [*(following.get("lost") or []), following.get("left") or ""]
    steps = following.get("do") or []
    exact = (step["what"] for step in steps if step["command"] and not step.get("makes_up"))
    parts.append(", or ".join(exact))
    text = "; ".join(filter(None, parts))
    return f"{text[:1].upper()}{text[1:]}." if text else ""


def verdict(document: Mapping[str, Any]) -> tuple[str, str]:
    """The verdict on the checkpoint that is shown, and a short reason.

    The verdict is "bad" if there is a fault, "odd" if the user should look at something else, such
    as a difference, and otherwise "good".
    """
    faults = of_this(document)
    wrong = sum(bool(fault["fault"]) for fault in faults)
    if wrong:
        return "bad", f"{wrong:,} fault{'s' * (wrong != 1)}"
    if faults:
        return "odd", f"no fault, oddities to check: {len(faults):,}"
    if (equal := (document.get("against") or {}).get("equal")) is not None:  # diff, probe-diff
        return ("good", "no difference found") if equal else ("odd", "the two differ")
    if (document.get("line") or {}).get("checked") == "not read":
        return "good", "nothing wrong; no tensor was read"
    return "good", "no fault found"
