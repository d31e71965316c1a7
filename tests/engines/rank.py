"""What one rank of a DeepSpeed training does: build the engine, train, save or load, record."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from torch.utils import cpp_extension

from . import client, device, models, optimizers, oracle
from .cases import Case

ABANDONED = 300.0  # seconds after which the lock of a compilation is nobody's
ENABLE = {"bf16": {"bf16": {"enabled": True}}, "fp16": {"fp16": {"enabled": True}}, "fp32": {}}


def prepare() -> None:
    """The two patches that let DeepSpeed 0.19.8 train on a machine without an accelerator."""
    device.prepare()
    # It would compile a shared memory op and leave 69 MB per rank in /dev/shm.
    vars(sys.modules["deepspeed.comm.torch"])["build_shm_op"] = lambda: None
    get_accelerator().is_fp16_supported = lambda: True


def compile_extension(builder: str) -> None:
    """Compiles and loads an extension before the fork, so that ranks never wait on each other."""
    extension = get_accelerator().create_op_builder(builder)
    lock = Path(cpp_extension._get_build_directory(extension.name, False)) / "lock"
    while lock.exists() and time.time() - lock.stat().st_mtime < ABANDONED:
        time.sleep(1)
    lock.unlink(missing_ok=True)  # of a killed process: loading would wait for it for ever
    extension.load(verbose=False)


def join(rank: int, ranks: int, store: Path) -> None:
    deepspeed.init_distributed(
        dist_backend=device.backend(ranks),
        init_method=store.as_uri(),
        rank=rank,
        world_size=ranks,
        auto_mpi_discovery=False,
        verbose=False,
    )


def train(rank: int, store: Path, case: Case, root: Path, losses: int) -> None:
    """Trains, saves `root`/run, writes `root`/oracle.pt."""
    join(rank, case.dp, store)
    engine = build_engine(case, case.seed)
    for _ in range(case.steps):
        train_step(engine)
    client_state = client.odd_state() if case.client_state else {}
    engine.save_checkpoint(str(root / "run"), client_state=client_state, **case.save)
    finish(engine, root / "oracle.pt", losses, dtype=case.dtype, client_state=client_state)


def resume(
    rank: int,
    store: Path,
    case: Case,
    directory: Path,
    output: Path,
    load: dict[str, Any],
    losses: int,
) -> None:
    """Loads `directory` into a freshly initialized engine, writes what it then holds.

    `load` may have the `version` that DeepSpeed calls itself, a `url` that is loaded in place of
    the directory, and the `environment` in which that is found. With `by_itself` the directory is
    the one that `zckpt.auto_resume` gives with these words.
    """
    join(rank, case.dp, store)
    os.environ.update(load.pop("environment", {}))
    deepspeed.__version__ = load.pop("version", deepspeed.__version__)
    source = load.pop("url", directory)
    engine = build_engine(case, case.seed + 1000)
    if load.pop("without_copy", False):
        import zckpt.deepspeed

        own = engine.checkpoint_engine
        loaded, client_state = zckpt.deepspeed.load_checkpoint(engine, source, **load)
        assert engine.checkpoint_engine is own
    elif by_itself := load.pop("by_itself", None):
        import zckpt

        path = zckpt.auto_resume(source, **by_itself)
        assert path is not None
        loaded, client_state = engine.load_checkpoint(path.report["load_dir"], tag=path.tag)
    else:
        loaded, client_state = engine.load_checkpoint(str(directory), **load)
    if loaded is None:
        raise FileNotFoundError(f"the engine found no checkpoint in {directory}")
    finish(engine, output, losses, dtype=case.dtype, client_state=client_state)


def save_again(
    rank: int, store: Path, case: Case, directory: Path, output: Path, steps: int
) -> None:
    """Loads `directory`, trains, saves into `output`."""
    join(rank, case.dp, store)
    engine = build_engine(case, case.seed + 1000)
    engine.load_checkpoint(str(directory))
    for _ in range(steps):
        train_step(engine)
    engine.save_checkpoint(str(output))


def finish(engine: Any, output: Path, losses: int, **known: Any) -> None:
    """Writes what the engine holds now, with the losses of the steps that follow."""
    state = oracle.record(engine)
    following = [train_step(engine) for _ in range(losses)]
    if state is not None:
        torch.save(device.on_cpu({**state, **known, "losses": following}), output)


def build_engine(case: Case, seed: int) -> Any:
    model = models.build(case.model, seed)
    if case.base:
        models.copy_frozen(models.build(case.model, case.seed), model)
    groups = models.parameter_groups(model, case.groups)
    own = case.optimizer != "config"
    engine, *_ = deepspeed.initialize(
        model=model,
        mpu=sequence_ranks(case.sp) if case.sp > 1 else None,
        model_parameters=None if own else groups,
        optimizer=optimizers.FACTORIES[case.optimizer](groups) if own else None,
        lr_scheduler=decaying if case.scheduler else None,
        config=configure(case),
    )
    if models.VARIANTS[case.model].strided and case.stage < 3:
        models.transpose_frozen(model)
    return engine


def sequence_ranks(sp: int) -> Any:
    """What Accelerate gives the engine for sequence parallelism.

    The tests' models see rows: each rank's stand for its part of the sequences.
    """
    from deepspeed.runtime.sequence_parallel import parallel_state_sp

    parallel_state_sp.initialize_sequence_parallel(sp)
    return parallel_state_sp


def decaying(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)


def configure(case: Case) -> dict[str, Any]:
    config = {
        "train_micro_batch_size_per_gpu": models.ROWS * case.sp // case.dp,
        "gradient_accumulation_steps": 1,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": case.stage},
        **ENABLE[case.dtype],
    }
    return merge(config, case.config)


def merge(base: dict[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in extra.items():
        nested = isinstance(value, Mapping) and key in base
        merged[key] = merge(base[key], value) if nested else value
    return merged


def train_step(engine: Any) -> float:
    """Trains on the batch of this step; the mean loss of the global batch."""
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    loss = models.loss(engine, engine.global_steps, rank, ranks)
    # stages 0 to 2 sum the gradients of a sequence, and stage 3 takes their mean (0.19.8)
    summed = engine.sequence_parallel_size if engine.zero_optimization_stage() < 3 else 1
    engine.backward(loss / summed)
    engine.step()
    mean = loss.detach().double()
    torch.distributed.all_reduce(mean)
    return float(mean) / ranks


def recorded(*arguments: Any) -> None:
    from . import recorded

    recorded.deepspeed_runs(*arguments)


def recorded_fsdp(*arguments: Any) -> None:
    from . import recorded

    recorded.fsdp_runs(*arguments)


def recorded_fsdp_again(*arguments: Any) -> None:
    from . import recorded

    recorded.fsdp_resumed(*arguments)


def backward_zero(*arguments: Any) -> None:
    from . import recorded

    recorded.zero_backward(*arguments)


def backward_fsdp(*arguments: Any) -> None:
    from . import recorded

    recorded.fsdp_backward(*arguments)


def refused(
    rank: int,
    store: Path,
    case: Case,
    directory: Path,
    output: Path,
    load: dict[str, Any],
    version: str,
) -> None:
    """Loads `directory` without a copy, which fails; `output`/RANK.json says how it ended."""
    import zckpt.deepspeed

    join(rank, case.dp, store)
    engine = build_engine(case, case.seed + 1000)
    before = [weight.detach().clone() for weight in engine.module.parameters()]
    own, tempfile.tempdir = engine.checkpoint_engine, str(output / "tmp")
    deepspeed.__version__ = version or deepspeed.__version__
    try:
        zckpt.deepspeed.load_checkpoint(engine, directory, **load)
    except (zckpt.ZckptError, RuntimeError) as error:
        torch.distributed.barrier()
        after = engine.module.parameters()
        found = {
            **{name: getattr(error, name, str(error)) for name in ("message", "hint")},
            **{name: getattr(error, name, None) for name in ("code", "file")},
            "kind": type(error).__name__,
            "is_untouched": all(map(torch.equal, before, after)) and not engine.global_steps,
            "has_its_own": engine.checkpoint_engine is own,
            "left": sorted(path.name for path in (output / "tmp").iterdir()),
        }
        (output / f"{rank}.json").write_text(json.dumps(found))


def killed(rank: int, store: Path, case: Case, directory: Path, temporary: Path, name: str) -> None:
    """Loads `directory` without a copy, and dies while a file of this name is filled."""
    from zckpt.deepspeed import load_checkpoint
    from zckpt.loading.filled import FilledFile

    def die(file: FilledFile, *about: Any) -> None:
        if file.path.endswith(name):
            os.kill(os.getpid(), signal.SIGKILL)
        fill(file, *about)

    join(rank, case.dp, store)
    engine = build_engine(case, case.seed + 1000)
    fill, FilledFile._fill = FilledFile._fill, die  # type: ignore[method-assign]
    tempfile.tempdir = str(temporary)
    load_checkpoint(engine, directory)
