"""Rewards that the agent-loop worker judges itself: the same manager, the same results, and no trace in the row."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from tests.integration.trainer_rows import CALL, make_output

pytestmark = [pytest.mark.stack, pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning")]


def make_config(mode: str = "quick", manager: str = "naive", path: str = "pkg://verl_multiturn.rewards") -> Any:
    from omegaconf import OmegaConf

    function = {"path": path, "name": "compute_score", "reward_kwargs": {"routes": {"mine": "gsm8k"}}}
    reward = {
        "reward_manager": {"name": manager, "source": "register"},
        "custom_reward_function": function,
        "reward_model": {"enable": False},
    }
    rollout = {"custom": {"multiturn": {"near_rewards": mode}}}
    return OmegaConf.create({"reward": reward, "actor_rollout_ref": {"rollout": rollout}})


class Far:
    """Replaces Ray's handle of a reward worker, whose manager gets a copy of the data by its pickle."""

    def __init__(self, config: Any) -> None:
        self._config, self.asked = config, 0
        self.compute_score = SimpleNamespace(remote=self._remote)

    async def _remote(self, data: Any) -> Any:
        import pickle

        from verl.trainer.ppo.reward import load_reward_manager

        self.asked += 1
        return await load_reward_manager(self._config, tokenizer()).run_single(pickle.loads(pickle.dumps(data)))


def tokenizer() -> Any:
    from transformers import AutoTokenizer

    from tests.support.rollout_config import MODEL

    return AutoTokenizer.from_pretrained(MODEL)


def judge(handles: Any, data_source: str, ground_truth: str = "42") -> tuple[Any, dict[str, Any]]:
    """Return the output of a conversation with the answer 42, scored as by verl's worker, and its row afterwards."""
    from verl.experimental.agent_loop.agent_loop import AgentLoopWorker

    worker = object.__new__(AgentLoopWorker)
    worker.processor, worker.mm_processor_kwargs, worker.reward_loop_worker_handles = None, {}, handles
    output = make_output("u", 0, [CALL, "#### 42<|im_end|>"])
    row = {"data_source": data_source, "reward_model": {"ground_truth": ground_truth}, "extra_info": {"index": 7}}
    asyncio.run(worker._compute_score([output], row))
    return output, row


def near(config: Any, far: Far) -> Any:
    from verl_multiturn.verl_bridge.loops.rewards import NearRewards

    return NearRewards.handles(config, tokenizer(), [far])


@pytest.mark.parametrize(
    ("data_source", "asked", "score"),
    [("gsm8k", 0, 1.0), ("mine", 0, 1.0), ("math", 1, 0.0)],  # `math` wants a box
)
def test_a_quick_rule_is_judged_here_and_others_by_a_reward_worker(data_source: str, asked: int, score: float) -> None:
    config = make_config()
    far, alone = Far(config), Far(config)
    found, row = judge(near(config, far), data_source)
    assert far.asked == asked
    expected, _ = judge([alone], data_source)
    assert (found.reward_score, found.extra_fields["reward_extra_info"]) == (
        expected.reward_score,
        expected.extra_fields["reward_extra_info"],
    )
    assert found.reward_score == score
    assert row["extra_info"] == {"index": 7}  # verl's manager adds to it


def test_a_mistake_of_the_author_is_raised_as_by_a_reward_worker() -> None:
    from verl_multiturn.errors import ConfigError

    config = make_config()
    for handles in (near(config, Far(config)), [Far(config)]):
        with pytest.raises(ConfigError, match="expected a number, got 'many'"):
            judge(handles, "gsm8k", "many")
    with pytest.raises(ConfigError, match="has no reward"):
        judge(near(config, Far(config)), "unknown")


@pytest.mark.parametrize(
    "changes",
    [{"mode": "off"}, {"manager": "rate_limited"}, {"mode": "all", "manager": "rate_limited"}, {"path": "own.py"}],
)
def test_reward_workers_stay(changes: dict[str, str]) -> None:
    far = Far(make_config())
    assert near(make_config(**changes), far) == [far]


def test_all_rewards_are_judged_here() -> None:
    config = make_config("all")
    far = Far(config)
    judge(near(config, far), "math")
    assert far.asked == 0


def test_no_handles_stay_none() -> None:
    from verl_multiturn.verl_bridge.loops.rewards import NearRewards

    assert NearRewards.handles(make_config(), None, None) is None
