"""All checkpoint formats that zckpt reads and writes, and the search for the format at a path.

    format.py      the record that describes a format and its functions
    reading.py     the user's options for reading a checkpoint
    paths.py       URLs, packed files and ~ that are given instead of a folder
    options.py     the options of all formats
    template.py    matches a source's parameters with the run of --like
    vocabulary.py  adds and removes vocabulary rows of embeddings for a target
    ranks.py       checks that no rank's file is missing
    numbered.py    checkpoints inside of a numbered folder
    groups.py      the parameter groups that a target's optimizer expects
    schedulers.py  where a program keeps its scheduler's state
    order.py       the order in which checkpoints were saved
    extra_states.py  optimizer state that belongs to no parameter
    weights_alone.py  reads the weights of a checkpoint whose optimizer state is unreadable
    nearby.py      searches for a file that a checkpoint lacks
    private.py     display names of state that only one format can store
    zero.py        the arithmetic of ZeRO partitions

Each folder is one format, except `statedict` and `deepspeed_states`: formats of one family share
these two.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress

from msgspec import Struct

from ..core.checkpoint.inert import Foreign
from ..core.checkpoint.manifest import Manifest, Sighting
from ..core.storage import sources
from ..core.storage.filenames import is_tag
from ..core.storage.marks import is_marked
from ..errors import AmbiguousCheckpoint, NotACheckpoint, WrongOption, ZckptError, listed, meant
from ..files import hdf5file
from ..files.beginning import number_in
from ..files.torchfile import Tensor, peek
from ..training import objects, trainers, trainers_steps
from ..training.best import CHECKPOINT
from . import (
    dcp,
    deepspeed,
    deepspeed_universal,
    gathered,
    hf,
    megatron,
    numbered,
    onnxruntime,
    order,
    paths,
    universal,
)
from .format import Format, nothing
from .reading import Reading

FORMATS: tuple[Format, ...] = (
    deepspeed.FORMAT,
    deepspeed_universal.FORMAT,
    onnxruntime.FORMAT,
    megatron.FORMAT,
    dcp.FORMAT,
    gathered.FORMAT,
    universal.FORMAT,
    hf.FORMAT,
)

OF_TENSORFLOW = "tf_model.h5"  # beside the weights in folders of Hugging Face

DEPTH, MOST_FOLDERS = 4, 1000
"""How far an error's hint searches: levels of folders up and down, and folders per level."""
OTHER_WORDS = {
    "ddp torch pytorch pt pth torch.save": "DDP and plain PyTorch load files of torch.save: use "
    "the format gathered",
    "fsdp fsdp1 fsdp2 torchtitan lightning sharded": "FSDP, torchtitan and Lightning load "
    "torch.distributed.checkpoint: use the format dcp",
    "huggingface hugging-face transformers trainer": "for from_pretrained: zckpt export SRC DST; "
    "for the Trainer: deepspeed, or dcp or gathered with --dialect accelerate",
    "megatron-core megatron-lm mcore nemo torch_dist": "Megatron-LM, Megatron-Bridge and NeMo load "
    "the format megatron",
    "zero zero1 zero2 zero3 ds": "ZeRO is DeepSpeed's: use the format deepspeed",
    "ort onnx": "ONNX Runtime Training loads the format onnxruntime",
    "safetensors": "weights alone: --to universal --weights-only; with an optimizer: --to gathered "
    "--dialect safetensors",
    "gguf": "llama.cpp makes GGUF files of a folder of Hugging Face: zckpt export SRC MODEL, then "
    "convert_hf_to_gguf.py MODEL",
}
"""Hints for a value of `--from` or `--to` that is no format's name, such as `fsdp`."""


def named(name: str) -> Format:
    """The format with this name; raises WrongOption if there is none."""
    for item in FORMATS:
        if item.name == name:
            return item
    names, word = [item.name for item in FORMATS], name.lower()
    format_hint = next((hint for words, hint in OTHER_WORDS.items() if word in words.split()), "")
    hint = format_hint or meant(word, names) or f"choose one of {', '.join(names)} (for FSDP: dcp)"
    raise WrongOption("option-invalid", f"there is no format {name!r}", hint=hint)


def engine_objects() -> frozenset[str]:
    """The classes and functions that the engines of all formats put into their own pickles."""
    return frozenset().union(*(item.objects or () for item in FORMATS))


def other_objects(manifest: Manifest) -> list[str]:
    """Classes and functions that a checkpoint's pickles name and that no engine needs."""
    return objects.others_of(manifest, engine_objects())


def trainers_counters(manifest: Manifest) -> list[Sighting]:
    """The counters in files that a trainer put beside a checkpoint, whatever its format.

    Raises OSError.
    """
    return trainers_steps.sightings(manifest, number_in)


def of(manifest: Manifest) -> Format | None:
    """The format that made a manifest's files.

    None for the manifest of a proof file, which no format made.
    """
    return next((item for item in FORMATS if item.name == manifest.format), None)


def is_of_trainer(path: str) -> bool:
    """Whether `path` is a folder with files of a trainer program."""
    is_listed = sources.is_folder(path) and not sources.is_denied(path)
    return is_listed and trainers.is_of_program(os.listdir(path))


def are_weights_alone(path: str) -> bool:
    """Whether a trainer program saved a model at `path` without its optimizer.

    A trainer's own counter file at `path` shows that the trainer saved the model.
    """
    return trainers.counter(path) is not None and any(item.detect_weak(path) for item in FORMATS)


def family_of(name: str) -> str:
    """The family of the format called `name`; `name` itself if there is no such format."""
    return next((item.family for item in FORMATS if item.name == name), name)


# -- the order of several checkpoints


def by_age(paths: Iterable[str]) -> list[order.Standing]:
    """The checkpoints at these paths, oldest first, by the rules of order.py.

    All code that sorts the checkpoints of a run, or picks one of them, calls this function.
    """
    return order.oldest_first(paths, _counted, _updates)


def number_of(path: str) -> float | None:
    """A checkpoint's progress: the trainer's counter, else a number in its name, else its updates.

    None if the checkpoint has none of the three, so that it can only be ordered by the times of
    files.
    """
    numbers = (find(path) for find in (_counted, order.in_name, _updates))
    return next((number for number in numbers if number is not None), None)


def oldest_first(folder: str, names: Iterable[str]) -> list[str]:
    """The names of checkpoints in a folder, oldest first."""
    paths = {os.path.join(folder, name): name for name in names}
    return [paths[standing.path] for standing in by_age(paths)]


def _counted(path: str) -> int | None:
    """The training counter that a small file of the checkpoint states; None without such a file."""
    for counter in (trainers.counter, *(item.counter for item in FORMATS)):
        with suppress(ZckptError, OSError):
            if (number := counter(path)) is not None:
                return number
    return None


def _updates(path: str) -> float | None:
    """Completed optimizer updates of a checkpoint; None if it does not state any."""
    try:
        for item in FORMATS:
            if (number := item.updates(path)) is not None:
                return number
        nearest = find(path)
        manifest = nearest.format.functions.read(nearest.path, Reading(nameless=True))
    except (ZckptError, OSError):  # the checkpoint is broken: the code that reads it reports why
        return None
    steps = (parameter.step for parameter in manifest.parameters.values())
    return max((step for step in steps if step is not None), default=None)


# -- recognition


class LocatedCheckpoint(Struct, frozen=True):
    """The checkpoint that was found at a path: its format, and the path to read it from.

    If the path is a numbered folder such as step3, `inside` is the checkpoint's folder in it, else
    "". `left_out` are further checkpoints in the numbered folder, which `--root` excluded.
    """

    format: Format
    path: str
    inside: str = ""
    left_out: tuple[str, ...] = ()


def recognize(path: str, name: str | None = None, tag: str | None = None) -> Format:
    """The format of the one checkpoint at `path`; raises the same errors as `find`."""
    return find(path, name, tag).format


@sources.looks_again
def find(
    path: str, name: str | None = None, tag: str | None = None, root: str | None = None
) -> LocatedCheckpoint:
    """Finds the one checkpoint at `path` by its content; `name` restricts the search to one format.

    `root` chooses one of several checkpoints in a numbered folder. Raises NotACheckpoint, with
    checkpoints nearby as a hint, and AmbiguousCheckpoint, which lists the candidates.
    """
    if sources.status(path) is None and not os.path.islink(path):
        message, hint = paths.elsewhere(path) or (f"{path} does not exist", _neighbors(path))
        raise NotACheckpoint("no-such-path", message, hint, file=path)
    formats = [named(name)] if name else FORMATS
    if (format := _of_tag(path, tag, formats)) is not None:
        return LocatedCheckpoint(format, path)
    tags_of = {item: tags for item in formats if (tags := item.detect(path))}
    if not tags_of:
        if name in (None, onnxruntime.FORMAT.name):
            _need_h5py(path)
        tags_of = _weak(path, name)
    if len(tags_of) > 1:
        names = ", ".join(item.name for item in tags_of)
        raise AmbiguousCheckpoint(
            "several-formats",
            f"{path} holds checkpoints of several formats: {names}",
            hint=f"choose with --from {next(iter(tags_of)).name}",
            file=path,
        )
    for item, tags in tags_of.items():
        if len(tags) > 1 and tag is None:
            # a folder of single files may be part of a larger checkpoint (random states, for
            # example)
            holder = None if item.detect(path) else _holder(path, weak=False)
            tags = oldest_first(path, tags)
            way = f"choose with --tag {tags[-1]}"
            if item.pointer is not None and not (item.to_load or is_of_trainer(path)):
                way += f"; or write the pointer file: {paths.pointing(path, tags[-1])}"
            raise AmbiguousCheckpoint(
                "several-tags",
                f"{path} holds {len(tags)} checkpoints and no file says which is meant: "
                f"{listed(tags)}",
                hint=f"give {holder}, the checkpoint that contains it" if holder else way,
                file=path,
            )
        return LocatedCheckpoint(item, path)
    if in_folders := inside_numbered(path, name):
        inside = _chosen(path, in_folders, root)
        here = os.path.join(path, inside)
        other_folders = tuple(each for each in in_folders if each != inside)
        return LocatedCheckpoint(recognize(here, name, tag), here, inside, other_folders)
    below = oldest_first(path, _below(path))
    if len(below) > 1:
        raise AmbiguousCheckpoint(
            "several-checkpoints",
            f"{path} holds {len(below)} checkpoints: {listed(below)}",
            hint=f"give one of them, such as {_spelled(path, below[-1])}"
            + _all_of(path, below)
            + f"; `zckpt list {path}` shows the state of each",
            file=path,
        )
    what = f" of format {name}" if name else ""
    looks, hint = _looks(path)
    raise NotACheckpoint(
        "not-a-checkpoint",
        f"{path} is not a checkpoint{what}: {looks}",
        hint=hint or _near(path, below),
        file=path,
    )


def _of_tag(path: str, tag: str | None, formats: Iterable[Format]) -> Format | None:
    """The format of the folder `tag` in a run; None if no format recognizes it, or several do.

    A run may have hundreds of tags, and to open all of them takes seconds. This function opens one.
    """
    folder = os.path.join(path, tag) if tag and is_tag(tag) else ""
    if not folder or not sources.is_folder(folder):
        return None
    matching = [item for item in formats if item.tags is not nothing and item.detect(folder)]
    return matching[0] if len(matching) == 1 else None


def _weak(path: str, name: str | None) -> dict[Format, list[str]]:
    """The first format that finds weights alone or single files in a folder, and the tags it found.

    Other formats' folders contain such files too, so this function is called only if no format
    detects a checkpoint. Empty if nothing is found, or if folders inside are checkpoints
    themselves.
    """
    for item in [named(name)] if name else FORMATS:
        if (tags := item.detect_weak(path)) and not _inside(path):
            in_folders = (os.path.join(path, each) for each in inside_numbered(path, item.name))
            return {} if any(map(_detects, in_folders)) else {item: tags}
    return {}


def _inside(path: str) -> list[str]:
    """Folders directly in `path` that are checkpoints."""
    return [
        name
        for name in _folders(path)
        if any(item.detect(os.path.join(path, name)) for item in FORMATS)
    ]


def _below(path: str) -> list[str]:
    """The checkpoints in folders below a path, for the hint of an error.

    Returns the checkpoints at the first level that has any. Folders with weights alone count only
    if their level has no other checkpoint.
    """
    for level in _levels(path, DEPTH):
        for is_one in (_detects, inside_numbered, _detects_weights):
            checkpoints = [name for name in level if is_one(os.path.join(path, name))]
            if checkpoints:
                return checkpoints
    return []


def _levels(
    path: str, depth: int, enters: Callable[[str], bool] = lambda name: True
) -> Iterator[list[str]]:
    """Yields the folders below a path, level by level.

    Skips folders for which `enters` is false.
    """
    level = [""]
    for _ in range(depth):
        level = [
            os.path.join(above, name)
            for above in level
            for name in _folders(os.path.join(path, above))
            if enters(name)
        ][:MOST_FOLDERS]
        yield level


def inside_numbered(path: str, name: str | None = None) -> list[str]:
    """The checkpoints in a numbered folder (such as step3), as relative paths; empty for others.

    Returns the checkpoints at the first level of subfolders that has any. Weights without an
    optimizer count if their level has no other checkpoint, and if some file outside of the weights
    has an optimizer's name. `name` restricts the search to one format. A folder that zckpt wrote
    may have any name.
    """
    if not (numbered.is_numbered(path) or is_marked(path)) or _detects(path):
        return []
    among = [named(name)] if name else FORMATS
    for level in _levels(path, numbered.DEPTH, numbered.may_be_inside):
        if checkpoints := [
            each for each in level if _is_one(os.path.join(path, each), False, among)
        ]:
            return sorted(checkpoints)
        weak = (each for each in level if _is_one(os.path.join(path, each), True, among))
        if checkpoints := [each for each in weak if numbered.has_optimizer(path, each)]:
            return sorted(checkpoints)
    return []


def _is_one(path: str, weak: bool, among: Iterable[Format]) -> bool:
    """Whether a folder is a checkpoint itself, and not a run that contains a checkpoint as a tag.

    With `weak`, only weights without an optimizer and single files count.
    """
    return _detects(path, weak, ([""], [os.path.basename(path)]), among)


def _chosen(path: str, inside: Sequence[str], root: str | None) -> str:
    """The one checkpoint in a numbered folder, or the one that `root` names.

    Raises AmbiguousCheckpoint if there are several and `root` names none of them.
    """
    name = (root or "").partition("=")[0]
    if len(inside) > 1 and name not in inside:
        raise AmbiguousCheckpoint(
            "several-checkpoints",
            f"{path} holds {len(inside)} checkpoints: {listed(inside)}",
            hint=f"choose one with --root {inside[0]}, or give {os.path.join(path, inside[0])}",
            file=path,
        )
    return name if name in inside else inside[0]


def _detects(
    path: str,
    weak: bool = False,
    tags: Sequence[list[str]] | None = None,
    among: Iterable[Format] = FORMATS,
) -> bool:
    """Whether any of the formats `among` recognizes a checkpoint at `path`.

    With `weak`, `detect_weak` is called instead of `detect`: it finds weights without an optimizer.
    With `tags`, a format counts only if the tags that it finds are one of these lists.
    """
    try:
        tag_lists = ((item.detect_weak if weak else item.detect)(path) for item in among)
        return any(each if tags is None else each in tags for each in tag_lists)
    except (OSError, ZckptError):
        return False


def _detects_weights(path: str) -> bool:
    return _detects(path, weak=True)


def _folders(path: str) -> list[str]:
    """Names of the subfolders of a folder.

    Left out are folders without read permission, and links to a sibling folder, such as `latest`.
    """
    if not sources.is_folder(path):
        return []
    with os.scandir(path) as items:
        return [
            item.name
            for item in items
            if sources.is_folder(item.path)
            and not sources.is_denied(item.path)
            and sources.beside(item.path) is None
        ]


def _all_of(path: str, inside: Sequence[str]) -> str:
    """The end of a hint: the command that converts all checkpoints of a Trainer's run.

    "" if `path` is no directory of a Trainer's run.
    """
    of_trainer = [name for name in _folders(path) if CHECKPOINT.fullmatch(name)]
    if not of_trainer or not {*of_trainer} <= {*inside}:
        return ""
    return f"; or write all: `zckpt reshard {path} DST --checkpoints all`"


def _looks(path: str) -> tuple[str, str]:
    """Describes what is at a path instead of a checkpoint, for an error; and a hint ("": none)."""
    if not sources.is_folder(path):
        if what := _of_torch(path):
            return what, ""
        return paths.kind_of_file(path) or (f"it is a file of {sources.size(path)} bytes", "")
    names = sorted(os.listdir(path))
    if not names:
        return "it is empty", ""
    if any(name.endswith(".safetensors") or name == "pytorch_model.bin" for name in names):
        return "it holds weights alone, without an optimizer's state", ""
    return f"it holds {listed(names)}", ""


def _need_h5py(path: str) -> None:
    """Raises MissingExtra if a folder contains HDF5 files and h5py is not installed."""
    if not sources.is_folder(path) or sources.is_denied(path):
        return
    with os.scandir(path) as items:
        files = [item.path for item in items if item.is_file() and item.name != OF_TENSORFLOW]
    if any(hdf5file.is_hdf5(file) for file in files if not sources.is_denied(file)):
        hdf5file.import_h5py()


def _of_torch(path: str) -> str | None:
    """Describes a torch.save file that contains no state dict; None for other files."""
    try:
        value = peek(path)
    except ZckptError:
        return None
    if isinstance(value, Foreign):
        return f"it has an object of class {value.name} (save its state_dict() instead)"
    if isinstance(value, dict) and "param_groups" in value:
        return "it has only an optimizer's state (put the model's file beside it)"
    if isinstance(value, Tensor):
        return "it has one tensor, which has no name (a state dict is a dictionary of tensors)"
    if isinstance(value, dict):
        return "it has a dictionary without tensors (a state dict is a dictionary of tensors)"
    what = type(value).__name__
    article = "an" if what[0] in "aeiou" else "a"
    return f"it has {article} {what}, not a dictionary of tensors (save one of state dicts)"


def _near(path: str, inside: Sequence[str]) -> str:
    if inside:
        return f"give the checkpoint in it: {_spelled(path, inside[0])}"
    with suppress(OSError):  # this user may not read the folders around it
        if holder := _holder(path):
            return f"give {holder}, the checkpoint that contains it"
    names = sorted(os.listdir(path)) if sources.is_folder(path) else []
    if file := next((name for name in names if name.endswith(".safetensors")), None):
        return f"give one of its files, such as {os.path.join(path, file)}"
    return "give the directory that the training program saved; `zckpt formats` lists what is read"


def _spelled(path: str, name: str) -> str:
    """The path of the checkpoint `name` in a folder, as text for a hint.

    If the checkpoint is a numbered folder such as step3, the text also names the subfolder with the
    files.
    """
    here = os.path.join(path, name)
    inside = inside_numbered(here)
    return f"{here} (its files are in {os.path.join(here, inside[0])})" if inside else here


def _holder(path: str, weak: bool = True) -> str | None:
    """The nearest directory above a path that is a checkpoint to which the path belongs.

    If there is none, the parent folder, provided that `weak` is true and that it has the weights of
    one model. Otherwise None: a folder beside tags or runs may belong to no checkpoint.
    """
    next_above = folder = os.path.dirname(os.path.abspath(path))
    inside = ""
    for _ in range(DEPTH):
        names_of_path = {"", os.path.basename(folder), inside}
        is_beside = folder == next_above and not sources.is_folder(path)  # as `latest` is
        for item in FORMATS:
            tags = item.detect(folder)
            if not names_of_path.isdisjoint(tags) or (is_beside and tags):
                return folder
        if inside_numbered(folder):
            return folder
        folder, inside = os.path.split(folder)
    return next_above if weak and _detects(next_above, weak=True, tags=[[""]]) else None


def _neighbors(path: str) -> str:
    """Describes, for a hint, the parent folder of a path that does not exist."""
    above = os.path.dirname(os.path.abspath(path))
    if not sources.is_folder(above):
        return f"{above} does not exist either"
    names = sorted(os.listdir(above))
    return f"{above} holds {listed(names)}" if names else f"{above} is empty"
