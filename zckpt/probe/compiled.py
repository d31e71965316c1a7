"""Tells which modules torch.compile compiled, and whether the modules inside can be recorded.

Hooks cause graph breaks, because torch must not compile them. torch 2.13 allows this if the hooks
exist before the first call, and without `fullgraph=True`. Code that was compiled before the hooks
existed does not call them: then only inputs and outputs of the compiled module are recorded.
"""

from __future__ import annotations

from typing import Any

from torch import nn


def is_compiled(module: nn.Module) -> bool:
    """Whether calls of the module run code that torch.compile compiled."""
    return type(module).__name__ == "OptimizedModule" or bool(
        getattr(module, "_compiled_call_impl", None)
    )


def is_one_graph(module: nn.Module) -> bool:
    """Whether a module was compiled with `fullgraph=True`, which allows no hooks inside.

    If this version of torch does not show the option, the result is True too, so that no hooks are
    put inside.
    """
    return any(getattr(context, "fullgraph", True) for context in _contexts(module) or [None])


def _contexts(module: nn.Module) -> list[Any]:
    call = getattr(module, "_compiled_call_impl", None)
    contents = [cell.cell_contents for cell in getattr(call, "__closure__", None) or ()]
    contents.append(getattr(module, "dynamo_ctx", None))
    return [each for each in contents if hasattr(each, "fullgraph")]
