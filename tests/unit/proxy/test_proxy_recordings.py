"""Requests of eleven real agent programs, played through the server and a session: continuations, and all rows.

The model writes the turn that the next recorded request holds, so that a request that continues another in the
recording can continue it here. Ids of calls are the session's, as a program would have got them; but for a program that
gives calls ids of its own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import aiohttp
import pytest
from aiohttp.http_writer import StreamWriter

from scripts.harnesses.serving import Account, Served, serve
from tests.agent_sessions import call_text, tiny_template
from tests.harness_requests import PROGRAMS, recorded
from verl_multiturn.chat.template import Template
from verl_multiturn.proxy.protocols import PROTOCOLS
from verl_multiturn.proxy.protocols.requests import ChatRequest

LAST = "The answer is 5."


def turn_text(turn: dict[str, Any]) -> str:
    """Return a turn as the model writes it."""
    calls = [call["function"] for call in turn.get("tool_calls", ())]
    texts = [call_text(call["name"], json.loads(call["arguments"])) for call in calls]
    return "\n".join(part for part in [turn["content"], *texts] if part)


def turn_after(request: ChatRequest, later: Sequence[ChatRequest]) -> dict[str, Any]:
    """Return the turn with which a later request continues this one."""
    length = len(request.messages)
    for other in later:
        if len(other.messages) > length and other.messages[:length] == request.messages:
            turn = other.messages[length]
            if turn["role"] == "assistant":
                return turn
    return {"content": LAST}


async def ask(served: Served, path: str, body: str) -> dict[str, Any]:
    """Send a request; return its answer, or {} for a stream, which is read to its end."""
    headers = {"authorization": f"Bearer {served.key}", "content-type": "application/json"}
    async with (
        aiohttp.ClientSession() as client,
        client.post(f"{served.root}{path}", data=body, headers=headers) as answer,
    ):
        printed = await answer.text()
        assert answer.status == 200, printed
        return dict(json.loads(printed)) if answer.content_type == "application/json" else {}


async def play(name: str, template: Template, said: str | None) -> tuple[Served, Account]:
    """Send the recorded requests of a program one after the other.

    Args:
        name: Name of the recording.
        template: The model's template.
        said: The model's turn every time; None: that of the recording.
    """
    requests = recorded(name)
    read = [PROTOCOLS[path].read(body) for path, body in requests]
    turns = [turn_after(request, read[number + 1 :]) for number, request in enumerate(read)]
    left = [said or turn_text(turn) for turn in turns]
    ids: dict[str, str] = {}
    async with serve(template, lambda prompt: left.pop(0)) as served:
        for (path, body), turn in zip(requests, turns, strict=True):
            text = json.dumps(body)
            for theirs, ours in ids.items():
                text = text.replace(json.dumps(theirs), json.dumps(ours))
            await ask(served, path, text)
            made = list(served.session.forest.completions.values())[-1]
            called = [] if name in RENAMED else [call["id"] for call in turn.get("tool_calls", ())]
            ids |= dict(zip(called, [call.id for call in made.completion.calls], strict=bool(called) and said is None))
        account = await served.account()
    return served, account


# For each recording: the parent of each completion, its row, and how many roots there are.
EXPECTED: dict[str, tuple[list[int | None], list[int], int]] = {
    "agents_chat": ([None, 0, None, 2], [0, 0, 1, 1], 1),  # the same task twice, plain and streamed
    "agents_resp": ([None, 0, None, 2], [0, 0, 1, 1], 1),
    "agno_chat": ([None, 0, 1, None, 3, 4], [0, 0, 0, 1, 1, 1], 2),  # two tasks, the second one streamed
    "claude_agent": ([None, None, 0], [1, 0, 1], 2),  # the second is the sub-agent's
    "claude_code": ([None, 0], [0, 0], 1),
    "codex": ([None, 0], [0, 0], 1),
    "codex_compact": ([None, None, None], [0, 1, 2], 3),  # the second writes the summary, the third begins with it
    "langgraph": ([None, 0, None, 2], [0, 0, 1, 1], 1),
    "mini_swe": ([None], [0], 1),
    "mini_swe_text": ([None], [0], 1),
    "openai_sdk": ([None, 0, None, None, None], [0, 0, 1, 2, 3], 3),  # the third has other tools, the fifth other words
    "opencode": ([None, None, 1], [0, 1, 1], 2),  # the first asks for a title
    "opencode_agent": ([None, None, None, 1], [0, 2, 1, 2], 3),
    "pydantic_ai": ([None, 0], [0, 0], 1),
    "pydantic_anthropic": ([None, 0], [0, 0], 1),
    "qwen_code": ([None, 0], [0, 0], 1),
    "smol_code": ([None], [0], 1),
    "smol_tool": ([None, None, None, None, None], [0, 1, 2, 3, 4], 5),
}
RENAMED = ("agno_chat",)
"""Programs that number the calls of each request anew."""
REWRITTEN = {"smol_tool": call_text("add", {"a": 2, "b": 3})}
"""A program that sends the model's turns back in words of its own."""


def test_all_recordings_are_played() -> None:
    assert list(EXPECTED) == PROGRAMS


@pytest.mark.parametrize("name", EXPECTED)
async def test_a_recorded_program_has_the_documented_roots_and_rows(name: str) -> None:
    parents, rows, roots = EXPECTED[name]
    _, account = await play(name, tiny_template(), REWRITTEN.get(name))
    assert [turn.parent for turn in account.outcome.turns] == parents
    assert account.outcome.places == rows
    assert account.roots == roots
    assert account.violations == []
    assert not account.refused


@pytest.mark.parametrize(
    ("added", "parents"),
    [
        ("", [None, 0]),
        ("</code>", [None, 0]),
        ("</code>\nCalling tools:\n[{'id': 'call_1'}]", [None, None]),  # smolagents 1.26's form of it
    ],
)
async def test_what_a_code_agent_adds_to_a_turn(added: str, parents: list[int | None]) -> None:
    """The stop text may come back; with any more text it is a turn that the model did not write."""
    ((path, body),) = recorded("smol_code")
    code = "Thought: x\n<code>\nprint(1)\n"
    turn = {"role": "assistant", "content": [{"type": "text", "text": f"{code}{added}"}]}
    answer = {"role": "user", "content": [{"type": "text", "text": "Observation: 1"}]}
    async with serve(tiny_template(), lambda prompt: f"{code}</code> and more") as served:
        first = await ask(served, path, json.dumps(body))
        assert first["choices"][0]["message"]["content"] == code
        await ask(served, path, json.dumps({**body, "messages": [*body["messages"], turn, answer]}))
        account = await served.account()
    assert [turn.parent for turn in account.outcome.turns] == parents
    assert account.violations == []


async def test_the_last_event_and_the_end_of_a_stream_are_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Codex closes its connection at the last event; later bytes would reset a connection that did its work."""
    ends: list[bytes] = []
    write_eof = StreamWriter.write_eof

    async def noted(writer: StreamWriter, chunk: bytes = b"") -> None:
        ends.append(bytes(chunk))
        await write_eof(writer, chunk)

    monkeypatch.setattr(StreamWriter, "write_eof", noted)
    await play("codex", tiny_template(), None)
    assert [end.count(b"event: response.completed\n") for end in ends if b"event:" in end] == [1, 1]


@pytest.mark.stack
async def test_qwen3_has_the_same_roots_and_rows() -> None:
    """Claude Code and Codex send system messages in the middle, which its template writes where they are."""
    from tests.support.template_play import template_of

    for name, (parents, rows, roots) in EXPECTED.items():
        _, account = await play(name, template_of("qwen3"), REWRITTEN.get(name))
        seen = (
            [turn.parent for turn in account.outcome.turns],
            account.outcome.places,
            account.roots,
            account.violations,
        )
        assert (name, *seen) == (name, parents, rows, roots, [])
