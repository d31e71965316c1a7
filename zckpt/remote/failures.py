"""Explains why a store refused a request, and what to do, in one sentence without credentials.

A library's message may contain a complete request with credentials. So only error codes are taken
from it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import TypeVar

from ..errors import SourceChanged, StoreError, UnsupportedCheckpoint, ZckptError
from .urls import Url

Asked = TypeVar("Asked")
ATTEMPTS, PAUSE = 4, 0.5  # attempts to read an answer that broke off; seconds before the next

CODE = re.compile(r"<Code>(\w+)</Code>")
STATUS = re.compile(r"status code: (\d{3})|\b(\d{3}):? \w")
WHERE = {
    "s3": "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; profiles need `pip install boto3`",
    "gs": "set GOOGLE_APPLICATION_CREDENTIALS, or run `gcloud auth application-default login`",
    "az": "set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or run `az login`",
    "hf": "set HF_TOKEN, or run `hf auth login`",
}
ENDPOINT = {"s3": " (AWS_REGION, AWS_ENDPOINT_URL)", "az": " (AZURE_STORAGE_ACCOUNT_NAME)"}
NO_BUCKET = ("NoSuchBucket", "ContainerNotFound", "RepositoryNotFoundError")
EXPIRED = ("ExpiredToken", "TokenRefreshRequired", "RequestExpired", "ExpiredTokenException")
REGION = (
    "PermanentRedirect",
    "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
    "TemporaryRedirect",
)
UNKNOWN_KEY = (
    "InvalidAccessKeyId",
    "SignatureDoesNotMatch",
    "InvalidToken",
    "AuthenticationFailed",
)
NO_PATH = re.compile(r'[Pp]ath "(.*?)"')  # obstore's message about a key that it does not accept
NO_REGION = "redirect without LOCATION"  # obstore's message if S3 names another region
BROKEN = "response body error"  # obstore's message if an answer ends early
# parts of the libraries' messages if they find no credentials
NO_CREDENTIALS = (
    "169.254.169.254",
    "/latest/api/token",
    "metadata.google.internal",
    "IMDS",
    "redential",
    "Account must be specified",
)


class BrokenOff(StoreError):
    """Raised if a store's answer ends too early; the store's library does not retry that."""


def asked(ask: Callable[[], Asked], url: Url, doing: str = "read") -> Asked:
    """Sends a request to a store by calling `ask`, and returns its result.

    The stores' libraries retry requests that fail before an answer begins. This function also
    retries requests whose answer ends too early. Raises the errors of `explained`.
    """
    for attempt in range(1, ATTEMPTS + 1):
        try:
            return ask()
        except Exception as failure:
            error = explained(failure, url, doing)
            if attempt == ATTEMPTS or not isinstance(error, BrokenOff):
                raise error from failure
            time.sleep(PAUSE * attempt)
    raise AssertionError


def explained(error: Exception, url: Url, doing: str = "read") -> ZckptError:
    """Converts a library's exception to a ZckptError; `doing` is "read", "write" or "list"."""
    text = str(error)
    name = type(error).__name__
    if isinstance(error, ZckptError):
        return error
    if name == "PreconditionError" and doing == "read":
        return SourceChanged(
            "source-changed",
            f"{url} changed while it was read: it has another ETag now",
            file=str(url),
        )
    if name == "InvalidPathError":
        key = match[1] if (match := NO_PATH.search(text)) else ""
        return unsafe(url, f"{url}: the object key {key!r} cannot be the name of a file")
    if name == "NotSupportedError":
        return StoreError(
            "store-unsupported",
            f"{url}: the server cannot send a range of bytes of a file",
            hint="download the checkpoint first",
            file=str(url),
        )
    code = match[1] if (match := CODE.search(text)) else name
    status = next((a or b for a, b in STATUS.findall(text)), "")
    where, store = WHERE.get(url.scheme, ""), f"{url.scheme}://{url.root}"
    message, hint = "", ""
    is_gone = isinstance(error, FileNotFoundError)
    if code in NO_BUCKET or (is_gone and doing != "read"):
        message, hint = f"{store} does not exist", "check the name" + ENDPOINT.get(url.scheme, "")
    elif code in EXPIRED:
        message = f"the credentials for {store} have expired"
        hint = "get new credentials, then start again; add --resume if a target was begun"
    elif code in REGION or status in ("301", "307") or NO_REGION in text:
        message = f"the request went to another region than that of {store}"
        hint = "set AWS_REGION to the bucket's region"
    elif code == "RequestTimeTooSkewed":
        message = f"{store} refuses requests, because its clock and this machine's differ"
        hint = "set this machine's clock: `timedatectl` shows whether it is synchronized"
    elif code in UNKNOWN_KEY or name == "UnauthenticatedError" or status == "401":
        message, hint = f"{store} does not know the credentials", where
    elif any(each in text for each in NO_CREDENTIALS) and code == name and status != "503":
        message, hint = f"no credentials for {store} were found", where
    elif name == "PermissionDeniedError" or status == "403" or code == "AccessDenied":
        message = f"you have no permission to {doing} {url}"
        hint = "ask the owner of the bucket, or use other credentials: " + where
    elif is_gone:
        return SourceChanged(
            "source-changed",
            f"{url} was removed while it was read",
            hint="start again; an object whose key ends in a slash cannot be read: if this is one, "
            "copy the checkpoint's other objects to another prefix",
            file=str(url),
        )
    elif status:
        message = f"{url}: the store answers {status}" + (f" ({code})" if code != name else "")
        hint = "the request was repeated several times; wait, and start again with --resume"
    else:
        message = f"{url}: the store does not answer, or its answer ends too early"
        hint = "check the network and the endpoint" + ENDPOINT.get(url.scheme, "")
        if BROKEN in text or isinstance(error, ConnectionError | TimeoutError):
            return BrokenOff("store-refused", message, hint)
    return StoreError("store-refused", message, hint or "check the credentials")


def unsafe(url: Url, message: str) -> UnsupportedCheckpoint:
    """Makes the error for a key that cannot be the name of a file on this machine."""
    return UnsupportedCheckpoint(
        "unsafe-name",
        message,
        hint="copy the checkpoint to another prefix, without this object",
        file=str(url),
    )
