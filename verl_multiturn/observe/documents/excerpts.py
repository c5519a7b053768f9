"""`excerpts_of`: how a conversation begins and ends, in a few words, for a table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

EXCERPTS = ("question", "answer")
"""The names of the excerpts, as the page shows them."""
_EXCERPT = 120
"""Characters of an excerpt."""


def excerpts_of(record: Mapping[str, Any] | None) -> dict[str, str]:
    """Return the beginning of the last user message of a conversation's data row, and of its last answer.

    Args:
        record: The record; None: there is none, and the excerpts are empty.
    """
    if record is None:
        return dict.fromkeys(EXCERPTS, "")
    messages, asked = record["messages"], record["asked"]
    return {"question": _last(messages[:asked], "user"), "answer": _last(messages[asked:], "assistant")}


def _last(messages: Iterable[Mapping[str, Any]], role: str) -> str:
    texts = [_text(each.get("content")) for each in messages if each.get("role") == role]
    words = " ".join((texts[-1] if texts else "").split())
    return words if len(words) <= _EXCERPT else f"{words[: _EXCERPT - 1]}…"


def _text(content: Any) -> str:
    if isinstance(content, list):
        return " ".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping))
    return content if isinstance(content, str) else ""
