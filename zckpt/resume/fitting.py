"""The sizes and options of the next run, and the conversion that makes a checkpoint fit it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
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
"""The options in the name of a resharded checkpoint, with their abbreviations there."""
WITHOUT = 0
"""DeepSpeed's default for the ZeRO stage, if the ds_config states none."""
MUST_SET = "program-must-set"
REGROUPED = "groups-differ"
"""The notice code for different param groups. A conversion with --groups-from cures them."""
CURED = ("size-differs", "format-differs", "scheduler-differs", REGROUPED)
"""The codes of reasons that a conversion can remove. It never changes the parameters."""
FLAGS = {"config": "ds-config", "format": "from"}
"""Options whose name on the command line differs from the name in Python."""


class Asked(Struct, frozen=True):
    """What the user says about the next run: the number of processes and the options.

    `size` is the number of processes; if it is None, the data-parallel size is the source's.
    `words` are keywords of `zckpt.reshard`; None means not given.
    """

    size: int | None
    words: Mapping[str, Any]

    def __post_init__(self) -> None:
        known_words = {*SourceKeywords.__annotations__, *OF_TARGETS, "masters_from_weights"}
        known_words -= {"tag", *OF_CONVERSIONS}
        if unknown := sorted(self.words.keys() - known_words):
            raise TypeError(f"auto_resume() takes no argument {unknown[0]!r}")
        options_of(of_target(self.words))  # raises WrongOption for a wrong value

    def of(self, manifest: Manifest) -> Words:
        """Completes the options of the next run for this checkpoint.

            dp       the number of processes / (tp * pp), if it is not given
            stage    the ZeRO stage of the ds_config

        Raises WrongOption if tp * pp does not divide the number of processes.
        """
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
                    hint=f"start a multiple of {ranks} processes, or give another tp= or pp= "
                    "(--tp, --pp)",
                )
            words["dp"] = self.size // ranks
        if (config := words.get("config")) is not None:
            zero = config.get("zero_optimization") or {}
            words.setdefault("stage", zero.get("stage", WITHOUT) if type(zero) is dict else WITHOUT)
        return words

    def unused(self, to: str) -> list[Notice]:
        """Warns about options that do not apply to the format `to`, such as a ZeRO stage.

        Sizes such as `dp` get no warning: if a format's files are not divided among ranks, they can
        be loaded with any size. The universal format gets no warnings, because no engine loads it
        directly.
        """
        other_words = {name: word for name, word in self.words.items() if name not in SIZES_OF_RUN}
        words = {} if formats.named(to).is_neutral else other_words
        return [
            warning("option-without-effect", f"{flag} changes nothing here: {why}", subject=flag)
            for flag, why in without_use(to, words).items()
        ]


class Conversion(Struct, frozen=True):
    """A conversion that makes a checkpoint fit the next run.

    If `to` (a format) is set, `zckpt.convert` makes the conversion, else `zckpt.reshard`.
    """

    words: Words
    to: str | None = None

    def command(
        self, source: str, reading: Mapping[str, Any], files: Mapping[str, str] = {}
    ) -> str:
        """The shell command for this conversion of `source`, with the word DST as its target.

        `reading` are options for reading the source, such as `step_policy`. `files` maps an option
        to the file with its value.
        """
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
    """Finds the conversion that makes a checkpoint fit a run of the format `to`.

    `words` are the options of that run. Options that would change nothing are left out, such as a
    size equal to the source's. For another engine, options that its format lacks are left out too.
    """
    origin = manifest.run.origin
    # a universal checkpoint is written for the engine from which it was converted
    to = str(origin.format) if to == manifest.format else to
    target = formats.named(to)
    names = () if target.fits_any_dp else GRID  # such files do not say for which ranks they are
    sizes_of_source = {name: origin.sizes.get(name, 1) for name in names}
    given = {name: value for name, value in words.items() if sizes_of_source.get(name) != value}
    if target.fits_any_dp and not (to == manifest.format and origin.dp):
        given.pop("dp", None)
    if "tp" in words and "tp" not in given:  # only tp changes the rows of the vocabulary
        given.pop("vocab_size", None)
    if to == manifest.format:  # the source keeps its groups and slices
        given.pop("like", None)
    if to == origin.format:
        return Conversion(given)
    known_options = {option.name for option in target.options or ()}
    return Conversion({name: value for name, value in given.items() if name in known_options}, to)


def to_load(candidate: Candidate, manifest: Manifest) -> str:
    """Tells the user what to set so that the program loads this checkpoint; "" if nothing."""
    say, tag = formats.named(manifest.format).to_load, str(manifest.run.origin.tag)
    is_below = say is not None and os.path.isdir(os.path.join(candidate.path, tag))
    return say(candidate.path, tag) if say and is_below else ""


def sizes_of(words: Mapping[str, Any]) -> Words:
    """Selects the sizes (`dp`, `tp` and so on) and the ZeRO stage from the options of a run."""
    return {name: words[name] for name in IN_NAMES if name in words}


def name_for(name: str, words: Mapping[str, Any]) -> str:
    """The name of a resharded copy of the checkpoint `name`, such as checkpoint-500-dp16."""
    parts = [f"{IN_NAMES[word]}{size}" for word, size in sizes_of(words).items()]
    return "-".join([name.replace("/", "-"), *parts])
