"""The next program's scheduler goes on where the source has stopped, as real DeepSpeed judges."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

import zckpt
from zckpt.core.checkpoint.facts import FlatBufferEngine, StateDictEngine
from zckpt.core.checkpoint.inert import TensorName
from zckpt.core.checkpoint.manifest import Manifest
from zckpt.formats import schedulers as of_programs
from zckpt.formats.deepspeed_states import schedulers

from ...conftest import EXAMPLE, ROOT, Once, texts
from ...engines.deepspeed import EngineError, submit
from ...engines.scheduled_rank import PARAMS, TORCH, configuration

RANKS = 2
UPDATES = 4


@pytest.fixture
def sources(once: Once) -> Path:
    """A folder for each scheduler, with what FSDP2 has saved as source/."""

    def train(root: Path) -> Path:
        submit("scheduled_rank", "train", RANKS, (RANKS, root.resolve()), root)
        return root

    return once("scheduled", "fsdp2", train)


def state_in(run: Path) -> Any:
    return zckpt.read(run).state["lr_scheduler"]


def goes_on(sources: Path, tmp_path: Path) -> None:
    submit("scheduled_rank", "resume", RANKS, (RANKS, tmp_path.resolve(), 2), tmp_path)


@pytest.mark.engines
@pytest.mark.first
def test_fsdp_to_deepspeed(sources: Path, tmp_path: Path) -> None:
    """With the defaults of load_checkpoint, every rate and loss is that of the source's run."""
    for name in (*PARAMS, TORCH):
        shutil.copytree(sources / name, tmp_path / name)
        source, run = tmp_path / name / "source", tmp_path / name / "run"
        report = zckpt.convert(
            source, run, to="deepspeed", dp=RANKS, stage=2, config=configuration(name, 2)
        )
        said = [line for line in report["warnings"] if line["subject"] == "lr_scheduler"]
        state = state_in(run)
        if name == TORCH:
            assert (state["last_epoch"], said) == (UPDATES, [])
        else:
            assert state == {"last_batch_iteration": UPDATES - 1}
            assert [line["code"] for line in said] == ["value-assumed"]
            assert f"the ds_config's {name} is set to 4 updates" in texts(said)[0]
        assert zckpt.verify(run, source)["equal"]
    goes_on(sources, tmp_path)
    # and the judge can tell: a schedule that is one update behind has other rates
    name = "WarmupLR"
    path = tmp_path / name / "run" / f"global_step{UPDATES}" / "mp_rank_00_model_states.pt"
    model = torch.load(path, weights_only=False)
    torch.save({**model, "lr_scheduler": {"last_batch_iteration": UPDATES - 2}}, path)
    with pytest.raises(EngineError, match=name):
        goes_on(sources, tmp_path)


# -- what is decided, without an engine

COUNTED = {"last_batch_iteration": 5}
OF_TORCH = {"last_epoch": 7, "_step_count": 8}
STEP = 7
"""Of the example, whose program had a scheduler of torch's kind."""
PLAIN = StateDictEngine("plain", None, (), None, None, None, None, False, False)


def source(state: Any, named: str | None = None, is_deepspeed: bool = True) -> Manifest:
    """The example with another state, and a ds_config that names another scheduler."""
    example = zckpt.read(EXAMPLE)
    engine = example.run.engine
    assert isinstance(engine, FlatBufferEngine)
    config = {} if named is None else {"scheduler": {"type": named}}
    engine = replace(engine, config=config)
    example = replace(example, state={**example.state, "lr_scheduler": state})
    return example.replace(engine=engine if is_deepspeed else PLAIN)


KEPT, COMPUTED, LACKING = [], ["value-assumed"], ["program-does-not-fit"]


@pytest.mark.parametrize(
    ("own", "before", "name", "state", "codes"),
    [
        (COUNTED, "WarmupLR", "WarmupLR", COUNTED, KEPT),
        (COUNTED, None, "WarmupLR", COUNTED, KEPT),  # the program made it itself
        (COUNTED, "WarmupLR", None, COUNTED, KEPT),
        (OF_TORCH, "WarmupLR", "WarmupLR", OF_TORCH, KEPT),  # the program's own in its place
        (OF_TORCH, None, "StepLR", OF_TORCH, KEPT),
        (OF_TORCH, None, None, OF_TORCH, KEPT),
        (None, None, None, None, KEPT),
        *(
            (own, before, name, {"last_batch_iteration": STEP - 1}, COMPUTED)
            for own, before in ((None, None), (OF_TORCH, None), (COUNTED, "OneCycleLR"))
            for name in PARAMS
        ),
        (None, None, "StepLR", None, LACKING),
        (COUNTED, "WarmupLR", "StepLR", COUNTED, LACKING),
    ],
)
def test_which_state(
    own: Any, before: str | None, name: str | None, state: Any, codes: Any
) -> None:
    decided = schedulers.decide(source(own, before), name)
    assert decided.state == state
    assert [line.code for line in decided.notices] == codes
    assert decided.is_lacking == (codes == LACKING)
    if codes == LACKING:
        assert "load_lr_scheduler_states=False" in decided.notices[0].hint


def test_no_file_says_how_many_updates() -> None:
    """Counters of the engine stand in for the step of SGD, and skipped updates are none."""
    sgd = source(None, is_deepspeed=False)
    sgd = replace(sgd, parameters={n: replace(p, step=None) for n, p in sgd.parameters.items()})
    counted = {"global_steps": 9, "skipped_steps": 2}
    own = replace(sgd, state={**sgd.state, "counters": counted})
    assert schedulers.decide(own, "WarmupLR").state == {"last_batch_iteration": 6}
    without = replace(sgd, state={})
    assert schedulers.decide(without, "WarmupLR").is_lacking
    own = replace(sgd, state={"lr_scheduler": COUNTED})
    assert schedulers.updates(own) == 6


def test_a_program_may_give_a_scheduler_that_no_file_names() -> None:
    (line,) = schedulers.decide(source(None, is_deepspeed=False), None).notices
    assert (line.code, line.subject) == ("program-must-set", "lr_scheduler")
    assert "load_lr_scheduler_states=False" in line.message


def test_where_programs_keep_theirs() -> None:
    def found(**client_state: Any) -> Any:
        own = source(None, is_deepspeed=False)
        own = replace(own, state={**own.state, "client_state": client_state})
        return of_programs.with_programs(own).state["lr_scheduler"]

    assert found(app={"lr_scheduler": OF_TORCH}) == OF_TORCH
    assert found(state={"inner": {"scheduler": OF_TORCH}}) == OF_TORCH
    assert found(app={"lr_scheduler": OF_TORCH}, other={"sched": {"last_epoch": 1}}) is None
    assert found(app={"lr_scheduler": {"steps": 3}}) is None
    assert found(app={"numbers": OF_TORCH}) is None
    assert found(app={"sched": {**OF_TORCH, "_last_lr": [TensorName("app.sched.lr")]}}) is None


def test_the_file_of_a_trainer(tmp_path: Path) -> None:
    """DeepSpeed gets it from another engine, and a Trainer's own run of DeepSpeed goes on."""
    trainer = ROOT / "examples" / "trainer" / "checkpoint-4"
    expected = torch.load(trainer / "scheduler.pt")
    own = zckpt.read(trainer)
    assert of_programs.with_programs(own) is own
    zckpt.convert(trainer, tmp_path / "torch", to="gathered", dialect="safetensors")
    source, run = tmp_path / "torch", tmp_path / "run"
    report = zckpt.convert(source, run, to="deepspeed")
    assert zckpt.read(run).state["lr_scheduler"] == expected
    assert zckpt.verify(run, source)["equal"]
    assert not [line for line in report["warnings"] if line["subject"] == "lr_scheduler"]
