"""`Gsm8kTool`: scores, step rewards, and its memory of a conversation."""

from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from tests.serving import conversation
from verl_multiturn import ConfigError, load_tools
from verl_multiturn.tools.gsm8k import Gsm8kTool, parse_answer
from verl_multiturn.tools.loading.kwargs import bind_kwargs


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("18", "18"),
        ("18.0", "18"),
        ("#### 18", "18"),
        ("so 3 + 4 = 7\n#### 1,234,567", "1234567"),
        ("$18.", "18"),
        ("$1,000.50", "1000.5"),
        ("25%", "25"),
        ("-$5", "-5"),
        ("\N{MINUS SIGN}5", "-5"),
        ("\N{EN DASH}5", "-5"),
        ("2 apples and 3 pears, so 2 + 3 = 5", "5"),
        ("- 5", "5"),  # an entry of a list
        ("2 or **5**", "5"),
        ("it was 10 before; 5", "5"),
        ("<b>5</b>", "5"),
        ("5 cm\u00b2", "5"),
        ("x = .5", "0.5"),
        ("The answer is 18 dollars.", "18"),
        ("12, 13", "13"),
        ("9" * 400, "9" * 400),
    ],
)
def test_the_number_that_an_answer_states(text: str, number: str) -> None:
    assert parse_answer(text) == Decimal(number)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "####",
        "none",
        "-",
        "$",
        "1 #### unknown",
        "10-5",
        "4 - 5",
        "4\N{EN DASH}5",
        "10/5",
        "10 / 5",
        "2+5",
        "2*5",
        "2^5",
        "4..5",
        "5\N{SUPERSCRIPT TWO}",
        "\N{SQUARE ROOT}5",
        r"\sqrt{5}",
        "\N{NOT EQUAL TO}5",
        "!= 5",
        "< 5",
        "1e5",
        "0x5",
        "(2+3)-5",
        "6\N{PLUS-MINUS SIGN}5",
    ],
)
def test_no_number(text: str) -> None:
    assert parse_answer(text) is None


async def said(answers: list[str], truth: Any = "18") -> tuple[list[float], float, str]:
    tool = Gsm8kTool({})
    steps, texts = [], []
    async with conversation(tool, ground_truth=truth) as call:
        for answer in answers:
            response, reward, _ = await call(answer=answer)
            steps.append(reward)
            texts.append(response.text)
        return steps, await tool.calc_reward("c1"), "\n".join(texts)


async def test_a_step_costs_unless_it_improves_on_the_best_so_far() -> None:
    assert (await said(["17", "18", "18.0", "17", "18"]))[0] == [-0.05, 0.0, -0.05, -0.05, -0.05]


async def test_the_reward_is_that_of_the_last_answer() -> None:
    assert (await said(["17", "$18."]))[1] == 1.0
    assert (await said(["18", "17"]))[1] == 0.0
    assert (await said(["18", "no idea"]))[1] == 0.0
    assert (await said([]))[1] == 0.0


async def test_the_score_is_told_and_the_truth_is_not() -> None:
    _, _, text = await said(["17", "nothing"], truth="#### 18")
    assert text == "Parsed answer: 17. Score: 0.0.\nNo number was found in the answer. Score: 0.0."
    assert (await said(["18"]))[2] == "Parsed answer: 18. Score: 1.0."


async def test_conversations_do_not_see_each_other_and_leave_nothing() -> None:
    tool = Gsm8kTool({})
    async with conversation(tool, "a", ground_truth=1) as a, conversation(tool, "b", ground_truth=2.0) as b:
        assert (await a(answer="1"))[1] == 0.0
        assert (await b(answer="1"))[1] == -0.05
        assert [await tool.calc_reward(name) for name in "ab"] == [1.0, 0.0]
    assert not tool._states


async def test_a_row_without_a_usable_truth() -> None:
    with pytest.raises(ConfigError, match=r"ground_truth: expected a number, got 'n/a'"):
        await Gsm8kTool({}).create("c1", ground_truth="n/a")
    with pytest.raises(ConfigError, match="ground_truth"):
        bind_kwargs(Gsm8kTool({}), "create", {}, "row 3")
    with pytest.raises(ConfigError, match=r"config.answer: unknown setting"):
        Gsm8kTool({"answer": 1})


def test_the_yaml_of_the_original_recipe(tmp_path: Path) -> None:
    path = tmp_path / "gsm8k_tool_config.yaml"
    path.write_text(
        """
tools:
  - class_name: "verl_multiturn.tools.gsm8k.Gsm8kTool"
    config: {}
    tool_schema:
      type: "function"
      function:
        name: "calc_gsm8k_reward"
        description: "Scores an answer (1.0 if it is correct, 0.0 if not)."
        parameters:
          type: "object"
          properties:
            answer:
              type: "string"
              description: "The model's answer, a number."
          required: ["answer"]
"""
    )
    assert list(load_tools(path)) == ["calc_gsm8k_reward"]
