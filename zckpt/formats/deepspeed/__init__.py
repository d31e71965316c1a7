"""DeepSpeed's ZeRO-1, 2 and 3 directories, as engine.save_checkpoint writes them.

    <run>/latest                                              the tag, as text
    <run>/<tag>/mp_rank_00_model_states.pt                    stage 1, 2: weights, buffers, counters
    <run>/<tag>/zero_pp_rank_R_mp_rank_00_model_states.pt     stage 3: one per rank, weights empty
    <run>/<tag>/[bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt   R is the data-parallel rank

    directory.py    which files there are, and what is refused by their names
    ranks.py        what the ranks' files say, and whether they say the same
    flats.py        the flat buffers of fp32 masters and optimizer states
    reading.py      the manifest of it all
    writing.py      the same files for another data-parallel size, stage or type
    universal.py    DeepSpeed's own universal checkpoints: another format, the same model files
    engine.py       the engine that they are written for
    hyper.py        what its optimizer needs and a source may lack

Facts in this package are of DeepSpeed 0.19.8 unless said otherwise; files back to 0.5.10 are read.
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

__all__ = ["detect", "lay_out", "partitions", "read", "seal"]


def lay_out(source: Manifest, options: Options) -> Layout:
    """The files of a target; see writing.py, which reading has no need of."""
    from . import write as writing

    return writing.lay_out(source, options)


def seal(root: str, manifest: Manifest, outcome: Any) -> None:
    """What is known only when all tensors are there: the records' checksums."""
    from . import write as writing

    writing.seal(root, manifest, outcome)


def partitions(path: str) -> list[Partition]:
    """What the ranks would all-gather; see gathering.py, which only a proof has need of."""
    from . import gather as gathering

    return gathering.partitions(path)
