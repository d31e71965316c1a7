"""Experts of two ep ranks, made by hand by the rules of DeepSpeed 0.19.8."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

import zckpt
from zckpt.core.checkpoint.manifest import Parameter
from zckpt.errors import (
    CorruptCheckpoint,
    IncompleteCheckpoint,
    InconsistentCheckpoint,
    UnsupportedCheckpoint,
)
from zckpt.files.torchfile import TorchFile
from zckpt.formats.deepspeed.gather import partitions
from zckpt.formats.deepspeed.moe.experts import LayerFiles, expert_files
from zckpt.formats.deepspeed_states.target import DeepSpeedTarget
from zckpt.formats.options import options_of

from ....conftest import texts
from ....faults import copy_file, swap_files
from .. import made as dense
from .made import (
    DENSE,
    EXPERTS,
    GATE,
    GROUPS,
    INNER,
    INSIDE,
    LATE,
    LATE_GATE,
    LOCAL,
    MOMENTS,
    MORE,
    TAG,
    Groups,
    change,
    numbers,
    saved,
    saved_zero_1,
    stage_0,
    zero_1,
)

ALONE: Groups = ((1, [*DENSE]), (1, [*EXPERTS]))
"""Every rank has all experts."""
NAMED = {"ds_config": "ds.json"}
"""What the model file of a run has that was started with a file of its ds_config."""


@pytest.fixture(params=[zero_1, stage_0], ids=["zero 1", "stage 0"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return saved(tmp_path / "run", request.param)


def test_all_ranks_together(run: Path) -> None:
    """Experts stand by their numbers in the whole model, as one rank would have them."""
    manifest = zckpt.read(run)
    in_order = [f"{INSIDE}{n}.{inner}" for inner in INNER for n in range(4)]
    assert list(manifest.parameters) == [*DENSE, *in_order]
    assert manifest.state["module"] == [*DENSE, *EXPERTS]
    assert manifest.run.origin.ep == 2
    for name in DENSE | EXPERTS:
        for slot in ("master", *MOMENTS):
            assert torch.equal(zckpt.load(run, f"{name}/{slot}"), numbers(name, slot)), name
        assert zckpt.load(run, f"{name}/param").dtype == torch.bfloat16
    copies = [entry.parameter for entry in manifest.replicas]
    assert {*copies} == ({*DENSE} if manifest.run.origin.zero_stage == 0 else set())


def test_the_engine_s_rule_finds_the_same(run: Path, tmp_path: Path) -> None:
    zckpt.convert(run, tmp_path / "universal")
    if zckpt.read(run).run.origin.zero_stage == 1:
        keys = {m.key for part in partitions(str(run / TAG)) for m in getattr(part, "members", ())}
        assert (f"{INSIDE}3.b", "exp_avg_sq") in keys
    assert zckpt.verify(run, tmp_path / "universal", gather=True, device="cpu")["equal"]
    assert zckpt.verify(run)["equal"]


@pytest.mark.parametrize("ep", [1, 4])
def test_another_expert_parallel_size(ep: int, run: Path, tmp_path: Path) -> None:
    zckpt.reshard(run, tmp_path / "other", dp=4, ep=ep)
    report = zckpt.verify(run, tmp_path / "other")  # beside settings, which the target completes
    assert (report["tensors"], report["differences"]) == (40, [])


def test_weights_alone(run: Path, tmp_path: Path) -> None:
    zckpt.reshard(run, tmp_path / "other", weights_only=True)
    report = zckpt.verify(run, tmp_path / "other", weights_only=True)
    assert (report["problems"], report["differences"]) == ([], [])


def test_swapped_files_of_experts(run: Path) -> None:
    swap_files(*(run / TAG / f"layer_0_expert_{n}_mp_rank_00_model_states.pt" for n in (1, 3)))
    with pytest.raises(
        InconsistentCheckpoint, match="holds expert 3 of moe, but its name is that of exp"
    ):
        zckpt.read(run)


@pytest.mark.parametrize("run", [zero_1], indirect=True)
@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (
            lambda s: s.update(partition_count=[2, 2]),
            "cut over 2 of 2 ranks, but its parameters have the expert-parallel size 2",
        ),
        (
            lambda s: s["base_optimizer_state"]["param_groups"][1].update(name="ep_size_1"),
            "named 'ep_size_1'",
        ),
    ],
)
def test_groups_that_contradict_their_names(
    edit: Callable[[Any], object], said: str, run: Path
) -> None:
    for path in (run / TAG).glob("*optim_states.pt"):
        change(path, lambda value: edit(value["optimizer_state_dict"]))
    with pytest.raises(InconsistentCheckpoint, match=said):
        zckpt.read(run)


@pytest.mark.parametrize("run", [stage_0], indirect=True)
def test_a_copy_without_a_state(run: Path) -> None:
    def edit(value: Any) -> None:
        del value["optimizer"]["optimizer_state_dict"]["state"][1]["exp_avg"]

    change(run / TAG / "expp_rank_1_mp_rank_00_optim_states.pt", edit)
    with pytest.raises(InconsistentCheckpoint, match=f"{GATE} has other optimizer states here"):
        zckpt.read(run)


# -- the files of experts


def file_of(run: Path, number: int, layer: int = 0) -> Path:
    return run / TAG / f"layer_{layer}_expert_{number}_mp_rank_00_model_states.pt"


def states_counts(run: Path, counts: list[Any]) -> None:
    """The model file says that layers have so many experts."""
    change(run / TAG / "mp_rank_00_model_states.pt", lambda value: value.update(num_experts=counts))


def test_a_count_that_is_huge(run: Path) -> None:
    """As of a damaged file: not every file that is missing is named."""
    states_counts(run, [1 << 60])
    with pytest.raises(IncompleteCheckpoint, match="lacks layer_0_expert_4_mp_rank_00") as caught:
        zckpt.read(run)
    assert len(caught.value.paths) == 64


@pytest.mark.parametrize("counts", [["4"], [0], [-1], [True], [4, 0]])
def test_counts_that_are_none(counts: list[Any], run: Path) -> None:
    states_counts(run, counts)
    message = r"num_experts in the model file must be a list of positive numbers, but it is \[.*\]"
    with pytest.raises(CorruptCheckpoint, match=message):
        zckpt.read(run)


@pytest.mark.parametrize(("layer", "number"), [(0, 4), (1, 0)])
def test_a_file_too_many(layer: int, number: int, run: Path) -> None:
    copy_file(file_of(run, 3), file_of(run, number, layer))
    with pytest.raises(
        InconsistentCheckpoint, match=rf"layer_{layer}_expert_{number}.* one file too"
    ):
        zckpt.read(run)


def test_a_tensor_that_is_no_expert_s(run: Path) -> None:
    change(file_of(run, 2), lambda value: value.update(first=torch.zeros(3)))
    with pytest.raises(CorruptCheckpoint, match="not a file of one expert: it has 'first'"):
        zckpt.read(run)


@pytest.mark.parametrize(
    "edit",
    [
        lambda value: value.pop(f"{INSIDE}2.b"),
        lambda value: value.update({f"{INSIDE}2.b": torch.zeros(3).bfloat16()}),
        lambda value: value.update({f"{INSIDE}2.b": torch.zeros(2)}),
        lambda value: value.clear(),
    ],
    ids=["lost", "another shape", "another type", "empty"],
)
def test_experts_that_are_not_alike(edit: Callable[[Any], object], run: Path) -> None:
    change(file_of(run, 2), edit)
    with pytest.raises(InconsistentCheckpoint, match="holds other tensors than layer_0_expert_0"):
        zckpt.read(run)


def test_experts_behind_no_gate_of_the_module(run: Path) -> None:
    def edit(value: Any) -> None:
        value["module"]["other"] = value["module"].pop(GATE)

    change(run / TAG / "mp_rank_00_model_states.pt", edit)
    with pytest.raises(InconsistentCheckpoint, match="layer number belongs to another layer"):
        zckpt.read(run)


@pytest.mark.parametrize("run", [zero_1], indirect=True)
def test_a_rank_without_an_equal_share(run: Path) -> None:
    """Rank 0 lists experts 0 and 2, but every rank counts its own from 0."""

    def edit(value: Any) -> None:
        shapes = value["param_shapes"][1]
        named = {n.replace(f"{INSIDE}1.", f"{INSIDE}2."): shape for n, shape in shapes.items()}
        value["param_shapes"][1] = named

    change(run / TAG / "mp_rank_00_model_states.pt", edit)
    with pytest.raises(InconsistentCheckpoint, match="rank 0 has 2 of the 4 experts of moe"):
        zckpt.read(run)


def test_ranks_that_cannot_share_the_experts(run: Path) -> None:
    change(run / TAG / "mp_rank_00_model_states.pt", lambda value: value.update(dp_world_size=3))
    with pytest.raises((InconsistentCheckpoint, IncompleteCheckpoint), match=r"3 ranks|of 3"):
        zckpt.read(run)


@pytest.mark.parametrize("run", [stage_0], indirect=True)
def test_experts_that_are_no_multiple_of_the_ranks(run: Path) -> None:
    """Without names, the size is known by groups alone."""
    change(run / TAG / "mp_rank_00_model_states.pt", lambda value: value.update(dp_world_size=3))

    def edit(value: Any) -> None:
        groups = value["optimizer"]["optimizer_state_dict"]["param_groups"]
        groups[1]["name"] = "ep_size_3"

    for path in (run / TAG).glob("expp_rank_*"):
        change(path, edit)
    with pytest.raises(
        InconsistentCheckpoint, match=r"3 ranks cannot share the 4 experts of moe by an .* of 3"
    ):
        zckpt.read(run)


@pytest.mark.parametrize("run", [zero_1], indirect=True)
def test_steps_of_ep_ranks_that_differ(run: Path) -> None:
    def edit(value: Any) -> None:
        value["optimizer_state_dict"]["base_optimizer_state"]["state"][1]["step"] += 1

    change(run / TAG / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt", edit)
    with pytest.raises(InconsistentCheckpoint, match="step differs"):
        zckpt.read(run)
    steps = {n: p.step for n, p in zckpt.read(run, step_policy="max").parameters.items()}
    assert {n for n, step in steps.items() if step == 4} == {*EXPERTS}


def test_a_second_layer_in_files_of_the_first(run: Path) -> None:
    def rename(value: Any) -> None:
        for name in [*value]:
            value[name.replace("moe.", "late.", 1)] = value.pop(name)

    change(file_of(run, 1), rename)
    with pytest.raises(
        InconsistentCheckpoint,
        match="holds expert 1 of late, but its name is that of expert 1 of moe",
    ):
        zckpt.read(run)


@pytest.mark.parametrize("more", [{0: torch.zeros(2)}, {f"{INSIDE}2.w": 5}])
def test_what_no_file_of_an_expert_has(more: dict[Any, Any], run: Path) -> None:
    change(file_of(run, 2), lambda value: value.update(more))
    with pytest.raises(CorruptCheckpoint, match="is not a file of one expert: it has"):
        zckpt.read(run)


@pytest.mark.parametrize("state", [torch.zeros(2), None])
def test_an_extra_state_of_an_expert(state: torch.Tensor | None, run: Path) -> None:
    """It must not be taken from the model file, whose storages have the same keys."""
    change(file_of(run, 2), lambda value: value.update({f"{INSIDE}2.w._extra_state": state}))
    with pytest.raises(UnsupportedCheckpoint, match=r"expert_2.* extra states of experts"):
        zckpt.read(run)


def test_files_without_tensors(run: Path) -> None:
    for number in range(4):
        change(file_of(run, number), lambda value: value.clear())
    with pytest.raises(InconsistentCheckpoint, match=r"expert_0.* holds other tensors than"):
        zckpt.read(run)


def test_one_count_for_all_layers(run: Path) -> None:
    """A list by layer is needed."""
    change(run / TAG / "mp_rank_00_model_states.pt", lambda value: value.update(num_experts=4))
    with pytest.raises(UnsupportedCheckpoint, match="layers of an old release"):
        zckpt.read(run)


@pytest.mark.parametrize(
    ("name", "gate"),
    [
        (f"{INSIDE}0.w", GATE),
        ("moe.experts.w1.0", "moe.router.gate.weight"),  # a slice of AutoEP's
    ],
)
def test_experts_stand_behind_their_gate(name: str, gate: str, tmp_path: Path) -> None:
    torch.save({name: torch.zeros(2)}, tmp_path / "expert.pt")
    assert LayerFiles("moe", [TorchFile(str(tmp_path / "expert.pt"))]).gate == gate


def test_files_of_experts_whose_weights_the_source_does_not_have(tmp_path: Path) -> None:
    """Weights are made of the masters; what has none, and no bytes, is in no file."""
    source = zckpt.read(saved_zero_1(tmp_path / "run"))
    frozen = {f"{INSIDE}{n}.frozen": Parameter((2,), trainable=False) for n in range(4)}
    source = replace(
        source,
        parameters={**source.parameters, **frozen},
        entries={name: own for name, own in source.entries.items() if own.slot != "param"},
        state={**source.state, "module": [*source.state["module"], *frozen]},
    )
    for number, shell in enumerate(expert_files(DeepSpeedTarget(source, options_of({})))):
        assert shell.name == f"{TAG}/{file_of(tmp_path, number).name}"
        content = bytearray(shell.size)
        for offset, part in shell.parts:
            content[offset : offset + len(part)] = part
        (tmp_path / "expert.pt").write_bytes(content)
        expected = [f"{INSIDE}{number}.{inner}" for inner in INNER]
        assert [*TorchFile(str(tmp_path / "expert.pt")).value] == expected


# -- what the model file lists


def test_one_rank_and_one_expert(tmp_path: Path) -> None:
    names = [f"{INSIDE}0.{inner}" for inner in INNER]
    run = saved_zero_1(tmp_path / "run", ((1, [*DENSE]), (1, names)), 1, num_experts=[1])
    for number in (1, 2, 3):
        file_of(run, number).unlink()
    manifest = zckpt.read(run)
    assert [*manifest.parameters] == [*DENSE, *names]
    assert (manifest.run.origin.dp, manifest.run.origin.ep) == (1, 1)
    assert torch.equal(zckpt.load(run, f"{names[0]}/master"), numbers(names[0], "master"))


def test_files_are_in_the_order_of_numbers(tmp_path: Path) -> None:
    """Not of names, in which expert 10 stands before expert 2."""
    names = [f"{INSIDE}{n}.b" for n in range(12)]
    group = dict.fromkeys(names, (2,))
    model, ranks = dense.stage_2(({"first": (3,), GATE: (12, 2)}, group), 1)
    weights = {name: model["module"].pop(name) for name in names}
    run = dense.saved(tmp_path / "run", ({**model, "num_experts": [12]}, ranks))
    for number, (name, weight) in enumerate(weights.items()):
        torch.save({name: weight}, file_of(run, number))
    assert [*zckpt.read(run).parameters] == ["first", GATE, *names]
    assert torch.equal(zckpt.load(run, f"{names[10]}/param"), weights[names[10]])


@pytest.mark.parametrize(
    ("own", "error", "said"),
    [
        ((), UnsupportedCheckpoint, "experts of moe that are all frozen"),
        ((0, 1, 2), InconsistentCheckpoint, "rank 0 has 3 of the 4 experts of moe"),
    ],
)
def test_experts_that_rank_0_lists(
    own: tuple[int, ...], error: type[Exception], said: str, tmp_path: Path
) -> None:
    names = [f"{INSIDE}{n}.b" for n in own]
    groups = ((1, [*DENSE]), *([(1, names)] if names else []))
    with pytest.raises(error, match=said):
        zckpt.read(saved_zero_1(tmp_path / "run", groups))


def test_experts_that_are_frozen(tmp_path: Path) -> None:
    """They stand behind what is dense, which is in the module behind them."""
    frozen = {name: torch.Size(shape) for name, shape in LOCAL.items()}
    run = saved_zero_1(tmp_path / "run", ((1, [*DENSE]),), frozen_param_shapes=frozen)
    late = {"late": numbers("more0", "master").bfloat16()}
    change(run / TAG / "mp_rank_00_model_states.pt", lambda value: value["module"].update(late))
    manifest = zckpt.read(run)
    assert [*manifest.parameters] == [*DENSE, "late", *EXPERTS]
    assert [n for n, about in manifest.parameters.items() if about.trainable] == [*DENSE]
    assert manifest.run.origin.ep == 2
    name = f"{INSIDE}3.w"
    assert torch.equal(zckpt.load(run, f"{name}/param").float(), numbers(name, "master"))


def test_buffers_of_experts(run: Path) -> None:
    """Those of rank 0 stand for all; what was not saved, as no state dict has it, is none."""
    lists = [f"{INSIDE}{n}.{inner}" for inner in ("count", "lost") for n in range(2)]

    def edit(value: Any) -> None:
        value["buffer_names"] = [*lists, "dense"]
        value["module"]["dense"] = torch.tensor([9])

    change(run / TAG / "mp_rank_00_model_states.pt", edit)
    for number in range(4):
        own = {f"{INSIDE}{number}.count": torch.tensor([number])}
        change(file_of(run, number), lambda value, own=own: value.update(own))
    assert zckpt.read(run).buffers == (*(f"{INSIDE}{n}.count" for n in range(4)), "dense")
    assert zckpt.load(run, f"{INSIDE}3.count/param").tolist() == [3]


@pytest.mark.parametrize("run", [zero_1], indirect=True)
def test_second_names_of_experts(run: Path) -> None:
    """In the layer those of all experts, elsewhere that of rank 0's."""
    shared = {f"{INSIDE}{n}.tied": f"{INSIDE}{n}.w" for n in range(2)}
    shared["outside"] = f"{INSIDE}1.b"

    def edit(value: Any) -> None:
        value["shared_params"] = shared
        value["module"]["outside"] = numbers(f"{INSIDE}1.b", "master").bfloat16()

    change(run / TAG / "mp_rank_00_model_states.pt", edit)
    for n in range(4):
        tied = {f"{INSIDE}{n}.tied": numbers(f"{INSIDE}{n}.w", "master").bfloat16()}
        change(file_of(run, n), lambda value, tied=tied: value.update(tied))
    aliases = {name: about.aliases for name, about in zckpt.read(run).parameters.items()}
    assert {name: own for name, own in aliases.items() if own} == {
        **{f"{INSIDE}{n}.w": (f"{INSIDE}{n}.tied",) for n in range(4)},
        f"{INSIDE}1.b": ("outside",),
    }


@pytest.mark.parametrize("run", [zero_1], indirect=True)
def test_lists_that_older_releases_do_not_have(run: Path) -> None:
    def edit(value: Any) -> None:
        del value["shared_params"], value["buffer_names"], value["mp_world_size"]

    before = [*zckpt.read(run).parameters]
    change(run / TAG / "mp_rank_00_model_states.pt", edit)
    assert [*zckpt.read(run).parameters] == before


@pytest.mark.parametrize("model", [{}, NAMED])
def test_weights_that_the_engine_has_not_saved(model: dict[str, Any], tmp_path: Path) -> None:
    """Of a residual MLP, say, in a layer that has `expert` in its name."""
    run = saved_zero_1(tmp_path / "run", dp=4, **model)
    change(run / TAG / "mp_rank_00_model_states.pt", lambda value: value["module"].pop("first"))
    manifest = zckpt.read(run)
    assert any(
        line.startswith("DeepSpeed did not save the weights first, because") and "masters" in line
        for line in texts(manifest.notices.warnings)
    )
    assert manifest.state["module"] == [GATE, *EXPERTS, "first"]
    assert torch.equal(zckpt.load(run, "first/master"), numbers("first", "master"))


@pytest.mark.parametrize("run", [zero_1], indirect=True)
def test_experts_that_only_the_optimizer_has(run: Path) -> None:
    for n in range(4):
        change(file_of(run, n), lambda value, n=n: value.pop(f"{INSIDE}{n}.b"))
    with pytest.raises(
        InconsistentCheckpoint, match=rf"the optimizer has {INSIDE}0.b, .*of the exp"
    ):
        zckpt.read(run)


# -- flat groups


def of_optimizers(run: Path, edit: Callable[[Any], object]) -> None:
    """Changes every rank's state of the optimizer."""
    for path in (run / TAG).glob("*optim_states.pt"):
        change(path, lambda value: edit(value["optimizer_state_dict"]))


@pytest.mark.parametrize("counts", [None, 2, [2], [2, None]])
def test_counts_of_partitions_that_are_not_stated(counts: Any, tmp_path: Path) -> None:
    run = saved_zero_1(tmp_path / "run")
    of_optimizers(run, lambda state: state.update(partition_count=counts))
    assert torch.equal(zckpt.load(run, f"{INSIDE}3.w/master"), numbers(f"{INSIDE}3.w", "master"))


def test_a_group_with_experts_and_others(tmp_path: Path) -> None:
    run = saved_zero_1(tmp_path / "run", ((1, [*DENSE]), (2, [*LOCAL, "more0"])))
    with pytest.raises(
        InconsistentCheckpoint,
        match=r"param group 1.* its parameters have the expert-parallel size 1, 2",
    ):
        zckpt.read(run)


def test_one_group_of_all_that_every_rank_has(tmp_path: Path) -> None:
    run = saved_zero_1(tmp_path / "run", ((1, [*DENSE, *EXPERTS]),))
    manifest = zckpt.read(run)
    assert {about.group for about in manifest.parameters.values()} == {0}
    assert manifest.run.origin.ep == 1


def test_a_group_without_parameters(tmp_path: Path) -> None:
    """It has a step, but nothing that could name it."""
    run = saved_zero_1(tmp_path / "run", GROUPS)

    def edit(state: Any) -> None:
        state["partition_count"].append(2)
        state["single_partition_of_fp32_groups"].append(torch.zeros(0))
        base = state["base_optimizer_state"]
        base["state"][2] = {"step": torch.tensor(3.0)}
        base["param_groups"].append({"lr": 0.2, "params": [2]})

    of_optimizers(run, edit)
    change(run / TAG / "mp_rank_00_model_states.pt", lambda value: value["param_shapes"].append({}))
    manifest = zckpt.read(run)
    assert {about.group for about in manifest.parameters.values()} == {0, 1}
    assert {about.step for about in manifest.parameters.values()} == {3}


def test_layers_of_several_sizes(tmp_path: Path) -> None:
    groups: Groups = ((1, [*DENSE, LATE_GATE]), (2, [*LOCAL]), (1, [*LATE]))
    run = saved_zero_1(tmp_path / "run", groups)
    manifest = zckpt.read(run)
    assert manifest.run.origin.ep == 2
    assert [layer.ep for layer in manifest.run.engine.experts] == [2, 1]  # type: ignore[union-attr]
    for name in (*LATE, f"{INSIDE}3.b"):
        assert torch.equal(zckpt.load(run, f"{name}/exp_avg"), numbers(name, "exp_avg"))


def on_two_tensor_ranks(run: Path) -> Path:
    """A second tensor rank has the same as the first."""
    change(run / TAG / "mp_rank_00_model_states.pt", lambda value: value.update(mp_world_size=2))
    for path in (run / TAG).iterdir():
        copy_file(path, path.with_name(path.name.replace("mp_rank_00", "mp_rank_01")))
    return run


@pytest.mark.parametrize("count", [1, None])
def test_experts_that_tensor_ranks_cut(count: int | None, tmp_path: Path) -> None:
    """Each tensor rank has a slice of every expert, and all of its data ranks share them."""
    run = on_two_tensor_ranks(saved_zero_1(tmp_path / "run"))
    of_optimizers(run, lambda state: state.update(partition_count=[2, count]))
    (tmp_path / "rules.txt").write_text(r".*\.w = 1" + "\n.* = replicated\n")
    manifest = zckpt.read(run, tp_rules=tmp_path / "rules.txt")
    assert {*manifest.parameters} == {*DENSE, *EXPERTS}
    assert manifest.parameters[f"{INSIDE}3.w"].shape == (2, 4)


def test_experts_that_are_spread_over_tensor_ranks(tmp_path: Path) -> None:
    """A group of two ep ranks that is cut over two more needs four ranks, not two."""
    run = on_two_tensor_ranks(saved_zero_1(tmp_path / "run"))
    of_optimizers(run, lambda state: state.update(partition_count=[2, 2]))
    with pytest.raises(UnsupportedCheckpoint, match="experts are spread over tensor ranks") as e:
        zckpt.read(run)
    assert "enable_expert_tensor_parallelism=True" in (e.value.hint or "")


def test_a_group_that_is_cut_over_too_many_ranks(tmp_path: Path) -> None:
    """Without tensor ranks, also where an old release has not stated their number."""
    run = saved_zero_1(tmp_path / "run")
    of_optimizers(run, lambda state: state.update(partition_count=[2, 2]))
    change(run / TAG / "mp_rank_00_model_states.pt", lambda value: value.pop("mp_world_size"))
    with pytest.raises(InconsistentCheckpoint, match="is cut over 2 of 2 ranks"):
        zckpt.read(run)


def test_experts_in_elastic_files(tmp_path: Path) -> None:
    run = saved_zero_1(tmp_path / "run")
    of_optimizers(
        run, lambda s: s.update(base_optimizer_state=[*s["base_optimizer_state"]["state"].values()])
    )
    with pytest.raises(UnsupportedCheckpoint, match="layers in stage 3 or in elastic files"):
        zckpt.read(run)


def test_experts_in_stage_3(tmp_path: Path) -> None:
    model, ranks = dense.stage_3((DENSE, LOCAL), 2)
    run = dense.saved(tmp_path / "run", ({**model, "num_experts": [4]}, ranks))
    for path in saved_zero_1(tmp_path / "other").glob(f"{TAG}/layer_*"):
        copy_file(path, run / TAG / path.name)
    with pytest.raises(UnsupportedCheckpoint, match="layers in stage 3 or in elastic files"):
        zckpt.read(run)


# -- which ranks have which experts, if the save only names its ds_config


def config_of(run: Path) -> dict[str, Any]:
    engine = zckpt.read(run).run.engine
    config: dict[str, Any] = engine.config  # type: ignore[union-attr]
    return config


@pytest.mark.parametrize("data_first", [False, True])
@pytest.mark.parametrize("is_named", [False, True])
def test_neighbors_with_other_experts_or_with_the_same(
    is_named: bool, data_first: bool, tmp_path: Path
) -> None:
    """The ds_config says it, or the bytes: no other order of ranks has the weights' masters."""
    key = "use_data_before_expert_parallelism"
    model = NAMED if is_named else {"ds_config": {key: data_first}}
    run = saved_zero_1(tmp_path / "run", dp=4, data_first=data_first, **model)
    for name in EXPERTS:
        for slot in ("master", *MOMENTS):
            assert torch.equal(zckpt.load(run, f"{name}/{slot}"), numbers(name, slot)), name
    assert (config_of(run).get(key) is True) == data_first
    assert zckpt.read(run).run.zero_padding


@pytest.mark.parametrize("groups", [ALONE, GROUPS])
def test_ranks_that_no_order_changes(groups: Groups, tmp_path: Path) -> None:
    """All ranks have the same experts, or each has its own."""
    run = saved_zero_1(tmp_path / "run", groups, **NAMED)
    assert torch.equal(zckpt.load(run, f"{INSIDE}3.w/master"), numbers(f"{INSIDE}3.w", "master"))


def test_a_layer_that_every_rank_has_beside_another(tmp_path: Path) -> None:
    groups: Groups = ((1, [*DENSE, LATE_GATE]), (2, [*LOCAL]), (1, [*LATE]))
    run = saved_zero_1(tmp_path / "run", groups, 4, data_first=True, **NAMED)
    for name in (*LATE, *EXPERTS):
        assert torch.equal(zckpt.load(run, f"{name}/master"), numbers(name, "master"))


def of_each_expert(run: Path, edit: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Changes the weights of all experts."""
    for number in range(4):
        change(
            file_of(run, number),
            lambda value: value.update({name: edit(weight) for name, weight in value.items()}),
        )


def test_weights_of_which_no_order_has_the_masters(tmp_path: Path) -> None:
    """A ds_config says the order without them, as for weights of an EMA."""
    run = saved_zero_1(tmp_path / "run", dp=4)
    of_each_expert(run, lambda weight: weight + 1)
    assert zckpt.read(run).run.origin.ep == 2
    change(run / TAG / "mp_rank_00_model_states.pt", lambda value: value.update(NAMED))
    with pytest.raises(InconsistentCheckpoint, match="masters do not round to the experts' wei"):
        zckpt.read(run)


def test_experts_that_are_all_equal(tmp_path: Path) -> None:
    """Then both orders fit."""
    run = saved_zero_1(tmp_path / "run", dp=4, **NAMED)
    of_each_expert(run, torch.ones_like)
    of_optimizers(run, lambda s: s["single_partition_of_fp32_groups"][1].fill_(1))
    with pytest.raises(UnsupportedCheckpoint, match="only the file name was saved"):
        zckpt.read(run)


def test_partitions_of_which_one_order_has_the_lengths(tmp_path: Path) -> None:
    """Masters without padding: neighbors would have too few elements of their experts."""
    groups: Groups = ((1, [*DENSE]), (2, [f"{INSIDE}{n}.w" for n in range(2)]))
    run = saved_zero_1(tmp_path / "run", groups, 4, **NAMED)

    def shorter(value: Any) -> None:
        masters = value["optimizer_state_dict"]["single_partition_of_fp32_groups"]
        masters[1] = masters[1][:0]

    assert config_of(run).get("use_data_before_expert_parallelism") is None
    for rank in (2, 3):
        change(run / TAG / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt", shorter)
    with pytest.raises(InconsistentCheckpoint, match="masters do not round to the experts' wei"):
        zckpt.read(run)


IRREGULAR = [f"{INSIDE}{part}" for part in ("0.w", "1.b", "1.w", "0.b")]
"""As the weights and then the biases stand in a round robin of three ranks."""


def test_an_order_of_experts_that_may_be_a_round_robin(tmp_path: Path) -> None:
    groups: Groups = ((1, [*DENSE]), (2, IRREGULAR))
    run = saved_zero_1(tmp_path / "run", groups, 4, **NAMED)
    with pytest.raises(UnsupportedCheckpoint, match="only the file name was saved"):
        zckpt.read(run)


def test_experts_in_a_round_robin(tmp_path: Path) -> None:
    """The order of dense parameters over six ranks shows it; three ranks share each expert."""
    laid_out = ["first", "more4", GATE, "more0", "more1", "more2", "more3"]
    run = saved_zero_1(tmp_path / "run", ((1, laid_out), (2, IRREGULAR)), 6, **NAMED)

    def in_order(value: Any) -> None:
        module = value["module"]
        value["module"] = {name: module[name] for name in (*DENSE, *MORE)}

    change(run / TAG / "mp_rank_00_model_states.pt", in_order)
    assert config_of(run)["zero_optimization"]["round_robin_gradients"]
    in_order_of_experts = [f"{INSIDE}{n}.{inner}" for inner in INNER for n in range(4)]
    assert [*zckpt.read(run).parameters] == [*DENSE, *MORE, *in_order_of_experts]
    for name in (*EXPERTS, *MORE):
        assert torch.equal(zckpt.load(run, f"{name}/master"), numbers(name, "master"))
