"""The shares that AutoTP gives to its ranks, against DeepSpeed's own function."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

import zckpt
from zckpt.core.checkpoint.manifest import Sibling
from zckpt.formats.deepspeed.model_ranks.target_slices import auto_of
from zckpt.naming.auto_tp import AutoTP, heads_in

QUERY = "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.engines
@pytest.mark.parametrize("tp", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("size", [24, 29, 36])
@pytest.mark.parametrize("layer", ["lm_head", "model.layers.0.mlp.up_proj", "self_attn.q_proj"])
def test_shares_are_deepspeeds(layer: str, size: int, tp: int) -> None:
    from deepspeed.module_inject.tp_shard import AutoTPMeta, get_shard_size_list

    expected = get_shard_size_list(size, tp, AutoTPMeta(num_kv_heads=3), layer)
    assert AutoTP(3).shares((f"{layer}.weight",), size, tp) == expected


@pytest.mark.engines
def test_heads_of_a_config_are_those_that_deepspeed_takes() -> None:
    """Of any two keys that it asks for."""
    from deepspeed.module_inject.tp_shard import _KV_HEAD_ATTRS, AutoTPMeta

    for first, second in product(_KV_HEAD_ATTRS, repeat=2):
        config = {first: 4, second: 6}
        expected = AutoTPMeta.from_model_config(SimpleNamespace(**config)).num_kv_heads
        assert heads_in(config) == expected


def test_uneven_shares_of_the_source() -> None:
    """Shares that differ show how many heads there are."""
    ranks = {
        str(rank): {"shard_shape": [rows, 4], "pieces": []} for rank, rows in enumerate((16, 8))
    }
    params = {f"^{QUERY}$": {"logical_shape": [24, 4], "ranks": ranks}}
    info = {"affine_map": {"version": 1, "params": params}}
    manifest = zckpt.read("examples/run")
    parameter = replace(next(iter(manifest.parameters.values())), shape=(24, 4), aliases=())
    source = replace(manifest, parameters={QUERY: parameter}, state={"client_state": _client(info)})
    assert auto_of(source) == AutoTP(3)


def _client(info: dict[str, Any]) -> dict[str, Any]:
    return {"universal_checkpoint_info": info}


@pytest.mark.parametrize(
    ("config", "heads"),
    [
        ({"num_key_value_heads": 3, "num_attention_heads": 6}, 3),
        ({"num_attention_heads": 6}, 6),
        ({"text_config": {"num_key_value_heads": 2}, "num_attention_heads": 9}, 2),
        ({"num_key_value_heads": "3"}, None),
        ([], None),
    ],
)
def test_the_config_of_a_trainer(config: Any, heads: int | None, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config))
    sibling = Sibling("config.json", str(path), path.stat().st_size)
    source = zckpt.read("examples/run").replace(siblings=(sibling,))
    assert auto_of(source) == AutoTP(heads)
