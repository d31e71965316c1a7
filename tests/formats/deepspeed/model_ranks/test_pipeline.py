"""The stages of a pipeline and the files of its layers, of made-up tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from zckpt.core.facts import FlatBufferEngine
from zckpt.core.fragments import Extent, solid
from zckpt.core.grid import Grid, Place
from zckpt.core.manifest import Entry, Manifest, Parameter
from zckpt.errors import (
    IncompleteCheckpoint,
    InconsistentCheckpoint,
    UnsupportedCheckpoint,
    ZckptError,
)
from zckpt.files.torchfile import Parsed, TorchFile
from zckpt.formats.deepspeed.model_ranks.pipeline import joined_stages, shapes_of_stage

EMBED = "tied_modules.embed.weight"
ENGINE = FlatBufferEngine("deepspeed", "0.19.8", None, None, False, None, {})
GRID = Grid(2, 1, staged=True)
VALUES = {
    EMBED: torch.arange(1.0, 7),
    "1.fc.weight": torch.arange(4.0),
    "2.fc.weight": -torch.ones(4),
}
WEIGHTS = {
    0: {"weight": VALUES[EMBED]},
    1: {"fc.weight": VALUES["1.fc.weight"]},
    2: {"fc.weight": VALUES["2.fc.weight"], "count": torch.tensor(3)},
    3: {"weight": VALUES[EMBED]},
}  # by layer; both stages use the embedding


def stage(
    root: Path,
    number: int,
    names: list[str],
    tied: Mapping[int, str] | None,
    buffers: tuple[str, ...],
) -> Manifest:
    """A stage whose masters lie in one file, one behind the other."""
    path, entries, offset = root / f"masters_{number}", [], 0
    path.write_bytes(b"".join(VALUES[name].numpy().tobytes() for name in names))
    for name in names:
        count = VALUES[name].numel()
        fragments = solid(count, Extent(str(path), offset, 4 * count))
        entries.append(Entry(f"{name}/master", "F32", (count,), fragments))
        offset += 4 * count
    return Manifest(
        root="run",
        format="deepspeed",
        source={},
        entries={entry.name: entry for entry in entries},
        parameters={name: Parameter((VALUES[name].numel(),), group=0, step=3) for name in names},
        groups=({"lr": 0.1},),
        engine=ENGINE,
        state={"module": []},
        place=Place(number, GRID, buffers if number else (), tied),
    )


Made = Callable[..., Manifest]


@pytest.fixture
def made(tmp_path: Path) -> Made:
    """The whole of two stages, with other tensors in some layers."""

    def whole(
        tied: Mapping[int, str] | None = None,
        buffers: tuple[str, ...] = ("2.count",),
        **changed: Mapping[str, torch.Tensor] | None,
    ) -> Manifest:
        files = {}
        for number, own in WEIGHTS.items():
            path = tmp_path / f"layer_{number:02d}-model_states.pt"
            tensors = changed.get(f"layer_{number}", own)
            if tensors is not None:
                torch.save({n: t.bfloat16() if t.ndim else t for n, t in tensors.items()}, path)
                files[number] = TorchFile(str(path), Parsed())
        names = ([EMBED, "1.fc.weight"], [EMBED, "2.fc.weight"])
        stages = [stage(tmp_path, number, own, tied, buffers) for number, own in enumerate(names)]
        return joined_stages(stages, files, None)

    return whole


def test_the_first_stages_tensors_count_and_the_others_are_copies(made: Made) -> None:
    whole = made()
    assert whole.state["pipeline"] == {
        "parameters": [[EMBED, "1.fc.weight"], [EMBED, "2.fc.weight"]],
        "buffers": [[], ["2.count"]],
        "layers": [0, 1, 2, 3],
        "tied": [[0, "embed"], [3, "embed"]],
    }
    assert [(copy.name, copy.axis) for copy in whole.replicas] == [
        (f"{EMBED}/param", "stage"),
        (f"{EMBED}/master", "stage"),
    ]
    assert (whole.engine.dtype, whole.buffers) == ("BF16", ("2.count",))  # type: ignore[union-attr]
    assert whole.entries.keys() == {
        *(f"{name}/{slot}" for name in VALUES for slot in ("param", "master")),
        "2.count/param",
    }


def test_keys_that_are_known_need_no_bytes(made: Made) -> None:
    other = {"weight": torch.zeros(6)}
    whole = made({0: "embed", 3: "embed"}, layer_0=other, layer_3=other)
    assert whole.state["pipeline"]["tied"] == [[0, "embed"], [3, "embed"]]


@pytest.mark.parametrize(
    ("changed", "error", "said"),
    [
        ({f"layer_{n}": {"weight": torch.zeros(6)} for n in (0, 3)}, IncompleteCheckpoint,
         "no file of a layer has the weights of tied_modules.embed"),
        ({"layer_1": None}, IncompleteCheckpoint, "lacks the file of the layer of 1.fc.weight"),
        ({"layer_1": {"fc.bias": torch.zeros(4)}}, IncompleteCheckpoint,
         "lacks the weight of 1.fc.weight"),
        ({"layer_1": {"fc.weight": torch.zeros(5)}}, InconsistentCheckpoint, "shape"),
    ],
)  # fmt: skip
def test_files_that_do_not_fit(
    changed: dict[str, Mapping[str, torch.Tensor] | None],
    error: type[ZckptError],
    said: str,
    made: Made,
) -> None:
    with pytest.raises(error, match=said):
        made(**changed)


def test_a_copy_with_other_weights_is_a_warning(made: Made) -> None:
    (warning,) = made(layer_3={"weight": torch.zeros(6)}).warnings
    assert "layer_03-model_states.pt has the shapes of the tied layer embed" in warning


def test_a_layer_whose_buffer_is_listed_is_no_tied_one(made: Made) -> None:
    """The name of the buffer has the layer's number."""
    layer = {"weight": torch.zeros(6), "count": torch.tensor(3)}
    whole = made(layer_3=layer, buffers=("2.count", "3.count"))
    assert whole.warnings == ()
    assert not whole.parameters["3.weight"].trainable


def test_shapes_of_a_stage_that_lists_none(made: Made, tmp_path: Path) -> None:
    made()
    layers = {
        n: TorchFile(str(path), Parsed()) for n, path in enumerate(sorted(tmp_path.glob("*.pt")))
    }
    parts = [{EMBED: {"numel": 2}}, {EMBED: {"numel": 4}, "1.fc.weight": {"numel": 4}}]
    states = [{"param_slice_mappings": [part]} for part in parts]
    assert shapes_of_stage(states, layers) == [{EMBED: (6,), "1.fc.weight": (4,)}]
    assert shapes_of_stage([{}], layers) is None
    lost = [{"param_slice_mappings": [{"1.fc.weight": {"numel": 3}}]}]
    with pytest.raises(InconsistentCheckpoint, match=r"has 1\.fc\.weight with the 3 elements"):
        shapes_of_stage(lost, layers)
    path = tmp_path / "layer_04-model_states.pt"
    torch.save({"weight": torch.zeros(2, 3)}, path)
    with pytest.raises(UnsupportedCheckpoint, match=r"several layers may be .* \[2, 3\] and \[6\]"):
        shapes_of_stage(states, {**layers, 4: TorchFile(str(path), Parsed())})
