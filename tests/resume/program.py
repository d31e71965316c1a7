"""`python program.py WHEN RUN VERIFY`: a rank that calls auto_resume, and what it got or raised.

WHEN is before or after the program joins its own group, or file: after it, without an address.
RANK, WORLD_SIZE and the address are in the environment. In the rank FAILS the function WHAT of
zckpt fails.
"""

from __future__ import annotations

import errno
import json
import os
import sys
from typing import Any

import torch
import torch.distributed as dist

import zckpt
from zckpt import api
from zckpt.copying import filling


def fail(*_: Any, **__: Any) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO), "a.pt")


def main(when: str, run: str, verify: str) -> None:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    filling.REGION = 1 << 12
    if os.environ.get("FAILS") == str(rank):
        setattr(api, os.environ["WHAT"], fail)
    if when == "after":
        dist.init_process_group("gloo")
    elif when == "file":
        dist.init_process_group(
            "gloo", init_method=f"file://{run}.store", rank=rank, world_size=size
        )
    found: Any
    try:
        path = zckpt.auto_resume(run, verify=verify)  # type: ignore[arg-type]
        found = path if path is None else [path, path.step, path.tag]
    except zckpt.ZckptError as error:
        found = [type(error).__name__, error.message]
    if when == "before":
        dist.init_process_group("gloo")
        dist.barrier()
        total = torch.ones(1)
        dist.all_reduce(total)
        assert total.item() == size
    print(json.dumps(found), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
