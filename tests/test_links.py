"""Checkpoints made of links: the Hub's cache, DVC, git-annex, `cp -rs`."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import zckpt
from zckpt.formats.deepspeed_states.directories import pointed

from .conftest import EXAMPLE, ROOT, Result, needs, texts

Zckpt = Callable[..., Result]
TRAINER = ROOT / "examples" / "trainer"
BESIDE = ("config.json", "model.safetensors", "scheduler.pt", "trainer_state.json")
REVISION = "c0ffee" * 6 + "c0ff"


def linked(source: Path, target: Path, place_of: Callable[[Path, str], Path]) -> Path:
    """A tree of links to copies of the files of another, which lie where `place_of` says."""
    for path in sorted(path for path in source.rglob("*") if path.is_file()):
        link = target / path.relative_to(source)
        link.parent.mkdir(parents=True, exist_ok=True)
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        place = place_of(link, content)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, place)
        link.symlink_to(place)
    return target


def in_dvc(source: Path, folder: Path) -> Path:
    """Absolute links to a cache, by the hash of the content."""
    store = folder / ".dvc" / "cache" / "files" / "md5"
    return linked(source, folder / "data", lambda _, hash: store / hash[:2] / hash[2:])


def in_annex(source: Path, folder: Path) -> Path:
    """Relative links, each to a folder of its own."""
    tree = linked(
        source, folder / "data", lambda _, hash: folder / ".git" / "annex" / "objects" / hash / hash
    )
    for path in tree.rglob("*"):
        if path.is_symlink():
            place = os.path.relpath(path.resolve(), path.parent)
            path.unlink()
            path.symlink_to(place)
    return tree


def in_links(source: Path, folder: Path) -> Path:
    """As `cp -rs` makes them: links to the files themselves."""
    return linked(source, folder / "data", lambda link, _: folder / "from" / link.name)


LINKED = {"DVC": in_dvc, "git-annex": in_annex, "cp -rs": in_links}


@pytest.fixture(params=LINKED)
def trainer(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A Trainer's run of links."""
    return LINKED[request.param](TRAINER, tmp_path / "store")


@pytest.fixture
def hub(tmp_path: Path) -> Callable[[Path], Path]:
    """Puts files into a repository of the Hub's cache, as huggingface_hub itself does."""
    needs("huggingface_hub")
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.file_download import _create_symlink, repo_folder_name

    def put(source: Path) -> Path:
        cache = tmp_path / "hub"
        repository = cache / repo_folder_name(repo_id="org/model", repo_type="model")
        (repository / "refs").mkdir(parents=True)
        (repository / "blobs").mkdir()
        (repository / "refs" / "main").write_text(REVISION)
        snapshot = repository / "snapshots" / REVISION
        for path in sorted(path for path in source.rglob("*") if path.is_file()):
            blob = repository / "blobs" / hashlib.sha256(path.read_bytes()).hexdigest()
            shutil.copy(path, blob)
            link = snapshot / path.relative_to(source)
            link.parent.mkdir(parents=True, exist_ok=True)
            _create_symlink(str(blob), str(link), new_blob=True)
        found = scan_cache_dir(cache)
        assert not found.warnings
        assert [each.repo_id for each in found.repos] == ["org/model"]
        return snapshot

    return put


def has_links(folder: Path) -> bool:
    return any(path.is_symlink() for path in folder.rglob("*"))


def test_the_cache_of_a_hub(hub: Callable[[Path], Path], tmp_path: Path, zckpt: Zckpt) -> None:
    """All files of the repository are its own, however deep below the revision."""
    snapshot = hub(TRAINER)
    source, target = snapshot / "checkpoint-4", tmp_path / "out"
    report = json.loads(zckpt("reshard", source, target, "--dp", 1, "--json").out)
    assert {*BESIDE} <= {*report["copied"]}
    assert not has_links(target)
    (line,) = [each for each in texts(report["warnings"]) if "links lead out of" in each]
    assert f"latest to {snapshot.parent.parent / 'blobs'}/" in line
    assert "left out" not in line
    for words in (("inspect", source), ("list", snapshot), ("check", snapshot, "--dp", 2)):
        result = zckpt(*words)
        assert (result.code, "links lead out of" in result.err) == (0, True)
    assert zckpt("auto-resume", snapshot, "--dp", 2).out.strip() == str(source)
    scratch = zckpt("auto-resume", snapshot, "--dp", 1, "--scratch", tmp_path / "s").out.strip()
    assert (Path(scratch) / "trainer_state.json").is_file()
    assert zckpt("verify", scratch, "--against", target).code == 0


@pytest.mark.parametrize("kind", LINKED)
def test_a_link_to_latest_is_followed(kind: str, tmp_path: Path) -> None:
    """Of two tags it is the one that is meant."""
    run = LINKED[kind](EXAMPLE, tmp_path / "store")
    shutil.copytree(run / "global_step7", run / "global_step9", symlinks=True)
    assert zckpt.read(run).run.origin.tag == "global_step7"
    report = zckpt.reshard(run, tmp_path / "out", dp=2)
    assert not has_links(tmp_path / "out")
    assert zckpt.verify(tmp_path / "out", against=EXAMPLE)["equal"]
    assert any("latest to " in line for line in texts(report["warnings"]))


def test_trainers_files_are_taken_if_that_is_asked(
    trainer: Path, tmp_path: Path, zckpt: Zckpt
) -> None:
    source = trainer / "checkpoint-4"
    without = zckpt_report(zckpt, "reshard", source, tmp_path / "a", "--dp", 1)
    assert without["copied"] == []
    assert any("config.json" in line for line in texts(without["left_out"]))
    assert any("--follow-links takes" in line for line in texts(without["warnings"]))
    report = zckpt_report(zckpt, "reshard", source, tmp_path / "b", "--dp", 1, "--follow-links")
    assert {*BESIDE} <= {*report["copied"]}
    assert not has_links(tmp_path / "b")
    assert any("links lead out of" in line for line in texts(report["warnings"]))
    assert not any("--follow-links" in line for line in texts(report["warnings"]))
    for name in report["copied"]:
        if name != "trainer_state.json":
            own = TRAINER / "checkpoint-4" / name
            assert (tmp_path / "b" / name).read_bytes() == own.read_bytes()
    assert zckpt("verify", source, "--against", tmp_path / "b", "--follow-links").code == 0
    fix = zckpt_report(zckpt, "check", trainer, "--dp", 1, "--follow-links")["fix"]
    assert fix.endswith("--dp 1 --follow-links")


def zckpt_report(zckpt: Zckpt, *words: object) -> dict[str, object]:
    report: dict[str, object] = json.loads(zckpt(*words, "--json").out)
    return report


def test_auto_resume_follows_links(trainer: Path, tmp_path: Path) -> None:
    for follows in (False, True):
        scratch = tmp_path / f"scratch{follows}"
        with pytest.warns(UserWarning, match="links lead out of"):
            path = zckpt.auto_resume(trainer, dp=1, scratch=scratch, follow_links=follows)
        assert path is not None
        assert (Path(path) / "trainer_state.json").is_file() == follows
        assert not has_links(Path(path))


@pytest.mark.parametrize("words", ["inspect", "verify", "stats", "list", "check", "report"])
def test_commands_read_links(
    words: str, tmp_path: Path, zckpt: Zckpt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = in_links(EXAMPLE, tmp_path / "links")
    assert zckpt(words, source).code == 0
    assert zckpt("diff", source, EXAMPLE).code == 0
    assert zckpt("convert", source, tmp_path / "out").code == 0
    assert not has_links(tmp_path / "out")
    assert str(tmp_path / "links" / "from") not in (tmp_path / "out" / "manifest.json").read_text()


def test_an_option_without_effect(tmp_path: Path, zckpt: Zckpt) -> None:
    source = TRAINER / "checkpoint-4"
    assert "--follow-links is not used" in zckpt("inspect", source, "--follow-links").err
    assert "--follow-links" not in zckpt("inspect", source).err


# -- what nobody gets by a link


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """A Trainer's folder from somebody else, with links to what is not theirs."""
    source = Path(shutil.copytree(TRAINER / "checkpoint-4", tmp_path / "given"))
    (tmp_path / "secret").write_text("SECRET=1")
    (tmp_path / "secrets").mkdir()
    (tmp_path / "secrets" / "vocab.json").write_text("SECRET=1")
    os.mkfifo(tmp_path / "fifo")
    links = {"vocab.txt": "../secret", "tokenizer": "../secrets", ".env": "../secret"}
    links |= {"zero": "/dev/zero", "pipe": "../fifo", "absent": "../nothing"}
    for name, place in links.items():
        (source / name).symlink_to(place)
    return source


@pytest.mark.parametrize("follows", [False, True])
def test_links_to_devices_and_hidden_files(planted: Path, follows: bool, tmp_path: Path) -> None:
    """With the option a file is copied that the user may read, and nothing else."""
    report = zckpt.reshard(planted, tmp_path / "out", dp=1, follow_links=follows)
    assert ("vocab.txt" in report["copied"]) == follows
    assert not {"zero", "pipe", "absent", ".env"} & {*report["copied"]}
    assert not has_links(tmp_path / "out")
    secrets = [p for p in (tmp_path / "out").rglob("*") if p.is_file() and b"SECRET" in bytes_of(p)]
    assert [path.name for path in secrets] == ["vocab.txt"] * follows


def bytes_of(path: Path) -> bytes:
    return path.read_bytes()


@pytest.mark.parametrize("place", ["../secret", "/dev/zero", "../fifo", "../secrets", "../nothing"])
def test_a_pointer_to_what_is_no_tag(place: str, tmp_path: Path, zckpt: Zckpt) -> None:
    """Nothing is printed of a file that names no folder of the run."""
    run = Path(shutil.copytree(EXAMPLE, tmp_path / "run"))
    (tmp_path / "secret").write_text("SECRET=1")
    (tmp_path / "secrets").mkdir()
    os.mkfifo(tmp_path / "fifo")
    (run / "latest").unlink()
    (run / "latest").symlink_to(place)
    for words in (("inspect", run), ("list", run), ("check", run), ("auto-resume", run)):
        result = zckpt(*words)
        assert "SECRET" not in result.out + result.err
        assert "Traceback" not in result.err
    assert pointed(str(run), "latest") is None


def test_blobs_beside_another_folder(tmp_path: Path) -> None:
    """A folder that is called snapshots belongs to a hub's cache only in a repository."""
    run = Path(shutil.copytree(TRAINER / "checkpoint-4", tmp_path / "snapshots" / "run"))
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "secret").write_text("SECRET=1")
    (run / "vocab.txt").symlink_to("../../blobs/secret")
    report = zckpt.reshard(run, tmp_path / "out", dp=1)
    assert "vocab.txt: a link out of the directory" in texts(report["left_out"])
