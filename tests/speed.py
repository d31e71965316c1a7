"""How slow is this core? Tests with a limit of CPU time divide what they measure by it."""

from __future__ import annotations

import time

COUNTS = 1_000_000
SECONDS = 0.03  # an idle core's for these counts: SECURITY.md promises its times for such a core


def slowness() -> float:
    """How many times longer this core takes than that of SECURITY.md; at least 1."""
    start, number = time.process_time(), 0
    while number < COUNTS:
        number += 1
    return max(1.0, (time.process_time() - start) / SECONDS)
