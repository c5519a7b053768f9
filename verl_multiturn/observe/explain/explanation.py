"""`explain`: all findings about a run, the most important first."""

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
from verl_multiturn.observe.explain.finding import OF_TRAINER, SYMPTOMS, Finding, ranked
from verl_multiturn.records.read.records import Records

_FAMILIES = (groups, limits, calls, answers, learning, drift, waste, stragglers, rewards, agents)


def explain(records: Records) -> list[Finding]:
    """Return the findings from a run's records, the most important first.

    Args:
        records: The run's records.
    """
    facts = read_facts(records)
    if not facts.played:
        return [Finding(symptom, "unknown", "no conversation was recorded") for symptom in SYMPTOMS]
    found = (finding for family in _FAMILIES for finding in family.find(facts))
    return ranked(each for each in found if records.has_trainer or each.symptom not in OF_TRAINER)
