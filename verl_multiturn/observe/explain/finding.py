"""`Finding`: one symptom of a run, with its evidence; and the order in which findings are reported.

Invariants:
- if data for a symptom was not recorded, the symptom is `unknown`, never silent: silence means that it was looked for;
- a symptom that a run cannot have (an agent's failure where there is no agent) is not looked for, and gives no finding.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["alarm", "note", "unknown"]

# Faults that spoil learning come first, then losses, then the model's behaviour, and consequences come last:
# a failing tool explains wrong answers, and not the other way round.
_LAYERS = (
    ("advantages_contradict", "drift", "rewards_fail", "reward_drowned"),
    ("calls_fail", "calls_late", "calls_malformed", "calls_unknown", "calls_refused", "calls_wait", "agents_fail"),
    ("raised", "invalid", "cut", "evicted", "rerolled", "stale", "groups_failed", "in_no_row"),
    ("calls_vanish", "one_answer", "guesses"),
    ("stragglers",),
    ("groups_wrong", "groups_right"),
    ("validation_behind", "entropy", "rows_unused"),
    ("unrecorded",),
)
SYMPTOMS = tuple(name for layer in _LAYERS for name in layer)
"""Names of all symptoms; `docs/reference/symptoms.md` has a paragraph for each."""
OF_TRAINER = frozenset(
    [
        "advantages_contradict",
        "drift",
        "evicted",
        "rerolled",
        "stale",
        "groups_failed",
        "validation_behind",
        "entropy",
        "rows_unused",
    ]
)
"""Symptoms that only a training can have: an evaluation and a gateway have no trainer."""
_LAYER = {name: number for number, layer in enumerate(_LAYERS) for name in layer}
_KINDS: tuple[Kind, ...] = ("alarm", "note", "unknown")
EXAMPLES = 3
"""The most request ids of a finding."""


@dataclass(frozen=True)
class Finding:
    """One symptom of a run."""

    symptom: str
    """One of `SYMPTOMS`."""
    kind: Kind
    """`alarm`: somebody should do something. `note`: it is so, and may be as it should. `unknown`: not recorded."""
    said: str
    """The observation, in a sentence."""
    remedy: str = ""
    """The remedy."""
    evidence: dict[str, Any] = field(default_factory=dict)
    """The numbers behind it."""
    requests: tuple[str, ...] = ()
    """Request ids of examples; fewer than three where there are no more."""
    share: float = 0.0
    """Part of the conversations, calls, tokens, groups or seconds that it touches, from 0 to 1."""

    def as_json(self) -> dict[str, Any]:
        """Return it in plain types."""
        return {
            "symptom": self.symptom,
            "kind": self.kind,
            "said": self.said,
            "remedy": self.remedy,
            "evidence": self.evidence,
            "requests": list(self.requests),
            "share": round(self.share, 6),
        }


def ranked(findings: Iterable[Finding]) -> list[Finding]:
    """Return findings, most important first: alarms before notes, causes before consequences, much before little."""
    return sorted(findings, key=lambda each: (_KINDS.index(each.kind), _LAYER[each.symptom], -each.share))


def examples(requests: Iterable[str]) -> tuple[str, ...]:
    """Return the first request ids, each once."""
    return tuple(list(dict.fromkeys(requests))[:EXAMPLES])


def level(share: float, note: float, alarm: float) -> Kind | None:
    """Return the level of a share by its two thresholds; None: nothing.

    Args:
        share: The share.
        note: From here on it is a note.
        alarm: From here on it is an alarm.
    """
    if share >= alarm:
        return "alarm"
    return "note" if share >= note else None


def percent(share: float) -> str:
    """Return a share as text, such as `12 %`; below 10 % with a digit more."""
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.1f} %"
