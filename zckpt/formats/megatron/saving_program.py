"""Identifies the program that saved a Megatron-Core directory, and the program's own files.

    Megatron-LM      RUN/iter_0000006/   no own files: its arguments are in the common state
    Megatron-Bridge  RUN/iter_0000006/   run_config.yaml, train_state.pt, tokenizer/
                     RUN/latest_train_state.pt, a copy of train_state.pt
    NeMo 2           NAME/weights/       NAME/context/

A program resumes only with its own files, so zckpt copies them. The facts on Bridge and NeMo are
from their source code: Megatron-Bridge of 2026-08, NeMo 2.5. Bridge and NeMo use the keys of
Megatron-Core, but NeMo adds the prefix `module.`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from typing import Any

from ...core.checkpoint.manifest import Sibling
from ...core.checkpoint.siblings import SiblingList
from ...core.storage import sources
from ...training.trainers import OPEN_FOLDERS

CONFIG, TRAIN_STATE, TOKENIZER = "run_config.yaml", "train_state.pt", "tokenizer"
LATEST_STATE = f"latest_{TRAIN_STATE}"
WEIGHTS, CONTEXT = "weights", "context"
NEMO, BRIDGE = "nemo", "bridge"
LOADING = {
    NEMO: "in NeMo: AutoResume(resume_from_path={!r})",
    BRIDGE: "in Megatron-Bridge: checkpoint.load={}",
}
WITHOUT_RANDOM = (
    " checkpoint.load_rng=false"  # its run_config.yaml states that there are random states
)
MAX_TEXT = 1 << 20  # bytes of a file that names or describes a checkpoint
SECTION = re.compile(r"(?m)^model:[ \t]*\n((?:[ \t]+.*\n|[ \t]*\n)*)")
SCALAR = re.compile(r"(?m)^ {2}(\w+): (\d{1,9}|true|false)[ \t]*$")
NAMES = {  # for arguments of Megatron-LM with the opposite meaning
    "share_embeddings_and_output_weights": "untie_embeddings_and_output_weights",
}


def program_of(folder: str) -> str | None:
    """The program that saved a directory: NEMO or BRIDGE; None for Megatron-LM and unknown ones."""
    if os.path.basename(folder) == WEIGHTS:
        return NEMO
    return BRIDGE if sources.is_file(os.path.join(folder, CONFIG)) else None


def beside(folder: str) -> SiblingList:
    """Lists the program's own files: in the tensors' folder or, for NeMo, beside it.

    Raises OSError if a folder cannot be listed.
    """
    of_nemo = program_of(folder) == NEMO
    root = os.path.dirname(folder) if of_nemo else folder
    names = (CONTEXT,) if of_nemo else (CONFIG, TRAIN_STATE, TOKENIZER)
    siblings = SiblingList(root, OPEN_FOLDERS)
    siblings.add_below(root, lambda name, _: name.split("/")[0] not in names)
    return siblings


def small_file(path: str) -> bytes:
    """Reads a file of at most MAX_TEXT bytes; returns b"" for a larger or missing file."""
    if not sources.is_file(path) or sources.size(path) > MAX_TEXT:
        return b""
    with sources.opened(path) as file:
        return bytes(file.read())


def arguments_of(folder: str) -> dict[str, Any]:
    """The run's sizes in Megatron-Bridge's run_config.yaml, by Megatron-LM's names of arguments."""
    text = small_file(os.path.join(folder, CONFIG)).decode("utf-8", "replace")
    section = SECTION.search(text if text.endswith("\n") else f"{text}\n")
    if section is None:
        return {}
    values: dict[str, Any] = {}
    for key, word in SCALAR.findall(section[1]):
        value: Any = {"true": True, "false": False}.get(word)
        value = int(word) if value is None else value
        if key in NAMES:
            key, value = NAMES[key], not value
        values[key] = value
    if isinstance(values.get("gated_linear_unit"), bool):
        values["swiglu"] = values["gated_linear_unit"]
    return values


def placed(
    siblings: Iterable[Sibling], program: str | None, iteration: str
) -> Iterator[tuple[str, Sibling]]:
    """Yields the program's files with the paths that they get in the target.

    `iteration` is the target's folder of tensors, such as "iter_0000006".
    """
    for item in siblings:
        if program == BRIDGE and item.name.split("/")[0] in (CONFIG, TRAIN_STATE, TOKENIZER):
            yield f"{iteration}/{item.name}", item
            if item.name == TRAIN_STATE:
                yield LATEST_STATE, item
        else:
            yield item.name, item
