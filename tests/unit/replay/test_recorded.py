"""Recorded conversations without an interaction, played again: every id, mask and stop reason stays the same.

The digests were made at commit a46d0e6, before there were interactions, by this file's own `digest`.
"""

import hashlib
import json
import random
from collections import Counter
from typing import Any

from verl_multiturn import BaseTool, ConfigError, Limits, ToolResponse, ToolSchema, scripted_rollout
from verl_multiturn.runs.data import tool_call

SCHEMA = {
    "type": "function",
    "function": {
        "name": "t",
        "parameters": {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]},
    },
}
RECORDED = """
03b6ceac 4347680c e8625d58 e8625d58 0593027f 1dd89be4 38751fad 38751fad 4347680c b3d374c6 4deef06c
7995d191 3e327a30 413c70d1 5541fff1 4347680c dc6a506e 86e65747 9b83c57a 5541fff1 4347680c e8625d58
4347680c 38751fad c0a0f467 38751fad 3935c7c0 77525abc a03599a4 4347680c 38751fad 12039be4 e8625d58
a21b79ef e918890d 60d82fd6 4347680c 4347680c 86053c6f a40538b8 422f7440 4347680c 936a62e3 4347680c
80c56f0f e8625d58 fa1cf42d c1b9f940 4347680c e8625d58 260db710 38751fad c1b9f940 0cc7789b 4347680c
0cc7789b 987642e7 4347680c 4347680c 4347680c
"""
STOPS = {
    "turn_length": 20,
    "ConfigError": 12,
    "max_user_turns": 3,
    "max_assistant_turns": 4,
    "response_length": 15,
    "finished": 3,
    "max_tool_calls": 1,
    "malformed_calls": 2,
}


class Tripled(BaseTool):
    def get_schema(self) -> ToolSchema:
        return ToolSchema.read(SCHEMA, "t")

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        if parameters["x"] == "bad":
            raise OSError("no such thing")
        return ToolResponse(parameters["x"] * 3), 0.5, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return 1.0


def turn(draw: random.Random) -> str:
    """Return a generation: calls that work or fail, calls that cannot be read, or an answer."""
    if draw.random() < 0.6:
        texts = [draw.choice(["a", "bad", "<|im_end|>", "long " * 20]) for _ in range(draw.randint(1, 3))]
        return "".join(tool_call("t", {"x": text}) for text in texts)
    odd = ["done", "<tool_call>{oops</tool_call>", tool_call("nope", {}), tool_call("t", {}), "hello " * 10]
    return draw.choice(odd)


async def played(seed: int) -> list[Any]:
    """Play a conversation under limits that are drawn, too; return its view in the trainer and the records."""
    draw = random.Random(seed)
    turns = [turn(draw) for _ in range(draw.randint(1, 5))]
    limits = Limits(
        prompt_length=400,
        response_length=draw.choice([50, 200, 2000]),
        max_parallel_calls=draw.choice([1, 2, 8]),
        max_assistant_turns=draw.choice([None, 2, 3]),
        max_user_turns=draw.choice([None, 1, 3]),
        turn_length=draw.choice([None, 15, 200]),
        max_tool_calls=draw.choice([None, 2]),
        max_malformed_turns=draw.choice([None, 1, 3]),
        observation_length=draw.choice([None, 8, 30]),
    )
    try:
        outcome = await scripted_rollout([Tripled({})], turns, "What is it?", limits=limits)
    except ConfigError as error:  # the conversation ended before its script
        return ["ConfigError", str(error)[:20]]
    written = outcome.trajectory
    columns = [written.ids, written.mask, written.turn_ids, written.logprobs, written.versions]
    calls = [[call.text, str(call.status), call.reward] for call in outcome.calls]
    sources = [int(source) for source in written.sources]
    said = [outcome.messages, outcome.user_turns, outcome.calc_rewards]
    return [str(outcome.stop_reason), columns, sources, calls, said]


def digest(conversation: list[Any]) -> str:
    return hashlib.blake2b(json.dumps(conversation).encode(), digest_size=4).hexdigest()


async def test_without_an_interaction_nothing_has_changed() -> None:
    conversations = [await played(seed) for seed in range(60)]
    assert Counter(conversation[0] for conversation in conversations) == STOPS
    assert [digest(conversation) for conversation in conversations] == RECORDED.split()
