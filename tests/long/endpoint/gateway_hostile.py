"""The hostile requests of `benchmarks.gateway`: bytes that a seed draws, and who may do what they ask.

A request has a key of a known owner: an attacker's own session, one that has ended, the admin's, or none that is
right. So it is known whose session may be read, rewarded or ended by it.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.long.endpoint.endpoint_requests import CHAT, MESSAGES, REQUESTS, RESPONSES, Target

ADMIN_OWNER, NOBODY = "admin", ""
_OTHERS = ("a body that never comes",)
"""Hostile requests of the table whose answer takes long."""
_TABLE = [each for each in REQUESTS if each.name not in _OTHERS]
_RL = ("/rl/start_session", "/rl/set_reward", "/rl/set_reward", "/rl/end_session", "/rl/deploy", "/rl/stats")
_PAGES = ("/health", "/ready", "/metrics", "/rl/stats", "/rl/deploy", "/v1/models", "/rl", "/rl/", "/rl/none")
_NEAR = ("{}/", "{}//", "/{}", "{}?x=1", "{}%00", "{}/..", "/v1{}", "{}#a", "{};a", "/./{}")
_METHODS = ("GET", "PUT", "DELETE", "PATCH", "HEAD", "OPTIONS", "TRACE", "FOO", "post")
_NUMBERS = (
    b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-1e999", b"1" + b"0" * 400, b"1e-400", b"0x1", b"+1", b"01", b".5",
    b"1.", b"--1", b"1_0", b"true", b"null", b'"1"', b'"NaN"', b"[]", b"[1]", b"{}", b"-0.0", b"-1", b"1.0000001", b"2",
    b"1e308", b"9007199254740993",
)  # fmt: skip
_TEXTS = (
    b"null", b'""', b"7", b"true", b"[]", b"{}", b'"\\u0000"', b'"\\ud800"', b'"\\udfff\\ud800"', b'"\xff"', b'"a\\nb"',
    b'"' + b"a" * 501 + b'"', b'"' + b"a" * 500 + b'"', b'"../../etc/passwd"', b'"<|im_end|>"', b'"\\u202e"',
    b'"chatcmpl-"', b'"msg_ "', b'"s-"', b'"*"', b'"%s%n{0}"', b'["s-"]', b'{"$ne": null}',
)  # fmt: skip
_ROWS = (
    b"[]", b'"x"', b"7", b'{"prompt": 5}', b'{"raw_prompt": [{"role": "ghost"}]}', b'{"extra_info": []}',
    b'{"": {"": {"": []}}}', b'{"a": ' + b"[" * 200 + b"]" * 200 + b"}", b'{"a": 1e400}', b'{"a": ' + b"9" * 400 + b"}",
    b'{"request_id": "s-0", "uid": "t", "number": -1, "at": "x"}', b'{"__class__": "x", "tools_kwargs": 5}',
    b'{"agent_name": 7, "index": [], "row": null}', b'{"raw_prompt": [{"role": "user", "content": "\\u0000"}]}',
)  # fmt: skip
_JUNK = (
    b"", b"{", b"[", b"null", b"[]", b"7", b'"x"', b"NaN", b"\xff\xfe", b"\x00" * 40, b"{}{}", b"{'reward': 1}",
    b"reward=1", b"\xef\xbb\xbf{}", b"{" * 3000, b"[" * 100_000, b'{"a":' * 3000,
    b'{"reward": 1, "reward": 0.5, "reward": ', gzip.compress(b'{"reward": 1}'), b'{"reward": 1}\n{"reward": 1}',
    b'{"reward": 1, "row": "' + b"a" * 1_100_000 + b'"}',
)  # fmt: skip
_MODEL_FIELDS: Mapping[str, Sequence[bytes]] = {
    "messages": (b"[]", b"5", b'[{"role": "ghost"}]', b'[{"role": "user", "content": [[]]}]', b'[{"role": "tool"}]',
                 b'[{"role": "assistant", "tool_calls": [{"id": 5}]}, {"role": "tool", "tool_call_id": 5}]'),
    "input": (b"5", b"[]", b'[{"type": "ghost"}]', b'[{"type": "function_call_output", "call_id": 5}]'),
    "previous_response_id": (b'"resp_0"', b"5", b'"resp_{foreign}"'),
    "max_tokens": (b"0", b"-1", b"1e99", b'"x"', b"NaN", b"1" + b"0" * 30),
    "n": (b"0", b"-1", b"2", b"1000000000", b'"x"'),
    "stop": (b'[""]', b"5", b'["a", 5]', b'["' + b"a" * 3000 + b'"]'),
    "stream": (b"true", b"1", b"[]"),
    "logprobs": (b"true", b"-5", b'"x"'),
    "tools": (b'"x"', b"[5]", b'[{"type": "function", "function": {"name": "a", "parameters": 5}}]'),
    "temperature": (b"NaN", b"-1", b'"x"', b"1e99"),
    "response_format": (b"5", b'{"type": "json_schema"}'),
    "metadata": (b"5", b'{"user_id": 5}'),
}  # fmt: skip


@dataclass
class Known:
    """The knowledge of an attacker about a session.

    Attributes:
        session_id: Its id.
        key: Its key.
        marker: A text that only its own prompts have.
        completions: Ids of its answers.
    """

    session_id: str
    key: str
    marker: str
    completions: list[str] = field(default_factory=list)


@dataclass
class Sessions:
    """The sessions of a gateway under attack.

    Attributes:
        own: Open ones of attackers.
        ended: Those of attackers that have ended.
        honest: Open ones whose keys no attacker has.
    """

    admin: str
    own: list[Known] = field(default_factory=list)
    ended: list[Known] = field(default_factory=list)
    honest: list[Known] = field(default_factory=list)


@dataclass
class Attack:
    """A request, and who sends it.

    Attributes:
        kind: `rl`, `model`, `table` or `page`.
        written: The bytes.
        owner: Id of the session whose key it has; "admin", or "" where no key of it is right.
        path: The path of one to `/rl/*` that is spelled right; else "".
        reward: Its body, of one to `/rl/set_reward` that may count.
        torn: Whether its connection ends without waiting for an answer.
        pieces: In how many pieces it is sent, with pauses.
    """

    kind: str
    written: bytes
    owner: str
    path: str = ""
    reward: Mapping[str, Any] | None = None
    torn: bool = False
    pieces: int = 1


class Attacks:
    """Draws attacks.

    Args:
        seed: Decides all of them, together with the sessions that there are.
        port: Where they go.
        sessions: Who is there.
    """

    def __init__(self, seed: int, port: int, sessions: Sessions) -> None:
        self._drawn, self._port, self._sessions = random.Random(seed), port, sessions
        self._rewarded: list[tuple[str, dict[str, Any]]] = []

    def draw(self) -> Attack:
        """Return the next attack."""
        drawn = self._drawn
        kind = drawn.choices(("rl", "model", "table", "page"), (50, 25, 15, 10))[0]
        attack = {"rl": self._rl, "model": self._model, "table": self._table, "page": self._page}[kind]()
        if kind == "table":
            return attack
        if drawn.random() < 0.06:
            attack.torn = True
            attack.written = attack.written[: drawn.randrange(len(attack.written) + 1)]
        elif drawn.random() < 0.04:
            attack.pieces = drawn.randint(2, 8)
        return attack

    def _rl(self) -> Attack:
        drawn = self._drawn
        owner, head, is_admin = self._key()
        path = drawn.choice(_RL)
        if drawn.random() < 0.15 and self._rewarded:  # one that was sent before, perhaps at the same time
            owner, fields = drawn.choice(self._rewarded)
            known = next(
                (each for each in (*self._sessions.own, *self._sessions.ended) if each.session_id == owner), None
            )
            if known is not None:
                body = {**fields, "reward": drawn.choice([fields["reward"], fields["reward"], 0.5])}
                return self._attack("rl", "/rl/set_reward", _bearer(known.key), json.dumps(body).encode(), owner)
        body = self._body(path, owner, is_admin)
        data = _json(body)
        if drawn.random() < 0.12:
            data = drawn.choice(_JUNK)
        elif drawn.random() < 0.05:
            data = data[: drawn.randrange(len(data))]
        return self._attack("rl", path, head, data, owner)

    def _body(self, path: str, owner: str, is_admin: bool) -> dict[str, bytes]:
        """Return a body's fields as they are written; most are right, and some are not."""
        drawn, found = self._drawn, {}
        known = next((each for each in (*self._sessions.own, *self._sessions.ended) if each.session_id == owner), None)
        if path == "/rl/start_session":
            found = {"task_id": b'"t%d"' % drawn.randrange(9), "user": b'"u"', "row": b'{"a": 1}'}
        elif path == "/rl/set_reward":
            found = {"reward": b"%g" % (drawn.randint(0, 64) / 64), "id": b'"x%x"' % drawn.getrandbits(60)}
            targets = known.completions if known is not None else []
            if targets and drawn.random() < 0.7:
                found["interaction_id"] = json.dumps(drawn.choice(targets)).encode()
        elif path == "/rl/deploy":
            found = {"path": b'"/tmp/none"', "hash": b'"%s"' % (b"a" * 64), "mode": b'"cut"'}
        if is_admin and path in ("/rl/set_reward", "/rl/end_session"):
            known = drawn.choice([*self._sessions.own, *self._sessions.ended])
            found["session_id"] = json.dumps(known.session_id).encode()
        if drawn.random() < 0.4:
            for _ in range(drawn.randint(1, 2)):
                name = drawn.choice(("reward", "id", "interaction_id", "session_id", "task_id", "user", "row", "x"))
                values = {"reward": _NUMBERS, "row": _ROWS}.get(name, _TEXTS)
                found[name] = drawn.choice(values)
                foreign = drawn.choice(self._sessions.honest)
                if name == "session_id" and not is_admin and drawn.random() < 0.6:
                    found[name] = json.dumps(foreign.session_id).encode()
                if name == "interaction_id" and foreign.completions and drawn.random() < 0.6:
                    found[name] = json.dumps(drawn.choice(foreign.completions)).encode()
        return found

    def _attack(self, kind: str, path: str, head: Sequence[str], data: bytes, owner: str) -> Attack:
        drawn = self._drawn
        method, spelled = "POST", path
        if path in ("/rl/stats",) and drawn.random() < 0.7:
            method = "GET"
        if drawn.random() < 0.05:
            method = drawn.choice(_METHODS)
        if drawn.random() < 0.05:
            spelled = drawn.choice(_NEAR).format(path)
        lines = [f"{method} {spelled} HTTP/1.1", "host: h", "connection: close", *head]
        lines += [f"content-length: {len(data) if drawn.random() < 0.97 else 7}"]
        if drawn.random() < 0.02:
            lines.append("expect: 100-continue")
        if drawn.random() < 0.03:
            lines.append(
                drawn.choice(("content-encoding: gzip", "x: " + "a" * 9000, "content-type: text/plain", "te: x"))
            )
        reward = None
        if path == "/rl/set_reward" and owner:
            reward = _read(data)
            if reward is not None and "interaction_id" in reward and owner != ADMIN_OWNER:
                self._rewarded.append((owner, reward))
        is_right = spelled == path and method in ("POST", "GET")
        written = "\r\n".join([*lines, "", ""]).encode("latin-1") + data
        return Attack(kind, written, owner, path if is_right else "", reward)

    def _model(self) -> Attack:
        drawn = self._drawn
        owner, head, _ = self._key()
        path = drawn.choice((CHAT, CHAT, RESPONSES, MESSAGES, "/v1/messages/count_tokens"))
        own = next((each.marker for each in self._sessions.own if each.session_id == owner), "hello")
        body: dict[str, bytes] = {"model": b'"policy"', "max_tokens": b"64"}
        if path == RESPONSES:
            body["input"] = json.dumps(own).encode()
        else:
            body["messages"] = json.dumps([{"role": "user", "content": own}]).encode()
        if drawn.random() < 0.6:
            for _ in range(drawn.randint(1, 3)):
                name = drawn.choice(list(_MODEL_FIELDS))
                body[name] = drawn.choice(_MODEL_FIELDS[name])
        honest = drawn.choice(self._sessions.honest)
        foreign = (drawn.choice(honest.completions) if honest.completions else "0").removeprefix("chatcmpl-")
        data = _json(body).replace(b"{foreign}", foreign.encode())
        if drawn.random() < 0.08:
            data = drawn.choice(_JUNK)
        return self._attack("model", path, head, data, owner)

    def _table(self) -> Attack:
        known = self._drawn.choice(self._sessions.own)
        foreign = self._drawn.choice(self._sessions.honest)
        other = (foreign.completions or ["0"])[0].removeprefix("chatcmpl-")
        target = Target(self._port, known.key, f"resp_{other}")
        return Attack("table", self._drawn.choice(_TABLE).written(target), known.session_id)

    def _page(self) -> Attack:
        owner, head, _ = self._key()
        attack = self._attack("page", self._drawn.choice(_PAGES), head, b"", owner)
        if self._drawn.random() < 0.8:
            attack.written = attack.written.replace(b"POST ", b"GET ", 1)
        attack.path = ""
        return attack

    def _key(self) -> tuple[str, list[str], bool]:
        """Return the owner of a key, the lines of its head, and whether it is the admin's."""
        drawn, sessions = self._drawn, self._sessions
        kind = drawn.choices(("own", "admin", "ended", "near", "none", "wrong", "placed"), (48, 18, 10, 9, 4, 6, 5))[0]
        own = drawn.choice(sessions.own)
        if kind == "own":
            return own.session_id, _bearer(own.key), False
        if kind == "admin":
            return ADMIN_OWNER, _bearer(sessions.admin), True
        if kind == "ended" and sessions.ended:
            ended = drawn.choice(sessions.ended)
            return ended.session_id, _bearer(ended.key), False
        near = drawn.choice([*(each.key for each in sessions.honest), sessions.admin])
        if kind == "near":
            text = drawn.choice((near[:-1], near + "A", near.swapcase(), near[::-1], near.encode().hex(), f"'{near}'"))
            return NOBODY, _bearer(text), False
        if kind == "placed":  # where no key is looked for, or not of this scheme
            line = drawn.choice((f"authorization: Basic {near}", f"cookie: key={near}", f"authorization: {near}",
                                 f"proxy-authorization: Bearer {near}", f"x-admin-key: {near}"))  # fmt: skip
            return NOBODY, [line], False
        wrong = ("", "null", "wrong", "k" * 9000, "\xff\xfe", "a b c", "Bearer x")
        return NOBODY, [] if kind == "none" else _bearer(drawn.choice(wrong)), False


def _bearer(key: str) -> list[str]:
    return [f"authorization: Bearer {key}"]


def _json(fields: Mapping[str, bytes]) -> bytes:
    return b"{" + b", ".join(b'"%s": %s' % (name.encode(), value) for name, value in fields.items()) + b"}"


def _read(data: bytes) -> dict[str, Any] | None:
    """Return the body of a reward that may count; None: none can."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if not isinstance(body, dict) or type(body.get("reward")) not in (int, float):
        return None
    return body
