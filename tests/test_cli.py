"""The command line as users and scripts see it: help, JSON, exit codes, light imports."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch

from zckpt import __version__, api
from zckpt.cli import cli

from .conftest import EXAMPLE, ROOT, Result

Zckpt = Callable[..., Result]


def on_a_terminal(*words: object, columns: int, stderr: bool = False) -> str:
    """What a command prints on a terminal of that width, with `stderr` on both of its outputs."""
    outer, inner = pty.openpty()
    environment = {**os.environ, "COLUMNS": str(columns), "TERM": "xterm", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "zckpt", *map(str, words)]
    errors = inner if stderr else None
    with subprocess.Popen(
        command, stdout=inner, stderr=errors, cwd=ROOT, env=environment
    ) as process:
        os.close(inner)
        printed = b""
        with suppress(OSError):  # the end of a terminal is an error on Linux
            while data := os.read(outer, 1 << 16):
                printed += data
    os.close(outer)
    assert process.returncode == 0
    text = printed.decode().replace("\r\n", "\n")
    return re.sub("\x1b\\[[01]m", "", text)  # bold, and its end


def cells_of(heads: list[str], rows: list[str]) -> list[list[str]]:
    """The cells of a table, without spaces: a cell may go on in the next lines.

    Two blank columns of characters separate cells. A line with text in every cell begins a row.
    """
    lines = [line for line in [*heads, *rows] if line.strip()]
    columns = zip_longest(*lines, fillvalue=" ")
    blank = "".join("1" if set(column) == {" "} else "0" for column in columns)
    spans = [match.span() for match in re.finditer("0+(?:10+)*", blank)]
    cells: list[list[str]] = [[""] * len(spans)]
    for number, line in enumerate(lines):
        texts = [line[start:stop].replace(" ", "") for start, stop in spans]
        if number >= len(heads) and all(texts):
            cells.append(texts)
        else:
            cells[-1] = [a + b for a, b in zip(cells[-1], texts, strict=True)]
    return cells


def of_block(block: str) -> str:
    """The cells of a row that is a block of lines, without the names of the columns."""
    label = len(re.match(r"\S+ +", block)[0])  # type: ignore[index]
    return "".join(line[label:] for line in block.splitlines())


def test_version(zckpt: Zckpt) -> None:
    assert zckpt("--version").out == f"zckpt, version {__version__}\n"


def test_every_command_and_option_has_help() -> None:
    for name, command in cli.commands.items():
        assert command.help, name
        for parameter in command.params:
            if parameter.param_type_name == "option":
                assert getattr(parameter, "help", None), f"{name} {parameter.name}"


@pytest.mark.parametrize(
    "words",
    [
        ["--version"],
        ["--help"],
        ["convert", "--help"],
        ["export", "--help"],
        ["inspect", str(EXAMPLE)],
        ["inspect", str(EXAMPLE), "--json"],
        ["inspect", str(EXAMPLE), "--steps"],
    ],
)
def test_neither_torch_nor_numpy_is_imported_at_the_start(words: list[str]) -> None:
    imported = imported_by("-m", "zckpt", *words)
    assert "zckpt.cli" in imported
    assert imported.isdisjoint(("numpy", "torch")), words


def imported_by(*words: str) -> set[str]:
    """The modules that Python imports from its start to its end."""
    command = [sys.executable, "-X", "importtime", *words]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True)
    return {line.rpartition("|")[2].strip() for line in ended.stderr.splitlines()}


@pytest.mark.parametrize(
    "words",
    [
        ["nothing"],
        ["inspect"],
        ["inspect", EXAMPLE, "--nothing"],
        ["inspect", EXAMPLE, "--from", "nothing"],
        ["inspect", EXAMPLE, "--tensors", "nothing*"],
        ["convert", EXAMPLE, "target", "--to", "nothing"],
        ["convert", EXAMPLE, "target", "--to", "deepspeed-nothing"],
        ["convert", EXAMPLE, "target", "--dtype", "int8"],
        ["convert", EXAMPLE, "target", "--memory", "much"],
        ["convert", EXAMPLE, "target", "--jobs", "0"],
        ["convert", EXAMPLE, "target", "--step-policy", "sometimes"],
    ],
)
def test_wrong_usage_is_2(words: list[Any], zckpt: Zckpt) -> None:
    ended = zckpt(*words)
    assert ended.code == 2
    assert ended.err.startswith("Error: ")
    again = zckpt(*words, "--json")
    assert again.code == 2
    assert again.document["error"]
    assert not Path("target").exists()


@pytest.mark.parametrize(
    "words",
    [["inspect", ""], ["reshard", "", "target", "--dp", "2"], ["convert", EXAMPLE, ""]],
    ids=str,
)
def test_an_empty_argument_is_no_path(words: list[Any], zckpt: Zckpt) -> None:
    """A variable of a script that was not set: the current folder is not meant."""
    ended = zckpt(*words)
    assert (ended.code, "an argument is empty" in ended.err) == (2, True)


class TestInspect:
    def test_summary(self, zckpt: Zckpt) -> None:
        ended = zckpt("inspect", EXAMPLE)
        assert (ended.code, ended.err) == (0, "")
        for word in ("deepspeed 0.19.8", "ZeRO stage 2", "AdamW", "exp_avg_sq", "weight_decay 0.1"):
            assert word in ended.out

    def test_json(self, zckpt: Zckpt) -> None:
        report = zckpt("inspect", EXAMPLE, "--json").document
        assert report["zckpt"] == 2
        facts = ("command", "format", "version", "zero_stage", "dp", "tag", "step", "complete")
        assert [report[key] for key in facts] == [
            "inspect", "deepspeed", "0.19.8", 2, 4, "global_step7", 7, True,
        ]  # fmt: skip
        assert report["parameters"] == 7
        assert report["slots"]["master"] == {
            "tensors": 5, "dtype": "F32", "elements": 1929, "bytes": 4 * 1929,
        }  # fmt: skip
        assert report["groups"][0]["betas"] == [0.9, 0.95]
        assert {"where": "state of flat group 0", "step": 7, "truth": True} in report["steps"]
        assert {"where": "engine, global_steps", "step": 7, "truth": False} in report["steps"]
        files = list((EXAMPLE / "global_step7").iterdir())
        assert report["files"] == len(files)
        assert report["bytes"] == sum(path.stat().st_size for path in files)
        assert report["problems"] == []

    def test_steps(self, zckpt: Zckpt) -> None:
        out = zckpt("inspect", EXAMPLE, "--steps").out
        assert re.search(r"7 +true +state of flat group 1", out)
        assert re.search(r"7 +not used +engine, global_steps", out)

    def test_tensors(self, zckpt: Zckpt) -> None:
        out = zckpt("inspect", EXAMPLE, "--tensors", "fc1.*/exp_avg*").out
        names = [line.split()[0] for line in out.splitlines()[1:]]
        assert sorted(names) == [
            f"fc1.{kind}/{slot}"
            for kind in ("bias", "weight")
            for slot in ("exp_avg", "exp_avg_sq")
        ]
        report = zckpt("inspect", EXAMPLE, "--tensors", "fc1.bias/master", "--json").document
        assert report["tensors"][0]["shape"] == [29]

    def test_layout(self, zckpt: Zckpt) -> None:
        out = zckpt("inspect", EXAMPLE, "--layout", "--tensors", "*/master").out
        assert out.count("optim_states.pt") == 4
        row = next(line for line in out.splitlines() if line.startswith("embedding.weight/master"))
        bar = row.split()[1]
        assert re.fullmatch("0+1+", bar)
        assert row.split()[2:] == ["0:0-472", "1:472-779"]
        fragments = zckpt(
            "inspect", EXAMPLE, "--layout", "--tensors", "embedding.weight/master", "--json"
        ).document["tensors"][0]["fragments"]
        assert [(f["start"], f["stop"]) for f in fragments] == [(0, 472), (472, 779)]

    def test_state(self, zckpt: Zckpt) -> None:
        state = json.loads(zckpt("inspect", EXAMPLE, "--state").out)
        assert state["engine"]["config"]["zero_optimization"] == {"stage": 2}
        assert state["lr_scheduler"] == {"last_batch_iteration": 6}
        step = {"in": "state", "type": "F32", "optimizer": "AdamW"}  # the ds_config names it
        assert state["optimizer"]["step"] == step

    def test_hostile_names_do_not_reach_the_terminal(self, example: Path, zckpt: Zckpt) -> None:
        hostile = example.parent / "a\x1b[31mb"
        example.rename(hostile)
        assert "\x1b" not in zckpt("inspect", hostile).out
        assert "\x1b" not in zckpt("inspect", hostile, "--from", "universal").err

    def test_without_a_terminal_tables_are_plain_columns(self, zckpt: Zckpt) -> None:
        ended = zckpt("inspect", EXAMPLE, "--tensors", "fc1.bias/master")
        assert (ended.code, ended.err) == (0, "")
        assert ended.out.splitlines() == [
            "tensor           dtype  shape  elements  fragments",
            "fc1.bias/master  F32    29           29          3",
        ]

    def test_on_a_terminal_rich_draws_the_tables(self) -> None:
        words = ["inspect", EXAMPLE, "--tensors", "fc1.bias/master"]
        out = on_a_terminal(*words, columns=120)
        assert re.search(r"^ *tensor +dtype +shape +elements +fragments *$", out, re.MULTILINE)
        assert "\u2500" * 20 in out  # the line below the heads
        assert re.search(r"fc1\.bias/master +F32 +29 +29 +3", out)
        narrow = on_a_terminal(*words, columns=40)
        assert max(map(len, narrow.splitlines())) <= 40
        assert re.search(r"fc1\.bias/master +F32 +29", narrow)  # a name is never broken
        assert "fragments: 3" in narrow  # without a column of its own

    @pytest.mark.parametrize(
        ("words", "wide"),
        [
            (["inspect", EXAMPLE, "--steps"], False),
            (["inspect", EXAMPLE, "--tensors", "*"], True),
            (["formats"], False),
        ],
    )
    def test_tables_survive_40_columns_and_pipes(
        self, words: list[Any], wide: bool, zckpt: Zckpt
    ) -> None:
        narrow = on_a_terminal(*words, *["--wide"] * wide, columns=40)
        assert wide or max(map(len, narrow.splitlines())) <= 40
        piped = zckpt(*words).out.splitlines()
        drawn = narrow.splitlines()
        rules = [number for number, line in enumerate(drawn) if line.startswith("\u2500")]
        if not rules:  # a row is a block of lines
            rows = zckpt(*words).out.splitlines()[1:]
            blocks = narrow.strip().split("\n\n")
            assert [re.sub(r"\s+", "", of_block(block)) for block in blocks] == [
                re.sub(r"\s+", "", row) for row in rows
            ]
            return
        cells = cells_of(drawn[: rules[0]], drawn[rules[0] + 1 :])
        assert cells == cells_of(piped[:1], piped[1:])
        assert len(cells) == len(piped)

    def test_a_table_of_many_columns_is_a_list_on_a_narrow_terminal(self) -> None:
        words = ("stats", EXAMPLE, "--tensors", "fc1.bias/exp_avg", "-q")
        lines = on_a_terminal(*words, columns=40).splitlines()
        assert lines[:4] == [
            "tensor      fc1.bias/exp_avg",
            "dtype       F32",
            "shape       29",
            lines[3],
        ]
        assert lines[3].startswith("min         -0.0")

    def test_hostile_names_do_not_reach_rich(self, example: Path) -> None:
        hostile = example.parent / "a\x1b[31mb[bold]c"
        example.rename(hostile)
        out = on_a_terminal("inspect", hostile, columns=300)
        assert "a\\x1b[31mb[bold]c" in out
        assert "\x1b[31mb" not in out

    def test_output_into_a_closed_pipe(self) -> None:
        command = f"{sys.executable} -m zckpt inspect {EXAMPLE} --tensors '*' | head -1"
        ended = subprocess.run(
            command, shell=True, capture_output=True, text=True, cwd=ROOT, check=True
        )
        assert ended.stderr == ""


class TestConvert:
    def test_says_what_it_did(self, tmp_path: Path, zckpt: Zckpt) -> None:
        ended = zckpt("convert", EXAMPLE, tmp_path / "u")
        assert (ended.code, ended.err) == (0, "")
        assert "step 7" in ended.out
        assert zckpt("convert", EXAMPLE, tmp_path / "quiet", "-q").out == ""

    def test_json(self, tmp_path: Path, zckpt: Zckpt) -> None:
        report = zckpt("convert", EXAMPLE, tmp_path / "u", "--json").document
        assert (report["zckpt"], report["command"], report["step"]) == (2, "convert", 7)
        size = sum(path.stat().st_size for path in (tmp_path / "u").glob("*.safetensors"))
        manifest = (tmp_path / "u" / "manifest.json").stat().st_size
        assert size <= report["bytes"] <= size + manifest
        assert report["records"]["unchecked"] == 0

    def test_says_which_copied_files_may_run_code(self, tmp_path: Path, zckpt: Zckpt) -> None:
        run = shutil.copytree(EXAMPLE, tmp_path / "run")
        words = ("convert", run, tmp_path / "u", "--to", "deepspeed")
        assert "copied unchanged" not in zckpt(*words, "--dry-run").out
        (run / "trainer_state.json").write_text("{}")
        copied = "copied unchanged: 1 file\n"
        assert copied in zckpt(*words, "--dry-run").out
        (run / "Model.PY").touch()
        copied = "2 files; Model.PY may run code in the program that loads it"
        assert copied in zckpt(*words, "--dry-run").out
        (run / "scheduler.pt").touch()
        copied = "; Model.PY, scheduler.pt may run code in the program that loads them"
        assert copied in zckpt(*words).out
        report = zckpt(*words[:2], tmp_path / "v", "--json").document
        names = ("Model.PY", "scheduler.pt", "trainer_state.json")
        assert report["copied"] == [f"siblings/{name}" for name in names]

    def test_progress_says_what_is_written(self, tmp_path: Path) -> None:
        texts: list[str] = []

        class Bar:
            def __call__(self, count: int) -> None:
                pass

            def describe(self, text: str) -> None:
                texts.append(text)

        api.convert(EXAMPLE, tmp_path / "u", begin=lambda _: Bar())
        assert "writing exp_avg.safetensors, 3 of 4 files" in texts
        places = [re.fullmatch(r"writing \S+, (\d+) of 4 files", text) for text in texts]
        assert [place and place[1] for place in places] == ["1", "2", "3", "4"]
        texts.clear()
        api.verify(EXAMPLE, tmp_path / "u", begin=lambda _: Bar())
        assert "comparing fc1.weight/exp_avg" in texts
        texts.clear()
        api.stats(EXAMPLE, begin=lambda _: Bar())
        assert texts[0].startswith("measuring ")

    def test_progress_is_a_bar_on_a_terminal(self, tmp_path: Path) -> None:
        printed = on_a_terminal("convert", EXAMPLE, tmp_path / "u", columns=120, stderr=True)
        assert "4 of 4 files" in printed

    @pytest.mark.parametrize("columns", [60, 80, 100])
    def test_a_bar_breaks_no_number(self, columns: int) -> None:
        printed = on_a_terminal("verify", EXAMPLE, "-j", 1, columns=columns, stderr=True)
        text = re.sub("\x1b\\[[0-9;?]*[a-zA-Z]", "", printed)
        bars = [each for each in re.split("[\r\n]", text) if "/27.8" in each]
        assert bars
        for each in bars:
            assert re.search(r"/27\.8 kB ", each), each

    def test_says_how_a_trainer_resumes(self, example: Path, tmp_path: Path, zckpt: Zckpt) -> None:
        line = f'next: trainer.train(resume_from_checkpoint="{tmp_path}/{{}}")'
        out = zckpt("reshard", example, tmp_path / "a", "--dp", 2).out
        assert out.splitlines()[-1] == f'next: model_engine.load_checkpoint("{tmp_path}/a")'
        (example / "trainer_state.json").write_text('{"global_step": 7}')
        torch.save({"last_epoch": 7}, example / "scheduler.pt")
        out = zckpt("reshard", example, tmp_path / "b", "--dp", 2).out
        assert out.splitlines()[-1] == line.format("b")
        run = tmp_path / "several"
        run.mkdir()
        example.rename(run / "checkpoint-7")
        words = ("reshard", run, tmp_path / "c", "--dp", 2, "--checkpoints", "all")
        assert line.format("c/checkpoint-7") in zckpt(*words).out

    @pytest.mark.parametrize(
        ("words", "expected"),
        [
            ((), "zckpt reshard TARGET NEW --dp RANKS"),
            (("--weights-only",), 'safetensors.torch.load_file("TARGET/model.safetensors")'),
            (
                ("--to", "dcp"),
                'torch.distributed.checkpoint.load(state_dict, checkpoint_id="TARGET")',
            ),
            (
                ("--weights-only", "--max-file-size", "1KB"),
                "[safetensors.torch.load_file(file) for file in sorted(glob.glob("
                '"TARGET/*.safetensors"))]',
            ),
            (
                ("--to", "deepspeed", "--weights-only"),
                'model_engine.load_checkpoint("TARGET", load_optimizer_states=False)',
            ),
            (
                ("--to", "gathered", "--dialect", "safetensors"),
                'safetensors.torch.load_model(model, "TARGET/model.safetensors")',
            ),
            (("--to", "gathered"), 'model.load_state_dict(torch.load("TARGET/model.pt"))'),
            (
                ("--to", "deepspeed-universal"),
                'model_engine.load_checkpoint("TARGET", tag="global_step7"), with {"checkpoint": '
                '{"load_universal": true}} in the ds_config',
            ),
        ],
    )
    def test_says_what_to_type_next(
        self, words: tuple[str, ...], expected: str, tmp_path: Path, zckpt: Zckpt
    ) -> None:
        target = tmp_path / "target"
        last = zckpt("convert", EXAMPLE, target, *words).out.splitlines()[-1]
        assert last == f"next: {expected.replace('TARGET', str(target))}"

    def test_what_to_type_next_under_the_names_of_another_program(
        self, tmp_path: Path, zckpt: Zckpt
    ) -> None:
        """The engine of the source does not load it: `reshard` would fail."""
        words = ("convert", ROOT / "examples/trainer/checkpoint-4", tmp_path / "u")
        last = zckpt(*words, "--family", "llama").out.splitlines()[-1]
        assert last == f"next: zckpt convert {tmp_path / 'u'} NEW --to FORMAT"
        for name in ("dcp", "gathered"):
            assert zckpt("convert", tmp_path / "u", tmp_path / name, "--to", name).code == 0

    @pytest.mark.parametrize(
        ("words", "resumes"),
        [
            (("--to", "deepspeed"), True),
            (("--to", "dcp", "--dialect", "accelerate"), True),
            (("--to", "gathered", "--dialect", "safetensors"), True),
            (("--to", "dcp"), False),
            (("--to", "gathered"), False),
            (("--to", "onnxruntime"), False),
            (("--to", "deepspeed-universal"), False),
            (("--to", "deepspeed", "--weights-only"), False),
        ],
    )
    def test_names_the_trainer_only_where_it_resumes(
        self, words: tuple[str, ...], resumes: bool, tmp_path: Path, zckpt: Zckpt
    ) -> None:
        target = tmp_path / 'a "b" c'
        out = zckpt("convert", ROOT / "examples/trainer/checkpoint-4", target, *words).out
        line = f"next: trainer.train(resume_from_checkpoint={json.dumps(str(target))})"
        assert (out.splitlines()[-1] == line) == resumes

    def test_a_path_in_the_next_command_is_quoted(self, tmp_path: Path, zckpt: Zckpt) -> None:
        out = zckpt("convert", EXAMPLE, tmp_path / "a b").out
        assert out.splitlines()[-1] == f"next: zckpt reshard '{tmp_path / 'a b'}' NEW --dp RANKS"

    @pytest.mark.parametrize(
        ("batch", "said"),
        [
            ({"train_batch_size": 6, "gradient_accumulation_steps": 2}, "=3 and gradient_acc"),
            ({"train_batch_size": 24, "gradient_accumulation_steps": 3}, ""),
            ({"train_batch_size": 3 * 10**12, "gradient_accumulation_steps": 7}, "batch of 24"),
            ({"train_batch_size": -8, "gradient_accumulation_steps": 3}, "batch of 24"),
        ],
    )
    def test_batch_sizes_that_fit_are_named(
        self, batch: dict[str, int], said: str, tmp_path: Path, zckpt: Zckpt
    ) -> None:
        config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}, **batch}
        (tmp_path / "c.json").write_text(json.dumps(config))
        words = ("--dp", 2, "--dry-run", "--ds-config", tmp_path / "c.json")
        ended = zckpt("reshard", EXAMPLE, tmp_path / "a", *words)
        assert ended.code == 0
        assert said in ended.err
        assert bool(said) == ("batch" in ended.err)

    def test_says_that_no_number_of_ranks_was_given(self, tmp_path: Path, zckpt: Zckpt) -> None:
        warning = "Warning: no --dp was given: the target is for 4 ranks, like the source"
        assert warning in zckpt("reshard", EXAMPLE, tmp_path / "a").err
        assert warning not in zckpt("reshard", EXAMPLE, tmp_path / "b", "--stage", 3).err

    def test_the_source_is_no_target(self, example: Path, zckpt: Zckpt) -> None:
        ended = zckpt("reshard", example, example, "--dp", 2)
        assert ended.code == 2
        assert f"{example} is the source itself" in ended.err
        assert f"mv {example} {example}-old" in ended.err

    def test_dry_run_writes_nothing(self, tmp_path: Path, zckpt: Zckpt) -> None:
        report = zckpt("convert", EXAMPLE, tmp_path / "u", "--dry-run", "--json").document
        assert report["dry_run"] is True
        assert "master.safetensors" in report["files"]
        assert report["memory"] <= 256 << 20
        assert report["free"] > report["bytes"] > 0
        assert list(tmp_path.iterdir()) == []
        assert "master.safetensors" in zckpt("convert", EXAMPLE, tmp_path / "u", "--dry-run").out

    @pytest.mark.parametrize(
        "options",
        [["--jobs", "1"], ["-j", "5"], ["--io", "buffered"], ["--memory", "8MiB"]],
    )
    def test_how_bytes_move_does_not_matter(
        self, options: list[str], tmp_path: Path, zckpt: Zckpt
    ) -> None:
        assert zckpt("convert", EXAMPLE, tmp_path / "a").code == 0
        assert zckpt("convert", EXAMPLE, tmp_path / "b", *options).code == 0
        for path in (tmp_path / "a").iterdir():
            assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()

    def test_a_signal_leaves_nothing(self, tmp_path: Path) -> None:
        """TERM is what a queue sends before it kills."""
        script = (
            "import os, signal, sys; from zckpt import cli; from zckpt.copying import assembling\n"
            "assembling.Assembler.assemble = lambda *_: os.kill(os.getpid(), signal.SIGTERM)\n"
            f"sys.argv = ['zckpt', 'convert', {str(EXAMPLE)!r}, {str(tmp_path / 'u')!r}]\n"
            "cli.main()"
        )
        command = [sys.executable, "-c", script]
        ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        assert ended.returncode == 143
        assert "Error: interrupted" in ended.stderr
        assert list(tmp_path.iterdir()) == []

    def test_a_report_that_cannot_be_printed_is_no_failure(self, tmp_path: Path) -> None:
        command = f"{sys.executable} -m zckpt convert {EXAMPLE} {tmp_path}/u > /dev/full"
        ended = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=ROOT)
        assert (ended.returncode, "is complete" in ended.stderr) == (0, True)
        assert (tmp_path / "u").is_dir()

    def test_without_stderr(self, tmp_path: Path, zckpt: Zckpt) -> None:
        """The next file that is opened gets stderr's number; no warning may end up in it."""
        to = "--to deepspeed-universal"
        assert "Warning" in zckpt("convert", EXAMPLE, tmp_path / "a", *to.split()).err
        command = f"{sys.executable} -m zckpt convert {EXAMPLE} {tmp_path}/b {to} 2>&-"
        ended = subprocess.run(
            command, shell=True, check=True, cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        assert ended.stdout.startswith(f"{tmp_path}/b: ")
        assert "Warning" not in ended.stdout
        files = [path for path in (tmp_path / "a").rglob("*") if path.is_file()]
        assert len(files) > 3
        for path in files:
            other = tmp_path / "b" / path.relative_to(tmp_path / "a")
            assert path.read_bytes() == other.read_bytes()

    def test_an_error_without_stderr(self, tmp_path: Path) -> None:
        command = f"{sys.executable} -m zckpt convert {tmp_path}/nothing {tmp_path}/u 2>&-"
        ended = subprocess.run(command, shell=True, cwd=ROOT, stdout=subprocess.PIPE)
        assert (ended.returncode, ended.stdout) == (1, b"")
        assert list(tmp_path.iterdir()) == []

    def test_error_as_json(self, tmp_path: Path, zckpt: Zckpt) -> None:
        ended = zckpt("convert", tmp_path / "nothing", tmp_path / "u", "--json")
        report = ended.document
        assert ended.code == 1
        assert ended.err == ""
        assert report["command"] == "convert"
        assert report["error"] == "NotACheckpoint"
        assert report["hint"]


def test_formats(zckpt: Zckpt) -> None:
    listed = zckpt("formats", "--json").document["formats"]
    assert [item["format"] for item in listed] == [
        "deepspeed",
        "deepspeed-universal",
        "onnxruntime",
        "megatron",
        "dcp",
        "gathered",
        "universal",
        "hf",
    ]
    assert "deepspeed" in zckpt("formats").out


def test_python_api_is_what_the_readme_says() -> None:
    import zckpt

    assert json.dumps(zckpt.inspect(zckpt.read(EXAMPLE)))
    with pytest.raises(AttributeError):
        zckpt.nothing  # noqa: B018


def test_hostile_names_are_printed_without_their_control_characters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from zckpt import display

    report = {"path": "a", "against": "b", "tensors": 1, "bytes": 1, "seconds": 0.0, "step": None}
    report |= {"slots": {"param": 1}}
    report |= {"gathered": False, "differences": [], "only_a": ["\x1b[2Jw/param"]}
    display.verified(report, quiet=False)
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    assert "\\x1b[2Jw/param" in printed


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (MemoryError, "too little memory is free"),
        (RecursionError, "the checkpoint cannot be read: it"),
    ],
)
def test_too_little_memory_or_stack_is_a_sentence(
    kind: type[Exception], message: str, zckpt: Zckpt, monkeypatch: pytest.MonkeyPatch
) -> None:
    def read(*_: object, **_options: object) -> None:
        raise kind

    monkeypatch.setattr("zckpt.reading.read", read)
    ended = zckpt("inspect", EXAMPLE)
    assert ended.code == 1
    assert f"Error: {message}" in ended.err
    assert "InternalError" not in ended.err
