"""`zckpt check` and `auto_resume` say the same of a checkpoint; the proposed command works."""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import zckpt
import zckpt as zckpt_package
from zckpt import api, formats
from zckpt.cli.commands import cli
from zckpt.errors import ZckptError
from zckpt.files import torchshell
from zckpt.resume.check import check
from zckpt.resume.fitting import Asked
from zckpt.resume.runs import candidates

from ..conftest import EXAMPLE, ROOT, Result
from ..engines.optimizers import FACTORIES
from ..formats.gathered import torch_ranks
from ..formats.gathered.plain_torch import names_by_group, save, trained_pair
from ..formats.gathered.test_verl import rows_folder
from .conftest import TAGS
from .test_runs import MEGATRON, emptied, laid_out

DATA = ROOT / "tests" / "data"
TRAINER = ROOT / "examples" / "trainer" / "checkpoint-4"
LEGACY = DATA / "megatron-0.16.1-legacy-tp2"
PIPELINE = DATA / "zckpt-0.1-pp2_tp2" / "run"
Run = Callable[..., Result]


def made(report: Any, target: Path, run: Run) -> Result:
    """What the proposed command gives."""
    words = [str(target) if word == "DST" else word for word in shlex.split(report["fix"])]
    return run(*words[1:])


@pytest.mark.parametrize("name", ["trainer_state.json", "latest", f"{TRAINER.name}"])
def test_a_checkpoint_that_is_set_aside_is_not_said_to_load(
    name: str, tmp_path: Path, zckpt: Run
) -> None:
    run = laid_out(tmp_path / "run", TRAINER, "checkpoint-9", "checkpoint-10")
    newest = run / "checkpoint-10"
    if name in ("trainer_state.json", "latest"):
        (newest / name).unlink()
    else:
        emptied(newest / "scheduler.pt")
    ended = zckpt("check", run, "--dp", 2)
    assert ended.code == 3
    assert f"{newest} does not load as it is" in ended.out
    ended = zckpt("auto-resume", run, "--dp", 2)
    assert ended.out == f"{run / 'checkpoint-9'}\n"
    assert "checkpoint-10 is skipped" in ended.err


@pytest.mark.parametrize(
    ("words", "to"),
    [
        (("--for", "universal"), "universal"),
        (("--for", "gathered"), "gathered"),
        (("--for", "dcp", "--stage", 3), "dcp"),
    ],
)
def test_the_command_has_what_its_format_understands(
    words: tuple[object, ...], to: str, run: Path, tmp_path: Path, zckpt: Run
) -> None:
    report = zckpt("check", run, *words, "--json").document
    assert made(report, tmp_path / "dst", zckpt).code == 0
    assert to in report["fix"]


def test_the_command_keeps_the_sequence_ranks(tmp_path: Path, zckpt: Run) -> None:
    words = ("check", DATA / "deepspeed-0.18.2-z1_dp4_sp2" / "run", "--dp", 8, "--sp", 4)
    report = zckpt(*words, "--json").document
    assert report["sizes"] == {"dp": 8, "sp": 4}
    assert made(report, tmp_path / "dst", zckpt).code == 0
    assert zckpt_package.read(tmp_path / "dst").run.origin.sp == 4


def test_the_command_quotes_a_tag(run: Path, tmp_path: Path, zckpt: Run) -> None:
    tag = "best é 'x'"
    for each in TAGS:
        shutil.rmtree(run / each)
    shutil.copytree(EXAMPLE / TAGS[-1], run / tag)
    (run / "latest").write_text(tag)
    report = zckpt("check", run, "--dp", 3, "--json").document
    assert made(report, tmp_path / "dst", zckpt).code == 0


def test_the_command_for_ranks_of_megatron(tmp_path: Path, zckpt: Run) -> None:
    """Their files do not say how many there are, so that 1 is not what the source has."""
    report = zckpt("check", LEGACY, "--tp", 1, "--json").document
    assert "--tp 1" in report["fix"]
    assert made(report, tmp_path / "dst", zckpt).code == 0
    assert zckpt("check", tmp_path / "dst", "--tp", 1).code == 0


@pytest.mark.parametrize(
    ("source", "words", "refused"),
    [
        (EXAMPLE, ("--pp", 2), "is not a pipeline"),
        (EXAMPLE, ("--tp", 3), "nothing says how 7 parameters are sliced"),
        (PIPELINE, ("--tp", 3), "cannot be cut evenly over 3 tensor ranks"),
        (EXAMPLE, ("--for", "megatron"), "only from a checkpoint of Megatron-Core"),
        (EXAMPLE, ("--for", "hf"), "has no config.json"),
    ],
)
def test_what_no_command_makes(
    source: Path, words: tuple[object, ...], refused: str, tmp_path: Path, zckpt: Run
) -> None:
    """The sentence is that of the command, and nothing is written."""
    ended = zckpt("check", source, *words)
    assert ended.code == 3
    assert "no command makes it fit: " in ended.out
    assert refused in ended.out
    report = zckpt("check", source, *words, "--json").document
    assert (report["fix"], refused in report["refused"]["message"]) == (None, True)


EVERY = [EXAMPLE, TRAINER, *sorted(DATA.glob("*-*")), *sorted((DATA / "onnxruntime").iterdir())]
FEW = (EXAMPLE, TRAINER, PIPELINE, LEGACY)
ASKED: list[dict[str, Any]] = [
    *({"dp": dp} for dp in (1, 3, 40)),
    *({"dp": 2, "stage": stage} for stage in (0, 3)),
    *({"dp": 2, "engine": name} for name in ("dcp", "deepspeed", "gathered", "megatron")),
    *({"engine": name} for name in ("universal", "onnxruntime", "deepspeed-universal", "hf")),
]


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(
            path,
            id=path.name,
            marks=[pytest.mark.exhaustive, *([pytest.mark.first] * (path in FEW))],
        )
        for path in EVERY
    ],
)
def test_it_refuses_what_the_command_refuses(source: Path, tmp_path: Path) -> None:
    """No file of the target is built for it, and the dry run of `convert` builds them all."""
    for asked in ASKED:
        words = {name: value for name, value in asked.items() if name != "engine"}
        try:
            report = check(os.fspath(source), Asked(None, words), asked.get("engine"))
        except ZckptError:  # it is no checkpoint, or not whole
            continue
        if report["fix"]:
            typed = shlex.split(report["fix"])[1:]
            ended = invoked(*[str(tmp_path / "dst") if w == "DST" else w for w in typed])
            assert ended == "", (asked, report["fix"], ended)
        elif report["refused"]:
            (own, *_), to = candidates(os.fspath(source)), asked.get("engine")
            refused: Callable[..., Any] = zckpt.reshard
            if to not in (None, report["format"]):
                refused, words = zckpt.convert, {**of_format(asked), "to": to}
            with pytest.raises(ZckptError) as raised:
                refused(own.path, tmp_path / "dst", dry_run=True, tag=own.tag, **words)
            assert raised.value.message == report["refused"]["message"], asked


OPTIMIZERS = ("momentum", "counted", "nadam", "lion", "amsgrad", "adafactor", "odd", "estimating")
TARGETS: list[dict[str, Any]] = [
    *({"to": "deepspeed", "dp": 2, "stage": stage} for stage in (0, 1, 3)),
    *({"to": to} for to in ("dcp", "gathered", "universal", "deepspeed-universal")),
    {"to": "onnxruntime", "dp": 2},
]


def outcome(function: Callable[..., Any], *paths: Path, **words: Any) -> str:
    try:
        function(*paths, **words)
    except ZckptError as error:
        return error.message
    return ""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.exhaustive, *([pytest.mark.first] * (place < 2))])
        for place, name in enumerate(OPTIMIZERS)
    ],
)
def test_it_knows_which_states_a_target_keeps(name: str, tmp_path: Path) -> None:
    def made_by(groups: list[dict[str, Any]], lr: float) -> torch.optim.Optimizer:
        return FACTORIES[name]([{"lr": lr, **group} for group in groups])

    pair = trained_pair(made_by)
    whole, ranks = save(tmp_path / "run", pair, "model.pt", "optim.pt"), tmp_path / "ranks"
    named: dict[str, Any] = {"param_names": names_by_group(pair)}
    sources: list[tuple[Path, dict[str, Any]]] = [(whole, named)]
    if not outcome(zckpt.convert, whole, ranks, to="deepspeed", dp=2, stage=1, **named):
        sources.append((ranks, {}))
    for source, words in sources:
        for target in TARGETS:
            tried = outcome(api.try_out, source, **target, **words)
            dry = outcome(zckpt.convert, source, tmp_path / "dst", dry_run=True, **target, **words)
            assert tried == dry, (source.name, target)


def invoked(*words: str) -> str:
    """The error of a command as a dry run; empty if there is none."""
    ended = CliRunner().invoke(cli, [*words, "--dry-run", "-q"])
    return "" if ended.exit_code == 0 else ended.output or repr(ended.exception)


def of_format(asked: dict[str, Any]) -> dict[str, Any]:
    """The sizes that the target takes."""
    known = {option.name for option in formats.named(asked["engine"]).options or ()}
    fits_any = formats.named(asked["engine"]).fits_any_dp
    return {n: v for n, v in asked.items() if n in known and not (fits_any and n == "dp")}


def test_no_file_of_the_target_is_built(monkeypatch: pytest.MonkeyPatch, zckpt: Run) -> None:
    """For the states that every format has a place for."""
    monkeypatch.setattr(torchshell.Storages, "__init__", None)
    monkeypatch.setattr(tempfile, "TemporaryDirectory", None)
    for words in (("--dp", 3), ("--dp", 2, "--stage", 3), ("--for", "gathered"), ("--for", "dcp")):
        assert "this command makes it fit" in zckpt("check", EXAMPLE, *words).out


def test_a_state_that_only_files_show(tmp_path: Path, zckpt: Run) -> None:
    """A flat buffer has no place for a number of one parameter."""
    pair = trained_pair(torch.optim.NAdam)
    save(tmp_path / "run", pair, "model.pt", "optim.pt")
    names = tmp_path / "names.txt"
    names.write_text("\n".join(names_by_group(pair)))
    words = ("--for", "deepspeed", "--dp", 2, "--param-names", names)
    assert "this command makes it fit" in zckpt("check", tmp_path / "run", *words).out
    for state in pair[1].state.values():
        state["own"] = torch.rand(())
    save(tmp_path / "other", pair, "model.pt", "optim.pt")
    ended = zckpt("check", tmp_path / "other", *words)
    assert "no command makes it fit: the target cannot store the optimizer's own" in ended.out


def test_one_of_a_run(run: Path, tmp_path: Path, zckpt: Run) -> None:
    ended = zckpt("check", run, "--tag", TAGS[0], "--dp", 3, "--json").document
    assert ended["path"] == str(run / TAGS[0])
    made(ended, tmp_path / "dst", zckpt)
    assert (tmp_path / "dst" / TAGS[0]).is_dir()
    folders = laid_out(tmp_path / "folders", TRAINER, "checkpoint-9", "checkpoint-10")
    ended = zckpt("check", folders, "--tag", "checkpoint-9", "--dp", 2)
    assert (
        ended.out
        == f"{folders / 'checkpoint-9'} loads as it is (deepspeed, dp 2); no tensor was read\n"
    )
    ended = zckpt("check", folders, "--tag", "checkpoint-8")
    assert ended.code == 2
    assert "it has checkpoint-10, checkpoint-9" in ended.err


def test_files_of_other_meshes_stay(tmp_path: Path, zckpt: Run) -> None:
    """HSDP's, which zckpt does not write: whole files would not be what the program loads."""
    make = torch_ranks.dtensors([1, 2], [None, 0])
    rows_folder(tmp_path / "actor", lambda rank, whole: make(rank, whole.view(len(whole), -1)))
    report = zckpt("check", tmp_path / "actor", "--dp", 3, "--json").document
    assert report["fix"] is None
    with pytest.raises(ZckptError) as raised:
        zckpt_package.auto_resume(tmp_path / "actor", dp=3)
    assert raised.value.message.endswith(report["refused"]["message"])


def test_files_of_ranks_by_other_names_stay(tmp_path: Path, zckpt: Run) -> None:
    """They would get verl's names, for which another program does not look."""
    rows_folder(tmp_path / "actor", torch_ranks.dtensors([2], [0]))
    assert zckpt("check", tmp_path / "actor", "--dp", 3, "--json").document["fix"]
    for path in (tmp_path / "actor").glob("*.pt"):
        path.rename(path.with_name(path.name.replace("_world_size_2", "")))
    assert "no command makes it fit" in zckpt("check", tmp_path / "actor", "--dp", 3).out


@pytest.mark.parametrize(("to", "dialect"), [("dcp", "accelerate"), ("gathered", "safetensors")])
def test_the_files_that_the_trainer_looks_for(
    to: str, dialect: str, tmp_path: Path, zckpt: Run
) -> None:
    report = zckpt("check", TRAINER, "--for", to, "--json").document
    assert report["fix"].endswith(f"--dialect {dialect}")
    words = [str(tmp_path / "d") if w == "DST" else w for w in shlex.split(report["fix"])]
    assert "the trainer does not find" not in zckpt(*words[1:]).err


def test_a_universal_checkpoint_gets_its_ranks(tmp_path: Path, zckpt: Run) -> None:
    zckpt_package.convert(EXAMPLE, tmp_path / "universal")
    report = zckpt("check", tmp_path / "universal", "--dp", 3, "--json").document
    made(report, tmp_path / "dst", zckpt)
    assert zckpt("check", tmp_path / "dst", "--dp", 3).code == 0


def test_a_run_that_names_no_iteration(tmp_path: Path, zckpt: Run) -> None:
    """Megatron-LM would begin anew, and say nothing."""
    run = Path(shutil.copytree(MEGATRON, tmp_path / "run"))
    tracker = run / "latest_checkpointed_iteration.txt"
    tracker.unlink(missing_ok=True)
    ended = zckpt("check", run)
    assert ended.code == 3
    assert (
        f"{tracker} is missing: Megatron-LM loads iter_0000003 only with --ckpt-step 3" in ended.out
    )
    tracker.write_text("3")
    assert zckpt("check", run).code == 0


@pytest.mark.parametrize(
    ("named", "told"),
    [
        ("4", "names iter_0000004: Megatron-LM loads iter_0000003 only with --ckpt-step 3"),
        ("9", "names iter_0000009: Megatron-LM loads iter_0000003 only with --ckpt-step 3"),
        ("abc", "contains 'abc': write 3 into it, and Megatron-LM loads iter_0000003"),
        ("", "contains '': write 3 into it, and Megatron-LM loads iter_0000003"),
        (None, "is missing: Megatron-LM loads iter_0000003 only with --ckpt-step 3"),
        ("3", None),
    ],
)
def test_an_iteration_that_the_run_does_not_name(
    named: str | None, told: str | None, tmp_path: Path, zckpt: Run
) -> None:
    run = Path(shutil.copytree(MEGATRON, tmp_path / "run"))
    shutil.copytree(run / "iter_0000003", run / "iter_0000004")
    broken = run / "iter_0000004" / "__0_0.distcp"
    broken.write_bytes(broken.read_bytes()[:-20])
    tracker = run / "latest_checkpointed_iteration.txt"
    tracker.unlink(missing_ok=True)
    if named is not None:
        tracker.write_text(named)
    ended = zckpt("auto-resume", run)
    assert (ended.code, ended.out) == (0, f"{run}\n")
    assert ("Megatron-LM" in ended.err) == bool(told)
    assert (told or "") in ended.err


def test_a_hint_is_not_lost() -> None:
    with pytest.raises(ZckptError) as raised:
        zckpt.auto_resume(DATA / "accelerate-1.14.0-lora-w2", dp=2)
    assert "adapter_model.safetensors beside it has the complete adapter" in raised.value.hint
