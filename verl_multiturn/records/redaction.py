"""What a run does not write: entries by their name, and parts of texts by a regular expression.

It is about texts. The token ids stay, and decode to what the model read and wrote.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from verl_multiturn.errors import ConfigError

HIDDEN = "***"
_REGEX = "re:"
_WHOLE = ("sample", "messages", "calls", "replies", "session", "error", "differences")
"""Entries of a record that are looked through; of generations, `text` alone."""


def redaction(rules: Sequence[str]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return the function that hides what the rules name in a record, as `json_text.plain` returns it.

    Args:
        rules: Names of entries, whose texts and numbers become `***` wherever they are in the record's texts; and
            regular expressions after `re:`, whose matches in texts become `***`.

    Raises:
        ConfigError: A rule is no regular expression.
    """
    names = frozenset(rule for rule in rules if not rule.startswith(_REGEX))
    patterns = [_compiled(rule) for rule in rules if rule.startswith(_REGEX)]

    def hide(value: Any, named: bool) -> Any:
        if isinstance(value, dict):
            return {key: hide(item, named or key in names) for key, item in value.items()}
        if isinstance(value, list):
            return [hide(item, named) for item in value]
        if named and value is not None and not isinstance(value, bool):
            return HIDDEN
        if isinstance(value, str):
            for pattern in patterns:
                value = pattern.sub(HIDDEN, value)
        return value

    def redact(record: dict[str, Any]) -> dict[str, Any]:
        hidden = {key: hide(value, key in names) for key, value in record.items() if key in _WHOLE}
        turns = [{**turn, "text": hide(turn.get("text"), "text" in names)} for turn in record.get("generations") or []]
        return {**record, **hidden, "generations": turns}

    return redact if rules else lambda record: record


def _compiled(rule: str) -> re.Pattern[str]:
    try:
        return re.compile(rule.removeprefix(_REGEX))
    except re.error as error:
        raise ConfigError(
            f"record_redact has {rule!r}, which is no regular expression: {error}; correct it, or name an entry"
        ) from None
