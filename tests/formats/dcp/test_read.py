"""Directories of torch.distributed.checkpoint, whole and damaged, as they are read."""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

import zckpt
from zckpt import errors
from zckpt.core.checkpoint.facts import StateDictEngine
from zckpt.formats.dcp import read as dcp_read

from ...conftest import texts
from ..contract import FormatContract
from .torch_dcp import DATA, alike, saved, whole

Change = Callable[[Metadata], None]


def change_metadata(directory: Path, change: Change) -> None:
    metadata = FileSystemReader(directory).read_metadata()
    change(metadata)
    (directory / ".metadata").write_bytes(pickle.dumps(metadata))


class TestDcp(FormatContract):
    format = "dcp"

    @pytest.fixture
    def checkpoint(self, tmp_path: Path) -> Path:
        return Path(shutil.copytree(DATA, tmp_path / "run"))


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
        extent = zckpt.read(checkpoint).entries["trunk.0.weight", "exp_avg"].fragments[1].extent
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
        self.refused(
            checkpoint, errors.CorruptCheckpoint, "model.trunk.0.weight", "does not describe"
        )

    def test_a_damaged_key_path(self, checkpoint: Path) -> None:
        """It would turn a moment into a value of the program that no optimizer has."""

        def change(metadata: Metadata) -> None:
            assert metadata.planner_data is not None
            key = "optim.state.trunk.0.weight.exp_avg"
            metadata.planner_data[key] = ("optin", *metadata.planner_data[key][1:])

        change_metadata(checkpoint, change)
        self.refused(checkpoint, errors.CorruptCheckpoint, "optim.state.trunk.0.weight.exp_avg")
        report = zckpt.verify(checkpoint)
        assert "optim.state.trunk.0.weight.exp_avg" in str(report["problems"])

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
        self.refused(checkpoint, errors.CorruptCheckpoint, "path", "another item")

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
        self.refused(checkpoint, errors.CorruptCheckpoint)

    def test_megatron(self, checkpoint: Path) -> None:
        (checkpoint / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
        with pytest.raises(errors.UnsupportedCheckpoint, match="Megatron-Core"):
            dcp_read.read(str(checkpoint))

    def test_an_optimizer_without_a_model(self, checkpoint: Path, tmp_path: Path) -> None:
        dcp.save({"optim": whole(checkpoint)["optim"]}, checkpoint_id=tmp_path / "optimizer")
        self.refused(tmp_path / "optimizer", errors.MissingData, "model")

    def test_two_optimizers(self, checkpoint: Path, tmp_path: Path) -> None:
        state = whole(checkpoint)
        dcp.save({**state, "other": state["optim"]}, checkpoint_id=tmp_path / "two")
        self.refused(tmp_path / "two", errors.AmbiguousCheckpoint, "optim", "other")

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


class TestUnused:
    """Bytes of item files that no item covers."""

    def test_a_lost_item(self, checkpoint: Path, tmp_path: Path) -> None:
        key = "optim.param_groups.0.lr"

        def change(metadata: Metadata) -> None:
            assert metadata.planner_data is not None
            del metadata.planner_data[key], metadata.state_dict_metadata[key]
            place = metadata.storage_data.pop(MetadataIndex(key))
            lost.append((place.relative_path, place.offset, place.length))

        lost: list[tuple[str, int, int]] = []
        change_metadata(checkpoint, change)
        ((file, offset, length),) = lost
        report = zckpt.verify(checkpoint)
        assert not report["equal"]
        (problem,) = report["problems"]
        assert problem["file"] == str(checkpoint / file)
        assert (problem["offset"], problem["length"]) == (offset, length)
        assert f"{file}: no item covers the {length} bytes at {offset}" in problem["message"]
        omitted = zckpt.convert(checkpoint, tmp_path / "target")["left_out"]
        assert any(file in line and "belong to no saved value" in line for line in texts(omitted))

    def test_bytes_at_the_end(self, checkpoint: Path) -> None:
        file = checkpoint / "__0_0.distcp"
        size = file.stat().st_size
        file.write_bytes(file.read_bytes() + b"x")
        (problem,) = zckpt.verify(checkpoint)["problems"]
        assert (problem["offset"], problem["length"]) == (size, 1)

    def test_a_file_of_another_save(self, checkpoint: Path) -> None:
        (checkpoint / "__2_0.distcp").write_bytes(b"")  # a rank without items
        assert zckpt.verify(checkpoint)["equal"]
        shutil.copy(checkpoint / "__1_0.distcp", checkpoint / "__2_0.distcp")
        (problem,) = zckpt.verify(checkpoint)["problems"]
        assert problem["file"] == str(checkpoint / "__2_0.distcp")

    def test_zckpt_aligns_items(self, checkpoint: Path, tmp_path: Path) -> None:
        zckpt.convert(checkpoint, tmp_path / "target", to="dcp", dp=3)
        assert zckpt.read(tmp_path / "target").files.unused == ()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda m: m.planner_data.update({"rng.1": ("rng", "1")}),
            "lists rng.1, but no rank saved",
        ),
        (lambda m: setattr(m, "versiom", "1"), "fields that zckpt does not know: versiom"),
        (lambda m: setattr(m, "version", "1.0.1"), "version '1.0.1'"),
    ],
)
def test_what_zckpt_cannot_use_is_named(change: Change, said: str, checkpoint: Path) -> None:
    (frozen,) = texts(zckpt.read(checkpoint).notices.warnings)
    assert frozen.startswith("the optimizer lists 12 of 14 weights: ")
    change_metadata(checkpoint, change)
    warnings = {*texts(zckpt.read(checkpoint).notices.warnings)}
    assert frozen in warnings
    (warning,) = warnings - {frozen}
    assert said in warning


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
    engine = zckpt.read(tmp_path / "run").run.engine
    assert isinstance(engine, StateDictEngine)
    assert engine.model == ("net",)


def test_stage_3_tells_what_it_takes_for_frozen(tmp_path: Path) -> None:
    saved(tmp_path / "run", {"step": torch.tensor(7.0)}, {"weight_decay": 0.0})
    state = whole(tmp_path / "run")
    state["model"]["mask"] = torch.randn(4, 4)
    dcp.save(state, checkpoint_id=tmp_path / "masked")
    for stage, warned in ((2, False), (3, True)):
        target = tmp_path / f"stage{stage}"
        report = zckpt.convert(tmp_path / "masked", target, to="deepspeed", stage=stage, dp=2)
        assert any("mask: assumed to be" in line for line in texts(report["warnings"])) == warned


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
    assert any("frozen copy" in warning for warning in texts(manifest.notices.warnings))
    dcp.save(
        {"model": both, "optim": {"state": {}, "param_groups": [{**group, "params": [0, 1]}]}},
        checkpoint_id=tmp_path / "raw",
    )
    with pytest.raises(errors.MissingData, match="by number"):
        zckpt.read(tmp_path / "raw")


def test_a_missing_file_of_which_nothing_is_read(tmp_path: Path) -> None:
    """Each item has a file of its own, and some items only say what torch looks for."""
    run = tmp_path / "run"
    weight = torch.nn.Parameter(torch.randn(4, 3))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    weight.sum().backward()
    optimizer.step()
    state = {"state": {"weight": optimizer.state[weight]}}
    groups = [{**optimizer.state_dict()["param_groups"][0], "params": ["weight"]}]
    tree = {"model": {"weight": weight}, "optim": {**state, "param_groups": groups}}
    tree["empty"] = torch.zeros(0)
    dcp.save(tree, storage_writer=dcp.FileSystemWriter(run, single_file_per_rank=False))
    paths = sorted(run.glob("*.distcp"))
    assert len(paths) > 5
    for path in paths:
        path.rename(tmp_path / "lost")
        with pytest.raises(errors.IncompleteCheckpoint, match=rf"{path.name} is missing"):
            zckpt.read(run)
        (tmp_path / "lost").rename(path)
    assert zckpt.verify(run)["equal"]
