"""Whether a universal checkpoint is what an engine held: bit for bit, and by value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

import zckpt
from zckpt.proof.verify import FINDINGS

from ..conftest import texts

LOST_IN_STATE_DICTS = {"counters.global_samples", "module_metadata", "optimizer.clip_grad"}
"""What DeepSpeed's runs no longer have after torch's state dicts, which have no place for it."""


def is_equal(report: dict[str, Any], through: str | None = None) -> bool:
    """Whether `verify` found nothing, but what is lost on the way `through` another format."""
    lost = LOST_IN_STATE_DICTS if through in ("dcp", "gathered") else set()
    if not lost:
        return bool(report["equal"])
    others = (report.get(key) for key in FINDINGS if key != "states")
    return {line["key"] for line in report.get("states", ())} <= lost and not any(others)


def load(universal: Path) -> dict[str, torch.Tensor]:
    """Every tensor by `parameter/slot`, with safetensors alone."""
    found = {}
    for path in sorted(universal.glob("*.safetensors")):
        stem = path.stem.split("-")[0]
        slot = "param" if stem == "model" else stem
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 (no dictionary)
                assert f"{key}/{slot}" not in found
                found[f"{key}/{slot}"] = file.get_tensor(key)
    return found


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal type, shape and bytes; NaN equals itself and 0.0 differs from -0.0."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    flat = [x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b)]
    return torch.equal(*flat)


def assert_is_what_the_engine_held(
    universal: Path, oracle: dict[str, Any], older_torch: bool = False
) -> None:
    """Tensors, steps, scalars, groups, buffers, aliases, counters and scheduler.

    With `older_torch` groups may lack keys that torch has added since.
    """
    manifest = json.loads((universal / "manifest.json").read_text())
    held = load(universal)
    expected = expected_tensors(manifest, oracle)
    tensors = {name: t for name, t in held.items() if not name.endswith("/state")}
    assert sorted(tensors) == sorted(expected)
    different = [name for name in expected if not same_bits(held[name], expected[name])]
    assert different == []

    parameters = manifest["parameters"]
    here = set(parameters)
    assert {n for n, p in parameters.items() if p["trainable"]} == set(oracle["trainable"])
    assert {n for n, p in parameters.items() if not p["trainable"]} == set(oracle["frozen"]) & here
    assert {name: parameters[name]["step"] for name in oracle["steps"]} == oracle["steps"]
    for name, scalars in oracle["scalars"].items():
        stored = {k: nested(s) for k, s in parameters[name]["scalars"].items()}
        assert stored == {key: plain(value) for key, value in scalars.items()}
    aliases = {alias: name for name, p in parameters.items() for alias in p["aliases"]}
    assert aliases == oracle["aliases"]
    for place, group in enumerate(oracle["groups"]):
        members = [name for name, p in parameters.items() if p["group"] == place]
        assert members == group["params"]
        if manifest["groups"] is not None and not manifest["state"]["engine"]["elastic"]:
            expected_group = {
                key: plain(value) for key, value in group.items() if key not in ("params", "step")
            }
            held_group = manifest["groups"][place]
            assert {"lr", "weight_decay"} <= set(held_group)
            if older_torch:
                expected_group = {key: expected_group[key] for key in held_group}
            assert held_group == expected_group
    assert manifest["state"]["counters"] == oracle["counters"]


def assert_proven(run: Path, other: Path, harmless: tuple[str, ...] = ("padding", "type")) -> None:
    """`verify` finds nothing: alone, against the other, and gathered the engine's way.

    Notes may tell of what is `harmless`.
    """
    gathered = {"gather": True, "device": "cpu"}
    for words, options in (
        ([run], {}),
        ([run, other], {}),
        ([other, run], {}),
        ([run, other], gathered),
    ):
        report = zckpt.verify(*words, **options)
        assert report["equal"], report
        assert report.get("only_a", []) == report.get("only_b", []) == []
        notes = texts(report["notes"])
        notes = [note for note in notes if not any(word in note for word in harmless)]
        if any(report.get("rounded", {}).values()):  # frozen weights have the engine's own type
            parameters = zckpt.read(run).parameters
            names = [*report["rounded"]["a"], *report["rounded"]["b"]]
            assert not any(parameters[name].trainable for name in names)
            notes = [note for note in notes if "fewer bits" not in note]
        assert notes == []


def expected_tensors(manifest: dict[str, Any], oracle: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Of what the engine held, what its files hold: no 16-bit trainable weights in stage 3."""
    expected = dict(oracle["tensors"])
    if manifest["source"]["zero_stage"] == 3:
        for name in oracle["trainable"]:
            del expected[f"{name}/param"]
    for name in set(oracle["frozen"]) - set(manifest["parameters"]):  # saved without them
        del expected[f"{name}/param"]
    return expected | {f"{name}/param": tensor for name, tensor in oracle["buffers"].items()}


def nested(scalar: dict[str, Any]) -> Any:
    """A number of the manifest, in as many lists as its shape has dimensions."""
    value = scalar["value"]
    for _ in scalar.get("shape", ()):
        value = [value]
    return value


def plain(value: Any) -> Any:
    """As JSON gives it back."""
    if isinstance(value, tuple):
        return list(value)
    return value.item() if isinstance(value, torch.Tensor) else value


def assert_is_what_torch_held(
    universal: Path, oracle: dict[str, Any], weights_only: bool = False
) -> None:
    """The same of a PyTorch run; what the files cannot tell may be taken for a frozen weight.

    State dicts do not tell buffers from frozen weights where all is whole, nor weights that got no
    gradient from frozen ones that the optimizer was given.
    """
    manifest = json.loads((universal / "manifest.json").read_text())
    held = {name: t for name, t in load(universal).items() if not name.endswith("/state")}
    aliases = {a: name for name, p in manifest["parameters"].items() for a in p["aliases"]}
    assert aliases == oracle["aliases"]
    expected = dict(oracle["tensors"])
    expected |= {f"{name}/param": tensor for name, tensor in oracle["buffers"].items()}
    expected = {name: t for name, t in expected.items() if name.rpartition("/")[0] not in aliases}
    if weights_only:
        expected = {name: t for name, t in expected.items() if name.endswith("/param")}
    assert sorted(held) == sorted(expected)
    assert [name for name in expected if not same_bits(held[name], expected[name])] == []
    if weights_only:
        return
    parameters = manifest["parameters"]
    assert {name: parameters[name]["step"] for name in oracle["steps"]} == oracle["steps"]
    for name, scalars in oracle["scalars"].items():
        stored = {k: s["value"] for k, s in parameters[name]["scalars"].items()}
        assert stored == {key: plain(value) for key, value in scalars.items()}
    for place, group in enumerate(oracle["groups"]):
        members = [name for name, p in parameters.items() if p["group"] == place]
        assert members == group["params"]
        hyper = {
            key: plain(v)
            for key, v in group.items()
            if key not in ("params", "param_names", "step")
        }
        stored = manifest["groups"][place].items()
        assert {k: v["$scalar"][0] if isinstance(v, dict) else v for k, v in stored} == hyper


def assert_same_run(expected: dict[str, Any], found: dict[str, Any], across: bool = False) -> None:
    """What a resumed run holds, and its next five losses, against the run that went on.

    `across` engines masters are weights, and groups have keys of their own.
    """
    if across:
        expected, found = _of_any_engine(expected), _of_any_engine(found)
    for key in ("steps", "groups", "trainable", "frozen", "aliases", "scalars"):
        assert found[key] == expected[key], key
    for key in ("tensors", "buffers"):
        ours, theirs = expected[key], found[key]
        assert sorted(ours) == sorted(theirs)
        assert [name for name in ours if not same_bits(ours[name], theirs[name])] == []
    pairs = zip(expected["losses"], found["losses"], strict=True)
    assert max(abs(a - b) for a, b in pairs) < 1e-4


def _of_any_engine(held: dict[str, Any]) -> dict[str, Any]:
    shared = ("params", "lr", "betas", "eps", "weight_decay")
    tensors = {name.replace("/master", "/param"): t for name, t in held["tensors"].items()}
    groups = [{key: group[key] for key in shared} for group in held["groups"]]
    return {**held, "tensors": tensors, "groups": groups}
