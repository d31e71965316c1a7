"""Does an option that changes nothing say so? Each is given to each command and format.

The judge is what is written: an option that is neither refused nor named in a line must change a
file. Options that ask for what is there already (`--tp 1`), or that say what is no error
(`--accept-weights`), have nothing to say.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import zckpt
from zckpt import formats
from zckpt.errors import ZckptError
from zckpt.formats.options import declared
from zckpt.formats.reading import SourceKeywords

from ..conftest import EXAMPLE, ROOT, Once, Result

DATA = ROOT / "tests" / "data"
CONFIG = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}, "optimizer": {}}
ASKED: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("ep", "tp", "pp", "sp"), (4,)),
    "stage": (3,),
    "vocab_size": (64,),
    "pp_bounds": ((0, 1),),
    "pp_partition": ("uniform",),
    "optimizer": ("apex-fused-adam",),
    "group_defaults": ({"lr": 0.5}, {"momentum": 0.5}),
    "set_group": ({"lr": 0.5},),
    "allow_object": (("a.B",),),
    "tie": ((("nope", "nada"),),),
    "rename": ((("zzz", "yyy"),),),
    "family": ("llama",),
    "drop_state": (("zzz",),),
    "frozen": (("zzz*",),),
    "buffers": (("zzz*",),),
    "config": (CONFIG,),
    "dcp_layout": ("flat",),
    "dialect": ("accelerate", "safetensors", "torchtitan", "l2"),
    "max_file_size": (2000,),
    "model_config": (str(EXAMPLE),),
    "replicas": ("rank0",),
    "tp_rules": ("megatron",),
    "step_policy": ("99",),
    "tag": ("zzz",),
    "root": ("zzz",),
}
"""Values that ask for something that no source here has."""
SATISFIED = {
    *("accept_weights", "masters_from_weights", "follow_links"),  # what is no error
    *("dp", "like", "groups_from", "param_names"),  # what the files are or state already
    *("dtype", "weights_only", "format"),  # which every target takes
}
SOURCES = ("deepspeed", "dcp", "megatron", "onnxruntime", "universal", "gathered")
TARGETS = [each.name for each in formats.FORMATS if each.writes and each.is_resumed]
OF_LINES = {"warnings", "left_out", "notices", "crc32"}
"""The keys of a manifest that say what was told."""
USUAL = [("deepspeed", "deepspeed"), ("deepspeed", "dcp")]


@pytest.fixture
def sources(once: Once) -> dict[str, Path]:
    """A small checkpoint of each format."""

    def make(folder: Path) -> Path:
        zckpt.convert(EXAMPLE, folder / "universal")
        zckpt.convert(DATA / "fsdp2-2.13.0-w2", folder / "gathered", to="gathered")
        return folder

    made = once("sources", "of_options", make)
    return {
        "deepspeed": EXAMPLE,
        "dcp": DATA / "fsdp2-2.13.0-w2",
        "megatron": DATA / "megatron-0.16.1-tp2",
        "onnxruntime": DATA / "onnxruntime" / "hdf5__fp32__adam__dp2",
        "universal": made / "universal",
        "gathered": made / "gathered",
    }


def content(folder: Path) -> dict[str, str]:
    """A checksum of each file; a manifest counts without the lines that are told."""
    files = [file for file in folder.rglob("*") if file.is_file()]
    return {str(file.relative_to(folder)): hashlib.sha256(text(file)).hexdigest() for file in files}


def text(file: Path) -> bytes:
    if file.name != "manifest.json":
        return file.read_bytes()
    document = json.loads(file.read_text())
    return repr([document[key] for key in document if key not in OF_LINES]).encode()


def rows() -> list[Any]:
    """Each option in two pairs of formats; with `-m exhaustive` in all of them."""
    params = []
    pairs = [*USUAL, *((own, to) for own in SOURCES for to in TARGETS if (own, to) not in USUAL)]
    for source, to in pairs:
        for words in ({}, {"weights_only": True}):
            marks = () if (source, to) in USUAL else (pytest.mark.exhaustive,)
            name = f"{source} to {to}{', weights' if words else ''}"
            params.append(pytest.param(source, to, words, id=name, marks=marks))
    return params


def test_every_option_is_asked() -> None:
    every = {option.name for option in declared(formats.FORMATS)}
    assert every | {*SourceKeywords.__annotations__} | SATISFIED == ASKED.keys() | SATISFIED


@pytest.mark.parametrize(("source", "to", "base"), rows())
def test_an_option_of_a_conversion(
    source: str, to: str, base: dict[str, Any], sources: dict[str, Path], tmp_path: Path
) -> None:
    """It is refused, or changes a file, or a line says that it changes nothing."""

    def written(**words: Any) -> tuple[dict[str, str], list[Any]]:
        target = tmp_path / "target"
        shutil.rmtree(target, ignore_errors=True)
        report = zckpt.convert(sources[source], target, to=to, **words)
        return content(target), report["warnings"]

    try:
        usual, _ = written(**base)
    except ZckptError as error:
        pytest.skip(f"{source} is not written as {to}: {error}")
    silent = []
    for name, values in ASKED.items():
        for value in values:
            try:
                files, warnings = written(**base, **{name: value})
            except (ZckptError, OSError):
                continue
            said = {each["subject"] for each in warnings if each["code"] == "option-without-effect"}
            flags = {option.flag for option in declared(formats.FORMATS) if option.name == name}
            flags |= {f"--{name.replace('_', '-')}"}
            if files == usual and said.isdisjoint(flags):
                silent.append((name, value))
    assert not silent


# -- commands that write nothing, and options of other commands

SAID: dict[tuple[str, ...], str] = {
    ("inspect", "RUN", "--buffers", "zzz*"): "--buffers zzz* is not used",
    ("inspect", "RUN", "--tp-rules", "llama"): "--tp-rules llama is not used",
    ("inspect", "RUN", "--step-policy", "99"): "--step-policy 99 is not used",
    ("inspect", "RUN", "--tag", "zzz"): "'zzz'",
    ("inspect", "RUN", "--root", "zzz"): "is called zzz",
    ("inspect", "RUN", "--steps", "--tensors", "x"): "--steps and --tensors cannot be printed",
    ("inspect", "RUN", "--state", "--layout"): "--state and --layout cannot be printed",
    ("inspect", "ORT", "--tag", "zzz"): "not called zzz",
    ("stats", "RUN", "--buffers", "zzz*"): "--buffers zzz* is not used",
    ("stats", "RUN", "--step-policy", "99"): "--step-policy 99 is not used",
    ("verify", "RUN", "--rename", "fc=fc"): "--rename changes nothing here",
    ("verify", "RUN", "--step-policy", "99"): "--step-policy 99 is not used",
    ("verify", "RUN", "--device", "cpu"): "--device is only for --gather",
    ("verify", "RUN", "--family", "llama"): "--family is only for a comparison",
    ("verify", "RUN", "--weights-only"): "--weights-only applies only to a comparison",
    ("verify", "RUN", "--drop-state", "exp_avg"): "--drop-state applies only to a comparison",
    ("diff", "RUN", "RUN", "--drop-state", "zzz"): "zzz",
    ("report", "RUN", "--tag", "zzz", "--json"): "zzz",
    ("check", "DCP", "--stage", "3"): "--stage changes nothing here",
    ("check", "DCP", "--ds-config", "CONFIG"): "--ds-config changes nothing here",
    ("check", "RUN", "--for", "dcp", "--stage", "3"): "--stage changes nothing here",
    ("list", "DCP", "--stage", "3"): "--stage changes nothing here",
    ("auto-resume", "DCP", "--stage", "3"): "--stage changes nothing here",
    ("auto-resume", "DCP", "--pp-bounds", "0,1"): "--pp-bounds changes nothing here",
    ("reshard", "RUN", "OUT", "--dp", "2", "--vocab-size", "64"): "--vocab-size changes nothing",
    ("convert", "RUN", "OUT", "--no-read-back"): "--no-read-back changes nothing here",
    ("export", "MODEL", "OUT", "--step-policy", "99"): "--step-policy 99 is not used",
}
"""What a command says of an option that has no use, in a line or as an error."""


@pytest.mark.parametrize("words", SAID, ids=" ".join)
def test_an_option_of_a_command(
    words: tuple[str, ...], tmp_path: Path, example: Path, zckpt: Callable[..., Result]
) -> None:
    shutil.copytree(DATA / "fsdp2-2.13.0-w2", tmp_path / "runs" / "step-3")
    (tmp_path / "ds.json").write_text("{}")
    names: dict[str, object] = {
        "RUN": example,
        "DCP": tmp_path / "runs",
        "ORT": DATA / "onnxruntime" / "hdf5__fp32__adam__dp2",
        "OUT": tmp_path / "out",
        "CONFIG": tmp_path / "ds.json",
        "MODEL": ROOT / "examples" / "trainer" / "checkpoint-4",
    }
    said = zckpt(*(names.get(word, word) for word in words))
    assert SAID[words] in said.err + said.out


def test_another_target_than_was_asked_for_is_an_error(
    example: Path, tmp_path: Path, zckpt: Callable[..., Result]
) -> None:
    """Its hint has the option that is needed."""
    for command in (("reshard", "--dp", "2"), ("convert", "--to", "deepspeed")):
        verb, *words = command
        refused = zckpt(verb, example, tmp_path / "out", *words, "--vocab-size", "64")
        assert refused.code == 2
        assert "add --tp N" in refused.err


def test_auto_resume_goes_on_with_the_rows_of_its_ranks(
    example: Path, zckpt: Callable[..., Result]
) -> None:
    """A job gives the same options each time, and its tensor ranks are as many as before."""
    words = ("--dp", "2", "--tp", "1", "--vocab-size", "64")
    assert zckpt("auto-resume", example, *words).code == 0
