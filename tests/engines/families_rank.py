"""What Megatron-Core computes for a text with given weights, and with weights of its own.

    python -c 'from tests.engines.families_rank import main; main()' JOBS.json ROOT

Each job names a configuration of transformers. If it has `weights`, a folder of safetensors, the
GPTModel of this configuration must take them, all and no others. Else it draws its own and saves
them to ROOT/NAME/torch.pt, and as a distributed checkpoint to ROOT/NAME/dist. The logits go to
ROOT/NAME.logits.pt.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import torch

from .megatron_rank import stub_cuda


def config_of(values: dict[str, Any], **others: Any) -> Any:
    """The TransformerConfig of the same model, with `others` of its options."""
    from megatron.core.transformer import TransformerConfig

    kind = values["model_type"]
    is_gpt2 = kind == "gpt2"
    heads = values["n_head"] if is_gpt2 else values["num_attention_heads"]
    hidden = values["n_embd"] if is_gpt2 else values["hidden_size"]
    experts = values.get("num_experts") or values.get("num_local_experts")
    ffn = values["n_inner"] if is_gpt2 else values["intermediate_size"]
    options: dict[str, Any] = {}
    if experts:
        ffn = values.get("moe_intermediate_size") or ffn
        options = {
            "num_moe_experts": experts,
            "moe_router_topk": values["num_experts_per_tok"],
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_token_dispatcher_type": "allgather",
        }
    return TransformerConfig(
        num_layers=values["n_layer"] if is_gpt2 else values["num_hidden_layers"],
        hidden_size=hidden,
        num_attention_heads=heads,
        num_query_groups=heads if is_gpt2 else values["num_key_value_heads"],
        kv_channels=values.get("head_dim") or hidden // heads,
        ffn_hidden_size=ffn,
        gated_linear_unit=not is_gpt2,
        activation_func=torch.nn.functional.gelu if is_gpt2 else torch.nn.functional.silu,
        add_bias_linear=is_gpt2,
        add_qkv_bias=is_gpt2 or kind == "qwen2",
        qk_layernorm=kind.startswith("qwen3"),
        normalization="LayerNorm" if is_gpt2 else "RMSNorm",
        layernorm_epsilon=values.get("rms_norm_eps") or values.get("layer_norm_epsilon"),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attention_softmax_in_fp32=True,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        use_cpu_initialization=True,
        perform_initialization=True,
        **options,
        **others,
    )


def network_of(values: dict[str, Any], rows: int) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    config = config_of(values)
    is_gpt2 = values["model_type"] == "gpt2"
    spec = get_gpt_layer_local_spec(
        config.num_moe_experts,
        False,
        qk_layernorm=config.qk_layernorm,
        normalization=config.normalization,
    )
    rope = values.get("rope_parameters") or {}
    return GPTModel(
        config,
        spec,
        rows,
        values["n_positions"] if is_gpt2 else values["max_position_embeddings"],
        share_embeddings_and_output_weights=values["tie_word_embeddings"],
        position_embedding_type="learned_absolute" if is_gpt2 else "rope",
        rotary_base=int(rope.get("rope_theta", 10000)),
        parallel_output=False,
    ).eval()


def load(network: Any, folder: Path) -> None:
    """Puts the weights of a folder into the model; both must have the same names."""
    from safetensors.torch import load_file

    weights = load_file(folder / "model.safetensors")
    own = dict(network.named_parameters())
    assert own.keys() == weights.keys(), own.keys() ^ weights.keys()
    for name, parameter in own.items():
        assert parameter.shape == weights[name].shape, name
        parameter.data.copy_(weights[name])


def save(network: Any, values: dict[str, Any], rows: int, folder: Path) -> None:
    from megatron.core import dist_checkpointing

    with torch.no_grad():
        for number, parameter in enumerate(network.parameters()):
            generator = torch.Generator().manual_seed(number)
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 5)
    weights = {name: parameter.detach() for name, parameter in network.named_parameters()}
    (folder / "dist").mkdir(parents=True)
    torch.save(weights, folder / "torch.pt")
    config = network.config
    arguments = argparse.Namespace(
        num_attention_heads=config.num_attention_heads,
        group_query_attention=config.num_query_groups != config.num_attention_heads,
        num_query_groups=config.num_query_groups,
        padded_vocab_size=rows,
        vocab_size=values["vocab_size"],
        swiglu=config.gated_linear_unit,
        untie_embeddings_and_output_weights=not values["tie_word_embeddings"],
    )
    content = {"singleton_local_shards": False}
    saved = network.sharded_state_dict(metadata=content)
    state = {"args": arguments, "checkpoint_version": 3.0, "iteration": 2, "model": saved}
    dist_checkpointing.save(state, str(folder / "dist"), content_metadata=content)


@torch.no_grad()
def main() -> None:
    given, root = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    torch.compile = lambda function: function  # it does not know the stubs
    stub_cuda()
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.transformer.moe import moe_utils

    moe_utils.te_general_gemm = None  # without Transformer Engine, 0.16.1 does not define it
    files = torch.distributed.FileStore(str(root / "store"), 1)
    torch.distributed.init_process_group("gloo", store=files, rank=0, world_size=1)
    parallel_state.initialize_model_parallel(1, 1, create_gloo_process_groups=True)
    tensor_parallel.random.get_cuda_rng_tracker().fork = lambda *_, **__: contextlib.nullcontext()
    text = torch.tensor(given["text"])
    rows, length = text.shape
    positions = torch.arange(length).expand(rows, -1)
    hidden = torch.ones(length, length).triu(1).bool()[None, None]
    for job in given["jobs"]:
        values = json.loads((root / job["config"]).read_text())
        network = network_of(values, job["rows"])
        if "weights" in job:
            load(network, root / job["weights"])
        else:
            save(network, values, job["rows"], root / job["name"])
        result = network(text, positions, hidden)
        torch.save(result.detach(), root / f"{job['name']}.logits.pt")
    for helper in multiprocessing.active_children():  # Megatron-Core's writer leaves them behind
        helper.kill()
    os._exit(0)


if __name__ == "__main__":
    main()
