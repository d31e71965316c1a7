"""Fine-tunes of real trainers, moved to another size and another engine: every cell of the matrix.

    rows       {full, LoRA} x {one GPU, DDP, ZeRO-1, 2, 3, FSDP2 sharded, FSDP2 whole}
    columns    same size, another size, each other engine, export

A cell resumes in the unmodified program, holds what the original held, and goes on with the losses
of the run that was not interrupted. With TRL's SFTTrainer another size, with Accelerate another
engine. `-m engines` takes one cell of each row, `-m matrix` all of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt
from zckpt import errors

from ..conftest import Once, texts
from ..engines import finetunes
from ..engines.finetunes import ENGINES, Run
from .equality import same_bits

Trained = Callable[[Run], Path]
NUMBERED = ("one", "ddp")  # their optimizers know parameters by number


@pytest.fixture(scope="session")
def finetuned(once: Once) -> Trained:
    """What a program saved, once per session; oracle.pt is two folders above."""
    return lambda run: once("finetune", run, partial(finetunes.train, run))


def size_of(run: Run) -> dict[str, Any]:
    """Options of reshard; whole files load on any number of ranks."""
    return {} if run.engine in (*NUMBERED, "fsdp_full") else {"dp": run.ranks}


def oracle_of(directory: Path) -> dict[str, Any]:
    oracle: dict[str, Any] = torch.load(directory.parents[1] / "oracle.pt", weights_only=False)
    return oracle


def names_of(run: Run, directory: Path) -> dict[str, Any]:
    """Names, where the optimizer knows its parameters by number."""
    if run.engine not in NUMBERED:
        return {}
    return {"param_names": [n for group in oracle_of(directory)["groups"] for n in group["params"]]}


def to(run: Run) -> dict[str, Any]:
    """How a checkpoint is converted for an engine."""
    if run.engine in NUMBERED:
        return {"to": "gathered", "dialect": "safetensors"}
    if run.engine.startswith("zero"):
        stage = int(run.engine.removeprefix("zero"))
        return {"to": "deepspeed", "stage": stage, "dp": run.ranks}
    if run.engine == "fsdp":
        return {"to": "dcp", "dialect": "accelerate", "dp": run.ranks}
    return {"to": "gathered", "dialect": "accelerate"}


def assert_goes_on(run: Run, target: Path, source: Path, root: Path) -> None:
    """The program resumes with what the original held, and with its losses."""
    expected, found = oracle_of(source), finetunes.resume(run, target, root)
    assert found["tensors"].keys() == expected["tensors"].keys()
    different = [n for n, t in expected["tensors"].items() if not same_bits(found["tensors"][n], t)]
    assert different == []
    assert found["steps"] == expected["steps"]
    groups = [[g for g in held["groups"] if g["params"]] for held in (expected, found)]
    assert groups[0] == groups[1]
    pairs = zip(expected["losses"], found["losses"], strict=True)
    assert max(abs(a - b) for a, b in pairs) < 1e-5


ROWS = [
    Run(weights, engine, 1 if engine == "one" else 2)
    for weights in ("full", "lora")
    for engine in ENGINES
]
# one cell of each row, which `-m engines` takes; each column and each engine is among them
CHOSEN = {
    "full": {
        "one": "size", "ddp": "zero3", "zero1": "size", "zero2": "fsdp", "zero3": "one",
        "fsdp": "same", "fsdp_full": "export",
    },
    "lora": {
        "one": "zero2", "ddp": "fsdp", "zero1": "fsdp_full", "zero2": "size", "zero3": "fsdp",
        "fsdp": "zero3", "fsdp_full": "ddp",
    },
}  # fmt: skip
DEFAULT = {("lora", "one")}  # of these the default run takes the chosen cell


def cells(*columns: str) -> list[Any]:
    """Rows and columns, of which all are run by hand, and some in CI."""
    found = []
    for run in ROWS:
        for column in columns:
            marks = [pytest.mark.matrix]
            if CHOSEN[run.weights][run.engine] == column:
                marks.append(pytest.mark.engines)
                marks += [pytest.mark.first] if (run.weights, run.engine) in DEFAULT else []
            if column != run.engine:
                name = f"{run.weights}-{run.engine}-{column}"
                found.append(pytest.param(run, column, marks=marks, id=name))
    return found


def by_hand(run: Run) -> Any:
    return pytest.param(run, marks=[pytest.mark.matrix], id=f"{run.weights}-{run.engine}")


def other_size(run: Run) -> Run:
    """The same training on another number of ranks: DDP is what one GPU grows to."""
    return run.on("ddp", 2) if run.engine == "one" else run.on(ranks=3)


@pytest.mark.parametrize(("run", "column"), cells("same", "size"))
def test_resharded(run: Run, column: str, finetuned: Trained, tmp_path: Path) -> None:
    source = finetuned(run)
    target, resumed = tmp_path / source.name, run if column == "same" else other_size(run)
    zckpt.reshard(source, target, **size_of(resumed), **names_of(run, source))
    assert_goes_on(resumed, target, source, tmp_path / "resumed")


@pytest.mark.parametrize(("run", "column"), cells(*ENGINES))
def test_moved_to_another_engine(run: Run, column: str, finetuned: Trained, tmp_path: Path) -> None:
    source = finetuned(run)
    target, resumed = tmp_path / source.name, run.on(column, 2)
    zckpt.convert(source, target, **to(resumed), **names_of(run, source))
    assert_goes_on(resumed, target, source, tmp_path / "resumed")


@pytest.mark.parametrize(("run", "column"), cells("export"))
def test_exported(run: Run, column: str, finetuned: Trained, tmp_path: Path) -> None:
    """FSDP's sharded directories have no configuration: they are refused, with the way out."""
    source, options = finetuned(run), {}
    if run.engine == "fsdp":
        with pytest.raises(errors.MissingData, match=r"has no .*config\.json") as raised:
            zckpt.export(source, tmp_path / "out")
        assert "--config" in raised.value.hint
        assert not (tmp_path / "out").exists()
        options = {"config": finetuned(run.on("one"))}
    zckpt.export(source, tmp_path / "out", **options)
    expected = {
        name.removesuffix("/weight"): tensor
        for name, tensor in oracle_of(source)["tensors"].items()
        if name.endswith("/weight")
    }
    assert_loads(run, tmp_path / "out", expected)


@pytest.mark.parametrize("run", [by_hand(replace(run, program="sft")) for run in ROWS])
def test_trl_at_another_size(run: Run, finetuned: Trained, tmp_path: Path) -> None:
    source = finetuned(run)
    target, resumed = tmp_path / source.name, other_size(run)
    zckpt.reshard(source, target, **size_of(resumed), **names_of(run, source))
    assert_goes_on(resumed, target, source, tmp_path / "resumed")


@pytest.mark.parametrize("run", [by_hand(replace(run, program="accelerate")) for run in ROWS])
def test_accelerate_on_another_engine(run: Run, finetuned: Trained, tmp_path: Path) -> None:
    source = finetuned(run)
    target = tmp_path / source.name
    resumed = run.on("fsdp" if run.engine.startswith("zero") else "zero2", 2)
    options = {**to(resumed), **names_of(run, source)}
    said = " ".join(texts(zckpt.convert(source, target, dry_run=True, **options)["warnings"]))
    if ties := re.findall(r"add --tie (\S+)=(\S+)", said):
        assert run.engine in NUMBERED  # save_pretrained's files, and no config.json beside
        options["tie"] = ties
    zckpt.convert(source, target, **options)
    assert_goes_on(resumed, target, source, tmp_path / "resumed")


def assert_loads(run: Run, folder: Path, expected: dict[str, torch.Tensor]) -> None:
    """from_pretrained finds every key, and no other, with the values that were trained."""
    import peft
    import transformers

    names = {path.name for path in folder.iterdir()}
    if run.weights == "full":
        assert names <= {"config.json", "generation_config.json", "model.safetensors"}
        model, about = transformers.AutoModelForCausalLM.from_pretrained(
            folder, output_loading_info=True
        )
        assert {key: value for key, value in about.items() if value} == {}
        held = dict(model.named_parameters())
    else:
        assert names == {"adapter_config.json", "adapter_model.safetensors"}
        config = transformers.LlamaConfig(
            vocab_size=31, hidden_size=16, intermediate_size=22, num_hidden_layers=12,
            num_attention_heads=2,
        )  # fmt: skip
        base = transformers.LlamaForCausalLM(config)
        model = peft.PeftModel.from_pretrained(base, folder)
        held = {name: each for name, each in model.named_parameters() if "lora_" in name}
    assert held.keys() == expected.keys()
    assert [name for name in expected if not same_bits(held[name].data, expected[name])] == []


# -- two models of one program, by Accelerate

PAIRS = [
    *(("fsdp", engine) for engine in ("fsdp", "fsdp_full", "ddp")),
    *(("fsdp_full", engine) for engine in ("fsdp_full", "fsdp")),
    *(("ddp", engine) for engine in ("ddp", "fsdp")),
]


def names_of_pair(run: Run, directory: Path) -> dict[str, Any]:
    """Names after those of their models, where the optimizers know parameters by number."""
    if run.engine not in NUMBERED:
        return {}
    groups = oracle_of(directory)["groups"]
    roots = zip(("model", "model_1"), groups, strict=True)
    return {"param_names": [f"{root}.{name}" for root, group in roots for name in group["params"]]}


@pytest.mark.engines
@pytest.mark.parametrize(("before", "after"), PAIRS)
def test_two_models(before: str, after: str, finetuned: Trained, tmp_path: Path) -> None:
    """Accelerate loads both models, each with its optimizer, on fewer and on more ranks."""
    run = Run("full", before, program="pair")
    source = finetuned(run)
    for ranks in (1, 3):
        then, target = run.on(after, ranks), tmp_path / f"on-{ranks}"
        names = names_of_pair(run, source)
        if before in NUMBERED and after not in NUMBERED:  # safetensors have a tied weight once
            tie = ("lm_head.weight", "model.embed_tokens.weight")
            names["tie"] = [(f"{r}.{tie[0]}", f"{r}.{tie[1]}") for r in ("model", "model_1")]
        if before == after:
            zckpt.reshard(source, target, **size_of(then), **names)
        else:
            zckpt.convert(source, target, **to(then), **names)
        report = zckpt.verify(target, source, param_names=names.get("param_names"))
        assert report["equal"], report
        assert_goes_on(then, target, source, tmp_path / str(ranks))


@pytest.mark.engines
@pytest.mark.parametrize("engine", ["fsdp", "fsdp_full"])
def test_the_second_of_two_models(engine: str, finetuned: Trained, tmp_path: Path) -> None:
    """A program of this model alone resumes, with its optimizer and with its scheduler."""
    run = Run("full", engine, program="pair")
    source = finetuned(run)
    alone = Run("full", engine, 3, program="second")
    zckpt.reshard(source, tmp_path / "t", root="model_1", **size_of(alone))
    found = finetunes.resume(alone, tmp_path / "t", tmp_path / "r")
    expected = oracle_of(source)
    own = {name for name in expected["tensors"] if name.startswith("1.")}
    assert own == found["tensors"].keys()
    assert all(same_bits(found["tensors"][name], expected["tensors"][name]) for name in own)
    pairs = zip(expected["losses"][1::2], found["losses"], strict=True)
    assert max(abs(a - b) for a, b in pairs) < 1e-5
