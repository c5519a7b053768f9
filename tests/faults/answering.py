"""A server on this machine that fails in the ways in which services fail, each at a path of its own."""

from __future__ import annotations

import contextlib
import gzip
import socket
import socketserver
import threading
from collections.abc import Iterator

HTML = b"<html><h1>502 Bad Gateway</h1></html>"


def _answer(body: bytes, status: str = "200 OK", *headers: str, length: int | None = None) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"content-length: {len(body) if length is None else length}", "connection: close"]
    return "\r\n".join([*lines, *headers, "", ""]).encode() + body


_JSON, _XML = "content-type: application/json", "content-type: application/xml"
ANSWERS = {
    "html": _answer(HTML, "200 OK", "content-type: text/html"),
    "empty": _answer(b"", "200 OK", _JSON),
    "half": _answer(b'{"rows": [1, 2', "200 OK", _JSON),
    "no_utf8": _answer(b'{"rows": "\xff\xfe\xfa"}', "200 OK", _JSON + "; charset=utf-8"),
    "no_gzip": _answer(b"no gzip", "200 OK", _JSON, "content-encoding: gzip"),
    "half_gzip": _answer(gzip.compress(b"{}" * 999)[:20], "200 OK", _JSON, "content-encoding: gzip"),
    "short": _answer(b'{"rows"', "200 OK", _JSON, length=999),
    "chunk": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\nhello\r\n",
    "half_chunk": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nff\r\nhello",
    "nothing": b"",
    "no_http": b"SSH-2.0-OpenSSH_9.6\r\n",
    "long_line": b"HTTP/1.1 200 OK\r\nx: " + b"y" * 99_999 + b"\r\n\r\n",
    "502": _answer(HTML, "502 Bad Gateway"),
    "503": _answer(b"", "503 Service Unavailable"),
    "429": _answer(b"", "429 Too Many Requests"),
    "511": _answer(b"", "511 Network Authentication Required"),
    "504": _answer(b"", "504 Gateway Timeout"),
    "500": _answer(b"", "500 Internal Server Error"),
    "404": _answer(b"", "404 Not Found"),
    "loop": _answer(b"", "302 Found", "location: /loop"),
    "xml": _answer(b"<rows><row></rows>", "200 OK", _XML),
    "rows": _answer(b'{"rows": null}', "200 OK", _JSON),
}


class _Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        server: Answering = self.server  # type: ignore[assignment]
        if self.rfile.peek(1)[:1] == b"\x16":  # the client speaks TLS
            self.wfile.write(ANSWERS["no_http"])
            return
        path = self.rfile.readline().split(b" ")[1:2]
        with contextlib.suppress(OSError):
            while self.rfile.readline().strip():
                pass
        way = b"".join(path).decode().split("/")[1]
        if way == "slow":
            server.over.wait()
        elif way == "reset":
            self.request.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        elif way == "elsewhere":
            self.wfile.write(_answer(b"", "302 Found", f"location: http://localhost:{server.closed}/"))
        else:
            self.wfile.write(ANSWERS.get(way, b""))


class Answering(socketserver.ThreadingTCPServer):
    """The server.

    Attributes:
        closed: A port of this machine at which nothing listens.
        over: Set when the test is over.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.over = threading.Event()
        self._held = socket.socket()
        self._held.bind(("127.0.0.1", 0))  # bound, and not listening: no other process can take it
        self.closed = int(self._held.getsockname()[1])

    def handle_error(self, request: object, client_address: object) -> None:
        """Print nothing about a client that has gone."""

    def url(self, way: str) -> str:
        """Return the address at which the server fails in a way, or one at which nothing is."""
        if way == "refused":
            return f"http://127.0.0.1:{self.closed}/x"
        scheme = "https" if way == "no_tls" else "http"
        return f"{scheme}://127.0.0.1:{self.server_address[1]}/{way}"

    def server_close(self) -> None:
        """Close it."""
        self.over.set()
        self._held.close()
        super().server_close()


@contextlib.contextmanager
def answering() -> Iterator[Answering]:
    """Run the server, and yield it."""
    with Answering() as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server
        server.over.set()
        server.shutdown()
