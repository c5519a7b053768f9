"""Tests of the tool, the rows and the reward, without a model: `python -m pytest recipes/NAME`."""

import asyncio
from pathlib import Path

from recipes.NAME.prepare_data import rows
from recipes.NAME.reward import compute_score

from verl_multiturn import load_tools, scripted_rollout
from verl_multiturn.runs.data import tool_call

TOOLS = Path(__file__).with_name("tools.yaml")


def test_a_conversation_that_is_right() -> None:
    row = rows(1, seed=0)[0]
    kwargs = row["extra_info"]["tools_kwargs"]
    pieces = kwargs["stock"]["create_kwargs"]["pieces"]
    turns = [tool_call("stock", {"article": "cups"}), f"Answer: {row['reward_model']['ground_truth']}"]
    outcome = asyncio.run(scripted_rollout(load_tools(TOOLS), turns, row["prompt"], tools_kwargs=kwargs))
    assert [call.text for call in outcome.calls] == [str(pieces["cups"])]
    said = [message["content"] for message in outcome.messages if message["role"] == "assistant"]
    scored = compute_score("", "", row["reward_model"]["ground_truth"], {"assistant_texts": said})
    assert scored == {"score": 1.0, "acc": 1.0, "answered": 1.0}


def test_an_unknown_article_is_an_answer_to_the_model() -> None:
    kwargs = {"stock": {"create_kwargs": {"pieces": {"cups": 3}}}}
    turns = [tool_call("stock", {"article": "hats"}), "Answer: 0"]
    outcome = asyncio.run(scripted_rollout(load_tools(TOOLS), turns, "How many hats?", tools_kwargs=kwargs))
    assert outcome.calls[0].text == "Error: no article 'hats'; there are cups"
