"""The Python API: one tensor of a checkpoint by its name, and what the package shows of itself."""

from __future__ import annotations

import json
import os
import pydoc
import re
import subprocess
import sys
import zlib
from importlib.resources import files
from pathlib import Path

import numpy
import pytest
import torch

import zckpt
from zckpt.core.checkpoint.entries import Entry, key_of, name_of
from zckpt.core.checkpoint.manifest import Manifest, Parameter, Run
from zckpt.core.passes.loading import as_numpy, as_torch, entry_of, head
from zckpt.core.storage.fragments import Extent, solid
from zckpt.errors import CorruptCheckpoint, MissingExtra, UnsupportedCheckpoint, WrongOption

from ..conftest import EXAMPLE, ROOT, needs
from ..formats.equality import load as load_universal
from ..formats.equality import same_bits

ORT = ROOT / "tests/data/onnxruntime/hdf5__fp16__adam__dp3"
DCP = ROOT / "tests/data/fsdp2-2.13.0-w2"


@pytest.mark.parametrize("source", [EXAMPLE, ORT, DCP], ids=lambda path: path.name)
def test_every_tensor_is_loaded(source: Path, tmp_path: Path) -> None:
    if source == ORT:
        needs("h5py")
    zckpt.convert(source, tmp_path / "universal")
    expected = load_universal(tmp_path / "universal")
    for path in (source, tmp_path / "universal"):
        for name in map(name_of, zckpt.read(path).entries):
            tensor = zckpt.load(path, name)
            assert isinstance(tensor, torch.Tensor)
            assert same_bits(tensor, expected[name]), name


def test_a_slice_of_many_ranks_is_put_together(tmp_path: Path) -> None:
    zckpt.reshard(EXAMPLE, tmp_path / "z3", stage=3, dp=7)
    one, other = (
        zckpt.load(path, "fc1.weight/exp_avg") for path in (EXAMPLE, str(tmp_path / "z3"))
    )
    assert one.shape == (29, 19)
    assert same_bits(one, other)


def test_what_read_takes_is_taken(tmp_path: Path) -> None:
    with pytest.raises(WrongOption, match="there is no format 'ftp'"):
        zckpt.load(EXAMPLE, "fc1.weight/exp_avg", format="ftp")
    (tmp_path / "run").mkdir()
    for tag in ("global_step7", "global_step8"):
        (tmp_path / "run" / tag).symlink_to(EXAMPLE / "global_step7")
    with pytest.raises(zckpt.ZckptError):
        zckpt.load(tmp_path / "run", "fc1.weight/exp_avg")
    assert zckpt.load(tmp_path / "run", "fc1.weight/exp_avg", tag="global_step8").any()


def test_a_second_name_of_a_tied_weight() -> None:
    tied = zckpt.load(EXAMPLE, "head.weight/master")
    assert same_bits(tied, zckpt.load(EXAMPLE, "embedding.weight/master"))


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("fc1.weight", "fc1.weight/master, fc1.weight/exp_avg"),
        ("fc1.weight/exp_avgs", "fc1.weight/exp_avg"),
        ("fc1.wieght/exp_avg", "fc1.weight/exp_avg"),
        ("module.fc1.weight/exp_avg", "fc1.weight/exp_avg"),
        ("nothing of the kind", "zckpt inspect .* --tensors"),
    ],
)
def test_a_name_that_does_not_exist(name: str, near: str) -> None:
    with pytest.raises(WrongOption, match=f"has no tensor '{name}'") as error:
        zckpt.load(EXAMPLE, name)
    assert re.search(near, error.value.hint), error.value.hint


def known(*names: str, aliases: tuple[str, ...] = ()) -> Manifest:
    """A manifest of one parameter `w`, with tensors of these names."""
    entries = {
        key_of(name): Entry(*key_of(name), "F32", (0,), solid(0, Extent("a", 0, 0)))
        for name in names
    }
    return Manifest("/run", "x", Run(), entries, {"w": Parameter((0,), aliases=aliases)})


def test_a_tensor_under_its_own_name_comes_first() -> None:
    manifest = known("w/param", "head/param", "w/master", aliases=("head",))
    assert entry_of(manifest, "head/param").name == "head/param"
    assert entry_of(manifest, "head/master").name == "w/master"


@pytest.mark.parametrize("name", ["w", "head", "w/step", "head/step"])
def test_all_tensors_of_a_parameter_are_near(name: str) -> None:
    manifest = known("w/exp_avg_sq", "w/max_exp_avg_sq", "v/param", aliases=("head",))
    with pytest.raises(WrongOption) as error:
        entry_of(manifest, name)
    assert error.value.hint == "near names are w/exp_avg_sq, w/max_exp_avg_sq"


def test_of_many_similar_names_five_are_shown() -> None:
    with pytest.raises(WrongOption) as error:
        entry_of(known(*(f"layer.{number}/param" for number in range(9))), "layer/param")
    assert error.value.hint.count("/param") == 5


VALUES = [1.5, -2.0, 0.25, 8.0, -0.0, 3.0]


@pytest.fixture
def stored(tmp_path: Path) -> Entry:
    """A tensor of six numbers, some bytes into a file."""
    data = numpy.array(VALUES, "<f4").tobytes()
    (tmp_path / "file").write_bytes(b"front" + data)
    extent = Extent(str(tmp_path / "file"), 5, len(data))
    return Entry("w", "param", "F32", (2, 3), solid(6, extent), zlib.crc32(data))


@pytest.mark.parametrize("count", [0, 1, 4, 6, 7])
def test_the_first_elements_are_read(stored: Entry, count: int) -> None:
    assert head(stored, count) == numpy.array(VALUES[:count], "<f4").tobytes()


def test_an_array_of_numpy(stored: Entry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numpy, "empty", numpy.zeros)  # freed memory may have the same values
    array = as_numpy(stored, ())
    assert (array.shape, array.dtype.name) == ((2, 3), "float32")
    assert array.ravel().tolist() == VALUES


def test_no_element_is_read_of_an_empty_tensor() -> None:
    empty = Entry("w", "param", "F32", (0, 3), solid(0, Extent("absent", 0, 0)))
    assert as_numpy(empty, ()).shape == as_torch(empty, ()).shape == (0, 3)


@pytest.mark.parametrize(
    ("dtype", "name"),
    [("BF16", "bfloat16"), ("F8_E4M3", "float8_e4m3fn"), ("F8_E5M2", "float8_e5m2")],
)
def test_types_that_numpy_lacks(dtype: str, name: str) -> None:
    entry = Entry("w", "param", dtype, (0,), solid(0, Extent("a", 0, 0)))
    with pytest.raises(MissingExtra, match=f"w/param is {name}, a type that numpy does not have"):
        as_numpy(entry, ())


def test_a_type_that_an_old_torch_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch, "uint64", raising=False)
    entry = Entry("w", "param", "U64", (0,), solid(0, Extent("a", 0, 0)))
    with pytest.raises(UnsupportedCheckpoint, match=r"w/param is uint64, which torch .* lacks"):
        as_torch(entry, ())


def test_damage_is_seen(example: Path, tmp_path: Path) -> None:
    name = "frozen.weight/param"
    zckpt.convert(EXAMPLE, tmp_path / "universal")
    for path in (example, tmp_path / "universal"):
        extent = zckpt.read(path).entries[key_of(name)].fragments[0].extent
        with open(extent.file, "r+b") as file:
            file.seek(extent.offset + 5)
            file.write(b"\x55\x55")
        with pytest.raises(CorruptCheckpoint, match="CRC-32"):
            zckpt.load(path, name)


def without_torch(tmp_path: Path, line: str) -> str:
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    command = [sys.executable, "-c", f"import sys\nsys.modules['torch'] = None\n{line}"]
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_an_array_of_numpy_without_torch(tmp_path: Path) -> None:
    line = (
        "import json, zckpt\n"
        "array = zckpt.load('examples/run', 'fc1.weight/exp_avg')\n"
        "print(json.dumps([type(array).__module__, array.dtype.name, array.tolist()]))"
    )
    module, dtype, values = json.loads(without_torch(tmp_path, line))
    assert (module, dtype) == ("numpy", "float32")
    assert torch.equal(torch.tensor(values), zckpt.load(EXAMPLE, "fc1.weight/exp_avg"))


def test_a_type_that_numpy_lacks_needs_torch(tmp_path: Path) -> None:
    line = (
        "import zckpt\nimport zckpt.errors\n"
        "try:\n    zckpt.load('examples/run', 'frozen.weight/param')\n"
        "except zckpt.errors.MissingExtra as error:\n    print(error, error.hint)"
    )
    message = without_torch(tmp_path, line)
    assert "frozen.weight/param is bfloat16, a type that numpy does not have" in message
    assert "pip install torch safetensors" in message


# -- what the package shows


API = ("convert", "diff", "inspect", "load", "read", "reshard", "stats", "verify")


def test_the_functions_are_listed_and_explained() -> None:
    names = dir(zckpt)
    assert set(API) < set(names)
    assert {"Copying", "Manifest", "Options", "ZckptError", "dcp", "probe", "__version__"} < set(
        names
    )
    text = pydoc.render_doc(zckpt, renderer=pydoc.plaintext)
    for name in API:
        assert f"\n    {name}(" in text, name
    assert "Reads the manifest of the checkpoint at `path`" in text


def test_the_api_is_shown_without_torch(tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text("raise ImportError('numpy was imported')")
    shown = without_torch(
        tmp_path,
        "import sys, zckpt\n"
        "before = 'numpy' in sys.modules or 'zckpt.api' in sys.modules\n"
        "names = dir(zckpt)\n"
        "import pydoc\n"
        "print(before, 'load' in names, 'load(' in pydoc.plain(pydoc.render_doc(zckpt)))\n"
        "from zckpt import *\n"
        "print(read, load)",
    )
    assert shown.startswith("False True True")


def test_types_are_told() -> None:
    assert files("zckpt").joinpath("py.typed").is_file()
