"""Writes DeepSpeed checkpoints of realistic sizes, with holes for tensors.

    python -m benchmarks.zero RUN --json     measures torch.load of its smallest file

Every file is what torch.save writes for its shapes, with holes in place of the tensors' data. The
keys are those of DeepSpeed 0.19.8. Tensors have the shapes `WEIGHT` and `BIAS` in turn.
"""

from __future__ import annotations

import json
import resource
import struct
import sys
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

from .dcp import BIAS, WEIGHT

TAG = "global_step100"
OPTIMIZER = "bf16_zero_pp_rank_{}_mp_rank_{:02d}_optim_states.pt"
GROUP = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
STEP = struct.pack("<f", 100.0)
Shapes = Mapping[str, tuple[int, ...]]


class Holes:
    """A file of torch.save with holes in place of tensors, to be written under several names.

    Each name needs a file of its own, because torch puts the name into its records. Storages of
    four bytes are steps, and are written.
    """

    def __init__(self, value: Any, work: Path) -> None:
        import torch

        place = work / "archive.pt"
        with torch.serialization.skip_data(materialize_fake_tensors=True):
            torch.save(value, place)
        reader = torch._C.PyTorchFileReader(str(place))
        self.records: list[tuple[str, bytes | None, int]] = []
        for name in reader.get_all_records():
            if name in ("version", ".data/serialization_id"):
                continue
            length = reader.get_record_size(name)
            data = None if name.startswith("data/") else reader.get_record(name)
            self.records.append((name, STEP if length == len(STEP) else data, length))
        del reader
        place.unlink()

    def write(self, path: Path) -> None:
        import torch

        writer = torch._C.PyTorchFileWriter(str(path))
        for name, data, length in self.records:
            if data is None:
                writer.write_record_metadata(name, length)
            else:
                writer.write_record(name, data, length)
        writer.write_end_of_file()


def shapes_of(tensors: int) -> dict[str, tuple[int, ...]]:
    return {
        f"layers.{number // 2}.{('weight', 'bias')[number % 2]}": (WEIGHT, BIAS)[number % 2]
        for number in range(tensors)
    }


def make(root: Path, tensors: int, dp: int, stage: int) -> None:
    """Writes a run of ZeRO-1 or ZeRO-3 with one checkpoint.

    Needs torch, and DeepSpeed for stage 1.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    folder = root / TAG
    folder.mkdir(parents=True)
    (root / "latest").write_text(TAG)
    shapes = shapes_of(tensors)
    with FakeTensorMode():
        if stage == 3:
            of_model = Holes(model(shapes, dp, stage, is_cut=True), folder)
            optimizer = Holes(_sliced(shapes, dp), folder)
            for rank in range(dp):
                of_model.write(folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
                optimizer.write(folder / OPTIMIZER.format(rank, 0))
            return
        Holes(model(shapes, dp, stage), folder).write(folder / "mp_rank_00_model_states.pt")
        for rank, state in enumerate(partitions(shapes, dp)):
            Holes(state, folder).write(folder / OPTIMIZER.format(rank, 0))


def _config(stage: int) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage}, "bf16": {"enabled": True}}


def groups_of(shapes: Shapes) -> list[OrderedDict[str, tuple[int, ...]]]:
    """Two optimizer groups: weights with decay, and biases without."""
    of_axes = [
        [item for item in shapes.items() if (len(item[1]) > 1) is is_weight]
        for is_weight in (True, False)
    ]
    return [OrderedDict(group) for group in of_axes if group]


def model(shapes: Shapes, dp: int, stage: int, is_cut: bool = False) -> dict[str, Any]:
    import torch

    groups = [OrderedDict(shapes)] if stage == 3 else groups_of(shapes)
    return {
        "module": OrderedDict(
            (name, torch.empty(0 if is_cut else shape, dtype=torch.bfloat16))
            for name, shape in shapes.items()
        ),
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": [
            OrderedDict((name, torch.Size(shape)) for name, shape in group.items())
            for group in groups
        ],
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": {},
        "lr_scheduler": None,
        "global_steps": 100,
        "skipped_steps": 0,
        "global_samples": 100 * dp,
        "dp_world_size": dp,
        "mp_world_size": 1,
        "ds_config": _config(stage),
        "ds_version": "0.19.8",
    }


def _state(length: int) -> dict[str, Any]:
    import torch

    return {
        "step": torch.empty(()),
        "exp_avg": torch.empty(length),
        "exp_avg_sq": torch.empty(length),
    }


def _sliced(shapes: Shapes, dp: int) -> dict[str, Any]:
    """A rank's optimizer file at stage 3: a slice of each tensor, in one flat buffer."""
    import torch

    length = sum(-(-prod(shape) // dp) for shape in shapes.values())
    return flat(dp, torch.empty(length), _state(length))


def flat(dp: int, master: Any, state: dict[str, Any]) -> dict[str, Any]:
    """A rank's optimizer file at stage 3, with one flat buffer for each slot."""
    return {
        "optimizer_state_dict": {
            "zero_stage": 3,
            "loss_scaler": None,
            "dynamic_loss_scale": False,
            "overflow": False,
            "partition_count": dp,
            "optimizer_state_dict": {
                "state": {0: state},
                "param_groups": [GROUP | {"params": [0]}],
            },
            "fp32_flat_groups": [master],
        },
        "ds_config": _config(3),
        "ds_version": "0.19.8",
    }


def partitions(shapes: Shapes, dp: int) -> Iterator[dict[str, Any]]:
    """Yields each rank's optimizer file at stage 1, with a range of each group's flat buffer."""
    import torch
    from deepspeed.runtime.zero.config import ZeroStageEnum
    from deepspeed.utils.tensor_fragment import fragment_address

    groups = groups_of(shapes)
    totals = [sum(map(prod, group.values())) for group in groups]
    assert not any(total % (2 * dp) for total in totals), totals
    states = {number: _state(total // dp) for number, total in enumerate(totals)}
    of_groups = [GROUP | {"params": [number]} for number in states]
    for rank in range(dp):
        mappings = []
        for group, total in zip(groups, totals, strict=True):
            start, at, own = rank * (total // dp), 0, OrderedDict[str, Any]()
            for name, shape in group.items():
                low, high = max(start, at), min(start + total // dp, at + prod(shape))
                if low < high:
                    own[name] = fragment_address(numel=high - low, start=low - start)
                at += prod(shape)
            mappings.append(own)
        yield {
            "optimizer_state_dict": {
                "loss_scaler": None,
                "dynamic_loss_scale": False,
                "overflow": False,
                "clip_grad": 1.0,
                "base_optimizer_state": {"state": states, "param_groups": of_groups},
                "single_partition_of_fp32_groups": [torch.empty(total // dp) for total in totals],
                "zero_stage": ZeroStageEnum.optimizer_states,
                "group_paddings": [0 for _ in totals],
                "param_alignment_paddings": [[0] * len(group) for group in groups],
                "partition_count": [dp for _ in totals],
                "ds_version": "0.19.8",
                "param_slice_mappings": mappings,
            },
            "ds_config": _config(1),
            "ds_version": "0.19.8",
        }


def main() -> None:
    import torch

    path = min(Path(sys.argv[1]).rglob("*_states.pt"), key=lambda path: path.stat().st_size)
    before = resource.getrusage(resource.RUSAGE_SELF)
    started = time.process_time()
    torch.load(path, mmap=True, weights_only=False)
    seconds = time.process_time() - started
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before.ru_maxrss
    print(json.dumps({"items": 0, "seconds": seconds, "mib": memory / 1024}))


if __name__ == "__main__":
    main()
