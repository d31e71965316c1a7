"""Builds the manifest of a Megatron-Core directory from what a reader has collected."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from os.path import basename
from typing import Any

from msgspec import Struct, field

from ...core.checkpoint.entries import Entry, Key
from ...core.checkpoint.facts import NamedWeightsEngine
from ...core.checkpoint.manifest import Files, Manifest, Notices, Parameter, Run, Sibling, Sighting
from ...core.checkpoint.origin import OF_ANY_ENGINE, Origin
from ...core.checkpoint.placement import TENSOR_RANK, Sliced, Table
from ...core.checkpoint.siblings import CACHE, FOLLOW
from ...core.checkpoint.weights import is_optimizers
from ...core.ranks.merge import tensor
from ...core.storage.fragments import Record
from ...core.storage.sequences import Joined
from ...core.storage.unfinished import UNFINISHED
from ...errors import (
    MissingData,
    Notice,
    UnsupportedCheckpoint,
    brief,
    counted,
    listed,
    note,
    warning,
)
from ...files.dcptable import ItemTable
from ...files.torchfile import TorchFile
from ...training.optimizers import name_of_groups
from ...training.steps import STATED
from .common_state import DISTRIBUTED, FLAT, FSDP, NOT_DISTRIBUTED, WEIGHTS_ONLY
from .files import is_iteration
from .fsdp2 import put_in_order
from .groups import FileStep, agreed_step, groups_of, hyper_parameters, members, stated_step
from .names import EMBEDDING, OUTPUT
from .saving_program import program_of

BUFFERS = re.compile(r".*\.router\.expert_bias")
STRATEGIES = {"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}
LAYER_WISE = "use_layer_wise_distributed_optimizer"
TIED = "untie_embeddings_and_output_weights"
WITH_MODEL = "load the run in Megatron-Core, and save it again, with the model's weights"


class Content(Struct, eq=False):
    """Everything that a reader collects from a directory.

    file        the file of the `common` state
    common      the state that all ranks share; its tensors become entries
    args        the run's arguments
    frozen      weights without an optimizer state, although others have one
    sharding    how the optimizer's state was sharded; None if it was not read
    keys        torch_dist keys with their number of leading axes (layers, experts)
    group_of    the number of each parameter's group, if the files state it
    steps       the steps in the ranks' files
    """

    folder: str
    file: TorchFile
    common: dict[Any, Any]
    args: Mapping[str, Any]
    entries: dict[Key, Entry] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    frozen: set[str] = field(default_factory=set)
    sharding: str | None = None
    files: list[str] = field(default_factory=list)
    records: Joined[Record] = field(default_factory=Joined)
    replicas: list[Entry] = field(default_factory=list)
    keys: dict[str, int] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    omitted: list[Notice] = field(default_factory=list)
    siblings: Sequence[Sibling] = ()
    group_of: dict[str, int] | None = None
    steps: list[FileStep] = field(default_factory=list)

    def join(self, parts: Iterable[tuple[int, Entry]], cuts: Mapping[str, Sliced]) -> None:
        """Joins the tensor ranks' shards into entries with the full tensors.

        `parts` are pairs of a tensor rank and its shard; `cuts` says how the ranks cut each
        parameter. If several ranks have the same shard, the first is used, and the others become
        replicas.
        """
        held: dict[Key, list[list[Entry]]] = {}
        for rank, part in parts:
            of_ranks = held.setdefault(part.key, [[] for _ in cuts[part.parameter].slicing.slices])
            of_ranks[rank].append(part)
        table, order = Table(TENSOR_RANK, cuts), {name: n for n, name in enumerate(self.shapes)}
        for key in sorted(held, key=lambda key: order[key[0]]):
            self.entries[key], *copies = tensor(key, held[key], table, self.folder)
            self.replicas += copies


def manifest_of(content: Content, step_policy: str | None) -> Manifest:
    """Builds the manifest of a directory; raises InconsistentCheckpoint if steps differ.

    `step_policy` is the value of --step-policy ("max", "min" or a number), which chooses a step if
    they differ. If it is a number and the common state has no iteration, the checkpoint gets this
    number as its iteration.
    """
    common, shapes = content.common, content.shapes
    slots = {entry.slot for entry in content.entries.values() if is_optimizers(entry.slot)}
    agreed_step(content.folder, content.steps, step_policy)
    step, place, sightings = stated_step(common, content.file, step_policy)
    args = content.args
    parameter_shapes = {
        name: shape for name, shape in shapes.items() if not BUFFERS.fullmatch(name)
    }
    stepped_names = (
        e.parameter for e in content.entries.values() if e.slot not in ("param", "state")
    )
    trained = {*stepped_names} or {*shapes}
    frozen = content.frozen | ({*shapes} - trained)
    trainable = {name: shape for name, shape in parameter_shapes.items() if name not in frozen}
    groups = groups_of(common) if slots else []
    group_of = content.group_of or members(groups, trainable, args)
    has_groups = bool(groups) and group_of is not None
    # the output layer is the embedding if the arguments state it and no key has the output layer
    is_tied = args.get(TIED) is False and OUTPUT not in shapes
    parameters = {
        name: Parameter(
            shape,
            name in trainable,
            group=(group_of or {}).get(name) if groups else None,
            step=step if name in trainable and slots else None,
            aliases=(OUTPUT,) if is_tied and name == EMBEDDING else (),
        )
        for name, shape in parameter_shapes.items()
    }
    warnings = [*_warnings_of_other_iteration(content), *put_in_order(args)]
    if groups and not has_groups:
        message = (
            "no file lists the parameters of each group, and zckpt cannot infer them: by "
            "Megatron-Core's rule (no weight decay for biases and 1-d tensors), a parameter fits "
            "no group, or several. zckpt keeps the groups' values, but assigns no parameters"
        )
        warnings.append(warning("groups-missing", message, subject="param_groups"))
    if len(trainable) < len(parameter_shapes) and content.sharding in (*FLAT, DISTRIBUTED):
        untrained = [name for name in parameter_shapes if name in frozen]
        message = (
            f"the optimizer's buffers do not contain {listed(untrained)}: zckpt treats them as "
            "frozen"
        )
        warnings.append(warning("frozen-inferred", message, subject=next(iter(untrained), None)))
    if not any(entry.slot == "param" for entry in content.entries.values()):
        message = (
            "the directory was saved without the model: zckpt uses the optimizer's fp32 masters as "
            "its weights; frozen weights and buffers are missing"
        )
        warnings.append(warning("weights-missing", message, file=content.folder))
    if "iteration" not in common and step_policy is not None and step_policy.isdecimal():
        # another program saved the items: no counter, and often no folder iter_N
        common = {**common, "iteration": int(step_policy)}
        sightings.append(Sighting(f"{STATED}, iteration", int(step_policy), False))
    gated = args.get("swiglu")
    kept = {  # for a target of Megatron-Core; tensors of the common state become entries
        "common": content.file.kept(common, "megatron.common", content.entries),
        "keys": content.keys,
        "gated": gated if isinstance(gated, bool) else None,
        "vocabulary": _vocabulary(args, shapes),
        "objects": content.objects,
        "program": program_of(content.folder),
    }
    return Manifest(
        root=content.folder,
        format="megatron",
        entries=content.entries,
        parameters=dict(sorted(parameters.items(), key=lambda item: not item[1].trainable)),
        buffers=tuple(name for name in shapes if name not in parameter_shapes),
        groups=tuple(map(hyper_parameters, groups)) if has_groups else None,
        optimizer=name_of_groups([slots] * max(len(groups), 1), groups or None) if slots else None,
        state={"megatron": kept},
        replicas=tuple(content.replicas),
        run=Run(
            origin=Origin(  # no file states a version
                "megatron",
                zero_stage=_stage(content.sharding, args),
                dp=size_of(args, "data_parallel_size"),
                tag=basename(content.folder),
                nulls=OF_ANY_ENGINE | {"zero_stage"},
            ),
            engine=NamedWeightsEngine(
                "megatron",
                None,
                content.sharding,
                _dtype_of_largest_weight(content.entries, parameter_shapes)
                or _dtype_in_arguments(args),
                "F32" if slots else None,
            ),
            step_place=place if slots else None,
            steps=tuple(sightings) if slots else (),
        ),
        files=Files(
            records=content.records,
            paths=tuple(dict.fromkeys(content.files)),
            siblings=tuple(content.siblings),
        ),
        notices=Notices(
            omitted=tuple(content.omitted), warnings=tuple(warnings), states_inferred=False
        ),
    )


def extra_states(table: ItemTable, own_paths: Iterable[str] = ()) -> list[Notice]:
    """Returns a note for each file of a directory that zckpt does not read.

    `own_paths` are further files that zckpt does read, besides the tensors' files in `table`.
    """
    known_paths = {*table.files, *table.locations.paths, *own_paths}
    of_zckpt = (CACHE, UNFINISHED)
    with os.scandir(table.folder) as items:
        names = sorted(
            i.name for i in items if i.path not in known_paths and i.name not in of_zckpt
        )
    return [stranger(table.folder, name) for name in names]


def stranger(folder: str, name: str) -> Notice:
    """Makes the note on an unknown file of the directory, which zckpt does not read."""
    message = f"{name}, an unknown file of the directory"
    return note("file-omitted", message, subject=name, file=os.path.join(folder, name))


def is_stranger(notice: Notice) -> bool:
    """Whether a notice is about an unknown file of the directory (made by `stranger`).

    The subject of such a notice is the file's name. Notices about a trainer's omitted files have
    the same code, but their subject is not a file's name.
    """
    return notice.code == "file-omitted" and notice.subject not in (None, FOLLOW)


def _warnings_of_other_iteration(content: Content) -> list[Notice]:
    name, stated_iteration = basename(content.folder), content.common.get("iteration")
    number = name.removeprefix("iter_")
    if number == name or not is_iteration(name) or stated_iteration in (None, int(number)):
        return []
    message = (
        f"{content.file.path} states iteration {brief(stated_iteration)}, but its folder is "
        f"{name}: it may be a file of another save (or the folder was renamed)"
    )
    return [warning("mixed-saves", message, file=content.file.path)]


def _stage(sharding: str | None, args: Mapping[str, Any]) -> int | None:
    """The ZeRO stage that corresponds to the optimizer's `sharding`; None if unknown.

    For Megatron-FSDP it depends on the sharding strategy in the arguments.
    """
    if sharding == FSDP:
        return STRATEGIES.get(str(args.get("data_parallel_sharding_strategy")))
    return None if sharding is None else int(sharding != NOT_DISTRIBUTED)


def size_of(args: Mapping[str, Any], key: str) -> int | None:
    """The value of an argument, if it is a positive integer; else None."""
    value = args.get(key)
    return value if type(value) is int and value > 0 else None


def require_groups(folder: str, args: Mapping[str, Any], tp: int) -> None:
    """Raises UnsupportedCheckpoint if several tensor ranks share one query group of attention.

    Then each of these ranks has the group's keys and values in `linear_qkv`. Without grouped
    queries, `num_query_groups` is 1 and has no meaning.
    """
    queries = size_of(args, "num_query_groups")
    if queries is not None and queries < tp and args.get("group_query_attention") is not False:
        raise UnsupportedCheckpoint(
            "grid-unsupported",
            f"{folder} has {counted(queries, 'query group')} on {tp} tensor ranks: several ranks "
            "hold the same keys and values in linear_qkv, which zckpt does not read",
            hint="load the run in Megatron-Core on at most "
            f"{counted(queries, 'tensor rank')}, and save it again",
            file=folder,
        )


def without_weights(folder: str, states: Iterable[str], other_words: Iterable[str]) -> MissingData:
    """Makes the error for a directory with neither weights nor masters; it lists what is there.

    `states` are the optimizer's states, such as `exp_avg`. `other_words` are the beginnings of all
    other keys, such as `rng_state`.
    """
    what = [*(f"{state} of an optimizer" for state in sorted(states)), *dict.fromkeys(other_words)]
    return MissingData(
        "weights-missing",
        f"{folder} has neither the weights of a model nor fp32 masters"
        + (f", only {listed(what)}" if what else ""),
        hint=f"the weights may be in another directory; if not, {WITH_MODEL}",
        file=folder,
    )


def require_states_by_parameter(folder: str, args: Mapping[str, Any]) -> None:
    """Raises UnsupportedCheckpoint for Muon, whose ranks divide the parameters among themselves.

    Each rank has complete states, but only for some parameters.
    """
    if "muon" in str(args.get("optimizer")) or args.get(LAYER_WISE):
        raise UnsupportedCheckpoint(
            "optimizer-unsupported",
            f"{folder} has optimizer states of Muon, which zckpt does not read: each rank stores "
            "complete states, but only of some parameters",
            hint=WEIGHTS_ONLY,
            file=folder,
        )


def _vocabulary(args: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> Any:
    """{"rows": all vocabulary rows, "used": rows for tokens}; None for a model without embedding.

    `used` is None if the arguments do not state it.
    """
    shape = shapes.get(EMBEDDING)
    return None if shape is None else {"rows": shape[0], "used": size_of(args, "vocab_size")}


def _dtype_of_largest_weight(entries: Mapping[Key, Entry], names: Mapping[str, Any]) -> str | None:
    weights = (entry for name in names if (entry := entries.get((name, "param"))))
    largest = max(weights, key=lambda entry: entry.numel, default=None)
    return None if largest is None else largest.dtype


def _dtype_in_arguments(args: Mapping[str, Any]) -> str | None:
    for flag, dtype in (("bf16", "BF16"), ("fp16", "F16")):
        if args.get(flag) is True:
            return dtype
    return "F32" if args.get("bf16") is False else None
