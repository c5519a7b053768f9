"""Rewards that only read text, each beside its original.

`gsm8k` and `qa` are compared with verl's own code, `tool_n1` and `otc` with the papers' published rules,
`reasoning_gym` with the package's own verifiers.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

from tests.long.rewards.parity import Compared, of_verl, score
from verl_multiturn.advantages.otc import r_tools

VALUE = "numbers by value"
GSM8K = [
    ("so\n#### 42", "42", ""),
    ("#### 41", "42", ""),
    ("#### -42", "-42", ""),
    ("#### 1,042", "1042", ""),
    ("#### 41\n#### 42", "42", ""),
    ("42", "42", ""),
    ("#### forty-two", "42", ""),
    ("", "42", ""),
    ("#### 41.,42", "42", ""),
    ("#### 42.0", "42", VALUE),
    ("####42", "42", VALUE),
    ("#### $42", "42", VALUE),
    ("#### 42.", "42", VALUE),
    ("#### 42\n" + "That is so. " * 30, "42", "a long text after the answer"),
]


async def gsm8k(quick: bool) -> AsyncIterator[Compared]:
    """Compare with verl's `gsm8k.py` in strict mode."""
    original = of_verl("gsm8k.py")
    for text, gold, stated in GSM8K:
        theirs = float(original.compute_score(text, gold))
        yield Compared("gsm8k", text[:60], await score("openai/gsm8k", [text], gold), theirs, stated)


IN_TOOL = "an answer in a tool's output"
QA = [
    (["<answer>Paris</answer>"], ""),
    (["<answer> the  PARIS!</answer> I am sure"], ""),
    (["<answer>City of Light</answer>"], ""),
    (["<answer>Lyon</answer>"], ""),
    (["<answer>Paris, Lyon</answer>"], ""),
    (["<answer></answer>"], ""),
    (["Paris"], ""),
    (["<answer>Paris"], ""),
    (["Paris</answer>"], ""),
    (["</answer>Paris<answer>"], ""),
    (["<think>hm <answer>Paris</answer>"], ""),
    (["<think><answer>Paris</answer></think>"], ""),
    (["<think><answer>Lyon</answer></think><answer>Paris</answer>"], ""),
    (["<think><answer>Paris</answer></think><answer>Lyon</answer>"], ""),
    (["<answer>Paris</answer>", "Done."], ""),
    (["<answer><answer>Paris</answer>"], ""),
    (["<answer>Paris</answer></answer>"], ""),
    (["<answer>Paris</answer>" * 10], ""),
    (["<answer>Paris</answer>" * 11], ""),
    (["<answer>A. Paris</answer>"], ""),
]
LETTER, NO_WORDS = "a letter is no article", "an answer without words"
# An answer, its gold answer, and the row of docs/reference/reward-functions.md that states a difference.
QA_LETTERS = [
    ("B", "B", ""),
    ("A", "B", ""),
    ("B, C", "B", ""),
    ("a town", "the town", ""),
    ("vitamin a deficiency", "vitamin deficiency", ""),
    ("The Who", "The Who", ""),
    ("A, B", "B", LETTER),
    ("A D", "D", LETTER),
    ("Hepatitis", "Hepatitis A", LETTER),
    ("the", "The A", LETTER),
    ("A", "The A", ""),
    ("!", "!", ""),
    ("?", "!", NO_WORDS),
    ("the", "The The", NO_WORDS),
    ("The  the", "The The", ""),
]


async def qa(quick: bool) -> AsyncIterator[Compared]:
    """Compare with verl's `search_r1_like_qa_em.py`, which is Search-R1's."""
    original = of_verl("search_r1_like_qa_em.py")
    gold = {"target": ["Paris", "the City of Light"]}

    def says(response: str, gold: dict[str, Any] = gold) -> float:
        with contextlib.redirect_stdout(io.StringIO()):  # it prints some of its inputs
            return float(original.compute_score(response, gold))

    for texts, stated in QA:
        ours = await score("searchR1_nq", texts, gold)
        yield Compared("qa", repr(texts)[:80], ours, says("\n".join(texts)), stated)
    for answer, right, stated in QA_LETTERS:
        text, truth = f"<answer>{answer}</answer>", {"target": [right]}
        ours = await score("searchR1_nq", [text], truth)
        yield Compared("qa", f"{answer} for {right}", ours, says(text, truth), stated)
    found = "<information><answer>Paris</answer></information>"
    yield Compared("qa", found, await score("searchR1_nq", ["I do not know."], gold), says(found), IN_TOOL)


CALL: dict[str, Any] = {"name": "weather", "arguments": {"city": "Paris", "days": 2}}
OTHER: dict[str, Any] = {"name": "time", "arguments": {"zone": "CET"}}
T = "<think>hm</think>"
TAGS, TWICE = "calls in tags of their own", "a key twice"


def _written(value: Any) -> str:
    return f"<tool_call>{json.dumps(value)}</tool_call>"


N1: list[tuple[str, list[Any], str]] = [
    (f"{T} {_written([CALL])}", [CALL], ""),
    (f"{T} {_written(CALL)}", [CALL], ""),
    (f"{T} {_written([OTHER, CALL])}", [CALL, OTHER], ""),
    (f"{T} {_written([CALL, CALL])}", [CALL], ""),
    (f"{T} {_written([OTHER])}", [CALL], ""),
    (f"{T} {_written([{'name': 'weather'}])}", [CALL], ""),
    (f"{T} {_written([{'name': 'weather'}])}", [{"name": "weather", "arguments": {}}], ""),
    (f"{T} {_written([{**CALL, 'arguments': json.dumps(CALL['arguments'])}])}", [CALL], ""),
    (f"{T} {_written([{**CALL, 'arguments': {'city': 'Paris', 'days': '2'}}])}", [CALL], ""),
    (f"{T} {_written([{**CALL, 'arguments': {'days': 2, 'city': 'Paris'}}])}", [CALL], ""),
    (f"{T} {_written([{**CALL, 'arguments': {'city': 'Paris'}}])}", [CALL], ""),
    (f"{T} {_written([{**CALL, 'name': 'Weather'}])}", [CALL], ""),
    (_written([CALL]), [CALL], ""),
    (f"{T} weather(city='Paris', days=2)", [CALL], ""),
    (f"{T} <tool_call>weather</tool_call>", [CALL], ""),
    (f"{T} <tool_call>{json.dumps(CALL)}", [CALL], ""),
    (f"{T} {_written(CALL)}{_written(OTHER)}", [CALL, OTHER], TAGS),
    (f"{T} {_written([CALL]).replace('{', '{' + json.dumps('name') + ': 1, ', 1)}", [CALL], TWICE),
]


def tool_n1_says(text: str, gold: list[Any]) -> float:
    """Score a text by the rule of arXiv 2505.00024, section 3.2.

    The score is 1.0 for the right format (`<think>…</think>`, then one `<tool_call>…</tool_call>` with a call or a list
    of calls) with the same calls in any order; else 0.0.
    """
    parts = re.fullmatch(
        r"\s*<think>.*?</think>\s*<tool_call>((?:(?!</?tool_call>).)*)</tool_call>\s*", text, re.DOTALL
    )
    try:
        calls = json.loads(parts[1]) if parts else None
        calls = [calls] if isinstance(calls, dict) else calls
        counted = Counter((call["name"], json.dumps(call["arguments"], sort_keys=True)) for call in calls)
    except (ValueError, TypeError, KeyError):
        return 0.0
    return float(counted == Counter((call["name"], json.dumps(call["arguments"], sort_keys=True)) for call in gold))


async def tool_n1(quick: bool) -> AsyncIterator[Compared]:
    """Compare with the rule of Tool-N1's paper.

    Our reward gets the agent loop's data: the parser's calls, with their arguments completed, beside the text.
    """
    for text, gold, stated in N1:
        parsed = [("weather", json.dumps(CALL["arguments"]))] if "<tool_call>" in text else []
        ours = await score("toolcall", [text], gold, [parsed])
        yield Compared("tool_n1", text[:100], ours, tool_n1_says(text, gold), stated)


GYM = ["basic_arithmetic", "chain_sum", "polynomial_multiplication", "sudoku", "word_ladder", "countdown"]

# Data sets, the text before the right answer, and the row of reward-functions.md that states the difference.
GYM_OTHERS = [
    ("knights_knaves", "", ""),
    ("knights_knaves", "not ", "an answer that is taken back"),
    ("gsm_symbolic", "", ""),
    ("gsm_symbolic", "-", "an answer that is taken back"),
    ("game_of_life_halting", "", ""),
    ("game_of_life_halting", "not ", "any text for `False`"),
]


async def reasoning_gym(quick: bool) -> AsyncIterator[Compared]:
    """Compare with the verifiers of reasoning_gym, run without our guard, on right and wrong answers."""
    import reasoning_gym as package

    for name in GYM:
        dataset = package.create_dataset(name, seed=11, size=2)
        entry = dataset[0]
        for answer in (str(entry["answer"]), str(dataset[1]["answer"]), "42"):
            options = {"partial_credit": True, "timeout_s": 60.0}
            text, truth = f"<answer>{answer}</answer>", json.dumps(entry)
            ours = await score(f"reasoning_gym/{name}", [text], truth, reasoning_gym=options)
            yield Compared("reasoning_gym", f"{name}: {answer[:40]}", ours, dataset.score_answer(answer.strip(), entry))
    for name, before, stated in GYM_OTHERS:
        dataset = package.create_dataset(name, seed=11, size=1)
        entry, answer = dataset[0], f"{before}{dataset[0]['answer']}"
        text, truth = f"<answer>{answer}</answer>", json.dumps(entry, default=str)
        ours = await score(f"reasoning_gym/{name}", [text], truth, reasoning_gym={"timeout_s": 60.0})
        yield Compared("reasoning_gym", f"{name}: {answer[:40]}", ours, dataset.score_answer(answer, entry), stated)


async def otc(quick: bool) -> AsyncIterator[Compared]:
    """Compare with the coefficients of arXiv 2504.14870, section 3.2."""
    for calls in range(6):
        ours = r_tools([calls], "ppo", 4.0)[0]
        yield Compared("otc", f"ppo, {calls} calls", ours, math.cos(calls * math.pi / (2 * calls + 4.0)))
        for fewest in range(1, calls):
            mapped = 2 * fewest * calls / (calls + fewest)
            theirs = math.sin(mapped * math.pi / (2 * fewest))
            ours = r_tools([calls, fewest], "grpo", 4.0)[0]
            yield Compared("otc", f"grpo, {calls} calls, {fewest} needed", ours, theirs)
