"""Which trainer program saved a directory, and which files it needs to resume.

    transformers    trainer_state.json, scheduler.pt, rng_state*.pth: its Trainer, and TRL's
    accelerate      random_states_R.pkl, scheduler.bin: Accelerator.save_state

These programs store their files beside the engine's files (siblings), for every engine alike.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

from ..core import sources
from ..core.inert import Scalar
from ..core.manifest import Sibling
from ..core.siblings import SiblingList
from ..core.values import replace
from ..errors import literal

TRANSFORMERS, ACCELERATE = "transformers", "accelerate"
SCHEDULERS = ("scheduler.pt", "scheduler.bin")
HUGGING_FACE = "huggingface/"
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
_OF_TRAINER = re.compile(r"training_args\.bin|rng_state(?:_\d+)?\.pth")
_MARKS = (
    (TRANSFORMERS, re.compile(r"trainer_state\.json|training_args\.bin")),
    (ACCELERATE, re.compile(r"random_states_\d+\.pkl|scheduler\.bin|sampler\.bin")),
)


def program_of(siblings: Iterable[Sibling]) -> str | None:
    """The program that saved a checkpoint, by the files beside it."""
    names = [item.name for item in siblings]
    for program, mark in _MARKS:
        if any(map(mark.fullmatch, names)):
            return program
    return None


def lacking_state(siblings: Iterable[Sibling]) -> list[str]:
    """A warning if the Trainer's own state is not among the files that it saved beside others."""
    names = [item.name for item in siblings]
    own = [name for name in names if _OF_TRAINER.fullmatch(name)]
    if not own or STATE in names:
        return []
    return [
        f"Hugging Face's Trainer saved {own[0]}, but its {STATE} is not there, without which "
        "trainer.train(resume_from_checkpoint=...) fails"
    ]


def resuming(siblings: Iterable[Sibling], otherwise: Callable[[str], str]) -> Callable[[str], str]:
    """Gives the line with which the program of these files resumes from a directory.

    `otherwise` is for files of no program.
    """
    program = program_of(siblings)
    if program is None:
        return otherwise
    before, after = RESUMING[program]
    return lambda path: f"{before}{literal(path)}{after}"


RESUMING = {
    TRANSFORMERS: ("trainer.train(resume_from_checkpoint=", ")"),
    ACCELERATE: ("accelerator.load_state(", ")"),
}


def json_of(siblings: Iterable[Sibling], name: str) -> dict[str, Any] | None:
    """The JSON object in the sibling `name`; None if there is none, or the file has no JSON."""
    item = next((each for each in siblings if each.name == name and each.size <= MAX_JSON), None)
    if item is None:
        return None
    try:
        with sources.opened(item.path) as file:
            content = json.loads(file.read().decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def fresh_scheduler(step: int, groups: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The state of a torch LambdaLR after `step` updates: transformers makes such schedulers."""
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
    """A 0-d tensor (a capturable optimizer's learning rate) by value; others unchanged."""
    return value.value if isinstance(value, Scalar) else value


def files_to_load_by(siblings: Iterable[Sibling]) -> list[Sibling]:
    """The files that from_pretrained needs beside the weights: configuration, tokenizer, processor.

    verl stores them in a folder `huggingface`; its name is removed from theirs.
    """
    by_name: dict[str, Sibling] = {}
    for item in siblings:
        name = item.name.removeprefix(HUGGING_FACE)
        if LOADED.fullmatch(name):
            by_name.setdefault(name, replace(item, name=name))
    return list(by_name.values())


def beside(
    root: str, own: Collection[str], source: str | None = None
) -> tuple[list[Sibling], list[str]]:
    """Files of a directory that do not belong to its checkpoint, and lines about what is left out.

    `own` are paths of the checkpoint's files and folders. A folder is copied if it has only
    configuration and tokenizer files (verl's `huggingface`); other folders are left out and listed.
    Links are followed inside of the directory `source`, by default `root`.
    """
    siblings = SiblingList(source or root)
    folders: list[str] = []
    with os.scandir(root) as items:
        listed = sorted(items, key=lambda item: item.name)
    for item in listed:
        if item.path in own:
            continue
        if siblings.is_closed(item) or not siblings.is_folder(item):
            siblings.add(item.name, item.path)
            continue
        with os.scandir(item.path) as inside:
            files = sorted(inside, key=lambda file: file.name)
        if files and all(map(_is_loaded, files)):
            for file in files:
                siblings.add(f"{item.name}/{file.name}", file.path)
        else:
            folders.append(f"{item.name}/: a folder that is not part of the checkpoint")
    return siblings.files, folders + siblings.left_out


def _is_loaded(file: os.DirEntry[str]) -> bool:
    return LOADED.fullmatch(file.name) is not None and not file.is_dir(follow_symlinks=False)
