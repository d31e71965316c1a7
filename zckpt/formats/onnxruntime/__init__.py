"""ONNX Runtime's ZeRO-1 checkpoints, 1.3 to 1.16; later versions have none.

    PREFIX.ZeRO.R.L.ort.pt, PREFIX.ort.pt    torch.save: L1 (before 1.7) and L2
    any name                                 HDF5, one file per rank

    directory.py    which files belong together
    legacy.py       what the files of torch.save hold
    hdf5.py         what the HDF5 files hold
    ranks.py        the words that both are told in
    partition.py    which elements of which weight each rank owns
    reading.py      the manifest: every weight from its owners
    gathering.py    what ONNX Runtime's own aggregators would make of it
    writing.py      L2 and HDF5 files for any data-parallel size

Facts in this package are of onnxruntime-training 1.16.3 and its sources back to 1.3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .files import detect
from .read import read

if TYPE_CHECKING:
    from ...core.manifest import Manifest
    from ...core.partition import Partition
    from ...core.staging import Layout
    from ...training.options import Options

__all__ = ["check", "detect", "lay_out", "partitions", "read", "read_shells", "seal"]


def check(manifest: Manifest) -> None:
    """Raises if the bytes of a source contradict each other; see read.py."""
    from .read import check as check_bytes

    check_bytes(manifest)


def lay_out(source: Manifest, options: Options) -> Layout:
    """The files of a target; see writing.py, which reading has no need of."""
    from . import write as writing

    return writing.lay_out(source, options)


def read_shells(path: str) -> Manifest:
    """What was laid out, in which every weight may have its own step."""
    from ...training.steps import KEEP

    return read(path, step_policy=KEEP)


def seal(root: str, manifest: Manifest, outcome: Any) -> None:
    """What is known only when all tensors are there: the records' checksums."""
    from . import write as writing

    writing.seal(root, manifest, outcome)


def partitions(path: str) -> list[Partition]:
    """What the ranks would all-gather; see gathering.py, which only a proof has need of."""
    from . import gather as gathering

    return gathering.partitions(path)
