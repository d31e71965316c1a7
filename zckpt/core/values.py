"""What is a value?

A class of the standard library's dataclasses, with slots, whose fields are set once. The type
checker watches that. At run time nothing does: an instance of a frozen dataclass takes three times
as long to make, of which a copy makes several for each piece, and its class takes twice as long to
build, of which every start of a command builds seventy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, overload

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_: Any) -> Callable[[Any], Any]:
        return lambda decorator: decorator


__all__ = ["field", "valueclass"]

Class = TypeVar("Class")


@overload
def valueclass(cls: type[Class], /) -> type[Class]: ...
@overload
def valueclass(*, eq: bool = True, order: bool = False) -> Callable[[type[Class]], type[Class]]: ...
@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def valueclass(cls: Any = None, /, *, eq: bool = True, order: bool = False) -> Any:
    """Makes a class of values. They are equal if their fields are; without `eq`, if they are the
    same object.
    """
    make = dataclass(slots=True, eq=eq, order=order, unsafe_hash=eq)
    return make if cls is None else make(cls)
