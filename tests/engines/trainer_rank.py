"""What one rank of a trainer does: build it, train or resume, record the engine behind it.

Run as a module by `trainers.py`, with one JSON argument; it forks the ranks. Never imported by a
test, because the imports are heavy.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from . import fsdp_trainers, lightning_rank, models, oracle
from .lightning_rank import processor
from .zygote import run as run_ranks

SAVED_AT, LOSSES = 3, 5
TIMEOUT = 240.0


@dataclass
class Job:
    """One training; `finish` writes what was recorded on the way."""

    trainer: str
    root: str
    stage: int  # of ZeRO; 0 is FSDP
    dp: int
    directory: str | None  # resume from here
    output: str
    copy: bool | None = None  # as zckpt.auto_resume takes it; None if it is not asked
    state: dict[str, Any] | None = None
    saved: str = ""
    losses: list[float] = field(default_factory=list)

    @property
    def seed(self) -> int:
        return 1007 if self.directory else 7  # so that nothing is right by luck after resuming

    @property
    def run(self) -> Path:
        return Path(self.root) / "run"

    def path(self) -> Any:
        """What the trainer is told to resume from."""
        if self.copy is None or not self.directory:
            return self.directory
        import zckpt

        words: dict[str, Any] = {"copy": self.copy, "scratch": self.root}
        path = zckpt.auto_resume(self.directory, tell=lambda lines: None, **words)
        assert path is not None
        assert path.report["names"] == ("-names" in path) == (not self.copy)
        return path

    def record(self, engine: Any) -> None:
        """What a DeepSpeed engine holds."""
        self.keep(oracle.record(engine))

    def keep(self, state: dict[str, Any] | None) -> None:
        self.state = state
        self.losses.clear()

    def add(self, loss: torch.Tensor) -> None:
        """Keeps the mean over the ranks."""
        mean = loss.detach().double()
        torch.distributed.all_reduce(mean)
        self.losses.append(mean.item() / self.dp)

    def finish(self) -> None:
        if self.state is not None:
            torch.save({**self.state, "losses": self.losses, "directory": self.saved}, self.output)

    def config(self) -> dict[str, Any]:
        return {
            "train_micro_batch_size_per_gpu": models.ROWS // self.dp,
            "gradient_accumulation_steps": 1,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": self.stage},
            "bf16": {"enabled": True},
        }


def hf_trainer(job: Job) -> None:
    import transformers
    from accelerate import PartialState

    # Trainer itself asks for a backend of CUDA's; a configured state is its way to another one.
    PartialState(backend="gloo")

    class Trainer(transformers.Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            loss: torch.Tensor = super().training_step(*args, **kwargs)
            job.add(loss)
            return loss

    class Recorder(transformers.TrainerCallback):
        """Saves once; records when the engine has saved, or has loaded."""

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            if job.directory:
                job.record(trainer.model_wrapped)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_save = not job.directory and state.global_step == SAVED_AT

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            job.record(trainer.model_wrapped)
            job.saved = str(job.run / f"checkpoint-{state.global_step}")

    arguments = transformers.TrainingArguments(
        output_dir=str(job.run),
        deepspeed=job.config(),
        accelerator_config={"use_configured_state": True},
        use_cpu=True,
        bf16=True,
        per_device_train_batch_size=models.ROWS // job.dp,
        learning_rate=models.LEARNING_RATE,
        weight_decay=0.1,
        max_grad_norm=1.0,
        max_steps=SAVED_AT + LOSSES,
        lr_scheduler_type="linear",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
        seed=3,
    )
    model, data = models.build_llama(job.seed)
    model.model.layers[0].mlp.requires_grad_(False)
    if job.trainer == "hf_trainer_lora":
        import peft

        about = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
        model = peft.get_peft_model(model, about)
    trainer = Trainer(model, arguments, train_dataset=data, callbacks=[Recorder()])
    trainer.train(resume_from_checkpoint=job.path())


def accelerate(job: Job) -> None:
    from accelerate import Accelerator, DeepSpeedPlugin, InitProcessGroupKwargs

    accelerator = Accelerator(
        deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=job.config()),
        kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")],
        step_scheduler_with_optimizer=False,  # it would step once for each rank
    )
    model = models.build("full", job.seed)
    optimizer = torch.optim.AdamW(models.parameter_groups(model, 2))
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 20)
    engine, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)

    def train(first: int, last: int) -> None:
        for step in range(first, last):
            loss = models.loss(engine, step, accelerator.process_index, job.dp)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            job.add(loss)

    if job.directory:
        accelerator.load_state(job.path())
    else:
        train(0, SAVED_AT)
        job.saved = str(job.run / "state")
        accelerator.save_state(job.saved)
    job.record(engine)
    train(SAVED_AT, SAVED_AT + LOSSES)


def lightning(job: Job) -> None:
    import lightning.pytorch as pl
    from lightning.pytorch.strategies import DeepSpeedStrategy

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = models.build("full", job.seed)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(models.parameter_groups(self.network, 2))
            scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 20)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

        def training_step(self, batch: torch.Tensor) -> torch.Tensor:
            # Lightning starts its data anew when it resumes within an epoch.
            loss = models.loss(self.network, self.trainer.global_step, self.global_rank, job.dp)
            job.add(loss)
            return loss

    class Recorder(pl.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            if job.directory:
                job.record(trainer.strategy.deepspeed_engine)

        def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
            if not job.directory and trainer.global_step == SAVED_AT:
                job.saved = str(job.run / "x.ckpt")
                trainer.save_checkpoint(job.saved)
                job.record(trainer.strategy.deepspeed_engine)

    config = job.config()
    del config["gradient_accumulation_steps"]  # Lightning's own affair
    trainer = pl.Trainer(
        accelerator=processor([torch.device("cpu", number) for number in range(job.dp)]),
        devices=job.dp,
        strategy=DeepSpeedStrategy(config=config, process_group_backend="gloo"),
        precision="bf16-true",
        max_steps=SAVED_AT + LOSSES,
        default_root_dir=job.root,
        callbacks=[Recorder()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    steps: Any = torch.utils.data.DataLoader(range(SAVED_AT + LOSSES))
    trainer.fit(Module(), steps, ckpt_path=job.path(), weights_only=False)


TRAINERS = {
    "hf_trainer": hf_trainer,
    "hf_trainer_lora": hf_trainer,
    "accelerate": accelerate,
    "lightning": lightning,
    **fsdp_trainers.TRAINERS,
    **lightning_rank.TRAINERS,
}


def work(rank: int, job: Job, port: int) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(job.dp),
        LOCAL_WORLD_SIZE=str(job.dp),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    torch.set_num_threads(1)
    TRAINERS[job.trainer](job)
    job.finish()


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    if job.stage:
        import deepspeed  # noqa: F401  imported once, before the ranks are forked

        # It would compile a shared memory op and leave 69 MB per rank in /dev/shm.
        vars(sys.modules["deepspeed.comm.torch"])["build_shm_op"] = lambda: None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = Path(job.output).with_suffix(".log")
    failure = run_ranks(work, job.dp, (job, port), log, TIMEOUT)
    if failure is not None:
        sys.exit(failure)


if __name__ == "__main__":
    main()
