"""The files that a format is going to write, and what the copying code must know about them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from msgspec import Struct, field

from ...errors import Notice
from ..checkpoint.entries import Key
from ..checkpoint.manifest import Manifest, Sibling
from ..storage.fragments import Extent
from ..storage.records import RecordCounts
from .full_checks import Differing, FullCheck


class Shell(Struct, frozen=True):
    """A target file of `size` bytes without its tensor data.

    `parts` are its other bytes, such as headers and pickles, as pairs (offset, bytes).
    """

    name: str
    size: int
    parts: tuple[tuple[int, bytes], ...]

    @classmethod
    def of(cls, name: str, data: bytes) -> Shell:
        """Makes a target file with the contents `data` and no tensors."""
        return cls(name, len(data), ((0, data),))


class Layout(Struct, frozen=True):
    """The files of a target that a format is going to write, and how the copy fills them."""

    shells: Callable[[], Iterator[Shell]]
    """Yields all files. Every call yields them again."""
    siblings: Sequence[tuple[str, Sibling]]
    """Files that are copied unchanged, each with its name in the target."""
    omitted: Sequence[Notice]
    """Notices about everything that the target lacks, including those of the source."""
    warnings: Sequence[Notice]
    """All warnings for the user, including those of the source."""
    from_masters: bool = False
    """Whether weights are cast from the masters even if the source holds weights."""
    about: str = ""
    """A description of the target in one line."""
    loading: Callable[[str], str] = str
    """Returns a line of code, or a command, that resumes from the target, given its path."""
    read_back: Callable[[str], Manifest] | None = None
    """Reads the manifest of the files that were laid out.

    If None, the format's own reader does it.
    """
    # a part of the conversion's source, or an extension of it
    source: Manifest | None = None
    """The manifest whose tensors fill the files; None for the conversion's own source."""
    # the source's numbered folder, such as `step3`, has the same subfolder
    inside: str = ""
    """The target's subfolder for the engine's files, such as `actor`; empty if there is none."""
    in_one_file: bool = False
    """Whether one file holds everything that the source has."""
    has_digests: bool = False
    """Whether the files state the CRC-32 of each tensor."""
    checks: Sequence[FullCheck] = ()
    """Comparisons of the source's tensors during the copy; an error stops the copy."""


class CopyOutcome(Struct, eq=False):
    """The results of a copy.

    digests      the CRC-32s of tensors, if computed, by model rank (0 if ranks are merged)
    files        maps paths to sizes and CRC-32s
    records      maps zip members etc. of the target to their CRC-32s
    differing    for each `FullCheck`: maps the index of a pair of tensors to its difference
    tensors      the number of tensors
    counts       how many zip members etc. of the source were checked
    """

    digests: dict[int, dict[Key, int]] = field(default_factory=dict)
    files: dict[str, tuple[int, int]] = field(default_factory=dict)
    records: dict[Extent, int] = field(default_factory=dict)
    differing: list[dict[int, Differing]] = field(default_factory=list)
    tensors: int = 0
    bytes: int = 0
    counts: RecordCounts = field(default_factory=RecordCounts)
