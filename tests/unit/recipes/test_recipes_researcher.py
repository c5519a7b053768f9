"""The recipe `researcher`: its made pages through the real tools, its reward, and its report's own figures."""

from __future__ import annotations

import copy
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from recipes.researcher import made_pages, report, reward
from tests.conftest import ROOT
from tests.recipe_scripts import RECIPES, composed, prepared
from verl_multiturn import ConfigError
from verl_multiturn.advantages.turns import GroupMember, of_turns
from verl_multiturn.calls.slots import Gates
from verl_multiturn.chat.parsing.turns import ToolCall
from verl_multiturn.rewards import Score, Solution, compute_score
from verl_multiturn.rollout.limits import INVALID, StopReason
from verl_multiturn.rollout.turn import Turn
from verl_multiturn.tools.loading.registry import load_tools
from verl_multiturn.tools.running.gate import Gate
from verl_multiturn.tools.running.results import CallStatus
from verl_multiturn.tools.running.session import ToolSession

pytestmark = pytest.mark.slow

RESEARCHER = RECIPES / "researcher"


@pytest.fixture(autouse=True)
def _imports(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the folders that a run has: that of the recipe's scripts, and the root for its modules."""
    monkeypatch.setattr(sys, "path", [str(ROOT), str(RESEARCHER), *sys.path])


def calls_of(turn: str) -> list[ToolCall]:
    """Return the calls of a worked turn."""
    _, called, rest = turn.partition("<tool_call>\n")
    if not called:
        return []
    call = json.loads(rest.removesuffix("\n</tool_call>"))
    return [ToolCall(call["name"], json.dumps(call["arguments"]), "c")]


async def test_the_ways_through_the_made_pages(tmp_path: Path) -> None:
    rows = prepared("researcher", tmp_path, "--smoke")
    assert (len(rows["train"]), len(rows["test"])) == (8, 4)
    assert len((tmp_path / "corpus" / "pages.jsonl").read_text().splitlines()) == made_pages.PAGES == 200
    tools = load_tools(tmp_path / "tools.yaml")
    assert list(tools) == rows["train"][0]["extra_info"]["tool_selection"] == ["search", "browse", "python"]
    for task in made_pages.tasks()[::4]:
        for way, turns in task.ways().items():
            async with ToolSession(way, tools, {}, Gates(Gate, 30.0), 1) as session:
                results = [result for turn in turns for result in await session.execute(calls_of(turn))]
            said = [result.text for result in results]
            statuses = [str(result.status) for result in results]
            assert said[0].startswith(f"[1] {task.works}\n")
            assert task.person not in said[0], "search shows only the beginning"
            if way == "good":
                works, second, person, printed = said[1:]
                assert works.startswith(f"{task.works} (part 1 of 2)")
                assert task.person not in works
                assert second.endswith(f"founded in {task.founded} by {task.person}.")
                assert f"born in {task.born}." in person
                assert printed.strip() == str(task.age)
            assert statuses == ["ok"] * len(said) if way != "invalid" else statuses[1] == "bad_arguments"
            info = {"assistant_texts": turns, "call_statuses": statuses, "stop_reason": "finished"}
            routes = {"researcher/*": "recipes.researcher.reward.reward"}
            scored = await compute_score("researcher/made", "", {"target": [str(task.age)]}, info, routes=routes)
            assert scored["score"] == {"good": 1.0, "guess": 0.0, "invalid": -0.5}[way]
            assert scored["acc"] == float(way != "guess")


RIGHT = Solution("researcher/made", ("<answer>29</answer>",), extra_info={"stop_reason": "finished"})


@pytest.mark.parametrize("reason", StopReason)
async def test_limits_are_penalized_and_what_others_did_is_not(reason: StopReason) -> None:
    for texts, value in ((("<answer>29</answer>",), 1.0), (("<answer>30</answer>",), 0.0), (("I give up.",), 0.0)):
        solution = replace(RIGHT, texts=texts, extra_info={"stop_reason": str(reason)})
        score: Score = await reward.reward(solution, {"target": ["29"]})
        assert score.value == (-reward.PENALTY if reason in reward.LIMITS else value)
    # Invalid conversations are never trained.
    kept = {"finished", "environment_done", "environment_truncated", "wall_clock", "agent_error"}
    assert {str(each) for each in set(StopReason) - reward.LIMITS - INVALID} == kept


@pytest.mark.parametrize("status", CallStatus)
async def test_invalid_calls_are_penalized_and_failing_tools_are_not(status: CallStatus) -> None:
    score: Score = await reward.reward(replace(RIGHT, statuses=("ok", str(status))), {"target": ["29"]})
    is_kept = status in {"ok", "error", "timeout", "overloaded"}
    assert (score.value, score.acc, score.format) == (1.0 if is_kept else -0.5, 1.0, float(is_kept))


def trained(rewards: list[float], rows: list[list[int]]) -> Any:
    """Return the conversations of a group as the report has them, with the trainer's advantages.

    Args:
        rewards: Reward of each conversation.
        rows: For each conversation the number of turns of each row. Each turn has two tokens.
    """
    turns = [sum(own) for own in rows]
    played = [
        GroupMember([Turn(i, r if i == n - 1 else None) for i in range(n)]) for r, n in zip(rewards, turns, strict=True)
    ]
    group = []
    for score, own, made in zip(rewards, rows, of_turns(played, 0.9), strict=True):
        left = iter(made)
        advantages = [[value for _ in range(count) for value in [next(left)] * 2] for count in own]
        # Runs: tokens, mask, version, turn, source. A token of context comes before each turn.
        held = [
            {
                "prompt_length": 1,
                "ids": [0] * (1 + 3 * count),
                "logprobs": [0.0] * (2 * count),
                "runs": [[1, 0, -1, 0, 0]] + [run for i in range(count) for run in ([1, 0, -1, i, 3], [2, 1, 0, i, 1])],
            }
            for count in own
        ]
        generations = [{"row": 0, "tokens": 2, "summary": False} for _ in range(sum(own))]
        record = {"request_id": "r", "rows": held, "generations": generations}
        group.append(report.Trained(record, score, advantages))
    return group


def test_the_report_computes_the_advantages_anew() -> None:
    group = trained([1.0, 0.0, -0.5, 1.0], [[2, 3], [1], [1, 1, 1], [4]])
    assert report.max_difference([group], 0.9) <= 1e-12
    assert report.max_difference([group], 0.8) > 0.01
    assert report.max_difference([group[:1]], 0.9) > 0.01  # alone, it would have none
    wrong = copy.deepcopy(group)
    wrong[0].advantages[1][-1] += 1e-4
    assert report.max_difference([wrong], 0.9) == pytest.approx(1e-4)
    # Counted by rows in the place of the conversation, a turn of the second row is another one.
    wrong[0].advantages[1][:] = wrong[0].advantages[0] + wrong[0].advantages[1][-2:]
    assert report.max_difference([wrong], 0.9) > 0.01


def test_rows_of_public_sets(tmp_path: Path) -> None:
    rows = [
        {"question": "who wrote it", "golden_answers": ["A", "B"], "data_source": name}
        for name in ("nq", "hotpotqa", "musique")
        for _ in range(9)
    ]
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    made = prepared("researcher", tmp_path / "out", "--source", str(tmp_path), "--validate", "4")
    assert {row["data_source"] for row in made["train"]} == {"researcher/hotpotqa", "researcher/musique"}
    assert (len(made["train"]), len(made["test"])) == (18, 8)
    assert made["train"][0]["prompt"][-1]["content"] == "who wrote it?"
    assert json.loads(made["train"][0]["reward_model"]["ground_truth"]) == {"target": ["A", "B"]}
    (tmp_path / "train.jsonl").write_text('{"question": "a", "answers": []}')
    with pytest.raises(ConfigError, match="expected the columns 'question' and 'golden_answers'"):
        prepared("researcher", tmp_path / "none", "--source", str(tmp_path))


@pytest.mark.stack
def test_the_settings_of_the_variants() -> None:
    plain, resum = composed("researcher"), composed("researcher", "resum")
    ours = [each.actor_rollout_ref.rollout.custom.multiturn for each in (plain, resum)]
    assert [each.algorithm.adv_estimator for each in (plain, resum)] == ["mt_turns", "mt_grpo"]
    assert [each.advantage.options for each in ours] == [{"gamma": 0.95}, None]
    assert {each.context.mode for each in ours} == {"overflow"}
    routes = [each.reward.custom_reward_function.reward_kwargs.routes["researcher/*"] for each in (plain, resum)]
    assert routes == ["recipes.researcher.reward.reward", "qa"]
    # The prompt of a later row holds a summary and the last step.
    room = plain.data.max_prompt_length - sum(
        (ours[0].turn_length, ours[0].observation_length, ours[0].context.summary_length)
    )
    assert room >= 2_000
    tools = yaml.safe_load((RESEARCHER / "tools.yaml").read_text())["tools"]
    assert len(tools) == len(load_tools(RESEARCHER / "tools.yaml")) == 3
