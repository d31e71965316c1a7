"""What does a bad network, or a bad store, do to a program? A proxy that plays faults by a list.

It stands before a server of S3. Each request takes the first fault that fits it; the others are
handed on as they came. All requests are kept in `seen`.
"""

from __future__ import annotations

import re
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

HOP = ("transfer-encoding", "connection", "date", "server")  # headers of one connection


@dataclass
class Answer:
    """What the server answered."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes


@dataclass
class Request:
    """One request: `answer` asks the server for it."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    answer: Callable[[], Answer]
    handler: Handler
    status: int = 0

    def send(self, answer: Answer, most: int | None = None) -> None:
        """Answers; of the body at most so many bytes."""
        self.status = answer.status
        handler = self.handler
        handler.send_response(answer.status)
        sizes = [value for name, value in answer.headers if name.lower() == "content-length"]
        for name, value in answer.headers:
            if name.lower() not in (*HOP, "content-length"):
                handler.send_header(name, value)
        size = sizes[0] if self.method == "HEAD" and sizes else len(answer.body)
        handler.send_header("Content-Length", str(size))
        handler.end_headers()
        if self.method != "HEAD":
            handler.wfile.write(answer.body[:most])


Play = Callable[[Request], None]


@dataclass
class Fault:
    """What happens to the requests that fit: to `times` of them, once `after` have passed."""

    method: str
    path: str  # a regular expression, of the path with its query
    play: Play
    times: int = 1
    after: int = 0
    played: int = 0

    def fits(self, request: Request) -> bool:
        if request.method != self.method or not re.search(self.path, request.path):
            return False
        if self.after:
            self.after -= 1
            return False
        return self.played < self.times


# -- what a fault plays


def refusal(status: int, code: str = "", headers: dict[str, str] | None = None) -> Play:
    """The server refuses, with the XML of S3 if there is a code."""
    body = f"<Error><Code>{code}</Code><Message>told by a test</Message></Error>" if code else ""

    def play(request: Request) -> None:
        more = [("Content-Type", "application/xml"), *(headers or {}).items()]
        request.send(Answer(status, more, body.encode()))

    return play


def reset(request: Request) -> None:
    """The connection is reset before an answer."""
    connection = request.handler.connection
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()
    request.handler.close_connection = True


def unanswered(request: Request) -> None:
    """The server does what was asked, and the connection is reset before its answer arrives."""
    request.answer()
    reset(request)


def cut(request: Request) -> None:
    """The connection ends in the middle of the body."""
    answer = request.answer()
    request.handler.close_connection = True
    request.send(answer, len(answer.body) // 2)


def slow(request: Request) -> None:
    """The body comes in twenty drops."""
    answer = request.answer()
    request.send(answer, 0)
    step = max(1, len(answer.body) // 20)
    for start in range(0, len(answer.body), step):
        time.sleep(0.02)
        request.handler.wfile.write(answer.body[start : start + step])


def flipped(request: Request) -> None:
    """One bit in the middle of the body is another one."""
    answer = request.answer()
    body = bytearray(answer.body)
    body[len(body) // 2] ^= 4
    request.send(Answer(answer.status, answer.headers, bytes(body)))


def short(request: Request) -> None:
    """A range is answered with fewer bytes than were asked for, as if these were all."""
    answer = request.answer()
    request.send(Answer(answer.status, answer.headers, answer.body[: len(answer.body) // 2]))


def flipped_up(request: Request) -> None:
    """The server gets another bit in the middle of what was sent."""
    body = bytearray(request.body)
    body[len(body) // 2] ^= 4
    request.body = bytes(body)
    request.send(request.answer())


def other_etag(request: Request) -> None:
    """The server's ETag is no MD5 of the bytes, as that of an encrypted object."""
    for name in [name for name in request.headers if name.lower() == "if-match"]:
        del request.headers[name]
    answer = request.answer()
    headers = [(name, value) for name, value in answer.headers if name.lower() != "etag"]
    headers.append(("ETag", '"of-an-encrypted-object"'))
    request.send(Answer(answer.status, headers, answer.body))


def hang(request: Request) -> None:
    """There is no answer for a while."""
    time.sleep(5)
    reset(request)


def first(change: Callable[[], object]) -> Play:
    """Something happens before the server gets the request."""

    def play(request: Request) -> None:
        change()
        request.send(request.answer())

    return play


def then(change: Callable[[], object]) -> Play:
    """Something happens after the server has done the request, and before the answer arrives."""

    def play(request: Request) -> None:
        answer = request.answer()
        change()
        request.send(answer)

    return play


# -- the proxy


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy
    disable_nagle_algorithm = True

    def handle_one(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        headers = dict(self.headers.items())

        def answer() -> Answer:
            connection = HTTPConnection(*self.server.behind, timeout=60)
            connection.request(self.command, self.path, request.body, request.headers)
            got = connection.getresponse()
            data = got.read()
            connection.close()
            return Answer(got.status, got.getheaders(), data)

        request = Request(self.command, self.path, headers, body, answer, self)
        play = self.server.take(request)
        try:
            if play is None:
                request.send(request.answer())
            else:
                play(request)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_one

    def log_message(self, *words: object) -> None:
        pass


@dataclass
class Seen:
    """Requests by what they ask for."""

    requests: list[Request] = field(default_factory=list)

    def of(self, method: str, path: str = "") -> list[Request]:
        return [
            each for each in self.requests if each.method == method and re.search(path, each.path)
        ]


class Proxy(ThreadingHTTPServer):
    """The proxy before a server at (host, port)."""

    daemon_threads = True

    def __init__(self, behind: tuple[str, int]) -> None:
        self.behind, self.faults, self.seen = behind, list[Fault](), Seen()
        self._lock = threading.Lock()
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def take(self, request: Request) -> Play | None:
        with self._lock:
            self.seen.requests.append(request)
            for fault in self.faults:
                if fault.fits(request):
                    fault.played += 1
                    return fault.play
        return None

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # a client that went away
