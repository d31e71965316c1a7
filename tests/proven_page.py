"""The page of what is proven, by which kind of test and how often, from the tests themselves.

python -m tests.proven_page > tests/PROVEN.md
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import NamedTuple

from . import counts, optimizer_matrix
from .engines import (
    autoep,
    cases,
    expert_grids,
    experts,
    families,
    grids,
    many_optimizers,
    strangers,
    torch_cases,
)

HEAD = """# What is proven

This page is made of the tests. [Support](../docs/support.md) has engines, versions and sizes, and
[the log](log/2026-11.md) what a person ran, with its day.

"Proven" means that the engine is the judge:

* What zckpt reads equals, bit for bit, what the engine holds in memory, gathered over its ranks:
  weights, masters, optimizer states, steps, groups, hyper-parameters, frozen and tied weights, and
  buffers.
* What zckpt writes is loaded by the unmodified engine, which then holds the same. Its next losses
  are those of the run that went on: to 1e-5 or 1e-4 in fp32, and to 2e-3 to 5e-3 in 16 bits if the
  sizes or the precision changed.

Numbers of tests are rounded down: below 100 to tens, then to two digits. The columns are the kinds
of [Contributing](../CONTRIBUTING.md#which-tests-run): `default` runs with `pytest`, and takes the
first case of each kind; the others run with `-m`.
"""

TRAININGS = """
## Trainings

Tests of several folders share these runs: each is trained, and then read, resized or converted.

| runs of | cases |
|---|---|
"""

OPTIMIZERS = """
## Optimizers: another size, another engine

A tiny model with two groups trains on 2 ranks and is saved. Each cell has two answers. The first
is for the same format on 3 ranks and on 1. The second is for the other engine, on 3 ranks: stages
0, 2 and 3 of DeepSpeed for FSDP2 and torch.save, and FSDP2 for DeepSpeed. A number in brackets is a
stage.

* yes: the run goes on with the losses of the run that was not interrupted, to 1e-4.
* own: the run goes on, but this engine computes the optimizer's updates in another way there.
  Converted back, it goes on with the losses of the first run.
* refused: zckpt names the state, or what is lacking, before the first byte.
* none: the engine itself cannot train with this optimizer, or cannot resume.

"""

VERSIONS = """
DeepSpeed 0.19.8, torch 2.13, pytorch_optimizer 4.1.0, bitsandbytes 0.50.2 and torchao 0.18.0, on a
CPU in fp32. Names without a package are classes of torch.optim; AdEMAMix, SOAP, Shampoo, Prodigy,
Adan, CAME, Lion and schedule-free AdamW are those of pytorch_optimizer. `pytest -m matrix` takes
all cells, and `pytest -m engines` those of AdamW.
"""

ENGINELESS = """
## Where no engine is the judge

| what | judge instead |
|---|---|
"""
JUDGES = (
    (
        "ONNX Runtime's ZeRO-1, which no public build runs",
        "files of 1.16.3, its own aggregators, and a generator by its partition rule",
    ),
    (
        "GPT-NeoX, BLOOM",
        "a generator by their sources, and by those of DeepSpeed 0.9.3 and 0.6.5",
    ),
    (
        "DeepSpeed 0.5.10 to 0.18",
        "real files of five releases; files of 0.19.8 in the layouts of 19",
    ),
    ("Transformer Engine", "the tests emulate its Adam; names of modules are by its source"),
    ("Megatron-Core's gradients", "functions of the weights, not computed"),
    (
        "Apex's FusedAdam",
        "the tests write its layout; [once](log/2026-11.md#2026-11-22) its own class loaded it",
    ),
    ("Lightning's `FSDPStrategy`, which needs a GPU", "the tests write its layout"),
    ("folders of torchtitan, lerobot and prime-rl", "sample folders by their sources"),
    ("object stores", "servers on the test machine: moto, azurite, a web server"),
)


class Subject(NamedTuple):
    """What a row shows, who judges it, and the files of tests that begin so."""

    name: str
    judge: str
    places: tuple[str, ...]


SUBJECTS = (
    Subject(
        "DeepSpeed: stages 0 to 3, pipelines, tensor ranks, experts",
        "DeepSpeed 0.19.8",
        ("tests/formats/deepspeed",),
    ),
    Subject(
        "DeepSpeed's universal directories",
        "DeepSpeed 0.19.8 (`load_universal`), `ds_to_universal`",
        ("tests/formats/deepspeed_universal",),
    ),
    Subject(
        "DeepSpeed loads without a conversion",
        "the engine after its own load",
        ("tests/deepspeed",),
    ),
    Subject(
        "`torch.distributed.checkpoint`",
        "torch 2.13: stock loading into FSDP2, FSDP1 and plain programs",
        ("tests/formats/dcp",),
    ),
    Subject("`StorageReader`", "torch 2.13: `dcp.load`", ("tests/dcp",)),
    Subject(
        "files of `torch.save`, of ranks and whole; Lightning, verl",
        "torch 2.13, lightning 2.6, verl 0.7.0",
        ("tests/formats/gathered", "tests/formats/statedict"),
    ),
    Subject("Megatron-Core", "megatron-core 0.16.1: its own loading", ("tests/formats/megatron",)),
    Subject(
        "`--family`: Hugging Face to and from Megatron-Core",
        "logits of transformers and Megatron-Core, to 1e-5",
        ("tests/naming/families",),
    ),
    Subject(
        "ONNX Runtime Training",
        "[see below](#where-no-engine-is-the-judge)",
        ("tests/formats/onnxruntime",),
    ),
    Subject(
        "the universal format, and what each version wrote",
        "the package safetensors, golden bytes",
        ("tests/formats/universal",),
    ),
    Subject(
        "`export`", "the bytes of `save_pretrained`, and PEFT's own tensors", ("tests/formats/hf",)
    ),
    Subject(
        "fine-tunes: Trainer, SFTTrainer, Accelerate; whole models and LoRA",
        "the trainer's own resume: state bit for bit, five losses to 1e-5",
        ("tests/formats/test_finetunes.py",),
    ),
    Subject(
        f"{len(many_optimizers.ROWS)} optimizers",
        "the losses of both engines, [as below](#optimizers-another-size-another-engine)",
        ("tests/formats/test_optimizer_matrix.py",),
    ),
    Subject(
        "on a GPU: DeepSpeed, FSDP2, `auto_resume`",
        "the engines, [on one H100](log/2026-11.md#on-one-gpu)",
        ("tests/formats/test_gpu.py",),
    ),
    Subject(
        "what all formats share: options, steps, masters, lost states",
        "each format's reader; the manifest before and after",
        ("tests/formats",),
    ),
    Subject(
        "`auto_resume`, `check`, `list`",
        "programs killed at 4 ranks that go on at 3, 2, 6 and 1: losses to 1e-5",
        ("tests/resume",),
    ),
    Subject(
        "`verify`, `diff`, `stats`, `--gather`",
        "planted faults, each found and named; the engine's own rule; torch in float64",
        ("tests/proof",),
    ),
    Subject(
        "the probe",
        "planted faults; recorded and plain runs have the same bytes",
        ("tests/probe",),
    ),
    Subject(
        "which checkpoints are whole", "lost, cut, mixed and foreign files", ("tests/judging",)
    ),
    Subject("`mend`", "the bytes before the damage", ("tests/mending",)),
    Subject("object stores", "the same command on a folder", ("tests/stores", "tests/remote")),
    Subject(
        "hostile files, kills, failing disks",
        "no wrong target ([counts](safety/README.md))",
        ("tests/safety",),
    ),
    Subject("several processes", "the bytes of one process", ("tests/processes",)),
    Subject(
        "tests of DeepSpeed and torch, run with zckpt in the place of their own code",
        "how each ends without zckpt",
        ("tests/peers",),
    ),
    Subject(
        "rooms that know no engine",
        "arithmetic, random shapes, golden bytes, torch's own files",
        ("tests/core", "tests/files", "tests/copying", "tests/naming", "tests/training"),
    ),
    Subject(
        "commands, tables, reports, pages, the house",
        "the text and exit codes that pages state",
        ("tests/cli", "tests/display", "tests/reporting", "tests/"),
    ),
)
"""A test belongs to the subject with the longest place that its path begins with."""

RUNS: tuple[tuple[str, Mapping[str, object]], ...] = (
    ("DeepSpeed's ZeRO: precisions, optimizers, layouts, models", cases.CASES),
    ("pipelines and tensor ranks", grids.CASES),
    ("experts", experts.CASES),
    ("experts beside pipelines and tensor ranks", expert_grids.CASES),
    ("AutoEP", autoep.CASES),
    ("models of other shapes", strangers.CASES),
    ("FSDP2, FSDP1, HSDP and plain torch", torch_cases.CASES),
    ("families of models", families.CASES),
)


def subject_of(path: str) -> Subject:
    """The row of a file of tests."""
    fitting = [(place, row) for row in SUBJECTS for place in row.places if path.startswith(place)]
    return max(fitting, key=lambda pair: len(pair[0]))[1]


def rounded(number: int) -> str:
    """Rounded down to one or two digits, so that a new test seldom changes the page."""
    if not number:
        return ""
    unit = 1 if number < 10 else 10 ** max(1, len(str(number)) - 2)
    return f"{number // unit * unit:,}"


def table(counted: Mapping[str, Counter[str]]) -> str:
    """A row for each subject; `counted` has the kinds of each file of tests."""
    kinds = ("default", *counts.KINDS)
    totals: dict[Subject, Counter[str]] = {row: Counter() for row in SUBJECTS}
    for path, counter in counted.items():
        totals[subject_of(path)] += counter
    lines = [
        f"| what | judge | tests | {' | '.join(kinds)} |",
        "|---|---|---|" + "---|" * len(kinds),
    ]
    for row, counter in totals.items():
        cells = " | ".join(rounded(counter[kind]) for kind in kinds)
        places = ", ".join(f"`{place}`" for place in row.places)
        lines.append(f"| {row.name} | {row.judge} | {places} | {cells} |")
    total = sum(totals.values(), Counter[str]())
    lines.append(f"| all | | | {' | '.join(rounded(total[kind]) for kind in kinds)} |")
    return "\n".join(lines) + "\n"


def rest() -> str:
    """The parts of the page below its table of counts."""
    rows = "".join(f"| {name} | {len(listed)} |\n" for name, listed in RUNS)
    judges = "".join(f"| {what} | {judge} |\n" for what, judge in JUDGES)
    return TRAININGS + rows + ENGINELESS + judges + OPTIMIZERS + optimizer_matrix.table() + VERSIONS


def page() -> str:
    """The text of tests/PROVEN.md."""
    return f"{HEAD}\n{table(counts.by_file())}{rest()}"


if __name__ == "__main__":
    print(page(), end="")
