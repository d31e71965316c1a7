"""Parts of ranks: records of DTensors and ShardedTensors, made by hand as torch pickles them."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import zckpt as package
from zckpt import errors
from zckpt.core.checkpoint.inert import Foreign, Global, Size
from zckpt.files.torchfile import TorchFile
from zckpt.files.torchshell import Storages, shell
from zckpt.files.torchtensors import REBUILD
from zckpt.formats.gathered import rank_trees
from zckpt.formats.gathered.rank_trees import MergedRanks
from zckpt.formats.statedict.slices import taken_of_rank_0
from zckpt.formats.statedict.tree import Leaf

from ...conftest import ROOT, Result, texts
from . import torch_ranks

Zckpt = Callable[..., Result]
PLACEMENTS = "torch.distributed.tensor.placement_types"
MESH = "torch.distributed.device_mesh"
Mesh = Callable[[Storages, Sequence[int]], Foreign]


def merge(files: Mapping[int, TorchFile], step_policy: str | None = None) -> MergedRanks:
    return rank_trees.merge(files, step_policy, (), by_checksums=False)


class Saved:
    """One rank's file in the making."""

    def __init__(self) -> None:
        self.storages = Storages()

    def tensor(self, values: Tensor) -> Any:
        names = {torch.float32: "F32", torch.int32: "I32", torch.int64: "I64"}
        tensor = self.storages.tensor(names[values.dtype], tuple(values.shape))
        self.storages.values_by_key[tensor.storage.key] = values.contiguous().numpy().tobytes()
        return tensor

    def dtensor(self, local: Tensor, shape: Sequence[int], mesh: Foreign, *placed: Any) -> Foreign:
        spec = record(
            "torch.distributed.tensor._dtensor_spec.DTensorSpec", mesh=mesh, placements=placed
        )
        state = {"_local_tensor": self.tensor(local), "_spec": spec}
        return rebuilt("torch.distributed.tensor.DTensor", shape, state)

    def sharded(
        self, parts: Sequence[tuple[Sequence[int], Tensor]], shape: Sequence[int], rank: int, w: int
    ) -> Foreign:
        module = "torch.distributed._shard"
        local = [
            slotted(
                f"{module}.sharded_tensor.shard.Shard",
                tensor=self.tensor(values),
                metadata=slotted(
                    f"{module}.metadata.ShardMetadata",
                    shard_offsets=list(offsets),
                    shard_sizes=list(values.shape),
                    placement=None,
                ),
            )
            for offsets, values in parts
        ]
        cls = Global(f"{module}.sharded_tensor.api.ShardedTensor")
        nested = Foreign(Global("builtins.getattr"), (cls, "ProcessGroupState"))
        group = {"local_rank": rank, "global_rank": rank}
        group |= {"local_world_size": w, "global_world_size": w}
        about = record(f"{module}.sharded_tensor.metadata.ShardedTensorMetadata", size=Size(shape))
        state = (local, about, Foreign(nested, (), group, "new"), None, False)
        return rebuilt(cls.name, shape, state)

    def file(self, path: Path, value: Any) -> TorchFile:
        file = shell(path.name, value, self.storages)
        data = bytearray(file.size)
        for offset, part in file.parts:
            data[offset : offset + len(part)] = part
        path.write_bytes(data)
        return TorchFile(str(path))


def record(name: str, **state: Any) -> Foreign:
    return Foreign(Global(name), (), state, "new")


def slotted(name: str, **state: Any) -> Foreign:
    return Foreign(Global(name), (), (None, state), "new")


def rebuilt(cls: str, shape: Sequence[int], state: Any) -> Foreign:
    about = (Global(cls), Global("torch.float32"), Size(shape), (), 0, None, "cpu", False)
    function = Global("torch._utils._rebuild_wrapper_subclass")
    return Foreign(Global(REBUILD), (function, Global(cls), about, state))


def placed(kind: str, **state: Any) -> Foreign:
    return record(f"{PLACEMENTS}.{kind}", **state)


def today(storages: Storages, sizes: Sequence[int]) -> Foreign:
    """A mesh as torch 2.13 pickles it."""
    world = int(torch.tensor(sizes).prod())
    strides = [int(torch.tensor(sizes[axis + 1 :]).prod()) for axis in range(len(sizes))]
    flat = "torch.distributed._mesh_layout._FlatLayout"
    axes = tuple(
        record(flat, shape=(size,), stride=(stride,))
        for size, stride in zip(sizes, strides, strict=True)
    )
    layout = record("torch.distributed._mesh_layout._MeshLayout", axes=axes)
    ranks = tuple(range(world))
    return record(
        "torch.distributed.device_mesh.DeviceMesh", _layout=layout, _flatten_rank_map=ranks
    )


def with_layout(storages: Storages, sizes: Sequence[int]) -> Foreign:
    """As torch 2.9: one layout of all axes, and the ranks as a tensor."""
    strides = tuple(int(torch.tensor(sizes[axis + 1 :]).prod()) for axis in range(len(sizes)))
    shape, stride = (tuple(sizes), strides) if len(sizes) > 1 else (sizes[0], strides[0])
    layout = record("torch.distributed._mesh_layout._MeshLayout", shape=shape, stride=stride)
    ranks = _ranks(storages, [int(torch.tensor(sizes).prod())])
    return record(f"{MESH}.DeviceMesh", _layout=layout, _rank_map=ranks)


def of_old(storages: Storages, sizes: Sequence[int]) -> Foreign:
    """As torch 2.4: the mesh is a tensor of ranks."""
    return record(f"{MESH}.DeviceMesh", mesh=_ranks(storages, sizes))


def _ranks(storages: Storages, sizes: Sequence[int]) -> Any:
    tensor = storages.tensor("I32", tuple(sizes))
    count = int(torch.tensor(sizes).prod())
    storages.values_by_key[tensor.storage.key] = struct.pack(f"<{count}i", *range(count))
    return tensor


def part(whole: Tensor, axis: int, at: int, count: int) -> Tensor:
    """What torch.chunk gives to the `at`-th of `count` ranks, which may be nothing."""
    chunks = whole.chunk(count, axis)
    return chunks[at] if at < len(chunks) else whole.narrow(axis, 0, 0)


def values_of(leaf: Leaf) -> Tensor:
    """Its elements, read from where its fragments say."""
    values = torch.full((leaf.numel,), float("nan"))
    for fragment in leaf.fragments:
        for run in fragment.runs(0, leaf.numel):
            data = Path(run.extent.file).read_bytes()
            bits = bytearray(data[run.extent.offset :][: run.extent.length])
            values[run.start : run.stop] = torch.frombuffer(bits, dtype=torch.float32)
    return values.reshape(leaf.shape)


def cut(
    folder: Path,
    whole: Tensor,
    sizes: Sequence[int],
    axes: Sequence[int | None],
    mesh: Mesh = today,
) -> dict[int, TorchFile]:
    """Every rank's file of `whole`, cut along `axes` of a mesh of `sizes`; None is replicated."""
    files = {}
    for rank in range(int(torch.tensor(sizes).prod())):
        saved, local, rest = Saved(), whole, rank
        at = []
        for size in reversed(sizes):
            rest, position = divmod(rest, size)
            at.insert(0, position)
        for axis, position, size in zip(axes, at, sizes, strict=True):
            local = local if axis is None else part(local, axis, position, size)
        marks = [placed("Replicate") if a is None else placed("Shard", dim=a) for a in axes]
        tensor = saved.dtensor(local, whole.shape, mesh(saved.storages, sizes), *marks)
        files[rank] = saved.file(folder / f"model_rank_{rank}.pt", {"w": tensor})
    return files


WHOLE = torch.arange(7 * 5, dtype=torch.float32).reshape(7, 5)


@pytest.mark.parametrize("mesh", [today, with_layout, of_old])
@pytest.mark.parametrize(
    ("sizes", "axes"),
    [
        ((3,), [0]),
        ((4,), [1]),
        ((9,), [0]),
        ((2, 2), [None, 0]),
        ((2, 3), [0, None]),
        ((2, 2), [0, 1]),
        ((2, 2), [1, 1]),
        ((2,), [None]),
    ],
)
def test_dtensors_are_put_together(
    mesh: Mesh, sizes: Sequence[int], axes: Sequence[int | None], tmp_path: Path
) -> None:
    merged = merge(cut(tmp_path, WHOLE, sizes, axes, mesh))
    assert torch.equal(values_of(merged.tree["w"]), WHOLE)
    assert merged.different == []


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    shape=st.lists(st.integers(0, 5), min_size=1, max_size=3),
    cuts=st.lists(st.tuples(st.integers(1, 3), st.integers(0, 3)), min_size=1, max_size=2),
)
def test_any_cut(shape: list[int], cuts: list[tuple[int, int]], tmp_path: Path) -> None:
    whole = torch.arange(int(torch.tensor(shape).prod()), dtype=torch.float32).reshape(shape)
    axes = [axis if axis < len(shape) else None for _, axis in cuts]
    merged = merge(cut(tmp_path, whole, [size for size, _ in cuts], axes))
    assert torch.equal(values_of(merged.tree["w"]), whole)


def sharded_files(
    folder: Path, parts: Sequence[Sequence[tuple[Sequence[int], Tensor]]], shape: Sequence[int]
) -> dict[int, TorchFile]:
    files = {}
    for rank, boxes in enumerate(parts):
        saved = Saved()
        tensor = saved.sharded(boxes, shape, rank, len(parts))
        files[rank] = saved.file(folder / f"model_rank_{rank}.pt", {"w": tensor})
    return files


class TestShardedTensors:
    def test_are_put_together(self, tmp_path: Path) -> None:
        parts = [[((0, 0), WHOLE[:3])], [], [((3, 0), WHOLE[3:])]]
        merged = merge(sharded_files(tmp_path, parts, WHOLE.shape))
        assert torch.equal(values_of(merged.tree["w"]), WHOLE)

    def test_boxes_of_any_kind(self, tmp_path: Path) -> None:
        parts = [[((0, 0), WHOLE[:, :2])], [((0, 2), WHOLE[:4, 2:]), ((4, 2), WHOLE[4:, 2:])]]
        merged = merge(sharded_files(tmp_path, parts, WHOLE.shape))
        assert torch.equal(values_of(merged.tree["w"]), WHOLE)

    @pytest.mark.parametrize(
        ("parts", "kind", "said"),
        [
            (
                [[((0, 0), WHOLE[:3])], []],
                errors.IncompleteCheckpoint,
                "35 elements, .* hold only 15",
            ),
            (
                [[((0, 0), WHOLE[:4])], [((3, 0), WHOLE[3:])]],
                errors.InconsistentCheckpoint,
                "shards of w overlap",
            ),
            (
                [[((5, 0), WHOLE[:4])], []],
                errors.InconsistentCheckpoint,
                "exceeds the tensor's shape",
            ),
            (
                [[((0, 0), WHOLE)], [((0, 0), WHOLE + 1)]],
                errors.InconsistentCheckpoint,
                "hold different values of the same elements",
            ),
        ],
    )
    def test_wrong_parts_are_refused(
        self, parts: Any, kind: type[Exception], said: str, tmp_path: Path
    ) -> None:
        files = sharded_files(tmp_path, parts, WHOLE.shape)
        with pytest.raises(kind, match=said):
            merge(files)

    def test_a_file_of_another_rank(self, tmp_path: Path) -> None:
        files = sharded_files(tmp_path, [[((0, 0), WHOLE[:3])], [((3, 0), WHOLE[3:])]], WHOLE.shape)
        with pytest.raises(
            errors.InconsistentCheckpoint, match="named as the file of rank 0, but was"
        ):
            merge({0: files[1], 1: files[0]})


class TestRefused:
    def test_parts_of_another_class(self, tmp_path: Path) -> None:
        """Quantized states under FSDP2: no rule of torch joins their codes and scales."""
        saved = Saved()
        tensor = saved.dtensor(WHOLE, WHOLE.shape, today(saved.storages, (1,)), placed("Replicate"))
        tensor.arguments[3]["_local_tensor"] = rebuilt("torchao.State8bit", WHOLE.shape, {})
        with pytest.raises(errors.UnsupportedCheckpoint, match="class torchao"):
            merge({0: saved.file(tmp_path / "model_rank_0.pt", {"w": tensor})})

    def test_a_missing_rank(self, tmp_path: Path) -> None:
        files = cut(tmp_path, WHOLE, (4,), [0])
        del files[1], files[3]
        with pytest.raises(errors.IncompleteCheckpoint, match=r"rank_1\.pt, .*rank_3\.pt "):
            merge(files)

    def test_a_rank_too_many(self, tmp_path: Path) -> None:
        files = cut(tmp_path, WHOLE, (3,), [0])
        with pytest.raises(errors.InconsistentCheckpoint, match=r"is of rank 3, .* there are 3"):
            merge({**files, 3: files[2]})

    def test_another_number_of_ranks(self, tmp_path: Path) -> None:
        (tmp_path / "b").mkdir()
        files, others = cut(tmp_path, WHOLE, (2,), [0]), cut(tmp_path / "b", WHOLE, (3,), [0])
        with pytest.raises(errors.ZckptError, match=r"2 ranks|of 3|there are"):
            merge({0: files[0], 1: others[1]})

    def test_parts_of_another_size(self, tmp_path: Path) -> None:
        files = cut(tmp_path, WHOLE, (4,), [0])  # 2, 2, 2 and 1 rows
        with pytest.raises(errors.InconsistentCheckpoint, match="but rank 3 of 4 should have"):
            merge({**files, 3: files[0]})

    def test_copies_that_differ(self, tmp_path: Path) -> None:
        (tmp_path / "b").mkdir()
        files = cut(tmp_path, WHOLE, (2,), [None])
        files[1] = cut(tmp_path / "b", WHOLE + 1, (2,), [None])[1]
        with pytest.raises(errors.InconsistentCheckpoint, match="different values of the same"):
            merge(files)

    @pytest.mark.parametrize("kind", ["_StridedShard", "Partial", "Unknown"])
    def test_other_placements(self, kind: str, tmp_path: Path) -> None:
        saved = Saved()
        tensor = saved.dtensor(WHOLE, WHOLE.shape, today(saved.storages, (1,)), placed(kind, dim=0))
        file = saved.file(tmp_path / "model_rank_0.pt", {"w": tensor})
        with pytest.raises(errors.UnsupportedCheckpoint, match=f"with the placement {kind}"):
            merge({0: file})

    @pytest.mark.parametrize("factor", [2, 3])
    def test_what_fsdp_cuts_after_tensor_parallelism(self, factor: int, tmp_path: Path) -> None:
        """`_StridedShard` along the axis of a later `Shard` cuts its parts."""
        for rank in range(4):
            with torch_ranks.as_rank(rank, 4):
                mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
                part = WHOLE.chunk(2)[rank % 2].chunk(2)[rank // 2].clone()
                placements = [_StridedShard(0, split_factor=factor), Shard(0)]
                sizes = {"shape": WHOLE.shape, "stride": WHOLE.stride()}
                tensor = DTensor.from_local(part, mesh, placements, run_check=False, **sizes)
                torch.save({"w": tensor}, tmp_path / f"model_rank_{rank}.pt")
        if factor == 2:
            assert torch.equal(package.load(tmp_path, "w/param"), WHOLE)
            package.convert(tmp_path, tmp_path.parent / f"{tmp_path.name}-whole")
            against = tmp_path.parent / f"{tmp_path.name}-whole"
            assert package.verify(tmp_path, against=against, gather=True)["equal"]
            return
        with pytest.raises(errors.UnsupportedCheckpoint, match="with the placement _StridedShard"):
            package.read(tmp_path)

    @pytest.mark.parametrize("name", ["_flat_param", "trunk._flat_param", "layers.0.flat_param_0"])
    def test_flat_parameters(self, name: str, tmp_path: Path) -> None:
        saved = Saved()
        state = {"model": {name: saved.tensor(WHOLE.reshape(-1))}}
        file = saved.file(tmp_path / "model_rank_0.pt", state)
        with pytest.raises(errors.UnsupportedCheckpoint, match="LOCAL_STATE_DICT") as raised:
            merge({0: file})
        assert "SHARDED_STATE_DICT or FULL_STATE_DICT" in raised.value.hint

    def test_steps_that_differ(self, tmp_path: Path) -> None:
        files = {}
        for rank in range(2):
            saved = Saved()
            value = {"state": {0: {"step": saved.tensor(torch.tensor(3.0 + rank))}}}
            files[rank] = saved.file(tmp_path / f"optim_rank_{rank}.pt", value)
        with pytest.raises(errors.InconsistentCheckpoint, match=r"3 .*4 "):
            merge(files)
        decided = merge(files, "max").tree["state"][0]["step"]
        assert decided.number().value == 4

    @pytest.mark.parametrize("world", [1 << 40, -1, "2", None])
    def test_worlds_that_none_can_have(self, world: Any, tmp_path: Path) -> None:
        saved = Saved()
        tensor = saved.sharded([((0, 0), WHOLE)], WHOLE.shape, 0, world)
        with pytest.raises(errors.CorruptCheckpoint):
            merge({0: saved.file(tmp_path / "model_rank_0.pt", {"w": tensor})})

    @pytest.mark.parametrize("axis", [2, -3, "0", None])
    def test_axes_that_no_tensor_has(self, axis: Any, tmp_path: Path) -> None:
        saved = Saved()
        mesh = today(saved.storages, (1,))
        tensor = saved.dtensor(WHOLE, WHOLE.shape, mesh, placed("Shard", dim=axis))
        with pytest.raises(errors.CorruptCheckpoint, match="malformed sharded tensor"):
            merge({0: saved.file(tmp_path / "model_rank_0.pt", {"w": tensor})})

    def test_a_mesh_without_ranks(self, tmp_path: Path) -> None:
        saved = Saved()
        tensor = saved.dtensor(
            WHOLE, WHOLE.shape, today(saved.storages, (0,)), placed("Shard", dim=0)
        )
        with pytest.raises(errors.ZckptError):
            merge({0: saved.file(tmp_path / "model_rank_0.pt", {"w": tensor})})

    def test_malformed_records(self, tmp_path: Path) -> None:
        saved = Saved()
        bad = rebuilt("torch.distributed.tensor.DTensor", (7, 5), {"_spec": None})
        with pytest.raises(errors.CorruptCheckpoint, match="malformed sharded tensor"):
            merge({0: saved.file(tmp_path / "model_rank_0.pt", {"w": bad})})


def test_what_is_not_sharded_is_rank_0s(tmp_path: Path) -> None:
    files = {}
    for rank in range(3):
        saved = Saved()
        value = {
            "same": saved.tensor(WHOLE),
            "rng": {"cpu": saved.tensor(WHOLE + rank), "python": (3, rank)},
            "counter": rank,
            "nan": float("nan"),
            "object": Foreign(Global("a.B"), (1,), {"x": 2}),
        }
        files[rank] = saved.file(tmp_path / f"extra_rank_{rank}.pt", value)
    merged = merge(files)
    assert texts(taken_of_rank_0(merged.different)) == [
        "rng.cpu: the values differ between ranks; rank 0's are used",
        "rng.python.1: the values differ between ranks; rank 0's are used",
        "counter: the values differ between ranks; rank 0's are used",
    ]
    assert merged.tree["counter"] == 0
    assert torch.equal(values_of(merged.tree["rng"]["cpu"]), WHOLE)


@pytest.mark.parametrize(
    ("place", "values"),
    [
        (("lr_scheduler", "last_epoch"), (3, 3, 4)),
        (("lr_scheduler", "_last_lr"), ([0.1], [0.1], [0.2])),
        (("lr_schedulers", 0), ({"last_epoch": 3}, {"last_epoch": 2}, {"last_epoch": 3})),
        (("trainer", "scheduler"), (None, {"last_epoch": 3}, {"last_epoch": 3})),
    ],
)
def test_schedulers_that_differ_are_of_several_saves(
    place: tuple[str, Any], values: tuple[Any, ...], tmp_path: Path
) -> None:
    files = {}
    for rank, value in enumerate(values):
        tree = {place[0]: [value] if place[1] == 0 else {place[1]: value}, "rng": rank}
        files[rank] = Saved().file(tmp_path / f"extra_rank_{rank}.pt", tree)
    with pytest.raises(
        errors.InconsistentCheckpoint, match=f"ranks disagree on {place[0]}"
    ) as raised:
        merge(files)
    assert "copy the files of all ranks from one save" in raised.value.hint
    merged = merge(files, step_policy="max")
    first, second = texts(taken_of_rank_0(merged.different))
    assert first.startswith(place[0])
    assert second == "rng: the values differ between ranks; rank 0's are used"


class TestOneRanksPart:
    """A file with the name of a whole one, in which one rank saved its parts of DTensors."""

    DATA = ROOT / "tests" / "data" / "accelerate-1.14.0-lora-w2"
    SAID = "has only 1/2 of the adapter, rank 0's shard: the other ranks wrote no file"

    @pytest.fixture
    def checkpoint(self, tmp_path: Path) -> Path:
        return Path(shutil.copytree(self.DATA / "checkpoint-3", tmp_path / "checkpoint-3"))

    @pytest.mark.parametrize("name", [".", "pytorch_model_fsdp.bin"])
    def test_accelerates_adapter(self, name: str, checkpoint: Path, zckpt: Zckpt) -> None:
        path, target = checkpoint / name if name != "." else checkpoint, checkpoint.parent / "out"
        for words in (
            ("inspect", path),
            ("verify", path),
            ("convert", path, target),
            ("reshard", path, target),
            ("export", path, target),
        ):
            ended = zckpt(*words)
            assert ended.code == (3 if words[0] == "verify" else 1)
            assert self.SAID in ended.out + ended.err
        assert "copy the directory without pytorch_model_fsdp.bin" in ended.err

    def test_the_hint_gives_the_whole_adapter(self, checkpoint: Path, tmp_path: Path) -> None:
        (checkpoint / "pytorch_model_fsdp.bin").unlink()
        oracle = torch.load(self.DATA / "oracle.pt", weights_only=False)
        for name, tensor in oracle["tensors"].items():
            parameter, _, slot = name.rpartition("/")
            entry = f"{parameter}/{'param' if slot == 'weight' else slot}"
            assert torch.equal(package.load(checkpoint, entry), tensor), name
        package.reshard(checkpoint, tmp_path / "resumed")

    def test_without_the_whole_adapter(self, checkpoint: Path) -> None:
        (checkpoint / "adapter_model.safetensors").unlink()
        with pytest.raises(errors.IncompleteCheckpoint, match=self.SAID) as raised:
            package.read(checkpoint)
        assert "trainer.save_model()" in raised.value.hint

    def test_the_hint_for_files_of_any_name(self, tmp_path: Path) -> None:
        folder = torch_ranks.save(
            tmp_path / "run", 3, {"fc.weight": WHOLE}, torch_ranks.dtensors((3,), (0,))
        )
        (tmp_path / "together").mkdir()
        for rank in range(3):
            (tmp_path / str(rank)).mkdir()
            path = tmp_path / str(rank) / "weights.pt"
            (folder / f"model_world_size_3_rank_{rank}.pt").rename(path)
            with pytest.raises(
                errors.IncompleteCheckpoint, match=rf"1/3 .*rank {rank}'s shards"
            ) as raised:
                package.read(path)
            assert "model_rank_0.pt to model_rank_2.pt" in raised.value.hint
            path = path.rename(tmp_path / "together" / f"model_rank_{rank}.pt")
        assert torch.equal(package.load(path.parent, "fc.weight/param"), WHOLE)
        shutil.copy(
            tmp_path / "together" / "model_rank_1.pt", tmp_path / "together/model_rank_2.pt"
        )
        with pytest.raises(
            errors.InconsistentCheckpoint, match="saved as model_world_size_3_rank_1"
        ):
            package.read(tmp_path / "together")
