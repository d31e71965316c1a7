"""Will the engine load a checkpoint at this size, and if not, what makes it fit?"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from fractions import Fraction
from secrets import token_hex
from typing import Any

from msgspec import Struct

from .. import api, formats
from ..core.description import VERSION, line_of, said
from ..core.facts import layers_of
from ..core.manifest import Manifest
from ..core.replicas import not_compared
from ..errors import (
    NotACheckpoint,
    Notice,
    WrongOption,
    ZckptError,
    counted,
    listed,
    problem,
    warning,
)
from ..formats.options import OF_CONVERSIONS, options_of
from ..formats.reading import SourceKeywords
from ..judging.verdict import step_of
from .runs import Candidate, candidates, judged

Words = dict[str, Any]
GRID = ("tp", "pp")
OF_TARGETS = api.Options.__annotations__
IN_NAMES = {"dp": "dp", "tp": "tp", "pp": "pp", "ep": "ep", "stage": "zero"}
"""The options that the name of a resharded checkpoint states, with what it calls them."""
WITHOUT = 0
"""The stage of a run whose ds_config states none: DeepSpeed's default."""
CHANGES = "batch-size-changes"
FEW = 16
"""So many ranks are tried in place of a thousand, which takes as long as reading them."""
FLAGS = {"config": "ds-config", "format": "from"}
"""What the command line calls an option, if not by its name in Python."""


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
        """The words for this checkpoint: dp is what tp and pp leave, the stage its ds_config's."""
        words = {name: value for name, value in self.words.items() if value is not None}
        if "dp" not in words and self.size is None:
            words["dp"] = manifest.dp
        elif "dp" not in words:
            assert self.size is not None
            ranks = 1
            for name in GRID:
                ranks *= words.get(name) or manifest.origin.sizes.get(name, 1)
            if self.size % ranks:
                raise WrongOption(
                    "sizes-do-not-fit",
                    f"{counted(self.size, 'process', 'processes')} cannot be divided by tp * pp = "
                    f"{ranks}",
                    hint="start a multiple of it, or say another tp= or pp= (--tp, --pp)",
                )
            words["dp"] = self.size // ranks
        if (config := words.get("config")) is not None:
            zero = config.get("zero_optimization") or {}
            words.setdefault("stage", zero.get("stage", WITHOUT) if type(zero) is dict else WITHOUT)
        return words


def obstacles(manifest: Manifest, words: Mapping[str, Any]) -> list[Notice]:
    """Why its engine does not load a checkpoint as it is; empty if it does.

    Each format has its own table of what must be equal (`Functions.obstacles`).
    """
    find = formats.named(manifest.format).functions.obstacles
    return find(manifest, options_of(_of_target(words))) if find else []


def words_for(manifest: Manifest, words: Mapping[str, Any]) -> Words:
    """The words of a conversion that makes it fit: those that say what the source says are none.

    Megatron-Core's do not say for which ranks they are.
    """
    names = () if formats.named(manifest.format).fits_any_dp else GRID
    own = {name: manifest.origin.sizes.get(name, 1) for name in names}
    return {name: value for name, value in words.items() if own.get(name) != value}


def to_load(candidate: Candidate, manifest: Manifest) -> str:
    """What a program must be told to load it and not another one of the run; empty if nothing."""
    say, tag = formats.named(manifest.format).to_load, str(manifest.origin.tag)
    is_below = say is not None and os.path.isdir(os.path.join(candidate.path, tag))
    return say(candidate.path, tag) if say and is_below else ""


def sizes_of(words: Mapping[str, Any]) -> Words:
    """The sizes of a run, and its stage."""
    return {name: words[name] for name in IN_NAMES if name in words}


def name_for(name: str, words: Mapping[str, Any]) -> str:
    """How a resharded checkpoint is called: checkpoint-500-dp16."""
    parts = [f"{IN_NAMES[word]}{size}" for word, size in sizes_of(words).items()]
    return "-".join([name, *parts])


def batch(
    manifest: Manifest, words: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]
) -> list[Notice]:
    """A warning about the batch of a rank, if their number differs and none of `lines` is of it."""
    before, now = manifest.origin.dp, words["dp"]
    of_zero = manifest.format in ("deepspeed", "onnxruntime")  # others state no size, or adapt
    if not of_zero or before in (None, now) or any(line["code"] == CHANGES for line in lines):
        return []
    share = Fraction(before, now)
    times = f"{share} {'times' if share.denominator == 1 else 'of'}"
    message = (
        f"the run had {before} data-parallel ranks, and has {now} now: to keep the global batch, "
        f"the samples of a rank in a step must be {times} what they were"
    )
    return [warning(CHANGES, message)]


@api.anywhere("path", "like")
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
    more = {k: v for k, v in reading.items() if v not in (None, ())}
    found = candidates(path)
    newest = found[0] if found else Candidate(path, os.path.basename(os.path.abspath(path)), path)
    own = judged(newest, more)
    if isinstance(own.error, NotACheckpoint) and not found:
        raise NotACheckpoint("no-checkpoint", f"{path} has no checkpoint", file=path)
    if own.error is not None:
        raise own.error
    manifest = own.manifest
    assert manifest is not None
    words = asked.of(manifest)
    to = formats.named(engine).name if engine else manifest.format
    differs = f"format {manifest.format}, and not {to}"
    reasons, unnamed = [problem("format-differs", differs, subject=to)], ""
    fixed: Words = {"fix": None, "refused": None}
    if to == manifest.format:
        unnamed = to_load(newest, manifest)
        try:
            reasons = obstacles(manifest, words)
        except ZckptError as error:
            reasons = [*error.notices]
    if reasons:
        fixed |= _fix(newest, manifest, to, words | ({"like": like} if like else {}), more, files)
    reasons = [*own.obstacles, *reasons]
    reasons += [problem("program-must-set", unnamed)] if unnamed else []
    reasons += _unlike(manifest, api.read(like, nameless=True)) if like is not None else []
    return {
        "zckpt": VERSION,
        "command": "check",
        "path": newest.where,
        "format": manifest.format,
        "engine": to,
        "step": step_of(manifest),
        "sizes": sizes_of(words),
        "loads": not reasons,
        "obstacles": said(reasons),
        "warnings": said(
            [
                *([newest.note] if newest.note else []),
                *not_compared(manifest),
                *own.remarks,
            ]
        ),
        **fixed,
    }


def _fix(
    source: Candidate,
    manifest: Manifest,
    to: str,
    words: Words,
    reading: Mapping[str, Any],
    files: Mapping[str, str],
) -> Words:
    """The command that writes it so that it loads, or why there is none: a dry run says it."""
    target = formats.named(to)
    usual = {option.name for option in target.options or ()}
    usual -= {"like"} if to == manifest.format else set()
    usual -= {"dp"} if target.fits_any_dp else set()
    given = {k: v for k, v in words_for(manifest, words).items() if k in usual}
    given |= {"tag": source.tag} if source.tag else {}
    own = to in (manifest.format, manifest.origin.format)
    nowhere = f"{os.path.abspath(source.path)}-{token_hex(8)}"
    more = {} if own else {"to": to}
    tried = {**given, **reading, **more}
    if "dp" in given and not layers_of(manifest.engine):  # no number of ranks is refused
        tried["dp"] = min(given["dp"], FEW)
    try:
        (api.reshard if own else api.convert)(source.path, nowhere, dry_run=True, **tried)
    except ZckptError as error:
        return {"refused": line_of(error.notice)}
    tail = [
        word
        for name, value in {**more, **given, **reading}.items()
        for item in (value if type(value) is tuple else (files.get(name, value),))
        for word in (f"--{FLAGS.get(name, name.replace('_', '-'))}", str(item))
    ]
    command = ["zckpt", "reshard" if own else "convert", source.path, "DST", *tail]
    return {"fix": shlex.join(command)}


def _unlike(manifest: Manifest, other: Manifest) -> list[Notice]:
    """How the parameters differ from those of a run that the program has saved."""
    own, wanted = ({n: p.shape for n, p in m.parameters.items()} for m in (manifest, other))
    lines = []
    if extra := [name for name in own if name not in wanted]:
        message = f"parameters that the model lacks: {listed(extra, 4)}"
        lines.append(problem("parameters-differ", message, subject=extra[0]))
    if missing := [name for name in wanted if name not in own]:
        message = f"parameters that only the model has: {listed(missing, 4)}"
        lines.append(problem("parameters-differ", message, subject=missing[0]))
    others = [name for name in own if name in wanted and own[name] != wanted[name]]
    return lines + [
        problem(
            "parameters-differ",
            f"{name} has the shape {list(own[name])}, and not {list(wanted[name])}",
            subject=name,
        )
        for name in others[:4]
    ]


def _of_target(words: Mapping[str, Any]) -> Words:
    """Those that say what a target is; the others say how its source is read."""
    return {name: value for name, value in words.items() if name in OF_TARGETS}
