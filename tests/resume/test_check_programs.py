"""What `zckpt check` says is what real programs do: each command that it prints is run, and loaded.

The default run has one case of each kind.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import zckpt as package

from ..conftest import Once, Result, needs, texts
from ..engines.checked_rank import RULES, Program, following_losses, groups_of, model
from ..engines.deepspeed import EngineError, submit

Run = Callable[..., Result]
Save = Callable[[int, Program], Path]
first, engines = pytest.mark.first, pytest.mark.engines
TWO = {"torch_adam": True, "lr": 0.01}


def quiet(_: object) -> None:
    pass


@pytest.fixture
def saved(once: Once) -> Save:
    """A folder with run/ and losses.pt of a program at a number of ranks."""
    needs("deepspeed")

    def save(ranks: int, program: Program) -> Path:
        def train(root: Path) -> Path:
            submit("checked_rank", "save", ranks, (ranks, program, root.resolve()), root)
            return root

        return once("checked", f"{ranks} {program}".replace("/", ""), train)

    return save


def loads(root: Path, ranks: int, program: Program, directory: Path, tmp_path: Path) -> None:
    """Raises EngineError unless the program goes on with the losses of `root`/losses.pt."""
    expected = torch.load(root / "losses.pt")
    submit("checked_rank", "load", ranks, (ranks, program, directory.resolve(), expected), tmp_path)


def made(report: dict[str, Any], target: Path, run: Run) -> Path:
    """The directory that the printed command writes."""
    words = [str(target) if word == "DST" else word for word in shlex.split(report["fix"])]
    ended = run(*words[1:])
    assert ended.code == 0, ended.err
    return target


def config_of(program: Program, tmp_path: Path) -> Path:
    path = tmp_path / "ds.json"
    stage = {"zero_optimization": {"stage": program.stage}}
    path.write_text(json.dumps({**stage, **program.config}))
    return path


def cases(rows: dict[str, Any]) -> list[Any]:
    """Rows with their names; one whose value begins with `first` is in the default run."""
    return [
        pytest.param(*row[1:], id=name, marks=[engines, *([first] if row[0] else [])])
        for name, row in rows.items()
    ]


FITTING = {
    "ranks": (True, Program(2), 3, ("--dp", 3)),
    "stage": (False, Program(3), 2, ("--dp", 2, "--stage", 3)),
    "stage 0": (False, Program(0), 2, ("--dp", 2, "--stage", 0)),
    "ds_config": (True, Program(3, config={}), 1, ("--dp", 1, "--ds-config", "ds.json")),
    "as the next program": (True, Program(1), 3, ("--dp", 3, "--like", "next")),
    "at another stage": (False, Program(3), 2, ("--dp", 2, "--like", "next")),
}


@pytest.mark.parametrize(("program", "ranks", "words"), cases(FITTING))
def test_the_command_writes_what_deepspeed_loads(
    program: Program, ranks: int, words: Any, saved: Save, tmp_path: Path, zckpt: Run
) -> None:
    root = saved(2, Program(2))
    files = {"ds.json": config_of(program, tmp_path), "next": root}
    if "next" in words:
        files["next"] = saved(1, program) / "run"
    typed = [files.get(word, word) for word in words]
    ended = zckpt("check", root / "run", *typed, "--json")
    assert ended.code == 3
    target = made(ended.document, tmp_path / "dst", zckpt)
    assert zckpt("check", target, *typed).code == 0
    loads(root, ranks, program, target, tmp_path)
    if "next" not in words:  # and it is what auto_resume writes
        names = [str(word).lstrip("-").replace("-", "_") for word in typed[::2]]
        options = dict(zip(names, typed[1::2], strict=True))
        path = package.auto_resume(
            root / "run", scratch=tmp_path / "scratch", tell=quiet, **options
        )
        assert path is not None
        assert package.diff(path, target)["equal"]


@pytest.mark.parametrize(
    "way",
    [
        pytest.param("universal", marks=engines),
        pytest.param("dcp", marks=engines),
        pytest.param("gathered", marks=engines),
    ],
)
def test_from_another_format_to_deepspeed(
    way: str, saved: Save, tmp_path: Path, zckpt: Run
) -> None:
    """With the groups of the next program, or those of the run that the universal one was."""
    root = saved(2, Program(2))
    package.convert(root / "run", tmp_path / "source", to=way)
    words: tuple[object, ...] = ("--dp", 3)
    if way != "universal":
        words = (*words, "--for", "deepspeed", "--like", saved(1, Program(2)) / "run")
    ended = zckpt("check", tmp_path / "source", *words, "--json")
    assert ended.code == 3
    target = made(ended.document, tmp_path / "dst", zckpt)
    loads(root, 3, Program(2), target, tmp_path)


@pytest.mark.parametrize(
    "to", [pytest.param("gathered", marks=[engines, first]), pytest.param("dcp", marks=engines)]
)
def test_from_deepspeed_to_torch(to: str, saved: Save, tmp_path: Path, zckpt: Run) -> None:
    root = saved(2, Program(2))
    ended = zckpt("check", root / "run", "--for", to, "--json")
    target = made(ended.document, tmp_path / "dst", zckpt)
    net = model()
    optimizer = torch.optim.AdamW(groups_of(net, "bias"), lr=0.01)
    if to == "gathered":
        net.load_state_dict(torch.load(target / "model.pt"))
        optimizer.load_state_dict(torch.load(target / "optim.pt"))
    else:
        weights, states = get_state_dict(net, optimizer)
        state = {"model": weights, "optim": states}
        dcp.load(state, checkpoint_id=target, no_dist=True)
        set_state_dict(
            net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
        )
    expected = torch.load(root / "losses.pt")
    assert following_losses(net, optimizer) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("ranks", [pytest.param(3, marks=engines), pytest.param(1, marks=engines)])
def test_files_of_ranks(ranks: int, once: Once, tmp_path: Path, zckpt: Run) -> None:
    """FSDP2's, in verl's layout, which loads the files of its number of ranks alone."""

    def train(root: Path) -> Path:
        submit("checked_rank", "rows_save", 2, (2, root.resolve()), root)
        return root

    root = once("checked", "rows", train)
    ended = zckpt("check", root / "actor", "--dp", ranks, "--json")
    assert ended.code == 3
    target = made(ended.document, tmp_path / "dst", zckpt)
    about = (ranks, target.resolve(), torch.load(root / "losses.pt"))
    submit("checked_rank", "rows_load", ranks, about, tmp_path)
    path = package.auto_resume(root / "actor", dp=ranks, scratch=tmp_path / "scratch", tell=quiet)
    assert path is not None
    assert package.diff(path, target)["equal"]


WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 0.01}}
DECAY = {"type": "ExponentialLR", "params": {"gamma": 0.9}}
ADAGRAD = {"type": "Adagrad", "params": {"lr": 0.01}}
UNFIT = {
    "no scheduler": (False, Program(2), Program(2, config={"scheduler": DECAY}), "ExponentialLR"),
    "optimizer": (
        True,
        Program(2),
        Program(2, optimizer=None, config={"optimizer": ADAGRAD}),
        "saved with optimizer AdamW; Adagrad is asked for",
    ),
}


@pytest.mark.parametrize(("before", "after", "reason"), cases(UNFIT))
def test_what_no_command_cures(
    before: Program, after: Program, reason: str, saved: Save, tmp_path: Path, zckpt: Run
) -> None:
    """The program fails, or has another parameter's numbers."""
    root = saved(2, before)
    words: tuple[object, ...] = ("--ds-config", config_of(after, tmp_path))
    if after.config == before.config:
        words = ("--like", saved(2, after) / "run")
    for size in (2, 3):  # another reason, which a command would cure, changes nothing
        ended = zckpt("check", root / "run", "--dp", size, *words, "--json")
        assert ended.code == 3
        assert any(reason in text for text in texts(ended.document["obstacles"]))
        assert ended.document["fix"] is None
        assert ended.document["refused"]
    with pytest.raises(EngineError):
        loads(root, 2, after, root / "run", tmp_path)


REGROUPED = {
    **{f"groups, stage {stage}": (stage == 2, stage, "small") for stage in (1, 2, 3)},
    **{f"order, stage {stage}": (stage == 3, stage, "backwards") for stage in (1, 2, 3)},
}


@pytest.mark.parametrize(("stage", "rule"), cases(REGROUPED))
def test_other_groups_are_those_of_the_next_program(
    stage: int, rule: str, saved: Save, tmp_path: Path, zckpt: Run
) -> None:
    root, after = saved(2, Program(stage)), Program(stage, rule)
    words = ("--like", saved(2, after) / "run")
    for size in (2, 3):
        ended = zckpt("check", root / "run", "--dp", size, *words, "--json")
        assert ended.code == 3
        assert any("group" in text for text in texts(ended.document["obstacles"]))
        target = made(ended.document, tmp_path / f"dst{size}", zckpt)
        assert zckpt("check", target, "--dp", size, *words).code == 0
    with pytest.raises(EngineError):
        loads(root, 2, after, root / "run", tmp_path)
    if rule == "backwards":  # which trains as before; others: tests/test_next_groups.py
        loads(root, 2, after, tmp_path / "dst2", tmp_path)


SCHEDULED = {
    # after 4 updates the warm-up has ended: so the losses are those of the source
    "no scheduler": (True, Program(2), "no scheduler", True),
    "the program's own": (False, Program(2, decays=True), "no last_batch_iteration", False),
}


@pytest.mark.parametrize(("before", "reason", "goes_on"), cases(SCHEDULED))
def test_a_scheduler_of_deepspeed_gets_its_state(
    before: Program, reason: str, goes_on: bool, saved: Save, tmp_path: Path, zckpt: Run
) -> None:
    """It could not be loaded: DeepSpeed's schedulers raise where theirs is missing."""
    root, after = saved(2, before), Program(2, config={"scheduler": WARMUP})
    words = ("--dp", 2, "--ds-config", config_of(after, tmp_path))
    report = zckpt("check", root / "run", *words, "--json").document
    assert [(each["code"], each["subject"]) for each in report["obstacles"]] == [
        ("scheduler-differs", "WarmupLR")
    ]
    assert reason in texts(report["obstacles"])[0]
    with pytest.raises(EngineError):
        loads(root, 2, after, root / "run", tmp_path)
    target = made(report, tmp_path / "dst", zckpt)
    assert package.read(target).state["lr_scheduler"] == {"last_batch_iteration": 3}
    assert zckpt("check", target, *words).code == 0
    if goes_on:
        loads(root, 2, after, target, tmp_path)


@engines
def test_the_program_that_is_named_with_like(saved: Save, tmp_path: Path, zckpt: Run) -> None:
    """A source of torch gets the state that the scheduler of that program loads."""
    root, after = saved(2, Program(2)), Program(2, config={"scheduler": WARMUP})
    like = saved(2, after) / "run"
    ended = zckpt("check", root / "run", "--like", like, "--json")
    (obstacle,) = ended.document["obstacles"]
    assert "the program's scheduler needs it" in obstacle["message"]
    assert ended.document["fix"] is None  # its ds_config is not known
    package.convert(root / "run", tmp_path / "dcp", to="dcp")
    words = ("--for", "deepspeed", "--like", like, "--dp", 2, "--json")
    target = made(zckpt("check", tmp_path / "dcp", *words).document, tmp_path / "dst", zckpt)
    assert package.read(target).state["lr_scheduler"] == {"last_batch_iteration": 3}
    loads(root, 2, after, target, tmp_path)


ROUND = {"zero_optimization": {"stage": 2, "round_robin_gradients": True}}


@engines
def test_another_engine_of_the_same_stage(saved: Save, tmp_path: Path, zckpt: Run) -> None:
    """--like shows that it is another one, and only its ds_config makes the command."""
    root, after = saved(2, Program(2)), Program(2, config=ROUND)
    words: tuple[object, ...] = ("--dp", 2, "--like", saved(2, after) / "run")
    report = zckpt("check", root / "run", *words, "--json").document
    assert texts(report["obstacles"]) == [
        "saved with round_robin_gradients False; the program has True"
    ]
    assert (report["fix"], "--ds-config" in report["refused"]["hint"]) == (None, True)
    with pytest.raises(EngineError):
        loads(root, 2, after, root / "run", tmp_path)
    words = (*words, "--ds-config", config_of(after, tmp_path))
    report = zckpt("check", root / "run", *words, "--json").document
    target = made(report, tmp_path / "dst", zckpt)
    assert zckpt("check", target, *words).code == 0
    loads(root, 2, after, target, tmp_path)


SAME = {
    "the same": (True, Program(2), Program(2)),
    "its own scheduler": (
        False,
        Program(2, config={"scheduler": WARMUP}),
        Program(2, config={"scheduler": WARMUP}),
    ),
    "the engine's Adam": (
        True,
        Program(2, optimizer=None, config={"optimizer": {"type": "Adam", "params": TWO}}),
        Program(2, optimizer=None, config={"optimizer": {"type": "AdamW", "params": TWO}}),
    ),
}


@pytest.mark.parametrize(("before", "after"), cases(SAME))
def test_what_is_no_reason(
    before: Program, after: Program, saved: Save, tmp_path: Path, zckpt: Run
) -> None:
    root = saved(2, before)
    words = ("--dp", 2, "--ds-config", config_of(after, tmp_path))
    ended = zckpt("check", root / "run", *words)
    assert ended.code == 0, ended.out
    loads(root, 2, after, root / "run", tmp_path)


@pytest.mark.parametrize("to", ["gathered", "dcp"])
def test_groups_of_torch(to: str, tmp_path: Path, zckpt: Run) -> None:
    """torch loads whole files by the places in groups, and those of DCP by names."""
    for rule in ("bias", "small"):
        net = model()
        named = {id(each): name for name, each in net.named_parameters()}
        groups = [
            {**group, "params": [(named[id(each)], each) for each in group["params"]]}
            for group in groups_of(net, rule)
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.01)
        following_losses(net, optimizer)
        (folder := tmp_path / rule).mkdir()
        if to == "gathered":
            torch.save(net.state_dict(), folder / "model.pt")
            torch.save(optimizer.state_dict(), folder / "optim.pt")
        else:
            weights, states = get_state_dict(net, optimizer)
            dcp.save({"model": weights, "optim": states}, checkpoint_id=folder, no_dist=True)
    ended = zckpt("check", tmp_path / "bias", "--like", tmp_path / "small", "--json")
    by_place = to == "gathered"
    lines = ended.document["obstacles" if by_place else "warnings"]
    assert "1.weight is in group 0, but in the program in group 1" in texts(lines)[0]
    assert ended.document["loads"] is not by_place
    assert "--groups-from" in str(ended.document["fix"] if by_place else lines[0]["message"])
    if by_place:
        with pytest.raises(ValueError, match="doesn't match the size"):
            optimizer.load_state_dict(torch.load(tmp_path / "bias" / "optim.pt"))
        target = made(ended.document, tmp_path / "dst", zckpt)
        optimizer.load_state_dict(torch.load(target / "optim.pt"))


def test_rules_of_groups() -> None:
    names = [name for name, _ in model().named_parameters()]
    assert sorted(map(RULES["bias"], names)) == sorted(map(RULES["backwards"], names))
    assert [*map(RULES["bias"], names)] != [*map(RULES["small"], names)]
