"""A request that appends to an earlier one is read as if it were read whole."""

import json
from typing import Any

import orjson
from hypothesis import given, settings
from hypothesis import strategies as st

from verl_multiturn.proxy.http.histories import Histories, cached_from
from verl_multiturn.proxy.http.parsing import parse_body
from verl_multiturn.proxy.protocols import PROTOCOLS
from verl_multiturn.proxy.protocols.requests import ChatRequest, RefusedError

CHAT = PROTOCOLS["/v1/chat/completions"]
TEXTS = st.sampled_from(
    ["", "a", '"', "\\", '","messages":[', '}],"x":[{', "]}", "[{", "é😀", "\ud800", "messages", '"messages": [']
)
CALL = st.builds(
    lambda name, text: {"id": "a", "type": "function", "function": {"name": name, "arguments": json.dumps([text])}},
    st.sampled_from(["f", "messages"]),
    TEXTS,
)
MESSAGE = st.one_of(
    st.builds(lambda text: {"role": "user", "content": text}, TEXTS),
    st.builds(lambda text: {"role": "user", "content": [{"type": "text", "text": text}]}, TEXTS),
    st.builds(lambda calls: {"role": "assistant", "content": None, "tool_calls": calls}, st.lists(CALL, max_size=2)),
    st.just({"role": "tool", "tool_call_id": "a", "content": "5"}),
    st.just({"role": "nobody", "content": "x"}),
)
FIELDS = st.lists(
    st.sampled_from(
        [
            ("model", "m"),
            ("stop", ["messages", "]"]),
            ("tools", [{"type": "function", "function": {"name": "f", "parameters": {"messages": [{}]}}}]),
            ("metadata", {"messages": [{"role": "user", "content": "other"}], "a": "]}"}),
        ]
    ),
    max_size=4,
    unique_by=lambda field: field[0],
)


def whole(body: bytes) -> ChatRequest | None:
    try:
        return CHAT.read(parse_body(body))
    except RefusedError:
        return None


def known_after(body: bytes) -> Histories:
    histories = Histories()
    if whole(body) is not None and (cached := cached_from(body, orjson.loads(body), whole(body))) is not None:  # type: ignore[arg-type]
        histories.add(cached)
    return histories


@settings(deadline=None)
@given(st.lists(MESSAGE, min_size=1, max_size=3), st.lists(MESSAGE, max_size=3), FIELDS, FIELDS, st.booleans())
def test_a_continued_request_equals_the_whole_one(
    first: list[Any], added: list[Any], before: list[Any], after: list[Any], compact: bool
) -> None:
    def body(messages: list[Any]) -> bytes:
        fields = dict([*before, ("messages", messages), *after])
        return json.dumps(fields, separators=(",", ":") if compact else None).encode()

    histories = known_after(body(first).replace(b"\\ud800", b"\\ufffd"))
    again = body([*first, *added]).replace(b"\\ud800", b"\\ufffd")
    continued = histories.continued(CHAT, again)
    assert continued in (None, whole(again))
    if added and whole(again) is not None:
        assert continued is not None
        more = body([*first, *added, {"role": "user", "content": "more"}]).replace(b"\\ud800", b"\\ufffd")
        assert histories.continued(CHAT, more) == whole(more) is not None


BODY = b'{"model": "m", "messages": [{"role": "user", "content": "a"}], "n": 1}'


@settings(deadline=None)
@given(st.binary(max_size=12), st.integers(0, len(BODY)), st.integers(0, len(BODY)))
def test_any_other_body_is_read_whole(piece: bytes, at: int, to: int) -> None:
    changed = BODY[:at] + piece + BODY[to:]
    assert known_after(BODY).continued(CHAT, changed) in (None, whole(changed))


HOSTILE = [
    b'{"model": "m", "messages": [{"role": "user", "content": "a"},{"role": "user", "content": "b"}], "n": 1}',
    b'{"model": "m", "messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}] , "n": 1}',
    b'{"model": "m", "messages": [{"role": "user", "content": "a"},], "n": 1}',
    b'{"model": "m", "messages": [{"role": "user", "content": "a"},{"role": "user", "content": "b"}],'
    b'"messages": [{"role": "user", "content": "c"}], "n": 1}',
    b'{"model": "m", "messages": [{"role": "user", "content": "a"},{"role": "user", "content": "b"}], "n": 2}',
]


def test_only_appended_messages_count_as_a_continuation() -> None:
    assert [known_after(BODY).continued(CHAT, body) is not None for body in HOSTILE] == [
        True,
        False,
        False,
        False,
        False,
    ]
    texts = [message["content"] for message in known_after(BODY).continued(CHAT, HOSTILE[0]).messages]  # type: ignore[union-attr]
    assert texts == ["a", "b"]


def test_a_list_that_is_there_twice_or_in_disguise_is_not_continued() -> None:
    user = b'{"role": "user", "content": "%b"}'
    for body in (
        b'{"messages": [' + user % b"a" + b'], "messages": [' + user % b"b" + b"]}",
        b'{"messages": [' + user % b"a" + b'], "\\u006dessages": [' + user % b"b" + b"]}",
        b'{"\\u006dessages": [' + user % b"a" + b"]}",
    ):
        assert whole(body) is not None
        assert cached_from(body, orjson.loads(body), whole(body)) is None  # type: ignore[arg-type]


def test_branches_take_turns_and_the_oldest_is_forgotten() -> None:
    def body(*texts: str) -> bytes:
        return json.dumps({"messages": [{"role": "user", "content": text} for text in texts]}).encode()

    histories = Histories()
    for number in range(9):
        text = body(str(number))
        histories.add(cached_from(text, orjson.loads(text), CHAT.read(orjson.loads(text))))  # type: ignore[arg-type]
    found = [histories.continued(CHAT, body(str(number), "x")) is not None for number in range(9)]
    assert found == [False] + [True] * 8
    assert histories.continued(CHAT, body("3", "x", "y")) == whole(body("3", "x", "y"))
    assert histories.continued(CHAT, body("3", "y")) is None  # its continuation took its place
