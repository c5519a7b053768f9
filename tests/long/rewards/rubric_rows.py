"""Rows of conversations that `rubric` scores by verl's reward worker, and our trainer behind them."""

from __future__ import annotations

import asyncio
import pickle
from types import SimpleNamespace
from typing import Any

from tests.integration.trainer_rows import CALL, WritableStore, make_output
from verl_multiturn.calls.outages.process import Outages
from verl_multiturn.config import OutageSettings

CRITERIA = [
    {"name": "right", "text": "The last turn says the same as the reference.", "weight": 3.0},
    {"name": "polite", "text": "The turn says please.", "turns": "each"},
]
TURNS = [f"please {CALL}", "2<|im_end|>"]
"""A polite call, and the right answer."""


def reward_section(url: str, criteria: list[dict[str, Any]] | None = None, **options: Any) -> dict[str, Any]:
    """Return verl's configuration of our reward function with a judge at an address."""
    rubric = {"url": url, "model": "strict", "attempts": 1, "criteria": criteria or CRITERIA, **options}
    function = {
        "path": "pkg://verl_multiturn.rewards",
        "name": "compute_score",
        "reward_kwargs": {"rubric": rubric},
    }
    return {
        "reward_manager": {"name": "naive", "source": "register"},
        "custom_reward_function": function,
        "reward_model": {"enable": False},
    }


class FarWorker:
    """Replaces Ray's handle of a reward worker: its manager gets a copy of the data, and gives one of the result."""

    def __init__(self, reward: dict[str, Any]) -> None:
        self._reward = reward
        self.compute_score = SimpleNamespace(remote=self._remote)

    async def _remote(self, data: Any) -> Any:
        from omegaconf import OmegaConf
        from verl.trainer.ppo.reward import load_reward_manager

        from tests.integration.test_near_rewards import tokenizer
        from verl_multiturn.rewards import aclose

        manager = load_reward_manager(OmegaConf.create({"reward": self._reward}), tokenizer())
        try:
            return pickle.loads(pickle.dumps(await manager.run_single(pickle.loads(pickle.dumps(data)))))
        finally:
            await aclose()


def scored(uid: str, number: int, turns: list[str], reward: dict[str, Any], truth: str = "2") -> Any:
    """Return the output of a conversation with its reward, as verl's worker computes it."""
    from verl.experimental.agent_loop.agent_loop import AgentLoopWorker

    from verl_multiturn.verl_bridge.loops.rewards import Rewards

    worker = object.__new__(AgentLoopWorker)
    worker.processor, worker.mm_processor_kwargs = None, {}
    worker.reward_loop_worker_handles = [FarWorker(reward)]
    output = make_output(uid, number, turns, reward)
    row = {"data_source": "rubric/sums", "reward_model": {"ground_truth": truth}, "extra_info": {"index": number}}

    async def compute() -> None:
        rewards = Rewards(Outages(OutageSettings()), has_verdicts=True)
        await rewards.score([output], lambda: worker._compute_score([output], row))

    asyncio.run(compute())
    return output


def trained_tokens(store: WritableStore) -> int:
    """Return how many tokens of all rows the trainer would train."""
    return int(sum(int(row["response_mask"].sum()) for row in store.rows.values()))
