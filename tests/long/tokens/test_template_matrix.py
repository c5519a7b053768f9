"""The invariants of a trajectory over every family, with texts, calls and stops that Hypothesis draws."""

import asyncio
import random
from functools import partial
from unicodedata import normalize

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import idle_loop
from tests.long.tokens.template_matrix import run
from tests.support.attacks import attacks, benign
from tests.support.families import family, names
from tests.support.template_play import STOPS, WITHOUT_TOOLS, play, quoted_call, template_of
from verl_multiturn.chat.template import examine_template
from verl_multiturn.chat.template_rules import refusals

pytestmark = pytest.mark.stack

# A call's argument may hold any letters, but no white space or angle brackets, which the XML formats give a meaning.
# The text is in NFC, since Qwen's tokenizer normalizes its input.
LETTERS = st.text(st.characters(categories=("L", "N")), min_size=1, max_size=8).map(partial(normalize, "NFC"))
WORDS = st.lists(st.one_of(LETTERS, st.sampled_from(["null", "None", "true", "1e3"])), min_size=1, max_size=4)
CONTROL = ["<|im_end|>", "<|im_start|>", "<tool_call>", "</tool_response>", "<|eot_id|>", "<think>", "[TOOL_CALLS]"]
TEXTS = st.one_of(
    st.text(max_size=60), st.sampled_from(benign()), st.sampled_from(attacks(CONTROL)), st.sampled_from(CONTROL)
)


def test_there_are_enough_families() -> None:
    tools = [name for name in names() if family(name).format]
    assert len(tools) >= 15
    assert sum(family(name).real_tokenizer for name in names()) >= 5


@pytest.mark.parametrize("name", names())
def test_no_rule_is_refused(name: str) -> None:
    tools = family(name).format is not None
    rules = asyncio.run(examine_template(template_of(name), tools))
    assert refusals(rules) == ""
    assert any("tool" in rule.name for rule in rules) == tools


@pytest.mark.parametrize("name", [name for name in names() if family(name).format])
def test_a_quoted_call_is_an_argument_or_malformed(name: str) -> None:
    chance = random.Random(name)
    for _ in range(6):
        words = ["sum", quoted_call(name, chance)][chance.randrange(2) :]
        assert idle_loop.run(play(name, words, ["42"] * 4, "finished")) == []


@pytest.mark.parametrize("name", names())
@settings(max_examples=12)
@given(words=WORDS, results=st.lists(TEXTS, min_size=4, max_size=4), data=st.data())
def test_what_always_holds(name: str, words: list[str], results: list[str], data: st.DataObject) -> None:
    stop = data.draw(st.sampled_from(list(STOPS) if family(name).format else WITHOUT_TOOLS))
    assert idle_loop.run(play(name, words, results, stop)) == []


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_drawn_cases_of_all_families() -> None:
    figures = run(60)
    assert figures["cases"] == 60 * len(names())
    assert figures["violations"] == 0
