"""What each optimizer keeps: hyper-parameters of its groups, and states of its parameters.

torch 2.13, DeepSpeed 0.19.8. If a source did not store a hyper-parameter, its default is taken,
with a warning. A new optimizer needs a line in `OPTIMIZERS`; one in `infer_optimizer`, if its state
can be recognized; one in `WRITTEN` of steps.py, if it keeps its step in a place of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ..core.annotations import TYPE_CHECKING, Any
from ..core.facts import FlatBufferEngine
from ..core.inert import to_json
from ..core.manifest import Manifest
from ..core.regex import Regex
from ..core.values import field, valueclass
from ..errors import listed

if TYPE_CHECKING:
    from .options import Options

ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
TORCH = {"maximize": False, "foreach": None, "capturable": False, "differentiable": False}
IMPLEMENTATION = Regex(r"^(deepspeed|fused|cpu)+")
MOMENTS = ("exp_avg", "exp_avg_sq")


@valueclass
class KnownOptimizer:
    """What is known of one optimizer.

    `family` names optimizers that have the same states: one may go on where another has stopped.
    `defaults` are those of the hyper-parameters; none if zckpt completes no group of it. It cannot
    go on without `states`, which are tensors of a parameter's shape, and `numbers`.
    """

    family: str | None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    states: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()


OPTIMIZERS: dict[str, KnownOptimizer] = {
    "adam": KnownOptimizer(
        "adam",
        {**ADAM, "amsgrad": False, **TORCH, "fused": None, "decoupled_weight_decay": False},
        MOMENTS,
    ),
    "adamw": KnownOptimizer(
        "adam",
        {
            **ADAM,
            "weight_decay": 1e-2,
            "amsgrad": False,
            **TORCH,
            "fused": None,
            "decoupled_weight_decay": True,
        },
        MOMENTS,
    ),
    "nadam": KnownOptimizer(
        "nadam",
        {
            **ADAM,
            "lr": 2e-3,
            "momentum_decay": 4e-3,
            "decoupled_weight_decay": False,
            **TORCH,
        },
        MOMENTS,
        ("mu_product",),
    ),
    "rmsprop": KnownOptimizer(
        "rmsprop",
        {
            "lr": 1e-2,
            "momentum": 0,
            "alpha": 0.99,
            "eps": 1e-8,
            "centered": False,
            "weight_decay": 0,
            "capturable": False,
            "foreach": None,
            "maximize": False,
            "differentiable": False,
        },
        ("square_avg",),
    ),
    "adagrad": KnownOptimizer(
        "adagrad",
        {
            "lr": 1e-2,
            "lr_decay": 0,
            "eps": 1e-10,
            "weight_decay": 0,
            "initial_accumulator_value": 0,
            "foreach": None,
            "maximize": False,
            "differentiable": False,
            "fused": None,
        },
        ("sum",),
    ),
    "sgd": KnownOptimizer(
        "sgd",
        {
            "lr": 1e-3,
            "momentum": 0,
            "dampening": 0,
            "weight_decay": 0,
            "nesterov": False,
            "maximize": False,
            "foreach": None,
            "differentiable": False,
            "fused": None,
        },
    ),
    "lion": KnownOptimizer(
        "lion", {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0}, ("exp_avg",)
    ),
    "muon": KnownOptimizer("muon"),
}
"""By the optimizer's name in lower case, without the words for its implementation."""
UNKNOWN = KnownOptimizer(None)


def known_optimizer(name: str) -> KnownOptimizer:
    """What is known of an optimizer, by its `plain_name`; nothing of one that is not listed."""
    return OPTIMIZERS.get(name, UNKNOWN)


def plain_name(name: str) -> str:
    """An optimizer's name in lower case, without the words for its implementation."""
    return IMPLEMENTATION.sub("", name.lower())


def infer_optimizer(keys: Iterable[str], group: Mapping[str, Any] | None) -> str | None:
    """The optimizer's usual name from the keys of its state and of a group; None if unsure."""
    slots, hyper = set(keys) - {"step"}, group or {}
    if "mu_product" in slots:
        return "NAdam"
    if {"exp_avg", "exp_avg_sq"} <= slots:
        # RAdam has the same state; its groups lack `amsgrad`, which Adam's have
        if {"decoupled_weight_decay", "maximize"} <= hyper.keys() and "amsgrad" not in hyper:
            return "RAdam"
        return "AdamW" if hyper.get("decoupled_weight_decay") else "Adam"
    if "square_avg" in slots:
        return "Adadelta" if "acc_delta" in slots else "RMSprop"
    if slots == {"sum"}:
        return "Adagrad"
    if slots == {"momentum_buffer"}:
        return "Muon" if {"use_muon", "ns_steps"} & hyper.keys() else "SGD"
    if slots == {"exp_avg"}:
        return "Lion"
    return "SGD" if not slots and "dampening" in hyper else None


def are_inferred(source: Manifest) -> bool:
    """Whether the hyper-parameters come from a config and a scheduler, not from groups.

    DeepSpeed's elastic files store none (0.19.8).
    """
    return isinstance(source.engine, FlatBufferEngine) and source.engine.elastic


def are_given(source: Manifest) -> bool:
    """Whether the user has stated the hyper-parameters of a source that stores none."""
    return isinstance(source.engine, FlatBufferEngine) and source.engine.given


def given_groups(source: Manifest, options: Options) -> list[dict[str, Any]]:
    """Every group, completed with `--group-defaults`.

    Stored hyper-parameters take precedence over `--group-defaults`, inferred ones do not.
    """
    count = 1 + max((item.group or 0 for item in source.parameters.values()), default=0)
    groups: Sequence[dict[str, Any]] = source.groups or [{}] * count
    pairs = zip(groups, options.defaults(len(groups)), strict=True)
    if are_inferred(source):
        return [{**group, **own} for group, own in pairs]
    return [{**own, **group} for group, own in pairs]


def unused_defaults(source: Manifest, options: Options) -> list[str]:
    """A warning about `--group-defaults` that no group takes: the source stores other values."""
    if not source.groups or are_inferred(source):
        return []
    pairs = list(zip(source.groups, options.defaults(len(source.groups)), strict=True))
    unused = {
        key: group[key]
        for group, own in pairs
        for key, value in own.items()
        if key in group and to_json(group[key]) != to_json(value)
        if all(key in each for each, theirs in pairs if key in theirs)
    }
    if not unused:
        return []
    stored = ", ".join(f"{key}={value}" for key, value in unused.items())
    return [
        f"--group-defaults {listed(list(unused))} is not used: the source stores {stored}. Change "
        "it in the program that resumes"
    ]


def torch_groups(source: Manifest, options: Options) -> tuple[list[dict[str, Any]], list[str]]:
    """Every group with all keys of torch's own optimizer, and warnings about assumed values.

    Adam of DeepSpeed and Apex decays weights as AdamW does, unless its config says otherwise.
    """
    groups = given_groups(source, options)
    name = plain_name(source.optimizer or _likely(source.groups))
    needed = dict(known_optimizer(name).defaults)
    if name == "adam" and any("bias_correction" in group for group in groups):
        needed["decoupled_weight_decay"] = _adam_w_mode(source)
    assumed = {
        key: value
        for key, value in needed.items()
        if key in ("lr", "betas", "eps", "weight_decay", "momentum")
        and any(key not in group for group in groups)
    }
    warnings = []
    if assumed:
        values = ", ".join(f"{key}={value}" for key, value in assumed.items())
        warnings.append(
            f"hyper-parameters that the source does not hold are {name}'s defaults: {values}"
        )
    return [_typed({**needed, **group}) for group in groups], warnings


def _likely(groups: Sequence[Mapping[str, Any]] | None) -> str:
    """The optimizer by its groups, if its states do not show it: AdamW unless they contradict."""
    own = {"amsgrad", "bias_correction"}  # of torch's Adam; of DeepSpeed's and Apex's
    is_adam = all("lr" not in group or own & group.keys() for group in groups or ())
    return "AdamW" if is_adam else "unknown"


def _adam_w_mode(source: Manifest) -> bool:
    params: Any = source.engine.config if isinstance(source.engine, FlatBufferEngine) else {}
    for key in ("optimizer", "params", "adam_w_mode"):
        params = params.get(key) if isinstance(params, dict) else None
    return params is not False


def _typed(group: dict[str, Any]) -> dict[str, Any]:
    """`betas` as a tuple, as in torch; it is a list if it comes from a JSON config."""
    return {
        key: tuple(value) if key == "betas" and isinstance(value, Sequence) else value
        for key, value in group.items()
    }
