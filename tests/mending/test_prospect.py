"""`verify`, `report` and errors name `mend` where it helps, say what it gives, and nowhere else."""

from __future__ import annotations

import shlex
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import zckpt as package
from zckpt.core.checkpoint.mended import MENDED

from ..conftest import EXAMPLE, ROOT, Result
from .damaging import contents, flip
from .test_losses import remove

OPTIMIZER = "global_step7/bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
MODEL = "global_step7/mp_rank_00_model_states.pt"
Z3 = ROOT / "tests/data/zckpt-0.1-z3_dp3"
LOST_FOR_GOOD = "global_step3/zero_pp_rank_1_mp_rank_00_optim_states.pt"
"""A file of stage 3, in which masters are the weights."""
Shell = Callable[..., Result]


def next_line(zckpt: Shell, path: Path) -> str | None:
    """The line of `verify` that names a command of `mend`."""
    ended = zckpt("verify", path)
    assert ended.code == 3
    lines = [line for line in ended.out.splitlines() if line.startswith("next: ")]
    return next((line for line in lines if "zckpt mend " in line), None)


def typed(line: str, target: Path) -> list[str]:
    """The words of the command in such a line, with DST replaced by a path."""
    words = shlex.split(line[line.index("zckpt mend ") :])[1:]
    return [str(target) if word == "DST" else word for word in words]


def directory_bit(path: Path) -> int:
    """A byte of the length of the first name in the directory of a zip."""
    with zipfile.ZipFile(path) as parts:
        return parts.start_dir + 28


@pytest.fixture
def universal(tmp_path: Path) -> Path:
    package.convert(EXAMPLE, tmp_path / "universal")
    return tmp_path / "universal"


@pytest.mark.parametrize("file", [OPTIMIZER, MODEL])
@pytest.mark.parametrize("what", ["pickle", "directory"])
def test_a_file_of_torch(what: str, file: str, example: Path, tmp_path: Path, zckpt: Shell) -> None:
    """The bit is named, and the command that is named restores it: nothing has to be made up."""
    byte = 200 if what == "pickle" else directory_bit(example / file)
    flip(example / file, byte, 2)
    line = next_line(zckpt, example)
    assert line is not None
    assert f"next: restore bit 2 of byte {byte} of {Path(file).name}: zckpt mend " in line
    assert zckpt(*typed(line, tmp_path / "mended")).code == 0
    assert contents(tmp_path / "mended") == contents(EXAMPLE)
    report = zckpt("verify", example, "--json").document
    assert report["mend"]["command"] == f"zckpt mend {example} DST"
    assert report["rebuild"] is None
    steps = zckpt("report", example, "--json").document["next"]["do"]
    assert any(step["what"].startswith("restore bit 2 of byte") for step in steps)


def test_an_error_names_it(example: Path, tmp_path: Path, zckpt: Shell) -> None:
    """As `verify` does: `convert` cannot open the file either."""
    byte = directory_bit(example / MODEL)
    flip(example / MODEL, byte, 2)
    refused = zckpt("convert", example, tmp_path / "out")
    assert (refused.code, "[file-damaged]" in refused.err) == (1, True)
    assert f"to restore bit 2 of byte {byte} of {Path(MODEL).name}: zckpt mend SRC DST" in (
        refused.err
    )


@pytest.mark.parametrize("file", ["manifest.json", "master.safetensors"])
def test_a_universal_one(file: str, universal: Path, tmp_path: Path, zckpt: Shell) -> None:
    before = contents(universal)
    flip(universal / file, 9, 3)
    line = next_line(zckpt, universal)
    assert line is not None
    assert f"restore bit 3 of byte 9 of {file}" in line
    assert zckpt(*typed(line, tmp_path / "mended")).code == 0
    assert contents(tmp_path / "mended") == before
    refused = zckpt("convert", universal, tmp_path / "out", "--to", "dcp")
    assert refused.code == 1
    assert f"to restore bit 3 of byte 9 of {file}: zckpt mend SRC DST" in refused.err


@pytest.mark.parametrize("how", ["cut", "zeros"])
@pytest.mark.parametrize("file", [LOST_FOR_GOOD, "manifest.json", "master.safetensors"])
def test_nothing_is_promised(
    how: str, file: str, universal: Path, tmp_path: Path, zckpt: Shell
) -> None:
    """Nothing has the bytes of a cut file or of one of zeros, and nobody says that it has."""
    source = universal
    if file == LOST_FOR_GOOD:
        source = shutil.copytree(Z3, tmp_path / "run")
    path = source / file
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[: size // 2] if how == "cut" else bytes(size))
    assert next_line(zckpt, source) is None
    refused = zckpt("convert", source, tmp_path / "out", "--to", "dcp")
    assert refused.code == 1
    assert "zckpt mend" not in refused.err
    assert zckpt("mend", source, tmp_path / "mended").code == 1


@pytest.mark.parametrize("how", ["missing", "zeros"])
def test_a_file_that_other_ranks_have(how: str, tmp_path: Path, zckpt: Shell) -> None:
    """Frozen weights of the lost file are in the older checkpoint: with it, everything is exact."""
    run = shutil.copytree(Z3, tmp_path / "run")
    older = shutil.copytree(run / "global_step3", run / "global_step1")
    path = run / "global_step3" / "zero_pp_rank_1_mp_rank_00_model_states.pt"
    size = path.stat().st_size
    path.unlink()
    if how == "zeros":
        path.write_bytes(bytes(size))
    line = next_line(zckpt, run)
    assert line is not None
    assert f"next: write {path.name} again, with values that other files still have: " in line
    assert f"--older {older}" in line
    assert zckpt(*typed(line, tmp_path / "mended")).code == 0
    assert package.verify(tmp_path / "mended", older)["equal"]
    shutil.rmtree(older)
    assert next_line(zckpt, run) is None


def test_moments_of_the_older_one(example: Path, tmp_path: Path, zckpt: Shell) -> None:
    """They are named before zeros, where the run has a complete older checkpoint."""
    older = shutil.copytree(example / "global_step7", example / "global_step3")
    (example / OPTIMIZER).unlink()
    line = next_line(zckpt, example)
    assert line is not None
    assert f"masters made from the 16-bit weights and the moments of {older})" in line
    assert line.endswith(f"--older {older} --rebuild masters --rebuild moments=older")
    assert zckpt(*typed(line, tmp_path / "mended")).code == 0
    assert list((tmp_path / "mended").rglob(MENDED))


def test_beside_links(example: Path, tmp_path: Path, zckpt: Shell) -> None:
    remove(example, Path(OPTIMIZER).name)
    (tmp_path / "notes.txt").write_text("notes")
    (example / "global_step7" / "notes.txt").symlink_to(tmp_path / "notes.txt")
    line = next_line(zckpt, example)
    assert line is not None
    assert line.endswith("--rebuild masters --rebuild moments=zero --follow-links")
    assert zckpt(*typed(line, tmp_path / "mended")).code == 0


def test_a_dry_run_needs_no_target(example: Path, zckpt: Shell) -> None:
    """It lists what it would restore. A copy needs a name, and the error has the line to type."""
    flip(example / OPTIMIZER, 200, 2)
    shown = zckpt("mend", example, "--dry-run")
    assert (shown.code, shown.err) == (3, "")
    assert "can be restored exactly:\n  bit 2 of byte 200 of " in shown.out
    report = zckpt("mend", example, "--dry-run", "--json").document
    assert (report["target"], report["next"], "free" in report) == (None, "", False)
    before = contents(example)
    refused = zckpt("mend", example)
    assert refused.code == 2
    assert f"name a new directory: zckpt mend {example} DST" in refused.err
    assert contents(example) == before


def test_mend_promises_nothing_of_itself(example: Path, tmp_path: Path, zckpt: Shell) -> None:
    """It would restore a bit of the directory, but not the zeroed data: nobody says it would."""
    path = example / OPTIMIZER
    flip(path, directory_bit(path), 2)
    data = path.read_bytes()
    path.write_bytes(data[:4000] + bytes(600) + data[4600:])  # of moments, which nothing else has
    assert next_line(zckpt, example) is None
    refused = zckpt("mend", example, tmp_path / "mended")
    assert refused.code == 1
    assert "zckpt mend SRC DST" not in refused.err
