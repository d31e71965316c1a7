"""zckpt in the place of DeepSpeed's own checkpoint code, inside a rank of one of its tests.

    save_checkpoint     saves; zckpt reads it, and it is compared with what the engine holds and
                        with what zero_to_fp32 makes of it
    load_checkpoint     loads what zckpt writes again of the directory, and not the directory
    ds_to_universal     zckpt writes the universal form
    zero_to_fp32        zckpt merges the weights

Where zckpt refuses a checkpoint, DeepSpeed's own code goes on. Every use leaves a line of JSON in
the folder that ZCKPT_EVENTS names.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

Wrapped = Callable[..., Any]
ORIGINALS: dict[str, Wrapped] = {}


def note(event: str, where: Any, outcome: str, why: str = "") -> None:
    """A line of JSON; `where` is the test's own folder, by which the test is known."""
    line = {"event": event, "where": str(where), "outcome": outcome, "why": why[:2000]}
    path = Path(os.environ["ZCKPT_EVENTS"]) / f"{os.getpid()}-{time.monotonic_ns()}.json"
    path.write_text(json.dumps(line))


def refusal(error: BaseException) -> tuple[str, str]:
    """A refusal by name, or a failure of zckpt's."""
    import zckpt

    if isinstance(error, zckpt.ZckptError):
        return "refused", f"{type(error).__name__}: {error}"
    return "failed", traceback.format_exc()


def agreed(value: Any) -> Any:
    """What rank 0 says."""
    from torch import distributed

    held = [value]
    if distributed.is_initialized():
        distributed.broadcast_object_list(held, src=0)
    return held[0]


def is_first() -> bool:
    from torch import distributed

    return not distributed.is_initialized() or distributed.get_rank() == 0


# -- engine.save_checkpoint and load_checkpoint


def replace_engine(module: ModuleType) -> None:
    engine = module.DeepSpeedEngine
    save, load = engine.save_checkpoint, engine.load_checkpoint

    @functools.wraps(save)
    def save_checkpoint(self: Any, save_dir: Any, tag: Any = None, *rest: Any, **words: Any) -> Any:
        # gathering leaves stage 3's persistent parameters partitioned; saving gathers them again
        held, why = held_by(self) if save_dir and self.zero_optimization() else (None, "")
        saved = save(self, save_dir, tag, *rest, **words)
        if is_first():
            examine(self, save_dir, tag, held, why)
        barrier()
        return saved

    @functools.wraps(load)
    def load_checkpoint(self: Any, load_dir: Any, tag: Any = None, *rest: Any, **words: Any) -> Any:
        with tempfile.TemporaryDirectory(prefix="zckpt-") as folder:
            written = agreed(rewritten(self, load_dir, tag, folder) if is_first() else None)
            if written is None:
                return load(self, load_dir, tag, *rest, **words)
            directory, tag = written
            loaded = load(self, directory, tag, *rest, **words)
            barrier()  # before rank 0 removes the folder
            path = loaded[0]
            if isinstance(path, str):  # as if it had been loaded from where it was
                path = path.replace(str(directory), str(load_dir))
            return (path, *loaded[1:])

    engine.save_checkpoint, engine.load_checkpoint = save_checkpoint, load_checkpoint


def barrier() -> None:
    from torch import distributed

    if distributed.is_initialized():
        distributed.barrier()


def rewritten(engine: Any, load_dir: Any, tag: Any, folder: str) -> tuple[str, Any] | None:
    """A directory that zckpt writes of what is to be loaded, and its tag; None if it refuses."""
    import zckpt

    target = os.path.join(folder, "run")
    merged = bool(engine.load_universal_checkpoint())
    form = "deepspeed-universal" if merged else "deepspeed"
    try:
        source = read(load_dir, tag, form)
        zckpt.convert(load_dir, target, format=form, to=form, tag=source.source["tag"])
    except Exception as error:
        note("load", load_dir, *refusal(error))
        return None
    note("load", load_dir, "done", form)
    return target, tag


def read(directory: Any, tag: Any, form: str) -> Any:
    import zckpt

    return zckpt.read(str(directory), format=form, tag=None if tag is None else str(tag))


def examine(engine: Any, save_dir: Any, tag: Any, held: dict[str, Any] | None, why: str) -> None:
    """Compares what was saved with what the engine held, and with what DeepSpeed merges of it."""
    import zckpt

    tag = f"global_step{engine.global_steps}" if tag is None else str(tag)
    try:
        with tempfile.TemporaryDirectory(prefix="zckpt-") as folder:
            universal = Path(folder) / "universal"
            zckpt.convert(str(save_dir), universal, format="deepspeed", tag=tag)
            found = differences(universal, held) if held else []
            merged = differences_of_merged(universal, save_dir, tag)
    except Exception as error:
        note("save", save_dir, *refusal(error))
        return
    outcome = "differs" if found else "equal" if held else "unheld"
    note("save", save_dir, outcome, why or str(found))
    note("merge", save_dir, *merged)


def held_by(engine: Any) -> tuple[dict[str, Any] | None, str]:
    """The engine's whole state on rank 0 (tests/engines/oracle.py), or why there is none."""
    from torch import distributed

    from tests.engines import oracle

    if engine.has_moe_layers or hasattr(engine.module, "forward_funcs"):
        return None, "experts or pipeline stages: no rank holds all names"
    try:
        layout = oracle.read_layout(engine.module, engine.optimizer)
        own: Any = oracle.local_states(engine.optimizer, layout)
    except Exception as error:
        own = f"{type(error).__name__}: {error}"
    every: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(every, own)
    failures = [each for each in every if isinstance(each, str)]
    if failures:
        return None, failures[0]
    try:
        return oracle.record(engine), ""
    except Exception as error:  # of rank 0, which alone puts the parts together
        return None, f"{type(error).__name__}: {error}"


def differences(universal: Path, held: dict[str, Any]) -> list[str]:
    """Tensors, steps, hyper-parameters and groups in which the two differ."""
    from tests.formats.equality import expected_tensors, load, plain, same_bits

    manifest = json.loads((universal / "manifest.json").read_text())
    stored = {n: t for n, t in load(universal).items() if not n.endswith("/state")}
    expected = expected_tensors(manifest, held)
    found = sorted(stored.keys() ^ expected.keys())
    found += [n for n in stored.keys() & expected.keys() if not same_bits(stored[n], expected[n])]
    parameters = manifest["parameters"]
    for name, step in held["steps"].items():
        if parameters[name]["step"] != step:
            found.append(f"step of {name}: {parameters[name]['step']} for {step}")
    for place, group in enumerate(held["groups"]):
        members = [name for name, p in parameters.items() if p["group"] == place]
        if members != group["params"]:
            found.append(f"members of group {place}")
        inferred = manifest["state"]["engine"]["elastic"]
        for key, value in group.items():
            wanted = key not in ("params", "step") and not inferred
            if wanted and manifest["groups"][place].get(key) != plain(value):
                found.append(f"{key} of group {place}")
    return found


def differences_of_merged(universal: Path, save_dir: Any, tag: str) -> tuple[str, str]:
    """Against zero_to_fp32's weights: equal, differs, or why there are none."""
    from tests.formats.equality import load, same_bits

    try:
        merged = ORIGINALS["get_fp32_state_dict_from_zero_checkpoint"](str(save_dir), tag)
    except Exception as error:
        return "unmerged", f"{type(error).__name__}: {error}"
    stored = load(universal)
    found = []
    for name, tensor in merged.items():
        ours = stored.get(f"{name}/master", stored.get(f"{name}/param"))
        if ours is not None and not same_bits(ours.to(tensor.dtype), tensor.contiguous()):
            found.append(name)
    return ("differs" if found else "equal"), str(found)


# -- DeepSpeed's converters


def replace_converter(module: ModuleType) -> None:
    main = module.main

    @functools.wraps(main)
    def convert(arguments: Any) -> Any:
        import zckpt

        source, target = str(arguments.input_folder), str(arguments.output_folder)
        try:
            with tempfile.TemporaryDirectory(prefix="zckpt-") as folder:
                made = os.path.join(folder, "made")
                zckpt.convert(source, made, format="deepspeed", to="deepspeed-universal")
                tag = (Path(made) / "latest_universal").read_text()
                shutil.copytree(os.path.join(made, tag), target)
                pointer = Path(target).parent / "latest_universal"
                pointer.write_text(os.path.basename(target))
        except Exception as error:
            note("universal", source, *refusal(error))
            return main(arguments)
        note("universal", source, "done")
        return None

    module.main = convert


def replace_merger(module: ModuleType) -> None:
    name = "get_fp32_state_dict_from_zero_checkpoint"
    original = getattr(module, name)
    ORIGINALS[name] = original

    @functools.wraps(original)
    def merge(
        checkpoint_dir: Any,
        tag: Any = None,
        exclude_frozen_parameters: bool = False,
        lazy_mode: bool = False,
    ) -> Any:
        if not (exclude_frozen_parameters or lazy_mode):
            try:
                weights = weights_of(checkpoint_dir, tag)
            except Exception as error:
                note("zero_to_fp32", checkpoint_dir, *refusal(error))
            else:
                note("zero_to_fp32", checkpoint_dir, "done")
                return weights
        return original(checkpoint_dir, tag, exclude_frozen_parameters, lazy_mode)

    setattr(module, name, merge)


def weights_of(directory: Any, tag: Any) -> dict[str, Any]:
    """Every weight in fp32, second names of tied ones in the same memory, and the buffers."""
    import zckpt
    from tests.formats.equality import load

    with tempfile.TemporaryDirectory(prefix="zckpt-") as folder:
        target = Path(folder) / "weights"
        words = {"weights_only": True, "dtype": "fp32"}
        named = None if tag is None else str(tag)
        zckpt.convert(str(directory), target, format="deepspeed", tag=named, **words)
        manifest = json.loads((target / "manifest.json").read_text())
        weights = {name.removesuffix("/param"): t.clone() for name, t in load(target).items()}
    for name, parameter in manifest["parameters"].items():
        for alias in parameter["aliases"]:
            weights[alias] = weights[name]
    return {name: weight.float() for name, weight in weights.items()}
