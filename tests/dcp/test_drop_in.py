"""The storage reader instead of torch's FileSystemReader: the same keys, the same values."""

from __future__ import annotations

import argparse
import collections
import copy
import datetime
import decimal
import io
import os
import pathlib
import pickle
import random
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch import distributed, nn
from torch.distributed.checkpoint import _version, format_utils
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import (
    FileSystemReader,
    FileSystemWriter,
    SerializationFormat,
)
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.optimizer import load_sharded_optimizer_state_dict
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys
from torch.torch_version import TorchVersion

import zckpt
from zckpt import dcp

from ..conftest import EXAMPLE, ROOT

ORT = ROOT / "tests/data/onnxruntime/hdf5__fp16__adam__dp3"
FSDP2 = ROOT / "tests/data/fsdp2-2.13.0-w2"


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """torch warns that no process group is there; what zckpt warns of is looked for."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        warnings.filterwarnings("ignore", category=FutureWarning)
        yield


def save(state: dict[str, Any], path: Path) -> Path:
    torch_dcp.save(state, checkpoint_id=path, no_dist=True)
    return path


def load(state: dict[str, Any], reader: Any, **planner: Any) -> dict[str, Any]:
    torch_dcp.load(
        state, storage_reader=reader, planner=torch_dcp.DefaultLoadPlanner(**planner), no_dist=True
    )
    return state


def equal(a: Any, b: Any) -> bool:
    """Whether types are the same, and values are equal bit for bit."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, numpy.ndarray):
        return a.dtype == b.dtype and numpy.array_equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple, collections.deque)):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, io.BytesIO):
        return a.getvalue() == b.getvalue()
    return bool(a == b)


# -- planners that list keys


@pytest.fixture(params=["deepspeed", "universal", "onnxruntime", "dcp"])
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Path]:
    """A checkpoint, and its copy for torch's own reader: `convert --to dcp`."""
    source = {"deepspeed": EXAMPLE, "onnxruntime": ORT, "dcp": FSDP2}.get(request.param)
    if source is None:
        source = tmp_path / "universal"
        zckpt.convert(EXAMPLE, source)
    if request.param == "dcp":
        return source, source
    zckpt.convert(source, tmp_path / "converted", to="dcp")
    return source, tmp_path / "converted"


def assert_same_state(ours: Any, theirs: Any) -> None:
    assert theirs
    assert equal(ours, theirs), (ours, theirs)


def test_a_whole_checkpoint_becomes_a_file_of_torch_save(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, converted = pair
    format_utils.dcp_to_torch_save(converted, tmp_path / "torch.pt")
    monkeypatch.setattr(format_utils, "FileSystemReader", dcp.StorageReader)
    format_utils.dcp_to_torch_save(source, tmp_path / "ours.pt")
    ours, theirs = (
        torch.load(tmp_path / f"{who}.pt", weights_only=False) for who in ("ours", "torch")
    )
    assert_same_state(ours, theirs)


def test_some_keys_of_a_checkpoint(pair: tuple[Path, Path]) -> None:
    source, converted = pair
    paths = FileSystemReader(converted).read_metadata().planner_data
    for keys in (None, {next(iter(paths.values()))[0]}, {next(iter(paths))}, "optim"):
        ours, theirs = (
            _load_state_dict_from_keys(keys, storage_reader=reader)
            for reader in (dcp.StorageReader(source), FileSystemReader(converted))
        )
        assert_same_state(ours, theirs)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def whole(value: Any) -> Any:
    """A state dict with one rank's part of every tensor that ranks share."""
    if isinstance(value, dict):
        return {key: whole(item) for key, item in value.items()}
    if isinstance(value, list):
        return [whole(item) for item in value]
    return value.local_shards()[0].tensor if hasattr(value, "local_shards") else value


@pytest.mark.usefixtures("group")
def test_a_sharded_optimizer(pair: tuple[Path, Path]) -> None:
    source, converted = pair
    ours, theirs = (
        whole(load_sharded_optimizer_state_dict({}, "optim", reader))
        for reader in (dcp.StorageReader(source), FileSystemReader(converted))
    )
    assert_same_state(ours, theirs)


def test_metadata_lists_the_source_s_keys(pair: tuple[Path, Path]) -> None:
    source, converted = pair
    ours = dcp.StorageReader(source).read_metadata()
    theirs = FileSystemReader(converted).read_metadata()
    assert ours.planner_data == theirs.planner_data
    assert list(ours.state_dict_metadata) == list(theirs.state_dict_metadata)
    for key, item in ours.state_dict_metadata.items():
        other = theirs.state_dict_metadata[key]
        assert type(item) is type(other), key
        if not isinstance(item, BytesStorageMetadata):
            assert (item.size, item.properties.dtype) == (other.size, other.properties.dtype), key
    assert "model.no.such" not in ours.state_dict_metadata
    with pytest.raises(KeyError):
        ours.state_dict_metadata["model.no.such"]
    plain = pickle.loads(pickle.dumps(ours)).state_dict_metadata
    assert type(plain) is dict
    assert list(plain) == list(theirs.state_dict_metadata)


def test_a_parameter_that_is_called_as_another_s_key(tmp_path: Path) -> None:
    """`model.weight` is the key of `weight`, though there is a parameter `model.weight`."""
    weights = {"weight": torch.ones(3), "model.weight": torch.zeros(3)}
    torch.save({"model": weights}, tmp_path / "run.pt")
    reader = dcp.StorageReader(tmp_path / "run.pt")
    assert equal(_load_state_dict_from_keys(storage_reader=reader), {"model": weights})
    state = {"model": {name: torch.full((3,), 9.0) for name in weights}}
    assert equal(load(state, reader), {"model": weights})


# -- what a program saved under a key


class Counter:
    """A Stateful."""

    def __init__(self, count: int) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "history": [self.count] * 3, "seen": torch.tensor(self.count)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]
        assert state["history"] == [self.count] * 3


class Scaled(nn.Linear):
    """A module with an extra state."""

    scale: Any = None

    def get_extra_state(self) -> Any:
        return {"scale": self.scale, "amax": torch.full((3,), 2.0)}

    def set_extra_state(self, state: Any) -> None:
        self.scale = state["scale"]


def program(seed: int) -> tuple[dict[str, Any], nn.Module, Any]:
    """The state of a training program: model, optimizer, scheduler, counters, random states."""
    torch.manual_seed(seed)
    model = nn.Sequential(Scaled(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model[0].scale = seed
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * seed)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for _ in range(seed):
        model(torch.randn(5, 3)).square().mean().backward()
        optimizer.step()
        scheduler.step()
    weights, states = get_state_dict(model, optimizer)
    state = {
        "model": weights,
        "optim": states,
        "scheduler": scheduler.state_dict(),
        "counter": Counter(seed),
        "step": seed,
        "random": {"torch": torch.get_rng_state(), "python": random.Random(seed).getstate()},
    }
    return state, model, optimizer


def test_a_program_s_own_state_dict_comes_back(tmp_path: Path) -> None:
    saved, _, _ = program(3)
    save(saved, tmp_path / "run")
    results = []
    for reader in (FileSystemReader(tmp_path / "run"), dcp.StorageReader(tmp_path / "run")):
        state, model, optimizer = program(1)
        load(state, reader)
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
        )
        state["counter"] = state["counter"].count
        results.append([state, model[0].scale, optimizer.state_dict()])
    assert equal(*results)
    assert results[1][0]["scheduler"]["last_epoch"] == 3
    assert results[1][0]["step"] == results[1][0]["counter"] == results[1][1] == 3


VALUES = {
    "none": None,
    "numbers": [1, -(2**70), 0.1, float("inf"), 1 + 2j, True],
    "text": "h\u00e4?",
    "bytes": b"\x00\xff",
    "buffer": bytearray(b"\x01\x02"),
    "tuple": (1, (2, "x"), [3]),
    "set": {1, 2},
    "frozen": frozenset({"a"}),
    "ordered": (collections.OrderedDict(a=1, b=(2,)), {"a": {3: None}}),
    "default": (collections.defaultdict(list, {"a": [1]}),),
    "counter": (collections.Counter("aab"),),
    "deque": collections.deque([1, 2], maxlen=4),
    "size": torch.Size([2, 3]),
    "dtypes": (torch.float32, torch.bfloat16, torch.float8_e4m3fn),
    "device": torch.device("cpu"),
    "tensors": (
        torch.arange(6).view(2, 3).t(),
        torch.tensor(2.5),
        torch.zeros(0, 3),
        torch.ones(2, dtype=torch.bfloat16),
    ),
    "parameter": (nn.Parameter(torch.ones(2)).data,),
    "array": numpy.arange(6, dtype=numpy.int16).reshape(2, 3),
    "fortran": numpy.asfortranarray(numpy.arange(6.0).reshape(2, 3)),
    "big-endian": numpy.arange(3, dtype=">f4"),
    "times": numpy.array(["2026-01-02"], dtype="datetime64[D]"),
    "flags": numpy.array([True, False]),
    "texts": numpy.array(["a", "bcd"]),
    "empty array": numpy.zeros((0, 3)),
    "scalar": numpy.float64(0.1),
    "scalars": (numpy.int32(3), numpy.float16(0.5), numpy.bool_(True), numpy.dtype("<f4")),
    "random": numpy.random.RandomState(3).get_state(),
    "path": pathlib.Path("a/b"),
    "namespace": argparse.Namespace(lr=0.1, names=["a"]),
    "time": datetime.datetime(2026, 1, 2, 3, 4, 5, 6),
    "delta": datetime.timedelta(days=1, seconds=2),
    "decimal": decimal.Decimal("0.1"),
    "version": TorchVersion("2.13.0"),
    "file": io.BytesIO(b"abc"),
    "range": range(1, 9, 2),
    "class": (int, dict),
}


@pytest.mark.parametrize("name", VALUES)
def test_plain_values_come_back(name: str, tmp_path: Path) -> None:
    save({"value": VALUES[name], "inside": ([VALUES[name]], 3)}, tmp_path / "run")
    states = [
        load({"value": 0, "inside": 0}, reader(tmp_path / "run"))
        for reader in (FileSystemReader, dcp.StorageReader)
    ]
    assert equal(*states)
    assert states[1]["inside"] != 0


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"note": "no tensor"},
        {"a": torch.arange(3), "b": {"c": torch.ones(2, 2)}},
        {"a": torch.zeros(0), "b": torch.zeros(0, 4), "c": torch.tensor(1)},
        {"optim": {"param_groups": [{"lr": 0.1, "params": [0]}], "state": {}}},
        {"a": {"state": {"x": {"step": torch.tensor(3.0)}}}, "state.x.step": 4},
        {"steps": [torch.tensor(1), {"x": 2}], "n": {"0": 1, "1": 2}},
    ],
)
def test_checkpoints_that_are_no_model(state: dict[str, Any], tmp_path: Path) -> None:
    def blank(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: blank(item) for key, item in value.items()}
        if isinstance(value, list):
            return [blank(item) for item in value]
        return torch.zeros_like(value) if isinstance(value, torch.Tensor) else None

    save(copy.deepcopy(state), tmp_path / "run")
    loaded = load(blank(state), dcp.StorageReader(tmp_path / "run"))
    assert equal(loaded, state)
    listed = _load_state_dict_from_keys(storage_reader=dcp.StorageReader(tmp_path / "run"))
    theirs = _load_state_dict_from_keys(storage_reader=FileSystemReader(tmp_path / "run"))
    assert equal(listed, theirs)


@pytest.mark.parametrize("kind", ["deepspeed", "universal"])
def test_the_program_s_values_in_other_formats(kind: str, tmp_path: Path) -> None:
    source = EXAMPLE
    if kind == "universal":
        source = tmp_path / "universal"
        zckpt.convert(EXAMPLE, source)
    zckpt.convert(source, tmp_path / "converted", to="dcp")
    whole = _load_state_dict_from_keys(storage_reader=FileSystemReader(tmp_path / "converted"))
    others = {key: whole[key] for key in whole if key not in ("model", "optim")}
    assert others  # the example has a scheduler or a client's state
    state = {key: blank_values(value) for key, value in others.items()}
    assert equal(load(state, dcp.StorageReader(source)), others)


def blank_values(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: blank_values(item) for key, item in value.items()}
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else None


def test_an_extra_state_is_known_under_other_roots(tmp_path: Path) -> None:
    model = nn.Sequential(Scaled(3, 4))
    model[0].scale = 8
    save({"model": model.state_dict()}, tmp_path / "run")
    other = nn.Sequential(Scaled(3, 4))
    state = {"app": {"net": other.state_dict()}}
    load(state, dcp.StorageReader(tmp_path / "run"))
    other.load_state_dict(state["app"]["net"])
    assert other[0].scale == 8
    assert torch.equal(other[0].weight, model[0].weight)


# -- objects


class Config:
    """A class of the program, which zckpt does not import."""

    def __init__(self, depth: int) -> None:
        self.depth = depth


class Bomb:
    """A pickle that does something when it is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_an_object_s_pickle_is_not_run(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    saved = {"a": torch.ones(2), "b": Bomb(marker), "c": {"d": (Config(3),)}}
    save(saved, tmp_path / "run")
    state: dict[str, Any] = {"a": torch.zeros(2), "b": 1, "c": {"d": 2}}
    with pytest.raises(CheckpointException) as error:
        load(state, dcp.StorageReader(tmp_path / "run"))
    message = str(error.value)
    assert "Missing key in checkpoint" in message
    assert (
        "zckpt does not load b: it is an object of posix.mkdir, whose pickle would have" in message
    )
    assert f"zckpt does not load c.d: it holds an object of {__name__}.Config" in message
    assert "has no" not in message
    assert "FileSystemReader" in message
    assert not state["a"].any()  # nothing was changed
    with pytest.warns(UserWarning, match=r"zckpt does not load b: .*stays unchanged"):
        load(state, dcp.StorageReader(tmp_path / "run"), allow_partial_load=True)
    assert state["a"].all()
    assert (state["b"], state["c"]) == (1, {"d": 2})
    del state["b"], state["c"]
    load(state, dcp.StorageReader(tmp_path / "run"))
    assert not marker.exists()


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (numpy.array([{}], dtype=object), "numpy"),
        ((collections.defaultdict(Config),), "Config"),
        ((torch.eye(2).to_sparse(),), "sparse"),
        (torch.zeros(2, dtype=torch.complex128), "complex128"),
        (torch.zeros(2, dtype=torch.complex64).conj(), "pending conjugation"),
    ],
)
def test_what_zckpt_does_not_load_is_said(value: Any, reason: str, tmp_path: Path) -> None:
    save({"x": value, "y": torch.ones(2)}, tmp_path / "run")
    reader = dcp.StorageReader(tmp_path / "run")
    with pytest.raises(CheckpointException, match=f"zckpt does not load x: .*{reason}"):
        load({"x": value if isinstance(value, torch.Tensor) else 0}, reader)
    assert load({"y": torch.zeros(2)}, reader)["y"].all()


def test_what_a_checkpoint_lacks_is_said(tmp_path: Path) -> None:
    save({"model": nn.Linear(3, 4).state_dict(), "epoch": 3}, tmp_path / "run")
    state: dict[str, Any] = {
        "model": {"weight": torch.zeros(4, 3)},
        "epochs": 0,
        "scheduler": {"x": 1},
    }
    with pytest.raises(CheckpointException) as error:
        load(state, dcp.StorageReader(tmp_path / "run"))
    message = str(error.value)
    assert (
        "Missing key in checkpoint state_dict: the checkpoint has no epochs, scheduler.x" in message
    )
    assert "unused keys of the checkpoint: model.bias, epoch" in message
    assert "zckpt does not load" not in message
    load(state, dcp.StorageReader(tmp_path / "run"), allow_partial_load=True)
    assert state["model"]["weight"].any()
    assert (state["epochs"], state["scheduler"]) == (0, {"x": 1})


def test_numbers_that_a_checkpoint_has_are_keys_as_any_other(tmp_path: Path) -> None:
    model = nn.Linear(3, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.3)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    save({"optim": optimizer.state_dict()}, tmp_path / "run")
    state = copy.deepcopy(optimizer.state_dict())
    for moments in state["state"].values():
        moments["exp_avg"].zero_()
    state["param_groups"][0]["lr"] = 9.0
    load({"optim": state}, dcp.StorageReader(tmp_path / "run"))
    assert equal(state, optimizer.state_dict())
    state["state"][2] = {"exp_avg": torch.zeros(4)}
    with pytest.raises(CheckpointException, match=r"has no optim\.state\.2\.exp_avg\. Keys were"):
        load({"optim": state}, dcp.StorageReader(tmp_path / "run"))


def test_keys_of_the_checkpoint_are_not_taken_for_others(tmp_path: Path) -> None:
    """The checkpoint has a `weight`, but no key `model.extra.weight`."""
    save({"model": {"weight": torch.ones(3)}}, tmp_path / "run")
    for name in ("extra.weight", "weight.weight"):
        state = {"model": {"weight": torch.zeros(3), name: torch.zeros(3)}}
        load(state, dcp.StorageReader(tmp_path / "run"), allow_partial_load=True)
        assert state["model"]["weight"].all()
        assert not state["model"][name].any()
        with pytest.raises(CheckpointException, match=rf"has no model\.{name}"):
            load(state, dcp.StorageReader(tmp_path / "run"))


@pytest.mark.parametrize("fronts", [("module.", ""), ("", "module."), ("", "_orig_mod.")])
def test_wrappers_differ_below_the_same_root(fronts: tuple[str, str], tmp_path: Path) -> None:
    values = {"fc.weight": torch.ones(3), "fc.bias": torch.full((3,), 2.0)}
    run = {"model": {f"{fronts[0]}{name}": value for name, value in values.items()}}
    save(run, tmp_path / "run")
    state = {"model": {f"{fronts[1]}{name}": torch.zeros(3) for name in values}}
    load(state, dcp.StorageReader(tmp_path / "run"))
    assert equal(state["model"], {f"{fronts[1]}{name}": value for name, value in values.items()})


def test_an_average_that_the_checkpoint_lacks_is_not_the_model(tmp_path: Path) -> None:
    save({"model": {"weight": torch.ones(3)}}, tmp_path / "run")
    state = {"model": {"weight": torch.zeros(3)}, "average": {"weight": torch.zeros(3)}}
    with pytest.raises(CheckpointException, match=r"has no average\.weight"):
        load(state, dcp.StorageReader(tmp_path / "run"))
    load(state, dcp.StorageReader(tmp_path / "run"), allow_partial_load=True)
    assert state["model"]["weight"].all()
    assert not state["average"]["weight"].any()


# -- FileSystemReader's own ways


@pytest.mark.parametrize("version", [None, "1.0.0"])
def test_checkpoints_of_torch_2_3(version: str | None, tmp_path: Path) -> None:
    """Before 2.4 a dictionary without tensors was one value (torch's test_compatibility.py)."""
    state = {"a": torch.ones(2), "d": {"x": {"y": 1}}, "n": {"m": 2}, "l": [0, {"z": [1]}]}
    _version._derived_version = "2_3" if version is None else None
    try:
        save(state, tmp_path / "run")
    finally:
        _version._derived_version = None
    metadata = FileSystemReader(tmp_path / "run").read_metadata()
    assert ("d" in metadata.state_dict_metadata) is (version is None)
    metadata.version, metadata.storage_meta = version, None
    (tmp_path / "run" / ".metadata").write_bytes(pickle.dumps(metadata))
    states = []
    for reader in (FileSystemReader, dcp.StorageReader):
        blank = {"a": torch.zeros(2), "d": {"x": {"y": 0}}, "n": {}, "l": [9, {"z": [9]}]}
        states.append(load(blank, reader(tmp_path / "run")))
    assert equal(*states)
    assert (states[1]["d"], states[1]["l"]) == (state["d"], state["l"])
    assert states[1]["n"] == ({"m": 2} if version is None else {})


def test_a_checkpoint_that_was_written_anew_is_read_anew(tmp_path: Path) -> None:
    save({"a": torch.ones(2), "x": {"b": torch.ones(3)}}, tmp_path / "run")
    reader = dcp.StorageReader(tmp_path / "run")
    state = {"a": torch.zeros(2)}
    load(state, reader)
    save({"b": torch.zeros(5000), "a": torch.full((2,), 7.0)}, tmp_path / "run")
    load(state, reader)
    assert state["a"].tolist() == [7.0, 7.0]


@pytest.mark.parametrize("kind", [str, Path])
def test_paths_are_given_as_to_torch(kind: Callable[..., Any], tmp_path: Path) -> None:
    for place in (1, 2):
        save({"a": torch.full((2,), float(place))}, tmp_path / str(place))
    reader = dcp.StorageReader(path=kind(tmp_path / "1"))
    theirs = FileSystemReader(path=kind(tmp_path / "1"))
    state = {"a": torch.zeros(2)}
    torch_dcp.load(state, checkpoint_id=kind(tmp_path / "2"), storage_reader=reader, no_dist=True)
    theirs.reset(kind(tmp_path / "2"))
    assert state["a"].tolist() == [2.0, 2.0]
    assert reader.checkpoint_id == theirs.checkpoint_id
    assert reader.path == theirs.path
    identity = reader.load_id
    reader.reset()
    assert reader.path == theirs.path
    assert reader.load_id != identity
    meta, other = (each.read_metadata().storage_meta for each in (reader, theirs))
    assert (meta.checkpoint_id, meta.save_id) == (other.checkpoint_id, other.save_id)
    assert meta.load_id == reader.load_id
    assert dcp.StorageReader.validate_checkpoint_id(kind(tmp_path / "1"))
    assert not dcp.StorageReader.validate_checkpoint_id("abc://abc.abc")


WRITERS: dict[str, dict[str, Any]] = {
    "threads": {"thread_count": 3},
    "a file for each item": {"single_file_per_rank": False},
    "safetensors": {"serialization_format": SerializationFormat.SAFETENSORS},
}


@pytest.mark.parametrize("way", [*WRITERS, "without collectives"])
def test_files_of_every_layout(way: str, tmp_path: Path) -> None:
    saved, _, _ = program(2)
    writer = FileSystemWriter(tmp_path / "run", **WRITERS.get(way, {}))
    options = {"use_collectives": False} if way == "without collectives" else {"no_dist": True}
    torch_dcp.save(saved, storage_writer=writer, **options)
    state, _, _ = program(1)
    load(state, dcp.StorageReader(tmp_path / "run"))
    for each in (saved, state):
        each["counter"] = each["counter"].count
    assert equal(state, saved)  # torch 2.13's own reader cannot read safetensors in such files


def test_accelerate_s_two_folders(tmp_path: Path) -> None:
    saved, _, _ = program(2)
    save({"model": saved["model"]}, tmp_path / "run" / "pytorch_model_fsdp_0")
    save({"optimizer": saved["optim"]}, tmp_path / "run" / "optimizer_0")
    state, _, _ = program(1)
    both = {"model": state["model"], "optimizer": state["optim"]}
    load(both, dcp.StorageReader(tmp_path / "run"))
    assert equal(both, {"model": saved["model"], "optimizer": saved["optim"]})


def test_files_beside_metadata_do_not_disturb(tmp_path: Path) -> None:
    save({"a": torch.ones(2)}, tmp_path / "run")
    torch.save({"model": {"a.weight": torch.zeros(2)}}, tmp_path / "run" / "model.pt")
    state = {"a": torch.zeros(2)}
    assert load(state, dcp.StorageReader(tmp_path / "run"))["a"].all()


class Renaming(torch_dcp.DefaultLoadPlanner):
    """Reads the checkpoint's key `old` into the program's key `new`."""

    def create_local_plan(self) -> LoadPlan:
        self.state_dict = {key.replace("new", "old"): each for key, each in self.state_dict.items()}
        plan = super().create_local_plan()
        self.state_dict = {key.replace("old", "new"): each for key, each in self.state_dict.items()}
        for item in plan.items:
            index = item.dest_index
            name = index.fqn.replace("old", "new")
            object.__setattr__(item, "dest_index", MetadataIndex(name, index.offset, index.index))
        return plan


def test_a_planner_may_rename(tmp_path: Path) -> None:
    save({"old": torch.ones(2), "old_step": 3}, tmp_path / "run")
    for reader in (FileSystemReader, dcp.StorageReader):
        state: dict[str, Any] = {"new": torch.zeros(2), "new_step": 0}
        torch_dcp.load(
            state, storage_reader=reader(tmp_path / "run"), planner=Renaming(), no_dist=True
        )
        assert state["new"].all()
        assert state["new_step"] == 3


def test_groups_in_another_order_go_by_parameter(tmp_path: Path) -> None:
    """torch's own reader gives the first group's values to the first."""
    groups = [{"params": ["a"], "lr": 0.1}, {"params": ["b"], "lr": 0.2}]
    weights = {"a": torch.ones(2), "b": torch.ones(3)}
    save({"model": weights, "optim": {"state": {}, "param_groups": groups}}, tmp_path / "run")
    blank = [{"params": ["b"], "lr": 9.0}, {"params": ["a"], "lr": 9.0}]
    state = {"model": weights, "optim": {"state": {}, "param_groups": blank}}
    load(state, dcp.StorageReader(tmp_path / "run"))
    assert blank == [{"params": ["b"], "lr": 0.2}, {"params": ["a"], "lr": 0.1}]


def test_a_step_policy_and_renaming_ask_for_meaning(tmp_path: Path) -> None:
    moments = {"a": {"step": torch.tensor(3.0)}, "b": {"step": torch.tensor(5.0)}}
    groups = [{"params": ["a", "b"], "lr": 0.1}]
    weights = {"a": torch.ones(2), "b": torch.full((2,), 2.0)}
    save({"model": weights, "optim": {"state": moments, "param_groups": groups}}, tmp_path / "run")
    state: dict[str, Any] = {"optim": {"state": {name: {"step": 0} for name in "ab"}}}
    load(state, dcp.StorageReader(tmp_path / "run", step_policy="max"))
    assert state["optim"]["state"] == {"a": {"step": 5}, "b": {"step": 5}}
    swapped = {"model": {"a": torch.zeros(2), "b": torch.zeros(2)}}
    rules = [("^a$", "t"), ("^b$", "a"), ("^t$", "b")]
    load(swapped, dcp.StorageReader(tmp_path / "run", rename=rules))
    assert [each.tolist() for each in swapped["model"].values()] == [[2.0, 2.0], [1.0, 1.0]]


def test_a_tensor_of_which_a_part_is_missing(tmp_path: Path) -> None:
    """As if one of two ranks had saved; torch's own reader leaves the rest unchanged."""
    save({"a": torch.ones(3), "b": torch.ones(2)}, tmp_path / "run")
    for size in ([3], [0]):
        metadata = FileSystemReader(tmp_path / "run").read_metadata()
        metadata.state_dict_metadata["a"].size = torch.Size([4])
        metadata.state_dict_metadata["a"].chunks[0].sizes = torch.Size(size)
        metadata.storage_meta = None
        (tmp_path / "run" / ".metadata").write_bytes(pickle.dumps(metadata))
        reader = dcp.StorageReader(tmp_path / "run")
        assert load({"b": torch.zeros(2)}, reader)["b"].all()
        with pytest.raises(CheckpointException, match=f"has {size[0]} of the 4 elements of a"):
            load({"a": torch.zeros(4)}, reader)


def test_files_of_items_that_nobody_asks_for_are_not_opened(tmp_path: Path) -> None:
    shutil.copytree(FSDP2, tmp_path / "run")
    os.remove(tmp_path / "run" / "__1_0.distcp")  # the second rank's rows
    state = {"model": {"temperature": torch.zeros(())}}  # only on the first rank
    load(state, dcp.StorageReader(tmp_path / "run"))
    assert state["model"]["temperature"] > 1
    with pytest.raises(CheckpointException, match=r"is missing, although \.metadata lists it"):
        load({"model": {"readout.bias": torch.zeros(19)}}, dcp.StorageReader(tmp_path / "run"))
