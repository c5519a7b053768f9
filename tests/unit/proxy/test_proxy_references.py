"""Items of earlier answers that a client of the Responses API names by their ids, as Vercel's AI SDK does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import aiohttp
import pytest

from scripts.harnesses.serving import Served, serve
from tests.agent_sessions import call_text, tiny_template

TOOLS = [
    {"type": "function", "name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}},
    {"type": "custom", "name": "shell", "description": "Run."},
]
SAID = f"<think>\nHm.\n</think>\n\nI look.\n{call_text('add', {'a': 1})}\n{call_text('shell', {'input': 'ls'})}"
USER = {"role": "user", "content": "Look."}


def says(*turns: str) -> Callable[[str], str]:
    """Return a policy that writes the texts in order."""
    left = list(turns)
    return lambda prompt: left.pop(0)


async def ask(served: Served, items: Sequence[Any]) -> dict[str, Any]:
    """Return the answer to a request, or its error, with its status."""
    headers = {"authorization": f"Bearer {served.key}"}
    body = {"model": "policy", "input": list(items), "tools": TOOLS}
    async with (
        aiohttp.ClientSession() as client,
        client.post(f"{served.root}/v1/responses", json=body, headers=headers) as answer,
    ):
        return {**await answer.json(), "http": answer.status}


def references(response: dict[str, Any]) -> list[dict[str, str]]:
    """Return references to the items of an answer."""
    return [{"type": "item_reference", "id": item["id"]} for item in response["output"]]


def outputs(response: dict[str, Any]) -> list[dict[str, str]]:
    """Return the outputs of the tools that an answer calls."""
    calls = [item for item in response["output"] if item["type"].endswith("_call")]
    return [{"type": f"{call['type']}_output", "call_id": call["call_id"], "output": "5"} for call in calls]


async def test_references_are_the_items_that_they_name() -> None:
    async with serve(tiny_template(), says(SAID, "It is 5.", "Yes.")) as served:
        first = await ask(served, [USER])
        kinds = [item["type"] for item in first["output"]]
        assert kinds == ["reasoning", "message", "function_call", "custom_tool_call"]
        history = [USER, *references(first), *outputs(first)]
        second = await ask(served, history)
        third = await ask(served, [*history, *references(second), {"role": "user", "content": "Really?"}])
        assert [each["http"] for each in (first, second, third)] == [200] * 3
        account = await served.account()
    assert [turn.parent for turn in account.outcome.turns] == [None, 0, 1]
    assert (account.roots, account.violations, list(account.refused)) == (1, [], [])


async def test_an_item_in_another_place_is_shown_there() -> None:
    async with serve(tiny_template(), says("First.", "Second.", "Third.")) as served:
        first = await ask(served, [USER])
        await ask(served, [{"role": "user", "content": "Other."}, *references(first), USER])
        account = await served.account()
    assert [turn.parent for turn in account.outcome.turns] == [None, None]
    assert "<|im_start|>assistant\nFirst.<|im_end|>" in served.turns[1].prompt


@pytest.mark.parametrize("prefix", ["msg_", "fc_", "rs_", "ctc_", ""])
async def test_an_id_that_names_no_item_of_the_session_is_refused(prefix: str) -> None:
    async with serve(tiny_template(), says(SAID, "no")) as other, serve(tiny_template(), says(SAID, "a")) as served:
        theirs, ours = await ask(other, [USER]), await ask(served, [USER])
        foreign = next(item["id"] for item in theirs["output"] if item["id"].startswith(prefix))
        own = ours["output"][2]["id"].partition("_")[2]
        wrong = {"msg_": f"msg_{own}", "ctc_": f"ctc_{ours['output'][1]['id'].partition('_')[2]}"}
        for name in (foreign, wrong.get(prefix, f"{prefix}unknown")):
            refused = await ask(served, [USER, {"type": "item_reference", "id": name}, USER])
            assert refused["http"] == 400
            assert f"input[1].id: got {name!r}, expected the id of an item that this session" in str(refused["error"])
        account = await served.account()
    assert [turn.parent for turn in account.outcome.turns] == [None]


async def test_an_item_is_named_once() -> None:
    """A long answer that is named a thousand times would be a prompt of a thousand times its length."""
    async with serve(tiny_template(), says("First.", "Second.")) as served:
        (reference,) = references(await ask(served, [USER]))
        refused = await ask(served, [USER, reference, reference, USER])
    assert (refused["http"], "each at most once" in str(refused["error"])) == (400, True)
