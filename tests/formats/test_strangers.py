"""What an optimizer's state dict has beside the states of its parameters: kept, or ends the run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

import zckpt
from zckpt.core.checkpoint.optimizer_states import Form, States
from zckpt.errors import MissingData, UnsupportedState, ZckptError
from zckpt.proof import unsupported, values

from ..conftest import ROOT, Result, texts
from ..engines import deepspeed
from ..engines.cases import Case
from .test_own_states import FLAT, PLAIN, WHOLE, saved

Zckpt = Callable[..., Result]
HALF = {**WHOLE, "dtype": "bf16"}
RUNS: dict[str, dict[str, Any]] = {
    "stage 0 in fp32": WHOLE,
    "stage 0 in bf16": HALF,
    **{f"stage {to['stage']}": to for to in FLAT},
}
"""DeepSpeed's kinds of files."""


def run_of(root: Path, kind: str, value: Any = None, place: str = "base") -> Path:
    """A run of DeepSpeed whose optimizer files have a `value` in a place, on every rank."""
    run = root / "run"
    if not run.exists():
        zckpt.convert(saved(root), run, **RUNS[kind])
    if value is None:
        return run
    return changed(run, root / "strange", lambda own: own[place].update({key_of(place): value}))


def key_of(place: str) -> Any:
    return 99 if place == "state" else "rho"


def changed(run: Path, copy: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of a run with changed dictionaries: the engine's, the base optimizer's, its state.

    And that of a file that is the optimizer's own.
    """
    import deepspeed  # noqa: F401  (its classes are in the pickle)

    shutil.copytree(run, copy)
    ranks = sorted(copy.rglob("*optim_states.pt"))
    for file in ranks or [*copy.rglob("mp_rank_00_model_states.pt")]:
        held = torch.load(file, weights_only=False)
        outer = held["optimizer_state_dict" if ranks else "optimizer"]
        keys = ("base_optimizer_state", "optimizer_state_dict")
        base = next((outer[key] for key in keys if key in outer), outer)
        change({"outer": outer, "base": base, "state": base["state"], "file": held})
        torch.save(held, file)
    return copy


# -- in DeepSpeed's files


@pytest.mark.parametrize("kind", RUNS)
@pytest.mark.parametrize("place", ["outer", "base", "state"])
def test_a_state_of_no_parameter(kind: str, place: str, tmp_path: Path) -> None:
    run = run_of(tmp_path, kind, {"mean": torch.ones(2)}, place)
    key = str(key_of(place))
    (item,) = zckpt.read(run).states.of_form("unsupported")
    assert item.key == key
    assert not zckpt.verify(run, tmp_path / "run")["equal"]
    for to in (PLAIN[0], RUNS[kind]):
        with pytest.raises(UnsupportedState, match=f"optimizer's {key} of no parameter") as ended:
            zckpt.convert(run, tmp_path / "new", **to)
        assert f"--drop-state {key}" in str(ended.value.hint)
    zckpt.convert(run, tmp_path / "new", drop_state=[key], **RUNS[kind])
    assert not zckpt.verify(run, tmp_path / "new")["equal"]
    assert zckpt.verify(run, tmp_path / "new", drop_state=[key])["equal"]


@pytest.mark.parametrize("kind", RUNS)
@pytest.mark.parametrize("place", ["outer", "base", "state"])
def test_a_number_is_kept(kind: str, place: str, tmp_path: Path) -> None:
    run = run_of(tmp_path, kind)
    run = changed(run, tmp_path / "strange", lambda own: own[place].update(rho=3))
    assert not zckpt.verify(run, tmp_path / "run")["equal"]
    where: Form = "among" if place == "state" else "beside"
    for to in (*PLAIN, RUNS[kind]):
        report = zckpt.convert(run, tmp_path / "new", **to)
        assert not any("rho" in line for line in texts(report["left_out"]))
        report = zckpt.verify(run, tmp_path / "new")
        assert report["equal"], report["states"]
        assert zckpt.read(tmp_path / "new").states.numbers(where) == {"rho": 3}
        shutil.rmtree(tmp_path / "new")


@pytest.mark.parametrize("kind", RUNS)
@pytest.mark.parametrize("value", [{}, [], 0.5])
def test_an_equal_value_under_a_number_is_only_compared(
    kind: str, value: Any, tmp_path: Path
) -> None:
    """It could be the state of a parameter that the files do not name."""
    run = run_of(tmp_path, kind, value, "state")
    (item,) = zckpt.read(run).states.of_form("unsupported")
    assert item.key == "99"
    assert zckpt.verify(run, shutil.copytree(run, tmp_path / "copy"))["equal"]
    assert not zckpt.verify(run, tmp_path / "run")["equal"]


@pytest.mark.parametrize("kind", ["stage 1", "stage 3"])
def test_numbers_that_the_universal_loader_does_not_take(kind: str, tmp_path: Path) -> None:
    """DeepSpeed's takes groups and states alone of its universal directory."""
    run = run_of(tmp_path, kind)

    def counted(own: dict[str, Any]) -> None:
        own["base"]["rho"] = own["state"]["n"] = 3

    run = changed(run, tmp_path / "strange", counted)
    report = zckpt.convert(run, tmp_path / "new", to="deepspeed-universal")
    assert "rho, state.n: numbers of the optimizer that belong to no parameter" in texts(
        report["left_out"]
    )
    (file,) = (tmp_path / "new").rglob("optimizer_state.pt")
    held = torch.load(file, weights_only=False)
    assert "rho" not in {*held, *held.get("optimizer_state_dict", ())}
    assert "n" not in held.get("optimizer_state_dict", {}).get("state", {})
    report = zckpt.verify(tmp_path / "new", run)
    (line,) = [line for line in texts(report["not_compared"]) if "rho" in line]
    assert "optimizer.beside.rho" in line
    assert "optimizer.among.n" in line


# -- in the optimizer's `state`, or beside it


def with_numbers(root: Path, name: str, among: Any = None, beside: Any = None) -> Path:
    """State dicts in one file; the optimizer has `n` in its `state`, or beside it."""
    own = root / f"of {name}"
    own.mkdir()
    source = saved(own)
    model, optim = (torch.load(source / file) for file in ("model.pt", "optim.pt"))
    optim["state"] |= {} if among is None else {"n": among}
    optim |= {} if beside is None else {"n": beside}
    torch.save({"model": model, "optimizer": optim}, root / f"{name}.pt")
    return root / f"{name}.pt"


@pytest.mark.parametrize("value", [3, 0.5, "warm", True, []])
@pytest.mark.parametrize(
    "to", [*PLAIN, WHOLE, *FLAT], ids=lambda to: f"{to['to']}{to.get('stage')}"
)
def test_a_number_stays_where_it_is(value: Any, to: dict[str, Any], tmp_path: Path) -> None:
    source = with_numbers(tmp_path, "source", value, 7)
    zckpt.convert(source, tmp_path / "there", **to)
    assert zckpt.verify(source, tmp_path / "there")["equal"]
    zckpt.convert(tmp_path / "there", tmp_path / "back", to="gathered")
    (file,) = [*(tmp_path / "back").glob("optim*.pt")] or (tmp_path / "back").iterdir()
    held = torch.load(file)
    optimizer = held.get("optimizer", held)
    assert (optimizer["state"]["n"], optimizer["n"]) == (value, 7)


def test_torch_loads_a_number_where_it_saved_it(tmp_path: Path) -> None:
    source = with_numbers(tmp_path, "source", 3)
    zckpt.convert(source, tmp_path / "dcp", to="dcp", dp=3)
    tree: dict[str, Any] = {"optimizer": {"state": {"n": 0}}}
    torch.distributed.checkpoint.load(tree, checkpoint_id=tmp_path / "dcp")
    assert tree["optimizer"]["state"]["n"] == 3


@pytest.mark.parametrize(
    ("one", "other"), [((4, 3), (9, 3)), ((4, 3), (4, 5)), ((3, None), (None, 3))]
)
def test_numbers_are_compared_by_their_places(
    one: tuple[Any, Any], other: tuple[Any, Any], tmp_path: Path
) -> None:
    a, b = (with_numbers(tmp_path, name, *n) for name, n in (("a", one), ("b", other)))
    for to in (PLAIN[2], PLAIN[1], WHOLE, FLAT[1]):
        zckpt.convert(a, tmp_path / "new", **to)
        assert zckpt.verify(tmp_path / "new", a)["equal"]
        assert not zckpt.verify(tmp_path / "new", b)["equal"]
        shutil.rmtree(tmp_path / "new")


def test_a_layout_without_a_place_in_the_state(tmp_path: Path) -> None:
    source = with_numbers(tmp_path, "source", 3)
    report = zckpt.convert(source, tmp_path / "new", to="dcp", dcp_layout="flat")
    assert "state.n: numbers of the optimizer that belong to no parameter" in texts(
        report["left_out"]
    )


@pytest.mark.engines
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_the_engine_goes_on_counting(stage: int, tmp_path: Path) -> None:
    case = Case(f"z{stage}_dp2_counted", "counted", stage, 2, optimizer="counted")
    source = deepspeed.train(case, tmp_path / "trained")
    own = deepspeed.resume(case, source, tmp_path / "own")
    zckpt.convert(source, tmp_path / "new", to="universal")
    zckpt.reshard(tmp_path / "new", tmp_path / "run", dp=2)
    after = deepspeed.resume(case, tmp_path / "run", tmp_path / "resumed")
    assert after["losses"] == own["losses"]


def test_a_number_under_the_name_of_a_parameter(tmp_path: Path) -> None:
    source = saved(tmp_path)
    optim = numbered(source)
    optim["state"]["trunk.bias"] = 3
    torch.save(optim, source / "optim.pt")
    zckpt.convert(source, tmp_path / "gathered", to="gathered")
    assert zckpt.verify(source, tmp_path / "gathered")["equal"]
    report = zckpt.convert(source, tmp_path / "dcp", to="dcp")
    assert "state.trunk.bias: numbers of the optimizer that belong to no parameter" in texts(
        report["left_out"]
    )
    assert not zckpt.verify(source, tmp_path / "dcp")["equal"]


# -- in the optimizer's `state`, and no dictionary


def numbered(source: Path) -> dict[str, Any]:
    """The optimizer's state dict as torch itself saves it."""
    optim: dict[str, Any] = torch.load(source / "optim.pt")
    names = [name for group in optim["param_groups"] for name in group["params"]]
    for group in optim["param_groups"]:
        group["params"] = [names.index(name) for name in group["params"]]
    optim["state"] = {names.index(name): own for name, own in optim["state"].items()}
    return optim


ODD: dict[str, tuple[Any, Any]] = {
    "list": ("n", [torch.ones(2), 3]),
    "tensor": ("n", torch.ones(2)),
    "one number": ("k", torch.tensor([6])),
    "number of no parameter": (99, 3),
    "a parameter's tensor": (0, torch.ones(7, 5)),
    "a parameter's list": (0, [1]),
    "a parameter's None": (0, None),
}


@pytest.mark.parametrize("name", ODD)
def test_a_state_that_is_no_dictionary(name: str, tmp_path: Path, zckpt: Zckpt) -> None:
    key, value = ODD[name]
    source = saved(tmp_path)
    optim = numbered(source)
    optim["state"][key] = value
    torch.save(optim, source / "optim.pt")
    (state,) = zckpt("inspect", source, "--json").document["states"]
    assert (state["state"], state["parameters"]) == (str(key), int(key == 0))
    assert zckpt("verify", source, "--against", source, "--gather").code == 0
    for to in ("gathered", "dcp", "universal", "deepspeed --stage 0 --dp 1"):
        ended = zckpt("convert", source, tmp_path / "new", "--to", *to.split())
        assert f"--drop-state {key} " in ended.err
    assert zckpt("convert", source, tmp_path / "new", "--to", "dcp", "--drop-state", key).code == 0
    weights = zckpt("convert", source, tmp_path / "w", "--to", "gathered", "--weights-only")
    assert weights.code == 0


def test_states_in_a_list(tmp_path: Path, zckpt: Zckpt) -> None:
    model = torch.nn.Linear(3, 2)
    optim = torch.optim.AdamW(model.parameters()).state_dict()
    file = tmp_path / "run.pt"
    torch.save({"model": model.state_dict(), "optim": optim | {"state": [{"n": 1}]}}, file)
    (state,) = zckpt("inspect", file, "--json").document["states"]
    assert (state["state"], state["parameters"]) == ("state", 0)
    assert "--drop-state state " in zckpt("convert", file, tmp_path / "new", "--to", "dcp").err


def test_vectors_under_a_mask(tmp_path: Path) -> None:
    """SPAM of pytorch_optimizer: moments are those elements of a weight where its mask is true."""
    source = saved(tmp_path)
    model, optim = torch.load(source / "model.pt"), numbered(source)
    for state in optim["state"].values():
        if state["exp_avg"].ndim > 1:
            mask = torch.zeros_like(state["exp_avg"], dtype=torch.bool)
            mask[0] = True
            state |= {"mask": mask, "exp_avg": state["exp_avg"][mask]}
    optim["state"] |= {"total_step": 6}
    torch.save({"model": model, "optimizer": optim}, tmp_path / "run.pt")
    for to in PLAIN:
        zckpt.convert(tmp_path / "run.pt", tmp_path / "new", **to)
        assert zckpt.verify(tmp_path / "run.pt", tmp_path / "new")["equal"]
        shutil.rmtree(tmp_path / "new")


RECORDED = [
    *(ROOT / "examples" / name for name in ("run", "trainer/checkpoint-4")),
    *sorted((ROOT / "tests" / "data").glob("deepspeed-*/run")),
]
"""Runs of real DeepSpeed, 0.8.2 to 0.19.8."""


@pytest.mark.parametrize("run", [*RUNS, *RECORDED], ids=str)
def test_what_the_engine_itself_writes_is_known(run: str | Path, tmp_path: Path) -> None:
    manifest = zckpt.read(run_of(tmp_path, run) if isinstance(run, str) else run)
    assert not manifest.states.of_form("unsupported", "beside")


@pytest.mark.parametrize("kind", ["stage 1", "stage 3"])
def test_what_a_file_has_beside_the_optimizer(kind: str, tmp_path: Path) -> None:
    run = run_of(tmp_path, kind, {"mean": torch.ones(2)}, "file")
    with pytest.raises(UnsupportedState, match="optimizer's rho of no parameter"):
        zckpt.convert(run, tmp_path / "new", to="universal")


def grid_of(root: Path) -> Path:
    """A run of two stages and two tensor ranks."""
    zckpt.reshard(ROOT / "tests" / "data" / "zckpt-0.1-pp2_tp2" / "run", root / "grid", dp=1)
    return root / "grid"


def of_ranks(run: Path, copy: Path, *numbers: int) -> Path:
    """A copy of a run whose ranks have these numbers beside the optimizer's states."""
    each = iter(numbers)
    return changed(run, copy, lambda own: own["base"].update(rho=next(each)))


@pytest.mark.parametrize("numbers", [(3, 4), (3, 4, 3, 4), (3, 3, 4, 4), (3, 3, 3, 4)])
def test_numbers_that_ranks_have_of_their_own(numbers: tuple[int, ...], tmp_path: Path) -> None:
    """Data ranks, or stages of a pipeline and tensor ranks, which keep them if they stay apart."""
    is_plain = len(numbers) == 2
    plain = run_of(tmp_path, "stage 2") if is_plain else grid_of(tmp_path)
    run = of_ranks(plain, tmp_path / "own", *numbers)
    manifest = zckpt.read(run)
    assert {item.key for item in manifest.states.of_form("unsupported")} == {"rho"}
    assert not manifest.states.of_form("beside")
    with pytest.raises(UnsupportedState, match="optimizer's rho of no parameter") as ended:
        zckpt.convert(run, tmp_path / "new", to="universal")
    assert "--drop-state rho" in str(ended.value.hint)
    sizes: dict[str, int] = {"dp": 3} if is_plain else {"dp": 3, "tp": 1}
    with pytest.raises(UnsupportedState, match="optimizer's rho of no parameter"):
        zckpt.reshard(run, tmp_path / "new", **sizes)
    if not is_plain:
        zckpt.reshard(run, tmp_path / "kept", dp=3)
        assert zckpt.verify(run, tmp_path / "kept")["equal"]
    zckpt.convert(run, tmp_path / "new", to="universal", drop_state=["rho"])
    assert not zckpt.verify(run, tmp_path / "new")["equal"]
    assert zckpt.verify(run, tmp_path / "new", drop_state=["rho"])["equal"]
    zckpt.reshard(run, tmp_path / "dp3", **sizes, drop_state=["rho"])
    assert zckpt.verify(run, of_ranks(plain, tmp_path / "same", *numbers))["equal"]
    other = of_ranks(plain, tmp_path / "other", *reversed(numbers))
    (line,) = zckpt.verify(run, other)["states"]
    assert line["key"] == "rho of no parameter"


def test_a_number_that_all_model_ranks_have(tmp_path: Path) -> None:
    run = of_ranks(grid_of(tmp_path), tmp_path / "own", 3, 3, 3, 3)
    zckpt.convert(run, tmp_path / "new", to="universal")
    zckpt.reshard(run, tmp_path / "dp3", dp=3)
    for path in (run, tmp_path / "new", tmp_path / "dp3"):
        assert zckpt.read(path).states.numbers("beside") == {"rho": 3}


def test_a_target_without_a_place_for_numbers(tmp_path: Path) -> None:
    run = run_of(tmp_path, "stage 2", 3)
    report = zckpt.convert(run, tmp_path / "new", to="onnxruntime", drop_state=[])
    assert "rho: numbers of the optimizer that belong to no parameter" in texts(report["left_out"])


# -- compared as they are


@pytest.mark.parametrize("kind", RUNS)
@pytest.mark.parametrize("place", ["outer", "base", "state"])
def test_equal_files_are_equal(kind: str, place: str, tmp_path: Path, zckpt: Zckpt) -> None:
    run = run_of(tmp_path, kind, {"mean": torch.ones(2), "count": 3}, place)
    key = key_of(place)
    same = changed(run, tmp_path / "same", lambda own: None)
    report = zckpt("verify", same, "--against", run, "--json").document
    assert (report["equal"], report["lacking"]) == (True, [])
    assert (
        f"{key} of no parameter: zckpt does not support this state; only its bytes were compared"
        in texts(report["notes"])
    )

    def tensor(own: dict[str, Any]) -> None:
        own[place][key]["mean"][1] = 7

    def number(own: dict[str, Any]) -> None:
        own[place][key]["count"] = 4

    other = changed(run, tmp_path / "tensor", tensor)
    report = zckpt("verify", other, "--against", run, "--json").document
    assert {line["count"] for line in report["differences"]} == {1}
    assert not report["lacking"]
    assert zckpt("diff", other, run).code == 3
    other = changed(run, tmp_path / "number", number)
    ended = zckpt("verify", other, "--against", run)
    assert ended.code == 3
    assert f"{key} of no parameter: " in ended.out
    assert '"count": 4' in ended.out


def test_a_proof_has_them_too(tmp_path: Path, zckpt: Zckpt) -> None:
    run = run_of(tmp_path, "stage 2", {"mean": torch.ones(2), "count": 3})
    proof = tmp_path / "proof.json"
    assert zckpt("verify", run, "--save-proof", proof).code == 0
    ended = zckpt("verify", run, "--against", proof)
    assert ended.code == 0, ended.out
    assert (
        "note: rho of no parameter: zckpt does not support this state; only its bytes were compared"
        in ended.out
    )

    def tensor(own: dict[str, Any]) -> None:
        own["base"]["rho"]["mean"][1] = 7

    def number(own: dict[str, Any]) -> None:
        own["base"]["rho"]["count"] = 4

    for change in (tensor, number):
        other = changed(run, tmp_path / change.__name__, change)
        ended = zckpt("verify", other, "--against", proof)
        assert ended.code == 3
        assert "rho" in ended.out


def test_a_proof_with_another_form(tmp_path: Path, zckpt: Zckpt) -> None:
    """The text of its value names the tensor's type and shape, which is not there."""
    run = run_of(tmp_path, "stage 2", {"mean": torch.ones(2)})
    proof = tmp_path / "proof.json"
    assert zckpt("verify", run, "--save-proof", proof).code == 0
    report = json.loads(proof.read_text())
    (item,) = report["held"]["unread"]
    item |= {"content": f"{item['content']} F32 [2] F32 [2]", "tensors": []}
    proof.write_text(json.dumps(report))
    ended = zckpt("verify", run, "--against", proof)
    assert ended.code == 3, ended.err
    assert "rho of no parameter: " in ended.out


def test_ranks_of_which_one_is_not_known(tmp_path: Path) -> None:
    """A stage of a pipeline may lack the tensors of a state: then nobody knows the whole state."""
    manifest = zckpt.read(run_of(tmp_path, "stage 2", {"mean": torch.ones(2)}))
    (known,) = manifest.states.of_form("unsupported")
    mixed = replace(manifest, states=States((known, replace(known, value="", tensors=()))))
    for a, b in ((mixed, mixed), (manifest, mixed), (mixed, manifest)):
        assert unsupported.pairs(a, b) == []
        assert unsupported.rest(a, b) == (a, b, [], [])
    assert len(values.missing_states(mixed, mixed, ())[0]) == 2
    assert unsupported.rest(manifest, manifest)[0].states == States()


def test_state_dicts_are_compared_as_they_are(tmp_path: Path) -> None:
    source = saved(tmp_path, shared={"scale": torch.ones(2)})
    shutil.copytree(source, tmp_path / "same")
    assert zckpt.verify(source, tmp_path / "same")["equal"]
    optim = torch.load(source / "optim.pt")
    optim["state"]["shared"]["scale"][0] = 2
    torch.save(optim, tmp_path / "same" / "optim.pt")
    report = zckpt.verify(source, tmp_path / "same")
    assert [line["tensor"] for line in report["differences"]] == [
        "optimizer.beside.shared.scale/state"
    ]


@pytest.mark.parametrize("state", [{"buffers": {0: torch.ones(2)}}, {"decay": torch.ones(())}])
def test_states_that_show_no_shape(state: dict[str, Any], tmp_path: Path) -> None:
    """AggMo and Amos keep such ones: DeepSpeed's own file of stage 0 has no names for them."""

    def without_shapes(own: dict[str, Any]) -> None:
        del own["file"]["param_shapes"]
        own["base"]["state"] = dict.fromkeys(own["state"], state)

    run = changed(run_of(tmp_path, "stage 0 in fp32"), tmp_path / "strange", without_shapes)
    with pytest.raises(MissingData, match="does not show the shape of every parameter") as ended:
        zckpt.read(run)
    assert "--param-names" in str(ended.value.hint)
    names = ["trunk.weight", "head.weight", "trunk.bias", "head.bias"]
    zckpt.convert(run, tmp_path / "new", to="gathered", param_names=names)
    assert zckpt.verify(run, tmp_path / "new", param_names=names)["equal"]
    held = torch.load(tmp_path / "new" / "optim.pt")
    assert all(str(own) == str(state) for own in held["state"].values())
    assert [name for group in held["param_groups"] for name in group["param_names"]] == names


# -- an optimizer around the optimizer


def wrapped(root: Path, own: Callable[[dict[str, Any]], dict[str, Any]]) -> Path:
    """One file with a model and an optimizer's state dict that another one has wrapped."""
    source = saved(root)
    model, optim = (torch.load(source / name) for name in ("model.pt", "optim.pt"))
    torch.save({"model": model, "optimizer": own(optim), "epoch": 3}, root / "run.pt")
    return root / "run.pt"


WRAPPERS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "lookahead_state": lambda optim: {
        "base_optimizer": optim,
        "lookahead_state": {n: {"slow": own["exp_avg"]} for n, own in optim["state"].items()},
        "alpha": 0.5,
    },
    "fp32_from_fp16": lambda optim: {
        "optimizer_state_dict": optim,
        "fp32_from_fp16": [[own["exp_avg"] for own in optim["state"].values()]],
    },
    "magma_state": lambda optim: {
        "base": optim,
        "magma_state": {(0, n): {"alignment": torch.tensor(0.5)} for n in optim["state"]},
        "moment_key": "auto",
    },
    "counts": lambda optim: {"base": optim, "counts": [{"seen": [torch.tensor(3)]}], "none": {}},
}


@pytest.mark.parametrize("name", WRAPPERS)
@pytest.mark.parametrize(
    "to", [*PLAIN, WHOLE, *FLAT], ids=lambda to: f"{to['to']}{to.get('stage')}"
)
def test_what_a_wrapper_keeps(name: str, to: dict[str, Any], tmp_path: Path) -> None:
    source = wrapped(tmp_path, WRAPPERS[name])
    if to in PLAIN:
        zckpt.convert(source, tmp_path / "new", **to)
        assert zckpt.verify(source, tmp_path / "new")["equal"]
        source = tmp_path / "new"
        to = FLAT[1]
    key = f"around.{name}"
    with pytest.raises(UnsupportedState, match=f"optimizer's {key} of no parameter") as ended:
        zckpt.convert(source, tmp_path / "run", **to)
    assert f"--drop-state {key}" in str(ended.value.hint)
    report = zckpt.convert(source, tmp_path / "run", drop_state=[key], **to)
    assert [line["state"] for line in report["dropped"]] == [key]
    assert key in [line["state"] for line in zckpt.verify(source, tmp_path / "run")["lacking"]]


def test_a_dropped_state_of_a_wrapper_is_gone(tmp_path: Path) -> None:
    source = wrapped(tmp_path, WRAPPERS["lookahead_state"])
    zckpt.convert(source, tmp_path / "new", to="gathered", drop_state=["around.lookahead_state"])
    (file,) = (tmp_path / "new").iterdir()
    optimizer = torch.load(file)["optimizer"]
    assert sorted(optimizer) == ["alpha", "base_optimizer"]


def test_a_key_that_a_slot_has_too(tmp_path: Path) -> None:
    """What stands around the optimizer is dropped alone, and Adam's moment alone."""
    source = wrapped(tmp_path, lambda optim: {"inner": optim, "exp_avg": torch.ones(3)})
    with pytest.raises(UnsupportedState, match=r"optimizer's around\.exp_avg of no") as ended:
        zckpt.convert(source, tmp_path / "run", **FLAT[1])
    assert (
        ended.value.hint == "to go on without it: --drop-state around.exp_avg (or --weights-only)"
    )
    for key, slots, around in (
        ("around.exp_avg", ["exp_avg", "exp_avg_sq"], ["inner"]),
        ("exp_avg", ["exp_avg_sq"], ["exp_avg", "inner"]),
    ):
        zckpt.convert(source, tmp_path / key, to="gathered", drop_state=[key])
        manifest = zckpt.read(tmp_path / key)
        assert sorted(manifest.slots.keys() - {"param", "state"}) == slots
        (file,) = (tmp_path / key).iterdir()
        assert sorted(torch.load(file)["optimizer"]) == around


@pytest.mark.parametrize("key", ["rng", "rng_state", "torch_rng_state", "cuda_rng_state_all"])
def test_random_states_are_no_states_of_an_optimizer(key: str, tmp_path: Path) -> None:
    source = saved(tmp_path)
    model, optim = (torch.load(source / name) for name in ("model.pt", "optim.pt"))
    random = torch.arange(4)
    torch.save(
        {"model": model, "optim_state": {"optimizer": optim, key: random}}, tmp_path / "a.pt"
    )
    for number, to in enumerate((*PLAIN, WHOLE, *FLAT)):
        zckpt.convert(tmp_path / "a.pt", tmp_path / str(number), **to)
        assert zckpt.verify(tmp_path / "a.pt", tmp_path / str(number))["equal"]
    report = zckpt.convert(tmp_path / "a.pt", tmp_path / "ort", to="onnxruntime")
    assert "client_state: ONNX Runtime's files cannot store it" in texts(report["left_out"])


def test_what_is_known_of_a_state_around_the_optimizer(tmp_path: Path) -> None:
    """Nobody says that an optimizer has put it there."""
    source = wrapped(tmp_path, lambda optim: {"inner": optim, "seen": torch.arange(4)})
    with pytest.raises(UnsupportedState, match="stored next to the optimizer's state dict"):
        zckpt.convert(source, tmp_path / "run", **FLAT[1])
    (line,) = zckpt.inspect(zckpt.read(source))["states"]
    assert line["form"] == "next to the optimizer's state dict"


def test_a_programs_own_state_is_no_wrapper(tmp_path: Path) -> None:
    """The keys around the optimizer name none, or the model is there too."""
    source = saved(tmp_path)
    model, optim = (torch.load(source / name) for name in ("model.pt", "optim.pt"))
    rng = torch.arange(4)
    for number, tree in enumerate(
        (
            {"model": model, "training": {"optimizer": optim, "rng": rng}},
            {"optimization": {"model": model, "optimizer": optim, "rng": rng}},
        )
    ):
        torch.save(tree, tmp_path / f"{number}.pt")
        zckpt.convert(tmp_path / f"{number}.pt", tmp_path / str(number), **FLAT[1])


# -- keys that become texts


def test_keys_that_are_tuples(tmp_path: Path) -> None:
    source = saved(tmp_path, lambda _: {(0, 0): torch.ones(2), "grid": {(0, 1): torch.ones(3)}})
    zckpt.convert(source, tmp_path / "dcp", to="dcp")
    assert zckpt.verify(source, tmp_path / "dcp")["equal"]
    zckpt.convert(tmp_path / "dcp", tmp_path / "back", to="gathered")
    assert zckpt.verify(source, tmp_path / "back")["equal"]


@pytest.mark.parametrize("key", [("a", 1), 7])
def test_tensors_of_the_parameters_shape_under_such_keys(key: Any, tmp_path: Path) -> None:
    source = saved(tmp_path)
    optim = torch.load(source / "optim.pt")
    for state in optim["state"].values():
        state[key] = torch.ones_like(state["exp_avg"])
    torch.save(optim, source / "optim.pt")
    for to in (*PLAIN, WHOLE):
        zckpt.convert(source, tmp_path / "new", **to)
        assert zckpt.verify(source, tmp_path / "new")["equal"]
        assert zckpt.verify(source, tmp_path / "new", gather=True)["equal"]
        shutil.rmtree(tmp_path / "new")


@pytest.mark.parametrize("layout", ["nested", "flat"])
def test_keys_of_groups_that_are_tuples(layout: str, tmp_path: Path) -> None:
    source = saved(tmp_path, group={("x",): 4})
    zckpt.convert(source, tmp_path / "dcp", to="dcp", dcp_layout=layout)
    assert zckpt.verify(source, tmp_path / "dcp")["equal"]


def test_a_state_of_some_parameters_is_named_as_inspect_names_it(
    tmp_path: Path, zckpt: Zckpt
) -> None:
    source = saved(tmp_path)
    optim = torch.load(source / "optim.pt")
    state = next(iter(optim["state"].values()))
    state["('a', 1)"] = torch.ones_like(state["exp_avg"])
    torch.save(optim, source / "optim.pt")
    assert "('a', 1)" in zckpt("inspect", source).out
    command = ("convert", source, tmp_path / "run", "--to", "deepspeed", "--dp", "2")
    ended = zckpt(*command)
    assert "('a', 1)" in ended.err
    assert "--to gathered and --to dcp keep it" in ended.err
    assert "esc_" not in ended.err
    assert zckpt(*command, "--drop-state", "('a', 1)").code == 0


# -- a state that is None


@pytest.mark.parametrize(
    "to", [*PLAIN, WHOLE, *FLAT], ids=lambda to: f"{to['to']}{to.get('stage')}"
)
def test_a_state_that_is_none(to: dict[str, Any], tmp_path: Path) -> None:
    source = saved(tmp_path, lambda _: {"nil": None})
    report = zckpt.convert(source, tmp_path / "new", **to)
    lines = [(each["state"], each["reason"]) for each in report["computed_afresh"]]
    assert lines == ([("nil", "it is None")] if to in FLAT else [])
    report = zckpt.verify(source, tmp_path / "new")
    assert report["equal"], report
    assert any("nil of 4 parameters" in note for note in texts(report["notes"])) == (to in FLAT)
    assert ("nil" in str(zckpt.read(tmp_path / "new").states)) == (to not in FLAT)


def test_two_keys_of_one_text(tmp_path: Path) -> None:
    source = saved(tmp_path, lambda _: {"grid": {1: torch.ones(2), "1": torch.zeros(2)}})
    with pytest.raises(UnsupportedState, match=r"two values would have the key .*\.grid\.1"):
        zckpt.convert(source, tmp_path / "dcp", to="dcp")
    zckpt.convert(source, tmp_path / "new", to="universal")
    assert zckpt.verify(source, tmp_path / "new")["equal"]


def test_keys_of_groups(tmp_path: Path) -> None:
    source = saved(tmp_path, group={5: 1.5, "own": {1: 2}})
    for number, to in enumerate(PLAIN):
        zckpt.convert(source, tmp_path / str(number), **to)
        report = zckpt.verify(source, tmp_path / str(number))
        assert (report["groups"], report["not_compared"]) == ([], [])


# -- what an optimizer needs


def plain_adam(root: Path) -> Path:
    source = saved(root)
    optim = torch.load(source / "optim.pt")
    for group in optim["param_groups"]:
        del group["gamma"]
    torch.save(optim, source / "optim.pt")
    return source


@pytest.mark.parametrize("to", [*PLAIN, *FLAT], ids=lambda to: f"{to['to']}{to.get('stage')}")
def test_a_state_without_which_no_step_is_possible(to: dict[str, Any], tmp_path: Path) -> None:
    source = plain_adam(tmp_path)
    report = zckpt.convert(source, tmp_path / "new", drop_state=["exp_avg_sq"], **to)
    (line,) = [line for line in texts(report["warnings"]) if "cannot take a step" in line]
    assert line.startswith("AdamW cannot take a step without exp_avg_sq")
    assert "--weights-only" in line


def test_torch_cannot_take_a_step_without_it(tmp_path: Path) -> None:
    zckpt.convert(plain_adam(tmp_path), tmp_path / "new", to="gathered", drop_state=["exp_avg_sq"])
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    weights, biases = ([p for p in model.parameters() if p.ndim == n] for n in (2, 1))
    optimizer = torch.optim.AdamW([{"params": weights}, {"params": biases}])
    optimizer.load_state_dict(torch.load(tmp_path / "new" / "optim.pt"))
    model(torch.ones(1, 5)).sum().backward()
    with pytest.raises(KeyError, match="exp_avg_sq"):
        optimizer.step()


def test_an_optimizer_that_begins_afresh(tmp_path: Path) -> None:
    """Of a parameter without any state, Lion makes a new one; SGD makes what it does not find."""
    source = plain_adam(tmp_path)
    optim = torch.load(source / "optim.pt")
    optim["state"] = {n: {"momentum_buffer": s["exp_avg"]} for n, s in optim["state"].items()}
    optim["param_groups"] = [
        {"params": group["params"], "lr": 0.1, "momentum": 0.9, "dampening": 0}
        for group in optim["param_groups"]
    ]
    torch.save(optim, source / "optim.pt")
    assert zckpt.read(source).optimizer == "SGD"
    report = zckpt.convert(source, tmp_path / "new", to="dcp", drop_state=["momentum_buffer"])
    assert not any("cannot take a step" in line for line in texts(report["warnings"]))


# -- clipping


def test_clipping_that_stage_3_does_not_read(tmp_path: Path, zckpt: Zckpt) -> None:
    """Its engine clips to the norm of the ds_config."""
    run = run_of(tmp_path, "stage 2")
    run = changed(run, tmp_path / "clipped", lambda own: own["outer"].update(clip_grad=0.7))
    ended = zckpt("reshard", run, tmp_path / "new", "--stage", "3")
    assert 'set "gradient_clipping": 0.7 there' in ended.err
    ended = zckpt("verify", tmp_path / "new", "--against", run)
    assert ended.code == 0
    assert "not compared: optimizer.clip_grad: only " in ended.out
    assert "differ in how they were saved" not in ended.out
    other = changed(run, tmp_path / "unclipped", lambda own: own["outer"].pop("clip_grad"))
    ended = zckpt("verify", other, "--against", run)
    assert ended.code == 3
    assert f"optimizer.clip_grad: only in {run}" in ended.out


def test_clipping_of_the_config_is_no_news(tmp_path: Path) -> None:
    run = run_of(tmp_path, "stage 2")
    run = changed(run, tmp_path / "clipped", lambda own: own["outer"].update(clip_grad=0.7))
    config = {"gradient_clipping": 0.7, "zero_optimization": {"stage": 3}}
    report = zckpt.convert(run, tmp_path / "new", to="deepspeed", dp=2, config=config)
    assert not any("gradient_clipping" in line for line in texts(report["warnings"]))


def test_every_error_names_a_way_on(tmp_path: Path) -> None:
    run = run_of(tmp_path, "stage 3", [torch.ones(2)], "outer")
    with pytest.raises(ZckptError) as ended:
        zckpt.reshard(run, tmp_path / "new", dp=3)
    assert ended.value.hint == "to go on without it: --drop-state rho (or --weights-only)"
