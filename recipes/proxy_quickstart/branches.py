"""An agent of three: a planner, then two workers at the same time, each with a prompt of its own.

The first worker gets the task alone, the second one with the plan. So a session has three roots, and three rows. The
agent judges the answers itself: the session earns 1 if a worker is right, and a worker's last completion earns half a
point more for being right itself.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from openai.types.chat import ChatCompletion

from recipes.proxy_quickstart.agent import MODEL, connect, solve
from recipes.quickstart.task import extract_answer, score_answer

PLANNER = "You are a planner. Say in a few words how to solve this."
PLAN_TOKENS = 24
OWN_REWARD = 0.5


def run(data: dict[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
    """Solve the task of a data row, and return the reward of the session and those of the workers' completions.

    Args:
        data: The row: `messages`, and the right answer in `reward_model`.
        base_url: Address of the endpoint.
        api_key: The session's key.
    """
    system, task = data["messages"]
    planning: list[Any] = [{"role": "system", "content": PLANNER}, task]
    with connect(base_url, api_key) as client, ThreadPoolExecutor(2) as workers:
        planned = client.chat.completions.create(model=MODEL, messages=planning, max_completion_tokens=PLAN_TOKENS)
        plan = planned.choices[0].message.content or "none"
        with_plan = {"role": "user", "content": f"{task['content']}\nPlan: {plan}"}
        worked = list(workers.map(partial(solve, client), [[system, task], [system, with_plan]]))
    truth = data["reward_model"]["ground_truth"]
    scores = [score(each, truth) for each in worked]
    own = {each[-1].id: OWN_REWARD * score for each, score in zip(worked, scores, strict=True) if each}
    return {"reward": max(scores), "completions": own}


def score(completions: list[ChatCompletion], truth: str) -> float:
    """Return 1.0 if the last of a worker's completions gives the right answer, else 0.0."""
    text = completions[-1].choices[0].message.content if completions else None
    return score_answer(extract_answer(text or ""), truth)
