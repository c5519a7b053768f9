"""The rules of multi-turn training that a chat template keeps or breaks, as `chat.template` finds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

NO_USER_TURN = "no user turn can follow"
"""Beginning of the finding about a template that cannot append a user's message to a turn."""


class RuleEffect(StrEnum):
    """The meaning of a rule's finding for a run."""

    KEPT = "kept"
    KNOWN = "known"
    """The rule is not kept, in a way that is understood and harmless."""
    REFUSED = "refused"


@dataclass(frozen=True)
class Rule:
    """A rule, its verdict and its finding."""

    name: str
    verdict: RuleEffect
    found: str


def refusals(rules: Sequence[Rule]) -> str:
    """Return the refused rules in one sentence; "" when there is none."""
    return "; ".join(f"{rule.name}: {rule.found}" for rule in rules if rule.verdict is RuleEffect.REFUSED)
