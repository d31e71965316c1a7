"""Files of torch.save: whole and of ranks, read; written, and loaded by plain torch."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, load_model, save_file
from torch import Tensor, nn

import zckpt
from zckpt import errors, formats
from zckpt.core.manifest import Manifest
from zckpt.formats.gathered import read as gathered
from zckpt.formats.gathered import zro

from ...conftest import EXAMPLE, Result
from ...engines import torch_engine, trainers
from ...engines.torch_cases import CASES
from ..contract import FormatContract
from ..equality import load, plain, same_bits

Zckpt = Callable[..., Result]
Trained = Callable[..., Path]


def oracle_of(trained: Path) -> dict[str, Any]:
    oracle: dict[str, Any] = torch.load(trained / "oracle.pt", weights_only=False)
    return oracle


def names_of(oracle: Mapping[str, Any]) -> list[str]:
    """The optimizer's parameters, group by group."""
    return [name for group in oracle["groups"] for name in group["params"]]


def source_of(trained: Path) -> Path:
    single = trained / "run" / "checkpoint.pt"
    return single if single.exists() else trained / "run"


def assert_holds(universal: Path, oracle: Mapping[str, Any]) -> None:
    """Tensors, steps, aliases and groups, bit for bit."""
    held = {name: t for name, t in load(universal).items() if not name.endswith("/state")}
    buffers = {f"{name}/param": tensor for name, tensor in oracle["buffers"].items()}
    expected = {**oracle["tensors"], **buffers}
    assert sorted(held) == sorted(expected)
    assert [name for name in expected if not same_bits(held[name], expected[name])] == []
    manifest = json.loads((universal / "manifest.json").read_text())
    parameters = manifest["parameters"]
    assert {name for name, p in parameters.items() if p["trainable"]} == set(names_of(oracle))
    assert {name: parameters[name]["step"] for name in oracle["steps"]} == oracle["steps"]
    aliases = {alias: name for name, p in parameters.items() for alias in p["aliases"]}
    assert aliases == oracle["aliases"]
    for place, group in enumerate(oracle["groups"]):
        assert [n for n, p in parameters.items() if p["group"] == place] == group["params"]
        told = {key: plain(value) for key, value in group.items() if key != "params"}
        assert manifest["groups"][place] == told


# -- what engines saved

WHOLE = ["zro", "zro_three_groups", "ddp", "ddp_files", "ddp_bf16", "ddp_strided", "ddp_unused"]
FULL = ["fsdp2_full", "fsdp1_full", "fsdp1_flat_full"]
RANKS = ["zro_ranks", "zro_ranks_three_groups", "fsdp2_local", "fsdp2_inner_local"]
SHARDED = ["fsdp1_sharded_pt", "fsdp1_flat_sharded_pt"]
FIRST = {("zro", 2), ("zro_ranks", 2), ("fsdp2_local", 2), ("fsdp1_sharded_pt", 2)}


def engines(*cases: str) -> list[Any]:
    """All cases at all their world sizes, some of them in the default run."""
    return [
        pytest.param(
            case,
            world,
            marks=[pytest.mark.engines, *([pytest.mark.first] if (case, world) in FIRST else [])],
        )
        for case in cases
        for world in CASES[case].worlds
    ]


@pytest.mark.parametrize(
    ("case", "world"),
    engines(*WHOLE, *FULL, *RANKS, *SHARDED, "fsdp2_hsdp_local", "never_stepped_ddp"),
)
def test_reads_what_engines_save(
    case: str, world: int, torch_trained: Trained, tmp_path: Path
) -> None:
    trained = torch_trained(case, world)
    oracle = oracle_of(trained)
    source, target = source_of(trained), tmp_path / "universal"
    names = None if case in (*FULL, *SHARDED) else names_of(oracle)
    if names:  # the model has vectors that only their names tell apart
        with pytest.raises(errors.MissingData) as raised:
            zckpt.read(source)
        assert "--param-names" in raised.value.hint
    report = zckpt.convert(source, target, param_names=names)
    assert_holds(target, oracle)
    assert report["records"]["unchecked"] == 0


@pytest.mark.parametrize(
    ("case", "world"),
    engines("fsdp1_sharded_pt", "fsdp2_local", "zro_ranks", "fsdp1_full", "ddp_strided"),
)
@pytest.mark.parametrize("dialect", [None, "safetensors"])
def test_plain_torch_goes_on(
    case: str, world: int, dialect: str | None, torch_trained: Trained, tmp_path: Path
) -> None:
    trained = torch_trained(case, world)
    oracle = oracle_of(trained)
    names = None if case in (*FULL, *SHARDED) else names_of(oracle)
    target = tmp_path / "target"
    zckpt.convert(source_of(trained), target, to="gathered", param_names=names, dialect=dialect)
    resumed = torch_engine.resume(
        "plain", target, 2, tmp_path / "resumed", case=CASES[case], layout="files"
    )
    different = [n for n, t in oracle["tensors"].items() if not same_bits(resumed["tensors"][n], t)]
    assert different == []
    assert resumed["steps"] == oracle["steps"]
    for ours, theirs in zip(resumed["groups"], oracle["groups"], strict=True):
        assert {k: v for k, v in ours.items() if k != "param_names"} == theirs
    assert resumed["losses"] == pytest.approx(oracle["losses"], abs=1e-4)


@pytest.mark.engines
@pytest.mark.parametrize("trainer", ["hf_trainer", "accelerate", "lightning"])
def test_reads_what_trainers_save(trainer: str, tmp_path: Path) -> None:
    """With FSDP2 and whole state dicts."""
    if not trainers.available(f"{trainer}_fsdp_full"):
        pytest.skip(f"{trainer} is not installed")
    checkpoint = trainers.fsdp(f"{trainer}_fsdp_full", tmp_path / "trained", 2)
    oracle = oracle_of(tmp_path / "trained")
    manifest = zckpt.read(checkpoint)
    beside = {sibling.name for sibling in manifest.siblings}
    assert beside >= {"hf_trainer": {"trainer_state.json"}}.get(trainer, set())
    zckpt.convert(checkpoint, tmp_path / "universal")
    assert_holds(tmp_path / "universal", oracle)


@pytest.mark.engines
@pytest.mark.parametrize(
    ("case", "world", "said"),
    [
        ("fsdp1_local", 2, "flat parameters .*LOCAL_STATE_DICT"),
        ("fsdp1_flat_local", 2, "flat parameters .*LOCAL_STATE_DICT"),
        ("fsdp2_2d_local", 4, "placed as _StridedShard"),
    ],
)
def test_what_is_not_read_is_named(
    case: str, world: int, said: str, torch_trained: Trained
) -> None:
    with pytest.raises(errors.UnsupportedCheckpoint, match=said):
        zckpt.read(torch_trained(case, world) / "run")


@pytest.mark.engines
@pytest.mark.first
class TestRanks(FormatContract):
    """A copy of real FSDP1 ranks' files (ShardedTensor), whole and damaged."""

    format = "gathered"

    @pytest.fixture
    def checkpoint(self, tmp_path: Path, torch_trained: Trained) -> Path:
        trained = torch_trained("fsdp1_sharded_pt", 2)
        return Path(shutil.copytree(trained / "run", tmp_path / "run"))

    def file(self, checkpoint: Path, kind: str, rank: int) -> Path:
        return checkpoint / f"{kind}_world_size_2_rank_{rank}.pt"

    @pytest.mark.parametrize("kind", ["model", "optim"])
    @pytest.mark.parametrize("rank", [0, 1])
    def test_a_missing_rank(self, kind: str, rank: int, checkpoint: Path) -> None:
        self.file(checkpoint, kind, rank).unlink()
        with pytest.raises(
            errors.IncompleteCheckpoint, match=f"the file of rank {rank} is missing"
        ):
            zckpt.read(checkpoint)

    def test_any_file_stands_for_all_of_its_kind(self, checkpoint: Path) -> None:
        manifest = zckpt.read(self.file(checkpoint, "model", 1))
        assert manifest.groups is None
        assert len(manifest.files) == 2

    def test_swapped_ranks(self, checkpoint: Path) -> None:
        a, b = self.file(checkpoint, "model", 0), self.file(checkpoint, "model", 1)
        other = a.rename(checkpoint / "other")
        b.rename(a)
        other.rename(b)
        with pytest.raises(errors.InconsistentCheckpoint, match="was written by rank 1 of 2"):
            zckpt.read(checkpoint)

    def test_files_of_two_world_sizes(self, checkpoint: Path) -> None:
        shutil.copy(self.file(checkpoint, "model", 0), checkpoint / "model_world_size_4_rank_0.pt")
        with pytest.raises(errors.AmbiguousCheckpoint, match="saves by 2, 4 ranks"):
            zckpt.read(checkpoint)

    def test_two_saves(self, checkpoint: Path, torch_trained: Trained, tmp_path: Path) -> None:
        later = replace(CASES["fsdp1_sharded_pt"], steps=4)
        torch_engine.train(later, 2, tmp_path / "later", losses=0)
        shutil.copy(tmp_path / "later" / "run" / self.file(checkpoint, "optim", 1).name, checkpoint)
        with pytest.raises(errors.InconsistentCheckpoint, match=r"step differs: 3 .*, 4 "):
            zckpt.read(checkpoint)

    @pytest.mark.parametrize("keep", [0, 100, -100])
    def test_a_short_file(self, keep: int, checkpoint: Path) -> None:
        path = self.file(checkpoint, "model", 1)
        path.write_bytes(path.read_bytes()[:keep])
        with pytest.raises(errors.CorruptCheckpoint, match=path.name):
            zckpt.read(checkpoint)

    def test_a_flipped_bit(self, checkpoint: Path, tmp_path: Path) -> None:
        manifest = zckpt.read(checkpoint)
        extent = manifest.entries["trunk.0.weight/exp_avg"].fragments[1].extent
        data = bytearray(Path(extent.file).read_bytes())
        data[extent.offset] ^= 1
        Path(extent.file).write_bytes(data)
        with pytest.raises(errors.CorruptCheckpoint, match="rank_1"):
            zckpt.convert(checkpoint, tmp_path / "target")
        assert not (tmp_path / "target").exists()

    def test_random_states_are_left_out(self, manifest: Manifest) -> None:
        assert manifest.source["dp"] == 2
        assert all("rank 0's is taken" in line for line in manifest.left_out)


# -- plain torch


class Net(nn.Module):
    """Two layers with a normalisation, whose statistics have the shape of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(7, 5)
        self.norm = nn.BatchNorm1d(5)
        self.second = nn.Linear(5, 3)
        self.third = nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.third(self.second(self.norm(self.first(x))))
        return made


Pair = tuple[nn.Module, torch.optim.Optimizer]


def build(seed: int = 0, kind: Any = torch.optim.AdamW, named: bool = False) -> Pair:
    """With names in the optimizer's groups if it is `named`, as torch >= 2.6 takes them."""
    torch.manual_seed(seed)
    model = Net()
    each = [(pair if named else pair[1], pair[1].ndim) for pair in model.named_parameters()]
    groups: list[dict[str, Any]] = [
        {"params": [p for p, ndim in each if ndim > 1], "weight_decay": 0.1},
        {"params": [p for p, ndim in each if ndim < 2], "lr": 0.02},
    ]
    return model, kind(groups, lr=0.01)


def names_by_group(pair: Pair) -> list[str]:
    named = list(pair[0].named_parameters())
    return [name for name, p in named if p.ndim > 1] + [name for name, p in named if p.ndim < 2]


def train(pair: Pair, steps: int, seed: int = 1) -> list[float]:
    losses = []
    for step in range(steps):
        torch.manual_seed(100 * seed + step)
        loss = pair[0](torch.randn(8, 7)).square().mean()
        pair[1].zero_grad()
        loss.backward()
        pair[1].step()
        losses.append(loss.item())
    return losses


def trained_pair(kind: Any = torch.optim.AdamW, named: bool = False) -> Pair:
    pair = build(kind=kind, named=named)
    train(pair, 3)
    return pair


def resumed_pair(folder: Path, kind: Any = torch.optim.AdamW) -> Pair:
    """A fresh program, which loads with torch's defaults."""
    pair = build(seed=7, kind=kind)
    pair[0].load_state_dict(torch.load(folder / "model.pt"))
    pair[1].load_state_dict(torch.load(folder / "optim.pt"))
    return pair


def assert_same_run(a: Pair, b: Pair) -> None:
    for (name, one), other in zip(
        a[0].state_dict().items(), b[0].state_dict().values(), strict=True
    ):
        assert same_bits(one, other), name
    ours, theirs = a[1].state_dict(), b[1].state_dict()
    assert ours["state"].keys() == theirs["state"].keys()
    for number, state in ours["state"].items():
        assert list(state) == list(theirs["state"][number])
        for key, held in state.items():
            other = theirs["state"][number][key]
            assert same_bits(held, other) if isinstance(held, Tensor) else held == other
    for one, other in zip(ours["param_groups"], theirs["param_groups"], strict=True):
        assert {k: v for k, v in one.items() if k != "param_names"} == {
            k: v for k, v in other.items() if k != "param_names"
        }
    assert train(a, 3, seed=9) == train(b, 3, seed=9)


def save(folder: Path, pair: Pair, model: str = "model.pt", optim: str = "optim.pt") -> Path:
    folder.mkdir(exist_ok=True)
    if model.endswith(".safetensors"):
        save_file(pair[0].state_dict(), folder / model)
    else:
        torch.save(pair[0].state_dict(), folder / model)
    torch.save(pair[1].state_dict(), folder / optim)
    return folder


class TestFiles(FormatContract):
    """model.pt + optim.pt of plain torch."""

    format = "gathered"

    @pytest.fixture
    def checkpoint(self, tmp_path: Path) -> Path:
        return save(tmp_path / "run", trained_pair(named=True))


class TestOneFile(FormatContract):
    """Everything in one file of any name."""

    format = "gathered"

    @pytest.fixture
    def checkpoint(self, tmp_path: Path) -> Path:
        model, optimizer = trained_pair(named=True)
        states = {"epoch": 3, "net": model.state_dict(), "opt": optimizer.state_dict()}
        torch.save({**states, "best": [torch.tensor(0.5)]}, tmp_path / "run.best")
        return tmp_path / "run.best"

    def test_what_else_it_holds_is_kept(self, manifest: Manifest) -> None:
        assert manifest.state["client_state"]["epoch"] == 3
        assert manifest.state["client_state"]["best"][0].value == 0.5


class TestLightning(FormatContract):
    """A .ckpt of Lightning that is one file."""

    format = "gathered"

    @pytest.fixture
    def checkpoint(self, tmp_path: Path) -> Path:
        model, optimizer = trained_pair(named=True)
        states = {
            "epoch": 1,
            "global_step": 3,
            "pytorch-lightning_version": "2.6.0",
            "state_dict": model.state_dict(),
            "loops": {"fit_loop": {"state_dict": {}}},
            "callbacks": {},
            "optimizer_states": [optimizer.state_dict()],
            "lr_schedulers": [{"last_epoch": 3}],
        }
        torch.save(states, tmp_path / "last.ckpt")
        return tmp_path / "last.ckpt"


@pytest.mark.parametrize(
    "kind",
    [
        torch.optim.AdamW,
        torch.optim.NAdam,
        torch.optim.RMSprop,
        torch.optim.Adagrad,
        torch.optim.SGD,
        lambda groups, lr: torch.optim.SGD(groups, lr, momentum=0.9),
        lambda groups, lr: torch.optim.Adam(groups, lr, amsgrad=True),
    ],
)
@pytest.mark.parametrize("through", [None, "universal", "dcp"])
def test_plain_torch_resumes(kind: Any, through: str | None, tmp_path: Path) -> None:
    pair = trained_pair(kind)
    names = names_by_group(pair)
    source = save(tmp_path / "run", pair)
    if through:
        zckpt.convert(source, tmp_path / "between", to=through, param_names=names)
        source = tmp_path / "between"
    zckpt.convert(source, tmp_path / "target", to="gathered", param_names=names)
    assert_same_run(resumed_pair(tmp_path / "target", kind), pair)


def test_a_never_stepped_optimizer(tmp_path: Path) -> None:
    pair = build()
    source = save(tmp_path / "run", pair)
    with pytest.raises(errors.MissingData, match=r"very many|ways"):
        zckpt.read(source)
    names = names_by_group(pair)
    zckpt.convert(source, tmp_path / "target", to="gathered", param_names=names)
    assert_same_run(resumed_pair(tmp_path / "target"), pair)


@pytest.mark.parametrize(
    ("model", "optim"),
    [
        ("model.pt", "optim.pt"),
        ("pytorch_model_fsdp.bin", "optimizer.bin"),
        ("model.safetensors", "optimizer.pt"),
        ("pytorch_model.bin", "optimizer.pt"),
    ],
)
def test_usual_names(model: str, optim: str, tmp_path: Path) -> None:
    pair = trained_pair()
    folder = save(tmp_path / "run", pair, model, optim)
    torch.save({"last_epoch": 3}, folder / "scheduler.pt")
    (folder / "trainer_state.json").write_text("{}")
    torch.save({"cpu": torch.get_rng_state()}, folder / "rng_state_0.pth")
    names = names_by_group(pair)
    manifest = zckpt.read(folder, param_names=names)
    assert (manifest.format, manifest.step, len(manifest.parameters)) == ("gathered", 3, 8)
    statistics = ["norm.num_batches_tracked", "norm.running_mean", "norm.running_var"]
    assert sorted(manifest.buffers) == statistics
    carried = sorted(sibling.name for sibling in manifest.siblings)
    assert carried == ["rng_state_0.pth", "scheduler.pt", "trainer_state.json"]
    zckpt.convert(folder, tmp_path / "target", to="gathered", param_names=names)
    assert (tmp_path / "target" / "trainer_state.json").read_text() == "{}"


def test_verls_folder(tmp_path: Path, zckpt: Zckpt) -> None:
    """Files of ranks, whose names are verl's, and a folder `huggingface` beside them."""
    folder, pair = tmp_path / "actor", trained_pair()
    folder.mkdir()
    for rank in range(2):
        rest = f"world_size_2_rank_{rank}.pt"
        torch.save(pair[0].state_dict(), folder / f"model_{rest}")
        torch.save(pair[1].state_dict(), folder / f"optim_{rest}")
        torch.save({"lr_scheduler": {"last_epoch": 3}, "rng": rank}, folder / f"extra_state_{rest}")
    (folder / "huggingface").mkdir()
    (folder / "huggingface" / "config.json").write_text("{}")
    (folder / "rollouts").mkdir()
    (folder / "rollouts" / "big.bin").touch()
    refused = zckpt("reshard", folder, tmp_path / "out", "--dp", "4")
    assert refused.code == 2
    assert "--dp does not apply to --to gathered" in refused.err
    assert "any number of ranks" in refused.err
    done = zckpt("reshard", folder, tmp_path / "out")
    assert done.code == 0
    assert "written: whole state dicts" in done.out
    assert "model.pt and optim.pt" in done.out
    assert "left out: rollouts/: a folder" in done.out
    assert (tmp_path / "out" / "huggingface" / "config.json").read_text() == "{}"
    assert_same_run(resumed_pair(tmp_path / "out"), pair)


def test_weights_in_several_files(tmp_path: Path) -> None:
    pair = trained_pair()
    folder = save(tmp_path / "run", pair)
    (folder / "model.pt").unlink()
    state = list(pair[0].state_dict().items())
    parts = {"model-1.safetensors": dict(state[:4]), "model-2.safetensors": dict(state[4:])}
    for name, held in parts.items():
        save_file(held, folder / name)
    index = {"weight_map": {key: name for name, held in parts.items() for key in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(errors.MissingData, match="does not show the order of the module"):
        zckpt.read(folder)
    names = names_by_group(pair)
    zckpt.convert(folder, tmp_path / "target", to="gathered", param_names=names)
    torch.save(load_file(tmp_path / "target" / "model.safetensors"), tmp_path / "target/model.pt")
    assert_same_run(resumed_pair(tmp_path / "target"), pair)
    (folder / "model-2.safetensors").unlink()
    with pytest.raises(errors.IncompleteCheckpoint, match=r"model-2\.safetensors is missing"):
        zckpt.read(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt", "pytorch_model.bin"])
def test_weights_alone(name: str, tmp_path: Path) -> None:
    pair = trained_pair()
    (save(tmp_path / "run", pair, model=name) / "optim.pt").unlink()
    for path in (tmp_path / "run", tmp_path / "run" / name):
        manifest = zckpt.read(path)
        assert manifest.format == "gathered"
        assert manifest.groups is None
        assert [e.name for e in manifest.entries.values()] == [
            f"{name}/param" for name in (*manifest.parameters, *manifest.buffers)
        ]


@pytest.mark.parametrize(
    "name",
    [
        "zero_pp_rank_0_mp_rank_00_optim_states.pt",
        "mp_rank_00_model_states.pt",
        "checkpoint.ort.pt",
        "training_args.bin",
        "rng_state_0.pth",
        "__0_0.distcp",
    ],
)
def test_files_of_others_are_left_to_them(name: str, tmp_path: Path) -> None:
    torch.save(trained_pair()[0].state_dict(), tmp_path / name)
    assert gathered.detect(str(tmp_path)) == gathered.detect(str(tmp_path / name)) == []


def test_a_folder_of_files(tmp_path: Path) -> None:
    model, optimizer = trained_pair(named=True)
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(states, tmp_path / "a.pt")
    (tmp_path / "log.txt").write_text("")
    assert zckpt.read(tmp_path).step == 3
    torch.save(states, tmp_path / "b.pt")
    assert zckpt.read(tmp_path, tag="b.pt").step == 3
    with pytest.raises(
        errors.AmbiguousCheckpoint, match=r"2 checkpoints .*: a\.pt, b\.pt"
    ) as raised:
        zckpt.read(tmp_path)
    assert raised.value.hint == "choose with --tag b.pt"


@pytest.mark.parametrize(
    ("name", "holds"),
    [
        ("model_rank_0.pt", "model"),
        ("pytorch_model_fsdp_0_rank0.bin", "model"),
        ("ckpt.rank_0.pth", "both"),
        ("rank0.pt", "both"),
        ("noise_rank_0.pt", "neither"),
    ],
)
def test_names_of_ranks_files(name: str, holds: str, tmp_path: Path) -> None:
    model, optimizer = trained_pair(named=True)
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    value = {"both": states, "model": states["model"], "neither": {"rng": torch.get_rng_state()}}
    torch.save(value[holds], tmp_path / name)
    assert gathered.detect(str(tmp_path)) == ([] if holds == "neither" else [""])
    if holds != "neither":
        for path in (tmp_path, tmp_path / name):
            assert len(zckpt.read(path).parameters) == 8
            assert (zckpt.read(path).groups is not None) == (holds == "both")


def test_accelerates_ranks(tmp_path: Path) -> None:
    pair = trained_pair(named=True)
    for rank in range(2):
        torch.save(pair[0].state_dict(), tmp_path / f"pytorch_model_fsdp_0_rank{rank}.bin")
        torch.save(pair[1].state_dict(), tmp_path / f"optimizer_0_rank{rank}.bin")
    torch.save({"last_epoch": 1}, tmp_path / "scheduler.bin")
    manifest = zckpt.read(tmp_path)
    assert (manifest.step, len(manifest.files), manifest.left_out) == (3, 4, ())
    assert [sibling.name for sibling in manifest.siblings] == ["scheduler.bin"]


def test_no_format_takes_the_files_of_another(tmp_path: Path) -> None:
    folder = save(tmp_path / "run", trained_pair())
    for path in (folder, folder / "model.pt", EXAMPLE):
        known = [item.name for item in formats.TABLE if item.load().detect(str(path))]
        assert known == ["deepspeed" if path == EXAMPLE else "gathered"]


# -- names


def test_names_from_a_file(tmp_path: Path, zckpt: Zckpt) -> None:
    """Two layers of one shape, of which the optimizer has one."""
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    optimizer = torch.optim.AdamW([model[1].weight])
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    save(tmp_path / "run", (model, optimizer))
    refused = zckpt("inspect", tmp_path / "run")
    assert refused.code == 1
    assert "several weights have the same shape" in refused.err
    (tmp_path / "names").write_text("1.weight\n")
    words = ("convert", tmp_path / "run", tmp_path / "u", "--param-names", tmp_path / "names")
    assert zckpt(*words).code == 0
    assert "1.weight/exp_avg" in load(tmp_path / "u")


# -- ZeroRedundancyOptimizer


def save_local(folder: Path, pair: Pair, world: int) -> Path:
    """What ranks' own optimizers hold, by torch's partition."""
    save(folder, pair)
    (folder / "optim.pt").unlink()
    whole = pair[1].state_dict()
    groups = whole["param_groups"]
    numels = [[p.numel() for p in group["params"]] for group in pair[1].param_groups]
    for rank, parts in enumerate(zro.partition(numels, world)):
        state: dict[int, Any] = {}
        made = []
        count = 0
        for group, part in zip(groups, parts, strict=True):
            numbers = list(range(count, count + len(part)))
            count += len(part)
            for number, place in zip(numbers, part, strict=True):
                if group["params"][place] in whole["state"]:
                    state[number] = whole["state"][group["params"][place]]
            made.append({**group, "params": numbers})
        torch.save({"state": state, "param_groups": made}, folder / f"optim_rank_{rank}.pt")
    return folder


class TestLocalStates:
    @pytest.mark.parametrize("world", [1, 2, 3, 5])
    def test_are_put_together(self, world: int, tmp_path: Path) -> None:
        pair = trained_pair()
        folder = save_local(tmp_path / "run", pair, world)
        assert zckpt.read(folder).dp == world
        zckpt.convert(folder, tmp_path / "target", to="gathered")
        assert_same_run(resumed_pair(tmp_path / "target"), pair)

    def test_names_tell_sizes_where_no_state_does(self, tmp_path: Path) -> None:
        pair = build()
        folder = save_local(tmp_path / "run", pair, 2)
        with pytest.raises(errors.MissingData, match="deals parameters to ranks by size"):
            zckpt.read(folder)
        names = names_by_group(pair)
        manifest = zckpt.read(folder, param_names=names)
        assert list(manifest.parameters) == names
        with pytest.raises(errors.InconsistentCheckpoint, match="of group 0, where"):
            zckpt.read(folder, param_names=[*names[3:], *names[:3]])

    def test_a_missing_rank(self, tmp_path: Path) -> None:
        folder = save_local(tmp_path / "run", trained_pair(), 3)
        (folder / "optim_rank_1.pt").unlink()
        with pytest.raises(errors.IncompleteCheckpoint, match="rank 1 is missing"):
            zckpt.read(folder)

    @pytest.mark.parametrize("world", [2, 3, 4])
    def test_the_last_rank_is_missing(self, world: int, tmp_path: Path) -> None:
        """Which no file's name tells: what it owned could be frozen."""
        pair = trained_pair()
        folder = save_local(tmp_path / "run", pair, world)
        (folder / f"optim_rank_{world - 1}.pt").unlink()
        for names in (None, names_by_group(pair)):
            with pytest.raises(errors.ZckptError):
                zckpt.read(folder, param_names=names)

    def test_frozen_weights_are_the_users_word(self, tmp_path: Path) -> None:
        pair = trained_pair()
        folder = save_local(tmp_path / "run", pair, 2)
        state = torch.load(folder / "model.pt")
        torch.save({**state, "frozen": torch.ones(9, 9)}, folder / "model.pt")
        with pytest.raises(errors.IncompleteCheckpoint, match="no rank holds a state of frozen"):
            zckpt.read(folder)
        manifest = zckpt.read(folder, param_names=names_by_group(pair))
        assert not manifest.parameters["frozen"].trainable

    def test_two_saves(self, tmp_path: Path) -> None:
        pair = trained_pair()
        folder = save_local(tmp_path / "run", pair, 2)
        train(pair, 1)
        later = save_local(tmp_path / "later", pair, 2)
        shutil.copy(later / "optim_rank_1.pt", folder)
        with pytest.raises(errors.InconsistentCheckpoint, match=r"step differs: 3 .*, 4 "):
            zckpt.read(folder)

    def test_other_hyper_parameters(self, tmp_path: Path) -> None:
        pair = trained_pair()
        folder = save_local(tmp_path / "run", pair, 2)
        pair[1].param_groups[0]["lr"] = 0.5
        later = save_local(tmp_path / "later", pair, 2)
        shutil.copy(later / "optim_rank_1.pt", folder)
        with pytest.raises(errors.InconsistentCheckpoint, match="different hyper-parameters"):
            zckpt.read(folder)

    def test_copies_of_one_state_are_one(self, tmp_path: Path) -> None:
        pair = trained_pair()
        folder = save(tmp_path / "run", pair)
        for rank in range(2):
            shutil.copy(folder / "optim.pt", folder / f"optim_rank_{rank}.pt")
        (folder / "optim.pt").unlink()
        zckpt.convert(folder, tmp_path / "target", to="gathered")
        assert_same_run(resumed_pair(tmp_path / "target"), pair)


# -- writing


class Tied(nn.Module):
    """The names of examples/run."""

    def __init__(self) -> None:
        super().__init__()
        for name, held in torch_state(EXAMPLE).items():
            module, _, last = name.rpartition(".")
            if module and not hasattr(self, module):
                self.add_module(module, nn.Module())
            owner = self.get_submodule(module) if module else self
            value = torch.zeros(held.shape)
            if name == "running_mean":
                owner.register_buffer(last, value)
            else:
                owner.register_parameter(last, nn.Parameter(value))
        self.head.weight = self.embedding.weight


def torch_state(run: Path) -> dict[str, Tensor]:
    path = next(run.glob("*/mp_rank_00_model_states.pt"))
    held: dict[str, Tensor] = torch.load(path, weights_only=False)["module"]
    return held


class TestWritten:
    """From DeepSpeed's bf16 run: masters, a tied weight, frozen ones, a buffer."""

    def test_weights_are_the_masters(self, tmp_path: Path) -> None:
        zckpt.convert(EXAMPLE, tmp_path / "u")
        report = zckpt.convert(EXAMPLE, tmp_path / "t", to="gathered")
        assert report["files"] == ["model.pt", "optim.pt", "extra.pt"]
        state = torch.load(tmp_path / "t" / "model.pt")
        assert type(state) is OrderedDict
        assert state["head.weight"].data_ptr() == state["embedding.weight"].data_ptr()
        masters = load_file(tmp_path / "u" / "master.safetensors")
        assert all(same_bits(state[name], held) for name, held in masters.items())
        model = Tied()
        model.load_state_dict(state)
        assert same_bits(model.head.weight, masters["embedding.weight"])
        optim = torch.load(tmp_path / "t" / "optim.pt")
        assert [len(group["params"]) for group in optim["param_groups"]] == [3, 2]
        moments = load_file(tmp_path / "u" / "exp_avg.safetensors")
        names = [name for group in optim["param_groups"] for name in group["param_names"]]
        for number, name in enumerate(names):
            assert same_bits(optim["state"][number]["exp_avg"], moments[name])
            assert same_bits(optim["state"][number]["step"], torch.tensor(7.0))
        groups = [
            {"params": [model.get_parameter(name) for name in g["param_names"]]}
            for g in optim["param_groups"]
        ]
        torch.optim.AdamW(groups).load_state_dict(optim)

    def test_what_is_written_is_read_again(self, tmp_path: Path) -> None:
        zckpt.convert(EXAMPLE, tmp_path / "t", to="gathered")
        assert zckpt.verify(tmp_path / "t", EXAMPLE)["equal"]
        assert zckpt.diff(tmp_path / "t", EXAMPLE)["equal"]
        before, after = zckpt.read(EXAMPLE), zckpt.read(tmp_path / "t")
        assert after.parameters == before.parameters
        assert after.buffers == before.buffers
        assert after.state["lr_scheduler"] == before.state["lr_scheduler"]
        assert after.warnings == ()

    @pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
    def test_another_type(self, dtype: str, tmp_path: Path) -> None:
        zckpt.convert(EXAMPLE, tmp_path / "t", to="gathered", dtype=dtype)
        state = torch.load(tmp_path / "t" / "model.pt")
        types = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
        assert state["embedding.weight"].dtype == types[dtype]

    def test_weights_only(self, tmp_path: Path) -> None:
        zckpt.convert(EXAMPLE, tmp_path / "t", to="gathered", weights_only=True)
        assert sorted(path.name for path in (tmp_path / "t").iterdir()) == ["model.pt"]

    def test_safetensors(self, tmp_path: Path) -> None:
        report = zckpt.convert(EXAMPLE, tmp_path / "t", to="gathered", dialect="safetensors")
        assert report["files"] == ["model.safetensors", "optim.pt", "extra.pt"]
        assert any("head.weight" in line for line in report["warnings"])
        model = Tied()
        load_model(model, tmp_path / "t" / "model.safetensors")
        assert same_bits(
            model.head.weight, load_file(tmp_path / "t" / "model.safetensors")["embedding.weight"]
        )
        assert zckpt.read(tmp_path / "t").parameters == zckpt.read(EXAMPLE).parameters
        assert zckpt.verify(tmp_path / "t", EXAMPLE)["equal"]

    def test_checksums_are_right(self, tmp_path: Path) -> None:
        zckpt.convert(EXAMPLE, tmp_path / "t", to="gathered")
        for path in (tmp_path / "t").iterdir():
            subprocess.run([sys.executable, "-m", "zipfile", "-t", path], check=True)

    @pytest.mark.parametrize("options", [{"stage": 1}, {"dialect": "hdf5"}, {"optimizer": "torch"}])
    def test_options_of_others(self, options: dict[str, Any], tmp_path: Path) -> None:
        with pytest.raises(errors.WrongOption, match="does not apply to --to gathered"):
            zckpt.convert(EXAMPLE, tmp_path / "t", to="gathered", **options)

    def test_the_dialect_is_not_onnx_runtimes(self, tmp_path: Path) -> None:
        with pytest.raises(errors.WrongOption, match="does not apply to --to onnxruntime"):
            zckpt.convert(EXAMPLE, tmp_path / "t", to="onnxruntime", dialect="safetensors")

    def test_back_to_deepspeed(self, tmp_path: Path) -> None:
        zckpt.convert(EXAMPLE, tmp_path / "t", to="gathered")
        zckpt.convert(tmp_path / "t", tmp_path / "d", to="deepspeed", stage=2, dp=3, dtype="bf16")
        assert zckpt.verify(tmp_path / "d", EXAMPLE)["equal"]

    def test_weights_of_16_bits_without_masters_stay(self, tmp_path: Path) -> None:
        model, optimizer = build(named=True)
        pair = model.bfloat16(), optimizer
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        zckpt.convert(save(tmp_path / "run", pair), tmp_path / "t", to="gathered")
        state = torch.load(tmp_path / "t" / "model.pt")
        assert all(same_bits(state[name], held) for name, held in model.state_dict().items())
        assert state["first.weight"].dtype == torch.bfloat16
        optim = torch.load(tmp_path / "t" / "optim.pt")
        assert optim["state"][0]["exp_avg"].dtype == torch.bfloat16

    def test_files_of_the_program_are_carried(self, tmp_path: Path) -> None:
        """Though they may be called as ours: those are told, not lost."""
        folder = save(tmp_path / "run", trained_pair(named=True))
        torch.save([1, 2], folder / "extra.pt")
        (folder / "notes.txt").write_text("mine")
        assert [s.name for s in zckpt.read(folder).siblings] == ["extra.pt", "notes.txt"]
        report = zckpt.convert(folder, tmp_path / "t", to="gathered")
        assert (tmp_path / "t" / "notes.txt").read_text() == "mine"
        assert report["left_out"] == ["extra.pt: a file of the target has this name"]

    def test_files_that_were_saved_again(self, tmp_path: Path) -> None:
        """What extra.pt tells is of other files then."""
        zckpt.convert(EXAMPLE, tmp_path / "t", to="gathered")
        save(tmp_path / "t", trained_pair(named=True))
        manifest = zckpt.read(tmp_path / "t")
        assert len(manifest.parameters) == 8
        assert all(not held.aliases for held in manifest.parameters.values())

    def test_the_programs_own_state(self, tmp_path: Path) -> None:
        model, optimizer = trained_pair()
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        own = {"epoch": 3, "rng": torch.get_rng_state(), "history": [torch.ones(2), 1.5]}
        torch.save({**states, **own}, tmp_path / "run.pt")
        zckpt.convert(tmp_path / "run.pt", tmp_path / "t", to="gathered")
        extra = torch.load(tmp_path / "t" / "extra.pt")
        assert extra["epoch"] == 3
        assert same_bits(extra["rng"], own["rng"])
        assert same_bits(extra["history"][0], torch.ones(2))
        names = [name for name, _ in model.named_parameters()]
        pair = tmp_path / "t", tmp_path / "run.pt"
        assert zckpt.verify(*pair, param_names=names)["equal"]


class TestNamesOfNumbers:
    """Files whose optimizer does not say which weight is whose."""

    def saved(self, folder: Path, model: nn.Module, optim: dict[str, Any]) -> Path:
        folder.mkdir()
        torch.save(model.state_dict(), folder / "model.pt")
        torch.save(optim, folder / "optim.pt")
        return folder

    def stepped(self, model: nn.Module) -> dict[str, Any]:
        trained = [held for held in model.parameters() if held.requires_grad]
        optimizer = torch.optim.AdamW(trained)
        for held in trained:
            held.grad = torch.randn_like(held)
        optimizer.step()
        return optimizer.state_dict()

    @pytest.mark.parametrize("first", ["student", "teacher"])
    @pytest.mark.parametrize("updates", [0, 1])
    def test_a_frozen_copy(self, first: str, updates: int, tmp_path: Path) -> None:
        """Which is trained, nothing tells: the first is not taken for it."""
        names = ["student", "teacher"] if first == "student" else ["teacher", "student"]
        model = nn.ModuleDict({name: nn.Linear(6, 6) for name in names})
        model["teacher"].load_state_dict(model["student"].state_dict())
        model["teacher"].requires_grad_(False)
        optimizer = torch.optim.AdamW(model["student"].parameters(), lr=0.0)
        for held in model["student"].parameters():
            held.grad = torch.randn_like(held) if updates else None
        optimizer.step()
        folder = self.saved(tmp_path / "run", model, optimizer.state_dict())
        with pytest.raises(errors.MissingData, match="ways"):
            zckpt.read(folder)
        manifest = zckpt.read(folder, param_names=["student.weight", "student.bias"])
        assert {name for name, held in manifest.parameters.items() if held.trainable} == {
            "student.weight",
            "student.bias",
        }
        if not updates:
            assert not any(held.aliases for held in manifest.parameters.values())

    def test_layers_that_begin_alike(self, tmp_path: Path) -> None:
        """nn.TransformerEncoder copies its layer."""
        layer = nn.Linear(4, 4)
        model = nn.Sequential(layer, nn.Linear(4, 4))
        model[1].load_state_dict(layer.state_dict())
        optimizer = torch.optim.AdamW(model.parameters())
        manifest = zckpt.read(self.saved(tmp_path / "run", model, optimizer.state_dict()))
        assert list(manifest.parameters) == ["0.weight", "0.bias", "1.weight", "1.bias"]
        assert all(held.trainable for held in manifest.parameters.values())

    @pytest.mark.parametrize(
        "names",
        [
            ["1.weight", "1.bias", "0.weight", "0.bias"],  # of another order
            ["0.weight", "0.bias", "0.weight", "0.bias"],
        ],
    )
    def test_names_that_do_not_fit(self, names: list[str], tmp_path: Path) -> None:
        model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 7))
        optim = self.stepped(model)
        optim["param_groups"][0]["param_names"] = names
        with pytest.raises(errors.InconsistentCheckpoint, match="weight"):
            zckpt.read(self.saved(tmp_path / "run", model, optim))

    def test_names_with_a_wrappers_prefix(self, tmp_path: Path) -> None:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
        model[1].requires_grad_(False)
        optim = self.stepped(model)
        trained = ["0.weight", "0.bias", "2.weight", "2.bias"]
        optim["param_groups"][0]["param_names"] = [f"module.{name}" for name in trained]
        manifest = zckpt.read(self.saved(tmp_path / "run", model, optim))
        assert [n for n, held in manifest.parameters.items() if held.trainable] == trained

    def test_a_parameter_in_two_groups(self, tmp_path: Path) -> None:
        model = nn.Linear(3, 5)
        optim = self.stepped(model)
        optim["param_groups"] *= 2
        with pytest.raises(errors.InconsistentCheckpoint, match="more than once"):
            zckpt.read(self.saved(tmp_path / "run", model, optim))

    def test_a_state_of_no_group(self, tmp_path: Path) -> None:
        model = nn.Linear(3, 5)
        optim = self.stepped(model)
        optim["state"][7] = {"exp_avg": torch.ones(3)}
        manifest = zckpt.read(self.saved(tmp_path / "run", model, optim))
        assert any("7" in line for line in manifest.left_out)
