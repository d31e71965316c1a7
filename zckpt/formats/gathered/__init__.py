"""Files of torch.save: whole, or one per rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..format import Format

if TYPE_CHECKING:
    from ...core.manifest import Manifest
    from ...core.staging import Layout, Shell
    from ...training.options import Options


class Gathered(Format):
    name = "gathered"
    about = "files of torch.save, whole or one per rank: FSDP, ZeroRedundancyOptimizer, plain torch"
    family = "torch"
    options = frozenset({"dtype", "group_defaults"})
    dialects = ("safetensors", "accelerate")
    reasons: Mapping[str, str] = {"dp": "whole files load on any number of ranks"}

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

    def read_shells(self, path: str) -> Manifest:
        from ...training.steps import KEEP

        return self.read(path, step_policy=KEEP)  # every weight may have its own step
