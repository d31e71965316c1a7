"""zckpt's own format: whole tensors as safetensors, under slots, with a manifest.

files.py    which files make the checkpoint, and which version is written
read.py     manifest.json, and where the safetensors files hold each tensor
write.py    the files for `convert --to universal`
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..format import Format

if TYPE_CHECKING:
    from ...core.manifest import Manifest
    from ...core.staging import Layout
    from ...training.options import Options


class Universal(Format):
    name = "universal"
    about = "zckpt's own: whole tensors as safetensors"
    family = "universal"
    is_neutral = True
    options = frozenset({"dtype", "max_file_size", "group_defaults"})
    reasons: Mapping[str, str] = {"dp": "a universal checkpoint has no ranks"}

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

    def lay_out(self, source: Manifest, options: Options) -> Layout:
        from .write import lay_out

        return lay_out(source, options)

    def seal(self, root: str, manifest: Manifest, outcome: Any) -> None:
        from .write import seal

        seal(root, manifest, outcome)
