"""Which trainings are worth checking: one row per way an engine lays out a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Extensions of the engine that are compiled on first use (about a minute each, kept per user).
EXTENSIONS = {
    "deepspeed fused adam": "FusedAdamBuilder",
    "deepspeed fused lamb": "FusedLambBuilder",
    "deepspeed cpu adam": "CPUAdamBuilder",
    "deepspeed cpu adam narrow": "CPUAdamBuilder",
    "deepspeed cpu lion": "CPULionBuilder",
}


@dataclass(frozen=True)
class Case:
    """One training run; the default test run takes the first case of each kind."""

    name: str
    kind: str
    stage: int
    dp: int  # all ranks, also those that share a sequence
    dtype: str = "bf16"  # of the module: "bf16", "fp16" or "fp32"
    optimizer: str = "adamw"  # a key of optimizers.FACTORIES, or "config": the engine makes it
    model: str = "full"  # a key of models.VARIANTS
    groups: int = 2  # 1 to 4, see models.parameter_groups
    config: Mapping[str, Any] = field(default_factory=dict)  # merged into the engine's config
    seed: int = 7
    steps: int = 3  # trained before saving
    save: Mapping[str, Any] = field(default_factory=dict)  # arguments of save_checkpoint
    client_state: bool = False  # save values that only a careful reader survives
    scheduler: bool = False  # a LambdaLR of the user; the engine's own are made by `config`
    load: Mapping[str, Any] = field(default_factory=dict)  # arguments of load_checkpoint
    base: bool = False  # frozen weights are of a pretrained model: the same in every engine
    sp: int = 1  # ranks that share a sequence (Ulysses)
    reload: str = "exact"  # what the engine makes of its own files: "exact", "differs", "refused"

    @property
    def extension(self) -> str | None:
        """The engine's extension that needs a C++ compiler, or None."""
        made = self.config.get("optimizer", {}) if self.optimizer == "config" else {}
        if made.get("type") in ("Adam", "AdamW") and not made["params"].get("torch_adam"):
            offloads = "offload_optimizer" in self.config.get("zero_optimization", {})
            return "CPUAdamBuilder" if offloads else "FusedAdamBuilder"
        return "FusedLambBuilder" if made.get("type") == "Lamb" else EXTENSIONS.get(self.optimizer)


def zero(**options: Any) -> dict[str, Any]:
    return {"zero_optimization": options}


OFFLOAD = zero(offload_optimizer={"device": "cpu"})
BF16_OPTIMIZER = {"data_types": {"grad_accum_dtype": "fp32"}}
NARROW_MASTERS = {"bf16": {"bf16_master_weights_and_grads": True}}
NARROW_STATES = {"bf16": {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
FP16_MASTERS = {"fp16": {"fp16_master_weights_and_grads": True, "initial_scale_power": 8}}
WARMUP = {
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 6, "warmup_max_lr": 0.01}}
}
DYNAMIC_SCALE = {"fp16": {"initial_scale_power": 10, "hysteresis": 1, "loss_scale_window": 2}}
OVERFLOW = {"fp16": {"initial_scale_power": 20, "hysteresis": 1}}
UNCLIPPED = {"gradient_clipping": 0.0}  # by default the engine clips to 1.0, torch does not
STATIC_SCALE = {"fp16": {"loss_scale": 128.0}}


def elastic(kind: str, torch_adam: bool = False, offloads: bool = False) -> dict[str, Any]:
    """An engine that makes its own optimizer and writes elastic checkpoints."""
    params = {"lr": 0.01, "betas": [0.8, 0.95], "weight_decay": 0.1}
    params |= {"torch_adam": True} if torch_adam else {}
    place = {"offload_optimizer": {"device": "cpu"}} if offloads else {}
    return {"optimizer": {"type": kind, "params": params}, **zero(elastic_checkpoint=True, **place)}


MUON = {
    "optimizer": {
        "type": "Muon",
        "params": {"lr": 0.01, "momentum": 0.9, "weight_decay": 0.1, "torch_adam": True},
    }
}

PLAIN = [
    Case(f"z{stage}_dp{dp}_bf16", f"stage {stage}", stage, dp)
    for dp in (2, 1, 3, 4)
    for stage in (1, 2, 3)
]

GROUPS = [
    Case("z1_dp2_three_groups", "groups", 1, 2, groups=3),
    Case("z2_dp3_three_groups", "groups", 2, 3, groups=3, config={"gradient_clipping": 1.0}),
    Case("z3_dp3_three_groups", "groups stage 3", 3, 3, groups=3),
    Case("z2_dp2_one_group", "one group", 2, 2, groups=1),
    Case("z3_dp2_one_group", "one group", 3, 2, groups=1),
    Case("z1_dp4_only_padding", "only padding", 1, 4, groups=4),
    Case("z2_dp8_only_padding", "only padding", 2, 8, groups=4),
    Case("z3_dp4_only_padding", "only padding", 3, 4, groups=4),
    Case("z1_dp12_many_ranks", "many ranks", 1, 12, groups=4, steps=1),
    Case("z3_dp12_many_ranks", "many ranks", 3, 12, steps=1),
]

PRECISION = [
    *(
        Case(f"z1_dp{dp}_bf16_optimizer", "BF16_Optimizer", 1, dp, config=BF16_OPTIMIZER)
        for dp in (2, 1, 3)
    ),
    Case("z1_dp4_bf16_optimizer_padding", "BF16_Optimizer", 1, 4, groups=4, config=BF16_OPTIMIZER),
    *(Case(f"z{stage}_dp2_fp32", "fp32", stage, 2, "fp32") for stage in (1, 2, 3)),
    *(
        Case(f"z{stage}_dp2_as_torch", "fp32", stage, 2, "fp32", config=UNCLIPPED)
        for stage in (1, 2, 3)
    ),
    Case("z1_dp2_fp16_static", "fp16", 1, 2, "fp16", config=STATIC_SCALE),
    Case("z2_dp2_fp16_dynamic", "fp16", 2, 2, "fp16", config=DYNAMIC_SCALE),
    Case("z3_dp2_fp16_dynamic", "fp16", 3, 2, "fp16", config=DYNAMIC_SCALE),
    Case("z2_dp2_fp16_skipped", "fp16 skipped", 2, 2, "fp16", config=OVERFLOW, steps=12),
    Case("z3_dp3_fp16_skipped", "fp16 skipped", 3, 3, "fp16", config=OVERFLOW, steps=12),
    *(
        Case(f"z{stage}_dp2_narrow_states", "narrow states", stage, 2, config=NARROW_STATES)
        for stage in (1, 2, 3)
    ),
]

OPTIMIZERS = [
    *(
        Case(f"z{stage}_dp3_{name.replace(' ', '_')}", name, stage, 3, optimizer=name)
        for name in ("adam", "amsgrad", "nadam", "rmsprop", "sgd", "momentum", "lion", "fused adam")
        for stage in (2, 3)
    ),
    Case("z1_dp2_nadam", "nadam", 1, 2, optimizer="nadam"),
    Case("z1_dp2_lion", "lion", 1, 2, optimizer="lion"),
    Case("z1_dp2_lion_bf16_optimizer", "lion", 1, 2, optimizer="lion", config=BF16_OPTIMIZER),
    *(Case(f"z{stage}_dp2_odd", "odd", stage, 2, optimizer="odd") for stage in (2, 1, 3)),
    *(
        Case(f"z{stage}_dp4_odd_padding", "odd padding", stage, 4, optimizer="odd", groups=4)
        for stage in (2, 3)
    ),
    Case("z2_dp2_adagrad", "adagrad", 2, 2, optimizer="adagrad", groups=1),
    Case("z2_dp2_apex_fused_adam", "apex", 2, 2, optimizer="apex fused adam"),
    Case("z2_dp2_muon", "muon", 2, 2, optimizer="config", config=MUON),
    Case("z1_dp3_muon", "muon", 1, 3, optimizer="config", config=MUON),
    Case("z2_dp8_muon", "muon", 2, 8, optimizer="config", config=MUON),
    Case(
        "z1_dp3_muon_bf16_optimizer",
        "muon BF16_Optimizer",
        1,
        3,
        model="matrices",
        optimizer="config",
        config={**MUON, **BF16_OPTIMIZER},
    ),
    Case(
        "z2_dp3_muon_offload", "muon offload", 2, 3, optimizer="config", config={**MUON, **OFFLOAD}
    ),
    Case(
        "z3_dp2_muon",
        "muon stage 3",
        3,
        2,
        optimizer="config",
        config={**MUON, **zero(reduce_scatter=False)},
    ),
    Case(
        "z2_dp2_fused_adam_compiled", "fused adam compiled", 2, 2, optimizer="deepspeed fused adam"
    ),
    Case(
        "z3_dp2_fused_adam_compiled", "fused adam compiled", 3, 2, optimizer="deepspeed fused adam"
    ),
    *(
        Case(
            f"z{stage}_dp2_offload_cpu_adam",
            "cpu adam compiled",
            stage,
            2,
            optimizer="deepspeed cpu adam",
            config=OFFLOAD,
        )
        for stage in (1, 2, 3)
    ),
    Case("z2_dp2_cpu_lion", "cpu lion compiled", 2, 2, optimizer="deepspeed cpu lion"),
    # Loading rounds the fp32 moments to the precision of the masters, as torch does.
    Case(
        "z2_dp2_narrow_masters",
        "narrow masters compiled",
        2,
        2,
        optimizer="deepspeed cpu adam",
        config={**OFFLOAD, **NARROW_MASTERS},
        reload="differs",
    ),
    Case(
        "z3_dp2_narrow_masters",
        "narrow masters compiled",
        3,
        2,
        optimizer="deepspeed cpu adam",
        config={**OFFLOAD, **NARROW_MASTERS},
        reload="differs",
    ),
    Case(
        "z2_dp2_fp16_masters",
        "narrow masters compiled",
        2,
        2,
        "fp16",
        optimizer="deepspeed cpu adam",
        config={**OFFLOAD, **FP16_MASTERS},
        reload="differs",
    ),
    Case(
        "z2_dp2_narrow_offload",
        "narrow masters compiled",
        2,
        2,
        optimizer="deepspeed cpu adam narrow",
        config={**OFFLOAD, **NARROW_STATES},
    ),
]

LAYOUTS = [
    *(
        Case(
            f"z{stage}_dp{dp}_round_robin",
            f"round robin stage {stage}",
            stage,
            dp,
            groups=3,
            config=zero(round_robin_gradients=True),
        )
        for stage in (2, 1)
        for dp in (2, 3)
    ),
    *(
        Case(
            f"z{stage}_dp{dp}_aligned",
            "parameter alignment",
            stage,
            dp,
            groups=3,
            config=zero(parameter_alignment=True),
        )
        for stage, dp in ((2, 3), (1, 2))
    ),
    Case(
        "z2_dp2_aligned_fp32",
        "parameter alignment",
        2,
        2,
        "fp32",
        config=zero(parameter_alignment=True),
    ),
    Case(
        "z2_dp3_aligned_round_robin",
        "aligned round robin",
        2,
        3,
        config=zero(parameter_alignment=True, round_robin_gradients=True),
    ),
    *(
        # Without a step in the groups the engine cannot read its own elastic files.
        Case(
            f"z{stage}_dp2_elastic{'_' if name else ''}{name}",
            f"elastic {name}".strip(),
            stage,
            2,
            optimizer="config" if name else "adamw",
            config=config,
            reload="exact" if name in ("adam", "adamw") else "refused",
        )
        for name, config in (
            ("", zero(elastic_checkpoint=True)),
            ("adam", elastic("Adam")),
            ("adamw", elastic("AdamW")),
            ("torch_adam", elastic("Adam", torch_adam=True)),
            ("cpu_adam", elastic("AdamW", offloads=True)),
        )
        for stage in (2, 1)
    ),
    Case(
        "z2_dp3_elastic_apex",
        "elastic step",
        2,
        3,
        optimizer="apex fused adam",
        config=zero(elastic_checkpoint=True),
    ),
    *(
        Case(
            f"z3_dp{dp}_sub_groups", "sub-groups", 3, dp, groups=3, config=zero(sub_group_size=150)
        )
        for dp in (3, 2)
    ),
    Case(
        "z3_dp2_sub_groups_nadam",
        "sub-groups",
        3,
        2,
        optimizer="nadam",
        config=zero(sub_group_size=150),
    ),
    Case(
        "z3_dp2_sub_groups_fused_adam",
        "sub-groups",
        3,
        2,
        optimizer="fused adam",
        config=zero(sub_group_size=150),
    ),
    Case(
        "z3_dp2_persistent",
        "persistent",
        3,
        2,
        config=zero(stage3_param_persistence_threshold=100_000),
    ),
    Case(
        "z3_dp2_not_persistent",
        "persistent",
        3,
        2,
        config=zero(stage3_param_persistence_threshold=0),
    ),
    Case("z3_dp4_hpz", "hpz", 3, 4, model="plain", config=zero(zero_hpz_partition_size=2)),
    # After loading, the second copies of frozen weights that hpZ keeps are still the initial ones.
    Case(
        "z3_dp4_hpz_frozen", "hpz", 3, 4, config=zero(zero_hpz_partition_size=2), reload="differs"
    ),
    *(Case(f"z{stage}_dp2_offload", "offload", stage, 2, config=OFFLOAD) for stage in (2, 1, 3)),
]

MODELS = [
    *(Case(f"z{stage}_dp2_plain", "plain", stage, 2, model="plain") for stage in (2, 3)),
    *(Case(f"z{stage}_dp3_unused", "unused", stage, 3, model="unused") for stage in (2, 3)),
    *(Case(f"z{stage}_dp2_strided", "strided", stage, 2, model="strided") for stage in (2, 1, 3)),
    *(
        Case(
            f"z{stage}_dp2_no_frozen",
            "no frozen",
            stage,
            2,
            save={"exclude_frozen_parameters": True},
            load={"load_module_strict": False},
            base=True,
        )
        for stage in (2, 1, 3)
    ),
]

FUSED = "deepspeed fused adam"  # the only optimizer that gets FP16_Optimizer here
ADAM = {"optimizer": {"type": "Adam", "params": {"lr": 0.01, "betas": [0.8, 0.95]}}}

WITHOUT_ZERO = [
    *(Case(f"z0_dp{dp}_fp32", "stage 0 fp32", 0, dp, "fp32") for dp in (2, 1)),
    *(Case(f"z0_dp{dp}_bf16", "stage 0 bf16", 0, dp) for dp in (2, 1)),
    Case("z0_dp2_fp16_dynamic", "stage 0 fp16", 0, 2, "fp16", config=DYNAMIC_SCALE),
    Case("z0_dp2_fp16_static", "stage 0 fp16", 0, 2, "fp16", config=STATIC_SCALE),
    Case("z0_dp2_fp16_skipped", "stage 0 fp16", 0, 2, "fp16", config=OVERFLOW, steps=12),
    *(
        Case(f"z0_dp{dp}_fused_bf16", "stage 0 fused compiled", 0, dp, optimizer=FUSED)
        for dp in (2, 1)
    ),
    Case("z0_dp2_fused_fp32", "stage 0 fused compiled", 0, 2, "fp32", optimizer=FUSED),
    Case("z0_dp2_adam_fp32", "stage 0 Adam", 0, 2, "fp32", optimizer="config", config=ADAM),
    Case(
        "z0_dp2_fused_fp16",
        "stage 0 fused compiled",
        0,
        2,
        "fp16",
        optimizer=FUSED,
        config=DYNAMIC_SCALE,
    ),
    *(
        Case(f"z0_dp2_{name}_{dtype}", f"stage 0 {name}", 0, 2, dtype, optimizer=name)
        for name in ("nadam", "momentum", "sgd", "lion", "odd", "lamb")
        for dtype in ("bf16", "fp32")
    ),
    *(
        Case(f"z0_dp2_{model}_{dtype}", f"stage 0 {model}", 0, 2, dtype, model=model)
        for model in ("unused", "strided", "plain")
        for dtype in ("bf16", "fp32")
    ),
    Case("z0_dp2_adafactor_bf16", "stage 0 adafactor", 0, 2, optimizer="adafactor"),
    Case("z0_dp1_unused_fp32", "stage 0 unused", 0, 1, "fp32", model="unused"),
    Case("z0_dp2_one_group", "stage 0 groups", 0, 2, groups=1),
    Case("z0_dp3_three_groups", "stage 0 groups", 0, 3, "fp32", groups=3),
    Case("z0_dp2_lambda", "stage 0 scheduler", 0, 2, scheduler=True),
    Case("z0_dp2_client_state", "stage 0 client state", 0, 2, client_state=True),
]

EXTRAS = [
    *(
        Case(
            f"z{stage}_dp2_client_state",
            "client state",
            stage,
            2,
            client_state=True,
            save={"tag": "my tag"},
        )
        for stage in (2, 3)
    ),
    Case("z2_dp2_warmup", "engine scheduler", 2, 2, config=WARMUP),
    Case("z3_dp2_warmup", "engine scheduler", 3, 2, config=WARMUP),
    Case("z2_dp2_lambda", "user scheduler", 2, 2, scheduler=True),
    Case("z3_dp2_lambda", "user scheduler", 3, 2, scheduler=True),
]

SEQUENCES = [
    Case("z2_dp2_sp2_fp32", "sequence parallelism", 2, 2, "fp32", sp=2),
    Case("z3_dp2_sp2_fp32", "sequence parallelism", 3, 2, "fp32", sp=2),
    Case("z1_dp4_sp2_fp32", "sequence parallelism", 1, 4, "fp32", sp=2),
    Case("z3_dp4_sp2_fp32", "sequence parallelism", 3, 4, "fp32", sp=2),
]

CASES: dict[str, Case] = {
    case.name: case
    for case in (*PLAIN, *GROUPS, *PRECISION, *OPTIMIZERS, *LAYOUTS, *MODELS, *EXTRAS, *SEQUENCES)
}
STAGE_0: dict[str, Case] = {case.name: case for case in WITHOUT_ZERO}
