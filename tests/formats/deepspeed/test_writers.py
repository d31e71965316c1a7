"""Files of DeepSpeed's names that FastPersist and DataStates-LLM wrote, made as their sources do.

FastPersist: DeepSpeed 0.19.8, io/fast_file_writer.py. Rank R of N writes `-R.N`: of the model file,
and of its own optimizer file. With torch as it is, each of these is whole. With the patched torch
that FastPersist is meant for, it has the pickles and 1/N of the storages. DeepSpeed's own code,
with Python in the place of libaio, wrote such files at stage 0, 1 and 2, and could not load them.

DataStates-LLM: `save_background` of llm/checkpointing.py (commit 3296031), whose tensors come from
a GPU. The bytes are those of that function, run on a processor.
"""

from __future__ import annotations

import json
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt
from zckpt import errors

from ...conftest import EXAMPLE, Result

Zckpt = Callable[..., Result]


def as_parts(example: Path, *, are_whole: bool) -> Path:
    """What four ranks write with FastPersist."""
    tag = example / "global_step7"
    for path in tag.glob("*.pt"):
        if not are_whole:
            value = torch.load(path, weights_only=False)
            torch.save(value, path, _use_new_zipfile_serialization=False)
        data = path.read_bytes()
        rank = re.search(r"zero_pp_rank_(\d)", path.name)
        for part in [int(rank[1])] if rank else range(4):
            own = data if are_whole else data[: -len(data) // 4]
            path.with_name(f"{path.name}-{part}.4").write_bytes(own)
        path.unlink()
    return tag


def as_datastates(value: Any) -> bytes:
    header: dict[str, Any] = {}
    data = b""

    def lean(key: str, item: Any) -> Any:
        nonlocal data
        if torch.is_tensor(item):
            start = len(data)
            data += item.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            places = {"data_offsets": [start, len(data)]}
            header[key] = {"dtype": str(item.dtype), "shape": tuple(item.shape), **places}
            return f"TENSOR|{key}"
        if isinstance(item, list):
            return [
                lean(f"{key}|{place}" if key else f"{place}", v) for place, v in enumerate(item)
            ]
        if isinstance(item, dict):
            return {k: lean(f"{key}|{k}" if key else f"{k}", v) for k, v in item.items()}
        return item

    state = pickle.dumps(lean("", value), protocol=pickle.HIGHEST_PROTOCOL)
    header["datastates_metadata"] = {"data_offsets": [len(data), len(data) + len(state)]}
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data + state


def refused(zckpt: Zckpt, path: Path, said: str) -> str:
    """The hint of the error that every command gives."""
    target = path.parent.parent / "target"
    ended = [
        zckpt(*words)
        for words in (
            ("inspect", path),
            ("verify", path),
            ("verify", EXAMPLE, "--against", path),
            ("convert", path, target),
            ("reshard", path, target, "--dp", "2"),
            ("export", path, target),
        )
    ]
    assert {each.code for each in ended} == {1}
    assert all(said in each.err for each in ended)
    assert not target.exists()
    return ended[0].err.partition("Hint: ")[2]


@pytest.mark.parametrize("where", ["run", "tag", "a part", "an optimizer's part"])
@pytest.mark.parametrize("are_whole", [True, False])
def test_parts_of_fastpersist(where: str, are_whole: bool, example: Path, zckpt: Zckpt) -> None:
    tag = as_parts(example, are_whole=are_whole)
    path = {
        "run": example,
        "tag": tag,
        "a part": tag / "mp_rank_00_model_states.pt-1.4",
        "an optimizer's part": tag / "bf16_zero_pp_rank_2_mp_rank_00_optim_states.pt-2.4",
    }[where]
    hint = refused(zckpt, path, ", written by FastPersist")
    assert ("rename one part of each file" in hint) == are_whole
    assert ("without `writer` below `checkpoint`" in hint) != are_whole


def test_the_hint_for_parts_that_are_whole(example: Path) -> None:
    tag = as_parts(example, are_whole=True)
    for path in [*tag.glob("*_optim_states.pt-*"), tag / "mp_rank_00_model_states.pt-2.4"]:
        path.rename(path.with_name(path.name.rpartition("-")[0]))
    assert len(list(tag.glob("*.pt-*"))) == 3
    assert zckpt.verify(example, against=EXAMPLE)["equal"]


@pytest.mark.parametrize("where", ["run", "tag", "a file"])
def test_datastates(where: str, example: Path, zckpt: Zckpt) -> None:
    tag = example / "global_step7"
    for path in tag.glob("*.pt"):
        path.write_bytes(as_datastates(torch.load(path, weights_only=False)))
    model = tag / "mp_rank_00_model_states.pt"
    path = {"run": example, "tag": tag, "a file": model}[where]
    hint = refused(zckpt, path, "was saved by DataStates-LLM, whose files zckpt does not read")
    assert "torch.save" in hint


@pytest.mark.parametrize("length", [0, 20, 1 << 40])
def test_other_bytes_are_not_taken_for_datastates(length: int, example: Path) -> None:
    path = example / "global_step7" / "mp_rank_00_model_states.pt"
    path.write_bytes(length.to_bytes(8, "little") + b'{"datastates_metadata": 1}' * 20)
    with pytest.raises(errors.ZckptError) as raised:
        zckpt.read(example)
    assert "DataStates" not in raised.value.message


def test_a_directory_of_whole_files_with_a_part_beside(example: Path) -> None:
    tag = example / "global_step7"
    shutil.copy(tag / "mp_rank_00_model_states.pt", tag / "mp_rank_00_model_states.pt-1.4")
    assert zckpt.verify(example, against=EXAMPLE)["equal"]
