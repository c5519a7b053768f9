"""Score finished conversations: a reward of your own, which verl's reward function finds by the row's data source."""

import asyncio
import re

from verl_multiturn import scripted_rollout
from verl_multiturn.rewards import Score, Solution, compute_score
from verl_multiturn.rollout.reward_fields import reward_fields
from verl_multiturn.runs.data import tool_call


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def reward(solution: Solution, ground_truth: str) -> Score:
    found = re.search(r"Answer: (-?\d+)$", solution.answer)  # the assistant's last turn, without tool output
    if found is None:
        return Score()
    return Score.of(found[1] == ground_truth)


async def main() -> None:
    call = tool_call("add", {"a": 17, "b": 25})
    routes = {"my/sums": f"{__name__}.reward"}  # reward.custom_reward_function.reward_kwargs.routes of a run
    for last in ("Answer: 42", "Answer: 41", "The tool said it."):
        outcome = await scripted_rollout([add], [call, last], "What is 17 + 25?")
        extra_info = reward_fields(outcome)  # texts, calls and rewards, as in a run
        response = " ".join(str(message["content"]) for message in outcome.messages)  # holds the tool's 42, too
        score = await compute_score("my/sums", response, "42", extra_info, routes=routes)
        print(f"{last!r}: score {score['score']}, answered {score['answered']}, failed {score['failed']}")


if __name__ == "__main__":  # a run imports this file
    asyncio.run(main())
