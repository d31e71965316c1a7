"""The recorder changes nothing, bit for bit, and records everything once."""

from __future__ import annotations

import copy
import json
import math
import pickle
import subprocess
import sys
import weakref
import zlib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import BaseModelOutput

from zckpt import probe
from zckpt.core.checkpoint.dtypes import NUMBERS, TORCH_NAMES
from zckpt.errors import TargetExists, WrongOption
from zckpt.probe import runs
from zckpt.probe.statistics import Measurer, raw

from ..conftest import ROOT, texts
from ..core.test_statistics import random_numbers


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


@dataclass
class Held:
    hidden: Tensor
    count: int
    mask: Tensor | None = None


class Returns(nn.Module):
    """Returns its output in the container that `how` builds."""

    def __init__(self, how: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.how = how

    def forward(self, x: Tensor) -> Any:
        return self.how(self.linear(x))


class Awkward(nn.Module):
    """Everything that hooks may break."""

    def __init__(self, use_reentrant: bool | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.twice = nn.Linear(6, 6)
        self.alias = self.twice
        self.tuple = Returns(lambda y: (y, y.detach().argmax(-1)))
        self.named = Returns(lambda y: Pair(y, y * 2))
        self.mapping = Returns(lambda y: {"y": y, "none": None, "list": [y + 1]})
        self.dataclass = Returns(lambda y: Held(y, 3))
        self.huggingface = Returns(lambda y: BaseModelOutput(last_hidden_state=y))
        self.view = Returns(lambda y: y.view(-1, 3))
        self.identity = nn.Identity()
        self.inplace = nn.Sequential(nn.Linear(6, 6), nn.ReLU(inplace=True), nn.Linear(6, 6))
        self.dropout = nn.Dropout(0.3)
        self.parameter = Returns(lambda y: self.bias)
        self.bias = nn.Parameter(torch.randn(6))
        self.use_reentrant = use_reentrant

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens).mean(1)
        x = self.twice(torch.tanh(self.twice(x))) + self.alias(x)
        if self.use_reentrant is None:
            x = x + self.inplace(x)
        else:
            x = x + checkpoint(self.inplace, x, use_reentrant=self.use_reentrant)
        first, best = self.tuple(x)
        pair = self.named(first + best[:, None])
        outputs = self.mapping(pair.first + pair.second)
        outputs["y"].add_(1)  # in place, in a module's output
        data = self.dataclass(outputs["y"] + outputs["list"][0])
        hidden = self.huggingface(data.hidden).last_hidden_state
        viewed = self.view(hidden)
        viewed[0].mul_(2)  # in place, on a view of a view
        viewed = self.identity(viewed).relu_()
        x = probe.inspect("before dropout", viewed.view(-1, 6) * 1.5)
        return self.dropout(x) + self.parameter(x)


def of_modules(path: Path) -> list[runs.TensorRecord]:
    """The records of a run but its metrics and the model's inputs."""
    return [each for each in runs.read(path).ranks[0] if each.kind not in ("input", "metric")]


def train(model: nn.Module, autocast: bool = False, recorder: Any = None) -> list[Tensor]:
    """Losses, gradients and final weights of two updates with an evaluation."""
    torch.manual_seed(3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    values = []
    within = torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext()
    for _ in range(2):
        for _ in range(2):
            with within:
                loss = model(torch.randint(11, (4, 3))).float().square().mean()
            loss.backward()
            values.append(loss.detach())
        values += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        optimizer.zero_grad()
        if recorder is not None:
            recorder.next_step()
        model.eval()
        with torch.no_grad():
            values.append(model(torch.randint(11, (4, 3))))
        model.train()
    return [*values, *(p.detach() for p in model.parameters())]


def awkward(**options: Any) -> Awkward:
    torch.manual_seed(0)
    return Awkward(**options)


def hooks_of(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def lines(directory: Path) -> list[dict[str, Any]]:
    text = (directory / "rank_00000" / "records.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize("use_reentrant", [None, False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_values_and_gradients_are_the_same(
    use_reentrant: bool | None, autocast: bool, tmp_path: Path
) -> None:
    plain = train(awkward(use_reentrant=use_reentrant), autocast)
    model = awkward(use_reentrant=use_reentrant)
    with probe.record(model, tmp_path / "run", step=7, parameters=True) as recorder:
        recorded = train(model, autocast, recorder)
    assert hooks_of(model) == 0
    for one, other in zip(plain, recorded, strict=True):
        assert torch.equal(one, other)


def test_every_output_of_every_call(tmp_path: Path) -> None:
    model = awkward()
    with probe.record(model, tmp_path / "run", step=7, parameters=True) as recorder:
        train(model, recorder=recorder)
    records = runs.read(tmp_path / "run").ranks[0]
    assert sorted({record.step for record in records}) == [7, 8, 9]
    assert {record.batch for record in records if record.step == 7} == {"0", "1"}
    assert {record.batch for record in records if record.step == 8} == {"eval 0", "0", "1"}
    first = [record for record in records if (record.step, record.batch) == (7, "0")]
    forward = [record.key for record in first if record.kind == "forward"]
    assert len(forward) == len(set(forward))
    assert forward[:3] == ["embedding#0/out", "twice#0/out", "twice#1/out"]
    for key in (
        "twice#2/out",  # the same module by its other name
        "tuple#0/out[0]",
        "tuple#0/out[1]",
        "named#0/out[1]",
        "mapping#0/out.list[0]",
        "dataclass#0/out.hidden",
        "huggingface#0/out.last_hidden_state",
        "before dropout#0",
        "inplace.1#0/out",
        "(model)#0/out",
    ):
        assert key in forward
    backward = [record.key for record in first if record.kind == "backward"]
    assert set(forward) - set(backward) == {
        "tuple#0/out[1]",  # integers
        "parameter.linear#0/out",  # not used
        "view#0/out",  # a view that is changed in place leaves the graph
        "identity#0/out",
    }
    assert backward[0] == "(model)#0/out"
    names = [record.key for record in first if record.kind == "parameter"]
    assert names == sorted(names, key=names.index)
    assert set(names) == {name for name, _ in model.named_parameters()}
    evaluated = [record for record in records if record.batch == "eval 0"]
    assert {record.kind for record in evaluated} == {"input", "forward", "parameter"}


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_recomputed_forwards_are_recorded_once(use_reentrant: bool, tmp_path: Path) -> None:
    model = awkward(use_reentrant=use_reentrant)
    with probe.record(model, tmp_path / "checkpointed", step=0):
        train(model)
    model = awkward()
    with probe.record(model, tmp_path / "plain", step=0):
        train(model)
    report = probe.compare(tmp_path / "plain", tmp_path / "checkpointed")
    assert report["equal"], report


def test_gradients_are_those_of_the_values(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 2))
    x = torch.randn(5, 3)
    with probe.record(model, tmp_path / "run", step=0):
        model(x).square().sum().backward()
    hidden = (x @ model[0].weight.t() + model[0].bias).detach().requires_grad_()
    model[2](hidden.relu()).square().sum().backward()
    kept = {(line.kind, line.key): line for line in runs.read(tmp_path / "run").ranks[0]}
    line = kept["backward", "0#0/out"]
    assert line.numbers["norm"] == pytest.approx(hidden.grad.norm().item(), rel=1e-5)
    assert line.numbers["std"] == pytest.approx(hidden.grad.std().item(), rel=1e-5)


def test_a_second_backward_is_told_apart(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    with probe.record(model, tmp_path / "run", step=0):
        loss = model(torch.ones(1, 2)).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    keys = [record.key for record in of_modules(tmp_path / "run")]
    assert keys == ["(model)#0/out", "(model)#0/out", "(model)#0/out~1"]


@pytest.mark.parametrize("dtype", sorted(TORCH_NAMES))
@pytest.mark.parametrize("how", ["whole", "strided", "bucketed", "scalar", "empty", "one"])
def test_statistics_of_any_tensor(dtype: str, how: str) -> None:
    kind = getattr(torch, TORCH_NAMES[dtype])
    if dtype in NUMBERS:
        tensor = random_numbers(dtype, 600)
        if dtype in ("F32", "F16", "BF16", "F64"):
            tensor[3], tensor[5] = math.nan, -math.inf
    else:
        tensor = torch.randn(600).to(kind)
    tensor = {
        "whole": tensor.view(20, 30),
        "strided": tensor.view(20, 30).t(),
        "bucketed": tensor.view(10, 3, 20).transpose(0, 2),
        "scalar": tensor[4],
        "empty": tensor[:0].view(0, 4),
        "one": tensor[4:5],
    }[how]
    measurer = Measurer(bucket=50, samples=7, threads=1, on_cpu=False)
    about = measurer.describe(tensor)
    data = bytes(tensor.contiguous().view(-1).view(torch.uint8).tolist()) if tensor.numel() else b""
    assert about["crc32"] == f"{zlib.crc32(data):08x}"
    assert (about["dtype"], about["shape"]) == (dtype, list(tensor.shape))
    if dtype not in NUMBERS:
        assert about["samples"] == []
        return
    expected = tensor.contiguous().view(-1).tolist()
    step = -(-len(expected) // 7) if expected else 1
    for one, other in zip(about["samples"], expected[::step], strict=True):
        assert float(one) == other or math.isnan(other)
    finite = [float(value) for value in expected if math.isfinite(value)]
    assert about["nan"] == sum(math.isnan(value) for value in expected)
    if finite:
        exact = torch.tensor(finite, dtype=torch.float64)
        near = 1e-7 if dtype in ("F32", "F16", "BF16") else 1e-9  # sums in float32
        assert about["mean"] == pytest.approx(exact.mean().item(), rel=1e-9, abs=near)
        assert about["norm"] == pytest.approx(exact.norm().item(), rel=near)


@pytest.mark.parametrize("threads", [1, 3])
def test_large_tensors_are_measured_in_parts(threads: int) -> None:
    tensor = random_numbers("F32", 1_000_003)
    measurer = Measurer(bucket=1 << 20, samples=4, threads=threads, on_cpu=False)
    about = measurer.describe(tensor)
    measurer.close()
    assert about["crc32"] == f"{zlib.crc32(memoryview(tensor.numpy()).cast('B')):08x}"
    assert about["std"] == pytest.approx(tensor.double().std().item(), rel=1e-8)


@pytest.mark.parametrize("dtype", sorted(NUMBERS))
@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_numbers_where_the_tensor_is(device: str, dtype: str, bad: bool) -> None:
    """What torch reduces on a device is what numpy counts on the CPU."""
    from zckpt.probe.statistics import _measured, _on_its_device

    tensor = random_numbers(dtype, 3000)
    tensor[7] = 0
    if bad and dtype in ("F32", "F16", "BF16", "F64"):
        tensor[3], tensor[5], tensor[6] = math.nan, -math.inf, math.inf
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    reduced = _on_its_device(tensor.to(device), dtype)
    assert reduced is not None
    one, other = reduced.report(), _measured(raw(tensor), dtype)[1].report()
    for key in ("mean", "std", "norm", "rms"):
        assert one.pop(key) == pytest.approx(other.pop(key), rel=1e-7, abs=1e-7)
    assert one == other


@pytest.mark.gpu
def test_a_model_on_a_gpu(tmp_path: Path) -> None:
    """Measured there or copied, the numbers are the same, and only the copies have CRC-32s."""
    if not torch.cuda.is_available():
        pytest.skip("there is no GPU")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 5), nn.Tanh()).cuda()
    words = torch.randint(11, (4, 3), device="cuda")
    recorded = []
    for name, device in (("there", None), ("copied", "cpu")):
        with probe.record(model, tmp_path / name, step=0, parameters=True, device=device):
            model(words).sum().backward()
        model.zero_grad()
        recorded.append(of_modules(tmp_path / name))
        assert torch.cuda.get_device_name() == lines(tmp_path / name)[0]["device"]
    there, copied = recorded
    assert [each.key for each in there] == [each.key for each in copied]
    assert len(there) > 5
    for one, other in zip(there, copied, strict=True):
        assert "crc32" not in one.numbers
        assert other.numbers["crc32"]
        assert one.numbers["samples"] == other.numbers["samples"]
        for key in ("min", "max", "mean", "std", "norm"):
            assert one.numbers[key] == pytest.approx(other.numbers[key], rel=1e-6, abs=1e-7)


def test_bytes_keep_their_tensor() -> None:
    """A copy of a tensor of a GPU has no other name."""
    tensor = torch.arange(100.0)
    view, alive = raw(tensor), weakref.ref(tensor)
    del tensor
    assert alive() is not None
    assert view.cast("f").tolist() == [*range(100)]
    del view
    assert alive() is None


def test_a_device_without_memory_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from zckpt.probe.statistics import _on_its_device

    def fail(tensor: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "isfinite", fail)
    assert _on_its_device(torch.ones(3), "F32") is None


def test_a_fingerprint_follows_the_memory() -> None:
    measurer = Measurer(bucket=50, samples=7, threads=1, on_cpu=False)
    tensor = torch.arange(6.0)
    about = measurer.describe(tensor)
    view = tensor.view(2, 3)
    assert measurer.fingerprint(view) == about["crc32"]
    tensor[0] = 9
    expected = f"{zlib.crc32(memoryview(tensor.numpy()).cast('B')):08x}"
    assert measurer.fingerprint(view) == expected != about["crc32"]
    assert measurer.fingerprint(view.t()) is None
    assert measurer.fingerprint(torch.ones(2, device="meta")) is None


def test_what_has_no_bytes_is_described() -> None:
    measurer = Measurer(bucket=50, samples=7, threads=1, on_cpu=False)
    about = measurer.describe(torch.empty(3, 4, device="meta"))
    assert (about["shape"], "crc32" in about) == ([3, 4], False)
    assert "crc32" not in measurer.describe(torch.eye(3).to_sparse())
    released = torch.ones(7)
    released.untyped_storage().resize_(0)
    assert "crc32" not in measurer.describe(released)
    with FakeTensorMode():
        assert "crc32" not in measurer.describe(torch.ones(3))


def test_what_is_mapped_is_described(tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    x = torch.ones(4, 2)
    expected = torch.vmap(model)(x)
    with probe.record(model, tmp_path / "run", step=0):
        assert torch.equal(torch.vmap(model)(x), expected)
    described = [
        (
            record.key,
            record.dtype,
            record.shape,
            record.numbers["elements"],
            record.numbers.get("crc32"),
        )
        for record in runs.read(tmp_path / "run").ranks[0]
    ]
    assert described == [  # of one row: what vmap hands a module has no bytes
        ("(model)#0/in[0]", "F32", (2,), 2, None),
        ("(model)#0/out", "F32", (3,), 3, None),
    ]


def test_parameters_that_an_engine_gathers_later(tmp_path: Path) -> None:
    """It wraps a model that is recorded already: its hooks run before and after zckpt's."""
    model = nn.Linear(2, 3)
    whole = model.weight.data
    model.weight.data = torch.empty(0)

    def gather(*about: Any) -> None:
        model.weight.data = whole

    def release(*about: Any) -> None:
        model.weight.data = torch.empty(0)

    with probe.record(model, tmp_path / "run", step=0, parameters=True):
        model.register_forward_pre_hook(gather)
        model.register_forward_hook(release)
        model(torch.ones(1, 2))
    shapes = {record.key: record.shape for record in runs.read(tmp_path / "run").ranks[0]}
    assert shapes["weight"] == (3, 2)


class Uncalled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2)  # uses out_proj.weight, does not call out_proj
        self.scales = nn.ParameterList([torch.ones(4)])
        self.unused = nn.Linear(4, 4)
        self.waiting = nn.LazyLinear(4)

    def forward(self, x: Tensor) -> Any:
        return self.attention(x, x, x)[0] * self.scales[0]


def test_parameters_of_modules_that_are_not_called(tmp_path: Path) -> None:
    model = Uncalled()
    with probe.record(model, tmp_path / "run", step=0, parameters=True):
        for _ in range(2):
            model(torch.ones(3, 1, 4))
    keys = [line["key"] for line in lines(tmp_path / "run") if line.get("kind") == "parameter"]
    named = [name for name, _ in model.named_parameters() if "waiting" not in name]
    assert sorted(keys) == sorted(named)
    assert keys.index("attention.out_proj.weight") < keys.index("unused.weight")


def test_scripted_modules_are_passed_over(tmp_path: Path) -> None:
    model = nn.Sequential(torch.jit.script(nn.Linear(2, 3)), nn.Linear(3, 4))
    with probe.record(model, tmp_path / "run", step=0):
        model(torch.ones(1, 2))
    keys = [record.key for record in of_modules(tmp_path / "run")]
    assert keys == ["1#0/out", "(model)#0/out"]


def test_tracing_records_nothing(tmp_path: Path) -> None:
    model, x = nn.Linear(2, 3), torch.ones(1, 2)
    with probe.record(model, tmp_path / "run", step=0):
        traced = torch.jit.trace(model, x, check_trace=False)
    assert torch.equal(traced(x), model(x))
    assert not [line for line in lines(tmp_path / "run") if "key" in line]


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_nested_tensors(layout: torch.layout) -> None:
    rows = [torch.randn(2, 3), torch.randn(4, 3)]
    nested = torch.nested.nested_tensor(rows, layout=layout)
    about = Measurer(bucket=50, samples=7, threads=1, on_cpu=False).describe(nested)
    assert json.loads(json.dumps(about))["elements"] == 18
    assert about["mean"] == pytest.approx(torch.cat(rows).double().mean().item(), rel=1e-12)


def test_without_torch_one_sentence_says_so() -> None:
    code = """
import sys
sys.modules["torch"] = None
import zckpt, zckpt.probe
from zckpt.probe import compare
try:
    zckpt.probe.record
except zckpt.ZckptError as error:
    print(type(error).__name__, error.message, error.hint)
"""
    words = [sys.executable, "-c", code]
    ended = subprocess.run(
        words, check=True, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)}
    )
    assert ended.stdout.startswith("MissingExtra probe.record needs torch, which is not installed")
    assert "pip install" in ended.stdout


def test_importing_it_imports_no_torch() -> None:
    code = "import sys, zckpt; zckpt.probe.compare; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(ROOT)})


def test_steps_by_the_optimizer(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with probe.record(model, tmp_path / "run", step=100, optimizer=optimizer):
        for number in range(6):
            model(torch.ones(1, 2)).backward()
            if number % 2:  # two batches an update
                optimizer.step()
    places = [
        (r.step, r.batch) for r in runs.read(tmp_path / "run").ranks[0] if r.kind == "forward"
    ]
    assert places == [(100, "0"), (100, "1"), (101, "0"), (101, "1"), (102, "0"), (102, "1")]
    optimizer.step()
    assert not optimizer._optimizer_step_post_hooks


def test_steps_by_accelerate(tmp_path: Path) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Linear(2, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with probe.record(model, tmp_path / "run", step=0, optimizer=optimizer):
        for _ in range(4):
            with accelerator.accumulate(model):
                accelerator.backward(model(torch.ones(1, 2)).sum())
                optimizer.step()
                optimizer.zero_grad()
    places = [
        (r.step, r.batch) for r in runs.read(tmp_path / "run").ranks[0] if r.kind == "forward"
    ]
    assert places == [(0, "0"), (0, "1"), (1, "0"), (1, "1")]


def test_optimizers_that_cannot_be_counted(tmp_path: Path) -> None:
    class Zero:
        optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)

    model = nn.Linear(2, 1)
    zero: Any = Zero()
    with (
        pytest.raises(WrongOption, match=r"Zero is not a torch\.optim\.Optimizer"),
        probe.record(model, tmp_path / "run", step=0, optimizer=zero),
    ):
        pass


def test_gradients_may_be_left_out(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    with probe.record(model, tmp_path / "run", step=0, gradients=False):
        model(torch.ones(1, 2)).sum().backward()
    assert [record.kind for record in of_modules(tmp_path / "run")] == ["forward"]


def test_steps_by_a_function_or_an_engine(tmp_path: Path) -> None:
    class Engine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module, self.global_steps, self.skipped_steps = nn.Linear(2, 1), 41, 1

        def forward(self, x: Tensor) -> Tensor:
            return self.module(x)

    engine = Engine()
    Engine.__module__ = "deepspeed.runtime.engine"
    with probe.record(engine, tmp_path / "engine"):
        engine(torch.ones(1, 2))
        engine.global_steps += 1
        engine(torch.ones(1, 2))
    records = of_modules(tmp_path / "engine")
    assert [(record.step, record.key) for record in records] == [
        (40, "(model)#0/out"),
        (41, "(model)#0/out"),
    ]
    with probe.record(engine.module, tmp_path / "function", step=lambda: 5):
        engine(torch.ones(1, 2))
    assert runs.read(tmp_path / "function").steps == [5]


def test_the_trainer_of_hugging_face(tmp_path: Path) -> None:
    from transformers import Trainer, TrainingArguments

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 1)

        def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
            y = self.linear(x)
            return {"loss": (y - labels).square().mean(), "logits": y}

    arguments = TrainingArguments(
        output_dir=str(tmp_path / "trainer"),
        max_steps=2,
        gradient_accumulation_steps=2,
        per_device_train_batch_size=1,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
    )
    data = [{"x": torch.ones(2) * n, "labels": torch.ones(1)} for n in range(4)]
    trainer = Trainer(Model(), arguments, train_dataset=data)
    with probe.record(trainer.model, tmp_path / "run", step=lambda: trainer.state.global_step):
        trainer.train()
    records = runs.read(tmp_path / "run").ranks[0]
    forwards = [
        (r.step, r.batch) for r in records if r.key == "linear#0/out" and r.kind == "forward"
    ]
    assert forwards == [(0, "0"), (0, "1"), (1, "0"), (1, "1")]
    keys = {record.key for record in records if record.kind == "backward"}
    assert keys == {"(model)#0/out.loss", "linear#0/out"} | ({"(model)#0/out.logits"} & keys)


def test_a_range_of_steps(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    with probe.record(model, tmp_path / "run", step=0, start_step=1, end_step=3) as recorder:
        for _ in range(5):
            probe.inspect("loss", model(torch.ones(1, 2))).backward()
            recorder.next_step()
    run = runs.read(tmp_path / "run")
    assert run.steps == [1, 2]
    assert len(of_modules(tmp_path / "run")) == 8


def test_who_does_not_record(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    with probe.record(model, tmp_path / "run", step=0, ranks=[3]) as recorder:
        model(torch.ones(1, 2))
        recorder.next_step()
    assert not (tmp_path / "run").exists()


def test_no_overwriting_unless_asked(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    for _ in range(2):
        with probe.record(model, tmp_path / "run", step=0, overwrite=True):
            model(torch.ones(1, 2))
        (folder,) = (tmp_path / "run").iterdir()
        (folder / "notes").touch()  # of the user
    assert (folder / "notes").exists()
    with pytest.raises(TargetExists), probe.record(model, tmp_path / "run", step=0):
        pass
    assert len(of_modules(tmp_path / "run")) == 1
    with pytest.raises(WrongOption, match="step"), probe.record(model, tmp_path / "no step"):
        pass
    assert not (tmp_path / "no step").exists()
    assert hooks_of(model) == 0


def test_a_failing_block_leaves_a_readable_run_and_no_hook(tmp_path: Path) -> None:
    model = awkward()

    def fail() -> None:
        model(torch.ones(1, 3, dtype=torch.int64))
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), probe.record(model, tmp_path / "run", step=0):
        fail()
    with pytest.raises(IndexError), probe.record(model, tmp_path / "other", step=0):
        model(torch.full((1, 3), 99))
    assert hooks_of(model) == 0
    run = runs.read(tmp_path / "run")
    assert "not closed" in run.notes[0].message
    assert run.ranks[0]


def test_a_last_line_that_was_cut_off(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    with probe.record(model, tmp_path / "run", step=0):
        model(torch.ones(1, 2)).sum().backward()
    path = tmp_path / "run" / "rank_00000" / "records.jsonl"
    text = path.read_text().splitlines(keepends=True)
    path.write_text("".join(text[:2]) + text[2][:20])
    assert len(runs.read(tmp_path / "run").ranks[0]) == 1


def test_deep_copies_have_no_hooks(tmp_path: Path) -> None:
    model = awkward()
    with probe.record(model, tmp_path / "run", step=0):
        twin = copy.deepcopy(model)
        reborn = pickle.loads(pickle.dumps(nn.Sequential(model.embedding, model.twice)))
        twin(torch.ones(1, 3, dtype=torch.int64))
        reborn[1](torch.ones(1, 6))
    assert runs.read(tmp_path / "run").ranks[0] == []
    assert hooks_of(twin) == hooks_of(model) == 0


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(3, 3), nn.LayerNorm(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(torch.relu(self.linear(x)))


@pytest.mark.parametrize("how", ["before", "one graph", "inside"])
@pytest.mark.parametrize("by_itself", [False, True])
def test_the_inside_of_a_compiled_module(how: str, by_itself: bool, tmp_path: Path) -> None:
    """torch allows it if the recording begins first, and the graph may be split."""
    torch.compiler.reset()
    torch.manual_seed(0)
    block, x = Block(), torch.ones(2, 3)
    plain = block(x)
    compiled: Any = block
    if by_itself:
        block.compile(backend="eager", fullgraph=how == "one graph")
    else:
        compiled = torch.compile(block, backend="eager", fullgraph=how == "one graph")
    model = nn.Sequential(compiled)
    if how == "before":
        model(x)
    for number in range(2):
        with probe.record(model, tmp_path / f"run{number}", step=0):
            for _ in range(2):
                assert torch.equal(model(x), plain)
    run = runs.read(tmp_path / "run0")
    keys = [record.key for record in of_modules(tmp_path / "run0") if record.batch == "1"]
    inside = ["0.linear#0/out", "0.norm#0/out"] if how == "inside" else []
    assert keys == [*inside, "0#0/out", "(model)#0/out"]
    assert run.header["compiled"] == ["0"]
    said = [note for note in texts(run.notes) if "modules inside of 0 were not" in note]
    assert len(said) == (not inside)
    assert hooks_of(model) == hooks_of(block) == 0
    assert torch.equal(model(x), plain)


@pytest.mark.parametrize("inner", [False, True])
def test_compiled_modules_are_seen_from_outside(inner: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    block = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    compiled = torch.compile(block, backend="eager")
    model = nn.Sequential(nn.Linear(3, 3), compiled) if inner else compiled
    x = torch.ones(2, 3)
    plain = model(x)
    with probe.record(model, tmp_path / "run", step=0):
        assert torch.equal(model(x), plain)
    keys = [record.key for record in of_modules(tmp_path / "run")]
    assert keys == (["0#0/out", "1#0/out"] if inner else []) + ["(model)#0/out"]
    assert hooks_of(model) == hooks_of(block) == 0


def test_a_module_that_compiles_itself(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU())
    model.compile(backend="eager")
    plain = model(torch.ones(2, 3))
    with probe.record(model, tmp_path / "run", step=0):
        assert torch.equal(model(torch.ones(2, 3)), plain)
    assert of_modules(tmp_path / "run")[-1].key == "(model)#0/out"
    assert hooks_of(model) == 0


def test_the_header_says_what_was_recorded(tmp_path: Path) -> None:
    with (
        pytest.warns(UserWarning, match="not called"),
        probe.record(nn.Linear(2, 1), tmp_path / "run", step=9),
    ):
        pass
    header, closed = lines(tmp_path / "run")
    assert (header["zckpt_probe"], header["world"], header["rank"], header["step"]) == (1, 1, 0, 9)
    assert header["versions"]["torch"] == torch.__version__
    assert header["modules"] == {"(model)": "Linear"}
    assert closed == {"closed": 0, "only_outside": []}


def test_the_build_of_torch_is_a_part_of_its_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.13.0+cu130")
    with probe.record(nn.Identity(), tmp_path / "run", step=9):
        pass
    assert lines(tmp_path / "run")[0]["versions"]["torch"] == "2.13.0+cu130"


def test_inspecting_without_a_recorder_does_nothing() -> None:
    tensor = torch.ones(2)
    assert probe.inspect("name", tensor) is tensor


def test_a_root_that_is_called_inside_of_its_own_call(tmp_path: Path) -> None:
    """It is one batch, and the next call is another one, even if a call raised an error."""

    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(1, 1)

        def forward(self, x: Tensor, depth: int) -> Tensor:
            if depth == 9:
                raise FloatingPointError("nan")
            return self(x, depth - 1) + self(x, depth - 1) if depth else self.linear(x)

    model = Nested()
    with probe.record(model, tmp_path / "run", step=0):
        model(torch.ones(1), 1)
        with pytest.raises(FloatingPointError):
            model(torch.ones(1), 9)
        model(torch.ones(1), 0)
    records = of_modules(tmp_path / "run")
    assert [(record.batch, record.key) for record in records] == [
        ("0", "linear#0/out"),
        ("0", "(model)#1/out"),
        ("0", "linear#1/out"),
        ("0", "(model)#2/out"),
        ("0", "(model)#0/out"),
        ("2", "linear#0/out"),
        ("2", "(model)#0/out"),
    ]
    assert hooks_of(model) == 0
