"""All checkpoint formats that zckpt reads and writes, and the search for the format at a path.

    format.py      the record that describes a format and its functions
    reading.py     the user's options for reading a checkpoint
    paths.py       URLs, packed files and ~ that are given instead of a folder
    options.py     the command-line options of all formats, merged
    template.py    `--like RUN`: puts a source's values under the names of an existing run
    vocabulary.py  adds and removes vocabulary rows of embeddings for a target
    ranks.py       checks that no rank's file is missing
    numbered.py    checkpoints inside of a numbered folder, such as step3/actor
    groups.py      the parameter groups that a target's optimizer expects
    schedulers.py  where a program keeps its scheduler's state
    order.py       the order in which checkpoints were saved
    extra_states.py  optimizer state that belongs to no parameter
    weights_alone.py  reads the weights of a checkpoint whose optimizer state is unreadable
    nearby.py      searches for a file that a checkpoint lacks
    private.py     short names, for reports, of state that only Megatron-Core can store
    zero.py        the arithmetic of ZeRO partitions

Each folder is one format. Two folders are shared by several formats: `statedict` and
`deepspeed_states`.
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
    """Returns the format called `name`, such as "deepspeed"; raises WrongOption for others."""
    for item in FORMATS:
        if item.name == name:
            return item
    names, word = [item.name for item in FORMATS], name.lower()
    format_hint = next((hint for words, hint in OTHER_WORDS.items() if word in words.split()), "")
    hint = format_hint or meant(word, names) or f"choose one of {', '.join(names)} (for FSDP: dcp)"
    raise WrongOption("option-invalid", f"there is no format {name!r}", hint=hint)


def engine_objects() -> frozenset[str]:
    """Names of all classes and functions that the supported engines put into their own pickles."""
    return frozenset().union(*(item.objects or () for item in FORMATS))


def other_objects(manifest: Manifest) -> list[str]:
    """Classes and functions named in a checkpoint's pickles that no engine puts there itself."""
    return objects.others_of(manifest, engine_objects())


def trainers_counters(manifest: Manifest) -> list[Sighting]:
    """The step counters in a trainer's own files beside a checkpoint, such as trainer_state.json.

    Raises OSError if a file cannot be read.
    """
    return trainers_steps.sightings(manifest, number_in)


def of(manifest: Manifest) -> Format | None:
    """Returns the format from which a manifest was read.

    None for the manifest of a proof file: such a file has only the checksums of a checkpoint.
    """
    return next((item for item in FORMATS if item.name == manifest.format), None)


def is_of_trainer(path: str) -> bool:
    """Whether the folder `path` contains files of a trainer, such as Hugging Face's Trainer."""
    is_listed = sources.is_folder(path) and not sources.is_denied(path)
    return is_listed and trainers.is_of_program(os.listdir(path))


def are_weights_alone(path: str) -> bool:
    """Whether a trainer saved a model at `path` without its optimizer.

    It did if trainer_state.json states a step, and if a format recognizes weights beside that file
    (`Format.detect_weak`). An optimizer is not searched for: the caller has already found that
    `path` is no checkpoint with an optimizer.
    """
    return trainers.counter(path) is not None and any(item.detect_weak(path) for item in FORMATS)


def family_of(name: str) -> str:
    """Returns the family of the format `name`; formats of one family use the same parameter names.

    Returns `name` itself if there is no such format.
    """
    return next((item.family for item in FORMATS if item.name == name), name)


# -- the order of several checkpoints


def by_age(paths: Iterable[str]) -> list[order.Standing]:
    """Sorts checkpoints by age, the oldest first; order.py lists the rules.

    All code that sorts the checkpoints of a run, or picks one of them, calls this function.
    """
    return order.oldest_first(paths, _training_counter, _optimizer_updates)


def number_of(path: str) -> float | None:
    """How far training was at a checkpoint, as a number; None if no file or name tells.

    The first of these that is known: the training program's counter, the number in the checkpoint's
    name, the number of optimizer updates.
    """
    numbers = (find(path) for find in (_training_counter, order.in_name, _optimizer_updates))
    return next((number for number in numbers if number is not None), None)


def oldest_first(folder: str, names: Iterable[str]) -> list[str]:
    """Sorts the names of checkpoints in `folder` by age, the oldest first."""
    paths = {os.path.join(folder, name): name for name in names}
    return [paths[standing.path] for standing in by_age(paths)]


def _training_counter(path: str) -> int | None:
    for counter in (trainers.counter, *(item.counter for item in FORMATS)):
        with suppress(ZckptError, OSError):
            if (number := counter(path)) is not None:
                return number
    return None


def _optimizer_updates(path: str) -> float | None:
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
    """The one checkpoint that was found at the path that the user gave.

    path        the folder or file to read
    inside      the subfolder to read, if the path is a numbered folder such as step3; else ""
    left_out    other subfolders of the numbered folder with checkpoints, excluded by `--root`
    """

    format: Format
    path: str
    inside: str = ""
    left_out: tuple[str, ...] = ()


def recognize(path: str, name: str | None = None, tag: str | None = None) -> Format:
    """Returns the format of the one checkpoint at `path`; raises the same errors as `find`.

    `name` restricts the search to the format of this name. `tag` chooses one checkpoint of a run.
    """
    return find(path, name, tag).format


@sources.looks_again
def find(
    path: str, name: str | None = None, tag: str | None = None, root: str | None = None
) -> LocatedCheckpoint:
    """Finds the one checkpoint at `path` by the content of its files.

    `name` is the only format to try. `tag` chooses one checkpoint of a run, and `root` one
    subfolder of a numbered folder such as step3. Raises NotACheckpoint, with checkpoints nearby as
    a hint, and AmbiguousCheckpoint, which lists the candidates.
    """
    if sources.status(path) is None and not os.path.islink(path):
        message, hint = paths.elsewhere(path) or (f"{path} does not exist", _describe_parent(path))
        raise NotACheckpoint("no-such-path", message, hint, file=path)
    formats = [named(name)] if name else FORMATS
    if (format := _format_of_tag(path, tag, formats)) is not None:
        return LocatedCheckpoint(format, path)
    tags_of = {item: tags for item in formats if (tags := item.detect(path))}
    if not tags_of:
        if name in (None, onnxruntime.FORMAT.name):
            _require_h5py_for_hdf5(path)
        tags_of = _detect_weak(path, name)
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
            holder = None if item.detect(path) else _checkpoint_around(path, weak=False)
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
        inside = _choose_inside(path, in_folders, root)
        here = os.path.join(path, inside)
        other_folders = tuple(each for each in in_folders if each != inside)
        return LocatedCheckpoint(recognize(here, name, tag), here, inside, other_folders)
    below = oldest_first(path, _checkpoints_below(path))
    if len(below) > 1:
        raise AmbiguousCheckpoint(
            "several-checkpoints",
            f"{path} holds {len(below)} checkpoints: {listed(below)}",
            hint=f"give one of them, such as {_path_in_hint(path, below[-1])}"
            + _hint_to_convert_all(path, below)
            + f"; `zckpt list {path}` shows the state of each",
            file=path,
        )
    what = f" of format {name}" if name else ""
    looks, hint = _description_and_hint(path)
    raise NotACheckpoint(
        "not-a-checkpoint",
        f"{path} is not a checkpoint{what}: {looks}",
        hint=hint or _hint_of_place(path, below),
        file=path,
    )


def _format_of_tag(path: str, tag: str | None, formats: Iterable[Format]) -> Format | None:
    """Recognizes the folder `tag` of a run; None unless exactly one format fits it.

    Only this folder is opened, because opening hundreds of tags would take seconds.
    """
    folder = os.path.join(path, tag) if tag and is_tag(tag) else ""
    if not folder or not sources.is_folder(folder):
        return None
    matching = [item for item in formats if item.tags is not nothing and item.detect(folder)]
    return matching[0] if len(matching) == 1 else None


def _detect_weak(path: str, name: str | None) -> dict[Format, list[str]]:
    """Finds files that count as a checkpoint only if no format detects one, such as weights alone.

    Returns {format: tags} of the first format that has such files. {} if there is none, or if a
    folder inside `path` is a checkpoint itself.
    """
    for item in [named(name)] if name else FORMATS:
        if (tags := item.detect_weak(path)) and not _checkpoints_directly_in(path):
            in_folders = (os.path.join(path, each) for each in inside_numbered(path, item.name))
            return {} if any(map(_detects, in_folders)) else {item: tags}
    return {}


def _checkpoints_directly_in(path: str) -> list[str]:
    return [
        name
        for name in _folders(path)
        if any(item.detect(os.path.join(path, name)) for item in FORMATS)
    ]


def _checkpoints_below(path: str) -> list[str]:
    """Finds checkpoints in the folders below `path`, for a hint; returns their relative paths.

    Only the first level of folders that has a checkpoint counts. Folders with weights alone count
    only if their level has no other checkpoint.
    """
    for level in _folders_by_level(path, DEPTH):
        for is_one in (_detects, inside_numbered, _detects_weights):
            checkpoints = [name for name in level if is_one(os.path.join(path, name))]
            if checkpoints:
                return checkpoints
    return []


def _folders_by_level(
    path: str, depth: int, enters: Callable[[str], bool] = lambda name: True
) -> Iterator[list[str]]:
    """Yields, for each level of folders below `path`, the folders' relative paths.

    `enters(name)` is false for a folder to skip.
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
    """Finds the checkpoints in a numbered folder: ["actor"] for verl's global_step_3/actor.

    Returns the relative paths on the first level of subfolders that has any; [] if `path` is not
    numbered, or is a checkpoint itself. `name` is the only format to try. A folder with weights
    alone counts only if its level has no other checkpoint, and if a file outside of the folder has
    an optimizer's name.
    """
    # a folder that zckpt wrote (`is_marked`) may have any name
    if not (numbered.is_numbered(path) or is_marked(path)) or _detects(path):
        return []
    among = [named(name)] if name else FORMATS
    for level in _folders_by_level(path, numbered.DEPTH, numbered.may_be_inside):
        if checkpoints := [
            each for each in level if _is_checkpoint_itself(os.path.join(path, each), False, among)
        ]:
            return sorted(checkpoints)
        weak = (
            each for each in level if _is_checkpoint_itself(os.path.join(path, each), True, among)
        )
        if checkpoints := [each for each in weak if numbered.has_optimizer(path, each)]:
            return sorted(checkpoints)
    return []


def _is_checkpoint_itself(path: str, weak: bool, among: Iterable[Format]) -> bool:
    """Whether `path` is a checkpoint itself, and not a run that has checkpoints in tag folders.

    With `weak`, only weights without an optimizer and single files count.
    """
    return _detects(path, weak, ([""], [os.path.basename(path)]), among)


def _choose_inside(path: str, inside: Sequence[str], root: str | None) -> str:
    """Returns the name in `inside` that `--root` chooses; without `--root`, the only one.

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

    With `weak`, only weights without an optimizer are searched for (`Format.detect_weak`). With
    `tags`, a format counts only if it finds one of these lists of tags.
    """
    try:
        tag_lists = ((item.detect_weak if weak else item.detect)(path) for item in among)
        return any(each if tags is None else each in tags for each in tag_lists)
    except (OSError, ZckptError):
        return False


def _detects_weights(path: str) -> bool:
    return _detects(path, weak=True)


def _folders(path: str) -> list[str]:
    """Names of the subfolders of `path` that may be checkpoints.

    Folders without read permission are left out, and so are links to a folder beside them, such as
    `latest`.
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


def _hint_to_convert_all(path: str, inside: Sequence[str]) -> str:
    of_trainer = [name for name in _folders(path) if CHECKPOINT.fullmatch(name)]
    if not of_trainer or not {*of_trainer} <= {*inside}:
        return ""
    return f"; or write all: `zckpt reshard {path} DST --checkpoints all`"


def _description_and_hint(path: str) -> tuple[str, str]:
    """Says what is at a path instead of a checkpoint ("it is empty"), and gives a hint or ""."""
    if not sources.is_folder(path):
        if what := _describe_torch_file(path):
            return what, ""
        return paths.kind_of_file(path) or (f"it is a file of {sources.size(path)} bytes", "")
    names = sorted(os.listdir(path))
    if not names:
        return "it is empty", ""
    if any(name.endswith(".safetensors") or name == "pytorch_model.bin" for name in names):
        return "it holds weights alone, without an optimizer's state", ""
    return f"it holds {listed(names)}", ""


def _require_h5py_for_hdf5(path: str) -> None:
    if not sources.is_folder(path) or sources.is_denied(path):
        return
    with os.scandir(path) as items:
        files = [item.path for item in items if item.is_file() and item.name != OF_TENSORFLOW]
    if any(hdf5file.is_hdf5(file) for file in files if not sources.is_denied(file)):
        hdf5file.import_h5py()


def _describe_torch_file(path: str) -> str | None:
    """Says what a torch.save file has instead of a state dict; None if it is no torch.save file."""
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
    return (
        f"it has {article} {what}, not a dictionary of tensors (save a dictionary of state dicts)"
    )


def _hint_of_place(path: str, inside: Sequence[str]) -> str:
    if inside:
        return f"give the checkpoint in it: {_path_in_hint(path, inside[0])}"
    with suppress(OSError):  # this user may not read the folders around it
        if holder := _checkpoint_around(path):
            return f"give {holder}, the checkpoint that contains it"
    names = sorted(os.listdir(path)) if sources.is_folder(path) else []
    if file := next((name for name in names if name.endswith(".safetensors")), None):
        return f"give one of its files, such as {os.path.join(path, file)}"
    return "give the directory that the training program saved; `zckpt formats` lists what is read"


def _path_in_hint(path: str, name: str) -> str:
    """The path of a checkpoint for a hint: "run/step3 (its files are in run/step3/actor)"."""
    here = os.path.join(path, name)
    inside = inside_numbered(here)
    return f"{here} (its files are in {os.path.join(here, inside[0])})" if inside else here


def _checkpoint_around(path: str, weak: bool = True) -> str | None:
    """Finds the nearest folder above `path` that is a checkpoint and includes `path`; else None.

    With `weak`, the parent folder counts too if it has the weights of one model. A folder that
    merely lies beside tags does not count.
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


def _describe_parent(path: str) -> str:
    above = os.path.dirname(os.path.abspath(path))
    if not sources.is_folder(above):
        return f"{above} does not exist either"
    names = sorted(os.listdir(above))
    return f"{above} holds {listed(names)}" if names else f"{above} is empty"
