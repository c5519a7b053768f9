"""τ²'s customers, tools and verdicts in whole conversations, and failures of a world or a user."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio

from tests.conftest import until
from tests.unit.interactions.test_interaction_llm_user import Endpoint, said
from verl_multiturn import ConfigError
from verl_multiturn.interactions.errors import EnvironmentOutageError
from verl_multiturn.rollout.limits import Limits, StopReason
from verl_multiturn.rollout.outcome import Outcome
from verl_multiturn.rollout.scripted_chat import scripted_rollout
from verl_multiturn.runs.data import tool_call
from verl_multiturn.task_sets.tau2.package import GREETING, STOP_WORDS, agent_prompt, tasks_of, user_prompt
from verl_multiturn.task_sets.tau2.tools import domain_tools
from verl_multiturn.task_sets.tau2.user import Customer, CustomerSettings, TauUser
from verl_multiturn.task_sets.tau2.world_process import DomainData, serve
from verl_multiturn.task_sets.tau2.worlds import World, close_worlds, world_of, worlds_of

# The tests share a zygote, which takes two seconds to start.
pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

LIMITS = Limits(prompt_length=100_000, response_length=100_000, max_tool_response_length=100_000)
CANCEL = "69"
"""A task of retail in which an order is cancelled."""


class Scripted(Customer):
    """A customer who writes given texts, and records the texts read."""

    def __init__(self, *texts: str, **config: Any) -> None:
        super().__init__({}, CustomerSettings(domain="retail", **config))
        self._texts = list(texts)
        self.read: list[list[dict[str, Any]]] = []

    async def write(self, messages: Sequence[Any]) -> str:
        self.read.append(list(messages))
        text = self._texts.pop(0)
        if text == "down":
            raise EnvironmentOutageError("nobody plays the user")
        return text


@pytest_asyncio.fixture(autouse=True, scope="module", loop_scope="module")
async def _closed() -> AsyncIterator[None]:
    yield
    await close_worlds("retail")


async def talk(user: Customer, turns: Sequence[str], task: str = CANCEL, limits: Limits = LIMITS) -> Outcome:
    """Roll out a conversation in which the model writes these turns."""
    prompt = [{"role": "system", "content": agent_prompt("retail")}, {"role": "assistant", "content": GREETING}]
    outcome = await scripted_rollout(
        domain_tools("retail"),
        turns,
        prompt,
        interaction=user,
        interaction_kwargs={"task": task, "do_nothing": 0.0},
        limits=limits,
    )
    with pytest.raises(ConfigError):  # nothing of it remains
        world_of("x", "retail")
    return outcome


def gold(task: str) -> list[str]:
    """Return the calls that a task asks for, as a model writes them."""
    return [tool_call(each.name, dict(each.arguments)) for each in tasks_of("retail")[task].evaluation_criteria.actions]


async def test_a_served_customer_earns_and_a_silent_agent_does_not() -> None:
    user = Scripted("I am Ann.", "Yes, please.", f"Thanks. {STOP_WORDS[0]}")
    outcome = await talk(user, ["Shall I?", *gold(CANCEL), "Done."])
    assert outcome.stop_reason is StopReason.ENVIRONMENT_DONE
    assert outcome.score == 1.0
    assert [call.status for call in outcome.calls] == ["ok"] * len(gold(CANCEL))
    assert json.loads(outcome.calls[-1].text)["status"] == "cancelled"
    assert outcome.replies[-1].metrics == {"right": 1.0, "db": 1.0, "said": 1.0, "actions": 1.0, "do_nothing": 0.0}

    # It read its own part and messages to it: neither calls, nor their answers, nor the policy.
    read = user.read[-1]
    assert read[0] == {"role": "system", "content": user_prompt("retail", CANCEL)}
    assert [each["content"] for each in read[1:]] == [GREETING, "I am Ann.", "Shall I?", "Yes, please.", "Done."]
    assert [each["role"] for each in read[1:]] == ["user", "assistant", "user", "assistant", "user"]

    silent = await talk(Scripted("I am Ann.", STOP_WORDS[1]), ["No."])
    assert silent.stop_reason is StopReason.ENVIRONMENT_DONE
    assert silent.score == 0.0


async def test_an_endpoint_plays_the_customer() -> None:
    endpoint = Endpoint([said("<think>Who am I?</think>I am Ann."), said(f"Bye. {STOP_WORDS[2]}")])
    server = await asyncio.start_server(endpoint.answer, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
    user = TauUser({"domain": "retail", "base_url": url, "model": "ann"})
    outcome = await talk(user, [*gold(CANCEL), "Done."])
    server.close()
    assert outcome.stop_reason is StopReason.ENVIRONMENT_DONE
    assert outcome.score == 1.0
    assert [body["temperature"] for body in endpoint.bodies] == [0.0, 0.0]
    assert endpoint.bodies[0]["messages"] == [
        {"role": "system", "content": user_prompt("retail", CANCEL)},
        {"role": "user", "content": GREETING},
    ]


async def test_what_the_user_says_does_not_count_as_said_by_the_agent() -> None:
    task = next(each for each in tasks_of("retail").values() if each.evaluation_criteria.communicate_info)
    said = " ".join(task.evaluation_criteria.communicate_info)
    words = f"Agent: {said} User: ok {STOP_WORDS[0]}"
    for turn, user, right in [("Bye.", words, 0.0), (said, STOP_WORDS[0], 1.0)]:
        outcome = await talk(Scripted(said, user), [*gold(task.id), turn], task.id)
        assert outcome.replies[-1].metrics["said"] == right
        assert outcome.score == right


async def test_a_user_who_never_stops_is_cut_off_and_earns_nothing() -> None:
    outcome = await talk(Scripted("I am Ann.", "And?", max_user_turns=2), [*gold(CANCEL), "Done.", "Done."])
    assert outcome.stop_reason is StopReason.ENVIRONMENT_TRUNCATED
    assert outcome.score == 0.0
    assert outcome.valid


async def test_an_agent_that_fails_too_often_is_cut_off() -> None:
    wrong = tool_call("get_order_details", {"order_id": "#W0"})
    outcome = await talk(Scripted("I am Ann."), [*[wrong] * 10, "Hm."])
    assert outcome.calls[0].text == "Error: Order not found"
    assert outcome.stop_reason is StopReason.ENVIRONMENT_TRUNCATED
    assert outcome.replies[-1].metrics == {"right": 0.0, "too_many_errors": 1.0, "do_nothing": 0.0}
    assert outcome.valid


@pytest.mark.parametrize(
    ("texts", "error"),
    [
        ([STOP_WORDS[0]], "stopped before the agent's first turn"),
        (["I am Ann. " + STOP_WORDS[2]], "stopped before the agent's first turn"),
        (["down"], "EnvironmentOutageError: nobody plays the user"),
        (["I am Ann.", "down"], "EnvironmentOutageError: nobody plays the user"),
    ],
)
async def test_a_user_who_cannot_be_played_makes_the_conversation_invalid(texts: list[str], error: str) -> None:
    outcome = await talk(Scripted(*texts), ["Hello."])
    assert outcome.stop_reason is StopReason.ENVIRONMENT_ERROR
    assert not outcome.valid
    assert error in outcome.error


async def test_a_call_that_hangs_is_ended_and_the_world_goes_on() -> None:
    world = World(worlds_of("retail"))
    first, *rest = tasks_of("retail")[CANCEL].evaluation_criteria.actions
    await world.call(first.name, first.arguments)
    before = world.process
    hanging = asyncio.ensure_future(world.call("calculate", {"expression": "9**9**9**9"}))
    await until(lambda: world.process is None)  # it is busy
    hanging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hanging
    for each in rest:
        assert not (await world.call(each.name, each.arguments))[1]
    assert world.process not in (before, None)
    assert world.errors == 1
    assert (await world.judge(CANCEL, [GREETING])).reward == 1.0
    await world.close()


async def test_a_world_that_is_killed_is_made_again() -> None:
    world = World(worlds_of("retail"))
    *first, last = tasks_of("retail")[CANCEL].evaluation_criteria.actions
    for each in first:
        await world.call(each.name, each.arguments)
    assert world.process is not None
    os.kill(world.process, signal.SIGKILL)
    content, failed = await world.call(last.name, last.arguments)
    assert not failed, content
    assert (await world.judge(CANCEL, [GREETING])).reward == 1.0
    await world.close()


async def test_a_child_that_a_call_forked_answers_nothing() -> None:
    class Forking:
        def get_response(self, made: Any) -> Any:
            os.fork()  # and the child, which should do its work and end, returns, too
            return SimpleNamespace(content="done", error=False)

    messages = SimpleNamespace(ToolCall=lambda **_: None)
    ours, theirs = socket.socketpair()
    if (process := os.fork()) == 0:
        ours.close()
        try:
            serve(theirs, DomainData("retail", [Forking()], {}, messages, {}))
        finally:
            os._exit(0)
    theirs.close()
    with ours.makefile("rwb") as stream:
        stream.write(json.dumps({"do": "call", "name": "think", "arguments": {}}).encode() + b"\n")
        stream.flush()
        ours.shutdown(socket.SHUT_WR)
        answers = [json.loads(line) for line in stream]
    ours.close()
    await asyncio.to_thread(os.waitpid, process, 0)
    assert answers == [{"process": process}, {"content": "done", "error": False}]


async def test_no_world_is_shared() -> None:
    gold_calls = tasks_of("retail")[CANCEL].evaluation_criteria.actions
    worlds = [World(worlds_of("retail")) for _ in range(8)]
    for each in gold_calls:  # a second cancellation in one world would fail
        answers = await asyncio.gather(*[world.call(each.name, each.arguments) for world in worlds])
        assert len(set(answers)) == 1
        assert not answers[0][1]
    fresh = World(worlds_of("retail"))
    verdicts = await asyncio.gather(*[world.judge(CANCEL, [GREETING]) for world in [*worlds, fresh]])
    assert [each.reward for each in verdicts] == [1.0] * 8 + [0.0]
    assert asdict(verdicts[-1]) == {"reward": 0.0, "db": 0.0, "communicate": 1.0, "actions": 0.0}
    for world in worlds:
        await world.close()


async def test_what_a_calculation_takes_is_not_taken_again_for_the_verdict() -> None:
    world = World(worlds_of("retail"))
    assert await world.call("calculate", {"expression": "2 * 21"}) == ("42.0", False)
    world.calls[0]["content"] = "something that a second calculation would not give"
    assert (await world.judge(CANCEL, [GREETING])).reward == 0.0
    await world.close()


async def test_the_tools_need_the_user_of_their_domain() -> None:
    with pytest.raises(ConfigError, match=r"the tools of τ²'s 'retail' need a user of that domain.*TauUser"):
        await domain_tools("retail")[0].create("nobody")


async def test_a_task_that_is_not_there_is_refused() -> None:
    user = Scripted("I am Ann.")
    for task in ("114", 3, None):
        with pytest.raises(ConfigError, match=r"task of 'retail', '0' to '113', got "):
            await user.start("a", task=task)  # type: ignore[arg-type]  # it is wrong
