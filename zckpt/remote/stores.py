"""The operations of object stores, and the store of a URL.

The package obstore accesses S3, Google, Azure and web servers; it retries failed requests, with
backoff. A program may pass its own obstore store or fsspec filesystem. All methods raise the
libraries' own errors, which `failures.explained` converts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from importlib.util import find_spec
from typing import Any

from msgspec import Struct

from ..errors import MissingExtra, WrongOption
from .urls import Url

PART, MOST_PARTS = 16 << 20, 9_000  # bytes of a part of an upload; S3 takes 10,000 parts
IN_FLIGHT = 128 << 20  # bytes of parts that are being sent
CLIENT = {"timeout": "1h", "read_timeout": "60s", "connect_timeout": "10s"}
"""The time limits of obstore's client.

A request may take long while bytes arrive; obstore's own limit is 30 s in all.
"""
MARK = "zckptrun"  # metadata of an object: the run that sent it; Azure accepts only identifiers
ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AZURE_STORAGE_ENDPOINT")
CLASSES = {"s3": "S3Store", "gs": "GCSStore", "az": "AzureStore"}  # of obstore
OWN_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_SKIP_SIGNATURE")


class StoredObject(Struct, frozen=True):
    """One object of a store: key, size in bytes, ETag (None without one), time in nanoseconds.

    A folder has a key that ends in a slash, and the size 0.
    """

    key: str
    size: int
    etag: str | None = None
    time: int = 0


def part_size(size: int) -> int:
    """The size in bytes of the parts in a multipart upload of `size` bytes."""
    return max(PART, ((size // MOST_PARTS >> 20) + 1) << 20)


def etag_of(digests: Sequence[bytes]) -> str:
    """The ETag that S3 computes for an object, from the MD5 of each part of its upload.

    For an object of one part it is the MD5 itself.
    """
    import hashlib

    if len(digests) == 1:
        return digests[0].hex()
    return f"{hashlib.md5(b''.join(digests), usedforsecurity=False).hexdigest()}-{len(digests)}"


def blocks_of(path: str, size: int) -> Iterator[bytes]:
    """Reads a local file in blocks of `size` bytes; the last may be shorter."""
    with open(path, "rb") as file:
        while data := file.read(size):
            yield data


class Objects:
    """An object store, accessed by the package obstore; `Filesystem` has the same methods."""

    has_listing = True

    def __init__(self, store: Any) -> None:
        import obstore

        self.client, self._call = store, obstore
        self._is_folder = type(store).__name__ == "LocalStore"  # it stores no metadata with a file

    def below(self, key: str) -> Iterator[StoredObject]:
        """Yields all objects whose keys begin with `key` and a slash."""
        for batch in self._call.list(self.client, key or None):
            yield from map(_stored_object, batch)

    def directly_in(self, key: str) -> list[StoredObject]:
        """Lists the objects and folders directly in the folder `key`, not those in subfolders."""
        level = self._call.list_with_delimiter(self.client, key or None)
        folders = [StoredObject(f"{folder}/", 0) for folder in level["common_prefixes"]]
        return [*folders, *map(_stored_object, level["objects"])]

    def head(self, key: str) -> StoredObject | None:
        """Looks up the size, ETag and time of the object at `key`; None if there is no object."""
        try:
            return _stored_object(self._call.head(self.client, key))
        except FileNotFoundError:
            return None

    def read(self, stored_object: StoredObject, start: int, stop: int) -> bytes | memoryview:
        """Reads bytes [start, stop) of an object; raises an error if it was replaced since."""
        options: dict[str, Any] = {"range": (start, stop)}
        if stored_object.etag and not stored_object.etag.startswith(
            "W/"
        ):  # a weak ETag never matches
            options["if_match"] = stored_object.etag
        answer = self._call.get(self.client, stored_object.key, options=options)
        is_other = (
            stored_object.etag
            and (_quoted(answer.meta["e_tag"]) or stored_object.etag) != stored_object.etag
        )
        if is_other or answer.meta["size"] != stored_object.size:
            raise self._call.exceptions.PreconditionError(stored_object.key)
        return memoryview(answer.bytes())

    def put(
        self, key: str, path: str, passed: Callable[[bytes], None], create: bool, mark: str
    ) -> str | None:
        """Uploads the file at `path` and returns its ETag; with `create` it overwrites no object.

        `passed` is called with the bytes in their order. `mark` identifies the run, and is stored
        as the object's metadata, if the store supports that.
        """
        size = os.path.getsize(path)
        length = part_size(size)

        def parts() -> Iterator[bytes]:
            for data in blocks_of(path, length):
                passed(data)
                yield data

        more: dict[str, Any] = {} if self._is_folder else {"attributes": {MARK: mark}}
        if create or size <= length:
            data = b"".join(parts())
            mode = "create" if create else "overwrite"
            answer = self._call.put(self.client, key, data, mode=mode, use_multipart=False, **more)
        else:
            at_once = max(2, IN_FLIGHT // length)
            more |= {"chunk_size": length, "max_concurrency": at_once}
            answer = self._call.put(self.client, key, parts(), **more)
        return _quoted(answer["e_tag"])

    def mark(self, stored_object: StoredObject) -> str | None:
        """Reads the mark that `put` has stored with an object; None if there is none.

        The mark is a text that identifies the run which has sent the object.
        """
        attributes = self._call.get(
            self.client, stored_object.key, options={"head": True}
        ).attributes
        return {str(key).lower(): str(value) for key, value in attributes.items()}.get(MARK)

    def delete(self, keys: Sequence[str]) -> None:
        self._call.delete(self.client, [*keys])


def _stored_object(item: Any) -> StoredObject:
    time: datetime = item["last_modified"]
    return StoredObject(
        item["path"], item["size"], _quoted(item["e_tag"]), int(time.timestamp()) * 10**9
    )


def _quoted(etag: str | None) -> str | None:
    """Puts an ETag in quotation marks, as HTTP requires; Azure's listings omit them."""
    return etag if etag is None or etag.endswith('"') else f'"{etag}"'


class Web(Objects):
    """A web server that serves files but cannot list folders."""

    has_listing = False

    def below(self, key: str) -> Iterator[StoredObject]:
        return iter(())

    def directly_in(self, key: str) -> list[StoredObject]:
        return []


class Hub(Objects):
    """A repository of the Hugging Face Hub at one commit; its files are read by HTTPS."""

    def __init__(self, url: Url) -> None:
        import huggingface_hub as hub
        from obstore.store import HTTPStore

        name, _, revision = url.root.partition("@")
        kind, _, rest = name.partition("/")
        repository = {"repo_id": name}
        if kind in ("datasets", "spaces"):
            repository = {"repo_id": rest, "repo_type": kind.removesuffix("s")}
        api = hub.HfApi()
        about = api.repo_info(**repository, revision=revision or None)
        items = api.list_repo_tree(**repository, revision=about.sha, recursive=True)
        token = hub.get_token()
        headers = {"authorization": f"Bearer {token}"} if token else {}
        base = f"{api.endpoint}/{name}/resolve/{about.sha}/"
        options = {**CLIENT, "default_headers": headers, "allow_http": base.startswith("http:")}
        super().__init__(HTTPStore.from_url(base, client_options=options))
        time = int(about.last_modified.timestamp()) * 10**9 if about.last_modified else 0
        self._files = [
            StoredObject(item.path, item.size, None, time)
            for item in items
            if hasattr(item, "size")
        ]

    def below(self, key: str) -> Iterator[StoredObject]:
        return (each for each in self._files if not key or each.key.startswith(f"{key}/"))

    def directly_in(self, key: str) -> list[StoredObject]:
        return [each for each in self._files if each.key.rpartition("/")[0] == key]

    def head(self, key: str) -> StoredObject | None:
        return next((each for each in self._files if each.key == key), None)


class Filesystem:
    """A store that is accessed by an fsspec filesystem; it has the methods of `Objects`."""

    has_listing = True

    def __init__(self, own: Any) -> None:
        self.client = own

    def below(self, key: str) -> Iterator[StoredObject]:
        return (self._stored_object(each) for each in self.client.find(key, detail=True).values())

    def directly_in(self, key: str) -> list[StoredObject]:
        items = self.client.ls(key, detail=True) if self.client.isdir(key) else []
        return [self._stored_object(each) for each in items if each["type"] == "file"]

    def head(self, key: str) -> StoredObject | None:
        self.client.invalidate_cache()
        try:
            item = self.client.info(key)
        except FileNotFoundError:
            return None
        return self._stored_object(item) if item["type"] == "file" else None

    def _stored_object(self, item: Any) -> StoredObject:
        tag = item.get("ETag") or item.get("etag") or item.get("mtime") or item.get("created")
        return StoredObject(item["name"].strip("/"), item["size"], str(tag) if tag else None)

    def read(self, stored_object: StoredObject, start: int, stop: int) -> bytes | memoryview:
        data: bytes = self.client.cat_file(stored_object.key, start=start, end=stop)
        return data

    def put(
        self, key: str, path: str, passed: Callable[[bytes], None], create: bool, mark: str
    ) -> str | None:
        if create and self.head(key) is not None:
            raise FileExistsError(key)
        self.client.makedirs(key.rpartition("/")[0], exist_ok=True)
        with self.client.open(key, "wb") as file:
            for data in blocks_of(path, PART):
                passed(data)
                file.write(data)
        return None

    def mark(self, stored_object: StoredObject) -> str | None:
        return None

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self.client.rm_file(key)


Store = Objects | Filesystem


def store_of(url: Url) -> Store:
    """Opens the store of a URL.

    Raises MissingExtra if a package is not installed, and WrongOption if the program passed an
    object that is not a store.
    """
    if url.store is not None:
        if type(url.store).__module__.partition(".")[0] == "obstore":
            return Objects(url.store)
        if hasattr(url.store, "cat_file"):
            return Filesystem(url.store)
        raise WrongOption(
            "option-invalid",
            f"{type(url.store).__name__} is neither an obstore store nor an fsspec filesystem",
        )
    needed = ("obstore", "huggingface_hub") if url.scheme == "hf" else ("obstore",)
    if lacking := [name for name in needed if find_spec(name) is None]:
        raise MissingExtra(
            "extra-missing",
            f"{url} needs the package {lacking[0]}, which is not installed",
            hint="pip install 'zckpt[remote]'",
        )
    if url.scheme == "hf":
        return Hub(url)
    from obstore import store

    if url.scheme in ("https", "http"):
        options = {**CLIENT, "allow_http": url.scheme == "http"}
        web = f"{url.scheme}://{url.root}/"
        return Web(store.HTTPStore.from_url(web, client_options=options))
    # an endpoint that the user names may have no TLS
    is_plain = any(os.environ.get(name, "").startswith("http:") for name in ENDPOINTS)
    is_plain = is_plain or "AZURE_STORAGE_USE_EMULATOR" in os.environ
    kind = getattr(store, CLASSES[url.scheme])
    words = _profile() if url.scheme == "s3" else {}
    return Objects(kind(url.root, client_options={**CLIENT, "allow_http": is_plain}, **words))


def _profile() -> dict[str, Any]:
    """Options for an S3 store: the credentials and the region that boto3 finds.

    boto3 also reads profiles and the results of `aws sso login`. The result is empty if the
    environment has credentials, if boto3 is not installed, or if boto3 finds no credentials.
    """
    if any(map(os.environ.get, OWN_KEYS)) or not find_spec("boto3"):
        return {}
    import boto3
    from obstore.auth.boto3 import Boto3CredentialProvider

    session = boto3.Session()
    if session.get_credentials() is None:
        return {}
    region = {"region": session.region_name} if session.region_name else {}
    return {"credential_provider": Boto3CredentialProvider(session), **region}
