"""The hostile requests of `benchmarks.endpoint_attacks`: the bytes of a client, and the statuses that it gets.

`REQUESTS` holds for every door of the endpoint. A door with routes of its own adds a table of this form.
"""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from verl_multiturn.proxy.http.bodies import MOST_BYTES

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
_ASKED = [{"role": "user", "content": "hello"}]
HELLO: Mapping[str, Any] = {"model": "m", "messages": _ASKED}
_SMALL = json.dumps(HELLO).encode()
_PATIENCE_S = 120.0


@dataclass(frozen=True)
class Target:
    """The knowledge of an attacker about a door."""

    port: int
    key: str
    """The key of its own session."""
    other: str = "resp_0000"
    """Id of a response of another session."""


@dataclass(frozen=True)
class HostileRequest:
    """A connection's bytes, and the statuses of all answers to them; () where it is closed without one."""

    name: str
    written: Callable[[Target], bytes]
    statuses: tuple[int, ...]


def http(
    body: Any = HELLO,
    path: str = CHAT,
    *head: str,
    method: str = "POST",
    key: str | None = "",
    framed: bool = True,
    version: str = "HTTP/1.1",
) -> Callable[[Target], bytes]:
    """Return what writes a request.

    Args:
        body: Its body; what is not bytes is written as JSON.
        path: Its path.
        head: Further lines of its head.
        method: Its method.
        key: Its key as a bearer; "": the target's own; None: none.
        framed: Whether the length is in the head.
        version: Its version.
    """
    given = body if isinstance(body, bytes) else json.dumps(body).encode()

    def written(target: Target) -> bytes:
        content = given.replace(b"{other}", target.other.encode())
        lines = [f"{method} {path} {version}", "host: h"]
        lines += [f"authorization: Bearer {key or target.key}"] if key is not None else []
        lines += [f"content-length: {len(content)}"] if framed else []
        lines += [line.replace("{key}", target.key).replace("{other}", target.other) for line in head]
        start = "\r\n".join([*lines, "", ""]).replace("{key}", target.key)
        return start.encode("latin-1") + content

    return written


def joined(*parts: Callable[[Target], bytes]) -> Callable[[Target], bytes]:
    """Return what writes several requests, one behind the other."""
    return lambda target: b"".join(part(target) for part in parts)


def raw(text: bytes) -> Callable[[Target], bytes]:
    """Return what writes bytes as they are, with the target's key in the place of `{key}`."""
    return lambda target: text.replace(b"{key}", target.key.encode())


def chat(**fields: Any) -> Callable[[Target], bytes]:
    """Return what writes a chat completion with other fields."""
    return http({**HELLO, **fields})


def _said(*messages: Any) -> Callable[[Target], bytes]:
    return chat(messages=list(messages))


_AUTHORIZED = b"host: h\r\nauthorization: Bearer {key}\r\n"
_POST = b"POST /v1/chat/completions HTTP/1.1\r\n" + _AUTHORIZED
_CHUNKED = "transfer-encoding: chunked"
_WHOLE = b"%x\r\n%s\r\n0\r\n\r\n" % (len(_SMALL), _SMALL)
_PIECE = b"100000\r\n" + b" " * 0x100000 + b"\r\n"
_BOMB = gzip.compress(b'{"a": "' + b" " * MOST_BYTES + b'"}')
_DEEP = {"type": "object", "properties": {"a": {"type": "string"}}}
_TOOL = {"type": "function", "function": {"name": "add", "parameters": _DEEP}}
_PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}

_KEYS = [
    ("no key", http(key=None), (401,)),
    ("a wrong key", http(key="wrong"), (401,)),
    ("an empty key", http(HELLO, CHAT, "authorization: Bearer ", key=None), (401,)),
    ("a key of another scheme", http(HELLO, CHAT, "authorization: Basic {key}", key=None), (401,)),
    ("a key that is no text", http(HELLO, CHAT, "x-api-key: \xff\xfe", key=None), (401,)),
    ("the key and a letter", http(HELLO, CHAT, "authorization: Bearer {key}A", key=None), (401,)),
    ("the key cut short", lambda target: http(key=target.key[:-1])(target), (401,)),
    ("the key in capitals", lambda target: http(key=target.key.swapcase())(target), (401,)),
    ("the key in the query", http(HELLO, f"{CHAT}?api_key={{key}}", key=None), (401,)),
    ("another session's path beside the key", http(HELLO, f"/s/wrong{CHAT}"), (401,)),
    ("the key in a cookie", http(HELLO, CHAT, "cookie: key={key}", key=None), (401,)),
    ("a key of 60,000 letters", http(key="k" * 60_000), (401,)),
    ("models without a key", http(b"", "/v1/models", method="GET", key=None), (401,)),
]
_METHODS = [
    *((f"{method} of a completion", http(b"", method=method), (405,))
      for method in ("GET", "HEAD", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE")),
    ("a method that is none", http(b"", method="FOO"), (400,)),
    ("a method of 70,000 letters", http(b"", method="A" * 70_000), (400,)),
    ("a method with a line break", raw(b"PO\r\nST / HTTP/1.1\r\n\r\n"), (400,)),
    ("DELETE of a model", http(b"", "/v1/models/m", method="DELETE"), (405,)),
]  # fmt: skip
_PATHS = [
    ("an unknown path", http(HELLO, "/nowhere"), (404,)),
    ("an unknown path without a key", http(HELLO, "/v1/embeddings", key=None), (404,)),
    ("a path out of the root", http(HELLO, "/../../etc/passwd"), (404,)),
    ("an escaped path out of the root", http(HELLO, "/v1/%2e%2e/%2e%2e/etc/passwd"), (404,)),
    ("a path with NUL", http(HELLO, "/v1/chat/completions%00"), (404,)),
    ("a path with a space", http(HELLO, "/v1/chat completions"), (400,)),
    ("a path of 70,000 letters", http(HELLO, "/" + "a" * 70_000), (400,)),
    ("a path of 20,000 slashes", http(HELLO, "/" * 20_000 + "v1/embeddings"), (404,)),
    ("half a secret's path", http(HELLO, "/s/"), (404,)),
    ("a path that is an asterisk", http(b"", "*", method="OPTIONS"), (404,)),
    (
        "an unknown path with 9 GB",
        raw(b"POST /nowhere HTTP/1.1\r\nhost: h\r\ncontent-length: 9000000000\r\n\r\n"),
        (404,),
    ),
]
_BODIES = [
    ("an empty body", http(b""), (400,)),
    ("half an object", http(b"{"), (400,)),
    ("bad UTF-8", http(b'{"messages": [{"role": "user", "content": "\xff"}]}'), (400,)),
    ("UTF-16", http(json.dumps(HELLO).encode("utf-16")), (400,)),
    ("a mark of the byte order", http(b"\xef\xbb\xbf" + _SMALL), (400,)),
    ("a list", http(b"[]"), (400,)),
    ("null", http(b"null"), (400,)),
    ("NaN", http(b'{"messages": NaN}'), (400,)),
    ("infinity", http(b'{"messages": [], "temperature": Infinity}'), (400,)),
    ("a number of 5,000 digits", http(b'{"messages": [], "seed": ' + b"1" * 5000 + b"}"), (400,)),
    ("5,000 levels", http(b'{"messages":' + b"[" * 5000 + b"]" * 5000 + b"}"), (400,)),
    ("200,000 brackets", http(b'{"a": [' + b"[]," * 200_000 + b"0]}"), (400,)),
    ("two objects", http(_SMALL + _SMALL), (400,)),
    ("a form", http(b"messages=hello", CHAT, "content-type: application/x-www-form-urlencoded"), (400,)),
    ("multipart", http(b"--x\r\n\r\nhello\r\n--x--", CHAT, "content-type: multipart/form-data; boundary=x"), (400,)),
    ("a bomb of gzip", http(_BOMB, CHAT, "content-encoding: gzip"), (413,)),
    ("gzip that is cut off", http(gzip.compress(_SMALL)[:-3], CHAT, "content-encoding: gzip"), (400,)),
    ("gzip that is none", http(_SMALL, CHAT, "content-encoding: gzip"), (400,)),
    ("gzip twice", http(gzip.compress(gzip.compress(_SMALL)), CHAT, "content-encoding: gzip, gzip"), (415,)),
    ("zstd", http(_SMALL, CHAT, "content-encoding: zstd"), (415,)),
]
_FIELDS = [
    ("no messages", http({"model": "m"}), (400,)),
    ("an empty list of messages", chat(messages=[]), (400,)),
    ("messages that are a number", chat(messages=5), (400,)),
    ("a message that is empty", _said({}), (400,)),
    ("an unknown role", _said({"role": "ghost", "content": "x"}), (400,)),
    ("a content that is a number", _said({"role": "user", "content": 7}), (400,)),
    ("a call's arguments that are a list", _said({"role": "assistant", "tool_calls": [[]]}), (400,)),
    ("an image", _said({"role": "user", "content": [_PICTURE]}), (400,)),
    ("n = 0", chat(n=0), (400,)),
    ("n = -1", chat(n=-1), (400,)),
    ("n = 10^9", chat(n=10**9), (400,)),
    ("n of a text", chat(n="two"), (400,)),
    ("max_tokens of a text", chat(max_tokens="all"), (400,)),
    ("stop of an object", chat(stop={"a": 1}), (400,)),
    ("stream of a list", chat(stream=[1]), (400,)),
    ("tools that are a text", chat(tools="add"), (400,)),
    ("a tool without a name", chat(tools=[{"type": "function"}]), (400,)),
    ("an unknown previous response", http({"input": "x", "previous_response_id": "resp_none"}, RESPONSES), (400,)),
    ("a previous response of another session", http({"input": "x", "previous_response_id": "{other}"}, RESPONSES),
     (400,)),
    ("an input that is a number", http({"input": 5}, RESPONSES), (400,)),
    ("an unknown role in messages", http({"max_tokens": 9, "messages": [{"role": "ghost", "content": "x"}]}, MESSAGES),
     (400,)),
    ("no messages in messages", http({"max_tokens": 9, "messages": []}, MESSAGES), (400,)),
    ("tokens of no messages", http({}, "/v1/messages/count_tokens"), (400,)),
]  # fmt: skip
_FRAMES = [
    ("9 GB in the head", raw(_POST + b"content-length: 9000000000\r\n\r\n"), (413,)),
    ("9 MiB in chunks", http(_PIECE * 9, CHAT, _CHUNKED, framed=False), (413,)),
    ("two lengths that differ", raw(_POST + b"content-length: 5\r\ncontent-length: 6\r\n\r\n{}   "), (400,)),
    ("a length and chunks", http(_WHOLE, CHAT, _CHUNKED), (400,)),
    ("chunks, a length, and a request behind their end",
     joined(http(_WHOLE, CHAT, _CHUNKED, "content-length: 4", framed=False), http(b"", "/nowhere")), (400,)),
    ("chunks that say gzip and are none", http(_WHOLE, CHAT, "transfer-encoding: gzip, chunked", framed=False), (400,)),
    ("an unknown transfer", http(_WHOLE, CHAT, "transfer-encoding: xchunked", framed=False), (400,)),
    ("a negative length", raw(_POST + b"content-length: -1\r\n\r\n"), (400,)),
    ("a length with a sign", raw(_POST + b"content-length: +5\r\n\r\n{}   "), (400,)),
    ("a length with an underscore", raw(_POST + b"content-length: 1_0\r\n\r\n{}        "), (400,)),
    ("a length that is hexadecimal", raw(_POST + b"content-length: 0x5\r\n\r\n{}   "), (400,)),
    ("a chunk of negative size", http(b"-5\r\nhello\r\n0\r\n\r\n", CHAT, _CHUNKED, framed=False), (400,)),
    ("a chunk whose size is no number", http(b"zz\r\nhello\r\n0\r\n\r\n", CHAT, _CHUNKED, framed=False), (400,)),
    ("a chunk that is longer than it says", http(b"2\r\nhello\r\n0\r\n\r\n", CHAT, _CHUNKED, framed=False), (400,)),
    ("a head without a colon", raw(_POST + b"nonsense\r\n\r\n"), (400,)),
    ("a space before the colon", raw(_POST + b"content-length : 2\r\n\r\n{}"), (400,)),
    ("NUL in the head", raw(_POST + b"x: a\0b\r\n\r\n"), (400,)),
    ("70,000 letters in the head", raw(_POST + b"x: " + b"a" * 70_000 + b"\r\n\r\n"), (400,)),
    ("HTTP 9.9", http(version="HTTP/9.9"), (400,)),
    ("the preface of HTTP 2", raw(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"), (400,)),
    ("a hello of TLS", raw(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 40 + b"\r\n\r\n"), (400,)),
    # The body of a path where nothing is served is not read, so that the connection ends there.
    ("four requests of which two are bad", joined(http(b"{"), http(), http(HELLO, "/nowhere"), http()),
     (400, 200, 404)),
    ("a body that never comes", raw(_POST + b"content-length: 90\r\n\r\n{"), (408,)),
]  # fmt: skip
_HARMLESS = [
    ("a good request", http(), (200,)),
    ("another type of content", http(_SMALL, CHAT, "content-type: image/png"), (200,)),
    ("gzip", http(gzip.compress(_SMALL), CHAT, "content-encoding: gzip"), (200,)),
    ("chunks", http(_WHOLE, CHAT, _CHUNKED, framed=False), (200,)),
    # docs/reference/endpoint.md: clamped; not enforced.
    ("max_tokens = 0", chat(max_tokens=0), (200,)),
    ("max_tokens = -1", chat(max_tokens=-1), (200,)),
    ("a choice of a tool that is not there", chat(tools=[_TOOL], tool_choice={"function": {"name": "none"}}), (200,)),
    ("a choice of tools that is nonsense", chat(tools=[_TOOL], tool_choice="sometimes"), (200,)),
    ("max_tokens = 10^9", chat(max_tokens=10**9), (200,)),
    ("fields that change nothing", chat(temperature=9.5, seed=-1, user="x", logit_bias={"5": 100}), (200,)),
    ("an unknown model", chat(model="../../etc/passwd"), (200,)),
    ("three requests at once", joined(http(), http(), http()), (200, 200, 200)),
    ("the base without a key", http(b"", "/", method="GET", key=None), (200,)),
]
REQUESTS: Sequence[HostileRequest] = [
    HostileRequest(*each) for table in (_KEYS, _METHODS, _PATHS, _BODIES, _FIELDS, _FRAMES, _HARMLESS) for each in table
]


async def statuses_of(port: int, written: bytes, expected: int) -> tuple[int, ...]:
    """Send bytes on a connection of their own, and return the statuses of all answers until the server closes it.

    The client closes its side when it has got as many answers as expected, so that a further one is seen, too.

    Args:
        port: Where the server listens.
        written: The bytes.
        expected: Number of answers.
    """
    async with asyncio.timeout(_PATIENCE_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        sending = asyncio.ensure_future(_send(writer, written))
        found: list[int] = []
        try:
            while (status := await _status(reader, is_head=written.startswith(b"HEAD "))) is not None:
                found.append(status)
                if len(found) == expected:
                    await sending
                    writer.write_eof()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            sending.cancel()
            writer.close()
    return tuple(found)


async def _send(writer: asyncio.StreamWriter, written: bytes) -> None:
    try:
        writer.write(written)
        await writer.drain()
    except ConnectionError:
        pass  # it was refused before its end


async def _status(reader: asyncio.StreamReader, is_head: bool) -> int | None:
    """Return the status of the next answer, and read its body; None: the server has closed."""
    head = await reader.readuntil(b"\r\n\r\n") if not reader.at_eof() else b""
    if not head:
        return None
    lines = head.decode("latin-1").lower().split("\r\n")
    fields = dict(line.split(": ", 1) for line in lines[1:] if ": " in line)
    if not is_head:
        await reader.readexactly(int(fields.get("content-length", 0)))
    return int(lines[0].split()[1])
