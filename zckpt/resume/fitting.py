"""Will the engine load a checkpoint at this size, and if not, what makes it fit?"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from .. import api, formats
from ..core.manifest import Manifest
from ..errors import NotACheckpoint, WrongOption, counted, listed
from ..formats.options import OF_CONVERSIONS, options_of
from ..formats.reading import SourceKeywords
from .runs import candidates

Words = dict[str, Any]
GRID = ("tp", "pp")
OF_TARGETS = api.Options.__annotations__
IN_NAMES = {"dp": "dp", "tp": "tp", "pp": "pp", "ep": "ep", "stage": "zero"}
"""The options that the name of a resharded checkpoint states, with what it calls them."""


class Asked(Struct, frozen=True):
    """What the next run is: `size` processes, and the sizes and options in `words`.

    `words` are keywords of `zckpt.reshard`, of which None says nothing. Without a `size` it has as
    many data-parallel ranks as the source.
    """

    size: int | None
    words: Mapping[str, Any]

    def __post_init__(self) -> None:
        known = {*SourceKeywords.__annotations__, *OF_TARGETS, "masters_from_weights"}
        known -= {"tag", *OF_CONVERSIONS}
        if unknown := sorted(self.words.keys() - known):
            raise TypeError(f"auto_resume() takes no argument {unknown[0]!r}")
        options_of(_of_target(self.words))  # which looks at their values

    def of(self, manifest: Manifest) -> Words:
        """The words for this checkpoint: what is left of the size, divided by tp and pp, is dp."""
        words = {name: value for name, value in self.words.items() if value is not None}
        if "dp" not in words and self.size is None:
            words["dp"] = manifest.dp
        elif "dp" not in words:
            assert self.size is not None
            ranks = 1
            for name in GRID:
                ranks *= words.get(name) or manifest.source.get(name) or 1
            if self.size % ranks:
                raise WrongOption(
                    f"{counted(self.size, 'process', 'processes')} cannot be divided by tp * pp = "
                    f"{ranks}",
                    hint="start a multiple of it, or say another tp= or pp= (--tp, --pp)",
                )
            words["dp"] = self.size // ranks
        return words


def obstacles(manifest: Manifest, words: Mapping[str, Any]) -> list[str]:
    """Why its engine does not load a checkpoint as it is; empty if it does.

    Each format has its own table of what must be equal (`Functions.obstacles`).
    """
    find = formats.named(manifest.format).functions.obstacles
    return find(manifest, options_of(_of_target(words))) if find else []


def words_for(manifest: Manifest, words: Mapping[str, Any]) -> Words:
    """The words of a conversion that makes it fit: those that say what the source says are none."""
    source = manifest.source
    own = {name: source.get(name) or 1 for name in GRID}
    return {name: value for name, value in words.items() if own.get(name) != value}


def name_for(name: str, words: Mapping[str, Any]) -> str:
    """How a resharded checkpoint is called: checkpoint-500-dp16."""
    parts = [f"{short}{words[word]}" for word, short in IN_NAMES.items() if word in words]
    return "-".join([name, *parts])


def batch(manifest: Manifest, words: Mapping[str, Any], said: Sequence[str]) -> list[str]:
    """A sentence on the batch of a rank, if their number differs and none in `said` is of it."""
    before, now = manifest.source.get("dp"), words["dp"]
    of_zero = manifest.format in ("deepspeed", "onnxruntime")  # others state no size, or adapt
    if not of_zero or before in (None, now) or any("global batch" in line for line in said):
        return []
    return [
        f"the run had {before} data-parallel ranks, and has {now} now: to keep the global batch, "
        f"the samples of a rank in a step must be {before}/{now} of what they were"
    ]


def check(
    path: str,
    asked: Asked,
    engine: str | None = None,
    like: str | None = None,
    reading: Mapping[str, Any] = {},
    files: Mapping[str, str] = {},
) -> Words:
    """The report of `zckpt check`: does `engine` load the checkpoint, or a run's newest one?

    `files` are those in which the command found an option's value, for the proposed command.
    """
    found = candidates(path)
    if not found:
        raise NotACheckpoint(f"{path} has no checkpoint")
    newest = found[0]
    more = {"tag": newest.tag, **{k: v for k, v in reading.items() if v is not None}}
    manifest = api.read(newest.path, nameless=True, **more)
    words = asked.of(manifest)
    to = formats.named(engine).name if engine else manifest.format
    stated = str(manifest.source.get("format"))
    reasons = [f"format {manifest.format}, and not {to}"] if to != manifest.format else []
    reasons += [] if reasons else obstacles(manifest, words)
    names = _unlike(manifest, api.read(like, nameless=True)) if like is not None else []
    report: Words = {
        "zckpt": 1,
        "command": "check",
        "path": newest.where,
        "format": manifest.format,
        "engine": to,
        "step": manifest.step,
        "sizes": {name: words[name] for name in IN_NAMES if name in words},
        "loads": not reasons and not names,
        "obstacles": reasons + names,
        "fix": None,
    }
    if reasons:
        given = {k: files.get(k, v) for k, v in words_for(manifest, words).items()}
        flags = {"config": "ds-config"}
        tail = [f"--{flags.get(k, k)} {shlex.quote(str(v))}" for k, v in given.items()]
        same = to in (manifest.format, stated)
        head = [shlex.quote(newest.path), "DST", *([] if same else ["--to", to])]
        tag = ["--tag", newest.tag] if newest.tag else []
        report["fix"] = " ".join(["zckpt", "reshard" if same else "convert", *head, *tag, *tail])
    return report


def _unlike(manifest: Manifest, other: Manifest) -> list[str]:
    """How the parameters differ from those of a run that the program has saved."""
    own, wanted = ({n: p.shape for n, p in m.parameters.items()} for m in (manifest, other))
    lines = []
    if extra := [name for name in own if name not in wanted]:
        lines.append(f"parameters that the model lacks: {listed(extra, 4)}")
    if missing := [name for name in wanted if name not in own]:
        lines.append(f"parameters that only the model has: {listed(missing, 4)}")
    return (
        lines
        + [
            f"{name} has the shape {list(own[name])}, and not {list(wanted[name])}"
            for name in own
            if name in wanted and own[name] != wanted[name]
        ][:4]
    )


def _of_target(words: Mapping[str, Any]) -> Words:
    """Those that say what a target is; the others say how its source is read."""
    return {name: value for name, value in words.items() if name in OF_TARGETS}
