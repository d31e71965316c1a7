"""Decides which objects of a source may be written into a pickle.

A pickle may name any class or function of Python. zckpt reads such a name as data. If it wrote the
name into a pickle again, the program that loads the target would call the class or function. So
zckpt writes only names of a closed list: COMMON, those that engines need (`Format.objects`), and
those that the user allows with `--allow-object`. All others are left out, and the report lists
them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping
from itertools import chain
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from ..core.checkpoint.dtypes import STORAGES, TORCH_NAMES
from ..core.checkpoint.facts import FlatBufferEngine
from ..core.checkpoint.inert import ITSELF, MAX_DEPTH, Foreign, Global, inside, map_values
from ..core.checkpoint.inert import PLAIN as PLAIN_TYPES
from ..core.checkpoint.manifest import Manifest
from ..errors import CorruptCheckpoint, Notice, listed, note

PLAIN = (
    "bool", "bytearray", "bytes", "complex", "dict", "float", "frozenset", "int", "list", "object",
    "range", "set", "slice", "str", "tuple",
    "long", "unicode", "xrange",  # Python 2's names, which protocol 2 writes for int, str, range
)  # fmt: skip
COLLECTIONS = ("Counter", "OrderedDict", "defaultdict", "deque")
NUMPY = ("_reconstruct", "scalar")
TIMES = ("date", "datetime", "time", "timedelta", "timezone")
PATHS = tuple(
    f"{module}{name}"
    for module in ("", "_local.")  # Python 3.13 names the second
    for name in ("PosixPath", "PurePosixPath", "PureWindowsPath", "WindowsPath")
)
COMMON = frozenset(
    (
        *(f"builtins.{name}" for name in PLAIN),
        *(f"collections.{name}" for name in COLLECTIONS),
        *(f"datetime.{name}" for name in TIMES),
        "decimal.Decimal",
        *(f"pathlib.{name}" for name in PATHS),
        "_codecs.encode",  # bytes in protocol 2
        "copyreg._reconstructor",  # makes an object of a class without calling its __init__
        "argparse.Namespace",
        "numpy.dtype",
        "numpy.ndarray",
        *(f"numpy.{core}.multiarray.{name}" for core in ("core", "_core") for name in NUMPY),
        *(f"torch.{name}" for name in TORCH_NAMES.values()),
        "torch.Size",
        "torch.device",
        "torch.torch_version.TorchVersion",  # a text: torch.__version__
    )
)
"""Classes and functions that only build plain values, whatever arguments a pickle gives them."""

REBUILT = (
    "tensor", "tensor_v2", "tensor_v3", "parameter", "parameter_with_state", "wrapper_subclass",
)  # fmt: skip
DISTRIBUTED = {  # names in modules of torch.distributed, 2.1 to 2.13
    "_mesh_layout": "_FlatLayout _MeshLayout",
    "_shard.metadata": "ShardMetadata",
    "_shard.sharded_tensor.api": "ShardedTensor",
    "_shard.sharded_tensor.metadata": "MEM_FORMAT_ENCODING ShardedTensorMetadata TensorProperties",
    "_shard.sharded_tensor.shard": "Shard",
    "_shard.sharding_spec.api": "EnumerableShardingSpec",
    "_shard.sharding_spec.chunk_sharding_spec": "ChunkShardingSpec",
    "_tensor.api": "DTensor",
    "_tensor.placement_types": "DTensorSpec Replicate Shard TensorMeta",
    "checkpoint.filesystem": "_StorageInfo",
    "checkpoint.metadata": "BytesStorageMetadata ChunkStorageMetadata Metadata MetadataIndex "
    "StorageMeta TensorProperties TensorStorageMetadata _MEM_FORMAT_ENCODING",
    "device_mesh": "DeviceMesh",
    "remote_device": "_remote_device",
    "tensor": "DTensor",
    "tensor._dtensor_spec": "DTensorSpec ShardOrderEntry TensorMeta",
    "tensor.placement_types": "Replicate Shard",
}
# without builtins.getattr, by which protocol 2 names a class within a ShardedTensor: with it, a
# pickle can also reach functions that run programs
DESCRIBING = COMMON | frozenset(
    (
        *(f"torch.{module}{name}" for module in ("", "cuda.") for name in STORAGES),
        "torch.storage.UntypedStorage",
        *(f"torch._utils._rebuild_{name}" for name in REBUILT),
        "torch._tensor._rebuild_from_type_v2",
        "torch.Tensor",
        *(f"torch.nn.{name}" for name in ("Parameter", "parameter.Parameter")),
        "torch.serialization._get_layout",
        *(
            f"torch.distributed.{module}.{name}"
            for module, names in DISTRIBUTED.items()
            for name in names.split()
        ),
    )
)
"""`COMMON`, and the classes and functions by which torch's files describe tensors.

Reports do not list a name that stands only in such descriptions.
"""

BUILTINS = tuple(
    f"builtins.{name}"
    for name in (
        "__build_class__", "__import__", "breakpoint", "compile", "delattr", "eval", "exec",
        "filter", "getattr", "globals", "input", "locals", "map", "open", "setattr", "type", "vars",
    )
)  # fmt: skip
RUNNING = frozenset(
    (
        "_ctypes", "_io.FileIO", "_io.open", "_pickle", "_posixsubprocess", "bdb", *BUILTINS,
        "cloudpickle", "code", "codeop", "commands", "ctypes", "dill", "distutils", "imp",
        "importlib", "io.FileIO", "io.open", "joblib", "marshal", "multiprocessing", "nt",
        "numpy.f2py", "numpy.load", "operator.attrgetter", "operator.call", "operator.methodcaller",
        "os", "pdb", "pickle", "pip", "pkgutil", "posix", "profile", "pty", "runpy", "setuptools",
        "shelve", "shutil", "site", "socket", "subprocess", "sys", "timeit", "torch.hub",
        "torch.load", "torch.serialization.load", "torch.utils.cpp_extension", "trace",
        "types.CodeType", "types.FunctionType", "webbrowser", "zipimport",
    )
)  # fmt: skip
"""Modules and functions by which a pickle can run programs or code, or reach such functions."""
REACHES_ALL = "builtins.getattr"  # Python 3.11 writes it for a member of an enum, too


def runs_programs(name: str) -> bool:
    """Whether a class or function can run programs.

    This is so if its full name, or the name of a module that contains it, is in `RUNNING`.
    """
    parts = name.split(".")
    return any(".".join(parts[:count]) in RUNNING for count in range(1, len(parts) + 1))


def without_others(
    manifest: Manifest, needed: Collection[str], admitted: Collection[str]
) -> Manifest:
    """Removes values whose pickle would name a class or function that is not allowed.

    Allowed are `COMMON`, `needed` (names in engines' own files) and `admitted` (from
    `--allow-object`). Such a value is removed from the innermost dictionary that contains it, with
    a note. Raises CorruptCheckpoint for a value that contains itself.
    """
    filtered = _Filter((COMMON | {*needed, *admitted}) - {ITSELF.name})
    state = filtered.dictionary(manifest.state_with_states, "")
    groups = manifest.groups
    if groups is not None:
        groups = tuple(
            filtered.dictionary(group, f"param_groups.{place}")
            for place, group in enumerate(groups)
        )
    engine = manifest.run.engine
    if isinstance(engine, FlatBufferEngine):
        engine = replace(engine, config=filtered.dictionary(engine.config, "config"))
    return (
        manifest.map_ranks(lambda own: without_others(own, needed, admitted))
        .with_state(state)
        .replace(
            groups=groups, engine=engine, omitted=(*manifest.notices.omitted, *filtered.omitted)
        )
    )


def others_of(manifest: Manifest, needed: Collection[str]) -> list[str]:
    """The classes and functions that a checkpoint's pickles name, without those that are allowed.

    Functions whose result the pickle discards are included. `needed` are the names that engines put
    into their own files.
    """
    names = _Names()
    values = (manifest.state_with_states, manifest.groups, _config(manifest))
    kept = frozenset().union(*map(names.of, values)) - COMMON
    return _sorted((kept | (manifest.files.objects - DESCRIBING)) - {ITSELF.name, *needed})


def _sorted(names: Iterable[str]) -> list[str]:
    """Sorts names of classes and functions for a message; torch's tensor functions come last.

    Users seldom need to know about torch's functions.
    """
    return sorted(names, key=lambda name: (name in DESCRIBING, name))


def admissible(value: Any, needed: Collection[str]) -> list[str]:
    """The classes and functions in a value that the user may allow with `--allow-object`.

    They are sorted. The list is empty if one of them must never be allowed. `needed` are the names
    that engines put into their own files.
    """
    names = _Names().of(value) - COMMON - {*needed}
    never = ITSELF.name in names or any(map(runs_programs, names))
    return [] if never else sorted(names)


def _config(manifest: Manifest) -> Mapping[str, Any] | None:
    return manifest.run.engine.config if isinstance(manifest.run.engine, FlatBufferEngine) else None


def _refusal(names: list[str]) -> str:
    """The reason why a value with these classes or functions is left out, for a note.

    The text proposes `--allow-object`, unless a name can run programs.
    """
    running = [name for name in names if runs_programs(name)]
    if not running and ITSELF.name in names:
        own_names = [name for name in names if name != ITSELF.name]
        return (
            f"it has an object that refers to itself ({listed(own_names, 4)}), which zckpt cannot "
            "write: save plain dictionaries and lists instead"
        )
    if not running:
        options = " ".join(f"--allow-object {name}" for name in names[:4])
        return (
            f"it refers to {listed(names, 4)}, which a program that loads the target would run; if "
            f"you trust that, add {options}"
        )
    if running == [REACHES_ALL]:
        what = f"it refers to {listed(names, 3)}"
        return f"{what}, and {REACHES_ALL} can reach code that runs programs"
    return (
        f"it refers to {listed(running, 3)}, which can run programs; no trainer needs to save "
        "that, so the checkpoint may be hostile"
    )


class _Names(Struct, eq=False):
    """Collects the names of classes and functions in values; visits each container once."""

    names_by_id: dict[int, frozenset[str]] = field(default_factory=dict)

    def of(self, value: Any, depth: int = 0) -> frozenset[str]:
        """The names of all classes and functions in a value, at any depth.

        Raises CorruptCheckpoint if the value is nested too deeply or contains itself.
        """
        if isinstance(value, Global):
            return frozenset((value.name,))
        if isinstance(value, Foreign):
            parts: Iterable[Any] = (
                value.function, value.arguments, value.state,
                value.keywords, value.appended, value.items,
            )  # fmt: skip
        elif isinstance(value, Mapping):
            parts = chain(value.keys(), value.values())
        elif isinstance(value, (list, tuple, set, frozenset)):
            parts = value
        else:
            return frozenset()
        if depth > MAX_DEPTH:
            raise CorruptCheckpoint(
                "file-damaged", "state is nested too deeply, or refers to itself"
            )
        if id(value) not in self.names_by_id:
            named = [part for part in parts if type(part) not in PLAIN_TYPES]
            self.names_by_id[id(value)] = frozenset().union(
                *(self.of(part, depth + 1) for part in named)
            )
        return self.names_by_id[id(value)]


class _Filter(Struct, eq=False):
    """Removes values whose pickle would name a class or function that is not `allowed`.

    `omitted` collects a note about each value that is removed.
    """

    allowed: Collection[str]
    named: _Names = field(default_factory=_Names)
    lost: dict[int, frozenset[str]] = field(default_factory=dict)  # by the identity of a value
    kept: dict[int, Any] = field(default_factory=dict)
    omitted: list[Notice] = field(default_factory=list)

    def dictionary(self, value: Mapping[Any, Any], path: str) -> dict[Any, Any]:
        """Removes items of a dictionary that name a class or function which is not allowed.

        Adds a note about each. `path` is the dictionary's key.
        """
        kept: dict[Any, Any] = OrderedDict() if isinstance(value, OrderedDict) else {}
        for key, item in value.items():
            where = inside(path, key) if path else str(key)
            if names := _sorted({*self._disallowed(key), *self._unavoidable(item)}):
                message = f"{where}: {_refusal(names)}"
                self.omitted.append(note("state-omitted", message, subject=where))
            else:
                kept[key] = self._without_disallowed(item, where)
        return kept

    def _disallowed(self, value: Any) -> frozenset[str]:
        return self.named.of(value).difference(self.allowed)

    def _unavoidable(self, value: Any) -> frozenset[str]:
        """The disallowed classes and functions that force zckpt to leave out the whole value.

        Empty if it is enough to remove items of dictionaries in the value.
        """
        # `dictionary` removes single items, also of dictionaries in lists and objects' states
        if not self._disallowed(value) or isinstance(value, dict):
            return frozenset()
        if id(value) not in self.lost:
            names = self._disallowed(value)
            if isinstance(value, Foreign):
                parts = (
                    value.function,
                    value.arguments,
                    value.keywords,
                    value.appended,
                    value.items,
                )
                names = frozenset().union(
                    *map(self._disallowed, parts), self._unavoidable(value.state)
                )
                if ITSELF.name in self._disallowed(
                    value
                ):  # it is written completely, or not at all
                    names = self._disallowed(value)
            elif isinstance(value, (list, tuple)):
                names = frozenset().union(*map(self._unavoidable, value))
            self.lost[id(value)] = names
        return self.lost[id(value)]

    def _without_disallowed(self, value: Any, path: str) -> Any:
        if not self._disallowed(value):
            return value
        if id(value) not in self.kept:
            if isinstance(value, dict):
                self.kept[id(value)] = self.dictionary(value, path)
            else:
                self.kept[id(value)] = map_values(
                    value, lambda item, key: self._without_disallowed(item, inside(path, key))
                )
        return self.kept[id(value)]
