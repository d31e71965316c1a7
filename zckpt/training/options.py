"""The options of a conversion, and which of them a format accepts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, field
from dataclasses import fields as dataclass_fields
from typing import Any

from ..core.dtypes import OPTIONS as DTYPES
from ..errors import WrongOption
from .steps import WRITTEN

MAX_DP = 1 << 16
FILE_SIZE = 8 << 30
DCP_LAYOUTS = ("nested", "flat")
DIALECTS = ("hdf5", "l2", "safetensors", "accelerate")
OPTIMIZERS = tuple(WRITTEN)


@dataclass(frozen=True, slots=True)
class Options:
    """What a user asks of a conversion. Raises WrongOption for values that no format accepts.

    `dtype` (fp32, bf16, fp16) is the type of the module weights, cast from the masters. If `dp`,
    `stage` and `optimizer` are None, the source's values are kept. `config` is a ds_config that
    replaces the source's. `group_defaults` are hyper-parameters that the source does not store: by
    name for all groups, under a group's number for one group ({"eps": 1e-8, 1: {"weight_decay":
    0.0}}), or a list with one dictionary per group. `param_names` is the order of the module's
    parameters, for sources that do not state it. `dcp_layout` says how a target of
    torch.distributed.checkpoint names the optimizer's state (None: as the source does, or nested).
    `rename` are pairs of a regular expression and its replacement, applied in order. `tie` are
    pairs of a tied weight's second name and the name that the source has for it. `model_config` is
    a configuration of transformers or PEFT, or a folder with one. `dialect` is the kind of the
    target's files: hdf5 or l2 (ONNX Runtime), safetensors (gathered), accelerate
    (torch.distributed.checkpoint).
    """

    weights_only: bool = False
    dtype: str | None = None
    max_file_size: int | None = None
    dp: int | None = None
    stage: int | None = None
    config: dict[str, Any] | None = None
    optimizer: str | None = None
    group_defaults: Mapping[Any, Any] | Sequence[Mapping[str, Any]] = field(default_factory=dict)
    param_names: tuple[str, ...] | None = None
    dialect: str | None = None
    dcp_layout: str | None = None
    rename: tuple[tuple[str, str], ...] = ()
    tie: tuple[tuple[str, str], ...] = ()
    model_config: str | None = None

    def __post_init__(self) -> None:
        if self.dp is not None and self.dp < 1:
            raise WrongOption(f"a data-parallel size of {self.dp}", hint="--dp is at least 1")
        if self.dp is not None and self.dp > MAX_DP:
            raise WrongOption(
                f"a data-parallel size of {self.dp}", hint=f"--dp is at most {MAX_DP}"
            )
        for word, value, allowed in (
            ("dtype", self.dtype, tuple(DTYPES)),
            ("stage", self.stage, (1, 2, 3)),
            ("optimizer", self.optimizer, OPTIMIZERS),
            ("dialect", self.dialect, DIALECTS),
            ("dcp-layout", self.dcp_layout, DCP_LAYOUTS),
        ):
            if value is not None and value not in allowed:
                raise WrongOption(f"{word} {value!r} is none of {', '.join(map(str, allowed))}")

        for key, value in self._given().items():
            numbered = isinstance(key, int) and key >= 0 and isinstance(value, Mapping)
            if not numbered and not isinstance(key, str):
                raise WrongOption(
                    f"group_defaults has the key {key!r}",
                    hint="use the name of a hyper-parameter, or a group's number with a dictionary",
                )

    def _given(self) -> dict[Any, Any]:
        """`group_defaults` as a dictionary; the keys of a list are the groups' numbers."""
        given = self.group_defaults
        return dict(given) if isinstance(given, Mapping) else dict(enumerate(given))

    def defaults_of(self, group: int, count: int) -> dict[str, Any]:
        """The `group_defaults` of one of `count` groups: its own, and those for all groups.

        Raises WrongOption if one is given for a group that the source does not have.
        """
        given = self._given()
        numbers = [key for key in given if isinstance(key, int)]
        if numbers and max(numbers) >= count:
            raise WrongOption(
                f"--group-defaults gives values for group {max(numbers)}, but the source has "
                f"{count} group{'s' if count > 1 else ''}",
                hint="groups are numbered from 0: see `zckpt inspect`",
            )
        shared = {key: value for key, value in given.items() if isinstance(key, str)}
        return {**shared, **given.get(group, {})}

    @property
    def module_dtype(self) -> str | None:
        """`dtype` under its name in safetensors."""
        return None if self.dtype is None else DTYPES[self.dtype]

    def given(self) -> list[str]:
        """The names of the options that differ from their defaults."""
        return [f.name for f in dataclass_fields(self) if getattr(self, f.name) != _default(f)]

    @property
    def file_size(self) -> int:
        """The largest safetensors or `.distcp` file, in bytes."""
        return FILE_SIZE if self.max_file_size is None else self.max_file_size


@dataclass(frozen=True, slots=True)
class Accepted:
    """The options that a format accepts as a target: data that the format declares once.

    `names` are fields of Options, in addition to those of `EVERYWHERE`. `dialects` are the accepted
    values of `dialect`. `reasons` says, by field, why the format does not accept an option.
    """

    target: str
    names: tuple[str, ...] = ()
    dialects: tuple[str, ...] = ()
    reasons: Mapping[str, str] = field(default_factory=dict)

    def check(self, options: Options) -> None:
        """Raises WrongOption if an option is given that the format does not accept."""
        for name in options.given():
            if name in (*self.names, *EVERYWHERE) or (name == "dialect" and self.dialects):
                continue
            word = WORDS.get(name, f"--{name.replace('_', '-')}")
            reason = self.reasons.get(name) or REASONS.get(name)
            raise WrongOption(
                f"{word} does not apply to --to {self.target}",
                hint=f"leave it out: {reason}" if reason else "leave it out",
            )
        if options.dialect is not None and options.dialect not in self.dialects:
            raise WrongOption(
                f"--dialect {options.dialect} does not apply to --to {self.target}",
                hint=f"its dialects are {', '.join(self.dialects)}",
            )


EVERYWHERE = ("weights_only", "rename", "tie", "param_names")
WORDS = {"config": "--ds-config", "model_config": "--config"}
REASONS = {"stage": "ZeRO stages are DeepSpeed's"}


def _default(field: Field[Any]) -> Any:
    return field.default_factory() if callable(field.default_factory) else field.default
