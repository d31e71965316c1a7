"""Reads which elements of a ShardedTensor or DTensor one rank saved, from its pickle.

    ShardedTensor    offsets, sizes, rank and world size are in each pickle (FSDP1)
    DTensor          the local tensor, the full shape, a mesh and its placements (FSDP2)

For a DTensor the shard is computed. With `Shard(d)`, the rank at position k of n on the mesh axis
has elements [k * c, (k + 1) * c) along axis d, c = ceil(size / n). With `Replicate`, every rank has
all elements. `_StridedShard(d)` cuts a shard along d in the same way, after the later axes of the
mesh have cut it along d.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from msgspec import Struct

from ...core.checkpoint.dtypes import SIZES
from ...core.checkpoint.inert import PLAIN, Foreign, types_in
from ...core.storage.inventory import role
from ...errors import (
    MALFORMED,
    CorruptCheckpoint,
    InconsistentCheckpoint,
    UnsupportedCheckpoint,
)
from ...files.torchfile import Tensor, TorchFile
from ...files.torchtensors import TORCH_DTYPES, class_of

OF_RANK = r"[._-]?(?:world_size_(\d+)_)?(?<![a-z])rank_?(\d+)\.(?:pt|pth|bin|ckpt)"
OF_RANKS = tuple(
    role(name, rf"(?P<stem>{stem}){OF_RANK}", "world", "dp", fixed="world")
    for name, stem in (
        ("optimizer", r".*optim.*?"),
        ("model", r".*(?:model|weights).*?"),
        ("state of a rank", r".*?"),
    )
)
OF_ITEMS = (
    role("optimizer", r"(?P<stem>.*optim.*?)_(\d+)\.pt", "dp"),
    role("model", r"(?P<stem>.*model.*?)_(\d+)\.pt", "dp"),
)
"""The roles of torch_checkpointing's files; `OF_RANKS` are those of other programs' files.

A role tells by a file's name what a rank's file is for, such as `optimizer`.
"""


class LocalPart(Struct, frozen=True):
    """A rank's shard of a tensor: elements [offset, offset + size) along every axis.

    `tensor` in `file` has the values of these elements.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    tensor: Tensor
    file: TorchFile


class DistributedTensor(Struct, frozen=True):
    """A tensor that is sharded over `world` ranks, as one rank's file describes it.

    `parts` are the shards that this rank saved. `cuts` is the number of different shards on all
    ranks; several ranks may have replicas of a shard.
    """

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[LocalPart, ...]
    world: int
    cuts: int


def is_distributed(value: Any) -> bool:
    """Whether a value is a pickled ShardedTensor or DTensor."""
    return class_of(value).rpartition(".")[2] in ("DTensor", "ShardedTensor")


def distributed_in(value: Any) -> Iterator[Foreign]:
    """Yields the ShardedTensors and DTensors in nested dictionaries, lists and tuples."""
    if is_distributed(value):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            if type(item) not in PLAIN:
                yield from distributed_in(item)
    elif isinstance(value, (list, tuple)) and not types_in(value) <= PLAIN:
        for item in value:
            if type(item) not in PLAIN:
                yield from distributed_in(item)


def ranks_of(value: Foreign, file: TorchFile) -> tuple[int, int | None]:
    """Returns (number of ranks, rank that saved the tensor), as a tensor's pickle states them.

    The rank is None if it is not stated. Raises CorruptCheckpoint for a malformed pickle.
    """
    try:
        state = value.arguments[3]
        if isinstance(state, tuple) and len(state) > 2:
            names = ("global_world_size", "global_rank")
            world, rank = _ints([_attribute(state[2], name) for name in names])
            return world, rank
        mesh = _read_mesh(_attribute(_merged_state(state)["_spec"], "mesh"), file)
        return len(mesh.places), mesh.writer
    except MALFORMED as error:
        raise CorruptCheckpoint(
            "file-damaged", f"{file.path}: a malformed sharded tensor: {error!r}", file=file.path
        ) from error


def read_distributed(
    value: Foreign, rank: int, file: TorchFile, meshes: MeshCache
) -> DistributedTensor:
    """Reads a rank's pickled ShardedTensor or DTensor, with the shards that this rank saved.

    Raises CorruptCheckpoint (a malformed pickle), InconsistentCheckpoint (a shard of another rank,
    type or shape) and UnsupportedCheckpoint (a placement or a tensor class that zckpt does not
    read).
    """
    try:
        _, _, arguments, state = value.arguments
        kind = class_of(value).rpartition(".")[2]
        reader = {"DTensor": _read_dtensor, "ShardedTensor": _read_sharded_tensor}[kind]
        dtype, shape = TORCH_DTYPES[arguments[1].name], _ints(arguments[2])
        parts, world, cuts = reader(state, shape, rank, file, meshes)
    except MALFORMED as error:
        raise CorruptCheckpoint(
            "file-damaged", f"{file.path}: a malformed sharded tensor: {error!r}", file=file.path
        ) from error
    for part in parts:
        if part.tensor.dtype != dtype or part.tensor.shape != part.sizes:
            raise InconsistentCheckpoint(
                "swapped-files",
                f"{file.path} has a shard {part.tensor.dtype} {list(part.tensor.shape)} of a "
                f"tensor of shape {list(shape)}, but rank {rank} of {world} should have {dtype} "
                f"{list(part.sizes)}",
                hint="the file may have been renamed, or saved with another number of ranks: copy "
                "all ranks' files of one save again",
                file=file.path,
            )
    nonempty = tuple(part for part in parts if prod(part.sizes))
    return DistributedTensor(dtype, shape, nonempty, world, cuts)


def _read_sharded_tensor(
    state: Any, shape: tuple[int, ...], rank: int, file: TorchFile, _: MeshCache
) -> tuple[list[LocalPart], int, int]:
    shards, metadata, group = state[:3]  # the sharding spec follows, and whether RRefs were made
    if _ints(_attribute(metadata, "size")) != shape:
        raise ValueError("two global sizes")
    stated_rank, world = _ints(
        [_attribute(group, f"global_{key}") for key in ("rank", "world_size")]
    )
    _refuse_other_rank(rank, stated_rank, world, file)
    parts = []
    for shard in shards:
        box = _attribute(shard, "metadata")
        offsets, sizes = (_ints(_attribute(box, f"shard_{key}")) for key in ("offsets", "sizes"))
        parts.append(LocalPart(offsets, sizes, _tensor(_attribute(shard, "tensor")), file))
    return parts, world, world


def _read_dtensor(
    state: Any, shape: tuple[int, ...], rank: int, file: TorchFile, meshes: MeshCache
) -> tuple[list[LocalPart], int, int]:
    attributes = _merged_state(state)
    if cls := class_of(attributes["_local_tensor"]):
        raise UnsupportedCheckpoint(
            "writer-unsupported",
            f"{file.path} has a shard of a tensor of the class {cls}: only that class can join its "
            "shards",
            hint="save the model's state dict without the optimizer's, or save full tensors",
            file=file.path,
        )
    tensor, spec = _tensor(attributes["_local_tensor"]), attributes["_spec"]
    mesh = _mesh(_attribute(spec, "mesh"), rank, file, meshes)
    offsets, sizes, cuts = [0] * len(shape), list(shape), [1] * len(shape)
    in_order = all(
        list(_mesh_axes_of(entry)) == sorted(_mesh_axes_of(entry))
        for entry in _attribute(spec, "shard_order", None) or ()
    )
    # in the order of the cuts: with FSDP2, tensor parallelism (factor 1) cut before the data ranks
    pairs = zip(_attribute(spec, "placements"), mesh.coordinate(rank), strict=True)
    for placement, (position, count) in sorted(pairs, key=lambda pair: _split_factor(pair[0])):
        kind = placement.name.rpartition(".")[2]
        if kind == "Replicate":
            continue
        axis = _attribute(placement, "dim", placement.arguments[0] if placement.arguments else None)
        is_next = kind == "Shard" or (
            kind == "_StridedShard" and _split_factor(placement) == cuts[axis]
        )
        if not is_next or not in_order:
            raise UnsupportedCheckpoint(
                "writer-unsupported",
                f"{file.path} has a DTensor with the placement {kind}, which zckpt does not read"
                + ("" if in_order else " in another order than that of the mesh's axes"),
                hint="save it with torch.distributed.checkpoint, which states the offsets of every "
                "shard",
                file=file.path,
            )
        width = -(-sizes[axis] // count)
        start = min(position * width, sizes[axis])
        offsets[axis] += start
        sizes[axis] = min(width, sizes[axis] - start)
        cuts[axis] *= count
    part = LocalPart(tuple(offsets), tuple(sizes), tensor, file)
    return [part], len(mesh.places), prod(cuts)


def rows_mesh(value: Foreign) -> tuple[str, str | None] | None:
    """Returns (device type, axis name) of the mesh over which a DTensor's rows are sharded.

    The axis name is None if the axis has none. The result is None for a DTensor that is cut along
    another axis, for a mesh of several axes, and for pickles of torch before 2.13.
    """
    try:
        spec = _merged_state(value.arguments[3])["_spec"]
        mesh, placements = _attribute(spec, "mesh"), _attribute(spec, "placements")
        axes = _attribute(_attribute(mesh, "_layout"), "axes")
        (placement,), (axis,) = placements, _attribute(mesh, "_mesh_dim_names") or (None,)
        rows = placement.name.endswith(".Shard") and _attribute(placement, "dim") == 0
        device = _attribute(mesh, "_device_type")
    except MALFORMED:
        return None
    is_whole = len(axes) == 1 and _attribute(mesh, "_root_mesh", None) is None
    are_names = isinstance(device, str) and isinstance(axis, (str, type(None)))
    return (device, axis) if rows and is_whole and are_names else None


def _split_factor(placement: Any) -> int:
    """The `split_factor` of a `_StridedShard`; 1 for other placements, 0 if it is not stated.

    The factor is the number of parts into which other mesh axes cut the tensor's axis before.
    """
    if not placement.name.endswith("._StridedShard"):
        return 1
    factor = _attribute(placement, "split_factor", None)
    return factor if type(factor) is int else 0


def _mesh_axes_of(entry: Any) -> tuple[int, ...]:
    """The mesh axes that cut one axis of a tensor, in the order of the cuts.

    `entry` is a pickled ShardOrderEntry (torch >= 2.10).
    """
    return _ints(entry.arguments[1])


class DeviceMesh(Struct, frozen=True):
    """A device mesh, as a DTensor's pickle states it.

    places    maps each rank to its row-major index in the mesh
    axes      for each axis: its numbers of positions, and its strides in that index
    record    the pickled mesh; it must stay alive, because `MeshCache` uses its `id()`
    """

    record: Any
    places: dict[int, int]
    # several numbers for an axis that torch made of several axes (`_flatten`)
    axes: list[tuple[tuple[int, ...], tuple[int, ...]]]

    def coordinate(self, rank: int) -> list[tuple[int, int]]:
        """For each axis of the mesh: (the rank's position, the number of positions)."""
        positions = []
        for counts, strides in self.axes:
            position = 0
            for count, stride in zip(counts, strides, strict=True):
                position = position * count + self.places[rank] // stride % count
            positions.append((position, prod(counts)))
        return positions

    @property
    def writer(self) -> int | None:
        """The rank that saved the mesh; None if its pickle does not show it.

        Newer torch states the rank. Older torch states its coordinate in the mesh, which only one
        rank has.
        """
        rank = _attribute(self.record, "_rank", None)
        if type(rank) is int:
            return rank
        coordinate = _attribute(self.record, "_coordinate_on_dim", None)
        if coordinate is None:
            return None
        ranks = [r for r in self.places if [at for at, _ in self.coordinate(r)] == list(coordinate)]
        return ranks[0] if len(ranks) == 1 else None


# thousands of DTensors in a file share one pickled mesh
MeshCache = dict[tuple[int, int], DeviceMesh]
"""Meshes that were already read, by the `id()` of the pickled mesh and by rank."""


def _mesh(record: Any, rank: int, file: TorchFile, cache: MeshCache) -> DeviceMesh:
    """Reads the mesh in a rank's file; raises InconsistentCheckpoint if another rank saved it."""
    mesh = cache.get((id(record), rank))
    if mesh is None:
        mesh = _read_mesh(record, file)
        _refuse_other_rank(rank, mesh.writer, len(mesh.places), file)
        if rank not in mesh.places:
            raise InconsistentCheckpoint(
                "world-size-disagrees",
                f"{file.path} is named as the file of rank {rank}, but its device mesh has only "
                f"{len(mesh.places)} ranks",
                file=file.path,
            )
        cache[id(record), rank] = mesh
    return mesh


def _read_mesh(record: Any, file: TorchFile) -> DeviceMesh:
    places = {rank: place for place, rank in enumerate(_mesh_ranks(record, file))}
    return DeviceMesh(record, places, _mesh_axes(record))


def _refuse_other_rank(rank: int, stated_rank: int | None, world: int, file: TorchFile) -> None:
    if stated_rank not in (None, rank):
        raise InconsistentCheckpoint(
            "swapped-files",
            f"{file.path} is named as the file of rank {rank}, but was written by rank "
            f"{stated_rank} of {world}",
            hint="a file's name must state the rank that wrote it: rename the files, or copy them "
            "again",
            file=file.path,
        )


def _mesh_ranks(mesh: Any, file: TorchFile) -> list[int]:
    """The ranks of a mesh in row-major order; for a submesh, the ranks of its root mesh."""
    flat = _attribute(mesh, "_flatten_rank_map", None)
    if flat is not None:
        return list(_ints(flat))
    tensor = _attribute(mesh, "_rank_map", None) or _attribute(mesh, "mesh")  # torch < 2.10
    size = SIZES[tensor.dtype]
    data = file.read(tensor)
    return [
        int.from_bytes(data[start : start + size], "little", signed=True)
        for start in range(0, len(data), size)
    ]


def _mesh_axes(mesh: Any) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    layout = _attribute(mesh, "_layout", None)
    if layout is None:  # torch < 2.9: a tensor of ranks
        sizes = _attribute(mesh, "mesh").shape
        return [(_ints(size), _ints(prod(sizes[axis + 1 :]))) for axis, size in enumerate(sizes)]
    if (axes := _attribute(layout, "axes", None)) is not None:
        return [(_ints(_attribute(a, "shape")), _ints(_attribute(a, "stride"))) for a in axes]
    shape, strides = _attribute(layout, "shape"), _attribute(layout, "stride")
    if isinstance(shape, int):
        shape, strides = (shape,), (strides,)
    return [(_ints(a), _ints(b)) for a, b in zip(shape, strides, strict=True)]


_REQUIRED = object()


def _attribute(record: Any, name: str, default: Any = _REQUIRED) -> Any:
    """An attribute of a pickled object, from its `__dict__` or its slots.

    Without the attribute, returns `default`; raises KeyError if no default is given.
    """
    state = _merged_state(record.state)
    return state[name] if default is _REQUIRED else state.get(name, default)


def _merged_state(state: Any) -> dict[str, Any]:
    """All attributes of a pickled object, from the state in its pickle (opcode BUILD).

    The state is a dictionary, or a pair of dictionaries: `__dict__` and the slots.
    """
    if not isinstance(state, tuple):
        return state or {}
    return {key: value for part in state for key, value in (part or {}).items()}


def _ints(values: Any) -> tuple[int, ...]:
    numbers = (values,) if isinstance(values, int) else tuple(values)
    if not all(type(value) is int and 0 <= value < 1 << 60 for value in numbers):
        raise ValueError("sizes that no tensor can have")
    return numbers


def _tensor(value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise ValueError("a local part that is not a tensor")
    return value
