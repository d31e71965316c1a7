"""Removes the objects that a stopped run of zckpt has left at a URL.

Only objects that the run listed in its note (zckpt-unfinished.json) are removed: other objects
below the same prefix may belong to another program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from shlex import quote
from typing import Any

from msgspec import Struct

from ..core.passes.description import VERSION
from ..core.storage.unfinished import Note
from ..errors import NotACheckpoint, TargetExists, WrongOption, listed
from . import failures
from .mirror import UNFINISHED
from .stores import StoredObject, store_of
from .upload import LASTS, names_at, note_of
from .urls import Url, parse


class Upload(Struct, frozen=True):
    """A multipart upload to S3 that was never completed; `number` is its upload id."""

    url: Url
    key: str
    number: str

    @property
    def command(self) -> str:
        """The `aws` command that aborts this upload."""
        where = f"--bucket {quote(self.url.root)} --key {quote(self.key)}"
        return f"aws s3api abort-multipart-upload {where} --upload-id {quote(self.number)}"


def clean_up(path: Any, dry_run: bool = False) -> dict[str, Any]:
    """Removes what a stopped run has left at a URL. A complete target is never touched.

    The run's note there (zckpt-unfinished.json) lists the files to remove. On S3, with boto3, their
    unfinished multipart uploads are removed too. Other uploads are only reported (`other_uploads`),
    with the commands that abort them. The caller makes sure that no run still writes there.

    Raises NotACheckpoint if there is no note and no upload, WrongOption for a complete checkpoint
    or a bucket, UnsupportedCheckpoint if the note cannot be parsed, and TargetExists if a run
    writes there meanwhile.
    """
    url = parse(path)
    if not url.key:
        raise WrongOption(
            "option-invalid", f"{url} is a bucket", hint="give the target of the stopped run"
        )
    there = names_at(url)
    uploads = _uploads(url)
    note = None
    if UNFINISHED in there:
        note = failures.asked(lambda: note_of(url, store_of(url), there[UNFINISHED]), url)
    elif not uploads:
        raise _nothing_begun(url, [*there])
    names = _remains(url, there, note) if note else []
    begun = {f"{url.key}/{name}" for name in note.names} if note else set()
    uploads_of_run = [upload for upload in uploads if upload.key in begun]
    if note and not dry_run:
        try:
            _remove(url, names, uploads_of_run, "" if note.last in there else note.last)
        except Exception as error:
            raise failures.explained(error, url, "write") from error
    return {
        "zckpt": VERSION,
        "command": "clean-up",
        "path": str(url),
        "files": names,
        "uploads": [upload.key for upload in uploads_of_run],
        "other_uploads": [
            {"key": upload.key, "command": upload.command}
            for upload in uploads
            if upload.key not in begun
        ],
        "bytes": sum(there[name].size for name in names),
        "dry_run": dry_run,
    }


def _remains(url: Url, there: Mapping[str, StoredObject], note: Note) -> list[str]:
    """The names of the objects to remove: the run's files that exist, and its note.

    If all files of the run exist, only the note is removed. Raises TargetExists if the last file
    exists, but another one does not.
    """
    if note.last not in there:
        return sorted({*note.names, UNFINISHED} & {*there})
    if lost := [name for name in note.names if name not in there]:
        raise TargetExists(
            "target-exists",
            f"{url} has {note.last}, which a run sends last, but not {listed(lost, 3)}: nothing "
            "was removed",
            hint="another program may have written there: look at the files, and remove with the "
            "store's client what you do not need",
            file=str(url),
        )
    return [UNFINISHED]  # the run ended between the last file and the removal of the note


def _remove(url: Url, names: list[str], uploads: list[Upload], last: str) -> None:
    """Removes files and multipart uploads, and finally the run's note (zckpt-unfinished.json).

    If a run has sent the file `last` meanwhile, the note is kept, and TargetExists is raised.
    """
    store = store_of(url)
    for name in names:
        if name != UNFINISHED:
            store.delete([f"{url.key}/{name}"])
    client: Any = _client() if uploads else None
    for upload in uploads:
        client.abort_multipart_upload(Bucket=url.root, Key=upload.key, UploadId=upload.number)
    if last and store.head(f"{url.key}/{last}") is not None:
        raise TargetExists(
            "target-exists",
            f"a run has written {url}/{last} meanwhile, but clean-up has removed other files of "
            "the same target",
            hint=f"{UNFINISHED} is kept, so no reader takes the target for complete: when that run "
            "has ended, remove the other objects with the store's client",
            file=str(url),
        )
    store.delete([f"{url.key}/{UNFINISHED}"])  # last, since only the note lists the rest


def _nothing_begun(url: Url, there: Sequence[str]) -> WrongOption | NotACheckpoint:
    """Makes the error that `clean_up` finds nothing of a stopped zckpt run at the URL.

    `there` are the names of the URL's objects. WrongOption means that they are a complete target.
    """
    if {name.rpartition("/")[2] for name in there} & {*LASTS}:
        return WrongOption(
            "nothing-to-clean",
            f"{url} is complete: nothing was removed",
            hint="remove it with the store's client",
        )
    below = [name.removesuffix(f"/{UNFINISHED}") for name in there if name.endswith(UNFINISHED)]
    target = f": {url}/{below[0]}" if below else ""
    return NotACheckpoint(
        "nothing-to-clean",
        f"{url} has no files of an unfinished run of zckpt",
        hint=f"give the target of the stopped run{target}",
        file=str(url),
    )


def _client() -> Any:
    import boto3

    return boto3.client("s3")


def _uploads(url: Url) -> list[Upload]:
    """Lists the unfinished multipart uploads below a URL (only S3, with boto3)."""
    if url.scheme != "s3" or find_spec("boto3") is None:
        return []
    try:
        pages = _client().get_paginator("list_multipart_uploads")
        return [
            Upload(url, item["Key"], item["UploadId"])
            for page in pages.paginate(Bucket=url.root, Prefix=f"{url.key}/")
            for item in page.get("Uploads", ())
        ]
    except Exception as error:
        raise failures.explained(error, url, "list") from error
