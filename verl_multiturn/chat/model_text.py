"""Reading the public part of a model's turn: its text without the reasoning, and the tags in it.

Every function accepts any text, and needs time in proportion to its length.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def spoken(message: Mapping[str, Any]) -> str:
    """Return the text of a message without its images, its tool calls and its reasoning, stripped.

    Reasoning ends with the last `</think>`, since some chat templates open it before the turn. Reasoning that is not
    closed goes to the end of the text.
    """
    content = message.get("content")
    if isinstance(content, Sequence) and not isinstance(content, str):
        parts = [part for part in content if isinstance(part, Mapping)]
        content = "".join(text for part in parts if isinstance(text := part.get("text"), str))
    text = content if isinstance(content, str) else ""
    return text.rpartition("</think>")[2].partition("<think>")[0].strip()


def last_tag(text: str, tag: str) -> str | None:
    """Return the text in the last `<tag>…</tag>`, stripped; None without one."""
    before, closed, _ = text.rpartition(f"</{tag}>")
    _, opened, inside = before.rpartition(f"<{tag}>")
    return inside.partition(f"</{tag}>")[0].strip() if closed and opened else None
