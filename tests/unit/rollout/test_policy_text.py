"""The model as an interaction may use it: only the text counts, since its tokens are never trained."""

import math

import pytest

from tests.conftest import CharBuilder, CharTokenizer
from verl_multiturn import Ask, EngineError, Generation
from verl_multiturn.chat.codec import ChatCodec
from verl_multiturn.chat.parsing.json_calls import JsonParser
from verl_multiturn.rollout.engines.policy_text import PolicyText


class Engine:
    def __init__(self, generation: Generation) -> None:
        self.generation = generation

    async def generate(self, ask: Ask) -> Generation:
        return self.generation


async def write(generation: Generation) -> str:
    parser = JsonParser(CharTokenizer(), [CharTokenizer().eos_token_id])
    writer = PolicyText(Engine(generation), ChatCodec(CharBuilder()), parser, [])
    return await writer.write([{"role": "user", "content": "Hi"}], 2, {})


@pytest.mark.parametrize("logprob", [math.nan, -math.inf, 1e-7])
async def test_any_log_probability_will_do(logprob: float) -> None:
    ids = CharTokenizer().turn("yes")
    assert await write(Generation(ids, [logprob] * len(ids), [0] * len(ids), "stop")) == "yes"


@pytest.mark.parametrize("generation", [Generation([], [], [], "stop"), Generation([7], [0.0], [0], "abort")])
async def test_no_turn_is_an_error(generation: Generation) -> None:
    with pytest.raises(EngineError, match="the engine returned no turn"):
        await write(generation)
