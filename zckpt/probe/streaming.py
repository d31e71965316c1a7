"""Runs a model while its weights are read from the files of a checkpoint, module by module.

Before the forward pass of a module, its parameters and buffers are read from the checkpoint's
files, in any format. After the forward pass their memory is released. While a module computes, a
thread reads the weights of the next modules (`prefetch.py`). So streaming needs the memory of the
two largest modules (and of tensors in modules that contain them), not of the full model. A tied
weight stays loaded if it fits into this memory. The model may be on torch's `meta` device.
(core/passes/streaming.py is not used, because it reads all tensors in one pass.)

A weight that is not loaded is replaced by an `_Absent`. Otherwise torch would multiply a tensor on
the CPU by one on `meta` (F.linear, torch 2.13) and return arbitrary numbers, and a model that is
not on `meta` would compute with its original weights.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from math import ceil
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..core.checkpoint.entries import Entry
from ..core.checkpoint.manifest import Manifest
from ..core.checkpoint.weights import weight_of
from ..core.passes.pieces import ElementReader, ReadRequest
from ..core.storage.fileio import Reader, align, in_pages
from ..core.storage.records import RecordChecker
from ..errors import MissingData, listed
from ..formats.reading import Reading
from ..judging.contents import check_to_load
from ..naming.names import matched, plain, renamed
from ..reading import read
from ..training.options import Renames
from .compiled import is_compiled
from .prefetch import Prefetcher, WeightPart, most
from .statistics import NAMES
from .subscribers import LISTS, WHOLE, Place, Subscriber, subscribe, tensors_in, unwrapped

SCRATCH = 8 << 20  # bytes: the buffer in which small pieces of many ranks are joined
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
    accept_weights: bool = False,
) -> Iterator[None]:
    """Inside the `with` block, forward passes of `model` read their weights from `checkpoint`.

    device          the device for the weights; None: that of the model's own weights, or the CPU if
                    these are on `meta`
    whole           classes of modules that use the weights of inner modules without calling them,
                    as torch's MultiheadAttention and TransformerEncoderLayer do (always included)
    rename          pairs (regex, replacement) as in `--rename`
    accept_weights  as for `zckpt.load`

    The saved weights are used; or the rounded fp32 masters, if weights are missing or have another
    type than the model's. Weights get no gradients. CRC-32s in the files are checked.

    Raises InconsistentCheckpoint as `zckpt.load` does, and MissingData if the checkpoint lacks a
    tensor of the model. A forward pass raises MissingData if a weight is used outside of a call of
    its module. A forward pass, or the end of the block, raises CorruptCheckpoint if a checksum is
    wrong, and OSError if a file cannot be read.
    """
    if not isinstance(checkpoint, Manifest):
        checkpoint = read(checkpoint, Reading(format, tag, step_policy, opens_items=True))
    if checkpoint.files.fingerprints:  # the manifest was read from files
        check_to_load(checkpoint, None, accept_weights)
    manifest = renamed(checkpoint, rename)
    streamer = _Streamer(unwrapped(model), manifest, device, (*WHOLE, *whole))
    try:
        with subscribe(model, streamer, inside_compiled=False):
            yield
        streamer.finish()
    finally:
        streamer.close()


class _Absent(Tensor):
    """A placeholder with the shape and type of a weight that is not loaded.

    Computing with it and a tensor that has values raises MissingData.
    """

    path = "a weight"

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is Tensor.__deepcopy__:  # a copy shares the placeholder
            return args[0]
        tensors = [tensor for _, tensor in tensors_in((args, kwargs), "")]
        absent = [each for each in tensors if isinstance(each, cls)]
        if any(not isinstance(each, cls) and each.device.type != "meta" for each in tensors):
            raise MissingData(
                "option-needed",
                f"{absent[0].path} is used outside of a call of its module",
                hint="give whole=[CLASS] to stream: the class of the module that uses this weight",
                file=absent[0].path,
            )
        result = super().__torch_function__(function, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        if isinstance(result, cls) and absent:
            result.path = absent[0].path
        return result


class _Weight:
    """A weight of the model: which dictionary of its module contains it, and its original value."""

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


class _Piece(NamedTuple):
    """Elements [start, stop) of a checkpoint's tensor, to be read as type `dtype` into a buffer.

    `at` is their first byte in the buffer.
    """

    dtype: str
    entry: Entry
    start: int
    stop: int
    at: int


class _Streamer(Subscriber):
    def __init__(
        self, model: nn.Module, manifest: Manifest, device: Any, whole: tuple[type[nn.Module], ...]
    ) -> None:
        sources_ = sources(model, manifest)
        self._device = None if device is None else torch.device(device)
        self._own = {
            id(module): [_Weight(*each) for each in weights_of_module]
            for module, weights_of_module in _owned(model, whole)
            if weights_of_module
        }
        self._loaded: dict[int, int] = {}  # calls of each module that have not ended
        self._checker = RecordChecker(manifest.files.records)
        self._readers = [Reader(fingerprints=manifest.files.fingerprints) for _ in range(2)]
        self._element_readers = [  # of the program's thread and the prefetcher's
            ElementReader(reader, self._checker, SCRATCH) for reader in self._readers
        ]
        self._read: set[tuple[str, int]] = set()
        self._weights = _parts(self._own, sources_)
        parts = {module: [part for part, _ in each] for module, each in self._weights.items()}
        paths = {module: own[0].path for module, own in self._own.items()}
        self._prefetcher = Prefetcher(parts, paths, self._fill)

    def pre_forward_module(
        self, place: Place, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        key = id(place.module)
        self._loaded[key] = self._loaded.get(key, 0) + 1  # first, so that a failure below is undone
        if self._loaded[key] == 1 and key in self._own:
            values = self._prefetcher.take(key)
            for (_, weights), tensors in zip(self._weights[key], values, strict=True):
                for weight, tensor in zip(weights, tensors, strict=True):
                    weight.put(self._moved(tensor, weight.original))
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
        """Ends reading, and raises errors that no forward pass has raised.

        It first reads the remaining bytes of records (bytes with one checksum) that were read
        almost completely, to check their checksums.
        """
        self._prefetcher.finish()
        self._checker.finish(self._readers[0])

    def close(self) -> None:
        self._prefetcher.close()
        for weights in self._own.values():
            for weight in weights:
                weight.put(weight.original)
        for reader in self._readers:
            reader.close()

    def _fill(self, pieces: Sequence[_Piece], view: memoryview, ahead: bool) -> None:
        """Reads the elements of weights that are read together into the buffer `view`.

        `ahead` is True on the thread that reads for later calls.
        """
        reader = self._element_readers[ahead]
        plain = []  # neighbors are one read
        for dtype, entry, start, stop, at in pieces:
            check = (entry.name, start) not in self._read  # checks only the first read
            request = ReadRequest(entry, start, stop, at, check)
            if dtype == entry.dtype:
                plain.append(request)
            else:
                reader.read_as(dtype, request, view)
        reader.read(plain, view)
        self._read.update((piece.entry.name, piece.start) for piece in pieces)

    def _moved(self, tensor: Tensor, original: Tensor) -> Tensor:
        device = self._device or (original.device if original.device.type != "meta" else None)
        if device is None or device == tensor.device:
            return tensor
        moved = tensor.to(device)
        is_parameter = isinstance(original, nn.Parameter)
        return nn.Parameter(moved, requires_grad=False) if is_parameter else moved


def _tensor(like: Tensor, view: memoryview, at: int) -> Tensor:
    """A tensor of the shape and type of `like` whose memory is `view`, from byte `at` on.

    It keeps the view alive.
    """
    if like.numel():
        flat = torch.frombuffer(view, dtype=like.dtype, count=like.numel(), offset=at)
        tensor = flat.view(like.shape)
    else:
        tensor = torch.empty(like.shape, dtype=like.dtype)
    is_parameter = isinstance(like, nn.Parameter)
    return nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor


def _parts(
    weights_by_module: Mapping[int, Sequence[_Weight]], entries: Mapping[str, Entry]
) -> dict[int, list[tuple[WeightPart, list[_Weight]]]]:
    """Divides each module's weights into parts, whose weights are read together.

    A tied weight that stays loaded is a part by itself, which all its modules share. All other
    weights of a module are one part.
    """
    staying = _staying(list(weights_by_module.values()))
    tied: dict[int, WeightPart] = {}
    parts: dict[int, list[tuple[WeightPart, list[_Weight]]]] = {}
    for module, weights in weights_by_module.items():
        shared = [weight for weight in weights if id(weight.original) in staying]
        alone = [weight for weight in weights if id(weight.original) not in staying]
        parts[module] = [(_part(alone, entries), alone)] if alone else []
        for weight in shared:
            part = tied.setdefault(id(weight.original), _part([weight], entries, stays=True))
            parts[module].append((part, [weight]))
    return parts


def _staying(modules: Sequence[Sequence[_Weight]]) -> set[int]:
    """The ids of tied parameters that stay loaded between the calls of their modules.

    A parameter stays if streaming then needs no more memory than if none stayed.
    """

    def needed(without: set[int]) -> int:  # bytes for the two largest modules, without these
        return most(
            in_pages(
                sum(_size(each) for each in weights_of_module if id(each.original) not in without)
            )
            for weights_of_module in modules
        )

    sizes = {id(weight.original): _size(weight) for own in modules for weight in own}
    count = Counter(
        id(weight.original)
        for weights_of_module in modules
        for weight in weights_of_module
        if isinstance(weight.original, nn.Parameter)
    )
    staying: set[int] = set()
    tied = [key for key, times in count.items() if times > 1]
    for key in sorted(tied, key=sizes.__getitem__, reverse=True):
        more = {key, *staying}
        if needed(more) + sum(in_pages(sizes[each]) for each in more) <= needed(set()):
            staying = more
    return staying


def _size(weight: _Weight) -> int:
    return align(weight.original.numel() * weight.original.element_size(), ALIGNMENT)


def _part(
    weights: Sequence[_Weight], entries: Mapping[str, Entry], stays: bool = False
) -> WeightPart:
    """Makes a `WeightPart` for weights that are read together.

    Small weights form one piece. A large weight is cut between rows into several pieces, which two
    threads can read at the same time.
    """
    small: list[_Piece] = []
    pieces = [small]
    places = list(accumulate(map(_size, weights), initial=0))
    for weight, at in zip(weights, places, strict=False):
        entry, dtype = entries[weight.path], NAMES[weight.original.dtype]
        size, rows = _size(weight), entry.shape[0] if entry.shape else 1
        if size <= SCRATCH:  # ElementReader joins the slices of a whole tensor
            small.append(_Piece(dtype, entry, 0, entry.numel, at))
            continue
        row, count = entry.numel // rows, ceil(size / SCRATCH)
        bounds = sorted({rows * number // count * row for number in range(count + 1)})
        pieces += [
            [_Piece(dtype, entry, *part, at + part[0] * weight.original.element_size())]
            for part in pairwise(bounds)
        ]

    def make(view: memoryview) -> list[Tensor]:
        return [_tensor(each.original, view, at) for each, at in zip(weights, places, strict=False)]

    return WeightPart(places[-1], [each for each in pieces if each], make, stays)


def _owned(
    model: nn.Module, whole: tuple[type[nn.Module], ...]
) -> Iterator[tuple[nn.Module, list[tuple[dict[str, Any], str, str]]]]:
    """Yields each module, with the tensors that its forward pass needs.

    A tensor is given as (the module's dictionary that contains it, its name there, its path).
    """

    def tensors_of(module: nn.Module, path: str) -> Iterator[tuple[dict[str, Any], str, str]]:
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
        needed = list(tensors_of(module, path))
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
    """Maps every parameter and persistent buffer of the model to a tensor of the checkpoint.

    Raises MissingData if the checkpoint lacks one of these tensors.
    """
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
            "weights-missing",
            f"these buffers are on the meta device, but not in the checkpoint: {listed(lost)}",
            hint="create the modules of these buffers on the CPU, where the buffers get values",
        )
    parameter_names = {entry.parameter: entry.parameter for entry in manifest.entries.values()}
    owners = manifest.owners | parameter_names
    plain_owners = {plain(name) for name in owners}
    chosen: dict[int, str] = {}  # one name of each tied tensor, if possible one of the checkpoint
    for name, tensor in wanted.items():
        if id(tensor) not in chosen or plain(chosen[id(tensor)]) not in plain_owners:
            chosen[id(tensor)] = name
    names = matched(list(chosen.values()), list(owners))
    return {
        name: _source(manifest, owners[names[chosen[id(tensor)]]], name, tensor)
        for name, tensor in wanted.items()
    }


def _source(manifest: Manifest, owner: str, name: str, tensor: Tensor) -> Entry:
    """The checkpoint's tensor for a weight of the model; raises MissingData if it has none."""
    dtype = NAMES.get(tensor.dtype, "")
    entry = weight_of(manifest.entries, owner).supply("param", dtype)
    if entry.shape != tuple(tensor.shape):
        raise MissingData(
            "ranks-disagree",
            f"{name} has shape {tuple(tensor.shape)} in the model and {entry.shape} in the "
            "checkpoint",
        )
    return entry
