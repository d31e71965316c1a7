"""What one rank of a trainer does with FSDP: Accelerate, transformers.Trainer.

Neither shards on a processor: accelerate 1.15 does so only where the processes have GPUs. It is
told that they have them; all else in it is as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import models, torch_oracle
from .torch_rank import Run

SAVED_AT, LOSSES = 3, 5


def record(
    job: Any,
    facts: torch_oracle.Facts,
    model: Any,
    optimizer: torch.optim.Optimizer,
    scheduler: Any,
) -> None:
    state = torch_oracle.record(Run(model, model, optimizer, scheduler, facts))
    job.keep(state if torch.distributed.get_rank() == 0 else None)


def pretend_gpus() -> None:
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    state = PartialState(cpu=True, backend="gloo")
    state.distributed_type = DistributedType.MULTI_GPU
    state.device = torch.device("cpu")  # without a number, which FSDP1 does not know


def accelerate(kind: str) -> Callable[[Any], None]:
    def work(job: Any) -> None:
        from accelerate import Accelerator, FullyShardedDataParallelPlugin
        from accelerate.utils import (
            load_fsdp_model,
            load_fsdp_optimizer,
            save_fsdp_model,
            save_fsdp_optimizer,
        )

        pretend_gpus()
        version = 1 if "fsdp1" in kind else 2
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=version,
            state_dict_type=state_dict_type(kind),
            auto_wrap_policy="transformer_based_wrap",
            use_orig_params=True if version == 1 else None,
            transformer_cls_names_to_wrap=["Sequential"],
            cpu_ram_efficient_loading=False,
        )
        accelerator = Accelerator(fsdp_plugin=plugin, step_scheduler_with_optimizer=False, cpu=True)
        model = models.build("full", job.seed)
        facts = torch_oracle.Facts.of(model)
        if version == 1:
            model = accelerator.prepare(model)
        optimizer = torch.optim.AdamW(groups_of(model, facts))
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 20)
        if version == 1:
            optimizer, scheduler = accelerator.prepare(optimizer, scheduler)
        else:
            model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)

        def train(first: int, last: int) -> None:
            for step in range(first, last):
                loss = models.loss(model, step, accelerator.process_index, job.dp)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                job.add(loss)

        job.saved = str(job.run / "state")
        if kind == "fsdp_ranks":
            prepared = (plugin, accelerator, model)
            if job.directory:
                for _ in range(SAVED_AT):  # these files do not have the scheduler
                    scheduler.step()
                load_fsdp_model(*prepared, job.directory, use_dcp=False)
                load_fsdp_optimizer(
                    plugin, accelerator, optimizer, model, job.directory, use_dcp=False
                )
            else:
                train(0, SAVED_AT)
                save_fsdp_model(*prepared, job.saved, use_dcp=False)
                save_fsdp_optimizer(plugin, accelerator, optimizer, model, job.saved, use_dcp=False)
        elif job.directory:
            accelerator.load_state(job.directory)
        else:
            train(0, SAVED_AT)
            accelerator.save_state(job.saved)
        record(job, facts, model, optimizer.optimizer, scheduler)
        train(SAVED_AT, SAVED_AT + LOSSES)

    return work


def state_dict_type(kind: str) -> str:
    return "FULL_STATE_DICT" if kind.endswith("full") else "SHARDED_STATE_DICT"


def groups_of(model: torch.nn.Module, facts: torch_oracle.Facts) -> list[dict[str, Any]]:
    """Two groups of the trainable parameters, sharded or not."""
    named = {torch_oracle.clean(name): each for name, each in model.named_parameters()}
    decayed = [named[name] for name in facts.trainable if name.endswith("weight")]
    others = [named[name] for name in facts.trainable if not name.endswith("weight")]
    return [
        {"params": decayed, "lr": models.LEARNING_RATE, "weight_decay": 0.1},
        {"params": others, "lr": models.LEARNING_RATE / 4, "weight_decay": 0.0},
    ]


def hf_trainer(kind: str) -> Callable[[Any], None]:
    def work(job: Any) -> None:
        import transformers

        pretend_gpus()

        class Trainer(transformers.Trainer):
            def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
                loss: torch.Tensor = super().training_step(*args, **kwargs)
                job.add(loss)
                return loss

        def keep() -> None:
            record(
                job,
                facts,
                trainer.model_wrapped,
                trainer.optimizer.optimizer,
                trainer.lr_scheduler,
            )

        class Recorder(transformers.TrainerCallback):
            """Saves once; records when the engine has saved, or has loaded."""

            def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
                if job.directory:
                    keep()

            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                control.should_save = not job.directory and state.global_step == SAVED_AT

            def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                keep()
                job.saved = str(job.run / f"checkpoint-{state.global_step}")

        arguments = transformers.TrainingArguments(
            output_dir=str(job.run),
            fsdp=True,
            fsdp_config={
                "version": 1 if "fsdp1" in kind else 2,
                "sync_module_states": False,
                "state_dict_type": state_dict_type(kind),
                "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
            },
            accelerator_config={"use_configured_state": True},
            use_cpu=True,
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
        facts = torch_oracle.Facts.of(model)
        trainer = Trainer(model, arguments, train_dataset=data, callbacks=[Recorder()])
        trainer.train(resume_from_checkpoint=job.directory)

    return work


TRAINERS = {
    "accelerate_fsdp": accelerate("fsdp"),
    "accelerate_fsdp_full": accelerate("fsdp_full"),
    "accelerate_fsdp1": accelerate("fsdp1"),
    "accelerate_fsdp_ranks": accelerate("fsdp_ranks"),
    "hf_trainer_fsdp": hf_trainer("fsdp"),
    "hf_trainer_fsdp_full": hf_trainer("fsdp_full"),
    "hf_trainer_fsdp1": hf_trainer("fsdp1"),
}
