"""What the ranks' files say of the run, and whether they all say the same."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ...core.dtypes import NUMBERS
from ...core.inert import Foreign, Scalar, map_values, to_json
from ...errors import (
    CorruptCheckpoint,
    IncompleteCheckpoint,
    InconsistentCheckpoint,
    UnsupportedCheckpoint,
)
from ...files.torchfile import Parsed, Tensor, TorchFile
from .. import zero
from .directories import Place, RankFiles, file_of_rank, refuse

COUNTERS = ("global_steps", "skipped_steps", "global_samples")


class Ranks:
    """The opened files of one checkpoint; `model` and `first` are what rank 0's hold.

    Raises when the files cannot be the whole of one ZeRO checkpoint: a rank is missing, world sizes
    or saves differ, or it is of a kind that is not read.
    """

    def __init__(self, place: Place, files: RankFiles) -> None:
        self.place = place
        parsed: Parsed = {}
        self.models = open_files(files.models, parsed)
        self.model = dictionary(self.models[0], self.models[0].value)
        if not files.optimizers:
            self._refuse_without_optimizer()
        self.optimizers = open_files(files.optimizers, parsed)
        tops = [dictionary(file, file.value) for file in self.optimizers]
        pairs = zip(self.optimizers, tops, strict=True)
        self.states = [dictionary(file, top.get("optimizer_state_dict")) for file, top in pairs]
        self.first = self.states[0]
        self.dp = len(self.optimizers)
        self.version = version_of(self.model, tops[0], self.first)
        stated = self.model.get("ds_config") or tops[0].get("ds_config")
        self.config_path = stated if isinstance(stated, str) else None
        self.config: dict[str, Any] = stated if isinstance(stated, dict) else {}
        self._check_kind()
        self._check_world()
        self._check_same_save()

    # -- what they say

    @property
    def numbers(self) -> tuple[int, ...]:
        """The engine's version, to be compared; 0.0.0 is what an uninstalled source tree states."""
        numbers = tuple(map(int, re.findall(r"\d+", self.version)[:3]))
        return numbers if any(numbers) else (999,)

    @property
    def partitioned(self) -> bool:
        """Stage 3: every parameter is cut by itself."""
        return "fp32_flat_groups" in self.first

    @property
    def stage(self) -> int:
        stated = self.first.get("zero_stage")
        if isinstance(stated, Foreign) and stated.arguments:  # ZeroStageEnum(2), since 0.7
            stated = stated.arguments[0]
        if isinstance(stated, int):
            asked = nested(self.config, "zero_optimization", "stage")
            # before 0.7.0 a stage-1 run states 2
            return 1 if stated == 2 and asked == 1 and self.numbers < (0, 7) else stated
        return 3 if self.partitioned else 1  # BF16_Optimizer states none and is used for stage 1

    @property
    def engine_class(self) -> str:
        """The class of the engine's optimizer wrapper."""
        if self.partitioned:
            return "DeepSpeedZeroOptimizer_Stage3"
        return "DeepSpeedZeroOptimizer" if "zero_stage" in self.first else "BF16_Optimizer"

    @property
    def elastic(self) -> bool:
        """`elastic_checkpoint`: states without padding, and without any hyper-parameter."""
        return isinstance(self.first.get("base_optimizer_state"), list)

    @property
    def excludes_frozen(self) -> bool | None:
        """Whether `save_checkpoint(exclude_frozen_parameters=True)` left frozen weights out.

        None where the files do not tell: stage 1, and DeepSpeed before 0.9.1.
        """
        if self.stage == 1 or "frozen_param_fragments" not in self.model:
            return None
        return self.model["frozen_param_fragments"] is None

    @property
    def round_robin(self) -> bool:
        """Whether the parameters of a group lie in round-robin order (see zero.py).

        A run that was started with `--deepspeed_config FILE` saves only the file's name; then it
        shows by the order of the module's own names.
        """
        if self.engine_class != "DeepSpeedZeroOptimizer":
            return False
        if self.config:
            return bool(nested(self.config, "zero_optimization", "round_robin_gradients"))
        places = {name: place for place, name in enumerate(self.model["module"])}
        for names in map(list, self.param_shapes()):
            plain = sorted(names, key=lambda name: places.get(name, 0))
            laid_out = [plain[place] for place in zero.round_robin(len(plain), self.dp)]
            if names != laid_out:
                return False
        return any(len(names) > self.dp > 1 for names in self.param_shapes())

    def effective_config(self) -> dict[str, Any]:
        """The ds_config, or what the files show of one that was saved by its name alone."""
        if self.config:
            return self.config
        paddings = self.first.get("param_alignment_paddings") or ()
        shown: dict[str, Any] = {
            "zero_optimization": {
                "stage": self.stage,
                "round_robin_gradients": self.round_robin,
                "parameter_alignment": any(map(any, paddings)),
            }
        }
        if self.engine_class == "BF16_Optimizer":
            shown["data_types"] = {"grad_accum_dtype": "fp32"}
        return shown

    @property
    def dtype(self) -> str:
        """What the module's trainable weights are kept in; stage 3 leaves typed placeholders."""
        for names in self.param_shapes():
            for name in names:
                held = self.model["module"].get(name)
                if isinstance(held, Tensor):
                    return held.dtype
        return "F32"

    def param_shapes(self) -> list[dict[str, tuple[int, ...]]]:
        """Names and shapes of every flat buffer, in the order in which they lie.

        The only truth about that order: the slice mappings in the optimizer files are wrong under
        `round_robin_gradients`. In the optimizer files before 0.6.0; a single dictionary instead of
        a list before 0.5.4.
        """
        shapes = self.model.get("param_shapes")
        if shapes is None:
            shapes = self.first.get("param_shapes", self.optimizers[0].value.get("param_shapes"))
        if isinstance(shapes, dict):
            shapes = [shapes]
        if not isinstance(shapes, list):
            raise CorruptCheckpoint(f"{self.models[0].path} states no param_shapes")
        return [{name: tuple(shape) for name, shape in group.items()} for group in shapes]

    def base_state(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """The base optimizer's {state, param_groups}; elastic files list the states alone."""
        held = state.get("optimizer_state_dict" if self.partitioned else "base_optimizer_state")
        if isinstance(held, list):
            return {"state": dict(enumerate(held))}
        if not isinstance(held, dict):
            raise CorruptCheckpoint(f"{self.place.directory} holds no base optimizer state")
        return held

    def flat_states(self, place: int) -> list[dict[str, Any]]:
        """What every rank's base optimizer keeps for flat buffer `place`."""
        return [item(self.base_state(state).get("state"), place) for state in self.states]

    def groups(self, place: int) -> list[dict[str, Any]]:
        """Every rank's param_groups[place]; empty ones in elastic files."""
        return [item(self.base_state(state).get("param_groups"), place) for state in self.states]

    def number(self, rank: int, value: Any) -> Any:
        """`value` of an optimizer file; a tensor of one element by value."""
        if isinstance(value, Tensor) and value.numel == 1 and value.dtype in NUMBERS:
            return self.optimizers[rank].scalar(value)
        return value

    def scalar(self, values: Sequence[Any]) -> Scalar | None:
        """A number that all ranks hold alike; a plain one keeps its Python type's name."""
        found = set()
        for rank, value in enumerate(values):
            told = self.number(rank, value)
            if isinstance(told, (bool, int, float)):
                told = Scalar(told, type(told).__name__)
            found.add(told if isinstance(told, Scalar) else None)
        return found.pop() if len(found) == 1 else None

    # -- whether it is one checkpoint of a kind that is read

    def _refuse_without_optimizer(self) -> None:
        if self.model.get("optimizer"):
            refuse(self.place, "ZeRO stage 0")
        raise IncompleteCheckpoint(
            f"{self.place.directory} holds no optimizer files",
            hint="expected [bf16_]zero_pp_rank_0_mp_rank_00_optim_states.pt and one per further "
            "rank",
        )

    def _check_kind(self) -> None:
        if self.numbers < (0, 5, 10):
            refuse(self.place, f"DeepSpeed {self.version}, before 0.5.10")
        if int(self.model.get("mp_world_size") or 1) > 1:
            refuse(self.place, "tensor parallelism")
        experts = self.model.get("num_experts")
        if isinstance(experts, list) and any(experts):
            refuse(self.place, "mixture-of-experts layers")
        if not isinstance(self.model.get("module"), dict):
            refuse(self.place, "pipeline parallelism")
        if nested(self.config, "zero_optimization", "offload_optimizer", "device") == "nvme":
            refuse(self.place, "optimizer states offloaded to NVMe")

    def _check_world(self) -> None:
        stated = self.model.get("dp_world_size")
        if isinstance(stated, int) and stated > self.dp:
            raise IncompleteCheckpoint(
                f"{self.place.directory} holds optimizer files of {self.dp} of {stated} ranks",
                hint=f"expected {file_of_rank(self.optimizers[0].path, stated - 1)}",
            )
        if isinstance(stated, int) and stated < self.dp:
            raise InconsistentCheckpoint(
                f"{self.place.directory} holds optimizer files of {self.dp} ranks, but its model "
                f"states say there were {stated}",
                hint="files of another save may lie between them; keep those of one save",
            )
        count = self.first.get("partition_count")
        counts = {number for number in (count if isinstance(count, list) else [count]) if number}
        if counts - {self.dp}:
            told = ", ".join(map(str, counts))
            refuse(self.place, f"partitions over {told} of {self.dp} ranks (MiCS, experts)")

    def _check_same_save(self) -> None:
        """Counters, hyper-parameters and loss scale are the same on all ranks of one save."""
        for what, files, told in (
            ("its counters", self.models, [_counters(file.value) for file in self.models]),
            ("its param_groups", self.optimizers, self._each(self._hyper_parameters)),
            ("its loss scale", self.optimizers, self._each(_loss_scale)),
        ):
            for file, here in zip(files, told, strict=True):
                if here is not told[0] and here != told[0]:
                    raise InconsistentCheckpoint(
                        f"{file.path} differs from {os.path.basename(files[0].path)} in {what}",
                        hint="files of different saves seem to be mixed; take those of one tag",
                    )

    def _each(self, tell: Any) -> list[Any]:
        """What every rank's state tells; equal pickles were parsed once and tell it once."""
        told: dict[int, Any] = {}
        return [
            told.setdefault(id(state), told.get(id(state)) or tell(state)) for state in self.states
        ]

    def _hyper_parameters(self, state: Mapping[str, Any]) -> Any:
        groups = self.base_state(state).get("param_groups") or ()
        return comparable([{k: v for k, v in group.items() if k != "step"} for group in groups])


def _counters(model: Mapping[str, Any]) -> list[Any]:
    return [model.get(key) for key in (*COUNTERS, "dp_world_size", "ds_version")]


def _loss_scale(state: Mapping[str, Any]) -> Any:
    scaler = state.get("loss_scaler")
    told = (state.get("overflow"), scaler.state if isinstance(scaler, Foreign) else scaler)
    return comparable(told)


def open_files(paths: Sequence[str], parsed: Parsed) -> list[TorchFile]:
    """Files of torch.save, equal pickles of which are parsed once."""
    if len(paths) < 32:
        return [TorchFile(path, parsed) for path in paths]
    # parsing holds the interpreter, but waiting for a cold or remote filesystem does not
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(lambda path: TorchFile(path, parsed), paths))


def dictionary(file: TorchFile, value: Any) -> dict[str, Any]:
    """`value`, which has to be a dictionary; raises CorruptCheckpoint."""
    if not isinstance(value, dict):
        raise CorruptCheckpoint(
            f"{file.path} is no file of a ZeRO checkpoint: it lacks the engine's dictionary"
        )
    return value


def version_of(*places: Mapping[str, Any]) -> str:
    """The engine's version, from the first place that states one."""
    for place in places:
        version = place.get("ds_version")
        if isinstance(version, str) and re.match(r"\d+\.\d+", version):
            return version
    raise UnsupportedCheckpoint(
        "the files state no DeepSpeed version",
        hint="DeepSpeed writes it since 0.4.0; zckpt reads files since 0.5.10",
    )


def nested(config: Any, *keys: str) -> Any:
    """config[key][key]..., None where there is none."""
    for key in keys:
        config = config.get(key) if isinstance(config, dict) else None
    return config


def item(held: Any, place: int) -> dict[str, Any]:
    """Item `place` of a list or dictionary of dictionaries; empty where there is none."""
    if isinstance(held, list):
        found = held[place] if place < len(held) else {}
    else:
        found = held.get(place, {}) if isinstance(held, dict) else {}
    return found if isinstance(found, dict) else {}


def comparable(value: Any) -> Any:
    """`value` as JSON, its tensors by type and shape alone."""

    def plain(value: Any, _key: Any) -> Any:
        if isinstance(value, Tensor):
            return f"{value.dtype} {value.shape}"
        return map_values(value, plain)

    return to_json(plain(value, None))
