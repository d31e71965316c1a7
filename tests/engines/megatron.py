"""Megatron-Core as the judge: its environment, its cases, and what its optimizers held.

    .venv-megatron/site      megatron-core 0.16.1 alone; torch is that of the tests

The case's name is a folder of the result; see megatron_rank.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent.parent
VERSION = "0.16.1"  # the last for Python 3.10 and 3.11
SIZES = [4, 16, 4, 2, 24, 96]  # layers, hidden, heads, query groups, ffn, vocabulary
ODD = [3, 20, 4, 2, 28, 66]
WIDE = [2, 16, 4, 4, 32, 96]
THREE = [3, 24, 6, 3, 20, 102]
HEADS = [5, 32, 4, 4, 40, 128]  # a group for each
SLOTS = {"param": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
USUAL: dict[str, Any] = {
    "world": 1,
    "tp": 1,
    "pp": 1,
    "ep": 1,
    "vpp": 1,
    "etp": None,
    "uneven": None,
    "bucket": None,
    "adam": "fused",
    "sizes": SIZES,
    "gated": True,
    "tied": True,
    "bf16": True,
    "moe": False,
    "mla": False,  # multi-latent attention
    "config": {},  # more values of TransformerConfig
    "positions": "learned_absolute",
    "fp16": False,
    "frozen": None,  # a pattern of names
    "grid": {},  # more options of initialize_model_parallel
    "ddp": {},  # more values of DistributedDataParallelConfig
    "optimizer": {},  # more values of OptimizerConfig
    "arguments": {},  # more of the command line
    "saved": None,  # or "parallel", "async", "efficient", "weights" (alone)
    "tracker": None,  # or "release"
    "distributed": True,
    "sharding": "fully_reshardable",
    "legacy": False,
    "load": None,
    "prefix": False,
    "program": None,  # or "nemo", "bridge": whose directory it is
    "fsdp": None,  # or the strategy of Megatron-FSDP
    "fsdp2": False,  # torch's FSDP2
    "steps": 3,
    "seed": 0,
}


def case(name: str, **values: Any) -> dict[str, Any]:
    return {**USUAL, "name": name, **values}


NORMS_OF_HEADS = {"qk_layernorm": True, "add_qkv_bias": True}
SHARED = {"moe_shared_expert_intermediate_size": 16}
RMS = {"normalization": "RMSNorm"}
MANY = {
    **RMS,
    "num_moe_experts": 8,
    "moe_shared_expert_intermediate_size": 12,
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
    "moe_router_load_balancing_type": "none",
}
ENDS = {f"account_for_{end}_in_pipeline_split": True for end in ("embedding", "loss")}
PREDICTION = {"mtp_num_layers": 1}  # multi-token prediction
MTP = {"tied": False, "positions": "rope", "config": PREDICTION}
LAYOUT = {"pipeline_model_parallel_layout": "Et|tt|t|tL"}
RATES = {"decoupled_lr": 0.003, "decoupled_min_lr": 0.0001, "min_lr": 0.001}
TWO = {"num_distributed_optimizer_instances": 2}
BY_LAYER = {"moe_layer_freq": [0, 1, 1, 1]}  # the first layer has no experts
MODEL = (
    *("program", "sizes", "gated", "tied", "bf16", "fp16", "moe", "mla", "config", "positions"),
    *("frozen", "adam", "optimizer"),
)
"""What a run that resumes has as the first one had it."""

READABLE = [
    case("dp1"),
    case("dp3", world=3, tied=False, gated=False),
    case("tp2", world=2, tp=2),
    case("pp2", world=2, pp=2, bf16=False, gated=False),
    case("tp2_pp2", world=4, tp=2, pp=2, tied=False),
    case("tp2_dp2_torch_adam", world=4, tp=2, adam="torch"),
    case("moe_dp2", world=2, moe=True),
    case("moe_ep2", world=2, ep=2, moe=True),
    case("moe_ep2_prefix", world=2, ep=2, moe=True, prefix=True),
    case("moe_ep2_dp4", world=4, ep=2, moe=True, tied=False),
    case("pp2_vpp2", world=2, pp=2, vpp=2),
    case("nemo_tp2", world=2, tp=2, program="nemo", tied=False),
    case("buckets_without_padding", world=2, bucket=700),
    case("moe_8_shared_ep2", world=2, ep=2, moe=True, sizes=THREE, config=MANY),
    case("rope_dp3", world=3, sizes=THREE, config=RMS, positions="rope", saved="parallel"),
    case("not_distributed_tp2", world=2, tp=2, distributed=False),
    case("not_distributed_fp32", distributed=False, bf16=False, adam="torch"),
]
# name of a source in READABLE, options of the conversion, and the run that loads
RESUMED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("dp3", {}, {"world": 1}),
    ("dp3", {}, {"world": 2, "tp": 2}),
    ("tp2", {}, {"world": 2, "tp": 2}),  # the same grid, which asks for random states
    ("tp2_pp2", {}, {"world": 2}),
    ("not_distributed_fp32", {}, {"world": 2, "pp": 2, "adam": "fused"}),
    ("moe_ep2_prefix", {"ep": 1}, {"world": 2}),
    ("moe_dp2", {"ep": 2}, {"world": 2, "ep": 2}),
    ("tp2_pp2", {}, {"world": 2, "pp": 2, "vpp": 2}),
    ("legacy_tp2_pp2", {}, {"world": 1}),
    ("legacy_dp3", {}, {"world": 2, "tp": 2}),
    ("legacy_moe_ep2_dp4", {"ep": 1}, {"world": 2}),
    ("nemo_tp2", {}, {"world": 2, "pp": 2}),
    ("moe_8_shared_ep2", {"ep": 1}, {"world": 3, "pp": 3}),
    ("buckets_fp16_dp2", {}, {"world": 2, "pp": 2}),
    ("buckets_frozen_dp2", {}, {"world": 2, "tp": 2}),
]
MORE_RESUMED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("dp1", {}, {"world": 4, "tp": 2}),
    ("tp2", {}, {"world": 1}),
    ("tp2", {}, {"world": 4, "tp": 2}),
    ("tp2", {}, {"world": 4, "pp": 4}),
    ("pp2", {}, {"world": 1}),
    ("pp2", {}, {"world": 2, "pp": 2}),
    ("tp2_dp2_torch_adam", {}, {"world": 2, "pp": 2, "adam": "fused"}),
    ("not_distributed_tp2", {}, {"world": 2}),
    ("not_distributed_tp2", {}, {"world": 3}),
    ("moe_ep2", {"ep": 1}, {"world": 2}),
    ("moe_ep2", {}, {"world": 4, "ep": 2}),
    ("moe_ep2_dp4", {"ep": 4}, {"world": 4, "ep": 4}),
    ("moe_ep2_dp4", {"ep": 1}, {"world": 4, "pp": 2}),
    ("moe_dp2", {"ep": 2}, {"world": 4, "ep": 2, "pp": 2}),
    ("moe_dp2", {}, {"world": 1}),
    ("legacy_tp2_pp2", {}, {"world": 4, "tp": 2, "pp": 2}),  # the same grid
    ("legacy_tp2_pp2", {}, {"world": 2, "pp": 2}),
    ("legacy_tp2_pp2", {}, {"world": 3}),
    ("pp2_vpp2", {}, {"world": 1}),
    ("buckets_pp2_vpp2", {}, {"world": 2, "tp": 2}),
    ("buckets_moe_ep2_dp4", {"ep": 1}, {"world": 2}),
    ("buffers_moe_ep2", {"ep": 1}, {"world": 2, "tp": 2}),
    ("legacy_dp3", {}, {"world": 1}),
    ("legacy_not_distributed_tp2", {}, {"world": 2, "pp": 2, "adam": "fused"}),
]
CORRUPT = case("corrupt", world=3, bucket=700)
# the last stage has a copy of the embedding, in a bucket of its own
CORRUPT_COPY = case("corrupt_copy", world=2, pp=2, sizes=[4, 20, 4, 2, 28, 66])
OLD_VERSION = "0.13.1"  # the last that saves in this way
SPACE = "fully_sharded_model_space"
OLD = [
    case("space_dp3", world=3, sharding=SPACE, bucket=700, sizes=ODD, tied=False, gated=False),
    case("space_tp2_pp2", world=4, tp=2, pp=2, sharding=SPACE, tied=False),
    case("space_tp2_dp2", world=4, tp=2, sharding=SPACE, sizes=ODD, bf16=False),
    case("space_pp2", world=2, pp=2, sharding=SPACE, adam="torch"),
    case("space_nemo_tp2", world=2, tp=2, sharding=SPACE, program="nemo"),
    case("space_moe_dp2", world=2, sharding=SPACE, moe=True),
    case("space_moe_ep2_dp4", world=4, ep=2, sharding=SPACE, moe=True),
]
BUCKETS = "dp_reshardable"
BUFFERS = "dp_zero_gather_scatter"
FLAT = [
    case("buckets_dp3", world=3, sharding=BUCKETS, bucket=700, tied=False, gated=False),
    case("buckets_tp2_pp2", world=4, tp=2, pp=2, sharding=BUCKETS),
    case("buckets_pp2_vpp2", world=2, pp=2, vpp=2, sharding=BUCKETS),
    case("buckets_moe_ep2_dp4", world=4, ep=2, sharding=BUCKETS, moe=True),
    case("buffers_moe_ep2", world=2, ep=2, sharding=BUFFERS, moe=True),
    case("buffers_tp2_dp2", world=4, tp=2, sharding=BUFFERS, bucket=700, adam="torch", sizes=ODD),
    case("buckets_fp16_dp2", world=2, fp16=True, positions="rope", sharding=BUCKETS, bucket=900),
    case("buckets_frozen_dp2", world=2, sharding=BUCKETS, frozen=r".*self_attention.*"),
]
LEGACY = [
    case("legacy_dp3", world=3, legacy=True, bucket=700, sizes=ODD, tied=False, gated=False),
    case("legacy_tp2_pp2", world=4, tp=2, pp=2, legacy=True),
    case("legacy_not_distributed_tp2", world=2, tp=2, legacy=True, distributed=False, adam="torch"),
    case("legacy_moe_ep2_dp4", world=4, ep=2, legacy=True, moe=True),
    case("legacy_frozen_pp2", world=2, pp=2, legacy=True, frozen=r"embed.*|.*layers\.[02]\..*"),
]
FSDP = case("fsdp_tp2_dp2", world=4, tp=2, fsdp="optim_grads_params", sizes=ODD, tied=False)
MORE_FSDP = [
    case("fsdp_dp1", fsdp="optim_grads_params"),
    case("fsdp_dp3", world=3, fsdp="optim_grads_params", sizes=ODD, gated=False),
    case("fsdp_tp2", world=2, tp=2, fsdp="optim_grads_params"),
    case("fsdp_fp32", world=2, fsdp="optim_grads_params", bf16=False, gated=False),
    case("fsdp_torch_adam", world=2, fsdp="optim_grads_params", adam="torch"),
    case("fsdp_moe_dp2", world=2, fsdp="optim_grads_params", moe=True),
    case("fsdp_moe_ep2", world=2, ep=2, fsdp="optim_grads_params", moe=True),
    case("fsdp_moe_ep2_dp4", world=4, ep=2, fsdp="optim_grads_params", moe=True, tied=False),
    case("fsdp_optim", world=2, fsdp="optim"),
    case("fsdp_optim_grads", world=2, fsdp="optim_grads", bucket=700),
]
NEW_FSDP = [
    case("fsdp_new_tp2_dp2", world=4, tp=2, fsdp="optim_grads_params", sizes=ODD, tied=False),
    case("fsdp_new_torch_adam", world=2, fsdp="optim_grads_params", adam="torch", gated=False),
    case("fsdp_new_moe_ep2", world=2, ep=2, fsdp="optim_grads_params", moe=True),
]
TRAINED = [*READABLE, *FLAT, *LEGACY]
NEW_VERSION = "0.19.2"  # it keeps the common state as an item
NEW = [
    case("new_dp3", world=3, tied=False, gated=False),
    case("new_tp2_pp2", world=4, tp=2, pp=2, tied=False),
    case("new_pp2_vpp2", world=2, pp=2, vpp=2),
    case("new_moe_ep2", world=2, ep=2, moe=True),
    case("new_torch_adam", world=2, adam="torch"),
    case("new_not_distributed_tp2", world=2, tp=2, distributed=False),
    case("new_buckets_tp2_dp2", world=4, tp=2, sharding=BUCKETS, bucket=700),
    case("new_buffers_moe_ep2", world=2, ep=2, moe=True, sharding=BUFFERS),
]
MATRIX = [
    case("legacy_dp1", legacy=True, bf16=False),
    case("legacy_tp2_dp2", world=4, tp=2, legacy=True, bucket=700, adam="torch", gated=False),
    case("legacy_tp4", world=4, tp=4, legacy=True, sizes=WIDE, tied=False),
    case("legacy_pp4", world=4, pp=4, legacy=True),
    case("legacy_pp2_vpp2", world=2, pp=2, vpp=2, legacy=True),
    case("legacy_tp2_pp2_vpp2", world=4, tp=2, pp=2, vpp=2, legacy=True, bf16=False, tied=False),
    case("legacy_not_distributed_vpp2", world=2, pp=2, vpp=2, legacy=True, distributed=False),
    case("legacy_moe_dp2", world=2, legacy=True, moe=True),
    case("legacy_moe_ep4", world=4, ep=4, legacy=True, moe=True, gated=False, bucket=900),
    case("legacy_moe_tp2_ep2", world=4, tp=2, ep=2, legacy=True, moe=True, bf16=False),
    case("legacy_moe_ep2_pp2", world=4, ep=2, pp=2, legacy=True, moe=True),
    case("legacy_moe_ep2_pp2_vpp2", world=4, ep=2, pp=2, vpp=2, legacy=True, moe=True, tied=False),
    case("legacy_moe_not_distributed", world=2, ep=2, legacy=True, moe=True, distributed=False),
    case("legacy_mla_tp2", world=2, tp=2, legacy=True, mla=True),
    case("legacy_norms_tp2", world=2, tp=2, legacy=True, config=NORMS_OF_HEADS),
    case("legacy_shared_experts", world=4, tp=2, ep=2, legacy=True, moe=True, config=SHARED),
    case("legacy_layers_differ", world=4, ep=2, pp=2, legacy=True, moe=True, config=BY_LAYER),
    case("legacy_not_distributed_fp32", legacy=True, distributed=False, bf16=False),
    case("legacy_not_distributed_pp2", world=2, pp=2, legacy=True, distributed=False),
    case("async_tp2", world=2, tp=2, saved="async"),
    case("efficient_dp3", world=3, saved="efficient", tied=False),
    case("release_dp2", world=2, tracker="release"),
    case("fp16_dp3", world=3, fp16=True, sizes=THREE, gated=False),
    case("decoupled_dp2", world=2, tied=False, optimizer=RATES, arguments=RATES),
    case("instances_dp4", world=4, ddp=TWO, grid=TWO),
    case("cp2_tp2", world=4, tp=2, grid={"context_parallel_size": 2}),
    case("moe_layers_differ_etp1", world=2, tp=2, ep=2, etp=1, moe=True, config=BY_LAYER),
    case("biases_tp2_pp2", world=4, tp=2, pp=2, sizes=HEADS, uneven=[2, 3], gated=False),
    case("frozen_embedding", world=2, moe=True, tied=False, frozen="embed.*|.*router.*"),
    case("moe_not_distributed_ep2", world=2, ep=2, moe=True, distributed=False, prefix=True),
    case("legacy_fp16_dp2", world=2, fp16=True, legacy=True, sizes=THREE, positions="rope"),
    case("legacy_decoupled", world=2, legacy=True, optimizer=RATES, arguments=RATES),
    case("legacy_layout", world=2, pp=2, vpp=2, sizes=[5, *SIZES[1:]], legacy=True, config=LAYOUT),
    case("legacy_mla_rms_pp2", world=2, pp=2, legacy=True, mla=True, uneven=[1, 3], config=RMS),
    case("mtp_tp2", world=2, tp=2, **MTP),
    case("mtp_moe_pp2", world=2, pp=2, moe=True, **MTP),
    case("legacy_mtp_tp2_pp2", world=4, tp=2, pp=2, legacy=True, **MTP),
    case("legacy_mtp_ep2", world=2, ep=2, moe=True, legacy=True, **MTP),
    case("buckets_mtp_pp2", world=2, pp=2, sharding=BUCKETS, **MTP),
    case("buffers_mtp_ep2", world=2, ep=2, moe=True, sharding=BUFFERS, **MTP),
    case("bridge_tp2", world=2, tp=2, program="bridge"),
    case("bridge_moe_ep2", world=2, ep=2, program="bridge", sharding=BUCKETS, moe=True),
    case("nemo_pp2", world=2, pp=2, program="nemo", sharding=BUFFERS),
    case("buckets_dp1", sharding=BUCKETS, gated=False),
    case("buckets_dp4", world=4, sharding=BUCKETS, bucket=1100, sizes=ODD),
    case("buckets_tp2_dp2", world=4, tp=2, sharding=BUCKETS, bucket=700, adam="torch", tied=False),
    case("buckets_tp4_fp32", world=4, tp=4, sharding=BUCKETS, sizes=WIDE, bf16=False),
    case("buckets_pp4", world=4, pp=4, sharding=BUCKETS, tied=False),
    case("buckets_moe_dp2", world=2, sharding=BUCKETS, moe=True),
    case("buckets_moe_ep4", world=4, ep=4, sharding=BUCKETS, moe=True, gated=False),
    case("buckets_moe_ep2_pp2", world=4, ep=2, pp=2, sharding=BUCKETS, moe=True),
    case("buckets_moe_tp2_ep2", world=4, tp=2, ep=2, sharding=BUCKETS, moe=True),
    case("buckets_moe_tp2_ep2_etp1", world=2, tp=2, ep=2, etp=1, sharding=BUCKETS, moe=True),
    case("buckets_shared_experts", world=2, ep=2, sharding=BUCKETS, moe=True, config=SHARED),
    case("buckets_layers_differ", world=2, pp=2, sharding=BUCKETS, moe=True, config=BY_LAYER),
    case("buckets_uneven_pp2", world=2, pp=2, uneven=[1, 3], sharding=BUCKETS),
    case("buckets_ends_pp3", world=3, pp=3, config=ENDS, arguments=ENDS, sharding=BUCKETS),
    case("buckets_instances", world=4, ddp=TWO, grid=TWO, sharding=BUCKETS, bucket=700),
    case("buckets_moe_8", world=4, ep=2, moe=True, sizes=THREE, config=MANY, sharding=BUCKETS),
    case("buckets_biases", world=4, tp=2, pp=2, sizes=HEADS, uneven=[2, 3], sharding=BUCKETS),
    case("buffers_frozen_layers", world=2, sharding=BUFFERS, frozen=r".*layers\.[01]\..*"),
    case("buffers_fp16_ep2", world=2, ep=2, moe=True, fp16=True, sharding=BUFFERS),
    case("buffers_dp3", world=3, sharding=BUFFERS, bucket=700, sizes=[3, 20, 4, 2, 28, 61]),
    case("buffers_tp2_pp2", world=4, tp=2, pp=2, sharding=BUFFERS, bf16=False),
    case("buffers_pp2_vpp2", world=2, pp=2, vpp=2, sharding=BUFFERS, bf16=False),
    case("buffers_moe_dp2", world=2, sharding=BUFFERS, moe=True, bucket=900),
]
# `verify --gather` refuses optimizers that know parameters by number, frozen ones in flat buffers,
# latent attention on several tensor ranks, stages of NeMo, whose number no file states, and layers
# of multi-token prediction in flat buffers
WITHOUT_RULE = (
    "legacy_mtp_tp2_pp2",
    "buckets_mtp_pp2",
    "buffers_mtp_ep2",
    "buckets_frozen_dp2",
    "buffers_frozen_layers",
    "legacy_frozen_pp2",
    "legacy_mla_tp2",
    "nemo_pp2",
    "legacy_moe_not_distributed",
    "legacy_not_distributed_tp2",
    "legacy_not_distributed_fp32",
    "legacy_not_distributed_pp2",
    "legacy_not_distributed_vpp2",
)
LEGACY_RESUMED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("legacy_moe_dp2", {"ep": 2}, {"world": 2, "ep": 2}),
    ("legacy_moe_dp2", {}, {"world": 2, "pp": 2}),
    ("legacy_not_distributed_pp2", {}, {"world": 2, "tp": 2}),
    ("legacy_dp1", {}, {"world": 2, "tp": 2}),
    ("legacy_pp2_vpp2", {}, {"world": 2, "tp": 2}),
    ("legacy_tp2_pp2_vpp2", {}, {"world": 1}),
    ("bridge_tp2", {}, {"world": 2, "tp": 2}),  # the same grid
    ("bridge_moe_ep2", {"ep": 1}, {"world": 2, "pp": 2}),
    ("nemo_pp2", {}, {"world": 2}),
    ("legacy_moe_ep4", {}, {"world": 4, "ep": 2, "pp": 2}),
    ("legacy_moe_tp2_ep2", {"ep": 4}, {"world": 4, "ep": 4}),
    ("legacy_mla_tp2", {}, {"world": 2, "pp": 2}),
    ("legacy_norms_tp2", {}, {"world": 2, "pp": 2}),
    ("legacy_shared_experts", {"ep": 1}, {"world": 2, "tp": 2}),
    ("legacy_layers_differ", {"ep": 1}, {"world": 2, "tp": 2}),
    ("buckets_layers_differ", {"ep": 2}, {"world": 4, "ep": 2, "pp": 2}),
    ("release_dp2", {}, {"world": 2, "tp": 2}),
    ("fp16_dp3", {}, {"world": 3, "pp": 3}),
    ("decoupled_dp2", {}, {"world": 2, "tp": 2}),
    ("legacy_layout", {}, {"world": 2, "tp": 2, "config": {}}),
    ("frozen_embedding", {"ep": 2}, {"world": 2, "ep": 2}),
    ("buckets_moe_8", {"ep": 1}, {"world": 3, "pp": 3}),
    ("mtp_tp2", {}, {"world": 2, "pp": 2}),
    ("mtp_moe_pp2", {"ep": 2}, {"world": 2, "ep": 2}),
    ("buckets_mtp_pp2", {}, {"world": 2, "tp": 2}),
]
# sources of other releases, loaded by this one
BETWEEN_RELEASES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("space_dp3", {}, {"world": 2, "tp": 2}),
    ("space_tp2_pp2", {}, {"world": 2}),
    ("space_pp2", {}, {"world": 2, "tp": 2, "adam": "fused"}),
    ("space_moe_ep2_dp4", {"ep": 1}, {"world": 2}),
    ("space_nemo_tp2", {}, {"world": 2, "pp": 2}),
    ("new_dp3", {}, {"world": 2, "tp": 2}),
    ("new_moe_ep2", {"ep": 1}, {"world": 2, "pp": 2}),
    ("new_buckets_tp2_dp2", {}, {"world": 1}),
]
# what NEW_VERSION loads: of 0.13.1, of 0.16.1, of its own
LOADED_BY_NEW: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("space_dp3", {}, {"world": 1}),
    ("space_tp2_pp2", {}, {"world": 2, "tp": 2}),
    ("space_moe_ep2_dp4", {"ep": 1}, {"world": 2}),
    ("legacy_moe_dp2", {"ep": 2}, {"world": 2, "ep": 2}),
    ("buckets_pp4", {}, {"world": 2, "pp": 2, "vpp": 2}),
    ("buffers_dp3", {}, {"world": 1}),
    ("new_dp3", {}, {"world": 2}),
    ("new_tp2_pp2", {}, {"world": 2, "tp": 2}),
    ("new_pp2_vpp2", {}, {"world": 1}),
    ("new_moe_ep2", {"ep": 1}, {"world": 2}),
    ("new_not_distributed_tp2", {}, {"world": 2, "pp": 2}),
    ("new_buffers_moe_ep2", {}, {"world": 4, "ep": 2}),
]
# the source's own directory, loaded as it is: nothing in it depends on dp
LEGACY_LOADED: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("legacy_dp3", {}, {"world": 1, "bucket": 700}),
    ("legacy_dp3", {}, {"world": 2, "bucket": 700}),
]


def name_of(resumed: tuple[str, dict[str, Any], dict[str, Any]]) -> str:
    """A folder's name for a source, its options, and the run that loads."""
    source, options, run = resumed
    return "-".join([source, *(f"{key}{value}" for key, value in (*options.items(), *run.items()))])


def loading(resumed: tuple[str, dict[str, Any], dict[str, Any]], path: Path) -> dict[str, Any]:
    """The case of a run that loads `path`, which was written from the source: the same model."""
    source, _, run = resumed
    every = [*TRAINED, CORRUPT, *MATRIX, *OLD, *NEW]
    like = next(case for case in every if case["name"] == source)
    model = {key: like[key] for key in MODEL}
    return case(name_of(resumed), **{**model, **run, "load": str(path)})


def site(version: str = VERSION) -> Path:
    """The folder with Megatron-Core, which is installed there if it is missing."""
    folder = ROOT / ".venv-megatron" / ("site" if version == VERSION else version)
    if not (folder / f"megatron_core-{version}.dist-info").is_dir():
        install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
        install += ["--target", str(folder)]
        package, options = f"megatron-core=={version}", []
        if version == NEW_VERSION:  # it runs with Python 3.11 too, and imports triton
            subprocess.run([*install, "triton==3.9.0"], check=True)
            options = ["--ignore-requires-python", "--python-version", "3.12"]
            options += ["--only-binary", ":all:"]
        subprocess.run([*install, *options, package], check=True)
    return folder


def start(module: str, root: Path, given: Any, seconds: float, version: str = VERSION) -> None:
    """Runs `main` of a module of this package beside Megatron-Core, with a file of what is given.

    Raises AssertionError with the end of its output if it fails.
    """
    file, log = root / "given.json", root / "log"
    file.write_text(json.dumps(given))
    paths = os.pathsep.join([str(ROOT), str(site(version))])
    code = f"from tests.engines.{module} import main; main()"
    with log.open("w") as output:
        ended = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", code, str(file), str(root)],
            env={**os.environ, "PYTHONPATH": paths, "TORCHINDUCTOR_COMPILE_THREADS": "1"},
            stdout=output,
            stderr=output,
            timeout=seconds,
            check=False,
        )
    assert ended.returncode == 0, log.read_text()[-3000:]


def train(cases: Sequence[dict[str, Any]], root: Path, version: str = VERSION) -> None:
    """Trains every case, and saves it into a folder of `root`."""
    (root / "cases.json").write_text(json.dumps(list(cases)))
    start("megatron_rank", root, list(cases), 60 * len(cases), version)


def expected(folder: Path, when: str = "rank") -> tuple[dict[str, torch.Tensor], set[float]]:
    """What all ranks held, as whole tensors by `name/slot`, and the steps that they counted.

    `when` is "next" for what they held one update later.

    Tensor-parallel parts are joined along the axis that Megatron-Core states for them; the two
    halves of a gated `linear_fc1` are joined apart. An element that no rank held is NaN. Ranks of
    Megatron-FSDP have no whole weights, so there are none.
    """
    parts = [
        part
        for file in sorted(folder.glob(f"{when}-*.pt"))
        for part in torch.load(file, weights_only=True)
    ]
    gated = json.loads((folder.parent / "cases.json").read_text())
    swiglu = next(item["gated"] for item in gated if item["name"] == folder.name)
    locals_: dict[tuple[str, str], dict[int, torch.Tensor]] = {}
    axes: dict[str, int] = {}
    for part in parts:
        rank = part["tp_rank"] if part["axis"] >= 0 else 0
        axes[part["name"]] = part["axis"]
        if part["weight"] is not None:
            weights = locals_.setdefault((part["name"], "param"), {})
            known = weights.setdefault(rank, part["weight"])
            assert torch.equal(known, part["weight"]), f"copies of {part['name']} differ"
        for key, values in part["tensors"].items():
            ranks = locals_.setdefault((part["name"], SLOTS.get(key, key)), {})
            whole = ranks.setdefault(rank, torch.full(part["shape"], torch.nan))
            own = whole.view(-1)[part["start"] : part["start"] + values.numel()]
            assert torch.equal(own[~own.isnan()], values[~own.isnan()]), f"{part['name']}: {key}"
            own.copy_(values)
    tensors = {}
    for (name, slot), ranks in locals_.items():
        pieces, axis = [ranks[rank] for rank in sorted(ranks)], max(axes[name], 0)
        if swiglu and "linear_fc1" in name:
            halves = [piece.chunk(2, axis) for piece in pieces]
            pieces = [half[side] for side in (0, 1) for half in halves]
        tensors[f"{name}/{slot}"] = torch.cat(pieces, axis) if len(pieces) > 1 else pieces[0]
    return tensors, {float(part["step"]) for part in parts if part["step"] is not None}
