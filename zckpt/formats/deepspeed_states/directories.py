"""Finds the tags of a DeepSpeed run directory, and the trainer's files around them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from typing import NoReturn

from msgspec import Struct

from ...core.checkpoint.siblings import SiblingList, leads_out
from ...core.storage import sources
from ...core.storage.filenames import MOST_FOLDERS, by_counting, file_names, is_tag, number_of
from ...core.storage.inventory import parse_name, role
from ...errors import (
    AmbiguousCheckpoint,
    IncompleteCheckpoint,
    NotACheckpoint,
    UnsupportedCheckpoint,
    ZckptError,
    listed,
)
from ...files.torchfile import peek
from ...training.trainers import OPEN_FOLDERS, of_model

MODEL = role("model", r"mp_rank_(\d+)_model_states\.pt", "mp")
MODEL_3 = role("model", r"zero_pp_rank_(\d+)_mp_rank_(\d+)_model_states\.pt", "dp", "mp")
BF16 = "bf16_"
# the underscore before `optim` is missing in very old files; DeepSpeed still looks for these
OPTIMIZER = role(
    "optimizer",
    r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt",
    "dp",
    "mp",
)
# without ZeRO: the full optimizer of one expert-parallel rank
OF_EP = role("optimizer", r"expp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt", "ep", "mp")
# one expert of a layer; each model rank counts its own layers, and a layer counts all its experts
EXPERT = role(
    "expert",
    r"layer_(\d+)_expert_(\d+)_mp_rank_(\d+)_model_states\.pt",
    "layer",
    "expert",
    "mp",
    fixed="layer",
)
# one layer of a pipeline on one tensor rank; with a single tensor rank the second number is
# optional
LAYER = role(
    "layer",
    r"layer_(\d+)(?:-model_(?=\d))?(\d*)-model_states\.pt",
    "layer",
    "tp",
    fixed="layer",
)
FILES = (MODEL, MODEL_3, OPTIMIZER)
ROLES = (*FILES, OF_EP, EXPERT, LAYER)
"""The roles of DeepSpeed's files; in a pipeline, `mp` in a name counts stages and tensor ranks."""
# files that identify a trainer's directory: Hugging Face Trainer, Accelerate
TRAINER = file_names(
    r"trainer_state\.json|training_args\.bin|rng_state(_\d+)?\.pth|random_states_\d+\.pkl"
    r"|scheduler\.bin"
)
# the tags of Accelerate's models, each an engine; `latest` names the one that was saved last (1.15)
OF_MODELS = file_names(r"pytorch_model(_[1-9]\d*)?")
# files that DeepSpeed writes beside the tags
SCRIPTS = ("zero_to_fp32.py", "zero_to_torch.py")
POINTERS = ("latest", "latest_universal")
OWN = frozenset({*SCRIPTS, *POINTERS})


class TagDirectory(Struct, frozen=True):
    """A tag's directory (`path`) and the run directory around it.

    `run` is None if the user gave the tag's directory, not the run directory.
    """

    path: str
    tag: str
    run: str | None


class TagKind(Struct, frozen=True):
    """A kind of tag directory (a folder with one save): a run's, or DeepSpeed's universal one.

    what      the kind's name in errors
    pointer   the file that names the current tag, such as "latest"
    holds     tells whether a folder has a checkpoint of this kind
    tags      lists the tags in a run directory
    """

    what: str
    pointer: str
    holds: Callable[[str], bool]
    tags: Callable[[str], list[str]]

    def detect(self, path: str) -> list[str]:
        """The tags of the checkpoints at `path`; if `path` is a tag directory, its own tag."""
        if not sources.is_folder(path):
            return []
        if self.holds(path):
            return [os.path.basename(os.path.abspath(path))]
        latest, tags = pointed(path, self.pointer), self.tags(path)
        if latest is None:
            return tags
        models = _of_models(tags)
        if models == tags and latest not in tags:  # Accelerate does not read the file (1.15)
            return tags or [latest]
        return models if len(models) > 1 and OF_MODELS.fullmatch(latest) else [latest]

    def locate(self, path: str, tag: str | None) -> TagDirectory:
        """The directory of `tag`; if it is None, of the tag in the pointer file, or the only tag.

        Raises AmbiguousCheckpoint (several tags, no pointer file), NotACheckpoint (no tag, or not
        this one), IncompleteCheckpoint (the pointer file names a missing tag) and
        UnsupportedCheckpoint (the pointer file is a link out of the directory).
        """
        if tag is not None and self.holds(path) and self.detect(path) == [tag]:
            return TagDirectory(path, tag, None)
        if tag is not None:
            return self._folder(path, tag, "--tag names", is_stated=False)
        with sources.remembering():
            tags = self.detect(path)
        pointer = os.path.join(path, self.pointer)
        is_named = pointed(path, self.pointer) is not None
        if not (self.holds(path) or is_named) and sources.is_file(pointer):
            raise UnsupportedCheckpoint(
                "unsafe-name",
                f"{pointer} is a link that leads out of {path}, to {os.path.realpath(pointer)}: "
                "that file does not contain the name of a tag's folder",
                hint="choose the tag with --tag, or replace the link by a file",
                file=path,
            )
        if not tags:
            raise NotACheckpoint("not-a-checkpoint", f"{path} holds no {self.what}", file=path)
        if len(tags) > 1:
            raise AmbiguousCheckpoint(
                "several-tags",
                f"{path} holds {len(tags)} tags, and no file `{self.pointer}` says which is meant: "
                f"{listed(tags)}",
                hint=f"choose one with --tag {tags[-1]}",
                file=path,
            )
        if self.holds(path):
            return TagDirectory(path, self._own_tag(path), None)
        return self._folder(path, tags[0], f"{os.path.join(path, self.pointer)} names")

    def _own_tag(self, path: str) -> str:
        """The tag of the tag directory `path`; it may have several parts: "epoch_1/step_3".

        In that case, the run directory is the folder around `epoch_1`. It is found by its pointer
        file, which names a tag with as many parts.
        """
        run, names = os.path.abspath(path), list[str]()
        while len(names) < MOST_FOLDERS:
            run, name = os.path.split(run)
            names.insert(0, name)
            pointer = pointed(run, self.pointer) if sources.is_folder(run) else None
            if pointer is not None and is_tag(pointer) and pointer.count("/") + 1 == len(names):
                return "/".join(names)
        return os.path.basename(os.path.abspath(path))

    def _folder(self, path: str, tag: str, statement: str, is_stated: bool = True) -> TagDirectory:
        """The directory of the tag `tag` in the run directory `path`.

        If it does not exist, raises IncompleteCheckpoint for a tag from the pointer file
        (`is_stated`), NotACheckpoint for a tag from the user. The error's message begins with
        `statement`.
        """
        directory = os.path.join(path, tag)
        if not is_tag(tag):
            why = "which cannot be a folder's name"
        elif not sources.is_folder(directory):
            why = f"but {path} has no such folder"
        else:
            return TagDirectory(directory, tag, path)
        tags = self.tags(path) if sources.is_folder(path) else []
        message = f"{statement} {tag[:99]!r}, {why}"
        hint = f"choose a tag with --tag: {path} has {listed(tags)}"
        hint = (
            hint if tags else f"{path} has no tag's folder at all: copy the whole directory again"
        )
        if not is_stated:
            raise NotACheckpoint("pointer-dangling", message, hint)
        pointer = os.path.join(path, self.pointer)
        raise IncompleteCheckpoint("pointer-dangling", message, hint, file=pointer)


def holds_states(path: str) -> bool:
    """Whether a folder contains model files or optimizer files of ranks.

    False for a universal directory (which has a folder `zero`), although it has copies of such
    files.
    """
    try:
        names = [] if holds_universal(path) else sources.names(path)
    except PermissionError:  # lost+found
        return False
    return any(parse_name(FILES, whole_name(name)) for name in names if ENDING in name)


def holds_universal(path: str) -> bool:
    """Whether a folder contains model files and a folder `zero`, but no rank's optimizer file."""
    if not sources.is_folder(os.path.join(path, "zero")):
        return False
    names = sources.names(path)
    roles = {
        role_of_file.role for name in names if (role_of_file := parse_name(FILES, name)) is not None
    }
    return bool(roles) and OPTIMIZER not in roles


def _folders(path: str) -> list[str]:
    """Names of the subfolders of `path`, sorted by the numbers in them.

    Folders without read permission (such as `lost+found`) are left out. So are links to another
    folder in `path` (such as a link `latest`).
    """
    folders = ((name, os.path.join(path, name)) for name in sources.names_but_of_files(path))
    return by_counting(
        name
        for name, folder in folders
        if sources.is_folder(folder)
        and not sources.is_denied(folder)
        and sources.beside(folder) is None
    )


def _of_models(tags: list[str]) -> list[str]:
    return [tag for tag in tags if OF_MODELS.fullmatch(tag)]


def tags_of(path: str) -> list[str]:
    universal = pointed(path, "latest_universal")  # even if its zero/ is lost
    names = _tag_folders(path, "latest", holds_states)
    return [name for name in names if name != universal]


def universal_tags(path: str) -> list[str]:
    """Folders of `path` that contain a DeepSpeed universal checkpoint."""
    return _tag_folders(path, "latest_universal", holds_universal)


def _tag_folders(path: str, pointer: str, holds: Callable[[str], bool]) -> list[str]:
    """The names of the folders in `path` that are tags.

    A tag may be nested: "epoch_1/step_3". Folders at that depth are searched too if the pointer
    file names a nested tag, because a program that saves with nested tags always does so.
    """
    tag_in_pointer = pointed(path, pointer) or ""
    level, tags = _folders(path), list[str]()
    for _ in range(1 + tag_in_pointer.count("/") if is_tag(tag_in_pointer) else 1):
        tags += [name for name in level if holds(os.path.join(path, name))]
        other_folders = [name for name in level if name not in tags]
        level = [
            f"{folder}/{name}"
            for folder in other_folders
            for name in _folders(os.path.join(path, folder))
        ]
    return tags


def pointed(path: str, pointer: str) -> str | None:
    """The tag in the file `latest` or `latest_universal` (`pointer`); None if there is no file.

    The pointer may also be a link to the tag's folder. If it is a link to a file elsewhere, its
    content is used only if it names a folder in `path`: an error shall not print the content of
    some other file.
    """
    full = os.path.join(path, pointer)
    if sources.is_folder(full):  # a link in any program's run
        has_tag = holds_states(full) or holds_universal(full)
        return sources.beside(full) if has_tag else None
    if not sources.is_file(full):
        return None
    with sources.opened(full) as file:
        name: str = file.read(4096).decode("utf-8", "replace").strip()
    is_known = is_tag(name) and sources.is_folder(os.path.join(path, name))
    return None if not is_known and leads_out(full, path) else name


def refuse(directory: TagDirectory, what: str, hint: str | None = None) -> NoReturn:
    """Raises UnsupportedCheckpoint with the message that zckpt does not read `what`.

    The default hint lists what zckpt reads.
    """
    raise UnsupportedCheckpoint(
        "writer-unsupported",
        f"{directory.path} was saved with {what}, which zckpt does not read yet",
        hint=hint
        or "what is read: stage 0, 1, 2 and 3, and of pipelines stage 0 and 1; see `zckpt formats`",
        file=directory.path,
    )


def siblings(directory: TagDirectory) -> SiblingList:
    """Lists the trainer's files around the tag directory; none for a plain run directory."""
    run = directory.run
    files = SiblingList(run or directory.path, OPEN_FOLDERS)
    with sources.remembering():
        if run is None or not is_of_trainer(run):
            return files
        tags_of_engine = tags_of(run)
        tags = {directory.tag, *tags_of_engine, *universal_tags(run)}
    own_names = {*(tag.partition("/")[0] for tag in tags), *OWN}

    def is_other(name: str, entry: os.DirEntry[str]) -> bool:
        """Whether to skip an entry of `run`: a tag, DeepSpeed's file, or a directory of zckpt."""
        if name in own_names or files.is_closed(entry) or not files.is_folder(entry):
            return name in own_names
        manifest_path = os.path.join(entry.path, "manifest.json")
        return name.endswith(".partial") or sources.is_file(manifest_path)

    files.add_below(run, is_other)
    if len(models := _of_models(tags_of_engine)) > 1 and directory.tag in models:
        files.files, left_out = of_model(files.files, number_of(directory.tag))
        files.refuse(left_out, f"--tag takes {directory.tag}")
    return files


def is_of_trainer(run: str) -> bool:
    """Whether a run directory contains files of a trainer program."""
    return any(map(TRAINER.fullmatch, sources.names(run)))


def trainer_around(directory: TagDirectory) -> str | None:
    """The trainer's directory around a tag directory that the user gave; None without one."""
    above = os.path.dirname(os.path.abspath(directory.path))
    if directory.run is None and sources.is_file(os.path.join(above, "trainer_state.json")):
        return above
    return None


# -- files of DeepSpeed's names that torch.save did not write


ENDING = "_states.pt"
NUMBERS = re.compile(r"\d+\.\d+")  # of the part, and the number of parts
DATASTATES = b'"datastates_metadata": {"data_offsets": ['
LAST = 200  # bytes; the JSON ends with that key


def whole_name(name: str) -> str:
    """The name of the complete file, if `name` is one part of it that FastPersist wrote.

    "mp_rank_00_model_states.pt-0.2" becomes "mp_rank_00_model_states.pt". Other names stay
    unchanged.
    """
    whole, _, numbers = name.rpartition("-")
    return whole if whole.endswith(ENDING) and NUMBERS.fullmatch(numbers) else name


def is_by_datastates(path: str) -> bool:
    """Whether DataStates-LLM wrote the file at `path`, though it has a file name of DeepSpeed."""
    if not path.endswith(ENDING) or not sources.is_file(path):
        return False
    with sources.opened(path) as file:
        length = int.from_bytes(file.read(8), "little")
        if not len(DATASTATES) < length < os.fstat(file.fileno()).st_size:
            return False
        file.seek(8 + max(0, length - LAST))
        return DATASTATES in file.read(min(length, LAST))


def is_foreign(path: str) -> bool:
    """Whether DataStates-LLM wrote the file, or whether it is a part that FastPersist wrote."""
    is_part = whole_name(path) != path and sources.is_file(path)
    return is_part or is_by_datastates(path)


def refuse_foreign(folder: str, names: Sequence[str]) -> None:
    """Raises UnsupportedCheckpoint if FastPersist or DataStates-LLM wrote files of a folder.

    `names` are the names of its files. FastPersist's files of stage 3 are not refused: they are
    complete files of torch.save.
    """
    # FastPersist (`checkpoint.writer`): mp_rank_00_model_states.pt-0.2 is part 0 of 2 of the file.
    # DeepSpeed 0.19.8 can save such parts, but does not load them
    wholes = {name: whole_name(name) for name in names}
    parts = [name for name, whole in wholes.items() if whole not in wholes]
    if parts:
        _refuse_part(os.path.join(folder, min(parts)))
    # DataStates-LLM (`datastates_ckpt`, which DeepSpeed 0.19.8 can use): 8 bytes with the length of
    # the JSON, the JSON, tensors, a pickle
    files = sorted(name for name in names if name.endswith(ENDING))
    if files and is_by_datastates(path := os.path.join(folder, files[0])):
        raise UnsupportedCheckpoint(
            "writer-unsupported",
            f"{path} was saved by DataStates-LLM, whose files zckpt does not read",
            hint="load every file with DataStates' load(path), save the result with torch.save "
            "under the same name in another directory, and give that directory",
            file=path,
        )


def _refuse_part(path: str) -> NoReturn:
    try:
        peek(path)
    except ZckptError:
        hint = (
            "DeepSpeed does not join the parts: save again, without `writer` below `checkpoint` in "
            "the ds_config"
        )
    else:  # torch gives each writer all bytes, unless it was patched for FastPersist
        hint = (
            "every part has the bytes of the complete file: copy the directory, rename one part of "
            "each file to a name that ends with .pt, and give the copy"
        )
    raise UnsupportedCheckpoint(
        "writer-unsupported",
        f"{path} is one part of {whole_name(os.path.basename(path))}, written by FastPersist: "
        "zckpt does not read such parts",
        hint=hint,
        file=path,
    )
