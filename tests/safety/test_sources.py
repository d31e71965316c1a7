"""Whole commands whose source changes, cannot be read, or has more in it than a checkpoint."""

from __future__ import annotations

import errno
import os
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import zckpt
from zckpt.core.storage import sources
from zckpt.errors import SourceChanged

from ..conftest import texts

FORMATS = ["deepspeed", "deepspeed-universal", "dcp", "gathered", "onnxruntime", "universal"]


def source_of(example: Path, to: str) -> Path:
    """The example in another format."""
    if to == "deepspeed":
        return example
    source = example.parent / to
    zckpt.convert(example, source, to=to)
    return source


def main_file(source: Path) -> Path:
    """The largest file of a checkpoint."""
    files = [path for path in source.rglob("*") if path.is_file()]
    return max(files, key=lambda path: (path.stat().st_size, path.name))


def replaced(path: Path) -> None:
    """Another file with one other bit in its last third, where no header is."""
    data = bytearray(path.read_bytes())
    data[-len(data) // 3] ^= 1
    other = path.with_name("other")
    other.write_bytes(data)
    other.rename(path)


def touched(path: Path) -> None:
    before = path.stat()
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))


# -- a source that changes


@pytest.mark.parametrize("change", [replaced, touched])
@pytest.mark.parametrize("to", FORMATS)
def test_a_change_in_the_middle_ends_the_conversion(
    example: Path, to: str, change: Callable[[Path], None]
) -> None:
    source, target = source_of(example, to), example.parent / "target"
    wanted = "gathered" if to == "universal" else "universal"
    file = main_file(source)

    def begin(_: int) -> Callable[[int], None]:
        change(file)
        return lambda _: None

    with pytest.raises(SourceChanged, match=f"{file.name} changed while it was read"):
        zckpt.convert(source, target, to=wanted, begin=begin)
    assert not list(example.parent.glob("target*"))


@pytest.mark.parametrize("to", ["deepspeed", "onnxruntime"])
def test_a_change_in_the_middle_ends_verify_diff_and_stats(example: Path, to: str) -> None:
    source = source_of(example, to)
    other = Path(shutil.copytree(source, example.parent / "copy"))

    def begin(_: int) -> Callable[[int], None]:
        touched(main_file(source))
        return lambda _: None

    calls: list[Callable[[], Any]] = [
        lambda: zckpt.verify(source, begin=begin),
        lambda: zckpt.verify(source, other, begin=begin),
        lambda: zckpt.verify(other, source, begin=begin),
        lambda: zckpt.diff(source, other, begin=begin),
        lambda: zckpt.diff(other, source, begin=begin),
        lambda: zckpt.stats(source, begin=begin),
    ]
    for call in calls:
        with pytest.raises(SourceChanged):
            call()


def test_a_sibling_that_grows_ends_the_conversion(example: Path) -> None:
    (example / "trainer_state.json").write_text("{}")
    (example / "log.txt").write_text("one line")

    def begin(_: int) -> Callable[[int], None]:
        (example / "log.txt").write_text("one line, and one more")
        return lambda _: None

    with pytest.raises(SourceChanged, match=r"log\.txt"):
        zckpt.convert(example, example.parent / "target", begin=begin)


def test_training_may_go_on_beside_the_tag(example: Path) -> None:
    """A new tag, another `latest` and a log are no part of the checkpoint that is read."""

    def begin(_: int) -> Callable[[int], None]:
        (example / "latest").write_text("global_step50")
        (example / "log.txt").write_text("one line")
        shutil.copytree(example / "global_step7", example / "global_step50")
        return lambda _: None

    (example / "log.txt").write_text("")
    zckpt.convert(example, example.parent / "target", begin=begin)


# -- files beside the checkpoint

TRAINER = {"trainer_state.json": "{}", "tokenizer.json": "{}", "notes/run.txt": "a note"}
PLANTED = {".env", "linked", "pipe"}


def with_siblings(source: Path, to: str) -> Path:
    """The folder of a source in which its siblings are, with good ones and planted ones."""
    folder = source / "siblings" if to == "universal" else source
    for name, text in TRAINER.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    secret = source.parent / "secret"
    secret.write_text("SECRET=1")
    (folder / ".env").write_text("SECRET=1")
    (folder / "linked").symlink_to(secret)
    os.mkfifo(folder / "pipe")
    return folder


@pytest.mark.parametrize("to", ["deepspeed", "deepspeed-universal", "dcp", "gathered", "universal"])
@pytest.mark.parametrize("wanted", ["universal", "dcp", "gathered", "deepspeed"])
def test_planted_files_are_left_out_and_named(example: Path, to: str, wanted: str) -> None:
    source, target = source_of(example, to), example.parent / "target"
    with_siblings(source, to)
    if wanted == "deepspeed":
        report = zckpt.reshard(source, target)
        wanted = report["format"]
    else:
        report = zckpt.convert(source, target, to=wanted)
    files = {str(path.relative_to(target)) for path in target.rglob("*") if path.is_file()}
    assert set(report["files"]) == files
    assert {name.rpartition("/")[2] for name in report["copied"]} >= {"tokenizer.json"}
    assert set(report["copied"]) <= files
    for name in report["copied"]:
        assert (target / name).read_bytes() in map(str.encode, TRAINER.values())
    assert not any(name.rpartition("/")[2] in PLANTED for name in files)
    for path in files:
        assert b"SECRET" not in (target / path).read_bytes()
    words = {
        word for line in texts(report["left_out"]) for word in line.partition(": ")[0].split(", ")
    }
    assert words >= PLANTED
    prefix = "siblings/" if wanted == "universal" else ""
    carried = {name for name in TRAINER if f"{prefix}{name}" in files}
    assert carried >= {"trainer_state.json", "tokenizer.json"}
    # every sibling is a file of the target, or its folder is named
    assert "notes/run.txt" in carried or "notes/" in words


@pytest.mark.parametrize("pointer", ["latest", "latest_universal"])
def test_a_link_to_a_foreign_tag_is_not_printed(
    example: Path, zckpt: Callable[..., Any], pointer: str
) -> None:
    source = example if pointer == "latest" else source_of(example, "deepspeed-universal")
    secret = example.parent / "secret"
    secret.write_text("SECRET=1")
    tag = (source / pointer).read_text()
    (source / pointer).unlink()
    (source / pointer).symlink_to(secret)
    result = zckpt("inspect", source)
    assert result.code == 1
    assert "SECRET" not in result.out + result.err
    assert f"{pointer} is a link that leads out of" in result.err
    assert zckpt("inspect", source, "--tag", tag).code == 0
    shutil.copytree(source / tag, source / "another")
    result = zckpt("inspect", source)
    assert (result.code, "SECRET" in result.err) == (1, False)
    shutil.rmtree(source / "another")
    (source / pointer).unlink()
    (source / "pointer").write_text(tag)
    (source / pointer).symlink_to("pointer")
    assert zckpt("inspect", source).code == 0


def test_shards_may_be_links_to_other_storage(example: Path) -> None:
    """A checkpoint's own files are what the user asked for, wherever they lie."""
    storage = example.parent / "storage"
    (example / "global_step7").rename(storage)
    (example / "global_step7").mkdir()
    for path in storage.iterdir():
        (example / "global_step7" / path.name).symlink_to(path)
    assert zckpt.verify(example)["equal"]


@pytest.mark.parametrize("to", FORMATS)
def test_no_command_waits_for_a_pipe(example: Path, to: str, zckpt: Callable[..., Any]) -> None:
    source = source_of(example, to)
    file = main_file(source)
    file.unlink()
    os.mkfifo(file)
    result = zckpt("inspect", source)
    assert result.code == 1
    assert "InternalError" not in result.err
    assert "Traceback" not in result.err


def test_reshard_of_a_universal_checkpoint_with_a_pointer(example: Path) -> None:
    source, target = source_of(example, "universal"), example.parent / "target"
    (source / "siblings").mkdir()
    (source / "siblings" / "latest").write_text("another")
    report = zckpt.reshard(source, target)
    assert (target / "latest").read_text() == (example / "latest").read_text()
    assert "latest: the target has its own file of this name" in texts(report["left_out"])


# -- directories that cannot be listed


@pytest.fixture
def unlistable(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, int], None]:
    """Makes every look into a folder fail, as a disk or its permissions would."""
    real = {name: getattr(os, name) for name in ("scandir", "listdir")}

    def close(folder: Path, number: int) -> None:
        def fail(name: str, path: Any = ".") -> Any:
            at = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else path
            if isinstance(at, str) and os.path.abspath(at) == str(folder):
                raise OSError(number, os.strerror(number), at)
            return real[name](path)

        monkeypatch.setattr(os, "scandir", partial(fail, "scandir"))
        monkeypatch.setattr(os, "listdir", partial(fail, "listdir"))

    return close


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("to", ["deepspeed", "universal"])
def test_a_trainers_folder_that_cannot_be_listed(
    example: Path, to: str, number: int, unlistable: Callable[[Path, int], None]
) -> None:
    source, target = source_of(example, to), example.parent / "target"
    folder = with_siblings(source, to) / "notes"
    unlistable(folder, number)
    with pytest.raises(OSError, match=os.strerror(number)) as caught:
        zckpt.convert(source, target, to="dcp")
    assert caught.value.filename == str(folder)
    assert not list(example.parent.glob("target*"))


@pytest.mark.parametrize("is_trainers", [False, True])
def test_a_filesystems_own_folder_is_passed_by(
    example: Path, is_trainers: bool, unlistable: Callable[[Path, int], None]
) -> None:
    """`lost+found`, where a run is the root of a filesystem."""
    (example / "lost+found").mkdir()
    (example / "latest").unlink()  # every folder may be a tag
    if is_trainers:
        (example / "trainer_state.json").write_text("{}")
    unlistable(example / "lost+found", errno.EACCES)
    report = zckpt.convert(example, example.parent / "target")
    line = "lost+found/: a folder that may not be listed"
    assert (line in texts(report["left_out"])) == is_trainers


def test_staging_that_cannot_be_listed_is_not_renamed(
    example: Path, unlistable: Callable[[Path, int], None]
) -> None:
    target = example.parent / "target"

    def begin(_: int) -> Callable[[int], None]:
        (folder,) = example.parent.glob("target.partial/**/global_step7")
        unlistable(folder, errno.EIO)
        return lambda _: None

    with pytest.raises(OSError, match="Input/output error"):
        zckpt.reshard(example, target, begin=begin, dp=2)
    assert not target.exists()


# -- files without checksums


@pytest.mark.parametrize("to", FORMATS)
def test_what_no_checksum_guards_has_an_advice(
    example: Path, to: str, zckpt: Callable[..., Any]
) -> None:
    source, target = source_of(example, to), example.parent / "target"
    for words in (("verify", source), ("convert", source, target)):
        printed = zckpt(*words)
        shutil.rmtree(target, ignore_errors=True)
        report = zckpt(*words, "--json").document
        assert printed.code == 0
        assert (report["records"]["unchecked"] > 0) == (to == "onnxruntime")
        assert ("advice" in report) == (to == "onnxruntime")
        assert (f"`zckpt verify {source} --against COPY`" in printed.out) == ("advice" in report)


# -- export


def test_export_copies_no_foreign_file(example: Path) -> None:
    """Neither from the source's folder nor from the one that --config names."""
    source, config = source_of(example, "gathered"), example.parent / "model"
    secret = example.parent / "secret"
    secret.write_text('{"SECRET": 1}')
    config.mkdir()
    (config / "config.json").write_text('{"model_type": "x"}')
    (config / "tokenizer.json").symlink_to(secret)
    (source / "vocab.txt").symlink_to(secret)
    report = zckpt.export(source, example.parent / "target", config=config)
    assert set(report["files"]) == {"config.json", "model.safetensors"}
    for name in ("tokenizer.json", "vocab.txt"):
        assert f"{name}: a link out of the directory" in texts(report["left_out"])


# -- reads that are short, or fail


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.mark.parametrize("to", FORMATS)
def test_short_reads_are_no_damage(example: Path, to: str, monkeypatch: pytest.MonkeyPatch) -> None:
    source, target = source_of(example, to), example.parent / "target"
    wanted = "dcp" if to == "universal" else "universal"
    zckpt.convert(source, target, to=wanted)
    pread, preadv = os.pread, os.preadv
    monkeypatch.setattr(os, "pread", lambda file, size, at: pread(file, -(-size // 2), at))

    def half(file: int, views: Any, at: int, flags: int = 0) -> int:
        return preadv(file, [views[0][: -(-len(views[0]) // 2)]], at, flags)

    monkeypatch.setattr(os, "preadv", half)
    zckpt.convert(source, example.parent / "again", to=wanted)
    assert contents(example.parent / "again") == contents(target)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOMEM, errno.ESTALE])
@pytest.mark.parametrize("to", FORMATS)
def test_every_failed_read_names_its_file(
    example: Path, to: str, number: int, zckpt: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = source_of(example, to), example.parent / "target"
    wanted = "dcp" if to == "universal" else "universal"
    real = {name: getattr(os, name) for name in ("open", "fstat", "pread", "preadv")}
    calls, fatal = 0, 0

    def call(name: str, *given: Any, **options: Any) -> Any:
        nonlocal calls
        caller = sys._getframe(1).f_code.co_filename
        is_read = caller.endswith(("/storage/sources.py", "/storage/fileio.py"))
        calls += is_read
        if is_read and calls == fatal:
            raise OSError(number, os.strerror(number), *given[: name == "open"])
        return real[name](*given, **options)

    for name in real:
        monkeypatch.setattr(os, name, partial(call, name))
    words = ("convert", source, target, "--to", wanted, "-j", "1")
    assert zckpt(*words).code == 0
    total = calls
    shutil.rmtree(target)
    assert total > 8
    for place in range(1, total + 1, total // 8):
        calls, fatal = 0, place
        result = zckpt(*words)
        assert result.code == 1, result.out
        error = next(line for line in result.err.splitlines() if not line.startswith("Warning"))
        assert f"{example.parent}/" in error
        assert os.strerror(number) in result.err
        assert not list(example.parent.glob("target*"))


def test_a_failed_close_does_not_hide_which_file_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x")

    def fail(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as broken:
        broken.setattr(os, "fstat", fail)
        broken.setattr(os, "close", fail)
        with pytest.raises(OSError, match="file") as raised:
            sources.open_file(str(file))
    assert raised.value.filename == str(file)
