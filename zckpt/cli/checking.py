"""The commands that check and compare, each a thin layer over `zckpt.api`."""

from __future__ import annotations

from typing import Any

import click

from .. import display
from ..core.passes import description
from ..core.passes.description import Report
from ..errors import warning
from . import launched, pages, several_paths
from .help import ExplainedCommand
from .options import (
    as_document,
    by_rank_0,
    common,
    family,
    form,
    given,
    grouped,
    moving,
    renaming,
    single,
    uncompared,
    wide,
)
from .parameters import PATH

DETAILS = ("held", "digests")
"""The long keys of `verify`'s report, with an item per tensor; only --save-proof needs them."""
BRIEF = warning(
    "option-without-effect",
    "--brief changes nothing here: it needs --json",
    subject="--brief",
)
RENAMED = warning(
    "option-without-effect",
    "--rename changes nothing here: it needs --against, --save-proof or --tensors",
    subject="--rename",
)


@click.command(
    cls=ExplainedCommand,
    examples=(
        "zckpt verify run/checkpoint-500",
        "zckpt verify resumed/checkpoint-500 --against run/checkpoint-500",
        "torchrun --nproc-per-node 4 -m zckpt verify PATH --against PATH --gather",
    ),
)
@several_paths.PATHS
@grouped(
    "Comparison",
    "--against",
    type=PATH,
    metavar="PATH",
    help="Compare with this checkpoint (any format), or with the FILE of an earlier --save-proof.",
)
@grouped(
    "Comparison",
    "--gather",
    is_flag=True,
    help="Join the ranks' partitions with torch, as the training engine does. This also finds "
    "errors of zckpt's own reader.",
)
@grouped(
    "Comparison",
    "--device",
    rare=True,
    type=click.Choice(["cuda", "cpu"]),
    help="Where --gather runs.  [default: a GPU if there is one]",
)
@grouped(
    "Comparison", "--tensors", metavar="GLOB", help="Check only the tensors whose name matches."
)
@uncompared
@grouped(
    "Output",
    "--save-proof",
    type=PATH,
    metavar="FILE",
    help="Write the report, with all checksums, to FILE.",
)
@renaming
@family
@moving
@grouped(
    "Output",
    "--brief",
    rare=True,
    is_flag=True,
    help="With --json, leave out the lists of all tensors: `held`, `digests`.",
)
@form
@single
@wide
@common
def verify(
    paths: tuple[str, ...],
    against: str | None,
    save_proof: str | None,
    brief: bool,
    form: str,
    wide: bool,
    asked: bool,
    as_json: bool,
    quiet: bool,
    **words: Any,
) -> int:
    """Check a checkpoint for contradictions, or compare it with another one.

    Without --against, verify checks that checksums match, every element is stored once, replicas
    are equal, weights are the rounded masters, steps agree, and each file belongs to the rank in
    its name. A file of the same rank from another run may fit: then only --against finds it.

    With --against, verify compares tensors bit for bit and everything else by value. What only one
    side has is a difference, or a note if the other side's format cannot store it. Each of several
    PATHs is compared with --against.

    Exit code 3: verify found a contradiction or a difference.
    """
    several_paths.refuse_for_several(paths, "--save-proof", save_proof)
    several_paths.refuse_to_share(paths, words["single"])
    if save_proof:
        display.can_save(save_proof)

    is_quiet = quiet or not launched.speaks(words["single"])

    def look(path: str) -> tuple[Report, int]:
        about = f"{path} against {against}" if against else path
        with display.progress("verify", about, is_quiet, as_json=as_json, asked=asked) as begin:
            report = launched.verify(path, against, begin=begin, **given(words))
        if report is None or report["rank"]:  # rank 0 reports the findings of all ranks
            return {}, 0
        if report["problems"] and against is None:
            from ..reporting.next_steps import mending
            from ..resume.runs import instead_of

            report["instead"] = instead = instead_of(path, words.get("tag"))
            step = mending(path, words.get("tag"), instead)
            makes_up = step is not None and step["makes_up"]
            report["mend"], report["rebuild"] = (None, step) if makes_up else (step, None)
        return report, 0 if report["equal"] else 3

    def look_and_save(path: str) -> tuple[Report, int]:
        report, code = look(path)
        if save_proof and report:
            display.save(save_proof, description.proof_of(report))
        return report, code

    def shown(report: Report) -> Report:
        return {key: value for key, value in report.items() if not brief or key not in DETAILS}

    def look_to_show(path: str) -> tuple[Report, int]:
        report, code = look(path)
        return shown(report), code

    if len(paths) == 2 and against is None:  # a user may expect what `diff A B` does
        message = (
            "each path is checked by itself; to compare the two: zckpt verify PATH --against PATH"
        )
        display.warn(description.said([warning("not-compared", message)]), quiet or as_json)
    if brief and not as_json:
        display.warn(description.said([BRIEF]), quiet)
    if form != "text":
        return several_paths.look_for_a_job("verify", paths, look_and_save, form, as_json)
    if len(paths) > 1:
        show = display.verified_in_a_line
        return several_paths.look_at_each("verify", paths, look_to_show, show, as_json, quiet)
    report, code = look(paths[0])
    if not report:
        return code
    if words["rename"] and not (against or save_proof or words["tensors"]):
        report["warnings"] += description.said([RENAMED])
    display.answer(shown(report), as_json, quiet, display.verified, wide)
    if save_proof:
        display.save(save_proof, description.proof_of(report))
    return code


@click.command(
    cls=ExplainedCommand,
    examples=(
        "zckpt diff run/checkpoint-500 resumed/checkpoint-500",
        "zckpt diff run/checkpoint-400 run/checkpoint-500 --tensors '*.weight/exp_avg'",
    ),
)
@click.argument("a", type=PATH)
@click.argument("b", type=PATH)
@grouped(
    "Comparison",
    "--tensors",
    metavar="GLOB",
    help="Compare only the tensors whose name matches, and list equal ones too.",
)
@uncompared
@renaming
@family
@moving
@by_rank_0
@wide
@common
def diff(a: str, b: str, wide: bool, asked: bool, as_json: bool, quiet: bool, **words: Any) -> int:
    """Show where two checkpoints differ, in the order of the model.

    A and B may have different formats. diff compares tensors and everything else by the rules of
    `verify --against`. It names the first tensor that differs, and the one that differs most.

    Exit code 3: something differs.
    """
    from .. import api

    with display.progress("diff", f"{a} and {b}", quiet, as_json=as_json, asked=asked) as begin:
        report = api.diff(a, b, begin=begin, **given(words))
    display.answer(report, as_json, quiet, display.differing, wide)
    return 0 if report["equal"] else 3


@click.command(
    cls=ExplainedCommand,
    examples=(
        "zckpt stats run/checkpoint-500",
        "zckpt stats run/checkpoint-500 --tensors '*/exp_avg'",
    ),
)
@click.argument("path", type=PATH)
@grouped(
    "What to show",
    "--tensors",
    metavar="GLOB",
    help="Measure only the tensors whose name matches.",
)
@moving
@by_rank_0
@wide
@common
def stats(path: str, wide: bool, asked: bool, as_json: bool, quiet: bool, **words: Any) -> None:
    """Show statistics of every tensor, and warn about suspicious numbers.

    The statistics are min, max, mean, std (with n - 1, as torch.std) and L2 norm of the finite
    numbers, in float64. There are also counts of NaN, infinite, negative, zero and positive
    numbers, and a histogram of magnitudes in powers of two.

    Warnings name NaN, infinities, constant weights, second moments that are zero or negative, and
    steps to which their type cannot add 1, such as 256 in bf16.
    """
    from .. import api

    with display.progress("stats", path, quiet, as_json=as_json, asked=asked) as begin:
        report = api.stats(path, begin=begin, **given(words))
    display.answer(report, as_json, quiet, display.statistics, wide)


@click.command(
    "probe-diff",
    cls=ExplainedCommand,
    examples=(
        "zckpt probe-diff recorded/a recorded/b",
        "zckpt probe-diff recorded/a recorded/b --noise recorded/a2 --svg difference.svg",
    ),
)
@click.argument("a", metavar="RUN_A", type=PATH)
@click.argument("b", metavar="RUN_B", type=PATH)
@grouped(
    "Comparison",
    "--noise",
    type=PATH,
    metavar="RUN_A2",
    help="A second run of RUN_A's program, to measure the noise between them.",
)
@grouped(
    "Output",
    "--summary",
    type=PATH,
    metavar="DIR",
    help="Write a text file for each step and run to DIR.",
)
@grouped(
    "Output",
    "--svg",
    type=PATH,
    metavar="FILE",
    help="Draw steps and modules as a picture for a browser.",
)
@grouped(
    "Output",
    "--html",
    rare=True,
    type=PATH,
    metavar="FILE",
    help="Also write the report as an HTML page.",
)
@grouped(
    "Output",
    "-q",
    "--quiet",
    is_flag=True,
    help="Print no notes, and no heat map of modules and steps.",
)
@as_document
def probe_diff(
    a: str,
    b: str,
    noise: str | None,
    summary: str | None,
    svg: str | None,
    html: str | None,
    quiet: bool,
    as_json: bool,
) -> int:
    """Show the first big difference between two recorded runs.

    RUN_A and RUN_B are folders that zckpt.probe or ONNX Runtime's StatisticsSubscriber wrote. The
    report names the step, the module, forward or backward, and the likely cause.

    A difference is big above the tolerance of its type. --noise names RUN_A2, a second run of
    RUN_A's program. Then a big difference must also be above four times the noise, which is the
    difference between RUN_A and RUN_A2. As long as these two runs are equal bit for bit, every
    difference is big, unless RUN_A and RUN_B have different numbers of ranks.

    Exit code 3: there is a big difference.
    """
    from ..display import picture
    from ..probe import comparing, runs, summaries

    pages.check(html)
    if svg:
        display.can_save(svg)
    first, second = runs.read(a), runs.read(b)
    report = comparing.report(first, second, runs.read(noise) if noise else None)
    if summary:
        summaries.summarise(summary, [("a", first), ("b", second)])
    if svg:
        display.save_text(svg, picture.svg(report))
    if html:
        from ..reporting import probes

        pages.save(html, probes.document(report))
    display.answer(report, as_json, quiet, display.probed)
    return 3 if report["big"] else 0
