"""torch.distributed.checkpoint's directories: what is read, what is written, what is refused."""

from __future__ import annotations

import json
import pickle
import random
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

import zckpt
from zckpt import errors
from zckpt.core.fragments import Extent
from zckpt.formats.dcp import write as dcp_writing
from zckpt.formats.statedict.tree import TensorPiece, assembled
from zckpt.training.options import Options

from ...conftest import EXAMPLE, ROOT
from ..contract import FormatContract
from ..equality import assert_proven, same_bits

DATA = ROOT / "tests" / "data" / "fsdp2-2.13.0-w2"  # FSDP2, two ranks, two groups, a scheduler
Change = Callable[[Metadata], None]


def whole(directory: Path) -> dict[str, Any]:
    """What torch itself reads."""
    file = directory.parent / "whole.pt"
    dcp_to_torch_save(directory, file)
    state: dict[str, Any] = torch.load(file, weights_only=False)
    return state


def alike(a: Any, b: Any) -> bool:
    """Equal values, tensors bit for bit; the order of keys does not count."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and same_bits(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(alike(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(alike, a, b))
    return bool(a == b)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DATA, tmp_path / "run"))


def change_metadata(directory: Path, change: Change) -> None:
    metadata = FileSystemReader(directory).read_metadata()
    change(metadata)
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))


class TestDcp(FormatContract):
    format = "dcp"

    @pytest.fixture
    def checkpoint(self, tmp_path: Path) -> Path:
        return Path(shutil.copytree(DATA, tmp_path / "run"))


class TestWritten(FormatContract):
    """What zckpt wrote, of DeepSpeed's files."""

    format = "dcp"

    @pytest.fixture
    def checkpoint(self, tmp_path: Path) -> Path:
        zckpt.convert(EXAMPLE, tmp_path / "run", to="dcp", dp=3)
        return tmp_path / "run"


@pytest.mark.parametrize("dp", [1, 2, 3, 5])
@pytest.mark.parametrize("most", [8 << 30, 20_000])
def test_torch_reads_what_it_saved(checkpoint: Path, dp: int, most: int, tmp_path: Path) -> None:
    zckpt.reshard(checkpoint, tmp_path / "again", dp=dp, max_file_size=most)
    assert alike(whole(tmp_path / "again"), whole(checkpoint))
    assert_proven(checkpoint, tmp_path / "again")


def test_pieces_are_those_of_the_ranks(tmp_path: Path) -> None:
    rows = torch.arange(37 * 5000, dtype=torch.float32).view(37, 5000)
    dcp.save({"model": {"w": rows, "b": torch.ones(3)}}, checkpoint_id=tmp_path / "run")
    zckpt.reshard(tmp_path / "run", tmp_path / "again", dp=4)
    metadata = FileSystemReader(tmp_path / "again").read_metadata()
    cut = [tuple(chunk.sizes) for chunk in metadata.state_dict_metadata["model.w"].chunks]
    assert cut == [(10, 5000), (10, 5000), (10, 5000), (7, 5000)]
    files = {
        metadata.storage_data[MetadataIndex("model.w", (at, 0))].relative_path for at in (0, 30)
    }
    assert files == {"__0_0.distcp", "__3_0.distcp"}
    assert len(metadata.state_dict_metadata["model.b"].chunks) == 1
    assert torch.equal(whole(tmp_path / "again")["model"]["w"], rows)


def test_flat_keys(checkpoint: Path, tmp_path: Path) -> None:
    zckpt.convert(checkpoint, tmp_path / "flat", to="dcp", dcp_layout="flat")
    keys = FileSystemReader(tmp_path / "flat").read_metadata().planner_data
    assert keys["optim.state.trunk.0.weight.exp_avg"] == ("optim", "state.trunk.0.weight.exp_avg")
    zckpt.convert(tmp_path / "flat", tmp_path / "nested", to="dcp", dcp_layout="nested")
    nested, before = whole(tmp_path / "nested"), whole(checkpoint)
    # flat keys keep no order of groups' members but the model's
    for group in (*nested["optim"]["param_groups"], *before["optim"]["param_groups"]):
        group["params"].sort()
    assert alike(nested, before)


@pytest.mark.parametrize(
    "kind",
    ["Adadelta", "Adafactor", "Adamax", "ASGD", "LBFGS", "Muon", "NAdam", "RAdam", "Rprop"],
)
@pytest.mark.parametrize("stepped", [True, False])
def test_groups_get_no_keys_of_another_optimizer(kind: str, stepped: bool, tmp_path: Path) -> None:
    model = torch.nn.Linear(6, 4, bias=False)
    optimizer = getattr(torch.optim, kind)(model.parameters())

    def closure() -> Any:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 6)).square().mean()
        loss.backward()
        return loss

    if stepped:
        optimizer.step(closure)
    state = optimizer.state_dict()
    named = {
        "state": {"weight": state["state"][0]} if stepped else {},
        "param_groups": [{**state["param_groups"][0], "params": ["weight"]}],
    }
    dcp.save({"model": model.state_dict(), "optim": named}, checkpoint_id=tmp_path / "run")
    zckpt.convert(tmp_path / "run", tmp_path / "universal")
    zckpt.convert(tmp_path / "universal", tmp_path / "again", to="dcp")
    assert alike(whole(tmp_path / "again"), whole(tmp_path / "run"))


def test_other_state_survives(checkpoint: Path, tmp_path: Path) -> None:
    state = whole(checkpoint)
    state["rng"] = [torch.arange(7, dtype=torch.uint8), {"seed": 3}]
    state["app"] = {"tuple": (torch.zeros(2), 1.5), "text": "a", "half": torch.tensor(1.5)}
    dcp.save(state, checkpoint_id=tmp_path / "run")
    zckpt.convert(tmp_path / "run", tmp_path / "universal")
    zckpt.convert(tmp_path / "universal", tmp_path / "again", to="dcp")
    assert alike(whole(tmp_path / "again"), whole(tmp_path / "run"))


def test_a_tied_weight_is_known_by_its_bytes(checkpoint: Path) -> None:
    manifest = zckpt.read(checkpoint)
    assert manifest.parameters["embedding.weight"].aliases == ("head.weight",)
    assert [entry.name for entry in manifest.replicas] == ["embedding.weight/param"]


def test_copies_that_differ_are_not_tied(checkpoint: Path, tmp_path: Path) -> None:
    state = whole(checkpoint)
    state["model"]["head.weight"][3, 3] += 1
    dcp.save(state, checkpoint_id=tmp_path / "run")
    manifest = zckpt.read(tmp_path / "run")
    assert manifest.parameters["embedding.weight"].aliases == ()
    assert not manifest.parameters["head.weight"].trainable


def test_equal_constants_are_not_tied(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.ones(5))
    optimizer = torch.optim.AdamW([weight])
    weight.sum().backward()
    optimizer.step()
    weight.data = torch.ones(5)
    state = {"a": weight.data, "b": torch.ones(5)}
    optim = {
        "state": {"a": optimizer.state[weight]},
        "param_groups": [{"lr": 1.0, "params": ["a"]}],
    }
    dcp.save({"model": state, "optim": optim}, checkpoint_id=tmp_path / "run")
    assert zckpt.read(tmp_path / "run").parameters["a"].aliases == ()


class TestRefused:
    """Named errors, and no target."""

    def refused(self, run: Path, error: type[errors.ZckptError], *words: str) -> None:
        target = run.parent / "target"
        with pytest.raises(error) as raised:
            zckpt.convert(run, target)
        for word in words:
            assert word in raised.value.message + raised.value.hint
        assert not list(run.parent.glob("target*"))

    def test_an_unfinished_save(self, checkpoint: Path) -> None:
        (checkpoint / ".metadata").unlink()
        self.refused(checkpoint, errors.IncompleteCheckpoint, "did not finish")

    def test_a_missing_file(self, checkpoint: Path) -> None:
        (checkpoint / "__1_0.distcp").unlink()
        self.refused(checkpoint, errors.IncompleteCheckpoint, "__1_0.distcp")

    def test_a_short_file(self, checkpoint: Path) -> None:
        file = checkpoint / "__1_0.distcp"
        file.write_bytes(file.read_bytes()[:-1000])
        self.refused(checkpoint, errors.IncompleteCheckpoint, "__1_0.distcp")

    def test_a_flipped_bit(self, checkpoint: Path) -> None:
        extent = zckpt.read(checkpoint).entries["trunk.0.weight/exp_avg"].fragments[1].extent
        with open(extent.file, "r+b") as file:
            file.seek(extent.offset + 5)
            (byte,) = file.read(1)
            file.seek(extent.offset + 5)
            file.write(bytes([byte ^ 4]))
        self.refused(checkpoint, errors.CorruptCheckpoint, extent.file)
        report = zckpt.verify(checkpoint)
        assert "trunk.0.weight/exp_avg" in str(report["problems"])

    def test_a_file_outside(self, checkpoint: Path) -> None:
        def change(metadata: Metadata) -> None:
            for place in metadata.storage_data.values():
                place.relative_path = "../" + place.relative_path

        change_metadata(checkpoint, change)
        self.refused(checkpoint, errors.CorruptCheckpoint, "outside")

    def test_a_piece_that_is_nowhere(self, checkpoint: Path) -> None:
        def change(metadata: Metadata) -> None:
            metadata.state_dict_metadata["model.trunk.0.weight"].chunks.pop()

        change_metadata(checkpoint, change)
        self.refused(checkpoint, errors.IncompleteCheckpoint, "model.trunk.0.weight")

    def test_pieces_that_overlap(self, checkpoint: Path) -> None:
        def change(metadata: Metadata) -> None:
            item = metadata.state_dict_metadata["model.trunk.0.weight"]
            item.size = torch.Size([29 + 14, 19])
            item.chunks.append(item.chunks[1])

        change_metadata(checkpoint, change)
        self.refused(checkpoint, errors.InconsistentCheckpoint, "overlap")

    def test_another_shape(self, checkpoint: Path) -> None:
        def change(metadata: Metadata) -> None:
            metadata.state_dict_metadata["model.trunk.0.weight"].chunks[1].sizes = torch.Size(
                [14, 18]
            )

        change_metadata(checkpoint, change)
        self.refused(checkpoint, errors.InconsistentCheckpoint, "model.trunk.0.weight")

    def test_compressed_items(self, checkpoint: Path) -> None:
        def change(metadata: Metadata) -> None:
            next(iter(metadata.storage_data.values())).transform_descriptors = ["zstd"]

        change_metadata(checkpoint, change)
        self.refused(checkpoint, errors.UnsupportedCheckpoint, "zstd")

    def test_a_list_without_end(self, checkpoint: Path) -> None:
        def change(metadata: Metadata) -> None:
            metadata.planner_data["optim.param_groups.0.lr"] = (
                "optim",
                "param_groups",
                1 << 40,
                "lr",
            )

        change_metadata(checkpoint, change)
        self.refused(checkpoint, errors.CorruptCheckpoint)

    def test_two_values_at_one_place(self, checkpoint: Path) -> None:
        def change(metadata: Metadata) -> None:
            assert metadata.planner_data is not None
            for key in ("model.trunk.0.weight", "model.trunk.0.bias"):
                metadata.planner_data[key] = ("model", "trunk.0.weight")

        change_metadata(checkpoint, change)
        self.refused(checkpoint, errors.CorruptCheckpoint, "two values")

    @pytest.mark.parametrize("path", [("a",) * 50_000, ("a", 999_999, 999_999)])
    def test_paths_without_end(self, checkpoint: Path, path: tuple[Any, ...]) -> None:
        def change(metadata: Metadata) -> None:
            assert metadata.planner_data is not None
            metadata.planner_data["optim.param_groups.0.lr"] = path

        change_metadata(checkpoint, change)
        self.refused(checkpoint, errors.CorruptCheckpoint)

    def test_a_negative_length(self, checkpoint: Path) -> None:
        def change(metadata: Metadata) -> None:
            for info in metadata.storage_data.values():
                info.offset, info.length = 0, -1

        change_metadata(checkpoint, change)
        self.refused(checkpoint, errors.IncompleteCheckpoint)

    def test_megatron(self, checkpoint: Path) -> None:
        (checkpoint / "metadata.json").write_text("{}")
        self.refused(checkpoint, errors.UnsupportedCheckpoint, "Megatron-Core")

    def test_an_optimizer_without_a_model(self, checkpoint: Path, tmp_path: Path) -> None:
        dcp.save({"optim": whole(checkpoint)["optim"]}, checkpoint_id=tmp_path / "optimizer")
        self.refused(tmp_path / "optimizer", errors.MissingData, "model")

    def test_two_optimizers(self, checkpoint: Path, tmp_path: Path) -> None:
        state = whole(checkpoint)
        dcp.save({**state, "other": state["optim"]}, checkpoint_id=tmp_path / "two")
        self.refused(tmp_path / "two", errors.UnsupportedCheckpoint, "optim", "other")

    def test_two_models(self, checkpoint: Path, tmp_path: Path) -> None:
        state = whole(checkpoint)
        two = {"a": state["model"], "b": state["model"], "optim": state["optim"]}
        dcp.save(two, checkpoint_id=tmp_path / "two")
        self.refused(tmp_path / "two", errors.AmbiguousCheckpoint, "a", "b")

    @pytest.mark.parametrize("seed", range(60))
    def test_damaged_metadata(self, checkpoint: Path, seed: int) -> None:
        """Whatever is wrong with it, it is a ZckptError or nothing that matters."""
        generator = torch.Generator().manual_seed(seed)
        text = bytearray((checkpoint / ".metadata").read_bytes())
        for _ in range(1 + seed % 3):
            place = int(torch.randint(len(text), (1,), generator=generator))
            text[place] ^= 1 << int(torch.randint(8, (1,), generator=generator))
        (checkpoint / ".metadata").write_bytes(text)
        with suppress(errors.ZckptError):
            zckpt.read(checkpoint)


def test_the_model_is_known_under_any_key(checkpoint: Path, tmp_path: Path) -> None:
    state = whole(checkpoint)
    oddly = {
        "net": state["model"],
        "opt": state["optim"],
        "best": torch.ones(3),
        "ema": {"w": torch.ones(2)},
    }
    dcp.save(oddly, checkpoint_id=tmp_path / "run")
    assert list(zckpt.read(tmp_path / "run").parameters) == list(zckpt.read(checkpoint).parameters)
    zckpt.reshard(tmp_path / "run", tmp_path / "again", dp=2)
    assert alike(whole(tmp_path / "again"), oddly)


def test_ranks_that_saved_without_asking_each_other(checkpoint: Path, tmp_path: Path) -> None:
    """As with use_collectives=False: every rank states its own pieces, and all that is whole."""
    metadata = FileSystemReader(checkpoint).read_metadata()
    for rank in (0, 1):
        own = {
            index: place
            for index, place in metadata.storage_data.items()
            if place.relative_path.startswith(f"__{rank}_")
        }
        items = {}
        for key, item in metadata.state_dict_metadata.items():
            chunks = [
                c for c in getattr(item, "chunks", ()) if MetadataIndex(key, c.offsets) in own
            ]
            if chunks:
                items[key] = replace(item, chunks=chunks)
            elif MetadataIndex(key) in own:
                items[key] = item
        text = pickle.dumps(Metadata(items, metadata.planner_data, own))
        (checkpoint / f"__{rank}.metadata").write_bytes(text)
    (checkpoint / ".metadata").unlink()
    zckpt.convert(checkpoint, tmp_path / "universal")
    assert zckpt.verify(tmp_path / "universal", DATA)["equal"]
    (checkpoint / "__0.metadata").unlink()
    with pytest.raises(errors.IncompleteCheckpoint, match=r"lacks __0\.metadata"):
        zckpt.read(checkpoint)


@pytest.mark.parametrize(
    "lost", ["shard-00002-model-00002-of-00002", "shard-00001-model-00001-of-00002"]
)
def test_a_missing_shard_of_hugging_face(lost: str, tmp_path: Path) -> None:
    """Without it the weights of its file would seem to end where other ranks' rows do."""
    for rank in (0, 1):
        for file, name in enumerate(("a", "b"), 1):
            info = {"DCP_SHARDING_INFO": json.dumps({name: {"saved_offsets": [2 * rank, 0]}})}
            path = tmp_path / f"shard-{rank + 1:05d}-model-{file:05d}-of-00002.safetensors"
            save_file({name: torch.full((2, 3), float(rank))}, path, metadata=info)
    assert zckpt.read(tmp_path).parameters["b"].shape == (4, 3)
    (tmp_path / f"{lost}.safetensors").unlink()
    with pytest.raises(errors.IncompleteCheckpoint, match=f"lacks {lost}"):
        zckpt.read(tmp_path)


def test_several_models_of_accelerate(checkpoint: Path, tmp_path: Path) -> None:
    for name in ("pytorch_model_fsdp_0", "pytorch_model_fsdp_1", "optimizer_0"):
        shutil.copytree(checkpoint, tmp_path / "state" / name)
    with pytest.raises(errors.UnsupportedCheckpoint, match="pytorch_model_fsdp_1"):
        zckpt.read(tmp_path / "state")


def test_tensors_beside_the_model(tmp_path: Path) -> None:
    """A loss or a generator's state at the top is no model."""
    model = torch.nn.Linear(3, 4)
    state = {"net": model.state_dict(), "rng": torch.get_rng_state(), "loss": torch.tensor(0.5)}
    dcp.save(state, checkpoint_id=tmp_path / "run")
    assert list(zckpt.read(tmp_path / "run").parameters) == ["weight", "bias"]
    zckpt.convert(tmp_path / "run", tmp_path / "again", to="dcp")
    assert alike(whole(tmp_path / "again"), whole(tmp_path / "run"))


@pytest.mark.parametrize("called", ["ema", "model_ema", "ema_state_dict"])
def test_an_average_is_not_the_model(called: str, tmp_path: Path) -> None:
    model, average = torch.nn.Linear(3, 4), torch.nn.Linear(3, 4)
    state = {called: average.state_dict(), "net": model.state_dict()}
    dcp.save(state, checkpoint_id=tmp_path / "run")
    assert zckpt.read(tmp_path / "run").state["engine"]["model"] == ["net"]


@pytest.mark.parametrize("shape", [(0,), (0, 3)])
@pytest.mark.parametrize("to", ["universal", "dcp", "gathered"])
def test_state_that_is_empty(shape: tuple[int, ...], to: str, tmp_path: Path) -> None:
    state = {"model": torch.nn.Linear(3, 4).state_dict(), "seen": torch.zeros(shape)}
    dcp.save(state, checkpoint_id=tmp_path / "run")
    zckpt.convert(tmp_path / "run", tmp_path / "between", to=to)
    zckpt.convert(tmp_path / "between", tmp_path / "again", to="dcp")
    assert alike(whole(tmp_path / "again"), whole(tmp_path / "run"))


@pytest.mark.parametrize(
    "own",
    [{"model": "small"}, {"optim": {"param_groups": [{"lr": 5.0}]}}, {"lr_scheduler": {"a": 1}}],
)
def test_a_clients_names_do_not_take_a_place(own: dict[str, Any], tmp_path: Path) -> None:
    """DeepSpeed keeps them apart."""
    source = replace(zckpt.read(EXAMPLE), state={**zckpt.read(EXAMPLE).state, "client_state": own})
    target = dcp_writing.DcpWriter(source, Options())
    assert any("client_state" in line for line in target.left_out)
    keys = [".".join(map(str, path)) for path, _ in target.parts[""]]
    assert len(keys) == len(set(keys))
    assert not {"model", "lr_scheduler.a"} & set(keys)


def saved(run: Path, state: dict[str, Any], group: dict[str, Any], *, flat: bool = False) -> None:
    """A checkpoint of two weights, a and b, in a group each."""
    model = {"a": torch.randn(3, 4), "b": torch.randn(5)}
    moments = {n: {"exp_avg": w + 1, "exp_avg_sq": w * w, **state} for n, w in model.items()}
    optim: dict[str, Any] = {"state": moments, "param_groups": []}
    optim["param_groups"] = [{**group, "lr": n * 0.1, "params": ["ab"[n]]} for n in range(2)]
    if flat:
        optim = {f"state.{n}.{k}": v for n, moment in moments.items() for k, v in moment.items()}
        optim |= {f"param_groups.{n}.{k}": v for n in "ab" for k, v in group.items()}
    dcp.save({"model": model, "optim": optim}, checkpoint_id=run)


@pytest.mark.parametrize("step", [7, torch.tensor(7.0)])
def test_a_step_that_groups_keep(step: Any, tmp_path: Path) -> None:
    """Apex's FusedAdam looks for it there, and begins at 1 where it is not."""
    group = {"betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, "bias_correction": True}
    saved(tmp_path / "run", {}, {**group, "step": step})
    zckpt.convert(tmp_path / "run", tmp_path / "universal")
    zckpt.convert(tmp_path / "universal", tmp_path / "again", to="dcp")
    before, after = (whole(tmp_path / name)["optim"] for name in ("run", "again"))
    assert alike(after["state"], before["state"])
    assert [group["step"] for group in after["param_groups"]] == [7, 7]
    assert zckpt.read(tmp_path / "again").step == 7


def test_steps_of_several_types(tmp_path: Path) -> None:
    """They become torch's own; a type of one parameter is not that of all."""
    saved(tmp_path / "run", {"step": torch.tensor(7.0)}, {"weight_decay": 0.0})
    state = whole(tmp_path / "run")
    state["optim"]["state"]["a"]["step"] = 7
    dcp.save(state, checkpoint_id=tmp_path / "mixed")
    zckpt.convert(tmp_path / "mixed", tmp_path / "again", to="dcp")
    after = whole(tmp_path / "again")["optim"]["state"]
    assert all(same_bits(after[name]["step"], torch.tensor(7.0)) for name in "ab")


def test_tensors_in_flat_groups_are_refused(tmp_path: Path) -> None:
    saved(tmp_path / "run", {"step": torch.tensor(7.0)}, {"lr": torch.tensor([0.1])}, flat=True)
    with pytest.raises(errors.WrongOption, match="lr is a tensor"):
        zckpt.reshard(tmp_path / "run", tmp_path / "again", dp=2)
    assert not (tmp_path / "again").exists()
    zckpt.convert(tmp_path / "run", tmp_path / "again", to="dcp", dcp_layout="nested")
    groups = whole(tmp_path / "again")["optim"]["param_groups"]
    assert all(same_bits(group["lr"], torch.tensor([0.1])) for group in groups)


def test_stage_3_tells_what_it_takes_for_frozen(tmp_path: Path) -> None:
    saved(tmp_path / "run", {"step": torch.tensor(7.0)}, {"weight_decay": 0.0})
    state = whole(tmp_path / "run")
    state["model"]["mask"] = torch.randn(4, 4)
    dcp.save(state, checkpoint_id=tmp_path / "masked")
    for stage, warned in ((2, False), (3, True)):
        target = tmp_path / f"stage{stage}"
        report = zckpt.convert(tmp_path / "masked", target, to="deepspeed", stage=stage, dp=2)
        assert any("mask: taken for" in line for line in report["warnings"]) == warned


def test_a_frozen_copy_before_the_first_update(tmp_path: Path) -> None:
    """Nothing tells it from a tied weight, which is said."""
    student = torch.nn.Linear(6, 6)
    both = {
        f"{who}.{n}": tensor for n, tensor in student.state_dict().items() for who in ("a", "b")
    }
    group = {"lr": 0.1, "params": ["b.weight", "b.bias"]}
    dcp.save(
        {"model": both, "optim": {"state": {}, "param_groups": [group]}},
        checkpoint_id=tmp_path / "run",
    )
    manifest = zckpt.read(tmp_path / "run")
    assert any("frozen copy" in warning for warning in manifest.warnings)
    dcp.save(
        {"model": both, "optim": {"state": {}, "param_groups": [{**group, "params": [0, 1]}]}},
        checkpoint_id=tmp_path / "raw",
    )
    with pytest.raises(errors.MissingData, match="by number"):
        zckpt.read(tmp_path / "raw")


def test_many_boxes_are_compared_in_time(tmp_path: Path) -> None:
    """As of a tensor that 20,000 ranks cut along its second axis; pairs would take minutes."""
    pieces = [TensorPiece((0, n), (2, 1), (1, 1), 0, Extent("f", 0, 8)) for n in range(20_000)]
    assembled("w", "F32", (2, 20_000), pieces)
    with pytest.raises(errors.InconsistentCheckpoint, match="overlap"):
        assembled("w", "F32", (2, 20_000), [*pieces[1:], pieces[1]])


@pytest.mark.parametrize("seed", range(40))
def test_boxes_overlap_where_elements_do(seed: int) -> None:
    generator = random.Random(seed)
    shape = [generator.randint(1, 3) for _ in range(generator.randint(1, 3))]
    pieces: list[TensorPiece] = []
    while (left := prod(shape) - sum(piece.numel for piece in pieces)) > 0:
        offsets = tuple(generator.randrange(size) for size in shape)
        sizes = tuple(generator.randint(1, n - o) for n, o in zip(shape, offsets, strict=True))
        sizes = sizes if prod(sizes) <= left else (1,) * len(shape)
        pieces.append(TensorPiece(offsets, sizes, sizes, 0, Extent("f", 0, 4)))
    elements = [
        place
        for piece in pieces
        for place in product(*map(lambda o, n: range(o, o + n), piece.offsets, piece.sizes))
    ]
    with suppress(errors.InconsistentCheckpoint):
        assembled("w", "F32", shape, pieces)
        assert len(set(elements)) == len(elements)


def test_several_steps_have_to_be_chosen(checkpoint: Path, tmp_path: Path) -> None:
    for step in (5, 10):
        shutil.copytree(checkpoint, tmp_path / "checkpoint" / f"step-{step}")
    with pytest.raises(errors.AmbiguousCheckpoint, match="step-5, step-10"):
        zckpt.read(tmp_path / "checkpoint")
    assert zckpt.read(tmp_path / "checkpoint", tag="step-5").step == 3
    shutil.rmtree(tmp_path / "checkpoint" / "step-10")
    assert zckpt.read(tmp_path / "checkpoint").step == 3


def test_accelerates_folders(tmp_path: Path) -> None:
    report = zckpt.convert(EXAMPLE, tmp_path / "out", to="dcp", dialect="accelerate")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "optimizer_0",
        "pytorch_model_fsdp_0",
    ]
    model = whole(tmp_path / "out" / "pytorch_model_fsdp_0")
    optimizer = whole(tmp_path / "out" / "optimizer_0")
    assert (list(model), list(optimizer)) == (["model"], ["optimizer"])
    assert_proven(EXAMPLE, tmp_path / "out", harmless=("padding", "type"))
    assert report["format"] == "dcp"


def test_bf16_stays_and_masters_are_made_with_a_warning(tmp_path: Path) -> None:
    weight = torch.randn(7, 5).bfloat16()
    state = {"exp_avg": weight * 2, "exp_avg_sq": weight * weight, "step": torch.tensor(4.0)}
    group = {"lr": 0.1, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, "params": ["w"]}
    optim = {"state": {"w": state}, "param_groups": [group]}
    dcp.save({"model": {"w": weight}, "optim": optim}, checkpoint_id=tmp_path / "run")
    report = zckpt.convert(tmp_path / "run", tmp_path / "universal")
    slots = zckpt.inspect(zckpt.read(tmp_path / "universal"))["slots"]
    assert {slot["dtype"] for slot in slots.values()} == {"BF16"}
    assert report["warnings"] == []
    report = zckpt.convert(tmp_path / "run", tmp_path / "zero", to="deepspeed", dp=2, stage=2)
    assert any("no fp32 masters" in warning for warning in report["warnings"])
    slots = zckpt.inspect(zckpt.read(tmp_path / "zero"))["slots"]
    assert slots["master"]["dtype"] == slots["exp_avg"]["dtype"] == "F32"
    assert slots["param"]["dtype"] == "BF16"


class Counting(torch.nn.Module):
    """Saves more than tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(2, 3)
        self.extra = {"count": 1, "table": torch.zeros(3)}

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.inner(features)

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, extra: Any) -> None:
        self.extra = extra


@pytest.mark.parametrize("through", ["gathered", "universal", "dcp"])
def test_extra_states_of_modules_arrive(through: str, tmp_path: Path) -> None:
    module = Counting()
    module.extra = {"count": 5, "table": torch.arange(3.0)}
    torch.save({"model": module.state_dict()}, tmp_path / "run.pt")
    zckpt.convert(tmp_path / "run.pt", tmp_path / "between", to=through)
    zckpt.convert(tmp_path / "between", tmp_path / "dcp", to="dcp")
    fresh = Counting()
    state = {"model": fresh.state_dict()}
    dcp.load(state, checkpoint_id=tmp_path / "dcp")
    fresh.load_state_dict(state["model"])
    assert fresh.extra["count"] == 5
    assert torch.equal(fresh.extra["table"], torch.arange(3.0))
    zckpt.convert(tmp_path / "between", tmp_path / "whole", to="gathered")
    whole = torch.load(tmp_path / "whole" / "model.pt", weights_only=False)
    assert whole["_extra_state"]["count"] == 5
