"""What does a format write: which files, and what else must be known of them?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from msgspec import Struct, field

from ...errors import Notice
from ..checkpoint.entries import Key
from ..checkpoint.manifest import Manifest, Sibling
from ..storage.fragments import Extent
from ..storage.records import RecordCounts


class Shell(Struct, frozen=True):
    """A file of `size` bytes without its tensors; `parts` are what it holds: (offset, bytes)."""

    name: str
    size: int
    parts: tuple[tuple[int, bytes], ...]

    @classmethod
    def of(cls, name: str, data: bytes) -> Shell:
        """A file that has no tensor."""
        return cls(name, len(data), ((0, data),))


class Layout(Struct, frozen=True):
    """What a format is going to write."""

    shells: Callable[[], Iterator[Shell]]
    """Gives all files; each call gives them again."""
    siblings: Sequence[tuple[str, Sibling]]
    """Files that are copied unchanged, each with its name in the target."""
    omitted: Sequence[Notice]
    """The whole report of what the target lacks, with the source's part."""
    warnings: Sequence[Notice]
    """The whole report of what the user must know, with the source's part."""
    from_masters: bool = False
    """Whether weights are cast from the masters even where the source holds weights."""
    about: str = ""
    """The target in one line."""
    loading: Callable[[str], str] = str
    """Gives the line of a program, or the command, that goes on from the target at a path."""
    read_back: Callable[[str], Manifest] | None = None
    """Reads the files that were laid out, if the format's reader does not."""
    source: Manifest | None = None
    """What fills them, if a part of the source does, or more than it."""
    inside: str = ""
    """The folder in which the engine's files are, with those beside them; empty if there is none.
    """
    in_one_file: bool = False
    """Whether a program finds in one file all that the source has."""
    has_digests: bool = False
    """Whether its files state the CRC-32 of each tensor."""
    check: Callable[[], Sequence[Notice]] | None = None
    """Reads tensors of the source before the first byte is written, and gives warnings."""


class CopyOutcome(Struct, eq=False):
    """What a copy knows in the end.

    `digests` are those of the target's entries by key, for each place of a model rank, as far as
    they were asked for; `tensors` is the number of all. `files` are sizes and CRC-32s, by path.
    `records` are the CRC-32s of the target's records in the files that were filled, by extent.
    `counts` are of source records. A record stays unchecked if it was saved without a CRC, or if
    only a small part of it was read.
    """

    digests: dict[int, dict[Key, int]] = field(default_factory=dict)
    files: dict[str, tuple[int, int]] = field(default_factory=dict)
    records: dict[Extent, int] = field(default_factory=dict)
    differing: dict[int, int] = field(default_factory=dict)
    tensors: int = 0
    bytes: int = 0
    counts: RecordCounts = field(default_factory=RecordCounts)
