"""Lays out a manifest as files of Megatron-Core, with headers and without the tensors' bytes.

    DST/latest_checkpointed_iteration.txt
    DST/iter_0000006/metadata.json, common.pt, .metadata, __0_K.distcp

The optimizer's state is `fully_reshardable`, so a run of any tp, pp, vpp and dp resumes. Every
layer and every expert is saved as a separate shard, because torch always reads complete shards.
Versions 0.14 to 0.18 write a `common.pt`. 0.19 stores the common state under a key instead, but
prefers `common.pt` if it is there (by its source code).

Keys, axes and objects are those of the source. Which keys a run asks for depends on its
specification, which no file has. So a source must come from Megatron-Core, directly or through a
universal checkpoint. A source of another engine gets keys, axes and objects from a run of
Megatron-Core (run_template.py).

Rejected alternative: the files of an optimizer that is not distributed. These identify parameters
only by number.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from itertools import product
from math import prod
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ...core.checkpoint.dtypes import SIZES, TORCH_NAMES
from ...core.checkpoint.entries import Entry, Key
from ...core.checkpoint.inert import Foreign, Global, TensorName, inside, map_values
from ...core.checkpoint.manifest import Manifest, slot_key
from ...core.checkpoint.weights import is_optimizers, weight_of
from ...core.passes.layout import Layout, Shell
from ...core.storage.folder import Folder
from ...errors import MissingData, UnsupportedCheckpoint, WrongOption, listed, literal, note
from ...files.dcpfile import sealed
from ...files.dcpshell import (
    ItemShell,
    SavedItem,
    crcs_of,
    in_files,
    item_file,
    metadata,
    seal_items,
    tensor_shell,
)
from ...files.dcptable import ItemBox, Items, TensorItem
from ...files.pickling import dumps
from ...files.torchshell import Storages, seal_whole, shell, thawed
from ...training.optimizers import MOMENTS
from ...training.options import EP, GROUP_DEFAULTS, PP, TP, Options
from .common_state import FILE, READABLE, SHARDING, SIZES_OF_RUN, arguments
from .files import BACKEND, LATEST, MARKER, is_iteration
from .fsdp2 import refuse_target
from .masters import with_zeros
from .names import keys_of
from .optimizers import optimizers
from .run_template import RunTemplate
from .saving_program import BRIDGE, LOADING, NEMO, WEIGHTS, WITHOUT_RANDOM, placed
from .vocabulary import for_tensor_ranks

LARGEST = 64 << 20  # bytes of a piece: a rank that needs a slice of it reads all of it
OF_MODULES = re.compile(r".*\._extra_state/shard_.*")
RERUN, OF_RERUN = "rerun_state_machine", "rerun_state_machine_state/"
OF_RANKS = re.compile(r"rng_state/shard_[\d.]+_(?P<grid>[\d.]+)")
FORMATS = {  # of 0.16.1; 0.19 reads it as well
    "sharded_backend": BACKEND,
    "sharded_backend_version": 1,
    "common_backend": "torch",
    "common_backend_version": 1,
}


def lay_out(source: Manifest, options: Options) -> Layout:
    """Lays out the files of the target, and lists what they cannot store.

    Raises, before anything is written:
        MissingData               the source is not of Megatron-Core, or lacks a tensor
        UnsupportedCheckpoint     layers under one key differ, or states are not Adam's
        InconsistentCheckpoint    steps differ, or groups that `--ep 1` joins
        WrongOption               an option has no use, or `--group-defaults` has an unknown key
    """
    if options[GROUP_DEFAULTS] and options.weights_only:
        raise WrongOption(
            "option-not-applicable",
            "--group-defaults has no use with --weights-only",
            hint="leave it out",
        )
    return _lay_out(source, options, {})


def lay_out_like(source: Manifest, run: Manifest, options: Options) -> Layout:
    """Lays out the target's files for a source of another engine, with `--like RUN`.

    `run` is the manifest of RUN: the target gets RUN's keys, and the types of RUN's weights. Raises
    the errors of `lay_out` and of `RunTemplate`.
    """
    types = {entry.parameter: entry.dtype for entry in run.slots.get("param", ())}
    return _lay_out(RunTemplate(source, run, options).manifest(), options, types)


def _lay_out(source: Manifest, options: Options, types: Mapping[str, str]) -> Layout:
    source = for_tensor_ranks(source if options.weights_only else with_zeros(source), options)
    writer = MegatronWriter(source, options, types)
    return Layout(
        writer.shells,
        list(placed(source.files.siblings, writer.program, writer.folder)),
        writer.omitted,
        writer.warnings,
        about="a directory of Megatron-Core, from which runs of any tp, pp and dp resume",
        loading=writer.loading,
        source=replace(source, entries={**source.entries, **writer.moved}),
    )


def seal(root: Folder, manifest: Manifest, outcome: Any) -> None:
    """Writes the CRC-32 of every tensor's bytes into the zip directories of the target's files.

    `outcome` has the checksums that were computed while the bytes were copied.
    """
    folder, crcs = manifest.root, crcs_of(outcome)
    seal_items(root, manifest.files.laid[folder], crcs)
    common = os.path.join(folder, FILE)
    seal_whole(root, common, crcs.get(common, {}))


class TargetTensor(Struct, frozen=True):
    """A tensor of the target: the parameters of all layers and experts, stacked under one key.

    `names` maps each index (layer, expert) to the parameter's name.
    """

    key: str
    slot: str
    dtype: str
    shape: tuple[int, ...]
    names: Mapping[tuple[int, ...], str]


class MegatronWriter:
    """Writes one target; the constructor decides names, tensors and files.

    `types` maps weights and buffers to their types in the target where these differ from the
    source's.
    """

    def __init__(self, source: Manifest, options: Options, types: Mapping[str, str]) -> None:
        self.source = source
        self.options = options
        self.types = types
        self.omitted = list(source.notices.omitted)
        self.warnings = list(source.notices.warnings)
        kept = source.state.get("megatron")
        self.kept: dict[str, Any] = kept if isinstance(kept, dict) else {}
        keys, common = self.kept.get("keys"), self.kept.get("common")
        if not isinstance(keys, dict) or not isinstance(common, dict):
            raise MissingData(
                "option-needed",
                "zckpt writes Megatron-Core's files only from a checkpoint of Megatron-Core, or "
                "from a universal checkpoint of one",
                hint="give --like RUN, a checkpoint saved by the program that will resume: it has "
                "the keys and the arguments that the source lacks",
            )
        refuse_target(source.root, arguments(common))
        self.trained = {e.parameter for e in source.entries.values() if is_optimizers(e.slot)}
        self.states = bool(self.trained) and not options.weights_only
        self.tensors = self._tensors(keys)
        self.objects = self._objects(common)
        self.moved: dict[Key, Entry] = {}
        self.common = self._with_moved_tensors(self._common(common), "megatron.common")
        program = self.kept.get("program")
        self.program = program if program in LOADING else None
        self.folder = WEIGHTS if self.program == NEMO else self._folder(common)
        self._text: bytes | None = None
        everything = source.whole_state.items()
        other_keys = {key for key, value in everything if key != "megatron" and value}
        self.omitted += [
            note(
                "state-omitted",
                f"{key}: Megatron-Core's files have no place for this state",
                subject=key,
            )
            for key in sorted(other_keys)
        ]

    # -- tensors

    def _tensors(self, keys: Mapping[str, Any]) -> list[TargetTensor]:
        source = self.source
        names = [*source.parameters, *source.buffers]
        if not keys:
            raise MissingData(
                "option-needed",
                "zckpt cannot tell under which keys torch_dist stores the source's tensors: the "
                "source's modules have no _extra_state, or several experts share one "
                "_extra_state with scales of 8-bit floats",
                hint="give --like RUN, a torch_dist checkpoint saved by the program that will "
                "resume",
            )
        parts, extra_states = keys_of(names, keys)
        if extra_states:
            raise MissingData(
                "names-do-not-fit",
                f"zckpt knows no Megatron-Core key for {listed(extra_states)}",
                hint="leave --rename out: Megatron-Core needs its own names. For mp_rank_* and "
                "fsdp_dtensor sources, zckpt knows only the keys of a GPTModel's own modules",
            )
        if lost := [key for key in keys if key not in parts]:
            raise MissingData("weights-missing", f"the source lacks the weights of {listed(lost)}")
        slots = dict.fromkeys(e.slot for e in source.entries.values() if is_optimizers(e.slot))
        if self.states and (other_slots := [slot for slot in slots if slot not in MOMENTS]):
            raise UnsupportedCheckpoint(
                "state-unsupported",
                f"the source has the optimizer states {listed(other_slots)}, but Megatron-Core's "
                "distributed optimizer loads only exp_avg and exp_avg_sq",
                hint="add --weights-only",
            )
        written = ("param", "master", *slots) if self.states else ("param",)
        tensors = (self._tensor(key, slot, parts[key]) for slot in written for key in keys)
        return [tensor for tensor in tensors if tensor is not None]

    def _tensor(
        self, key: str, slot: str, names: Mapping[tuple[int, ...], str]
    ) -> TargetTensor | None:
        """Makes the tensor of one key and slot, which stacks the tensors of all layers and experts.

        `names` maps each index (layer, expert) to a parameter or buffer. None for masters and
        optimizer states of frozen parameters. Raises UnsupportedCheckpoint if layers differ, and
        MissingData if a tensor is missing.
        """
        every = () if slot == "param" else names.values()
        frozen = [name for name in every if name not in self.trained]
        if len(frozen) == len(names):
            return None
        if frozen:
            raise UnsupportedCheckpoint(
                "state-missing",
                f"{listed(frozen)} has no optimizer state, but other layers of {key} have one: "
                "Megatron-Core's files have one tensor for all layers",
                hint="add --weights-only",
            )
        weights = [self._entry(name, slot) for name in names.values()]
        sizes = tuple(1 + max(place) for place in zip(*names, strict=True))
        if prod(sizes) > len(names):
            raise MissingData("weights-missing", f"the source lacks layers or experts of {key}")
        shapes, dtypes = {entry.shape for entry in weights}, {entry.dtype for entry in weights}
        if len(shapes) > 1 or (slot != "master" and len(dtypes) > 1):  # masters may be widened
            raise UnsupportedCheckpoint(
                "target-unsupported",
                f"layers of {key} have different shapes or types: Megatron-Core's files have one "
                "tensor for all layers",
            )
        dtype = "F32" if slot == "master" else dtypes.pop()
        if slot == "param":
            dtype = self.types.get(next(iter(names.values())), dtype)
        if slot == "param" and not {*names.values()} & {*self.source.buffers}:
            dtype = self.options.module_dtype or dtype
        if slot != "param":
            name = "param" if slot == "master" else slot_key(slot)
            key = f"optimizer.state.{name}.{key}"
        return TargetTensor(key, slot, dtype, (*sizes, *shapes.pop()), names)

    def _entry(self, name: str, slot: str) -> Entry:
        if slot in ("param", "master"):
            weight = weight_of(self.source.entries, name)
            return weight.stored if slot == "param" else weight.trained
        entry = self.source.entries.get((name, slot))
        if entry is None:
            raise MissingData(
                "state-missing",
                f"the source has no optimizer state {slot_key(slot)} of {name}",
                subject=name,
            )
        return entry

    # -- what is not a tensor

    def _objects(self, common: dict[Any, Any]) -> dict[str, Any]:
        """The pickled objects of modules and ranks to write, by key.

        Random states that a run of the target's sizes could not load are left out, with a note.
        """
        kept = self.kept.get("objects") or {}
        grid = self._loadable_sizes(arguments(common))
        objects, lost = {}, []
        for key, value in kept.items():
            match = OF_RANKS.fullmatch(key)
            of_ranks = match is not None and re.fullmatch(grid, match["grid"]) is None
            stays = not (of_ranks or key.startswith(OF_RERUN) or self.options.weights_only)
            if stays or OF_MODULES.fullmatch(key):
                objects[key] = value
            else:
                lost.append(key)
        self.without_rng = not any(map(OF_RANKS.fullmatch, objects))
        if lost:
            code = "rank-state-omitted"
            reason = "states of single ranks, which a run of other sizes could not load"
            if self.options.weights_only:
                code, reason = "state-omitted", "only the weights are written"
            self.omitted.append(note(code, f"{listed(lost)}: {reason}", subject=lost[0]))
        return objects

    def _loadable_sizes(self, args: Mapping[str, Any]) -> str:
        """A regular expression for the sizes pp.tp in keys such as `rng_state/shard_0.1_1.2`.

        A run of the target's sizes can load the random states whose keys match it.
        """
        if self.options[EP] is not None:
            # if experts are spread, a trainer may add an axis for dp: then only the same dp loads
            # the items
            return "none"
        if not args:  # the program has the sizes in separate files
            return r"\d+\.\d+"
        sizes = [self.options[each] or args.get(SIZES_OF_RUN[each]) for each in (PP, TP)]
        return re.escape(".".join(map(str, sizes)))

    def _common(self, common: Mapping[Any, Any]) -> dict[Any, Any]:
        """Makes the target's common state (arguments, groups, counters) from the source's.

        All ranks share the common state. Values that the target cannot have are left out, with a
        note.
        """
        result = dict(common)
        if result.pop(RERUN, None) is not None:
            message = f"{RERUN}: states of individual ranks, which have no meaning on other ranks"
            self.omitted.append(note("rank-state-omitted", message, subject=RERUN))
        if self.states:
            optimizer = optimizers(self.source, common, self.options)
            result["optimizer"] = [optimizer] if self.kept.get("program") == NEMO else optimizer
        else:
            for key in ("optimizer", "opt_param_scheduler"):
                if result.pop(key, None):
                    message = f"{key}: only the weights are written"
                    self.omitted.append(note("state-omitted", message, subject=key))
        content = common.get("content_metadata")
        result["content_metadata"] = {
            "distrib_optim_fully_reshardable_mem_efficient": False,
            "singleton_local_shards": False,
            **(content if isinstance(content, dict) else {}),
            # so that runs with the distributed optimizer load the states
            SHARDING: READABLE,
            "chained_optim_avoid_prefix": True,
        }
        args = common.get("args")
        if isinstance(args, Foreign) and isinstance(args.state, dict):
            changes: dict[str, Any] = {"no_save_rng": True} if self.without_rng else {}
            if not self.states:
                changes["no_save_optim"] = True
            elif "use_distributed_optimizer" in args.state:
                changes["use_distributed_optimizer"] = True
            if "ckpt_format" in args.state:
                changes["ckpt_format"] = BACKEND
            if dtype := self.options.module_dtype:
                changes |= {"bf16": dtype == "BF16", "fp16": dtype == "F16"}
                changes["params_dtype"] = Global(f"torch.{TORCH_NAMES[dtype]}")
            changes |= {name: n for each, name in SIZES_OF_RUN.items() if (n := self.options[each])}
            result["args"] = replace(args, state={**args.state, **changes})
        return result

    def _with_moved_tensors(self, value: Any, path: str) -> Any:
        """Renames the tensors in a value of the common state after `path`, the value's new path.

        The entries of these tensors are added to `moved` under their new names.
        """
        if isinstance(value, TensorName):
            entry = self.source.entries[value.name, "state"]
            self.moved[path, "state"] = replace(entry, parameter=path)
            return TensorName(path)
        return map_values(
            value, lambda item, key: self._with_moved_tensors(item, inside(path, key))
        )

    def _folder(self, common: Mapping[Any, Any]) -> str:
        """The name of the target's iteration folder: the source's, or made from its iteration.

        Raises MissingData if the source states no iteration.
        """
        tag, iteration = str(self.source.run.origin.tag), common.get("iteration")
        if is_iteration(tag):
            return tag
        if type(iteration) is not int or iteration < 0:
            hint = "add --step-policy N to the command that reads the Megatron-Core files"
            raise MissingData("step-missing", "the source does not state its iteration", hint=hint)
        return f"iter_{iteration:07d}"

    # -- files

    def loading(self, path: str) -> str:
        """The options, or the line of code, with which the user's program resumes from `path`."""
        name = literal(path)[1:-1]
        if self.program is not None:
            return LOADING[self.program].format(name) + WITHOUT_RANDOM * (
                self.program == BRIDGE and self.without_rng
            )
        states = "--use-distributed-optimizer" if self.states else "--no-load-optim --no-load-rng"
        return f"among the options of Megatron-LM: --load {name} {states}"

    def shells(self) -> Iterator[Shell]:
        """Yields every file with its headers; the file that names the iteration comes last."""
        saved: list[SavedItem] = []
        for number, items in enumerate(in_files(self._items(), self.options.file_size)):
            file, placed = item_file(f"__0_{number}.distcp", items)
            saved += placed
            yield self._inside(file)
        if self._text is None:  # a second call returns the same text
            self._text = sealed(dumps(self._describe(saved), lambda _: None))
        yield self._inside(Shell.of(".metadata", self._text))
        storages = Storages()
        common = thawed(self.common, {**self.source.entries, **self.moved}, storages)
        yield self._inside(shell(FILE, common, storages))
        yield self._inside(Shell.of(MARKER, json.dumps(FORMATS).encode()))
        if self.program == NEMO:
            return
        iteration = self.folder.removeprefix("iter_")
        latest = str(int(iteration)) if iteration.isdecimal() else iteration
        yield Shell.of(LATEST, latest.encode())

    def _inside(self, file: Shell) -> Shell:
        return replace(file, name=os.path.join(self.folder, file.name))

    def _items(self) -> Iterator[ItemShell]:
        for tensor in self.tensors:
            for box in _boxes(tensor):
                yield ItemShell(tensor.key, box, tensor_shell(tensor.dtype, box.sizes))
        for key, value in self.objects.items():
            storages = Storages()
            yield ItemShell(
                key, None, shell("archive", thawed(value, self.source.entries, storages), storages)
            )

    def _describe(self, saved: list[SavedItem]) -> Foreign:
        """Makes the content of `.metadata`: the shards of each key, and the files that have them.

        `saved` lists the saved items with their locations.
        """
        items: Items = {
            tensor.key: TensorItem(TORCH_NAMES[tensor.dtype], tensor.shape, tuple(_boxes(tensor)))
            for tensor in self.tensors
        }
        items |= dict.fromkeys(self.objects)
        return metadata(items, {}, [(each.key, each.location) for each in saved])


def _boxes(tensor: TargetTensor) -> Iterator[ItemBox]:
    """Yields the offsets and sizes of the shards in which a stacked tensor is saved.

    Each layer and expert is one shard; a large one is divided into several ranges of rows.
    """
    axes = len(next(iter(tensor.names)))
    inner_shape = tensor.shape[axes:]
    rows = inner_shape[0] if inner_shape else 1
    length = prod(inner_shape[1:]) * SIZES[tensor.dtype]
    most = max(1, LARGEST // max(1, length))
    for place in product(*map(range, tensor.shape[:axes])):
        for start in range(0, rows, most):
            inner = (min(most, rows - start), *inner_shape[1:]) if inner_shape else ()
            offsets = (start, *(0 for _ in inner_shape[1:])) if inner_shape else ()
            yield ItemBox((*place, *offsets), (*(1 for _ in place), *inner))
