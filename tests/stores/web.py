"""A web server of files, and a server that speaks as the Hugging Face Hub does."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote

SHA = "0123456789abcdef0123456789abcdef01234567"


class Handler(BaseHTTPRequestHandler):
    """Files below `root` with ranges and ETags, as any web server gives them."""

    protocol_version = "HTTP/1.1"
    server: Web
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        path = unquote(self.path.partition("?")[0])
        with self.server.lock:
            self.server.seen.append((self.command, path, self.headers.get("Authorization")))
        if not self.special(path):
            self.file(path)

    do_HEAD = do_GET

    def special(self, path: str) -> bool:
        return False

    def file(self, path: str) -> None:
        place = self.server.root / path.strip("/")
        if not place.is_file():
            self.answer(404, {}, b"there is no such file")
            return
        data = place.read_bytes()
        headers = {"ETag": f'"{hash(data):x}"', "Last-Modified": "Mon, 01 Jan 2024 00:00:00 GMT"}
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
        if match and self.server.has_ranges:
            start, stop = int(match[1]), min(int(match[2]) + 1, len(data))
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(data)}"
            self.answer(206, headers, data[start:stop])
        else:
            self.answer(200, headers, data)

    def answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *words: object) -> None:
        pass


class Web(ThreadingHTTPServer):
    """Serves the files below a folder; `seen` are method, path and credentials of each request."""

    daemon_threads = True

    def __init__(self, root: Path, handler: type[Handler] = Handler) -> None:
        self.root, self.has_ranges = root, True
        self.seen: list[tuple[str, str, str | None]] = []
        self.lock = threading.Lock()
        super().__init__(("127.0.0.1", 0), handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def served(server: Web) -> Iterator[Web]:
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()


class HubHandler(Handler):
    """The Hub's answers of one repository `org/name`, whose files are below `root`.

    Large files are somewhere else, as the Hub's are: `cdn` is the address of that server.
    """

    server: Hub

    def special(self, path: str) -> bool:
        files = [each for each in sorted(self.server.root.rglob("*")) if each.is_file()]
        if re.fullmatch(r"/api/models/org/name(/revision/(main|v1|" + SHA + "))?", path):
            about = {"_id": "1", "id": "org/name", "sha": SHA, "private": True, "tags": []}
            about |= {"lastModified": "2024-01-01T00:00:00.000Z", "siblings": [], "downloads": 0}
            self.json(about)
        elif path == f"/api/models/org/name/tree/{SHA}":
            tree = [
                {
                    "type": "file",
                    "oid": "0" * 40,
                    "size": each.stat().st_size,
                    "path": each.relative_to(self.server.root).as_posix(),
                }
                for each in files
            ]
            folders = {each.parent.relative_to(self.server.root).as_posix() for each in files}
            tree += [
                {"type": "directory", "oid": "1" * 40, "size": 0, "path": folder}
                for folder in folders - {"."}
            ]
            self.json(tree)
        elif match := re.fullmatch(rf"/org/name/resolve/{SHA}/(.*)", path):
            if match[1].endswith(".safetensors"):
                self.answer(302, {"Location": f"{self.server.cdn}/{match[1]}"}, b"")
            else:
                self.file(match[1])
        else:
            headers = {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"}
            self.answer(404, headers, b"{}")
        return True

    def json(self, document: object) -> None:
        self.answer(200, {"Content-Type": "application/json"}, json.dumps(document).encode())


class Hub(Web):
    """The Hub, with its large files at the address `cdn`."""

    def __init__(self, root: Path, cdn: str) -> None:
        self.cdn = cdn
        super().__init__(root, HubHandler)
