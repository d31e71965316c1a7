"""What becomes of each optimizer at another size and in another engine: a table for a test.

python -m tests.optimizer_matrix      the part of tests/PROVEN.md that proven_page.py takes
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import NamedTuple

from .engines.many_optimizers import ROWS

ZERO = tuple(f"DeepSpeed {stage}" for stage in range(4))
ENGINES = ("FSDP2", "torch.save", *ZERO)
UNNAMED = ("SGD", "bitsandbytes AdamW8bit")  # no tensor of their states shows a shape


def targets_of(source: str) -> tuple[str, ...]:
    """Where a run goes: the same engine at another size, then the other one."""
    other = ("FSDP2",) if source in ZERO else ("DeepSpeed 0", "DeepSpeed 2", "DeepSpeed 3")
    return (source, *other)


class Outcome(NamedTuple):
    """What becomes of cells; `*` and the like in names of engines stand for several.

    yes              it goes on with the losses of the run that was not interrupted
    own              it goes on; the optimizer computes otherwise there, whoever wrote the files
    refused          before the first byte; `words` are in the message
    engine           the engine of the source cannot train; its error begins with `words`
    target engine    the engine of the target cannot train or resume
    """

    source: str
    target: str
    kind: str
    words: str = ""
    why: str = ""  # a sentence of the page


YES = Outcome("*", "*", "yes")


def sharded(words: str, resumes: str | None = None) -> tuple[Outcome, Outcome]:
    """FSDP2 cannot train this optimizer; its error when it resumes may be another one."""
    return (
        Outcome("FSDP2", "*", "engine", words, FOREIGN),
        Outcome("*", "FSDP2", "target engine", words if resumes is None else resumes, FOREIGN),
    )


# why, as the page says it
FOREIGN = "torch 2.13 has no rule for an operation on FSDP2's tensors"
PARTS = "ranks keep its states for their parts of flat buffers"
MATRICES = "a flat buffer has no place for states of other shapes than the parameter's"
VECTORS = "ZeRO gives it vectors, but of matrices it keeps rows and columns"
GROUPS = "at stage 3 it counts a step for each group, so that its corrections of bias differ"
BY_PART = "it computes norms over the part that a rank has"
OBJECTS = "its states are tensors of a class of torchao's; FSDP2 saves pieces of them"
ESTIMATES = "each rank has estimated a learning rate of its own"
QUANTIZED = "__bnb_optimizer_quant_state__ of 0.weight"
MUON = "DeepSpeed's Muon must be told which groups it updates: --group-defaults 0:use_muon=true"
NAMES = "stage 0 needs --param-names, because no state has the shape of its parameter"

OUTCOMES: dict[str, tuple[Outcome, ...]] = {
    "SGD": (Outcome("DeepSpeed 0", "*", "yes", "", NAMES),),
    "Adagrad": (
        Outcome("DeepSpeed [123]", "*", "engine", "IndexError", "ZeRO takes one group of it"),
        Outcome("*", "DeepSpeed [123]", "refused",
                "with torch's Adagrad, DeepSpeed's ZeRO supports", "ZeRO takes one group of it"),
    ),
    "Rprop": sharded("RuntimeError: aten.index_put_"),
    "Adafactor": (
        Outcome("DeepSpeed [123]", "FSDP2", "refused", "variance of 0.weight", VECTORS),
        Outcome("DeepSpeed [123]", "DeepSpeed [123]", "own", "", BY_PART),
        Outcome("*", "DeepSpeed [23]", "refused", "row_var and col_var of 0.weight", MATRICES),
        *sharded("RuntimeError: aten.pow_"),
    ),
    "LBFGS": (
        Outcome("*", "*", "engine", "ValueError: LBFGS", "it takes one group and a closure"),
    ),
    "SparseAdam": (
        Outcome("*", "*", "engine", "RuntimeError: SparseAdam does", "it takes sparse gradients"),
    ),
    "Muon": (
        Outcome("DeepSpeed [123]", "*", "engine", "ValueError: Param gradient must be a 2D",
                "torch's Muon takes matrices, and ZeRO gives it vectors"),
        Outcome("FSDP2", "DeepSpeed *", "refused", "which groups Muon updates", MUON),
        Outcome("torch.save", "DeepSpeed *", "refused", "which groups Muon updates", MUON),
    ),
    "Muon + AdamW": (
        Outcome("DeepSpeed *", "*", "engine", "NotImplementedError: deepspeed.initialize takes one",
                "DeepSpeed takes one optimizer"),
        Outcome("*", "DeepSpeed *", "refused", "which groups Muon updates", MUON),
    ),
    "AdEMAMix": (
        Outcome("FSDP2", "DeepSpeed 3", "own", "", GROUPS),
        Outcome("torch.save", "DeepSpeed 3", "own", "", GROUPS),
        Outcome("DeepSpeed 3", "FSDP2", "own", "", GROUPS),
    ),
    "SOAP": (
        Outcome("DeepSpeed [123]", "*", "refused", "GG and Q of 0.weight", PARTS),
        Outcome("*", "DeepSpeed [23]", "refused", "GG and Q of 0.weight", MATRICES),
        *sharded("RuntimeError: aten.lerp_"),
    ),
    "CAME": (
        Outcome("DeepSpeed [123]", "FSDP2", "refused", "exp_avg_sq of 0.weight", VECTORS),
        Outcome("DeepSpeed [123]", "DeepSpeed [123]", "own", "", BY_PART),
        Outcome("*", "DeepSpeed [23]", "refused", "exp_avg_sq_row, exp_avg_sq_col", MATRICES),
        *sharded("RuntimeError: aten.div.Scalar"),
    ),
    "Shampoo": (
        Outcome("DeepSpeed [123]", "*", "refused", "pre_cond_0", PARTS),
        Outcome("*", "DeepSpeed [23]", "refused", "pre_cond_0", MATRICES),
        *sharded("RuntimeError: aten.addmm"),
    ),
    "Prodigy": (
        Outcome("DeepSpeed [123]", "*", "refused", "each rank has its own estimate", ESTIMATES),
        Outcome("*", "DeepSpeed [23]", "own", "", "under ZeRO each rank estimates its own rate"),
        *sharded("AssertionError", "RuntimeError: Cannot flatten unevenly sharded"),
    ),
    "Adan": (
        Outcome("torch.save", "DeepSpeed 3", "own", "", GROUPS),
        *sharded("NotImplementedError: Operator aten._foreach_copy_"),
    ),
    "schedule-free AdamW": (
        Outcome("FSDP2", "DeepSpeed 3", "own", "", GROUPS),
        Outcome("torch.save", "DeepSpeed 3", "own", "", GROUPS),
        Outcome("DeepSpeed 3", "FSDP2", "own", "", GROUPS),
    ),
    "bitsandbytes AdamW8bit": (
        Outcome("DeepSpeed 0", "DeepSpeed 0", "yes", "", NAMES),
        Outcome("DeepSpeed [123]", "*", "refused", QUANTIZED, PARTS),
        Outcome("*", "DeepSpeed [23]", "refused", QUANTIZED, MATRICES),
        *sharded("RuntimeError: bitsandbytes.optimizer_update_8bit_blockwise"),
    ),
    "torchao AdamW8bit": (
        Outcome("torch.save", "torch.save", "yes", "", OBJECTS),
        Outcome("torch.save", "DeepSpeed [23]", "refused", "the source holds exp_avg of", OBJECTS),
        Outcome("*", "*", "refused", "the target cannot store the optimizer's exp_avg", OBJECTS),
    ),
}  # fmt: skip
"""By optimizer, what is not YES; the first that fits counts."""


def outcome_of(optimizer: str, source: str, target: str) -> Outcome:
    """The first that fits; of a source that cannot train it is `engine`, whatever the target."""
    return next(
        (
            each
            for each in OUTCOMES.get(optimizer, ())
            if fnmatchcase(source, each.source) and fnmatchcase(target, each.target)
        ),
        YES,
    )


# -- the page

NONE = "none"
WORDS = {"yes": "yes", "own": "own", "refused": "refused", "engine": NONE, "target engine": NONE}
HEAD = """| optimizer | FSDP2 | torch.save | stage 0 | stage 1 | stage 2 | stage 3 |
|---|---|---|---|---|---|---|
"""


def cell(optimizer: str, source: str) -> str:
    """The same format, then the other engine; stages in brackets where these differ."""
    same, *others = targets_of(source)
    word = WORDS[outcome_of(optimizer, source, same).kind]
    if word == NONE:
        return word
    stages: dict[str, list[str]] = {}
    for target in others:
        stages.setdefault(WORDS[outcome_of(optimizer, source, target).kind], []).append(target[-1])
    if len(stages) == 1:
        return f"{word} / {next(iter(stages))}"
    shown = ", ".join(f"{each} ({', '.join(listed)})" for each, listed in stages.items())
    return f"{word} / {shown}"


def reasons(optimizer: str) -> Iterable[str]:
    return dict.fromkeys(each.why for each in OUTCOMES.get(optimizer, ()))


def table() -> str:
    """A row for each optimizer, and why a cell is not `yes`."""
    rows = [
        f"| {optimizer} | " + " | ".join(cell(optimizer, source) for source in ENGINES) + " |"
        for optimizer in ROWS
    ]
    notes = [
        f"* {optimizer}: {'; '.join(reasons(optimizer))}."
        for optimizer in ROWS
        if optimizer in OUTCOMES
    ]
    return HEAD + "\n".join(rows) + "\n\n" + "\n".join(notes) + "\n"


if __name__ == "__main__":
    print(table(), end="")
