"""The sizes among the arguments that Megatron's programs save."""

from __future__ import annotations

from zckpt.core.checkpoint.inert import Foreign
from zckpt.training.megatron_arguments import arguments, with_sizes


def test_arguments_of_programs() -> None:
    """An object has them or a dictionary; those of other names stay."""
    for args in (
        {"model_parallel_size": 1, "lr": 2},
        Foreign.instance("a.B", model_parallel_size=1),
    ):
        changed = with_sizes({"args": args, "x": 3}, {"model_parallel_size": 4, "other": 5})
        assert arguments(changed) == {**arguments({"args": args}), "model_parallel_size": 4}
        assert changed["x"] == 3
    assert with_sizes({"x": 3}, {"model_parallel_size": 4}) == {"x": 3}
    assert arguments(None) == {}
