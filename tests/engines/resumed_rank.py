"""What one rank of a run does that goes on by itself: `zckpt.auto_resume`, then it trains.

Every kind of program trains from where it is until step STEPS, and saves every second step. With
`kill` all of its ranks die of SIGKILL in step KILLED_AT, as a job does whose node is lost: after
the "step", or in the "save" behind it, when half of the optimizer's file is written.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from . import device, models
from .resumed import KILLED_AT, STEPS, Program

MODULES = ("transformers.trainer", "accelerate", "peft", "zckpt.resume.auto")


def prepare() -> None:
    import deepspeed  # noqa: F401  imported once, before the ranks are forked

    # It would compile a shared memory op and leave 69 MB per rank in /dev/shm.
    vars(sys.modules["deepspeed.comm.torch"])["build_shm_op"] = lambda: None
    prepare_torch()


def prepare_torch() -> None:
    device.prepare()
    for name in MODULES:
        importlib.import_module(name)


@dataclass
class Job:
    """One start of a program, on this rank."""

    program: Program
    run: Path
    rank: int
    ranks: int
    kill: str
    log: Path
    seed: int
    saves: bool

    def path(self, **words: Any) -> Any:
        import zckpt

        path = zckpt.auto_resume(self.run, **words)
        if self.rank == 0:
            with self.log.open("a") as log:
                print(json.dumps({"path": path, "report": path and path.report}), file=log)
        return path

    def add(self, step: int, loss: torch.Tensor) -> None:
        """Notes the mean loss of the global batch of a step."""
        mean = loss.detach().double().clone()
        dist.all_reduce(mean)
        if self.rank == 0:
            with self.log.open("a") as log:
                print(json.dumps({"step": step, "loss": float(mean) / self.ranks}), file=log)
        dist.barrier()
        if self.kill == "step" and step == KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)

    def is_saved(self, step: int) -> bool:
        """Whether the program saves when so many steps are done."""
        return self.saves and step % 2 == 0

    @property
    def rows(self) -> int:
        return models.ROWS // self.ranks

    def config(self) -> dict[str, Any]:
        return {
            "train_micro_batch_size_per_gpu": self.rows,
            "gradient_accumulation_steps": 1,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {"stage": self.program.stage},
        }


def train(
    rank: int,
    store: Path,
    program: Program,
    run: Path,
    ranks: int,
    kill: str,
    log: Path,
    port: int,
) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(device.local(rank)),
        WORLD_SIZE=str(ranks),
        LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    if kill == "save":
        die_in_save()
    is_first = not run.exists()
    # so that nothing is right by luck after resuming
    seed = 7 if is_first else 1007
    job = Job(program, run, rank, ranks, kill, log, seed, saves=is_first)
    KINDS[program.kind](job)


def die_in_save() -> None:
    save = torch.save

    def save_half(value: Any, file: Any, *more: Any, **words: Any) -> None:
        save(value, file, *more, **words)
        if f"step{KILLED_AT + 1}" in str(file) and "optim_states" in str(file):
            os.truncate(file, os.path.getsize(file) // 2)
            os.kill(os.getpid(), signal.SIGKILL)

    torch.save = save_half


# -- plain DeepSpeed


def load(engine: Any, path: Any) -> None:
    """As docs/auto-resume.md shows it."""
    engine.load_checkpoint(path.report["load_dir"], tag=path.tag)


def zero(job: Job) -> None:
    import deepspeed

    path = job.path()  # before the group
    backend = device.backend(job.ranks)
    deepspeed.init_distributed(dist_backend=backend, auto_mpi_discovery=False, verbose=False)
    model = models.build("full", job.seed)
    optimizer = torch.optim.AdamW(models.parameter_groups(model, 2))
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=job.config())
    if path:
        load(engine, path)
    for step in range(engine.global_steps, STEPS):
        loss = models.loss(engine, step, job.rank, job.ranks)
        engine.backward(loss)
        engine.step()
        job.add(step, loss)
        if job.is_saved(step + 1):
            engine.save_checkpoint(str(job.run))


def pipeline(job: Job) -> None:
    import deepspeed

    from . import grid_rank
    from .grids import GridCase

    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    stage, pp = job.program.stage, 2
    names = [job.run.parent / f"names-{number}" for number in range(pp)]
    # files of stage 0 do not say which of equal layers a state belongs to
    told = {} if stage or job.saves else {"param_names": lines_of(names)}
    path = job.path(**told)  # after the group
    case = GridCase("resumed", "pipe", pp=pp, dp=job.ranks // pp, stage=stage, dtype="fp32")
    engine = grid_rank.build_engine(case, grid_rank.Axes(case), job.seed)
    if path:
        load(engine, path)
    if job.saves and not stage:
        own = {id(each): name for name, each in engine.module.named_parameters()}
        groups = engine.basic_optimizer.param_groups
        listed = [own[id(each)] for group in groups for each in group["params"]]
        names[job.rank // case.dp].write_text("\n".join(listed))
    for step in range(engine.global_steps, STEPS):
        loss = grid_rank.train_step(engine, case, grid_rank.Axes(case), step)
        job.add(step, torch.as_tensor(loss))
        if job.is_saved(step + 1):
            engine.save_checkpoint(str(job.run))


def lines_of(files: Sequence[Path]) -> list[str]:
    return [line for file in files for line in file.read_text().splitlines()]


# -- trainers


def hf_trainer(job: Job) -> None:
    import transformers

    import zckpt

    fsdp, deepspeed_config = {}, None
    if job.program.stage:
        from accelerate import PartialState

        os.environ.update(ACCELERATE_USE_DEEPSPEED="true", ACCELERATE_TORCH_DEVICE="cpu")
        PartialState(backend="gloo")
        deepspeed_config = job.config()
    else:
        from .fsdp_trainers import pretend_gpus

        pretend_gpus()
        config = {"version": 2, "sync_module_states": False}
        layers = {"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
        kind = {"state_dict_type": "SHARDED_STATE_DICT"}
        fsdp = {"fsdp": True, "fsdp_config": {**config, **layers, **kind}}

    class Trainer(transformers.Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            loss: torch.Tensor = super().training_step(*args, **kwargs)
            job.add(self.state.global_step, loss)
            return loss

    arguments = transformers.TrainingArguments(
        output_dir=str(job.run),
        deepspeed=deepspeed_config,
        **fsdp,
        accelerator_config={"use_configured_state": True},
        use_cpu=True,
        per_device_train_batch_size=job.rows,
        learning_rate=models.LEARNING_RATE,
        weight_decay=0.1,
        max_grad_norm=1.0,
        max_steps=STEPS,
        lr_scheduler_type="linear",
        save_strategy="steps" if job.saves else "no",
        save_steps=2,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=3,
    )
    lora = job.program.lora
    model, data = models.build_llama(11 if lora else job.seed)
    if lora:
        import peft

        torch.manual_seed(job.seed)
        about = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, about)
    trainer = Trainer(model, arguments, train_dataset=data)
    path = job.path()
    assert path == zckpt.auto_resume(arguments.output_dir)
    trainer.train(resume_from_checkpoint=path)


def accelerate(job: Job) -> None:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import ProjectConfiguration

    from .fsdp_trainers import pretend_gpus

    pretend_gpus()
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        state_dict_type="SHARDED_STATE_DICT",
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Sequential"],
        cpu_ram_efficient_loading=False,
    )
    project = ProjectConfiguration(str(job.run), automatic_checkpoint_naming=True)
    accelerator = Accelerator(
        fsdp_plugin=plugin, project_config=project, step_scheduler_with_optimizer=False, cpu=True
    )
    model = models.build("full", job.seed)
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=models.LEARNING_RATE)
    model, optimizer = accelerator.prepare(model, optimizer)
    path, first = job.path(), 0
    if path:
        accelerator.load_state(path)
        first = int(path.step)
    for step in range(first, STEPS):
        loss = models.loss(model, step, job.rank, job.ranks)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        job.add(step, loss)
        if job.is_saved(step + 1):
            accelerator.save_state()


def lightning(job: Job) -> None:
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch.distributed.fsdp import fully_shard

    from . import lightning_rank

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = models.build("full", job.seed)

        def configure_model(self) -> None:
            if job.program.stage == 0:
                mesh = self.device_mesh["data_parallel"]
                fully_shard(self.network.trunk, mesh=mesh)
                fully_shard(self.network, mesh=mesh)

        def configure_optimizers(self) -> Any:
            trained = [each for each in self.parameters() if each.requires_grad]
            return torch.optim.AdamW(trained, lr=models.LEARNING_RATE)

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            step = self.trainer.global_step
            loss = models.loss(self.network, step, job.rank, job.ranks)
            job.add(step, loss)
            return loss

    from types import SimpleNamespace

    about = SimpleNamespace(dp=job.ranks, config=job.config)
    kind = "deepspeed" if job.program.stage else "fsdp"
    save = ModelCheckpoint(str(job.run), "{step}", save_top_k=-1, every_n_train_steps=2)
    trainer = pl.Trainer(
        **lightning_rank.strategy_of(kind, about),
        devices=job.ranks,
        max_steps=STEPS,
        callbacks=[save] if job.saves else [],
        enable_checkpointing=job.saves,
        default_root_dir=str(job.run.parent),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    steps: Any = torch.utils.data.DataLoader(range(STEPS))
    path = job.path(dp=trainer.world_size)
    trainer.fit(Module(), steps, ckpt_path=path, weights_only=False)


# -- PyTorch alone


def fsdp2(job: Job) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.fsdp import fully_shard

    import zckpt

    dist.init_process_group("gloo")
    model = models.build("full", job.seed)
    fully_shard(model.trunk)
    fully_shard(model)
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=models.LEARNING_RATE)
    path, first = job.path(), 0
    if path:
        weights, states = get_state_dict(model, optimizer)
        state = {"model": weights, "optim": states}
        dcp.load(state, storage_reader=zckpt.dcp.StorageReader(path))
        set_state_dict(
            model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
        )
        first = int(path.step)
    for step in range(first, STEPS):
        loss = models.loss(model, step, job.rank, job.ranks)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        job.add(step, loss)
        if job.is_saved(step + 1):
            weights, states = get_state_dict(model, optimizer)
            folder = job.run / f"step-{step + 1}"
            dcp.save({"model": weights, "optim": states}, checkpoint_id=folder)


KINDS: dict[str, Callable[[Job], None]] = {
    "zero": zero,
    "pipeline": pipeline,
    "hf_trainer": hf_trainer,
    "accelerate": accelerate,
    "lightning": lightning,
    "fsdp2": fsdp2,
}
