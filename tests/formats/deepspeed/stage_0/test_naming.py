"""Names of a stage-0 optimizer: by bytes, then by the order of the module, or by the user."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from zckpt.errors import MissingData, WrongOption
from zckpt.files.torchfile import Tensor, TorchFile
from zckpt.formats.deepspeed.stage_0 import naming
from zckpt.formats.deepspeed.stage_0.naming import Nameless
from zckpt.formats.deepspeed.stage_0.numbers import Number
from zckpt.formats.deepspeed.stage_0.samples import TensorInFile

Tensors = Mapping[str, torch.Tensor]


def weights_of(path: Path, tensors: Tensors) -> dict[str, TensorInFile]:
    """Weights in bf16, in a file of their own."""
    torch.save({name: tensor.bfloat16() for name, tensor in tensors.items()}, path)
    file = TorchFile(str(path))
    return {name: TensorInFile(file, tensor) for name, tensor in file.value.items()}


def masters_of(path: Path, masters: Sequence[torch.Tensor]) -> list[TensorInFile]:
    torch.save(list(masters), path)
    file = TorchFile(str(path))
    return [TensorInFile(file, tensor) for tensor in file.value]


def flat(tensors: Tensors, names: Sequence[str]) -> torch.Tensor:
    return torch.cat([tensors[name].flatten() for name in names])


def nameless(
    orders: Sequence[Sequence[TensorInFile]], weights: Mapping[str, TensorInFile]
) -> Nameless:
    """An optimizer of whole masters."""
    groups = [[Number(place, {}, own) for own in order] for place, order in enumerate(orders)]
    return Nameless("model.pt", groups, weights)


def flat_groups(flats: Sequence[TensorInFile], weights: Mapping[str, TensorInFile]) -> Nameless:
    return replace(nameless([[each] for each in flats], weights), is_flat=True)


TENSORS = {
    "a": torch.arange(1.0, 7).view(2, 3),
    "b": torch.arange(10.0, 13),
    "c": torch.arange(20.0, 26).view(3, 2),
    "d": torch.arange(30.0, 33),
}


@pytest.fixture
def weights(tmp_path: Path) -> dict[str, TensorInFile]:
    return weights_of(tmp_path / "weights.pt", TENSORS)


def test_pieces_of_flat_masters_in_any_order(
    weights: dict[str, TensorInFile], tmp_path: Path
) -> None:
    groups = [["d", "a"], ["c", "b"]]
    flats = masters_of(tmp_path / "masters.pt", [flat(TENSORS, names) for names in groups])
    assert naming.named(flat_groups(flats, weights)) == (groups, [])


def test_equal_pieces_are_told_apart_by_order(tmp_path: Path) -> None:
    """Two norms that no update has changed in bf16: the module's order is said to show them."""
    tensors = {**TENSORS, "b": torch.ones(3), "d": torch.ones(3)}
    weights = weights_of(tmp_path / "weights.pt", tensors)
    flats = masters_of(tmp_path / "masters.pt", [flat(tensors, "abcd")])
    assert naming.named(flat_groups(flats, weights)) == ([[*"abcd"]], ["b", "d"])
    reversed_flats = masters_of(tmp_path / "reversed.pt", [flat(tensors, "dcba")])
    with pytest.raises(MissingData, match="b, d have equal bytes"):
        naming.named(flat_groups(reversed_flats, weights))
    one = masters_of(tmp_path / "one.pt", [flat(tensors, "b")])  # or d, which may be frozen
    with pytest.raises(MissingData, match="b, d have equal bytes"):
        naming.named(flat_groups(one, weights))


def test_a_piece_of_another_save(weights: dict[str, TensorInFile], tmp_path: Path) -> None:
    flats = masters_of(tmp_path / "masters.pt", [flat(TENSORS, "ab") + 0.5])
    with pytest.raises(MissingData, match="rounds to no weight"):
        naming.named(flat_groups(flats, weights))


def test_a_piece_that_may_have_two_shapes(tmp_path: Path) -> None:
    tensors = {"a": torch.zeros(2), "b": torch.zeros(4)}
    weights = weights_of(tmp_path / "weights.pt", tensors)
    flats = masters_of(tmp_path / "masters.pt", [flat(tensors, "ab")])
    with pytest.raises(MissingData, match="or to weights of several shapes"):
        naming.named(flat_groups(flats, weights))


def test_a_group_that_shares_no_bytes_may_have_any_order(tmp_path: Path) -> None:
    """Beside a group of which only the order tells two weights apart."""
    tensors = {**TENSORS, "b": torch.ones(3), "d": torch.ones(3)}
    weights = weights_of(tmp_path / "weights.pt", tensors)
    masters = masters_of(tmp_path / "masters.pt", [tensors[name] for name in "cabd"])
    names, inferred = naming.named(nameless([masters[:2], masters[2:]], weights))
    assert (names, inferred) == ([["c", "a"], ["b", "d"]], ["b", "d"])


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ("abcd", None),
        ("abc", "do not fill the groups"),
        ("bacd", "rounds to the weight"),
        ("acbd", "do not fill the groups"),
        ("abdc", "rounds to the weight"),
        ("abce", "names e, which the model's state does not have"),
    ],
)
def test_names_of_the_user(
    names: str, said: str | None, weights: dict[str, TensorInFile], tmp_path: Path
) -> None:
    flats = masters_of(tmp_path / "masters.pt", [flat(TENSORS, "ab"), flat(TENSORS, "cd")])
    asked = flat_groups(flats, weights)

    def named() -> naming.Named:
        (given,) = naming.shared_out([asked], [*names])
        return naming.named(replace(asked, given=given))

    if said is None:
        assert named() == ([["a", "b"], ["c", "d"]], [])
        return
    with pytest.raises(WrongOption, match=said):
        named()


def test_views_show_the_names(tmp_path: Path) -> None:
    """In the order in which they lie, though norms are equal that no update has changed in bf16.

    No bytes would show where one of them ends. Copies show nothing.
    """
    tensors = {**TENSORS, "a": torch.ones(2, 3), "b": torch.ones(3), "d": torch.ones(3)}
    groups = [["d", "a"], ["b", "c"]]
    buffers = [flat(tensors, names).bfloat16() for names in groups]
    module = {}
    for name in "abcd":
        number = 0 if name in groups[0] else 1
        start = 0 if groups[number][0] == name else tensors[groups[number][0]].numel()
        part = buffers[number][start : start + tensors[name].numel()]
        module[name] = part.view(tensors[name].shape)
    copies = {name: tensor.clone() for name, tensor in module.items()}
    masters = [flat(tensors, names) for names in groups]
    torch.save([module, copies, masters], tmp_path / "model.pt")
    file = TorchFile(str(tmp_path / "model.pt"))
    module, copies, masters = file.value
    flats = [TensorInFile(file, master) for master in masters]

    def weights(of: Mapping[str, Tensor]) -> dict[str, TensorInFile]:
        return {name: TensorInFile(file, tensor) for name, tensor in of.items()}

    assert naming.named(flat_groups(flats, weights(module))) == (groups, [])
    with pytest.raises(MissingData, match="no longer views of"):
        naming.named(flat_groups(flats, weights(copies)))


def test_what_an_optimizer_may_have(tmp_path: Path) -> None:
    """No buffers, no numbers of other types, and each place in memory once."""
    tied = torch.ones(2, 2)
    module = {"embed": tied, "head": tied, "mean": torch.ones(2), "count": torch.ones(2).int()}
    torch.save(module | {"a._extra_state": torch.ones(1)}, tmp_path / "model.pt")
    file = TorchFile(str(tmp_path / "model.pt"))
    every = ((name, file, tensor) for name, tensor in file.value.items())
    assert [*naming.weights_in(every, {"mean"})] == ["embed"]
