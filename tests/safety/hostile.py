"""Which files attack which reader? One function for each, which writes the files of a checkpoint.

Each sample is a real checkpoint with one hostile value, or a container that claims what it does not
have. All files are smaller than 10 MB.
"""

from __future__ import annotations

import functools
import json
import os
import pickle
import shutil
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zckpt
from zckpt.formats.universal.agreement import checksum

from .targets import EXAMPLE, legacy_file, parts_of, torch_file, zip_of

Write = Callable[[Path], None]


@dataclass(frozen=True)
class Sample:
    """`write` makes the checkpoint `source` in an empty folder.

    `reader` is the parser that it attacks. If `is_refused`, no command may accept it. `words` are
    further arguments of commands.
    """

    reader: str
    write: Write
    is_refused: bool = False
    words: tuple[str, ...] = ()


def text(value: str) -> bytes:
    data = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(data)) + data


# -- values of a pickle, as the opcodes that build them


def laughs(kind: str, levels: int = 40) -> bytes:
    """Containers that hold the next one twice: 2 ** levels values, if each is walked alone."""
    opens = {"list": b"]q%s", "dict": b"}q%s", "tuple": b"", "object": b"cm\nC\n)\x81q%s"}[kind]
    parts = [b"]q\1"]
    for level in range(2, levels + 2):
        before, number = bytes([level - 1]), bytes([level])
        if kind == "tuple":
            parts.append(b"h%sh%s\x86q%s" % (before, before, number))
        elif kind == "list":
            parts.append(opens % number + b"(h%sh%se" % (before, before))
        elif kind == "dict":
            parts.append(opens % number + b"(" + text("a") + b"h%s" % before)
            parts.append(text("b") + b"h%su" % before)
        else:
            parts.append(opens % number + b"h%sh%s\x86b" % (before, before))
    # all but the last are popped from the stack
    return parts[0] + b"".join(b"0" + part for part in parts[1:])


def colliding(count: int) -> Iterator[int]:
    """Integers of one hash."""
    modulus = (1 << 61) - 1
    return (1 + number * modulus for number in range(1, count + 1))


def long1(value: int) -> bytes:
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


NUMBERS = {
    "NaN": b"G" + struct.pack(">d", float("nan")),
    "infinity": b"G" + struct.pack(">d", float("inf")),
    "1e300": b"G" + struct.pack(">d", 1e300),
    "10**400": long1(10**400),
    "-10**400": long1(-(10**400)),
    "10**100": long1(10**100),
    "-1": b"J" + struct.pack("<i", -1),
    "true": b"\x88",
    "text": text("7"),
    "nothing": b"N",
    "list": b"]",
    "dictionary": b"}",
    "tuple": b")",
    "bytes": b"C\x01a",
    "object": b"cm\nC\n)\x81",
    "class": b"cm\nC\n",
    "complex": b"c__builtin__\ncomplex\nG" + struct.pack(">d", 1) + b"K\1\x86R",
    "set": b"\x8f(K\1\x90",
    "numpy's object": b"cnumpy\nndarray\n)R",
}
REFUSED_VALUES = {
    "a list within itself": b"]q\1h\1a",
    "a dictionary within itself": b"}q\1" + text("a") + b"h\1s",
    "an object within itself": b"cm\nC\n)\x81q\1h\1b",
    "a tuple within its list": b"]q\1h\1\x85a",
    **{f"doubling {kind}s": laughs(kind) for kind in ("list", "dict", "tuple", "object")},
    "5000 lists in each other": b"]" * 5000 + b"a" * 4999,
    "400 tuples in each other": b")" + b"\x85" * 400,
    "9,000,000 times None": b"](" + b"N" * 9_000_000 + b"e",
    "9,000,000 lists": b"](" + b"]" * 9_000_000 + b"e",
    "4,500,000 lists, 90 in each other": b"](" + (b"]" * 90 + b"a" * 89) * 50_000 + b"e",
    "1,600,000 dictionaries of a number": b"](" + b"}K\1K\1s" * 1_600_000 + b"e",
    "3,000,000 pairs": b"](" + b"NN\x86" * 3_000_000 + b"e",
    "600,000 references to one list": b"](" + b"]q\1" + b"h\1" * 599_999 + b"e",
    "5,000,000 references to one list": b"](" + b"]q\1" + b"h\1" * 4_999_999 + b"e",
    "3,000,000 objects of one class": b"](" + b"cm\nC\nq\1)\x81" + b"h\1)\x81" * 2_000_000 + b"e",
    "2,000,000 dictionaries": b"](ccollections\nOrderedDict\nq\1)R" + b"h\1)R" * 2_000_000 + b"e",
    "a text of a megabyte a million times": b"](" + text("a" * 1_000_000) + b"q\1"
    + b"h\1" * 1_000_000 + b"e",
    "an integer of a megabyte": b"\x8b" + struct.pack("<I", 1 << 20) + b"\x7f" * (1 << 20),
    "an integer of 5000 digits": b"L" + b"9" * 5000 + b"L\n",
    "bytes of 2**62": b"\x8e" + struct.pack("<Q", 1 << 62) + b"a",
    "a text of 2**62": b"\x8d" + struct.pack("<Q", 1 << 62) + b"a",
    "a text of 4 GB": b"X\xff\xff\xff\xff" + b"a",
    "a bytearray of 2**62": b"\x96" + struct.pack("<Q", 1 << 62) + b"a",
    "invalid UTF-8": b"X\2\0\0\0\xff\xfe",
    "integers of one hash as keys": b"}(" + b"".join(
        long1(number) + b"N" for number in colliding(200_000)) + b"u",
    "integers of one hash as keys, one by one": b"}" + b"".join(
        long1(number) + b"Ns" for number in colliding(200_000)),
    "integers of one hash in a set": b"\x8f(" + b"".join(map(long1, colliding(200_000))) + b"\x90",
    "memo numbers of one hash": b"N" + b"".join(
        b"p%d\n" % number for number in colliding(200_000)),
    "a nested key a million times": b"}" + b"(" + b"K\1" * 900 + b"tq\1"
    + b"N" + b"sh\1N".join([b""] * 1_000_000) + b"s",
    "a storage of a million parts": b"(" + b"K\1" * 1_000_000 + b"tq\1Q",
    "a call with a million arguments": b"ctorch\nSize\n(" + b"K\1" * 1_000_000 + b"tR",
    "a class with a line's end": b"\x8c\x02os\x8c\x06a\nb\x93\x93",
    "a class without a module": b"c\na\n",
    "an unknown opcode": b"\x97",
    "a copied list": b"](" + b"K\1" * 100_000 + b"tq\1" + b"".join(
        [b"ctorch\nSize\nh\1\x85R0"] * 50_000),
}  # fmt: skip
LITTLE_IN_METADATA = ("600,000 references to one list",)
"""What `.metadata` may have, where a reference costs less than in a torch file."""
HARMLESS_VALUES = {
    "150,000 references to one list": b"](" + b"]q\1" + b"h\1" * 149_999 + b"e",
    "1,500,000 small numbers": b"](" + b"K\1" * 1_500_000 + b"e",
    "1,900,000 times None": b"](" + b"N" * 1_900_000 + b"e",
    "1,900,000 numbers of two bytes": b"](" + b"M\5\5" * 1_900_000 + b"e",
    "150,000 pairs": b"](" + b"K\1K\2\x86" * 150_000 + b"e",
    "900,000 texts": b"](" + text("a") * 900_000 + b"e",
    "450,000 numbers by number": b"}("
    + b"".join(b"J" + struct.pack("<i", n) + b"K\1" for n in range(450_000)) + b"u",
    "140 lists in each other": b"]" * 140 + b"a" * 139,
    "a key of a megabyte": b"}" + text("k" * 1_000_000) + b"](" + b"]" * 50_000 + b"es",
    "100 nested keys of 1000 characters": (b"}" + text("k" * 1000)) * 90 + b"N" + b"s" * 90,
    "surrogates": b"}" + text("\ud800") + text("\udfff") + b"s",
    "control characters": b"}" + text("\x1b[2J\n\r\0") + text("\x1b]0;x\7") + b"s",
    "an empty key": b"}" + text("") + text("") + b"s",
    "a call of os.system": b"cos\nsystem\n" + text("touch /tmp/zckpt-was-here") + b"\x85R",
    "a list of 50,000 sets": b"](" + b"\x8f" * 50_000 + b"e",
    "keys of every type": b"}(" + b"NNK\1NG" + struct.pack(">d", float("nan")) + b"N"
    + b"C\1aN)N\x88Ncm\nC\nNu",
    **{f"the number {name}": code for name, code in NUMBERS.items()},
}  # fmt: skip


# -- tensors of a pickle


def tensor(
    key: str, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], name: str = "v2"
) -> bytes:
    def sizes(values: tuple[int, ...]) -> bytes:
        return b"(" + b"".join(map(long1, values)) + b"t"

    storage = (
        b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text(key) + text("cpu") + b"K\4tQ"
    )
    layout = long1(offset) + sizes(shape) + sizes(strides) + b"\x89ccollections\nOrderedDict\n)R"
    return b"ctorch._utils\n_rebuild_tensor_" + name.encode() + b"\n(" + storage + layout + b"tR"


REFUSED_TENSORS = {
    "a stride of 0": tensor("0", 0, (10**12,), (0,)),
    "a stride of 0 beside another": tensor("0", 0, (10**11, 4), (0, 1)),
    "a hundred million elements": tensor("0", 0, (10_000, 10_000), (0, 0)),
    "past its storage": tensor("0", 1, (4,), (1,)),
    "an offset of 2**62": tensor("0", 1 << 62, (4,), (1,)),
    "a negative offset": tensor("0", -1, (2,), (1,)),
    "a negative size": tensor("0", 0, (-4,), (1,)),
    "a negative stride": tensor("0", 3, (4,), (-1,)),
    "2**62 elements": tensor("0", 0, (1 << 31, 1 << 31), (1, 1)),
    "2**200 elements": tensor("0", 0, (1 << 50,) * 4, (0,) * 4),
    "100 axes": tensor("0", 0, (1,) * 100, (1,) * 100),
    "no storage": tensor("9", 0, (4,), (1,)),
    "more strides than sizes": tensor("0", 0, (4,), (1, 1)),
}
HARMLESS_TENSORS = {
    "expanded a little": tensor("0", 0, (8, 4), (0, 1)),
    "expanded from one element": tensor("0", 0, (1000,), (0,)),
    "no elements in 2**58 rows": tensor("0", 0, (1 << 58, 0), (0, 1)),
    "overlapping rows": tensor("0", 0, (3, 2), (1, 1)),
    "every other element": tensor("0", 0, (2,), (2,)),
    "transposed": tensor("0", 0, (2, 2), (1, 2)),
}


# -- checkpoints with such values


@functools.cache
def converted(to: str, root: str) -> Path:
    """The example in another format, written once."""
    path = Path(root) / to
    if to == "deepspeed":
        zckpt.convert(EXAMPLE, path, to=to, dp=1)
    else:
        zckpt.convert(EXAMPLE, path, to=to)
    return path


ROOT = Path(os.environ.get("ZCKPT_HOSTILE", "/tmp")) / f"zckpt-hostile-{os.getpid()}"


def copy_of(to: str, folder: Path) -> Path:
    ROOT.mkdir(exist_ok=True)
    return Path(shutil.copytree(converted(to, str(ROOT)), folder / "source"))


def behind(path: Path, end: bytes, inserted: bytes) -> None:
    """Inserts opcodes before the end of the pickle of a file."""
    pickled, storages = parts_of(path)
    assert pickled.endswith(end)
    path.write_bytes(torch_file(pickled[: -len(end)] + inserted + end, storages))


def alone(value: bytes, folder: Path) -> None:
    """One file of a model's state dict and another value."""
    model = b"}" + text("w") + tensor("0", 0, (2, 2), (2, 1)) + b"s"
    whole = b"\x80\2}(" + text("model") + model + text("other") + value + b"u."
    (folder / "source").write_bytes(torch_file(whole, {"0": bytes(16)}))
    (folder / "source").rename(folder / "source.pt")


def weight(value: bytes, folder: Path) -> None:
    """One file whose model has this tensor beside a good one."""
    model = b"}(" + text("w") + tensor("0", 0, (4,), (1,)) + text("v") + value + b"u"
    whole = b"\x80\2}(" + text("model") + model + b"u."
    (folder / "source.pt").write_bytes(torch_file(whole, {"0": bytes(16)}))


def in_deepspeed(value: bytes, folder: Path) -> None:
    path = next(copy_of("deepspeed", folder).glob("*/*model_states.pt"))
    behind(path, b"u.", text("client") + value)


def in_metadata(value: bytes, folder: Path) -> None:
    path = copy_of("dcp", folder) / ".metadata"
    pickled, _, _ = path.read_bytes().rpartition(b"\nzckpt-crc32")
    assert pickled.endswith(b"ub.")
    path.write_bytes(pickled[:-3] + text("other") + value + b"ub.")


def in_onnxruntime(value: bytes, folder: Path) -> None:
    ROOT.mkdir(exist_ok=True)
    if not (ROOT / "l2").exists():
        zckpt.convert(EXAMPLE, ROOT / "l2", to="onnxruntime", dialect="l2", dp=1)
    source = shutil.copytree(ROOT / "l2", folder / "source")
    behind(next(Path(source).glob("*.ort.pt")), b"u.", text("client") + value)


def as_step(value: bytes, folder: Path) -> None:
    """An optimizer of one parameter with this step and this learning rate."""
    other = value if len(value) < 1000 else b"K\1"
    state = b"}(" + text("step") + value + text("exp_avg") + tensor("0", 0, (4,), (1,))
    state += text("exp_avg_sq") + tensor("0", 0, (4,), (1,)) + b"u"
    group = b"}(" + text("lr") + other + text("betas") + other + text("params") + b"]K\0au"
    optimizer = b"}(" + text("state") + b"}K\0" + state + b"s" + text("param_groups")
    optimizer += b"]" + group + b"au"
    model = b"}" + text("w") + tensor("0", 0, (4,), (1,)) + b"s"
    whole = b"\x80\2}(" + text("model") + model + text("optimizer") + optimizer + b"u."
    (folder / "source.pt").write_bytes(torch_file(whole, {"0": bytes(16)}))


# -- manifest.json


def in_manifest(change: Callable[[dict[str, Any]], Any], folder: Path) -> None:
    path = copy_of("universal", folder) / "manifest.json"
    document = json.loads(path.read_bytes())
    document = change(document) or document
    if isinstance(document, dict) and "crc32" in document:
        document["crc32"] = checksum(document)
    path.write_text(json.dumps(document))


def nested(levels: int) -> Any:
    value: Any = []
    for _ in range(levels):
        value = [value]
    return value


WRONG = {
    "null": None, "true": True, "-1": -1, "text": "a", "list": [], "object": {},
    "NaN": float("nan"), "infinity": float("inf"), "10**400": 10**400, "2**64": 1 << 64, "0.5": 0.5,
    "list of lists": [[[]]], "object of objects": {"a": {"b": {}}}, "deep": nested(200),
}  # fmt: skip
PLACES: dict[str, tuple[str | int, ...]] = {
    "zckpt": ("zckpt",), "source": ("source",), "dp": ("source", "dp"),
    "tag": ("source", "tag"), "stage": ("source", "zero_stage"), "version": ("source", "version"),
    "format": ("source", "format"), "step": ("step",), "optimizer": ("optimizer",),
    "groups": ("groups",), "a group": ("groups", 0), "lr": ("groups", 0, "lr"),
    "betas": ("groups", 0, "betas"), "parameters": ("parameters",),
    "a parameter": ("parameters", "fc1.weight"), "shape": ("parameters", "fc1.weight", "shape"),
    "trainable": ("parameters", "fc1.weight", "trainable"),
    "group": ("parameters", "fc1.weight", "group"),
    "its step": ("parameters", "fc1.weight", "step"),
    "scalars": ("parameters", "fc1.weight", "scalars"),
    "aliases": ("parameters", "fc1.weight", "aliases"), "buffers": ("buffers",),
    "entries": ("entries",), "an entry": ("entries", "fc1.weight/master"),
    "dtype": ("entries", "fc1.weight/master", "dtype"),
    "entry's shape": ("entries", "fc1.weight/master", "shape"),
    "crc32": ("entries", "fc1.weight/master", "crc32"),
    "fragments": ("entries", "fc1.weight/master", "fragments"), "files": ("files",),
    "a file": ("files", "master.safetensors"), "size": ("files", "master.safetensors", "size"),
    "state": ("state",), "engine": ("state", "engine"), "config": ("state", "engine", "config"),
    "engine's dtype": ("state", "engine", "dtype"), "step place": ("state", "optimizer"),
    "steps": ("steps",), "left_out": ("left_out",), "warnings": ("warnings",),
    "inferred": ("inferred",), "tuples": ("tuples",), "checksum": ("crc32",),
    "counters": ("state", "counters"), "scheduler": ("state", "lr_scheduler"),
    "module": ("state", "module"), "client state": ("state", "client_state"),
}  # fmt: skip


def at(place: tuple[str | int, ...], value: Any) -> Callable[[dict[str, Any]], None]:
    def change(document: dict[str, Any]) -> None:
        container: Any = document
        for key in place[:-1]:
            container = container[key] if isinstance(key, int) else container.setdefault(key, {})
        if container is None:
            return
        container[place[-1]] = value

    return change


INERT = {
    "an unknown tag": {"$unknown": 1},
    "a tuple of nothing": {"$tuple": 1},
    "a dictionary with a list as its key": {"$dict": [[[], 1]]},
    "a set of dictionaries": {"$set": [{}]},
    "bytes that are no base64": {"$bytes": "!"},
    "a number of a million digits": {"$int": "0x" + "f" * 1_000_000},
    "a number of letters": {"$int": "xyz"},
    "a scalar of text": {"$scalar": ["a", "F32"]},
    "a scalar of an unknown type": {"$scalar": [1, "F99"]},
    "a scalar of ten elements": {"$scalar": [1, "F32", [10]]},
    "a tensor without an entry": {"$tensor": "nowhere"},
    "a tensor of a number": {"$tensor": 5},
    "an object of no class": {"$object": {"function": 1, "arguments": [], "state": None}},
    "an object of half its parts": {"$object": {"function": {"$global": "a.b"}}},
    "a class with a line's end": {"$global": "os\n.system"},
    "complex text": {"$complex": ["a", "b"]},
    "tuples of one hash": {"$dict": [[{"$int": hex(number)}, 1] for number in colliding(50_000)]},
    "200 levels": nested(200),
    "900 levels": nested(900),
}


def raw_manifest(data: bytes, folder: Path) -> None:
    (copy_of("universal", folder) / "manifest.json").write_bytes(data)


RAW_MANIFESTS = {
    "100,000 levels": b'{"zckpt": 1, "source": ' + b"[" * 100_000,
    "a number of 5000 digits": b'{"zckpt": 1, "source": {}, "step": ' + b"9" * 5000 + b"}",
    "3,000,000 lists": b'{"zckpt": 1, "source": [' + b"[]," * 3_000_000 + b"[]]}",
    "invalid UTF-8": b'{"zckpt": 1, "source": "\xff\xfe"}',
    "no object": b'"zckpt" "source"',
    "an array": b'["zckpt", "source", "step"]',
    "two values": b'{"zckpt": 1, "source": 2} {}',
    "9 MB of spaces": b'{"zckpt": 1, "source": 1' + b" " * 9_000_000,
}


def overlapping_entries(document: dict[str, Any]) -> None:
    """20,000 tensors of the same bytes."""
    entry = document["entries"]["fc1.weight/master"]
    numel = entry["shape"][0] * entry["shape"][1]
    size = document["files"]["master.safetensors"]["size"]
    part = {"start": 0, "stop": numel, "file": "master.safetensors",
            "offset": size - 4 * numel, "length": 4 * numel}  # fmt: skip
    for number in range(20_000):
        document["entries"][f"x{number}/param"] = {**entry, "fragments": [part]}
        document["parameters"][f"x{number}"] = document["parameters"]["fc1.weight"]


# -- safetensors


def safetensors_file(header: Any, data: bytes = bytes(24), length: int | None = None) -> bytes:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    stated = len(encoded) if length is None else length
    return (stated % (1 << 64)).to_bytes(8, "little") + encoded + data


def stored(dtype: Any, shape: Any, offsets: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


SAFETENSORS = {
    "a header of 2**63": safetensors_file({}, length=1 << 63),
    "a header of 101 MB": safetensors_file({}, length=101_000_000),
    "a header longer than the file": safetensors_file({}, length=1000),
    "two of one name": safetensors_file(b'{"a": {"dtype":"U8","shape":[0],"data_offsets":[0,0]},'
                                        b'"a": {"dtype":"U8","shape":[24],"data_offsets":[0,24]}}'),
    "overlapping tensors": safetensors_file(
        {"a": stored("U8", [16], [0, 16]), "b": stored("U8", [16], [8, 24])}),
    "a hole": safetensors_file({"a": stored("U8", [8], [0, 8]), "b": stored("U8", [8], [16, 24])}),
    "offsets of 2**62": safetensors_file({"a": stored("U8", [1 << 62], [0, 1 << 62])}),
    "offsets of 10**400": safetensors_file({"a": stored("U8", [10**400], [0, 10**400])}),
    "negative offsets": safetensors_file({"a": stored("U8", [24], [-24, 0])}),
    "offsets backwards": safetensors_file({"a": stored("U8", [24], [24, 0])}),
    "three offsets": safetensors_file({"a": stored("U8", [24], [0, 12, 24])}),
    "an unknown type": safetensors_file({"a": stored("F99", [24], [0, 24])}),
    "a type that is a list": safetensors_file({"a": stored([], [24], [0, 24])}),
    "a shape that is text": safetensors_file({"a": stored("U8", "24", [0, 24])}),
    "NaN as a size": safetensors_file({"a": stored("U8", [float("nan")], [0, 24])}),
    "metadata that is a list": safetensors_file(
        {"__metadata__": [1], "a": stored("U8", [24], [0, 24])}),
    "a number for a tensor": safetensors_file({"a": 5}),
    "a list for a header": safetensors_file([]),
    "100,000 levels": safetensors_file(b"[" * 100_000),
    "no JSON": safetensors_file(b"\xff" * 100),
}  # fmt: skip


def in_safetensors(data: bytes, folder: Path) -> None:
    (copy_of("universal", folder) / "master.safetensors").write_bytes(data)


def only_safetensors(data: bytes, folder: Path) -> None:
    (folder / "source").mkdir()
    (folder / "source" / "model.safetensors").write_bytes(data)
    ROOT.mkdir(exist_ok=True)
    shutil.copy(converted("gathered", str(ROOT)) / "optim.pt", folder / "source" / "optimizer.pt")


# -- zips


def good_zip() -> bytearray:
    model = b"}" + text("w") + tensor("0", 0, (4,), (1,)) + b"s"
    return bytearray(torch_file(b"\x80\2}" + text("model") + model + b"s.", {"0": bytes(16)}))


def patched(where: bytes, offset: int, value: bytes) -> bytes:
    """A good zip with other bytes at an offset from the last place of `where`."""
    data = good_zip()
    place = data.rindex(where) + offset
    data[place : place + len(value)] = value
    return bytes(data)


def zips() -> dict[str, bytes]:
    members = {"a/data.pkl": b"\x80\2}.", "a/byteorder": b"little"}
    end, entry = b"PK\5\6", b"PK\1\2"
    two_pickles = zip_of({"a/data.pkl": b"\x80\2}.", "b/data.pkl": b"\x80\2}."})
    locator = b"PK\6\7" + struct.pack("<IQI", 0, 1 << 62, 1)
    good = bytes(good_zip())
    record = b"PK\6\6" + struct.pack("<QHHIIQQQQ", 44, 45, 45, 0, 0, 1 << 40, 1 << 40, 1 << 62, 0)
    with_record = good[: good.rindex(end)] + record
    with_record += (
        b"PK\6\7" + struct.pack("<IQI", 0, good.rindex(end), 1) + good[good.rindex(end) :]
    )
    return {
        "65535 members": patched(end, 10, b"\xff\xff"),
        "a directory of 4 GB": patched(end, 12, b"\xfe\xff\xff\xff"),
        "a directory behind the end": patched(end, 16, b"\xfe\xff\xff\xff"),
        "a member of 4 GB": patched(entry, 20, b"\xfe\xff\xff\xff" * 2),
        "a member of zip64 without its field": patched(entry, 20, b"\xff\xff\xff\xff" * 2),
        "a compressed member": patched(entry, 10, b"\x08\0"),
        "an encrypted member": patched(entry, 8, b"\x01\0"),
        "a member behind the directory": patched(entry, 42, b"\xf0\xff\xff\x7f"),
        "a local header of something else": patched(entry, 42, b"\x01\0\0\0"),
        "two pickles": two_pickles,
        "no pickle": zip_of({"a/b": b""}),
        "zip64's record at 2**62": good[: good.rindex(end)] + locator + good[good.rindex(end) :],
        "zip64's record of 2**40 members": with_record,
        "an end alone": good[good.rindex(end) :],
        "no end": good[: good.rindex(end)],
        "a comment of 65535 bytes": patched(end, 20, b"\xff\xff") + b"PK\5\6" * 10_000,
        "big-endian": zip_of({**members, "a/byteorder": b"big"}),
        "empty names": zip_of({"": b"", **members}),
        "100,000 members": zip_of({**members, **{f"a/data/{n}": b"" for n in range(60_000)}}),
        "a name of 60,000 characters": zip_of({"a" * 60_000 + "/data.pkl": b"\x80\2}."}),
        "nothing": b"",
        "one byte": b"\x80",
        "two bytes": b"\x80\2",
        "a local header alone": b"PK\3\4",
    }


def lone(data: bytes, folder: Path) -> None:
    (folder / "source.pt").write_bytes(data)


def legacies() -> dict[str, bytes]:
    good = legacy_file()
    magic = pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(1001, 2)
    system = pickle.dumps({"little_endian": True}, 2)
    return {
        "a storage of 2**62 elements": good[:-48] + struct.pack("<q", 1 << 62) + good[-40:],
        "a storage of -1 elements": good[:-48] + struct.pack("<q", -1) + good[-40:],
        "cut short": good[:-20],
        "another magic number": pickle.dumps(5, 2) + good,
        "another protocol": pickle.dumps(0x1950A86A20F9469CFC6C, 2) + pickle.dumps(7, 2),
        "no value": magic + system,
        "a list as system": magic + pickle.dumps([], 2) + pickle.dumps({}, 2),
        "a list within itself": magic + system + b"\x80\2]q\1h\1a." + pickle.dumps([], 2),
        "storages of no tensor": magic + system + pickle.dumps({}, 2) + pickle.dumps(["a"] * 9, 2),
        "storages that are numbers": magic + system + pickle.dumps({}, 2) + pickle.dumps(5, 2),
        "1,000,000 storages": magic + system + b"\x80\2}" + text("a") + tensor("0", 0, (4,), (1,))
        + b"s." + b"\x80\2](" + text("0") + b"q\1" + b"h\1" * 1_000_000 + b"e.",
    }  # fmt: skip


# -- HDF5


def hdf5(change: Callable[[Any, Any], None], folder: Path) -> None:
    import h5py

    source = copy_of("onnxruntime", folder)
    with h5py.File(min(source.iterdir()), "r+") as file:
        change(h5py, file)


def _huge(h5py: Any, file: Any) -> None:
    space = h5py.h5s.create_simple((1 << 40,))
    h5py.h5d.create(file["model"].id, b"huge", h5py.h5t.IEEE_F32LE, space)


def _circle(h5py: Any, file: Any) -> None:
    file["model/circle"] = file["/"]


def _deep(h5py: Any, file: Any) -> None:
    group = file["model"]
    for _ in range(500):
        group = group.create_group("g")


def _attributes(h5py: Any, file: Any) -> None:
    group = h5py.h5g.open(file.id, b"model")
    for number in range(20_000):
        space = h5py.h5s.create(h5py.h5s.SCALAR)
        h5py.h5a.create(group, f"a{number}".encode(), h5py.h5t.STD_I8LE, space)


def _external(h5py: Any, file: Any) -> None:
    file["model"].create_dataset("outside", (4,), "f4", external=[("/etc/passwd", 0, 16)])


def _linked(h5py: Any, file: Any) -> None:
    file["model/linked"] = h5py.ExternalLink("/etc/passwd", "/a")


def _soft(h5py: Any, file: Any) -> None:
    file["model/soft"] = h5py.SoftLink("/model/soft")


def _virtual(h5py: Any, file: Any) -> None:
    layout = h5py.VirtualLayout((4,), "f4")
    layout[:] = h5py.VirtualSource("/etc/passwd", "a", (4,))
    file["model"].create_virtual_dataset("virtual", layout)


def _compressed(h5py: Any, file: Any) -> None:
    file["model"].create_dataset("packed", (1 << 24,), "f4", compression="gzip")


def _compound(h5py: Any, file: Any) -> None:
    file["model"].create_dataset("compound", (4,), [("a", "f4"), ("b", "i8")])


def _numbers(h5py: Any, file: Any) -> None:
    options = file["trainer_options"]
    for name in ("world_size", "world_rank", "zero_stage"):
        if name in options:
            del options[name]
        options[name] = -1


def _ranks(h5py: Any, file: Any) -> None:
    del file["trainer_options/world_size"]
    file["trainer_options/world_size"] = 1 << 62


def _text(h5py: Any, file: Any) -> None:
    del file["trainer_options/world_size"]
    file["trainer_options/world_size"] = "four"


HDF5 = {
    "a dataset of 4 TB": _huge, "a group in itself": _circle, "500 groups in each other": _deep,
    "20,000 attributes": _attributes, "a dataset in another file": _external,
    "a link to another file": _linked, "a link to itself": _soft, "a virtual dataset": _virtual,
    "a compressed dataset": _compressed, "a compound dataset": _compound,
    "negative numbers": _numbers, "2**62 ranks": _ranks, "text as a number": _text,
}  # fmt: skip


# -- JSON beside checkpoints

BESIDE = (
    *("trainer_state.json", "config.json", "adapter_config.json", "generation_config.json"),
    *("model.safetensors.index.json", "pytorch_model.bin.index.json", "tokenizer_config.json"),
)
DOCUMENTS = {
    "an array": b"[]", "text": b'"a"', "null": b"null", "nothing": b"", "no JSON": b"{",
    "invalid UTF-8": b'{"a": "\xff"}', "100,000 levels": b"[" * 100_000,
    "numbers for values": b'{"best_model_checkpoint": 5, "global_step": [], "weight_map": 7, '
    b'"tie_word_embeddings": {}, "model_type": [], "architectures": 3, "peft_type": {}}',
    "lists for values": b'{"best_model_checkpoint": [1], "weight_map": {"a": [1], "b": {}}, '
    b'"model_type": [[]], "architectures": [[]], "modules_to_save": [[1]]}',
    "huge numbers": b'{"global_step": 1e999, "weight_map": {"a": "' + b"b" * 70_000 + b'"}, '
    b'"best_global_step": 1' + b"0" * 4000 + b"}",
    "files outside": b'{"weight_map": {"a": "../../../../etc/passwd", "b": "/etc/passwd"}}',
}  # fmt: skip


def beside(name: str, data: bytes, folder: Path) -> None:
    ROOT.mkdir(exist_ok=True)
    weights = Path(converted("gathered", str(ROOT))) / "model.pt"
    (folder / "source").mkdir()
    if name.startswith("model.safetensors"):
        (folder / "source" / name).write_bytes(data)
        return
    shutil.copy(weights, folder / "source" / "model.pt")
    if name.startswith("pytorch_model"):
        (folder / "source" / "model.pt").unlink()
    (folder / "source" / name).write_bytes(data)


# -- all of them


def _all() -> Iterator[tuple[str, Sample]]:
    def bound(write: Callable[[Any, Path], None], value: Any) -> Write:
        return functools.partial(write, value)

    for values, is_refused in ((REFUSED_VALUES, True), (HARMLESS_VALUES, False)):
        for name, value in values.items():
            yield f"torch: {name}", Sample("unpickler", bound(alone, value), is_refused)
            yield f"deepspeed: {name}", Sample("deepspeed", bound(in_deepspeed, value), is_refused)
            is_much = is_refused and name not in LITTLE_IN_METADATA
            yield f"dcp: {name}", Sample("dcp-metadata", bound(in_metadata, value), is_much)
            yield f"ort: {name}", Sample("onnxruntime", bound(in_onnxruntime, value), is_refused)
    for tensors, is_refused in ((REFUSED_TENSORS, True), (HARMLESS_TENSORS, False)):
        for name, value in tensors.items():
            yield f"tensor: {name}", Sample("torch-zip", bound(weight, value), is_refused)
    many = b"}(" + b"".join(
        text(str(n)) + tensor("0", 0, (100, n + 1), (0, 0)) for n in range(9000)
    )
    yield "tensor: 9000 expanded ones", Sample("torch-zip", bound(weight, many + b"u"), True)
    for name, value in NUMBERS.items():
        yield f"step: {name}", Sample("gathered", bound(as_step, value))
    for name, value in REFUSED_VALUES.items():
        yield f"step: {name}", Sample("gathered", bound(as_step, value), True)
    for where, place in PLACES.items():
        for name, value in WRONG.items():
            yield (
                f"manifest: {where} is {name}",
                Sample("manifest", bound(in_manifest, at(place, value))),
            )
    for name, value in INERT.items():
        yield f"inert: {name}", Sample(
            "inert-json", bound(in_manifest, at(("state", "client_state"), {"a": value})),
            name != "a tensor without an entry",
        )  # fmt: skip
    for name, data in RAW_MANIFESTS.items():
        yield f"manifest: {name}", Sample("manifest", bound(raw_manifest, data), True)
    yield (
        "manifest: tensors of the same bytes",
        Sample("manifest", bound(in_manifest, overlapping_entries), True),
    )
    for name, data in SAFETENSORS.items():
        refused = name != "metadata that is a list"
        yield f"safetensors: {name}", Sample("safetensors", bound(in_safetensors, data), True)
        yield f"weights: {name}", Sample("safetensors", bound(only_safetensors, data), refused)
    for name, data in zips().items():
        yield f"zip: {name}", Sample("torch-zip", bound(lone, data), True)
    for name, data in legacies().items():
        yield f"legacy: {name}", Sample("torch-legacy", bound(lone, data), True)
    for name, change in HDF5.items():
        yield f"hdf5: {name}", Sample("hdf5", bound(hdf5, change), name != "20,000 attributes")
    for name in BESIDE:
        for what, data in DOCUMENTS.items():
            yield f"{name}: {what}", Sample("siblings", functools.partial(beside, name, data))


SAMPLES = dict(_all())
"""Every sample by its name; their files are written when they are needed."""
