"""Chooses the tensor that supplies the values of a weight.

A weight has up to two tensors: `param`, as the module stores it, and `master`, the fp32 value that
the optimizer updates.

    wanted                    first choice       second     third
    param, of type T          param of type T    master     param of any type
    param, from the masters   master             param
    master                    master             param

A tensor of the wanted type is copied. A master of fp32 or fp64 is rounded to the type of a `param`;
a `param` of fewer bits is widened to a master. Only this module makes this choice. A format states
which slots and types its files have; it does not state where the values come from.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from msgspec import Struct

from ...errors import MissingData
from ..grouping import by_key
from .dtypes import FLOATS, NUMBERS
from .entries import Entry, Key

WEIGHTS = frozenset({"param", "master"})
"""The slots of weights."""

WIDE = ("F64", "F32")
"""The types of masters, from which weights are rounded."""

FP64 = ("param", "F64")


def is_optimizers(slot: str) -> bool:
    """Whether a tensor of this slot is an optimizer state, such as `exp_avg`, and not a weight."""
    return slot not in WEIGHTS and slot != "state"


def is_rounded(wide: str, narrow: str) -> bool:
    """Whether weights of type `narrow` may come from rounding masters of type `wide`.

    False for 8-bit floats: they are scaled by numbers that are stored elsewhere.
    """
    return wide in WIDE and narrow in FLOATS & NUMBERS and wide != narrow


def is_widened(narrow: str, wide: str | None) -> bool:
    """Whether masters of type `wide` would be made from a type of 16 bits or fewer (`narrow`).

    Such masters have only the precision of `narrow`.
    """
    return narrow in FLOATS and narrow not in WIDE and wide in WIDE


class Weight(Struct, frozen=True):
    """One weight: its `param`, as the module stores it, and its fp32 `master`; one may be None.

    The methods choose between these two tensors, and raise MissingData if there is neither.
    """

    name: str
    param: Entry | None
    master: Entry | None

    def supply(self, slot: str, dtype: str, from_masters: bool = False) -> Entry:
        """The tensor that supplies a target's `param` or `master` (the `slot`) of type `dtype`.

        With `from_masters`, the master supplies the `param` too.
        """
        if slot == "param" and not from_masters and self.param and self.param.dtype == dtype:
            return self.param
        return self.trained

    @property
    def trained(self) -> Entry:
        """The most exact values, which the optimizer updates: the master, else the `param`."""
        return self._known(self.master or self.param)

    @property
    def stored(self) -> Entry:
        """The module's own tensor, if the checkpoint has it; else the fp32 master of the weight."""
        return self._known(self.param or self.master)

    def _known(self, entry: Entry | None) -> Entry:
        if entry is None:
            raise MissingData("weights-missing", f"the source has no weight {self.name}")
        return entry


def weight_of(entries: Mapping[Key, Entry], name: str) -> Weight:
    """Looks up the `param` and the `master` of the weight `name`; a missing one is None."""
    return Weight(name, entries.get((name, "param")), entries.get((name, "master")))


def states_by_weight(entries: Iterable[Entry]) -> dict[str, set[str]]:
    """Maps every weight with optimizer states to the slots of these states, such as `exp_avg`."""
    slots = by_key((e.parameter, e.slot) for e in entries if is_optimizers(e.slot))
    return {name: {*own} for name, own in slots.items()}


def agreement(master: Entry, weight: Entry) -> str | None:
    """How to compare an fp32 master with its weight: `bits`, or `rounded`.

    With `rounded`, the master is rounded to the type of the weight before they are compared. None
    if their types or shapes cannot belong to one weight.
    """
    if weight.shape != master.shape:
        return None
    if weight.dtype == master.dtype:
        return "bits"
    return "rounded" if is_rounded(master.dtype, weight.dtype) else None


def counterpart(entry: Entry, other_weight: Weight, weight: Weight) -> tuple[Entry, str] | None:
    """Finds the tensor of another checkpoint that must equal `entry`, and how to compare the two.

    `entry` is the `param` or the `master` of `weight`. `other_weight` is the same weight in the
    other checkpoint, which has no tensor of this slot and type. The comparison is `bits` or
    `rounded`, as in `agreement`. None if no tensor fits.
    """
    # a tensor of the same type, or one that rounds to `entry` (to a master, only an fp64 `param`)
    for other in (other_weight.master, other_weight.param):
        how = None if other is None else agreement(other, entry)
        is_known = how == "bits" or entry.slot == "param"
        if other and how and (is_known or (other.slot, other.dtype) == FP64):
            return other, how
    # a narrower `param`, to which `entry` rounds, unless a master of `weight` does
    stands_alone = entry.slot == "master" or weight.master is None
    narrow = other_weight.param
    if stands_alone and narrow is not None and narrow.dtype not in WIDE:
        how = agreement(entry, narrow)
        return None if how is None else (narrow, how)
    return None
