"""Writes any manifest as complete state dicts that plain torch and trainers load.

    model.pt    for model.load_state_dict: all names; tied weights are stored once
    optim.pt    for optimizer.load_state_dict: numbers, groups complete for torch 2.13
    extra.pt    the scheduler, the program's own state, and under `zckpt` facts that state dicts
                lack: which names are aliases, frozen, buffers

The files are laid out without tensors' bytes, which the copy fills in. Groups have the key
`param_names` with the names of the numbered parameters; torch >= 2.6 writes this key for named
parameters too, and ignores it when it loads. With the dialect `safetensors` the model's state dict
is a safetensors file, with one name for a tied weight, as safetensors requires. Trainers look for
files with other names:

    safetensors, from a Trainer's directory    model.safetensors (adapter_model.safetensors with
                                               PEFT), optimizer.pt, scheduler.pt
    safetensors, from Accelerate's             model.safetensors, optimizer.bin, scheduler.bin
    accelerate                                 pytorch_model_fsdp.bin, optimizer.bin: FSDP's full
                                               state dicts, if the optimizer uses names

A source that is a single file becomes a single file again, with the same name and keys, and with
the key `zckpt` added. A source of Lightning also becomes a single file, which Lightning loads.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from ...core.checkpoint.inert import Scalar, TensorName, map_values
from ...core.checkpoint.manifest import Manifest
from ...core.passes.layout import Layout, Shell
from ...core.storage.filenames import numbered
from ...core.storage.folder import Folder
from ...errors import listed, literal, note, warning
from ...files import safefile
from ...files.torchshell import Storages, seal_records, shell
from ...naming import peft
from ...training import lightning, trainers
from ...training.lightning import Keys
from ...training.options import DIALECT, DP, Options
from ...training.trainers import ACCELERATE, TRANSFORMERS, program_of
from ..statedict.keys import OPTIMIZER, keys_of, trainers_dialect
from ..statedict.tree import TreePath, dotted
from ..statedict.write import BlankTensor, StateDicts, omitted
from .read import STATED

Make = Callable[[BlankTensor], Any]
"""A function that makes a tensor of a file from its type and shape (`BlankTensor`)."""


class FileNames(Struct, frozen=True):
    """The names that a program gives to the files of one checkpoint.

    scheduler    the file of the scheduler's state; None if this state is in `extra`
    by_name      whether the optimizer uses parameter names instead of numbers
    keys         the keys of both state dicts, if they are in one file
    extra        zckpt's file for everything else
    """

    weights: str
    optimizer: str
    scheduler: str | None = None
    by_name: bool = False
    keys: Keys | None = None
    extra: str = "extra.pt"

    def of_model(self, number: int) -> FileNames:
        """The files' names for model `number`: model 1 has `optimizer_1.bin`, model 0 no number."""
        return replace(
            self,
            weights=numbered(self.weights, number),
            optimizer=numbered(self.optimizer, number),
            scheduler=self.scheduler and numbered(self.scheduler, number),
            extra=numbered(self.extra, number),
        )

    @property
    def is_safetensors(self) -> bool:
        return self.weights.endswith(".safetensors")


PLAIN = {
    None: FileNames("model.pt", "optim.pt"),
    "safetensors": FileNames("model.safetensors", "optim.pt"),
    "accelerate": FileNames("pytorch_model_fsdp.bin", "optimizer.bin", by_name=True),
}
OF_TRAINERS = {
    TRANSFORMERS: FileNames("model.safetensors", "optimizer.pt", "scheduler.pt"),
    ACCELERATE: FileNames("model.safetensors", "optimizer.bin", "scheduler.bin"),
}


def has_models(source: Manifest, options: Options) -> bool:
    """Whether the target can store several models: only Accelerate's numbered files can."""
    return options[DP] is None and file_names(source, options).optimizer == "optimizer.bin"


def file_names(source: Manifest, options: Options) -> FileNames:
    """Chooses the names of the target's files.

    They depend on `--dialect` (the program that loads the files) and on the trainer's files beside
    the source. Without `--dialect`, a `gathered` source keeps its dialect. Without `--dialect` and
    `--weights-only`, a source that is one file, or that Lightning saved, becomes one file.
    """
    engine = keys_of(source.run.engine)
    if options[DIALECT] is None and not options.weights_only:
        keys = None
        if lightning.is_in(source):
            keys = lightning.WHOLE.numbered_as(engine.optimizer)
        if engine.whole and engine.file is not None:
            keys = Keys(engine.model, engine.optimizer or OPTIMIZER, engine.file)
        if keys is not None:
            by_name = engine.whole and engine.layout == "nested"
            return FileNames(keys.file, keys.file, by_name=by_name, keys=keys)
    dialect = options[DIALECT] or (engine.dialect if engine.dialect in PLAIN else None)
    program = program_of(source.files.siblings)
    names = PLAIN[dialect]
    if program is None:
        return names
    of_trainer = OF_TRAINERS[program]
    if dialect == "accelerate":
        return replace(names, scheduler=of_trainer.scheduler)
    if dialect != "safetensors":
        return names
    if program == TRANSFORMERS and any(map(peft.is_adapters, source.parameters)):
        return replace(of_trainer, weights=peft.WEIGHTS[0])
    return of_trainer


def lay_out(source: Manifest, options: Options, number: int = 0) -> Layout:
    """Lays out the files of the target, and lists what it cannot store.

    `number` is the model's number if there are several models. Raises WrongOption and MissingData
    before anything is written.
    """
    writer = StateDictWriter(source, options, number)
    own_names = {shell.name for shell in writer.shells()}
    # a trainer's own files are replaced; any other file with such a name is lost
    replaced = own_names - {writer.file_names.extra} if program_of(source.files.siblings) else ()
    siblings = [(item.name, item) for item in source.files.siblings if item.name not in own_names]
    writer.omitted += [
        note("file-omitted", f"{item.name}: another target file has this name", file=item.path)
        for item in source.files.siblings
        if item.name in own_names and item.name not in replaced
    ]
    names_of_files = writer.file_names
    optimizer = [names_of_files.optimizer] * writer.optimizes
    names = " and ".join(dict.fromkeys([names_of_files.weights, *optimizer]))
    about = f"full state dicts, which any number of ranks can load: {names}"

    def loading(path: str) -> str:
        file = literal(os.path.join(path, names_of_files.weights))
        if names_of_files.keys is not None:
            return f"torch.load({file})"
        if names_of_files.is_safetensors:  # safetensors have a tied weight once
            return f"safetensors.torch.load_model(model, {file})"
        return f"model.load_state_dict(torch.load({file}))"

    of_trainer = writer.optimizes and names_of_files.scheduler is not None
    resuming = trainers.resuming(source.files.siblings, loading) if of_trainer else loading
    if names_of_files.keys is not None:
        resuming = lightning.resuming(source, loading, names_of_files.weights)
    return Layout(
        writer.shells,
        siblings,
        writer.omitted,
        writer.warnings,
        from_masters=True,
        about=about,
        loading=resuming,
        in_one_file=names_of_files.keys is not None,
    )


class StateDictWriter(StateDicts):
    """Decides the target's files and their content before the first byte is written."""

    def __init__(self, source: Manifest, options: Options, number: int = 0) -> None:
        super().__init__(source, options, "gathered")
        self.file_names = file_names(source, options).of_model(number)
        self.omitted += omitted(source, options)
        if self.file_names.weights in peft.WEIGHTS:
            self.save_adapter_alone()
        self.weights = self._model_state()
        if self.file_names.is_safetensors:
            self._check_safetensors()
        self.files: dict[str, Any] = {}
        if self.file_names.keys is not None:
            self.files[self.file_names.weights] = self._everything(self.file_names.keys)
            return
        if not self.file_names.is_safetensors:
            self.files[self.file_names.weights] = self.weights
        if self.optimizes:
            self.files[self.file_names.optimizer] = self._optimizer_state()
        if not options.weights_only:
            self._add_scheduler()
            extra, name = self._extra(("model", "optim", STATED)), self.file_names.extra
            self.files[name] = {
                **extra,
                STATED: self._own_facts([*self.files.items(), (name, extra)]),
            }
        self._warn_of_names()

    def shells(self) -> Iterator[Shell]:
        """Yields every file, without the tensors' bytes."""
        if self.file_names.is_safetensors:
            weights = [
                (n, each) for n, each in self.weights.items() if isinstance(each, BlankTensor)
            ]
            first = {id(blank): (name, blank) for name, blank in reversed(weights)}
            tensors = [(name, blank.dtype, blank.shape) for name, blank in reversed(first.values())]
            yield safefile.shell(self.file_names.weights, tensors)
        for name, value in self.files.items():
            storages = Storages()
            yield shell(name, self.with_tensors(value, storages, {}), storages)

    # -- the content of the files, with blank tensors

    def _model_state(self) -> OrderedDict[str, Any]:
        """The module's state dict, with a `BlankTensor` (type and shape only) for each tensor.

        All names of a tied weight share one `BlankTensor`.
        """
        owners: dict[str, Any] = {}
        state = OrderedDict(
            (name, owners.setdefault(self.aliases.get(name, name), value))
            for name, value in self.weights_as_saved()
        )
        metadata = self.source.state.get("module_metadata")
        if metadata is not None:
            state._metadata = metadata  # type: ignore[attr-defined]
        return state

    def _add_scheduler(self) -> None:
        """Adds a file of the scheduler's state if the trainer reads one and the source lacks it."""
        name, step = self.file_names.scheduler, self.source.step
        known_names = {item.name for item in self.source.files.siblings}
        if name is None or known_names.intersection((name, *trainers.SCHEDULERS)):
            return
        state = self.source.state.get("lr_scheduler")
        if state is None or "last_epoch" not in state:
            if step is None:
                return
            state = trainers.fresh_scheduler(int(step), self.groups)
            message = (
                f"{name}: the source has no state of a torch scheduler; zckpt writes one at step "
                f"{step} with the groups' learning rates"
            )
            self.warnings.append(warning("value-assumed", message, subject="lr_scheduler"))
        self.files[name] = state

    def _warn_of_names(self) -> None:
        program, names = program_of(self.source.files.siblings), self.file_names
        if program is None or names.scheduler is not None or not self.optimizes:
            return
        own_dialect = trainers_dialect(self.source.run.engine)
        dialects = (
            [own_dialect] if own_dialect in PLAIN and own_dialect else ["safetensors", "accelerate"]
        )
        self.warnings.append(trainers.not_loaded(names.optimizer, dialects))

    def _check_safetensors(self) -> None:
        lost = [name for name, w in self.weights.items() if not isinstance(w, BlankTensor)]
        self.omitted += [
            note(
                "state-omitted",
                f"{name}: not a tensor, and safetensors files store only tensors",
                subject=name,
            )
            for name in lost
        ]
        tied = [name for name in self.weights if name in self.aliases]
        if tied:
            message = (
                f"{self.file_names.weights} stores a tied weight once, without its second name "
                f"({listed(tied, 4)}): load it with safetensors.torch.load_model, or with "
                "strict=False"
            )
            self.warnings.append(warning("name-omitted", message, subject=tied[0]))

    def _optimizer_state(self) -> dict[str, Any]:
        members = [self.members(place) for place in range(len(self.groups))]
        states, numbers = dict(self._states()), self.source.states.numbers("among")
        own_members: list[dict[str, Any]]
        if self.file_names.by_name:
            state, own_members = numbers | states, [{"params": names} for names in members]
        else:
            ids = self.numbers
            numbered = {ids[name]: each for name, each in states.items() if name in ids}
            state = dict(sorted(numbered.items())) | numbers
            own_members = [
                {"param_names": names, "params": [ids[n] for n in names]} for names in members
            ]
        groups = [{**group, **each} for group, each in zip(self.groups, own_members, strict=True)]
        return {**self.source.states.numbers("beside"), "state": state, "param_groups": groups}

    def _everything(self, keys: Keys) -> dict[Any, Any]:
        """The content of a single file: the program's own values, and the state dicts.

        `keys` states under which keys the model's and the optimizer's state dicts are put.
        """
        tree = self._extra((STATED,))
        state_dicts: dict[TreePath, Any] = {keys.model: self.weights}
        if self.optimizes:
            state_dicts[keys.optimizer] = self._optimizer_state()
        for path, value in state_dicts.items():
            if _put_at(tree, path, value) is not None:
                message = f"client_state {dotted(path)}: the target has a state dict under this key"
                self.omitted.append(note("state-omitted", message, subject=dotted(path)))
        record = self._own_facts([(keys.file, tree)])
        return {**tree, STATED: {**record, "model": list(keys.model)}}

    def _extra(self, taken: Sequence[str]) -> dict[Any, Any]:
        """The content of extra.pt: the scheduler's state and the program's own values.

        The target needs the keys in `taken` for other contents. The program's values under these
        keys, and under the scheduler's key, are left out and noted in `omitted`.
        """
        source = self.source
        extra: dict[Any, Any] = {}
        if source.state.get("lr_scheduler") is not None and self.file_names.scheduler is None:
            extra[self.scheduler] = source.state["lr_scheduler"]
        for key, value in (source.state.get("client_state") or {}).items():
            if key in (*taken, *extra):
                message = f"client_state {key!r}: the target has another value under this key"
                self.omitted.append(note("state-omitted", message, subject=str(key)))
            else:
                extra[key] = value
        return extra

    def _own_facts(self, files: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        """The facts that zckpt adds to a file: aliases, frozen weights, buffers, tensors' names.

        `files` are pairs of a file's name and the values in it.
        """
        names = {
            name: tensor_names
            for name, value in files
            if any(tensor_names := list(self._tensor_names(value)))
        }
        return {**self.unsaid(), "names": names}

    def _tensor_names(self, value: Any) -> Iterator[str]:
        """Yields the manifest's name of each tensor in a file's values, in order; "" for a weight.

        Tensors of shape () are skipped.
        """
        if isinstance(value, (BlankTensor, Scalar)):
            yield from [""] if value.shape else []
        elif isinstance(value, TensorName):
            yield from [value.name] if self.source.entries[value.name, "state"].shape else []
        names: list[str] = []
        map_values(value, lambda item, _: names.extend(self._tensor_names(item)))
        yield from names

    def with_tensors(
        self, value: Any, storages: Storages, made: dict[int, Any], make: Make | None = None
    ) -> Any:
        """Replaces the stand-ins for tensors in a nested value by tensors without bytes.

        Stand-ins are `BlankTensor`, `Scalar` and `TensorName`. `storages` collects the new tensors.
        `made` caches them by the `id()` of a `BlankTensor`, so a repeated one becomes one tensor.
        `make` creates a tensor from a `BlankTensor`; without it, the tensor is full.
        """
        if isinstance(value, Scalar):
            return storages.scalar(value)
        if isinstance(value, TensorName):
            entry = self.source.entries[value.name, "state"]
            return storages.tensor(entry.dtype, entry.shape)
        if isinstance(value, BlankTensor):
            if id(value) not in made:
                blank = make or (lambda each: storages.tensor(each.dtype, each.shape))
                made[id(value)] = blank(value)
            return made[id(value)]
        result = map_values(value, lambda item, _: self.with_tensors(item, storages, made, make))
        if hasattr(value, "_metadata"):
            result._metadata = value._metadata
        return result


def _put_at(tree: dict[Any, Any], path: TreePath, value: Any) -> Any:
    """Puts a value at a path of nested values and returns the previous value at this path.

    A path is a tuple of keys; an integer key is an index in a list.
    """
    container: Any = tree
    earlier_value: Any = None
    for key, following in pairwise((*path, None)):
        if isinstance(container, list):
            container += [None] * (key + 1 - len(container))
        earlier_value = container[key] if isinstance(container, list) else container.get(key)
        kind = list if type(following) is int else dict
        # the source's containers are copied, not changed
        item = kind(earlier_value) if isinstance(earlier_value, kind) else kind()
        container[key] = value if following is None else item
        container = item
    return earlier_value


def seal(root: Folder, manifest: Manifest, outcome: Any) -> None:
    """Writes the CRC-32 of every tensor's bytes into the zip directories of torch.save files.

    `outcome` has the checksums that were computed while the bytes were copied. Safetensors files
    have no checksums.
    """
    zips = [
        item for item in manifest.files.records if not item.extent.file.endswith(".safetensors")
    ]
    seal_records(root, manifest.replace(records=tuple(zips)), outcome)
