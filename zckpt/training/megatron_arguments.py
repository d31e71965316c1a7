"""The arguments that Megatron's programs save with a run, such as its parallel sizes.

When Megatron's programs load, they compare their own arguments with the saved ones, and stop if
these differ. So zckpt changes the sizes in a target for other parallel sizes. The arguments are in
the client state under `args`:

    Megatron-DeepSpeed   an object: tensor_model_parallel_size (below version 3
                         model_parallel_size), pipeline_model_parallel_size, padded_vocab_size
    GPT-NeoX             a dictionary: model_parallel_size, padded_vocab_size

Both have `make_vocab_size_divisible_by` too (checkpointing.py of both, `check_checkpoint_args`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from ..core.checkpoint.inert import Foreign

ARGS = "args"
TENSOR_SIZES = ("tensor_model_parallel_size", "model_parallel_size")
STAGES = "pipeline_model_parallel_size"
PADDED, DIVISOR = "padded_vocab_size", "make_vocab_size_divisible_by"


def arguments(client_state: Any) -> Mapping[Any, Any]:
    """The command-line arguments that Megatron's program saved; empty if it saved none."""
    args = client_state.get(ARGS) if isinstance(client_state, Mapping) else None
    values = args.state if isinstance(args, Foreign) else args
    return values if isinstance(values, Mapping) else {}


def with_sizes(client_state: Mapping[Any, Any], sizes: Mapping[str, int]) -> dict[Any, Any]:
    """Returns a client state in which the program's arguments have the given `sizes`.

    `sizes` is keyed by the names of the arguments. Arguments that the program did not save are not
    added.
    """
    values = arguments(client_state)
    changed = {**values, **{name: size for name, size in sizes.items() if name in values}}
    if changed == values:
        return dict(client_state)
    args = client_state[ARGS]
    return {
        **client_state,
        ARGS: replace(args, state=changed) if isinstance(args, Foreign) else changed,
    }
