"""Compares `zckpt convert` with `cp` and with the engines' converters, for the same checkpoint.

    python -m benchmarks.convert SRC --against cp --rounds 7
    python -m benchmarks.convert SRC --against cp --dp 3        `zckpt reshard --dp 3` instead

    python -m benchmarks.convert DCP --against torch            dcp_to_torch_save

SRC is a DeepSpeed run directory (see checkpoints.py), DCP one of torch.distributed.checkpoint
(`zckpt convert SRC DCP --to dcp --dp 4`). Outputs go into SRC's own filesystem. zckpt syncs its
files to disk, so other programs are followed by `sync`. Sources are in the page cache.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from .measure import ZCKPT, Cost, Job, interleave, ratio, table

MEMORY = 200  # MiB, the most that `convert` may take
LARGE = 10**9  # bytes, from which on copying counts and not the start of an interpreter


def copying(name: str, files: list[Path], target: Path) -> Job:
    listed, where = shlex.join(map(str, files)), shlex.quote(str(target))
    script = f"mkdir {where} && cp {listed} {where} && sync {where}/* {where}"
    return Job(name, ("sh", "-c", script), (target,))


def synced(name: str, command: Sequence[str], target: Path) -> Job:
    """Returns a job that runs a program, and then one `sync` of the files that it wrote."""
    script = '"$@" && sync --file-system "$0"'
    return Job(name, ("sh", "-c", script, str(target), *command), (target,))


def of_torch(source: Path, ours: Path, theirs: Path, against: str) -> tuple[Job, Job]:
    """The jobs of zckpt and of `against` for a directory of torch.distributed.checkpoint."""
    convert = (*ZCKPT, "convert", str(source), str(ours))
    if against == "cp":
        files = sorted(source.glob("*.distcp"))
        return Job("zckpt convert", convert, (ours,)), copying("cp + sync", files, theirs)
    whole = Job("zckpt convert --to gathered", (*convert, "--to", "gathered"), (ours,))
    code = (
        "import os, sys; from torch.distributed.checkpoint.format_utils import dcp_to_torch_save;"
        "os.mkdir(sys.argv[2]); dcp_to_torch_save(sys.argv[1], sys.argv[2] + '/whole.pt')"
    )
    command = (sys.executable, "-c", code, str(source), str(theirs))
    return whole, synced("dcp_to_torch_save", command, theirs)


def jobs(source: Path, work: Path, against: str, dp: int | None) -> tuple[Job, Job]:
    """Returns zckpt's command, and the command of the program it is compared with."""
    ours, theirs = work / "zckpt", work / against
    if (source / ".metadata").exists():
        return of_torch(source, ours, theirs, against)
    tag = source / (source / "latest").read_text().strip()
    convert = Job("zckpt convert", (*ZCKPT, "convert", str(source), str(ours)), (ours,))
    if dp is not None:
        command = (*ZCKPT, "reshard", str(source), str(ours), "--dp", str(dp))
        convert = Job(f"zckpt reshard --dp {dp}", command, (ours,))
    weights = Job(
        "zckpt convert --weights-only",
        (*convert.command, "--weights-only", "--dtype", "fp32"),
        (ours,),
    )
    if against == "cp":
        return convert, copying("cp + sync of all .pt files", sorted(tag.glob("*.pt")), theirs)
    if against == "universal":
        module = (sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal")
        folders = ("--input_folder", str(tag), "--output_folder", str(theirs / "out"))
        command = (*module, *folders, "--inject_missing_state")
        return convert, synced("ds_to_universal", command, theirs)
    own = str(source / "zero_to_fp32.py")  # the engine puts a copy beside every checkpoint
    command = (sys.executable, own, str(source), str(theirs))
    return weights, synced("zero_to_fp32", command, theirs)


def report(ours: list[Cost], theirs: list[Cost], against: str, most: float | None) -> None:
    """Prints the ratios, and whether each meets its target; `most` is the target against `cp`."""
    if against == "cp":
        wall, text = ratio(ours, theirs, lambda cost: cost.wall)
        aim = f"   target <= {most}: {verdict(wall <= most)}" if most else ""
        print(f"wall, zckpt / (cp + sync)      {text}{aim}")
        print(f"CPU, zckpt / (cp + sync)       {ratio(ours, theirs, lambda cost: cost.cpu)[1]}")
    else:
        wall, text = ratio(theirs, ours, lambda cost: cost.wall)
        aim = f"   target >= 8: {verdict(wall >= 8)}" if against == "universal" else ""
        print(f"times faster in wall           {text}{aim}")
        print(f"times less CPU                 {ratio(theirs, ours, lambda cost: cost.cpu)[1]}")
    peak = max(cost.memory for cost in ours)
    print(
        f"peak memory of zckpt           {peak:.0f} MiB   target < {MEMORY}: "
        f"{verdict(peak < MEMORY)}"
    )


def verdict(good: bool) -> str:
    return "met" if good else "MISSED"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("source", type=Path, metavar="SRC")
    parser.add_argument("--against", choices=("cp", "universal", "fp32", "torch"), default="cp")
    parser.add_argument("--dp", type=int, help="reshard to this size instead of converting")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--work", type=Path, metavar="DIR", help="for outputs; default beside SRC")
    arguments = parser.parse_args()
    source = arguments.source.resolve()
    work = (arguments.work or source.with_name(f"{source.name}.work")).resolve()
    work.mkdir(parents=True, exist_ok=True)
    pair = jobs(source, work, arguments.against, arguments.dp)
    costs = interleave(pair, arguments.rounds)
    table(costs)
    ours, theirs = (costs[job.name] for job in pair)
    large = sum(path.stat().st_size for path in source.rglob("*.*")) >= LARGE
    most = 1.0 if arguments.dp is None else 1.25
    report(ours, theirs, arguments.against, most if large else None)
    work.rmdir()


if __name__ == "__main__":
    main()
