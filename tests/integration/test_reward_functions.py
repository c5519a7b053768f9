"""A reward function of the author's own, by verl's manager: here, and in verl's reward workers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_near_rewards import judge, tokenizer

pytestmark = [pytest.mark.stack, pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning")]

FUNCTION = """
from verl_multiturn.errors import UnjudgedError

async def later():
    return 1.0

def score(kind):
    if kind == "unjudged":
        raise UnjudgedError("no verdict")
    return {"none": None, "text": "", "empty": {}, "right": 1.0, "later": None}[kind] if kind != "later" else later()

def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return score(ground_truth)

async def compute_score_later(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return score(ground_truth)
"""
PATHS = "return a number on every path, or raise UnjudgedError where there is no verdict"
SAID = {
    "none": f"None; {PATHS}",
    "text": "''",
    "empty": f"{{}}, which has no 'score'; {PATHS}",
    "later": "a coroutine that nobody awaits; write the function with async def, or await it inside",
}


def config_of(folder: Path, name: str = "compute_score", manager: str = "naive") -> Any:
    from omegaconf import OmegaConf

    from tests.support.rollout_config import MODEL

    (folder / "own.py").write_text(FUNCTION)
    reward = {
        "reward_manager": {"name": manager, "source": "register"},
        "custom_reward_function": {"path": str(folder / "own.py"), "name": name},
        "reward_model": {"enable": False},
    }
    rollout = {"custom": {"multiturn": {"near_rewards": "all"}}}
    model = {"path": str(MODEL), "tokenizer_path": None}
    return OmegaConf.create({"reward": reward, "actor_rollout_ref": {"rollout": rollout, "model": model}})


def said(folder: Path, name: str, kind: str) -> str:
    row = f"the row with extra_info.index 7, data_source 'sums', ground_truth '{kind}'"
    return f"the reward function {name} ({folder / 'own.py'}) was given {row}, and returned {SAID[kind]}"


@pytest.mark.parametrize("manager", ["naive", "dapo"])
@pytest.mark.parametrize("name", ["compute_score", "compute_score_later"])
@pytest.mark.parametrize("kind", SAID)
def test_what_is_no_reward_is_named_here(kind: str, name: str, manager: str, tmp_path: Path) -> None:
    from verl_multiturn.errors import RewardContractError
    from verl_multiturn.verl_bridge.loops.rewards import NearRewards

    def ask(truth: str) -> Any:
        # A manager belongs to the event loop in which it was made.
        handles = NearRewards.handles(config_of(tmp_path, name, manager), tokenizer(), ["a reward worker"])
        return judge(handles, "sums", truth)[0]

    with pytest.raises(RewardContractError) as raised:
        ask(kind)
    assert str(raised.value) == said(tmp_path, name, kind)
    assert ask("right").reward_score == 1.0


@pytest.mark.deaths
@pytest.mark.usefixtures("cluster")
def test_what_is_no_reward_is_named_by_a_reward_worker(tmp_path: Path) -> None:
    import ray
    from verl.experimental.reward_loop.reward_loop import RewardLoopWorker

    from verl_multiturn.calls.outages.process import Outages
    from verl_multiturn.config import OutageSettings
    from verl_multiturn.errors import RewardContractError
    from verl_multiturn.verl_bridge.loops.rewards import Rewards, check_workers

    worker = ray.remote(RewardLoopWorker).remote(config_of(tmp_path), None)
    check_workers([worker])

    def ask(kind: str) -> Any:
        from tests.integration.trainer_rows import CALL, make_output

        output = make_output("u", 0, [CALL, "#### 42<|im_end|>"])

        async def compute() -> None:
            from verl_multiturn.verl_bridge.loops.rewards import scored_rows

            row = {"data_source": "sums", "reward_model": {"ground_truth": kind}, "extra_info": {"index": 7}}
            result = await worker.compute_score.remote(scored_rows(row, [output]))
            output.reward_score = result["reward_score"]
            output.extra_fields["reward_extra_info"] = result["reward_extra_info"]

        asyncio.run(Rewards(Outages(OutageSettings())).score([output], compute))
        return output

    for kind in SAID:
        with pytest.raises(RewardContractError) as raised:
            ask(kind)
        assert str(raised.value) == said(tmp_path, "compute_score", kind)
    assert ask("right").reward_score == 1.0
    unjudged = ask("unjudged")
    assert (unjudged.reward_score, unjudged.extra_fields["reward_extra_info"]["unjudgeable"]) == (0.0, 1.0)
    ray.kill(worker)
