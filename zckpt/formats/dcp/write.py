"""Lays out any manifest as a torch.distributed.checkpoint directory, without tensors' bytes.

torch.distributed.checkpoint.load requires every key of the program's state dict, and it reads
complete shards. So the target gets every key that programs with torch 2.13 have. Tensors are cut
along their first axis for the ranks of `--dp N`. Any other number of ranks can load the same files.

Every rank's shards are in its own files, `__R_K.distcp`, as if N ranks had saved.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

from msgspec import Struct

from ...core.checkpoint.dtypes import SIZES, TORCH_NAMES
from ...core.checkpoint.inert import Foreign, Scalar, TensorName
from ...core.checkpoint.manifest import Manifest
from ...core.grouping import by_key
from ...core.passes.layout import Layout, Shell
from ...core.storage.folder import Folder
from ...errors import (
    MissingData,
    Notice,
    UnsupportedCheckpoint,
    UnsupportedState,
    counted,
    listed,
    literal,
    note,
    warning,
)
from ...files import safefile
from ...files.dcpfile import sealed
from ...files.dcpshell import (
    ItemShell,
    SavedItem,
    crcs_of,
    in_files,
    item_file,
    metadata,
    scalar_shell,
    seal_items,
    tensor_shell,
)
from ...files.dcptable import ItemBox, Items, TensorItem
from ...files.pickling import dumps
from ...files.torchshell import Storages, shell, thawed
from ...naming import peft
from ...training import batches, lightning, trainers
from ...training.options import DIALECT, DP, Options
from ...training.trainers import TRANSFORMERS, program_of
from ..statedict.keys import ADAPTER, in_folder, own_key
from ..statedict.tree import TreePath, dotted
from ..statedict.write import BlankTensor, StateDicts, omitted
from . import hf
from .files import ADAPTER as PEFT_FILE
from .files import MODEL, PARTS, is_pair
from .options import LAYOUT
from .rest import rest_for, rest_shell, rest_values, seal_rest, tensor_names

SMALL = 64 << 10  # bytes; reading a smaller piece takes a rank less time than finding it
MOST_VALUES = 10_000  # per key of the program's own state: each value becomes an item with a pickle
OF_RANK = re.compile(r"(?:dp_)?rank_?\d+")  # the key of a value that a rank saved for itself
TORCHTITAN: tuple[TreePath, TreePath, str] = (), ("optimizer",), "flat"
"""torchtitan's keys of the model and of the optimizer, and the layout of the optimizer's keys."""
PathValue = tuple[TreePath, Any]


def lay_out(source: Manifest, options: Options, number: int = 0) -> Layout:
    """Lays out the files of the target; `number` is the model's number in Accelerate's folders.

    Also lists what the target cannot store. Raises WrongOption and MissingData before anything is
    written.
    """
    writer = DcpWriter(source, options, number)
    siblings = [(item.name, item) for item in writer.siblings]
    about = "a directory of torch.distributed.checkpoint, which any number of ranks can load"

    def loading(path: str) -> str:
        folder_name = MODEL if MODEL in writer.parts else next(iter(writer.parts))
        folder = os.path.join(path, folder_name) if folder_name else path
        file = literal(os.path.join(folder, PEFT_FILE))
        if writer.storage == ADAPTER:
            return f"safetensors.torch.load_file({file})"
        name = (
            "storage_reader=HuggingFaceStorageReader({})" if writer.storage else "checkpoint_id={}"
        )
        return f"torch.distributed.checkpoint.load(state_dict, {name.format(literal(folder))})"

    of_trainer = "" not in writer.parts and writer.dicts.optimizes  # in the trainer's folders
    return Layout(
        writer.shells,
        siblings,
        writer.omitted,
        writer.warnings,
        about=about,
        loading=lightning.resuming(source, loading) if of_trainer or writer.rest else loading,
    )


def has_models(source: Manifest, options: Options) -> bool:
    """Whether the target can store several models: only Accelerate's numbered folders can."""
    folders = {os.path.basename(os.path.dirname(path)) for path in source.files.paths}
    dialect = options[DIALECT]
    return dialect == "accelerate" or (dialect is None and any(map(PARTS.fullmatch, folders)))


class CutTensor(Struct, frozen=True):
    """A tensor that is cut into shards: its description, and each shard's rank, box and file."""

    item: TensorItem
    shards: tuple[tuple[int, ItemBox, Shell], ...]


class DcpWriter(Struct, eq=False, dict=True):
    """Decides all keys, folders and files of the target before the first byte is written."""

    source: Manifest
    options: Options
    number: int = 0

    def __post_init__(self) -> None:
        source, options = self.source, self.options
        self.world = options[DP] or source.dp
        self.dicts = StateDicts(source, options, "dcp", options[LAYOUT])
        self.rest = rest_for(source, options, self.dicts)
        if options[DIALECT] == "torchtitan":
            self.dicts.model, self.dicts.optimizer, self.dicts.layout = TORCHTITAN
        self.warnings = [*self.dicts.warnings, *self._of_ranks(), *self._files_of_ranks()]
        self.omitted = self.dicts.omitted
        self.siblings = list(source.files.siblings)
        if (ranks := options[DP]) is not None:
            self.siblings, lines = trainers.for_ranks(self.siblings, source.dp, ranks)
            self.omitted += lines
            if not options.weights_only:
                self.warnings += batches.of_next_run(source, ranks)
        self.omitted += [
            note(
                "state-omitted",
                f"client_state {key}: {count:,} values, each of which torch.distributed.checkpoint "
                "would save under its own key",
                subject=str(key),
            )
            for key, count in ([] if self.rest else self.dicts.omit_larger(MOST_VALUES))
        ]
        self.omitted += [*omitted(source, options), *self.dicts.collisions()]
        self.parts = self._parts()
        if self.storage:
            self.omitted += self._values()
        self._files: dict[str, list[Shell]] = {}  # by folder
        self._cuts: dict[BlankTensor, CutTensor] = {}

    def _of_ranks(self) -> list[Notice]:
        """Warnings about state with one key per rank, if `--dp` asks for another number of ranks.

        Such state is the program's own, for example that of data loaders.
        """
        ranks = by_key(
            (path[:place], key)
            for path, _ in self.dicts.program_items()
            for place, key in enumerate(map(str, path))
            if "rank" in key and OF_RANK.fullmatch(key)
        )
        lines = []
        for above, keys in ranks.items():
            names = list(dict.fromkeys(keys))
            if len(names) != self.options[DP]:
                message = (
                    f"{dotted(above) or 'the state'} has values of {counted(len(names), 'rank')} "
                    f"({listed(names, 2)}), which a run of another number of ranks cannot load"
                )
                lines.append(warning("program-must-set", message, subject=dotted(above) or None))
        return lines

    def _values(self) -> list[Notice]:
        """A note on the model's values that are not tensors: safetensors files cannot store them.

        Empty if all values are tensors.
        """
        values = next(each for name, each in self.parts.items() if name in ("", MODEL))
        lost = [dotted(path) for path, value in values if self._tensor_of(value) is None]
        if self.source.groups is None:  # the target's groups are assumed
            lost = [name for name in lost if "param_groups" not in name.split(".")]
        message = f"{listed(lost)}: not a tensor, and safetensors files store only tensors"
        return [note("state-omitted", message, subject=lost[0])] if lost else []

    def _files_of_ranks(self) -> list[Notice]:
        """Warnings about folders with one file per rank, if `--dp` asks for more or fewer ranks.

        Such folders lie beside the .distcp files.
        """
        dp = self.options[DP]
        return [
            warning(
                "program-must-set",
                f"{folder}/ has files of {counted(number, 'rank')}, but a run of "
                f"{counted(dp, 'rank')} reads one file per rank: "
                f"{'add the missing ones' if dp > number else 'the others are not read'}",
                file=folder,
            )
            for folder, number in trainers.ranks_of(self.source.files.siblings).items()
            if dp is not None and dp != number
        ]

    def _parts(self) -> dict[str, list[PathValue]]:
        """The paths and values to save in each folder, by the folder's name.

        The name is "" if the target is a single folder. Otherwise the folders are Accelerate's, or
        a pair such as `model` and `optim`, as in the source.
        """
        dicts, keys, dialect = self.dicts, self.dicts.keys, self.options[DIALECT]
        before = keys.folders
        if dialect is None and keys.adapter and keys.storage is not None:
            dicts.save_adapter_alone()
        if dialect is None and before is not None and is_pair(before):
            return self._pair(before)
        program = program_of(self.source.files.siblings)
        if dialect == "torchtitan" or (dialect is None and not before):
            if program is not None and dialect is None and dicts.optimizes:
                self.warnings.append(trainers.not_loaded(".metadata", ["accelerate"]))
            return {"": [pair for pair in dicts.items() if not self._is_rest(pair[0])]}
        of_trainer = program == TRANSFORMERS
        if of_trainer and (adapters := peft.other_adapters(self.source.parameters)):
            raise UnsupportedCheckpoint(
                "target-unsupported",
                f"the source has the adapter {', '.join(adapters)}: in accelerate's folders zckpt "
                f"writes only an adapter called {peft.ADAPTER}",
                hint="choose --to deepspeed, or --to gathered --dialect safetensors",
            )
        weights = (*self.source.parameters, *self.source.buffers)
        if of_trainer and (missing := peft.missing_bases(weights)):
            raise MissingData(
                "weights-missing",
                f"the source lacks {listed(missing)}, which PEFT loads from accelerate's folders "
                "together with an embedding's adapter",
                hint="choose --to deepspeed, or --to gathered --dialect safetensors",
            )
        if keys.adapter or (of_trainer and any(map(peft.is_adapters, self.source.parameters))):
            dicts.save_adapter_alone()  # as the Trainer does with PEFT and FSDP
        dicts.model, dicts.optimizer = ("model",), ("optimizer",)  # Accelerate's own keys
        names = {
            dicts.model: f"pytorch_model_fsdp_{self.number}",
            dicts.optimizer: f"optimizer_{self.number}",
        }
        parts: dict[str, list[PathValue]] = {}
        lost: dict[Any, None] = {}
        for path, value in dicts.items():
            root = next((name for own, name in names.items() if path[: len(own)] == own), None)
            if root is None:
                lost[path[0]] = None
            else:
                parts.setdefault(root, []).append((path, value))
        self.omitted += [
            note(
                "state-omitted",
                f"{key}: Accelerate stores this in other files",
                subject=str(key),
            )
            for key in lost
        ]
        return parts

    def _is_rest(self, path: TreePath) -> bool:
        """Whether a value is in no state dict, so that `meta.pt` stores it.

        False if the target has no such file.
        """
        roots = (self.dicts.model, self.dicts.optimizer)
        return self.rest is not None and not any(path[: len(each)] == each for each in roots)

    def _pair(self, folders: Sequence[str]) -> dict[str, list[PathValue]]:
        """Divides the values to save between two folders, such as `model` and `optim`.

        Values outside of the state dicts go into each folder that can store them. Without an
        optimizer, the result is one folder, "", with the content of `model`.
        """
        dicts = self.dicts
        folders_in_order = sorted(
            folders, key=lambda name: (name == MODEL, (own_key(name),) != dicts.optimizer)
        )
        roots = {dicts.model: MODEL, dicts.optimizer: folders_in_order[0]}
        # these store nothing else: a folder that is itself a state dict, or has weights alone
        full = {name for root, name in roots.items() if root == (own_key(name),)}
        full |= {MODEL} if self.storage else set()
        parts: dict[str, list[PathValue]] = {}
        lost: dict[Any, None] = {}
        for path, value in dicts.items():
            root = next((own for own in roots if path[: len(own)] == own), None)
            # a program asks each folder for all keys that it expects
            names = sorted({*roots.values()} - full) if root is None else [roots[root]]
            if not names:
                lost[path[0]] = None
            for name in names:
                parts.setdefault(name, []).append((in_folder(path), value))
        self.omitted += [
            note(
                "state-omitted",
                f"{key}: one folder has only the model's state dict, the other the optimizer's",
                subject=str(key),
            )
            for key in lost
        ]
        return parts if dicts.optimizes else {"": parts[MODEL]}

    @property
    def storage(self) -> str | None:
        """How the target stores weights outside of .distcp files; None if .distcp files have them.

        The storage is PEFT's file or Hugging Face's storage. PEFT's file is written only beside an
        optimizer: a folder with PEFT's file alone is not a directory of this format.
        """
        storage_before = self.dicts.keys.storage if self.options[DIALECT] is None else None
        return None if storage_before == ADAPTER and not self.dicts.optimizes else storage_before

    def shells(self) -> Iterator[Shell]:
        """Yields every file, one at a time; a folder's `.metadata` comes last."""
        for folder, values in self.parts.items():
            is_model = folder in ("", MODEL)
            files = self._safetensors(values) if is_model and self.storage else None
            for file in files or self._folder(folder, values):
                yield Shell(os.path.join(folder, file.name), file.size, file.parts)
        if self.rest is not None:
            yield rest_shell(self.rest, self.source, self.dicts)

    def _safetensors(self, values: Sequence[PathValue]) -> Iterator[Shell]:
        """Yields the safetensors files with the weights, without the tensors' bytes.

        They are PEFT's one file, or all ranks' files of Hugging Face's storage.
        """
        tensors = {
            dotted(path): tensor
            for path, value in values
            if (tensor := self._tensor_of(value)) is not None
        }
        if self.storage == ADAPTER:
            described = [(name, each.dtype, each.shape) for name, each in tensors.items()]
            yield safefile.shell(PEFT_FILE, described)
            return
        scalars = {dotted(path): value for path, value in values if isinstance(value, Scalar)}
        yield from hf.shells(tensors, scalars, self._box_of, self.world, self.options.file_size)

    def _folder(self, folder: str, values: Sequence[PathValue]) -> list[Shell]:
        """The files of a folder, built once: a second call returns the same list."""
        if folder not in self._files:
            self._files[folder] = [*self._item_files(values)]
        return self._files[folder]

    def _item_files(self, values: Sequence[PathValue]) -> Iterator[Shell]:
        named = [(dotted(path), path, value) for path, value in values]
        of_ranks: list[list[ItemShell]] = [[] for _ in range(self.world)]
        cut: list[tuple[int, ItemShell]] = []
        for key, _, value in named:
            if isinstance(value, Scalar) or (tensor := self._tensor_of(value)) is None:
                of_ranks[0].append(self._item(key, value))
            else:
                shards = self._cut(tensor).shards
                cut += [(rank, ItemShell(key, box, file)) for rank, box, file in shards]
        # behind the numbers, so that one file contains all steps, however many files rank 0 has
        for rank, item in cut:
            of_ranks[rank].append(item)
        saved: list[SavedItem] = []
        for rank, items_of_rank in enumerate(of_ranks):
            for number, items in enumerate(in_files(items_of_rank, self.options.file_size)):
                file, placed = item_file(f"__{rank}_{number}.distcp", items)
                saved += placed
                yield file
        text = dumps(self._describe(named, saved), lambda _: None)
        yield Shell.of(".metadata", sealed(text))

    def _item(self, key: str, value: Any) -> ItemShell:
        """The item of a value that is not cut, which rank 0 saves."""
        if isinstance(value, Scalar):
            return ItemShell(key, _whole(value), scalar_shell(value, repr(value)))
        storages = Storages()
        frozen = thawed(value, self.source.entries, storages)
        return ItemShell(key, None, shell("archive", frozen, storages))

    def _cut(self, tensor: BlankTensor) -> CutTensor:
        """Cuts a tensor into blocks of rows for the ranks; caches the result by shape and type."""
        if tensor not in self._cuts:
            rows, count = self._rows(tensor), tensor.shape[0] if tensor.shape else 1
            rows_of_rank = max(1, -(-count // self.world))
            starts = range(0, max(1, count), rows)
            boxes = tuple(_box(tensor.shape, start, rows) for start in starts)
            item = TensorItem(TORCH_NAMES[tensor.dtype], tensor.shape, boxes)
            ranks = [start // rows_of_rank for start in starts]
            files = [tensor_shell(tensor.dtype, box.sizes) for box in boxes]
            self._cuts[tensor] = CutTensor(item, tuple(zip(ranks, boxes, files, strict=True)))
        return self._cuts[tensor]

    def _box_of(self, tensor: BlankTensor, rank: int) -> ItemBox | None:
        """The block of rows that a rank saves of a tensor; None if the rank saves no rows.

        A rank saves none if a neighboring rank saves its rows, or if no rows are left for it.
        """
        rows, count = self._rows(tensor), tensor.shape[0] if tensor.shape else 1
        start = rank * -(-count // self.world)
        if start % rows or (start >= count and rank):
            return None
        return _box(tensor.shape, start, rows)

    def _tensor_of(self, value: Any) -> BlankTensor | None:
        """The dtype and shape of a tensor, a Scalar, or the tensor that a name stands for.

        None for other values.
        """
        if isinstance(value, TensorName):
            entry = self.source.entries[value.name, "state"]
            return BlankTensor(entry.dtype, entry.shape)
        if isinstance(value, Scalar):
            return BlankTensor(value.dtype, value.shape)
        return value if isinstance(value, BlankTensor) else None

    def _rows(self, tensor: BlankTensor) -> int:
        """The number of rows in each saved shard of a tensor.

        One rank's rows, or the rows of several neighboring ranks if one rank's rows have few bytes.
        """
        if not tensor.shape or not prod(tensor.shape):
            return tensor.shape[0] or 1 if tensor.shape else 1
        rows_of_rank = -(-tensor.shape[0] // self.world)
        length = prod(tensor.shape[1:]) * SIZES[tensor.dtype]
        return rows_of_rank * max(1, -(-SMALL // (rows_of_rank * length)))

    def _describe(
        self, values: Sequence[tuple[str, TreePath, Any]], saved: Sequence[SavedItem]
    ) -> Foreign:
        """The content of `.metadata`: the path and the shards of each key, and zckpt's own facts.

        `values` are all keys with their paths and values; `saved` lists the saved shards with their
        locations.
        """
        items: Items = {}
        paths: dict[str, TreePath] = {}
        names: dict[str, list[str]] = {}
        for key, path, value in values:
            if key in items:
                raise UnsupportedState(
                    "name-unsupported",
                    f"two values would have the key {key}, because torch.distributed.checkpoint "
                    "turns all keys into text",
                    hint="choose --to gathered or --to universal, which keep all keys",
                )
            paths[key], items[key] = path, None
            if isinstance(value, Scalar):
                items[key] = TensorItem(TORCH_NAMES[value.dtype], value.shape, (_whole(value),))
            elif (tensor := self._tensor_of(value)) is not None:
                items[key] = self._cut(tensor).item
            if not isinstance(value, BlankTensor) and (inside := list(tensor_names(value))):
                names[key] = inside
        if self.rest and (inside := list(tensor_names(rest_values(self.source, self.dicts)))):
            names[self.rest] = inside
        record = {
            **self.dicts.unsaid(),
            "names": names,
            "numbers": list(self.dicts.numbers),  # the optimizer's parameters, in its order
        }
        locations = [(each.key, each.location) for each in saved]
        return metadata(items, paths, locations, zckpt=record)


def _whole(number: Scalar) -> ItemBox:
    """The only shard of a number: a 0-d tensor, or one of a single element."""
    return ItemBox((0,) * len(number.shape), number.shape)


def _box(shape: tuple[int, ...], start: int, rows: int) -> ItemBox:
    """The shard with rows [start, start + rows) of a tensor; a 0-d tensor is one shard."""
    sizes = shape and (min(rows, shape[0] - start), *shape[1:])
    return ItemBox(shape and (start, *(0 for _ in shape[1:])), sizes)


def seal(root: Folder, manifest: Manifest, outcome: Any) -> None:
    """Writes the CRC-32 of every tensor's bytes into the zip directories of the target's files.

    `outcome` has the checksums that were computed while the bytes were copied.
    """
    crcs = crcs_of(outcome)
    for table in manifest.files.laid.values():
        seal_items(root, table, crcs)
    seal_rest(root, manifest, outcome)
