"""Every `sh` block and every command in a sentence runs, on small checkpoints of ours.

`STANDS` has a block's files, and the words that are replaced: 512 ranks become 3, and a model of 26
layers one of 8. `PROGRAMS` are launchers that start processes of this machine with the variables of
srun, mpirun and sbatch; torchrun is the real one. `NOT_RUN` has the reasons for the rest.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

import zckpt as package
from zckpt import probe

from . import pages
from .conftest import EXAMPLE, ROOT, Result
from .engines import deepspeed, experts, grids
from .engines.cases import CASES
from .formats.gathered import torch_ranks
from .formats.gathered.test_verl import rows_folder

DATA = ROOT / "tests" / "data"
TRAINER = ROOT / "examples" / "trainer" / "checkpoint-4"
PIPELINE = DATA / "zckpt-0.1-pp2_tp2" / "run"
MEGATRON = DATA / "megatron-0.16.1-tp2"
PORT = "a free port"
URL = "s3://bucket/"  # tests/stores/test_pages.py runs what has it
RANK = """
import os
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
assert rank == int(os.environ["LOCAL_RANK"]) < size == 2
assert (os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]) == ("node1", "29500")
"""
LAUNCHED = """#!/bin/bash
count=2
while [[ $1 == -* ]]; do
    case $1 in -n | --ntasks) count=$2 ;; esac
    if [[ $1 == *=* ]]; then shift; else shift 2; fi
done
for ((rank = 0; rank < count; rank++)); do
    env RANKS SIZES "$@" &
done
for process in $(jobs -p); do wait $process || exit; done
"""
PROGRAMS = {
    "srun": LAUNCHED.replace("RANKS", "SLURM_PROCID=$rank SLURM_LOCALID=$rank").replace(
        "SIZES", "SLURM_NTASKS=$count SLURM_STEP_NUM_TASKS=$count"
    ),
    "mpirun": LAUNCHED.replace("RANKS", "OMPI_COMM_WORLD_RANK=$rank").replace(
        "SIZES", "OMPI_COMM_WORLD_SIZE=$count"
    ),
    "sbatch": """#!/bin/bash -e
for ((task = 1; task <= ${1##*-}; task++)); do
    SLURM_ARRAY_TASK_ID=$task sh -c "$3"
done
""",
    "scontrol": "#!/bin/sh\nprintf 'node1\\nnode2\\n'\n",
}
"""What the shell finds by these names."""
NOT_RUN = {
    ("README.md", "pip install ."): "test_readme.py runs it without pip",
    ("README.md", "'.[test]'"): "it is what runs this test; `.ci/run` does",
    ("CONTRIBUTING.md", "'.[dev]'"): "as README.md's",
}
"""Blocks by page and a part of them, and why they are not run."""

Make = Callable[[Path], object]
"""Makes what stands at a path."""


def converted(source: Path, **options: Any) -> Make:
    return lambda path: package.convert(source, path, **options)


def resharded(source: Path, **options: Any) -> Make:
    return lambda path: package.reshard(source, path, **options)


def written(text: str) -> Make:
    return lambda path: path.write_text(text)


def adapter(path: Path) -> None:
    shutil.copytree(DATA / "accelerate-1.14.0-lora-w2" / "checkpoint-3", path)
    (path / "pytorch_model_fsdp.bin").unlink()  # has rank 0's part alone


def two_models() -> Iterator[dict[str, Any]]:
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = torch.nn.Linear(3, 4)
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(2, 3)).sum().backward()
        optimizer.step()
        yield {
            "model": get_model_state_dict(model),
            "optimizer": get_optimizer_state_dict(model, optimizer),
        }


def of_accelerate(path: Path) -> None:
    for number, state in enumerate(two_models()):
        for key, name in (("model", "pytorch_model_fsdp"), ("optimizer", "optimizer")):
            dcp.save({key: state[key]}, checkpoint_id=path / f"{name}_{number}", no_dist=True)


def of_one_model(path: Path) -> None:
    torch.save(next(two_models()), path)


def gan(path: Path) -> None:
    state: dict[str, Any] = {}
    for name, own in zip(("generator", "discriminator"), two_models(), strict=True):
        state |= {name: own["model"], f"optimizer_{name[0]}": own["optimizer"]}
    torch.save(state, path)


def nemo(path: Path) -> None:
    shutil.copytree(MEGATRON / "iter_0000003", path / "weights")
    (path / "context").mkdir()
    (path / "context" / "model.yaml").write_text("model: 1\n")


FAMILY = json.loads((ROOT / "zckpt" / "naming" / "families" / "llama.json").read_text())
FAMILY["types"] = ["mymodel"]
FAMILY["rules"] += [  # the small model of tests/data has biases of norms, too
    {"hugging_face": [theirs], "megatron": [ours]}
    for theirs, ours in (
        ("model.positions.weight", "embedding.position_embeddings.weight"),
        ("model.layers.{layer}.ln1.bias", "decoder.layers.{layer}.input_layernorm.bias"),
        ("model.layers.{layer}.ln2.bias", "decoder.layers.{layer}.pre_mlp_layernorm.bias"),
        ("model.norm.bias", "decoder.final_layernorm.bias"),
    )
]


def of_hugging_face(path: Path) -> None:
    """The model of MEGATRON under the names of FAMILY."""
    rules = path.parent / "rules.json"
    rules.parent.mkdir(parents=True, exist_ok=True)
    rules.write_text(json.dumps(FAMILY))
    package.convert(MEGATRON, path, to="gathered", family=f"{rules}:heads=2,kv_heads=2")


@dataclass(frozen=True)
class Stand:
    """What stands for what in the block of a page that has the text `has`."""

    page: str
    has: str
    files: Mapping[str, Path | Make] = field(default_factory=dict)
    words: Mapping[str, str] = field(default_factory=dict)
    run: Make | None = None  # trains what stands for `run`, with a real engine

    @property
    def is_slow(self) -> bool:
        return self.run is not None or self.has in ("torchrun", "mpirun")


HERE = {"node1": "localhost", "29400": PORT, "512": "3"}
STANDS = [
    Stand(
        "docs/auto-resume.md",
        "pretrain_gpt.py",
        {"out": MEGATRON, "pretrain_gpt.py": written("import os, sys; os.stat(sys.argv[2])")},
        {"torchrun": "python"},
    ),
    Stand(
        "docs/auto-resume.md",
        "#SBATCH",
        {"train.py": written(RANK)},
    ),
    Stand(
        "docs/deepspeed-grids.md",
        "--pp-partition",
        words={"--pp-bounds 0,9,17,26": "--pp-bounds 0,3,6,9"},
        run=partial(grids.train, grids.CASES["pipe_pp2_dp1_plain"]),
    ),
    Stand(
        "docs/deepspeed-grids.md",
        "reshard one four",
        {
            "plain": TRAINER,
            "pipeline": PIPELINE,
        },
        {"plain four --tp 4": "plain two --tp 2", "0,7,13,19,26": "0,1,4,6,9"},
        partial(grids.train, grids.CASES["tensor_tp2_dp1_bf16"]),
    ),
    Stand(
        "docs/deepspeed-grids.md",
        "save to trained",
        {"run": PIPELINE, "trained": converted(PIPELINE, to="dcp")},
    ),
    Stand(
        "docs/deepspeed-grids.md",
        "rules.txt",
        {
            "run": resharded(TRAINER, tp=2, tp_rules="llama"),
            "rules.txt": written("include llama\n"),
        },
        {"run whole --tp-rules rules": "run again --tp-rules rules"},
    ),
    Stand(
        "docs/deepspeed-grids.md", "--ep 4", run=partial(experts.train, experts.CASES["dp4_ep2"])
    ),
    Stand(
        "docs/deepspeed.md",
        "--ds-config",
        {
            "run": EXAMPLE,
            "ds_config.json": written('{"zero_optimization": {"stage": 3}, "bf16": {}}'),
        },
    ),
    Stand("docs/deepspeed.md", "--groups-from", {"run": EXAMPLE, "new-run": EXAMPLE}),
    Stand(
        "docs/deepspeed.md",
        "--group-defaults",
        run=partial(deepspeed.train, CASES["z2_dp2_elastic"]),
    ),
    Stand("docs/deepspeed.md", "--allow-object", {"run": EXAMPLE}),
    Stand(
        "docs/export.md",
        "--config",
        {
            "run/checkpoint-500": converted(TRAINER / "global_step4", to="dcp"),
            "path/to/base-model": TRAINER,
        },
    ),
    Stand("docs/export.md", "--tie", {"run/checkpoint-500": TRAINER}),
    Stand("docs/export.md", "checkpoint-500 adapter", {"run/checkpoint-500": adapter}),
    Stand(
        "docs/fsdp.md",
        "run/step-500",
        {"run/step-500": DATA / "torch_checkpointing-0.1.1-w2" / "items"},
    ),
    Stand("docs/fsdp.md", "gan.pt", {"gan.pt": gan}),
    Stand("docs/many-nodes.md", "torchrun", {"run": EXAMPLE}, {**HERE, "--nnodes 4": "--nnodes 1"}),
    Stand(
        "docs/many-nodes.md",
        "mpirun",
        {"run": EXAMPLE},
        {"-n 8": "-n 2", "resumed --dp 512\nmpirun": "out --dp 512\nmpirun", **HERE},
    ),
    Stand("docs/many-nodes.md", "--single", {"run": EXAMPLE}),
    Stand(
        "docs/many-nodes.md",
        "sbatch",
        {"run": EXAMPLE},
        {
            "1-8": "1-2",
            "/8": "/2",
            "--ntasks 8": "--ntasks 2",
            "run universal --part auto": "run u --part auto",
        },
    ),
    Stand("docs/megatron.md", "for-0.19", {"run": MEGATRON}),
    Stand("docs/megatron.md", "for-tp-8", {"run": MEGATRON}),
    Stand(
        "docs/megatron.md",
        "for-ep-4",
        {"run/iter_0000006": DATA / "megatron-0.16.1-legacy-ep2" / "iter_0000003"},
    ),
    Stand(
        "docs/megatron.md",
        "without-fsdp",
        {"run/iter_0000006": DATA / "megatron-0.16.1-fsdp" / "iter_0000003"},
    ),
    Stand("docs/megatron.md", "for-nemo", {"nemo/gpt--step=1000-last": nemo}),
    Stand("docs/megatron.md", "convert run weights", {"run": MEGATRON}),
    Stand(
        "docs/megatron.md",
        "meta-llama",
        {
            "run/checkpoint-500": TRAINER,
            "run/iter_0000006": MEGATRON / "iter_0000003",
            "own.json": written(json.dumps(FAMILY)),
            "meta-llama/config.json": written(
                '{"model_type": "mymodel", "num_attention_heads": 2, "vocab_size": 11}'
            ),
        },
        {
            "llama:heads=32,kv_heads=8": "own.json:heads=2,kv_heads=2",
            "run/iter_0000006 universal": "run/iter_0000006 u",
            "model --family llama": "model --family own.json",
        },
    ),
    Stand(
        "docs/megatron.md",
        "first-run",
        {
            "run/checkpoint-500": of_hugging_face,
            "fsdp/dcp": converted(MEGATRON, to="dcp", rename=[(r"decoder\.layers", "blocks")]),
            "first-run": MEGATRON,
            "own.json": written(json.dumps(FAMILY)),
        },
        {"llama": "own.json:heads=2,kv_heads=2", "dcp for-megatron": "dcp from-fsdp"},
    ),
    Stand(
        "docs/prove.md",
        "torchrun",
        {"PATH": EXAMPLE, "OTHER": EXAMPLE},
        {"proc-per-node 4": "proc-per-node 2"},
    ),
    Stand("docs/trainer.md", "run/old-500", {"run/checkpoint-500": TRAINER}),
    Stand(
        "docs/trainer.md",
        "saved-at-once",
        {"run/checkpoint-500": TRAINER, "saved-at-once": TRAINER / "global_step4"},
    ),
    Stand("docs/trainer.md", "model_1", {"run/state": of_accelerate}),
    Stand(
        "docs/trainer.md",
        "global_step_500",
        {
            "run/global_step_500/actor": lambda path: rows_folder(
                path, torch_ranks.dtensors([2], [0])
            )
        },
    ),
    Stand("SECURITY.md", "inspect", {"SRC": EXAMPLE}),
]


def found(page: str, has: str) -> pages.Block:
    """The block of a page with a text; there is exactly one."""
    (block,) = [each for each in shell_blocks(ROOT / page) if has in each.text]
    return block


def shell_blocks(page: Path) -> list[pages.Block]:
    return [block for block in pages.blocks(page) if block.kind == "sh"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a command runs."""
    folder = tmp_path / "page"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def test_every_block_has_its_stand_or_a_reason() -> None:
    listed = [(stand.page, found(stand.page, stand.has)) for stand in STANDS]
    listed += [(page, found(page, has)) for page, has in NOT_RUN]
    every = [
        (page.relative_to(ROOT).as_posix(), block)
        for page in [*pages.documents(), ROOT / "SECURITY.md", ROOT / "CONTRIBUTING.md"]
        for block in shell_blocks(page)
        if URL not in block.text
    ]
    assert sorted(listed, key=str) == sorted(every, key=str)


@pytest.mark.parametrize(
    "stand",
    [
        pytest.param(
            stand,
            id=f"{stand.page}: {stand.has}",
            marks=[pytest.mark.engines] if stand.is_slow else [],
        )
        for stand in STANDS
    ],
)
def test_block_runs(
    stand: Stand, folder: Path, shell: Mapping[str, str], zckpt: Callable[..., Result]
) -> None:
    files = dict(stand.files)
    if stand.run is not None:
        stand.run(folder.parent)  # makes `run` and what it held
        files["run"] = folder.parent / "run"
    for name, made in files.items():
        make(folder / name, made)
    for name, program in PROGRAMS.items():
        (folder.parent / "bin" / name).write_text(program)
        (folder.parent / "bin" / name).chmod(0o755)
    text = found(stand.page, stand.has).text
    for word, other in stand.words.items():
        assert word in text, word
        text = text.replace(word, str(free_port()) if other is PORT else other)
    lines = [line for line in pages.whole_lines(text) if not line.startswith("#")]
    if any(map(pages.needs_a_shell, lines)):
        words = ["bash", "-euo", "pipefail", "-c", text]
        ended = subprocess.run(words, env=shell, capture_output=True, text=True, timeout=300)
        assert ended.returncode == 0, ended.stdout + ended.stderr
    else:
        for line in lines:
            result = zckpt(*shlex.split(line)[1:])
            assert result.code == 0, f"{line}\n{result.err}"
    for command, *words in pages.zckpt_commands(text):
        if command in WRITING:
            assert Path(words[1]).is_dir(), text


def make(path: Path, made: Path | Make) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(made, Path):
        shutil.copytree(made, path, dirs_exist_ok=True)
    else:
        made(path)


def recorded(path: Path) -> None:
    torch.manual_seed(7)
    model = torch.nn.Linear(2, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    with probe.record(model, path, step=7, optimizer=optimizer):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()


def damage(path: Path) -> None:
    """Flips one bit of a tensor."""
    extent = max(
        (each.extent for each in package.read(path).files.records), key=lambda each: each.length
    )
    with open(extent.file, "r+b") as file:
        byte = os.pread(file.fileno(), 1, extent.offset + 3)[0]
        os.pwrite(file.fileno(), bytes([byte ^ 0x40]), extent.offset + 3)


WRITING = ("convert", "reshard", "export", "mend")
ZERO_3 = written('{"zero_optimization": {"stage": 3}, "bf16": {"enabled": true}}')
PLACES: dict[str, Path | Make] = {
    **dict.fromkeys(("PATH", "run", "saved-at-once"), EXAMPLE),
    **dict.fromkeys(
        ("SRC", "RUN", "DST", "COPY", "run/checkpoint-400", "run/checkpoint-500"), TRAINER
    ),
    **dict.fromkeys(("out/checkpoint-500", "resumed/checkpoint-500"), TRAINER),
    **dict.fromkeys(("A", "B", "recorded/a", "recorded/b", "recorded/a2"), recorded),
    **dict.fromkeys(("ds.json", "ds_config.json"), ZERO_3),
    "../base-model": TRAINER,
    "ckpt.pt": of_one_model,
    "out": TRAINER.parent,
    "run/global_step500": converted(TRAINER / "global_step4", to="dcp"),
    "run/x.ckpt": EXAMPLE,
    "saved-by-the-new-program": TRAINER,
    "universal": DATA / "universal" / "06-0.1.0" / "pipeline",
}
"""What stands at a path in a command of a sentence, of a table, or of the examples in `--help`."""


def single_commands() -> list[str]:
    found = []
    for page in pages.documents():
        examples = [b.text.splitlines() for b in pages.blocks(page) if b.kind == "text"]
        found += [*pages.inline_code(page), *(line for lines in examples for line in lines)]
    complete = [text for text in found if re.match(r"zckpt [a-z-]+ [^-]", text)]
    return sorted({*complete})


@pytest.mark.parametrize("command", [each for each in single_commands() if URL not in each])
def test_single_command_runs(command: str, folder: Path, zckpt: Callable[..., Result]) -> None:
    """`check` may find that a checkpoint does not load: ours are for few ranks."""
    _, name, *words = shlex.split(command)
    target = words[1] if name in WRITING else None
    places = {**PLACES, "run": TRAINER.parent} if "--checkpoints" in words else PLACES
    for word in words:
        if word in places and word != target:
            make(folder / word, places[word])
    if name == "mend":
        damage(folder / words[0])
    result = zckpt(name, *(word.replace("/scratch", "scratch") for word in words))
    codes = {"check": (0, 3), "mend": (3,) if "--dry-run" in words else (0,)}
    assert result.code in codes.get(name, (0,)), result.err


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
