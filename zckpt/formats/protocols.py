"""Which functions do the modules of a format have?

The type checker compares them with the modules, by the tables in `__init__.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from .reading import USUAL, Reading

if TYPE_CHECKING:
    from ..copying.copy import CopyOutcome
    from ..core.folder import Folder
    from ..core.layout import Layout
    from ..core.manifest import Manifest
    from ..core.partition import Partition
    from ..training.options import Option, Options


class Files(Protocol):
    """`files.py` of a format."""

    def detect(self, path: str) -> list[str]:
        """Tags of the checkpoints at `path`; only the meant one if a file says which that is.

        A format without tags gives one empty tag. The list is empty for anything else.
        """


class WeakFiles(Files, Protocol):
    """`files.py` of a format that also takes files which others have (weights alone)."""

    def detect_weak(self, path: str) -> list[str]:
        """As `detect`; asked only if no format detects anything."""


class Reader(Protocol):
    """`read.py` of a format."""

    def read(self, path: str, reading: Reading = USUAL) -> Manifest:
        """The checkpoint at `path`, as the user says. Raises the ZckptError that says what is
        wrong."""


class CheckingReader(Reader, Protocol):
    """`read.py` of a format in which bytes may contradict each other without any checksum."""

    def check(self, manifest: Manifest, replicas: str | None) -> list[str]:
        """Reads all of the bytes in question; gives warnings, or raises if they contradict each
        other. `replicas` (rank0, mean) chooses among the copies of tensor ranks that differ."""


class TensorRanksReader(CheckingReader, Protocol):
    """`read.py` of a format whose files may be those of ranks that each have slices of tensors."""

    def check_slices(self, manifest: Manifest) -> None:
        """Raises if the bytes show that tensors were cut in another way; reads few of them."""

    def averaged(self, manifest: Manifest) -> Manifest:
        """With the mean of the copies that tensor ranks hold of a parameter's tensors."""


class RebuildingReader(CheckingReader, Protocol):
    """`read.py` of a format whose masters an engine may have written wrongly."""

    def rebuilt(self, manifest: Manifest) -> Manifest:
        """Without wrong masters and their states; its warnings name them."""

    def way_out(self, manifest: Manifest) -> str:
        """The hint for masters that do not round to their weights."""


class Writer(Protocol):
    """`write.py` of a format."""

    def lay_out(self, source: Manifest, options: Options) -> Layout:
        """The files of the target, without tensors. Raises before the first byte is written."""

    def seal(self, root: Folder, manifest: Manifest, outcome: CopyOutcome) -> None:
        """Writes what is known when all tensors are in place: checksums."""


class ModelsWriter(Writer, Protocol):
    """`write.py` of a format whose targets may have several models."""

    def has_models(self, source: Manifest, options: Options) -> bool:
        """Whether this target has a place for several."""

    def lay_out(self, source: Manifest, options: Options, number: int = 0) -> Layout:
        """As of `Writer`, for the model of that number."""


class TargetOptions(Protocol):
    """`options.py` of a format that is written."""

    @property
    def OPTIONS(self) -> tuple[Option[Any], ...]:
        """The options that `write.py` understands, in the order of `--help`.

        REASONS, which a module may lack, says by an option's name why the format has no use for it.
        """


class Gatherer(Protocol):
    """`gather.py` of a format."""

    def partitions(self, path: str) -> list[Partition]:
        """What ranks all-gather, by the engine's own rule. `path` is `Manifest.root`."""


class RulesGatherer(Protocol):
    """`gather.py` of a format whose files may not say how tensor ranks cut parameters."""

    def partitions(self, path: str, tp_rules: str | None = None) -> list[Partition]:
        """As `Gatherer.partitions`; `tp_rules` is a family or a file: how they are cut."""
