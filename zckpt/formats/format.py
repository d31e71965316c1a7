"""What is a format? One engine's way to lay out a checkpoint in files, and what zckpt does with it.

A format is a folder beside this file. Its class, in the folder's `__init__.py`, says what zckpt can
do with it. The work is in modules with the same names in every folder, imported on use:

    files.py     which files make the checkpoint            detect, detect_weak
    read.py      the manifest of these files                read, read_shells, check
    write.py     the files of a target                      lay_out, seal
    gather.py    the engine's own rule for its pieces       partitions

To add a format, write its folder, and put its class into `FORMATS` in `__init__.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from ..core.manifest import Manifest
    from ..core.partition import Partition
    from ..core.staging import Layout, Shell
    from ..training.options import Options


class Format(Protocol):
    """The functions of a format, with defaults for those that not every format needs."""

    name: str
    """What `--from` and `--to` call it."""
    about: str
    """One line for `zckpt formats`."""
    family: str
    """Formats of one family name parameters alike, so that `convert` keeps the source's names."""
    reads: bool = True
    writes: bool = True
    is_neutral: bool = False
    """It belongs to no engine: names, ties and best checkpoints are settled in the next target."""
    is_resumed: bool = True
    """A trainer resumes from what is written, and not only inference."""
    options: frozenset[str] = frozenset()
    """Fields of `Options` that the writer understands, beside those that every writer does."""
    dialects: tuple[str, ...] = ()
    """Values of `--dialect`."""
    reasons: Mapping[str, str] = {}
    """Why the writer has no use for an option, by the option's field: the hint of the refusal."""

    def detect(self, path: str) -> list[str]:
        """Tags of the checkpoints at `path`, the meant one alone if a file says which that is.

        A format without tags gives one empty tag. The list is empty for anything else.
        """
        ...

    def detect_weak(self, path: str) -> list[str]:
        """The same for files that others have too (weights alone); asked if `detect` never fits."""
        return []

    def read(
        self,
        path: str,
        tag: str | None = None,
        step_policy: str | None = None,
        param_names: tuple[str, ...] | None = None,
        weights_only: bool = False,
    ) -> Manifest:
        """The checkpoint at `path`. Raises the ZckptError that says what is wrong.

        `param_names` name the parameters of an optimizer that knows them by number, in its order;
        with `weights_only` they are not needed.
        """
        ...

    def check(self, manifest: Manifest) -> None:
        """Raises if the bytes contradict each other, where only reading all of them shows it."""
        return

    def prepare(self, manifest: Manifest) -> tuple[Manifest, list[Shell]]:
        """A source with the groups that the target's optimizer makes, and files that change so."""
        return manifest, []

    def refuse(self, options: Options) -> None:
        """Raises WrongOption for an option that the writer does not understand."""
        from ..training.options import Accepted

        names = tuple(self.options)
        Accepted(self.name, names, self.dialects, self.reasons).check(options)

    def lay_out(self, source: Manifest, options: Options) -> Layout:
        """The files of the target, without tensors. Raises before the first byte is written."""
        raise NotImplementedError(f"{self.name} is not written")

    def read_shells(self, path: str) -> Manifest:
        """The manifest of files that were just laid out."""
        return self.read(path)

    def seal(self, root: str, manifest: Manifest, outcome: Any) -> None:
        """Writes what is known when all tensors are in place: checksums."""
        return

    def partitions(self, path: str) -> list[Partition] | None:
        """What ranks all-gather, by the engine's own rule; None if files hold whole tensors."""
        return None
