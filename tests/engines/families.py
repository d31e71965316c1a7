"""Models of transformers, and the same models of Megatron-Core: what each computes for one text.

A model's tensors are drawn, trained for two steps, and saved with AdamW's state as plain files.
Then the moments are multiples of the weights, so that whoever proves the place of a weight's
elements has proven those of its moments. See families_rank.py for the other side.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from .megatron import start

TEXT = [[5, 17, 2, 60, 31, 8, 0, 44, 12], [1, 1, 33, 7, 59, 20, 20, 3, 9]]
FIRST, SECOND = 2.0, 8.0  # exp_avg and exp_avg_sq, as multiples of the weight
USUAL: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
MOE = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "moe_intermediate_size": 24,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("llama", "LlamaForCausalLM", USUAL),
    "llama_tied": (
        "llama",
        "LlamaForCausalLM",
        {**USUAL, "tie_word_embeddings": True, "num_key_value_heads": 1, "head_dim": 12},
    ),
    "llama_heads": ("llama", "LlamaForCausalLM", {**USUAL, "num_key_value_heads": 4}),
    "mistral": ("llama", "MistralForCausalLM", {**USUAL, "sliding_window": None}),
    "qwen2": ("llama", "Qwen2ForCausalLM", USUAL),
    "qwen3": ("qwen3", "Qwen3ForCausalLM", {**USUAL, "head_dim": 16}),
    "qwen3_moe": ("qwen3", "Qwen3MoeForCausalLM", {**USUAL, "head_dim": 16, **MOE}),
    "mixtral": ("mixtral", "MixtralForCausalLM", {**USUAL, **EXPERTS}),
    "gpt2": (
        "gpt2",
        "GPT2LMHeadModel",
        {
            "n_embd": 32,
            "n_inner": 48,
            "n_layer": 2,
            "n_head": 4,
            "vocab_size": 61,
            "n_positions": 64,
            "initializer_range": 0.2,
            "activation_function": "gelu",
        },
    ),
}
"""By name: the family, the class of transformers, and its configuration."""


def model(case: str) -> Any:
    """The model of transformers, with numbers of its own in every tensor."""
    import transformers

    _, name, values = CASES[case]
    torch.manual_seed(len(case))
    made = getattr(transformers, name)
    config = made.config_class(**values, attn_implementation="eager")
    network = made(config)
    with torch.no_grad():  # norms are ones and biases zeros, which no order shows
        for parameter in network.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape) / 4)
    return network


def train(case: str, folder: Path) -> None:
    """Saves the model after two steps of AdamW, its configuration, and what it computes."""
    network = model(case)
    optimizer = torch.optim.AdamW(network.named_parameters(), lr=1e-2)
    text = torch.tensor(TEXT)
    for _ in range(2):
        network(input_ids=text, labels=text).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    for parameter in network.parameters():
        optimizer.state[parameter]["exp_avg"] = parameter.detach() * FIRST
        optimizer.state[parameter]["exp_avg_sq"] = parameter.detach() * SECOND
    folder.mkdir(parents=True)
    torch.save(network.state_dict(), folder / "model.pt")
    torch.save(optimizer.state_dict(), folder / "optim.pt")
    network.config.save_pretrained(folder)


@torch.no_grad()
def logits(network: Any) -> torch.Tensor:
    return network.eval()(input_ids=torch.tensor(TEXT)).logits


def megatron(root: Path, jobs: list[dict[str, Any]]) -> None:
    """Lets Megatron-Core do the jobs of families_rank.py, with paths below `root`."""
    start("families_rank", root, {"text": TEXT, "jobs": jobs}, 500)
