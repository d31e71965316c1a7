"""What `inspect` says of a manifest, and the advice where files have no checksums."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from zckpt.core.checkpoint.entries import Entry
from zckpt.core.checkpoint.facts import ExpertLayer, FlatBufferEngine
from zckpt.core.checkpoint.manifest import Manifest, Parameter, Run
from zckpt.core.checkpoint.optimizer_states import StateRow, States, of_parameters
from zckpt.core.checkpoint.origin import Origin
from zckpt.core.passes.description import advice, inspect, tensors
from zckpt.core.storage.fragments import Extent, Fragment, Record, Runs, solid

DTYPES = ("U8", "F64", "BF16", "I64", "F32", "F16", "I8")


def manifest(*entries: Entry, **fields: Any) -> Manifest:
    """Two parameters, and these tensors."""
    parameters = {name: Parameter((2, 3), step=4) for name in "vw"}
    plain = Manifest(
        "/run", "x", Run(Origin("y")), {each.key: each for each in entries}, parameters
    )
    return plain.replace(**fields)


def test_what_the_least_manifest_says(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(bytes(7))
    said = inspect(manifest(paths=(str(tmp_path / "a"),)), ["os.system"])
    assert said == {
        "zckpt": 2,
        "command": "inspect",
        **Origin("y").to_json(),
        "format": "x",
        "written_by": "y",
        "path": "/run",
        "step": 4,
        "complete": True,
        "optimizer": None,
        "parameters": 2,
        "elements": 12,
        "slots": {},
        "states": [],
        "groups": None,
        "steps": [],
        "files": 1,
        "bytes": 7,
        "problems": [],
        "left_out": [],
        "inferred": [],
        "objects": ["os.system"],
    }


def test_what_only_some_manifests_have() -> None:
    engine = FlatBufferEngine("flats", None, None, None, False, None, {})
    said = inspect(
        manifest(
            origin=Origin("y", slices=4),
            roots={"model": ("optimizer", "scheduler")},
            groups=({"lr": 0.1, "betas": (0.9, 0.99)}, {"lr": 0.2}),
            engine=replace(engine, experts=(ExpertLayer("layers.1", 8, 2),)),
        ),
        (),
    )
    assert said["complete"] is False
    assert said["roots"] == {"model": ("optimizer", "scheduler")}
    assert said["groups"] == [{"lr": 0.1, "betas": [0.9, 0.99]}, {"lr": 0.2}]
    assert said["experts"] == [{"layer": "layers.1", "experts": 8, "ep": 2}]


def test_a_slot_lists_its_types_in_order() -> None:
    """A set has no order that stays."""
    said = inspect(manifest(*(Entry(d, "param", d, (2,), Runs([])) for d in DTYPES)), ())
    assert said["slots"] == {
        "param": {"tensors": 7, "dtype": ", ".join(sorted(DTYPES)), "elements": 14, "bytes": 52}
    }


def test_why_a_state_was_not_read() -> None:
    other = {"v": {"momentum": None}, "w": {"momentum": None, "rows": [1, 2]}}
    unsupported = StateRow("Q", "unsupported", ("w",), "", "it is sparse")
    said = inspect(
        manifest(
            Entry("w", "exp_avg", "F32", (2, 3), Runs([])),
            states=States((*of_parameters("other", other), unsupported)),
        ),
        (),
    )
    assert said["states"] == [
        {"state": "momentum", "parameters": 2, "form": "None"},
        {
            "state": "rows",
            "parameters": 1,
            "form": "of other shapes than the parameters, or no tensors",
        },
        {"state": "Q", "parameters": 1, "form": "not read: it is sparse"},
    ]


def records(safe: str = "", unsafe: str = "") -> tuple[Record, ...]:
    """A record in each of these files of `/run`, with and without a checksum."""
    return tuple(
        Record(Extent(f"/run/{name}", 0, 4), crc)
        for names, crc in ((safe, 1), (unsafe, None))
        for name in names
    )


@pytest.mark.parametrize(
    ("safe", "unsafe", "which"),
    [
        ("", "ab", "the files of /run have"),
        ("a", "ab", "the files of /run have"),  # a file of both kinds is not safe
        ("z", "a", "some files of /run (a) have"),
        ("z", "gfedcba", "some files of /run (a, b, c and 4 more) have"),
    ],
)
def test_which_files_have_no_checksums(safe: str, unsafe: str, which: str) -> None:
    said = advice(manifest(records=records(safe, unsafe)), bare=1)["advice"]
    assert said["message"] == (
        f"{which} no checksums, so damage in them may go unseen; compare them with another copy "
        "(`zckpt verify /run --against COPY`); a universal checkpoint has checksums"
    )


def test_no_advice_where_all_that_was_read_was_checked() -> None:
    assert advice(manifest(records=records(unsafe="a")), bare=0) == {}


def test_a_tensor_with_its_checksum_and_its_places() -> None:
    whole = Entry("v", "param", "F32", (2, 3), solid(6, Extent("a", 8, 24)), digest=0xBEEF)
    strided = Fragment(0, 2, Extent("b", 0, 12), 3, 4)
    cut = Entry("w", "param", "BF16", (2, 3), Runs([strided]))
    plain = [
        {"tensor": "v/param", "dtype": "F32", "shape": [2, 3], "elements": 6, "count": 1},
        {"tensor": "w/param", "dtype": "BF16", "shape": [2, 3], "elements": 6, "count": 1},
    ]
    plain[0]["crc32"] = "0000beef"
    assert tensors(manifest(whole, cut), "*/param") == plain
    first = {"start": 0, "stop": 6, "file": "a", "offset": 8, "length": 24, "count": 1, "stride": 0}
    assert tensors(manifest(whole, cut), "v/*", fragments=True) == [
        {**plain[0], "fragments": [first]}
    ]
    second = {"start": 0, "stop": 2, "file": "b", "offset": 0, "length": 12}
    assert tensors(manifest(whole, cut), "w/*", fragments=True) == [
        {**plain[1], "fragments": [{**second, "count": 3, "stride": 4}]}
    ]
