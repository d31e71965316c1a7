"""The arithmetic of benchmarks, without a measurement."""

from __future__ import annotations

from math import prod
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

import zckpt
from benchmarks import dcp, gather, grid, layer, memory, scale, zero
from benchmarks.measure import Cost, Job, run
from benchmarks.rows import Goal, own, pieces, times, wall
from zckpt.core.passes import loading


@pytest.mark.parametrize("elements", [50_000, 9_834_560, 9_834_561])
def test_a_layer_has_the_elements_that_are_asked_for(elements: int) -> None:
    shapes = layer.shapes_of(elements)
    width, inner = shapes["contract.weight"]
    assert sum(map(prod, shapes.values())) == elements
    assert width % layer.HEAD == 0
    assert 3 * width <= inner  # a block, and not one long vector
    assert prod(shapes.get("rest", (0,))) <= 2 * width


def test_a_layer_that_is_too_small_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 49984 elements"):
        layer.shapes_of(1000)


def test_the_limit_is_reading_and_then_gathering() -> None:
    """Reading passes over more bytes than are compared: metadata, and padding."""
    verify = gather.Pass(bytes=100, seconds=9.0, cpu=9.0)
    limit = gather.limit_of(verify, gather.Pass(200, 4.0, 6.0), gather.Pass(50, 3.0, 5.0))
    assert limit == gather.Pass(bytes=100, seconds=5.0, cpu=8.0)


@pytest.mark.parametrize(
    ("more", "ours", "expected"),
    [(False, 6.0, "stretch"), (False, 8.0, "met"), (False, 9.0, "MISSED"), (True, 0.5, "stretch")],
)
def test_a_ratio_is_judged_by_its_target(more: bool, ours: float, expected: str) -> None:
    figure = times(wall) if more else wall
    goal = Goal("wall", figure, 15.0 if more else 0.8, 20.0 if more else 0.65, more)
    (ratio,) = goal.values([Cost(ours, 1.0, 1.0)], [Cost(10.0, 1.0, 1.0)])
    assert goal.verdict(ratio) == expected


def test_figures_of_one_command_and_of_two() -> None:
    assert pieces(Cost(9.0, 1.92, 1.0)) == pytest.approx(2.0)
    assert own(
        Cost(9.0, 9.0, 1.0, report={"seconds": 2.0}), Cost(1.0, 1.0, 1.0, report={"seconds": 2.5})
    ) == pytest.approx(0.8)


def test_the_seconds_of_a_report_are_read() -> None:
    assert (
        run(Job("report", ("sh", "-c", """echo '{"seconds": 1.5}'""", "sh", "--json"))).own == 1.5
    )


def test_an_unknown_state_of_memory_is_refused() -> None:
    with pytest.raises(ValueError, match="not one of hot, cold, short"), memory.state("warm"):
        pass


def test_bytes_that_a_process_moved_are_counted(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(bytes(1 << 20))
    copy = Job("copy", ("sh", "-c", f"cat {tmp_path}/file > {tmp_path}/copy"))
    assert 2 << 20 <= run(copy).moved < 3 << 20


def test_a_checkpoint_without_an_engine_is_one_of_zero_3(tmp_path: Path) -> None:
    scale.make(tmp_path / "run", tensors=5, dp=3)
    manifest = zckpt.read(tmp_path / "run")
    assert (manifest.dp, len(manifest.parameters), manifest.step) == (3, 5, 100)
    assert {*manifest.slots} == {*scale.SLOTS}
    assert zckpt.verify(tmp_path / "run")["equal"]
    report = zckpt.convert(tmp_path / "run", tmp_path / "universal")
    assert report["tensors"] == 15


@pytest.mark.parametrize("stage", [1, 3])
def test_a_checkpoint_with_holes_is_one_of_zero(stage: int, tmp_path: Path) -> None:
    zero.make(tmp_path / "run", tensors=4, dp=4, stage=stage)
    manifest = zckpt.read(tmp_path / "run")
    assert (manifest.dp, manifest.step) == (4, 100)
    assert zckpt.inspect(manifest)["zero_stage"] == stage
    assert {name: item.shape for name, item in manifest.parameters.items()} == zero.shapes_of(4)
    entry = manifest.entries["layers.1.bias", "exp_avg"]
    loaded = loading.as_torch(entry, ())  # holes have no checksum
    assert loaded.shape == zero.BIAS
    assert not loaded.any()


@pytest.mark.parametrize("sizes", [(2, 2, 2), (1, 4, 8), (4, 1, 1)])
def test_a_grid_with_holes_is_one_of_deepspeed(sizes: tuple[int, int, int], tmp_path: Path) -> None:
    tensors = 12
    grid.make(tmp_path / "run", tensors, *sizes)
    manifest = zckpt.read(tmp_path / "run")
    report = zckpt.inspect(manifest)
    stated = manifest.run.origin.pp, manifest.run.origin.tp, manifest.dp
    assert (stated, manifest.step, report["zero_stage"]) == (sizes, 100, 1)
    assert {name: own.shape for name, own in manifest.parameters.items()} == grid.shapes_of(
        range(4), tp=1
    )
    joined = (*manifest.entries.values(), *manifest.replicas)
    pieces = sum(len([*own.fragments]) for own in joined if own.slot == "exp_avg")
    assert pieces == grid.pieces_of(tensors, *sizes)


def test_tensors_that_do_not_fill_a_grid_are_refused() -> None:
    with pytest.raises(ValueError, match="13 tensors do not fill 2 stages"):
        grid.stages_of(13, 2)


def test_a_directory_with_holes_is_one_of_torch(tmp_path: Path) -> None:
    items = dcp.make(tmp_path / "run", tensors=4, ranks=3)
    assert items == 5 + 4 * (1 + 3 * 3)
    report = zckpt.inspect(zckpt.read(tmp_path / "run"))
    assert (report["parameters"], report["step"]) == (4, 100)
    assert report["unopened"] > items // 2
    state = {"model": {"layers.0.bias": torch.ones(dcp.BIAS)}}
    torch_dcp.load(state, checkpoint_id=tmp_path / "run")
    assert not state["model"]["layers.0.bias"].any()
