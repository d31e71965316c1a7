"""Declares the options of a conversion, and which of them a target supports.

An option is declared once, as an `Option`: here if several formats share it, else in the folder of
the one engine that supports it. `OPTIONS` of every format lists what its writer supports. The
command line, the functions of Python and the refusals follow from these lists.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypedDict, TypeVar

from msgspec import Struct, field
from msgspec.structs import force_setattr

from ..core.checkpoint.dtypes import OPTIONS as DTYPES
from ..core.checkpoint.facts import MAX_DP
from ..core.checkpoint.inert import is_dotted
from ..errors import WrongOption
from .steps import WRITTEN

FILE_SIZE = 8 << 30
SIZES = "Sizes of the next run (default: the source's)"
"""The section of `--help` with the sizes of a run."""

Renames = Sequence[tuple[str, str]]
"""Pairs of an old and a new name, or of a regular expression and its replacement."""

Value = TypeVar("Value", covariant=True)
GroupDefaults = Mapping[Any, Any] | Sequence[Mapping[str, Any]]
"""Hyper-parameters of param groups, for --group-defaults and --set-group.

A mapping has them by name for all groups, or by number for one group ({"eps": 1e-8, 1:
{"weight_decay": 0.0}}). A sequence has one dictionary per group.
"""


class Option(Struct, Generic[Value], frozen=True, eq=False):
    """An option of conversions: one declaration for Python, the command line and messages.

    name     the keyword argument in Python
    flag     the option on the command line, usually of the same name
    default  the value if the option is not given; `usual` describes it in the help
    help     a sentence without its period
    choices  the allowed values
    kind     how a value is parsed if there are no `choices`: a key of `KINDS` in cli/parameters.py
    check    raises WrongOption for a value that no format accepts
    reason   why other formats lack the option, for the error message
    group    its section of `--help`
    rare     shown only by `--help-all`
    """

    name: str
    default: Value
    help: str
    kind: str = "text"
    choices: tuple[Any, ...] = ()
    usual: str = ""
    metavar: str | None = None
    check: Callable[[Any], None] | None = None
    reason: str = ""
    group: str = "Files"
    rare: bool = False
    flag: str = ""

    def __post_init__(self) -> None:
        force_setattr(self, "flag", self.flag or f"--{self.name.replace('_', '-')}")


def at_least_one(flag: str, hint: str) -> Callable[[int], None]:
    """Returns a function that raises WrongOption for a number below 1.

    `flag` is the option, and `hint` tells the user what to give.
    """

    def check(number: int) -> None:
        if type(number) is bool or not hasattr(number, "__index__") or number < 1:
            raise WrongOption("option-invalid", f"{flag} cannot be {number!r}", hint=hint)

    return check


RANKS = "ranks, at least 1"


def _check_dp(dp: int) -> None:
    at_least_one("--dp", f"give a number of {RANKS}")(dp)
    if dp > MAX_DP:
        raise WrongOption(
            "option-invalid",
            f"--dp cannot be {dp}",
            hint=f"give a number of ranks, at most {MAX_DP}",
        )


def _by_group(defaults: GroupDefaults) -> dict[Any, Any]:
    return dict(defaults) if isinstance(defaults, Mapping) else dict(enumerate(defaults))


def _check_groups(name: str) -> Callable[[GroupDefaults], None]:
    def check(values: GroupDefaults) -> None:
        for key, value in _by_group(values).items():
            numbered = isinstance(key, int) and key >= 0 and isinstance(value, Mapping)
            if not numbered and not isinstance(key, str):
                raise WrongOption(
                    "option-invalid",
                    f"{name} has the key {key!r}",
                    hint="use the name of a hyper-parameter, or a group's number with a dictionary",
                )

    return check


def _check_objects(names: Sequence[str]) -> None:
    for name in [names] if isinstance(names, str) else names:
        if isinstance(names, str) or not is_dotted(name):
            raise WrongOption(
                "option-invalid",
                f"allow_object {names!r} is not a list of names such as my.module.MyClass",
                hint="`zckpt inspect` lists the classes that a checkpoint names",
            )


# -- options that several formats understand


def _number(name: str, help: str, needed: str, usual: str = "", **more: Any) -> Option[int | None]:
    """Declares an option whose value is an integer of at least 1.

    `needed` names what is counted, such as "ranks", for the error message.
    """
    check = at_least_one(f"--{name.replace('_', '-')}", f"give a number of {needed}")
    words = {"kind": "integer", "usual": usual, "check": check, "group": SIZES, **more}
    return Option(name, None, help, **words)


DP = _number("dp", "Data-parallel ranks", RANKS, check=_check_dp)
EP = _number(
    "ep",
    "Expert-parallel ranks",
    RANKS,
    reason="whole experts are written",
)
TP = _number("tp", "Tensor-parallel ranks", RANKS, reason="whole tensors are written")
PP = _number(
    "pp",
    "Pipeline stages",
    "stages, at least 1",
    reason="the complete model is written",
)
SP = _number(
    "sp",
    "How many of the data-parallel ranks share each sequence (Ulysses, ALST)",
    RANKS,
    usual="as in the source, if that number divides --dp",
    rare=True,
    reason="other files do not depend on it",
)
VOCAB_SIZE = _number(
    "vocab_size",
    "Number of tokens of the vocabulary without padding rows; --tp pads it for its ranks",
    "rows",
    usual="as the source states",
    rare=True,
    reason="whole tensors are written",
)
LIKE: Option[str | None] = Option(
    "like",
    None,
    "Give DST the layout of RUN, a checkpoint of the program that will load DST",
    metavar="RUN",
    group="Engine",
)
WEIGHTS_ONLY: Option[bool] = Option(
    "weights_only", False, "Write no optimizer state", kind="switch", group="Weights"
)
DTYPE: Option[str | None] = Option(
    "dtype",
    None,
    "Type of the weights",
    choices=tuple(DTYPES),
    usual="unchanged",
    group="Weights",
)
DIALECT: Option[str | None] = Option(
    "dialect", None, "The variant of the target's format", metavar="KIND", rare=True
)
"""The option `--dialect`, without choices.

A format with several variants adds choices: `replace(DIALECT, choices=...)`.
"""
GROUP_DEFAULTS: Option[GroupDefaults] = Option(
    "group_defaults",
    {},
    "Hyper-parameters that the source does not store, for all groups or group N. May be repeated",
    rare=True,
    kind="pairs",
    metavar="[N:]K=V,...",
    group="Optimizer and steps",
    check=_check_groups("group_defaults"),
)
GROUPS_FROM: Option[str | None] = Option(
    "groups_from",
    None,
    "Use the groups of RUN, which the next program has saved",
    metavar="RUN",
    group="Optimizer and steps",
    reason="it has no optimizer groups",
)
SET_GROUP: Option[GroupDefaults] = Option(
    "set_group",
    {},
    "Replace hyper-parameters of the source, for all groups or group N. May be repeated",
    rare=True,
    kind="pairs",
    metavar="[N:]K=V,...",
    group="Optimizer and steps",
    check=_check_groups("set_group"),
    reason="it has no optimizer groups",
)
OPTIMIZER: Option[str | None] = Option(
    "optimizer",
    None,
    "Store the step where this Adam looks for it: torch, deepspeed-fused-adam, deepspeed-cpu-adam "
    "or apex-fused-adam",
    choices=tuple(WRITTEN),
    usual="as in the source",
    metavar="CLASS",
    group="Optimizer and steps",
    rare=True,
)
MAX_FILE_SIZE: Option[int | None] = Option(
    "max_file_size",
    None,
    "Split safetensors and .distcp files that would be larger than this",
    rare=True,
    kind="size",
    usual="8GiB",
)
ALLOW_OBJECT: Option[Sequence[str]] = Option(
    "allow_object",
    (),
    "If you trust this class: write its objects too. The program that loads the target runs "
    "them. May be repeated",
    rare=True,
    kind="texts",
    metavar="MODULE.NAME",
    check=_check_objects,
    reason="the target has no pickle",
)

# -- options that writers ignore: the source is renamed before it is written

PARAM_NAMES: Option[Sequence[str] | None] = Option(
    "param_names",
    None,
    "A file with the names of the optimizer's parameters in its order, one per line",
    group="Names",
    kind="names",
    metavar="FILE",
)
TIE: Option[Renames] = Option(
    "tie",
    (),
    "A tied weight's second name, which the source lacks, and its name in the source. May be "
    "repeated",
    group="Names",
    rare=True,
    kind="ties",
    metavar="NAME=NAME",
)
RENAME: Option[Renames] = Option(
    "rename",
    (),
    "Rename parameters by re.sub. May be repeated",
    group="Names",
    kind="rules",
    metavar="REGEX=REPL",
)
FAMILY: Option[str | None] = Option(
    "family",
    None,
    "Convert Hugging Face's names and fused weights to Megatron-Core's, or back: llama, qwen3, "
    "mixtral, gpt2 or a .json file",
    group="Names",
    metavar="NAME|FILE[:K=N,...]",
)

# -- options that writers ignore: the source is checked, or loses states, before it is written

ACCEPT_WEIGHTS: Option[bool] = Option(
    "accept_weights", False,
    "Continue if weights differ from the rounded fp32 masters, such as an EMA's weights",
    kind="switch", group="Source", rare=True,
)  # fmt: skip
DROP_STATE: Option[Sequence[str]] = Option(
    "drop_state", (), "Drop this optimizer state. May be repeated",
    kind="texts", metavar="NAME", group="Optimizer and steps",
)  # fmt: skip
FROZEN: Option[Sequence[str]] = Option(
    "frozen", (),
    "Parameters that the program does not train, though its optimizer lists them. May be repeated",
    kind="texts", metavar="GLOB", group="Optimizer and steps", rare=True,
    reason="the target stores frozen parameters as the source does",
)  # fmt: skip
BUFFERS: Option[Sequence[str]] = Option(
    "buffers", (),
    "Tensors that are buffers, if the source does not distinguish buffers from frozen parameters. "
    "May be repeated",
    kind="texts", metavar="GLOB", group="Names", rare=True,
    reason="the target stores buffers and frozen parameters together, so it would change nothing",
)  # fmt: skip
EVERYWHERE: tuple[Option[Any], ...] = (
    PARAM_NAMES, TIE, RENAME, FAMILY, ACCEPT_WEIGHTS, DROP_STATE
)  # fmt: skip
"""Options that apply to every target."""


class Keywords(TypedDict, total=False):
    """The options of this module as keyword arguments, for type checkers and editors."""

    dp: int | None
    ep: int | None
    tp: int | None
    pp: int | None
    vocab_size: int | None
    weights_only: bool
    dtype: str | None
    dialect: str | None
    optimizer: str | None
    group_defaults: GroupDefaults
    groups_from: str | None  # a path
    set_group: GroupDefaults
    max_file_size: int | None  # bytes
    allow_object: Sequence[str]
    param_names: Sequence[str] | None
    tie: Renames  # pairs of a second name and the source's name
    rename: Renames  # pairs of a regular expression and its replacement
    like: str | None  # a path
    family: str | None  # "llama", or "llama:heads=32,kv_heads=8,vocab_size=32000"
    accept_weights: bool
    drop_state: Sequence[str]
    frozen: Sequence[str]
    buffers: Sequence[str]


class Options(Struct, frozen=True):
    """The user's options for a conversion: `options[DP]` is the value of `--dp`, or its default.

    `given` has the options whose values differ from the defaults. `names_read` collects the names
    of options that code has looked up. Raises WrongOption for a value that no format accepts.
    """

    given: tuple[tuple[Option[Any], Any], ...] = ()
    names_read: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        for option, value in self.given:
            if option.choices and value not in option.choices:
                raise WrongOption(
                    "option-invalid",
                    f"{option.flag.lstrip('-')} {value!r} is none of "
                    f"{', '.join(map(str, option.choices))}",
                )
            if option.check is not None:
                option.check(value)

    def __getitem__(self, option: Option[Value]) -> Value:
        for other, value in self.given:
            if other.name == option.name:
                self.names_read.add(option.name)
                result: Value = value
                return result
        return option.default

    @property
    def unread(self) -> list[Option[Any]]:
        """The given options whose values no code has looked up, so they had no effect."""
        return [option for option, _ in self.given if option.name not in self.names_read]

    @property
    def weights_only(self) -> bool:
        return self[WEIGHTS_ONLY]

    @property
    def module_dtype(self) -> str | None:
        """The type that `--dtype` asks for, spelled as in safetensors, such as BF16; or None."""
        dtype = self[DTYPE]
        return None if dtype is None else DTYPES[dtype]

    @property
    def file_size(self) -> int:
        """The largest size in bytes of a safetensors or `.distcp` file: `--max-file-size`."""
        size = self[MAX_FILE_SIZE]
        return FILE_SIZE if size is None else size

    def by_group(self, option: Option[GroupDefaults]) -> dict[Any, Any]:
        """The hyper-parameters that --group-defaults or --set-group gives.

        The dictionary has values for all groups under their names, and values for single groups in
        dictionaries under the groups' numbers.
        """
        return _by_group(self[option])

    def defaults_of(self, group: int, count: int) -> dict[str, Any]:
        """The `--group-defaults` for param group number `group` of the source's `count` groups.

        A value for this group replaces a value for all groups. Raises WrongOption if the user gives
        values for a group that does not exist.
        """
        by_key = self.by_group(GROUP_DEFAULTS)
        numbers = [key for key in by_key if isinstance(key, int)]
        if numbers and max(numbers) >= count:
            raise WrongOption(
                "option-names-nothing",
                f"--group-defaults gives values for group {max(numbers)}, but the source has "
                f"{count} group{'s' if count > 1 else ''}",
                hint="groups are numbered from 0: see `zckpt inspect`",
            )
        shared = {key: value for key, value in by_key.items() if isinstance(key, str)}
        return {**shared, **by_key.get(group, {})}

    def defaults(self, count: int) -> list[dict[str, Any]]:
        """The values of `--group-defaults` for each of `count` groups.

        Raises WrongOption if values are given for a group that the source does not have.
        """
        return [self.defaults_of(group, count) for group in range(count)]


def refuse(
    options: Options,
    target: str,
    understood: Sequence[Option[Any]],
    reasons: Mapping[str, str],
) -> None:
    """Raises WrongOption for an option, or a value of it, that the target does not support.

    `target` is the target's name in the error, such as `--to dcp`. `understood` are the options of
    its writer. `reasons` state, by an option's name, why it does not apply to the target.
    """
    known_options = {option.name: option for option in (*understood, *EVERYWHERE)}
    for option, value in options.given:
        if option.name not in known_options:
            reason = reasons.get(option.name) or option.reason
            raise WrongOption(
                "option-not-applicable",
                f"{option.flag} does not apply to {target}",
                hint=f"leave it out: {reason}" if reason else "leave it out",
            )
        choices = known_options[option.name].choices
        if choices and value not in choices:
            raise WrongOption(
                "option-not-applicable",
                f"{option.flag} {value} does not apply to {target}",
                hint=f"its {option.name}s are {', '.join(map(str, choices))}",
            )
