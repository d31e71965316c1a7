"""Files of torch.save that zckpt writes, loaded by plain torch."""

from __future__ import annotations

import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, load_model
from torch import Tensor, nn

import zckpt
from zckpt import errors

from ...conftest import EXAMPLE, texts
from ...engines import torch_engine
from ...engines.torch_cases import CASES
from ..equality import LOST_IN_STATE_DICTS, same_bits
from .engine_cases import (
    FULL,
    SHARDED,
    Trained,
    engines,
    names_of,
    oracle_of,
    source_of,
)
from .plain_torch import (
    assert_same_run,
    build,
    names_by_group,
    resumed_pair,
    save,
    trained_pair,
)


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


class Tied(nn.Module):
    """The names of examples/run."""

    def __init__(self) -> None:
        super().__init__()
        for name, tensor in torch_state(EXAMPLE).items():
            module, _, last = name.rpartition(".")
            if module and not hasattr(self, module):
                self.add_module(module, nn.Module())
            owner = self.get_submodule(module) if module else self
            value = torch.zeros(tensor.shape)
            if name == "running_mean":
                owner.register_buffer(last, value)
            else:
                owner.register_parameter(last, nn.Parameter(value))
        self.head.weight = self.embedding.weight


def torch_state(run: Path) -> dict[str, Tensor]:
    path = next(run.glob("*/mp_rank_00_model_states.pt"))
    state: dict[str, Tensor] = torch.load(path, weights_only=False)["module"]
    return state


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
        assert all(same_bits(state[name], tensor) for name, tensor in masters.items())
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
        assert after.notices.warnings == ()

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
        assert any("head.weight" in line for line in texts(report["warnings"]))
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

    @pytest.mark.parametrize("options", [{"stage": 1}, {"dialect": "hdf5"}, {"vocab_size": 4}])
    def test_options_of_others(self, options: dict[str, Any], tmp_path: Path) -> None:
        with pytest.raises(errors.WrongOption, match="does not apply to --to gathered"):
            zckpt.convert(EXAMPLE, tmp_path / "t", to="gathered", **options)

    def test_the_dialect_is_not_onnx_runtimes(self, tmp_path: Path) -> None:
        with pytest.raises(errors.WrongOption, match="does not apply to --to onnxruntime"):
            zckpt.convert(EXAMPLE, tmp_path / "t", to="onnxruntime", dialect="safetensors")

    def test_back_to_deepspeed(self, tmp_path: Path) -> None:
        zckpt.convert(EXAMPLE, tmp_path / "t", to="gathered")
        zckpt.convert(tmp_path / "t", tmp_path / "d", to="deepspeed", stage=2, dp=3, dtype="bf16")
        report = zckpt.verify(tmp_path / "d", EXAMPLE)
        assert {line["key"] for line in report["states"]} == LOST_IN_STATE_DICTS
        assert report["differences"] == report["problems"] == report["groups"] == []

    def test_weights_of_16_bits_without_masters_stay(self, tmp_path: Path) -> None:
        model, optimizer = build(named=True)
        pair = model.bfloat16(), optimizer
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        zckpt.convert(save(tmp_path / "run", pair), tmp_path / "t", to="gathered")
        state = torch.load(tmp_path / "t" / "model.pt")
        assert all(same_bits(state[name], tensor) for name, tensor in model.state_dict().items())
        assert state["first.weight"].dtype == torch.bfloat16
        optim = torch.load(tmp_path / "t" / "optim.pt")
        assert optim["state"][0]["exp_avg"].dtype == torch.bfloat16

    def test_files_of_the_program_are_carried(self, tmp_path: Path) -> None:
        """Though they may be called as ours: those are told, not lost."""
        folder = save(tmp_path / "run", trained_pair(named=True))
        torch.save([1, 2], folder / "extra.pt")
        (folder / "notes.txt").write_text("mine")
        assert [s.name for s in zckpt.read(folder).files.siblings] == ["extra.pt", "notes.txt"]
        report = zckpt.convert(folder, tmp_path / "t", to="gathered")
        assert (tmp_path / "t" / "notes.txt").read_text() == "mine"
        assert texts(report["left_out"]) == ["extra.pt: another target file has this name"]

    def test_files_that_were_saved_again(self, tmp_path: Path) -> None:
        """What extra.pt tells is of other files then."""
        zckpt.convert(EXAMPLE, tmp_path / "t", to="gathered")
        save(tmp_path / "t", trained_pair(named=True))
        manifest = zckpt.read(tmp_path / "t")
        assert len(manifest.parameters) == 8
        assert all(not parameter.aliases for parameter in manifest.parameters.values())

    @pytest.mark.parametrize(
        ("name", "tensor"),
        [
            ("head.weight", torch.ones(3, 4)),
            ("emb.weight", torch.ones(8, 4)),
            ("head.weight", torch.ones(4, 6)),  # as many elements
            ("head.weight", torch.ones(6, 4, dtype=torch.bfloat16)),
        ],
        ids=["fewer-rows", "owner", "transposed", "type"],
    )
    def test_the_two_names_of_a_weight_have_one_shape_and_type(
        self, name: str, tensor: Tensor, tmp_path: Path
    ) -> None:
        """It was said that zckpt's reader is wrong, or nothing at all."""
        weight = torch.randn(6, 4)
        model = {"emb.weight": weight, "head.weight": weight}
        state = {0: {"step": torch.tensor(2.0), "exp_avg": torch.ones(6, 4)}}
        groups = [{"lr": 1.0, "params": [0]}]
        both = {"model": model, "optimizer": {"state": state, "param_groups": groups}}
        torch.save(both, tmp_path / "x.pt")
        zckpt.convert(tmp_path / "x.pt", tmp_path / "dcp", to="dcp")
        zckpt.convert(tmp_path / "dcp", tmp_path / "t", to="gathered")
        written = torch.load(tmp_path / "t" / "model.pt")
        torch.save({**written, name: tensor}, tmp_path / "t" / "model.pt")
        for act in (zckpt.read, lambda path: zckpt.load(path, "emb.weight/param")):
            with pytest.raises(
                errors.InconsistentCheckpoint, match="a second name of the tied weight emb"
            ) as said:
                act(tmp_path / "t")
            assert said.value.subject == "head.weight"
        report = zckpt.verify(tmp_path / "t")
        assert not report["equal"]
        assert report["problems"][0]["code"] == "mixed-saves"

    def test_the_programs_own_state(self, tmp_path: Path) -> None:
        model, optimizer = trained_pair()
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        own = {"epoch": 3, "rng": torch.get_rng_state(), "history": [torch.ones(2), 1.5]}
        torch.save({**states, **own}, tmp_path / "run.pt")
        zckpt.convert(tmp_path / "run.pt", tmp_path / "t", to="gathered")
        extra = torch.load(tmp_path / "t" / "run.pt")
        assert extra["epoch"] == 3
        assert same_bits(extra["rng"], own["rng"])
        assert same_bits(extra["history"][0], torch.ones(2))
        names = names_by_group((model, optimizer))
        pair = tmp_path / "t", tmp_path / "run.pt"
        assert zckpt.verify(*pair, param_names=names)["equal"]
