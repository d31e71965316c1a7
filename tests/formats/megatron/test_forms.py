"""Every form of Megatron-Core's files under the other commands: loading, inspect, stats, diff."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed import checkpoint as dcp

import zckpt as package
from zckpt.dcp import StorageReader

from ..equality import same_bits
from .test_gather import DATA, FORMS

SLOTS = ("master", "exp_avg", "exp_avg_sq")


@pytest.mark.parametrize("form", FORMS)
class TestCommands:
    def test_dcp_load_fills_a_program(self, form: str) -> None:
        """What the optimizers held, in the nested and flat dictionaries of a plain program."""
        expected = load_file(DATA / "megatron-0.16.1-tp2" / "expected.safetensors")
        names = list(package.read(DATA / form).parameters)
        state: dict[str, Any] = {
            "model": {name: torch.zeros_like(expected[f"{name}/master"]) for name in names},
            "optim": {
                "state": {
                    name: {
                        "step": torch.tensor(0.0),
                        **{
                            slot: torch.zeros_like(expected[f"{name}/{slot}"]) for slot in SLOTS[1:]
                        },
                    }
                    for name in names
                }
            },
        }
        dcp.load(state, storage_reader=StorageReader(DATA / form), no_dist=True)
        for name in names:
            assert same_bits(state["model"][name], expected[f"{name}/master"])
            own = state["optim"]["state"][name]
            assert float(own["step"]) == 3
            assert all(same_bits(own[slot], expected[f"{name}/{slot}"]) for slot in SLOTS[1:])

    def test_inspect_and_stats(self, form: str, zckpt: Callable[..., Any]) -> None:
        ended = zckpt("inspect", DATA / form, "--layout")
        assert ended.code == 0, ended.err
        assert "linear_qkv" in ended.out
        assert len(package.stats(DATA / form)["tensors"]) == 80

    def test_forms_do_not_differ(self, form: str) -> None:
        report = package.diff(DATA / form, DATA / "megatron-0.16.1-tp2")
        assert report["equal"], report
