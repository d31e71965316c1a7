"""What a proof keeps of a checkpoint, and what is compared with it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

import zckpt
from zckpt.core.checkpoint.entries import Entry, key_of
from zckpt.core.checkpoint.facts import StateDictEngine, StepPlace
from zckpt.core.checkpoint.inert import Scalar
from zckpt.core.checkpoint.manifest import Files, Manifest, Parameter, Run
from zckpt.core.checkpoint.optimizer_states import StateRow, States, of_parameters
from zckpt.core.checkpoint.origin import Origin
from zckpt.core.checkpoint.states import EVERYTHING, Selection
from zckpt.core.passes.description import Report
from zckpt.core.passes.resources import DEFAULT_COPYING, Begin
from zckpt.core.storage.fragments import Runs
from zckpt.errors import (
    AmbiguousCheckpoint,
    CorruptCheckpoint,
    MissingData,
    UnsupportedCheckpoint,
)
from zckpt.proof import saved
from zckpt.proof.saved import _of_first_rank, about, is_proof, read_proof

from ..conftest import texts
from .test_findings import checkpoint, verify_alone


def verify_proof(
    own: Manifest,
    proven: Manifest,
    contents: str,
    chosen: Selection = EVERYTHING,
    begin: Begin | None = None,
    root: str = "",
) -> Report:
    return saved.verify_proof(own, proven, contents, chosen, DEFAULT_COPYING, begin, root)


def entry(name: str, digest: int | None = None) -> Entry:
    return Entry(*key_of(name), "F32", (2, 3), Runs([]), digest)


@pytest.fixture
def manifest() -> Manifest:
    return Manifest(
        "run",
        "x",
        Run(
            Origin.of_json({"format": "x", "version": "1.2", "dp": 3, "odd": (1, 2)}),
            engine=StateDictEngine("plain", None, (), None, None, None, None, False, False),
            step_place=StepPlace("state", "F32"),
        ),
        {("w", "param"): entry("w/param", 17)},
        {"w": Parameter((2, 3), True, 0, 3, ("tied",))},
        buffers=("b",),
        groups=({"lr": 0.5, "betas": [0.9, 0.99]},),
        optimizer="AdamW",
        state={"client_state": {"seed": 1}},
        states=States(
            (
                StateRow("d", "number", ("w",), Scalar(2.0, "F32")),
                unsupported("key", entry("t/state", 5), entry("u/state", 6)),
                unsupported("other", entry("gone/state", 7)),
            )
        ),
        files=Files(
            of_ranks={"rank_1": {"client_state.seed": 2}}, layout={"rank_1": {"offset": 4}}
        ),
    )


def unsupported(key: str, *tensors: Entry) -> StateRow:
    return StateRow(key, "unsupported", ("w",), "content", "why", tensors=tensors)


def others(**values: Any) -> States:
    return States(tuple(of_parameters("other", {"w": values})))


def proof(manifest: Manifest, path: Path, **changes: Any) -> Path:
    entries = [*manifest.entries.values(), *manifest.states.rows[1].tensors]
    digests = {e.name: {"dtype": "F32", "shape": [2, 3], "a": f"{e.digest:08x}"} for e in entries}
    digests["read/param"] = {"dtype": "F32", "shape": [1], "b": "00000001"}
    report = {
        "command": "verify",
        "equal": True,
        "digests": digests,
        "versions": {"a": {"format": "of an older proof"}},
        **about(manifest),
        **changes,
    }
    path.write_text(json.dumps(report))
    return path


def test_a_proof_keeps_what_is_not_a_tensor(manifest: Manifest, tmp_path: Path) -> None:
    path = proof(manifest, tmp_path / "proof.json")
    proven, contents = read_proof(str(path), manifest)
    number, first, second = manifest.states
    plain = replace(manifest.run.origin, other_fields={})
    expected = manifest.replace(
        root=str(path),
        origin=plain,
        states=States((number, first, replace(second, value="", tensors=()))),
        states_inferred=False,
    )
    for field in manifest.__struct_fields__:
        if field not in ("entries", "states"):
            assert getattr(proven, field) == getattr(expected, field), field
    assert {name: own.digest for name, own in proven.entries.items()} == {("w", "param"): 17}
    kept = [(own.value, [e.name for e in own.tensors]) for own in proven.states.rows[1:]]
    assert kept == [("content", ["t/state", "u/state"]), ("", [])]
    assert contents == ""


def test_a_proof_with_inferred_names_keeps_the_digest_of_the_files(
    manifest: Manifest, tmp_path: Path
) -> None:
    inferred = manifest.replace(inferred=("w",))
    _, contents = read_proof(str(proof(inferred, tmp_path / "proof.json")), manifest)
    assert contents == "00000000"  # of no files


def test_a_state_that_is_none_is_not_listed(manifest: Manifest) -> None:
    """As SGD's momentum before the first step: there is nothing that could be lost."""
    own = replace(manifest, states=others(momentum=None, k=[1]))
    assert about(own)["held"]["states"] == {"k": ["w"]}
    moment = {("w", "exp_avg"): entry("w/exp_avg", 8)}  # it is among the tensors
    own = replace(own, entries={**own.entries, **moment})
    assert about(own)["held"]["states"] == {"k": ["w"]}


def test_an_older_proof_has_the_states_of_the_other_side(
    manifest: Manifest, tmp_path: Path
) -> None:
    """It did not list states that are no tensors; a later one listed their parameters."""
    held = about(manifest)["held"]
    for key in ("state", "source", "format", "optimizer", "of_ranks", "layout", "unread"):
        del held[key]
    own = replace(manifest, states=others(k=[1, 2]))
    path = proof(manifest, tmp_path / "p", held={**held, "states": {"k": ["w"], "l": ["w"]}})
    proven, _ = read_proof(str(path), own)
    assert proven.states.without_form("number", "unsupported") == others(k=True, l=True)
    assert (proven.format, proven.source) == ("proof", {"format": "of an older proof"})
    del held["states"]
    proven, _ = read_proof(str(proof(manifest, tmp_path / "p", held=held)), own)
    assert proven.states.without_form("number", "unsupported") == others(k=True)


def test_what_is_no_proof_is_refused(
    manifest: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = proof(manifest, tmp_path / "p", equal=False)
    with pytest.raises(CorruptCheckpoint, match="proves a difference"):
        read_proof(str(path), manifest)
    path.write_text("{}")
    with pytest.raises(CorruptCheckpoint, match="is not a proof"):
        read_proof(str(path), manifest)
    held = {**about(manifest)["held"], "source": {"dp": "two"}}
    with pytest.raises(CorruptCheckpoint, match=r"is not a proof: .*\$\.dp"):
        read_proof(str(proof(manifest, path, held=held)), manifest)
    path = proof(manifest, tmp_path / "p")
    size = proof(manifest, path).stat().st_size
    monkeypatch.setattr(saved, "MAX_PROOF", size)
    read_proof(str(path), manifest)
    monkeypatch.setattr(saved, "MAX_PROOF", size - 1)
    with pytest.raises(UnsupportedCheckpoint, match="larger than any proof"):
        read_proof(str(path), manifest)


@pytest.mark.parametrize("group", [-1, 1])
def test_a_proof_of_a_group_that_is_not_there_is_refused(
    group: int, manifest: Manifest, tmp_path: Path
) -> None:
    own = replace(manifest, parameters={"w": Parameter((2, 3), group=group)})
    with pytest.raises(CorruptCheckpoint, match=f"not a proof: .*w is in group {group}, and"):
        read_proof(str(proof(own, tmp_path / "p")), manifest)
    weights = replace(own, groups=None)  # without the hyper-parameters of any group
    proven, _ = read_proof(str(proof(weights, tmp_path / "p")), manifest)
    assert proven.groups is None
    frozen = replace(manifest, parameters={"w": Parameter((2, 3), trainable=False)})
    proven, _ = read_proof(str(proof(frozen, tmp_path / "p")), manifest)
    assert proven.parameters == frozen.parameters


def test_a_proof_is_known_by_its_beginning(manifest: Manifest, tmp_path: Path) -> None:
    path = proof(manifest, tmp_path / "p")
    assert is_proof(str(path))
    path.write_text(f"\n  {path.read_text()}")
    assert is_proof(str(path))
    for text in ('{"model": 1}', ' "command": "verify"', ""):
        path.write_text(text)
        assert not is_proof(str(path))
    assert not is_proof(str(tmp_path))


def test_what_further_ranks_have_is_not_in_a_proof(manifest: Manifest) -> None:
    """But copies of tensors are compared with the first rank's own."""
    copies = (entry("w/param"), entry("b/param"), entry("r/state"), entry("b/param"))
    assert texts(_of_first_rank(replace(manifest, replicas=copies))) == [
        "b/param, r/state of ranks after the first: a proof file has checksums only for the first "
        "rank"
    ]
    assert _of_first_rank(replace(manifest, replicas=copies[:1])) == []


# -- what is compared


def proven_of(own: Manifest, tmp_path: Path) -> Manifest:
    """The proof of a checkpoint, read again."""
    path = tmp_path / "proof.json"
    path.write_text(json.dumps({"command": "verify", **about(own), **verify_alone(own)}))
    return read_proof(str(path), own)[0]


@pytest.mark.parametrize("kinds", [("F32", "F64"), ("F64", "F32")])
@pytest.mark.parametrize("buffers_of", ["a", "b", ""])
def test_values_of_another_type_need_the_checkpoints_themselves(
    buffers_of: str, kinds: tuple[str, str], tmp_path: Path
) -> None:
    """Checksums cannot tell whether they are equal, and these are not."""
    name = "b/param" if buffers_of else "w/exp_avg"
    own, other = (
        checkpoint(
            tmp_path / kind,
            {"w/param": ("F32", [1, 2]), name: (kind, [number])},
            parameters={"w": Parameter((2,))},
            buffers=("b",) if buffers_of == side else (),
        )
        for side, kind, number in zip("ab", kinds, (1, 7), strict=True)
    )
    proven = proven_of(other, tmp_path)
    message = f"{kinds[0]} has {name} in another type than .*proof.json: a proof has only checksums"
    for tensors in (None, name):
        with pytest.raises(MissingData, match=message):
            verify_proof(own, proven, "", Selection(tensors=tensors))
    report = verify_proof(own, proven, "", Selection(tensors="w/param"))
    assert (report["equal"], report["tensors"]) == (True, 1)


@pytest.mark.parametrize("tensors", [None, "*"])
def test_a_weight_that_was_rounded_to_another_type_is_named(
    tensors: str | None, tmp_path: Path
) -> None:
    """Its master is compared; the rounded values of two types have no checksum in common."""
    tensors_of = {"w/param": ("F16", [1.0, 2.0]), "w/master": ("F32", [1.0, 2.0])}
    own = checkpoint(tmp_path / "a", tensors_of, parameters={"w": Parameter((2,))})
    proven, selection = proven_of(own, tmp_path), Selection(tensors=tensors)
    assert verify_proof(own, proven, "", selection)["not_compared"] == []
    narrow = replace(proven.entries["w", "param"], dtype="BF16", digest=1)
    other = replace(proven, entries={**proven.entries, ("w", "param"): narrow})
    report = verify_proof(own, other, "", selection)
    assert report["equal"]
    (line,) = texts(report["not_compared"])
    assert line.startswith("w/param: rounded to another type than in the proof")


def test_tensors_of_another_shape_or_kind_differ(tmp_path: Path) -> None:
    """Without being read; numbers of one kind are not those of another. A buffer is equal here."""
    moments = {"v/exp_avg": ("F32", [1.0, 2.0]), "w/exp_avg": ("F32", [1.0, 2.0])}
    weights = {"w/param": ("F32", [1.0]), "b/param": ("F32", [1.0])}
    own = checkpoint(tmp_path / "a", {**weights, **moments}, buffers=("b",))
    proven = proven_of(own, tmp_path)
    changes = {"v/exp_avg": {"shape": (3,)}, "w/exp_avg": {"dtype": "C64"}}
    entries = {
        key: replace(own, **changes.get(own.name, {})) for key, own in proven.entries.items()
    }
    report = verify_proof(own, replace(proven, entries=entries), "")
    assert not report["equal"]
    assert report["differences"] == [
        {"tensor": "v/exp_avg", "a_shape": [2], "b_shape": [3]},
        {"tensor": "w/exp_avg", "a_dtype": "F32", "b_dtype": "C64"},
    ]


@pytest.mark.parametrize("is_copy", [True, False])
def test_inferred_names_prove_something_of_a_copy_alone(is_copy: bool, tmp_path: Path) -> None:
    tensors = {"w/param": ("F32", [1.0]), "w/exp_avg": ("F32", [2.0])}
    own = checkpoint(tmp_path / "a", tensors, inferred=("w",))
    contents = about(own)["held"]["contents"] if is_copy else "of other files"
    report = verify_proof(own, proven_of(own, tmp_path), contents)
    assert report["equal"] is is_copy
    assert [line["parameters"] for line in report["unproven"]] == ([] if is_copy else [["w"]])


def test_what_is_no_tensor_is_compared_too(tmp_path: Path) -> None:
    """Beside what a proof never has: the random state of a further rank."""
    tensors = {"w/param": ("F32", [1.0]), "w/exp_avg": ("F32", [2.0])}
    own = checkpoint(
        tmp_path / "a",
        tensors,
        parameters={"w": Parameter((1,), group=0, step=3)},
        groups=({"lr": 1.0, "fused": None},),
    )
    proven = proven_of(replace(own, groups=({"lr": 2.0},)), tmp_path)
    copy = replace(own.entries["w", "param"], parameter="rng", slot="state")
    report = verify_proof(replace(own, replicas=(copy,)), proven, "")
    assert not report["equal"]
    assert report["groups"] == [{"group": 0, "key": "lr", "a": 1.0, "b": 2.0}]
    assert texts(report["not_compared"]) == [
        f"fused of the optimizer's groups: only in {own.root}",
        "rng/state of ranks after the first: a proof file has checksums only for the first rank",
    ]
    chosen = verify_proof(own, proven, "", Selection(tensors="w/*"))
    assert (chosen["equal"], "groups" in chosen) == (True, False)


def test_what_was_rounded_from_masters_of_both_needs_no_comparison(tmp_path: Path) -> None:
    master = {"w/master": ("F32", [1, 2])}
    own = checkpoint(tmp_path / "a", {**master, "w/param": ("F16", [1, 2])})
    proven = proven_of(checkpoint(tmp_path / "b", master), tmp_path)
    report = verify_proof(own, proven, "")
    assert (report["equal"], report["slots"]) == (True, {"master": 1})


def test_states_alone_are_compared_if_they_are_chosen(tmp_path: Path) -> None:
    """All of a checkpoint without weights proves nothing."""
    own = checkpoint(tmp_path / "a", {"w/exp_avg": ("F32", [1, 2])})
    proven = proven_of(own, tmp_path)
    report = verify_proof(own, proven, "", Selection(tensors="*/exp_avg"))
    assert (report["equal"], report["tensors"]) == (True, 1)
    with pytest.raises(MissingData, match="share no weights"):
        verify_proof(own, proven, "")


def test_the_bytes_to_come_are_told(tmp_path: Path) -> None:
    own = checkpoint(tmp_path / "a", {"w/param": ("F32", [1, 2]), "w/exp_avg": ("F32", [3, 4])})
    seen: list[int] = []

    def begin(total: int) -> Callable[[int], None]:
        seen.append(-total)
        return seen.append

    verify_proof(own, proven_of(own, tmp_path), "", begin=begin)
    assert (seen[0], sum(seen)) == (-16, 0)


def test_one_of_several_proven_models_is_compared(tmp_path: Path) -> None:
    models = {f"{name}.w/param": ("F32", [value]) for value, name in enumerate(("actor", "critic"))}
    proven = proven_of(checkpoint(tmp_path / "both", models), tmp_path)
    critic = checkpoint(tmp_path / "critic", {"w/param": ("F32", [1])})
    assert verify_proof(critic, proven, "", root="critic")["equal"]
    report = verify_proof(critic, proven, "", root="actor")
    assert [line["tensor"] for line in report["differences"]] == ["w/param"]
    with pytest.raises(AmbiguousCheckpoint, match="may be any of these: actor, critic"):
        verify_proof(critic, proven, "")


# -- commands


def weights(path: Path, dtype: torch.dtype = torch.float32, **more: torch.Tensor) -> Path:
    torch.manual_seed(0)
    model = {"w": torch.randn(3, 4), "v": torch.randn(2)}
    torch.save({name: own.to(dtype) for name, own in {**model, **more}.items()}, path)
    return path


def compared(path: Path, with_: Path, tensors: str | None = None) -> Any:
    """The report on a checkpoint against the proof of another one."""
    proof = path.with_name("proof.json")
    proof.write_text(json.dumps(zckpt.verify(with_)))
    return zckpt.verify(path, proof, tensors=tensors)


def test_weights_that_were_rounded_need_the_weights_themselves(tmp_path: Path) -> None:
    wide, narrow = weights(tmp_path / "a.pt"), weights(tmp_path / "b.pt", torch.bfloat16)
    with pytest.raises(MissingData, match=r"proof\.json has w, v in a narrower type than .*a\.pt"):
        compared(wide, narrow)
    with pytest.raises(MissingData, match=r"b\.pt has w, v in a narrower type than .*proof"):
        compared(narrow, wide)


def test_only_the_chosen_tensors_are_compared(tmp_path: Path) -> None:
    own = weights(tmp_path / "a.pt")
    other = weights(tmp_path / "b.pt", v=torch.zeros(2), x=torch.ones(1))
    report = compared(own, other)
    assert not report["equal"]
    assert [line["tensor"] for line in report["differences"]] == ["v/param"]
    report = compared(own, other, tensors="w/*")
    assert (report["equal"], report["differences"]) == (True, [])
    report = compared(own, other, tensors="v/*")
    assert (report["equal"], len(report["differences"])) == (False, 1)


def test_a_proof_of_other_weights_proves_nothing(tmp_path: Path) -> None:
    own, other = weights(tmp_path / "a.pt"), tmp_path / "b.pt"
    torch.save({"other": torch.ones(3)}, other)
    with pytest.raises(MissingData, match="share no weights"):
        compared(own, other)
