"""`zckpt list RUN`: a row for each checkpoint, whatever is wrong with the others."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from rich.progress import Progress

import zckpt as package
from zckpt.display.terminal import Bar
from zckpt.errors import (
    InconsistentCheckpoint,
    MissingExtra,
    NotACheckpoint,
    SourceChanged,
    StoreError,
    UnsupportedCheckpoint,
    WrongOption,
    ZckptError,
    note,
    problem,
    warning,
)
from zckpt.resume import listing
from zckpt.resume.runs import Candidate

from ..conftest import EXAMPLE, ROOT, Result
from ..resume.conftest import TAGS, flip
from ..test_cli import on_a_terminal

Zckpt = Callable[..., Result]
MEGATRON = ROOT / "tests" / "data" / "megatron-0.16.1-tp2"
TRAINER = ROOT / "examples" / "trainer" / "checkpoint-4"
SAVED = datetime(2026, 3, 1, 4, 5, 6).astimezone()
OPTIM = "global_step4/bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"
WEIGHTS = "global_step4/mp_rank_00_model_states.pt"


def saved_at(folder: Path, when: float) -> None:
    for path in (*folder.rglob("*"), folder):
        os.utime(path, (when, when))


def count(folder: Path, step: int) -> None:
    """Lets the counters of the Trainer and of its engine be that of the folder's name."""
    path = folder / "trainer_state.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "global_step": step}))
    path = folder / WEIGHTS
    torch.save({**torch.load(path, weights_only=False), "global_steps": step}, path)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Five checkpoints of a Trainer on 2 ranks, saved on one day."""
    run = tmp_path / "out"
    for step in (80, 90, 100, 110, 120):
        count(Path(shutil.copytree(TRAINER, run / f"checkpoint-{step}")), step)
        saved_at(run / f"checkpoint-{step}", SAVED.timestamp() + 60 * step)
    return run


def rows(ended: Result) -> dict[str, Any]:
    """The rows of a document by their names; these are in the order of the steps."""
    return {row["name"]: row for row in ended.document["checkpoints"]}


def states(ended: Result) -> dict[str, str]:
    """The last word of each row of the table."""
    lines = ended.out.splitlines()[1:]
    return {line.split()[0]: line.split()[-1] for line in lines if re.match(r"\S+ {2}", line)}


def test_a_row(run: Path, zckpt: Zckpt) -> None:
    ended = zckpt("list", run, "--json")
    assert ended.code == 0
    report = ended.document
    assert (report["run"], report["sizes"]) == (str(run), {})
    row = report["checkpoints"][-1]
    folder = run / "checkpoint-120"
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert datetime.fromisoformat(row.pop("saved")).timestamp() == SAVED.timestamp() + 7200
    assert row == {
        "name": "checkpoint-120",
        "path": str(folder),
        "step": 4,
        "format": "deepspeed",
        "version": "0.19.8",
        "zero_stage": 2,
        "sizes": {"dp": 2},
        "being_written": False,
        "files": len(files),
        "bytes": sum(path.stat().st_size for path in files),
        "whole": True,
        "of_one_save": True,
        "intact": None,
        "loads": None,
        "weights_alone": False,
        "problems": [],
        "unread": [],
        "obstacles": [],
        "warnings": [],
    }


def test_the_oldest_is_the_first(run: Path, zckpt: Zckpt) -> None:
    names = [*rows(zckpt("list", run, "--json"))]
    assert names == [f"checkpoint-{step}" for step in (80, 90, 100, 110, 120)]
    assert [*states(zckpt("list", run))] == names


def test_the_table(run: Path, zckpt: Zckpt) -> None:
    ended = zckpt("list", run)
    lines = ended.out.splitlines()
    assert lines[0].split() == ["checkpoint", "step", "saved", "ranks", "size", "engine", "state"]
    local = datetime.fromtimestamp(SAVED.timestamp() + 7200).strftime("%Y-%m-%d %H:%M")
    assert re.fullmatch(rf"checkpoint-120 +4  {local}  dp 2 +\d+ kB  deepspeed  whole", lines[5]), (
        lines[5]
    )
    assert lines[6:] == [
        "complete according to the metadata: 5 of 5 checkpoints (--intact reads all bytes)"
    ]
    assert (ended.code, ended.err) == (0, "")


def emptied(path: Path) -> None:
    if path.is_file():
        path.write_bytes(b"")
        return
    for each in path.iterdir():
        shutil.rmtree(each) if each.is_dir() else each.unlink()


def foreign(path: Path) -> None:
    emptied(path)
    (path if path.is_file() else path / "notes.txt").write_text("what the user has thought")


def of_other_bytes(path: Path) -> None:
    for each in path.rglob("*.pt"):
        each.write_bytes(b"no torch file" * 50)


def cut(name: str) -> Callable[[Path], None]:
    return lambda path: os.truncate(path / name, 600)


def without(name: str) -> Callable[[Path], None]:
    return lambda path: (path / name).unlink()


DAMAGE: dict[str, Callable[[Path], None]] = {
    "empty": emptied,
    "foreign": foreign,
    "other bytes": of_other_bytes,
    "a cut file": cut(OPTIM.format(1)),
    "a cut model": cut(WEIGHTS),
    "a lost rank": without(OPTIM.format(0)),
    "an empty scheduler": lambda path: os.truncate(path / "scheduler.pt", 0),
}


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("step", [80, 100, 120])
def test_one_that_is_damaged(kind: str, step: int, run: Path, zckpt: Zckpt) -> None:
    name = f"checkpoint-{step}"
    DAMAGE[kind](run / name)
    ended = zckpt("list", run)
    assert ended.code == 3
    others = [f"checkpoint-{each}" for each in (80, 90, 100, 110, 120) if each != step]
    assert states(ended) == {name: "damaged", **dict.fromkeys(others, "whole")}
    assert [*states(ended)] == sorted(states(ended), key=lambda each: int(each.split("-")[1]))
    document = zckpt("list", run, "--json")
    assert document.code == 3
    row = rows(document)[name]
    assert row["whole"] is False
    problem = row["problems"][0]
    assert f"{name} is damaged: {problem['message']}" in ended.out
    assert "complete according to the metadata: 4 of 5 checkpoints" in ended.out
    quiet = zckpt("list", run, "-q")
    assert quiet.code == 3
    assert [line.split()[0] for line in quiet.out.splitlines()] == [name]


def test_one_of_two_saves(run: Path, zckpt: Zckpt) -> None:
    """The optimizer of one rank has another step."""
    from ..formats.test_masters import edit

    def later(states: Any) -> None:
        for state in states["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
            state["step"] = state["step"] + 1

    edit(run / "checkpoint-100" / OPTIM.format(1), later)
    ended = zckpt("list", run)
    assert (ended.code, states(ended)["checkpoint-100"]) == (3, "mixed")
    assert "checkpoint-100 is not of one save: " in ended.out
    row = rows(zckpt("list", run, "--json"))["checkpoint-100"]
    assert (row["whole"], row["of_one_save"]) == (None, False)


def test_all_bytes_are_read_only_for_intact(run: Path, zckpt: Zckpt) -> None:
    flip(run / "checkpoint-100" / OPTIM.format(1))
    saved_at(run, SAVED.timestamp())
    assert set(states(zckpt("list", run)).values()) == {"whole"}
    ended = zckpt("list", run, "--intact", "-j", "2", "--memory", "64MiB")
    assert ended.code == 3
    assert states(ended).pop("checkpoint-100") == "damaged"
    assert [*states(ended).values()].count("intact") == 4
    assert re.search(r"^checkpoint-100 is damaged: .*as if bit \d of byte", ended.out, re.MULTILINE)
    assert ended.out.splitlines()[-1] == "intact (all bytes were read): 4 of 5 checkpoints"
    listed = rows(zckpt("list", run, "--intact", "--json"))
    assert [row["intact"] for row in listed.values()] == [True, True, False, True, True]
    assert listed["checkpoint-100"]["whole"] is True
    assert listed["checkpoint-100"]["problems"][0]["code"] == "record-damaged"


def test_what_resuming_does_not_read(run: Path, zckpt: Zckpt) -> None:
    (run / "checkpoint-100" / "training_args.bin").write_bytes(b"")
    ended = zckpt("list", run)
    assert (ended.code, states(ended)["checkpoint-100"]) == (0, "whole")
    message = rows(zckpt("list", run, "--json"))["checkpoint-100"]["unread"][0]["message"]
    assert f"\ncheckpoint-100: {message} [unread-file-damaged]\n" in ended.out
    ended = zckpt("list", run, "--intact")
    assert (ended.code, states(ended)["checkpoint-100"]) == (3, "whole")
    assert ended.out.count(message) == 1


def test_one_that_is_being_written(run: Path, zckpt: Zckpt) -> None:
    now = time.time()
    saved_at(run / "checkpoint-120", now - 20)
    saved_at(run / "checkpoint-110", now - 70)
    (run / "checkpoint-130").mkdir()  # a save that has just begun
    ended = zckpt("list", run, "--json")
    listed = rows(ended)
    assert [row["being_written"] for row in listed.values()] == [False] * 4 + [True] * 2
    assert listed["checkpoint-120"]["whole"] is True
    assert ended.code == 3  # a script that looks for damage must not miss it
    out = zckpt("list", run).out
    assert re.search(r"^checkpoint-120 +4  [-0-9: ]+ +dp 2 .* whole$", out, re.MULTILINE)
    assert re.search(r"^checkpoint-130 +-  [-0-9: ]+ +-  .* damaged$", out, re.MULTILINE)
    assert re.search(
        r"^checkpoint-130 is damaged: .*\n  a file of it changed within", out, re.MULTILINE
    )
    assert out.count("changed within the last minute") == 1  # a whole one is whole


def test_whether_each_loads(run: Path, zckpt: Zckpt) -> None:
    (run / "checkpoint-100" / OPTIM.format(0)).unlink()
    shutil.rmtree(run / "checkpoint-110")
    package.reshard(TRAINER, run / "checkpoint-110", dp=4, stage=3)
    ended = zckpt("list", run, "--dp", 4, "--stage", 3, "--json")
    loads = {name: row["loads"] for name, row in rows(ended).items()}
    assert loads == {
        "checkpoint-80": False,
        "checkpoint-90": False,
        "checkpoint-100": None,
        "checkpoint-110": True,
        "checkpoint-120": False,
    }
    alone = zckpt("check", run / "checkpoint-120", "--dp", 4, "--stage", 3, "--json").document
    assert rows(ended)["checkpoint-120"]["obstacles"] == alone["obstacles"]
    assert ended.document["sizes"] == {"dp": 4, "stage": 3}
    out = zckpt("list", run, "--dp", 4, "--stage", 3).out
    assert "at dp 4 stage 3" in out.splitlines()[0]
    table = {line.split()[0]: line for line in out.splitlines()}
    assert table["checkpoint-110"].split()[-2:] == ["loads", "whole"]
    assert table["checkpoint-120"].split()[-2:] == ["no", "whole"]
    reasons = ", and 1 more: --json lists all"
    why = f"saved with ZeRO stage 2; 3 is asked for [size-differs]{reasons}"
    assert f"3 checkpoints do not load at dp 4 stage 3: {why}" in out
    assert zckpt("list", run / "checkpoint-110", "--dp", 2).code == 0  # check says that by its code


def test_what_is_damaged_does_not_load(run: Path, zckpt: Zckpt) -> None:
    (run / "checkpoint-100" / "scheduler.pt").write_bytes(b"")
    row = rows(zckpt("list", run, "--dp", 2, "--json"))["checkpoint-100"]
    assert (row["loads"], row["obstacles"]) == (False, [])


def test_sizes_that_do_not_fit(run: Path, zckpt: Zckpt) -> None:
    assert zckpt("list", run, "--dp", 0).code == 2
    assert zckpt("list", run, "--stage", 4).code == 2


ERRORS = [
    (PermissionError(13, "Permission denied", "file"), None, 1),
    (OSError(5, "Input/output error", "file"), None, 1),
    (MissingExtra("extra-missing", "h5py is not installed"), None, 1),
    (StoreError("store-refused", "the store does not answer"), None, 1),
    (UnsupportedCheckpoint("format-unsupported", "not read"), None, 1),
    (SourceChanged("source-changed", "it changed"), None, 1),
    (WrongOption("option-names-nothing", "no such model"), None, 1),
    (FileNotFoundError(2, "No such file or directory", "file"), False, 3),
]


@pytest.mark.parametrize(("error", "whole", "code"), ERRORS, ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("question", ["judged", "verify"])
def test_an_error_of_one_is_in_its_row(
    question: str,
    error: ZckptError | OSError,
    whole: bool | None,
    code: int,
    run: Path,
    zckpt: Zckpt,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    room = listing.api if question == "verify" else listing
    real = getattr(room, question)

    def ask(candidate: Candidate | str, *words: Any, **more: Any) -> Any:
        if str(getattr(candidate, "path", candidate)).endswith("checkpoint-100"):
            raise error
        return real(candidate, *words, **more)

    monkeypatch.setattr(room, question, ask)
    more = ("--intact",) if question == "verify" else ()
    ended = zckpt("list", run, *more)
    state = "damaged" if whole is False else "unknown"
    assert (ended.code, states(ended)["checkpoint-100"]) == (code, state)
    assert len(states(ended)) == 5
    row = rows(zckpt("list", run, *more, "--json"))["checkpoint-100"]
    assert row["intact" if more else "whole"] is whole
    assert len(row["problems"]) == 1
    assert row["being_written"] is isinstance(error, SourceChanged)


def test_an_error_of_several_saves_is_in_its_row(
    run: Path, zckpt: Zckpt, monkeypatch: pytest.MonkeyPatch
) -> None:
    def differing(candidate: Candidate, _: Any) -> Any:
        raise InconsistentCheckpoint("steps-disagree", f"{candidate.path}: steps differ")

    monkeypatch.setattr(listing, "judged", differing)
    ended = zckpt("list", run)
    assert (ended.code, {*states(ended).values()}) == (3, {"mixed"})
    row = rows(zckpt("list", run, "--json"))["checkpoint-80"]
    assert (row["whole"], row["of_one_save"]) == (None, False)


def test_all_are_removed_meanwhile(
    run: Path, zckpt: Zckpt, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = listing.judged

    def removed(candidate: Candidate, reading: Any) -> Any:
        shutil.rmtree(candidate.path)
        return real(candidate, reading)

    monkeypatch.setattr(listing, "judged", removed)
    assert zckpt("list", run, "--json").document["code"] == "no-checkpoint"


def test_one_that_is_removed_meanwhile(
    run: Path, zckpt: Zckpt, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `save_total_limit` removes the oldest one."""
    real = listing.judged

    def removed(candidate: Candidate, reading: Any) -> Any:
        if candidate.name == "checkpoint-80":
            shutil.rmtree(candidate.path)
        return real(candidate, reading)

    monkeypatch.setattr(listing, "judged", removed)
    ended = zckpt("list", run)
    assert (ended.code, len(states(ended))) == (0, 4)


def test_tags(tmp_path: Path, zckpt: Zckpt) -> None:
    run = Path(shutil.copytree(EXAMPLE, tmp_path / "out"))
    for tag in TAGS[:-1]:
        shutil.copytree(run / TAGS[-1], run / tag)
    (run / TAGS[1] / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    listed = rows(zckpt("list", run, "--json"))
    assert [*listed] == [*TAGS]
    assert [row["whole"] for row in listed.values()] == [True, False, True]
    assert [row["path"] for row in listed.values()] == [str(run / tag) for tag in TAGS]


def cut_all(path: Path) -> None:
    for each in [path] if path.is_file() else path.rglob("*.*"):
        if each.is_file():
            os.truncate(each, each.stat().st_size // 2)


def names_of(kind: str, run: Path, source: Path) -> list[str]:
    """Three checkpoints of an engine in a run."""
    source, names = {
        "deepspeed": (EXAMPLE / TAGS[-1], [*TAGS]),
        "dcp": (source / "dcp", ["step-5", "step-6", "step-7"]),
        "gathered": (source / "gathered", ["checkpoint-5", "checkpoint-6", "checkpoint-7"]),
        "file": (source / "gathered" / "model.pt", [f"epoch={n}-step={n}.ckpt" for n in (5, 6, 7)]),
        "megatron": (MEGATRON / "iter_0000003", [f"iter_000000{n}" for n in (5, 6, 7)]),
    }[kind]
    run.mkdir()
    for name in names:
        shutil.copytree(source, run / name) if source.is_dir() else shutil.copy(source, run / name)
    if kind == "deepspeed":
        (run / "latest").write_text(names[-1])
    elif kind == "megatron":
        (run / "latest_checkpointed_iteration.txt").write_text("7")
    return names


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("converted")
    for to in ("dcp", "gathered"):
        package.convert(EXAMPLE, folder / to, to=to)
    return folder


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("damage", [None, cut_all, emptied, foreign])
@pytest.mark.parametrize("kind", ["deepspeed", "dcp", "gathered", "file", "megatron"])
def test_one_of_each_engine(
    kind: str,
    damage: Callable[[Path], None] | None,
    place: int,
    converted: Path,
    tmp_path: Path,
    zckpt: Zckpt,
) -> None:
    names = names_of(kind, tmp_path / "run", converted)
    if damage is not None:
        damage(tmp_path / "run" / names[place])
    ended = zckpt("list", tmp_path / "run", "--json")
    listed = rows(ended)
    assert {*listed} == {*names}
    wrong = [name for name in names if listed[name]["whole"] is not True]
    assert wrong == ([] if damage is None else [names[place]])
    assert ended.code == (3 if wrong else 0)


def test_the_one_that_the_run_names_is_the_last(tmp_path: Path, zckpt: Zckpt) -> None:
    run = Path(shutil.copytree(EXAMPLE, tmp_path / "out"))
    shutil.copytree(run / TAGS[-1], run / TAGS[0])
    (run / "latest").write_text(TAGS[0])
    ended = zckpt("list", run)
    assert [*states(ended)] == [TAGS[-1], TAGS[0]]
    assert f"{run} names {TAGS[0]} as its last checkpoint" in ended.err


def test_one_that_the_run_names_and_that_is_missing(tmp_path: Path, zckpt: Zckpt) -> None:
    run = Path(shutil.copytree(EXAMPLE, tmp_path / "out"))
    (run / "latest").write_text("global_step9")
    ended = zckpt("list", run)
    assert ended.code == 3
    assert states(ended) == {TAGS[-1]: "whole", "global_step9": "damaged"}


def test_other_engines(tmp_path: Path, zckpt: Zckpt) -> None:
    """FSDP's directories state no number of ranks; a row of a tensor-parallel run has all."""
    package.convert(EXAMPLE, tmp_path / "dcp" / "step-7", to="dcp")
    (row,) = rows(zckpt("list", tmp_path / "dcp", "--json")).values()
    assert (row["format"], row["sizes"], row["step"], row["whole"]) == ("dcp", {}, 7, True)
    grid = ROOT / "tests" / "data" / "zckpt-0.1-pp2_tp2" / "run"
    (row,) = rows(zckpt("list", grid, "--json")).values()
    assert row["sizes"] == {"dp": 1, "tp": 2, "pp": 2}
    assert "  dp 1 tp 2 pp 2  " in zckpt("list", grid).out


def test_the_schema(zckpt: Zckpt) -> None:
    schema = json.loads(zckpt("schema", "list").out)
    listed = schema["$defs"]["Listed"]
    assert {*listed["required"]} == {*listed["properties"]}
    assert listed["properties"]["whole"] == {"anyOf": [{"type": "boolean"}, {"type": "null"}]}


def test_a_run_without_a_checkpoint(tmp_path: Path, zckpt: Zckpt) -> None:
    ended = zckpt("list", tmp_path)
    assert (ended.code, ended.out) == (1, "")
    assert f"{tmp_path} has no checkpoint" in ended.err
    assert zckpt("list", tmp_path / "nothing", "--json").document["code"] == "no-checkpoint"


def test_warnings_of_one_kind_are_said_once(
    run: Path, zckpt: Zckpt, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = listing.judged

    def warned(candidate: Candidate, reading: Any) -> Any:
        verdict = real(candidate, reading)
        lines = warning("times-apart", f"{candidate.path}: odd"), note("form-differs", "once")
        assert verdict.manifest is not None
        return replace(verdict, manifest=verdict.manifest.replace(warnings=lines))

    monkeypatch.setattr(listing, "judged", warned)
    err = zckpt("list", run).err.splitlines()
    assert err[0] == f"Warning: {run / 'checkpoint-80'}: odd [times-apart]"
    assert err[1].strip() == "4 more such warnings: --json lists all"
    assert len(err) == 4
    assert zckpt("list", run, "-q").err == ""


def test_weights_alone(run: Path, zckpt: Zckpt, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `save_only_model` saves them: nothing is lost, and no run goes on from them."""
    real = listing.judged

    def alone(candidate: Candidate, reading: Any) -> Any:
        verdict = real(candidate, reading)
        lines = (problem("optimizer-missing", "weights, and no optimizer"),)
        return replace(verdict, alone=lines) if candidate.name == "checkpoint-90" else verdict

    monkeypatch.setattr(listing, "judged", alone)
    ended = zckpt("list", run)
    assert (ended.code, states(ended)["checkpoint-90"]) == (0, "weights")
    assert "1 checkpoint does not load: weights, and no optimizer" in ended.out
    listed = rows(zckpt("list", run, "--dp", 2, "--json"))
    assert [row["loads"] for row in listed.values()] == [True, False, True, True, True]
    assert listed["checkpoint-90"]["weights_alone"] is True


class TestTerminal:
    @pytest.mark.parametrize("columns", [40, 60, 80, 120])
    def test_no_row_is_broken(self, columns: int, run: Path) -> None:
        lines = on_a_terminal("list", run, "--dp", 2, columns=columns).splitlines()
        table = [line for line in lines if line.startswith("checkpoint")]
        assert len(table) == 6  # with the heads
        assert all(len(line) <= columns for line in table)
        assert all(line.split()[-1] == "whole" for line in table[1:])
        assert all("…" not in line for line in lines)
        heads = table[0].split()
        assert ("engine" in heads) is (columns >= 80)
        assert ("engine: deepspeed" in lines) is (columns < 80)

    def test_a_terminal_that_is_too_narrow(self, run: Path) -> None:
        lines = on_a_terminal("list", run, columns=16).splitlines()
        assert lines[:2] == ["checkpoint  checkpoint-80", "step        4"]

    def test_all_columns_fit_into_80(self, run: Path) -> None:
        heads = on_a_terminal("list", run, columns=80).splitlines()[0]
        assert heads.split() == ["checkpoint", "step", "saved", "ranks", "size", "engine", "state"]

    def test_damage_has_a_colour_and_a_word(self, run: Path) -> None:
        (run / "checkpoint-100" / "scheduler.pt").write_bytes(b"")
        coloured = in_colours("list", run)
        assert "\x1b[1;31mdamaged\x1b[0m" in coloured
        assert "\x1b[1;31m" not in in_colours("list", run, NO_COLOR="1")
        assert "damaged" in in_colours("list", run, NO_COLOR="1")

    def test_a_name_that_is_no_markup(self, tmp_path: Path) -> None:
        run = tmp_path / "[bold]out\x1b[31m"
        for name in ("[red]checkpoint-1\x1b[31m", "[red]checkpoint-2\x1b[31m"):
            shutil.copytree(TRAINER, run / name)
        out = on_a_terminal("list", run, columns=200)
        assert "[red]checkpoint-1\\x1b[31m" in out
        assert "\x1b[31m" not in out


def in_colours(*words: object, **environment: str) -> str:
    """What a command prints on a terminal with colours, whatever its exit code is."""
    outer, inner = pty.openpty()
    own = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    own |= {"COLUMNS": "100", "TERM": "xterm", **environment}
    command = [sys.executable, "-m", "zckpt", *map(str, words)]
    with subprocess.Popen(command, stdout=inner, cwd=ROOT, env=own) as process:
        os.close(inner)
        printed = b""
        with suppress(OSError):  # the end of a terminal is an error on Linux
            while data := os.read(outer, 1 << 16):
                printed += data
    os.close(outer)
    assert process.returncode == 3
    return printed.decode()


def test_one_bar_at_a_time() -> None:
    """`--intact` reads forty checkpoints, one after the other."""
    shown = Progress()
    first, second = Bar(shown, 10), Bar(shown, 20)
    assert [task.visible for task in shown.tasks] == [False, True]
    first(1)  # what is hidden may still be counted
    second(20)
    assert [task.completed for task in shown.tasks] == [1, 20]


def test_the_function(run: Path) -> None:
    seen: list[int] = []
    report = package.list_checkpoints(
        run, intact=True, dp=2, jobs=1, begin=lambda total: seen.append
    )
    assert [row["loads"] for row in report["checkpoints"]] == [True] * 5
    assert sum(seen) > 0
    with pytest.raises(TypeError, match="no argument 'tag'"):
        package.list_checkpoints(run, tag="checkpoint-80")
    with pytest.raises(NotACheckpoint):
        package.list_checkpoints(run / "checkpoint-80" / "nothing")


def test_bytes_are_offered_only_of_checkpoints_that_have_all_files(
    tmp_path: Path, zckpt: Zckpt
) -> None:
    """--intact would read none that lacks a file."""
    folder = tmp_path / TRAINER.name
    shutil.copytree(TRAINER, folder)
    (folder / OPTIM.format(1)).unlink()
    assert zckpt("list", tmp_path).out.endswith(
        "complete according to the metadata: 0 of 1 checkpoint\n"
    )
