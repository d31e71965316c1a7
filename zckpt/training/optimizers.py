"""The hyper-parameters and states of each known optimizer (torch 2.13, DeepSpeed 0.19.8).

If a source does not store a hyper-parameter that the target needs, and the optimizer is in
`OPTIMIZERS`, the default is used, with a warning. The optimizer's name comes from a file, or is
inferred from its states by `SIGNATURES`. Without a name, its groups stay unchanged. Optimizers that
store their step in a special place are in `WRITTEN` of steps.py.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from msgspec import Struct, field

from ..core.checkpoint.manifest import Manifest
from ..core.checkpoint.weights import is_optimizers
from ..errors import WrongOption

ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
TORCH = {"maximize": False, "foreach": None, "capturable": False, "differentiable": False}
FUSED = {"maximize": False, "foreach": None, "differentiable": False, "fused": None}
IMPLEMENTATION = re.compile(r"^(deepspeed|fused|cpu)+")
MOMENTS = ("exp_avg", "exp_avg_sq")


class KnownOptimizer(Struct, frozen=True):
    """The states and the default hyper-parameters of one optimizer class.

    family      optimizers of one family have the same states, so one can continue another
    defaults    of the hyper-parameters; if empty, zckpt does not complete the groups
    states      the tensors that each parameter needs, of the parameter's shape
    numbers     the states of one number that each parameter needs
    """

    family: str | None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    states: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()


_OF_ADAM = {**ADAM, "amsgrad": False, **TORCH, "fused": None, "decoupled_weight_decay": False}
_OF_ADAMW = {**_OF_ADAM, "weight_decay": 1e-2, "decoupled_weight_decay": True}
_OF_NADAM = {"momentum_decay": 4e-3, "decoupled_weight_decay": False, **TORCH}
_OF_RMSPROP = {"lr": 1e-2, "momentum": 0, "alpha": 0.99, "eps": 1e-8, "centered": False}
_OF_ADAGRAD = {"lr": 1e-2, "lr_decay": 0, "eps": 1e-10, "initial_accumulator_value": 0}
_OF_SGD = {"lr": 1e-3, "momentum": 0, "dampening": 0, "nesterov": False}
OPTIMIZERS: dict[str, KnownOptimizer] = {
    "adam": KnownOptimizer("adam", _OF_ADAM, MOMENTS),
    "adamw": KnownOptimizer("adam", _OF_ADAMW, MOMENTS),
    "nadam": KnownOptimizer("nadam", {**ADAM, "lr": 2e-3, **_OF_NADAM}, MOMENTS, ("mu_product",)),
    "rmsprop": KnownOptimizer(
        "rmsprop", {**_OF_RMSPROP, "weight_decay": 0, **TORCH}, ("square_avg",)
    ),
    "adagrad": KnownOptimizer("adagrad", {**_OF_ADAGRAD, "weight_decay": 0, **FUSED}, ("sum",)),
    "sgd": KnownOptimizer("sgd", {**_OF_SGD, "weight_decay": 0, **FUSED}),
    "lion": KnownOptimizer(
        "lion", {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0}, ("exp_avg",)
    ),
    "muon": KnownOptimizer("muon"),
}
"""The known optimizers by `plain_name`: in lower case, without words such as "Fused"."""
UNKNOWN = KnownOptimizer(None)


def known_optimizer(name: str) -> KnownOptimizer:
    """The states and hyper-parameters of the optimizer with this `plain_name`.

    `UNKNOWN` if zckpt does not know it.
    """
    return OPTIMIZERS.get(name, UNKNOWN)


def plain_name(name: str) -> str:
    """An optimizer's name in lower case, without words such as "fused" and "cpu"."""
    return IMPLEMENTATION.sub("", name.lower())


def keep_other_states(ours: str | None, theirs: str | None) -> bool:
    """Whether two optimizers store different states, so that one cannot continue the other.

    They are given by name. Optimizers of one family (see `KnownOptimizer`) store the same states.
    False if one has no name.
    """
    names = [plain_name(name or "") for name in (ours, theirs)]
    families = [known_optimizer(name).family or name for name in names]
    return all(families) and families[0] != families[1]


class Signature(Struct, frozen=True):
    """The states and hyper-parameters by which an unnamed optimizer is recognized.

    states, other_states    the states that a parameter must have, and those that it may have
    needed, keys            the keys that a group must have, and those that it may have

    Another state or key excludes this optimizer, except keys that programs add (`OF_PROGRAMS`).
    """

    name: str
    states: frozenset[str]
    keys: frozenset[str]
    other_states: frozenset[str] = frozenset()
    needed: frozenset[str] = frozenset()

    def fits(self, states: frozenset[str], group: frozenset[str]) -> bool:
        """Whether a parameter's state keys and its group's keys are those of this optimizer."""
        return (
            self.states <= states <= self.states | self.other_states
            and self.needed <= group <= self.keys | OF_PROGRAMS
        )


def _signature(
    name: str,
    states: Iterable[str],
    keys: Iterable[str] = (),
    other_states: Iterable[str] = (),
    needed: Iterable[str] = (),
) -> Signature:
    """Describes how to recognize the optimizer `name` by its states and hyper-parameters.

    `keys` need not repeat `needed`, or the optimizer's hyper-parameters in `OPTIMIZERS`.
    """
    every = frozenset((*known_optimizer(name.lower()).defaults, *keys, *needed))
    return Signature(name, frozenset(states), every, frozenset(other_states), frozenset(needed))


OF_PROGRAMS = frozenset((
    "params", "param_names", "step", "name", "layer_id", "lr_scale", "no_weight_decay", "use_muon",
    "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr",  # of schedulers
    "moe",  # of DeepSpeed's experts
    "lr_mult", "wd_mult", "pre_lr_mult", "pre_wd_mult", "is_expert_parallel", "is_decoupled_lr",
    "default_config",  # of Megatron-Core
))  # fmt: skip
"""Keys that programs, schedulers and engines add to groups; they identify no optimizer."""

MUON = (
    "lr", "weight_decay", "momentum", "nesterov", "eps", "betas", "adjust_lr_fn", "ns_steps",
    "ns_coefficients", "ns_method",
)  # fmt: skip
SIGNATURES = (
    _signature("NAdam", (*MOMENTS, "mu_product")),
    # torch's RAdam lacks the key `amsgrad`, which torch's Adam has
    _signature("RAdam", MOMENTS, (*ADAM, *TORCH), needed=("decoupled_weight_decay", "maximize")),
    # DeepSpeed's CPULion keeps `exp_avg_sq` too (0.19.8, ops/lion/cpu_lion.py)
    _signature("Lion", MOMENTS, needed=("betas",)),
    # DeepSpeed's, Apex's, TransformerEngine's and Megatron's have `bias_correction`
    _signature("Adam", MOMENTS, ("bias_correction",), other_states=("max_exp_avg_sq",)),
    _signature("Adadelta", ("square_avg", "acc_delta"), ("lr", "rho", *ADAM, *TORCH)),
    _signature("RMSprop", ("square_avg",), other_states=("momentum_buffer", "grad_avg")),
    _signature("Adagrad", ("sum",)),
    _signature("Muon", ("momentum_buffer",), MUON, needed=("ns_steps",)),
    _signature("Muon", ("momentum_buffer",), MUON, needed=("use_muon",)),
    _signature("SGD", ("momentum_buffer",)),
    _signature("SGD", (), needed=("dampening",)),
    _signature("Lion", ("exp_avg",), TORCH),
)


def strange_to_adam(groups: Iterable[Mapping[str, Any]]) -> list[str]:
    """The keys in parameter groups that neither Adam nor a known program puts there, sorted."""
    known_keys = OF_PROGRAMS.union(*(each.keys for each in SIGNATURES if each.name == "Adam"))
    return sorted({str(key) for group in groups for key in group} - known_keys)


LAZY = frozenset(("sgd", "muon"))
"""Optimizers that make missing states of a parameter anew, so that states may be missing."""


def needed_states(name: str) -> frozenset[str]:
    """The states that an optimizer must have for each updated parameter, such as `exp_avg`."""
    plain = plain_name(name)
    plain = known_optimizer(plain).family or plain
    signatures = [each for each in SIGNATURES if each.name.lower() == plain and plain not in LAZY]
    return frozenset(key for each in signatures for key in each.states | each.other_states)


def infer_optimizer(keys: Iterable[str], group: Mapping[str, Any] | None) -> str | None:
    """Infers an optimizer's name from the keys of a parameter's state and of its group.

    None if no known optimizer has exactly these keys.
    """
    states, hyper = frozenset(keys) - {"step"}, group or {}
    name = next((each.name for each in SIGNATURES if each.fits(states, frozenset(hyper))), None)
    return "AdamW" if name == "Adam" and hyper.get("decoupled_weight_decay") else name


def name_of_groups(
    states: Sequence[Collection[str]], groups: Sequence[Mapping[str, Any]] | None
) -> str | None:
    """Infers the names of the optimizers of all groups, such as "Muon, AdamW".

    None if one is unknown.

    `states` are the keys of each group's states. If a group has no states, it is assumed to have
    the same optimizer as the other groups. Without groups, all states belong to one optimizer.
    """
    if groups is None:
        return infer_optimizer({key for keys in states for key in keys}, None)
    pairs = list(zip(states, groups, strict=False))
    with_states = [pair for pair in pairs if pair[0]] or pairs
    names = dict.fromkeys(infer_optimizer(*pair) for pair in with_states)
    return None if None in names else ", ".join(map(str, names)) or None


# torch_optimizer's and pytorch_optimizer's Shampoo, Alice; L and R, QL and QR of small programs
OF_MATRICES = re.compile(r"(inv_)?pre_?cond(itioner)?_?\d*|GG|[QULR]|Q[LR]")


def is_of_axis(key: str, shapes: Iterable[Sequence[int]]) -> bool:
    """Whether an optimizer state is a preconditioner for one axis of square matrices, by its `key`.

    `shapes` are the shapes of the parameters that have the state; if empty, only the key counts.
    False if a parameter is no square matrix.
    """
    # a preconditioner of a square matrix has the parameter's shape, but its elements do not belong
    # to the parameter's; one of another parameter is recognized by its own shape
    is_square = all(len(shape) == 2 and shape[0] == shape[1] for shape in shapes)
    return is_square and OF_MATRICES.fullmatch(key) is not None


def is_of_muon(group: Mapping[str, Any]) -> bool:
    """Whether a group belongs to a Muon optimizer, even if Adam updates it (`use_muon: False`)."""
    return bool({"use_muon", "ns_steps"} & group.keys())


def likely_optimizer(source: Manifest) -> str:
    """Guesses the source's optimizer; returns its `plain_name`, such as "adamw", or "".

    Without optimizer states, AdamW is assumed if the groups' keys allow it.
    """
    if source.optimizer is not None:
        return plain_name(source.optimizer)
    keys_of_others = {"amsgrad", "bias_correction"}  # of torch's Adam; of DeepSpeed's and Apex's
    is_adam = all(
        "lr" not in group or keys_of_others & group.keys() for group in source.groups or ()
    )
    has_states = any(map(is_optimizers, source.slots)) or bool(source.states.of_form("number"))
    return "adamw" if is_adam and not has_states else ""


ZEROS = frozenset(
    (
        *(*MOMENTS, "max_exp_avg_sq", "square_avg", "grad_avg", "acc_delta"),
        *("momentum_buffer", "sum"),
    )
)
"""Optimizer states that are zeros before the first update."""
NUMBERS = {"mu_product": 1.0}
"""States of one number that do not begin with zero, with their first values."""


def begins_with_zeros(key: str, group: Mapping[str, Any]) -> bool:
    """Whether an optimizer state is all zeros before the first update; False if unknown.

    `key` is the state, `group` the hyper-parameters.
    """
    # SGD sets its first momentum to the gradient: without dampening, as if it began with zeros
    unlike = {"sum": "initial_accumulator_value", "momentum_buffer": "dampening"}
    return key in ZEROS and not group.get(unlike.get(key, ""))


def check_moments(named: str | None, states: Collection[str]) -> None:
    """Raises WrongOption if `--optimizer` names an Adam, but the source has no states of Adam."""
    if named is not None and not set(MOMENTS) <= set(states):
        raise WrongOption(
            "option-not-applicable",
            f"--optimizer {named} is an Adam, which needs exp_avg and exp_avg_sq; the source has "
            f"{', '.join(sorted(states)) or 'none'}",
            hint="leave out --optimizer, or write only the weights: --weights-only",
        )
