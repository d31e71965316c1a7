"""Reads Megatron-FSDP's directories: --ckpt-format fsdp_dtensor.

    model.module.<name>                               weights, fp32: the optimizer updates them
    optimizer.state.module.module.<name>.exp_avg      moments; torch's Adam has a step beside them
    optimizer.param_to_group_meta.module....<name>.lr every parameter's group, value by value
    args, iteration, opt_param_scheduler.max_lr       values that all ranks share
    rng_state.(pp, tp).0.torch_rng_state              states of single ranks

torch.distributed.checkpoint saved them. Names are the modules' names, with one `module.` in front
for each wrapper. A gated `linear_fc1` is two tensors: <name>_w for the gate, <name>_v for the other
half. All tensors have their global shape, and experts are numbered within the full layer.

Layers are numbered within their pipeline stage, so several stages would write the same keys. So
zckpt reads only directories of one stage. Proven with megatron-core 0.16.1 and 0.19.2.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

from msgspec.structs import replace

from ...core.checkpoint.entries import Entry, Key
from ...core.checkpoint.inert import Scalar, TensorName, inside, to_json
from ...core.checkpoint.manifest import Manifest, slot_name
from ...core.storage import sources
from ...errors import (
    CorruptCheckpoint,
    IncompleteCheckpoint,
    InconsistentCheckpoint,
    UnsupportedCheckpoint,
    counted,
    safe,
)
from ...files.dcpfile import read_table
from ...files.dcpitems import ItemFiles
from ...files.dcptable import ItemLocation, ItemTable, KeyPath
from ...files.torchfile import TorchFile
from ...training import steps
from ...training.faults import LOCAL_LAYERS
from ..reading import Reading
from ..statedict.tree import MAX_LIST, TensorPiece, assembled, piece_of, put
from .common_state import FSDP, WEIGHTS_ONLY, arguments
from .groups import FileStep, agreed_step
from .manifest import Content, extra_states, manifest_of, require_groups, size_of, without_weights
from .names import OF_MODULE, OF_OUTPUT, KeysOfGpt, with_own_expert, with_plain_norms

OF_RANK = re.compile(r"\((\d{1,9}), (\d{1,9})\)")  # stage, tensor rank
MASTER = "master_param"  # the key of masters in Transformer Engine's Adam, if it keeps them itself
MASTERS, MOMENTS = ("F32",), ("F32", "BF16")  # other types need scales or weights

MODEL = re.compile(r"model\d*")
WRAPPERS = re.compile(r"\A(?:module\.)+")
HALF = re.compile(r"(?P<name>.*\blinear_fc1\.(?:weight|bias)\d*)_(?P<half>[wv])")
STATES, GROUPS = "state", "param_to_group_meta"

Keys = dict[str, str]
"""Maps names in the saved state, such as `module.<parameter>`, to keys of `.metadata`."""


class FsdpReader:
    """Sorts and reads the keys of a Megatron-FSDP directory.

        weights       {name: key}
        modules       keys of modules' extra states: {name: key}
        states        keys of optimizer states: {"exp_avg": {name: key}}
        metas         keys of the values of a parameter's group: {name: {"lr": key}}
        other_keys    all other keys, by their paths in the state dict
        tp            the number of tensor ranks

    Raises UnsupportedCheckpoint for several pipeline stages or model chunks, unknown optimizer
    states, and gated layers that several tensor ranks saved as one tensor.
    """

    def __init__(self, folder: str, reading: Reading) -> None:
        self.folder = folder
        self.table: ItemTable = read_table(folder, reading.laid)
        self.files = ItemFiles(plans=not reading.opens_items, is_laid=reading.laid)
        self.file: TorchFile | None = None  # the last file with a value
        self.entries: dict[Key, Entry] = {}
        self.weights: Keys = {}
        self.modules: Keys = {}
        self.states: dict[str, Keys] = {}
        self.metas: dict[str, Keys] = {}
        self.other_keys: dict[KeyPath, str] = {}
        for key in self.table.items:
            if key not in self.table.paths:
                raise UnsupportedCheckpoint(
                    "writer-unsupported",
                    f"{folder}: .metadata does not state the path of the key {safe(key)} in the "
                    "saved state",
                    hint="save it with torch's DefaultSavePlanner, as Megatron-LM does",
                    file=folder,
                )
        # a key cannot be split at its dots, because parameter names have dots too
        for key, path in self.table.paths.items():
            if key in self.table.items:
                self._sort(key, path, reading.weights_only)
        self.args = arguments({"args": self.tree("megatron.common.args", "args")})
        self.places = self._saved_ranks()
        self.tp = self._require_one_stage()
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.of_groups: list[FileStep] = []  # the steps in groups

    def manifest(self, step_policy: str | None) -> Manifest:
        if not self.weights:
            other_keys = (str(path[0]) for path in self.other_keys)
            raise without_weights(self.folder, self.states, other_keys)
        for name, keys in joined(self.folder, self.weights).items():
            self.shapes[name] = self.enter(name, "param", keys).shape
        self._require_halves()
        firsts = dict.fromkeys(str(path[0]) for path in self.other_keys)
        common = {
            first: self.tree(inside("megatron.common", first), first)
            for first in firsts
            if first != "rng_state" or not self.places
        }
        group_of: dict[str, int] = {}
        has_states = bool(self.metas or self.states)
        if has_states:
            self._moments()
            groups, group_of = self._groups()
            common["optimizer"] = {"optimizer": {"param_groups": groups, **self._step(step_policy)}}
        axes_of_keys, objects = self._keys_and_extra_states()
        if self.file is None:
            raise CorruptCheckpoint(
                "file-damaged",
                f"{self.folder} has only weights, no arguments and no counters",
                file=self.folder,
            )
        content = Content(
            self.folder,
            self.file,
            common,
            self.args,
            entries=self.entries,
            shapes=self.shapes,
            frozen={name for name in self.shapes if group_of and name not in group_of},
            sharding=FSDP if has_states else None,
            files=[*self.table.files, *sorted(self.files.sizes)],
            records=self.files.records,
            keys=axes_of_keys,
            objects=objects | self._random_states(),
            omitted=extra_states(self.table),
            group_of=group_of,
        )
        return manifest_of(content, step_policy)

    # -- the ranks

    def _saved_ranks(self) -> list[tuple[int, ...]]:
        """The ranks whose random states were saved, as pairs (pipeline stage, tensor rank)."""
        ranks = dict.fromkeys(
            str(path[1]) for path in self.other_keys if path[0] == "rng_state" and len(path) > 1
        )
        return [
            (int(match[1]), int(match[2])) for rank in ranks if (match := OF_RANK.fullmatch(rank))
        ]

    def _require_one_stage(self) -> int:
        """Returns the number of tensor-parallel ranks of the run.

        Raises UnsupportedCheckpoint for several pipeline stages or model chunks, or if it is
        unknown how many stages there were.
        """
        stage_count = size_of(self.args, "pipeline_model_parallel_size")
        if stage_count is None and not self.places:
            raise UnsupportedCheckpoint(
                "writer-unsupported",
                f"{self.folder} does not state how many pipeline stages the run had: it has "
                "neither args nor rng_state",
                file=self.folder,
            )
        stages = max(stage_count or 1, *(1 + pp for pp, _ in self.places), 1)
        firsts = {str(path[0]) for path in self.table.paths.values()}
        chunked = {*filter(MODEL.fullmatch, firsts)} - {"model"}
        if stages > 1 or chunked:
            what = "several model chunks" if chunked else counted(stages, "pipeline stage")
            raise UnsupportedCheckpoint(
                "engine-fault",
                f"{self.folder} was saved with {what}: {LOCAL_LAYERS.message}",
                hint=LOCAL_LAYERS.hint,
                file=self.folder,
            )
        seen = max((1 + tp for _, tp in self.places), default=1)
        tp = size_of(self.args, "tensor_model_parallel_size") or seen
        require_groups(self.folder, self.args, tp)
        return tp

    def _require_halves(self) -> None:
        """Raises UnsupportedCheckpoint if several tensor ranks saved a gated layer as one tensor.

        The rows of such a tensor are gate and up of the first rank, gate and up of the second, ...
        """
        ranks = max(self.tp, size_of(self.args, "expert_tensor_parallel_size") or 1)
        for raw in self.weights if ranks > 1 else ():
            name = plain_name(raw)
            shape = self.shapes.get(name, ())
            after = self.shapes.get(name.replace("linear_fc1.weight", "linear_fc2.weight"), ())
            is_gated = len(after) == 2 and shape[:1] == (2 * after[1],)
            if name.endswith("linear_fc1.weight") and is_gated:
                raise UnsupportedCheckpoint(
                    "writer-unsupported",
                    f"{self.folder}: the two halves of the gated layer {name} are one tensor, and "
                    f"zckpt does not know in which order {ranks} tensor ranks saved their rows",
                    hint="save it from a run with one tensor rank",
                    file=self.folder,
                    subject=name,
                )

    def _random_states(self) -> dict[str, Any]:
        """The random states of ranks, under the keys that torch_dist directories have for them."""
        result = {}
        for pp, tp in self.places:
            key = f"rng_state/shard_{pp}.{tp}_1.{self.tp}"
            place = inside(f"megatron.objects.{key}", 0)
            result[key] = [self.tree(place, "rng_state", f"({pp}, {tp})")]
        return result

    # -- the optimizer

    def _moments(self) -> None:
        """Adds the moments to the entries, and the masters if the optimizer keeps them.

        Raises UnsupportedCheckpoint for a state that does not fit its weight.
        """
        for state, raw in self.states.items():
            if state == "step":
                continue
            slot = "master" if state == MASTER else slot_name(state)
            for name, keys in joined(self.folder, raw).items():
                entry, wrong = self.enter(name, slot, keys), ""
                if name not in self.shapes:
                    wrong = "is an optimizer state, but the directory lacks its weight"
                elif entry.dtype not in (MASTERS if slot == "master" else MOMENTS):
                    wrong = f"has the type {entry.dtype}, and the files lack its scale"
                elif entry.shape != self.shapes[name]:
                    # 0.16.1 splits only exp_avg and exp_avg_sq: of another state, both keys have
                    # all of it
                    wrong = f"has the shape {list(entry.shape)}, its weight another"
                if wrong:
                    what = f"{self.folder}: {safe(keys[0])} {wrong}"
                    raise UnsupportedCheckpoint("writer-unsupported", what, hint=WEIGHTS_ONLY)

    def _groups(self) -> tuple[list[dict[str, Any]], dict[str, int]]:
        """Returns the parameter groups, and maps each parameter to the number of its group.

        The files state the group's values for every parameter. Parameters with equal values form a
        group.
        """
        groups: list[dict[str, Any]] = []
        numbers: dict[str, int] = {}  # of groups, by their values as JSON
        group_of = {}
        for raw, keys in self.metas.items():
            name = plain_name(raw)
            if name not in self.shapes:
                raise IncompleteCheckpoint(
                    "elements-missing",
                    f"{self.folder} states the parameter group of {name}, but lacks its weight",
                    file=self.folder,
                    subject=name,
                )
            group = {name: self.value(key, key) for name, key in keys.items()}
            if "step" in keys:
                self.of_groups.append((self.location(keys["step"]).file, group["step"]))
            number = numbers.setdefault(json.dumps(to_json(group), sort_keys=True), len(groups))
            if number == len(groups):
                groups.append(group)
            group_of[name] = number
        return groups, group_of

    def _step(self, policy: str | None) -> dict[str, Any]:
        """Returns {"state": {"common_step": step}}: the one step of all states; {} without steps.

        If steps differ, `policy` (the value of --step-policy, such as "max") chooses one;
        otherwise InconsistentCheckpoint is raised.
        """
        numbers = {key: self.value(key, key) for key in self.states.get("step", {}).values()}
        steps_of_files = [(self.location(key).file, number) for key, number in numbers.items()]
        agreed = agreed_step(self.folder, steps_of_files or self.of_groups, policy)
        if not numbers:
            return {}
        step = next(iter(numbers.values()))
        if agreed is not None and steps.step_of(step) != agreed:  # the policy's step
            step = replace(step, value=agreed) if isinstance(step, Scalar) else agreed
        return {"state": {"common_step": step}}

    # -- values that torch_dist also has

    def _keys_and_extra_states(self) -> tuple[dict[str, int], dict[str, Any]]:
        """The keys that torch_dist would use, and modules' extra states under such keys.

        The first result has each key's number of leading axes (layers, experts). Each value in the
        second is a list of one state, which is None if the directory lacks the state.
        """
        state_keys = {plain_name(raw): key for raw, key in self.modules.items()}
        state_keys.pop(OF_OUTPUT, None)
        model = KeysOfGpt([*self.shapes, *state_keys], self.weights, self.args)
        objects: dict[str, Any] = {}
        for name, key in model.items().items():
            place = inside(f"megatron.objects.{key}", 0)
            # Megatron-Core 0.16.1 does not save extra states in these directories
            objects[key] = [self.value(state_keys[name], place) if name in state_keys else None]
        return model.keys(), objects

    # -- the items, by kind

    def _sort(self, key: str, path: KeyPath, weights_only: bool) -> None:
        first, *names = map(str, path)
        if MODEL.fullmatch(first) and len(names) == 1:
            into = self.modules if names[0].endswith(OF_MODULE) else self.weights
            into[names[0]] = key
        elif first != "optimizer":
            self.other_keys[path] = key
        elif weights_only:
            pass
        elif len(names) == 3 and names[0] == STATES:
            self.states.setdefault(names[2], {})[names[1]] = key
        elif len(names) == 3 and names[0] == GROUPS:
            self.metas.setdefault(names[1], {})[names[2]] = key
        else:
            raise UnsupportedCheckpoint(
                "state-unsupported",
                f"{self.folder}: zckpt does not know the optimizer key {safe(key)}",
                hint=WEIGHTS_ONLY,
                file=self.folder,
            )

    # -- values

    def tree(self, place: str, *begin: str) -> Any:
        """Reads all values whose paths in the saved state begin with `begin`, as one nested value.

        `place` is the path that this value gets in the manifest's state.
        """
        tree: dict[Any, Any] = {}
        room = MAX_LIST
        for path, key in self.other_keys.items():
            if path[: len(begin)] == begin:
                rest = path[len(begin) :]
                room = put(tree, ("", *rest), self.value(key, reduce(inside, rest, place)), room)
        return tree.get("", {})

    def value(self, key: str, place: str) -> Any:
        """Reads the value of a key for the manifest's state; None if its file is lost.

        Tensors of no dimensions become numbers. Other tensors become entries of the manifest, and
        the value names them. `place` is the path of the value in the manifest's state.
        """
        item = self.table.items[key]
        if item is None or (not item.shape and len(item.boxes) == 1):
            if sources.is_stand_in(self.location(key).file):
                return None
            file = self.files.torch_file(self.location(key))
            self.file = file if item is None else self.file
            return file.kept(file.value, place, self.entries)
        fragments = assembled(safe(key), item.dtype, item.shape, self._pieces(key))
        self.entries[place, "state"] = Entry(place, "state", item.dtype, item.shape, fragments)
        return TensorName(place)

    def location(self, key: str) -> ItemLocation:
        """The file and the byte offset of a key's value, or of the first shard of its tensor."""
        item = self.table.items[key]
        return self.table.location(key, item.boxes[0] if item else None)

    # -- tensors

    def enter(self, name: str, slot: str, keys: Sequence[str]) -> Entry:
        """Adds an entry to the manifest: the tensor of one key, or both halves of a gated layer.

        The rows of the second key follow the rows of the first. Raises UnsupportedCheckpoint if a
        key has no tensor, and InconsistentCheckpoint if the halves differ in shape or type.
        """
        pieces: list[TensorPiece] = []
        shapes, dtypes, rows = set(), set(), 0
        for key in keys:
            item = self.table.items[key]
            if item is None or (not item.shape and len(keys) > 1):
                raise UnsupportedCheckpoint(
                    "writer-unsupported",
                    f"{self.folder}: {safe(key)} is not a tensor",
                    file=self.folder,
                )
            pieces += self._pieces(key, rows)
            rows += item.shape[0] if item.shape else 0
            dtypes.add(item.dtype)
            shapes.add(item.shape)
        if len(shapes) > 1 or len(dtypes) > 1:
            raise InconsistentCheckpoint(
                "ranks-disagree",
                f"{self.folder}: the two halves of the gated layer {name} differ in shape or type",
                file=self.folder,
                subject=name,
            )
        shape, dtype = shapes.pop(), dtypes.pop()
        shape = (rows, *shape[1:]) if shape else shape
        fragments = assembled(f"{name} in {self.folder}", dtype, shape, pieces)
        entry = Entry(name, slot, dtype, shape, fragments)
        self.entries[entry.key] = entry
        return entry

    def _pieces(self, key: str, rows: int = 0) -> list[TensorPiece]:
        """The shards of a key's tensor; `rows` is added to the row offset of each shard."""
        return [
            piece_of(file, file.value, (*(at + rows for at in box.offsets[:1]), *box.offsets[1:]))
            for box, file in self.files.boxes(self.table, key)
        ]


def plain_name(raw: str) -> str:
    """Removes the words of wrappers from a parameter name, and renames norms and experts.

    The result is the name in a model of Megatron-Core's local layer spec, in which each expert and
    each norm is a separate module.
    """
    return with_plain_norms(with_own_expert(WRAPPERS.sub("", raw)))


def joined(folder: str, keys: Mapping[str, str]) -> dict[str, list[str]]:
    """Maps each parameter to its keys: one key, or two for the halves of a gated layer.

    `keys` maps names in the files to keys. Raises InconsistentCheckpoint if two keys have the same
    parameter, and IncompleteCheckpoint if only one of the halves is there.
    """
    parts: dict[str, dict[str, str]] = {}
    for raw, key in keys.items():
        match = HALF.fullmatch(raw)
        name, half = (plain_name(match["name"]), match["half"]) if match else (plain_name(raw), "")
        halves = parts.setdefault(name, {})
        if half in halves:
            raise InconsistentCheckpoint(
                "elements-overlap", f"{folder}: two keys hold {name}", file=folder, subject=name
            )
        halves[half] = key
    for name, halves in parts.items():
        if halves.keys() not in ({""}, {"w", "v"}):
            raise IncompleteCheckpoint(
                "elements-missing",
                f"{folder} does not have exactly the two halves (_w, _v) of the gated layer {name}",
                file=folder,
                subject=name,
            )
    return {name: [parts[name][half] for half in sorted(parts[name])[::-1]] for name in parts}
