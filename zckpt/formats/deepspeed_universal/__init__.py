"""DeepSpeed's own universal checkpoints, which the engine loads with `load_universal`.

    files.py      which files make the checkpoint
    folders.py    its tensors: a folder per parameter, a file per state
    merged.py     everything else that the files say
    read.py       the manifest
    slicing.py    how the engine cuts a whole tensor for tensor parallelism
    write.py      such a directory for any data-parallel size

The model files are those of formats/deepspeed; both share formats/deepspeed_states.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..format import Format

if TYPE_CHECKING:
    from ...core.manifest import Manifest
    from ...core.staging import Layout, Shell
    from ...training.options import Options


class DeepSpeedUniversal(Format):
    name = "deepspeed-universal"
    about = "DeepSpeed's own universal checkpoints, for load_universal"
    family = "deepspeed"
    options = frozenset({"dp", "stage", "dtype", "config", "optimizer", "group_defaults"})

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

    def prepare(self, manifest: Manifest) -> tuple[Manifest, list[Shell]]:
        from ...training.groups import without_empty_groups

        return without_empty_groups(manifest)

    def lay_out(self, source: Manifest, options: Options) -> Layout:
        from .write import lay_out

        return lay_out(source, options)

    def seal(self, root: str, manifest: Manifest, outcome: Any) -> None:
        from .write import seal

        seal(root, manifest, outcome)
