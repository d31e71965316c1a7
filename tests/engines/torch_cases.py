"""Which trainings with PyTorch's own means are worth checking: one row per form of a checkpoint.

FSDP takes no 0-dim parameter (torch 2.13, both kinds: "doesn't support scalar parameters"); it is
left out of the sharding (`ignored_params`, `ignored_states`) and is a plain tensor on every rank.

What torch loads at any number of ranks gives the same state bit by bit, and losses within 1e-4;
bfloat16 models give other losses at other numbers of ranks, since their gradients are rounded.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch.distributed.checkpoint.filesystem import SerializationFormat


@dataclass(frozen=True)
class Case:
    """One training run, at each of `worlds`."""

    name: str
    engine: str = "fsdp2"  # a key of torch_rank.ENGINES
    layout: str = "nested"  # what is saved: a key of torch_layouts.LAYOUTS
    worlds: tuple[int, ...] = (1, 2, 4)
    model: str = "scalar"  # a key of models.VARIANTS
    groups: int = 2  # 1 to 4, see models.named_groups; with fsdp1_flat always 2
    frozen_in_groups: bool = False  # hand frozen parameters to the optimizer as well
    optimizer: str = "adamw"  # a key of optimizers.FACTORIES
    scheduler: bool = False  # a LambdaLR, which adds `initial_lr` to the groups
    dtype: str = "fp32"  # of the module: "fp32" or "bf16"; there are no other masters
    mesh: tuple[int, ...] | None = None  # 2 x 2: (replicate, shard), or (dp, tp) with `parallel`
    parallel: bool = False  # tensor parallel in the second dimension of the mesh
    inner: bool = False  # some weights are Shard(1)
    writer: Mapping[str, Any] = field(default_factory=dict)  # arguments of FileSystemWriter
    seed: int = 7
    steps: int = 3  # trained before saving
    package: str | None = None  # what saves, unless it is torch
    late: str = ""  # the submodule that is frozen until the last of these steps
    reload: str = "exact"  # what torch makes of its own files: "exact", "same world" (refused at
    # others), "refused", "weights" (no optimizer in them)


TWO_BY_TWO: dict[str, Any] = {"worlds": (4,), "mesh": (2, 2)}
SAFETENSORS = SerializationFormat.SAFETENSORS

FSDP2 = [
    Case("fsdp2_dcp"),
    Case("fsdp2_flat", layout="flat"),
    Case("fsdp2_raw", layout="raw"),
    Case("fsdp2_app", layout="app"),
    Case("fsdp2_titan", layout="titan", scheduler=True),
    Case("fsdp2_full", layout="full"),
    Case("fsdp2_local", layout="ranks", reload="same world"),
    Case("fsdp2_bf16", dtype="bf16"),
    Case("fsdp2_hsdp", **TWO_BY_TWO),
    Case("fsdp2_hsdp_local", layout="ranks", reload="same world", **TWO_BY_TWO),
    Case("fsdp2_inner", model="even", inner=True),
    Case("fsdp2_inner_local", model="even", inner=True, layout="ranks", reload="same world"),
    Case("fsdp2_2d", parallel=True, **TWO_BY_TWO),
    Case("fsdp2_2d_local", parallel=True, layout="ranks", reload="same world", **TWO_BY_TWO),
    # FSDP2 refuses parameters that are not contiguous; a buffer need not be.
    Case("fsdp2_strided", model="strided"),
    Case("fsdp2_three_groups", groups=3),
    Case("fsdp2_one_group", groups=1, layout="raw"),
    Case("fsdp2_frozen_in_groups", frozen_in_groups=True),
    Case("fsdp2_raw_frozen_in_groups", frozen_in_groups=True, layout="raw"),
    Case("fsdp2_scheduler", scheduler=True),
    Case("fsdp2_flat_scheduler", layout="flat", scheduler=True),
    Case("fsdp2_as_deepspeed", model="full"),  # trained like the DeepSpeed cases z*_as_torch
]

WRITERS = [
    Case("fsdp2_threads", writer={"thread_count": 2}),
    Case("fsdp2_many_files", writer={"single_file_per_rank": False}),
    Case("fsdp2_async", layout="async"),
    # safetensors refuses tied weights, the consolidation of torch 2.13 integers.
    # Its FileSystemReader takes every item for a file of torch.save.
    Case(
        "fsdp2_safetensors",
        model="scalar plain",
        writer={"serialization_format": SAFETENSORS},
        reload="refused",
    ),
    Case("fsdp2_folders", layout="folders"),
    Case("fsdp2_automodel", layout="automodel", model="scalar plain", scheduler=True),
    Case("hf_sharded", layout="hf sharded", model="scalar plain", reload="weights"),
    Case("hf_consolidated", layout="hf consolidated", model="floats", reload="weights"),
]

# One file of each item per rank; its safetensors files are slices of tensors, and say no more.
ITEMS: dict[str, Any] = {"package": "torch_checkpointing"}
TORCH_CHECKPOINTING = [
    Case("fsdp2_items", layout="items", scheduler=True, **ITEMS),
    Case("fsdp2_flat_items", layout="items", writer={"flat": True}, **ITEMS),
    Case("fsdp2_hsdp_items", layout="items", **ITEMS, **TWO_BY_TWO),
    Case("fsdp2_bare_items", layout="bare items", model="scalar plain", **ITEMS),
]

# They keep their step in groups. Trained like the DeepSpeed cases z*_as_torch.
IN_GROUPS = [
    Case("fsdp2_ademamix", model="full", optimizer="ademamix"),
    Case("fsdp2_apex", model="full", optimizer="apex fused adam"),
]

# `capturable` needs a GPU.
OPTIMIZERS = [
    Case(f"fsdp2_{name.replace(' ', '_')}", optimizer=name)
    for name in (
        "adam",
        "amsgrad",
        "nadam",
        "rmsprop",
        "adagrad",
        "sgd",
        "momentum",
        "tensor lr",
        "torch fused adamw",
    )
]

STEPS = [
    # The state dict helpers of torch take a step without effect: `step` is 1, moments are zero.
    Case("never_stepped", steps=0),
    Case("never_stepped_raw", layout="raw", steps=0, reload="refused"),
    Case("never_stepped_ddp", "plain", layout="one file", steps=0),
    # Those helpers also want a state for every parameter, so `partial` is needed to load.
    Case("fsdp2_unused", model="unused", reload="refused"),
    Case("ddp_unused", "plain", layout="one file", model="unused"),
]

FSDP1 = [
    Case("fsdp1_dcp", "fsdp1"),
    Case("fsdp1_flat", "fsdp1_flat"),
    Case("fsdp1_sharded_pt", "fsdp1", layout="sharded ranks", reload="same world"),
    Case("fsdp1_flat_sharded_pt", "fsdp1_flat", layout="sharded ranks", reload="same world"),
    Case("fsdp1_full", "fsdp1", layout="full"),
    Case("fsdp1_flat_full", "fsdp1_flat", layout="full"),
    Case("fsdp1_local", "fsdp1", layout="local ranks", reload="refused"),
    Case("fsdp1_flat_local", "fsdp1_flat", layout="local ranks", reload="same world"),
    # With a mesh the tensors are DTensors.
    Case("fsdp1_hsdp", "fsdp1", **TWO_BY_TWO),
    Case("fsdp1_hsdp_local", "fsdp1", layout="sharded ranks", reload="same world", **TWO_BY_TWO),
    Case("fsdp1_lightning", "fsdp1", layout="lightning", scheduler=True),
    Case("fsdp1_scheduler", "fsdp1", scheduler=True),
]

PLAIN = [
    Case("zro", "zro", layout="files"),
    Case("zro_ranks", "zro", layout="zro ranks", reload="same world"),
    Case("zro_three_groups", "zro", layout="files", groups=3),
    Case("zro_ranks_three_groups", "zro", layout="zro ranks", groups=3, reload="same world"),
    Case("ddp", "plain", layout="one file"),
    Case("ddp_files", "plain", layout="files", scheduler=True),
    Case("ddp_prefixed", "plain", layout="prefixed file"),
    Case("ddp_compiled", "plain", layout="compiled file", worlds=(1, 2)),
    Case("ddp_bf16", "plain", layout="one file", dtype="bf16"),
    Case("ddp_strided", "plain", layout="one file", model="strided"),
    Case("ddp_dcp_strided", "plain", model="strided"),
    Case("ddp_frozen_in_groups", "plain", layout="one file", frozen_in_groups=True),
]

CASES: dict[str, Case] = {
    case.name: case
    for case in (
        *FSDP2,
        *WRITERS,
        *TORCH_CHECKPOINTING,
        *IN_GROUPS,
        *OPTIMIZERS,
        *STEPS,
        *FSDP1,
        *PLAIN,
    )
}
