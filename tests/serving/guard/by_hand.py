"""A gRPC client without a library, which stops in the middle of a message, or takes no answer."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

DATA, HEADERS, SETTINGS = 0, 1, 4
ACK, END_HEADERS = 1, 4
INITIAL_WINDOW_SIZE = 4
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"


class Connection:
    """An HTTP/2 connection. A call on it may be answered with `window` bytes of messages."""

    def __init__(self, connection: socket.socket, window: int):
        self._connection = connection
        self._calls = 0
        setting = INITIAL_WINDOW_SIZE.to_bytes(2, "big") + window.to_bytes(4, "big")
        connection.sendall(PREFACE + frame(SETTINGS, 0, 0, setting))
        self._received = connection.recv(65536)  # the server's settings
        connection.sendall(frame(SETTINGS, ACK, 0))

    def call(self, method: str, data: bytes = b"", times: int = 1) -> None:
        """Begin a call, or several, and send this of its messages. Calls are not ended."""
        for _ in range(times):
            number = 2 * self._calls + 1
            self._calls += 1
            self._connection.sendall(
                frame(HEADERS, END_HEADERS, number, header(method)) + (frame(DATA, 0, number, data) if data else b"")
            )

    def receives(self, text: bytes) -> bool:
        """Whether this comes before the connection ends."""
        while text not in self._received:
            if not (piece := self._connection.recv(65536)):
                return False
            self._received += piece
        return True


@contextmanager
def connected(port: int, window: int = 65535) -> Iterator[Connection]:
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        yield Connection(connection, window)


def frame(kind: int, flags: int, call: int, data: bytes = b"") -> bytes:
    """A frame of HTTP/2, `call` 0 for the connection's own."""
    return len(data).to_bytes(3, "big") + bytes((kind, flags)) + call.to_bytes(4, "big") + data


def header(method: str) -> bytes:
    """A call's header as HPACK literals that are not indexed, each with its length."""
    fields = {":method": "POST", ":scheme": "http", ":path": method, ":authority": "x", "te": "trailers"}
    fields["content-type"] = "application/grpc"
    texts = [(name.encode(), value.encode()) for name, value in fields.items()]
    return b"".join(b"\0" + bytes((len(name),)) + name + bytes((len(value),)) + value for name, value in texts)


def framed(data: bytes) -> bytes:
    """A message as gRPC frames it."""
    return b"\0" + len(data).to_bytes(4, "big") + data
