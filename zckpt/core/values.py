"""What is a value?

A class with slots whose fields are set once. A mutable record's fields may change. Both are
declared as the standard library's dataclasses are, and the type checker takes them for dataclasses.
Their classes are built in a quarter of the time, and without the modules that `dataclasses`
imports: every start of a command builds a hundred of them.

The type checker watches that the fields of a value are set once. At run time nothing does: an
instance of a frozen dataclass takes three times as long to make, of which a copy makes several for
each piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from operator import attrgetter

from .annotations import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import field, replace
    from typing import TypeVar, overload

    from typing_extensions import dataclass_transform

    Class = TypeVar("Class")
else:

    def dataclass_transform(**_: Any) -> Callable[[Any], Any]:
        return lambda decorator: decorator


__all__ = ["field", "fields_of", "mutable", "replace", "valueclass"]


class _Field:
    """How a field gets its value: from a function if none is given, or not by `__init__`."""

    __slots__ = ("factory", "init")

    def __init__(
        self, *, default_factory: Callable[[], Any] | None = None, init: bool = True
    ) -> None:
        self.factory, self.init = default_factory, init


def _replace(value: Any, /, **changes: Any) -> Any:
    """A copy with other values of the fields that `changes` names."""
    for name in type(value).__match_args__:
        if name not in changes:
            changes[name] = getattr(value, name)
    return type(value)(**changes)


def fields_of(value: Any) -> list[Any]:
    """What a value's class makes an equal one of."""
    return [getattr(value, name) for name in value.__match_args__]


if not TYPE_CHECKING:
    field, replace = _Field, _replace


if TYPE_CHECKING:

    @overload
    def valueclass(cls: type[Class], /) -> type[Class]: ...
    @overload
    def valueclass(*, eq: bool = True) -> Callable[[type[Class]], type[Class]]: ...


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def valueclass(cls: Any = None, /, *, eq: bool = True) -> Any:
    """Makes a class of values. They are equal if their fields are; without `eq`, if they are the
    same object.
    """
    return _build(cls, eq) if cls is not None else lambda cls: _build(cls, eq)


@dataclass_transform(eq_default=False, field_specifiers=(field,))
def mutable(cls: type[Class], /) -> type[Class]:
    """Makes a class of mutable records. Each is equal to itself alone."""
    built: type[Class] = _build(cls, eq=False)
    return built


def _build(cls: Any, eq: bool) -> Any:
    """`cls` with slots for its fields, and the methods that its own body lacks."""
    own = [
        name for name, type_ in vars(cls).get("__annotations__", {}).items()
        if not type_.startswith("ClassVar")
    ]  # fmt: skip
    body = {name: value for name, value in vars(cls).items() if name not in _DROPPED}
    defaults = {name: body.pop(name) for name in own if name in body}
    inherited = getattr(cls, "_defaults", {})
    defaults = {**inherited, **defaults}
    fields = [*getattr(cls, "__match_args__", ()), *own]
    fields = [
        name for name in fields
        if not (isinstance(defaults.get(name), _Field) and not defaults[name].init)
    ]  # fmt: skip
    body["__qualname__"] = cls.__qualname__
    body["__slots__"] = tuple(own)
    body["__match_args__"] = tuple(fields)
    body["_defaults"] = defaults
    body.setdefault("__repr__", _repr)
    if eq:
        same, number = _equality(fields)
        body.setdefault("__eq__", same)
        body["__hash__"] = number
    built = type(cls)(cls.__name__, cls.__bases__, body)
    if "__init__" not in body:
        _set_init(built, fields, defaults)
    return built


def _set_init(cls: Any, fields: Iterable[str], defaults: dict[str, Any]) -> None:
    """Gives a class its `__init__` when it is first called: few classes have instances in a run."""

    def __init__(self: Any, *values: Any, **named: Any) -> None:
        cls.__init__ = _init(fields, defaults, hasattr(cls, "__post_init__"))
        cls.__init__(self, *values, **named)

    cls.__init__ = __init__


_DROPPED = ("__dict__", "__weakref__", "__slots__")


def _init(fields: Iterable[str], defaults: dict[str, Any], checks: bool) -> Callable[..., None]:
    """`__init__` with one parameter per field."""
    known: dict[str, Any] = {"_none": object()}
    parameters, lines = ["self"], []
    for name in fields:
        value, parameter = name, name
        if name in defaults:
            default = defaults[name]
            if isinstance(default, _Field):
                known[f"_{name}"] = default.factory
                parameter = f"{name}=_none"
                value = f"_{name}() if {name} is _none else {name}"
            else:
                known[f"_{name}"] = default
                parameter = f"{name}=_{name}"
        parameters.append(parameter)
        lines.append(f" self.{name} = {value}")
    if checks:
        lines.append(" self.__post_init__()")
    exec(f"def __init__({', '.join(parameters)}):\n" + "\n".join(lines or [" pass"]), known)
    function: Callable[..., None] = known["__init__"]
    return function


def _equality(fields: list[str]) -> tuple[Callable[[Any, Any], Any], Callable[[Any], int]]:
    """`__eq__` and `__hash__` of classes whose instances are equal if their fields are."""
    values = attrgetter(*fields) if fields else lambda value: ()

    def same(self: Any, other: Any) -> Any:
        if other.__class__ is not self.__class__:
            return NotImplemented
        return values(self) == values(other)

    def number(self: Any) -> int:
        return hash(values(self))

    return same, number


def _repr(self: Any) -> str:
    values = (f"{name}={getattr(self, name)!r}" for name in self.__match_args__)
    return f"{self.__class__.__qualname__}({', '.join(values)})"
