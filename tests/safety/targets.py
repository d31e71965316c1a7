"""Which parser reads which fuzzed input, and which real inputs does a fuzzer begin with?

A target takes bytes, gives them to one parser as a file, and does with the result what commands do
with it without reading tensors. A ZckptError is the only error that it may raise.
"""

from __future__ import annotations

import json
import os
import pickle
import struct
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from msgspec import structs

import zckpt
from zckpt import api
from zckpt.core.checkpoint.inert import Foreign, Global, from_json, map_values, to_json
from zckpt.core.checkpoint.optimizer_states import StateRow, States
from zckpt.core.passes import description
from zckpt.core.storage.fragments import Extent
from zckpt.files import hdf5file, safefile, torchfile
from zckpt.files.pickling import dumps
from zckpt.files.torchfile import Tensor, TorchFile
from zckpt.files.unpickle import Unpickler
from zckpt.files.zipdirectory import read_directory
from zckpt.formats.universal.agreement import checksum
from zckpt.training import objects

from . import mutations

EXAMPLE = Path(__file__).parents[2] / "examples" / "run"
DATA = Path(__file__).parents[1] / "data"
OFTEN = 8
"""How many times more often a small sample is taken than a large one, which costs more time."""
Mutate = Callable[[Random, bytes, Sequence[bytes]], bytes]


@dataclass(frozen=True)
class Target:
    """`run` gives an input to a parser; `mutators` fit its inputs, of which `samples` are some."""

    run: Callable[[bytes], None]
    samples: Sequence[bytes]
    mutators: Sequence[Mutate]


# -- containers


def zip_of(members: Mapping[str, bytes]) -> bytes:
    """A zip of STORED members in the order of the mapping."""
    parts: list[bytes] = []
    directory: list[bytes] = []
    place = 0
    for name, data in members.items():
        text = name.encode()
        sizes = struct.pack("<IIIHH", zlib.crc32(data), len(data), len(data), len(text), 0)
        directory.append(b"PK\1\2" + struct.pack("<HHHHHH", 20, 20, 0, 0, 0, 0x21) + sizes)
        directory.append(struct.pack("<HHHII", 0, 0, 0, 0, place) + text)
        parts += [b"PK\3\4" + struct.pack("<HHHHH", 20, 0, 0, 0, 0x21) + sizes, text, data]
        place += 30 + len(text) + len(data)
    listed, count = b"".join(directory), len(members)
    end = struct.pack("<HHHHIIH", 0, 0, count, count, len(listed), place, 0)
    return b"".join([*parts, listed, b"PK\5\6", end])


def torch_file(text: bytes, storages: Mapping[str, bytes]) -> bytes:
    """A file of torch.save with this pickle and these storages."""
    data = {f"a/data/{key}": storage for key, storage in storages.items()}
    return zip_of({"a/data.pkl": text, "a/byteorder": b"little", **data})


def parts_of(path: Path) -> tuple[bytes, dict[str, bytes]]:
    """The pickle of a file of torch.save, and its storages."""
    text = path.read_bytes()
    with open(path, "rb") as file:
        members = read_directory(file.fileno(), Extent(str(path), 0, len(text)))
    bytes_of = {
        name.partition("/")[2]: text[member.offset : member.offset + member.length]
        for name, member in members.items()
    }
    storages = {
        name.removeprefix("data/"): data
        for name, data in bytes_of.items()
        if name.startswith("data/")
    }
    return bytes_of["data.pkl"], storages


# -- what commands do with what a parser gives


def walk(file: TorchFile, value: Any) -> Any:
    """Locates every tensor in a value, and reads the small ones."""
    if isinstance(value, Tensor):
        fragments = file.fragments(value)
        if value.contiguous and value.numel < 100:
            file.read(value)
            if value.numel == 1:
                with suppress(zckpt.ZckptError):
                    file.scalar(value)
        return len(fragments) if len(fragments) < 1 << 62 else None
    return map_values(value, lambda item, _: walk(file, item))


def round_trip(value: Any) -> None:
    """A value of a pickle as JSON, as a value again, and as a pickle."""
    with suppress(zckpt.ZckptError):
        objects._Names().of(value)
    document = to_json(value)
    text = json.dumps(document)
    again = from_json(json.loads(text))
    assert to_json(again) == document
    dumps(again, lambda item: Foreign(Global("a.b"), (repr(item),)))


def describe(path: str) -> None:
    """What `inspect` does with all of its options, save for the tables."""
    manifest = zckpt.read(path)
    json.dumps(api.inspect(manifest))
    json.dumps(description.state(manifest))
    if manifest.entries:
        json.dumps(description.tensors(manifest, "*"))


# -- one function per parser: the folder for its files -> the target


def _zip(root: Path) -> Target:
    path, texts = root / "file.pt", list(_pickles())
    storages = parts_of(EXAMPLE / "global_step7" / "mp_rank_00_model_states.pt")[1]

    def run(data: bytes) -> None:
        path.write_bytes(data if data[:2] == b"PK" else torch_file(data, storages))
        file = TorchFile(str(path))
        walk(file, file.value)

    files = [torch_file(text, storages) for text in texts]
    files.append((EXAMPLE / "global_step7" / "mp_rank_00_model_states.pt").read_bytes())
    return Target(run, [*texts, *files], (mutations.pickles, mutations.bytes_))


def _legacy(root: Path) -> Target:
    path = root / "file.pt"

    def run(data: bytes) -> None:
        path.write_bytes(data)
        file = TorchFile(str(path))
        walk(file, file.value)

    return Target(run, [legacy_file()], (mutations.pickles, mutations.bytes_))


def legacy_file() -> bytes:
    """A file of torch before 1.6, with two tensors in two storages."""
    tensor = (
        b"ctorch._utils\n_rebuild_tensor_v2\n((X\7\0\0\0storagectorch\nFloatStorage\nX\1\0\0\0%d"
    )
    tensor += b"X\3\0\0\0cpuK\4NtQK\0K\2K\2\x86K\2K\1\x86\x89ccollections\nOrderedDict\n)RtR"
    value = b"\x80\2}(X\1\0\0\0a" + tensor % 0 + b"X\1\0\0\0b" + tensor % 1 + b"u."
    data = struct.pack("<q", 4) + bytes(16)
    head = [0x1950A86A20F9469CFC6C, 1001, {"little_endian": True, "protocol_version": 1001}]
    parts = [pickle.dumps(item, 2) for item in head]
    return b"".join([*parts, value, pickle.dumps(["0", "1"], 2), data, data])


def _unpickler(root: Path) -> Target:
    def run(data: bytes) -> None:
        value = Unpickler(data, persistent=lambda _: "storage").load()
        round_trip(value)

    values = [
        {"a": [1, 2.5, None, True, (1, 2)], "b": {3: "x"}, "c": {1, 2}, "d": b"xyz", "e": 1 << 70},
        [frozenset({1}), bytearray(b"1"), complex(1, 2), range(3), slice(1, 2)],
        {"shared": (shared := [1]), "again": shared, "deep": [[[[[]]]]]},
    ]
    samples = [pickle.dumps(value, protocol) for value in values for protocol in (0, 2, 4)]
    return Target(run, [*samples, *_pickles()], (mutations.pickles, mutations.bytes_))


def _pickles() -> Sequence[bytes]:
    model = EXAMPLE / "global_step7" / "mp_rank_00_model_states.pt"
    return [parts_of(model)[0], parts_of(next(EXAMPLE.glob("*/*rank_1_*optim*")))[0]]


def _safetensors(root: Path) -> Target:
    path = root / "file.safetensors"

    def run(data: bytes) -> None:
        if data[:1] == b"{":  # a header alone
            data = len(data).to_bytes(8, "little") + data + bytes(24)
        path.write_bytes(data)
        safefile.read_with_metadata(str(path))

    header = {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
        "b": {"dtype": "BF16", "shape": [4], "data_offsets": [16, 24]},
    }
    text = json.dumps(header).encode()
    whole = len(text).to_bytes(8, "little") + text + bytes(24)
    return Target(run, [text, whole], (mutations.json_, mutations.bytes_))


def _universal(root: Path) -> Target:
    folder = root / "universal"
    zckpt.convert(EXAMPLE, folder)
    path = folder / "manifest.json"

    def run(data: bytes) -> None:
        with suppress(ValueError, RecursionError, TypeError):
            document = json.loads(data.decode("utf-8", "surrogatepass"))
            if isinstance(document, dict) and "crc32" in document:
                document["crc32"] = checksum(document)
                data = json.dumps(document).encode()
        path.write_bytes(data)
        describe(str(folder))

    document = json.loads(path.read_bytes())
    few = {**document, "state": {}, "steps": []}
    listed = json.loads(path.read_bytes())
    name, entry = next(iter(listed["entries"].items()))
    slot, place = name.rpartition("/")[2], {}
    for stored in safefile.read(str(folder / f"{slot}.safetensors".replace("param", "model"))):
        place[f"{stored.name}/{slot}"] = stored.extent
    extent = place[name]
    entry["fragments"] = [
        {"start": 0, "stop": extent.length // 4, "file": os.path.basename(extent.file),
         "offset": extent.offset, "length": extent.length}
    ]  # fmt: skip
    samples = [json.dumps(item).encode() for item in (document, few, listed)]
    return Target(run, samples, (mutations.json_, mutations.json_, mutations.bytes_))


def _dcp(root: Path) -> Target:
    folder = root / "dcp"
    zckpt.convert(EXAMPLE, folder, to="dcp", weights_only=True)
    path = folder / ".metadata"
    pickled, _, _ = path.read_bytes().rpartition(b"\nzckpt-crc32")
    large = (DATA / "fsdp2-2.13.0-tiny" / ".metadata").read_bytes()
    samples = [*[pickled] * OFTEN, large]

    def run(data: bytes) -> None:
        path.write_bytes(data)
        describe(str(folder))

    return Target(run, samples, (mutations.pickles, mutations.bytes_))


def _hdf5(root: Path) -> Target:
    path = root / "file.ortcp"

    def run(data: bytes) -> None:
        path.write_bytes(data)
        hdf5file.root_names(str(path))
        hdf5file.read(str(path), lambda name: name.startswith("model") or "exp" in name)

    small = root / "small.h5"
    import h5py

    with h5py.File(small, "w") as file:
        file["model/full_precision/a"] = [[1.0, 2.0]]
        file["optimizer/a/count"] = 3
        file["name"] = "text"
    samples = [small.read_bytes()] * OFTEN
    for folder in sorted((DATA / "onnxruntime").glob("hdf5*")):
        files = [path.read_bytes() for path in folder.iterdir()]
        samples.append(min((data for data in files if data[:8] == hdf5file.MAGIC), key=len))
    return Target(run, samples, (mutations.bytes_,))


def _inert(root: Path) -> Target:
    def run(data: bytes) -> None:
        try:
            document = json.loads(data)
        except (ValueError, RecursionError):
            return
        round_trip(from_json(document))

    values = [*mutations.VALUES[28:], {"a": (1, 2), "b": {1: {2}}, "c": float("nan"), "d": b"x"}]
    samples = [json.dumps(value).encode() for value in values[:-1]]
    samples.append(json.dumps(to_json(values[-1])).encode())
    samples.append(json.dumps(to_json(Unpickler(_pickles()[0], persistent=repr).load())).encode())
    return Target(run, samples, (mutations.json_, mutations.json_, mutations.bytes_))


def _deepspeed(root: Path) -> Target:
    folder = root / "deepspeed"
    zckpt.convert(EXAMPLE, folder, to="deepspeed", dp=1)
    paths = sorted(folder.glob("global_step7/*.pt"))
    known = [(path, *parts_of(path)) for path in paths]

    def run(data: bytes) -> None:
        number = (data or b"\0")[0] % 2
        path, text, storages = known[number]
        try:
            path.write_bytes(torch_file(data[1:], storages))
            describe(str(folder))
        finally:
            path.write_bytes(torch_file(text, storages))

    samples = [bytes([number]) + text for number, (_, text, _) in enumerate(known)]
    return Target(run, samples, (_behind_first(mutations.pickles), mutations.bytes_))


def _behind_first(mutate: Mutate) -> Mutate:
    """A mutation that leaves the first byte as it is, which chooses a file."""

    def mutated(random: Random, data: bytes, others: Sequence[bytes]) -> bytes:
        return data[:1] + mutate(random, data[1:], [other[1:] for other in others])

    return mutated


def _gathered(root: Path) -> Target:
    folder = root / "gathered"
    zckpt.convert(EXAMPLE, folder, to="gathered")
    known = [(path, *parts_of(path)) for path in sorted(folder.glob("[mo]*.pt"))]

    def run(data: bytes) -> None:
        number = (data or b"\0")[0] % 2
        path, text, storages = known[number]
        try:
            path.write_bytes(torch_file(data[1:], storages))
            describe(str(folder))
        finally:
            path.write_bytes(torch_file(text, storages))

    samples = [bytes([number]) + text for number, (_, text, _) in enumerate(known)]
    return Target(run, samples, (_behind_first(mutations.pickles), mutations.bytes_))


def _proof(root: Path) -> Target:
    from zckpt.proof import saved, unsupported

    folder, path = root / "universal-proof", root / "proof.json"
    zckpt.convert(EXAMPLE, folder)
    manifest, report = zckpt.read(folder), zckpt.verify(folder)
    samples = [json.dumps(report).encode()]
    entries = dict(manifest.entries)
    moment = next(key for key in entries if key[1] == "exp_avg")
    entry = entries.pop(moment)  # as if it were not read
    item: dict[str, Any] = {"key": "rho", "parameters": ("no parameter",), "reason": ""}
    row = StateRow(**item, form="unsupported", value="1", tensors=(entry,))
    manifest = structs.replace(manifest, entries=entries, states=States((row,)))
    like = f"1 {entry.dtype} {list(entry.shape)}"  # a text that looks like a tensor's
    for content, tensors in (("1", [entry.name]), (like, [])):
        report["held"]["unread"] = [{**item, "content": content, "tensors": tensors}]
        samples.append(json.dumps(report).encode())

    def run(data: bytes) -> None:
        path.write_bytes(data)
        saved.is_proof(str(path))
        proven, *_ = saved.read_proof(str(path), manifest)
        unsupported.pairs(manifest, proven)
        saved.with_values({"differences": [], "problems": []}, manifest, proven, [], [])

    return Target(run, samples, (mutations.json_, mutations.json_, mutations.bytes_))


def _options(root: Path) -> Target:
    import click

    from zckpt.cli.parameters import config as config_in
    from zckpt.cli.parameters import names, pairs
    from zckpt.training.options import GROUP_DEFAULTS, Options

    path, config = root / "options", {"train_batch_size": 4, "optimizer": {"type": "Adam"}}

    def run(data: bytes) -> None:
        path.write_bytes(data)
        for value_of in (config_in, names):
            with suppress(click.BadParameter):
                value_of(str(path))
        with suppress(click.BadParameter):
            defaults = pairs(data.decode("utf-8", "replace"))
            Options(((GROUP_DEFAULTS, defaults),))

    samples = [b"a\nb.c\n", b'["a", "b"]', json.dumps(config).encode(), b"1:lr=3e-4,betas=[0.9,1]"]
    return Target(run, samples, (mutations.json_, mutations.bytes_))


def _onnxruntime(root: Path) -> Target:
    folder = root / "ort"
    zckpt.convert(EXAMPLE, folder, to="onnxruntime", dialect="l2", dp=1)
    path = next(folder.glob("*.ort.pt"))
    text, storages = parts_of(path)

    def run(data: bytes) -> None:
        path.write_bytes(torch_file(data, storages))
        describe(str(folder))

    return Target(run, [text], (mutations.pickles, mutations.bytes_))


BUILDERS: dict[str, Callable[[Path], Target]] = {
    "torch-zip": _zip,
    "torch-legacy": _legacy,
    "unpickler": _unpickler,
    "safetensors": _safetensors,
    "manifest": _universal,
    "dcp-metadata": _dcp,
    "hdf5": _hdf5,
    "inert-json": _inert,
    "deepspeed": _deepspeed,
    "gathered": _gathered,
    "onnxruntime": _onnxruntime,
    "proof": _proof,
    "options": _options,
}


def target(name: str, root: Path) -> Target:
    """The target `name`, whose files lie in `root`; parsers forget what they have parsed."""
    built = BUILDERS[name](root)

    def run(data: bytes) -> None:
        torchfile._peeked.clear()
        built.run(data)

    return replace(built, run=run)
