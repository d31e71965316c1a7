"""The next run has other optimizer groups: --groups-from and --set-group."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_state_dict

import zckpt as package
from zckpt.errors import MissingData, UnsupportedState, WrongOption
from zckpt.writing.beginnings import _larger

from .conftest import EXAMPLE, ROOT, Once, Result, needs, texts
from .engines.checked_rank import Program, following_losses, groups_of, loss_of, model
from .engines.deepspeed import submit
from .formats.equality import same_bits

Zckpt = Callable[..., Result]
engines, first = pytest.mark.engines, pytest.mark.first
read, load = package.read, package.load
UNCLIPPED = {"gradient_clipping": 0.0}  # by default the engine clips to 1.0, a plain loop does not
BEFORE = Program(2, frozen="0.", config=UNCLIPPED)
AFTER = Program(2, "small", rate=0.003, updates=1, config=UNCLIPPED)
"""Another rule of weight decay, a layer that was frozen, and a lower rate."""
NAMES = [name for name, _ in model().named_parameters()]


# -- without an engine: files of torch.save, which every writer takes as a source


class Made:
    """A program of plain torch in a folder, whose optimizer's state has names.

    `frozen` is what the names of frozen weights begin with. With `apart` weights each one is a
    group.
    """

    def __init__(
        self, folder: Path, rule: str = "bias", frozen: str = "none", **words: Any
    ) -> None:
        torch.manual_seed(5)
        self.folder, self.net = folder, words.pop("net", None) or model()
        updates, scheduled = words.pop("updates", 2), words.pop("scheduled", False)
        make = words.pop("optimizer", torch.optim.AdamW)
        groups = groups_of(self.net, rule, frozen)
        if words.pop("apart", False):
            groups = [{"params": [each]} for each in self.net.parameters()]
        self.optimizer = make(groups, **{"lr": 0.01, **words})
        decay = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.5**step)
        self.scheduler = decay if scheduled else None
        for _ in range(updates):
            following_losses(self.net, self.optimizer, 1)
            if self.scheduler is not None:
                self.scheduler.step()
        self.optimizer.zero_grad()
        folder.mkdir()
        weights, states = get_state_dict(self.net, self.optimizer)
        state = {"model": weights, "optim": states}
        if self.scheduler is not None:
            state["lr_scheduler"] = self.scheduler.state_dict()
        torch.save(state, folder / "run.pt")


def groups_in(manifest: package.Manifest) -> list[set[str]]:
    groups: list[set[str]] = [set() for _ in manifest.groups or ()]
    for name, parameter in manifest.parameters.items():
        if parameter.trainable:
            groups[parameter.group or 0].add(name)
    return groups


TARGETS: dict[str, dict[str, Any]] = {
    "universal": {"to": "universal"},
    "gathered": {"to": "gathered"},
    "dcp": {"to": "dcp", "dp": 2},
    "flat": {"to": "dcp", "dcp_layout": "flat"},
    "zero": {"to": "deepspeed", "stage": 0},
    **{f"zero {stage}": {"to": "deepspeed", "stage": stage, "dp": 2} for stage in (1, 2, 3)},
    "its universal": {"to": "deepspeed-universal", "stage": 2, "dp": 2},
}
OF_GROUPS = {"zero 1", "zero 2", "zero 3", "its universal"}
"""Targets that keep one step for a group."""


@pytest.mark.parametrize("target", TARGETS)
def test_every_target_has_the_groups_of_the_run(target: str, tmp_path: Path) -> None:
    before = Made(tmp_path / "before", frozen="0.")
    Made(tmp_path / "run", "small", lr=0.003, weight_decay=0.2)
    report = package.convert(
        tmp_path / "before", tmp_path / "out", groups_from=str(tmp_path / "run"), **TARGETS[target]
    )
    names = {"param_names": NAMES} if target == "zero" else {}
    made = read(tmp_path / "out", **names)
    if target != "flat":  # which joins groups of equal hyper-parameters
        assert groups_in(made) == groups_in(read(tmp_path / "run"))
    assert [group["lr"] for group in made.groups or ()] == [0.003, 0.003]
    assert [group["weight_decay"] for group in made.groups or ()] == [0.1, 0.0]
    steps = {name: parameter.step for name, parameter in made.parameters.items()}
    late = target in OF_GROUPS
    begin = {"universal": None, "zero": None}.get(target, 2 if late else 0)
    assert steps == {name: begin if name.startswith("0.") else 2 for name in NAMES}
    for name, parameter in before.net.named_parameters():
        for key, value in before.optimizer.state.get(parameter, {}).items():
            if key != "step":
                assert same_bits(load(tmp_path / "out", f"{name}/{key}", **names), value)
        if name.startswith("0.") and begin is not None:
            zeros = load(tmp_path / "out", f"{name}/exp_avg", **names)
            assert not zeros.any()
            assert zeros.shape == parameter.shape
    said = [line for line in report["warnings"] if line["code"].startswith("begins-")]
    assert {line["code"] for line in said} == {"begins-late" if late else "begins-afresh"}
    text = " ".join(line["message"] for line in said)
    assert "0.weight" in text
    assert "0.bias" in text
    assert ("(1 - beta1) / sqrt(1 - beta2) = 3.16 times the rate" in text) is late


def test_a_group_of_new_parameters_alone_begins_at_its_first_update(tmp_path: Path) -> None:
    """ZeRO keeps one step for it, and this is its own."""
    Made(tmp_path / "before", frozen="1.")
    Made(tmp_path / "run", "middle")
    report = package.convert(
        tmp_path / "before",
        tmp_path / "out",
        to="deepspeed",
        stage=2,
        dp=2,
        groups_from=str(tmp_path / "run"),
    )
    made = read(tmp_path / "out")
    assert [made.parameters[name].step for name in ("1.weight", "1.bias")] == [None, None]
    assert ("1.weight", "exp_avg") not in made.entries
    assert [line["code"] for line in report["warnings"] if "begins" in line["code"]] == [
        "begins-afresh"
    ]


def test_what_the_run_does_not_train_loses_its_states(tmp_path: Path, zckpt: Zckpt) -> None:
    before = Made(tmp_path / "before")
    Made(tmp_path / "run", frozen="0.")
    for to in ("gathered", "deepspeed"):
        ended = zckpt(
            *("convert", tmp_path / "before", tmp_path / to, "--to", to),
            *("--groups-from", tmp_path / "run"),
        )
        assert ended.code == 0, ended.err
        assert "does not train 0.weight, 0.bias: their states are dropped" in ended.err
        assert "dropped: exp_avg and exp_avg_sq of 2 parameters" in ended.out
        made = read(tmp_path / to)
        assert not made.parameters["0.weight"].trainable
        assert {name for name, slot in made.entries if slot == "exp_avg"} == {
            name for name in NAMES if not name.startswith("0.")
        }
        weight = load(tmp_path / to, "0.weight/param")
        assert same_bits(weight, before.net[0].weight.detach())


def test_the_order_is_that_of_the_run(tmp_path: Path) -> None:
    """DeepSpeed goes by the places of parameters in their groups."""
    Made(tmp_path / "before")
    Made(tmp_path / "run", "backwards")
    words: dict[str, Any] = {"to": "deepspeed", "stage": 2, "dp": 2}
    run = str(tmp_path / "run")
    package.convert(tmp_path / "before", tmp_path / "out", groups_from=run, **words)
    assert list(read(tmp_path / "out").parameters) == [
        *("2.weight", "1.weight", "0.weight", "2.bias", "1.bias", "0.bias")
    ]


def test_a_schedule_goes_on_where_it_is(tmp_path: Path) -> None:
    """The run's base rates, at the place to which the source's scheduler has come."""
    Made(tmp_path / "before", scheduled=True)  # 0.01 * 0.5 ** 2
    Made(tmp_path / "run", apart=True, lr=0.004, scheduled=True, updates=1)
    report = package.convert(
        tmp_path / "before", tmp_path / "out", to="gathered", groups_from=str(tmp_path / "run")
    )
    made = read(tmp_path / "out")
    assert [(g["lr"], g["initial_lr"]) for g in made.groups or ()] == [(0.001, 0.004)] * 6
    scheduler = made.state["lr_scheduler"]
    assert (scheduler["base_lrs"], scheduler["_last_lr"]) == ([0.004] * 6, [0.001] * 6)
    assert scheduler["last_epoch"] == 2
    said = [text for text in texts(report["warnings"]) if "initial_lr" in text]
    assert said[0].startswith("lr of group 0 becomes 0.001: the run's initial_lr (0.004)")


def test_runs_that_do_not_fit(tmp_path: Path) -> None:
    Made(tmp_path / "before")
    net = torch.nn.Sequential(*model(), torch.nn.Linear(8, 3))
    Made(tmp_path / "larger", net=net)
    wide = torch.nn.Sequential(torch.nn.Linear(8, 9), torch.nn.LayerNorm(9), torch.nn.Linear(9, 8))
    Made(tmp_path / "wide", net=wide)
    Made(tmp_path / "sgd", optimizer=torch.optim.SGD, momentum=0.9)
    (tmp_path / "weights").mkdir()
    torch.save(model().state_dict(), tmp_path / "weights" / "model.pt")
    rows: list[tuple[str, type[Exception], str]] = [
        ("weights", MissingData, "does not state the groups"),
        ("larger", MissingData, "only the run has 3.weight, 3.bias"),
        ("wide", MissingData, r"the shapes in .* differ: 0\.weight \(\[8, 8\] and \[9, 8\]\)"),
        ("sgd", WrongOption, "is AdamW, that of --groups-from .* is SGD"),
    ]
    for run, error, message in rows:
        with pytest.raises(error, match=message):
            package.convert(tmp_path / "before", tmp_path / "out", groups_from=str(tmp_path / run))
    with pytest.raises(MissingData, match=r"only the source has 3\.weight, 3\.bias"):
        package.convert(tmp_path / "larger", tmp_path / "out", groups_from=str(tmp_path / "before"))
    with pytest.raises(WrongOption, match="does not apply with --weights-only"):
        package.convert(
            *(tmp_path / "before", tmp_path / "out"),
            groups_from=str(tmp_path / "before"),
            weights_only=True,
        )


def test_states_that_zckpt_does_not_know(tmp_path: Path) -> None:
    """Adagrad's sums begin with a value of the user's, which no file of ZeRO can leave out."""
    words = {"optimizer": torch.optim.Adagrad, "initial_accumulator_value": 0.1}
    Made(tmp_path / "before", frozen="0.", **words)
    Made(tmp_path / "run", **words)
    run = str(tmp_path / "run")
    with pytest.raises(UnsupportedState, match="how the optimizer begins its sum"):
        package.convert(
            *(tmp_path / "before", tmp_path / "out"),
            to="deepspeed-universal",
            stage=2,
            groups_from=run,
        )
    package.convert(tmp_path / "before", tmp_path / "out", to="gathered", groups_from=run)
    assert read(tmp_path / "out").parameters["0.weight"].step is None


@pytest.mark.parametrize(("beta1", "beta2", "most"), [(0.9, 0.999, "3.16"), (0.9, 0.95, "0.447")])
def test_how_large_the_first_updates_are(beta1: float, beta2: float, most: str) -> None:
    """As torch's AdamW makes them whose moments are zeros at a late step."""
    weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = torch.optim.AdamW([weight], lr=1.0, betas=(beta1, beta2), weight_decay=0.0)
    zeros = torch.zeros(1, dtype=torch.float64)
    optimizer.state[weight] = {
        "step": torch.tensor(1e6),
        "exp_avg": zeros.clone(),
        "exp_avg_sq": zeros.clone(),
    }
    sizes = []
    for _ in range(60):
        before = weight.detach().clone()
        weight.grad = torch.full_like(weight, 7.0)
        optimizer.step()
        sizes.append(float(before - weight.detach()))
    text = _larger(beta1, beta2)
    assert f"= {most} times the rate" in text
    assert f"{sizes[0]:.3g}" == most
    assert f"up to {max(sizes):.3g} times the rate, if" in text


# -- --set-group


@pytest.mark.parametrize("to", ["universal", "gathered", "dcp", "deepspeed"])
def test_a_rate_is_replaced_wherever_it_is_kept(to: str, tmp_path: Path, zckpt: Zckpt) -> None:
    Made(tmp_path / "before", scheduled=True)
    ended = zckpt(
        *("convert", tmp_path / "before", tmp_path / "out", "--to", to),
        *("--set-group", "lr=1e-5", "--set-group", "1:lr=2e-5,betas=[0.8,0.9]"),
    )
    assert ended.code == 0, ended.err
    made = read(tmp_path / "out")
    assert [(g["lr"], g["initial_lr"]) for g in made.groups or ()] == [(1e-5,) * 2, (2e-5,) * 2]
    assert [tuple(g["betas"]) for g in made.groups or ()] == [(0.9, 0.999), (0.8, 0.9)]
    for key in ("base_lrs", "_last_lr"):
        assert made.state["lr_scheduler"][key] == [1e-5, 2e-5]
    assert "after the first update" not in ended.err


def test_a_trainers_scheduler_is_a_file(tmp_path: Path, zckpt: Zckpt) -> None:
    example = EXAMPLE.parent / "trainer" / "checkpoint-4"
    ended = zckpt("reshard", example, tmp_path / "out", "--dp", 2, "--set-group", "lr=1e-5")
    assert ended.code == 0, ended.err
    scheduler = torch.load(tmp_path / "out" / "scheduler.pt")
    groups = read(tmp_path / "out").groups or ()
    assert scheduler["base_lrs"] == scheduler["_last_lr"] == [1e-5] * len(groups)
    before = torch.load(example / "scheduler.pt")
    rates = ("base_lrs", "_last_lr")
    assert {k: v for k, v in before.items() if k not in rates} == {
        k: v for k, v in scheduler.items() if k not in rates
    }
    copied = zckpt("reshard", example, tmp_path / "dry", "--dp", 2, "--dry-run", "--json")
    names = copied.document["copied"]
    assert f"copied unchanged: {len(names) - 1} files" in ended.out
    ended = zckpt("convert", example, tmp_path / "universal", "--set-group", "lr=1e-5")
    assert ended.code == 0, ended.err
    assert zckpt("verify", tmp_path / "universal").code == 0
    listed = json.loads((tmp_path / "universal" / "manifest.json").read_text())["files"]
    assert "siblings/scheduler.pt" in listed


def test_what_it_cannot_reach(tmp_path: Path) -> None:
    def said(folder: str, **scheduler: Any) -> str:
        made = Made(tmp_path / folder)
        path = made.folder / "run.pt"
        state = torch.load(path)
        torch.save({**state, "lr_scheduler": scheduler}, path)
        report = package.convert(
            made.folder, tmp_path / f"{folder}-out", to="gathered", set_group={"lr": 1e-5}
        )
        return " ".join(
            each["message"] for each in report["warnings"] if each["code"] == "program-must-set"
        )

    assert "keeps no base rates" in said("deepspeeds", last_batch_iteration=3)
    assert said("plateau", min_lrs=[0, 0], _last_lr=[0.01, 0.01], best=1.0) == ""
    assert "also uses max_lrs" in said("cyclic", base_lrs=[0.01] * 2, max_lrs=[0.1] * 2)
    config = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.1}}}
    made = Made(tmp_path / "config")
    report = package.convert(
        made.folder, tmp_path / "to", to="deepspeed", config=config, set_group={"lr": 1e-5}
    )
    assert any(
        "change scheduler.params.warmup_max_lr in it too" in t for t in texts(report["warnings"])
    )


def test_wrong_values(tmp_path: Path) -> None:
    Made(tmp_path / "before")
    rows: list[tuple[Mapping[Any, Any], str]] = [
        ({"rate": 1.0}, "--set-group rate: no such hyper-parameter"),
        ({1: {"rate": 1.0}}, "--set-group 1:rate: no such hyper-parameter"),
        ({2: {"lr": 1.0}}, "there is no group 2: .* has 2 groups"),
        ({"lr": "low"}, "does not fit the present value 0.01"),
        ({"betas": (0.9,)}, "does not fit the present value \\("),
        ({"amsgrad": 1.0}, "does not fit the present value False"),
    ]
    for values, message in rows:
        with pytest.raises(WrongOption, match=message) as caught:
            package.convert(tmp_path / "before", tmp_path / "out", set_group=values)
        if "no such" in message or "there is no group" in message:
            assert "group 0 has weight_decay, lr, betas, " in caught.value.hint
    (tmp_path / "weights").mkdir()
    torch.save(model().state_dict(), tmp_path / "weights" / "model.pt")
    with pytest.raises(WrongOption, match="stores no hyper-parameters"):
        package.convert(tmp_path / "weights", tmp_path / "out", set_group={"lr": 1.0})


def test_hints_lead_to_it(tmp_path: Path, zckpt: Zckpt) -> None:
    ended = zckpt("reshard", EXAMPLE, tmp_path / "out", "--dp", 2, "--group-defaults", "lr=1e-5")
    assert ended.code == 2
    assert "--set-group lr=..." in ended.err
    done = zckpt("reshard", EXAMPLE, tmp_path / "out", "--dp", 2, "--set-group", "lr=1e-5")
    assert done.code == 0, done.err
    assert {group["lr"] for group in read(tmp_path / "out").groups or ()} == {1e-5}
    Made(tmp_path / "torch")
    ended = zckpt(
        *("convert", tmp_path / "torch", tmp_path / "new", "--to", "gathered"),
        *("--group-defaults", "lr=1e-5"),
    )
    assert "Replace it with --set-group lr=..." in ended.err


def test_a_layout_of_another_run_needs_its_groups(tmp_path: Path, zckpt: Zckpt) -> None:
    """`--like` keeps the source's hyper-parameters, and does not know those of mixed groups."""
    Made(tmp_path / "before", frozen="0.")
    Made(tmp_path / "other", "small")
    to = ("--to", "deepspeed", "--stage", 2, "--dp", 2)
    assert zckpt("convert", tmp_path / "other", tmp_path / "run", *to).code == 0
    words = ("convert", tmp_path / "before", tmp_path / "out", "--to", "deepspeed")
    like = ("--like", tmp_path / "run")
    refused = zckpt(*words, *like)
    assert refused.code == 1
    assert "--groups-from RUN uses the groups" in refused.err
    done = zckpt(*words, *like, "--groups-from", tmp_path / "run")
    assert done.code == 0, done.err
    assert groups_in(read(tmp_path / "out")) == groups_in(read(tmp_path / "run"))


GRID = ROOT / "tests" / "data" / "zckpt-0.1-pp2_tp2" / "run"
MEGATRON = ROOT / "tests" / "data" / "megatron-0.16.1-tp2"


def test_model_ranks(tmp_path: Path, zckpt: Zckpt) -> None:
    """The groups are those of the whole model; values are replaced on each rank."""
    report = package.reshard(GRID, tmp_path / "same", dp=2, groups_from=str(GRID))
    assert report["about"].startswith("a DeepSpeed run of 2 data-parallel ranks, pp 2, tp 2")
    assert zckpt("verify", tmp_path / "same", "--against", GRID).code == 0
    package.reshard(GRID, tmp_path / "lower", dp=2, set_group={"lr": 1e-5, 1: {"lr": 2e-5}})
    assert [group["lr"] for group in read(tmp_path / "lower").groups or ()] == [1e-5, 2e-5]
    assert not package.diff(tmp_path / "lower", GRID)["differences"]


def test_engines_without_such_groups(tmp_path: Path, zckpt: Zckpt) -> None:
    for option, value in (("--set-group", "lr=1e-5"), ("--groups-from", MEGATRON)):
        refused = zckpt("reshard", MEGATRON, tmp_path / "out", option, value)
        assert refused.code == 2
        assert (
            "Megatron-Core assigns parameters to groups" in refused.err
            or "--group-defaults" in refused.err
        )
    kept = zckpt("convert", MEGATRON, tmp_path / "kept", "--set-group", "lr=1e-5")
    assert "will have no effect if you convert this target to Megatron-Core later" in kept.err


# -- with real engines


def by_hand(
    held: Mapping[str, Any], program: Program, late: bool
) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A plain loop of the program, to which the states of another were moved in memory.

    Of what that one did not train the optimizer has no state, or `late` zeros at its step.
    """
    net, tensors = model(), held["tensors"]
    optimizer = torch.optim.AdamW(groups_of(net, program.groups, program.frozen), lr=program.rate)
    for name, parameter in net.named_parameters():
        parameter.data.copy_(tensors[f"{name}/param"])
        if not parameter.requires_grad:
            continue
        kept = {key: tensors.get(f"{name}/{key}") for key in ("exp_avg", "exp_avg_sq")}
        step = held["steps"].get(name, max(held["steps"].values()) if late else None)
        if step is not None:
            optimizer.state[parameter] = {
                "step": torch.tensor(float(step)),
                **{
                    key: torch.zeros_like(parameter) if value is None else value.clone()
                    for key, value in kept.items()
                },
            }
    return net, optimizer


def assert_goes_on(
    held: Mapping[str, Any],
    before: Mapping[str, Any],
    run: package.Manifest,
    late: bool,
    program: Program,
) -> None:
    """The engine holds what the program before it held, in the groups of the run."""
    names = {name for name in held["tensors"] if not name.endswith(("/param", "/master"))}
    trained = {name.rpartition("/")[0] for name in names}
    for name, value in before["tensors"].items():
        if name.endswith("/param") or name.rpartition("/")[0] in trained:
            assert same_bits(held["tensors"][name], value), name
    for name in names - before["tensors"].keys():
        assert not held["tensors"][name].any(), name
    for group, theirs in zip(held["groups"], run.groups or (), strict=True):
        known = group.keys() & theirs.keys() - {"params"}
        assert known >= {"lr", "betas", "eps", "weight_decay"}
        assert {key: group[key] for key in known} == {key: theirs[key] for key in known}
    expected = following_losses(*by_hand(before, program, late))
    assert held["losses"] == pytest.approx(expected, rel=1e-5)


@pytest.fixture
def saved(once: Once) -> Callable[[str, Program], Path]:
    """A folder with run/ and oracle.pt of a program on 2 ranks."""
    needs("deepspeed")

    def save(work: str, program: Program) -> Path:
        def train(root: Path) -> Path:
            submit("checked_rank", work, 2, (2, program, root.resolve()), root)
            return root

        return once("next groups", f"{work} {program}".replace("/", ""), train)

    return save


Saved = Callable[[str, Program], Path]


@engines
@pytest.mark.parametrize("stage", [0, 1, pytest.param(2, marks=first), 3])
def test_deepspeed_goes_on_with_other_groups(stage: int, saved: Saved, tmp_path: Path) -> None:
    before, after = (each._replace(stage=stage) for each in (BEFORE, AFTER))
    root, run = saved("save", before), saved("save", after) / "run"
    words: dict[str, Any] = {"dp": 3}
    if not stage:  # in fp32 its optimizer knows its parameters by number
        named = tmp_path / "named"
        rule = AFTER.groups
        second = [name for name in NAMES if name.endswith("bias") or name.startswith("1.")]
        assert rule == "small"
        order = [name for name in NAMES if name not in second] + second
        package.convert(run, named, param_names=order)
        trained = [name for name in NAMES if not name.startswith("0.")]
        words["param_names"] = sorted(trained, key=lambda name: name.endswith("bias"))
        run = named
    package.reshard(root / "run", tmp_path / "out", groups_from=str(run), **words)
    output = tmp_path / "held.pt"
    arguments = (3, after, (tmp_path / "out").resolve(), output.resolve())
    submit("checked_rank", "held", 3, arguments, tmp_path)
    held, known = (torch.load(path, weights_only=False) for path in (output, root / "oracle.pt"))
    assert_goes_on(held, known, read(run), stage > 0, after)


@engines
def test_deepspeed_freezes_a_layer(saved: Saved, tmp_path: Path, zckpt: Zckpt) -> None:
    """And `check` proposes the command."""
    before, after = AFTER._replace(updates=4, decays=True), BEFORE
    root, run = saved("save", before), saved("save", after) / "run"
    ended = zckpt("check", root / "run", "--dp", 2, "--like", run, "--json")
    assert ended.code == 3
    words = shlex.split(ended.document["fix"])
    assert words[words.index("--groups-from") + 1] == str(run)
    done = zckpt(*words[1:3], tmp_path / "out", *words[4:])
    assert done.code == 0, done.err
    assert "does not train 0.weight, 0.bias" in done.err
    assert zckpt("check", tmp_path / "out", "--dp", 2, "--like", run).code == 0
    output = tmp_path / "held.pt"
    arguments = (2, after, (tmp_path / "out").resolve(), output.resolve())
    submit("checked_rank", "held", 2, arguments, tmp_path)
    held, known = (torch.load(path, weights_only=False) for path in (output, root / "oracle.pt"))
    assert_goes_on(held, known, read(run), True, after)


@engines
@pytest.mark.parametrize("stage", [1, 3])
def test_deepspeed_takes_the_rate(stage: int, saved: Saved, tmp_path: Path) -> None:
    """A file's rate wins over that of the program, and the scheduler keeps the base rates."""
    program = Program(stage, decays=True, config=UNCLIPPED)
    root = saved("save", program)
    package.reshard(root / "run", tmp_path / "out", dp=2, set_group={"lr": 1e-3, 1: {"lr": 2e-3}})
    output = tmp_path / "held.pt"
    arguments = (2, program, (tmp_path / "out").resolve(), output.resolve())
    submit("checked_rank", "held", 2, arguments, tmp_path)
    held, known = (torch.load(path, weights_only=False) for path in (output, root / "oracle.pt"))
    assert [(g["lr"], g["initial_lr"]) for g in held["groups"]] == [(1e-3,) * 2, (2e-3,) * 2]
    assert held["lr_scheduler"]["base_lrs"] == [1e-3, 2e-3]
    net, optimizer = by_hand(known, program, late=True)
    for group, rate in zip(optimizer.param_groups, (1e-3, 2e-3), strict=True):
        group |= {"lr": rate, "initial_lr": rate}
    expected = following_losses(net, optimizer, 1)
    for number in range(1, 4):
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * 0.9 ** (held["lr_scheduler"]["last_epoch"] + number)
        optimizer.zero_grad()
        loss = loss_of(net, number)
        loss.backward()
        optimizer.step()
        expected.append(loss.item())
    assert held["losses"] == pytest.approx(expected, rel=1e-5)


@engines
def test_fsdp2_goes_on_with_both(saved: Saved, tmp_path: Path) -> None:
    root, run = saved("sharded_save", BEFORE), saved("sharded_save", AFTER) / "run"
    known = torch.load(root / "oracle.pt", weights_only=False)

    def held(name: str, **words: Any) -> Any:
        package.reshard(root / "run", tmp_path / name, dp=3, groups_from=str(run), **words)
        output = tmp_path / f"{name}.pt"
        arguments = (3, AFTER, (tmp_path / name).resolve(), output.resolve())
        submit("checked_rank", "sharded_held", 3, arguments, tmp_path)
        return torch.load(output, weights_only=False)

    state = held("groups")
    assert [state["steps"][name] for name in ("0.weight", "2.weight")] == [0, 4]
    assert_goes_on(state, known, read(run), False, AFTER)
    lower = held("rate", set_group={"lr": 1e-4})
    assert [group["lr"] for group in lower["groups"]] == [1e-4, 1e-4]
    expected = following_losses(*by_hand(known, AFTER._replace(rate=1e-4), late=False))
    assert lower["losses"] == pytest.approx(expected, rel=1e-5)
