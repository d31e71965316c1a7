"""Determines the dimension along which tensor-parallel ranks slice each parameter.

The file of a single rank does not show it. The first of these that applies decides:

    --tp-rules          a file of rules, or the name of a family (tensor_families.py)
    the format          a rule of the engine, or facts in the files

If neither decides for a parameter, an error lists it; nothing is guessed. Each rule is checked
against the shapes in the ranks' files. A file of rules has lines such as

    .*\\.dense\\.weight = 1          columns; the first rule that matches the full name counts
    .*\\.qkv\\.weight = 0:64,16,16   rows; fused sub-parameters with so many rows in all ranks
    .*\\.gate_up\\.weight = 0:2x     rows; two fused sub-parameters of equal size
    .*norm.* = replicated          all ranks have the full tensor
    .*dense\\.bias = sum            the full tensor is the sum of the ranks' tensors
    embed\\.weight = vocab:50257    rows; those from 50257 on are padding
    include llama                  the rules of a family
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Protocol

from msgspec import Struct

from ..core.checkpoint.placement import KINDS, Placement, Shapes, Sliced, of_rule
from ..core.storage import sources
from ..errors import (
    MALFORMED,
    InconsistentCheckpoint,
    MissingData,
    Notice,
    WrongOption,
    ZckptError,
    cause,
    counted,
    listed,
    warning,
)
from .tensor_families import DOUBTS, FAMILIES, WIDTHS

CONV1D = re.compile(r"(^|\.)c_(attn|fc|proj)\.")
*FORMS, LAST_FORM = (kind.forms for kind in KINDS)
HELP = f"a rule is {', '.join(FORMS)} or {LAST_FORM}"


class TensorRules(Protocol):
    """How tensor-parallel ranks slice parameters: what a file, a family or a checkpoint states."""

    def sliced(self, name: str, shapes: Shapes) -> Sliced | None:
        """How a parameter is sliced, given its shapes on the ranks; None if no rule matches it.

        Raises an error if the shapes contradict the rule.
        """


class TensorRule(Struct, frozen=True):
    """One line of a file of rules: `pattern` matches names, `placement` is how ranks slice them."""

    pattern: str
    placement: Placement

    def sliced(self, name: str, shapes: Shapes) -> Sliced | None:
        """How a parameter with a matching name is sliced, given its shapes on the ranks.

        None if the rule leaves the decision to facts in the checkpoint's files.
        """
        return self.placement.sliced(shapes, self.misfit(name))

    def misfit(self, name: str) -> str:
        """The beginning of an error message: this rule does not fit the parameter `name`."""
        return f"the rule `{self.pattern} = {self.placement.text}` does not fit {name}"


class RuleFile(Struct, frozen=True):
    """The value of --tp-rules: rules on how tensor-parallel ranks slice parameters.

    `source` is the path of the file with the rules, or the name of a family of models.
    """

    source: str
    rules: Sequence[TensorRule]

    def sliced(self, name: str, shapes: Shapes) -> Sliced | None:
        for rule in self.rules:
            if re.fullmatch(rule.pattern, name):
                try:
                    return rule.sliced(name, shapes)
                except InconsistentCheckpoint as error:
                    raise WrongOption(
                        "tp-rule-wrong",
                        f"{self.source}: {error.message}",
                        hint=f"correct the rule; {HELP}",
                    ) from error
        return None

    def doubts(self, names: Iterable[str]) -> list[Notice]:
        """Warns about parameters that a family's rule may slice wrongly, which no file can show.

        Such parameters are known for some families of models (`DOUBTS`), such as GPT-NeoX.
        """
        if self.source not in DOUBTS:
            return []
        pattern, sentence = DOUBTS[self.source]
        doubtful = [name for name in names if re.fullmatch(pattern, name)]
        if not doubtful:
            return []
        message = sentence.format(names=listed(doubtful, 4))
        return [warning("cuts-unknown", message, subject=doubtful[0])]


# -- what a user gives


def rules_of(source: str, of_json: Callable[[str], TensorRules] | None = None) -> TensorRules:
    """Reads the rules that `--tp-rules` names: a file's or a family's; raises WrongOption.

    `of_json` parses rules in JSON, if the engine has such rules.
    """
    if source in FAMILIES:
        return RuleFile(source, _parsed(FAMILIES[source], source))
    try:
        with sources.opened(source) as file:
            text = file.read().decode()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise WrongOption(
            "option-invalid",
            f"--tp-rules {source} is neither a family nor a file that can be read: {why}",
            hint=f"the families are {', '.join(FAMILIES)}",
        ) from error
    if of_json is not None and text.lstrip().startswith("{"):
        try:
            return of_json(text)
        except ZckptError:
            raise
        except MALFORMED as error:
            raise WrongOption(
                "option-invalid", f"{source} is not the JSON of rules: {cause(error)}"
            ) from error
    return RuleFile(source, _parsed(text, source))


def _parsed(text: str, source: str) -> list[TensorRule]:
    rules: list[TensorRule] = []
    for number, line in enumerate(text.splitlines(), 1):
        line = line.partition(" #")[0].strip()
        if not line or line.startswith("#"):
            continue
        if line.startswith("include ") and line[8:].strip() in FAMILIES:
            rules += _parsed(FAMILIES[line[8:].strip()], source)
            continue
        pattern, equals, rule = (part.strip() for part in line.rpartition("="))
        try:
            re.compile(pattern)
        except re.error:
            equals = ""
        placement = of_rule(rule) if equals and pattern else None
        if placement is None:
            raise WrongOption(
                "option-invalid",
                f"{source}, line {number}: {line[:99]!r} is not of the form REGEX = RULE",
                hint=HELP,
            )
        rules.append(TensorRule(pattern, placement))
    return rules


def shapes_by(
    rules: Sequence[TensorRules],
    name: str,
    whole: tuple[int, ...],
    candidates: Iterable[Shapes],
) -> tuple[Shapes, Sliced] | None:
    """Chooses the shapes of a parameter's slices on the ranks: the first candidate that fits.

    A candidate lists one shape per rank. It fits if the rules join slices of these shapes to a full
    tensor of shape `whole`. The result also tells how the parameter is sliced. None if no candidate
    fits.
    """
    for shapes in candidates:
        try:
            sliced = _sliced_by_first_match(rules, name, shapes)
        except (InconsistentCheckpoint, WrongOption):
            continue  # the rule is for another dimension
        if sliced is not None and sliced.shape == whole:
            return shapes, sliced
    return None


def stated_rule(name: str, placement: Placement) -> TensorRules:
    """Makes a rule for the parameter `name` from its `placement` on the ranks in the source."""
    return RuleFile("the source", [TensorRule(re.escape(name), placement)])


def _sliced_by_first_match(
    rules: Sequence[TensorRules], name: str, shapes: Shapes
) -> Sliced | None:
    return next((own for each in rules if (own := each.sliced(name, shapes)) is not None), None)


# -- all parameters


def decide(
    root: str, shapes: Mapping[str, Shapes], rules: Sequence[TensorRules], ranks: int
) -> dict[str, Sliced]:
    """Decides how tensor-parallel ranks slice each parameter: the first matching rule counts.

    `shapes` has each parameter's shapes on the ranks. Raises MissingData, which lists the
    parameters that no rule matches, and InconsistentCheckpoint for slices that contradict each
    other.
    """
    decided: dict[str, Sliced] = {}
    undecided: dict[str, Shapes] = {}
    for name, shapes_of_name in shapes.items():
        sliced = _sliced_by_first_match(rules, name, shapes_of_name)
        if sliced is None:
            undecided[name] = shapes_of_name
        else:
            decided[name] = sliced
    if undecided:
        raise _undecided(root, undecided, decided, ranks)
    for name, sliced in decided.items():
        if not sliced.slicing.covers() or sliced.slicing.numel != prod(sliced.shape):
            raise InconsistentCheckpoint(
                "tp-rule-wrong",
                f"{root}: the slices of {name} do not contain every element of shape "
                f"{list(sliced.shape)} once",
                hint="give rules with --tp-rules FILE",
                file=root,
                subject=name,
            )
    _check_biases(root, decided)
    _check_widths(root, decided)
    return decided


def _check_biases(root: str, decided: Mapping[str, Sliced]) -> None:
    """Raises WrongOption if a layer's bias is sliced in another way than the rows of its weight.

    A bias must have as many elements as the weight has rows. Layers of GPT-2 in transformers are
    not checked, because their weights are transposed (Conv1D).
    """
    for name, sliced in decided.items():
        bias = decided.get(f"{name.removesuffix('.weight')}.bias")
        if not name.endswith(".weight") or bias is None or CONV1D.search(name):
            continue
        if sliced.vocabulary is not None:  # a bias may lack padded rows
            continue
        both = sliced.placement, bias.placement
        if len(sliced.shape) != 2 or len(bias.shape) != 1:
            continue
        if not all(placement.is_by_outputs for placement in both):
            continue
        rules = [placement.text for placement in both]
        hint = "correct the rule (--tp-rules FILE)"
        if sliced.shape[0] != bias.shape[0]:
            if bias.shape[0] == sliced.shape[1]:
                hint += (
                    "; if the rows of the weight are the layer's inputs and ranks cut its columns, "
                    "use the rule `1:1x`"
                )
            raise WrongOption(
                "tp-rule-wrong",
                f"{root}: by the rule `{rules[0]}` {name} has {sliced.shape[0]} rows, but by the "
                f"rule `{rules[1]}` its bias has {bias.shape[0]} elements",
                hint=hint,
            )
        parts = [placement.row_parts for placement in both]
        if parts[0] != parts[1] and None not in parts:
            raise WrongOption(
                "tp-rule-wrong",
                f"{root}: the rule `{rules[0]}` cuts the rows of {name}, but the rule "
                f"`{rules[1]}` cuts its bias in another way",
                hint=hint,
            )


def _check_widths(root: str, decided: Mapping[str, Sliced]) -> None:
    """Raises WrongOption if a rule states a wrong number of fused sub-parameters (gate and up).

    The rows of a fused layer, divided by that number, must be the columns of the next layer.
    """
    for name, sliced in decided.items():
        for wide, narrow in WIDTHS:
            other = decided.get(name.replace(wide, narrow)) if name.endswith(wide) else None
            if other is None or len(sliced.shape) != 2 or len(other.shape) != 2:
                continue
            if other.placement.is_replicated:  # its rule is wrong: its bytes will show it
                continue
            count = sliced.placement.fused
            rows, columns = sliced.shape[0], other.shape[1]
            if count and rows != count * columns and not rows % columns:
                raise WrongOption(
                    "tp-rule-wrong",
                    f"{root}: {name} has {rows} rows, and the layer after it {columns} columns: "
                    f"it has {rows // columns} fused parts, but the rule is "
                    f"`{sliced.placement.text}`",
                    hint=f"use the rule `0:{rows // columns}x`, which slices each fused part "
                    "(--tp-rules megatron-swiglu), or `0:1x` if ranks slice all rows as one part",
                )


def _undecided(
    root: str, undecided: Mapping[str, Shapes], decided: Mapping[str, Sliced], ranks: int
) -> MissingData:
    """Returns the error for parameters that no rule matches.

    Its hint contains a file of rules in which the user replaces each `?`.
    """
    names = [f"{name} {list(_first(shapes))}" for name, shapes in undecided.items()]
    lines: dict[str, str] = {}
    for name, sliced in decided.items():
        lines.setdefault(_pattern_for_all_layers(name), sliced.placement.text)
    for name, shapes in undecided.items():
        lines.setdefault(_pattern_for_all_layers(name), f"?  # {list(_first(shapes))} on each rank")
    family = next((each for each in FAMILIES if _family_fits(rules_of(each), undecided)), None)
    by_family = (
        "" if family is None else f"a model family has these names: --tp-rules {family}; or "
    )
    text = "\n".join(f"  {pattern} = {rule}" for pattern, rule in lines.items())
    return MissingData(
        "cuts-unknown",
        f"{root} has {counted(ranks, 'tensor-parallel rank')}, and nothing says how "
        f"{counted(len(undecided), 'parameter')} are sliced: {listed(names)}",
        hint=f"{by_family}replace each ? and give the file with --tp-rules FILE; {HELP}:\n{text}",
        file=root,
    )


def _family_fits(rules: TensorRules, undecided: Mapping[str, Shapes]) -> bool:
    try:
        return all(rules.sliced(*item) is not None for item in undecided.items())
    except WrongOption:
        return False


def _first(shapes: Shapes) -> tuple[int, ...]:
    return next(shape for shape in shapes if shape is not None)


def _pattern_for_all_layers(name: str) -> str:
    parts = re.split(r"(?<![^.])(\d+)(?=\.)", name)
    return "".join(r"\d+" if place % 2 else re.escape(part) for place, part in enumerate(parts))
