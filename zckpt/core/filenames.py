"""Which numbers does the name of a file have?"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

DIGITS = "0123456789"


class Names:
    """Names of one or several forms; each `#` in a form stands for decimal digits.

    They are found without `re`: see regex.py.
    """

    def __init__(self, *forms: str) -> None:
        self._forms = [form.split("#") for form in forms]

    def numbers(self, name: str) -> tuple[int, ...] | None:
        """The numbers in a name, by the first form that it has; None if it has another form."""
        for first, *others in self._forms:
            if name.startswith(first):
                numbers = _numbers(name[len(first) :], others)
                if numbers is not None:
                    return numbers
        return None

    def has(self, name: str) -> bool:
        """Whether a name has one of the forms."""
        return self.numbers(name) is not None


def counted(name: str, ending: str) -> tuple[str, int] | None:
    """What is before `_7` and this ending, and the number; None for a name of another form."""
    stem, _, number = name.removesuffix(ending).rpartition("_")
    if not (name.endswith(ending) and stem and number) or number.strip(DIGITS):
        return None
    return (stem, int(number)) if number == "0" or number[0] != "0" else None


def _numbers(rest: str, texts: Iterable[str]) -> tuple[int, ...] | None:
    """The numbers of a name that goes on with a number before each of these texts."""
    numbers = []
    for text in texts:
        after = rest.lstrip(DIGITS)
        digits = rest[: len(rest) - len(after)]
        if not digits or not after.startswith(text):
            return None
        numbers.append(int(digits))
        rest = after[len(text) :]
    return None if rest else tuple(numbers)


def oldest_first(names: Iterable[str]) -> list[str]:
    """Names of checkpoints by their steps: the number after `step`, else all numbers in order.

    Names without a number come before all others: nothing says how new these are.
    """
    return sorted(names, key=_age)


def _age(name: str) -> tuple[list[int], str]:
    after = name.rpartition("step")[2].lstrip("=_-") if "step" in name else ""
    digits = after[: len(after) - len(after.lstrip(DIGITS))]
    runs = ("".join(run) for is_number, run in groupby(name, DIGITS.__contains__) if is_number)
    return ([int(digits)] if digits else [*map(int, runs)]), name


def numbered(name: str, number: int) -> str:
    """The name of a further model's file or key: `optimizer_1.bin` for `optimizer.bin`."""
    stem, dot, ending = name.partition(".")
    return f"{stem}_{number}{dot}{ending}" if number else name


def number_of(name: str) -> int:
    """The number in such a name, 0 for the first model: 1 for `model_1` and `optimizer_1.bin`."""
    found = counted(name.partition(".")[0], "")
    return found[1] if found else 0
