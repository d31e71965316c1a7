"""Whole state dicts as files that plain torch loads, from any manifest, as shells.

    model.pt    what model.load_state_dict takes: every name, tied weights in one memory, buffers
    optim.pt    what optimizer.load_state_dict takes: numbers, groups complete for torch 2.13
    extra.pt    the scheduler, the program's own state, and under `zckpt` what state dicts do not
                say: which names are tied, frozen, buffers

Groups hold `param_names` as torch >= 2.6 keeps them of named parameters (loading does not go by
them): numbers have names again. With the dialect `safetensors` the model's state is one such file,
where tied weights stand once, as safetensors demands.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from ... import safefile
from ...errors import WrongOption
from ...inert import Scalar, TensorName, map_values
from ...manifest import Manifest
from ...options import Options
from ...staging import Layout, Shell
from ...torchfile import Tensor
from ...torchshell import Storages, shell
from .state_dicts import Hole, StateDicts, left_out

MODEL, WEIGHTS, OPTIMIZER, EXTRA = "model.pt", "model.safetensors", "optim.pt", "extra.pt"
KNOWN = "zckpt"
"""The key of what only we say."""


def lay_out(source: Manifest, options: Options) -> Layout:
    """The files of the target, and what it cannot take along.

    Raises WrongOption and MissingData before anything is written.
    """
    target = "files of torch.save"
    options.refuse(target, "stage", "config", "optimizer", "dcp_layout")
    if options.dialect not in (None, "safetensors"):
        raise WrongOption(f"--dialect {options.dialect} has no meaning for {target}")
    made = Target(source, options)
    own = {shell.name for shell in made.shells()}
    siblings = [(item.name, item) for item in source.siblings if item.name not in own]
    made.left_out += [
        f"{item.name}: a file of the target has this name"
        for item in source.siblings
        if item.name in own
    ]
    return Layout(made.shells, siblings, made.left_out, made.warnings, from_masters=True)


class Target(StateDicts):
    """What is decided before the first byte is written."""

    def __init__(self, source: Manifest, options: Options) -> None:
        super().__init__(source, options)
        self.left_out += left_out(source, options)
        self.safetensors = options.dialect == "safetensors"
        self.weights = self._model_state()
        if self.safetensors:
            self._check_safetensors()
        self.files: dict[str, Any] = {} if self.safetensors else {MODEL: self.weights}
        if self.optimizes:
            self.files[OPTIMIZER] = self._optimizer_state()
        if not options.weights_only:
            self.files[EXTRA] = self._extra()

    def shells(self) -> Iterator[Shell]:
        """Every file."""
        if self.safetensors:
            held = {id(hole): (name, hole) for name, hole in reversed(self._holes())}
            tensors = [(name, hole.dtype, hole.shape) for name, hole in reversed(held.values())]
            head, size = safefile.header(tensors)
            yield Shell(WEIGHTS, size, ((0, head),))
        for name, value in self.files.items():
            storages = Storages()
            yield shell(name, self._filled(value, storages, {}), storages)

    # -- what the files hold, with holes where tensors go

    def _model_state(self) -> OrderedDict[str, Any]:
        """The module's state dict; names of one weight share a hole."""
        owners: dict[str, Any] = {}
        made = OrderedDict(
            (name, owners.setdefault(self.aliases.get(name, name), held))
            for name, held in self._weights()
        )
        metadata = self.source.state.get("module_metadata")
        if metadata is not None:
            made._metadata = metadata  # type: ignore[attr-defined]
        return made

    def _holes(self) -> list[tuple[str, Hole]]:
        return [(name, held) for name, held in self.weights.items() if isinstance(held, Hole)]

    def _check_safetensors(self) -> None:
        lost = [name for name, held in self.weights.items() if not isinstance(held, Hole)]
        self.left_out += [f"{name}: no tensor, of which alone safetensors are" for name in lost]
        tied = [name for name in self.weights if name in self.aliases]
        if tied:
            self.warnings.append(
                f"{', '.join(tied[:4])}: second names of tied weights, which {WEIGHTS} does not "
                "hold (load it with safetensors.torch.load_model, or with strict=False)"
            )

    def _optimizer_state(self) -> dict[str, Any]:
        groups = []
        for place, group in enumerate(self.groups):
            members = self.members(place)
            ids = [self.numbers[name] for name in members]
            groups.append({**group, "param_names": members, "params": ids})
        state = {self.numbers[name]: held for name, held in self._states() if name in self.numbers}
        return {"state": dict(sorted(state.items())), "param_groups": groups}

    def _extra(self) -> dict[Any, Any]:
        source = self.source
        made: dict[Any, Any] = {}
        if source.state.get("lr_scheduler") is not None:
            made[self.scheduler] = source.state["lr_scheduler"]
        for key, held in (source.state.get("client_state") or {}).items():
            if key in ("model", "optim", KNOWN, *made):
                self.left_out.append(f"client_state {key!r}: a file of the target has this name")
            else:
                made[key] = held
        frozen = [name for name, held in source.parameters.items() if not held.trainable]
        known = {
            "aliases": self.aliases,
            "buffers": list(source.buffers),
            "frozen": frozen,
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
