"""The tensors of a manifest (parameters, buffers, replicas), and where their bytes are in files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from math import prod
from typing import Any

from msgspec.structs import replace

from ...core.checkpoint.dtypes import SIZES
from ...core.checkpoint.entries import Entry, Key
from ...core.checkpoint.inert import inside, map_values
from ...core.checkpoint.manifest import Parameter
from ...core.checkpoint.optimizer_states import OF_OTHERS, StateRow, of_parameters
from ...core.storage.fragments import Fragments, Runs, Slices
from ...errors import CorruptCheckpoint, InconsistentCheckpoint
from ...files.torchfile import Tensor, TorchFile
from .states import EngineStates, FlatBuffer


class ManifestTensors:
    """Collects the tensors of a manifest from opened files.

    entries      where each tensor is in files, by (name, kind): ("fc.weight", "exp_avg")
    replicas     further copies of these tensors
    parameters   trained and frozen parameters by name
    numbers      optimizer states that are a single number
    """

    def __init__(self, ranks: EngineStates) -> None:
        self.ranks = ranks
        self.module: Mapping[str, Any] = ranks.module
        self.entries: dict[Key, Entry] = {}
        self.replicas: list[Entry] = []
        self.parameters: dict[str, Parameter] = {}
        self.numbers: list[StateRow] = []
        self.buffer_names = tuple(
            name for name in ranks.buffer_names if isinstance(self.module.get(name), Tensor)
        )

    def enter(
        self, name: str, slot: str, dtype: str, shape: tuple[int, ...], fragments: Fragments
    ) -> None:
        self.entries[name, slot] = Entry(name, slot, dtype, shape, fragments)

    def add_trainable(self, buffer: FlatBuffer) -> None:
        """Adds the parameters of one flat buffer, in the user's order.

        Their 16-bit weights come from the module. In stage 3 no 16-bit weights are added, because
        the module has only placeholders (of one element each before 0.6).
        """
        for name, shape in buffer.shapes.items():
            if name in self.parameters:
                raise CorruptCheckpoint(
                    "file-damaged",
                    f"{self.ranks.models[0].path} lists {name!r} twice",
                    file=self.ranks.models[0].path,
                    subject=name,
                )
            self.parameters[name] = Parameter(shape, group=buffer.group, step=buffer.step)
            self.numbers += of_parameters("number", {name: buffer.scalars})
            if not self.ranks.partitioned:  # stage 3 leaves placeholders
                self._add_weight(name, shape)
            for slot in buffer.slots:
                self.enter(name, slot.name, slot.dtype, shape, slot.fragments[name])
        for slot in buffer.slots:
            for name, fragments in slot.copies:
                self.replicas.append(replace(self.entries[name, slot.name], fragments=fragments))

    def _add_weight(self, name: str, shape: tuple[int, ...]) -> None:
        tensor = self.module.get(name)
        if not isinstance(tensor, Tensor):
            return
        file = self.ranks.file_of(name)
        if tensor.shape != shape:
            raise InconsistentCheckpoint(
                "ranks-disagree",
                f"{file.path}: {name} has shape {tensor.shape} in the module, but {shape} in the "
                "engine's list of parameters",
                file=file.path,
                subject=name,
            )
        self.enter(name, "param", tensor.dtype, shape, file.fragments(tensor))

    def add_frozen(self) -> list[str]:
        """Adds the frozen parameters; returns the names of parameters whose values are lost.

        In stage 1 (and before 0.9.1 in stage 2), frozen parameters are only in the module. In stage
        3 each rank has a slice of them; before 0.9.1, stage 3 did not save them.
        """
        shapes = self.ranks.frozen_shapes or {}
        fragments = [file.value.get("frozen_param_fragments") or {} for file in self.ranks.models]
        apart = {*self.parameters, *self.buffer_names, *self.owners}
        lost = []
        for name, value in self.module.items():
            if name in apart or not isinstance(value, Tensor) or is_extra(name, value):
                continue
            shape = tuple(shapes.get(name, value.shape))
            tensors = [rank.get(name) for rank in fragments]
            if self.ranks.partitioned and not all(isinstance(each, Tensor) for each in tensors):
                lost.append(name)
                continue
            self.parameters[name] = Parameter(shape, trainable=False)
            if self.ranks.partitioned:
                self._add_frozen_slices(name, shape, tensors)
            else:
                self._add_weight(name, shape)
        return lost

    def _add_frozen_slices(self, name: str, shape: tuple[int, ...], tensors: Sequence[Any]) -> None:
        """Adds a frozen parameter of stage 3, which is cut over all ranks.

        A parameter that stage 3 does not manage is complete on every rank; the further ranks'
        tensors are added as copies.
        """
        if tensors[0].shape == shape and tensors[0].numel != -(-prod(shape) // self.ranks.dp):
            self.enter(
                name, "param", tensors[0].dtype, shape, self.ranks.models[0].fragments(tensors[0])
            )
            for file, tensor in zip(self.ranks.models[1:], tensors[1:], strict=True):
                self._add_replica(name, "param", tensor, file)
            return
        numel, size = prod(shape), SIZES[tensors[0].dtype]
        if any(tensor.numel * self.ranks.dp < numel for tensor in tensors):
            raise CorruptCheckpoint(
                "file-damaged",
                f"{self.ranks.directory.path}: the ranks' slices of the frozen parameter {name} "
                "have too few elements",
                file=self.ranks.directory.path,
                subject=name,
            )
        pairs = zip(self.ranks.models, tensors, strict=True)
        flats = tuple(file.extent(tensor) for file, tensor in pairs)
        fragments = Slices(flats, 0, numel, size) if numel else Runs([])
        self.enter(name, "param", tensors[0].dtype, shape, fragments)

    def add_buffers(self) -> list[str]:
        """Adds the persistent buffers of the module, as rank 0 has them.

        Returns the names of buffers that differ between ranks.
        """
        differing = []
        for name in self.buffer_names:
            self._add_weight(name, self.module[name].shape)
            checksums = {self.ranks.file_of(name).crc(self.module[name])}
            for file in self.ranks.models[1:]:
                tensor = file.value["module"].get(name)
                if isinstance(tensor, Tensor):
                    checksums.add(file.crc(tensor))
                    self._add_replica(name, "param", tensor, file)
            if len(checksums) > 1:
                differing.append(name)
        return differing

    def _add_replica(self, name: str, slot: str, tensor: Tensor, file: TorchFile) -> None:
        entry = self.entries[name, slot]
        if (entry.dtype, entry.shape) == (tensor.dtype, tensor.shape):
            self.replicas.append(replace(entry, fragments=file.fragments(tensor)))

    def add_state_replicas(self, values: Mapping[str, Any], files: Sequence[TorchFile]) -> None:
        """Adds tensors that are no parameters, from further ranks' files, as copies of rank 0's.

        `values` is the content of all `files`, whose pickles are equal. Call it only after `kept`
        has added rank 0's tensors.
        """
        for path, value in values.items():
            self._add_state_replica(value, path, files)

    def _add_state_replica(self, value: Any, path: str, files: Sequence[TorchFile]) -> Any:
        if isinstance(value, Tensor) and (path, "state") in self.entries:
            for file in files:
                self._add_replica(path, "state", value, file)
        return map_values(
            value, lambda item, key: self._add_state_replica(item, inside(path, key), files)
        )

    @cached_property
    def owners(self) -> dict[str, str]:
        """Maps second names of tied weights to first names, as files state or by shared storage.

        Files state second names since 0.9.0. Call this only after all trainable parameters have
        been added.
        """
        pairs_of_names = self.ranks.second_names.items()
        owners = {name: owner for name, owner in pairs_of_names if name not in self.parameters}
        seen: dict[Any, str] = {}
        for name, value in self.module.items():
            # stage 3's placeholders are empty, but the two names of a tied weight share one
            shows = isinstance(value, Tensor) and (self.ranks.partitioned or value.numel)
            if shows and name not in owners:
                place = (self.ranks.file_of(name).path, value.place, value.shape, value.strides)
                first = seen.setdefault(place, name)
                if first != name and name not in self.parameters:
                    owners[name] = first
        return owners

    def add_aliases(self) -> list[str]:
        """Records second names of tied weights; returns second names whose weight was not saved.

        `exclude_frozen_parameters` leaves out a frozen weight under its first name, but not under
        its second one (0.19.8).
        """
        alone = []
        for alias, owner in self.owners.items():
            if owner in self.parameters:
                parameter = self.parameters[owner]
                self.parameters[owner] = replace(parameter, aliases=(*parameter.aliases, alias))
                self._add_own_copy(alias, owner)
            elif isinstance(self.module.get(alias), Tensor):
                alone.append(alias)
        return alone

    def _add_own_copy(self, alias: str, owner: str) -> None:
        """If a tied weight was saved under both names, adds the second name's bytes as a copy."""
        copy, first = self.module.get(alias), self.module.get(owner)
        has_weight = (owner, "param") in self.entries
        if not (
            has_weight and isinstance(copy, Tensor) and isinstance(first, Tensor) and copy.numel
        ):
            return
        if copy.place != first.place:
            self._add_replica(owner, "param", copy, self.ranks.file_of(alias))

    def other_rows(self, buffers: Iterable[FlatBuffer]) -> list[StateRow]:
        """Records of optimizer states that are neither a number nor of their parameter's shape."""
        values = {next(iter(each.shapes)): each.other for each in buffers if each.other}
        if not values:
            return []
        return of_parameters("other", self.kept(values, OF_OTHERS, self.ranks.optimizers[0]))

    def kept(self, value: Any, path: str, file: TorchFile) -> Any:
        """Converts a value of a file to a value for the manifest's `state`; registers its tensors.

        Each tensor is added to `entries` under the key (name, "state"), and the name replaces the
        tensor in the value. Each 0-d tensor becomes a number. `path` is the beginning of the names:
        "client_state.rng".
        """
        return file.kept(value, path, self.entries)

    def hyper(self, value: Any, path: str, file: TorchFile) -> Any:
        """A group's hyper-parameter for the manifest; a tensor of one element becomes a number.

        Prodigy keeps some hyper-parameters as such tensors. As numbers, the ranks' values can be
        compared without reading tensors' bytes, even in a target whose tensors are not copied yet.
        """
        return self.kept(file.number(value), path, file)


def is_extra(name: str, value: Any) -> bool:
    """Whether a value in a module's state dict comes from `get_extra_state`.

    Such a value is neither a parameter nor a buffer.
    """
    return not isinstance(value, Tensor) or name.endswith("_extra_state")
