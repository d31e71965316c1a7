"""What a rank of a Megatron-FSDP training does: build, update, save, and record what it holds.

megatron_rank.py starts it, for cases that say `fsdp`; its stubs serve here too. Meshes are of the
CPU. The gradients are filled instead of computed; the buffers, the optimizer and what is saved are
Megatron-Core's own. The state is put together as `generate_state_dict` of Megatron-LM's
checkpointing.py does for --ckpt-format fsdp_dtensor, and saved with torch's own `dcp.save`.
"""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from typing import Any

import torch

from .megatron_rank import (
    EXPERTS,
    POSITIONS,
    FusedAdam,
    drawn,
    global_name,
    iteration_of,
    seed_of,
    slice_of,
)


def stub_meshes() -> None:
    """Lets Megatron-FSDP make its meshes of the CPU."""
    from torch.distributed.device_mesh import DeviceMesh

    from_group = DeviceMesh.from_group
    mesh_class: Any = DeviceMesh

    def on_cpu(*arguments: Any, **options: Any) -> Any:
        return from_group(*arguments[:1], **{**options, "device_type": "cpu"})

    mesh_class.from_group = staticmethod(on_cpu)


@contextlib.contextmanager
def numbered_device() -> Any:
    """Gives the device the number that Megatron-FSDP asks for, while it wraps a model."""
    cuda: Any = torch.cuda
    current = cuda.current_device
    cuda.current_device = lambda: 0
    yield
    cuda.current_device = current


def run(case: dict[str, Any], rank: int, world: int, store: str, root: Path) -> None:
    from megatron.core import optimizer, parallel_state, tensor_parallel
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module

    torch.set_num_threads(1)
    files = torch.distributed.FileStore(store, world)
    torch.distributed.init_process_group("gloo", store=files, rank=rank, world_size=world)
    stub_meshes()
    tp, ep, pp = case["tp"], case["ep"], case["pp"]
    layers, hidden, heads, queries, ffn, vocabulary = case["sizes"]
    parallel_state.initialize_model_parallel(
        tp, pp, expert_model_parallel_size=ep, create_gloo_process_groups=True
    )
    tensor_parallel.random.get_cuda_rng_tracker().fork = lambda *_, **__: contextlib.nullcontext()
    adapter: Any = mcore_fsdp_adapter
    adapter.TELinear = torch.nn.Bilinear  # any class that the model has not
    adapter.FullyShardedDataParallel.sync_rng_states_across_tp_group = lambda _: None
    if case["adam"] == "fused":
        optimizer.Adam = optimizer.distrib_optimizer.Adam = FusedAdam
        optimizer.USING_PYTORCH_OPTIMIZER = False
        optimizer.distrib_optimizer.HAVE_APEX_OR_TE = True
        optimizer.distrib_optimizer.USING_APEX_OPTIMIZER = True
    dtype = torch.bfloat16 if case["bf16"] else torch.float32
    moe = {"num_moe_experts": EXPERTS, "moe_router_topk": 2} if case["moe"] else {}
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_query_groups=queries,
        ffn_hidden_size=ffn,
        gated_linear_unit=case["gated"],
        activation_func=torch.nn.functional.silu if case["gated"] else torch.nn.functional.gelu,
        add_bias_linear=not case["gated"],
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        expert_model_parallel_size=ep,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=case["bf16"],
        use_cpu_initialization=True,
        perform_initialization=True,  # it also marks the axis that ranks cut
        gradient_accumulation_fusion=False,
        **moe,
    )
    stage = parallel_state.get_pipeline_model_parallel_rank()
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(EXPERTS if moe else None, False),
        vocabulary,
        POSITIONS,
        pre_process=stage == 0,
        post_process=stage == pp - 1,
        share_embeddings_and_output_weights=case["tied"],
        position_embedding_type="learned_absolute",
        parallel_output=True,
    ).to(dtype)
    offset = model.decoder.layers[0].layer_number - 1
    experts = parallel_state.get_expert_model_parallel_rank() * (EXPERTS // ep)
    for name, parameter in model.named_parameters():
        whole = global_name(name, offset, experts)
        parameter.data.copy_(drawn(whole, seed_of(case) + slice_of(parameter), parameter.shape) / 4)
    buckets = {"bucket_size": case["bucket"]} if case["bucket"] else {}
    with numbered_device():
        wrapped = adapter.FullyShardedDataParallel(
            config,
            DistributedDataParallelConfig(
                use_distributed_optimizer=True,
                use_megatron_fsdp=True,
                grad_reduce_in_fp32=True,
                data_parallel_sharding_strategy=case["fsdp"],
                overlap_grad_reduce=True,
                overlap_param_gather=True,
                **buckets,
            ),
            Float16Module(config, model) if case["bf16"] else model,
            device=torch.device("cpu"),
        )
    steps = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=0.01,
            weight_decay=0.1,
            bf16=case["bf16"],
            params_dtype=dtype,
            use_distributed_optimizer=True,
            clip_grad=0.0,
        ),
        [wrapped],
    )
    names = {
        parameter: global_name(name.replace("module.", ""), offset, experts)
        for name, parameter in wrapped.named_parameters()
    }
    for step in range(case["steps"]):
        for parameter, whole in names.items():
            salt = seed_of(case) + 100 * (step + 1) + slice_of(parameter.orig_param)
            gradient = drawn(whole, salt, parameter.orig_param.shape)
            part = gradient.view(-1)[parameter.megatron_fsdp_slice]
            give(parameter, part)
        done, _, _ = steps.step()
        assert done
    save(case, root / case["name"], wrapped.module, steps)
    record(steps, names, root / case["name"] / f"rank-{rank}.pt")
    for parameter in names:  # as `update_by_weights` does, whose weights are of the model's type
        give(parameter, parameter.to_local().detach().to(dtype).float() * 0.75 + 0.125)
    done, _, _ = steps.step()
    assert done
    record(steps, names, root / case["name"] / f"next-{rank}.pt")
    torch.distributed.barrier()


def give(parameter: Any, gradient: torch.Tensor) -> None:
    """Sets the gradient of a rank's part of a parameter."""
    from torch.distributed.tensor import DTensor

    local = parameter.to_local()
    parameter.grad = DTensor.from_local(
        gradient.view(local.shape).to(local.dtype),
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def save(case: dict[str, Any], own: Path, wrapped: Any, steps: Any) -> None:
    """Saves an iteration, and the tracker file of the run."""
    import torch.distributed.checkpoint as dcp
    from megatron.core import parallel_state
    from megatron.core.distributed.fsdp.src.megatron_fsdp import uneven_dtensor
    from megatron.core.transformer import fsdp_dtensor_checkpoint as prepared

    layers, _, _, queries, _, vocabulary = case["sizes"]
    stage = parallel_state.get_pipeline_model_parallel_rank()
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    content = {"distrib_optim_sharding_type": "fsdp_dtensor"}
    model = wrapped.state_dict_for_save_checkpoint()
    optimizer = steps.sharded_state_dict({}, metadata=content)
    prepared.handle_fp8_extra_state_case(model)
    if case["gated"]:
        model, optimizer = prepared.handle_swiglu_in_state_dict(wrapped, model, optimizer)
    if case["moe"]:
        model = prepared.handle_experts_in_state_dict(model, EXPERTS)
    state = {
        "args": argparse.Namespace(
            tensor_model_parallel_size=case["tp"],
            pipeline_model_parallel_size=case["pp"],
            expert_model_parallel_size=case["ep"],
            world_size=case["world"],
            data_parallel_size=case["world"] // case["tp"] // case["pp"],
            swiglu=case["gated"],
            use_distributed_optimizer=True,
            use_megatron_fsdp=True,
            data_parallel_sharding_strategy=case["fsdp"],
            ckpt_format="fsdp_dtensor",
            num_query_groups=queries,
            num_layers=layers,
            padded_vocab_size=vocabulary,
            vocab_size=vocabulary - 5,
            untie_embeddings_and_output_weights=not case["tied"],
            iteration=case["steps"],
        ),
        "checkpoint_version": 3.0,
        "iteration": case["steps"],
        "num_floating_point_operations_so_far": 7.0,
        "opt_param_scheduler": {"max_lr": 0.01, "num_steps": case["steps"] * 8},
        "model": model,
        "optimizer": optimizer,
        "rng_state": {
            f"({stage}, {tp_rank})": [
                {"random_rng_state": (3, (1, 2), None), "torch_rng_state": torch.arange(7).byte()}
            ]
        },
    }
    uneven_dtensor.preprocess_state_dict_for_uneven_dtensor(state)
    folder = own / iteration_of(case)
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder))
    if torch.distributed.get_rank() == 0:
        (own / "latest_checkpointed_iteration.txt").write_text(str(case["steps"]))


def record(steps: Any, names: dict[Any, str], file: Path) -> None:
    """Writes what the optimizer of this rank holds: parts of local tensors by global name."""
    parts = []
    for group in steps.optimizer.param_groups:
        for parameter in group["params"]:
            state = dict(steps.optimizer.state[parameter])
            step = state.pop("step", group.get("step"))
            tensors = {"param": parameter.detach(), **state}
            original = parameter.orig_param
            is_cut = getattr(original, "tensor_model_parallel", False)
            parts.append(
                {
                    "name": names[parameter],
                    "shape": tuple(original.shape),
                    "weight": None,
                    "start": parameter.megatron_fsdp_slice.start,
                    "axis": getattr(original, "partition_dim", -1) if is_cut else -1,
                    "tp_rank": slice_of(original),
                    "step": step,
                    "tensors": {
                        key: value.to_local().flatten().clone() for key, value in tensors.items()
                    },
                }
            )
    torch.save(parts, file)
