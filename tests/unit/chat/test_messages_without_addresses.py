"""No message for the model has an address in memory in it, and the same mistake has the same message again."""

import re
from collections.abc import Sequence
from typing import Annotated, Any

import pytest
from pydantic import AfterValidator

from tests.call_texts import TABLE
from tests.conftest import CharTokenizer, EchoTool
from tests.sessions import HI, session
from tests.unit.tools.test_functions import call
from verl_multiturn.chat.parsing.formats import make_call_parser
from verl_multiturn.chat.parsing.reasoning import REASONING_MARKS
from verl_multiturn.chat.parsing.turns import MalformedCall
from verl_multiturn.tools.calculator import evaluate

EXPRESSIONS = [
    "1 + x",
    "1 + 2",
    "-x",
    "lambda: 0",
    "[1, f()]",
    "{'a': 1 + 'b'}",
    "{1, 2}",
    "f'{x}'",
    "x.y",
    "x[1]",
    "*x",
    "(x := 1)",
    "(i for i in x)",
    "b'a'",
    "1j",
    "...",
    "{**x}",
    "[[[[x]]]]",
    "set()",
    "1 if x else 2",
    "await x",
    "[i for i in 'a']",
    "{[]: 1}",
    "{x: 1}",
    "1e999",
    "'a' 'b' + x",
    "not x",
]
WRONG = [f"[f(a={expression})]" for expression in EXPRESSIONS] + [
    "[f(1)]",
    "[f(**x)]",
    "[f(a=1, a=2)]",
    "[1 + 2]",
    "[x]",
    "[f(a=1), 2]",
    "[lambda: 0]",
    "[f(a=",
]
HAS_ADDRESS = re.compile(r"0x[0-9a-f]{6,}")


async def problems(name: str, text: str, schemas: Sequence[dict[str, Any]] = ()) -> list[str]:
    tokenizer = CharTokenizer()
    parser = make_call_parser(name, tokenizer, [tokenizer.eos_token_id], REASONING_MARKS)
    turn = await parser.parse(tokenizer.turn(text), list(schemas), 0)
    return [each.problem for each in turn.calls if isinstance(each, MalformedCall)]


@pytest.mark.parametrize("text", WRONG)
async def test_a_python_call_that_cannot_be_read(text: str) -> None:
    first, again = await problems("pythonic", text), await problems("pythonic", text)
    assert first == again
    assert not HAS_ADDRESS.search(" ".join(first))
    assert "object" not in " ".join(first).replace("the keys of an object", "")


async def test_the_part_that_is_no_value_is_shown() -> None:
    (problem,) = await problems("pythonic", "[f(a=[1, 2 + x])]")
    assert "(2 + x is no plain value)" in problem or "(x is no plain value)" in problem


@pytest.mark.parametrize(
    ("name", "text"), [(name, text) for each in TABLE for name in each.names.split() for text in each.broken]
)
async def test_a_broken_call_of_any_format(name: str, text: str) -> None:
    first, again = await problems(name, text), await problems(name, text)
    assert first == again
    assert not HAS_ADDRESS.search(" ".join(first))


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_the_calculators_refusals(expression: str) -> None:
    try:
        said = str(evaluate(expression))
    except ValueError as error:
        said = str(error)
    assert " at 0x" not in said
    assert "object" not in said


def no_page(value: str) -> str:
    raise ValueError(f"no page {object()!r} for {value!r}")


@pytest.mark.parametrize(
    "error", [OSError(f"{object()}"), ValueError(f"not {(lambda: 0)!r}"), KeyError(object()), RuntimeError([object()])]
)
async def test_what_a_tool_raises(error: Exception) -> None:
    async with session(EchoTool({"execute": error})) as opened:
        (result,) = await opened.execute([HI])
    async with session(EchoTool({"create": error})) as opened:
        (created,) = await opened.execute([HI])
    assert not HAS_ADDRESS.search(result.text + created.text)


async def test_what_a_check_of_an_argument_raises() -> None:
    def open_page(page: Annotated[str, AfterValidator(no_page)]) -> str:
        return page

    text = (await call(open_page, {"page": "a"})).text
    assert text == "Error: argument 'page': Value error, no page <object object> for 'a'"
