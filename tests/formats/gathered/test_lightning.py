"""Lightning's .ckpt, and other files that have a whole run: they stay one file, and resume."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemReader

import zckpt
from zckpt import errors
from zckpt.core.checkpoint.manifest import Manifest
from zckpt.core.storage.filenames import numbered

from ...conftest import Once, Result, texts
from ...engines import trainers
from ..contract import FormatContract
from ..equality import same_bits
from .engine_cases import names_of
from .plain_torch import Pair, trained_pair

Saved = Callable[[str, int], Path]
Zckpt = Callable[..., Result]
CONFIG = {
    "train_micro_batch_size_per_gpu": 1,
    "zero_optimization": {"stage": 2},
    "zero_allow_untested_optimizer": True,
}
SCHEDULER = {"last_epoch": 3, "_step_count": 4, "_last_lr": [0.01, 0.01]}


def run_of(pair: Pair, *others: Pair) -> dict[str, Any]:
    """What Lightning 2.6 saves of a model, and of more optimizers of the same model."""
    model, _ = pair
    score = {"best_model_score": torch.tensor(0.5), "best_k_models": {"a.ckpt": torch.tensor(0.5)}}
    return {
        "epoch": 1,
        "global_step": 3,
        "pytorch-lightning_version": "2.6.0",
        "state_dict": model.state_dict(),
        "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"total": {"ready": 1}}}},
        "callbacks": {"ModelCheckpoint{'monitor': 'loss'}": score, "Noise": torch.rand(3)},
        "optimizer_states": [each.state_dict() for _, each in (pair, *others)],
        "lr_schedulers": [SCHEDULER],
        "MixedPrecision": {"scale": 65536.0, "growth_factor": 2.0, "_growth_tracker": 3},
        "hparams_name": "kwargs",
        "hyper_parameters": {"width": 16, "rates": (0.1, 0.2)},
    }


def ours(path: Path) -> dict[str, Any]:
    """What is in a file, as Lightning loads it, without what zckpt states beside it."""
    content: dict[str, Any] = torch.load(path)
    assert isinstance(content.pop("zckpt"), dict)
    return content


def assert_same(value: Any, expected: Any, where: str) -> None:
    """Equal in values and types, bit for bit."""
    assert type(value) is type(expected), where
    if isinstance(expected, torch.Tensor):
        assert same_bits(value, expected), where
    elif isinstance(expected, dict):
        assert value.keys() == expected.keys(), where
        for key, item in expected.items():
            assert_same(value[key], item, f"{where}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(value) == len(expected), where
        for place, (one, other) in enumerate(zip(value, expected, strict=True)):
            assert_same(one, other, f"{where}[{place}]")
    else:
        assert value == expected, where


class TestLightning(FormatContract):
    """A .ckpt of Lightning that is one file."""

    format = "gathered"

    @pytest.fixture
    def checkpoint(self, tmp_path: Path) -> Path:
        torch.save(run_of(trained_pair(named=True)), tmp_path / "best.ckpt")
        return tmp_path / "best.ckpt"

    def test_every_tensor_is_read_once(self, checkpoint: Path, manifest: Manifest) -> None:
        saved = torch.load(checkpoint)
        of_state = [key for key in manifest.entries if key[1] == "state"]
        assert of_state == [("client_state.callbacks.Noise", "state")]
        assert sum(slot == "exp_avg" for _, slot in manifest.entries) == len(
            saved["optimizer_states"][0]["state"]
        )
        assert manifest.state["client_state"]["lr_schedulers"] == [SCHEDULER]
        assert "lr_schedulers.0, last_epoch" in [each.where for each in manifest.run.steps]

    @pytest.mark.parametrize("through", [None, "universal", "dcp"])
    def test_becomes_the_same_file(
        self, through: str | None, checkpoint: Path, tmp_path: Path
    ) -> None:
        source = checkpoint
        if through is not None:
            source = tmp_path / through
            zckpt.convert(checkpoint, source, to=through)
        report = zckpt.convert(source, tmp_path / "out", to="gathered")
        file = tmp_path / "out" / ("last.ckpt" if through == "dcp" else "best.ckpt")
        assert [path.name for path in (tmp_path / "out").iterdir()] == [file.name]
        assert report["next"] == f'trainer.fit(module, ckpt_path="{file}")'
        assert report["left_out"] == []
        found, expected = ours(file), torch.load(checkpoint)
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert_same(found[key], value, key)
        assert zckpt.verify(tmp_path / "out", against=checkpoint)["differences"] == []

    def test_a_file_that_was_written_is_read_by_any_name(
        self, checkpoint: Path, tmp_path: Path
    ) -> None:
        zckpt.reshard(checkpoint, tmp_path / "out")
        (tmp_path / "out" / "best.ckpt").rename(tmp_path / "other.ckpt")
        assert zckpt.read(tmp_path / "other.ckpt").parameters == zckpt.read(checkpoint).parameters

    def test_items_with_the_rest_beside_them(self, checkpoint: Path, tmp_path: Path) -> None:
        """The keys and files of Lightning's sharded strategies."""
        report = zckpt.convert(checkpoint, tmp_path / "items", to="dcp", dp=2)
        assert report["next"] == f'trainer.fit(module, ckpt_path="{tmp_path / "items"}")'
        rest, saved = torch.load(tmp_path / "items" / "meta.pt"), torch.load(checkpoint)
        assert rest.keys() == saved.keys() - {"state_dict", "optimizer_states"}
        assert_same(rest["callbacks"], saved["callbacks"], "callbacks")
        items = FileSystemReader(tmp_path / "items").read_metadata().state_dict_metadata
        keys = {key.partition(".")[0] for key in items}
        assert keys == {"state_dict", "optimizer_0"}
        assert zckpt.verify(tmp_path / "items", against=checkpoint)["differences"] == []
        again = zckpt.reshard(tmp_path / "items", tmp_path / "again", dp=3)
        assert again["left_out"] == []
        assert_same(torch.load(tmp_path / "again" / "meta.pt"), rest, "meta.pt")

    def test_another_file_of_that_name_is_carried(self, checkpoint: Path, tmp_path: Path) -> None:
        zckpt.convert(checkpoint, tmp_path / "items", to="dcp")
        torch.save([1, 2], tmp_path / "items" / "meta.pt")
        zckpt.reshard(tmp_path / "items", tmp_path / "again")
        assert torch.load(tmp_path / "again" / "meta.pt") == [1, 2]

    def test_a_flipped_bit_beside_items(self, checkpoint: Path, tmp_path: Path) -> None:
        zckpt.convert(checkpoint, tmp_path / "items", to="dcp")
        entry = zckpt.read(tmp_path / "items").entries["client_state.callbacks.Noise", "state"]
        extent = entry.fragments[0].extent
        assert Path(extent.file).name == "meta.pt"
        data = bytearray(Path(extent.file).read_bytes())
        data[extent.offset] ^= 1
        Path(extent.file).write_bytes(data)
        assert not zckpt.verify(tmp_path / "items")["equal"]

    def test_a_model_that_another_program_saved_again(
        self, checkpoint: Path, tmp_path: Path
    ) -> None:
        """What zckpt stated of the file's names is no longer true."""
        zckpt.reshard(checkpoint, tmp_path / "out")
        content = torch.load(tmp_path / "out" / "best.ckpt")
        content["zckpt"]["frozen"] = ["gone.weight"]
        content["zckpt"]["buffers"] = []
        torch.save(content, tmp_path / "edited.ckpt")
        manifest = zckpt.read(tmp_path / "edited.ckpt")
        assert manifest.buffers == zckpt.read(checkpoint).buffers


class Config:
    """A class of a program; OmegaConf's containers know their parents, too."""

    def __init__(self, parent: Config | None = None) -> None:
        self.width, self.parent = 16, parent
        self.inner = Config(self) if parent is None else None


class TestObjects:
    """Hyper-parameters of a class that zckpt does not write unasked."""

    @pytest.mark.parametrize("to", ["gathered", "dcp"])
    @pytest.mark.parametrize("config", [Config(), Config(Config())], ids=["cycle", "chain"])
    def test_are_named(self, config: Config, to: str, tmp_path: Path, zckpt: Zckpt) -> None:
        if config.parent is not None:
            config.parent.inner = None
        source, target = tmp_path / "best.ckpt", tmp_path / "out"
        run = run_of(trained_pair(named=True))
        run["hyper_parameters"] = {"config": config, "width": 16}
        torch.save(run, source)
        key, name = "client_state.hyper_parameters.config", f"{Config.__module__}.Config"
        written = zckpt("convert", source, target, "--to", to)
        assert written.code == 0
        [line] = [line for line in written.out.splitlines() if line.startswith("left out: ")]
        assert line.startswith(f"left out: {key}: ")
        assert ("refers to itself" in line) == (config.parent is None)
        compared = zckpt("verify", target, "--against", source)
        assert compared.code == 3
        assert f"{key}: only in {source}" in compared.out
        admitted = zckpt("reshard", source, tmp_path / "again", "--allow-object", name)
        assert ("left out" in admitted.out) == (config.parent is None)
        if config.parent is not None:
            saved = torch.load(tmp_path / "again" / "best.ckpt", weights_only=False)
            assert saved["hyper_parameters"]["config"].parent.width == 16


class TestSeveralOptimizers:
    """A GAN: two optimizers of one model, each of a part of it."""

    @pytest.fixture
    def checkpoint(self, tmp_path: Path) -> Path:
        model = nn.ModuleDict({"generator": nn.Linear(4, 8), "critic": nn.Linear(8, 1)})
        pairs = []
        for part in model.values():
            optimizer = torch.optim.Adam(part.parameters())
            part(torch.ones(1, part.in_features)).sum().backward()
            optimizer.step()
            pairs.append((model, optimizer))
        torch.save(run_of(*pairs), tmp_path / "gan.ckpt")
        return tmp_path / "gan.ckpt"

    def test_are_named(self, checkpoint: Path, zckpt: Zckpt) -> None:
        inspected = zckpt("inspect", checkpoint)
        assert inspected.code == 0
        assert "state_dict (optimizer_states.0, optimizer_states.1)" in inspected.out
        assert zckpt("verify", checkpoint).code == 0

    @pytest.mark.parametrize("place", [0, 1])
    def test_one_keeps_its_place(self, place: int, checkpoint: Path, tmp_path: Path) -> None:
        with pytest.raises(errors.ZckptError) as raised:
            zckpt.reshard(checkpoint, tmp_path / "out")
        assert "--root state_dict=optimizer_states.0" in raised.value.hint
        root = f"state_dict=optimizer_states.{place}"
        report = zckpt.reshard(checkpoint, tmp_path / "out", root=root)
        assert f"optimizer_states.{1 - place}: " in report["left_out"][0]["message"]
        [warning] = [line for line in texts(report["warnings"]) if line.startswith("Lightning")]
        assert f"a module that also has optimizer_states.{1 - place} cannot resume" in warning
        states = ours(tmp_path / "out" / "gan.ckpt")["optimizer_states"]
        assert states[:place] == [None] * place
        expected = torch.load(checkpoint)["optimizer_states"][place]
        assert_same(states[place]["state"], expected["state"], "state")
        zckpt.convert(checkpoint, tmp_path / "items", to="dcp", root=root)
        items = FileSystemReader(tmp_path / "items").read_metadata().state_dict_metadata
        assert any(key.startswith(f"optimizer_{place}.") for key in items)
        zckpt.convert(tmp_path / "items", tmp_path / "again", to="gathered")
        again = ours(tmp_path / "again" / "last.ckpt")["optimizer_states"]
        assert_same(again[place]["state"], expected["state"], "state")


class TestOneFile:
    """Files of Fabric, and of programs that save everything with torch.save."""

    def test_keys_and_name_stay(self, tmp_path: Path) -> None:
        model, optimizer = trained_pair()
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        torch.save({**states, "iter": 3, "args": {"lr": [0.1]}}, tmp_path / "ckpt.pt")
        report = zckpt.reshard(tmp_path / "ckpt.pt", tmp_path / "out")
        assert report["next"] == f'torch.load("{tmp_path / "out" / "ckpt.pt"}")'
        found = ours(tmp_path / "out" / "ckpt.pt")
        assert {key: found[key] for key in ("iter", "args")} == {"iter": 3, "args": {"lr": [0.1]}}
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        assert zckpt.verify(tmp_path / "out", against=tmp_path / "ckpt.pt")["differences"] == []

    def test_what_is_stated_of_one_model_is_not_said_of_another(self, tmp_path: Path) -> None:
        """The other model was put beside it by a program."""
        state = {"fc.weight": torch.rand(3, 2), "bn.running_mean": torch.rand(3)}
        models = {"generator": state, "critic": {k: v + 1 for k, v in state.items()}}
        torch.save({**models, "epoch": 1}, tmp_path / "gan.pt")
        zckpt.reshard(tmp_path / "gan.pt", tmp_path / "out", root="generator")
        content = torch.load(tmp_path / "out" / "gan.pt")
        assert content["zckpt"]["model"] == ["generator"]
        content["zckpt"].update(buffers=[], frozen=["fc.weight"])
        content["critic"] = models["critic"]
        torch.save(content, tmp_path / "both.pt")
        buffers = [
            list(zckpt.read(tmp_path / "both.pt", root=root).buffers)
            for root in ("generator", "critic")
        ]
        assert buffers == [[], ["bn.running_mean"]]

    def test_two_models_for_accelerate(self, tmp_path: Path) -> None:
        """Models that have numbers become numbered files; one of them stays one file."""
        content: dict[str, Any] = {}
        for end in ("", "_1"):
            model, optimizer = trained_pair(named=True)
            content[f"model{end}"] = model.state_dict()
            content[f"optimizer{end}"] = optimizer.state_dict()
        torch.save(content, tmp_path / "both.pt")
        with pytest.raises(errors.AmbiguousCheckpoint) as raised:
            zckpt.reshard(tmp_path / "both.pt", tmp_path / "out")
        assert "--dialect accelerate" in raised.value.hint
        root = "model_1=optimizer_1"
        zckpt.reshard(tmp_path / "both.pt", tmp_path / "one", root=root)
        found = ours(tmp_path / "one" / "both.pt")
        assert found.keys() == {"model_1", "optimizer_1"}
        assert_same(found["model_1"], content["model_1"], "model_1")
        zckpt.convert(tmp_path / "both.pt", tmp_path / "out", to="gathered", dialect="accelerate")
        names = {"pytorch_model_fsdp.bin", "optimizer.bin", "extra.pt"}
        names |= {numbered(name, 1) for name in names}
        assert {path.name for path in (tmp_path / "out").iterdir()} == names
        assert zckpt.verify(tmp_path / "out", against=tmp_path / "both.pt")["differences"] == []

    def test_weights_alone_are_a_state_dict(self, tmp_path: Path) -> None:
        model, optimizer = trained_pair()
        torch.save(run_of((model, optimizer)), tmp_path / "x.ckpt")
        zckpt.convert(tmp_path / "x.ckpt", tmp_path / "out", to="gathered", weights_only=True)
        model.load_state_dict(torch.load(tmp_path / "out" / "model.pt"))


# -- real Lightning


@pytest.fixture(scope="session")
def saved(once: Once) -> Saved:
    """What Lightning saved under a strategy, on a number of ranks."""

    def save(kind: str, world: int) -> Path:
        name, stage = f"lightning_{kind}", 2 if kind == "deepspeed" else 0
        return once(name, world, lambda root: trainers.train(name, root, stage, world))

    return save


def assert_goes_on(saved: Path, kind: str, path: Path, world: int, root: Path) -> None:
    """Lightning's own resume has the losses of the run that was not interrupted."""
    oracle = torch.load(saved.parents[1] / "oracle.pt", weights_only=False)
    stage = 2 if kind == "deepspeed" else 0
    resumed = trainers.resume(f"lightning_{kind}", path, root / "resumed", stage, world)
    assert resumed["losses"] == pytest.approx(oracle["losses"], rel=0, abs=1e-5)
    assert len(resumed["losses"]) == 5


WAYS = {  # strategy of the run that resumes: format and options of the target
    "ddp": ("gathered", {}),
    "fsdp": ("dcp", {}),
    "deepspeed": ("deepspeed", {"config": CONFIG}),
}


@pytest.mark.engines
@pytest.mark.parametrize(
    ("kind", "before", "world", "through"),
    [
        pytest.param("ddp", 2, 3, False, marks=pytest.mark.first),
        ("ddp", 2, 1, True),
        ("ddp", 1, 1, False),
        ("ddp", 1, 3, True),
        ("fsdp", 2, 1, False),
        ("fsdp", 1, 3, True),
        ("deepspeed", 2, 1, True),
        ("deepspeed", 1, 3, False),
    ],
)
def test_lightning_goes_on(
    kind: str, before: int, world: int, through: bool, saved: Saved, tmp_path: Path
) -> None:
    """From a .ckpt of DDP or of one process, by way of a universal checkpoint or not."""
    checkpoint = saved("ddp", before)
    oracle = torch.load(checkpoint.parents[1] / "oracle.pt", weights_only=False)
    names: dict[str, Any] = {"param_names": names_of(oracle)}
    source, (format, options) = checkpoint, WAYS[kind]
    if through:
        source = tmp_path / "universal"
        zckpt.convert(checkpoint, source, **names)
        names = {}
    if kind != "ddp":
        options = {**options, "dp": world}
    target = tmp_path / "target"
    zckpt.convert(source, target, to=format, **options, **names)
    assert zckpt.verify(target, against=source)["differences"] == []
    path = target / checkpoint.name if kind == "ddp" else target
    assert_goes_on(checkpoint, kind, path, world, tmp_path)


@pytest.mark.engines
@pytest.mark.parametrize(
    ("kind", "to", "world"),
    [("fsdp", "ddp", 3), ("deepspeed", "ddp", 1), ("fsdp", "fsdp", 3), ("deepspeed", "fsdp", 3)],
)
def test_lightning_changes_its_strategy(
    kind: str, to: str, world: int, saved: Saved, tmp_path: Path
) -> None:
    directory, (format, _) = saved(kind, 2), WAYS[to]
    options = {"dp": world} if format == "dcp" else {}
    report = zckpt.convert(directory, tmp_path / "target", to=format, **options)
    path = tmp_path / "target" / ("last.ckpt" if to == "ddp" else "")
    assert report["next"] == f'trainer.fit(module, ckpt_path="{path}")'
    assert_goes_on(directory, to, path, world, tmp_path)


@pytest.mark.engines
def test_manual_optimization_with_two_optimizers(tmp_path: Path, zckpt: Zckpt) -> None:
    import lightning.pytorch as pl

    class Gan(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.generator, self.critic = nn.Linear(4, 8), nn.Linear(8, 1)

        def training_step(self, batch: torch.Tensor, _: int) -> None:
            for optimizer in self.optimizers():
                loss = self.critic(self.generator(batch)).square().mean()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()

        def configure_optimizers(self) -> list[torch.optim.Optimizer]:
            parts = (self.generator, self.critic)
            return [torch.optim.Adam(part.parameters(), lr=0.1) for part in parts]

    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_steps=4, enable_checkpointing=False, **quiet
    )
    batches: Any = torch.utils.data.DataLoader(torch.rand(16, 4), 4)
    trainer.fit(Gan(), batches)
    trainer.save_checkpoint(tmp_path / "gan.ckpt")
    inspected = zckpt("inspect", tmp_path / "gan.ckpt")
    assert inspected.code == 0
    assert "state_dict (optimizer_states.0, optimizer_states.1)" in inspected.out
    verified = zckpt("verify", tmp_path / "gan.ckpt")
    assert verified.code == 0
    assert "12 tensors (4 param, 4 exp_avg, 4 exp_avg_sq)" in verified.out
    words = ("reshard", tmp_path / "gan.ckpt", tmp_path / "out")
    assert zckpt(*words).code == 1
    assert zckpt(*words, "--root", "state_dict=optimizer_states.1").code == 0


@pytest.mark.engines
def test_fabric_goes_on(tmp_path: Path) -> None:
    from lightning import Fabric

    fabric, batch = Fabric(accelerator="cpu", devices=1), torch.rand(8, 3)

    def build(seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
        pair = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=0.1))
        return {"model": pair[0], "optimizer": pair[1], "iter": 0}

    def train(state: dict[str, Any]) -> list[float]:
        losses = []
        for _ in range(3):
            loss = state["model"](batch).square().mean()
            state["optimizer"].zero_grad()
            fabric.backward(loss)
            state["optimizer"].step()
            state["iter"] += 1
            losses.append(loss.item())
        return losses

    state = build(0)
    train(state)
    fabric.save(tmp_path / "ckpt.pt", state)
    expected = train(state)
    zckpt.reshard(tmp_path / "ckpt.pt", tmp_path / "out")
    resumed = build(1)
    rest = fabric.load(tmp_path / "out" / "ckpt.pt", resumed)
    assert (resumed["iter"], [*rest]) == (3, ["zckpt"])
    assert train(resumed) == expected
