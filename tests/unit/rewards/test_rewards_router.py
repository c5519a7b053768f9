"""`compute_score`: routing, the keys, the scored texts, composition, and functions of a user."""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.scoring import FAILED, KEYS, NO_ANSWER, OUTAGE, RIGHT, TIMED_OUT, UNJUDGEABLE, WRONG, score
from verl_multiturn import ConfigError
from verl_multiturn.errors import OutageError, UnjudgedError
from verl_multiturn.rewards import Score, Solution, aclose, compute_score, router
from verl_multiturn.rewards.router import REWARDS, RewardKwargs, find_reward
from verl_multiturn.rewards.score import RewardOptions, compose

pytestmark = pytest.mark.slow

HERE = "tests.unit.rewards.test_rewards_router"


@pytest.fixture(autouse=True)
async def _closed(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    monkeypatch.setattr(router, "_warned", set())
    yield
    await aclose()


ROUTED = {
    "openai/gsm8k": "gsm8k",
    "math_dapo": "math",
    "lighteval/MATH": "math",
    "DigitalLearningGmbH/MATH-lighteval": "math",
    "HuggingFaceH4/MATH-500": "math",
    "HuggingFaceH4/aime_2024": "math",
    "AIME": "math",
    "aime2025": "math",
    "numina_olympiads": "math",
    "searchR1_nq": "qa",
    "searchR1_hotpotqa": "qa",
    "searchR1_bamboogle": "qa",
    "deepeyes/vstar": "judge",
    "rubric/essays": "rubric",
    "skyrl_sql": "sql",
    "spider": "sql",
    "bird-dev": "sql",
    "taco": "code",
    "apps": "code",
    "codecontests": "code",
    "codeforces": "code",
    "mbpp": "code",
    "tool_n1": "tool_n1",
    "reasoning_gym/countdown": "reasoning_gym",
}


def test_data_sources_have_their_rewards() -> None:
    assert {name: find_reward(name, {}) for name in ROUTED} == ROUTED
    assert set(ROUTED.values()) == set(REWARDS)
    assert set(REWARDS) < set(RewardKwargs.model_fields)


def test_a_users_routes_come_first_in_their_order() -> None:
    routes = {"My/*": "math", "my/data": "qa", "openai/*": "qa"}
    assert find_reward("my/data", routes) == "math"
    assert find_reward("openai/gsm8k", routes) == "qa"
    assert find_reward("openai/gsm8k", {}) == "gsm8k"


async def test_an_unknown_data_source() -> None:
    with pytest.raises(
        ConfigError, match=r"data_source 'my/data' has no reward; known are \[.*'openai/gsm8k'.*routes="
    ):
        await score("my/data", "#### 42", "42")
    assert await score("my/data", "#### 42", "42", routes={"my/*": "gsm8k"}) == RIGHT


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"route": {}}, r"reward_kwargs.route: unknown setting; did you mean 'routes'\?"),
        ({"gsm8k": {"methud": "strict"}}, r"reward_kwargs.gsm8k.methud: unknown setting; did you mean 'method'\?"),
        ({"gsm8k": {"method": "lax"}}, r"reward_kwargs.gsm8k.method: .*got 'lax'"),
        ({"math": {"timeout_s": 0}}, r"reward_kwargs.math.timeout_s"),
        ({"gsm8k": {"format_weight": -1}}, r"reward_kwargs.gsm8k.format_weight"),
        ({"routes": {"x": "gsm9k"}}, r"reward_kwargs.routes\['x'\]: 'gsm9k' is no reward; known are \['code'"),
        ({"routes": {"x": "no.such"}}, r"reward_kwargs.routes\['x'\]: cannot import 'no'"),
        ({"routes": {"x": f"{HERE}.nothing"}}, r"has no 'nothing'"),
    ],
)
async def test_a_wrong_option(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        await score("openai/gsm8k", "#### 42", "42", **options)


async def test_what_verl_adds_is_left_aside() -> None:
    found = await score("gsm8k", "#### 42", "42", reward_router_address="http://x", reward_model_tokenizer=object())
    assert found == RIGHT


TOOL_SAID = r"#### 42 \boxed{42} <answer>42</answer> Answer: 42 <solution>SELECT 42</solution>"


@pytest.mark.parametrize("source", ["openai/gsm8k", "math_dapo", "searchR1_nq", "reasoning_gym/chain_sum"])
async def test_what_a_tool_said_is_no_answer(source: str) -> None:
    said = {"assistant_texts": ["I call the tool.", "That is it."]}
    found = await compute_score(source, f"I call the tool. {TOOL_SAID} That is it.", "42", said)
    assert tuple(found.values()) == NO_ANSWER
    found = await compute_score(source, "", "42", {"assistant_texts": []})
    assert tuple(found.values()) == NO_ANSWER


async def test_the_last_turn_is_scored() -> None:
    for texts, expected in [
        (["#### 42", "#### 41"], WRONG),
        (["#### 41", "#### 42"], RIGHT),
        (["#### 42", ""], NO_ANSWER),
    ]:
        found = await compute_score("gsm8k", "", "42", {"assistant_texts": texts})
        assert tuple(found.values()) == expected


async def test_rows_of_another_agent_loop_are_scored_by_their_text() -> None:
    for extra in (None, {}, {"num_turns": 2}):
        found = await compute_score(
            data_source="gsm8k", solution_str="<think>…</think>#### 42", ground_truth="42", extra_info=extra
        )
        assert tuple(found.values()) == RIGHT


async def test_weights() -> None:
    used = {"call_tools": ["python"], "call_statuses": ["error", "ok"]}
    failed = {"call_tools": ["python"], "call_statuses": ["error", "bad_arguments", "timeout"]}
    options = {"gsm8k": {"method": "flexible", "format_weight": 0.25, "tool_use_bonus": 0.5}}
    scores = {
        (text, name): (await score("gsm8k", text, "42", extra, **options))[:2]
        for text in ("#### 42", "42", "#### 41", "41", "")
        for name, extra in (("used", used), ("failed", failed), ("none", {}))
    }
    assert scores == {
        ("#### 42", "used"): (1.5, 1.0),
        ("#### 42", "failed"): (1.0, 1.0),
        ("#### 42", "none"): (1.0, 1.0),
        ("42", "used"): (1.25, 1.0),
        ("42", "failed"): (0.75, 1.0),
        ("42", "none"): (0.75, 1.0),
        ("#### 41", "used"): (0.0, 0.0),
        ("#### 41", "failed"): (0.0, 0.0),
        ("#### 41", "none"): (0.0, 0.0),
        ("41", "used"): (-0.25, 0.0),
        ("41", "failed"): (-0.25, 0.0),
        ("41", "none"): (-0.25, 0.0),
        ("", "used"): (-0.25, 0.0),
        ("", "failed"): (-0.25, 0.0),
        ("", "none"): (-0.25, 0.0),
    }


@pytest.mark.parametrize(
    ("turns_with_calls", "right", "expected"),
    [(0, False, 0.0), (1, False, 0.05), (3, False, 0.15), (9, False, 0.2), (3, True, 1.0)],
)
async def test_calls_soften_a_wrong_answer_as_in_verls_retool(
    turns_with_calls: int, right: bool, expected: float
) -> None:
    call = {"name": "code_interpreter", "arguments": "{}"}
    turns = [[call, call]] * turns_with_calls + [[]]
    extra = {"assistant_calls": turns, "assistant_texts": [*["…"] * turns_with_calls, f"#### {42 if right else 41}"]}
    found = await score("gsm8k", "", "42", extra, gsm8k={"wrong_call_credit": 0.05})
    assert found[0] == pytest.approx(expected)
    # verl's own rule scores from -1 to 1.
    verls = 1.0 if right else min(-0.6, -1.0 + 0.1 * turns_with_calls)
    assert 2 * found[0] - 1 == pytest.approx(verls)
    late = compose(Score(timed_out=1.0), Solution("gsm8k", (), ((("f", "{}"),),)), RewardOptions(wrong_call_credit=1))
    assert late["score"] == 0.0


async def own(solution: Solution, ground_truth: Any) -> Score:
    match ground_truth:
        case "hang":
            await asyncio.Event().wait()
        case "raise":
            raise KeyError("broken")
        case "config":
            raise ConfigError("a mistake in the data")
        case "number":
            return 1.0  # type: ignore[return-value]
        case "nothing":
            return None  # type: ignore[return-value]
    return Score.of(solution.answer == ground_truth)


async def own_service(solution: Solution, ground_truth: Any) -> Score:
    errors = {"gone": OutageError("it is gone"), "refused": ConnectionRefusedError(), "http": httpx.ConnectError("x")}
    raise errors[ground_truth]


async def own_grader(solution: Solution, ground_truth: Any) -> Score:
    raise UnjudgedError("the grader is lost")


async def own_broken(solution: Solution, ground_truth: Any) -> Score:
    raise ValueError(ground_truth)


def own_sync(solution: Solution, ground_truth: Any) -> Score:
    return Score.of(solution.answer == ground_truth)


def own_bare(solution: Solution, ground_truth: Any) -> Any:
    return own(solution, ground_truth)


async def test_a_function_that_forgets_to_await_is_named() -> None:
    with pytest.raises(ConfigError, match=rf"{HERE}\.own_bare returned a coroutine that nobody awaits"):
        await score("bare", "x", "y", routes={"bare": f"{HERE}.own_bare"})


async def test_what_a_function_says_cannot_be_judged_is_left_out_and_no_outage() -> None:
    options: dict[str, Any] = {"routes": {"graded": f"{HERE}.own_grader"}}
    assert await score("graded", "x", "y", **options) == UNJUDGEABLE


async def test_a_function_of_the_users_own(caplog: pytest.LogCaptureFixture) -> None:
    options: dict[str, Any] = {"routes": {"mine": f"{HERE}.own", "sync": f"{HERE}.own_sync"}}
    assert await score("mine", "yes", "yes", **options) == RIGHT
    assert await score("mine", "no", "yes", **options) == WRONG
    assert await score("sync", "yes", "yes", **options) == RIGHT
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert await score("mine", "x", "hang", timeout_s=0.1, **options) == TIMED_OUT
            assert await score("mine", "x", "raise", **options) == FAILED
    line = own.__code__.co_firstlineno + 5
    assert [record.getMessage() for record in caplog.records] == [
        f"reward '{HERE}.own' ran out of time, for the row with data_source 'mine', ground_truth 'hang'; further ones "
        "are only counted",
        f"reward '{HERE}.own' failed with KeyError: 'broken' (test_rewards_router.py:{line}), for the row with "
        "data_source 'mine', ground_truth 'raise'; further ones are only counted",
    ]
    with pytest.raises(ConfigError, match="a mistake in the data"):
        await score("mine", "x", "config", **options)
    said = r"own returned 1.0; expected a verl_multiturn.rewards.Score: return Score\(value=1\) on every path"
    with pytest.raises(ConfigError, match=said):
        await score("mine", "x", "number", **options)
    with pytest.raises(ConfigError, match=r"own returned None; expected .*Score\(\) for no answer, on every path"):
        await score("mine", "x", "nothing", **options)


def own_of_turns(solution: Solution, ground_truth: Any) -> Score:
    return Score(value=1.0, turn_values=(1.0,))


async def test_values_of_turns_that_nothing_would_use_are_refused() -> None:
    options = {"routes": {"turns": f"{HERE}.own_of_turns"}}
    with pytest.raises(
        ConfigError, match=r"own_of_turns returned a Score with verdicts or turn_values, which are used "
    ):
        await score("turns", "x", "y", **options)


async def test_the_first_failure_names_its_row(caplog: pytest.LogCaptureFixture) -> None:
    options = {"routes": {"named": f"{HERE}.own_broken"}}
    with caplog.at_level(logging.WARNING):
        assert await score("named", "x", "y", {"index": 3}, **options) == FAILED
    (record,) = caplog.records
    assert "for the row with extra_info.index 3, data_source 'named', ground_truth 'y'; further" in record.getMessage()


@pytest.mark.parametrize("what", ["gone", "refused", "http"])
async def test_what_a_function_of_the_users_own_needs_and_is_not_there(what: str) -> None:
    assert await score("mine", "x", what, routes={"mine": f"{HERE}.own_service"}) == OUTAGE


class Container(dict):  # type: ignore[type-arg]
    """A mapping like Hydra's, which JSON cannot write."""


async def test_options_and_ground_truths_come_from_hydra_and_numpy() -> None:
    import numpy as np

    truth = {"target": np.array(["Paris", "City of Light"], dtype=object), "sql": None}
    options = {"qa": Container(metric="f1"), "routes": Container({"x": "qa"})}
    assert await score("x", "<answer>city of light</answer>", truth, **options) == RIGHT
    assert await score("gsm8k", "#### 42", np.int64(42)) == RIGHT


TRUTHS: dict[str, Any] = {
    "gsm8k": "42",
    "math": "42",
    "searchr1_nq": ["42"],
    "tool_n1": [{"name": "f", "arguments": {}}],
    "reasoning_gym/countdown": {"answer": "6*7", "metadata": {"numbers": [6, 7], "target": 42}},
    "taco": {"inputs": [""], "outputs": ["42"]},
    "mbpp": {"assert_case": ["assert f(1) == 42"]},
    "spider": {"sql": "SELECT 42", "db_id": "empty"},
}
WRITTEN = {
    "gsm8k": "#### {}",
    "math": "\\boxed{{{}}}",
    "searchr1_nq": "<answer>{}</answer>",
    "tool_n1": "<think></think><tool_call>{}</tool_call>",
    "reasoning_gym/countdown": "Answer: {}",
    "taco": "```python\n{}\n```",
    "mbpp": "```python\n{}\n```",
    "spider": "<solution>{}</solution>",
}
MARKS = ["####", "\\boxed{", "}", "<answer>", "</answer>", "<think>", "</think>", "```python\n", "\n```\n", "Answer:"]
MARKS += ["<tool_call>", "</tool_call>", "<solution>", "</solution>"]
WORDS = [
    "42",
    '{"name": "f", "arguments": {}}',
    "^",
    "{",
    "\\frac",
    "\\sqrt",
    "(",
    ")",
    "print(",
    "\0",
    "SELECT ",
    ", ",
    "*",
]
PIECES = st.one_of(st.sampled_from(MARKS), st.sampled_from(WORDS), st.text(max_size=5))
ANSWERS = st.lists(st.one_of(st.sampled_from(WORDS), st.text(max_size=5)), max_size=8).map("".join)


@pytest.mark.parametrize("source", TRUTHS)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.lists(PIECES, max_size=12).map("".join), answer=ANSWERS)
def test_no_text_breaks_a_reward(source: str, text: str, answer: str, run: Any, root: str) -> None:
    options = {name: {"timeout_s": 1.0} for name in ("math", "reasoning_gym", "code", "sql")}
    options["sql"]["root"] = root
    for said in (text, WRITTEN[source].format(answer)):
        found = run(compute_score(source, said, TRUTHS[source], {"assistant_texts": [said]}, **options))
        assert list(found) == list(KEYS)
        assert 0.0 <= found["score"] <= 1.0
        assert found["answered"] or not found["score"]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("databases")
    with sqlite3.connect(folder / "empty.sqlite") as database:
        database.execute("CREATE TABLE t(x)")
    database.close()
    return str(folder)


@pytest.fixture(scope="module")
def run() -> Iterator[Any]:
    """Yield a function that runs every example in one loop, so that its processes stay warm."""
    with asyncio.Runner() as runner:
        yield runner.run
        runner.run(aclose())
