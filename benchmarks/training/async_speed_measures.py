"""Measurements of a run of `benchmarks.async_speed`, from its metrics, its records and its tool's journal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

Metrics = Mapping[str, float]
TRAINING = ("old_log_prob", "adv", "update_actor")
"""verl's names of a step's actions with its batch."""


class Turn(NamedTuple):
    """A turn of the model: whether a call follows, when the turn began and ended, and its sampled tokens."""

    calls: bool
    begin: float
    end: float
    tokens: int


def measure(steps: Sequence[Metrics], ends: Sequence[float], journal: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the times of a run, and their causes.

    Args:
        steps: The metrics of its steps.
        ends: When each step had ended, its new weights included (`time.time`).
        journal: Its conversations, as `SlowCalculator` writes them.
    """
    began = min(each["create"] for each in journal)
    seconds = ends[-1] - began
    half = len(ends) // 2
    spent = {name: _seconds(steps, name) for name in ("gen", *TRAINING, "update_weights")}
    ages = [metrics[key] for metrics in steps for key in ("rollout/async/age/max",) if key in metrics]
    return {
        "seconds": round(seconds, 2),
        "seconds_second_half": round(ends[-1] - ends[half - 1], 2),
        "step_s": [round(step, 2) for step in np.diff([began, *ends]).tolist()],
        "idle": round(spent["gen"] / seconds, 3),
        "training_s": round(sum(spent[name] for name in TRAINING) / len(steps), 3),
        "sync_s": round(spent["update_weights"] / len(steps), 3),
        "rest_s": round((seconds - sum(spent.values())) / len(steps), 3),
        "max_age": max(ages, default=0.0),
        "called": round(sum(bool(each["calls"]) for each in journal) / len(journal), 3),
        "calls_p50_s": _mean(steps, "rollout/calls/run_s/p50"),
        "calls_p95_s": _mean(steps, "rollout/calls/run_s/p95"),
        "rerolled": sum(metrics.get("rollout/async/rerolled", 0) for metrics in steps),
        "masked_share": _mean(steps, "rollout/async/masked_share"),
        "prompts_lost": sum(metrics.get("rollout/async/prompts_lost", 0) for metrics in steps),
        "rows": sum(metrics["rollout/certificate/rows"] for metrics in steps),
        "violations": sum(metrics["rollout/certificate/violations"] for metrics in steps),
    }


def turns_of(journal: Sequence[Mapping[str, Any]], records: Sequence[Mapping[str, Any]]) -> list[Turn]:
    """Return the turns of all conversations whose calls came one after another.

    Args:
        journal: Conversations, as `SlowCalculator` writes them.
        records: Records of conversations.
    """
    tokens = {record["request_id"]: _tokens_of_turns(record) for record in records}
    turns = []
    for each in journal:
        times = [each["create"], *(time for call in each["calls"] for time in call), each["release"]]
        sampled = tokens.get(each["id"], [])
        if len(times) == 2 * len(sampled) and times == sorted(times):
            spans = zip(times[::2], times[1::2], sampled, strict=True)
            turns += [Turn(number + 1 < len(sampled), *span) for number, span in enumerate(spans)]
    return turns


def token_times(turns: Sequence[Turn]) -> tuple[float, float]:
    """Return the seconds of a token: of a request that runs alone, and the seconds that each running request adds.

    The seconds of a token in each turn are put against the mean number of requests that ran meanwhile, itself
    included, and a line is laid through them, weighted by tokens. A negative part of it becomes 0.
    """
    edges = sorted([(turn.begin, 1) for turn in turns] + [(turn.end, -1) for turn in turns])
    times = np.array([time for time, _ in edges])
    running = np.cumsum([change for _, change in edges])
    # Integral of the number of running requests until each edge.
    until = np.concatenate([[0.0], np.cumsum(running[:-1] * np.diff(times))])
    begins, ends = np.array([turn.begin for turn in turns]), np.array([turn.end for turn in turns])
    beside = (np.interp(ends, times, until) - np.interp(begins, times, until)) / (ends - begins)
    sampled = np.array([turn.tokens for turn in turns])
    per_token = (ends - begins) / sampled
    columns = np.stack([np.ones(len(turns)), beside], axis=1)
    weights = np.sqrt(sampled)
    alone, each = np.linalg.lstsq(columns * weights[:, None], per_token * weights, rcond=None)[0]
    if alone < 0:
        return 0.0, float((per_token * beside * sampled).sum() / (beside**2 * sampled).sum())
    if each < 0:
        return float((per_token * sampled).sum() / sampled.sum()), 0.0
    return float(alone), float(each)


def engine_of(turns: Sequence[Turn]) -> dict[str, float]:
    """Return the speed of the engine, and the mean tokens of turns that call and of last turns."""
    alone, each = token_times(turns)
    return {
        "token_s": round(alone, 6),
        "token_s_each": round(each, 6),
        "call_tokens": round(float(np.mean([turn.tokens for turn in turns if turn.calls])), 1),
        "answer_tokens": round(float(np.mean([turn.tokens for turn in turns if not turn.calls])), 1),
    }


def prefilling_of(
    turns: Sequence[Turn], journal: Sequence[Mapping[str, Any]], prompts: int, samples: int
) -> dict[str, float]:
    """Return the time of prefilling in a run of `sync`, and the engine's speed without it.

    The conversations of a batch begin at the same time. The seconds of their first turns are put against the tokens,
    with one slope for all batches; the remainder for no token at all is the prefilling of the whole batch.

    Args:
        turns: Turns of the conversations.
        journal: The conversations, as `SlowCalculator` writes them.
        prompts: Number of groups in a batch.
        samples: Number of conversations in a group.

    Returns:
        `prefill_s`: seconds for one conversation; `decode_s` and `decode_s_each`: `token_times` without prefilling.
    """
    batch_of = {each["create"]: each["row"] // prompts for each in journal}
    first = [turn for turn in turns if turn.calls and turn.begin in batch_of]
    batches = np.array([batch_of[turn.begin] for turn in first])
    points = np.array([[turn.tokens, turn.end - turn.begin] for turn in first])
    means = np.array([points[batches == batch].mean(axis=0) for batch in batches])
    tokens, seconds = (points - means).T
    mean_tokens, mean_seconds = points.mean(axis=0)
    whole = max(0.0, float(mean_seconds - (tokens @ seconds) / (tokens @ tokens) * mean_tokens))
    later = [turn._replace(begin=turn.begin + whole) if turn.begin in batch_of else turn for turn in turns]
    alone, each = token_times([turn for turn in later if turn.begin < turn.end])
    return {
        "prefill_s": round(whole / (prompts * samples), 6),
        "decode_s": round(alone, 6),
        "decode_s_each": round(each, 6),
    }


def calls_of(journal: Sequence[Mapping[str, Any]], samples: int) -> list[list[int | None]]:
    """Return how often each conversation called, by row and sample; None for those that had not ended.

    Args:
        journal: Conversations, as `SlowCalculator` writes them. Of a group that was begun anew the last attempt counts.
        samples: Number of conversations in a group.
    """
    calls: list[list[int | None]] = [[None] * samples for _ in range(max(each["row"] for each in journal) + 1)]
    for each in sorted(journal, key=lambda each: each["create"]):
        calls[each["row"]][each["sample"]] = len(each["calls"])
    return calls


def _tokens_of_turns(record: Mapping[str, Any]) -> list[int]:
    return [generation["tokens"] for generation in record["generations"] if generation["row"] is not None]


def _seconds(steps: Sequence[Metrics], name: str) -> float:
    return sum(metrics.get(f"timing_s/{name}", 0.0) for metrics in steps)


def _mean(steps: Sequence[Metrics], key: str) -> float | None:
    found = [metrics[key] for metrics in steps if key in metrics]
    return round(sum(found) / len(found), 3) if found else None
