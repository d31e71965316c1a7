"""Checks that the bytes which all ranks read have the checksums that the source's files state.

Several ranks may each read a part of a record (the bytes that one checksum covers). Each rank
computes the checksums of its parts, and rank 0 combines them. Damage does not end a read: all ranks
first read their file, and then raise the same error. If one rank raised alone, the others would
wait forever in a collective call of the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from ..copying.copy import counted
from ..core.checkpoint.manifest import Manifest
from ..core.passes.plan import Pair
from ..core.passes.streaming import finish
from ..core.storage.records import RecordChecker, damaged
from ..processes.ranks import Ranks, received, sent


class Agreement:
    """Combines the checksums of the bytes of `source` that all ranks have read.

    checker       computes the checksums of this rank's bytes
    pairs         a source tensor and the target tensor that it fills
    checking      Python `id`s of the pairs whose bytes this rank hashes
    is_sparing    True to compare no checksums
    """

    def __init__(
        self, ranks: Ranks, source: Manifest, pairs: Sequence[Pair], is_sparing: bool
    ) -> None:
        self._ranks, self._source, self._pairs = ranks, source, pairs
        self._records = () if is_sparing else source.files.records
        self.checker = self._new_checker()
        self.checking = counted(pairs, self.checker)

    def _new_checker(self) -> RecordChecker:
        return RecordChecker(
            self._records, collect=True, fingerprints=self._source.files.fingerprints
        )

    def agree(self, error: Exception | None, is_last: bool, is_all: bool = True) -> None:
        """Raises Told in all ranks if one of them failed, or if bytes do not have their checksum.

        error      this rank's failure, or None
        is_last    whether this was the last file; then records (byte ranges with a checksum) that
                   ranks have read in part are read to the end, unless much is missing
        is_all     whether the engine has read both model and optimizer; then, after the last
                   file, tensors that no rank has hashed are read too
        """
        values = self._ranks.gathered([sent(error), [*self.checker.parts()]])
        self._ranks.told(partial(self._judge, values, is_last, is_all))

    def _judge(self, values: Sequence[Any], is_last: bool, is_all: bool) -> None:
        checker = self._new_checker()
        if is_last and is_all:
            counted(self._pairs, checker)
        for failure, parts in values:
            if failure is not None:
                raise received(failure)
            for part in parts:  # of a record that has passed as a whole, no more is counted
                checker.passed_before(*part)
        if is_last and not checker.damage:
            finish([checker])
        for extent in checker.damage:
            raise damaged(extent)
