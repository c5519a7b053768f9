"""Rewards that only read text: GSM8K, questions, tool calls, and the formats that they share."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.scoring import NO_ANSWER, RIGHT, RIGHT_UNFORMATTED, WRONG, WRONG_UNFORMATTED, Numbers, score
from verl_multiturn import ConfigError
from verl_multiturn.chat.model_text import last_tag
from verl_multiturn.rewards import compute_score
from verl_multiturn.rewards.answers import has_one, last_block, last_boxed, thinks_first
from verl_multiturn.rewards.qa import f1, normalize

STRICT: dict[str, Numbers] = {
    "so 6 × 7\n#### 42": RIGHT,
    "####42": RIGHT,
    "#### $42.00": RIGHT,
    "#### 42.": RIGHT,
    "#### 42\nThat is 17 less than 59.": RIGHT,
    "#### 41\n#### 42": RIGHT,
    "<think>#### 41</think>#### 42": RIGHT,
    "#### 41": WRONG,
    "#### -42": WRONG,
    "#### \N{MINUS SIGN}42": WRONG,
    "#### 42\n#### 41": WRONG,
    "#### 4,2.0.0": WRONG,
    "#### 42,": RIGHT,
    "#### 41.,42": WRONG,
    "#### 41,.,42": WRONG,
    "#### 1.1,42": WRONG,
    "#### 42.41,42": WRONG,
    "42": NO_ANSWER,
    "#### forty-two": NO_ANSWER,
    "#### x=42": NO_ANSWER,
    "####": NO_ANSWER,
    "#### 42\n####": NO_ANSWER,
    "": NO_ANSWER,
    "<think>#### 42": NO_ANSWER,
    "<think>#### 42</think>": NO_ANSWER,
    "#### " + "9" * 100_000: WRONG,
    "#" * 100_000: NO_ANSWER,
}
FLEXIBLE: dict[str, Numbers] = {
    "#### 42": RIGHT,
    "it is 42": RIGHT_UNFORMATTED,
    "17 of 59, so 42.": RIGHT_UNFORMATTED,
    "it costs $42, not less": RIGHT_UNFORMATTED,
    "42 or 43": WRONG_UNFORMATTED,
    "#### 42 dollars": RIGHT,
    "#### 42 dollars, that is $42.00": RIGHT,
    "#### **42**": RIGHT_UNFORMATTED,
    r"#### \boxed{42}": RIGHT_UNFORMATTED,
    "#### 41 42": WRONG,
    "#### 41 to 42": WRONG,
    "#### 41\n42": WRONG,
    "#### (42) not 41 but 42": RIGHT_UNFORMATTED,
    "84 =\n42": RIGHT_UNFORMATTED,
    "#### 42-42": WRONG_UNFORMATTED,
    "84-42": WRONG_UNFORMATTED,
    "84/42": WRONG_UNFORMATTED,
    "41 - 42": WRONG_UNFORMATTED,
    "nothing": NO_ANSWER,
}


async def test_gsm8k_strict() -> None:
    assert {text: await score("openai/gsm8k", text, "42") for text in STRICT} == STRICT


async def test_gsm8k_flexible() -> None:
    options = {"gsm8k": {"method": "flexible"}}
    assert {text: await score("openai/gsm8k", text, "42", **options) for text in FLEXIBLE} == FLEXIBLE


@pytest.mark.parametrize("truth", ["42", 42, 42.0, "#### 42", "$42", "so it is\n#### 42"])
async def test_gsm8k_ground_truths(truth: Any) -> None:
    assert await score("openai/gsm8k", "#### 42", truth) == RIGHT
    assert await score("openai/gsm8k", "#### 1,042", truth) == WRONG


async def test_gsm8k_needs_a_number() -> None:
    with pytest.raises(ConfigError, match=r"ground_truth of 'openai/gsm8k': expected a number, got 'none'"):
        await score("openai/gsm8k", "#### 42", "none")


ANSWERS: dict[str, Numbers] = {
    "<answer>Paris</answer>": RIGHT,
    "<answer> the  PARIS!</answer> I am sure": RIGHT,
    "<answer>City of Light</answer>": RIGHT,
    "<think>Lyon? <answer>Lyon</answer></think><answer>Paris</answer>": RIGHT,
    "<answer>Lyon</answer><answer>Paris</answer>": RIGHT_UNFORMATTED,
    "<answer><answer>Paris</answer>": WRONG_UNFORMATTED,
    "<answer>Paris</answer>" * 11: (0.25, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0),
    # An answer in a thought counts, closed or not, as in Search-R1.
    "<think>hm <answer>Paris</answer>": RIGHT_UNFORMATTED,
    "<think>hm <answer>Paris</answer></think>": RIGHT_UNFORMATTED,
    "<think><answer>Paris</answer></think>Lyon": RIGHT_UNFORMATTED,
    "<think><answer>Paris</answer></think><answer>Lyon</answer>": WRONG,
    "<answer>Paris</answer></answer>": RIGHT_UNFORMATTED,
    "<answer>Paris</answer><answer>Lyon</answer>": WRONG_UNFORMATTED,
    "<answer>Paris, Lyon</answer>": WRONG,
    "<answer>Pariss</answer>": WRONG,
    "<answer>!</answer>": WRONG,
    f"<answer>{'Paris ' * 100_000}</answer>": WRONG,
    "<answer></answer>": (0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0),
    "Paris": NO_ANSWER,
    "<answer>Paris": NO_ANSWER,
    "Paris</answer>": NO_ANSWER,
    "</answer>Paris<answer>": NO_ANSWER,
    "<answer>" * 10_000: NO_ANSWER,
}


GOLD = ["Paris", "the City of Light"]


@pytest.mark.parametrize("truth", [{"target": GOLD}, GOLD, json.dumps(GOLD), json.dumps({"target": GOLD})], ids=repr)
async def test_questions(truth: Any) -> None:
    assert {text: await score("searchR1_nq", text, truth) for text in ANSWERS} == ANSWERS


async def test_an_answer_before_the_last_turn_counts() -> None:
    turns = {"assistant_texts": ["<answer>Paris</answer> Let me look.", "I am not sure."]}
    assert await score("searchR1_nq", "", GOLD, turns) == RIGHT_UNFORMATTED


async def test_f1_is_the_score_and_exact_match_the_accuracy() -> None:
    options = {"qa": {"metric": "f1"}}
    found = await score("searchR1_nq", "<answer>Paris in France</answer>", ["Paris", "London"], **options)
    assert found == (0.5, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0)
    assert await score("searchR1_nq", "<answer>the Paris</answer>", "Paris", **options) == RIGHT
    assert f1("a bb c", "bb c d") == pytest.approx(2 * (2 / 2) * (2 / 3) / (2 / 2 + 2 / 3))
    assert (f1("the", "The"), f1("the", "an"), f1("the", "b"), f1("x x y", "x z")) == (1.0, 0.0, 0.0, 0.4)
    assert normalize("  The U.S.A., an  'Island'? ") == "usa island"


# An answer, a gold answer, and whether they are the same.
LETTERS = [
    ("the", "The A", False),
    ("A", "The A", True),
    ("?", "!", False),
    ("the", "!", False),
    (" ! ", "!", True),
    ("an", "The", False),
    ("the", "The", True),
    ("the  the", "The The", True),
    ("the", "The The", False),
    ("A, B", "B", False),
    ("A D", "D", False),
    ("The A, B", "B", False),
    ("A. C.", "C", False),
    ("hepatitis", "Hepatitis A", False),
    ("Hepatitis a", "hepatitis A", True),
    ("a 'B'", "B", False),
    ("A. Paris", "Paris", True),
    ("a town", "the town", True),
    ("vitamin a deficiency", "Vitamin deficiency", True),
    ("a 7", "7", True),
    ("a U.S. state", "US state", True),
    ("a T-shirt", "T-shirt", True),
    ("B-side", "a B-side", True),
    ("a Q&A session", "Q&A session", True),
    ("a $5 bill", "$5 bill", True),
    ("a #1 hit", "#1 hit", True),
    ("a “Rose”", "“Rose”", True),
    ("A & B", "B", False),
    ("A (B)", "B", False),
    ("A, B-C", "B-C", False),
]


@pytest.mark.parametrize("metric", ["em", "f1"])
async def test_letters_and_marks_are_answers(metric: str) -> None:
    for answer, gold, same in LETTERS:
        found = await score("searchR1_nq", f"<answer>{answer}</answer>", gold, qa={"metric": metric})
        assert found[1] == float(same), (answer, gold)
        assert (found[0] == 1.0) is same, (answer, gold)


async def test_an_answer_that_only_looks_like_json() -> None:
    assert await score("searchR1_nq", "<answer>[sic</answer>", "[sic") == RIGHT


@pytest.mark.parametrize("truth", [[], {"target": []}, {"answer": "Paris"}, 42, [42], None])
async def test_questions_need_answers(truth: Any) -> None:
    with pytest.raises(ConfigError, match="expected an answer or a list of them"):
        await score("searchR1_nq", "<answer>Paris</answer>", truth)


CALL = {"name": "weather", "arguments": {"city": "Paris", "days": 2}}
OTHER = {"name": "time", "arguments": {}}


def called(*calls: Any) -> list[list[dict[str, str]]]:
    """Return these calls as those of the first of two turns."""
    return [[{"name": name, "arguments": arguments} for name, arguments in calls], []]


WEATHER = ("weather", '{"days": 2, "city": "Paris"}')
TIME = ("time", "{}")
CALLS: list[tuple[str, Any, Numbers]] = [
    ("<think>hm</think>", [WEATHER, TIME], RIGHT),
    ("<think>hm</think>\n", [TIME, WEATHER], RIGHT),
    ("hm</think>", [TIME, WEATHER], RIGHT),  # the template opened it
    ("<think>hm</think>", [WEATHER], WRONG),
    ("<think>hm</think>", [WEATHER, TIME, TIME], WRONG),
    ("<think>hm</think>", [("weather", '{"city": "Paris", "days": 2.0}'), TIME], WRONG),
    ("<think>hm</think>", [("weather", '{"city": "Paris", "days": "2"}'), TIME], WRONG),
    ("<think>hm</think>", [("weather", '{"city": "Paris", "days": 2, "x": null}'), TIME], WRONG),
    ("<think>hm</think>", [("Weather", WEATHER[1]), TIME], WRONG),
    ("hm", [WEATHER, TIME], WRONG_UNFORMATTED),
    ("<think>hm", [WEATHER, TIME], WRONG_UNFORMATTED),
    ("<think>a</think><think>b</think>", [WEATHER, TIME], WRONG_UNFORMATTED),
    ("well <think>hm</think>", [WEATHER, TIME], WRONG_UNFORMATTED),
    ("<think>hm</think>", [WEATHER, TIME, ("", "{}")], NO_ANSWER),
    ("<think>hm</think>", [WEATHER, TIME, ("", "<tool_call>{")], NO_ANSWER),
    ("<think>hm</think>", [WEATHER, ("time", "[]")], NO_ANSWER),
    ("<think>hm</think>", [WEATHER, ("time", "[" * 100_000)], NO_ANSWER),
    ("<think>hm</think>", [WEATHER, ("time", f'{{"x": {"9" * 10_000}}}')], NO_ANSWER),
    ("<think>hm</think>", [], (0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0)),
]


@pytest.mark.parametrize("truth", [[CALL, OTHER], json.dumps([OTHER, CALL])], ids=["list", "JSON"])
async def test_tool_calls_that_the_agent_loop_parsed(truth: Any) -> None:
    for text, calls, expected in CALLS:
        extra = {"assistant_calls": called(*calls)}
        assert await score("tool_n1", text, truth, extra) == expected, (text, calls)


NAME, DAYS = '"name": "time"', '"days": 2'
WRITTEN: dict[str, Numbers] = {
    f"<think>hm</think><tool_call>{json.dumps(CALL)}</tool_call>": RIGHT,
    f"<think>hm</think> <tool_call>[{json.dumps(CALL)}]</tool_call> done": RIGHT,
    f"<think><tool_call>x</tool_call></think><tool_call>[{json.dumps(CALL)}]</tool_call>": RIGHT,
    f"<think>hm</think><tool_call>{json.dumps(CALL)}</tool_call><tool_call>[]</tool_call>": RIGHT,
    f"<think>hm</think><tool_call>{json.dumps(OTHER)}</tool_call>": WRONG,
    f"<tool_call>{json.dumps(CALL)}</tool_call><think>hm</think>": (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0),
    f"<tool_call>{json.dumps(CALL)}</tool_call>": WRONG_UNFORMATTED,
    f"<think>hm</think><tool_call>{json.dumps(CALL)}": NO_ANSWER,
    "<think>hm</think><tool_call>weather</tool_call>": NO_ANSWER,
    '<think>hm</think><tool_call>{"name": "weather"}</tool_call>': NO_ANSWER,
    "<think>hm</think><tool_call>" + "[" * 100_000 + "</tool_call>": NO_ANSWER,
    "<think>hm</think>" + "<tool_call>" * 10_000: NO_ANSWER,
    # The same key twice: no tool could be called with both values.
    f"<think>hm</think><tool_call>{{{NAME}, {json.dumps(CALL)[1:]}</tool_call>": NO_ANSWER,
    f"<think>hm</think><tool_call>{json.dumps(CALL).replace(DAYS, f'{DAYS}, {DAYS}')}</tool_call>": NO_ANSWER,
}


async def test_tool_calls_that_nobody_parsed() -> None:
    for text, expected in WRITTEN.items():
        assert await score("tool_n1", text, [CALL], {"assistant_calls": None}) == expected, text


async def test_what_is_written_counts_before_what_a_parser_makes_of_it() -> None:
    """A parser reads missing arguments as `{}`, and a text of JSON as an object; the written text decides."""
    written = '<think>hm</think><tool_call>{"name": "weather", "arguments": %s}</tool_call>'
    arguments = json.dumps(CALL["arguments"])
    for text, expected in (
        (written % arguments, RIGHT),
        (written % json.dumps(arguments), NO_ANSWER),
        ('<think>hm</think><tool_call>{"name": "weather"}</tool_call>', NO_ANSWER),
    ):
        extra_info = {"assistant_texts": ["<think>hm</think>"], "assistant_calls": called(("weather", arguments))[:1]}
        found = await compute_score("toolcall", text, [CALL], extra_info)
        assert tuple(found.values()) == expected, text


async def test_a_tool_that_repeats_a_call_does_not_make_it() -> None:
    made = '<think>hm</think><tool_call>{"name": "echo", "arguments": {}}</tool_call>'
    answer = f"<tool_response></think><tool_call>{json.dumps(CALL)}</tool_call></tool_response>"
    extra_info = {"assistant_texts": ["<think>hm</think>"], "assistant_calls": called(("echo", "{}"))[:1]}
    found = await compute_score("toolcall", made + answer, [CALL], extra_info)
    assert tuple(found.values()) == WRONG


async def test_no_call_where_none_is_asked_for() -> None:
    assert await score("tool_n1", "<think>no need</think>Hello.", "[]") == RIGHT
    assert await score("tool_n1", "<think>hm</think>", "[]", {"assistant_calls": called(TIME)}) == WRONG
    assert await score("tool_n1", "Hello.", "[]", tool_n1={"require_think": False}) == RIGHT


@pytest.mark.parametrize("truth", ["weather()", "{}", [{"name": "x"}], [{"arguments": {}}], None, 42])
async def test_tool_calls_need_a_list(truth: Any) -> None:
    with pytest.raises(ConfigError, match=r"ground_truth of 'tool_n1': expected a list"):
        await score("tool_n1", "", truth)


def test_where_answers_stand() -> None:
    assert last_tag("<a>1</a><a> 2 </a>", "a") == "2"
    assert last_tag("</a><a>", "a") is None
    assert [has_one(text, "a") for text in ("<a></a>", "</a><a>", "<a></a><a>", "<a>", "")] == [True] + [False] * 4
    thoughts = ["<think>x</think>y", "x</think>y", "y<think>x</think>", "<think>x", "<think></think></think>", "y"]
    assert [thinks_first(text) for text in thoughts] == [True, True, False, False, False, False]
    assert last_boxed(r"\boxed{\boxed{5}}") == "5"
    assert last_boxed(r"\boxed{ \boxed{\boxed{5} } }") == "5"
    assert last_boxed(r"\boxed{x=\boxed{5}}") == "x={5}"
    assert last_boxed(r"\boxed{\text{not }\boxed{5}}") == r"\text{not }{5}"
    assert last_boxed(r"\boxed{6}, so \boxed{\boxed{5} or \boxed{7}}") == "{5} or {7}"
    # A box that is not closed takes in the rest of its line, and no more.
    assert last_boxed(r"\boxed{\boxed{5}") is None
    assert last_boxed(r"\boxed{6 \boxed{5}") is None
    assert last_boxed(r"\boxed{6 {\boxed{5}") is None
    assert last_boxed("It goes into \\boxed{.\nSo: \\boxed{5}") == "5"
    assert last_boxed(r"\boxed{" * 100_000) is None
    assert last_boxed(r"\boxed{" * 100_000 + "}" * 100_000) == ""
    assert last_boxed("\\boxed{1} \n" * 30_000) == "1"
    assert last_boxed(r"\boxed{1} \boxed{\frac{1}{2}}") == r"\frac{1}{2}"
    assert last_boxed(r"\boxed{\{1, 2\}}") == r"\{1, 2\}"
    assert last_boxed(r"\boxed{1} \boxed{2") is None
    assert last_boxed(r"\boxed 5") is None
    assert last_block("```python\na\n```\nand\n```py\nb\nc\n```", ("python", "py")) == "b\nc"
    assert last_block("```python\na\n```\n```\nb\n```\n```text\nc", ("python",)) == "a"
    assert last_block("```python\na\n```\n```python\nb", ("python",)) is None
    assert last_block("no block", ("python",)) is None
