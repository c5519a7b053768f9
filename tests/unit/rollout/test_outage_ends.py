"""Conversations in an outage: they wait with their clocks stopped, or end with the stop reason `outage`."""

from __future__ import annotations

import asyncio
from typing import Any
from unittest.mock import AsyncMock

import pytest

from tests.conftest import CharBuilder, CharTokenizer, EchoTool
from tests.idle_loop import skip_waits
from tests.scripted import CALL
from verl_multiturn import Conversation, Interaction, Limits, Outcome, Reply, Request, ScriptedEngine, StopReason
from verl_multiturn.calls.limits import OutageLimits
from verl_multiturn.calls.outages.process import Outages
from verl_multiturn.calls.outages.store import OutageStore
from verl_multiturn.calls.slots import Gates
from verl_multiturn.chat.codec import ChatCodec
from verl_multiturn.chat.parsing.json_calls import JsonParser
from verl_multiturn.config import OutageSettings
from verl_multiturn.errors import ConfigError, UnjudgedError
from verl_multiturn.interactions.running.session import InteractionGate
from verl_multiturn.observe.metrics import stats_of
from verl_multiturn.rollout.groups.oversampling import FirstValid
from verl_multiturn.rollout.life import stopped
from verl_multiturn.tools.loading.call_limits import ToolLimits
from verl_multiturn.tools.running.gate import Gate


class Remote(EchoTool):
    """An echo whose service may be down."""

    repeatable = True
    outage_limits = OutageLimits(timeouts="outage")

    def __init__(self) -> None:
        super().__init__()
        self.down: set[str] = set()
        self.asked = 0

    async def create(self, instance_id: str, **kwargs: Any) -> None:
        await super().create(instance_id, **kwargs)
        if "create" in self.down:
            raise ConnectionRefusedError("down")

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        self.asked += 1
        if "execute" in self.down:
            raise ConnectionRefusedError("down")
        return await super().execute(instance_id, parameters, **kwargs)

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        if "calc_reward" in self.down:
            raise ConnectionRefusedError("down")
        return 1.0


class Run:
    """Conversations of one process that share a tool and an interaction."""

    def __init__(self, tool: EchoTool | None = None, user: Interaction | None = None, **settings: Any) -> None:
        skip_waits()
        self.keeper = OutageStore()
        self.outages = Outages(OutageSettings(**settings), lambda: self.keeper, stopped)
        self.gates = Gates(Gate, 5.0, outages=self.outages)
        self.interactions = Gates(InteractionGate, 5.0, outages=self.outages)
        self.tool, self.user = tool, user
        self.sampled = 0
        self.hangs_at: int | None = None
        """Number of the generation that never ends."""

    async def play(self, name: str, turns: list[str], **limits: Any) -> Outcome:
        tokenizer = CharTokenizer()
        scripted = ScriptedEngine([tokenizer.turn(turn) for turn in turns], version=3)

        class Counting:
            async def generate(_, *args: Any, **kwargs: Any) -> Any:
                self.sampled += 1
                if self.sampled == self.hangs_at:
                    await asyncio.Event().wait()
                return await scripted.generate(*args, **kwargs)

        conversation = Conversation(
            Counting(),
            ChatCodec(CharBuilder(), tokenizer=tokenizer),
            JsonParser(tokenizer, [tokenizer.eos_token_id]),
            Limits(**{"prompt_length": 100, "response_length": 900, "max_parallel_calls": 8, **limits}),
            self.gates,
            interactions=self.interactions,
        )
        tools = {} if self.tool is None else {"echo": self.tool}
        messages = [{"role": "user", "content": "Q"}]
        return await conversation.run(Request(name, messages, tools, interaction=self.user))

    async def break_it(self) -> list[Outcome]:
        """Let conversations meet an outage until the breaker opens."""
        return [await self.play(f"first {each}", [CALL, "ok"]) for each in range(8)]


async def test_a_single_outage_is_told_to_the_model_and_noted() -> None:
    tool = Remote()
    run = Run(tool)
    tool.down = {"execute"}
    outcome = await run.play("a", [CALL, "ok"])
    assert outcome.stop_reason is StopReason.FINISHED
    assert outcome.valid
    assert "down" in CharTokenizer().decode(outcome.trajectory.ids)
    stats = stats_of(outcome)
    assert (stats["outages"], stats["request_id"]) == (["tool echo"], "a")


async def test_the_answer_that_opens_the_breaker_is_not_shown() -> None:
    tool = Remote()
    run = Run(tool)
    tool.down = {"execute"}
    outcomes = await run.break_it()
    assert [outcome.stop_reason for outcome in outcomes] == [StopReason.FINISHED] * 7 + [StopReason.OUTAGE]
    last = outcomes[-1]
    assert not last.valid
    assert "down" not in CharTokenizer().decode(last.trajectory.ids)
    assert sum(last.trajectory.mask) == len(CALL) + 1
    assert last.error == "tool echo: ConnectionRefusedError: down"
    assert [call.text for call in last.calls] == ["Error: ConnectionRefusedError: down"]
    assert tool.counts["release"] == 8
    assert await run.keeper.touched([outcome.request_id for outcome in outcomes]) == {
        outcome.request_id for outcome in outcomes
    }


async def test_the_clock_does_not_make_a_conversation_valid_that_saw_nothing_but_outages() -> None:
    for calls, expected in ((1, StopReason.WALL_CLOCK), (2, StopReason.OUTAGE)):
        tool = Remote()
        run = Run(tool)
        tool.down = {"execute"}
        run.hangs_at = calls + 1
        outcome = await run.play("a", [CALL] * calls + ["ok"], wall_clock_s=5.0)
        assert (outcome.stop_reason, outcome.outages) == (expected, ["tool echo"])
        assert outcome.time_up == "generate"


async def test_conversations_wait_with_their_clocks_standing_still() -> None:
    tool = Remote()
    run = Run(tool)
    tool.down = {"execute"}
    await run.break_it()
    sampled = run.sampled
    waiting = [asyncio.create_task(run.play(f"w{each}", [CALL, "ok"], wall_clock_s=3)) for each in range(10)]
    await asyncio.sleep(0.5)
    assert run.sampled == sampled  # none has a token
    await asyncio.sleep(200)
    assert run.sampled == sampled + 10  # let in one by one, and their calls wait
    assert (await run.keeper.outages())["tool echo"].waiting == 10
    tool.down = set()
    outcomes = await asyncio.gather(*waiting)
    assert [outcome.stop_reason for outcome in outcomes] == [StopReason.FINISHED] * 10
    assert all(outcome.valid and not outcome.outages for outcome in outcomes)
    assert not any("down" in CharTokenizer().decode(outcome.trajectory.ids) for outcome in outcomes)


async def test_waiting_for_too_long_ends_with_outage_and_an_untrained_row() -> None:
    tool = Remote()
    run = Run(tool, stop_s=20)
    tool.down = {"execute"}
    await run.break_it()
    outcomes = await asyncio.gather(*(run.play(f"w{each}", [CALL, "ok"], wall_clock_s=3) for each in range(3)))
    assert [outcome.stop_reason for outcome in outcomes] == [StopReason.OUTAGE] * 3
    assert not any(outcome.valid for outcome in outcomes)
    assert "has lasted for more than 20 s" in outcomes[-1].error
    assert tool.counts["create"] == tool.counts["release"]


async def test_a_conversation_that_is_judged_meanwhile_ends_before_its_next_turn() -> None:
    class Slow(Remote):
        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
            if instance_id == "early" and self.asked:
                await goes_on.wait()
                return "fine"
            return await super().execute(instance_id, parameters, **kwargs)

    goes_on, tool = asyncio.Event(), Slow()
    run = Run(tool)
    tool.down = {"execute"}
    early = asyncio.create_task(run.play("early", [CALL, CALL, "never"]))
    await asyncio.sleep(0.1)
    assert not run.outages.is_judged("early")  # the model got the error, and called again
    for each in range(7):
        await run.play(f"other {each}", [CALL, "ok"])
    goes_on.set()
    outcome = await early
    assert (outcome.stop_reason, outcome.outages) == (StopReason.OUTAGE, ["tool echo"])
    assert [str(call.status) for call in outcome.calls] == ["error", "ok"]
    assert outcome.trajectory.turns == 2


async def test_cancelled_while_it_waits_it_leaves_nothing_behind() -> None:
    tool = Remote()
    run = Run(tool)
    tool.down = {"execute"}
    await run.break_it()
    waiting = [asyncio.create_task(run.play(f"w{each}", [CALL, "ok"])) for each in range(3)]
    await asyncio.sleep(10)
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)
    await asyncio.sleep(0.1)
    assert (await run.keeper.outages())["tool echo"].waiting == 0
    assert tool.counts["create"] == tool.counts["release"]


async def test_over_sampling_cuts_a_sample_that_waits() -> None:
    tool = Remote()
    run = Run(tool)
    tool.down = {"execute"}
    await run.break_it()
    group = FirstValid(1, 2)
    stayed: list[int] = []

    async def sample(number: int) -> None:
        outcome = await run.play(f"s{number}", [CALL, "ok"] if number else ["ok"]) if number else None
        if await group.stays(number, outcome is None or outcome.valid):
            stayed.append(number)

    await asyncio.gather(group.run(1, lambda: sample(1)), group.run(0, lambda: sample(0)))
    await asyncio.sleep(0.1)
    assert (stayed, group.cut_samples) == ([0], 1)
    assert (await run.keeper.outages())["tool echo"].waiting == 0


async def test_a_create_that_fails_is_an_outage() -> None:
    tool = Remote()
    run = Run(tool)
    tool.down = {"create"}
    outcomes = [await run.play(f"c{each}", ["ok"]) for each in range(8)]
    assert [outcome.stop_reason for outcome in outcomes] == [StopReason.FINISHED] * 7 + [StopReason.OUTAGE]
    assert outcomes[-1].trajectory.mask == [0] * len(outcomes[-1].trajectory.ids)  # not a token was sampled
    assert outcomes[0].outages == ["tool echo create"]
    assert "not available" not in outcomes[-1].error
    waiting = [asyncio.create_task(run.play(f"w{each}", [CALL, "ok"])) for each in range(20)]
    await asyncio.sleep(0.9)
    tool.down = set()
    done = await asyncio.gather(*waiting)
    assert {outcome.stop_reason for outcome in done} == {StopReason.FINISHED}
    assert not any(outcome.outages for outcome in done)


@pytest.mark.parametrize("mode", ["mask", "pause"])
async def test_a_calc_reward_that_meets_an_outage_trains_nothing(mode: str) -> None:
    tool = Remote()
    run = Run(tool, mode=mode)
    tool.down = {"calc_reward"}
    outcome = await run.play("a", [CALL, "ok"])
    assert (outcome.stop_reason, outcome.outages) == (StopReason.OUTAGE, ["tool echo"])
    assert outcome.calc_rewards == {}


async def test_a_calc_reward_without_its_service_holds_up_no_calls() -> None:
    tool = Remote()
    run = Run(tool)
    tool.down = {"execute"}
    await run.break_it()
    waiting = [asyncio.create_task(run.play(f"w{each}", [CALL, "ok"])) for each in range(20)]
    tool.down = {"calc_reward"}
    done = await asyncio.gather(*waiting)
    assert {outcome.stop_reason for outcome in done} == {StopReason.OUTAGE}, "what they earned is not known"
    (state,) = [state for name, state in (await run.keeper.outages()).items() if name == "tool echo"]
    assert (state.trips, state.open_s) == (1, 0.0), "the calls were answered"


async def test_mistakes_that_never_reach_the_service_hide_no_outage() -> None:
    class Checking(Remote):
        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
            if self.asked % 5 < 3:  # 60 %
                self.asked += 1
                raise ValueError("no such city")
            return await super().execute(instance_id, parameters, **kwargs)

    tool = Checking()
    run = Run(tool)
    tool.down = {"execute"}
    early = [await run.play(f"c{each}", [CALL, "ok"]) for each in range(13)]
    assert {outcome.stop_reason for outcome in early} == {StopReason.FINISHED}
    assert (await run.play("last", [CALL, CALL, "ok"])).stop_reason is StopReason.OUTAGE
    met = {f"c{each}" for each, outcome in enumerate(early) if outcome.outages}
    assert await run.keeper.touched([f"c{each}" for each in range(13)]) == met
    assert len(met) == 4


async def test_a_calc_reward_that_cannot_judge_trains_nothing_and_is_no_outage() -> None:
    tool = Remote()
    tool.calc_reward = AsyncMock(side_effect=UnjudgedError("the grader is lost"))  # type: ignore[method-assign]
    outcome = await Run(tool, mode="mask").play("a", ["ok"])
    assert (outcome.stop_reason, outcome.valid, outcome.outages) == (StopReason.UNJUDGED, False, [])
    assert outcome.error == "tool 'echo': the grader is lost"


async def test_mode_mask_ends_at_once_and_mode_off_tells_the_model() -> None:
    tool = Remote()
    tool.down = {"execute"}
    outcome = await Run(tool, mode="mask").play("a", [CALL, "ok"])
    assert (outcome.stop_reason, outcome.outages) == (StopReason.OUTAGE, ["tool echo"])
    outcome = await Run(tool, mode="off").play("a", [CALL, "ok"])
    assert (outcome.stop_reason, outcome.outages) == (StopReason.FINISHED, [])


async def test_a_tool_in_this_process_is_never_out() -> None:
    tool = EchoTool({"execute": "raise"})
    tool.outage_limits = OutageLimits(mode="off")  # type: ignore[misc]
    run = Run(tool)
    outcomes = [await run.play(f"c{each}", [CALL, "ok"]) for each in range(20)]
    assert {outcome.stop_reason for outcome in outcomes} == {StopReason.FINISHED}
    assert await run.keeper.outages() == {}


async def test_the_queue_for_slots_is_no_way_around_the_wait() -> None:
    class Slow(Remote):
        async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
            await asyncio.sleep(0.1)
            return await super().execute(instance_id, parameters, **kwargs)

    tool = Slow()
    tool.multiturn_limits = ToolLimits(concurrency=2)  # type: ignore[attr-defined]
    run = Run(tool)
    tool.down = {"execute"}
    running = [asyncio.create_task(run.play(f"c{each}", [CALL, "ok"])) for each in range(40)]
    await asyncio.sleep(60)
    tool.down = set()
    outcomes = await asyncio.gather(*running)
    lost = [outcome for outcome in outcomes if outcome.stop_reason is StopReason.OUTAGE]
    assert len(lost) <= 2  # those whose calls ran when it opened
    assert sum(bool(outcome.outages) for outcome in outcomes) <= 10


class User(Interaction):
    """A user whose service may be down."""

    name = "user"

    def __init__(self) -> None:
        super().__init__({})
        self.is_down = False

    async def start(self, instance_id: str, **kwargs: Any) -> Reply | None:
        if self.is_down:
            raise ConnectionRefusedError("down")
        return None

    async def reply(self, instance_id: str, messages: Any, **kwargs: Any) -> Reply:
        return Reply("", done=True)


async def test_an_interaction_waits_too_and_its_outages_are_invalid_as_always() -> None:
    user = User()
    run = Run(user=user)
    user.is_down = True
    outcomes = [await run.play(f"c{each}", ["ok"]) for each in range(8)]
    assert [outcome.stop_reason for outcome in outcomes] == [StopReason.ENVIRONMENT_ERROR] * 7 + [StopReason.OUTAGE]
    assert run.sampled == 0
    waiting = [asyncio.create_task(run.play(f"w{each}", ["ok"])) for each in range(5)]
    await asyncio.sleep(0.5)
    user.is_down = False
    done = await asyncio.gather(*waiting)
    assert [outcome.stop_reason for outcome in done] == [StopReason.ENVIRONMENT_DONE] * 5


async def test_a_bug_of_an_interaction_is_no_outage() -> None:
    class Broken(User):
        async def start(self, instance_id: str, **kwargs: Any) -> Reply | None:
            raise KeyError("host")

    run = Run(user=Broken())
    outcomes = [await run.play(f"c{each}", ["ok"]) for each in range(12)]
    assert {outcome.stop_reason for outcome in outcomes} == {StopReason.ENVIRONMENT_ERROR}
    assert not any(outcome.outages for outcome in outcomes)


@pytest.mark.parametrize("settings", [{"stop_s": 0}, {"mode": "wait"}])
def test_wrong_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        OutageSettings(**settings)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"old_log_prob_bound": True}, "old_log_prob_bound: expected a number, got True"),
        ({"outage": {"stop_s": True}}, "outage.stop_s: expected a number, got True"),
        ({"max_tool_calls": False}, "max_tool_calls: expected a number, got False"),
    ],
)
def test_a_switch_is_no_number(settings: dict[str, Any], said: str) -> None:
    from verl_multiturn.config import read_settings

    with pytest.raises(ConfigError, match=said):
        read_settings(settings)


def test_yaml_reads_a_bare_off_as_false() -> None:
    import yaml

    from verl_multiturn.calls.limits import OutageLimits
    from verl_multiturn.config import read_settings

    assert OutageLimits.model_validate(yaml.safe_load("mode: off")).mode == "off"
    assert read_settings({"outage": yaml.safe_load("mode: off")}).outage.mode == "off"
