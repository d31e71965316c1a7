"""Whole state dicts as files that plain torch and trainers load, from any manifest, as shells.

    model.pt    what model.load_state_dict takes: every name, tied weights in one memory, buffers
    optim.pt    what optimizer.load_state_dict takes: numbers, groups complete for torch 2.13
    extra.pt    the scheduler, the program's own state, and under `zckpt` what state dicts do not
                say: which names are tied, frozen, buffers

Groups have `param_names` as torch >= 2.6 keeps them of named parameters (loading does not go by
them): numbers have names again. With the dialect `safetensors` the model's state is one such file,
where tied weights stand once, as safetensors demands. Trainers look for files by other names:

    safetensors, from a Trainer's directory    model.safetensors (adapter_model.safetensors with
                                               PEFT), optimizer.pt, scheduler.pt
    safetensors, from Accelerate's             model.safetensors, optimizer.bin, scheduler.bin
    accelerate                                 pytorch_model_fsdp.bin, optimizer.bin: FSDP's whole
                                               state dicts, where the optimizer knows names
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ...core.inert import Scalar, TensorName, map_values
from ...core.manifest import Manifest
from ...core.staging import Layout, Shell
from ...files import safefile
from ...files.torchfile import Tensor
from ...files.torchshell import Storages, seal_records, shell
from ...training import peft, trainers
from ...training.options import Options
from ...training.trainers import ACCELERATE, TRANSFORMERS, program_of
from ..statedict.write import Hole, StateDicts, left_out

EXTRA = "extra.pt"
KNOWN = "zckpt"
"""The key of what only we say."""


@dataclass(frozen=True, slots=True)
class FileNames:
    """What a program calls its files; `by_name` where its optimizer knows parameters by name.

    Without a name for the scheduler it is in extra.pt.
    """

    weights: str
    optimizer: str
    scheduler: str | None = None
    by_name: bool = False

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


def file_names(source: Manifest, options: Options) -> FileNames:
    """The names of the target's files: those of `--dialect`, else of a source of the same kind."""
    engine = source.state.get("engine") or {}
    dialect = options.dialect or engine.get("dialect")
    program = program_of(source.siblings)
    made = PLAIN[dialect]
    if program is None:
        return made
    trainers = OF_TRAINERS[program]
    if dialect == "accelerate":
        return replace(made, scheduler=trainers.scheduler)
    if dialect != "safetensors":
        return made
    if program == TRANSFORMERS and any(map(peft.is_adapters, source.parameters)):
        return replace(trainers, weights=peft.WEIGHTS[0])
    return trainers


def lay_out(source: Manifest, options: Options) -> Layout:
    """The files of the target, and what it cannot take along.

    Raises WrongOption and MissingData before anything is written.
    """
    made = Target(source, options)
    own = {shell.name for shell in made.shells()}
    siblings = [(item.name, item) for item in source.siblings if item.name not in own]
    made.left_out += [
        f"{item.name}: a file of the target has this name"
        for item in source.siblings
        if item.name in own
    ]
    names = " and ".join([made.called.weights, *([made.called.optimizer] * made.optimizes)])
    about = f"whole state dicts, which any number of ranks loads: {names}"
    return Layout(
        made.shells, siblings, made.left_out, made.warnings, from_masters=True, about=about
    )


class Target(StateDicts):
    """What is decided before the first byte is written."""

    def __init__(self, source: Manifest, options: Options) -> None:
        super().__init__(source, options)
        self.called = file_names(source, options)
        self.left_out += left_out(source, options)
        if self.called.weights in peft.WEIGHTS:
            self.save_adapter_alone()
        self.weights = self._model_state()
        if self.called.is_safetensors:
            self._check_safetensors()
        self.files: dict[str, Any] = {}
        if not self.called.is_safetensors:
            self.files[self.called.weights] = self.weights
        if self.optimizes:
            self.files[self.called.optimizer] = self._optimizer_state()
        if not options.weights_only:
            self._add_scheduler()
            self.files[EXTRA] = self._extra()
        self._warn_of_names()

    def shells(self) -> Iterator[Shell]:
        """Every file."""
        if self.called.is_safetensors:
            first = {id(hole): (name, hole) for name, hole in reversed(self._holes())}
            tensors = [(name, hole.dtype, hole.shape) for name, hole in reversed(first.values())]
            head, size = safefile.header(tensors)
            yield Shell(self.called.weights, size, ((0, head),))
        for name, value in self.files.items():
            storages = Storages()
            yield shell(name, self._filled(value, storages, {}), storages)

    # -- what the files hold, with holes where tensors go

    def _model_state(self) -> OrderedDict[str, Any]:
        """The module's state dict; names of one weight share a hole."""
        owners: dict[str, Any] = {}
        made = OrderedDict(
            (name, owners.setdefault(self.aliases.get(name, name), held))
            for name, held in self.weights_as_saved()
        )
        metadata = self.source.state.get("module_metadata")
        if metadata is not None:
            made._metadata = metadata  # type: ignore[attr-defined]
        return made

    def _add_scheduler(self) -> None:
        """The scheduler's own file, where the trainer looks for one and there is none yet."""
        name, step = self.called.scheduler, self.source.step
        if name is None or any(item.name == name for item in self.source.siblings):
            return
        state = self.source.state.get("lr_scheduler")
        if state is None or "last_epoch" not in state:
            if step is None:
                return
            state = trainers.fresh_scheduler(int(step), self.groups)
            self.warnings.append(
                f"{name}: the source has no scheduler of torch; it is set to step {step} with the "
                "learning rates of the groups"
            )
        self.files[name] = state

    def _warn_of_names(self) -> None:
        program = program_of(self.source.siblings)
        if program is not None and self.called.scheduler is None and not self.options.weights_only:
            wanted = OF_TRAINERS[program]
            self.warnings.append(
                f"{self.called.optimizer} is not what the trainer looks for ({wanted.optimizer}): "
                "to resume there, add --dialect safetensors"
            )

    def _holes(self) -> list[tuple[str, Hole]]:
        return [(name, held) for name, held in self.weights.items() if isinstance(held, Hole)]

    def _check_safetensors(self) -> None:
        lost = [name for name, held in self.weights.items() if not isinstance(held, Hole)]
        self.left_out += [f"{name}: no tensor, of which alone safetensors are" for name in lost]
        tied = [name for name in self.weights if name in self.aliases]
        if tied:
            self.warnings.append(
                f"{', '.join(tied[:4])}: second names of tied weights, which "
                f"{self.called.weights} does not have (load it with safetensors.torch.load_model, "
                "or with strict=False)"
            )

    def _optimizer_state(self) -> dict[str, Any]:
        groups = []
        if self.called.by_name:
            return {
                "state": dict(self._states()),
                "param_groups": [
                    {**group, "params": self.members(place)}
                    for place, group in enumerate(self.groups)
                ],
            }
        for place, group in enumerate(self.groups):
            members = self.members(place)
            ids = [self.numbers[name] for name in members]
            groups.append({**group, "param_names": members, "params": ids})
        state = {self.numbers[name]: held for name, held in self._states() if name in self.numbers}
        return {"state": dict(sorted(state.items())), "param_groups": groups}

    def _extra(self) -> dict[Any, Any]:
        source = self.source
        made: dict[Any, Any] = {}
        if source.state.get("lr_scheduler") is not None and self.called.scheduler is None:
            made[self.scheduler] = source.state["lr_scheduler"]
        for key, held in (source.state.get("client_state") or {}).items():
            if key in ("model", "optim", KNOWN, *made):
                self.left_out.append(f"client_state {key!r}: a file of the target has this name")
            else:
                made[key] = held
        known = {
            **self.unsaid(),
            "names": {
                name: names
                for name, value in (*self.files.items(), (EXTRA, made))
                if any(names := list(self._tensor_names(value)))
            },
        }
        return {**made, KNOWN: known}

    def _tensor_names(self, value: Any) -> Iterator[str]:
        """What the manifest calls the tensors of a file, but for 0-d ones; weights have none."""
        if isinstance(value, (Hole, Scalar)):
            yield from [""] if value.shape else []
        elif isinstance(value, TensorName):
            yield from [value.name] if self.source.entries[f"{value.name}/state"].shape else []
        found: list[str] = []
        map_values(value, lambda held, _: found.extend(self._tensor_names(held)))
        yield from found

    def _filled(self, value: Any, storages: Storages, made: dict[int, Tensor]) -> Any:
        """`value` with tensors in its holes; one for a hole that stands at several places."""
        if isinstance(value, Scalar):
            return storages.scalar(value)
        if isinstance(value, TensorName):
            entry = self.source.entries[f"{value.name}/state"]
            return storages.tensor(entry.dtype, entry.shape)
        if isinstance(value, Hole):
            if id(value) not in made:
                made[id(value)] = storages.tensor(value.dtype, value.shape)
            return made[id(value)]
        filled = map_values(value, lambda held, _: self._filled(held, storages, made))
        if hasattr(value, "_metadata"):
            filled._metadata = value._metadata
        return filled


def seal(root: str, manifest: Manifest, outcome: Any) -> None:
    """Writes what is known when all tensors are in place: the records' checksums."""
    seal_records(manifest, outcome)
