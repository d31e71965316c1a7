"""How DeepSpeed cuts a parameter for tensor parallelism, stated beside its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import zckpt
from zckpt.core.checkpoint.facts import TensorParallel, Vocabulary
from zckpt.core.checkpoint.manifest import Run
from zckpt.core.checkpoint.placement import Boxes, Cut, from_text
from zckpt.errors import MissingData, UnsupportedCheckpoint
from zckpt.formats.deepspeed_universal.files import SliceInfo
from zckpt.formats.deepspeed_universal.slicing import placement_of, slice_info

from ...conftest import texts
from ...engines import deepspeed
from ...manifests import changed
from ..equality import load, same_bits
from .directories import (
    convert,
)

INFO = {
    "universal_checkpoint_version": 0.2,
    "original_vocab_size": 11,
    "vocabulary_parameter_patterns": ["words"],
    "tp_replicated_parameter_patterns": [".*norm"],
    "parameter_with_row_parallelism_patterns": ["down"],
    "parameter_with_2_sub_params_cat_dim_0": ["gate"],
    "parameter_with_sub_params": [
        {"patterns": ["attention"], "shape": ((8, 4, 4), 6), "partition_dim": 0},
        {"patterns": ["offsets"], "shape": (3, -1), "partition_dim": 0},  # before 0.4: three parts
    ],
}
WHOLE = {"words": (12, 6), "up": (8, 6), "down": (6, 8), "gate": (8, 6), "attention": (16, 6)}
GROUPS = [[*WHOLE], ["norm", "offsets"]]
SHAPES: dict[str, tuple[int, ...]] = {**WHOLE, "norm": (6,), "offsets": (12,)}
KEYS = ("fp32", "exp_avg", "exp_avg_sq")


def cut(name: str, whole: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """What a Megatron of `ranks` tensor-parallel ranks holds of a parameter."""
    if name == "norm":
        return whole
    parts = {"gate": [4, 4], "attention": [8, 4, 4], "offsets": [4, 4, 4]}.get(name)
    axis = 1 if name == "down" else 0
    pieces = whole.split(parts) if parts else [whole]
    return torch.cat([piece.chunk(ranks, axis)[rank] for piece in pieces], axis)


@pytest.mark.parametrize(
    ("rule", "info"),
    [
        ("replicated", {}),
        ("0", {"cat_dim": 0}),
        ("1", {"cat_dim": 1}),
        ("0:1x", {"cat_dim": 0}),
        ("0:2x", {"cat_dim": 0, "param_n_sub_params": 2}),
        ("1:3x", {"cat_dim": 1, "param_n_sub_params": 3}),
        ("vocab:11", {"cat_dim": 0, "vocab_tensor": True}),
    ],
)
def test_rules_without_patterns(rule: str, info: SliceInfo) -> None:
    assert by_rule(rule) == info
    back = placement_of(info, (16, 6))
    assert back.text == {"0:1x": "0", "vocab:11": "0"}.get(rule, rule)


def test_a_rule_with_widths() -> None:
    info = by_rule("0:8,4,4")
    assert info is not None
    assert info["sub_param_shape"].state == {
        "patterns": ["a\\.b$"], "shape": ((8, 4, 4), 6), "partition_dim": 0
    }  # fmt: skip
    assert placement_of(info, (16, 6)) == Cut(0, (8, 4, 4))
    assert placement_of(info, (12, 6)) == Boxes("view")


@pytest.mark.parametrize("rule", ["view", "affine_map"])
def test_pieces_that_no_file_can_describe(rule: str) -> None:
    with pytest.raises(UnsupportedCheckpoint, match=rf"rule `{rule}`\) that no file") as raised:
        by_rule(rule)
    assert "--tp-rules" in raised.value.hint


def test_a_map_along_another_dimension() -> None:
    """Patterns say rows, and the map of the pieces columns: no file says that."""
    mapped = {
        "logical_shape": [16, 6],
        "ranks": {rank: {"shard_shape": [16, 3], "pieces": []} for rank in (0, 1)},
    }
    patterns = {"affine_map": {"params": {r"a\.b": mapped}}}
    with pytest.raises(UnsupportedCheckpoint):
        by_rule("affine_map", patterns)
    rows = {"parameter_with_row_parallelism_patterns": [r"a\.b"]}
    assert by_rule("affine_map", {**patterns, **rows}) == {"cat_dim": 1}


def test_a_name_that_no_rule_knows() -> None:
    with pytest.raises(MissingData, match=r"no rule says how a\.b"):
        by_rule(None)


def by_rule(rule: str | None, patterns: Mapping[str, Any] | None = None) -> SliceInfo | None:
    """What stands beside a tensor `a.b` of 16 rows that was cut by `rule`."""
    rules = {} if rule is None else {"a.b": from_text(rule)}
    vocabulary = {"a.b": Vocabulary(16, 16)} if (rule or "").startswith("vocab") else {}
    facts, state = TensorParallel(rules, vocabulary), dict[str, Any]()
    if patterns is not None:
        state["client_state"] = {"universal_checkpoint_info": patterns}
    target: Any = SimpleNamespace(
        source=SimpleNamespace(state=state, root="run", run=Run(tensor_parallel=facts)),
        trainable={"a.b": SimpleNamespace(shape=(16, 6))},
        engine=SimpleNamespace(partitioned=False),
    )
    return slice_info(target, "a.b")


@pytest.mark.engines
@pytest.mark.first
class TestTensorParallelism:
    """The real converter's merge and the real loader's cut, without an engine around them."""

    @pytest.fixture(autouse=True)
    def on_cpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for key, value in deepspeed.ENVIRONMENT.items():
            monkeypatch.setenv(key, value)

    @pytest.fixture
    def tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(4)
        return {
            name: {key: torch.randn(shape, generator=generator) for key in KEYS}
            for name, shape in SHAPES.items()
        }

    def merged(self, tensors: dict[str, dict[str, torch.Tensor]], root: Path) -> Path:
        """What the converter makes of a run of two ranks; only its merge is of DeepSpeed."""
        from deepspeed.checkpoint.ds_to_universal import merge_tp_slices

        folder, slices = root / "run" / "global_step5", root / "slices"
        for name, states in tensors.items():
            for rank in (0, 1):
                place = slices / name / str(rank)
                place.mkdir(parents=True)
                for key, tensor in states.items():
                    torch.save(cut(name, tensor, rank, 2).flatten(), place / f"{key}.00")
                torch.save(torch.tensor(5.0), place / "step.00")
            shapes = [cut(name, states["fp32"], rank, 2).shape for rank in (0, 1)]
            merge_tp_slices(INFO, str(folder / "zero"), str(slices), 2, (name, shapes))
        groups = [{"lr": 0.1, "weight_decay": 0.1}, {"lr": 0.2, "weight_decay": 0.0}]
        common = {"ds_version": "0.19.8", "param_groups": groups, "zero_stage": 1}
        torch.save(common, folder / "zero" / "optimizer_state.pt")
        for rank in (0, 1):
            pieces = {name: cut(name, states["fp32"], rank, 2) for name, states in tensors.items()}
            torch.save(
                {
                    "module": {name: piece.bfloat16() for name, piece in pieces.items()},
                    "param_shapes": [{name: pieces[name].shape for name in g} for g in GROUPS],
                    "dp_world_size": 3,
                    "mp_world_size": 2,
                    "ds_config": {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}},
                    "ds_version": "0.19.8",
                    "global_steps": 5,
                    "universal_checkpoint_info": INFO,
                },
                folder / f"mp_rank_{rank:02d}_model_states.pt",
            )
        (root / "run" / "latest_universal").write_text("global_step5")
        return root / "run"

    def loaded(self, folder: Path, name: str, rank: int, ranks: int) -> dict[str, torch.Tensor]:
        """What the loader gives one tensor-parallel rank that has no data-parallel neighbor."""
        from deepspeed.checkpoint.universal_checkpoint import load_hp_checkpoint_state

        rows = 12 if ranks < 3 else 2 * ranks * -(-12 // (2 * ranks))  # padded for more ranks
        shape = (rows, 6) if name == "words" else SHAPES[name]
        piece = cut(name, torch.zeros(shape), rank, ranks)
        master = torch.full((piece.numel(),), float("nan"))
        mapping = SimpleNamespace(
            optim_fragment={},
            lp_fragment_address=SimpleNamespace(start=0, numel=piece.numel()),
            get_hp_fragment=lambda: master,
        )
        parameter = SimpleNamespace(_hp_mapping=mapping, shape=piece.shape, numel=piece.numel)
        step = load_hp_checkpoint_state(parameter, str(folder / name), rank, ranks)
        assert step == 5
        fragments = {"fp32": master, **mapping.optim_fragment}
        return {key: tensor.view(piece.shape) for key, tensor in fragments.items()}

    def test_read(self, tensors: dict[str, dict[str, torch.Tensor]], tmp_path: Path) -> None:
        run = self.merged(tensors, tmp_path)
        manifest = zckpt.read(run)
        assert [len(manifest.parameters), manifest.step, manifest.dp] == [7, 5, 3]
        for group, names in enumerate(GROUPS):
            assert [name for name, p in manifest.parameters.items() if p.group == group] == names
        assert any(
            "the module weights of 2 model-parallel ranks" in what
            for what in texts(manifest.notices.omitted)
        )
        zckpt.convert(run, tmp_path / "universal")
        loaded = load(tmp_path / "universal")
        assert sorted({name.rpartition("/")[2] for name in loaded}) == [
            "exp_avg", "exp_avg_sq", "master"
        ]  # fmt: skip
        for name, kept in tensors.items():
            for key, tensor in kept.items():
                slot = "master" if key == "fp32" else key
                tensor = tensor[:11] if name == "words" else tensor
                assert same_bits(loaded[f"{name}/{slot}"], tensor), (name, key)

    @pytest.mark.parametrize("ranks", [1, 2, 4])
    @pytest.mark.parametrize("through", [False, True])
    def test_written_again(
        self,
        ranks: int,
        through: bool,
        tensors: dict[str, dict[str, torch.Tensor]],
        tmp_path: Path,
    ) -> None:
        source = self.merged(tensors, tmp_path)
        if through:
            zckpt.convert(source, tmp_path / "universal")
            source = tmp_path / "universal"
        merged = convert(source, tmp_path / "merged")
        for name in SHAPES:
            for rank in range(ranks):
                pieces = self.loaded(merged / "global_step5" / "zero", name, rank, ranks)
                for key, tensor in pieces.items():
                    whole = tensors[name][key]
                    if name == "words":
                        whole = whole.clone()
                        whole[11:] = 0
                        if ranks == 4:
                            whole = torch.nn.functional.pad(whole, (0, 0, 0, 4))
                    assert same_bits(tensor, cut(name, whole, rank, ranks)), (name, key)

    def test_patterns_of_a_run_without_it(
        self, tensors: dict[str, dict[str, torch.Tensor]], tmp_path: Path
    ) -> None:
        """A run of one tensor-parallel rank has what the converter would have used."""
        whole = self.merged(tensors, tmp_path)
        zckpt.convert(whole, tmp_path / "universal")
        with changed(tmp_path / "universal") as manifest:
            del manifest["state"]["universal"]
        merged = convert(tmp_path / "universal", tmp_path / "merged")
        for name in SHAPES:
            a, b = (
                torch.load(run / "global_step5" / "zero" / name / "fp32.pt", weights_only=False)
                for run in (whole, merged)
            )
            del a["param"], b["param"]
            assert a == b, name
