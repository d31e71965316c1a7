"""What does a model file say of layers whose experts AutoEP spreads over ranks?

DeepSpeed 0.19.8, engine.py `_save_moe_checkpoint` and checkpoint/autoep_affine.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from .experts import ExpertLayers, expert_name

INFO = "universal_checkpoint_info"


def layers(experts: ExpertLayers, names: Iterable[str]) -> list[dict[str, Any]]:
    """The layers of AutoEP, as rank 0 states them; none for other layers of experts."""
    parts = filter(None, map(expert_name, names))
    spread = {part.layer for part in parts if part.is_slice}
    stated = []
    for number, layer in enumerate(experts.listed):
        if layer.name not in spread:
            continue
        ranks = [
            {"rank": rank, "experts": [*range(rank * layer.local, (rank + 1) * layer.local)]}
            for rank in range(layer.ep)
        ]
        stated.append(
            {
                "moe_layer_id": number,
                "module_path": layer.name,
                "num_experts": layer.experts,
                "num_local_experts": layer.local,
                "ep_size": layer.ep,
                "expert_placement": {
                    "version": 1,
                    "num_experts": layer.experts,
                    "ep_size": layer.ep,
                    "ranks": ranks,
                },
                "expert_key_prefix": f"{layer.name}.experts",
                "checkpoint_format": "per_expert_files",
                "checkpoint_format_version": None,
                "ep_group_name": f"ep_size_{layer.ep}",
                "ep_rank": 0,
                "expert_data_parallel_rank": 0,
                "global_expert_start": 0,
                "global_expert_end": layer.local,
            }
        )
    return stated


def info(stated: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What `universal_checkpoint_info` says of these layers."""
    return {
        "universal_checkpoint_version": 0.4,
        "expert_parameter_patterns": [r".*\.experts\.w[123]$"],
        "ds_autoep_layers": list(stated),
    }
