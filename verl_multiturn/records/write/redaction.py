"""The data that a run does not write: entries by their name, and parts of texts by a regular expression.

It is about texts. The token ids stay, and decode to the text that the model read and wrote.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from verl_multiturn.errors import ConfigError

HIDDEN = "***"
_REGEX = "re:"
_WHOLE = ("sample", "sampling", "messages", "calls", "replies", "session", "error", "differences", "why")
"""Entries of a record or a line that are looked through; of generations, `text` alone."""
_FREE = frozenset(
    ("index", "ground_truth", "extra_info", "messages", "tools", "tools_kwargs", "interaction_kwargs", "sampling",
     "arguments", "metrics", "wishes")
)  # fmt: skip
"""Entries whose contents have no form of ours: numbers in them are hidden, too."""
_WORDS = frozenset(("nan", "inf", "-inf"))
"""Texts that represent numbers."""
_LEFT = frozenset(("events",))
"""Entries of ours that hold words of a fixed list."""


def redaction(rules: Sequence[str]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return the function that hides the rules' matches in a record or a line, as `json_text.plain` returns it.

    The redacted data still fits the schema: numbers of our own entries, such as a call's `turn`, stay.

    Args:
        rules: Names of entries, whose texts become `***` wherever they are in the record's texts, and whose numbers
            do where the contents are free; and regular expressions after `re:`, whose matches in texts become `***`.

    Raises:
        ConfigError: A rule is not a regular expression.
    """
    names = frozenset(rule for rule in rules if not rule.startswith(_REGEX))
    patterns = [_compiled(rule) for rule in rules if rule.startswith(_REGEX)]

    def hide(value: Any, named: bool, free: bool) -> Any:
        if isinstance(value, dict):
            return {key: item if not free and key in _LEFT else below(key, item, named, free)
                    for key, item in value.items()}  # fmt: skip
        if isinstance(value, list):
            return [hide(item, named, free) for item in value]
        if value is None or isinstance(value, bool) or (not free and (value in _WORDS or not isinstance(value, str))):
            return value
        if named:
            return HIDDEN
        if isinstance(value, str):
            for pattern in patterns:
                value = pattern.sub(HIDDEN, value)
        return value

    def below(key: str, value: Any, named: bool, free: bool) -> Any:
        # A session's request may name an earlier one's tools by its number.
        is_free = free or (key in _FREE and not (key == "tools" and isinstance(value, int)))
        return hide(value, named or key in names, is_free)

    def redact(entries: dict[str, Any]) -> dict[str, Any]:
        hidden = {key: below(key, value, named=False, free=False) for key, value in entries.items() if key in _WHOLE}
        if "generations" in entries:
            turns = entries["generations"] or []
            hidden["generations"] = [{**turn, "text": below("text", turn.get("text"), False, False)} for turn in turns]
        return {**entries, **hidden}

    return redact if rules else lambda entries: entries


def _compiled(rule: str) -> re.Pattern[str]:
    try:
        return re.compile(rule.removeprefix(_REGEX))
    except re.error as error:
        raise ConfigError(
            f"record_redact has {rule!r}, which is no regular expression: {error}; correct it, or name an entry"
        ) from None
