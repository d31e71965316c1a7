"""A server of S3 on loopback that serves local files, as a store with the highest speed.

    python -m benchmarks.range_server FOLDER      prints its address

It implements the requests that reading needs: ListObjectsV2, HEAD, GET with ranges. `/BUCKET/KEY`
is the file KEY below FOLDER. It checks no signature. The kernel sends the bytes, because a server
that copies them in Python (moto) is slower than zckpt. `/counts` returns, as JSON, the requests and
the bytes of bodies since the last `/counts`.
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

TIME = "2024-01-01T00:00:00.000Z", "Mon, 01 Jan 2024 00:00:00 GMT"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        address = urlsplit(self.path)
        query = {name: values[0] for name, values in parse_qs(address.query).items()}
        key = unquote(address.path).lstrip("/").partition("/")[2]
        if address.path == "/counts":
            self.body(200, json.dumps(self.server.taken()).encode())
        elif query.get("list-type") == "2":
            self.body(200, self.server.listing(query.get("prefix", ""), query.get("delimiter")))
        else:
            self.file(self.server.root / key)

    do_HEAD = do_GET

    def body(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def file(self, path: Path) -> None:
        if not path.is_file():
            self.body(404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            start, stop = 0, size
            if match := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
                start, stop = int(match[1]), min(int(match[2] or size) + 1, size)
            self.send_response(206 if match else 200)
            self.send_header("Content-Length", str(stop - start))
            if match:
                self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
            self.send_header("ETag", etag(path))
            self.send_header("Last-Modified", TIME[1])
            self.end_headers()
            if self.command == "HEAD":
                return
            self.server.count(stop - start)
            self.wfile.flush()
            while start < stop:
                start += os.sendfile(self.connection.fileno(), file.fileno(), start, stop - start)

    def log_message(self, *words: object) -> None:
        pass


def etag(path: Path) -> str:
    status = path.stat()
    return f'"{status.st_size:x}-{status.st_mtime_ns:x}"'


class Server(ThreadingHTTPServer):
    """A server of one folder, with counts of the requests and bytes that it has answered."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, root: Path) -> None:
        self.root = root
        self._lock = threading.Lock()
        self._counts = {"requests": 0, "bytes": 0}
        super().__init__(("127.0.0.1", 0), Handler)

    def count(self, size: int) -> None:
        with self._lock:
            self._counts["requests"] += 1
            self._counts["bytes"] += size

    def taken(self) -> dict[str, int]:
        with self._lock:
            counts, self._counts = self._counts, {"requests": 0, "bytes": 0}
        return counts

    def listing(self, prefix: str, delimiter: str | None) -> bytes:
        items, folders = [], set()
        for path in sorted(self.root.rglob("*")):
            key = path.relative_to(self.root).as_posix()
            if not path.is_file() or not key.startswith(prefix):
                continue
            head, found, _ = key[len(prefix) :].partition(delimiter or "\0")
            if found:
                folders.add(f"{prefix}{head}/")
            else:
                items.append(
                    f"<Contents><Key>{escape(key)}</Key><LastModified>{TIME[0]}</LastModified>"
                    f"<ETag>{escape(etag(path))}</ETag><Size>{path.stat().st_size}</Size></Contents>"
                )
        items += [
            f"<CommonPrefixes><Prefix>{escape(each)}</Prefix></CommonPrefixes>"
            for each in sorted(folders)
        ]
        body = "".join(items)
        return (
            f"<ListBucketResult><IsTruncated>false</IsTruncated>{body}</ListBucketResult>".encode()
        )

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # a client that has closed


def main() -> None:
    server = Server(Path(sys.argv[1]).resolve())
    print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
