"""Tensors are compared in regions that processes, parts and later runs share: masters, replicas."""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from zckpt.copying import filling
from zckpt.copying.comparing import Row
from zckpt.copying.convert import convert
from zckpt.copying.journal import Identity, regions_in
from zckpt.copying.sharing import ALONE, Part, Sharing
from zckpt.copying.staging import Staging
from zckpt.core.checkpoint.entries import Entry
from zckpt.core.checkpoint.manifest import Files, Manifest, Run
from zckpt.core.comparison.masters import Rounding
from zckpt.core.comparison.replicas import RANK0, Replicas, replicas_of
from zckpt.core.passes.full_checks import FullCheck
from zckpt.core.passes.layout import CopyOutcome, Layout, Shell
from zckpt.core.passes.resources import Copying
from zckpt.core.storage.fileio import Writer
from zckpt.core.storage.fragments import Extent, solid
from zckpt.core.storage.marks import lines_in
from zckpt.errors import InconsistentCheckpoint

from ..conftest import fork, texts

MIB = 1 << 20
SHAPES = {"a": 700_001, "b": 3, "c": 1_000_000, "d": 1 << 17}
COPYING = Copying(2, 4 * MIB)
BYTES = sum(SHAPES.values()) * 6
HINT = "another one"
MASTERS = "masters/"


class Conversion:
    """Fp32 masters in one file, and their weights in bf16 in another one."""

    def __init__(self, root: Path, accepted: bool = False) -> None:
        self.run, self.target, self.accepted = root / "run", root / "out", accepted
        self.run.mkdir()
        torch.manual_seed(3)
        self.masters = {name: torch.randn(numel) for name, numel in SHAPES.items()}
        self.weights = {name: tensor.bfloat16() for name, tensor in self.masters.items()}
        self.begun: list[int] = []

    def save(self) -> None:
        for name, tensors in (("masters", self.masters), ("weights", self.weights)):
            data = (tensor.view(torch.uint8).numpy().tobytes() for tensor in tensors.values())
            (self.run / name).write_bytes(b"".join(data))

    def manifest(self, root: str) -> Manifest:
        entries = []
        for slot, dtype, size in (("master", "F32", 4), ("param", "BF16", 2)):
            file, offset = os.path.join(root, "weights" if size == 2 else "masters"), 0
            for name, numel in SHAPES.items():
                extent = Extent(file, offset, numel * size)
                entries.append(Entry(name, slot, dtype, (numel,), solid(numel, extent)))
                offset += numel * size
        paths = tuple(os.path.join(root, name) for name in ("masters", "weights"))
        return Manifest(root, "x", Run(), {e.key: e for e in entries}, {}, files=Files(paths=paths))

    def rounding(self) -> Rounding:
        return Rounding(self.manifest(str(self.run)), HINT, self.accepted)

    def checks(self) -> list[FullCheck]:
        return [self.rounding()]

    def convert(
        self, sharing: Sharing = ALONE, seal: Callable[..., None] = lambda *_: None
    ) -> CopyOutcome | None:
        numel = sum(SHAPES.values())
        sizes = {"masters": 4 * numel, "weights": 2 * numel}
        layout = Layout(lambda: (Shell(name, size, ()) for name, size in sizes.items()), (), (), ())
        about = Identity(files=sizes), MIB, True, None, sharing
        staged, source = Staging(str(self.target), *about), self.manifest(str(self.run))

        def begin(size: int) -> Callable[[int], None]:
            self.begun = [size]
            return self.begun.append

        return convert(
            source, staged, layout, BYTES, self.manifest, seal, COPYING, begin, self.checks()
        )

    def noted(self, journal: str) -> set[int]:
        """The regions of masters in a journal, by where they begin."""
        data = (self.target.parent / "out.partial" / journal).read_bytes()
        return {region.start for region in regions_in(lines_in(data)) if region.file == MASTERS}


class WithReplicas(Conversion):
    """Beside the masters there are another rank's replicas of them; rank 0's are taken."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.replicas = {name: tensor.clone() for name, tensor in self.masters.items()}

    def save(self) -> None:
        super().save()
        data = (tensor.numpy().tobytes() for tensor in self.replicas.values())
        (self.run / "replicas").write_bytes(b"".join(data))

    def checks(self) -> list[FullCheck]:
        return [*super().checks(), self.comparison()]

    def comparison(self) -> Replicas:
        manifest, path = self.manifest(str(self.run)), str(self.run / "replicas")
        replicas = [
            replace(manifest.entries[name, "master"], axis="ep rank", fragments=fragments)
            for name, offset in zip(SHAPES, accumulate([0, *SHAPES.values()]), strict=False)
            for fragments in [solid(SHAPES[name], Extent(path, 4 * offset, 4 * SHAPES[name]))]
        ]
        return replicas_of(replace(manifest, replicas=tuple(replicas)), RANK0, {"ep rank": HINT})


@pytest.fixture
def conversion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Conversion:
    monkeypatch.setattr(filling, "REGION", MIB)
    return Conversion(tmp_path)


@pytest.mark.parametrize("memory", [3 << 10, 3 << 15, 3 << 20])
@pytest.mark.parametrize("region", [7, 4099, 1 << 19, 1 << 30])
def test_parts_have_each_element_once(
    memory: int, region: int, conversion: Conversion, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However regions cut it, also inside of an element."""
    monkeypatch.setattr(filling, "REGION", region)
    monkeypatch.setitem(SHAPES, "c", 5001)
    monkeypatch.setitem(SHAPES, "a", 1)
    monkeypatch.setitem(SHAPES, "d", 0)
    row = Row(MASTERS, conversion.rounding(), memory)
    portions = [*row.portions(set())]
    assert [(one.stop, one.file) for one in portions][:-1] == [
        (n.start, MASTERS) for n in portions[1:]
    ]
    parts = [*row.parts(portions)]
    for number, numel in enumerate(SHAPES.values()):
        own = [(part.start, part.stop) for part in parts if part.number == number]
        assert all(one[1] == other[0] for one, other in pairwise(own))
        assert not own if numel == 0 else (own[0][0], own[-1][1]) == (0, numel)
    assert sum(part.length for part in parts) == row.length == sum(SHAPES.values()) * 6
    assert max(part.stop - part.start for part in parts) * 4 * 3 <= memory


def test_right_masters_are_compared_once(conversion: Conversion) -> None:
    conversion.save()
    outcome = conversion.convert()
    assert outcome is not None
    assert outcome.differing == [{}]
    assert conversion.begun[0] == sum(conversion.begun[1:]) == 2 * BYTES
    assert (conversion.target / "masters").read_bytes() == (conversion.run / "masters").read_bytes()


@pytest.mark.parametrize("place", [128, 600_000, 700_000])
def test_a_wrong_element_anywhere_ends_the_run(place: int, conversion: Conversion) -> None:
    conversion.weights["a"][place] += 1
    conversion.save()
    conversion.rounding().begin()
    with pytest.raises(
        InconsistentCheckpoint, match=r"is not its rounded master: a\. The"
    ) as raised:
        conversion.convert()
    assert raised.value.hint == HINT
    assert os.listdir(conversion.target.parent) == ["run"]


def test_the_first_elements_are_compared_before_anything_is_written(conversion: Conversion) -> None:
    conversion.weights["c"][127] += 1
    conversion.save()
    with pytest.raises(InconsistentCheckpoint, match=r"is not its rounded master: c\. The"):
        conversion.rounding().begin()


def test_accepted_masters_are_all_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that an earlier part has found; the files are those of the first difference."""
    monkeypatch.setattr(filling, "REGION", MIB)
    conversion = Conversion(tmp_path, accepted=True)
    for name, place in (("d", -1), ("a", 3), ("a", 699_999), ("c", 500_000)):
        conversion.weights[name][place] += 1
    conversion.save()
    conversion.rounding().begin()
    lines: list[str] = []

    def seal(_root: Any, _shells: Any, outcome: CopyOutcome) -> None:
        lines.extend(each.message for each in conversion.rounding().conclude(outcome.differing[0]))

    for number in (1, 2, 3):
        outcome = conversion.convert(Part(number, 3), seal)
    assert outcome is not None
    (differing,) = outcome.differing
    firsts = {number: each.first for number, each in differing.items()}
    assert firsts == {0: 3, 2: 500_000, 3: (1 << 17) - 1}
    (line,) = lines
    assert "are not the rounded masters: a, c, d. The masters are in masters, the wei" in line


def test_parts_share_the_masters(conversion: Conversion) -> None:
    conversion.save()
    assert conversion.convert(Part(1, 3)) is None
    assert conversion.convert(Part(3, 3)) is None
    first, last = (conversion.noted(f"journal-{number}-of-3") for number in (1, 3))
    assert first
    assert last
    assert not first & last
    assert conversion.convert(Part(2, 3)) is not None
    assert conversion.target.exists()


def test_no_part_completes_what_another_one_has_refused(conversion: Conversion) -> None:
    """Part 1 has the first region; the others end, and the target does not appear."""
    conversion.weights["a"][200] += 1
    conversion.save()
    refused = []
    for number in (1, 2, 3, 1):
        try:
            assert conversion.convert(Part(number, 3)) is None
        except InconsistentCheckpoint:
            refused.append(number)
    assert len(refused) in (1, 2)
    assert len({*refused}) == 1
    assert not conversion.target.exists()


def test_a_run_that_goes_on_does_not_compare_again(conversion: Conversion) -> None:
    """A child dies in the end, when all regions are noted; then no weight need be read."""
    conversion.save()
    child = fork()
    if not child:
        try:
            conversion.convert(seal=lambda *_: os._exit(9))
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert conversion.noted("journal") == {*range(0, BYTES, MIB)}
    left: list[int] = []
    read, write = Row.compare, Writer.write
    Row.compare = lambda *rest: left.append(1)  # type: ignore[method-assign, assignment]
    Writer.write = lambda *rest: left.append(2)  # type: ignore[method-assign, assignment]
    try:
        outcome = conversion.convert()
    finally:
        Row.compare, Writer.write = read, write  # type: ignore[method-assign]
    assert left == []
    assert outcome is not None
    assert conversion.target.exists()


def test_every_region_has_an_element(
    conversion: Conversion, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else nobody would note it, and the target would never be complete."""
    for region in (BYTES - 1, BYTES - 5, BYTES // 3 - 1):
        monkeypatch.setattr(filling, "REGION", region)
        row = Row(MASTERS, conversion.rounding(), 3 << 20)
        portions = [*row.portions(set())]
        assert portions[-1].stop == BYTES
        assert {part.region for part in row.parts(portions)} == {one.start for one in portions}


def test_differences_of_replicas_are_added_over_regions_and_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the last part says is what one process says that compares everything at once."""
    monkeypatch.setattr(filling, "REGION", MIB)
    conversion = WithReplicas(tmp_path)
    places = ("a", 3, 2.0), ("a", 70_000, 1.0), ("a", 699_999, float("nan")), ("c", 500_000, -5.0)
    for name, place, more in places:
        conversion.replicas[name][place] += more
    conversion.replicas["d"][:2] += 1
    conversion.save()
    lines: list[str] = []

    def seal(_root: Any, _shells: Any, outcome: CopyOutcome) -> None:
        of_masters, of_replicas = outcome.differing
        assert of_masters == {}
        lines.extend(texts(conversion.comparison().conclude(of_replicas)))

    for number in (3, 1, 2):
        outcome = conversion.convert(Part(number, 3), seal)
        assert (outcome is None) == (number != 2)
    assert lines == texts(conversion.comparison().compare_all())
    assert "a differ; rank 0's is used: master in 3 of 700001 elements, 1 of which is" in lines[0]
    assert lines[1].endswith(
        "c differ; rank 0's is used: master in 1 of 1000000 elements by at most 5"
    )
    assert [line.split()[5] for line in lines] == ["a", "c", "d"]
