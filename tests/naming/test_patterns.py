"""A `universal_checkpoint_info` of parameters that are renamed says of them what it said before."""

from __future__ import annotations

import re
from typing import Any

import pytest

from zckpt.core.checkpoint.inert import Foreign, Global
from zckpt.errors import InconsistentCheckpoint, UnsupportedCheckpoint
from zckpt.naming.patterns import fields_of, under_names

OLD = ["0.norm.weight", "0.dense.weight", "0.fused.weight", "10.norm.weight"]
NAMES = {name: name.replace("norm", "dense.ln").replace("fused", "qkv") for name in OLD}
WIDTHS = {r".*fused": [[1, 1], [2, 2]], r"other": [[4, 4]]}
VIEW = {"patterns": [r".*fused"], "shape": [6, -1], "partition_dim": 0}
INFO: dict[str, Any] = {
    "original_vocab_size": 31,
    "tp_replicated_parameter_patterns": [r".*norm", r"nothing"],
    "parameter_with_row_parallelism_patterns": [r"\d+\.dense"],
    "parameter_with_2_sub_params_cat_dim_0": [r"0\."],
    "vocabulary_parameter_patterns": None,
    "parameter_with_sub_params": [VIEW],
    "sub_param_shard_widths": WIDTHS,
    "affine_map": {"version": 1, "params": {r"0\.norm": "first", r".*norm": "second"}},
}


def matched(patterns: list[str], names: list[str]) -> list[str]:
    return [name for name in names if any(re.match(pattern, name) for pattern in patterns)]


@pytest.mark.parametrize("key", [key for key in INFO if "pattern" in key or "cat_dim" in key])
def test_lists_match_the_same_parameters(key: str) -> None:
    before, after = INFO[key] or [], under_names(INFO, NAMES)[key] or []
    assert [NAMES[name] for name in matched(before, OLD)] == matched(after, [*NAMES.values()])


def test_patterns_that_still_fit_stay() -> None:
    found = under_names(INFO, NAMES)
    assert found["parameter_with_2_sub_params_cat_dim_0"] == [r"0\."]
    assert found["tp_replicated_parameter_patterns"] == [
        r"^0\.dense\.ln\.weight$", r"^10\.dense\.ln\.weight$", "nothing",
    ]  # fmt: skip
    assert found["parameter_with_row_parallelism_patterns"] == [r"^0\.dense\.weight$"]
    assert found["original_vocab_size"] == 31
    assert under_names(INFO, {name: name for name in OLD}) == INFO


def test_views_and_maps_are_found_by_the_new_names() -> None:
    found = under_names(INFO, NAMES)
    (view,) = found["parameter_with_sub_params"]
    assert view == {**VIEW, "patterns": [r"^0\.qkv\.weight$"]}
    assert found["sub_param_shard_widths"] == {
        r"^0\.qkv\.weight$": [[1, 1], [2, 2]],
        "other": [[4, 4]],
    }
    assert found["affine_map"] == {
        "version": 1,
        "params": {r"^0\.dense\.ln\.weight$": "first", r"^10\.dense\.ln\.weight$": "second"},
    }
    stated = Foreign(Global("deepspeed.SubparamShape"), state=dict(VIEW))
    (own,) = under_names({"parameter_with_sub_params": [stated]}, NAMES)[
        "parameter_with_sub_params"
    ]
    assert isinstance(own, Foreign)
    assert fields_of(own)["patterns"] == [r"^0\.qkv\.weight$"]


@pytest.mark.parametrize(
    ("info", "error"),
    [
        ({"a_patterns": ["("]}, InconsistentCheckpoint),
        ({"a_patterns": ["(a+)+"]}, UnsupportedCheckpoint),
        ({"a_patterns": 7}, InconsistentCheckpoint),
        ({"parameter_with_sub_params": [{}]}, InconsistentCheckpoint),
        ({"affine_map": 7}, InconsistentCheckpoint),
        ({"sub_param_shard_widths": [7]}, InconsistentCheckpoint),
        ({"sub_param_shard_widths": {"(a+)+": 7}}, UnsupportedCheckpoint),
    ],
)
def test_what_is_no_info(info: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        under_names(info, NAMES)
