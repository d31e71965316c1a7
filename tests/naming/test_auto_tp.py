"""Shares of dimensions as AutoTP gives them; the engine's are in formats/deepspeed/test_auto_tp."""

from __future__ import annotations

from typing import Any

import pytest

from zckpt.naming.auto_tp import AutoTP, heads_in, heads_shown

QUERY, OUTPUT = "model.layers.0.self_attn.q_proj.weight", "lm_head.weight"
UP = "model.layers.0.mlp.up_proj.weight"


def test_without_the_number_of_heads() -> None:
    auto = AutoTP(None)
    assert auto.shares((QUERY,), 24, 3) == [8, 8, 8]
    assert auto.shares((QUERY,), 24, 5) is None
    assert auto.shares(("model.embed_tokens.weight",), 29, 2) is None
    assert auto.shares(("model.embed_tokens.weight", OUTPUT), 29, 2) == [15, 14]


def test_whole_heads_and_single_rows() -> None:
    """Three heads of eight rows; the output layer and MLPs go by rows."""
    auto = AutoTP(3)
    assert auto.shares((QUERY,), 24, 2) == [16, 8]
    assert auto.shares((QUERY,), 24, 4) == [8, 8, 8, 0]
    assert auto.shares((UP,), 24, 4) == [6, 6, 6, 6]
    assert auto.shares((OUTPUT,), 29, 2) == [15, 14]
    assert auto.shares((QUERY,), 25, 2) == [13, 12]  # no whole heads


@pytest.mark.parametrize(
    ("config", "heads"),
    [
        ({"num_attention_heads": 6, "num_key_value_heads": 3}, 3),
        ({"n_head_kv": None, "attention_heads": 4}, 4),
        ({"text_config": {"num_key_value_heads": 2}, "num_attention_heads": 9}, 2),
        ({"num_key_value_heads": 1}, 1),
        ({"num_key_value_heads": True}, None),
        ({"num_key_value_heads": 0}, None),
        ({"text_config": [1]}, None),
        (None, None),
    ],
)
def test_heads_that_a_config_states(config: Any, heads: int | None) -> None:
    assert heads_in(config) == heads


HEADS = (
    "num_key_value_heads",
    "num_kv_heads",
    "multi_query_group_num",
    "n_head_kv",
    "kv_n_heads",
    "num_attention_heads",
    "n_heads",
    "attention_heads",
)
"""As `_kv_head_count_from` of DeepSpeed 0.19.8 (module_inject/tp_shard.py) asks for them."""


@pytest.mark.parametrize("key", HEADS)
def test_the_key_that_the_engine_asks_for_first_counts(key: str) -> None:
    behind = dict.fromkeys(HEADS[HEADS.index(key) + 1 :], 9)
    assert heads_in({**behind, key: 6}) == 6
    assert heads_in({"hidden_size": 6}) is None


def test_heads_that_uneven_shares_show() -> None:
    uneven, even = ((QUERY,), [(16, 4), (8, 4)]), ((QUERY,), [(12, 4), (12, 4)])
    assert heads_shown([even, uneven]) == 3
    assert heads_shown([even]) is None
    assert heads_shown([((UP,), [(15, 4), (14, 4)])]) is None  # rows are no heads
    assert heads_shown([(("embed.weight", OUTPUT), [(15, 4), (14, 4)])]) is None
    assert heads_shown([uneven, ((QUERY,), [(24, 4), (16, 4)])]) is None  # three, or five
    assert heads_shown([((QUERY,), [(16, 4), None, (8, 4)])]) == 3
