"""How a path becomes a manifest: which checkpoint it means, and under which names."""

from __future__ import annotations

import os
from collections.abc import Sequence

from . import formats
from .core import sources
from .core.manifest import Manifest
from .core.neighbors import lacking
from .core.targets import refuse_unfinished
from .core.values import replace, valueclass
from .errors import CorruptCheckpoint, WrongOption
from .formats.format import Format
from .training import steps
from .training.names import Renames, called_as, names_of, renamed

REPLICAS = ("rank0", "mean")
"""What may be taken of the copies that tensor ranks hold, if they differ."""


@valueclass
class Reading:
    """What a user says about a checkpoint that is to be read; see `zckpt.read`.

    `format` and `tag` choose one where the path has several, `step_policy` decides between steps
    that disagree, `param_names` are for an optimizer that knows its parameters by number. With
    `weights_only` such an optimizer may be left unread. `rename` are pairs of a regular expression
    and its replacement. `family` is the value of `--family`. `tp_rules` is a family or a file that
    says how tensor ranks cut parameters. `replicas` says what is taken of their copies of one
    tensor, if these differ. With `apart` ranks that share a model are not joined: a target for the
    same ranks needs no whole tensors. With `slices` it is said too how one rank's tensors would be
    cut over several. With `masters_from_weights` masters that do not round to their weights are
    given up, with the states beside them: that reads all masters.
    """

    format: str | None = None
    tag: str | None = None
    step_policy: str | None = None
    param_names: Sequence[str] | None = None
    weights_only: bool = False
    rename: Renames = ()
    family: str | None = None
    tp_rules: str | os.PathLike[str] | None = None
    replicas: str | None = None
    apart: bool = False
    slices: bool = False
    masters_from_weights: bool = False

    def __post_init__(self) -> None:
        if self.replicas not in (None, *REPLICAS):
            raise WrongOption(
                f"--replicas {self.replicas!r} is none of {', '.join(REPLICAS)}",
                hint="leave it out, unless an error says that copies of tensor ranks differ",
            )


def read(path: str | os.PathLike[str], reading: Reading) -> Manifest:
    """The manifest of the checkpoint at `path`, with its parameters renamed. Reads no tensor.

    Its warnings name parameters that lack states of the optimizer. Raises SourceChanged if a file
    of the checkpoint changes meanwhile.
    """
    steps.check_policy(reading.step_policy)
    path = os.fspath(path)
    refuse_unfinished(path)
    names = None if reading.param_names is None else tuple(reading.param_names)
    format = formats.recognize(path, reading.format, reading.tag)
    with sources.watching() as watch:
        rules = None if reading.tp_rules is None else os.fspath(reading.tp_rules)
        manifest = format.read(
            path,
            reading.tag,
            reading.step_policy,
            names,
            reading.weights_only,
            rules,
            reading.apart,
            reading.slices,
        )
        siblings = (item.path for item in manifest.siblings)
        fingerprints = watch.of((*manifest.files, *siblings))
    _check_names(manifest)
    if reading.masters_from_weights:
        manifest = format.rebuilt(replace(manifest, fingerprints=fingerprints))
    if reading.replicas == "mean":
        manifest = format.averaged(manifest)
    manifest = replace(manifest, fingerprints=fingerprints, objects=frozenset(watch.objects))
    manifest = renamed(manifest, reading.rename)
    if reading.family is not None:
        from .training import families

        manifest = families.translated(manifest, reading.family)
    lost, stateless = lacking(manifest)
    lines = [*manifest.warnings, *lost, *stateless, *_unused(manifest, reading, format)]
    return replace(manifest, warnings=tuple(dict.fromkeys(lines)))  # universal ones keep warnings


def _unused(manifest: Manifest, reading: Reading, format: Format) -> list[str]:
    """Options for tensor ranks of a checkpoint that has none."""
    if manifest.source.get("tp") not in (None, 1) or "tensor_parallel" in manifest.state:
        return []
    tp_rules = None if format.rules else reading.tp_rules  # such a reader says so itself
    return [
        f"{flag} {value} is not used: {manifest.root} has no tensor ranks"
        for flag, value in (("--tp-rules", tp_rules), ("--replicas", reading.replicas))
        if value is not None
    ]


def _check_names(manifest: Manifest) -> None:
    """Raises CorruptCheckpoint for names that no file can have: texts that are not Unicode."""
    for name in (*manifest.entries, *manifest.parameters, *manifest.buffers):
        try:
            name.encode()
        except UnicodeEncodeError as error:
            raise CorruptCheckpoint(
                f"{manifest.root} has the name {name!a}, which is not valid text",
                hint="a bit of the name may be flipped: take another copy of the file",
            ) from error


def read_other(path: str | os.PathLike[str], first: Manifest, reading: Reading) -> Manifest:
    """The checkpoint at `path` under the names of `first`, to be compared with it."""
    other = read(path, Reading(param_names=reading.param_names, tp_rules=reading.tp_rules))
    return called_as(other, names_of(first))
