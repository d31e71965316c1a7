"""The Python API: one tensor of a checkpoint by its name, and what the package shows of itself."""

from __future__ import annotations

import json
import os
import pydoc
import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest
import torch

import zckpt
from zckpt.errors import CorruptCheckpoint, WrongOption

from ..conftest import EXAMPLE, ROOT
from ..formats.equality import load as load_universal
from ..formats.equality import same_bits

ORT = ROOT / "tests/data/onnxruntime/hdf5__fp16__adam__dp3"
DCP = ROOT / "tests/data/fsdp2-2.13.0-w2"


@pytest.mark.parametrize("source", [EXAMPLE, ORT, DCP], ids=lambda path: path.name)
def test_every_tensor_is_loaded(source: Path, tmp_path: Path) -> None:
    zckpt.convert(source, tmp_path / "universal")
    expected = load_universal(tmp_path / "universal")
    for path in (source, tmp_path / "universal"):
        for name in zckpt.read(path).entries:
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


def test_damage_is_seen(example: Path, tmp_path: Path) -> None:
    name = "frozen.weight/param"
    zckpt.convert(EXAMPLE, tmp_path / "universal")
    for path in (example, tmp_path / "universal"):
        extent = zckpt.read(path).entries[name].fragments[0].extent
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
    assert "The manifest of the checkpoint at `path`" in text


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
