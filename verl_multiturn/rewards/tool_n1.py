"""The reward of Tool-N1 (arXiv 2505.00024): one step is right when it reasons and then makes exactly the gold calls.

The reward is 1 or 0. It is 1 when the text has the format `<think>…</think>` followed by calls that can be read, and
the calls are those of the ground truth. Names of tools, names of arguments and values must be the same. The order of
the calls does not matter.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from verl_multiturn.chat.parsing.call_json import read_whole_json
from verl_multiturn.errors import ConfigError
from verl_multiturn.rewards.answers import thinks_first
from verl_multiturn.rewards.score import RewardOptions, Score, Solution

_OPENING = "<tool_call>"


class ToolN1Options(RewardOptions):
    """Options of the reward `tool_n1`."""

    require_think: bool = True
    """True: the format requires `<think>…</think>`, as in the paper."""


async def reward(solution: Solution, ground_truth: Any, options: ToolN1Options) -> Score:
    """Score whether the calls of the first turn are those of the ground truth.

    The calls are read from the text that the model wrote: in `<tool_call>…</tool_call>`, as JSON of one call or of a
    list of calls. A parser's result is used only when the model writes calls in another format, because it may differ
    from the text: missing arguments become `{}`, and JSON within a text becomes an object.

    Args:
        solution: The conversation.
        ground_truth: `[{"name": …, "arguments": {…}}, …]`, or JSON text of it.
        options: Options of this reward.

    Raises:
        ConfigError: The ground truth has another form.
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
    """Return parsed calls in a form that can be compared; None when one of them could not be read."""
    try:
        return _counted([{"name": name, "arguments": read_whole_json(arguments.strip())} for name, arguments in calls])
    except (ValueError, RecursionError):
        return None


def _written_calls(text: str) -> Counter[str] | None:
    """Return the calls in a text, in a form that can be compared; None when one of them cannot be read.

    A `<tool_call>` within the reasoning opens no call. The reasoning ends with the first `</think>`: a later one may be
    in an argument, or in a tool's text.
    """
    calls: list[Any] = []
    before, ended, rest = text.partition("</think>")
    rest = rest if ended else before
    try:
        while _OPENING in rest:
            inside, closed, rest = rest.partition(_OPENING)[2].partition("</tool_call>")
            if not closed:
                return None
            value = read_whole_json(inside.strip())
            calls += value if isinstance(value, list) else [value]
        return _counted(calls)
    except (ValueError, RecursionError):
        return None


def _counted(calls: Any) -> Counter[str]:
    """Count the calls, each written as JSON with sorted keys, so that 1, 1.0 and true are three different values.

    Raises:
        ValueError: This is not a list of calls.
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
            f"got {ground_truth!r}; mend the row"
        ) from None
