"""Reads ONNX Runtime's files of torch.save, and parses their keys.

    PREFIX.ZeRO.R.L.ort.pt   rank R of 0 to L
    PREFIX.ort.pt            the only rank

    {"model": {key: tensor}, ...}      other keys are the user's; or the inner dictionary alone

    w                        an fp32 weight, with its shape
    w_view_K                 a rank's flat slice of it, in mixed-precision runs since 1.7 (L2)
    w_fp16, w_bf16           its 16-bit copy, on every rank
    Moment_1_w[_view_K]      and Moment_2_..., Update_Count_...: for the elements that a rank owns
    Step                     Lamb's counter

Before 1.7 (L1), each rank that owns a part of a weight in a mixed-precision run stores the full
weight, of which only this part is current. ONNX Runtime's old front end also saves weights that its
session lacks, with stale values. So read.py reads a weight only from the ranks that own it.

A weight's own name may look like one of these keys (`x_view_1`, `Step_scale`). So a key is split
into a weight's name and a suffix only if that weight is a key too.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ...core.checkpoint.entries import Entry, Key
from ...core.checkpoint.inert import inside
from ...core.storage import sources
from ...core.storage.inventory import nameless, refuse_others, role, saved_names
from ...errors import (
    CorruptCheckpoint,
    InconsistentCheckpoint,
    Notice,
    UnsupportedCheckpoint,
    ZckptError,
    note,
)
from ...files.torchfile import Parsed, Tensor, TorchFile, peek
from .ranks import COUNT, SHARED, SHORT_NAMES, SLOTS, RankStates, RankTensor, Save

SUFFIX = ".ort.pt"
OF_RANK = role(
    "all states", r"(?P<stem>[^/]*)\.ZeRO\.(\d+)\.(\d+)\.ort\.pt", "dp", "last", fixed="last"
)
"""Files called `PREFIX.ZeRO.R.L.ort.pt`: R is the file's rank, and L is the run's last rank."""
VIEW = re.compile(r"(.+)_view_(\d+)", re.DOTALL)
HALVES = {"_fp16": "F16", "_bf16": "BF16"}
MEGATRON = re.compile(r"_(column|row)_rank_\d+(_view_\d+|_fp16|_bf16)?$")
MODEL = "model"


def is_one(path: str) -> bool:
    """Whether a file is ONNX Runtime's, by its name or by its keys of optimizer states."""
    if path.endswith(SUFFIX):
        return True
    try:
        with sources.opened(path) as file:
            if file.read(1) not in (b"P", b"\x80"):
                return False
        value = peek(path)
        model = value.get(MODEL, value) if isinstance(value, dict) else None
    except ZckptError:
        return False
    return isinstance(model, dict) and any(
        isinstance(key, str) and key.startswith(("Moment_1_", f"{COUNT}_")) for key in model
    )


def opened(root: str, paths: Sequence[str]) -> Save:
    """Converts the contents of one checkpoint's files, given in rank order, to a `Save`.

    Raises CorruptCheckpoint for a damaged file. Raises InconsistentCheckpoint if a file was saved
    under another rank's name, or if there are 16-bit copies of two types.
    """
    parsed = Parsed()
    files = [TorchFile(path, parsed) for path in paths]
    names = saved_names((OF_RANK,), {file.path: file.saved_as for file in files})
    refuse_others(names)
    models = [_model(file) for file in files]
    mixed = {
        suffix
        for model in models
        for suffix in HALVES
        if any(_is_half(key, tensor, suffix) for key, tensor in model.items())
    }
    if len(mixed) > 1:
        raise InconsistentCheckpoint(
            "mixed-saves",
            f"{root} has both fp16 and bf16 copies of weights, but one save has only one type",
            file=root,
        )
    suffix = mixed.pop() if mixed else ""
    weight_names = _weight_names(models, suffix)
    ranks = [
        _states_of_rank(*pair, suffix, weight_names) for pair in zip(files, models, strict=True)
    ]
    state, kept, copies, omitted = _client_state(files)
    # before 1.7 the owners of a shared weight store it completely
    shared = any(re.fullmatch(VIEW, key) for model in models for key in model)
    is_l1 = bool(suffix) and shared and not any(rank.pieces for rank in ranks)
    return Save(
        root,
        "l1" if is_l1 else "l2",
        ranks,
        HALVES.get(suffix),
        _optimizer(ranks),
        state={"client_state": state} if state else {},
        kept=kept,
        copies=copies,
        records=[record for file in files for record in file.records.values()],
        omitted=omitted,
        notes=nameless(names),
    )


def _model(file: TorchFile) -> dict[str, Tensor]:
    value = file.value
    model = value.get(MODEL, value) if isinstance(value, dict) else None
    if not isinstance(model, dict) or not all(
        isinstance(key, str) and isinstance(tensor, Tensor) for key, tensor in model.items()
    ):
        raise CorruptCheckpoint(
            "file-damaged",
            f"{file.path} is not a checkpoint of ONNX Runtime: it has no dictionary of tensors",
            file=file.path,
        )
    for key in model:
        if MEGATRON.search(key):
            raise UnsupportedCheckpoint(
                "grid-unsupported",
                f"{file.path} was saved with horizontal (Megatron) parallelism ({key}), which "
                "zckpt does not read",
                hint="zckpt reads only ZeRO checkpoints of data-parallel runs",
                file=file.path,
            )
    return model


def _is_half(key: str, tensor: Tensor, suffix: str) -> bool:
    return bool(suffix) and key.endswith(suffix) and tensor.dtype == HALVES[suffix]


def _weight_names(models: Sequence[Mapping[str, Tensor]], suffix: str) -> set[str]:
    """The names of all weights in the files.

    A 16-bit copy such as `w_fp16` counts as `w`; its ending is `suffix`. Slices of weights and
    optimizer states do not count.
    """
    every = [(model, key, tensor) for model in models for key, tensor in model.items()]
    copied = {key.removesuffix(suffix) for _, key, each in every if _is_half(key, each, suffix)}
    weights = set(copied)
    for model, key, tensor in every:
        view = VIEW.fullmatch(key)
        is_piece = view and len(tensor.shape) == 1 and view[1] in copied
        if not (_is_half(key, tensor, suffix) or is_piece or _is_state(model, key, tensor)):
            weights.add(key)
    return weights


def _is_state(model: Mapping[str, Tensor], key: str, tensor: Tensor) -> bool:
    """Whether a key is an optimizer state: a moment, or a counter of updates.

    A key counts as a moment of a weight only if the weight's other moment is there too:
    `Moment_1_w` and `Moment_2_w`.
    """
    if key == SHARED or key.startswith(f"{COUNT}_"):
        return tensor.dtype == "I64" and tensor.numel == 1
    pairs = (("Moment_1_", "Moment_2_"), ("Moment_2_", "Moment_1_"))
    return any(
        key.startswith(moment) and other + key.removeprefix(moment) in model
        for moment, other in pairs
    )


def _states_of_rank(
    file: TorchFile, model: Mapping[str, Tensor], suffix: str, weight_names: set[str]
) -> RankStates:
    """Sorts the tensors and counters of one rank's file by the weight to which they belong."""
    rank = RankStates(file.path)

    def weight_of(name: str, key: str) -> str:
        """The weight to which `name` belongs: `name` itself, or w if `name` is a slice `w_view_K`.

        Raises InconsistentCheckpoint if there is no such weight. `key` is the full key, for the
        error.
        """
        view = VIEW.fullmatch(name)
        if name in weight_names:
            return name
        if view and view[1] in weight_names:
            return view[1]
        raise InconsistentCheckpoint(
            "layout-unknown",
            f"{file.path} has {key}, but no file states which weight it is a slice of",
            hint="use a checkpoint with the 16-bit copies or the full weights: only they state "
            "shapes",
            file=file.path,
        )

    for key, tensor in model.items():
        if _is_half(key, tensor, suffix) and key.removesuffix(suffix) in weight_names:
            rank.halves[key.removesuffix(suffix)] = _located(file, tensor)
        elif key in weight_names:
            rank.weights[key] = _located(file, tensor)
        elif not _is_state(model, key, tensor):
            _add_once(file, rank.pieces, weight_of(key, key), _located(file, tensor))
        elif key == SHARED:
            rank.shared = _count(file, key, tensor)
        elif key.startswith(f"{COUNT}_"):
            name = weight_of(key.removeprefix(f"{COUNT}_"), key)
            _add_once(file, rank.counts, name, _count(file, key, tensor))
        else:
            name, slot = weight_of(key[len("Moment_1_") :], key), SLOTS[key[: len("Moment_1")]]
            _add_once(file, rank.moments.setdefault(name, {}), slot, _located(file, tensor))
    return rank


def _add_once(file: TorchFile, into: dict[str, Any], name: str, value: Any) -> None:
    if name in into:
        raise InconsistentCheckpoint(
            "mixed-saves",
            f"{file.path} has two slices of {name}, but a rank owns at most one",
            file=file.path,
            subject=name,
        )
    into[name] = value


def _located(file: TorchFile, tensor: Tensor) -> RankTensor:
    if not tensor.contiguous:
        raise UnsupportedCheckpoint(
            "storage-unsupported",
            f"{file.path}: a tensor of shape {tensor.shape} is not contiguous",
            hint="ONNX Runtime writes contiguous tensors only: take the file that it wrote",
            file=file.path,
        )
    extent = file.extent(tensor)
    length, crc = file.crc(tensor)
    return RankTensor(tensor.dtype, tensor.shape, extent, crc if length == extent.length else None)


def _count(file: TorchFile, key: str, tensor: Tensor) -> int:
    value = file.scalar(tensor).value
    if value < 1:
        raise CorruptCheckpoint(
            "file-damaged",
            f"{file.path}: {key} is {value}, but ONNX Runtime counts from 1",
            file=file.path,
        )
    return int(value)


def _optimizer(ranks: Sequence[RankStates]) -> str | None:
    adam = any(rank.counts for rank in ranks)
    lamb = any(rank.shared is not None for rank in ranks)
    if adam and lamb:
        raise InconsistentCheckpoint(
            "mixed-saves",
            "the ranks' files have counters of both Adam and Lamb, but one save has only one "
            "optimizer",
        )
    if not adam and not lamb:
        return None
    return SHORT_NAMES["AdamOptimizer" if adam else "LambOptimizer"]


# -- what the user saved with the model


def _client_state(
    files: Sequence[TorchFile],
) -> tuple[dict[str, Any], dict[Key, Entry], list[Entry], list[Notice]]:
    """The user's values in rank 0's file, and the tensors in them.

    Returns also the replicas of these tensors on other ranks, and a note for each value in which
    another rank differs from rank 0.
    """
    kept: dict[Key, Entry] = {}
    copies: list[Entry] = []
    state, differing = {}, list[str]()
    for key, value in _user(files[0]).items():
        path = inside("client_state", key)
        state[key] = files[0].kept(value, path, kept)
        first = files[0].summary(value)
        for file in files[1:]:
            if file.summary(_user(file).get(key)) == first:
                tensors_of_copy: dict[Key, Entry] = {}
                file.kept(_user(file)[key], path, tensors_of_copy)
                copies += tensors_of_copy.values()
            elif str(key) not in differing:
                differing.append(str(key))
    differing += sorted({str(key) for file in files for key in _user(file)} - set(map(str, state)))
    omitted = [
        note("rank-state-omitted", f"client_state {key!r} of all ranks but rank 0", subject=key)
        for key in differing
    ]
    return state, kept, copies, omitted


def _user(file: TorchFile) -> dict[Any, Any]:
    value = file.value
    if not isinstance(value.get(MODEL), dict):
        return {}
    return {key: item for key, item in value.items() if key != MODEL}
