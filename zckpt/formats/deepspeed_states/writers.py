"""Which files of DeepSpeed's names did another writer than torch.save write?

    mp_rank_00_model_states.pt-0.2    FastPersist (`checkpoint.writer`): part 0 of 2 of the file
    mp_rank_00_model_states.pt        DataStates-LLM (`datastates_ckpt`): 8 bytes with the length of
                                      the JSON that follows, the JSON, tensors, a pickle

zckpt reads neither. DeepSpeed 0.19.8 writes both, and does not load the parts. At stage 3 the names
of FastPersist's files have no numbers: these are whole files of torch.save, and are read.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import NoReturn

from ...core import sources
from ...errors import UnsupportedCheckpoint, ZckptError
from ...files.torchfile import peek

ENDING = "_states.pt"
NUMBERS = re.compile(r"\d+\.\d+")  # of the part, and how many there are
DATASTATES = b'"datastates_metadata": {"data_offsets": ['
LAST = 200  # bytes; the JSON ends with that key


def whole_name(name: str) -> str:
    """The name of the file of which this is a part; other names stay as they are."""
    whole, _, numbers = name.rpartition("-")
    return whole if whole.endswith(ENDING) and NUMBERS.fullmatch(numbers) else name


def is_by_datastates(path: str) -> bool:
    """Whether DataStates-LLM wrote a file with a name of DeepSpeed's."""
    if not path.endswith(ENDING) or not sources.is_file(path):
        return False
    with sources.opened(path) as file:
        length = int.from_bytes(file.read(8), "little")
        if not len(DATASTATES) < length < os.fstat(file.fileno()).st_size:
            return False
        file.seek(8 + max(0, length - LAST))
        return DATASTATES in file.read(min(length, LAST))


def is_foreign(path: str) -> bool:
    """Whether one file is of such a writer."""
    is_part = whole_name(path) != path and sources.is_file(path)
    return is_part or is_by_datastates(path)


def refuse_foreign(folder: str, names: Sequence[str]) -> None:
    """Raises UnsupportedCheckpoint if such a writer wrote these files of a folder."""
    wholes = {name: whole_name(name) for name in names}
    parts = [name for name, whole in wholes.items() if whole not in wholes]
    if parts:
        _refuse_part(os.path.join(folder, min(parts)))
    files = sorted(name for name in names if name.endswith(ENDING))
    if files and is_by_datastates(path := os.path.join(folder, files[0])):
        raise UnsupportedCheckpoint(
            f"{path} was saved by DataStates-LLM, whose files zckpt does not read",
            hint="save what DataStates' load(path) returns with torch.save, every file under the "
            "same name in another directory, and give that directory",
        )


def _refuse_part(path: str) -> NoReturn:
    try:
        peek(path)
    except ZckptError:
        hint = (
            "DeepSpeed does not join them: save again, without `writer` below `checkpoint` in the "
            "ds_config"
        )
    else:  # torch gives each writer all bytes, unless it was patched for FastPersist
        hint = (
            "each is a whole file of torch.save: copy the directory, rename one part of each file "
            "so that its name ends with .pt, and give the copy"
        )
    raise UnsupportedCheckpoint(
        f"{path} is a part that FastPersist wrote of {whole_name(os.path.basename(path))}, and "
        "zckpt does not read such parts",
        hint=hint,
    )
