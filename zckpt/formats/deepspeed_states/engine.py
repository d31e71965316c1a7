"""The engine that a target is written for: its ZeRO stage, weight type and ds_config."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...core.checkpoint.facts import FlatBufferEngine, layers_of
from ...core.checkpoint.inert import nested
from ...core.checkpoint.manifest import Manifest
from ...errors import WrongOption
from ...training.options import DP, LIKE, SP, Options
from .options import CONFIG, NAMES, OLDER_NAMES, STAGE
from .states import version_numbers

SUB_GROUP_SIZE = 10**9  # elements, the engine's default
FLOAT_NAMES = {"fp32": "F32", "float32": "F32", "float": "F32", "bf16": "BF16", "bfloat16": "BF16"}


class TargetEngine:
    """The engine that will load the target: its ZeRO stage, its weights' dtype and its ds_config.

    The source's values are kept unless the options replace them. `before` is the source's engine,
    or None if no DeepSpeed run saved the source. Raises WrongOption if options and ds_config
    contradict each other.
    """

    def __init__(self, source: Manifest, options: Options) -> None:
        self.options = options
        self.before = source.run.engine if isinstance(source.run.engine, FlatBufferEngine) else None
        config: Mapping[str, Any] | None = options[CONFIG]
        if config is None and self.before is not None:
            config = self.before.config
        self.has_config = config is not None
        for key in ("zero_optimization", "bf16", "bfloat16", "fp16", "optimizer", "data_types"):
            if not isinstance((config or {}).get(key, {}), (dict, type(None))):
                raise WrongOption("ds-config-wrong", f"the ds_config's {key} is not a JSON object")
        if nested(config, "zero_optimization", "offload_optimizer", "device") == "nvme":
            raise WrongOption(
                "ds-config-wrong",
                "the ds_config offloads optimizer states to NVMe, which zckpt does not write yet",
            )
        tp = 1 if source.place is None else source.place.grid.tp
        for what, size, largest in (
            ("mics_shard_size", nested(config, "zero_optimization", "mics_shard_size"), 0),
            ("autotp_size", nested(config, "tensor_parallel", "autotp_size"), tp),
        ):
            if isinstance(size, int) and size > largest:
                raise WrongOption(
                    "ds-config-wrong",
                    f"the ds_config sets {what} {size}: zckpt does not write files for that",
                )
        size = nested(config, "zero_optimization", "sub_group_size")
        if isinstance(size, (int, float)) and size < 1:
            raise WrongOption(
                "ds-config-wrong",
                f"sub_group_size in the ds_config is {size}, but must be at least 1",
            )
        self.dp = options[DP] or source.dp
        self.stage = self._stage(source, config or {})
        self.dtype = self._dtype(source, config or {})
        self.config = self._config(config or {})
        self.sp = self._sequence_ranks(source)
        self.has_older_names = self._has_older_names(source)

    @property
    def partitioned(self) -> bool:
        """Whether the stage is 3: every parameter is partitioned separately."""
        return self.stage == 3

    @property
    def whole(self) -> bool:
        """Whether nothing is partitioned, and the model file has the optimizer.

        True in stage 0, except for BF16_Optimizer, which always partitions its states.
        """
        return self.stage == 0 and not self.wraps_bf16

    @property
    def cuts_groups(self) -> bool:
        """Whether DeepSpeedZeroOptimizer is used, which may reorder and align parameters."""
        return self.stage in (1, 2) and not self.wraps_bf16

    @property
    def same_dtype(self) -> bool:
        return self.before is not None and self.dtype == self.before.dtype

    def option(self, *names: str) -> Any:
        """The ds_config's value at a path of keys, such as "fp16", "loss_scale".

        None if it is "auto" or missing.
        """
        value = nested(self.config, *names)
        return None if value == "auto" else value

    def number(self, default: float, *names: str) -> float:
        """The ds_config's number at a path of keys, such as "fp16", "loss_scale_window".

        If the ds_config states none, it is the engine's `default`.
        """
        value = self.option(*names)
        return value if isinstance(value, (int, float)) else default

    @property
    def optimizer(self) -> str | None:
        """The name of the base optimizer that the engine makes; None if the program makes it."""
        name = self.option("optimizer", "type")
        return name if isinstance(name, str) else None

    @property
    def adam_class(self) -> str | None:
        """The class of Adam that the engine makes, as `--optimizer` names it.

        None for other optimizers, and if the program makes the optimizer. DeepSpeed 0.19.8,
        engine.py `_configure_basic_optimizer`: Adam and AdamW are FusedAdam unless the config
        states another class.
        """
        if (self.optimizer or "").lower() not in ("adam", "adamw"):
            return None
        if self.option("optimizer", "params", "torch_adam") is True:
            return "torch"
        return "deepspeed-cpu-adam" if self.offloads else "deepspeed-fused-adam"

    @property
    def decouples_decay(self) -> bool:
        """Whether the engine's Adam decouples weight decay, as AdamW does (0.19.8)."""
        mode = self.option("optimizer", "params", "adam_w_mode")
        return (self.optimizer or "").lower() == "adamw" or mode is not False

    @property
    def elastic(self) -> bool:
        """Whether the engine reads and writes elastic files (`elastic_checkpoint`); not in stage 3.

        Stage 3 refuses this setting (0.19.8).
        """
        return self._cuts_with("elastic_checkpoint")

    @property
    def offloads(self) -> bool:
        """Whether optimizer states are offloaded to CPU memory."""
        device = self.option("zero_optimization", "offload_optimizer", "device")
        return device == "cpu" or self.option("zero_optimization", "cpu_offload") is True

    @property
    def wraps_bf16(self) -> bool:
        """Whether the engine uses BF16_Optimizer, whose files are partitioned even in stage 0.

        In stage 1, a target keeps it from the source, unless the user gives a ds_config.
        """
        if self.dtype != "BF16" or self.offloads or self.stage > 1:
            return False
        before = self.before
        # DeepSpeed 0.19.8, engine.py `_do_optimizer_sanity_check`
        if self.stage == 0:  # before 0.17.6, BF16_Optimizer was used in stage 0 too
            version = None if before is None else before.version
            return version is not None and version_numbers(version) < (0, 17, 6)
        kept = before is not None and before.optimizer_class == "BF16_Optimizer"
        grad = FLOAT_NAMES.get(str(self.option("data_types", "grad_accum_dtype")))
        return grad == "F32" or (kept and self.options[CONFIG] is None)

    @property
    def round_robin(self) -> bool:
        return self._cuts_with("round_robin_gradients")

    @property
    def aligned(self) -> bool:
        return self._cuts_with("parameter_alignment")

    def _cuts_with(self, option: str) -> bool:
        return bool(self.option("zero_optimization", option)) and self.cuts_groups

    @property
    def sub_group_size(self) -> int:
        return int(self.number(SUB_GROUP_SIZE, "zero_optimization", "sub_group_size"))

    def _stage(self, source: Manifest, config: Mapping[str, Any]) -> int:
        """The target's ZeRO stage: the user's choice, else the source's, else 2.

        The source's files count before its ds_config. Raises WrongOption if `--stage` and the
        user's ds_config differ, or if there is no such stage.
        """
        stage_in_config = nested(config, "zero_optimization", "stage")
        chosen = self.options[STAGE]
        has_config = self.options[CONFIG] is not None
        if has_config and None not in (chosen, stage_in_config) and chosen != stage_in_config:
            raise WrongOption(
                "ds-config-wrong",
                f"--stage {chosen}, but the ds_config says stage {stage_in_config}",
                hint="leave out --stage, or change the ds_config",
            )
        stage_of_files = source.run.origin.zero_stage
        if stage_of_files == 0 and self.before is None:  # another engine's 0 means nothing
            stage_of_files = None
        # the source's ds_config may state 0 although its files are BF16_Optimizer's
        by_priority = (
            (chosen, stage_in_config, stage_of_files)
            if has_config
            else (chosen, stage_of_files, stage_in_config)
        )
        stage = next((number for number in by_priority if number is not None), 2)
        if stage not in (0, 1, 2, 3):
            raise WrongOption("option-invalid", f"stage {stage} is not 0, 1, 2 or 3")
        return int(stage)

    def _dtype(self, source: Manifest, config: Mapping[str, Any]) -> str:
        enabling = {
            dtype: [nested(config, key, "enabled") for key in keys]
            for dtype, keys in (("BF16", ("bf16", "bfloat16")), ("F16", ("fp16",)))
        }
        enabled = [dtype for dtype, values in enabling.items() if True in values]
        if len(enabled) > 1:
            raise WrongOption("ds-config-wrong", "the ds_config enables both bf16 and fp16")
        is_open = any("auto" in values for values in enabling.values()) and not enabled
        dtype_in_config = None if is_open else (enabled or ["F32"])[0]
        chosen = self.options.module_dtype
        if chosen and self.options[CONFIG] is not None and dtype_in_config not in (None, chosen):
            raise WrongOption(
                "ds-config-wrong",
                f"--dtype asks for {chosen}, but the ds_config says {dtype_in_config}",
                hint="leave out --dtype, or change the ds_config",
            )
        if chosen:
            return chosen
        if self.options[CONFIG] is not None and dtype_in_config:
            return dtype_in_config
        if self.before is not None and self.before.dtype is not None:
            return self.before.dtype
        dtypes = [entry.dtype for entry in source.entries.values() if entry.slot == "param"]
        # an engine other than DeepSpeed may have computed in 16 bits and stored only fp32
        dtypes.append(str(source.run.engine.dtype if source.run.engine else None))
        return next((dtype for dtype in dtypes if dtype in ("BF16", "F16")), "F32")

    def _sequence_ranks(self, source: Manifest) -> int:
        """The number of data-parallel ranks that share each sequence: `--sp`, or as in the source.

        Raises WrongOption if the number of ranks is not a multiple of `--sp`, and if `--sp` is
        given together with pipelines, tensor ranks or experts.
        """
        asked, place = self.options[SP], source.place
        is_shared = place is not None and place.grid.pp * place.grid.tp > 1
        if asked is None:
            return 1 if is_shared else source.run.origin.sequence_ranks(self.dp)
        if self.dp % asked:
            raise WrongOption(
                "sizes-do-not-fit",
                f"{self.dp} data-parallel ranks cannot be divided by --sp {asked}",
                hint="--dp counts all ranks, also those that share a sequence: give a multiple of "
                "--sp",
            )
        if asked > 1 and (is_shared or layers_of(source.run.engine)):
            raise WrongOption(
                "options-conflict",
                f"--sp {asked} cannot be combined with pipelines, tensor parallelism or experts",
                hint="leave out --sp: zckpt does not know which ranks would share a sequence",
            )
        return asked

    def _has_older_names(self, source: Manifest) -> bool:
        """Whether the target's files are named as DeepSpeed up to 0.19.5 names them.

        Those names contain a rank's index among the ranks that share a sequence. Raises WrongOption
        if `--dialect` asks for them without such ranks.
        """
        asked = self.options[NAMES]
        is_asked, has_them = asked == OLDER_NAMES, self.sp > 1 and not self.whole
        if is_asked and not has_them:
            raise WrongOption(
                "option-not-applicable",
                f"--dialect {asked} applies only to ZeRO runs in which several ranks share a "
                "sequence: other runs' files have the same names in all releases",
                hint="leave out --dialect, or say how many ranks share a sequence: --sp",
            )
        of_run = source.run.origin.dialect if asked is None and self.options[LIKE] else None
        return has_them and OLDER_NAMES in (asked, of_run)

    def _config(self, given: Mapping[str, Any]) -> dict[str, Any]:
        config = dict(given)
        config["zero_optimization"] = {**(given.get("zero_optimization") or {})}
        config["zero_optimization"]["stage"] = self.stage
        for key, dtype in (("bf16", "BF16"), ("fp16", "F16")):
            if isinstance(given.get(key), dict) or self.dtype == dtype:
                config[key] = {**(given.get(key) or {}), "enabled": self.dtype == dtype}
        if isinstance(given.get("bfloat16"), dict):  # an alias
            config["bfloat16"] = {**given["bfloat16"], "enabled": self.dtype == "BF16"}
        return config
