"""Messages that no process of zckpt sends: the store of a launch asks nobody who he is."""

from __future__ import annotations

import pickle
import shutil
import tracemalloc
import zlib
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

import zckpt
from zckpt.copying.sharing import Work
from zckpt.core.fragments import Extent, Runs
from zckpt.errors import CorruptCheckpoint
from zckpt.nodes import handover
from zckpt.nodes.conversion import Member
from zckpt.nodes.group import Group

from ..conftest import Result
from ..test_resume import files
from .conftest import Process
from .test_conversion import COPYING, SMALL, TARGETS, ended

Launch = Callable[..., list[Process]]


def sends(change: Callable[[Any], Any], before: bytes = b"", after: bytes = b"") -> None:
    """What this process sends is changed; so is a text in it, whose length stays."""
    assert len(before) == len(after)

    def changed(value: Any) -> bytes:
        text = pickle.dumps(change(value), protocol=5)
        return zlib.compress(text.replace(before, after) if before else text, 1)

    handover.to_bytes = changed


def same(value: Any) -> Any:
    return value


def first(values: Iterable[Any]) -> list[Any]:
    """The first value in the default run, all with `-m exhaustive`: each takes two processes."""
    return [
        pytest.param(v, marks=pytest.mark.exhaustive if n else ()) for n, v in enumerate(values)
    ]


def refused(results: list[Result], *says: str) -> None:
    """One process prints an error, and all end with its code."""
    assert [result.code for result in results] == [1] * len(results), results
    (said,) = [result.err for result in results if "Error: " in result.err]
    assert "a bug of zckpt" not in said
    for text in says:
        assert text in said


@pytest.mark.parametrize("target", first(["universal", "gathered", "zero-3"]))
def test_files_beside_partial_are_not_written(
    target: str, sources: dict[str, Path], tmp_path: Path, launch: Launch
) -> None:
    """Rank 0 calls the directory of the target's files `o1.partial/..`."""
    words, options = TARGETS[target]
    zckpt.convert(sources["dcp"], tmp_path / "mine", **options)
    for path in files(tmp_path / "mine"):  # the files that would be written
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_bytes(b"mine" * 2_000_000)
    before = files(tmp_path)
    others = partial(sends, same, b"/o1.partial/o1", b"/o1.partial/..")
    results = ended(
        launch(2, "convert", sources["dcp"], tmp_path / "o1", *words, *SMALL, preparing={0: others})
    )
    refused(results, "is not below")
    after = {name: data for name, data in files(tmp_path).items() if "output" not in name}
    assert after == before


def without_fingerprints(work: Any) -> Any:
    return handover.with_manifests(work, unseen) if hasattr(work, "manifests") else unseen_of(work)


def unseen(manifest: Any) -> Any:
    return replace(manifest, fingerprints={}, records=())


def unseen_of(work: Work) -> Work:
    return replace(work, source=unseen(work.source))


@pytest.mark.parametrize(
    ("command", "source"),
    [
        ("convert", "zero-3"),
        ("verify", "dcp"),
        pytest.param("stats", "universal", marks=pytest.mark.exhaustive),
        pytest.param("convert", "dcp", marks=pytest.mark.exhaustive),
        pytest.param("convert", "universal", marks=pytest.mark.exhaustive),
    ],
)
def test_other_sources_are_not_read(
    command: str, source: str, sources: dict[str, Path], tmp_path: Path, launch: Launch
) -> None:
    for name in ("mine", "his_"):
        shutil.copytree(sources[source], tmp_path / name)
    names = f"{tmp_path}/mine/".encode(), f"{tmp_path}/his_/".encode()
    others = partial(sends, without_fingerprints, *names)
    words = (tmp_path / "new", *SMALL) if command == "convert" else ()
    results = ended(launch(2, command, tmp_path / "mine", *words, preparing={0: others}))
    refused(results, f"{tmp_path}/his_/", f"is not in {tmp_path}/mine/")
    assert not list(tmp_path.glob("new*"))


def elsewhere(work: Any, path: str) -> Any:
    """The entries of a pass, and not those of its manifests, lie in another file."""

    def moved(entry: Any) -> Any:
        fragments = [replace(item, extent=Extent(path, 0, 4)) for item in entry.fragments]
        return replace(entry, fragments=Runs(fragments))

    if hasattr(work, "matches"):
        matches = [replace(match, a=moved(match.a)) for match in work.matches]
        return replace(work, matches=matches)
    return replace(work, entries=[moved(entry) for entry in work.entries])


@pytest.mark.parametrize("command", ["verify", "stats"])
def test_other_sources_are_not_read_for_an_entry(
    command: str, sources: dict[str, Path], tmp_path: Path, launch: Launch
) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(bytes(1 << 20))
    others = partial(sends, partial(elsewhere, path=str(secret)))
    results = ended(launch(2, command, sources["dcp"], preparing={0: others}))
    refused(results, f"{secret} is not in {sources['dcp']}/")


def with_size(work: Work, size: Any) -> Work:
    files = dict.fromkeys(work.identity.files, size)
    return replace(work, identity=replace(work.identity, files=files))


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "large files": (partial(with_size, size=1 << 50), "1125899906842624"),
    "small files": (partial(with_size, size=10), "bytes, and not 10"),
    "negative sizes": (partial(with_size, size=-1), "bytes, and not -1"),
    "no sizes": (partial(with_size, size="x"), "cannot be read"),
    "no files": (lambda work: replace(work, identity=replace(work.identity, files={})), "KeyError"),
    "a large chunk": (lambda work: replace(work, chunk=1 << 60), "cannot be copied at a time"),
    "no chunk": (lambda work: replace(work, chunk=0), "cannot be copied at a time"),
    "a chunk of text": (lambda work: replace(work, chunk="x"), "cannot be copied at a time"),
    "no source": (lambda work: replace(work, source=None), "cannot be read"),
    "no shells": (lambda work: replace(work, shells=None), "cannot be read"),
    "another thing": (lambda work: work.source, "it is no conversion"),
    "nothing": (lambda work: None, "it is no conversion"),
}


@pytest.mark.parametrize("name", first(CHANGES))
def test_a_conversion_that_cannot_be(
    name: str, sources: dict[str, Path], tmp_path: Path, launch: Launch
) -> None:
    change, says = CHANGES[name]
    words = ("convert", sources["dcp"], tmp_path / "new", *SMALL)
    refused(ended(launch(2, *words, preparing={0: partial(sends, change)})), says)
    assert [path.name for path in tmp_path.iterdir()] == ["output"]


@pytest.mark.parametrize("count", first([1 << 60, -1, "x", None, 1.5, True]))
def test_a_message_of_impossible_parts(
    count: Any, sources: dict[str, Path], tmp_path: Path, launch: Launch
) -> None:
    def others() -> None:
        def send(self: Group, key: str, _: bytes) -> None:
            self.publish(key, count)

        Group.send = send  # type: ignore

    words = ("convert", sources["dcp"], tmp_path / "new", *SMALL)
    refused(ended(launch(2, *words, preparing={0: others})), "parts")
    assert [path.name for path in tmp_path.iterdir()] == ["output"]


@pytest.mark.parametrize("value", first([["x", 2], 7, [1], None, {"a": 1}]))
def test_an_end_that_cannot_be(
    value: Any, sources: dict[str, Path], tmp_path: Path, launch: Launch
) -> None:
    def others() -> None:
        def end(self: Member, _: BaseException | None) -> None:
            self.group.publish(f"done/{self.group.rank}", value)

        Member.end = end  # type: ignore

    words = ("convert", sources["dcp"], tmp_path / "new", *SMALL)
    refused(ended(launch(2, *words, preparing={1: others})), "is no length and CRC-32")
    assert [path.name for path in tmp_path.iterdir()] == ["output"]


def test_an_end_of_more_bytes_than_there_are(
    sources: dict[str, Path], tmp_path: Path, launch: Launch
) -> None:
    """They may come, so rank 0 waits for them."""

    def others() -> None:
        def end(self: Member, _: BaseException | None) -> None:
            self.group.publish(f"done/{self.group.rank}", (1 << 60, 0))

        Member.end = end  # type: ignore

    def hurry() -> None:
        from zckpt.nodes import conversion

        conversion.VISIBLE = 0.5

    words = ("convert", sources["dcp"], tmp_path / "new", *SMALL)
    results = ended(launch(2, *words, preparing={0: hurry, 1: others}))
    refused(results, "has not the journal that rank 1 wrote there")


FAILURE = {"rank": 1, "message": "x", "hint": "y", "code": 1, "keeps": False}


FAILURES = [{}, 7, {**FAILURE, "more": 1}, {**FAILURE, "code": 0}, {**FAILURE, "message": None}]


@pytest.mark.parametrize("value", first(FAILURES))
def test_a_failure_that_cannot_be(
    value: Any, sources: dict[str, Path], tmp_path: Path, launch: Launch
) -> None:
    def others() -> None:
        from zckpt.nodes import group

        def fail(self: Group, _: BaseException) -> bool:
            self.publish("failure", value)
            return True

        def refuse(*_: object) -> None:
            raise CorruptCheckpoint("it says nothing of this")

        Group.fail = fail  # type: ignore
        group.Group.agree = refuse  # type: ignore

    words = ("convert", sources["dcp"], tmp_path / "new", *SMALL)
    leader, _ = ended(launch(2, *words, preparing={1: others}))
    assert leader.code == 1
    assert "it is no failure" in leader.err
    assert [path.name for path in tmp_path.iterdir()] == ["output"]


def test_a_result_that_cannot_be(sources: dict[str, Path], tmp_path: Path, launch: Launch) -> None:
    others = partial(sends, lambda value: ["x", None] if isinstance(value, tuple) else value)
    refused(ended(launch(2, "stats", sources["dcp"], preparing={1: others})), "is no result")


def test_a_message_is_not_inflated_without_end() -> None:
    """Two megabytes that would become half a gigabyte."""
    data = zlib.compress(bytes(512 << 20), 1)
    assert len(data) < 3 << 20
    tracemalloc.start()
    try:
        with pytest.raises(CorruptCheckpoint, match="longer than"):
            handover.from_bytes(data)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 3 * handover.MAX_RATIO * len(data)


@pytest.mark.parametrize("size", [handover.ANY_SIZE - 64, handover.ANY_SIZE])
def test_every_message_may_have_some_bytes(size: int) -> None:
    """However well it is compressed."""
    value = bytes(size)
    if size < handover.ANY_SIZE:
        assert handover.from_bytes(handover.to_bytes(value)) == value
    else:  # with what a pickle has around it, it is longer
        with pytest.raises(CorruptCheckpoint):
            handover.from_bytes(handover.to_bytes(value))


def test_a_description_that_is_too_long_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "MAX_SIZE", 1000)
    with pytest.raises(zckpt.errors.UnsupportedCheckpoint, match=r"has 20.. bytes") as caught:
        handover.to_bytes(bytes(2000))
    assert "--part" in caught.value.hint


def test_the_real_messages_pass(sources: dict[str, Path], tmp_path: Path, launch: Launch) -> None:
    """The path of a source may lead through a link."""
    (tmp_path / "link").symlink_to(sources["zero-3"])
    results = ended(launch(2, "convert", tmp_path / "link", tmp_path / "new", *SMALL))
    assert [result.code for result in results] == [0, 0]
    zckpt.convert(sources["zero-3"], tmp_path / "single", copying=COPYING)
    assert files(tmp_path / "new") == files(tmp_path / "single")
