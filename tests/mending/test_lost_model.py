"""A lost model file of stage 1 or 2 has the original's weights again, and the engine goes on."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import zckpt as package
from zckpt.core.checkpoint.mended import MENDED
from zckpt.errors import CorruptCheckpoint, IncompleteCheckpoint, WrongOption, ZckptError

from ..conftest import EXAMPLE, ROOT, Once, Result
from ..engines.cases import STATIC_SCALE, WARMUP, Case
from .damaging import flip, put
from .test_losses import remove, told

MODEL = "mp_rank_00_model_states.pt"
SKIPPING = {"fp16": {"initial_scale_power": 18, "hysteresis": 1, "loss_scale_window": 1}}
FIRST = Case("z2_dp3_lost_model", "mending", 2, 3, model="steady", steps=4, config=WARMUP)
CASES = [
    replace(FIRST, name="z1_dp3_lost_model", stage=1, scheduler=True, config={}),
    replace(FIRST, name="z2_dp2_lost_model_fp16", dp=2, dtype="fp16", config=SKIPPING, steps=9),
    replace(
        FIRST, name="z1_dp2_lost_model_static", stage=1, dp=2, dtype="fp16", config=STATIC_SCALE
    ),
    replace(FIRST, name="z2_dp3_lost_model_fp32", dtype="fp32", scheduler=True, config={}),
    replace(
        FIRST,
        name="z2_dp3_lost_model_dealt",
        config={"zero_optimization": {"round_robin_gradients": True}},
    ),
]
MORE = 5  # steps between the two saves


def values(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Every number, text and tensor in a nested value, by its path."""
    if isinstance(value, dict | list | tuple):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        for key, each in pairs:
            yield from values(each, f"{name}.{key}")
    elif isinstance(value, torch.Tensor):
        yield name, (value.dtype, tuple(value.shape), value.contiguous().view(-1).tolist())
    else:
        yield name, repr(value)


def loaded(path: Path) -> dict[str, Any]:
    (file,) = path.rglob(MODEL)
    model: dict[str, Any] = torch.load(file, weights_only=False)
    return model


@pytest.mark.parametrize(
    "case",
    [pytest.param(each, marks=pytest.mark.engines, id=each.name) for each in CASES]
    + [pytest.param(FIRST, id=FIRST.name)],
)
def test_the_engine_goes_on(case: Case, once: Once, tmp_path: Path) -> None:
    """Weights, masters, moments, counters, the scheduler and the next losses: all are the same."""
    from ..engines import deepspeed

    older = once("engine", case.name, lambda root: deepspeed.train(case, root, losses=0))
    whole = tmp_path / "whole"
    deepspeed.save_again(case, older, whole, MORE)
    run = shutil.copytree(whole, tmp_path / "run")
    remove(run, MODEL)
    package.mend(run, tmp_path / "mended", older=older, rebuild=("model",))
    assert package.verify(tmp_path / "mended", whole)["equal"]
    assert dict(values(loaded(tmp_path / "mended"))) == dict(values(loaded(whole)))
    assert dict(values(loaded(older)["module"])) != dict(values(loaded(whole)["module"]))
    listed = json.loads(next((tmp_path / "mended").rglob(MENDED)).read_text())["mended"]
    of_masters = {each["by"] for each in listed if "masters" in each["witness"]}
    is_dealt = "zero_optimization" in case.config  # to ranks, in an order that no file states
    assert of_masters == {"made-up" if is_dealt else "witness"}
    if case.config == SKIPPING:
        assert loaded(whole)["skipped_steps"] > loaded(older)["skipped_steps"] > 0
    before, after = (
        deepspeed.resume(case, path, tmp_path / path.name, losses=3)
        for path in (whole, tmp_path / "mended")
    )
    assert before["counters"]["global_steps"] == case.steps + MORE
    assert dict(values(after)) == dict(values(before))


# -- without an engine


TAG = "global_step4"


def changed(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    value = torch.load(path, weights_only=False)
    change(value)
    torch.save(value, path)


@pytest.fixture
def older(tmp_path: Path) -> Path:
    """The example as it might have been after four of its seven updates."""
    run = shutil.copytree(EXAMPLE, tmp_path / "older")
    (run / "global_step7").rename(run / TAG)
    (run / "latest").write_text(TAG)

    def model(value: dict[str, Any]) -> None:
        for name, tensor in value["module"].items():
            if not name.startswith(("frozen", "head")):  # the head is the embedding
                tensor *= 2
        value |= {"global_steps": 4, "global_samples": 96, "lr_scheduler": {COUNTER: 3}}
        value |= {"epoch": 2, "rng": torch.arange(5)}

    def optimizer(value: dict[str, Any]) -> None:
        for flat in value["optimizer_state_dict"]["single_partition_of_fp32_groups"]:
            flat.data *= 2
        for state in value["optimizer_state_dict"]["base_optimizer_state"]["state"].values():
            state["step"] -= 3

    changed(run / TAG / MODEL, model)
    for path in run.rglob("*optim_states.pt"):
        changed(path, optimizer)
    return run


COUNTER = "last_batch_iteration"


@pytest.fixture
def run(example: Path) -> Path:
    """The example without its model file."""
    remove(example, MODEL)
    return example


def lines(report: dict[str, Any]) -> dict[str, str]:
    """By value that is in no tensor, what the report says of it."""
    return {each["subject"]: each["message"] for each in report["lost"] if not each["tensors"]}


@pytest.mark.parametrize("left", [None, 0, 3000, "zeros", "garbage"])
def test_the_values(left: Any, run: Path, older: Path, tmp_path: Path) -> None:
    """Everything but the buffer and the program's own state is the original's."""
    if left is not None:
        data = (EXAMPLE / "global_step7" / MODEL).read_bytes()
        if left == "garbage":  # in the pickle
            data = data[:300] + bytes(range(1, 201)) + data[500:]
        else:
            data = bytes(len(data)) if left == "zeros" else data[:left]
        (run / "global_step7" / MODEL).write_bytes(data)
    report = package.mend(run, tmp_path / "mended", older=older, rebuild=("model",))
    whole, mended, before = map(loaded, (EXAMPLE, tmp_path / "mended", older))
    expected = dict(values(whole)) | {".epoch": "2"}
    for name, value in values(before):
        if name.startswith(".rng") or name == ".module.running_mean":
            expected[name] = value
    assert dict(values(mended)) == expected
    assert mended[COUNTERS[0]] == 7
    listed = json.loads(next((tmp_path / "mended").rglob(MENDED)).read_text())["mended"]
    by = {each["tensor"] or each["value"]: each["by"] for each in listed}
    exact = {name for name in by if by[name] == "witness"}
    assert {*told(report)} == exact | {"running_mean/param", "client_state.rng/state"}
    assert {name for name in by if by[name] == "made-up"} == {
        *("running_mean/param", "client_state.epoch", "client_state.rng/state"),
        *COUNTERS,
        f"lr_scheduler.{COUNTER}",
    }
    after = {each["value"]: each["after"] for each in listed}
    assert [after[key] for key in COUNTERS] == [7, 0, 168]
    assert {line["state"] for line in report["lost"]} == {"elsewhere", "rebuilt"}
    (made, restored) = package.verify(tmp_path / "mended")["warnings"]
    assert "made up" in restored["message"] + made["message"]
    package.convert(tmp_path / "mended", tmp_path / "universal")
    said = [each["message"] for each in package.verify(tmp_path / "universal")["warnings"]]
    assert any(
        "made up" in each and "running_mean/param, client_state.rng/state, global_steps" in each
        for each in said
    )


COUNTERS = ("global_steps", "skipped_steps", "global_samples")


def test_before_it_is_typed(
    run: Path, older: Path, tmp_path: Path, zckpt: Callable[..., Result]
) -> None:
    """Without --older the error says what it would give, and so does verify; nothing is written."""
    alone = zckpt("mend", run, tmp_path / "mended")
    assert alone.code == 1
    assert "an older checkpoint of the run (--older PATH) shows the names and shapes" in alone.err
    asked = zckpt("mend", run, tmp_path / "mended", "--older", older)
    assert asked.code == 1
    assert "`--rebuild model` writes made-up values in place of the lost ones" in asked.err
    words = ("mend", run, tmp_path / "mended", "--older", older, "--rebuild", "model")
    shown = zckpt(*words, "--dry-run")
    assert shown.code == 3
    assert "other files have the masters, which round to these weights" in shown.out
    assert (
        "is made up: other values take its place (--rebuild):\n  weights of running_mean: 19 of 19"
        in shown.out
    )
    said = "4 in the older checkpoint, and 3 steps since then, as the tag global_step7 says"
    assert f"global_steps 7, in {MODEL}: {said}" in shown.out
    assert "client_state.epoch 2, in" in shown.out
    assert not (tmp_path / "mended").exists()
    ended = zckpt(*words)
    assert ended.code == 0
    assert shown.out in ended.out
    said = "made up (--rebuild): values in 2 tensors and 5 other values, in place of lost ones"
    assert said in ended.out
    last = ended.out.splitlines()[-1]
    names = "running_mean/param, client_state.rng/state, global_steps, skipped_steps and 3 more"
    assert last.endswith(f"in place of lost ones: {names}")


def test_verify_names_it(run: Path, older: Path, zckpt: Callable[..., Result]) -> None:
    """With a checkpoint of the run, if one is whole."""
    shown = zckpt("verify", run)
    assert shown.code == 3
    assert f": zckpt mend {run} DST --older PATH --rebuild model\n" in shown.out
    shutil.copytree(older / TAG, run / TAG)
    other = run / TAG
    assert f"DST --older {other} --rebuild model\n" in zckpt("verify", run).out
    document = zckpt("report", run, "--json").document
    commands = [each["command"] for each in document["next"]["do"]]
    assert any(command and command.endswith("--rebuild model") for command in commands)


@pytest.mark.parametrize("older", [None, "whole"])
def test_of_another_format(older: str | None, tmp_path: Path, zckpt: Callable[..., Result]) -> None:
    """Nothing is offered for the model file of a universal checkpoint, or of Megatron."""
    for name in ("universal", "megatron-0.16.1-legacy-tp2"):
        whole = tmp_path / f"whole-{name}"
        if name == "universal":
            package.convert(EXAMPLE, whole)
            lost = [whole / "model.safetensors"]
        else:
            shutil.copytree(ROOT / "tests/data" / name, whole)
            lost = [*whole.rglob("model_optim_rng.pt")]
        run = shutil.copytree(whole, tmp_path / name)
        for path in lost:
            (run / path.relative_to(whole)).unlink()
        words = ("--older", whole) if older else ()
        refused = zckpt("mend", run, tmp_path / "mended", *words)
        assert refused.code == 1
        assert "--rebuild" not in refused.out + refused.err
        assert "--rebuild model" not in zckpt("verify", run).out
    assert not (tmp_path / "mended").exists()


def test_without_an_older_one(run: Path, tmp_path: Path) -> None:
    with pytest.raises(WrongOption, match="--rebuild model needs an older checkpoint"):
        package.mend(run, tmp_path / "mended", rebuild=("model",))


def renamed(value: dict[str, Any]) -> None:
    for key in ("module", "param_shapes"):
        own = value[key] if isinstance(value[key], list) else [value[key]]
        new = [{name.replace("fc1", "fc9"): each for name, each in one.items()} for one in own]
        value[key] = new if isinstance(value[key], list) else new[0]


def reordered(value: dict[str, Any]) -> None:
    value["param_shapes"] = [dict(reversed(own.items())) for own in value["param_shapes"]]


def in_fp16(value: dict[str, Any]) -> None:
    value["ds_config"] = {**value["ds_config"], "bf16": {"enabled": False}}


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (renamed, "has other parameters than the optimizer's files: fc"),
        (reordered, "has the parameters in another order"),
        (in_fp16, "has another 'bf16' in ds_config"),
    ],
)
def test_an_older_one_of_another_run(
    change: Callable[[dict[str, Any]], None], why: str, run: Path, older: Path, tmp_path: Path
) -> None:
    """Weights of the same sizes would get each other's values."""
    changed(older / TAG / MODEL, change)
    refused(run, older, tmp_path, why)


def refused(run: Path, older: Path, tmp_path: Path, why: str) -> None:
    words = {"older": older, "rebuild": ("model",)}
    with pytest.raises(ZckptError) as caught:
        package.mend(run, tmp_path / "mended", **words)
    assert why in caught.value.message
    report = package.mend(run, tmp_path / "mended", **words, dry_run=True)
    assert {line["file"] for line in report["problems"]} > {str(run / TAGS[run.name] / MODEL)}
    assert any(why in line["message"] for line in report["problems"])
    assert not report["lost"]
    assert not (tmp_path / "mended").exists()


TAGS = {"run": "global_step7", "older": TAG}


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("deepspeed-0.9.3-z2_dp3_fused_adam/run", "of another number of ranks"),
        ("zckpt-0.1-z3_dp3", "has no model file of this name"),
        ("fsdp2-2.13.0-w2", "has no model file of this name"),
    ],
)
def test_an_older_one_of_another_kind(source: str, why: str, run: Path, tmp_path: Path) -> None:
    refused(run, ROOT / "tests/data" / source, tmp_path, why)


def test_an_older_one_with_averaged_weights(run: Path, older: Path, tmp_path: Path) -> None:
    """The program saves other weights than it trains: the masters do not show those of the run."""
    changed(older / TAG / MODEL, lambda own: own["module"]["fc1.bias"].add_(1))
    refused(run, older, tmp_path, "has other weights than its masters")


def test_a_later_one(older: Path, tmp_path: Path) -> None:
    later = shutil.copytree(EXAMPLE, tmp_path / "later")
    remove(older, MODEL)
    refused(older, later, tmp_path, "is of 7 updates, and the damaged one of 4")


@pytest.mark.parametrize("name", ["frozen.weight", "running_mean"])
def test_a_damaged_older_one(name: str, run: Path, older: Path, tmp_path: Path) -> None:
    (fragment,) = package.read(older).entries[name, "param"].fragments
    flip(older / TAG / MODEL, fragment.extent.offset + 1, 3)
    with pytest.raises(CorruptCheckpoint, match="do not have the CRC-32"):
        package.mend(run, tmp_path / "mended", older=older, rebuild=("model",))
    assert not (tmp_path / "mended").exists()


def test_without_a_list_of_slices(
    run: Path, older: Path, tmp_path: Path, zckpt: Callable[..., Result]
) -> None:
    """Files of old versions do not state the order of the masters: the weights are not certain."""
    for folder in (run, older):
        for path in folder.rglob("*optim_states.pt"):
            changed(path, lambda own: own["optimizer_state_dict"].pop("param_slice_mappings"))
    package.mend(run, tmp_path / "mended", older=older, rebuild=("model",))
    listed = json.loads(next((tmp_path / "mended").rglob(MENDED)).read_text())["mended"]
    weights = [each for each in listed if (each["tensor"] or "").endswith(("weight/param", "bias"))]
    made_up = {each["tensor"] for each in weights if each["by"] == "made-up"}
    assert {"fc1.weight/param", "fc2.weight/param"} <= made_up
    assert {each["witness"] for each in weights if each["tensor"] in made_up} == {
        "other files have the masters, which round to these weights if the parameters have the "
        "same order as in the older file"
    }
    shown = zckpt("mend", run, tmp_path / "other", "--older", older, "--dry-run")
    assert "would take its place:\n  weights of " in shown.out
    assert not (tmp_path / "other").exists()


def test_beside_a_flipped_bit(run: Path, older: Path, tmp_path: Path) -> None:
    """A weight would be made of a wrong master, and agree with it."""
    path = run / "global_step7" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    flip(path, 9000, 3)
    with pytest.raises(CorruptCheckpoint, match="cannot be mended"):
        package.mend(run, tmp_path / "mended", older=older, rebuild=("model",))
    assert not (tmp_path / "mended").exists()


def test_beside_a_lost_optimizer_file(run: Path, older: Path, tmp_path: Path) -> None:
    """No other file has that rank's part of the weights."""
    remove(run, "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt")
    both = ("model", "masters", "moments=zero")
    with pytest.raises(IncompleteCheckpoint) as caught:
        package.mend(run, tmp_path / "mended", older=older, rebuild=both)
    assert "is lost for good" in caught.value.hint
    assert not (tmp_path / "mended").exists()


def test_what_is_not_certain_stays(run: Path, older: Path, tmp_path: Path) -> None:
    """Without the engine's tag nothing states its steps; another scheduler's state may be more."""
    (run / "global_step7").rename(run / "best")
    (run / "latest").write_text("best")
    changed(older / TAG / MODEL, lambda own: own["lr_scheduler"].update(best=0.5))
    report = package.mend(run, tmp_path / "mended", older=older, rebuild=("model",))
    mended = loaded(tmp_path / "mended")
    assert [mended[key] for key in COUNTERS] == [4, 0, 96]
    assert mended["lr_scheduler"] == {COUNTER: 3, "best": 0.5}
    said = lines(report)
    for name in (*COUNTERS, "lr_scheduler", "client_state.epoch"):
        assert said[name].endswith(
            "as in the older checkpoint, since nothing shows how the value has changed"
        )


@pytest.mark.parametrize(("tag", "counters"), [("best", [8, 1, 192]), (None, [4, 0, 96])])
def test_a_loss_scaler_counts(
    tag: str | None, counters: list[int], run: Path, older: Path, tmp_path: Path
) -> None:
    """Four steps, of which three were updates; a tag that says three steps contradicts that."""
    from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

    for folder, count in ((run, 9), (older, 5)):
        scaler = DynamicLossScaler(2.0**16, 1000, 1, 1, False)
        scaler.cur_iter = count
        new = {"loss_scaler": scaler, "dynamic_loss_scale": True}
        for path in folder.rglob("*optim_states.pt"):
            changed(path, lambda own, new=new: own["optimizer_state_dict"].update(new))
    if tag is not None:
        (run / "global_step7").rename(run / tag)
        (run / "latest").write_text(tag)
    package.mend(run, tmp_path / "mended", older=older, rebuild=("model",))
    mended = loaded(tmp_path / "mended")
    assert [mended[key] for key in COUNTERS] == counters
    assert mended["lr_scheduler"] == {COUNTER: 6}


def test_another_batch(run: Path, older: Path, tmp_path: Path) -> None:
    """The optimizer's files have the ds_config of the lost save, not how many samples it had."""

    def batch(value: dict[str, Any]) -> None:
        value["ds_config"] = {**value["ds_config"], "train_micro_batch_size_per_gpu": 3}

    changed(older / TAG / MODEL, batch)
    package.mend(run, tmp_path / "mended", older=older, rebuild=("model",))
    mended = loaded(tmp_path / "mended")
    assert [mended[key] for key in COUNTERS] == [7, 0, 96]
    assert mended["ds_config"] == loaded(EXAMPLE)["ds_config"]


def test_nothing_is_lost(example: Path, older: Path, tmp_path: Path) -> None:
    words = {"older": older, "rebuild": ("model",), "dry_run": True}
    report = package.mend(example, tmp_path / "mended", **words)
    assert [line["subject"] for line in report["warnings"]] == ["--rebuild"]


# -- damaged weights whose masters are whole


@pytest.mark.parametrize(("name", "length"), [("fc1.weight", 600), ("fc2.bias", 30)])
def test_a_damaged_weight(name: str, length: int, example: Path, tmp_path: Path) -> None:
    """The rounded masters have the checksum that the file states."""
    (fragment,) = package.read(example).entries[name, "param"].fragments
    put(
        example / "global_step7" / MODEL,
        fragment.extent.offset + 4,
        bytes(range(1, 31)) * (length // 30),
    )
    report = package.mend(example, tmp_path / "mended")
    (place,) = report["places"]
    assert (place["state"], place["by"]) == ("restored", "witness")
    assert place["witness"] == "the rounded masters"
    same = tmp_path / "mended" / "global_step7" / MODEL
    assert same.read_bytes() == (EXAMPLE / "global_step7" / MODEL).read_bytes()


def test_a_damaged_buffer(example: Path, tmp_path: Path) -> None:
    """It has no master."""
    (fragment,) = package.read(example).entries["running_mean", "param"].fragments
    put(example / "global_step7" / MODEL, fragment.extent.offset + 4, b"\1\2\3\4\5\6\7\7\7")
    with pytest.raises(CorruptCheckpoint, match="cannot be mended"):
        package.mend(example, tmp_path / "mended")


def test_a_damaged_weight_with_another_master(example: Path, tmp_path: Path) -> None:
    """An optimizer's file of another save: its masters do not give the checksum."""
    manifest = package.read(example)
    (fragment,) = manifest.entries["fc2.bias", "param"].fragments
    put(example / "global_step7" / MODEL, fragment.extent.offset + 4, b"\1\2\3\4\5\6\7\7\7")

    def other(value: dict[str, Any]) -> None:
        for flat in value["optimizer_state_dict"]["single_partition_of_fp32_groups"]:
            flat.data += 1

    for path in example.rglob("*optim_states.pt"):
        changed(path, other)
    with pytest.raises(CorruptCheckpoint, match="cannot be mended"):
        package.mend(example, tmp_path / "mended")
    assert not (tmp_path / "mended").exists()


def test_a_lost_layer(tmp_path: Path) -> None:
    """Of a pipeline, on one of two tensor ranks: it has weights alone, whose masters are whole."""
    whole = ROOT / "tests/data/zckpt-0.1-pp2_tp2/run"
    run = shutil.copytree(whole, tmp_path / "run")
    name = "layer_06-model_00-model_states.pt"
    remove(run, name)
    report = package.mend(run, tmp_path / "mended")
    assert {line["state"] for line in report["lost"]} == {"elsewhere"}
    before, after = (
        torch.load(next(path.rglob(name)), weights_only=False)
        for path in (whole, tmp_path / "mended")
    )
    assert dict(values(after)) == dict(values(before))
    listed = json.loads(next((tmp_path / "mended").rglob(MENDED)).read_text())["mended"]
    assert {each["by"] for each in listed} == {"witness"}
