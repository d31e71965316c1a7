"""`torchrun command.py convert ...`: the command line with small regions.

The variable GO names a file for which every process waits after its first portion. The rank SLOW
has reads that take SECONDS, and leaves that file. The rank FAILS cannot read after it.
"""

from __future__ import annotations

import os
from pathlib import Path

from tests.processes.conftest import fail_after, slow_reads, stop_at_second_portion
from zckpt import cli
from zckpt.copying import filling

if __name__ == "__main__":
    filling.REGION = 1 << 20
    go = Path(os.environ["GO"])
    stop_at_second_portion(go)
    if os.environ["RANK"] == os.environ.get("SLOW"):
        slow_reads(float(os.environ["SECONDS"]), go)
    if os.environ["RANK"] == os.environ.get("FAILS"):
        fail_after(go)
    cli.main()
