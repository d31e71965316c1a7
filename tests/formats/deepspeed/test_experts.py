"""Models with experts: what real DeepSpeed held and holds again, and damaged directories."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

import zckpt
from zckpt.core.checkpoint.facts import FlatBufferEngine
from zckpt.errors import (
    CorruptCheckpoint,
    IncompleteCheckpoint,
    InconsistentCheckpoint,
    MissingData,
    UnsupportedCheckpoint,
    WrongOption,
)
from zckpt.formats.deepspeed.moe import regroup
from zckpt.formats.deepspeed.moe.regroup import with_named_layers
from zckpt.formats.deepspeed_states.experts import ExpertRanks

from ... import faults
from ...engines.experts import CASES, ExpertCase, resume
from ..equality import is_equal, load, same_bits

Trained = Callable[[str], Path]
FIRST = "dp4_ep2"
INSIDE = ".deepspeed_moe.experts.deepspeed_experts."

pytestmark = pytest.mark.engines


@pytest.fixture
def run(trained_experts: Trained, tmp_path: Path) -> Path:
    """A copy of the first case's run: dp 4, ep 2, two layers of four experts."""
    return Path(shutil.copytree(trained_experts(FIRST) / "run", tmp_path / "run"))


def tag_of(run: Path) -> Path:
    return run / (run / "latest").read_text()


def oracle_of(root: Path) -> dict[str, Any]:
    oracle: dict[str, Any] = torch.load(root / "oracle.pt", weights_only=False)
    return oracle


# -- reading


def cases() -> list[Any]:
    return [
        pytest.param(case, id=name, marks=[pytest.mark.first] if name == FIRST else [])
        for name, case in CASES.items()
    ]


@pytest.mark.parametrize("case", cases())
def test_universal_is_what_all_ranks_held(
    case: ExpertCase, trained_experts: Trained, tmp_path: Path
) -> None:
    root, universal = trained_experts(case.name), tmp_path / "universal"
    oracle = oracle_of(root)
    report = zckpt.convert(root / "run", universal)
    assert (report["warnings"], report["left_out"]) == ([], [])
    tensors = {name: t for name, t in load(universal).items() if not name.endswith("/state")}
    expected = {
        name: tensor
        for name, tensor in oracle["tensors"].items()
        if name.rpartition("/")[0] not in oracle["aliases"]
    }
    assert sorted(tensors) == sorted(expected)
    assert [name for name in expected if not same_bits(tensors[name], expected[name])] == []
    manifest = json.loads((universal / "manifest.json").read_text())
    parameters = manifest["parameters"]
    assert {name: parameters[name]["step"] for name in oracle["steps"]} == oracle["steps"]
    assert {name for name, p in parameters.items() if p["trainable"]} == oracle["trainable"]
    assert {name for name, p in parameters.items() if not p["trainable"]} == oracle["frozen"]
    for group, members in enumerate(oracle["members"]):
        assert {name for name, p in parameters.items() if p["group"] == group} == members
    assert manifest["state"]["engine"]["experts"] == [
        {"layer": layer, "experts": experts, "ep": ep}
        for layer, experts, ep in zip(
            ("sparse", "block.residual"), case.experts, case.ep, strict=True
        )
    ]
    for paths in ([root / "run"], [root / "run", universal], [universal, root / "run"]):
        report = zckpt.verify(*paths)
        assert report["equal"], report
    gathered = zckpt.verify(root / "run", universal, gather=True, device="cpu")
    assert gathered["equal"], gathered
    assert gathered["tensors"] == len(expected)


@pytest.mark.first
def test_inspect_shows_the_experts(run: Path, zckpt_without: Callable[..., Any]) -> None:
    ended = zckpt_without(("torch", "numpy"), "inspect", run)
    assert (ended.code, ended.err) == (0, "")
    assert "2 layers of 4, expert-parallel size 2" in ended.out
    report = json.loads(zckpt_without(("torch", "numpy"), "inspect", run, "--json").out)
    assert report["ep"] == 2
    assert report["experts"][1] == {"layer": "block.residual", "experts": 4, "ep": 2}


@pytest.mark.first
@pytest.mark.parametrize("to", ["dcp", "gathered"])
def test_experts_go_to_other_formats(to: str, run: Path, tmp_path: Path) -> None:
    zckpt.convert(run, tmp_path / to, to=to)
    assert zckpt.verify(run, tmp_path / to)["equal"]
    zckpt.convert(tmp_path / to, tmp_path / "back", to="deepspeed", dp=2, ep=1)
    report = zckpt.verify(run, tmp_path / "back")
    assert is_equal(report, to)
    with pytest.raises(WrongOption, match="1 rank cannot share the 4 experts of sparse") as caught:
        zckpt.convert(tmp_path / to, tmp_path / "other", to="deepspeed")
    assert "give --dp N" in str(caught.value.hint)


@pytest.mark.first
def test_experts_have_other_names(run: Path, tmp_path: Path) -> None:
    zckpt.convert(run, tmp_path / "universal", rename=[(r"^sparse\.", "first."), (r"^", "m.")])
    zckpt.convert(tmp_path / "universal", tmp_path / "other", to="deepspeed", ep=4)
    manifest = zckpt.read(tmp_path / "other")
    assert isinstance(manifest.run.engine, FlatBufferEngine)
    names = [layer.name for layer in manifest.run.engine.experts]
    assert names == ["m.first", "m.block.residual"]
    assert (f"m.first{INSIDE}3.gain", "exp_avg") in manifest.entries


@pytest.mark.first
def test_a_broken_reader_is_found(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that gives every rank the experts of another passes its own comparison."""
    monkeypatch.setattr(ExpertRanks, "place", lambda self, rank, ep: divmod(rank, self.dp // ep))
    zckpt.convert(run, tmp_path / "universal", accept_weights=True)
    report = zckpt.verify(run, tmp_path / "universal", gather=True, device="cpu")
    different = {line["tensor"] for line in report["differences"]}
    assert f"block.residual{INSIDE}0.into.bias/exp_avg" in different
    assert not any(INSIDE not in name for name in different)


@pytest.mark.first
def test_settings_of_groups_are_compared(run: Path, tmp_path: Path) -> None:
    """Of groups of experts too, whose names say another expert-parallel size."""
    zckpt.reshard(run, tmp_path / "other", ep=4)
    for path in tag_of(tmp_path / "other").glob("*optim_states.pt"):
        import deepspeed  # noqa: F401  (its classes are in the pickle)

        value = torch.load(path, weights_only=False)
        groups = value["optimizer_state_dict"]["base_optimizer_state"]["param_groups"]
        groups[1]["lr"] = 0.5
        torch.save(value, path)
    report = zckpt.diff(run, tmp_path / "other")
    assert report["groups"] == [{"group": 1, "key": "lr", "a": 0.01, "b": 0.5}]


# -- damaged, and unknown


@pytest.mark.first
def test_a_lost_expert(run: Path) -> None:
    (tag_of(run) / "layer_1_expert_2_mp_rank_00_model_states.pt").unlink()
    with pytest.raises(IncompleteCheckpoint, match="lacks layer_1_expert_2_mp_rank_00"):
        zckpt.read(run)


@pytest.mark.first
def test_all_experts_lost(run: Path) -> None:
    for path in tag_of(run).glob("layer_*"):
        path.unlink()
    with pytest.raises(IncompleteCheckpoint, match="lacks layer_0_expert_0_mp_rank_00"):
        zckpt.read(run)


@pytest.mark.first
def test_an_expert_too_many(run: Path) -> None:
    first = tag_of(run) / "layer_0_expert_0_mp_rank_00_model_states.pt"
    faults.copy_file(first, first.with_name("layer_0_expert_4_mp_rank_00_model_states.pt"))
    with pytest.raises(InconsistentCheckpoint, match=r"layer_0_expert_4_.* one file too many"):
        zckpt.read(run)


@pytest.mark.first
@pytest.mark.parametrize(
    ("one", "other", "message"),
    [
        ("layer_0_expert_1", "layer_0_expert_2", "layer_0_expert_1.* holds expert 2"),
        ("layer_0_expert_1", "layer_1_expert_1", "holds expert 1 of block.residual"),
    ],
)
def test_swapped_experts(one: str, other: str, message: str, run: Path) -> None:
    swap(*(tag_of(run) / f"{stem}_mp_rank_00_model_states.pt" for stem in (one, other)))
    with pytest.raises(InconsistentCheckpoint, match=message):
        zckpt.read(run)


@pytest.mark.first
def test_swapped_layers(run: Path) -> None:
    for expert in range(4):
        name = f"expert_{expert}_mp_rank_00_model_states.pt"
        swap(tag_of(run) / f"layer_0_{name}", tag_of(run) / f"layer_1_{name}")
    with pytest.raises(InconsistentCheckpoint, match=r"sparse, but .* belongs to another layer"):
        zckpt.read(run)


@pytest.mark.first
def test_an_expert_of_another_save(run: Path) -> None:
    """Only the bytes show it: `verify` finds that masters and weights differ."""
    name = "layer_1_expert_3_mp_rank_00_model_states.pt"
    path = tag_of(run) / name
    values = torch.load(path, weights_only=True)
    key = f"block.residual{INSIDE}3.out.weight"
    values[key] = values[key] * 2
    torch.save(values, path)
    report = zckpt.verify(run)
    assert not report["equal"]
    assert [line["tensor"] for line in report["differences"]] == [f"{key}/param"]


@pytest.mark.first
def test_swapped_ranks(run: Path) -> None:
    """Ranks 0 and 1 have other experts: `verify` finds it by the weights of each."""
    names = ("bf16_zero_pp_rank_0", "bf16_zero_pp_rank_1")
    swap(*(tag_of(run) / f"{stem}_mp_rank_00_optim_states.pt" for stem in names))
    report = zckpt.verify(run)
    different = {line["tensor"] for line in report["differences"]}
    assert any(f"{INSIDE}0." in name for name in different)
    assert any(f"{INSIDE}2." in name for name in different)


@pytest.mark.first
def test_a_step_that_differs_between_experts(run: Path) -> None:
    import deepspeed  # noqa: F401  (its classes are in the pickle)

    for rank in (1, 3):  # the second ep rank
        path = tag_of(run) / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        value = torch.load(path, weights_only=False)
        value["optimizer_state_dict"]["base_optimizer_state"]["state"][1]["step"] += 1
        torch.save(value, path)
    with pytest.raises(InconsistentCheckpoint, match="step differs"):
        zckpt.read(run)
    assert zckpt.read(run, step_policy="max").step is None  # the dense group's is another


swap = faults.swap_files


@pytest.mark.first
@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("expert_0_mp_rank_00_model_states.pt", "mixture-of-experts layers of an old release"),
    ],
)
def test_unknown_files_are_refused_by_name(name: str, what: str, run: Path) -> None:
    (tag_of(run) / name).write_bytes(b"")
    with pytest.raises(UnsupportedCheckpoint, match=what):
        zckpt.read(run)


@pytest.mark.first
@pytest.mark.parametrize(
    ("counts", "error", "message"),
    [
        ([4, 1 << 60], IncompleteCheckpoint, "lacks layer_1_expert_4_mp_rank_00"),
        ([4, -1], CorruptCheckpoint, r"num_experts .* but it is \[4, -1\]"),
        ([4], InconsistentCheckpoint, "layer_1_expert_0.* one file too many"),
        ([4, 3], InconsistentCheckpoint, "layer_1_expert_3.* one file too many"),
        (4, UnsupportedCheckpoint, "mixture-of-experts layers of an old release"),
    ],
)
def test_wrong_numbers_of_experts(
    counts: Any, error: type[Exception], message: str, run: Path
) -> None:
    path = tag_of(run) / "mp_rank_00_model_states.pt"
    model = torch.load(path, weights_only=False)
    model["num_experts"] = counts
    torch.save(model, path)
    with pytest.raises(error, match=message):
        zckpt.read(run)


class TestNamedConfig:
    """Older releases saved the name of a ds_config's file: bytes show which rank has what."""

    @pytest.fixture
    def case(self, request: pytest.FixtureRequest) -> ExpertCase:
        return CASES[getattr(request, "param", FIRST)]

    @pytest.fixture
    def named(self, case: ExpertCase, trained_experts: Trained, tmp_path: Path) -> Path:
        import deepspeed  # noqa: F401  (its classes are in the pickle)

        run = Path(shutil.copytree(trained_experts(case.name) / "run", tmp_path / "named"))
        for path in (*tag_of(run).glob("mp_rank*"), *tag_of(run).glob("*optim_states.pt")):
            value = torch.load(path, weights_only=False)
            torch.save({**value, "ds_config": "ds_config.json"}, path)
        return run

    @pytest.mark.parametrize(
        "case",
        [FIRST, "dp4_ep2_data_first", "dp4_ep2_round_robin", "dp4_ep2_fp32"],
        indirect=True,
    )
    def test_the_engine_resumes(
        self, case: ExpertCase, named: Path, trained_experts: Trained, tmp_path: Path
    ) -> None:
        source = trained_experts(case.name) / "run"
        assert zckpt.verify(named, source)["equal"]
        zckpt.reshard(named, tmp_path / "run", dp=4, ep=4)
        before = oracle_of(trained_experts(case.name))
        after = resume(case, tmp_path / "run", tmp_path, ep=(4, 4))
        assert all(same_bits(t, after["tensors"][name]) for name, t in before["tensors"].items())

    def test_no_order_fits(self, named: Path) -> None:
        for path in tag_of(named).glob("layer_*"):
            values = torch.load(path, weights_only=True)
            torch.save({name: tensor * 2 for name, tensor in values.items()}, path)
        with pytest.raises(InconsistentCheckpoint, match="masters do not round to the experts"):
            zckpt.read(named)

    def test_every_order_fits(self, named: Path) -> None:
        """All experts have the same weights."""
        for path in tag_of(named).glob("layer_*"):
            values = torch.load(path, weights_only=True)
            torch.save({name: torch.zeros_like(tensor) for name, tensor in values.items()}, path)
        for path in tag_of(named).glob("*optim_states.pt"):
            value = torch.load(path, weights_only=False)
            masters = value["optimizer_state_dict"]["single_partition_of_fp32_groups"]
            masters[:] = [torch.zeros_like(master) for master in masters]
            torch.save(value, path)
        with pytest.raises(UnsupportedCheckpoint, match="only the file name was saved"):
            zckpt.read(named)


# -- writing


@dataclass(frozen=True)
class Move:
    """From a case's directory to `dp` ranks and another `ep`; None keeps the source's."""

    case: str
    dp: int
    ep: int | None = None
    through: str | None = None  # by way of a checkpoint of this format

    @property
    def name(self) -> str:
        return f"{self.case}-dp{self.dp}-ep{self.ep}" + (f"-{self.through}" if self.through else "")


MOVES = [
    Move("dp4_ep2", 4, 4),
    Move("dp4_ep2", 4),
    Move("dp4_ep2", 2),
    Move("dp4_ep2", 4, 1, through="universal"),
    Move("dp4_ep4", 4, 1),
    Move("dp4_ep4", 2, 2, through="universal"),
    Move("dp4_ep1", 4, 2),
    Move("dp2_ep2", 4, 4),
    Move("dp4_ep2_z1", 4, 4),
    Move("dp4_ep2_fp32", 4, 4),
    Move("dp4_ep2_fp32", 2, 1),
    Move("dp4_ep2_bf16_optimizer", 4, 4),
    Move("dp4_ep2_bf16_optimizer", 2),
    Move("dp4_ep2_data_first", 8),
    Move("dp4_ep2_data_first", 4, 4),
    Move("dp4_ep2_aligned", 2, 1),
    Move("dp4_ep2_cut_groups", 2),
    Move("dp4_ep2_cut_groups", 4, 4),
    Move("dp4_ep2_cut_groups", 4, 1, through="universal"),
    Move("dp4_ep2_round_robin", 2),
    Move("dp4_ep2_round_robin", 4, 4),
    Move("dp4_ep4_ep2", 8),
    Move("dp4_ep4_ep2_mixed", 4),
    Move("dp4_ep2_frozen_experts", 4, 4),
    Move("dp4_ep2", 4, 4, through="dcp"),
    Move("dp4_ep2", 2, 1, through="gathered"),
    Move("dp4_ep2_own_groups", 4, through="dcp"),
    Move("dp4_ep2_data_first", 4, 1, through="gathered"),
    Move("dp4_ep2_fp32", 4, through="dcp"),
    Move("dp4_ep4_ep2", 8, through="gathered"),
    Move("dp4_ep2_cut_groups", 4, 4, through="dcp"),
]


def moves() -> list[Any]:
    return [
        pytest.param(move, id=move.name, marks=[] if number else [pytest.mark.first])
        for number, move in enumerate(MOVES)
    ]


@pytest.mark.parametrize("move", moves())
def test_the_engine_resumes(
    move: Move, trained_experts: Trained, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups of small experts are cut as DeepSpeed cuts those with more than its 179 M elements."""
    case, root = CASES[move.case], trained_experts(move.case)
    monkeypatch.setattr(regroup, "GROUP_SIZE", case.max_group_size or regroup.GROUP_SIZE)
    before, source = oracle_of(root), root / "run"
    if move.through:
        zckpt.convert(source, tmp_path / move.through, to=move.through)
        source = tmp_path / move.through
    ep = {} if move.ep is None else {"ep": move.ep}
    zckpt.convert(source, tmp_path / "run", to="deepspeed", dp=move.dp, **ep)
    sizes = case.ep if move.ep is None else (move.ep, move.ep)
    changes = {"dp": move.dp, "ep": sizes, "mixed_order": False}
    after = resume(case, tmp_path / "run", tmp_path, **changes)
    assert sorted(after["tensors"]) == sorted(before["tensors"])
    different = [
        name
        for name, tensor in before["tensors"].items()
        if not same_bits(tensor, after["tensors"][name])
    ]
    assert different == []
    for key in ("steps", "counters", "trainable", "frozen", "aliases"):
        assert after[key] == before[key], key
    bare = move.through in ("dcp", "gathered")  # which have no ds_config
    for name in before["steps"]:
        settings = settings_of(name, after)
        if bare:
            assert settings.pop("bias_correction") is True
        assert settings == settings_of(name, before)
    tolerance = 1e-5 if case.dtype == "fp32" else 2e-3
    assert after["losses"][0] == pytest.approx(before["losses"][0], rel=0, abs=tolerance)
    if (move.dp, sizes) == (case.dp, case.ep):
        assert after["losses"] == before["losses"]
    for report in (
        zckpt.verify(tmp_path / "run"),
        zckpt.verify(root / "run", tmp_path / "run"),
        # state dicts have no engine's own settings, which `diff` lists
        *([] if bare else [zckpt.diff(tmp_path / "run", root / "run")]),
    ):
        assert is_equal(report, move.through), report


def settings_of(name: str, record: dict[str, Any]) -> dict[str, Any]:
    """The hyper-parameters of a parameter's group; its name says the ep."""
    (group,) = (
        group
        for group, members in zip(record["groups"], record["members"], strict=True)
        if name in members
    )
    return {key: value for key, value in group.items() if key != "name"}


@pytest.mark.first
@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        ({"ep": 3}, "4 ranks cannot share the 4 experts of sparse", "--ep 1 or 2 or 4"),
        ({"dp": 3}, "3 ranks cannot share the 4 experts of sparse", "--ep 1"),
        ({"dp": 8, "ep": 8}, "8 ranks cannot share the 4 experts", "--ep 1 or 2 or 4"),
        ({"stage": 3}, "layers of experts in ZeRO stage 3", "--stage 1 or --stage 2"),
    ],
)
def test_what_cannot_be_written(
    options: dict[str, Any], message: str, hint: str, run: Path, tmp_path: Path
) -> None:
    with pytest.raises(WrongOption, match=message) as caught:
        zckpt.reshard(run, tmp_path / "other", **options)
    assert hint in str(caught.value.hint)
    assert not (tmp_path / "other").exists()


@pytest.mark.first
def test_no_experts_in_universal_directories(run: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedCheckpoint, match="universal checkpoints do not hold"):
        zckpt.convert(run, tmp_path / "other", to="deepspeed-universal")


@pytest.mark.first
def test_ep_of_a_dense_model(example: Path, tmp_path: Path) -> None:
    with pytest.raises(WrongOption, match="has no experts"):
        zckpt.reshard(example, tmp_path / "other", ep=2)


def test_groups_that_may_be_cut(trained_experts: Trained, tmp_path: Path) -> None:
    run = trained_experts("dp4_ep2_cut_groups") / "run"
    with pytest.raises(WrongOption, match=r"groups 2, 3.* have the same settings") as caught:
        zckpt.reshard(run, tmp_path / "other", ep=4)
    assert "--ep 2" in str(caught.value.hint)


def test_several_sizes(trained_experts: Trained, tmp_path: Path) -> None:
    with pytest.raises(WrongOption, match="have the expert-parallel sizes 2, 4"):
        zckpt.reshard(trained_experts("dp4_ep4_ep2") / "run", tmp_path / "other", ep=2)


@pytest.mark.first
def test_weights_only(run: Path, tmp_path: Path) -> None:
    zckpt.convert(run, tmp_path / "weights", weights_only=True)
    names = {name for name in load(tmp_path / "weights") if not name.endswith("/state")}
    assert f"sparse{INSIDE}3.into.weight/param" in names
    zckpt.reshard(run, tmp_path / "other", weights_only=True, ep=4)
    assert zckpt.verify(run, tmp_path / "other", weights_only=True)["equal"]


@pytest.mark.first
def test_names_that_show_no_layers(run: Path, tmp_path: Path) -> None:
    """Of a state dict: an expert is missing, or the optimizer has no group of experts alone."""
    zckpt.convert(run, tmp_path / "gathered", to="gathered")
    source = zckpt.read(tmp_path / "gathered")
    lost = f"sparse{INSIDE}2."
    parameters = {n: p for n, p in source.parameters.items() if not n.startswith(lost)}
    module = [name for name in source.state["module"] if not name.startswith(lost)]
    damaged = replace(source, parameters=parameters, state={**source.state, "module": module})
    with pytest.raises(InconsistentCheckpoint, match="expert 3 of sparse, but not expert 2"):
        with_named_layers(damaged, [lost])
    groups = tuple({"lr": 0.1} for _ in source.groups or ())
    with pytest.raises(
        MissingData, match="group 1, but DeepSpeed needs separate groups for experts"
    ):
        with_named_layers(replace(source, groups=groups), [lost])
