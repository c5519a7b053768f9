"""Requests that only append: earlier messages of a session are not read again.

Each request of an agent holds its whole history, so reading all of it would make a turn cost more and more. Where a
body is an earlier one with further messages at the end of its list, byte by byte, only those are parsed and read:

    earlier   {"model": "m", "messages": [{…},{…}          ], "tools": […]}
    now       {"model": "m", "messages": [{…},{…},{…},{…}], "tools": […]}
              └─ equal, by a digest ───────────┘└─ read ─┘└─ equal ───────┘

Invariant: the result equals that of reading the whole body. Any other body is read whole.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace
from typing import Any

import orjson

from verl_multiturn.proxy.http.parsing import parse_json
from verl_multiturn.proxy.protocols import Protocol
from verl_multiturn.proxy.protocols.fields import MOST_MESSAGES
from verl_multiturn.proxy.protocols.requests import ChatRequest, RefusedError

_MOST_CACHED = 8
"""Requests that are kept: as many branches of a session may take turns."""
_LIST = "messages"
_MARKS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"|[\[\]{}]', re.S)
_STEPS = {b"[": 1, b"{": 1, b"]": -1, b"}": -1}
_OPENING = re.compile(rb"\s*:\s*\[")


@dataclass(frozen=True)
class CachedRequest:
    """A request that another one may continue."""

    end: int
    """Where its last message ends."""
    digest: bytes
    """Digest of the body up to there."""
    rest: bytes
    """The body from there on."""
    request: ChatRequest


class Histories:
    """The requests of one session in a protocol that reads each message for itself, such as chat completions."""

    def __init__(self) -> None:
        self._cached: list[CachedRequest] = []

    def continued(self, protocol: Protocol, body: bytes) -> ChatRequest | None:
        """Return the request of a body that continues an earlier one; None for any other."""
        for cached in reversed(self._cached):
            stop = len(body) - len(cached.rest)
            if stop <= cached.end or body[cached.end] != ord(",") or not body.endswith(cached.rest):
                continue
            digest = _digest(body, cached.end)
            if digest.digest() != cached.digest:
                continue
            try:
                added = protocol.read({_LIST: parse_json(b"[%b]" % body[cached.end + 1 : stop])}).messages
            except (orjson.JSONDecodeError, RefusedError):
                return None  # a reader of the whole body can find the fault
            messages = [*cached.request.messages, *added]
            if len(messages) > MOST_MESSAGES:
                return None
            request = replace(cached.request, messages=messages)
            digest.update(memoryview(body)[cached.end : stop])
            self._cached.remove(cached)
            self._cached.append(CachedRequest(stop, digest.digest(), cached.rest, request))
            return request
        return None

    def add(self, cached: CachedRequest) -> None:
        """Remember a request, in the place of the oldest one."""
        self._cached = [*self._cached[1 - _MOST_CACHED :], cached]


def cached_from(body: bytes, parsed: dict[str, Any], request: ChatRequest) -> CachedRequest | None:
    """Return the argument of `Histories.add`, from a body that was read whole; None where appending is impossible.

    Args:
        body: The body.
        parsed: Its content.
        request: The request.
    """
    span = _span(body)
    # A key that is there twice, or written with escapes, makes this another list than the one that was read.
    if span is None or parse_json(b"[%b]" % body[slice(*span)]) != parsed[_LIST]:
        return None
    rest = body[span[1] :]
    if parse_json(b'{"%b":[%b' % (_LIST.encode(), rest))[_LIST]:  # of two equal lists the last would not grow
        return None
    return CachedRequest(span[1], _digest(body, span[1]).digest(), rest, request)


def _digest(body: bytes, end: int) -> hashlib.blake2b:
    return hashlib.blake2b(memoryview(body)[:end], digest_size=16)


def _span(body: bytes) -> tuple[int, int] | None:
    """Return where the first and behind the last message of a body, valid JSON, are; None where there is no list."""
    marks = _MARKS.finditer(body)
    depth = 0
    for mark in marks:
        if depth == 1 and mark[0] == b'"messages"' and (opening := _OPENING.match(body, mark.end())):
            break
        depth += _STEPS.get(mark[0], 0)
    else:
        return None
    begin = end = opening.end()
    depth = 0
    for mark in marks:
        depth += _STEPS.get(mark[0], 0)
        if depth == 0:  # of the list itself
            return begin, end
        if mark[0] == b"}":
            end = mark.end()
    return None
