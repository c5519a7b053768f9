"""The chat of `scripted_rollout` equals the one that verl and transformers make from the same folder."""

from typing import Any

import pytest

from tests.conftest import ROOT
from verl_multiturn import scripted_rollout
from verl_multiturn.rollout.trajectory import Source
from verl_multiturn.runs.data import tool_call
from verl_multiturn.tools.loading.functions import function_tool
from verl_multiturn.tools.loading.registry import schema_of
from verl_multiturn.verl_bridge.model.chat_setup import make_chat

pytestmark = pytest.mark.stack
SYSTEM = {"role": "system", "content": [{"type": "text", "text": "Be short."}]}
PROMPTS: list[Any] = ["What is ü?", [SYSTEM, {"role": "user", "content": "What is ü?"}]]


def lookup(key: str) -> str:
    """Look a key up."""
    return f"{key} is 1"


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("tools", [[], [lookup]])
async def test_the_tokens_are_those_of_verls_builder(prompt: Any, tools: list[Any]) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(ROOT / "verl_multiturn" / "rollout" / "tiny_chat")
    codec = make_chat(tokenizer, None).codec
    schemas = [schema_of(function_tool(tool)).as_dict() for tool in tools]
    turns = [f"Let me see.\n{tool_call('lookup', {'key': 'ü'})}", "It is 1."]
    outcome = await scripted_rollout(tools, turns, prompt)
    written = outcome.trajectory
    ids = codec.initial(codec.trusted(outcome.messages[: outcome.asked]), schemas)
    assert written.ids[: written.prompt_length] == ids
    said = outcome.messages[outcome.asked + 1 : outcome.asked + 2]
    assert said[0]["role"] == "tool"
    first = [i for i, turn in zip(written.ids, written.turn_ids, strict=True) if turn == 0]
    added = codec.observation(outcome.messages[: outcome.asked + 1], said, first, schemas)
    context = {source: [] for source in Source}
    for index, source in zip(written.ids, written.sources, strict=True):
        context[source].append(index)
    assert context[Source.TEMPLATE] == added.separator
    assert context[Source.OBSERVATION] + context[Source.INJECTED] == added.observation
    assert outcome.differences == []
