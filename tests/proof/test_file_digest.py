"""A copy equals its original, also if names in it are inferred."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from torch import nn

from zckpt import read
from zckpt.core.checkpoint.entries import Entry
from zckpt.core.checkpoint.manifest import Files, Manifest, Run
from zckpt.core.storage.fragments import Extent, Record, solid
from zckpt.proof.file_digest import digest

from ..conftest import Result

Program = Callable[..., Result]
FORMS = {"a file": (), "dcp": ("--to", "dcp"), "universal": ("--to", "universal")}


def content() -> dict[str, Any]:
    """Shapes repeat, so that the order alone shows the names."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


@pytest.fixture
def original(tmp_path: Path) -> Path:
    torch.save(content(), tmp_path / "x.pt")
    return tmp_path / "x.pt"


def made(original: Path, form: str, zckpt: Program) -> tuple[Path, Path]:
    """A checkpoint of a form, and its copy under another name."""
    path = original
    if FORMS[form]:
        path = original.with_name("target")
        assert zckpt("convert", original, path, *FORMS[form]).code == 0
    copy = path.with_name("y.pt" if path.is_file() else "copy")
    (shutil.copy if path.is_file() else shutil.copytree)(path, copy)
    return path, copy


@pytest.mark.parametrize("form", FORMS)
def test_a_copy_is_equal(form: str, original: Path, zckpt: Program) -> None:
    path, copy = made(original, form, zckpt)
    proof = original.with_name("proof.json")
    assert zckpt("verify", path, "--save-proof", proof).code == 0
    for against in (path, proof):
        said = zckpt("verify", copy, "--against", against)
        assert said.code == 0, said.out
        assert "proves nothing" not in said.out
        assert "not compared" not in said.out


@pytest.mark.parametrize("name", ["x.pt", "other.pt"])
def test_a_copy_in_a_folder_is_equal(name: str, original: Path, zckpt: Program) -> None:
    folder, proof = original.with_name("folder"), original.with_name("proof.json")
    folder.mkdir()
    shutil.copy(original, folder / name)
    assert zckpt("verify", folder, "--save-proof", proof).code == 0
    for copy, against in ((folder, original), (original, folder), (original, proof)):
        said = zckpt("verify", copy, "--against", against)
        assert said.code == 0, said.out


def test_a_copy_is_equal_also_without_a_state(original: Path, zckpt: Program) -> None:
    """Files without checksums: what is not compared is a tensor all the same."""
    torch.save(content(), original, _use_new_zipfile_serialization=False)
    copy, proof = original.with_name("y.pt"), original.with_name("proof.json")
    shutil.copy(original, copy)
    assert zckpt("verify", original, "--save-proof", proof).code == 0
    for against in (original, proof):
        said = zckpt("verify", copy, "--against", against, "--drop-state", "exp_avg")
        assert said.code == 0, said.out


def test_bytes_of_tensors_are_not_read(tmp_path: Path) -> None:
    """Weights that are parts of one storage, in a file without checksums."""
    flat = torch.arange(40_000.0)
    model = {"a": flat[:10_000], "b": flat[10_000:]}
    torch.save({"model": model}, tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    manifest = read(tmp_path / "x.pt")
    before = digest(manifest)
    with open(tmp_path / "x.pt", "r+b") as file:
        extent = manifest.entries["b", "param"].fragments[0].extent
        file.seek(extent.offset + 8)
        file.write(b"other")
    assert digest(manifest) == before


def test_a_proof_with_names_needs_names(tmp_path: Path, zckpt: Program) -> None:
    """They fit in several ways here. zckpt asks for them, and calls nothing a difference."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.AdamW([{"params": list(layer.parameters())} for layer in model])
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    torch.save(
        {"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "x.pt"
    )
    (tmp_path / "names.txt").write_text("\n".join(dict(model.named_parameters())))
    names = ("--param-names", tmp_path / "names.txt")
    proof = tmp_path / "proof.json"
    assert zckpt("verify", tmp_path / "x.pt", *names, "--save-proof", proof).code == 0
    assert zckpt("verify", tmp_path / "x.pt", *names, "--against", proof).code == 0
    said = zckpt("verify", tmp_path / "x.pt", "--against", proof)
    assert said.code == 1
    assert "--param-names" in said.err


@pytest.mark.parametrize("form", ["dcp", "universal"])
def test_what_rests_on_one_inference_proves_nothing(
    form: str, original: Path, zckpt: Program
) -> None:
    path, _ = made(original, form, zckpt)
    proof = original.with_name("proof.json")
    assert zckpt("verify", original, "--save-proof", proof).code == 0
    for against in (original, proof):
        said = zckpt("verify", path, "--against", against)
        assert said.code == 3
        assert "proves nothing" in said.out


def test_other_bytes_beside_equal_tensors(original: Path, zckpt: Program) -> None:
    other = original.with_name("other.pt")
    torch.save(content(), other, pickle_protocol=4)
    said = zckpt("verify", other, "--against", original)
    assert said.code == 3
    assert "proves nothing" in said.out


def test_the_name_of_a_file_is_not_how_it_was_saved(original: Path, zckpt: Program) -> None:
    saved = content()
    saved["optimizer"]["param_groups"][0]["lr"] = 0.5
    torch.save(saved, original.with_name("other.pt"))
    said = zckpt("verify", original.with_name("other.pt"), "--against", original)
    assert said.code == 3
    assert "lr" in said.out
    assert "differ in how they were saved" not in said.out


def synthetic(root: Path, names: tuple[str, ...] = ("a", "b")) -> Manifest:
    """Files of 100 bytes: a tensor at 20, a copy of it at 50 that overlaps, a record at 70."""
    root.mkdir(exist_ok=True)
    entries, replicas, records = {}, [], []
    for name in names:
        path = root / name
        path.write_bytes(bytes(range(100)))
        fragments = solid(4, Extent(str(path), 20, 16))
        entries[name, "param"] = Entry(name, "param", "F32", (4,), fragments)
        fragments = solid(4, Extent(str(path), 30, 16))
        replicas.append(Entry(name, "param", "F32", (4,), fragments))
        records.append(Record(Extent(str(path), 70, 10), 1234))
        records.append(Record(Extent(str(path), 85, 10), None))
    return Manifest(
        str(root),
        "x",
        Run(),
        entries,
        {},
        replicas=tuple(replicas),
        files=Files(records=tuple(records), paths=tuple(str(root / name) for name in names)),
    )


@pytest.mark.parametrize("place", [0, 19, 20, 35, 36, 45, 46, 69, 70, 79, 80, 84, 85, 94, 95, 99])
def test_each_byte_counts_that_no_tensor_and_no_checksum_covers(place: int, tmp_path: Path) -> None:
    manifest = synthetic(tmp_path / "run")
    before = digest(manifest)
    path = tmp_path / "run" / "b"
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    is_covered = 20 <= place < 46 or 70 <= place < 80
    assert (digest(manifest) == before) is is_covered


def test_what_files_state_and_where_tensors_lie_counts(tmp_path: Path) -> None:
    """Also which file is which, if there are several: not their order, and not their folder."""
    manifest = synthetic(tmp_path / "run")
    before = digest(manifest)
    assert digest(synthetic(tmp_path / "copy")) == before
    assert digest(manifest.replace(paths=manifest.files.paths[::-1])) == before
    assert digest(synthetic(tmp_path / "others", ("a", "c"))) != before
    other = replace(manifest.files.records[0], stated_crc=1235)
    assert digest(manifest.replace(records=(other, *manifest.files.records[1:]))) != before
    moved = replace(
        manifest.replicas[0], fragments=solid(4, Extent(manifest.files.paths[0], 32, 14))
    )
    assert digest(replace(manifest, replicas=(moved, *manifest.replicas[1:]))) != before
    alone = {digest(synthetic(tmp_path / name, (name,))) for name in ("a", "b")}
    assert len(alone) == 1


def test_the_digest_of_a_proof_is_that_of_earlier_versions(tmp_path: Path) -> None:
    """It is kept in the proof: with another one, a copy would not be known as one."""
    assert digest(synthetic(tmp_path / "run")) == "7b8f8324"
