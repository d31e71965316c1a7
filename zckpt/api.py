"""The functions of the package `zckpt`, such as read, load, convert, reshard, verify and diff.

They return the reports that `--json` prints. The modules that compare tensors are imported only
when they are needed.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from . import formats
from .copying.sharing import Part as Part
from .core.checkpoint import mended
from .core.checkpoint.manifest import Manifest as Manifest
from .core.checkpoint.states import Selection
from .core.passes import description, loading
from .core.passes.description import VERSION, Report, said
from .core.passes.description import tensors as tensors
from .core.passes.pooling import SINGLE, Pool
from .core.passes.resources import DEFAULT_COPYING, READING_JOBS, Begin, Tell
from .core.passes.resources import Copying as Copying
from .core.storage import sources
from .formats.hf import options as hf
from .formats.options import Keywords, options_of
from .formats.reading import NamedKeywords as NamedKeywords
from .formats.reading import Reading, SourceKeywords
from .judging import verdict
from .judging.contents import check_to_load
from .reading import read as read_manifest
from .reading import read_both
from .remote.url_arguments import local as local
from .remote.url_arguments import takes_urls as takes_urls
from .remote.url_arguments import telling as telling
from .remote.url_arguments import translated as translated
from .remote.urls import At as At
from .remote.urls import is_url as is_url
from .training.options import Options as TargetOptions
from .training.options import Renames
from .writing.conversion import Decision as Decision
from .writing.conversion import check_beforehand as check_beforehand
from .writing.conversion import decide as decide_conversion
from .writing.conversion import read_for, read_source, write
from .writing.conversion import shells_of as shells_of
from .writing.conversion import try_out as try_conversion
from .writing.numbered import as_run
from .writing.run_checkpoints import write_run
from .writing.run_options import Keywords as RunningKeywords
from .writing.run_options import Running

if sys.version_info >= (3, 11):
    from typing import Unpack
elif TYPE_CHECKING:
    from typing_extensions import Unpack

Path = str | os.PathLike[str]
Options = Keywords
"""The options of a conversion, as keyword arguments; `zckpt convert --help` describes them."""


class Conversion(SourceKeywords, RunningKeywords, Keywords, total=False):
    """The keyword arguments of `convert` and `reshard`: the source, the run, and the target."""


class Export(SourceKeywords, RunningKeywords, hf.Keywords, total=False):
    """The keyword arguments of `export`."""


def _reading(source: Mapping[str, Any], **more: Any) -> Reading:
    """Collects the keyword arguments about a source in a `Reading`, the options for reading.

    `more` are fields of `Reading` that users do not give. Raises TypeError for an unknown argument.
    """
    keywords = NamedKeywords.__annotations__
    if unknown := sorted(source.keys() - keywords.keys()):
        raise TypeError(f"unknown argument {unknown[0]!r}; the arguments are {', '.join(keywords)}")
    rules, globs = source.get("tp_rules"), source.get("buffers") or ()
    taken = {
        **source,
        "tp_rules": None if rules is None else os.fspath(rules),
        "buffers": (globs,) if isinstance(globs, str) else tuple(globs),
    }
    return Reading(**taken, **more)


def _split(words: Mapping[str, Any], **more: Any) -> tuple[Reading, Running, TargetOptions]:
    """Splits the arguments of a conversion into options for the source, the run and the target.

    `more` are further fields of the source's options (`Reading`).
    """
    rest = dict(words)

    def taken(kind: type) -> dict[str, Any]:
        return {name: rest.pop(name) for name in kind.__annotations__ if name in rest}

    more["replicas"] = rest.pop("replicas", None)
    running = Running(**taken(RunningKeywords))
    more |= {"by_checksums": running.dry_run, "for_target": True}
    more |= {"is_shared": not running.sharing.is_alone}
    reading = _reading(taken(SourceKeywords), **more)
    rest |= {"buffers": reading.buffers} if reading.buffers else {}  # targets use them too
    return reading, running, options_of(rest)


def _of_ranks(words: Mapping[str, Any], is_resharded: bool = True) -> dict[str, bool]:
    """Options of `Reading` for a source whose model-parallel ranks may change.

    `words` are the arguments of `reshard`. For `convert` (`is_resharded` is False), both options
    are False.
    """
    tp = words.get("tp")
    # the target may have other slices than the source
    cuts = tp is not None and (tp > 1 or words.get("vocab_size") is not None)
    apart = tp is None and words.get("groups_from") is None  # groups are those of the whole model
    return {"ranks_apart": is_resharded and apart, "with_slicings": is_resharded and cuts}


@takes_urls("path", keep=True)
def read(
    path: Path,
    *,
    weights_only: bool = False,
    nameless: bool = False,
    by_checksums: bool = False,
    opens_items: bool = False,
    **source: Unpack[NamedKeywords],
) -> Manifest:
    """Reads the manifest of the checkpoint at `path`: all but the elements of its tensors.

    The format is recognized by content. Replicas in files without checksums are read, to compare
    them.

        format          the format, if the path has checkpoints of several formats
        tag             the checkpoint, if the path has several
        root            the model, if there are several: "generator", or with its optimizer
                        "generator=optimizer_g"
        step_policy     the step to use if places disagree: "max", "min", a number, or "keep" (each
                        weight keeps its own step)
        follow_links    read files beside the checkpoint even through links out of its directory
        tp_rules        how tensor-parallel ranks slice parameters, if the checkpoint does not state
                        it: a model family or a file
        buffers         globs: tensors that are buffers, if the files do not show it; their values
                        may differ between ranks
        param_names     the names of the parameters, if the optimizer only numbers them
        weights_only    the optimizer may be left unread, and its parameters need no names
        nameless        read the states of numbered parameters without names, if no file has the
                        names
        by_checksums    do not compare replicas in files without checksums;
                        `manifest.notices.uncompared` is their number
        opens_items     for callers that read tensors of `.distcp` files: open every saved item;
                        otherwise the byte layout of most items is inferred from similar ones

    Raises a ZckptError.
    """
    more = {"weights_only": weights_only, "nameless": nameless, "by_checksums": by_checksums}
    return read_manifest(path, _reading(source, opens_items=opens_items, **more))


def inspect(manifest: Manifest) -> Report:
    """Reports what a checkpoint contains, as `zckpt inspect --json` does.

    `objects` in the report are pickled classes and functions that no engine needs.
    """
    manifest = verdict.with_warnings(manifest)
    return dict(translated(description.inspect(manifest, formats.other_objects(manifest))))


@takes_urls("path")
def load(
    path: Path,
    name: str,
    *,
    replicas: str | None = None,
    accept_weights: bool = False,
    **source: Unpack[NamedKeywords],
) -> Any:
    """Loads one tensor of the checkpoint at `path`, by its name: `fc1.weight/exp_avg`.

    Returns a torch.Tensor on the CPU, or without torch a numpy.ndarray. It has the type in the
    checkpoint, and its own memory. `zckpt inspect --tensors '*'` lists the names.

        replicas          "rank0": replicas of tensor-parallel ranks may differ
        accept_weights    weights may differ from the rounded masters
        source            the arguments of `read`

    The first load of a checkpoint compares its replicas, and its weights with the masters. Raises a
    ZckptError:

        WrongOption               an unknown name
        MissingExtra              bfloat16 or an 8-bit float without torch
        CorruptCheckpoint         the bytes do not have the CRC-32 that the file states
        InconsistentCheckpoint    replicas differ, or weights are not the rounded masters
    """
    manifest = read_manifest(path, _reading(source, opens_items=True))
    entry = loading.entry_of(manifest, name)
    check_to_load(manifest, replicas, accept_weights)
    with sources.unchanged(manifest.files.fingerprints):
        try:
            import torch  # noqa: F401
        except ImportError:
            return loading.as_numpy(entry, manifest.files.records)
        return loading.as_torch(entry, manifest.files.records)


# -- writing


@takes_urls("source", "like", "groups_from", target="target")
def convert(
    source: Path,
    target: Path,
    *,
    to: str = "universal",
    masters_from_weights: bool = False,
    **words: Unpack[Conversion],
) -> Report:
    """Writes the checkpoint at `source` as a new directory `target`, in format `to`.

    `words` are the options of `zckpt convert`, such as dtype="bf16" or weights_only=True, and:

        format, tag, root, step_policy, follow_links, tp_rules, buffers    as for `read`
        replicas        "rank0" or "mean": which replica to use if tensor-parallel ranks differ
        masters_from_weights   drop masters of Megatron-Core that do not round to their weights;
                        the target's masters are made from the weights
        copying         a `zckpt.Copying`: the number of threads, and the memory
        dry_run         report what would be written, and write nothing
        begin           is called once with the number of bytes to process. The function that it
                        returns is called with the bytes that were processed since its last call
        tell            is called with the warnings, before the first byte is written
        resume          continue an interrupted run of the same source and options
        read_back       False: do not read uploads again to compare them, on object stores that
                        state no checksum
        before_rename   is called just before the written files get the name `target`
        sharing         `zckpt.Part(k, n)` in the process that writes part k of n; the last process
                        completes `target`. Or a `zckpt.group()` of processes that torchrun started

    If weights are not the rounded masters, `convert` raises InconsistentCheckpoint. With the option
    `accept_weights` this is a warning: a program may have saved other weights than it trained, such
    as an EMA. Raises a ZckptError; then `target` does not exist.
    """
    reading, running, options = _split(words, masters_from_weights=masters_from_weights)

    manifest = read_for(target, source, reading, options, running)
    return write("convert", manifest, os.fspath(target), to, reading, options, running)


@takes_urls("source", "like", "groups_from", target="target")
def reshard(
    source: Path,
    target: Path,
    *,
    masters_from_weights: bool = False,
    checkpoints: str | None = None,
    best_in: str | None = None,
    **words: Unpack[Conversion],
) -> Report:
    """Writes the checkpoint at `source` for the same engine with other sizes: dp=16, stage=3, ...

    A universal source is written for the engine that its manifest names.

        checkpoints    "all" or "best-and-last": `source` is a Trainer's output directory, and these
                       checkpoints of it are written
        best_in        the folder that will finally contain the Trainer's best checkpoint; the
                       target's trainer_state.json gets the new path. No effect with `checkpoints`

    The other arguments and the errors are as for `convert`.
    """
    more = _of_ranks(words)
    reading, running, options = _split(words, masters_from_weights=masters_from_weights, **more)

    def write_one(source: Path, target: Path, running: Running, best_in: str | None) -> Report:
        manifest = read_for(target, source, reading, options, running)
        manifest = as_run(manifest) if running.as_run else manifest
        to, engine = os.fspath(target), str(manifest.run.origin.format)
        return write("reshard", manifest, to, engine, reading, options, running, best_in)

    if checkpoints is None:
        return write_one(source, target, running, best_in)
    return write_run(os.fspath(source), os.fspath(target), checkpoints, running, write_one)


def try_out(
    source: Path,
    manifest: Manifest | None = None,
    *,
    to: str | None = None,
    **words: Unpack[Conversion],
) -> Decision:
    """Tells what `reshard`, or `convert` to the format `to`, would write, without writing.

    Raises the ZckptError that the conversion would raise. `manifest` is the manifest of `source`,
    if the caller has already read it with the same options.
    """
    reading, _, options = _split({**words, "dry_run": True}, **_of_ranks(words, to is None))
    manifest = manifest or read_source(source, reading, options)
    return try_conversion(manifest, to or str(manifest.run.origin.format), reading, options)


def decided(source: Path, to: str, **words: Unpack[Conversion]) -> tuple[Decision, Reading]:
    """Finds out what a conversion to the format `to` would write, without writing.

    Also returns the options for reading the source. A caller that loads the result into memory must
    call `check_beforehand` too, which checks tensors. Both functions raise the errors of `convert`.
    """
    reading, _, options = _split(words)
    manifest = read_source(source, reading, options)
    command = "reshard" if manifest.run.origin.format == to else "convert"
    about = command, manifest, os.path.abspath("DST"), to, reading, options
    return decide_conversion(*about), reading


@takes_urls("source", "config", target="target")
def export(
    source: Path,
    target: Path,
    *,
    dtype: str | None = None,
    config: Path | None = None,
    max_shard_size: int | None = None,
    rename: Renames = (),
    tie: Renames = (),
    family: str | None = None,
    accept_weights: bool = False,
    **words: Unpack[Export],
) -> Report:
    """Writes a folder for `from_pretrained`: weights, configuration, tokenizer, nothing else.

        dtype             the type of the weights: fp32, bf16 or fp16; by default the type that the
                          model has, not that of its fp32 masters
        config            if the source has no configuration: a config.json (for PEFT an
                          adapter_config.json), or a folder with this file and the tokenizer
        max_shard_size    in bytes
        rename, family    as for `verify`
        tie               pairs of names: a tied weight's second name, which the source lacks, and
                          its name in the source
        words             as for `convert`

    Raises MissingData without a configuration, and the errors of `convert`. These options of
    `convert` raise TypeError: `param_names`, `drop_state`, `weights_only` (which is always set),
    `model_config` (here `config`) and `max_file_size` (here `max_shard_size`).
    """
    fixed_words: Report = {"weights_only": True, "dtype": dtype, "max_file_size": max_shard_size}
    fixed_words |= {"model_config": None if config is None else os.fspath(config)}
    fixed_words |= {"tie": tuple(tie), "rename": tuple(rename), "family": family}
    fixed_words |= {"accept_weights": accept_weights}
    if wrong := sorted(words.keys() & {*fixed_words, "param_names", "drop_state"}):
        raise TypeError(f"export() takes no option {wrong[0]!r}")
    reading, running, options = _split({**fixed_words, **words})

    manifest = read_for(target, source, reading, options, running)
    return write("export", manifest, os.fspath(target), "hf", reading, options, running)


@takes_urls("path", "older")
def mend_step(path: Path, *, older: Path | None = None, tag: str | None = None) -> Report | None:
    """What `mend` would restore of a checkpoint that cannot be opened, and the command for it.

    None if `mend` would restore nothing. `older` is an earlier checkpoint, which the command may
    use as `--older`. `makes_up` in the result tells whether restored values would differ from lost
    ones.
    """
    from .mending.prospect import prospect

    source = os.fspath(path)
    reading = _reading({"tag": tag}, nameless=True, opens_items=True)
    given = prospect(source, reading, None if older is None else os.fspath(older))
    if given is None:
        return None
    command = given.command(source, tag)
    return {"what": given.what, "command": command, "makes_up": given.makes_up}


def restorable(file: Path) -> str | None:
    """A phrase for what `mend` would restore in the headers of a file; None if nothing."""
    from .mending.prospect import restorable as phrase_of

    return phrase_of(os.fspath(file))


@takes_urls("source", "older", target="target")
def mend(
    source: Path,
    target: Path | None = None,
    *,
    older: Path | None = None,
    accept_chance: bool = False,
    rebuild: Sequence[str] = (),
    copying: Copying = DEFAULT_COPYING,
    dry_run: bool = False,
    resume: bool = False,
    begin: Begin | None = None,
    tell: Tell | None = None,
    read_back: bool = True,
    before_rename: Callable[[], None] | None = None,
    **words: Unpack[NamedKeywords],
) -> Report:
    """Writes a copy of the damaged checkpoint at `source`, with the original bytes restored.

    A flipped bit is found by the checksum of a record (a byte range of a file, such as a tensor).
    In a record of more than 256 KiB it may be the wrong bit. There it is restored only if
    `accept_chance` is true or other bytes confirm it: a replica, the same tensor of the checkpoint
    `older`, or a 16-bit weight beside its master.

    A lost file is restored if all other ranks, at least two, have the same bytes. `rebuild` chooses
    what replaces lost masters and moments, if the weights are left, or a lost model file:

        masters         masters are made from the weights
        moments=zero    moments are zero
        moments=older   moments are those of `older`
        model           a lost model file gets weights from the masters, and all else from `older`;
                        counters such as `global_steps` are advanced where possible

    `tell` is called with the damaged places and the losses, before anything is written. With
    `dry_run` nothing is written, and `target` may be None. `words` are the arguments of `read`; the
    other arguments are those of `convert`. Raises a ZckptError if something that is needed stays
    lost, or if nothing is damaged; then `target` does not exist.
    """
    from .mending.mend import mend as write_mended

    return write_mended(
        os.fspath(source),
        None if target is None else os.fspath(target),
        None if older is None else os.fspath(older),
        accept_chance,
        tuple(rebuild),
        _reading(words, nameless=True, opens_items=True),
        copying,
        dry_run=dry_run,
        resume=resume,
        begin=begin,
        tell=tell,
        before_rename=before_rename,
    )


# -- looking


@takes_urls("path", "against")
def verify(
    path: Path,
    against: Path | None = None,
    *,
    gather: bool = False,
    device: str | None = None,
    tensors: str | None = None,
    weights_only: bool = False,
    drop_state: Sequence[str] = (),
    rename: Renames = (),
    family: str | None = None,
    jobs: int = READING_JOBS,
    memory: int = 256 << 20,
    begin: Begin | None = None,
    sharing: Pool = SINGLE,
    **source: Unpack[NamedKeywords],
) -> Report:
    """Checks the checkpoint at `path` for contradictions, or compares it with `against`.

        gather          rebuild the tensors from the ranks' partitions as the engine does (needs
                        torch); under torchrun, all processes gather and return the report
        device          where `gather` runs, "cuda" or "cpu"; by default on a GPU if there is one
        tensors         a glob that selects tensors
        weights_only    compare only weights and buffers
        drop_state      optimizer states that are not compared; any other state that only one side
                        has is a difference, or a note if no run needs it
        rename          pairs of a regular expression and its replacement, for the names of `path`
        family          a model family, such as "llama": converts names and fused weights of `path`
                        from Hugging Face to Megatron-Core, or back
        sharing         a `zckpt.group()`, whose processes share the reading; all return the report

    `source` are the arguments of `read`. Findings are in the report, damaged files too. A
    ZckptError means that there is no result, for example because `path` is no checkpoint.
    """
    from .proving import prove

    reading = _reading(source, weights_only=weights_only, rename=rename, family=family)
    selection = Selection(tensors, weights_only, tuple(drop_state))
    return prove(
        path,
        against,
        gather,
        reading,
        selection,
        begin,
        device=device,
        jobs=jobs,
        memory=memory,
        pool=sharing,
    )


@takes_urls("a", "b")
def diff(
    a: Path,
    b: Path,
    *,
    tensors: str | None = None,
    weights_only: bool = False,
    drop_state: Sequence[str] = (),
    rename: Renames = (),
    family: str | None = None,
    jobs: int = READING_JOBS,
    memory: int = 256 << 20,
    begin: Begin | None = None,
    **source: Unpack[NamedKeywords],
) -> Report:
    """Compares two checkpoints of any two formats: tensors, steps, groups, states.

    tensors                     a glob: only these tensors are compared, and equal ones are
                                listed too
    weights_only, drop_state    as for `verify`
    rename, family              as for `verify`, for the names of `a`
    source                      the arguments of `read`: `format`, `tag`, `follow_links` and
                                `step_policy` apply to `a`, all others to both; "keep" as
                                `step_policy` applies to both
    """
    from .proof import verify as proof

    started = time.monotonic()
    copying = Copying(jobs, memory)
    names = {"rename": rename, "family": family}
    reading = _reading(source, weights_only=weights_only, opens_items=True, **names)
    selection = Selection(tensors, weights_only, tuple(drop_state))
    first, second, lines = read_both(a, b, reading)
    with sources.unchanged(first.files.fingerprints, second.files.fingerprints):
        findings = proof.diff(first, second, selection, copying, begin)
    for side in (first, second):
        lines += mended.warnings(side.notices.mended, side.where)
    findings["notes"] = [*said(lines), *findings["notes"]]
    report: Report = {"zckpt": VERSION, "command": "diff", "a": os.fspath(a), "b": os.fspath(b)}
    report["selection"] = selection.flags
    return report | findings | {"seconds": round(time.monotonic() - started, 3)}


@takes_urls("path")
def stats(
    path: Path,
    *,
    tensors: str | None = None,
    jobs: int = READING_JOBS,
    memory: int = 256 << 20,
    begin: Begin | None = None,
    **source: Unpack[NamedKeywords],
) -> Report:
    """Measures every tensor of a checkpoint, and warns about suspicious numbers.

    Suspicious are, for example, NaN, infinities, weights that are all zero, and negative second
    moments. `tensors` is a glob that selects tensors; `source` are the arguments of `read`. The
    statistics are over the finite numbers, in float64: min, max, mean, std (with n - 1, as
    torch.std), norm (L2), counts, and a histogram of magnitudes.
    """
    from .proof import health

    started = time.monotonic()
    copying = Copying(jobs, memory)
    manifest = read_manifest(path, _reading(source, nameless=True, opens_items=True))
    report: Report = {"zckpt": VERSION, "command": "stats", "path": os.fspath(path)}
    report["format"] = manifest.format
    with sources.unchanged(manifest.files.fingerprints):
        findings = health.measure_all(manifest, tensors, copying, begin)
    return report | findings | {"seconds": round(time.monotonic() - started, 3)}
