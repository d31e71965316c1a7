"""What an optimizer of a program's own may keep, and a reader or a writer could lose unseen."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import zckpt
from zckpt.errors import InconsistentCheckpoint, UnsupportedState

from ..conftest import Result, texts
from .test_lost_states import alike
from .test_odd_states import save, state_dicts

Zckpt = Callable[..., Result]
SHAPES = {"trunk.weight": (7, 5), "trunk.bias": (7,), "head.weight": (3, 7), "head.bias": (3,)}
PLAIN: list[dict[str, Any]] = [{"to": "universal"}, {"to": "dcp"}, {"to": "gathered"}]
WHOLE = {"to": "deepspeed", "dp": 2, "stage": 0, "dtype": "fp32"}
FLAT: list[dict[str, Any]] = [{"to": "deepspeed", "dp": 2, "stage": stage} for stage in (1, 2, 3)]


class Bounds:
    """An object of a class that nobody has installed."""

    def __init__(self) -> None:
        self.low = 0.1


def saved(
    root: Path,
    odd: Callable[[str], dict[str, Any]] = lambda _: {},
    group: dict[str, Any] | None = None,
    **more: Any,
) -> Path:
    """A run whose optimizer nothing names, with `odd` states, `group` in its groups, `more`."""
    path = save(root / "source", "gathered", odd)
    optim = torch.load(path / "optim.pt", weights_only=False)
    for each in optim["param_groups"]:
        each |= {"gamma": 2.0, **(group or {})}
    optim["state"] |= more
    torch.save(optim, path / "optim.pt")
    return path


def optimizer_of(path: Path) -> dict[str, Any]:
    """The optimizer of files that zckpt wrote, with the names of its parameters."""
    held: dict[str, Any] = torch.load(path / "optim.pt", weights_only=False)
    names = [name for group in held["param_groups"] for name in group.get("param_names", ())]
    states = {(names[key] if names else key): own for key, own in held["state"].items()}
    return {"state": states, "param_groups": held["param_groups"]}


def there_and_back(source: Path, root: Path, to: dict[str, Any]) -> dict[str, Any]:
    zckpt.convert(source, root / "there", **to)
    assert zckpt.verify(source, root / "there")["equal"]
    zckpt.convert(root / "there", root / "back", to="gathered")
    return optimizer_of(root / "back")


# -- a step that is none


@pytest.mark.parametrize("step", ["seven", [1, 2], float("nan"), torch.arange(2.0)])
@pytest.mark.parametrize("to", [*PLAIN, WHOLE, FLAT[1]], ids=lambda to: to["to"])
def test_what_is_called_a_step_and_is_none(tmp_path: Path, step: Any, to: dict[str, Any]) -> None:
    source = saved(tmp_path, lambda _: {"step": step})
    if to is FLAT[1] and not isinstance(step, float):
        with pytest.raises(UnsupportedState, match=r"optimizer's step of trunk\.weight") as ended:
            zckpt.convert(source, tmp_path / "there", **to)
        assert "--drop-state step" in str(ended.value.hint)
        return
    state = there_and_back(source, tmp_path, to)["state"]
    assert len(state) == 4
    assert all(repr(own["step"]) == repr(step) for own in state.values())


@pytest.mark.parametrize("to", [*PLAIN, FLAT[1]], ids=lambda to: to["to"])
def test_what_a_group_calls_a_step(tmp_path: Path, to: dict[str, Any]) -> None:
    source = saved(tmp_path, group={"step": "x"})
    assert [g["step"] for g in there_and_back(source, tmp_path, to)["param_groups"]] == ["x", "x"]


# -- keys, types, numbers


@pytest.mark.parametrize("to", [*PLAIN, WHOLE], ids=lambda to: to["to"])
def test_keys_that_are_numbers(tmp_path: Path, to: dict[str, Any]) -> None:
    source = saved(tmp_path, lambda name: {5: torch.ones(SHAPES[name]), 6: 3})
    for name, own in there_and_back(source, tmp_path, to)["state"].items():
        assert torch.equal(own[5], torch.ones(SHAPES[name]))
        assert own[6] == 3


@pytest.mark.parametrize("to", FLAT, ids=lambda to: str(to["stage"]))
def test_nan_equals_itself(tmp_path: Path, to: dict[str, Any]) -> None:
    """It is no estimate that differs between ranks."""
    nan = float("nan")
    source = saved(tmp_path, lambda _: {"best": nan, "loss": torch.tensor(nan)}, {"d": nan})
    held = there_and_back(source, tmp_path, to)
    assert all(repr(own["best"]) == "nan" for own in held["state"].values())
    assert all(repr(group["d"]) == "nan" for group in held["param_groups"])


@pytest.mark.parametrize("to", FLAT[1:], ids=lambda to: str(to["stage"]))
def test_states_keep_their_types_beside_wide_weights(tmp_path: Path, to: dict[str, Any]) -> None:
    """One flat buffer has one type: that of all, or a wider one. No number is rounded."""
    source = saved(
        tmp_path,
        lambda name: {
            "narrow": torch.full(SHAPES[name], 1 / 3, dtype=torch.bfloat16),
            "mixed": torch.full(
                SHAPES[name], 1 / 3, dtype=torch.float16 if "head" in name else torch.bfloat16
            ),
        },
    )
    before = torch.load(source / "optim.pt")["state"]
    for name, own in there_and_back(source, tmp_path, to)["state"].items():
        assert own["narrow"].dtype == torch.bfloat16
        assert alike(own["narrow"], before[name]["narrow"])
        assert own["mixed"].dtype == torch.float32
        assert alike(own["mixed"], before[name]["mixed"].float())


def test_integers_beside_floats_are_refused(tmp_path: Path) -> None:
    types = {"trunk": torch.int32, "head": torch.float32}
    source = saved(
        tmp_path,
        lambda name: {"count": torch.ones(SHAPES[name], dtype=types[name.partition(".")[0]])},
    )
    with pytest.raises(
        UnsupportedState, match="count has the types F32, I32 in one group"
    ) as ended:
        zckpt.convert(source, tmp_path / "run", **FLAT[1])
    assert "--drop-state count" in str(ended.value.hint)


# -- what belongs to no parameter


@pytest.mark.parametrize("to", [*PLAIN, WHOLE, FLAT[1]], ids=lambda to: to["to"])
def test_a_state_of_no_parameter(tmp_path: Path, to: dict[str, Any], zckpt: Zckpt) -> None:
    """torch's optimizers load what they find under other keys as it is."""
    import zckpt as library

    source = saved(tmp_path, shared={"scale": torch.ones(2)})
    with pytest.raises(UnsupportedState, match=r"the optimizer's shared of no parameter") as ended:
        library.convert(source, tmp_path / "run", **to)
    assert "--drop-state shared" in str(ended.value.hint)
    library.convert(source, tmp_path / "run", drop_state=["shared"], **to)
    assert not library.verify(source, tmp_path / "run")["equal"]
    assert library.verify(source, tmp_path / "run", drop_state=["shared"])["equal"]
    assert "not read: shared of no parameter" in zckpt("verify", source).out


@pytest.mark.parametrize("to", [*PLAIN, WHOLE, FLAT[1]], ids=lambda to: to["to"])
@pytest.mark.parametrize("place", ["beside", "in no group"])
def test_what_the_state_of_parameters_lacks(tmp_path: Path, to: dict[str, Any], place: str) -> None:
    """A key beside `state` and `param_groups`, and a number that no group contains."""
    sources = []
    for value in (0.0, 1.0):
        (tmp_path / str(value)).mkdir()
        source = saved(tmp_path / str(value))
        optim = torch.load(source / "optim.pt", weights_only=False)
        key, where = ("rho", optim) if place == "beside" else (99, optim["state"])
        where[key] = {"mean": torch.full((2,), value)}
        torch.save(optim, source / "optim.pt")
        sources.append(source)
    assert not zckpt.verify(sources[0], sources[1])["equal"]
    with pytest.raises(UnsupportedState, match=f"optimizer's {key} of no parameter"):
        zckpt.convert(sources[0], tmp_path / "run", **to)
    zckpt.convert(sources[0], tmp_path / "run", drop_state=[str(key)], **to)


@pytest.mark.parametrize("to", [WHOLE, *FLAT], ids=lambda to: str(to["stage"]))
def test_an_empty_group(tmp_path: Path, to: dict[str, Any]) -> None:
    """DeepSpeed drops it."""
    source = saved(tmp_path)
    optim = torch.load(source / "optim.pt", weights_only=False)
    optim["param_groups"].insert(0, {**optim["param_groups"][0], "params": [], "param_names": []})
    torch.save(optim, source / "optim.pt")
    zckpt.convert(source, tmp_path / "run", **to)
    groups = zckpt.read(tmp_path / "run").groups or ()
    assert len(groups) == len(optim["param_groups"]) - 1
    assert zckpt.verify(tmp_path / "run", source)["equal"]


@pytest.mark.parametrize("to", [*PLAIN[1:], WHOLE, FLAT[1]], ids=lambda to: to["to"])
@pytest.mark.parametrize("dry_run", [False, True])
def test_an_object_of_a_group(tmp_path: Path, to: dict[str, Any], dry_run: bool) -> None:
    source = saved(tmp_path, group={"bounds": Bounds()})
    name = f"{Bounds.__module__}.{Bounds.__qualname__}"
    with pytest.raises(
        UnsupportedState, match="cannot store bounds of the optimizer's groups"
    ) as e:
        zckpt.convert(source, tmp_path / "run", dry_run=dry_run, **to)
    assert f"--allow-object {name}" in str(e.value.hint)
    zckpt.convert(source, tmp_path / "weights", weights_only=True, **to)
    zckpt.convert(source, tmp_path / "run", allow_object=[name], **to)
    assert zckpt.verify(source, tmp_path / "run")["equal"]


@pytest.mark.parametrize("to", [*PLAIN, FLAT[1]], ids=lambda to: to["to"])
def test_a_hyper_parameter_of_one_side_is_named(tmp_path: Path, to: dict[str, Any]) -> None:
    source = saved(tmp_path)
    zckpt.convert(source, tmp_path / "run", **to)
    assert not named_groups(zckpt.verify(source, tmp_path / "run"))
    optim = torch.load(source / "optim.pt")
    for group in optim["param_groups"]:
        del group["gamma"]
        group["delta"] = 1
    torch.save(optim, source / "optim.pt")
    gamma, delta = sorted(named_groups(zckpt.verify(source, tmp_path / "run")), reverse=True)
    assert gamma.startswith("gamma of the optimizer's groups: only in ")
    assert delta == f"delta of the optimizer's groups: only in {source}"


def named_groups(report: dict[str, Any]) -> list[str]:
    return [line for line in texts(report["not_compared"]) if "optimizer's groups" in line]


def test_equal_states_are_no_copied_files(tmp_path: Path) -> None:
    """Two averages before the first step; a manifest states the checksum of each of its files."""
    numbers = torch.arange(35.0)
    source = saved(
        tmp_path,
        lambda name: {
            key: numbers[: prod(SHAPES[name])].reshape(SHAPES[name]) + 1
            for key in ("slow", "slower")
        },
    )
    there_and_back(source, tmp_path, PLAIN[0])
    assert zckpt.verify(tmp_path / "there")["equal"]


# -- in flat buffers


def changed_ranks(run: Path, change: Callable[[int, dict[str, Any]], None]) -> None:
    """Changes what each rank's file holds of the base optimizer."""
    import deepspeed  # noqa: F401  (its classes are in the pickle)

    for rank in (0, 1):
        (file,) = run.rglob(f"*zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        held = torch.load(file, weights_only=False)
        change(rank, held["optimizer_state_dict"]["base_optimizer_state"])
        torch.save(held, file)


@pytest.mark.parametrize("key", [5, "row"])
def test_what_is_no_part_of_a_flat_buffer(tmp_path: Path, key: Any) -> None:
    """A key that is a number, and a tensor of two dimensions: as they are, at the same size."""
    run = tmp_path / "run"
    zckpt.convert(saved(tmp_path), run, **FLAT[1])

    def change(rank: int, base: dict[str, Any]) -> None:
        for own in base["state"].values():
            own[key] = own["exp_avg"].reshape(1, -1)

    changed_ranks(run, change)
    for number, to in enumerate(({"to": "dcp"}, {"to": "deepspeed", "dp": 3})):
        with pytest.raises(UnsupportedState, match=f"the optimizer's {key} of trunk.weight, "):
            zckpt.convert(run, tmp_path / str(number), **to)
    zckpt.convert(run, tmp_path / "same", to="deepspeed", dp=2)
    assert zckpt.verify(run, tmp_path / "same")["equal"]

    def check(rank: int, base: dict[str, Any]) -> None:
        for own in base["state"].values():
            assert torch.equal(own[key], own["exp_avg"].reshape(1, -1))

    changed_ranks(tmp_path / "same", check)


def test_foreign_states_leave_an_optimizer_unnamed(tmp_path: Path) -> None:
    """A rank's state of its part of a flat buffer: nothing of Adam's is added to the groups."""
    run = tmp_path / "run"
    zckpt.convert(save(tmp_path / "source", "gathered", lambda _: {}), run, **FLAT[1])
    assert zckpt.read(run).optimizer == "AdamW"

    def change(rank: int, base: dict[str, Any]) -> None:
        for own in base["state"].values():
            own["m_norm_t"] = torch.ones(3)
        for group in base["param_groups"]:
            group.pop("amsgrad", None)

    changed_ranks(run, change)
    assert zckpt.read(run).optimizer is None
    zckpt.convert(run, tmp_path / "out", to="gathered", drop_state=["m_norm_t"])
    optimizer = torch.load(tmp_path / "out" / "optim.pt")
    ours, theirs = (
        {key: item for key, item in group.items() if key not in ("params", "param_names", "step")}
        for group in ((zckpt.read(run).groups or ())[0], optimizer["param_groups"][0])
    )
    assert ours == theirs


def test_tensors_of_groups_differ_between_ranks(tmp_path: Path) -> None:
    """The pickles of the files are equal: their tensors have other bytes."""
    run = tmp_path / "run"
    zckpt.convert(saved(tmp_path, group={"bounds": [torch.arange(3.0)]}), run, **FLAT[1])
    assert zckpt.verify(run)["equal"]

    def change(rank: int, base: dict[str, Any]) -> None:
        base["param_groups"][1]["bounds"][0] += rank

    changed_ranks(run, change)
    with pytest.raises(InconsistentCheckpoint, match="has other tensors in param_groups than"):
        zckpt.convert(run, tmp_path / "other", to="deepspeed", dp=3)


# -- keys that are numbers, as AggMo's, of which torch.distributed.checkpoint makes texts


def by_key(kind: type) -> Callable[[str], dict[str, Any]]:
    return lambda _: {"buffer": {kind(each): torch.full((2,), each) for each in (0.0, 0.9)}}


@pytest.mark.parametrize("to", [PLAIN[2], WHOLE], ids=lambda to: to["to"])
@pytest.mark.parametrize("kind", [float, str])
def test_keys_may_have_been_numbers(tmp_path: Path, kind: type, to: dict[str, Any]) -> None:
    source = save(tmp_path / "source", "dcp", by_key(kind))
    for other, name in ({"to": "dcp", "dp": 2}, "again"), ({"to": "universal"}, "universal"):
        zckpt.convert(source, tmp_path / name, **other)
        assert zckpt.verify(source, tmp_path / name)["equal"]
    zckpt.convert(tmp_path / "universal", tmp_path / "back", to="dcp")
    for number, path in enumerate((source, tmp_path / "universal")):
        with pytest.raises(UnsupportedState, match=r"buffer of trunk\.weight.*strings") as ended:
            zckpt.convert(path, tmp_path / f"{number}", **to)
        assert "--drop-state buffer (or" in str(ended.value.hint)
        zckpt.convert(path, tmp_path / f"{number}", **to, drop_state=["buffer"])


def test_keys_of_numbers_and_of_texts_differ(tmp_path: Path) -> None:
    numbers, texts = (save(tmp_path / k.__name__, "gathered", by_key(k)) for k in (float, str))
    assert not zckpt.verify(numbers, texts)["equal"]
    zckpt.convert(texts, tmp_path / "texts", to="universal")
    assert not zckpt.verify(numbers, tmp_path / "texts")["equal"]
    (tmp_path / "proof").write_text(json.dumps(zckpt.verify(texts)))
    for kind in (float, str):
        other = save(tmp_path / f"dcp of {kind.__name__}", "dcp", by_key(kind))
        zckpt.convert(tmp_path / kind.__name__, tmp_path / f"{kind.__name__}.dcp", to="dcp")
        for sharded in (other, tmp_path / f"{kind.__name__}.dcp"):
            for whole in (numbers, texts, tmp_path / "texts", tmp_path / "proof"):
                assert zckpt.verify(sharded, whole)["equal"]


@pytest.mark.parametrize("place", ["program", "optimizer"])
def test_other_keys_of_numbers_and_of_texts(tmp_path: Path, place: str) -> None:
    for kind in (float, str):
        own = {"own": {kind(0.5): 2, "1": [{kind(2.5): 1}]}}
        made = state_dicts(lambda _: {})
        for group in made["optim"]["param_groups"]:
            group |= own if place == "optimizer" else {}
        torch.save(made | (own if place == "program" else {}), tmp_path / f"{kind.__name__}.pt")
    paths = [tmp_path / "float.pt", tmp_path / "str.pt"]
    assert not zckpt.verify(*paths)["equal"]
    zckpt.convert(paths[0], tmp_path / "dcp", to="dcp")
    assert all(zckpt.verify(tmp_path / "dcp", path)["equal"] for path in paths)


def test_milestones_that_were_numbers(tmp_path: Path) -> None:
    """A scheduler of torch looks for them by number, and goes on without a word."""
    scheduler = {"milestones": {30: 1, 80: 1}, "last_epoch": 1}
    dcp.save(
        state_dicts(lambda _: {}) | {"scheduler": scheduler}, checkpoint_id=tmp_path / "source"
    )
    report = zckpt.convert(tmp_path / "source", tmp_path / "same", to="dcp")
    assert not any("milestones" in line for line in texts(report["warnings"]))
    report = zckpt.convert(tmp_path / "source", tmp_path / "whole", to="gathered")
    said = "the keys of lr_scheduler.milestones may have been numbers"
    assert any(said in line for line in texts(report["warnings"]))


# -- groups without parameters, which DeepSpeed removes


@pytest.mark.parametrize(
    "to", [WHOLE, *FLAT, {"to": "deepspeed-universal"}, {"to": "dcp", "dcp_layout": "flat"}]
)
def test_a_group_without_parameters(tmp_path: Path, to: dict[str, Any]) -> None:
    plain = saved(tmp_path)
    optim = torch.load(plain / "optim.pt", weights_only=False)
    first, second = optim["param_groups"]
    empty = {**first, "params": [], "lr": 7.0}
    source, other, less = (tmp_path / name for name in ("empty", "other", "less"))
    for path, groups in (
        (source, [first, empty, second]),
        (other, [first, empty, {**second, "lr": 9.0}]),
        (less, [first, second]),
    ):
        shutil.copytree(plain, path)
        torch.save({**optim, "param_groups": groups}, path / "optim.pt")
    zckpt.convert(source, tmp_path / "target", **to)
    for pair in ((source, tmp_path / "target"), (tmp_path / "target", source)):
        report = zckpt.verify(*pair)
        assert report["equal"], report["groups"]
        note = "hyper-parameters of the optimizer's group 1, which has no parameters: only in"
        assert f"{note} {source}" in texts(report["not_compared"])
    assert zckpt.verify(less, tmp_path / "target")["equal"]
    (line,) = zckpt.verify(other, tmp_path / "target")["groups"]
    assert (line["key"], line["a"]) == ("lr", 9.0)
    assert not zckpt.verify(source, less)["equal"]


# -- second names


@pytest.mark.parametrize("to", [*PLAIN, WHOLE, *FLAT, {"to": "deepspeed-universal"}])
def test_a_second_name_of_one_side(tmp_path: Path, to: dict[str, Any]) -> None:
    source, target = saved(tmp_path), tmp_path / "target"
    zckpt.convert(source, target, tie=[("tied.weight", "head.weight")], **to)
    for side, pair in (("b", (source, target)), ("a", (target, source))):
        report = zckpt.verify(*pair)
        assert report["states"] == [{"key": "names.'tied.weight'", "only": side}]
        assert not report["equal"]
    zckpt.convert(target, tmp_path / "back", to="dcp")
    assert zckpt.verify(tmp_path / "back", target)["equal"]


def test_a_second_name_beside_files_without_any(tmp_path: Path) -> None:
    """Accelerate's and transformers' safetensors have each tied weight once."""
    source, target = saved(tmp_path), tmp_path / "target"
    zckpt.convert(source, target, to="gathered", dialect="safetensors")
    zckpt.convert(source, tmp_path / "tied", to="dcp", tie=[("tied.weight", "head.weight")])
    report = zckpt.verify(tmp_path / "tied", target)
    assert report["equal"]
    assert any(
        line.startswith("names.'tied.weight': only") for line in texts(report["not_compared"])
    )
