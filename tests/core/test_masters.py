"""Do masters round to their weights? Which elements are compared, and of which copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from zckpt.core.checkpoint.entries import Entry, key_of
from zckpt.core.checkpoint.manifest import Manifest, Run
from zckpt.core.comparison import masters
from zckpt.core.comparison.masters import ALL, BEGINNINGS, FEW
from zckpt.core.passes.plan import Match
from zckpt.core.storage.fragments import (
    Box,
    Boxes,
    Extent,
    Fragment,
    Fragments,
    Record,
    Runs,
    solid,
)
from zckpt.errors import CorruptCheckpoint, InconsistentCheckpoint

Store = Callable[[str, torch.Tensor], Extent]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Writes a tensor's bytes as a file of the checkpoint."""

    def write(name: str, tensor: torch.Tensor) -> Extent:
        data = tensor.contiguous().view(torch.uint8).numpy().tobytes()
        (tmp_path / name).write_bytes(data)
        return Extent(str(tmp_path / name), 0, len(data))

    return write


def entry(name: str, dtype: str, shape: tuple[int, ...], fragments: Any) -> Entry:
    if isinstance(fragments, Extent):
        fragments = solid(torch.Size(shape).numel(), fragments)
    return Entry(*key_of(name), dtype, shape, fragments)


def manifest(root: Path, *entries: Entry, **fields: Any) -> Manifest:
    return Manifest(str(root), "x", Run(), {item.key: item for item in entries}, {}).replace(
        **fields
    )


def wrong(checked: Manifest, elements: str = BEGINNINGS) -> list[str]:
    return [result.match.a.parameter for _, result in masters.unlike(checked, elements)]


def values(*shape: int) -> torch.Tensor:
    return torch.arange(1, 1 + torch.Size(shape).numel()).float().sqrt().reshape(shape)


def cut(store: Store, tensor: torch.Tensor, *bounds: int) -> Runs:
    """A flat tensor over files of ranks."""
    fragments = []
    for rank, (start, stop) in enumerate(pairwise(bounds)):
        fragments.append(Fragment(start, stop, store(f"rank{rank}", tensor[start:stop])))
    return Runs(fragments)


def master_of(fragments: Fragments) -> Entry:
    return entry("w/master", "F32", (3000,), fragments)


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_every_fragment_is_compared(rank: int, store: Store, tmp_path: Path) -> None:
    """Also that of a rank in whose file no weight begins."""
    wide, bounds = values(3000), (0, 1000, 2000, 3000)
    weight = entry("w/param", "BF16", (3000,), store("model", wide.bfloat16()))
    assert wrong(manifest(tmp_path, weight, master_of(cut(store, wide, *bounds)))) == []
    wide[bounds[rank] : bounds[rank + 1]] += 1
    checked = manifest(tmp_path, weight, master_of(cut(store, wide, *bounds)))
    with pytest.raises(InconsistentCheckpoint, match=f"masters are in rank{rank}, .* in model"):
        masters.check(checked, BEGINNINGS, "", accepted=False)


@pytest.mark.parametrize("number", [0, 1, 1234, 2999])
def test_every_weight_is_compared(number: int, store: Store, tmp_path: Path) -> None:
    wide = values(3000, 4)
    narrow = wide.bfloat16()
    narrow[number] += 1
    weights, own = store("model", narrow), store("rank0", wide)
    entries = []
    for place in range(3000):
        name = f"w{place}"
        entries.append(entry(f"{name}/param", "BF16", (4,), weights.part(8 * place, 8 * place + 8)))
        extent = own.part(16 * place, 16 * place + 16)
        entries.append(entry(f"{name}/master", "F32", (4,), extent))
    assert wrong(manifest(tmp_path, *entries)) == [f"w{number}"]


def test_all_elements_or_beginnings(store: Store, tmp_path: Path) -> None:
    wide = values(3000)
    narrow = wide.bfloat16()
    narrow[FEW] += 1
    checked = manifest(
        tmp_path,
        master_of(cut(store, wide, 0, 3000)),
        entry("w/param", "BF16", (3000,), store("model", narrow)),
    )
    assert wrong(checked) == []
    ((_, result),) = masters.unlike(checked, ALL)
    assert result.difference is not None
    assert result.difference.first == FEW


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_that_are_not_finite_round_as_torch_rounds(
    dtype: torch.dtype, store: Store, tmp_path: Path
) -> None:
    """A run that has diverged, and masters beyond the largest float16."""
    wide = values(64)
    wide[:6] = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e6, -0.0, 1e-30])
    name = {torch.bfloat16: "BF16", torch.float16: "F16"}[dtype]
    narrow = entry("w/param", name, (64,), store("model", wide.to(dtype)))
    master = entry("w/master", "F32", (64,), store("rank0", wide))
    assert wrong(manifest(tmp_path, narrow, master)) == []


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_masters_of_the_weights_type_are_equal(dtype: str, store: Store, tmp_path: Path) -> None:
    held = values(64).to({"F32": torch.float32, "BF16": torch.bfloat16}[dtype])
    weight = entry("w/param", dtype, (64,), store("model", held))
    master = entry("w/master", dtype, (64,), store("rank0", held))
    assert wrong(manifest(tmp_path, weight, master)) == []
    other = entry("w/master", dtype, (64,), store("rank1", held + 1))
    assert wrong(manifest(tmp_path, weight, other)) == ["w"]


@pytest.mark.parametrize("rank", [0, 1])
def test_columns_of_tensor_ranks(rank: int, store: Store, tmp_path: Path) -> None:
    """Each tensor rank has columns, in short runs: the beginning is that of its box."""
    wide = values(40, 6)

    def of_ranks(name: str, dtype: str, tensor: torch.Tensor) -> Entry:
        boxes = []
        for place, half in enumerate((tensor[:, :2], tensor[:, 2:])):
            count, extent = half.shape[1], store(f"{name}{place}", half)
            size = tensor.itemsize
            box = Box(
                whole=(40, 6),
                offsets=(0, 2 * place),
                sizes=(40, count),
                strides=(count, 1),
                first=0,
                size=size,
                extent=extent,
            )
            boxes.append(box)
        return entry(f"w/{name}", dtype, (40, 6), Boxes(boxes))

    weight = of_ranks("param", "BF16", wide.bfloat16())
    assert wrong(manifest(tmp_path, weight, of_ranks("master", "F32", wide))) == []
    wide[:, 2 * rank : 2 + 4 * rank] *= 3
    checked = manifest(tmp_path, weight, of_ranks("master", "F32", wide))
    with pytest.raises(InconsistentCheckpoint, match=f"are in master{rank}, .* in param{rank}$"):
        masters.check(checked, BEGINNINGS, "", accepted=False)


class TestCopies:
    """Tensor ranks and stages have copies, which may drift apart: each is rounded by itself."""

    @pytest.fixture
    def build(self, store: Store, tmp_path: Path) -> Callable[..., Manifest]:
        def built(own: Sequence[int], weights: Sequence[int]) -> Manifest:
            """Copies of a master and of its weight, which are shifted by these numbers."""
            first, *copies = (
                entry("w/master", "F32", (8,), store(f"rank{place}", values(8) + shift))
                for place, shift in enumerate(own)
            )
            weight, *others = (
                entry("w/param", "BF16", (8,), store(f"model{place}", (values(8) + s).bfloat16()))
                for place, s in enumerate(weights)
            )
            return manifest(tmp_path, first, weight, replicas=(*copies, *others))

        return built

    def test_copies_that_have_drifted(self, build: Callable[..., Manifest]) -> None:
        assert wrong(build([0, 1, 2], [0, 1, 2])) == []
        assert wrong(build([0, 2, 1], [0, 1, 2])) == []

    def test_a_copy_of_another_save(self, build: Callable[..., Manifest]) -> None:
        assert wrong(build([0, 5, 2], [0, 1, 2])) == ["w"]

    def test_the_first_master_is_that_of_the_first_weight(
        self, build: Callable[..., Manifest]
    ) -> None:
        """The two that a target gets."""
        assert wrong(build([1, 0], [0, 1])) == ["w"]

    def test_a_rank_that_has_saved_no_weight(self, build: Callable[..., Manifest]) -> None:
        """As a stage that uses a tied layer by a function: nothing proves its master."""
        assert wrong(build([0, 1], [0])) == []

    def test_weights_in_siblings(self, build: Callable[..., Manifest]) -> None:
        built = build([0], [3])
        weight = built.entries.pop(("w", "param"))
        assert wrong(built.replace(sibling_weights=(weight,))) == ["w"]
        fits = build([3], [3]).entries["w", "master"]
        built.entries[fits.key] = fits
        assert wrong(built.replace(sibling_weights=(weight,))) == []


def test_damage_is_said_to_be_the_cause(store: Store, tmp_path: Path) -> None:
    wide = values(64)
    weights = store("model", wide.bfloat16() + 1)
    checked = manifest(
        tmp_path,
        entry("w/param", "BF16", (64,), weights),
        entry("w/master", "F32", (64,), store("rank0", wide)),
        records=(Record(weights, 0),),
    )
    with pytest.raises(CorruptCheckpoint, match="model is damaged"):
        masters.check(checked, BEGINNINGS, "", accepted=True)


def test_weights_that_are_accepted(store: Store, tmp_path: Path) -> None:
    wide = values(64)
    checked = manifest(
        tmp_path,
        entry("w/param", "BF16", (64,), store("model", wide.bfloat16() + 1)),
        entry("w/master", "F32", (64,), store("rank0", wide)),
    )
    with pytest.raises(InconsistentCheckpoint, match=r"^1 weight of .* is not its") as raised:
        masters.check(checked, BEGINNINGS, masters.USUAL_HINT, accepted=False)
    assert "--accept-weights" in raised.value.hint
    (accepted,) = masters.check(checked, BEGINNINGS, masters.USUAL_HINT, accepted=True)
    assert accepted.code == raised.value.code
    assert accepted.message.startswith(raised.value.message)


def test_masters_stand_with_the_weights_that_they_round_to() -> None:
    def of(name: str, dtype: str) -> Entry:
        return entry(name, dtype, (4,), Extent("a", 0, 16))

    entries = [
        *(of("a/master", "F32"), of("a/param", "BF16"), of("a/exp_avg", "F32")),
        *(of("b/master", "F32"), of("c/param", "BF16")),
        *(of("d/master", "F32"), of("d/param", "I32")),
    ]
    matches = list(masters.with_masters({item.key: item for item in entries}))
    assert matches == [Match(entries[0], entries[1], "rounded")]


def test_masters_without_weights_of_their_own(store: Store, tmp_path: Path) -> None:
    """Nothing proves these."""
    master = entry("w/master", "F32", (8,), store("rank0", values(8)))
    numbers = entry("w/param", "I32", (8,), store("model", values(8).int()))
    assert wrong(manifest(tmp_path, master)) == []
    assert wrong(manifest(tmp_path, master, numbers)) == []


def test_any_of_the_siblings_weights_will_do(store: Store, tmp_path: Path) -> None:
    wide = values(8)
    master = entry("w/master", "F32", (8,), store("rank0", wide))
    numbers = entry("w/param", "I32", (8,), store("model0", wide.int()))
    other = entry("w/param", "BF16", (8,), store("model1", (wide + 1).bfloat16()))
    own = entry("w/param", "BF16", (8,), store("model2", wide.bfloat16()))
    for siblings, expected in (((numbers, other), ["w"]), ((other, own), [])):
        assert wrong(manifest(tmp_path, master, sibling_weights=siblings)) == expected


def test_of_copies_only_beginnings_are_compared(store: Store, tmp_path: Path) -> None:
    wide = values(3000)
    later = wide.clone()
    later[FEW] += 1
    first = entry("w/master", "F32", (3000,), store("rank0", wide))
    weight = entry("w/param", "BF16", (3000,), store("model", wide.bfloat16()))
    copy = entry("w/master", "F32", (3000,), store("rank1", later))
    assert wrong(manifest(tmp_path, first, weight, replicas=(copy, weight)), ALL) == []
    assert wrong(manifest(tmp_path, copy, weight), ALL) == ["w"]


@pytest.mark.parametrize(("row", "found"), [(0, True), (1, True), (63, True), (64, False)])
def test_the_beginning_of_a_box_is_that_of_its_rows(
    row: int, found: bool, store: Store, tmp_path: Path
) -> None:
    """Two of six columns: 64 rows have the first 128 elements."""
    wide = values(200, 6)
    narrow = entry("w/param", "BF16", (200, 6), store("model", wide.bfloat16()))
    wide[row, 3] += 5
    parts = []
    for place in (0, 2, 4):
        extent = store(f"rank{place}", wide[:, place : place + 2])
        parts.append(
            Box(
                whole=(200, 6),
                offsets=(0, place),
                sizes=(200, 2),
                strides=(2, 1),
                first=0,
                size=4,
                extent=extent,
            )
        )
    assert [*masters._heads(narrow.fragments)] == [(0, FEW)]
    assert len([*masters._heads(parts[1])]) == 64
    master = entry("w/master", "F32", (200, 6), Boxes(parts))
    assert wrong(manifest(tmp_path, narrow, master)) == (["w"] if found else [])


def test_beginnings_follow_each_other() -> None:
    def of(slot: str, dtype: str, size: int, *bounds: int) -> Entry:
        runs = [
            Fragment(start, stop, Extent(f"{slot} {start}", 64, (stop - start) * size))
            for start, stop in pairwise(bounds)
        ]
        return entry(f"w/{slot}", dtype, (3000,), Runs(runs))

    match = Match(of("master", "F32", 4, 0, 1000, 3000), of("param", "BF16", 2, 0, 3000), "rounded")
    first = masters.beginning(match)
    assert first.b is not None
    assert (first.a.shape, first.b.shape, first.how) == ((2 * FEW,), (2 * FEW,), "rounded")
    assert list(first.a.fragments) == [
        Fragment(0, FEW, Extent("master 0", 64, 4 * FEW)),
        Fragment(FEW, 2 * FEW, Extent("master 1000", 64, 4 * FEW)),
    ]
    assert list(first.b.fragments) == [
        Fragment(0, FEW, Extent("param 0", 64, 2 * FEW)),
        Fragment(FEW, 2 * FEW, Extent("param 0", 64 + 2000, 2 * FEW)),
    ]


def test_damage_elsewhere_is_not_the_cause(store: Store, tmp_path: Path) -> None:
    wide = values(64)
    model = store("model", torch.cat((torch.zeros(8), wide)).bfloat16())
    other = store("other", wide)
    checked = manifest(
        tmp_path,
        entry("w/param", "BF16", (64,), model.part(16, model.length)),
        entry("w/master", "F32", (64,), store("rank0", wide + 1)),
        records=(Record(model.part(0, 16), 0), Record(other, 0)),
    )
    with pytest.raises(InconsistentCheckpoint):
        masters.check(checked, BEGINNINGS, "", accepted=False)
