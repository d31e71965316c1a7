"""What ranks saved with torch.save, each its part, as one tree: ShardedTensor and DTensor.

    ShardedTensor    offsets, sizes, rank and world size stand in each pickle (FSDP1)
    DTensor          the local tensor, the whole shape, a mesh and its placements (FSDP2)

torch loads such files at the world size that wrote them alone. Of a DTensor the part is computed:
`Shard(d)` gives the k-th of n ranks elements [k * c, (k + 1) * c) along axis d, c = ceil(size / n);
`Replicate` gives all. What is no such tensor should be the same on every rank; what is not (random
states, data loaders) is told, and rank 0's is kept.
"""

from __future__ import annotations

import zlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from ...core.dtypes import SIZES
from ...core.inert import Foreign, Global, Scalar, map_values, to_json
from ...errors import (
    CorruptCheckpoint,
    IncompleteCheckpoint,
    InconsistentCheckpoint,
    UnsupportedCheckpoint,
    listed,
)
from ...files.torchfile import TORCH_DTYPES, Tensor, TorchFile
from ...training import steps
from ...training.options import MAX_DP
from ..statedict.tree import Leaf, Path, Piece, assembled, dotted, identities, leaf, leaves

REBUILD = "torch._tensor._rebuild_from_type_v2"
MIXED = "files of different saves seem to be mixed; take those of one save"
MALFORMED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What reading a record of another kind than torch pickles may raise."""


@dataclass(frozen=True, slots=True)
class Part:
    """Elements [offset, offset + size) along every axis, which `tensor` holds in `file`."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    tensor: Tensor
    file: TorchFile


@dataclass(frozen=True, slots=True)
class Sharded:
    """A tensor of which one rank saved `parts`; `world` ranks have them all."""

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    world: int


@dataclass(slots=True)
class Merged:
    """One tree of all ranks' files; `left_out` says what of it is rank 0's alone."""

    tree: Any
    left_out: list[str] = field(default_factory=list)


def is_sharded(value: Any) -> bool:
    """Whether it is a record of a ShardedTensor or a DTensor."""
    return isinstance(value, Foreign) and value.name == REBUILD


def sharded_in(value: Any) -> Iterator[Foreign]:
    """The ShardedTensors and DTensors in a tree."""
    if is_sharded(value):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from sharded_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from sharded_in(item)


def merge(files: Mapping[int, TorchFile], step_policy: str | None = None) -> Merged:
    """The tree that the ranks' files hold together; `files` are by rank.

    Raises IncompleteCheckpoint (a rank is missing, or a part of a tensor), InconsistentCheckpoint
    (ranks contradict each other), UnsupportedCheckpoint (flat parameters, placements that are
    neither Shard nor Replicate).
    """
    for file in files.values():
        refuse_flat(file)
    for file in files.values():
        if (first := next(sharded_in(file.value), None)) is not None:
            refuse_missing(files, _world(first, file))
    merging = _Merging(dict(sorted(files.items())), step_policy)
    tree = merging.merge({rank: file.value for rank, file in merging.files.items()}, ())
    return Merged(tree, list(_told(merging.different)))


def refuse_missing(files: Mapping[int, TorchFile], world: int) -> None:
    """Raises IncompleteCheckpoint, naming the ranks whose files are not there."""
    some = files[min(files)].path
    if max(files) >= world:
        raise InconsistentCheckpoint(
            f"{files[max(files)].path} is of rank {max(files)}, {some} says that there are {world}",
            hint=MIXED,
        )
    if world > MAX_DP:
        raise CorruptCheckpoint(f"{some} states {world} ranks")
    missing = [str(rank) for rank in range(world) if rank not in files]
    if missing:
        raise IncompleteCheckpoint(
            f"the file of rank {listed(missing)} is missing: {some} is one of {world} ranks'",
            hint="put all ranks' files into one directory",
        )


def refuse_flat(file: TorchFile) -> None:
    """Raises UnsupportedCheckpoint where FSDP1 saved its flat parameters."""
    for holder in (file.value, *_values(file.value)):
        for key in holder if isinstance(holder, dict) else ():
            last = key.rpartition(".")[2] if isinstance(key, str) else ""
            if last.startswith(("_flat_param", "flat_param")):
                raise UnsupportedCheckpoint(
                    f"{file.path} holds FSDP1's flat parameters ({key}: LOCAL_STATE_DICT), whose "
                    "names and shapes only the program knows; torch itself cannot load them again",
                    hint="save with StateDictType.SHARDED_STATE_DICT or FULL_STATE_DICT",
                )


def _values(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else ()


# -- one rank's part


def read_sharded(value: Foreign, rank: int, file: TorchFile, meshes: Meshes) -> Sharded:
    """What a rank's record says; raises CorruptCheckpoint and UnsupportedCheckpoint."""
    try:
        _, cls, arguments, state = value.arguments
        kind = cls.name.rpartition(".")[2] if isinstance(cls, Global) else ""
        reader = {"DTensor": _read_dtensor, "ShardedTensor": _read_sharded_tensor}.get(kind)
        if reader is None:
            raise UnsupportedCheckpoint(
                f"{file.path} holds a tensor of class {getattr(cls, 'name', cls)}"
            )
        dtype, shape = TORCH_DTYPES[arguments[1].name], _ints(arguments[2])
        parts, world = reader(state, shape, rank, file, meshes)
    except MALFORMED as error:
        raise CorruptCheckpoint(f"{file.path}: a malformed sharded tensor: {error!r}") from error
    for part in parts:
        if part.tensor.dtype != dtype or part.tensor.shape != part.sizes:
            raise InconsistentCheckpoint(
                f"{file.path} holds {part.tensor.dtype} {list(part.tensor.shape)} of a tensor "
                f"{list(shape)}, of which rank {rank} of {world} should have {dtype} "
                f"{list(part.sizes)}",
                hint="was a rank's file renamed, or made with another number of ranks?",
            )
    return Sharded(dtype, shape, tuple(part for part in parts if prod(part.sizes)), world)


def _read_sharded_tensor(
    state: Any, shape: tuple[int, ...], rank: int, file: TorchFile, _: Meshes
) -> tuple[list[Part], int]:
    local, about, group = state[:3]  # then the sharding spec, and whether RRefs were made
    if _ints(_attribute(about, "size")) != shape:
        raise ValueError("two global sizes")
    here, world = _ints([_attribute(group, f"global_{key}") for key in ("rank", "world_size")])
    if here != rank:
        raise InconsistentCheckpoint(
            f"{file.path} is named as rank {rank}'s, but was written by rank {here} of {world}",
            hint="give every rank's file its own number again",
        )
    parts = []
    for each in local:
        where = _attribute(each, "metadata")
        offsets, sizes = (_ints(_attribute(where, f"shard_{key}")) for key in ("offsets", "sizes"))
        if not all(
            offset + size <= count
            for offset, size, count in zip(offsets, sizes, shape, strict=True)
        ):
            raise ValueError("a part reaches past its tensor")
        parts.append(Part(offsets, sizes, _tensor(_attribute(each, "tensor")), file))
    return parts, world


def _read_dtensor(
    state: Any, shape: tuple[int, ...], rank: int, file: TorchFile, meshes: Meshes
) -> tuple[list[Part], int]:
    held = _merged_state(state)
    tensor, spec = _tensor(held["_local_tensor"]), held["_spec"]
    mesh = _mesh(_attribute(spec, "mesh"), file, meshes)
    if rank not in mesh.places:
        raise InconsistentCheckpoint(
            f"{file.path} is named as rank {rank}'s, but its mesh is of {len(mesh.places)} ranks",
            hint=MIXED,
        )
    offsets, sizes = [0] * len(shape), list(shape)
    placements = _attribute(spec, "placements")
    in_order = all(
        list(_axes_of(entry)) == sorted(_axes_of(entry))
        for entry in _attribute(spec, "shard_order", None) or ()
    )
    for placement, (at, count) in zip(placements, mesh.coordinate(rank), strict=True):
        kind = placement.name.rpartition(".")[2]
        if kind == "Replicate":
            continue
        if kind != "Shard" or not in_order:
            raise UnsupportedCheckpoint(
                f"{file.path} holds a DTensor placed as {kind}"
                + ("" if in_order else " in another order than its mesh's"),
                hint="save it with torch.distributed.checkpoint, which says where every part lies",
            )
        axis = _attribute(placement, "dim", placement.arguments[0] if placement.arguments else None)
        width = -(-sizes[axis] // count)
        start = min(at * width, sizes[axis])
        offsets[axis] += start
        sizes[axis] = min(width, sizes[axis] - start)
    return [Part(tuple(offsets), tuple(sizes), tensor, file)], len(mesh.places)


def _axes_of(entry: Any) -> tuple[int, ...]:
    """Mesh axes that cut one axis of a tensor, in order: a ShardOrderEntry (torch >= 2.10)."""
    return _ints(entry.arguments[1])


@dataclass(frozen=True, slots=True)
class Mesh:
    """Ranks on axes: `places` numbers them row-major, `axes` are counts and strides of these."""

    made_of: Any
    places: dict[int, int]
    axes: list[tuple[tuple[int, ...], tuple[int, ...]]]

    def coordinate(self, rank: int) -> list[tuple[int, int]]:
        """Where a rank stands on every axis, and how many stand there."""
        found = []
        for counts, strides in self.axes:
            at = 0
            for count, stride in zip(counts, strides, strict=True):
                at = at * count + self.places[rank] // stride % count
            found.append((at, prod(counts)))
        return found


Meshes = dict[int, Mesh]
"""Meshes by the identity of their records, which thousands of tensors share."""


def _mesh(record: Any, file: TorchFile, known: Meshes) -> Mesh:
    found = known.get(id(record))
    if found is None:
        ranks = enumerate(_mesh_ranks(record, file))
        found = Mesh(record, {rank: place for place, rank in ranks}, _mesh_axes(record))
        known[id(record)] = found
    return found


def _mesh_ranks(mesh: Any, file: TorchFile) -> list[int]:
    """All ranks, in the order of the (outermost) mesh."""
    flat = _attribute(mesh, "_flatten_rank_map", None)
    if flat is not None:
        return list(_ints(flat))
    tensor = _attribute(mesh, "_rank_map", None) or _attribute(mesh, "mesh")  # torch < 2.10
    size = SIZES[tensor.dtype]
    data = file.read(tensor)
    return [
        int.from_bytes(data[at : at + size], "little", signed=True)
        for at in range(0, len(data), size)
    ]


def _mesh_axes(mesh: Any) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    layout = _attribute(mesh, "_layout", None)
    if layout is None:  # torch < 2.9: a tensor of ranks
        sizes = _attribute(mesh, "mesh").shape
        return [(_ints(size), _ints(prod(sizes[axis + 1 :]))) for axis, size in enumerate(sizes)]
    if (held := _attribute(layout, "axes", None)) is not None:
        return [(_ints(_attribute(a, "shape")), _ints(_attribute(a, "stride"))) for a in held]
    shape, strides = _attribute(layout, "shape"), _attribute(layout, "stride")
    if isinstance(shape, int):
        shape, strides = (shape,), (strides,)
    return [(_ints(a), _ints(b)) for a, b in zip(shape, strides, strict=True)]


def _world(value: Foreign, file: TorchFile) -> int:
    """How many ranks there are, as the record says."""
    try:
        state = value.arguments[3]
        if isinstance(state, tuple) and len(state) > 2:
            (world,) = _ints(_attribute(state[2], "global_world_size"))
            return world
        return len(_mesh_ranks(_attribute(_merged_state(state)["_spec"], "mesh"), file))
    except MALFORMED as error:
        raise CorruptCheckpoint(f"{file.path}: a malformed sharded tensor: {error!r}") from error


_REQUIRED = object()


def _attribute(record: Any, name: str, default: Any = _REQUIRED) -> Any:
    """An attribute of an inert object, with or without slots; raises KeyError."""
    state = _merged_state(record.state)
    return state[name] if default is _REQUIRED else state.get(name, default)


def _merged_state(state: Any) -> dict[str, Any]:
    """What BUILD sets: a dictionary, or one of `__dict__` and one of slots."""
    if not isinstance(state, tuple):
        return state or {}
    return {key: value for part in state for key, value in (part or {}).items()}


def _ints(values: Any) -> tuple[int, ...]:
    made = (values,) if isinstance(values, int) else tuple(values)
    if not all(type(value) is int and 0 <= value < 1 << 60 for value in made):
        raise ValueError("sizes that none can have")
    return made


def _tensor(value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise ValueError("a local part that is no tensor")
    return value


# -- all ranks together


class _Merging:
    """One walk through all ranks' values; `different` are the paths of what is rank 0's alone."""

    def __init__(self, files: dict[int, TorchFile], step_policy: str | None) -> None:
        self.files = files
        self.step_policy = step_policy
        self.different: list[Path] = []
        self.meshes: Meshes = {}

    def merge(self, values: dict[int, Any], path: Path) -> Any:
        """The one value of several ranks, by rank."""
        first = min(values)
        held = list(values.values())
        kinds = {type(value) for value in held}
        if any(is_sharded(value) for value in held):
            return self._sharded(values, path)
        if kinds <= {dict, OrderedDict}:
            keys = dict.fromkeys(key for value in held for key in value)
            made = type(held[0])()
            for key in keys:
                having = {rank: value[key] for rank, value in values.items() if key in value}
                made[key] = self.merge(having, (*path, key))
            return made
        if len(kinds) == 1 and isinstance(held[0], (list, tuple)) and len(set(map(len, held))) == 1:
            return type(held[0])(
                self.merge({rank: value[place] for rank, value in values.items()}, (*path, place))
                for place in range(len(held[0]))
            )
        if path and path[-1] == "step" and len(held) > 1:
            return self._step(values, path)
        if kinds == {Tensor}:
            copies = [Part((), tensor.shape, tensor, self.files[r]) for r, tensor in values.items()]
            same = all(_same(copies[0], other) for other in copies[1:])
            made = replace(leaf(self.files[first], held[0]), sharded=False)
        else:
            same = len(held) == 1 or len({text(v, self.files[r]) for r, v in values.items()}) == 1
            made = leaves(self.files[first], held[0])
        if not same:
            self.different.append(path)
        return made

    def _step(self, values: dict[int, Any], path: Path) -> Any:
        """Ranks that disagree on a step are of different saves, unless the policy decides."""
        first = min(values)
        read = {
            rank: self.files[rank].scalar(value) if isinstance(value, Tensor) else value
            for rank, value in values.items()
            if not (isinstance(value, Tensor) and value.numel != 1)
        }
        told = [
            (f"{self.files[rank].path}: {dotted(path)}", step)
            for rank, value in read.items()
            if (step := steps.step_of(value)) is not None
        ]
        step = steps.agree(told, self.step_policy)
        if step is None or not isinstance(values[first], Tensor):
            return leaves(self.files[first], values[first]) if step is None else step
        made = leaf(self.files[first], values[first])
        number = Scalar(step, made.dtype)
        return replace(made, number=lambda: number)

    def _sharded(self, values: dict[int, Any], path: Path) -> Leaf:
        """One leaf of the parts of all ranks; every element is held, and copies are equal."""
        for rank, value in values.items():
            if not is_sharded(value):
                raise InconsistentCheckpoint(
                    f"{self.files[rank].path} holds {dotted(path)} whole, other ranks a part",
                    hint=MIXED,
                )
        read = {
            rank: read_sharded(v, rank, self.files[rank], self.meshes) for rank, v in values.items()
        }
        some = read[min(read)]
        for rank, other in read.items():
            if (other.dtype, other.shape, other.world) != (some.dtype, some.shape, some.world):
                raise InconsistentCheckpoint(
                    f"{dotted(path)} is {other.dtype} {list(other.shape)} over {other.world} "
                    f"ranks in {self.files[rank].path}, {some.dtype} {list(some.shape)} over "
                    f"{some.world} in {self.files[min(read)].path}",
                    hint=MIXED,
                )
        parts: dict[tuple[tuple[int, ...], tuple[int, ...]], Part] = {}
        for each in read.values():
            for part in each.parts:
                known = parts.setdefault((part.offsets, part.sizes), part)
                if known is not part and not _same(known, part):
                    raise InconsistentCheckpoint(
                        f"{dotted(path)}: {known.file.path} and {part.file.path} hold different "
                        "values of the same elements",
                        hint=MIXED,
                    )
        return _leaf(dotted(path), some, list(parts.values()))


def _leaf(name: str, whole: Sharded, parts: Sequence[Part]) -> Leaf:
    pieces = []
    for part in parts:
        tensor = part.tensor
        extent = part.file.whole(tensor)  # which raises where the tensor reaches past it
        pieces.append(Piece(part.offsets, part.sizes, tensor.strides, tensor.offset, extent))

    def number() -> Scalar:
        return parts[0].file.scalar(parts[0].tensor)

    fragments = assembled(name, whole.dtype, whole.shape, pieces)
    held = [(part.offsets, part.tensor, part.file) for part in parts]
    place, twin = identities(whole.dtype, whole.shape, held)
    return Leaf(whole.dtype, whole.shape, fragments, number, place, twin, sharded=True)


def _same(a: Part, b: Part) -> bool:
    """Whether two parts hold the same bytes, by the checksums of their files where they do."""
    ours, theirs = a.tensor, b.tensor
    if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
        return False
    if not ours.numel:
        return True
    alike = (ours.storage.start, ours.offset, ours.strides) == (
        theirs.storage.start,
        theirs.offset,
        theirs.strides,
    )
    records = a.file.crc(ours), b.file.crc(theirs)
    if alike and records[0] == records[1] and records[0][1] is not None:
        return True
    whole = all(record[0] == ours.numel * SIZES[ours.dtype] for record in records)
    if alike and whole and None not in (records[0][1], records[1][1]):
        return False
    return _crc(a) == _crc(b)  # a part of its storage, or saved without checksums


def _crc(part: Part) -> int:
    """CRC-32 of the row-major elements, whose bytes are read."""
    tensor, crc = part.tensor, 0
    runs = [
        run for fragment in part.file.fragments(tensor) for run in fragment.runs(0, tensor.numel)
    ]
    with open(part.file.path, "rb") as file:
        for run in sorted(runs, key=lambda run: run.start):
            file.seek(run.extent.offset)
            left = run.extent.length
            while left and (data := file.read(min(left, 1 << 20))):
                crc = zlib.crc32(data, crc)
                left -= len(data)
    return crc


def text(value: Any, file: TorchFile) -> str:
    """Equal for equal values that are no tensors; tensors in them by their checksums."""

    def plain(item: Any) -> Any:
        if isinstance(item, Tensor):
            return (item.dtype, *item.shape, _crc(Part((), item.shape, item, file)))
        return map_values(item, lambda inner, _: plain(inner))

    return repr(to_json(plain(value)))


def _told(different: Sequence[Path]) -> Iterator[str]:
    """What is rank 0's alone, few words for many values of one place."""
    by_place: dict[Path, list[Path]] = {}
    for path in different:
        by_place.setdefault(path[:2], []).append(path)
    for place, paths in by_place.items():
        what = dotted(paths[0]) if len(paths) == 1 else f"{dotted(place)} ({len(paths)} values)"
        yield f"{what}: ranks hold different ones, rank 0's is taken"
