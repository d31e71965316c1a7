"""`srun python -m tests.engines.slurm_rank PROGRAM RUN LOG PORT`: a rank of a run under Slurm.

In the first start of the job all ranks die in one step; started again, they go on to the end.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from . import resumed_rank
from .resumed import Program


def main(stage: str, run: str, log: str, port: str) -> None:
    resumed_rank.prepare()
    resumed_rank.train(
        int(os.environ["RANK"]),
        Path(run).parent / "store",
        Program(f"zero-{stage}", "zero", int(stage)),
        Path(run),
        int(os.environ["WORLD_SIZE"]),
        "SLURM_RESTART_COUNT" not in os.environ,
        Path(log),
        int(port),
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
