"""An author's reward code gets a copy of the row, for every caller: its changes there are seen nowhere else."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.test_near_rewards import tokenizer
from tests.integration.test_reward_functions import config_of
from tests.integration.trainer_rows import CALL, make_output

pytestmark = [pytest.mark.stack, pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning")]

CHANGES = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    assert (ground_truth, extra_info["place"]["rooms"]) == ({"target": ["42"]}, [1])
    assert extra_info["assistant_texts"] == ["", "#### 42"]
    for value in [ground_truth, *ground_truth.values(), *extra_info.values(), *extra_info["place"].values()]:
        if isinstance(value, list):
            value.append("mine")
        elif isinstance(value, dict):
            value["mine"] = True
    extra_info["mine"] = True
    return 1.0
"""

Ask = Callable[[Any, dict[str, Any], Any], Any]


async def trains(config: Any, row: dict[str, Any], output: Any) -> None:
    from verl.experimental.agent_loop.agent_loop import AgentLoopWorker

    from verl_multiturn.verl_bridge.loops.rewards import NearRewards

    worker = object.__new__(AgentLoopWorker)
    worker.processor, worker.mm_processor_kwargs = None, {}
    worker.reward_loop_worker_handles = NearRewards.handles(config, tokenizer(), ["a reward worker"])
    await worker._compute_score([output], row)


async def evaluates(config: Any, row: dict[str, Any], output: Any) -> None:
    from verl_multiturn.rows.keys import RowKey
    from verl_multiturn.verl_bridge.offline.evaluate.rewards import EvaluationRewards

    rows, raised = await EvaluationRewards(config, tokenizer()).judge(row, [output], RowKey("u", "0", "0"))
    assert ([each.score for each in rows], raised) == ([1.0], "")


async def replays(config: Any, row: dict[str, Any], output: Any) -> None:
    from verl_multiturn.verl_bridge.offline.replay.scores import Scores

    sample = {"data_source": row["data_source"], "ground_truth": row["reward_model"]["ground_truth"], "index": 7}
    sample |= {"extra_info": row["extra_info"], "messages": row["raw_prompt"]}
    assert await Scores(config, tokenizer()).of({"sample": sample}, [output], {}) == 1.0


@pytest.mark.parametrize("ask", [trains, evaluates, replays])
def test_what_a_reward_function_changes_is_seen_nowhere_else(ask: Ask, tmp_path: Path) -> None:
    config = config_of(tmp_path)
    (tmp_path / "own.py").write_text(CHANGES, encoding="utf-8")
    row = {
        "data_source": "sums",
        "reward_model": {"ground_truth": {"target": ["42"]}},
        "extra_info": {"index": 7, "place": {"rooms": [1]}},
        "raw_prompt": [{"role": "user", "content": "6*7?"}],
    }
    output = make_output("u", 0, [CALL, "#### 42<|im_end|>"])
    before = copy.deepcopy([row, output.extra_fields])
    for _ in range(2):  # and the next one who judges it gets it as it was
        output.reward_score = None
        asyncio.run(ask(config, row, output))
        assert output.reward_score == 1.0
        assert output.extra_fields.pop("reward_extra_info") == {"acc": 1.0}
        assert [row, output.extra_fields] == before
