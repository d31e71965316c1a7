"""Local states of ZeroRedundancyOptimizer: put together, and damaged."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt
from zckpt import errors
from zckpt.formats.gathered.zero_redundancy import partition

from ...conftest import texts
from .plain_torch import (
    Pair,
    assert_same_run,
    build,
    names_by_group,
    resumed_pair,
    save,
    train,
    trained_pair,
)


def save_local(folder: Path, pair: Pair, world: int) -> Path:
    """What ranks' own optimizers hold, by torch's partition."""
    save(folder, pair)
    (folder / "optim.pt").unlink()
    whole = pair[1].state_dict()
    groups = whole["param_groups"]
    numels = [[p.numel() for p in group["params"]] for group in pair[1].param_groups]
    for rank, parts in enumerate(partition(numels, world)):
        state: dict[int, Any] = {}
        merged = []
        count = 0
        for group, part in zip(groups, parts, strict=True):
            numbers = list(range(count, count + len(part)))
            count += len(part)
            for number, place in zip(numbers, part, strict=True):
                if group["params"][place] in whole["state"]:
                    state[number] = whole["state"][group["params"][place]]
            merged.append({**group, "params": numbers})
        torch.save({"state": state, "param_groups": merged}, folder / f"optim_rank_{rank}.pt")
    return folder


class TestLocalStates:
    @pytest.mark.parametrize("world", [1, 2, 3, 5])
    def test_are_put_together(self, world: int, tmp_path: Path) -> None:
        pair = trained_pair()
        folder = save_local(tmp_path / "run", pair, world)
        assert zckpt.read(folder).dp == world
        zckpt.convert(folder, tmp_path / "target", to="gathered")
        assert_same_run(resumed_pair(tmp_path / "target"), pair)

    def test_swapped_ranks(self, tmp_path: Path) -> None:
        """Two ranks' states may have equal shapes: only the folders in the zips show it."""
        folder = save_local(tmp_path / "run", trained_pair(), 2)
        first, second = (folder / f"optim_rank_{rank}.pt" for rank in range(2))
        first.rename(folder / "kept")
        second.rename(first)
        (folder / "kept").rename(second)
        with pytest.raises(
            errors.InconsistentCheckpoint, match=r"rank_0\.pt was saved as optim_rank_1"
        ):
            zckpt.read(folder)

    def test_names_tell_sizes_where_no_state_does(self, tmp_path: Path) -> None:
        pair = build()
        folder = save_local(tmp_path / "run", pair, 2)
        with pytest.raises(errors.MissingData, match="assigns parameters to ranks by size"):
            zckpt.read(folder)
        names = names_by_group(pair)
        manifest = zckpt.read(folder, param_names=names)
        assert list(manifest.parameters) == names
        with pytest.raises(errors.InconsistentCheckpoint, match="of group 0, but"):
            zckpt.read(folder, param_names=[*names[3:], *names[:3]])

    def test_a_missing_rank(self, tmp_path: Path) -> None:
        folder = save_local(tmp_path / "run", trained_pair(), 3)
        (folder / "optim_rank_1.pt").unlink()
        said = r"lacks optim_rank_1\.pt .*Optimizer saves different parameters' states"
        with pytest.raises(errors.IncompleteCheckpoint, match=said) as raised:
            zckpt.read(folder)
        assert "--weights-only" in raised.value.hint
        manifest = zckpt.read(folder, weights_only=True)
        said = manifest.notices.omitted[0]
        assert (said.code, said.severity, said.subject) == ("missing-rank-file", "note", "optim")
        assert "lacks optim_rank_1.pt" in said.message
        assert manifest.groups is None

    def test_one_rank_alone_may_be_all_that_there_was(self, tmp_path: Path) -> None:
        """Sizes that descend are those of a trained head, too."""
        folder = tmp_path / "run"
        folder.mkdir()
        model = torch.nn.Sequential(torch.nn.Linear(3, 7), torch.nn.Linear(7, 5))
        optimizer = torch.optim.AdamW(model[1].parameters())
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
        torch.save(model.state_dict(), folder / "model.pt")
        torch.save(optimizer.state_dict(), folder / "optim_rank_0.pt")
        manifest = zckpt.read(folder)
        trained = [name for name, p in manifest.parameters.items() if p.trainable]
        assert trained == ["1.weight", "1.bias"]
        (line,) = [
            line for line in texts(manifest.notices.warnings) if "lists 2 of 4 weights" in line
        ]
        assert "consolidate_state_dict()" in line
        zckpt.convert(folder, tmp_path / "new", to="deepspeed", dp=2)

    @pytest.mark.parametrize("world", [3, 4])
    def test_the_last_rank_is_missing(self, world: int, tmp_path: Path) -> None:
        """Which no file's name tells: what it owned could be frozen."""
        pair = trained_pair()
        folder = save_local(tmp_path / "run", pair, world)
        (folder / f"optim_rank_{world - 1}.pt").unlink()
        for names in (None, names_by_group(pair)):
            with pytest.raises(errors.ZckptError):
                zckpt.read(folder, param_names=names)

    def test_frozen_weights_are_the_users_word(self, tmp_path: Path) -> None:
        pair = trained_pair()
        folder = save_local(tmp_path / "run", pair, 2)
        state = torch.load(folder / "model.pt")
        torch.save({**state, "frozen": torch.ones(9, 9)}, folder / "model.pt")
        with pytest.raises(
            errors.IncompleteCheckpoint, match="no rank's file has an optimizer state of frozen"
        ):
            zckpt.read(folder)
        manifest = zckpt.read(folder, param_names=names_by_group(pair))
        assert not manifest.parameters["frozen"].trainable

    def test_two_saves(self, tmp_path: Path) -> None:
        pair = trained_pair()
        folder = save_local(tmp_path / "run", pair, 2)
        train(pair, 1)
        later = save_local(tmp_path / "later", pair, 2)
        shutil.copy(later / "optim_rank_1.pt", folder)
        with pytest.raises(errors.InconsistentCheckpoint, match=r"step differs: 3 .*, 4 "):
            zckpt.read(folder)

    def test_other_hyper_parameters(self, tmp_path: Path) -> None:
        pair = trained_pair()
        folder = save_local(tmp_path / "run", pair, 2)
        pair[1].param_groups[0]["lr"] = 0.5
        later = save_local(tmp_path / "later", pair, 2)
        shutil.copy(later / "optim_rank_1.pt", folder)
        with pytest.raises(errors.InconsistentCheckpoint, match="different hyper-parameters"):
            zckpt.read(folder)

    def test_copies_of_one_state_are_one(self, tmp_path: Path) -> None:
        pair = trained_pair()
        folder = save(tmp_path / "run", pair)
        for rank in range(2):
            shutil.copy(folder / "optim.pt", folder / f"optim_rank_{rank}.pt")
        (folder / "optim.pt").unlink()
        zckpt.convert(folder, tmp_path / "target", to="gathered")
        assert_same_run(resumed_pair(tmp_path / "target"), pair)
