"""`torchrun command.py SECONDS convert ...`: the command line with small regions and slow reads."""

from __future__ import annotations

import sys
import time
from typing import Any

from zckpt import cli
from zckpt.core import filling
from zckpt.core.pieces import ElementReader


def main() -> None:
    seconds = float(sys.argv.pop(1))
    filling.REGION = 1 << 20
    read = ElementReader.read

    def slow(self: ElementReader, *rest: Any) -> None:
        time.sleep(seconds)
        read(self, *rest)

    ElementReader.read = slow  # type: ignore[method-assign]
    cli.main()


if __name__ == "__main__":
    main()
