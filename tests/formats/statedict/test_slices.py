"""What differs between ranks and states no part is one rank's slice: through every door."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import zckpt
from zckpt.dcp import StorageReader
from zckpt.errors import InconsistentCheckpoint

from ...conftest import Once, Result, texts
from ...engines import slices

Program = Callable[..., Result]
SLICE = "each file seems to hold one rank's slice"


@pytest.fixture(scope="module")
def fsdp2(once: Once) -> Path:
    return once("slices", "fsdp2", partial(slices.saved, "fsdp2", 4))


@pytest.fixture(scope="module")
def ddp(once: Once) -> Path:
    return once("slices", "ddp", partial(slices.saved, "ddp", 2))


class TestPlainSlices:
    """FSDP2 on four ranks, of which each has saved `to_local()`."""

    @pytest.fixture(params=["plain", "legacy"])
    def run(self, request: pytest.FixtureRequest, fsdp2: Path) -> Path:
        return fsdp2 / str(request.param)

    @pytest.mark.parametrize(
        ("words", "code"),
        [
            (("convert", "{}", "{}-new"), 1),
            (("convert", "{}", "{}-new", "--weights-only"), 1),
            (("convert", "{}", "{}-new", "--to", "dcp", "-q"), 1),
            (("export", "{}", "{}-new"), 1),
            (("verify", "{}"), 3),
            (("check", "{}"), 3),
            (("auto-resume", "{}"), 1),
            (("auto-resume", "{}", "--verify", "files"), 1),
        ],
    )
    def test_no_command_takes_one_for_all(
        self, words: tuple[str, ...], code: int, run: Path, zckpt: Program
    ) -> None:
        ended = zckpt(*(word.format(run) for word in words))
        assert ended.code == code
        assert "emb.weight: " in ended.out + ended.err
        assert SLICE in ended.out + ended.err

    def test_no_function_does(self, run: Path) -> None:
        for look in (zckpt.read, StorageReader, partial(zckpt.load, name="emb.weight/param")):
            with pytest.raises(InconsistentCheckpoint, match=r"emb\.weight: .*one rank's slice"):
                look(run)


@pytest.mark.parametrize("weights_only", [False, True])
@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("plain_weights", r"emb\.weight: .*one rank's slice"),
        ("plain_named", r"emb\.weight: .*one rank's slice"),
        ("plain_listed", r"emb\.weight: .*one rank's slice"),
        ("numbered", r"emb\.weight: .*one rank's slice"),
        ("numbered/model_1.pt", r"emb\.weight: .*one rank's slice"),
        ("frozen_parts", r"emb\.weight: .*shapes of it \(\[10, 8\], \[7, 8\]\).*one rank's slice"),
        ("even_legacy", r"w: .*different values of it.*one rank's slice"),
        ("dcp_apart", r"emb\.weight: .*distcp.*one rank's slice"),
        ("dcp_weights", r"emb\.weight has the shape \[\d+, 8\].*one rank's slice of \[37, 8\]"),
    ],
)
def test_weights_of_one_rank(name: str, what: str, weights_only: bool, fsdp2: Path) -> None:
    with pytest.raises(InconsistentCheckpoint, match=what):
        zckpt.read(fsdp2 / name, weights_only=weights_only)


@pytest.mark.parametrize("name", ["plain_states", "dcp_states"])
def test_states_of_one_rank(name: str, fsdp2: Path) -> None:
    """The weights beside them are DTensors, and are right."""
    for nameless in (False, True):
        with pytest.raises(InconsistentCheckpoint, match=r"exp_avg.*one rank's slice"):
            zckpt.read(fsdp2 / name, nameless=nameless)
    assert zckpt.read(fsdp2 / name, weights_only=True).parameters["emb.weight"].shape == (37, 8)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("name", ["dcp_weights", "dcp_states", "dcp_apart"])
def test_torchs_own_directories_are_not_loaded(name: str, fsdp2: Path) -> None:
    reader = StorageReader(fsdp2 / name)
    size = reader.read_metadata().state_dict_metadata["model.fc.bias"].size
    with pytest.raises(CheckpointException, match="one rank's slice"):
        dcp.load({"model": {"fc.bias": torch.zeros(size)}}, storage_reader=reader)


def test_averages_beside_whole_weights(fsdp2: Path) -> None:
    """No rank has a part of the model, so that nothing states where parts of averages belong."""
    manifest = zckpt.read(fsdp2 / "whole_ema")
    assert texts(manifest.notices.warnings) == [
        "ema is left out: its tensors are one rank's slices of the model's weights, and nothing "
        "shows how to join the ranks' slices",
    ]
    assert not manifest.notices.omitted
    assert {*manifest.parameters} == {"emb.weight", "fc.weight", "fc.bias"}


class TestSound:
    """The same containers with what ranks have for themselves."""

    @pytest.mark.parametrize(
        "name", ["sound", "dcp_sound", "ema_whole", "feedback", "dcp_apart_sound"]
    )
    def test_of_fsdp2(self, name: str, fsdp2: Path) -> None:
        manifest = zckpt.read(fsdp2 / name)
        assert manifest.parameters["emb.weight"].shape == (37, 8)
        assert manifest.entries["emb.weight", "exp_avg"].shape == (37, 8)
        own = {line.partition(":")[0] for line in texts(manifest.notices.omitted)}
        if name != "dcp_sound":
            assert {"model.seen", "model.bn.running_mean"} <= own
        is_fed_back = name in ("feedback", "dcp_apart_sound")
        assert ("optimizer.state (5 values)" in own) == is_fed_back

    @pytest.mark.parametrize("name", ["both", "frozen"])
    def test_buffers_of_ranks_beside_their_optimizer(self, name: str, ddp: Path) -> None:
        omitted = zckpt.read(ddp / name).notices.omitted
        assert [line.partition(":")[0] for line in texts(omitted)] == [
            "model.seen",
            "model.bn.running_mean",
            "model.bn.running_var",
        ]

    def test_statistics_without_an_optimizer(self, ddp: Path) -> None:
        assert len(zckpt.read(ddp / "weights").notices.omitted) == 2


class TestBuffers:
    """`--buffers` names what each rank has for itself, where no optimizer shows it."""

    def test_without_it(self, ddp: Path) -> None:
        with pytest.raises(InconsistentCheckpoint, match="seen: ") as raised:
            zckpt.read(ddp / "weights_and_seen")
        assert raised.value.hint.endswith("add --buffers 'seen'")

    @pytest.mark.parametrize("target", [(), ("--to", "dcp"), ("--to", "deepspeed", "--dp", "2")])
    def test_of_a_conversion(
        self, target: tuple[str, ...], ddp: Path, tmp_path: Path, zckpt: Program
    ) -> None:
        words = (ddp / "weights_and_seen", tmp_path / "new", *target, "--weights-only")
        ended = zckpt("convert", *words, "--buffers", "se*")
        assert ended.code == 0, ended.err
        assert "seen: the values differ between ranks; rank 0's are used" in ended.out

    def test_in_python(self, ddp: Path, tmp_path: Path) -> None:
        run = ddp / "weights_and_seen"
        seen = torch.load(run / "model_rank_0.pt")["seen"]
        assert torch.equal(zckpt.load(run, "seen/param", buffers=["seen"]), seen)
        assert StorageReader(run, buffers=["seen"]).manifest.buffers[0] == "seen"
        trained = with_optimizer(run, tmp_path)
        assert zckpt.auto_resume(trained, buffers=["seen"], single=True) == str(trained)

    def test_what_names_nothing_is_refused(self, ddp: Path, tmp_path: Path, zckpt: Program) -> None:
        words = (ddp / "both", tmp_path / "new", "--to", "dcp", "--buffers", "nothing")
        assert "--buffers does not apply to --to dcp" in zckpt("convert", *words).err

    def test_a_proposed_command_has_it(self, ddp: Path, tmp_path: Path, zckpt: Program) -> None:
        trained = with_optimizer(ddp / "weights_and_seen", tmp_path)
        words = (trained, "--for", "dcp", "--buffers", "seen")
        assert "--buffers seen" in zckpt("check", *words).out


def with_optimizer(run: Path, folder: Path) -> Path:
    """A copy of ranks' weights, beside which each rank has the optimizer's states of all."""
    copy = Path(shutil.copytree(run, folder / run.name))
    for path in sorted(copy.glob("model_rank_*.pt")):
        weights = {n: w for n, w in torch.load(path).items() if n.endswith(("w", "weight", "bias"))}
        states = {
            name: {"step": torch.tensor(1.0), "exp_avg": torch.ones_like(weight)}
            for name, weight in weights.items()
        }
        group = {"lr": 0.1, "params": [*weights]}
        optimizer = {"state": states, "param_groups": [group]}
        torch.save(optimizer, path.with_name(path.name.replace("model", "optim")))
    return copy


class TestNoChecksums:
    """Files of torch before 1.6: only their bytes tell whether ranks hold the same."""

    NOT_LOOKED = "not checked: whether the ranks' replicas of 1 tensor are equal"

    def test_check_says_that_it_did_not_look(
        self, fsdp2: Path, tmp_path: Path, zckpt: Program
    ) -> None:
        for name in ("equal_legacy", "even_legacy"):
            run = with_optimizer(fsdp2 / name, tmp_path)
            ended = zckpt("check", run)
            assert ended.code == 0
            assert self.NOT_LOOKED in ended.err
            (warning,) = zckpt("check", run, "--json").document["warnings"]
            assert warning["message"].startswith(self.NOT_LOOKED)

    def test_so_does_auto_resume_by_files(self, fsdp2: Path, tmp_path: Path) -> None:
        told: list[dict[str, Any]] = []
        run = with_optimizer(fsdp2 / "even_legacy", tmp_path)
        zckpt.auto_resume(run, verify="files", single=True, tell=told.extend)
        assert [line for line in texts(told) if line.startswith(self.NOT_LOOKED)]
        with pytest.raises(zckpt.ZckptError, match="one rank's slice"):
            zckpt.auto_resume(run, single=True)

    def test_what_copies_compares(self, fsdp2: Path, tmp_path: Path) -> None:
        zckpt.convert(fsdp2 / "equal_legacy", tmp_path / "new")
        dry = zckpt.convert(fsdp2 / "even_legacy", tmp_path / "a", dry_run=True)
        assert any(line.startswith(self.NOT_LOOKED) for line in texts(dry["warnings"]))
        with pytest.raises(InconsistentCheckpoint, match="one rank's slice"):
            zckpt.convert(fsdp2 / "even_legacy", tmp_path / "a")

    def test_no_tensor_is_read(self, fsdp2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def read(*_: object) -> int:
            raise AssertionError("a tensor was read")

        monkeypatch.setattr("zckpt.files.torchfile.crc_of", read)
        assert zckpt.read(fsdp2 / "equal_legacy", by_checksums=True).notices.uncompared == 1
        zckpt.read(fsdp2 / "sound", by_checksums=True)
        with pytest.raises(InconsistentCheckpoint):
            zckpt.read(fsdp2 / "plain", by_checksums=True)


def test_averages_of_one_rank_are_left_out_of_items(fsdp2: Path, tmp_path: Path) -> None:
    for name in ("dcp_ema", "dcp_ema_list"):
        manifest = zckpt.read(fsdp2 / name)
        assert (
            sum(line.startswith("ema is left out") for line in texts(manifest.notices.warnings))
            == 1
        )
        assert not any("ema" in name.split(".") for name, _ in manifest.entries)
    two = {"generator": {"w": torch.ones(4, 2)}, "critic": {"w": torch.ones(2, 2)}}
    dcp.save(two, checkpoint_id=tmp_path / "two")
    assert {*zckpt.read(tmp_path / "two").parameters} == {"generator.w", "critic.w"}
