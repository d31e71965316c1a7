"""Parses URLs of object stores into the store (such as a bucket) and the key."""

from __future__ import annotations

import os
import re
from typing import Any

from msgspec import Struct

from ..errors import WrongOption, listed

SLASHES = "://"
SCHEMES = ("s3", "gs", "az", "https", "http", "hf")
"""The schemes that are read; all but https, http and hf are written too."""
MOST_NAME = 255  # bytes; the longest name on this machine's filesystems


class Url(Struct, frozen=True):
    """A URL in an object store, parsed.

    root     the bucket, the container, the host, or the Hub's repository with its revision
    key      the rest, without slashes at its ends
    store    the store object, if the program has passed one
    """

    scheme: str
    root: str
    key: str
    store: Any = None

    def __str__(self) -> str:
        return f"{self.scheme}{SLASHES}{self.root}{'/' if self.key else ''}{self.key}"

    def beside(self, key: str) -> Url:
        """The URL of another key in the same bucket."""
        return Url(self.scheme, self.root, key, self.store)


class At(Struct, frozen=True):
    """A path in a store that a program passes: an obstore store, or an fsspec filesystem.

    zckpt.convert(zckpt.At(store, "runs/7"), "universal")
    """

    store: Any
    path: str


def is_url(path: object) -> bool:
    """Whether `path` is a URL of an object store, or a path in a program's store (`At`)."""
    if isinstance(path, At):
        return True
    text = os.fspath(path) if isinstance(path, str | os.PathLike) else ""
    return isinstance(text, str) and text.partition(SLASHES)[0] in SCHEMES and SLASHES in text


def parse(path: str | os.PathLike[str] | At) -> Url:
    """Parses a URL; raises WrongOption if it names no object."""
    if isinstance(path, At):
        return Url("store", type(path.store).__name__, _key(path.path, path.path), path.store)
    text = os.fspath(path)
    if not is_url(text):
        raise _wrong(f"{text} is no URL of an object store", "give s3://BUCKET/PATH")
    scheme, _, rest = text.partition(SLASHES)
    root, _, key = rest.partition("/")
    if scheme == "hf":
        root, key = _repository(rest)
    if scheme in ("https", "http") and ("?" in text or "#" in text):
        raise _wrong(
            f"{re.split('[?#]', text)[0]} has a query, which zckpt does not send",
            "give the URL without it; credentials come from the environment",
        )
    if root == "huggingface.co":
        repository = "/".join(key.split("/")[:2])
        raise _wrong(f"{text} is a page", f"give the repository: hf{SLASHES}{repository}")
    if "@" in root and scheme != "hf":
        raise _wrong(
            f"{scheme}{SLASHES}{root.rpartition('@')[2]} was given with credentials in front of @",
            "leave them out of the URL: zckpt takes credentials from the environment, and so no "
            "log shows them",
        )
    if not root:
        raise _wrong(f"{text} names no bucket", f"give {scheme}{SLASHES}BUCKET/PATH")
    return Url(scheme, root, _key(key, text))


def _wrong(message: str, hint: str) -> WrongOption:
    return WrongOption("option-invalid", message, hint=hint)


def _repository(rest: str) -> tuple[str, str]:
    """Splits an hf:// URL, without its scheme, into `org/name@revision` and the path inside.

    A prefix `datasets/` or `spaces/` stays in front of `org/name`.
    """
    parts = rest.split("/")
    count = 3 if parts[0] in ("datasets", "spaces") else 2
    if len(parts) < count or not all(parts[:count]):
        raise _wrong(f"hf{SLASHES}{rest} names no repository", "give hf://ORG/NAME/PATH")
    return "/".join(parts[:count]), "/".join(parts[count:])


def _key(key: str, url: str) -> str:
    """Removes slashes at the ends of a key; raises WrongOption if the key cannot be a path."""
    key = key.strip("/")
    if key and (reason := strange(key)):
        raise _wrong(f"{url} {reason}", "give the key as the store lists it")
    return key


def strange(key: str) -> str:
    """Why a key cannot be the path of a file, as the end of a sentence; "" if it can be one."""
    parts = key.split("/")
    if wrong := [part for part in parts if part in ("", ".", "..")]:
        return f"has the part {wrong[0]!r} between slashes"
    if "\0" in key:
        return "has a zero byte"
    if long := [part for part in parts if len(part.encode("utf-8", "replace")) > MOST_NAME]:
        return f"has a name of over {MOST_NAME} bytes: {listed([long[0][:40] + '...'])}"
    return ""
