"""A table of the files that trainers read when they resume, and what happens if one is missing.

The rows follow the source code of the programs; tests/resume/test_needs.py checks them with the
programs themselves. zckpt requires a file only if this table says that it is needed. To add a file
of a new trainer, add a row, and run `python -m tests.needs_page > docs/resume-files.md`.

What happens without the file:

    ends      an error: the run does not start
    anew      without any message, the optimizer or the learning rate schedule starts anew
    goes on   the run continues correctly, with other random numbers or without a minor feature
    unread    resuming does not read the file
"""

from __future__ import annotations

import os
import re
from typing import Literal

from msgspec import Struct

from ..core.checkpoint.facts import FlatBufferEngine, StateDictEngine
from ..core.checkpoint.manifest import Manifest
from ..core.storage.inventory import Role, parse_name, role
from ..errors import listed, note
from .lightning import META as META_FILE
from .lightning import NAME as LIGHTNING
from .lightning import SHARDED, TAG
from .trainers import ACCELERATE, LOADED, TRANSFORMERS, program_of

Outcome = Literal["ends", "anew", "goes on", "unread"]
LOST: tuple[Outcome, ...] = ("ends", "anew")
"""Outcomes that make a file necessary: an error, or an optimizer or schedule that starts anew."""
DEEPSPEED, AUTOMODEL = "deepspeed", "automodel"
ENDING = ".ckpt"


class Need(Struct, frozen=True):
    """A row of the table `NEEDS`: a file that a trainer reads when it resumes.

    name              the file's usual name
    missing, damaged  what happens then
    read_by           the trainer's function that reads the file
    engine            the row holds only for checkpoints of this format; "" for all
    scheduler_of      only if "program" or "engine" has the scheduler; "" for both
    beside            only for checkpoints that also have this file; "" for all
    """

    role: Role
    name: str
    missing: Outcome
    damaged: Outcome
    read_by: str
    engine: str = ""
    scheduler_of: str = ""
    beside: str = ""


TRAINER_STATE = role("trainer state", r"trainer_state\.json")
SCHEDULER = role("scheduler", r"scheduler(?:_(\d+))?\.(?:pt|bin)", "model")
SCALER = role("scaler", r"scaler\.pt")
RANDOM_STATE = role(
    "random state",
    r"rng_state(?:_(\d+))?\.pth|random_states_(\d+)\.pkl|rng/rng_(?:global|dp)_rank_(\d+)\.pt",
    *("rank", "rank", "rank"),
)
DATALOADER = role(
    "dataloader", r"dl_state_dict(?:_(\d+))?\.bin|dataloader/dataloader_dp_rank_(\d+)\.pt",
    "model", "rank",
)  # fmt: skip
SAMPLER = role("sampler", r"sampler(?:_(\d+))?\.bin", "model")
CUSTOM = role("registered object", r"custom_checkpoint_(\d+)\.pkl", "number")
CONFIGURATION = role("configuration", r"config\.json")
ARGUMENTS = role("arguments", r"training_args\.bin")
LOSSES = role("losses", r"losses\.json")
INDEX = role("index of weights", r"fqn_to_file_index_mapping\.json")
STEP_SCHEDULER = role("trainer state", r"step_scheduler\.pt")
META = role("trainer state", re.escape(META_FILE))
FULL_WEIGHTS = role("weights of FSDP", r"pytorch_model_fsdp(?:_(\d+))?\.bin", "model")
WEIGHTS = role(
    "weights", r".*\.safetensors(?:\.index\.json)?|.*pytorch_model.*\.bin(?:\.index\.json)?"
)
TOKENIZER = role("tokenizer", LOADED.pattern)
VERSIONS = {
    TRANSFORMERS: "Trainer of transformers 5.24",
    ACCELERATE: "Accelerate 1.15",
    AUTOMODEL: "NeMo AutoModel 0.5",
    LIGHTNING: "Lightning 2.6",
}
"""The version of each program whose source code was read for this table."""
SCHEDULERS = "_load_optimizer_and_scheduler"
NEEDS: dict[str, tuple[Need, ...]] = {
    TRANSFORMERS: (
        Need(TRAINER_STATE, "trainer_state.json", "ends", "ends", "train"),
        Need(SCHEDULER, "scheduler.pt", "ends", "ends", SCHEDULERS, DEEPSPEED, "program"),
        Need(SCHEDULER, "scheduler.pt", "unread", "unread", SCHEDULERS, DEEPSPEED, "engine"),
        Need(SCHEDULER, "scheduler.pt", "anew", "ends", SCHEDULERS),
        Need(SCALER, "scaler.pt", "goes on", "ends", "_load_scaler"),
        Need(RANDOM_STATE, "rng_state_0.pth", "goes on", "ends", "_load_rng_state"),
        Need(
            *(FULL_WEIGHTS, "pytorch_model_fsdp.bin", "ends", "ends", "_load_from_checkpoint"),
            beside="optimizer.bin",
        ),
        Need(CONFIGURATION, "config.json", "goes on", "unread", "train", DEEPSPEED),
        Need(CONFIGURATION, "config.json", "goes on", "ends", "_load_from_checkpoint"),
    ),
    ACCELERATE: (
        Need(SCHEDULER, "scheduler.bin", "goes on", "ends", "load_accelerator_state"),
        Need(SCALER, "scaler.pt", "goes on", "ends", "load_accelerator_state"),
        Need(DATALOADER, "dl_state_dict.bin", "goes on", "ends", "load_accelerator_state"),
        Need(SAMPLER, "sampler.bin", "goes on", "ends", "load_accelerator_state"),
        Need(CUSTOM, "custom_checkpoint_0.pkl", "goes on", "ends", "load_custom_state"),
        Need(RANDOM_STATE, "random_states_0.pkl", "goes on", "goes on", "load_accelerator_state"),
    ),
    AUTOMODEL: (
        Need(STEP_SCHEDULER, "step_scheduler.pt", "ends", "ends", "_load_checkpoint_tracked_state"),
        Need(RANDOM_STATE, "rng/rng_global_rank_0.pt", "ends", "ends", "load_on_global_ranks"),
        Need(
            *(DATALOADER, "dataloader/dataloader_dp_rank_0.pt", "goes on", "ends"),
            "load_on_dp_ranks",
        ),
        Need(LOSSES, "losses.json", "goes on", "unread", "read_checkpoint_metric"),
    ),
    LIGHTNING: (Need(META, META_FILE, "ends", "ends", "FSDPStrategy.load_checkpoint", "dcp"),),
}
"""The table: for each program, a row for each file that the program reads.

If several rows are about one file, the first row whose conditions are true applies.
"""


ROLES = (
    *dict.fromkeys(need.role for rows in NEEDS.values() for need in rows),
    *(ARGUMENTS, INDEX, WEIGHTS, TOKENIZER),
)
"""The roles of files that programs store beside the engine's files, such as "scheduler".

A file has the first role whose pattern matches its name.
"""
OF_TRANSFORMERS = re.compile(
    r"/global_step\d+/|/(?:model|adapter_model|pytorch_model)[^/]*\.(?:safetensors|bin)$"
    r"|/pytorch_model_fsdp"
)
"""Matches paths of engines' files that have the names which the Trainer looks for."""
OF_OPTIMIZER = "/optim/"
CONFIGURATIONS = {"config.json", "adapter_config.json"}
SCHEDULER_FILE, STEP_SCHEDULER_FILE = "scheduler.pt", "step_scheduler.pt"
RNG_OF_AUTOMODEL = re.compile(r"rng/rng_(?:global|dp)_rank_\d+\.pt", re.ASCII)
OF_RUN = frozenset(
    need.name
    for need in (TRAINER_STATE, SCHEDULER, SCALER, RANDOM_STATE, DATALOADER, SAMPLER, CUSTOM)
)
"""Roles of files that a run needs to continue, and weights alone do not."""


def for_weights_alone(manifest: Manifest) -> Manifest:
    """Removes files that only a resumed run needs, such as a scheduler's, and notes them.

    This is for targets with weights only. `OF_RUN` lists the roles of these files.
    """
    of_run = [
        item
        for item in manifest.files.siblings
        if (role_of_file := parse_name(ROLES, item.name)) is not None
        and role_of_file.role.name in OF_RUN
    ]
    if not of_run:
        return manifest
    names = listed([item.name for item in of_run], len(of_run))
    message = f"{names}: not copied, because no run resumes from weights only"
    left = note("file-omitted", message, file=of_run[0].path)
    siblings = tuple(item for item in manifest.files.siblings if item not in of_run)
    return manifest.replace(siblings=siblings, omitted=(*manifest.notices.omitted, left))


def of_program(manifest: Manifest) -> list[Need]:
    """The rows of the table `NEEDS` that apply to the program of a checkpoint.

    If several rows are about files of one role, such as "scheduler", the first that applies is
    taken.
    """
    rows: dict[str, Need] = {}
    scheduler_of = "engine" if _engine_has_scheduler(manifest) else "program"
    names = {os.path.basename(path) for path in manifest.files.paths}
    for need in NEEDS.get(_program(manifest) or "", ()):
        if (
            need.engine in ("", manifest.format)
            and need.scheduler_of in ("", scheduler_of)
            and need.beside in ("", *names)
        ):
            rows.setdefault(need.role.name, need)
    return [*rows.values()]


def _engine_has_scheduler(manifest: Manifest) -> bool:
    """Whether the program loads its scheduler's state from the engine's files.

    DeepSpeed saves the scheduler if Trainer or Accelerate passes one to it. They do so if the
    ds_config defines an optimizer or a scheduler (transformers 5.24, integrations/deepspeed.py).
    """
    engine = manifest.run.engine
    config = engine.config if isinstance(engine, FlatBufferEngine) else {}
    is_given = not config or not {"optimizer", "scheduler"}.isdisjoint(config)
    return manifest.state.get("lr_scheduler") is not None and is_given


def _program(manifest: Manifest) -> str | None:
    """The program that resumes from a checkpoint, such as Hugging Face's Trainer; None if unknown.

    Several files are looked at, because any single file may be missing.
    """
    names = {item.name for item in (*manifest.files.siblings, *manifest.files.omitted_files)}
    files = manifest.files.paths
    engine = manifest.run.engine
    if manifest.format == "dcp" and manifest.root.endswith(ENDING):
        is_lightnings = isinstance(engine, StateDictEngine) and engine.model == SHARDED.model
        return LIGHTNING if is_lightnings else None
    if any(OF_OPTIMIZER in path for path in files) and (
        STEP_SCHEDULER_FILE in names or any(map(RNG_OF_AUTOMODEL.fullmatch, names))
    ):
        return AUTOMODEL
    program = program_of(manifest.files.siblings)
    of_transformers = any(map(OF_TRANSFORMERS.search, files))
    if program == TRANSFORMERS:
        return program if of_transformers else None
    # the Trainer writes its state last, so a stopped save may lack it
    has_others = SCHEDULER_FILE in names and any(map(RANDOM_STATE.names.fullmatch, names))
    is_model = manifest.format != "gathered" or not CONFIGURATIONS.isdisjoint(names)
    has_lost_its_state = has_others and of_transformers and is_model
    return TRANSFORMERS if program is None and has_lost_its_state else program


def reads_pointer(manifest: Manifest) -> bool:
    """Whether the program reads the pointer file (`latest`) to find the engine's folder.

    True for Lightning, and for transformers' Trainer. Accelerate passes the folder's name itself
    (1.15). If the program is unknown, the result is False.
    """
    folder, tag = os.path.split(manifest.root)
    of_lightning = tag == TAG and folder.endswith(ENDING)
    return of_lightning or _program(manifest) == TRANSFORMERS
