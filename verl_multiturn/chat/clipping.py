"""Cutting text to a number of tokens, never through a character."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from verl_multiturn.rollout.limits import Side

_MARK = "...(truncated)..."
# A first guess of how many characters a token has at most; the window grows where it is too small.
_WINDOW = 16


class Encoder(Protocol):
    """What is used of a Hugging Face tokenizer."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...


def clip(text: str, tokens: int, side: Side, tokenizer: Encoder) -> str:
    """The text within `tokens` tokens, a mark where text is missing included.

    Args:
        side: where a longer text loses its text: at its `left`, `middle` or `right`.
    """

    def count(part: str) -> int:
        return len(tokenizer.encode(part, add_special_tokens=False))

    if len(_prefix(text, tokens, tokenizer)) == len(text):
        return text
    marks = count(_MARK)
    kept = tokens - marks
    while kept > 0:
        head = _prefix(text, {"left": 0, "middle": kept // 2, "right": kept}[side], tokenizer)
        tail = _suffix(text, {"left": kept, "middle": kept - kept // 2, "right": 0}[side], tokenizer)
        clipped = head + _MARK + tail
        excess = count(clipped) - tokens
        if excess <= 0:
            return clipped
        kept -= excess  # the mark and its neighbours make more tokens together than apart
    return _prefix(text, tokens, tokenizer)


def _prefix(text: str, tokens: int, tokenizer: Encoder) -> str:
    """The longest beginning of the text that has at most `tokens` tokens."""
    return _cut(text, tokens, tokenizer, lambda length: text[:length], lambda spans: spans[tokens][0])


def _suffix(text: str, tokens: int, tokenizer: Encoder) -> str:
    """The longest end of the text that has at most `tokens` tokens."""
    return _cut(
        text,
        tokens,
        tokenizer,
        lambda length: text[len(text) - length :],
        lambda spans: spans[-1][1] - spans[-tokens - 1][1],
    )


def _cut(
    text: str,
    tokens: int,
    tokenizer: Encoder,
    part: Callable[[int], str],
    length_of: Callable[[list[tuple[int, int]]], int],
) -> str:
    """The longest `part` of at most `tokens` tokens; `length_of` reads its length off the tokens' spans."""
    if tokens <= 0:
        return ""
    window = _WINDOW * tokens
    while True:
        candidate = part(min(window, len(text)))
        ids = tokenizer.encode(candidate, add_special_tokens=False)
        if len(ids) > tokens or window >= len(text):
            break
        window *= 4
    if len(ids) <= tokens:
        return candidate
    spans = _spans(candidate, tokenizer)
    high = len(candidate) if spans is None else length_of(spans)
    low = 0
    if spans is not None and len(tokenizer.encode(part(high), add_special_tokens=False)) <= tokens:
        return part(high)
    # Without spans, and where a part alone has more tokens than it had within the whole.
    while low < high:
        middle = (low + high + 1) // 2
        if len(tokenizer.encode(part(middle), add_special_tokens=False)) <= tokens:
            low = middle
        else:
            high = middle - 1
    return part(low)


def _spans(text: str, tokenizer: Any) -> list[tuple[int, int]] | None:
    """Where each token lies in the text; None when the tokenizer cannot tell."""
    if not getattr(tokenizer, "is_fast", False):
        return None
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return [(start, end) for start, end in encoded["offset_mapping"]]
