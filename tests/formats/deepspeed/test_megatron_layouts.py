"""GPT-NeoX's and BLOOM's directories, which megatron_layouts.py lays out: no program wrote them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt
from zckpt.errors import (
    IncompleteCheckpoint,
    InconsistentCheckpoint,
    MissingData,
    UnsupportedCheckpoint,
    ZckptError,
)
from zckpt.formats.reading import Reading
from zckpt.reading import read

from ... import faults
from ...conftest import Once, texts
from ...engines import megatron_layouts as layouts
from ...engines.megatron_layouts import Numbers, Run
from ...faults import swap_files
from ..equality import load, same_bits
from .test_grid import edit

RUNS = {
    "bloom": layouts.BLOOM,
    "neox": layouts.NEOX,
    "neox-tied": layouts.NEOX_TIED,
    "neox-sequential": layouts.SEQUENTIAL,
}
DRIFTED = replace(layouts.BLOOM, drift=True)
PARTS = replace(layouts.NEOX, drift=True)
SEQUENTIAL_PARTS = replace(layouts.SEQUENTIAL, drift=True)
RANDOM = ("np_rng_state", "random_rng_state", "rng_tracker_states", "torch_rng_state")
Laid = Callable[[Run], tuple[Path, Numbers]]


@pytest.fixture(scope="session")
def laid(once: Once) -> Laid:
    """Lays out a run, once per session: its directory, which no test may change; its numbers."""
    return lambda run: once("layouts", run, lambda root: (root, layouts.write(run, root)))


@pytest.fixture
def bloom(laid: Laid, tmp_path: Path) -> Path:
    """A copy of BLOOM's run, which a test may damage."""
    return Path(shutil.copytree(laid(layouts.BLOOM)[0], tmp_path / "run"))


def of(universal: Path) -> dict[str, torch.Tensor]:
    """The tensors of parameters and buffers."""
    return {name: t for name, t in load(universal).items() if not name.endswith("/state")}


def different(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> list[str]:
    assert found.keys() == wanted.keys()
    return [name for name in wanted if not same_bits(found[name], wanted[name])]


def everything(numbers: Numbers) -> dict[str, torch.Tensor]:
    buffers = {f"{name}/param": buffer for name, buffer in numbers.buffers.items()}
    return {**numbers.whole, **buffers}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "bloom" else pytest.mark.engines) for name in RUNS],
)
def test_universal_has_the_numbers(name: str, laid: Laid, tmp_path: Path) -> None:
    run = RUNS[name]
    root, numbers = laid(run)
    report = zckpt.convert(root, tmp_path / "out", tp_rules=run.family)
    assert different(of(tmp_path / "out"), everything(numbers)) == []
    assert texts(report["left_out"]) == [
        f"client_state {key!r} of model ranks other than 0" for key in RANDOM
    ]
    doubts = [line for line in texts(report["warnings"]) if "gpt_j_residual" in line]
    assert texts(report["warnings"]) == doubts
    assert bool(doubts) == (run.family == "neox")
    manifest = zckpt.read(tmp_path / "out")
    assert list(manifest.buffers) == list(numbers.buffers)
    assert {item.step for item in manifest.parameters.values()} == {layouts.STEP}
    assert [group["weight_decay"] for group in manifest.groups or ()] == [0.1, 0.0]
    decays = {n: each.decays for n, each in layouts.weights(run).items()}
    assert {n: item.group for n, item in manifest.parameters.items()} == {
        n: 0 if decays[n] else 1 for n in decays
    }
    assert manifest.state["counters"]["skipped_steps"] == (1 if run.family == "neox" else 0)
    for words in ([root], [root, tmp_path / "out"]):
        found = zckpt.verify(*words, tp_rules=run.family)
        assert found["equal"], found
    gathered = zckpt.verify(root, tmp_path / "out", tp_rules=run.family, gather=True, device="cpu")
    assert gathered["equal"], gathered


def loaded(path: Path) -> Any:
    """What a file has, by torch alone."""
    if "optim_states" in path.name:
        return torch.load(path, weights_only=False)["optimizer_state_dict"]
    with layouts.under_engine_names():
        return torch.load(path, weights_only=False)


def assert_same_files(ours: Path, theirs: Path) -> None:
    """Partitions, layers and shapes are those of a run that was laid out at the same sizes."""
    names = {path.name for path in theirs.glob("*/*.pt")}
    assert {path.name for path in ours.glob("*/*.pt")} == names
    for name in sorted(names):
        a, b = (loaded(folder / "global_step6" / name) for folder in (ours, theirs))
        if "optim_states" in name:
            key = "single_partition_of_fp32_groups"
            assert [*map(same_bits, a[key], b[key])] == [True] * len(b[key])
            a, b = (each["base_optimizer_state"] for each in (a, b))
            assert a["param_groups"] == b["param_groups"]
            for number, states in b["state"].items():
                assert different({**a["state"][number]}, states) == [], (name, number)
        elif name.startswith("layer"):
            assert different(a, b) == [], name
        else:
            assert a["param_shapes"] == b["param_shapes"], name
            assert a["mp_world_size"] == b["mp_world_size"]
            assert [*(a["module"] or ())] == [*(b["module"] or ())]
            arguments, expected = (vars(x) if "tokens" in b else x for x in (a["args"], b["args"]))
            assert arguments == {n: v for n, v in expected.items() if n in arguments}
            lost = expected.keys() - arguments.keys()
            assert lost <= {"position_embedding_type"}  # an object that --allow-object admits


@pytest.mark.engines
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("dp", [1, 3])
def test_another_dp_keeps_every_rank(name: str, dp: int, laid: Laid, tmp_path: Path) -> None:
    """Nothing has to be known of slices: drifted copies and parts of sums stay as they are."""
    run = replace(RUNS[name], drift=True)
    report = zckpt.reshard(laid(run)[0], tmp_path / "out", dp=dp)
    assert_same_files(tmp_path / "out", laid(replace(run, dp=dp))[0])
    assert all("PositionEmbeddingType" in line for line in texts(report["left_out"]))


@pytest.mark.engines
@pytest.mark.parametrize(
    ("name", "bounds"),
    [
        ("bloom", (0, 11)),
        ("bloom", (0, 4, 5, 11)),
        ("neox", (0, 9)),
        ("neox", (0, 3, 6, 9)),
        ("neox-tied", (0, 4, 9)),
    ],
)
def test_other_stages(name: str, bounds: tuple[int, ...], laid: Laid, tmp_path: Path) -> None:
    run, pp = RUNS[name], len(bounds) - 1
    given = {} if pp == 1 else {"pp_bounds": bounds}
    zckpt.reshard(laid(run)[0], tmp_path / "out", pp=pp, dp=3, **given)
    assert_same_files(tmp_path / "out", laid(replace(run, bounds=bounds, dp=3))[0])


@pytest.mark.engines
@pytest.mark.parametrize("tp", [1, 4])
def test_neox_for_another_number_of_tensor_ranks(tp: int, laid: Laid, tmp_path: Path) -> None:
    """GPT-NeoX compares the arguments in the files with its own when it loads."""
    root, numbers = laid(layouts.SEQUENTIAL)
    rules = tmp_path / "rules.txt"
    rules.write_text(r".*\b(word_embeddings|final_linear)\.weight = vocab:37" "\ninclude neox\n")
    zckpt.reshard(root, tmp_path / "out", tp=tp, tp_rules=rules)
    rows = replace(layouts.SEQUENTIAL, tp=tp).rows
    assert rows == {1: 40, 4: 48}[tp]
    models = [
        torch.load(path, weights_only=False)
        for path in sorted((tmp_path / "out").glob("*/mp_rank_*"))
    ]
    assert len(models) == tp
    for model in models:
        assert model["args"]["model_parallel_size"] == tp
        assert model["args"]["padded_vocab_size"] == rows
    name = "sequential.0.word_embeddings.weight"
    whole = torch.cat([model["module"][name] for model in models])
    assert len(whole) == rows
    assert same_bits(whole[:37], numbers.whole[f"{name}/param"][:37])
    dense = "sequential.3.attention.dense.weight"
    whole = torch.cat([model["module"][dense] for model in models], 1)
    assert same_bits(whole, numbers.whole[f"{dense}/param"])
    bias = "sequential.3.attention.dense.bias"
    for model in models:
        assert same_bits(model["module"][bias], numbers.whole[f"{bias}/param"])


class TestDrift:
    def test_copies_of_norms_need_a_choice(self, laid: Laid, tmp_path: Path) -> None:
        root, _ = laid(DRIFTED)
        with pytest.raises(InconsistentCheckpoint, match="replicas of 16 param") as raised:
            zckpt.convert(root, tmp_path / "out", tp_rules="bloom")
        assert "--replicas rank0" in raised.value.hint
        assert not (tmp_path / "out").exists()

    @pytest.mark.parametrize("choice", ["rank0", pytest.param("mean", marks=pytest.mark.engines)])
    def test_the_choice_is_exact(self, choice: str, laid: Laid, tmp_path: Path) -> None:
        root, numbers = laid(DRIFTED)
        report = zckpt.convert(root, tmp_path / "out", tp_rules="bloom", replicas=choice)
        wanted = dict(numbers.whole)
        if choice == "mean":
            for name, copies in numbers.copies.items():
                slot = "master" if name.endswith("/param") else name.rpartition("/")[2]
                own = numbers.copies[f"{name.rpartition('/')[0]}/{slot}"]
                mean = torch.stack([copy.double() for copy in own]).sum(0) / len(own)
                wanted[name] = mean.to(copies[0].dtype)
        assert different(of(tmp_path / "out"), wanted) == []
        chosen = {"rank0": "rank 0's", "mean": "their mean"}[choice]
        lines = [line for line in texts(report["warnings"]) if f"{chosen} is used" in line]
        assert len(lines) == 16  # two norms in each of four layers, weights and biases

    @pytest.mark.engines
    def test_norms_that_stages_have_twice(self, laid: Laid, tmp_path: Path) -> None:
        """The last stage has a copy of the embedding's norm, without gradients: it decays."""
        root, numbers = laid(DRIFTED)
        report = zckpt.convert(root, tmp_path / "out", tp_rules="bloom", replicas="rank0")
        tied = [line for line in texts(report["warnings"]) if "stages' replicas" in line]
        assert ["word_embeddings.norm." in line for line in tied] == [True, True]
        (line,) = texts(zckpt.reshard(root, tmp_path / "apart", dp=1)["warnings"])
        assert "word_embeddings.norm.bias differ, and each stage keeps its replica" in line
        name = "tied_modules.embed.word_embeddings.norm.weight/master"
        assert same_bits(zckpt.load(tmp_path / "out", name), numbers.whole[name])


@pytest.mark.parametrize("name", ["word_embeddings.weight", "word_embeddings.norm.weight"])
def test_a_copy_of_a_tied_layer_that_saves_no_weight(
    name: str, bloom: Path, tmp_path: Path
) -> None:
    """The last stage uses the embedding by a function: only the first stage can tell."""
    assert zckpt.reshard(bloom, tmp_path / "before", dp=1)["warnings"] == []
    last = read(bloom, Reading(ranks_apart=True)).ranks[2]
    entry = last.entries[f"tied_modules.embed.{name}", "master"]
    for fragment in entry.fragments:
        extent = fragment.extent
        with open(extent.file, "r+b") as file:
            file.seek(extent.offset)
            file.write(torch.rand(extent.length // 4).numpy().tobytes())
        faults.mend(extent.file)
    (warning,) = texts(zckpt.reshard(bloom, tmp_path / "apart", dp=1)["warnings"])
    assert f"stages' replicas of tied_modules.embed.{name} differ, and each stage keeps" in warning


class TestSums:
    """Biases of GPT-NeoX with gpt_j_residual: each rank has a part."""

    @pytest.mark.parametrize(
        "run", [pytest.param(PARTS, marks=pytest.mark.engines), SEQUENTIAL_PARTS]
    )
    def test_parts_of_sums_are_refused_by_name(self, run: Run, laid: Laid, tmp_path: Path) -> None:
        root, _ = laid(run)
        with pytest.raises(UnsupportedCheckpoint, match=r"2.attention.dense.bias.* is the sum"):
            zckpt.convert(root, tmp_path / "out", tp_rules="neox-parallel")
        with pytest.raises(InconsistentCheckpoint, match="different replicas") as raised:
            zckpt.convert(root, tmp_path / "out", tp_rules="neox")
        assert "parts of a sum" in raised.value.hint
        if not run.bounds:
            with pytest.raises(UnsupportedCheckpoint, match="is the sum of the tensor ranks"):
                zckpt.reshard(root, tmp_path / "out", tp=1, tp_rules="neox-parallel")
        assert not (tmp_path / "out").exists()

    @pytest.mark.engines
    def test_parts_are_no_copies_but_their_moments_are(self, laid: Laid) -> None:
        """Every part has the same gradient."""
        root, numbers = laid(SEQUENTIAL_PARTS)
        warnings = zckpt.read(root, tp_rules="neox-parallel").notices.warnings
        assert ["only the summand of tensor rank 0" in line for line in texts(warnings)] == [True]
        own = [
            line["tensor"] for line in zckpt.verify(root, tp_rules="neox-parallel")["differences"]
        ]
        copies = [name for name in numbers.copies if name.endswith(("exp_avg", "exp_avg_sq"))]
        assert sorted(own) == sorted(
            n for n in copies if layouts.drifts(SEQUENTIAL_PARTS, n[: n.rindex("/")])
        )


@pytest.mark.parametrize("family", [None, "megatron", "llama", "neox"])
def test_another_family_is_refused(family: str | None, laid: Laid, tmp_path: Path) -> None:
    """Those of Megatron-DeepSpeed are BLOOM's too, but for the norm of the embedding's name."""
    root, numbers = laid(layouts.BLOOM)
    if family == "megatron":
        zckpt.convert(root, tmp_path / "out", tp_rules=family)
        assert different(of(tmp_path / "out"), everything(numbers)) == []
        return
    with pytest.raises(MissingData, match="nothing says how") as raised:
        zckpt.convert(root, tmp_path / "out", tp_rules=family)
    assert "--tp-rules" in raised.value.hint
    assert not (tmp_path / "out").exists()


# -- planted faults; nothing may be written

Change = Callable[[Path], None]


def swap(folder: Path, one: str, other: str, *, renamed: bool = True) -> None:
    """Swaps all files whose names differ in this; see `swap_files`."""
    for path in sorted(folder.glob(f"*{one}*")):
        swap_files(path, folder / path.name.replace(one, other), renamed=renamed)


def copy(one: str, other: str) -> Change:
    def change(folder: Path) -> None:
        shutil.copy(folder / one, folder / other)

    return change


def edited(pattern: str, change: Callable[[Any], object]) -> Change:
    def edit_all(folder: Path) -> None:
        for path in folder.glob(pattern):
            with layouts.under_engine_names():
                edit(path, change)

    return edit_all


def with_step(value: Any) -> None:
    for group in value["optimizer_state_dict"]["base_optimizer_state"]["param_groups"]:
        group["step"] += 1


def forget(pattern: str) -> Change:
    def change(folder: Path) -> None:
        for path in folder.glob(pattern):
            path.unlink()

    return change


def both(one: Change, other: Change) -> Change:
    def change(folder: Path) -> None:
        one(folder)
        other(folder)

    return change


def writers(*ranks: int) -> Change:
    """Megatron-DeepSpeed's arguments have the global rank of the writer."""

    def change(folder: Path) -> None:
        for number, rank in enumerate(ranks):
            edited(f"mp_rank_{number:02d}_*", lambda m, r=rank: setattr(m["args"], "rank", r))(
                folder
            )

    return change


LAYER_4 = "layer_04-model_01-model_states.pt"
RANK_1 = "mp_rank_01_model_states.pt"
FAULTS: dict[str, tuple[Change, type[ZckptError], str]] = {
    "layers of swapped tensor ranks": (
        lambda d: swap(d, "model_00-", "model_01-"), IncompleteCheckpoint, "has the weights of"),
    "optimizers of swapped tensor ranks": (
        lambda d: swap(d, "rank_00_optim", "rank_01_optim"), ZckptError, "has the weights of"),
    "swapped stages": (
        lambda d: swap(d, "mp_rank_00", "mp_rank_02"), InconsistentCheckpoint, "are of stage 0"),
    "swapped data ranks": (
        lambda d: swap(d, "pp_rank_0_", "pp_rank_1_", renamed=False),
        InconsistentCheckpoint, "was saved as"),
    "swapped by their arguments": (
        writers(0, 2, 5, 4), InconsistentCheckpoint, "state the ranks 0, 2, 5, 4"),
    "a lost model rank": (forget("*mp_rank_01_*"), IncompleteCheckpoint, "lacks mp_rank_01"),
    "a lost stage": (forget("*mp_rank_0[23]_*"), IncompleteCheckpoint, "2 of 4 model ranks"),
    "a layer twice": (
        copy(LAYER_4, "layer_004-model_01-model_states.pt"), InconsistentCheckpoint, "same number"),
    "a layer of one tensor rank": (
        copy(LAYER_4, "layer_04-model_states.pt"), InconsistentCheckpoint, "same number"),
    "a model rank twice": (
        copy(RANK_1, "mp_rank_001_model_states.pt"), InconsistentCheckpoint, "same number"),
    "an optimizer twice": (
        copy("bf16_zero_pp_rank_1_mp_rank_01_optim_states.pt",
             "bf16_zero_pp_rank_01_mp_rank_01_optim_states.pt"),
        InconsistentCheckpoint, "same number"),
    "a file beyond the last": (
        copy(RANK_1, "mp_rank_100_model_states.pt"), IncompleteCheckpoint, "lacks mp_rank_04"),
    "a whole module": (
        edited("mp_rank_*", lambda m: m.update(module={"a": torch.ones(2)})),
        InconsistentCheckpoint, "which only pipelines have"),
    "an empty file": (lambda d: (d / LAYER_4).write_bytes(b""), ZckptError, "is empty"),
    "a file cut short": (
        lambda d: (d / LAYER_4).write_bytes((d / LAYER_4).read_bytes()[:999]),
        ZckptError, "ends early"),
    "a lost weight": (
        edited(LAYER_4, lambda v: v.pop("mlp.dense_4h_to_h.bias")),
        IncompleteCheckpoint, "lacks the weight of 4.mlp.dense_4h_to_h.bias"),
    "another save's counters": (
        edited(RANK_1, lambda m: m.update(global_steps=9)), InconsistentCheckpoint, "its counters"),
    "another save's optimizer": (
        edited("*mp_rank_03_optim*", with_step), InconsistentCheckpoint, "optimizer's step"),
    "two faults": (
        both(edited(LAYER_4, lambda v: v["input_layernorm.weight"].add_(1)), forget("*_05-*1-*")),
        IncompleteCheckpoint, "lacks layer_05-model_01-"),
}  # fmt: skip


@pytest.mark.parametrize("what", FAULTS)
def test_planted_faults(what: str, bloom: Path, tmp_path: Path) -> None:
    """Whether slices are joined or each rank is kept."""
    change, error, said = FAULTS[what]
    change(bloom / f"global_step{layouts.STEP + 1}")
    for call in (
        lambda: zckpt.convert(bloom, tmp_path / "out", tp_rules="bloom"),
        lambda: zckpt.reshard(bloom, tmp_path / "out", dp=1),
    ):
        with pytest.raises(error, match=said) as raised:
            call()
        assert raised.value.hint
        assert not (tmp_path / "out").exists()


def test_writers_in_their_order_are_no_fault(bloom: Path) -> None:
    writers(0, 1, 4, 5)(bloom / f"global_step{layouts.STEP + 1}")
    assert zckpt.read(bloom, tp_rules="bloom").source["pp"] == 2


@pytest.mark.engines
def test_a_hundred_layers(laid: Laid, tmp_path: Path) -> None:
    """Files of layers from 100 on have three digits, as model ranks have."""
    run = Run("neox", tp=1, dp=1, bounds=(0, 60, 105), layers=100)
    root, numbers = laid(run)
    assert (root / "global_step6" / "layer_101-model_00-model_states.pt").exists()
    zckpt.convert(root, tmp_path / "out", tp_rules="neox")
    assert different(of(tmp_path / "out"), everything(numbers)) == []
