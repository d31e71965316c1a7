"""The rank of this process among those that a launcher started together."""

from __future__ import annotations

import os
import sys

from msgspec import Struct

from ..errors import WrongOption

# The variables for the rank and for the number of ranks. A launcher inside of another one, such as
# torchrun in a step of srun, comes first.
LAUNCHERS = {
    "torchrun": ("RANK", "WORLD_SIZE"),
    "mpirun": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    # a batch script has SLURM_NTASKS too, but only a step starts all these processes
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
}


class Launch(Struct, frozen=True):
    """The rank of this process, and the number of processes (`size`) of the launch."""

    rank: int
    size: int


def launched() -> Launch | None:
    """Reads the rank and the number of processes from the variables of torchrun, srun or mpirun.

    None without a launcher. A rank alone does not prove that there is a launcher: in many clusters
    every shell has a variable for it. Raises WrongOption if rank and number do not fit together.
    """
    for launcher, names in LAUNCHERS.items():
        texts = [os.environ.get(name, "") for name in names]
        if not all(texts):
            continue
        rank, size = (int(text) if text.isdecimal() else -1 for text in texts)
        if not 0 <= rank < size:
            raise WrongOption(
                "launcher-variables",
                f"{names[0]} is {texts[0]} and {names[1]} is {texts[1]}: {launcher} never sets "
                "such values",
                hint="unset them, or add --single if this process runs alone",
            )
        return Launch(rank, size)
    return None


def joined() -> Launch | None:
    """The rank and size in the program's torch.distributed process group; None if it has none."""
    group = sys.modules.get("torch.distributed")
    if group is None or not group.is_available() or not group.is_initialized():
        return None
    return Launch(group.get_rank(), group.get_world_size())


def address() -> tuple[str, int] | None:
    """The host and port (MASTER_ADDR, MASTER_PORT) where processes meet; None if not stated."""
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not host or not port:
        return None
    if not port.isdecimal() or not 0 < int(port) < 1 << 16:
        raise WrongOption(
            "launcher-variables", f"MASTER_PORT is {port!r}, which is not a port from 1 to 65535"
        )
    return host, int(port)


def meeting_place() -> tuple[str, int]:
    """The host and port where processes meet; raises WrongOption if none are stated."""
    if (place := address()) is None:
        raise WrongOption(
            "launcher-variables",
            "MASTER_ADDR and MASTER_PORT do not say where the processes meet",
            hint="set both, or use torchrun; if this process should run alone, add --single",
        )
    return place
