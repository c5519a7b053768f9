"""`FinishTool`: one answer for each conversation."""

import pytest

from tests.serving import conversation
from verl_multiturn import ConfigError
from verl_multiturn.tools.finish import FinishTool


async def test_the_answer_is_recorded_and_exposed() -> None:
    tool = FinishTool({})
    assert tool.ends_conversation
    async with conversation(tool) as call:
        response, reward, metrics = await call(answer="42")
        assert (response.text, reward, metrics) == ("Submitted.", 0.0, {"answer": "42"})
        assert await tool.calc_reward("c1") == 0.0


async def test_a_second_answer_is_refused() -> None:
    tool = FinishTool({})
    async with conversation(tool) as call:
        await call(answer="42")
        with pytest.raises(ValueError, match="submitted already"):
            await call(answer="43")
    async with conversation(tool) as call:  # the same id again: a new conversation
        assert (await call(answer="43"))[2] == {"answer": "43"}
    assert not tool._answers


def test_there_is_nothing_to_set() -> None:
    with pytest.raises(ConfigError, match=r"config.reward: unknown setting"):
        FinishTool({"reward": 1})
