"""Metrics of a batch of conversations, in literal numbers; and the tokens that get the tools' rewards."""

import pickle
import re
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch

from tests.conftest import ROOT, CharBuilder, CharTokenizer, EchoTool
from verl_multiturn import ConfigError, Conversation, Limits, Outcome, Request, ScriptedEngine, StopReason, ToolResponse
from verl_multiturn.chat.codec import ChatCodec
from verl_multiturn.chat.parsing.json_calls import JsonParser
from verl_multiturn.chat.parsing.turns import AssistantTurn, MalformedCall, ToolCall
from verl_multiturn.chat.rendering_check import RenderingDifference
from verl_multiturn.config import read_settings
from verl_multiturn.interactions.running.replies import CheckedReply
from verl_multiturn.observe.metrics import (
    MOST_KEYS,
    Stats,
    aggregate,
    conversations,
    executed_calls,
    is_correct,
    numbers_of,
    stats_of,
)
from verl_multiturn.rollout.engines.protocol import Ask, CacheUse, Generation
from verl_multiturn.rollout.outcome import ConversationRow, SessionReport
from verl_multiturn.rollout.trajectory import Source, Trajectory
from verl_multiturn.rollout.turn import Turn
from verl_multiturn.rollout.turn_rewards import tool_scores
from verl_multiturn.rows.keys import RowKey
from verl_multiturn.tools.running.results import CallResult, CallStatus

CALL = '<tool_call>{"name": "echo", "arguments": {"text": "hi"}}</tool_call>'


def call(tool: str = "search", status: CallStatus = CallStatus.OK, **details: Any) -> CallResult:
    return CallResult(call_id="c", tool=tool, status=status, text="…", **details)


def outcome(*calls: CallResult, turns: int = 2, stop: StopReason = StopReason.FINISHED, **details: Any) -> Outcome:
    """Return a conversation of `turns` assistant turns of two tokens each, with one token of context between them."""
    trajectory = Trajectory()
    trajectory.append_prompt([1, 2, 3])
    made = []
    for turn in range(turns):
        if turn:
            trajectory.append_context([9], Source.OBSERVATION)
        trajectory.append_sampled([5, 6], [-0.5, -0.5], [0, 0])
        made.append(Turn(turn, start=3 * turn, end=3 * turn + 2, calls=[] if turn else list(calls)))
    trajectory.seal(stop)
    return Outcome("r", [ConversationRow(trajectory, [])], [], made, **details)


def metrics_of(*outcomes: Outcome, **extra: Any) -> dict[str, float]:
    # Workers send them pickled.
    stats: list[Stats] = [pickle.loads(pickle.dumps({**stats_of(each), **extra})) for each in outcomes]
    return aggregate(stats)


def test_a_batch_without_conversations_says_nothing() -> None:
    assert aggregate([]) == {}


def test_one_conversation_without_tools() -> None:
    found = metrics_of(outcome(turns=1, generate_s=2.0))
    assert found == {
        "trajectories": 1,
        "invalid_share": 0,
        "outage/conversations": 0,
        "rendering_differences_share": 0,
        "assistant_turns/mean": 1,
        "assistant_turns/max": 1,
        "user_turns/mean": 0,
        "user_turns/max": 0,
        "stop/finished": 1,
        "stop/environment_done": 0,
        "stop/environment_truncated": 0,
        "stop/response_length": 0,
        "stop/turn_length": 0,
        "stop/max_assistant_turns": 0,
        "stop/max_user_turns": 0,
        "stop/max_tool_calls": 0,
        "stop/malformed_calls": 0,
        "stop/wall_clock": 0,
        "stop/prompt_too_long": 0,
        "stop/environment_error": 0,
        "stop/engine_error": 0,
        "stop/outage": 0,
        "stop/unjudged": 0,
        "stop/agent_error": 0,
        "stop/agent_failed": 0,
        "stop/no_completion": 0,
        "generate_s/p50": 2,
        "generate_s/p95": 2,
        "tools_s/p50": 0,
        "tools_s/p95": 0,
        "reward/step/mean": 0,
        "reward/calc/mean": 0,
        "calls/total": 0,
        "calls/per_trajectory/mean": 0,
        "calls/per_trajectory/max": 0,
        "calls/error_rate": 0,
        "calls/timeout_rate": 0,
        "calls/bad_arguments_rate": 0,
        "calls/over_limit_rate": 0,
        "calls/overloaded_rate": 0,
        "calls/malformed_rate": 0,
        "calls/unknown_tool_rate": 0,
        "calls/cached_rate": 0,
        "calls/retried_rate": 0,
        "calls/truncated_rate": 0,
        "calls/altered_rate": 0,
    }


def test_the_share_of_prompts_that_was_cached() -> None:
    said = [outcome(cache=CacheUse(given=30, cached=10)), outcome(cache=CacheUse(given=10, cached=10)), outcome()]
    assert metrics_of(*said)["cache/hit_share"] == 0.5
    assert "cache/hit_share" not in metrics_of(outcome())  # an engine that does not report it


def test_what_engines_read_again() -> None:
    first, second = CacheUse(), CacheUse()
    prompt, turn = list(range(100)), list(range(130))
    first.add(Ask("a", prompt, {}, 9), Generation([1], [0.0], [0], "stop", cached=0), 0)
    first.add(
        Ask("a", turn, {}, 9), Generation([1], [0.0], [0], "stop", cached=0, held_s=3.0, led_s=1.0, cache_use=1.5), 100
    )
    second.add(Ask("b", prompt, {}, 9), Generation([1], [0.0], [0], "stop", cached=99), 0)
    found = metrics_of(outcome(cache=first), outcome(cache=second))
    assert found["cache/prefilled_over_minimal"] == 231 / 131  # least: 100 for the prompt, 1 for the sibling, 30
    assert (found["cache/held_s"], found["cache/led_s"], found["cache/use"]) == (1.5, 0.5, 1.5)
    second.add(Ask("b", turn, {}, 9), Generation([1], [0.0], [0], "stop"), 100)  # an engine that reports nothing
    assert metrics_of(outcome(cache=second))["cache/prefilled_over_minimal"] == 0.01


def test_conversations() -> None:
    found = metrics_of(
        outcome(turns=1, generate_s=1.0, tools_s=0.0),
        outcome(turns=4, user_turns=3, generate_s=2.0, tools_s=1.0, differences=[RenderingDifference.WHITESPACE]),
        outcome(turns=3, user_turns=3, stop=StopReason.RESPONSE_LENGTH, generate_s=3.0, tools_s=2.0),
        outcome(turns=0, stop=StopReason.PROMPT_TOO_LONG),
    )
    assert found["trajectories"] == 4
    assert found["invalid_share"] == 0.25
    assert found["rendering_differences_share"] == 0.25
    assert (found["assistant_turns/mean"], found["assistant_turns/max"]) == (2, 4)
    assert (found["user_turns/mean"], found["user_turns/max"]) == (1.5, 3)
    stops = {key: value for key, value in found.items() if key.startswith("stop/") and value}
    assert stops == {"stop/finished": 0.5, "stop/response_length": 0.25, "stop/prompt_too_long": 0.25}
    assert found["generate_s/p50"] == 1.5
    assert found["generate_s/p95"] == pytest.approx(2.85)
    assert found["tools_s/p50"] == 0.5


def test_groups_that_teach_nothing() -> None:
    def conversation(group: str, score: float, valid: bool = True) -> Stats:
        return {**stats_of(outcome()), "group": group, "valid": valid, "conversation": {"rows": 1, "score": score}}

    groups = {
        "right": [1.0, 1.0], "wrong": [0.0, 0.0], "mixed": [1.0, 0.0], "rounded": [0.1 + 0.2, 0.3],
        "near": [0.3, 0.301], "alone": [1.0],
    }  # fmt: skip
    stats = [conversation(group, score) for group, scores in groups.items() for score in scores]
    assert aggregate(stats)["groups_equal"] == 3
    # An invalid conversation is compared with none.
    assert aggregate([*stats, conversation("right", 0.0, valid=False)])["groups_equal"] == 3
    assert "groups_equal" not in aggregate([conversation("alone", 1.0), conversation("alone", 0.0, valid=False)])


def test_calls_of_each_tool_and_of_all() -> None:
    statuses = [CallStatus.ERROR, CallStatus.TIMEOUT, CallStatus.BAD_ARGUMENTS, CallStatus.OVER_LIMIT]
    run = {"attempts": 1, "seconds": 1.0, "queue_s": 0.5}
    found = metrics_of(
        outcome(
            call(**run),
            call(attempts=3, seconds=3.0, queue_s=0.1, truncated=True, altered=True),
            call(cached=True),
            call(status=CallStatus.OVERLOADED, queue_s=60.0),
            *(call(status=status) for status in statuses),
        ),
        outcome(call("sql", **run), call("", CallStatus.MALFORMED), call("", CallStatus.UNKNOWN_TOOL)),
        outcome(call("sql", CallStatus.ERROR, attempts=1, seconds=2.0, queue_s=0.3)),
    )
    assert {key: value for key, value in found.items() if key.startswith("tools/search/")} == {
        "tools/search/calls": 8,
        "tools/search/error_rate": 0.125,
        "tools/search/timeout_rate": 0.125,
        "tools/search/bad_arguments_rate": 0.125,
        "tools/search/over_limit_rate": 0.125,
        "tools/search/overloaded_rate": 0.125,
        "tools/search/cached_rate": 0.125,
        "tools/search/retried_rate": 0.125,
        "tools/search/truncated_rate": 0.125,
        "tools/search/altered_rate": 0.125,
        # The percentiles are over the two calls that ran; a third call waited, too, and got no slot.
        "tools/search/queue_s/p50": 0.5,
        "tools/search/queue_s/p95": pytest.approx(54.05),
        "tools/search/run_s/p50": 2.0,
        "tools/search/run_s/p95": pytest.approx(2.9),
        "tools/search/step_reward/mean": 0,
    }
    assert (found["tools/sql/calls"], found["tools/sql/error_rate"], found["tools/sql/run_s/p50"]) == (2, 0.5, 1.5)
    assert (found["calls/total"], found["calls/per_trajectory/mean"], found["calls/per_trajectory/max"]) == (12, 4, 8)
    assert found["calls/error_rate"] == pytest.approx(2 / 12)
    assert found["calls/malformed_rate"] == found["calls/unknown_tool_rate"] == pytest.approx(1 / 12)
    assert found["calls/run_s/p50"] == 1.5
    # A name that the model made up is not a key.
    assert {key.split("/")[1] for key in found if key.startswith("tools/")} == {"search", "sql"}


def test_a_tool_that_nobody_called_has_no_hole_in_its_curve() -> None:
    found = metrics_of(outcome(calc_rewards={"sql": 0.5}), outcome(calc_rewards={"sql": 1.0}))
    assert {key: value for key, value in found.items() if key.startswith("tools/sql/") and value} == {
        "tools/sql/calc_reward/mean": 0.75
    }
    assert found["tools/sql/calls"] == 0
    assert "tools/sql/run_s/p50" not in found


def test_rewards() -> None:
    conversations = (
        outcome(call(reward=0.5), call("sql", reward=-0.25), calc_rewards={"sql": 2.0, "search": 1.0}),
        outcome(call(reward=0.25)),
    )
    found = metrics_of(*conversations)
    assert (found["reward/step/mean"], found["reward/calc/mean"]) == (0.25, 1.5)
    assert found["tools/search/step_reward/mean"] == 0.375
    assert found["tools/search/calc_reward/mean"] == 1.0
    assert not {"reward/compute_score/mean", "reward/tools/mean"} & found.keys()
    stats = [{**stats_of(each), "score": score} for each, score in zip(conversations, (1.0, None), strict=True)]
    assert aggregate(stats)["reward/compute_score/mean"] == 1.0
    assert aggregate(stats)["reward/compute_score/conversations"] == 1
    assert metrics_of(*conversations, score=None, tool_score=0.5)["reward/tools/mean"] == 0.5


def test_what_compute_score_reports() -> None:
    one, other = stats_of(outcome()), stats_of(outcome())
    one["reported"] = {"acc": 1.0, "format": 0.5, "step": 9.0}
    other["reported"] = {"acc": 0.0}
    found = aggregate([one, other, stats_of(outcome())])
    # The mean is over the rows that report a number; one of our own names keeps our own value.
    assert (found["reward/acc/mean"], found["reward/format/mean"], found["reward/step/mean"]) == (0.5, 0.5, 0)
    assert (found["reward/acc/conversations"], found["reward/format/conversations"]) == (2, 1)
    assert "reward/acc/conversations" not in aggregate([one, other])  # all have it
    reported = {"acc": True, "pred": "7", "list": [1], "inf": float("inf"), "n": 3, "huge": 10**400, "large": 1e300}
    kinds = {"array": np.array(0.5), "tensor": torch.tensor(0.5), "decimal": Decimal("0.5"), "two": torch.ones(2)}
    assert numbers_of(reported) == {"acc": 1.0, "n": 3.0, "large": 1e300}
    assert numbers_of(kinds) == {"array": 0.5, "tensor": 0.5, "decimal": 0.5}


@pytest.mark.parametrize(
    ("score", "reported", "correct"),
    [
        (1.0, {"acc": 1.0}, True),
        (0.3, {}, True),
        (0.3, {"acc": 0.3}, True),
        (0.1, {"acc": 0.0}, False),  # for the format alone
        (-0.5, {"acc": 1.0}, False),
        (0.0, {}, False),
        (None, {"acc": 1.0}, False),
    ],
)
def test_what_counts_as_correct(score: float | None, reported: dict[str, float], correct: bool) -> None:
    stats = {**stats_of(outcome()), "score": score, "reported": reported}
    assert is_correct(stats) is correct
    assert not is_correct({**stats, "valid": False})


def test_tool_productivity() -> None:
    ran = [call(), call(cached=True), call(status=CallStatus.ERROR), call("sql", CallStatus.TIMEOUT)]
    not_run = [CallStatus.MALFORMED, CallStatus.UNKNOWN_TOOL, CallStatus.BAD_ARGUMENTS, CallStatus.OVER_LIMIT]
    several = outcome(*ran, *(call(status=status) for status in not_run), call(status=CallStatus.OVERLOADED))
    assert executed_calls(stats_of(several)) == 4
    assert metrics_of(several, several, outcome(), score=1.0)["tool_productivity"] == 3 / 8
    assert metrics_of(several, score=0.0)["tool_productivity"] == 0
    # There is nothing to divide by, or nothing is known of the answers.
    assert "tool_productivity" not in metrics_of(outcome(), score=1.0)
    assert "tool_productivity" not in metrics_of(several, score=None)


def test_an_authors_own_numbers() -> None:
    said: dict[Any, Any] = {"hits": 3, "found": True, 7: 0.5, "query": "x", "nan": float("nan"), "huge": 10**400}
    found = metrics_of(outcome(call(metrics=said), call(metrics={"hits": 4}), call("sql", metrics={"hits": 9})))
    assert {key: value for key, value in found.items() if "/metrics/" in key} == {
        "tools/search/metrics/7": 0.5,
        "tools/search/metrics/7/calls": 1,
        "tools/search/metrics/found": 1,
        "tools/search/metrics/found/calls": 1,
        "tools/search/metrics/hits": 3.5,
        "tools/sql/metrics/hits": 9,
    }


def test_the_number_of_keys_is_bounded() -> None:
    calls = [call(metrics={f"of query {i}": 1, "always": 1}, attempts=1) for i in range(50)]
    found = metrics_of(outcome(*calls, calc_rewards={"search": 1.0}), score=1.0, tool_score=1.0)
    of_tool = [key for key in found if key.startswith("tools/")]
    own = [key for key in of_tool if "/metrics/" in key]
    assert len(own) == 2 * MOST_KEYS - 1  # all calls report `always`, so that it has no count
    assert "tools/search/metrics/always" in own
    assert len(of_tool) - len(own) == 16
    assert len(found) - len(of_tool) <= 53


async def roll_out(tool: EchoTool, *turns: str) -> Outcome:
    tokenizer = CharTokenizer()
    conversation = Conversation(
        ScriptedEngine([tokenizer.turn(turn) for turn in turns]),
        ChatCodec(CharBuilder(), tokenizer=tokenizer),
        JsonParser(tokenizer, [tokenizer.eos_token_id]),
        Limits(100, 1000, max_parallel_calls=2),
    )
    return await conversation.run(Request("r1", [{"role": "user", "content": "Q"}], {"echo": tool}))


async def test_a_step_reward_goes_to_the_end_of_the_turn_that_called() -> None:
    tool = EchoTool({"returns": (ToolResponse("hi"), 0.5, {}), "reward": 2.0})
    found = await roll_out(tool, "x" + CALL, CALL + CALL, "ok")
    first, second = len(CALL) + 2, 2 * len(CALL) + 1
    start = first + len("\n[hi]>")
    last = found.trajectory.response_length - 1
    assert [len(turn.calls) for turn in found.turns] == [1, 2, 0]
    assert tool_scores(found)[0] == [
        (first - 1, 0.5),
        (start + second - 1, 0.5),
        (start + second - 1, 0.5),
        (last, 2.0),
    ]
    assert tool_scores(found, weight=0.5)[0][0] == (first - 1, 0.25)
    mask = found.trajectory.mask[found.trajectory.prompt_length :]
    assert all(mask[position] and not mask[position + 1] for position, reward in tool_scores(found)[0][:3])


async def test_no_tool_reward_without_a_tool_reward() -> None:
    assert tool_scores(await roll_out(EchoTool(), CALL, "ok")) == [[]]


async def test_calc_reward_goes_to_a_sampled_token() -> None:
    # The script is over: the engine fails after the tool has answered.
    found = await roll_out(EchoTool({"reward": 1.0}), CALL)
    assert found.stop_reason is StopReason.ENGINE_ERROR
    assert found.trajectory.mask[-1] == 0
    assert tool_scores(found) == [[]]  # invalid
    found.trajectory.stop_reason = StopReason.WALL_CLOCK
    assert tool_scores(found) == [[(len(CALL), 1.0)]]


async def test_an_invalid_conversation_gets_no_tool_reward() -> None:
    found = await roll_out(EchoTool({"reward": 1.0}))
    assert found.calc_rewards == {"echo": 1.0}
    assert not found.valid
    assert tool_scores(found) == [[]]


def test_the_setting() -> None:
    assert read_settings(None).tool_reward.mode == "none"
    settings = read_settings({"tool_reward": {"mode": "add", "weight": 0.1}}).tool_reward
    assert (settings.mode, settings.weight) == ("add", 0.1)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"mode": "sum"}, r"tool_reward.mode: Input should be 'none', 'add' or 'replace', got 'sum'"),
        ({"wieght": 2}, r"tool_reward.wieght: unknown setting; did you mean 'weight'\?"),
        ({"timeout": 2}, r"tool_reward.timeout: unknown setting; known are \['mode', 'weight'\]"),
        ({"weight": 0}, r"tool_reward.weight: Input should be greater than 0, got 0"),
        ({"weight": float("inf")}, r"tool_reward.weight: Input should be a finite number, got inf"),
        ("add", r"tool_reward: expected a mapping, got 'add'; known are \['mode', 'weight'\]"),
    ],
)
def test_a_setting_that_cannot_be(given: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_settings({"tool_reward": given})


def test_every_key_is_documented() -> None:
    calls = [call(attempts=1, metrics={"hits": 1}), call(attempts=1)]
    extra = {"score": 1.0, "reported": {"acc": 1.0}, "tool_score": 1.0}
    found = metrics_of(outcome(*calls, calc_rewards={"search": 1.0}), **extra)
    found |= aggregate([{**stats_of(outcome()), **extra}, stats_of(outcome())])
    text = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    documented = {word for line in text.splitlines() if line.startswith("|") for word in re.findall(r"`([^`]+)`", line)}
    places = {"tools/search/": "tools/<tool>/", "metrics/hits": "metrics/<key>", "reward/acc/": "reward/<key>/"}
    for key in found:
        named = re.sub("^stop/.*", "stop/<reason>", key)
        for part, place in places.items():
            named = named.replace(part, place)
        assert named in documented, key


def keyed(stats: dict[str, Stats]) -> dict[RowKey, Stats]:
    return {RowKey.parse(name): own for name, own in stats.items()}


@pytest.mark.parametrize("name", ["u_1_0", "a_b_1_12", "u", "u_1", "u_1_x", ""])
def test_a_rows_name_is_taken_apart_and_given_back(name: str) -> None:
    assert str(RowKey.parse(name)) == name


def test_rows_of_a_conversation_count_once() -> None:
    stats = {**stats_of(outcome(turns=2)), "conversation": {"rows": 2, "row": 0}, "score": None, "turns": [{"turn": 0}]}
    last = {**stats, "conversation": {"rows": 2, "row": 1}, "score": 1.0, "turns": [{"turn": 1}]}
    alone = {**stats, "conversation": {"rows": 1, "row": 0}, "score": 0.0}
    found = conversations(keyed({"u_0_1": last, "u_0_0": stats, "u_1_0": alone}))
    found.sort(key=lambda each: each["score"])
    assert [(each["score"], each["turns"], each["group"]) for each in found] == [
        (0.0, [{"turn": 0}], "u"),
        (1.0, [{"turn": 0}, {"turn": 1}], "u"),
    ]
    metrics = aggregate(found)
    assert (metrics["trajectories"], metrics["rows/mean"], metrics["rows/max"]) == (2, 1.5, 2)
    assert "rows/mean" not in aggregate(conversations(keyed({"u_1_0": alone})))


def test_sessions_of_agents() -> None:
    made = outcome(stop=StopReason.AGENT_ERROR)
    places: list[int | str] = [0, "undelivered", "dropped_row", 1, "undelivered"]
    made.turns = [Turn(number, place=place) for number, place in enumerate(places)]
    made.turns[0].said = AssistantTurn("", [ToolCall("add", "{}", "a"), MalformedCall("add(", "no end", "b")])
    made.turns[3].said = AssistantTurn("", [ToolCall("add", "{}", "c")])
    made.session = SessionReport(2, {"temperature": 3}, reward=0.0, end="stuck")
    other = outcome(stop=StopReason.FINISHED)
    other.turns = [Turn(0)]
    other.session = SessionReport(1, {"temperature": 1, "seed": 1})
    stats = {"u_0_0": {**stats_of(made), "conversation": {"rows": 2, "row": 0}}}
    del stats["u_0_0"]["session"]
    stats["u_0_1"] = {**stats_of(made), "conversation": {"rows": 2, "row": 1}}
    stats["u_1_0"] = {**stats_of(other), "conversation": {"rows": 1, "row": 0}}
    found = aggregate(conversations(keyed(stats)))
    assert {key: value for key, value in found.items() if key.startswith("proxy/")} == {
        "proxy/roots/mean": 1.5,
        "proxy/roots/max": 2,
        "proxy/rows/mean": 1.5,
        "proxy/rows/max": 2,
        "proxy/completions/mean": 3.0,
        "proxy/completions/max": 5,
        "proxy/untrained/too_old": 0,
        "proxy/untrained/invalid": 0,
        "proxy/untrained/undelivered": 2,
        "proxy/untrained/dropped_row": 1,
        "proxy/untrained/not_selected": 0,
        "proxy/untrained/not_trained_role": 0,
        "proxy/unenforced/temperature": 4,
        "proxy/unenforced/seed": 1,
        "proxy/agent_errors": 1,
        "proxy/stuck_agents": 1,
        "proxy/reward/mean": 0.0,
    }
    assert {key: value for key, value in found.items() if re.fullmatch("calls/(total|per_.*|error_rate)", key)} == {
        "calls/total": 3,
        "calls/per_trajectory/mean": 1.5,
        "calls/per_trajectory/max": 3,
        "calls/error_rate": 0,
    }
    text = (ROOT / "docs" / "reference" / "metrics.md").read_text()
    for key in found:
        named = re.sub("untrained/.*", "untrained/<cause>", re.sub("unenforced/.*", "unenforced/<field>", key))
        assert not key.startswith("proxy/") or f"`{named}`" in text, key


def test_an_interaction_and_what_its_groups_begin_with() -> None:
    having = outcome(interaction_s=2.0, opening=CheckedReply("Go north?"), score=3.0)
    having.turns[0].reply = CheckedReply("a", reward=0.5, state="s", metrics={"length": 2})
    having.turns[1].reply = CheckedReply("b", state="s")
    other = outcome(interaction_s=4.0, opening=CheckedReply("Go south?"), stop=StopReason.ENVIRONMENT_ERROR)
    stats = {f"{uid}_0_0": {**stats_of(having), "turns": [{"state": "s"}, {"state": "s"}]} for uid in "uv"}
    stats |= {"v_1_0": {**stats_of(other), "turns": []}}
    found = aggregate(conversations(keyed(stats)))
    assert {key: value for key, value in found.items() if key.startswith("interaction/")} == {
        "interaction/replies/mean": 4 / 3,
        "interaction/replies/max": 2,
        "interaction/failures": 1,
        "interaction/reward/mean": 1 / 3,
        "interaction/score/mean": 2,
        "interaction/openings_differ": 1,
        "interaction/states_met_again_share": 2 / 3,
        "interaction/seconds/p50": 2.0,
        "interaction/seconds/p95": 3.8,
        "interaction/metrics/length": 2,
        "interaction/metrics/length/replies": 2,
    }
