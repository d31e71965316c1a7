"""Whether a universal checkpoint is what an engine held: bit for bit, and by value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

import zckpt


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
        stored = {k: s["value"] for k, s in parameters[name]["scalars"].items()}
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
        told = [note for note in report["notes"] if not any(word in note for word in harmless)]
        assert told == []


def expected_tensors(manifest: dict[str, Any], oracle: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Of what the engine held, what its files hold: no 16-bit trainable weights in stage 3."""
    expected = dict(oracle["tensors"])
    if manifest["source"]["zero_stage"] == 3:
        for name in oracle["trainable"]:
            del expected[f"{name}/param"]
    for name in set(oracle["frozen"]) - set(manifest["parameters"]):  # saved without them
        del expected[f"{name}/param"]
    return expected | {f"{name}/param": tensor for name, tensor in oracle["buffers"].items()}


def plain(value: Any) -> Any:
    """As JSON gives it back."""
    if isinstance(value, tuple):
        return list(value)
    return value.item() if isinstance(value, torch.Tensor) else value
