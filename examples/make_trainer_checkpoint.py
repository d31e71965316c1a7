"""How examples/trainer was made: a Hugging Face Trainer on DeepSpeed ZeRO-2, two ranks, on a CPU.

    python examples/make_trainer_checkpoint.py DIRECTORY
    python examples/make_trainer_checkpoint.py DIRECTORY --ranks 4 --resume CHECKPOINT

Without --resume it trains four of eight steps and saves checkpoint-4. With --resume it trains the
other four. Needs transformers, deepspeed and torch.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
from pathlib import Path
from typing import Any

import torch

STEPS, SAVED_AT, ROWS, CONTEXT = 8, 4, 8, 16
TEXT = (
    "a checkpoint holds weights, moments and steps, and each rank keeps one part of them. "
    "another number of ranks cuts them at other places. "
)
CONFIG = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "zero_allow_untested_optimizer": True,
    "zero_optimization": {"stage": 2},
}


def tokenizer() -> Any:
    """One token for each character."""
    import tokenizers
    import transformers

    vocabulary = {letter: number for number, letter in enumerate(sorted(set(TEXT)), start=1)}
    model = tokenizers.models.WordLevel({"<pad>": 0, **vocabulary})
    whole = tokenizers.Tokenizer(model)
    whole.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=whole, pad_token="<pad>")


def train(directory: str, ranks: int, resume: str | None) -> None:
    """One rank: the steps up to the checkpoint, or those after it."""
    import transformers
    from accelerate import PartialState

    # on a CPU DeepSpeed would compile an operator for shared memory that this does not need
    sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    PartialState(backend="gloo")

    class Pause(transformers.TrainerCallback):
        """Stops the first run where it has saved."""

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == SAVED_AT and resume is None:
                control.should_save = control.should_training_stop = True

        def on_log(self, args: Any, state: Any, control: Any, logs: Any, **kwargs: Any) -> None:
            if state.is_world_process_zero and "loss" in logs:
                print(f"step {state.global_step}  loss {float(logs['loss']):.5f}", flush=True)

    letters = tokenizer()
    numbers = letters(TEXT)["input_ids"]
    data = [
        {"input_ids": numbers[start : start + CONTEXT], "labels": numbers[start : start + CONTEXT]}
        for start in range(len(numbers) - CONTEXT)
    ]
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=len(letters),
            hidden_size=16,
            intermediate_size=22,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
        )
    )
    arguments = transformers.TrainingArguments(
        output_dir=directory,
        deepspeed=CONFIG,
        accelerator_config={"use_configured_state": True},
        use_cpu=True,
        bf16=True,
        per_device_train_batch_size=ROWS // ranks,
        learning_rate=3e-3,
        weight_decay=0.1,
        max_steps=STEPS,
        save_strategy="no",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = transformers.Trainer(
        model, arguments, train_dataset=data, processing_class=letters, callbacks=[Pause()]
    )
    trainer.remove_callback(transformers.PrinterCallback)
    trainer.train(resume_from_checkpoint=resume)


def work(rank: int, port: int, directory: str, ranks: int, resume: str | None) -> None:
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "DS_ACCELERATOR": "cpu",
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_TORCH_DEVICE": "cpu",
    }
    logging.disable(logging.WARNING)
    import deepspeed  # noqa: F401  before the function that `train` replaces in it

    train(directory, ranks, resume)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--resume", metavar="CHECKPOINT")
    options = parser.parse_args()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = (port, str(options.directory), options.ranks, options.resume)
    torch.multiprocessing.spawn(work, arguments, nprocs=options.ranks)
    for script in options.directory.glob("checkpoint-*/zero_to_*.py"):  # DeepSpeed's, not state
        script.unlink()


if __name__ == "__main__":
    main()
