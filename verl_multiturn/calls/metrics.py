"""Metrics that an author's method returned, as plain values that can be written as JSON."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from decimal import Decimal
from numbers import Integral, Real
from typing import Any

from verl_multiturn.calls.json_values import json_value
from verl_multiturn.describe import show
from verl_multiturn.rows.reward_numbers import plain_scalar

logger = logging.getLogger(__name__)

METRICS_CHARACTERS = 100_000
"""Largest number of characters in the metrics that one call returns."""
_DEEPEST = 20


class _Budget:
    """Characters of a value that may still be kept.

    Args:
        characters: Their number at first.
    """

    def __init__(self, characters: int) -> None:
        self.left = characters

    def takes(self, characters: int) -> bool:
        """Use up some characters, at least one, and return whether there was room for them."""
        self.left -= max(1, characters)
        return self.left >= 0


def plain_metrics(name: str, metrics: Mapping[Any, Any], kind: str = "tool") -> dict[str, Any]:
    """Return a copy of a tool's metrics that can be written as JSON.

    A value is converted by `json_value`, but a Decimal becomes a number, and a value without a form in JSON becomes
    text. Metrics beyond `METRICS_CHARACTERS` in all are omitted and logged.

    Args:
        name: The tool's name, for the log.
        metrics: The metrics as the tool returned them.
        kind: One of `KINDS`, for the log.
    """
    budget, plain = _Budget(METRICS_CHARACTERS), {}
    for key, value in metrics.items():
        text = _key(key)
        copied = _plain(value, budget, _DEEPEST) if budget.takes(len(text)) else None
        if budget.left < 0:
            what = f"metrics of over {METRICS_CHARACTERS:,} characters are left out"
            warn_once(
                f"{kind} {name!r}", what, f", from {text[:100]!r} on; return numbers, and keep the rest elsewhere"
            )
            break
        plain[text] = copied
    return plain


def _plain(value: Any, budget: _Budget, depth: int) -> Any:
    value = plain_scalar(value)
    if value is None or isinstance(value, bool):
        return value if budget.takes(4) else None
    if isinstance(value, str):
        text = str.__str__(value)
        return text if budget.takes(len(text)) else None
    if isinstance(value, Real | Decimal):
        budget.takes(8)
        try:
            return int(value) if isinstance(value, Integral) and abs(int(value)) < 2**63 else float(value)
        except Exception:  # the author's own class of numbers, or an integer too large for a float
            return show(value)
    budget.takes(2)
    if depth and isinstance(value, dict):
        pairs: dict[str, Any] = {}
        for key, item in value.items():
            text = _key(key)
            if not budget.takes(len(text)):
                break
            pairs[text] = _plain(item, budget, depth - 1)
        return pairs
    if depth and isinstance(value, list | tuple):
        items: list[Any] = []
        for item in value:
            if budget.left < 0:
                break
            items.append(_plain(item, budget, depth - 1))
        return items
    if depth and (plain := _json(value)) is not None:
        return _plain(plain, budget, depth - 1)
    text = show(value)
    return text if budget.takes(len(text)) else None


def _json(value: Any) -> Any:
    """Return JSON's form of a value other than a list, dictionary or number; None where it is empty or long."""
    try:
        return json_value(value) if math.prod(getattr(value, "shape", ())) <= METRICS_CHARACTERS else None
    except Exception:  # NoJsonError, or an error of the author's own object
        return None


def _key(key: Any) -> str:
    return str.__str__(key) if isinstance(key, str) else show(key)


_warned: set[tuple[str, str]] = set()


def warn_once(whose: str, what: str, detail: str) -> None:
    """Warn that something of an author's object is omitted, once for each object and each such thing.

    Args:
        whose: The object, for example `tool 'search'`.
        what: The omitted part, and why.
        detail: More about this first time.
    """
    if (whose, what) not in _warned:
        _warned.add((whose, what))
        logger.warning("%s: %s%s (said once)", whose, what, detail)
