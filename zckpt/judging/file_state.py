"""Decides whether a file is empty, only zeros, cut short or unreadable, by its name and bytes."""

from __future__ import annotations

import errno
import json
import struct
import zipfile
import zlib
from typing import BinaryIO

from ..core.checkpoint.manifest import Sibling
from ..core.storage import sources
from ..core.storage.inventory import State

OF_TORCH = (".pt", ".pth", ".bin", ".pkl", ".ckpt")
OF_JSON, OF_TENSORS = ".json", ".safetensors"
MOST = 64 << 20  # bytes; a file up to this size is read completely
BLOCK = 1 << 20
OLD = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."
"""The first bytes of a file that torch.save wrote before 1.6: a pickle of a number."""
PICKLE = b"\x80"
MALFORMED_ZIP = (ValueError, RuntimeError, OverflowError, zlib.error, struct.error)
"""Errors besides BadZipFile that zipfile raises for damaged directories."""
MAX_HEADER = 100_000_000  # bytes, of safetensors 0.6


def state_of(item: Sibling) -> State:
    """Whether a file is ok, empty, zeros, cut or unreadable, as far as its bytes show.

    Of a large file, only the beginning and the end are read.
    """
    if not item.name.endswith((*OF_TORCH, OF_JSON, OF_TENSORS)):
        return "ok"
    if item.size == 0:
        return "empty"
    with sources.opened(item.path) as file:
        if _has_zeros_alone(file):
            return "zeros"
        file.seek(0)
        if item.name.endswith(OF_JSON):
            return _state_of_json(file) if item.size <= MOST else "ok"
        if item.name.endswith(OF_TENSORS):
            return _state_of_tensors(file, item.size)
        return _state_of_torch(file, item.size)


def _has_zeros_alone(file: BinaryIO) -> bool:
    while content := file.read(1 << 16):
        if content.count(0) < len(content):
            return False
    return True


def _state_of_json(file: BinaryIO) -> State:
    try:
        json.load(file)
    except (ValueError, RecursionError):
        return "unreadable"
    return "ok"


def _state_of_tensors(file: BinaryIO, size: int) -> State:
    """The state of a safetensors file: is its header readable, and are all tensors there?"""
    length = int.from_bytes(file.read(8), "little")
    if length > min(size - 8, MAX_HEADER):
        return "cut" if length <= MAX_HEADER else "unreadable"
    try:
        header = json.loads(file.read(length))
        ends = [each["data_offsets"][1] for key, each in header.items() if key != "__metadata__"]
        return "cut" if 8 + length + max(ends, default=0) > size else "ok"
    except (ValueError, RecursionError, AttributeError, KeyError, IndexError, TypeError):
        return "unreadable"


def _state_of_torch(file: BinaryIO, size: int) -> State:
    """The state of a torch.save file, which is a zip, or a pickle from before torch 1.6.

    If the zip is small and states CRC-32s, they are compared.
    """
    head = file.read(len(OLD))
    if not head.startswith(b"PK\3\4"):
        if head.startswith(OLD):
            return "ok"
        if zipfile.is_zipfile(file) or not head.startswith(PICKLE):
            return "unreadable"
        file.seek(size - 1)
        return "ok" if file.read(1) == b"." else "cut"
    try:
        parts = zipfile.ZipFile(file)
    except (zipfile.BadZipFile, EOFError):
        return "cut"  # the directory comes after the members
    except MALFORMED_ZIP:
        return "unreadable"
    except OSError as error:
        if error.errno != errno.EINVAL:  # the directory states a negative offset
            raise
        return "unreadable"
    with parts:
        for part in parts.infolist() if size <= MOST else ():
            # a program may save without checksums; torch compresses nothing
            if part.CRC and part.compress_type == zipfile.ZIP_STORED and not _is_sound(parts, part):
                return "unreadable"
    return "ok"


def _is_sound(parts: zipfile.ZipFile, part: zipfile.ZipInfo) -> bool:
    try:
        with parts.open(part) as content:
            while content.read(BLOCK):
                pass
    except (zipfile.BadZipFile, EOFError, *MALFORMED_ZIP):
        return False
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    return True
