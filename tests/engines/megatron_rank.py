"""What the ranks of a Megatron-Core training do: build, update, save, and record what they hold.

    python -c 'from tests.engines.megatron_rank import main; main()' CASES.json ROOT

Not with -m: processes that Megatron-Core spawns would import this module, and torch with it.

Runs with megatron-core 0.16.1 on the path. Each rank of each case is forked from this process, so
that Megatron-Core is imported once. The gradients are filled instead of computed: `main_grad` of a
parameter is a function of its global name. What the optimizer does with it, and what is saved, is
Megatron-Core's own.

ROOT/CASE/iter_0000003      the checkpoint
ROOT/CASE/rank-R.pt         what the optimizer of rank R holds, by the model's global names
ROOT/CASE/next-R.pt         the same after one more update

A case that has the key `load` does not train: it loads the run at that path, as Megatron-LM's own
`load_checkpoint` does.

Stubs: a CPU has no torch.cuda, and Megatron-Core asks for its streams, its devices and its types.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import re
import sys
import traceback
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

EXPERTS, POSITIONS = 4, 32
LATENT = ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim")
ARGUMENTS = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
UNEVEN = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")


LATER = ("optimizer", "opt_param_scheduler")


class _Nothing:
    """A stream or an event: every call does nothing."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __getattr__(self, _: str) -> Any:
        return lambda *_, **__: None


def stub_cuda() -> None:
    """Lets Megatron-Core take the CPU for its device."""
    cuda: Any = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")
    cuda.set_device = cuda.synchronize = cuda.empty_cache = lambda *_, **__: None
    cuda.Stream = cuda.Event = _Nothing
    cuda.current_stream = cuda.default_stream = lambda *_: _Nothing()
    cuda.stream = lambda *_: contextlib.nullcontext()
    tensor_class: Any = torch.Tensor
    tensor_class.cuda = lambda self, *_, **__: self
    type_of = torch.Tensor.type

    def cuda_type(self: Any, *arguments: Any, **options: Any) -> Any:
        if arguments or options:
            return type_of(self, *arguments, **options)
        return type_of(self).replace("torch.", "torch.cuda.")

    tensor_class.type = cuda_type
    for name in ("tensor", "zeros", "empty", "ones", "full", "empty_like", "zeros_like", "arange"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))


def _on_cpu(function: Any) -> Any:
    def call(*arguments: Any, **options: Any) -> Any:
        if str(options.get("device")).startswith("cuda"):
            options["device"] = "cpu"
        return function(*arguments, **options)

    return call


class FusedAdam(torch.optim.Optimizer):
    """Adam as Transformer Engine and Apex keep it: one integer step in every group."""

    def __init__(self, params: Any, **options: Any) -> None:
        defaults = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
        known = {key: options[key] for key in defaults if key in options}
        super().__init__(params, {"bias_correction": True, **defaults, **known})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        del closure
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            first, second = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = torch.zeros_like(parameter)
                gradient = parameter.grad.float()
                state["exp_avg"].mul_(first).add_(gradient, alpha=1 - first)
                state["exp_avg_sq"].mul_(second).addcmul_(gradient, gradient, value=1 - second)
                corrected = state["exp_avg"] / (1 - first ** group["step"])
                scale = (state["exp_avg_sq"] / (1 - second ** group["step"])).sqrt()
                update = corrected / (scale + group["eps"]) + group["weight_decay"] * parameter
                parameter.add_(update, alpha=-group["lr"])


def drawn(name: str, salt: int, shape: Any) -> torch.Tensor:
    """Numbers that depend on the name alone."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name}/{salt}".encode()))
    return torch.randn(tuple(shape), generator=generator)


def seed_of(case: dict[str, Any]) -> int:
    """What is added to every salt; nothing is right before it is loaded."""
    return 1_000_000 * int(case["seed"]) + (10_000 if case["load"] else 0)


def iteration_of(case: dict[str, Any]) -> str:
    """The name of the folder that a save has."""
    return f"iter_{case['steps']:07d}"


def global_name(name: str, layer_offset: int, expert_offset: int) -> str:
    """The name that a parameter has in a model without ranks."""
    parts = name.split(".")
    for place, part in enumerate(parts[:-1]):
        if part == "layers" and parts[place - 1] == "decoder":
            parts[place + 1] = str(int(parts[place + 1]) + layer_offset)
        if part == "local_experts":
            parts[place + 1] = str(int(parts[place + 1]) + expert_offset)
    return ".".join(parts)


def run(case: dict[str, Any], rank: int, world: int, store: str, root: Path) -> None:
    from megatron.core import optimizer, parallel_state, tensor_parallel
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
    )
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_layer_local_spec,
        get_gpt_mtp_block_spec,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import (
        MLATransformerConfig,
        TransformerConfig,
        multi_latent_attention,
    )
    from megatron.core.transformer.identity_op import IdentityOp

    tp, pp, ep, vpp = case["tp"], case["pp"], case["ep"], case["vpp"]
    seed = seed_of(case)
    layers, hidden, heads, queries, ffn, vocabulary = case["sizes"]
    torch.set_num_threads(1)
    files = torch.distributed.FileStore(store, world)
    torch.distributed.init_process_group("gloo", store=files, rank=rank, world_size=world)
    chunked = {"virtual_pipeline_model_parallel_size": vpp} if vpp > 1 else {}
    etp = {"expert_tensor_parallel_size": case["etp"]} if case["etp"] else {}
    parallel_state.initialize_model_parallel(
        tp,
        pp,
        expert_model_parallel_size=ep,
        create_gloo_process_groups=True,
        **chunked,
        **etp,
        **case["grid"],
    )
    tensor_parallel.random.get_cuda_rng_tracker().fork = lambda *_, **__: contextlib.nullcontext()
    if case["adam"] == "fused":
        optimizer.Adam = optimizer.distrib_optimizer.Adam = FusedAdam
        optimizer.USING_PYTORCH_OPTIMIZER = False
        optimizer.distrib_optimizer.HAVE_APEX_OR_TE = True
        optimizer.distrib_optimizer.USING_APEX_OPTIMIZER = True
    dtype = torch.bfloat16 if case["bf16"] else torch.float32
    dtype = torch.float16 if case["fp16"] else dtype
    moe = {"num_moe_experts": EXPERTS, "moe_router_topk": 2} if case["moe"] else {}
    ends = dict(zip(UNEVEN, case["uneven"], strict=True)) if case["uneven"] else {}
    multi_latent_attention.TELinear = _Nothing  # without Transformer Engine it is None
    latent = dict.fromkeys(LATENT, 8) if case["mla"] else {}
    options = {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_query_groups": queries,
        "ffn_hidden_size": ffn,
        "gated_linear_unit": case["gated"],
        "activation_func": torch.nn.functional.silu if case["gated"] else torch.nn.functional.gelu,
        "add_bias_linear": not case["gated"],
        "tensor_model_parallel_size": tp,
        "pipeline_model_parallel_size": pp,
        "expert_model_parallel_size": ep,
        "pipeline_dtype": dtype,
        "params_dtype": dtype,
        "bf16": case["bf16"] and not case["fp16"],
        "fp16": case["fp16"],
        "use_cpu_initialization": True,
        "perform_initialization": True,  # it also marks the axis that ranks cut
        **moe,
        **chunked,
        **etp,
        **ends,
        **latent,
        **case["config"],
    }
    if case["grid"].get("context_parallel_size"):
        options["context_parallel_size"] = case["grid"]["context_parallel_size"]
    if layout := options.get("pipeline_model_parallel_layout"):
        from megatron.core.transformer.pipeline_parallel_layer_layout import (
            PipelineParallelLayerLayout,
        )

        options["pipeline_model_parallel_layout"] = PipelineParallelLayerLayout.from_str(layout, pp)
    config = (MLATransformerConfig if latent else TransformerConfig)(**options)
    expert_count = config.num_moe_experts or EXPERTS
    spec = get_gpt_layer_local_spec(
        config.num_moe_experts,
        config.moe_grouped_gemm,
        qk_layernorm=case["mla"] or case["config"].get("qk_layernorm", False),
        multi_latent_attention=case["mla"],
        normalization=config.normalization,
    )
    by_layer = "moe_layer_freq" in case["config"]
    without_core = latent or config.context_parallel_size > 1
    for layer in getattr(spec.submodules, "layer_specs", [spec]) if without_core else ():
        # that of the local spec is not for it, and has no parameters
        layer.submodules.self_attention.submodules.core_attention = IdentityOp
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    stage = parallel_state.get_pipeline_model_parallel_rank()
    experts = parallel_state.get_expert_model_parallel_rank() * (expert_count // ep)
    names = {}
    others = {}  # frozen weights, and buffers
    models = []
    for chunk in range(vpp):
        if by_layer:
            stage_of = {"vp_stage": chunk} if vpp > 1 else {}
            spec = get_gpt_decoder_block_spec(
                config, use_transformer_engine=False, normalization=config.normalization, **stage_of
            )
        further = {}
        if config.mtp_num_layers:
            further["mtp_block_spec"] = get_gpt_mtp_block_spec(config, spec, False)
        model = GPTModel(
            config,
            spec,
            vocabulary,
            POSITIONS,
            pre_process=(stage, chunk) == (0, 0),
            post_process=(stage, chunk) == (pp - 1, vpp - 1),
            share_embeddings_and_output_weights=case["tied"],
            position_embedding_type=case["positions"],
            parallel_output=True,
            **({"vp_stage": chunk} if vpp > 1 else {}),
            **further,
        ).to(dtype)
        models.append(model)
        offset = model.decoder.layers[0].layer_number - 1 if len(model.decoder.layers) else 0
        for name, parameter in model.named_parameters():
            whole = global_name(name, offset, experts)
            if case["tied"] and whole == "output_layer.weight":
                whole = "embedding.word_embeddings.weight"
            if case["frozen"] and re.fullmatch(case["frozen"], whole):
                parameter.requires_grad = False
                others[parameter] = whole
            else:
                names[parameter] = whole
            salt = slice_of(parameter)
            parameter.data.copy_(drawn(whole, seed + salt, parameter.shape) / 4)
        for name, buffer in model.named_buffers():
            if name.endswith("expert_bias"):
                whole = global_name(name, offset, experts)
                others[buffer] = whole
                buffer.copy_(drawn(whole, seed, buffer.shape))
    buckets = {"overlap_grad_reduce": True, "bucket_size": case["bucket"]} if case["bucket"] else {}
    wrapped = [
        DistributedDataParallel(
            config,
            DistributedDataParallelConfig(
                **{
                    "use_distributed_optimizer": case["distributed"],
                    "grad_reduce_in_fp32": True,
                    **buckets,
                    **case["ddp"],
                }
            ),
            model,
            disable_bucketing=chunk > 0,
        )
        for chunk, model in enumerate(models)
    ]
    steps = get_megatron_optimizer(
        OptimizerConfig(
            **{
                "optimizer": "adam",
                "lr": 0.01,
                "weight_decay": 0.1,
                "bf16": case["bf16"] and not case["fp16"],
                "fp16": case["fp16"],
                "initial_loss_scale": 4.0,
                "params_dtype": dtype,
                "use_distributed_optimizer": case["distributed"],
                "clip_grad": 0.0,
                **case["optimizer"],
            }
        ),
        wrapped,
    )
    rng_state = ShardedObject(
        "rng_state",
        [{"random_rng_state": (3, (1, 2), None)}],
        (pp, tp),
        (stage, tp_rank),
        replica_id=parallel_state.get_data_parallel_rank(with_context_parallel=True),
    )
    own = root / case["name"]
    if case["load"]:
        load(Path(case["load"]), wrapped, steps, (tp, pp), rng_state)
        record(steps, names, others, own / f"rank-{rank}.pt")
        update_by_weights(steps, names)
        record(steps, names, others, own / f"next-{rank}.pt")
        torch.distributed.barrier()
        return
    for step in range(case["steps"]):
        steps.zero_grad()
        for parameter, whole in names.items():
            salt = seed + 100 * (step + 1) + slice_of(parameter)
            parameter.main_grad.copy_(drawn(whole, salt, parameter.shape))
        done, _, _ = steps.step()
        assert done
    of_nemo = case["program"] == "nemo"
    folder = own / ("weights" if of_nemo else case["tracker"] or iteration_of(case))
    if rank == 0:
        folder.mkdir(parents=True)
    torch.distributed.barrier()
    content = {
        "distrib_optim_sharding_type": case["sharding"],
        "distrib_optim_fully_reshardable_mem_efficient": case["saved"] == "efficient",
        "chained_optim_avoid_prefix": not case["prefix"],
        "singleton_local_shards": False,
    }
    saved = sharded(wrapped, content, "module." if of_nemo else "")
    state = {
        "args": argparse.Namespace(
            rank=rank,
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            expert_model_parallel_size=ep,
            expert_tensor_parallel_size=case["etp"] or tp,
            world_size=world,
            data_parallel_size=world // tp // pp // config.context_parallel_size,
            swiglu=case["gated"],
            use_distributed_optimizer=case["distributed"],
            num_query_groups=queries,
            num_layers=layers,
            padded_vocab_size=vocabulary,
            vocab_size=vocabulary - 5,
            untie_embeddings_and_output_weights=not case["tied"],
            iteration=case["steps"],
            overlap_grad_reduce=case["bucket"] is not None,
            ddp_bucket_size=case["bucket"],
            moe_layer_freq=case["config"].get("moe_layer_freq", 1),
            **dict(zip(ARGUMENTS, case["uneven"] or (), strict=False)),
            **latent,
            **case["arguments"],
        ),
        "checkpoint_version": 3.0,
        "iteration": case["steps"],
        "num_floating_point_operations_so_far": 7.0,
        "opt_param_scheduler": {"max_lr": 0.01, "num_steps": case["steps"] * 8},
        **saved,
        "optimizer": steps.sharded_state_dict(saved, metadata=content),
        "rng_state": rng_state,
    }
    for key in {"weights": LATER, "states": [*saved], "counters": [*saved, *LATER]}.get(
        case["saved"], []
    ):
        del state[key]
    if case["saved"] == "library":
        state = {**saved, "optimizer": state["optimizer"]}
    if case["program"] is not None:
        state = as_program(case, state, own if rank == 0 else None)
    if case["legacy"]:
        save_legacy(folder, state, wrapped, steps)
    else:
        save(case, state, folder, content)
    record(steps, names, others, own / f"rank-{rank}.pt")
    if rank == 0 and not of_nemo:
        tracker = case["tracker"] or str(case["steps"])
        (own / "latest_checkpointed_iteration.txt").write_text(tracker)
    update_by_weights(steps, names)
    record(steps, names, others, own / f"next-{rank}.pt")
    torch.distributed.barrier()


def save(case: dict[str, Any], state: dict[str, Any], folder: Path, content: Any) -> None:
    """Saves as Megatron-LM does: in turn, or with --ckpt-fully-parallel-save or --async-save."""
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
    from megatron.core.dist_checkpointing.strategies.fully_parallel import (
        FullyParallelSaveStrategyWrapper,
    )

    options: dict[str, Any] = {"content_metadata": content}
    if case["saved"] == "parallel":
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        options["sharded_strategy"] = FullyParallelSaveStrategyWrapper(
            get_default_save_sharded_strategy(), group, True
        )
    if case["saved"] == "async":
        options["async_sharded_save"] = True
    request = dist_checkpointing.save(state, str(folder), **options)
    if request is not None:
        request.execute_sync()


def slice_of(parameter: Any) -> int:
    """The number of the tensor rank whose slice a parameter is; 0 if it has all elements."""
    from megatron.core import parallel_state

    if not getattr(parameter, "tensor_model_parallel", False):
        return 0
    if getattr(parameter, "allreduce", True):
        return int(parallel_state.get_tensor_model_parallel_rank())
    return int(parallel_state.get_expert_tensor_parallel_rank())


def keys_of(wrapped: list[Any]) -> list[str]:
    """What Megatron-LM calls its model chunks."""
    return ["model"] if len(wrapped) == 1 else [f"model{number}" for number in range(len(wrapped))]


def sharded(wrapped: list[Any], content: Any, prefix: str = "") -> dict[str, Any]:
    chunks = zip(keys_of(wrapped), wrapped, strict=True)
    return {
        key: chunk.module.sharded_state_dict(prefix=prefix, metadata=content)
        for key, chunk in chunks
    }


def as_program(case: dict[str, Any], state: dict[str, Any], own: Path | None) -> dict[str, Any]:
    """The state as another program saves it; its other files go into `own`.

    Read in source: NeMo 2.5, megatron_strategy.py; Megatron-Bridge of 2026-08, checkpointing.py.
    """
    config = "model:\n" + "".join(
        f"  {key}: {str(value).lower()}\n"
        for key, value in {
            "tensor_model_parallel_size": case["tp"],
            "pipeline_model_parallel_size": case["pp"],
            "expert_model_parallel_size": case["ep"],
            "share_embeddings_and_output_weights": case["tied"],
            "gated_linear_unit": case["gated"],
        }.items()
    )
    rest = {key: value for key, value in state.items() if key != "args"}
    if case["program"] == "bridge":
        if own is not None:
            counters = {"step": torch.tensor(case["steps"])}
            for name in (f"{iteration_of(case)}/train_state.pt", "latest_train_state.pt"):
                torch.save(counters, own / name)
            (own / iteration_of(case) / "run_config.yaml").write_text(config)
        return rest
    if own is not None:
        (own / "context").mkdir()
        (own / "context" / "model.yaml").write_text(config)
    models = {key: value for key, value in rest.items() if key.startswith("model")}
    return {
        "global_step": case["steps"],
        "state_dict": {},
        "sharded_state_dict": models,
        "optimizer_states": {},
        "optimizer": [rest["optimizer"]],
        "lr_schedulers": [rest["opt_param_scheduler"]],
    }


def folder_of_rank() -> str:
    """The name of the folder that a model-parallel rank has with --ckpt-format torch."""
    from megatron.core import parallel_state

    stage = parallel_state.get_pipeline_model_parallel_rank()
    name = f"mp_rank_{parallel_state.get_tensor_model_parallel_rank():02d}"
    if parallel_state.get_pipeline_model_parallel_world_size() > 1:
        name += f"_{stage:03d}"
    if parallel_state.get_expert_model_parallel_world_size() > 1:
        name += f"_{parallel_state.get_expert_model_parallel_rank():03d}"
    return name


def save_legacy(folder: Path, state: dict[str, Any], wrapped: list[Any], steps: Any) -> None:
    """Saves as Megatron-LM's `save_checkpoint` does with --ckpt-format torch.

    The first data-parallel rank of the experts of each model-parallel rank writes a folder.
    """
    from megatron.core import parallel_state

    name = folder_of_rank()
    (folder / name).mkdir(exist_ok=True)
    if state["args"].use_distributed_optimizer:
        steps.save_parameter_state(str(folder / name / "distrib_optim.pt"))
    if parallel_state.get_expert_data_parallel_rank() == 0:
        chunks = zip(keys_of(wrapped), wrapped, strict=True)
        whole = {
            **state,
            **{key: chunk.module.state_dict_for_save_checkpoint() for key, chunk in chunks},
            "optimizer": steps.state_dict(),
            "rng_state": [{"random_rng_state": (3, (1, 2), None)}],
        }
        torch.save(whole, folder / name / "model_optim_rng.pt")


def load(run: Path, wrapped: list[Any], steps: Any, sizes: tuple[int, int], rng_state: Any) -> None:
    """Loads a run's latest iteration as `load_checkpoint` of Megatron-LM (core 0.16) does.

    The file's metadata decides the template; `rng_state` is asked for if the sizes of tp and pp are
    those of the file, and the file does not say that it has none.
    """
    from megatron.core import dist_checkpointing

    folder = str(run / "weights")
    of_nemo = Path(folder).exists()
    if not of_nemo:
        word = (run / "latest_checkpointed_iteration.txt").read_text()
        folder = str(run / (f"iter_{int(word):07d}" if word.isdecimal() else word))
    if not Path(folder, "metadata.json").exists():
        load_legacy(Path(folder), wrapped, steps)
        return
    common = dist_checkpointing.load_common_state_dict(folder)
    content = dist_checkpointing.load_content_metadata(preloaded_state_dict=common)
    saved = sharded(wrapped, content, "module." if of_nemo else "")
    optimizer = steps.sharded_state_dict(saved, is_loading=True, metadata=content)
    template = {**saved, "optimizer": [optimizer] if of_nemo else optimizer}
    if "args" in common:
        args = common["args"]
        of_file = args.tensor_model_parallel_size, args.pipeline_model_parallel_size
        asks = of_file == sizes and not getattr(args, "no_save_rng", False)
    else:
        of_bridge = Path(folder, "run_config.yaml").exists()
        asks = of_bridge and sizes_of_config(folder) == sizes
    if asks:
        template["rng_state"] = rng_state
    state = dist_checkpointing.load(template, folder)
    assert not asks or state["rng_state"][0]["random_rng_state"] == (3, (1, 2), None)
    for key, chunk in zip(keys_of(wrapped), wrapped, strict=True):
        own = {name.removeprefix("module."): value for name, value in state[key].items()}
        chunk.module.load_state_dict(own)
    steps.load_state_dict(state["optimizer"][0] if of_nemo else state["optimizer"])


def sizes_of_config(folder: str) -> tuple[int, int]:
    """tp and pp in the file that Megatron-Bridge reads, which lies beside two others of its own."""
    assert Path(folder).with_name("latest_train_state.pt").exists()
    assert Path(folder, "train_state.pt").exists()
    lines = Path(folder, "run_config.yaml").read_text().splitlines()
    stated = dict(line.strip().split(": ") for line in lines if ": " in line)
    tp, pp = (stated[f"{each}_model_parallel_size"] for each in ("tensor", "pipeline"))
    return int(tp), int(pp)


def load_legacy(folder: Path, wrapped: list[Any], steps: Any) -> None:
    """Loads what `save_legacy` saved, at any dp, as Megatron-LM's `load_checkpoint` does."""
    name = folder_of_rank()
    state = torch.load(folder / name / "model_optim_rng.pt", weights_only=False)
    for key, chunk in zip(keys_of(wrapped), wrapped, strict=True):
        chunk.module.load_state_dict(state[key])
    steps.load_state_dict(state["optimizer"])
    if state["args"].use_distributed_optimizer:
        steps.load_parameter_state(str(folder / name / "distrib_optim.pt"))


def update_by_weights(steps: Any, names: dict[Any, str]) -> None:
    """One more update. Each gradient is a function of its own weight, so it is so on all ranks."""
    steps.zero_grad()
    for parameter in names:
        parameter.main_grad.copy_(parameter.detach().float() * 0.75 + 0.125)
    done, _, _ = steps.step()
    assert done


def record(steps: Any, names: dict[Any, str], others: dict[Any, str], file: Path) -> None:
    """Writes what the optimizer of this rank holds: parts of local tensors by global name.

    `others` are frozen weights and buffers, which the optimizer does not have.
    """
    parts = [
        {
            "name": name,
            "shape": tuple(tensor.shape),
            "weight": tensor.detach().clone(),
            "start": 0,
            "axis": axis_of(tensor),
            "tp_rank": slice_of(tensor),
            "step": None,
            "tensors": {},
        }
        for tensor, name in others.items()
    ]
    for each in getattr(steps, "chained_optimizers", [steps]):
        for parameter, start, tensors, step in held_by(each, names):
            parts.append(
                {
                    "name": names[parameter],
                    "shape": tuple(parameter.shape),
                    "weight": parameter.detach().clone(),
                    "start": start,
                    "axis": axis_of(parameter),
                    "tp_rank": slice_of(parameter),
                    "step": step,
                    "tensors": {key: value.detach().clone() for key, value in tensors.items()},
                }
            )
    torch.save(parts, file)


def axis_of(parameter: Any) -> int:
    """The axis that tensor ranks cut; -1 if each has all elements."""
    cut = getattr(parameter, "tensor_model_parallel", False)
    return int(getattr(parameter, "partition_dim", -1)) if cut else -1


def held_by(each: Any, names: dict[Any, str]) -> Iterator[tuple[Any, int, dict[str, Any], Any]]:
    """Parameters, the first element of the rank's part, the part's tensors, and the step."""
    inner = each.optimizer
    if hasattr(each, "_get_model_param_range_map"):
        for parameter in names:
            if parameter not in each.model_param_gbuf_map:
                continue
            part = each._get_model_param_range_map(parameter)["param"]
            tensors = dict(each._get_main_param_and_optimizer_states(parameter))
            group, _ = each.model_param_group_index_map[parameter]
            step = tensors.pop("step", inner.param_groups[group].get("step"))
            yield parameter, part.start, tensors, step
        return
    for group in inner.param_groups:
        for main in group["params"]:
            parameter = next(
                p for p in names if p is main or getattr(p, "main_param", None) is main
            )
            tensors = dict(inner.state[main])
            step = tensors.pop("step", group.get("step"))
            tensors = {key: value.flatten() for key, value in tensors.items()}
            yield parameter, 0, {"param": main.detach().flatten(), **tensors}, step


def main() -> None:
    cases, root = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    import numpy
    import torch._dynamo  # noqa: F401

    if not hasattr(numpy, "product"):  # Megatron-Core 0.13 calls it so
        numpy.product = numpy.prod  # type: ignore[attr-defined]
    stub_cuda()
    from .megatron_fsdp2_rank import run as run_fsdp2
    from .megatron_fsdp_rank import run as run_fsdp

    for case in cases:
        world, store = case["world"], str(root / case["name"] / "store")
        (root / case["name"]).mkdir(parents=True)
        run_case = run_fsdp2 if case["fsdp2"] else run_fsdp if case["fsdp"] else run
        fork(case["name"], world, partial(run_case, case, world=world, store=store, root=root))


def fork(name: str, world: int, run_rank: Callable[..., None]) -> None:
    """Runs every rank in a process of its own; exits if one of them fails."""
    children = []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            code = 1
            try:
                run_rank(rank=rank)
                code = 0
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
            # Megatron-Core's writer leaves the process of its queue behind
            for helper in multiprocessing.active_children():
                helper.kill()
            os._exit(code)
        children.append(child)
    for child in children:
        _, status = os.waitpid(child, 0)
        if status:
            for other in children:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(other, 9)
            sys.exit(f"a rank of {name} failed")


if __name__ == "__main__":
    main()
