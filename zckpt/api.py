"""What zckpt does, a few steps each: read, load, inspect, convert, reshard, verify, diff, stats."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, Any

from . import formats, naming, steps, ties
from .errors import (
    CorruptCheckpoint,
    IncompleteCheckpoint,
    InconsistentCheckpoint,
    NotEnoughSpace,
    WrongOption,
    ZckptError,
)
from .inert import plain_group, to_json
from .manifest import Manifest
from .options import Options
from .ordering import in_order_of

if TYPE_CHECKING:
    from .staging import Shell

Report = dict[str, Any]
Progress = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Copying:
    """How bytes move: threads, bytes of buffers, and auto, direct or buffered writes."""

    jobs: int = 4
    memory: int = 256 << 20
    io: str = "auto"

    def __post_init__(self) -> None:
        if self.memory < 2 * self.jobs << 20:
            raise WrongOption(
                f"{self.jobs} jobs need {2 * self.jobs} MiB", hint="raise --memory, or lower --jobs"
            )


DEFAULT_COPYING = Copying()


def read(
    path: str | os.PathLike[str],
    *,
    format: str | None = None,
    tag: str | None = None,
    step_policy: str | None = None,
    param_names: Sequence[str] | None = None,
    weights_only: bool = False,
) -> Manifest:
    """The manifest of the checkpoint at `path`, recognised by content. No tensor is read.

    `param_names` are for an optimizer that knows its parameters by number alone; with
    `weights_only` such an optimizer needs no names and may be left unread. Raises the ZckptError
    that fits: NotACheckpoint, IncompleteCheckpoint, ...
    """
    steps.check_policy(step_policy)
    where = os.fspath(path)
    found = formats.recognise(where, format, tag)
    names: dict[str, Any] = {}
    if found.numbers:
        names = {"param_names": param_names, "weights_only": weights_only}
    manifest: Manifest = found.load().read(where, tag, step_policy, **names)
    return manifest


def load(
    path: str | os.PathLike[str],
    name: str,
    *,
    format: str | None = None,
    tag: str | None = None,
    step_policy: str | None = None,
    param_names: Sequence[str] | None = None,
) -> Any:
    """One whole tensor of the checkpoint at `path`, by its name `parameter/slot`.

    It is a torch.Tensor on the CPU where torch is installed, else a numpy.ndarray, of the type that
    the checkpoint has and in memory of its own. Names are those that `zckpt inspect --tensors '*'`
    lists, as `fc1.weight/exp_avg`. Raises the ZckptError that fits: WrongOption for a name that is
    not there, MissingExtra for bfloat16 and 8-bit floats without torch, CorruptCheckpoint where a
    file states another CRC-32.
    """
    from . import loading  # `read` has no need of it

    manifest = read(path, format=format, tag=tag, step_policy=step_policy, param_names=param_names)
    entry = loading.entry_of(manifest, name)
    try:
        import torch  # noqa: F401
    except ImportError:
        return loading.as_numpy(entry, manifest.records)
    return loading.as_torch(entry, manifest.records)


def inspect(manifest: Manifest) -> Report:
    """What a checkpoint holds, as `zckpt inspect --json` prints it."""
    return {
        "zckpt": 1,
        "command": "inspect",
        **manifest.source,
        "format": manifest.format,
        "written_by": manifest.source.get("format"),
        "path": manifest.root,
        "step": manifest.step,
        "complete": True,  # what is not is an error of reading
        "optimizer": manifest.optimizer,
        "parameters": len(manifest.parameters),
        "elements": sum(prod(held.shape) for held in manifest.parameters.values()),
        "slots": {
            slot: {
                "tensors": len(entries),
                "dtype": ", ".join(sorted({entry.dtype for entry in entries})),
                "elements": sum(entry.numel for entry in entries),
                "bytes": sum(entry.length for entry in entries),
            }
            for slot, entries in manifest.slots.items()
        },
        "groups": None
        if manifest.groups is None
        else [plain_group(group) for group in manifest.groups],
        "steps": [
            {"where": line.where, "step": line.step, "truth": line.truth} for line in manifest.steps
        ],
        "files": len(manifest.files),
        "bytes": sum(os.path.getsize(file) for file in manifest.files),
        "problems": list(manifest.warnings),
        "left_out": list(manifest.left_out),
        "inferred": list(manifest.inferred),
    }


def tensors(manifest: Manifest, pattern: str, fragments: bool = False) -> list[Report]:
    """Every tensor whose entry name (`parameter/slot`) matches the glob.

    `fragments` adds where its bytes are. Raises WrongOption where no name matches.
    """
    found = []
    for entry in manifest.entries.values():
        if not fnmatchcase(entry.name, pattern):
            continue
        about: Report = {
            "tensor": entry.name,
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "elements": entry.numel,
            "count": len(entry.fragments),
        }
        if entry.digest is not None:
            about["crc32"] = f"{entry.digest:08x}"
        if fragments:
            about["fragments"] = [
                {
                    "start": fragment.start,
                    "stop": fragment.stop,
                    "file": fragment.extent.file,
                    "offset": fragment.extent.offset,
                    "length": fragment.extent.length,
                    "count": fragment.count,
                    "stride": fragment.stride,
                }
                for fragment in entry.fragments
            ]
        found.append(about)
    if not found:
        raise WrongOption(
            f"no tensor matches {pattern!r}", hint="names are parameter/slot, as '*/exp_avg'"
        )
    return found


def state(manifest: Manifest) -> Any:
    """Everything that is no tensor, as tagged JSON."""
    return to_json(manifest.state)


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    to: str = "universal",
    format: str | None = None,
    tag: str | None = None,
    step_policy: str | None = None,
    copying: Copying = DEFAULT_COPYING,
    dry_run: bool = False,
    begin: Callable[[int], Progress] | None = None,
    tell: Callable[[Sequence[str]], None] | None = None,
    **options: Any,
) -> Report:
    """Writes the checkpoint at `source` as a new directory `target`, in format `to`.

    `options` are the fields of `Options`: dtype="bf16", weights_only=True, ... `begin` is told the
    bytes to come and gives a function that is told of every piece of them; `tell` gets the warnings
    before the first byte is written. Raises a ZckptError; then there is no `target`.
    """
    asked = Options(**options)
    manifest = _source_for(target, source, format, tag, step_policy, asked)
    where = os.fspath(target)
    return _write("convert", manifest, where, to, asked, copying, dry_run, begin, tell)


def reshard(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    format: str | None = None,
    tag: str | None = None,
    step_policy: str | None = None,
    copying: Copying = DEFAULT_COPYING,
    dry_run: bool = False,
    begin: Callable[[int], Progress] | None = None,
    tell: Callable[[Sequence[str]], None] | None = None,
    checkpoints: str | None = None,
    best_in: str | None = None,
    **options: Any,
) -> Report:
    """Writes the checkpoint at `source` for the engine that it came from: dp=16, stage=3, ...

    A universal source goes back to the engine that its manifest names. `checkpoints` (all,
    best-and-last) takes a Trainer's output directory and writes several of its checkpoints;
    `best_in` is the directory where the best one will lie. Otherwise as `convert`.
    """
    asked = Options(**options)
    if checkpoints is not None:
        from . import best

        if checkpoints not in best.CHOICES:
            raise WrongOption(f"--checkpoints {checkpoints} is none of {', '.join(best.CHOICES)}")
        moving = {"copying": copying, "dry_run": dry_run, "begin": begin, "tell": tell}
        reading = {"format": format, "tag": tag, "step_policy": step_policy}
        where = os.fspath(target)
        return _reshard_run(os.fspath(source), where, checkpoints, reading, options, moving)
    manifest = _source_for(target, source, format, tag, step_policy, asked)
    engine = str(manifest.source.get("format"))
    where = os.fspath(target)
    return _write("reshard", manifest, where, engine, asked, copying, dry_run, begin, tell, best_in)


def _reshard_run(
    source: str,
    target: str,
    which: str,
    reading: dict[str, Any],
    options: dict[str, Any],
    moving: dict[str, Any],
) -> Report:
    """Several checkpoints of a Trainer's run, which appear together."""
    from . import best, staging

    staging.refuse_existing(target)
    staging.refuse_inside(source, target)
    names = best.chosen(source, which)

    def each(folder: str, **more: Any) -> list[Report]:
        return [
            reshard(
                os.path.join(source, name), os.path.join(folder, name),
                best_in=target, **reading, **options, **{**moving, **more},
            )
            for name in names
        ]  # fmt: skip

    parent = os.path.dirname(os.path.abspath(target))
    reports = each(os.path.join(parent, f"{os.path.basename(target)}.partial"), dry_run=True)
    total = sum(report["bytes"] for report in reports)
    made: Report = {
        "zckpt": 1,
        "command": "reshard",
        "source": {"path": source},
        "format": reports[0]["format"],
        "target": target,
        "about": f"{len(names)} checkpoints, each {reports[0]['about']}",
        "step": reports[-1]["step"],
        "files": [
            os.path.join(name, file)
            for name, report in zip(names, reports, strict=True)
            for file in report["files"]
        ],
        "bytes": total,
        "checkpoints": names,
    }
    for key in ("left_out", "warnings", "inferred"):
        made[key] = list(dict.fromkeys(line for report in reports for line in report[key]))
    if moving["dry_run"]:
        memory = max(report["memory"] for report in reports)
        return made | {"dry_run": True, "memory": memory, "free": staging.free_space(target)}
    staging.need_space(target, total)
    with staging.Staging(target) as staged:
        reports = each(staged.path, tell=None)
    records = {key: sum(r["records"][key] for r in reports) for key in ("checked", "unchecked")}
    return made | {
        "tensors": sum(report["tensors"] for report in reports),
        "records": records,
        "seconds": round(sum(report["seconds"] for report in reports), 3),
    }


def export(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    dtype: str | None = None,
    config: str | os.PathLike[str] | None = None,
    max_shard_size: int | None = None,
    format: str | None = None,
    tag: str | None = None,
    step_policy: str | None = None,
    rename: naming.Renames = (),
    tie: naming.Renames = (),
    copying: Copying = DEFAULT_COPYING,
    dry_run: bool = False,
    begin: Callable[[int], Progress] | None = None,
    tell: Callable[[Sequence[str]], None] | None = None,
) -> Report:
    """Writes a folder for `from_pretrained`: weights, configuration, tokenizer, and nothing else.

    `dtype` (fp32, bf16, fp16) is what the weights become, by default what the module had. `config`
    is a config.json (adapter_config.json of PEFT), or a folder that has it and the tokenizer, for
    sources that have none. `max_shard_size` is in bytes. Raises MissingData without a
    configuration; otherwise as `convert`.
    """
    asked = Options(
        weights_only=True,
        dtype=dtype,
        max_file_size=max_shard_size,
        rename=tuple(rename),
        tie=tuple(tie),
        model_config=None if config is None else os.fspath(config),
    )
    manifest = _source_for(target, source, format, tag, step_policy, asked)
    where = os.fspath(target)
    return _write("export", manifest, where, "hf", asked, copying, dry_run, begin, tell)


def verify(
    path: str | os.PathLike[str],
    against: str | os.PathLike[str] | None = None,
    *,
    gather: bool = False,
    device: str | None = None,
    tensors: str | None = None,
    format: str | None = None,
    tag: str | None = None,
    step_policy: str | None = None,
    param_names: Sequence[str] | None = None,
    rename: naming.Renames = (),
    jobs: int = 4,
    memory: int = 256 << 20,
    begin: Callable[[int], Progress] | None = None,
) -> Report:
    """Whether the checkpoint at `path` contradicts itself, or differs from the one at `against`.

    `gather` rebuilds it as its engine would, by all-gathering the ranks' partitions (needs torch),
    on `device` (cuda, cpu; a GPU where there is one); under torchrun every process gathers, and
    those but rank 0 get a report without findings. `tensors` is a glob that chooses. `rename` are
    pairs of a regular expression and what names of `path` become by it. What is found is in the
    report; raises a ZckptError only where nothing could be looked at.
    """
    if gather and rename:
        raise WrongOption("--gather goes by the names of PATH", hint="rename without --gather")
    if gather and against is None:
        raise WrongOption("--gather compares with another checkpoint", hint="add --against PATH")
    if device is not None and not gather:
        raise WrongOption("--device is where --gather works", hint="add --gather --against PATH")
    started = time.monotonic()
    report: Report = {
        "zckpt": 1,
        "command": "verify",
        "path": os.fspath(path),
        "against": None if against is None else os.fspath(against),
        "equal": False,
        "tensors": 0,
        "bytes": 0,
        "device": "cpu",
        "gathered": gather,
        "world": 1,
        "rank": own_rank(),
    }
    if not gather:
        Copying(jobs, memory)  # raises where they do not fit together
    moving: dict[str, Any] = {"jobs": jobs, "memory": memory, "begin": begin}
    try:
        held = read(path, format=format, tag=tag, step_policy=step_policy, param_names=param_names)
        manifest = naming.renamed(held, rename)
        found = _verify(manifest, against, gather, device, tensors, param_names, moving)
    except CONTRADICTIONS as error:
        if report["rank"]:  # rank 0 tells its own; this may not be the same
            raise
        found = {"problems": [_problem(error)], "differences": []}
    return report | found | {"seconds": round(time.monotonic() - started, 3)}


def own_rank() -> int:
    """This process's number among those that torchrun started; 0 where it did not.

    RANK alone says nothing: in many clusters every shell has one.
    """
    return int(os.environ["RANK"]) if "TORCHELASTIC_RUN_ID" in os.environ else 0


CONTRADICTIONS = (CorruptCheckpoint, IncompleteCheckpoint, InconsistentCheckpoint)
"""What a checkpoint's files say of themselves: found by looking, so no failure of `verify`."""


def _problem(error: ZckptError) -> Report:
    return {"error": type(error).__name__, "message": error.message, "hint": error.hint}


def _verify(
    manifest: Manifest,
    against: str | os.PathLike[str] | None,
    gather: bool,
    device: str | None,
    pattern: str | None,
    param_names: Sequence[str] | None,
    moving: dict[str, Any],
) -> Report:
    from . import proof

    about = {"step": manifest.step, "held": proof.described(manifest)}
    if against is None:
        return about | proof.verify_alone(manifest, pattern, **moving)
    if proof.is_proof(os.fspath(against)):
        if gather:
            raise WrongOption("--gather compares with a checkpoint", hint="leave --gather out")
        return about | proof.verify_proof(manifest, os.fspath(against), pattern, **moving)
    other = naming.called_as(read(against, param_names=param_names), naming.names_of(manifest))
    if not gather:
        return about | proof.verify_against(manifest, other, pattern, **moving)
    from .gather import verify_gathered

    return about | verify_gathered(manifest, other, pattern, device, **moving)


def diff(
    a: str | os.PathLike[str],
    b: str | os.PathLike[str],
    *,
    tensors: str | None = None,
    format: str | None = None,
    tag: str | None = None,
    step_policy: str | None = None,
    param_names: Sequence[str] | None = None,
    rename: naming.Renames = (),
    jobs: int = 4,
    memory: int = 256 << 20,
    begin: Callable[[int], Progress] | None = None,
) -> Report:
    """In what two checkpoints differ, of any two formats: tensors, steps, groups, states.

    `tensors` is a glob; then only the tensors that match are compared, and equal ones are listed
    too. `format`, `tag`, `step_policy` and `rename` are those of `a`, `param_names` of both.
    """
    from . import proof

    started = time.monotonic()
    Copying(jobs, memory)
    held = read(a, format=format, tag=tag, step_policy=step_policy, param_names=param_names)
    ours = naming.renamed(held, rename)
    theirs = naming.called_as(read(b, param_names=param_names), naming.names_of(ours))
    found = proof.diff(ours, theirs, tensors, jobs=jobs, memory=memory, begin=begin)
    report: Report = {"zckpt": 1, "command": "diff", "a": os.fspath(a), "b": os.fspath(b)}
    return report | found | {"seconds": round(time.monotonic() - started, 3)}


def stats(
    path: str | os.PathLike[str],
    *,
    tensors: str | None = None,
    format: str | None = None,
    tag: str | None = None,
    step_policy: str | None = None,
    param_names: Sequence[str] | None = None,
    jobs: int = 4,
    memory: int = 256 << 20,
    begin: Callable[[int], Progress] | None = None,
) -> Report:
    """What the numbers of a checkpoint look like, and which are dead or impossible.

    `tensors` is a glob that chooses. Of each tensor, over its finite numbers, in float64: min, max,
    mean, std (with n - 1, as torch.std), norm (L2), counts, and how many have which magnitude.
    """
    from . import health

    started = time.monotonic()
    Copying(jobs, memory)
    manifest = read(path, format=format, tag=tag, step_policy=step_policy, param_names=param_names)
    report: Report = {
        "zckpt": 1,
        "command": "stats",
        "path": os.fspath(path),
        "format": manifest.format,
    }
    found = health.measure_all(manifest, tensors, jobs=jobs, memory=memory, begin=begin)
    return report | found | {"seconds": round(time.monotonic() - started, 3)}


def _source_for(
    target: str | os.PathLike[str],
    source: str | os.PathLike[str],
    format: str | None,
    tag: str | None,
    step_policy: str | None,
    options: Options,
) -> Manifest:
    from .staging import refuse_existing, refuse_inside

    refuse_existing(os.fspath(target))  # before a large source is read
    refuse_inside(os.fspath(source), os.fspath(target))
    names = options.param_names
    if names is not None and options.rename:  # they are the names after renaming
        held = read(source, format=format, tag=tag, step_policy=step_policy, weights_only=True)
        names = naming.before(held, options.rename, names)
    return read(
        source,
        format=format,
        tag=tag,
        step_policy=step_policy,
        param_names=names,
        weights_only=options.weights_only,
    )


def _named_for(to: str, manifest: Manifest, options: Options) -> Manifest:
    """The source under the names that the target needs, in the order that the user says."""
    engines = {"deepspeed-universal": "deepspeed", "gathered": "dcp"}
    before = str(manifest.source.get("format"))
    if options.rename:
        manifest = naming.renamed(manifest, options.rename)
    elif to != "universal" and engines.get(to, to) != engines.get(before, before):
        manifest = naming.canonical(manifest)
    if options.param_names is not None:
        named = naming.called_as(manifest, options.param_names)
        manifest = in_order_of(named, options.param_names)
    return ties.with_ties(manifest, options.tie) if options.tie else manifest


def _grouped_for(to: str, manifest: Manifest) -> tuple[Manifest, list[Shell]]:
    """The source with the groups that the target's optimizer has, and files that change with it."""
    from . import groups

    if to in ("deepspeed", "deepspeed-universal"):
        return groups.without_empty_groups(manifest)
    return groups.with_trainers_groups(manifest) if to in ("dcp", "gathered") else (manifest, [])


def _write(
    command: str,
    manifest: Manifest,
    target: str,
    to: str,
    options: Options,
    copying: Copying,
    dry_run: bool,
    begin: Callable[[int], Progress] | None,
    tell: Callable[[Sequence[str]], None] | None,
    best_in: str | None = None,
) -> Report:
    """Shells first, then their tensors, then what is known only afterwards; at last the rename."""
    from . import best, execute, fileio, plan, staging  # `inspect` has no need of them

    started = time.monotonic()
    writer = formats.named(to)
    if not writer.writes:
        raise WrongOption(f"{to} can be read, but not written yet")
    module = writer.load()
    read_from = manifest
    manifest = _named_for(to, manifest, options)
    manifest, rewritten = _grouped_for(to, manifest)
    layout: staging.Layout = module.lay_out(manifest, options)
    layout_warnings: list[str] = []
    if to not in ("universal", "hf") and (path := best.best_of(manifest.siblings)) is not None:
        there = best_in and os.path.join(os.path.abspath(best_in), os.path.basename(path))
        if there or best.is_best(manifest.siblings):
            where = there or os.path.abspath(target)
            rewritten = [*rewritten, best.pointing_to(manifest.siblings, where)]
        else:
            layout_warnings.append(best.warning(path))
    if rewritten:
        unchanged, names = layout.shells, {shell.name for shell in rewritten}
        layout = replace(
            layout,
            shells=lambda: chain(unchanged(), rewritten),
            siblings=[pair for pair in layout.siblings if pair[0] not in names],
        )
    files = [(shell.name, shell.size) for shell in layout.shells()]
    files += [(name, item.size) for name, item in layout.siblings]
    size = sum(length for _, length in files)
    report: Report = {
        "zckpt": 1,
        "command": command,
        "source": {**manifest.source, "path": manifest.root},
        "format": to,
        "target": target,
        "about": layout.about,
        "step": manifest.step,
        "files": [name for name, _ in files],
        "bytes": size,
        "left_out": list(layout.left_out),
        "warnings": [*layout.warnings, *layout_warnings],
        "inferred": list(manifest.inferred),
    }
    if to != "universal" and (tie := ties.likely(manifest)) is not None:
        report["warnings"].append(
            f"the source has no output layer: if the model ties {tie[0]} to {tie[1]}, add --tie "
            f"{tie[0]}={tie[1]}"
        )
    if tell:
        tell(report["warnings"])
    if dry_run:
        memory = 2 * copying.jobs * execute.chunk_size(manifest.dp, copying.jobs, copying.memory)
        return report | {"dry_run": True, "memory": memory, "free": staging.free_space(target)}
    staging.need_space(target, size)
    if check := getattr(formats.named(manifest.format).load(), "check", None):
        check(read_from)  # what only the bytes of this format tell
    try:
        with staging.Staging(target) as staged:
            staged.lay(layout.shells())
            shells: Manifest = getattr(module, "read_shells", module.read)(staged.path)
            outcome = execute.copy(
                plan.join(manifest, shells, options.dtype is not None or layout.from_masters),
                manifest,
                shells,
                jobs=copying.jobs,
                memory=copying.memory,
                io=fileio.write_mode(copying.io, size),
                progress=begin(size) if begin else None,
            )
            for name, item in layout.siblings:
                outcome.files[os.path.join(staged.path, name)] = staged.copy(item.path, name)
            if warning := steps.never_stepped(shells, outcome.digests):
                report["warnings"].append(warning)
                shells = replace(shells, warnings=(*shells.warnings, warning))
            module.seal(staged.path, shells, outcome)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise NotEnoughSpace(
                f"the filesystem of {target} is full ({error.strerror})",
                hint=f"{size / 1e9:.3f} GB are needed; nothing was left behind",
            ) from error
        raise
    return report | {
        "tensors": len(outcome.digests),
        "records": {"checked": outcome.checked, "unchecked": outcome.unchecked},
        "seconds": round(time.monotonic() - started, 3),
    }
