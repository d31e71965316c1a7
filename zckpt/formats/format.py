"""What is a format? One engine's way to lay out a checkpoint in files, and what zckpt does with it.

A format is a folder beside this file. Its `__init__.py` says what it is, as a `Format`: all that
recognizing it and `--help` need. Its `functions.py` has what zckpt does with its files, as
`Functions`; it is imported when the format is used. The functions are in modules with the same
names in every folder:

    files.py     which files make the checkpoint            detect, detect_weak, ROLES
    options.py   what a user may ask of a target            OPTIONS, REASONS
    read.py      the manifest of these files                read, check
    write.py     the files of a target                      lay_out, seal
    functions.py why a run does not load them as they are   obstacles
    gather.py    the engine's own rule for its pieces       partitions

To add a format, write its folder, and put its `FORMAT` into `FORMATS` in `__init__.py`. To add an
option to a format, declare it in the format's `options.py` and list it in its `OPTIONS`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any, Literal

from msgspec import Struct

from ..core.checkpoint import agreement
from ..core.checkpoint.manifest import Manifest
from ..core.checkpoint.mended import Mended
from ..core.passes.layout import CopyOutcome, Layout
from ..core.passes.resources import uncollected
from ..core.ranks.partition import Partition
from ..core.storage.folder import Folder
from ..core.storage.inventory import Role
from ..errors import Notice, problem
from ..training.options import DP, Option, Options
from .reading import Reading


def nothing(_path: str) -> list[str]:
    """Finds no checkpoint: for a format that is not recognized in this way."""
    return []


def nowhere(_path: str) -> None:
    """No number: for a format whose files state no counter that is read alone."""


class Format(Struct, frozen=True, eq=False):
    """What one format is.

    `name` is what `--from` and `--to` call it, and with _ for - its folder. `about` is a line of
    `zckpt formats`. Formats of one `family` name parameters alike, so that `convert` keeps the
    source's names.
    """

    name: str
    about: str
    family: str
    detect: Callable[[str], list[str]] = nothing
    """Tags of the checkpoints at a path; only the meant one if a file says which that is. A format
    without tags gives one empty tag. The list is empty for anything else.

    Without this function users cannot name the format as a source."""
    tags: Callable[[str], list[str]] = nothing
    """All checkpoints of a run that lie in one folder, by their tags, as a reader counts."""
    pointer: Callable[[str], str | None] | None = None
    """The tag that a file of the run names: the last one whose save has ended."""
    to_load: Callable[[str, str], str] | None = None
    """How its program loads a run's tag that the pointer does not name, as a sentence that is empty
    if it does; None if a loader takes the tag's own folder."""
    detect_weak: Callable[[str], list[str]] = nothing
    """The same for files that others have too (weights alone): asked if no format is detected."""
    counter: Callable[[str], int | None] = nowhere
    """What the program had counted when it saved the checkpoint at a path (one tag's folder, or a
    file), as one small file states it, or the beginning of a pickle; None if none does."""
    updates: Callable[[str], float | None] = nowhere
    """The updates that the optimizer states in the file at a path; None if it must be read whole.
    """
    options: tuple[Option[Any], ...] | None = None
    """Those that its writer understands, in the order of `--help`; None if it is not written."""
    reasons: Mapping[str, str] | None = None
    """Why it has no use for an option, by the option's name."""
    numbers: bool = False
    """An optimizer may know its parameters by number: `read` uses `Reading.param_names`."""
    reports_unused_rules: bool = False
    """`read` warns itself if the files do not need `Reading.tp_rules`."""
    compares: str | None = None
    """Which elements of masters are compared with the weights before a conversion: see
    core/comparison/masters.py. None if checksums say that the tensors are of one save."""
    fits_any_dp: bool = False
    """Runs of any data-parallel size resume from what `write.py` writes."""
    loads_by_place: bool = False
    """A program loads the states of an optimizer by the places of parameters in its groups."""
    keeps_estimates: bool = False
    """A target of the same size keeps what each rank's optimizer has estimated of its own."""
    overrides_groups: bool = False
    """`--group-defaults` take the place of the source's values, unless `--like` gives groups."""
    keeps_steps: bool = False
    """A target may have steps that differ between parameters: reading it back keeps them."""
    is_neutral: bool = False
    """It belongs to no engine: names, ties and best checkpoints are settled in the next target."""
    is_plain: bool = False
    """A program loads its names into a model without wrappers: the words that these insert are
    removed, unless the source has this format too."""
    is_resumed: bool = True
    """A trainer resumes from what is written; it is not for inference only."""
    roles: tuple[Role, ...] = ()
    """What its files are for, by their names; those with axes are written by each rank."""
    objects: frozenset[str] | None = None
    """Classes and functions that the engine's own pickles name; None if a target has no pickle."""
    keeps_shapes: bool = False
    """Its targets have a place for every state that is a tensor of the parameter's elements, also
    if `states` names a limit."""
    states: str = ""
    """Which states of an optimizer its targets can have, if not any; and another way, if there is
    one."""

    @property
    def reads(self) -> bool:
        return self.detect is not nothing

    @property
    def writes(self) -> bool:
        return self.options is not None

    @property
    def functions(self) -> Functions:
        """What zckpt does with its files; importing them all would take as long as `inspect`."""
        module = import_module(f".{self.name.replace('-', '_')}.functions", __package__)
        functions: Functions = module.FUNCTIONS
        return functions

    def lay_out_again(self, manifest: Manifest) -> Layout | None:
        """The files of a checkpoint of this format, for the same ranks; None if it writes none.

        Raises as `Functions.lay_out`.
        """
        lay_out = self.functions.lay_out
        return None if lay_out is None else lay_out(manifest, Options())

    def read_shells(self, path: str) -> Manifest:
        """The manifest of files that were just laid out."""
        policy = agreement.KEEP if self.keeps_steps else None
        with uncollected():
            return self.functions.read(path, Reading(step_policy=policy, laid=True))


Beginning = Literal["bare", "zeros", "group"]
"""What a target has of a parameter that was never updated: no state; zeros at step 0, where loaders
ask for a state of each; or zeros at the step that its group has, where a group has only one."""


class Functions(Struct, frozen=True, eq=False):
    """What zckpt does with the files of one format. None: there is nothing to do."""

    read: Callable[[str, Reading], Manifest]
    """The checkpoint at a path, as the user says. Raises the ZckptError that says what is wrong.

    A format that is only written has it as well: it reads the shells back."""
    lay_out: Callable[[Manifest, Options], Layout] | None = None
    """The files of the target, without tensors. Raises before the first byte is written."""
    lay_out_like: Callable[[Manifest, Manifest, Options], Layout] | None = None
    """As `lay_out`, for a source of another engine, with what only a run of the target's engine
    knows: the second manifest, of the run that `--like` names."""
    has_models: Callable[[Manifest, Options], bool] | None = None
    """Whether a target has a place for several models, each with a number."""
    lay_out_model: Callable[[Manifest, Options, int], Layout] | None = None
    """As `lay_out`, for one of several models by its number."""
    seal: Callable[[Folder, Manifest, CopyOutcome], None] | None = None
    """Writes what is known when all tensors are in place: checksums."""
    partitions: Callable[[str, str | None], list[Partition]] | None = None
    """What ranks all-gather, by the engine's own rule; None if files have whole tensors.

    The path is `Manifest.root`. A family or a file says how tensor ranks cut parameters, for a
    format whose files may not say it."""
    check: Callable[[Manifest, str | None], list[Notice]] | None = None
    """Reads all of the bytes that may contradict each other without any checksum; gives warnings,
    or raises. `--replicas` chooses among the copies of tensor ranks that differ."""
    check_slices: Callable[[Manifest], None] | None = None
    """Raises if the bytes show that ranks cut tensors in another way; reads few of them."""
    averaged: Callable[[Manifest], Manifest] | None = None
    """With the mean of the copies that tensor ranks hold of a parameter's tensors."""
    rebuilt: Callable[[Manifest], Manifest] | None = None
    """Without wrong masters and their states; its warnings name them."""
    way_out: Callable[[Manifest], str] | None = None
    """The hint for masters that do not round to their weights."""
    obstacles: Callable[[Manifest, Options], list[Notice]] | None = None
    """What keeps a run of these options from loading the files as they are, a phrase each; None
    if a run of any size loads them. It may raise what a writer of these options would raise."""
    unlike: Callable[[Manifest, Manifest, Options], list[Notice]] | None = None
    """What a checkpoint for a run of these options has otherwise than one that the program has
    saved, beside names, shapes and groups."""
    missing: Callable[[Manifest, Options], list[Notice]] | None = None
    """What a run of these options loads, and the manifest of any format lacks: no conversion gives
    it."""
    groups: Callable[[Manifest, Options], Manifest] | None = None
    """Gives a source the groups of the target's engine."""
    with_mended: Callable[[str, Sequence[Mended]], tuple[str, bytes]] | None = None
    """The name and contents of the file of a checkpoint that lists what was restored in it; None if
    that is a file of its own. The path is `Manifest.root`."""
    begins: Callable[[Manifest, Options], Beginning] | None = None
    """What a target needs of parameters that its program trains and the source did not."""


def other_dp(source: Manifest, options: Options) -> list[Notice]:
    """The obstacle of files that ranks have cut among each other: another number of ranks."""
    wanted = options[DP]
    if wanted in (None, source.dp):
        return []
    return [differs("dp", source.dp, wanted)]


RANKS = {"dp": "data-parallel", "tp": "tensor-parallel", "pp": "pipeline", "ep": "expert-parallel"}
"""What the ranks of an axis are called in a sentence."""


def differs(what: str, own: object, wanted: object) -> Notice:
    """The notice of a size or a property of the files that the next run has otherwise.

    `what` may say of which files behind a comma: "tp, in mp_rank_* folders".
    """
    name, _, where = what.partition(",")
    if name not in RANKS:
        return problem(
            "size-differs", f"saved with {name} {own}{where}; {wanted} is asked for", subject=name
        )
    ranks, are = "rank" if own == 1 else "ranks", "is" if wanted == 1 else "are"
    message = f"saved by {own} {RANKS[name]} {ranks}{where}; {wanted} {are} asked for"
    return problem("size-differs", message, subject=name)
