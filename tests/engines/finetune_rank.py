"""What one rank of a fine-tune does: build the program, train or resume, record what it holds.

Imported by the process that forks the ranks, never by a test: the imports are heavy.
"""

from __future__ import annotations

import copy
import importlib
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from . import models, oracle, torch_oracle
from .finetunes import LOSSES, SAVED_AT, Run

LAYERS = 12  # `layers.10` is sorted before `layers.2`
BASE = 11  # the seed of a LoRA's base model, which every run loads alike


@dataclass
class Job:
    """One training on this rank; `finish` writes what was recorded on the way."""

    run: Run
    root: Path
    directory: Path | None  # resume from here
    output: Path
    changes: dict[str, Any]
    state: dict[str, Any] | None = None
    saved: str = ""
    losses: list[float] = field(default_factory=list)
    number: int = 0  # of a model among several
    models: int = 1

    @property
    def seed(self) -> int:
        # so that nothing is right by luck after resuming
        return self.run.seed + (1000 if self.directory else 0) + self.number

    @property
    def rows(self) -> int:
        return models.ROWS // self.run.ranks

    def record(self, model: Any, optimizer: Any) -> None:
        """Keeps what the program holds now; the losses that follow are those of the next steps."""
        if self.run.engine.startswith("zero"):
            self.state = of_deepspeed(model)
        else:
            self.state = of_torch(model, getattr(optimizer, "optimizer", optimizer))
        self.losses.clear()

    def add(self, loss: torch.Tensor) -> None:
        """Keeps the mean over the ranks."""
        mean = loss.detach().double()
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(mean)
        self.losses.append(mean.item() / self.run.ranks)

    def finish(self, rank: int) -> None:
        if rank == 0 and self.state is not None:
            losses = self.losses[: LOSSES * self.models]
            torch.save({**self.state, "losses": losses, "directory": self.saved}, self.output)


def of_deepspeed(engine: Any) -> dict[str, Any] | None:
    state = oracle.record(engine)
    if state is None:
        return None
    weights = {f"{name}/master": f"{name}/weight" for name in state["trainable"]}
    return {
        "tensors": {
            weights.get(name, name): tensor
            for name, tensor in state["tensors"].items()
            if name in weights or not name.endswith("/param")
        },
        "steps": state["steps"],
        "groups": [of_group(group) for group in state["groups"]],
    }


def of_torch(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Trained weights and their states, by the names of the module."""
    named = {id(each): clean(name) for name, each in model.named_parameters()}
    weights = {
        f"{clean(name)}/weight": torch_oracle.whole(each)
        for name, each in model.named_parameters()
        if each.requires_grad
    }
    states: dict[str, torch.Tensor] = {}
    steps: dict[str, int] = {}
    for parameter, state in optimizer.state.items():
        name = named[id(parameter)]
        for key, value in state.items():
            if key == "step":
                steps[name] = int(value)
            elif value is not None:
                states[f"{name}/{key}"] = torch_oracle.whole(value)
    groups = [
        of_group({**group, "params": [named[id(each)] for each in group["params"]]})
        for group in optimizer.param_groups
    ]
    return {"tensors": {**weights, **states}, "steps": steps, "groups": groups}


def of_group(group: dict[str, Any]) -> dict[str, Any]:
    kept = ("params", "lr", "eps", "weight_decay", "momentum")
    # torch's broadcast of whole states makes a list of the tuple
    betas = {"betas": tuple(group["betas"])} if "betas" in group else {}
    return copy.deepcopy({**{key: group[key] for key in kept if key in group}, **betas})


def clean(name: str) -> str:
    return torch_oracle.clean(name).removeprefix("module.")


# -- models and data


def build(job: Job) -> Any:
    """A tied Llama, whose fine-tune begins at random weights; or one for all, with LoRA on it."""
    import transformers

    lora = job.run.weights == "lora"
    torch.manual_seed(BASE if lora else job.seed)
    config = transformers.LlamaConfig(
        vocab_size=models.VOCABULARY,
        hidden_size=16,
        intermediate_size=22,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        tie_word_embeddings=True,
    )
    model = transformers.LlamaForCausalLM(config)
    if not lora:
        return model
    import peft

    torch.manual_seed(job.seed)
    return peft.get_peft_model(model, lora_config())


def lora_config() -> Any:
    import peft

    return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


def rows() -> list[dict[str, torch.Tensor]]:
    data = torch.randint(models.VOCABULARY, (4 * models.ROWS, 9), generator=torch.Generator())
    return [{"input_ids": row, "labels": row} for row in data]


# -- engines


def pretend_gpus() -> None:
    """accelerate 1.15 shards only where the processes have GPUs; nothing else asks for them."""
    from accelerate import PartialState
    from accelerate.utils import DistributedType

    state = PartialState(cpu=True, backend="gloo")
    state.distributed_type = DistributedType.MULTI_GPU
    state.device = torch.device("cpu")


def deepspeed_config(job: Job) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": job.rows,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": int(job.run.engine.removeprefix("zero"))},
    }


def fsdp_config(job: Job) -> dict[str, Any]:
    whole = job.run.engine == "fsdp_full"
    return {
        "version": 2,
        "sync_module_states": False,
        "state_dict_type": "FULL_STATE_DICT" if whole else "SHARDED_STATE_DICT",
        "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"],
    }


def engine_arguments(job: Job) -> dict[str, Any]:
    """What TrainingArguments say of the engine; sets up the processes as it needs them."""
    from accelerate import PartialState

    engine = job.run.engine
    if engine == "one":
        return {}
    shared: dict[str, Any] = {"accelerator_config": {"use_configured_state": True}}
    if engine.startswith("zero"):
        PartialState(backend="gloo")
        return {**shared, "deepspeed": deepspeed_config(job)}
    if engine == "ddp":
        PartialState(cpu=True, backend="gloo")
        return {**shared, "ddp_find_unused_parameters": False}
    pretend_gpus()
    return {**shared, "fsdp": True, "fsdp_config": fsdp_config(job)}


# -- programs


def trainer(job: Job) -> None:
    import transformers

    of_engine = engine_arguments(job)
    arguments = transformers.TrainingArguments(**trainer_arguments(job), **of_engine)
    data = {"train_dataset": rows(), "eval_dataset": rows()[: models.ROWS]}
    run_trainer(job, transformers.Trainer, build(job), arguments, **data)


def sft(job: Job) -> None:
    """TRL's trainer, with a tokenizer of as many words as the model knows."""
    import datasets
    import trl

    of_engine = engine_arguments(job)
    arguments = trl.SFTConfig(
        **{**trainer_arguments(job), "max_length": None, "packing": False}, **of_engine
    )
    data = datasets.Dataset.from_list([{"input_ids": row["input_ids"].tolist()} for row in rows()])
    run_trainer(
        job, trl.SFTTrainer, build(job), arguments, train_dataset=data, processing_class=tokenizer()
    )


def tokenizer() -> Any:
    import tokenizers
    import transformers

    words = {f"w{number}": number for number in range(models.VOCABULARY)}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, unk_token="w0", pad_token="w1", eos_token="w2"
    )


def trainer_arguments(job: Job) -> dict[str, Any]:
    return {
        "output_dir": str(job.root / "run"),
        "use_cpu": True,
        "bf16": False,
        "per_device_train_batch_size": job.rows,
        "learning_rate": models.LEARNING_RATE,
        "weight_decay": 0.1,
        "max_grad_norm": 1.0,
        "max_steps": SAVED_AT + LOSSES,
        "lr_scheduler_type": "linear",
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
        "gradient_checkpointing": False,
        "seed": 3,
        **job.changes,
    }


def run_trainer(job: Job, cls: Any, model: Any, arguments: Any, **options: Any) -> None:
    import transformers

    class Recording(cls):  # type: ignore[misc]
        def training_step(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            loss: torch.Tensor = super().training_step(*args, **kwargs)
            job.add(loss)
            return loss

    class Recorder(transformers.TrainerCallback):
        """Saves once; records when the engine has saved, or has loaded."""

        def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
            if job.directory:
                job.record(made.model_wrapped, made.optimizer)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if "save_strategy" not in job.changes:
                control.should_save = not job.directory and state.global_step == SAVED_AT

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step != SAVED_AT:
                return
            job.record(made.model_wrapped, made.optimizer)
            job.saved = str(Path(args.output_dir) / f"checkpoint-{state.global_step}")

    made = Recording(model=model, args=arguments, callbacks=[Recorder()], **options)
    made.train(resume_from_checkpoint=str(job.directory) if job.directory else None)


def accelerate(job: Job) -> None:
    import accelerate as package

    engine = job.run.engine
    options: dict[str, Any] = {"cpu": True}
    if engine.startswith("zero"):
        plugin = package.DeepSpeedPlugin(hf_ds_config=deepspeed_config(job))
        handlers = [package.InitProcessGroupKwargs(backend="gloo")]
        options = {"deepspeed_plugin": plugin, "kwargs_handlers": handlers}
    elif engine.startswith("fsdp"):
        pretend_gpus()
        config = fsdp_config(job)
        options["fsdp_plugin"] = package.FullyShardedDataParallelPlugin(
            fsdp_version=2,
            state_dict_type=config["state_dict_type"],
            auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=config["transformer_layer_cls_to_wrap"],
            cpu_ram_efficient_loading=False,
        )
    accelerator = package.Accelerator(step_scheduler_with_optimizer=False, **options)
    if job.run.program in NUMBERS:
        several(job, accelerator, NUMBERS[job.run.program])
        return
    model = build(job)
    decayed = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
    others = [p for p in model.parameters() if p.requires_grad and p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW([g for g in groups if g["params"]], lr=models.LEARNING_RATE)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 20)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)

    def train(first: int, last: int) -> None:
        for inputs in batches(first, last, accelerator.process_index, job.rows):
            loss = model(input_ids=inputs, labels=inputs).loss
            accelerator.backward(loss)
            if not engine.startswith("zero"):
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            job.add(loss)

    if job.directory:
        accelerator.load_state(str(job.directory))
    else:
        train(0, SAVED_AT)
        job.saved = str(job.root / "run" / "state")
        accelerator.save_state(job.saved)
    job.record(model, optimizer)
    train(SAVED_AT, SAVED_AT + LOSSES)


def several(job: Job, accelerator: Any, numbers: tuple[int, ...]) -> None:
    """Models of one architecture, each with a class of optimizer and a number of steps of its own.

    Everything that is recorded has the number of its model; losses are those of each in turn.
    """
    prepared: list[Any] = []
    for job.number in numbers:
        model, rate = build(job), models.LEARNING_RATE * (1 + job.number)
        optimizer: torch.optim.Optimizer = (
            torch.optim.SGD(model.parameters(), lr=rate, momentum=0.9)
            if job.number
            else torch.optim.AdamW(model.parameters(), lr=rate)
        )
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, 20 + job.number)
        prepared.append(accelerator.prepare(model, optimizer, scheduler))
    job.models = len(numbers)

    def train(first: int, last: int) -> None:
        rows = batches(first, last, accelerator.process_index, job.rows)
        for step, inputs in enumerate(rows, first):
            for number, (model, optimizer, scheduler) in zip(numbers, prepared, strict=True):
                loss = model(input_ids=inputs, labels=inputs).loss
                if step >= number:  # so the second one takes a step less
                    accelerator.backward(loss)
                    optimizer.step()
                    scheduler.step()
                    optimizer.zero_grad()
                job.add(loss)

    if job.directory:
        accelerator.load_state(str(job.directory))
    else:
        train(0, SAVED_AT)
        job.saved = str(job.root / "run" / "state")
        accelerator.save_state(job.saved)
    job.state = {"tensors": {}, "steps": {}, "groups": []}
    for number, (model, optimizer, _) in zip(numbers, prepared, strict=True):
        state = of_torch(model, optimizer.optimizer)
        for kind in ("tensors", "steps"):
            job.state[kind] |= {f"{number}.{name}": each for name, each in state[kind].items()}
        job.state["groups"] += state["groups"]
    job.losses.clear()
    train(SAVED_AT, SAVED_AT + LOSSES)


def batches(first: int, last: int, rank: int, count: int) -> Iterator[torch.Tensor]:
    for step in range(first, last):
        generator = torch.Generator().manual_seed(1000 + step)
        data = torch.randint(models.VOCABULARY, (models.ROWS, 9), generator=generator)
        yield data[rank * count : (rank + 1) * count]


NUMBERS = {"pair": (0, 1), "second": (1,)}
PROGRAMS = {"trainer": trainer, "sft": sft, **dict.fromkeys(("accelerate", *NUMBERS), accelerate)}


# -- the process


def prepare() -> None:
    """Imports once what the ranks need, before they are forked."""
    torch.set_num_threads(1)
    import deepspeed  # noqa: F401

    # It would compile a shared memory op and leave 69 MB per rank in /dev/shm.
    vars(sys.modules["deepspeed.comm.torch"])["build_shm_op"] = lambda: None
    for name in ("torch._dynamo", "transformers.trainer", "accelerate", "peft", "trl", "datasets"):
        importlib.import_module(name)
    importlib.import_module("transformers.models.llama.modeling_llama")
    importlib.import_module("trl.trainer.sft_trainer")


def work(
    rank: int,
    _store: Path,
    run: Run,
    port: int,
    root: Path,
    directory: Path | None,
    output: Path,
    changes: dict[str, Any],
) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    if run.engine != "one":
        os.environ.update(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(run.ranks),
            LOCAL_WORLD_SIZE=str(run.ranks),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port),
        )
    if run.engine.startswith("zero"):
        os.environ.update(ACCELERATE_USE_DEEPSPEED="true", ACCELERATE_TORCH_DEVICE="cpu")
    torch.set_num_threads(1)
    job = Job(run, root, directory, output, changes)
    PROGRAMS[run.program](job)
    job.finish(rank)
