"""A run goes on without a copy: a directory of names, which no command takes for a checkpoint."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import zckpt as package
from zckpt.core.storage.marks import is_marked
from zckpt.core.storage.names_alone import NAMES, note_of, source_of
from zckpt.errors import UnsupportedCheckpoint, WrongOption
from zckpt.loading import hook
from zckpt.resume import cache

from ..conftest import ROOT, Result
from ..test_resume import files
from .conftest import BESIDE, flip, original, snapshot

TRAINER = ROOT / "examples/trainer/checkpoint-4"
PIPELINE = ROOT / "tests/data/zckpt-0.1-pp2_tp2/run"
STATES = "_states.pt"
Calls = list[tuple[Any, ...]]


class Engine:
    """An engine whose loader says what it is given."""

    def load_checkpoint(
        self, load_dir: Any, tag: Any = None, load_module_strict: bool = True
    ) -> Any:
        return "the engine's own", load_dir, tag


@pytest.fixture(autouse=True)
def deepspeed(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A module in the place of DeepSpeed, which takes seconds to import."""
    names = ("deepspeed", "deepspeed.runtime", "deepspeed.runtime.engine")
    modules = {name: ModuleType(name) for name in names}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    vars(modules["deepspeed"])["__version__"] = "0.19.8+cpu"
    vars(modules["deepspeed.runtime.engine"])["DeepSpeedEngine"] = Engine
    monkeypatch.setattr(Engine, "load_checkpoint", Engine.load_checkpoint)
    yield modules["deepspeed"]
    package.deepspeed.undo()


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """The loads without a copy that the engine's loader was replaced with."""
    calls: Calls = []

    def load(*about: Any, **words: Any) -> Any:
        calls.append((*about[1:], words))
        return "without a copy", {}

    monkeypatch.setattr(hook, "load", load)
    return calls


@pytest.fixture
def trainer(tmp_path: Path) -> Path:
    """A run of a Trainer on two ranks."""
    shutil.copytree(TRAINER, tmp_path / "out" / TRAINER.name)
    return tmp_path / "out"


def resume(run: Path, **words: Any) -> Any:
    return package.auto_resume(run, copy=False, single=True, tell=lambda lines: None, **words)


def test_it_has_names_and_the_trainers_files(trainer: Path) -> None:
    before, copy = original(trainer), trainer.parent / "copy"
    path = resume(trainer, dp=3)
    assert path == str(trainer / BESIDE / "checkpoint-4-dp3-names")
    assert (path.report["names"], path.report["written"], path.report["bytes"]) == (True, False, 0)
    assert path.step == 4
    assert original(trainer) == before
    package.reshard(trainer / TRAINER.name, copy, dp=3)
    whole, names = files(copy), files(Path(path))
    assert names.pop(NAMES) == note_of(str(trainer / TRAINER.name), None)
    assert whole.pop("model.safetensors")  # no program of DeepSpeed loads it
    assert sorted(names) == sorted(whole)
    for name, data in names.items():
        assert data == (b"" if name.endswith(STATES) else whole[name]), name
    assert is_marked(path)


def test_files_without_a_tensor_are_empty_too(trainer: Path) -> None:
    path = resume(trainer, dp=3, stage=3)
    sizes = {file.name: file.stat().st_size for file in Path(path).rglob(f"*{STATES}")}
    assert len(sizes) == 6
    assert not any(sizes.values())


def test_files_that_a_target_has_otherwise_are_complete(trainer: Path) -> None:
    """The path of the best checkpoint is that of the target."""
    state = trainer / TRAINER.name / "trainer_state.json"
    document = json.loads(state.read_text())
    state.write_text(json.dumps({**document, "best_model_checkpoint": str(state.parent)}))
    path = resume(trainer, dp=3)
    written = json.loads(Path(path, state.name).read_text())
    assert written == {**document, "best_model_checkpoint": str(path)}


def test_the_next_start_finds_it(trainer: Path) -> None:
    path = resume(trainer, dp=3)
    seen = snapshot(trainer)
    again = resume(trainer, dp=3)
    assert (str(again), again.report["removed"], snapshot(trainer)) == (str(path), [], seen)


def test_of_a_source_that_has_changed_it_is_made_anew(trainer: Path) -> None:
    path = resume(trainer, dp=3)
    state = trainer / TRAINER.name / "trainer_state.json"
    state.write_text(state.read_text().replace('"epoch"', '"epoch" '))
    cache.let_go(str(path))  # as when the process has ended
    again = resume(trainer, dp=3)
    assert (str(again), again.report["removed"]) == (str(path), [str(path)])
    assert Path(again, state.name).read_bytes() == state.read_bytes()


def test_it_makes_way_for_others_as_a_copy_does(trainer: Path) -> None:
    path = resume(trainer, dp=3)
    cache.let_go(str(path))
    again = resume(trainer, dp=4, keep=0)
    assert again.report["removed"] == [str(path)]
    assert not os.path.lexists(path)


def test_at_the_same_size_it_is_the_checkpoint(trainer: Path) -> None:
    path = resume(trainer, dp=2)
    assert (str(path), path.report["names"]) == (str(trainer / TRAINER.name), False)
    assert not (trainer / BESIDE).exists()


def test_a_damaged_checkpoint_is_set_aside(trainer: Path) -> None:
    shutil.copytree(trainer / TRAINER.name, trainer / "checkpoint-6")
    state = trainer / "checkpoint-6" / "trainer_state.json"
    state.write_text(state.read_text().replace('"global_step": 4', '"global_step": 6'))
    flip(next((trainer / "checkpoint-6").rglob(f"*optim{STATES}")))
    path = resume(trainer, dp=3)
    assert [Path(each["path"]).name for each in path.report["left_aside"]] == ["checkpoint-6"]
    assert source_of(path) == str(trainer / TRAINER.name)


def test_the_log_says_what_is_resumed(trainer: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "zckpt"):
        path = resume(trainer, dp=3)
    assert f"without a copy for dp 3: {path}" in caplog.text


@pytest.mark.parametrize("command", ["inspect", "verify", "list", "check", "stats"])
@pytest.mark.parametrize("inside", ["", "global_step4"])
def test_no_command_takes_it_for_a_checkpoint(
    command: str, inside: str, trainer: Path, zckpt: Callable[..., Result]
) -> None:
    path, source = resume(trainer, dp=3), str(trainer / TRAINER.name)
    ended = zckpt(command, os.path.join(path, inside), "--json")
    said = ended.document
    assert (ended.code, said["code"], said["error"]) == (1, "names-alone", "UnsupportedCheckpoint")
    assert source in said["message"]
    assert said["hint"] == f"use {source} instead"


def test_no_function_takes_it_for_a_checkpoint(trainer: Path, tmp_path: Path) -> None:
    path = resume(trainer, dp=3)
    target = tmp_path / "target"
    for ask in (
        lambda: package.convert(path, target),
        lambda: package.reshard(path, target, dp=2),
        lambda: package.mend(path, target),
        lambda: package.verify(trainer / TRAINER.name, path),
        lambda: package.auto_resume(path, single=True),
        lambda: package.dcp.StorageReader(path).read_metadata(),
        lambda: Engine().load_checkpoint(f"{path}/global_step4"),
    ):
        with pytest.raises(UnsupportedCheckpoint) as error:
            ask()
        assert error.value.code == "names-alone"
    assert not target.exists()


def test_a_report_says_so(trainer: Path, zckpt: Callable[..., Result]) -> None:
    path = resume(trainer, dp=3)
    ended = zckpt("report", path, "--output", trainer / "page.html")
    assert "names-alone" in ended.out + ended.err
    assert str(trainer / TRAINER.name) in ended.out + ended.err


def test_a_list_of_such_directories_calls_none_damaged(
    trainer: Path, zckpt: Callable[..., Result]
) -> None:
    resume(trainer, dp=3)
    (row,) = zckpt("list", trainer / BESIDE, "--json").document["checkpoints"]
    assert [row[key] for key in ("whole", "of_one_save", "loads")] == [None, None, None]
    assert [each["code"] for each in row["problems"]] == ["names-alone"]


def test_a_note_above_a_checkpoint_counts_only_in_a_directory_of_zckpt(
    tmp_path: Path, zckpt: Callable[..., Result]
) -> None:
    """Anybody may write a file of this name into a directory that many share, such as /tmp."""
    shutil.copytree(TRAINER, tmp_path / "run" / TRAINER.name)
    (tmp_path / NAMES).write_bytes(note_of("/elsewhere", None))
    assert source_of(str(tmp_path)) == "/elsewhere"
    assert source_of(str(tmp_path / "run")) is None
    assert zckpt("verify", tmp_path / "run" / TRAINER.name).code == 0


def test_a_note_that_is_none_names_no_source(tmp_path: Path) -> None:
    for data in (b"", b"[]", b"{}", b'{"source": 3}', b"\xff"):
        (tmp_path / NAMES).write_bytes(data)
        assert source_of(str(tmp_path)) == ""
    with pytest.raises(UnsupportedCheckpoint):
        package.read(tmp_path)


class TestTheEnginesLoader:
    def test_it_loads_the_source(self, trainer: Path, loads: Calls) -> None:
        path = resume(trainer, dp=3, accept_weights=True)
        assert Engine().load_checkpoint(str(path), load_module_strict=False) == (
            "without a copy",
            {},
        )
        Engine().load_checkpoint(load_dir=path, tag="global_step4")
        source, words = str(trainer / TRAINER.name), {"dp": 3, "accept_weights": True}
        assert loads == [
            (source, None, {"load_module_strict": False}, words),
            (source, None, {}, words),
        ]

    def test_all_other_paths_are_the_engines_own(self, trainer: Path, loads: Calls) -> None:
        path = resume(trainer, dp=3)
        for about in ((str(trainer), "checkpoint-4"), (str(path), "global_step9")):
            assert Engine().load_checkpoint(*about) == ("the engine's own", *about)
        assert loads == []

    def test_undo(self, trainer: Path, loads: Calls) -> None:
        original = Engine.load_checkpoint
        path = resume(trainer, dp=3)
        assert Engine.load_checkpoint is not original
        resume(trainer, dp=4)
        package.deepspeed.undo()
        assert Engine.load_checkpoint is original
        package.deepspeed.undo()
        resume(trainer, dp=4)
        with pytest.raises(UnsupportedCheckpoint):  # nobody has asked for it since
            Engine().load_checkpoint(str(path))


class TestRefusals:
    def test_another_version(self, deepspeed: ModuleType, trainer: Path) -> None:
        deepspeed.__version__ = "0.20.0"
        with pytest.raises(WrongOption, match=r"0\.20\.0") as error:
            resume(trainer, dp=3)
        assert error.value.code == "load-unsupported"
        assert "zckpt.auto_resume" in error.value.hint
        assert not (trainer / BESIDE).exists()

    def test_without_deepspeed(self, trainer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "deepspeed", None)
        with pytest.raises(package.ZckptError) as error:
            resume(trainer, dp=3)
        assert error.value.code == "extra-missing"

    def test_another_engine(self, tmp_path: Path) -> None:
        shutil.copytree(ROOT / "tests/data/onnxruntime/hdf5__fp16__adam__dp3", tmp_path / "run")
        with pytest.raises(WrongOption, match="onnxruntime") as error:
            resume(tmp_path / "run", dp=2)
        assert error.value.code == "load-unsupported"

    def test_ranks_that_share_a_model(self, tmp_path: Path) -> None:
        shutil.copytree(PIPELINE, tmp_path / "run")
        with pytest.raises(WrongOption, match="tensor, pipeline or expert parallelism") as error:
            resume(tmp_path / "run", dp=2)
        assert error.value.code == "load-unsupported"
