"""Weights and masters share a label where rounding can have made one of the other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from zckpt.files.torchfile import TorchFile
from zckpt.formats.deepspeed.stage_0 import samples
from zckpt.formats.deepspeed.stage_0.samples import TensorInFile, labels

Tensors = list[torch.Tensor]


def stored(path: Path, tensors: Tensors) -> list[TensorInFile]:
    torch.save(tensors, path)
    file = TorchFile(str(path))
    return [TensorInFile(file, tensor) for tensor in file.value]


def matches(tmp_path: Path, weights: Tensors, masters: Tensors) -> list[list[int]]:
    """For each master, the weights that have one of its labels."""
    of_weights, of_masters = labels(
        stored(tmp_path / "weights.pt", weights), stored(tmp_path / "masters.pt", masters)
    )
    return [[place for place, label in enumerate(of_weights) if label in own] for own in of_masters]


def pair(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensors:
    """A weight and the master that it is rounded from."""
    master = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    return [master.to(dtype), master]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_master_has_the_label_of_the_weight_that_it_rounds_to(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    pairs = [pair(3, 5, seed=seed, dtype=dtype) for seed in range(3)]
    weights, masters = ([each[side] for each in pairs] for side in (0, 1))
    assert matches(tmp_path, weights, masters[::-1]) == [[2], [1], [0]]


def test_shapes_are_told_apart(tmp_path: Path) -> None:
    weight, master = pair(4, 6)
    assert matches(tmp_path, [weight, weight.reshape(6, 4)], [master]) == [[0]]
    assert matches(tmp_path, [weight], [master.reshape(24)]) == [[]]


def test_weights_of_equal_bytes_share_a_label(tmp_path: Path) -> None:
    weight, master = pair(7)
    assert matches(tmp_path, [weight, weight.clone()], [master]) == [[0, 1]]


@pytest.mark.parametrize("place", [0, 99, 100, 199])
def test_one_element_tells_weights_apart_wherever_it_lies(
    place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sample is the middle; the rest is compared in chunks."""
    monkeypatch.setattr(samples, "CHUNK", 64)
    weight, master = pair(200)
    other, others_master = weight.clone(), master.clone()
    other[place] = others_master[place] = 3
    found = matches(tmp_path, [weight, other], [others_master, master])
    assert found == [[1], [0]]


def test_a_master_that_rounds_to_no_weight(tmp_path: Path) -> None:
    weight, master = pair(9)
    master[4] += 1
    assert matches(tmp_path, [weight], [master]) == [[]]


def test_every_nan_is_the_same(tmp_path: Path) -> None:
    weight, master = pair(9)
    master[4], weight[4] = float("nan"), -float("nan")
    bits = weight.view(torch.int16)
    bits[4] = 0x7FC1  # another payload
    assert matches(tmp_path, [weight], [master]) == [[0]]


def test_a_double_is_no_master_of_a_half(tmp_path: Path) -> None:
    weight, master = pair(5)
    assert matches(tmp_path, [weight], [master.double()]) == [[]]


def test_elements_of_a_transposed_tensor_are_in_its_own_order(tmp_path: Path) -> None:
    weight, master = pair(3, 5)
    assert matches(tmp_path, [weight.T.contiguous().T], [master]) == [[0]]
    assert matches(tmp_path, [weight.T.contiguous()], [master.T]) == [[0]]


def test_empty_tensors_share_a_label(tmp_path: Path) -> None:
    empty = torch.empty(0, 4)
    assert matches(tmp_path, [empty.bfloat16()], [empty]) == [[0]]
