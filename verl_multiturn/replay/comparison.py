"""`differences`: where two records of one conversation differ, such as a run's record and a replay's.

Excluded are names, times, and values that no replay can make: how long something took, the contents of the engine's
cache, the pixels of images. Of images the sizes are compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from verl_multiturn.records.rows import columns
from verl_multiturn.replay.calls import ReplayDifference

_WHOLE = (
    "valid",
    "void",
    "error",
    "outages",
    "asked",
    "calc_rewards",
    "score",
    "differences",
    "time_up",
)
_GENERATION = (
    "prompt_tokens",
    "prompt_digest",
    "max_tokens",
    "tokens",
    "finish",
    "digest",
    "row",
    "start",
    "cause",
    "ids",
    "logprobs",
    "versions",
    "parent",
    "summary",
    "state",
    "reward",
    "text",
    "call_ids",
    "role",
)
_CALL = (
    "id",
    "tool",
    "name",
    "arguments",
    "status",
    "text",
    "images",
    "reward",
    "metrics",
    "attempts",
    "cached",
    "truncated",
    "altered",
)
_REPLY = ("text", "images", "reward", "done", "truncated", "state", "metrics", "shows")
_SESSION = ("roots", "reward", "by_id", "end", "problem")
_ROLES = ("rewards", "roles", "trained")
"""Entries of a session that are empty where there are no roles, and that older records have not."""
_SPEAKERS = ("scores", "trained")
"""The same of a conversation."""
_REQUEST = ("parent", "generations", "delivered", "order", "refused", "role")
_COLUMNS = ("ids", "mask", "logprobs", "versions", "turn_ids", "sources")


def differences(
    recorded: Mapping[str, Any], now: Mapping[str, Any], until: int | None = None
) -> list[ReplayDifference]:
    """Return where two records of one conversation differ, in the order of its turns.

    Args:
        recorded: The record, as it is read from disk.
        now: The record made of it now, in the same types.
        until: Number of the turn at which the replay ended; then only the answers before it are compared. None: it
            came to its end.
    """
    found = [*_answered(recorded, now, until)]
    if until is None:
        found += [*_rows(recorded["rows"], now["rows"])]
        found += [*_listed("generations", _GENERATION, recorded["generations"], now["generations"], lambda i, _: i)]
        found += [*_listed("messages", None, recorded["messages"], now["messages"], lambda i, _: None)]
        last = len(recorded["generations"]) - 1
        found += _fields("", ("stop_reason",), recorded, now, None if last < 0 else last)
        found += _fields("", _WHOLE, recorded, now, None)
        one, other = ({name: each.get(name) or None for name in _SPEAKERS} for each in (recorded, now))
        found += _fields("", _SPEAKERS, one, other, None)
        found += [*_session(recorded.get("session"), now.get("session"))]
    end = len(recorded["generations"])
    return sorted(found, key=lambda each: end if each.turn is None else each.turn)


def _answered(recorded: Mapping[str, Any], now: Mapping[str, Any], until: int | None) -> Iterator[ReplayDifference]:
    for kind, fields in (("calls", _CALL), ("replies", _REPLY)):
        old, new = (
            [each for each in record[kind] if until is None or each["turn"] is None or each["turn"] < until]
            for record in (recorded, now)
        )
        yield from _listed(kind, fields, old, new, lambda _, each: each["turn"])


def _listed(
    name: str, fields: Sequence[str] | None, old: Sequence[Any], new: Sequence[Any], turn_of: Any
) -> Iterator[ReplayDifference]:
    for index, (one, other) in enumerate(zip(old, new, strict=False)):
        if fields is None:
            if (a := _without_pixels(one)) != (b := _without_pixels(other)):
                yield ReplayDifference(turn_of(index, one), f"{name}[{index}]", None, a, b)
        else:
            yield from _fields(f"{name}.", fields, one, other, turn_of(index, one))
    if len(old) != len(new):
        longer, index = max(old, new, key=len), min(len(old), len(new))
        yield ReplayDifference(turn_of(index, longer[index]), name, None, len(old), len(new))


def _fields(
    prefix: str, fields: Sequence[str], old: Mapping[str, Any], new: Mapping[str, Any], turn: int | None
) -> list[ReplayDifference]:
    return [
        ReplayDifference(turn, f"{prefix}{field}", None, one, other)
        for field in fields
        if (one := old.get(field)) != (other := new.get(field))
        and (one := _without_pixels(one)) != (other := _without_pixels(other))
    ]


def _rows(old: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]) -> Iterator[ReplayDifference]:
    for index, (one, other) in enumerate(zip(old, new, strict=False)):
        where = f"rows[{index}]."
        yield from _fields(where, ("prompt_length", "images"), one, other, None)
        if all(one[name] == other[name] for name in ("ids", "runs", "logprobs")):
            continue
        a, b = columns(one), columns(other)
        for name in _COLUMNS:
            if a[name] == b[name]:
                continue
            at = next((i for i, (x, y) in enumerate(zip(a[name], b[name], strict=False)) if x != y), None)
            if at is None and name != "ids":  # one is longer, which is reported for the ids
                continue
            at = min(len(a[name]), len(b[name])) if at is None else at
            values = [each[name][at] if at < len(each[name]) else None for each in (a, b)]
            turns = a["turn_ids"] if at < len(a["turn_ids"]) else b["turn_ids"]
            if values[0] == values[1] or all(x != x for x in values):
                continue
            yield ReplayDifference(turns[at], f"{where}{name}", at, *values)
    if len(old) != len(new):
        yield ReplayDifference(None, "rows", None, len(old), len(new))


def _session(old: Mapping[str, Any] | None, new: Mapping[str, Any] | None) -> Iterator[ReplayDifference]:
    if old is None or new is None:
        return
    yield from _fields("session.", _SESSION, old, new, None)
    one, other = ({name: each.get(name) or None for name in _ROLES} for each in (old, new))
    yield from _fields("session.", _ROLES, one, other, None)
    pairs = zip(old["requests"], new["requests"], strict=False)
    for index, (first, second) in enumerate(pairs):
        turn = min(first["generations"], default=None)
        yield from _fields(f"session.requests[{index}].", _REQUEST, first, second, turn)


def _without_pixels(value: Any) -> Any:
    """Return a value with the size alone of each image."""
    if isinstance(value, Mapping):
        if value.keys() == {"digest", "size"}:
            return list(value["size"])
        return {key: _without_pixels(item) for key, item in value.items()}
    return [_without_pixels(item) for item in value] if isinstance(value, list) else value
