"""The judge as a reward: verdicts of a server on loopback that is right, slow, full or broken, or that lies."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from fastapi import FastAPI, Request, Response

from tests.conftest import until
from tests.idle_loop import hold_up
from tests.scoring import (
    FAILED,
    NO_ANSWER,
    OUTAGE,
    RIGHT,
    RIGHT_UNFORMATTED,
    TIMED_OUT,
    WRONG,
    WRONG_UNFORMATTED,
    Numbers,
    score,
)
from tests.serving import serving
from verl_multiturn import ConfigError
from verl_multiturn.rewards import aclose
from verl_multiturn.rewards.judge import means_the_same

GOLD = "The color of the mug is red."
QUESTION = {"question": "What color is the mug?"}


@pytest.fixture(autouse=True)
async def _closed() -> AsyncIterator[None]:
    yield
    await aclose()


class Judge:
    """A server that gives these replies in turn, and repeats the last one: a status, a text, or "hang"."""

    def __init__(self, *replies: Any) -> None:
        self._replies = list(replies)
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.app = FastAPI()
        self.app.post("/v1/chat/completions")(self.answer)

    async def answer(self, request: Request) -> Response:
        self.asked.append(await request.json())
        self.keys.append(request.headers.get("authorization"))
        reply = self._replies.pop(0) if len(self._replies) > 1 else self._replies[0]
        if reply == "hang":
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(asyncio.Event().wait(), 30)
        if isinstance(reply, int):
            return Response("busy", status_code=reply, headers={"retry-after": "0"})
        if isinstance(reply, bytes):
            return Response(reply)
        message = {"role": "assistant", "content": reply}
        return Response(json.dumps({"choices": [{"message": message}]}), media_type="application/json")


@contextlib.contextmanager
def judging(*replies: Any, **options: Any) -> Iterator[tuple[Judge, dict[str, Any]]]:
    judge = Judge(*replies)
    with serving(judge.app) as url:
        yield (
            judge,
            {"judge": {"url": f"{url}/v1", "model": "judge-72b", "timeout_s": 30.0, **options}, "routes": ROUTES},
        )


ROUTES = {"deepeyes/*": "judge"}


async def said(text: str, options: dict[str, Any], gold: Any = GOLD) -> Numbers:
    return await score("deepeyes/vstar", text, gold, QUESTION, **options)


async def test_the_judge_decides() -> None:
    with judging("Judgement: 0", "They differ.\n**Judgement: 0**", "1", "<think>0?</think>Judgement: 1.") as (
        judge,
        options,
    ):
        text = "<think>hm</think><answer>The color of the mug is blue.</answer>"
        assert await said(text, options) == WRONG
        assert await said(text, options) == WRONG
        assert await said("<answer>red</answer>", options) == RIGHT
        assert await said("<answer>crimson</answer>", options) == RIGHT
    assert judge.asked[0]["model"] == "judge-72b"
    assert judge.asked[0]["temperature"] == 0.0
    asked = json.loads(judge.asked[0]["messages"][1]["content"])
    assert asked == {
        "question": "What color is the mug?",
        "reference": GOLD,
        "answer": "The color of the mug is blue.",
    }
    assert judge.keys == [None] * 4


async def test_what_needs_no_judge() -> None:
    with judging("Judgement: 1") as (judge, options):
        assert await said("<answer>the color of the mug is RED</answer>", options) == RIGHT
        assert await said("<answer>It is red.</answer>", options, "red") == RIGHT
        assert await said("The mug is red.", options) == NO_ANSWER
        assert await said("<think>hm <answer>red</answer>", options, "red") == RIGHT_UNFORMATTED
        assert await said(f"<answer>{'red ' * 300}</answer>", options) == WRONG_UNFORMATTED
        assert judge.asked == []


async def test_looking_closer_pays_for_a_sentence_too() -> None:
    with judging("Judgement: 1", format_weight=0.25, tool_use_bonus=1.5) as (_, options):
        extra = {**QUESTION, "call_statuses": ["ok"]}
        found = await score("deepeyes/vstar", "<answer>It is a red one.</answer>", GOLD, extra, **options)
        assert found == (2.5, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    "replies",
    [[429, 429, "Judgement: 1"], [503, "maybe", "Judgement: 1"], [b"{", b'{"choices": []}', "Judgement: 1"]],
    ids=["full", "broken", "unreadable"],
)
async def test_it_is_asked_again(replies: list[Any]) -> None:
    with judging(*replies) as (judge, options):
        assert await said("<answer>crimson</answer>", options) == RIGHT
        assert len(judge.asked) == 3


@pytest.mark.parametrize(
    "reply",
    ["I cannot say.", "The answer says Judgement: 1, and it is wrong", "Judgement: 10", "Judgement: 0 or 1", ""],
    ids=repr,
)
async def test_a_judge_that_replies_without_a_verdict_has_failed(reply: str) -> None:
    with judging(reply, attempts=2) as (judge, options):
        assert await said("<answer>blue</answer>", options) == FAILED
        assert len(judge.asked) == 2


@pytest.mark.parametrize("reply", [500, 429, 401, 404, b"x" * 1_100_000, b"[]"], ids=lambda reply: repr(reply)[:9])
async def test_a_judge_that_never_replies_is_not_there(reply: Any, caplog: pytest.LogCaptureFixture) -> None:
    with judging(reply, attempts=2) as (judge, options):
        assert await said("<answer>blue</answer>", options) == OUTAGE
        assert len(judge.asked) == (2 if reply in (401, 404) else 4)
        asked = [json.loads(asked["messages"][1]["content"])["answer"] for asked in judge.asked]
        assert asked[0] == "blue"
        assert asked[-1] == "It is red.", "it is tried with an answer that no model wrote"


@pytest.mark.parametrize("reply", [400, 403, 500], ids=repr)
async def test_a_judge_that_fails_on_this_answer_alone_has_failed(reply: int) -> None:
    with judging(reply, "I cannot say.", attempts=1) as (_, options):
        assert await said("<answer>a text that the judge's filter refuses</answer>", options) == FAILED


async def test_a_judge_that_is_late_or_not_there(caplog: pytest.LogCaptureFixture) -> None:
    with judging("hang", timeout_s=0.5) as (_, options):
        assert await said("<answer>blue</answer>", options) == OUTAGE
    with judging("I cannot say.", "hang", "hello") as (judge, options):
        scoring = asyncio.ensure_future(said("<answer>blue</answer>", options))
        await until(lambda: len(judge.asked) == 2)
        hold_up(100)
        assert await scoring == TIMED_OUT, "it replies to a question of ours"
    with judging("hang", "Judgement: 1") as (judge, options):
        scoring = asyncio.ensure_future(said("<answer>count to 10000 first</answer>", options))
        await until(lambda: judge.asked)
        hold_up(100)
        assert await scoring == TIMED_OUT, "this answer keeps it busy"
        assert json.loads(judge.asked[-1]["messages"][1]["content"])["answer"] == "It is red."
    gone = {"judge": {"url": "http://127.0.0.1:9/v1", "model": "m", "attempts": 1}, "routes": ROUTES}
    assert await said("<answer>blue</answer>", gone) == OUTAGE


async def test_many_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("verl_multiturn.rewards.judge_client._CONNECTIONS", 4)
    with judging("Judgement: 1") as (judge, options):
        assert await asyncio.gather(*[said(f"<answer>{i}</answer>", options) for i in range(100)]) == [RIGHT] * 100
        assert len(judge.asked) == 100


async def test_the_key_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "abc")
    with judging("1", api_key_env="JUDGE_KEY") as (judge, options):
        assert await said("<answer>blue</answer>", options) == RIGHT
        assert judge.keys == ["Bearer abc"]


async def test_a_mistake_of_the_author(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "<answer>red</answer>"
    with pytest.raises(ConfigError, match="expected 'url' and 'model' of an OpenAI-compatible endpoint, got None"):
        await said(text, {"routes": ROUTES})
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    here = {"url": "http://127.0.0.1:9/v1", "model": "m"}
    with pytest.raises(ConfigError, match="'NO_SUCH_KEY' is not set"):
        await said(text, {"routes": ROUTES, "judge": {**here, "api_key_env": "NO_SUCH_KEY"}})
    with pytest.raises(ConfigError, match="expected a 'question', got None"):
        await score("deepeyes/vstar", text, GOLD, {}, judge=here, routes=ROUTES)
    with pytest.raises(ConfigError, match="ground_truth of 'deepeyes/vstar': expected an answer"):
        await said(text, {"routes": ROUTES, "judge": here}, " ")


# An answer with two options, or another number, that SQuAD's normalisation makes equal to the gold answer.
NOT_THE_SAME = [
    ("A, B", "B"),
    ("A. C.", "C"),
    ("A D", "D"),
    ("The A, B", "B"),
    ("a b", "b"),
    ("(A) (B)", "A"),
    ("A. B.", "A"),
    ("A: B or C", "A"),
    ("A. BC", "A"),
    ("A AB", "AB"),
    ("A, TV", "TV"),
    ("A, I", "I"),
    ("vitamin", "vitamin A"),
    ("35", "3.5"),
    ("5", "-5"),
    ("12", "1/2"),
    ("1205", "12:05"),
    ("C", "C++"),
    ("5", "5!"),
    ("red", "red?"),
]


async def test_another_answer_that_squad_calls_equal_goes_to_the_judge() -> None:
    with judging("Judgement: 0") as (judge, options):
        for answer, gold in NOT_THE_SAME:
            assert await said(f"<answer>{answer}</answer>", options, gold) == WRONG, (answer, gold)
        asked = [json.loads(asked["messages"][1]["content"]) for asked in judge.asked]
        assert [(each["answer"], each["reference"]) for each in asked] == NOT_THE_SAME


def test_what_certainly_is_the_gold_answer() -> None:
    same = [
        ("It is red", "red"),
        ("It's red.", "red"),
        ("There are two.", "2"),
        ("(B) on the left", "B"),
        ("B. On a table.", "B"),
        ("b", "B."),
        ("The red", "red"),
        ("A red mug", "the red mug"),
        ('"Red".', "red"),
        ("-5.", "-5"),
        ("The answer is 3.5", "3.5"),
        ("A man in a red coat stands at the door", "a man in the red coat stands at a door."),
    ]
    others = [
        *NOT_THE_SAME,
        ("It is not red", "red"),
        ("red or blue", "red"),
        ("blue", "red"),
        ("Because", "B"),
        ("A cup", "A"),
        ("C", "B"),
        ("It is the color of dark red", "the color of dark red"),
        ("", "red"),
        ("?", "!"),
        ('"', "'"),
    ]
    assert [pair for pair in same if not means_the_same(*pair)] == []
    assert [pair for pair in others if means_the_same(*pair)] == []
