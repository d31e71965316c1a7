"""Reads a torch.distributed.checkpoint checkpoint: all values as one tree, then as a manifest."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache, partial
from math import prod
from typing import Any

from msgspec.structs import replace

from ...core.checkpoint.inert import PLAIN, Scalar, nested
from ...core.checkpoint.manifest import Manifest
from ...core.checkpoint.origin import Origin
from ...core.storage import sources
from ...core.storage.fileio import crc_of
from ...core.storage.fragments import Fragments, Record, solid
from ...core.storage.sequences import Made
from ...errors import (
    MALFORMED,
    CorruptCheckpoint,
    MissingData,
    NotACheckpoint,
    UnsupportedCheckpoint,
    ZckptError,
    listed,
    not_understood,
    note,
    warning,
)
from ...files.dcpfile import VERSION, read_table
from ...files.dcpitems import ItemFiles, PlannedBoxes, described, require_same
from ...files.dcptable import METADATA, ItemBox, ItemLocation, ItemTable, TensorItem
from ...files.torchfile import Tensor, TorchFile
from ...files.torchtensors import class_of
from ...training.steps import step_of
from ...training.trainers import beside, inside, once_more
from ..reading import USUAL, Reading
from ..statedict.keys import ADAPTER, RANKS, own_key
from ..statedict.own_facts import checked
from ..statedict.read import manifest
from ..statedict.state_dict_search import is_extra
from ..statedict.tree import (
    MAX_LIST,
    Difference,
    InPieces,
    Leaf,
    LeafPart,
    SavedTree,
    StepStatement,
    TensorPiece,
    TreePath,
    assembled,
    assembled_rows,
    dotted,
    leads_to_step,
    leaves,
    missing_number,
    no_twin,
    number_of,
    piece_of,
    put,
    solid_piece,
    twin_of,
    whole_piece,
)
from ..statedict.weights import weights_of
from ..weights_alone import is_of_files, weights_or_raise
from . import hf
from .files import (
    MODEL,
    adapter_of,
    has_items,
    is_of_optimizer,
    is_pair,
    locate,
    missing,
    own_files,
    place_in,
    whole_of,
)
from .rest import read_rest

FIELDS = {"planner_data", "storage_meta", "version", "zckpt"}  # these describe no item


def read(path: str, reading: Reading = USUAL) -> Manifest:
    """Reads a directory of torch.distributed.checkpoint, or a trainer's directory with one in it.

    Raises NotACheckpoint, IncompleteCheckpoint (no `.metadata`, a missing file or element),
    InconsistentCheckpoint, CorruptCheckpoint, UnsupportedCheckpoint (Megatron-Core, compressed or
    encrypted files).
    """
    root, parts = locate(path, reading.tag)
    try:
        return _read(path, root, parts, reading)
    except ZckptError as error:
        rest = [folder for folder in parts if not is_of_optimizer(folder)]
        lost = {*parts} - {*rest}
        if not rest or not is_of_files(
            error, lambda file: not lost.isdisjoint(_path_and_parent(file))
        ):
            raise
        return weights_or_raise(error, partial(_read, path, root, rest), path, reading)


def _path_and_parent(path: str) -> tuple[str, str]:
    """Returns a path and its parent, because an error may name a lost folder or a file in it."""
    return path, os.path.dirname(path)


def _read(path: str, root: str, parts: list[str], reading: Reading) -> Manifest:
    shards = hf.files(root) if sources.is_folder(root) and not parts else []
    if not parts and not shards:
        raise NotACheckpoint("unfinished-save", f"{root} has no {METADATA}", file=root)
    saved = SavedTree(root, Origin("dcp"), {})
    try:
        if parts and parts != [root]:
            saved.layout.folders = [os.path.basename(folder) for folder in parts]
            saved.warnings += missing(parts)
        for folder in parts:
            if has_items(folder):
                # the names that zckpt stated are those of one model
                is_one = reading.root is not None or all(place_in(f, ("",)) == ("",) for f in parts)
                _FolderReader(folder, saved, reading).read(is_one)
            else:
                saved.tree[own_key(folder)] = _weights(folder, saved)
        if saved.layout.storage == RANKS:
            hf.require_last(parts[0], saved.tree[own_key(parts[0])], saved)
        models = [key for key in saved.tree if str(key).partition("_")[0] == "model"]
        if saved.layout.folders and len(models) > 1:
            saved.layout.models = models
            saved.facts.pop(None, None)  # each model has its own facts
        if shards:
            saved.layout.storage = RANKS
            weights = hf.read(shards, saved)
            hf.require_last(root, weights, saved)
            saved.tree |= hf.state_dicts(weights)
        rest = read_rest(root, saved) if root in parts else ()
        engine_files = [*parts, *shards, *own_files(root, parts), *rest]
        lists = [beside(root, engine_files, path)]
        if is_pair(saved.layout.folders):
            for folder in parts:
                files = {*saved.files.paths, *own_files(folder, [folder])}
                lists.append(inside(root, os.path.basename(folder), files, path))
        for folder in dict.fromkeys((root, *parts)):
            saved.files.omitted_files += once_more(folder, path)
        for siblings, omitted in lists:
            saved.files.siblings += siblings
            saved.omitted += omitted
        return manifest(saved, reading)
    except MissingData as error:
        if whole := whole_of(root):
            hint = f"give {whole}, which has the model and the optimizer"
            raise error.again(code="other-folder-needed", hint=hint) from error
        raise
    except MALFORMED as error:
        raise not_understood(root, error) from error


def _weights(folder: str, saved: SavedTree) -> dict[str, Leaf]:
    """Reads the weights of a folder without .distcp files, and adds its files to `saved`.

    The files are safetensors shards of torch's HuggingFaceStorageWriter, or PEFT's file of an
    adapter.
    """
    if shards := hf.files(folder):
        saved.layout.storage = RANKS
        return hf.read(shards, saved)
    saved.layout.storage = ADAPTER
    weights, records = weights_of(adapter_of(folder))
    saved.files.records += records
    saved.files.paths.append(adapter_of(folder))
    return weights


class _FolderReader:
    """Reads every key of one folder into the checkpoint's nested dictionaries, `saved.tree`."""

    def __init__(self, folder: str, saved: SavedTree, reading: Reading) -> None:
        self.saved = saved
        self.by_checksums = reading.by_checksums
        self.table: ItemTable = read_table(folder, reading.laid)
        self.files = ItemFiles(plans=not reading.opens_items, is_laid=reading.laid)
        if reading.laid:
            saved.files.laid[folder] = self.table
        self.names: Mapping[str, list[str]] = {}
        self.items_in = {path: len(items) for path, items in self.table.by_file()}

    def read(self, with_names: bool) -> None:
        """Reads every key of the folder into the tree, in the order of the saved state dict.

        With `with_names`, tensors get the names that zckpt stated in `.metadata`. Raises
        UnsupportedCheckpoint if `.metadata` does not state the keys' paths in the state dict.
        """
        table, saved = self.table, self.saved
        paths, planned = table.paths, table.others["planner_data"]
        if not isinstance(planned, (dict, type(None))):
            raise UnsupportedCheckpoint(
                "storage-unsupported",
                f"{os.path.join(table.folder, METADATA)} has a {type(planned).__name__} as "
                "planner_data; zckpt expected a dictionary of the keys' paths in the state dict",
                hint="save with torch's DefaultSavePlanner",
                file=os.path.join(table.folder, METADATA),
            )
        if not saved.origin.version:
            saved.origin = replace(saved.origin, version=table.others.get("version"))
        saved.files.paths += table.files
        record = checked(table.others.get("zckpt"), os.path.join(table.folder, METADATA))
        if record is not None:
            saved.facts[None] = saved.facts[place_in(table.folder, (MODEL,))] = record
            self.names = record["names"] if with_names else {}
        room = MAX_LIST
        front = self._key_of_folder()
        in_order = [key for key in paths if key in table.items]
        for key in [*in_order, *(key for key in table.items if key not in paths)]:
            item = table.items[key]
            if item is None and sources.is_stand_in(table.location(key).file):
                continue  # a lost value is left out; a lost tensor keeps its place in the manifest
            value = self._value(key, item)
            path = (*front, *place_in(table.folder, paths.get(key) or (key,)))
            if leads_to_step(path):
                saved.ranks.steps += self._steps_in_files(key, path, value)
            if (
                is_pair(saved.layout.folders)
                and (earlier_value := nested(saved.tree, *path)) is not None
            ):
                if not _are_equal(value, earlier_value):
                    name = os.path.relpath(table.folder, saved.root)
                    message = (
                        f"{name}: {dotted(path)}, because zckpt uses the different value in "
                        f"{MODEL}/"
                    )
                    saved.omitted.append(note("state-omitted", message, subject=dotted(path)))
                continue
            room = put(saved.tree, path, value, room)
            if self.table.copies and item is not None:
                self._compare_copies(key, item, path)
        if self._is_mixed():  # mixed saves: an error, unless --step-policy accepts it
            saved.ranks.different.clear()
        saved.files.paths += sorted(self.files.sizes)
        self._add_warnings()

    def _key_of_folder(self) -> TreePath:
        """The key under which the folder's values are put in the tree: ("model/",), or () for none.

        A folder needs a key if it belongs to a pair, such as `model` and `optim`, and its top level
        is a state dict. In other folders, the training program's own keys name the state dicts.
        """
        if not is_pair(self.saved.layout.folders):
            return ()
        folder, items = self.table.folder, self.table.items
        paths = {key: self.table.paths.get(key) or (key,) for key in items}
        if os.path.basename(folder) == MODEL:  # a state dict's keys are parameter names
            tensors = [paths[key] for key, item in items.items() if item is not None]
            is_own = all(len(path) == 1 or is_extra(path[0]) for path in tensors)
        else:
            firsts = [str(path[0]) for path in paths.values()]
            is_own = any(first.partition(".")[0] == "param_groups" for first in firsts)
        return (own_key(folder),) if is_own else ()

    def _add_warnings(self) -> None:
        """Adds warnings about unused bytes and about unexpected values in `.metadata`."""
        table, saved = self.table, self.saved
        name = os.path.join(table.folder, METADATA)
        if table.unsaved:
            message = f"{name} lists {listed(table.unsaved, 4)}, but no rank saved a value for it"
            saved.warnings.append(warning("elements-missing", message, file=name))
        if unknown := [str(key)[:80] for key in table.others if key not in FIELDS]:
            message = f"{name} has fields that zckpt does not know: {listed(unknown)}"
            saved.warnings.append(warning("version-unsupported", message, file=name))
        version = table.others.get("version")
        if not isinstance(version, (str, type(None))):
            raise CorruptCheckpoint(
                "file-damaged",
                f"{name}: its version is a {type(version).__name__}, not a text",
                file=name,
            )
        if version not in (None, VERSION):
            message = f"{name} has the version {version[:80]!r}, but zckpt knows only {VERSION}"
            saved.warnings.append(warning("version-unsupported", message, file=name))
        unused = self.files.unused(table)
        saved.files.unused += unused
        saved.omitted += [
            note(
                "bytes-unknown",
                f"{os.path.relpath(extent.file, saved.root)}: {extent.length} bytes at "
                f"offset {extent.offset}, which belong to no saved value",
                file=extent.file,
            )
            for extent in unused[:8]
        ]

    def _value(self, key: str, item: TensorItem | None) -> Any:
        names = iter(self.names.get(key, ()))
        if item is not None:
            return self._tensor(key, item, names)
        file = self.files.torch_file(self.table.location(key))
        self.saved.files.records += file.records.values()
        return leaves(file, file.value, names)

    def _steps_in_files(self, key: str, path: TreePath, value: Any) -> Iterator[StepStatement]:
        """Yields the step in each file that has a replica of the step under `key`.

        A file whose only value is this one (single_file_per_rank=False) is skipped: it does not
        show to which save the other files belong.
        """
        item, box = self.table.items[key], None
        if item is not None:
            box = next((each for each in item.boxes if not each.is_empty), None)
            if box is None or prod(item.shape) != 1:
                return
        values = [(self.table.location(key, box), value)]
        for copy in self.table.copies.get((key, None if box is None else box.offsets), ()):
            values.append((copy, self._value_of_copy(key, copy)))
        for location, number in values:
            if self.items_in[location.file] > 1:
                yield StepStatement(path, (location.file,), number)

    def _is_mixed(self) -> bool:
        """Whether files of several saves are mixed: they state different steps under one key."""
        steps_by_path: dict[TreePath, set[Any]] = {}
        for item in self.saved.ranks.steps if self.saved.ranks.different else ():
            number = item.value.number() if isinstance(item.value, Leaf) else item.value
            steps_by_path.setdefault(item.path, set()).add(step_of(number))
        return any(len(steps - {None}) > 1 for steps in steps_by_path.values())

    def _compare_copies(self, key: str, item: TensorItem, path: TreePath) -> None:
        """Compares the replicas of a tensor in the files of several ranks.

        Adds the first difference to `saved.ranks.different`.
        """
        # with use_collectives=False, every rank saves its replica without asking the others
        for box in item.boxes:
            copies = self.table.copies.get((key, box.offsets), ())
            for copy in copies:
                first = self.table.location(key, box)
                equal, shapes = self._are_equal(key, first, copy)
                self.saved.ranks.uncompared += equal is None
                if equal is False:
                    files = (first.file, copy.file)
                    self.saved.ranks.different.append(Difference(path, files, shapes))
                    return

    def _are_equal(
        self, key: str, first: ItemLocation, copy: ItemLocation
    ) -> tuple[bool | None, tuple[tuple[int, ...], tuple[int, ...]] | None]:
        """Compares the values of two files under a key: (are equal, shapes of both).

        The first result is None if the bytes would have to be read, but `by_checksums` forbids it.
        The second is None unless both values are tensors.
        """
        stored = [self.files.stored(location, key) for location in (first, copy)]
        if stored[0] is not None and stored[1] is not None:
            a, b = stored[0], stored[1]
            if (a.dtype, a.shape) != (b.dtype, b.shape):
                return False, (a.shape, b.shape)
            # safetensors files have no checksums, so the bytes are read
            equal = None if self.by_checksums else crc_of([a.extent]) == crc_of([b.extent])
            return equal, (a.shape, b.shape)
        files = [self.files.torch_file(location) for location in (first, copy)]
        values = [file.value for file in files]
        equal = files[0].summary(values[0]) == files[1].summary(values[1])
        tensors = [value for value in values if isinstance(value, Tensor)]
        shapes = (tensors[0].shape, tensors[1].shape) if len(tensors) == 2 else None
        return equal, shapes

    def _value_of_copy(self, key: str, location: ItemLocation) -> Any:
        """The replica of a value that another rank saved; None for a tensor of several elements."""
        stored = self.files.stored(location, key)
        if stored is not None:
            return number_of(stored)() if prod(stored.shape) == 1 else None
        file = self.files.torch_file(location)
        return leaves(file, file.value)

    def _tensor(self, key: str, item: TensorItem, names: Iterator[str]) -> Any:
        """Joins a tensor's shards into one `Leaf`: its type, shape and byte ranges in files.

        A tensor of a special class, which only that class can interpret, is returned with its
        shards not joined. `names` yields the tensor's name in the manifest.
        """
        dtype, shape = item.dtype, item.shape
        if len(item.boxes) == 1:
            if (leaf := self._in_one_item(key, item, names)) is not None:
                return leaf
        elif (planned := self.files.planned_boxes(self.table, key, dtype)) is not None:
            return self._planned(key, item, planned, names)
        pieces: list[TensorPiece] = []
        parts: list[Callable[[], LeafPart]] = []
        number = _no_number
        inner: list[tuple[tuple[int, ...], Any]] = []
        kind = ""
        for box in item.boxes:
            if box.is_empty:
                continue
            location = self.table.location(key, box)
            lost = self.files.missing(location, key, dtype, box.sizes)
            if lost is not None:
                pieces.append(solid_piece(lost, box.offsets))
                number = missing_number
                continue
            record = self.files.planned(location, key, dtype, box.sizes)
            if record is not None:
                self.saved.files.records.append(record)
                pieces.append(whole_piece(record.extent, box.sizes, box.offsets))
                parts.append(partial(_planned_part, self.files, dtype, (box, record)))
                continue
            stored = self.files.stored(location, key)
            if stored is not None:
                require_same(location, key, (stored.dtype, stored.shape), (dtype, box.sizes))
                self.saved.files.records.append(Record(stored.extent, None))
                pieces.append(solid_piece(stored, box.offsets))
                number = number_of(stored)
                continue
            file = self.files.tensor_file(location, key, dtype, box.sizes)
            tensor = file.value
            if own_class := class_of(tensor):  # an object with inner tensors
                self.saved.files.records += file.records.values()
                kind = own_class
                inner.append((box.offsets, leaves(file, tensor, names)))
                continue
            require_same(location, key, described(file), (dtype, box.sizes))
            self.saved.files.records += file.records.values()
            pieces.append(piece_of(file, tensor, box.offsets))
            parts.append(partial(_part, box.offsets, tensor, file))
        if inner:
            return inner[0][1] if len(item.boxes) == 1 else InPieces(kind, inner)
        fragments = assembled(f"{key} in {self.table.folder}", dtype, shape, pieces)
        # every item has its own storage; safetensors have no checksums
        if parts and number is _no_number:
            number = partial(_number, parts[-1])
            number = cache(number) if prod(shape) == 1 else number
        twin = partial(_twin, dtype, shape, parts) if len(parts) == len(pieces) else no_twin
        sharded, name = len(item.boxes) > 1, next(names, None)
        cuts = frozenset(box.sizes for box in item.boxes) if sharded else frozenset()
        return Leaf(
            dtype, shape, fragments, number, find_twin=twin, sharded=sharded, name=name, parts=cuts
        )

    def _in_one_item(self, key: str, item: TensorItem, names: Iterator[str]) -> Leaf | None:
        """Makes the `Leaf` of a tensor that is a single shard, without opening its file.

        None for a tensor in several shards, and if the byte range cannot be computed without the
        file.
        """
        dtype, shape, (box,) = item.dtype, item.shape, item.boxes
        location = self.table.location(key, box) if box.sizes == shape else None
        if location is None or sources.is_stand_in(location.file):
            return None
        record = self.files.planned(location, key, dtype, shape)
        if record is None:
            return None
        self.saved.files.records.append(record)
        numel, part = prod(shape), partial(_planned_part, self.files, dtype, (box, record))
        number = partial(_number, part)
        return Leaf(
            dtype,
            shape,
            solid(numel, record.extent),
            cache(number) if numel == 1 else number,
            find_twin=partial(_twin, dtype, shape, [part]),
            sharded=False,
            name=next(names, None),
        )

    def _planned(
        self, key: str, item: TensorItem, planned: PlannedBoxes, names: Iterator[str]
    ) -> Leaf:
        """Makes the `Leaf` of a tensor from computed byte ranges of its shards; opens no file.

        `planned` has these byte ranges.
        """
        dtype, shape = item.dtype, item.shape
        self.saved.files.records.join(planned.records)
        fragments: Fragments | None = assembled_rows(shape, planned.boxes, planned.extents)
        if fragments is None:
            pieces = Made(_whole_piece, planned)
            fragments = assembled(f"{key} in {self.table.folder}", dtype, shape, pieces)
        parts = Made(partial(_planned_part, self.files, dtype), planned)
        return Leaf(
            dtype,
            shape,
            fragments,
            cache(partial(_number, partial(parts.__getitem__, -1))),
            find_twin=partial(twin_of, dtype, shape, parts),
            sharded=True,
            name=next(names, None),
            parts=frozenset(box.sizes for box in item.boxes),
        )


def _whole_piece(planned: tuple[ItemBox, Record]) -> TensorPiece:
    box, record = planned
    return whole_piece(record.extent, box.sizes, box.offsets)


def _planned_part(files: ItemFiles, dtype: str, planned: tuple[ItemBox, Record]) -> LeafPart:
    box, record = planned
    file = TorchFile.of(record, dtype, box.sizes, files.pread)
    return box.offsets, file.value, file


def _part(*part: Any) -> LeafPart:
    return part


def _twin(dtype: str, shape: tuple[int, ...], parts: Sequence[Callable[[], LeafPart]]) -> Any:
    return twin_of(dtype, shape, [part() for part in parts])


def _number(part: Callable[[], LeafPart]) -> Scalar:
    _, tensor, file = part()
    return file.scalar(tensor)


def _no_number() -> Any:
    raise CorruptCheckpoint("file-damaged", "a tensor that should have one number is empty")


def _are_equal(value: Any, earlier_value: Any) -> bool:
    values = [
        item.number() if isinstance(item, Leaf) and not item.shape else item
        for item in (value, earlier_value)
    ]
    return type(values[0]) in (*PLAIN, Scalar) and values[0] == values[1]
