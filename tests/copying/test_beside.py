"""Files that are copied as they are have regions, as the files of tensors have."""

from __future__ import annotations

import os
import random
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from zckpt.copying import filling
from zckpt.copying.convert import Seal, convert
from zckpt.copying.journal import Identity, regions_in
from zckpt.copying.sharing import ALONE, Part, Sharing
from zckpt.copying.staging import Staging
from zckpt.core.checkpoint.entries import Entry
from zckpt.core.checkpoint.manifest import Files, Manifest, Run, Sibling
from zckpt.core.passes.layout import CopyOutcome, Layout, Shell
from zckpt.core.passes.resources import Copying
from zckpt.core.storage.fileio import Writer
from zckpt.core.storage.folder import Folder
from zckpt.core.storage.fragments import Extent, solid
from zckpt.core.storage.marks import lines_in
from zckpt.core.storage.sources import Fingerprint
from zckpt.errors import CorruptCheckpoint, SourceChanged

from ..conftest import fork

MIB = 1 << 20
SIZES = {"a/large.safetensors": 5 * MIB + 77, "b/sealed": 1, "c/empty": 0, "notes": MIB}
TENSOR = 3 * MIB
COPYING = Copying(1, 2 * MIB)


class Conversion:
    """A tensor and four files beside it, one of which its owner may not write."""

    def __init__(self, root: Path) -> None:
        chosen = random.Random(7)
        self.source, self.target = root / "run", root / "out"
        self.bytes = {name: chosen.randbytes(size) for name, size in SIZES.items()}
        for name, data in self.bytes.items():
            (self.source / name).parent.mkdir(parents=True, exist_ok=True)
            (self.source / name).write_bytes(data)
        (self.source / "b" / "sealed").chmod(0o400)
        (self.source / "tensors").write_bytes(chosen.randbytes(TENSOR))
        self.bytes["tensors"] = (self.source / "tensors").read_bytes()
        self.outcome: CopyOutcome | None = None

    def manifest(self, root: str) -> Manifest:
        path = os.path.join(root, "tensors")
        entry = Entry("w", "exp_avg", "U8", (TENSOR,), solid(TENSOR, Extent(path, 0, TENSOR)))
        return Manifest(root, "x", Run(), {entry.key: entry}, {}, files=Files(paths=(path,)))

    def read_shells(self, root: str) -> Manifest:
        """As a format's reader, which would stumble over a file of zeros."""
        assert {name for name in SIZES if os.path.lexists(os.path.join(root, name))} <= {"c/empty"}
        return self.manifest(root)

    def siblings(self) -> Iterator[tuple[str, Sibling]]:
        for name, size in SIZES.items():
            yield name, Sibling(name, str(self.source / name), size)

    def run(
        self,
        sharing: Sharing = ALONE,
        seal: Seal = lambda *_: None,
        source: Manifest | None = None,
        resume: bool = True,
    ) -> CopyOutcome | None:
        layout = Layout(lambda: iter([Shell("tensors", TENSOR, ())]), [*self.siblings()], (), ())
        identity = Identity(files={"tensors": TENSOR, **SIZES})
        staged = Staging(str(self.target), identity, MIB, resume, sharing=sharing)
        source = source or self.manifest(str(self.source))
        self.outcome = convert(source, staged, layout, 0, self.read_shells, seal, COPYING, None)
        return self.outcome

    def killed(self, writes: int, seal: Seal = lambda *_: None) -> bool:
        """Runs in a child that dies at a write; False if it ended before."""
        child = fork()
        if not child:
            try:
                left, write = writes, Writer.write

                def dying(self: Writer, *rest: Any) -> None:
                    nonlocal left
                    if not left:
                        os._exit(9)
                    left -= 1
                    write(self, *rest)

                Writer.write = dying  # type: ignore[method-assign]
                self.run(seal=seal)
                os._exit(0)
            finally:
                os._exit(1)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, 9)
        return code == 9

    def check(self) -> None:
        """The target has the bytes and modes of the source, and nothing else."""
        found = {str(path.relative_to(self.target)): path for path in self.target.rglob("*")}
        assert {name for name, path in found.items() if path.is_file()} == {*self.bytes}
        assert not [name for name in found if ".zckpt" in name]
        assert {name: found[name].read_bytes() for name in self.bytes} == self.bytes
        for name in SIZES:
            assert os.stat(found[name]).st_mode == os.stat(self.source / name).st_mode
        assert sorted(path.name for path in self.target.parent.iterdir()) == ["out", "run"]


@pytest.fixture
def conversion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Conversion:
    monkeypatch.setattr(filling, "REGION", MIB)
    return Conversion(tmp_path)


def test_their_checksums_are_known_and_they_are_no_tensors(conversion: Conversion) -> None:
    outcome = conversion.run()
    assert outcome is not None
    conversion.check()
    root = conversion.target.parent / "out.partial" / "out"
    expected = {str(root / name): (len(b), zlib.crc32(b)) for name, b in conversion.bytes.items()}
    assert outcome.files == expected
    assert [*outcome.digests] == [0]
    assert [*outcome.digests[0]] == [("w", "exp_avg")]


def test_a_killed_run_repeats_no_region_of_them(conversion: Conversion) -> None:
    """Each of 10 regions and of 2 small files has one write; a kill costs what was not synced."""
    kills = 0
    while conversion.killed(3):
        assert not conversion.target.exists()
        kills += 1
    assert kills == 3
    conversion.check()


@pytest.mark.parametrize("name", ["a/large.safetensors", "b/sealed", None])
def test_a_run_that_was_killed_at_the_end_is_continued(
    name: str | None, conversion: Conversion, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some files are in their places already, and the reader of shells must not find them."""
    put = Staging.put

    def dying(self: Staging, this: str, source: str) -> str:
        path = put(self, this, source)
        if this == name:
            os._exit(9)
        return path

    def sealing(root: Folder, shells: Manifest, outcome: CopyOutcome) -> None:
        os._exit(9)

    with monkeypatch.context() as patched:
        patched.setattr(Staging, "put", dying)
        assert conversion.killed(100, sealing)
    assert (conversion.target.parent / "out.partial" / "out" / "a" / "large.safetensors").exists()
    written: list[int] = []
    monkeypatch.setattr(Writer, "write", lambda *rest: written.append(1))
    conversion.run()
    assert not written
    conversion.check()


def test_parts_share_one_file(conversion: Conversion) -> None:
    assert conversion.run(Part(2, 3)) is None
    assert conversion.run(Part(1, 3)) is None
    folder = conversion.target.parent / "out.partial"
    shares = []
    for number in (1, 2):
        data = (folder / f"journal-{number}-of-3").read_bytes()
        regions = regions_in(lines_in(data))
        shares.append({region.start for region in regions if "large" in region.file})
    assert all(shares)
    assert not shares[0] & shares[1]
    assert conversion.run(Part(3, 3)) is not None
    conversion.check()


def test_a_file_that_changes_is_noticed(conversion: Conversion) -> None:
    path = str(conversion.source / "notes")
    own = conversion.manifest(str(conversion.source))
    seen = own.replace(fingerprints={path: Fingerprint.of(os.stat(path))})
    os.utime(path, ns=(0, 0))
    with pytest.raises(SourceChanged, match="notes changed"):
        conversion.run(source=seen, resume=False)
    os.truncate(path, 10)
    with pytest.raises(CorruptCheckpoint, match="notes ends at byte 10"):
        conversion.run(resume=False)
    assert os.listdir(conversion.target.parent) == ["run"]


def test_no_name_leads_out(conversion: Conversion) -> None:
    with Staging(str(conversion.target)) as staged:
        with pytest.raises(CorruptCheckpoint):
            staged.lay_beside([("../x", Sibling("../x", "x", 1))])
        assert os.listdir(staged.path) == []
