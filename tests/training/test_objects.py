"""What names of classes and functions in a source's state reach a target's pickles."""

from __future__ import annotations

import datetime
import decimal
import io
import pathlib
import pickletools
import shutil
import struct
import zipfile
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from msgspec.structs import replace
from torch.distributed.checkpoint import FileSystemReader
from torch.torch_version import TorchVersion

import zckpt
from zckpt.core.checkpoint.facts import FlatBufferEngine
from zckpt.core.checkpoint.inert import ITSELF, Foreign, Global, Size
from zckpt.core.checkpoint.manifest import Manifest, Run
from zckpt.core.checkpoint.optimizer_states import StateRow, States
from zckpt.errors import CorruptCheckpoint, WrongOption
from zckpt.formats.options import options_of
from zckpt.training.objects import COMMON, admissible, others_of, without_others

from ..conftest import texts
from ..manifests import changed
from ..safety.targets import legacy_file, parts_of, torch_file

EXAMPLE = Path(__file__).parents[2] / "examples" / "run"
DATA = Path(__file__).parents[1] / "data"
SYSTEM = Foreign(Global("os.system"), ("echo run",))
FLAVOUR = Foreign(Global("my.module.Flavour"), (3,))
NAMESPACE = Global("argparse.Namespace")


def manifest(**parts: Any) -> Manifest:
    return Manifest("/", "x", Run(), {}, {}).replace(**parts)


@pytest.mark.parametrize(
    ("state", "kept", "where"),
    [
        ({"a": {"b": SYSTEM, "c": 1}}, {"a": {"c": 1}}, "a.b"),
        ({"a": [1, SYSTEM], "c": 2}, {"c": 2}, "a"),
        ({"a": [1, {"b": SYSTEM, "c": 3}]}, {"a": [1, {"c": 3}]}, "a.1.b"),
        ({"a": (SYSTEM,)}, {}, "a"),
        ({"a": {frozenset((SYSTEM,)): 1, "c": 2}}, {"a": {"c": 2}}, "a."),
        ({"a": Global("os.system")}, {}, "a"),
        ({"a": Foreign(Global("collections.defaultdict"), (Global("os.system"),))}, {}, "a"),
        ({"a": Foreign(NAMESPACE, (), None, "call", {"x": SYSTEM})}, {}, "a"),
        ({"a": Foreign(NAMESPACE, (), None, "call", {}, [SYSTEM])}, {}, "a"),
        ({"a": Foreign(NAMESPACE, (), None, "call", {}, [], [("x", SYSTEM)])}, {}, "a"),
        ({"a": Foreign(Foreign(Global("operator.attrgetter"), ("x",)), (NAMESPACE,))}, {}, "a"),
        ({"a": OrderedDict(b=SYSTEM, c=Size((2,)))}, {"a": OrderedDict(c=Size((2,)))}, "a.b"),
    ],
)
def test_a_name_that_is_not_on_the_list_is_left_out_and_named(
    state: dict[str, Any], kept: dict[str, Any], where: str
) -> None:
    result = without_others(manifest(state=state), (), ())
    assert result.state == kept
    (line,) = texts(result.notices.omitted)
    assert line.startswith(where)
    assert "os.system" in line or "operator.attrgetter" in line
    assert "the checkpoint may be hostile" in line
    assert "--allow-object" not in line


def test_an_attribute_of_an_object_is_left_out_alone() -> None:
    args = Foreign(NAMESPACE, (), {"lr": 0.1, "flavour": FLAVOUR})
    result = without_others(manifest(state={"args": args}), (), ())
    assert result.state["args"].state == {"lr": 0.1}
    assert args.state == {"lr": 0.1, "flavour": FLAVOUR}  # the source's own is unchanged
    assert result.notices.omitted[0].message.startswith(
        "args.state.flavour: it refers to my.module.Flavour"
    )


@pytest.mark.parametrize(
    "name",
    [
        "posix.system", "os.path.join", "subprocess.Popen", "builtins.eval", "torch.hub.load",
        "torch.load", "multiprocessing.popen_fork.Popen", "importlib.import_module",
    ],
)  # fmt: skip
def test_no_option_is_offered_for_what_runs_programs(name: str) -> None:
    value = [Foreign(Global("a.Class")), Foreign(Global(name))]
    (line,) = texts(without_others(manifest(state={"a": value}), (), ()).notices.omitted)
    assert line.startswith(f"a: it refers to {name}, which can run programs")
    assert "--allow-object" not in line


@pytest.mark.parametrize("name", ["ossia.Flavour", "torch.hubs.load", "my.os.Flavour", "torch.x"])
def test_an_option_is_offered_for_other_names(name: str) -> None:
    (line,) = texts(
        without_others(manifest(state={"a": Foreign(Global(name))}), (), ()).notices.omitted
    )
    assert line.endswith(f"if you trust that, add --allow-object {name}")


def test_an_enum_of_python_3_11_is_not_called_hostile() -> None:
    value = Foreign(Global("builtins.getattr"), (Global("my.module.Flavour"), "SWEET"))
    (line,) = texts(without_others(manifest(state={"a": value}), (), ()).notices.omitted)
    assert "builtins.getattr can reach code that runs programs" in line
    assert "hostile" not in line
    assert "--allow-object" not in line


def test_plain_values_stay_the_same_objects() -> None:
    state = {"a": {"b": [1, (2, {"c": Foreign(NAMESPACE, (), {"x": b"1"})})]}}
    result = without_others(manifest(state=state), (), ())
    assert result.state["a"] is state["a"]
    assert not result.notices.omitted


def test_groups_and_the_config_are_filtered_too() -> None:
    engine = FlatBufferEngine("x", None, None, None, False, None, {"a": SYSTEM, "b": 1})
    result = without_others(manifest(engine=engine, groups=({"lr": 1.0, "hook": SYSTEM},)), (), ())
    assert result.groups == ({"lr": 1.0},)
    assert isinstance(result.run.engine, FlatBufferEngine)
    assert result.run.engine.config == {"b": 1}
    assert [line.partition(":")[0] for line in texts(result.notices.omitted)] == [
        "param_groups.0.hook",
        "config.a",
    ]


def test_what_the_engine_needs_and_what_the_user_admits_stays() -> None:
    source = manifest(state={"a": FLAVOUR, "b": Foreign(Global("engine.Scaler"))})
    assert without_others(source, ("engine.Scaler",), ()).state.keys() == {"b"}
    assert without_others(source, ("engine.Scaler",), ("my.module.Flavour",)) == source
    assert others_of(source, needed=()) == ["engine.Scaler", "my.module.Flavour"]
    assert others_of(source, ("engine.Scaler",)) == ["my.module.Flavour"]


@pytest.mark.parametrize("name", ["system", "os.sys\ntem", "", "os.", "os.a-b", "os..b"])
def test_a_name_is_a_dotted_identifier(name: str) -> None:
    with pytest.raises(WrongOption, match="list of names"):
        options_of({"allow_object": [name]})
    with pytest.raises(CorruptCheckpoint, match="not the name"):
        Global(name)


def test_a_value_within_itself_is_refused() -> None:
    state: dict[str, Any] = {"a": []}
    state["a"].append(state)
    with pytest.raises(CorruptCheckpoint, match="refers to itself"):
        without_others(manifest(state=state), (), ())


@pytest.mark.parametrize("admitted", [(), ("my.Config",), ("my.Config", "zckpt.itself")])
def test_an_object_that_refers_to_itself_is_left_out_whole(admitted: tuple[str, ...]) -> None:
    config = Foreign(Global("my.Config"), (), {"items": {"a": {"_parent": ITSELF}}}, "new")
    source = manifest(state={"a": {"b": [config], "c": 1}})
    result = without_others(source, (), admitted)
    assert result.state == {"a": {"c": 1}}
    [line] = texts(result.notices.omitted)
    assert line.startswith("a.b: it has an object that refers to itself")
    assert "--allow-object" not in line
    assert others_of(source, needed=()) == ["my.Config"]
    assert admissible(config, ()) == []


def test_a_value_that_is_repeated_is_entered_once() -> None:
    value: list[Any] = [SYSTEM]
    for _ in range(60):  # 2 ** 60 paths
        value = [value, value]
    assert without_others(manifest(state={"a": value}), (), ()).state == {}
    value = [{"a": SYSTEM, "b": 1}]
    for _ in range(60):
        value = [value, value]
    kept = without_others(manifest(state={"a": value}), (), ()).state["a"]
    while isinstance(kept, list):
        kept = kept[-1]
    assert kept == {"b": 1}


HOSTILE = {
    "client_state": {
        "call": SYSTEM,
        "deep": [{"x": (SYSTEM,)}],
        "own": FLAVOUR,
        "epoch": 3,
    },
    "lr_scheduler": {"last_epoch": 7, "hook": SYSTEM},
    "module_extra": {"fc._extra_state": SYSTEM},
    "module_metadata": OrderedDict([("", {"version": SYSTEM})]),
    "data_sampler": SYSTEM,
    "random_ltd": Foreign(Global("builtins.eval"), ("1",)),
    "user_dict": {"x": SYSTEM},
    "optimizer": {"loss_scaler": SYSTEM},
}
ODD = States((StateRow("odd", "other", ("fc1.weight",), SYSTEM),))
TARGETS = [
    {"to": "deepspeed", "stage": 2, "dp": 2},
    {"to": "deepspeed", "stage": 3, "dp": 2},
    {"to": "deepspeed-universal"},
    {"to": "dcp", "dp": 2},
    {"to": "dcp", "dialect": "accelerate"},
    {"to": "gathered"},
    {"to": "gathered", "dialect": "safetensors"},
    {"to": "gathered", "dialect": "accelerate"},
    {"to": "onnxruntime", "dialect": "l2", "dp": 2},
]


def pickles(root: Path) -> Iterator[bytes]:
    """Every pickle of the files below `root`: of zips, `.metadata`, and zips inside `.distcp`."""
    for path in sorted(root.rglob("*")):
        if path.name == ".metadata":
            yield path.read_bytes()
        elif path.suffix == ".distcp":
            data = path.read_bytes()
            start = data.find(b"PK\x03\x04")
            while start >= 0:
                length, name, extra = struct.unpack_from("<IHH", data, start + 22)
                begin = start + 30 + name
                if data[start + 30 : begin].endswith(b"/data.pkl"):
                    yield data[begin + extra : begin + extra + length]
                start = data.find(b"PK\x03\x04", start + 4)
        elif path.is_file() and zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as file:
                for member in file.namelist():
                    if member.endswith("data.pkl"):
                        yield file.read(member)


def names(pickle: bytes) -> set[str]:
    """The names in a pickle, as Python's own disassembler reads it."""
    return {
        argument.replace(" ", ".")
        for opcode, argument, _ in pickletools.genops(pickle)
        if opcode.name == "GLOBAL"
    }


OURS = COMMON | {
    "__builtin__.set", "__builtin__.frozenset", "__builtin__.bytearray", "__builtin__.complex",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
    "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3",
    "torch.serialization._get_layout",
    "torch.storage.UntypedStorage",
    *(f"torch.{name}Storage" for name in ("Float", "Half", "BFloat16", "Long", "Double", "Int")),
    *(
        f"torch.distributed.checkpoint.metadata.{name}"
        for name in (
            "BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex",
            "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING", "StorageMeta",
        )
    ),
    "torch.distributed.checkpoint.filesystem._StorageInfo",
}  # fmt: skip


@pytest.mark.parametrize(
    "options", TARGETS, ids=lambda options: "-".join(map(str, options.values()))
)
def test_every_pickle_of_a_target_names_what_is_on_the_list_alone(
    options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = zckpt.read(EXAMPLE)
    hostile = replace(source, state={**source.state, **HOSTILE}, states=ODD)
    monkeypatch.setattr("zckpt.writing.conversion.read", lambda *_: hostile)
    report = zckpt.convert(EXAMPLE, tmp_path / "target", **options, drop_state=["odd"])
    written = [names(pickle) for pickle in pickles(tmp_path / "target")]
    assert written
    assert set().union(*written) <= OURS
    lines = "\n".join(texts(report["left_out"]))
    for name in ("os.system", "builtins.eval", "my.module.Flavour"):
        assert name in lines


def test_the_user_admits_an_object_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = zckpt.read(EXAMPLE)
    hostile = replace(source, state={**source.state, **HOSTILE}, states=ODD)
    monkeypatch.setattr("zckpt.writing.conversion.read", lambda *_: hostile)
    allowed = ("my.module.Flavour",)
    zckpt.convert(
        EXAMPLE, tmp_path / "target", to="gathered", allow_object=allowed, drop_state=["odd"]
    )
    written = set().union(*map(names, pickles(tmp_path / "target")))
    assert written - OURS == set(allowed)
    state = zckpt.read(tmp_path / "target").state["client_state"]
    assert state["own"].name == "my.module.Flavour"
    assert state["epoch"] == 3


VALUES = {
    "timedelta": datetime.timedelta(days=1, microseconds=2),
    "datetime": datetime.datetime(2026, 1, 2, 3, 4, 5, 6, datetime.timezone.utc),
    "date": datetime.date(2026, 1, 2),
    "time": datetime.time(3, 4),
    "path": pathlib.Path("a/b"),
    "pure path": pathlib.PurePosixPath("/a"),
    "version": TorchVersion("2.13.0+cpu"),
    "decimal": decimal.Decimal("0.10"),
    "ordered": OrderedDict(b=1, a=2),
}


@pytest.mark.parametrize("to", ["gathered", "dcp", "deepspeed"])
def test_values_of_harmless_standard_classes_arrive(to: str, tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save({**states, "own": VALUES}, tmp_path / "source.pt")
    report = zckpt.convert(tmp_path / "source.pt", tmp_path / "target", to=to)
    assert not [line for line in texts(report["left_out"]) if "it refers to" in line]
    assert zckpt.inspect(zckpt.read(tmp_path / "target"))["objects"] == []
    loaded = LOADED[to](tmp_path / "target")
    assert loaded == VALUES
    assert [*map(type, loaded.values())] == [*map(type, VALUES.values())]


def test_verify_names_what_is_left_out_of_the_program_s_own_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = zckpt.read(EXAMPLE)
    own = {"epoch": 3, "loader": {"seed": 1, "flavour": FLAVOUR}}
    changed = replace(source, state={**source.state, "client_state": own})
    with monkeypatch.context() as patch:
        patch.setattr("zckpt.writing.conversion.read", lambda *_: changed)
        for to in ("gathered", "universal"):
            zckpt.convert(EXAMPLE, tmp_path / to, to=to)
    report = zckpt.verify(tmp_path / "gathered", against=tmp_path / "universal")
    assert {"key": "client_state.loader.flavour", "only": "b"} in report["states"]
    assert not report["equal"]


def own_items(target: Path) -> dict[str, Any]:
    keys = FileSystemReader(target).read_metadata().state_dict_metadata
    state = {"own": {name: None for name in VALUES if f"own.{name}" in keys}}
    state["own"]["ordered"] = {"b": None, "a": None}
    dcp.load(state, storage_reader=FileSystemReader(target), no_dist=True)
    return {**state["own"], "ordered": OrderedDict(state["own"]["ordered"])}


LOADED: dict[str, Callable[[Path], dict[str, Any]]] = {
    "gathered": lambda path: torch.load(path / "source.pt", weights_only=False)["own"],
    "dcp": own_items,
    "deepspeed": lambda path: torch.load(next(path.glob("*/*model_states.pt")), weights_only=False)[
        "own"
    ],
}


def planted(target: Path, value: Any) -> None:
    """A universal checkpoint with `value` in its client state."""
    zckpt.convert(EXAMPLE, target)
    with changed(target) as document:
        document["state"]["client_state"]["evil"] = value


def test_a_universal_checkpoint_keeps_inert_objects_and_inspect_names_them(tmp_path: Path) -> None:
    call = {"function": {"$global": "os.system"}, "arguments": ["x"], "state": None, "how": "call"}
    planted(tmp_path / "universal", {"$object": call})
    assert zckpt.inspect(zckpt.read(tmp_path / "universal"))["objects"] == ["os.system"]
    report = zckpt.reshard(tmp_path / "universal", tmp_path / "run", dp=2)
    assert any(
        "client_state.evil: it refers to os.system" in line for line in texts(report["left_out"])
    )
    assert b"system" not in b"".join(pickles(tmp_path / "run"))


@pytest.mark.parametrize("name", ["os\nsystem", "c.os\nsystem\n(S'echo'\ntR"])
def test_a_line_s_end_in_a_name_is_refused_when_it_is_read(name: str, tmp_path: Path) -> None:
    planted(tmp_path / "universal", {"$global": name})
    with pytest.raises(CorruptCheckpoint, match="not the name"):
        zckpt.read(tmp_path / "universal")


# -- calls whose results a pickle drops

TRUE = b"X\4\0\0\0true"
DROPPED = {
    "a call": b"cposix\nsystem\n" + TRUE + b"\x85R0",
    "a call of protocol 4": b"\x8c\5posix\x8c\6system\x93" + TRUE + b"\x85R0",
    "a call of protocol 0": b"(" + TRUE + b"iposix\nsystem\n0",
    "a call with a mark": b"(cposix\nsystem\n" + TRUE + b"o0",
    "below a mark": b"(cposix\nsystem\n" + TRUE + b"\x85R1",
    "a name": b"cposix\nsystem\n0",
    "a value under a key that is set again": b"}(N" + b"cposix\nsystem\n" + b"NNu0",
    "in the memo": b"cposix\nsystem\nq\x7f0h\x7f" + TRUE + b"\x85R0",
}


def first_drops(pickled: bytes, dropped: bytes) -> bytes:
    """A pickle that runs `dropped` before anything else."""
    return pickled[:2] + dropped + pickled[2:]


def objects_of(path: Path) -> Any:
    return zckpt.inspect(zckpt.read(path))["objects"]


@pytest.mark.parametrize("dropped", DROPPED.values(), ids=DROPPED)
def test_a_dropped_call_is_listed(dropped: bytes, tmp_path: Path) -> None:
    for file in ("mp_rank_00_model_states", "bf16_zero_pp_rank_2_mp_rank_00_optim_states"):
        shutil.copytree(EXAMPLE, tmp_path / file)
        path = tmp_path / file / "global_step7" / f"{file}.pt"
        pickled, storages = parts_of(path)
        path.write_bytes(torch_file(first_drops(pickled, dropped), storages))
        assert objects_of(tmp_path / file) == ["posix.system"]


def test_a_dropped_call_in_metadata_is_listed(tmp_path: Path) -> None:
    shutil.copytree(DATA / "fsdp2-2.13.0-tiny", tmp_path / "run")
    assert objects_of(tmp_path / "run") == []
    path = tmp_path / "run" / ".metadata"
    path.write_bytes(first_drops(path.read_bytes(), DROPPED["a call"]))
    assert objects_of(tmp_path / "run") == ["posix.system"]


@pytest.mark.parametrize("which", range(5))
def test_a_dropped_call_in_a_file_of_torch_before_1_6_is_listed(which: int, tmp_path: Path) -> None:
    """Such a file is five pickles: three that say what it is, the value, the storages' names."""
    path, data, starts = tmp_path / "run.pt", legacy_file(), [0]
    path.write_bytes(data)
    assert objects_of(path) == []
    for _ in range(which):
        rest = io.BytesIO(data[starts[-1] :])
        for _opcode in pickletools.genops(rest):
            pass
        starts.append(starts[-1] + rest.tell())
    path.write_bytes(data[: starts[-1]] + first_drops(data[starts[-1] :], DROPPED["a call"]))
    assert objects_of(path) == ["posix.system"]


def test_what_torch_needs_for_tensors_is_not_listed(tmp_path: Path) -> None:
    weights = {
        "a": torch.nn.Parameter(torch.zeros(2)),
        **{str(t): torch.zeros(2, dtype=t) for t in (torch.float8_e5m2, torch.uint16, torch.int8)},
    }
    torch.save(weights, tmp_path / "new.pt")
    torch.save(weights, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert objects_of(tmp_path / "new.pt") == objects_of(tmp_path / "old.pt") == []
    pickled, storages = parts_of(tmp_path / "new.pt")
    pickled = first_drops(pickled, DROPPED["a call"])
    (tmp_path / "new.pt").write_bytes(torch_file(pickled, storages))
    assert objects_of(tmp_path / "new.pt") == ["posix.system"]
