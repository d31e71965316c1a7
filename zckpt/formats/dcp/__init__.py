"""Directories of torch.distributed.checkpoint, as FSDP1, FSDP2 and plain torch save them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..format import Format

if TYPE_CHECKING:
    from ...core.manifest import Manifest
    from ...core.staging import Layout, Shell
    from ...training.options import Options


class Dcp(Format):
    name = "dcp"
    about = "torch.distributed.checkpoint of FSDP1, FSDP2, plain torch"
    family = "torch"
    options = frozenset({"dp", "dtype", "dcp_layout", "max_file_size", "group_defaults"})
    dialects = ("accelerate",)

    def detect(self, path: str) -> list[str]:
        from .files import detect

        return detect(path)

    def detect_weak(self, path: str) -> list[str]:
        from .files import detect_weak

        return detect_weak(path)

    def read(
        self,
        path: str,
        tag: str | None = None,
        step_policy: str | None = None,
        param_names: tuple[str, ...] | None = None,
        weights_only: bool = False,
    ) -> Manifest:
        from .read import read

        return read(path, tag, step_policy, param_names, weights_only)

    def prepare(self, manifest: Manifest) -> tuple[Manifest, list[Shell]]:
        from ...training.groups import with_trainers_groups

        return with_trainers_groups(manifest)

    def lay_out(self, source: Manifest, options: Options) -> Layout:
        from .write import lay_out

        return lay_out(source, options)

    def seal(self, root: str, manifest: Manifest, outcome: Any) -> None:
        from .write import seal

        seal(root, manifest, outcome)
