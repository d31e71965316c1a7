"""What PyTorch's own means save: read against live memory, written for any world size, resumed.

Every form of a checkpoint at worlds 1, 2 and 4; and across engines, real ones on both ends.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt
from zckpt import errors

from ...conftest import texts
from ...engines import deepspeed, models, torch_engine
from ...engines.cases import CASES as DEEPSPEED
from ...engines.cases import STAGE_0, UNCLIPPED
from ...engines.cases import Case as DeepSpeedCase
from ...engines.torch_cases import CASES, Case
from ..equality import assert_is_what_torch_held, assert_proven, assert_same_run

Trained = Callable[[str, int], Path]
BY_NUMBER = (
    "raw",
    "ranks",
    "one file",
    "prefixed file",
    "compiled file",
    "files",
    "zro ranks",
)  # layouts
REFUSED = {
    "fsdp1_local": "is a flat parameter",
    "fsdp1_flat_local": "is a flat parameter",
    "fsdp2_bare_items": "slices of one model on 4 ranks",
}
# the form of a checkpoint does not change with these: world 2 tells
VARIANTS = ("optimizer", "model", "groups", "frozen_in_groups", "scheduler", "steps")
FIRST = ("fsdp2_dcp", "fsdp1_dcp", "fsdp2_local", "fsdp1_sharded_pt", "zro_ranks", "hf_sharded")


def is_variant(case: Case) -> bool:
    plain = Case("", case.engine, case.layout)
    return any(getattr(case, field) != getattr(plain, field) for field in VARIANTS)


def readings() -> list[Any]:
    return [
        pytest.param(
            name,
            world,
            id=f"{name}-w{world}",
            marks=[pytest.mark.first] if name in FIRST and world == 2 else [],
        )
        for name, case in CASES.items()
        for world in case.worlds
        if name not in REFUSED and (world == 2 or len(case.worlds) == 1 or not is_variant(case))
    ]


def source(folder: Path) -> Path:
    """The checkpoint itself: a file, or a folder."""
    paths = list((folder / "run").iterdir())
    single = len(paths) == 1 and (paths[0].is_file() or paths[0].name.startswith("step-"))
    return paths[0] if single else folder / "run"


def names(case: Case, oracle: dict[str, Any]) -> dict[str, Any]:
    """What an optimizer that knows numbers alone may need; without wrappers' prefixes."""
    if case.layout not in BY_NUMBER:
        return {}
    return {"param_names": [name for group in oracle["groups"] for name in group["params"]]}


@pytest.mark.engines
@pytest.mark.parametrize(("name", "world"), readings())
def test_reading(name: str, world: int, torch_trained: Trained, tmp_path: Path) -> None:
    """Bit for bit what ranks held, and proven in every way."""
    case, folder = CASES[name], torch_trained(name, world)
    oracle = torch.load(folder / "oracle.pt", weights_only=False)
    options, universal = names(case, oracle), tmp_path / "universal"
    inferred = bool(options) and case.groups == 1  # the module's order tells as much
    report = zckpt.convert(source(folder), universal, **({} if inferred else options))
    assert bool(report["inferred"]) == inferred
    if case.layout == "hf consolidated":  # torch 2.13 writes zero for a 0-d weight there
        oracle["tensors"]["temperature/param"] = torch.tensor(0.0)
    assert_is_what_torch_held(universal, oracle, weights_only=case.reload == "weights")
    by_number = any("by number" in warning for warning in texts(report["warnings"]))
    assert by_number == (case.layout in BY_NUMBER)
    for words in ({}, {"against": universal}, {"against": universal, "gather": True}):
        checked = zckpt.verify(source(folder), **words, **options)
        assert checked["equal"], checked
    if inferred:
        checked = zckpt.verify(source(folder), universal)
        assert checked["unproven"]
        assert not checked["equal"]


@pytest.mark.engines
@pytest.mark.parametrize("name", REFUSED)
def test_what_only_the_program_knows(name: str, torch_trained: Trained, tmp_path: Path) -> None:
    world = max(CASES[name].worlds)
    with pytest.raises(errors.UnsupportedCheckpoint, match=REFUSED[name]):
        zckpt.convert(source(torch_trained(name, world)), tmp_path / "universal")
    assert not (tmp_path / "universal").exists()


# -- written, and resumed by stock torch

WRITTEN = [
    # case, its world, engine that resumes, its world, --dp
    ("fsdp2_dcp", 2, "fsdp2", 3, 3),
    ("fsdp2_dcp", 4, "fsdp2", 1, 2),
    ("fsdp2_dcp", 1, "fsdp2", 4, 1),
    ("fsdp2_dcp", 2, "fsdp1", 1, 1),
    ("fsdp2_dcp", 2, "fsdp1", 2, 3),
    ("fsdp2_dcp", 2, "fsdp1", 3, 3),
    ("fsdp2_dcp", 2, "fsdp1", 4, 2),
    ("fsdp1_dcp", 2, "fsdp2", 2, 2),
    ("fsdp1_dcp", 4, "fsdp1", 3, 3),
    ("fsdp1_flat", 2, "fsdp1_flat", 3, 3),
    ("fsdp2_flat", 2, "fsdp2", 3, 3),
    ("fsdp2_raw", 2, "fsdp2", 3, 3),
    ("fsdp2_app", 4, "fsdp2", 3, 3),
    ("fsdp2_titan", 2, "fsdp2", 3, 3),
    ("fsdp2_bf16", 2, "fsdp2", 2, 3),  # sums over other ranks round otherwise
    ("fsdp2_inner", 2, "fsdp2", 3, 3),
    ("fsdp2_strided", 2, "fsdp2", 3, 3),
    ("fsdp2_three_groups", 2, "fsdp2", 4, 4),
    ("fsdp2_frozen_in_groups", 2, "fsdp2", 3, 3),
    ("fsdp2_scheduler", 2, "fsdp2", 3, 3),
    ("fsdp2_amsgrad", 2, "fsdp2", 3, 3),
    ("fsdp2_nadam", 2, "fsdp2", 3, 3),
    ("fsdp2_sgd", 2, "fsdp2", 3, 3),
    ("fsdp2_momentum", 2, "fsdp2", 3, 3),
    ("fsdp2_tensor_lr", 2, "fsdp2", 3, 3),
    ("fsdp2_safetensors", 2, "fsdp2", 3, 3),
    ("never_stepped", 2, "fsdp2", 3, 3),
    ("fsdp2_hsdp", 4, "fsdp2", 4, 4),
    ("fsdp2_2d", 4, "fsdp2", 4, 4),
    # files of single ranks, which torch refuses at another world size
    ("fsdp2_local", 2, "fsdp2", 3, 3),
    ("fsdp2_inner_local", 4, "fsdp2", 3, 3),
    ("fsdp1_sharded_pt", 4, "fsdp1", 3, 3),
    ("fsdp1_sharded_pt", 2, "fsdp2", 4, 4),
    ("fsdp2_items", 2, "fsdp2", 3, 3),
    # folders of model and optimizer
    ("fsdp2_folders", 2, "fsdp2", 3, 3),
    ("fsdp2_folders", 2, "fsdp2", 1, 1),
    ("fsdp2_automodel", 2, "fsdp2", 3, 3),
    ("fsdp2_automodel", 2, "fsdp2", 1, 1),
    # whole ones
    ("zro", 4, "fsdp2", 2, 2),
    ("zro_ranks", 4, "fsdp2", 3, 3),
    ("ddp", 2, "fsdp1", 2, 2),
]


@pytest.mark.engines
@pytest.mark.parametrize(
    ("name", "world", "engine", "resumed", "dp"),
    [
        pytest.param(*row, marks=[pytest.mark.first] if place in (0, 5) else [])
        for place, row in enumerate(WRITTEN)
    ],
)
def test_torch_resumes(
    name: str,
    world: int,
    engine: str,
    resumed: int,
    dp: int,
    torch_trained: Trained,
    tmp_path: Path,
) -> None:
    """State bit for bit, steps, groups, the next five losses within 1e-4."""
    case, folder = CASES[name], torch_trained(name, world)
    oracle = torch.load(folder / "oracle.pt", weights_only=False)
    target = tmp_path / "target"
    zckpt.convert(source(folder), target, to="dcp", dp=dp, **names(case, oracle))
    kept = ("nested", "flat", "raw", "app", "titan", "folders", "automodel")
    layout = case.layout if case.layout in kept else "nested"
    root = "optimizer" if case.layout in ("one file", "items") else "optim"  # as the program has it
    after = torch_engine.resume(
        engine, target, resumed, tmp_path, case=case, layout=layout, optim=root
    )
    assert_same_run(oracle, after)


# -- across engines


@pytest.mark.engines
@pytest.mark.parametrize(
    "stage", [1, 2, pytest.param(3, marks=pytest.mark.first)], ids=["z1", "z2", "z3"]
)
def test_deepspeed_goes_on_in_fsdp2(stage: int, trained: Any, tmp_path: Path) -> None:
    folder = trained(DEEPSPEED[f"z{stage}_dp2_as_torch"])
    oracle = torch.load(folder / "oracle.pt", weights_only=False)
    zckpt.convert(folder / "run", tmp_path / "dcp", to="dcp", dp=3)
    assert_proven(folder / "run", tmp_path / "dcp")
    case = CASES["fsdp2_as_deepspeed"]
    resumed = torch_engine.resume("fsdp2", tmp_path / "dcp", 3, tmp_path, case=case)
    assert_same_run(oracle, resumed, across=True)


@pytest.mark.engines
def test_fused_adam_without_zero_goes_on_in_fsdp2(trained: Any, tmp_path: Path) -> None:
    """It counts in the last parameter of each group: others said 0, and torch began anew."""
    case = STAGE_0["z0_dp2_fused_fp32"]
    folder = trained(dataclasses.replace(case, name=f"{case.name}_as_torch", config=UNCLIPPED))
    oracle = torch.load(folder / "oracle.pt", weights_only=False)
    groups = models.named_groups(models.build("full", 0), 2)
    order = [name for names, _ in groups for name in names]
    zckpt.convert(folder / "run", tmp_path / "dcp", to="dcp", dp=3, param_names=order)
    as_torch = CASES["fsdp2_as_deepspeed"]
    resumed = torch_engine.resume("fsdp2", tmp_path / "dcp", 3, tmp_path, case=as_torch)
    assert_same_run(oracle, resumed, across=True)


def of_deepspeed(optimizer: str, stage: int) -> DeepSpeedCase:
    """A case that DeepSpeed trains as torch does, with another optimizer."""
    case = DEEPSPEED["z2_dp2_as_torch"]
    name = f"z{stage}_dp2_{optimizer.replace(' ', '_')}_as_torch"
    return dataclasses.replace(case, name=name, stage=stage, optimizer=optimizer)


BETWEEN = [None, "universal", "gathered"]
IN_GROUPS = [("fsdp2_ademamix", "ademamix"), ("fsdp2_apex", "apex fused adam")]


def moved(source: Path, through: str | None, folder: Path, **target: Any) -> Path:
    """A conversion, perhaps through another format; each one equals the source."""
    if through is not None:
        zckpt.convert(source, folder / "between", to=through)
        assert zckpt.verify(source, folder / "between")["equal"]
    zckpt.convert(folder / "between" if through else source, folder / "target", **target)
    checked = zckpt.verify(source, folder / "target")
    assert checked["equal"], checked
    assert not any("place of the optimizer's step" in note for note in texts(checked["notes"]))
    return folder / "target"


@pytest.mark.engines
@pytest.mark.parametrize("through", BETWEEN)
@pytest.mark.parametrize(("name", "optimizer"), IN_GROUPS)
def test_a_step_in_groups_goes_to_deepspeed(
    name: str, optimizer: str, through: str | None, torch_trained: Trained, tmp_path: Path
) -> None:
    folder, stage = torch_trained(name, 2), 1 if through else 2
    oracle = torch.load(folder / "oracle.pt", weights_only=False)
    target = moved(folder / "run", through, tmp_path, to="deepspeed", dp=3, stage=stage)
    resumed = deepspeed.resume(of_deepspeed(optimizer, stage), target, tmp_path, dp=3)
    assert_same_run(oracle, resumed, across=True)


@pytest.mark.engines
@pytest.mark.parametrize("through", BETWEEN)
@pytest.mark.parametrize(("name", "optimizer"), IN_GROUPS)
def test_a_step_in_groups_comes_from_deepspeed(
    name: str, optimizer: str, through: str | None, trained: Any, tmp_path: Path
) -> None:
    folder = trained(of_deepspeed(optimizer, 2))
    oracle = torch.load(folder / "oracle.pt", weights_only=False)
    target = moved(folder / "run", through, tmp_path, to="dcp", dp=3)
    resumed = torch_engine.resume("fsdp2", target, 3, tmp_path, case=CASES[name])
    assert_same_run(oracle, resumed, across=True)


@pytest.mark.engines
@pytest.mark.parametrize(
    "stage", [1, 2, pytest.param(3, marks=pytest.mark.first)], ids=["z1", "z2", "z3"]
)
def test_fsdp2_goes_on_in_deepspeed(stage: int, torch_trained: Trained, tmp_path: Path) -> None:
    folder = torch_trained("fsdp2_as_deepspeed", 2)
    oracle = torch.load(folder / "oracle.pt", weights_only=False)
    zckpt.convert(folder / "run", tmp_path / "zero", to="deepspeed", dp=3, stage=stage)
    assert_proven(folder / "run", tmp_path / "zero")
    case = DEEPSPEED[f"z{stage}_dp2_as_torch"]
    resumed = deepspeed.resume(case, tmp_path / "zero", tmp_path, dp=3)
    assert_same_run(oracle, resumed, across=True)
