"""The steps of a conversion with a format of one file, and with one that fails at each of them."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from zckpt.copying import convert as steps
from zckpt.copying.convert import Seal, convert, files_of, memory_of, naming_full_disk, take_part
from zckpt.copying.journal import Identity
from zckpt.copying.sharing import Part, Sharing
from zckpt.copying.staging import Staging
from zckpt.core.checkpoint.entries import Entry
from zckpt.core.checkpoint.manifest import Files, Manifest, Run, Sibling
from zckpt.core.passes.layout import CopyOutcome, Layout, Shell
from zckpt.core.passes.resources import DEFAULT_COPYING, Copying
from zckpt.core.storage.folder import Folder
from zckpt.core.storage.fragments import Extent, solid
from zckpt.errors import Interrupted, NotEnoughSpace, ProcessLost, TargetExists

DATA = bytes(range(100)) * 40
SIZE = 8 + len(DATA)
IDENTITY = Identity(files={"x/tensors": SIZE, "notes": 5})


def tensor(path: Path | str, offset: int) -> Manifest:
    """A checkpoint of one tensor, of which a file has the bytes."""
    entry = Entry(
        "w", "exp_avg", "U8", (len(DATA),), solid(len(DATA), Extent(f"{path}", offset, 4000))
    )
    return Manifest(
        os.path.dirname(path),
        "x",
        Run(),
        {entry.key: entry},
        {},
        files=Files(paths=(f"{path}",)),
    )


@pytest.fixture
def source(tmp_path: Path) -> Manifest:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "f").write_bytes(b"abc" + DATA)
    (tmp_path / "run" / "notes").write_bytes(b"notes")
    return tensor(tmp_path / "run" / "f", 3)


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    def shells() -> Iterator[Shell]:
        yield Shell("x/tensors", SIZE, ((0, b"a header"),))

    notes = Sibling("notes", str(tmp_path / "run" / "notes"), 5)
    return Layout(shells, (("notes", notes),), (), ())


def read_shells(path: str) -> Manifest:
    return tensor(os.path.join(path, "x", "tensors"), 8)


def seal(root: Folder, shells: Manifest, outcome: CopyOutcome) -> None:
    """Completes nothing."""


def written(
    source: Manifest,
    staging: Staging,
    layout: Layout,
    seal: Seal = seal,
    read_shells: Any = read_shells,
) -> CopyOutcome | None:
    return convert(source, staging, layout, SIZE, read_shells, seal, DEFAULT_COPYING, None)


def test_a_target_has_headers_tensors_and_files_beside(
    source: Manifest, layout: Layout, tmp_path: Path
) -> None:
    """The files are as old as the last of them, and all checksums are known before the seal."""
    known: dict[str, tuple[int, int]] = {}

    def sealing(root: Folder, shells: Manifest, outcome: CopyOutcome) -> None:
        known.update({os.path.relpath(path, root.path): own for path, own in outcome.files.items()})
        for path in shells.files.paths:
            os.utime(path, (0, 0))

    before = time.time() - 10
    outcome = written(source, Staging(str(tmp_path / "out"), IDENTITY), layout, sealing)
    assert outcome is not None
    whole = b"a header" + DATA
    assert (tmp_path / "out" / "x" / "tensors").read_bytes() == whole
    assert (tmp_path / "out" / "notes").read_bytes() == b"notes"
    assert known == {
        os.path.join("x", "tensors"): (SIZE, zlib.crc32(whole)),
        "notes": (5, zlib.crc32(b"notes")),
    }
    assert files_of(layout) == {name: size for name, (size, _) in known.items()}
    assert os.stat(tmp_path / "out" / "x" / "tensors").st_mtime > before


@pytest.mark.parametrize(
    ("modes", "expected"),
    [((0o644, 0o640), 0o640), ((0o600, 0o664), 0o600), ((0o400, 0o444), 0o600), ((0o755,), 0o644)],
)
def test_a_target_is_read_by_nobody_who_may_not_read_the_source(
    modes: tuple[int, ...], expected: int, source: Manifest, layout: Layout, tmp_path: Path
) -> None:
    """And its owner may write, also if the source is sealed."""
    before, paths = os.umask(0o022), [tmp_path / "run" / str(n) for n in range(len(modes))]
    for path, mode in zip(paths, modes, strict=True):
        path.touch()
        path.chmod(mode)
    own = source.replace(paths=tuple(map(str, paths)))
    try:
        written(own, Staging(str(tmp_path / "out"), IDENTITY), layout)
    finally:
        os.umask(before)
    mode = stat.S_IMODE(os.stat(tmp_path / "out" / "x" / "tensors").st_mode)
    assert oct(mode) == oct(expected)


def test_a_directory_that_another_program_has_put_there_is_not_written(
    source: Manifest, layout: Layout, tmp_path: Path
) -> None:
    """The shells that were read may be its own."""

    def swapped(path: str) -> Manifest:
        shutil.copytree(path, f"{path}2")
        os.rename(path, f"{path}1")
        os.rename(f"{path}2", path)
        return read_shells(path)

    with pytest.raises(TargetExists, match="was replaced by another program"):
        written(source, Staging(str(tmp_path / "out"), IDENTITY), layout, read_shells=swapped)
    assert not (tmp_path / "out").exists()


def test_the_last_part_completes_the_target(
    source: Manifest, layout: Layout, tmp_path: Path
) -> None:
    """The only region is that of the first part, which begins later."""
    for number in (2, 1):
        assert not (tmp_path / "out").exists()
        staging = Staging(
            str(tmp_path / "out"), IDENTITY, 1 << 20, resume=True, sharing=Part(number, 2)
        )
        assert (written(source, staging, layout) is None) == (number == 2)
    assert (tmp_path / "out" / "x" / "tensors").read_bytes() == b"a header" + DATA
    assert not (tmp_path / "out.partial").exists()


class Several(Sharing):
    """Processes that can talk, of which this is one; it writes all portions if `writes`."""

    is_alone = False

    def __init__(self, writes: bool = True, begun: tuple[int, int] | None = None) -> None:
        self.said: list[str] = []
        self.writes, self._begun = writes, begun

    @property
    def part(self) -> str:
        return "" if self._begun is None else "0001"

    def begin(self, journal: Any) -> None:
        self.said.append("begin")

    def begun(self) -> tuple[int, int] | None:
        return self._begun

    def mine(self, portions: Any, progress: Any) -> Any:
        return super().mine(portions, progress) if self.writes else iter(())

    def end(self) -> None:
        self.said.append("end")


def test_regions_of_a_lost_process_are_missed(
    source: Manifest, layout: Layout, tmp_path: Path
) -> None:
    """What the others have written stays there for a run that goes on."""
    sharing = Several(writes=False)
    staging = Staging(str(tmp_path / "out"), IDENTITY, sharing=sharing)
    with pytest.raises(ProcessLost, match="a process was lost"):
        written(source, staging, layout)
    assert sharing.said == ["begin"]
    assert not (tmp_path / "out").exists()
    assert (tmp_path / "out.partial" / "out" / "x" / "tensors").exists()


def joining(source: Manifest, layout: Layout, target: Path, sharing: Sharing) -> None:
    take_part(source, str(target), IDENTITY, layout, read_shells, DEFAULT_COPYING, sharing)


def test_a_process_writes_what_another_one_has_laid(
    source: Manifest, layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Staging(str(tmp_path / "out"), IDENTITY, 1 << 20, sharing=Several()) as staging:
        layout = replace(layout, siblings=())
        staging.lay(layout.shells())
        sharing = Several(begun=staging.journal.synced())
        joining(source, layout, tmp_path / "out", sharing)
        assert sharing.said == ["end"]
        path = tmp_path / "out.partial" / "out" / "x" / "tensors"
        assert path.read_bytes() == b"a header" + DATA
        journal = tmp_path / "out.partial" / "journal-0001"
        assert b"x/tensors" in journal.read_bytes().splitlines()[-1]
        journal.unlink()

        def interrupted(*_: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(steps, "copy", interrupted)
        with pytest.raises(Interrupted):
            joining(source, layout, tmp_path / "out", sharing)
        assert sharing.said == ["end"]


def test_a_process_that_has_nothing_to_write_waits_for_the_end(
    source: Manifest, layout: Layout, tmp_path: Path
) -> None:
    sharing = Several()
    joining(source, layout, tmp_path / "out", sharing)
    assert sharing.said == ["end"]
    assert not (tmp_path / "out.partial").exists()


@pytest.mark.parametrize("is_kept", [True, False])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_said(code: int, is_kept: bool, tmp_path: Path) -> None:
    partial = tmp_path / "out.partial"
    if is_kept:
        partial.mkdir()
    with (
        pytest.raises(NotEnoughSpace, match="is full: f: ") as caught,
        naming_full_disk("out", 1 << 20, str(partial)),
    ):
        raise OSError(code, os.strerror(code), "f")
    assert "1.05 MB" in (caught.value.hint or "")
    assert ("is still there" in (caught.value.hint or "")) is is_kept


def test_another_error_is_not_a_full_disk() -> None:
    with pytest.raises(OSError, match="f") as caught, naming_full_disk("out", 1, ""):
        raise OSError(errno.EIO, os.strerror(errno.EIO), "f")
    assert (caught.type, caught.value.errno) == (OSError, errno.EIO)


def test_memory_is_that_of_two_buffers_for_each_thread(source: Manifest) -> None:
    copying = Copying(jobs=3, memory=1 << 30)
    assert memory_of(source, copying) == 6 * steps.chunk_size_of(source, copying)
