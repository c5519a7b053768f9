"""`explain`: all findings about a run, what matters most first."""

from __future__ import annotations

from verl_multiturn.observe.explain import (
    agents,
    answers,
    calls,
    drift,
    groups,
    learning,
    limits,
    rewards,
    stragglers,
    waste,
)
from verl_multiturn.observe.explain.facts import read_facts
from verl_multiturn.observe.explain.finding import SYMPTOMS, Finding, ranked
from verl_multiturn.records.read.records import Records

_FAMILIES = (groups, limits, calls, answers, learning, drift, waste, stragglers, rewards, agents)


def explain(records: Records) -> list[Finding]:
    """Return what the records of a run show, what matters most first.

    Args:
        records: The run's records.
    """
    facts = read_facts(records)
    if not facts.played:
        return [Finding(symptom, "unknown", "no conversation was recorded") for symptom in SYMPTOMS]
    return ranked(finding for family in _FAMILIES for finding in family.find(facts))
