"""The options of commands, in the order of `--help`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import pytest

from zckpt import formats
from zckpt.cli import cli
from zckpt.cli.options import declared_option, stacked
from zckpt.training.options import DP, WEIGHTS_ONLY, Option

from ..conftest import EXAMPLE, ROOT, Result

READING = [
    "--from",
    "--tag",
    "--root",
    "--tp-rules",
    "--buffers",
    "--follow-links",
    "--param-names",
    "--step-policy",
    "--json",
    "--quiet",
]
COPYING = [
    "--jobs",
    "--memory",
    "--io",
    "--resume",
    "--no-read-back",
    "--part",
    "--single",
    "--dry-run",
    "--progress",
]
WRITING = [
    "--dp", "--stage", "--weights-only", "--dtype", "--optimizer", "--ds-config", "--dcp-layout",
    "--groups-from", "--set-group", "--group-defaults", "--allow-object", "--frozen", "--tp",
    "--pp", "--ep", "--sp", "--pp-bounds", "--pp-partition", "--vocab-size", "--like",
    "--dialect", "--max-file-size", "--tie", "--rename", "--family", "--accept-weights",
    "--drop-state",
]  # fmt: skip
EXPORTING = [
    *("--dtype", "--config", "--max-file-size"),
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
                *("--jobs", "--memory", "--progress", "--single", "--wide", *READING),
            ],
        ),
    ],
)
def test_options_stand_in_one_order(command: str, flags: list[str]) -> None:
    options = [item for item in cli.commands[command].params if isinstance(item, click.Option)]
    assert [option.opts[-1] for option in options] == flags


OF_SECOND = "*/*zero_pp_rank_1_mp_rank_{}_optim_states.pt"
DIALECTS = {
    "deepspeed": {
        "deepspeed-0.19": OF_SECOND.format("00"),
        "deepspeed-0.18": OF_SECOND.format("01"),
    },
    "onnxruntime": {"hdf5": "checkpoint.rank0.ortcp", "l2": "ORT_checkpoint.ZeRO.0.2.ort.pt"},
    "dcp": {"accelerate": "pytorch_model_fsdp_0/.metadata", "torchtitan": ".metadata"},
    "gathered": {"safetensors": "model.safetensors", "accelerate": "pytorch_model_fsdp.bin"},
}
"""A file of each kind that `--dialect` gives, by target."""
USUAL = {"deepspeed": "deepspeed-0.19", "onnxruntime": "hdf5", "dcp": None, "gathered": None}
ALSO = {"deepspeed": ("--dp", 2, "--sp", 2)}
"""What a target needs that has dialects."""
SMALL = ROOT / "tests" / "data" / "onnxruntime" / "hdf5__fp16__adam__dp3"


def test_help_says_which_values_go_with_which_target() -> None:
    texts = {item.name: getattr(item, "help", "") for item in cli.commands["convert"].params}
    kinds = [
        f"{to} has " + " or ".join(each + " (default)" * (each == USUAL[to]) for each in dialects)
        for to, dialects in DIALECTS.items()
    ]
    assert texts["dialect"] == f"The variant of the target's format: {', '.join(kinds)}."
    assert texts["dcp_layout"] == (
        "For dcp: the layout of the optimizer's keys.  [default: the source's, or nested]"
    )
    assert texts["weights_only"] == "Write no optimizer state."


@pytest.mark.parametrize("to", [item.name for item in formats.FORMATS if item.is_resumed])
def test_a_target_takes_the_dialects_of_the_help(
    to: str, tmp_path: Path, zckpt: Callable[..., Result]
) -> None:
    own, source = DIALECTS.get(to, {}), EXAMPLE if to == "deepspeed" else SMALL
    for dialect in {each: None for kinds in DIALECTS.values() for each in kinds}:
        words = ("convert", source, tmp_path / dialect, "--to", to, "--dialect", dialect)
        ended = zckpt(*words, *ALSO.get(to, ()))
        if dialect in own:
            written = [each for each in own if any((tmp_path / dialect).glob(own[each]))]
            assert written == [dialect], ended.err
        else:
            name = "a universal checkpoint" if to == "universal" else f"--to {to}"
            assert f"does not apply to {name}" in ended.err
    if own:
        words = ("convert", source, tmp_path / "usual", "--to", to, *ALSO.get(to, ()))
        assert zckpt(*words).code == 0
        written = [each for each in own if any((tmp_path / "usual").glob(own[each]))]
        # torchtitan's directory has the usual files with other keys: formats/dcp/test_write.py
        assert written == (["torchtitan"] if to == "dcp" else [USUAL[to]] if USUAL[to] else [])


def test_the_usual_form_of_keys_is_that_of_the_help(
    tmp_path: Path, zckpt: Callable[..., Result]
) -> None:
    def keys(name: str, source: Path, *words: str) -> bytes:
        assert zckpt("convert", source, tmp_path / name, "--to", "dcp", *words).code == 0
        return (tmp_path / name / ".metadata").read_bytes()

    usual = keys("usual", SMALL)
    flat = keys("flat", SMALL, "--dcp-layout", "flat")
    assert keys("nested", SMALL, "--dcp-layout", "nested") == usual != flat
    assert keys("again", tmp_path / "flat") == flat, "the source's"


@pytest.mark.parametrize(
    ("words", "given"),
    [
        ([], {"dp": None, "weights_only": False, "size": None}),
        (["--dp", "3", "--weights-only"], {"dp": 3, "weights_only": True, "size": None}),
        (["--size", "2"], {"dp": None, "weights_only": False, "size": 2}),
    ],
)
def test_declared_options_are_parsed(words: list[str], given: dict[str, Any]) -> None:
    size: Option[int | None] = Option("size", None, "The size", choices=(1, 2))
    command = stacked(*map(declared_option, (DP, WEIGHTS_ONLY, size)))(lambda **values: values)
    assert click.command()(command).main(words, standalone_mode=False) == given
