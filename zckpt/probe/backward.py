"""Calls subscribers in the backward pass of each module call.

    pre_backward_module     the first gradient of an output is known, and weights are gathered
    gradient_tensor         called with each gradient of an output, and may change it
    post_backward_module    the gradients of all inputs are known; at the end if no input has one

Engines gather a module's weights before its backward pass, and release them after it. They too use
hooks: ZeRO stage 3 wraps the outputs and inputs of a module in autograd functions, and FSDP2 hooks
its output tensors. All three methods must be called between gathering and releasing:

outputs    zckpt hooks their nodes in the autograd graph. Hooks on nodes run after hooks on tensors,
           so the engine has gathered by then.
inputs     zckpt hooks the tensors that `forward` gets. These lie behind the engine's wrapper, so
           the engine has not released yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor

from ..core.grouping import by_key

KEY = "zckpt"
"""The key, in the metadata of an autograd node, of the list of functions that zckpt hooks to it."""
Change = Callable[[str, Tensor], Tensor]


class Call(Struct, eq=False):
    """One call of a module, and the functions to call in its backward pass.

    before  called when the backward pass of the call begins
    change  called with the path of an output and its gradient; returns the gradient to use
    after   called when the backward pass of the call ends
    """

    before: Callable[[], None]
    after: Callable[[], None]
    change: Change | None
    _expected: int = 0
    _begun: int = -1  # the number of the backward
    _ended: int = -1
    _arrived: int = 0

    def watch(self, inputs: Iterable[Tensor], outputs: Sequence[tuple[str, Tensor]]) -> list[Any]:
        """Registers hooks on the graph nodes of the outputs, and on the inputs.

        Returns the handles of hooks on leaf tensors, which the caller must remove.
        """
        differentiable = ((path, each) for path, each in outputs if each.grad_fn is not None)
        nodes = by_key((each.grad_fn, (each.output_nr, path)) for path, each in differentiable)
        if not nodes:
            return []
        for node, places in nodes.items():
            _hook(node, partial(self._begin, places))
        handles = []
        for tensor in {id(each): each for each in inputs if each.requires_grad}.values():
            self._expected += 1
            handle = tensor.register_hook(self._arrive)  # type: ignore[no-untyped-call]
            if tensor.is_leaf:  # hooks of other tensors are freed with the graph
                handles.append(handle)
        return handles

    def _begin(
        self, places: Sequence[tuple[int, str]], gradients: Sequence[Any]
    ) -> tuple[Any, ...]:
        task = torch._C._current_graph_task_id()
        if self._begun != task:
            self._begun, self._arrived = task, 0
            self.before()
            torch.autograd.Variable._execution_engine.queue_callback(self._end)
        changed = list(gradients)
        for number, path in places:
            if self.change is not None and changed[number] is not None:
                changed[number] = self.change(path, changed[number])
        return tuple(changed)

    def _arrive(self, gradient: Tensor) -> None:
        self._arrived += 1
        if self._arrived == self._expected:
            self._end()

    def _end(self) -> None:
        if self._ended != self._begun:
            self._ended = self._begun
            self.after()


def _hook(node: Any, begin: Callable[[Sequence[Any]], tuple[Any, ...]]) -> None:
    """Registers `begin` to be called before the backward pass of a graph node.

    If several modules hook the same node, the last hook runs first: a module that returns the
    output of an inner module begins its backward pass before the inner module.
    """
    hooks = node.metadata.setdefault(KEY, [])
    hooks.append(begin)
    if len(hooks) > 1:
        return

    def run(gradients: tuple[Any, ...]) -> tuple[Any, ...]:
        for before_backward in reversed(hooks):
            gradients = before_backward(gradients)
        return gradients

    node.register_prehook(run)
