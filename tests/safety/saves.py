"""Which checkpoints are mixed up: of each kind, two runs, one of them saved at two steps.

Real engines write them wherever they run on a processor. The two runs differ in their seeds alone,
so nothing that a file says of itself (shapes, groups, counters) shows whose it is.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import zckpt

from ..conftest import ROOT
from ..engines import (
    autoep,
    deepspeed,
    expert_grids,
    experts,
    finetunes,
    grids,
    megatron,
    torch_engine,
)
from ..engines import onnxruntime_files as onnxruntime
from ..engines.cases import CASES, STAGE_0
from ..engines.torch_cases import CASES as TORCH

DATA = ROOT / "tests" / "data"
SEED, OTHER_SEED = 7, 8
STEP, LATER_STEP = 2, 4  # DeepSpeed before 0.13.2 is ahead by one


@dataclass(frozen=True)
class Saves:
    """Directories of one kind: of one run at two steps, and of another run at the first step.

    The last two are None for files that were recorded once. `options` are those of all readings.
    """

    first: Path
    later: Path | None = None
    other: Path | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


Kind = Callable[[Path], Saves]
"""Makes the saves of a kind in an empty folder."""
Train = Callable[[int, int, Path], Path]
"""Trains with a seed, so many steps, in an empty folder; gives the directory that was saved."""


def trained(train: Train, options: Mapping[str, Any] | None = None) -> Kind:
    def make(root: Path) -> Saves:
        return Saves(
            train(SEED, STEP, root / "first"),
            train(SEED, LATER_STEP, root / "later"),
            train(OTHER_SEED, STEP, root / "other"),
            options or {},
        )

    return make


def converted(kind: Kind, convert: Callable[[Path, Path], object]) -> Kind:
    """What a program makes of the saves of another kind."""

    def make(root: Path) -> Saves:
        saves = kind(root / "source")
        paths = {"first": saves.first, "later": saves.later, "other": saves.other}
        for name, path in paths.items():
            assert path is not None
            convert(path, root / name)
        return Saves(root / "first", root / "later", root / "other")

    return make


def recorded(name: str) -> Kind:
    """A directory of tests/data, which was saved once."""

    def make(root: Path) -> Saves:
        source = DATA / name / "run"
        shutil.copytree(source if source.is_dir() else DATA / name, root / "first")
        return Saves(root / "first")

    return make


# -- real engines


def by_deepspeed(name: str) -> Kind:
    case = {**CASES, **STAGE_0}[name]
    return trained(
        lambda seed, steps, root: deepspeed.train(
            replace(case, seed=seed, steps=steps), root, losses=0
        )
    )


def by_grid(name: str) -> Kind:
    case = grids.CASES[name]
    return trained(
        lambda seed, steps, root: grids.train(replace(case, seed=seed, steps=steps), root)
    )


def by_experts(name: str) -> Kind:
    case = {**experts.CASES, **experts.WITHOUT_ZERO}[name]
    return trained(
        lambda seed, steps, root: experts.train(
            replace(case, seed=seed, steps=steps), root, losses=0
        )
    )


def by_expert_grid(name: str) -> Kind:
    case = expert_grids.CASES[name]
    return trained(
        lambda seed, steps, root: expert_grids.train(replace(case, seed=seed, steps=steps), root)
    )


def by_auto_ep(name: str) -> Kind:
    case = autoep.CASES[name]
    return trained(
        lambda seed, steps, root: autoep.train(replace(case, seed=seed, steps=steps), root)
    )


def by_torch(name: str, world: int) -> Kind:
    """Files that number the optimizer's parameters are read with their names."""
    case = TORCH[name]
    make = trained(
        lambda seed, steps, root: torch_engine.train(
            replace(case, seed=seed, steps=steps), world, root, losses=0
        )
    )

    def make_named(root: Path) -> Saves:
        saves = make(root)
        groups = torch.load(root / "first" / "oracle.pt", weights_only=False)["groups"]
        names = [name for group in groups for name in group["params"]]
        return replace(saves, options={"param_names": names})

    return make_named if case.layout in NUMBERED else make


NUMBERED = ("raw", "ranks", "files", "zro ranks", "one file")
"""Layouts of torch_layouts.py whose optimizer knows its parameters by number."""


def by_trainer(weights: str, engine: str, ranks: int) -> Kind:
    """transformers' Trainer, which saves every step."""

    def make(root: Path) -> Saves:
        options = {"save_strategy": "steps", "save_steps": 1}
        runs = [
            finetunes.train(
                finetunes.Run(weights, engine, ranks, seed=seed), root / name, **options
            )
            for name, seed in (("one", SEED), ("two", OTHER_SEED))
        ]
        later = runs[0].with_name(f"checkpoint-{finetunes.SAVED_AT + 2}")
        return Saves(runs[0], later, runs[1])

    return make


def by_megatron(name: str) -> Kind:
    """All three in one process, which imports Megatron-Core once."""
    every = [*megatron.TRAINED, *megatron.MATRIX, megatron.FSDP]
    case = next(case for case in every if case["name"] == name)
    saves = {"first": (0, STEP), "later": (0, LATER_STEP), "other": (1, STEP)}

    def make(root: Path) -> Saves:
        runs = root / "runs"
        runs.mkdir(parents=True)
        cases = [
            {**case, "name": name, "seed": seed, "steps": steps}
            for name, (seed, steps) in saves.items()
        ]
        megatron.train(cases, runs)
        for name in saves:
            (root / name).mkdir()
            for path in [*(runs / name).glob("iter_*"), *(runs / name).glob("latest*.txt")]:
                path.rename(root / name / path.name)
        return Saves(root / "first", root / "later", root / "other")

    return make


def by_onnxruntime(dialect: str, precision: str, dp: int) -> Kind:
    """Files by the partition rule; random numbers, so that the seed is of run and step."""
    kept = ("scale",) if precision != "fp32" else ()

    def train(seed: int, steps: int, root: Path) -> Path:
        options: dict[str, Any] = {"frozen": onnxruntime.FROZEN, "kept": kept, "step": steps}
        state = onnxruntime.make(precision, seed=100 * seed + steps, **options)
        return onnxruntime.write(state, root, dp, dialect)

    return trained(train)


# -- what converts


def by_zckpt(to: str, **options: Any) -> Callable[[Path, Path], object]:
    return lambda source, target: zckpt.convert(source, target, to=to, **options)


def by_deepspeeds_converter(source: Path, target: Path) -> None:
    """Its directory beside the file that names it, as for `load_universal`."""
    from ..formats.deepspeed_universal.directories import merge

    merged = merge(source, target.with_name(f"{target.name}-merged"))
    target.mkdir()
    (merged / "merged").rename(target / "universal")
    (target / "latest_universal").write_text("universal")
    shutil.rmtree(merged)


# -- the kinds: by row of the table in README.md, and by name; the default run takes the first

KINDS: dict[str, dict[str, Kind]] = {
    "DeepSpeed, stage 1 and 2": {
        **{
            name: by_deepspeed(name)
            for name in (
                "z2_dp3_bf16",
                "z1_dp2_bf16",
                "z2_dp1_bf16",
                "z1_dp2_bf16_optimizer",
                "z1_dp4_bf16_optimizer_padding",
                "z1_dp2_fp32",
                "z2_dp2_fp32",
                "z2_dp2_fp16_dynamic",
                "z2_dp2_round_robin",
                "z2_dp2_elastic",
                "z2_dp3_sgd",
                "z2_dp3_momentum",
                "z2_dp8_only_padding",
                "z2_dp2_warmup",
                "z2_dp2_no_frozen",
                "z2_dp2_narrow_states",
            )
        },
        "lora_zero2": by_trainer("lora", "zero2", 2),
        "0.8.2": recorded("deepspeed-0.8.2-z1_dp2_bf16"),
        "0.9.3": recorded("deepspeed-0.9.3-z2_dp3_fused_adam"),
        "0.13.1": recorded("deepspeed-0.13.1-z1_dp2_bf16_optimizer"),
        "written_z1": converted(by_deepspeed("z2_dp2_bf16"), by_zckpt("deepspeed", stage=1, dp=3)),
        "written_z2": converted(by_deepspeed("z2_dp2_bf16"), by_zckpt("deepspeed", stage=2, dp=3)),
    },
    "DeepSpeed, stage 3": {
        **{
            name: by_deepspeed(name)
            for name in (
                "z3_dp3_bf16",
                "z3_dp1_bf16",
                "z3_dp2_fp32",
                "z3_dp2_plain",
                "z3_dp3_sub_groups",
                "z3_dp4_hpz",
                "z3_dp2_lambda",
                "z3_dp3_sgd",
                "z3_dp2_client_state",
            )
        },
        "lora_zero3": by_trainer("lora", "zero3", 2),
        "0.11.0": recorded("deepspeed-0.11.0-z3_dp2_sub_groups"),
        "written": converted(by_deepspeed("z2_dp2_bf16"), by_zckpt("deepspeed", stage=3, dp=3)),
    },
    "DeepSpeed, several model ranks": {
        name: by_grid(name)
        for name in (
            "pipe_pp2_tp2_dp1",
            "pipe_pp2_dp2",
            "pipe_pp2_dp2_fp32",
            "pipe_pp3_dp1_bf16",
            "pipe_pp2_dp1_ties",
            "pipe_pp2_tp2_dp2",
            "pipe_pp2_tp2_dp1_fp32",
            "tensor_tp2_dp2",
            "tensor_tp2_dp2_z2",
            "tensor_tp2_dp2_z3",
            "llama_tp2_dp2",
            "llama_tp2_dp1_z3",
        )
    },
    "DeepSpeed, experts": {
        **{
            name: by_experts(name)
            for name in ("dp4_ep2", "dp4_ep2_fp32", "dp4_ep4_ep2", "dp4_ep2_frozen_experts")
        },
        "pp2_dp2_ep2": by_expert_grid("pp2_dp2_ep2"),
        "autoep_dp4_ep2": by_auto_ep("autoep_dp4_ep2"),
    },
    "DeepSpeed, stage 0": {
        **{
            name: by_deepspeed(name)
            for name in ("z0_dp2_bf16", "z0_dp2_fp32", "z0_dp2_fp16_dynamic")
        },
        **{
            name: by_grid(name)
            for name in ("pipe_pp2_dp2_z0_bf16", "pipe_pp2_dp1_z0_plain", "tensor_tp2_dp2_z0")
        },
        "dp4_ep2_z0": by_experts("dp4_ep2_z0"),
    },
    "deepspeed-universal": {
        "written_z2": converted(by_deepspeed("z2_dp2_bf16"), by_zckpt("deepspeed-universal")),
        "written_z3": converted(by_deepspeed("z3_dp2_bf16"), by_zckpt("deepspeed-universal")),
        "z2": converted(by_deepspeed("z2_dp2_bf16"), by_deepspeeds_converter),
        "z3": converted(by_deepspeed("z3_dp2_bf16"), by_deepspeeds_converter),
        "written_tp2": converted(by_grid("tensor_tp2_dp2"), by_zckpt("deepspeed-universal")),
    },
    "dcp": {
        **{
            f"{name}_w{world}": by_torch(name, world)
            for name, world in (
                ("fsdp2_dcp", 2),
                ("fsdp2_dcp", 4),
                ("fsdp2_flat", 2),
                ("fsdp2_raw", 2),
                ("fsdp2_bf16", 2),
                ("fsdp2_hsdp", 4),
                ("fsdp2_2d", 4),
                ("fsdp2_titan", 2),
                ("fsdp2_sgd", 2),
                ("fsdp2_threads", 2),
                ("fsdp2_many_files", 2),
                ("fsdp2_async", 2),
                ("fsdp2_safetensors", 2),
                ("fsdp1_dcp", 2),
                ("fsdp1_lightning", 2),
                ("ddp_dcp_strided", 2),
                ("hf_sharded", 2),
            )
        },
        "full_fsdp": by_trainer("full", "fsdp", 4),
    },
    "gathered": {
        f"{name}_w{world}": by_torch(name, world)
        for name, world in (
            ("fsdp1_sharded_pt", 2),
            ("fsdp2_local", 2),
            ("fsdp2_local", 4),
            ("fsdp2_hsdp_local", 4),
            ("fsdp2_inner_local", 2),
            ("fsdp1_hsdp_local", 4),
            ("zro_ranks", 2),
            ("zro_ranks_three_groups", 4),
            ("fsdp2_full", 2),
            ("ddp_files", 2),
            ("ddp", 2),
            ("hf_consolidated", 2),
        )
    },
    "megatron": {
        "0.16.1": recorded("megatron-0.16.1-tp2"),
        "0.16.1_buffers": recorded("megatron-0.16.1-buffers-tp2"),
        "0.16.1_legacy": recorded("megatron-0.16.1-legacy-tp2"),
        "0.16.1_legacy_ep2": recorded("megatron-0.16.1-legacy-ep2"),
        "0.16.1_fsdp": recorded("megatron-0.16.1-fsdp"),
        "0.13.1": recorded("megatron-0.13.1-tp2"),
        **{
            name: by_megatron(name)
            for name in (
                "tp2",
                "dp3",
                "tp2_pp2",
                "moe_ep2_dp4",
                "not_distributed_tp2",
                "buckets_tp2_pp2",
                "buckets_dp3",
                "buffers_tp2_dp2",
                "legacy_dp3",
                "legacy_tp2_pp2",
                "legacy_not_distributed_tp2",
                "legacy_moe_ep2_dp4",
                "fsdp_tp2_dp2",
            )
        },
    },
    "onnxruntime": {
        f"{dialect}_{precision}": by_onnxruntime(dialect, precision, 3)
        for dialect in ("l2", "hdf5", "l1", "december")
        for precision in ("fp16", "fp32")
    },
    "universal": {
        "z2": converted(by_deepspeed("z2_dp2_bf16"), by_zckpt("universal")),
        "fsdp2": converted(by_torch("fsdp2_dcp", 2), by_zckpt("universal")),
        "pieces": converted(by_deepspeed("z2_dp2_bf16"), by_zckpt("universal", max_file_size=4096)),
    },
}
