"""The conversations of synthetic runs, as they are played and as they are written down.

`synthetic_runs` plays whole runs of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from verl_multiturn.records.write.records import RecordWriter

BEGAN = 1_790_000_000.0
AT_ONCE = 200
"""Records of one writer: its queue is bounded, and here they come faster than from any engine."""


@dataclass
class Size:
    """Size of a run, and its subject."""

    steps: int = 20
    groups: int = 16
    size: int = 8
    validated: int = 64
    every: int = 5
    task: str = "sums"
    """`sums` (a calculator), `choice` (four answers, no tool), `game` (an interaction), `agent` (sessions)."""
    noise: float = 1.0
    """How much times and difficulties vary."""
    speed: float = 1.0
    """How fast it is learned."""
    best: float = 0.97
    """Share of right answers in the end."""
    mode: str = "sync"
    turns: int = 2
    """Turns of a game."""
    scale: float = 1.0
    """Reward of a right answer."""
    floor: float = 0.0
    """Reward of a wrong answer."""
    drift: float = 4e-7
    """Mean |trainer - rollout log-probability| of a healthy token."""
    start: float = 0.05
    """Share of right answers in the beginning."""


@dataclass
class Called:
    """A call on its way into a record."""

    name: str
    arguments: Any
    text: str
    status: str = "ok"
    queue_s: float = 0.0
    seconds: float = 0.05


@dataclass
class Played:
    """Events of a conversation: a fault may change any of it."""

    step: int
    progress: float
    """How far the run is, from 0 to 1."""
    row: int
    truth: str
    number: int
    validation: bool
    difficulty: float
    right: bool
    answer: str
    calls: list[Called] = field(default_factory=list)
    engine_s: list[float] = field(default_factory=list)
    """Seconds of each generation."""
    tokens: list[int] = field(default_factory=list)
    """Tokens of each generation."""
    reward_s: float = 0.02
    stop: str = "finished"
    valid: bool = True
    void: bool = False
    entropy: float = 0.4
    drift: list[float] = field(default_factory=list)
    """Drift of each turn."""
    too_old: float = 0.0
    """Share of its tokens that is too old."""
    lost: int = 0
    """Completions that no client got."""
    end: str = "returned"
    """How an agent ended."""
    parts: dict[str, float] = field(default_factory=dict)
    score: float = 0.0
    advantage: float = 0.0
    joined: bool = True
    untrained: str | None = None
    said: list[str] = field(default_factory=list)
    """The model's words in turns without calls, the last one's answer excepted."""


def record_of(
    uid: str, request_id: str, talk: Played, began: float, size: Size, numbers: np.random.Generator
) -> tuple[dict[str, Any], float]:
    """Return a conversation's record, and when it had ended."""
    told: list[dict[str, Any]] = [{"role": "user", "content": f"Task {talk.row}: what is it?"}]
    spans: list[dict[str, Any]] = []
    at = began
    calls, replies, generations = [], [], []
    ids, runs, logprobs = [1] * 20, [[20, 0, -1, 0, 0]], []
    turns = max(len(talk.tokens), 1)
    for turn in range(turns):
        count = talk.tokens[turn]
        took = talk.engine_s[turn]
        spans.append({"kind": "generation", "name": "", "turn": turn, "start": at, "end": at + took})
        generations.append(_generation(len(ids), count, len(ids), at, at + took, turn))
        at += took
        ids += [7] * count
        runs.append([count, 1, talk.step, turn, 1])
        logprobs += [round(float(each), 4) for each in -numbers.exponential(talk.entropy + 1e-3, count)]
        if turn < len(talk.calls):
            call = talk.calls[turn]
            spans.append({"kind": "wait", "name": call.name, "turn": turn, "start": at, "end": at + call.queue_s})
            at += call.queue_s
            spans.append({"kind": "call", "name": call.name, "turn": turn, "start": at, "end": at + call.seconds})
            at += call.seconds
            calls.append(_call(call, turn, at))
            asked = {"id": f"c{turn}", "type": "function"}
            asked |= {"function": {"name": call.name, "arguments": call.arguments}}
            told.append({"role": "assistant", "content": "", "tool_calls": [asked]})
            told.append({"role": "tool", "content": call.text, "tool_call_id": f"c{turn}"})
        elif turn - len(talk.calls) < len(talk.said):
            spans.append({"kind": "interaction", "name": "game", "turn": turn, "start": at, "end": at + 0.05})
            at += 0.05
            told.append({"role": "assistant", "content": talk.said[turn - len(talk.calls)]})
            told.append({"role": "user", "content": "You did."})
            replies.append({"turn": turn, "text": "You did.", "reward": 0.0, "at": at})
        if turn < turns - 1:
            ids += [9] * 4
            runs.append([4, 0, -1, turn + 1, 3])
    if talk.stop == "finished" or not talk.valid:
        told.append({"role": "assistant", "content": f"Answer: {talk.answer}"})
    for lost in range(talk.lost):
        generations.append({**_generation(20, 30, None, at, at, turns + lost), "row": None, "cause": "undelivered"})
    ended = at
    spans.append({"kind": "reward", "name": "", "turn": None, "start": ended, "end": ended + talk.reward_s})
    record = {
        "schema": 2,
        "request_id": request_id,
        "uid": uid,
        "number": talk.number,
        "rerolled_from": None,
        "validation": talk.validation,
        "step": talk.step,
        "loop": "multiturn_agent",
        "began": began,
        "ended": ended,
        "row": None,
        "model": None,
        "sample": {
            "index": talk.row,
            "data_source": size.task,
            "ground_truth": talk.truth,
            "extra_info": {"index": talk.row},
            "messages": told[:1],
            "tools": ["calculator"] if size.task == "sums" else [],
            "tools_kwargs": {},
            "interaction": "game" if size.task == "game" else None,
            "interaction_kwargs": {},
        },
        "sampling": {"temperature": 0.0 if talk.validation else 1.0},
        "stop_reason": talk.stop,
        "valid": talk.valid,
        "void": talk.void,
        "error": "",
        "outages": [],
        "rows": [{"prompt_length": 20, "ids": ids, "logprobs": logprobs, "runs": runs, "images": []}],
        "generations": generations,
        "calls": calls,
        "replies": replies,
        "messages": told,
        "asked": 1,
        "generate_s": sum(talk.engine_s),
        "tools_s": sum(call.queue_s + call.seconds for call in talk.calls),
        "interaction_s": 0.05 * len(replies),
        "calc_rewards": {},
        "score": 0.0,
        "differences": [],
        "time_up": None,
        "session": {"requests": [], "roots": 1, "end": talk.end} if size.task == "agent" else None,
        "timeline": spans,
    }
    return record, ended


def _generation(given: int, count: int, start: int | None, asked: float, at: float, turn: int) -> dict[str, Any]:
    return {
        "prompt_tokens": given,
        "prompt_digest": "0" * 32,
        "max_tokens": 256,
        "tokens": count,
        "finish": "stop",
        "digest": "0" * 32,
        "row": 0,
        "start": start,
        "cause": None,
        "parent": turn - 1 if turn else None,
        "asked_at": asked,
        "at": at,
    }


def _call(call: Called, turn: int, at: float) -> dict[str, Any]:
    readable = call.status != "malformed"
    return {
        "turn": turn,
        "id": f"c{turn}",
        "tool": call.name if readable and call.status != "unknown_tool" else "",
        "name": call.name if readable else "",
        "arguments": call.arguments,
        "status": call.status,
        "text": call.text,
        "attempts": 1,
        "queue_s": call.queue_s,
        "seconds": call.seconds,
        "at": at,
    }


def write_records(folder: Path, start: str, records: Sequence[dict[str, Any]]) -> None:
    """Write records as a worker does."""
    writer = RecordWriter(folder, start)
    for record in records:
        line = {key: record[key] for key in ("request_id", "uid", "number", "validation", "step", "rerolled_from")}
        writer.begin({**line, "at": record["began"]})
        writer.keep(lambda record=record: record, {**line, "at": record["ended"]})  # type: ignore[misc]
    writer.close()
