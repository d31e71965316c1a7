"""Commands, options and exit codes: what `zckpt` understands on a command line.

Exit codes: 0 done or equal, 1 could not do it (no target was made), 2 wrong usage, 3 `verify`,
`diff` or `probe-diff` looked and found something.
"""

from __future__ import annotations

import io
import json
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import click

from . import __version__
from .dtypes import OPTIONS as DTYPES
from .errors import NotEnoughSpace, WrongOption, ZckptError
from .options import DCP_LAYOUTS, DIALECTS, OPTIMIZERS

UNITS = {"": 1, "K": 1000, "M": 10**6, "G": 10**9, "T": 10**12}
UNITS |= {f"{unit}I": 1024**power for power, unit in enumerate("KMGT", 1)}


class Size(click.ParamType[int]):
    """Bytes: 256MiB, 8GiB, 500MB, 1000000."""

    name = "size"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        if isinstance(value, int):
            return value
        found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?", value.upper())
        if not found or found[2] not in UNITS:
            self.fail(f"{value!r} is no size such as 256MiB", param, ctx)
        return int(float(found[1]) * UNITS[found[2]])


class Pairs(click.ParamType[dict[Any, Any]]):
    """lr=3e-4,betas=[0.9,0.95],fused=null: names and JSON values; 1:lr=3e-4 is for group 1."""

    name = "pairs"

    def convert(self, value: Any, param: Any, ctx: Any) -> dict[Any, Any]:
        if isinstance(value, dict):
            return value
        number, colon, text = value.partition(":")
        if not (colon and number.strip().isdecimal()):
            number, text = "", value
        try:
            # a comma within brackets belongs to a value
            pairs = [pair.partition("=") for pair in re.split(r",(?![^\[]*\])", text)]
            made = {key.strip(): json.loads(item) for key, _, item in pairs}
        except json.JSONDecodeError:
            made = {}
        if not made or not all(key.isidentifier() for key in made):
            self.fail(f"{value!r} is no list such as lr=3e-4,weight_decay=0.1", param, ctx)
        made = {key: tuple(item) if isinstance(item, list) else item for key, item in made.items()}
        return {int(number): made} if number else made


class Config(click.ParamType[dict[str, Any]]):
    """A JSON file with one object."""

    name = "file"

    def convert(self, value: Any, param: Any, ctx: Any) -> dict[str, Any]:
        if isinstance(value, dict):
            return value
        try:
            with open(value, encoding="utf-8") as file:
                made = json.load(file)
        except (OSError, ValueError) as error:
            self.fail(f"{value} cannot be read: {error}", param, ctx)
        if not isinstance(made, dict):
            self.fail(f"{value} holds no JSON object", param, ctx)
        return made


class Names(click.ParamType[tuple[str, ...]]):
    """A file of names, one per line, or a JSON list of them."""

    name = "file"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        try:
            with open(value, encoding="utf-8") as file:
                text = file.read()
            made = json.loads(text) if text.lstrip().startswith("[") else text.splitlines()
        except (OSError, ValueError) as error:
            self.fail(f"{value} cannot be read: {error}", param, ctx)
        if not made or not all(isinstance(name, str) for name in made):
            self.fail(f"{value} holds no list of names", param, ctx)
        return tuple(name.strip() for name in made if name.strip())


class Rename(click.ParamType[tuple[str, str]]):
    """REGEX=REPL; the last `=` separates."""

    name = "rule"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[str, str]:
        if isinstance(value, tuple):
            return value
        regex, equals, replacement = value.rpartition("=")
        if not equals:
            self.fail(f"{value!r} is no REGEX=REPL", param, ctx)
        return regex, replacement


class Tie(click.ParamType[tuple[str, str]]):
    """NAME=NAME: a tied weight's second name, and the one that the source has."""

    name = "tie"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[str, str]:
        if isinstance(value, tuple):
            return value
        alias, _, owner = value.partition("=")
        if not alias or not owner:
            self.fail(f"{value!r} is no NAME=NAME", param, ctx)
        return alias, owner


Command = Callable[..., Any]


def renaming(command: Command) -> Command:
    """Other names for what the source, PATH or A holds."""
    return click.option(
        "--rename",
        type=Rename(),
        multiple=True,
        metavar="REGEX=REPL",
        help="Rewrite the names of parameters, as re.sub does; in order, if repeated.",
    )(command)


def tying(command: Command) -> Command:
    """Second names of tied weights that a file has once."""
    return click.option(
        "--tie",
        type=Tie(),
        multiple=True,
        metavar="NAME=NAME",
        help="A tied weight's second name that the source lacks, and its name in the source.",
    )(command)


def common(command: Command) -> Command:
    """What every command that reads a checkpoint understands."""
    for option in (
        click.option("-q", "--quiet", is_flag=True, help="No progress and no warnings."),
        click.option("--json", "as_json", is_flag=True, help="Print one JSON document."),
        click.option(
            "--step-policy",
            metavar="max|min|keep|N",
            help="The step to take where ranks or weights disagree, which is an error otherwise.",
        ),
        click.option(
            "--param-names",
            type=Names(),
            metavar="FILE",
            help="Names of parameters, one per line, where the source tells no order of them or "
            "knows them by number alone: those of model.named_parameters().",
        ),
        click.option("--tag", help="The tag, where a run directory holds several."),
        click.option("--from", "format", metavar="FORMAT", help="The source's format."),
    ):
        command = option(command)
    return command


def moving(command: Command) -> Command:
    """How bytes are read."""
    for option in (
        click.option(
            "--memory",
            type=Size(),
            default="256MiB",
            show_default=True,
            help="Bound of all buffers.",
        ),
        click.option(
            "-j",
            "--jobs",
            type=click.IntRange(1, 64),
            default=4,
            show_default=True,
            help="Threads; more for a cold or remote source.",
        ),
    ):
        command = option(command)
    return command


def copying(command: Command) -> Command:
    """How bytes are read and written."""
    for option in (
        click.option("--dry-run", is_flag=True, help="Say what would be written, and stop."),
        click.option(
            "--io",
            type=click.Choice(["auto", "direct", "buffered"]),
            default="auto",
            show_default=True,
            help="How files are written.",
        ),
        moving,
    ):
        command = option(command)
    return command


def writing(command: Command) -> Command:
    """What commands that write a checkpoint understand."""
    for option in (
        renaming,
        tying,
        click.option(
            "--max-file-size",
            type=Size(),
            help="Split larger safetensors and .distcp files [default: 8GiB]",
        ),
        click.option(
            "--group-defaults",
            type=Pairs(),
            multiple=True,
            metavar="[N:]K=V,...",
            help="Hyper-parameters that the source does not hold, for all groups or for group N; "
            "may be repeated.",
        ),
        click.option(
            "--dialect",
            type=click.Choice(DIALECTS),
            help="Kind of files: hdf5 (default) or l2 for onnxruntime, safetensors for gathered, "
            "accelerate for dcp.",
        ),
        click.option(
            "--dcp-layout",
            type=click.Choice(DCP_LAYOUTS),
            help="How torch.distributed.checkpoint's keys are made [default: the source's]",
        ),
        click.option(
            "--ds-config",
            "config",
            type=Config(),
            metavar="FILE",
            help="The ds_config that the target will run with, instead of the source's.",
        ),
        click.option(
            "--optimizer",
            type=click.Choice(OPTIMIZERS),
            help="Keep the step as this class of Adam does.",
        ),
        click.option(
            "--dtype",
            type=click.Choice(list(DTYPES)),
            help="What the module's weights become, made of the masters.",
        ),
        click.option("--weights-only", is_flag=True, help="Leave the optimizer's states out."),
        click.option(
            "--stage", type=click.Choice(["1", "2", "3"]), help="ZeRO stage [default: the source's]"
        ),
        click.option("--dp", type=int, help="Data-parallel size [default: the source's]"),
    ):
        command = option(command)
    return command


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="zckpt")
def cli() -> None:
    """Read, convert, write and prove sharded ZeRO checkpoints."""


@cli.command()
@click.argument("path")
@click.option("--tensors", metavar="GLOB", help="List the tensors whose name matches.")
@click.option("--steps", is_flag=True, help="Every place that holds a step, and which is true.")
@click.option("--layout", is_flag=True, help="Draw which file holds which elements.")
@click.option("--state", is_flag=True, help="Everything that is no tensor, as JSON.")
@common
def inspect(
    path: str,
    tensors: str | None,
    steps: bool,
    layout: bool,
    state: bool,
    as_json: bool,
    quiet: bool,
    **reading: Any,
) -> None:
    """What a checkpoint holds. No tensor is read.

    PATH: a directory of DeepSpeed, of torch.distributed.checkpoint, of files of torch.save (whole
    ones or one per rank), of ONNX Runtime's rank files, a Hugging Face Trainer, Accelerate,
    Lightning or torchtitan directory around one, a single file, or a universal checkpoint.
    """
    from . import api, display

    manifest = api.read(path, **reading)
    if as_json:
        report = api.inspect(manifest)
        if tensors or layout:
            report["tensors"] = api.tensors(manifest, tensors or "*", fragments=layout)
        if state:
            report["state"] = api.state(manifest)
        display.document(report)
    elif state:
        display.document(api.state(manifest))
    elif steps:
        display.steps(manifest)
    elif layout:
        display.layout(manifest, tensors or "*")
    elif tensors:
        display.tensors(api.tensors(manifest, tensors))
    else:
        display.summary(api.inspect(manifest), quiet)


@cli.command()
@click.argument("source", metavar="SRC")
@click.argument("target", metavar="DST")
@click.option(
    "--to", default="universal", show_default=True, metavar="FORMAT", help="The target's format."
)
@writing
@copying
@common
def convert(source: str, target: str, to: str, **words: Any) -> None:
    """Write SRC as a new checkpoint DST, in another format.

    Weights alone, for inference: zckpt convert SRC DST --weights-only --dtype bf16
    """
    write("convert", source, target, words, to=to)


@cli.command()
@click.argument("source", metavar="SRC")
@click.argument("target", metavar="DST")
@click.option(
    "--checkpoints",
    type=click.Choice(["all", "best-and-last"]),
    help="SRC is a Trainer's output directory; write these of its checkpoints.",
)
@writing
@copying
@common
def reshard(source: str, target: str, **words: Any) -> None:
    """Write SRC as DST, from which its unmodified trainer resumes on --dp ranks.

    A universal SRC goes back to the engine that it came from.
    """
    write("reshard", source, target, words)


@cli.command()
@click.argument("source", metavar="SRC")
@click.argument("target", metavar="DST")
@click.option(
    "--to", type=click.Choice(["hf"]), default="hf", show_default=True, help="The kind of folder."
)
@click.option(
    "--dtype", type=click.Choice(list(DTYPES)), help="Type of the weights [default: the module's]"
)
@click.option(
    "--config",
    metavar="FILE|DIR",
    help="config.json (adapter_config.json of PEFT), or a folder with it and the tokenizer, where "
    "SRC has none.",
)
@click.option(
    "--max-shard-size",
    type=Size(),
    help="Split larger weights into several files [default: 8GiB]",
)
@tying
@renaming
@copying
@common
def export(source: str, target: str, to: str, **words: Any) -> None:
    """Write the weights of SRC as a folder for from_pretrained, and nothing else.

    DST gets weights, configuration, tokenizer and processor files; of a PEFT run the adapter.
    Everything that only a trainer needs stays behind.
    """
    write("export", source, target, words)


def merged(given: Sequence[dict[Any, Any]]) -> dict[Any, Any]:
    """What `--group-defaults` gives, one after the other; a group's own values under its number."""
    found: dict[Any, Any] = {}
    for pairs in given:
        for key, value in pairs.items():
            found[key] = {**found.get(key, {}), **value} if isinstance(key, int) else value
    return found


def write(command: str, source: str, target: str, words: dict[str, Any], **more: Any) -> None:
    """What convert and reshard share: options, progress, the report."""
    from . import api, display

    as_json, quiet, dry_run = (words.pop(key) for key in ("as_json", "quiet", "dry_run"))
    copying = api.Copying(*(words.pop(key) for key in ("jobs", "memory", "io")))
    if command == "export":  # there is no optimizer to read
        if words.pop("param_names") is not None:
            raise WrongOption(
                "--param-names does not apply to export",
                hint="leave it out: no optimizer's state is written",
            )
    else:
        words["stage"] = int(words["stage"]) if words["stage"] else None
        words["group_defaults"] = merged(words["group_defaults"])
    reading = {key: words.pop(key) for key in ("format", "tag", "step_policy") if key in words}
    told: list[str] = []

    def tell(warnings: Sequence[str]) -> None:
        told.extend(warnings)
        display.warn(warnings, quiet or as_json)

    with display.progress(quiet or as_json or dry_run) as begin:
        report = getattr(api, command)(
            source,
            target,
            **reading,
            **more,
            **words,
            copying=copying,
            dry_run=dry_run,
            begin=begin,
            tell=tell,
        )
    try:
        if as_json:
            display.document(report)
        else:
            display.converted(report, quiet, told)
        sys.stdout.flush()
        if dry_run and report["bytes"] > report["free"]:
            raise NotEnoughSpace(
                f"{target} needs {report['bytes'] / 1e9:.3f} GB, {report['free'] / 1e9:.3f} GB are "
                "free",
                hint="choose a target on another filesystem, or free some space",
            )
    except BrokenPipeError:
        raise
    except OSError as error:  # a full disk behind stdout
        if dry_run:
            raise
        click.echo(f"Warning: {target} is complete, but not reported: {error}", err=True)
        os._exit(0)


@cli.command()
@click.argument("path")
@click.option("--against", metavar="PATH", help="Compare with this checkpoint, of any format.")
@click.option(
    "--gather", is_flag=True, help="Rebuild PATH as its engine would, by all-gathering (torch)."
)
@click.option(
    "--device",
    type=click.Choice(["cuda", "cpu"]),
    help="Where to gather and compare [default: a GPU if there is one]",
)
@click.option("--tensors", metavar="GLOB", help="Only the tensors whose name matches.")
@click.option("--save-proof", metavar="FILE", help="Write the report with all checksums.")
@renaming
@moving
@common
def verify(
    path: str,
    against: str | None,
    save_proof: str | None,
    as_json: bool,
    quiet: bool,
    **words: Any,
) -> int:
    """Prove that PATH contradicts itself nowhere, or equals another checkpoint.

    Alone: checksums of files and tensors, every element covered once, copies on several ranks,
    weights and the masters that they were rounded from, steps. What is said only once can be wrong
    unseen: ranks swapped in a ZeRO-3 without 16-bit weights show only --against another checkpoint.

    --against a checkpoint: shared tensors bit for bit, steps and hyper-parameters by value. Or
    --against the FILE of an earlier --save-proof, when the original is gone.

    --gather shares no code with the copying but the parser of files. Faster on several GPUs:
    torchrun --nproc-per-node 4 -m zckpt verify PATH --against PATH --gather

    Exit code 3: something was found.
    """
    from . import api, display

    if save_proof:
        display.can_save(save_proof)
    with display.progress(quiet or as_json) as begin:
        report = api.verify(path, against, begin=begin, **words)
    if report["rank"]:  # rank 0 tells what all have found
        return 0
    if as_json:
        display.document(report)
    else:
        display.verified(report, quiet)
    if save_proof:
        display.save(save_proof, report)
    return 0 if report["equal"] else 3


@cli.command()
@click.argument("a")
@click.argument("b")
@click.option("--tensors", metavar="GLOB", help="Only these tensors, the equal ones too.")
@renaming
@moving
@common
def diff(a: str, b: str, as_json: bool, quiet: bool, **words: Any) -> int:
    """In what two checkpoints of any format differ: first and worst.

    Tensors in the order of the model, steps, hyper-parameters, schedulers. Exit code 3: something
    differs.
    """
    from . import api, display

    with display.progress(quiet or as_json) as begin:
        report = api.diff(a, b, begin=begin, **words)
    if as_json:
        display.document(report)
    else:
        display.differing(report, quiet)
    return 0 if report["equal"] else 3


@cli.command()
@click.argument("path")
@click.option("--tensors", metavar="GLOB", help="Only the tensors whose name matches.")
@moving
@common
def stats(path: str, as_json: bool, quiet: bool, **words: Any) -> None:
    """What the numbers in PATH look like, and which are dead or impossible.

    In float64, over finite numbers: min, max, mean, std (with n - 1, as torch.std), L2 norm; counts
    of NaN, infinite, negative, zero and positive ones; how many have which magnitude, in powers of
    two. Warnings name second moments that are zero or negative, constant weights, NaN, infinities,
    steps that low precision has stopped.
    """
    from . import api, display

    with display.progress(quiet or as_json) as begin:
        report = api.stats(path, begin=begin, **words)
    if as_json:
        display.document(report)
    else:
        display.statistics(report, quiet)


@cli.command("probe-diff")
@click.argument("a", metavar="RUN_A")
@click.argument("b", metavar="RUN_B")
@click.option("--noise", metavar="RUN_A2", help="A second run of what RUN_A is one of.")
@click.option("--summary", metavar="DIR", help="Write a text for each step and run.")
@click.option("--svg", metavar="FILE", help="Draw steps and modules for a browser.")
@click.option("-q", "--quiet", is_flag=True, help="No notes and no picture.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def probe_diff(
    a: str,
    b: str,
    noise: str | None,
    summary: str | None,
    svg: str | None,
    quiet: bool,
    as_json: bool,
) -> int:
    """The first big difference of two runs that zckpt.probe recorded.

    Or that ONNX Runtime's StatisticsSubscriber dumped. Names step, module, forward or backward, and
    what that place means. --noise measures how far two runs of the original are apart: as long as
    they are equal, any difference is a big one.

    Exit code 3: there is a big difference.
    """
    from . import display
    from .probe import comparing, picture, runs

    if svg:
        display.can_save(svg)
    first, second = runs.read(a), runs.read(b)
    report = comparing.report(first, second, runs.read(noise) if noise else None)
    if summary:
        picture.summarise(summary, [("a", first), ("b", second)])
    if svg:
        display.save_text(svg, picture.svg(report))
    if as_json:
        display.document(report)
    else:
        display.probed(report, quiet)
    return 3 if report["big"] else 0


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def formats(as_json: bool) -> None:
    """What is read and written."""
    from . import display
    from .formats import TABLE

    listed = [
        {"format": f.name, "reads": f.reads, "writes": f.writes, "about": f.about} for f in TABLE
    ]
    if as_json:
        display.document({"zckpt": 1, "command": "formats", "formats": listed})
    else:
        display.table(
            ("format", "reads", "writes", ""),
            [(f.name, f.reads, f.writes, f.about) for f in TABLE],
        )


def main(arguments: list[str] | None = None) -> NoReturn:
    """The console script: runs a command, says errors in one sentence and a hint."""
    words = sys.argv[1:] if arguments is None else arguments
    if arguments is None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup
                signal.signal(number, stop)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a path in another encoding
    try:
        code = cli.main(words, prog_name="zckpt", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        sys.exit(2)
    except click.UsageError as error:
        message = error.format_message()
        where = error.ctx.command_path if error.ctx else "zckpt"
        fail(words, "UsageError", message, f"{where} --help says what is understood", 2)
    except WrongOption as error:
        fail(words, type(error).__name__, error.message, error.hint, 2)
    except ZckptError as error:
        fail(words, type(error).__name__, error.message, error.hint, 1)
    except BrokenPipeError:  # `zckpt inspect ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except OSError as error:
        what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        fail(words, "OSError", what, "check the path, and the rights to it", 1)
    except (click.Abort, KeyboardInterrupt) as error:
        cause = error.__cause__ if isinstance(error, click.Abort) else error
        code = 128 + (cause.args[0] if cause and cause.args else signal.SIGINT)
        fail(words, "Interrupted", "interrupted", "no target was made", code)
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        fail(words, "InternalError", what, "a bug of zckpt; ZCKPT_TRACEBACK=1 shows where", 1)
    sys.exit(code if isinstance(code, int) else 0)


def stop(number: int, _frame: object) -> NoReturn:
    """A signal ends the command once; while it tidies up, others are not heard."""
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    raise KeyboardInterrupt(number)


def fail(words: list[str], kind: str, message: str, hint: str, code: int) -> NoReturn:
    """Says the error, as JSON where that was asked for, and ends with `code`."""
    if os.environ.get("ZCKPT_TRACEBACK") and sys.exc_info()[0]:
        import traceback

        traceback.print_exc()
    from .api import own_rank

    if "--json" in words and not own_rank():  # of several processes one prints a document
        command = next((word for word in words if word in cli.commands), None)
        made = {"zckpt": 1, "command": command, "error": kind, "message": message, "hint": hint}
        print(json.dumps(made))
    else:
        from .display import safe

        click.echo(f"Error: {safe(message)}", err=True)
        for place, line in enumerate(hint.splitlines()):
            click.echo(f"{'' if place else 'Hint: '}{safe(line)}", err=True)
    sys.exit(code)
