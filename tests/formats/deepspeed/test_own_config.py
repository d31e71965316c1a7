"""An option that changes nothing changes nothing: `--ds-config` with the source's own ds_config.

Every value in the target's files must be that of the source's, and every tensor of one type and
shape. `verify` compares the tensors' bytes.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt
from zckpt.core.checkpoint.facts import FlatBufferEngine
from zckpt.core.checkpoint.inert import Foreign
from zckpt.files.torchfile import Tensor, TorchFile
from zckpt.proof.verify import FINDINGS

from ...conftest import ROOT, Once
from ...engines import autoep
from ...engines.deepspeed import EVERY, EngineError, resume
from ..equality import assert_same_run

SAMPLES = {
    path.relative_to(ROOT).parts[1]
    + ("" if "data" not in path.parts else f"-{path.parts[-2]}"): path
    for path in (
        ROOT / "examples" / "run",
        ROOT / "examples" / "trainer" / "checkpoint-4",
        *sorted((ROOT / "tests" / "data").glob("deepspeed-*/run")),
        ROOT / "tests" / "data" / "zckpt-0.1-z3_dp3",
    )
}
MORE = {
    *("checkpoint_parallel_dimensions", "param_alignment_paddings"),
    *("shared_params", "frozen_param_shapes", "frozen_param_fragments"),
    *("param_shapes", "zckpt_frozen", "zckpt_inferred"),
}
"""Keys of DeepSpeed 0.19.8 that older versions lack, of second names of weights, and those that say
in stage 0 which parameters the optimizer's numbers are, and whether names are inferred."""
EMPTY = {"sparse_tensor_module_names", "state"}
"""Keys of what is empty: names of older versions (without sparse gradients), states of SGD."""
ROUND_ROBIN, SLICES = "z2_dp2_round_robin", "param_slice_mappings"
"""A row in which DeepSpeed's own slices are not those of its buffers."""
ROWS = (
    *("z1_dp2_bf16", "z2_dp3_three_groups", "z3_dp2_sub_groups", "z1_dp2_bf16_optimizer"),
    *(ROUND_ROBIN, "z2_dp3_aligned", "z2_dp2_fp16_dynamic", "z2_dp2_muon"),
    *("z2_dp2_warmup", "z2_dp2_lambda", "z2_dp2_elastic_adam"),
    *("z1_dp2_offload_cpu_adam", "z0_dp2_adam_fp32", "z0_dp2_fused_bf16", "z0_dp2_fp16_dynamic"),
)
FUSED = "z0_dp2_adam_fp32"


def values(path: str, without: str) -> dict[tuple[Any, ...], Any]:
    """What a file holds, by the keys that lead to it; None is nothing."""
    found = _values(TorchFile(path).value, ())
    return {keys: value for keys, value in found if without not in keys and value is not None}


def _values(value: Any, keys: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    if isinstance(value, Tensor):
        yield keys, (value.dtype, value.shape)
    elif isinstance(value, Foreign):
        yield keys, (value.function, value.arguments)
        yield from _values(value.state, (*keys, "state of an object"))
    elif isinstance(value, (dict, list, tuple)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, item in items:
            yield from _values(item, (*keys, key))
    else:
        yield keys, None if value is None else (type(value), repr(value))


def differing(source: Path, target: Path, without: str) -> list[str]:
    """The keys of all values that are others, or that only one side has."""
    ours, theirs = (
        {os.path.basename(path): path for path in zckpt.read(run).files.paths}
        for run in (source, target)
    )
    assert ours.keys() == theirs.keys()
    lines = []
    for name in sorted(ours):
        a, b = values(ours[name], without), values(theirs[name], without)
        lines += [f"{name} {key}" for key in a.keys() & b.keys() if a[key] != b[key]]
        lines += [f"{name} {key}, lost" for key in a.keys() - b.keys() if not EMPTY & {*key}]
        lines += [f"{name} {key}, new" for key in b.keys() - a.keys() if not MORE & {*key}]
    return sorted(lines)


def given_back(run: Path, target: Path, without: str = "") -> None:
    source = zckpt.read(run).run
    assert isinstance(source.engine, FlatBufferEngine)
    names = {"dialect": source.origin.dialect} if source.origin.dialect else {}
    report = zckpt.reshard(run, target, config=dict(source.engine.config), **names)
    assert not [line for line in report["warnings"] if line["subject"] == "lr_scheduler"]
    assert differing(run, target, without) == []
    found = zckpt.verify(target, run)
    # in fp32 without ZeRO, names are inferred, and none is proven
    assert [key for key in FINDINGS if found.get(key) and key != "unproven"] == []


@pytest.mark.parametrize("run", SAMPLES.values(), ids=SAMPLES)
def test_samples(run: Path, tmp_path: Path) -> None:
    given_back(run, tmp_path / "out")


@pytest.mark.engines
@pytest.mark.parametrize("name", ROWS)
def test_rows(name: str, trained: Callable[[Any], Path], tmp_path: Path) -> None:
    without = SLICES if name == ROUND_ROBIN else ""
    given_back(trained(EVERY[name]) / "run", tmp_path / "out", without)


@pytest.mark.engines
@pytest.mark.parametrize("name", ["autoep_dp2_ep2", "autoep_dp4_ep2_z1_fp32"])
def test_auto_ep(name: str, once: Once, tmp_path: Path) -> None:
    """With the maps and sizes that its layers state."""
    run = once("auto_ep", name, partial(autoep.train, autoep.CASES[name]))
    given_back(run, tmp_path / "out")


@pytest.mark.engines
def test_no_loss_scaler(trained: Callable[[Any], Path], tmp_path: Path) -> None:
    """The target has one that scales nothing, which the engine's next update needs."""
    case = EVERY["z2_dp2_bf16"]
    root, run = trained(case), tmp_path / "run"
    shutil.copytree(root / "run", run)
    for path in run.glob("*/*optim_states.pt"):
        value = torch.load(path, weights_only=False)
        value["optimizer_state_dict"]["loss_scaler"] = None
        torch.save(value, path)
    zckpt.reshard(run, tmp_path / "out")
    for sides in ((run, tmp_path / "out"), (tmp_path / "out", run), (run, root / "run")):
        assert zckpt.verify(*sides)["equal"]
    with pytest.raises(EngineError, match=r"update_scale|cur_scale"):
        resume(case, run, tmp_path / "from the source", losses=1)
    found = resume(case, tmp_path / "out", tmp_path / "engine")
    expected = torch.load(root / "oracle.pt", weights_only=False)
    assert_same_run(expected, found)


@pytest.mark.engines
def test_verify_sees_other_steps(trained: Callable[[Any], Path], tmp_path: Path) -> None:
    """FusedAdam counts in a group's last state alone: [0, 3], and not [3, 3]."""
    run = trained(EVERY[FUSED]) / "run"
    zckpt.reshard(run, tmp_path / "out")
    (path,) = (tmp_path / "out").glob("*/mp_rank_00_model_states.pt")
    model = torch.load(path, weights_only=False)
    states = model["optimizer"]["state"]
    counted = [own["step"] for own in states.values()]
    assert 0 in counted
    assert 3 in counted
    for own in states.values():
        own["step"] = 3
    torch.save(model, path)
    report = zckpt.verify(run, tmp_path / "out")
    assert report["step_place"] == [
        {"a": "only the state of a group's last parameter", "b": "the state of each parameter"}
    ]
