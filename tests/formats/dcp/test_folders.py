"""A model's folder beside its optimizer's: NeMo AutoModel's, and those of many a program."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

import zckpt
import zckpt.dcp
from zckpt import errors
from zckpt.errors import counted

from ...conftest import ROOT, texts
from ..contract import FormatContract
from .torch_dcp import alike

AUTOMODEL = ROOT / "tests" / "data" / "automodel-0.7.0-w2"
LORA = ROOT / "tests" / "data" / "automodel-0.7.0-lora-w2"
WEIGHTS = {"a": torch.arange(12.0).reshape(4, 3), "b": torch.arange(5.0)}
Program = Callable[..., Any]


class TestAutoModel(FormatContract):
    format = "dcp"

    @pytest.fixture
    def checkpoint(self, tmp_path: Path) -> Path:
        return Path(shutil.copytree(AUTOMODEL, tmp_path / "run"))


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def keys_of(folder: Path) -> set[str]:
    return set(dcp.FileSystemReader(folder).read_metadata().state_dict_metadata)


def stored(folder: Path, reader: type[dcp.StorageReader] = dcp.FileSystemReader) -> dict[str, Any]:
    """The tensors that torch itself reads."""
    storage = reader(str(folder))  # type: ignore[call-arg]
    items = storage.read_metadata().state_dict_metadata
    state = {
        key: torch.empty(item.size, dtype=item.properties.dtype)
        for key, item in items.items()
        if hasattr(item, "properties")
    }
    dcp.load(state, storage_reader=storage)
    return state


def optimizer_of(names: str = "ab") -> dict[str, Any]:
    state = {n: {"step": torch.tensor(3.0), "exp_avg": WEIGHTS[n] + 1} for n in names}
    return {"state": state, "param_groups": [{"lr": 0.1, "params": list(names)}]}


@pytest.mark.parametrize("ranks", [1, 3])
def test_what_automodel_saves_stays_so(ranks: int, tmp_path: Path) -> None:
    """Its reader is torch's HuggingFaceStorageReader, and asks each folder for its own keys."""
    target = tmp_path / "target"
    report = zckpt.reshard(AUTOMODEL, target, dp=ranks)
    shards = {f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors" for rank in range(ranks)}
    assert {path.name for path in (target / "model").iterdir()} == {*shards, ".hf_metadata"}
    kept = {"rng/rng_global_rank_0.pt", "model/.hf_metadata/config.json", "step_scheduler.pt"}
    assert kept <= files_in(target)
    own = stored(AUTOMODEL / "model", dcp.HuggingFaceStorageReader)
    assert alike(stored(target / "model", dcp.HuggingFaceStorageReader), own)
    assert alike(stored(target / "optim"), stored(AUTOMODEL / "optim"))
    assert keys_of(target / "optim") == keys_of(AUTOMODEL / "optim")
    assert any(line.startswith("model/consolidated/: ") for line in texts(report["left_out"]))
    assert [line.split(":")[0] for line in texts(report["warnings"])] == [
        "the optimizer lists 5 of 12 weights",
        f"rng/ has files of 2 ranks, but a run of {counted(ranks, 'rank')} reads one file per rank",
    ]
    for words in ({}, {"gather": True}):
        assert zckpt.verify(AUTOMODEL, against=target, **words)["equal"]


def test_a_universal_checkpoint_knows_the_layout(tmp_path: Path) -> None:
    zckpt.convert(AUTOMODEL, tmp_path / "universal")
    zckpt.reshard(AUTOMODEL, tmp_path / "directly", dp=3)
    zckpt.convert(tmp_path / "universal", tmp_path / "target", to="dcp", dp=3)
    assert files_in(tmp_path / "target") == files_in(tmp_path / "directly")


def test_the_scheduler_is_one(tmp_path: Path) -> None:
    """DeepSpeed keeps it where its own is, under whatever name the program saved it."""
    assert zckpt.read(AUTOMODEL).state["lr_scheduler"]["last_epoch"] == 3


def test_frozen_weights_have_no_group() -> None:
    manifest = zckpt.read(AUTOMODEL)
    trained = {name for name, each in manifest.parameters.items() if each.group is not None}
    assert trained == {name for name in manifest.parameters if "norm" in name or "k_proj" in name
                       or "q_proj" in name}  # fmt: skip


@pytest.mark.parametrize("inside", ["", "model"])
def test_export_finds_the_configuration(inside: str, tmp_path: Path) -> None:
    zckpt.export(AUTOMODEL / inside, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["model_type"] == "llama"
    whole = load_file(AUTOMODEL / "model/consolidated/model-00001-of-00001.safetensors")
    assert alike(load_file(tmp_path / "out" / "model.safetensors"), whole)


class TestLora:
    """AutoModel's modules have names without PEFT's, and its file has PEFT's."""

    def test_the_names_of_both_are_kept(self, tmp_path: Path) -> None:
        target = tmp_path / "target"
        zckpt.reshard(LORA, target, dp=3)
        name = "model/adapter_model.safetensors"
        assert alike(load_file(target / name), load_file(LORA / name))
        assert alike(stored(target / "optim"), stored(LORA / "optim"))
        assert {"model/adapter_config.json", "model/automodel_peft_config.json"} <= files_in(target)
        for words in ({}, {"gather": True}):
            assert zckpt.verify(LORA, against=target, **words)["equal"]

    def test_others_get_the_names_of_peft(self, tmp_path: Path) -> None:
        name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.default.weight"
        manifest = zckpt.read(LORA)
        assert (name, "exp_avg") in manifest.entries
        zckpt.convert(LORA, tmp_path / "run", to="deepspeed", dp=2)
        assert zckpt.verify(LORA, against=tmp_path / "run")["equal"]
        zckpt.export(LORA, tmp_path / "out")
        saved = load_file(tmp_path / "out" / "adapter_model.safetensors")
        assert alike(saved, load_file(LORA / "model/adapter_model.safetensors"))

    def test_of_dora_one_name_differs(self, tmp_path: Path) -> None:
        front = "layers.0.q_proj.lora_magnitude"
        vector = {f"base_model.model.{front}_vector": torch.arange(5.0)}
        (tmp_path / "run/model").mkdir(parents=True)
        save_file(vector, tmp_path / "run/model/adapter_model.safetensors")
        state = {f"state.{front}.exp_avg": torch.ones(5), f"param_groups.{front}.lr": 0.1}
        dcp.save({"optim": state}, checkpoint_id=tmp_path / "run/optim")
        zckpt.reshard(tmp_path / "run", tmp_path / "target", dp=2)
        assert keys_of(tmp_path / "target/optim") == keys_of(tmp_path / "run/optim")

    def test_weights_alone_are_items(self, tmp_path: Path) -> None:
        zckpt.convert(LORA, tmp_path / "target", to="dcp", weights_only=True)
        assert keys_of(tmp_path / "target") == {
            *load_file(LORA / "model/adapter_model.safetensors")
        }


class TestHomeMade:
    """With or without keys of its own in each folder, a program finds what it saved."""

    @pytest.mark.parametrize("name", ["optim", "optimizer"])
    @pytest.mark.parametrize("keyed", [(), ("model",), ("optim",), ("model", "optim")])
    def test_keys_and_folders_are_kept(
        self, name: str, keyed: tuple[str, ...], tmp_path: Path
    ) -> None:
        run, target = tmp_path / "run", tmp_path / "target"
        states = {"model": dict(WEIGHTS), "optim": optimizer_of()}
        for folder, key in (("model", "model"), (name, "optim")):
            state = {key: states[key], "epoch": 2} if key in keyed else states[key]
            dcp.save(state, checkpoint_id=run / folder)
        manifest = zckpt.read(run)
        assert (manifest.step, [*manifest.parameters]) == (3, ["a", "b"])
        zckpt.reshard(run, target, dp=2)
        for folder in ("model", name):
            assert keys_of(target / folder) == keys_of(run / folder)
            assert alike(stored(target / folder), stored(run / folder))
        for words in ({}, {"gather": True}):
            assert zckpt.verify(run, against=target, **words)["equal"]

    def test_two_values_of_one_key(self, tmp_path: Path) -> None:
        """The folders were saved one after the other, and each says when."""
        run = tmp_path / "run"
        dcp.save({"model": dict(WEIGHTS), "time": 1.5}, checkpoint_id=run / "model")
        dcp.save({"optim": optimizer_of(), "time": 2.5}, checkpoint_id=run / "optim")
        manifest = zckpt.read(run)
        assert manifest.state["client_state"] == {"time": 1.5}
        assert "optim: time, because zckpt uses the different value in model/" in texts(
            manifest.notices.omitted
        )

    def test_a_dialect_has_folders_of_its_own(self, tmp_path: Path) -> None:
        zckpt.convert(AUTOMODEL, tmp_path / "target", to="dcp", dialect="accelerate")
        folders = {path.parent.name for path in (tmp_path / "target").rglob(".metadata")}
        assert folders == {"pytorch_model_fsdp_0", "optimizer_0"}

    def test_two_optimizers(self, tmp_path: Path) -> None:
        run, target = tmp_path / "run", tmp_path / "target"
        dcp.save(dict(WEIGHTS), checkpoint_id=run / "model")
        for name in ("optim", "optimizer"):
            dcp.save(optimizer_of(), checkpoint_id=run / name)
        with pytest.raises(errors.AmbiguousCheckpoint, match="optim/, optimizer/"):
            zckpt.reshard(run, target, dp=2)
        zckpt.reshard(run, target, dp=2, root="model/=optimizer/")
        assert {path.name for path in target.iterdir()} == {"model", "optimizer"}
        assert alike(stored(target / "optimizer"), stored(run / "optimizer"))


@pytest.mark.parametrize("run", [AUTOMODEL, LORA])
def test_the_hint_of_an_optimizers_folder_leads_to_the_whole(run: Path, zckpt: Program) -> None:
    ended = zckpt("inspect", run / "optim")
    assert ended.code == 1
    (hint,) = (line for line in ended.err.splitlines() if line.startswith("Hint: "))
    folder = hint.removeprefix("Hint: give ").removesuffix(
        ", which has the model and the optimizer"
    )
    assert folder == str(run)
    assert zckpt("inspect", folder).code == 0


def test_a_lost_shard_is_named(tmp_path: Path) -> None:
    run = Path(shutil.copytree(AUTOMODEL, tmp_path / "run"))
    (run / "model/shard-00001-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(errors.IncompleteCheckpoint, match=r"model lacks shard-00001-"):
        zckpt.read(run)


def test_the_last_shard_is_named(tmp_path: Path, zckpt: Program) -> None:
    """Nothing in `model` states the whole shapes; the moments in `optim` have them."""
    run = Path(shutil.copytree(AUTOMODEL, tmp_path / "run"))
    (run / "model/shard-00002-model-00001-of-00001.safetensors").unlink()
    assert zckpt("verify", run).code == 3
    for command in (("inspect", run), ("convert", run, tmp_path / "a", "--weights-only")):
        said = zckpt(*command)
        assert said.code == 1
        assert "model/shard-00002-model-00001-of-00001.safetensors is missing" in said.err


@pytest.mark.parametrize("witness", ["consolidated", ".hf_metadata"])
@pytest.mark.parametrize("command", ["inspect", "verify", "reshard"])
def test_the_last_shard_is_named_without_an_optimizer(
    witness: str, command: str, tmp_path: Path, zckpt: Program
) -> None:
    """Whole weights beside the shards show the shapes, and so does the model's configuration."""
    model = shutil.copytree(AUTOMODEL / "model", tmp_path / "model")
    for other in {"consolidated", ".hf_metadata"} - {witness}:
        shutil.rmtree(model / other)
    assert zckpt("verify", model).code == 0
    lost = model / "shard-00002-model-00001-of-00001.safetensors"
    lost.unlink()
    said = zckpt(command, model, *([tmp_path / "out"] if command == "reshard" else []))
    assert said.code == (3 if command == "verify" else 1)
    assert f"{lost} is missing" in said.out + said.err
    assert f"has the shape [8, 8], and {'by ' * witness.startswith('.')}{model}/{witness}/" in (
        said.out + said.err
    )


def test_damaged_whole_weights_show_no_shapes(tmp_path: Path) -> None:
    model = Path(shutil.copytree(AUTOMODEL / "model", tmp_path / "model"))
    (whole,) = (model / "consolidated").glob("*.safetensors")
    whole.write_bytes(whole.read_bytes()[:100])
    (warning,) = texts(zckpt.read(model).notices.warnings)
    assert warning.startswith(f"not compared with the weights: {whole}")


@pytest.mark.parametrize("part", [".", "model"])
def test_whole_weights_beside_shards_are_compared(
    part: str, tmp_path: Path, zckpt: Program
) -> None:
    """No reader takes them: their bytes are compared, and one that is lost is named."""
    run = Path(shutil.copytree(AUTOMODEL, tmp_path / "run"))
    (whole,) = (run / "model" / "consolidated").glob("*.safetensors")
    name = whole.relative_to(run / part)
    assert zckpt("verify", run / part, "--against", AUTOMODEL / part).code == 0
    content = bytearray(whole.read_bytes())
    content[-100] ^= 16
    whole.write_bytes(content)
    said = zckpt("verify", run / part, "--against", AUTOMODEL / part)
    assert (said.code, f"{name}: " in said.out) == (3, True)
    whole.unlink()
    said = zckpt("verify", run / part, "--against", AUTOMODEL / part)
    assert f"not compared: {name}: only beside {AUTOMODEL / part}" in said.out


class TestStorage:
    """Directories that torch's HuggingFaceStorageWriter wrote."""

    def saved(self, run: Path, state: dict[str, Any]) -> Path:
        dcp.save(
            state, storage_writer=dcp.HuggingFaceStorageWriter(str(run), save_distributed=True)
        )
        return run

    def test_it_stays_what_its_reader_reads(self, tmp_path: Path) -> None:
        run = self.saved(tmp_path / "run", dict(WEIGHTS))
        zckpt.reshard(run, tmp_path / "target", dp=3, max_file_size=20)
        names = {path.name for path in (tmp_path / "target").glob("*.safetensors")}
        assert names == {
            f"shard-{rank:05d}-model-{file:05d}-of-00002.safetensors"
            for rank in (1, 2, 3)
            for file in (1, 2)
        }
        assert alike(stored(tmp_path / "target", dcp.HuggingFaceStorageReader), WEIGHTS)
        assert zckpt.verify(run, against=tmp_path / "target")["equal"]

    @pytest.mark.parametrize("root", ["model", "app.model", ""])
    def test_states_are_no_weights(self, root: str, tmp_path: Path) -> None:
        """Its writer takes tensors alone, so a program leaves the groups out."""
        state: dict[str, Any] = {"optim": {"state": optimizer_of("a")["state"]}}
        model: dict[str, Any] = dict(WEIGHTS)
        for key in reversed(root.split(".") if root else []):
            model = {key: model}
        run = self.saved(tmp_path / "run", {**state, **model})
        manifest = zckpt.read(run)
        assert [*manifest.parameters] == ["a", "b"]
        assert (manifest.step, manifest.groups) == (3, None)
        assert {*manifest.entries} == {("a", "param"), ("a", "exp_avg"), ("b", "param")}
        zckpt.reshard(run, tmp_path / "target", dp=2)
        after = stored(tmp_path / "target", dcp.HuggingFaceStorageReader)
        assert alike(after, stored(run, dcp.HuggingFaceStorageReader))
        for words in ({}, {"gather": True}):
            assert zckpt.verify(run, against=tmp_path / "target", **words)["equal"]

    def test_a_weight_may_be_called_state(self, tmp_path: Path) -> None:
        weights = {
            "layers.0.state.A.weight": torch.ones(3),
            "layers.0.state.B.weight": torch.ones(2),
        }
        assert {*zckpt.read(self.saved(tmp_path / "run", weights)).parameters} == {*weights}


@pytest.mark.parametrize("run", [AUTOMODEL, LORA])
def test_torch_loads_it_without_a_conversion(run: Path) -> None:
    """Its own reader takes items alone; zckpt's takes any checkpoint."""
    weight, group = next(
        (name, each.group) for name, each in zckpt.read(run).parameters.items() if "q_proj" in name
    )
    assert group == 0
    shape = zckpt.read(run).parameters[weight].shape
    state = {weight: torch.zeros(shape), f"optim.state.{weight}.exp_avg": torch.zeros(shape)}
    dcp.load(state, storage_reader=zckpt.dcp.StorageReader(run))
    assert all(tensor.any() for tensor in state.values())
