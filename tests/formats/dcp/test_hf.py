"""Hugging Face's storage of torch.distributed.checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import zckpt
from zckpt import errors


@pytest.mark.parametrize(
    "lost", ["shard-00002-model-00002-of-00002", "shard-00001-model-00001-of-00002"]
)
def test_a_missing_shard_of_hugging_face(lost: str, tmp_path: Path) -> None:
    """Without it the weights of its file would seem to end where other ranks' rows do."""
    for rank in (0, 1):
        for file, name in enumerate(("a", "b"), 1):
            info = {"DCP_SHARDING_INFO": json.dumps({name: {"saved_offsets": [2 * rank, 0]}})}
            path = tmp_path / f"shard-{rank + 1:05d}-model-{file:05d}-of-00002.safetensors"
            save_file({name: torch.full((2, 3), float(rank))}, path, metadata=info)
    assert zckpt.read(tmp_path).parameters["b"].shape == (4, 3)
    records = zckpt.verify(tmp_path)["records"]
    assert records == {"checked": 0, "unchecked": 4, "without_checksum": 4}
    (tmp_path / f"{lost}.safetensors").unlink()
    with pytest.raises(errors.IncompleteCheckpoint, match=rf"lacks {lost}\.safetensors"):
        zckpt.read(tmp_path)
