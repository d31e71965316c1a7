"""Identifies the trainer program that saved a directory, and the files it needs to resume.

    transformers    trainer_state.json, scheduler.pt, rng_state*.pth: its Trainer, and TRL's
    accelerate      random_states_R.pkl, scheduler.bin: Accelerator.save_state

These programs store their files beside the engine's files, in the same way for every engine. zckpt
calls such a file a sibling.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from msgspec.structs import replace

from ..core.checkpoint.inert import Scalar
from ..core.checkpoint.manifest import Sibling
from ..core.checkpoint.siblings import SiblingList
from ..core.storage import sources
from ..core.storage.filenames import number_of
from ..errors import Notice, literal, note, warning

TRANSFORMERS, ACCELERATE = "transformers", "accelerate"
SCHEDULERS = ("scheduler.pt", "scheduler.bin")
_SCHEDULER = re.compile(r"scheduler(?:_\d+)?\.bin")
LOADING_FOLDERS = ("huggingface/", "model/.hf_metadata/", ".hf_metadata/", "model/")
"""Folders in which verl, NeMo AutoModel and its PEFT runs keep files for from_pretrained."""
OPEN_FOLDERS = frozenset({".hf_metadata"})
"""Hidden folders that are copied: a program writes them for distribution with the weights."""
OPEN_FILES = frozenset({".metadata.json"})
"""Hidden files that a program needs: OLMo-core (3.0) loads no folder without this file."""
CONSOLIDATED, SCRIPT = "consolidated", "consolidate.sh"
_OF_RANKS = re.compile(r"(?P<folder>\w+)/(?:(?P=folder)_(?:global|dp)_)?rank_?\d+\.pt")
_RANDOM_STATE = re.compile(r"rng_state_\d+\.pth|random_states_\d+\.pkl")
MAX_JSON = 16 << 20  # bytes; larger siblings are not read
# files for from_pretrained of models, tokenizers and processors, and a model's own code
LOADED = re.compile(
    r"(?:adapter_|generation_|preprocessor_|processor_|image_processor_|video_preprocessor_)?"
    r"config\.json|configuration_\w+\.py|(?:modeling|tokenization|processing|image_processing)_\w+"
    r"\.py|tokenizer(?:_config)?\.json|tokenizer\.model(?:\.v\d+)?|special_tokens_map\.json"
    r"|added_tokens\.json|vocab\.(?:json|txt|bpe)|merges\.txt|chat_template\.(?:jinja|json)"
    r"|additional_chat_templates/\w+\.jinja|(?:spiece|spm|sentencepiece\.bpe|source|target)\.model"
    r"|source\.spm|target\.spm|bpe\.codes|\w+\.tiktoken|tekken\.json|preprocessor_config\.json"
)
STATE = "trainer_state.json"
HEAD = 1 << 12  # bytes at its start in which the counter is searched first
_COUNTER = re.compile(rb'(?s)\s*\{[^{}\[\]]*\n  "global_step": ([0-9]{1,18}),')
_MARKS = (
    (TRANSFORMERS, re.compile(r"trainer_state\.json|training_args\.bin")),
    (ACCELERATE, re.compile(r"random_states_\d+\.pkl|scheduler\.bin|sampler\.bin")),
)


def program_of(siblings: Iterable[Sibling]) -> str | None:
    """The program that saved a checkpoint, by the files beside it; None if unknown."""
    return _program([item.name for item in siblings])


def is_of_program(names: Collection[str]) -> bool:
    """Whether a training program that zckpt knows saves files with these names."""
    return _program(names) is not None


def _program(names: Collection[str]) -> str | None:
    programs = (program for program, mark in _MARKS if any(map(mark.fullmatch, names)))
    return next(programs, None)


def not_loaded(files: str, dialects: Sequence[str]) -> Notice:
    """Warns that the trainer does not load `files` of the target, because of their names.

    The warning proposes `--dialect` with each of `dialects`: then the files get names that the
    trainer finds. The warning's `subject` is the first of `dialects`.
    """
    ways = " or ".join(f"--dialect {name} ({LOADED_WITH[name]})" for name in dialects)
    message = f"the trainer does not find {files}: to resume with it, add {ways}"
    return warning("program-must-set", message, subject=dialects[0])


def resuming(siblings: Iterable[Sibling], otherwise: Callable[[str], str]) -> Callable[[str], str]:
    """Returns a function that gives, for a path, the line of code that resumes from it.

    The program is recognized by its files (`siblings`). If it is unknown, `otherwise` is returned.
    """
    program = program_of(siblings)
    if program is None:
        return otherwise
    before, after = RESUMING[program]
    return lambda path: f"{before}{literal(path)}{after}"


LOADED_WITH = {"accelerate": "FSDP", "safetensors": "DDP, or one GPU"}
RESUMING = {
    TRANSFORMERS: ("trainer.train(resume_from_checkpoint=", ")"),
    ACCELERATE: ("accelerator.load_state(", ")"),
}


def of_model(siblings: Iterable[Sibling], number: int) -> tuple[list[Sibling], list[str]]:
    """Selects the files beside a checkpoint of several models that model number `number` needs.

    Of the schedulers' files, only the one of this model is kept, and renamed as if there were only
    one model. Also returns the names of the other schedulers' files, which are left out.
    """
    files, other_names = [], []
    for item in siblings:
        if not _SCHEDULER.fullmatch(item.name):
            files.append(item)
        elif number_of(item.name) == number:
            files.append(replace(item, name="scheduler.bin"))
        else:
            other_names.append(item.name)
    return files, other_names


def json_of(siblings: Iterable[Sibling], name: str) -> dict[str, Any] | None:
    """The JSON object in the file `name` beside the checkpoint; None if missing or not JSON."""
    item = next((each for each in siblings if each.name == name and each.size <= MAX_JSON), None)
    if item is None:
        return None
    try:
        with sources.opened(item.path) as file:
            content = json.loads(file.read().decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def config_of(siblings: Iterable[Sibling], name: str) -> dict[str, Any] | None:
    """The JSON object in the file `name` beside the weights; None without such a file.

    The file may be beside the weights, or in a subfolder in which some programs store the files for
    from_pretrained.
    """
    files = list(siblings)
    names = (name, *(f"{folder}{name}" for folder in LOADING_FOLDERS[1:]))
    return next((value for each in names if (value := json_of(files, each)) is not None), None)


def counter(folder: str) -> int | None:
    """Reads the `global_step` in trainer_state.json of a checkpoint's folder; None if not stated.

    Usually only the beginning of the file is read: the Trainer sorts the keys (transformers 5.23),
    so this key comes before the long history of logs.
    """
    path = os.path.join(folder, STATE)
    if not sources.is_file(path):
        return None
    with sources.opened(path) as file:
        head = file.read(HEAD)
    if match := _COUNTER.match(head.partition(b'"log_history"')[0]):
        return int(match[1])
    state = json_of([Sibling(STATE, path, sources.size(path))], STATE) or {}
    number = state.get("global_step")
    return number if type(number) is int else None


def fresh_scheduler(step: int, groups: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The state of a torch LambdaLR after `step` updates, as transformers stores it."""
    rates = [number(group.get("lr")) for group in groups]
    return {
        "base_lrs": [number(group.get("initial_lr", group.get("lr"))) for group in groups],
        "last_epoch": step,
        "_step_count": step + 1,
        "_get_lr_called_within_step": False,
        "_last_lr": rates,
        "lr_lambdas": [None] * len(groups),
    }


def number(value: Any) -> Any:
    """Returns the number in a `Scalar`, a tensor of one element such as `lr`.

    Other values unchanged.
    """
    return value.value if isinstance(value, Scalar) else value


def files_to_load_by(siblings: Iterable[Sibling]) -> list[Sibling]:
    """Selects the files that from_pretrained needs beside the weights, such as the tokenizer.

    Some programs store them in a subfolder, whose name is removed from the names of the files.
    """
    by_name: dict[str, Sibling] = {}
    for item in siblings:
        name = without_folder(item.name)
        if LOADED.fullmatch(name):
            by_name.setdefault(name, replace(item, name=name))
    return list(by_name.values())


def without_folder(name: str) -> str:
    """Removes from a file's name the subfolder in which programs store files for from_pretrained.

    Other names stay unchanged.
    """
    folder = next((folder for folder in LOADING_FOLDERS if name.startswith(folder)), "")
    return name.removeprefix(folder)


def beside(
    root: str, own_paths: Collection[str], source: str | None = None
) -> tuple[list[Sibling], list[Notice]]:
    """Lists the files that lie beside a checkpoint in its directory, and notes on those left out.

    root       the directory
    own_paths  the checkpoint's own files and folders, which are skipped
    source     links are followed only within this directory, by default `root`

    The files of a folder are listed only if the folder is `.hf_metadata`, or has nothing but files
    for from_pretrained, or nothing but one file per rank.
    """
    siblings = SiblingList(source or root, OPEN_FOLDERS)
    folders: list[Notice] = []
    with os.scandir(root) as items:
        listed = sorted(items, key=lambda item: item.name)
    for item in listed:
        if item.path in own_paths:
            continue
        if siblings.is_closed(item) or not siblings.is_folder(item):
            siblings.add(item.name, item.path)
            continue
        with os.scandir(item.path) as inside:
            files = sorted(inside, key=lambda file: file.name)
        # files for from_pretrained (verl's `huggingface`), or one file per rank (`rng` and
        # `dataloader` of NeMo AutoModel 0.7)
        if files and (
            item.name in OPEN_FOLDERS or all(map(_is_loaded, files)) or all(map(_is_of_rank, files))
        ):
            for file in files:
                siblings.add(f"{item.name}/{file.name}", file.path)
        else:
            message = f"{item.name}/: a folder that is not part of the checkpoint"
            folders.append(note("file-omitted", message, file=item.path))
    return siblings.files, folders + siblings.omitted


def inside(
    root: str, folder: str, own_paths: Collection[str], source: str
) -> tuple[list[Sibling], list[Notice]]:
    """Lists the trainer's files in a folder of the checkpoint, and notes on those left out.

    `own_paths` are the checkpoint's own files in this folder. Left out are NeMo AutoModel's second
    copy of the weights (`consolidated`), and the script that writes this copy.
    """
    siblings = SiblingList(source, OPEN_FOLDERS)
    lines: list[Notice] = []

    def is_other(name: str, entry: os.DirEntry[str]) -> bool:
        if entry.path in own_paths:
            return True
        if name == f"{folder}/{CONSOLIDATED}":
            why = f"{name}/: a second copy of the weights; `zckpt export` writes such files"
        elif name == f"{folder}/{SCRIPT}":
            why = f"{name}: a script that works only in its own folder"
        else:
            return False
        lines.append(note("file-omitted", why, file=entry.path))
        return True

    siblings.add_below(os.path.join(root, folder), is_other, root)
    siblings.files.sort(key=lambda file: file.name.split("/"))
    return siblings.files, lines + siblings.omitted


def once_more(folder: str, source: str) -> list[Sibling]:
    """The files of the second copy of the weights, which NeMo AutoModel puts into `consolidated`.

    These files are not copied to a target. Links are followed only within the directory `source`.
    """
    folder_inside = os.path.join(folder, CONSOLIDATED)
    files = SiblingList(source, OPEN_FOLDERS)
    if sources.is_folder(folder_inside) and not sources.is_denied(folder_inside):
        files.add_below(folder_inside, root=source)
    return files.files


def vocabulary(path: str) -> int | None:
    """The vocabulary size in a model's config.json at `path`; None if it is not stated."""
    if not sources.is_file(path):
        return None
    config = json_of([Sibling("config.json", path, sources.size(path))], "config.json") or {}
    text = config.get("text_config")
    sizes = [each.get("vocab_size") for each in (config, text) if isinstance(each, dict)]
    return next((size for size in sizes if type(size) is int), None)


def ranks_of(siblings: Iterable[Sibling]) -> dict[str, int]:
    """Maps each folder that has one file per rank, such as `rng`, to the number of its files."""
    matches = filter(None, (_OF_RANKS.fullmatch(item.name) for item in siblings))
    return Counter(match["folder"] for match in matches)


def for_ranks(
    siblings: Iterable[Sibling], before: int, ranks: int
) -> tuple[list[Sibling], list[Notice]]:
    """Selects the trainer's files for a run of `ranks` data-parallel ranks.

    If their number changes, the random states of single ranks are left out, with notes. `before` is
    the source's number of ranks. If it is 1 or less, it is unknown: then the random states are
    counted.
    """
    taken, lines = list(siblings), []
    of_ranks = [item for item in taken if _RANDOM_STATE.fullmatch(item.name)]
    before = before if before > 1 else len(of_ranks)
    if before != ranks:
        taken = [item for item in taken if item not in of_ranks]
        for item in of_ranks:
            message = f"{item.name}: random state of one of {before} ranks"
            lines.append(note("rank-state-omitted", message, file=item.path))
    return taken, lines


def _is_of_rank(file: os.DirEntry[str]) -> bool:
    folder = os.path.basename(os.path.dirname(file.path))
    return _OF_RANKS.fullmatch(f"{folder}/{file.name}") is not None


def _is_loaded(file: os.DirEntry[str]) -> bool:
    return LOADED.fullmatch(file.name) is not None and not file.is_dir(follow_symlinks=False)
