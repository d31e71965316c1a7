"""Puts zckpt in the place of DeepSpeed's checkpoint code, in every process of DeepSpeed's tests.

Their tests fork from a server that pytest's plugins do not reach; Python itself imports this module
when this folder is in PYTHONPATH. Nothing is imported before DeepSpeed is.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def without_shared_memory(module: ModuleType) -> None:
    """It would compile an op, and leave 69 MB per rank in /dev/shm (0.19.8)."""
    vars(module)["build_shm_op"] = lambda: None


def with_fp16(module: ModuleType) -> None:
    """The CPU can compute in fp16, slowly; DeepSpeed says that it cannot."""
    module.CPU_Accelerator.is_fp16_supported = lambda self: True


def with_its_version(module: ModuleType) -> None:
    """A source tree that is not installed calls itself 0.0.0, which stage 1 refuses to load."""
    vars(module)["version"] = os.environ["DEEPSPEED_VERSION"]


def replaced(name: str) -> Callable[[ModuleType], None]:
    """What `tests.peers.deepspeed_in_place` does with a module."""

    def patch(module: ModuleType) -> None:
        from tests.peers import deepspeed_in_place

        getattr(deepspeed_in_place, name)(module)

    return patch


PATCHES: dict[str, Callable[[ModuleType], None]] = {
    "deepspeed.accelerator.cpu_accelerator": with_fp16,
    "deepspeed.comm.torch": without_shared_memory,
    "deepspeed.git_version_info": with_its_version,
}
if os.environ.get("ZCKPT_IN_PLACE") == "1":
    PATCHES |= {
        "deepspeed.runtime.engine": replaced("replace_engine"),
        "deepspeed.checkpoint.ds_to_universal": replaced("replace_converter"),
        "deepspeed.utils.zero_to_fp32": replaced("replace_merger"),
    }


class Patching(importlib.abc.MetaPathFinder):
    """Finds the modules that are patched once they have run."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        patch = PATCHES.get(fullname)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path) if patch else None
        if spec is None or spec.loader is None or patch is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            patch(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Patching())
