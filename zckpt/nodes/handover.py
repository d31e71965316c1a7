"""How does a manifest get from one process to another?

As a pickle of a closed table: only the records of this package that a manifest is made of can be in
it. A pickle keeps what JSON would lose: the flat buffers that 50,000 tensors share stay one object.
The store of a launch asks nobody who he is, so nothing else may ever be made of its bytes.
"""

from __future__ import annotations

import io
import pickle
import zlib
from collections.abc import Callable
from importlib import import_module
from typing import Any

from ..core.manifest import Manifest
from ..core.values import replace
from ..errors import CorruptCheckpoint

CLASSES = {
    "builtins": {"frozenset"},
    "zckpt.core.compare": {"ComparisonWork", "Partial"},
    "zckpt.core.difference": {"Difference"},
    "zckpt.core.fragments": {"Box", "Boxes", "Extent", "Fragment", "Record", "Runs", "Slices"},
    "zckpt.core.inert": {"Scalar"},
    "zckpt.copying.journal": {"Identity"},
    "zckpt.core.manifest": {"Entry", "Manifest", "Parameter"},
    "zckpt.core.plan": {"Match"},
    "zckpt.copying.sharing": {"Work"},
    "zckpt.core.sources": {"Fingerprint"},
    "zckpt.proof.health": {"MeasuringWork", "Partial"},
    "zckpt.proof.stats": {"Statistics"},
}
"""The classes that may be made, by module. A module is imported when the first one is made."""


class _Table(pickle.Unpickler):
    """Makes objects of the table's classes, and of no others."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in CLASSES.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} is not part of a manifest")
        return getattr(import_module(module), name)


def tensors_of(manifest: Manifest) -> Manifest:
    """The part of a manifest that moves bytes: where tensors lie, and which weights are tied."""
    nothing: dict[str, Any] = {"engine": None, "step_place": None, "groups": None, "state": {}}
    return replace(
        manifest,
        **nothing,
        steps=(),
        left_out=(),
        warnings=(),
        inferred=(),
        siblings=(),
        sibling_weights=(),
        objects=frozenset(),
        source={"dp": manifest.dp},
        fingerprints=dict(manifest.fingerprints),
    )


def with_manifests(work: Any, change: Callable[[Manifest], Manifest]) -> Any:
    """A pass whose manifests are changed; two sides that were one stay one."""
    changed = {id(manifest): change(manifest) for manifest in work.manifests}
    return replace(work, manifests=tuple(changed[id(manifest)] for manifest in work.manifests))


def to_bytes(value: object) -> bytes:
    """The bytes of a value whose classes are all in the table."""
    return zlib.compress(pickle.dumps(value, protocol=5), 1)


def from_bytes(data: bytes) -> Any:
    """The inverse of `to_bytes`; raises CorruptCheckpoint for what it cannot have written."""
    try:
        return _Table(io.BytesIO(zlib.decompress(data))).load()
    except Exception as error:
        raise CorruptCheckpoint(
            f"a message of another process cannot be read: {error}",
            hint="start all processes with the same version of zckpt",
        ) from error
