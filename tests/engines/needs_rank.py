"""What one rank of a program does that resumes by its own means, as its manual says.

It trains with other seeds after resuming, so that nothing is right by luck. With SAVED_AT steps
done it saves, if it did not resume, and then trains on: those are the losses of a run that nothing
has interrupted.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from . import device, models
from .needs import SAVED_AT, STEPS, Program

MODULES = ("transformers.trainer", "accelerate", "peft")


def prepare() -> None:
    device.prepare()
    for name in MODULES:
        importlib.import_module(name)


@dataclass
class Job:
    """One start of a program, on this rank."""

    program: Program
    root: Path
    checkpoint: Path | None
    rank: int
    opened: set[str] = field(default_factory=set)

    @property
    def seed(self) -> int:
        return 1007 if self.checkpoint else 7

    @property
    def run(self) -> Path:
        return self.root / "run"

    @property
    def ranks(self) -> int:
        return self.program.ranks

    def has(self, what: str) -> bool:
        return what in self.program.has

    def loss(self, model: torch.nn.Module, step: int) -> torch.Tensor:
        return models.loss(model, step, self.rank, self.ranks)

    def add(self, step: int, loss: torch.Tensor, rate: float) -> None:
        """Notes the mean loss of the global batch of a step, and the rate of its update."""
        mean = loss.detach().double().clone()
        if self.ranks > 1:
            dist.all_reduce(mean)
        if self.rank == 0:
            self.note(step=step, loss=float(mean) / self.ranks, rate=float(rate))

    def note(self, **line: Any) -> None:
        with (self.root / "steps").open("a") as log:
            log.write(json.dumps(line) + "\n")

    def saves(self, step: int) -> bool:
        """Whether the program saves now that so many steps are done."""
        return self.checkpoint is None and step == SAVED_AT

    def config(self) -> dict[str, Any]:
        """A ds_config; it has a `scheduler` or an `optimizer` if the program says so."""
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": models.ROWS // self.ranks,
            "gradient_accumulation_steps": 1,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {"stage": self.program.stage},
        }
        if self.has("scheduler"):
            rates = {"warmup_min_lr": 0.0, "warmup_max_lr": models.LEARNING_RATE}
            steps = {"warmup_num_steps": 1, "total_num_steps": STEPS + 3}
            config["scheduler"] = {"type": "WarmupDecayLR", "params": {**rates, **steps}}
        if self.has("optimizer"):
            values = {"lr": models.LEARNING_RATE, "weight_decay": 0.1, "torch_adam": True}
            config["optimizer"] = {"type": "AdamW", "params": values}
        return config


def train(
    rank: int, store: Path, program: Program, root: Path, path: Path | None, port: int
) -> None:
    job = Job(program, root, path, rank)
    if program.ranks == 1:
        del os.environ["LOCAL_RANK"]  # which says that there is a group to join
    else:
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(device.local(rank)),
            WORLD_SIZE=str(program.ranks),
            LOCAL_WORLD_SIZE=str(program.ranks),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
    if path:
        sys.addaudithook(noting(path.parent, job.opened))
    try:
        KINDS[program.kind](job)
    finally:
        job.note(opened=sorted(job.opened))


def noting(folder: Path, opened: set[str]) -> Callable[[str, tuple[Any, ...]], None]:
    """A hook that adds the names of the folder's files that this process opens."""
    root = os.path.join(folder, "")

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(path := arguments[0], str) and path.startswith(root):
            opened.add(path[len(root) :])

    return hook


def rate_of(optimizer: Any) -> float:
    rate: float = optimizer.param_groups[0]["lr"]
    return rate


def decay(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, STEPS + 3)


# -- DeepSpeed alone: the scheduler is torch's, and the engine's files have it


def deepspeed(job: Job) -> None:
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    model = models.build("full", job.seed)
    optimizer = torch.optim.AdamW(models.parameter_groups(model, 2))
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=decay(optimizer), config=job.config()
    )
    if job.checkpoint:
        engine.load_checkpoint(str(job.checkpoint))
    for step in range(engine.global_steps, STEPS):
        loss = job.loss(engine, step)
        engine.backward(loss)
        rate = engine.get_lr()[0]
        engine.step()
        job.add(step, loss, rate)
        if job.saves(step + 1):
            engine.save_checkpoint(str(job.run / "checkpoint"))


# -- the Trainer: alone, with DeepSpeed or with FSDP2


def trainer(job: Job) -> None:
    """`full` has FSDP's whole state dicts, `only_model` saves no optimizer, `lora` an adapter."""
    import tokenizers
    import transformers
    from accelerate import PartialState

    more: dict[str, Any] = {}
    if job.program.stage is not None:
        os.environ.update(ACCELERATE_USE_DEEPSPEED="true", ACCELERATE_TORCH_DEVICE="cpu")
        PartialState(backend="gloo")
        more["deepspeed"] = job.config()
    elif job.ranks > 1:
        from .fsdp_trainers import pretend_gpus

        pretend_gpus()
        more["fsdp"], more["fsdp_config"] = (
            True,
            {
                "version": 2,
                "sync_module_states": False,
                "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
                "state_dict_type": "FULL_STATE_DICT" if job.has("full") else "SHARDED_STATE_DICT",
            },
        )
    if more:
        more["accelerator_config"] = {"use_configured_state": True}

    class Trainer(transformers.Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            loss: torch.Tensor = super().training_step(*args, **kwargs)
            job.add(self.state.global_step, loss, rate_of(self.optimizer))
            return loss

    class Save(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_save = job.saves(state.global_step)
            control.should_training_stop = state.global_step == STEPS

    arguments = transformers.TrainingArguments(
        output_dir=str(job.run),
        **more,
        use_cpu=True,
        per_device_train_batch_size=models.ROWS // job.ranks,
        learning_rate=models.LEARNING_RATE,
        weight_decay=0.1,
        max_steps=STEPS + 3,
        lr_scheduler_type="linear",
        save_strategy="no",
        save_only_model=job.has("only_model") and job.checkpoint is None,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=3,
    )
    lora = job.has("lora")
    model, data = models.build_llama(11 if lora else job.seed)
    if lora:
        import peft

        torch.manual_seed(job.seed)
        about = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, about)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, "a"))
    program = Trainer(
        model,
        arguments,
        train_dataset=data,
        data_collator=transformers.default_data_collator,
        processing_class=transformers.PreTrainedTokenizerFast(tokenizer_object=words),
        callbacks=[Save()],
    )
    program.train(resume_from_checkpoint=job.checkpoint and str(job.checkpoint))


# -- Accelerate: alone, with FSDP2 or with DeepSpeed


class Done:
    """What the program itself keeps in its checkpoints: how many steps are done."""

    steps = 0

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]


def accelerate(job: Job) -> None:
    from accelerate import (
        Accelerator,
        DeepSpeedPlugin,
        FullyShardedDataParallelPlugin,
        InitProcessGroupKwargs,
    )
    from accelerate.utils import DummyScheduler

    from .fsdp_trainers import pretend_gpus

    more: dict[str, Any] = {"cpu": True}
    if job.program.stage is not None:
        os.environ.update(ACCELERATE_USE_DEEPSPEED="true", ACCELERATE_TORCH_DEVICE="cpu")
        plugin = DeepSpeedPlugin(hf_ds_config=job.config())
        gloo = InitProcessGroupKwargs(backend="gloo")
        more = {"deepspeed_plugin": plugin, "kwargs_handlers": [gloo]}
    elif job.ranks > 1:
        pretend_gpus()
        more["fsdp_plugin"] = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            state_dict_type="FULL_STATE_DICT" if job.has("full") else "SHARDED_STATE_DICT",
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["Sequential"],
            cpu_ram_efficient_loading=False,
        )
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    accelerator = Accelerator(step_scheduler_with_optimizer=False, **more)
    model = models.build("full", job.seed)
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=models.LEARNING_RATE)
    scheduler = DummyScheduler(optimizer) if job.has("scheduler") else decay(optimizer)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    done = Done()
    accelerator.register_for_checkpointing(done)
    if job.checkpoint:
        accelerator.load_state(str(job.checkpoint))
    while done.steps < STEPS:
        loss = job.loss(model, done.steps)
        accelerator.backward(loss)
        rate = rate_of(optimizer)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        job.add(done.steps, loss, rate)
        done.steps += 1
        if job.saves(done.steps):
            accelerator.save_state(str(job.run / "checkpoint"))


# -- Lightning: alone, with FSDP2 or with DeepSpeed


def lightning(job: Job) -> None:
    """`only_model` saves with `weights_only=True`."""
    import lightning.pytorch as pl
    from torch.distributed.fsdp import fully_shard

    from . import lightning_rank

    zero = job.program.stage is not None
    kind = "deepspeed" if zero else "fsdp" if job.ranks > 1 else "ddp"

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = models.build("full", job.seed)

        def configure_model(self) -> None:
            if kind == "fsdp":
                mesh = self.device_mesh["data_parallel"]
                fully_shard(self.network.trunk, mesh=mesh)
                fully_shard(self.network, mesh=mesh)

        def configure_optimizers(self) -> Any:
            trained = [each for each in self.parameters() if each.requires_grad]
            optimizer = torch.optim.AdamW(trained, lr=models.LEARNING_RATE)
            return [optimizer], [{"scheduler": decay(optimizer), "interval": "step"}]

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            step = self.trainer.global_step
            loss = job.loss(self.network, step)
            job.add(step, loss, rate_of(self.trainer.optimizers[0]))
            return loss

    class Save(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if job.saves(trainer.global_step):
                path = job.run / "step.ckpt"
                trainer.save_checkpoint(path, weights_only=job.has("only_model"))

    about = SimpleNamespace(dp=job.ranks, config=job.config)
    trainer = pl.Trainer(
        **lightning_rank.strategy_of(kind, about),
        devices=job.ranks,
        max_steps=STEPS,
        callbacks=[Save()],
        default_root_dir=str(job.root),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    steps: Any = torch.utils.data.DataLoader(range(STEPS))
    trainer.fit(Module(), steps, ckpt_path=job.checkpoint, weights_only=False)


KINDS: dict[str, Callable[[Job], None]] = {
    "deepspeed": deepspeed,
    "trainer": trainer,
    "accelerate": accelerate,
    "lightning": lightning,
}
