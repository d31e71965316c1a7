"""To and from engines that run: DeepSpeed and torch go on from ONNX Runtime's files."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import zckpt
from zckpt import errors

from ...conftest import texts
from ...engines import deepspeed
from ...engines import onnxruntime_files as files
from ...engines.cases import Case
from ...engines.onnxruntime_files import make
from ..equality import load, plain, same_bits
from .samples import (
    DATA,
    REAL,
    engines,
)


@dataclass(frozen=True)
class Way:
    """A real DeepSpeed run, through ONNX Runtime's files, into a real engine again."""

    name: str
    case: Case
    dialect: str
    dp: int  # of ONNX Runtime's files
    to: str = "deepspeed"
    stage: int = 2
    dtype: str | None = None
    universal: bool = False  # between the two


def one_group(dtype: str, **more: Any) -> Case:
    name = f"onnxruntime_{dtype}" + "".join(f"_{value}" for value in more.values())
    return Case(name, "onnxruntime", 2, 2, dtype, optimizer="adam", groups=1, **more)


PLAIN = one_group("fp32", model="plain")
WAYS = [
    Way("fp32 hdf5", PLAIN, "hdf5", 3),
    Way("fp32 l2 universal", PLAIN, "l2", 4, universal=True),
    Way("fp32 stage 3", PLAIN, "hdf5", 1, stage=3),
    Way("bf16 l2", one_group("bf16", model="plain"), "l2", 3),
    Way(
        "bf16 universal stage 1", one_group("bf16", model="plain"), "l2", 2, stage=1, universal=True
    ),
    Way("fp32 to bf16", PLAIN, "hdf5", 8, dtype="bf16"),
    Way("deepspeed-universal", PLAIN, "hdf5", 2, to="deepspeed-universal"),
    Way(
        "deepspeed-universal through ours", PLAIN, "l2", 2, to="deepspeed-universal", universal=True
    ),
    Way(
        "deepspeed-universal AdamW",
        dataclasses.replace(PLAIN, name="onnxruntime_adamw", optimizer="adamw"),
        "hdf5",
        2,
        to="deepspeed-universal",
    ),
]


def of_engine(way: Way) -> dict[str, Any]:
    """A ds_config of the engine that resumes, as far as it shapes the files."""
    dtype = way.dtype or way.case.dtype
    config: dict[str, Any] = {"zero_optimization": {"stage": way.stage}}
    return config if dtype == "fp32" else {**config, dtype: {"enabled": True}}


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(way, id=way.name.replace(" ", "-"), marks=engines(place in (0, 6)))
        for place, way in enumerate(WAYS)
    ],
)
def test_deepspeed_goes_on(way: Way, trained: Callable[[Case], Path], tmp_path: Path) -> None:
    run = trained(way.case)
    before = torch.load(run / "oracle.pt", weights_only=False)
    (group,) = before["groups"]
    zckpt.convert(run / "run", tmp_path / "ort", to="onnxruntime", dp=way.dp, dialect=way.dialect)
    assert zckpt.read(tmp_path / "ort").step == 3
    defaults = {key: plain(group[key]) for key in ("lr", "betas", "weight_decay")}
    defaults["betas"] = tuple(defaults["betas"])
    source, options = tmp_path / "ort", {"group_defaults": defaults}
    names = tuple(group["params"])
    if way.universal:
        zckpt.convert(source, tmp_path / "universal", **options, param_names=names)
        source, options = tmp_path / "universal", {}
    elif way.to == "deepspeed":
        options["param_names"] = names
    if way.to == "deepspeed":  # these files do not tell buffers from frozen weights
        options["buffers"] = tuple(before["buffers"])
    report = zckpt.convert(
        source, tmp_path / "run", to=way.to, dp=2, config=of_engine(way), **options
    )
    assumed = [line for line in texts(report["warnings"]) if "hyper-parameters" in line]
    assert len(assumed) == 1  # what was not given is named
    assert "eps=1e-08" in assumed[0]
    assert "lr=" not in assumed[0]
    config = {"checkpoint": {"load_universal": True}} if way.to != "deepspeed" else {}
    case = dataclasses.replace(way.case, dtype=way.dtype or way.case.dtype)
    after = deepspeed.resume(case, tmp_path / "run", tmp_path, dp=2, stage=way.stage, config=config)
    for name, tensor in before["tensors"].items():
        if not (way.dtype and name.endswith("/param")):
            assert same_bits(tensor, after["tensors"][name]), name
    assert after["steps"] == before["steps"]
    # the program makes its Adam: the files have the key of every class that it may be of
    assert after["groups"][0] == {"bias_correction": True, **group}
    if way.to == "deepspeed":
        for name, tensor in before["buffers"].items():
            assert same_bits(tensor, after["buffers"][name]), name
        if not way.dtype and way.stage == 2:
            assert after["losses"] == before["losses"]
        tolerance = 0.05 if way.dtype else 1e-6
        assert after["losses"][0] == pytest.approx(before["losses"][0], rel=0, abs=tolerance)


class TestToDeepSpeed:
    def test_the_order_of_parameters_has_to_be_given(self, tmp_path: Path) -> None:
        source = DATA / "hdf5__fp16__adam__dp3"
        with pytest.raises(errors.MissingData) as caught:
            zckpt.convert(source, tmp_path / "run", to="deepspeed")
        assert "--param-names" in caught.value.hint
        assert "deepspeed-universal" in caught.value.hint
        zckpt.convert(source, tmp_path / "universal")
        with pytest.raises(errors.MissingData):
            zckpt.convert(tmp_path / "universal", tmp_path / "run", to="deepspeed")

    def test_defaults_are_named(self, tmp_path: Path) -> None:
        report = zckpt.convert(
            DATA / "hdf5__fp16__adam__dp3", tmp_path / "run", to="deepspeed-universal"
        )
        warning = next(line for line in texts(report["warnings"]) if "hyper-parameters" in line)
        for word in ("adam's defaults", "lr=0.001", "betas=(0.9, 0.999)", "weight_decay=0.0"):
            assert word in warning

    @pytest.mark.parametrize(
        ("names", "words"),
        [
            (["Emb.weight"], "does not name"),
            (["other"], "other, which the source does not hold"),
            (["scale", "scale"], "scale twice"),
        ],
    )
    def test_names_that_are_not_the_modules(
        self, names: list[str], words: str, zckpt: Callable[..., Any], tmp_path: Path
    ) -> None:
        state = make(shapes={"Emb.weight": (8, 8), "scale": (1,)})
        files.write(state, tmp_path / "source", 2, "hdf5")
        listed = ["Emb.weight", "scale", *names] if words != "does not name" else names
        (tmp_path / "names").write_text("\n".join(listed))
        ended = zckpt(
            "convert", tmp_path / "source", tmp_path / "u", "--param-names", tmp_path / "names"
        )
        assert ended.code == 2
        assert words in ended.err

    def test_parameters_stand_in_the_given_order(
        self, zckpt: Callable[..., Any], tmp_path: Path
    ) -> None:
        state = make(shapes={"b": (8, 8), "a": (1,), "c": (3,)}, frozen={"d": (2,), "e": (2,)})
        files.write(state, tmp_path / "source", 2, "hdf5")
        (tmp_path / "names").write_text('["c", "a", "d", "b"]')
        zckpt("convert", tmp_path / "source", tmp_path / "u", "--param-names", tmp_path / "names")
        manifest = json.loads((tmp_path / "u" / "manifest.json").read_text())
        assert list(manifest["parameters"]) == ["c", "a", "b", "d", "e"]
        assert manifest["buffers"] == []

    @pytest.mark.parametrize("stage", [2, 3])
    def test_the_program_says_whether_its_adam_is_adamw(self, stage: int, tmp_path: Path) -> None:
        """The files do not; the universal loader would make torch's AdamW an Adam, or the reverse.

        DeepSpeed 0.14.5 to 0.19.8 keeps the program's value of a key that no group has.
        """
        source = DATA / "hdf5__fp16__adam__dp3"
        for name, given in (("left", {}), ("given", {"decoupled_weight_decay": True})):
            defaults = {"lr": 0.01, **given}
            zckpt.convert(
                source,
                tmp_path / name,
                to="deepspeed-universal",
                stage=stage,
                optimizer="torch",
                group_defaults=defaults,
            )
            (path,) = (tmp_path / name).glob("*/zero/optimizer_state.pt")
            (group,) = torch.load(path, weights_only=False)["param_groups"]
            assert group.items() >= defaults.items()
            assert group.get("decoupled_weight_decay") == given.get("decoupled_weight_decay")

    def test_lamb_is_no_optimizer_of_deepspeed(self, tmp_path: Path) -> None:
        source = DATA / "hdf5__fp16__lamb__dp2"
        with pytest.raises(errors.WrongOption, match="Lamb"):
            zckpt.convert(source, tmp_path / "run", to="deepspeed-universal")
        zckpt.convert(source, tmp_path / "run", to="deepspeed-universal", optimizer="torch")


@pytest.mark.parametrize("sample", sorted(path.name for path in DATA.glob("[hl]*__*")))
@pytest.mark.parametrize("to", ["gathered", "dcp"])
def test_torch_gets_files_of_its_own(sample: str, to: str, tmp_path: Path) -> None:
    """ONNX Runtime's dialects are not those of torch's files."""
    zckpt.convert(DATA / sample, tmp_path / "torch", to=to)
    if to == "gathered":
        weights = torch.load(tmp_path / "torch" / "model.pt")
        assert set(weights) >= set(zckpt.read(DATA / sample).parameters)
    assert zckpt.verify(DATA / sample, tmp_path / "torch")["equal"]


def test_torch_goes_on(tmp_path: Path) -> None:
    """A model that ORT 1.16.3 trained, with torch's Adam: ORT's own next three steps."""
    zckpt.convert(REAL / "checkpoint.ortcp", tmp_path / "universal")
    tensors = load(tmp_path / "universal")
    names = [name.removesuffix("/param") for name in tensors if name.endswith("/param")]
    weights = {name: tensors[f"{name}/param"].requires_grad_() for name in names}
    adam = torch.optim.Adam(weights.values(), lr=0.01)  # ORT's own defaults are torch's
    step = torch.tensor(float(zckpt.read(tmp_path / "universal").step or 0))
    for name, weight in weights.items():
        adam.state[weight] = {
            "step": step.clone(),
            "exp_avg": tensors[f"{name}/exp_avg"],
            "exp_avg_sq": tensors[f"{name}/exp_avg_sq"],
        }
    batches = load_file(REAL / "batches.safetensors")
    losses = []
    for place in (5, 6, 7):
        hidden = batches[f"x{place}"] @ weights["Emb.weight"]
        for layer in ("layer.2", "layer.10"):
            hidden = hidden @ weights[f"{layer}.weight"] * weights[f"{layer}.bias"]
        loss = (hidden.relu() @ weights["head.weight"]).square().mean()
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(loss.item())
    expected = json.loads((REAL / "case.json").read_text())["resume_losses"]
    assert losses == pytest.approx(expected, rel=1e-5)
    after = load_file(REAL / "after_resume.safetensors")
    for name, weight in weights.items():
        assert torch.allclose(weight, after[f"master/{name}"], rtol=1e-5, atol=1e-6), name
