"""Names of element types in safetensors, torch and torch's storages, and their sizes in bytes."""

from __future__ import annotations

import struct
from typing import Annotated

from msgspec import Meta

SIZES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1,
    "BOOL": 1, "C64": 8,
}  # fmt: skip

Dtype = Annotated[str, Meta(pattern=rf"\A({'|'.join(SIZES)})\Z")]

TORCH_NAMES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "I64": "int64", "I32": "int32", "I16": "int16", "I8": "int8",
    "U64": "uint64", "U32": "uint32", "U16": "uint16", "U8": "uint8",
    "BOOL": "bool", "C64": "complex64",
}  # fmt: skip

FROM_TORCH = {torch_name: name for name, torch_name in TORCH_NAMES.items()}

STORAGES = {
    "DoubleStorage": "F64", "FloatStorage": "F32", "HalfStorage": "F16",
    "BFloat16Storage": "BF16", "LongStorage": "I64", "IntStorage": "I32", "ShortStorage": "I16",
    "CharStorage": "I8", "ByteStorage": "U8", "BoolStorage": "BOOL",
    "ComplexFloatStorage": "C64", "UntypedStorage": "U8",
}  # fmt: skip

OPTIONS = {"fp32": "F32", "bf16": "BF16", "fp16": "F16"}
"""The values of `--dtype`."""

NUMBERS = frozenset(SIZES) - {"F8_E4M3", "F8_E5M2", "C64"}
"""The types whose values can be compared with values of other types."""

FLOATS = frozenset({"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"})

_PACKED = {
    "F64": "<d", "F32": "<f", "F16": "<e", "I64": "<q", "I32": "<i", "I16": "<h", "I8": "<b",
    "U64": "<Q", "U32": "<I", "U16": "<H", "U8": "<B", "BOOL": "<?",
}  # fmt: skip


def decode(dtype: str, data: bytes) -> float | int | bool:
    """Converts the bytes of one element to a number; raises KeyError for types such as F8_E4M3."""
    if dtype == "BF16":  # the upper half of a float32
        return float(struct.unpack("<f", b"\0\0" + data)[0])
    value: float | int | bool = struct.unpack(_PACKED[dtype], data)[0]
    return value


def encode(dtype: str, value: float | int | bool) -> bytes:
    """Converts one number to the bytes of an element: the inverse of `decode`."""
    if dtype == "BF16":
        return struct.pack("<f", value)[2:]
    return struct.pack(_PACKED[dtype], value)
