"""ONNX Runtime's ZeRO-1 checkpoints, 1.3 to 1.16; later versions have none.

    PREFIX.ZeRO.R.L.ort.pt, PREFIX.ort.pt    torch.save: L1 (before 1.7) and L2
    any name                                 HDF5, one file per rank

    files.py        which files belong together
    legacy.py       what the files of torch.save hold
    hdf5.py         what the HDF5 files hold
    ranks.py        what both kinds of files say of a rank
    partition.py    which elements of which weight each rank owns
    owners.py       the fragments of every weight, from the ranks that own them
    read.py         the manifest
    gather.py       what ONNX Runtime's own aggregators would join
    write.py        L2 and HDF5 files for any data-parallel size

Facts in this package are of onnxruntime-training 1.16.3 and its sources back to 1.3.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..format import Format

if TYPE_CHECKING:
    from ...core.manifest import Manifest
    from ...core.partition import Partition
    from ...core.staging import Layout
    from ...training.options import Options


class OnnxRuntime(Format):
    name = "onnxruntime"
    about = "ONNX Runtime Training ZeRO-1, 1.3 to 1.16 (HDF5, .ort.pt)"
    family = "onnxruntime"
    options = frozenset({"dp", "dtype"})
    dialects = ("hdf5", "l2")

    def detect(self, path: str) -> list[str]:
        from .files import detect

        return detect(path)

    def read(
        self,
        path: str,
        tag: str | None = None,
        step_policy: str | None = None,
        param_names: tuple[str, ...] | None = None,
        weights_only: bool = False,
    ) -> Manifest:
        from .read import read

        return read(path, tag, step_policy)

    def check(self, manifest: Manifest) -> None:
        from .read import check

        check(manifest)

    def lay_out(self, source: Manifest, options: Options) -> Layout:
        from .write import lay_out

        return lay_out(source, options)

    def seal(self, root: str, manifest: Manifest, outcome: Any) -> None:
        from .write import seal

        seal(root, manifest, outcome)

    def read_shells(self, path: str) -> Manifest:
        from ...training.steps import KEEP

        return self.read(path, step_policy=KEEP)  # every weight may have its own step

    def partitions(self, path: str) -> list[Partition]:
        from .gather import partitions

        return partitions(path)
