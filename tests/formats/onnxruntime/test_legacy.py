"""Files of torch.save: their variants, and what they leave out."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt

from ...engines import onnxruntime_files as files
from ...engines.onnxruntime_files import FROZEN, make, owned
from ..equality import assert_proven
from .samples import (
    assert_is,
    assert_reads,
    edit,
    sizes,
)


class TestVariants:
    @pytest.mark.parametrize("dp", sizes(1, 3))
    @pytest.mark.parametrize(("dialect", "precision"), [("l1", "fp16"), ("l2", "fp16")])
    def test_old_front_end(self, dialect: str, precision: str, dp: int, tmp_path: Path) -> None:
        """It adds stale weights, even beside the current pieces."""
        state = make(precision, frozen=FROZEN)
        files.write(state, tmp_path / "source", dp, dialect, old_front_end=True)
        assert_reads(tmp_path / "source", state.expected(), tmp_path)

    @pytest.mark.parametrize("dialect", ["l1", "l2"])
    def test_torch_before_1_6(self, dialect: str, tmp_path: Path) -> None:
        state = make("fp16", frozen=FROZEN)
        files.write(state, tmp_path / "source", 3, dialect, zipped=False, user={"note": "hello"})
        assert not zipfile.is_zipfile(tmp_path / "source" / "ORT_checkpoint.ZeRO.0.2.ort.pt")
        nameless = "3 of 3 rank files do not state the name under which they were saved"
        report = assert_reads(tmp_path / "source", state.expected(), tmp_path, (nameless,))
        assert nameless in zckpt.verify(tmp_path / "source")["notes"][-1]["message"]
        assert report["records"]["checked"] == 0

    def test_bare_dictionary(self, tmp_path: Path) -> None:
        state = make("fp16")
        files.write(state, tmp_path / "source", 2, "l2", bare=True)
        assert_reads(tmp_path / "source", state.expected(), tmp_path)

    def test_a_dictionary_of_the_user(self, tmp_path: Path) -> None:
        state = make("fp16")
        user = {"epoch": 3, "rng": torch.arange(4), "names": ("a", {"b": 1.5})}
        files.write(state, tmp_path / "source", 2, "l2", user=user)
        state_dict = zckpt.read(tmp_path / "source").state["client_state"]
        assert (state_dict["epoch"], state_dict["names"]) == (3, ("a", {"b": 1.5}))
        zckpt.reshard(tmp_path / "source", tmp_path / "again", dp=3, dialect="l2")
        for path in (tmp_path / "again").iterdir():
            again = torch.load(path, weights_only=True)
            assert (again["epoch"], again["names"]) == (3, ("a", {"b": 1.5}))
            assert again["rng"].tolist() == [0, 1, 2, 3]

    def test_torch_names_of_a_set_without_split_weights(self, tmp_path: Path) -> None:
        state = make("fp16", shapes={"a": (64,), "b": (30,)})
        files.write(state, tmp_path / "source", 2, "l2", without="torch names")
        zckpt.convert(tmp_path / "source", tmp_path / "read")
        expected = state.expected(halves=False, moments=False)
        assert_is(tmp_path / "read", expected, None)
        assert_proven(tmp_path / "source", tmp_path / "read", harmless=())


class TestRefused:
    """Each with a named reason and exit code 1."""

    def test_torch_names_alone(self, refused: Any, tmp_path: Path) -> None:
        state = make("fp16")
        files.write(state, tmp_path / "source", 2, "l2", without="torch names")
        refused("MissingData", "only the names of the torch model")

    def test_pieces_left_out(self, refused: Any, tmp_path: Path) -> None:
        state = make("fp16")
        folder = files.write(state, tmp_path / "source", 2, "l2", without="optimizer")
        lost = next(n for n in owned(state.weights, 2)[0] if n in owned(state.weights, 2)[1])
        edit(folder / "ORT_checkpoint.ZeRO.1.1.ort.pt", lambda model: model.pop(f"{lost}_view_1"))
        refused("MissingData", lost, "only the names of the torch model")

    def test_16_bit_copies_left_out(self, refused: Any, tmp_path: Path) -> None:
        folder = files.write(make("fp16"), tmp_path / "source", 2, "l2")
        for path in folder.iterdir():
            edit(path, lambda m: [m.pop(key) for key in list(m) if key.endswith("_fp16")])
        refused("MissingData", "16-bit copies", "view")

    def test_horizontal_parallelism_of_legacy_files(self, refused: Any, tmp_path: Path) -> None:
        shapes = {"fc1.weight_column_rank_0": (8, 8), "fc2.weight_row_rank_0": (8, 8)}
        files.write(make("fp16", shapes=shapes), tmp_path / "source", 2, "l2")
        refused("UnsupportedCheckpoint", "Megatron")
