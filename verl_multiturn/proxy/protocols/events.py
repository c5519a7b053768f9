"""Server-sent events, and shared parts of the protocols for writing answers."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

from verl_multiturn.chat.parsing.turns import ToolCall
from verl_multiturn.proxy.protocols.requests import Completion

COMMENT = b": ping\n\n"
"""Bytes that keep a connection alive and are not an event to any client."""
DONE = b"data: [DONE]\n\n"
_LEAST_LOGPROB = -9999.0
"""Stand-in for minus infinity, which JSON cannot hold."""


def data(value: dict[str, Any]) -> bytes:
    """Return an event without a name."""
    # With escapes: clients' text may come back, and a line separator in it would cut the event for some of them.
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"


def event(value: dict[str, Any]) -> bytes:
    """Return an event with the name in its `type`."""
    return f"event: {value['type']}\n".encode() + data(value)


def logprobs(completion: Completion) -> list[dict[str, Any]]:
    """Return the tokens of a completion with their log-probabilities, as OpenAI's protocols have them."""
    return [
        {
            "token": token,
            "logprob": max(logprob, _LEAST_LOGPROB),
            "bytes": list(token.encode(errors="replace")),
            "top_logprobs": [],
        }
        for token, logprob in completion.token_logprobs
    ]


def arguments_of(call: ToolCall) -> dict[str, Any]:
    """Return a call's arguments. A number that JSON cannot hold stays text."""
    arguments: dict[str, Any] = json.loads(call.arguments, parse_constant=str, parse_float=_number)
    return arguments


def _number(digits: str) -> float | str:
    return digits if math.isinf(number := float(digits)) else number


def total(completions: Sequence[Completion]) -> tuple[int, int]:
    """Return the tokens of the prompt, which is counted once, and those of all completions."""
    return completions[0].prompt_tokens, sum(each.completion_tokens for each in completions)
