"""What `verify --gather` proves of the reader of Megatron-Core's files, right or broken."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from zckpt import errors
from zckpt.core.ranks.partition import Joined
from zckpt.core.storage.fragments import Extent, solid
from zckpt.formats.megatron import gather, read
from zckpt.formats.megatron.gather import rule

from ...conftest import ROOT
from ..broken import assert_gathers, found, reading, shifted, swapped, without

DATA = ROOT / "tests" / "data"
FORMS = [
    "megatron-0.13.1-tp2",  # fully_sharded_model_space
    "megatron-0.16.1-tp2",  # fully_reshardable
    "megatron-0.16.1-buffers-tp2",  # dp_zero_gather_scatter
    "megatron-0.16.1-legacy-tp2",  # mp_rank_*
]
QKV = "decoder.layers.1.self_attention.linear_qkv.weight"
FIRST, SECOND = (f"decoder.layers.{layer}.mlp.linear_fc1.weight/exp_avg" for layer in (0, 1))


@pytest.mark.parametrize("form", FORMS)
class TestForms:
    def test_are_joined(self, form: str, tmp_path: Path) -> None:
        assert assert_gathers(DATA / form, tmp_path) == []
        run = DATA / form
        (iteration,) = run.glob("iter_*")
        parts = [part for part in gather.partitions(str(iteration)) if isinstance(part, Joined)]
        slots = [part.key[1] for part in parts]
        assert {slot: slots.count(slot) for slot in slots} == {
            "param": 20,
            "master": 20,
            "exp_avg": 20,
            "exp_avg_sq": 20,
        }

    @pytest.mark.parametrize(
        "name", [f"{QKV}/exp_avg", "embedding.word_embeddings.weight/exp_avg_sq"]
    )
    def test_shifted(self, form: str, name: str, tmp_path: Path) -> None:
        assert found(DATA / form, tmp_path, reading(read, shifted(name)))[0] == {name}

    def test_swapped_slots(self, form: str, tmp_path: Path) -> None:
        both = f"{QKV}/exp_avg", f"{QKV}/exp_avg_sq"
        assert found(DATA / form, tmp_path, reading(read, swapped(*both)))[0] == {*both}

    def test_swapped_layers(self, form: str, tmp_path: Path) -> None:
        both = FIRST, SECOND
        assert found(DATA / form, tmp_path, reading(read, swapped(*both)))[0] == {*both}

    def test_a_moment_is_lacking(self, form: str, tmp_path: Path) -> None:
        differing, problems = found(DATA / form, tmp_path, reading(read, without(FIRST)))
        assert FIRST in differing or any(FIRST in line for line in problems)


def test_optimizers_by_number_have_no_rule(tmp_path: Path) -> None:
    source = tmp_path / "run"
    shutil.copytree(DATA / "megatron-0.16.1-legacy-tp2", source)
    (iteration,) = source.glob("iter_*")
    for file in iteration.rglob("distrib_optim.pt"):
        file.unlink()
    with pytest.raises(errors.UnsupportedCheckpoint, match="by number") as caught:
        gather.partitions(str(iteration))
    assert caught.value.hint == "verify without --gather"


class TestBuffers:
    """The rule of `_ParamAndGradBuffer`, by hand."""

    SIZES = (("embedding.position_embeddings.weight", 70), ("b", 10), ("c", 130))

    @staticmethod
    def slots(*numels: int, whole: bool = False) -> rule.Slots:
        numbers = [rule.WHOLE] if whole else range(len(numels))
        return {
            "param": {
                number: solid(numel, Extent(f"bucket {number}", 0, numel * 4))
                for number, numel in zip(numbers, numels, strict=True)
            }
        }

    def starts(self, slots: rule.Slots, size: int | None = None) -> list[tuple[str, int]]:
        placed = rule.layout("run", self.SIZES, slots, size)
        return [
            (run.extent.file, run.extent.offset // 4)
            for name in placed
            for run in placed[name]["master"]
        ]

    def test_one_bucket(self) -> None:
        """From the last parameter to the first; each at a multiple of 64."""
        expected = [("bucket 0", 0), ("bucket 0", 192), ("bucket 0", 256)]
        assert self.starts(self.slots(326)) == expected

    def test_buckets(self) -> None:
        expected = [("bucket 0", 0), ("bucket 1", 0), ("bucket 1", 64)]
        assert self.starts(self.slots(130, 134)) == expected

    def test_buckets_without_padding_between(self) -> None:
        """The second begins where the first ends; inside of it multiples of 64 count anew."""
        expected = [("bucket -1", 0), ("bucket -1", 130), ("bucket -1", 194)]
        assert self.starts(self.slots(264, whole=True), 100) == expected

    @pytest.mark.parametrize("numels", [(327,), (130, 135), (140, 134), (130, 134, 5)])
    def test_other_sizes_are_refused(self, numels: tuple[int, ...]) -> None:
        with pytest.raises(errors.UnsupportedCheckpoint, match="do not fill"):
            self.starts(self.slots(*numels))

    def test_transformer_engines_order(self) -> None:
        """A norm is a part of the linear module behind it; before experts it is not."""
        layer = "decoder.layers.3"
        names = {
            f"{layer}.{name}.weight": None
            for name in (
                "self_attention.linear_proj",
                "input_layernorm",
                "self_attention.linear_qkv",
                "pre_mlp_layernorm",
                "mlp.linear_fc1",
            )
        }
        sort = [rule.order_of(name, names, True) for name in names]
        assert sort == sorted(sort, key=lambda order: order or ())
        local = [rule.order_of(name, names, False) for name in names]
        assert local != sorted(local, key=lambda order: order or ())
        assert rule.order_of("mtp.layers.0.weight", names, True) is None

    def test_order_of_experts(self) -> None:
        """One module of all experts has the first linear of each before the second of any."""
        layer = "decoder.layers.3.mlp"
        apart = [
            f"{layer}.{name}"
            for name in (
                "router.weight",
                "experts.local_experts.0.linear_fc1.weight",
                "experts.local_experts.0.linear_fc2.weight",
                "experts.local_experts.1.linear_fc1.weight",
                "experts.local_experts.1.linear_fc2.weight",
                "shared_experts.gate_weight",
                "shared_experts.linear_fc1.weight",
                "shared_experts.linear_fc2.weight",
            )
        ]
        together = [*apart[:2], apart[3], apart[2], *apart[4:]]
        for grouped, names in ((False, apart), (True, together)):
            keys = {name: rule.order_of(name, {}, grouped, grouped) for name in names}
            assert sorted(names, key=lambda name: keys[name] or ()) == names


def test_halves_of_gates() -> None:
    """Rank 1 of 2 has the second half of the gates, and of the rest."""
    boxes = rule.boxes_of("decoder.layers.0.mlp.linear_fc1.weight", (8, 3), 2, 1, True)
    assert boxes == [((2, 0), (2, 3)), ((6, 0), (2, 3))]
    whole = torch.arange(24).view(8, 3)
    gate, up = whole.chunk(2)
    local = torch.cat([gate.chunk(2)[1], up.chunk(2)[1]])
    taken = [whole[a : a + n, b : b + m] for (a, b), (n, m) in boxes]
    assert torch.equal(torch.cat(taken), local)


def test_experts_on_several_ranks(tmp_path: Path) -> None:
    """Folders of experts number their own from 0, and have buffers of their own."""
    source = DATA / "megatron-0.16.1-legacy-ep2"
    assert assert_gathers(source, tmp_path / "right") == []
    layer = "decoder.layers.0.mlp.experts.local_experts"
    both = f"{layer}.0.linear_fc2.weight/exp_avg", f"{layer}.2.linear_fc2.weight/exp_avg"
    broken = found(source, tmp_path / "wrong", reading(read, swapped(*both)))
    assert broken[0] == {*both}
