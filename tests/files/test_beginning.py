"""A number at the beginning of a file of torch.save."""

from __future__ import annotations

import time
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from zckpt.files.beginning import FIRST, number_in

KEYS = ("global_step", "iteration")
TENSORS = {f"layers.{number}.weight": torch.ones(2) for number in range(40)}
MANY = {f"layers.{number}.weight": torch.ones(1) for number in range(600)}
LONG = {f"layers.{number}.weight.{'x' * 90}": torch.ones(1) for number in range(1500)}


@pytest.mark.parametrize(
    ("value", "number"),
    [
        ({"epoch": 2, "global_step": 11, "state_dict": TENSORS}, 11),
        ({"state_dict": TENSORS, "global_step": 300}, 300),
        ({"state_dict": TENSORS, "global_step": 70000, "loops": {"global_step": 1}}, 70000),
        ({"state_dict": LONG, "global_step": 5}, 5),
        ({"global_step": 0}, 0),
        (OrderedDict(iteration=3, model=TENSORS), 3),
        ({"loops": {"global_step": 1}, "state_dict": TENSORS}, None),
        ({"state_dict": TENSORS, "loops": [{"iteration": 1}, {"iteration": 2}]}, None),
        ({"global_step": True, "state_dict": TENSORS}, None),
        ({"global_step": torch.tensor(4), "state_dict": TENSORS}, None),
        ({"global_step": "7"}, None),
        ([{"global_step": 7}], None),
        (TENSORS["layers.0.weight"], None),
    ],
    ids=range(13),
)
@pytest.mark.parametrize("is_zip", [True, False])
def test_the_outermost_dictionary_counts(
    value: Any, number: int | None, is_zip: bool, tmp_path: Path
) -> None:
    torch.save(value, tmp_path / "x.ckpt", _use_new_zipfile_serialization=is_zip)
    assert number_in(str(tmp_path / "x.ckpt"), KEYS) == number


def test_a_pair_of_keys_is_found_behind_many_tensors(tmp_path: Path) -> None:
    """Of the same file without the pair, the whole pickle is parsed."""
    path, keys = tmp_path / "x.pt", ("global_steps", "global_samples")
    seconds = []
    for order in (keys, keys[::-1]):
        torch.save({"module": MANY, **dict.fromkeys(order, 321), "ds_config": {}}, path)
        assert path.stat().st_size > FIRST
        start = time.process_time()
        assert number_in(str(path), keys[:1], keys) == 321
        seconds.append(time.process_time() - start)
    assert seconds[0] < seconds[1] / 3


@pytest.mark.parametrize("damage", ["cut", "emptied", "text", "flipped"])
def test_a_broken_file_has_no_number_or_its_own(damage: str, tmp_path: Path) -> None:
    path = tmp_path / "x.ckpt"
    torch.save({"state_dict": TENSORS, "global_step": 9}, path)
    data = bytearray(path.read_bytes())
    data[data.index(b"layers.3") - 5] ^= 0x80  # the length or the opcode of a text
    broken = {"cut": data[:900], "emptied": b"", "text": b"a log", "flipped": data}
    path.write_bytes(broken[damage])
    assert number_in(str(path), KEYS) is None
