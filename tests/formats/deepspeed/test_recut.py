"""Pipelines of real DeepSpeed at other bounds: what all ranks of the new engine hold; refusals."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from msgspec.structs import replace

import zckpt
from zckpt.errors import UnsupportedCheckpoint, WrongOption
from zckpt.formats.deepspeed import write
from zckpt.formats.deepspeed.model_ranks.stage_bounds import balanced, uniform
from zckpt.formats.options import options_of

from ...conftest import texts
from ...engines import grids
from ...engines.deepspeed import EngineError
from ...engines.grids import CASES
from ..equality import same_bits
from .conftest import Trained

ONE = "pipe_pp1_dp2"
TWO = "pipe_pp2_dp2"
PLAIN = "pipe_pp2_dp1_plain"
BOTH = "pipe_pp2_tp2_dp1"  # the default run trains it for test_grid.py
# of DeepSpeed's `uniform`, as the engines are built
BOUNDS = {2: (0, 5, 9), 3: (0, 3, 6, 9), 4: (0, 3, 5, 7, 9)}


def members(held: dict[str, Any]) -> list[dict[str, Any]]:
    """The groups; other stages list their parameters in another order."""
    return [{**group, "params": sorted(group["params"])} for group in held["groups"]]


def resumes(root: Path, run: Path, tmp_path: Path, *, pp: int, tp: int, dp: int) -> None:
    """The unmodified engine has what the source's engine had, and trains on."""
    case = dataclasses.replace(CASES[root.name], tp=tp)
    expected = torch.load(root / "oracle.pt", weights_only=False)
    held = grids.resume(case, run, tmp_path / "engine", dp, pp)
    for key in ("steps", "scalars", "counters"):
        assert held[key] == expected[key], key
    for key in ("trainable", "frozen"):
        assert sorted(held[key]) == sorted(expected[key])
    assert members(held) == members(expected)
    for key in ("tensors", "buffers"):
        assert held[key].keys() == expected[key].keys()
        different = [n for n in held[key] if not same_bits(held[key][n], expected[key][n])]
        assert different == []
    before, after = expected["losses"][0], held["losses"][0]
    most = 1e-5 if case.dtype == "fp32" else 2e-3 if tp == CASES[root.name].tp else 2e-3 * before
    assert abs(after - before) < most


@pytest.mark.parametrize(
    ("name", "pp", "dp"),
    [
        pytest.param(BOTH, 1, 1, marks=[pytest.mark.engines, pytest.mark.first]),
        *(
            pytest.param(*row, marks=pytest.mark.engines)
            for row in (
                (TWO, 1, 2),
                (TWO, 3, 1),
                (TWO, 4, 1),
                ("pipe_pp4_dp1", 2, 2),
                (ONE, 2, 2),
                (ONE, 3, 1),
                ("pipe_pp2_dp2_fp32", 1, 3),
                ("pipe_pp3_dp1_bf16", 2, 2),
                ("pipe_pp3_dp1_bf16", 1, 2),
                ("pipe_pp2_dp1_fp16", 3, 1),
                ("pipe_pp2_dp1_ties", 1, 1),
                ("pipe_pp2_dp1_ties", 3, 1),
            )
        ),
    ],
)
def test_the_engine_resumes_with_other_stages(
    name: str, pp: int, dp: int, grid_trained: Trained, tmp_path: Path
) -> None:
    root, case = grid_trained(name), CASES[name]
    bounds = {} if pp == 1 else {"pp_bounds": BOUNDS[pp]}
    report = zckpt.reshard(root / "run", tmp_path / "run", pp=pp, dp=dp, **bounds)
    assert f"pp {pp}, tp {case.tp}" in report["about"]
    inferred = [line for line in texts(report["warnings"]) if "tied layer embed" in line]
    assert len(inferred) == (case.pp == 1)  # a single stage does not show where it is used again
    found = zckpt.verify(tmp_path / "run", against=root / "run")
    assert found["equal"], found
    assert found.get("only_a", []) == found.get("only_b", []) == []
    resumes(root, tmp_path / "run", tmp_path, pp=pp, tp=case.tp, dp=dp)


@pytest.mark.engines
@pytest.mark.parametrize("bounds", [(0, 4, 9), (0, 6, 9)])
def test_the_engine_refuses_other_bounds(
    bounds: tuple[int, ...], grid_trained: Trained, tmp_path: Path
) -> None:
    zckpt.reshard(grid_trained(ONE) / "run", tmp_path / "run", pp_bounds=bounds, dp=1)
    with pytest.raises(EngineError, match="does not match"):
        grids.resume(CASES[ONE], tmp_path / "run", tmp_path / "engine", 1, 2)


@pytest.mark.engines
def test_a_tied_layer_that_one_stage_has_alone(grid_trained: Trained, tmp_path: Path) -> None:
    """The source has it in two stages, and the first stage's copy counts."""
    run = grid_trained("pipe_pp2_dp1_ties") / "run"
    zckpt.reshard(run, tmp_path / "run", pp_bounds=(0, 2, 9))
    found = zckpt.verify(tmp_path / "run", against=run)
    assert (found["differences"], found["only_a"], found["only_b"]) == ([], [], [])


@pytest.mark.engines
def test_stages_of_two_tensor_ranks_there_and_back(grid_trained: Trained, tmp_path: Path) -> None:
    root = grid_trained(BOTH)
    zckpt.reshard(root / "run", tmp_path / "one", pp=1, dp=3)
    zckpt.reshard(tmp_path / "one", tmp_path / "two", pp=2, pp_bounds=BOUNDS[2], dp=1)
    expected = torch.load(root / "oracle.pt", weights_only=False)
    held = grids.resume(CASES[BOTH], tmp_path / "two", tmp_path / "engine", 1)
    tensors = expected["tensors"]
    assert held["tensors"].keys() == tensors.keys()
    assert [n for n in tensors if not same_bits(held["tensors"][n], tensors[n])] == []
    assert held["losses"] == expected["losses"]


def model_files(run: Path) -> list[dict[str, Any]]:
    return [torch.load(path, weights_only=False) for path in sorted(run.glob("*/mp_rank_*"))]


@pytest.mark.engines
class TestFiles:
    def test_back_and_forth_gives_the_engines_files(
        self, grid_trained: Trained, tmp_path: Path
    ) -> None:
        """Model files state what the engine's own state, and all tensors are in its places."""
        run = grid_trained(TWO) / "run"
        zckpt.reshard(run, tmp_path / "one", pp=1)
        zckpt.reshard(tmp_path / "one", tmp_path / "two", pp=2, pp_bounds=BOUNDS[2])
        assert [path.name for path in sorted((tmp_path / "two").glob("*/*"))] == [
            path.name for path in sorted(run.glob("*/*"))
        ]
        assert len(model_files(tmp_path / "one")) == 1
        for ours, theirs in zip(model_files(tmp_path / "two"), model_files(run), strict=True):
            assert ours.keys() == theirs.keys()
            for key in ("param_shapes", "buffer_names", "module", "checkpoint_parallel_dimensions",
                        "mp_world_size", "dp_world_size", "lr_scheduler"):  # fmt: skip
                assert ours[key] == theirs[key], key
            for one, other in zip(ours["param_shapes"], theirs["param_shapes"], strict=True):
                assert [*one] == [*other]
        for path in run.glob("*/*optim*"):
            ours, theirs = (
                torch.load(root / path.relative_to(run), weights_only=False)["optimizer_state_dict"]
                for root in (tmp_path / "two", run)
            )
            assert ours["group_paddings"] == theirs["group_paddings"]
            assert ours["partition_count"] == theirs["partition_count"]
            for key in ("single_partition_of_fp32_groups",):
                assert all(map(same_bits, ours[key], theirs[key]))
            states = [each["base_optimizer_state"]["state"] for each in (ours, theirs)]
            for number, state in states[1].items():
                for slot in ("exp_avg", "exp_avg_sq"):
                    assert same_bits(states[0][number][slot], state[slot])

    def test_groups_without_parameters_are_dropped(
        self, grid_trained: Trained, tmp_path: Path
    ) -> None:
        """The engine itself cannot train such stages: it waits for ever in the norm (0.19.8)."""
        trained = grid_trained("pipe_pp2_dp2_fp32") / "run"
        run = Path(shutil.copytree(trained, tmp_path / "source"))
        for path in run.glob("*/mp_rank_*"):
            model = torch.load(path, weights_only=False)
            model["lr_scheduler"] = {"base_lrs": [0.01, 0.0025, 0.02], "last_epoch": 3}
            torch.save(model, path)
        zckpt.reshard(run, tmp_path / "run", pp=3, pp_bounds=BOUNDS[3])
        models = model_files(tmp_path / "run")
        assert [len(model["param_shapes"]) for model in models] == [3, 2, 3]
        rates = [model["lr_scheduler"]["base_lrs"] for model in models]
        assert rates == [[0.01, 0.0025, 0.02], [0.01, 0.0025], [0.01, 0.0025, 0.02]]
        assert zckpt.verify(tmp_path / "run", against=run)["equal"]
        zckpt.reshard(tmp_path / "run", tmp_path / "one", pp=1)
        (model,) = model_files(tmp_path / "one")
        assert model["lr_scheduler"]["base_lrs"] == rates[0]

    def test_tied_copies_that_differ_are_a_warning(
        self, grid_trained: Trained, tmp_path: Path
    ) -> None:
        run = Path(shutil.copytree(grid_trained(BOTH) / "run", tmp_path / "run"))
        before = zckpt.load(run, "tied_modules.embed.weight/exp_avg")
        (path,) = run.glob("*/bf16_zero_pp_rank_0_mp_rank_02_*")
        value = torch.load(path, weights_only=False)
        value["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["exp_avg"][5] += 1
        torch.save(value, path)
        report = zckpt.reshard(run, tmp_path / "out", pp=1)
        assert ["stages' replicas of tied_modules" in w for w in texts(report["warnings"])] == [
            True
        ]
        after = zckpt.load(tmp_path / "out", "tied_modules.embed.weight/exp_avg")
        assert same_bits(after, before)

    def test_client_state_is_rank_0s(self, grid_trained: Trained, tmp_path: Path) -> None:
        run = Path(shutil.copytree(grid_trained(TWO) / "run", tmp_path / "run"))
        for number, path in enumerate(sorted(run.glob("*/mp_rank_*"))):
            model = torch.load(path, weights_only=False)
            torch.save({**model, "random": torch.arange(3) + number}, path)
        report = zckpt.reshard(run, tmp_path / "out", pp=3, pp_bounds=BOUNDS[3], dp=1)
        assert "client_state 'random' of model ranks other than 0" in texts(report["left_out"])
        held = [model["random"].tolist() for model in model_files(tmp_path / "out")]
        assert held == [[0, 1, 2]] * 3


@pytest.mark.engines
@pytest.mark.first
class TestRefusals:
    @pytest.mark.parametrize(
        ("options", "said"),
        [
            ({"pp": 3}, r"--pp 3 needs the first layer of each stage, .* layers 0, 1, 3 to 7$"),
            ({"pp": 3, "pp_partition": "type:attention"}, "depends on the classes of layers"),
            ({"pp": 3, "pp_partition": "parameters"}, "tied layer embed wherever it is used"),
            ({"pp": 3, "pp_partition": "uniform:7"}, "layers 0, 1, 3 to 7$"),
            ({"pp": 3, "pp_partition": "profile"}, "is none of uniform, uniform:LAYERS"),
            ({"pp_bounds": (0, 5, 9), "pp_partition": "uniform"}, "both say where"),
            ({"pp": 3, "pp_bounds": (0, 5, 9)}, "define 2 stages, but --pp asks for 3"),
            ({"pp_bounds": (0, 3, 7)}, "end before layer 7"),
            ({"pp_bounds": (0, 5, 8)}, "uses the tied layer embed"),
            ({"pp_bounds": (0, 2, 3, 4, 9)}, "layers 2 to 2 .* no trained parameter"),
            ({"pp_bounds": (0, 5, 5, 9)}, "must begin with 0"),
            ({"pp_bounds": (1, 9)}, "must begin with 0"),
            ({"pp": 0}, "--pp cannot be 0"),
            ({"pp": 1, "stage": 2}, "--stage does not apply"),
        ],
    )
    def test_bounds(self, options: Any, said: str, grid_trained: Trained, tmp_path: Path) -> None:
        with pytest.raises(WrongOption, match=said) as raised:
            zckpt.reshard(grid_trained(BOTH) / "run", tmp_path / "out", **options)
        assert raised.value.hint
        assert not (tmp_path / "out").exists()

    def test_other_targets(self, grid_trained: Trained, tmp_path: Path) -> None:
        run = grid_trained(BOTH) / "run"
        with pytest.raises(WrongOption, match="--pp does not apply to --to dcp"):
            zckpt.convert(run, tmp_path / "out", to="dcp", pp=1)

    @pytest.mark.parametrize("options", [{"pp": 1}, {"pp_bounds": (0, 4, 9)}])
    def test_sources_that_are_not_pipelines(
        self, options: Any, grid_trained: Trained, tmp_path: Path
    ) -> None:
        manifest = zckpt.read(grid_trained(BOTH) / "run")
        origin = replace(manifest.run.origin, pp=None, tp=None)
        plain = manifest.replace(origin=origin, pipeline=None)
        with pytest.raises(WrongOption, match=r"--pp.* is not a pipeline"):
            write.lay_out(plain, options_of(options))

    def test_order_that_is_not_the_layers(self, grid_trained: Trained, tmp_path: Path) -> None:
        """Equal shapes change places, so that only the order is odd."""
        run = Path(shutil.copytree(grid_trained(BOTH) / "run", tmp_path / "run"))
        for path in run.glob("*/mp_rank_0[23]_*"):
            model = torch.load(path, weights_only=False)
            shapes = model["param_shapes"][1]
            names = [*shapes]
            names.insert(0, names.pop(names.index("7.weight")))
            model["param_shapes"][1] = type(shapes)((name, shapes[name]) for name in names)
            torch.save(model, path)
        with pytest.raises(UnsupportedCheckpoint, match="not in the order of the layers"):
            zckpt.reshard(run, tmp_path / "out", pp=1)

    def test_the_command_line(
        self, grid_trained: Trained, tmp_path: Path, zckpt: Callable[..., Any]
    ) -> None:
        run = grid_trained(BOTH) / "run"
        shown = zckpt("reshard", run, tmp_path / "out", "--pp-bounds", "0,3,6,9", "--dry-run")
        assert "pp 3, tp 2" in shown.out
        assert (
            "not a list of integers"
            in zckpt("reshard", run, tmp_path / "out", "--pp-bounds", "0;9").err
        )


@pytest.mark.engines
@pytest.mark.parametrize(
    ("pp", "method"),
    [pytest.param(3, "parameters", marks=pytest.mark.first), (2, "uniform:9"), (4, "uniform")],
)
def test_the_engine_cuts_at_the_same_bounds(
    pp: int, method: str, grid_trained: Trained, tmp_path: Path
) -> None:
    """A program that says only how DeepSpeed finds the bounds loads what was cut by that rule."""
    root, case = grid_trained(PLAIN), CASES[PLAIN]
    report = zckpt.reshard(root / "run", tmp_path / "run", pp=pp, dp=1, pp_partition=method)
    assert [f"--pp-partition {method}" in line for line in texts(report["warnings"])].count(
        True
    ) == 1
    case = dataclasses.replace(case, method=method.partition(":")[0])
    held = grids.resume(case, tmp_path / "run", tmp_path / "engine", 1, pp)
    expected = torch.load(root / "oracle.pt", weights_only=False)
    assert held["tensors"].keys() == expected["tensors"].keys()
    different = [
        name
        for name, tensor in held["tensors"].items()
        if not same_bits(tensor, expected["tensors"][name])
    ]
    assert different == []
    assert abs(held["losses"][0] - expected["losses"][0]) < 2e-3


@pytest.mark.engines
def test_a_type_that_the_stages_contradict(grid_trained: Trained, tmp_path: Path) -> None:
    with pytest.raises(WrongOption, match="would begin at layers 0,6, but they do not") as raised:
        zckpt.reshard(
            grid_trained(PLAIN) / "run", tmp_path / "out", pp=2, pp_partition="type:attention"
        )
    assert "--pp-bounds 0,6,9" in raised.value.hint


@pytest.mark.engines
def test_bounds_are_deepspeeds() -> None:
    """Of random weights, also of zeros, and of more stages than layers."""
    from deepspeed.runtime.utils import partition_balanced, partition_uniform

    random = Random(5)
    for _ in range(300):
        layers, stages = random.randrange(1, 14), random.randrange(1, 7)
        most = random.choice([1, 2, 50])
        weights = [random.randrange(most + 1) for _ in range(layers)]
        assert list(uniform(layers, stages)) == partition_uniform(layers, stages)
        assert list(balanced(weights, stages)) == partition_balanced(weights, stages)
