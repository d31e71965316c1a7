"""Python runs this at its start: torch's FileSystemReader becomes zckpt's storage reader.

It is on the path of the runs of `torch_suite.py` alone, and of the processes that tests start,
which no plugin of pytest would reach. Every load is a line of the file ZCKPT_PEER_LOADS.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from typing import Any

PACKAGE = "torch.distributed.checkpoint"


class Finder:
    """Waits until torch's package is imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != PACKAGE:
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        plain = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            plain(module)
            replace(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def replace(package: Any) -> None:
    from torch.distributed.checkpoint import _storage_utils, filesystem, format_utils

    with contextlib.suppress(ImportError):  # what inherits from torch's own reader keeps it
        importlib.import_module(f"{PACKAGE}._fsspec_filesystem")
    from zckpt.dcp import StorageReader

    plain = StorageReader.read_data

    def read_data(self: Any, plan: Any, planner: Any) -> Any:
        with open(os.environ["ZCKPT_PEER_LOADS"], "a") as file:
            file.write(f"{self.path}\n")
        return plain(self, plan, planner)

    StorageReader.read_data = read_data  # type: ignore[method-assign]
    for module in (package, filesystem, format_utils, _storage_utils):
        module.FileSystemReader = StorageReader


sys.meta_path.insert(0, Finder())  # type: ignore[arg-type]
