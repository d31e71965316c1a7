"""Lays out ONNX Runtime checkpoints of any data-parallel size: files without tensors' bytes.

ORTTrainer.load_checkpoint merges HDF5 files and divides them again, so any number of ranks can
resume from them. Each rank loads its own torch.save file (L2), with its partition's names and
sizes.

Beside the weights' tensors, the files contain counters (one more than the updates). HDF5 files also
contain ORTTrainer's own counters and the user's dictionary. Other values are listed in `omitted`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from math import prod
from typing import Any

from msgspec import Struct

from ...core.checkpoint.dtypes import FLOATS
from ...core.checkpoint.inert import Scalar
from ...core.checkpoint.manifest import Manifest
from ...core.checkpoint.weights import is_optimizers, weight_of
from ...core.passes.layout import Layout, Shell
from ...core.storage.folder import Folder
from ...errors import (
    InconsistentCheckpoint,
    MissingData,
    UnsupportedCheckpoint,
    WrongOption,
    counted,
    literal,
    note,
    warning,
)
from ...files import hdf5shell
from ...files.hdf5file import import_h5py
from ...files.torchshell import Storages, seal_records, shell, thawed
from ...training import batches
from ...training.optimizers import plain_name
from ...training.options import DIALECT, DP, Options
from ...training.steps import COUNTED
from ..private import own_names
from .legacy import HALVES, MODEL
from .partition import Share, by_name, share_of, shares
from .ranks import COUNT, SHARED, SHORT_NAMES, SLOTS

PREFIX = "ORT_checkpoint"  # ONNX Runtime's own
HALF_SUFFIXES = {dtype: suffix for suffix, dtype in HALVES.items()}
ENGINE_NAMES = {short: name for name, short in SHORT_NAMES.items()}
# keys of a manifest's state that the target stores: in every dialect, and in HDF5 files
ENGINE = frozenset({"module", "counters"})
TRAINER = ("trainer_options", "train_step_info", "user_dict")
# names that ONNX Runtime's aggregation of legacy files misparses
MISREAD = re.compile(r"_view_|_fp16|Moment_[12]_|Update_Count_|^Step")


def lay_out(source: Manifest, options: Options) -> Layout:
    """Lays out the files of the target, and lists what they cannot store.

    Raises, before anything is written:
        WrongOption               the optimizer states are not those of Adam or Lamb
        MissingData               a weight, a state or a step is missing
        InconsistentCheckpoint    steps differ, but Lamb has one step for all weights
        UnsupportedCheckpoint     HDF5 files cannot store a name or a type
        MissingExtra              h5py is not installed
    """
    writer = OnnxRuntimeWriter(source, options)

    def loading(path: str) -> str:
        if writer.dialect == "hdf5":
            files = literal(os.path.join(path, "*"))
            return f"trainer.load_checkpoint(*sorted(glob.glob({files})))"
        return f"checkpoint.experimental_load_checkpoint(trainer, {literal(path)})"

    if writer.dialect == "hdf5":
        import_h5py()
    return Layout(
        writer.shells,
        [],
        writer.omitted,
        writer.warnings,
        from_masters=writer.half is not None,
        about="files of ONNX Runtime Training for " + counted(writer.dp, "rank"),
        loading=loading,
    )


def seal(root: Folder, manifest: Manifest, outcome: Any) -> None:
    """Writes the CRC-32 of every tensor's bytes into the zip directories of torch.save files.

    `outcome` has the checksums that were computed while the bytes were copied.
    """
    if manifest.run.origin.dialect != "hdf5":  # HDF5 files have no checksums
        seal_records(root, manifest, outcome)


class TargetWeight(Struct, frozen=True):
    """A weight of the target, and how ranks store it.

    owned      the ranks' shares of the weight; empty if it is frozen
    apart      whether only the owners store the weight
    moments    types of optimizer states: {"Moment_1": "F32", ...}
    updates    number of completed updates; None without optimizer states
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    owned: list[Share]
    apart: bool
    moments: dict[str, str]
    updates: int | None


class OnnxRuntimeWriter:
    """Lays out the files of one target: `shells` yields the file of each rank.

    The constructor decides which elements of a trained weight each rank owns, and the tensors'
    types.
    """

    def __init__(self, source: Manifest, options: Options) -> None:
        self.source = source
        self.options = options
        self.dp = options[DP] or source.dp
        self.dialect = options[DIALECT] or "hdf5"
        self.dtype_before = source.run.engine.dtype if source.run.engine else None
        self.omitted = list(source.notices.omitted)
        self.warnings = list(source.notices.warnings)
        self.half = self._half_type()
        self.states = not options.weights_only and any(
            entry.slot in SLOTS.values() for entry in source.entries.values()
        )
        self.optimizer = self._optimizer()
        trained = [name for name, about in source.parameters.items() if about.trainable]
        if not trained:
            raise MissingData("optimizer-missing", "the source has no trainable parameter")
        numels = {name: prod(source.parameters[name].shape) for name in trained}
        owned = shares(numels, self.dp)
        if not options.weights_only:
            self.warnings += batches.of_next_run(source, self.dp)
        self.weights = [
            *(self._trained(name, owned[name]) for name in by_name(trained)),
            *(self._frozen_weight(name) for name in by_name(set(source.parameters) - set(trained))),
            *(self._frozen_weight(name) for name in by_name(source.buffers)),
        ]
        self.updates = {each.updates for each in self.weights if each.updates is not None}
        self._check_steps()
        self._check_names()
        self._report()

    # -- decisions

    def _half_type(self) -> str | None:
        """The type of the 16-bit copies of weights; None for an fp32 run."""
        half = self.options.module_dtype or self.dtype_before
        if half is None:
            stored = {entry.dtype for entry in self.source.slots.get("param", ())}
            half = next((dtype for dtype in ("BF16", "F16") if dtype in stored), "F32")
        return half if half in HALF_SUFFIXES else None

    def _optimizer(self) -> str:
        """AdamOptimizer or LambOptimizer; raises WrongOption for another optimizer's states."""
        name = plain_name(self.source.optimizer or "")
        kept = {entry.slot for entry in self.source.entries.values() if is_optimizers(entry.slot)}
        families = {"adam": "Adam", "adamw": "Adam", "lamb": "Lamb", "": "Adam", "sgd": "SGD"}
        is_known = name in families and kept == {*SLOTS.values()}
        if kept and not is_known and not self.options.weights_only:
            raise WrongOption(
                "optimizer-unsupported",
                "ONNX Runtime stores only the states of Adam and Lamb, but the source has states "
                f"of {self.source.optimizer or 'an unknown optimizer'}: {', '.join(sorted(kept))}",
                hint="to write only the weights, add --weights-only",
            )
        return ENGINE_NAMES[families.get(name, "Adam")]

    def _trained(self, name: str, owned: list[Share]) -> TargetWeight:
        parameter, entries = self.source.parameters[name], self.source.entries
        weight = weight_of(entries, name).trained
        # a mixed run may keep some weights in fp32, on every rank
        mixed_before = self.dtype_before in HALF_SUFFIXES
        kept = mixed_before and weight.slot == "param" and weight.dtype == "F32"
        moments = {}
        for moment, slot in SLOTS.items() if self.states else ():
            entry = entries.get((name, slot))
            if entry is None:
                raise MissingData(
                    "state-missing",
                    f"the source has no {slot} of {name}, but has it for other weights",
                    subject=name,
                )
            moments[moment] = "F16" if entry.dtype == "F16" else "F32"
        apart = self.half is not None and not kept
        step = parameter.step
        if self.states and (step is None or step != int(step) or step < 0):
            raise MissingData(
                "step-missing",
                f"the number of updates of {name} must be an integer, but the source has {step}",
                subject=name,
            )
        updates = int(step) if self.states and step is not None else None
        return TargetWeight(name, "F32", parameter.shape, owned, apart, moments, updates)

    def _frozen_weight(self, name: str) -> TargetWeight:
        """Describes a frozen weight or buffer in the target: it is complete on every rank.

        Floating-point types other than fp64 become fp32; any other type is kept.
        Raises MissingData if the source lacks it.
        """
        entry = self.source.entries.get((name, "param"))
        if entry is None:
            raise MissingData(
                "weights-missing",
                f"the source has no tensor of {name}, a frozen weight or buffer",
                subject=name,
            )
        dtype = "F32" if entry.dtype in FLOATS - {"F64"} else entry.dtype
        return TargetWeight(name, dtype, entry.shape, [], apart=False, moments={}, updates=None)

    def _check_steps(self) -> None:
        if len(self.updates) <= 1:
            return
        numbers = ", ".join(map(str, sorted(self.updates)))
        if self.optimizer == "LambOptimizer":
            raise InconsistentCheckpoint(
                "one-value-needed",
                f"Lamb has one step for all weights, but the source has several: {numbers}",
                hint="choose one: --step-policy max|min|N",
            )
        message = (
            f"weights have different numbers of updates ({numbers}): to read this target with "
            "zckpt, add --step-policy keep"
        )
        self.warnings.append(warning("option-needed", message, subject="--step-policy"))

    def _check_names(self) -> None:
        names = [weight.name for weight in self.weights]
        misread = [name for name in names if MISREAD.search(name)]
        if misread and self.dialect == "l2":
            message = (
                f"ONNX Runtime misreads names such as {misread[0]} when it aggregates the ranks' "
                "files; ranks that load their own files read them correctly"
            )
            self.warnings.append(warning("engine-fault", message, subject=misread[0]))
        for weight in self.weights if self.dialect == "hdf5" else ():
            name = weight.name
            if "/" in name or "\0" in name or name in ("", "."):
                raise UnsupportedCheckpoint(
                    "name-unsupported",
                    f"an HDF5 file cannot store a tensor with the name {name!r}: ONNX Runtime "
                    "would not find it",
                    hint="add --dialect l2",
                    subject=name,
                )
            if weight.dtype not in hdf5shell.NUMPY:
                raise UnsupportedCheckpoint(
                    "type-unsupported",
                    f"{name} has the type {weight.dtype}, which HDF5 files cannot store",
                    subject=name,
                )

    # -- reports

    def _report(self) -> None:
        source, state = self.source, self.source.whole_state
        if source.groups and self.states:
            message = (
                "hyper-parameters (learning rate, betas, weight decay, ...): ONNX Runtime does "
                "not store them; set them in the program that will resume"
            )
            self.omitted.append(note("state-omitted", message, subject="param_groups"))
        if tied := [*source.owners]:
            message = f"second names of tied weights: {', '.join(tied[:8])}"
            self.omitted.append(note("name-omitted", message, subject=tied[0]))
        if source.buffers:
            names = ", ".join(source.buffers[:8])
            message = f"buffers are written as frozen weights: {names}"
            self.warnings.append(warning("form-differs", message, subject=source.buffers[0]))
        known_keys = set(ENGINE) | {"trainer_options"}
        known_keys |= set(TRAINER) if self.dialect == "hdf5" else {"client_state"}
        optimizer = {f"optimizer.{k}": v for k, v in (state.get("optimizer") or {}).items()}
        for key, value in {**state, **optimizer}.items():
            if (
                key not in known_keys
                and key != "optimizer"
                and value not in (None, {}, [], "", False)
            ):
                names = ", ".join(own_names(key, value))
                message = f"{names}: ONNX Runtime's files cannot store it"
                self.omitted.append(note("state-omitted", message, subject=key))
        self.omitted += [
            note("file-omitted", f"{item.name}: not part of the checkpoint", file=item.path)
            for item in source.files.siblings
        ]
        if self.dialect == "l2" and MODEL in (state.get("client_state") or {}):
            message = f"client_state {MODEL!r}: ONNX Runtime's files use this key themselves"
            self.omitted.append(note("state-omitted", message, subject=MODEL))
        if self.half == "BF16":
            message = (
                "ONNX Runtime's Python trainer supports mixed precision with fp16, not bf16: add "
                "--dtype fp16 or --dtype fp32 for files that it can train with"
            )
            self.warnings.append(warning("option-needed", message, subject="--dtype"))
        lamb = self.optimizer == "LambOptimizer" and self.states
        if lamb and self.dp != source.dp:
            message = (
                "with Lamb on another number of ranks, the state is exact, but later updates "
                "differ: ONNX Runtime computes Lamb's norms from each rank's slices"
            )
            self.warnings.append(warning("not-exact", message))

    # -- files

    def shells(self) -> Iterator[Shell]:
        """Yields every rank's file, without the tensors' bytes."""
        make = self._hdf5 if self.dialect == "hdf5" else self._legacy
        for rank in range(self.dp):
            yield make(rank)

    def _weights_of_rank(
        self, rank: int
    ) -> Iterator[tuple[TargetWeight, Share | None, tuple[int, ...] | None]]:
        """Yields (weight, the rank's share of it, the shape that the rank stores) for every weight.

        The share is None if the rank owns no elements of the weight. The shape is None if the rank
        does not store the weight.
        """
        for weight in self.weights:
            share = share_of(weight.owned, rank)
            own_shape = None if share is None else _shape(weight, share)
            yield weight, share, own_shape if weight.apart else weight.shape

    @property
    def _counter_of_lamb(self) -> Scalar | None:
        is_lamb = self.states and self.optimizer == "LambOptimizer"
        return COUNTED.number(max(self.updates)) if is_lamb else None

    # -- L2

    def _legacy(self, rank: int) -> Shell:
        storages = Storages()
        model: dict[str, Any] = {}
        for weight, share, shape in self._weights_of_rank(rank):
            view = "" if share is None or share.view is None else f"_view_{share.view}"
            if shape is not None:
                name = weight.name + (view if weight.apart else "")
                model[name] = storages.tensor(weight.dtype, shape)
            if weight.apart and self.half is not None:
                copy = weight.name + HALF_SUFFIXES[self.half]
                model[copy] = storages.tensor(self.half, weight.shape)
            if share is None:
                continue
            own_shape = _shape(weight, share)
            for moment, dtype in weight.moments.items():
                model[f"{moment}_{weight.name}{view}"] = storages.tensor(dtype, own_shape)
            if weight.updates is not None and self.optimizer == "AdamOptimizer":
                name = f"{COUNT}_{weight.name}{view}"
                model[name] = storages.scalar(COUNTED.number(weight.updates))
        if shared := self._counter_of_lamb:
            model[SHARED] = storages.scalar(shared)
        part = f".ZeRO.{rank}.{self.dp - 1}" if self.dp > 1 else ""
        user = {
            key: thawed(value, self.source.entries, storages)
            for key, value in (self.source.state.get("client_state") or {}).items()
            if key != MODEL and not self.options.weights_only
        }
        return shell(f"{PREFIX}{part}.ort.pt", {MODEL: model, **user}, storages)

    # -- HDF5

    def _hdf5(self, rank: int) -> Shell:
        model: dict[str, Any] = {}
        states: dict[str, Any] = {}
        split: dict[str, Any] = {}
        for weight, share, shape in self._weights_of_rank(rank):
            if shape is not None:
                model[weight.name] = hdf5shell.EmptyDataset(weight.dtype, shape)
            if share is None:
                continue
            if share.view is not None:
                split[weight.name] = {
                    "original_dim": list(weight.shape),
                    "megatron_row_partition": [-1],
                }
            optimizer: dict[str, Any] = {
                moment: hdf5shell.EmptyDataset(dtype, _shape(weight, share))
                for moment, dtype in weight.moments.items()
            }
            if weight.updates is not None and self.optimizer == "AdamOptimizer":
                optimizer[COUNT] = [COUNTED.number(weight.updates).value]
            if optimizer:
                states[weight.name] = optimizer
        if shared := self._counter_of_lamb:
            states["shared_optimizer_state"] = {SHARED: [shared.value]}
        tree: dict[str, Any] = {"model": {"full_precision": model}}
        if self.states:
            tree["optimizer"] = states
        tree["trainer_options"] = {
            "mixed_precision": self.half is not None,
            "zero_stage": int(self.dp > 1),
            "world_rank": rank,
            "world_size": self.dp,
            "data_parallel_size": self.dp,
            "horizontal_parallel_size": 1,
            "optimizer_name": self.optimizer,
        }
        if self.dp > 1:
            tree["partition_info"] = split
        if info := self._step_info():
            tree["train_step_info"] = info
        if user := self.source.state.get("user_dict"):
            tree["user_dict"] = user
        part = f".rank{rank}" if self.dp > 1 else ""
        return hdf5shell.shell(f"checkpoint{part}.ortcp", tree)

    def _step_info(self) -> dict[str, int]:
        """The source's `train_step_info`, which are ORTTrainer's own counters.

        If the source has none, each counter is set to the number of updates. Empty if that is
        unknown.
        """
        kept = self.source.state.get("train_step_info")
        if isinstance(kept, dict) and kept:
            return kept
        return (
            dict.fromkeys(("optimization_step", "step"), max(self.updates)) if self.updates else {}
        )


def _shape(weight: TargetWeight, share: Share) -> tuple[int, ...]:
    """The shape in which an owner stores a weight or moment: flat if several ranks share it."""
    return weight.shape if share.view is None else (share.stop - share.start,)
