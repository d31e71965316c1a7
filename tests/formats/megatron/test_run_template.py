"""`--like RUN`: sources of other engines, written with the keys and groups of a Megatron run."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed import checkpoint as dcp

import zckpt as package
from zckpt import errors

from ...conftest import ROOT, texts
from ...engines import likes, megatron
from .test_write import ITERATION, SOURCE, loaded

LEGACY = ROOT / "tests" / "data" / "megatron-0.16.1-legacy-tp2"
KEY, USED = "embedding.word_embeddings.weight", 11  # rows that the tokenizer uses, of 16
TIED = "output_layer.weight"  # the second name of KEY
NORM = "decoder.final_layernorm.weight"


@pytest.fixture
def other(tmp_path: Path) -> Path:
    """The state of SOURCE as state dicts of torch: the weights are the masters."""
    package.convert(SOURCE, tmp_path / "other", to="gathered")
    return tmp_path / "other"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Another run of the same model: its tensors are all sevens, its step is 1."""
    folder = tmp_path / "run" / "iter_0000001"
    state = loaded(SOURCE / ITERATION)
    filled = {k: torch.full_like(v, 7) if torch.is_tensor(v) else v for k, v in state.items()}
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)
    dcp.save(filled, checkpoint_id=folder, planner=planner, no_dist=True)
    shutil.copy(SOURCE / ITERATION / "metadata.json", folder)
    common = torch.load(SOURCE / ITERATION / "common.pt", weights_only=False)
    for group in common["optimizer"]["optimizer"]["param_groups"]:
        group.update(step=1, lr=9.0, eps=9.0, max_lr=5.0)
    common["iteration"] = 1
    common["opt_param_scheduler"]["num_steps"] = 4
    common["args"].consumed_train_samples = 4
    torch.save(common, folder / "common.pt")
    (folder.parent / "latest_checkpointed_iteration.txt").write_text("1")
    return folder.parent


def edit(file: Path, change: Callable[[Any], None]) -> None:
    state = torch.load(file, weights_only=False)
    change(state)
    torch.save(state, file)


def states(optimizer: dict[str, Any], name: str) -> dict[str, Any]:
    """The states of a parameter, in an optimizer's state dict with `param_names`."""
    for group in optimizer["param_groups"]:
        if name in group["param_names"]:
            number = group["params"][group["param_names"].index(name)]
            found: dict[str, Any] = optimizer["state"][number]
            return found
    raise AssertionError(name)


@pytest.mark.filterwarnings("ignore")
class TestTarget:
    def test_every_tensor_is_the_sources(self, other: Path, run: Path, tmp_path: Path) -> None:
        package.convert(other, tmp_path / "new", to="megatron", like=str(run))
        before, after = loaded(SOURCE / ITERATION), loaded(tmp_path / "new" / ITERATION)
        tensors = {key for key, value in before.items() if torch.is_tensor(value)}
        assert tensors == {key for key, value in after.items() if torch.is_tensor(value)}
        for key in tensors:
            assert after[key].dtype == before[key].dtype
            assert torch.equal(after[key], before[key]), key
        modules = {key for key in before if "._extra_state" in key}
        assert modules == {key for key in after if "._extra_state" in key}
        report = package.verify(tmp_path / "new", against=SOURCE)
        assert report["differences"] == report["problems"] == []
        assert {(each["group"], each["key"]) for each in report["groups"]} == {
            (0, "max_lr"),
            (1, "max_lr"),
        }

    def test_groups_are_the_runs_with_the_sources_values(
        self, other: Path, run: Path, tmp_path: Path
    ) -> None:
        report = package.convert(other, tmp_path / "new", to="megatron", like=str(run))
        folder = tmp_path / "new" / ITERATION
        expected = torch.load(SOURCE / ITERATION / "common.pt", weights_only=False)
        common = torch.load(folder / "common.pt", weights_only=False)
        groups = common["optimizer"]["optimizer"]["param_groups"]
        for group in expected["optimizer"]["optimizer"]["param_groups"]:
            group["max_lr"] = 5.0  # by which 0.19 finds the group
        assert groups == expected["optimizer"]["optimizer"]["param_groups"]
        assert common["iteration"] == 3
        assert common["opt_param_scheduler"]["num_steps"] == 12
        assert common["args"].consumed_train_samples == 12
        assert any(
            "num_steps is set to 12, for 3 steps: zckpt assumes" in line
            for line in texts(report["warnings"])
        )

    def test_what_the_run_leaves_out(self, other: Path, run: Path, tmp_path: Path) -> None:
        """The target would have the tokenizer of the run, and none of its directory's files."""
        folder = run / "iter_0000001"
        (folder / "own.txt").write_text("notes")
        (folder / "tokenizer").mkdir()
        (folder / "tokenizer" / "vocab.json").write_text("{}")
        (tmp_path / "merges.txt").write_text("")
        (folder / "tokenizer" / "merges.txt").symlink_to(tmp_path / "merges.txt")
        assert "own.txt, an unknown file of the directory" in texts(
            package.read(run).notices.omitted
        )
        report = package.convert(other, tmp_path / "new", to="megatron", like=str(run))
        assert [line for line in texts(report["left_out"]) if line.startswith("--like")] == [
            "--like: tokenizer/merges.txt: a link out of the directory"
        ]

    @pytest.mark.parametrize("stage", [1, 3])
    def test_masters_and_weights_of_zero(self, run: Path, tmp_path: Path, stage: int) -> None:
        names = list(package.read(SOURCE).parameters)
        zero = {"to": "deepspeed", "dp": 2, "stage": stage, "param_names": names}
        package.convert(SOURCE, tmp_path / "zero", **zero)
        package.convert(tmp_path / "zero", tmp_path / "new", to="megatron", like=str(run))
        report = package.verify(tmp_path / "new", against=SOURCE)
        assert report["differences"] == report["problems"] == []
        assert report["slots"] == {"param": 20, "master": 20, "exp_avg": 20, "exp_avg_sq": 20}

    def test_folders_of_ranks_are_runs_too(self, other: Path, tmp_path: Path) -> None:
        package.convert(other, tmp_path / "new", to="megatron", like=str(LEGACY))
        assert package.verify(tmp_path / "new", against=SOURCE)["equal"]

    def test_a_run_may_be_a_universal_checkpoint(
        self, other: Path, run: Path, tmp_path: Path
    ) -> None:
        package.convert(run, tmp_path / "universal")
        for name, like in {"a": run, "b": tmp_path / "universal"}.items():
            package.convert(other, tmp_path / name, to="megatron", like=str(like))
        first, second = (
            {path.name: path.read_bytes() for path in (tmp_path / name / ITERATION).iterdir()}
            for name in "ab"
        )
        assert first == second

    def test_a_run_with_more_rows(self, other: Path, run: Path, tmp_path: Path) -> None:
        """Rows that only pad the vocabulary: zeros in every slot."""

        def shorten(state: dict[str, Any]) -> None:
            state.update(dict.fromkeys({KEY, TIED} & {*state}, state[KEY][:USED].clone()))

        def shorten_states(optimizer: dict[str, Any]) -> None:
            own = states(optimizer, KEY)
            own.update({slot: own[slot][:USED].clone() for slot in ("exp_avg", "exp_avg_sq")})

        edit(other / "model.pt", shorten)
        edit(other / "optim.pt", shorten_states)
        report = package.convert(other, tmp_path / "new", to="megatron", like=str(run))
        assert any(
            f"{KEY} has 11 rows in the source, and" in line for line in texts(report["warnings"])
        )
        before, after = loaded(SOURCE / ITERATION), loaded(tmp_path / "new" / ITERATION)
        tensors = [name for name in before if KEY in name and torch.is_tensor(before[name])]
        assert len(tensors) == 4
        for name in tensors:
            assert torch.equal(after[name][:USED], before[name][:USED])
            assert after[name][USED:].count_nonzero() == 0

    def test_options_of_another_adam(self, other: Path, run: Path, tmp_path: Path) -> None:
        options = {"weight_decay": 0.1, "decoupled_weight_decay": False, "bias_correction": False}

        def change(optimizer: dict[str, Any]) -> None:
            for group in optimizer["param_groups"]:
                group.update(options)

        edit(other / "optim.pt", change)
        report = package.convert(other, tmp_path / "new", to="megatron", like=str(run))
        assert any(
            "adds weight decay to the gradients" in line for line in texts(report["warnings"])
        )
        assert any("has bias_correction=False" in line for line in texts(report["warnings"]))


@pytest.mark.filterwarnings("ignore")
class TestRefusals:
    @staticmethod
    def refused(source: Path, run: Path, target: Path, **options: Any) -> errors.ZckptError:
        with pytest.raises(errors.ZckptError) as caught:
            package.convert(source, target, to="megatron", like=str(run), **options)
        assert not target.exists()
        return caught.value

    def test_parameters_that_only_one_has(self, other: Path, run: Path, tmp_path: Path) -> None:
        error = self.refused(
            other, run, tmp_path / "new", rename=[("final_layernorm", "last_norm")]
        )
        assert "only the source has decoder.last_norm" in str(error)
        assert "only --like has decoder.final_layernorm" in str(error)
        assert "--rename" in error.hint
        assert "--family" in error.hint

    def test_other_shapes(self, other: Path, run: Path, tmp_path: Path) -> None:
        def change(state: dict[str, Any]) -> None:
            state[NORM] = state[NORM][:5].clone()

        def change_states(optimizer: dict[str, Any]) -> None:
            own = states(optimizer, NORM)
            own.update({slot: own[slot][:5].clone() for slot in ("exp_avg", "exp_avg_sq")})

        edit(other / "model.pt", change)
        edit(other / "optim.pt", change_states)
        error = self.refused(other, run, tmp_path / "new")
        assert f"{NORM} ([5] and [8])" in str(error)

    def test_fewer_rows_than_the_tokenizer_uses(
        self, other: Path, run: Path, tmp_path: Path
    ) -> None:
        (other / "optim.pt").unlink()
        edit(
            other / "model.pt",
            lambda each: each.update(
                dict.fromkeys({KEY, TIED} & {*each}, each[KEY][: USED - 1].clone())
            ),
        )
        error = self.refused(other, run, tmp_path / "new", weights_only=True)
        assert f"{KEY} ([10, 8] and [16, 8])" in str(error)

    def test_a_state_is_missing(self, other: Path, run: Path, tmp_path: Path) -> None:
        def change(optimizer: dict[str, Any]) -> None:
            for own in optimizer["state"].values():
                del own["exp_avg_sq"]

        edit(other / "optim.pt", change)
        error = self.refused(other, run, tmp_path / "new")
        assert f"exp_avg in {other}, but exp_avg, exp_avg_sq" in str(error)
        assert "--weights-only" in error.hint

    def test_members_of_a_group_differ(self, other: Path, run: Path, tmp_path: Path) -> None:
        def change(optimizer: dict[str, Any]) -> None:
            first = optimizer["param_groups"][0]
            rest = {key: [first[key].pop()] for key in ("params", "param_names")}
            optimizer["param_groups"].append({**first, **rest, "lr": 0.75})

        edit(other / "optim.pt", change)
        error = self.refused(other, run, tmp_path / "new")
        assert "are in one group of the --like run" in str(error)
        assert "different values of lr for them" in str(error)

    def test_hyper_parameters_that_the_source_lacks(
        self, other: Path, run: Path, tmp_path: Path
    ) -> None:
        def change(optimizer: dict[str, Any]) -> None:
            for group in optimizer["param_groups"]:
                del group["eps"]

        edit(other / "optim.pt", change)
        error = self.refused(other, run, tmp_path / "new")
        assert "does not state eps" in str(error)
        assert "--group-defaults eps=..." in error.hint
        package.convert(
            other, tmp_path / "new", to="megatron", like=str(run), group_defaults={"eps": 0.5}
        )
        common = torch.load(tmp_path / "new" / ITERATION / "common.pt", weights_only=False)
        groups = common["optimizer"]["optimizer"]["param_groups"]
        assert {group["eps"] for group in groups} == {0.5}

    def test_another_directory_is_no_run(self, other: Path, tmp_path: Path) -> None:
        error = self.refused(other, other, tmp_path / "new")
        assert str(error) == f"--like {other} is no megatron checkpoint"
        error = self.refused(other, nowhere := tmp_path / "nowhere", tmp_path / "new")
        assert str(error) == f"{nowhere} does not exist"

    def test_weights_without_a_run(self, tmp_path: Path) -> None:
        (tmp_path / "model").mkdir()
        save_file({"a": torch.ones(3)}, tmp_path / "model" / "model.safetensors")
        with pytest.raises(errors.MissingData) as caught:
            package.convert(tmp_path / "model", tmp_path / "new", to="megatron")
        assert "--like RUN" in caught.value.hint


ODD: dict[str, Any] = {
    "mu": 0.5,
    "rate": torch.tensor([0.5]),
    "row": torch.ones(3),
    "note": "text",
    "step": "seven",
    5: torch.ones(2),
}
"""States that Megatron-Core's Adam does not have."""


@pytest.mark.filterwarnings("ignore")
class TestOddStates:
    @pytest.mark.parametrize("key", ODD, ids=str)
    def test_an_odd_state(self, key: Any, other: Path, run: Path, tmp_path: Path) -> None:
        def change(optimizer: dict[str, Any]) -> None:
            for own in optimizer["state"].values():
                own[key] = ODD[key]

        edit(other / "optim.pt", change)
        error = TestRefusals.refused(other, run, tmp_path / "new")
        assert str(error).startswith(f"the target cannot store the optimizer's {key} of embedding.")
        assert f"--drop-state {key}" in error.hint
        options: dict[str, Any] = {"to": "megatron", "like": str(run), "drop_state": [str(key)]}
        package.convert(other, tmp_path / "new", **options)
        report = package.verify(tmp_path / "new", other)
        assert [line["state"] for line in report["lacking"]] == [str(key)]
        report = package.verify(tmp_path / "new", other, drop_state=[str(key)])
        assert report["lacking"] == report["differences"] == report["problems"] == []

    @pytest.mark.parametrize("key", ["slow", "max_exp_avg_sq"])
    def test_a_moment_that_the_run_lacks(
        self, key: str, other: Path, run: Path, tmp_path: Path
    ) -> None:
        def change(optimizer: dict[str, Any]) -> None:
            for own in optimizer["state"].values():
                own[key] = own["exp_avg"].clone()

        edit(other / "optim.pt", change)
        assert key in str(TestRefusals.refused(other, run, tmp_path / "new"))
        package.convert(other, tmp_path / "new", to="megatron", like=str(run), drop_state=[key])

    def test_what_belongs_to_no_parameter(self, other: Path, run: Path, tmp_path: Path) -> None:
        edit(other / "optim.pt", lambda each: each.update(rho={"mean": torch.ones(2)}))
        error = TestRefusals.refused(other, run, tmp_path / "new")
        assert "optimizer's rho of no parameter" in str(error)
        edit(other / "optim.pt", lambda each: each.update(rho=3))
        report = package.convert(other, tmp_path / "new", to="megatron", like=str(run))
        assert "rho: numbers of the optimizer that belong to no parameter" in texts(
            report["left_out"]
        )

    def test_hyper_parameters_of_another_optimizer(
        self, other: Path, run: Path, tmp_path: Path
    ) -> None:
        def change(optimizer: dict[str, Any]) -> None:
            for group in optimizer["param_groups"]:
                group["gamma"] = 2.0

        edit(other / "optim.pt", change)
        report = package.convert(other, tmp_path / "new", to="megatron", like=str(run))
        assert "gamma of the optimizer's groups: Adam has no such hyper-parameter" in texts(
            report["left_out"]
        )

    def test_what_the_run_has_beside_its_groups(
        self, other: Path, run: Path, tmp_path: Path
    ) -> None:
        """It is the state of another run."""
        common = run / "iter_0000001" / "common.pt"
        edit(common, lambda each: each["optimizer"].update(rho={"mean": torch.ones(2)}))
        package.convert(other, tmp_path / "new", to="megatron", like=str(run))
        target = torch.load(tmp_path / "new" / ITERATION / "common.pt", weights_only=False)
        assert "rho" not in target["optimizer"]


@pytest.mark.engines
def test_losses_go_on_through_fsdp_and_back(tmp_path: Path, zckpt: Callable[..., Any]) -> None:
    """A Llama: Megatron-Core at tp 2, FSDP2 of transformers on 3 ranks, Megatron-Core at pp 2."""
    start = likes.case("start", tp=2, steps=9, save=3)  # it goes on, as if nobody had stopped it
    first = likes.case("first", pp=2, steps=1, save=1, salt=9, lr=0.5)
    likes.train(tmp_path, start, first)
    to_fsdp, back = tmp_path / "to-fsdp", tmp_path / "back"
    ended = zckpt("convert", tmp_path / "start", to_fsdp, "--to", "dcp", "--family", "llama")
    assert ended.code == 0, ended.err
    fsdp = likes.case("fsdp", engine="fsdp", world=3, steps=3, save=3, load=str(to_fsdp))
    likes.train(tmp_path, fsdp)
    family = ["--family", "llama:heads=4,kv_heads=2"]
    like = ["--to", "megatron", "--like", tmp_path / "first"]
    ended = zckpt("convert", tmp_path / "fsdp" / "dcp", back, *family, *like)
    assert ended.code == 0, ended.err
    likes.train(tmp_path, likes.case("end", pp=2, steps=3, load=str(back)))
    stopped = likes.losses(tmp_path, "fsdp") + likes.losses(tmp_path, "end")
    assert stopped == pytest.approx(likes.losses(tmp_path, "start")[3:], abs=1e-4)
    universal = tmp_path / "universal"
    assert zckpt("convert", tmp_path / "fsdp" / "dcp", universal, *family).code == 0
    state, steps = megatron.expected(tmp_path / "end")
    assert steps == {6}
    masters, moments = load_file(universal / "model.safetensors"), {}
    for slot in ("exp_avg", "exp_avg_sq"):
        moments[slot] = load_file(universal / f"{slot}.safetensors")
    for name, tensor in masters.items():
        assert torch.equal(state[f"{name}/master"], tensor), name
        for slot, tensors in moments.items():
            assert torch.equal(state[f"{name}/{slot}"], tensors[name]), name
