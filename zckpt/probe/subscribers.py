"""Calls subscribers in every forward and backward pass of every module.

    before a module's forward    subscribers in the order of registration
    after it                     subscribers in the reverse order

Subscribers may change inputs, outputs and gradients. zckpt's hooks run inside those that an engine
registered earlier: it appends its forward pre-hooks, and prepends its forward hooks. So ZeRO stage
3 and FSDP2 all-gather the parameters before zckpt's first hook, and release them after its last
hook.

All hooks are removed at the end of the `with` block, also after an exception, and also from deep
copies that were made inside it. compiled.py is about compiled modules, backward.py about backward
passes.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from msgspec import Struct
from torch import Tensor, nn

from .backward import Call
from .compiled import is_compiled, is_one_graph

ROOT = "(model)"
WRAPPERS = frozenset({"module", "_forward_module", "_orig_mod"})
"""Attributes in which engines and torch store the model that they wrap."""
WITHIN = ("_checkpoint_wrapped_module", "_fsdp_wrapped_module", "_orig_mod")
ENGINES = ("torch", "deepspeed", "accelerate", "lightning", "lightning_fabric")

LISTS = (nn.ParameterList, nn.ParameterDict)
"""Modules that are never called; the module around them uses their weights."""
WHOLE = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
"""Modules of torch whose forward uses weights of their children without calling them."""


class Place(Struct, frozen=True):
    """One call of a module.

    path        the module's path in the model
    call        the number of the call within one forward pass of the model
    recomputed  whether activation checkpointing calls the module again, in the backward pass
    """

    module: nn.Module
    path: str
    call: int
    recomputed: bool = False

    @property
    def key(self) -> str:
        return f"{self.path}#{self.call}"

    @property
    def is_root(self) -> bool:
        return self.path == ROOT


class Subscriber:
    """Base class for code that runs in forward and backward passes; override methods you need.

    The value that a method returns replaces its last argument (or `args` and `kwargs`). `path` is
    the place of a tensor in inputs or outputs, which may be nested tuples, lists, mappings and
    dataclasses: `in[0]`, `in.mask`, `out`, `out.logits`.
    """

    def pre_forward_module(
        self, place: Place, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, kwargs

    def pre_forward_tensor(self, place: Place, path: str, tensor: Tensor) -> Tensor:
        return tensor

    def post_forward_module(self, place: Place, args: tuple[Any, ...], output: Any) -> Any:
        return output

    def post_forward_tensor(self, place: Place, path: str, tensor: Tensor) -> Tensor:
        return tensor

    def pre_backward_module(self, place: Place) -> None:
        """Called when the first gradient of the call's outputs is known."""

    def gradient_tensor(self, place: Place, path: str, gradient: Tensor) -> Tensor:
        """Called with the gradient of an output, such as `out` or `out.logits`.

        If several modules return the same tensor, this method is called for each of the modules.
        """
        return gradient

    def post_backward_module(self, place: Place) -> None:
        """Called when the gradients of the call's inputs are known."""

    def leave_module(self, module: nn.Module) -> None:
        """Called when a call of the module has ended, also with an error."""


BACKWARD = ("pre_backward_module", "gradient_tensor", "post_backward_module")


@contextmanager
def subscribe(
    model: nn.Module, *subscribers: Subscriber, inside_compiled: bool = True
) -> Iterator[None]:
    """Inside the `with` block, calls the subscribers for `model` and all modules in it.

    Subscribers are called in forward and backward passes. With `inside_compiled`, they are also
    called for modules inside of compiled modules, where torch allows it.
    """
    hooks = _Hooks(subscribers)
    by_path = modules(model)
    closed = [path for path, module in by_path.items() if is_compiled(module)]
    try:
        for path, module in by_path.items():
            around = [each for each in closed if each != path and is_below(path, each)]
            if inside_compiled or not around:
                hooks.register(module, path, bool(around) or path in closed)
        yield
    finally:
        hooks.remove()


def modules(model: nn.Module) -> dict[str, nn.Module]:
    """Maps paths to the modules in a model; names of wrappers (engines, compilers) are left out."""
    return dict(_modules(unwrapped(model), ROOT))


def is_below(path: str, other: str) -> bool:
    """Whether a module lies inside of another one; both are given by their paths."""
    return path != other and (other == ROOT or path.startswith(f"{other}."))


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside of a wrapper, such as DeepSpeed's engine or DistributedDataParallel."""
    while type(model).__module__.partition(".")[0] in ENGINES and not is_compiled(model):
        children = dict(model.named_children())
        if len(children) != 1 or not WRAPPERS.issuperset(children):
            break
        (model,) = children.values()
    return model


def _modules(
    module: nn.Module, path: str, seen: set[int] | None = None
) -> Iterator[tuple[str, nn.Module]]:
    seen = set() if seen is None else seen
    if id(module) in seen or type(module).__name__ == "RecursiveScriptModule":
        return  # TorchScript's modules have no hooks
    seen.add(id(module))
    yield path, module
    if is_compiled(module) and is_one_graph(module):
        return
    for name, child in module.named_children():
        below = path if name in WITHIN else name if path == ROOT else f"{path}.{name}"
        for inner_path, inner in _modules(child, below, seen):
            if inner_path != path:  # a module that torch wraps is seen from outside
                yield inner_path, inner


def used_by(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yields (path, module) for a module, and for inner modules that it uses without calling them.

    The inner modules are ParameterLists and ParameterDicts, or all modules inside if `module` is of
    a class in `WHOLE`. Paths are relative to `module`, whose own path is "".
    """
    if isinstance(module, WHOLE):
        yield from module.named_modules()
        return
    yield "", module
    for name, child in module.named_children():
        if isinstance(child, LISTS):
            yield from child.named_modules(prefix=name)


class _Hooks:
    """The hooks of one `subscribe` block, with a count of each module's calls.

    Calls are counted within one forward pass of the model.
    """

    def __init__(self, subscribers: Sequence[Subscriber]) -> None:
        self.by_method = {
            name: [each for each in subscribers if getattr(type(each), name) is not usual]
            for name, usual in vars(Subscriber).items()
            if not name.startswith("_")
        }
        self.of_leaves: list[Any] = []
        self.calls: Counter[str] = Counter()
        self.again: Counter[str] = Counter()
        self.copies: list[Any] = []
        self.handles: list[Any] = []
        self.roots: list[int] = []  # numbers of the calls of the root that have not returned

    def register(self, module: nn.Module, path: str, is_in_graph: bool) -> None:
        """Registers the hooks of a module.

        If `is_in_graph`, the module is inside of a compiled module: then torch is told not to
        compile the hooks.
        """
        pre: Callable[..., Any] = _Hook(self, module, path, "_pre")
        post: Callable[..., Any] = _Hook(self, module, path, "_post")
        leave: Callable[..., Any] = _Hook(self, module, path, "_leave")
        if is_in_graph:
            disable: Any = torch.compiler.disable
            pre, post, leave = disable(pre), disable(post), disable(leave)
        self.handles += [
            module.register_forward_pre_hook(pre, with_kwargs=True),
            module.register_forward_hook(post, with_kwargs=True, prepend=True),
        ]
        if path == ROOT or self.by_method["leave_module"]:
            self.handles.append(module.register_forward_hook(leave, always_call=True))

    def remove(self) -> None:
        for handles in (self.handles, self.of_leaves):
            while handles:
                handles.pop().remove()
        for hooks in self.copies:
            for number in [number for number, hook in hooks.items() if hook is _silent]:
                del hooks[number]

    def _pre(
        self, module: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        recomputed = in_backward()
        if not recomputed:
            if path == ROOT and not self.roots:
                self.calls.clear()
                self.again.clear()
                while self.of_leaves:  # hooks of the previous batch
                    self.of_leaves.pop().remove()
            self.calls[path] += 1
            if path == ROOT:  # Lightning with DDP calls the root inside of another call
                self.roots.append(self.calls[path] - 1)
        place = Place(module, path, self._call(path, recomputed), recomputed)
        new_args, new_kwargs = args, kwargs
        for subscriber in self.by_method["pre_forward_module"]:
            new_args, new_kwargs = subscriber.pre_forward_module(place, new_args, new_kwargs)
        for subscriber in self.by_method["pre_forward_tensor"]:
            change = partial(subscriber.pre_forward_tensor, place)
            new_args = mapped(new_args, "in", change)
            new_kwargs = mapped(new_kwargs, "in", change)
        return None if new_args is args and new_kwargs is kwargs else (new_args, new_kwargs)

    def _post(
        self,
        module: nn.Module,
        path: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> Any:
        recomputed = in_backward()
        place = Place(module, path, self._call(path, recomputed), recomputed)
        if recomputed:
            self.again[path] += 1
        new_output = output
        for subscriber in reversed(self.by_method["post_forward_module"]):
            new_output = subscriber.post_forward_module(place, args, new_output)
        for subscriber in reversed(self.by_method["post_forward_tensor"]):
            new_output = mapped(new_output, "out", partial(subscriber.post_forward_tensor, place))
        if any(self.by_method[name] for name in BACKWARD) and torch.is_grad_enabled():
            self._watch_backward(place, (args, kwargs), new_output)
        return None if new_output is output else new_output

    def _watch_backward(self, place: Place, inputs: Any, output: Any) -> None:
        subscribed = self.by_method

        def before() -> None:
            for subscriber in subscribed["pre_backward_module"]:
                subscriber.pre_backward_module(place)

        def after() -> None:
            for subscriber in reversed(subscribed["post_backward_module"]):
                subscriber.post_backward_module(place)

        def change(path: str, gradient: Tensor) -> Tensor:
            for subscriber in subscribed["gradient_tensor"]:
                gradient = subscriber.gradient_tensor(place, path, gradient)
            return gradient

        call = Call(before, after, change if subscribed["gradient_tensor"] else None)
        tensors = [tensor for _, tensor in tensors_in(inputs, "in")]
        self.of_leaves += call.watch(tensors, tensors_in(output, "out"))

    def _leave(self, module: nn.Module, path: str, *about: Any) -> None:
        if path == ROOT and self.roots and not in_backward():
            self.roots.pop()
        for subscriber in self.by_method["leave_module"]:
            subscriber.leave_module(module)

    def _call(self, path: str, recomputed: bool) -> int:
        """The number of the current call of a module, counted from 0 in this forward pass.

        With activation checkpointing, the backward pass calls modules again, the last one first. So
        these calls are counted down.
        """
        if path == ROOT and self.roots and not recomputed:
            return self.roots[-1]
        return max(0, self.calls[path] - 1 - (self.again[path] if recomputed else 0))


class _Hook:
    """A hook of one module, which does nothing in a deep copy of the module."""

    def __init__(self, hooks: _Hooks, module: nn.Module, path: str, method: str) -> None:
        self.hooks, self.module, self.path = hooks, module, path
        self.run = getattr(hooks, method)

    def __call__(self, module: nn.Module, *about: Any) -> Any:
        if module is not self.module:  # a copy of the module that shares these hooks
            return None
        return self.run(module, self.path, *about)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        for hooks in (self.module._forward_pre_hooks, self.module._forward_hooks):
            if id(hooks) in memo:  # the dictionary of the copy, which is being filled
                self.hooks.copies.append(memo[id(hooks)])
        return _silent

    def __reduce__(self) -> tuple[Any, ...]:
        return _silence, ()


def _silence() -> Callable[..., None]:
    return _silent


def _silent(*about: Any) -> None:
    """The hook of a copied module: does nothing."""


def in_backward() -> bool:
    """Whether this code runs in a backward pass.

    If so, a forward pass is one that activation checkpointing repeats.
    """
    return torch._C._current_graph_task_id() != -1


def tensors_in(value: Any, path: str) -> list[tuple[str, Tensor]]:
    """The tensors in a value, with their paths."""
    tensors: list[tuple[str, Tensor]] = []

    def take(where: str, tensor: Tensor) -> Tensor:
        tensors.append((where, tensor))
        return tensor

    mapped(value, path, take)
    return tensors


def mapped(value: Any, path: str, change: Callable[[str, Tensor], Tensor]) -> Any:
    """Replaces all tensors in a value by `change(path, tensor)`.

    The value itself if nothing changed.
    """
    if isinstance(value, Tensor):
        return change(path, value)
    if isinstance(value, (tuple, list)):
        items = [mapped(item, f"{path}[{number}]", change) for number, item in enumerate(value)]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, Mapping):
        values: Mapping[Any, Any] = value
    elif is_dataclass(value) and not isinstance(value, type):
        values = {field.name: getattr(value, field.name, None) for field in fields(value)}
    else:
        return value
    named = {key: mapped(item, f"{path}.{key}", change) for key, item in values.items()}
    if all(named[key] is item for key, item in values.items()):
        return value
    changed: Any = copy.copy(value)
    for key, item in named.items():
        if isinstance(value, Mapping):
            changed[key] = item
        else:
            object.__setattr__(changed, key, item)
    return changed
