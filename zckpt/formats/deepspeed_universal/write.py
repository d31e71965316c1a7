"""DeepSpeed's own universal checkpoints, as shells."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from ...core.inert import Foreign, Global
from ...core.manifest import Manifest, slot_key
from ...core.staging import Layout, Shell
from ...errors import (
    InconsistentCheckpoint,
    UnsupportedCheckpoint,
)
from ...files.torchshell import Storages, seal_records, shell
from ...training.options import Options
from .. import zero
from ..deepspeed_states.directories import (
    listed,
)
from ..deepspeed_states.target import UNDERSTOOD, VERSION, Target
from .files import COMMON, MARK, MASTER, POINTER, VIEW, ZERO, is_name
from .folders import About

ADAM = {"exp_avg", "exp_avg_sq"}  # all that the loader of stage 3 looks for


def lay_out(source: Manifest, options: Options) -> Layout:
    """The files of a directory that the engine loads at any data-parallel size.

    The form is that of the target's stage. Raises before anything is written, as writing.py does,
    and UnsupportedCheckpoint for what the engine's loader cannot take: numbers that an optimizer
    keeps per parameter (NAdam), in stage 3 any optimizer but Adam; names that are no folder names.
    """
    options.only("deepspeed-universal", UNDERSTOOD)
    target = _Universal(source, options)
    siblings = [(found.name, found) for found in source.siblings if not target.drops(found)]
    about = f"a universal checkpoint of DeepSpeed's own, ZeRO stage {target.engine.stage}"
    return Layout(target.shells, siblings, target.left_out, target.warnings, about=about)


class _Universal(Target):
    """What is decided before the first byte is written."""

    derives = False  # the modules' weights are not loaded: only what the source holds is written
    may_be_elastic = False  # its loader takes hyper-parameters from the files

    def __init__(self, source: Manifest, options: Options) -> None:
        super().__init__(source, options)
        self._check_names()
        self.about = {name: self._about(name) for name in self.trainable}
        if not options.weights_only:
            self._check_loader()
        self._warn()

    # -- checks and reports

    def _check_names(self) -> None:
        keys = {slot_key(slot) for flat in self.flats for slot in flat.slots}
        for what, names, reserved in (
            ("tag", [self.tag], (POINTER,)),
            ("parameter", list(self.trainable), (COMMON,)),
            ("optimizer state", sorted(keys), (MASTER, "step")),
        ):
            for name in names:
                if not is_name(name) or name in reserved:
                    raise UnsupportedCheckpoint(
                        f"the {what} {name!r} cannot be the name of a folder or file here",
                        hint="write another format: --to deepspeed, --to universal",
                    )

    def _check_loader(self) -> None:
        """Raises UnsupportedCheckpoint for what `load_universal` stumbles over (0.19.8)."""
        numbers = sorted({key for flat in self.flats for key in flat.scalars})
        if numbers:
            raise UnsupportedCheckpoint(
                f"the optimizer keeps {listed(numbers)} per parameter, a number, which DeepSpeed's "
                "universal loader cannot take",
                hint="write --to deepspeed, which keeps it",
            )
        if not self.engine.partitioned and any(map(self.keeps_whole, self.flats)):
            raise UnsupportedCheckpoint(
                "Muon keeps whole momenta (no offload), which DeepSpeed's universal loader cuts",
                hint="write --to deepspeed; with offload_optimizer in the ds_config it fits",
            )
        if not self.engine.partitioned:
            return
        for flat in self.flats:
            if set(flat.slots) != ADAM or flat.step is None:
                held = listed(sorted(flat.slots)) or "none"
                raise UnsupportedCheckpoint(
                    "DeepSpeed's universal loader of stage 3 takes exp_avg, exp_avg_sq and a step, "
                    f"the source holds {held}" + ("" if flat.step is not None else " and no step"),
                    hint="write --stage 2, or --to deepspeed",
                )
        told = sorted({flat.step for flat in self.flats if flat.step is not None})
        if len(told) > 1:
            raise InconsistentCheckpoint(
                f"DeepSpeed's universal loader of stage 3 takes one step for all parameters, the "
                f"source has {listed(told)}",
                hint="write --stage 2, or --to deepspeed",
            )

    def _warn(self) -> None:
        frozen = [name for name in self.frozen if f"{name}/param" in self.source.entries]
        for what, names in (("frozen weights", frozen), ("buffers", self.source.buffers)):
            if names:
                self.warnings.append(
                    f"DeepSpeed's universal loader does not load {what}: {listed(names)} stay as "
                    "the model initializes them (--to deepspeed has no such loss)"
                )
        if self.engine.partitioned and any(group != self.groups[0] for group in self.groups):
            self.warnings.append(
                "DeepSpeed's universal loader of stage 3 gives all groups the hyper-parameters of "
                "group 0: set those of the others after loading"
            )
        if self.engine.partitioned:
            # engine.py _load_checkpoint reads an ordinary checkpoint there, and does not use it
            self.warnings.append(
                "at stage 3 load_checkpoint(DIR, load_optimizer_states=False) stops for want of a "
                "file `latest` (DeepSpeed 0.19.8): for weights alone call load_checkpoint(DIR, "
                "load_module_only=True), or write --to deepspeed, where it works"
            )
        if self.engine.round_robin and not self.engine.aligned:
            self.warnings.append(
                "an engine with round_robin_gradients loads universal checkpoints to wrong places "
                "(0.19.8): switch it off in the ds_config that you run with"
            )
        padded = [name for name in self.trainable if self._keeps_padding(name)]
        if padded:
            self.warnings.append(
                f"{listed(padded)} has more rows than original_vocab_size: an engine whose padded "
                "vocabulary is smaller than these refuses it (DeepSpeed's converter strips them)"
            )
        for place, flat in enumerate(self.flats):
            total = flat.starts[-1]
            held = (self.dp - 1) * zero.partition_size(total, self.dp)
            if total <= held and not self.engine.partitioned:
                self.warnings.append(
                    f"group {place} has {total} elements, so that some of {self.dp} ranks hold "
                    "none: there DeepSpeed's universal loader fails (IndexError, 0.19.8)"
                )

    def _keeps_padding(self, name: str) -> bool:
        rows, stated = self.trainable[name].shape[:1], self._info.get("original_vocab_size")
        vocabulary = (self.about[name] or {}).get("vocab_tensor")
        return bool(vocabulary and rows and isinstance(stated, int) and rows[0] > stated)

    # -- files

    def shells(self) -> Iterator[Shell]:
        yield Shell(POINTER, len(self.tag.encode()), ((0, self.tag.encode()),))
        yield from self.model_files()
        yield self._common_file(f"{self.tag}/{ZERO}/{COMMON}")
        for flat in self.flats:
            for name in flat.names:
                yield from self._parameter_files(f"{self.tag}/{ZERO}/{name}", name, flat.slots)

    def _common_file(self, name: str) -> Shell:
        storages = Storages()
        value: dict[str, Any] = {MARK: 1, **self._inferred()}
        value["ds_version"] = self.engine.before.get("version", VERSION)
        if not self.engine.wraps_bf16:
            value |= {"zero_stage": self._stage_enum(), **self._scaling(storages)}
        numbers = {}
        if self.engine.partitioned:
            value["partition_count"] = self.dp
            numbers = {place: self._loaded(flat, storages) for place, flat in enumerate(self.flats)}
        else:
            value |= self._clipping()
        base = self._base(numbers, storages)
        value["param_groups"] = base["param_groups"]
        if self.engine.partitioned:
            value["optimizer_state_dict"] = base
        return shell(name, value, storages)

    def _loaded(self, flat: Any, storages: Storages) -> dict[str, Any]:
        """A sub-group's step, where stage 3 looks for it whatever the optimizer does."""
        _, kind, _ = self._step_kept()
        if flat.step is None:
            return {}
        return {"step": self._typed_step(flat.step, kind, storages)}

    def _parameter_files(self, folder: str, name: str, slots: Mapping[str, str]) -> Iterator[Shell]:
        about = self.about[name]
        tensors = {MASTER: self._master(name)}
        tensors |= {slot_key(slot): dtype for slot, dtype in slots.items()}
        for key, dtype in tensors.items():
            storages = Storages()
            shape = self.trainable[name].shape
            value: Any = storages.tensor(dtype, (prod(shape),) if about is None else shape)
            if about is not None:
                value = {**self._thawed(about, storages), "param": value}
            yield shell(f"{folder}/{key}.pt", value, storages)
        where, kind, _ = self._step_kept()
        step = self.trainable[name].step
        if self.engine.partitioned or self.options.weights_only or where != "state":
            return
        if step is None:
            return
        storages = Storages()
        yield shell(f"{folder}/step.pt", self._typed_step(step, kind, storages), storages)

    def _about(self, name: str) -> About | None:
        """What the file says beside the tensor: what it said, or what DeepSpeed makes of its info.

        None for the flat tensor alone, as stage 3 has it where nothing is cut.
        """
        kept = self.source.state.get("universal")
        if isinstance(kept, dict):
            alone = self.engine.partitioned and kept.get("model_parallel") == 1
            default = None if alone else {"cat_dim": 0}
            about: About | None = (kept.get("files") or {}).get(name, default)
            return about
        if self.engine.partitioned:
            return None
        try:
            return _described(self._info, name, self.trainable[name].shape)
        except (ArithmeticError, AttributeError, LookupError, TypeError, re.error) as error:
            raise InconsistentCheckpoint(
                f"universal_checkpoint_info in the client state does not fit {name}: {error!r}",
                hint="it says how parameters are cut for tensor parallelism; correct it",
            ) from error

    @property
    def _info(self) -> Mapping[str, Any]:
        """What the user's program told DeepSpeed's converter."""
        told = (self.source.state.get("client_state") or {}).get("universal_checkpoint_info")
        return told if isinstance(told, dict) else {}


def _described(info: Mapping[str, Any], name: str, shape: tuple[int, ...]) -> About:
    """How a parameter is cut for tensor parallelism, by the patterns in the user's client state."""

    def matches(patterns: Any) -> bool:
        return any(re.match(pattern, name) for pattern in patterns or ())

    about: About = {"cat_dim": 0}
    cut = next(
        (held for held in info.get("parameter_with_sub_params") or () if matches(held["patterns"])),
        None,
    )
    if matches(info.get("tp_replicated_parameter_patterns")) or matches(
        info.get("parameter_to_average_patterns")
    ):
        about = {}
    elif matches(info.get("parameter_with_2_sub_params_cat_dim_0")):
        about["param_n_sub_params"] = 2
    elif cut is not None:
        about = {VIEW: _sub_params(info, cut, shape)}
    elif matches(info.get("parameter_with_row_parallelism_patterns")):
        about["cat_dim"] = 1
    if matches(info.get("vocabulary_parameter_patterns")):
        about["vocab_tensor"] = True
    return about


def _sub_params(info: Mapping[str, Any], cut: Mapping[str, Any], shape: tuple[int, ...]) -> Foreign:
    """A SubparamShape; before version 0.4 a plain number was how many equal parts there are."""
    sizes, axis = list(cut["shape"]), cut["partition_dim"]
    if isinstance(sizes[axis], int) and (info.get("universal_checkpoint_version") or 0.0) < 0.4:
        sizes[axis] = (shape[axis] // sizes[axis],) * sizes[axis]
    state = {"patterns": cut["patterns"], "shape": tuple(sizes), "partition_dim": axis}
    named = Global("deepspeed.checkpoint.universal_checkpoint.SubparamShape")
    return Foreign(named, (), state, "new")


def seal(root: str, manifest: Manifest, outcome: Any) -> None:
    """Writes the CRC-32 of every record into the files' zip directories."""
    seal_records(manifest, outcome)
