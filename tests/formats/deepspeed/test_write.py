"""The files that are written: bytes, arithmetic, what torch and zip make of them, refusals."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from safetensors.numpy import save_file

import zckpt
from zckpt.files.torchfile import TorchFile

from ...conftest import EXAMPLE, ROOT, Result, texts
from ...engines import deepspeed
from ...engines.cases import CASES, Case
from ...manifests import changed
from ..equality import load, same_bits

Zckpt = Callable[..., Result]
Trained = Callable[[Case], Path]
TRAINER = ROOT / "examples" / "trainer" / "checkpoint-4"


def reshard(source: Path, target: Path, **options: Any) -> Path:
    zckpt.reshard(source, target, **options)
    return target


def tensors(path: Path, **how: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a file of torch.save, by its place in what was saved."""
    import deepspeed  # noqa: F401  (its classes are in the pickle)

    def walk(value: Any, place: str) -> Iterator[tuple[str, torch.Tensor]]:
        if isinstance(value, torch.Tensor):
            yield place, value
        elif isinstance(value, dict):
            for key, item in value.items():
                yield from walk(item, f"{place}.{key}")
        elif isinstance(value, (list, tuple)):
            for number, item in enumerate(value):
                yield from walk(item, f"{place}.{number}")

    yield from walk(torch.load(path, weights_only=False, **how), "")


def same_files(a: Path, b: Path) -> None:
    """Both directories hold the same files with bit-identical tensors in the same places.

    Stage 3 leaves what was in memory in the padding, and what became of it; `b` has zeros.
    """
    names = {p.relative_to(a) for p in a.rglob("*.pt")}
    assert names == {p.relative_to(b) for p in b.rglob("*.pt")}
    for name in names:
        one, other = dict(tensors(a / name)), dict(tensors(b / name))
        assert list(one) == list(other), name
        for place, tensor in one.items():
            ours = other[place]
            if place.startswith(PADDED):
                tensor = torch.where(ours == 0, ours, tensor)
            assert same_bits(tensor, ours), (name, place)


PADDED = (
    ".optimizer_state_dict.fp32_flat_groups.",
    ".optimizer_state_dict.optimizer_state_dict.",
    ".frozen_param_fragments.",
)
ROUND_TRIPS = (
    "z1_dp2_bf16", "z2_dp3_bf16", "z3_dp3_bf16", "z1_dp3_bf16_optimizer", "z2_dp3_round_robin",
    "z3_dp3_sub_groups", "z2_dp3_aligned", "z2_dp2_muon", "z2_dp3_sgd", "z3_dp3_nadam",
    "z2_dp2_fp16_dynamic", "z2_dp8_only_padding", "z1_dp2_narrow_states", "z3_dp2_client_state",
)  # fmt: skip


@pytest.mark.engines
@pytest.mark.first
@pytest.mark.parametrize("name", ROUND_TRIPS)
class TestRoundTrips:
    def test_to_the_same_dp(self, name: str, trained: Trained, tmp_path: Path) -> None:
        run = trained(CASES[name]) / "run"
        same_files(run, reshard(run, tmp_path / "again"))

    def test_through_universal(self, name: str, trained: Trained, tmp_path: Path) -> None:
        run = trained(CASES[name]) / "run"
        zckpt.convert(run, tmp_path / "universal")
        same_files(run, reshard(tmp_path / "universal", tmp_path / "again"))

    def test_there_and_back(self, name: str, trained: Trained, tmp_path: Path) -> None:
        run = trained(CASES[name]) / "run"
        there = reshard(run, tmp_path / "there", dp=7)
        same_files(run, reshard(there, tmp_path / "back", dp=CASES[name].dp))


@pytest.mark.engines
@pytest.mark.first
def test_dp_8_to_3_to_8(trained: Trained, tmp_path: Path) -> None:
    run = trained(CASES["z2_dp8_only_padding"]) / "run"
    three = reshard(run, tmp_path / "3", dp=3)
    same_files(run, reshard(three, tmp_path / "8", dp=8))


class TestFiles:
    @pytest.fixture(params=[(1, 2), (3, 2), (5, 3), (2, 1)], ids=str)
    def written(self, request: Any, tmp_path: Path) -> Path:
        dp, stage = request.param
        return reshard(EXAMPLE, tmp_path / "run", dp=dp, stage=stage)

    def test_zip_finds_no_fault(self, written: Path) -> None:
        for path in written.rglob("*.pt"):
            with zipfile.ZipFile(path) as file:
                assert file.testzip() is None
            command = [sys.executable, "-m", "zipfile", "-t", path]
            ended = subprocess.run(command, capture_output=True, text=True, check=True)
            assert ended.stdout == "Done testing\n"

    def test_torch_loads_with_and_without_mmap(self, written: Path) -> None:
        for path in written.rglob("*.pt"):
            plain, mapped = dict(tensors(path)), dict(tensors(path, mmap=True))
            assert list(plain) == list(mapped)
            assert all(same_bits(plain[place], mapped[place]) for place in plain)

    def test_torch_loads_model_states_with_weights_only(self, written: Path) -> None:
        for path in written.rglob("*model_states.pt"):
            assert torch.load(path, weights_only=True)["dp_world_size"]

    def test_storages_are_aligned(self, written: Path) -> None:
        for path in written.rglob("*.pt"):
            for record in TorchFile(str(path)).records.values():
                assert record.extent.offset % 64 == 0

    def test_a_flipped_bit_is_found(self, written: Path, tmp_path: Path) -> None:
        path = next(written.rglob("*rank_0*optim_states.pt"))
        record = max(
            TorchFile(str(path)).records.values(),
            key=lambda r: r.extent.length,
        )
        data = bytearray(path.read_bytes())
        data[record.extent.offset] ^= 1
        path.write_bytes(data)
        with pytest.raises(zckpt.ZckptError, match="damaged"):
            zckpt.convert(written, tmp_path / "universal")


# -- against the arithmetic, without an engine


@dataclasses.dataclass(frozen=True)
class Model:
    groups: list[list[tuple[int, ...]]]
    frozen: list[tuple[int, ...]]


shapes = st.lists(st.integers(1, 9), min_size=1, max_size=3).map(tuple)
models = st.builds(
    Model,
    st.lists(st.lists(shapes, min_size=1, max_size=6), min_size=1, max_size=3),
    st.lists(shapes, max_size=2),
)


def universal(model: Model, root: Path) -> dict[str, np.ndarray[Any, Any]]:
    """A universal checkpoint of random numbers; gives its tensors by entry name."""
    numbers = np.random.default_rng(0)
    parameters: dict[str, Any] = {}
    tensors: dict[str, np.ndarray[Any, Any]] = {}
    for group, members in enumerate(model.groups):
        for place, shape in enumerate(members):
            name = f"g{group}.p{place}"
            parameters[name] = {
                "shape": shape, "trainable": True, "group": group, "step": 5, "aliases": []
            }  # fmt: skip
            for slot in ("param", "master", "exp_avg", "exp_avg_sq"):
                tensors[f"{name}/{slot}"] = numbers.standard_normal(shape).astype(np.float32)
            tensors[f"{name}/param"] = tensors[f"{name}/master"]
    for place, shape in enumerate(model.frozen):
        parameters[f"f{place}"] = {
            "shape": shape, "trainable": False, "group": None, "step": None, "aliases": []
        }  # fmt: skip
        tensors[f"f{place}/param"] = numbers.standard_normal(shape).astype(np.float32)
    root.mkdir()
    for slot in ("param", "master", "exp_avg", "exp_avg_sq"):
        stem = "model" if slot == "param" else slot
        mine = {n.rpartition("/")[0]: t for n, t in tensors.items() if n.endswith(f"/{slot}")}
        save_file(mine, root / f"{stem}.safetensors")
    manifest = {
        "zckpt": 1,
        "source": {"format": "deepspeed", "zero_stage": 2, "dp": 1, "tag": "t"},
        "groups": [{"lr": 0.1 * group} for group in range(len(model.groups))],
        "parameters": parameters,
        "buffers": [],
        "entries": {n: {"dtype": "F32", "shape": list(t.shape)} for n, t in tensors.items()},
        "state": {"optimizer": {"step": {"in": "state", "type": "F32"}}},
    }
    (root / "manifest.json").write_text(json.dumps(manifest))
    return tensors


def flat(tensors: list[Any]) -> torch.Tensor:
    return torch.cat([torch.as_tensor(tensor).reshape(-1) for tensor in tensors])


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(models, st.integers(1, 9), st.integers(1, 3), st.sampled_from([3, 20, 10**9]), st.booleans())
def test_partitions_follow_the_rule(
    tmp_path: Path, model: Model, dp: int, stage: int, sub_group_size: int, round_robin: bool
) -> None:
    """The rule in the words of the engine's documentation, with torch as the only tool."""
    import deepspeed  # noqa: F401

    root = tmp_path / "random"
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    tensors = universal(model, root / "universal")
    config = {
        "zero_optimization": {
            "stage": stage,
            "sub_group_size": sub_group_size,
            "round_robin_gradients": round_robin,
        }
    }
    reshard(root / "universal", root / "run", dp=dp, config=config)
    loaded = [
        torch.load(
            root / f"run/t/zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", weights_only=False
        )["optimizer_state_dict"]
        for rank in range(dp)
    ]
    check = check_stage_3 if stage == 3 else check_stage_2
    check(model, tensors, loaded, dp, sub_group_size, round_robin)


def check_stage_2(
    model: Model, tensors: Any, loaded: Any, dp: int, _: int, round_robin: bool
) -> None:
    for group, members in enumerate(model.groups):
        names = [f"g{group}.p{place}" for place in range(len(members))]
        if round_robin:
            names = [name for first in range(dp) for name in names[first::dp]]
        total = sum(tensors[f"{name}/master"].size for name in names)
        size = -(-total // (2 * dp)) * 2
        states = [state["base_optimizer_state"]["state"][group] for state in loaded]
        for slot in ("exp_avg", "exp_avg_sq"):
            assert all(state[slot].numel() == size for state in states)
            whole = torch.cat([state[slot] for state in states])
            assert torch.equal(whole[:total], flat([tensors[f"{n}/{slot}"] for n in names]))
            assert not whole[total:].any()
        masters = [state["single_partition_of_fp32_groups"][group] for state in loaded]
        assert torch.equal(torch.cat(masters), flat([tensors[f"{n}/master"] for n in names]))
        paddings = [state["group_paddings"][group] for state in loaded]
        assert [size - part.numel() for part in masters] == paddings
        assert all(state["step"] == 5 for state in states)


def check_stage_3(
    model: Model, tensors: Any, loaded: Any, dp: int, sub_group_size: int, _: bool
) -> None:
    place = 0
    for group, members in enumerate(model.groups):
        own = []
        names = [f"g{group}.p{number}" for number in range(len(members))]
        widths = {name: -(-tensors[f"{name}/master"].size // dp) for name in names}
        one = sub_group_size >= sum(widths.values())
        while names:
            mine: list[str] = []
            while names and (one or sum(widths[n] for n in mine) < sub_group_size):
                mine.append(names.pop(0))
            for slot in ("master", "exp_avg", "exp_avg_sq"):
                parts = [
                    state["fp32_flat_groups"][place]
                    if slot == "master"
                    else state["optimizer_state_dict"]["state"][place][slot]
                    for state in loaded
                ]
                offset = 0
                for name in mine:
                    tensor = tensors[f"{name}/{slot}"]
                    slices = [part[offset : offset + widths[name]] for part in parts]
                    whole = torch.cat(slices)
                    assert torch.equal(whole[: tensor.size], flat([tensor]))
                    assert not whole[tensor.size :].any()
                    offset += widths[name]
                assert all(part.numel() == offset for part in parts)
            own.append(place)
            place += 1
        for state in loaded:
            assert state["optimizer_state_dict"]["param_groups"][group]["params"] == own


# -- steps as other classes of Adam keep them


@pytest.mark.engines
class TestClassesOfAdam:
    """From torch's AdamW to DeepSpeed's and Apex' own, and back, in the engine."""

    @pytest.mark.parametrize(
        ("case", "asked", "engine"),
        [
            pytest.param("z2_dp2_bf16", "apex-fused-adam", "apex fused adam", marks=[]),
            ("z2_dp2_bf16", "deepspeed-fused-adam", "fused adam"),
            ("z2_dp2_bf16", "deepspeed-fused-adam", "deepspeed fused adam"),
            ("z3_dp2_bf16", "deepspeed-fused-adam", "deepspeed fused adam"),
            ("z2_dp2_bf16", "deepspeed-cpu-adam", "deepspeed cpu adam"),
            ("z2_dp3_fused_adam", "torch", "adamw"),
            ("z2_dp2_apex_fused_adam", "torch", "adamw"),
            ("z2_dp2_apex_fused_adam", "deepspeed-fused-adam", "deepspeed fused adam"),
            ("z2_dp3_fused_adam", "apex-fused-adam", "apex fused adam"),
        ],
    )
    def test_the_step_arrives(
        self, case: str, asked: str, engine: str, trained: Trained, tmp_path: Path
    ) -> None:
        source = CASES[case]
        root = trained(source)
        before = torch.load(root / "oracle.pt", weights_only=False)
        reshard(root / "run", tmp_path / "run", dp=3, optimizer=asked)
        config = dict(source.config)
        if engine == "deepspeed cpu adam":
            config["zero_optimization"] = {"offload_optimizer": {"device": "cpu"}}
        after = deepspeed.resume(
            source, tmp_path / "run", tmp_path, dp=3, optimizer=engine, config=config
        )
        for name, tensor in before["tensors"].items():
            assert same_bits(after["tensors"][name], tensor), name
        assert after["steps"] == before["steps"]
        for one, other in zip(before["groups"], after["groups"], strict=True):
            for key in {"lr", "betas", "eps", "weight_decay"} & set(one):
                assert one[key] == other[key]
        assert after["losses"][0] == pytest.approx(before["losses"][0], abs=1e-6)


@pytest.mark.engines
@pytest.mark.first
class TestElasticSource:
    """Elastic files hold no hyper-parameters."""

    @pytest.mark.parametrize("case", ["z2_dp2_elastic", "z1_dp2_elastic"])
    def test_given_by_the_user(self, case: str, trained: Trained, tmp_path: Path) -> None:
        root = trained(CASES[case])
        before = torch.load(root / "oracle.pt", weights_only=False)
        defaults = {"lr": 3e-4, "betas": (0.8, 0.95), "weight_decay": 0.1}
        report = zckpt.reshard(
            root / "run",
            tmp_path / "run",
            dp=3,
            config={**bf16(CASES[case])},
            group_defaults=defaults,
        )
        assert any("eps=1e-08" in warning for warning in texts(report["warnings"]))
        after = deepspeed.resume(CASES[case], tmp_path / "run", tmp_path, dp=3, config={})
        for name, tensor in before["tensors"].items():
            assert same_bits(after["tensors"][name], tensor), name
        assert after["steps"] == before["steps"]
        for group in after["groups"]:
            assert {key: group[key] for key in defaults} == defaults
        assert after["losses"][0] == pytest.approx(before["losses"][0], abs=1e-6)


def bf16(case: Case) -> dict[str, Any]:
    return {"bf16": {"enabled": True}, "zero_optimization": {"stage": case.stage}}


@pytest.mark.engines
@pytest.mark.first
@pytest.mark.parametrize("case", ["z2_dp2_bf16", "z3_dp2_bf16", "z1_dp2_bf16_optimizer"])
def test_weights_only_loads_without_the_optimizer(
    case: str, trained: Trained, tmp_path: Path
) -> None:
    root = trained(CASES[case])
    before = torch.load(root / "oracle.pt", weights_only=False)
    reshard(root / "run", tmp_path / "run", dp=3, weights_only=True)
    moments = {e.slot for e in zckpt.read(tmp_path / "run").entries.values()}
    assert moments <= {"param", "master"}
    after = deepspeed.resume(
        CASES[case], tmp_path / "run", tmp_path, dp=3, load={"load_optimizer_states": False}
    )
    for name, tensor in before["tensors"].items():
        if name.endswith("/master"):  # such a load makes the masters of the module's weights
            tensor = tensor.to(torch.bfloat16).float()
        if name.endswith(("/param", "/master")):
            assert same_bits(after["tensors"][name], tensor), name
    assert after["losses"][0] == pytest.approx(before["losses"][0], abs=1e-6)


# -- refusals, before anything is written


class TestRefusals:
    @pytest.mark.parametrize(
        ("words", "code", "says"),
        [
            (["--dp", "0"], 2, "at least 1"),
            (["--dp", "-3"], 2, "at least 1"),
            (["--stage", "4"], 2, "--stage"),
            (["--optimizer", "sgd"], 2, "--optimizer"),
            (["--group-defaults", "lr"], 2, "lr=3e-4"),
            (["--ds-config", "nothing.json"], 2, "nothing.json"),
        ],
    )
    def test_options(
        self, words: list[str], code: int, says: str, tmp_path: Path, zckpt: Zckpt
    ) -> None:
        ended = zckpt("reshard", EXAMPLE, tmp_path / "run", *words)
        assert (ended.code, says in ended.err) == (code, True), ended.err
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize(
        ("config", "words", "says"),
        [
            ({"optimizer": {"type": "Adagrad"}}, [], "Adagrad"),
            ({"optimizer": {"type": "RMSprop"}}, [], "RMSprop"),
            ({"zero_optimization": {"stage": 3}}, ["--stage", "2"], "stage 3"),
            ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, [], "both"),
            ({"bf16": {"enabled": True}}, ["--dtype", "fp16"], "BF16"),
            ({"zero_optimization": {"stage": 0}}, ["--stage", "2"], "stage 0"),
            ({"zero_optimization": True}, [], "is not a JSON object"),
            ({"zero_optimization": {"sub_group_size": -5}}, [], "sub_group_size"),
            ({"zero_optimization": {"mics_shard_size": 2}}, [], "mics_shard_size"),
            ({"optimizer": {"type": "SGD"}}, [], "SGD"),
            ({"optimizer": {"type": "Lion"}}, [], "Lion"),
            ({}, ["--group-defaults", "lr=9"], "the source states already"),
            (
                {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}},
                [],
                "NVMe",
            ),
        ],
    )
    def test_a_ds_config_that_contradicts(
        self, config: Any, words: list[str], says: str, tmp_path: Path, zckpt: Zckpt
    ) -> None:
        (tmp_path / "ds.json").write_text(json.dumps(config))
        target = tmp_path / "run"
        ended = zckpt("reshard", EXAMPLE, target, "--ds-config", tmp_path / "ds.json", *words)
        assert (ended.code, says in ended.err) == (2, True), ended.err
        assert not target.exists()
        assert not Path(f"{target}.partial").exists()

    def test_weights_alone_are_no_optimizer(self, tmp_path: Path, zckpt: Zckpt) -> None:
        import zckpt as module

        module.convert(EXAMPLE, tmp_path / "weights", weights_only=True)
        ended = zckpt("reshard", tmp_path / "weights", tmp_path / "run")
        assert ended.code == 1
        assert "--weights-only" in ended.err
        assert not (tmp_path / "run").exists()

    def test_parameters_of_one_group_with_different_steps(
        self, tmp_path: Path, zckpt: Zckpt
    ) -> None:
        assert zckpt("convert", EXAMPLE, tmp_path / "universal").code == 0
        with changed(tmp_path / "universal") as manifest:
            manifest["parameters"]["fc1.weight"]["step"] = 6
            manifest["step"] = None  # that all parameters share
        ended = zckpt("reshard", tmp_path / "universal", tmp_path / "run")
        assert ended.code == 1
        assert "one step" in ended.err
        assert "fc1.weight" in ended.err

    def test_too_little_space(self, tmp_path: Path, zckpt: Zckpt, monkeypatch: Any) -> None:
        monkeypatch.setattr("zckpt.copying.targets.free_space", lambda _: 1000)
        ended = zckpt("reshard", EXAMPLE, tmp_path / "run", "--dp", "3")
        assert (ended.code, "are free" in ended.err) == (1, True)
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "between",
    [
        {"to": "dcp", "dialect": "accelerate", "dp": 2},
        {"to": "gathered", "dialect": "accelerate"},
        {"to": "gathered", "dialect": "safetensors"},
    ],
    ids=lambda words: "-".join(map(str, words.values())),
)
@pytest.mark.parametrize("universal", [False, True])
@pytest.mark.parametrize("stated", [6, None])
def test_the_engine_counts_on_where_the_trainer_was(
    between: dict[str, Any], universal: bool, stated: int | None, tmp_path: Path
) -> None:
    """Without DeepSpeed only the Trainer counts updates that fp16 skips: the optimizer has 4."""
    source, target = tmp_path / "checkpoint-6", tmp_path / "target"
    zckpt.convert(TRAINER, source, **between)
    state = {"global_step": stated} if stated else {}
    (source / "trainer_state.json").write_text(json.dumps(state))
    if universal:
        zckpt.convert(source, tmp_path / "universal")
        source = tmp_path / "universal"
    config = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 2}}
    zckpt.convert(source, target, to="deepspeed", dp=2, config=config)
    counted = stated or 4
    assert (target / "latest").read_text() == f"global_step{counted}"
    model = target / f"global_step{counted}" / "mp_rank_00_model_states.pt"
    content = TorchFile(str(model)).value
    assert (content["global_steps"], content["skipped_steps"]) == (counted, 0)
    assert zckpt.read(target).step == 4


def test_the_engines_own_counter_comes_first(tmp_path: Path) -> None:
    run = Path(shutil.copytree(TRAINER, tmp_path / "checkpoint-4"))
    (run / "trainer_state.json").write_text('{"global_step": 6}')
    zckpt.reshard(run, tmp_path / "target", dp=4)
    model = tmp_path / "target" / "global_step4" / "mp_rank_00_model_states.pt"
    assert TorchFile(str(model)).value["global_steps"] == 4


def test_auto_in_a_trainers_config_is_no_answer(tmp_path: Path) -> None:
    config = {
        "bf16": {"enabled": "auto"},
        "gradient_clipping": "auto",
        "train_batch_size": "auto",
        "zero_optimization": {"stage": 3, "sub_group_size": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    }
    run = reshard(EXAMPLE, tmp_path / "run", dp=2, config=config)
    assert len(list(run.glob("*/bf16_zero_pp_rank_*_optim_states.pt"))) == 2


class TestReport:
    def test_batch_sizes_that_no_longer_fit(self, tmp_path: Path, zckpt: Zckpt) -> None:
        config = {"train_batch_size": 24, "train_micro_batch_size_per_gpu": 6}
        (tmp_path / "ds.json").write_text(json.dumps(config))
        words = ["--ds-config", tmp_path / "ds.json", "--dtype", "fp32", "--json"]
        for dp, warned in ((4, False), (3, True)):
            report = zckpt("reshard", EXAMPLE, tmp_path / str(dp), "--dp", dp, *words).document
            assert any("global batch" in line for line in texts(report["warnings"])) == warned

    def test_says_where_the_recovery_scripts_are(
        self, example: Path, tmp_path: Path, zckpt: Zckpt
    ) -> None:
        """If the source has any."""
        report = zckpt("reshard", example, tmp_path / "none", "--dp", "2", "--json").document
        assert not any("zero_to_fp32.py" in line for line in texts(report["left_out"]))
        (example / "zero_to_fp32.py").touch()
        report = zckpt("reshard", example, tmp_path / "out", "--dp", "2", "--json").document
        assert any("zero_to_fp32.py" in line for line in texts(report["left_out"]))
        assert (report["command"], report["format"]) == ("reshard", "deepspeed")

    def test_universal_goes_back_where_it_came_from(self, tmp_path: Path) -> None:
        zckpt.convert(EXAMPLE, tmp_path / "universal")
        run = reshard(tmp_path / "universal", tmp_path / "run")
        assert zckpt.read(run).source == zckpt.read(EXAMPLE).source

    def test_every_stage_from_python(self, tmp_path: Path) -> None:
        for stage in (1, 2, 3):
            run = reshard(
                EXAMPLE, tmp_path / f"run{stage}", dp=1000 if stage == 3 else 5, stage=stage
            )
            zckpt.convert(run, tmp_path / f"universal{stage}")
            tensors = load(tmp_path / f"universal{stage}")
            assert sum(prod(t.shape) for n, t in tensors.items() if n.endswith("master")) == 1929


@pytest.mark.parametrize("stage", [2, 3])
def test_a_target_says_nothing_of_an_option_that_no_one_typed(stage: int, tmp_path: Path) -> None:
    """A state dict does not show whether a program left frozen weights out of it."""
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.rand(2, 4)).sum().backward()
    optimizer.step()
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(states, tmp_path / "state.pt")
    run = tmp_path / "run"
    zckpt.convert(tmp_path / "state.pt", run, to="deepspeed", stage=stage, dp=2)
    zckpt.reshard(run, tmp_path / "again", dp=3)
    for target in (run, tmp_path / "again"):
        assert not any(
            "exclude_frozen" in line for line in texts(zckpt.read(target).notices.warnings)
        )
    for path in run.glob("*/*model_states.pt"):  # as the engine does it
        model_file = torch.load(path, weights_only=False)
        assert (model_file["frozen_param_shapes"], model_file["frozen_param_fragments"]) == (
            {},
            None,
        )
        model_file["frozen_param_shapes"] = None
        torch.save(model_file, path)
    zckpt.reshard(run, tmp_path / "left_out", dp=3)
    for source in (run, tmp_path / "left_out"):
        assert any("exclude_frozen" in line for line in texts(zckpt.read(source).notices.warnings))


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("stage", [2, 3])
def test_a_base_model_under_an_adapter_arrives(stage: int, quantized: bool, tmp_path: Path) -> None:
    """Whatever its adapted layers are: tied to an embedding, or of a type that counts as a buffer.

    An adapter that was saved alone has no base weights, and its target says so.
    """
    front = "base_model.model"
    embedding = torch.randn(5, 4)
    base = torch.randint(0, 255, (8, 1), dtype=torch.uint8) if quantized else embedding
    model = {
        f"{front}.embed.weight": embedding,
        f"{front}.norm.weight": torch.randn(4),
        f"{front}.head.base_layer.weight": base,
        f"{front}.head.lora_A.default.weight": torch.randn(2, 4),
        f"{front}.head.lora_B.default.weight": torch.randn(5, 2),
    }
    trained = [name for name in model if "lora" in name]
    optimizer = torch.optim.AdamW([torch.nn.Parameter(model[name]) for name in trained])
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    source = tmp_path / "source"
    source.mkdir()
    torch.save(model, source / "model.pt")
    torch.save(optimizer.state_dict(), source / "optim.pt")
    target = tmp_path / "target"
    zckpt.convert(source, target, to="deepspeed", stage=stage, dp=2, param_names=trained)
    manifest = zckpt.read(target)
    frozen = {name for name, each in manifest.parameters.items() if not each.trainable}
    assert frozen == {f"{front}.embed.weight", f"{front}.norm.weight"}
    assert manifest.buffers == ((f"{front}.head.base_layer.weight",) if quantized else ())
    assert not any("exclude_frozen_parameters" in line for line in texts(manifest.notices.warnings))
    for name in frozen:
        assert torch.equal(zckpt.load(target, f"{name}/param"), model[name])
