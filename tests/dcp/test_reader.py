"""The storage reader: real programs of torch load checkpoints of other engines."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

import zckpt
from examples.make_checkpoint import Model
from zckpt import dcp
from zckpt.core.checkpoint.entries import Entry
from zckpt.core.storage.fileio import Reader
from zckpt.core.storage.fragments import Runs
from zckpt.dcp import regions
from zckpt.errors import NotACheckpoint, WrongOption

from ..conftest import EXAMPLE, ROOT
from ..engines import loading, torch_engine
from ..engines.cases import CASES, Case
from ..engines.loading import Job
from ..formats.equality import load as load_universal
from ..formats.equality import same_bits

ORT = ROOT / "tests/data/onnxruntime/hdf5__fp16__adam__dp3"
WEIGHTS_ALONE = ("model", "bare", "boxes")

Trained = Callable[[Case], Path]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """torch warns that no process group is there; what zckpt warns of is looked for."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        warnings.filterwarnings("ignore", category=FutureWarning)
        yield


def load(state: dict[str, Any], reader: dcp.StorageReader, **planner: Any) -> None:
    torch_dcp.load(
        state, storage_reader=reader, planner=torch_dcp.DefaultLoadPlanner(**planner), no_dist=True
    )


def example_optimizer(model: nn.Module, *, frozen: bool = False) -> torch.optim.Optimizer:
    """An optimizer with the groups of the example's training, and other hyper-parameters."""
    named = [each for each in model.named_parameters() if frozen or each[1].requires_grad]
    groups = [[p for _, p in named if p.ndim > 1], [p for _, p in named if p.ndim == 1]]
    return torch.optim.AdamW(
        [{"params": group, "lr": 0.5 + place} for place, group in enumerate(groups)]
    )


@pytest.fixture(scope="module")
def tensors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """Every tensor of the example, by `parameter/slot`."""
    out = tmp_path_factory.mktemp("tensors") / "out"
    zckpt.convert(EXAMPLE, out)
    return load_universal(out)


def weight(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """A weight in float32, from the master if there is one."""
    return tensors.get(f"{name}/master", tensors.get(f"{name}/param", torch.empty(0))).float()


# -- real programs


def expected(oracle: dict[str, Any], form: str) -> dict[str, torch.Tensor]:
    """The tensors that a program of torch must have: masters as its weights."""
    tensors = oracle["tensors"]
    want = {f"{name}/param": tensor for name, tensor in oracle["buffers"].items()}
    for name in (*oracle["trainable"], *oracle["frozen"]):
        wide = tensors.get(f"{name}/master", tensors[f"{name}/param"])
        want[f"{name}/param"] = wide.float()
    if form not in WEIGHTS_ALONE:
        want |= {key: tensors[key] for key in tensors if not key.endswith(("/param", "/master"))}
        for name, scalars in oracle["scalars"].items():
            want |= {f"{name}/{key}": torch.as_tensor(value) for key, value in scalars.items()}
    if form == "boxes":
        want = {key: want[key] for key in want if key in tensors}
    aliases = oracle["aliases"].items()
    return want | {f"{alias}/param": want[f"{name}/param"] for alias, name in aliases}


def assert_loaded(job: Job, root: Path, loaded: dict[str, Any]) -> None:
    oracle = torch.load(root / "oracle.pt", weights_only=False)
    want = expected(oracle, job.form)
    for key, tensor in want.items():
        actual = loaded["tensors"][key]
        assert same_bits(actual, tensor.to(actual.dtype)), key
    assert (loaded["tensors"]["readout.weight/param"].dtype == torch.bfloat16) is job.bf16
    for read, needed in loaded["reads"]:
        assert 0 < read <= 1.1 * needed
    if job.form in WEIGHTS_ALONE:
        return
    assert set(loaded["tensors"]) == set(want)
    steps = {name: step for name, step in oracle["steps"].items() if step is not None}
    assert loaded["steps"] == {name: steps[name] for name in loaded["steps"]}
    assert set(loaded["steps"]) == set(steps) or job.optimizer in ("sgd", "momentum", "lion")
    for ours, theirs in zip(loaded["groups"], oracle["groups"], strict=True):
        assert set(theirs["params"]) == set(ours["params"]) - set(oracle["frozen"])
        assert {key: ours[key] for key in ours if key in theirs and key != "params"} == {
            key: value for key, value in theirs.items() if key in ours and key != "params"
        }
    if job.losses:
        assert loaded["losses"] == pytest.approx(oracle["losses"], abs=1e-4)


FLAT_PLANNER = {"flatten_sharded_tensors": False}
MATRIX = [
    ("z3_dp2_bf16", Job(world=2)),  # the first: what the default run takes
    ("z3_dp2_bf16", Job(world=1)),
    ("z3_dp2_bf16", Job(world=3)),
    ("z2_dp2_bf16", Job(world=3, form="flat")),
    ("z1_dp2_bf16", Job(world=2, form="app")),
    *(
        (f"z{stage}_dp2_fp32", Job(world=world, form=form, losses=5))
        for stage, world, form in ((1, 1, "nested"), (2, 2, "app"), (3, 3, "flat"), (3, 2, "raw"))
    ),
    ("z3_dp2_bf16", Job(form="model", roots=("state_dict", ""))),
    ("z2_dp2_bf16", Job(form="bare")),
    ("z3_dp2_bf16", Job(engine="plain", form="boxes", world=3)),
    ("z2_dp2_bf16", Job(engine="plain", form="boxes", world=2)),
    ("z2_dp2_bf16", Job(roots=("state_dict", "optimizer"))),
    ("z3_dp2_bf16", Job(roots=("a.b", "c.d"), form="flat")),
    ("z3_dp2_bf16", Job(compiled=True)),
    ("z3_dp2_bf16", Job(bf16=True)),
    ("z1_dp2_bf16", Job(bf16=True, world=3)),
    ("z3_dp3_three_groups", Job(groups=3)),
    ("z2_dp3_adam", Job(optimizer="adam")),
    ("z3_dp3_amsgrad", Job(optimizer="amsgrad", form="flat")),
    ("z3_dp3_nadam", Job(optimizer="nadam")),
    ("z2_dp3_rmsprop", Job(optimizer="rmsprop")),
    ("z2_dp3_sgd", Job(optimizer="sgd")),
    ("z3_dp3_momentum", Job(optimizer="momentum")),
    ("z2_dp3_lion", Job(optimizer="lion")),
    ("z2_dp2_strided", Job(model="strided")),
    ("z3_dp3_unused", Job(model="unused")),
    ("z2_dp2_round_robin", Job(groups=3)),
    ("z3_dp2_sub_groups", Job(groups=3, world=3)),
    ("z2_dp2_bf16", Job(engine="plain", form="raw")),
    ("z2_dp2_bf16", Job(engine="plain")),
    ("z1_dp2_bf16", Job(engine="fsdp1")),
    ("z3_dp2_bf16", Job(engine="fsdp1", world=3, planner=FLAT_PLANNER)),
    ("z3_dp2_bf16", Job(engine="fsdp1", world=3)),
    ("z2_dp2_bf16", Job(engine="fsdp1", form="flat")),
]


def matrix() -> list[Any]:
    marks = [[pytest.mark.engines, pytest.mark.first], *([[pytest.mark.engines]] * len(MATRIX))]
    return [
        pytest.param(
            name,
            job,
            marks=marks[place],
            id=f"{name}-{job.engine}-{job.form}-{job.optimizer}-w{job.world}-{place}",
        )
        for place, (name, job) in enumerate(MATRIX)
    ]


@pytest.mark.parametrize(("name", "job"), matrix())
def test_programs_hold_what_the_engine_held(
    name: str, job: Job, trained: Trained, tmp_path: Path
) -> None:
    root = trained(CASES[name])
    assert_loaded(job, root, loading.load(job, root / "run", tmp_path))


@pytest.mark.engines
def test_a_universal_checkpoint_is_loaded(trained: Trained, tmp_path: Path) -> None:
    root = trained(CASES["z3_dp2_bf16"])
    zckpt.convert(root / "run", tmp_path / "universal", rename=(("^", "module."),))
    job = Job(world=3)
    assert_loaded(job, root, loading.load(job, tmp_path / "universal", tmp_path))


@pytest.mark.engines
@pytest.mark.parametrize("name", ["fsdp2_flat", "fsdp2_raw", "fsdp1_dcp"])
def test_what_torch_wrote_is_loaded(name: str, tmp_path: Path) -> None:
    case = torch_engine.CASES[name]
    torch_engine.train(case, 2, tmp_path)
    oracle = torch.load(tmp_path / "oracle.pt", weights_only=False)
    names = [member for group in oracle["groups"] for member in group["params"]]
    reader = {"param_names": names} if name == "fsdp2_raw" else {}
    job = Job(world=3, model=case.model, groups=case.groups, reader=reader)
    assert_loaded(job, tmp_path, loading.load(job, tmp_path / "run", tmp_path))


# -- one process


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("roots", [("model", "optim"), ("state_dict", "optimizer")])
@pytest.mark.parametrize("frozen", [False, True])
def test_state_dicts_of_every_shape(
    tensors: dict[str, torch.Tensor], flat: bool, roots: tuple[str, str], frozen: bool
) -> None:
    model = Model()
    optimizer = example_optimizer(model, frozen=frozen)
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    weights, states = get_state_dict(model, optimizer, options=options)
    state = {roots[0]: weights, roots[1]: states}
    load(state, dcp.StorageReader(EXAMPLE))
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state[roots[0]],
        optim_state_dict=state[roots[1]],
        options=options,
    )
    for name, each in (*model.named_parameters(), *model.named_buffers()):
        assert same_bits(each.data, weight(tensors, name)), name
        if each.requires_grad:
            moments = optimizer.state[each]
            assert same_bits(moments["exp_avg"], tensors[f"{name}/exp_avg"])
            assert same_bits(moments["step"], torch.tensor(7.0))
    assert [(g["lr"], g["weight_decay"], g["betas"]) for g in optimizer.param_groups] == [
        (0.003, 0.1, (0.9, 0.95)),
        (0.003, 0.0, (0.9, 0.95)),
    ]


@pytest.mark.parametrize("kind", ["universal", "deepspeed-universal", "onnxruntime"])
def test_any_format_is_read(tmp_path: Path, kind: str) -> None:
    source = ORT if kind == "onnxruntime" else tmp_path / "source"
    if kind != "onnxruntime":
        zckpt.convert(EXAMPLE, source, to=kind)
    zckpt.convert(source, tmp_path / "out")
    tensors = load_universal(tmp_path / "out")
    manifest = zckpt.read(tmp_path / "out")
    names = manifest.parameters
    state: dict[str, Any] = {
        "model": {name: torch.zeros(names[name].shape) for name in names},
        "optim": {
            "state": {
                name: {"exp_avg": torch.zeros(names[name].shape), "step": torch.zeros(())}
                for name in names
                if names[name].trainable
            }
        },
    }
    load(state, dcp.StorageReader(source))
    for name in names:
        assert same_bits(state["model"][name], weight(tensors, name))
        if names[name].trainable:
            loaded = state["optim"]["state"][name]
            assert same_bits(loaded["exp_avg"], tensors[f"{name}/exp_avg"].float())
            assert float(loaded["step"]) == names[name].step


def test_names_of_wrappers_and_of_users(tensors: dict[str, torch.Tensor]) -> None:
    want = weight(tensors, "fc1.weight")
    for front in ("", "model.", "module.", "app.my.model._orig_mod.", "module.model._orig_mod."):
        state: dict[str, Any] = {
            f"{front}fc1.weight": torch.zeros(29, 19),
            f"{front}head.weight": torch.zeros(41, 19),
        }
        load(state, dcp.StorageReader(EXAMPLE))
        assert same_bits(state[f"{front}fc1.weight"], want)
        assert same_bits(state[f"{front}head.weight"], weight(tensors, "embedding.weight"))
    state = {"model": {"layers.1.weight": torch.zeros(29, 19)}}
    load(state, dcp.StorageReader(EXAMPLE, rename=[(r"^fc(\d)", r"layers.\1")]))
    assert same_bits(state["model"]["layers.1.weight"], want)


def test_weights_are_rounded_as_torch_rounds(tensors: dict[str, torch.Tensor]) -> None:
    """bf16 as the module held them; other types from the masters."""
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        state = {"fc1.weight": torch.zeros(29, 19, dtype=dtype)}
        load(state, dcp.StorageReader(EXAMPLE))
        assert same_bits(state["fc1.weight"], tensors["fc1.weight/master"].to(dtype))
    assert same_bits(tensors["fc1.weight/param"], tensors["fc1.weight/master"].bfloat16())


def test_no_master_is_warned_of(tmp_path: Path) -> None:
    zckpt.convert(EXAMPLE, tmp_path / "weights", weights_only=True)
    with pytest.warns(
        UserWarning, match="holds no fp32 masters: float32 tensors are filled from BF16"
    ):
        load({"fc1.weight": torch.zeros(29, 19)}, dcp.StorageReader(tmp_path / "weights"))


def test_tied_weights_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read, counts = Reader.read, []

    def count(self: Reader, extent: Any, into: memoryview) -> None:
        counts.append(extent.length)
        read(self, extent, into)

    reader = dcp.StorageReader(EXAMPLE)
    reader.prepare_global_plan([])  # masters are compared with weights before the load
    monkeypatch.setattr(Reader, "read", count)
    load({"model": Model().state_dict()}, reader)
    masters, buffer, frozen = 41 * 19 + 2 * 19 * 29 + 29 + 19, 19, 19 * 19 + 19
    assert sum(counts) == 4 * (masters + buffer) + 2 * frozen  # which is bf16 in the file


@pytest.mark.parametrize("block", [64, 1000, 4096])
def test_blocks_are_small(
    tensors: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch, block: int
) -> None:
    """Larger tensors are read in pieces, also into targets that are not contiguous."""
    monkeypatch.setattr(regions, "BLOCK", block)
    state = {"model": Model().state_dict()}
    state["model"]["fc1.weight"] = torch.zeros(19, 29).t()
    state["model"]["fc2.weight"] = torch.zeros(19, 40)[:, 5:34]
    load(state, dcp.StorageReader(EXAMPLE))
    for name, tensor in state["model"].items():
        owner = "embedding.weight" if name == "head.weight" else name
        assert same_bits(tensor, weight(tensors, owner)), name


def test_boxes_are_runs_of_elements() -> None:
    generator = random.Random(5)
    for _ in range(200):
        shape = tuple(generator.randint(1, 5) for _ in range(generator.randint(0, 4)))
        offsets = tuple(generator.randrange(size) for size in shape)
        sizes = tuple(
            generator.randint(1, size - offset) for size, offset in zip(shape, offsets, strict=True)
        )
        numbers = torch.arange(prod(shape)).view(shape)
        ends = zip(offsets, sizes, strict=True)
        inside = numbers[tuple(slice(start, start + size) for start, size in ends)]
        box = regions.BoxRegion(
            Entry("x", "param", "F32", shape, Runs([])), offsets, sizes, torch.empty(sizes)
        )
        assert [n for start, stop in box.runs() for n in range(start, stop)] == (
            inside.flatten().tolist()
        )
        parts = list(box.cut(3))
        assert max(part.numel for part in parts) <= 3
        assert sorted(n for part in parts for run in part.runs() for n in range(*run)) == (
            sorted(inside.flatten().tolist())
        )


def test_a_damaged_record_is_an_error(example: Path) -> None:
    manifest = zckpt.read(example)
    extent = manifest.entries["frozen.weight", "param"].fragments[0].extent
    with open(extent.file, "r+b") as file:
        file.seek(extent.offset + 5)
        file.write(b"\x55\x55")
    with pytest.raises(CheckpointException, match="do not have the CRC-32"):
        load({"model": Model().state_dict()}, dcp.StorageReader(example))


# -- what does not fit


def test_unmatched_names_are_listed_of_both_sides() -> None:
    state = {"model": {"fc1.weight": torch.zeros(29, 19), "tail.weight": torch.zeros(3)}}
    with pytest.raises(CheckpointException) as caught:
        load(state, dcp.StorageReader(EXAMPLE))
    message = str(caught.value)
    assert (
        "Missing key in checkpoint state_dict: the checkpoint has no model.tail.weight" in message
    )
    assert "model.tail.weight; unused keys of the checkpoint: embedding.weight" in message
    assert "rename=" in message
    assert not state["model"]["fc1.weight"].any()  # nothing was changed
    load(state, dcp.StorageReader(EXAMPLE), allow_partial_load=True)
    assert state["model"]["fc1.weight"].any()


def test_a_state_that_is_lacking_is_named() -> None:
    state: dict[str, Any] = {
        "optim": {"state": {"fc1.bias": {"exp_avg": torch.ones(29), "slow": torch.ones(29)}}}
    }
    with pytest.raises(CheckpointException, match=r"has no optim\.state\.fc1\.bias\.slow"):
        load(state, dcp.StorageReader(EXAMPLE))
    load(state, dcp.StorageReader(EXAMPLE), allow_partial_load=True)
    assert torch.equal(state["optim"]["state"]["fc1.bias"]["slow"], torch.ones(29))


def test_weights_alone_fill_no_optimizer(tmp_path: Path) -> None:
    zckpt.convert(EXAMPLE, tmp_path / "weights", weights_only=True, dtype="fp32")
    moments = {"exp_avg": torch.zeros(29), "step": torch.zeros(())}
    state = {"model": {"fc1.bias": torch.zeros(29)}, "optim": {"state": {"fc1.bias": moments}}}
    with pytest.raises(CheckpointException, match=r"has no optim\S+exp_avg, optim\S+step"):
        load(state, dcp.StorageReader(tmp_path / "weights"))
    load({"model": state["model"]}, dcp.StorageReader(tmp_path / "weights"))
    assert state["model"]["fc1.bias"].any()


def test_one_load_fills_one_model() -> None:
    """Otherwise an average of weights beside the model would get the model's values."""
    states = {"fc1.bias": torch.zeros(29)}
    with pytest.raises(CheckpointException, match="only with different prefixes"):
        load({"model": states, "average": dict(states)}, dcp.StorageReader(EXAMPLE))


def test_numbers_need_the_optimizer(tensors: dict[str, torch.Tensor]) -> None:
    model = Model()
    optimizer = example_optimizer(model)
    for each in model.parameters():
        each.grad = torch.zeros_like(each) if each.requires_grad else None
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    with pytest.raises(CheckpointException, match="model=model, optimizer=optimizer"):
        load(state, dcp.StorageReader(EXAMPLE))
    with pytest.raises(WrongOption, match="together"):
        dcp.StorageReader(EXAMPLE, model=model)
    load(state, dcp.StorageReader(EXAMPLE, model=model, optimizer=optimizer))
    optimizer.load_state_dict(state["optimizer"])
    assert same_bits(optimizer.state[model.fc1.weight]["exp_avg"], tensors["fc1.weight/exp_avg"])
    assert optimizer.param_groups[0]["lr"] == 0.003


def group_state(*groups: dict[str, Any]) -> dict[str, Any]:
    return {"optim": {"param_groups": [dict(group) for group in groups]}}


def test_hyper_parameters_go_by_parameter() -> None:
    """Another number of groups, in another order; the target decides which parameters they have."""
    state = group_state(
        {"params": ["fc1.bias"], "weight_decay": 9.0},
        {"params": ["fc2.weight"], "weight_decay": 9.0},
        {"params": ["frozen.weight"], "weight_decay": 9.0},
        {"params": ["fc2.bias", "frozen.bias"], "weight_decay": torch.tensor(9.0)},
    )
    load(state, dcp.StorageReader(EXAMPLE))
    groups = state["optim"]["param_groups"]
    assert [group["weight_decay"] for group in groups] == [0.0, 0.1, 9.0, torch.tensor(0.0)]
    assert groups[3]["params"] == ["fc2.bias", "frozen.bias"]


def test_groups_that_do_not_fit_are_an_error() -> None:
    state = group_state({"params": ["fc1.bias", "fc2.weight"], "weight_decay": 9.0, "lr": 9.0})
    with pytest.raises(CheckpointException, match="their weight_decay differs in the source"):
        load(state, dcp.StorageReader(EXAMPLE))
    del state["optim"]["param_groups"][0]["weight_decay"]
    load(state, dcp.StorageReader(EXAMPLE))
    assert state["optim"]["param_groups"][0]["lr"] == 0.003


def test_a_frozen_parameter_of_an_unknown_group_is_an_error() -> None:
    names = ("frozen.weight", "fc1.weight", "fc1.bias")
    state = {"optim": {f"param_groups.{name}.weight_decay": 9.0 for name in names}}
    with pytest.raises(CheckpointException, match=r"the frozen frozen\.weight may be in"):
        load(state, dcp.StorageReader(EXAMPLE))
    model = Model()
    optimizer = example_optimizer(model, frozen=True)
    load(state, dcp.StorageReader(EXAMPLE, model=model, optimizer=optimizer))
    assert list(state["optim"].values()) == [0.1, 0.1, 0.0]


def test_what_the_source_does_not_hold_stays() -> None:
    state = group_state({"params": ["fc1.bias"], "lr": 9.0, "momentum": 0.7, "initial_lr": 0.2})
    with pytest.warns(UserWarning, match="lacks the hyper-parameters momentum, initial_lr"):
        load(state, dcp.StorageReader(EXAMPLE))
    group = state["optim"]["param_groups"][0]
    assert (group["lr"], group["momentum"], group["initial_lr"]) == (0.003, 0.7, 0.2)


def test_a_step_is_of_the_target_s_type() -> None:
    steps: dict[str, Any] = {"fc1.bias": 0, "fc2.bias": torch.zeros((), dtype=torch.float64)}
    state = {"optim": {"state": {name: {"step": step} for name, step in steps.items()}}}
    load(state, dcp.StorageReader(EXAMPLE))
    loaded = state["optim"]["state"]
    assert loaded["fc1.bias"]["step"] == 7
    assert isinstance(loaded["fc1.bias"]["step"], int)
    assert same_bits(loaded["fc2.bias"]["step"], torch.tensor(7.0, dtype=torch.float64))


def test_no_checkpoint_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(NotACheckpoint):
        dcp.StorageReader(tmp_path)
    assert not dcp.StorageReader.validate_checkpoint_id(tmp_path)
    assert dcp.StorageReader.validate_checkpoint_id(EXAMPLE)


def test_another_path_may_be_given_with_the_load(tmp_path: Path) -> None:
    zckpt.convert(EXAMPLE, tmp_path / "out", rename=(("^fc1", "first"),))
    reader = dcp.StorageReader(EXAMPLE)
    state = {"first.bias": torch.zeros(29)}
    torch_dcp.load(state, checkpoint_id=tmp_path / "out", storage_reader=reader, no_dist=True)
    assert same_bits(state["first.bias"], zckpt.load(EXAMPLE, "fc1.bias/master"))


def test_torch_is_an_extra(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('torch was imported')")
    paths = f"{tmp_path}{os.pathsep}{ROOT}"
    for line in (
        "import zckpt; zckpt.read('examples/run')",
        "import zckpt\nimport zckpt.errors\n"
        "try:\n    zckpt.dcp.StorageReader\n    raise SystemExit(1)\n"
        "except zckpt.errors.MissingExtra as error:\n    assert 'needs torch' in str(error)",
    ):
        environment = {**os.environ, "PYTHONPATH": paths}
        subprocess.run([sys.executable, "-c", line], cwd=ROOT, env=environment, check=True)
