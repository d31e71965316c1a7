"""Which step is true where files or ranks state several."""

from __future__ import annotations

import pytest

from zckpt.core.checkpoint.agreement import KEEP, agree, need_one_save, need_whole
from zckpt.errors import InconsistentCheckpoint

SAME = [("a", 3), ("b", 3)]
OTHER = [("a", 3), ("b", 4), ("c", 3)]


def test_what_all_state_needs_no_policy() -> None:
    assert agree([], policy=None) is None
    for policy in (None, KEEP, "max", "7"):
        assert agree(SAME, policy) == 3


@pytest.mark.parametrize(("policy", "step"), [("max", 4), ("min", 3), ("7", 7)])
def test_a_policy_decides(policy: str, step: int) -> None:
    assert agree(OTHER, policy) == step


@pytest.mark.parametrize("policy", [None, KEEP])
def test_each_step_is_said_with_its_places(policy: str | None) -> None:
    with pytest.raises(InconsistentCheckpoint) as caught:
        agree(OTHER, policy)
    assert caught.value.message == "the optimizer's step differs: 3 (a, c), 4 (b)"


def test_a_step_is_a_whole_number_unless_a_policy_decides() -> None:
    need_whole([("a", 3.0)])
    with pytest.raises(InconsistentCheckpoint, match=r"step is 2\.5, not a whole number .*: b"):
        agree([("a", 3), ("b", 2.5)], policy=None)
    assert agree([("a", 2.5)], KEEP) == 2.5
    assert agree([("a", 3), ("b", 2.5)], "max") == 3


# -- files of one save


def test_files_of_two_saves_are_refused() -> None:
    """Each states one step, whichever file has the later one."""
    need_one_save([], None)
    need_one_save([("run/x/a", 3), ("run/x/a", 3), ("run/b", 3)], None)
    stated = [("run/x/a", 3), ("run/x/a", 3), ("run/b", 4)]
    with pytest.raises(InconsistentCheckpoint) as caught:
        need_one_save(stated, None)
    assert caught.value.message == "run: the files state different steps: 3 (x/a), 4 (b)"
    with pytest.raises(InconsistentCheckpoint, match=r"^\.: the files state"):
        need_one_save([("a", 3), ("b", 4)], None)
    with pytest.raises(InconsistentCheckpoint, match=r"steps: 3 \(a, c\), 4 \(b\)$"):
        need_one_save([("run/c", 3), ("run/b", 4), ("run/a", 3)], None)
    need_one_save(stated, "max")
    need_one_save(stated, KEEP)


def test_a_file_with_several_steps_shows_nothing() -> None:
    """Its layers were not updated equally often."""
    need_one_save([("a", 3), ("a", 4), ("b", 4)], None)
    need_one_save([("b", 4), ("a", 3), ("a", 4)], None)
