"""What a rank of a Megatron-Core training with torch's FSDP2 does (--use-torch-fsdp2).

megatron_rank.py starts it, for cases that say `fsdp2`; its stubs serve here too. Meshes are of the
CPU, and `to_local` gives the tensor itself, as before torch 2.13: Megatron-Core finds states by its
identity. The gradients are filled instead of computed; what wraps the model, the optimizer and what
is saved are Megatron-Core's own. The first data rank of each slice of the model writes what all of
them held, gathered by torch.

ROOT/CASE/iter_0000003      the checkpoint
ROOT/CASE/oracle-T.pt       the tensors of tensor rank T by `name/slot`
"""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from typing import Any

import torch

from .megatron_fsdp_rank import stub_meshes
from .megatron_rank import POSITIONS, drawn, iteration_of, save, seed_of, sharded, slice_of


def run(case: dict[str, Any], rank: int, world: int, store: str, root: Path) -> None:
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.dist_checkpointing import optimizer as of_states
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from megatron.core.distributed import (
        DistributedDataParallelConfig,
        TorchFullyShardedDataParallel,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    torch.set_num_threads(1)
    files = torch.distributed.FileStore(store, world)
    torch.distributed.init_process_group("gloo", store=files, rank=rank, world_size=world)
    stub_meshes()
    states: Any = of_states
    states.to_local_if_dtensor = lambda tensor: getattr(tensor, "_local_tensor", tensor)
    tp = case["tp"]
    layers, hidden, heads, queries, ffn, vocabulary = case["sizes"]
    parallel_state.initialize_model_parallel(tp, 1, create_gloo_process_groups=True)
    tensor_parallel.random.get_cuda_rng_tracker().fork = lambda *_, **__: contextlib.nullcontext()
    dtype = torch.bfloat16 if case["bf16"] else torch.float32
    gated = case["gated"]
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_query_groups=queries,
        ffn_hidden_size=ffn,
        gated_linear_unit=gated,
        activation_func=torch.nn.functional.silu if gated else torch.nn.functional.gelu,
        add_bias_linear=not gated,
        tensor_model_parallel_size=tp,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=case["bf16"],
        use_cpu_initialization=True,
        perform_initialization=True,  # it also marks the axis that ranks cut
        gradient_accumulation_fusion=False,
        transformer_impl="local",
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(None, False),
        vocabulary,
        POSITIONS,
        share_embeddings_and_output_weights=False,
        position_embedding_type="learned_absolute",
        parallel_output=True,
    ).to(dtype)
    for name, parameter in model.named_parameters():
        parameter.data.copy_(drawn(name, seed_of(case) + slice_of(parameter), parameter.shape) / 4)
    wrapped = TorchFullyShardedDataParallel(config, DistributedDataParallelConfig(), model)
    steps = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=0.01,
            weight_decay=0.1,
            bf16=case["bf16"],
            params_dtype=dtype,
            use_distributed_optimizer=False,
            clip_grad=0.0,
        ),
        [wrapped],
    )
    names = {parameter: name for name, parameter in model.named_parameters()}
    own, tp_rank = root / case["name"], parallel_state.get_tensor_model_parallel_rank()
    if case["load"]:
        load(Path(case["load"]), wrapped, steps)
        record(steps, names, own / f"oracle-{tp_rank}.pt")
        torch.distributed.barrier()
        return
    rng_state = ShardedObject(
        "rng_state",
        [{"random_rng_state": (3, (1, 2), None)}],
        (1, tp),
        (0, tp_rank),
        replica_id=parallel_state.get_data_parallel_rank(with_context_parallel=True),
    )
    for step in range(case["steps"]):
        for parameter, name in names.items():
            salt = seed_of(case) + 100 * (step + 1) + slice_of(parameter)
            give(parameter, drawn(name, salt, parameter.shape))
        done, _, _ = steps.step()
        assert done
    folder = own / iteration_of(case)
    if rank == 0:
        folder.mkdir(parents=True)
    torch.distributed.barrier()
    content = {"singleton_local_shards": False}
    saved = sharded([wrapped], content)
    state = {
        "args": argparse.Namespace(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=1,
            world_size=world,
            data_parallel_size=world // tp,
            swiglu=gated,
            use_torch_fsdp2=True,
            use_distributed_optimizer=False,
            ckpt_format="torch_dist",
            num_query_groups=queries,
            num_layers=layers,
            padded_vocab_size=vocabulary,
            vocab_size=vocabulary - 5,
            untie_embeddings_and_output_weights=True,
            iteration=case["steps"],
        ),
        "checkpoint_version": 3.0,
        "iteration": case["steps"],
        "num_floating_point_operations_so_far": 7.0,
        "opt_param_scheduler": {"max_lr": 0.01, "num_steps": case["steps"] * 8},
        **saved,
        "optimizer": steps.sharded_state_dict(saved, metadata=content),
        "rng_state": rng_state,
    }
    save(case, state, folder, content)
    record(steps, names, own / f"oracle-{tp_rank}.pt")
    if rank == 0:
        (own / "latest_checkpointed_iteration.txt").write_text(str(case["steps"]))
    torch.distributed.barrier()


def load(run: Path, wrapped: Any, steps: Any) -> None:
    """Loads a run's iteration as `load_checkpoint` of Megatron-LM does; weights load in place."""
    from megatron.core import dist_checkpointing

    iteration = int((run / "latest_checkpointed_iteration.txt").read_text())
    folder = str(run / f"iter_{iteration:07d}")
    common = dist_checkpointing.load_common_state_dict(folder)
    content = dist_checkpointing.load_content_metadata(preloaded_state_dict=common)
    saved = sharded([wrapped], content)
    optimizer = steps.sharded_state_dict(saved, is_loading=True, metadata=content)
    state = dist_checkpointing.load({**saved, "optimizer": optimizer}, folder)
    wrapped.load_state_dict(state["model"])
    steps.load_state_dict(state["optimizer"])


def give(parameter: Any, gradient: torch.Tensor) -> None:
    """Sets the gradient of a rank's part of a parameter, which is cut as FSDP2 cuts it."""
    from torch.distributed.tensor import distribute_tensor

    parameter.grad = distribute_tensor(
        gradient.to(parameter.dtype), parameter.device_mesh, parameter.placements
    )


def record(steps: Any, names: dict[Any, str], file: Path) -> None:
    """Writes the weights, masters and moments, whole, by the names of parameters."""
    from megatron.core import parallel_state

    tensors, inner = {}, steps.optimizer
    masters = {getattr(p, "main_param", p): name for p, name in names.items()}
    for parameter, name in names.items():
        tensors[f"{name}/param"] = whole(parameter, parameter)
    for group in inner.param_groups:
        for main in group["params"]:
            name = masters[main]
            if main not in names:
                tensors[f"{name}/master"] = whole(main, main)
            for key, value in inner.state[main].items():
                if key != "step":
                    tensors[f"{name}/{key}"] = whole(value, main)
    if parallel_state.get_data_parallel_rank() == 0:
        torch.save(tensors, file)


def whole(value: torch.Tensor, parameter: Any) -> torch.Tensor:
    """A tensor of all ranks; a state that was loaded is the rank's part alone."""
    from torch.distributed.tensor import DTensor

    if not isinstance(value, DTensor):
        mesh, placements = parameter.device_mesh, parameter.placements
        value = DTensor.from_local(value, mesh, placements, run_check=False)
    return value.full_tensor().detach().clone()
