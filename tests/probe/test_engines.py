"""Recorded real engines: equal runs have no difference, and each fault is found at its place."""

from __future__ import annotations

import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import zckpt
from zckpt import probe
from zckpt.probe import runs

from .. import faults
from ..conftest import Once
from ..engines import deepspeed
from ..engines.cases import CASES, Case
from ..engines.models import LEARNING_RATE

Trained = Callable[[Case], Path]

STAGES = [
    pytest.param(stage, marks=[pytest.mark.engines, *([pytest.mark.first] if stage > 1 else [])])
    for stage in (1, 2, 3)
]
STEP = 3  # at which the cases are saved


def swap_moments(copy: Path) -> None:
    """Swaps the moments of one tensor."""
    entries = zckpt.read(copy).entries
    first, second = (
        faults.read_element_bytes(entries["trunk.2.weight", slot])
        for slot in ("exp_avg", "exp_avg_sq")
    )
    faults.change(copy, "trunk.2.weight/exp_avg", lambda data: second)
    faults.change(copy, "trunk.2.weight/exp_avg_sq", lambda data: first)


def change_rate(copy: Path) -> None:
    """The learning rate of the second group, of all that is one-dimensional, in every rank."""
    before, after = (b"G" + struct.pack(">d", LEARNING_RATE * how) for how in (0.25, 0.5))
    for path in faults.optimizer_files(copy):
        data = path.read_bytes()
        assert before in data
        path.write_bytes(data.replace(before, after))
        faults.mend(str(path))


def scaled(data: bytes) -> bytes:
    return (torch.frombuffer(bytearray(data), dtype=torch.float32) * 1.5).numpy().tobytes()


FAULTS: dict[str, Callable[[Path], None]] = {
    "step": lambda copy: faults.raise_step(copy, ranks=8),
    "moments": swap_moments,
    "rate": change_rate,
    "frozen": lambda copy: faults.change(
        copy, "bottleneck.weight/param", lambda data: bytes(reversed(data))
    ),
    "stale": lambda copy: faults.change(copy, "trunk.2.weight/master", scaled),
}

PLACES = {
    # the step after the checkpoint, the first record that differs, what its meaning begins with
    "step": (1, "embedding.weight", "equal until the first update"),
    "moments": (1, "trunk.2.weight", "equal until the first update"),
    "rate": (0, "lr.1", "the learning rates differ"),
    "frozen": (0, "bottleneck.weight", "this weight differs"),
}


FSDP_PLACES = [
    # the step and the first record that differs
    ("step", 4, "embedding.weight"),
    ("moments", 4, "layers.1.expand.weight"),
    ("rate", 3, "lr.1"),
    ("frozen", 3, "frozen.weight"),
    ("stale", 3, "layers.2.contract.weight"),
]


Recorded = Callable[[int], tuple[Path, dict[str, list[float]]]]


@pytest.fixture(scope="session")
def recorded(trained: Trained, once: Once) -> Recorded:
    """Runs of a stage by name: the original twice, resharded, not recorded, with every fault."""

    def record(stage: int) -> tuple[Path, dict[str, list[float]]]:
        def train(root: Path) -> tuple[Path, dict[str, list[float]]]:
            case = CASES[f"z{stage}_dp2_bf16"]
            original = trained(case) / "run"
            zckpt.reshard(original, root / "checkpoints" / "resharded", dp=case.dp)
            for name, plant in FAULTS.items():
                copy = root / "checkpoints" / name
                shutil.copytree(original, copy)
                plant(copy)
            named: dict[str, tuple[Path, Path | None]] = {
                "plain": (original, None),
                "original": (original, root / "original"),
                "again": (original, root / "again"),
                **{
                    name: (root / "checkpoints" / name, root / name)
                    for name in ("resharded", *FAULTS)
                },
            }
            arguments = (case, list(named.values()), root / "losses.pt")
            deepspeed.submit("rank", "recorded", case.dp, arguments, root, case.extension)
            losses = torch.load(root / "losses.pt")
            return root, dict(zip(named, losses, strict=True))

        return once("recorded", f"stage{stage}", train)

    return record


@pytest.mark.parametrize("stage", STAGES)
def test_a_resharded_checkpoint_goes_on_without_any_difference(
    stage: int, recorded: Recorded
) -> None:
    root, losses = recorded(stage)
    report = probe.compare(root / "original", root / "resharded", root / "again")
    assert report["equal"]
    assert report["noise_floor"] == 0
    assert report["ranks"] == [0, 1]
    assert report["steps"] == [STEP, STEP + 1, STEP + 2]
    assert losses["plain"] == losses["original"] == losses["resharded"]  # recording changes none


@pytest.mark.parametrize("stage", STAGES)
def test_parameters_are_seen_whole(stage: int, recorded: Recorded) -> None:
    root, _ = recorded(stage)
    records = runs.read(root / "original").ranks[1]
    shapes = {record.key: record.shape for record in records if record.kind == "parameter"}
    manifest = zckpt.read(root / "checkpoints" / "resharded")
    for name, parameter in manifest.parameters.items():
        assert shapes[name] == parameter.shape
    assert all("crc32" in record.numbers for record in records if record.kind != "metric")


@pytest.mark.parametrize("fault", PLACES)
@pytest.mark.parametrize("stage", STAGES)
def test_a_fault_is_found_at_its_place(stage: int, fault: str, recorded: Recorded) -> None:
    root, _ = recorded(stage)
    later, key, meaning = PLACES[fault]
    for noise in (None, root / "again"):
        report = probe.compare(root / "original", root / fault, noise)
        assert report["first"]["step"] == STEP + later
        assert report["first"]["key"] == key
    assert report["big"] == report["first"]
    assert report["big"]["meaning"].startswith(meaning)


@pytest.mark.parametrize("stage", STAGES)
def test_a_stale_master(stage: int, recorded: Recorded) -> None:
    """Stage 3 makes the module's weights of the masters as it loads; stages 1 and 2 do after the
    first update."""
    root, _ = recorded(stage)
    report = probe.compare(root / "original", root / "stale", root / "again")
    assert report["big"]["key"] == "trunk.2.weight"
    assert report["big"]["step"] == STEP + (stage < 3)


# -- FSDP2


@pytest.fixture(scope="module")
def fsdp(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("fsdp")
    deepspeed.submit("rank", "recorded_fsdp", 2, (2, root), root)
    return root


@pytest.mark.engines
@pytest.mark.first
@pytest.mark.parametrize("name", ["copy", "written"])
def test_fsdp_goes_on_without_any_difference(name: str, fsdp: Path) -> None:
    report = probe.compare(fsdp / "original", fsdp / name)
    assert report["equal"]
    assert report["steps"] == [3, 4, 5]
    losses = torch.load(fsdp / "losses.pt")
    assert losses["plain"] == losses["original"] == losses[name]


@pytest.mark.engines
@pytest.mark.first
def test_forwards_from_what_fsdp_saved(fsdp: Path) -> None:
    from ..engines.recorded import Model

    tokens = torch.arange(20).view(4, 5)
    with torch.device("meta"):
        model = Model()
    outputs = []
    for name in ("original", "universal", "written"):
        with probe.stream(model, fsdp / "checkpoints" / name), torch.no_grad():
            outputs.append(model(tokens))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])


@pytest.mark.engines
@pytest.mark.first
def test_fsdp_parameters_are_seen_whole(fsdp: Path) -> None:
    from ..engines.recorded import Model

    records = runs.read(fsdp / "original").ranks[1]
    shapes = {record.key: record.shape for record in records if record.kind == "parameter"}
    assert shapes == {
        name: tuple(parameter.shape) for name, parameter in Model().named_parameters()
    }


@pytest.mark.engines
@pytest.mark.first
@pytest.mark.parametrize(("fault", "step", "key"), FSDP_PLACES)
def test_fsdp_faults_are_found_at_their_place(fault: str, step: int, key: str, fsdp: Path) -> None:
    report = probe.compare(fsdp / "original", fsdp / fault)
    assert (report["first"]["step"], report["first"]["key"]) == (step, key)
    assert (report["big"]["step"], report["big"]["key"]) == (step, key)
