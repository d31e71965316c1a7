"""The origin of a checkpoint: the format of its files, and the grid of ranks that saved them.

A manifest's JSON has an `Origin` under the key `source`.
"""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct, convert, field
from msgspec.structs import replace

OF_ANY_ENGINE = frozenset({"version", "dp", "tag"})
"""The keys in the JSON of every engine; they are null if its files do not state them."""


class Origin(Struct, frozen=True):
    """What the files state about the run that saved them: format, version and parallel sizes.

    A value is None if the files do not state it. A universal checkpoint keeps the origin of the
    engine that trained.
    """

    format: str | None = None
    """The format that the training engine wrote, such as `deepspeed`."""
    version: str | None = None
    """The version of the training engine."""
    zero_stage: int | None = None
    dp: int | None = None
    """The data-parallel size."""
    tag: str | None = None
    """The engine's name for this checkpoint among those of its run."""
    ep: int | None = None
    """The number of ranks over which the experts of a layer are spread.

    The largest, if layers differ.
    """
    tp: int | None = None
    """The number of tensor ranks."""
    pp: int | None = None
    """The number of stages of the pipeline."""
    sp: int | None = None
    """How many of the `dp` ranks share each sequence (sequence parallelism)."""
    model_ranks: int | None = None
    """The number of model ranks that the manifest keeps separate."""
    tp_rules: str | None = None
    """The user's rules for how tensor ranks cut tensors: a family or a file."""
    dialect: str | None = None
    """The kind of files, where an engine has several."""
    slices: int | None = None
    """The number of files with ranks' slices, if zckpt has read only the first of these files."""
    root: str | None = None
    """The name of this model, if the files have several."""
    mesh: tuple[str, str | None] | None = None
    """FSDP2's mesh of ranks: the device type, such as `cuda`, and the axis's name or None.

    If None, zckpt cannot write files of FSDP2's ranks.
    """
    inside: str | None = None
    """The checkpoint's folder within its numbered folder: `actor` of `global_step_3`."""
    nulls: frozenset[str] = OF_ANY_ENGINE
    """The fields that are null in the JSON if they are None. Other None fields are left out."""
    other_fields: Mapping[str, Any] = field(default_factory=dict)
    """Further keys of the JSON, which zckpt does not interpret."""

    @property
    def sizes(self) -> dict[str, int]:
        """The parallel sizes that the files state, such as `{"dp": 4, "tp": 2}`."""
        sizes = {"dp": self.dp, "sp": self.sp, "tp": self.tp, "pp": self.pp, "ep": self.ep}
        return {name: size for name, size in sizes.items() if size}

    def sequence_ranks(self, dp: int) -> int:
        """The number of ranks that share one sequence (sequence parallelism) among `dp` ranks.

        This is the stated size `sp` if it divides `dp`, else 1.
        """
        return self.sp if self.sp and dp % self.sp == 0 else 1

    @property
    def sequences(self) -> int:
        """The number of data-parallel ranks, of which those that share a sequence count once.

        1 if there were no ranks.
        """
        return (self.dp or 1) // self.sequence_ranks(self.dp or 1)

    def to_json(self) -> dict[str, Any]:
        """Converts the origin to the JSON value of `source` in a manifest (docs/format-v1.md)."""
        document = {
            name: list(value) if isinstance(value, tuple) else value
            for name in STATED
            if (value := getattr(self, name)) is not None or name in self.nulls
        }
        return {**document, **self.other_fields}

    @classmethod
    def of_json(cls, document: Any) -> "Origin":
        """Parses the value of `source` in a manifest; raises ValueError for malformed ones."""
        values = convert(document, dict[str, Any])
        fields_given = {name: values.pop(name) for name in STATED if name in values}
        nulls = [
            name for name, value in fields_given.items() if value is None or name in OF_ANY_ENGINE
        ]
        return replace(convert(fields_given, cls), nulls=frozenset(nulls), other_fields=values)


STATED = tuple(name for name in Origin.__struct_fields__ if name not in ("nulls", "other_fields"))
"""The fields of `Origin` that have a key of their own in its JSON, in the order of writing."""
