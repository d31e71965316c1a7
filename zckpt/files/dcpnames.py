"""How are the files of torch.distributed.checkpoint called, and which keys do they have?"""

from __future__ import annotations

import os
from collections.abc import Sequence

from ..core import sources

METADATA = ".metadata"
ITEMS = ".distcp"
MAX_METADATA = 2 << 30  # bytes; a box takes 140 to 210, and 4 KB of memory once it is read
AT_ONCE = 1 << 20  # bytes


def names_any(folder: str, texts: Sequence[bytes]) -> bool:
    """Whether the `.metadata` of a folder has one of the texts, which are parts of keys.

    It is not unpickled: keys stand in it as they are. One that is too large to be read has none.
    """
    path = os.path.join(folder, METADATA)
    if not sources.is_file(path) or sources.size(path) > MAX_METADATA:
        return False
    rest, longest = b"", max(map(len, texts))
    with sources.opened(path) as file:
        while block := file.read(AT_ONCE):
            rest += block
            if any(text in rest for text in texts):
                return True
            rest = rest[-longest:]
    return False
