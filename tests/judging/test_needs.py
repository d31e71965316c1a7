"""The table of files that programs need: its rows, its page, and what a name says."""

from __future__ import annotations

import re

import pytest

from zckpt.core.storage.inventory import parse_name
from zckpt.training import needs

from .. import needs_page
from ..conftest import ROOT

EVERY = [need for rows in needs.NEEDS.values() for need in rows]


def test_the_page_is_made_of_the_table() -> None:
    assert (ROOT / "docs" / "resume-files.md").read_text() == needs_page.page(), (
        "run `python -m tests.needs_page > docs/resume-files.md`"
    )


def test_every_row_names_a_file_of_its_role() -> None:
    for need in EVERY:
        own = parse_name(needs.ROLES, need.name)
        assert own is not None
        assert own.role is need.role
    assert {*needs.NEEDS} == {*needs.VERSIONS}


def test_what_is_unread_is_never_needed() -> None:
    for need in EVERY:
        if need.missing == "unread":
            assert need.damaged == "unread"


@pytest.mark.parametrize(
    ("name", "role", "rank"),
    [
        ("scheduler.pt", "scheduler", ()),
        ("scheduler_1.bin", "scheduler", (("model", 1),)),
        ("rng_state.pth", "random state", ()),
        ("rng_state_12.pth", "random state", (("rank", 12),)),
        ("random_states_3.pkl", "random state", (("rank", 3),)),
        ("rng/rng_global_rank_1.pt", "random state", (("rank", 1),)),
        ("model-00001-of-00002.safetensors", "weights", ()),
        ("huggingface/config.json", "configuration", ()),
        ("tokenizer.json", "tokenizer", ()),
    ],
)
def test_names(name: str, role: str, rank: tuple[tuple[str, int], ...]) -> None:
    own = parse_name(needs.ROLES, name)
    assert own is not None
    assert (own.role.name, own.rank) == (role, rank)


def test_other_names_say_nothing() -> None:
    for name in ("notes.txt", "my_scheduler.pt.bak", "xrng_state_1.pth"):
        assert parse_name(needs.ROLES, name) is None


def test_functions_are_names() -> None:
    assert all(re.fullmatch(r"[\w.]+", need.read_by) for need in EVERY)
