"""Does each bad URL, name and credential give one sentence and the next step, and no secret?"""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import zckpt

from ..conftest import EXAMPLE, ROOT, Result
from ..test_resume import files
from . import proxy as faults
from .conftest import KEY_ID, SECRET, Bucket
from .proxy import Fault

AddFault = Callable[..., Fault]
Run = Callable[..., Result]
TOKEN = "zckptSessionTokenOfATest//////////wEaDGV1LWNlbnRyYWwtMSJHMEUCIQD"


@pytest.fixture(autouse=True)
def token(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials that have a token, as those of a role."""
    monkeypatch.setenv("AWS_SESSION_TOKEN", TOKEN)


@pytest.fixture
def command(
    zckpt: Callable[..., Result], monkeypatch: pytest.MonkeyPatch, impatient: None
) -> Callable[..., Result]:
    """Runs a command with tracebacks; its output has no secret in it."""
    monkeypatch.setenv("ZCKPT_TRACEBACK", "1")

    def run(*words: object, **environment: str) -> Result:
        with monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            if environment:  # a user's own key has no token
                patch.delenv("AWS_SESSION_TOKEN")
            result = zckpt(*words)
        for secret in (SECRET, TOKEN, KEY_ID, "pass7word"):
            assert secret not in result.out + result.err
        return result

    return run


def refused(result: Result, message: str, hint: str) -> None:
    """One sentence, and one next step."""
    assert result.code in (1, 2)
    errors = [line for line in result.err.splitlines() if line.startswith("Error: ")]
    hints = [line for line in result.err.splitlines() if line.startswith("Hint: ")]
    assert len(errors) == 1
    assert message in errors[0]
    assert len(hints) == 1
    assert hint in hints[0]


# -- what a store refuses

REFUSALS: dict[str, tuple[int, str, str, str]] = {
    "expired": (400, "ExpiredToken", "have expired", "get new cred"),
    "no permission": (403, "AccessDenied", "no permission to", "ask the owner of the bucket"),
    "unknown key": (403, "InvalidAccessKeyId", "does not know the credentials", "AWS_ACCESS_KEY"),
    "wrong secret": (403, "SignatureDoesNotMatch", "does not know the credentials", "AWS_SECRET"),
    "unknown token": (400, "InvalidToken", "does not know the credentials", "AWS_ACCESS_KEY_ID"),
    "region": (301, "PermanentRedirect", "went to another region", "set AWS_REGION"),
    "malformed": (400, "AuthorizationHeaderMalformed", "went to another region", "set AWS_REGION"),
    "late clock": (403, "RequestTimeTooSkewed", "its clock and this machine's differ", "clock"),
    "no bucket": (404, "NoSuchBucket", "does not exist", "check the name"),
}


@pytest.mark.parametrize("name", REFUSALS)
@pytest.mark.parametrize("words", [("inspect", "@"), ("convert", EXAMPLE, "@/new")])
def test_each_refusal_is_one_sentence(
    command: Run, name: str, words: tuple[object, ...], bucket: Bucket, fault: AddFault
) -> None:
    status, code, message, hint = REFUSALS[name]
    url = bucket.url("run")
    for method in ("GET", "HEAD", "PUT", "POST"):
        fault(method, "", faults.refusal(status, code), times=1000)
    refused(command(*[str(word).replace("@", url) for word in words]), message, hint)
    assert not bucket.keys()


@pytest.mark.parametrize("name", ["expired", "no permission"])
def test_what_a_store_refuses_to_write(
    command: Run, name: str, bucket: Bucket, fault: AddFault
) -> None:
    status, code, message, hint = REFUSALS[name]
    fault("PUT", "", faults.refusal(status, code), times=1000)
    refused(command("convert", EXAMPLE, bucket.url("new")), message, hint)
    assert not bucket.keys()


def test_a_bucket_that_does_not_exist(command: Run, bucket: Bucket) -> None:
    refused(
        command("inspect", f"s3://{bucket.name}x/run"),
        f"s3://{bucket.name}x does not exist",
        "check the name",
    )
    refused(
        command("convert", EXAMPLE, f"s3://{bucket.name}x/run"),
        f"s3://{bucket.name}x does not exist",
        "check the name",
    )


def test_a_key_that_does_not_exist(command: Run, bucket: Bucket) -> None:
    bucket.upload(EXAMPLE, "runs/run")
    refused(
        command("inspect", bucket.url("runs/ran")), f"{bucket.url('runs/ran')} does not exist", ""
    )


def test_no_credentials(command: Run, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
        monkeypatch.delenv(name)
    # nothing answers where a machine of Amazon's has its role
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", "http://127.0.0.1:9")
    refused(command("inspect", bucket.url("run")), "no credentials for", "AWS_ACCESS_KEY_ID")


# -- a server that knows who may do what


@pytest.fixture
def asking(
    server: tuple[str, int], bucket: Bucket
) -> Iterator[Callable[[dict[str, str]], dict[str, str]]]:
    """moto asks who may do what: gives the environment of a user with a policy."""
    import boto3

    address = "http://{}:{}/moto-api/reset-auth".format(*server)

    def ask(count: bytes) -> None:
        urllib.request.urlopen(
            urllib.request.Request(address, count, {"Content-Type": "text/plain"}, method="POST")
        ).close()

    def user(policy: dict[str, str]) -> dict[str, str]:
        client = boto3.client("iam", region_name="us-east-1")
        name = f"user-{bucket.name}"
        client.create_user(UserName=name)
        statement = [
            {"Effect": effect, "Action": action, "Resource": "*"}
            for action, effect in policy.items()
        ]
        document = json.dumps({"Version": "2012-10-17", "Statement": statement})
        client.put_user_policy(UserName=name, PolicyName="of-a-test", PolicyDocument=document)
        key = client.create_access_key(UserName=name)["AccessKey"]
        ask(b"0")
        return {
            "AWS_ACCESS_KEY_ID": key["AccessKeyId"],
            "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"],
        }

    yield user
    ask(b"1000000000")


def test_a_user_that_may_only_read(command: Run, asking, bucket: Bucket, tmp_path: Path) -> None:
    url = bucket.upload(EXAMPLE, "runs/run")
    user = asking({"s3:Get*": "Allow", "s3:List*": "Allow"})
    assert command("convert", url, tmp_path / "target", **user).code == 0
    refused(
        command("convert", EXAMPLE, bucket.url("new"), **user),
        "no permission to write",
        "ask the owner",
    )
    wrong = {**user, "AWS_SECRET_ACCESS_KEY": "x" * 40}
    refused(command("inspect", url, **wrong), "does not know the credentials", "AWS_ACCESS_KEY_ID")
    unknown = {**user, "AWS_ACCESS_KEY_ID": "AKIANOBODY"}
    refused(
        command("inspect", url, **unknown), "does not know the credentials", "AWS_ACCESS_KEY_ID"
    )


def test_a_user_that_may_see_nothing(command: Run, asking, bucket: Bucket) -> None:
    url = bucket.upload(EXAMPLE, "runs/run")
    user = asking({"s3:PutObject": "Allow"})
    refused(command("inspect", url, **user), "no permission to", "ask the owner")


# -- names

NAMES = (
    "a b/run",
    "100%/run",
    "%2e%2e/run",
    "a%2Fb/run",
    "ü/\u65e5\u672c/run",
    "a+b&c=d/run",
    "~a!b'(c)*/run",
    "#1/run",
    "a?b/run",
    "[7]/run",
    "back\\slash/run",
    ".hidden/run",
    "a:b/run",
)


@pytest.mark.parametrize("name", NAMES)
def test_a_strange_name_is_taken_as_it_is(name: str, bucket: Bucket, tmp_path: Path) -> None:
    zckpt.convert(EXAMPLE, tmp_path / "expected")
    expected = files(tmp_path / "expected")
    url = bucket.upload(EXAMPLE, f"from/{name}")
    zckpt.convert(url, tmp_path / "here")
    assert files(tmp_path / "here") == expected
    zckpt.convert(url, bucket.url(f"to/{name}"))
    assert bucket.files(f"to/{name}") == expected
    assert {key.rpartition("/")[0] for key in bucket.keys("to/")} == {f"to/{name}"}


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("a/../run", "has the part '..' between slashes"),
        ("./run", "has the part '.' between slashes"),
        ("a//run", "has the part '' between slashes"),
        ("a/" + "x" * 300, "has a name of over 255 bytes"),
    ],
)
def test_a_name_that_is_no_path_is_refused(
    command: Run, key: str, message: str, bucket: Bucket
) -> None:
    for words in (("inspect", bucket.url(key)), ("convert", EXAMPLE, bucket.url(key))):
        refused(command(*words), message, "give the key as the store lists it")
    assert not bucket.keys()


def test_a_slash_at_the_end_is_left_out(bucket: Bucket, tmp_path: Path) -> None:
    url = bucket.upload(EXAMPLE, "runs/run") + "/"
    zckpt.convert(url, tmp_path / "here")
    zckpt.convert(url, bucket.url("to/") + "run/")
    assert bucket.files("to/run") == files(tmp_path / "here")


def test_an_object_that_stands_for_a_folder_is_one(bucket: Bucket, tmp_path: Path) -> None:
    """As the console of Amazon makes them, and tools that mount buckets."""
    url = bucket.upload(EXAMPLE, "runs/run")
    for key in ("runs/", "runs/run/", "runs/run/global_step7/", "runs/other/"):
        bucket.put(key, b"")
    zckpt.convert(url, tmp_path / "here")
    zckpt.convert(EXAMPLE, tmp_path / "there")
    assert files(tmp_path / "here") == files(tmp_path / "there")


@pytest.mark.parametrize(
    ("key", "message", "hint"),
    [
        ("runs/run/global_step7/", "is both an object and a folder", "to another prefix"),
        ("runs/run/x/", "was removed while it was read", "whose key ends in a slash"),
        ("runs/run//x", "'runs/run//x' cannot be the name of a file", "to another prefix"),
        ("runs/run/../x", "'runs/run/../x' cannot be the name", "to another prefix"),
    ],
)
def test_an_object_whose_key_is_no_path(
    command: Run, key: str, message: str, hint: str, bucket: Bucket
) -> None:
    url = bucket.upload(EXAMPLE, "runs/run")
    bucket.put(key, b"bytes")
    refused(command("inspect", url), message, hint)


@pytest.mark.parametrize("key", ["runs/run", "runs/run/global_step7"])
def test_a_key_that_is_an_object_and_a_folder(command: Run, key: str, bucket: Bucket) -> None:
    url = bucket.upload(EXAMPLE, "runs/run")
    bucket.put(key, b"bytes")
    refused(command("inspect", url), "is both an object and a folder", "to another prefix")


@pytest.mark.parametrize("key", ["runs/beside", "runs/..", "runs//x", "runs/" + "x" * 300])
def test_a_strange_object_beside_a_checkpoint_is_no_reason(
    command: Run, key: str, bucket: Bucket
) -> None:
    url = bucket.upload(EXAMPLE, "runs/run")
    bucket.put("runs/beside/file", b"bytes")
    bucket.put(key, b"bytes")
    assert command("inspect", url).code == 0


# -- URLs


@pytest.mark.parametrize(
    ("url", "message", "hint"),
    [
        ("s3://", "names no bucket", "s3://BUCKET/PATH"),
        ("s3:///run", "names no bucket", "s3://BUCKET/PATH"),
        ("s3://me:pass7word@bucket/run", "given with credentials", "leave them out of"),
        ("https://example.org/run?X-Amz-Signature=pass7word", "has a query", "without it"),
        ("https://example.org/run#pass7word", "has a query", "without it"),
        ("hf://run", "names no repository", "hf://ORG/NAME"),
        ("https://huggingface.co/org/name/tree/main", "is a page", "hf://org/name"),
        ("S3://bucket/run", "", "s3://"),
        ("ftp://host/run", "", "s3://"),
        ("file:///run", "", "/run"),
    ],
)
def test_a_url_that_is_none(command: Run, url: str, message: str, hint: str) -> None:
    refused(command("inspect", url), message, hint)


@pytest.mark.parametrize("url", ["https://example.org/run", "hf://org/name/run"])
def test_what_is_read_only_is_not_written(command: Run, url: str) -> None:
    refused(command("convert", EXAMPLE, url), "does not write there", "upload the folder")


def test_a_whole_bucket_is_no_target(command: Run, bucket: Bucket) -> None:
    refused(command("convert", EXAMPLE, bucket.url()), "is a bucket", "/NAME")


@pytest.mark.parametrize("missing", ["obstore", "huggingface_hub"])
def test_without_the_extra_the_command_of_pip_is_told(
    missing: str, bucket: Bucket, zckpt_hiding: Callable[..., Result]
) -> None:
    url = bucket.url("run") if missing == "obstore" else "hf://org/name"
    refused(
        zckpt_hiding(missing, "inspect", url),
        f"the package {missing}",
        "pip install 'zckpt[remote]'",
    )


@pytest.fixture
def zckpt_hiding(tmp_path: Path) -> Callable[..., Result]:
    """Runs a command in a process that does not find a package."""

    def run(missing: str, *words: object) -> Result:
        code = (
            "import sys, importlib.machinery as m\n"
            "class Hiding(m.PathFinder):\n"
            "    @classmethod\n"
            "    def find_spec(cls, name, path=None, target=None):\n"
            f"        hidden = name == {missing!r}\n"
            "        return None if hidden else super().find_spec(name, path, target)\n"
            "sys.meta_path[:] = [Hiding if f is m.PathFinder else f for f in sys.meta_path]\n"
            "from zckpt.cli import main\n"
            "main(sys.argv[1:])\n"
        )
        ended = subprocess.run(
            [sys.executable, "-c", code, *map(str, words)], capture_output=True, text=True, cwd=ROOT
        )
        return Result(ended.returncode, ended.stdout, ended.stderr)

    return run
