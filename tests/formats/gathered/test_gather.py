"""What `verify --gather` proves of the reader of torch's files, right or broken."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from torch import Tensor

import zckpt
from zckpt import errors
from zckpt.core.checkpoint.entries import name_of
from zckpt.core.ranks.partition import Joined, Nameless, Whole
from zckpt.formats.gathered import gather, rank_trees, read
from zckpt.formats.gathered import sharded_tensors as saved_tensors
from zckpt.formats.gathered.sharded_tensors import DeviceMesh

from ..broken import assert_gathers, found, reading, shifted, swapped, without
from . import plain_torch
from .test_rank_trees import Saved
from .test_zero_redundancy import save_local
from .torch_ranks import Axes, dtensors, save, sharded_tensors

MODEL = {
    "a": torch.arange(48.0).reshape(6, 8) / 7,
    "b": -torch.arange(48.0).reshape(6, 8) / 5,
    "square": torch.randn(4, 4, generator=torch.Generator().manual_seed(0)),
}
EVEN = {"w": torch.randn(8, 4), "v": torch.randn(4, 4, 3)}  # equal parts on every rank
SLOTS = ("param", "exp_avg", "exp_avg_sq")
MESHES: list[tuple[tuple[int, ...], Axes]] = [
    ((2,), [0]),
    ((4,), [0]),
    ((2,), [1]),
    ((2, 2), [None, 0]),
    ((2, 2), [0, 1]),
    ((2, 2), [0, 0]),
    ((2, 2), [1, None]),
]


@pytest.mark.parametrize(("sizes", "axes"), MESHES)
class TestDTensors:
    def run(self, sizes: Sequence[int], axes: Axes, tmp_path: Path) -> Path:
        return save(tmp_path / "run", prod(sizes), MODEL, dtensors(sizes, axes))

    def test_are_joined(self, sizes: Sequence[int], axes: Axes, tmp_path: Path) -> None:
        run = self.run(sizes, axes, tmp_path)
        assert assert_gathers(run, tmp_path) == []
        parts = gather.partitions(str(run))
        names = {name_of(part.key) for part in parts if isinstance(part, Joined | Whole)}
        assert names == {f"{name}/{slot}" for name in MODEL for slot in SLOTS}

    @pytest.mark.parametrize("name", ["a/param", "b/exp_avg_sq"])
    def test_shifted(self, name: str, sizes: Sequence[int], axes: Axes, tmp_path: Path) -> None:
        run = self.run(sizes, axes, tmp_path)
        assert found(run, tmp_path, reading(read, shifted(name)))[0] == {name}

    def test_swapped_slots(self, sizes: Sequence[int], axes: Axes, tmp_path: Path) -> None:
        run = self.run(sizes, axes, tmp_path)
        both = "a/exp_avg", "a/exp_avg_sq"
        assert found(run, tmp_path, reading(read, swapped(*both)))[0] == {*both}

    def test_swapped_names(self, sizes: Sequence[int], axes: Axes, tmp_path: Path) -> None:
        run = self.run(sizes, axes, tmp_path)
        both = "a/exp_avg", "b/exp_avg"
        assert found(run, tmp_path, reading(read, swapped(*both)))[0] == {*both}

    def test_ranks_in_another_order(self, sizes: Sequence[int], axes: Axes, tmp_path: Path) -> None:
        """The reader takes the parts of every axis of the mesh from its end on."""
        right = DeviceMesh.coordinate

        def wrong(self: DeviceMesh, rank: int) -> list[tuple[int, int]]:
            return [(count - 1 - place, count) for place, count in right(self, rank)]

        def broken(patch: pytest.MonkeyPatch) -> None:
            patch.setattr(DeviceMesh, "coordinate", wrong)

        run = save(tmp_path / "run", prod(sizes), EVEN, dtensors(sizes, axes))
        names = {f"{name}/{slot}" for name in EVEN for slot in SLOTS}
        assert found(run, tmp_path, broken)[0] == names


def test_axes_of_a_mesh_in_another_order(tmp_path: Path) -> None:
    """Two axes of a mesh cut rows: the reader takes the second for the first."""
    run = save(tmp_path / "run", 4, {"w": torch.randn(8, 3)}, dtensors((2, 2), [0, 0]))
    right = saved_tensors._mesh_axes

    def broken(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(saved_tensors, "_mesh_axes", lambda mesh: right(mesh)[::-1])

    assert found(run, tmp_path, broken)[0] == {"w/param", "w/exp_avg", "w/exp_avg_sq"}


def test_a_reader_with_another_placement(tmp_path: Path) -> None:
    """Columns of a square matrix that are taken for rows: of one rank the bytes are as many."""
    square = {"w": torch.randn(4, 4)}
    run = save(tmp_path / "run", 4, square, dtensors((2, 2), [0, 1]))
    right = rank_trees.read_distributed

    def transposed(*arguments: Any) -> Any:
        tensor = right(*arguments)
        parts = tuple(replace(part, offsets=part.offsets[::-1]) for part in tensor.parts)
        return replace(tensor, parts=parts)

    def broken(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(rank_trees, "read_distributed", transposed)

    assert found(run, tmp_path, broken)[0] == {"w/param", "w/exp_avg", "w/exp_avg_sq"}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=20)
@given(
    shape=st.lists(st.integers(0, 5), min_size=1, max_size=3),
    cuts=st.lists(st.tuples(st.integers(1, 3), st.integers(0, 3)), min_size=1, max_size=2),
)
def test_any_cut(
    shape: list[int], cuts: list[tuple[int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Of any shape over any mesh, also parts that are empty."""
    axes = [axis if axis < len(shape) else None for _, axis in cuts]
    sizes = [size for size, _ in cuts]
    tensors = {"w": torch.randn(shape), "v": torch.randn(3)}
    make, other = dtensors(sizes, axes), dtensors(sizes, [None for _ in sizes])
    folder = tmp_path_factory.mktemp("cut")

    def each(rank: int, whole: Tensor) -> Any:
        return (make if list(whole.shape) == shape else other)(rank, whole)

    assert assert_gathers(save(folder / "run", prod(sizes), tensors, each), folder) == []


class TestShardedTensors:
    @pytest.mark.parametrize("turned", [False, True])
    @pytest.mark.parametrize("world", [1, 2, 4])
    def test_are_joined(self, world: int, turned: bool, tmp_path: Path) -> None:
        run = save(tmp_path / "run", world, MODEL, sharded_tensors(world, turned))
        assert assert_gathers(run, tmp_path) == []

    def test_swapped_ranks(self, tmp_path: Path) -> None:
        run = save(tmp_path / "run", 2, {"w": torch.randn(6, 3)}, sharded_tensors(2))
        right = rank_trees.read_distributed

        def wrong(*arguments: Any) -> Any:
            tensor = right(*arguments)
            parts = [replace(part, offsets=(3 - part.offsets[0], 0)) for part in tensor.parts]
            return replace(tensor, parts=tuple(parts))

        def broken(patch: pytest.MonkeyPatch) -> None:
            patch.setattr(rank_trees, "read_distributed", wrong)

        assert found(run, tmp_path, broken)[0] == {"w/param", "w/exp_avg", "w/exp_avg_sq"}

    @pytest.mark.parametrize(
        ("stated", "error", "message"),
        [
            ({"shards_metadata": []}, errors.InconsistentCheckpoint, "lists 0 for rank 0"),
            ({}, errors.CorruptCheckpoint, "does not know"),
        ],
    )
    def test_shards_that_the_ranks_did_not_agree_on(
        self, stated: Any, error: Any, message: str, tmp_path: Path
    ) -> None:
        saved = Saved()
        tensor = saved.sharded([((0, 0), torch.ones(3, 2))], (3, 2), 0, 1)
        tensor.arguments[3][1].state.update(stated)
        file = saved.file(tmp_path / "model_rank_0.pt", {"w": tensor})
        with pytest.raises(error, match=message):
            gather.partitions(file.path)


def test_a_mesh_that_does_not_state_the_coordinate(tmp_path: Path) -> None:
    """As nothing else than torch writes it: it is read, but the rule has nothing to go by."""
    from .test_rank_trees import WHOLE, cut

    run = tmp_path / "run"
    run.mkdir()
    cut(run, WHOLE, (2,), [0])
    zckpt.convert(run, tmp_path / "right")
    with pytest.raises(errors.UnsupportedCheckpoint, match="the rank's coordinate"):
        zckpt.verify(run, tmp_path / "right", gather=True, device="cpu")


class TestWholeFiles:
    """Optimizers that know their parameters by number, with and without names beside."""

    def run(self, tmp_path: Path, named: bool) -> Path:
        return plain_torch.save(tmp_path / "run", plain_torch.trained_pair(named=named))

    def options(self, named: bool) -> dict[str, Any]:
        names = plain_torch.names_by_group(plain_torch.build())
        return {} if named else {"param_names": names}

    @pytest.mark.parametrize("named", [False, True])
    def test_names(self, named: bool, tmp_path: Path) -> None:
        taken = assert_gathers(self.run(tmp_path, named), tmp_path, **self.options(named))
        assert bool(taken) != named
        assert all(name.rpartition("/")[2] in ("exp_avg", "exp_avg_sq") for name in taken)

    @pytest.mark.parametrize("named", [False, True])
    @pytest.mark.parametrize(
        "change",
        [swapped("norm.bias/exp_avg", "norm.bias/exp_avg_sq"), shifted("norm.bias/exp_avg")],
    )
    def test_a_broken_reader(self, change: Any, named: bool, tmp_path: Path) -> None:
        run = self.run(tmp_path, named)
        differing, problems = found(run, tmp_path, reading(read, change), **self.options(named))
        assert "norm.bias/exp_avg" in differing or any(
            "would not gather norm.bias/exp_avg" in p for p in problems
        )

    def test_stated_names_that_are_swapped(self, tmp_path: Path) -> None:
        both = "first.bias/exp_avg", "norm.bias/exp_avg"
        broken = reading(read, swapped(*both))
        assert found(self.run(tmp_path, True), tmp_path, broken)[0] == {*both}

    def test_a_number_that_is_left_out(self, tmp_path: Path) -> None:
        broken = reading(read, without("first.bias/exp_avg"))
        _, problems = found(self.run(tmp_path, False), tmp_path, broken, **self.options(False))
        assert len(problems) == 1
        assert "which zckpt does not read" in problems[0]

    def test_an_empty_parameter(self, tmp_path: Path) -> None:
        """Its tensors begin at no byte; there is nothing to prove."""
        model = {"a": torch.ones(3), "empty": torch.zeros(0, 3)}
        states = {
            number: {"step": torch.tensor(1.0), "exp_avg": value * 2, "exp_avg_sq": value * 3}
            for number, value in enumerate(model.values())
        }
        optimizer = {"state": states, "param_groups": [{"lr": 0.1, "params": [0, 1]}]}
        (tmp_path / "run").mkdir()
        torch.save({"model": model, "optimizer": optimizer}, tmp_path / "run" / "checkpoint.pt")
        taken = assert_gathers(tmp_path / "run", tmp_path)
        assert "empty/exp_avg" in taken

    @pytest.mark.parametrize("dialect", [None, "safetensors", "accelerate"])
    def test_that_zckpt_wrote(self, dialect: str | None, tmp_path: Path) -> None:
        """It states the names beside the numbers."""
        source = self.run(tmp_path, True)
        zckpt.convert(source, tmp_path / "target", to="gathered", dialect=dialect)
        (tmp_path / "again").mkdir()
        assert assert_gathers(tmp_path / "target", tmp_path / "again") == []

    def test_a_transposed_weight(self, tmp_path: Path) -> None:
        """It is not row-major in its file."""
        run = tmp_path / "model.pt"
        torch.save({"w": torch.randn(5, 3).T, "v": torch.randn(4)}, run)
        assert assert_gathers(run, tmp_path) == []
        assert found(run, tmp_path, reading(read, shifted("w/param")))[0] == {"w/param"}

    def test_copies_on_ranks_are_the_first_ones(self, tmp_path: Path) -> None:
        folder = tmp_path / "run"
        folder.mkdir()
        for rank in range(2):
            state = {"w": torch.arange(4.0), "rng": torch.arange(3.0) + rank}
            saved = Saved()
            value = {"model": {"w": saved.tensor(state["w"])}, "x": saved.tensor(state["rng"])}
            saved.file(folder / f"model_rank_{rank}.pt", value)
        assert assert_gathers(folder, tmp_path) == []


class TestZeroRedundancyOptimizer:
    """Local states of ranks: no file says which parameters their numbers are."""

    def run(self, world: int, tmp_path: Path) -> Path:
        return save_local(tmp_path / "run", plain_torch.trained_pair(), world)

    @property
    def names(self) -> dict[str, Any]:
        return {"param_names": plain_torch.names_by_group(plain_torch.build())}

    @pytest.mark.parametrize("world", [1, 2, 3])
    def test_elements_are_proven(self, world: int, tmp_path: Path) -> None:
        run = self.run(world, tmp_path)
        taken = assert_gathers(run, tmp_path, **self.names)
        assert {name.rpartition("/")[0] for name in taken} == set(self.names["param_names"])
        parts = gather.partitions(str(run))
        assert sum(isinstance(part, Nameless) for part in parts) == len(taken)

    def test_swapped_names_are_not_proven(self, tmp_path: Path) -> None:
        """Nothing in the files tells these two apart, and the report does not claim it."""
        both = "first.bias/exp_avg", "norm.bias/exp_avg"
        run = self.run(2, tmp_path)
        with pytest.MonkeyPatch.context() as patch:
            reading(read, swapped(*both))(patch)
            assert {*both} <= set(assert_gathers(run, tmp_path, **self.names))

    def test_a_tensor_of_the_last_rank_that_is_left_out(self, tmp_path: Path) -> None:
        run = self.run(3, tmp_path)
        entries = zckpt.read(run, **self.names).entries.values()
        name = next(
            entry.name
            for entry in entries
            if entry.slot == "exp_avg" and "rank_2" in entry.fragments[0].extent.file
        )
        _, problems = found(run, tmp_path, reading(read, without(name)), **self.names)
        assert any("rank_2.pt" in p and "does not read" in p for p in problems)

    def test_swapped_slots(self, tmp_path: Path) -> None:
        both = "third.weight/exp_avg", "third.weight/exp_avg_sq"
        broken = reading(read, swapped(*both))
        _, problems = found(self.run(2, tmp_path), tmp_path, broken, **self.names)
        assert any(f"would not gather {both[0]}" in problem for problem in problems)
