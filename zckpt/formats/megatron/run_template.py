"""`--like RUN`: completes a source of another engine with facts that only a Megatron run has.

    from RUN       keys, axes, arguments, objects of modules, optimizers and their groups
    from source    weights, masters, moments, the step; each group's lr, betas, eps, weight_decay

The result is a manifest like those of Megatron-Core, so the writer needs no special case. RUN and
source must have the same parameters with the same shapes. No tensor of RUN's model is used, and no
state of RUN's ranks: the next run draws new random numbers.

Rejected alternative: to compute keys and arguments without RUN. Keys and arguments depend on the
model's specification and on the program, and another engine's files do not state these.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from ...core.checkpoint.entries import Entry, Key
from ...core.checkpoint.inert import Foreign, by_value
from ...core.checkpoint.manifest import Manifest
from ...core.checkpoint.weights import is_optimizers
from ...errors import (
    MissingData,
    UnsupportedCheckpoint,
    WrongOption,
    counted,
    listed,
    note,
    warning,
)
from ...naming.families.layouts import with_rows
from ...training.hyperparameters import torch_groups
from ...training.optimizers import strange_to_adam
from ...training.options import Options
from ..template import Group, Template
from .common_state import arguments, optimizers_of
from .groups import decay_multiplier, groups_of
from .manifest import is_stranger
from .names import with_plain_norms
from .optimizers import OF_WRAPPER
from .saving_program import NEMO, TRAIN_STATE
from .vocabulary import WEIGHTS as VOCABULARY

HYPER = ("lr", "betas", "eps", "weight_decay")
OF_MODULES = "._extra_state/shard_"
OF_STATES = "F32"  # the type of masters and moments in Megatron-Core's files


class RunTemplate(Template):
    """The Megatron run of `--like`, as a template that is filled with the source's values.

    Raises WrongOption or UnsupportedCheckpoint (a run or an optimizer that cannot be used),
    MissingData (source and run have different parameters or states, or a hyper-parameter is
    missing) and InconsistentCheckpoint (parameters of one group have different hyper-parameters).
    """

    def __init__(self, source: Manifest, like: Manifest, options: Options) -> None:
        self.kept: dict[str, Any] = like.state["megatron"]
        self.common: dict[Any, Any] = self.kept["common"]
        if not self.kept["keys"]:
            raise WrongOption(
                "like-does-not-fit",
                f"--like {like.root} is not a torch_dist checkpoint, and zckpt does not know the "
                "torch_dist keys of all its modules",
                hint="load it in Megatron-LM and save it with --ckpt-format torch_dist",
            )
        if self.kept.get("program") == NEMO:
            raise UnsupportedCheckpoint(
                "like-does-not-fit",
                f"--like {like.root} is a NeMo checkpoint, and zckpt cannot write NeMo's counters "
                "for another run",
                hint="give a run of Megatron-LM or Megatron-Bridge",
                file=like.root,
            )
        self.states = not options.weights_only and any(
            is_optimizers(entry.slot) for entry in source.entries.values()
        )
        used = (self.kept.get("vocabulary") or {}).get("used") or 0
        rows = dict.fromkeys(VOCABULARY, used)
        super().__init__(source, like, options, rows, with_plain_norms)

    def manifest(self) -> Manifest:
        """Builds the manifest that is written: the source's values in the form of the `--like` run.

        Keys, arguments, parameter groups and the order of parameters come from the run. The
        hyper-parameters in `HYPER` come from the source.
        """
        source, like = self.source, self.run
        entries = {
            entry.key: entry
            for entry in like.entries.values()
            if entry.slot == "state" and entry.parameter.startswith("megatron.")
        }
        entries |= {key: self._with_rows(entry) for key, entry in self.entries().items()}
        if self.states:
            self._check_states(entries)
        parameters = {
            name: replace(item, shape=self.shape(name)) for name, item in self.parameters().items()
        }
        state = {key: value for key, value in source.state.items() if key != "megatron"}
        objects = {
            name: value
            for name, value in sorted(self.kept["objects"].items())
            if OF_MODULES in name
        }
        # of modules with a nonempty state, such as the scales of 8-bit floats
        if full := [name for name, value in objects.items() if value not in ([None], None)]:
            message = f"the modules' extra states are copied from --like: {listed(full, 3)}"
            self.warnings.append(warning("value-assumed", message, subject=full[0]))
        state["megatron"] = {**self.kept, "objects": objects, "common": self._common_state()}
        # its content counts RUN's steps
        beside = [item for item in like.files.siblings if item.name != TRAIN_STATE]
        omitted = [
            replace(notice, message=f"--like: {notice.message}")
            for notice in like.notices.omitted
            if not is_stranger(notice)
        ]
        if lost := strange_to_adam(source.groups or ()) if self.states else []:
            message = f"{listed(lost)} of the optimizer's groups: Adam has no such hyper-parameter"
            omitted.append(note("state-omitted", message, subject=lost[0]))
        if "megatron" in source.state:
            message = (
                "megatron: the source's arguments and pickled objects, because the target gets "
                "arguments and objects from --like"
            )
            omitted.append(note("state-omitted", message, subject="megatron"))
        return source.replace(
            origin=replace(source.run.origin, tag=None),
            entries=entries,
            parameters=parameters,
            buffers=like.buffers,
            groups=like.groups,
            replicas=(),
            siblings=(*source.files.siblings, *beside),
            state=state,
            states=self.own_states,
            omitted=(*source.notices.omitted, *omitted),
            warnings=(*source.notices.warnings, *self.warnings),
            fingerprints={**like.files.fingerprints, **source.files.fingerprints},
        )

    def _with_rows(self, entry: Entry) -> Entry:
        """Adds rows of zeros to a tensor if its weight has more rows in the run.

        Raises UnsupportedCheckpoint for a state with another shape than its weight.
        """
        wanted = self.shape(entry.parameter)
        if entry.shape == wanted:
            return entry
        if not self.fits(entry.parameter, entry.shape) or entry.mean:
            raise UnsupportedCheckpoint(
                "state-unsupported",
                f"{entry.name} has the shape {list(entry.shape)}, but its weight has "
                f"{list(wanted)}: Megatron-Core needs states of the weight's shape",
                subject=entry.name,
            )
        if entry.slot == "param":
            message = (
                f"{entry.parameter} has {counted(entry.shape[0], 'row')} in the source, and "
                f"{wanted[0]} in the run of --like: the added rows are zeros"
            )
            self.warnings.append(warning("value-assumed", message, subject=entry.parameter))
        return with_rows(entry, wanted[0])

    # -- the optimizer

    def _check_states(self, entries: Mapping[Key, Entry]) -> None:
        """Raises unless source and run have the same optimizer states, as `check_states` does.

        Also raises UnsupportedCheckpoint if the run's groups are unknown, or if a state is not F32.
        Adds a warning if trained weights that are not F32 lack masters.
        """
        like = self.run
        if like.groups is None:
            raise UnsupportedCheckpoint(
                "like-does-not-fit",
                f"--like {like.root} does not state which parameters its groups have",
                hint="give a run that saved its optimizer, or add --weights-only",
                file=like.root,
            )
        self.check_states(entries)
        for entry in entries.values():
            if is_optimizers(entry.slot) and entry.dtype != OF_STATES:
                raise UnsupportedCheckpoint(
                    "type-unsupported",
                    f"{entry.name} has the type {entry.dtype}, but Megatron-Core's optimizer "
                    "states are F32",
                    hint="add --weights-only",
                    subject=entry.name,
                )
        trained = dict.fromkeys(e.parameter for e in entries.values() if is_optimizers(e.slot))
        wide = [
            name
            for name in trained
            if (name, "master") not in entries and entries[name, "param"].dtype != OF_STATES
        ]
        if wide:
            message = (
                f"the source has no fp32 masters of {counted(len(wide), 'weight')}, such as "
                f"{wide[0]}: zckpt widens the weights to fp32 instead"
            )
            self.warnings.append(warning("masters-missing", message, subject=wide[0]))

    def _groups_with_hyper_parameters(self) -> list[Group]:
        self._warn_of_another_adam()
        chosen = self.own_groups(lambda _: HYPER)
        for name, source_hyper in chosen.values():
            if lost := [key for key in HYPER if key not in source_hyper]:
                raise MissingData(
                    "hyperparameter-missing",
                    f"the source does not state {listed(lost)} of {name}",
                    hint=f"give it: --group-defaults {','.join(f'{key}=...' for key in lost)}",
                    subject=name,
                )
        result = []
        for number, group in enumerate(groups_of(self.common)):
            name, source_hyper = chosen.get(number, ("", {}))
            hyper = {key: by_value(source_hyper[key]) for key in HYPER if key in source_hyper}
            if hyper.get("weight_decay") and not decay_multiplier(group):
                message = (
                    f"the source decays the weights of a group with wd_mult 0, such as {name}: "
                    "Megatron-LM's scheduler will set its weight_decay to 0"
                )
                self.warnings.append(warning("not-exact", message, subject="weight_decay"))
            result.append({**group, **hyper})
        return result

    def _warn_of_another_adam(self) -> None:
        """Warns if the source's Adam has other settings than Megatron-Core's.

        Megatron-Core's groups do not state these settings.
        """
        for group in torch_groups(self.source, self.options)[0]:
            if group.get("weight_decay") and group.get("decoupled_weight_decay") is False:
                message = (
                    "the source's Adam adds weight decay to the gradients, but Megatron-Core's "
                    "decays the weights, as AdamW does, unless decoupled_weight_decay is false"
                )
                self.warnings.append(warning("program-must-set", message, subject="weight_decay"))
                break
        for key, usual in (("bias_correction", True), ("amsgrad", False), ("maximize", False)):
            values = [by_value(group[key]) for group in self.source.groups or () if key in group]
            if any(value is not usual and value != usual for value in values):
                message = (
                    f"the source's optimizer has {key}={not usual}, but Megatron-Core's has "
                    f"{key}={usual}"
                )
                self.warnings.append(warning("not-exact", message, subject=key))

    # -- the common state

    def _common_state(self) -> dict[Any, Any]:
        """The run's common state, with the source's step and the number of samples at this step."""
        common = dict(self.common)
        step = self.source.step
        if self.states:
            first = {k: v for k, v in optimizers_of(common)[0].items() if k in OF_WRAPPER}
            common["optimizer"] = {
                **first,
                "optimizer": {"param_groups": self._groups_with_hyper_parameters()},
            }
            if "grad_scaler" in first:
                message = "the loss scale (grad_scaler) is copied from --like"
                self.warnings.append(warning("value-assumed", message, subject="grad_scaler"))
        if step is None:
            return common
        common["iteration"] = int(step)
        args, scheduler = arguments(common), common.get("opt_param_scheduler")
        if isinstance(scheduler, dict):
            counts = self._samples_after(scheduler, "num_steps", int(step))
            common["opt_param_scheduler"] = {**scheduler, **counts}
        changes = self._samples_after(args, "consumed_train_samples", int(step))
        if isinstance(common.get("args"), Foreign):
            changes |= {"iteration": int(step)} if "iteration" in args else {}
            common["args"] = replace(common["args"], state={**args, **changes})
        return common

    def _samples_after(self, values: Mapping[str, Any], key: str, step: int) -> dict[str, int]:
        """Computes a counter of samples for `step` steps: returns {key: number}.

        As many samples per step as in the run are assumed; a warning says so. Returns {} if
        `values` has no such counter, or if the run's count is not a multiple of its steps.
        """
        before, count = self.common.get("iteration"), values.get(key)
        if type(count) is not int:
            return {}
        if type(before) is not int or before < 1 or count % before:
            message = (
                f"{key} is {count}, copied from --like: zckpt cannot compute it, because the "
                "number of samples per step is unknown"
            )
            self.warnings.append(warning("value-assumed", message, subject=key))
            return {}
        message = (
            f"{key} is set to {count // before * step}, for {counted(step, 'step')}: zckpt assumes "
            "as many samples per step as in the run of --like"
        )
        self.warnings.append(warning("value-assumed", message, subject=key))
        return {key: count // before * step}
