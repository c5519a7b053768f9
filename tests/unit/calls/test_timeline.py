"""The timeline of a conversation: its past waits, and its present ones."""

from typing import Any

import pytest

from tests.conftest import EchoTool
from tests.idle_loop import skip_waits
from tests.scripted import CALL, run
from tests.unit.rollout.test_context import Counting, play
from verl_multiturn import StopReason, ToolResponse
from verl_multiturn.calls.timeline import Timeline, during, is_kept, kept
from verl_multiturn.rollout.context import Context
from verl_multiturn.rollout.life import Life, live


def kinds(timeline: Timeline) -> list[tuple[str, str, int | None]]:
    return [(span.kind, span.name, span.turn) for span in timeline.spans]


async def test_a_conversation_with_calls_at_once() -> None:
    timeline = Timeline()
    with live(Life("r", timeline=timeline)):
        await run([CALL + CALL, "ok"], EchoTool({"reward": 1.0}))
    assert kinds(timeline) == [
        ("create", "echo", None),
        ("generation", "", 0),
        ("call", "echo", 0),
        ("call", "echo", 0),
        ("generation", "", 1),
        ("reward", "echo", 1),
        ("release", "echo", 1),
    ]
    assert all(span.start <= span.end for span in timeline.spans)
    assert (timeline.turns, timeline.doing(), is_kept()) == (2, None, False)


async def test_a_user_is_an_interaction() -> None:
    timeline = Timeline()
    with live(Life("r", timeline=timeline)):
        await play(["a", "b"], Counting(), Context())
    assert kinds(timeline) == [
        ("interaction", "counting", None),
        ("generation", "", 0),
        ("interaction", "counting", 0),
        ("generation", "", 1),
        ("interaction", "counting", 1),
        ("interaction", "counting", 1),
    ]


async def test_what_is_waited_for_now() -> None:
    timeline = Timeline()
    with kept(timeline), during("request"):
        assert timeline.doing() is None
        with during("generation", turn=3):
            with during("pause"):
                assert (timeline.doing() or ("",))[0] == "pause"
            assert (timeline.doing() or ("",))[0] == "generation"
        with during("call", "search"), during("call", "python"):
            assert (timeline.doing() or ("",))[0] == "call search"
    assert kinds(timeline) == [
        ("pause", "", 3),
        ("generation", "", 3),
        ("call", "python", 3),
        ("call", "search", 3),
        ("request", "", None),
    ]
    with during("call", "search"):
        pass
    assert len(timeline.spans) == 5


async def test_the_whole_answer_is_kept_where_somebody_keeps_the_timeline() -> None:
    long = "x" * 1_200_000
    turns = [CALL, "ok"]

    async def answer() -> Any:
        (call,) = (await run(turns, EchoTool({"returns": ToolResponse(long)}))).calls
        return call

    assert (await answer()).whole is None
    with live(Life("r", timeline=Timeline())):
        call = await answer()
    assert (len(call.text) < 101_000, call.truncated, call.whole) == (True, True, long[:1_000_000])
    with live(Life("r", timeline=Timeline())):
        (short,) = (await run(turns, EchoTool())).calls
    assert short.whole is None


@pytest.mark.parametrize(("behaviour", "doing"), [({"execute": "hang"}, "tools"), ({"calc_reward": "hang"}, "score")])
async def test_what_a_conversation_was_doing_when_its_time_was_up(behaviour: dict[str, str], doing: str) -> None:
    skip_waits()
    outcome = await run([CALL, "ok"], EchoTool(dict(behaviour)), wall_clock_s=0.5)
    assert outcome.time_up == doing
    assert (outcome.stop_reason is StopReason.WALL_CLOCK) == (doing == "tools")
