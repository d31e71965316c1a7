"""Where does a checkpoint come from: files of which format, and of how many ranks?

A manifest's JSON has an `Origin` under the key `source`.
"""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct, convert, field
from msgspec.structs import replace

OF_ANY_ENGINE = frozenset({"version", "dp", "tag"})
"""What the JSON of every engine has, null if its files do not state it."""


class Origin(Struct, frozen=True):
    """What files state about the run that they are of; None if they do not state it.

    A universal checkpoint keeps the origin of the engine that trained.
    """

    format: str | None = None
    """The name of the first format."""
    version: str | None = None
    """The version of its engine."""
    zero_stage: int | None = None
    dp: int | None = None
    """The data-parallel size."""
    tag: str | None = None
    """How the engine calls the checkpoint among those of its run."""
    ep: int | None = None
    """Over how many ranks the experts of a layer are spread; the largest, if layers differ."""
    tp: int | None = None
    """The number of tensor ranks."""
    pp: int | None = None
    """The number of stages of the pipeline."""
    sp: int | None = None
    """How many data-parallel ranks share each sequence; `dp` counts all of them."""
    model_ranks: int | None = None
    """How many model ranks the manifest keeps apart."""
    tp_rules: str | None = None
    """The user's rules how these cut tensors: a family or a file."""
    dialect: str | None = None
    """The kind of files, where an engine has several."""
    slices: int | None = None
    """How many files have a part each of the tensors, of which one is only looked at."""
    root: str | None = None
    """Which of several models this is."""
    mesh: tuple[str, str | None] | None = None
    """The device and the axis of FSDP2's ranks, whose files can be written for other ranks."""
    inside: str | None = None
    """The folder of a numbered one in which its program looks for it: `actor` of
    `global_step_3`."""
    nulls: frozenset[str] = OF_ANY_ENGINE
    """The names of those fields that the JSON has as null if they are None; it lacks others."""
    others: Mapping[str, Any] = field(default_factory=dict)
    """What the JSON has under further keys, which zckpt does not know."""

    @property
    def sizes(self) -> dict[str, int]:
        """The stated sizes of the grid of ranks, by the name of the axis."""
        sizes = {"dp": self.dp, "sp": self.sp, "tp": self.tp, "pp": self.pp, "ep": self.ep}
        return {name: size for name, size in sizes.items() if size}

    def sequence_ranks(self, dp: int) -> int:
        """The ranks of a sequence in a run of `dp` ranks that has as many of them, if it can."""
        return self.sp if self.sp and dp % self.sp == 0 else 1

    def to_json(self) -> dict[str, Any]:
        """The value of `source` in a manifest, under the keys of docs/format-v1.md."""
        document = {
            name: list(value) if isinstance(value, tuple) else value
            for name in STATED
            if (value := getattr(self, name)) is not None or name in self.nulls
        }
        return {**document, **self.others}

    @classmethod
    def of_json(cls, document: Any) -> "Origin":
        """The inverse of `to_json`; raises ValueError for values of other types."""
        stated = convert(document, dict[str, Any])
        known = {name: stated.pop(name) for name in STATED if name in stated}
        nulls = [name for name, value in known.items() if value is None or name in OF_ANY_ENGINE]
        return replace(convert(known, cls), nulls=frozenset(nulls), others=stated)


STATED = tuple(name for name in Origin.__struct_fields__ if name not in ("nulls", "others"))
"""The keys of the JSON, in its order."""
