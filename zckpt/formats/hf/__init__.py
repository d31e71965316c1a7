"""Folders for `from_pretrained` of transformers and PEFT: weights and what loads them.

They are written only: such a folder is read as `gathered`, weights alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..format import Format

if TYPE_CHECKING:
    from ...core.manifest import Manifest
    from ...core.staging import Layout
    from ...training.options import Options


class HuggingFace(Format):
    name = "hf"
    about = "weights for from_pretrained of transformers and PEFT; read as gathered"
    family = "hf"
    reads = False
    is_resumed = False
    options = frozenset({"dtype", "max_file_size", "model_config"})
    reasons: Mapping[str, str] = {"dp": "a folder for from_pretrained has no ranks"}

    def detect(self, path: str) -> list[str]:
        return []

    def read(
        self,
        path: str,
        tag: str | None = None,
        step_policy: str | None = None,
        param_names: tuple[str, ...] | None = None,
        weights_only: bool = False,
    ) -> Manifest:
        from .read import read

        return read(path)

    def lay_out(self, source: Manifest, options: Options) -> Layout:
        from .write import lay_out

        return lay_out(source, options)
