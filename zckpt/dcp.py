"""A storage reader of torch.distributed.checkpoint over any checkpoint: load without converting.

    reader = zckpt.dcp.StorageReader("deepspeed_run")
    torch.distributed.checkpoint.load({"model": ..., "optim": ...}, storage_reader=reader)

torch's planner asks for the keys of the state dict that is to be filled, whatever its user calls
them: `model.fc1.weight`, `app.optim.state.fc1.weight.exp_avg`, `optim.param_groups.0.lr`. So none
is listed: every key is looked up when it is asked for. To list them would also have torch take
FSDP1's state dicts for those of torch 2.3.

Each process reads the elements of its own boxes, in the order of the files, through one small
buffer; torch's `copy_` moves, casts and rounds. CRC-32 is checked of records that one process
reads whole: of partial ones no checksum is stated anywhere.
"""

from __future__ import annotations

import io
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, product
from math import prod
from typing import Any

from . import api, naming
from .dtypes import SIZES, TORCH_NAMES
from .elements import Gatherer, Ledger, Wanted
from .errors import InconsistentCheckpoint, MissingData, MissingExtra, WrongOption, ZckptError
from .errors import listed as some
from .fileio import Buffer, Reader, align, files_per_thread
from .inert import Scalar
from .manifest import Entry, Manifest, slot_name
from .naming import Rule
from .plan import WIDE
from .values import alike

try:
    import torch
    from torch.distributed.checkpoint import metadata, planner, storage
    from torch.futures import Future
except ImportError as error:
    raise MissingExtra(
        "zckpt.dcp needs torch, which is not installed", hint="pip install 'zckpt[torch]'"
    ) from error

BLOCK = 16 << 20  # bytes that are read before they are copied to where they belong
DTYPES = {
    getattr(torch, name): dtype for dtype, name in TORCH_NAMES.items() if hasattr(torch, name)
}
KEEP = "planner=DefaultLoadPlanner(allow_partial_load=True) leaves such things as they are"


class StorageReader(storage.StorageReader):
    """Reads the checkpoint at `path`, of any format, into the state dict of any torch program.

    `format`, `tag`, `step_policy` and `param_names` are those of `zckpt.read`, `rename` the pairs
    (regex, replacement) of `--rename`. A state dict of `optimizer.state_dict()` itself, whose
    parameters are numbers, needs `model` and `optimizer`, which also tell the groups of frozen
    parameters.

    A float32 weight is filled from the fp32 master where there is one; another is what the module
    held, or its master, rounded. Hyper-parameters go by parameter, not by the number of a group;
    those that the source lacks, and which parameters a group has, stay the target's.

    Raises a ZckptError: at once for the path, on loading (within torch's CheckpointException) for
    names and states that the source lacks.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        format: str | None = None,
        tag: str | None = None,
        step_policy: str | None = None,
        param_names: Sequence[str] | None = None,
        rename: Iterable[tuple[str, str]] = (),
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        self._reading: dict[str, Any] = {
            "format": format,
            "tag": tag,
            "step_policy": step_policy,
            "param_names": param_names,
        }
        self._rename = tuple(rename)
        self._groups = _groups(model, optimizer)
        self._open(path)

    def _open(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self.manifest = naming.renamed(api.read(path, **self._reading), self._rename)
        self._keys = Keys(self.manifest, self._groups)

    @property
    def checkpoint_id(self) -> str:
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        try:
            api.read(checkpoint_id)
        except ZckptError:
            return False
        return True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new load begins, of another path where one is given."""
        if checkpoint_id and os.fspath(checkpoint_id) != self.path:
            self._open(checkpoint_id)

    def read_metadata(self, *_: Any, **__: Any) -> metadata.Metadata:
        self._keys = Keys(self.manifest, self._groups)  # every load asks for its own
        return metadata.Metadata(self._keys)  # type: ignore[arg-type]  # a mapping, no dict

    def set_up_storage_reader(self, *_: Any, **__: Any) -> None:
        pass

    def prepare_local_plan(self, plan: planner.LoadPlan) -> planner.LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[planner.LoadPlan]) -> list[planner.LoadPlan]:
        return plans

    def read_data(self, plan: planner.LoadPlan, planner: planner.LoadPlanner) -> Future[None]:
        """Fills what this process asked for; nothing is changed where something is missing."""
        target = Target(self._keys, planner, plan.items)
        target.check()
        with torch.no_grad():
            target.fill_values()
            target.fill_tensors()
        done: Future[None] = Future()
        done.set_result(None)
        return done


# -- keys of a state dict


@dataclass(frozen=True, slots=True)
class Place:
    """What a key of the target's state dict stands for.

    `kind` is weight, state or group; `name` the source's parameter or buffer, empty for a whole
    group; `key` a state's or hyper-parameter's name; `front` what comes before the parameter or,
    for a group, what its keys begin with; `rule` how the name was found.
    """

    kind: str
    name: str
    key: str
    front: str
    rule: Rule


class Keys(Mapping[str, Any]):
    """Answers for every key that a planner asks for, and lists none.

    What is no tensor in the source is told as bytes, and so is what is not found: that is an error
    only once everything has been asked for and can be named together.
    """

    def __init__(self, manifest: Manifest, groups: Sequence[Sequence[str]]) -> None:
        self.manifest = manifest
        self.groups = groups  # of the target's optimizer, where it was given
        self.numbered = [name for group in groups for name in group]
        names = naming.names_of(manifest)
        self._held = naming.by_plain_name(names)
        self._leading = naming.leading(self._held)
        self._owners = {
            alias: name for name, held in manifest.parameters.items() for alias in held.aliases
        }
        self._rules: dict[Rule, None] = {}  # by which weights were found so far
        self._found: dict[str, tuple[str, Rule] | None] = {}  # names of an optimizer's parameters
        self.places: dict[str, Place | None] = {}

    def __contains__(self, key: object) -> bool:
        return True

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __bool__(self) -> bool:
        return True

    def __getitem__(self, key: str) -> metadata.STORAGE_TYPES:
        place = self.places[key] = self._place(key)
        entries = self.entries(place) if place else []
        if not entries:
            return metadata.BytesStorageMetadata()
        size = torch.Size(entries[0].shape)
        return metadata.TensorStorageMetadata(
            metadata.TensorProperties(getattr(torch, TORCH_NAMES[entries[0].dtype])),
            size,
            [metadata.ChunkStorageMetadata(torch.Size([0] * len(size)), size)],
        )

    def entries(self, place: Place) -> list[Entry]:
        """What a tensor can be filled from: of a weight, what the module held and its master."""
        if place.kind == "group":
            return []
        slots = ("param", "master") if place.kind == "weight" else (slot_name(place.key),)
        held = (self.manifest.entries.get(f"{place.name}/{slot}") for slot in slots)
        return [entry for entry in held if entry is not None]

    def _place(self, key: str) -> Place | None:
        """An optimizer's part before a weight: a module's buffer may be called `step`."""
        for found in re.finditer(r"(?:^|\.)(state|param_groups)\.", key):
            front, rest = key[: found.end()], key[found.end() :]
            name, _, last = rest.rpartition(".")
            if found[1] == "param_groups" and name.isdecimal():
                return Place("group", "", last, f"{front}{name}.", Rule("", ""))
            owner = self.parameter(name)
            if owner is not None and owner[0] in self.manifest.parameters:
                kind = "state" if found[1] == "state" else "group"
                return Place(kind, owner[0], last, front, owner[1])
        own = naming.plain(key)
        cuts = ["", *(own[: found.end()] for found in re.finditer(r"\.", own))]
        rules = (Rule(*rule) for rule in product(cuts, self._leading))
        weight = self._lookup(own, chain(tuple(self._rules), rules))
        if weight is None:
            return None
        self._rules[weight[1]] = None
        return Place("weight", weight[0], "", "", weight[1])

    def parameter(self, name: str | int) -> tuple[str, Rule] | None:
        """The source's name of an optimizer's parameter, and how it was found."""
        if isinstance(name, int) or (name.isdecimal() and name not in self._held):
            number = int(name)
            if number >= len(self.numbered):
                return None
            name = self.numbered[number]
        if name not in self._found:  # each has a dozen hyper-parameters
            own = naming.plain(name)
            rules = product(naming.leading([own]), self._leading)
            self._found[name] = self._lookup(own, (Rule(*rule) for rule in rules))
        return self._found[name]

    def _lookup(self, name: str, rules: Iterable[Rule]) -> tuple[str, Rule] | None:
        """The source's name by the first rule that fits; a tied weight's is its owner's."""
        for rule in rules:
            there = rule.there(name)
            held = None if there is None else self._held.get(there)
            if held is not None:
                return self._owners.get(held, held), rule
        return None

    def unused(self) -> list[str]:
        """Names of the source that nothing asked for."""
        asked = {place.name for place in self.places.values() if place}
        held = (*self.manifest.parameters, *self.manifest.buffers)
        return [name for name in held if name not in asked]


def _groups(
    model: torch.nn.Module | None, optimizer: torch.optim.Optimizer | None
) -> list[list[str]]:
    """Names of the parameters in an optimizer's groups; its state dict numbers them in order."""
    if (model is None) != (optimizer is None):
        raise WrongOption("model and optimizer are given together, or neither")
    if model is None or optimizer is None:
        return []
    names = {id(held): name for name, held in model.named_parameters()}
    return [
        [names.get(id(held), "") for held in group["params"]] for group in optimizer.param_groups
    ]


# -- filling


@dataclass(frozen=True, slots=True, eq=False)
class Box:
    """Elements [offset, offset + size) along each axis of an entry, and the tensor they go to."""

    entry: Entry
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    target: torch.Tensor

    @property
    def numel(self) -> int:
        return prod(self.sizes)

    @property
    def inner(self) -> int:
        """The first axis from which on everything is wanted."""
        axis = len(self.sizes)
        while axis and self.sizes[axis - 1] == self.entry.shape[axis - 1]:
            axis -= 1
        return axis

    def runs(self) -> Iterator[tuple[int, int]]:
        """The runs [start, stop) of row-major elements of the entry, in order."""
        shape, axis = self.entry.shape, max(self.inner - 1, 0)
        strides = [prod(shape[place + 1 :]) for place in range(len(shape))]
        length = prod(self.sizes[axis:])
        ends = zip(self.offsets[:axis], self.sizes[:axis], strict=True)
        for place in product(*(range(offset, offset + size) for offset, size in ends)):
            at = (*place, *self.offsets[axis:])
            start = sum(here * stride for here, stride in zip(at, strides, strict=True))
            yield start, start + length

    def cut(self, most: int) -> Iterator[Box]:
        """Boxes of at most `most` elements, along the first axis that has more than one."""
        if self.numel <= most:
            yield self
            return
        axis = next(place for place, size in enumerate(self.sizes) if size > 1)
        step = max(1, most * self.sizes[axis] // self.numel)
        for start in range(0, self.sizes[axis], step):
            count = min(step, self.sizes[axis] - start)
            offsets, sizes = list(self.offsets), list(self.sizes)
            offsets[axis] += start
            sizes[axis] = count
            part = self.target.narrow(axis, start, count)
            yield from Box(self.entry, tuple(offsets), tuple(sizes), part).cut(most)

    def position(self) -> tuple[str, int]:
        """Where its first element lies."""
        start, stop = next(self.runs())
        for fragment in self.entry.fragments.overlapping(start, stop):
            size = SIZES[self.entry.dtype]
            inside = 0 if fragment.count > 1 else max(0, start - fragment.start) * size
            return fragment.extent.file, fragment.extent.offset + inside
        return "", 0


class Target:
    """The state dict that is filled, as far as this process holds it."""

    def __init__(
        self, keys: Keys, planner: planner.LoadPlanner, items: Sequence[planner.ReadItem]
    ) -> None:
        self.keys = keys
        self.manifest = keys.manifest
        self.planner = planner
        # planners other than torch's own may not have it; then nothing of the target is known
        self.held: Mapping[str, Any] = getattr(planner, "state_dict", {})
        self.partial = bool(getattr(planner, "allow_partial_load", False))
        self.tensors = [item for item in items if item.type != BYTES]
        self.others = [item for item in items if item.type == BYTES]
        self._known: dict[str, dict[int, str]] = {}

    def check(self) -> None:
        """Raises MissingData, which names all that the source lacks."""
        places = self.keys.places
        unknown = [key for key, place in places.items() if place is None]
        asked = {item.dest_index.fqn for item in (*self.tensors, *self.others)}
        numbers = [key for key in unknown if re.search(r"(?:^|\.)state\.\d+\.[^.]+$", key)]
        if numbers and not self.keys.numbered:
            raise MissingData(
                f"the state dict numbers its parameters ({some(numbers, 3)}): give "
                "StorageReader(..., model=model, optimizer=optimizer), or use "
                "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict"
            )
        if unknown and not self.partial:
            told = naming.left_over(unknown, self.keys.unused())
            raise MissingData(f"{told}. rename=[(REGEX, REPL)] renames the source's; {KEEP}")
        for kind in ("weight", "state"):
            rules = {
                (place.front, place.rule): key
                for key, place in places.items()
                if place is not None and place.kind == kind
            }
            if len(rules) > 1:
                raise MissingData(
                    f"the keys {some(list(rules.values()))} name what the source holds in "
                    "different ways: load what they belong to one by one, or rename="
                )
        lacking = [key for key in asked if (place := places.get(key)) and self._lacks(key, place)]
        if lacking and not self.partial:
            raise MissingData(
                f"{self.manifest.root} holds no {some(sorted(map(self._told, lacking)))}: leave it "
                f"out of the state dict, or {KEEP}"
            )

    def _told(self, key: str) -> str:
        place = self.keys.places[key]
        assert place is not None
        return f"{place.key or 'weights'} of {place.name}"

    def _lacks(self, key: str, place: Place) -> bool:
        """Whether a weight or state is neither a tensor nor a number of the source."""
        if place.kind == "group" or self.keys.entries(place):
            return False
        if place.kind == "weight":
            return True
        empty = key in self.held and self.held[key] is None  # SGD without momentum
        return self._number(place) is None and not empty

    def _number(self, place: Place) -> Scalar | None:
        """A 0-d state."""
        held = self.manifest.parameters[place.name]
        if place.key == "step":
            return None if held.step is None else Scalar(float(held.step), "F32")
        return held.scalars.get(place.key)

    # -- what is no tensor in the source

    def fill_values(self) -> None:
        """Steps, 0-d states and hyper-parameters."""
        groups = self.manifest.groups or ()
        values: list[tuple[planner.ReadItem, Any]] = []
        kept: dict[str, None] = {}
        for item in self.others:
            key = item.dest_index.fqn
            place = self.keys.places[key]
            if place is None or place.key == "params":
                continue  # which parameters a group has is the target's
            if place.kind == "state":
                number = self._number(place)
                if number is not None:
                    values.append((item, number))
                continue
            members = self._members(place)
            told = [
                (name, groups[number][place.key])
                for number, name in members.items()
                if number < len(groups) and place.key in groups[number]
            ]
            if told:
                values.append((item, self._agreed(told, place)))
            elif members or not groups:
                kept[place.key] = None
        for item, value in values:
            self._put(item, value)
        if kept:
            warnings.warn(
                f"{self.manifest.root} does not hold the hyper-parameters {some(list(kept))}: they "
                "stay as they are",
                stacklevel=2,
            )

    def _agreed(self, told: Sequence[tuple[str, Any]], place: Place) -> Any:
        """The value that the source's groups have, of each of which one parameter is named."""
        (first, value), *others = told
        for name, other in others:
            if not alike(plain(value), plain(other)):
                group = f"one group of the target holds {first} and {name}"
                way_out = "build the optimizer with the source's groups"
                if place.name:
                    group = f"the frozen {place.name} may be in the group of {first} or of {name}"
                    way_out = "leave it out of the optimizer, or give model= and optimizer="
                raise InconsistentCheckpoint(
                    f"{group}, whose {place.key} differ in the source ({plain(value)} and "
                    f"{plain(other)}): {way_out}"
                )
        return value

    def _members(self, place: Place) -> dict[int, str]:
        """The source's groups that the target's group is of, with one parameter of each."""
        own = self.manifest.parameters.get(place.name)
        if own is not None and own.group is not None:
            return {own.group: place.name}
        known = place.name or place.front
        if known not in self._known:
            held = self.manifest.parameters
            groups = ((held[name].group, name) for name in self._companions(place) if name in held)
            self._known[known] = {n: name for n, name in groups if n is not None}
        return self._known[known]

    def _companions(self, place: Place) -> Sequence[str]:
        """Names of what is in one group with a parameter, or in the group of a number.

        torch takes a flattened group's values from its first parameter, which may be frozen: no
        file tells its group. Without the optimizer, what has the same values now may be it.
        """
        if place.name:
            for group in map(self._names, self.keys.groups):
                if place.name in group:
                    return group
            return next(group for group in self._alike if place.name in group)
        return self._names(self.held.get(f"{place.front}params") or ())

    def _names(self, listed: Iterable[str | int]) -> list[str]:
        return [pair[0] for pair in map(self.keys.parameter, listed) if pair is not None]

    @cached_property
    def _alike(self) -> list[list[str]]:
        """Parameters of a flattened optimizer by equal hyper-parameters, as the target has them."""
        values: dict[str, dict[str, str]] = {}
        for item in self.others:
            place = self.keys.places[item.dest_index.fqn]
            if place is not None and place.kind == "group" and place.name:
                value = repr(self.held.get(item.dest_index.fqn))
                values.setdefault(place.name, {})[place.key] = value
        groups: dict[tuple[tuple[str, str], ...], list[str]] = {}
        for name, hyper in values.items():
            groups.setdefault(tuple(sorted(hyper.items())), []).append(name)
        return list(groups.values())

    def _put(self, item: planner.ReadItem, value: Any) -> None:
        """A value in the type that the target has for it: a tensor is filled in place."""
        held = self.held.get(item.dest_index.fqn)
        number = value.value if isinstance(value, Scalar) else value
        if isinstance(held, torch.Tensor):
            getattr(held, "_local_tensor", held).fill_(number)
            return
        if isinstance(value, Scalar):
            if isinstance(held, (int, float)):
                value = type(held)(number)
            else:
                value = torch.tensor(number, dtype=getattr(torch, TORCH_NAMES[value.dtype]))
        buffer = io.BytesIO()
        torch.save(value, buffer)
        buffer.seek(0)
        self.planner.load_bytes(item, buffer)

    # -- tensors

    def fill_tensors(self) -> None:
        """Reads this process's boxes, many small ones together, in the order of the files."""
        targets = [(item, self.planner.resolve_tensor(item).detach()) for item in self.tensors]
        most = BLOCK // 8
        boxes = [part for box in self._boxes(targets) for part in box.cut(most)]
        boxes.sort(key=Box.position)
        reader = Reader(files_per_thread(1))
        gatherer = Gatherer(reader, Ledger(self.manifest.records), BLOCK)
        buffer = Buffer(BLOCK)
        try:
            for batch in _batches(boxes):
                wanted = [item for box, at in batch for item in _wanted(box, at)]
                gatherer.gather(wanted, buffer.view)
                for box, at in batch:
                    dtype = getattr(torch, TORCH_NAMES[box.entry.dtype])
                    block = torch.frombuffer(buffer.view, dtype=dtype, count=box.numel, offset=at)
                    box.target.copy_(block.view(box.sizes))
        finally:
            reader.close()
        for item, tensor in targets:
            self.planner.commit_tensor(item, tensor)

    def _boxes(self, targets: Iterable[tuple[planner.ReadItem, torch.Tensor]]) -> Iterator[Box]:
        """What is to be read; one memory under two names, as of a tied weight, is filled once."""
        seen = set()
        rounded: dict[str, None] = {}
        for item, tensor in targets:
            place = self.keys.places[item.dest_index.fqn]
            assert place is not None
            entry = self._entry(place, tensor)
            held = self.manifest.parameters.get(place.name)
            trained = place.kind == "weight" and held is not None and held.trainable
            if trained and entry.dtype not in WIDE and DTYPES.get(tensor.dtype) in WIDE:
                rounded[entry.dtype] = None
            box = Box(entry, tuple(item.storage_offsets), tuple(item.lengths), tensor)
            memory = tensor.data_ptr(), tensor.stride(), tensor.dtype, tensor.device
            key = entry.name, box.offsets, box.sizes, memory
            if box.numel and key not in seen:
                seen.add(key)
                yield box
        if rounded:
            warnings.warn(
                f"{self.manifest.root} holds no fp32 masters: float32 tensors are made of "
                f"{some(list(rounded))}",
                stacklevel=2,
            )

    def _entry(self, place: Place, tensor: torch.Tensor) -> Entry:
        """The master for a wide weight; else what has its type, or the master, to be rounded."""
        found = self.keys.entries(place)
        dtype = DTYPES.get(tensor.dtype)
        if dtype not in WIDE:
            for entry in found:
                if entry.dtype == dtype:
                    return entry
        return found[-1]


BYTES = planner.LoadItemType.BYTE_IO


def plain(value: Any) -> Any:
    return value.value if isinstance(value, Scalar) else value


def _wanted(box: Box, at: int) -> Iterator[Wanted]:
    size = SIZES[box.entry.dtype]
    whole = box.inner <= 1  # of many small runs a record's checksum would be patchwork
    for start, stop in box.runs():
        yield Wanted(box.entry, start, stop, at, whole)
        at += (stop - start) * size


def _batches(boxes: Iterable[Box]) -> Iterator[list[tuple[Box, int]]]:
    """Boxes that fit into one buffer, with the byte at which each begins."""
    batch: list[tuple[Box, int]] = []
    end = 0
    for box in boxes:
        size = SIZES[box.entry.dtype]
        at = align(end, size)
        if at + box.numel * size > BLOCK:
            yield batch
            batch, at = [], 0
        batch.append((box, at))
        end = at + box.numel * size
    if batch:
        yield batch
