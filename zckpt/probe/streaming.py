"""A forward of a model whose weights stay in a checkpoint's files, of any format.

Before a module's forward its own parameters and buffers are read, through the manifest, from
wherever their elements lie; after it they are let go. So memory is that of the largest module (and
of what the modules around it own), not of the model, which may be on torch's `meta` device.

In place of what is not read there is an `_Absent`: torch multiplies a tensor on the CPU by one on
`meta` (F.linear, torch 2.13) and gives numbers from anywhere, and a model that is not on `meta`
would go on with weights of its own.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from .. import api
from ..core.cast import cast
from ..core.dtypes import SIZES
from ..core.fileio import Reader
from ..core.manifest import Entry, Manifest
from ..core.pieces import CAST_BLOCK, ElementReader, ReadRequest, RecordChecker
from ..errors import MissingData, listed
from ..training.names import Renames, matched, plain, renamed
from .statistics import NAMES, raw
from .subscribers import LISTS, WHOLE, Place, Subscriber, is_compiled, subscribe, unwrapped

SCRATCH = 8 << 20  # bytes, in which small pieces of many ranks are put together


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

    Weights are what the module held when it was saved (slot `param`); or, where that is missing or
    of another type than the model's, the masters, rounded. They are put on `device`, by default
    where the model's own are, or on the CPU for those on `meta`. Modules of the classes `whole`,
    and those of torch that need it, are loaded with all that is below them. `rename` are the pairs
    (regex, replacement) of `--rename`. Weights get no gradients. CRC-32 of records are checked.

    Raises MissingData, which lists names of both sides, where the checkpoint lacks a tensor of the
    model; and within a forward, where a weight is used while its module is not called, as an
    embedding's in an output layer. CorruptCheckpoint, within a forward or as the block ends, where
    bytes are not what their file states.
    """
    manifest = (
        checkpoint
        if isinstance(checkpoint, Manifest)
        else api.read(checkpoint, format=format, tag=tag, step_policy=step_policy)
    )
    manifest = renamed(manifest, rename)
    streamer = _Streamer(unwrapped(model), manifest, device, (*WHOLE, *whole))
    try:
        with subscribe(model, streamer):
            yield
        streamer.finish()
    finally:
        streamer.close()


class _Absent(Tensor):
    """Shape and type of a weight that is not read now. Meeting numbers raises MissingData."""

    path = "a weight"

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is Tensor.__deepcopy__:  # which is given what was copied before
            return args[0]
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        absent = [each for each in given if isinstance(each, cls)]
        if any(not isinstance(each, cls) and each.device.type != "meta" for each in given):
            raise MissingData(
                f"{absent[0].path} is used while its module is not called",
                hint="name the class of the module that uses it in whole=",
            )
        made = super().__torch_function__(function, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        if isinstance(made, cls) and absent:
            made.path = absent[0].path
        return made


class _Weight:
    """A tensor of the model: where it is kept, and what is there outside of forwards."""

    def __init__(self, held: dict[str, Any], name: str, path: str) -> None:
        self.held, self.name, self.path = held, name, path
        self.original: Tensor = held[name]
        meta = torch.empty(self.original.shape, dtype=self.original.dtype, device="meta")
        self.absent: Any = meta.as_subclass(_Absent)
        self.absent.path = path
        self.absent._is_param = isinstance(self.original, nn.Parameter)
        self.put(self.absent)

    def put(self, tensor: Tensor) -> None:
        self.held[self.name] = tensor


class _Streamer(Subscriber):
    def __init__(
        self, model: nn.Module, manifest: Manifest, device: Any, whole: tuple[type[nn.Module], ...]
    ) -> None:
        self._sources = sources(model, manifest)
        self._device = None if device is None else torch.device(device)
        self._own = {
            id(module): [_Weight(*each) for each in own] for module, own in _owned(model, whole)
        }
        self._loaded: dict[int, int] = {}  # calls of each module that have not returned
        self._reader = Reader()
        self._gatherer = ElementReader(self._reader, RecordChecker(manifest.records), SCRATCH)
        self._read: set[str] = set()

    def pre_forward_module(
        self, place: Place, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        key = id(place.module)
        self._loaded[key] = self._loaded.get(key, 0) + 1  # so that a failure below is undone
        if self._loaded[key] == 1:
            for weight in self._own.get(key, ()):
                weight.put(self._load(self._sources[weight.path], weight.original))
        return args, kwargs

    def post_forward_module(self, place: Place, args: tuple[Any, ...], output: Any) -> Any:
        key = id(place.module)
        self._loaded[key] -= 1
        if not self._loaded[key]:
            self._release(key)
        return output

    def _release(self, key: int) -> None:
        del self._loaded[key]
        for weight in self._own.get(key, ()):
            weight.put(weight.absent)

    def finish(self) -> None:
        """Checks records of which little was not read: what lies between tensors."""
        self._gatherer.checker.finish(self._reader)

    def close(self) -> None:
        for own in self._own.values():
            for weight in own:
                weight.put(weight.original)
        self._reader.close()

    def _load(self, entry: Entry, like: Tensor) -> Tensor:
        made = torch.empty(entry.shape, dtype=like.dtype)
        self._fill(entry, raw(made), NAMES[like.dtype])
        self._read.add(entry.name)
        device = self._device or (like.device if like.device.type != "meta" else None)
        made = made if device is None else made.to(device)
        is_parameter = isinstance(like, nn.Parameter)
        return nn.Parameter(made, requires_grad=False) if is_parameter else made

    def _fill(self, entry: Entry, view: memoryview, dtype: str) -> None:
        check = entry.name not in self._read  # what is read again counts once
        if dtype == entry.dtype:
            self._gatherer.read([ReadRequest(entry, 0, entry.numel, 0, check)], view)
            return
        size, into = SIZES[entry.dtype], SIZES[dtype]
        for start in range(0, entry.numel, CAST_BLOCK):
            stop = min(start + CAST_BLOCK, entry.numel)
            block = self._gatherer.block()[: (stop - start) * size]
            self._gatherer.read([ReadRequest(entry, start, stop, 0, check)], block)
            cast(block, entry.dtype, view[start * into : stop * into], dtype)


def _owned(
    model: nn.Module, whole: tuple[type[nn.Module], ...]
) -> Iterator[tuple[nn.Module, list[tuple[dict[str, Any], str, str]]]]:
    """Each module with the tensors that it needs: where it keeps each, by which name, its path."""

    def own(module: nn.Module, path: str) -> Iterator[tuple[dict[str, Any], str, str]]:
        persistent = set(module._buffers) - module._non_persistent_buffers_set
        for held, names in (
            (module._parameters, module._parameters),
            (module._buffers, persistent),
        ):
            for name in names:
                if held[name] is not None:
                    yield held, name, f"{path}.{name}" if path else name

    def below(module: nn.Module, path: str, seen: set[int]) -> Iterator[Any]:
        if id(module) in seen:
            return
        seen.add(id(module))
        held = list(own(module, path))
        children = [
            (child, f"{path}.{name}" if path else name) for name, child in module.named_children()
        ]
        everything = isinstance(module, whole) or is_compiled(module)
        for child, at in children:
            if everything or isinstance(child, LISTS):
                for _, more in below(child, at, seen):
                    held += more
        yield module, held
        for child, at in children:
            yield from below(child, at, seen)

    yield from below(model, "", set())


def sources(model: nn.Module, manifest: Manifest) -> dict[str, Entry]:
    """The entry of every parameter and persistent buffer; raises MissingData."""
    wanted: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    lost = []
    for path, module in model.named_modules(remove_duplicate=False):
        for name, held in module.named_buffers(recurse=False):
            whole = f"{path}.{name}" if path else name
            if name not in module._non_persistent_buffers_set:
                wanted[whole] = held
            elif held.device.type == "meta":
                lost.append(whole)
    if lost:
        raise MissingData(
            f"buffers that no checkpoint holds are on meta: {listed(lost)}",
            hint="make the modules that compute them on the CPU",
        )
    owners = {name: name for name in {entry.parameter for entry in manifest.entries.values()}}
    for owner, parameter in manifest.parameters.items():
        owners |= {alias: owner for alias in parameter.aliases if alias not in owners}
    known = {plain(name) for name in owners}
    asked: dict[int, str] = {}  # one name of each tied tensor, if possible one that is held
    for name, held in wanted.items():
        if id(held) not in asked or plain(asked[id(held)]) not in known:
            asked[id(held)] = name
    found = matched(list(asked.values()), list(owners))
    return {
        name: _source(manifest, owners[found[asked[id(held)]]], name, held)
        for name, held in wanted.items()
    }


def _source(manifest: Manifest, owner: str, name: str, held: Tensor) -> Entry:
    """The weight itself, or the master that it is to be rounded from."""
    dtype = NAMES.get(held.dtype)
    entry = manifest.entries.get(f"{owner}/param")
    if entry is None or entry.dtype != dtype:
        entry = manifest.entries.get(f"{owner}/master", entry)
    if entry is None:
        raise MissingData(f"{manifest.root} holds states of {owner}, but no weight")
    if entry.shape != tuple(held.shape):
        raise MissingData(f"{name} has shape {tuple(held.shape)}, in the checkpoint {entry.shape}")
    return entry
