"""A store of torch.distributed, reached without torch.

A process needs four calls of the store that torchrun keeps. To import torch for them takes two
seconds of CPU in every process, and minutes if a thousand nodes read it from one filesystem.

The messages are those of torch's own client (torch 2.6 to 2.14, `TCPStoreBackend.hpp`): a byte that
says what is wanted, then texts, each behind its length, and integers, all little-endian. Keys begin
with a slash. They are not documented, so the first messages are a check: a store that does not
answer them as these versions do is left to torch itself.

    VALIDATE    magic number (4 bytes)      no answer
    PING        any number (4 bytes)        the same number
    SET         key, value                  no answer
    GET         key                         value
    ADD         key, count (8 bytes)        new value (8 bytes)
    CHECK       how many keys, keys         0 if all are set (1 byte)
"""

from __future__ import annotations

import secrets
import socket
import struct
import time

VALIDATE, SET, GET, ADD, CHECK, PING = 0, 1, 3, 4, 5, 13
MAGIC = 0x3C85F7CE
ANSWER = 2.0  # seconds in which a store answers the first message
PAUSE = 0.05  # seconds between two attempts to connect
RECEIVE_BLOCK = 1 << 20  # bytes that are received at once
MAX_VALUE = 8 << 20  # bytes of a value, as torch's store has it


class OtherProtocol(Exception):
    """Whoever answers at the address does not speak as torch's store does."""


class TcpStore:
    """A connection to the store at `host`:`port`, whose keys all get `prefix`.

    The methods are those of torch's TCPStore. Raises RuntimeError, as they do, if nobody listens
    there for `timeout` seconds, if an answer takes that long, or if the connection ends;
    OtherProtocol if the first message is not answered as torch's store does it.
    """

    def __init__(self, host: str, port: int, prefix: str, timeout: float) -> None:
        self._prefix = f"/{prefix}/".encode()
        self._socket = _connected(host, port, timeout)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        number = struct.pack("<I", secrets.randbits(32))
        self._socket.settimeout(ANSWER)
        try:
            self._socket.sendall(struct.pack("<BI", VALIDATE, MAGIC) + bytes([PING]) + number)
            answer = self._received(4)
        except (OSError, RuntimeError):
            answer = b""
        if answer != number:
            self._socket.close()
            raise OtherProtocol(f"{host}:{port}")
        self._socket.settimeout(timeout)

    def set(self, key: str, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else value
        self._send(SET, self._key(key), _text(data))

    def get(self, key: str) -> bytes:
        """The value of a key that has been set; torch's own would wait for it."""
        self._send(GET, self._key(key))
        length = _number(self._received(8))
        if not 0 <= length <= MAX_VALUE:
            raise RuntimeError(f"the store says that a value has {length} bytes")
        return self._received(length)

    def add(self, key: str, count: int) -> int:
        self._send(ADD, self._key(key), struct.pack("<q", count))
        return _number(self._received(8))

    def check(self, keys: list[str]) -> bool:
        self._send(CHECK, struct.pack("<Q", len(keys)), *map(self._key, keys))
        return self._received(1) == b"\0"

    def close(self) -> None:
        """Ends the connection; a call that is under way fails."""
        self._socket.close()

    def _key(self, key: str) -> bytes:
        return _text(self._prefix + key.encode())

    def _send(self, wanted: int, *parts: bytes) -> None:
        try:
            self._socket.sendall(bytes([wanted]) + b"".join(parts))
        except OSError as error:
            raise RuntimeError(str(error)) from error

    def _received(self, length: int) -> bytes:
        data = bytearray()
        while len(data) < length:
            try:
                part = self._socket.recv(min(length - len(data), RECEIVE_BLOCK))
            except OSError as error:
                raise RuntimeError(str(error)) from error
            if not part:
                raise RuntimeError("the store has ended the connection")
            data += part
        return bytes(data)


def _connected(host: str, port: int, timeout: float) -> socket.socket:
    """A connection, as soon as somebody listens there."""
    end = time.monotonic() + timeout
    while True:
        try:
            return socket.create_connection((host, port), max(0.1, end - time.monotonic()))
        except UnicodeError as error:
            raise RuntimeError(f"{host} is not the name of a host") from error
        except OSError as error:
            if time.monotonic() > end:
                raise RuntimeError(str(error)) from error
        time.sleep(PAUSE)


def _text(data: bytes) -> bytes:
    return struct.pack("<Q", len(data)) + data


def _number(data: bytes) -> int:
    (number,) = struct.unpack("<q", data)
    return int(number)
