"""What has a dead run left at a URL, and how is it removed?"""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import Any

from ..errors import NotACheckpoint, WrongOption
from . import failures
from .mirror import UNFINISHED
from .outgoing import LASTS, names_at
from .stores import store_of
from .urls import Url, parse


def clean_up(path: Any, dry_run: bool = False) -> dict[str, Any]:
    """Removes what a run that was stopped has left at a URL; a complete target is never touched.

    Unfinished multipart uploads are removed too, where the client lists them (S3, with boto3).
    Whether a run still writes there is for the user to know. Raises WrongOption for a complete
    checkpoint, and NotACheckpoint if zckpt has begun nothing there.
    """
    url = parse(path)
    if not url.key:
        raise WrongOption(f"{url} is a whole bucket", hint="give the target of the stopped run")
    there = names_at(url)
    uploads = _uploads(url)
    if UNFINISHED not in there and not uploads:
        if {name.rpartition("/")[2] for name in there} & {*LASTS}:
            raise WrongOption(
                f"{url} is complete: nothing was removed",
                hint="remove it with the store's client",
            )
        raise NotACheckpoint(
            f"{url} has no remains of a run of zckpt", hint="give the target of the stopped run"
        )
    names = _remains(url, there) if UNFINISHED in there else []
    if not dry_run:
        try:
            store = store_of(url)
            if names:
                # the note goes last: without it the rest would not be known
                others = [name for name in names if name != UNFINISHED]
                for name in (*others, UNFINISHED):
                    store.delete([f"{url.key}/{name}"])
            client: Any = _client() if uploads else None
            for key, upload in uploads:
                client.abort_multipart_upload(Bucket=url.root, Key=key, UploadId=upload)
        except Exception as error:
            raise failures.explained(error, url, "write") from error
    return {
        "zckpt": 1,
        "command": "clean-up",
        "path": str(url),
        "files": names,
        "uploads": [key for key, _ in uploads],
        "bytes": sum(there[name].size for name in names),
        "dry_run": dry_run,
    }


def _remains(url: Url, there: dict[str, Any]) -> list[str]:
    """The files of the unfinished run that are there; the note alone if the target is complete."""
    found = there[UNFINISHED]
    try:
        document = json.loads(bytes(store_of(url).read(found, 0, found.size)))
        own, last = {*document["files"]}, document["last"]
    except (ValueError, KeyError, TypeError):
        own, last = set(), ""
    if last in there:  # its run ended between the last file and the removal of the note
        return [UNFINISHED]
    return sorted(name for name in there if name in own or name == UNFINISHED)


def _client() -> Any:
    import boto3

    return boto3.client("s3")


def _uploads(url: Url) -> list[tuple[str, str]]:
    """The multipart uploads below a URL that nobody has completed: key and number."""
    if url.scheme != "s3" or find_spec("boto3") is None:
        return []
    try:
        pages = _client().get_paginator("list_multipart_uploads")
        return [
            (item["Key"], item["UploadId"])
            for page in pages.paginate(Bucket=url.root, Prefix=f"{url.key}/")
            for item in page.get("Uploads", ())
        ]
    except Exception as error:
        raise failures.explained(error, url, "list") from error
