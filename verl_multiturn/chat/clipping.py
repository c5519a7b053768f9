"""Cutting a text that is too long: a tool response, for the most part.

- `clip` cuts to a number of tokens, never through the middle of a character (`observation_length`);
- `truncate` cuts to a number of characters as verl does (`multi_turn.max_tool_response_length`);
- `shorten` bounds the kept part of a tool's text (`limits.response_characters`), before either of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol

Side = Literal["left", "middle", "right"]
"""Where a text that is too long loses its text."""

_MARK = "...(truncated)..."
# First guess of the most characters in a token. The window grows where the guess is too small.
_WINDOW = 16


class Encoder(Protocol):
    """The part of a Hugging Face tokenizer that this module uses."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text."""
        ...


def clip(text: str, tokens: int, side: Side, tokenizer: Encoder) -> str:
    """Cut a text to at most `tokens` tokens, with `...(truncated)...` where text is missing.

    The mark counts among the tokens. Where the mark itself does not fit, the beginning of the text is returned without
    it.

    Args:
        text: The text to cut. A text that is short enough is returned unchanged.
        tokens: The most tokens that the result may have.
        side: Where a longer text loses its text: at its `left`, `middle` or `right`.
        tokenizer: Counts the tokens, without special tokens.
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
        kept -= excess  # the mark and its neighbours can have more tokens together than apart
    return _prefix(text, tokens, tokenizer)


def _prefix(text: str, tokens: int, tokenizer: Encoder) -> str:
    """Return the longest beginning of the text that has at most `tokens` tokens."""
    return _cut(text, tokens, tokenizer, lambda length: text[:length], lambda spans: spans[tokens][0])


def _suffix(text: str, tokens: int, tokenizer: Encoder) -> str:
    """Return the longest end of the text that has at most `tokens` tokens."""
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
    """Return the longest part of a text that has at most `tokens` tokens.

    `part` returns the part with a given number of characters; `length_of` reads that number off the tokens' spans.
    """
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
    # A binary search: there are no spans, or the part has more tokens alone than within the text.
    while low < high:
        middle = (low + high + 1) // 2
        if len(tokenizer.encode(part(middle), add_special_tokens=False)) <= tokens:
            low = middle
        else:
            high = middle - 1
    return part(low)


def _spans(text: str, tokenizer: Any) -> list[tuple[int, int]] | None:
    """Return each token's `(start, end)` in the text, in characters; None when the tokenizer does not know them."""
    if not getattr(tokenizer, "is_fast", False):
        return None
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return [(start, end) for start, end in encoded["offset_mapping"]]


def truncate(text: str, length: int, side: Side) -> str:
    """Cut a text to at most `length` characters, and add a mark where text is missing.

    Args:
        text: The text to cut. A text that is short enough is returned unchanged.
        length: The most characters that are kept. The mark comes on top.
        side: Where the text loses characters.
    """
    if len(text) <= length:
        return text
    if side == "left":
        return "(truncated)..." + text[len(text) - length :]
    if side == "right":
        return text[:length] + "...(truncated)"
    half = length // 2
    return text[:half] + "...(truncated)..." + text[len(text) - half :]


def shorten(text: str, most_characters: int) -> str:
    """Return a text that tokenizers and files accept; one of more than `most_characters` loses its middle.

    The result of a longer text is a little longer than `most_characters`, since a note replaces the middle.
    """
    if len(text) > most_characters:
        half = most_characters // 2
        text = f"{text[:half]}\n…[{len(text) - 2 * half} characters left out]…\n{text[-half:]}"
    # Tokenizers and files refuse a lone surrogate; it becomes a question mark.
    return text if text.isascii() else text.encode("utf-8", "replace").decode()
