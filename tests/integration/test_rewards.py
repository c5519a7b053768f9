"""Rewards as verl calls them, and beside verl's own rewards."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf
from verl import DataProto
from verl.experimental.reward_loop.reward_manager.naive import NaiveRewardManager
from verl.trainer.ppo.metric_utils import process_validation_metrics
from verl.trainer.ppo.reward import get_custom_reward_fn
from verl.utils.reward_score import gsm8k as verl_gsm8k
from verl.utils.reward_score import search_r1_like_qa_em as verl_qa

from tests.scoring import KEYS, RIGHT, WRONG, Numbers, score
from verl_multiturn.rewards import aclose

pytestmark = pytest.mark.stack

KEY = "reward.custom_reward_function"


@pytest.fixture(autouse=True)
async def _closed() -> AsyncIterator[None]:
    yield
    await aclose()


def reward_function(*overrides: str) -> Any:
    """Return the reward function that verl makes of a command line."""
    settings = [f"{KEY}.path=pkg://verl_multiturn.rewards", f"{KEY}.name=compute_score", *overrides]
    config = OmegaConf.create({"reward": {"custom_reward_function": {"path": None, "name": None, "reward_kwargs": {}}}})
    for override in OverridesParser.create().parse_overrides(settings):
        OmegaConf.update(config, override.key_or_group, override.value(), force_add=True)
    return get_custom_reward_fn(config)


class Decoder:
    def decode(self, ids: Any, **kwargs: Any) -> str:
        return "what a tool said: #### 42"


def row(data_source: str, ground_truth: Any, fields: dict[str, Any]) -> DataProto:
    batch = {"responses": torch.ones(1, 4, dtype=torch.int64), "attention_mask": torch.ones(1, 6, dtype=torch.int64)}
    columns: dict[str, Any] = {
        "data_source": data_source,
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": {"index": 0},
        "tool_extra_fields": fields,
    }
    return DataProto.from_dict(batch, {key: np.array([value], dtype=object) for key, value in columns.items()})


async def test_verls_reward_manager_gets_the_same_keys_for_every_row() -> None:
    function = reward_function(
        f"+{KEY}.reward_kwargs.routes={{my/data*: gsm8k, other: qa}}",
        f"+{KEY}.reward_kwargs.gsm8k.method=flexible",
        f"++{KEY}.reward_kwargs.gsm8k.tool_use_bonus=0.5",
        f"++{KEY}.reward_kwargs.math.timeout_s=1",
    )
    assert inspect.iscoroutinefunction(function), "verl awaits it on the worker's loop"
    manager = NaiveRewardManager(OmegaConf.create({}), Decoder(), function)
    manager.loop = asyncio.get_running_loop()
    said = {"assistant_texts": ["so it is 42"], "assistant_calls": [[]], "call_statuses": ["ok"]}
    rows = [
        row("my/data", "42", said),
        row("other", ["42"], said),
        row("math_dapo", "2", {"assistant_texts": [r"\boxed{2^{2^{2^{2^{2^2}}}}}"]}),
        row("openai/gsm8k", "42", {}),
    ]
    results = [await manager.run_single(each) for each in rows]
    assert [result["reward_score"] for result in results] == [1.5, 0.0, 0.0, 1.0]
    assert [tuple(result["reward_extra_info"]) for result in results] == [KEYS] * 4
    infos = {key: [result["reward_extra_info"][key] for result in results] for key in KEYS}
    metrics = process_validation_metrics(["s"] * 4, list("abcd"), infos)["s"]
    assert metrics["timed_out"]["mean@1"] == 0.25
    assert metrics["failed"]["mean@1"] == 0.0
    assert metrics["acc"]["mean@1"] == 0.5


GSM8K = [
    "#### 42",
    "####  42",
    "#### 1,042",
    "#### 42.0",
    "#### $42",
    "#### 42.",
    "#### -42",
    "42",
    "#### 41\n#### 42",
    "x",
]
# verl compares texts, requires exactly one space, and reads the full stop as part of the number; ours compares values.
OURS_ALONE = {"####  42", "#### 42.0", "#### $42", "#### 42."}


async def test_gsm8k_beside_verls() -> None:
    for text in GSM8K:
        theirs = verl_gsm8k.compute_score(text, "42", method="strict")
        ours = (await score("openai/gsm8k", text, "42"))[0]
        assert (ours, theirs) == ((1.0, 0) if text in OURS_ALONE else (float(theirs), theirs)), text
    for text in ("it is 42", "42 or 43", "no", "#### 41", "of 7, 42"):
        theirs = verl_gsm8k.compute_score(text, "42", method="flexible")
        assert (await score("openai/gsm8k", text, "42", gsm8k={"method": "flexible"}))[0] == theirs, text


QA = {
    "<answer>the Paris!</answer>": RIGHT,
    "<answer> city of\nlight </answer>": RIGHT,
    "<answer>Lyon</answer>": WRONG,
    "<answer>Pa ris</answer>": WRONG,
    "<answer>Lyon</answer> <answer>Paris</answer>": (1.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0),
    "Paris": (0.0,) * 8,
}


async def test_questions_beside_verls() -> None:
    truth = {"target": ["Paris", "City of Light"]}
    for text, expected in QA.items():
        found: Numbers = await score("searchR1_nq", text, truth)
        assert found == expected, text
        assert found[0] == verl_qa.compute_score(text, truth), text
    # An answer within the reasoning counts, too; more than ten tags are worth a quarter.
    thought, many = "<think><answer>Paris</answer></think>", "<answer>Paris</answer>" * 11
    assert (verl_qa.compute_score(thought, truth), (await score("searchR1_nq", thought, truth))[0]) == (1.0, 1.0)
    assert (verl_qa.compute_score(many, truth), (await score("searchR1_nq", many, truth))[0]) == (0.25, 0.25)
    found = await score("searchR1_nq", many, truth, qa={"format_weight": 1.0})
    assert found == (-0.75, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0)
