"""State dicts go back to a pipeline or to tensor ranks: `--like RUN`.

DeepSpeed trains, plain torch or FSDP2 trains one step more, DeepSpeed goes on.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt
from zckpt.errors import (
    InconsistentCheckpoint,
    MissingData,
    NotACheckpoint,
    WrongOption,
    ZckptError,
)

from ...conftest import texts
from ...engines import grids
from ...engines.deepspeed import submit
from ...engines.grids import CASES
from ..equality import same_bits
from .conftest import Trained
from .test_recut import BOTH, BOUNDS, TWO
from .test_tensor_ranks import resumes

pytestmark = pytest.mark.engines
first = pytest.mark.first
FP32 = "pipe_pp2_tp2_dp1_fp32"
TENSOR = "tensor_tp2_dp2"
UNEVEN = "llama_tp4_dp1"  # two ranks have no key-value head


@pytest.mark.parametrize(
    ("name", "to", "ranks", "options"),
    [
        pytest.param(BOTH, "gathered", 1, {}, marks=first),
        (FP32, "dcp", 2, {}),
        (FP32, "gathered", 1, {"pp": 3, "tp": 1, "dp": 2}),
        (FP32, "dcp", 3, {"pp": 1, "tp": 4, "dp": 1}),
        (TWO, "dcp", 2, {"dp": 1}),
    ],
)
def test_a_step_in_torch_between(
    name: str, to: str, ranks: int, options: Any, grid_trained: Trained, tmp_path: Path
) -> None:
    """The engine has what torch had, and its losses are those of the run that went on."""
    root, case = grid_trained(name), CASES[name]
    zckpt.convert(root / "run", tmp_path / "whole", to=to)
    paths = (tmp_path / "whole", tmp_path / "trained")
    submit("grid_fsdp", "step", ranks, (ranks, *paths, case.steps), tmp_path)
    bounds = {"pp_bounds": BOUNDS[options["pp"]]} if options.get("pp", 1) > 1 else {}
    report = zckpt.convert(
        tmp_path / "trained", tmp_path / "run", to="deepspeed", like=str(root / "run"),
        **options, **bounds,
    )  # fmt: skip
    assert {line["code"] for line in report["warnings"]} <= {"frozen-inferred"}
    case = replace(case, steps=case.steps + 1, tp=options.get("tp", case.tp))
    engine = grids.resume(
        case, tmp_path / "run", tmp_path / "engine", options.get("dp", case.dp), options.get("pp")
    )
    torch_had = torch.load(tmp_path / "trained.held")
    compared = 0
    for full, tensor in torch_had["tensors"].items():
        parameter, slot = full.rsplit("/", 1)
        if slot == "step":
            assert engine["steps"][parameter] == tensor == case.steps
            continue
        own = engine["tensors"].get(f"{parameter}/master") if slot == "param" else None
        own = own if own is not None else engine["tensors"].get(full)
        own = own if own is not None else engine["buffers"][parameter]
        assert same_bits(own, tensor.to(own.dtype)), full
        compared += 1
    assert compared == 70
    samples = {"global_steps": 4, "skipped_steps": 0, "global_samples": 96}
    assert engine["counters"] == samples
    expected = torch.load(root / "oracle.pt", weights_only=False)
    assert [g["lr"] for g in engine["groups"]] == [g["lr"] for g in expected["groups"]]
    most = 1e-5 if case.dtype == "fp32" else 4e-3
    assert abs(torch_had["loss"] - expected["losses"][0]) < most
    assert abs(engine["losses"][0] - expected["losses"][1]) < most


@pytest.mark.parametrize("name", [pytest.param(BOTH, marks=first), TENSOR, UNEVEN])
def test_the_run_itself_comes_back(name: str, grid_trained: Trained, tmp_path: Path) -> None:
    run = grid_trained(name) / "run"
    zckpt.convert(run, tmp_path / "universal")
    zckpt.convert(run, tmp_path / "dcp", to="dcp")
    for number, like in enumerate((run, tmp_path / "universal")):
        target = tmp_path / str(number)
        zckpt.convert(tmp_path / "dcp", target, to="deepspeed", like=str(like))
        assert zckpt.diff(target, run)["equal"]
        paths = sorted(path.relative_to(run) for path in run.glob("*/*"))
        assert sorted(path.relative_to(target) for path in target.glob("*/*")) == paths


def test_shares_that_are_not_even(grid_trained: Trained, tmp_path: Path) -> None:
    """For the source's own tensor ranks they are the source's, which the affine_map states."""
    root = grid_trained(UNEVEN)
    zckpt.convert(root / "run", tmp_path / "universal")
    report = zckpt.convert(tmp_path / "universal", tmp_path / "run", to="deepspeed")
    assert report["warnings"] == []
    resumes(root, tmp_path / "run", 4, 1, tmp_path, None)


@first
def test_a_run_of_one_model_rank(tmp_path: Path) -> None:
    zckpt.convert("examples/run", tmp_path / "dcp", to="dcp")
    zckpt.convert(tmp_path / "dcp", tmp_path / "out", to="deepspeed", like="examples/run")
    found = zckpt.diff(tmp_path / "out", "examples/run")
    assert (found["differences"], found["only_a"], found["only_b"]) == ([], [], [])
    config = zckpt.read(tmp_path / "out").run.engine.config  # type: ignore[union-attr]
    assert config == zckpt.read("examples/run").run.engine.config  # type: ignore[union-attr]


@first
class TestWhatTheSourceLacks:
    def test_schedulers_go_to_the_sources_step(self, grid_trained: Trained, tmp_path: Path) -> None:
        run = Path(shutil.copytree(grid_trained(BOTH) / "run", tmp_path / "run"))
        zckpt.convert(run, tmp_path / "dcp", to="dcp")
        for path in run.glob("*/mp_rank_*"):
            model = torch.load(path, weights_only=False)
            model["lr_scheduler"] = {"last_batch_iteration": 9, "min_lr": 0.5}
            model |= {"global_steps": 10, "global_samples": 50, "iteration": 10, "other": 1}
            torch.save(model, path)
        for path in run.glob("*/*optim*"):
            states = torch.load(path, weights_only=False)
            base = states["optimizer_state_dict"]["base_optimizer_state"]
            for state in base["state"].values():
                state["step"].fill_(10)
            torch.save(states, path)
        report = zckpt.convert(
            tmp_path / "dcp", tmp_path / "out", to="deepspeed", like=str(run), rename=()
        )
        said = "\n".join(texts(report["warnings"]))
        assert "moved to the source's step: last_batch_iteration = 2" in said
        assert "client state has these keys from the run of --like: other" in said
        for path in tmp_path.glob("out/*/mp_rank_*"):
            model = torch.load(path, weights_only=False)
            assert model["lr_scheduler"] == {"last_batch_iteration": 2, "min_lr": 0.5}
            assert (model["global_steps"], model["global_samples"]) == (3, 15)
            assert (model["iteration"], model["other"]) == (3, 1)

    def test_rows_that_only_pad(self, grid_trained: Trained, tmp_path: Path) -> None:
        """A torch program has the rows of the vocabulary alone."""
        run = grid_trained(BOTH) / "run"
        zckpt.convert(run, tmp_path / "whole", to="gathered")
        name = "tied_modules.embed.weight"
        model = torch.load(tmp_path / "whole/model.pt")
        model[name] = model[name][:31].clone()
        torch.save(model, tmp_path / "whole/model.pt")
        optim = torch.load(tmp_path / "whole/optim.pt")
        for slot in ("exp_avg", "exp_avg_sq"):
            state = optim["state"][number_of(optim, name)]
            state[slot] = state[slot][:31].clone()
        torch.save(optim, tmp_path / "whole/optim.pt")
        zckpt.convert(tmp_path / "whole", tmp_path / "out", to="deepspeed", like=str(run))
        for slot in ("master", "exp_avg", "exp_avg_sq"):
            before, after = (zckpt.load(path, f"{name}/{slot}") for path in (run, tmp_path / "out"))
            assert after.shape == (36, 14)
            assert same_bits(after[:31], before[:31])
            assert not after[31:].any()


def number_of(optim: dict[str, Any], name: str) -> int:
    numbers: dict[str, int] = {}
    for group in optim["param_groups"]:
        numbers |= dict(zip(group["param_names"], group["params"], strict=True))
    return numbers[name]


def without(whole: Path, name: str) -> None:
    model = torch.load(whole / "model.pt")
    del model[name]
    torch.save(model, whole / "model.pt")


def without_states(whole: Path, name: str) -> None:
    optim = torch.load(whole / "optim.pt")
    del optim["state"][number_of(optim, name)]
    torch.save(optim, whole / "optim.pt")


def with_rate(whole: Path, name: str) -> None:
    """One parameter gets a group of its own."""
    optim = torch.load(whole / "optim.pt")
    number = number_of(optim, name)
    group = next(group for group in optim["param_groups"] if number in group["params"])
    group["params"].remove(number)
    group["param_names"].remove(name)
    optim["param_groups"].append({**group, "params": [number], "param_names": [name], "lr": 0.5})
    torch.save(optim, whole / "optim.pt")


@first
@pytest.mark.parametrize(
    ("change", "options", "error", "said"),
    [
        (lambda whole: without(whole, "3.bias"), {}, MissingData,
         r"only --like has 3\.bias"),
        (lambda whole: without_states(whole, "7.bias"), {}, MissingData,
         r"7\.bias has the states none in .*, but exp_avg, exp_avg_sq in --like"),
        (lambda whole: with_rate(whole, "7.bias"), {}, InconsistentCheckpoint,
         "different values of lr for them"),
        (None, {"rename": [(r"^6\.", "8.")]}, MissingData, "only the source has 8"),
        (None, {"like": "examples/run"}, MissingData, "have different parameters"),
        (None, {"like": "tests/data/fsdp2-2.13.0-w2"}, NotACheckpoint,
         "is no deepspeed checkpoint"),
        (None, {"like": "nowhere"}, NotACheckpoint, "does not exist"),
        (None, {"pp": 3}, WrongOption, "--pp 3 needs the first layer"),
        (None, {"tp": 8}, ZckptError, "cannot be cut evenly over 8"),
        (None, {"stage": 2}, WrongOption, "does not go with a pipeline"),
    ],
)  # fmt: skip
def test_refusals(
    change: Callable[[Path], None] | None,
    options: Any,
    error: type[ZckptError],
    said: str,
    grid_trained: Trained,
    tmp_path: Path,
) -> None:
    run = grid_trained(BOTH) / "run"
    zckpt.convert(run, tmp_path / "whole", to="gathered")
    if change is not None:
        change(tmp_path / "whole")
    given = {"like": str(run), **options}
    with pytest.raises(error, match=said) as raised:
        zckpt.convert(tmp_path / "whole", tmp_path / "out", to="deepspeed", **given)
    assert raised.value.hint
    assert not (tmp_path / "out").exists()


@first
def test_hints_lead_to_it(grid_trained: Trained, tmp_path: Path) -> None:
    run = grid_trained(BOTH) / "run"
    zckpt.convert(run, tmp_path / "whole", to="gathered")
    for option in ({"pp": 2}, {"tp": 2}):
        with pytest.raises(ZckptError) as raised:
            zckpt.convert(tmp_path / "whole", tmp_path / "out", to="deepspeed", **option)
        assert "--like RUN" in (raised.value.hint or "")
    with pytest.raises(WrongOption, match="--like does not apply"):
        zckpt.reshard(run, tmp_path / "out", like=str(run))
