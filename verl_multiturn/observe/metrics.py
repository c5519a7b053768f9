"""The metrics of a batch of conversations.

`stats_of` returns a dictionary of plain values for one conversation, which travels with its row. `aggregate` turns the
dictionaries of a batch into the metrics that the trainer's loggers show. `docs/train/metrics.md` lists the keys.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from verl_multiturn.certificate.receipts import CAUSES
from verl_multiturn.observe.roles import of_roles, rewards_by_role, role_of
from verl_multiturn.rollout.limits import StopReason
from verl_multiturn.rollout.outcome import Outcome, SessionReport
from verl_multiturn.rows.keys import RowKey
from verl_multiturn.rows.reward_numbers import (
    NoNumberError,
    RoleRewards,
    UnusableNumberError,
    as_reward,
    have_signal,
)
from verl_multiturn.tools.running.results import EXECUTED, CallStatus

Stats = dict[str, Any]
"""Values of one conversation, as `stats_of` returns them."""

MOST_KEYS = 10
"""Most keys of a tool's own metrics that are shown: those that most of its calls report."""

_OF_A_TOOL = (
    CallStatus.ERROR,
    CallStatus.TIMEOUT,
    CallStatus.BAD_ARGUMENTS,
    CallStatus.OVER_LIMIT,
    CallStatus.OVERLOADED,
)
"""Failures that are counted for a single tool. A malformed call, or one of an unknown name, belongs to no tool."""


class CallStats(NamedTuple):
    """Values of one call for the metrics; `queue_s` and `seconds` are times in seconds."""

    tool: str
    status: str
    attempts: int
    cached: bool
    truncated: bool
    altered: bool
    queue_s: float
    seconds: float
    reward: float
    metrics: dict[str, float]


def stats_of(outcome: Outcome) -> Stats:
    """Return the values of a conversation that the metrics need, in plain types.

    Only a session has `session`; only a conversation whose user is trained, too, has `speakers`.
    """
    session = {} if outcome.session is None else {"session": _stats_of_session(outcome, outcome.session)}
    spoken = Counter(turn.role for turn in outcome.turns if turn.sampled)
    speakers = {"roles": {role: spoken[role] for role in outcome.trained}, "trained": list(outcome.trained)}
    return {
        **session,
        **({"speakers": speakers} if outcome.trained else {}),
        "request_id": outcome.request_id,
        "outages": list(outcome.outages),
        "stop": str(outcome.stop_reason),
        "valid": outcome.valid,
        "assistant_turns": outcome.sampled_turns,
        "user_turns": outcome.user_turns,
        "differs": bool(outcome.differences),
        "generate_s": outcome.generate_s,
        "cache": (outcome.cache.given, outcome.cache.cached),
        "prefill": (outcome.cache.new, dict(outcome.cache.prompts), outcome.cache.use),
        "waited": (outcome.cache.held_s, outcome.cache.led_s),
        "tools_s": outcome.tools_s,
        "interaction_s": outcome.interaction_s,
        **({} if outcome.place_s is None else {"place_s": outcome.place_s}),
        "opening": None if outcome.opening is None else outcome.opening.text,
        "replies": [(reply.reward, numbers_of(reply.metrics)) for reply in outcome.replies],
        "conversation_score": outcome.score,
        "calc_rewards": dict(outcome.calc_rewards),
        "calls": [
            # A plain tuple, so that a process can unpickle it without this class.
            (
                call.tool,
                str(call.status),
                call.attempts,
                call.cached,
                call.truncated,
                call.altered,
                call.queue_s,
                call.seconds,
                call.reward,
                numbers_of(call.metrics),
            )
            for call in outcome.calls
        ],
    }


def _stats_of_session(outcome: Outcome, session: SessionReport) -> dict[str, Any]:
    return {
        "roots": session.roots,
        "completions": len(outcome.turns),
        "calls": sum(len(turn.said.calls) for turn in outcome.turns if turn.said is not None),
        "untrained": dict(Counter(place for place in outcome.places if isinstance(place, str))),
        "unenforced": dict(session.unenforced),
        "reward": session.reward,
        "stuck": session.stuck,
        **({"roles": _spoken(outcome, session), "trained": list(session.trained)} if session.roles else {}),
    }


def _spoken(outcome: Outcome, session: SessionReport) -> dict[str, int]:
    """Return the number of completions that were delivered, by role; 0 for one that never spoke."""
    spoken = Counter(turn.role for turn in outcome.turns if turn.said is not None)
    return {role: spoken[role] for role in session.roles}


def conversations(rows: Mapping[RowKey, Stats]) -> list[Stats]:
    """Return the stats of conversations from those of their rows.

    All rows of a conversation have the same stats but for their `turns`, which are joined, and the `score` and
    `session`, which the last row has. `group` names the conversation's prompt. Where there are roles, the last row of
    each has a `session`, or of a conversation a `role`; `roles` has these by role.

    Args:
        rows: The stats of rows by their names.
    """
    return list(by_conversation(rows).values())


def by_conversation(rows: Mapping[RowKey, Stats]) -> dict[str, Stats]:
    """Return the same as `conversations`, by the conversation's name."""
    joined: dict[str, Stats] = {}
    for key in sorted(rows, key=lambda key: rows[key].get("conversation", {}).get("row", 0)):
        before, own = joined.get(key.conversation, {}), rows[key]
        made = joined[key.conversation] = {**own, "turns": before.get("turns", []) + own.get("turns", [])}
        made["group"] = key.uid
        roles = dict(before.get("roles", {}))
        if (last := own.get("session") or own.get("role")) and (role := role_of(own)) is not None:
            roles[role] = last
        if roles:
            made["roles"] = roles
    return joined


def earned(stats: Stats) -> float | None:
    """Return a conversation's reward in all its rows; None: it is invalid, and does not measure the model.

    Args:
        stats: Those of the conversation, once its reward is there.
    """
    return math.fsum(rewards_by_role(stats).values()) if stats["valid"] else None


def aggregate(stats: Sequence[Stats]) -> dict[str, float]:
    """Return the metrics of a batch by name; an empty batch has none.

    Args:
        stats: A dictionary for each conversation, as `stats_of` returns it. It may have further keys: `score` (given by
            `compute_score`; None when that was not called), `reported` (all numbers that `compute_score` returned),
            `verdicts` (those of the reward's criteria),
            `tool_score` and `interaction_score` (the sums that the rewards of tools and interactions added to the
            score), `void` (whether a turn is void), `turns` (as `turns_of` returns them for each row, joined), `group`
            (the same for conversations of one prompt), `left_out` (the cause why the trainer has excluded it),
            `conversation` (`rows`: how many rows it has),
            `completion_score` (the sum that an agent's rewards for its completions added to the score), `roles` (as
            `conversations` adds it).
    """
    if not stats:
        return {}
    calls = [[CallStats(*call) for call in each["calls"]] for each in stats]
    by_tool: dict[str, list[CallStats]] = defaultdict(list)
    for call in (call for of_one in calls for call in of_one):
        if call.tool:  # empty for a name that the model made up, which must not become a metric
            by_tool[call.tool].append(call)
    calculated: dict[str, list[float]] = defaultdict(list)
    for each in stats:
        for tool, reward in each["calc_rewards"].items():
            calculated[tool].append(reward)
    metrics = _of_conversations(stats)
    metrics |= _of_rewards(stats, calls) | _productivity(stats) | _named("interaction/", _of_interactions(stats))
    metrics |= _named("proxy/", _of_sessions(stats)) | of_roles(stats)
    # An agent answers its own calls, so that their results are not known here.
    counts = [len(each["calls"]) + each.get("session", {}).get("calls", 0) for each in stats]
    metrics |= _named("calls/", _of_all_calls(calls, counts))
    for tool in sorted(by_tool.keys() | calculated.keys()):
        metrics |= _named(f"tools/{tool}/", _of_tool(by_tool[tool], calculated[tool]))
    return metrics


def _of_conversations(stats: Sequence[Stats]) -> dict[str, float]:
    stopped = Counter(each["stop"] for each in stats)
    return {
        "trajectories": len(stats),
        "invalid_share": sum(not each["valid"] for each in stats) / len(stats),
        "outage/conversations": sum(each["stop"] == "outage" or "left_out" in each for each in stats),
        "rendering_differences_share": sum(each["differs"] for each in stats) / len(stats),
        **_mean_of("void_share", stats, "void"),
        **_mean_and_max("assistant_turns", [each["assistant_turns"] for each in stats]),
        **_mean_and_max("user_turns", [each["user_turns"] for each in stats]),
        **_of_rows([each["conversation"]["rows"] for each in stats if "conversation" in each]),
        **_of_groups(stats),
        # Reasons that did not occur are shown too, so that no curve has a hole.
        **{f"stop/{reason}": stopped[reason] / len(stats) for reason in StopReason},
        **_percentiles("generate_s", [each["generate_s"] for each in stats]),
        **_percentiles("tools_s", [each["tools_s"] for each in stats]),
        **_percentiles("place_s", [each["place_s"] for each in stats if "place_s" in each]),
        **_of_cache([each["cache"] for each in stats if "cache" in each]),
        **_of_prefill([(*each["cache"], *each["prefill"], *each["waited"]) for each in stats if "prefill" in each]),
    }


def _of_cache(uses: Sequence[tuple[int, int]]) -> dict[str, float]:
    """Return the share of prompt tokens that engines had in their cache; nothing where none reports it."""
    given = sum(given for given, _ in uses)
    return {"cache/hit_share": sum(cached for _, cached in uses) / given} if given else {}


def _of_prefill(
    uses: Sequence[tuple[int, int, int, Mapping[int, int], float | None, float, float]],
) -> dict[str, float]:
    """Return how much engines read again, and how that was reduced; nothing where no engine reports it.

    The least that they can read is each first prompt once, with one token for each further conversation that has it,
    and the tokens that each turn adds.
    """
    prompts = [prompt for use in uses for prompt in use[3].items()]
    different = dict(prompts)
    least = sum(use[2] for use in uses) + sum(different.values()) + len(prompts) - len(different)
    if not least:
        return {}
    known = [use[4] for use in uses if use[4] is not None]
    return {
        "cache/prefilled_over_minimal": sum(given - cached for given, cached, *_ in uses) / least,
        "cache/held_s": sum(use[5] for use in uses) / len(uses),
        "cache/led_s": sum(use[6] for use in uses) / len(uses),
        **({"cache/use": max(known)} if known else {}),
    }


def _of_rows(rows: Sequence[int]) -> dict[str, float]:
    """Return how many rows conversations have; nothing where each has one."""
    return _mean_and_max("rows", rows) if any(count > 1 for count in rows) else {}


def _of_groups(stats: Sequence[Stats]) -> dict[str, float]:
    """Return how many groups teach nothing; nothing where no group has two valid conversations."""
    compared = compared_groups(stats)
    return {"groups_equal": sum(not have_signal(group) for group in compared)} if compared else {}


def compared_groups(stats: Sequence[Stats]) -> list[list[RoleRewards]]:
    """Return the rewards of each group of two or more valid conversations, for `have_signal`.

    Args:
        stats: A dictionary for each conversation, with its `group`.
    """
    rewards: dict[str, list[RoleRewards]] = defaultdict(list)
    for each in stats:
        if "group" in each and "score" in each.get("conversation", {}) and each["valid"]:
            rewards[each["group"]].append(rewards_by_role(each))
    return [group for group in rewards.values() if len(group) > 1]


def _of_rewards(stats: Sequence[Stats], calls: Sequence[Sequence[CallStats]]) -> dict[str, float]:
    reported: dict[str, list[float]] = defaultdict(list)
    for each in stats:
        for key, value in each.get("reported", {}).items():
            reported[key].append(value)
    return {
        **{
            name: value
            for key in sorted(reported)
            for name, value in _mean_of_some(f"reward/{key}/mean", reported[key], len(stats)).items()
        },
        **_named(
            "reward/verdicts/", _most_frequent([_means(each.get("verdicts", {})) for each in stats], "conversations")
        ),
        "reward/step/mean": _mean([sum(call.reward for call in of_one) for of_one in calls]),
        "reward/calc/mean": _mean([sum(each["calc_rewards"].values()) for each in stats]),
        **_mean_of("reward/compute_score/mean", stats, "score"),
        **_mean_of("reward/tools/mean", stats, "tool_score"),
        **_mean_of("reward/interaction/mean", stats, "interaction_score"),
        **_mean_of("reward/completions/mean", stats, "completion_score"),
    }


def _means(verdicts: Mapping[str, Any]) -> dict[str, float]:
    """Return the verdict of each criterion; of one for each turn the mean."""
    each = {name: list(own.values()) if isinstance(own, dict) else [own] for name, own in verdicts.items()}
    return {name: _mean(values) for name, values in each.items() if values}


def _of_interactions(stats: Sequence[Stats]) -> dict[str, float]:
    """Return the metrics of simulated users and environments; nothing where no conversation had one."""
    having = [each for each in stats if each["interaction_s"]]
    if not having:
        return {}
    rewards = [sum(reward or 0.0 for reward, _ in each["replies"]) for each in having]
    states = [[turn["state"] for turn in each.get("turns", []) if turn["state"] is not None] for each in having]
    return {
        **_mean_and_max("replies", [len(each["replies"]) for each in having]),
        "failures": sum(each["stop"] == StopReason.ENVIRONMENT_ERROR for each in having),
        "reward/mean": _mean(rewards),
        "score/mean": _mean([each["conversation_score"] for each in having]),
        "openings_differ": _groups_that_differ(having),
        "states_met_again_share": _mean([len(set(met)) < len(met) for met in states]),
        **_percentiles("seconds", [each["interaction_s"] for each in having]),
        **_named("metrics/", _most_frequent([metrics for each in having for _, metrics in each["replies"]], "replies")),
    }


def _of_sessions(stats: Sequence[Stats]) -> dict[str, float]:
    """Return the metrics of agents behind the endpoint; nothing where there was none."""
    having = [each for each in stats if "session" in each]
    if not having:
        return {}
    sessions = [each["session"] for each in having]
    rewards = [each["reward"] for each in sessions if each["reward"] is not None]
    untrained = _summed(sessions, "untrained")
    return {
        **_mean_and_max("roots", [each["roots"] for each in sessions]),
        **_mean_and_max("rows", [each["conversation"]["rows"] for each in having]),
        **_mean_and_max("completions", [each["completions"] for each in sessions]),
        **{f"untrained/{cause}": untrained[cause] for cause in CAUSES},
        **_named("unenforced/", _summed(sessions, "unenforced")),
        "agent_errors": sum(each["stop"] in (StopReason.AGENT_ERROR, StopReason.AGENT_FAILED) for each in having),
        "stuck_agents": sum(each["stuck"] for each in sessions),
        **({"reward/mean": _mean(rewards)} if rewards else {}),
    }


def _summed(sessions: Sequence[Mapping[str, Any]], key: str) -> Counter[str]:
    """Return sums of counts by name."""
    summed: Counter[str] = Counter()
    for each in sessions:
        summed.update(each[key])
    return summed


def _groups_that_differ(stats: Sequence[Stats]) -> int:
    """Count the groups whose conversations did not all begin with the same message.

    Advantages compare the conversations of a group, which should face one task.
    """
    openings: dict[Any, set[str]] = defaultdict(set)
    for each in stats:
        if each["opening"] is not None:
            openings[each.get("group")].add(each["opening"])
    return sum(len(said) > 1 for group, said in openings.items() if group is not None)


def _productivity(stats: Sequence[Stats]) -> dict[str, float]:
    """Return the correct answers per executed call, which is the tool productivity of OTC (arXiv 2504.14870)."""
    calls = sum(executed_calls(each) for each in stats)
    if not calls or all(each.get("score") is None for each in stats):
        return {}
    return {"tool_productivity": sum(is_correct(each) for each in stats) / calls}


def is_correct(stats: Stats) -> bool:
    """Return whether the answer of a conversation counts as correct.

    The conversation must be valid, `compute_score` must have given more than 0, and the `acc` that it reported, if any,
    must be more than 0 too.
    """
    score = stats.get("score")
    acc = stats.get("reported", {}).get("acc", 1.0)
    return bool(stats["valid"] and score is not None and score > 0 and acc > 0)


def executed_calls(stats: Stats) -> int:
    """Count the calls of a conversation that were executed: answered, failed or late; cached answers count too."""
    return sum(CallStats(*call).status in EXECUTED for call in stats["calls"])


def _of_all_calls(calls: Sequence[Sequence[CallStats]], counts: Sequence[int]) -> dict[str, float]:
    """Return how many calls there were, and the outcomes of those that the run's tools answered.

    Args:
        calls: The results of calls of each conversation.
        counts: The number of calls of each conversation.
    """
    flat = [call for of_one in calls for call in of_one]
    return {
        "total": sum(counts),
        **_mean_and_max("per_trajectory", counts),
        **_rates_and_times(flat, (*_OF_A_TOOL, CallStatus.MALFORMED, CallStatus.UNKNOWN_TOOL)),
    }


def _of_tool(calls: Sequence[CallStats], calculated: Sequence[float]) -> dict[str, float]:
    metrics = {"calls": float(len(calls)), **_rates_and_times(calls, _OF_A_TOOL)}
    if calls:
        metrics["step_reward/mean"] = _mean([call.reward for call in calls])
    if calculated:
        metrics["calc_reward/mean"] = _mean(calculated)
    return metrics | _named("metrics/", _own_metrics(calls))


def _rates_and_times(calls: Sequence[CallStats], statuses: Iterable[CallStatus]) -> dict[str, float]:
    """Return the rates and times of some calls. Without a call rates are 0, and times are omitted."""
    ended = Counter(call.status for call in calls)
    counts = {str(status): ended[status] for status in statuses}
    counts["cached"] = sum(call.cached for call in calls)
    counts["retried"] = sum(call.attempts > 1 for call in calls)
    counts["truncated"] = sum(call.truncated for call in calls)
    counts["altered"] = sum(call.altered for call in calls)
    waited = [call.queue_s for call in calls if call.attempts or call.status == CallStatus.OVERLOADED]
    return {
        **{f"{what}_rate": count / max(1, len(calls)) for what, count in counts.items()},
        **_percentiles("queue_s", waited),
        **_percentiles("run_s", [call.seconds for call in calls if call.attempts]),
    }


def _own_metrics(calls: Iterable[CallStats]) -> dict[str, float]:
    """Return the mean of each number that a tool itself reports, for the `MOST_KEYS` most frequent keys."""
    return _most_frequent([call.metrics for call in calls], "calls")


def _most_frequent(reported: Sequence[Mapping[str, float]], what: str) -> dict[str, float]:
    values: dict[str, list[float]] = defaultdict(list)
    for metrics in reported:
        for key, value in metrics.items():
            values[key].append(value)
    kept = sorted(values, key=lambda key: (-len(values[key]), key))[:MOST_KEYS]
    shown: dict[str, float] = {}
    for key in sorted(kept):
        shown |= {key: _mean(values[key])} | _count_of(f"{key}/{what}", len(values[key]), len(reported))
    return shown


def numbers_of(metrics: Mapping[Any, Any]) -> dict[str, float]:
    """Return the finite numbers in a dictionary that a tool or a reward function reports, as floats.

    A number is of any kind that a reward may be of: also a Decimal, or a tensor without dimensions.
    """
    numbers = {}
    for key, value in metrics.items():
        with contextlib.suppress(NoNumberError, UnusableNumberError):
            numbers[str(key)] = as_reward(value, sys.float_info.max)
    return numbers


def _named(prefix: str, metrics: Mapping[str, float]) -> dict[str, float]:
    return {prefix + key: value for key, value in metrics.items()}


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _mean_of(name: str, stats: Sequence[Stats], key: str) -> dict[str, float]:
    values = [value for each in stats if (value := each.get(key)) is not None]
    return _mean_of_some(name, values, len(stats))


def _mean_of_some(name: str, values: Sequence[float], of: int) -> dict[str, float]:
    """Return the mean of those conversations that have a number and, where not all have it, how many do."""
    if not values:
        return {}
    return {name: _mean(values)} | _count_of(f"{name.removesuffix('/mean')}/conversations", len(values), of)


def _count_of(name: str, count: int, of: int) -> dict[str, float]:
    """Return how many a mean is made of; nothing where it is made of all."""
    return {name: count} if count < of else {}


def _mean_and_max(name: str, values: Sequence[float]) -> dict[str, float]:
    return {f"{name}/mean": _mean(values), f"{name}/max": max(values)}


def _percentiles(name: str, values: Sequence[float]) -> dict[str, float]:
    if not values:
        return {}
    p50, p95 = np.percentile(values, (50, 95))
    return {f"{name}/p50": float(p50), f"{name}/p95": float(p95)}
