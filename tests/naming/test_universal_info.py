"""Rules that a `universal_checkpoint_info` states: order, views, maps, and other ranks.

tests/formats/deepspeed/test_tensor_rules.py compares them with what the engine makes of the info.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from zckpt.core.checkpoint.placement import Shapes
from zckpt.errors import InconsistentCheckpoint, MissingData, UnsupportedCheckpoint
from zckpt.naming.tensor_rules import decide
from zckpt.naming.universal_info import UniversalInfo, info_for, of_json

NAME = "layers.0.mixer.weight"
Info = dict[str, Any]


def sub(shape: Any, dim: int, **more: Any) -> Info:
    return {
        "parameter_with_sub_params": [
            {"patterns": [r"layers\.\d+\.mixer"], "shape": shape, "partition_dim": dim}
        ],
        **more,
    }


def widths(*by_part: list[int]) -> Info:
    return {
        "universal_checkpoint_version": 0.4,
        "sub_param_shard_widths": {r"layers\.\d+\.mixer": list(by_part)},
    }


IN_ORDER = [
    ("tp_replicated_parameter_patterns", "replicated"),
    ("parameter_to_average_patterns", "replicated"),
    ("parameter_with_2_sub_params_cat_dim_0", "0:2x"),
    ("parameter_with_sub_params", "0:4,8"),
    ("parameter_with_row_parallelism_patterns", "1"),
    ("of no pattern", "0"),
]


def test_the_first_pattern_that_fits_counts() -> None:
    """Taken away one after the other, each gives way to the next one."""
    info: Info = {key: [NAME] for key, _ in IN_ORDER} | sub(((4, 8), -1), 0)
    shapes: Shapes = [(6, 4), (6, 4)]
    for key, rule in IN_ORDER:
        sliced = UniversalInfo(info).sliced(NAME, shapes)
        assert sliced is not None
        assert sliced.placement.text == rule
        del info[key]


def test_a_pattern_is_for_the_begin_of_a_name() -> None:
    rows = {"parameter_with_row_parallelism_patterns": [r"layers\.0", r"mixer"]}
    rules = [
        UniversalInfo(rows).sliced(name, [(2, 2)] * 2)
        for name in (NAME, NAME.replace("0", "1"), "mixer", "my.mixer")
    ]
    assert [sliced and sliced.placement.text for sliced in rules] == ["1", "0", "1", "0"]


@pytest.mark.parametrize(
    ("shape", "rule", "whole"),
    [
        (((4, 8), -1), "0:4,8", (12, 4)),  # rows of the tensor
        ((3, (2, 2), 4), "view", (12, 4)),  # an axis inside of the rows
        ((12, (2, 2)), "1:2,2", (12, 4)),
    ],
)
def test_a_view_is_a_plain_rule_if_its_axis_is_one_of_the_tensor(
    shape: Any, rule: str, whole: tuple[int, ...]
) -> None:
    axis = next(n for n, size in enumerate(shape) if isinstance(size, tuple))
    held: Shapes = [(12, 2)] * 2 if axis and len(shape) == 2 else [(6, 4)] * 2
    sliced = UniversalInfo(sub(shape, axis)).sliced(NAME, held)
    assert sliced is not None
    assert (sliced.placement.text, sliced.shape) == (rule, whole)


def test_two_parts_of_rows_are_a_view_of_two_equal_parts() -> None:
    """Each rank has its half of each, and not the rows of one after those of the other."""
    shapes: Shapes = [(4, 2)] * 2
    halves = UniversalInfo({"parameter_with_2_sub_params_cat_dim_0": [NAME]}).sliced(NAME, shapes)
    view = UniversalInfo(sub(((4, 4), -1), 0)).sliced(NAME, shapes)
    assert halves is not None
    assert view is not None
    assert halves.slicing == view.slicing


def test_padded_rows_of_a_vocabulary() -> None:
    info = {"original_vocab_size": 7, "vocabulary_parameter_patterns": ["embed"]}
    used = [
        sliced and sliced.vocabulary
        for name in ("embed.weight", "head.weight")
        for sliced in [UniversalInfo(info).sliced(name, [(4, 2)] * 2)]
    ]
    assert used == [7, None]


def test_what_auto_tp_does_not_know_is_left_to_the_user() -> None:
    """Even if there is a map of its pieces."""
    info = {**mapped(piece([2, 3], ROWS, ROWS), piece([2, 3], [6, [3, 1]], ROWS))}
    assert UniversalInfo(info).sliced(NAME, [(2, 3)] * 2) is not None
    info["autotp_unsupported_parameter_patterns"] = {NAME: "why"}
    assert UniversalInfo(info).sliced(NAME, [(2, 3)] * 2) is None


def test_shapes_that_a_map_states() -> None:
    info = UniversalInfo(mapped(piece([2, 3], ROWS, ROWS), piece([2, 3], ROWS, ROWS)))
    assert info.stated_shapes(NAME) == [(2, 3), (2, 3)]
    assert info.stated_shapes("other") is None


def test_an_info_for_other_ranks() -> None:
    """The map goes, and what it alone said of whole parameters becomes patterns."""
    info = {
        **mapped(piece([2, 3], ROWS, ROWS), piece([2, 3], [6, [3, 1]], ROWS)),
        **widths([2, 2], [4, 4]),
        "tp_replicated_parameter_patterns": [r".*norm"],
        "original_vocab_size": 31,
    }
    assert info_for(info, 2, ["a.norm", "b.bias"]) == info
    four = info_for(info, 4, ["a.norm", "b.bias"])
    assert "affine_map" not in four
    assert four["tp_replicated_parameter_patterns"] == [r".*norm", r"^b\.bias$"]
    assert four["sub_param_shard_widths"] == {r"layers\.\d+\.mixer": [(1,) * 4, (2,) * 4]}
    assert four["original_vocab_size"] == 31
    assert info_for(info, 8, [])["sub_param_shard_widths"] == {}
    assert info_for({"original_vocab_size": 31}, 8, ["b.bias"]) == {"original_vocab_size": 31}


def test_an_info_as_json() -> None:
    info = of_json(json.dumps({"parameter_with_row_parallelism_patterns": [NAME]}))
    sliced = info.sliced(NAME, [(2, 2)] * 2)
    assert sliced is not None
    assert sliced.shape == (2, 4)


def piece(shape: list[int], source: Any, dest: Any, **more: Any) -> Info:
    return {"shape": shape, "source": source, "dest": dest, "locations": [0], **more}


def mapped(*pieces: Info, shard: list[int] | None = None) -> Info:
    ranks = {n: {"shard_shape": shard or [2, 3], "pieces": [each]} for n, each in enumerate(pieces)}
    return {"affine_map": {"params": {NAME: {"logical_shape": [4, 3], "ranks": ranks}}}}


ROWS = [0, [3, 1]]


@pytest.mark.parametrize(
    ("info", "error", "said"),
    [
        (mapped(piece([2, 3], ROWS, ROWS), piece([2, 3], [6, [3, 1]], ROWS, scale=0.5)),
         UnsupportedCheckpoint, "scale 0.5"),
        (mapped(piece([2, 3], ROWS, ROWS), piece([2, 3], [6, [1, 2]], ROWS)),
         UnsupportedCheckpoint, "not a box"),
        (mapped(piece([2, 3], ROWS, ROWS), piece([2, 3], ROWS, ROWS)),
         InconsistentCheckpoint, "every element"),
        (mapped(piece([2, 3], ROWS, ROWS), piece([2, 3], [6, [3, 1]], ROWS), shard=[3, 3]),
         InconsistentCheckpoint, "on tensor rank 0"),
        (mapped(*(piece([2, 3], ROWS, ROWS) for _ in range(3))), InconsistentCheckpoint, "3 ranks"),
        ({"affine_map": {"version": 2, "params": {NAME: {}}}}, UnsupportedCheckpoint, "version 2"),
        ({"affine_map": {"params": {NAME: {"logical_shape": [1] * 99, "ranks": {}}}}},
         UnsupportedCheckpoint, "99 dimensions"),
        (sub(((3, 1), -1), 0), InconsistentCheckpoint, "cannot share"),
        (sub(((2, 4), -1), 0), InconsistentCheckpoint, "no dimension"),
        (sub(((2, 2), -1), 0, universal_checkpoint_version=0.4), InconsistentCheckpoint,
         r"must list 2 sizes for each sub-parameter, with the sums \[2, 2\], but lists \[\]"),
        (sub((3, -1), 0), InconsistentCheckpoint, "4, which cannot be cut into 3 equal"),
        (sub((4, -1), 5), InconsistentCheckpoint, "axis 5"),
        ({"parameter_with_2_sub_params_cat_dim_0": [NAME]}, None, ""),
        ({"autotp_unsupported_parameter_patterns": {NAME: "why"}}, MissingData, "nothing says"),
        ({"tp_replicated_parameter_patterns": ["(a+)+"]}, UnsupportedCheckpoint, "for hours"),
        ({"tp_replicated_parameter_patterns": ["a*" * 9]}, UnsupportedCheckpoint, "for hours"),
        ({"tp_replicated_parameter_patterns": ["("]}, InconsistentCheckpoint, "no regular"),
        ({"tp_replicated_parameter_patterns": [3]}, UnsupportedCheckpoint, "for hours"),
    ],
)  # fmt: skip
def test_infos_that_do_not_fit(info: Info, error: Any, said: str) -> None:
    shapes: Shapes = [(2, 3), (2, 3)]
    if error is None:
        assert decide("run", {NAME: shapes}, [UniversalInfo(info)], 2)
        return
    with pytest.raises(error, match=said):
        decide("run", {NAME: shapes}, [UniversalInfo(info)], 2)


def uneven(shape: Any, dim: int, *by_part: list[int]) -> Info:
    return sub(shape, dim, **widths(*by_part))


@pytest.mark.parametrize(
    ("info", "shapes", "whole", "rule"),
    [
        (uneven(((4,), -1), 0, [3, 1]), [(3, 3), (1, 3)], (4, 3), "0:4"),
        (uneven((2, -1), 0, [2, 1], [1, 0]), [(3, 3), (1, 3)], (4, 3), "0:3,1"),
        (uneven(((4,), -1), 0, [0, 4]), [(0, 3), (4, 3)], (4, 3), "0:4"),
        (uneven((3, (4,)), 1, [0, 4]), [(3, 0), (3, 4)], (3, 4), "1:4"),
        (uneven(((1,), -1), 0, [1, 0]), [(1, 3), (0, 3)], (1, 3), "0:1"),
        (uneven((3, (4,), 4), 1, [3, 1]), [(9, 4), (3, 4)], (12, 4), "view"),
        (uneven((3, (4,), 4), 1, [1, 3]), [(3, 4), (9, 4)], (12, 4), "view"),
        (sub(((4, 4), (1, 3)), 0), [(4, 4)] * 2, (8, 4), "0:4,4"),  # parts of another axis
        (sub(((2, 2), -1), 0, universal_checkpoint_version=0.3), [(2, 3)] * 2, (4, 3), "0:2,2"),
        (sub((2, -1), 0), [(4, 3)] * 2, (8, 3), "0:4,4"),  # a number of equal parts
        (sub(((2,), -1), 0), [(1, 3)] * 2, (2, 3), "0:2"),
        (sub((1, (2,), 3), 1), [(1, 3)] * 2, (2, 3), "view"),  # of which axis 1 is rows
        (sub(((2,), 1), 0), [(1, 1)] * 2, (2, 1), "0:2"),
        (sub((1, (2,)), 1), [(1, 1)] * 2, (1, 2), "1:2"),
    ],
)
def test_the_whole_shape_of_a_view(
    info: Info, shapes: Shapes, whole: tuple[int, ...], rule: str
) -> None:
    sliced = UniversalInfo(info).sliced(NAME, shapes)
    assert sliced is not None
    assert (sliced.shape, sliced.placement.text) == (whole, rule)
    assert sliced.slicing.covers()


@pytest.mark.parametrize(
    ("info", "shapes", "said"),
    [
        (sub(((2,), -1), 0), [(2, 3), None], "tensor rank 1 has no slice of it"),
        (sub((4, -1), 2), [(2, 3)] * 2, r"\[4, -1\] has no axis 2"),
        (sub((4, -1), -1), [(2, 3)] * 2, r"\[4, -1\] has no axis -1"),
        (
            uneven(((4,), -1), 0, [3, 1]),
            [(2, 3)] * 2,
            r"of 9, 3 elements, but have the sh",
        ),
        (
            uneven(((1,), 0), 0, [1, 0]),
            [(1, 3), (0, 3)],
            "of 0, 0 elements, but have ",
        ),
        (
            uneven(((3,), -1), 0, [3, 1]),
            [(3, 3), (1, 3)],
            r"sums \[3\], but lists \[\[3, 1\]\]",
        ),
        (uneven(((4, 0), -1), 0, [3, 1], [0]), [(3, 3), (1, 3)], r"but lists \[\[3, 1\], \[0\]\]"),
        (
            uneven((1, -1), 0, [3, 1, 0]),
            [(3, 3), (1, 3)],
            r"2 sizes .* lists \[\[3, 1, 0\]\]",
        ),
        (uneven((2, -1), 0), [(2, 3)] * 2, r"2 sizes for each sub-parameter, but lists \[\]"),
        (
            {"parameter_with_row_parallelism_patterns": ["layers"]},
            [(2, 3), (3, 3)],
            "the rule `layers = 1`",
        ),
    ],
)
def test_ranks_that_contradict_an_info(info: Info, shapes: Shapes, said: str) -> None:
    with pytest.raises(InconsistentCheckpoint, match=said):
        UniversalInfo(info).sliced(NAME, shapes)


def test_a_view_for_other_parameters_hides_no_later_rule() -> None:
    info = {**sub(((2, 2), -1), 0), "parameter_with_row_parallelism_patterns": ["head"]}
    sliced = UniversalInfo(info).sliced("head.weight", [(2, 3)] * 2)
    assert sliced is not None
    assert (sliced.placement.text, sliced.shape) == ("1", (2, 6))


def test_a_size_of_the_vocabulary_that_is_no_number() -> None:
    info = {"original_vocab_size": "7", "vocabulary_parameter_patterns": ["embed"]}
    sliced = UniversalInfo(info).sliced("embed.weight", [(4, 2)] * 2)
    assert sliced is not None
    assert sliced.vocabulary is None


def test_other_ranks_of_an_info_without_a_whole_map() -> None:
    """Without a map, with one that lacks ranks, and with one whose parameters differ."""
    assert info_for(widths([2, 2]), 2, [])["sub_param_shard_widths"] == {
        r"layers\.\d+\.mixer": [(2, 2)]
    }
    for params in ({}, {"a": {}}, {"a": {"ranks": {0: {}, 1: {}}}, "b": {"ranks": {0: {}}}}):
        info = {"affine_map": {"params": params}}
        assert info_for(info, 2, ["b.bias"]) == {"tp_replicated_parameter_patterns": [r"^b\.bias$"]}
    two = {"affine_map": {}, "tp_replicated_parameter_patterns": ["a", "b"]}
    assert info_for(two, 2, ["a", "b", "c"]) == {
        "tp_replicated_parameter_patterns": ["a", "b", "^c$"]
    }


def affine(whole: list[int], by_rank: dict[int, tuple[list[int], list[Info]]]) -> UniversalInfo:
    ranks = {str(n): {"shard_shape": s, "pieces": each} for n, (s, each) in by_rank.items()}
    return UniversalInfo(
        {"affine_map": {"params": {NAME: {"logical_shape": whole, "ranks": ranks}}}}
    )


WHOLE = [4, 3], [piece([4, 3], ROWS, ROWS)]
UPPER, LOWER = piece([2, 3], ROWS, ROWS), piece([2, 3], [6, [3, 1]], [6, [3, 1]])
TWICE = piece([2, 3], ROWS, [6, [3, 1]])  # the upper rows again, as the lower ones
EIGHT = [0, [1] * 8]


@pytest.mark.parametrize(
    ("whole", "by_rank", "boxes", "rule"),
    [
        ([4, 3], {0: WHOLE, 1: WHOLE}, [((0, 0), (0, 0)), ((0, 0), (0, 0))], "replicated"),
        ([4, 3], {0: WHOLE}, [((0, 0), (0, 0))], "affine_map"),  # rank 1 has nothing
        ([4, 3], {0: WHOLE, 1: ([0, 3], [piece([0, 3], ROWS, ROWS)])},
         [((0, 0), (0, 0))], "affine_map"),
        ([4, 3], {0: ([4, 3], [UPPER, LOWER]), 1: ([2, 3], [UPPER])},
         [((0, 0), (0, 0)), ((2, 0), (2, 0)), ((0, 0), (0, 0))], "affine_map"),
        ([4, 3], {0: ([4, 3], [UPPER, LOWER]), 1: ([4, 3], [UPPER, TWICE])},
         [((0, 0), (0, 0)), ((2, 0), (2, 0)), ((0, 0), (0, 0)), ((2, 0), (0, 0))], "affine_map"),
        ([4, 3], {0: ([4, 2], [piece([4, 2], [0, [3, 1]], [0, [2, 1]])]),
                  1: ([4, 1], [piece([4, 1], [2, [3, 9]], [0, [1, 9]])])},
         [((0, 0), (0, 0)), ((0, 0), (0, 2))], "affine_map"),
        ([2, 1, 3], {0: ([1, 1, 3], [piece([1, 1, 3], [0, [3, 3, 1]], [0, [9, 9, 1]])]),
                     1: ([1, 1, 3], [piece([1, 1, 3], [3, [3, 3, 1]], [0, [9, 9, 1]])])},
         [((0, 0, 0), (0, 0, 0)), ((0, 0, 0), (1, 0, 0))], "affine_map"),
        ([1] * 8, {0: ([1] * 8, [piece([1] * 8, EIGHT, EIGHT)])},
         [((0,) * 8, (0,) * 8)], "affine_map"),
    ],
)  # fmt: skip
def test_places_of_the_pieces_of_a_map(whole: Any, by_rank: Any, boxes: Any, rule: str) -> None:
    """Where each piece begins in its slice and in the whole; a rank without pieces has None."""
    shapes = [tuple(by_rank[n][0]) if n in by_rank else None for n in range(2)]
    sliced = affine(whole, by_rank).sliced(NAME, shapes)
    assert sliced is not None
    assert [(each.inside, each.offsets) for each in sliced.slicing.pieces] == boxes
    assert sliced.slicing.slices == tuple(shape or (0,) * len(whole) for shape in shapes)
    assert (sliced.shape, sliced.placement.text) == (tuple(whole), rule)
    assert sliced.slicing.covers()


@pytest.mark.parametrize(
    ("of_rank_1", "error", "said"),
    [
        (([4, 3], [UPPER, LOWER]), InconsistentCheckpoint, "every element"),  # other boxes
        (([2, 0], [piece([2, 3], ROWS, [0, [0, 1]])]), InconsistentCheckpoint, "every element"),
        (([2, 3], [piece([2, 3], [0, [3, 2]], ROWS)]), UnsupportedCheckpoint, "not a box"),
        (([2, 3], [piece([2, 3], [0, [1, 1]], ROWS)]), UnsupportedCheckpoint, "not a box"),
        (([2, 3], [piece([2], [0, [3]], [0, [3]])]), UnsupportedCheckpoint, "not a box"),
    ],
)
def test_pieces_of_a_map_that_do_not_fit(of_rank_1: Any, error: Any, said: str) -> None:
    info = affine([4, 3], {0: WHOLE, 1: of_rank_1})
    with pytest.raises(error, match=said):
        decide("run", {NAME: [(4, 3), tuple(of_rank_1[0])]}, [info], 2)


def test_a_map_without_the_first_rank_states_no_shapes() -> None:
    assert affine([4, 3], {1: WHOLE}).stated_shapes(NAME) is None
