"""A source of another engine, with what only a run of Megatron-Core knows: `--like RUN`.

    from RUN       keys, axes, arguments, objects of modules, optimizers and their groups
    from source    weights, masters, moments, the step, and the HYPER of every group

The result is a manifest like one of Megatron-Core's, so that the writer needs no second way. Both
must have the same parameters with the same shapes. No tensor of RUN's model arrives, and no state
of RUN's ranks: the next run draws its random numbers anew.

Turned down: keys and arguments without RUN. They follow from the specification of the model and
from the program, and no other engine's file has these.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from ...core import sources
from ...core.inert import Foreign, unwrapped
from ...core.manifest import Entry, Manifest, Parameter
from ...core.weights import is_optimizers, states_by_weight
from ...errors import (
    InconsistentCheckpoint,
    MissingData,
    NotACheckpoint,
    UnsupportedCheckpoint,
    WrongOption,
    counted,
    listed,
)
from ...naming.families.layouts import with_rows
from ...training.hyperparameters import given_groups, torch_groups
from ...training.objects import without_others
from ...training.optimizers import strange_to_adam
from ...training.options import ALLOW_OBJECT, Options
from . import FORMAT
from .common import arguments, optimizers_of
from .groups import decay_multiplier, groups_of
from .names import with_plain_norms
from .optimizers import OF_WRAPPER
from .programs import NEMO, TRAIN_STATE
from .read import read
from .vocabulary import WEIGHTS as VOCABULARY

HYPER = ("lr", "betas", "eps", "weight_decay")
OF_MODULES = "._extra_state/shard_"
OF_STATES = "F32"  # the type of masters and moments in Megatron-Core's files

Group = dict[str, Any]


def as_in_run(source: Manifest, path: str, options: Options) -> tuple[Manifest, dict[str, str]]:
    """The source with the keys, arguments and groups of the run at `path`; the types of its model.

    The types are by the names of weights and buffers. The parameters have the order and the groups
    of that run. Raises the errors of `read`, MissingData (a parameter, a shape, a state or a
    hyper-parameter does not fit), InconsistentCheckpoint (the members of one group differ),
    UnsupportedCheckpoint (a state of another type or shape than Megatron-Core's).
    """
    with sources.watching() as watch:
        try:
            like = read(path)
        except NotACheckpoint as error:
            raise NotACheckpoint(
                f"--like {path} is no checkpoint of Megatron-Core",
                hint="give a directory that the next run has saved, such as run/iter_0000001",
            ) from error
        beside = [item.path for item in like.siblings]
        like = replace(like, fingerprints=watch.of((*like.files, *beside)))
    like = without_others(like, FORMAT.objects or (), options[ALLOW_OBJECT])
    types = {entry.parameter: entry.dtype for entry in like.slots.get("param", ())}
    return _Run(source, like, options).manifest(), types


class _Run:
    """The run of `--like`, and what the source has for it."""

    def __init__(self, source: Manifest, like: Manifest, options: Options) -> None:
        self.source = source
        self.like = like
        self.options = options
        self.warnings: list[str] = []
        self.kept: dict[str, Any] = like.state["megatron"]
        self.common: dict[Any, Any] = self.kept["common"]
        if not self.kept["keys"]:
            raise WrongOption(
                f"--like {like.root} is not of torch_dist, and zckpt does not know the keys of all "
                "its modules",
                hint="load it in Megatron-LM and save it with --ckpt-format torch_dist",
            )
        if self.kept.get("program") == NEMO:
            raise UnsupportedCheckpoint(
                f"--like {like.root} is of NeMo, whose counters of a run zckpt cannot write anew",
                hint="give a run of Megatron-LM or Megatron-Bridge",
            )
        self.states = not options.weights_only and any(
            is_optimizers(entry.slot) for entry in source.entries.values()
        )
        self.owners = self._owners()

    def manifest(self) -> Manifest:
        source, like = self.source, self.like
        entries = {
            entry.name: entry
            for entry in like.entries.values()
            if entry.slot == "state" and entry.name.startswith("megatron.")
        }
        of_owner: dict[str, list[Entry]] = {}
        for entry in source.entries.values():
            if entry.slot != "state":
                of_owner.setdefault(entry.parameter, []).append(entry)
        for name, owner in self.owners.items():
            for entry in of_owner[owner]:
                own = self._with_rows(entry, name)
                entries[own.name] = own
        if self.states:
            self._check_states(entries)
        parameters = {
            name: self._parameter(name) for name in like.parameters if name in self.owners
        }
        state = {key: value for key, value in source.state.items() if key != "megatron"}
        objects = {
            name: value
            for name, value in sorted(self.kept["objects"].items())
            if OF_MODULES in name
        }
        self._warn_of(objects)
        state["megatron"] = {**self.kept, "objects": objects, "common": self._common()}
        beside = [
            item for item in like.siblings if item.name != TRAIN_STATE
        ]  # it counts RUN's steps
        left_out = [f"--like: {line}" for line in like.left_out if not line.endswith("directory")]
        if lost := strange_to_adam(source.groups or ()) if self.states else []:
            left_out.append(f"{listed(lost)} of the optimizer's groups: Adam has no such thing")
        if "megatron" in source.state:
            left_out.append(
                "megatron: the arguments and objects of the source, for those of --like"
            )
        return replace(
            source,
            source={**source.source, "tag": None},
            entries=entries,
            parameters=parameters,
            buffers=like.buffers,
            groups=like.groups,
            replicas=(),
            siblings=(*source.siblings, *beside),
            state=state,
            left_out=(*source.left_out, *left_out),
            warnings=(*source.warnings, *self.warnings),
            fingerprints={**like.fingerprints, **source.fingerprints},
        )

    # -- parameters

    def _owners(self) -> dict[str, str]:
        """The source's name of every weight and buffer of the run; raises MissingData."""
        source, like = self.source, self.like
        known = {with_plain_norms(name): name for name in (*source.parameters, *source.buffers)}
        tied = {alias: name for name, item in source.parameters.items() for alias in item.aliases}
        wanted = [*like.parameters, *like.buffers]
        owners = {
            name: owner for name in wanted if (owner := known.get(name, tied.get(name))) is not None
        }
        lost = [name for name in wanted if name not in owners]
        strangers = [name for name in known.values() if name not in owners.values()]
        if lost or strangers:
            sides = {"only the source has": strangers, "only --like has": lost}
            text = "; ".join(f"{what} {listed(names, 4)}" for what, names in sides.items() if names)
            raise MissingData(
                f"the source and --like {like.root} have different parameters: {text}",
                hint="names of Hugging Face need --family, other names --rename REGEX=REPL",
            )
        shapes = self._shapes()
        wrong = [
            f"{name} ({_shape(shapes[owner])} and {_shape(self._wanted(name))})"
            for name, owner in owners.items()
            if not self._fits(name, shapes[owner])
        ]
        if wrong:
            raise MissingData(
                f"these have other shapes in the source than in --like {like.root}: "
                f"{listed(wrong, 4)}",
                hint="give a run of the same model; q, k, v and gate, up are packed by --family",
            )
        return owners

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of the source's weights and buffers."""
        shapes = {name: item.shape for name, item in self.source.parameters.items()}
        for name in self.source.buffers:
            shapes[name] = self.source.entries[f"{name}/param"].shape
        return shapes

    def _wanted(self, name: str) -> tuple[int, ...]:
        return self.like.entries[f"{name}/param"].shape

    def _fits(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether shapes are the same, or the run has more rows which only pad the vocabulary."""
        wanted = self._wanted(name)
        if shape == wanted:
            return True
        used = (self.kept.get("vocabulary") or {}).get("used") or 0
        pads = name in VOCABULARY and shape[1:] == wanted[1:]
        return pads and used <= shape[0] < wanted[0]

    def _with_rows(self, entry: Entry, name: str) -> Entry:
        """The entry under the run's name, and with as many rows."""
        full = f"{name}/{entry.slot}"
        wanted = self._wanted(name)
        if entry.shape == wanted:
            return replace(entry, name=full)
        if not self._fits(name, entry.shape) or entry.mean:
            raise UnsupportedCheckpoint(
                f"{entry.name} has the shape {_shape(entry.shape)}, its weight {_shape(wanted)}: "
                "Megatron-Core's states have the shape of the weight"
            )
        if entry.slot == "param":
            self.warnings.append(
                f"{name} has {counted(entry.shape[0], 'row')}, in the run of --like {wanted[0]}: "
                "the others are zeros"
            )
        return replace(with_rows(entry, wanted[0]), name=full)

    def _parameter(self, name: str) -> Parameter:
        like, own = self.like.parameters[name], self.source.parameters[self.owners[name]]
        return replace(own, shape=like.shape, group=like.group, aliases=like.aliases)

    # -- the optimizer

    def _check_states(self, entries: Mapping[str, Entry]) -> None:
        """Raises unless both have the same states of the same weights; warns of wide weights."""
        like = self.like
        if like.groups is None:
            raise UnsupportedCheckpoint(
                f"--like {like.root} has no parameter groups whose members are known",
                hint="give a run that has saved its optimizer, or add --weights-only",
            )
        ours, theirs = (states_by_weight(each.values()) for each in (entries, like.entries))
        for name in self.owners:
            if ours.get(name) != theirs.get(name):
                raise MissingData(
                    f"{name} has the states {_listed(ours.get(name))} in the source, and "
                    f"{_listed(theirs.get(name))} in --like {like.root}",
                    hint="both must have the same optimizer and train the same weights, or add "
                    "--weights-only",
                )
        for entry in entries.values():
            if is_optimizers(entry.slot) and entry.dtype != OF_STATES:
                raise UnsupportedCheckpoint(
                    f"{entry.name} is of type {entry.dtype}: Megatron-Core's states are F32",
                    hint="add --weights-only",
                )
        wide = [
            name
            for name in ours
            if f"{name}/master" not in entries and entries[f"{name}/param"].dtype != OF_STATES
        ]
        if wide:
            self.warnings.append(
                f"the source has no fp32 masters of {counted(len(wide), 'weight')}, such as "
                f"{wide[0]}: the masters are the weights, widened"
            )

    def _groups(self) -> list[Group]:
        """The run's groups with the source's hyper-parameters."""
        groups = given_groups(self.source, self.options)
        self._warn_of_another_adam()
        chosen: dict[int, tuple[str, Group]] = {}
        for name, item in self.like.parameters.items():
            own = self.source.parameters[self.owners[name]]
            if item.group is None or not own.trainable:
                continue
            group = groups[own.group or 0]
            if lost := [key for key in HYPER if key not in group]:
                raise MissingData(
                    f"the source does not state {listed(lost)} of {name}",
                    hint=f"give it: --group-defaults {','.join(f'{key}=...' for key in lost)}",
                )
            hyper = {key: unwrapped(group[key]) for key in HYPER}
            first, known = chosen.setdefault(item.group, (name, hyper))
            if known != hyper:
                wrong = [key for key in HYPER if known[key] != hyper[key]]
                raise InconsistentCheckpoint(
                    f"{first} and {name} are in one group of the run of --like, but the source "
                    f"has another {listed(wrong)} for each",
                    hint="give a run whose groups are those of the source",
                )
        result = []
        for number, group in enumerate(groups_of(self.common)):
            name, hyper = chosen.get(number, ("", {}))
            if hyper.get("weight_decay") and not decay_multiplier(group):
                self.warnings.append(
                    f"the source decays the weights of a group with wd_mult 0, such as {name}: "
                    "Megatron-LM's scheduler will set its weight_decay to 0"
                )
            result.append({**group, **hyper})
        return result

    def _warn_of_another_adam(self) -> None:
        """Options of the optimizer that no hyper-parameter of Megatron-Core's groups states."""
        for group in torch_groups(self.source, self.options)[0]:
            if group.get("weight_decay") and group.get("decoupled_weight_decay") is False:
                self.warnings.append(
                    "the source's Adam adds weight decay to gradients; Megatron-Core's decays "
                    "weights, as AdamW does, unless its decoupled_weight_decay is false"
                )
                break
        for key, usual in (("bias_correction", True), ("amsgrad", False), ("maximize", False)):
            values = [unwrapped(group[key]) for group in self.source.groups or () if key in group]
            if any(value is not usual and value != usual for value in values):
                self.warnings.append(
                    f"the source's optimizer has {key}={not usual}, Megatron-Core's {usual}"
                )

    # -- the common state

    def _common(self) -> dict[Any, Any]:
        """The run's common state with the source's step, and counters that go with it."""
        common = dict(self.common)
        step, before = self.source.step, common.get("iteration")
        if self.states:
            first = {k: v for k, v in optimizers_of(common)[0].items() if k in OF_WRAPPER}
            common["optimizer"] = {**first, "optimizer": {"param_groups": self._groups()}}
            if "grad_scaler" in first:
                self.warnings.append("grad_scaler, the loss scale, is that of --like")
        if step is None:
            return common
        common["iteration"] = int(step)
        args = arguments(common)
        scheduler = common.get("opt_param_scheduler")
        counts: dict[str, int] = {}
        if isinstance(scheduler, dict) and type(scheduler.get("num_steps")) is int:
            counts["num_steps"] = scheduler["num_steps"]
        if type(args.get("consumed_train_samples")) is int:
            counts["consumed_train_samples"] = args["consumed_train_samples"]
        scaled = {key: _scaled(count, before, int(step)) for key, count in counts.items()}
        for key, count in scaled.items():
            self.warnings.append(
                f"{key} is {counts[key]} as in --like: its samples per step are unknown"
                if count is None
                else f"{key} is {count}: {counted(int(step), 'step')}, each with as many samples "
                "as a step of --like"
            )
        if isinstance(scheduler, dict) and scaled.get("num_steps") is not None:
            common["opt_param_scheduler"] = {**scheduler, "num_steps": scaled["num_steps"]}
        if isinstance(common.get("args"), Foreign):
            changes: dict[str, Any] = {"iteration": int(step)} if "iteration" in args else {}
            if (samples := scaled.get("consumed_train_samples")) is not None:
                changes["consumed_train_samples"] = samples
            common["args"] = replace(common["args"], state={**args, **changes})
        return common

    def _warn_of(self, objects: Mapping[str, Any]) -> None:
        """Objects of modules that are not empty, such as the scales of 8-bit floats."""
        full = [name for name, value in objects.items() if value not in ([None], None)]
        if full:
            self.warnings.append(f"extra states of modules are those of --like: {listed(full, 3)}")


def _scaled(count: int, before: Any, step: int) -> int | None:
    """Samples after `step` steps, if a run had `count` after `before`; None if that is no rate."""
    if type(before) is not int or before < 1 or count % before:
        return None
    return count // before * step


def _listed(slots: set[str] | None) -> str:
    return listed(sorted(slots)) if slots else "none"


def _shape(shape: tuple[int, ...]) -> str:
    return str(list(shape))
