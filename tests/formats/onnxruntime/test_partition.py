"""The partition rule: who owns which elements."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zckpt.formats.onnxruntime import partition

from ...engines import onnxruntime_files as files
from ...engines.onnxruntime_files import owned


@given(st.lists(st.integers(0, 300), min_size=1, max_size=12), st.integers(1, 9))
def test_the_rule_is_that_of_the_generator(numels: list[int], dp: int) -> None:
    weights = {f"w{place}.{numel}": torch.zeros(numel) for place, numel in enumerate(numels)}
    ranks = owned(weights, dp)
    for name, shares in partition.shares({n: w.numel() for n, w in weights.items()}, dp).items():
        ranges = {share.rank: (share.start, share.stop) for share in shares if share.stop}
        assert ranges == {
            rank: owned_by[name] for rank, owned_by in enumerate(ranks) if name in owned_by
        }
        for share in shares if len(shares) > 1 else ():
            suffix = files.view(name, share.start, share.stop, weights[name].numel())
            assert suffix == f"_view_{share.view}"


@pytest.mark.parametrize(("total", "dp", "width"), [(564, 8, 96), (64, 2, 64), (63, 2, 32)])
def test_a_total_that_fills_its_blocks_gets_another(total: int, dp: int, width: int) -> None:
    assert partition.per_rank(total, dp) == width


def test_names_are_sorted_as_bytes() -> None:
    names = ["layer.2", "layer.10", "head", "Emb", "é", "z"]
    assert partition.by_name(names) == ["Emb", "head", "layer.10", "layer.2", "z", "é"]
