"""Models in torch's wrappers: what zckpt compares, and what the plain model loads.

torch.compile, checkpoint_wrapper, FSDP1, DataParallel and AveragedModel give the names; the judge
is the same model without them, trained on the same numbers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file
from torch import distributed, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.optim.swa_utils import AveragedModel

import zckpt
from zckpt.core.checkpoint.manifest import Manifest
from zckpt.naming.names import canonical, names_of, renamed, respelled, without_words
from zckpt.reading import alike

from ..conftest import EXAMPLE, needs, texts

compiled = partial(torch.compile, backend="eager")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(6, 12), nn.LayerNorm(12), nn.Linear(12, 6)
        self.register_buffer("scale", torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.norm(self.up(x)).relu()) * self.scale


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(5, 6), nn.Linear(6, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def of_blocks(change: Callable[[int, nn.Module], Any]) -> Callable[[Net], nn.Module]:
    def wrap(model: Net) -> nn.Module:
        for number in (1, 2):
            model.blocks[number] = change(number, model.blocks[number])
        return model

    return wrap


def both(number: int, block: nn.Module) -> Any:
    """Either wrapper inside of the other."""
    wrapped = checkpoint_wrapper(compiled(block) if number == 1 else block)
    return wrapped if number == 1 else compiled(wrapped)


WRAPPED: dict[str, Callable[[Net], Any]] = {
    "compiled blocks": of_blocks(lambda _, block: compiled(block)),
    "checkpointed blocks": of_blocks(lambda _, block: checkpoint_wrapper(block)),
    "both": of_blocks(both),
    "compiled": compiled,
    "data parallel": nn.DataParallel,
    "compiled in data parallel": lambda model: nn.DataParallel(compiled(model)),
    "data parallel of compiled blocks": lambda model: nn.DataParallel(
        WRAPPED["compiled blocks"](model)
    ),
}


def trained(wrap: Callable[[Net], Any] = lambda model: model) -> dict[str, Any]:
    """What a program saves after three updates, and the names of its optimizer's parameters."""
    torch.manual_seed(0)
    model = wrap(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for number in range(3):
        numbers = torch.randn(8, 5, generator=torch.Generator().manual_seed(number))
        model(numbers).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    names = [name for name, _ in model.named_parameters()]
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "names": names}


def saved(state: dict[str, Any], folder: Path, form: str) -> Path:
    """The state as one file, or as a directory of torch.distributed.checkpoint."""
    folder.mkdir(parents=True)
    state = {key: state[key] for key in ("model", "optimizer")}
    if form == "file":
        torch.save(state, folder / "run.pt")
        return folder / "run.pt"
    dcp.save(state, checkpoint_id=str(folder / "dcp"), no_dist=True)
    return folder / "dcp"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    state = trained()
    return state, saved(state, tmp_path_factory.mktemp("plain") / "run", "file")


def assert_loads(weights: dict[str, torch.Tensor], plain: dict[str, Any]) -> None:
    """Torch itself takes the names, and the values are those of the plain run."""
    model = Net()
    model.load_state_dict(weights)
    assert all(torch.equal(model.state_dict()[n], value) for n, value in plain["model"].items())


@pytest.mark.parametrize("form", ["file", "dcp"])
@pytest.mark.parametrize("kind", WRAPPED)
def test_wrappers(kind: str, form: str, plain: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    state, other = trained(WRAPPED[kind]), plain[1]
    source = saved(state, tmp_path / "run", form)
    named = {"param_names": state["names"]}
    is_wrapped = [*state["model"]] != [*plain[0]["model"]]
    for pair in ((source, other), (other, source)):
        report = zckpt.verify(*pair, **named)
        assert report["equal"], (report["problems"][:2], report["states"], report["groups"])
        assert is_wrapped == any("which wrappers add" in line for line in texts(report["notes"]))
        report = zckpt.diff(*pair, **named)
        assert report["equal"]
        assert is_wrapped == any("which wrappers add" in line for line in texts(report["notes"]))
    report = zckpt.convert(source, tmp_path / "weights", weights_only=True)
    assert_loads(load_file(tmp_path / "weights" / "model.safetensors"), plain[0])
    assert is_wrapped == any("which wrappers add" in line for line in texts(report["warnings"]))
    zckpt.convert(source, tmp_path / "universal", **named)
    zckpt.convert(tmp_path / "universal", tmp_path / "later", weights_only=True)
    assert_loads(load_file(tmp_path / "later" / "model.safetensors"), plain[0])
    # a source of the same form keeps its names; another one has those of the plain model
    zckpt.convert(source, tmp_path / "gathered", to="gathered", **named)
    if form == "file":
        kept = torch.load(tmp_path / "gathered" / "run.pt", weights_only=True)["model"]
        assert [*kept] == [*state["model"]]
    else:
        assert_loads(torch.load(tmp_path / "gathered" / "model.pt", weights_only=True), plain[0])
    assert zckpt.verify(tmp_path / "gathered", other, **named)["equal"]
    gathered = zckpt.verify(source, tmp_path / "universal", gather=True, device="cpu", **named)
    assert gathered["equal"]


@pytest.mark.parametrize("kind", ["compiled blocks", "checkpointed blocks", "both"])
def test_other_targets_keep_the_names_of_the_program(kind: str, tmp_path: Path) -> None:
    needs("h5py")
    state = trained(WRAPPED[kind])
    source = saved(state, tmp_path / "run", "dcp")
    weights = {name for name in state["model"] if not name.endswith(".scale")}
    for to in ("universal", "dcp", "deepspeed", "onnxruntime"):
        zckpt.convert(source, tmp_path / to, to=to, param_names=state["names"])
        assert weights <= zckpt.read(tmp_path / to).parameters.keys(), to


def test_what_stands_before_all_names_is_removed_for_another_engine(tmp_path: Path) -> None:
    needs("h5py")
    rules = (("^", "module._orig_mod."), (r"fc1\.", "fc1._orig_mod."))
    zckpt.convert(EXAMPLE, tmp_path / "wrapped", rename=rules)
    zckpt.convert(tmp_path / "wrapped", tmp_path / "ort", to="onnxruntime")
    assert {"fc1._orig_mod.weight", "fc2.weight"} <= zckpt.read(tmp_path / "ort").parameters.keys()


def test_gathered_and_proof_against_a_plain_run(
    plain: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    state = trained(WRAPPED["compiled blocks"])
    source, named = saved(state, tmp_path / "run", "dcp"), {"param_names": state["names"]}
    for pair in ((source, plain[1]), (plain[1], source)):
        report = zckpt.verify(*pair, gather=True, device="cpu", **named)
        assert report["equal"], report["differences"][:2]
        assert any("_orig_mod" in line for line in texts(report["notes"]))
    proof = tmp_path / "proof.json"
    report = zckpt.verify(plain[1], source, **named)
    proof.write_text(json.dumps(report))
    for path in (source, plain[1]):
        report = zckpt.verify(path, proof, **named)
        assert report["equal"], (report["problems"], report["states"])


def test_a_changed_weight_is_found_behind_other_names(
    plain: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    state = trained(WRAPPED["compiled blocks"])
    state["model"]["blocks.1._orig_mod.up.weight"][3, 2] += 1
    source = saved(state, tmp_path / "run", "dcp")
    report = zckpt.verify(source, plain[1], param_names=state["names"])
    assert [line["tensor"] for line in report["differences"]] == ["blocks.1.up.weight/param"]


def test_averaged_model_keeps_its_root(tmp_path: Path) -> None:
    """It has `n_averaged` beside `module.weight`: not every name begins with `module.`."""
    model = WRAPPED["compiled blocks"](Net())
    averaged = AveragedModel(model)
    torch.save(averaged.state_dict(), tmp_path / "ema.pt")
    zckpt.convert(tmp_path / "ema.pt", tmp_path / "out", weights_only=True)
    weights = load_file(tmp_path / "out" / "model.safetensors")
    AveragedModel(Net()).load_state_dict(weights)
    assert {"n_averaged", "module.blocks.1.up.weight"} <= weights.keys()


@pytest.fixture
def one_rank() -> Iterator[None]:
    store = distributed.HashStore()
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_names_of_fsdp1(plain: tuple[dict[str, Any], Path], tmp_path: Path) -> None:
    def wrap(_: int, block: nn.Module) -> Any:
        return FullyShardedDataParallel(
            block,
            sharding_strategy=ShardingStrategy.NO_SHARD,
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )

    model = of_blocks(wrap)(Net())
    model.load_state_dict(plain[0]["model"])
    named = {name: value.detach() for name, value in model.named_parameters()}
    assert "blocks.1._fsdp_wrapped_module.up.weight" in named
    torch.save({**named, **dict(model.named_buffers())}, tmp_path / "named.pt")
    zckpt.convert(tmp_path / "named.pt", tmp_path / "out", weights_only=True)
    assert_loads(load_file(tmp_path / "out" / "model.safetensors"), plain[0])
    assert zckpt.verify(tmp_path / "named.pt", plain[1], weights_only=True)["equal"]


@pytest.mark.parametrize("form", ["file", "dcp"])
def test_export(form: str, tmp_path: Path) -> None:
    """What transformers loads is the model that was trained."""
    needs("transformers")
    import transformers

    config = transformers.GPT2Config(n_layer=2, n_embd=8, n_head=2, vocab_size=17, n_positions=9)
    model = transformers.GPT2LMHeadModel(config)
    config.architectures = ["GPT2LMHeadModel"]
    config.save_pretrained(tmp_path / "config")
    whole = {name: value.clone() for name, value in model.state_dict().items()}
    model.transformer.h[1] = compiled(model.transformer.h[1])
    (tmp_path / "run").mkdir()
    if form == "file":
        source = tmp_path / "run" / "run.pt"
        torch.save(model.state_dict(), source)
    else:
        source = tmp_path / "run" / "dcp"
        dcp.save({"model": model.state_dict()}, checkpoint_id=str(source), no_dist=True)
    report = zckpt.export(source, tmp_path / "out", config=tmp_path / "config")
    assert any("_orig_mod" in line for line in texts(report["warnings"]))
    loaded, info = transformers.GPT2LMHeadModel.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert all(torch.equal(value, whole[name]) for name, value in loaded.state_dict().items())


def test_rename_that_adds_the_words_keeps_them(tmp_path: Path) -> None:
    torch.save(Net().state_dict(), tmp_path / "plain.pt")
    rule = ((r"^blocks\.1\.", "blocks.1._orig_mod."),)
    zckpt.convert(tmp_path / "plain.pt", tmp_path / "out", weights_only=True, rename=rule)
    names = load_file(tmp_path / "out" / "model.safetensors")
    assert "blocks.1._orig_mod.up.weight" in names
    prefix = ((r"^", "net."),)
    torch.save(WRAPPED["compiled blocks"](Net()).state_dict(), tmp_path / "compiled.pt")
    zckpt.convert(tmp_path / "compiled.pt", tmp_path / "two", weights_only=True, rename=prefix)
    assert "net.blocks.1.up.weight" in load_file(tmp_path / "two" / "model.safetensors")


# -- names alone


def test_words_are_removed_name_by_name() -> None:
    names = ["a._orig_mod.w", "a.w", "b._orig_mod._checkpoint_wrapped_module.w", "c.w"]
    assert without_words(names) == {
        "a._orig_mod.w": "a._orig_mod.w",  # two names would become one
        "a.w": "a.w",
        "b._orig_mod._checkpoint_wrapped_module.w": "b.w",
        "c.w": "c.w",
    }


def test_respelled_names_stay_apart() -> None:
    assert respelled(["a._orig_mod.w", "b.w"], ["a.w", "b._orig_mod.w"]) == {
        "a._orig_mod.w": "a.w",
        "b.w": "b._orig_mod.w",
    }
    both_there = ["a._orig_mod.w", "a.w"]
    assert respelled(both_there, ["a._orig_mod.w"]) == {name: name for name in both_there}
    assert respelled(["a.w"], both_there) == {"a.w": "a.w"}


@pytest.fixture(scope="module")
def manifest() -> Manifest:
    return zckpt.read(EXAMPLE)


def test_roots_go_only_if_every_name_has_them(manifest: Manifest) -> None:
    some = renamed(manifest, [("^fc1", "module.fc1._orig_mod")])
    assert "module.fc1.weight" in canonical(some).parameters
    every = renamed(manifest, [("^", "module."), (r"^module\.fc1", "module.fc1._orig_mod")])
    assert canonical(every) == manifest


def test_both_sides_keep_words_that_both_have(manifest: Manifest) -> None:
    wrapped = renamed(manifest, [("^fc1", "fc1._orig_mod")])
    first, other, lines = alike(wrapped, wrapped)
    assert (names_of(first), names_of(other), lines) == (names_of(wrapped), names_of(wrapped), [])
    first, other, lines = alike(wrapped, manifest)
    assert names_of(first) == names_of(other) == names_of(manifest)
    assert texts(lines) == [
        "names are without _orig_mod, which wrappers add: fc1._orig_mod.weight, fc1._orig_mod.bias"
    ]
    second = replace(wrapped, buffers=(*wrapped.buffers, "fc1.weight"))
    assert "fc1._orig_mod.weight" in canonical(second).parameters
