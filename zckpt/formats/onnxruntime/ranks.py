"""The contents of one save, rank by rank: the same classes for torch.save and HDF5 files."""

from __future__ import annotations

from math import prod
from typing import Any

from msgspec import Struct, field

from ...core.checkpoint.entries import Entry, Key
from ...core.storage.fragments import Extent, Record
from ...errors import Notice

SLOTS = {"Moment_1": "exp_avg", "Moment_2": "exp_avg_sq"}
COUNT, SHARED = "Update_Count", "Step"  # Adam's, one per weight; Lamb's, one for all weights
SHORT_NAMES = {"AdamOptimizer": "Adam", "LambOptimizer": "Lamb", "SGDOptimizer": "SGD"}


class RankTensor(Struct, frozen=True):
    """One tensor in a rank's file: its type, shape and byte range.

    `crc` is the CRC-32 of exactly these bytes, if the file states it.
    """

    dtype: str
    shape: tuple[int, ...]
    extent: Extent
    crc: int | None = None

    @property
    def numel(self) -> int:
        return prod(self.shape)


class RankStates(Struct, eq=False):
    """The tensors and counters in one rank's file, by weight.

        weights    full weights
        pieces     flat slices of weights
        halves     16-bit copies of weights
        moments    {weight: {"exp_avg": tensor, ...}}
        counts     Adam's counters
        shared     Lamb's one counter for all weights

    Counters are as stored: the number of completed updates plus one.
    """

    path: str
    weights: dict[str, RankTensor] = field(default_factory=dict)
    pieces: dict[str, RankTensor] = field(default_factory=dict)
    halves: dict[str, RankTensor] = field(default_factory=dict)
    moments: dict[str, dict[str, RankTensor]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    shared: int | None = None


class Save(Struct, eq=False):
    """One checkpoint: its ranks in order, and the facts that all ranks state.

    mixed        type of the 16-bit copies; None in an fp32 run
    shapes       shapes of weights that no file stores in full
    state        values that belong to no weight
    kept         the tensors in `state`
    copies       other ranks' replicas of these tensors
    omitted      notes on values that the manifest will not have
    """

    root: str
    dialect: str
    ranks: list[RankStates]
    mixed: str | None
    optimizer: str | None = None
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    kept: dict[Key, Entry] = field(default_factory=dict)
    copies: list[Entry] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    omitted: list[Notice] = field(default_factory=list)
    warnings: list[Notice] = field(default_factory=list)
    notes: list[Notice] = field(default_factory=list)

    @property
    def dp(self) -> int:
        return len(self.ranks)

    @property
    def has_moments(self) -> bool:
        return any(rank.moments for rank in self.ranks)
