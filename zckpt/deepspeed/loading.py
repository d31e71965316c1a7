"""Loads a checkpoint into the engine of a program; writes a copy first if needed and allowed."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Literal

from ..errors import IncompleteCheckpoint, WrongOption, again
from ..loading.load import load, plain
from ..loading.support import UNSUPPORTED
from ..resume.auto import auto_resume

FORMAT = "deepspeed"


def load_checkpoint(
    engine: Any,
    source: str | os.PathLike[str],
    tag: str | None = None,
    load_module_strict: bool = True,
    load_optimizer_states: bool = True,
    load_lr_scheduler_states: bool = True,
    load_module_only: bool = False,
    custom_load_fn: Callable[..., Any] | None = None,
    *,
    verify: Literal["records", "files"] = "records",
    fallback: Literal["copy"] | None = None,
    scratch: str | os.PathLike[str] | None = None,
    **words: Any,
) -> tuple[str | None, Any]:
    """Loads a checkpoint into a DeepSpeed engine with any number of ranks.

    All ranks must call this function. The arguments and the result (the path, and the client state)
    are those of `engine.load_checkpoint`. The engine then holds what it would load from a directory
    that `zckpt.reshard` writes for its number of ranks, its stage and its ds_config.

        source      a path or URL of a checkpoint in any format, saved by any number of ranks
        verify      "records" checks the checksums that the files state; "files" only checks that no
                    file is missing
        fallback    None: no copy is written to disk. "copy": for an engine or a version of
                    DeepSpeed that would raise WrongOption (see below), zckpt writes a resharded
                    copy as `zckpt.auto_resume` does, and the engine's own loader loads the copy
        scratch     a directory for this copy, as for `zckpt.auto_resume`
        words       `accept_weights`, `drop_state`, `step_policy`, `param_names`, `rename` and
                    others: as for `zckpt.reshard`, or `zckpt.convert` to deepspeed

    Raises the same ZckptError as `reshard`, in all ranks, before the engine is changed. Raises
    WrongOption for a version of DeepSpeed that was not tested, and for engines that need a copy,
    such as those with tensor, pipeline, expert or sequence parallelism. Raises CorruptCheckpoint
    for damage; if the engine has been changed already, the hint says so.
    """
    if verify not in ("records", "files"):
        raise WrongOption("option-invalid", f"verify {verify!r} is neither 'records' nor 'files'")
    if fallback not in (None, "copy"):
        raise WrongOption("option-invalid", f"fallback {fallback!r} is neither 'copy' nor None")
    source = os.fspath(source)
    given: dict[str, Any] = {
        "load_module_strict": load_module_strict,
        "load_optimizer_states": load_optimizer_states,
        "load_lr_scheduler_states": load_lr_scheduler_states,
        "load_module_only": load_module_only,
        "custom_load_fn": custom_load_fn,
    }
    try:
        return load(engine, source, tag, given, is_sparing=verify == "files", **words)
    except WrongOption as error:
        if error.code != UNSUPPORTED:
            raise
        if fallback is None:
            raise error.with_way('or add fallback="copy"') from None
        refusal = error
    run = os.path.join(source, tag) if tag else source
    words = {"ds_config": words.pop("config", plain(engine.config)), **words}
    words = {"stage": engine.zero_optimization_stage(), **words}
    copy = auto_resume(run, verify=verify, scratch=scratch, **words)
    if copy is None or copy.report["format"] != FORMAT:
        raise refusal
    for aside in copy.report["left_aside"]:  # another checkpoint of the run was not asked for
        raise again(IncompleteCheckpoint, aside["reason"])
    result: tuple[str | None, Any] = engine.load_checkpoint(
        copy.report["load_dir"], tag=copy.tag, **given
    )
    return result
