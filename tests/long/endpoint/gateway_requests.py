"""The hostile requests of `benchmarks.endpoint_attacks` to the routes that a gateway alone has.

`FRESH` are for a session that was asked nothing, `ASKED` for one with a completion. `{other}` is the id of another
session in the first, and that of another session's completion in the second.
"""

from __future__ import annotations

import gzip
from collections.abc import Sequence

from tests.long.endpoint.endpoint_requests import HostileRequest, http, joined, raw
from tests.support.gateway_process import ADMIN

START, REWARD, END = "/rl/start_session", "/rl/set_reward", "/rl/end_session"
_TASK, _GOOD = {"task_id": "t"}, {"reward": 0.5}
_LONG = "a" * 501
_HEAD = b"POST /rl/set_reward HTTP/1.1\r\nhost: h\r\nauthorization: Bearer {key}\r\n"

_STARTS = [
    ("a start without a key", http(_TASK, START, key=None), (401,)),
    ("a start with a session's key", http(_TASK, START), (401,)),
    ("a start with the admin's key in the query", http(_TASK, f"{START}?key={ADMIN}", key=None), (401,)),
    ("a start with the admin's key as another scheme", http(_TASK, START, f"authorization: Basic {ADMIN}", key=None),
     (401,)),
    ("a start with the admin's key and a letter", http(_TASK, START, key=ADMIN + "A"), (401,)),
    ("a start of nothing", http(b"", START, key=ADMIN), (400,)),
    ("a start of half an object", http(b'{"task_id": ', START, key=ADMIN), (400,)),
    ("a start of a list", http([], START, key=ADMIN), (400,)),
    ("a start of bad UTF-8", http(b'{"task_id": "\xff"}', START, key=ADMIN), (400,)),
    ("a start of half a surrogate pair", http(b'{"task_id": "\\ud800"}', START, key=ADMIN), (400,)),
    ("a start of NaN", http(b'{"task_id": "t", "row": {"a": NaN}}', START, key=ADMIN), (400,)),
    ("a start of 5,000 levels", http(b'{"row": ' + b"[" * 5000 + b"]" * 5000 + b"}", START, key=ADMIN), (400,)),
    ("a start of 1.1 MB", http({**_TASK, "row": {"a": "a" * 1_100_000}}, START, key=ADMIN), (413,)),
    ("a task that is a number", http({"task_id": 7}, START, key=ADMIN), (400,)),
    ("a task without a name", http({"task_id": ""}, START, key=ADMIN), (400,)),
    ("a task of 501 letters", http({"task_id": _LONG}, START, key=ADMIN), (400,)),
    ("a user that is an object", http({**_TASK, "user": {}}, START, key=ADMIN), (400,)),
    ("a row that is a list", http({**_TASK, "row": []}, START, key=ADMIN), (400,)),
    ("GET of a start", http(b"", START, method="GET", key=ADMIN), (405,)),
]  # fmt: skip
_PAGES = [
    ("figures without a key", http(b"", "/rl/stats", method="GET", key=None), (401,)),
    ("figures with a session's key", http(b"", "/rl/stats", method="GET"), (401,)),
    ("POST of the figures", http(b"", "/rl/stats", key=ADMIN), (405,)),
    ("new weights with a session's key", http({"path": "/tmp", "hash": "a"}, "/rl/deploy"), (401,)),
    ("new weights without a key", http({"path": "/tmp", "hash": "a"}, "/rl/deploy", key=None), (401,)),
    ("new weights where nobody swaps", http({"path": "/tmp", "hash": "a"}, "/rl/deploy", key=ADMIN), (409,)),
    ("POST of the health", http(b"", "/health"), (405,)),
    ("DELETE of the metrics", http(b"", "/metrics", method="DELETE"), (405,)),
    ("an unknown route", http(_GOOD, "/rl/none"), (404,)),
    ("a route below a reward", http(_GOOD, f"{REWARD}/1"), (404,)),
    ("the key in the path of a reward", http(_GOOD, f"/s/{{key}}{REWARD}", key=None), (404,)),
    ("a completion with the admin's key", http(key=ADMIN), (401,)),
]
FRESH: Sequence[HostileRequest] = [
    HostileRequest(*each)
    for each in (
        *_STARTS,
        *_PAGES,
        ("a reward before the first completion", http(_GOOD, REWARD), (409,)),
        ("a reward in another session's name", http(b'{"reward": 0.5, "session_id": "{other}"}', REWARD), (403,)),
        ("an end in another session's name", http(b'{"session_id": "{other}"}', END), (403,)),
        ("an end in the name of a number", http(b'{"session_id": 7}', END), (400,)),
    )
]
ASKED: Sequence[HostileRequest] = [
    HostileRequest(*each)
    for each in (
        ("a reward without a key", http(_GOOD, REWARD, key=None), (401,)),
        ("a reward with a wrong key", http(_GOOD, REWARD, key="wrong"), (401,)),
        ("a reward with the key cut short", lambda target: http(_GOOD, REWARD, key=target.key[:-1])(target), (401,)),
        ("a reward of nothing", http(b"", REWARD), (400,)),
        ("a reward of NaN", http(b'{"reward": NaN}', REWARD), (400,)),
        ("a reward of infinity", http(b'{"reward": 1e999}', REWARD), (400,)),
        ("a reward of 400 digits", http(b'{"reward": 1' + b"0" * 400 + b"}", REWARD), (400,)),
        ("a reward that is true", http({"reward": True}, REWARD), (400,)),
        ("a reward that is a text", http({"reward": "1"}, REWARD), (400,)),
        ("a reward that is null", http({"reward": None}, REWARD), (400,)),
        ("a reward that is a list", http({"reward": [1]}, REWARD), (400,)),
        ("a reward below the range", http({"reward": -0.001}, REWARD), (422,)),
        ("a reward above the range", http({"reward": 1.001}, REWARD), (422,)),
        ("a reward of an unknown completion", http({**_GOOD, "interaction_id": "chatcmpl-none"}, REWARD), (404,)),
        ("a reward of another session's completion",
         http(b'{"reward": 0.5, "interaction_id": "{other}"}', REWARD), (404,)),
        ("a reward of a completion that is a number", http({**_GOOD, "interaction_id": 7}, REWARD), (400,)),
        ("a reward of a completion without a name", http({**_GOOD, "interaction_id": ""}, REWARD), (400,)),
        ("a reward whose id is a number", http({**_GOOD, "id": 7}, REWARD), (400,)),
        ("a reward whose id has 501 letters", http({**_GOOD, "id": _LONG}, REWARD), (400,)),
        ("the admin's reward of no session", http(_GOOD, REWARD, key=ADMIN), (400,)),
        ("the admin's reward of an unknown session", http({**_GOOD, "session_id": "s-no"}, REWARD, key=ADMIN), (404,)),
        ("the admin's end of an unknown session", http({"session_id": "s-no"}, END, key=ADMIN), (404,)),
        ("GET of a reward", http(b"", REWARD, method="GET"), (405,)),
        ("a reward that says gzip and is none", http(_GOOD, REWARD, "content-encoding: gzip"), (400,)),
        ("a reward of a bomb of gzip",
         http(gzip.compress(b'{"a": "' + b" " * 20_000_000), REWARD, "content-encoding: gzip"), (413,)),
        ("a reward in a chunk of negative size",
         http(b"-5\r\nhello\r\n0\r\n\r\n", REWARD, "transfer-encoding: chunked", framed=False), (400,)),
        ("a reward of negative length", raw(_HEAD + b"content-length: -1\r\n\r\n"), (400,)),
        ("a reward of 9 GB", raw(_HEAD + b"content-length: 9000000000\r\n\r\n"), (413,)),
        ("a reward whose body never comes", raw(_HEAD + b"content-length: 90\r\n\r\n{"), (408,)),
        ("a reward twice, and its id with another value",
         joined(*(http({"reward": value, "id": "a"}, REWARD) for value in (0.5, 0.5, 0.25))), (200, 200, 409)),
        ("a reward with the key as Anthropic's", http(_GOOD, REWARD, "x-api-key: {key}", key=None), (200,)),
        ("a reward with a slash behind it", http(_GOOD, f"{REWARD}/"), (200,)),
    )
]  # fmt: skip
ENDED: Sequence[HostileRequest] = [
    HostileRequest(*each)
    for each in (
        ("an end twice", joined(http(b"", END), http(b"{}", END)), (200, 200)),
        ("a completion after the end", http(), (410,)),
        ("a reward after the end, of another session's completion",
         http(b'{"reward": 0.5, "interaction_id": "{other}"}', REWARD), (404,)),
        ("a reward after the end", http(_GOOD, REWARD), (200,)),
    )
]  # fmt: skip
