"""Tool-N1 (arXiv 2505.00024): one step, right when it reasons and then makes exactly the calls asked for.

The reward is binary: 1 for the format `<think>…</think>` and then calls that can be read, with the same calls as the
ground truth, else 0. Names, arguments' names and values have to be the same, the order of the calls does not matter.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from verl_multiturn.errors import ConfigError
from verl_multiturn.rewards.formats import thinks_first
from verl_multiturn.rewards.score import RewardOptions, Score, Solution

_OPENING = "<tool_call>"


class ToolN1Options(RewardOptions):
    require_think: bool = True
    """Whether the format asks for `<think>…</think>`; the paper's does."""


async def reward(solution: Solution, ground_truth: Any, options: ToolN1Options) -> Score:
    """Whether the calls of the first turn are the ground truth's.

    Calls are read in what the model wrote: JSON, a call or a list of them, in `<tool_call>…</tool_call>`. What a parser
    makes of a call is more than was written (arguments that are missing become `{}`, a text of JSON becomes an
    object), so it counts only where the model's format is another one.

    Args:
        ground_truth: `[{"name": …, "arguments": {…}}, …]`, or JSON text of that.

    Raises:
        ConfigError: it is something else.
    """
    gold = _gold_calls(ground_truth, solution.data_source)
    first = solution.texts[0] if solution.texts else ""
    thought = thinks_first(first) if options.require_think else True
    parsed = solution.calls[0] if solution.calls else ()
    written = solution.response if len(solution.texts) == 1 and _OPENING in solution.response else first
    calls = _written_calls(written) if _OPENING in written or not parsed else _parsed_calls(parsed)
    answered = bool(calls) or not gold
    formatted = thought and calls is not None
    right = formatted and calls == gold
    return Score(float(right), float(right), float(formatted), float(answered))


def _parsed_calls(calls: tuple[tuple[str, str], ...]) -> Counter[str] | None:
    """The calls in a form that can be compared; None when one could not be read."""
    try:
        return _counted([{"name": name, "arguments": json.loads(arguments)} for name, arguments in calls])
    except (ValueError, RecursionError):
        return None


def _written_calls(text: str) -> Counter[str] | None:
    """Those of a text that nobody has parsed; a mark in the reasoning opens none."""
    calls: list[Any] = []
    rest = text.rpartition("</think>")[2]
    try:
        while _OPENING in rest:
            inside, closed, rest = rest.partition(_OPENING)[2].partition("</tool_call>")
            if not closed:
                return None
            value = json.loads(inside)
            calls += value if isinstance(value, list) else [value]
        return _counted(calls)
    except (ValueError, RecursionError):
        return None


def _counted(calls: Any) -> Counter[str]:
    """Each call as JSON with sorted keys: 1, 1.0 and true are three values.

    Raises:
        ValueError: there is something else among them.
    """
    if not isinstance(calls, list):
        raise ValueError("no list")
    texts = []
    for call in calls:
        if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
            raise ValueError("no call")
        if not isinstance(call.get("arguments"), dict):
            raise ValueError("no arguments")
        texts.append(json.dumps([call["name"], call["arguments"]], sort_keys=True))
    return Counter(texts)


def _gold_calls(ground_truth: Any, data_source: str) -> Counter[str]:
    try:
        return _counted(json.loads(ground_truth) if isinstance(ground_truth, str) else ground_truth)
    except (ValueError, RecursionError):
        raise ConfigError(
            f"ground_truth of {data_source!r}: expected a list of {{'name': …, 'arguments': {{…}}}} or its JSON text, "
            f"got {ground_truth!r}"
        ) from None
