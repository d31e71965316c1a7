"""Faults that are planted into copies of real checkpoints, one at a time."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

import zckpt
from zckpt.core.checkpoint.entries import Entry, key_of
from zckpt.core.checkpoint.manifest import Manifest
from zckpt.core.storage.fragments import Extent, Fragment
from zckpt.files.torchfile import Tensor, TorchFile
from zckpt.files.zipdirectory import read_directory

Change = Callable[[bytes], bytes]


def mend(path: str) -> None:
    """Makes the CRCs that a torch file states those of its bytes, as a program would that saved it.

    In the zip's directory, which is what readers trust.
    """
    with open(path, "r+b") as file:
        members = read_directory(file.fileno(), Extent(path, 0, os.path.getsize(path)))
        for member in members.values():
            file.seek(member.offset)
            crc = zlib.crc32(file.read(member.length))
            file.seek(member.entry + 16)
            file.write(struct.pack("<I", crc))


def read_element_bytes(entry: Entry) -> bytes:
    return b"".join(_read(fragment.extent) for fragment in entry.fragments)


def _read(extent: Extent) -> bytes:
    with open(extent.file, "rb") as file:
        file.seek(extent.offset)
        return file.read(extent.length)


def _write(extent: Extent, data: bytes) -> None:
    assert len(data) == extent.length
    with open(extent.file, "r+b") as file:
        file.seek(extent.offset)
        file.write(data)


def change(run: Path, name: str, changed: Change, mended: bool = True) -> None:
    """Rewrites all bytes of a tensor, wherever they are."""
    entry = zckpt.read(run).entries[key_of(name)]
    data = changed(read_element_bytes(entry))
    here = 0
    for fragment in entry.fragments:
        _write(fragment.extent, data[here : here + fragment.extent.length])
        here += fragment.extent.length
    if mended:
        for path in {fragment.extent.file for fragment in entry.fragments}:
            mend(path)


def flip(element: int, size: int, bit: int) -> Change:
    """Flips one bit of one element of `size` bytes."""

    def changed(data: bytes) -> bytes:
        held = bytearray(data)
        held[element * size + bit // 8] ^= 1 << bit % 8
        return bytes(held)

    return changed


def transposed(shape: tuple[int, int]) -> Change:
    def changed(data: bytes) -> bytes:
        items = np.frombuffer(data, f"V{len(data) // (shape[0] * shape[1])}")
        return items.reshape(shape).T.tobytes()

    return changed


def paddings(manifest: Manifest) -> list[Extent]:
    """Bytes of optimizer records that hold tensors, but belong to none."""
    found = []
    for record in manifest.files.records:
        begin, end = record.extent.offset, record.extent.offset + record.extent.length
        pieces = sorted(
            (fragment.extent.offset, fragment.extent.offset + fragment.extent.length)
            for entry in (*manifest.entries.values(), *manifest.replicas)
            for fragment in entry.fragments
            if fragment.extent.file == record.extent.file and begin <= fragment.extent.offset < end
        )
        here = begin
        for start, stop in [*pieces, (end, end)] if pieces else []:
            if start > here:
                found.append(Extent(record.extent.file, here, start - here))
            here = max(here, stop)
    return [extent for extent in found if "optim_states" in extent.file]


def flip_padding(run: Path, mended: bool) -> None:
    extent = paddings(zckpt.read(run))[0]
    data = bytearray(_read(extent))
    data[0] ^= 1
    _write(extent, bytes(data))
    if mended:
        mend(extent.file)


def optimizer_files(run: Path) -> list[Path]:
    return sorted(run.rglob("*optim_states.pt"))


def swap_ranks(run: Path, *, renamed: bool = True) -> None:
    """The first two ranks' files under each other's name; see `swap_files`."""
    swap_files(*optimizer_files(run)[:2], renamed=renamed)


def swap_files(one: Path, other: Path, *, renamed: bool = True) -> None:
    """Two files under each other's name.

    If `renamed`, the folders in their zips are too, as if a program had saved them so.
    """
    contents = one.read_bytes()
    copy_file(other, one, renamed=renamed)
    other.write_bytes(_saved_as(contents, one, other) if renamed else contents)


def copy_file(source: Path, target: Path, *, renamed: bool = True) -> None:
    """A file under another name too; `renamed` as for `swap_files`."""
    contents = source.read_bytes()
    target.write_bytes(_saved_as(contents, source, target) if renamed else contents)


def _saved_as(contents: bytes, old: Path, new: Path) -> bytes:
    """A file as if a program had saved it under another name, if both names have one length."""
    before, after = (path.stem.encode() + b"/" for path in (old, new))
    return contents.replace(before, after) if len(before) == len(after) else contents


def raise_step(run: Path, ranks: int) -> None:
    """The step of all groups in the first `ranks` files, one more than it is."""
    for path in optimizer_files(run)[:ranks]:
        file = TorchFile(str(path))
        state = file.value["optimizer_state_dict"]
        base = state.get("base_optimizer_state") or state["optimizer_state_dict"]
        for held in base["state"].values():
            step = held["step"]
            assert isinstance(step, Tensor)
            extent = file.extent(step)
            (number,) = struct.unpack("<f", _read(extent))
            _write(extent, struct.pack("<f", number + 1))
        mend(str(path))


def permute(run: Path) -> None:
    """Every flat group as if its first two parameters were flattened in the other order.

    What a reader sees that does not undo `round_robin_gradients`.
    """
    manifest = zckpt.read(run)
    names = [name for name, held in manifest.parameters.items() if held.group == 0][:2]
    for slot in ("master", "exp_avg", "exp_avg_sq"):
        entries = [manifest.entries[name, slot] for name in names]
        both = [read_element_bytes(entry) for entry in entries]
        data, here = b"".join(reversed(both)), 0
        for entry in entries:
            for fragment in entry.fragments:
                length = fragment.extent.length
                _write(fragment.extent, data[here : here + length])
                here += length
    for path in optimizer_files(run):
        mend(str(path))


def shifted(fragment: Fragment) -> Fragment:
    """The fragment as a reader would see it that is wrong by one element."""
    size = fragment.extent.length // (fragment.stop - fragment.start)
    extent = fragment.extent
    return Fragment(
        fragment.start, fragment.stop, Extent(extent.file, extent.offset - size, extent.length)
    )
