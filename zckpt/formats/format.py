"""`Format`: the record that describes one checkpoint format, and the functions for its files.

A format is a folder beside this file. Its `__init__.py` has a `Format`: everything that recognition
and `--help` need. Its `functions.py` has the functions that work on its files, as `Functions`; it
is imported when the format is used. The functions are in modules with the same names in every
folder:

    files.py     which files make the checkpoint            detect, detect_weak, ROLES
    options.py   the options of a target                    OPTIONS, REASONS
    read.py      the manifest of these files                read, check, copies
    write.py     the files of a target                      lay_out, seal
    functions.py why a run does not load them as they are   obstacles
    gather.py    the engine's own rule for an all-gather    partitions

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
from ..core.checkpoint.mended import MadeValue, Mended
from ..core.passes.full_checks import FullCheck
from ..core.passes.layout import CopyOutcome, Layout
from ..core.passes.resources import uncollected
from ..core.ranks.partition import Partition
from ..core.storage.folder import Folder
from ..core.storage.inventory import Role
from ..errors import Notice, problem
from ..training.options import DP, Option, Options
from .reading import Reading


def nothing(_path: str) -> list[str]:
    """Returns []: the default of functions that find tags (checkpoints in a run's folder)."""
    return []


def nowhere(_path: str) -> None:
    """Returns None: the default of functions that read a checkpoint's counter of steps."""


class Format(Struct, frozen=True, eq=False):
    """Describes one checkpoint format: how zckpt recognizes it, and what its files can store.

    name      the value for `--from` and `--to`; with _ for -, also the name of its folder
    about     its line in `zckpt formats`
    family    formats of one family use the same parameter names
    """

    name: str
    about: str
    family: str
    detect: Callable[[str], list[str]] = nothing
    """Returns the tags of the checkpoints at a path; [] if the path has none of this format.

    A tag names a checkpoint in a run's folder; it is "" in formats without tags. If a file of the
    run names the current checkpoint, only its tag is returned.
    """
    tags: Callable[[str], list[str]] = nothing
    """Returns the tags of all checkpoints of a run in one folder, in numeric order."""
    pointer: Callable[[str], str | None] | None = None
    """Returns the tag that a file of the run names: the tag of the last finished save."""
    to_load: Callable[[str, str], str] | None = None
    """Returns what the user must do to load a tag of a run; "" if the tag is the current one.

    The arguments are the run's folder and the tag. None if the program loads any tag's folder.
    """
    detect_weak: Callable[[str], list[str]] = nothing
    """As `detect`, for files that other formats have too (weights alone).

    Called only if no format is detected.
    """
    # reads only a small file, or the beginning of a pickle: many checkpoints may be sorted
    counter: Callable[[str], int | None] = nowhere
    """Returns the training program's step counter at the time of the save; None if not stated.

    The path is one tag's folder, or a file. The counter sorts checkpoints by age.
    """
    updates: Callable[[str], float | None] = nowhere
    """Returns the number of the optimizer's updates, from the steps stored at a path.

    None if no step is stored, or if a complete file would have to be read.
    """
    options: tuple[Option[Any], ...] | None = None
    """Options of its writer, in the order of `--help`; None if zckpt does not write the format."""
    reasons: Mapping[str, str] | None = None
    """Why an option does not apply to the format, by the option's name."""
    numbers: bool = False
    """Whether optimizers may number their parameters; `read` then uses `Reading.param_names`."""
    reports_unused_rules: bool = False
    """Whether `read` itself warns about unused `Reading.tp_rules`; otherwise its caller warns."""
    # a word of core/comparison/masters.py
    compares: str | None = None
    """Which elements of fp32 masters a conversion compares with weights: "beginnings" or "all".

    None if checksums show that all tensors are of one save.
    """
    fits_any_dp: bool = False
    """Whether runs of any data-parallel size can resume from the files that zckpt writes."""
    loads_by_place: bool = False
    """Whether programs find optimizer states by a parameter's place in its group, not by name."""
    keeps_estimates: bool = False
    """Whether a target with the source's ranks keeps what each rank estimates, as Prodigy does."""
    overrides_groups: bool = False
    """Whether `--group-defaults` replace the source's values, unless `--like` gives groups."""
    keeps_steps: bool = False
    """Whether parameters of a target can have different steps, as read back from its files."""
    is_neutral: bool = False
    """Whether the format belongs to no engine.

    The next conversion then decides about names, tied weights and the best checkpoint.
    """
    is_plain: bool = False
    """Whether programs load the files into a model without wrappers, such as torch.compile.

    A conversion then removes the wrappers' words (`_orig_mod`) from parameter names, unless the
    source has this format too.
    """
    is_resumed: bool = True
    """Whether a trainer resumes from its files; False for inference only."""
    roles: tuple[Role, ...] = ()
    """The kinds of files, such as `optimizer`, each with a pattern of file names.

    If a role has axes, such as `dp`, every rank writes a file, with the rank's numbers in its name.
    """
    objects: frozenset[str] | None = None
    """Classes and functions that the engine's own pickles name; None if a target has no pickle."""
    keeps_shapes: bool = False
    """Whether a target can store every optimizer state that has its parameter's shape.

    The limit in the field `states` is then only about states of other shapes.
    """
    states: str = ""
    """Which optimizer states a target can store, as a text for errors; "" if all of them."""

    @property
    def reads(self) -> bool:
        # then users can name the format as a source: --from
        return self.detect is not nothing

    @property
    def writes(self) -> bool:
        return self.options is not None

    @property
    def functions(self) -> Functions:
        """The functions that work on files of this format; their module is imported on first use.

        Importing the modules of all formats would take as long as `inspect` itself.
        """
        module = import_module(f".{self.name.replace('-', '_')}.functions", __package__)
        functions: Functions = module.FUNCTIONS
        return functions

    def lay_out_again(self, manifest: Manifest) -> Layout | None:
        """Describes the files that this format would write for a checkpoint, for the same ranks.

        `zckpt mend` rebuilds lost files in this layout. None if zckpt does not write the
        format. Raises the same errors as `Functions.lay_out`.
        """
        lay_out = self.functions.lay_out
        return None if lay_out is None else lay_out(manifest, Options())

    def read_shells(self, path: str) -> Manifest:
        """Reads files that zckpt has just laid out: their tensors are not filled in yet."""
        policy = agreement.KEEP if self.keeps_steps else None
        with uncollected():
            return self.functions.read(path, Reading(step_policy=policy, laid=True))


Beginning = Literal["bare", "zeros", "group"]
"""The state that a target needs for a parameter that was never updated.

"bare": no state. "zeros": zeros at step 0. "group": zeros at the one step of the group.
"""


class Functions(Struct, frozen=True, eq=False):
    """The functions that work on the files of one format.

    A function is None if the format does not need it. For example, `lay_out` is None if zckpt does
    not write the format.
    """

    read: Callable[[str, Reading], Manifest]
    """Reads the checkpoint at a path with the user's options; raises a ZckptError.

    Every format has this function: a conversion reads its target back before it copies tensors.
    """
    lay_out: Callable[[Manifest, Options], Layout] | None = None
    """Returns the files of the target, still without tensors; raises errors before any write."""
    lay_out_like: Callable[[Manifest, Manifest, Options], Layout] | None = None
    """As `lay_out`, for a source of another engine and a run of the target's engine (`--like`).

    The second manifest is of this run. It has facts that the source does not have.
    """
    has_models: Callable[[Manifest, Options], bool] | None = None
    """Whether a target can store several models, each with a number."""
    lay_out_model: Callable[[Manifest, Options, int], Layout] | None = None
    """As `lay_out`, for one of several models by its number."""
    seal: Callable[[Folder, Manifest, CopyOutcome], None] | None = None
    """Writes the checksums after all tensors are in place."""
    partitions: Callable[[str, str | None], list[Partition]] | None = None
    """Returns the full tensors that the engine's own all-gather would make, for `verify --gather`.

    The arguments are `Manifest.root` and the value of `--tp-rules`, which says how tensor ranks cut
    parameters. None if the files have full tensors.
    """
    check: Callable[[Manifest], list[Notice]] | None = None
    """Compares some bytes before a conversion writes any; returns warnings or raises."""
    copies: Callable[[Manifest, str | None], Sequence[FullCheck]] | None = None
    """Returns the comparisons of ranks' replicas whose files state no checksums.

    The second argument is `--replicas`: which of differing replicas to use, "rank0" or "mean".
    """
    check_slices: Callable[[Manifest], None] | None = None
    """Raises if the bytes show that the rules for the cuts of tensor ranks are wrong.

    Reads only a few bytes.
    """
    averaged: Callable[[Manifest], Manifest] | None = None
    """Returns the manifest in which the replicas on tensor ranks are replaced by their mean."""
    rebuilt: Callable[[Manifest, str], Manifest] | None = None
    """Returns the manifest without fp32 masters that do not round to their weights.

    Their moments are dropped too, and warnings name the parameters. The second argument says which
    elements are compared: "beginnings" or "all".
    """
    way_out: Callable[[Manifest], str] | None = None
    """Returns the hint for masters that do not round to their weights."""
    obstacles: Callable[[Manifest, Options], list[Notice]] | None = None
    """Returns one notice for each reason why a run with these options cannot load the files.

    May raise the errors of `lay_out`. None if a run of any size loads the files.
    """
    unlike: Callable[[Manifest, Manifest, Options], list[Notice]] | None = None
    """Returns differences between a target with these options and the next program's checkpoint.

    The second manifest is of this checkpoint. Names, shapes and groups are compared elsewhere.
    """
    missing: Callable[[Manifest, Options], list[Notice]] | None = None
    """Returns a notice for each value that a run needs, and that no conversion can make."""
    groups: Callable[[Manifest, Options], Manifest] | None = None
    """Returns the source with the param groups that the target's optimizer expects."""
    with_mended: Callable[[str, Sequence[Mended]], tuple[str, bytes]] | None = None
    """Returns the name and the new contents of the file that lists mended places.

    The path is `Manifest.root`. None if the format needs a separate file for this list.
    """
    continued: Callable[[Manifest, Manifest], tuple[Manifest, list[MadeValue], bool]] | None = None
    """Restores the values of a lost model file, from the model file of an older save of the run.

    The first manifest is of the damaged save, read with the older model file; the second is of the
    older save. Returns the first one with these values, a list of them, and whether optimizer files
    confirm the order of parameters in flat buffers.
    """
    begins: Callable[[Manifest, Options], Beginning] | None = None
    """Returns the initial state (a `Beginning`) that targets need for newly trained parameters."""


def other_dp(source: Manifest, options: Options) -> list[Notice]:
    """Returns one notice if the options ask for another data-parallel size than the source's.

    The notice says why a run cannot load the files. It is for formats whose files only load on as
    many ranks as wrote them. The list is empty if the sizes are equal.
    """
    wanted = options[DP]
    if wanted in (None, source.dp):
        return []
    return [differs("dp", source.dp, wanted)]


RANKS = {"dp": "data-parallel", "tp": "tensor-parallel", "pp": "pipeline", "ep": "expert-parallel"}
"""The adjective for the ranks of each axis, for sentences such as "4 pipeline ranks"."""


def differs(what: str, actual: object, wanted: object) -> Notice:
    """Makes a notice such as "saved by 4 tensor-parallel ranks; 2 are asked for".

    `what` names the property that differs, such as "tp" or "stage". For "tp, in mp_rank_* folders"
    the notice says "saved by 4 tensor-parallel ranks in mp_rank_* folders".
    """
    name, _, where = what.partition(",")
    if name not in RANKS:
        return problem(
            "size-differs",
            f"saved with {name} {actual}{where}; {wanted} is asked for",
            subject=name,
        )
    ranks, are = "rank" if actual == 1 else "ranks", "is" if wanted == 1 else "are"
    message = f"saved by {actual} {RANKS[name]} {ranks}{where}; {wanted} {are} asked for"
    return problem("size-differs", message, subject=name)
