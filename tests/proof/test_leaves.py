"""Every value that a checkpoint's files hold, changed one at a time: `verify --against` finds it.

By default a sample of them; all with `-m exhaustive`.
"""

from __future__ import annotations

import json
import random
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import zckpt
from zckpt import ZckptError

from ..conftest import ROOT, texts
from ..engines import deepspeed
from ..engines.cases import CASES
from ..safety import tiny
from . import leaves

MEGATRON = ROOT / "tests" / "data" / "megatron-0.16.1-tp2"
DEEPSPEED = {"to": "deepspeed", "dp": 2, "dtype": "fp16"}
KINDS: dict[str, dict[str, Any]] = {
    "deepspeed, stage 0": DEEPSPEED | {"stage": 0},
    "deepspeed, stage 1": DEEPSPEED | {"stage": 1},
    "deepspeed, stage 2": DEEPSPEED | {"stage": 2},
    "deepspeed, stage 3": DEEPSPEED | {"stage": 3},
    "deepspeed-universal": {"to": "deepspeed-universal"},
    "dcp": {"to": "dcp", "dp": 2},
    "gathered": {"to": "gathered", "dialect": "accelerate"},
    "gathered, one file": {"to": "gathered"},
    "universal": {"to": "universal"},
    "megatron": {"to": "megatron"},
}
SAMPLE = 25  # leaves of each kind


def program(root: Path) -> Path:
    """A run of torch with all that programs save beside their weights."""
    path = tiny.gathered(root) / "checkpoint.pt"
    saved = torch.load(path, weights_only=False)
    saved["model"]["layer._extra_state"] = {"recipe": "delayed", "amax": torch.tensor([1.0, 2.0])}
    saved["random"] = {
        "torch": torch.Generator().manual_seed(5).get_state(),
        "numpy": numpy.arange(4, dtype=numpy.uint32),
        "python": (3, (1, 2, 3), None),
    }
    saved["scaler"] = {"scale": 65536.0, "growth_factor": 2.0, "_growth_tracker": 3}
    saved["loader"] = {"position": 17, "shuffled": True, 5: "five"}
    torch.save(saved, path)
    return path.parent


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    root = tmp_path_factory.mktemp("leaves")
    source = program(root)
    paths = {}
    for number, (kind, options) in enumerate(KINDS.items()):
        paths[kind] = root / str(number)
        own = {} if kind == "megatron" else {"param_names": list(tiny.NAMES)}
        zckpt.convert(MEGATRON if kind == "megatron" else source, paths[kind], **options, **own)
    yield paths
    shutil.rmtree(root)


def outcome(leaf: leaves.Leaf, path: Path, root: Path, against: Path | None = None) -> str:
    changed = leaves.plant(leaf, path, root / "changed")
    try:
        return "equal" if zckpt.verify(changed, against or path)["equal"] else "differs"
    except ZckptError:
        return "refused"
    finally:
        shutil.rmtree(changed)


UNREAD = {
    "deepspeed": {
        r"config\.json: .*": "a file beside the run, which is of no trainer's program",
        r".*_model_states\.pt: optimizer": "the engine looks there without ZeRO alone",
        r".*_states\.pt: ds_config\..*": "the engine takes the configuration of the program; a "
        "line `not compared` names what differs",
        r".*\.pt: ds_version": "the version that saved: two versions may save one run; `not "
        "compared` names it",
        r".*_model_states\.pt: dp_world_size": "the size of a run: another size is no other run",
        r".*_model_states\.pt: checkpoint_parallel_dimensions\.tp_degree": "so many ranks share a "
        "sequence, which is a size too",
        r".*_model_states\.pt: param_shapes\..*": "without ZeRO zckpt reads its names alone, and "
        "the engine neither writes nor reads it",
    },
    "deepspeed-universal": {
        r".*/optimizer_state\.pt: zckpt": "a mark of zckpt, which says that zckpt wrote the file",
        r".*/optimizer_state\.pt: zero_stage\.0": "the stage of a run: another is no other run",
        r".*/optimizer_state\.pt: param_groups\.\d+\.params\.\d+": "the engine skips this key",
    },
    "gathered": {
        r"extra\.pt: zckpt\.aliases\..*": "an owner that the model lacks: zckpt then ignores its "
        "own record, and sees by equal bytes which weights are tied",
        r"extra\.pt: zckpt\.frozen\.\d+": "a name that the model lacks: zckpt then ignores its own "
        "record, and sees by the optimizer what is frozen",
        r"checkpoint\.pt: zckpt\.model\.0": "a place without a model: zckpt ignores its own record",
    },
    "universal": {
        r"manifest\.json: (?:source\..*|optimizer|state\.engine\..*)": "how the source was saved; "
        "`not compared` names it, but for what zckpt guessed",
        r"manifest\.json: tuples\.\d+": "whether a pair of numbers was a tuple or a list",
        r"manifest\.json: (?:steps|warnings|notices)\..*": "sentences for people",
    },
    "megatron": {
        r".*/metadata\.json: .*": "the version of the files' layout",
        r".*/common\.pt: args\.(?:world|\w+_parallel|padded_vocab)_size": "sizes of a run, which "
        "`not compared` names: another size is no other run",
    },
}
"""Leaves whose change `verify` does not find, by the format: the reason of each."""


def unsupported(kind: str) -> dict[str, str]:
    format = kind.partition(",")[0]
    families = {format, "deepspeed"} if format.startswith("deepspeed") else {format}
    return {place: reason for name in families for place, reason in UNREAD.get(name, {}).items()}


def check(kind: str, some: int | None, sound: dict[str, Path], root: Path) -> Counter[str]:
    path = sound[kind]
    assert zckpt.verify(path, against=path)["equal"]
    every = list(leaves.leaves(path))
    chosen = every if some is None else random.Random(kind).sample(every, min(some, len(every)))
    counts: Counter[str] = Counter()
    missed = []
    for leaf in chosen:
        result = outcome(leaf, path, root)
        if result == "equal" and not any(
            re.fullmatch(place, str(leaf)) for place in unsupported(kind)
        ):
            missed.append(str(leaf))
        counts[result] += 1
    print(f"{kind}: {len(chosen)} of {len(every)} leaves, {dict(counts)}")
    assert not missed
    return counts


@pytest.mark.parametrize("kind", KINDS)
def test_a_sample(kind: str, sound: dict[str, Path], tmp_path: Path) -> None:
    check(kind, SAMPLE, sound, tmp_path)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
def test_every_leaf(kind: str, sound: dict[str, Path], tmp_path: Path) -> None:
    counts = check(kind, None, sound, tmp_path)
    assert counts["differs"] > counts["equal"] * 5


@pytest.mark.parametrize("format", UNREAD)
def test_the_list_has_no_more_than_it_needs(format: str, sound: dict[str, Path]) -> None:
    kinds = (path for kind, path in sound.items() if kind.partition(",")[0] == format)
    every = [str(leaf) for path in kinds for leaf in leaves.leaves(path)]
    for place in UNREAD[format]:
        assert any(re.fullmatch(place, leaf) for leaf in every), place


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "megatron"])
def test_targets_equal_their_source(kind: str, sound: dict[str, Path]) -> None:
    """What the other engine has no place for is named, and is no difference."""
    source = sound[kind].parent / "run"
    report = zckpt.verify(source, against=sound[kind], param_names=list(tiny.NAMES))
    assert report["equal"], report["states"]
    sentences = " ".join(texts(report["not_compared"]))
    assert ("counters" in sentences) == kind.startswith("deepspeed")


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_proof_has_what_is_compared(
    kind: str, sound: dict[str, Path], tmp_path: Path
) -> None:
    path, proof = sound[kind], tmp_path / "proof.json"
    proof.write_text(json.dumps(zckpt.verify(path)))
    assert zckpt.verify(path, against=proof)["equal"]
    beside = {item.name for item in zckpt.read(path).files.siblings}  # a proof has no such files
    every = [leaf for leaf in leaves.leaves(path) if Path(leaf.file).name not in beside]
    for leaf in random.Random(kind).sample(every, 8):
        if outcome(leaf, path, tmp_path) != "equal":
            assert outcome(leaf, path, tmp_path, proof) != "equal", leaf


def test_a_proof_of_before_is_read(sound: dict[str, Path], tmp_path: Path) -> None:
    """zckpt 0.1 kept parameters, buffers and groups."""
    path, proof = sound["deepspeed, stage 2"], tmp_path / "proof.json"
    report = zckpt.verify(path)
    kept = {key: report["held"][key] for key in ("parameters", "buffers", "groups")}
    proof.write_text(json.dumps({**report, "held": kept}))
    compared = zckpt.verify(path, against=proof)
    assert compared["equal"]
    assert any(line.startswith("counters, ") for line in texts(compared["not_compared"]))


@pytest.mark.engines
def test_deepspeed_goes_on_as_if_nothing_were_changed(
    trained: Callable[[Any], Path], tmp_path: Path
) -> None:
    """Its own configuration, version and empty places are changed, all at once."""
    case = CASES["z3_dp2_bf16"]
    run = trained(case) / "run"
    places = re.compile(r".*_states\.pt: (?:optimizer|ds_config\..*|ds_version)")
    path, count = run, 0
    for leaf in leaves.leaves(run):
        if places.fullmatch(str(leaf)):
            path, count = leaves.plant(leaf, path, tmp_path / str(count)), count + 1
    assert count > 20
    before, after = (
        deepspeed.resume(case, each, tmp_path / name)
        for each, name in ((run, "before"), (path, "after"))
    )
    assert before["losses"] == after["losses"]
