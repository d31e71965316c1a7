"""The options of commands, in the order of `--help`."""

from __future__ import annotations

from typing import Any

import click
import pytest

from zckpt.cli import cli
from zckpt.cli.options import declared_option, together
from zckpt.training.options import DP, WEIGHTS_ONLY, Option

READING = ["--from", "--tag", "--tp-rules", "--param-names", "--step-policy", "--json", "--quiet"]
COPYING = ["--jobs", "--memory", "--io", "--resume", "--part", "--single", "--dry-run"]
WRITING = [
    "--dp", "--stage", "--weights-only", "--dtype", "--optimizer", "--ds-config", "--dcp-layout",
    "--dialect", "--group-defaults", "--max-file-size", "--allow-object", "--ep",
    "--max-group-size", "--tp", "--vocab-size", "--pp", "--pp-bounds", "--pp-partition", "--like",
    "--tie", "--rename", "--family", "--accept-weights", "--drop-state",
]  # fmt: skip
EXPORTING = [
    *("--dtype", "--config", "--max-shard-size"),
    *("--tie", "--rename", "--family", "--accept-weights"),
]


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        ("convert", ["--to", *WRITING, "--replicas", "--masters-from-weights", *COPYING, *READING]),
        (
            "reshard",
            [
                *("--checkpoints", *WRITING, "--replicas", "--masters-from-weights"),
                *(*COPYING, *READING),
            ],
        ),
        ("export", ["--to", *EXPORTING, "--replicas", *COPYING, *READING]),
        (
            "diff",
            [
                *("--tensors", "--weights-only", "--drop-state", "--rename", "--family"),
                *("--jobs", "--memory", "--single", *READING),
            ],
        ),
    ],
)
def test_options_stand_in_one_order(command: str, flags: list[str]) -> None:
    options = [item for item in cli.commands[command].params if isinstance(item, click.Option)]
    assert [option.opts[-1] for option in options] == flags


def test_help_says_which_values_go_with_which_target() -> None:
    texts = {item.name: getattr(item, "help", "") for item in cli.commands["convert"].params}
    assert texts["dialect"] == (
        "The kind of files: onnxruntime has hdf5 (default) or l2, dcp has accelerate, gathered has "
        "safetensors or accelerate."
    )
    assert texts["dcp_layout"] == (
        "For dcp: the form of the keys.  [default: the source's, or nested]"
    )
    assert texts["weights_only"] == "Write no optimizer state."


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ([], {"dp": None, "weights_only": False, "size": None}),
        (["--dp", "3", "--weights-only"], {"dp": 3, "weights_only": True, "size": None}),
        (["--size", "2"], {"dp": None, "weights_only": False, "size": 2}),
    ],
)
def test_declared_options_are_parsed(words: list[str], given: dict[str, Any]) -> None:
    size: Option[int | None] = Option("size", "--size", None, "The size", choices=(1, 2))
    command = together(*map(declared_option, (DP, WEIGHTS_ONLY, size)))(lambda **values: values)
    assert click.command()(command).main(words, standalone_mode=False) == given
