"""Which dimension of a parameter was cut over the tensor ranks?

No file of a rank shows it. These say it, the first that does:

    --tp-rules          a file of rules, or the name of a family (tensor_families.py)
    the format          what its reader knows of the engine, or finds in the files

What neither decides is an error that lists the names. Nothing is guessed. Each rule is checked
against the shapes that the ranks state; a file of rules has lines such as

    .*\\.dense\\.weight = 1          columns; the first rule that fits the whole name counts
    .*\\.qkv\\.weight = 0:64,16,16   rows; sub-parameters of these widths in the whole tensor
    .*\\.gate_up\\.weight = 0:2x     rows; two sub-parameters of equal widths
    .*norm.* = replicated          all ranks have the whole tensor
    .*dense\\.bias = sum            each rank has a part, and the whole is the sum of the parts
    embed\\.weight = vocab:50257    rows; those from 50257 on are padding
    include llama                  the rules of a family
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Protocol

from msgspec import Struct

from ..core import slicing, sources
from ..core.placement import REPLICATED, SUM, Shapes, Sliced
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

GEOMETRIC = ("affine_map", "view")  # rules of a checkpoint that state every piece
PLAIN = {"0:1x": "0"}
CONV1D = re.compile(r"(^|\.)c_(attn|fc|proj)\.")
HELP = (
    "a rule is `replicated`, `sum`, `0` or `1` (the dimension that is cut), `0:64,16,16` or `0:2x` "
    "(sub-parameters) or `vocab:N`"
)


class TensorRules(Protocol):
    """What decides how parameters are cut."""

    def sliced(self, name: str, shapes: Shapes) -> Sliced | None:
        """How a parameter is cut; None if this does not say. Raises if the shapes contradict."""


class TensorRule(Struct, frozen=True):
    """One line: `axis` is None if ranks have the whole shape, `parts` are widths in the whole.

    `equal` is the number of equal sub-parameters, if the widths are not stated.
    """

    pattern: str
    text: str
    axis: int | None
    parts: tuple[int, ...] = ()
    equal: int = 1
    vocabulary: int | None = None


class RuleFile(Struct, frozen=True):
    """Rules that the user gives; `source` is the file or the family."""

    source: str
    rules: Sequence[TensorRule]

    def sliced(self, name: str, shapes: Shapes) -> Sliced | None:
        for rule in self.rules:
            if re.fullmatch(rule.pattern, name):
                try:
                    return by_rule(rule, name, shapes)
                except InconsistentCheckpoint as error:
                    raise WrongOption(
                        "tp-rule-wrong",
                        f"{self.source}: {error.message}",
                        hint=f"correct the rule; {HELP}",
                    ) from error
        return None

    def doubts(self, names: Iterable[str]) -> list[Notice]:
        """What no file shows of the rules of a family for these names."""
        if self.source not in DOUBTS:
            return []
        pattern, sentence = DOUBTS[self.source]
        doubtful = [name for name in names if re.fullmatch(pattern, name)]
        if not doubtful:
            return []
        message = sentence.format(names=listed(doubtful, 4))
        return [warning("cuts-unknown", message, subject=doubtful[0])]


def by_rule(rule: TensorRule, name: str, shapes: Shapes) -> Sliced:
    """The pieces of a parameter that is cut as `rule` says; raises InconsistentCheckpoint."""
    known = [shape for shape in shapes if shape is not None]
    says = f"the rule `{rule.pattern} = {rule.text}` does not fit {name}"
    if len(known) < len(shapes):
        raise InconsistentCheckpoint(
            "tp-rule-wrong",
            f"{says}: tensor rank {[*shapes].index(None)} does not have this parameter",
        )
    if rule.axis is None:
        if len(set(known)) > 1:
            raise InconsistentCheckpoint(
                "tp-rule-wrong", f"{says}, whose shapes differ: {_on_ranks(known)}"
            )
        return Sliced(known[0], slicing.replicated(known[0], len(known)), rule.text)
    axis = rule.axis
    if axis >= len(known[0]):
        raise InconsistentCheckpoint(
            "tp-rule-wrong", f"{says}, which has the shape {list(known[0])}"
        )
    others = {(shape[:axis], shape[axis + 1 :]) for shape in known}
    if len(others) > 1 or len({len(shape) for shape in known}) > 1:
        raise InconsistentCheckpoint(
            "tp-rule-wrong", f"{says}, whose shapes differ: {_on_ranks(known)}"
        )
    lengths = [shape[axis] for shape in known]
    widths: list[Sequence[int]] = [lengths]
    if rule.parts:
        split = slicing.even_parts(rule.parts, len(known))
        if split is None or sum(rule.parts) != sum(lengths):
            raise InconsistentCheckpoint(
                "tp-rule-wrong",
                f"{says}: {len(known)} ranks cannot share {listed(rule.parts)}, and hold "
                f"{listed(lengths)} along dimension {axis}",
            )
        widths = [*split]
        if any(sum(part[rank] for part in widths) != width for rank, width in enumerate(lengths)):
            raise InconsistentCheckpoint(
                "tp-rule-wrong", f"{says}: the ranks hold {listed(lengths)}"
            )
    elif rule.equal > 1:
        if any(width % rule.equal for width in lengths):
            raise InconsistentCheckpoint(
                "tp-rule-wrong",
                f"{says}: {listed(lengths)} cannot be cut into {rule.equal} equal parts",
            )
        widths = [[width // rule.equal for width in lengths] for _ in range(rule.equal)]
    if rule.vocabulary is not None and rule.vocabulary > sum(lengths):
        raise InconsistentCheckpoint("tp-rule-wrong", f"{says}: the ranks hold {sum(lengths)} rows")
    first = known[0]
    shape = (*first[:axis], sum(lengths), *first[axis + 1 :])
    pieces = slicing.cut(prod(first[:axis]), prod(first[axis + 1 :]), widths)
    return Sliced(shape, pieces, rule.text, rule.vocabulary)


def _on_ranks(shapes: Sequence[tuple[int, ...]]) -> str:
    return listed([list(shape) for shape in shapes], 4)


# -- what a user gives


def rules_of(source: str, of_json: Callable[[str], TensorRules] | None = None) -> TensorRules:
    """The rules of a family or of a file; raises WrongOption.

    `of_json` makes rules of a file with a JSON object, where the engine has rules of that form.
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
        parsed = rule_in(rule, pattern) if equals and pattern else None
        if parsed is None:
            raise WrongOption(
                "option-invalid",
                f"{source}, line {number}: {line[:99]!r} is not of the form REGEX = RULE",
                hint=HELP,
            )
        rules.append(parsed)
    return rules


def rule_in(text: str, pattern: str = "") -> TensorRule | None:
    """The rule that a line states; None if it states none."""
    if text in (REPLICATED, SUM):
        return TensorRule(pattern, text, None)
    if match := re.fullmatch(r"vocab:(\d+)", text):
        return TensorRule(pattern, text, 0, vocabulary=int(match[1]))
    match = re.fullmatch(r"(\d)(?::(?:(\d+)x|(\d+(?:,\d+)*)))?", text.replace(" ", ""))
    if match is None:
        return None
    parts = tuple(map(int, match[3].split(","))) if match[3] else ()
    equal = int(match[2] or 1)
    return TensorRule(pattern, text, int(match[1]), parts, equal) if equal else None


def shapes_by(
    rules: TensorRules, name: str, whole: tuple[int, ...], candidates: Iterable[Shapes]
) -> tuple[Shapes, Sliced] | None:
    """The first shapes of ranks for which a rule gives the whole shape; and how they are cut."""
    for shapes in candidates:
        try:
            sliced = rules.sliced(name, shapes)
        except (InconsistentCheckpoint, WrongOption):
            continue  # the rule is for another dimension
        if sliced is not None and sliced.shape == whole:
            return shapes, sliced
    return None


def stated_rule(name: str, text: str) -> TensorRules | None:
    """The rule of one parameter, as `Sliced.rule` has it; None if no line could state it."""
    rule = rule_in(text, re.escape(name))
    return None if rule is None else RuleFile("the source", [rule])


# -- all parameters


def decide(
    root: str, shapes: Mapping[str, Shapes], rules: Sequence[TensorRules], ranks: int
) -> dict[str, Sliced]:
    """How every parameter is cut; raises MissingData that lists those that no rule decides."""
    decided: dict[str, Sliced] = {}
    undecided: dict[str, Shapes] = {}
    for name, each in shapes.items():
        sliced = next((s for rule in rules if (s := rule.sliced(name, each)) is not None), None)
        if sliced is None:
            undecided[name] = each
        else:
            decided[name] = sliced
    if undecided:
        raise _undecided(root, undecided, decided, ranks)
    for name, sliced in decided.items():
        if not sliced.slicing.covers() or sliced.slicing.numel != prod(sliced.shape):
            raise InconsistentCheckpoint(
                "tp-rule-wrong",
                f"{root}: the pieces of {name} do not have every element of shape "
                f"{list(sliced.shape)} once",
                hint="give rules with --tp-rules FILE",
                file=root,
                subject=name,
            )
    _check_biases(root, decided)
    _check_widths(root, decided)
    return decided


def _check_biases(root: str, decided: Mapping[str, Sliced]) -> None:
    """A layer's bias is as long as its weight has rows, and both are cut into the same parts.

    Layers of GPT-2 in transformers have a transposed weight (Conv1D).
    """
    for name, sliced in decided.items():
        bias = decided.get(f"{name.removesuffix('.weight')}.bias")
        if not name.endswith(".weight") or bias is None or CONV1D.search(name):
            continue
        if sliced.vocabulary is not None:  # a bias may lack padded rows
            continue
        rules = sliced.rule, bias.rule
        if len(sliced.shape) != 2 or len(bias.shape) != 1 or {*rules} & {*GEOMETRIC, "1:1x"}:
            continue
        hint = "correct the rule (--tp-rules FILE)"
        if sliced.shape[0] != bias.shape[0]:
            if bias.shape[0] == sliced.shape[1]:
                hint += ", or use `1:1x` if the layer has its inputs along the rows"
            raise WrongOption(
                "tp-rule-wrong",
                f"{root}: by the rule `{rules[0]}` {name} has {sliced.shape[0]} rows, but by the "
                f"rule `{rules[1]}` its bias has {bias.shape[0]} elements",
                hint=hint,
            )
        parts = [PLAIN.get(rule, rule) for rule in rules]
        if parts[0] != parts[1] and all(part.startswith("0") for part in parts):
            raise WrongOption(
                "tp-rule-wrong",
                f"{root}: the rule `{rules[0]}` cuts the rows of {name}, but the rule "
                f"`{rules[1]}` its bias",
                hint=hint,
            )


def _check_widths(root: str, decided: Mapping[str, Sliced]) -> None:
    """Rows of a fused layer, by its parts, are the columns of the layer that follows it."""
    for name, sliced in decided.items():
        for wide, narrow in WIDTHS:
            other = decided.get(name.replace(wide, narrow)) if name.endswith(wide) else None
            if other is None or len(sliced.shape) != 2 or len(other.shape) != 2:
                continue
            if other.is_replicated:  # its rule is wrong, as its bytes will show
                continue
            fused = re.fullmatch(r"0(?::(\d+)x)?", sliced.rule)
            count = int(fused[1] or 1) if fused and fused[1] != "1" else 0
            rows, columns = sliced.shape[0], other.shape[1]
            if count and rows != count * columns and not rows % columns:
                raise WrongOption(
                    "tp-rule-wrong",
                    f"{root}: {name} has {rows} rows, and the layer after it {columns} columns: "
                    f"it has {rows // columns} fused parts, but the rule is `{sliced.rule}`",
                    hint=f"use the rule `0:{rows // columns}x` (--tp-rules megatron-swiglu), or "
                    "`0:1x` if its rows are cut as one",
                )


def _undecided(
    root: str, undecided: Mapping[str, Shapes], decided: Mapping[str, Sliced], ranks: int
) -> MissingData:
    """The error that lists what no rule decides, with a file of rules that is to be completed."""
    names = [f"{name} {list(_first(shapes))}" for name, shapes in undecided.items()]
    lines: dict[str, str] = {}
    for name, sliced in decided.items():
        lines.setdefault(_pattern(name), sliced.rule)
    for name, shapes in undecided.items():
        lines.setdefault(_pattern(name), f"?  # {list(_first(shapes))} on each rank")
    family = next((each for each in FAMILIES if _fits(rules_of(each), undecided)), None)
    known = "" if family is None else f"a family knows these names: --tp-rules {family}; else "
    text = "\n".join(f"  {pattern} = {rule}" for pattern, rule in lines.items())
    return MissingData(
        "cuts-unknown",
        f"{root} has {counted(ranks, 'tensor rank')}, and nothing says how "
        f"{counted(len(undecided), 'parameter')} are cut: {listed(names)}",
        hint=f"{known}replace each ? and give the file with --tp-rules FILE; {HELP}:\n{text}",
        file=root,
    )


def _fits(rules: TensorRules, undecided: Mapping[str, Shapes]) -> bool:
    """Whether rules decide all of these parameters."""
    try:
        return all(rules.sliced(*item) is not None for item in undecided.items())
    except WrongOption:
        return False


def _first(shapes: Shapes) -> tuple[int, ...]:
    return next(shape for shape in shapes if shape is not None)


def _pattern(name: str) -> str:
    """A regular expression for a name and for the same parameter of other layers."""
    parts = re.split(r"(?<![^.])(\d+)(?=\.)", name)
    return "".join(r"\d+" if place % 2 else re.escape(part) for place, part in enumerate(parts))
