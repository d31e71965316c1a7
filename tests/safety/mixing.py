"""Which directories does a mix-up of files give, and what do `convert` and `verify` say of each?

step, run       a file of the same run's later step, or of another run's same step
all step, all run       the same with all files of one kind
drop            the file is not there
copy, swap      another file of the directory lies over it, or both have each other's place
rank copy, rank swap    the same with all files of two ranks
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, permutations
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

import zckpt

from .saves import Saves

Files = Mapping[str, Path]
"""The files of a directory: the path of each within it, and where its bytes are."""
Contents = dict[str, Any]
"""What a checkpoint holds: checksums of tensors, and values, by what they are."""
NUMBER = re.compile(r"(?<![a-z\d])\d+")
SAVE = re.compile(r"^(global_step|iter_|step-|checkpoint-)\d+")
OF_PARAMETER = re.compile(r"(?<=\bzero/)[^/]+(?=/)")  # the folder of a parameter
RANKS = (
    re.compile(r"mp_rank_\d+(?:_\d+)*|(?<=-model_)\d+"),
    re.compile(r"zero_pp_rank_\d+|(?<=_rank_)\d+|(?<=^__)\d+|(?<=/__)\d+"),
)
"""Model ranks and data ranks in the names of files."""
NEAR = 16  # files
UNORDERED = ("state module", "buffers")  # names in the order of the files

REFUSED, NAMED, RIGHT, INVISIBLE = "refused", "named", "right", "invisible"
FAULT = "fault"
"""One of the two commands says what the other one does not."""


@dataclass(frozen=True)
class Mix:
    """One directory: what was done, to the files of which kind, and to which of them.

    `changed` has the files that lie elsewhere than in the first save; None is no file.
    """

    operation: str
    kind: str
    about: str
    changed: Mapping[str, Path | None]

    def files(self, first: Files) -> Files:
        mixed = {**first, **self.changed}
        return {name: path for name, path in mixed.items() if path is not None}


def files_of(root: Path) -> Files:
    paths = (path for path in sorted(root.rglob("*")) if path.is_file())
    return {str(path.relative_to(root)): path for path in paths}


def place_of(name: str) -> str:
    """The same for one file in all saves of a run."""
    return SAVE.sub(r"\1", name)


def kind_of(name: str) -> str:
    """The same for the files of all ranks, layers and parameters."""
    return NUMBER.sub("N", OF_PARAMETER.sub("P", place_of(name)))


def mixes(saves: Saves) -> Iterator[Mix]:
    """Every mix-up of two files, of all files of a kind, and of two ranks."""
    first = files_of(saves.first)
    for operation, save in (("step", saves.later), ("run", saves.other)):
        if save is not None:
            yield from _exchanged(operation, first, files_of(save))
    for name in first:
        yield Mix("drop", kind_of(name), name, {name: None})
    for one, other in _siblings(list(first)):
        for source, target in ((one, other), (other, one)):
            yield Mix("copy", kind_of(target), f"{source} over {target}", {target: first[source]})
        swapped = {one: first[other], other: first[one]}
        yield Mix("swap", kind_of(other), f"{one} and {other}", swapped)
    for pattern in RANKS:
        yield from _of_ranks(pattern, first)


def _exchanged(operation: str, first: Files, save: Files) -> Iterator[Mix]:
    there = {place_of(name): path for name, path in save.items()}
    of_kind: dict[str, dict[str, Path]] = {}
    for name in first:
        if path := there.get(place_of(name)):
            of_kind.setdefault(kind_of(name), {})[name] = path
    for kind, changed in of_kind.items():
        for name, path in changed.items():
            yield Mix(operation, kind, name, {name: path})
        if len(changed) > 1:
            yield Mix(f"all {operation}", kind, f"all {len(changed)}", changed)


def _siblings(names: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Pairs of files of which one may lie in the place of the other by a slip.

    Where there are very many, each is paired with those that are near it.
    """
    for place, one in enumerate(names):
        for other in names[place + 1 : place + 1 + NEAR]:
            same_folder = os.path.dirname(one) == os.path.dirname(other)
            same_ending = Path(one).suffix == Path(other).suffix
            if kind_of(one) == kind_of(other) or (same_folder and same_ending):
                yield one, other


def _of_ranks(pattern: re.Pattern[str], first: Files) -> Iterator[Mix]:
    ranks: dict[int, dict[str, str]] = {}
    for name in first:
        if match := pattern.search(name):
            number = int("".join(NUMBER.findall(match[0])))
            place = f"{name[: match.start()]}N{name[match.end() :]}"
            ranks.setdefault(number, {})[place] = name
    for one, other in permutations(sorted(ranks), 2):
        shared = sorted(ranks[one].keys() & ranks[other].keys())
        pairs = [(ranks[one][place], ranks[other][place]) for place in shared]
        if len(pairs) < 2:
            continue  # as `copy` and `swap`
        kind = ", ".join(dict.fromkeys(kind_of(name) for name, _ in pairs))
        copied = {theirs: first[ours] for ours, theirs in pairs}
        yield Mix("rank copy", kind, f"{one} over {other}", copied)
        if one < other:
            swapped = {ours: first[theirs] for ours, theirs in pairs}
            yield Mix("rank swap", kind, f"{one} and {other}", {**copied, **swapped})


def write(files: Files, root: Path) -> Path:
    """A directory of these files, as hard links: nothing writes into them."""
    root.mkdir()
    for name, path in files.items():
        target = root / name
        target.parent.mkdir(parents=True, exist_ok=True)
        os.link(path, target)
    return root


# -- what is said


@dataclass(frozen=True)
class Said:
    """What a command said of a directory, which is called ROOT."""

    error: str | None = None
    findings: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()


def convert(root: Path, target: Path, options: Mapping[str, Any]) -> Said:
    try:
        report = zckpt.convert(root, target, **options)
    except zckpt.ZckptError as error:
        return Said(_plain(f"{type(error).__name__}: {error.message}", root))
    return Said(warnings=tuple(_plain(line["message"], root) for line in report["warnings"]))


def verify(root: Path, options: Mapping[str, Any]) -> Said:
    try:
        report = zckpt.verify(root, **options)
    except zckpt.ZckptError as error:
        return Said(_plain(f"{type(error).__name__}: {error.message}", root))
    differing = (f"{line['tensor']} differs" for line in report["differences"])
    findings = tuple(
        _plain(line, root)
        for line in chain((line["message"] for line in report["problems"]), differing)
    )
    assert report["equal"] == (not findings)
    lines = (*report.get("warnings", ()), *report.get("notes", ()))
    return Said(None, findings, tuple(_plain(line["message"], root) for line in lines))


def _plain(line: str, root: Path) -> str:
    return line.replace(str(root), "ROOT")


def contents(target: Path) -> Contents:
    """What a universal checkpoint holds; tensors by their own bytes, read with safetensors."""
    document = json.loads((target / "manifest.json").read_text())
    result: Contents = {f"parameter {n}": value for n, value in document["parameters"].items()}
    for path in sorted(target.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (no dictionary)
                data = file.get_tensor(name).contiguous().reshape(-1).view(torch.uint8)
                result[f"{path.name.split('-')[0].split('.')[0]} {name}"] = zlib.crc32(data.numpy())
    result |= {key: document[key] for key in ("step", "optimizer", "groups", "buffers")}
    result |= {f"state {key}": value for key, value in document["state"].items()}
    for path in (target / "siblings").rglob("*"):
        if path.is_file():
            result[f"sibling {path.name}"] = zlib.crc32(path.read_bytes())
    for key in UNORDERED:
        result[key] = sorted(result.get(key) or ())
    return result


# -- how it is judged


@dataclass(frozen=True)
class Outcome:
    """What became of one directory. `wrong` is against the sound save that is nearest to it."""

    mix: Mix
    converted: Said
    verified: Said
    wrong: Sequence[str]
    verdict: str

    def __str__(self) -> str:
        said = (
            f"    {who}: {said.error or [*said.findings, *said.warnings][:2] or 'nothing'}"
            for who, said in (("convert", self.converted), ("verify", self.verified))
        )
        first = f"{self.verdict}: {self.mix.operation} of {self.mix.kind}: {self.mix.about}"
        wrong = f"    wrong: {len(self.wrong)}, such as {self.wrong[:3]}"
        return "\n".join([first, *said, wrong])


class Judge:
    """Judges the mixes of the saves of one kind, in an empty folder.

    The truth is what the sound saves hold. What is said of these says nothing of a mix. Times of
    files are equal, because copying them makes them so.
    """

    def __init__(self, saves: Saves, folder: Path) -> None:
        self.saves, self.folder = saves, folder
        self.first = files_of(saves.first)
        self.truths: list[Contents] = []
        usual: list[str] = []
        for save in (saves.first, saves.later, saves.other):
            if save is None:
                continue
            for path in files_of(save).values():
                os.utime(path, (0, 0))
            target = folder / "sound"
            said = convert(save, target, saves.options), verify(save, saves.options)
            assert not any(each.error or each.findings for each in said), said
            usual += [*said[0].warnings, *said[1].warnings]
            self.truths.append(contents(target))
            shutil.rmtree(target)
        self.usual = frozenset(usual)

    def judge(self, mix: Mix) -> Outcome:
        root, target = self.folder / "mixed", self.folder / "target"
        write(mix.files(self.first), root)
        options = self.saves.options
        converted, verified = convert(root, target, options), verify(root, options)
        wrong: list[str] = []
        if converted.error is None:
            result = contents(target)
            wrong = min((_differing(result, truth) for truth in self.truths), key=len)
            shutil.rmtree(target)
        shutil.rmtree(root)
        return Outcome(
            mix, converted, verified, wrong, self._verdict(mix, converted, verified, wrong)
        )

    def _verdict(self, mix: Mix, converted: Said, verified: Said, wrong: Sequence[str]) -> str:
        if converted.error is None and not wrong:
            return RIGHT
        if converted.error is not None:  # nothing is wrong in a target that is not there
            found = verified.error or verified.findings or {*verified.warnings} - self.usual
            return REFUSED if found else FAULT
        words = _words(mix, wrong)
        found = verified.error or verified.findings or self._names(verified.warnings, words)
        if self._names(converted.warnings, words):
            return NAMED if found else FAULT
        return FAULT if found else INVISIBLE

    def _names(self, lines: Iterable[str], words: Iterable[str]) -> bool:
        """Whether a line that no sound save has names one of these."""
        return any(word in line for line in lines if line not in self.usual for word in words)


def _words(mix: Mix, wrong: Sequence[str]) -> set[str]:
    """What a sentence must name: a file that was changed, or a tensor that is wrong."""
    tensors = {key.partition(" ")[2] for key in wrong if not key.startswith(("state", "sibling"))}
    return {*map(os.path.basename, mix.changed), *tensors} - {""}


def _differing(one: Contents, other: Contents) -> list[str]:
    return [key for key in {**one, **other} if one.get(key) != other.get(key)]
