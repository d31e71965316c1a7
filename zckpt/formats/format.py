"""What is a format? One engine's way to lay out a checkpoint in files, and what zckpt does with it.

A format is a folder beside this file. Its `__init__.py` says what zckpt can do
with it, as a `Format`. The work is in modules with the same names in every folder:

    files.py     which files make the checkpoint            detect, detect_weak
    read.py      the manifest of these files                read, check
    write.py     the files of a target                      lay_out, seal
    options.py   what a user may ask of a target            OPTIONS, REASONS
    gather.py    the engine's own rule for its pieces       partitions

protocols.py has the types of these functions. To add a format, write its folder, and put its
`FORMAT` into `FORMATS` in `__init__.py`. To add an option to a format, declare it in the format's
`options.py` and list it in its `OPTIONS`.
"""

from __future__ import annotations

from importlib import import_module

from ..core.annotations import TYPE_CHECKING, Any
from ..core.values import valueclass
from ..errors import WrongOption
from .reading import USUAL, Reading

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..copying.copy import CopyOutcome
    from ..core.folder import Folder
    from ..core.layout import Layout, Shell
    from ..core.manifest import Manifest
    from ..core.partition import Partition
    from ..training.options import Option, Options
    from .protocols import (
        CheckingReader,
        Files,
        Gatherer,
        ModelsWriter,
        Reader,
        RebuildingReader,
        RulesGatherer,
        TargetOptions,
        TensorRanksReader,
        WeakFiles,
        Writer,
    )


@valueclass(eq=False)
class Format:
    """What zckpt can do with one format, as data; its modules are imported when they are needed.

    `name` is what `--from` and `--to` call it, `folder` is where its modules are, `about` is a line
    of `zckpt formats`. Formats of one `family` name parameters alike, so that `convert` keeps the
    source's names.
    """

    name: str
    folder: str
    about: str
    family: str
    reads: bool = True
    """Users may name it as a source. A format that is only written has a `read.py` as well, which
    reads the shells back."""
    writes: bool = True
    """It has a `write.py` and an `options.py`."""
    weak: bool = False
    """`files.py` has `detect_weak`."""
    numbers: bool = False
    """An optimizer may know its parameters by number: `read` uses `Reading.param_names`."""
    reports_unused_rules: bool = False
    """`read` warns itself if the files do not need `Reading.tp_rules`."""
    compares: str | None = None
    """Which elements of masters are compared with the weights before a conversion: see
    core/masters.py. None if checksums say that the tensors are of one save."""
    checks: bool = False
    """`read.py` has `check`."""
    has_tensor_ranks: bool = False
    """`read.py` has `check`, `check_slices` and `averaged`; `partitions` takes `tp_rules`."""
    rebuilds: bool = False
    """`read.py` has `check`, `rebuilt` and `way_out`."""
    gathers: bool = False
    """There is a `gather.py`."""
    fits_any_dp: bool = False
    """Runs of any data-parallel size resume from what `write.py` writes."""
    keeps_estimates: bool = False
    """A target of the same size keeps what each rank's optimizer has estimated of its own."""
    overrides_groups: bool = False
    """`--group-defaults` take the place of the source's values, unless `--like` gives groups."""
    keeps_steps: bool = False
    """A target may have steps that differ between parameters: reading it back keeps them."""
    is_neutral: bool = False
    """It belongs to no engine: names, ties and best checkpoints are settled in the next target."""
    is_resumed: bool = True
    """A trainer resumes from what is written; it is not for inference only."""
    of_ranks: tuple[str, ...] = ()
    """Parts of the names of files that all ranks write when they save."""
    written_last: str | None = None
    """The name of the file that a program writes in a folder when all ranks have written theirs."""
    objects: frozenset[str] | None = None
    """Classes and functions that the engine's own pickles name; None if a target has no pickle."""
    several_models: bool = False
    """`write.py` has `has_models`, and lays out the files of a model with its number."""
    states: str = ""
    """Which states of an optimizer its targets can have, if not any; and another way, if there is
    one."""
    groups: str | None = None
    """The function of training/groups.py that gives a source the groups of the target's engine."""

    @property
    def options(self) -> tuple[Option[Any], ...]:
        """Those that its writer understands, in the order of `--help`."""
        if not self.writes:
            return ()
        declared: TargetOptions = self._module("options")
        return declared.OPTIONS

    @property
    def reasons(self) -> Mapping[str, str]:
        """Why it has no use for an option, by the option's name."""
        if not self.writes:
            return {}
        reasons: Mapping[str, str] = getattr(self._module("options"), "REASONS", {})
        return reasons

    def detect(self, path: str) -> list[str]:
        if not self.reads:
            return []
        files: Files = self._module("files")
        return files.detect(path)

    def detect_weak(self, path: str) -> list[str]:
        if not self.weak:
            return []
        files: WeakFiles = self._module("files")
        return files.detect_weak(path)

    def read(self, path: str, reading: Reading = USUAL) -> Manifest:
        reader: Reader = self._module("read")
        return reader.read(path, reading)

    def read_shells(self, path: str) -> Manifest:
        """The manifest of files that were just laid out."""
        from ..training.steps import KEEP

        return self.read(path, Reading(step_policy=KEEP if self.keeps_steps else None))

    def check(
        self, manifest: Manifest, replicas: str | None = None, accept_weights: bool = False
    ) -> list[str]:
        """Warnings of the check of a source's bytes, before a conversion writes anything.

        Raises InconsistentCheckpoint if masters do not round to their weights, unless the engine
        changes weights beside them, or `accept_weights` says that this is meant.
        """
        warnings = []
        if self.compares is not None and not manifest.weights_differ:
            from ..core import masters

            hint = masters.MIXED
            if self.rebuilds:
                rebuilding: RebuildingReader = self._module("read")
                hint = rebuilding.way_out(manifest)
            warnings += masters.check(manifest, self.compares, hint, accept_weights)
        if self.checks or self.has_tensor_ranks or self.rebuilds:
            reader: CheckingReader = self._module("read")
            warnings += reader.check(manifest, replicas)
        return warnings

    def check_slices(self, manifest: Manifest) -> None:
        """Raises if the bytes show that ranks cut tensors in another way; reads few of them."""
        if self.has_tensor_ranks:
            reader: TensorRanksReader = self._module("read")
            reader.check_slices(manifest)

    def averaged(self, manifest: Manifest) -> Manifest:
        """With the mean of ranks' copies, where ranks that share a model hold copies."""
        if not self.has_tensor_ranks:
            return manifest
        reader: TensorRanksReader = self._module("read")
        return reader.averaged(manifest)

    def rebuilt(self, manifest: Manifest) -> Manifest:
        """Without masters that do not round to their weights, and without the states beside them.

        A target gets masters that are widened weights. Reads all masters. Raises WrongOption for a
        format that has no such check.
        """
        if not self.rebuilds:
            raise WrongOption(
                f"--masters-from-weights does not apply to {self.name}",
                hint="it mends masters that Megatron-Core mixed up; leave it out",
            )
        reader: RebuildingReader = self._module("read")
        return reader.rebuilt(manifest)

    def refuse(self, options: Options, target: str) -> None:
        """Raises WrongOption for an option that the writer of `target` does not understand."""
        from ..training.options import refuse

        refuse(options, target, self.options, self.reasons)

    def prepare(self, manifest: Manifest) -> tuple[Manifest, list[Shell]]:
        """A source with the groups of the target's engine, and files that change with them."""
        from ..training import groups

        if self.groups is None:
            return manifest, []
        result: tuple[Manifest, list[Shell]] = getattr(groups, self.groups)(manifest)
        return result

    def has_models(self, source: Manifest, options: Options) -> bool:
        """Whether a target has a place for several models, each with a number."""
        if not self.several_models:
            return False
        writer: ModelsWriter = self._module("write")
        return writer.has_models(source, options)

    def lay_out(self, source: Manifest, options: Options, number: int = 0) -> Layout:
        """The files of a target; `number` is that of one of several models."""
        if number:
            of_models: ModelsWriter = self._module("write")
            return of_models.lay_out(source, options, number)
        writer: Writer = self._module("write")
        return writer.lay_out(source, options)

    def seal(self, root: Folder, manifest: Manifest, outcome: CopyOutcome) -> None:
        writer: Writer = self._module("write")
        writer.seal(root, manifest, outcome)

    def partitions(self, path: str, tp_rules: str | None = None) -> list[Partition] | None:
        """None if files have whole tensors; `tp_rules` are for a format that has tensor ranks."""
        if not self.gathers:
            return None
        if self.has_tensor_ranks:
            with_rules: RulesGatherer = self._module("gather")
            return with_rules.partitions(path, tp_rules)
        gatherer: Gatherer = self._module("gather")
        return gatherer.partitions(path)

    def _module(self, name: str) -> Any:
        return import_module(f".{self.folder}.{name}", __package__)
