"""What does the next run ask for, and which conversion makes a checkpoint fit it?"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import prod
from typing import Any

from msgspec import Struct

from .. import formats
from ..core.checkpoint.manifest import Manifest
from ..errors import (
    Notice,
    WrongOption,
    counted,
    warning,
)
from ..formats.options import OF_CONVERSIONS, options_of, without_use
from ..formats.reading import SourceKeywords
from ..judging.loads import OF_TARGETS, of_target
from .runs import Candidate

Words = dict[str, Any]
GRID = ("tp", "pp")
SIZES_OF_RUN = ("dp", *GRID, "ep")
IN_NAMES = {"dp": "dp", "sp": "sp", "tp": "tp", "pp": "pp", "ep": "ep", "stage": "zero"}
"""The options that the name of a resharded checkpoint states, with what it calls them."""
WITHOUT = 0
"""The stage of a run whose ds_config states none: DeepSpeed's default."""
CHANGES = "batch-size-changes"
MUST_SET = "program-must-set"
REGROUPED = "groups-differ"
"""The code of other groups of the optimizer, which a run that the program has saved cures."""
CURED = ("size-differs", "format-differs", "scheduler-differs", REGROUPED)
"""The codes of reasons that a conversion can cure: it keeps parameters."""
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
        known_words = {*SourceKeywords.__annotations__, *OF_TARGETS, "masters_from_weights"}
        known_words -= {"tag", *OF_CONVERSIONS}
        if unknown := sorted(self.words.keys() - known_words):
            raise TypeError(f"auto_resume() takes no argument {unknown[0]!r}")
        options_of(of_target(self.words))  # which looks at their values

    def of(self, manifest: Manifest) -> Words:
        """The words for this checkpoint: dp is what tp and pp leave, the stage its ds_config's."""
        words = {name: value for name, value in self.words.items() if value is not None}
        if "dp" not in words and self.size is None:
            words["dp"] = manifest.dp
        elif "dp" not in words:
            assert self.size is not None
            ranks = prod(words.get(name) or manifest.run.origin.sizes.get(name, 1) for name in GRID)
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

    def unused(self, to: str) -> list[Notice]:
        """Lines on words that mean nothing to a run of the format `to`, such as a stage.

        Files without ranks of their own fit any sizes, and zckpt's are first written for an engine.
        """
        other_words = {name: word for name, word in self.words.items() if name not in SIZES_OF_RUN}
        words = {} if formats.named(to).is_neutral else other_words
        return [
            warning("option-without-effect", f"{flag} changes nothing here: {why}", subject=flag)
            for flag, why in without_use(to, words).items()
        ]


class Conversion(Struct, frozen=True):
    """What makes a checkpoint fit: a call of `zckpt.reshard`, or of `zckpt.convert` to `to`."""

    words: Words
    to: str | None = None

    def command(
        self, source: str, reading: Mapping[str, Any], files: Mapping[str, str] = {}
    ) -> str:
        """The same as a command for a target DST; `files` have the values of options."""
        more = {} if self.to is None else {"to": self.to}
        tail = [
            word
            for name, value in {**more, **self.words, **reading}.items()
            for item in (value if type(value) is tuple else (files.get(name, value),))
            for word in (
                f"--{FLAGS.get(name, name.replace('_', '-'))}",
                *(() if item is True else (str(item),)),
            )
        ]
        verb = "reshard" if self.to is None else "convert"
        return shlex.join(["zckpt", verb, source, "DST", *tail])


def conversion(manifest: Manifest, to: str, words: Mapping[str, Any]) -> Conversion:
    """The conversion that makes a checkpoint fit a run of the format `to` with these words.

    Sizes equal to the source's are left out. So is a number of ranks if the files are for any
    number, and for another engine what its format does not understand. A checkpoint that belongs to
    no engine is written for the one that trained.
    """
    origin = manifest.run.origin
    to = str(origin.format) if to == manifest.format else to
    target = formats.named(to)
    names = () if target.fits_any_dp else GRID  # such files do not say for which ranks they are
    sizes_of_source = {name: origin.sizes.get(name, 1) for name in names}
    given = {name: value for name, value in words.items() if sizes_of_source.get(name) != value}
    if target.fits_any_dp and not (to == manifest.format and origin.dp):
        given.pop("dp", None)
    if "tp" in words and "tp" not in given:  # which alone changes rows
        given.pop("vocab_size", None)
    if to == manifest.format:  # whose groups and slices are its own
        given.pop("like", None)
    if to == origin.format:
        return Conversion(given)
    known_options = {option.name for option in target.options or ()}
    return Conversion({name: value for name, value in given.items() if name in known_options}, to)


def to_load(candidate: Candidate, manifest: Manifest) -> str:
    """What a program must be told to load it and not another one of the run; empty if nothing."""
    say, tag = formats.named(manifest.format).to_load, str(manifest.run.origin.tag)
    is_below = say is not None and os.path.isdir(os.path.join(candidate.path, tag))
    return say(candidate.path, tag) if say and is_below else ""


def sizes_of(words: Mapping[str, Any]) -> Words:
    """The sizes of a run, and its stage."""
    return {name: words[name] for name in IN_NAMES if name in words}


def name_for(name: str, words: Mapping[str, Any]) -> str:
    """How a resharded checkpoint is called: checkpoint-500-dp16."""
    parts = [f"{IN_NAMES[word]}{size}" for word, size in sizes_of(words).items()]
    return "-".join([name.replace("/", "-"), *parts])


def batch(
    manifest: Manifest, words: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]
) -> list[Notice]:
    """A warning about the batch of a rank, if their number differs and none of `lines` is of it."""
    before, now = manifest.run.origin.dp, words["dp"]
    of_zero = manifest.format in ("deepspeed", "onnxruntime")  # others state no size, or adapt
    if not of_zero or before in (None, now) or any(line["code"] == CHANGES for line in lines):
        return []
    sp = words.get("sp") or manifest.run.origin.sequence_ranks(now)
    share = Fraction(before, manifest.run.origin.sp or 1) / Fraction(now, sp)
    times = f"{share} {'times' if share.denominator == 1 else 'of'}"
    message = (
        f"the run had {before} data-parallel ranks, and has {now} now: to keep the global batch, "
        f"the samples of a rank in a step must be {times} what they were"
    )
    return [warning(CHANGES, message)]
