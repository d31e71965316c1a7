"""The real ORTTrainer and ORT's own aggregators as judges of what zckpt writes. By hand.

In a virtual environment of its own (onnxruntime-training needs numpy 1; Python 3.8 to 3.11):

    pip install torch onnxruntime-training==1.16.3 onnx==1.15 'numpy<2' -e '.[onnxruntime]'
    python -m tests.engines.onnxruntime_real

It trains 5 steps with Adam on the CPU, saves in both of ORT's ways, lets zckpt write both dialects
for 1 to 8 ranks, in fp32 and mixed precision, directly and through a universal checkpoint; loads
each into a new trainer, and compares three further steps with those of the run that went on:
losses, weights, moments and counters, bit for bit. Then ORT's aggregators merge sets of Adam and
Lamb.

No public build trains with ZeRO, Lamb or fp16 on a CPU: what these kernels do with the files is
beyond this judge. Two traps of 1.16.3 on a CPU: MatMul's pre-packing keeps a copy of the initial
weights (switched off in this script, also where the legacy loader makes a session without its
options), and weights of 8 elements or less are folded together.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import TensorProto, helper, numpy_helper
from onnxruntime.training import ORTTrainer, ORTTrainerOptions, checkpoint, optim

import zckpt

from . import onnxruntime_files as files

SIZES = (1, 2, 3, 4, 8)
ROWS = 4
SHAPES = {
    "layer.2.weight": (33, 12),
    "layer.2.bias": (12,),
    "layer.10.weight": (12, 24),
    "layer.10.bias": (24,),
    "head.weight": (24, 9),
}


def model() -> Any:
    """Two layers with names that sort otherwise than they stand, and a loss."""
    draw = np.random.default_rng(7)
    weights = [
        numpy_helper.from_array(draw.normal(size=shape).astype(np.float32) / 3, name)
        for name, shape in SHAPES.items()
    ]
    nodes = [
        helper.make_node("MatMul", ["x", "layer.2.weight"], ["a"]),
        helper.make_node("Add", ["a", "layer.2.bias"], ["b"]),
        helper.make_node("Relu", ["b"], ["c"]),
        helper.make_node("MatMul", ["c", "layer.10.weight"], ["d"]),
        helper.make_node("Add", ["d", "layer.10.bias"], ["e"]),
        helper.make_node("MatMul", ["e", "head.weight"], ["y"]),
        helper.make_node("Mul", ["y", "y"], ["squares"]),
        helper.make_node("ReduceMean", ["squares"], ["loss"], keepdims=0),
    ]
    graph = helper.make_graph(
        nodes,
        "model",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [ROWS, 33])],
        [
            helper.make_tensor_value_info("loss", TensorProto.FLOAT, []),
            helper.make_tensor_value_info("y", TensorProto.FLOAT, [ROWS, 9]),
        ],
        weights,
    )
    onnx_model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 12)])
    onnx_model.ir_version = 7
    onnx.checker.check_model(onnx_model)
    return onnx_model


class Trainer(ORTTrainer):  # type: ignore[misc]
    """One whose sessions all have the trainer's options: the legacy loader forgets them."""

    def _init_session(self, optimizer_state_dict: Any = None, **_: Any) -> None:
        super()._init_session(
            optimizer_state_dict or {}, session_options=self.options.session_options
        )


def trainer() -> Any:
    description = {
        "inputs": [("x", [ROWS, 33])],
        "outputs": [("loss", [], True), ("y", [ROWS, 9])],
    }
    session = onnxruntime.SessionOptions()
    session.add_session_config_entry("session.disable_prepacking", "1")
    session.intra_op_num_threads = 1
    options = ORTTrainerOptions({"device": {"id": "cpu"}, "session_options": session})
    return Trainer(model(), description, optim.AdamConfig(lr=0.01), options=options)


def steps(of: Any, first: int, count: int) -> list[float]:
    losses = []
    for step in range(first, first + count):
        rows = np.random.default_rng(step).normal(size=(ROWS, 33)).astype(np.float32)
        losses.append(float(of.train_step(torch.from_numpy(rows))[0]))
    return losses


def state_of(of: Any) -> dict[str, Any]:
    """Weights, moments and counters of a trainer's session."""
    return {name: np.array(value) for name, value in of._training_session.get_state().items()}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        one[key].dtype == other[key].dtype and one[key].tobytes() == other[key].tobytes()
        for key in one
    )


def loaded(folder: Path, dialect: str) -> Any:
    """A new trainer that has loaded the folder in the way of its dialect."""
    fresh = trainer()
    if dialect == "hdf5":
        fresh.load_checkpoint(*map(str, sorted(folder.iterdir())))
    else:
        checkpoint.experimental_load_checkpoint(fresh, str(folder))
    return fresh


def targets(sources: dict[str, Path], root: Path) -> Iterator[tuple[str, Path, str]]:
    """Everything that zckpt writes of both of ORT's own files."""
    for place, source in enumerate(sources.values()):
        zckpt.convert(source, root / f"universal{place}")
    universal = {f"{name}, universal": root / f"universal{p}" for p, name in enumerate(sources)}
    for name, source in {**sources, **universal}.items():
        for dp in SIZES:
            for dialect in ("hdf5", "l2"):
                for dtype in ("fp32", "fp16"):
                    target = root / f"{name}-{dp}-{dialect}-{dtype}".replace(", ", "-")
                    zckpt.reshard(source, target, dp=dp, dialect=dialect, dtype=dtype)
                    yield f"{name} -> dp {dp} {dialect} {dtype}", target, dialect


def judge_training(root: Path) -> int:
    reference = trainer()
    steps(reference, 0, 5)
    (root / "own").mkdir()
    sources = {"hdf5": root / "own" / "checkpoint.ortcp", "legacy": root / "legacy"}
    reference.save_checkpoint(str(sources["hdf5"]), {"epoch": 1})
    sources["legacy"].mkdir()
    checkpoint.experimental_save_checkpoint(reference, str(sources["legacy"]))
    before = state_of(reference)
    losses = steps(reference, 5, 3)
    after = state_of(reference)
    failed = count = 0
    for name, target, dialect in targets(sources, root):
        count += 1
        fresh = loaded(target, dialect)
        resumed = state_of(fresh)
        fine = (
            same(resumed, before) and steps(fresh, 5, 3) == losses and same(state_of(fresh), after)
        )
        failed += not fine
        if not fine:
            print(f"DIFFERS: {name}")
    print(f"{count - failed} of {count} targets: the real trainer's next three steps are identical")
    return failed


def judge_aggregation(root: Path) -> int:
    """ORT's aggregators give back the whole state."""
    failed = count = 0
    for optimizer in ("Adam", "Lamb"):
        for precision in ("fp32", "fp16"):
            state = files.make(precision, optimizer, frozen=files.FROZEN)
            source = files.write(state, root / f"{optimizer}-{precision}", 3, "l2")
            for dp in SIZES[1:]:
                for dialect in ("hdf5", "l2"):
                    count += 1
                    target = root / f"{optimizer}-{precision}-{dp}-{dialect}"
                    zckpt.reshard(source, target, dp=dp, dialect=dialect)
                    right = files.legacy_dictionary(state, 1, 0, "l2")
                    if dialect == "hdf5":
                        right = {k: t for k, t in right.items() if not k.endswith("_fp16")}
                    aggregated = merged(target, dialect)
                    fine = aggregated.keys() == right.keys() and all(
                        np.asarray(aggregated[key]).reshape(-1).tobytes()
                        == right[key].reshape(-1).numpy().tobytes()
                        and tuple(aggregated[key].shape) == tuple(right[key].shape)
                        for key in right
                    )
                    failed += not fine
                    if not fine:
                        print(f"DIFFERS: aggregation of {target.name}")
    print(f"{count - failed} of {count} sets: ORT's aggregator gives back the whole state")
    return failed


def merged(folder: Path, dialect: str) -> dict[str, Any]:
    """What ORT's aggregator makes of a folder, by the keys of a legacy file of one rank."""
    paths = [str(path) for path in sorted(folder.iterdir())]
    if dialect == "l2":
        state: dict[str, Any] = checkpoint._CombineZeroCheckpoint(paths).aggregate_checkpoints()
        return state
    state = checkpoint.aggregate_checkpoints(paths, pytorch_format=False)
    tensors = dict(state["model"]["full_precision"])
    for name, states in state["optimizer"].items():
        shared = name == "shared_optimizer_state"
        tensors |= {key if shared else f"{key}_{name}": value for key, value in states.items()}
    return tensors


def main() -> None:
    warnings.simplefilter("ignore")
    onnxruntime.set_default_logger_severity(4)  # it looks for a GPU
    print(f"onnxruntime-training {onnxruntime.__version__}")
    with tempfile.TemporaryDirectory() as folder:
        failed = judge_training(Path(folder))
    with tempfile.TemporaryDirectory() as folder:
        failed += judge_aggregation(Path(folder))
    raise SystemExit(1 if failed else 0)


if __name__ == "__main__":
    main()
