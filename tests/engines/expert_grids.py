"""Real DeepSpeed with experts on several model ranks: in a pipeline, or beside tensor ranks.

python -m tests.engines.expert_grids CASE DIR      trains one case into DIR
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from .deepspeed import submit
from .experts import BF16_OPTIMIZER, DATA_FIRST, ROUND_ROBIN, ExpertCase


@dataclass(frozen=True)
class ExpertGridCase(ExpertCase):
    """One training of a model in `expert_grid_rank`.

    `sliced` says that the tensor ranks cut each expert. Otherwise they have other experts.
    """

    pp: int = 1
    tp: int = 1
    sliced: bool = False
    model: str = "pipe"  # or "tensor"
    tied: bool = True  # with 4 data ranks the stages' copies drift: sums have other orders

    @property
    def world(self) -> int:
        return self.pp * self.dp * self.tp


CASES = {
    case.name: case
    for case in (
        ExpertGridCase("pp2_dp2_ep2", 2, (2, 2), stage=1, pp=2),
        ExpertGridCase("pp2_dp2_ep1", 2, (1, 1), stage=1, pp=2),
        ExpertGridCase("pp2_dp2_fp32", 2, (2, 2), stage=1, pp=2, dtype="fp32"),
        # the engine (0.19.8) hangs if stages have layers of other expert-parallel sizes
        ExpertGridCase("pp2_dp2_counts", 2, (2, 2), stage=1, pp=2, experts=(4, 6)),
        ExpertGridCase("pp1_dp4_ep2", 4, (2, 2), stage=1, groups="own", tied=False),
        ExpertGridCase("pp1_dp2_ep1", 2, (1, 1), stage=1),
        ExpertGridCase("pp2_dp4_ep2", 4, (2, 2), stage=1, pp=2, groups="own", tied=False),
        ExpertGridCase(
            "pp2_dp4_data_first", 4, (2, 2), stage=1, pp=2, config=DATA_FIRST, tied=False
        ),
        ExpertGridCase("pp2_dp2_bf16_optimizer", 2, (2, 2), stage=1, pp=2, config=BF16_OPTIMIZER),
        ExpertGridCase("pp2_dp2_round_robin", 2, (2, 2), stage=1, pp=2, config=ROUND_ROBIN),
        ExpertGridCase("tp2_dp2_sliced", 2, (2, 2), model="tensor", tp=2, sliced=True),
        ExpertGridCase(
            "tp2_dp2_sliced_z1", 2, (1, 2), model="tensor", stage=1, tp=2, sliced=True, dtype="fp32"
        ),
        ExpertGridCase("tp2_dp2_spread", 2, (2, 2), model="tensor", tp=2),
    )
}


def train(case: ExpertGridCase, root: Path) -> Path:
    """Trains `case`, saves it in `root`/run and what the ranks held in `root`/oracle.pt."""
    root.mkdir(parents=True, exist_ok=True)
    submit("expert_grid_rank", "train", case.world, (case, root.resolve()), root)
    return root / "run"


def resume(case: ExpertGridCase, directory: Path, root: Path, **changes: Any) -> dict[str, Any]:
    """What a new engine of `case` with `changes` holds after it loaded `directory`."""
    root.mkdir(parents=True, exist_ok=True)
    resumed = replace(case, **changes)
    output = root.resolve() / "resumed.pt"
    arguments = (resumed, directory.resolve(), output)
    submit("expert_grid_rank", "resume", resumed.world, arguments, root)
    record: dict[str, Any] = torch.load(output, weights_only=False)
    return record


if __name__ == "__main__":
    from . import expert_grids  # a case of `__main__` could not be pickled

    expert_grids.train(expert_grids.CASES[sys.argv[1]], Path(sys.argv[2]))
