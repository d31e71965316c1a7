"""Pipelines and tensor parallelism of real DeepSpeed: what all ranks held, joined; and refusals."""

from __future__ import annotations

import re
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt
from zckpt.core.checkpoint.entries import name_of
from zckpt.core.checkpoint.facts import Vocabulary
from zckpt.core.checkpoint.placement import Cut
from zckpt.core.passes.loading import fill
from zckpt.dcp import StorageReader
from zckpt.errors import (
    IncompleteCheckpoint,
    InconsistentCheckpoint,
    MissingData,
    WrongOption,
    ZckptError,
)
from zckpt.formats.deepspeed import read as deepspeed_read
from zckpt.formats.deepspeed.files import grid_files
from zckpt.formats.deepspeed_states.directories import TagDirectory
from zckpt.formats.reading import Reading

from ... import faults
from ...conftest import texts
from ...engines import grids
from ...engines.grids import CASES, NAMED
from ..contract import FormatContract
from ..equality import assert_is_what_the_engine_held, same_bits

BOTH = "pipe_pp2_tp2_dp1"  # the one training of the default run
RULES = r"""
# the model of tests/engines/grid_models.py as a pipeline
tied_modules\.embed\.weight = vocab:31
.*\.fused\.(weight|bias) = 0:16,4,8
.*\.gate_up\.(weight|bias) = 0:2x
.*\.(dense|down)\.weight = 1
.*\.(dense|down)\.bias = replicated
.*\.norm\.(weight|bias) = replicated
7\.(weight|bias)|3\..*|5\.gain = replicated
"""
first = [pytest.mark.engines, pytest.mark.first]
Trained = Callable[[str], Path]


@pytest.fixture
def run(grid_trained: Trained, tmp_path: Path) -> Path:
    """A copy of the run with both axes, which a test may damage."""
    return Path(shutil.copytree(grid_trained(BOTH) / "run", tmp_path / "run"))


def edit(path: Path, change: Callable[[Any], object]) -> None:
    value = torch.load(path, weights_only=False)
    change(value)
    torch.save(value, path)


@pytest.fixture
def bare(run: Path) -> Path:
    """The run of a program that saves no universal_checkpoint_info."""
    for path in run.glob("*/mp_rank_*"):
        edit(path, lambda model: model.pop("universal_checkpoint_info"))
    return run


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    path = tmp_path / "rules.txt"
    path.write_text(RULES)
    return path


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=first if name == BOTH else [pytest.mark.engines]) for name in NAMED],
)
def test_universal_is_what_all_ranks_held(name: str, grid_trained: Trained, tmp_path: Path) -> None:
    root = grid_trained(name)
    oracle = torch.load(root / "oracle.pt", weights_only=False)
    report = zckpt.convert(root / "run", tmp_path / "universal")
    assert (report["left_out"], report["warnings"]) == ([], [])
    assert report["records"]["unchecked"] == 0
    assert_is_what_the_engine_held(tmp_path / "universal", oracle)
    for words in ([root / "run"], [root / "run", tmp_path / "universal"]):
        found = zckpt.verify(*words)
        assert found["equal"], found
        assert found.get("only_a", []) == found.get("only_b", []) == []
    case, manifest = CASES[name], zckpt.read(root / "run")
    if case.stage:  # without ZeRO the engine loads by number
        gathered = zckpt.verify(root / "run", tmp_path / "universal", gather=True, device="cpu")
        assert gathered["equal"], gathered
        assert gathered["tensors"] == found["tensors"]
    is_grid = case.model == "pipe" or case.tp > 1
    sizes = [case.pp, case.tp] if is_grid else [None, None]
    assert [manifest.source.get(key) for key in ("pp", "tp")] == sizes
    assert manifest.source["dp"] == case.dp


@pytest.mark.parametrize(
    ("name", "dp"),
    [
        pytest.param(BOTH, 2, marks=first),
        *(
            pytest.param(*row, marks=pytest.mark.engines)
            for row in (
                ("pipe_pp2_dp2", 1),
                ("pipe_pp2_dp2_fp32", 2),
                ("pipe_pp3_dp1_bf16", 2),
                ("pipe_pp2_dp1_fp16", 2),
                ("tensor_tp2_dp2", 3),
                ("tensor_tp2_dp2_z2", 1),
                ("tensor_tp2_dp2_z3", 3),
                ("tensor_tp2_dp1_bf16", 2),
                ("llama_tp2_dp2", 1),
                ("llama_tp2_dp1_z3", 2),
            )
        ),
    ],
)
def test_the_engine_resumes_at_another_dp(
    name: str, dp: int, grid_trained: Trained, tmp_path: Path
) -> None:
    root, case = grid_trained(name), CASES[name]
    zckpt.reshard(root / "run", tmp_path / "run", dp=dp)
    report = zckpt.verify(tmp_path / "run", against=root / "run")
    assert report["equal"], report
    expected = torch.load(root / "oracle.pt", weights_only=False)
    found = grids.resume(case, tmp_path / "run", tmp_path / "engine", dp)
    for key in ("steps", "trainable", "frozen", "scalars", "counters"):
        assert found[key] == expected[key], key
    for ours, theirs in zip(found["groups"], expected["groups"], strict=True):
        assert ours == theirs
    for key in ("tensors", "buffers"):
        assert found[key].keys() == expected[key].keys()
        different = [
            each for each in found[key] if not same_bits(found[key][each], expected[key][each])
        ]
        assert different == []
    limit = 1e-5 if case.dtype == "fp32" else 5e-3
    pairs = zip(found["losses"], expected["losses"], strict=True)
    assert max(abs(a - b) for a, b in pairs) < limit


@pytest.mark.engines
@pytest.mark.first
class TestContract(FormatContract):
    format = "deepspeed"

    @pytest.fixture
    def checkpoint(self, run: Path) -> Path:
        return run


@pytest.mark.engines
@pytest.mark.first
class TestWholeModel:
    """The merged model in other formats, in commands, and what is refused."""

    def test_inspect_shows_the_grid(self, run: Path, zckpt: Callable[..., Any]) -> None:
        shown = zckpt("inspect", run).out
        assert re.search(r"tensor-parallel size +2\npipeline stages +2\n", shown)
        report = zckpt("inspect", run, "--json").document
        assert (report["pp"], report["tp"], report["dp"]) == (2, 2, 1)
        drawn = zckpt("inspect", run, "--layout", "--tensors", "4.down.weight/*").out
        assert "mp_rank_00" in drawn
        assert "mp_rank_01" in drawn

    @pytest.mark.parametrize("to", ["dcp", "gathered"])
    def test_other_formats(self, run: Path, tmp_path: Path, to: str) -> None:
        zckpt.convert(run, tmp_path / to, to=to)
        report = zckpt.verify(tmp_path / to, against=run)
        assert report["equal"], report
        assert zckpt.stats(run)["tensors"]
        assert zckpt.diff(run, run)["equal"]

    def test_loads_into_a_plain_program(self, grid_trained: Trained, run: Path) -> None:
        from torch.distributed import checkpoint

        held = torch.load(grid_trained(BOTH) / "oracle.pt", weights_only=False)["tensors"]
        masters = {n[:-7]: tensor for n, tensor in held.items() if n.endswith("/master")}
        loaded = {name: torch.zeros_like(tensor) for name, tensor in masters.items()}
        checkpoint.load(loaded, storage_reader=StorageReader(run))
        assert [name for name in masters if not same_bits(loaded[name], masters[name])] == []

    def test_padded_rows_are_kept_and_counted(self, run: Path) -> None:
        facts = zckpt.read(run, tp_rules=None).run.tensor_parallel
        assert facts is not None
        assert facts.vocabularies == {"tied_modules.embed.weight": Vocabulary(rows=36, used=31)}

    def test_options_that_do_not_apply(self, run: Path, tmp_path: Path) -> None:
        for wrong in (
            {"stage": 2},
            {"dtype": "fp32"},
            {"weights_only": True},
            {"rename": [("a", "b")]},
        ):
            with pytest.raises(
                WrongOption,
                match="its tensor ranks and pipeline stages are written without joining",
            ):
                zckpt.reshard(run, tmp_path / "out", **wrong)
        assert not (tmp_path / "out").exists()


@pytest.mark.engines
@pytest.mark.first
class TestFiles:
    """A lost or surplus file is a named error."""

    @pytest.mark.parametrize(
        ("lost", "error", "said"),
        [
            ("mp_rank_01_model_states.pt", IncompleteCheckpoint, "lacks mp_rank_01_model"),
            ("mp_rank_03_model_states.pt", IncompleteCheckpoint, "lacks mp_rank_03_model"),
            ("bf16_zero_pp_rank_0_mp_rank_02_optim_states.pt", IncompleteCheckpoint, "lacks bf16"),
            ("*mp_rank_02_*", IncompleteCheckpoint, "lacks mp_rank_02_model"),
            ("*mp_rank_03_*", IncompleteCheckpoint, "3 model ranks"),
            ("layer_04-model_01-*", IncompleteCheckpoint, "lacks layer_04-model_01-"),
            ("layer_04-*", IncompleteCheckpoint, r"file of the layer.* of 4\."),
            ("layer_00-*", IncompleteCheckpoint, "tied_modules.embed"),
            ("layer_*-model_01-*", InconsistentCheckpoint, "pp 2 x tp 2"),
            ("layer_*", ZckptError, "layer"),
        ],
    )
    def test_weights_alone(
        self, run: Path, lost: str, error: Any, said: str, tmp_path: Path
    ) -> None:
        for path in run.glob(f"*/{lost}"):
            path.unlink()
        with pytest.raises(error, match=said) as raised:
            zckpt.convert(run, tmp_path / "out")
        assert raised.value.hint
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize(
        ("kind", "said"), [("*", "rank 2 has layer 1, but"), ("*optim*", "3 parameters in flat")]
    )
    def test_swapped_stages(self, kind: str, said: str, run: Path, tmp_path: Path) -> None:
        for path in [*run.glob(f"*/*mp_rank_0[01]_{kind}")]:
            other = path.with_name(
                re.sub(r"rank_0([01])_", lambda m: f"rank_0{int(m[1]) + 2}_", path.name)
            )
            faults.swap_files(path, other)
        for call in (zckpt.convert, zckpt.reshard):
            with pytest.raises(InconsistentCheckpoint, match=said):
                call(run, tmp_path / "out", **({"dp": 2} if call is zckpt.reshard else {}))
        assert not (tmp_path / "out").exists()

    def test_surplus_model_rank(self, run: Path) -> None:
        for path in [*run.glob("*/*mp_rank_03_*")]:
            shutil.copy(path, path.with_name(path.name.replace("rank_03", "rank_04")))
        with pytest.raises(IncompleteCheckpoint, match="2 tensor ranks, but files of 5 model"):
            zckpt.read(run)

    def test_sizes_that_contradict_the_names(self, run: Path) -> None:
        for path in run.glob("*/mp_rank_*"):
            edit(
                path,
                lambda m: m.update(checkpoint_parallel_dimensions={"pp_degree": 4, "tp_degree": 1}),
            )
        with pytest.raises(InconsistentCheckpoint, match=r"pp 2 x tp 2, but .* pp 4 x tp 1"):
            zckpt.read(run)

    def test_files_before_0_19_7_state_no_sizes(self, run: Path) -> None:
        expected = zckpt.read(run)
        for path in run.glob("*/mp_rank_*"):
            edit(path, lambda model: model.pop("checkpoint_parallel_dimensions"))
        found = zckpt.read(run)
        assert found.source == expected.source
        assert [*found.entries] == [*expected.entries]

    def test_another_save(self, run: Path) -> None:
        (path,) = run.glob("*/mp_rank_02_*")
        edit(path, lambda model: model.update(global_steps=4))
        with pytest.raises(InconsistentCheckpoint, match="counters"):
            zckpt.read(run)

    def test_weights_alone_of_a_run_with_own_tensors(self, run: Path, tmp_path: Path) -> None:
        for path in run.glob("*/mp_rank_*_model_states.pt"):
            edit(path, lambda model: model.update(own=torch.ones(2, 2)))
        with pytest.raises(WrongOption, match="without joining them"):
            zckpt.reshard(run, tmp_path / "out", dp=1, weights_only=True)

    def test_client_state_of_other_ranks_is_named(self, run: Path) -> None:
        (path,) = run.glob("*/mp_rank_03_*")
        edit(path, lambda model: model.update(own=torch.arange(3)))
        assert texts(zckpt.read(run).notices.omitted) == [
            "client_state 'own' of model ranks other than 0"
        ]


def apart_of(run: Path) -> dict[tuple[int, str], int]:
    """The CRC-32 of each tensor of each model rank."""
    manifest = deepspeed_read.read(str(run), Reading(ranks_apart=True))
    digests = {}
    for rank, own in enumerate(manifest.ranks):
        for entry in own.entries.values():
            view = memoryview(bytearray(entry.length))
            fill(entry, view, manifest.files.records)
            digests[rank, entry.name] = zlib.crc32(view)
    return digests


def change_norm(run: Path, slot: str, rank: int) -> None:
    """Changes one element of tensor rank `rank`'s copy of 4.norm.weight."""
    (model,) = run.glob(f"*/mp_rank_{rank:02d}_*")
    shapes = torch.load(model, weights_only=False)["param_shapes"][1]
    start = sum(
        shapes[name].numel() for name in list(shapes)[: list(shapes).index("4.norm.weight")]
    )
    (path,) = run.glob(f"*/bf16_zero_pp_rank_0_mp_rank_{rank:02d}_*")

    def change(value: Any) -> None:
        state = value["optimizer_state_dict"]["base_optimizer_state"]["state"][1]
        state[slot][start + 3] += 0.5

    edit(path, change)


def change_master(run: Path, rank: int) -> None:
    """The same element of a master, and of the weight that the rank rounded from it."""
    (model,) = run.glob(f"*/mp_rank_{rank:02d}_*")
    shapes = torch.load(model, weights_only=False)["param_shapes"][1]
    names = list(shapes)
    start = sum(shapes[name].numel() for name in names[: names.index("4.norm.weight")])
    (path,) = run.glob(f"*/bf16_zero_pp_rank_0_mp_rank_{rank:02d}_*")

    def change(value: Any) -> None:
        masters = value["optimizer_state_dict"]["single_partition_of_fp32_groups"]
        masters[1].data[start + 3] += 0.75

    edit(path, change)
    (layer,) = run.glob(f"*/layer_04-model_{rank:02d}-*")
    edit(layer, lambda value: value["norm.weight"][3].add_(0.75))


@pytest.mark.engines
@pytest.mark.first
class TestCopies:
    def test_drifted_norms_need_a_choice(self, run: Path, tmp_path: Path) -> None:
        clean = {
            n: zckpt.load(run, n) for n in map(name_of, zckpt.read(run).entries) if "norm" in n
        }
        change_norm(run, "exp_avg", 1)
        with pytest.raises(InconsistentCheckpoint, match=r"4.norm.weight.*exp_avg in 1 of 14") as e:
            zckpt.convert(run, tmp_path / "out")
        assert "--replicas rank0" in e.value.hint
        assert not (tmp_path / "out").exists()
        report = zckpt.convert(run, tmp_path / "out", replicas="rank0")
        assert any("4.norm.weight" in line for line in texts(report["warnings"]))
        assert all(same_bits(zckpt.load(tmp_path / "out", n), t) for n, t in clean.items())
        found = zckpt.verify(run)
        assert [line["tensor"] for line in found["differences"]] == ["4.norm.weight/exp_avg"]

    def test_the_same_ranks_keep_their_own_copies(
        self, bare: Path, rules: Path, tmp_path: Path
    ) -> None:
        """Nothing is joined: neither rules nor a choice are needed. Rules tell what are copies."""
        change_norm(bare, "exp_avg", 1)
        (said,) = zckpt.reshard(bare, tmp_path / "out", dp=2)["warnings"]
        assert said["code"] == "batch-size-changes"
        report = zckpt.reshard(bare, tmp_path / "known", dp=2, tp_rules=rules)
        (said,) = texts(line for line in report["warnings"] if line != said)
        assert r"of 1 parameter (4.norm.weight), and each rank keeps its replica: 4.norm" in said
        own = [apart_of(run) for run in (bare, tmp_path / "out")]
        assert own[0].keys() == own[1].keys()
        assert [name for name in own[0] if own[0][name] != own[1][name]] == []
        assert own[0][0, "4.norm.weight/exp_avg"] != own[0][1, "4.norm.weight/exp_avg"]
        omitted = zckpt.reshard(bare, tmp_path / "again", dp=1)["left_out"]
        assert all("recover" in line or "zero_to" in line for line in texts(omitted))

    def test_tied_copies_that_differ_are_a_warning(self, run: Path, tmp_path: Path) -> None:
        name = "tied_modules.embed.weight/exp_avg"
        before = zckpt.load(run, name)
        (path,) = run.glob("*/bf16_zero_pp_rank_0_mp_rank_02_*")

        def change(value: Any) -> None:
            value["optimizer_state_dict"]["base_optimizer_state"]["state"][0]["exp_avg"][5] += 1

        edit(path, change)
        report = zckpt.convert(run, tmp_path / "out")
        assert ["stages' replicas of tied_modules" in w for w in texts(report["warnings"])] == [
            True
        ]
        assert same_bits(zckpt.load(tmp_path / "out", name), before)
        assert not zckpt.verify(run)["equal"]

    def test_a_layer_that_is_not_its_master_is_found(self, run: Path) -> None:
        (path,) = run.glob("*/layer_04-model_01-*")
        edit(path, lambda layer: layer["down.weight"][2].add_(1))
        lines = zckpt.verify(run)["differences"]
        assert [line["tensor"] for line in lines] == ["4.down.weight/param"]

    @pytest.mark.parametrize(
        ("files", "ranks", "name"),
        [
            ("layer_01-model_0{}-*", (0, 1), "1.fused.weight"),
            ("bf16_zero_*_mp_rank_0{}_*", (2, 3), "6.fused.weight"),
        ],
    )
    def test_swapped_files_of_two_ranks_are_refused(
        self, files: str, ranks: Any, name: str, run: Path, tmp_path: Path
    ) -> None:
        """A conversion compares the beginning of each fragment with its weight."""
        assert zckpt.convert(run, tmp_path / "before")["warnings"] == []
        faults.swap_files(*(next(run.glob(f"*/{files.format(rank)}")) for rank in ranks))
        for call, options in ((zckpt.convert, {}), (zckpt.reshard, {"dp": 1})):
            with pytest.raises(InconsistentCheckpoint, match="not the rounded masters") as raised:
                call(run, tmp_path / "out", **options)
            assert name in str(raised.value)
            assert not (tmp_path / "out").exists()
        assert not zckpt.verify(run)["equal"]

    def test_other_choices_do_not_exist(self, run: Path, tmp_path: Path) -> None:
        with pytest.raises(WrongOption, match="none of rank0, mean"):
            zckpt.convert(run, tmp_path / "out", replicas="most")

    @pytest.mark.parametrize("options", [{}, {"to": "gathered"}])
    def test_the_mean_of_copies(self, run: Path, options: dict[str, Any], tmp_path: Path) -> None:
        """Masters, moments and the weights that are rounded from masters; the rest is unchanged."""
        clean = {name: zckpt.load(run, name) for name in map(name_of, zckpt.read(run).entries)}
        for rank, slot in ((1, "exp_avg"), (0, "exp_avg_sq")):
            change_norm(run, slot, rank)
        change_master(run, 1)
        wanted = dict(clean)
        for slot, drift in (("exp_avg", 0.5), ("exp_avg_sq", 0.5), ("master", 0.75)):
            wanted[f"4.norm.weight/{slot}"] = changed = clean[f"4.norm.weight/{slot}"].clone()
            changed[3] = ((changed[3].double() + (changed[3] + drift).double()) / 2).float()
        wanted["4.norm.weight/param"] = wanted["4.norm.weight/master"].bfloat16()
        report = zckpt.convert(run, tmp_path / "out", replicas="mean", **options)
        assert ["their mean is used" in line for line in texts(report["warnings"])] == [True]
        if "to" in options:  # torch's own optimizer trains fp32 weights
            trained = [name for name in wanted if name.endswith("/master")]
            wanted |= {name.replace("/master", "/param"): wanted.pop(name) for name in trained}
        got = {
            name: zckpt.load(tmp_path / "out", name)
            for name in map(name_of, zckpt.read(tmp_path / "out").entries)
        }
        assert got.keys() == wanted.keys()
        assert [name for name in got if not same_bits(got[name], wanted[name])] == []
        assert zckpt.verify(tmp_path / "out")["equal"]


@pytest.mark.engines
@pytest.mark.first
class TestRules:
    def test_rules_give_what_the_checkpoint_says(
        self, grid_trained: Trained, bare: Path, rules: Path, tmp_path: Path
    ) -> None:
        zckpt.convert(bare, tmp_path / "universal", tp_rules=rules)
        oracle = torch.load(grid_trained(BOTH) / "oracle.pt", weights_only=False)
        assert_is_what_the_engine_held(tmp_path / "universal", oracle)
        facts = zckpt.read(bare, tp_rules=rules).run.tensor_parallel
        assert facts is not None
        assert facts.placements["1.fused.weight"] == Cut(0, (16, 4, 8))

    def test_without_rules_all_names_are_listed(self, bare: Path, tmp_path: Path) -> None:
        with pytest.raises(
            MissingData, match=r"nothing says how 24 parameters are sliced"
        ) as raised:
            zckpt.convert(bare, tmp_path / "out")
        lines = raised.value.hint.splitlines()[1:]
        assert r"  \d+\.fused\.weight = ?  # [14, 14] on each rank" in lines
        completed = tmp_path / "completed.txt"  # the lines are a file of rules, once completed
        completed.write_text("\n".join(lines).replace("= ?", "= replicated"))
        with pytest.raises(InconsistentCheckpoint, match="different replicas"):
            zckpt.convert(bare, tmp_path / "out", tp_rules=completed)
        assert not (tmp_path / "out").exists()

    def test_what_is_known_is_printed_too(self, bare: Path, rules: Path) -> None:
        rules.write_text(RULES.replace(r".*\.gate_up", r".*\.gate_down"))
        with pytest.raises(MissingData, match=r"how 2 parameters are sliced: 4.gate_up") as raised:
            zckpt.read(bare, tp_rules=rules)
        assert r"  \d+\.fused\.weight = 0:16,4,8" in raised.value.hint

    @pytest.mark.parametrize(
        ("old", "new", "error", "said"),
        [
            ("0:16,4,8", "0:16,4,6", WrongOption, "every part; the parts have the widths 16, 4, 6"),
            ("0:16,4,8", "0:17,4,7", WrongOption, "each must hold an equal share"),
            ("0:16,4,8", "2", WrongOption, "which has the shape"),
            ("0:16,4,8", "x", WrongOption, "not of the form REGEX = RULE"),
            ("0:2x", "0:3x", WrongOption, "cannot be cut into 3"),
            ("vocab:31", "vocab:37", WrongOption, "hold 36 rows"),
            ("weight = 1", "weight = 0", WrongOption, r"dense.weight has 28 rows, .* 14 elements"),
            ("0:16,4,8", "1", WrongOption, "is for|rows, but by the rule|which has the shape"),
            ("0:2x", "0", WrongOption, "has 2 fused parts"),
            (r"5\.gain = replicated", r"5\.gain = 0", InconsistentCheckpoint, "hold the same"),
            ("weight = 1", "weight = replicated", InconsistentCheckpoint, "different replicas"),
        ],
    )
    def test_rules_that_do_not_fit(
        self, bare: Path, rules: Path, tmp_path: Path, old: str, new: str, error: Any, said: str
    ) -> None:
        assert old in RULES
        rules.write_text(RULES.replace(old, new))
        with pytest.raises(error, match=said):
            zckpt.convert(bare, tmp_path / "out", tp_rules=rules)
        assert not (tmp_path / "out").exists()

    def test_default_of_the_info_is_checked(self, run: Path, tmp_path: Path) -> None:
        """What no pattern names is cut along rows, says DeepSpeed; equal slices contradict that."""

        def forget(model: Any) -> None:
            patterns = model["universal_checkpoint_info"]["tp_replicated_parameter_patterns"]
            patterns.remove(r"5\.gain")

        for path in run.glob("*/mp_rank_*"):
            edit(path, forget)
        with pytest.raises(InconsistentCheckpoint, match=r"rule `0` cuts 5.gain"):
            zckpt.convert(run, tmp_path / "out")
        report = zckpt.verify(run)
        assert not report["equal"]
        assert "rule `0` cuts 5.gain" in report["problems"][0]["message"]

    def test_the_command_line(
        self, bare: Path, rules: Path, tmp_path: Path, zckpt: Callable[..., Any]
    ) -> None:
        assert zckpt("inspect", bare).code == 1
        assert "pipeline stages" in zckpt("inspect", bare, "--tp-rules", rules).out
        assert zckpt("verify", bare, "--tp-rules", rules).code == 0
        assert zckpt("convert", bare, tmp_path / "out", "--tp-rules", rules).code == 0
        assert "families are megatron" in zckpt("stats", bare, "--tp-rules", "nothing").err

    def test_the_info_of_the_files_as_a_file(self, bare: Path, tmp_path: Path) -> None:
        import json

        from ...engines.grid_rank import info

        path = tmp_path / "info.json"
        path.write_text(json.dumps(info(CASES[BOTH])))
        assert zckpt.verify(bare, tp_rules=path)["equal"]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(BOTH, marks=first),
        pytest.param("tensor_tp2_dp2_z3", marks=pytest.mark.engines),
        pytest.param("tensor_tp2_dp2_z0", marks=pytest.mark.engines),
    ],
)
def test_a_step_policy_decides_for_all_model_ranks(
    name: str, grid_trained: Trained, tmp_path: Path
) -> None:
    """The last file of an optimizer counts one update more; no way of writing loses the policy."""
    run, case = Path(shutil.copytree(grid_trained(name) / "run", tmp_path / "run")), CASES[name]

    def count(value: Any) -> None:
        optimizer = value.get("optimizer_state_dict") or value["optimizer"]
        base = optimizer.get("base_optimizer_state", optimizer)
        base = base.get("optimizer_state_dict", base)
        for state in (*base["state"].values(), *base["param_groups"]):
            if "step" in state:
                state["step"] += 1

    *_, last = sorted(run.glob("*/*optim_states.pt")) or sorted(run.glob("*/mp_rank_*"))
    step = zckpt.read(run).step
    assert step is not None
    edit(last, count)
    ways: dict[str, Callable[..., Any]] = {
        "universal": lambda target, **words: zckpt.convert(run, target, **words),
        "dp": lambda target, **words: zckpt.reshard(run, target, dp=3, **words),
        "tp": lambda target, **words: zckpt.reshard(run, target, tp=1, **words),
    }
    if case.model == "pipe":
        ways["pp"] = lambda target, **words: zckpt.reshard(run, target, pp=1, **words)
    for way, write in ways.items():
        with pytest.raises(InconsistentCheckpoint, match="step differs"):
            write(tmp_path / way)
        write(tmp_path / way, step_policy="max")
        assert zckpt.read(tmp_path / way).step == step + 1


def test_numbers_in_names_are_sorted_as_numbers(tmp_path: Path) -> None:
    """Model rank 100 and layer 100 come after 99, whatever their digits."""
    for rank in range(102):
        (tmp_path / f"mp_rank_{rank:02d}_model_states.pt").touch()
        (tmp_path / f"zero_pp_rank_0_mp_rank_{rank:02d}_optim_states.pt").touch()
    for layer in (*range(12), 99, 100, 101):
        for tp in range(2):
            torch.save({}, tmp_path / f"layer_{layer:02d}-model_{tp:02d}-model_states.pt")
    files = grid_files(TagDirectory(str(tmp_path), "tag", None))
    assert (files.grid.pp, files.grid.tp) == (51, 2)
    assert [*files.layers_of(1)] == [*range(12), 99, 100, 101]
    assert [f"mp_rank_{n:02d}_" in each.models[0] for n, each in enumerate(files.ranks)] == [
        True
    ] * 102
