"""The storage reader that torch's loading calls; see the package's docstring."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import metadata, planner, storage
from torch.futures import Future

from ..core.checkpoint.manifest import Manifest
from ..errors import WrongOption, ZckptError
from ..formats.reading import USUAL, Reading
from ..remote.url_arguments import kept
from ..remote.urls import is_url
from .source import Source
from .table import KeyTable
from .target import LoadTarget
from .values import NotLoaded, rebuilt


class StorageReader(storage.StorageReader):
    """Loads the checkpoint at `path`, of any format, into the state dict of any torch program.

    `format`, `tag`, `root`, `step_policy`, `param_names`, `tp_rules` and `buffers` are as for
    `zckpt.read`, `replicas` and `accept_weights` as for `zckpt.load`.

        rename              pairs (regex, replacement), as for `--rename`
        model, optimizer    give both if the state dict is from `optimizer.state_dict()`, which
                            numbers the parameters: they tell the names, and the groups of frozen
                            parameters

    If the source is a directory of torch.distributed.checkpoint with the same key, its value is
    loaded unchanged. Other keys are looked up by name. A float32 weight gets the fp32 master, if
    there is one. Other weights get the module's value, or the rounded master. A param group of the
    program keeps its parameters, and gets the hyper-parameters that these parameters have in the
    source. Hyper-parameters that the source lacks stay unchanged.

    Raises a ZckptError. The constructor raises it for the path. Loading raises it inside torch's
    CheckpointException, before this rank loads a tensor: if the source lacks a key, if a value is
    an object whose pickle zckpt would have to run, or if `convert` refuses the checkpoint.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        format: str | None = None,
        tag: str | None = None,
        root: str | None = None,
        step_policy: str | None = None,
        param_names: Sequence[str] | None = None,
        rename: Iterable[tuple[str, str]] = (),
        tp_rules: str | os.PathLike[str] | None = None,
        replicas: str | None = None,
        accept_weights: bool = False,
        buffers: Sequence[str] = (),
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> None:
        super().__init__()
        rules = None if tp_rules is None else os.fspath(tp_rules)
        self._reading = Reading(
            format,
            tag,
            step_policy,
            param_names,
            rename=tuple(rename),
            root=root,
            tp_rules=rules,
            replicas=replicas,
            buffers=(buffers,) if isinstance(buffers, str) else tuple(buffers),
            opens_items=True,
        )
        self._accept_weights = accept_weights
        self._groups = _groups(model, optimizer)
        self._table: KeyTable | None = None
        self._open(path)

    def _open(self, path: str | os.PathLike[str]) -> None:
        self.path = path if is_url(path) else Path(path)
        self.load_id = str(uuid.uuid4())
        self._source = Source(kept(path), self._reading, self._groups)
        self._is_checked = False

    @property
    def manifest(self) -> Manifest:
        return self._source.manifest

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        return self.path

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether zckpt recognizes a checkpoint at `checkpoint_id`."""
        try:
            Source(kept(checkpoint_id), USUAL, ())
        except ZckptError:
            return False
        return True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begins a new load, from another path if `checkpoint_id` is given."""
        self.load_id = str(uuid.uuid4())
        if checkpoint_id and str(checkpoint_id) != str(self.path):
            self._open(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> metadata.Metadata:
        """Lists the keys of the checkpoint; every rank gets the keys of all ranks."""
        if not self._source.is_current:
            self._open(self.path)
        stored = self._source.stored
        table = metadata.Metadata(
            KeyTable(self._source),
            planner_data=dict(self._source.listing.paths),
            storage_meta=self._about_the_save(),
        )
        if hasattr(table, "version"):  # not in torch 2.6
            table.version = stored.version if stored is not None else None
        return table

    def _about_the_save(self) -> metadata.StorageMeta:
        stored = self._source.stored
        values: dict[str, Any] = {}
        for key, value in (stored.saving if stored is not None else {}).items():
            try:
                values[key] = rebuilt(value, _no_tensor)
            except NotLoaded:
                continue
        keys = ("checkpoint_id", "save_id", "modules")
        about = metadata.StorageMeta(**{key: values[key] for key in keys if key in values})
        about.load_id = self.load_id
        return about

    def set_up_storage_reader(
        self, metadata: metadata.Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Keeps the metadata, so that torch's planner finds every key while it makes its plan."""
        self._is_checked |= not is_coordinator  # the coordinator checks for all ranks
        table = metadata.state_dict_metadata
        self._table = table if isinstance(table, KeyTable) else None
        if self._table is not None:
            self._table.is_loading = True

    def prepare_local_plan(self, plan: planner.LoadPlan) -> planner.LoadPlan:
        if self._table is not None:
            self._table.is_loading = False
        return plan

    def prepare_global_plan(self, plans: list[planner.LoadPlan]) -> list[planner.LoadPlan]:
        """Refuses a checkpoint that `convert` refuses, before a tensor is read.

        torch calls this on the coordinator only. An error ends the load on all ranks.
        """
        self._check(plans)
        return plans

    def _check(self, plans: Sequence[planner.LoadPlan]) -> None:
        if not self._is_checked:
            keys = {item.storage_index.fqn for plan in plans for item in plan.items}
            self._source.check(self._accept_weights, keys)
            self._is_checked = True

    def read_data(self, plan: planner.LoadPlan, planner: planner.LoadPlanner) -> Future[None]:
        """Fills the values of this process's plan; changes nothing if the source lacks a key."""
        self._check([plan])
        LoadTarget(self._source, planner, plan.items).fill()
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _no_tensor(_: Any) -> torch.Tensor:
    raise NotLoaded("it holds a tensor")


def _groups(
    model: torch.nn.Module | None, optimizer: torch.optim.Optimizer | None
) -> list[list[str]]:
    """Lists the parameter names of each of the optimizer's groups.

    Their order is that in which the optimizer numbers parameters.
    """
    if (model is None) != (optimizer is None):
        raise WrongOption(
            "option-needed",
            "model and optimizer must be given together",
            hint="give StorageReader both model= and optimizer=, or neither",
        )
    if model is None or optimizer is None:
        return []
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [
        [names.get(id(parameter), "") for parameter in group["params"]]
        for group in optimizer.param_groups
    ]
