"""What `verify --gather` proves of the reader of torch.distributed.checkpoint, right or broken."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from msgspec.structs import replace
from safetensors.torch import save_file
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
)

import zckpt
from zckpt.core.ranks.partition import Joined, Nameless
from zckpt.formats.dcp import gather, hf, read
from zckpt.formats.statedict.tree import TensorPiece

from ..broken import assert_gathers, found, reading, shifted, swapped, without
from .test_read import change_metadata
from .torch_dcp import DATA, alike, saved, whole

FIRST = "trunk.0.weight"  # of the sample: 29 x 19, cut into rows over two ranks


def save_cut(run: Path, state: dict[str, Any], boxes: dict[str, Sequence[tuple[int, ...]]]) -> None:
    """Saves `state` with some tensors in boxes: `offset, offset, ..., size, size, ...` of each."""
    keys: dict[str, Any] = {}
    for key, listed in boxes.items():
        tensor = state.pop(key)
        for number, box in enumerate(listed):
            dims = len(box) // 2
            place = tuple(slice(a, a + b) for a, b in zip(box[:dims], box[dims:], strict=True))
            state[f"{key}#{number}"] = tensor[place].clone()
        keys[key] = tensor.shape
    dcp.save(state, checkpoint_id=run)

    def join(metadata: Metadata) -> None:
        items, storage = metadata.state_dict_metadata, metadata.storage_data
        for key, shape in keys.items():
            whole = items[f"{key}#0"]
            chunks = []
            for number, box in enumerate(boxes[key]):
                del items[f"{key}#{number}"]
                metadata.planner_data.pop(f"{key}#{number}", None)
                dims = len(box) // 2
                offsets, sizes = torch.Size(box[:dims]), torch.Size(box[dims:])
                chunks.append(ChunkStorageMetadata(offsets, sizes))
                old = MetadataIndex(f"{key}#{number}", torch.Size([0] * dims))
                storage[MetadataIndex(key, offsets)] = storage.pop(old)
            items[key] = dataclasses.replace(whole, size=shape, chunks=chunks)
            if metadata.planner_data is not None:
                metadata.planner_data[key] = tuple(key.split(".", 1))

    change_metadata(run, join)


@pytest.fixture
def in_boxes(tmp_path: Path) -> Path:
    """Weights without an optimizer: rows, columns, both, and planes of three axes."""
    tensors = {
        "rows": torch.randn(5, 4),
        "columns": torch.randn(4, 5),
        "both": torch.randn(4, 4),
        "planes": torch.randn(3, 4, 2),
    }
    boxes = {
        "model.rows": [(2, 0, 3, 4), (0, 0, 2, 4)],
        "model.columns": [(0, 0, 4, 3), (0, 3, 4, 2)],
        "model.both": [(0, 0, 2, 2), (0, 2, 2, 2), (2, 0, 2, 2), (2, 2, 2, 2)],
        "model.planes": [(0, 0, 0, 3, 1, 2), (0, 1, 0, 3, 3, 1), (0, 1, 1, 3, 3, 1)],
    }
    state = {f"model.{name}": tensor for name, tensor in tensors.items()}
    save_cut(tmp_path / "run", state, boxes)
    assert alike(whole(tmp_path / "run")["model"], tensors), "torch itself reads something else"
    return tmp_path / "run"


class TestTheSample:
    """FSDP2's own directory: two ranks, nested, tied weights."""

    def test_all_names_are_stated(self, tmp_path: Path) -> None:
        assert assert_gathers(DATA, tmp_path) == []
        parts = gather.partitions(str(DATA))
        cut = [part for part in parts if isinstance(part, Joined) and len(part.parts) == 2]
        assert (FIRST, "exp_avg_sq") in {part.key for part in cut}
        assert not any(isinstance(part, Nameless) for part in parts)

    @pytest.mark.parametrize("slot", ["param", "exp_avg"])
    def test_a_shifted_tensor(self, slot: str, tmp_path: Path) -> None:
        name = f"{FIRST}/{slot}"
        assert found(DATA, tmp_path, reading(read, shifted(name)))[0] == {name}

    def test_swapped_slots(self, tmp_path: Path) -> None:
        both = f"{FIRST}/exp_avg", f"{FIRST}/exp_avg_sq"
        assert found(DATA, tmp_path, reading(read, swapped(*both)))[0] == {*both}

    @pytest.mark.parametrize("slot", ["param", "exp_avg_sq"])
    def test_swapped_names(self, slot: str, tmp_path: Path) -> None:
        """Two parameters of equal shapes."""
        by_shape: dict[Any, list[str]] = {}
        for entry in zckpt.read(DATA).entries.values():
            if entry.slot == slot:
                by_shape.setdefault((entry.shape, entry.dtype), []).append(entry.name)
        both = next(names[:2] for names in by_shape.values() if len(names) > 1)
        assert found(DATA, tmp_path, reading(read, swapped(*both)))[0] == {*both}

    def test_swapped_ranks(self, tmp_path: Path) -> None:
        """Each rank's rows where the other's belong; they are as many."""
        right = read.assembled
        state = {"model": {"w": torch.arange(24.0).reshape(6, 4)}, "step": 1}
        boxes = {"model.w": [(0, 0, 3, 4), (3, 0, 3, 4)]}
        save_cut(tmp_path / "run", {"model.w": state["model"]["w"]}, boxes)

        def wrong(name: str, dtype: str, shape: Any, pieces: Sequence[TensorPiece]) -> Any:
            if name.startswith("model.w "):
                a, b = pieces
                pieces = [replace(a, offsets=b.offsets), replace(b, offsets=a.offsets)]
            return right(name, dtype, shape, pieces)

        def broken(patch: pytest.MonkeyPatch) -> None:
            patch.setattr(read, "assembled", wrong)

        assert found(tmp_path / "run", tmp_path, broken)[0] == {"w/param"}

    def test_a_tensor_that_is_left_out(self, tmp_path: Path) -> None:
        """Of a whole slot, so that the other side's lack of it is no finding of its own."""
        broken = reading(read, lambda e: {k: v for k, v in e.items() if v.slot != "exp_avg"})
        with pytest.MonkeyPatch.context() as patch:
            broken(patch)
            zckpt.convert(DATA, tmp_path / "broken")
            report = zckpt.verify(DATA, tmp_path / "broken", gather=True, device="cpu")
        assert f"{FIRST}/exp_avg" in report["only_a"]


class TestBoxes:
    def test_are_joined(self, in_boxes: Path, tmp_path: Path) -> None:
        assert assert_gathers(in_boxes, tmp_path) == []

    @pytest.mark.parametrize("name", ["rows", "columns", "both", "planes"])
    def test_shifted(self, name: str, in_boxes: Path, tmp_path: Path) -> None:
        broken = reading(read, shifted(f"{name}/param"))
        assert found(in_boxes, tmp_path, broken)[0] == {f"{name}/param"}

    def test_a_reader_that_takes_columns_for_rows(self, in_boxes: Path, tmp_path: Path) -> None:
        """Boxes of a square matrix, at transposed offsets."""
        right = read.assembled

        def wrong(name: str, dtype: str, shape: Any, pieces: Sequence[TensorPiece]) -> Any:
            if name.startswith("model.both "):
                pieces = [replace(piece, offsets=piece.offsets[::-1]) for piece in pieces]
            return right(name, dtype, shape, pieces)

        def broken(patch: pytest.MonkeyPatch) -> None:
            patch.setattr(read, "assembled", wrong)

        assert found(in_boxes, tmp_path, broken)[0] == {"both/param"}

    @pytest.mark.parametrize("memory", [1 << 7, 1 << 9, 1 << 20])
    def test_any_memory(self, memory: int, in_boxes: Path, tmp_path: Path) -> None:
        zckpt.convert(in_boxes, tmp_path / "right")
        options = {"gather": True, "device": "cpu", "memory": memory, "jobs": 2}
        report = zckpt.verify(in_boxes, tmp_path / "right", **options)
        assert report["equal"], report
        planned = zckpt.verify(in_boxes, tmp_path / "right")
        assert report["digests"] == planned["digests"]


Save = Callable[[Path], None]


def flat(run: Path) -> None:
    saved(run, {"step": torch.tensor(7.0)}, {"weight_decay": 0.0}, flat=True)


def nested(run: Path) -> None:
    saved(run, {"step": torch.tensor(7.0)}, {"weight_decay": 0.0})


def numbered(run: Path, **group: Any) -> None:
    """Two weights of one shape and one of another, known by number."""
    model = {"a": torch.randn(3, 4), "b": torch.randn(5), "c": torch.randn(3, 4)}
    state = {n: {"exp_avg": w + 1, "exp_avg_sq": w * w} for n, w in enumerate(model.values())}
    groups = [{"lr": 0.1, "params": [0, 1, 2], **group}]
    dcp.save({"model": model, "optim": {"state": state, "param_groups": groups}}, checkpoint_id=run)


def stated(run: Path) -> None:
    """With the names beside the numbers, in another order than the model's (torch >= 2.6)."""
    numbered(run, param_names=["c", "b", "a"])


def in_folders(run: Path) -> None:
    """Accelerate's: model and optimizer in a folder each."""
    nested(run / "both")
    state = whole(run / "both")
    dcp.save({"model": state["model"]}, checkpoint_id=run / "pytorch_model_fsdp_0")
    dcp.save({"optimizer": state["optim"]}, checkpoint_id=run / "optimizer_0")
    for file in (run / "both").iterdir():
        file.unlink()
    (run / "both").rmdir()


class TestNames:
    @pytest.mark.parametrize("save", [flat, nested, stated, in_folders])
    def test_that_files_state(self, save: Save, tmp_path: Path) -> None:
        save(tmp_path / "run")
        assert assert_gathers(tmp_path / "run", tmp_path) == []
        both = "a/exp_avg", "a/exp_avg_sq"
        assert found(tmp_path / "run", tmp_path, reading(read, swapped(*both)))[0] == {*both}

    def test_stated_names_of_numbers_that_are_swapped(self, tmp_path: Path) -> None:
        stated(tmp_path / "run")
        both = "a/exp_avg", "c/exp_avg"
        assert found(tmp_path / "run", tmp_path, reading(read, swapped(*both)))[0] == {*both}

    def test_that_no_file_states(self, tmp_path: Path) -> None:
        """The elements are proven, and the report says whose names are not."""
        numbered(tmp_path / "run")
        names = {"param_names": ["a", "b", "c"]}
        taken = assert_gathers(tmp_path / "run", tmp_path, **names)
        assert sorted(taken) == sorted(f"{n}/{s}" for n in "abc" for s in ("exp_avg", "exp_avg_sq"))

    @pytest.mark.parametrize("change", [swapped("b/exp_avg", "b/exp_avg_sq"), shifted("b/exp_avg")])
    def test_numbers_of_a_broken_reader(self, change: Any, tmp_path: Path) -> None:
        """Each wrong tensor is not what the engine gathers, and each right one is not read."""
        numbered(tmp_path / "run")
        options = {"param_names": ["a", "b", "c"]}
        _, problems = found(tmp_path / "run", tmp_path, reading(read, change), **options)
        assert any("the engine would not gather b/exp_avg" in message for message in problems)
        assert any("which zckpt does not read" in message for message in problems)

    def test_a_number_that_is_left_out(self, tmp_path: Path) -> None:
        numbered(tmp_path / "run")
        broken, options = reading(read, without("b/exp_avg")), {"param_names": ["a", "b", "c"]}
        _, problems = found(tmp_path / "run", tmp_path, broken, **options)
        assert len(problems) == 1
        assert "of slot exp_avg" in problems[0]

    def test_several_models(self, tmp_path: Path) -> None:
        """Nothing but a habit says which is the model: names are the reader's."""
        state = {"best": {"w": torch.randn(3)}, "ema": {"w": torch.randn(3)}}
        dcp.save(state, checkpoint_id=tmp_path / "run")
        assert assert_gathers(tmp_path / "run", tmp_path) == ["w/param"]


class TestHuggingFace:
    @pytest.fixture
    def run(self, tmp_path: Path) -> Path:
        (tmp_path / "run").mkdir()
        info = [{"w": {"saved_offsets": [2 * rank, 0]}} for rank in (0, 1)]
        for rank in (0, 1):
            path = tmp_path / "run" / f"shard-{rank + 1:05d}-model-00001-of-00001.safetensors"
            text = {"DCP_SHARDING_INFO": str(info[rank]).replace("'", '"')}
            save_file({"w": torch.randn(2, 3)}, path, metadata=text)
        return tmp_path / "run"

    def test_is_joined(self, run: Path, tmp_path: Path) -> None:
        assert assert_gathers(run, tmp_path) == []

    def test_swapped_ranks(self, run: Path, tmp_path: Path) -> None:
        right = hf.solid_piece

        def broken(patch: pytest.MonkeyPatch) -> None:
            patch.setattr(hf, "solid_piece", lambda s, at: right(s, (2 - at[0], at[1])))

        assert found(run, tmp_path, broken)[0] == {"w/param"}
