"""Model and optimizer in one dictionary without keys of their own: `{**model, **optimizer}`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from ...conftest import Result
from .test_roots import Pair, assert_is_root, train, trained

Program = Callable[..., Result]


def dictionary(pair: Pair, flat: bool) -> dict[str, Any]:
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    state = get_optimizer_state_dict(*pair, options=options)
    return {**get_model_state_dict(pair[0]), **state, "epoch": 4}


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("whole", [True, False])
def test_it_is_read_and_resumed(flat: bool, whole: bool, tmp_path: Path, zckpt: Program) -> None:
    """torch itself loads the target under the same keys, and goes on with the same losses."""
    pair, source, target = trained(1), tmp_path / "run", tmp_path / "t"
    state = dictionary(pair, flat)
    if whole:
        torch.save(state, source)
    else:
        dcp.save(state, checkpoint_id=source)
    assert zckpt("verify", source).code == 0
    assert_is_root(source, pair, "")
    assert zckpt("verify", source, "--against", source, "--gather").code == 0
    layout = ("--dcp-layout", "flat" if flat else "nested")
    assert zckpt("convert", source, target, "--to", "dcp", "--dp", "3", *layout).code == 0
    assert zckpt("verify", target, "--against", source).code == 0
    resumed = trained(9)
    state = dictionary(resumed, flat)
    dcp.load(state, checkpoint_id=target)
    assert state.pop("epoch") == 4
    names = resumed[0].state_dict().keys()
    set_model_state_dict(resumed[0], {name: state[name] for name in names})
    own = {key: value for key, value in state.items() if key not in names}
    options = StateDictOptions(flatten_optimizer_state_dict=flat)
    set_optimizer_state_dict(*resumed, own, options=options)
    assert train(resumed, 3, seed=5) == train(trained(1), 3, seed=5)
    universal = tmp_path / "u"
    assert zckpt("convert", source, universal).code == 0
    assert zckpt("reshard", universal, tmp_path / "back").code == 0
    assert zckpt("verify", tmp_path / "back", "--against", source).code == 0


def test_an_optimizer_alone_has_no_model(tmp_path: Path, zckpt: Program) -> None:
    state = get_optimizer_state_dict(*trained(1))
    dcp.save(state, checkpoint_id=tmp_path / "run")
    refused = zckpt("inspect", tmp_path / "run")
    assert refused.code == 1
    assert "the state dict of an optimizer, but not of a model" in refused.err
