"""Rewards in an outage of their grader: finished conversations wait, and are scored again."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayTaskError

from tests.conftest import until
from tests.idle_loop import skip_waits
from tests.scoring import KEYS, OUTAGE
from verl_multiturn.calls.outages.process import Outages
from verl_multiturn.config import OutageSettings
from verl_multiturn.errors import ConfigError, OutageError, RewardContractError, UnjudgedError

# Importing verl's trainers warns about optional engines that are not installed.
pytestmark = [pytest.mark.stack, pytest.mark.filterwarnings("ignore:.*engine is not available:UserWarning")]


class Judge:
    """Computes rewards: it scores, or returns these keys."""

    def __init__(self, **says: Any) -> None:
        self.says = says
        self.asked: list[str] = []

    async def compute(self, output: Any) -> None:
        """Do as verl's worker does."""
        if output.reward_score is not None:
            return
        self.asked.append(output.stats["request_id"])
        await asyncio.sleep(0)
        output.reward_score = 0.0 if self.says else 1.0
        output.extra_fields["reward_extra_info"] = {"outage": 0.0, **self.says}


class Scoring:
    """The rewards of one worker."""

    def __init__(self, judge: Judge, **settings: Any) -> None:
        from verl_multiturn.verl_bridge.loops.rewards import Rewards

        self.judge = judge
        self.outages = Outages(OutageSettings(**settings))
        self.rewards = Rewards(self.outages)

    async def score(self, number: int, reward: float | None = None) -> Any:
        output = SimpleNamespace(reward_score=reward, extra_fields={}, stats={"request_id": str(number)})
        await self.rewards.score([output], lambda: self.judge.compute(output))
        return output

    @property
    def is_open(self) -> bool:
        return self.rewards._watch is not None and self.rewards._watch.is_open


def is_scored(output: Any) -> bool:
    return output.reward_score == 1.0 and output.extra_fields["reward_extra_info"] == {"outage": 0.0}


async def test_rows_wait_for_the_judge_and_are_scored_again() -> None:
    scoring = Scoring(Judge(outage=1.0))
    early = [await scoring.score(number) for number in range(7)]
    assert not any(map(is_scored, early)), "nobody knew yet that it is an outage; the trainer leaves them out"
    waiting = [asyncio.create_task(scoring.score(number)) for number in range(7, 20)]
    await until(lambda: scoring.is_open)
    asked = len(scoring.judge.asked)
    left_out = [task.result() for task in waiting if task.done()]
    assert all(row.extra_fields["reward_extra_info"]["outage"] for row in left_out), "that ended before it was known"
    scoring.judge.says = {}
    ended = await asyncio.gather(*waiting)
    assert sum(map(is_scored, ended)) == 13 - len(left_out) >= 8
    assert len(scoring.judge.asked) == asked + 13 - len(left_out), "each is asked once more"
    assert is_scored(await scoring.score(21))


async def test_a_row_that_is_left_out_anyway_is_asked_once() -> None:
    scoring = Scoring(Judge())
    assert is_scored(await scoring.score(0))
    scoring.outages._judged["1"] = None  # a tool's outage, after the conversation had ended
    scoring.judge.says = {"outage": 1.0}
    row = await scoring.score(1)
    assert row.extra_fields["reward_extra_info"] == {"outage": 1.0}
    assert scoring.judge.asked == ["0", "1"]
    assert not scoring.is_open


async def test_a_row_that_has_waited_is_not_lost_to_a_judge_with_much_to_do() -> None:
    class Busy(Judge):
        async def compute(self, output: Any) -> None:
            tired = self.asked.count("9") < 3 and output.stats["request_id"] == "9"
            self.says = {"outage": 1.0} if self.is_down or tired else {}
            await super().compute(output)

    skip_waits()
    judge = Busy()
    judge.is_down = True  # type: ignore[attr-defined]
    scoring = Scoring(judge)
    for number in range(8):
        await scoring.score(number)
    assert scoring.is_open
    waiting = [asyncio.create_task(scoring.score(number)) for number in range(8, 20)]
    judge.is_down = False  # type: ignore[attr-defined]
    assert all(map(is_scored, await asyncio.gather(*waiting)))
    assert judge.asked.count("9") == 4


async def test_a_row_that_waits_for_too_long_keeps_what_it_had() -> None:
    scoring = Scoring(Judge(outage=1.0), stop_s=0.5)
    rows = await asyncio.gather(*[scoring.score(number) for number in range(12)])
    assert scoring.is_open
    assert [row.extra_fields["reward_extra_info"] for row in rows] == [{"outage": 1.0}] * 12
    assert {row.reward_score for row in rows} == {0.0}


async def test_a_row_that_was_never_judged_is_left_out() -> None:
    scoring = Scoring(Judge(outage=1.0, acc=0.5, prediction="7"), stop_s=0.25)
    for number in range(8):
        await scoring.score(number)
    await until(lambda: scoring.is_open)
    asked = len(scoring.judge.asked)
    row = await scoring.score(8)
    assert row.reward_score == 0.0, "verl needs a number"
    assert row.extra_fields["reward_extra_info"] == {"outage": 1.0, "acc": 0.0, "prediction": ""}, "as other rows have"
    fresh = Scoring(scoring.judge)
    fresh.rewards = type(scoring.rewards)(scoring.outages)
    row = await fresh.score(9)
    assert row.reward_score == 0.0
    assert row.extra_fields["reward_extra_info"] == dict(zip(KEYS, OUTAGE, strict=True)), "as the rewards in the box"
    assert len(scoring.judge.asked) == asked


@pytest.mark.parametrize(
    ("says", "settings"),
    [({"outage": 1.0}, {"mode": "mask"}), ({"outage": 1.0}, {"mode": "off"}), ({"unjudgeable": 1.0}, {})],
    ids=["mask", "off", "a ground truth"],
)
async def test_what_nobody_waits_for(says: dict[str, float], settings: dict[str, Any]) -> None:
    scoring = Scoring(Judge(**says), **settings)
    rows = [await scoring.score(number) for number in range(20)]
    assert len(scoring.judge.asked) == 20
    assert not any(map(is_scored, rows))
    assert not scoring.is_open


class Raising(Judge):
    """A reward function of an author's, which gives no verdict on one row."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    async def compute(self, output: Any) -> None:
        if output.stats["request_id"] == "1":
            raise self.error
        await super().compute(output)


@pytest.mark.parametrize("mode", ["pause", "mask", "off"])
@pytest.mark.parametrize("mark", ["unjudgeable", "outage"])
async def test_a_function_that_raises_gives_no_verdict(mark: str, mode: str) -> None:
    skip_waits()
    error = UnjudgedError("no verdict") if mark == "unjudgeable" else OutageError("it is away")
    scoring = Scoring(Raising(error), mode=mode)
    assert is_scored(await scoring.score(0))
    row = await scoring.score(1)
    assert row.reward_score == 0.0, "verl needs a number; the trainer leaves the row out"
    assert row.extra_fields["reward_extra_info"] == {"outage": 0.0, mark: 1.0}
    assert is_scored(await scoring.score(2))


@pytest.mark.parametrize("mode", ["pause", "off"])
@pytest.mark.parametrize("is_far", [True, False])
async def test_a_mistake_of_its_author_is_raised_as_one_sentence(is_far: bool, mode: str) -> None:
    mistake = ConfigError("expected a number, got 'many'")
    error = RayTaskError("compute_score", "a traceback", mistake).as_instanceof_cause() if is_far else mistake
    with pytest.raises(RewardContractError) as raised:
        await Scoring(Raising(error), mode=mode).score(1)
    assert str(raised.value) == "expected a number, got 'many'"


async def test_a_reward_that_is_there_already_is_no_call() -> None:
    scoring = Scoring(Judge(outage=1.0))
    rows = [await scoring.score(number, 0.25) for number in range(20)]
    assert {row.reward_score for row in rows} == {0.25}
    assert scoring.judge.asked == []
    assert not scoring.is_open


async def test_a_group_that_is_cancelled_waits_no_longer() -> None:
    scoring = Scoring(Judge(outage=1.0))
    for number in range(7):
        await scoring.score(number)
    waiting = [asyncio.create_task(scoring.score(number)) for number in range(7, 12)]
    await until(lambda: scoring.is_open)
    for task in waiting:
        task.cancel()
    assert all(
        isinstance(each, asyncio.CancelledError) for each in await asyncio.gather(*waiting, return_exceptions=True)
    )
    scoring.judge.says = {}
    assert is_scored(await scoring.score(13))
