"""What one rank of Lightning does, under each of its strategies.

    ddp          one file; of one rank, without DistributedDataParallel
    fsdp         ModelParallelStrategy with FSDP2: a directory
    fsdp_full    the same with whole state dicts: one file
    deepspeed    DeepSpeedStrategy, in fp32: a directory

Lightning 2.6 shards only with a CUDA accelerator. It is told that it has one; all else in it is as
it is. Its FSDPStrategy (FSDP1) says the number of a GPU to FSDP, so that it cannot run here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import models, torch_oracle
from .fsdp_trainers import groups_of, record

SAVED_AT, LOSSES = 3, 5


def processor(devices: list[torch.device]) -> Any:
    """A Lightning accelerator: processes on the processor, which pretends to be CUDA."""
    from lightning.pytorch.accelerators import CUDAAccelerator

    class Processor(CUDAAccelerator):
        """Lightning shards only with CUDA; nothing else in its strategies needs CUDA."""

        def setup_device(self, device: torch.device) -> None: ...

        def setup(self, trainer: Any) -> None: ...

        def teardown(self) -> None: ...

        @staticmethod
        def parse_devices(devices: Any) -> Any:
            return devices

        @staticmethod
        def get_parallel_devices(_: Any) -> list[torch.device]:
            return devices

        @staticmethod
        def auto_device_count() -> int:
            return len(devices)

        @staticmethod
        def is_available() -> bool:
            return True

    return Processor()


def strategy_of(kind: str, job: Any) -> dict[str, Any]:
    """The Trainer's arguments that say how ranks share the model."""
    from lightning.pytorch import strategies

    gloo = {"process_group_backend": "gloo"}
    if kind == "ddp" and job.dp == 1:
        store = torch.distributed.HashStore()  # the model and the losses ask for a group
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        return {"accelerator": "cpu", "strategy": "auto"}
    if kind == "ddp":
        return {"accelerator": "cpu", "strategy": strategies.DDPStrategy(**gloo)}
    if kind == "deepspeed":
        config = {**job.config(), "bf16": {"enabled": False}}
        del config["gradient_accumulation_steps"]  # Lightning's own affair
        devices = [torch.device("cpu", number) for number in range(job.dp)]
        strategy = strategies.DeepSpeedStrategy(config=config, **gloo)
        return {"accelerator": processor(devices), "strategy": strategy}
    strategy = strategies.ModelParallelStrategy(
        data_parallel_size=job.dp,
        tensor_parallel_size=1,
        save_distributed_checkpoint=kind == "fsdp",
        **gloo,
    )
    return {"accelerator": processor([torch.device("cpu")] * job.dp), "strategy": strategy}


def lightning(kind: str) -> Callable[[Any], None]:
    def work(job: Any) -> None:
        import lightning.pytorch as pl
        from torch.distributed.fsdp import fully_shard

        class Module(pl.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.network = models.build("full", job.seed)

            def configure_model(self) -> None:
                if not kind.startswith("fsdp"):
                    return
                mesh = self.device_mesh["data_parallel"]
                fully_shard(self.network.trunk, mesh=mesh)
                fully_shard(self.network, mesh=mesh)

            def configure_optimizers(self) -> Any:
                optimizer = torch.optim.AdamW(groups_of(self, facts))
                scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 20)
                return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

            def training_step(self, batch: torch.Tensor) -> torch.Tensor:
                # Lightning starts its data anew when it resumes within an epoch.
                step = self.trainer.global_step
                loss = models.loss(self.network, step, self.global_rank, job.dp)
                job.add(loss)
                return loss

        class Recorder(pl.Callback):
            def keep(self, trainer: Any) -> None:
                optimizer = trainer.optimizers[0]
                scheduler = trainer.lr_scheduler_configs[0].scheduler
                if kind == "deepspeed":
                    job.record(trainer.strategy.deepspeed_engine)
                    return
                whole = kind == "ddp"
                model = trainer.lightning_module if whole else trainer.strategy.model
                record(job, facts, model, optimizer, scheduler)

            def on_train_start(self, trainer: Any, module: Any) -> None:
                if job.directory:
                    self.keep(trainer)

            def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
                if not job.directory and trainer.global_step == SAVED_AT:
                    job.saved = str(job.run / "x.ckpt")
                    trainer.save_checkpoint(job.saved)
                    self.keep(trainer)

        module = Module()
        facts = torch_oracle.Facts.of(module)
        trainer = pl.Trainer(
            **strategy_of(kind, job),
            devices=job.dp,
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
        trainer.fit(module, steps, ckpt_path=job.directory, weights_only=False)

    return work


KINDS = ("ddp", "fsdp", "fsdp_full", "deepspeed")
TRAINERS = {f"lightning_{kind}": lightning(kind) for kind in KINDS}
