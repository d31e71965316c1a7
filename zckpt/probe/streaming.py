"""Runs a model's forward with weights that stay in a checkpoint's files, of any format.

Before a module's forward its own parameters and buffers are read, through the manifest, from the
files that have their elements; after it their memory is released. While a module computes, a thread
reads the weights of the next one (`prefetch.py`). So the needed memory is that of two modules (and
of the tensors of the modules around them), not that of the model. The model may be on torch's
`meta` device. The model's forward asks for the tensors, one module at a time: so this is not a pass
of core/streaming.py over all of them.

A tensor that is not loaded is replaced by an `_Absent`. Otherwise torch would multiply a tensor on
the CPU by one on `meta` (F.linear, torch 2.13) and return arbitrary numbers, and a model that is
not on `meta` would compute with its own weights.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from .. import api
from ..core.fileio import Reader, align
from ..core.manifest import Entry, Manifest
from ..core.pieces import ElementReader, ReadRequest, RecordChecker
from ..core.weights import weight_of
from ..errors import MissingData, listed
from ..training.names import Renames, matched, plain, renamed
from .compiled import is_compiled
from .prefetch import Prefetcher
from .statistics import NAMES
from .subscribers import LISTS, WHOLE, Place, Subscriber, subscribe, unwrapped

SCRATCH = 8 << 20  # bytes; small pieces of many ranks are joined there
ALIGNMENT = 64  # bytes, as torch allocates tensors: the order of additions can depend on it


@contextmanager
def stream(
    model: nn.Module,
    checkpoint: str | os.PathLike[str] | Manifest,
    *,
    device: str | torch.device | None = None,
    whole: Collection[type[nn.Module]] = (),
    format: str | None = None,
    tag: str | None = None,
    step_policy: str | None = None,
    rename: Renames = (),
) -> Iterator[None]:
    """Within the block, forwards of `model` take their weights from `checkpoint`.

    Weights are the values that the module had when it was saved (slot `param`). If these are
    missing or have another type than the model's, weights are the masters, rounded. They are put on
    `device`; the default is the device of the model's own weight, or the CPU if that is on `meta`.
    Modules of the classes `whole`, and torch's own that need it, are loaded with all modules below
    them. `rename` are pairs (regex, replacement) as in `--rename`. Weights get no gradients. The
    CRC-32 of records is checked.

    Raises MissingData, which lists names of both sides, if the checkpoint lacks a tensor of the
    model. A forward raises it if a weight is used while its module is not called, for example an
    embedding's weight in an output layer. A forward, or the end of the block, raises
    CorruptCheckpoint if bytes contradict their file, and OSError if a file cannot be read.
    """
    manifest = (
        checkpoint
        if isinstance(checkpoint, Manifest)
        else api.read(checkpoint, format=format, tag=tag, step_policy=step_policy)
    )
    manifest = renamed(manifest, rename)
    streamer = _Streamer(unwrapped(model), manifest, device, (*WHOLE, *whole))
    try:
        with subscribe(model, streamer, inside_compiled=False):
            yield
        streamer.finish()
    finally:
        streamer.close()


class _Absent(Tensor):
    """Shape and type of a weight that is not loaded; using it with numbers raises MissingData."""

    path = "a weight"

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is Tensor.__deepcopy__:  # called with copies that were made before
            return args[0]
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        absent = [each for each in given if isinstance(each, cls)]
        if any(not isinstance(each, cls) and each.device.type != "meta" for each in given):
            raise MissingData(
                f"{absent[0].path} is used while its module is not called",
                hint="give whole=[CLASS], with the class of the module that uses it",
            )
        result = super().__torch_function__(function, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        if isinstance(result, cls) and absent:
            result.path = absent[0].path
        return result


class _Weight:
    """A tensor of the model: its dictionary in the module, and its value outside of forwards."""

    def __init__(self, tensors: dict[str, Any], name: str, path: str) -> None:
        self.tensors, self.name, self.path = tensors, name, path
        self.original: Tensor = tensors[name]
        meta = torch.empty(self.original.shape, dtype=self.original.dtype, device="meta")
        self.absent: Any = meta.as_subclass(_Absent)
        self.absent.path = path
        self.absent._is_param = isinstance(self.original, nn.Parameter)
        self.put(self.absent)

    def put(self, tensor: Tensor) -> None:
        self.tensors[self.name] = tensor


class _Streamer(Subscriber):
    def __init__(
        self, model: nn.Module, manifest: Manifest, device: Any, whole: tuple[type[nn.Module], ...]
    ) -> None:
        self._sources = sources(model, manifest)
        self._device = None if device is None else torch.device(device)
        self._own = {
            id(module): [_Weight(*each) for each in own]
            for module, own in _owned(model, whole)
            if own
        }
        self._loaded: dict[int, int] = {}  # calls of each module that have not ended
        self._reader = Reader(fingerprints=manifest.fingerprints)
        self._element_reader = ElementReader(self._reader, RecordChecker(manifest.records), SCRATCH)
        self._read: set[str] = set()
        self._places = {module: _places(own) for module, own in self._own.items()}
        sizes = {module: places[-1] for module, places in self._places.items()}
        paths = {module: own[0].path for module, own in self._own.items()}
        self._prefetcher = Prefetcher(sizes, paths, self._fill)

    def pre_forward_module(
        self, place: Place, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        key = id(place.module)
        self._loaded[key] = self._loaded.get(key, 0) + 1  # first, so that a failure below is undone
        if self._loaded[key] == 1 and key in self._own:
            view = self._prefetcher.take(key)
            for weight, at in zip(self._own[key], self._places[key], strict=False):
                weight.put(self._tensor(weight.original, view, at))
        return args, kwargs

    def leave_module(self, module: nn.Module) -> None:
        key = id(module)
        calls = self._loaded.pop(key, 1) - 1  # none if a hook of the program failed before this one
        if calls:
            self._loaded[key] = calls
            return
        for weight in self._own.get(key, ()):
            weight.put(weight.absent)

    def finish(self) -> None:
        """Raises errors that no forward raised, after reading the bytes between the tensors of
        records that were read almost whole."""
        self._prefetcher.finish()
        self._element_reader.checker.finish(self._reader)

    def close(self) -> None:
        self._prefetcher.close()
        for own in self._own.values():
            for weight in own:
                weight.put(weight.original)
        self._reader.close()

    def _fill(self, key: int, view: memoryview) -> None:
        """Reads the weights of a module; runs on the prefetcher's thread."""
        for weight, at in zip(self._own[key], self._places[key], strict=False):
            entry = self._sources[weight.path]
            check = entry.name not in self._read  # a tensor that is read again counts once
            request = ReadRequest(entry, 0, entry.numel, at, check)
            self._element_reader.read_as(NAMES[weight.original.dtype], request, view)
            self._read.add(entry.name)

    def _tensor(self, like: Tensor, view: memoryview, at: int) -> Tensor:
        """The weight whose bytes begin at byte `at`; it keeps the view alive."""
        if like.numel():
            flat = torch.frombuffer(view, dtype=like.dtype, count=like.numel(), offset=at)
            tensor = flat.view(like.shape)
        else:
            tensor = torch.empty(like.shape, dtype=like.dtype)
        device = self._device or (like.device if like.device.type != "meta" else None)
        tensor = tensor if device is None else tensor.to(device)
        is_parameter = isinstance(like, nn.Parameter)
        return nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor


def _places(own: Sequence[_Weight]) -> list[int]:
    """The byte at which each weight of a module begins, as torch aligns tensors; their end."""
    sizes = [weight.original.numel() * weight.original.element_size() for weight in own]
    return list(accumulate((align(size, ALIGNMENT) for size in sizes), initial=0))


def _owned(
    model: nn.Module, whole: tuple[type[nn.Module], ...]
) -> Iterator[tuple[nn.Module, list[tuple[dict[str, Any], str, str]]]]:
    """Each module with the tensors that it needs: dictionary, name in it, and path of each."""

    def own(module: nn.Module, path: str) -> Iterator[tuple[dict[str, Any], str, str]]:
        persistent = set(module._buffers) - module._non_persistent_buffers_set
        for tensors, names in (
            (module._parameters, module._parameters),
            (module._buffers, persistent),
        ):
            for name in names:
                if tensors[name] is not None:
                    yield tensors, name, f"{path}.{name}" if path else name

    def below(module: nn.Module, path: str, seen: set[int]) -> Iterator[Any]:
        if id(module) in seen:
            return
        seen.add(id(module))
        needed = list(own(module, path))
        children = [
            (child, f"{path}.{name}" if path else name) for name, child in module.named_children()
        ]
        everything = isinstance(module, whole) or is_compiled(module)
        for child, at in children:
            if everything or isinstance(child, LISTS):
                for _, more in below(child, at, seen):
                    needed += more
        yield module, needed
        for child, at in children:
            yield from below(child, at, seen)

    yield from below(model, "", set())


def sources(model: nn.Module, manifest: Manifest) -> dict[str, Entry]:
    """The entry of every parameter and persistent buffer; raises MissingData."""
    wanted: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    lost = []
    for path, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module.named_buffers(recurse=False):
            whole = f"{path}.{name}" if path else name
            if name not in module._non_persistent_buffers_set:
                wanted[whole] = buffer
            elif buffer.device.type == "meta":
                lost.append(whole)
    if lost:
        raise MissingData(
            f"these buffers are on the meta device, and no checkpoint has them: {listed(lost)}",
            hint="create the modules that compute them on the CPU",
        )
    owners = {name: name for name in {entry.parameter for entry in manifest.entries.values()}}
    for owner, parameter in manifest.parameters.items():
        owners |= {alias: owner for alias in parameter.aliases if alias not in owners}
    known = {plain(name) for name in owners}
    chosen: dict[int, str] = {}  # one name of each tied tensor, if possible one of the checkpoint
    for name, tensor in wanted.items():
        if id(tensor) not in chosen or plain(chosen[id(tensor)]) not in known:
            chosen[id(tensor)] = name
    names = matched(list(chosen.values()), list(owners))
    return {
        name: _source(manifest, owners[names[chosen[id(tensor)]]], name, tensor)
        for name, tensor in wanted.items()
    }


def _source(manifest: Manifest, owner: str, name: str, tensor: Tensor) -> Entry:
    """The entry that supplies a weight of the model; raises MissingData."""
    dtype = NAMES.get(tensor.dtype, "")
    entry = weight_of(manifest.entries, owner).supply("param", dtype)
    if entry.shape != tuple(tensor.shape):
        raise MissingData(
            f"{name} has shape {tuple(tensor.shape)} in the model and {entry.shape} in the "
            "checkpoint"
        )
    return entry
