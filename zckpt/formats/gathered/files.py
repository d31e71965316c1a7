"""Which files make a checkpoint of torch.save: by their names, and by what they hold.

    ckpt.pt, last.ckpt                              one file: {"model": ..., "optimizer": ..., ...}
    model.pt + optim.pt                             whole, by any of the names below
    model.safetensors + optimizer.pt                Hugging Face Trainer, Accelerate, without FSDP
    adapter_model.safetensors + optimizer.pt        the same with PEFT
    model_world_size_W_rank_R.pt + optim_...        ranks' parts (FSDP, verl's names)
    pytorch_model_fsdp_0_rankR.bin + optimizer_...  ranks' parts (Accelerate)
    model.pt + optim_rank_R.pt                      ZeroRedundancyOptimizer's local states

Files are told apart by their names, state dicts by what they hold (see state.py).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...errors import (
    AmbiguousCheckpoint,
    InconsistentCheckpoint,
    NotACheckpoint,
    ZckptError,
    listed,
)
from ...files.torchfile import Tensor, TorchFile
from ...training import peft
from . import ranked

ENDINGS = (".pt", ".pth", ".bin", ".ckpt", ".tar")
RANK = re.compile(
    r"(?P<stem>.*?)[._-]?(world_size_(?P<world>\d+)_)?(?<![a-z])rank_?(?P<rank>\d+)\.(pt|pth|bin|ckpt)"
)
WHOLE = {  # names of whole files, the likeliest first
    "model": (
        *("model.pt", "model.pth", "model.bin", "pytorch_model_fsdp.bin", "pytorch_model.bin"),
        *("pytorch_model.bin.index.json", "model.safetensors", "model.safetensors.index.json"),
        *peft.WEIGHTS,
    ),
    "optim": (
        *("optim.pt", "optimizer.pt", "optim.pth", "optimizer.pth", "optim.bin", "optimizer.bin"),
    ),
    "extra": ("extra.pt",),
}
# of other formats: DeepSpeed's ranks, ONNX Runtime's, Megatron-Core's
OTHERS = re.compile(
    r".*(_model_states|_optim_states)\.pt|.*\.ort\.pt|model_optim_rng\.pt|distrib_optim\.pt"
    r"|training_args\.bin|rng_state.*\.pth|(scheduler|scaler)\.(pt|bin)"
)
DEPTH = 4


@dataclass(slots=True)
class Files:
    """Paths of one checkpoint: whole ones by key, and those of ranks by key and rank.

    Keys are places in the tree; None where one kind of file holds the tree itself.
    """

    whole: dict[str | None, str] = field(default_factory=dict)
    ranks: dict[str | None, dict[int, str]] = field(default_factory=dict)
    world: int | None = None


def detect(path: str) -> list[str]:
    """One nameless checkpoint where a model's and an optimizer's state are, or any one file is."""
    if os.path.isfile(path):
        return [""] if _is_one(path) else []
    if not os.path.isdir(path) or not os.access(path, os.R_OK | os.X_OK):
        return []
    names = _names(path)
    found = _whole(names)
    if "optim" in found and "model" in found:
        return [""]
    return [""] if any(_is_part(path, name) for name in names) else []


def detect_weak(path: str) -> list[str]:
    """What other formats hold too, so that it is one only where these are not.

    A model's weights alone, or a folder of files of any names, by which they are told apart.
    """
    if os.path.isfile(path):
        return [""] if path.endswith(".safetensors") else []
    if not os.path.isdir(path) or not os.access(path, os.R_OK | os.X_OK):
        return []
    names = _names(path)
    if "model" in _whole(names) or len(_safetensors(names)) == 1:
        return [""]
    single = _singles(path, names)
    return single if len(single) > 1 else [""] * len(single)


def _names(folder: str) -> list[str]:
    with os.scandir(folder) as items:
        return sorted(item.name for item in items if item.is_file())


def _whole(names: Sequence[str]) -> dict[str, str]:
    """The file of each kind."""
    here = set(names)
    return {
        key: found
        for key, likely in WHOLE.items()
        if (found := next((name for name in likely if name in here), None))
    }


def _safetensors(names: Sequence[str]) -> list[str]:
    return [name for name in names if name.endswith(".safetensors")]


def _singles(folder: str, names: Sequence[str]) -> list[str]:
    """Files that hold everything, by the endings that people give them."""
    return [
        name for name in names if name.endswith(ENDINGS) and _is_one(os.path.join(folder, name))
    ]


def _rank_of(name: str) -> re.Match[str] | None:
    return None if OTHERS.fullmatch(name) else RANK.fullmatch(name)


def _is_part(folder: str, name: str) -> bool:
    """Whether a rank's file is one of a model or an optimizer: by its name, or what it holds."""
    told, path = _rank_of(name), os.path.join(folder, name)
    if told is None or not _is_torch(path):
        return False
    if _kind(told["stem"]):
        return True
    try:
        value = TorchFile(path).value
    except (ZckptError, OSError):
        return False
    return next(ranked.sharded_in(value), None) is not None or _has_groups(value)


def _has_groups(value: Any, depth: int = DEPTH) -> bool:
    """Whether an optimizer's state is in it."""
    if not isinstance(value, dict) or not depth:
        return False
    return "param_groups" in value or any(_has_groups(held, depth - 1) for held in value.values())


def _is_torch(path: str) -> bool:
    """Whether a file begins as one of torch.save."""
    with open(path, "rb") as file:
        head = file.read(4)
    return head == b"PK\3\4" or (head[:1] == b"\x80" and head[1:2] in (b"\2", b"\3", b"\4"))


def _is_one(path: str) -> bool:
    """Whether a single file holds state dicts: tensors by name, of no other format's kind."""
    name = os.path.basename(path)
    if OTHERS.fullmatch(name) or name.endswith(".distcp") or not _is_torch(path):
        return False
    try:
        value = TorchFile(path).value
    except (ZckptError, OSError):
        return name.endswith(ENDINGS)  # which reading will say more about
    return _has_tensors(value) and not any(
        isinstance(key, str) and key.startswith(("Moment_1_", "Update_Count"))  # ONNX Runtime's
        for key in (value.get("model", value) if isinstance(value, dict) else ())
    )


def _has_tensors(value: Any, depth: int = DEPTH) -> bool:
    if isinstance(value, dict) and depth:
        return any(_has_tensors(item, depth - 1) for item in value.values())
    return isinstance(value, Tensor) or ranked.is_sharded(value)


def find(path: str) -> Files:
    """The files of the one checkpoint at `path`; a file of one rank stands for all ranks'.

    Raises NotACheckpoint, AmbiguousCheckpoint, InconsistentCheckpoint.
    """
    if not os.path.isdir(path):
        told = _rank_of(os.path.basename(path))
        if told is None:
            return Files({None: path})
        folder = os.path.dirname(path) or "."
        names = [
            name
            for name in _names(folder)
            if (other := _rank_of(name)) and (other["stem"], other["world"]) == told.group(1, 3)
        ]
        return _of_ranks(folder, names, {})
    names = _names(path)
    whole: dict[str | None, str] = {}
    whole |= {key: os.path.join(path, name) for key, name in _whole(names).items()}
    of_ranks = [name for name in names if _rank_of(name)]
    if of_ranks:
        return _of_ranks(path, of_ranks, whole)
    if "model" in whole:
        return Files(whole)
    if len(alone := _safetensors(names)) == 1:
        return Files({**whole, "model": os.path.join(path, alone[0])})
    single = _singles(path, names)
    if len(single) > 1:
        raise AmbiguousCheckpoint(
            f"{path} holds {len(single)} checkpoints: {listed(single)}",
            hint=f"name the file: {os.path.join(path, single[-1])}",
        )
    if not single:
        raise NotACheckpoint(f"{path} holds no file with a model's state")
    return Files({None: os.path.join(path, single[0])})


def _of_ranks(folder: str, names: Sequence[str], whole: Mapping[str | None, str]) -> Files:
    """Ranks' files by what they hold; whole ones of what no rank's hold."""
    found: dict[str, dict[int, str]] = {}
    worlds: set[str] = set()
    for name in names:
        told = _rank_of(name)
        assert told is not None
        if told["world"]:
            worlds.add(told["world"])
        rank, known = int(told["rank"]), found.setdefault(told["stem"], {})
        if rank in known and not told["world"]:
            raise InconsistentCheckpoint(
                f"{known[rank]} and {os.path.join(folder, name)} are both of rank {rank}",
                hint="files of two saves seem to be mixed; keep those of one save in a directory",
            )
        known[rank] = os.path.join(folder, name)
    if len(worlds) > 1:
        told_worlds = ", ".join(sorted(worlds, key=int))
        raise AmbiguousCheckpoint(
            f"{folder} holds files of saves by {told_worlds} ranks",
            hint="keep those of one save in a directory",
        )
    made = Files(world=int(worlds.pop()) if worlds else None)
    if len(found) == 1 and not {"model", "optim"} & whole.keys():
        made.ranks[None] = next(iter(found.values()))
        return made
    kinds = {stem: _kind(stem) for stem in found}
    others = [stem for stem, kind in kinds.items() if kind is None]
    if len(others) == len(found):
        raise AmbiguousCheckpoint(
            f"{folder} holds ranks' files of {len(found)} kinds: {listed(others)}",
            hint=f"name a file of one of them: {found[others[0]][min(found[others[0]])]}",
        )
    for stem, files in found.items():
        kind = kinds[stem]
        alone = kind and list(kinds.values()).count(kind) == 1
        made.ranks[kind if alone else stem] = files
    made.whole = {key: path for key, path in whole.items() if key not in made.ranks}
    return made


def _kind(stem: str) -> str | None:
    """What a rank's file holds, by its name."""
    if "optim" in stem:
        return "optim"
    return "model" if re.search("model|weights", stem) and "rng" not in stem else None
