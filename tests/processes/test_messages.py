"""Messages that no process of zckpt sends: the store of a launch asks nobody who he is.

No message has a path. What leads to a file is a number of a list that each process has made itself,
or stands in a journal below DST.partial, whose length and CRC-32 are sent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import zckpt
from zckpt.copying import journals
from zckpt.errors import CorruptCheckpoint, ProcessFailed
from zckpt.processes import group as groups
from zckpt.processes import store as stores
from zckpt.processes.group import Group
from zckpt.processes.launcher import Launch as Launched
from zckpt.processes.sharing import Processes

from ..conftest import Result
from ..test_resume import files
from .conftest import Process
from .test_conversion import COPYING, SMALL, ended

Launch = Callable[..., list[Process]]


def first(values: Iterable[Any]) -> list[Any]:
    """The first value in the default run, all with `-m exhaustive`: each takes two processes."""
    return [
        pytest.param(v, marks=pytest.mark.exhaustive if n else ()) for n, v in enumerate(values)
    ]


def sends(value: Any, number: int) -> None:
    """The message with this number that this process sends is another one."""
    send = Group._send
    sent: list[Any] = []

    def changed(self: Group, key: str, own: Any) -> None:
        sent.append(own)
        send(self, key, value if len(sent) == number else own)

    Group._send = changed  # type: ignore[method-assign]


def refused(results: list[Result], *says: str, code: int = 1) -> None:
    """One process prints an error, and all end with its code."""
    assert [result.code for result in results] == [code] * len(results), results
    (said,) = [result.err for result in results if "Error: " in result.err]
    assert "a bug in zckpt" not in said
    for text in says:
        assert text in said


NO_JOURNAL = ["../mine", [1], ["../mine", 2], [-1, None], 7, {"a": 1}, True]


@pytest.mark.parametrize("value", NO_JOURNAL)
def test_a_beginning_that_cannot_be(
    value: Any, sources: dict[str, Path], tmp_path: Path, launch: Launch
) -> None:
    """The second message of rank 0: length and CRC-32 of its journal. Nothing else is touched."""
    (tmp_path / "mine").write_text("mine")
    before = files(tmp_path)
    words = ("convert", sources["dcp"], tmp_path / "new", *SMALL)
    results = ended(launch(2, *words, preparing={0: partial(sends, value, 2)}))
    refused(results, "is not a length and a CRC-32")
    after = {
        name: data
        for name, data in files(tmp_path).items()
        if not name.startswith(("output", "new.partial"))
    }
    assert after == before
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("value", first(NO_JOURNAL))
def test_an_end_that_cannot_be(
    value: Any, sources: dict[str, Path], tmp_path: Path, launch: Launch
) -> None:
    words = ("convert", sources["dcp"], tmp_path / "new", *SMALL)
    results = ended(launch(2, *words, preparing={1: partial(sends, value, 1)}))
    refused(results, "is not a length and a CRC-32")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("length", [1 << 60, -1, 3])
@pytest.mark.parametrize(("rank", "number"), [(0, 2), (1, 1)])
def test_a_journal_that_is_another_one(
    rank: int,
    number: int,
    length: int,
    sources: dict[str, Path],
    tmp_path: Path,
    launch: Launch,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its bytes may still come, so the other process waits for them; then it ends."""
    monkeypatch.setattr(journals, "VISIBLE", 0.3)
    words = ("convert", sources["dcp"], tmp_path / "new", *SMALL)
    results = ended(launch(2, *words, preparing={rank: partial(sends, [length, 0], number)}))
    refused(results, "does not contain what another process wrote there")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("value", first([["pass", 1 << 60], ["pass", 0], ["pass", "x"], 7, None]))
def test_a_pass_that_cannot_be(value: Any, sources: dict[str, Path], launch: Launch) -> None:
    """The first message of rank 0: how many bytes are read at a time."""
    results = ended(launch(2, "verify", sources["dcp"], preparing={0: partial(sends, value, 1)}))
    refused(results, "rank 0 carries out another command", code=2)


NOTHING: dict[str, Any] = {"tensors": [[]], "records": [[]], "differences": [], "bytes": 0}
"""What a process has found that got no block, of one tensor."""
RESULTS = [
    7,
    None,
    [1],
    [1, {}],
    ["x", NOTHING],
    [1, NOTHING | {"tensors": [["../mine", 0, 0]]}],
    [1, NOTHING | {"tensors": []}],
    [1, NOTHING | {"records": [[[1 << 60, 0, 1, 2]]]}],
    [1, NOTHING | {"records": [[[0, "x", 1, 2]]]}],
    [1, NOTHING | {"differences": [[0, ["x"]]]}],
    [1, NOTHING | {"bytes": "x"}],
]


@pytest.mark.parametrize("value", first(RESULTS))
@pytest.mark.parametrize(("rank", "number"), [(0, 3), (1, 1)])
def test_a_result_that_cannot_be(
    rank: int, number: int, value: Any, sources: dict[str, Path], launch: Launch
) -> None:
    """What rank 1 has found, or the sum that rank 0 sends back."""
    if rank == 0 and type(value) is list:
        value = value[1] if value[0] == 1 and len(value) > 1 else "x"
    words = ("verify", sources["dcp"], "--tensors", "embed.weight/param")
    results = ended(launch(2, *words, preparing={rank: partial(sends, value, number)}))
    if rank == 0:  # which has its own result, and reports it
        assert results[1].code == 1
        assert "it does not contain a result" in results[1].err
    else:
        refused(results, "it does not contain a result")


@pytest.mark.parametrize("value", first([7, {}, [1, "x", 0], [1, None, 1], [1, "x", 256], ["x"]]))
def test_a_failure_that_cannot_be(
    value: Any, sources: dict[str, Path], tmp_path: Path, launch: Launch
) -> None:
    def others() -> None:
        def fail(self: Group, _: BaseException) -> None:
            self.store.set(f"{self._name}failure", json.dumps(value))

        def refuse(*_: object) -> None:
            raise CorruptCheckpoint("file-damaged", "it says nothing of this")

        Group._fail = fail  # type: ignore[method-assign, assignment]
        Processes.agree_on = refuse  # type: ignore[method-assign, assignment]

    words = ("convert", sources["dcp"], tmp_path / "new", *SMALL)
    leader, _ = ended(launch(2, *words, preparing={1: others}))
    assert leader.code == 1
    assert "it does not describe a failure" in leader.err
    assert not (tmp_path / "new").exists()


# -- what a store may have, without processes


@pytest.fixture
def alone() -> Any:
    """Rank 1 of two, in a store that is this process's own."""
    with Group(Launched(0, 1)) as group:
        group.rank, group.size = 1, 2
        yield group
        group.rank, group.size = 0, 1


@pytest.mark.parametrize("count", ["0", "-1", "x", "", "1.5", "129", "9" * 5000, "../1"])
def test_a_message_of_impossible_parts(count: str, alone: Group) -> None:
    alone.store.set(f"{alone._name}1/parts", count)
    with pytest.raises(ProcessFailed, match=r"it has .* parts"):
        alone.share()


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "9" * 5000, "\0"])
def test_a_message_that_is_no_json(text: str, alone: Group) -> None:
    alone.store.set(f"{alone._name}1/part/0", text)
    alone.store.set(f"{alone._name}1/parts", "1")
    with pytest.raises(ProcessFailed, match="it is no JSON"):
        alone.share()


def test_a_value_that_is_too_long(alone: Group) -> None:
    alone.store.set(f"{alone._name}1/part/0", " " * (stores.VALUE + 1))
    alone.store.set(f"{alone._name}1/parts", "1")
    with pytest.raises(ProcessFailed, match=f"it has {stores.VALUE + 1} bytes"):
        alone.share()


@pytest.mark.parametrize("count", [-1, -(1 << 62)])
def test_a_counter_that_somebody_lowers(count: int, alone: Group) -> None:
    number = alone.counter()
    alone.store.add(f"{alone._name}1", count)
    with pytest.raises(ProcessFailed, match="a counter is"):
        number()


@pytest.mark.parametrize("text", ["", "../../../../name", "x" * 17, "x" * 1000, "a/b" * 6, "\xff"])
def test_a_name_that_is_none(text: str) -> None:
    with pytest.raises(ProcessFailed, match="is no name"):
        groups._word(text.encode())


def test_a_long_message_comes_in_parts(alone: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "VALUE", 1000)
    value = [*range(20_000)]
    alone._send("zckpt", value)
    assert int(alone.store.get("zckpt/parts")) > 100
    assert alone._received("zckpt", 0) == value
    with pytest.raises(zckpt.errors.UnsupportedCheckpoint, match=r"would have .* bytes") as caught:
        alone._send("zckpt", [*range(40_000)])
    assert "--part" in caught.value.hint


def test_the_real_messages_pass(sources: dict[str, Path], tmp_path: Path, launch: Launch) -> None:
    """The path of a source may lead through a link."""
    (tmp_path / "link").symlink_to(sources["zero-3"])
    results = ended(launch(2, "convert", tmp_path / "link", tmp_path / "new", *SMALL))
    assert [result.code for result in results] == [0, 0]
    zckpt.convert(sources["zero-3"], tmp_path / "single", copying=COPYING)
    assert files(tmp_path / "new") == files(tmp_path / "single")
