"""The stages of a pipeline and the files of its layers, of made-up tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace

from zckpt.core.checkpoint.entries import Entry
from zckpt.core.checkpoint.facts import ExpertLayer, FlatBufferEngine
from zckpt.core.checkpoint.grid import Grid, GridPlace
from zckpt.core.checkpoint.manifest import Manifest, Parameter, Run
from zckpt.core.checkpoint.origin import Origin
from zckpt.core.storage.fragments import Extent, solid
from zckpt.errors import (
    IncompleteCheckpoint,
    InconsistentCheckpoint,
    UnsupportedCheckpoint,
    ZckptError,
)
from zckpt.files.torchfile import Parsed, TorchFile
from zckpt.formats.deepspeed.model_ranks.pipeline import (
    joined_stages,
    joined_stages_with_experts,
)
from zckpt.formats.deepspeed.ranks import shapes_of_stage

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
    values: Mapping[str, torch.Tensor] = VALUES,
) -> Manifest:
    """A stage whose masters lie in one file, one behind the other."""
    path, entries, offset = root / f"masters_{number}", [], 0
    path.write_bytes(b"".join(values[name].numpy().tobytes() for name in names))
    for name in names:
        count = values[name].numel()
        fragments = solid(count, Extent(str(path), offset, 4 * count))
        entries.append(Entry(name, "master", "F32", (count,), fragments))
        offset += 4 * count
    return Manifest(
        root="run",
        format="deepspeed",
        entries={entry.key: entry for entry in entries},
        parameters={name: Parameter((values[name].numel(),), group=0, step=3) for name in names},
        groups=({"lr": 0.1},),
        state={"module": []},
        place=GridPlace(number, GRID, buffers if number else (), tied),
        run=Run(origin=Origin(), engine=ENGINE),
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
    assert whole.run.pipeline is not None
    assert whole.run.pipeline.to_state() == {
        "parameters": [[EMBED, "1.fc.weight"], [EMBED, "2.fc.weight"]],
        "buffers": [[], ["2.count"]],
        "layers": [0, 1, 2, 3],
        "tied": [[0, "embed"], [3, "embed"]],
    }
    assert [(copy.name, copy.axis) for copy in whole.replicas] == [
        (f"{EMBED}/param", "stage"),
        (f"{EMBED}/master", "stage"),
    ]
    assert (whole.run.engine.dtype, whole.buffers) == ("BF16", ("2.count",))  # type: ignore[union-attr]
    assert whole.entries.keys() == {
        *((name, slot) for name in VALUES for slot in ("param", "master")),
        ("2.count", "param"),
    }


def test_keys_that_are_known_need_no_bytes(made: Made) -> None:
    other = {"weight": torch.zeros(6)}
    whole = made({0: "embed", 3: "embed"}, layer_0=other, layer_3=other)
    assert tied_of(whole) == [[0, "embed"], [3, "embed"]]


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
    (warning,) = made(layer_3={"weight": torch.zeros(6)}).notices.warnings
    assert "layer_03-model_states.pt has the shapes of the tied layer embed" in warning.message
    assert (warning.code, warning.subject) == ("frozen-inferred", "embed")


def test_a_layer_whose_buffer_is_listed_is_no_tied_one(made: Made) -> None:
    """The name of the buffer has the layer's number."""
    layer = {"weight": torch.zeros(6), "count": torch.tensor(3)}
    whole = made(layer_3=layer, buffers=("2.count", "3.count"))
    assert whole.notices.warnings == ()
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


# -- pipelines of other stages

A, B, C = (f"tied_modules.{key}.weight" for key in "abc")
ONE, TWO, THREE = (torch.full((6,), value) for value in (1.0, 2.0, 3.0))
PLAIN = torch.arange(4.0)
Tensors = Mapping[str, torch.Tensor]


def files_of(root: Path, layers: Mapping[int, Tensors]) -> dict[int, TorchFile]:
    """The files of layers, with tensors of the types that are given."""
    files = {}
    for number, tensors in layers.items():
        path = root / f"layer_{number:02d}-model_states.pt"
        torch.save(dict(tensors), path)
        files[number] = TorchFile(str(path), Parsed())
    return files


def joined(
    root: Path,
    stages: list[Tensors],
    layers: Mapping[int, Tensors],
    tied: Mapping[int, str] | None = None,
    buffers: tuple[str, ...] = (),
) -> Manifest:
    """The whole of stages with these masters; their moments, behind them, are other values."""
    made = []
    for number, values in enumerate(stages):
        own = stage(root, number, list(values), tied, buffers, values)
        moments = root / f"moments_{number}"
        moments.write_bytes(bytes(4 * max(value.numel() for value in values.values())))
        entries = dict(own.entries)
        for name, value in values.items():
            fragments = solid(value.numel(), Extent(str(moments), 0, 4 * value.numel()))
            entry = Entry(name, "exp_avg", "F32", (value.numel(),), fragments)
            entries[entry.key] = entry
        state = {"module": [], "optimizer": {"members": [[number]], "loss_scale": 8}}
        made.append(replace(own, entries=entries, state=state))
    return joined_stages(made, files_of(root, layers), None)


def tied_of(whole: Manifest) -> list[list[object]]:
    assert whole.run.pipeline is not None
    tied: list[list[object]] = whole.run.pipeline.to_state()["tied"]
    return tied


def test_one_stage_is_the_whole(tmp_path: Path) -> None:
    layers = {0: {"weight": ONE}, 1: {"fc.weight": PLAIN.half(), "fc._extra_state": PLAIN}}
    whole = joined(tmp_path, [{"1.fc.weight": PLAIN, A: ONE}], layers)
    assert tied_of(whole) == [[0, "a"]]
    assert [*whole.parameters] == ["1.fc.weight", A]
    assert whole.state["optimizer"] == {"loss_scale": 8}
    assert whole.state["module"] == [A, "1.fc.weight"]
    assert whole.run.engine.dtype == "F16"  # type: ignore[union-attr]
    paths = [str(tmp_path / f"layer_0{number}-model_states.pt") for number in (0, 1)]
    assert [*whole.files.paths] == paths
    assert {record.extent.file for record in whole.files.records} == {*paths}
    told = joined(tmp_path, [{"1.fc.weight": PLAIN, A: ONE}], layers, {0: "a"})
    assert tied_of(told) == [[0, "a"]]


def test_the_type_of_weights_is_that_of_the_first_stage(tmp_path: Path) -> None:
    layers = {0: {"w": PLAIN.bfloat16()}, 1: {"w": PLAIN.half()}}
    whole = joined(tmp_path, [{"0.w": PLAIN}, {"1.w": PLAIN}], layers)
    assert whole.run.engine.dtype == "BF16"  # type: ignore[union-attr]


def test_a_layer_with_numbers_in_its_names_is_no_tied_one(tmp_path: Path) -> None:
    """Its weights may be those of a tied one."""
    layers = {0: {"weight": ONE}, 1: {"weight": ONE}, 2: {"w": PLAIN}}
    whole = joined(tmp_path, [{A: ONE, "1.weight": ONE}, {"2.w": PLAIN}], layers)
    assert tied_of(whole) == [[0, "a"]]
    assert [*whole.parameters] == [A, "1.weight", "2.w"]


def test_masters_of_the_first_stage_tell_a_tied_layer(tmp_path: Path) -> None:
    layers = {0: {"weight": ONE}, 1: {"w": PLAIN}, 2: {"w": PLAIN}}
    whole = joined(tmp_path, [{A: ONE, "1.w": PLAIN}, {A: TWO, "2.w": PLAIN}], layers)
    assert tied_of(whole) == [[0, "a"]]


def test_shapes_of_the_first_stage_count(tmp_path: Path) -> None:
    layers = {0: {"weight": ONE}, 1: {"w": PLAIN}, 2: {"w": PLAIN}}
    stages = [{A: ONE, "1.w": PLAIN}, {A: PLAIN, "2.w": PLAIN}]
    with pytest.raises(InconsistentCheckpoint, match=r"replicas of .* have different shapes"):
        joined(tmp_path, stages, layers, {0: "a"})


def test_all_tensors_of_a_tied_layer_are_compared(tmp_path: Path) -> None:
    """Two layers with equal weights have biases of their own."""
    masters = {f"tied_modules.{key}.{n}": v for key, bias in (("a", TWO), ("b", THREE))
               for n, v in (("weight", ONE), ("bias", bias))}  # fmt: skip
    layers = {0: {"weight": ONE, "bias": THREE}, 1: {"weight": ONE, "bias": TWO}}
    assert tied_of(joined(tmp_path, [masters], layers)) == [[0, "b"], [1, "a"]]
    alike = dict.fromkeys(masters, ONE)
    same = {"weight": ONE, "bias": ONE}
    with pytest.raises(UnsupportedCheckpoint, match=r"layer_00.* several tied layers: a, b"):
        joined(tmp_path, [alike], {0: same, 1: same})


def test_tied_layers_without_files_are_listed_in_order(tmp_path: Path) -> None:
    masters = {f"tied_modules.{key}.weight": ONE for key in "edcba"}
    names = ", ".join(f"tied_modules.{key}" for key in "abcd")
    with pytest.raises(IncompleteCheckpoint, match=f"has the weights of {names}"):
        joined(tmp_path, [masters], {})


def test_a_parameter_of_no_layer(tmp_path: Path) -> None:
    with pytest.raises(IncompleteCheckpoint, match=r"lacks the file of the layer of fc\.weight"):
        joined(tmp_path, [{"fc.weight": PLAIN}], {0: {"w": PLAIN}})


# -- places of tied layers


def test_a_tied_layer_in_a_stage_without_its_key(tmp_path: Path) -> None:
    stages = [{A: ONE, "1.w": PLAIN}, {"2.w": PLAIN}]
    layers = {0: {"weight": ONE}, 1: {"w": PLAIN}, 2: {"w": PLAIN}}
    assert tied_of(joined(tmp_path, stages, layers)) == [[0, "a"]]
    said = (
        "layer_03-model_states.pt has the weights of tied_modules.a, but .* layer 3 does not have"
    )
    with pytest.raises(InconsistentCheckpoint, match=said) as caught:
        joined(tmp_path, stages, {**layers, 3: {"weight": ONE}})
    assert "files of two layers may be swapped" in str(caught.value.hint)


@pytest.mark.parametrize(
    ("names", "is_refused"),
    [
        ([A, B, "0.w", "3.w"], True),
        ([B, A, "0.w", "3.w"], False),
        ([A, B, "3.w", "0.w"], False),  # groups that do not stand as layers do show nothing
        ([A, B, "3.w"], False),
    ],
)
def test_the_order_of_tied_layers(names: list[str], is_refused: bool, tmp_path: Path) -> None:
    """Layers 1 and 2 are b and a: so their parameters stand too, if numbers show an order."""
    values = {A: ONE, B: TWO, "0.w": PLAIN, "3.w": PLAIN}
    layers = {0: {"w": PLAIN}, 1: {"weight": TWO}, 2: {"weight": ONE}, 3: {"w": PLAIN}}
    masters = {name: values[name] for name in names}
    if is_refused:
        said = "files of the layers 1, 2 have the weights of tied layers in another order"
        with pytest.raises(InconsistentCheckpoint, match=said) as caught:
            joined(tmp_path, [masters], layers)
        assert "files of two layers may be swapped" in str(caught.value.hint)
    else:
        assert tied_of(joined(tmp_path, [masters], layers)) == [[1, "b"], [2, "a"]]


def test_each_stage_has_an_order_of_its_own(tmp_path: Path) -> None:
    """The second one uses c with a function of its own, so that c has no file there."""
    layers = {0: {"weight": ONE}, 1: {"weight": TWO}, 2: {"weight": THREE}, 3: {"w": PLAIN},
              4: {"w": PLAIN}, 5: {"w": PLAIN}, 6: {"w": PLAIN}, 7: {"weight": TWO},
              8: {"weight": ONE}}  # fmt: skip
    stages = [
        {A: ONE, B: TWO, C: THREE, "3.w": PLAIN, "4.w": PLAIN},
        {C: THREE, B: TWO, A: ONE, "5.w": PLAIN, "6.w": PLAIN},
    ]
    tied = [[0, "a"], [1, "b"], [2, "c"], [7, "b"], [8, "a"]]
    assert tied_of(joined(tmp_path, stages, layers)) == tied


def test_frozen_layers_that_are_not_perhaps_tied(tmp_path: Path) -> None:
    """One of other shapes, and one in a stage without a copy; the one between may be."""
    stages = [{A: ONE, "1.w": PLAIN}, {A: ONE, "3.w": PLAIN}, {"5.w": PLAIN}]
    layers = {0: {"weight": ONE}, 1: {"w": PLAIN}, 2: {"weight": PLAIN}, 3: {"w": PLAIN},
              5: {"w": PLAIN}, 6: {"weight": TWO}}  # fmt: skip
    assert joined(tmp_path, stages, layers).notices.warnings == ()
    (warning,) = joined(tmp_path, stages, {**layers, 4: {"weight": TWO}}).notices.warnings
    assert "layer_04-model_states.pt has the shapes of the tied layer a" in warning.message
    full = {**layers, 2: {"weight": ONE}, 4: {"weight": TWO}}  # as many files as copies
    assert joined(tmp_path, stages, full).notices.warnings == ()


# -- buffers, experts


def test_what_is_a_buffer_if_none_is_listed(tmp_path: Path) -> None:
    types = {"f64": torch.float64, "f32": torch.float32, "f16": torch.half, "bf16": torch.bfloat16}
    floats = {name: PLAIN.to(dtype) for name, dtype in types.items()}
    layer = {"w": PLAIN, **floats, "running_mean": PLAIN, "count": torch.tensor(3)}
    whole = joined(tmp_path, [{"0.w": PLAIN}], {0: layer})
    assert whole.buffers == ("0.running_mean", "0.count")
    assert [*whole.parameters] == ["0.w", *(f"0.{name}" for name in floats)]


def test_listed_buffers_are_the_only_ones(tmp_path: Path) -> None:
    layers = {0: {"w": PLAIN}, 1: {"w": PLAIN, "mask": PLAIN, "count": torch.tensor(3)}}
    stages = [{"0.w": PLAIN}, {"1.w": PLAIN}]
    whole = joined(tmp_path, stages, layers, buffers=("1.mask",))
    assert whole.buffers == ("1.mask",)
    assert [*whole.parameters] == ["0.w", "1.w", "1.count"]


def test_stages_with_experts(tmp_path: Path) -> None:
    """The whole has the layers of all stages, and the first one's facts."""
    stages = []
    for number, name in enumerate(("0.w", "1.w")):
        own = stage(tmp_path, number, [name], None, (), {name: PLAIN})
        engine = replace(
            ENGINE, version=f"0.19.{number}", experts=(ExpertLayer(f"{number}.moe", 4, number + 1),)
        )
        stages.append(own.replace(engine=engine, origin=Origin(ep=number + 1, tag=str(number))))
    whole = joined_stages_with_experts(stages, None)
    assert whole.run.origin == Origin(ep=2, tag="0")
    assert whole.run.engine == replace(
        ENGINE, version="0.19.0", experts=(ExpertLayer("0.moe", 4, 1), ExpertLayer("1.moe", 4, 2))
    )
    assert [*whole.parameters] == ["0.w", "1.w"]
    assert joined_stages_with_experts(stages[:1], None).run.origin == Origin(ep=1, tag="0")


def test_shapes_are_those_of_the_named_layer(tmp_path: Path) -> None:
    """Another layer has as many elements in another shape, and no tied one has a number."""
    layers = files_of(
        tmp_path,
        {
            0: {"weight": ONE},
            1: {"fc.weight": PLAIN, "weight": ONE.view(2, 3)},
            2: {"fc.weight": PLAIN.view(2, 2)},
        },
    )
    state = {"param_slice_mappings": [{A: {"numel": 6}, "1.fc.weight": {"numel": 4}}]}
    assert shapes_of_stage([state], layers) == [{A: (6,), "1.fc.weight": (4,)}]
    assert shapes_of_stage([state, {}], layers) is None
