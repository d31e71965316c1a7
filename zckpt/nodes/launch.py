"""Which process is this, among how many that a launcher started together?"""

from __future__ import annotations

import os
from collections.abc import Mapping

from msgspec import Struct

from ..errors import WrongOption

# A variable for the rank and one for the number of ranks. A launcher inside of another one, such as
# torchrun in a step of srun, comes first.
LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE"),
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    # a batch script has SLURM_NTASKS too, but only a step has all these processes
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
}


class Launch(Struct, frozen=True):
    """This process's `rank` of `size` processes.

    `name` is the same in all processes of a launch, and differs between launches if the launcher
    says which one it is.
    """

    rank: int
    size: int
    launcher: str
    name: str = ""


def launched(environment: Mapping[str, str] = os.environ) -> Launch | None:
    """How this process was started with others; None if it was started alone.

    A rank without a number of ranks proves nothing: in many clusters every shell has one. Raises
    WrongOption if the numbers do not fit together.
    """
    for launcher, names in LAUNCHERS.items():
        texts = [environment.get(name, "") for name in names]
        if not all(texts):
            continue
        numbers = [int(text) if text.isdecimal() else -1 for text in texts]
        rank, size = numbers
        if not 0 <= rank < size:
            raise WrongOption(
                f"{names[0]} is {texts[0]} and {names[1]} is {texts[1]}, which no {launcher} sets",
                hint="unset them, or add --single if this process runs alone",
            )
        if size == 1:
            return None
        return Launch(rank, size, launcher, _name(environment))
    return None


def _name(environment: Mapping[str, str]) -> str:
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "PMIX_NAMESPACE")
    texts = [environment[name] for name in names if name in environment]
    return "-".join("".join(c if c.isalnum() else "-" for c in text) for text in texts)


def restarts(environment: Mapping[str, str] = os.environ) -> int:
    """How often torchrun has started its processes again."""
    text = environment.get("TORCHELASTIC_RESTART_COUNT", "0")
    return int(text) if text.isdecimal() else 0
