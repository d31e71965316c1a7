"""Explains paths that are no folder of this machine: URLs, packed files, an unexpanded ~."""

from __future__ import annotations

import os
import shlex

URL = "://"
PACKED = {
    ".tar": "tar -xf {}",
    ".tar.gz": "tar -xf {}",
    ".tgz": "tar -xf {}",
    ".tar.zst": "tar -xf {}",
    ".zip": "unzip {}",
}
GGUF = ".gguf"

Strange = tuple[str, str]
"""Two texts for an error: what is wrong with a path, and what to type instead."""


def elsewhere(path: str) -> Strange | None:
    """Returns (problem, hint) for a path that is a URL, or that begins with an unexpanded ~.

    None for any other path.
    """
    if URL in path:
        return f"{path} is a URL that zckpt does not read", _of_this_machine(path)
    return _unexpanded(path) if is_home(path) else None


LATEST = "latest"
"""The name of DeepSpeed's pointer file, which has the tag of the last checkpoint."""


def pointing(run: str, tag: str) -> str:
    """The shell command that makes `tag` the current tag of a run: it writes the file `latest`."""
    return f"printf {shlex.quote(tag)} > {shlex.quote(os.path.join(run, LATEST))}"


def kind_of_file(path: str) -> Strange | None:
    """Returns (problem, hint) for a packed file such as .tar, or a GGUF file, by its ending.

    None for any other name.
    """
    if path.endswith(GGUF):
        given = "give the checkpoint that the training program saved"
        return "it is a GGUF file, with weights for inference", given
    if unpack := _of_ending(path):
        return (
            "it is a packed file (an archive)",
            f"unpack it, and give the folder: {_with(unpack, path)}",
        )
    return None


def strange_target(path: str) -> Strange | None:
    """Returns (problem, hint) if `path` cannot be a target's folder: a URL, x.tar, ~/x, x.gguf.

    None for an ordinary path.
    """
    if URL in path:
        return f"{path} is a URL that zckpt does not write", _of_this_machine(path)
    if is_home(path):
        return _unexpanded(path)
    if path.endswith(GGUF):
        return (
            f"{path} would become a folder, because zckpt writes no GGUF files",
            "llama.cpp makes them of a folder of Hugging Face: zckpt export SRC MODEL, then "
            "convert_hf_to_gguf.py MODEL",
        )
    if _of_ending(path):
        return (
            f"{path} would become a folder, because zckpt writes no packed files such as .tar",
            "give the name of a folder, and pack it then: tar -cf DIR.tar DIR",
        )
    return None


def _of_this_machine(url: str) -> str:
    if url.startswith(f"file{URL}"):
        return f"give the path alone: /{url.partition(URL)[2].partition('/')[2]}"
    return "give a path of this machine, or s3://, gs://, az://, https:// or hf://"


def _with(command: str, path: str) -> str:
    return command.format(shlex.quote(path))


def is_home(path: str) -> bool:
    """Whether a path is `~` or begins with `~/`.

    `~user` does not count: a shell leaves it as it is if there is no such user.
    """
    return path == "~" or path.startswith("~/")


def _unexpanded(path: str) -> Strange:
    return (
        f"{path} begins with ~, which the shell did not replace",
        f'leave out the quotes around ~, or write "$HOME{path[1:]}"',
    )


def _of_ending(path: str) -> str | None:
    return next((command for ending, command in PACKED.items() if path.endswith(ending)), None)
