"""Forwards straight from a checkpoint's files: the same values, in a part of the memory."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from msgspec.structs import replace
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zckpt
from zckpt import probe
from zckpt.core.passes.pieces import ElementReader
from zckpt.errors import CorruptCheckpoint, MissingData
from zckpt.probe import prefetch, runs, streaming
from zckpt.probe.prefetch import THREAD

from .. import faults
from ..conftest import EXAMPLE, ROOT


class Example(nn.Module):
    """The model of examples/make_checkpoint.py."""

    running_mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(41, 19)
        self.fc1 = nn.Linear(19, 29)
        self.fc2 = nn.Linear(29, 19)
        self.frozen = nn.Linear(19, 19)
        self.register_buffer("running_mean", torch.zeros(19))
        self.head = nn.Linear(19, 41, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x - self.running_mean.to(x.dtype)
        x = x + self.fc2(torch.tanh(self.fc1(x)))
        logits: Tensor = self.head(x + self.frozen(x))
        return logits


TOKENS = torch.arange(12).view(3, 4)


def loaded(path: Path) -> Example:
    model = Example().bfloat16()
    model.running_mean = model.running_mean.float()
    model.load_state_dict(safetensors.torch.load_file(path / "model.safetensors"), strict=False)
    return model


@pytest.fixture
def universal(tmp_path: Path) -> Path:
    zckpt.convert(EXAMPLE, tmp_path / "universal")
    return tmp_path / "universal"


def on_meta(dtype: torch.dtype = torch.bfloat16) -> Example:
    with torch.device("meta"):
        model = Example().to(dtype)
        model.running_mean = model.running_mean.float()
    return model


@pytest.mark.parametrize("source", ["deepspeed", "universal", "stage 3"])
@pytest.mark.parametrize("meta", [True, False])
def test_outputs_are_those_of_the_loaded_model(
    source: str, meta: bool, universal: Path, tmp_path: Path
) -> None:
    expected = loaded(universal)(TOKENS)
    path = {"deepspeed": EXAMPLE, "universal": universal}.get(source, tmp_path / "z3")
    if source == "stage 3":  # it holds masters alone
        zckpt.reshard(EXAMPLE, path, dp=4, stage=3)
    model = on_meta() if meta else Example().bfloat16()
    model.running_mean = model.running_mean.float()
    before = {name: (id(p), p.device) for name, p in model.named_parameters()}
    with probe.stream(model, path), torch.no_grad():
        for _ in range(2):
            assert torch.equal(model(TOKENS), expected)
    assert {name: (id(p), p.device) for name, p in model.named_parameters()} == before
    assert not model._forward_hooks


def test_an_fp32_model_takes_the_masters(universal: Path) -> None:
    masters = safetensors.torch.load_file(universal / "master.safetensors")
    model = on_meta(torch.float32)
    seen = {}

    class Watch(probe.Subscriber):
        def post_forward_module(self, place: probe.Place, args: Any, output: Any) -> Any:
            seen[place.path] = {n: p.clone() for n, p in place.module.named_parameters()}
            return output

    with probe.stream(model, universal), probe.subscribe(model, Watch()), torch.no_grad():
        model(TOKENS)
    for module in ("fc1", "fc2"):
        assert torch.equal(seen[module]["weight"], masters[f"{module}.weight"])


def test_recording_within_streaming_sees_the_weights(universal: Path, tmp_path: Path) -> None:
    for name, path in (("a", EXAMPLE), ("b", universal)):
        model = on_meta()
        with (
            probe.stream(model, path),
            probe.record(model, tmp_path / name, step=7, parameters=True),
            torch.no_grad(),
        ):
            model(TOKENS)
    report = probe.compare(tmp_path / "a", tmp_path / "b")
    assert report["equal"]
    assert "crc32" in runs.read(tmp_path / "a").ranks[0][0].numbers


def test_a_failing_forward_leaves_the_model_as_it_was(universal: Path) -> None:
    model = on_meta()
    with (
        pytest.raises(IndexError),
        probe.stream(model, universal),
        torch.no_grad(),
    ):
        model(torch.tensor([[99]]))
    assert {p.device.type for p in model.parameters()} == {"meta"}


def test_after_a_failure_within_the_block_forwards_go_on(universal: Path) -> None:
    model = on_meta()
    with probe.stream(model, universal), torch.no_grad():
        for _ in range(2):
            with pytest.raises(IndexError):
                model(torch.tensor([[99]]))
        assert torch.equal(model(TOKENS), loaded(universal)(TOKENS))
        copied = copy.deepcopy(model)
        assert {n: p.shape for n, p in copied.named_parameters()} == {
            n: p.shape for n, p in model.named_parameters()
        }


def test_weights_are_released_after_a_failure(universal: Path) -> None:
    model = on_meta()
    with probe.stream(model, universal), torch.no_grad():
        with pytest.raises(IndexError):
            model(torch.tensor([[99]]))
        assert {p.device.type for p in model.parameters()} == {"meta"}


def test_a_failing_forward_leaves_no_thread_and_no_open_file(universal: Path) -> None:
    def opened() -> set[str]:
        return {os.readlink(path) for path in Path("/dev/fd").iterdir() if path.is_symlink()}

    model, before = on_meta(), opened()

    def run() -> None:
        with probe.stream(model, universal), torch.no_grad():
            model(TOKENS)
            assert any(thread.name.startswith(THREAD) for thread in threading.enumerate())
            assert any(str(universal) in path for path in opened())
            model(torch.tensor([[99]]))

    with pytest.raises(IndexError):
        run()
    assert not any(thread.name.startswith(THREAD) for thread in threading.enumerate())
    assert not any(str(universal) in path for path in opened() - before)


class Branches(nn.Module):
    """Which layers are called depends on the data; one is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(4, 4)
        self.shared = nn.Linear(4, 4)
        self.maybe = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        positive = x.sum() > 0
        x = self.shared(self.norm(x))
        if positive:
            x = self.maybe(x)
        y: Tensor = self.last(self.shared(x))
        return y


@pytest.mark.parametrize("little", [1, prefetch.LITTLE])  # one module ahead, or all
def test_another_path_in_each_forward(
    little: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefetch, "LITTLE", little)
    torch.manual_seed(0)
    filled = Branches()
    manifest = manifest_of(dict(filled.state_dict()), tmp_path)
    with torch.device("meta"):
        model = Branches()
    with torch.no_grad(), probe.stream(model, manifest):
        for sign in (1, 1, -1, -1, 1, -1, 1, 1):
            x = sign * torch.rand(3, 4)
            assert torch.equal(model(x), filled(x))


@pytest.mark.parametrize("reentrant", [True, False])
def test_forwards_that_the_backward_repeats(reentrant: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    filled = nn.Sequential(*(nn.Linear(256, 256) for _ in range(3)))
    manifest = manifest_of(dict(filled.state_dict()), tmp_path)
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(3)))
    gradients = []

    def run(layers: nn.Module) -> None:
        x = torch.linspace(-1, 1, 256).requires_grad_()
        y = x
        for layer in layers.children():
            y = checkpoint(layer, y, use_reentrant=reentrant)
        y.sum().backward()
        assert x.grad is not None
        gradients.append(x.grad)

    run(filled)
    with probe.stream(model, manifest):
        for _ in range(2):
            run(model)
            assert {p.device.type for p in model.parameters()} == {"meta"}
    for gradient in gradients[1:]:
        assert torch.equal(gradient, gradients[0])


def test_a_part_of_a_weight_keeps_its_values(tmp_path: Path) -> None:
    class Row(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return self.weight[1]

    filled = nn.Sequential(*(Row(256, 256) for _ in range(3)))
    manifest = manifest_of(dict(filled.state_dict()), tmp_path)
    with torch.device("meta"):
        model = nn.Sequential(*(Row(256, 256) for _ in range(3)))
    with torch.no_grad():
        with probe.stream(model, manifest):
            rows = [layer(torch.ones(1)) for _ in range(3) for layer in model]
        for row, layer in zip(rows, [*filled] * 3, strict=True):
            assert torch.equal(row, layer.weight[1])


@pytest.mark.parametrize("needed", [True, False])
def test_errors_of_the_thread_are_raised(
    needed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = threading.Semaphore(0)
    read = prefetch.Prefetcher._read_piece

    def noted(prefetcher: prefetch.Prefetcher, *piece: Any, ahead: bool) -> None:
        begun.release()
        read(prefetcher, *piece, ahead)

    monkeypatch.setattr(prefetch.Prefetcher, "_read_piece", noted)
    manifest = cut_in_the_second_layer(tmp_path)
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(2)))
    ended = False

    def run() -> None:
        nonlocal ended
        with probe.stream(model, manifest), torch.no_grad():
            model[0](torch.ones(1, 256))
            assert begun.acquire(timeout=30)
            assert begun.acquire(timeout=30)  # of the second layer, which nobody has called
            if needed:
                model[1](torch.ones(1, 256))
            ended = True

    with pytest.raises(CorruptCheckpoint, match="inside a tensor"):
        run()
    assert ended is not needed


def test_every_forward_raises_the_error_of_its_weights(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(2)))
    with probe.stream(model, cut_in_the_second_layer(tmp_path)), torch.no_grad():
        for _ in range(2):
            with pytest.raises(CorruptCheckpoint, match="inside a tensor"):
                model(torch.ones(1, 256))
            time.sleep(0.1)  # it is read ahead again, and the end does not raise a third time


def cut_in_the_second_layer(folder: Path) -> Any:
    """Two square layers of 256; the file ends too early."""
    manifest = manifest_of(
        dict(nn.Sequential(*(nn.Linear(256, 256) for _ in range(2))).state_dict()), folder
    )
    os.truncate(folder / "raw", 4 * 257 * 256 + 100)
    return manifest


def test_damage_is_found_on_the_way(example: Path) -> None:
    faults.change(example, "fc1.weight/param", faults.flip(17, 2, 6), mended=False)
    model = on_meta()
    with pytest.raises(CorruptCheckpoint), probe.stream(model, example), torch.no_grad():
        model(TOKENS)


def test_names_that_do_not_match_are_listed(universal: Path) -> None:
    model = nn.ModuleDict({"fc1": nn.Linear(19, 29), "other": nn.Linear(2, 2)})
    with pytest.raises(MissingData) as raised, probe.stream(model, universal):
        pass
    assert "other.weight" in raised.value.message
    assert "embedding.weight" in raised.value.message


def test_shapes_that_do_not_match(universal: Path) -> None:
    model = nn.ModuleDict({"fc1": nn.Linear(19, 30)})
    with pytest.raises(MissingData, match="shape"), probe.stream(model, universal):
        pass


def test_prefixes_of_engines_are_seen_through(universal: Path) -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            with torch.device("meta"):
                self.model = Example().bfloat16()
            self.model.running_mean = torch.zeros(19)

        def forward(self, tokens: Tensor) -> Any:
            return self.model(tokens)

    with probe.stream(model := Wrapped(), universal), torch.no_grad():
        assert torch.equal(model(TOKENS), loaded(universal)(TOKENS))


def test_names_may_be_rewritten(universal: Path) -> None:
    with torch.device("meta"):
        model = nn.ModuleDict({"first": nn.Linear(19, 29)}).bfloat16()
    weights = safetensors.torch.load_file(universal / "model.safetensors")
    with probe.stream(model, universal, rename=[("^fc1", "first")]), torch.no_grad():
        x = torch.ones(1, 19, dtype=torch.bfloat16)
        expected = nn.functional.linear(x, weights["fc1.weight"], weights["fc1.bias"])
        assert torch.equal(model["first"](x), expected)


def test_a_tied_weight_that_is_held_once(universal: Path) -> None:
    manifest = zckpt.read(universal)
    owner = manifest.parameters["embedding.weight"]
    manifest.parameters["embedding.weight"] = replace(owner, aliases=())
    with probe.stream(model := on_meta(), manifest), torch.no_grad():
        assert torch.equal(model(TOKENS), loaded(universal)(TOKENS))


class Tied(nn.Module):
    """Three layers between an embedding and the output layer that has its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(4096, 512)
        self.layers = nn.Sequential(*(nn.Linear(512, 512) for _ in range(3)))
        self.head = nn.Linear(512, 4096, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.layers(self.embedding(tokens)))
        return logits


@pytest.mark.parametrize("stays", [True, False])
def test_a_tied_weight_is_read_once_if_there_is_memory_for_it(
    stays: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    filled = Tied()
    if not stays:  # two other modules need the memory of the two largest ones
        filled.layers[1] = nn.Sequential(nn.Linear(512, 8192), nn.Linear(8192, 512))
    manifest = manifest_of(dict(filled.state_dict()), tmp_path)
    model = copy.deepcopy(filled).to("meta")
    model.head.weight = model.embedding.weight  # `to` has separated them
    read: list[str] = []
    plain = ElementReader.read

    def noted(reader: ElementReader, requests: Any, view: memoryview) -> None:
        read.extend(request.entry.parameter for request in requests)
        plain(reader, requests, view)

    monkeypatch.setattr(ElementReader, "read", noted)
    with probe.stream(model, manifest), torch.no_grad():
        for _ in range(3):
            assert torch.equal(model(TOKENS), filled(TOKENS))
    times = read.count("embedding.weight")
    assert times == 1 if stays else times in (6, 7)  # perhaps ahead, for a fourth forward


@pytest.mark.parametrize("damaged", [False, True])
def test_a_large_weight_is_read_and_checked_in_pieces(
    damaged: bool, example: Path, universal: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streaming, "SCRATCH", 1000)  # bytes, fewer than the embedding has
    expected = loaded(universal)(TOKENS)
    if damaged:
        faults.change(example, "embedding.weight/param", faults.flip(700, 2, 6), mended=False)
    model = on_meta()
    with (
        pytest.raises(CorruptCheckpoint) if damaged else nullcontext(),
        probe.stream(model, example),
        torch.no_grad(),
    ):
        for _ in range(2):
            output = model(TOKENS)  # the CRC-32 is that of several weights
            assert damaged or torch.equal(output, expected)


def test_compiled_modules(universal: Path) -> None:
    expected = loaded(universal)(TOKENS)
    model = on_meta()
    compiled = torch.compile(model.fc1, backend="eager")
    model.fc1 = compiled
    with probe.stream(model, universal), torch.no_grad():
        assert torch.equal(model(TOKENS), expected)
    with probe.stream(torch.compile(on_meta(), backend="eager"), universal):
        pass


def test_modules_whose_children_are_not_called(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), nn.MultiheadAttention(8, 2)
    )
    model.forward = lambda x: model[1](*[model[0](x)] * 3)[0]  # type: ignore[method-assign]
    model.eval()
    safetensors.torch.save_file(model.state_dict(), tmp_path / "m.safetensors")
    x = torch.randn(2, 3, 8)
    with torch.no_grad():
        expected = model(x)
        manifest = manifest_of(model.state_dict(), tmp_path)
        for parameter in model.parameters():
            parameter.zero_()
        with probe.stream(model, manifest):
            assert torch.equal(model(x), expected)
            assert torch.equal(model(x), expected)


class Shared(nn.Module):
    """An output layer that uses the embedding's weight, without a separate module."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.scales = nn.ParameterList([torch.ones(4)])
        self.shifts = nn.ParameterDict({"last": torch.zeros(4)})

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens) * self.scales[0] + self.shifts["last"]
        return nn.functional.linear(hidden, self.embedding.weight)


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_weights_of_modules_that_are_not_called(device: str, tmp_path: Path) -> None:
    filled = Shared()
    for parameter in filled.parameters():
        nn.init.normal_(parameter)
    manifest = manifest_of(dict(filled.state_dict()), tmp_path)
    with torch.device(device):
        model = Shared()
    before = {name: id(p) for name, p in model.named_parameters()}
    with (  # torch 2.13 gives F.linear with a weight on meta numbers from anywhere
        torch.no_grad(),
        pytest.raises(MissingData, match=r"embedding\.weight is used outside of a call"),
        probe.stream(model, manifest),
    ):
        model(TOKENS % 10)
    assert {name: id(p) for name, p in model.named_parameters()} == before
    with torch.no_grad(), probe.stream(model, manifest, whole=[Shared]):
        assert torch.equal(model(TOKENS % 10), filled(TOKENS % 10))


def manifest_of(state: dict[str, Tensor], folder: Path) -> Any:
    from ..core.test_statistics import manifest_of as manifest_of_tensors

    return manifest_of_tensors(folder, {f"{name}/param": tensor for name, tensor in state.items()})


LARGE = """
import resource, sys, torch
from torch import nn
from zckpt import probe
torch.set_num_threads(1)
layers, width, path, how = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
with torch.device("meta" if how == "stream" else "cpu"):
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
x = torch.linspace(-1, 1, 4 * width).view(4, width)
def peak():
    with open("/proc/self/status") as file:
        return int(next(line for line in file if line.startswith("VmHWM")).split()[1]) << 10
if how == "load":
    import safetensors.torch
    model.load_state_dict(safetensors.torch.load_file(path + "/model.safetensors"))
    with torch.no_grad():
        y = model(x)
else:
    import zckpt.probe.streaming
    with torch.no_grad():
        nn.Linear(width, width)(x)  # what torch itself needs for the largest module
        before = peak()
        with probe.stream(model, path):
            y = model(x)
    print(peak() - before)
torch.save(y, sys.argv[5])
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Weights of 32 layers, 4 MiB each: DeepSpeed ZeRO-3 at dp 4, universal, and as weights."""
    from ..engines import wide

    return wide.checkpoints(tmp_path_factory.mktemp("large"), layers=32, width=1024)


@pytest.mark.engines
def test_memory_is_that_of_two_modules(large: dict[str, Path], tmp_path: Path) -> None:
    def run(path: Path, how: str) -> tuple[Tensor, int]:
        output = tmp_path / "y.pt"
        words = [sys.executable, "-c", LARGE, "32", "1024", str(path), how, str(output)]
        ended = subprocess.run(
            words, check=True, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)}
        )
        return torch.load(output), int(ended.stdout or 0)

    expected, _ = run(large["weights"], "load")
    whole = 32 * 1025 * 1024 * 4
    for name in ("zero3", "universal"):
        output, grown = run(large[name], "stream")
        assert torch.equal(output, expected)
        assert grown < whole / 4, (name, grown)  # 1.3 layers as a rule; the allocator keeps some


def test_the_checkpoint_may_be_read_by_the_caller(universal: Path) -> None:
    with probe.stream(on_meta(), zckpt.read(universal), device="cpu"):
        pass
