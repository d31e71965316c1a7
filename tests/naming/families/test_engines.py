"""`--family` gives Megatron-Core the model of transformers, and transformers that of Megatron-Core.

Both are the unmodified programs: the same text has the same logits in fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import zckpt as package

from ...conftest import texts
from ...engines import families

pytestmark = pytest.mark.engines
PADDED = 64  # rows of the vocabulary of 61 in Megatron-Core


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every case's model in both programs, and what Megatron-Core computes."""
    root = tmp_path_factory.mktemp("families")
    jobs: list[dict[str, Any]] = []
    for case, (family, _, _) in families.CASES.items():
        families.train(case, root / case)
        package.convert(root / case, root / f"{case}-megatron", family=family)
        config = f"{case}/config.json"
        jobs.append(
            {"name": f"{case}-to", "config": config, "rows": 61, "weights": f"{case}-megatron"}
        )
        jobs.append({"name": f"{case}-from", "config": config, "rows": PADDED})
    families.megatron(root, jobs)
    return root


def _tensors(folder: Path, slot: str) -> dict[str, torch.Tensor]:
    return load_file(folder / f"{slot}.safetensors")


@pytest.mark.parametrize("case", families.CASES)
def test_megatron_computes_the_same(models: Path, case: str) -> None:
    network = families.model(case)
    network.load_state_dict(torch.load(models / case / "model.pt"))
    theirs = torch.load(models / f"{case}-to.logits.pt")
    torch.testing.assert_close(theirs, families.logits(network), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", families.CASES)
def test_moments_go_with_weights(models: Path, case: str) -> None:
    folder = models / f"{case}-megatron"
    weights = _tensors(folder, "model")
    for slot, factor in (("exp_avg", families.FIRST), ("exp_avg_sq", families.SECOND)):
        moments = _tensors(folder, slot)
        assert moments.keys() == weights.keys()
        wrong = [name for name in weights if not torch.equal(moments[name], weights[name] * factor)]
        assert wrong == []


@pytest.mark.parametrize("case", families.CASES)
def test_the_way_back(models: Path, tmp_path: Path, zckpt: Callable[..., Any], case: str) -> None:
    """What zckpt wrote for Megatron-Core becomes the files of transformers again, bit for bit."""
    source, family = models / f"{case}-megatron", families.CASES[case][0]
    ended = zckpt("convert", source, tmp_path / "back", "--to", "gathered", "--family", family)
    assert ended.code == 0, ended.err
    for name in ("model.pt", "optim.pt"):
        (read,) = (tmp_path / "back").glob(f"**/{name}")
        assert _same(torch.load(read), torch.load(models / case / name)), name
    ended = zckpt("verify", models / case, "--against", source, "--family", family)
    assert ended.code == 0, ended.err


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(value, b[key]) for key, value in a.items())
    if isinstance(a, list):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b)


@pytest.mark.parametrize("case", families.CASES)
@pytest.mark.parametrize("form", ["dist", "torch.pt"])
def test_transformers_computes_the_same(
    models: Path, tmp_path: Path, zckpt: Callable[..., Any], case: str, form: str
) -> None:
    """A model of Megatron-Core with a padded vocabulary, opened by from_pretrained."""
    import transformers

    family, name, _ = families.CASES[case]
    target = tmp_path / "model"
    ended = zckpt(
        "export", models / f"{case}-from" / form, target,
        "--family", family, "--config", models / case, "--json",
    )  # fmt: skip
    assert ended.code == 0, ended.err
    assert any("rows 61 to 63" in line for line in texts(ended.document["left_out"]))
    network, about = getattr(transformers, name).from_pretrained(
        target, attn_implementation="eager", output_loading_info=True
    )
    assert not any(about[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    theirs = torch.load(models / f"{case}-from.logits.pt")[..., :61]
    torch.testing.assert_close(families.logits(network), theirs, rtol=1e-5, atol=1e-5)
    network.save_pretrained(tmp_path / "again")
    written, expected = _tensors(target, "model"), _tensors(tmp_path / "again", "model")
    assert _same(written, expected), "save_pretrained writes other files"


@pytest.mark.parametrize("case", ["llama", "mixtral", "qwen3_moe"])
def test_files_of_save_pretrained(
    models: Path, tmp_path: Path, zckpt: Callable[..., Any], case: str
) -> None:
    """The Hub's files have experts one by one, and are the same model."""
    network = families.model(case)
    network.load_state_dict(torch.load(models / case / "model.pt"))
    network.save_pretrained(tmp_path / "hub")
    family, target = families.CASES[case][0], tmp_path / "target"
    ended = zckpt("convert", tmp_path / "hub", target, "--family", family, "--weights-only")
    assert ended.code == 0, ended.err
    read, expected = _tensors(target, "model"), _tensors(models / f"{case}-megatron", "model")
    assert read.keys() == expected.keys()
    assert all(torch.equal(read[name], expected[name]) for name in read)
