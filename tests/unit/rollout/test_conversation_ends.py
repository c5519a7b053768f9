"""The ends of the loop: every stop reason, the order of limits, cancellation, an engine or a tool that fails."""

import ast
import asyncio
import contextlib
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import CharTokenizer, EchoTool
from tests.scripted import CALL, run
from verl_multiturn import Generation, Limits, ScriptedEngine, StopReason, ToolContractError
from verl_multiturn.rollout import limits as limits_module
from verl_multiturn.rollout.life import stopped
from verl_multiturn.rollout.limits import ConversationProgress


@pytest.mark.parametrize(
    ("turns", "limits", "reason", "executed"),
    [
        (["no call"], {}, StopReason.FINISHED, 0),
        ([CALL] * 9, {"max_assistant_turns": 2}, StopReason.MAX_ASSISTANT_TURNS, 1),
        ([CALL] * 9, {"max_user_turns": 2}, StopReason.MAX_USER_TURNS, 2),
        (["no call"], {"max_assistant_turns": 1}, StopReason.FINISHED, 0),
        ([CALL] * 9, {"response_length": 20}, StopReason.RESPONSE_LENGTH, 0),
        ([CALL] * 9, {"response_length": len(CALL) + 3}, StopReason.RESPONSE_LENGTH, 1),
        (["x"], {"prompt_length": 2}, StopReason.PROMPT_TOO_LONG, 0),
        ([], {}, StopReason.ENGINE_ERROR, 0),
        ([CALL], {}, StopReason.ENGINE_ERROR, 1),
    ],
)
async def test_stop_reasons(turns: list[str], limits: dict[str, Any], reason: StopReason, executed: int) -> None:
    tool = EchoTool()
    outcome = await run(turns, tool, **limits)
    assert outcome.stop_reason is reason
    assert tool.counts["execute"] == executed
    assert tool.counts["create"] == tool.counts["release"] == (reason is not StopReason.PROMPT_TOO_LONG)
    assert outcome.trajectory.response_length <= limits.get("response_length", 400)
    assert outcome.valid == (reason not in (StopReason.PROMPT_TOO_LONG, StopReason.ENGINE_ERROR))


# All limits are reached at once; each line removes the one that decided before.
@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, StopReason.RESPONSE_LENGTH),
        ({"cut": "turn"}, StopReason.TURN_LENGTH),
        ({"cut": None, "calls": 0}, StopReason.FINISHED),
        ({"cut": None}, StopReason.RESPONSE_LENGTH),
        ({"cut": None, "response_tokens": 4}, StopReason.MAX_ASSISTANT_TURNS),
        ({"cut": None, "response_tokens": 4, "assistant_turns": 0}, StopReason.MAX_USER_TURNS),
        ({"cut": None, "response_tokens": 4, "assistant_turns": 0, "user_turns": 0}, StopReason.MAX_TOOL_CALLS),
        (
            {"cut": None, "response_tokens": 4, "assistant_turns": 0, "user_turns": 0, "told_calls_are_used_up": False},
            StopReason.MALFORMED_CALLS,
        ),
        (
            {
                "cut": None,
                "response_tokens": 4,
                "assistant_turns": 0,
                "user_turns": 0,
                "told_calls_are_used_up": False,
                "malformed_in_a_row": 0,
            },
            None,
        ),
    ],
)
def test_the_order_of_limits_is_locked(changes: dict[str, Any], reason: StopReason | None) -> None:
    limits = Limits(10, response_length=5, max_assistant_turns=1, max_user_turns=1, max_malformed_turns=1)
    all_reached = ConversationProgress(
        response_tokens=5,
        assistant_turns=1,
        user_turns=1,
        cut="response",
        calls=1,
        told_calls_are_used_up=True,
        malformed_in_a_row=1,
    )
    assert limits.after_assistant_turn(replace(all_reached, **changes)) is reason


def test_what_fits() -> None:
    limits = Limits(10, response_length=5)
    assert limits.fits_observation(2, 2)
    assert not limits.fits_observation(2, 3)
    assert limits.turn_budget(2) == 3
    assert Limits(10, response_length=5, turn_length=2).turn_budget(2) == 2
    assert Limits(10, response_length=5, turn_length=2).turn_budget(4) == 1


def test_every_stop_reason_is_documented() -> None:
    source = Path(limits_module.__file__).read_text()
    body = next(node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == "StopReason")
    pairs = itertools.pairwise([*body.body[1:], None])
    undocumented = [
        line.targets[0].id  # type: ignore[attr-defined]
        for line, after in pairs
        if isinstance(line, ast.Assign) and not isinstance(after, ast.Expr)
    ]
    assert undocumented == []


async def test_calls_are_used_up_the_model_is_told_and_then_it_ends() -> None:
    tool = EchoTool()
    outcome = await run([CALL + CALL, CALL, "never asked"], tool, max_tool_calls=1, response_length=900)
    assert outcome.stop_reason is StopReason.MAX_TOOL_CALLS
    assert [str(call.status) for call in outcome.calls] == ["ok", "over_limit"]
    assert "all 1 tool calls are used up" in CharTokenizer().decode(outcome.trajectory.ids)
    assert tool.counts["execute"] == 1


async def test_the_model_may_answer_after_its_last_call() -> None:
    outcome = await run([CALL, CALL, "ok"], EchoTool(), max_tool_calls=1, response_length=900)
    assert outcome.stop_reason is StopReason.FINISHED
    assert [str(call.status) for call in outcome.calls] == ["ok", "over_limit"]


async def test_malformed_turns_in_a_row_end_it_and_a_good_call_starts_anew() -> None:
    bad = "<tool_call>{</tool_call>"
    turns = [bad, CALL, bad, bad + CALL, bad, bad, "never asked"]
    outcome = await run(turns, EchoTool(), max_malformed_turns=2, response_length=2000)
    assert outcome.stop_reason is StopReason.MALFORMED_CALLS
    assert outcome.trajectory.turns == 6
    assert [str(call.status) for call in outcome.calls].count("malformed") == 4


async def test_a_turn_has_its_own_budget() -> None:
    outcome = await run(["x" * 50], turn_length=10)
    assert outcome.stop_reason is StopReason.TURN_LENGTH
    assert sum(outcome.trajectory.mask) == 10
    outcome = await run(["x" * 50], turn_length=10, response_length=10)
    assert outcome.stop_reason is StopReason.RESPONSE_LENGTH


async def test_wall_clock_keeps_what_was_sampled() -> None:
    tool = EchoTool({"execute": "hang"})
    outcome = await run([CALL, "ok"], tool, wall_clock_s=1.0)
    assert outcome.stop_reason is StopReason.WALL_CLOCK
    assert sum(outcome.trajectory.mask) == len(CALL) + 1
    assert tool.counts["release"] == 1


class LyingEngine:
    """An engine that answers with a generation that is not valid."""

    def __init__(self, **changes: Any) -> None:
        self.generation = Generation(**{"ids": [65], "logprobs": [-0.5], "versions": [0], "finish": "stop", **changes})

    async def generate(self, *args: Any, **kwargs: Any) -> Generation:
        return self.generation


@pytest.mark.parametrize(
    "changes",
    [
        {"ids": [], "logprobs": [], "versions": []},
        {"ids": [65] * 401, "logprobs": [-0.5] * 401, "versions": [0] * 401},
        {"logprobs": []},
        {"logprobs": [float("nan")]},
        {"versions": [1, 2]},
    ],
)
async def test_a_lying_engine_ends_one_request(changes: dict[str, Any]) -> None:
    outcome = await run(LyingEngine(**changes))
    assert outcome.stop_reason is StopReason.ENGINE_ERROR
    assert outcome.error
    assert not outcome.valid


async def test_an_aborted_turn_is_kept_and_ends_the_request() -> None:
    outcome = await run(LyingEngine(finish="abort"))
    assert outcome.stop_reason is StopReason.ENGINE_ERROR
    assert outcome.trajectory.mask == [0, 0, 0, 1]
    assert not outcome.valid


async def test_an_authors_mistake_raises() -> None:
    tool = EchoTool({"returns": 42})
    with pytest.raises(ToolContractError, match=r"execute must return .* got 42"):
        await run([CALL, "ok"], tool)
    assert tool.counts["release"] == 1


async def test_cancellation_releases() -> None:
    tool = EchoTool({"execute": "hang"})
    task = asyncio.create_task(run([CALL, "ok"], tool))
    await asyncio.wait_for(tool.started.wait(), 60)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert tool.events[-1][0] == "release"
    assert tool.counts["release"] == 1


@pytest.mark.parametrize("times", [1, 2, 3])
async def test_cancellation_again_and_again_still_waits_for_release(times: int) -> None:
    tool = EchoTool({"execute": "hang", "release": 0.05})
    task = asyncio.create_task(run([CALL, "ok"], tool))
    await asyncio.wait_for(tool.started.wait(), 60)
    for _ in range(times):
        task.cancel()
        await asyncio.sleep(0.01)
    with pytest.raises(asyncio.CancelledError):
        await task
    assert tool.events[-1] == ("released",)


async def test_time_that_runs_out_in_create_leaves_a_prompt() -> None:
    outcome = await run([CALL, "ok"], EchoTool({"create": "hang"}), wall_clock_s=1.0)
    assert outcome.stop_reason is StopReason.WALL_CLOCK
    assert outcome.trajectory.prompt_length == 3
    assert not outcome.valid


async def test_time_that_runs_out_after_the_end_does_not_change_it() -> None:
    outcome = await run(["done"], EchoTool({"calc_reward": "hang"}), wall_clock_s=1.0)
    assert outcome.stop_reason is StopReason.FINISHED


class Submit(EchoTool):
    ends_conversation = True


async def test_a_tool_that_ends_the_conversation() -> None:
    outcome = await run([CALL, "never sampled"], Submit())
    assert outcome.stop_reason is StopReason.FINISHED
    assert outcome.trajectory.mask == [0] * 3 + [1] * (len(CALL) + 1)
    assert [call.text for call in outcome.calls] == ["hi"]

    # A tool that refuses the answer does not end the conversation.
    outcome = await run([CALL, "sorry"], Submit({"execute": ValueError("no number")}))
    assert outcome.messages[-1]["content"] == "sorry"


async def test_the_last_turn_may_hand_in_an_answer() -> None:
    outcome = await run([CALL], Submit(), max_assistant_turns=1)
    assert (outcome.stop_reason, len(outcome.calls)) == (StopReason.FINISHED, 1)
    outcome = await run([CALL], Submit({"execute": ValueError("no number")}), max_assistant_turns=1)
    assert (outcome.stop_reason, len(outcome.calls)) == (StopReason.MAX_ASSISTANT_TURNS, 1)
    outcome = await run([CALL], EchoTool(), max_assistant_turns=1)
    assert (outcome.stop_reason, len(outcome.calls)) == (StopReason.MAX_ASSISTANT_TURNS, 0)


async def test_what_the_engine_sampled_when_the_time_was_up_is_kept() -> None:
    class Slow(ScriptedEngine):
        """An engine that is still sampling, and stops on request."""

        async def generate(self, *args: Any, **kwargs: Any) -> Any:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()
            return replace(await super().generate(*args, **kwargs), finish="abort")

    tokenizer = CharTokenizer()
    outcome = await run(Slow([tokenizer.turn(CALL)]), EchoTool(), wall_clock_s=0.2)
    assert (outcome.stop_reason, outcome.valid) == (StopReason.WALL_CLOCK, True)
    assert sum(outcome.trajectory.mask) == len(CALL) + 1


async def test_a_generation_that_ends_without_a_token_when_the_time_is_up_leaves_none() -> None:
    class Slow(ScriptedEngine):
        async def generate(self, *args: Any, **kwargs: Any) -> Any:
            await asyncio.Event().wait()

    outcome = await run(Slow([]), EchoTool(), wall_clock_s=0.2)
    assert (outcome.stop_reason, outcome.trajectory.turns) == (StopReason.WALL_CLOCK, 0)


async def test_the_time_for_which_an_engine_stands_still_does_not_count() -> None:
    class Paused(ScriptedEngine):
        async def generate(self, *args: Any, **kwargs: Any) -> Any:
            with stopped():
                await asyncio.sleep(0.6)
            return await super().generate(*args, **kwargs)

    tokenizer = CharTokenizer()
    outcome = await run(Paused([tokenizer.turn("ok")]), EchoTool(), wall_clock_s=0.3)
    assert outcome.stop_reason is StopReason.FINISHED


async def test_the_clock_goes_on_after_a_pause() -> None:
    class Paused(ScriptedEngine):
        async def generate(self, *args: Any, **kwargs: Any) -> Any:
            with stopped():
                await asyncio.sleep(0.1)
            await asyncio.Event().wait()

    assert (await run(Paused([]), EchoTool(), wall_clock_s=0.2)).stop_reason is StopReason.WALL_CLOCK


async def test_a_clock_that_nobody_runs_can_be_stopped() -> None:
    with stopped():
        pass


async def test_an_engine_that_cancels_itself_is_a_failed_one() -> None:
    class Gone(ScriptedEngine):
        async def generate(self, *args: Any, **kwargs: Any) -> Any:
            raise asyncio.CancelledError

    assert (await run(Gone([]))).stop_reason is StopReason.ENGINE_ERROR


async def test_an_overlong_prompt_is_refused_aloud(caplog: pytest.LogCaptureFixture) -> None:
    outcome = await run(["ok"], prompt_length=2)
    assert outcome.error.startswith("the prompt has 3 tokens with its tools' schemas, and may have 2; ")
    assert outcome.error in caplog.text
