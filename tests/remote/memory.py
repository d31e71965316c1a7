"""A filesystem in memory with the methods of fsspec's that zckpt calls, and with faults."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class Memory:
    """Objects by key. `asked` are the ranges that were read, `put` the keys that were written."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.versions: dict[str, int] = {}
        self.asked: list[tuple[str, int, int]] = []
        self.put: list[str] = []
        self.answer: Callable[[str, bytes], bytes] = lambda key, data: data
        self.arrive: Callable[[str, bytes], bytes] = lambda key, data: data

    @classmethod
    def of(cls, folder: Path, key: str) -> Memory:
        """The files of a folder below a key."""
        own = cls()
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                own.write(f"{key}/{path.relative_to(folder)}", path.read_bytes())
        return own

    def write(self, key: str, data: bytes) -> None:
        self.objects[key] = data
        self.versions[key] = self.versions.get(key, 0) + 1

    def _about(self, key: str) -> dict[str, Any]:
        about = {"name": key, "size": len(self.objects[key]), "type": "file"}
        return {**about, "ETag": f"v{self.versions[key]}"}

    def find(self, key: str, detail: bool) -> dict[str, dict[str, Any]]:
        assert detail
        return {each: self._about(each) for each in self.objects if each.startswith(f"{key}/")}

    def isdir(self, key: str) -> bool:
        return any(not key or each.startswith(f"{key}/") for each in self.objects)

    def ls(self, key: str, detail: bool) -> list[dict[str, Any]]:
        assert detail
        return [self._about(each) for each in self.objects if each.rpartition("/")[0] == key]

    def invalidate_cache(self) -> None:
        pass

    def info(self, key: str) -> dict[str, Any]:
        if key not in self.objects:
            raise FileNotFoundError(key)
        return self._about(key)

    def cat_file(self, key: str, start: int, end: int) -> bytes:
        self.asked.append((key, start, end))
        return self.answer(key, self.objects[key][start:end])

    def makedirs(self, key: str, exist_ok: bool) -> None:
        assert exist_ok

    def rm_file(self, key: str) -> None:
        del self.objects[key]

    @contextmanager
    def open(self, key: str, mode: str) -> Iterator[io.BytesIO]:
        assert mode == "wb"
        self.put.append(key)
        file = io.BytesIO()
        yield file
        self.write(key, self.arrive(key, file.getvalue()))
