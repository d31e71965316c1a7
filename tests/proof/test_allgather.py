"""What ranks all-gather, by the engine's rule: blocks and shares, processes, a broken reader."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import zckpt
from zckpt.core.checkpoint.entries import Key
from zckpt.core.ranks.partition import FlatMember, Partition, Partitioned, Whole
from zckpt.core.storage.fragments import Extent, Fragment, Runs, Slices
from zckpt.formats import zero
from zckpt.formats.deepspeed import flats
from zckpt.formats.deepspeed_states.states import EngineStates
from zckpt.proof.allgather.buckets import buckets, share_of

from .. import faults
from ..conftest import EXAMPLE, ROOT
from ..engines.cases import CASES

Trained = Callable[[Any], Path]
FSDP2 = ROOT / "tests" / "data" / "fsdp2-2.13.0-w2"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
TORCHRUN += ["--local-addr", "localhost"]  # the name of a bare machine has no address


# -- the reader and the engine's rule are independent


def shift_flat(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages 1 and 2: a reader that is wrong by one element in the first parameter it cuts."""
    right = zero.FlatGroup.cut

    def wrong(self: zero.FlatGroup, start: int, stop: int) -> Runs:
        fragments = right(self, start, stop)
        first: Fragment = fragments[0]
        if start or first.stop - first.start < 2 or self.numel < 100:
            return fragments
        extent = first.extent
        moved = Extent(extent.file, extent.offset + self.size, extent.length)
        return Runs([Fragment(first.start, first.stop, moved), *fragments[1:]])

    monkeypatch.setattr(zero.FlatGroup, "cut", wrong)


def shift_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stage 3: the same."""

    def wrong(extents: tuple[Extent, ...], start: int, numel: int, size: int) -> Slices:
        return Slices(extents, start if start else 1, numel, size)

    monkeypatch.setattr(flats, "Slices", wrong)


def check_broken_reader(run: Path, tmp_path: Path, shift: Any, name: str) -> None:
    with pytest.MonkeyPatch.context() as broken:
        shift(broken)
        zckpt.convert(run, tmp_path / "universal", accept_weights=True)
        assert zckpt.verify(run, tmp_path / "universal")["equal"]
        report = zckpt.verify(run, tmp_path / "universal", gather=True, device="cpu")
    assert not report["equal"]
    assert f"{name}/exp_avg" in [line["tensor"] for line in report["differences"]]
    zckpt.convert(run, tmp_path / "right")
    assert zckpt.verify(run, tmp_path / "right", gather=True, device="cpu")["equal"]


def test_a_broken_reader_is_found(tmp_path: Path) -> None:
    first = next(iter(zckpt.read(EXAMPLE).parameters))
    check_broken_reader(EXAMPLE, tmp_path, shift_flat, first)


@pytest.mark.engines
@pytest.mark.first
def test_a_broken_reader_of_stage_3_is_found(trained: Trained, tmp_path: Path) -> None:
    run = trained(CASES["z3_dp2_bf16"]) / "run"
    first = next(iter(zckpt.read(run).parameters))
    check_broken_reader(run, tmp_path, shift_slices, first)


def test_a_reader_with_the_wrong_order_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Not of the reader's fragments alone is the engine's rule independent, but of its names."""
    right = EngineStates.param_shapes

    def wrong(self: EngineStates) -> list[dict[str, tuple[int, ...]]]:
        return [dict(reversed(group.items())) for group in right(self)]

    monkeypatch.setattr(EngineStates, "param_shapes", wrong)
    zckpt.convert(EXAMPLE, tmp_path / "universal", accept_weights=True)
    planned = zckpt.verify(EXAMPLE, tmp_path / "universal")
    assert planned["differences"] == []
    report = zckpt.verify(EXAMPLE, tmp_path / "universal", gather=True)
    assert {line["tensor"] for line in report["differences"]} >= {
        "fc1.bias/master",
        "fc2.bias/exp_avg",
    }


def test_a_rank_that_is_left_out_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """By whatever rule: what no rank brings was not compared."""
    from zckpt.formats.deepspeed import functions, gather

    partitions = gather.partitions

    def without_last(path: str, tp_rules: str | None) -> list[Partition]:
        return [
            replace(part, ranks=part.ranks[:-1])
            if isinstance(part, Partitioned) and len(part.ranks) > 1
            else part
            for part in partitions(path)
        ]

    def without_moments(path: str, tp_rules: str | None) -> list[Partition]:
        return [
            part
            for part in partitions(path)
            if not (isinstance(part, Partitioned) and part.members[0].key[1] == "exp_avg")
        ]

    zckpt.convert(EXAMPLE, tmp_path / "universal")
    for rule, said in (
        (without_last, "do not cover"),
        (without_moments, "engine would not gather"),
    ):
        broken = replace(functions.FUNCTIONS, partitions=rule)
        monkeypatch.setattr(functions, "FUNCTIONS", broken)
        report = zckpt.verify(EXAMPLE, tmp_path / "universal", gather=True)
        assert not report["equal"]
        assert any(said in problem["message"] for problem in report["problems"])


@pytest.mark.engines
@pytest.mark.first
def test_whole_momenta_on_several_ranks(trained: Trained, tmp_path: Path) -> None:
    """Muon's copies: one wrong element is one, and its file is named."""
    run = Path(shutil.copytree(trained(CASES["z2_dp2_muon"]) / "run", tmp_path / "run"))
    zckpt.convert(run, tmp_path / "universal")
    manifest = zckpt.read(run)
    copy = next(item for item in manifest.replicas if item.slot == "momentum_buffer")
    (fragment,) = copy.fragments
    with open(fragment.extent.file, "r+b") as file:
        file.seek(fragment.extent.offset)
        file.write(b"\x01\x02")
    faults.mend(fragment.extent.file)
    for gather in (False, True):
        report = zckpt.verify(run, tmp_path / "universal", gather=gather)
        (line,) = report["differences"]
        assert (line["tensor"], line["count"], line["first"]) == (copy.name, 1, 0)
        assert line["copy"] == Path(fragment.extent.file).name
    assert [line["tensor"] for line in zckpt.verify(run)["differences"]] == [copy.name]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64"])
@pytest.mark.parametrize("place", [0, 9999])
def test_a_long_tensor_is_compared_to_its_end(dtype: str, place: int, tmp_path: Path) -> None:
    """Long lines are compared by their bytes, of which there are more than elements."""
    import torch
    from safetensors.torch import save_file

    tensor = torch.ones(10_000, dtype=getattr(torch, dtype))
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        save_file({"weight": tensor}, tmp_path / name / "model.safetensors")
        tensor[place] = 2
    report = zckpt.verify(tmp_path / "one", tmp_path / "other", gather=True, device="cpu")
    (line,) = report["differences"]
    assert (line["count"], line["first"], line["a"], line["b"]) == (1, place, 1, 2)


# -- several processes


def test_a_process_compares_what_it_read_of_whole_tensors() -> None:
    """No rank gathers a whole tensor, so a process has only its own row of the bucket."""
    from zckpt.proof.allgather.parts import by_kind, cut_over

    wholes = [Whole((f"w{n}", "param"), "F32", (n,), Extent("a", 0, 4 * n)) for n in (5, 9)]
    flat = Partitioned("F32", (Extent("b", 0, 8),) * 3, [FlatMember(("flat", "param"), (6,), 0)])
    cuts = [cut for part in (wholes[0], flat, wholes[1]) for cut in cut_over(part, 3)]
    apart, together = buckets(by_kind(cuts), 1 << 20, 3)
    assert (apart.apart, together.apart) == (True, False)
    seen: list[tuple[Key, int]] = []
    for rank in range(3):
        blocks = list(share_of(apart, rank, 3))
        assert {block.row for block in blocks} == {rank}
        for block in blocks:
            ((start, stop),) = block.runs()
            seen += [(block.member.key, element) for element in range(start, stop)]
    assert sorted(seen) == [((f"w{n}", "param"), element) for n in (5, 9) for element in range(n)]


@pytest.fixture
def faulty(tmp_path: Path) -> Path:
    """The example with differences of every kind."""
    run = Path(shutil.copytree(EXAMPLE, tmp_path / "faulty"))
    faults.change(run, "fc1.weight/exp_avg", faults.flip(17, 4, 22))
    faults.change(run, "fc1.weight/exp_avg", faults.flip(400, 4, 31))
    faults.change(run, "fc2.weight/master", lambda data: data[::-1])
    faults.change(run, "embedding.weight/param", faults.flip(5, 2, 9))
    faults.raise_step(run, ranks=4)
    return run


def launch(processes: int, *words: object) -> tuple[int, dict[str, Any]]:
    """`torchrun -m zckpt verify ... --json`; torchrun's exit code and rank 0's report."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [*TORCHRUN, "--nproc-per-node", str(processes), "-m", "zckpt", "verify"]
    ended = subprocess.run(
        [*command, *map(str, words), "--json"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.stdout, ended.stderr
    report: dict[str, Any] = json.loads(ended.stdout)
    return ended.returncode, report


SRUN, MPIRUN = (
    ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
)


@pytest.mark.parametrize("names", [SRUN, pytest.param(MPIRUN, marks=pytest.mark.engines)])
@pytest.mark.parametrize("single", [False, True])
def test_processes_of_other_launchers_gather_together(
    names: tuple[str, str], single: bool, tmp_path: Path
) -> None:
    zckpt.convert(EXAMPLE, tmp_path / "universal")
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    words = ["--against", tmp_path / "universal", "--gather", "--device", "cpu", "--json"]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "zckpt", "verify", EXAMPLE, *words, *["--single"] * single],
            env={**os.environ, **meeting, names[0]: str(rank), names[1]: "2"},
            cwd=ROOT,
            stdout=subprocess.PIPE,
        )
        for rank in range(2)
    ]
    texts = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    reports = [json.loads(text) for text in texts if text]
    assert [report["world"] for report in reports] == ([1, 1] if single else [2])
    assert all(report["equal"] for report in reports)


def comparable(report: dict[str, Any]) -> dict[str, Any]:
    """All but what tells of the run itself."""
    return {key: value for key, value in report.items() if key not in ("seconds", "world", "bytes")}


SOME_PROCESSES = [2, *(pytest.param(n, marks=pytest.mark.engines) for n in (1, 3, 4))]


@pytest.mark.parametrize("processes", SOME_PROCESSES)
def test_any_number_of_processes_gives_the_same_report(
    processes: int, faulty: Path, tmp_path: Path
) -> None:
    zckpt.convert(EXAMPLE, tmp_path / "universal")
    words = ["--against", tmp_path / "universal", "--gather", "--device", "cpu"]
    code, report = launch(processes, faulty, *words)
    assert code
    alone = zckpt.verify(faulty, tmp_path / "universal", gather=True, device="cpu")
    assert report["world"] == processes
    assert comparable(report) == json.loads(json.dumps(comparable(alone)))
    planned = zckpt.verify(faulty, tmp_path / "universal")
    for key in ("differences", "steps", "groups", "only_a", "only_b"):
        assert report[key] == json.loads(json.dumps(planned[key]))
    assert report["digests"] == {
        name: digests for name, digests in planned["digests"].items() if not name.endswith("/state")
    }


@pytest.mark.engines
@pytest.mark.parametrize("processes", [2, 3])
def test_boxes_on_several_processes(processes: int, tmp_path: Path) -> None:
    """Ranks' rows as boxes: two boxes on three processes, too."""
    run = Path(shutil.copytree(FSDP2, tmp_path / "run"))
    zckpt.convert(run, tmp_path / "universal")
    fragments = zckpt.read(run).entries["trunk.0.weight", "exp_avg"].fragments
    for fragment in fragments:
        with open(fragment.extent.file, "r+b") as file:
            file.seek(fragment.extent.offset + 40)
            file.write(b"\x01\x02\x03\x04")
    words = ["--against", tmp_path / "universal", "--gather", "--device", "cpu"]
    code, report = launch(processes, run, *words)
    alone = zckpt.verify(run, tmp_path / "universal", gather=True, device="cpu")
    assert code
    assert (report["world"], len(report["differences"])) == (processes, 1)
    assert report["differences"][0]["count"] == len(fragments) == 2
    assert comparable(report) == json.loads(json.dumps(comparable(alone)))


@pytest.mark.engines
def test_two_processes_and_no_difference(tmp_path: Path) -> None:
    zckpt.convert(EXAMPLE, tmp_path / "universal")
    words = ["--against", tmp_path / "universal", "--gather", "--memory", "1MiB"]
    code, report = launch(2, EXAMPLE, *words, "--device", "cpu")
    assert code == 0
    assert report["equal"]
    assert report["gathered"]


@pytest.mark.parametrize("memory", [1 << 12, 1 << 14, 1 << 20])
def test_any_memory_gives_the_same_report(memory: int, faulty: Path) -> None:
    reports = [
        zckpt.verify(faulty, EXAMPLE, gather=True, device="cpu", memory=size, jobs=2)
        for size in (256 << 20, memory)
    ]
    assert comparable(reports[0]) == comparable(reports[1])


def test_no_file_stays_open(tmp_path: Path) -> None:
    zckpt.convert(EXAMPLE, tmp_path / "universal")
    zckpt.verify(EXAMPLE, tmp_path / "universal", gather=True, device="cpu")  # imports torch
    before = len(os.listdir("/proc/self/fd"))
    zckpt.verify(EXAMPLE, tmp_path / "universal", gather=True, device="cpu")
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_universal_checkpoint_needs_no_engine(faulty: Path, tmp_path: Path) -> None:
    zckpt.convert(faulty, tmp_path / "universal", accept_weights=True)
    report = zckpt.verify(tmp_path / "universal", EXAMPLE, gather=True, device="cpu")
    planned = zckpt.verify(tmp_path / "universal", EXAMPLE)
    assert report["differences"] == planned["differences"]


@pytest.mark.gpu
class TestGpu:
    """The same on a GPU, alone and where two processes share it."""

    @pytest.mark.parametrize("processes", [1, 2, 3])
    def test_gives_the_same_report(self, processes: int, faulty: Path, tmp_path: Path) -> None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("there is no GPU")
        zckpt.convert(EXAMPLE, tmp_path / "universal")
        words = ["--against", tmp_path / "universal", "--gather", "--device", "cuda"]
        _, report = launch(processes, faulty, *words)
        assert report["device"] == "cuda"
        alone = zckpt.verify(faulty, tmp_path / "universal", gather=True, device="cpu")
        for each in (report, alone):
            del each["device"]
        assert comparable(report) == json.loads(json.dumps(comparable(alone)))
        _, report = launch(processes, EXAMPLE, *words)
        assert report["equal"]


@pytest.mark.engines
@pytest.mark.parametrize("json_asked", [True, False])
def test_one_of_several_processes_fails(json_asked: bool, tmp_path: Path) -> None:
    """Nothing hangs; its reason is on stderr, and the document on stdout says that one failed."""
    zckpt.convert(EXAMPLE, tmp_path / "universal")
    (tmp_path / "failing.py").write_text(
        "import os\n"
        "from zckpt import cli\nfrom zckpt.proof import allgather\n"
        "if os.environ['RANK'] == '1':\n"
        "    def fail(*_):\n"
        "        raise OSError(5, 'Input/output error', 'a-file')\n"
        "    allgather.gathering.Gathering._compare = fail\n"
        "cli.main()\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    launcher = [*TORCHRUN, "--monitor-interval", "10"]  # rank 0 ends by itself before it is stopped
    words = ["verify", EXAMPLE, "--gather", "--device", "cpu", "--against", tmp_path / "universal"]
    words += ["--json"] if json_asked else []
    ended = subprocess.run(
        [*launcher, "--nproc-per-node", "2", tmp_path / "failing.py", *words],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode
    assert "Error: a-file: Input/output error" in ended.stderr
    if json_asked:
        assert json.loads(ended.stdout)["error"] == "ProcessFailed"
    else:
        assert ended.stdout == ""
        assert "Error: another process" in ended.stderr
