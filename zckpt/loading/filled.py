"""A file object for torch.load: a file of the target whose tensors come from the source checkpoint.

torch.load reads the zip structure of a file, and then each storage's bytes into the memory that it
has just allocated. The zip structure comes from the shell, a file with holes where tensors go. The
bytes of a storage are read from the source into that memory. So no second copy of a tensor exists
at any time.

The alternative was to map the shell into memory (`torch.load(mmap=True)`) and to fill the mapping.
It was turned down: the page cache would hold as many zeros as the tensors have bytes.
"""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any, cast

import torch

from ..copying.assembling import Assembler
from ..copying.journal import Passed
from ..core.passes import plan
from ..core.passes.plan import TargetPiece
from ..core.storage.sources import close, open_file
from ..errors import UnsupportedCheckpoint


class FilledFile(io.RawIOBase):
    """A file of torch.save whose tensor data is read from the source checkpoint when it is needed.

    path       the shell: a file with headers, and holes for tensor data
    records    {offset of a storage in the file: its length in bytes}
    failure    the first error of reading the source, which torch.load hides
    """

    def __init__(
        self,
        path: str,
        records: Mapping[int, int],
        pieces: Sequence[TargetPiece],
        assembler: Assembler,
        chunk: int,
    ) -> None:
        super().__init__()
        self.path = path
        self.failure: BaseException | None = None
        self._shell = open_file(path)
        self._size = os.fstat(self._shell).st_size
        self._records, self._pieces = records, pieces
        self._assembler, self._chunk = assembler, chunk
        self._position = 0
        self._empty = {piece.offset for piece in pieces}  # where nothing has been filled yet

    @property
    def file(self) -> int:
        return self._shell

    def passed(self, data: memoryview, start: int) -> Iterator[Passed]:
        """Yields nothing, because no checksums of the loaded bytes are stored.

        Target files on a disk implement this method to yield the checksums of `data`: the bytes
        that are written at offset `start`.
        """
        return iter(())

    def load(self, map_location: Any) -> Any:
        """Loads this file with torch.load.

        If the source could not be read, raises the error of the source, not torch's.
        """
        try:
            value = torch.load(cast(IO[bytes], self), map_location=map_location, weights_only=False)
        except Exception:
            if self.failure is not None:
                raise self.failure from None
            raise
        if self._empty:
            raise UnsupportedCheckpoint(
                "target-unsupported",
                f"torch {torch.__version__} reads the storages of a file in a way that zckpt does "
                "not support",
                hint="zckpt.auto_resume(RUN) writes a copy for this number of ranks instead",
            )
        return value

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        bases = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}
        self._position = bases[whence] + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Reads the next bytes of the file into the buffer; returns their number.

        Bytes of tensors come from the source checkpoint, all others from the file at `path`.
        """
        view = memoryview(buffer).cast("B")
        start = self._position
        count = max(0, min(len(view), self._size - start))
        try:
            if self.failure is not None:
                return 0
            if count and self._records.get(start) == count:
                self._fill(start, view[:count])
            else:
                count = os.preadv(self._shell, [view[:count]], start)
        except BaseException as error:
            self.failure = error
            return 0
        self._position += count
        return count

    def _fill(self, start: int, view: memoryview) -> None:
        stop = start + len(view)
        for chunk in plan.chunks(self.path, (start, stop), self._pieces, self._chunk):
            at = chunk.offset - start
            self._assembler.assemble(self, chunk, view[at : at + chunk.length])
            self._empty.difference_update(piece.offset for piece in chunk.pieces)

    def close(self) -> None:
        if not self.closed:
            close(self._shell)
        super().close()
