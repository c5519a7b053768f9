"""Sessions of agents: who got a completion, ends of sessions, refusals of requests, and which rows stay."""

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from tests.agent_sessions import (
    Agent,
    echo,
    make_run,
    said,
    texts,
    turns,
    user,
)
from verl_multiturn import ConfigError, EngineError
from verl_multiturn.proxy.protocols.requests import ChatRequest, RefusedError
from verl_multiturn.proxy.sessions import rows as session_rows
from verl_multiturn.rollout.engines.protocol import Generation
from verl_multiturn.rollout.limits import StopReason
from verl_multiturn.rollout.scripted_chat import tiny_tokenizer

HELLO = [user("x")]


async def refused(agent: Agent, *args: Any, **kwargs: Any) -> RefusedError:
    with pytest.raises(RefusedError) as caught:
        await agent.ask(*args, **kwargs)
    return caught.value


async def test_what_nobody_got_is_kept_for_the_next_identical_request() -> None:
    agent = Agent(make_run(turns("a", "b", "c")))
    lost = await agent.ask(HELLO, lost=True)
    taken = await agent.ask(HELLO)
    assert taken.id == lost.id
    again = await agent.ask(HELLO)
    assert again.content == "b"
    await agent.ask(HELLO, lost=True, max_tokens=5)
    outcome, _ = await agent.close()
    assert outcome.places == [0, 1, "undelivered"]
    # A gateway rewards by these ids after a session's end: then as before it, nobody got the last one.
    assert [turn.completion for turn in outcome.turns] == [taken.id, again.id, None]


async def test_a_client_that_leaves_early_hands_its_generation_on() -> None:
    begun, go = asyncio.Event(), asyncio.Event()

    class Held:
        asked = 0

        async def generate(self, *_: Any, **__: Any) -> Generation:
            self.asked += 1
            begun.set()
            await go.wait()
            return Generation(tiny_tokenizer().encode("a<|im_end|>"), [-0.5] * 2, [0] * 2, "stop")

    engine = Held()
    agent = Agent(make_run(engine))  # type: ignore[arg-type]
    first = agent.session.begin(ChatRequest(HELLO))
    await begun.wait()
    first.undelivered()
    second = agent.session.begin(ChatRequest(HELLO))
    await asyncio.sleep(0.01)
    go.set()
    await second.ready()
    second.delivered()
    assert engine.asked == 1
    assert [completion.content for completion in second.completions] == ["a"]
    outcome, _ = await agent.close()
    assert outcome.places == [0]


async def test_a_client_that_leaves_before_its_prompt_is_there_asks_for_nothing() -> None:
    agent = Agent(make_run(turns("a")))
    delivery = agent.session.begin(ChatRequest(HELLO))
    delivery.undelivered()
    await delivery.ready()
    outcome, _ = await agent.close()
    assert outcome.places == []
    assert not outcome.valid
    assert outcome.trajectory.prompt_length > 1


async def test_an_echo_says_that_a_completion_arrived() -> None:
    agent = Agent(make_run(turns("a", "b", "c")))
    lost = await agent.ask(HELLO, lost=True)
    await agent.ask([*HELLO, echo(lost), user("y")])
    assert (await agent.ask(HELLO)).content == "c"
    outcome, _ = await agent.close()
    assert outcome.places == [0, 0, 1]


async def test_the_end_cancels_what_is_under_way_and_refuses_the_rest() -> None:
    begun = asyncio.Event()

    begun = asyncio.Event()

    class Endless:
        cancelled = False

        async def generate(self, *_: Any, **__: Any) -> Generation:
            begun.set()
            begun.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled = True
            return Generation(tiny_tokenizer().encode("a"), [-0.5], [0], "abort")  # the part that it has so far

    engine = Endless()
    agent = Agent(make_run(engine))  # type: ignore[arg-type]
    waiting = asyncio.ensure_future(agent.ask(HELLO))
    await begun.wait()
    agent.session.end()
    with pytest.raises(RefusedError, match="this session is over"):
        await waiting
    assert engine.cancelled
    error = await refused(agent, HELLO)
    assert (error.status, error.code) == (400, "session_over")
    outcome, _ = await agent.close(StopReason.WALL_CLOCK)
    assert outcome.places == ["undelivered"]
    assert not outcome.valid


async def test_what_is_delivered_after_the_agents_return_counts_for_nothing() -> None:
    agent = Agent(make_run(turns("a", "b", "c")))
    first = await agent.ask(HELLO)
    lost = await agent.ask([user("y")], lost=True)
    delivery = await agent.session.complete(ChatRequest([*HELLO, echo(first), user("y")]))
    agent.session.returned()
    delivery.delivered()  # its client reads after the return
    assert (await refused(agent, [user("y"), echo(lost), user("z")])).code == "session_over"
    outcome, _ = await agent.close()
    assert outcome.places == [0, "undelivered", "undelivered"]


async def test_the_engine_gets_a_second_chance_and_no_third() -> None:
    class Failing:
        left = 1

        async def generate(self, *_: Any, **__: Any) -> Generation:
            if self.left:
                self.left -= 1
                raise EngineError("no server")
            return Generation(tiny_tokenizer().encode("a<|im_end|>"), [-0.5] * 2, [0] * 2, "stop")

    engine = Failing()
    agent = Agent(make_run(engine))  # type: ignore[arg-type]
    assert (await agent.ask(HELLO)).content == "a"
    assert agent.session.failed == ""
    engine.left = 2
    error = await refused(agent, HELLO)
    assert (error.status, error.code) == (400, "engine_failed")
    assert agent.session.failed == "no server"
    engine.left = 0
    assert (await refused(agent, [user("other")])).code == "engine_failed"
    outcome, _ = await agent.close(StopReason.ENGINE_ERROR)
    assert outcome.error == "no server"
    assert not outcome.valid


@pytest.mark.parametrize(
    "made",
    [
        Generation([], [], [], "stop"),
        Generation([5, 6], [-0.5], [0, 0], "stop"),
        Generation([5], [0.5], [0], "stop"),
        Generation([5], [float("nan")], [0], "stop"),
        Generation([5], [-0.5], [0], "abort"),
        Generation([5] * 9, [-0.5] * 9, [0] * 9, "length"),
    ],
)
async def test_what_is_no_generation_is_in_no_row(made: Generation) -> None:
    class Wrong:
        asked = 0

        async def generate(self, *_: Any, **__: Any) -> Generation:
            self.asked += 1
            return made if self.asked == 1 else Generation([5], [-0.5], [0], "stop")

    agent = Agent(make_run(Wrong()))  # type: ignore[arg-type]
    await agent.ask(HELLO, max_tokens=8)
    outcome, _ = await agent.close()
    assert outcome.places == ["invalid", 0]


async def test_what_does_not_fit_is_refused_with_the_numbers() -> None:
    prompt = len(tiny_tokenizer().encode("<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"))
    agent = Agent(make_run(turns("a", "b" * 200), prompt_length=prompt, response_length=20))
    error = await refused(agent, [user("x " * 50)])
    assert (error.status, error.code) == (400, "context_length_exceeded")
    assert f"maximum context length is {prompt} tokens" in error.message
    first = await agent.ask(HELLO)
    error = await refused(agent, [*HELLO, echo(first), user("y " * 50)])
    assert error.code == "context_length_exceeded"
    assert f"maximum context length is {prompt + 19} tokens" in error.message
    second = await agent.ask([*HELLO, echo(first), user("y")], max_tokens=1_000)
    used = 2 + 1 + prompt
    assert (second.finish, second.prompt_tokens, second.completion_tokens) == ("length", prompt + used, 20 - used)
    assert (await refused(agent, [*HELLO, echo(first), user("y"), echo(second), user("z")])).code == error.code
    outcome, _ = await agent.close()
    assert outcome.trajectory.response_length == 20


async def test_completions_are_used_up() -> None:
    agent = Agent(make_run(turns("a", "b"), max_completions=2))
    await agent.ask(HELLO)
    assert (await refused(agent, HELLO, n=2)).code == "completions_used_up"
    await agent.ask(HELLO, lost=True)
    assert (await agent.ask(HELLO)).content == "b"  # it was paid for already
    error = await refused(agent, HELLO)
    assert (error.status, error.code) == (400, "completions_used_up")


async def test_the_rows_with_most_trained_tokens_stay() -> None:
    agent = Agent(make_run(turns("a", "b", "much longer than the others", "c"), max_rows=2))
    first = await agent.ask(HELLO)
    await agent.ask([*HELLO, echo(first), user("y")])
    await agent.ask([*HELLO, echo(first), user("z")])
    await agent.ask([user("other")])
    outcome, _ = await agent.close()
    # The stem and `b` have more tokens than `c` alone.
    assert outcome.places == [0, 0, 1, "dropped_row"]


async def test_a_stem_stays_with_the_row_that_stays() -> None:
    agent = Agent(make_run(turns("a", "b", "much longer than the others"), max_rows=1))
    first = await agent.ask(HELLO)
    await agent.ask([*HELLO, echo(first), user("y")])
    await agent.ask([*HELLO, echo(first), user("z")])
    outcome, _ = await agent.close()
    assert outcome.places == [0, "dropped_row", 0]
    assert [name for name, _ in texts(outcome)[0]] == ["PROMPT", "SAMPLED", "TEMPLATE", "OBSERVATION", "SAMPLED"]


async def test_select_leaves_completions_out_that_stay_context() -> None:
    def select(completions: Sequence[Any]) -> list[str]:
        assert [view.content for view in completions] == ["a", "b", "title"]
        assert completions[1].messages == [*HELLO, said("a"), user("y")]
        assert completions[1].parent == completions[0].id
        return [view.id for view in completions if view.content == "b"]

    agent = Agent(make_run(turns("a", "b", "title"), select=select))
    first = await agent.ask(HELLO)
    await agent.ask([*HELLO, echo(first), user("y")])
    await agent.ask([user("a title?")])
    outcome, _ = await agent.close()
    assert outcome.places == ["not_selected", 0, "not_selected"]
    assert [name for name, _ in texts(outcome)[0]] == ["PROMPT", "EARLIER", "TEMPLATE", "OBSERVATION", "SAMPLED"]


async def test_a_select_that_hangs_stops_no_other_session(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_rows, "SELECT_S", 0.2)
    let_go = threading.Event()
    hangs = Agent(make_run(turns("a"), select=lambda _: let_go.wait(60) and []))
    await hangs.ask(HELLO)
    with pytest.raises(ConfigError, match=r"proxy\.select=.*<lambda> took longer than 0\.2 s"):
        await hangs.close()
    let_go.set()
    monkeypatch.setattr(session_rows, "SELECT_S", 60.0)
    exits = Agent(make_run(turns("a"), select=lambda _: exit(3)))
    await exits.ask(HELLO)
    with pytest.raises(ConfigError, match=r"proxy\.select=.*<lambda> raised .*exit"):
        await exits.close()


@pytest.mark.parametrize(
    ("select", "problem"),
    [
        (lambda views: None, "returned None, expected a list of the ids to train"),
        (lambda views: views[0].id, "returned .*, expected a list"),
        (lambda views: views, "returned Completion.* is no completion's id"),
        (lambda views: [views[0].id, "nope"], "returned 'nope', which is no completion's id"),
        (lambda views: [views[0].name for _ in views], r"raised AttributeError: .*'name' \(test_proxy_deliveries\.py:"),
    ],
)
async def test_a_wrong_select_is_named_with_what_it_returned(select: Any, problem: str) -> None:
    agent = Agent(make_run(turns("a"), select=select))
    await agent.ask(HELLO)
    with pytest.raises(ConfigError, match=f"proxy.select=.*test_proxy_deliveries:<lambda> {problem}"):
        await agent.close()
